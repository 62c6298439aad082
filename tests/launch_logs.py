"""Logs of launches, and what must hold of those of all ranks: one order, one thread each."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Launch:
    """One collective, as a rank launched it: its queue, its name, and the thread's number."""

    queue: int
    what: str
    thread: int = 0


def objection(logs: Sequence[Sequence[Launch]]) -> str:
    """Say what is wrong with the logs of all ranks; nothing if all launched the same, in one order
    and from one thread each."""
    for rank, log in enumerate(logs):
        if len({launch.thread for launch in log}) > 1:
            return f"rank {rank} launches from several threads"
    for place, launches in enumerate(itertools.zip_longest(*logs)):
        told = [(each.queue, each.what) if each is not None else None for each in launches]
        if len(set(told)) > 1:
            return f"launch {place} is not the same on all ranks: {told}"
    return ""
