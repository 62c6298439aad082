"""Ordering agreement: before each collective the ranks compare its name; for several queues, rank 0
also chooses the queue of the next collective.

    check      compare the name of this collective                            (control streams)
    follow     receive rank 0's choice of the next queue                      (other ranks)
    agree      compare the name; all ranks are ready to launch it             (exchange stream)

A rank sends the name of its collective to the ranks with which it exchanges data: if any two ranks
have different names, some such pair has. Rank 0's choice reaches the ranks of its node and its
counterparts directly, and every other rank through rank 0's counterpart on that rank's node. So the
choice needs no additional messages: before a rank sends a name, it waits for the name from its
parent (rank 0, or its node's first rank).

The message also says whether the rank lacks its input. If any rank lacks its input, no rank runs
the collective. With several nodes of several ranks the ranks need a second exchange for this,
because no rank receives messages from all others. Only collectives that may be refused have it.

# Launch order

All ranks launch collectives from several queues in one order:

    queues        each in the order of the program, which is the same on every rank
    rank 0        launches the head that is ready first, and sends the number of its queue
    other ranks   launch the head of that queue, once it is submitted and ready on them

A collective is ready on a rank when this rank's shard has been read.

NCCL requires one launch order for all collectives on a device, and a communicator for all its
collectives. The order of submission would satisfy NCCL, too. But with rank 0's choice a reduction
can overtake a gather that waits for a slow drive.

**No deadlock.** Let c1, c2, ... be the collectives in the order in which rank 0 chooses them. Rank
0 chooses c(n) after rank 0's program has submitted c(n). Every collective for which that program
had waited by then was complete on rank 0, and so was launched by all ranks: it is among c1 ...
c(n-1), or in another communication stream. Every other rank runs the same program, so before it
submits c(n) it waits only for the same collectives. By induction they complete, the rank submits
c(n), and c(n) becomes ready if its readiness depends on no other collective. That holds for each of
its waits:

- reads of the shard wait for slots of the executor, for earlier jobs on a chunk, for a drive. Jobs
  with slots and earlier jobs are submitted reads, writes and updates, which only wait for each
  other, closed gates and the device. Jobs at a closed gate yield their slots to reads
  (`inf_prefetch_yield`), and waiting for a ticket makes the gates before it on a chunk escape. A
  gate is open before a gather that depends on its update is submitted;
- a shard that is missing because an update failed counts as ready: the ranks refuse its gather in
  its turn (`comm_streams`);
- an update reads gradients of accumulators, which are reduced before it is submitted;
- copies to a device wait for the compute stream, which only waits for launched collectives:
  `PendingCollective.wait` makes a stream wait for an event that is recorded at the launch;
- memory of the unit, its gradients and windows is allocated by the submitting thread, before it
  submits. That thread may wait for a reduction or an evicted gather, the same ones on all ranks
  (`REDUCING_UNITS`, `Unsharder._may_evict`), or for a copy or an update, as above. Memory that a
  launch allocates may wait for the device, which only runs launched work.

With `find_unused_parameters` the ranks' programs use different units. They still submit the same
collectives in one order (`Unsharder._fill_all`, `ReduceOrder`), but a rank may wait for a gather
that rank 0 does not use. All gathers are submitted before the forward, and rank 0 waits for all of
them before it submits a reduction (`Unsharder.backward_start`). So no reduction is chosen before
such a gather.
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
"""Bytes of a message: whether input is missing, queue, and name."""

# Offsets in a message: whether the rank lacks its input; the queue; the name.
_LACKS_AT, _QUEUE_AT, _NAME_AT = range(3)


class OrderAgreement:
    """Exchange of names over one group. Methods block. Not thread-safe.

    group: of gloo, since names are always CPU tensors.
    """

    def __init__(self, topology: Topology, group: Any) -> None:
        self.rank = topology.rank
        self._group = group
        self._others = sorted({*topology.node_ranks, *topology.counterparts} - {topology.rank})
        # The parent is rank 0, or else the node's first rank, which is a counterpart of rank 0.
        parent = 0 if 0 in self._others else topology.node_ranks[0]
        self.parent = parent if topology.rank != 0 else None
        """Rank from which `follow` receives; None on rank 0, which chooses."""
        self._indirect = min(topology.nodes, topology.local_world) > 1
        # The message that `follow` has received, for `agree` to compare.
        self._named: torch.Tensor | None = None

    def check(self, what: str) -> None:
        """Wait until the ranks with which this rank exchanges data have reached the same
        collective.

        Otherwise ranks whose programs differ would misinterpret each other's data.
        Raises: RanksDiverged.
        """
        self.agree(0, what)

    def follow(self) -> int:
        """Wait for the parent's message about the next collective, and return its queue.

        The caller then calls `agree` for the head of this queue. Not on rank 0.
        """
        assert self.parent is not None
        assert self._named is None
        named = torch.zeros(NAME_BYTES, dtype=torch.uint8)
        self._exchange([dist.P2POp(dist.irecv, named, self.parent, self._group)])
        self._named = named
        return int(named[_QUEUE_AT])

    def agree(self, queue: int, what: str, *, lacks: bool | None = None) -> bool:
        """Exchange names, and wait until the other ranks have sent the same name. Returns whether
        any rank lacks its input, the same value on all ranks. queue: up to 255.

        lacks: whether this rank lacks its input; None if the collective cannot be refused. When
        this returns, all ranks with which this rank exchanges data are ready. Raises:
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
        # One batch, so that no rank's send waits for another's receive.
        self._exchange(
            [dist.P2POp(dist.isend, mine, rank, self._group) for rank in self._others]
            + [dist.P2POp(dist.irecv, to, rank, self._group) for rank, to in wanted.items()]
        )
        for rank, found in theirs.items():
            if not torch.equal(found[_QUEUE_AT:], mine[_QUEUE_AT:]):
                raise RanksDiverged(
                    f"rank {self.rank} has reached {what}, and rank {rank} {_decode(found)}: "
                    "all ranks must run the same modules in the same order, and call collective "
                    "functions together, with the same values (does control "
                    "flow depend on the rank? does one rank call state_dict()? does a learning "
                    "rate depend on one rank's loss?); "
                    f"{LEFT_OUT}",
                    rank=rank,
                )
        lacking = bool(lacks) or any(found[_LACKS_AT] for found in theirs.values())
        return self._any(lacking) if self._indirect and lacks is not None else lacking

    def _any(self, lacking: bool) -> bool:
        """OR the ranks' results once more: the second exchange reaches ranks that exchange no
        messages directly."""
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
    """Encode queue, `lacks` and the end of a name in a message of fixed size."""
    # Names begin alike; their ends, with unit and digest, differ.
    text = what.encode()[_NAME_AT - NAME_BYTES :]
    return torch.tensor(
        [lacks, queue, *text.ljust(NAME_BYTES - _NAME_AT, b"\0")], dtype=torch.uint8
    )


def _decode(message: torch.Tensor) -> str:
    return bytes(message[_NAME_AT:].tolist()).rstrip(b"\0").decode(errors="replace")


T = TypeVar("T")


class LaunchOrder(Generic[T]):
    """Queues of one rank. Not thread-safe."""

    def __init__(self, queues: Sequence[str]) -> None:
        self.names = tuple(queues)
        # Entries: (position in the order of submission over all queues, item).
        self._queues: list[deque[tuple[int, T]]] = [deque() for _ in queues]
        self._count = 0

    def __len__(self) -> int:
        return sum(map(len, self._queues))

    def add(self, queue: str, item: T) -> None:
        """Append to a queue."""
        self._queues[self.names.index(queue)].append((self._count, item))
        self._count += 1

    def head(self, queue: int) -> T | None:
        """Return the head of a queue, by its index; None if it is empty."""
        waiting = self._queues[queue]
        return waiting[0][1] if waiting else None

    def choose(self, ready: Callable[[T], bool]) -> int | None:
        """Return the queue whose head is ready; of several, the one with the earliest head."""
        heads = [(*waiting[0], at) for at, waiting in enumerate(self._queues) if waiting]
        # By order of submission, so that no queue starves.
        heads.sort(key=lambda head: head[0])
        return next((at for _, item, at in heads if ready(item)), None)

    def oldest(self) -> int | None:
        """Return the queue with the earliest head; None if all are empty."""
        return self.choose(lambda _item: True)

    def pop(self, queue: int) -> T:
        """Remove and return the head of a queue."""
        return self._queues[queue].popleft()[1]
