"""Alarm: one flag between those who find a fault and the gathers that must not pass it.

    sound   native threads when a job fails; the owner of a lost drive, of a rank that failed, of a
            save that failed, of an update that runs ahead of its step; the handle when it closes
    read    each gather: one word of memory. While it is set, `EngineAccess.before_read` asks all
            owners, and raises what it finds

A gather so costs the same however many updates are pending.
"""

from __future__ import annotations

import ctypes


class Alarm:
    """The flag of one engine. Any thread sounds it; the thread that gathers lowers it."""

    def __init__(self) -> None:
        self.word = ctypes.c_uint32(0)

    @property
    def address(self) -> int:
        """Address of the flag, which native threads set to 1. Valid as long as this object."""
        return ctypes.addressof(self.word)

    def sound(self) -> None:
        """Have the next gather ask all owners. Never blocks."""
        self.word.value = 1

    def lower(self) -> None:
        """Clear the flag. Call this before the owners are asked: what one of them finds while they
        are asked then stays for the next gather."""
        self.word.value = 0
