"""Accelerate: an Accelerator whose models may be offloaded.

    accelerator = attach(Accelerator(...))
    model = inf.offload(model, policy)              # after attach: the process group exists then
    opt = torch.optim.AdamW(model.parameters(), lr=1e-4)
    model, opt, loader, sched = accelerator.prepare(model, opt, loader, sched)

The rest of the script is unchanged, on one rank and on several. Models that are not offloaded are
prepared by accelerate as usual.

    prepare             does not move an offloaded model or wrap it in DDP: the engine reduces its
                        gradients. Applies autocast and torch.compile. Replaces a torch optimizer
                        over its parameters by infinity's with the same update rule
    no_sync             enters handle.no_sync(), so `accumulate` works with every update mode
    save_state          saves parameters, masters and moments by inf.save, next to accelerate's
                        files; of a PEFT model only the trained parameters
    load_state          restores them bit for bit, on any number of ranks
    save_model          streams safetensors
    free_memory         closes the engines; on several ranks end_training does, too

save_state, load_state, save_model and get_state_dict are collective.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DDPCommunicationHookType, DistributedType

import infinity as inf
from infinity._embedding import (
    STATES,
    check_all_offloaded,
    check_methods,
    engine_optimizer,
    has_adapters,
    note_steps_as,
    only_engine,
    optimizers_of,
    rebind,
    twin_of,
)

log = logging.getLogger("infinity")

check_methods(
    Accelerator,
    (
        "prepare", "prepare_model", "prepare_optimizer", "prepare_scheduler", "no_sync",
        "get_state_dict", "save_state", "load_state", "save_model", "free_memory", "end_training",
        "unwrap_model",
        "register_save_state_pre_hook", "register_load_state_pre_hook",
    ),
    "accelerate",
    "1.15",
)  # fmt: skip

_TYPES = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)


def attach(accelerator: Accelerator) -> Accelerator:
    """Make `accelerator` work with offloaded models, by setting its class to a subclass. Returns
    the accelerator.

    Raises: ValueError for features that an engine does not support: FSDP, DeepSpeed, Megatron,
    tensor parallelism, fp8, DDP's communication hooks.
    """
    if isinstance(accelerator, _Offloading):
        return accelerator
    if accelerator.distributed_type not in _TYPES:
        raise ValueError(
            f"attach: an Accelerator of {accelerator.distributed_type} distributes the states "
            "itself; use one that would use DDP, and the engine shards them (Policy(zero=...))"
        )
    if getattr(accelerator, "parallelism_config", None) is not None:
        raise ValueError(
            f"attach: parallelism_config={accelerator.parallelism_config}: the engine has its own "
            "sharding and takes whole models; leave it out"
        )
    if accelerator.mixed_precision == "fp8":
        raise ValueError(
            "attach: mixed_precision='fp8' replaces modules after they were offloaded; "
            "use 'bf16' or 'no'"
        )
    handler = accelerator.ddp_handler
    if handler is not None and handler.comm_hook != DDPCommunicationHookType.NO:
        raise ValueError(
            f"attach: comm_hook={handler.comm_hook} is for DDP, which wraps no offloaded model; "
            "Policy(reduce_dtype=...) and Policy(qgz=True) reduce in fewer bits"
        )
    cls = type(accelerator)
    # Also for subclasses of Accelerator: their methods remain.
    accelerator.__class__ = type(f"Offloading{cls.__name__}", (_Offloading, cls), {})
    return accelerator


class _States(dict[str, torch.Tensor]):
    """Placeholder for an offloaded model's state dict while save_state runs."""


class _Offloading(Accelerator):  # type: ignore[misc]
    """Methods that differ for offloaded models."""

    # True while save_state runs: get_state_dict would copy the whole model to RAM.
    _offloading_saves = False
    # (torch's, infinity's) optimizers. Schedulers refer to torch's until prepare_scheduler.
    _offloading_twins: tuple[tuple[torch.optim.Optimizer, torch.optim.Optimizer], ...] = ()

    # -- prepare -----------------------------------------------------------------------------------

    def prepare_model(
        self,
        model: torch.nn.Module,
        device_placement: bool | None = None,
        evaluation_mode: bool = False,
    ) -> Any:
        if inf.offloaded_modules(model):
            whole = self.unwrap_model(model, keep_torch_compile=False)
            check_all_offloaded(whole, "accelerator.prepare")
            # This mode applies autocast and compile, without DDP.
            device_placement, evaluation_mode = False, True
        return super().prepare_model(model, device_placement, evaluation_mode)

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> Any:
        # A wrapped optimizer of infinity needs no replacement.
        theirs = engine_optimizer(optimizer) is None
        if theirs and any(inf.is_offloaded(param) for param in _params_of(optimizer)):
            twin = _replacement_of(optimizer)
            self._offloading_twins += ((optimizer, twin),)
            optimizer = twin
        return super().prepare_optimizer(optimizer, device_placement)

    def prepare_scheduler(self, scheduler: Any) -> Any:
        for before, now in self._offloading_twins:
            rebind(scheduler, before, now)
        return super().prepare_scheduler(scheduler)

    # -- training ----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def no_sync(self, model: torch.nn.Module) -> Iterator[None]:
        engines = inf.offloaded_modules(model)
        with contextlib.ExitStack() as stack:
            for engine in engines:
                stack.enter_context(inf.handle(engine).no_sync())
            if not engines:
                stack.enter_context(super().no_sync(model))
            yield

    # -- checkpoints -------------------------------------------------------------------------------

    def get_state_dict(self, model: torch.nn.Module, unwrap: bool = True) -> Any:
        if self._offloading_saves and inf.offloaded_modules(model):
            return _States()
        return super().get_state_dict(model, unwrap)

    def save_state(
        self, output_dir: str | os.PathLike[str] | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        saves: list[inf.Save] = []

        def save(_models: Any, weights: list[Any], directory: str) -> None:
            weights[:] = [each for each in weights if not isinstance(each, _States)]
            for engine, place in self._places(directory):
                opts = optimizers_of(engine, self._optimizers)
                # The script loads a frozen base itself, so checkpoints omit it.
                saves.append(inf.save(engine, opts or None, place, frozen=not has_adapters(engine)))

        # Registered last, so that it runs after the script's hooks: these may expect one entry of
        # `weights` for each model.
        hook = self.register_save_state_pre_hook(save)
        self._offloading_saves = True
        try:
            written = super().save_state(output_dir, *args, **kwargs)
        finally:
            self._offloading_saves = False
            hook.remove()
        # The saves ran while accelerate wrote its files.
        for each in saves:
            each.wait()
        return written

    def load_state(
        self, input_dir: str | os.PathLike[str] | None = None, *args: Any, **kwargs: Any
    ) -> None:
        def load(models: list[Any], directory: str) -> None:
            models[:] = [each for each in models if not inf.offloaded_modules(each)]
            for engine, place in self._places(directory):
                if not place.is_dir():
                    raise ValueError(
                        f"load_state: {directory} has no {place.name}/, so it was saved without an "
                        "attached Accelerator or with fewer offloaded models; "
                        "inf.load_safetensors(model, file) takes its weights alone"
                    )
                inf.restore(engine, optimizers_of(engine, self._optimizers) or None, place)

        # Runs before accelerate loads the optimizers' manifests: they must match restored states.
        hook = self.register_load_state_pre_hook(load)
        try:
            super().load_state(input_dir, *args, **kwargs)
        finally:
            hook.remove()

    def _places(self, directory: str | os.PathLike[str]) -> list[tuple[torch.nn.Module, Path]]:
        """Return each offloaded model with its states' directory, numbered like accelerate's files.
        """
        engines = [engine for model in self._models for engine in inf.offloaded_modules(model)]
        return [
            (engine, Path(directory) / (f"{STATES}_{index}" if index else STATES))
            for index, engine in enumerate(engines)
        ]

    def save_model(
        self,
        model: torch.nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "512MB",
        safe_serialization: bool = True,
    ) -> None:
        """Write weights as accelerate does. For an offloaded model one file is in memory at a time,
        which is why the default of `max_shard_size` is smaller.
        """
        if not inf.offloaded_modules(model):
            super().save_model(model, save_directory, max_shard_size, safe_serialization)
            return
        if not safe_serialization:
            raise ValueError(
                "save_model(safe_serialization=False): a pickle holds the whole model in memory; "
                "leave it out, and safetensors are streamed"
            )
        engine = only_engine(model, "accelerator.save_model")
        # Names of the state dict: load_checkpoint_in_model expects them.
        inf.export_safetensors(
            engine, save_directory, shard_bytes_max=max_shard_size, names="modules"
        )

    def free_memory(self, *objects: Any) -> Any:
        _close((*self._models, *objects))
        self._offloading_twins = ()
        return super().free_memory(*objects)

    def end_training(self) -> Any:
        # Close first: on several ranks end_training destroys the process groups that engines use.
        if self.use_distributed:
            _close(self._models)
        return super().end_training()


def _close(objects: Iterable[Any]) -> None:
    for model in objects:
        if isinstance(model, torch.nn.Module):
            for engine in inf.offloaded_modules(model):
                inf.handle(engine).close()


# -- optimizers ------------------------------------------------------------------------------------


def _params_of(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _replacement_of(optimizer: torch.optim.Optimizer) -> Any:
    """Return infinity's optimizer with the same update rule over the same groups.

    Raises: ValueError for settings that it refuses, and for an optimizer that has states.
    """
    try:
        twin = twin_of(optimizer).build(optimizer.param_groups)
    except ValueError as error:
        raise ValueError(f"accelerator.prepare: {error}") from error
    log.info("prepare: infinity.%s replaces %s", twin.title, type(optimizer).__name__)
    note_steps_as(optimizer, twin)
    return twin


__all__ = ["attach"]
