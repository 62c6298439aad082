"""Reading a DeepSpeed configuration: the policy that it asks for, and the run beside it.

    file or mapping -> names and values checked against the table (`deepspeed_keys.py`), "auto"
    filled -> `DeepSpeedRun`: fields of `inf.Policy`, dtype, loss scaling, batch sizes, optimizer,
    scheduler, and a note for each key that means nothing here, or something else

Dtypes are names, so that this imports without torch.
"""

from __future__ import annotations

import dataclasses
import os
import types
from collections.abc import Mapping
from typing import Any

from infinity._src.base.wording import listed
from infinity._src.config.deepspeed_file import Given, KeyMeaning, collected, load
from infinity._src.config.deepspeed_keys import AUTO, KEYS, TORCH_SCHEDULES, shown
from infinity.aio import IoSettings

_NOTHING: Mapping[str, Any] = types.MappingProxyType({})


@dataclasses.dataclass(frozen=True)
class LossScaling:
    """Loss scaling of fp16. static: a fixed scale; None: it is dynamic, by the other fields.

    initial_scale: the first. window: steps without overflow after which the scale doubles.
    min_scale: the least. hysteresis: overflows before it is halved; consecutive_hysteresis: a step
    without overflow restores their count. raise_at_min: an overflow at min_scale is an error.
    """

    static: float | None
    initial_scale: float
    window: int
    min_scale: float
    hysteresis: int
    consecutive_hysteresis: bool
    raise_at_min: bool


@dataclasses.dataclass(frozen=True)
class DeepSpeedRun:
    """A configuration of DeepSpeed as the engine takes it. Dtypes are torch's names.

    policy: fields of `inf.Policy`; `inf.Policy.from_deepspeed(run)` makes it. dtype: "bfloat16" or
    "float16", to which parameters are cast; None: they stay. autocast: the dtype of autocast
    around forward; "float16" without `loss_scaling` wants torch's GradScaler. clip_norm: 0.0 for
    none. optimizer: the name of a class of `inf` or, for `inf.Elementwise`, of torch.optim, and
    its arguments. scheduler: the name of a schedule of DeepSpeed or of torch, and its arguments.
    cast_inputs: floating inputs of forward go to fp16. buffer_dtype: to which floating buffers are
    cast, but those of keep_in_fp32; "auto": those that a transformers model names.
    managed_accumulation: the engine counts micro-batches. drop_last: of a loader that it makes.
    notes: a line for each key that means nothing here, or not the same. keys: all, in order.
    """

    policy: Mapping[str, Any]
    dtype: str | None
    autocast: str | None
    loss_scaling: LossScaling | None
    clip_norm: float
    accumulation_steps: int
    micro_batch_size: int | None
    train_batch_size: int | None
    optimizer: tuple[str, Mapping[str, Any]] | None
    scheduler: tuple[str, Mapping[str, Any]] | None
    notes: tuple[str, ...]
    keys: tuple[KeyMeaning, ...] = ()
    cast_inputs: bool = False
    buffer_dtype: str | None = None
    keep_in_fp32: str | tuple[str, ...] = AUTO
    managed_accumulation: bool = True
    drop_last: bool = False


def read_deepspeed(
    config: str | os.PathLike[str] | Mapping[str, Any],
    *,
    world_size: int = 1,
    ranks_per_node: int | None = None,
    auto: Mapping[str, Any] = _NOTHING,
    keep_auto: bool = False,
) -> DeepSpeedRun:
    """Read a DeepSpeed configuration: a mapping, the path of a JSON file, or such a file in base64.

    world_size: ranks, for the batch sizes. ranks_per_node: for zero_hpz_partition_size; None:
    not checked. auto: values in place of "auto", by dotted key, as a trainer fills them
    ({"optimizer.params.lr": 1e-4}). keep_auto: for a policy alone; an "auto" that no field of it
    depends on is noted, and counts as left out. Without it, it is an error.

    Raises: ValueError naming key, value and fix.
    """
    where, values = load(config)
    try:
        # Before the arguments of an optimizer that is not there.
        _check_optimizer(values)
        given = collected(values)
        given.fill(auto, keep_auto=keep_auto)
        given.check()
        return _run(given, world_size, ranks_per_node)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _run(given: Given, world_size: int, ranks_per_node: int | None) -> DeepSpeedRun:
    """Give the keys their meaning, one group after the other."""
    dtype, loss_scaling = _precision(given)
    autocast = _autocast(given)
    policy = _policy(given, dtype, world_size, ranks_per_node)
    micro, steps, whole = _batches(given, world_size)
    given.became("gradient_clipping", f"clip_norm={given['gradient_clipping']}")
    optimizer, scheduler = _optimizer(given), _scheduler(given)
    kept = given["data_types.keep_in_fp32_modules"]
    return DeepSpeedRun(
        policy=policy,
        dtype=dtype,
        autocast=autocast,
        loss_scaling=loss_scaling,
        clip_norm=given["gradient_clipping"],
        accumulation_steps=steps,
        micro_batch_size=micro,
        train_batch_size=whole,
        optimizer=optimizer,
        scheduler=scheduler,
        notes=given.notes(),
        keys=given.meanings(),
        cast_inputs=given["fp16.auto_cast"] and dtype == "float16",
        buffer_dtype=given["data_types.buffer_dtype"],
        keep_in_fp32=kept if isinstance(kept, str) else tuple(kept),
        managed_accumulation=given["managed_gradient_accumulation"],
        drop_last=given["dataloader_drop_last"],
    )


# -- Precision -------------------------------------------------------------------------------------


def _precision(given: Given) -> tuple[str | None, LossScaling | None]:
    if given["bf16.enabled"] and given["fp16.enabled"]:
        raise ValueError(
            f"{given.show('bf16.enabled')} and {given.show('fp16.enabled')}: a model has one of "
            "them; set the other to false"
        )
    dtype, scaling = None, None
    if given["bf16.enabled"]:
        dtype = "bfloat16"
    if given["fp16.enabled"]:
        dtype, scaling = "float16", _loss_scaling(given)
    for section, name in (("bf16.", "bfloat16"), ("fp16.", "float16")):
        for key in given.below(section) if dtype != name else ():
            given.became(section + key, f"nothing: {section}enabled is off")
    if dtype is not None:
        given.became(f"{'bf' if dtype == 'bfloat16' else 'fp'}16.enabled", f"dtype={dtype!r}")
    wanted = given["data_types.param_dtype"]
    if wanted is not None and wanted != (dtype or "float32"):
        raise ValueError(
            f"{given.show('data_types.param_dtype')} is not what bf16.enabled and fp16.enabled "
            f"say ({dtype or 'float32'}): leave it out, or set the one that it means"
        )
    return dtype, scaling


def _loss_scaling(given: Given) -> LossScaling:
    static = given["fp16.loss_scale"] or None
    least = {"fp16.loss_scale_window": 1, "fp16.min_loss_scale": 1, "fp16.hysteresis": 1}
    for name, limit in least.items():
        # A static scale uses none of them, and DeepSpeed does not look at them then.
        if static is None and given[name] < limit:
            raise ValueError(
                f"{given.show(name)}: give a whole number, {limit} or more, with dynamic loss "
                "scaling (fp16.loss_scale=0)"
            )
    for key, value in given.below("fp16.").items():
        dynamic = key not in ("enabled", "auto_cast", "loss_scale")
        unused = "nothing: the scale is static"
        given.became(f"fp16.{key}", unused if dynamic and static else f"{key}={value!r}")
    return LossScaling(
        static=static,
        initial_scale=2.0 ** given["fp16.initial_scale_power"],
        window=given["fp16.loss_scale_window"],
        min_scale=float(given["fp16.min_loss_scale"]),
        hysteresis=given["fp16.hysteresis"],
        consecutive_hysteresis=given["fp16.consecutive_hysteresis"],
        # As ZeRO's optimizers have it.
        raise_at_min=True,
    )


def _autocast(given: Given) -> str | None:
    if not given["torch_autocast.enabled"]:
        return None
    dtype: str | None = given["torch_autocast.dtype"]
    if dtype is None:
        raise ValueError(
            f"{given.show('torch_autocast.enabled')} without torch_autocast.dtype: give "
            '"bfloat16" or "float16"'
        )
    if given["zero_optimization.zero_quantized_weights"]:
        raise ValueError(
            f"{given.show('torch_autocast.enabled')} and "
            f"{given.show('zero_optimization.zero_quantized_weights')}: DeepSpeed refuses the two "
            "together; set one of them to false"
        )
    return dtype


# -- The policy ------------------------------------------------------------------------------------

_ZERO = "zero_optimization."
_PARAM, _OPTIM = _ZERO + "offload_param.", _ZERO + "offload_optimizer."


def _policy(
    given: Given, dtype: str | None, world_size: int, ranks_per_node: int | None
) -> dict[str, Any]:
    stage = given[_ZERO + "stage"]
    if stage == 0:
        raise ValueError(
            f"{given.show(_ZERO + 'stage')} splits and offloads nothing: set "
            "zero_optimization.stage to 1, 2 or 3, or train without the engine"
        )
    fields: dict[str, Any] = {"zero": stage}
    given.became(_ZERO + "stage", f"zero={stage}")
    fields |= _tiers(given, stage)
    fields |= _drives(given, fields, dtype)
    fields |= _exchange(given, stage, dtype, world_size, ranks_per_node)
    if dtype == "float16":
        fields["on_nonfinite"] = "skip"
    elif dtype == "bfloat16":
        fields |= _bfloat16(given, stage)
    if given["activation_checkpointing.cpu_checkpointing"]:
        fields["activations"] = "cpu"
        given.differs(
            "activation_checkpointing.cpu_checkpointing",
            "activations='cpu': of every checkpointed call, not of DeepSpeed's own only",
        )
    fields |= _io(given)
    return fields


def _bfloat16(given: Given, stage: int) -> dict[str, Any]:
    """Return the state and the answer to gradients that are not finite, of bf16."""
    check, states = "bf16.check_grad_overflow", "bf16.bf16_optimizer_states"
    fields: dict[str, Any] = {"on_nonfinite": "skip" if given[check] else "ignore"}
    given.became(check, f"on_nonfinite={fields['on_nonfinite']!r}")
    if stage == 3 and given[check]:
        given.differs(
            check, "on_nonfinite='skip'; with stage 3 DeepSpeed takes the step all the same"
        )
    if given[states]:
        fields["state"] = "bf16"
        given.differs(states, "state='bf16': masters keep 32 bits, where DeepSpeed's have 16")
    return fields


def _device(given: Given, section: str, old: str) -> str:
    """Return the device of an offload section, which an old key may name."""
    name = section + "device"
    if not given.has(old):
        device: str = given[name]
        return device
    if any(given.below(section)):
        raise ValueError(
            f"{given.show(old)} and {section.rstrip('.')}: the second is the first's new form; "
            f"leave {old} out"
        )
    return "cpu" if given[old] else "none"


def _tiers(given: Given, stage: int) -> dict[str, Any]:
    params = _device(given, _PARAM, _ZERO + "cpu_offload_param")
    optim = _device(given, _OPTIM, _ZERO + "cpu_offload")
    if stage < 3 and params != "none":
        given.differs(
            _PARAM + "device",
            f"stage {stage} keeps parameters on the device, in DeepSpeed too: params='device'",
        )
        params = "none"
    if stage < 3 and optim == "nvme":
        given.differs(
            _OPTIM + "device",
            f"optim='nvme'; with stage {stage} DeepSpeed keeps them in CPU memory all the same",
        )
    if optim == "none":
        given.differs(
            _OPTIM + "device",
            "optim='cpu': the engine keeps optimizer states in CPU memory, and none on the device",
        )
    fields = {
        "params": "device" if params == "none" else params,
        "optim": "cpu" if optim == "none" else optim,
    }
    given.became(_PARAM + "device", f"params={fields['params']!r}")
    given.became(_OPTIM + "device", f"optim={fields['optim']!r}")
    return fields


def _drives(given: Given, tiers: Mapping[str, Any], dtype: str | None) -> dict[str, Any]:
    """Return the directories, and the part of parameters on NVMe that rests in RAM."""
    paths: list[str] = []
    for section, tier in ((_PARAM, tiers["params"]), (_OPTIM, tiers["optim"])):
        path = given[section + "nvme_path"]
        if tier != "nvme":
            given.became(section + "nvme_path", f"nothing: these states rest on {tier!r}")
        elif path and path != "none":
            given.became(section + "nvme_path", f"nvme={path!r}")
            paths += [path] if path not in paths else []
    if len(paths) > 1:
        given.differs(
            _OPTIM + "nvme_path",
            f"nvme={paths!r}: all states are striped over both, where DeepSpeed keeps parameters "
            "on one and optimizer states on the other",
        )
    fields: dict[str, Any] = {"nvme": paths} if paths else {}
    kept = _PARAM + "max_in_cpu"
    if given.has(kept) and tiers["params"] == "nvme":
        # Elements of the dtype that computes.
        size_bytes = given[kept] * (2 if dtype else 4)
        fields["resident"] = {"params": size_bytes}
        given.became(kept, f"resident={{'params': {size_bytes}}}")
    elif given.has(kept):
        given.became(kept, "nothing: parameters do not rest on NVMe")
    return fields


def _exchange(
    given: Given, stage: int, dtype: str | None, world_size: int, ranks_per_node: int | None
) -> dict[str, Any]:
    """Return the dtypes of gradients, and the settings of ZeRO++."""
    fields: dict[str, Any] = {}
    waits, travels = given["data_types.grad_accum_dtype"], given["communication_data_type"]
    given.became("communication_data_type", f"reduce_dtype={travels!r}")
    if waits is not None:
        fields["grad_dtype"] = waits
        given.became("data_types.grad_accum_dtype", f"grad_dtype={waits!r}")
        # The engine's default is the dtype in which they wait, DeepSpeed's that of parameters.
        travels = travels or dtype
    if travels is not None:
        fields["reduce_dtype"] = travels
    size = given[_ZERO + "zero_hpz_partition_size"]
    for name, field, value in (
        ("zero_quantized_weights", "qwz", True),
        ("zero_quantized_gradients", "qgz", True),
        ("zero_hpz_partition_size", "hpz", "device"),
    ):
        asked = given[_ZERO + name]
        if not asked or (asked is not True and asked <= 1):
            continue
        if stage < 3:
            given.differs(_ZERO + name, "nothing: it is of stage 3, in DeepSpeed too")
            continue
        if field == "hpz":
            _check_hpz(given, size, world_size, ranks_per_node)
        fields[field] = value
        given.became(_ZERO + name, f"{field}={value!r}")
    return fields


def _check_hpz(given: Given, size: int, world_size: int, ranks_per_node: int | None) -> None:
    text = given.show(_ZERO + "zero_hpz_partition_size")
    # DeepSpeed takes the whole world where the size is larger.
    size = min(size, max(world_size, 1))
    if world_size % size:
        raise ValueError(
            f"{text}: {world_size} ranks do not split into groups of it; give a divisor"
        )
    node = min(ranks_per_node or size, world_size)
    if node != size:
        raise ValueError(
            f"{text}: a secondary shard is split over the ranks of a node, and a node has {node}; "
            f"give {node}, or mesh= a DeviceMesh of ({world_size // size}, {size}) to the policy"
        )


def _io(given: Given) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for key, field in (("aio.block_size", "block_bytes"), ("aio.queue_depth", "depth")):
        if not given.has(key):
            continue
        try:
            IoSettings(**{field: given[key]})
        except ValueError as error:
            raise ValueError(f"{given.show(key)}: io.{error}") from None
        fields[field] = given[key]
        given.became(key, f"io={{{field!r}: {given[key]}}}")
    return {"io": fields} if fields else {}


# -- Batches ---------------------------------------------------------------------------------------


def _batches(given: Given, world_size: int) -> tuple[int | None, int, int | None]:
    """Return (micro-batch, accumulation, batch) by DeepSpeed's rule: their product over all ranks;
    any may be left out."""
    if type(world_size) is not int or world_size < 1:
        raise ValueError(f"world_size={world_size!r}: give the number of ranks, 1 or more")
    names = (
        "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps",
    )  # fmt: skip
    whole, micro, steps = (given[name] for name in names)
    if whole is not None and micro is not None and steps is None:
        steps = whole // micro // world_size
    elif whole is not None and micro is None:
        micro = whole // world_size // (steps or 1)
    steps = 1 if steps is None else steps
    if whole is None and micro is not None:
        whole = micro * steps * world_size
    if whole is not None and whole != (micro or 0) * steps * world_size:
        raise ValueError(
            f"{listed(given.show(name) for name in names if given.has(name))}, with {world_size} "
            f"{'ranks' if world_size > 1 else 'rank'}: train_batch_size must be "
            "train_micro_batch_size_per_gpu x gradient_accumulation_steps x ranks, and these give "
            f"{micro} x {steps} x {world_size}; correct one of them, or leave it out"
        )
    for name, field in zip(
        names, ("train_batch_size", "micro_batch_size", "accumulation_steps"), strict=True
    ):
        given.became(name, f"{field}={given[name]}")
    return micro, steps, whole


# -- Optimizer and scheduler -----------------------------------------------------------------------

_ADAM = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
OPTIMIZERS: dict[str, tuple[str, Mapping[str, Any], frozenset[str]]] = {
    "adam": ("AdamW", _ADAM, frozenset(["adam_w_mode", "torch_adam"])),
    "adamw": ("AdamW", _ADAM, frozenset(["adam_w_mode", "torch_adam"])),
    "lion": (
        "Lion", {"lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 0.0}, frozenset(),
    ),
    "adagrad": (
        "Adagrad", {"lr": 1e-2, "eps": 1e-10, "weight_decay": 0.0},
        frozenset(["lr_decay", "initial_accumulator_value"]),
    ),
    "SGD": ("SGD", {"lr": 1e-3}, frozenset(["momentum", "dampening", "weight_decay", "nesterov"])),
    "RMSprop": (
        "RMSprop", {"lr": 1e-2},
        frozenset(["alpha", "eps", "weight_decay", "momentum", "centered"]),
    ),
    "Adadelta": ("Adadelta", {"lr": 1.0}, frozenset(["rho", "eps", "weight_decay"])),
    "Adamax": ("Adamax", {"lr": 2e-3}, frozenset(["betas", "eps", "weight_decay"])),
    "NAdam": (
        "NAdam", {"lr": 2e-3},
        frozenset(
            ["betas", "eps", "weight_decay", "momentum_decay", "decoupled_weight_decay"]
        ),
    ),
    "RAdam": (
        "RAdam", {"lr": 1e-3},
        frozenset(["betas", "eps", "weight_decay", "decoupled_weight_decay"]),
    ),
    "ASGD": (
        "ASGD", {"lr": 1e-2}, frozenset(["lambd", "alpha", "t0", "weight_decay"]),
    ),
    "Rprop": ("Rprop", {"lr": 1e-2}, frozenset(["etas", "step_sizes"])),
}  # fmt: skip
"""Types of optimizers: the class, DeepSpeed's defaults of its arguments, and further arguments.
DeepSpeed reads its own types in any case, torch's as torch writes them."""
_KERNELS = ("AdamW", "Lion", "SGD")
_PARAMS = "optimizer.params."


def _check_optimizer(config: Mapping[str, Any]) -> None:
    """Refuse an optimizer that the engine has not."""
    section = config.get("optimizer")
    kind = section.get("type") if isinstance(section, Mapping) else None
    if not isinstance(kind, str) or not kind or kind in OPTIMIZERS or kind.lower() in OPTIMIZERS:
        return
    raise ValueError(
        f"optimizer.type={shown(kind)} is refused: there is no such optimizer here; take one of "
        f"{', '.join(sorted({name for name, _, _ in OPTIMIZERS.values()}))}, or leave it out and "
        "give an optimizer of infinity's own"
    )


def _optimizer(given: Given) -> tuple[str, dict[str, Any]] | None:
    kind = given["optimizer.type"]
    arguments = given.below(_PARAMS)
    if kind is None:
        if arguments:
            raise ValueError(
                f"{given.show(_PARAMS + next(iter(arguments)))} without optimizer.type: name the "
                "optimizer, such as 'AdamW'"
            )
        return None
    name, defaults, more = OPTIMIZERS.get(kind) or OPTIMIZERS[kind.lower()]
    for key in arguments:
        if key not in defaults and key not in more:
            raise ValueError(
                f"{given.show(_PARAMS + key)}: {kind} takes {', '.join(sorted({*defaults, *more}))}"
            )
    arguments = {**defaults, **arguments}
    if name == "AdamW":
        name = _adam(given, kind, arguments)
    given.became("optimizer.type", f"inf.{name}" if name in _KERNELS else _elementwise(name))
    if name not in _KERNELS:
        given.differs("optimizer.type", _without_kernel(name, arguments))
    for key in arguments:
        given.became(_PARAMS + key, f"{key}={arguments[key]!r}")
    return name, arguments


def _elementwise(name: str) -> str:
    return f"inf.Elementwise(torch.optim.{name})"


def _without_kernel(name: str, arguments: Mapping[str, Any]) -> str:
    slow = _elementwise(name) + ": no kernel, and `step()` waits"
    if name == "Adam" and not arguments["weight_decay"]:
        return f"inf.AdamW, the same update while no parameter group decays; else {slow}"
    return slow


def _adam(given: Given, kind: str, arguments: dict[str, Any]) -> str:
    """Return the class of DeepSpeed's Adam, whose weight decay is AdamW's unless it is told not to
    be."""
    torch_adam = arguments.pop("torch_adam", False)
    decoupled = arguments.pop("adam_w_mode", True) or kind.lower() == "adamw"
    if torch_adam and decoupled and not given.has(_PARAMS + "weight_decay"):
        # torch.optim.AdamW's own default.
        arguments["weight_decay"] = 1e-2
    # Without decay the two are the same update. But parameter groups may have one of their own.
    return "AdamW" if decoupled else "Adam"


_WARMUP = frozenset(["warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "warmup_type"])
SCHEDULES: dict[str, tuple[frozenset[str], frozenset[str]]] = {
    "WarmupLR": (frozenset(), _WARMUP),
    "WarmupDecayLR": (frozenset(["total_num_steps"]), _WARMUP),
    "WarmupCosineLR": (
        frozenset(["total_num_steps"]),
        frozenset(["warmup_min_ratio", "warmup_num_steps", "cos_min_ratio", "warmup_type"]),
    ),
    "OneCycle": (
        frozenset(["cycle_min_lr", "cycle_max_lr"]),
        frozenset([
            "decay_lr_rate", "cycle_first_step_size", "cycle_second_step_size",
            "cycle_first_stair_count", "cycle_second_stair_count", "decay_step_size",
            "cycle_momentum", "cycle_min_mom", "cycle_max_mom", "decay_mom_rate",
        ]),
    ),
    "LRRangeTest": (
        frozenset(),
        frozenset([
            "lr_range_test_min_lr", "lr_range_test_step_size", "lr_range_test_step_rate",
            "lr_range_test_staircase",
        ]),
    ),
}  # fmt: skip
"""DeepSpeed's schedules: the arguments that each needs, and those that it may have."""


def _scheduler(given: Given) -> tuple[str, dict[str, Any]] | None:
    kind, section = given["scheduler.type"], "scheduler.params."
    arguments = given.below(section)
    if kind is None:
        if arguments:
            raise ValueError(
                f"{given.show(section + next(iter(arguments)))} without scheduler.type: name the "
                "schedule, such as 'WarmupLR'"
            )
        return None
    given.became("scheduler.type", kind)
    if kind in TORCH_SCHEDULES:
        return kind, dict(given.untouched)
    if kind not in SCHEDULES:
        raise ValueError(
            f"{given.show('scheduler.type')}: there is no such schedule; take one of "
            f"{', '.join([*SCHEDULES, *sorted(TORCH_SCHEDULES)])}, or leave it out and give a "
            "scheduler of your own"
        )
    needed, more = SCHEDULES[kind]
    more = more | {"last_batch_iteration"}
    for key in arguments:
        if key not in needed and key not in more:
            raise ValueError(
                f"{given.show(section + key)}: {kind} takes {', '.join(sorted(needed | more))}"
            )
        given.became(section + key, f"{key}={arguments[key]!r}")
    for key in sorted(needed):
        if not given.was_written(section + key):
            raise ValueError(
                f"{given.show('scheduler.type')} without {section}{key}: give "
                f"{KEYS[section + key].check.text}"
            )
    return kind, arguments
