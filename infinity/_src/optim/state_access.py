"""Optimizer states and gradients of single parameters, read and written by name wherever they rest.

    optimizer_state(p)["exp_avg"]             fetch the chunks -> decode -> fp32 [p.shape], a copy
    optimizer_state(p)["exp_avg"] = tensor    fetch, decode, put in, encode, store: only the sections concerned

Everything goes through a stage, the sections of one chunk in ordinary memory, so a parameter of any size takes the memory of
its fp32 copy and of one chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from infinity._src.distributed.collectives import Comm, digest, fingerprinted
from infinity._src.grads.slot import SlotState
from infinity._src.kernels.state_codec import decode_sections, encode_sections
from infinity._src.params.chunk_pipeline import ChunkBuffer, Span, spans_of
from infinity._src.params.state_store import StateStore
from infinity._src.params.unit import Param
from infinity._src.params.unshard import Unsharder
from infinity.aio import Format
from infinity.aio._records import GradSection, Moments

Bytes = npt.NDArray[np.uint8]


class Holder(Protocol):
    """What access to states needs of the optimizer that holds a parameter."""

    def moments_of(self, param: Param) -> tuple[str, ...]:
        """Names of the parameter's moments, in the order of their sections."""

    def scalars(self, param: Param) -> dict[str, Any]:
        """What is kept for the parameter besides tensors of its shape; `step` at least."""

    def set_scalar(self, param: Param, name: str, value: Any) -> None:
        """Set one of them. Raises: ValueError."""

    def moment_given(self, param: Param, name: str) -> None:
        """A moment was written by hand."""


class States:
    """The states and gradients of one model's parameters, one at a time. Blocking; collective on several ranks.

    wait: returns when no update is pending, raises what one met.
    """

    def __init__(self, rest: StateStore, unsharder: Unsharder, comm: Comm, *, wait: Callable[[], None]) -> None:
        self.rest = rest
        self.rank = comm.rank
        self._unsharder = unsharder
        self._comm = comm
        self._wait = wait
        self._buffers: list[ChunkBuffer] = []

    def chunk_buffers(self, count: int) -> list[ChunkBuffer]:
        """Return memory for `count` chunks, kept for the next time. Nothing may be in flight in it."""
        while len(self._buffers) < count:
            self._buffers.append(ChunkBuffer(self.rest))
        return self._buffers[:count]

    def meet(self, what: str, tensor: torch.Tensor | None = None) -> None:
        """Return when all ranks have come to this with the same tensor, of which each keeps its part. Collective.

        Raises: RanksDiverged.
        """
        self._comm.check_same_collective(lambda: what if tensor is None else fingerprinted(what, digest(tensor)))

    # -- states ------------------------------------------------------------------------------------------------------------

    def read(self, param: Param, value: int) -> torch.Tensor:
        """The master (value 0) or a moment (1, 2, 3) in fp32 [param.shape], a copy. All ranks must ask."""
        self._wait()
        rest = self.rest[param.flat]
        stage = ChunkBuffer(self.rest)
        part = []
        for span in spans_of(param, self.rank):
            sections = sections_with(rest.format, value)
            stage.fetch(rest, span.chunk, sections).wait()
            part.append(decode_values(rest.format, span_sections(stage, span))[value])
        return self._whole(param, part)

    def write(self, param: Param, value: int, tensor: torch.Tensor) -> None:
        """Set the master or a moment, rounded to what the format holds. tensor: [param.shape], any floating dtype.

        Other states keep their bits. A master is what the next step computes with, in every update mode. On several ranks all
        pass the same tensor. Raises: RuntimeError while the unit is in use; ValueError for a second moment below zero, of which
        8 bits hold no sign.
        """
        self._wait()
        if param.unit.refs:
            raise RuntimeError(f"{param.name} is in use; write its states outside of forward, backward and handle.gather()")
        rest = self.rest[param.flat]
        wanted = tensor.detach().to("cpu", torch.float32).reshape(-1)
        if rest.format.moments is Moments.Q8 and value == 2 and bool((wanted < 0).any()):
            raise ValueError(
                f"the second moment of {param.name} is a mean of squares, and some of the values given are below zero (the least "
                f"is {wanted.min():.3g}): state='compact' holds it without a sign; clamp them to 0"
            )
        if value == 0:
            self.touch(param)
        stage = ChunkBuffer(self.rest)
        for span in spans_of(param, self.rank):
            sections = sections_with(rest.format, value)
            stage.fetch(rest, span.chunk, sections).wait()
            given = wanted[span.element : span.element + span.numel].contiguous()
            encode_value(rest.format, value, given, span_sections(stage, span))
            stage.store(sections).wait()
            if value == 0 and self._unsharder.delayed_params is not None:
                written = torch.from_numpy(stage.section(0, span.start, span.numel)).view(param.dtype)
                self._unsharder.delayed_params.write(param.flat, int(rest.starts[span.chunk]) + span.start, written)

    def touch(self, param: Param) -> None:
        """The parameter's values at rest are about to change: what is gathered of its unit is gathered anew."""
        self._unsharder.touched(param.unit)

    # -- gradients ---------------------------------------------------------------------------------------------------------

    def full_grad(self, param: Param) -> torch.Tensor | None:
        """The accumulated gradient in fp32 [param.shape], what was done to it included; None as `p.grad`. A copy."""
        self._wait()
        if param.grad is None and param.at_rest.grad is None:
            return None
        slot = self._unsharder.slot(param)
        if slot.reconcile(param.at_rest.grad) is SlotState.EMPTY and not slot.unreduced:
            return None
        return self._whole(param, [slot.part()])

    def set_full_grad(self, param: Param, tensor: torch.Tensor | None) -> None:
        """Make `tensor` [param.shape] the gradient, rounded to the dtype in which gradients wait; None clears it.

        On several ranks all pass the same tensor. Raises: RuntimeError, with update="backward", when the update has taken the
        gradient that backward made, as assigning to `p.grad` does.
        """
        if tensor is not None:
            check_tensor("the gradient", param, tensor)
            self.meet(f"setting the gradient of {param.name}", tensor)
        self._wait()
        if tensor is None:
            self._unsharder.slot(param).empty()
            param.at_rest.grad = None
            return
        _, element, numel = param.flat.layout.shard_range(param.slot_index, self.rank)
        part = tensor.detach().to("cpu").reshape(-1)[element : element + numel]
        self._unsharder.gradients.replace(param, part)

    def _whole(self, param: Param, part: Sequence[torch.Tensor]) -> torch.Tensor:
        """The whole of what the ranks hold parts of, fp32 [param.shape]."""
        _, element, _ = param.flat.layout.shard_range(param.slot_index, self.rank)
        mine = torch.cat([piece.reshape(-1) for piece in part]) if part else torch.empty(0)
        return self._comm.all_gather_vector(mine, element, param.numel).view(param.shape)


class OptimizerState(MutableMapping[str, Any]):
    """What an optimizer keeps for one parameter: "master", its moments by name, "step" and other numbers.

    Reading a tensor gives a fresh fp32 copy on the CPU, [p.shape]; assigning one writes it to where it rests, encoded as the
    policy's `state` says (rounded to nearest, where that rounds). Writing "master" sets the parameter too (with
    update="delayed" also the copy that computes) and leaves the moments.
    Waits for pending updates. On several ranks every access is collective, and all assign the same values.
    """

    def __init__(self, param: Param, holder: Holder, states: States) -> None:
        self._param = param
        self._holder = holder
        self._states = states

    @property
    def _tensors(self) -> tuple[str, ...]:
        return ("master", *self._holder.moments_of(self._param))

    def __getitem__(self, name: str) -> Any:
        if name in self._tensors:
            return self._states.read(self._param, self._tensors.index(name))
        scalars = self._holder.scalars(self._param)
        if name not in scalars:
            raise KeyError(f"{name!r} of {self._param.name}; it has {', '.join(self)}")
        return scalars[name]

    def __setitem__(self, name: str, value: Any) -> None:
        param = self._param
        if name not in self._tensors:
            if name not in self._holder.scalars(param):
                raise KeyError(f"{name!r} of {param.name}; it has {', '.join(self)}")
            self._states.meet(f"writing {name}={value!r} of {param.name}")
            self._holder.set_scalar(param, name, value)
            return
        check_tensor(name, param, value)
        self._states.meet(f"writing {name} of {param.name}", value)
        self._states.write(param, self._tensors.index(name), value)
        if name != "master":
            self._holder.moment_given(param, name)

    def __delitem__(self, name: str) -> None:
        raise TypeError(f"{name!r} of {self._param.name} cannot be removed; assign zeros")

    def __iter__(self) -> Iterator[str]:
        yield from self._tensors
        yield from self._holder.scalars(self._param)

    def __len__(self) -> int:
        return len(self._tensors) + len(self._holder.scalars(self._param))

    def __repr__(self) -> str:
        return f"OptimizerState({self._param.name}: {', '.join(self)})"


def check_tensor(what: str, param: Param, value: object) -> None:
    """Raise ValueError unless `value` is a floating tensor of the parameter's shape."""
    if not isinstance(value, torch.Tensor) or value.shape != param.shape or not value.is_floating_point():
        shown = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
        raise ValueError(f"{what} of {param.name} is a floating tensor of shape {tuple(param.shape)}, not {shown}")


def sections_with(form: Format, value: int) -> list[int]:
    """The sections that hold the master (value 0) or a moment (1, 2, 3)."""
    if value == 0:
        return list(range(form.master_count))
    scales = [form.master_count + form.count] if form.moments is Moments.Q8 else []
    return [form.master_count + value - 1, *scales]


def span_sections(stage: ChunkBuffer, span: Span) -> list[Bytes]:
    """The span's part of every section of the chunk that the stage holds, but `grad`, as writable bytes."""
    return [stage.section(index, span.start, span.numel) for index in range(stage.records.format.written_count)]


def decode_values(form: Format, sections: Sequence[Bytes]) -> list[torch.Tensor]:
    """The master and the moments in fp32 [numel], fresh tensors. Values whose sections were not fetched are without meaning."""
    given = [torch.from_numpy(section) for section in sections]
    master, moments = decode_sections(form.with_grad(GradSection.NONE), given)
    # Copies, for torch's alignment: what MKL computes may depend on it.
    return [values.clone() for values in (master, *moments)]


def encode_values(
    form: Format, values: Sequence[torch.Tensor], sections: Sequence[Bytes], *, key: int, element: int
) -> None:
    """Put the master and the moments, fp32 [numel], into their sections, rounded at random as an update does."""
    master, *moments = values
    coded = encode_sections(form.with_grad(GradSection.NONE), master, moments, key=key, element=element)
    for target, source in zip(sections, coded, strict=True):
        target[:] = source.numpy().view(np.uint8)


def encode_value(form: Format, value: int, tensor: torch.Tensor, sections: Sequence[Bytes]) -> None:
    """Put the master (value 0) or one moment (1, 2, 3) into its sections, rounded to nearest; other values keep their bits."""
    blank = torch.zeros_like(tensor)
    values = [tensor if index == value else blank for index in range(1 + form.count)]
    master, *moments = values
    coded = [section.numpy() for section in encode_sections(form.with_grad(GradSection.NONE), master, moments)]
    for index in sections_with(form, value):
        if value and index == form.master_count + form.count:  # scales: one column is this moment's
            columns = sections[index].view(np.int16).reshape(-1, form.count)
            columns[:, value - 1] = coded[index].reshape(-1, form.count)[:, value - 1]
        else:
            sections[index][:] = coded[index].view(np.uint8)
