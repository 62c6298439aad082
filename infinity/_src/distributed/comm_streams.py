"""Communication streams: collectives that run beside the main thread, in an order that is the same
on all ranks.

    CommStream          submit ──► queue ──► its thread: work(group), one by one ──► Pending...
    OrderedCommStream   submit ──► several queues ──► one thread: the head that rank 0 names ──► one
                        thread: work(group), one by one ──► Pending...

Each communication stream has its own thread and process group, so a stream that waits holds no
other stream up. Every rank must submit the same collectives to the same queue in the same order.
After a failure nothing more runs, groups are aborted (`process_groups.abort_groups`), and every
call raises the first failure.

A gather may be *excused* on a rank whose update failed: the shard that it needs is not there. The
ranks tell each other so (`order_agreement`), and no rank runs the gather. On all ranks it ends with
`CollectiveRefused` in its turn, and the stream continues with the next collective.

Two communication streams must not both launch on a GPU: NCCL requires that all ranks launch the
collectives of all communicators in one order, and independent threads have no common order. So
every collective on tensors of the device goes through one `OrderedCommStream` and one communicator,
over gloo as well.
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
# A call whose group was aborted returns at once, unless it is stuck in the backend.
GIVE_UP_S = 5.0
# A thread that waits for a change looks at the failure again after this long.
_POLL_S = 0.25
# Memory that stuck calls may still write into, kept for as long as the process lives.
_GIVEN_UP: list[object] = []

CPU = torch.device("cpu")


class CollectiveRefused(InfinityError, RuntimeError):
    """A collective that no rank has run, since one of them lacks what it needs; raised by
    `PendingCollective.wait` on all ranks. The ranks continue."""


class DeviceEvent:
    """CUDA event that can be waited for with a limit, as `threading.Event` can.

    `synchronize` has none: behind a kernel of NCCL whose peer has died it would never return.
    """

    def __init__(self, event: Any) -> None:
        self._event = event

    def is_set(self) -> bool:
        """Return whether the device has come to the event. Does not block."""
        try:
            return bool(self._event.query())
        except RuntimeError:
            # The device has failed for good, so that nothing runs there any more.
            return True

    def wait(self, timeout: float) -> bool:
        """Block until the device has come to the event, at most `timeout` seconds. Returns whether
        it has.
        """
        end_s, pause_s = time.monotonic() + timeout, 20e-6
        while not self.is_set():
            left_s = end_s - time.monotonic()
            if left_s <= 0:
                return False
            time.sleep(min(pause_s, left_s))
            # Short at first, since most waits are; a thread that polls for long must not cost.
            pause_s = min(2 * pause_s, 2e-3)
        return True


class PendingCollective:
    """One collective in a communication stream: a handle to wait for it, as `Work` is in
    torch.distributed.

    needs: tickets that must be filled before it is launched. excuses: whether a fault of theirs
    lets all ranks leave the collective out, asked in another thread; None: it ends the engine.
    behind: CUDA event of the submitting stream, after which the input of `work` is complete.
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
        """True once the work has ended, well or not; on CUDA, once launched. Does not block."""
        return self._done.is_set()

    @property
    def ready(self) -> bool:
        """True once it can be launched as far as this rank goes. Does not block."""
        return all(ticket.filled for ticket in self.needs)

    def await_needs(self, *, check: Callable[[], None] | None = None) -> AioError | None:
        """Block until what it needs of this rank is there. Returns the fault that keeps it away,
        where that is excused.

        check: called meanwhile; what it raises ends the wait. Raises: AioError.
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
        """True once it is known that no rank runs it. Does not block."""
        return self._refused is not None

    def refuse(self, fault: AioError | None) -> None:
        """Note that no rank runs it. fault: what this rank lacks its shard for, if it does."""
        self._refused = CollectiveRefused(
            f"{self.what} is run by no rank, since one lacks its shard"
        )
        self._refused.__cause__ = fault

    def wait(self) -> None:
        """Block until it is done; on CUDA, until the device's current stream is behind it.

        Raises: the work's own error if it failed on this rank; CollectiveRefused; RankFailed if a
            rank does not come, or after any failure.
        """
        error: BaseException | None = None
        try:
            self._watchdog.wait(self._done, self.what, self.number)
        except RankFailed as failure:
            error = failure
        # This rank's own error says more than the failure that follows from it. `_run_one` sets the
        # error before it reports the failure, so it is there by now.
        error = self._error or error
        if error is not None:
            # One exception is raised many times: its traceback would grow, and hold frames.
            raise error.with_traceback(None)
        if self._event is not None:
            # The stream waits, not the thread: `done` means launched, and kernels that read the
            # result are queued behind it.
            # Of the model's device: another one may be current in this thread.
            torch.cuda.current_stream(self._device).wait_event(self._event)
            # Memory that is used or freed from here on is behind the kernels in this stream.
            self._work = None

    @property
    def landed(self) -> bool:
        """True once nothing writes into the work's memory any more. Does not block."""
        return self.done and (self._event is None or DeviceEvent(self._event).is_set())

    def finished(self, limit_s: float | None = None) -> bool:
        """Block until nothing writes into the work's memory any more. Raises nothing of the work's.

        Returns False where that cannot be had: after a failure the call is stuck. The work's
        tensors are then kept until the process ends. The caller must keep memory of any other kind,
        such as a mapping that it was about to unmap. limit_s: after a failure the call is taken for
        stuck after so long; None: after GIVE_UP_S.
        """
        limit_s = GIVE_UP_S if limit_s is None else limit_s
        # The caller wants its memory back, whatever became of the collective.
        with contextlib.suppress(RankFailed):
            self._watchdog.wait(self._done, self.what, self.number)
        if not self._begun:
            # After a failure it will not begin, either: the communication stream runs nothing more.
            return True
        if not self._done.wait(limit_s):
            return self._give_up()
        if self._event is not None:
            # On CUDA `done` means launched: the kernel may still write.
            landed = DeviceEvent(self._event)
            with contextlib.suppress(RankFailed):
                self._watchdog.wait(landed, self.what, self.number)
            # The groups are aborted at a failure, which ends the kernel, unless that is stuck, too.
            if not landed.wait(limit_s):
                return self._give_up()
            self._work = None
        return True

    def _give_up(self) -> bool:
        # None if it has ended meanwhile: then there is nothing to keep.
        work = self._work
        if work is not None:
            log.warning("%s is stuck; its memory is kept until the process ends", self.what)
            _GIVEN_UP.append(work)
        return False

    def _end(self, error: BaseException | None = None) -> None:
        if self._done.is_set():
            # A read that failed has ended it, beside the thread that launches.
            return
        # An error that was set before the failure was reported says more than the failure.
        self._error = self._error or error
        if self._event is None:
            # Dropped here, so that a PendingCollective that is kept holds no tensors. On CUDA its
            # kernels may still run, and `wait` or `finished` drops it.
            self._work = None
        self._done.set()


class CommStream:
    """A daemon thread that runs collectives in a process group of its own.

    group: of this communication stream alone; who makes it aborts it at a failure. device: of the
    tensors. On CUDA, work runs on a CUDA stream that belongs to it, behind what the submitting
    thread's stream held at submission.
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
        # First in, first out: the order of the program, which is the same on every rank.
        self._queue: queue.SimpleQueue[PendingCollective | None] = queue.SimpleQueue()
        self._closed = False
        # Of each queue. First in, first out: when the last one has ended, all have. After a failure
        # the last ones may never begin, while one before them still runs.
        self._last: dict[str, PendingCollective] = {}
        self._launched: deque[PendingCollective] = deque()  # those that may still run
        # A forked child inherits the object and the exit callback, but not the thread.
        self._pid = os.getpid()
        atexit.register(self._exits)
        # A daemon: the interpreter must be able to end while a call is stuck in the backend.
        self._thread = threading.Thread(target=self._run, name=f"infinity-comm-{name}", daemon=True)
        self._thread.start()

    def submit(self, what: str, work: Work, *, numbered: bool = True) -> PendingCollective:
        """Run `work(group)` after everything submitted before. Does not block.

        numbered: count it among the main thread's collectives, by which the watchdog knows which
        ranks have not come. For the main thread only: the numbers follow the order of the program.
        Raises: RankFailed after a failure.
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
        # Nothing is queued after a failure: the other ranks would never come to it.
        self._watchdog.check()
        assert not self._closed, f"communication stream {self.name} is closed"
        # Numbered at submission, in the main thread: communication streams run beside each other.
        number = self._watchdog.next_number(what) if numbered else None
        behind = (
            # The submitting stream's work up to here makes the input of `work`: the communication
            # stream waits for no more.
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
        """Wait for what was submitted, and end the thread. Idempotent.

        Returns at once after a failure, and does not raise it.
        """
        if self._closed:
            return
        self._closed = True
        # The exit callback would keep the communication stream alive.
        atexit.unregister(self._exits)
        # The thread ends after everything that was submitted before.
        self._no_more()
        # A stuck call would never return: its thread is given up, not joined.
        self._thread.join(GIVE_UP_S if self.drain() else 0.0)
        if self._thread.is_alive():
            self._keep_groups()
        self._group = None
        self._last.clear()
        self._launched.clear()

    @property
    def on_device(self) -> bool:
        """True where its work runs on a stream of a device."""
        return self._device.type == "cuda"

    def drain(self) -> bool:
        """Block until nothing that was submitted is under way, on the device either.

        Returns False where that cannot be had: after a failure something is stuck.
        """
        limit_s, drained = GIVE_UP_S, True
        # The last ones first: nothing begins behind them. Then each that was launched before, a
        # copy of them, which the thread that launches cannot change.
        for ops in (lambda: list(self._last.values()), lambda: list(self._launched)):
            for op in ops():
                # Also where an earlier one is stuck: a stuck call holds memory.
                if not op.finished(limit_s):
                    # What is behind it has had its time, too.
                    limit_s, drained = 0.0, False
        return drained

    def _no_more(self) -> None:
        self._queue.put(None)

    def _keep_groups(self) -> None:
        """Keep the groups until the process ends: destructors would wait for the stuck call."""
        _GIVEN_UP.append(self._group)

    def _exits(self) -> None:
        """Close at the interpreter's exit, where close() was not called.

        A thread that returns from a call into torch after the exit ends the process by SIGABRT.
        """
        if self._pid == os.getpid():  # a forked child has no such thread
            # First: after a failure `close` does not wait for collectives that may never end.
            self._watchdog.report_exit()
            self.close()

    def _run(self) -> None:
        # Taken once: `close` drops the attribute while this thread may still be in a call.
        group = self._group
        try:
            with self._stream() as stream:
                while (op := self._take()) is not None:
                    self._run_one(op, group, stream)
                    del op  # its tensors would be kept until the next one comes
        except BaseException as error:
            # No stream was to be had: else all that is submitted would wait until its timeout.
            self._watchdog.report_failure(error)
            raise

    def _take(self) -> PendingCollective | None:
        """Return what runs next, and None at the end. Blocks. Called by the communication stream's
        thread."""
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
        # Before the failure is looked at: a read that fails ends the collective beside this thread.
        work = op._work
        # `finished` looks at the failure first, and at `_begun` then. In this order here, work that
        # it found not begun sees the failure, and does not run.
        if self._watchdog.failure is not None:
            op._end(self._watchdog.failure)
            return
        # Ended here and not where it was refused: the end of the last one is the end of all.
        if op._refused is not None:
            op._end(op._refused)
            return
        assert work is not None, "only a failure ends what has not run"
        try:
            if stream is not None:
                # The CUDA stream waits, not the thread: the thread can launch
                # the next one.
                stream.wait_event(op._behind)
            work(group)
            if stream is not None:
                # Behind the collective's kernels: `wait` puts the compute stream behind it.
                op._event = stream.record_event()
        except BaseException as error:  # noqa: BLE001 - raised by PendingCollective.wait
            # The traceback holds this frame, and `work` holds tensors.
            del work
            if stream is not None:
                # Some of the work's kernels may run. A device that has failed refuses the event,
                # and runs nothing any more.
                with contextlib.suppress(RuntimeError):
                    op._event = stream.record_event()
            self._fail(op, error)
            return
        op._end()

    def _fail(self, op: PendingCollective, error: BaseException) -> None:
        """End a collective, and with it the engine, with the error of this rank or of a peer."""
        # Collectives raise a plain RuntimeError (or one of torch's subclasses), whichever rank
        # failed. Any other error is this rank's own.
        peer = isinstance(error, RuntimeError) and not isinstance(error, InfinityError)
        if not peer:
            # Before the failure is known: a waiting thread would raise the failure instead of it.
            op._error = error
        failure = self._watchdog.find_culprit(error, op.what, op.number) if peer else None
        if failure is None:
            # First: a waiting thread raises this error, and not the one that is published.
            op._error = error
            self._watchdog.report_failure(error)
        else:
            failure.__cause__ = failure.__cause__ or error
        op._end(failure or error)

    @contextlib.contextmanager
    def _stream(self) -> Iterator[torch.cuda.Stream | None]:
        if self._device.type != "cuda":
            yield None
            return
        # The current device is the thread's own, and a new thread begins with device 0.
        torch.cuda.set_device(self._device)
        # It asks events, which would break a graph that another thread captures.
        relax_capture_mode()
        # A CUDA stream apart: on the compute stream a collective would wait for
        # all of the compute.
        stream = torch.cuda.Stream(self._device)
        with torch.cuda.stream(stream):
            yield stream


class OrderedCommStream(CommStream):
    """CommStream with several queues, whose collectives one thread launches in one order on all
    ranks.

    queues: their names. A collective is named when it is the head of its queue, what it needs on
    this rank is there, and rank 0 names its queue; `order_agreement` says why that never ends in a
    deadlock. The names of collectives are compared on the way (`names.agree`), so that all ranks
    are ready when the first one launches: no kernel waits on a device for a drive of another rank.

        reads      waits for shards of weights
        names      agrees on the next collective, while the one before still runs
        launches   runs them, in the order that was agreed on
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
        # Guards `_order` and `_ending`; notified when one of them, or readiness, changes.
        self._changed = threading.Condition()
        self._ending = False
        self._chosen = 0  # the queue of the collective that `_next` has returned last
        # Agreed on by all ranks, to be launched in this order; None at the end.
        self._agreed: queue.SimpleQueue[PendingCollective | None] = queue.SimpleQueue()
        # Agrees beside the launches: the ranks' names travel while a collective runs.
        self._namer = threading.Thread(
            target=self._agree_on_all, name=f"infinity-comm-{name}-names", daemon=True
        )
        # Waits for reads, so that the thread that launches never waits for one alone.
        self._reads: queue.SimpleQueue[PendingCollective | None] = queue.SimpleQueue()
        self._reader = threading.Thread(
            target=self._await_reads, name=f"infinity-comm-{name}-reads", daemon=True
        )
        # It may wait for a change that no rank will make.
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
        """Run `work(group)` in this queue's turn, once `needs` are filled. Does not block.

        excuses: as in `PendingCollective`, given on all ranks or on none. numbered: as in `submit`.
        Raises: RankFailed after a failure.
        """
        op = self._make(what, work, numbered, needs, excuses)
        ready = op.ready
        with self._changed:
            self._order.add(queue_name, op)
            # After it: an interrupt must not leave one for `close` to wait for that never runs.
            self._last[queue_name] = op
            # Another thread for nothing costs more than it seems while this one holds the GIL. On
            # rank 0 the thread that waits for reads will wake it.
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
        # They look at the failure in each wait, so they end unless a call is stuck.
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
        """Agree with the other ranks on one collective after the other."""
        while (op := self._next()) is not None:
            try:
                if self._watchdog.failure is None:
                    # Filled by now. Raises the fault of a read.
                    fault = op.await_needs()
                    lacks = None if op.excuses is None else fault is not None
                    if self._names.agree(self._chosen, op.what, lacks=lacks):
                        op.refuse(fault)
            except BaseException as error:  # noqa: BLE001 - raised by PendingCollective.wait
                self._fail(op, error)
            else:
                # After a failure, too: the thread that launches ends it, and does not run it.
                self._agreed.put(op)
            del op  # its tensors would be kept until the next one comes
        self._agreed.put(None)

    def _next(self) -> PendingCollective | None:
        """Return the collective that all ranks launch next; None at the end."""
        while True:
            with self._changed:
                self._await(lambda: len(self._order) > 0 or self._ending)
                if self._watchdog.failure is not None or not len(self._order):
                    # After a failure each one is ended, and not run.
                    return self._pop_oldest()
            # A rank asks for a name only with something to launch: rank 0 may be idle for as long
            # as it likes, and a receive has a limit.
            chosen = self._choose() if self._names.parent is None else self._follow()
            if chosen is not None:
                self._chosen = chosen
                with self._changed:
                    return self._order.pop(chosen)

    def _choose(self) -> int | None:
        """Wait for a head that is ready here, and return its queue; None after a failure."""
        with self._changed:
            self._await(lambda: self._order.choose(_is_ready) is not None)
            return None if self._watchdog.failure else self._order.choose(_is_ready)

    def _follow(self) -> int | None:
        """Wait for the queue that is named, and for its head here; None after a failure."""
        try:
            queue_index = self._names.follow()
        except BaseException as error:  # noqa: BLE001 - raised by PendingCollective.wait
            with self._changed:
                op = self._pop_oldest()
            assert op is not None, "asked without anything to launch"
            self._fail(op, error)
            return None

        def has_come() -> bool:
            head = self._order.head(queue_index)
            return head is not None and head.ready

        with self._changed:
            self._await(has_come)
        return None if self._watchdog.failure else queue_index

    def _await(self, holds: Callable[[], bool]) -> None:
        """Wait until it holds, or for a failure. The lock is held."""
        while not holds() and self._watchdog.failure is None:
            self._changed.wait(_POLL_S)

    def _pop_oldest(self) -> PendingCollective | None:
        oldest = self._order.oldest()
        return None if oldest is None else self._order.pop(oldest)

    # -- the thread that waits for reads -----------------------------------------------------------

    def _await_reads(self) -> None:
        while (op := self._reads.get()) is not None:
            try:
                # An excused fault is told to the others in the collective's turn.
                op.await_needs(check=self._watchdog.check)
            except RankFailed:
                # The engine has ended; the other thread ends what is in the queues.
                pass
            except BaseException as error:  # noqa: BLE001 - raised by PendingCollective.wait
                # At once: rank 0 may be about to wait for this rank.
                self._fail(op, error)
            self._notify()
            del op  # its tensors would be kept until the next one comes


def _is_ready(op: PendingCollective) -> bool:
    return op.ready
