"""transformers' Trainer, and its subclasses (Seq2SeqTrainer, TRL's), with an offloaded model.

    trainer = Trainer(model, args, train_dataset=data)     # the script, as it is
    embed(trainer, inf.Policy(params="nvme", optim="nvme", nvme="/mnt/nvme0", ram="8GiB"))
    trainer.train()

`from_pretrained` reads a checkpoint straight to the tiers of a policy, and `save_pretrained` writes
one; neither has the model in memory as a whole. `DriveFigures` is a callback that logs the drives
beside the loss.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

import infinity as inf
from infinity.integrations import _trainer, _weights
from infinity.integrations._figures import DriveFigures

T = TypeVar("T")


def embed(trainer: T, policy: inf.Policy | None = None, load: Any = None) -> T:
    """Offload the model of a trainer, and its reference model if it has one, and return the
    trainer: from here on its methods run on the engine.

    Call it after the trainer is built, and before `trainer.train()`, on all ranks: they get the
    values of the first one, as with DDP. A model that is offloaded already stays so. Checkpoints of
    adapters (PEFT's, and those of `model.add_adapter`) are adapters and their states. load: of
    `inf.offload`, for a model on the meta device.

    Raises: ValueError for an optimizer of torch, for `deepspeed` and `fsdp`, for several GPUs
    without ranks, and for a model of each rank's own; as `inf.offload`. `trainer.train()` raises
    ValueError for names of `TrainingArguments(optim=...)` that the engine has no optimizer for.
    """
    embedded: T = _trainer.embed_trainer(trainer, policy, load)
    return embedded


def from_pretrained(
    cls: Any, path: str | os.PathLike[str], policy: inf.Policy, **kwargs: Any
) -> Any:
    """Return the model that `cls.from_pretrained(path, **kwargs)` returns, offloaded: its values go
    from the files to the tiers some at a time.

    cls: `AutoModelForCausalLM`, another Auto class, or a model's own. path: a directory of
    safetensors on this machine. kwargs: those of `from_pretrained` (dtype, attn_implementation,
    num_labels, ...) but the ones that place or convert. For a GPU give `Policy(device=...)`, the
    trainer's: the model is built on meta, and would compute on the CPU. Tensors that the files lack
    (a new head) are initialised by the model's own rules, and named in a warning of transformers;
    those are the same on all ranks. On several ranks all call it.

    Raises: ValueError for arguments that place or convert, and for a directory without config or
    safetensors; as `inf.offload`.
    """
    return _weights.from_pretrained(cls, Path(path), policy, kwargs)


def save_pretrained(
    model: Any, directory: str | os.PathLike[str], max_shard_size: int | str | None = None
) -> None:
    """Write an offloaded model of transformers so that `from_pretrained(directory)` loads it, with
    the hub's names. On several ranks all call it; the first writes.

    max_shard_size: bytes of a file, which is in memory as a whole. None: 128 MiB, or a hundredth
    of the model where that is more.

    Raises: as `inf.export_safetensors`.
    """
    first = not dist.is_initialized() or dist.get_rank() == 0
    path = Path(directory)
    if first:
        path.mkdir(parents=True, exist_ok=True)
    _weights.save_pretrained(model, path, max_shard_size=max_shard_size, first=first)


__all__ = ["DriveFigures", "embed", "from_pretrained", "save_pretrained"]
