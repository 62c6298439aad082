"""Clean-up that runs to its end, whatever fails.

`run_all` takes every step of a clean-up, whatever the others raise. `cancel_and_wait` cancels reads
and waits for them: no transfer may write into memory that is about to be freed.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from infinity.errors import AioError

if TYPE_CHECKING:
    from infinity.aio import Ticket

log = logging.getLogger("infinity")


@contextlib.contextmanager
def run_all(*steps: Callable[[], object]) -> Iterator[None]:
    """After the block, however it ends, run every step in turn, also if an earlier step raised.
    Raises the first failure, and logs later ones."""
    failure: BaseException | None = None
    try:
        yield
    except BaseException as error:  # noqa: BLE001  raised below, after the steps
        failure = error
    for step in steps:
        try:
            step()
        except BaseException as error:
            if failure is not None:
                log.exception("clean-up continues after %s: %s", type(failure).__name__, failure)
            failure = failure or error
    try:
        if failure is not None:
            raise failure
    finally:
        # The error's traceback and this frame refer to each other: a cycle that keeps memory alive.
        del failure


def cancel_and_wait(tickets: Sequence[Ticket]) -> KeyboardInterrupt | None:
    """Cancel these reads, and block until none of them writes to its buffers.

    Returns a KeyboardInterrupt that arrived meanwhile, for the caller to raise once the memory is
    freed. Drops faults of the reads: their callers repeat them.
    """
    interrupt = None
    for ticket in tickets:
        # This drops reads that no drive has started.
        ticket.cancel()
        # A read that has begun writes to its memory until it ends.
        while not ticket.filled:
            try:
                with contextlib.suppress(AioError):
                    ticket.wait_filled()
            except KeyboardInterrupt as error:
                interrupt = error
    return interrupt
