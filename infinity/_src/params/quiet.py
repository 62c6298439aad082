"""Giving up on fills: nothing may be on its way into memory that is about to be freed."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from infinity.aio import Ticket
from infinity.errors import AioError


def quiesce(tickets: Sequence[Ticket]) -> KeyboardInterrupt | None:
    """Wait until nothing is on its way into the buffers of these fills, whatever became of them. Returns an interrupt that
    came meanwhile, to be raised once the memory is freed. Faults are not lost: updates' are sticky, reads are made anew."""
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
