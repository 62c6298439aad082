"""`initialize`: makes an engine of a model, its optimizer and its schedule.

    read      read and check arguments and configuration. Errors found here leave everything
              unchanged: no process group, no cast, nothing offloaded
    join      create the process group, unless one exists
    cast      cast parameters and buffers to the configuration's dtypes; broadcast rank 0's values
    offload   call `inf.offload`, and build the optimizer over the offloaded parameters
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import LRScheduler

import infinity as inf
from infinity.compat.deepspeed import _transformers, comm
from infinity.compat.deepspeed.accelerator import get_accelerator
from infinity.compat.deepspeed.engine import DeepSpeedEngine
from infinity.compat.deepspeed.errors import DeepSpeedRefusal
from infinity.compat.deepspeed.optimizers import (
    DeepSpeedZeroOptimizer,
    DeepSpeedZeroOptimizer_Stage3,
    OptimizerPlan,
    ZeROOptimizer,
    loss_scaler,
    plan_optimizer,
)
from infinity.compat.deepspeed.parameters import gather_whole, note_module, note_zero_param
from infinity.compat.deepspeed.schedules import scheduler_class
from infinity.compat.deepspeed.settings import Settings
from infinity.compat.deepspeed.utilities import check_dataset
from infinity.compat.deepspeed.zero.init import cast
from infinity.compat.deepspeed.zero.leaf_modules import flag_configured, leaf_units

log = logging.getLogger("infinity")

Returned = tuple[DeepSpeedEngine, ZeROOptimizer | None, Any, Any]


def initialize(
    args: Any = None,
    model: torch.nn.Module | None = None,
    optimizer: torch.optim.Optimizer | Callable[..., torch.optim.Optimizer] | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int = comm.DEFAULT_PORT,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    mesh_param: tuple[int, ...] | None = None,
    config_params: str | os.PathLike[str] | Mapping[str, Any] | None = None,
) -> Returned:
    """Offload a model by a DeepSpeed configuration, and return (engine, optimizer, loader,
    schedule). Collective. Blocks until all values are on their tiers.

    args: an object with `deepspeed_config` if `config` is None, and optionally `local_rank`.
    model: an ordinary module, or one built under `zero.Init`. It becomes `engine.module`; its
    parameters become sharded ones. optimizer: a torch optimizer over this model, or a function that
    builds one from parameters; infinity's optimizer with the same update rule and parameter groups
    replaces it. None: the configuration's optimizer; if it has none, the model cannot train until a
    later `initialize` gives one. model_parameters: parameters or parameter groups, for the
    configuration's optimizer or that function. lr_scheduler: a schedule, or a function that builds
    one from an optimizer. training_data, collate_fn: for the returned loader. config: a mapping,
    the path of a JSON file, or a JSON object in base64; config_params: its older name. mpu,
    mesh_param: must not split layers or sequences over ranks.

    Raises: DeepSpeedRefusal (a ValueError) naming the value and the fix; nothing has changed then.
    `inf.offload` and infinity's optimizer may raise later, after the model has been cast.
    """
    if model is None:
        raise DeepSpeedRefusal("deepspeed.initialize requires a model: give model=")
    _check_parallelism(mpu, mesh_param)
    settings = Settings.read(_config_of(args, config, config_params), _world_size())
    _check_args(args)
    _check_client(optimizer, lr_scheduler)
    settings.check_filled(
        _world_size(),
        optimizer=optimizer is None,
        scheduler=lr_scheduler is None
        and (optimizer is not None or settings.run.optimizer is not None),
    )
    device = get_accelerator().device()
    policy = _with_leaves(settings, model, settings.policy(_local_device(device)))
    plan = plan_optimizer(settings, model, optimizer, model_parameters)
    _check_schedule(settings, plan, lr_scheduler)
    _check_offloaded(model, policy, plan)
    if training_data is not None:
        check_dataset(training_data)
    with contextlib.ExitStack() as undo:
        joins = not comm.is_initialized()
        comm.init_distributed(
            distributed_port=distributed_port, dist_init_required=dist_init_required
        )
        if joins:
            undo.callback(dist.destroy_process_group)
        get_accelerator().set_device(_local_device(device))
        built = _offloaded(settings, policy, model, plan, undo)
        schedule = _schedule(settings, plan, lr_scheduler, built)
        engine = DeepSpeedEngine(
            model, settings, built, schedule, training_data=training_data, collate_fn=collate_fn
        )
        undo.pop_all()
    return engine, built, engine.training_dataloader, schedule


def _check_parallelism(mpu: Any, mesh_param: Any) -> None:
    if mpu is not None:
        names = ("get_model_parallel_world_size", "get_tensor_model_parallel_world_size",
                 "get_pipeline_model_parallel_world_size")  # fmt: skip
        sizes = {name: getattr(mpu, name)() for name in names if hasattr(mpu, name)}
        wide = [f"{name}()={size}" for name, size in sizes.items() if size > 1]
        if wide:
            raise DeepSpeedRefusal(
                f"initialize(mpu=) with {', '.join(wide)}: each rank of the engine has whole "
                "layers; leave mpu out, ranks split states"
            )
    if mesh_param is not None and any(size > 1 for size in tuple(mesh_param)[1:]):
        raise DeepSpeedRefusal(
            f"initialize(mesh_param={mesh_param!r}): there are no sequence-parallel ranks; leave "
            "it out"
        )


def _config_of(args: Any, config: Any, config_params: Any) -> Any:
    """Return the configuration. Raises: DeepSpeedRefusal unless exactly one argument gives it."""
    given = config if config is not None else config_params
    of_args = getattr(args, "deepspeed_config", None)
    old = getattr(args, "deepscale_config", None)
    if of_args is not None and old is not None:
        raise DeepSpeedRefusal(
            "args.deepspeed_config and args.deepscale_config: Not sure how to proceed, give one"
        )
    of_args = of_args if of_args is not None else old
    if given is not None and of_args is not None:
        raise DeepSpeedRefusal(
            "Not sure how to proceed, we were given deepspeed configs in the deepspeed arguments "
            "and deepspeed.initialize() function call: give one of them"
        )
    found = given if given is not None else of_args
    if found is None:
        raise DeepSpeedRefusal(
            "DeepSpeed requires --deepspeed_config to specify configuration file, or "
            "initialize(config=)"
        )
    return found


def _check_args(args: Any) -> None:
    rank = getattr(args, "local_rank", None)
    if rank is None:
        return
    here = os.environ.get("LOCAL_RANK")
    if not isinstance(rank, int):
        raise DeepSpeedRefusal(f"args.local_rank={rank!r} is no number")
    if here is not None and rank >= 0 and rank != int(here):
        raise DeepSpeedRefusal(
            f"Mismatch in local rank setting, args.local_rank={rank} but env['LOCAL_RANK']={here}"
        )


def _check_client(optimizer: Any, lr_scheduler: Any) -> None:
    if not (
        optimizer is None or isinstance(optimizer, torch.optim.Optimizer) or callable(optimizer)
    ):
        raise DeepSpeedRefusal(
            f"Client Optimizer is of unexpected type {type(optimizer).__name__}: give a "
            "torch.optim.Optimizer, or a function that makes one of parameters"
        )
    if isinstance(lr_scheduler, LRScheduler) and not isinstance(optimizer, torch.optim.Optimizer):
        raise DeepSpeedRefusal(
            f"Client Optimizer (type = {type(optimizer).__name__}) is not instantiated but Client "
            "LR Scheduler is instantiated: give its optimizer, too, or a function that makes a "
            "schedule of an optimizer"
        )


def _world_size() -> int:
    """Return the world size, from the environment if there is no process group yet."""
    if comm.is_initialized():
        return comm.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1"))


def _local_device(device: torch.device) -> torch.device:
    """Return this rank's GPU, by its local rank; the CPU without GPUs."""
    if device.type == "cpu":
        return device
    local = int(os.environ.get("LOCAL_RANK", "0"))
    return torch.device(device.type, local % max(1, get_accelerator().device_count()))


def _check_offloaded(
    model: torch.nn.Module, policy: inf.Policy, plan: OptimizerPlan | None
) -> None:
    """Check a model that an earlier `initialize` offloaded. Raises: DeepSpeedRefusal if an
    optimizer would be built where one exists."""
    for module in inf.offloaded_modules(model):
        handle = inf.handle(module)
        tiers = [(each.params, each.optim, each.zero) for each in (handle.policy, policy)]
        if tiers[0] != tiers[1]:
            log.warning(
                "initialize: the model was offloaded before, with params=%r, optim=%r, zero=%r, "
                "and these stay; this configuration has %r, %r, %r",
                *tiers[0],
                *tiers[1],
            )
        if plan is None or plan.ready is not None:
            continue
        if any(_has_states(handle, param) for param in module.parameters()):
            raise DeepSpeedRefusal(
                "initialize of a model that trains in another engine: continue with it, or end "
                "it by engine.destroy() and build the model anew"
            )


def _has_states(handle: inf.Handle, param: torch.nn.Parameter) -> bool:
    """Return whether an optimizer has states of a parameter."""
    try:
        handle.optimizer_state(param)
    except ValueError:
        return False
    return True


def _offloaded(
    settings: Settings,
    policy: inf.Policy,
    model: torch.nn.Module,
    plan: OptimizerPlan | None,
    undo: contextlib.ExitStack,
) -> ZeROOptimizer | None:
    """Offload the model, unless it is offloaded, and build its optimizer. `undo` receives the call
    that closes the engine."""
    learning = {name for name, param in model.named_parameters() if param.requires_grad}
    if not inf.offloaded_modules(model):
        if settings.stage == 3:
            _transformers.warn_of_whole(model)
        if plan is None:
            # Without an optimizer no capacity need be reserved for its states.
            model.requires_grad_(False)
        _make_directories(policy)
        _cast(settings, model)
        comm.broadcast_module(model)
        inf.offload(model, policy)
        undo.callback(inf.handle(model).close)
        gather_whole(model)
        if plan is None:
            # A trainer may read requires_grad, and give an optimizer to a later `initialize`.
            for name, param in model.named_parameters():
                param.requires_grad_(name in learning)
    note_module(model)
    if settings.stage == 3:
        for param in model.parameters():
            note_zero_param(param)
    if plan is None:
        return None
    built = plan.build()
    scaler = loss_scaler(settings)
    kind = DeepSpeedZeroOptimizer_Stage3 if settings.stage == 3 else DeepSpeedZeroOptimizer
    return kind(
        built,
        scaler,
        model.parameters(),
        clip_norm=settings.run.clip_norm,
        skips=policy.on_nonfinite == "skip" or scaler.dynamic,
        coupled=plan.coupled,
    )


def _with_leaves(settings: Settings, model: torch.nn.Module, policy: inf.Policy) -> inf.Policy:
    """Flag the configuration's leaf modules. On several ranks each leaf becomes one unit: ranks may
    run different children of it."""
    flag_configured(model, settings.zero.get("leaf_module") or {})
    units = leaf_units(model)
    if units is None or _world_size() == 1:
        return policy
    return dataclasses.replace(policy, units=units)


def _make_directories(policy: inf.Policy) -> None:
    """Create the NVMe directories, as DeepSpeed does; not paths with a per-rank placeholder."""
    for path in policy.directories:
        if "{" not in str(path):
            path.mkdir(parents=True, exist_ok=True)


def _cast(settings: Settings, model: torch.nn.Module) -> None:
    """Cast parameters and buffers to the dtypes that the configuration names."""
    if settings.dtype is not None:
        for param in model.parameters():
            cast(param, settings.dtype)
    if settings.run.buffer_dtype is None:
        return
    dtype = getattr(torch, settings.run.buffer_dtype)
    kept = settings.run.keep_in_fp32
    if kept == "auto":
        kept = tuple(getattr(model, "_keep_in_fp32_modules", None) or ())
    for name, buffer in model.named_buffers():
        if buffer.is_floating_point() and not any(part in kept for part in name.split(".")):
            buffer.data = buffer.data.to(dtype)


def _check_schedule(settings: Settings, plan: OptimizerPlan | None, client: Any) -> None:
    """Build the configuration's schedule once on a rehearsal optimizer, so that wrong settings
    raise before anything changes. Raises: DeepSpeedRefusal.
    """
    if plan is None or plan.rehearsal is None or client is not None:
        return
    if settings.run.scheduler is None:
        return
    name, arguments = settings.run.scheduler
    # torch's classes read some settings only in the first step.
    unfilled = [key for key, value in arguments.items() if value == "auto"]
    if unfilled:
        raise DeepSpeedRefusal(
            f'scheduler.params.{unfilled[0]}="auto" of {name}: no value has replaced "auto"; write '
            "the value"
        )
    try:
        scheduler_class(name)(plan.rehearsal, **arguments)
    except (TypeError, ValueError, KeyError) as error:
        given = dict(arguments)
        raise DeepSpeedRefusal(f"scheduler.params={given!r} of {name}: {error}") from error


def _schedule(
    settings: Settings, plan: OptimizerPlan | None, client: Any, optimizer: ZeROOptimizer | None
) -> Any:
    """Return the schedule: the script's, that of the script's function, or the configuration's."""
    if optimizer is None or plan is None:
        return None
    if client is not None:
        if callable(client):
            return client(optimizer.optimizer)
        plan.rebind(client, optimizer.optimizer)
        return client
    if settings.run.scheduler is None:
        return None
    name, arguments = settings.run.scheduler
    return scheduler_class(name)(optimizer.optimizer, **arguments)


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add --deepspeed, --deepspeed_config and their old --deepscale names to a parser; return it.
    """
    group = parser.add_argument_group("DeepSpeed", "DeepSpeed configurations")
    group.add_argument(
        "--deepspeed", default=False, action="store_true", help="of the script alone"
    )
    group.add_argument("--deepspeed_config", default=None, type=str, help="JSON configuration file")
    group.add_argument(
        "--deepscale", default=False, action="store_true", help="old name of --deepspeed"
    )
    group.add_argument(
        "--deepscale_config", default=None, type=str, help="old name of --deepspeed_config"
    )
    return parser
