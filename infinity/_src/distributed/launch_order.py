"""Order in which a rank launches collectives from several queues, the same on all ranks.

    queues     each in the order of the program, which is the same on every rank
    rank 0     launches the head that is ready first, and names its queue to the others
    the others launch the head of the queue that was named, once it is submitted and ready there

Ready means that what the collective needs of this rank alone is there: a shard has been read.

Launching in one order is what NCCL demands of collectives that share a device, and what a
communicator demands of those that share it. Choosing on one rank lets a reduction pass a gather
whose drive is slow, which the order of submission would not.

**No deadlock.** Let c1, c2, ... be the collectives in the order in which rank 0 names them. Rank 0
names c(n) once its own program has submitted it. Everything that its program had waited for by then
was complete there, and so was launched by all ranks: it is among c1 ... c(n-1), or in a lane of its
own. Another rank runs the same program and so waits, up to its own submission of c(n), for the same
collectives only. By induction they complete, it submits c(n), and c(n) gets ready if readiness
depends on no collective but those. It does not, wait by wait:

- reads of the shard wait for slots of the executor, for their turn on a chunk, for a drive. Jobs
  that hold slots or come before on a chunk are reads, writes and updates that are submitted, and
  these wait for nothing but each other, closed gates and the device. A closed gate holds no slot
  that a read wants (`inf_prefetch_yield`), and waiting for a ticket lets gates that are before it
  on a chunk escape. A gate is open before a gather is submitted behind its update;
- a shard that its rank lacks, since an update failed there, is ready: the ranks refuse its gather
  in its turn (`lanes`);
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
from typing import Generic, TypeVar

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
