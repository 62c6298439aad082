"""Rendezvous: ranks that set something up in rounds of all_gather, and fail together.

    with Rendezvous(comm, "inf.offload") as rendezvous:
        everyone = rendezvous.all_gather_object({"free": 12})     # a round
        ...                                                       # an error is sent in the next one
                                                                  # the end is a round, too

Every round is the same collective, whatever it is for. So a rank that fails between two rounds
takes part in the next one of the others with its failure, and no rank waits for a round that does
not come.
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

    what: named in errors. With one rank nothing is sent. Inside, ranks call another collective
    only where no rank can have failed since the last round. Leaving the context without an error is
    the last round, unless `end` was called before. An error that is no Exception
    (KeyboardInterrupt) is not sent.
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
        # With one rank nothing is sent; after `end`, or a failed round, no rank waits for another.
        if self._over:
            return
        if error is None:
            self.end()
        elif isinstance(error, Exception):
            # The others are in their next round, or come to it: this is this rank's part of it.
            self._over = True
            try:
                self._gather({"failed": f"{type(error).__name__}: {error}"[:_ERROR_CHARACTERS_MAX]})
            except Exception:
                log.exception(
                    "rank %d failed at %s, and could not tell the others",
                    self._comm.rank,
                    self._what,
                )

    def all_gather_object(self, value: Mapping[str, Any]) -> list[dict[str, Any]]:
        """All-gather one object (JSON) from each rank in a round. Collective; blocks. Returns them
        by rank.

        Raises: PeerFailed that names the ranks that failed before it, and their errors. The
        rendezvous is over then.
        """
        if self._comm.world == 1:
            return [dict(value)]
        assert not self._over, "a rendezvous that is over has no rounds"
        # Also if the round itself raises: then no rank is left to send a failure to.
        self._over = True
        everyone = self._gather({"value": value})
        failed = {rank: row["failed"] for rank, row in enumerate(everyone) if "failed" in row}
        if failed:
            said = "; ".join(f"rank {rank}: {text}" for rank, text in failed.items())
            ranks = f"rank{'s' if len(failed) > 1 else ''} {', '.join(map(str, failed))}"
            raise PeerFailed(f"{ranks} failed at {self._what}, and so all ranks do. {said}")
        self._over = False
        return [row["value"] for row in everyone]

    def end(self) -> None:
        """Hold the last round before the context ends. Raises as `all_gather_object`."""
        self.all_gather_object({})
        self._over = True

    def _gather(self, row: Mapping[str, Any]) -> list[dict[str, Any]]:
        return [json.loads(text) for text in self._comm.all_gather_bytes(json.dumps(row).encode())]
