"""Optimizer updates of chunks on a device, in torch or Triton, with the same bits.

    segs = [segs of chunk 0, of chunk 1, ...]
    plan = UpdatePlan(format, segs, hypers, device=device, grad_dtype=torch.bfloat16)
    for index in range(chunks):          # a few buffers are reused for all chunks
        plan.run(index, sections, grad)

native/kernels/optimizer_kernels.c does the same for a chunk in RAM. Both implementations here use
the records of infinity/_src/cabi/records.py; infinity/_src/kernels/choice.py chooses one
(`update`). They give the same bits, except for NaN payloads in fp32 sections. For Triton the
constructor of a plan copies the segments and HYPER records of a step to the device.

The torch implementation decodes a segment's states to fp32, updates them and encodes them again.
Every line rounds once: products and sums are separate operations, and divisors are tensors, since
on a GPU torch multiplies by a scalar's reciprocal. Fused forms (`addcmul_`, `add_(alpha=)`) are
avoided because they may contract to an FMA.
"""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from infinity._src.cabi import native
from infinity._src.cabi.records import (
    HYPER,
    QUANT_GROUP,
    SEG,
    Algorithm,
    Format,
    GradDtype,
    GradSection,
    HyperFlag,
    LogKind,
    Moments,
)
from infinity._src.kernels import choice
from infinity._src.kernels.hyper import hyper_row_adamw, hyper_row_lion, hyper_row_sgd
from infinity._src.kernels.random_bits import sqrt_exact
from infinity._src.kernels.state_codec import decode_sections, encode_sections
from infinity._src.kernels.trial import SAMPLE_NUMEL, Trial, sample

GRAD_DTYPES = {
    GradDtype.BF16: torch.bfloat16,
    GradDtype.FP32: torch.float32,
    GradDtype.FP16: torch.float16,
}
_CODES = {dtype: code for code, dtype in GRAD_DTYPES.items()}
_SECTION_GRADS = {
    GradSection.BF16: GradDtype.BF16,
    GradSection.FP32: GradDtype.FP32,
    GradSection.FP16: GradDtype.FP16,
}
_MOMENT_COUNTS = {Algorithm.ADAMW: (2,), Algorithm.SGD: (0, 1), Algorithm.LION: (1,)}

RESOLVED = np.dtype([*((name, SEG[name]) for name in SEG.names or ()), ("relative", "?")])
"""SEG plus `relative`: `grad` is an offset in the tensor or section passed to `run`."""


def all_finite(values: torch.Tensor) -> bool:
    """Return whether every element is finite.

    values: bf16, fp16 or fp32, any shape and device. Blocks; releases the GIL on the CPU.
    """
    # One native pass at memory bandwidth; torch is 5 to 30 times slower on bf16.
    code = _CODES.get(values.dtype)
    if code is not None and values.device.type == "cpu" and values.is_contiguous():
        address = native.ffi.cast("void *", values.data_ptr())
        return bool(native.lib.inf_all_finite(address, int(code), values.numel()))
    return bool(torch.isfinite(values).all())


def check_update(state_format: Format, row: Any) -> None:
    """Check that the kernels support the format (without `grad`) with the row's algorithm.

    Raises: ValueError if they do not.
    """
    algorithm = Algorithm(int(row["algorithm"]))
    if state_format is Format.RAW or state_format.grad:
        raise ValueError(f"{state_format} has no optimizer states to update")
    # SGD with momentum needs a section for the momentum.
    bare_momentum = algorithm is Algorithm.SGD and state_format.count == 0 and row["beta1"] != 0
    if state_format.count not in _MOMENT_COUNTS.get(algorithm, ()) or bare_momentum:
        raise ValueError(
            f"{algorithm.name} does not update {state_format}: it has another number of moments"
        )


class UpdatePlan:
    """Updates of one step for chunks of one format; `run` updates one chunk."""

    def __init__(
        self,
        state_format: Format,
        chunks: Sequence[npt.NDArray[np.void]],
        hypers: npt.NDArray[np.void],
        *,
        device: torch.device,
        grad_dtype: torch.dtype | None = None,
    ) -> None:
        """chunks: the SEG records of each chunk; with 8-bit moments, `start` and `element` are
        multiples of QUANT_GROUP.

        hypers: HYPER records, indexed by segs["hyper"]. grad_dtype: dtype of the gradient passed to
        `run`; None: each segment's gradient is in the chunk's `grad` section, or at an address that
        the device can read until the update has ended there. With Triton, copies the records to the
        device without blocking, on the GPU's current stream; the stream of `run` must wait for that
        stream. The first plan of a format, algorithm and gradient dtype on a GPU blocks for the
        trial of its kernel. Keep the plan until the device has finished. Raises: ValueError for
        unsupported formats or records.
        """
        self.format = Format.of(state_format)
        # The update only reads spilled gradients.
        self.states = self.format.with_grad(GradSection.NONE)
        self.device, self.grad_dtype = torch.device(device), grad_dtype
        if grad_dtype not in (None, *GRAD_DTYPES.values()):
            raise ValueError(f"gradients are {grad_dtype}: use bfloat16, float16 or float32")
        _check(self.states, chunks, hypers)
        self._hypers = hypers
        # Resolve once, so that `run` only adds the base address.
        self._chunks = [self._resolved(segs) for segs in chunks]
        # `run` checks the ends: a segment beyond its section would write to another section.
        self._ends = [
            int((segs["start"] + segs["numel"]).max()) if len(segs) else 0 for segs in self._chunks
        ]
        self._launches = None
        if _runs_triton(self.device, self.states, self._chunks, hypers):
            from infinity._src.kernels.triton.update import Launches

            self._launches = Launches(self.states, self._chunks, hypers, self.device)

    def run(
        self, index: int, sections: Sequence[torch.Tensor], grad: torch.Tensor | None = None
    ) -> None:
        """Update chunk `index` in place; elements outside of all segments keep their bytes.

        Does not wait for a GPU.

        sections: one contiguous 1-D uint8 tensor per section of the format, on the plan's device,
        from the chunk's first element on, 4-byte aligned. grad: of the plan's `grad_dtype`,
        contiguous; element i is the gradient of the chunk's element i. Raises: ValueError for other
        sections or gradients.
        """
        end = self._ends[index]
        _check_sections(self.format, sections, self.device, end)
        self._check_grad(grad, end)
        # Base of relative gradients: `grad`, or the chunk's `grad` section.
        base = 0 if grad is None else grad.data_ptr()
        if grad is None and self.format.grad is not GradSection.NONE:
            base = sections[-1].data_ptr()
        with torch.no_grad():
            if self._launches is not None:
                self._launches.run(index, sections, base)
                return
            for seg in self._chunks[index]:
                start, numel = int(seg["start"]), int(seg["numel"])
                gradient = _gradient(seg, base, self.device)
                if not seg["relative"]:
                    # A gradient in pinned memory crosses the bus once, not in each kernel.
                    gradient = gradient.to(torch.float32, copy=True)
                row, element = self._hypers[int(seg["hyper"])], int(seg["element"])
                _update_torch(
                    self.states, _parts(self.states, sections, start, numel), gradient, row, element
                )

    def _resolved(self, segs: npt.NDArray[np.void]) -> npt.NDArray[np.void]:
        """Return the segments with elements, as RESOLVED records.

        `grad_dtype` of a resolved segment is never SECTION. `grad` is an address, or with
        `relative` an offset in bytes in the tensor or section passed to `run`.
        """
        out: npt.NDArray[np.void] = np.zeros(int((segs["numel"] > 0).sum()), RESOLVED)
        for name in SEG.names or ():
            # Segments without elements would be empty launches.
            out[name] = segs[name][segs["numel"] > 0]
        inside = out["grad_dtype"] == GradDtype.SECTION
        if self.grad_dtype is not None:
            code = _CODES[self.grad_dtype]
            inside[:] = True
        elif inside.any():
            if self.format.grad is GradSection.NONE:
                raise ValueError(
                    f"a segment's gradient is in the section `grad`, and {self.format} has none"
                )
            code = _SECTION_GRADS[self.format.grad]
        if inside.any():
            out["grad_dtype"][inside] = int(code)
            out["grad"][inside] = out["start"][inside].astype(np.uint64) * np.uint64(
                GRAD_DTYPES[code].itemsize
            )
        out["relative"] = inside
        return out

    def _check_grad(self, grad: torch.Tensor | None, end: int) -> None:
        if (grad is None) != (self.grad_dtype is None):
            raise ValueError(
                f"the plan's grad_dtype is {self.grad_dtype}: pass run() a gradient of this dtype, "
                "or none if it is None"
            )
        if grad is None:
            return
        if (
            grad.dtype is not self.grad_dtype
            or not grad.is_contiguous()
            or grad.device != self.device
        ):
            raise ValueError(
                f"grad is {grad.dtype} on {grad.device}: give {self.grad_dtype}, contiguous, on "
                f"{self.device}"
            )
        if end > grad.numel():
            raise ValueError(f"grad has {grad.numel()} elements, and segments go to {end}")


def _check(states: Format, chunks: Sequence[npt.NDArray[Any]], hypers: npt.NDArray[Any]) -> None:
    for segs in chunks:
        if not len(segs):
            continue
        if segs["hyper"].min() < 0 or segs["hyper"].max() >= len(hypers):
            raise ValueError(
                f"a segment has the hyper index {segs['hyper'].max()}; there are {len(hypers)}"
            )
        if segs["start"].min() < 0 or segs["numel"].min() < 0 or segs["element"].min() < 0:
            raise ValueError("a segment starts, or ends, before its chunk or its parameter")
        if states.moments is Moments.Q8 and ((segs["start"] | segs["element"]) % QUANT_GROUP).any():
            raise ValueError(
                f"with 8-bit moments, start and element of a segment must be multiples of "
                f"{QUANT_GROUP}"
            )
    for index in sorted({int(hyper) for segs in chunks for hyper in np.unique(segs["hyper"])}):
        check_update(states, hypers[index])


def _check_sections(
    kind: Format, sections: Sequence[torch.Tensor], device: torch.device, end: int
) -> None:
    if len(sections) != len(kind.sections):
        raise ValueError(f"{kind} has {len(kind.sections)} sections, {len(sections)} were given")
    for section, what in zip(sections, kind.sections, strict=True):
        if (
            section.dtype is not torch.uint8
            or section.dim() != 1
            or not section.is_contiguous()
            or section.data_ptr() % 4
        ):
            raise ValueError(
                "a section is a contiguous one-dimensional uint8 tensor at a multiple of four bytes"
            )
        if section.device != device:
            raise ValueError(
                f"the section {what.name} is on {section.device}, and the plan is for {device}"
            )
        if what.size_bytes(end) > section.numel():
            raise ValueError(
                f"the section {what.name} has {section.numel()} bytes, and segments go to element "
                f"{end}"
            )


def _parts(
    states: Format, sections: Sequence[torch.Tensor], start: int, numel: int
) -> list[torch.Tensor]:
    parts = []
    # Not strict: a `grad` section is skipped.
    for section, what in zip(sections, states.sections, strict=False):
        # Sizes count groups, since 8-bit moments have one scale per group.
        low = start // what.group_numel * what.itemsize
        parts.append(section[low : low + what.size_bytes(numel)])
    return parts


@dataclasses.dataclass(frozen=True)
class _Memory:
    """GPU memory that torch can view as a tensor."""

    __cuda_array_interface__: dict[str, Any]


def _gradient(seg: Any, base: int, device: torch.device) -> torch.Tensor:
    dtype = GRAD_DTYPES[GradDtype(int(seg["grad_dtype"]))]
    address, size = (
        int(seg["grad"]) + base * int(seg["relative"]),
        int(seg["numel"]) * dtype.itemsize,
    )
    # torch accepts an address through the CUDA array interface.
    if device.type == "cuda":
        described = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 2}
        return torch.as_tensor(_Memory(described), device=device).view(dtype)
    memory = (ctypes.c_uint8 * size).from_address(address)
    return torch.frombuffer(memory, dtype=dtype)


# -- torch or Triton, and trials of Triton's kernel ------------------------------------------------


def _runs_triton(
    device: torch.device,
    states: Format,
    chunks: Sequence[npt.NDArray[np.void]],
    hypers: npt.NDArray[np.void],
) -> bool:
    """Return whether Triton updates a plan's segments. It updates all of them, or none.

    chunks: resolved. Raises: ValueError if Triton is forced but cannot run.
    """
    forms = {
        form
        for segs in chunks
        for form in zip(
            hypers["algorithm"][segs["hyper"]].tolist(), segs["grad_dtype"].tolist(), strict=True
        )
    }
    return bool(forms) and all(
        choice.implementation(
            "update", device, update_trial(states, Algorithm(algorithm), GradDtype(grad_dtype))
        )
        == "triton"
        for algorithm, grad_dtype in sorted(forms)
    )


def update_trial(states: Format, algorithm: Algorithm, grad_dtype: GradDtype) -> Trial:
    """Return the trial of an update of chunks in this format, without `grad`."""
    return Trial(_updated_sample, (states, algorithm, grad_dtype))


def _updated_sample(
    which: str, device: torch.device, states: Format, algorithm: Algorithm, grad_dtype: GradDtype
) -> dict[str, torch.Tensor]:
    """Update one chunk with two segments, with whole groups and a partial one."""
    master = sample(torch.float32)
    # Include masters half-way between two bf16 numbers, which need signs.
    ties = master.view(torch.int32)[::5]
    ties.copy_(ties & -0x10000 | 0x8000)
    moments = [sample(torch.float32, 1 + index) for index in range(states.count)]
    if algorithm is Algorithm.ADAMW:
        moments[1].abs_()
    gradient = sample(GRAD_DTYPES[grad_dtype], 5).to(device)
    sections = [
        section.contiguous().view(torch.uint8).to(device, copy=True)
        for section in encode_sections(states, master, moments)
    ]
    hypers = np.array([_sample_row(algorithm, states.count)], HYPER)
    segs = np.zeros(2, RESOLVED)
    border = SAMPLE_NUMEL // 2 // QUANT_GROUP * QUANT_GROUP
    segs["start"], segs["numel"] = (0, border), (border, SAMPLE_NUMEL - border)
    segs["element"], segs["relative"], segs["grad_dtype"] = segs["start"], True, grad_dtype
    segs["grad"] = segs["start"] * gradient.element_size()
    if which == "torch":
        for seg in segs:
            start, numel = int(seg["start"]), int(seg["numel"])
            parts = _parts(states, sections, start, numel)
            piece = gradient[start : start + numel]
            _update_torch(states, parts, piece, hypers[0], int(seg["element"]))
    else:
        from infinity._src.kernels.triton.update import Launches

        Launches(states, [segs], hypers, device).run(0, sections, gradient.data_ptr())
    return {
        f"bytes of {what.name}": section
        for what, section in zip(states.sections, sections, strict=True)
    }


def _sample_row(algorithm: Algorithm, moments: int) -> npt.NDArray[np.void]:
    log = (("mul", 0.75), ("div", 3.0))
    if algorithm is Algorithm.ADAMW:
        return hyper_row_adamw(
            lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1, step=5, log=log, key=7
        )
    if algorithm is Algorithm.SGD:
        momentum = 0.9 if moments else 0.0
        return hyper_row_sgd(
            lr=1e-3, first=False, momentum=momentum, weight_decay=0.1, log=log, key=7
        )
    return hyper_row_lion(lr=1e-3, weight_decay=0.1, log=log, key=7)


# -- the torch implementation, in the order of native/kernels/optimizer_kernels.h ------------------


def _update_torch(
    state_format: Format,
    sections: Sequence[torch.Tensor],
    grad: torch.Tensor,
    row: Any,
    element: int,
) -> None:
    """Update one segment in place.

    sections: the segment's bytes of each section, uint8. grad: bf16, fp16 or fp32 [numel]. row: a
    HYPER record. element: the parameter's index of the first element.
    """
    # Replay the gradient's log (such as clipping), oldest first.
    g = _replayed(grad, row)
    p, m = decode_sections(state_format, sections)
    algorithm = Algorithm(int(row["algorithm"]))
    if algorithm is Algorithm.ADAMW:
        p, m = _adamw(p, m[0], m[1], g, row)
    elif algorithm is Algorithm.SGD:
        p, m = _sgd(p, m, g, row)
    else:
        p, m = _lion(p, m[0], g, row)
    encoded = encode_sections(state_format, p, m, key=int(row["key"]), element=element)
    for section, values in zip(sections, encoded, strict=True):
        section.copy_(values.view(torch.uint8))


def _scalar(value: Any, like: torch.Tensor) -> torch.Tensor:
    return torch.full((), float(value), dtype=torch.float32, device=like.device)


def _replayed(grad: torch.Tensor, row: Any) -> torch.Tensor:
    g = grad.to(torch.float32)
    for index in range(int(row["log_count"])):
        # A tensor, so that a division rounds once.
        value = _scalar(row["log_value"][index], g)
        g = _REPLAYED[LogKind(int(row["log_kind"][index]))](g, value)
    return g


_REPLAYED: dict[LogKind, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    LogKind.MUL: torch.mul,
    LogKind.DIV: torch.div,
    # Not by maximum, whose result for zeros of different signs depends on the device. Keeps NaN.
    LogKind.CLAMP_MIN: lambda g, value: torch.where(g < value, value, g),
    LogKind.CLAMP_MAX: lambda g, value: torch.where(g > value, value, g),
}


def _adamw(
    p: torch.Tensor, m: torch.Tensor, v: torch.Tensor, g: torch.Tensor, row: Any
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    # Products and sums are separate: `addcmul_` may contract to an FMA, which rounds once.
    m = m * float(row["beta1"]) + g * float(row["one_minus_beta1"])
    v = v * float(row["beta2"]) + (g * g) * float(row["one_minus_beta2"])
    denom = sqrt_exact(v) / _scalar(row["bc2_sqrt"], v) + float(row["eps"])
    return p * float(row["decay"]) - (m / denom) * float(row["step_size"]), [m, v]


def _sgd(
    p: torch.Tensor, moments: list[torch.Tensor], g: torch.Tensor, row: Any
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    flags, momentum = int(row["flags"]), float(row["beta1"])
    if row["weight_decay"]:
        # Skipped for 0, as in torch: adding p * 0 would turn -0.0 into 0.0, and infinity into NaN.
        g = g + p * float(row["weight_decay"])
    if moments:
        b = (
            g
            # The first step copies the gradient, without dampening, as torch does.
            if flags & HyperFlag.FIRST
            else moments[0] * momentum + g * float(row["one_minus_beta1"])
        )
        moments = [b]
        g = g + b * momentum if flags & HyperFlag.NESTEROV else b
    return p - g * float(row["step_size"]), moments


def _lion(
    p: torch.Tensor, m: torch.Tensor, g: torch.Tensor, row: Any
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    c = m * float(row["beta1"]) + g * float(row["one_minus_beta1"])
    sign = torch.where(c.isnan(), c, torch.sign(c))  # torch's sign of NaN is zero
    p = p * float(row["decay"]) - sign * float(row["step_size"])
    return p, [m * float(row["beta2"]) + g * float(row["one_minus_beta2"])]
