"""A meeting: ranks that set something up together, tell each other what they need, and fail together.

    with Meeting(comm, "inf.offload") as meeting:
        everyone = meeting.exchange({"free": 12})      a round: every rank gets what each has told
        ...                                            an error here is told at the next round of the others
                                                       the end is a round, too

Every round is the same collective, whatever it is for. So a rank that fails between two rounds takes part in the next one of
the others, by telling its failure, and nobody waits for a round that does not come.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from types import TracebackType
from typing import Any, final

from infinity.comm.collectives import Comm
from infinity.errors import PeerFailed

log = logging.getLogger("infinity")

_WORD_BYTES = 6
"""Bytes that a double holds exactly, as a whole number."""
_TOLD_CHARACTERS_MAX = 2000


@final
class Meeting:
    """Rounds of the ranks of `comm`; `what` is named in errors. With one rank nothing is called.

    Inside, ranks call no other collective, unless none can have failed since the last round. Leaving it well is the last round,
    unless `end` was that already. An error that is no Exception (KeyboardInterrupt) is not told.
    """

    def __init__(self, comm: Comm, what: str) -> None:
        self._comm = comm
        self._what = what
        self._over = comm.world == 1

    def __enter__(self) -> Meeting:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._over:
            return
        if error is None:
            self.end()
        elif isinstance(error, Exception):
            self._over = True
            try:
                self._gather({"failed": f"{type(error).__name__}: {error}"[:_TOLD_CHARACTERS_MAX]})
            except Exception:
                log.exception("rank %d failed at %s, and could not tell the others", self._comm.rank, self._what)

    def exchange(self, told: Mapping[str, Any]) -> list[dict[str, Any]]:
        """What every rank tells in this round (JSON), by rank. Collective; blocks until all ranks have come.

        Raises: PeerFailed that names the ranks that failed before it, and their errors; then the meeting is over.
        """
        if self._comm.world == 1:
            return [dict(told)]
        assert not self._over, "a meeting that is over has no rounds"
        self._over = True  # also if this breaks off: there is nobody to tell
        everyone = self._gather({"told": told})
        failed = {rank: row["failed"] for rank, row in enumerate(everyone) if "failed" in row}
        if failed:
            said = "; ".join(f"rank {rank}: {text}" for rank, text in failed.items())
            ranks = f"rank{'s' if len(failed) > 1 else ''} {', '.join(map(str, failed))}"
            raise PeerFailed(f"{ranks} failed at {self._what}, and so all ranks do. {said}")
        self._over = False
        return [row["told"] for row in everyone]

    def end(self) -> None:
        """The last round, ahead of the meeting's end. Raises as `exchange`."""
        self.exchange({})
        self._over = True

    def _gather(self, row: Mapping[str, Any]) -> list[dict[str, Any]]:
        data = json.dumps(row).encode()
        sizes = self._everyone([float(len(data))])
        words = -(-int(max(size[0] for size in sizes)) // _WORD_BYTES)
        padded = data.ljust(words * _WORD_BYTES)
        cut = [padded[at : at + _WORD_BYTES] for at in range(0, len(padded), _WORD_BYTES)]
        rows = self._everyone([float(int.from_bytes(word, "little")) for word in cut])
        return [json.loads(b"".join(int(word).to_bytes(_WORD_BYTES, "little") for word in row)) for row in rows]

    def _everyone(self, mine: list[float]) -> list[list[float]]:
        """The values of each rank: a sum to which every rank adds zeros in the places of others."""
        count, world = len(mine), self._comm.world
        values = [0.0] * (count * world)
        values[self._comm.rank * count : (self._comm.rank + 1) * count] = mine
        total = self._comm.sum_floats(values)
        return [total[rank * count : (rank + 1) * count] for rank in range(world)]
