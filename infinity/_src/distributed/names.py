"""Names of collectives, which ranks compare before each of them; with several queues, the name of
the next one.

    check      all ranks have come to the same collective                     (control lanes)
    follow     rank 0's name has come: from which queue is the next one?      (other ranks)
    agree      all ranks launch the same one from this queue, and are ready   (the exchange lane)

Names travel between the ranks that exchange data: if any two ranks differ, some such pair does.
Rank 0's name reaches the ranks of its node and its counterparts on the other nodes directly, and
the others through the counterpart on their node. So naming the queue needs no messages of its own:
a rank only waits for its parent's name before it sends its own.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from infinity._src.distributed.topology import Topology
from infinity._src.wording import LEFT_OUT
from infinity.errors import RanksDiverged

NAME_BYTES = 128
"""Bytes of a name that travel, the queue among them."""


class NameExchange:
    """Exchange of names over one group. Methods block; one thread calls at a time.

    group: of gloo, since names are CPU tensors whatever the data is.
    """

    def __init__(self, topology: Topology, group: Any) -> None:
        self.rank = topology.rank
        self._group = group
        self._others = sorted({*topology.node_ranks, *topology.counterparts} - {topology.rank})
        # The node's first rank has rank 0 as its counterpart.
        parent = 0 if 0 in self._others else topology.node_ranks[0]
        self.parent = parent if topology.rank != 0 else None
        """Rank from which the name of the next collective comes; None on rank 0, which chooses."""
        # Received by `follow`, and compared by `agree`.
        self._named: torch.Tensor | None = None

    def check(self, what: str) -> None:
        """Wait until the ranks that this one exchanges data with have come to the same collective.

        Without this, ranks whose programs differ would take each other's data for what they expect.
        Raises: RanksDiverged.
        """
        self.agree(0, what)

    def follow(self) -> int:
        """Wait for the parent's name of the next collective, and return the queue that it is in.

        `agree` must follow, for the head of this queue. Not called on rank 0.
        """
        assert self.parent is not None
        assert self._named is None
        named = torch.zeros(NAME_BYTES, dtype=torch.uint8)
        self._exchange([dist.P2POp(dist.irecv, named, self.parent, self._group)])
        self._named = named
        return int(named[0])

    def agree(self, queue: int, what: str) -> None:
        """Send this rank's name, and wait until the others have sent the same one. queue: up to
        255.

        After it no rank that this one exchanges data with waits for anything but the exchange.
        Raises: RanksDiverged.
        """
        mine = _encode(queue, what)
        theirs = {rank: torch.zeros(NAME_BYTES, dtype=torch.uint8) for rank in self._others}
        received, self._named = self._named, None
        wanted = dict(theirs)
        if received is not None:
            assert self.parent is not None
            theirs[self.parent] = received
            del wanted[self.parent]
        # All sends and receives in one batch, so that no rank waits for another's receive.
        self._exchange(
            [dist.P2POp(dist.isend, mine, rank, self._group) for rank in self._others]
            + [dist.P2POp(dist.irecv, to, rank, self._group) for rank, to in wanted.items()]
        )
        for rank, found in theirs.items():
            if not torch.equal(found, mine):
                raise RanksDiverged(
                    f"rank {self.rank} has come to {what}, and rank {rank} to {_decode(found)}: "
                    "all ranks must run the same modules in the same order, and call what is "
                    "collective together, with the same values (control flow by rank? a "
                    "state_dict on one? a learning rate that follows the loss of one?); "
                    f"{LEFT_OUT}",
                    rank=rank,
                )

    def _exchange(self, operations: list[dist.P2POp]) -> None:
        for work in dist.batch_isend_irecv(operations):
            work.wait()


def _encode(queue: int, what: str) -> torch.Tensor:
    """Encode a queue and the end of a name in a message of fixed size."""
    # The end tells most: it has the unit and the digest, and names begin alike.
    text = what.encode()[1 - NAME_BYTES :]
    return torch.tensor([queue, *text.ljust(NAME_BYTES - 1, b"\0")], dtype=torch.uint8)


def _decode(message: torch.Tensor) -> str:
    return bytes(message[1:].tolist()).rstrip(b"\0").decode(errors="replace")
