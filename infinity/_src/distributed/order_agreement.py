"""Agreement of ranks on the order of collectives. Before each collective the ranks compare its
name; where there are several queues, rank 0 also names the queue of the next collective.

    check      all ranks have come to the same collective                     (control streams)
    follow     rank 0's name has come: from which queue is the next one?      (other ranks)
    agree      all ranks launch the same one from this queue, and are ready   (the exchange stream)

Names travel between the ranks that exchange data: if any two ranks differ, some such pair does.
Rank 0's name reaches the ranks of its node and its counterparts on the other nodes directly, and
the others through the counterpart on their node. So naming the queue needs no messages of its own:
a rank only waits for its parent's name before it sends its own.

With its name a rank also says whether its input is missing. If one rank's input is missing, no
rank runs the collective. With several nodes of several ranks this takes one more exchange, because
no rank hears of all others directly; only collectives that may be refused pay for it.

# Launch order

A rank launches collectives from several queues in one order, the same on all ranks:

    queues     each in the order of the program, which is the same on every rank
    rank 0     launches the head that is ready first, and names its queue to the others
    the others launch the head of the queue that was named, once it is submitted and ready there

Ready means that what the collective needs of this rank alone is there: a shard has been read.

Launching in one order is what NCCL demands of collectives that share a device, and what a
communicator demands of those that share it. Choosing on one rank lets a reduction pass a gather
whose drive is slow, which the order of submission would not.

**No deadlock.** Let c1, c2, ... be the collectives in the order in which rank 0 names them. Rank 0
names c(n) once its own program has submitted it. Everything that its program had waited for by then
was complete there, and so was launched by all ranks: it is among c1 ... c(n-1), or in a
communication stream of its own. Another rank runs the same program and so waits, up to its own
submission of c(n), for the same collectives only. By induction they complete, it submits c(n), and
c(n) gets ready if readiness depends on no collective but those. It does not, wait by wait:

- reads of the shard wait for slots of the executor, for their turn on a chunk, for a drive. Jobs
  that hold slots or come before on a chunk are reads, writes and updates that are submitted, and
  these wait for nothing but each other, closed gates and the device. A closed gate holds no slot
  that a read wants (`inf_prefetch_yield`), and waiting for a ticket lets gates that are before it
  on a chunk escape. A gate is open before a gather is submitted behind its update;
- a shard that its rank lacks, since an update failed there, is ready: the ranks refuse its gather
  in its turn (`comm_streams`);
- an update reads gradients of accumulators, which are reduced before it is submitted;
- copies to a device wait for the compute stream, which waits for collectives that were launched:
  `PendingCollective.wait` orders a stream behind an event that exists only then;
- memory of the unit, of its gradients, of windows is taken by the thread that submits, before it
  submits. That thread may have to wait: for a reduction or an evicted gather, the same ones on all
  ranks (`REDUCING_UNITS`, `Unsharder._may_evict`); or for a copy or an update, as above.
  Memory that a launch itself allocates may wait for the device, which again runs only what was
  launched.

With `find_unused_parameters` programs differ in the units that they use. They submit the same in
one order all the same (`Unsharder._fill_all`, `ReduceOrder`), but a rank may wait for a gather that
rank 0 does not want. All gathers are submitted before the forward, and rank 0 waits for all of them
before it submits a reduction (`Unsharder.backward_start`). So no reduction is named before such a
gather.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist

from infinity._src.base.wording import LEFT_OUT
from infinity._src.distributed.topology import Topology
from infinity.errors import RanksDiverged

NAME_BYTES = 128
"""Bytes of a name that travel, the queue and what the rank lacks among them."""

# In a message: whether the rank lacks what it needs; the queue; the name.
_LACKS_AT, _QUEUE_AT, _NAME_AT = range(3)


class OrderAgreement:
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


T = TypeVar("T")


class LaunchOrder(Generic[T]):
    """Queues of one rank. No thread and no message; its user locks it."""

    def __init__(self, queues: Sequence[str]) -> None:
        self.names = tuple(queues)
        # Each entry with its place in the program, over all queues.
        self._queues: list[deque[tuple[int, T]]] = [deque() for _ in queues]
        self._count = 0

    def __len__(self) -> int:
        return sum(map(len, self._queues))

    def add(self, queue: str, item: T) -> None:
        """Append to a queue."""
        self._queues[self.names.index(queue)].append((self._count, item))
        self._count += 1

    def head(self, queue: int) -> T | None:
        """Return the next item of a queue, by its index; None if none is submitted."""
        waiting = self._queues[queue]
        return waiting[0][1] if waiting else None

    def choose(self, ready: Callable[[T], bool]) -> int | None:
        """Return the queue whose head is ready; of several the one that was submitted first."""
        heads = [(*waiting[0], at) for at, waiting in enumerate(self._queues) if waiting]
        # By the place in the program: a queue must not starve another.
        heads.sort(key=lambda head: head[0])
        return next((at for _, item, at in heads if ready(item)), None)

    def oldest(self) -> int | None:
        """Return the queue whose head was submitted first; None if all are empty."""
        return self.choose(lambda _item: True)

    def pop(self, queue: int) -> T:
        """Remove and return the head of a queue."""
        return self._queues[queue].popleft()[1]
