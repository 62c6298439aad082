"""Gradient accumulators: storage of accumulated gradients, their norms, and the log of scalings.

    GradAccumulator   one parameter's gradient (this rank's part) in CPU memory, with a log of
                      in-place scalings and clamps; or, spilled, on NVMe, from where its
                      `GradBacking` reads it
    GradProxy         the tensor in `p.grad`, which answers the loop from the accumulator
    GradRegistry      the accumulators of one model: their scratch, and norms over all ranks

Invariants. Update kernels and readers replay the log with one fp32 operation per entry, so clipping
needs no pass over the gradients and rounds as in torch. A norm is bit for bit what torch computes
for the fp32 gradient after these operations, for parameters of up to `NORM_PIECE_NUMEL` elements.
For a larger parameter it is the norm of the norms of pieces, which bounds the scratch.

One case rounds: adding a gradient to an accumulator with a log first replays the log in fp32 and
rounds to the accumulator's dtype, because the log's factors apply only to the sum so far.
"""

from __future__ import annotations

import contextlib
import enum
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn, Protocol

import torch

from infinity._src.base.torch_compat import NO_TORCH_FUNCTION
from infinity._src.kernels.bf16_norm import bf16_norm
from infinity._src.memory.device import GradOffload
from infinity._src.params.cleanup import cancel_and_wait
from infinity._src.params.grad_norms import (
    NORM_PIECE_NUMEL,
    norm_of_norms,
    norm_of_squares,
    norm_over_ranks,
    norm_there,
    to_fp32,
)
from infinity.aio import Ticket
from infinity.errors import AioError

LogEntry = tuple[str, float]


def replay(value: torch.Tensor, log: Sequence[LogEntry]) -> torch.Tensor:
    """Apply the log in place to an fp32 tensor, one rounding per entry."""
    # One operation per entry: factors multiplied first would round differently from the loop.
    for kind, number in log:
        _REPLAYED[kind](value, number)
    return value


_REPLAYED: dict[str, Callable[[torch.Tensor, float], torch.Tensor]] = {
    "mul": torch.Tensor.mul_,
    "div": torch.Tensor.div_,
    "clamp_min": torch.Tensor.clamp_min_,
    "clamp_max": torch.Tensor.clamp_max_,
}
"""In-place operations on an fp32 tensor, by kind of log entry (`LogKind` in the kernels)."""


def is_exact(entry: LogEntry) -> bool:
    """Return whether an entry changes no bit of any gradient: a factor of 1, as clipping by norm
    applies to gradients below the bound."""
    kind, number = entry
    return kind in ("mul", "div") and number == 1.0


def raise_unsupported(name: str, operation: str) -> NoReturn:
    """Raise the error of an operation that a proxy cannot answer, with the way that works."""
    if "clamp" in operation or "clip" in operation or "imum" in operation:
        way = (
            "clip it in place and by numbers (torch.nn.utils.clip_grad_value_, "
            "p.grad.clamp_(-1, 1)), or assign p.grad.materialize().clamp(...) to p.grad"
        )
    elif (
        "addc" in operation
        or "lerp" in operation
        or "_fused_" in operation
        or "foreach_add" in operation
    ):
        way = (
            "step with infinity's AdamW, SGD, Lion or Elementwise, which take the gradients where "
            "they rest"
        )
    else:
        way = (
            "it answers norms, `*=`, `/=`, clamp_, zero_ and GradScaler; p.grad.materialize() "
            "returns its values on the CPU, and a tensor assigned to p.grad takes their place"
        )
    raise RuntimeError(f"{name}.grad rests in CPU memory and does not support {operation}: {way}")


LOG_MAX = 8  # entries that the update kernels replay (`hyper.log_kind` of native/infinity.h)


class AccumulatorState(enum.Enum):
    """State of an accumulator's gradient: absent, held, or taken by an update."""

    EMPTY = "empty"  # what torch calls `p.grad is None`
    HELD = "held"
    CONSUMED = "consumed"  # an update took it, and its values are gone


class GradBacking(Protocol):
    """Shared storage for the gradients of several accumulators; `infinity._src.params.spill`
    implements it on NVMe."""

    def read(self, accumulator: GradAccumulator) -> torch.Tensor:
        """Return the accumulator's values [this rank's part], valid until the next call. Blocks.
        Raises: AioError."""

    def read_for_write(self, accumulator: GradAccumulator) -> torch.Tensor:
        """Return the memory that the caller is about to write. Holds the accumulator's values;
        undefined bytes for an empty accumulator. Blocks. Raises: AioError."""

    def to_replace(self, accumulator: GradAccumulator) -> torch.Tensor:
        """Return the accumulator's values, which the caller replaces with others for an update to
        read. Blocks. Raises: AioError."""


class AccumulatorReader(Protocol):
    """Update that reads an accumulator's storage: a running one, or one that may be undone and
    repeated with the same gradient. The accumulator calls it before each write."""

    def before_write(self, accumulator: GradAccumulator, /) -> None:
        """Block until the accumulator may be written."""


class ReadByUpdate:
    """A running update as a reader. One object serves all accumulators that the update reads."""

    def __init__(self, ticket: Ticket) -> None:
        self._ticket = ticket

    def before_write(self, _accumulator: GradAccumulator) -> None:
        # The update has nearly always ended, and then no function is called.
        if not self._ticket.done:
            wait_through(self._ticket)


def wait_through(ticket: Ticket) -> None:
    """Block until an update has succeeded or failed."""
    if not ticket.done:
        # `StepPipeline.raise_fault` finds the failed ticket and raises its fault, once.
        with contextlib.suppress(AioError):
            ticket.wait()


class GradAccumulator:
    """Accumulated gradient of one parameter, and the log of scalings and clamps that the loop
    applied to it.

    `tensor` is the accumulator's storage, 1-D CPU, of the gradient dtype: this rank's part of the
    parameter (all of it on one rank, nothing where the shard holds none). `guard` sets the reader
    that is called before each write to the storage, so that a pending update has read the gradient
    first. If the accumulator has a `backing`, the backing stores the values, and `tensor` reads
    them from there at each access. The executor makes a write to NVMe wait for updates that read
    the gradient, so such an accumulator needs no reader.
    """

    proxy: torch.Tensor  # the value of `p.grad` while the accumulator holds a gradient

    def __init__(
        self,
        registry: GradRegistry,
        name: str,
        shape: torch.Size,
        tensor: torch.Tensor,
        *,
        on_zero: Callable[[], None] | None = None,
    ) -> None:
        self.registry = registry
        self.name = name
        self.shape = shape
        self.backing: GradBacking | None = None
        self.tensor = tensor
        self.state = AccumulatorState.EMPTY
        self.log: list[LogEntry] = []
        self._reader: AccumulatorReader | None = None
        self._d2h: Ticket | None = None  # the copy from the device that fills the storage
        self._offloaded_in = -1  # number of the backward whose gradient was copied out last
        # The copy that `prefetch_to_device` started, and the sum on the device that it fills;
        # backward adds the next gradient to this sum.
        self._h2d: tuple[Ticket, torch.Tensor] | None = None
        self._device_norm: torch.Tensor | None = None  # `read_device_norms` sets `_part_norm` to it
        self._norm: float | None = None  # over all ranks; valid together with `_part_norm`
        self._part_norm: float | None = None  # this rank's part
        # 2-norm of this rank's part before the log; valid while there is a log.
        self._raw_norm: float | None = None
        self._accumulations = 0  # since the accumulator was last empty
        self._accumulations_before = 1  # the count when the accumulator was last emptied
        # Whether this rank has an unreduced sum of the parameter (`UnreducedGrads`).
        self.unreduced = False
        self._on_zero = on_zero  # sets the unreduced sum to zeros
        # Other gradients overwrote the values on NVMe; the loop may still hold the old proxy.
        self._overwritten = False

    @property
    def tensor(self) -> torch.Tensor:
        """Storage [part of the parameter]. May be set to a tensor of the same size and values.

        Spilled: read back if necessary, and valid until another accumulator's tensor is read.
        """
        # The copy from the device may still be writing the storage.
        self.wait_d2h()
        return self.storage if self.backing is None else self.backing.read(self)

    @tensor.setter
    def tensor(self, tensor: torch.Tensor) -> None:
        # With a backing, `storage` is on meta, and has only the size and dtype.
        self.storage = tensor
        self.numel, self.dtype = tensor.numel(), tensor.dtype
        self.whole = self.numel == self.shape.numel()  # this rank holds all of the gradient
        self._own_shaped = tensor.view(self.shape) if self.whole else tensor

    def guard(self, reader: AccumulatorReader | None) -> None:
        """Call `reader` before each later write to the storage; None: no reader."""
        self._reader = reader

    @property
    def _shaped(self) -> torch.Tensor:
        """Storage, in the parameter's shape if this rank holds the whole gradient. torch may order
        the sum over a 2-D tensor differently than over a 1-D one, and norms must match to the bit.
        """
        self.wait_d2h()
        if self.backing is None:
            return self._own_shaped
        tensor = self.backing.read(self)
        return tensor.view(self.shape) if self.whole else tensor

    def move_to(self, tensor: torch.Tensor, backing: GradBacking | None) -> None:
        """Move the values to other memory of the same size, or to a backing (`tensor` then is on
        the meta device)."""
        # Read before the backing changes: `tensor` reads the current backing.
        values = self.tensor if self.state is AccumulatorState.HELD else None
        self.backing, self.tensor = backing, tensor
        if values is not None:
            (tensor if backing is None else backing.read_for_write(self)).copy_(values)

    def to_replace(self) -> torch.Tensor:
        """Return spilled values, which the caller replaces; see `GradBacking.to_replace`."""
        assert self.backing is not None
        return self.backing.to_replace(self)

    def undo_move(self, tensor: torch.Tensor, backing: GradBacking | None) -> None:
        """Restore the memory and backing from before a `move_to` that failed. They still hold the
        values."""
        self.backing, self.tensor = backing, tensor

    def wait_d2h(self) -> None:
        """Block until the copy from the device has landed. Raises: DeviceCopyError."""
        if self._d2h is not None:
            assert self.registry.grad_offload is not None
            self.registry.grad_offload.device.wait_filled(self._d2h)
            self._d2h = None

    # -- filling -----------------------------------------------------------------------------------

    def reconcile(self, current: torch.Tensor | None) -> AccumulatorState:
        """Make the accumulator agree with the user's `p.grad`. Called before a gradient is
        accumulated, and at the step.

        None empties the accumulator; the proxy (or a detached alias of it) keeps it; an ordinary
        tensor is copied in, as the gradient that the user wants.

        Raises: RuntimeError if `current` is the proxy of another parameter.
        """
        # The usual case: the loop has not assigned `p.grad`.
        if current is self.proxy and not self._overwritten:
            return self.state
        if current is None:
            self.empty()
        elif isinstance(other := getattr(current, "accumulator", None), GradAccumulator):
            if other is not self:
                raise RuntimeError(
                    f"{self.name}.grad was set to the gradient of {other.name}; assign "
                    "`other.grad.materialize()`, which is an ordinary tensor"
                )
        else:
            self._assign(current)
        # `empty` clears the mark for any other value: `current` is the old proxy or an alias of it.
        if self._overwritten:
            raise RuntimeError(
                f"{self.name}.grad was set to None, and later to the old gradient again, whose "
                "values on NVMe newer gradients have overwritten: they are gone; keep "
                "`p.grad.materialize()` instead, and assign that"
            )
        return self.state

    def _assign(self, grad: torch.Tensor) -> None:
        if grad.shape != self.shape or not self.whole:
            raise RuntimeError(
                f"{self.name}.grad was replaced by a tensor of shape {tuple(grad.shape)}; the "
                f"engine takes one of shape {tuple(self.shape)}, and only on one rank"
            )
        # Empty first: `accumulate` would add the tensor to the gradient that the loop replaced.
        self.empty()
        self.accumulate(grad)
        # Wait for the copy: the loop may change the tensor after this call.
        self.wait_d2h()

    def accumulate(self, grad: torch.Tensor) -> None:
        """Take one fresh gradient: the first is copied, later ones are added in the accumulator's
        dtype.

        grad: `shape`, or this rank's part as a 1-D tensor. Blocks until it has been copied.
        """
        self._refuse_consumed()
        source = grad.detach() if grad.requires_grad else grad
        # A running update may still read the previous gradient.
        self._before_write()
        if self.registry.grad_offload is not None and source.device == self.proxy.device:
            self._accumulate_on_device(source, self.registry.grad_offload)
            return
        # This gradient is added in CPU memory: the sum on the device would miss it.
        self.cancel_prefetch()
        target = self._shaped
        if source.shape != target.shape:
            source = source.reshape(target.shape)
        empty = self.state is AccumulatorState.EMPTY
        self._accumulations = 1 if empty else self._accumulations + 1
        # Compute the norm at the step's last gradient, as counted in the previous step, while the
        # data is in the CPU's caches. For a spilled accumulator compute it at each gradient: a
        # later norm would read the values back from NVMe.
        last = self._accumulations >= self._accumulations_before or self.backing is not None
        self._forget_norms()
        norm = None
        if empty:
            # Copied, not added to zeros: clearing a gradient costs no pass over memory.
            if last and self.numel <= NORM_PIECE_NUMEL:
                norm = bf16_norm(source, target)
            if norm is None:
                target.copy_(source)
            self.state = AccumulatorState.HELD
        else:
            # The log's factors apply only to the sum so far.
            if self.log:
                self._apply_log()
            target.add_(source if source.device == target.device else source.to(target.device))
        if last:
            self._part_norm = self._compute_norm(2.0) if norm is None else norm

    def _refuse_consumed(self) -> None:
        if self.state is AccumulatorState.CONSUMED:
            raise RuntimeError(
                f"a new gradient of {self.name} arrived while p.grad still is the previous one, "
                "which an update consumed: call zero_grad() after opt.step(); with "
                "update='backward' and with inf.Muon gradients cannot add up over steps"
            )

    def expect_reduction(self, current: torch.Tensor | None) -> bool:
        """Record a gradient of this rank that is reduced later. current: the value of `p.grad`.
        Returns whether it is the first one since the accumulator was cleared or reduced."""
        # Read first: `empty` clears the mark.
        first = not self.unreduced or current is None
        if current is None:
            self.empty()
        self._refuse_consumed()
        self.unreduced = True
        return first

    def _accumulate_on_device(self, source: torch.Tensor, offload: GradOffload) -> None:
        """Accumulate on a device with separate memory: add and take the norm there, then start
        copying the sum to the storage."""
        if self.state is AccumulatorState.EMPTY:
            total = source.to(self.dtype)
            self.state, self._accumulations = AccumulatorState.HELD, 1
        else:
            if self.log:
                self._apply_log()
            total = self._sum_on_device(source.device).add_(source.reshape(-1))
            self._accumulations += 1
        self._offloaded_in = offload.backward_count
        self._forget_norms()
        self._device_norm = norm_there(total.view(self.shape) if self.whole else total.reshape(-1))
        # A rank may have no part of a small parameter.
        self._d2h = offload.copy_out(total, self.tensor) if total.numel() else None

    def _sum_on_device(self, device: torch.device) -> torch.Tensor:
        if self._h2d is None:
            # Not prefetched: copy now. `copy=True`, since the caller adds in place.
            return self.tensor.to(device, copy=True, non_blocking=True)
        ticket, there = self._h2d
        assert self.registry.grad_offload is not None
        self.registry.grad_offload.device.wait_filled(ticket)
        self._h2d = None
        return there

    def prefetch_to_device(self, offload: GradOffload) -> None:
        """Start copying the sum so far to the device, where backward adds the next gradient. Does
        nothing for an accumulator with a backing or a log, and if this backward has already
        produced a gradient."""
        # After this backward's gradient another is unlikely, and the copy to RAM is in flight.
        came = self._offloaded_in == offload.backward_count
        if (
            came
            or self._h2d is not None
            or not self.numel  # a rank may have no part of a small parameter
            or self.state is not AccumulatorState.HELD
            or self.backing is not None
            or self.log
        ):
            return
        source = self.tensor
        there = torch.empty(self.numel, dtype=self.dtype, device=self.proxy.device)
        ticket = offload.device.copy(
            there.data_ptr(), source.data_ptr(), self.numel * self.dtype.itemsize, out=True
        )
        self._h2d = (ticket, there)

    def cancel_prefetch(self) -> None:
        """Drop the copy that `prefetch_to_device` started. Blocks until no transfer writes to its
        memory."""
        if self._h2d is None:
            return
        interrupt = cancel_and_wait([self._h2d[0]])
        self._h2d = None
        if interrupt is not None:
            raise interrupt

    def _forget_norms(self) -> None:
        self._norm = self._part_norm = self._device_norm = None

    def empty(self) -> None:
        """Forget the gradient, as `p.grad = None` does. The storage stays: an update may still read
        it."""
        # `accumulate` computes the norm at the last gradient of a step, which it identifies by this
        # count.
        if self.state is AccumulatorState.HELD:
            self._accumulations_before = max(1, self._accumulations)
        self.cancel_prefetch()
        # The unreduced sum goes, too: `GradReducer` drops it for an accumulator that is not
        # `unreduced`.
        self.state, self.unreduced = AccumulatorState.EMPTY, False
        self._accumulations = 0
        self.log.clear()
        self._forget_norms()
        self._overwritten = False

    def mark_overwritten(self) -> None:
        """Empty a spilled accumulator that no `p.grad` refers to, because other gradients overwrite
        it. Assigning its old proxy to `p.grad` is an error from then on."""
        self.empty()
        self._overwritten = True

    def consume(self) -> None:
        """Empty the accumulator after an update took the gradient. The proxy stays in `p.grad`, and
        raises when the loop reads values."""
        self.empty()
        self.state = AccumulatorState.CONSUMED

    def zero(self) -> None:
        """Set the gradient to zeros; the optimizer still steps with it, as in torch."""
        if self.unreduced:
            self.unreduced = False
            self.state = AccumulatorState.HELD
            if self._on_zero is not None:
                self._on_zero()
        if self.state is AccumulatorState.EMPTY:
            return
        self._require_held("zero_")
        self.cancel_prefetch()
        self._before_write()
        self.tensor.zero_()
        self.log.clear()
        self._accumulations_before, self._accumulations = max(1, self._accumulations), 0
        self._forget_norms()
        self._norm = self._part_norm = 0.0

    def scale(self, kind: str, value: float) -> None:
        """Multiply ("mul") or divide ("div") the gradient by a number that is rounded to fp32
        first."""
        self._require_held(kind)
        assert kind in ("mul", "div"), kind
        if is_exact((kind, value)):
            return  # the usual case of clipping: the norm stays valid
        self._note([(kind, value)])

    def clamp(self, minimum: float | None, maximum: float | None) -> None:
        """Raise smaller elements to `minimum` and lower larger ones to `maximum`, numbers that are
        rounded to fp32 first; None: no bound. NaN stays NaN."""
        self._require_held("clamp_")
        # In torch's order: where the bounds cross, the maximum wins.
        bounds = (("clamp_min", minimum), ("clamp_max", maximum))
        self._note([(kind, to_fp32(bound)) for kind, bound in bounds if bound is not None])

    def _note(self, entries: Sequence[LogEntry]) -> None:
        if len(self.log) + len(entries) > LOG_MAX:
            raise RuntimeError(
                f"{self.name}.grad was scaled or clamped more than {LOG_MAX} times since it was "
                "accumulated; multiply the factors first and scale once"
            )
        # From the norm before the first entry `_bounded` proves that all elements are finite.
        if not self.log:
            self._raw_norm = self._known_norm()
        self.log.extend(entries)
        self._forget_norms()

    # -- reading -----------------------------------------------------------------------------------

    def norm(self, order: float = 2.0) -> float:
        """Return the norm of the whole gradient, in fp32. With several ranks a collective: every
        rank must call it."""
        self._require_held("norm")
        return self.registry.norms([self], order)[0]

    def finite(self) -> bool:
        """True when every element of this rank's part is finite after the log. Never
        communicates."""
        if (
            self.state is not AccumulatorState.HELD
            or self._bounded()
            or math.isfinite(self.part_norm())
        ):
            return True
        # The norm may be infinite although all elements are finite: above 1.8e19 squares overflow.
        with self.registry.scratch_lock:
            return all(bool(piece.isfinite().all()) for piece in self._replayed())

    def _bounded(self) -> bool:
        """True when the norm before the log, and the log, prove every element finite. No element is
        larger than the norm, and rounding is monotone, so an element stays finite if the norm does.
        Saves a pass over gradients that were clipped."""
        if not self.log or self._raw_norm is None:
            return False
        # Round the bound as the kernels round elements, so that it holds for each element.
        bound = self._raw_norm
        for kind, value in self.log:
            if not math.isfinite(value) or (kind == "div" and value == 0.0):
                return False
            if kind in ("clamp_min", "clamp_max"):
                # A clamped element is unchanged, or one of the clamp's bounds.
                bound = max(bound, abs(value))
            else:
                bound = to_fp32(abs(bound * value if kind == "mul" else bound / value))
            if not math.isfinite(bound):
                return False
        return True

    def part_norm(self, order: float = 2.0) -> float:
        """Return the norm of this rank's part after the log, in fp32. The 2-norm is cached."""
        if order != 2.0:
            return self._compute_norm(order)
        if self._known_norm() is None:
            self._part_norm = self._compute_norm(order)
        assert self._part_norm is not None
        return self._part_norm

    def _known_norm(self) -> float | None:
        """2-norm of this rank's part, if computed. Blocks while the device computes it."""
        if self._device_norm is not None:
            self.registry.read_device_norms()
        return self._part_norm

    def materialize(self) -> torch.Tensor:
        """Return a CPU copy of the gradient with the log replayed, fp32 [shape]."""
        self._require_held("materialize")
        if not self.whole:
            raise RuntimeError(
                f"{self.name}.grad is split over ranks and cannot be materialized on one of them"
            )
        return self.part().view(self.shape)

    def part(self, start: int = 0, numel: int | None = None) -> torch.Tensor:
        """Return elements [start, start + numel) of this rank's part in fp32, with the log
        replayed: a 1-D copy. numel None: to the end. Never communicates."""
        self._require_held("reading")
        end = None if numel is None else start + numel
        return replay(self.tensor[start:end].to(torch.float32, copy=True), self.log)

    # -- helpers -----------------------------------------------------------------------------------

    def _require_held(self, operation: str) -> None:
        if self.state is AccumulatorState.CONSUMED:
            raise RuntimeError(
                f"{operation} on the gradient of {self.name}: the update took it during backward "
                "(Policy(update='backward')), or in opt.step() (inf.Muon). Clipping by norm or "
                "value, GradScaler and changing gradients need update='deferred', before "
                "opt.step(); transformers' Trainer computes no norm "
                "after infinity.integrations.transformers.embed(trainer); clear gradients with "
                "zero_grad(set_to_none=True)"
            )
        if self.unreduced:
            raise RuntimeError(
                f"{operation} on the gradient of {self.name}, which was added up inside "
                "handle.no_sync() and is not reduced over the ranks yet: run the last micro-batch "
                "of a step outside of no_sync()"
            )
        if self.state is AccumulatorState.EMPTY:
            raise RuntimeError(
                f"{operation} on a stale gradient of {self.name}: it was cleared (p.grad = None) "
                "and this proxy is an old reference; read p.grad again"
            )

    def _before_write(self) -> None:
        if self._reader is not None:
            self._reader.before_write(self)
        if self.backing is not None:
            self.backing.read_for_write(self)

    def _apply_log(self) -> None:
        """Replay the log on the storage: in fp32, then rounded to the accumulator's dtype."""
        # The prefetched sum on the device lacks the log's operations.
        self.cancel_prefetch()
        with self.registry.scratch_lock:
            start = 0
            for piece in self._replayed():
                self.tensor[start : start + piece.numel()].copy_(piece.view(-1))
                start += piece.numel()
        self.log.clear()

    def _replayed(self) -> Iterator[torch.Tensor]:
        """Yield pieces of the fp32 gradient, in order, with the log replayed. Hold `scratch_lock`;
        a piece is read-only and valid until the next one. A piece that is the whole gradient has
        the parameter's shape."""
        for start in range(0, self.numel, NORM_PIECE_NUMEL):
            part = self.tensor[start : start + NORM_PIECE_NUMEL]
            if part.dtype is not torch.float32 or self.log:
                scratch = self.registry.scratch(part.numel())
                scratch.copy_(part)
                part = replay(scratch, self.log)
            yield part.view(self.shape) if part.numel() == self.shape.numel() else part

    def _compute_norm(self, order: float) -> float:
        # No elements on this rank: a value that does not change the norm over all ranks.
        if not self.numel:
            return 0.0 if order >= 0 else math.inf
        # One pass, with the same bits as the code below.
        if order == 2.0 and not self.log and self.numel <= NORM_PIECE_NUMEL:
            norm = bf16_norm(self.tensor)
            if norm is not None:
                return norm
        # The scratch is shared, and autograd has a thread for each device.
        with self.registry.scratch_lock:
            norms = [float(torch.linalg.vector_norm(piece, order)) for piece in self._replayed()]
        return norm_of_norms(norms, order, torch.float32)


Gather = Callable[[list[float]], list[list[float]]]


class GradRegistry:
    """Gradient accumulators of one model: the fp32 scratch that they share, and their norms over
    all ranks.

    gather: takes a list of floats, of the same length on all ranks, and returns the lists of all
    ranks, in the order of ranks; None on one rank. grad_offload: copies gradients from a device
    with separate memory.
    """

    def __init__(
        self, gather: Gather | None = None, *, grad_offload: GradOffload | None = None
    ) -> None:
        self.accumulators: list[GradAccumulator] = []
        self.scratch_lock = threading.Lock()  # autograd has one thread per device
        self.grad_offload = grad_offload
        self._gather = gather
        self._scratch = torch.empty(0, dtype=torch.float32)
        self._factor: tuple[torch.Tensor, int, float] | None = None

    def add(
        self,
        name: str,
        shape: torch.Size,
        tensor: torch.Tensor,
        device: torch.device,
        *,
        on_zero: Callable[[], None] | None = None,
    ) -> GradAccumulator:
        """Make the accumulator of one parameter, with its proxy. All ranks add the same parameters
        in the same order. on_zero: see `GradAccumulator`."""
        accumulator = GradAccumulator(self, name, shape, tensor, on_zero=on_zero)
        accumulator.proxy = GradProxy.of(accumulator, device)
        self.accumulators.append(accumulator)
        return accumulator

    @property
    def scratch_bytes(self) -> int:
        """Bytes of the scratch that the largest accumulator needs; `reserve` allocates them."""
        return 4 * min(
            NORM_PIECE_NUMEL,
            max((accumulator.numel for accumulator in self.accumulators), default=0),
        )

    def reserve(self) -> None:
        """Allocate the scratch before the first step."""
        self._scratch = torch.empty(self.scratch_bytes // 4, dtype=torch.float32)

    def release(self) -> None:
        with self.scratch_lock:
            self._scratch = torch.empty(0, dtype=torch.float32)

    def scratch(self, numel: int) -> torch.Tensor:
        """Return the first `numel` elements of the scratch. Hold `scratch_lock`."""
        if self._scratch.numel() < numel:
            self._scratch = torch.empty(numel, dtype=torch.float32)
        return self._scratch[:numel]

    def read_device_norms(self) -> None:
        """Read all norms that the device computes, at once. Blocks until they are computed."""
        waiting = [
            (accumulator, accumulator._device_norm)
            for accumulator in self.accumulators
            if accumulator._device_norm is not None
        ]
        # One read for all: separate reads would each wait for the device.
        norms = torch.stack([norm for _, norm in waiting]).tolist()
        for (accumulator, _), norm in zip(waiting, norms, strict=True):
            accumulator._part_norm, accumulator._device_norm = norm, None

    def norms(self, accumulators: Sequence[GradAccumulator], order: float = 2.0) -> list[float]:
        """Return the norms of whole gradients, fp32 values. With several ranks the 2-norms of all
        accumulators are gathered together and cached, so asking for one norm at a time costs one
        collective, too. For another order all ranks must request the same accumulators.

        Raises: RuntimeError for an order that is NaN.
        """
        if math.isnan(order):
            raise_unsupported(accumulators[0].name, f"a norm of order {order}")
        # One rank: the part is the whole.
        if self._gather is None:
            return [accumulator.part_norm(order) for accumulator in accumulators]
        if order != 2.0:
            rows = self._gather([accumulator.part_norm(order) for accumulator in accumulators])
            return [
                norm_over_ranks(parts, order)
                for parts in zip(*rows, strict=True)
            ]
        if any(accumulator._norm is None for accumulator in accumulators):
            # Empty accumulators included, so that rows have the same length on every rank.
            parts = [
                accumulator.part_norm() if accumulator.state is AccumulatorState.HELD else 0.0
                for accumulator in self.accumulators
            ]
            rows = self._gather([part * part for part in parts])
            for accumulator, squares in zip(
                self.accumulators, zip(*rows, strict=True), strict=True
            ):
                accumulator._norm = norm_of_squares(squares)
        return [accumulator._norm for accumulator in accumulators if accumulator._norm is not None]

    def finite(self, accumulators: Sequence[GradAccumulator]) -> bool:
        """True when these gradients are finite on every rank. With several ranks a collective."""
        mine = all(accumulator.finite() for accumulator in accumulators)
        if self._gather is None:
            return mine
        return all(theirs == [1.0] for theirs in self._gather([float(mine)]))

    def factor(self, value: torch.Tensor | float) -> float:
        """Return a scaling factor as the fp32 number that torch would use. Reads each device scalar
        once."""
        if not isinstance(value, torch.Tensor):
            return to_fp32(float(value))
        # A clipping coefficient scales every gradient: reading it from the device once is enough.
        cached = self._factor
        if cached is not None and cached[0] is value and cached[1] == value._version:
            return cached[2]
        number = value.detach().to(torch.float32).item()
        self._factor = (value, value._version, number)
        return number


# -- gradient proxies ------------------------------------------------------------------------------
# The tensor in `p.grad`: it clips, unscales and zeroes gradients that rest elsewhere.
#
#     backward -> GradAccumulator.accumulate(grad)   the gradient is copied, or added to the sum
#     p.grad   -> GradProxy                          shape, dtype, device, and no storage; one per
#                                                    accumulator, reused every step
#     loop     -> clip, unscale, `p.grad *= s`       norms are cached; scalings and clamps go into a
#                                                    log
#     step     -> raise to fp32, replay the log      the bits of the same loop on fp32 gradients
#
# A proxy answers or raises: no operation on it is ever skipped.


def _refusing(operation: str) -> Any:
    """Make a method that raises the error of an operation that a proxy cannot answer."""

    def refuse(proxy: GradProxy, *_args: object, **_kwargs: object) -> NoReturn:
        raise_unsupported(proxy.accumulator.name, operation)

    return refuse


class GradProxy(torch.Tensor):
    """Tensor in `p.grad`: shape, dtype and device of a gradient that rests in an accumulator.

    Answers norms and in-place scaling, clamping, zeroing and GradScaler; everything else raises
    RuntimeError that names the parameter, the operation and what to do instead.
    """

    accumulator: GradAccumulator

    # Dispatch goes straight to `__torch_dispatch__`, whose table has only aten operators.
    __torch_function__ = NO_TORCH_FUNCTION

    @staticmethod
    def of(accumulator: GradAccumulator, device: torch.device) -> GradProxy:
        """Make a proxy of an accumulator, with the accumulator's dtype; fp32 for an fp16
        accumulator. Scalings apply to the gradient in fp32, and GradScaler refuses to unscale an
        fp16 tensor."""
        dtype = torch.float32 if accumulator.dtype is torch.float16 else accumulator.dtype
        made: GradProxy = torch.Tensor._make_wrapper_subclass(
            GradProxy, accumulator.shape, dtype=dtype, device=device
        )
        made.accumulator = accumulator
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        handler = _HANDLERS.get(func)
        if handler is None:
            raise_unsupported(_name_in((args, kwargs)), str(func))
        return handler(*args, **kwargs) if kwargs else handler(*args)

    def materialize(self) -> torch.Tensor:
        """Return a CPU copy of the gradient's values, fp32. A tensor assigned to `p.grad` takes
        their place."""
        return self.accumulator.materialize()

    def __repr__(self) -> str:  # type: ignore[override]
        held = "empty" if self.accumulator.state is AccumulatorState.EMPTY else "held"
        kind = f"shape={tuple(self.shape)}, dtype={self.dtype}, {held}, log={self.accumulator.log}"
        return f"GradProxy({self.accumulator.name}, {kind})"

    @property
    def data(self) -> GradProxy:
        """Alias of the proxy: loops write `p.grad.data.norm()` and `p.grad.data.mul_()`."""
        return GradProxy.of(self.accumulator, self.device)

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        # `Module.to` and `.cpu()` assign the converted gradient; if they change nothing, this is a
        # proxy of the same accumulator.
        if not (isinstance(value, GradProxy) and value.accumulator is self.accumulator):
            raise_unsupported(self.accumulator.name, "`.data =`")

    __reduce_ex__ = _refusing("pickling")
    __deepcopy__ = _refusing("deepcopy")
    # These methods read the storage without the dispatcher, and would return a null pointer.
    data_ptr = _refusing("data_ptr")
    untyped_storage = _refusing("untyped_storage")
    storage = _refusing("storage")
    share_memory_ = _refusing("share_memory_")
    numpy = __array__ = _refusing("numpy")
    __dlpack__ = _refusing("dlpack")
    item = _refusing("item")
    tolist = _refusing("tolist")


def _name_in(values: object) -> str:
    if isinstance(values, GradProxy):
        return values.accumulator.name
    children: Iterable[object] = ()
    if isinstance(values, dict):
        children = values.values()
    elif isinstance(values, (list, tuple)):
        children = values
    return next((name for name in map(_name_in, children) if name), "")


# -- operators that a proxy supports ------------------------------------------------------------


def _norm_tensor(
    grad: GradProxy,
    order: float | None = 2.0,
    dim: Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    partly = dim is not None and len(dim) not in (0, len(grad.shape))
    if partly or keepdim or dtype not in (None, torch.float32):
        raise_unsupported(
            grad.accumulator.name,
            "a norm along some dimensions, with keepdim or in another dtype than fp32",
        )
    value = grad.accumulator.norm(2.0 if order is None else float(order))
    return torch.scalar_tensor(value, dtype=torch.float32, device=grad.device)


def _foreach_norm(
    grads: Sequence[torch.Tensor], order: float = 2.0, dtype: torch.dtype | None = None
) -> list[torch.Tensor]:
    ours = [grad for grad in grads if isinstance(grad, GradProxy)]
    if dtype not in (None, torch.float32):
        raise_unsupported(ours[0].accumulator.name, f"_foreach_norm in {dtype}")
    # Checked here: for `norms` the norm of an empty accumulator is 0.
    for grad in ours:
        grad.accumulator._require_held("norm")
    # One call for all: on several ranks it is one reduction.
    values = ours[0].accumulator.registry.norms([grad.accumulator for grad in ours], float(order))
    norms = iter(torch.tensor(values, dtype=torch.float32, device=ours[0].device).unbind())
    return [
        next(norms)
        if isinstance(grad, GradProxy)
        else torch.linalg.vector_norm(grad, order, dtype=dtype)
        for grad in grads
    ]


def _scaling(kind: str) -> Callable[..., GradProxy]:
    def scale(grad: GradProxy, value: torch.Tensor | float) -> GradProxy:
        if not isinstance(grad, GradProxy):  # a proxy as the factor of an ordinary tensor
            raise_unsupported(_name_in(value), "being a factor")
        _check_factor(grad, value)
        grad.accumulator.scale(kind, grad.accumulator.registry.factor(value))
        return grad

    return scale


def _check_factor(grad: GradProxy, value: object) -> None:
    if isinstance(value, GradProxy) or not isinstance(value, (int, float, torch.Tensor)):
        raise_unsupported(grad.accumulator.name, f"scaling by a {type(value).__name__}")
    if isinstance(value, torch.Tensor) and (value.numel() != 1 or value.is_complex()):
        raise_unsupported(
            grad.accumulator.name,
            f"scaling by a {value.dtype} tensor of shape {tuple(value.shape)}",
        )


def _foreach_scaling(kind: str) -> Callable[..., None]:
    scale = _scaling(kind)

    def foreach(
        grads: Sequence[torch.Tensor], value: torch.Tensor | float | Sequence[torch.Tensor | float]
    ) -> None:
        values = value if isinstance(value, (list, tuple)) else [value] * len(grads)
        for grad, factor in zip(grads, values, strict=True):
            if isinstance(grad, GradProxy):
                scale(grad, factor)
            else:
                if isinstance(factor, GradProxy):
                    raise_unsupported(factor.accumulator.name, "being a factor")
                grad.mul_(factor) if kind == "mul" else grad.div_(factor)

    return foreach


def _clamp(
    grad: GradProxy, minimum: float | None = None, maximum: float | None = None
) -> GradProxy:
    for bound in (minimum, maximum):
        # NaN would make every element NaN.
        if bound is not None and math.isnan(bound):
            raise_unsupported(grad.accumulator.name, f"clamping by {bound}")
    grad.accumulator.clamp(minimum, maximum)
    return grad


def _clamp_max(grad: GradProxy, maximum: float) -> GradProxy:
    return _clamp(grad, None, maximum)


def _foreach_clamp(
    clamp: Callable[[GradProxy, float], GradProxy], name: str
) -> Callable[..., None]:
    """Return the list operator that clamps each gradient; ordinary tensors use torch's `name`."""

    def foreach(grads: Sequence[torch.Tensor], bound: float | Sequence[float]) -> None:
        bounds = bound if isinstance(bound, (list, tuple)) else [bound] * len(grads)
        for grad, each in zip(grads, bounds, strict=True):
            if isinstance(grad, GradProxy):
                clamp(grad, each)
            else:
                getattr(grad, name)(each)

    return foreach


def _zero(grad: GradProxy) -> GradProxy:
    grad.accumulator.zero()
    return grad


def _foreach_zero(grads: Sequence[torch.Tensor]) -> None:
    for grad in grads:
        grad.zero_()


def _unscale(
    grads: Sequence[torch.Tensor], found_inf: torch.Tensor, inv_scale: torch.Tensor
) -> None:
    """Implement `GradScaler.unscale_`: report gradients that are not finite, then multiply by the
    inverse scale. With several ranks a collective: all ranks skip the step, or none does."""
    plain = [grad for grad in grads if not isinstance(grad, GradProxy)]
    if plain:
        torch._amp_foreach_non_finite_check_and_unscale_(plain, found_inf, inv_scale)
    # As in torch: finiteness is checked before unscaling.
    accumulators = [grad.accumulator for grad in grads if isinstance(grad, GradProxy)]
    if not accumulators[0].registry.finite(accumulators):
        found_inf.fill_(1.0)
    for accumulator in accumulators:
        accumulator.scale("mul", accumulator.registry.factor(inv_scale))


def _alias(grad: GradProxy) -> GradProxy:
    # For `detach()` and autograd's views. `GradAccumulator.reconcile` recognizes an alias by its
    # accumulator.
    return GradProxy.of(grad.accumulator, grad.device)


_foreach_clamp_min = _foreach_clamp(_clamp, "clamp_min_")
_foreach_clamp_max = _foreach_clamp(_clamp_max, "clamp_max_")
_aten: Any = torch.ops.aten
_HANDLERS: dict[Any, Callable[..., Any]] = {
    _aten.linalg_vector_norm.default: _norm_tensor,
    _aten.norm.Scalar: _norm_tensor,
    _aten.norm.ScalarOpt_dim: _norm_tensor,
    _aten.norm.ScalarOpt_dtype: _norm_tensor,
    _aten._foreach_norm.Scalar: _foreach_norm,
    _aten.mul_.Tensor: _scaling("mul"),
    _aten.mul_.Scalar: _scaling("mul"),
    _aten.div_.Tensor: _scaling("div"),
    _aten.div_.Scalar: _scaling("div"),
    _aten._foreach_mul_.Tensor: _foreach_scaling("mul"),
    _aten._foreach_mul_.Scalar: _foreach_scaling("mul"),
    _aten._foreach_mul_.ScalarList: _foreach_scaling("mul"),
    _aten._foreach_mul_.List: _foreach_scaling("mul"),
    _aten._foreach_div_.Tensor: _foreach_scaling("div"),
    _aten._foreach_div_.Scalar: _foreach_scaling("div"),
    _aten._foreach_div_.ScalarList: _foreach_scaling("div"),
    _aten._foreach_div_.List: _foreach_scaling("div"),
    _aten.clamp_.default: _clamp,
    _aten.clamp_min_.default: _clamp,
    _aten.clamp_max_.default: _clamp_max,
    _aten._foreach_clamp_min_.Scalar: _foreach_clamp_min,
    _aten._foreach_clamp_min_.ScalarList: _foreach_clamp_min,
    _aten._foreach_maximum_.Scalar: _foreach_clamp_min,
    _aten._foreach_maximum_.ScalarList: _foreach_clamp_min,
    _aten._foreach_clamp_max_.Scalar: _foreach_clamp_max,
    _aten._foreach_clamp_max_.ScalarList: _foreach_clamp_max,
    _aten._foreach_minimum_.Scalar: _foreach_clamp_max,
    _aten._foreach_minimum_.ScalarList: _foreach_clamp_max,
    _aten.zero_.default: _zero,
    _aten._foreach_zero_.default: _foreach_zero,
    _aten._amp_foreach_non_finite_check_and_unscale_.default: _unscale,
    _aten.detach.default: _alias,
    _aten.alias.default: _alias,
}
