"""LLaMA-Factory's SFT with an offloaded model: python llamafactory_infinity.py sft.yaml

Its YAML has `low_cpu_mem_usage: false`, so that the model is loaded to RAM.
"""

from __future__ import annotations

from typing import Any

import transformers
from llamafactory.train import tuner
from llamafactory.train.sft import workflow

import infinity as inf
from infinity.integrations.transformers import embed

POLICY = {"params": "nvme", "optim": "nvme", "nvme": "/mnt/nvme0", "ram": "64GiB"}


def offload_trainers(policy: dict[str, Any]) -> None:
    """Let `run_sft` build trainers whose models are offloaded: it has no place for a plugin."""
    # Else the Trainer's constructor moves the whole model to the GPU.
    transformers.TrainingArguments.place_model_on_device = False  # type: ignore[assignment]
    own = workflow.CustomSeq2SeqTrainer

    def offloaded(*args: Any, **kwargs: Any) -> Any:
        trainer = own(*args, **kwargs)
        return embed(trainer, inf.Policy(**{"device": trainer.args.device, **policy}))

    workflow.CustomSeq2SeqTrainer = offloaded


if __name__ == "__main__":
    offload_trainers(POLICY)
    tuner.run_exp()
