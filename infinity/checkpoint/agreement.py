"""Ranks that fail together: what one of them cannot do, none of them goes on from."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from infinity.comm.collectives import Comm
from infinity.errors import PeerFailed


@contextlib.contextmanager
def agreed(comm: Comm, what: str) -> Iterator[None]:
    """Leaves the body on all ranks, or raises on all of them. Collective at its end; the body must call no collective.

    Raises: the body's own error where it failed, PeerFailed naming `what` on the other ranks.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:  # noqa: BLE001 - raised below, after the others know
        failure = error
    if comm.any_of([failure is not None])[0]:
        raise failure or PeerFailed(f"another rank failed at {what}; its own error says why, and nothing more was done here")
