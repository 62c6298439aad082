"""transformers' Trainer, and its subclasses (Seq2SeqTrainer, TRL's), with an offloaded model.

    trainer = Trainer(model, args, train_dataset=data)     # the unchanged script
    embed(trainer, inf.Policy(params="nvme", optim="nvme", nvme="/mnt/nvme0", ram="8GiB"))
    trainer.train()

`from_pretrained` streams a checkpoint to a policy's tiers and `save_pretrained` streams it back;
neither holds the whole model in memory. The callback `DriveFigures` logs drive statistics with the
loss. The Trainer methods that work differently are in `_trainer.py`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

import infinity as inf
from infinity.integrations import _trainer, _weights
from infinity.integrations._trainer import DriveFigures

T = TypeVar("T")


def embed(trainer: T, policy: inf.Policy | None = None, load: Any = None) -> T:
    """Offload a trainer's model, and its reference model if there is one, and return the trainer,
    whose methods then use the engine.

    Call it after the trainer is built and before `trainer.train()`. Collective: all ranks get rank
    0's values, as with DDP. A model that is already offloaded keeps its policy. With adapters
    (PEFT's, or those of `model.add_adapter`) checkpoints contain the adapters and their states.
    load: as in `inf.offload`, for a model on the meta device.

    Raises: ValueError for a torch optimizer, for `deepspeed` and `fsdp`, for several GPUs in one
    process, and for a model offloaded for another number of ranks; as `inf.offload`.
    `trainer.train()` raises ValueError if infinity has no optimizer for `TrainingArguments.optim`.
    """
    embedded: T = _trainer.embed_trainer(trainer, policy, load)
    return embedded


def from_pretrained(
    cls: Any, path: str | os.PathLike[str], policy: inf.Policy, **kwargs: Any
) -> Any:
    """Return the model of `cls.from_pretrained(path, **kwargs)`, offloaded: its values are streamed
    from the files to the tiers. Collective.

    cls: `AutoModelForCausalLM`, another Auto class, or a model class. path: a local directory of
    safetensors. kwargs: those of `from_pretrained` (dtype, attn_implementation, num_labels, ...)
    except arguments that place or convert values. On a GPU give the trainer's device as
    `Policy(device=...)`: the model is built on meta and computes on the CPU otherwise. Tensors that
    the files lack (a new head) are initialised by the model's `initialize_weights`, the same on all
    ranks; a warning of transformers names them.

    Raises: ValueError for arguments that place or convert values, and for a directory without
    config.json or safetensors; as `inf.offload`.
    """
    return _weights.from_pretrained(cls, Path(path), policy, kwargs)


def save_pretrained(
    model: Any, directory: str | os.PathLike[str], max_shard_size: int | str | None = None
) -> None:
    """Write an offloaded transformers model with the hub's names, for `from_pretrained(directory)`.
    Collective; rank 0 writes the configuration.

    max_shard_size: bytes of a file; one whole file is in memory at a time. None: 128 MiB, or a
    hundredth of the model if that is larger.

    Raises: as `inf.export_safetensors`.
    """
    first = not dist.is_initialized() or dist.get_rank() == 0
    path = Path(directory)
    if first:
        path.mkdir(parents=True, exist_ok=True)
    _weights.save_pretrained(model, path, max_shard_size=max_shard_size, first=first)


__all__ = ["DriveFigures", "embed", "from_pretrained", "save_pretrained"]
