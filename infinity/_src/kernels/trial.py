"""Trial of a Triton kernel on its device: compares its output for a small sample, byte by byte,
with torch's on the CPU.

    Trial(outputs, form)    outputs(which, device, *form) -> the tensors that an operation writes

A form is the specialization of a kernel: dtypes, bits, groups, formats. Typical differences of
compilers and GPUs affect few values: sums and quotients below 2^-126 flushed to zero, products
contracted with sums (FMA), approximate divisions. The sample has such values.
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
"""Values in a sample: three groups of the largest size of any codec and a partial group; for every
kernel, whole blocks and a partial one. A multiple of 16, like nearly all sizes in use: Triton
compiles a separate kernel for such sizes.
"""
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MESSAGE_MOST = 300


class Trial(NamedTuple):
    """Comparison to run before an operation uses Triton.

    outputs: runs an implementation, "torch" or "triton", on a sample on a device, and returns its
    output tensors by name. form: further arguments of `outputs`.
    """

    outputs: Callable[..., Mapping[str, torch.Tensor]]
    form: tuple[Hashable, ...]


def sample(dtype: torch.dtype, seed: int = 0, *, finite: bool = True) -> torch.Tensor:
    """Return deterministic values [SAMPLE_NUMEL] on the CPU: from denormal fp32 to 2^12 in runs of
    one order of magnitude, a group of the largest size with denormals only, and zeros of both
    signs.

    finite: if False, the first GROUP_NUMEL_MOST values include infinities and NaN.
    """
    generator = torch.Generator().manual_seed(seed)
    # Each run of the least group's size has one order of magnitude.
    runs = -(-SAMPLE_NUMEL // GROUP_NUMEL_LEAST)
    exponents = torch.randint(-144, 10, (runs,), generator=generator, device=CPU)
    exponents = exponents.repeat_interleave(GROUP_NUMEL_LEAST)[:SAMPLE_NUMEL]
    # A group of denormals only: in mixed groups the largest values set the scale, and denormals
    # become zeros.
    exponents[GROUP_NUMEL_MOST : 2 * GROUP_NUMEL_MOST] = -128
    values = torch.randn(SAMPLE_NUMEL, generator=generator, dtype=torch.float32, device=CPU)
    # Scale in fp64: fp32's smallest powers of two are denormal.
    values = torch.ldexp(values.double(), exponents).float()
    values[::97], values[1::97] = 0.0, -0.0
    if not finite:
        values[5], values[300], values[700] = float("inf"), float("nan"), float("-inf")
    return values.to(dtype)


def difference(trial: Trial, device: torch.device) -> str:
    """Run both implementations, and describe how Triton's bytes on `device` differ from torch's on
    the CPU; "" if they are equal.

    Runs on a separate stream, and blocks until the device has finished: some milliseconds, plus
    Triton's compilation. A kernel that does not compile or run counts as different, too. Raises:
    torch.OutOfMemoryError if the device lacks memory for the sample even after torch's cache was
    emptied.
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
        # Triton, its C compiler and ptxas may raise any exception.
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
    """Disable the flushing of denormals (`torch.set_flush_denormal`) in this thread: the C kernels
    keep denormals.
    """
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
    """Return one stream for all trials of a device. The current stream may be waiting for a
    collective; so may a new one, since torch takes new streams from a small pool.
    """
    return torch.cuda.Stream(device) if device.type == "cuda" else None


def _words(values: torch.Tensor) -> torch.Tensor:
    """View values as integers, so that NaN equals NaN, and -0 differs from 0."""
    return values.reshape(-1).view(_WORDS[values.element_size()])
