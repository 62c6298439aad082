"""Choices of the fields of `Policy`, for validation and for the options of commands. Imports no
torch, so that commands show their help quickly.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from infinity._src.base.options import Row
from infinity._src.base.paths import argument

TIERS = ("device", "cpu", "nvme")
GENERATIONS_MAX = 5
"""A drive has at most 8 swap files, and checkpoints made of hard links use some of them."""

OPTIMIZERS = ("adamw", "muon")
SCHEDULES = ("horizontal", "vertical")
"""Orders of micro-batches (`inf.microbatched`). horizontal: each micro-batch runs through the whole
model before the next one. vertical: all micro-batches run through a block before the next block."""

_SWITCH = (False, True)
CHOICES: MappingProxyType[str, tuple[Any, ...]] = MappingProxyType({
    "params": TIERS,
    "optim": TIERS,
    # Gradients are stored in CPU memory or on drives.
    "grads": TIERS[1:],
    "activations": TIERS,
    "state": ("exact", "bf16", "compact"),
    "zero": (1, 2, 3),
    "accumulate": (None, "shard", "local"),
    "hpz": (None, "device", "cpu"),
    "find_unused_parameters": _SWITCH,
    "sync_module_states": _SWITCH,
    "broadcast_buffers": _SWITCH,
    "qwz": _SWITCH,
    "qgz": _SWITCH,
    "error_feedback": _SWITCH,
    "update": ("deferred", "backward", "delayed"),
    "on_nonfinite": ("raise", "skip", "ignore"),
    "verify": ("full", "sample", "off"),
    "io_backend": ("auto", "io_uring", "threads"),
    "update_on": ("cpu", "device"),
    "generations": tuple(range(1, GENERATIONS_MAX + 1)),
    "damaged": ("raise", "from-older"),
    "durable": (False, True, "new"),
})


class _Option(NamedTuple):
    """A command-line option that sets a field of `Policy`. text: its help. kind: as in `Row`, for a
    field without choices. default: the policy's, for `infinity train`. name: the option's name, if
    it differs from the field's.
    """

    text: str
    default: Any = None
    kind: Any = None
    metavar: str | None = None
    name: str = ""


_OPTIONS: dict[str, _Option] = {
    "params": _Option("the lowest tier that stores parameters (cpu)", "cpu"),
    "optim": _Option("the lowest tier that stores optimizer states (cpu)", "cpu"),
    "nvme": _Option(
        "directory on an NVMe drive; repeat for several drives", None, [argument], "DIR",
    ),
    "ram": _Option(
        'memory for offloading: "512MiB", or "min" (a share of the available memory)', None, str,
        "SIZE",
    ),
    "grads": _Option("nvme: gradients that do not fit in RAM go to the drives (cpu)", "cpu"),
    "activations": _Option("where inputs of checkpointed blocks are stored (device)", "device"),
    "resident": _Option(
        "part of the states on NVMe that each process keeps in memory: params=0.5 or optim=8GiB; "
        "repeat for both (as much as --ram allows)", None, [str], "KIND=PART",
    ),
    "io_backend": _Option("the system's interface to the drives (auto)", "auto"),
    "state": _Option(
        "encoding of stored states: 12, 8 or 5.1 bytes per bf16 parameter with AdamW (exact)",
        "exact",
    ),
    "update": _Option(
        "deferred: during the next forward; backward: during backward, clips with --generations 2 "
        "only; delayed: during the whole next step, which computes with the older parameters "
        "(deferred)", "deferred",
    ),
    "generations": _Option(
        "2 keeps the previous step too: twice the space on the drives, and a failed step is "
        "undone; more, with --durable, keep further commits (1)", 1,
    ),
    "update_on": _Option(
        "device: the GPU updates states, which stream through it; needs --update deferred; the "
        "same bits (cpu)", "cpu",
    ),
    # The default is None, so that `infinity train` can refuse the option with other updates.
    "delayed_warmup": _Option(
        "first steps that --update delayed runs as deferred (40)", None, int, "STEPS",
    ),
    "durable": _Option(
        "keep the run in the --nvme directories, to continue from the last committed step; needs "
        "--params nvme, --optim nvme and twice the space", False,
    ),
    "durable_every": _Option(
        "commit every STEPS steps; a crash loses the steps since the last commit (1)",
        1, int, "STEPS",
    ),
    "zero": _Option(
        "what ranks split: optimizer states (1), gradients too (2), parameters too (3)", 3,
    ),
    "accumulate": _Option(
        "shard: reduce the gradients of each micro-batch; local: add them up on each rank and "
        "reduce once (local with --zero 1, else shard)", name="accumulate_in",
    ),
    "qwz": _Option("ZeRO++: gather weights as int8 groups", False),
    "hpz": _Option("ZeRO++: where each node keeps a copy of gathered weights"),
    "qgz": _Option("ZeRO++: reduce gradients as int4 groups, first inside the node", False),
    "error_feedback": _Option(
        "with --qgz: add the rounding error to the next gradient", False,
    ),
    "grad_dtype": _Option(
        "dtype of stored gradients (that of the parameters)", None, ("bfloat16", "float32"),
    ),
}  # fmt: skip


def field_rows(*fields: str, **texts: str) -> list[Row]:
    """Return the rows of the options of these fields, with the policy's choices. texts: help by
    field, in place of the table's.
    """
    rows = []
    for field in fields:
        option = _OPTIONS[field]
        choices = tuple(choice for choice in CHOICES.get(field, ()) if choice is not None)
        kind = False if choices[:1] == (False,) else choices or option.kind
        rows.append(
            Row(
                (option.name or field).replace("_", "-"), kind, texts.get(field, option.text),
                option.metavar, {} if option.default is None else {"default": option.default},
            )
        )  # fmt: skip
    return rows


def left_out() -> dict[str, None]:
    """Return a default of None for each option, for a command that must know which options the user
    gave.
    """
    return dict.fromkeys(option.name or field for field, option in _OPTIONS.items())


def given_fields(options: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of the policy that the options give; an option that is None was left out.
    Raises: ValueError for parts of --resident.
    """
    values = vars(options)
    found = {field: values.get(option.name or field) for field, option in _OPTIONS.items()}
    found["resident"] = _parse_resident(found["resident"])
    return {field: value for field, value in found.items() if value is not None}


def _parse_resident(texts: Sequence[str] | None) -> dict[str, float | str] | None:
    resident: dict[str, float | str] = {}
    for text in texts or ():
        kind, equals, part = text.partition("=")
        if not equals or kind in resident:
            raise ValueError(f"--resident {text}: give each kind once, as params=0.5 or optim=8GiB")
        try:
            # A number is a share. Any other text is a size, which `Policy` parses.
            resident[kind] = float(part)
        except ValueError:
            resident[kind] = part
    return resident or None
