"""torchtitan's Trainer with everything offloaded. Experimental.

    config = llama3_8b()                                          # a torchtitan Trainer.Config
    config.model_spec.parallelize_fn = parallelize(policy)        # in place of FSDP
    config.optimizer = derive(config.optimizer, InfinityOptimizers.Config)
    config.checkpoint = derive(
        config.checkpoint, InfinityCheckpoints.Config, last_save_model_only=False
    )

(`derive` is in `torchtitan.config.override`.) The Trainer builds the model on meta.
`parallelize_fn` offloads it with the values of its `init_weights`; the Trainer's next calls of
`to_empty` and `init_weights`, which would allocate the model, then do nothing. All ranks are
data-parallel, whatever the `data_parallel_*_degree` settings are. Gradients are sums over ranks, as
torchtitan expects. It always computes their norm, so `update="backward"` needs `generations=2`.

Tested: torchtitan 0.3.0's Trainer with Llama 3 on CPUs, on one and two ranks, with accumulation,
clipping, full and selective checkpointing, the chunked loss, checkpoints. Not tested: GPUs, MoE,
Flux, quantized and LoRA converters, the validator.
"""

from __future__ import annotations

import copy
import errno
import inspect
import logging
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchtitan.components.checkpointer import BaseCheckpointManager
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.protocols.model import BaseModel
from torchtitan.trainer import Trainer

import infinity as inf
from infinity._embedding import STATES, check_methods, has_states, only_engine
from infinity.errors import AioError

log = logging.getLogger("infinity")

TESTED = "0.3.0"
check_methods(BaseModel, ("to_empty", "init_weights"), "torchtitan", TESTED)
check_methods(
    OptimizersContainer,
    ("_resolve_optimizer_factory", "_build_impl_kwargs", "state_dict", "load_state_dict"),
    "torchtitan",
    TESTED,
)
check_methods(
    BaseCheckpointManager,
    ("_save", "_load", "_maybe_wait_for_staging", "_wait_for_saving", "_close"),
    "torchtitan",
    TESTED,
)
check_methods(Trainer, ("state_dict", "load_state_dict"), "torchtitan", TESTED)

_OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "AdamW": inf.AdamW,
    "SGD": inf.SGD,
    "Lion": inf.Lion,
    "Muon": inf.Muon,
}
_GROUP_KEYS = {"Muon": {"matrixwise", "transform_on"}}
"""Keys of parameter groups that are not arguments of the optimizer's class."""
_STEP = re.compile(r"step-(\d+)")


# -- the model -------------------------------------------------------------------------------------


def parallelize(policy: inf.Policy | None = None) -> Callable[..., nn.Module]:
    """Return a `parallelize_fn` for a `ModelSpec` that offloads the model instead of sharding it,
    and applies the configuration's activation checkpointing.

    The function raises ValueError for unsupported settings: tensor, pipeline, context and expert
    parallelism, `enable_cpu_offload`, compiled blocks, CUDA graphs, a `mixed_precision_param` other
    than `dtype`.
    """

    def parallelize_fn(
        model: nn.Module,
        *,
        parallel_dims: Any,
        training: Any,
        parallelism: Any,
        compile_config: Any,
        ac_config: Any,
        dump_folder: str,
    ) -> nn.Module:
        _check(parallel_dims, training, parallelism, compile_config)
        inf.offload(model, policy, init=lambda: _in_memory(model))
        # After the offload, so that checkpoints' names contain no wrapper.
        if ac_config is not None:
            ac_config.build(dump_folder=dump_folder).apply(model)
        _skip_once(model, "to_empty")
        _skip_once(model, "init_weights")
        if dist.is_initialized() and dist.get_world_size() > 1:
            _sum_over_ranks(model, dist.get_world_size())
        return model

    return parallelize_fn


def _check(parallel_dims: Any, training: Any, parallelism: Any, compile_config: Any) -> None:
    for name, what in (
        ("tp", "tensor"),
        ("pp", "pipeline"),
        ("cp", "context"),
        ("ep", "expert"),
    ):
        degree = getattr(parallel_dims, name)
        if degree > 1:
            raise ValueError(
                f"parallelism.{what}_parallel_degree={degree}: an offloaded model is split over "
                f"data-parallel ranks alone; set {what}_parallel_degree to 1"
            )
    if parallelism.spmd_backend == "full_dtensor":
        raise ValueError(
            "parallelism.spmd_backend='full_dtensor': parameters of an offloaded model are plain "
            "tensors; set 'spmd_types' or 'partial_dtensor'"
        )
    if training.enable_cpu_offload:
        raise ValueError(
            "training.enable_cpu_offload is for FSDP: set it to False, and give "
            "inf.Policy(params='cpu', optim='cpu'), which does the same"
        )
    if compile_config.enable and "model" in compile_config.components:
        raise ValueError(
            "compile.components has 'model': torchtitan compiles each block as one graph, but the "
            "engine gathers parameters inside of blocks; set compile.components to ['loss']"
        )
    if not training.disable_cuda_graphs:
        raise ValueError(
            "training.disable_cuda_graphs=False: the engine cannot gather parameters inside a "
            "captured CUDA graph; set it to True"
        )
    if training.mixed_precision_param != training.dtype:
        raise ValueError(
            f"training.mixed_precision_param={training.mixed_precision_param!r} with "
            f"dtype={training.dtype!r} is FSDP's way to fp32 masters; set both to "
            f"{training.mixed_precision_param!r}: the engine keeps masters in fp32"
        )


def _in_memory(model: nn.Module) -> Any:
    """Return a copy of the meta model in CPU memory, initialised by its `init_weights`."""
    # The model is on meta: deepcopy copies structure and wrappers, no values.
    fresh: Any = copy.deepcopy(model)
    made: dict[int, torch.Tensor] = {}
    for module in fresh.modules():
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is None:
                    continue
                # Not `to_empty`: `inf.offload(init=)` allocates torch.empty's memory when written.
                if id(tensor) not in made:
                    made[id(tensor)] = _empty(tensor)
                held[name] = made[id(tensor)]
    with torch.no_grad():
        fresh.init_weights()
    return fresh


def _empty(tensor: torch.Tensor) -> torch.Tensor:
    out = torch.empty(tensor.shape, dtype=tensor.dtype)
    return nn.Parameter(out, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else out


def _skip_once(model: nn.Module, name: str) -> None:
    """Make the next call of a method do nothing: the model already has its values."""

    def skipped(*args: object, **kwargs: object) -> nn.Module:  # noqa: ARG001 - of the method
        del model.__dict__[name]
        return model

    model.__dict__[name] = skipped


def _sum_over_ranks(model: nn.Module, world: int) -> None:
    """Scale gradients so that they become sums over the ranks: the engine computes means, while
    torchtitan has already divided the loss by the tokens of all ranks.
    """

    def scale(_: nn.Module, __: Any, out: torch.Tensor) -> None:
        if out.requires_grad:
            out.register_hook(lambda grad: grad * world)

    # The chunked loss calls the head outside the model; all other gradients flow through the head.
    last = getattr(model, "lm_head", None)
    (model if last is None else last).register_forward_hook(scale)


# -- optimizers ------------------------------------------------------------------------------------


class InfinityOptimizers(OptimizersContainer):
    """torchtitan's optimizer container with infinity's optimizers, by name: AdamW, SGD, Lion, Muon.
    torchtitan's DistMuon is not supported: it splits projections of attention into heads.

    `implementation` is ignored: infinity has its own kernels. Raises: ValueError for another
    optimizer, for unknown arguments, and for a model that is not offloaded.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        """As OptimizersContainer.Config."""

    def __init__(self, config: Any, *, model_parts: list[nn.Module]) -> None:
        for part in model_parts:
            only_engine(part, "InfinityOptimizers")
        for group in config.param_groups:
            _check_group(group)
        super().__init__(config, model_parts=model_parts)

    @staticmethod
    def _resolve_optimizer_factory(name: str) -> Callable[..., Any]:
        return _OPTIMIZERS[name]

    @staticmethod
    def _build_impl_kwargs(config: Any) -> dict[str, Any]:
        if config.implementation == "fused_opt_states_bf16":
            raise ValueError(
                "optimizer.implementation='fused_opt_states_bf16': the policy sets the format of "
                "states; set 'fused' and inf.Policy(state='bf16')"
            )
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Raise RuntimeError: states rest on their tiers and are not copied."""
        raise RuntimeError(
            "optimizer states of an offloaded model are not copied into a state dict; set "
            "config.checkpoint = derive(config.checkpoint, InfinityCheckpoints.Config)"
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:  # noqa: ARG002
        """Raise as `state_dict`."""
        self.state_dict()


def _check_group(group: Any) -> None:
    if group.optimizer_name not in _OPTIMIZERS:
        raise ValueError(
            f"optimizer_name={group.optimizer_name!r} of pattern {group.pattern!r} cannot update "
            f"offloaded states; choose one of {', '.join(_OPTIMIZERS)}"
        )
    name = group.optimizer_name
    known = inspect.signature(_OPTIMIZERS[name]).parameters.keys() | _GROUP_KEYS.get(name, set())
    surplus = sorted(group.optimizer_kwargs.keys() - known)
    if surplus:
        raise ValueError(
            f"optimizer_kwargs of pattern {group.pattern!r} has {', '.join(surplus)}, which "
            f"inf.{name} does not take; leave it out"
        )


# -- checkpoints -----------------------------------------------------------------------------------

_UNUSED: dict[str, Any] = {
    "initial_load_path": None,
    "last_save_model_only": False,
    "last_save_in_hf": False,
    "create_seed_checkpoint": False,
    "exclude_from_loading": [],
}


class InfinityCheckpoints(BaseCheckpointManager):
    """Checkpoints by `inf.save`, written while training runs. They can be resumed on any number of
    ranks, with any policy.

    The last checkpoint has the same format; `inf.export_safetensors` writes weights alone. Raises:
    ValueError for settings of DCP's manager that have no counterpart here.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseCheckpointManager.Config):
        """As BaseCheckpointManager.Config."""

    def __init__(
        self,
        config: Any,
        *,
        dataloader: Any,
        model_parts: list[nn.Module],
        optimizers: Any,
        lr_schedulers: Any,
        states: dict[str, Any],
        sd_adapter: Any,  # noqa: ARG002 - of the interface
        base_folder: str = "",
    ) -> None:
        self.enable = config.enable
        if not self.enable:
            return
        for name, unused in _UNUSED.items():
            if getattr(config, name) != unused:
                raise ValueError(
                    f"checkpoint.{name}={getattr(config, name)!r} is not known to "
                    f"InfinityCheckpoints; leave it at {unused!r}"
                )
        if not isinstance(optimizers, InfinityOptimizers):
            raise ValueError(
                f"InfinityCheckpoints saves the states of InfinityOptimizers, not of "
                f"{type(optimizers).__name__}; set config.optimizer = derive(config.optimizer, "
                "InfinityOptimizers.Config)"
            )
        self.config = config
        # Absolute: it is used again at later steps, to remove old checkpoints.
        self.folder = (Path(base_folder) / config.folder).absolute()
        self.model = only_engine(model_parts[0], "InfinityCheckpoints")
        self.optimizers = list(optimizers)
        self.states = {**states, "lr_scheduler": lr_schedulers, "dataloader": dataloader}
        self.save_future = None
        self._begun: inf.Save | None = None

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        config = self.config
        first = curr_step == 1 and config.enable_first_step_checkpoint
        if config.load_only or not (first or last_step or curr_step % config.interval == 0):
            return False
        self._end_save()
        directory = self.folder / f"step-{curr_step}" / STATES
        extra = {name: part.state_dict() for name, part in self.states.items()}
        self._begun = inf.save(self.model, self.optimizers, directory, extra=extra)
        if last_step:
            self._end_save()
        return True

    def _load(self, step: int = -1) -> bool:
        steps = [step] if step != -1 else sorted(self._steps(), reverse=True)
        for each in steps:
            directory = self.folder / f"step-{each}" / STATES
            try:
                extra = inf.restore(self.model, self.optimizers, directory).extra
            except AioError as error:
                # The run was killed during its save of this step.
                if error.errno != errno.ENOENT or step != -1:
                    raise
                log.warning("%s has no complete checkpoint; trying an earlier one", directory)
                continue
            for name, part in self.states.items():
                part.load_state_dict(extra[name])
            return True
        return False

    def _steps(self) -> list[int]:
        """Return the steps that have a checkpoint in the folder."""
        found = ((_STEP.fullmatch(path.name), path) for path in self.folder.glob("step-*"))
        return [int(match.group(1)) for match, path in found if match and has_states(path)]

    def _end_save(self) -> None:
        """Wait for the last save, then remove all but the newest `keep_latest_k` checkpoints."""
        if self._begun is None:
            return
        self._begun.wait()
        self._begun = None
        keep = self.config.keep_latest_k
        if keep and (not dist.is_initialized() or dist.get_rank() == 0):
            for step in sorted(self._steps())[:-keep]:
                shutil.rmtree(self.folder / f"step-{step}")

    def _maybe_wait_for_staging(self) -> None:
        """Do nothing: an update that would overwrite states waits until the save has read them."""

    def _wait_for_saving(self) -> None:
        self._end_save()

    def _close(self) -> None:
        self._end_save()


__all__ = ["InfinityCheckpoints", "InfinityOptimizers", "parallelize"]
