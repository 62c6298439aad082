"""Trial of a Triton kernel on the device that is to run it: the bytes that it writes for a small
sample, beside those of torch on the CPU.

    Trial(outputs, form)    outputs(which, device, *form) -> the tensors that an operation writes

A form is what a kernel is compiled for: dtypes, bits, groups, formats. Kernels that a compiler or a
GPU runs otherwise than the CPU differ in few values: sums and quotients below 2^-126 that are
flushed to zero, products contracted with sums, approximate divisions. The sample has such values.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import NamedTuple

import torch

from infinity._src.base.torch_device import on_device
from infinity._src.kernels.quantized import GROUP_NUMEL_LEAST, GROUP_NUMEL_MOST

CPU = torch.device("cpu")
SAMPLE_NUMEL = 3408
"""Three of the largest groups of any codec, and a part of one, in whole blocks of every kernel and
a part of one. A multiple of 16, as nearly all sizes are: Triton compiles another kernel for others.
"""
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MESSAGE_MOST = 300


class Trial(NamedTuple):
    """Comparison to make before an operation runs on Triton.

    outputs: runs an implementation, "torch" or "triton", on a sample that is placed on a device,
    and returns what it wrote, by name. form: further arguments of it.
    """

    outputs: Callable[..., Mapping[str, torch.Tensor]]
    form: tuple[Hashable, ...]


def sample(dtype: torch.dtype, seed: int = 0, *, finite: bool = True) -> torch.Tensor:
    """Make [SAMPLE_NUMEL] values on the CPU, always the same ones: from denormal fp32 to 2^12 in
    runs of one order of magnitude, a largest group of denormals alone, and zeros of both signs.

    finite: False: infinities and NaN in the first group, too.
    """
    generator = torch.Generator().manual_seed(seed)
    # Each run of the least group's size has one order of magnitude.
    runs = -(-SAMPLE_NUMEL // GROUP_NUMEL_LEAST)
    exponents = torch.randint(-144, 10, (runs,), generator=generator, device=CPU)
    exponents = exponents.repeat_interleave(GROUP_NUMEL_LEAST)[:SAMPLE_NUMEL]
    # In a group of several runs the largest values decide, and the others are zeros.
    exponents[GROUP_NUMEL_MOST : 2 * GROUP_NUMEL_MOST] = -128
    values = torch.randn(SAMPLE_NUMEL, generator=generator, dtype=torch.float32, device=CPU)
    # In double: fp32's powers of two end where its denormals begin.
    values = torch.ldexp(values.double(), exponents).float()
    values[::97], values[1::97] = 0.0, -0.0
    if not finite:
        values[5], values[300], values[700] = float("inf"), float("nan"), float("-inf")
    return values.to(dtype)


def difference(trial: Trial, device: torch.device) -> str:
    """Run both implementations and say how the bytes of Triton's on `device` differ from torch's on
    the CPU; empty where they are the same.

    Blocks until the device has done it, on a separate stream: some milliseconds, and Triton's
    compilation. A kernel that does not compile or run differs, too. Raises: torch.OutOfMemoryError
    if the device has no memory for the sample, also after torch's cache was emptied.
    """
    with torch.no_grad(), _denormals_kept():
        expected = trial.outputs("torch", CPU, *trial.form)
        try:
            try:
                found = _on_device(trial, device)
            except torch.OutOfMemoryError:
                torch.cuda.empty_cache()
                found = _on_device(trial, device)
        except torch.OutOfMemoryError:
            raise
        # Triton, its C compiler and ptxas raise what they like.
        except Exception as error:  # noqa: BLE001
            # A compiler's message quotes the kernel, over many lines.
            message = " ".join(str(error).split())[:_MESSAGE_MOST]
            return f"the kernel does not run: {type(error).__name__}: {message}"
    for name, values in expected.items():
        theirs, ours = _words(values), _words(found[name])
        wrong = (theirs != ours).nonzero()
        if len(wrong):
            at = int(wrong[0])
            width = 2 * theirs.element_size()
            mask = (1 << 4 * width) - 1
            return (
                f"{len(wrong)} of {len(theirs)} {name} differ, the first is "
                f"0x{int(ours[at]) & mask:0{width}x} where torch on the CPU has "
                f"0x{int(theirs[at]) & mask:0{width}x}"
            )
    return ""


@contextlib.contextmanager
def _denormals_kept() -> Iterator[None]:
    """Compute as the C kernels do, which keep denormals, in a thread that flushes them
    (`torch.set_flush_denormal`)."""
    flushes = float(torch.full((1,), 2.0**-130, device=CPU).mul(1.0)) == 0.0
    if flushes:
        torch.set_flush_denormal(False)
    try:
        yield
    finally:
        if flushes:
            torch.set_flush_denormal(True)


def _on_device(trial: Trial, device: torch.device) -> dict[str, torch.Tensor]:
    with on_device(device), torch.cuda.stream(_stream(device)):
        outputs = trial.outputs("triton", device, *trial.form)
        return {name: values.cpu() for name, values in outputs.items()}


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream | None:
    """Return one stream for all trials: the current one may wait for a collective of another rank,
    and torch's streams are few, so that the next ones may be those of collectives."""
    return torch.cuda.Stream(device) if device.type == "cuda" else None


def _words(values: torch.Tensor) -> torch.Tensor:
    """The values as integers with their bits: NaN equals NaN, and -0 is not 0."""
    return values.reshape(-1).view(_WORDS[values.element_size()])
