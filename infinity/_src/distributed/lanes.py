"""Lanes: collectives that run beside the main thread, in the order in which they were submitted.

    submit ──► queue ──► the lane's thread: work(group), one after the other ──► Op

Each lane has a thread and a process group of its own, so that what one lane waits for holds no other up. Every rank must submit
the same to the same lane in the same order. After a failure nothing more runs, the group is broken off, and everything raises
what failed first.
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
GIVE_UP_S = 5.0
# What stuck calls may still write into, kept for as long as the process lives.
_GIVEN_UP: list[object] = []


class Op:
    """One piece of work in a lane, and what came of it."""

    def __init__(self, what: str, number: int | None, work: Work, watchdog: Watchdog, ready: Any = None) -> None:
        self.what = what
        self.number = number
        self._work: Work | None = work
        self._watchdog = watchdog
        self._ready = ready
        """CUDA event after which the device has what `work` reads."""
        self._event: Any = None
        self._error: BaseException | None = None
        self._done = threading.Event()
        self._begun = False

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not; on CUDA, whether it has been handed to the device. Does not block."""
        return self._done.is_set()

    def wait(self) -> None:
        """Block until it is done; on CUDA, until the current stream is behind it.

        Raises: the work's own error if it failed on this rank; RankFailed if a rank does not come, or after any failure.
        """
        error: BaseException | None = None
        try:
            self._watchdog.wait(self._done, self.what, self.number)
        except RankFailed as failure:
            error = failure
        error = self._error or error
        if error is not None:
            raise error.with_traceback(None)
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)

    def finished(self) -> bool:
        """Block until nothing writes into the work's memory any more; raises nothing of the work's.

        Returns False where that cannot be had: after a failure the call is stuck. Its memory is then kept until the process
        ends, and what cannot be kept (a mapping that is about to go) must not go.
        """
        with contextlib.suppress(RankFailed):
            self._watchdog.wait(self._done, self.what, self.number)
        if not self._begun:
            return True  # nor will it, behind one that is stuck
        if not self._done.wait(GIVE_UP_S):
            work = self._work
            if work is not None:
                log.warning("%s is stuck; its memory is kept until the process ends", self.what)
                _GIVEN_UP.append(work)
            return False
        if self._event is not None:
            self._event.synchronize()
        return True

    def _end(self, error: BaseException | None = None) -> None:
        self._error = error
        self._work = None
        self._done.set()


class Lane:
    """A daemon thread that runs collectives in a process group of its own.

    group: of this lane alone; `groups.make_group` makes one that can be broken off. beside: another that work uses. device: of
    the tensors; on CUDA, work runs under a stream of the lane's, after what the submitting thread's stream held when it was
    submitted.
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
        self._queue: queue.SimpleQueue[Op | None] = queue.SimpleQueue()
        self._closed = False
        self._last: Op | None = None
        self._pid = os.getpid()
        watchdog.on_failure.append(self._break_off)
        atexit.register(self._exits)
        self._thread = threading.Thread(target=self._run, name=f"infinity-lane-{name}", daemon=True)
        self._thread.start()

    def submit(self, what: str, work: Work, *, numbered: bool = True) -> Op:
        """Run `work(group)` after everything submitted before. Does not block.

        numbered: counted among the main thread's collectives, by which it is known who has not come; only for the main thread.
        Raises: RankFailed after a failure.
        """
        assert not self._closed, f"lane {self.name} is closed"
        self._watchdog.check()
        number = self._watchdog.next_number(what) if numbered else None
        ready = (
            torch.cuda.current_stream(self._device).record_event() if self._device.type == "cuda" else None
        )
        op = self._last = Op(what, number, work, self._watchdog, ready)
        self._queue.put(op)
        return op

    def close(self) -> None:
        """Wait for what was submitted, and end the thread; at once after a failure, which is not raised. May be called again."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self._exits)
        self._queue.put(None)
        left = self._last is None or self._last.finished()
        self._thread.join(GIVE_UP_S if left else 0.0)
        if self._thread.is_alive():
            _GIVEN_UP.extend((self._group, self._beside))  # their destructors would wait for the stuck call
        if self._break_off in self._watchdog.on_failure:
            self._watchdog.on_failure.remove(self._break_off)
        self._group = self._beside = self._last = None

    def _exits(self) -> None:
        """At the interpreter's exit, without close(): a thread that returns from a call into torch after that ends the process
        by SIGABRT."""
        if self._pid == os.getpid():
            self._watchdog.report_exit()
            self.close()

    def _break_off(self) -> None:
        """Called by the watch's thread. The group of gloo comes first, and by itself: abort() of NCCL may raise, or hang."""
        for group in (self._beside, self._group):
            try:
                if group is not None and not abort_group(group):
                    log.debug("lane %s cannot be broken off", self.name)
            except Exception:  # the other is to be broken off all the same
                log.exception("lane %s: one of its groups cannot be broken off", self.name)

    def _run(self) -> None:
        group = self._group
        with self._stream() as stream:
            while (op := self._queue.get()) is not None:
                self._run_one(op, group, stream)
                del op  # what it holds is not kept until the next one comes

    def _run_one(self, op: Op, group: dist.ProcessGroup | None, stream: Any) -> None:
        work = op._work
        assert work is not None
        op._begun = True
        if self._watchdog.failure is not None:  # the order matters: `finished` looks at both the other way round
            op._end(self._watchdog.failure)
            return
        try:
            if stream is not None:
                stream.wait_event(op._ready)
            work(group)
            if stream is not None:
                op._event = stream.record_event()
        except BaseException as error:  # noqa: BLE001 - raised by Op.wait
            del work
            # Collectives raise plain RuntimeError (or torch's subclasses) whoever failed; other errors are this rank's.
            peer = isinstance(error, RuntimeError) and not isinstance(error, InfinityError)
            if not peer:  # or one who waits, and hears of a failure first, would raise what breaking off made of it
                op._error = error
            failure = self._watchdog.find_culprit(error, op.what, op.number) if peer else None
            if failure is None:
                op._error = error  # first: who waits is to have this, and not what the others are told
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
        torch.cuda.set_device(self._device)
        stream = torch.cuda.Stream(self._device)
        with torch.cuda.stream(stream):
            yield stream
