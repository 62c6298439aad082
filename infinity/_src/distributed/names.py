"""Names of collectives, which ranks compare before each of them; with several queues, the name of
the next one.

    check      all ranks have come to the same collective                     (control lanes)
    follow     rank 0's name has come: from which queue is the next one?      (other ranks)
    agree      all ranks launch the same one from this queue, and are ready   (the exchange lane)

Names travel between the ranks that exchange data: if any two ranks differ, some such pair does.
Rank 0's name reaches the ranks of its node and its counterparts on the other nodes directly, and
the others through the counterpart on their node. So naming the queue needs no messages of its own:
a rank only waits for its parent's name before it sends its own.

With its name a rank says whether it lacks what the collective needs of it. No rank runs a
collective that one lacks something for. With several nodes of several ranks that takes one exchange
more, since no rank hears of all others directly; only collectives that may be refused pay for it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from infinity._src.base.wording import LEFT_OUT
from infinity._src.distributed.topology import Topology
from infinity.errors import RanksDiverged

NAME_BYTES = 128
"""Bytes of a name that travel, the queue and what the rank lacks among them."""

# In a message: whether the rank lacks what it needs; the queue; the name.
_LACKS_AT, _QUEUE_AT, _NAME_AT = range(3)


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
        self._indirect = min(topology.nodes, topology.local_world) > 1
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
        return int(named[_QUEUE_AT])

    def agree(self, queue: int, what: str, *, lacks: bool | None = None) -> bool:
        """Send this rank's name, and wait until the others have sent the same one. Returns whether
        any rank lacks what the collective needs, the same on all ranks. queue: up to 255.

        lacks: whether this one does; None where no rank can, for this collective. After it no rank
        that this one exchanges data with waits for anything but the exchange. Raises:
        RanksDiverged.
        """
        mine = _encode(queue, what, lacks=bool(lacks))
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
            if not torch.equal(found[_QUEUE_AT:], mine[_QUEUE_AT:]):
                raise RanksDiverged(
                    f"rank {self.rank} has come to {what}, and rank {rank} to {_decode(found)}: "
                    "all ranks must run the same modules in the same order, and call what is "
                    "collective together, with the same values (control flow by rank? a "
                    "state_dict on one? a learning rate that follows the loss of one?); "
                    f"{LEFT_OUT}",
                    rank=rank,
                )
        lacking = bool(lacks) or any(found[_LACKS_AT] for found in theirs.values())
        return self._any(lacking) if self._indirect and lacks is not None else lacking

    def _any(self, lacking: bool) -> bool:
        """Unite over all ranks what each has united over those that it hears of directly."""
        mine = torch.tensor([lacking], dtype=torch.uint8)
        theirs = [torch.zeros_like(mine) for _ in self._others]
        self._exchange(
            [dist.P2POp(dist.isend, mine, rank, self._group) for rank in self._others]
            + [
                dist.P2POp(dist.irecv, to, rank, self._group)
                for rank, to in zip(self._others, theirs, strict=True)
            ]
        )
        return lacking or any(map(bool, theirs))

    def _exchange(self, operations: list[dist.P2POp]) -> None:
        for work in dist.batch_isend_irecv(operations):
            work.wait()


def _encode(queue: int, what: str, *, lacks: bool) -> torch.Tensor:
    """Encode a queue, what the rank lacks and the end of a name in a message of fixed size."""
    # The end tells most: it has the unit and the digest, and names begin alike.
    text = what.encode()[_NAME_AT - NAME_BYTES :]
    return torch.tensor(
        [lacks, queue, *text.ljust(NAME_BYTES - _NAME_AT, b"\0")], dtype=torch.uint8
    )


def _decode(message: torch.Tensor) -> str:
    return bytes(message[_NAME_AT:].tolist()).rstrip(b"\0").decode(errors="replace")
