"""The Python executor's threads: some per drive that move bytes, and workers that verify, update and copy.

An exception never ends one of them: it fails the jobs that were being worked on, is logged with its traceback, and the
thread goes on.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections.abc import Sequence

from infinity.aio.python_engine import Engine
from infinity.aio.python_pass import PASSED, run_pass
from infinity.aio.python_promote import shut_down
from infinity.aio.python_records import FAULT_BROKEN, BrokenRecord, Run, State

log = logging.getLogger("infinity.aio")
CANCEL_S = 30.0


class Threads:
    """The threads of one engine, running. Raises OSError when the system gives no more."""

    def __init__(self, engine: Engine, *, workers: int, per_drive: int) -> None:
        self._engine = engine
        names = [
            (f"infinity-aio-drive-{index}", _drive_main, (engine, index))
            for index in range(len(engine.lanes))
        ]
        self._threads = [
            threading.Thread(target=main, args=arguments, name=f"{name}-{number}", daemon=True)
            for name, main, arguments in names
            for number in range(per_drive)
        ]
        self._threads += [
            threading.Thread(
                target=_worker_main, args=(engine,), name=f"infinity-aio-worker-{number}", daemon=True
            )
            for number in range(workers)
        ]
        try:
            for thread in self._threads:
                thread.start()
        except RuntimeError as error:
            self._threads = [thread for thread in self._threads if thread.ident is not None]
            self.end(drain=False)
            raise OSError(
                errno.EAGAIN, f"cannot start the threads of the Python executor: {error}"
            ) from error

    def end(self, *, drain: bool) -> bool:
        """Run what is pending, or give it up; join the threads and free the slab. False: a drive does not answer."""
        engine = self._engine
        with engine.lock:
            shut_down(engine, cancel=not drain)
            ended = engine.done.wait_for(lambda: engine.idle, None if drain else CANCEL_S)
            if ended:
                engine.stopping = True
                for condition in (engine.work, *(lanes.wake for lanes in engine.lanes)):
                    condition.notify_all()
        if not ended:
            log.error("closing: a drive does not answer after %.0f s; its buffers are left alone", CANCEL_S)
            return False
        if engine.kept.chunks:
            log.error(
                "closing: %d chunks could not be written; their contents are lost", len(engine.kept.chunks)
            )
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()
        if engine.slab is not None:
            engine.slab.close()
        return True

    def end_from_anywhere(self) -> None:
        """Give up what is pending and end, in whatever thread a garbage collection may run."""
        if threading.current_thread() in self._threads:
            threading.Thread(target=self.end, kwargs={"drain": False}, daemon=True).start()
        else:
            self.end(drain=False)


def _drive_main(engine: Engine, index: int) -> None:
    while _drive_step(engine, index):
        continue


def _drive_step(engine: Engine, index: int) -> bool:
    """Wait for a batch and move it; False when the executor ends."""
    lanes = engine.lanes[index]
    with engine.lock:
        while (taken := lanes.take()) is None:
            if engine.stopping:
                return False
            lanes.wake.wait()
    op, priority, batch = taken
    start_ns = time.monotonic_ns()
    try:
        failed = engine.channels[index].move(op, batch)
        with engine.lock:
            engine.moved(op, batch, failed, start_ns)
    except BaseException as error:
        log.exception("a request to %s ended with an exception", engine.channels[index].file.path)
        _break(engine, batch, error)
    with engine.lock:
        lanes.end(op, priority)
        engine.pump()
    return True


def _worker_main(engine: Engine) -> None:
    while _worker_step(engine):
        continue


def _worker_step(engine: Engine) -> bool:
    """Wait for jobs and do their passes; False when the executor ends."""
    with engine.lock:
        batch = _next_compute(engine)
    if batch is None:
        return False
    made: list[Run] = []
    for number, run in enumerate(batch):
        try:
            with engine.lock:
                if made and engine.urgent(run):
                    engine.put_back(batch[number:])
                    break
                if not engine.may_compute(run):
                    continue
            start_ns = time.monotonic_ns()
            bad = PASSED if run.move_only else run_pass(run, engine.kernel, verify=engine.verify)
            with engine.lock:
                if engine.computed(run, bad, start_ns):
                    made.append(run)
        except BaseException as error:
            log.exception("a job on chunk %d ended with an exception", run.chunk.index)
            _break(engine, [run], error)
    with engine.lock:
        engine.write(made)
        engine.pump()
    return True


def _next_compute(engine: Engine) -> list[Run] | None:
    """Wait for jobs; meanwhile a worker keeps the time of gates. None: the executor ends. [locked]"""
    while True:
        if engine.gates.let_go_abandoned():
            engine.pump()
        batch = engine.take_compute()
        if batch:
            if engine.computing:
                engine.work.notify()
            return batch
        if engine.stopping:
            return None
        left_s = engine.gates.left_s() if not engine.active else None
        if left_s is None or left_s > 0:
            engine.work.wait(left_s)
            continue
        engine.gates.flowing = True
        engine.gates.escape_oldest()
        engine.pump()


def _break(engine: Engine, batch: Sequence[Run], error: BaseException) -> None:
    """Fail jobs because of an exception."""
    cause = error.with_traceback(None)  # a traceback would hold the slots
    with engine.lock:
        for run in batch:
            if run.state == State.DONE:
                continue
            if run.lanes is not None:
                run.lanes.remove(run)
            run.fail(BrokenRecord(FAULT_BROKEN, cause=cause))
            engine.finish(run)
