"""Keys of a DeepSpeed configuration (0.19.8), each with its status here.

    mapped      sets a field of the policy, or of `DeepSpeedRun`
    no meaning  accepted without effect; a note says why
    refused     requests a computation that the engine does not have, unless its value requests
                nothing; the error says what to do

`deepspeed.py` converts the mapped keys. docs/deepspeed-config.md is generated from this table. This
module imports no torch.
"""

from __future__ import annotations

import dataclasses
import math
import reprlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

MAPPED, NO_MEANING, REFUSED, LEFT_OUT = "mapped", "no meaning", "refused", "left out"
AUTO = "auto"
LARGEST = (1 << 63) - 1
"""Largest integer that a configuration may have: sys.maxsize, a default of DeepSpeed's."""

# -- Values ----------------------------------------------------------------------------------------


class _Short(reprlib.Repr):
    """Formats a value for a message, with bounded depth and length."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxdict, self.maxlist, self.maxstring, self.maxother = 2, 4, 4, 80, 80

    def repr_int(self, x: int, level: int) -> str:
        # Python refuses to write integers of thousands of digits.
        if x.bit_length() > 128:
            return f"an integer of {x.bit_length()} bits"
        return super().repr_int(x, level)


_short = _Short()


def shown(value: Any) -> str:
    """Format a value as in JSON, shortened."""
    names = {True: "true", False: "false", None: "null"}
    if value is None or isinstance(value, bool):
        return names[value]
    text = _short.repr(value)
    return f'"{value}"' if isinstance(value, str) and text == f"'{value}'" else text


@dataclasses.dataclass(frozen=True)
class Check:
    """Allowed values of a key.

    text: their description, to follow "give". read: converts a value for the engine; raises
    ValueError for others. takes_auto: "auto" is an allowed value.
    """

    text: str
    read: Callable[[Any], Any]
    takes_auto: bool = False


def _flag(value: Any) -> bool:
    # Numbers, too: DeepSpeed accepts 0 and 1 as truth values.
    if not isinstance(value, int) or value not in (0, 1):
        raise ValueError
    return bool(value)


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError
    # Refused first: `math.isfinite` raises OverflowError for large integers.
    if isinstance(value, int) and abs(value) > LARGEST:
        raise ValueError
    if not math.isfinite(value):
        raise ValueError
    return value


def _integer(value: Any) -> int:
    number = _number(value)
    if number != int(number):
        raise ValueError
    return int(number)


def whole(least: int, most: int = LARGEST) -> Check:
    """Integers of a range; 5e8 is accepted."""

    def read(value: Any) -> int:
        number = _integer(value)
        if not least <= number <= most:
            raise ValueError
        return number

    if most == LARGEST:
        bounds = f"{least} or more" if least > -LARGEST else "of any sign"
    else:
        bounds = f"from {least} to {most}"
    return Check(f"a whole number, {bounds}", read)


def number(least: float = -math.inf, most: float = math.inf, *, above: bool = False) -> Check:
    """Finite numbers of a range; above: excluding its lower end."""

    def read(value: Any) -> float:
        found = float(_number(value))
        if not least <= found <= most or (above and found == least):
            raise ValueError
        return found

    ends = []
    if least > -math.inf:
        ends.append(f"above {least:g}" if above else f"{least:g} or more")
    if most < math.inf:
        ends.append(f"{most:g} at most")
    return Check("a finite number" + "".join(f", {end}" for end in ends), read)


def fitting(
    text: str, fits: Callable[[Any], Any], read: Callable[[Any], Any] = lambda value: value
) -> Check:
    """Values for which `fits` is true; `read` converts them."""

    def checked(value: Any) -> Any:
        if not fits(value):
            raise ValueError
        return read(value)

    return Check(text, checked)


def choice(*names: str, fold: Callable[[str], str] = str) -> Check:
    """One of the texts; fold: converts a value to their spelling."""
    text = " or ".join(f'"{name}"' for name in names)
    return fitting(text, lambda value: isinstance(value, str) and fold(value) in names, fold)


def numbers(check: Check) -> Check:
    """A number, or a list with a number for each parameter group."""

    def read(value: Any) -> Any:
        if isinstance(value, (list, tuple)) and value:
            return [check.read(one) for one in value]
        return check.read(value)

    return Check(f"{check.text}, or a list of them for the parameter groups", read)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value != ""


def _texts(value: Any) -> list[str]:
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, (list, tuple)) or not all(map(_is_text, values)):
        raise ValueError
    return list(values)


def _texts_or_auto(value: Any) -> str | list[str]:
    return value if value == AUTO and isinstance(value, str) else _texts(value)


def _numbers_of(value: Any, check: Check) -> tuple[float, float]:
    if not isinstance(value, (list, tuple)):
        raise ValueError
    first, second = (check.read(one) for one in value)
    return first, second


def _steps(value: Any) -> float:
    # Accelerate sets infinity, which disables DeepSpeed's printing.
    return value if value == math.inf and isinstance(value, float) else whole(0).read(value)


def _betas(value: Any) -> tuple[float, float]:
    found = _numbers_of(value, number(0, 1))
    if max(found) == 1:
        raise ValueError
    return found


DTYPES = {
    "fp16": "float16", "float16": "float16", "half": "float16", "torch.float16": "float16",
    "bf16": "bfloat16", "bfloat16": "bfloat16", "torch.bfloat16": "bfloat16",
    "fp32": "float32", "float32": "float32", "float": "float32", "torch.float32": "float32",
}  # fmt: skip
"""DeepSpeed's dtype name -> torch's."""


def _torch_name(value: Any) -> str | None:
    return DTYPES.get(value) if isinstance(value, str) else None


FLAG = Check("true or false", _flag)
TEXT = fitting("a text that is not empty", _is_text)
ANY_TEXT = fitting("a text", lambda value: isinstance(value, str))
TEXTS = Check("a list of names", _texts)
OBJECT = fitting(
    "an object",
    lambda value: isinstance(value, Mapping) and all(isinstance(name, str) for name in value),
)
LIST = fitting("a list", lambda value: isinstance(value, (list, tuple)), list)
DTYPE = fitting('"fp32", "bf16" or "fp16"', _torch_name, _torch_name)
HALF = fitting(
    '"bf16" or "fp16"', lambda value: _torch_name(value) in ("bfloat16", "float16"), _torch_name
)
# For this key DeepSpeed accepts only these names, in upper or lower case.
COMM_DTYPE = fitting(
    DTYPE.text,
    lambda value: isinstance(value, str) and value.lower() in ("fp16", "bf16", "fp32"),
    lambda value: DTYPES[value.lower()],
)
KEPT = Check('"auto" or a list of names', _texts_or_auto, takes_auto=True)
COUNT = whole(0)
BETAS = Check("a list of two numbers, 0 or more and below 1", _betas)
PAIR = Check("a list of two numbers, 0 or more", lambda value: _numbers_of(value, number(0)))
STEPS = Check("a whole number, 0 or more", _steps)
ANYTHING = Check("any value", lambda value: value, takes_auto=True)


TORCH_SCHEDULES = frozenset([
    "ConstantLR", "CosineAnnealingLR", "CosineAnnealingWarmRestarts", "CyclicLR", "ExponentialLR",
    "LinearLR", "MultiStepLR", "OneCycleLR", "PolynomialLR", "StepLR",
])  # fmt: skip
"""torch's schedules with numeric arguments, which are passed on unchanged."""


# -- Switches of refused keys ----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Off:
    """Values of a refused key that request nothing: `text` describes them, `tells` recognizes
    them.
    """

    text: str
    tells: Callable[[Any], bool]


def _as_flag(value: Any) -> Any:
    return bool(value) if isinstance(value, int) and value in (0, 1) else value


def _is_same(value: Any, one: Any) -> bool:
    return not isinstance(value, bool) and bool(value == one)


def off_at(*values: Any) -> Off:
    """Values equal to one of `values`. 0 and 1 also equal false and true; true does not equal 1."""

    def tells(value: Any) -> bool:
        return any(
            _as_flag(value) is one if isinstance(one, bool) else _is_same(value, one)
            for one in values
        )

    return Off(" or ".join(f"`{shown(value)}`" for value in values), tells)


def _is_switched_off(value: Any) -> bool:
    if isinstance(value, Mapping):
        return not value or _as_flag(value.get("enabled")) is False
    return _as_flag(value) is False


SWITCH = Off('`false`, `{}` or `{"enabled": false}`', _is_switched_off)


def _optional_switch(value: Any) -> bool:
    # Without "enabled" these sections are off.
    if isinstance(value, Mapping):
        return _as_flag(value.get("enabled", False)) is False
    return _as_flag(value) is False


DEFAULT_OFF = Off('an object without `"enabled": true`', _optional_switch)


def _one_stage(value: Any) -> bool:
    return isinstance(value, Mapping) and value.get("stages", 1) in (1, AUTO)


ONE_STAGE = Off('an object with `"stages"` of 1 or "auto"', _one_stage)


# -- Rows ------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class ConfigKey:
    """One key: its dotted name, its status (`fate`), its allowed values, and its meaning here
    (`to`).

    to: the field that a mapped key sets; else why the key has no meaning, or what to do instead.
    default: DeepSpeed's default. off: values of a refused key that request nothing. policy: a field
    of the policy depends on the key. also: further names of the key in the same section.
    """

    name: str
    fate: str
    check: Check
    to: str
    default: Any = None
    off: Off | None = None
    policy: bool = False
    also: tuple[str, ...] = ()

    @property
    def section(self) -> str:
        """The name up to and including the last dot; "" at the top level."""
        return self.name[: len(self.name) - len(self.last)]

    @property
    def last(self) -> str:
        """The last part of the name."""
        return self.name.rpartition(".")[2]

    @property
    def spellings(self) -> tuple[str, ...]:
        """All dotted names."""
        return (self.name, *(self.section + other for other in self.also))


def mapped(
    name: str, check: Check, to: str, default: Any = None, *, policy: bool = False
) -> tuple[ConfigKey, ...]:
    """One mapped key."""
    return (ConfigKey(name, MAPPED, check, to, default, policy=policy),)


def ignored(names: str, check: Check, why: str, *, also: str = "") -> tuple[ConfigKey, ...]:
    """Keys without meaning, for the same reason. also: a second name of a single key."""
    others = (also,) if also else ()
    return tuple(ConfigKey(name, NO_MEANING, check, why, also=others) for name in names.split())


def refused(name: str, off: Off, fix: str) -> tuple[ConfigKey, ...]:
    """One refused key."""
    return (ConfigKey(name, REFUSED, ANYTHING, fix, off=off),)


def below(section: str, *groups: tuple[ConfigKey, ...]) -> tuple[ConfigKey, ...]:
    """Keys of a section."""
    return tuple(
        dataclasses.replace(key, name=f"{section}.{key.name}") for group in groups for key in group
    )


def _flat(groups: Iterable[tuple[ConfigKey, ...]]) -> tuple[ConfigKey, ...]:
    return tuple(key for group in groups for key in group)


# -- The table: batches and gradients --------------------------------------------------------------

_NOT_A_SUM = "gradients are summed in fp32 and rounded once, so nothing overflows on the way"
_ONE_GROUP = "ranks split states only"
BATCHES = _flat((
    mapped("train_batch_size", whole(1), "`train_batch_size`; one of these three is optional"),
    mapped("train_micro_batch_size_per_gpu", whole(1), "`micro_batch_size`"),
    mapped("gradient_accumulation_steps", whole(1), "`accumulation_steps`"),
    mapped(
        "managed_gradient_accumulation", FLAG,
        "`managed_accumulation`: the engine counts micro-batches; false: every `step()` updates",
        True,
    ),
    mapped("dataloader_drop_last", FLAG, "`drop_last` of the loader that the engine makes", False),
    mapped(
        "gradient_clipping", number(0),
        "`clip_norm`, by `clip_grad_norm_` before the step; left out: 1.0; 0: no clipping", 1.0,
    ),
    ignored("prescale_gradients", FLAG, _NOT_A_SUM),
    ignored("gradient_predivide_factor", number(0, above=True), _NOT_A_SUM),
    refused(
        "gradient_allreduce_op", off_at("mean", "MEAN", "Mean"),
        'gradients are averaged over the ranks: set "mean", and multiply the loss by the number of '
        "ranks for their sum",
    ),
    mapped(
        "communication_data_type", COMM_DTYPE,
        "`reduce_dtype`; sums are taken in fp32 and rounded once", policy=True,
    ),
    ignored(
        "seq_parallel_communication_data_type", COMM_DTYPE, "there are no sequence-parallel ranks"
    ),
    ignored("disable_allgather", FLAG, "DeepSpeed does not use it with ZeRO"),
))  # fmt: skip

# -- Precision -------------------------------------------------------------------------------------

_MASTERS = (
    "masters always have 32 bits here: set false. For smaller states take "
    'bf16_optimizer_states, or Policy(state="compact")'
)
_UNUSED_SCALE = "of `loss_scaling`, if `loss_scale` is 0"
PRECISION = _flat((
    below(
        "bf16",
        mapped(
            "enabled", FLAG, '`dtype="bfloat16"`: parameters are cast, with fp32 masters', False,
            policy=True,
        ),
        mapped(
            "check_grad_overflow", FLAG,
            '`on_nonfinite="skip"`, or "ignore"; DeepSpeed checks with stages 1 and 2 only', True,
            policy=True,
        ),
        mapped(
            "bf16_optimizer_states", FLAG,
            '`state="bf16"`: moments of 16 bits, masters of 32', False, policy=True,
        ),
        ignored("immediate_grad_update", FLAG, "gradients go to their shard during backward"),
        refused("bf16_master_weights_and_grads", off_at(False), _MASTERS),
    ),
    below(
        "fp16",
        mapped(
            "enabled", FLAG, '`dtype="float16"` and `loss_scaling`; `on_nonfinite="skip"`', False,
            policy=True,
        ),
        mapped("auto_cast", FLAG, '`cast_inputs`: floating inputs of forward go to fp16', False),
        mapped("loss_scale", number(0), "`loss_scaling.static`; 0: dynamic", 0.0),
        mapped(
            "initial_scale_power", whole(0, 127), f"log2 of `initial_scale` {_UNUSED_SCALE}", 16
        ),
        mapped("loss_scale_window", whole(-LARGEST), f"`window` {_UNUSED_SCALE}", 1000),
        mapped("hysteresis", whole(-LARGEST), f"`hysteresis` {_UNUSED_SCALE}", 2),
        mapped(
            "consecutive_hysteresis", FLAG, f"`consecutive_hysteresis` {_UNUSED_SCALE}", False
        ),
        mapped("min_loss_scale", whole(-LARGEST), f"`min_scale` {_UNUSED_SCALE}", 1),
        refused("fp16_master_weights_and_grads", off_at(False), _MASTERS),
    ),
    below(
        "torch_autocast",
        mapped("enabled", FLAG, "`autocast`, around forward", False),
        mapped("dtype", HALF, "`autocast`'s dtype"),
        ignored(
            "lower_precision_safe_modules", TEXTS,
            "DeepSpeed reduces the gradients of these modules in autocast's dtype; here they are "
            "reduced in their own, or in communication_data_type",
        ),
    ),
    below(
        "data_types",
        mapped(
            "grad_accum_dtype", DTYPE,
            "`grad_dtype`; gradients are reduced in communication_data_type, else in the "
            "parameters' dtype",
            policy=True,
        ),
        mapped(
            "param_dtype", DTYPE, "must be the dtype that bf16.enabled or fp16.enabled sets",
            policy=True,
        ),
        mapped("buffer_dtype", DTYPE, "`buffer_dtype`: floating buffers are cast"),
        mapped(
            "keep_in_fp32_modules", KEPT,
            '`keep_in_fp32`: buffers that buffer_dtype does not cast; "auto": buffers that a '
            "transformers model names", AUTO,
        ),
    ),
))  # fmt: skip

# -- ZeRO ------------------------------------------------------------------------------------------

_BUCKETS = "the engine moves whole units and chunks, not buckets"
_LIVE = "units stay on the device while they fit, chosen by the order of use in earlier steps"
_CHUNKS = "buffers are chunks of one fixed size, within the budget `ram`"
_ALWAYS_PIPELINED = "reading, updating and writing always overlap"
_REMOVED = "DeepSpeed has removed it"
ZERO = below(
    "zero_optimization",
    mapped(
        "stage", whole(0, 3), "`zero`; stages 1 and 2 keep parameters on the device; 0 is refused",
        0, policy=True,
    ),
    below(
        "offload_param",
        mapped(
            "device", choice("none", "cpu", "nvme"), '`params`; "none": "device"', "none",
            policy=True,
        ),
        mapped(
            "nvme_path", ANY_TEXT,
            "`nvme`; where it differs from the optimizer's, states are striped over both",
            policy=True,
        ),
        mapped(
            "max_in_cpu", COUNT,
            '`resident["params"]` in bytes, if given; DeepSpeed defaults to 1e9',
            policy=True,
        ),
        ignored("buffer_count buffer_size", COUNT, _CHUNKS),
        ignored("pin_memory", FLAG, "memory that a GPU copies from is always pinned"),
    ),
    below(
        "offload_optimizer",
        mapped(
            "device", choice("none", "cpu", "nvme"),
            '`optim`; "none": "cpu", since the engine keeps no optimizer states on the device; '
            'with stages 1 and 2 DeepSpeed takes CPU memory for "nvme"', "none", policy=True,
        ),
        mapped("nvme_path", ANY_TEXT, "`nvme`", policy=True),
        ignored("buffer_count", COUNT, _CHUNKS),
        ignored("pin_memory", FLAG, "memory that a GPU copies from is always pinned"),
        ignored("pipeline_read pipeline_write", FLAG, _ALWAYS_PIPELINED),
        ignored("fast_init", FLAG, "states are never written before the first step"),
        refused(
            "ratio", off_at(1),
            "all states are offloaded: leave it out. States stay in RAM while the budget lasts; "
            "`resident` fixes a share",
        ),
        refused(
            "super_offload", off_at(False),
            'set false: updates on the CPU overlap with the next forward anyway; '
            'Policy(update="backward", generations=2) begins them in backward',
        ),
        ignored("cpuadam_cores_perc", number(0, 1), "`update_threads` sets the number of threads"),
    ),
    mapped("zero_quantized_weights", FLAG, "`qwz`, with stage 3", False, policy=True),
    mapped("zero_quantized_gradients", FLAG, "`qgz`, with stage 3", False, policy=True),
    mapped(
        "zero_hpz_partition_size", COUNT,
        '`hpz="device"` if more than 1; it must be the number of ranks of a node', 1, policy=True,
    ),
    refused(
        "zero_quantized_nontrainable_weights", off_at(False),
        "frozen weights keep their dtype: set false; a quantized model (bitsandbytes) can be "
        "offloaded unchanged",
    ),
    mapped(
        "cpu_offload", FLAG, 'deprecated: offload_optimizer.device="cpu" when true', policy=True
    ),
    mapped(
        "cpu_offload_param", FLAG, 'deprecated: offload_param.device="cpu" when true', policy=True
    ),
    ignored("cpu_offload_use_pin_memory", FLAG, "memory that a GPU copies from is always pinned"),
    ignored("contiguous_gradients", FLAG, "a unit's gradients always share one buffer"),
    ignored("reduce_scatter", FLAG, "each rank always receives only its part of a gradient"),
    ignored("reduce_bucket_size", whole(1), _BUCKETS),
    ignored("allgather_bucket_size", COUNT, _BUCKETS),
    ignored("use_multi_rank_bucket_allreduce", FLAG, _BUCKETS),
    ignored("allgather_partitions", FLAG, "shards are always gathered together"),
    ignored("overlap_comm", FLAG, "communication always runs beside computation"),
    ignored("compute_grad_norm", FLAG, "a norm is computed only on request"),
    ignored("load_from_fp32_weights", FLAG, "a checkpoint always has the fp32 masters"),
    ignored("elastic_checkpoint", FLAG, "every checkpoint restores on any number of ranks"),
    ignored("sub_group_size", COUNT, _CHUNKS),
    ignored("stage3_max_live_parameters", COUNT, _LIVE, also="max_live_parameters"),
    ignored("stage3_max_reuse_distance", COUNT, _LIVE, also="max_reuse_distance"),
    ignored("stage3_prefetch_bucket_size", COUNT, _LIVE, also="prefetch_bucket_size"),
    ignored(
        "stage3_param_persistence_threshold", COUNT,
        "small modules are gathered with their neighbours", also="param_persistence_threshold",
    ),
    ignored(
        "stage3_model_persistence_threshold", COUNT,
        "small modules are gathered with their neighbours", also="model_persistence_threshold",
    ),
    ignored(
        "stage3_gather_16bit_weights_on_model_save", FLAG, "weights are always saved, as a stream",
        also="gather_16bit_weights_on_model_save",
    ),
    ignored(
        "stage3_gather_fp16_weights_on_model_save", FLAG,
        "deprecated; weights are always saved, as a stream",
    ),
    ignored(
        "stage3_module_granularity_threshold", whole(-LARGEST),
        "each block is gathered whole", also="module_granularity_threshold",
    ),
    ignored(
        "stage3_use_all_reduce_for_fetch_params", FLAG, "shards are always gathered together",
        also="use_all_reduce_for_fetch_params",
    ),
    ignored(
        "stage3_allgather_sequential", FLAG, "gathers always have memory for a few units",
        also="allgather_sequential",
    ),
    ignored(
        "ignore_unused_parameters", FLAG, "a parameter without a gradient is not updated; false: "
        "`infinity.compat.deepspeed` raises for it in `engine.step()`",
    ),
    ignored("legacy_stage1", FLAG, "there is one implementation of each stage"),
    ignored("round_robin_gradients", FLAG, "gradients are split evenly over the ranks"),
    ignored("parameter_alignment", FLAG, "gathered parameters are always aligned to 256 bytes"),
    ignored("memory_efficient_linear", FLAG, "autograd never keeps a gathered weight"),
    ignored(
        "pipeline_loading_checkpoint", FLAG, "a checkpoint is always read unit by unit"
    ),
    ignored("override_module_apply", FLAG, "`inf.offload` takes a module that exists already"),
    ignored("log_trace_cache_warnings enable_sanity_checks", FLAG, "checks are always made"),
    ignored("save_muon_momentum_buffer_in_memory", FLAG, "`optim` says where momenta rest"),
    ignored(
        "leaf_module.classes leaf_module.names leaf_module.name_suffixes", TEXTS,
        "each block is gathered whole; `units` names other blocks, and `infinity.compat.deepspeed` "
        "makes each leaf module a unit",
    ),
    refused(
        "zenflow", off_at(None),
        'leave it out: it computes with old parameters; Policy(update="delayed") is similar',
    ),
    refused("mics_shard_size", off_at(-1), f"leave it out: {_REMOVED}; `hpz` is similar"),
    refused("mics_hierarchical_params_gather", off_at(False), f"leave it out: {_REMOVED}"),
    refused(
        "zeropp_loco_param", off_at(None),
        f"leave it out: {_REMOVED}; Policy(error_feedback=True) adds the error of int4 rounding to "
        "the next gradient",
    ),
)  # fmt: skip
ZERO_OLD = ignored(
    "allgather_size", COUNT, "deprecated; DeepSpeed reads it only with zero_optimization=true"
)

# -- Drives and activations ------------------------------------------------------------------------

IO = _flat((
    below(
        "aio",
        mapped("block_size", whole(1), "`io.block_bytes`, if given", policy=True),
        mapped("queue_depth", whole(1), "`io.depth`, if given", policy=True),
        ignored(
            "intra_op_parallelism thread_count", COUNT,
            "native threads verify, update and copy; `update_threads` sets their number",
        ),
        ignored("single_submit overlap_events", FLAG, "rings always have many requests in flight"),
        ignored("use_gds", FLAG, "drives read into pinned memory, not into GPU memory"),
    ),
    below(
        "activation_checkpointing",
        mapped(
            "cpu_checkpointing", FLAG,
            '`activations="cpu"`: for every checkpointed call, not only DeepSpeed\'s', False,
            policy=True,
        ),
        ignored("partition_activations", FLAG, "there are no model-parallel ranks"),
        ignored("contiguous_memory_optimization", FLAG, "torch's allocator holds the inputs"),
        ignored("number_checkpoints", COUNT, "the engine needs no count of checkpointed calls"),
        ignored(
            "synchronize_checkpoint_boundary profile", FLAG, "`handle.stats()` shows times"
        ),
    ),
))  # fmt: skip

# -- Optimizer and scheduler -----------------------------------------------------------------------

_OF_OPTIMIZER = "of the optimizer"
_WARMUP, _CYCLE = "of the Warmup schedules", "of OneCycle"
_LR = numbers(number(0))
UPDATES = _flat((
    below(
        "optimizer",
        mapped("type", TEXT, "`optimizer[0]`: a class of `inf`, or of torch.optim"),
        ignored("legacy_fusion", FLAG, "the engine's update is always one kernel"),
        below(
            "params",
            mapped("lr", number(0), _OF_OPTIMIZER),
            mapped("betas", BETAS, _OF_OPTIMIZER),
            mapped("eps", number(0), _OF_OPTIMIZER),
            mapped("weight_decay", number(0), _OF_OPTIMIZER),
            mapped(
                "adam_w_mode", FLAG,
                'of Adam: false is `"Adam"`, else `"AdamW"`; without decay both are equal',
                True,
            ),
            mapped("torch_adam", FLAG, "weight_decay defaults to torch's; the update is the same",
                   False),
            mapped("momentum", number(0), _OF_OPTIMIZER),
            mapped("muon_lr", number(0), "of Muon: the rate of matrices, in place of lr"),
            mapped("adam_lr", number(0), "of Muon: the rate of the rest, in place of lr"),
            mapped(
                "ns_method", choice("standard", "gram"),
                'of Muon: "standard"; "gram", DeepSpeed\'s default, is refused',
            ),
            mapped("dampening", number(), _OF_OPTIMIZER),
            mapped("nesterov", FLAG, _OF_OPTIMIZER),
            mapped("lr_decay", number(0), _OF_OPTIMIZER),
            mapped("initial_accumulator_value", number(0), _OF_OPTIMIZER),
            mapped("alpha", number(0), _OF_OPTIMIZER),
            mapped("centered", FLAG, _OF_OPTIMIZER),
            mapped("rho", number(0, 1), _OF_OPTIMIZER),
            mapped("lambd", number(), _OF_OPTIMIZER),
            mapped("t0", number(0), _OF_OPTIMIZER),
            mapped("momentum_decay", number(0), _OF_OPTIMIZER),
            mapped("decoupled_weight_decay", FLAG, _OF_OPTIMIZER),
            mapped("etas", PAIR, _OF_OPTIMIZER),
            mapped("step_sizes", PAIR, _OF_OPTIMIZER),
            ignored(
                "foreach fused capturable set_grad_none", FLAG,
                "it changes how torch runs an update, not the numbers",
            ),
            ignored(
                "fp32_optimizer_states", FLAG,
                "DeepSpeed's moments have the masters' dtype, fp32; here `state` sets it",
            ),
            refused(
                "bias_correction", off_at(True), "AdamW corrects its moments: set true, or leave "
                "it out",
            ),
            refused(
                "per_head_muon", off_at(False), "leave it out: a matrix of all heads is one matrix"
            ),
            refused("amsgrad", off_at(False), "leave it out: DeepSpeed's Adam has none either"),
            refused("maximize", off_at(False), "leave it out, and negate the loss"),
            refused("differentiable", off_at(False), "leave it out: an update has no graph"),
            refused(
                "max_grad_norm", off_at(0),
                "set gradient_clipping at the top instead; DeepSpeed refuses this key, too",
            ),
        ),
    ),
    below(
        "scheduler",
        mapped("type", TEXT, "`scheduler[0]`: a schedule of DeepSpeed's or of torch's"),
        below(
            "params",
            mapped("warmup_min_lr", _LR, _WARMUP),
            mapped("warmup_max_lr", _LR, _WARMUP),
            mapped("warmup_num_steps", whole(1), _WARMUP),
            mapped("warmup_type", choice("log", "linear"), _WARMUP),
            mapped("total_num_steps", whole(1), "of WarmupDecayLR and WarmupCosineLR"),
            mapped("warmup_min_ratio", number(0), "of WarmupCosineLR"),
            mapped("cos_min_ratio", number(0), "of WarmupCosineLR"),
            mapped("cycle_min_lr", _LR, _CYCLE),
            mapped("cycle_max_lr", _LR, _CYCLE),
            mapped("decay_lr_rate", number(0), _CYCLE),
            mapped("cycle_first_step_size", number(0, above=True), _CYCLE),
            mapped("cycle_second_step_size", number(0), _CYCLE),
            mapped("cycle_first_stair_count", COUNT, _CYCLE),
            mapped("cycle_second_stair_count", COUNT, _CYCLE),
            mapped("decay_step_size", number(0), _CYCLE),
            mapped("cycle_momentum", FLAG, _CYCLE),
            mapped("cycle_min_mom", numbers(number(0, 1)), _CYCLE),
            mapped("cycle_max_mom", numbers(number(0, 1)), _CYCLE),
            mapped("decay_mom_rate", number(0), _CYCLE),
            mapped("lr_range_test_min_lr", _LR, "of LRRangeTest"),
            mapped("lr_range_test_step_size", whole(1), "of LRRangeTest"),
            mapped("lr_range_test_step_rate", number(0), "of LRRangeTest"),
            mapped("lr_range_test_staircase", FLAG, "of LRRangeTest"),
            mapped("last_batch_iteration", whole(-1), "of every schedule"),
        ),
    ),
    ignored("zero_allow_untested_optimizer", FLAG, "the engine tests every optimizer before use"),
    ignored("zero_force_ds_cpu_optimizer", FLAG, "the engine always uses its own optimizers"),
))  # fmt: skip

# -- Logs, monitors and checkpoints ----------------------------------------------------------------

_NO_MONITOR = "the engine writes nothing; `inf.StepLog` records steps"
_NO_PROFILE = "`handle.stats()` and `handle.trace()` show times"
_SAVES = "`inf.save` writes checkpoints, in its own format"
_COMPILE = "an option of DeepCompile"
REPORTS = _flat((
    ignored("steps_per_print", STEPS, "the engine prints nothing; `inf.StepLog` records steps"),
    ignored("wall_clock_breakdown memory_breakdown dump_state", FLAG, _NO_PROFILE),
    ignored("log_level", ANYTHING, "set the level of Python's logger `infinity` instead"),
    ignored("disable_python_gc", FLAG, "the engine does not touch the garbage collector"),
    ignored("vocabulary_size", COUNT, "DeepSpeed uses it only for a warning"),
    below(
        "timers.throughput", ignored("enabled synchronized", FLAG, _NO_PROFILE)
    ),
    below(
        "flops_profiler",
        ignored("enabled detailed", FLAG, _NO_PROFILE),
        ignored("recompute_fwd_factor", number(0), _NO_PROFILE),
        ignored("profile_step module_depth top_modules", whole(-LARGEST), _NO_PROFILE),
        ignored("output_file", ANY_TEXT, _NO_PROFILE),
    ),
    below(
        "comms_logger",
        ignored("enabled prof_all verbose debug", FLAG, "`handle.stats()` counts exchanges"),
        ignored("prof_ops", LIST, "`handle.stats()` counts exchanges"),
    ),
    *(
        below(
            monitor,
            ignored("enabled", FLAG, _NO_MONITOR),
            ignored(texts, ANY_TEXT, _NO_MONITOR),
        )
        for monitor, texts in (
            ("tensorboard", "output_path job_name"),
            ("csv_monitor", "output_path job_name"),
            ("wandb", "group team project"),
            ("comet", "project workspace api_key experiment_name experiment_key mode"),
        )
    ),
    below(
        "comet",
        ignored("samples_log_interval", COUNT, _NO_MONITOR),
        ignored("online", FLAG, _NO_MONITOR),
    ),
    below(
        "checkpoint",
        ignored(
            "tag_validation", choice("IGNORE", "WARN", "FAIL", fold=str.upper),
            "all ranks must give the same tag",
        ),
        ignored("checkpoint_serialization", FLAG, _SAVES),
        below(
            "writer",
            ignored(
                "type", choice("MOCK", "PYTHON", "FAST", fold=str.upper), _SAVES
            ),
            ignored("io_buffer_size io_multiplier", COUNT, _SAVES),
            ignored("io_buffer_double show_statistics decoupled", FLAG, _SAVES),
            ignored(
                "data_parallel", choice("REPLICA", "SOCKET", "MACHINE", fold=str.upper), _SAVES
            ),
        ),
        below("parallel_write", ignored("pipeline_stage", FLAG, _SAVES)),
        refused(
            "load_universal", off_at(False),
            "set false: `inf.load_deepspeed(model, directory)` reads universal checkpoints",
        ),
        refused(
            "use_node_local_storage", off_at(False),
            "set false, and save to a directory that all ranks share",
        ),
    ),
    ignored("datastates_ckpt", ANYTHING, _SAVES),
))  # fmt: skip

# -- Other ways to train ---------------------------------------------------------------------------

_NO_MODEL_PARALLEL = "the engine splits states over data-parallel ranks only: leave it out"
_GONE = f"leave it out: {_REMOVED}"
OTHERS = _flat((
    below(
        "tensor_parallel",
        refused("autotp_size", off_at(0, 1), _NO_MODEL_PARALLEL),
        ignored("dtype vocab_parallel_ce_backend preset_model", ANYTHING, _ONE_GROUP),
        ignored(
            "tp_overlap_comm vocab_parallel_lm_head keep_module_on_host", FLAG, _ONE_GROUP
        ),
        ignored("tp", OBJECT, _ONE_GROUP, also="tensor_parallel"),
        ignored("injection_policy_tuple", LIST, _ONE_GROUP),
        ignored("partition_config", OBJECT, _ONE_GROUP),
        ignored("replace_with_kernel_inject", FLAG, _ONE_GROUP, also="kernel_inject"),
    ),
    refused("expert_parallel", DEFAULT_OFF, _NO_MODEL_PARALLEL),
    refused("pipeline", ONE_STAGE, _NO_MODEL_PARALLEL),
    refused("sequence_parallel_size", off_at(1), _NO_MODEL_PARALLEL),
    ignored("data_parallel_size", whole(1), "the ranks of the process group split the batch"),
    ignored("use_data_before_expert_parallelism", FLAG, _ONE_GROUP),
    below(
        "compile",
        refused(
            "deepcompile", off_at(False),
            "set false; `torch.compile` of a block's forward works",
        ),
        ignored(
            "autoep_non_moe free_activation offload_activation offload_activation_pin_memory "
            "offload_opt_states double_buffer symmetric_memory debug_log offload_parameters "
            "sync_before_reduce sync_after_reduce sync_before_allgather sync_after_allgather "
            "keep_int_input_tensors keep_all_input_tensors", FLAG, _COMPILE,
        ),
        ignored("free_activation_threshold", COUNT, _COMPILE),
        ignored("passes", LIST, _COMPILE),
    ),
    refused(
        "autotuning", DEFAULT_OFF, "leave it out: `infinity plan` predicts the gain of a change"
    ),
    refused("hybrid_engine", DEFAULT_OFF, "leave it out: an offloaded model can generate"),
    refused(
        "data_efficiency", DEFAULT_OFF, "leave it out, and choose samples in the data loader"
    ),
    refused(
        "weight_quantization", SWITCH,
        "leave it out; a quantized model (bitsandbytes) can be offloaded unchanged",
    ),
    refused("msamp", DEFAULT_OFF, "leave it out: accelerate uses it for fp8, in place of ZeRO"),
    refused("amp", DEFAULT_OFF, f"{_GONE}; set bf16, fp16 or torch_autocast instead"),
    refused("elasticity", DEFAULT_OFF, f"{_GONE}; a checkpoint restores on any number of ranks"),
    refused("sparse_gradients", off_at(False), _GONE),
    refused("sparse_attention", SWITCH, _GONE),
    refused("graph_harvesting", off_at(False), _GONE),
    refused("quantize_training", DEFAULT_OFF, _GONE),
    refused("eigenvalue", DEFAULT_OFF, _GONE),
    refused("compression_training", SWITCH, _GONE),
    refused("progressive_layer_drop", DEFAULT_OFF, _GONE),
    refused("curriculum_learning", DEFAULT_OFF, f"{_GONE}; choose samples in the data loader"),
    refused("nebula", DEFAULT_OFF, f"{_GONE}; `inf.save` writes checkpoints"),
))  # fmt: skip

GROUPS: dict[str, tuple[ConfigKey, ...]] = {
    "ZeRO and offload": (*ZERO, *ZERO_OLD),
    "Precision": PRECISION,
    "Batches and gradients": BATCHES,
    "Optimizer and scheduler": UPDATES,
    "Drives and activations": IO,
    "Logs, monitors and checkpoints": REPORTS,
    "Other ways to train": OTHERS,
}
"""All rows, by their heading on the page."""
KEYS: dict[str, ConfigKey] = {key.name: key for keys in GROUPS.values() for key in keys}
SPELLINGS: dict[str, ConfigKey] = {name: key for key in KEYS.values() for name in key.spellings}
SECTIONS: frozenset[str] = frozenset(
    name.rsplit(".", count)[0] for name in KEYS for count in range(1, name.count(".") + 1)
)
"""Dotted names of objects that hold keys."""
