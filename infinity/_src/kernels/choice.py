"""Choice of the implementation of an operation, torch's or Triton's: a fixed rule, never a
measurement of the moment.

    forced      INFINITY_OPS="triton", "torch", or "group_quantize=triton,tile_matmul=torch";
                `forced(...)` inside a block
    measured    MEASURED: the figures of `bench/gpu/f10_operations.py` for a kind of device, beside
                torch's best, written down here by hand
    else        torch

The choice is part of the numerics where the two do not round alike (it is recorded, and `infinity
doctor` shows it). So the choice must not change from one run to the next. On the CPU Triton runs in
its interpreter only (TRITON_INTERPRET=1), for tests.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator, Mapping

import torch

VARIABLE = "INFINITY_OPS"
IMPLEMENTATIONS = ("torch", "triton")


@dataclasses.dataclass(frozen=True)
class KernelOp:
    """Operation with two implementations.

    about: its purpose, in half a line; bitwise: the two give the same bits.
    """

    name: str
    about: str
    bitwise: bool


OPS: Mapping[str, KernelOp] = {
    op.name: op
    for op in (
        KernelOp("group_quantize", "values to int8 or int4 in groups with scales", bitwise=True),
        KernelOp("group_dequantize", "and back", bitwise=True),
        KernelOp(
            "wire_encode",
            "values to the bytes that collectives carry, with error feedback",
            bitwise=True,
        ),
        KernelOp("wire_decode", "and the sum of such bytes in the order of ranks", bitwise=True),
        KernelOp("ordered_sum", "the sum of plain pieces in the order of ranks", bitwise=True),
        KernelOp("update", "the optimizer's pass over a chunk of states", bitwise=True),
        KernelOp(
            "tile_matmul",
            "matmul that adds to what other tiles summed, with the bias",
            bitwise=False,
        ),
        KernelOp("linear_cross_entropy", "LM head and its loss, without the logits", bitwise=False),
    )
}
"""The operations, by name."""

MEASURED: Mapping[tuple[str, tuple[int, int]], float] = {}
"""(operation, compute capability) -> torch's best time / Triton's.

Above 1, Triton is the default there.
"""

# Innermost last: the latest `forced` block decides.
_forced: list[dict[str, str]] = []


@contextlib.contextmanager
def forced(**choices: str) -> Iterator[None]:
    """Force implementations in this context, in every thread: `forced(group_quantize="triton")`.

    For tests and benchmarks.

    Raises: ValueError for an operation or implementation that is not known.
    """
    _check(choices, "forced()")
    _forced.append(dict(choices))
    try:
        yield
    finally:
        _forced.pop()


def implementation(name: str, device: torch.device) -> str:
    """Choose "torch" or "triton" for this operation on this device.

    Raises: ValueError where Triton is forced and cannot run.
    """
    chosen = _chosen(name)
    if chosen == "triton" and not interpreted() and device.type != "cuda":
        raise ValueError(
            f"{VARIABLE} forces Triton for {name}, and its tensors are on {device.type}: there "
            "Triton runs in its interpreter only; set TRITON_INTERPRET=1 before the start (slow, "
            "for tests), or leave the operation to torch"
        )
    if chosen is not None:
        return chosen
    # On the CPU Triton runs in its interpreter only, for tests.
    if device.type != "cuda":
        return "torch"
    # Never a measurement of the moment: a run must repeat where the two round differently.
    return (
        "triton"
        if MEASURED.get((name, torch.cuda.get_device_capability(device)), 0.0) > 1.0
        else "torch"
    )


def why(name: str, device: torch.device) -> str:
    """Explain the choice for this operation on this device, for people."""
    if _chosen(name) is not None:
        return "forced"
    if device.type != "cuda":
        return "the CPU computes"
    ratio = MEASURED.get((name, torch.cuda.get_device_capability(device)))
    return (
        "not measured on such a device"
        if ratio is None
        else f"measured: torch's time is {ratio:.2f} of Triton's"
    )


def interpreted() -> bool:
    """Tell whether Triton's kernels run in its interpreter, on any tensor."""
    return os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")


def _chosen(name: str) -> str | None:
    """Return the implementation forced by the innermost `forced`, else by the environment."""
    assert name in OPS, name
    for choices in reversed(_forced):
        if name in choices:
            return choices[name]
    return _from_environment().get(name)


def _from_environment() -> dict[str, str]:
    """Read INFINITY_OPS as choices. Raises: ValueError for what is not known."""
    text = os.environ.get(VARIABLE, "").strip()
    if not text:
        return {}
    if text in IMPLEMENTATIONS:
        return dict.fromkeys(OPS, text)
    pairs = [item.strip().partition("=") for item in text.split(",") if item.strip()]
    choices = {name.strip(): value.strip() for name, _, value in pairs}
    _check(choices, VARIABLE)
    return choices


def _check(choices: Mapping[str, str], where: str) -> None:
    for name, value in choices.items():
        if name not in OPS:
            raise ValueError(
                f"{where}: there is no operation {name!r}; there are {', '.join(sorted(OPS))}"
            )
        if value not in IMPLEMENTATIONS:
            raise ValueError(
                f"{where}: {name}={value!r} is not known; use "
                f"{' or '.join(map(repr, IMPLEMENTATIONS))}"
            )
