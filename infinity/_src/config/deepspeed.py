"""Conversion of a DeepSpeed configuration to a policy and the settings of a run.

    file or mapping -> names and values checked against the table (`deepspeed_keys.py`), "auto"
    filled -> `DeepSpeedRun`: fields of `inf.Policy`, dtype, loss scaling, batch sizes, optimizer,
    scheduler, and a note for each key that has no effect, or a different effect, in this engine

Dtypes are names, so that this module imports no torch.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import difflib
import json
import os
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from infinity._src.base.wording import listed
from infinity._src.config.deepspeed_keys import (
    AUTO,
    KEYS,
    LEFT_OUT,
    MAPPED,
    NO_MEANING,
    REFUSED,
    SECTIONS,
    SPELLINGS,
    TORCH_SCHEDULES,
    ConfigKey,
    shown,
)
from infinity.aio import IoSettings

# -- Names and values of a configuration -----------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class KeyMeaning:
    """One key of a configuration as written, its value, its status (`fate`), and its meaning in
    this engine (`became`).

    fate: "mapped", "no meaning", "refused" (with a value that requests nothing), or "left out"
    (the configuration lacks the key, and the engine's default differs from DeepSpeed's).
    """

    key: str
    value: Any
    fate: str
    became: str


def load(config: Any) -> tuple[str, Mapping[str, Any]]:
    """Load a configuration. Returns its name for messages, and its object."""
    if isinstance(config, Mapping):
        return "DeepSpeed configuration", config
    if not isinstance(config, (str, os.PathLike)):
        raise ValueError(
            f"DeepSpeed configuration {shown(config)}: give a mapping or the path of a JSON file"
        )
    where, text = _text_of(config)
    try:
        found = json.loads(text, object_pairs_hook=_without_duplicates)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{where}: line {error.lineno}, column {error.colno}: {error.msg}. The configuration "
            "must be plain JSON: remove comments and trailing commas, which DeepSpeed accepts"
        ) from None
    except RecursionError:
        raise ValueError(
            f"{where}: objects are nested deeper than any known key; correct the brackets"
        ) from None
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    if not isinstance(found, Mapping):
        raise ValueError(f"{where}: {shown(found)} is not a configuration; write a JSON object")
    return where, found


def _text_of(config: str | os.PathLike[str]) -> tuple[str, str]:
    path = Path(config)
    try:
        return str(path), path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{path}: not UTF-8 text; write the configuration as JSON") from None
    except (OSError, ValueError) as error:
        # Launchers pass configurations as base64.
        if (text := _decoded(os.fspath(config))) is not None:
            return "DeepSpeed configuration", text
        reason = getattr(error, "strerror", None) or str(error)
        raise ValueError(
            f"{shown(os.fspath(config))}: {reason}; give a mapping or the path of a JSON file"
        ) from None


def _decoded(text: str) -> str | None:
    try:
        found = base64.b64decode(text.encode(), altchars=b"-_", validate=True).decode()
    except (binascii.Error, UnicodeError):
        return None
    return found if found.lstrip().startswith("{") else None


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = sorted({name for name in names if names.count(name) > 1})
        raise ValueError(f"{listed(map(shown, twice))} twice in one object: keep one of them")
    return found


@dataclasses.dataclass
class _Entry:
    """One given key: its row in the table, its name as written, its value."""

    key: ConfigKey
    written: str
    value: Any


def collected(config: Mapping[str, Any]) -> Given:
    """Collect the keys of a configuration with their rows of the table. A key whose value is null
    counts as missing.
    """
    entries: dict[str, _Entry] = {}
    config = _moved(config)
    torch_section = _torch_schedule(config)
    for key, written, value in _walk(config, "", torch_section):
        if key.name in entries:
            raise ValueError(
                f"{entries[key.name].written} and {written} are two names of one key: keep "
                f"{key.name}"
            )
        entries[key.name] = _Entry(key, written, value)
    return Given(entries, config["scheduler"].get("params") or {} if torch_section else {})


def _moved(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration without comments, with the keys of old versions and of Hugging Face's
    pages moved to their current places.
    """
    # Comments: DeepSpeed ignores these names, too.
    found = {
        name: value
        for name, value in config.items()
        if not (isinstance(name, str) and name.startswith("_"))
    }
    old = found.pop("bfloat16", None)
    if old is not None and found.get("bf16") is None:
        found["bf16"] = old
    zero = found.get("zero_optimization")
    if isinstance(zero, bool):
        found["zero_optimization"] = {"stage": int(zero)}
    elif isinstance(zero, Mapping) and "aio" in zero:
        if found.get("aio") is not None:
            raise ValueError(
                "aio and zero_optimization.aio: keep aio, at the top, where DeepSpeed reads it"
            )
        found["zero_optimization"] = {name: value for name, value in zero.items() if name != "aio"}
        found["aio"] = zero["aio"]
    return found


def _torch_schedule(config: Mapping[str, Any]) -> str | None:
    """Return the name of the section with a torch schedule's arguments, whose names are not
    checked; None for other schedules.
    """
    scheduler = config.get("scheduler")
    if not isinstance(scheduler, Mapping):
        return None
    kind, arguments = scheduler.get("type"), scheduler.get("params")
    if not isinstance(kind, str) or kind not in TORCH_SCHEDULES:
        return None
    if not isinstance(arguments, (Mapping, type(None))) or not all(
        isinstance(name, str) for name in arguments or ()
    ):
        raise ValueError(f"scheduler.params={shown(arguments)}: give an object")
    return "scheduler.params"


def _walk(
    values: Mapping[Any, Any], section: str, untouched: str | None
) -> Iterator[tuple[ConfigKey, str, Any]]:
    for name, value in values.items():
        if not isinstance(name, str):
            raise ValueError(f"{section}{shown(name)}: a key must be a text")
        written = section + name
        if value is None or written == untouched:
            # The name is checked, too: null under an unknown name is a mistake.
            if written not in SPELLINGS and written not in SECTIONS:
                raise ValueError(_unknown(written, value))
        elif written in SPELLINGS:
            yield SPELLINGS[written], written, value
        elif written not in SECTIONS:
            raise ValueError(_unknown(written, value))
        elif isinstance(value, Mapping):
            yield from _walk(value, written + ".", untouched)
        else:
            raise ValueError(f"{written}={shown(value)}: give an object")


def _unknown(written: str, value: Any) -> str:
    """Return the message for an unknown key. It suggests a known key: the only one with the same
    last part, else the nearest name in the same section, else the nearest name of all.
    """
    known = sorted({*SPELLINGS, *SECTIONS})
    section, _, last = written[:200].rpartition(".")
    elsewhere = [name for name in known if name.rpartition(".")[2] == last]
    beside = [name for name in known if name.startswith(section)]
    by_last = {name.rpartition(".")[2]: name for name in reversed(known)}
    near = (
        (elsewhere if len(elsewhere) == 1 else [])
        or difflib.get_close_matches(written[:200], beside, 1, 0.75)
        or [by_last[one] for one in difflib.get_close_matches(last, by_last, 1, 0.75)]
        or difflib.get_close_matches(written[:200], known, 1, 0.5)
    )
    fix = f'write "{near[0]}", the nearest known key' if near else "leave it out"
    name = written if len(written) <= 80 and written.isprintable() else shown(written)
    return f"{name}={shown(value)}: there is no such key; {fix} (docs/deepspeed-config.md)"


class Given:
    """Values of a configuration by the names of their rows, and notes on their effect in this
    engine.

    untouched: the arguments of a torch schedule, which are not checked.
    """

    def __init__(self, entries: dict[str, _Entry], untouched: Mapping[str, Any]) -> None:
        self.untouched = untouched
        self._entries = entries
        self._open: set[str] = set()
        self._became: dict[str, str] = {}
        self._differs: dict[str, str] = {}

    def fill(self, auto: Mapping[str, Any], *, keep_auto: bool) -> None:
        """Replace "auto" by the values of `auto`. An "auto" without a value counts as missing if
        the engine does not use the key, or with keep_auto if no field of the policy depends on it;
        otherwise it is an error.
        """
        for name in auto:
            if name not in SPELLINGS:
                raise ValueError(f"auto: {_unknown(str(name), auto[name])}")
        values = {SPELLINGS[name].name: value for name, value in auto.items()}
        lacking = []
        for name, entry in list(self._entries.items()):
            if (
                entry.value != AUTO
                or not isinstance(entry.value, str)
                or entry.key.check.takes_auto
            ):
                continue
            if name in values:
                entry.value = values[name]
            elif entry.key.fate == NO_MEANING or (keep_auto and not entry.key.policy):
                self._open.add(name)
                known = entry.key.fate == NO_MEANING
                self._became[name] = entry.key.to if known else "as the trainer fills it"
            else:
                lacking.append(entry.written)
        if lacking:
            raise ValueError(
                f'{listed(lacking)}: a trainer must replace "auto" before the engine reads the '
                f"configuration; write the value, or pass auto={{{lacking[0]!r}: ...}}"
            )

    def check(self) -> None:
        """Check all values, and convert them for the engine."""
        for name, entry in self._entries.items():
            key = entry.key
            if self._is_auto(name):
                continue
            if key.off is not None:
                if not key.off.tells(entry.value):
                    raise ValueError(f"{self.show(name)} is refused: {key.to}")
                continue
            try:
                entry.value = key.check.read(entry.value)
            except (ValueError, TypeError):
                raise ValueError(f"{self.show(name)}: give {key.check.text}") from None

    def _is_auto(self, name: str) -> bool:
        return name in self._open

    def has(self, name: str) -> bool:
        """Return whether a key has a value."""
        return name in self._entries and not self._is_auto(name)

    def was_written(self, name: str) -> bool:
        """Return whether a key is present, also as "auto"."""
        return name in self._entries

    def __getitem__(self, name: str) -> Any:
        return self._entries[name].value if self.has(name) else KEYS[name].default

    def below(self, section: str) -> dict[str, Any]:
        """Return the given mapped values of a section, by the last parts of their names."""
        return {
            name.removeprefix(section): entry.value
            for name, entry in self._entries.items()
            if name.startswith(section) and entry.key.fate == MAPPED and self.has(name)
        }

    def show(self, name: str) -> str:
        """Format a key as written, with its value; a missing one with its default."""
        if name not in self._entries:
            return f"{name}={shown(KEYS[name].default)} (left out)"
        entry = self._entries[name]
        return f"{entry.written}={shown(entry.value)}"

    def became(self, name: str, text: str) -> None:
        """Record a given key's effect in this engine, unless its value is an open "auto"."""
        if name in self._entries and not self._is_auto(name):
            self._became[name] = text

    def differs(self, name: str, text: str) -> None:
        """Record that a key, or its default, has another effect in this engine."""
        self._differs[name] = text

    def meanings(self) -> tuple[KeyMeaning, ...]:
        """Return all keys in the order of the configuration, then missing keys whose defaults
        differ here.
        """
        given = [
            KeyMeaning(entry.written, entry.value, entry.key.fate, self._text(entry))
            for entry in self._entries.values()
        ]
        absent = [
            KeyMeaning(name, KEYS[name].default, LEFT_OUT, text)
            for name, text in self._differs.items()
            if name not in self._entries
        ]
        return (*given, *absent)

    def _text(self, entry: _Entry) -> str:
        name = entry.key.name
        if name in self._differs:
            return self._differs[name]
        if entry.key.fate == REFUSED:
            return "requests nothing"
        return self._became.get(name, entry.key.to)

    def notes(self) -> tuple[str, ...]:
        """Return a line for each key that has no effect, or another effect, in this engine."""
        return tuple(
            f"{self.show(SPELLINGS[found.key].name)}: {found.became}"
            for found in self.meanings()
            if self._is_noted(SPELLINGS[found.key].name, found.fate)
        )

    def _is_noted(self, name: str, fate: str) -> bool:
        return fate in (NO_MEANING, LEFT_OUT) or name in self._differs or self._is_auto(name)


_NOTHING: Mapping[str, Any] = types.MappingProxyType({})


@dataclasses.dataclass(frozen=True)
class LossScaling:
    """Loss scaling of fp16. static: a fixed scale; None: dynamic, by the other fields.

    initial_scale: the first scale. window: steps without overflow before the scale doubles.
    min_scale: the minimum. hysteresis: overflows before the scale is halved;
    consecutive_hysteresis: a step without overflow resets their count. raise_at_min: an overflow at
    min_scale is an error.
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
    """A DeepSpeed configuration, converted for the engine. Dtypes are torch's names.

    policy: fields for `inf.Policy.from_deepspeed(run)`. dtype: "bfloat16" or "float16", to which
    parameters are cast; None: not cast. autocast: the dtype of autocast around forward; "float16"
    without `loss_scaling` needs torch's GradScaler. clip_norm: 0.0: no clipping. optimizer: (name
    of a class of `inf` or, for `inf.Elementwise`, of torch.optim; arguments; for Muon also
    `adam_lr`, the learning rate of parameters that are not matrices). scheduler: (name of a
    DeepSpeed or torch schedule; arguments). cast_inputs: cast floating inputs of forward to fp16.
    buffer_dtype: dtype of floating buffers, except buffers named by keep_in_fp32 ("auto": a
    transformers model names them). managed_accumulation: the engine counts micro-batches.
    drop_last: setting of a loader that the engine creates. notes: a line for each key that has no
    effect, or another effect, in this engine. keys: all keys, in order.
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
    ({"optimizer.params.lr": 1e-4}). keep_auto: for the policy only: an "auto" on which no field of
    the policy depends is noted and counts as missing; otherwise it is an error.

    Raises: ValueError naming key, value and fix.
    """
    where, values = load(config)
    try:
        # First, since the arguments of an unknown optimizer cannot be checked.
        _check_optimizer(values)
        given = collected(values)
        given.fill(auto, keep_auto=keep_auto)
        given.check()
        return _run(given, world_size, ranks_per_node)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _run(given: Given, world_size: int, ranks_per_node: int | None) -> DeepSpeedRun:
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
            f"{given.show('bf16.enabled')} and {given.show('fp16.enabled')}: a model has one dtype;"
            " set one of them to false"
        )
    dtype, scaling = None, None
    if given["bf16.enabled"]:
        dtype = "bfloat16"
    if given["fp16.enabled"]:
        dtype, scaling = "float16", _loss_scaling(given)
    for section, name in (("bf16.", "bfloat16"), ("fp16.", "float16")):
        for key in given.below(section) if dtype != name else ():
            given.became(section + key, f"no effect: {section}enabled is off")
    if dtype is not None:
        given.became(f"{'bf' if dtype == 'bfloat16' else 'fp'}16.enabled", f"dtype={dtype!r}")
    wanted = given["data_types.param_dtype"]
    if wanted is not None and wanted != (dtype or "float32"):
        raise ValueError(
            f"{given.show('data_types.param_dtype')} contradicts bf16.enabled and fp16.enabled "
            f"({dtype or 'float32'}): leave it out, or enable the section of this dtype"
        )
    return dtype, scaling


def _loss_scaling(given: Given) -> LossScaling:
    static = given["fp16.loss_scale"] or None
    least = {"fp16.loss_scale_window": 1, "fp16.min_loss_scale": 1, "fp16.hysteresis": 1}
    for name, limit in least.items():
        # A static scale uses none of these keys, and DeepSpeed then does not check them.
        if static is None and given[name] < limit:
            raise ValueError(
                f"{given.show(name)}: give a whole number, {limit} or more, with dynamic loss "
                "scaling (fp16.loss_scale=0)"
            )
    for key, value in given.below("fp16.").items():
        dynamic = key not in ("enabled", "auto_cast", "loss_scale")
        unused = "no effect: the scale is static"
        given.became(f"fp16.{key}", unused if dynamic and static else f"{key}={value!r}")
    return LossScaling(
        static=static,
        initial_scale=2.0 ** given["fp16.initial_scale_power"],
        window=given["fp16.loss_scale_window"],
        min_scale=float(given["fp16.min_loss_scale"]),
        hysteresis=given["fp16.hysteresis"],
        consecutive_hysteresis=given["fp16.consecutive_hysteresis"],
        # ZeRO's optimizers do so.
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
            f"{given.show('zero_optimization.zero_quantized_weights')}: DeepSpeed refuses both "
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
            f"{given.show(_ZERO + 'stage')} shards and offloads nothing: set "
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
            "activations='cpu': for every checkpointed call, not only DeepSpeed's",
        )
    fields |= _io(given)
    return fields


def _bfloat16(given: Given, stage: int) -> dict[str, Any]:
    """Return the fields `state` and `on_nonfinite` for bf16."""
    check, states = "bf16.check_grad_overflow", "bf16.bf16_optimizer_states"
    fields: dict[str, Any] = {"on_nonfinite": "skip" if given[check] else "ignore"}
    given.became(check, f"on_nonfinite={fields['on_nonfinite']!r}")
    if stage == 3 and given[check]:
        given.differs(
            check, "on_nonfinite='skip'; with stage 3 DeepSpeed takes the step nevertheless"
        )
    if given[states]:
        fields["state"] = "bf16"
        given.differs(states, "state='bf16': masters keep 32 bits, where DeepSpeed's have 16")
    return fields


def _device(given: Given, section: str, old: str) -> str:
    """Return the device of an offload section, or of its old key."""
    name = section + "device"
    if not given.has(old):
        device: str = given[name]
        return device
    if any(given.below(section)):
        raise ValueError(
            f"{given.show(old)} and {section.rstrip('.')}: the section replaces the old key; leave "
            f"{old} out"
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
            f"optim='nvme'; with stage {stage} DeepSpeed keeps optimizer states in CPU memory",
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
    """Return the fields `nvme` and `resident`."""
    paths: list[str] = []
    for section, tier in ((_PARAM, tiers["params"]), (_OPTIM, tiers["optim"])):
        path = given[section + "nvme_path"]
        if tier != "nvme":
            given.became(section + "nvme_path", f"no effect: these states rest on {tier!r}")
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
        # The value is in elements of the compute dtype.
        size_bytes = given[kept] * (2 if dtype else 4)
        fields["resident"] = {"params": size_bytes}
        given.became(kept, f"resident={{'params': {size_bytes}}}")
    elif given.has(kept):
        given.became(kept, "no effect: parameters do not rest on NVMe")
    return fields


def _exchange(
    given: Given, stage: int, dtype: str | None, world_size: int, ranks_per_node: int | None
) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    accumulated, reduced = given["data_types.grad_accum_dtype"], given["communication_data_type"]
    given.became("communication_data_type", f"reduce_dtype={reduced!r}")
    if accumulated is not None:
        fields["grad_dtype"] = accumulated
        given.became("data_types.grad_accum_dtype", f"grad_dtype={accumulated!r}")
        # The engine reduces in grad_dtype by default, DeepSpeed in the parameters' dtype.
        reduced = reduced or dtype
    if reduced is not None:
        fields["reduce_dtype"] = reduced
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
            given.differs(_ZERO + name, "no effect below stage 3, in DeepSpeed too")
            continue
        if field == "hpz":
            _check_hpz(given, size, world_size, ranks_per_node)
        fields[field] = value
        given.became(_ZERO + name, f"{field}={value!r}")
    return fields


def _check_hpz(given: Given, size: int, world_size: int, ranks_per_node: int | None) -> None:
    text = given.show(_ZERO + "zero_hpz_partition_size")
    # DeepSpeed limits the size to the number of ranks, too.
    size = min(size, max(world_size, 1))
    if world_size % size:
        raise ValueError(
            f"{text}: {world_size} ranks cannot form groups of this size; give a divisor of "
            f"{world_size}"
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
    """Return (micro-batch size, accumulation steps, batch size), with batch = micro-batch x steps x
    ranks. The configuration may lack any of them.
    """
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
    "muon": (
        "Muon", {"betas": (0.9, 0.95), "eps": 1e-10, "momentum": 0.95, "weight_decay": 0.0},
        frozenset(["adam_lr", "adam_w_mode", "lr", "muon_lr", "ns_method", "torch_adam"]),
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
"""Optimizer type -> (class, DeepSpeed's default arguments, further arguments). DeepSpeed's types
are case-insensitive, torch's are not.
"""
_KERNELS = ("AdamW", "Lion", "SGD", "Muon")
_PARAMS = "optimizer.params."


def _check_optimizer(config: Mapping[str, Any]) -> None:
    section = config.get("optimizer")
    kind = section.get("type") if isinstance(section, Mapping) else None
    if not isinstance(kind, str) or not kind or kind in OPTIMIZERS or kind.lower() in OPTIMIZERS:
        return
    raise ValueError(
        f"optimizer.type={shown(kind)} is refused: there is no such optimizer here; take one of "
        f"{', '.join(sorted({name for name, _, _ in OPTIMIZERS.values()}))}, or leave it out and "
        "pass an optimizer of infinity"
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
    if name == "Muon":
        _muon(given, arguments)
    given.became("optimizer.type", f"inf.{name}" if name in _KERNELS else _elementwise(name))
    if name not in _KERNELS:
        given.differs("optimizer.type", _without_kernel(name, arguments))
    for key in arguments:
        given.became(_PARAMS + key, f"{key}={arguments[key]!r}")
    return name, arguments


def _muon(given: Given, arguments: dict[str, Any]) -> None:
    """Convert the arguments of DeepSpeed's Muon to the arguments of `inf.Muon`, and `adam_lr`.
    Raises: ValueError for settings with which DeepSpeed computes another update.
    """
    if arguments.pop("ns_method", "gram") != "standard":
        raise ValueError(
            'optimizer.params.ns_method is "gram", also by default: DeepSpeed iterates on the Gram '
            'matrix in fp16, which the engine does not; set "ns_method": "standard"'
        )
    if given["gradient_clipping"]:
        raise ValueError(
            f"gradient_clipping={given['gradient_clipping']:g} (1 by default) with Muon: DeepSpeed "
            "clips by the norm of the orthogonalized matrices, the engine by that of the "
            'gradients; set "gradient_clipping": 0'
        )
    if not arguments.pop("adam_w_mode", True):
        raise ValueError(
            "optimizer.params.adam_w_mode=false with Muon: the engine updates parameters that are "
            "not matrices with AdamW; set true, or leave it out"
        )
    arguments.pop("torch_adam", None)
    shared = arguments.pop("lr", None)
    for rate, default in (("muon_lr", 0.02), ("adam_lr", 3e-4)):
        arguments.setdefault(rate, default if shared is None else shared)
    arguments["lr"] = arguments.pop("muon_lr")
    arguments["adam_eps"] = arguments.pop("eps")
    given.became(_PARAMS + "muon_lr", f"lr={arguments['lr']!r}")
    given.became(_PARAMS + "eps", f"adam_eps={arguments['adam_eps']!r}")
    given.differs(
        "optimizer.type",
        "inf.Muon iterates as torch.optim.Muon: its products round in another order than "
        "DeepSpeed's, and it clamps norms to 1e-7, where DeepSpeed adds 1e-7",
    )


def _elementwise(name: str) -> str:
    return f"inf.Elementwise(torch.optim.{name})"


def _without_kernel(name: str, arguments: Mapping[str, Any]) -> str:
    slow = _elementwise(name) + ": it has no kernel, and `step()` waits for the update"
    if name == "Adam" and not arguments["weight_decay"]:
        return f"inf.AdamW, the same update while no parameter group decays; else {slow}"
    return slow


def _adam(given: Given, kind: str, arguments: dict[str, Any]) -> str:
    """Return the class for DeepSpeed's Adam, which is AdamW unless adam_w_mode is false."""
    torch_adam = arguments.pop("torch_adam", False)
    decoupled = arguments.pop("adam_w_mode", True) or kind.lower() == "adamw"
    if torch_adam and decoupled and not given.has(_PARAMS + "weight_decay"):
        # torch.optim.AdamW's default.
        arguments["weight_decay"] = 1e-2
    # Without weight decay both are the same update, but parameter groups may set one.
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
"""DeepSpeed schedule -> (required arguments, optional arguments)."""


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
