"""Rendezvous: ranks exchange objects in rounds of all_gather, and fail together.

    with Rendezvous(comm, "inf.offload") as rendezvous:
        everyone = rendezvous.all_gather_object({"free": 12})     # a round
        ...                                                       # an error is sent in the next one
                                                                  # the end is a round, too

Every round is the same collective. So a rank that fails between two rounds sends its error in the
next round of the other ranks, and no rank waits for a message that never comes.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from types import TracebackType
from typing import Any, final

from infinity._src.distributed.communicator import Comm
from infinity.errors import PeerFailed

log = logging.getLogger("infinity")

_ERROR_CHARACTERS_MAX = 2000


@final
class Rendezvous:
    """Context in which the ranks of `comm` exchange objects in rounds, and fail together.

    what: the name of the work, for errors. With one rank there are no messages. Inside the context,
    call other collectives only if no rank can have failed since the last round. The exit of the
    context runs the last round, unless `end` was called. A BaseException such as KeyboardInterrupt
    is not sent.
    """

    def __init__(self, comm: Comm, what: str) -> None:
        self._comm = comm
        self._what = what
        self._over = comm.world == 1

    def __enter__(self) -> Rendezvous:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # Also after `end` or a failed round: no other rank waits for a round.
        if self._over:
            return
        if error is None:
            self.end()
        elif isinstance(error, Exception):
            # Take part in the next round of the other ranks, with the failure.
            self._over = True
            try:
                self._gather({"failed": f"{type(error).__name__}: {error}"[:_ERROR_CHARACTERS_MAX]})
            except Exception:
                log.exception(
                    "rank %d failed at %s, and could not report that to the other ranks",
                    self._comm.rank,
                    self._what,
                )

    def all_gather_object(self, value: Mapping[str, Any]) -> list[dict[str, Any]]:
        """All-gather a JSON object in one round. Collective; blocks. Returns the objects by rank.

        Raises: PeerFailed, naming the ranks that failed since the last round, and their errors;
        this ends the rendezvous.
        """
        if self._comm.world == 1:
            return [dict(value)]
        assert not self._over, "a rendezvous that is over has no rounds"
        # Set first: if the round raises, the other ranks have failed, too.
        self._over = True
        everyone = self._gather({"value": value})
        failed = {rank: row["failed"] for rank, row in enumerate(everyone) if "failed" in row}
        if failed:
            said = "; ".join(f"rank {rank}: {text}" for rank, text in failed.items())
            ranks = f"rank{'s' if len(failed) > 1 else ''} {', '.join(map(str, failed))}"
            raise PeerFailed(f"{ranks} failed at {self._what}, so all ranks fail. {said}")
        self._over = False
        return [row["value"] for row in everyone]

    def end(self) -> None:
        """Run the last round. Collective; blocks. Raises: as `all_gather_object`."""
        self.all_gather_object({})
        self._over = True

    def _gather(self, row: Mapping[str, Any]) -> list[dict[str, Any]]:
        return [json.loads(text) for text in self._comm.all_gather_bytes(json.dumps(row).encode())]
