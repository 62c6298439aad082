"""Access to optimizer states and gradients of single parameters, by name, on any tier.

    optimizer_state(p)["exp_avg"]             fetch the chunks -> decode -> fp32 [p.shape], a copy
    optimizer_state(p)["exp_avg"] = tensor    fetch, decode, replace, encode, store the sections

All bytes pass through a chunk buffer, which holds the sections of one chunk in ordinary memory. So
access to a parameter of any size takes the memory of its fp32 copy and of one chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from infinity._src.cabi.records import GradSection, Moments
from infinity._src.distributed.communicator import Comm, digest, fingerprinted
from infinity._src.kernels.state_codec import decode_sections, encode_sections
from infinity._src.params.accumulator import AccumulatorState
from infinity._src.params.chunk_pipeline import ChunkBuffer, ParamSpan, spans_of
from infinity._src.params.param_copies import DelayedParams
from infinity._src.params.reduce import GradReducer
from infinity._src.params.state_store import StateStore
from infinity._src.params.unit import Param
from infinity._src.params.unshard import Unsharder
from infinity.aio import Format

Bytes = npt.NDArray[np.uint8]


class StatefulOptimizer(Protocol):
    """The optimizer of a parameter, as access to states sees it."""

    def moments_of(self, param: Param) -> tuple[str, ...]:
        """Return the names of the parameter's moments, in the order of their sections."""

    def scalars(self, param: Param) -> dict[str, Any]:
        """Return the parameter's states that are not tensors of its shape; `step` at least."""

    def set_scalar(self, param: Param, name: str, value: Any) -> None:
        """Set a state that `scalars` returns. Raises: ValueError."""

    def moment_written(self, param: Param, name: str) -> None:
        """Note that the user wrote a moment."""


class States:
    """The states and gradients of one model's parameters, one at a time. Blocking; collective on
    several ranks.

    wait: blocks until no update is pending, and raises the fault of an update that failed.
    """

    def __init__(
        self,
        store: StateStore,
        unsharder: Unsharder,
        gradients: GradReducer,
        comm: Comm,
        *,
        delayed_params: DelayedParams | None,
        wait: Callable[[], None],
    ) -> None:
        self.store = store
        self.rank = comm.rank
        self._unsharder = unsharder
        self._gradients = gradients
        self._delayed_params = delayed_params
        self._comm = comm
        self._wait = wait
        self._buffers: list[ChunkBuffer] = []

    def chunk_buffers(self, count: int) -> list[ChunkBuffer]:
        """Return memory for `count` chunks, the same at each call. No transfer may be in flight in
        it."""
        while len(self._buffers) < count:
            self._buffers.append(ChunkBuffer(self.store))
        return self._buffers[:count]

    def check_ranks_agree(self, what: str, tensor: torch.Tensor | None = None) -> None:
        """Check that all ranks make this call with the same tensor. Collective.

        Raises: RanksDiverged.
        """
        self._comm.check_same_collective(
            lambda: what if tensor is None else fingerprinted(what, digest(tensor))
        )

    # -- states ------------------------------------------------------------------------------------

    def read(self, param: Param, value: int) -> torch.Tensor:
        """Return a copy of the master (value 0) or a moment (1, 2, 3), fp32 [param.shape]. Blocks.
        Collective.
        """
        # A pending update may have written only some of the chunks.
        self._wait()
        shard = self.store[param.flat]
        buffer = ChunkBuffer(self.store)
        part = []
        for span in spans_of(param, self.rank):
            # Only the sections of this value are fetched: a moment costs no read of the master.
            sections = sections_with(shard.format, value)
            buffer.fetch(shard, span.chunk, sections).wait()
            part.append(decode_values(shard.format, span_sections(buffer, span))[value])
        return self._whole(param, part)

    def write(self, param: Param, value: int, tensor: torch.Tensor) -> None:
        """Set the master or a moment, rounded to the precision of the format. tensor:
        [param.shape], any floating dtype.

        Other states keep their bits. In every update mode the next step computes with the written
        master. All ranks pass the same tensor. Blocks. Raises: RuntimeError while the unit is in
        use; ValueError for a negative second moment in a format that stores it in 8 bits, without
        a sign.
        """
        self._wait()
        if param.unit.refs:
            raise RuntimeError(
                f"{param.name} is in use; write its states outside of forward, backward and "
                "handle.gather()"
            )
        shard = self.store[param.flat]
        # Convert to fp32 for every format, so that only the encoder rounds.
        wanted = tensor.detach().to("cpu", torch.float32).reshape(-1)
        if shard.format.moments is Moments.Q8 and value == 2 and bool((wanted < 0).any()):
            raise ValueError(
                f"the second moment of {param.name} is a mean of squares, but some given values "
                f"are below zero (the least is {wanted.min():.3g}): state='compact' stores no "
                "sign; clamp them to 0"
            )
        if value == 0:
            # Mark the unit before the first store: an error after that then costs one more gather.
            # Marked later, the gathered unit could keep outdated values after an error.
            self.touch(param)
        buffer = ChunkBuffer(self.store)
        for span in spans_of(param, self.rank):
            buffer.fetch(shard, span.chunk, sections_encoded_with(shard.format, value)).wait()
            given = wanted[span.element : span.element + span.numel].contiguous()
            changed = encode_value(shard.format, value, given, span_sections(buffer, span))
            if changed:
                buffer.store(changed).wait()
            # With update="delayed" forwards compute with a second copy, which needs the written
            # value too.
            if value == 0 and self._delayed_params is not None:
                written = torch.from_numpy(buffer.section(0, span.start, span.numel)).view(
                    param.dtype
                )
                start = param.flat.layout.chunks[span.chunk].start + span.start
                self._delayed_params.write(param.flat, start, written)

    def touch(self, param: Param) -> None:
        """Mark the parameter's gathered unit as outdated, since its values at rest are about to
        change.
        """
        self._unsharder.touched(param.unit)

    # -- gradients ---------------------------------------------------------------------------------

    def full_grad(self, param: Param) -> torch.Tensor | None:
        """Return a copy of the accumulated gradient, fp32 [param.shape], after the loop's scalings
        and clamps; None if `p.grad` is None. Blocks. Collective.
        """
        self._wait()
        if param.grad is None and param.at_rest.grad is None:
            return None
        # Made on demand: the loop may have assigned `p.grad` before any backward.
        accumulator = self._gradients.accumulator(param)
        if (
            accumulator.reconcile(param.at_rest.grad) is AccumulatorState.EMPTY
            and not accumulator.unreduced
        ):
            return None
        return self._whole(param, [accumulator.part()])

    def set_full_grad(self, param: Param, tensor: torch.Tensor | None) -> None:
        """Make `tensor` [param.shape] the gradient, rounded to the dtype of accumulated gradients;
        None clears it. Blocks.

        All ranks pass the same tensor. Raises: RuntimeError with update="backward" when the update
        has already taken backward's gradient; an assignment to `p.grad` raises then, too.
        """
        if tensor is not None:
            check_tensor("the gradient", param, tensor)
            self.check_ranks_agree(f"setting the gradient of {param.name}", tensor)
        if tensor is None:
            self.clear_grads((param,))
            return
        self._wait()
        # Each rank stores the part that a reduce_scatter would have given it.
        _, element, numel = param.flat.layout.shard_range(param.param_index, self.rank)
        part = tensor.detach().to("cpu").reshape(-1)[element : element + numel]
        self._gradients.replace(param, part)

    def clear_grads(self, params: Sequence[Param]) -> None:
        """Clear the gradients of these parameters. Blocks."""
        self._wait()
        for param in params:
            self._gradients.accumulator(param).empty()
            param.at_rest.grad = None

    def _whole(self, param: Param, part: Sequence[torch.Tensor]) -> torch.Tensor:
        """Join the parts of all ranks to the whole tensor, fp32 [param.shape]. Collective."""
        _, element, _ = param.flat.layout.shard_range(param.param_index, self.rank)
        mine = torch.cat([piece.reshape(-1) for piece in part]) if part else torch.empty(0)
        return self._comm.all_gather_vector(mine, element, param.numel).view(param.shape)


class OptimizerState(MutableMapping[str, Any]):
    """Optimizer states of one parameter: "master", its moments by name, "step" and other numbers.

    Reading a tensor returns a new fp32 copy on the CPU, [p.shape]. Assigning a tensor writes it to
    its tier, encoded as the policy's `state` says, and rounded to nearest where that format rounds.
    Writing "master" also sets the parameter (with update="delayed" also the copy that forward
    computes with), and does not change the moments.

    Access blocks until pending updates have ended. On several ranks every access is collective, and
    all ranks assign the same values. Raises: KeyError for an unknown name; ValueError for a tensor
    of another shape or a dtype that is not floating; RanksDiverged.
    """

    def __init__(self, param: Param, holder: StatefulOptimizer, states: States) -> None:
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
            self._states.check_ranks_agree(f"writing {name}={value!r} of {param.name}")
            self._holder.set_scalar(param, name, value)
            return
        check_tensor(name, param, value)
        # Check before any rank writes: no later check finds a value that differs on one rank.
        self._states.check_ranks_agree(f"writing {name} of {param.name}", value)
        self._states.write(param, self._tensors.index(name), value)
        if name != "master":
            self._holder.moment_written(param, name)

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
    if (
        not isinstance(value, torch.Tensor)
        or value.shape != param.shape
        or not value.is_floating_point()
    ):
        shown = (
            f"{value.dtype} {tuple(value.shape)}"
            if isinstance(value, torch.Tensor)
            else type(value).__name__
        )
        raise ValueError(
            f"{what} of {param.name} must be a floating tensor of shape {tuple(param.shape)}, not "
            f"{shown}"
        )


def sections_with(form: Format, value: int) -> list[int]:
    """Return the sections that the master (value 0) or a moment (1, 2, 3) is decoded from."""
    if value == 0:
        return list(form.master_sections)
    section = form.master_count + value - 1
    # `lo` says whether the sign bit belongs to the moment.
    if section == form.sign_section:
        return [1, section]
    # 8-bit moments share one section of scales, so a moment needs that too.
    scales = [form.master_count + form.count] if form.moments is Moments.Q8 else []
    return [section, *scales]


def sections_encoded_with(form: Format, value: int) -> list[int]:
    """Return the sections that `encode_value` reads."""
    found = sections_with(form, value)
    # The master and the moment in the sign section are encoded together.
    return list(form.master_sections) if form.sign_section in found else found


def span_sections(buffer: ChunkBuffer, span: ParamSpan) -> list[Bytes]:
    """Return the span's part of every section of the buffer's chunk except `grad`, as writable
    bytes."""
    return [
        buffer.section(index, span.start, span.numel)
        for index in range(buffer.records.format.written_count)
    ]


def decode_values(form: Format, sections: Sequence[Bytes]) -> list[torch.Tensor]:
    """Return the master and the moments as new fp32 tensors [numel]. A value whose sections were
    not fetched is undefined.
    """
    given = [torch.from_numpy(section) for section in sections]
    master, moments = decode_sections(form.with_grad(GradSection.NONE), given)
    # Copies have torch's alignment, on which results of MKL may depend.
    return [values.clone() for values in (master, *moments)]


def encode_values(
    form: Format,
    values: Sequence[torch.Tensor],
    sections: Sequence[Bytes],
    *,
    key: int,
    element: int,
) -> None:
    """Put the master and the moments, fp32 [numel], into their sections, rounded stochastically as
    an update does."""
    master, *moments = values
    coded = encode_sections(
        form.with_grad(GradSection.NONE), master, moments, key=key, element=element
    )
    for target, source in zip(sections, coded, strict=True):
        target[:] = source.numpy().view(np.uint8)


def encode_value(
    form: Format, value: int, tensor: torch.Tensor, sections: Sequence[Bytes]
) -> list[int]:
    """Put the master (value 0) or one moment (1, 2, 3) into its sections, rounded to nearest; other
    values keep their bits. Returns the sections that changed."""
    wanted = sections_with(form, value)
    if form.sign_section in wanted:
        values = decode_values(form, sections)
    else:
        values = [torch.zeros_like(tensor)] * (1 + form.count)
    values[value] = tensor
    master, *moments = values
    coded = encode_sections(form.with_grad(GradSection.NONE), master, moments)
    changed = []
    for index in wanted:
        old: npt.NDArray[Any] = sections[index]
        new: npt.NDArray[Any] = coded[index].numpy().view(np.uint8)
        # The section of scales has a column for each moment, and only this one's changes.
        if value and index == form.master_count + form.count:
            old, new = (
                each.view(np.int16).reshape(-1, form.count)[:, value - 1] for each in (old, new)
            )
        if not np.array_equal(old, new):
            old[:] = new
            changed.append(index)
    return changed
