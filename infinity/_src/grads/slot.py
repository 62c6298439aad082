"""Gradient slots: where accumulated gradients rest, their norms, and the log of what the loop did to them.

    GradSlot   one parameter's gradient in CPU memory (this rank's part), with a log of in-place scalings; or, spilled, on
               NVMe, from where its home brings it
    SlotBook   the slots of one model: the scratch that they share, and norms over all ranks

Invariants. The log is replayed with one fp32 operation per entry, so clipping needs no pass over the gradients and
loses no bits. A norm is that of the fp32 gradient with the log replayed, bit for bit what torch computes there, for
parameters of up to `NORM_PIECE_NUMEL` elements; larger ones take the norm of the norms of pieces (a fixed rule, it
bounds the scratch).

The one rounding: a further drain into a slot with a log first replays the log in fp32 and rounds the result to the
slot's dtype, because a sum cannot be scaled afterwards by a factor that was meant for its first part.
"""

from __future__ import annotations

import contextlib
import enum
import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Protocol

import torch

from infinity._src.cleanup import cancel_and_wait
from infinity._src.grads.norms import NORM_PIECE_NUMEL, LogEntry, norm_there, replay, to_fp32
from infinity._src.memory.device import GradOffload
from infinity.aio import Ticket
from infinity.errors import AioError

if TYPE_CHECKING:
    from infinity._src.grads.registry import SlotBook

_SMALL_NUMEL = 1 << 16  # up to here a norm may allocate its fp32 copy instead of taking the scratch
LOG_MAX = 8  # entries that the update kernels replay (`hyper.log_kind` of native/infinity.h)


class SlotState(enum.Enum):
    """Whether a slot holds a gradient."""

    EMPTY = "empty"  # what torch calls `p.grad is None`
    HELD = "held"
    CONSUMED = "consumed"  # an update during backward took it; its values are gone


class GradBacking(Protocol):
    """Where the gradients of several slots rest when it is not in memory of their own (`infinity._src.grads.spill`)."""

    def bring(self, slot: GradSlot) -> torch.Tensor:
        """The slot's values [this rank's part], valid until the next call. Blocks. Raises: AioError."""

    def bring_to_write(self, slot: GradSlot) -> torch.Tensor:
        """As `bring`, before they are written; what an empty slot gets is undefined. Blocks. Raises: AioError."""


class SlotReader(Protocol):
    """An update that reads the storage of a slot, or stands on what lies there."""

    def before_write(self, slot: GradSlot, /) -> None:
        """Return when the slot may be written. Blocks for as long as that takes."""


class ReadByUpdate:
    """The reader is an update under way. One of it serves all slots that the update reads."""

    def __init__(self, ticket: Ticket) -> None:
        self._ticket = ticket

    def before_write(self, _slot: GradSlot) -> None:
        """Block until the update is done."""
        if not self._ticket.done:  # it is, nearly always: no further call then
            wait_through(self._ticket)


def wait_through(ticket: Ticket) -> None:
    """Block until an update is done, well or not."""
    if not ticket.done:
        # Its fault is raised elsewhere, once: `StepPipeline.raise_fault` finds the failed ticket.
        with contextlib.suppress(AioError):
            ticket.wait()


class GradSlot:
    """Where the accumulated gradient of one parameter rests, and what the loop did to it.

    `tensor` is the slot's storage, 1-D CPU, of the gradient dtype: this rank's part of the parameter (all of it on
    one rank, nothing where the shard holds none). `guard` names who reads `tensor` and is asked before it is
    written, so that a pending update has read the gradient first. `home`, if set, has the values instead: `tensor` asks it
    each time; pending updates of a step read elsewhere, and nobody waits for them.
    """

    stand_in: torch.Tensor  # what `p.grad` is while the slot holds a gradient

    def __init__(
        self,
        book: SlotBook,
        name: str,
        shape: torch.Size,
        tensor: torch.Tensor,
        *,
        on_zero: Callable[[], None] | None = None,
    ) -> None:
        self.book = book
        self.name = name
        self.shape = shape
        self.home: GradBacking | None = None
        self.tensor = tensor
        self.state = SlotState.EMPTY
        self.log: list[LogEntry] = []
        self._reader: SlotReader | None = None
        self._arriving: Ticket | None = None  # the copy from the device that fills the storage
        self._left_in = -1  # the backward in which a gradient last left the device
        self._back: tuple[Ticket, torch.Tensor] | None = None  # on its way back to the device, to be added to there
        self._device_norm: torch.Tensor | None = None  # on the device: what `_part_norm` will be
        self._norm: float | None = None  # over all ranks; valid together with `_part_norm`
        self._part_norm: float | None = None  # this rank's part
        self._raw_norm: float | None = None  # this rank's part before the log; valid while there is a log
        self._drains = 0  # since the slot was last empty
        self._drains_before = 1  # the count the slot reached when it was last emptied
        self.unreduced = False  # this rank's whole sum waits for a reduction, besides what the slot holds
        self._on_zero = on_zero  # sets that sum to zeros, when the loop has
        self._lost = False  # emptied while somebody may still have the stand-in

    @property
    def tensor(self) -> torch.Tensor:
        """The storage [part of the parameter]; may be replaced by one of the same size, which takes over the values.

        Spilled: read back if need be, and valid until another slot's is asked for.
        """
        self.arrive()
        return self._tensor if self.home is None else self.home.bring(self)

    @tensor.setter
    def tensor(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self.numel, self.dtype = tensor.numel(), tensor.dtype
        self.whole = self.numel == self.shape.numel()  # this rank holds all of the gradient
        self._own_shaped = tensor.view(self.shape) if self.whole else tensor
        self._small = self.numel <= _SMALL_NUMEL

    @property
    def guarded(self) -> bool:
        """Whether somebody is asked before the storage is written."""
        return self._reader is not None

    def guard(self, reader: SlotReader | None) -> None:
        """Ask `reader` before the storage is written, from now on; None: nobody."""
        self._reader = reader

    @property
    def storage(self) -> torch.Tensor:
        """The storage of a slot that has no home, before a gradient that is on its way has arrived."""
        return self._tensor

    @property
    def _shaped(self) -> torch.Tensor:
        """The storage as torch would see it: its reductions may not order a 1-D sum as a 2-D one."""
        self.arrive()
        if self.home is None:
            return self._own_shaped
        tensor = self.home.bring(self)
        return tensor.view(self.shape) if self.whole else tensor

    def move_to(self, tensor: torch.Tensor, home: GradBacking | None) -> None:
        """Rest in other memory of the same size, or with a home (`tensor` then is on the meta device). Values go along."""
        values = self.tensor if self.state is SlotState.HELD else None
        self.home, self.tensor = home, tensor
        if values is not None:
            (tensor if home is None else home.bring_to_write(self)).copy_(values)

    def stay(self, tensor: torch.Tensor, home: GradBacking | None) -> None:
        """Rest where the values still are: moving away has failed."""
        self.home, self.tensor = home, tensor

    def arrive(self) -> None:
        """Return when a gradient that is on its way from the device is here. Raises: DeviceCopyError."""
        if self._arriving is not None:
            self._arriving.wait_filled()
            self._arriving = None

    # -- filling ---------------------------------------------------------------------------------------------------

    def reconcile(self, current: torch.Tensor | None) -> SlotState:
        """Make the slot agree with what the user left in `p.grad`; call it before a drain and at the step.

        None empties the slot; the stand-in (or a detached alias of it) keeps it; an ordinary tensor is copied in, as
        the gradient that the user wants.

        Raises: RuntimeError if `current` is the stand-in of another parameter.
        """
        if current is self.stand_in and not self._lost:
            return self.state
        if current is None:
            self.empty()
        elif isinstance(other := getattr(current, "slot", None), GradSlot):
            if other is not self:
                raise RuntimeError(
                    f"{self.name}.grad was set to the gradient of {other.name}; assign `other.grad.materialize()`, which "
                    "is an ordinary tensor"
                )
        else:
            self._adopt(current)
        if self._lost:
            raise RuntimeError(
                f"{self.name}.grad was taken away, and put back after other gradients came: it had spilled to NVMe, and its "
                "values are gone; keep `p.grad.materialize()` instead, and assign that"
            )
        return self.state

    def _adopt(self, grad: torch.Tensor) -> None:
        if grad.shape != self.shape or not self.whole:
            raise RuntimeError(
                f"{self.name}.grad was replaced by a tensor of shape {tuple(grad.shape)}; the engine takes one of shape "
                f"{tuple(self.shape)}, and only on one rank"
            )
        self.empty()
        self.accumulate(grad)
        self.arrive()  # it is the loop's tensor, which may change it from here on

    def accumulate(self, grad: torch.Tensor) -> None:
        """Take one fresh gradient: the first is copied, later ones are added in the slot's dtype.

        grad: `shape`, or this rank's part as a 1-D tensor. Blocks until it has been copied.
        """
        self._refuse_consumed()
        source = grad.detach() if grad.requires_grad else grad
        self._will_mutate()
        if self.book.grad_offload is not None and source.device == self.stand_in.device:
            self._leave(source, self.book.grad_offload)
            return
        self.cancel_prefetch()
        target = self._shaped
        if source.shape != target.shape:
            source = source.reshape(target.shape)
        if self.state is SlotState.EMPTY:
            target.copy_(source)
            self.state = SlotState.HELD
            self._drains = 1
        else:
            if self.log:
                self._bake()
            target.add_(source if source.device == target.device else source.to(target.device))
            self._drains += 1
        self._forget_norms()
        # The last drain of this step, if it is like the previous step: the data is hot now.
        if self._drains >= self._drains_before or self.home is not None:
            self._part_norm = self._compute_norm(2.0)

    def _refuse_consumed(self) -> None:
        if self.state is SlotState.CONSUMED:
            raise RuntimeError(
                f"a new gradient of {self.name} while the one before, which was applied in backward, is still in p.grad: "
                "call zero_grad() after opt.step(); with update='backward' gradients cannot add up over steps"
            )

    def expect(self, current: torch.Tensor | None) -> bool:
        """A gradient of this rank has come that is reduced later; current: what is in `p.grad`. Returns whether it is the first
        since the slot was cleared, or reduced."""
        first = not self.unreduced or current is None
        if current is None:
            self.empty()
        self._refuse_consumed()
        self.unreduced = True
        return first

    def _leave(self, source: torch.Tensor, grad_offload: GradOffload) -> None:
        """`accumulate` on a device with memory of its own: it adds, takes the norm, and what comes of it goes on its way."""
        if self.state is SlotState.EMPTY:
            total = source.to(self.dtype)
            self.state, self._drains = SlotState.HELD, 1
        else:
            if self.log:
                self._bake()
            total = self._summed_so_far(source.device).add_(source.reshape(-1))
            self._drains += 1
        self._left_in = grad_offload.backward_count
        self._forget_norms()
        self._device_norm = norm_there(total.view(self.shape) if self.whole else total.reshape(-1))
        # Of a small parameter a rank may have nothing.
        self._arriving = grad_offload.copy_out(total, self.tensor) if total.numel() else None

    def _summed_so_far(self, device: torch.device) -> torch.Tensor:
        """What the slot holds, as a new tensor on the device."""
        if self._back is None:
            return self.tensor.to(device, copy=True, non_blocking=True)
        ticket, there = self._back
        ticket.wait_filled()
        self._back = None
        return there

    def prefetch_to_device(self, grad_offload: GradOffload) -> None:
        """Another gradient will come: start taking the sum so far to the device. Nothing where it has a home, or a log, or where
        this backward has brought its gradient already."""
        came = self._left_in == grad_offload.backward_count
        if came or self._back is not None or self.state is not SlotState.HELD or self.home is not None or self.log:
            return
        source = self.tensor
        there = torch.empty(self.numel, dtype=self.dtype, device=self.stand_in.device)
        ticket = grad_offload.device.copy(there.data_ptr(), source.data_ptr(), self.numel * self.dtype.itemsize, out=True)
        self._back = (ticket, there)

    def cancel_prefetch(self) -> None:
        """What is on its way back to the device is not wanted. Its memory is free when nothing comes to it any more. Blocks."""
        if self._back is None:
            return
        interrupt = cancel_and_wait([self._back[0]])
        self._back = None
        if interrupt is not None:
            raise interrupt

    def _forget_norms(self) -> None:
        self._norm = self._part_norm = self._device_norm = None

    def empty(self) -> None:
        """Forget the gradient, as `p.grad = None` does. The storage is left alone: an update may still read it."""
        if self.state is SlotState.HELD:
            self._drains_before = max(1, self._drains)
        self.cancel_prefetch()
        self.state, self.unreduced = SlotState.EMPTY, False  # what of it waits for a reduction is dropped, too
        self._drains = 0
        self.log.clear()
        self._forget_norms()
        self._lost = False

    def lose(self) -> None:
        """Spilled, and in nobody's `p.grad`: its place is wanted for other gradients. If it comes back, that is an error."""
        self.empty()
        self._lost = True

    def consume(self) -> None:
        """An update has taken the gradient: the stand-in stays in `p.grad`, and raises when it is asked for values."""
        self.empty()
        self.state = SlotState.CONSUMED

    def zero(self) -> None:
        """Set the gradient to zeros; it stays one that the optimizer steps with, as in torch."""
        if self.unreduced:
            self.unreduced = False
            self.state = SlotState.HELD
            if self._on_zero is not None:
                self._on_zero()
        if self.state is SlotState.EMPTY:
            return
        self._require_held("zero_")
        self.cancel_prefetch()
        self._will_mutate()
        self.tensor.zero_()
        self.log.clear()
        self._drains_before, self._drains = max(1, self._drains), 0
        self._forget_norms()
        self._norm = self._part_norm = 0.0

    def scale(self, kind: str, value: float) -> None:
        """Multiply ("mul") or divide ("div") the gradient by a number that is rounded to fp32 first."""
        self._require_held(kind)
        assert kind in ("mul", "div"), kind
        if value == 1.0:
            return  # exact, and the usual case of clipping: the norm stays valid
        if len(self.log) >= LOG_MAX:
            raise RuntimeError(
                f"{self.name}.grad was scaled more than {LOG_MAX} times since it was accumulated; multiply the factors "
                "first and scale once"
            )
        if not self.log:
            self._raw_norm = self._known_norm()
        self.log.append((kind, value))
        self._forget_norms()

    # -- reading ---------------------------------------------------------------------------------------------------

    def norm(self, order: float = 2.0) -> float:
        """The norm of the whole gradient, in fp32. With several ranks a collective: every rank must ask."""
        self._require_held("norm")
        return self.book.norms([self], order)[0]

    def finite(self) -> bool:
        """Whether every element of this rank's part is finite after the log. Never communicates."""
        if self.state is not SlotState.HELD or self._bounded() or math.isfinite(self.part_norm()):
            return True
        # Squares overflow from 1.8e19 on, so an infinite norm does not yet condemn the gradient.
        with self.book.scratch_lock:
            return all(bool(piece.isfinite().all()) for piece in self._replayed())

    def _bounded(self) -> bool:
        """Whether the norm before the log and the factors prove it: no element is larger than the norm, and rounding is
        monotone, so what is finite for the norm is finite for all. Saves a pass over gradients that were clipped."""
        if not self.log or self._raw_norm is None:
            return False
        bound = self._raw_norm
        for kind, value in self.log:
            if not math.isfinite(value) or (kind == "div" and value == 0.0):
                return False
            bound = to_fp32(abs(bound * value if kind == "mul" else bound / value))
            if not math.isfinite(bound):
                return False
        return True

    def part_norm(self, order: float = 2.0) -> float:
        """The norm of this rank's part after the log, in fp32; that of order 2 is cached."""
        if order != 2.0:
            return self._compute_norm(order)
        if self._known_norm() is None:
            self._part_norm = self._compute_norm(order)
        assert self._part_norm is not None
        return self._part_norm

    def _known_norm(self) -> float | None:
        """The 2-norm of this rank's part, if it was taken. Blocks while the device takes it."""
        if self._device_norm is not None:
            self._part_norm, self._device_norm = float(self._device_norm), None
        return self._part_norm

    def materialize(self) -> torch.Tensor:
        """A CPU copy of the gradient with the log replayed, fp32 [shape]."""
        self._require_held("materialize")
        if not self.whole:
            raise RuntimeError(
                f"{self.name}.grad is split over ranks and cannot be materialized on one of them"
            )
        return self.part().view(self.shape)

    def part(self, start: int = 0, numel: int | None = None) -> torch.Tensor:
        """Elements [start, start + numel) of this rank's part in fp32, with the log replayed: a 1-D copy. numel None: to the
        end. Never communicates."""
        self._require_held("reading")
        end = None if numel is None else start + numel
        return replay(self.tensor[start:end].to(torch.float32, copy=True), self.log)

    # -- inside ----------------------------------------------------------------------------------------------------

    def _require_held(self, operation: str) -> None:
        if self.state is SlotState.CONSUMED:
            raise RuntimeError(
                f"{operation} on the gradient of {self.name}: with Policy(update='backward') the update took it during "
                "backward. Clipping by norm, GradScaler and changing gradients need update='deferred'; clear gradients with "
                "zero_grad(set_to_none=True)"
            )
        if self.unreduced:
            raise RuntimeError(
                f"{operation} on the gradient of {self.name}, which was added up inside handle.no_sync() and is not reduced over "
                "the ranks yet: run the last micro-batch of a step outside of no_sync()"
            )
        if self.state is SlotState.EMPTY:
            raise RuntimeError(
                f"{operation} on a stale gradient of {self.name}: it was cleared (p.grad = None) and this stand-in is an "
                "old reference; read p.grad again"
            )

    def _will_mutate(self) -> None:
        if self._reader is not None:
            self._reader.before_write(self)
        if self.home is not None:
            self.home.bring_to_write(self)

    def _bake(self) -> None:
        """Replay the log on the storage: in fp32, then rounded to the slot's dtype."""
        self.cancel_prefetch()
        with self.book.scratch_lock:
            start = 0
            for piece in self._replayed():
                self.tensor[start : start + piece.numel()].copy_(piece.view(-1))
                start += piece.numel()
        self.log.clear()

    def _replayed(self) -> Iterator[torch.Tensor]:
        """Pieces of the fp32 gradient, in order, with the log replayed. Hold `scratch_lock`; a piece is read-only
        and valid until the next one. A piece that is the whole gradient has the parameter's shape."""
        for start in range(0, self.numel, NORM_PIECE_NUMEL):
            part = self.tensor[start : start + NORM_PIECE_NUMEL]
            if part.dtype is not torch.float32 or self.log:
                scratch = self.book.scratch(part.numel())
                scratch.copy_(part)
                part = replay(scratch, self.log)
            yield part.view(self.shape) if part.numel() == self.shape.numel() else part

    def _compute_norm(self, order: float) -> float:
        if self._small and not self.log:  # one operation, which raises to fp32 on the way; the same bits
            return float(torch.linalg.vector_norm(self._shaped, order, dtype=torch.float32))
        with self.book.scratch_lock:
            norms = [float(torch.linalg.vector_norm(piece, order)) for piece in self._replayed()]
        if len(norms) == 1:
            return norms[0]
        return (
            float(torch.linalg.vector_norm(torch.tensor(norms, dtype=torch.float32), order)) if norms else 0.0
        )
