"""Boundary activations, the inputs of checkpointed calls: away during forward, back ahead of need in backward.

    forward    call n saves its inputs -> those of call n - HELD_CALLS start for the shelf, and go when they are there
    backward   call n asks for its inputs -> those of calls n - 1 ... n - AHEAD_CALLS start coming back -> wait for n's

The last HELD_CALLS calls of a forward are the first of its backward: they stay, and are never written. What several calls
take (a mask, the output of an encoder) stays too: it is one tensor, however many calls there are.

torch.utils.checkpoint keeps inputs as SavedTensors. Exactly those that move get hooks, so nothing else that autograd saves is
touched. Torch checks no versions of what has hooks, so here it is done: a witness shares the counter, not the memory.
A Boundary belongs to the graphs that saved it (`runtime.boundary`).
"""

from __future__ import annotations

import dataclasses
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from infinity._src._torch_compat import (
    NO_TASK,
    CheckpointCall,
    address_of,
    graph_task_id,
    queue_callback,
    version_of,
    watch_checkpoints,
)
from infinity._src.hooks import tensors
from infinity._src.hooks.activation_store import Shelf, Shelved
from infinity._src.hooks.boundary import Boundary, Call, Remains, span_numel
from infinity._src.memory.constants import HELD_CALLS, LEAVING_BYTES
from infinity._src.params.unit import Unit
from infinity._src.sizes import format_size
from infinity._src.telemetry import Timeline
from infinity.aio import Priority, Ticket
from infinity.errors import AioError, EngineClosed

SMALLEST_BYTES = 64 << 10
"""Smaller tensors stay where they are."""

AHEAD_CALLS = 2
"""Calls whose inputs come back ahead of the one that backward is at."""

_SEARCH_CALLS = 64  # micro-batches may lie between one call and the next in backward


@dataclasses.dataclass(frozen=True)
class ActivationFigures:
    """What was done with boundary activations. Bytes are bytes, times seconds.

    stored_bytes: sent to their tier; fetched_bytes: brought back; rest_bytes_peak: the most that lay there; held_bytes_peak:
    the most that was in memory at once: turning points, on their way out, come back ahead; wait_s: time that forward waited
    for room and backward for bytes; calls: checkpointed calls seen; kept: tensors of theirs that stay where they are.
    """

    stored_bytes: int = 0
    fetched_bytes: int = 0
    rest_bytes_peak: int = 0
    held_bytes_peak: int = 0
    wait_s: float = 0.0
    calls: int = 0
    kept: int = 0

    def __str__(self) -> str:
        """One line for people."""
        return (
            f"activations: {format_size(self.stored_bytes)} put away, {format_size(self.fetched_bytes)} brought back; at most "
            f"{format_size(self.rest_bytes_peak)} away and {format_size(self.held_bytes_peak)} here; waited {self.wait_s:.2f} s"
        )


class RunningForward(Protocol):
    """The forwards of one model (`infinity._src.hooks.frames`)."""

    @property
    def running_here(self) -> bool:
        """Whether one runs in this thread."""


class Activations:
    """The boundary activations of one model.

    shelf: where they rest. units: what `model` was taken apart into. frames: tells whether a forward of it runs.
    Raises: ValueError when this torch keeps the inputs of checkpoints in a way that is not known.
    """

    def __init__(
        self,
        shelf: Shelf,
        model: torch.nn.Module,
        units: Sequence[Unit],
        timeline: Timeline,
        device: torch.device | None = None,
        *,
        frames: RunningForward,
    ) -> None:
        self._device = device or torch.device("cpu")
        self._frames = frames
        self._mark = object()  # in calls whose inputs these activations take
        self._shelf = shelf
        self._names = {module: name for name, module in model.named_modules()}
        self._flats = [flat for unit in units for flat in unit.flats]
        self._timeline = timeline
        self._lock = threading.RLock()
        self._here = threading.local()  # .call: the checkpointed call that began last in this thread
        self._numbers = 0
        self._calls: weakref.WeakValueDictionary[int, Call] = weakref.WeakValueDictionary()
        self._by_tensor: weakref.WeakValueDictionary[int, Boundary] = weakref.WeakValueDictionary()  # by id()
        self._recent: deque[list[weakref.ref[Boundary]]] = deque()
        self._leaving: list[Boundary] = []  # their sources are being copied
        self._storing: list[tuple[Shelved, str]] = []  # until they are written, or have failed
        self._back: dict[int, Boundary] = {}  # with a target, by id()
        self._trash: deque[Remains] = deque()
        self._tasks: set[int] = set()
        self._fault: tuple[Ticket, str] | None = None
        self._broken = False  # a store failed, and nothing was stored since
        self._closed = False
        self._held_bytes = self._held_peak = 0
        self._wait_s = 0.0
        self._seen = self._moved = self._kept = 0
        self._said = False
        self._unwatch = watch_checkpoints(self)

    # -- what checkpoints tell -------------------------------------------------------------------------------------------

    def checkpoint_begins(self, call: CheckpointCall) -> None:
        """See `CheckpointWatcher`."""
        self._here.call = call
        if call.owner is None and self._frames.running_here:
            call.owner = self._mark

    def checkpoint_saved(self, call: CheckpointCall) -> None:
        """See `CheckpointWatcher`. Outside of a forward, a module of the model must have been entered, or be next."""
        if call.owner is self._mark:
            self._take(call)

    def entered(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A hooked module's forward begins: whose inputs a checkpoint has saved, or is about to."""
        call = getattr(self._here, "call", None)
        if call is None:
            return
        self._here.call = None
        if call.owner is None:
            here = {id(tensor) for tensor in tensors.in_arguments(args, kwargs)}
            if here.isdisjoint(map(id, call.inputs())):
                return
            call.owner, call.label = self._mark, self._names.get(module, "")
            self._take(call)  # nothing yet, if it is a reentrant one
        elif call.owner is self._mark:
            call.label = self._names.get(module, "")

    # -- forward -----------------------------------------------------------------------------------------------------------

    def _take(self, saved: CheckpointCall) -> None:
        pairs = saved.pairs()
        if not pairs:
            return
        with self._lock:
            self._collect()
            self._let_go()
            self._raise_fault()
            self._seen += 1
            self._numbers += 1
            call = Call(self._numbers, saved)
            for tensor, of in pairs:
                boundary = self._boundary(tensor, call)
                if boundary is not None:
                    of.register_hooks(lambda _tensor, boundary=boundary: boundary, self._unpack)
            if not call.boundaries:
                return
            self._calls[call.number] = call
            self._recent.append(call.boundaries)
            while len(self._recent) > HELD_CALLS:
                for ref in self._recent.popleft():
                    gone = ref()
                    if gone is not None and not gone.shared and gone.shelved is None and gone.source is not None:
                        self._store(gone)

    def _boundary(self, tensor: torch.Tensor, call: Call) -> Boundary | None:
        """The boundary for a tensor that `call` saved; None for one that stays as torch keeps it."""
        known = self._by_tensor.get(id(tensor))
        if known is not None and known.original() is tensor and known.version == version_of(tensor):
            if known.call is not call and not known.shared:
                known.shared = True
                if known.source is None:
                    known.source = tensor.detach()
                    self._hold(known.span_bytes)
            return known
        if not self._moves(tensor):
            self._kept += 1
            return None
        boundary = Boundary(tensor, call, self._trash)
        self._hold(boundary.span_bytes)
        self._by_tensor[id(tensor)] = boundary
        call.boundaries.append(weakref.ref(boundary))
        return boundary

    def _moves(self, tensor: torch.Tensor) -> bool:
        """Whether taking the tensor away frees memory worth the way, and its bytes are all there is to it."""
        if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or tensor.device != self._device:
            return False
        if tensor.numel() * tensor.element_size() < SMALLEST_BYTES or span_numel(tensor) > 2 * tensor.numel():
            return False
        if tensor.is_conj() or tensor.is_neg() or tensor.is_quantized or tensor.is_inference():
            return False
        if tensor.is_leaf and tensor.requires_grad:  # its gradient's place keeps it
            return False
        # Parameters come and go by themselves.
        address = address_of(tensor)
        return not any(0 <= address - address_of(flat.tensor) < flat.size_bytes for flat in self._flats)

    def _store(self, boundary: Boundary) -> None:
        """Start a boundary's way to the shelf; waits while too many bytes are on it."""
        size = boundary.span_bytes
        while self._leaving and sum(b.span_bytes for b in self._leaving) + size > max(LEAVING_BYTES, 2 * size):
            oldest = self._leaving[0]
            assert oldest.shelved is not None
            self._wait(oldest.shelved.stored, f"the input of {oldest.call.label}", faults=False)
            self._collect()
            self._raise_fault()
        label = f"the input of {boundary.call.label}"
        self._leaving.append(boundary)  # holds the memory that is copied from, whatever happens
        try:
            if self._broken:
                self._shelf.mend()
                self._broken = False
            assert boundary.source is not None
            boundary.shelved = self._shelf.put(boundary.source.data_ptr(), size)
            self._storing.append((boundary.shelved, label))
        except BaseException as error:
            if boundary.shelved is None:
                if not isinstance(error, AioError):
                    self._shelf.settle()  # interrupted: it may be on its way all the same
                self._leaving.remove(boundary)
            if isinstance(error, AioError):
                error.args = (f"{label} cannot be put away: {error}",)
            raise
        self._moved += 1

    # -- backward ------------------------------------------------------------------------------------------------------------

    def _unpack(self, boundary: Boundary) -> torch.Tensor:
        """The tensor of a boundary, for autograd. Blocks until it is there."""
        with self._lock:
            self._enter_task()
            self._collect()
            boundary.check_version()
            for other in list(self._back.values()):
                if other.handed and other.call is not boundary.call:
                    self._drop_target(other)
            if self._closed:
                if boundary.source is None:
                    raise EngineClosed("backward: the engine of this model was closed, and its activations with it")
                return boundary.source
            self._raise_fault()
            if boundary.source is None:
                self._bring(boundary, Priority.DEMAND)
            self._bring_ahead(boundary.call)
            if boundary.source is not None:
                return boundary.source
            assert boundary.fetch is not None
            label = f"the input of {boundary.call.label}"
            try:
                self._wait(boundary.fetch, label, faults=True)
            except AioError:
                self._drop_target(boundary)  # the next who wants it reads again
                raise
            boundary.handed = True
            return boundary.view()

    def _bring(self, boundary: Boundary, priority: Priority) -> None:
        """Start bringing a boundary's bytes back, if nobody has. Does not block."""
        if boundary.unwanted and boundary.fetch is not None:  # given up, and not ended yet
            self._wait(boundary.fetch, f"the input of {boundary.call.label}", faults=False)
            self._drop_target(boundary)
        if boundary.target is not None:
            return
        assert boundary.shelved is not None
        with torch.inference_mode(False):
            target = torch.empty(boundary.lead + boundary.span, dtype=boundary.dtype, device=self._device)
        boundary.target, boundary.handed = target, False
        self._back[id(boundary)] = boundary
        self._hold(boundary.span_bytes)
        try:
            start = target.data_ptr() + boundary.lead * boundary.dtype.itemsize
            boundary.fetch = self._shelf.fetch(boundary.shelved, start, priority)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                self._shelf.settle()
            self._drop_target(boundary)
            raise

    def _bring_ahead(self, call: Call) -> None:
        """Start bringing back what the calls before `call` saved: backward comes to them next."""
        found = 0
        for number in range(call.number, max(call.number - _SEARCH_CALLS, 0), -1):
            earlier = self._calls.get(number)
            if earlier is None:
                continue
            found += earlier is not call
            if found > AHEAD_CALLS:
                return
            for ref in earlier.boundaries:
                boundary = ref()
                if boundary is not None and boundary.source is None:
                    self._bring(boundary, Priority.PREFETCH)

    def _enter_task(self) -> None:
        """See to it that nothing stays that a backward brought back and did not use."""
        task = graph_task_id()
        if task != NO_TASK and task not in self._tasks:
            self._tasks.add(task)
            queue_callback(lambda: self._end_task(task))

    def _end_task(self, task: int) -> None:
        with self._lock:
            self._tasks.discard(task)
            if not self._tasks:
                self._let_go()

    # -- memory --------------------------------------------------------------------------------------------------------------

    def _let_go(self) -> None:
        """No backward runs: what came back goes."""
        self._tasks.clear()
        for boundary in list(self._back.values()):
            self._drop_target(boundary)

    def _drop_target(self, boundary: Boundary) -> None:
        """Free what a boundary came back to, now or when nothing comes to it any more."""
        if boundary.fetch is not None:
            boundary.fetch.cancel()
            if not boundary.fetch.filled:
                boundary.unwanted = True
                return
        boundary.target = boundary.fetch = None
        boundary.handed = boundary.unwanted = False
        if self._back.pop(id(boundary), None) is not None:
            self._held_bytes -= boundary.span_bytes

    def _collect(self) -> None:
        """Free what has arrived, and what no graph holds. Does not block."""
        for boundary in [b for b in self._leaving if b.shelved is not None and b.shelved.stored.filled]:
            self._leaving.remove(boundary)
            assert boundary.shelved is not None
            if not boundary.shelved.stored.failed and not boundary.shared:
                boundary.source = None
                self._held_bytes -= boundary.span_bytes
        for boundary in [b for b in self._back.values() if b.unwanted]:
            self._drop_target(boundary)
        for shelved, label in [of for of in self._storing if of[0].stored.done]:
            self._storing.remove((shelved, label))
            if shelved.stored.failed and self._fault is None:
                self._fault = (shelved.stored, label)
        while self._trash:
            remains = self._trash.popleft()
            self._held_bytes -= remains.memory_bytes
            if remains.shelved is not None:
                self._shelf.give_back(remains.shelved)

    def _hold(self, size_bytes: int) -> None:
        self._held_bytes += size_bytes
        self._held_peak = max(self._held_peak, self._held_bytes)

    def _wait(self, ticket: Ticket, label: str, *, faults: bool) -> None:
        """Block until the memory of a ticket may be used. faults: raise what went wrong; else `_collect` finds it."""
        start_ns, was_filled = time.monotonic_ns(), ticket.filled
        try:
            ticket.wait_filled()
        except AioError as error:
            if faults:
                error.args = (f"{label} cannot be brought back: {error}",)
                raise
        finally:
            end_ns = time.monotonic_ns()
            if not was_filled:
                self._wait_s += (end_ns - start_ns) / 1e9
                self._timeline.add("wait", label, start_ns, end_ns)

    def _raise_fault(self) -> None:
        """Raise, once, what a store met since it was started. The next store tries whether the drive works again."""
        if self._fault is None:
            return
        (ticket, label), self._fault = self._fault, None
        self._broken = True
        try:
            ticket.wait()
        except AioError as error:
            error.args = (f"{label} cannot be put away: {error}",)
            raise

    # -- for the engine --------------------------------------------------------------------------------------------------------

    def step_ended(self) -> None:
        """A training step has ended: say once that it had nothing to take away, if so."""
        if self._said or self._moved or self._recent:
            return
        self._said = True
        if not self._seen:
            warnings.warn(
                "activations= has nothing to take away: no checkpointed call was seen in this training step. Call "
                "model.gradient_checkpointing_enable(), or torch.utils.checkpoint.checkpoint in forward",
                stacklevel=2,
            )
        else:
            warnings.warn(
                f"activations= has nothing to take away: the inputs of the {self._seen} checkpointed calls of this training "
                f"step are smaller than {SMALLEST_BYTES >> 10} KiB, or held by the model besides, and stay in memory",
                stacklevel=2,
            )

    def figures(self) -> ActivationFigures:
        """Counters since `inf.offload`."""
        with self._lock:
            self._collect()
            return ActivationFigures(
                self._shelf.stored_bytes,
                self._shelf.fetched_bytes,
                self._shelf.rest_bytes_peak,
                self._held_peak,
                self._wait_s,
                self._seen,
                self._kept,
            )

    def close(self) -> None:
        """End the watch. Nothing must be on its way. Graphs that live can run backward no further than memory goes."""
        self._unwatch()
        with self._lock:
            self._collect()  # what is on the shelf leaves memory, whether or not a call has come by since it arrived
            self._closed = True
            self._leaving.clear()
            self._storing.clear()
            self._recent.clear()
            for boundary in self._back.values():
                boundary.target = boundary.fetch = None
            self._back.clear()
