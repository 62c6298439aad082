"""Activation offload: inputs of checkpointed calls leave memory in forward and return ahead of
backward.

    forward    call n saves its inputs -> copy the inputs of call n - HELD_CALLS to the store, and
               free them when they are stored
    backward   call n asks for its inputs -> begin to fetch the inputs of calls n - 1 ...
               n - PREFETCH_CALLS -> wait for those of call n

The last HELD_CALLS calls of a forward are the first of its backward, so their inputs stay in memory
and are never written. An input of several calls (a mask, the output of an encoder) also stays: it
is one tensor for all of them.

torch.utils.checkpoint holds inputs as SavedTensors. Only the SavedTensors of offloaded inputs get
hooks; nothing else that autograd saves is touched. Torch does not check the version of a tensor
with such hooks, so this module does, by a witness: a tensor that shares the version counter and not
the memory.

A `Boundary` belongs to the graphs that saved it. When the last of them is gone, it leaves `Remains`
in a queue, from which the engine frees its bytes.
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

from infinity._src.base.sizes import format_size
from infinity._src.base.telemetry import Timeline
from infinity._src.base.torch_compat import (
    NO_TASK,
    CheckpointCall,
    address_of,
    graph_task_id,
    queue_callback,
    version_of,
    version_witness,
    watch_checkpoints,
)
from infinity._src.hooks import tensors
from infinity._src.hooks.activation_store import ActivationStore, StoredBytes
from infinity._src.hooks.block_order import Marks, deal
from infinity._src.memory.constants import HELD_CALLS, STORING_BYTES_MAX
from infinity._src.params.unit import Unit
from infinity.aio import Priority, Ticket
from infinity.errors import AioError, EngineClosed


class Call:
    """Checkpointed call, and the boundaries of tensors that no earlier call has saved. These
    boundaries refer to the call."""

    __slots__ = ("__weakref__", "boundaries", "number", "saved")

    def __init__(self, number: int, saved: CheckpointCall) -> None:
        self.number = number
        self.saved = saved
        self.boundaries: list[weakref.ref[Boundary]] = []

    @property
    def label(self) -> str:
        return self.saved.label or "a checkpointed call"


class Boundary:
    """Tensor that checkpoints saved, in memory or in the store. Only graphs that saved the tensor
    refer to its boundary.

    Any of `source` (the tensor itself), `stored` (its copy in the store) and `target` (memory into
    which it is fetched) may be set.
    """

    __slots__ = (
        "__weakref__",
        "call",
        "dtype",
        "fetch",
        "given",
        "lead",
        "original",
        "shape",
        "shared",
        "source",
        "span",
        "stored",
        "stride",
        "target",
        "trash",
        "unwanted",
        "version",
        "witness",
    )

    def __init__(self, tensor: torch.Tensor, call: Call, trash: deque[Remains]) -> None:
        self.call = call
        self.shape, self.stride, self.dtype = tensor.shape, tensor.stride(), tensor.dtype
        self.span = span_numel(tensor)
        # The fetched tensor gets the same alignment, on which the order of sums in kernels depends.
        self.lead = tensor.data_ptr() % 64 // tensor.element_size()
        self.original = weakref.ref(tensor)
        self.version = version_of(tensor)
        self.witness = version_witness(tensor)
        # Detached: the graph refers to the boundary, so the boundary must not refer to the graph.
        self.source: torch.Tensor | None = tensor.detach()
        self.stored: StoredBytes | None = None
        self.target: torch.Tensor | None = None  # [lead + span] of dtype
        self.fetch: Ticket | None = None
        self.given = False  # the target was given to backward
        self.unwanted = False  # the target is freed as soon as no transfer writes to it
        self.shared = False  # several calls saved the tensor, so it stays in memory
        self.trash = trash

    @property
    def span_bytes(self) -> int:
        return self.span * self.dtype.itemsize

    def view(self) -> torch.Tensor:
        assert self.target is not None
        # With the strides and the alignment of the saved tensor, kernels sum in the same order.
        with torch.no_grad():
            return torch.empty(0, dtype=self.dtype, device=self.target.device).set_(
                self.target.untyped_storage(), self.lead, self.shape, self.stride
            )

    def check_version(self) -> None:
        """Raise RuntimeError, as torch does, when the tensor was modified after it was saved."""
        now = version_of(self.witness)
        if now != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: [{self.dtype} {list(self.shape)}], an input of "
                f"{self.call.label}, is at version {now}; expected version {self.version} instead"
            )

    def __del__(self) -> None:
        # The last reference may go in any thread, at any moment: taking the lock here could block,
        # so the work is only queued for `_collect`.
        self.trash.append(
            Remains(
                self.stored,
                self.span_bytes * ((self.source is not None) + (self.target is not None)),
            )
        )


@dataclasses.dataclass(eq=False, frozen=True)
class Remains:
    """Bytes of a boundary that no graph holds any more."""

    stored: StoredBytes | None
    memory_bytes: int


def span_numel(tensor: torch.Tensor) -> int:
    """Count elements from the first of a non-empty tensor to its last, gaps included."""
    return 1 + sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )


SMALLEST_BYTES = 64 << 10
"""Smaller tensors stay in memory."""

PREFETCH_CALLS = 2
"""Number of calls, ahead of the one that backward has reached, whose inputs are prefetched."""

_SEARCH_CALLS = 64  # micro-batches may lie between one call and the next in backward


@dataclasses.dataclass(frozen=True)
class ActivationFigures:
    """Counters of boundary activations since `inf.offload`. Times in seconds.

    stored_bytes, fetched_bytes: bytes copied to their tier, and back from it.
    rest_bytes_peak: the most bytes that the tier had reserved for them at once, extents or slabs
        that wait for reuse included.
    held_bytes_peak: the most bytes of boundaries in memory at once: inputs of the last calls of
        forward, inputs that are being stored, prefetched inputs.
    wait_s: time that forward waited for earlier stores, and backward for fetches.
    calls: checkpointed calls seen. kept: inputs of these calls that are not offloaded, since they
        are small, on another device, parameters, or of a kind that cannot be stored.
    """

    stored_bytes: int = 0
    fetched_bytes: int = 0
    rest_bytes_peak: int = 0
    held_bytes_peak: int = 0
    wait_s: float = 0.0
    calls: int = 0
    kept: int = 0

    def __str__(self) -> str:
        return (
            f"activations: {format_size(self.stored_bytes)} offloaded, "
            f"{format_size(self.fetched_bytes)} fetched; at most "
            f"{format_size(self.rest_bytes_peak)} offloaded at once, and "
            f"{format_size(self.held_bytes_peak)} held; waited {self.wait_s:.2f} s"
        )


class RunningForward(Protocol):
    """Running forwards of one model (`infinity._src.hooks.forward.FrameStack`)."""

    @property
    def running_here(self) -> bool:
        """True when a forward of the model runs in this thread."""


class Activations:
    """Boundary activations of one model.

    store: holds their bytes. units: of `model`. frames: the model's running forwards.

    Raises: ValueError when this release of torch holds the inputs of checkpoints in an unknown way.
    """

    def __init__(
        self,
        store: ActivationStore,
        model: torch.nn.Module,
        units: Sequence[Unit],
        timeline: Timeline,
        device: torch.device | None = None,
        *,
        frames: RunningForward,
    ) -> None:
        self._device = device or torch.device("cpu")
        self._frames = frames
        self._mark = object()  # owner of the calls whose inputs are offloaded here
        self._store = store
        self._names = {module: name for name, module in model.named_modules()}
        self._flats = [flat for unit in units for flat in unit.flats]
        self._timeline = timeline
        self._lock = threading.RLock()
        # Attribute `call`: the checkpointed call that began last in this thread.
        self._here = threading.local()
        self._numbers = 0
        self._calls: weakref.WeakValueDictionary[int, Call] = weakref.WeakValueDictionary()
        # Keyed by id(), which identifies an input of several calls.
        self._by_tensor: weakref.WeakValueDictionary[int, Boundary] = weakref.WeakValueDictionary()
        self._recent: deque[list[weakref.ref[Boundary]]] = deque()
        self._storing: list[Boundary] = []  # their sources are being copied
        self._stores: list[tuple[StoredBytes, str]] = []  # stores in flight, each with a label
        self._fetched: dict[int, Boundary] = {}  # boundaries with a target, by id()
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

    # -- calls of checkpoints and hooks ------------------------------------------------------------

    def checkpoint_begins(self, call: CheckpointCall) -> None:
        """Implement `CheckpointWatcher`: mark a call inside of a forward as one of this model, and
        remember the call for `module_entered`, unless its owner and its label are known."""
        if call.owner is None and self._frames.running_here:
            call.owner = self._mark
        self._here.call = None if call.owner is not None and call.label else call

    def checkpoint_saved(self, call: CheckpointCall) -> None:
        """Implement `CheckpointWatcher`: offload the inputs of a call of this model. For a call
        outside of a forward `module_entered` decides whether it is one of this model."""
        if call.owner is self._mark:
            self._offload_inputs(call)

    def module_entered(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Claim the checkpointed call around a hooked module's forward, which begins now, if both
        have an input in common. Label the call with the module's name."""
        call = getattr(self._here, "call", None)
        if call is None:
            return
        # Only the next module belongs to the call, so it is forgotten here.
        self._here.call = None
        if call.owner is None:
            here = {id(tensor) for tensor in tensors.in_arguments(args, kwargs)}
            if here.isdisjoint(map(id, call.inputs())):
                return
            call.owner, call.label = self._mark, self._names.get(module, "")
            self._offload_inputs(call)  # a reentrant call has saved nothing yet
        elif call.owner is self._mark:
            call.label = self._names.get(module, "")

    # -- forward -----------------------------------------------------------------------------------

    def _offload_inputs(self, saved: CheckpointCall) -> None:
        pairs = saved.pairs()
        if not pairs:
            return
        with self._lock:
            self._collect()
            # No backward runs here, so inputs that are still prefetched were not used.
            self._drop_fetched()
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
            # Backward begins with the last calls: their inputs stay in memory.
            while len(self._recent) > HELD_CALLS:
                for ref in self._recent.popleft():
                    gone = ref()
                    if (
                        gone is not None
                        and not gone.shared
                        and gone.stored is None
                        and gone.source is not None
                    ):
                        self._start_store(gone)

    def _boundary(self, tensor: torch.Tensor, call: Call) -> Boundary | None:
        """Return the boundary of a tensor that `call` saved; None for one that stays in memory."""
        known = self._by_tensor.get(id(tensor))
        # Python may reuse an id, and a tensor that was modified has another value.
        if known is not None and known.original() is tensor and known.version == version_of(tensor):
            if known.call is not call and not known.shared:
                # Each of several calls would fetch it again, so it stays in memory.
                known.shared = True
                if known.source is None:
                    known.source = tensor.detach()
                    self._hold(known.span_bytes)
            return known
        if not self._is_offloaded(tensor):
            self._kept += 1
            return None
        boundary = Boundary(tensor, call, self._trash)
        self._hold(boundary.span_bytes)
        self._by_tensor[id(tensor)] = boundary
        call.boundaries.append(weakref.ref(boundary))
        return boundary

    def _is_offloaded(self, tensor: torch.Tensor) -> bool:
        if (
            type(tensor) is not torch.Tensor
            or tensor.layout is not torch.strided
            or tensor.device != self._device
        ):
            return False
        if (
            tensor.numel() * tensor.element_size() < SMALLEST_BYTES
            or span_numel(tensor) > 2 * tensor.numel()
        ):
            return False
        if tensor.is_conj() or tensor.is_neg() or tensor.is_quantized or tensor.is_inference():
            return False
        if tensor.is_leaf and tensor.requires_grad:  # its AccumulateGrad node keeps it in memory
            return False
        # A view of a unit's memory is not offloaded: the engine evicts and gathers the unit.
        address = address_of(tensor)
        return not any(
            0 <= address - address_of(flat.tensor) < flat.size_bytes for flat in self._flats
        )

    def _start_store(self, boundary: Boundary) -> None:
        """Start copying a boundary to the store. Waits while too many bytes are being copied."""
        size = boundary.span_bytes
        while self._storing and sum(b.span_bytes for b in self._storing) + size > max(
            STORING_BYTES_MAX, 2 * size
        ):
            oldest = self._storing[0]
            assert oldest.stored is not None
            self._wait(oldest.stored.written, f"the input of {oldest.call.label}", faults=False)
            self._collect()
            self._raise_fault()
        label = f"the input of {boundary.call.label}"
        self._storing.append(boundary)  # holds the source while it is copied, also after an error
        try:
            if self._broken:
                self._store.recover()
                self._broken = False
            assert boundary.source is not None
            boundary.stored = self._store.store(boundary.source.data_ptr(), size)
            self._stores.append((boundary.stored, label))
        except BaseException as error:
            # If `stored` is set, backward waits for the copy as usual.
            if boundary.stored is None:
                if not isinstance(error, AioError):
                    self._store.wait_all()  # interrupted: the transfer may have begun nevertheless
                self._storing.remove(boundary)
            if isinstance(error, AioError):
                error.args = (f"{label} cannot be offloaded: {error}",)
            raise
        self._moved += 1

    # -- backward ----------------------------------------------------------------------------------

    @property
    def next_call(self) -> int:
        return self._numbers + 1

    def reorder(self, marks: Marks) -> None:
        """Renumber calls by `deal`. Backward needs inputs in descending order of these numbers."""
        with self._lock:
            calls = dict(self._calls)
            self._calls.clear()
            dealt = deal(calls, marks)
            for number, call in calls.items():
                call.number = dealt.get(number, number)
                self._calls[call.number] = call

    def _unpack(self, boundary: Boundary) -> torch.Tensor:
        """Return the tensor of a boundary, for autograd. Blocks until it is fetched."""
        with self._lock:
            self._watch_task()
            self._collect()
            boundary.check_version()
            # Backward is done with other calls whose inputs it has received.
            for other in list(self._fetched.values()):
                if other.given and other.call is not boundary.call:
                    self._drop_target(other)
            if self._closed:
                if boundary.source is None:
                    raise EngineClosed(
                        "backward: the engine of this model was closed, and its activations with it"
                    )
                return boundary.source
            self._raise_fault()
            # Fetch this boundary before prefetching: inputs of earlier calls must not delay it.
            if boundary.source is None:
                self._start_fetch(boundary, Priority.DEMAND)
            self._prefetch(boundary.call)
            if boundary.source is not None:
                return boundary.source
            assert boundary.fetch is not None
            label = f"the input of {boundary.call.label}"
            try:
                self._wait(boundary.fetch, label, faults=True)
            except AioError:
                self._drop_target(boundary)  # a later backward fetches it again
                raise
            boundary.given = True
            return boundary.view()

    def _start_fetch(self, boundary: Boundary, priority: Priority) -> None:
        """Start to fetch a boundary's bytes, unless that has begun. Blocks only while an earlier
        fetch that was cancelled still writes to the target."""
        if boundary.unwanted and boundary.fetch is not None:
            self._wait(boundary.fetch, f"the input of {boundary.call.label}", faults=False)
            self._drop_target(boundary)
        if boundary.target is not None:
            return
        assert boundary.stored is not None
        # Autograd may save the tensor that it gets here, and refuses to save inference tensors.
        with torch.inference_mode(False):
            target = torch.empty(
                boundary.lead + boundary.span, dtype=boundary.dtype, device=self._device
            )
        boundary.target, boundary.given = target, False
        self._fetched[id(boundary)] = boundary
        self._hold(boundary.span_bytes)
        try:
            start = target.data_ptr() + boundary.lead * boundary.dtype.itemsize
            boundary.fetch = self._store.fetch(boundary.stored, start, priority)
        except BaseException as error:
            # Interrupted: the transfer may have begun, and `_drop_target` frees its memory next.
            if isinstance(error, KeyboardInterrupt):
                self._store.wait_all()
            self._drop_target(boundary)
            raise

    def _prefetch(self, call: Call) -> None:
        """Start to fetch the inputs of this call and of the PREFETCH_CALLS calls before it, which
        backward reaches next."""
        found = 0
        for number in range(call.number, max(call.number - _SEARCH_CALLS, 0), -1):
            earlier = self._calls.get(number)
            if earlier is None:
                continue
            found += earlier is not call
            if found > PREFETCH_CALLS:
                return
            for ref in earlier.boundaries:
                boundary = ref()
                if boundary is not None and boundary.source is None:
                    self._start_fetch(boundary, Priority.PREFETCH)

    def _watch_task(self) -> None:
        """Have the end of the running backward free prefetched inputs that it did not use."""
        task = graph_task_id()
        if task != NO_TASK and task not in self._tasks:
            self._tasks.add(task)
            queue_callback(lambda: self._end_task(task))

    def _end_task(self, task: int) -> None:
        with self._lock:
            self._tasks.discard(task)
            if not self._tasks:
                self._drop_fetched()

    # -- memory ------------------------------------------------------------------------------------

    def _drop_fetched(self) -> None:
        self._tasks.clear()
        for boundary in list(self._fetched.values()):
            self._drop_target(boundary)

    def _drop_target(self, boundary: Boundary) -> None:
        """Free the memory into which a boundary was fetched, now or as soon as no transfer writes
        to it."""
        if boundary.fetch is not None:
            boundary.fetch.cancel()
            # The transfer may still write to the target: `_collect` frees it later.
            if not boundary.fetch.filled:
                boundary.unwanted = True
                return
        boundary.target = boundary.fetch = None
        boundary.given = boundary.unwanted = False
        if self._fetched.pop(id(boundary), None) is not None:
            self._held_bytes -= boundary.span_bytes

    def _collect(self) -> None:
        """Free sources that are stored, and boundaries that no graph holds. Does not block."""
        for boundary in [
            b for b in self._storing if b.stored is not None and b.stored.written.filled
        ]:
            self._storing.remove(boundary)
            assert boundary.stored is not None
            # After a failed write the source is the only copy.
            if not boundary.stored.written.failed and not boundary.shared:
                boundary.source = None
                self._held_bytes -= boundary.span_bytes
        for boundary in [b for b in self._fetched.values() if b.unwanted]:
            self._drop_target(boundary)
        for stored, label in [of for of in self._stores if of[0].written.done]:
            self._stores.remove((stored, label))
            if stored.written.failed and self._fault is None:
                self._fault = (stored.written, label)
        while self._trash:
            remains = self._trash.popleft()
            self._held_bytes -= remains.memory_bytes
            if remains.stored is not None:
                self._store.free(remains.stored)

    def _hold(self, size_bytes: int) -> None:
        self._held_bytes += size_bytes
        self._held_peak = max(self._held_peak, self._held_bytes)

    def _wait(self, ticket: Ticket, label: str, *, faults: bool) -> None:
        """Block until the memory of a ticket may be used. faults: raise the ticket's error here;
        otherwise `_collect` finds it."""
        start_ns, was_filled = time.monotonic_ns(), ticket.filled
        try:
            ticket.wait_filled()
        except AioError as error:
            if faults:
                error.args = (f"{label} cannot be fetched: {error}",)
                raise
        finally:
            end_ns = time.monotonic_ns()
            if not was_filled:
                self._wait_s += (end_ns - start_ns) / 1e9
                self._timeline.add("wait", label, start_ns, end_ns)

    def _raise_fault(self) -> None:
        """Raise, once, the error of an earlier store."""
        if self._fault is None:
            return
        (ticket, label), self._fault = self._fault, None
        # The executor refuses writes to the drive from now on; the next store calls `recover`.
        self._broken = True
        try:
            ticket.wait()
        except AioError as error:
            error.args = (f"{label} cannot be offloaded: {error}",)
            raise

    # -- for the engine ----------------------------------------------------------------------------

    def step_ended(self) -> None:
        """End a training step: warn once if it had nothing to offload."""
        if self._said or self._moved or self._recent:
            return
        self._said = True
        if not self._seen:
            warnings.warn(
                "activations= has nothing to offload: no checkpointed call was seen in this "
                "training step. Call model.gradient_checkpointing_enable(), or "
                "torch.utils.checkpoint.checkpoint in forward, or leave out the checkpoint=False "
                "of inf.microbatched",
                stacklevel=2,
            )
        else:
            warnings.warn(
                f"activations= has nothing to offload: the inputs of the {self._seen} "
                f"checkpointed calls of this training step are smaller than {SMALLEST_BYTES >> 10} "
                "KiB, or also held by the model, and stay in memory",
                stacklevel=2,
            )

    def figures(self) -> ActivationFigures:
        with self._lock:
            self._collect()
            return ActivationFigures(
                self._store.stored_bytes,
                self._store.fetched_bytes,
                self._store.rest_bytes_peak,
                self._held_peak,
                self._wait_s,
                self._seen,
                self._kept,
            )

    def close(self) -> None:
        """Stop watching checkpoints. No transfer may be in flight. Afterwards a backward raises
        EngineClosed for every input that is not in memory."""
        self._unwatch()
        with self._lock:
            # Free sources that were stored since the last call.
            self._collect()
            self._closed = True
            self._storing.clear()
            self._stores.clear()
            self._recent.clear()
            for boundary in self._fetched.values():
                boundary.target = boundary.fetch = None
            self._fetched.clear()
