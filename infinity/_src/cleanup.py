"""Clean-up that takes every step.

`run_all` runs all steps of a close, whatever some of them raise. `cancel_and_wait` gives up on
reads: no read may still fill memory that is about to be freed.
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
    """Run every step in turn after the block, however that ends, also after a step that raised. The
    first error is raised; later ones are logged."""
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
                log.exception("an end that goes on after %s: %s", type(failure).__name__, failure)
            failure = failure or error
    try:
        if failure is not None:
            raise failure
    finally:
        del failure  # its traceback holds this frame



def cancel_and_wait(tickets: Sequence[Ticket]) -> KeyboardInterrupt | None:
    """Wait until nothing is on its way into the buffers of these fills, whatever became of them.

    Returns an interrupt that came meanwhile, to be raised once the memory is freed. Faults are not
    lost: faults of updates are sticky, and reads are made anew.
    """
    interrupt = None
    for ticket in tickets:
        ticket.cancel()  # reads that no drive has begun are not made for nobody
        while not ticket.filled:
            try:
                with contextlib.suppress(AioError):
                    ticket.wait_filled()
            except KeyboardInterrupt as error:
                interrupt = error
    return interrupt
