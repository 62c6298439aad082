"""Lanes: collectives that run beside the main thread, in the order of their submission.

    submit ──► queue ──► the lane's thread: work(group), one by one ──► PendingCollective

Each lane has a thread and a process group of its own, so that one lane that waits holds no other
up. Every rank must submit the same to the same lane in the same order. After a failure nothing more
runs, the group is aborted, and everything raises the first failure.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from infinity._src.distributed.process_groups import abort_group
from infinity._src.distributed.watchdog import Watchdog
from infinity.errors import InfinityError, RankFailed

log = logging.getLogger("infinity")

Work = Callable[[Any], None]
# A call whose group was aborted returns at once, unless it is stuck in the backend.
GIVE_UP_S = 5.0
# Memory that stuck calls may still write into, kept for as long as the process lives.
_GIVEN_UP: list[object] = []


class PendingCollective:
    """One collective in a lane: a handle to wait for it, as `Work` is in torch.distributed."""

    def __init__(
        self, what: str, number: int | None, work: Work, watchdog: Watchdog, ready: Any = None
    ) -> None:
        self.what = what
        self.number = number
        self._work: Work | None = work
        self._watchdog = watchdog
        self._ready = ready
        """CUDA event of the submitting stream: the input of `work` is complete after it."""
        self._event: Any = None
        self._error: BaseException | None = None
        self._done = threading.Event()
        self._begun = False

    @property
    def done(self) -> bool:
        """True once the work has ended, well or not; on CUDA, once launched. Does not block."""
        return self._done.is_set()

    def wait(self) -> None:
        """Block until it is done; on CUDA, until the current stream is behind it.

        Raises: the work's own error if it failed on this rank; RankFailed if a rank does not come,
            or after any failure.
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
            torch.cuda.current_stream(self._event.device).wait_event(self._event)

    def finished(self) -> bool:
        """Block until nothing writes into the work's memory any more. Raises nothing of the work's.

        Returns False where that cannot be had: after a failure the call is stuck. The work's
        tensors are then kept until the process ends. The caller must keep memory of any other kind,
        such as a mapping that it was about to unmap.
        """
        # The caller wants its memory back, whatever became of the collective.
        with contextlib.suppress(RankFailed):
            self._watchdog.wait(self._done, self.what, self.number)
        if not self._begun:
            # After a failure it will not begin, either: the lane runs nothing more.
            return True
        if not self._done.wait(GIVE_UP_S):
            # None if it has ended meanwhile: then there is nothing to keep.
            work = self._work
            if work is not None:
                log.warning("%s is stuck; its memory is kept until the process ends", self.what)
                _GIVEN_UP.append(work)
            return False
        if self._event is not None:
            # On CUDA `done` means launched: the kernel may still write.
            self._event.synchronize()
        return True

    def _end(self, error: BaseException | None = None) -> None:
        self._error = error
        # Dropped here, so that a PendingCollective that is kept holds no tensors.
        self._work = None
        self._done.set()


class Lane:
    """A daemon thread that runs collectives in a process group of its own.

    group: of this lane alone; `process_groups.make_group` makes one that can be aborted.
    beside: a second group that work uses, aborted with it.
    device: of the tensors. On CUDA, work runs on a stream of the lane, behind what the submitting
    thread's stream held at submission.
    """

    def __init__(
        self,
        name: str,
        *,
        group: dist.ProcessGroup | None,
        watchdog: Watchdog,
        device: torch.device = torch.device("cpu"),  # noqa: B008
        beside: dist.ProcessGroup | None = None,
    ) -> None:
        self.name = name
        self._group = group
        self._beside = beside
        self._watchdog = watchdog
        self._device = device
        # First in, first out: the order of the program, which is the same on every rank.
        self._queue: queue.SimpleQueue[PendingCollective | None] = queue.SimpleQueue()
        self._closed = False
        # First in, first out: when the last one has ended, all have.
        self._last: PendingCollective | None = None
        # A forked child inherits the object and the exit callback, but not the thread.
        self._pid = os.getpid()
        # The failure must reach a lane that is stuck in its backend, and cannot look at it itself.
        watchdog.on_failure.append(self._break_off)
        atexit.register(self._exits)
        # A daemon: the interpreter must be able to end while a call is stuck in the backend.
        self._thread = threading.Thread(target=self._run, name=f"infinity-lane-{name}", daemon=True)
        self._thread.start()

    def submit(self, what: str, work: Work, *, numbered: bool = True) -> PendingCollective:
        """Run `work(group)` after everything submitted before. Does not block.

        numbered: count it among the main thread's collectives, by which the watchdog knows which
        ranks have not come. For the main thread only: the numbers follow the order of the program.
        Raises: RankFailed after a failure.
        """
        assert not self._closed, f"lane {self.name} is closed"
        # Nothing is queued after a failure: the other ranks would never come to it.
        self._watchdog.check()
        # Numbered at submission, in the main thread: lanes run beside each other.
        number = self._watchdog.next_number(what) if numbered else None
        ready = (
            # The submitting stream's work up to here makes the input of `work`: the lane waits for
            # no more.
            torch.cuda.current_stream(self._device).record_event()
            if self._device.type == "cuda"
            else None
        )
        op = self._last = PendingCollective(what, number, work, self._watchdog, ready)
        self._queue.put(op)
        return op

    def close(self) -> None:
        """Wait for what was submitted, and end the thread. Idempotent.

        Returns at once after a failure, and does not raise it.
        """
        if self._closed:
            return
        self._closed = True
        # The exit callback would keep the lane alive.
        atexit.unregister(self._exits)
        # The thread ends after everything that was submitted before.
        self._queue.put(None)
        left = self._last is None or self._last.finished()
        # A stuck call would never return: its thread is given up, not joined.
        self._thread.join(GIVE_UP_S if left else 0.0)
        if self._thread.is_alive():
            # The groups' destructors would wait for the stuck call.
            _GIVEN_UP.extend((self._group, self._beside))
        # The watchdog outlives some lanes (those that make groups), and must not call them then.
        if self._break_off in self._watchdog.on_failure:
            self._watchdog.on_failure.remove(self._break_off)
        self._group = self._beside = self._last = None

    def _exits(self) -> None:
        """Close at the interpreter's exit, where nobody has called close().

        A thread that returns from a call into torch after the exit ends the process by SIGABRT.
        """
        if self._pid == os.getpid():  # a forked child has no such thread
            # First: after a failure `close` does not wait for collectives that may never end.
            self._watchdog.report_exit()
            self.close()

    def _break_off(self) -> None:
        """Abort the lane's groups; the watchdog's thread calls this at the first failure."""
        # The gloo group comes first, and by itself: abort() of NCCL may raise, or hang.
        for group in (self._beside, self._group):
            try:
                if group is not None and not abort_group(group):
                    log.debug("lane %s cannot be broken off", self.name)
            # The other group is aborted all the same.
            except Exception:
                log.exception("lane %s: one of its groups cannot be broken off", self.name)

    def _run(self) -> None:
        # Taken once: `close` drops the attribute while this thread may still be in a call.
        group = self._group
        with self._stream() as stream:
            while (op := self._queue.get()) is not None:
                self._run_one(op, group, stream)
                del op  # its tensors would be kept until the next one comes

    def _run_one(self, op: PendingCollective, group: dist.ProcessGroup | None, stream: Any) -> None:
        work = op._work
        assert work is not None
        op._begun = True
        # `finished` looks at the failure first, and at `_begun` then. In this order here, work that
        # it found not begun sees the failure, and does not run.
        if self._watchdog.failure is not None:
            op._end(self._watchdog.failure)
            return
        try:
            if stream is not None:
                # The lane's stream, not its thread, waits: the thread can launch the next one.
                stream.wait_event(op._ready)
            work(group)
            if stream is not None:
                # Behind the collective's kernels: `Op.wait` puts the compute stream behind it.
                op._event = stream.record_event()
        except BaseException as error:  # noqa: BLE001 - raised by PendingCollective.wait
            # The traceback holds this frame, and `work` holds tensors.
            del work
            # Collectives raise a plain RuntimeError (or one of torch's subclasses), whichever rank
            # failed. Any other error is this rank's own.
            peer = isinstance(error, RuntimeError) and not isinstance(error, InfinityError)
            if not peer:
                # Before the failure is known: a waiting thread would raise the failure instead of
                # it.
                op._error = error
            failure = self._watchdog.find_culprit(error, op.what, op.number) if peer else None
            if failure is None:
                # First: a waiting thread raises this error, and not the one that is published.
                op._error = error
                self._watchdog.report_failure(error)
            else:
                failure.__cause__ = failure.__cause__ or error
            op._end(failure or error)
            return
        op._end()

    @contextlib.contextmanager
    def _stream(self) -> Iterator[Any]:
        if self._device.type != "cuda":
            yield None
            return
        # The current device is the thread's own, and a new thread begins with device 0.
        torch.cuda.set_device(self._device)
        # A stream of the lane: on the compute stream a collective would wait for all of the
        # compute.
        stream = torch.cuda.Stream(self._device)
        with torch.cuda.stream(stream):
            yield stream
