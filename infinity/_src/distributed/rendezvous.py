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

from infinity._src.distributed.collectives import Comm
from infinity.errors import PeerFailed

log = logging.getLogger("infinity")

_TOLD_CHARACTERS_MAX = 2000


@final
class Rendezvous:
    """Rounds of the ranks of `comm`; `what` is named in errors. With one rank nothing is called.

    Inside, ranks call no other collective, unless none can have failed since the last round. Leaving it well is the last round,
    unless `end` was that already. An error that is no Exception (KeyboardInterrupt) is not told.
    """

    def __init__(self, comm: Comm, what: str) -> None:
        self._comm = comm
        self._what = what
        self._over = comm.world == 1

    def __enter__(self) -> Rendezvous:
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

    def all_gather_object(self, told: Mapping[str, Any]) -> list[dict[str, Any]]:
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
        self.all_gather_object({})
        self._over = True

    def _gather(self, row: Mapping[str, Any]) -> list[dict[str, Any]]:
        return [json.loads(told) for told in self._comm.all_gather_bytes(json.dumps(row).encode())]
