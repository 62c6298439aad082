"""Communication streams: threads that run collectives in an order that is the same on all ranks.

    CommStream          submit ──► queue ──► its thread: work(group), one by one ──► Pending...
    OrderedCommStream   submit ──► several queues ──► one thread: the head that rank 0 chooses ──►
                        another thread: work(group), one by one ──► Pending...

Each communication stream has its own thread and process group, so a waiting stream does not delay
another. All ranks must submit the same collectives to the same queue in the same order. After a
failure no further collective runs, groups are aborted (`process_groups.abort_groups`), and every
call raises the first failure.

A rank may lack its shard for a gather because an update has failed there. If such a fault is
*excused*, the ranks tell each other (`order_agreement`), and no rank runs the gather: on all ranks
the gather ends with `CollectiveRefused` in its turn, and the stream continues with the next
collective.

Two communication streams must not both launch on a GPU: NCCL requires that all ranks launch the
collectives of all communicators in one order, and independent threads have no common order. So all
collectives on device tensors use one `OrderedCommStream` and one communicator, with gloo, too.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from infinity._src.distributed.order_agreement import LaunchOrder, OrderAgreement
from infinity._src.distributed.watchdog import Watchdog
from infinity.aio import Ticket
from infinity.aio._cuda_driver import relax_capture_mode
from infinity.errors import AioError, InfinityError, RankFailed

log = logging.getLogger("infinity")

Work = Callable[[Any], None]
# Seconds to wait for calls of an aborted group, which return at once unless the backend is stuck.
GIVE_UP_S = 5.0
# Seconds between two checks for a failure in a waiting thread.
_POLL_S = 0.25
# Memory that stuck calls may still write to, retained until the process ends.
_GIVEN_UP: list[object] = []

CPU = torch.device("cpu")


class CollectiveRefused(InfinityError, RuntimeError):
    """Error of a collective that no rank has run, because a rank lacks its shard.
    `PendingCollective.wait` raises it on all ranks; the engine continues.
    """


class DeviceEvent:
    """CUDA event with a timed wait, like `threading.Event`.

    `synchronize` has no timeout: behind an NCCL kernel whose peer has died it never returns.
    """

    def __init__(self, event: Any) -> None:
        self._event = event

    def is_set(self) -> bool:
        """Return whether the device has reached the event. Never blocks."""
        try:
            return bool(self._event.query())
        except RuntimeError:
            # The device has failed permanently, so no kernel runs any more.
            return True

    def wait(self, timeout: float) -> bool:
        """Block until the device has reached the event, at most `timeout` seconds. Returns whether
        the device has reached it.
        """
        end_s, pause_s = time.monotonic() + timeout, 20e-6
        while not self.is_set():
            left_s = end_s - time.monotonic()
            if left_s <= 0:
                return False
            time.sleep(min(pause_s, left_s))
            # Exponential back-off: most waits are short, and long polling must be cheap.
            pause_s = min(2 * pause_s, 2e-3)
        return True


class PendingCollective:
    """Handle of one collective in a communication stream, like `Work` in torch.distributed.

    needs: tickets that must be filled before the launch. excuses: called with a ticket's fault, in
    another thread. If it returns True, all ranks skip the collective; otherwise, and without
    `excuses`, the fault ends the engine. behind: CUDA event of the submitting stream, after which
    the input of `work` is complete.
    """

    def __init__(
        self,
        what: str,
        number: int | None,
        work: Work,
        watchdog: Watchdog,
        *,
        device: torch.device = CPU,
        needs: Sequence[Ticket] = (),
        excuses: Callable[[AioError], bool] | None = None,
        behind: Any = None,
    ) -> None:
        self.what = what
        self.number = number
        self.needs = tuple(needs)
        self.excuses = excuses
        self._refused: CollectiveRefused | None = None
        self._work: Work | None = work
        self._watchdog = watchdog
        self._device = device
        self._behind = behind
        self._event: Any = None
        self._error: BaseException | None = None
        self._done = threading.Event()
        self._begun = False

    @property
    def done(self) -> bool:
        """True once the work has ended or failed; on CUDA, once launched. Never blocks."""
        return self._done.is_set()

    @property
    def ready(self) -> bool:
        """True once this rank's tickets are filled. Never blocks."""
        return all(ticket.filled for ticket in self.needs)

    def await_needs(self, *, check: Callable[[], None] | None = None) -> AioError | None:
        """Block until this rank's tickets are filled. Returns an excused fault, or None.

        check: called during the wait; an exception that it raises ends the wait. Raises: AioError.
        """
        try:
            for ticket in self.needs:
                ticket.wait_filled(check=check)
        except AioError as error:
            if self.excuses is None or not self.excuses(error):
                raise
            return error
        return None

    @property
    def refused(self) -> bool:
        """True once the ranks have agreed to skip the collective. Never blocks."""
        return self._refused is not None

    def refuse(self, fault: AioError | None) -> None:
        """Mark the collective as skipped by all ranks. fault: the fault of this rank's shard, if
        any."""
        self._refused = CollectiveRefused(
            f"{self.what}: no rank runs it, because a rank lacks its shard"
        )
        self._refused.__cause__ = fault

    def wait(self) -> None:
        """Block until the collective is done; on CUDA, also make the current stream wait for it.

        Raises: the work's error if the work failed on this rank; CollectiveRefused; RankFailed if
            another rank does not reach the collective, or after any failure.
        """
        error: BaseException | None = None
        try:
            self._watchdog.wait(self._done, self.what, self.number)
        except RankFailed as failure:
            error = failure
        # Prefer this rank's error to the failure that it has caused: `_run_one` sets the error
        # first, and then reports the failure.
        error = self._error or error
        if error is not None:
            # The exception is raised repeatedly: without this its traceback would grow and hold
            # frames.
            raise error.with_traceback(None)
        if self._event is not None:
            # `done` means launched: make the stream wait, not the thread, so that later kernels see
            # the result. Name the device, since another one may be current in this thread.
            torch.cuda.current_stream(self._device).wait_event(self._event)
            # From now on the stream orders uses and frees of the memory after the collective.
            self._work = None

    @property
    def landed(self) -> bool:
        """True once the collective no longer writes to the work's memory. Never blocks."""
        return self.done and (self._event is None or DeviceEvent(self._event).is_set())

    def finished(self, limit_s: float | None = None) -> bool:
        """Block until the collective no longer writes to the work's memory. Does not raise its
        error.

        Returns False if the call is stuck after a failure; the work's tensors are then retained
        until the process ends, and the caller must retain other memory, such as a mapping. limit_s:
        seconds after a failure until the call counts as stuck; None: GIVE_UP_S.
        """
        limit_s = GIVE_UP_S if limit_s is None else limit_s
        # The caller only needs the memory, not the collective's result.
        with contextlib.suppress(RankFailed):
            self._watchdog.wait(self._done, self.what, self.number)
        if not self._begun:
            # After the failure the collective never begins.
            return True
        if not self._done.wait(limit_s):
            return self._give_up()
        if self._event is not None:
            # On CUDA `done` means launched: the kernel may still write.
            landed = DeviceEvent(self._event)
            with contextlib.suppress(RankFailed):
                self._watchdog.wait(landed, self.what, self.number)
            # After a failure the abort of the groups ends the kernel, unless the abort hangs.
            if not landed.wait(limit_s):
                return self._give_up()
            self._work = None
        return True

    def _give_up(self) -> bool:
        # None if the work has just ended.
        work = self._work
        if work is not None:
            log.warning("%s is stuck; its memory is kept until the process ends", self.what)
            _GIVEN_UP.append(work)
        return False

    def _end(self, error: BaseException | None = None) -> None:
        if self._done.is_set():
            # The reading thread has already ended this collective with the error of a read.
            return
        # Prefer an error that was set before the failure was reported.
        self._error = self._error or error
        if self._event is None:
            # Drop the tensors with the work. On CUDA its kernels may still run; then `wait` or
            # `finished` drops the work.
            self._work = None
        self._done.set()


class CommStream:
    """Daemon thread that runs collectives in one process group.

    group: used by no other stream; its creator aborts it on failure. device: of the tensors. On
    CUDA, a collective runs on a separate CUDA stream, after the work that was on the submitting
    thread's stream at submission.
    """

    def __init__(
        self,
        name: str,
        *,
        group: dist.ProcessGroup | None,
        watchdog: Watchdog,
        device: torch.device = CPU,
    ) -> None:
        self.name = name
        self._group = group
        self._watchdog = watchdog
        self._device = device
        # FIFO: the order of the program, which is the same on every rank.
        self._queue: queue.SimpleQueue[PendingCollective | None] = queue.SimpleQueue()
        self._closed = False
        # The last collective of each queue: when it has ended, all earlier ones have. But after a
        # failure the last one may never begin while an earlier one still runs.
        self._last: dict[str, PendingCollective] = {}
        self._launched: deque[PendingCollective] = deque()  # may still be running
        # A forked child inherits the exit callback, but not the thread.
        self._pid = os.getpid()
        atexit.register(self._exits)
        # A daemon, so that the interpreter can exit while a call is stuck in the backend.
        self._thread = threading.Thread(target=self._run, name=f"infinity-comm-{name}", daemon=True)
        self._thread.start()

    def submit(self, what: str, work: Work, *, numbered: bool = True) -> PendingCollective:
        """Run `work(group)` after all work submitted before. Never blocks on the work.

        numbered: count it among the main thread's collectives; the watchdog compares these counts
        to find ranks that are behind. Main thread only, since numbers follow the order of the
        program. Raises: RankFailed after a failure.
        """
        op = self._last[""] = self._make(what, work, numbered)
        self._queue.put(op)
        return op

    def _make(
        self,
        what: str,
        work: Work,
        numbered: bool,
        needs: Sequence[Ticket] = (),
        excuses: Callable[[AioError], bool] | None = None,
    ) -> PendingCollective:
        # After a failure the other ranks would never reach the collective.
        self._watchdog.check()
        assert not self._closed, f"communication stream {self.name} is closed"
        # Numbered here, in the main thread, since streams run concurrently.
        number = self._watchdog.next_number(what) if numbered else None
        behind = (
            # The input of `work` is complete after the submitting stream's work so far.
            torch.cuda.current_stream(self._device).record_event()
            if self._device.type == "cuda"
            else None
        )
        return PendingCollective(
            what,
            number,
            work,
            self._watchdog,
            device=self._device,
            needs=needs,
            excuses=excuses,
            behind=behind,
        )

    def close(self) -> None:
        """Wait for all submitted work, and end the thread. Idempotent; blocks.

        After a failure it waits at most GIVE_UP_S for each stuck part, and does not raise.
        """
        if self._closed:
            return
        self._closed = True
        # The registered exit callback would keep the object alive.
        atexit.unregister(self._exits)
        # The thread ends after all work submitted before.
        self._no_more()
        # A thread in a stuck call is abandoned, not joined.
        self._thread.join(GIVE_UP_S if self.drain() else 0.0)
        if self._thread.is_alive():
            self._keep_groups()
        self._group = None
        self._last.clear()
        self._launched.clear()

    @property
    def on_device(self) -> bool:
        """True if its work runs on a CUDA stream."""
        return self._device.type == "cuda"

    def drain(self) -> bool:
        """Block until no submitted work is in progress, on the device either.

        Returns False if work is stuck after a failure.
        """
        limit_s, drained = GIVE_UP_S, True
        # First the last collective of each queue, after which none begins; then a copy of the
        # launched ones, a list that the launching thread changes.
        for ops in (lambda: list(self._last.values()), lambda: list(self._launched)):
            for op in ops():
                # Check all, even after a stuck one: `finished` retains the memory of stuck ones.
                if not op.finished(limit_s):
                    # The other collectives have had this time, too.
                    limit_s, drained = 0.0, False
        return drained

    def _no_more(self) -> None:
        self._queue.put(None)

    def _keep_groups(self) -> None:
        """Retain the groups until the process ends: their destructors would wait for the stuck
        call.
        """
        _GIVEN_UP.append(self._group)

    def _exits(self) -> None:
        """Close at the interpreter's exit if close() was not called.

        A thread that returns from a torch call after the exit aborts the process (SIGABRT).
        """
        if self._pid == os.getpid():  # not in a forked child
            # Report a failure first, so that `close` does not wait for collectives that never end.
            self._watchdog.report_exit()
            self.close()

    def _run(self) -> None:
        # A local reference: `close` drops the attribute while this thread may still be in a call.
        group = self._group
        try:
            with self._stream() as stream:
                while (op := self._take()) is not None:
                    self._run_one(op, group, stream)
                    del op  # free its tensors before the next one arrives
        except BaseException as error:
            # The CUDA stream could not be created: fail now, so that submitted work does not wait
            # until its timeout.
            self._watchdog.report_failure(error)
            raise

    def _take(self) -> PendingCollective | None:
        """Return the next collective, or None at the end. Blocks. Called by the stream's thread."""
        return self._queue.get()

    def _run_one(
        self,
        op: PendingCollective,
        group: dist.ProcessGroup | None,
        stream: torch.cuda.Stream | None,
    ) -> None:
        op._begun = True
        while self._launched and self._launched[0].landed:
            self._launched.popleft()
        self._launched.append(op)
        # Before the check for a failure: the reading thread may end the collective, and drop its
        # work, after a failed read.
        work = op._work
        # `finished` reads the failure and then `_begun`; here `_begun` is set and then the failure
        # is read. So work that `finished` has seen as not begun does not run.
        if self._watchdog.failure is not None:
            op._end(self._watchdog.failure)
            return
        # A refused collective ends in its turn, so that the last collective always ends last.
        if op._refused is not None:
            op._end(op._refused)
            return
        assert work is not None, "only a failure ends a collective before it runs"
        try:
            if stream is not None:
                # The CUDA stream waits, not the thread, which can launch the next collective.
                stream.wait_event(op._behind)
            work(group)
            if stream is not None:
                # After the collective's kernels; `wait` makes the compute stream wait for this
                # event.
                op._event = stream.record_event()
        except BaseException as error:  # noqa: BLE001 - raised by PendingCollective.wait
            # The error's traceback refers to this frame, and `work` to the tensors.
            del work
            if stream is not None:
                # Some kernels of the work may be running. A device that has failed refuses the
                # event, and runs no kernels.
                with contextlib.suppress(RuntimeError):
                    op._event = stream.record_event()
            self._fail(op, error)
            return
        op._end()

    def _fail(self, op: PendingCollective, error: BaseException) -> None:
        """End a collective and the engine with this rank's or a peer's error."""
        # A collective raises RuntimeError (or a subclass of torch) whichever rank failed. Any other
        # error is this rank's.
        peer = isinstance(error, RuntimeError) and not isinstance(error, InfinityError)
        if not peer:
            # Set before the failure is reported: `wait` then raises this error, not the failure.
            op._error = error
        failure = self._watchdog.find_culprit(error, op.what, op.number) if peer else None
        if failure is None:
            op._error = error  # before the report, as above
            self._watchdog.report_failure(error)
        else:
            failure.__cause__ = failure.__cause__ or error
        op._end(failure or error)

    @contextlib.contextmanager
    def _stream(self) -> Iterator[torch.cuda.Stream | None]:
        if self._device.type != "cuda":
            yield None
            return
        # The current device is per thread; a new thread starts with device 0.
        torch.cuda.set_device(self._device)
        # This thread queries events, which would invalidate another thread's graph capture.
        relax_capture_mode()
        # A separate CUDA stream: on the compute stream a collective would wait for all kernels.
        stream = torch.cuda.Stream(self._device)
        with torch.cuda.stream(stream):
            yield stream


class OrderedCommStream(CommStream):
    """CommStream with several queues, whose collectives all ranks launch in the same order.

    queues: their names. Rank 0 chooses a queue whose head has its tickets filled on rank 0. The
    other ranks take the head of the same queue, and wait until its tickets are filled on them, too.
    `order_agreement` shows that this cannot deadlock. The ranks compare the collective's name
    (`names.agree`), so all ranks are ready when the first rank launches: no kernel waits on a
    device for another rank's drive.

        reads      waits for tickets of shards
        names      agrees on the next collective, while the previous one still runs
        launches   runs collectives in the agreed order
    """

    def __init__(
        self,
        name: str,
        queues: Sequence[str],
        *,
        group: dist.ProcessGroup | None,
        names: OrderAgreement,
        watchdog: Watchdog,
        device: torch.device = CPU,
    ) -> None:
        self._names = names
        self._order: LaunchOrder[PendingCollective] = LaunchOrder(queues)
        # Guards `_order` and `_ending`; notified when one of these, or the readiness of a
        # collective, changes.
        self._changed = threading.Condition()
        self._ending = False
        self._chosen = 0  # queue of the collective that `_next` returned last
        # Agreed collectives, to be launched in this order; None at the end.
        self._agreed: queue.SimpleQueue[PendingCollective | None] = queue.SimpleQueue()
        # A separate thread, so that the ranks agree on the next collective while one runs.
        self._namer = threading.Thread(
            target=self._agree_on_all, name=f"infinity-comm-{name}-names", daemon=True
        )
        # A separate thread, so that the launching thread does not wait for reads.
        self._reads: queue.SimpleQueue[PendingCollective | None] = queue.SimpleQueue()
        self._reader = threading.Thread(
            target=self._await_reads, name=f"infinity-comm-{name}-reads", daemon=True
        )
        # Wake the waiting thread on failure.
        watchdog.on_failure.append(self._notify)
        super().__init__(name, group=group, watchdog=watchdog, device=device)
        self._reader.start()
        self._namer.start()

    def submit_to(
        self,
        queue_name: str,
        what: str,
        work: Work,
        *,
        needs: Sequence[Ticket] = (),
        excuses: Callable[[AioError], bool] | None = None,
        numbered: bool = True,
    ) -> PendingCollective:
        """Run `work(group)` in this queue's turn, once `needs` are filled. Never blocks on the
        work.

        excuses: as in `PendingCollective`, given on all ranks or on none. numbered: as in `submit`.
        Raises: RankFailed after a failure.
        """
        op = self._make(what, work, numbered, needs, excuses)
        ready = op.ready
        with self._changed:
            self._order.add(queue_name, op)
            # After `add`: if an interrupt comes first, `close` must not wait for a collective that
            # never runs.
            self._last[queue_name] = op
            # On rank 0, if the collective is not ready, the reading thread notifies later; a
            # wake-up now would only compete for the GIL.
            if ready or self._names.parent is not None:
                self._changed.notify_all()
        if not ready:
            self._reads.put(op)
        return op

    def close(self) -> None:
        if self._closed:
            return
        super().close()
        self._reads.put(None)
        # Both threads check for the failure in each wait, so they end unless a call is stuck.
        self._namer.join(GIVE_UP_S)
        self._reader.join(GIVE_UP_S)
        if self._namer.is_alive():
            # The group's destructor would wait for the stuck call.
            _GIVEN_UP.append(self._names)
        if self._notify in self._watchdog.on_failure:
            self._watchdog.on_failure.remove(self._notify)

    def _no_more(self) -> None:
        with self._changed:
            self._ending = True
            self._changed.notify_all()

    def _keep_groups(self) -> None:
        super()._keep_groups()
        _GIVEN_UP.append(self._names)

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    # -- the thread that launches ------------------------------------------------------------------

    def _take(self) -> PendingCollective | None:
        return self._agreed.get()

    # -- the thread that names ---------------------------------------------------------------------

    def _agree_on_all(self) -> None:
        while (op := self._next()) is not None:
            try:
                if self._watchdog.failure is None:
                    # The tickets are filled; this raises or returns the fault of a read.
                    fault = op.await_needs()
                    lacks = None if op.excuses is None else fault is not None
                    if self._names.agree(self._chosen, op.what, lacks=lacks):
                        op.refuse(fault)
            except BaseException as error:  # noqa: BLE001 - raised by PendingCollective.wait
                self._fail(op, error)
            else:
                # Also after a failure: the launching thread then ends `op` without running it.
                self._agreed.put(op)
            del op  # free its tensors before the next one arrives
        self._agreed.put(None)

    def _next(self) -> PendingCollective | None:
        """Return the next collective for all ranks; None at the end."""
        while True:
            with self._changed:
                self._await(lambda: len(self._order) > 0 or self._ending)
                if self._watchdog.failure is not None or not len(self._order):
                    # After a failure the launching thread ends each collective without running it.
                    return self._pop_oldest()
            # Receive only when this rank has work queued: the receive times out, and rank 0 may be
            # idle indefinitely.
            chosen = self._choose() if self._names.parent is None else self._follow()
            if chosen is not None:
                self._chosen = chosen
                with self._changed:
                    return self._order.pop(chosen)

    def _choose(self) -> int | None:
        """Wait until a head is ready on this rank. Returns its queue; None after a failure."""
        with self._changed:
            self._await(lambda: self._order.choose(_is_ready) is not None)
            return None if self._watchdog.failure else self._order.choose(_is_ready)

    def _follow(self) -> int | None:
        """Receive rank 0's choice, and wait until that queue's head is ready here. Returns the
        queue; None after a failure.
        """
        try:
            queue_index = self._names.follow()
        except BaseException as error:  # noqa: BLE001 - raised by PendingCollective.wait
            with self._changed:
                op = self._pop_oldest()
            assert op is not None, "follow() is called only with a collective in a queue"
            self._fail(op, error)
            return None

        def head_is_ready() -> bool:
            head = self._order.head(queue_index)
            return head is not None and head.ready

        with self._changed:
            self._await(head_is_ready)
        return None if self._watchdog.failure else queue_index

    def _await(self, holds: Callable[[], bool]) -> None:
        """Wait until `holds()` is true, or a rank has failed. The caller holds the lock."""
        while not holds() and self._watchdog.failure is None:
            self._changed.wait(_POLL_S)

    def _pop_oldest(self) -> PendingCollective | None:
        oldest = self._order.oldest()
        return None if oldest is None else self._order.pop(oldest)

    # -- the thread that waits for reads -----------------------------------------------------------

    def _await_reads(self) -> None:
        while (op := self._reads.get()) is not None:
            try:
                # An excused fault is sent to the other ranks in the collective's turn.
                op.await_needs(check=self._watchdog.check)
            except RankFailed:
                # The engine has failed; the launching thread ends the queued collectives.
                pass
            except BaseException as error:  # noqa: BLE001 - raised by PendingCollective.wait
                # At once, because rank 0 may soon wait for this rank.
                self._fail(op, error)
            self._notify()
            del op  # free its tensors before the next one arrives


def _is_ready(op: PendingCollective) -> bool:
    return op.ready
