"""Choice between torch's and Triton's implementation of an operation, by a fixed rule, never by a
measurement at run time.

    forced      INFINITY_OPS="triton", "torch", or "group_quantize=triton,tile_matmul=torch";
                `forced(...)` inside a block
    measured    MEASURED: ratios measured by `bench/gpu/f10_operations.py` on a kind of device,
                entered here by hand
    else        on a GPU Triton for bitwise operations, for which torch needs many launches; torch
                for others, and on the CPU

**Trial** (infinity/_src/kernels/trial.py): before the first use of a bitwise operation in a form
(dtypes, bits, state format), a process compares Triton's output for a small sample on that device
with torch's on the CPU. If the bytes differ or the kernel does not compile, a warning is issued,
and torch runs the operation in this and all later forms; with Triton forced, a ValueError is raised
instead. A form that has passed continues to use Triton, so a form has one implementation in a run.
Ranks may differ, since both implementations give the same bits.

Triton before TRITON_LEAST flushes denormals in divisions and square roots, so it is not used for
bitwise operations.

For operations that are not bitwise the choice affects the results, so it must be the same in every
run; `infinity doctor` shows it. On the CPU Triton only runs in its interpreter
(TRITON_INTERPRET=1), for tests.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import re
import threading
import warnings
from collections.abc import Hashable, Iterator, Mapping

import torch

from infinity._src.kernels.trial import Trial, difference

VARIABLE = "INFINITY_OPS"
TRITON_LEAST = (3, 6)
"""The first Triton whose divisions and square roots keep denormals; also in pyproject.toml."""
IMPLEMENTATIONS = ("torch", "triton")


@dataclasses.dataclass(frozen=True)
class KernelOp:
    """Operation with two implementations.

    about: its purpose, for messages; bitwise: both give the same bits.
    """

    name: str
    about: str
    bitwise: bool


OPS: Mapping[str, KernelOp] = {
    op.name: op
    for op in (
        KernelOp("group_quantize", "values to int8 or int4 in groups with scales", bitwise=True),
        KernelOp("group_dequantize", "codes in groups with scales to values", bitwise=True),
        KernelOp(
            "wire_encode",
            "values to the bytes that collectives carry, with error feedback",
            bitwise=True,
        ),
        KernelOp("wire_decode", "the sum of encoded values in the order of ranks", bitwise=True),
        KernelOp("ordered_sum", "the sum of plain pieces in the order of ranks", bitwise=True),
        KernelOp("update", "the optimizer's pass over a chunk of states", bitwise=True),
        KernelOp(
            "tile_matmul",
            "matmul that adds to the sum of other tiles, and the bias",
            bitwise=False,
        ),
        KernelOp("linear_cross_entropy", "LM head and its loss, without the logits", bitwise=False),
    )
}
"""The operations, by name."""

MEASURED: Mapping[tuple[str, tuple[int, int]], float] = {}
"""(operation, compute capability) -> torch's best time / Triton's.

Above 1 Triton is the default, else torch.
"""

_passed: set[tuple[str, torch.device, tuple[Hashable, ...]]] = set()
"""(operation, device, form) of passed trials."""
_failed: dict[tuple[str, torch.device], str] = {}
"""(operation, device) -> fault found by its first failed trial."""
_warned: set[tuple[str, torch.device]] = set()
"""(operation, device) pairs whose fault a warning has reported."""
_trying = threading.Lock()

# A stack: the innermost `forced` block decides.
_forced: list[dict[str, str]] = []


@contextlib.contextmanager
def forced(**choices: str) -> Iterator[None]:
    """Force implementations inside the block, in all threads: `forced(group_quantize="triton")`.

    For tests and benchmarks. Raises: ValueError for an unknown operation or implementation.
    """
    _check(choices, "forced()")
    _forced.append(dict(choices))
    try:
        yield
    finally:
        _forced.pop()


def implementation(name: str, device: torch.device, trial: Trial | None = None) -> str:
    """Choose "torch" or "triton" for this operation on this device.

    trial: the trial of a bitwise operation, in the form about to run; None: use the results of
    earlier trials. The first call with a form on a GPU blocks until the trial has ended.

    Raises, both only if Triton is forced: ValueError if Triton cannot run or gives other bits than
    torch; torch.OutOfMemoryError if the device lacks memory for the trial.
    """
    return _choose(name, device, trial)[0]


def why(name: str, device: torch.device) -> str:
    """Return the reason of the choice for this operation on this device, as text."""
    return _choose(name, device, None)[1]


def may_be_triton(name: str) -> bool:
    """Return whether Triton may compute this operation on some GPU. For plans for other machines,
    on which no trial can run.
    """
    chosen = _chosen(name)
    if chosen is not None:
        return chosen == "triton"
    ratios = [ratio for (op, _), ratio in MEASURED.items() if op == name]
    return any(ratio > 1.0 for ratio in ratios) or (OPS[name].bitwise and not ratios)


def _choose(name: str, device: torch.device, trial: Trial | None) -> tuple[str, str]:
    chosen = _chosen(name)
    if chosen == "torch":
        return "torch", "forced"
    if chosen == "triton":
        _check_forced(name, device, trial)
        return "triton", "forced"
    if not compiles(device):
        interpreter = "TRITON_INTERPRET is set: Triton would interpret its kernels"
        return "torch", interpreter if device.type == "cuda" else "the CPU computes"
    # A ratio from the table, not from a measurement at run time: implementations that round
    # differently must be chosen alike in every run.
    ratio = MEASURED.get((name, torch.cuda.get_device_capability(device))) if MEASURED else None
    if ratio is not None:
        better, reason = ratio > 1.0, f"measured: torch's time is {ratio:.2f} of Triton's"
    elif OPS[name].bitwise:
        better, reason = True, "the same bits as torch, in one pass"
    else:
        better, reason = False, "not measured on such a device"
    if not better:
        return "torch", reason
    try:
        fault = _fault(name, device, trial, warn=True)
    except torch.OutOfMemoryError:
        fault = "no memory for the trial; a later use tries again"
    return ("torch", fault) if fault else ("triton", reason)


def _check_forced(name: str, device: torch.device, trial: Trial | None) -> None:
    """Raise ValueError if Triton is forced but cannot run the operation on this device."""
    if device.type != "cuda" and not interpreted():
        raise ValueError(
            f"{VARIABLE} forces Triton for {name}, and its tensors are on {device.type}: there "
            "Triton runs in its interpreter only; set TRITON_INTERPRET=1 before the start (slow, "
            "for tests), or leave the operation to torch"
        )
    fault = _fault(name, device, trial if compiles(device) else None, warn=False)
    if fault:
        raise ValueError(
            f"{VARIABLE} forces Triton for {name}: {fault}; leave the operation to torch "
            f"({VARIABLE}={name}=torch), or install a Triton that can"
        )


def _fault(name: str, device: torch.device, trial: Trial | None, *, warn: bool) -> str:
    """Return why Triton must not compute an operation in this form, or "".

    trial: None: run no trial. warn: issue a warning of the fault, once per operation and device.
    Raises: torch.OutOfMemoryError if a trial lacks memory; a later use tries again.
    """
    # The fast path: every use of the operation calls this function.
    if trial is not None and (name, device, trial.form) in _passed:
        return ""
    fault = _unfit(name) or _failed.get((name, device), "")
    if trial is None or not OPS[name].bitwise:
        return fault
    if not fault:
        fault = _tried(name, device, trial)
    if fault and warn and (name, device) not in _warned:
        _warned.add((name, device))
        on = f" ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else ""
        warnings.warn(
            f"{name} on {device}{on} runs on torch, which gives the same bits and is slower: "
            f"{fault}",
            stacklevel=2,
        )
    return fault


def _tried(name: str, device: torch.device, trial: Trial) -> str:
    """Run the trial, unless its form has passed or the operation has failed. Return the fault, or
    "".
    """
    # Threads of communication streams and of backward may call this concurrently; one runs the
    # trial.
    with _trying:
        # After one form has failed, others are not tried.
        if (name, device) in _failed or (name, device, trial.form) in _passed:
            return _failed.get((name, device), "")
        found = difference(trial, device)
        if not found:
            _passed.add((name, device, trial.form))
            return ""
        form = ", ".join(map(str, trial.form))
        fault = f"Triton {triton_version()} failed the trial of the form ({form}): {found}"
        _failed[name, device] = fault
        return fault


def _unfit(name: str) -> str:
    """Return why the installed Triton must not compute an operation, or ""."""
    version, least = triton_version(), ".".join(map(str, TRITON_LEAST))
    if not version:
        return f"Triton cannot be imported (torch for CUDA brings it; install {least} or newer)"
    numbers = re.match(r"(\d+)\.(\d+)", version)
    found = (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)
    if not OPS[name].bitwise or found >= TRITON_LEAST:
        return ""
    return (
        f"its bits must be torch's, and Triton {version} flushes denormals in divisions and square "
        f"roots; install {least} or newer, which torch 2.10 and newer bring"
    )


@functools.cache
def triton_version() -> str:
    """Return the installed Triton's version; "" if it cannot be imported."""
    try:
        # Not from package metadata: builds of torch install Triton under several names.
        import triton
    # A broken installation may raise any exception.
    except Exception:  # noqa: BLE001  the warning, or the ValueError, says that it does not import
        return ""
    return str(triton.__version__)


def compiles(device: torch.device) -> bool:
    """Return whether Triton compiles kernels for tensors on this device."""
    return device.type == "cuda" and not interpreted()


def interpreted() -> bool:
    """Return whether Triton's kernels run in its interpreter."""
    return os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")


def _chosen(name: str) -> str | None:
    """Return the implementation forced by the innermost `forced`, else by the environment."""
    assert name in OPS, name
    for choices in reversed(_forced):
        if name in choices:
            return choices[name]
    return _from_environment().get(name)


def _from_environment() -> dict[str, str]:
    """Parse INFINITY_OPS. Raises: ValueError for an unknown operation or implementation."""
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
