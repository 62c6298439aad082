"""The optimizer's pass over a chunk of states that lies on a device, in torch or in Triton: the same bits.

    update_chunk(format, sections, segs, hypers, grad=grad)

What native/update.c does to a chunk in RAM, for chunks whose sections are tensors, on a GPU above all. Both implementations take
the records of infinity/aio/plan.py as they are; which one runs is for infinity/ops/choice.py to say (`update`), and changes
no bit: infinity/ops/update.py is the reference of both.
"""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from infinity.aio.plan import QUANT_GROUP, SEG, Format, GradDtype, GradSection, Moments
from infinity.ops import choice
from infinity.ops.update import check_update

GRAD_DTYPES = {
    GradDtype.BF16: torch.bfloat16,
    GradDtype.FP32: torch.float32,
    GradDtype.FP16: torch.float16,
}
_SECTION_GRADS = {
    GradSection.BF16: GradDtype.BF16,
    GradSection.FP32: GradDtype.FP32,
    GradSection.FP16: GradDtype.FP16,
}


def update_chunk(
    state_format: Format,
    sections: Sequence[torch.Tensor],
    segs: npt.NDArray[np.void],
    hypers: npt.NDArray[np.void],
    *,
    grad: torch.Tensor | None = None,
) -> None:
    """The update of the segments' elements, in place; of others nothing changes. Does not wait for the device.

    sections: one contiguous 1-D uint8 tensor per section of the format, all on one device, from the chunk's first element on;
    their addresses are multiples of four. segs: SEG records, in the chunk; `start` and `element` are multiples of
    QUANT_GROUP where moments are 8-bit. hypers: HYPER records, that segs["hyper"] counts in. grad: bf16, fp16 or fp32
    [chunk's elements], contiguous, whose element i is the gradient of the chunk's element i. None: each segment says where
    its gradient lies, in the chunk's `grad` section or at an address that the device can read, and that stays valid until
    the device has done the update. Raises: ValueError for what the kernels do not know.
    """
    kind = Format.of(state_format)
    states = kind.with_grad(GradSection.NONE)
    _check(kind, sections, segs, hypers, grad)
    resolved = _resolved(kind, sections, segs, grad)
    with torch.no_grad():
        if choice.implementation("update", sections[0].device) == "triton":
            from infinity.ops.update_triton import update_triton

            update_triton(states, sections, resolved, hypers)
            return
        from infinity.ops.update_torch import update_torch

        for seg in resolved:
            start, numel = int(seg["start"]), int(seg["numel"])
            gradient = _gradient(seg, sections[0].device)
            update_torch(states, _parts(states, sections, start, numel), gradient, hypers[int(seg["hyper"])], int(seg["element"]))


def _check(
    kind: Format, sections: Sequence[torch.Tensor], segs: npt.NDArray[Any], hypers: npt.NDArray[Any], grad: torch.Tensor | None
) -> None:
    states = kind.with_grad(GradSection.NONE)
    if len(sections) != len(kind.sections):
        raise ValueError(f"{kind} has {len(kind.sections)} sections, {len(sections)} were given")
    for section in sections:
        if section.dtype is not torch.uint8 or section.dim() != 1 or not section.is_contiguous() or section.data_ptr() % 4:
            raise ValueError("a section is a contiguous one-dimensional uint8 tensor at a multiple of four bytes")
        if section.device != sections[0].device:
            raise ValueError(f"sections lie on {section.device} and {sections[0].device}: use one device")
    for seg in segs:
        if not 0 <= int(seg["hyper"]) < len(hypers):
            raise ValueError(f"a segment names hyper {int(seg['hyper'])} of {len(hypers)}")
        if kind.moments is Moments.Q8 and (seg["start"] % QUANT_GROUP or seg["element"] % QUANT_GROUP):
            raise ValueError(f"start {seg['start']} and element {seg['element']} do not start a group of {QUANT_GROUP}")
        for section, what in zip(sections, kind.sections, strict=True):
            if seg["start"] < 0 or what.size_bytes(int(seg["start"] + seg["numel"])) > section.numel():
                raise ValueError(f"elements {seg['start']} + {seg['numel']} exceed the section {what.name}")
    for index in np.unique(segs["hyper"]):
        check_update(states, hypers[int(index)])
    if grad is not None:
        if grad.dtype not in GRAD_DTYPES.values() or not grad.is_contiguous() or grad.device != sections[0].device:
            raise ValueError("grad is bfloat16, float16 or float32, contiguous, and on the device of the sections")
        if len(segs) and int((segs["start"] + segs["numel"]).max()) > grad.numel():
            raise ValueError(f"grad has {grad.numel()} elements, and segments go beyond them")


def _resolved(
    kind: Format, sections: Sequence[torch.Tensor], segs: npt.NDArray[Any], grad: torch.Tensor | None
) -> npt.NDArray[np.void]:
    """The segments that have elements, each with the address and the dtype of its gradient."""
    out: npt.NDArray[np.void] = np.array(segs[segs["numel"] > 0], dtype=SEG)
    if grad is not None:
        code = next(code for code, dtype in GRAD_DTYPES.items() if dtype is grad.dtype)
        out["grad"] = grad.data_ptr() + out["start"].astype(np.uint64) * np.uint64(grad.element_size())
        out["grad_dtype"] = int(code)
        return out
    inside = out["grad_dtype"] == GradDtype.SECTION
    if inside.any():
        if kind.grad is GradSection.NONE:
            raise ValueError(f"a segment's gradient is in the section `grad`, and {kind} has none")
        width = np.uint64(kind.sections[-1].itemsize)
        out["grad"][inside] = np.uint64(sections[-1].data_ptr()) + out["start"][inside].astype(np.uint64) * width
        out["grad_dtype"][inside] = int(_SECTION_GRADS[kind.grad])
    return out


def _parts(states: Format, sections: Sequence[torch.Tensor], start: int, numel: int) -> list[torch.Tensor]:
    """Of each section the bytes of the elements [start, start + numel)."""
    parts = []
    for section, what in zip(sections, states.sections, strict=False):  # a section `grad` is left out
        low = start // what.group_numel * what.itemsize
        parts.append(section[low : low + what.size_bytes(numel)])
    return parts


@dataclasses.dataclass(frozen=True)
class _Memory:
    """Bytes on a GPU, for torch to see as a tensor without a copy."""

    __cuda_array_interface__: dict[str, Any]


def _gradient(seg: Any, device: torch.device) -> torch.Tensor:
    """The segment's gradient, a view of where it lies."""
    dtype = GRAD_DTYPES[GradDtype(int(seg["grad_dtype"]))]
    address, size = int(seg["grad"]), int(seg["numel"]) * dtype.itemsize
    if device.type == "cuda":
        described = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 2}
        return torch.as_tensor(_Memory(described), device=device).view(dtype)
    memory = (ctypes.c_uint8 * size).from_address(address)
    return torch.frombuffer(memory, dtype=dtype)
