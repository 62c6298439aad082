"""Alarm: one flag by which background work reports a fault to the next gather.

    sound   by native threads when a job fails; by the owners of drives, ranks and saves when one
            of them fails; by an update mode that runs updates ahead of their step; by the handle on
            close
    read    by each gather, as one word of memory. While the flag is set, `EngineAccess.before_read`
            queries all owners, and raises the first fault

So the cost of a gather does not depend on the number of pending updates.
"""

from __future__ import annotations

import ctypes


class Alarm:
    """The flag of one engine. Any thread may sound it; only the gathering thread lowers it."""

    def __init__(self) -> None:
        self.word = ctypes.c_uint32(0)

    @property
    def address(self) -> int:
        """Address of the flag, which native threads set to 1. Valid as long as this object."""
        return ctypes.addressof(self.word)

    def sound(self) -> None:
        """Make the next gather query all owners. Never blocks."""
        self.word.value = 1

    def lower(self) -> None:
        """Clear the flag. Call this before querying the owners, so that a fault during the queries
        sets it again for the next gather.
        """
        self.word.value = 0
