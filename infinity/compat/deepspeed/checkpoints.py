"""Checkpoints of a DeepSpeedEngine: a directory of `inf.save` for each tag, and a file "latest".

    save_dir/latest            the tag of the newest checkpoint
    save_dir/<tag>/            parameters, masters, moments, buffers (`inf.save`); and counts, loss
                               scale, schedule and the script's client_state
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

import infinity as inf
from infinity._src.base.atomic_file import replaced
from infinity._src.base.paths import absolute
from infinity.compat.deepspeed import comm
from infinity.compat.deepspeed.errors import DeepSpeedRefusal
from infinity.compat.deepspeed.optimizers import ZeROOptimizer
from infinity.compat.deepspeed.parameters import gather_whole

log = logging.getLogger("infinity")

LATEST = "latest"
_COUNTS = ("global_steps", "global_samples", "skipped_steps")


class Checkpointed(Protocol):
    """The attributes of DeepSpeedEngine that this module uses."""

    module: torch.nn.Module
    optimizer: ZeROOptimizer | None
    basic_optimizer: Any
    lr_scheduler: Any
    world_size: int
    global_rank: int
    global_steps: int

    def begin_step(self) -> None:
        """Restart micro-batch counting: the next micro-batch is the first of a step."""


@dataclasses.dataclass(frozen=True)
class Wanted:
    """Parts to load from a checkpoint besides the parameters."""

    optimizer: bool
    scheduler: bool
    counts: bool


def save(
    engine: Checkpointed,
    directory: str | os.PathLike[str],
    tag: Any,
    client_state: dict[str, Any],
    *,
    latest: bool,
    frozen: bool,
) -> None:
    """Implement `engine.save_checkpoint`."""
    if directory is None or not str(directory):
        raise DeepSpeedRefusal(f"save_dir must be a non-empty string, not {directory!r}")
    name = f"global_step{engine.global_steps}" if tag is None else str(tag)
    _check_tag(engine, name)
    optimizer, scheduler = engine.optimizer, engine.lr_scheduler
    extra = {
        "client_state": client_state,
        "counts": {key: getattr(engine, key) for key in _COUNTS},
        "scale": None if optimizer is None else optimizer.scale_state(),
        "lr_scheduler": None if scheduler is None else scheduler.state_dict(),
        "dp_world_size": engine.world_size,
    }
    home = absolute(directory, "directory")
    home.mkdir(parents=True, exist_ok=True)
    try:
        saving = inf.save(
            engine.module, engine.basic_optimizer, home / name, extra=extra, frozen=frozen
        )
    except ValueError as error:
        if "extra=" not in str(error):
            raise
        raise DeepSpeedRefusal(
            f"client_state {sorted(client_state)}, or the schedule's state: {error}. The arguments "
            "of a command line can be saved as vars(args)"
        ) from error
    saving.wait()
    if latest and engine.global_rank == 0:
        # Atomically, since another process may read the file at any time.
        with replaced(home / LATEST, partial=home / f".{LATEST}.partial") as file:
            file.write(name.encode())
    comm.barrier(comm.cpu_group())


def _check_tag(engine: Checkpointed, tag: str) -> None:
    """Raise if the ranks' tags differ, whatever checkpoint.tag_validation says: all ranks write one
    directory."""
    if engine.world_size == 1:
        return
    tags: list[Any] = [None] * engine.world_size
    dist.all_gather_object(tags, tag, group=comm.cpu_group())
    if len(set(tags)) > 1:
        raise DeepSpeedRefusal(
            f"The checkpoint tag name '{tag}' is not consistent across all ranks ({tags}): give "
            "the same tag on all"
        )


def newest_tag(home: Path) -> str | None:
    """Return the tag that the file "latest" names; None where there is no such file."""
    newest = home / LATEST
    return newest.read_text(encoding="utf-8").strip() if newest.is_file() else None


def load(
    engine: Checkpointed,
    directory: str | os.PathLike[str],
    tag: Any,
    wanted: Wanted,
    custom_load_fn: Callable[..., Any] | None,
    *,
    strict: bool,
) -> tuple[str | None, dict[str, Any] | None]:
    """Implement `engine.load_checkpoint`."""
    home = absolute(directory, "directory")
    if tag is None and (tag := newest_tag(home)) is None:
        log.warning(
            "load_checkpoint: %s is not there, so nothing is loaded; give a tag to load another "
            "checkpoint",
            home / LATEST,
        )
        return None, None
    path = home / str(tag)
    if any(path.glob("*_model_states.pt")):
        raise DeepSpeedRefusal(
            f"{path} was written by DeepSpeed itself: load it by inf.load_deepspeed("
            f"engine.module, {str(path)!r}, opt=engine.optimizer.optimizer)"
        )
    # The values before the restore; custom_load_fn chooses the saved values that replace them.
    mine = None if custom_load_fn is None else _copied(engine.module)
    restored = inf.restore(
        engine.module, engine.basic_optimizer if wanted.optimizer else None, path, strict=strict
    )
    gather_whole(engine.module)
    # The restore dropped the gradients of this step's earlier micro-batches.
    engine.begin_step()
    if engine.global_rank == 0:
        for note in restored.notes:
            log.info("load_checkpoint: %s: %s", path, note)
    if mine is not None:
        saved = _copied(engine.module)
        load_module(engine.module, mine, True, None)
        load_module(engine.module, saved, True, custom_load_fn)
    extra = restored.extra or {}
    if wanted.counts:
        for key, value in extra.get("counts", {}).items():
            setattr(engine, key, value)
        if engine.optimizer is not None and extra.get("scale") is not None:
            engine.optimizer.load_scale_state(extra["scale"])
    scheduler = engine.lr_scheduler
    if wanted.scheduler and scheduler is not None and extra.get("lr_scheduler") is not None:
        scheduler.load_state_dict(extra["lr_scheduler"])
    return str(path), extra.get("client_state", {})


def load_module(
    module: torch.nn.Module,
    state: dict[str, Any],
    strict: bool,
    custom_load_fn: Callable[..., Any] | None,
) -> None:
    """Load a state dict into a module, by custom_load_fn if that is given. Collective."""
    if custom_load_fn is None:
        module.load_state_dict(state, strict=strict)
        return
    with inf.handle(module).gather(module.parameters()):
        custom_load_fn(src=state, dst=module)


def _copied(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


def consolidated(module: torch.nn.Module, *, frozen: bool) -> dict[str, torch.Tensor] | None:
    """Return a module's state dict on rank 0, in CPU memory, and None on other ranks. Gathers one
    submodule at a time. Tied parameters share a tensor. Collective.
    """
    handle, first = inf.handle(module), comm.get_rank() == 0
    state: dict[str, torch.Tensor] = {}
    copies: dict[int, torch.Tensor] = {}
    for prefix, each in module.named_modules(remove_duplicate=False):
        start = f"{prefix}." if prefix else ""
        params = {
            name: param
            for name, param in each.named_parameters(recurse=False, remove_duplicate=False)
            if frozen or param.requires_grad
        }
        with handle.gather(params.values()):
            for name, param in params.items() if first else ():
                if id(param) not in copies:
                    copies[id(param)] = param.detach().to("cpu", copy=True)
                state[start + name] = copies[id(param)]
        for name, buffer in each.named_buffers(recurse=False, remove_duplicate=False):
            if first and name not in each._non_persistent_buffers_set:
                state[start + name] = buffer.detach().to("cpu", copy=True)
    return state if first else None


def save_new(value: Any, path: Path) -> None:
    """Write a file by torch.save and rename it into place, so that several ranks may write it. A
    symbolic link at `path` is replaced, not followed. Raises: OSError, or torch's RuntimeError if
    the write fails; then no partial file remains."""
    with replaced(path) as file:
        torch.save(value, file)


def save_weights(
    module: torch.nn.Module, directory: str | os.PathLike[str], name: str, *, frozen: bool
) -> None:
    """Write a module's state dict by torch.save, on rank 0. Collective."""
    place = absolute(directory, "save_dir")
    state = consolidated(module, frozen=frozen)
    if state is not None:
        path = place / name
        path.parent.mkdir(parents=True, exist_ok=True)
        save_new(state, path)
    comm.barrier(comm.cpu_group())
