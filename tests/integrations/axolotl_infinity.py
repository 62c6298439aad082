"""axolotl with an offloaded model: a plugin that its YAML names.

plugins: [axolotl_infinity.InfinityPlugin]
device_map: cpu
infinity: {params: nvme, optim: nvme, nvme: /mnt/nvme0, ram: 64GiB}
"""

from __future__ import annotations

from typing import Any

import transformers
from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel

import infinity as inf
from infinity.integrations.transformers import embed

# Else the Trainer's constructor moves the whole model to the GPU, before any plugin sees it.
transformers.TrainingArguments.place_model_on_device = False  # type: ignore[assignment]


class InfinityArgs(BaseModel):
    """Keys of the YAML: fields of inf.Policy."""

    infinity: dict[str, Any] | None = None


class InfinityPlugin(BasePlugin):  # type: ignore[misc]
    """Offloads what axolotl has built, and saves it when it is trained."""

    def get_input_args(self) -> str:
        """Name the arguments of this plugin."""
        return f"{InfinityArgs.__module__}.InfinityArgs"

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        """Offload, after the trainer has been built."""
        policy = {"device": trainer.args.device, **(cfg.infinity or {})}
        self.trainer = embed(trainer, inf.Policy(**policy))

    def post_train(self, cfg: Any, model: Any) -> None:
        """Save. axolotl calls this on all ranks, and afterwards saves on rank 0 alone."""
        if self.trainer is not None:
            self.trainer.save_model(cfg.output_dir)
            model.save_pretrained = lambda *_, **__: None
            self.trainer = None  # axolotl calls this once more, after its own save
