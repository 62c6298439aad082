"""What is on its way into the buffers of gathered units: the reads of this rank's shards, then the shards of the others.

    one rank        tickets                                             ready when they are filled
    several ranks   tickets -> gather lane: wait, exchange, keep        ready when the lane has done it

On several ranks what begins is never broken off, since the others count on it, and everything here follows the program
alone: all ranks exchange the same units in the same order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Sequence

import torch

from infinity._src.distributed.collectives import Comm
from infinity._src.distributed.exchange import Exchange
from infinity._src.distributed.lanes import Op
from infinity._src.kernels.quantize import DTYPES
from infinity._src.params.quiet import quiesce
from infinity._src.params.secondary_shards import SecondaryShards
from infinity._src.params.unit import Flat, Unit
from infinity.aio import Ticket


@dataclasses.dataclass
class PendingUnshard:
    """What fills one unit. op: None on one rank. before: what the thread that waits does once the tickets are filled; submit:
    makes the op then, where it could not run ahead."""

    tickets: Sequence[Ticket]
    op: Op | None = None
    before: Callable[[], None] | None = None
    submit: Callable[[], Op] | None = None
    stuck: bool = False

    @property
    def filled(self) -> bool:
        """Whether nothing is under way any more."""
        return all(ticket.filled for ticket in self.tickets) and (self.op is None or self.op.done)

    def wait(self) -> None:
        """Block until the unit's buffers hold its values. Raises: AioError, RankFailed."""
        if self.op is None:
            for ticket in self.tickets:
                ticket.wait_filled()
        if self.before is not None:
            self.before()
        if self.submit is not None:
            self.op, self.submit = self.submit(), None
        if self.op is not None:
            self.op.wait()

    def quiesce(self) -> KeyboardInterrupt | None:
        """Return when nothing is on its way into the buffers, whatever became of it; an interrupt that came meanwhile. `stuck` is
        set where that cannot be had: a rank has failed, and a call that waited for it does not return."""
        if self.op is None:
            return quiesce(self.tickets)
        interrupt = None
        while True:
            try:
                self.stuck = not self.op.finished()
                break
            except KeyboardInterrupt as error:
                interrupt = error
        return quiesce(self.tickets) or interrupt


class PendingUnshards:
    """The fills of one model. One thread uses it at a time.

    kept: where they may come from instead of from rest.
    """

    def __init__(self, comm: Comm, *, kept: SecondaryShards | None = None) -> None:
        self._comm = comm
        self.kept = kept
        self._fills: dict[Unit, PendingUnshard] = {}
        self.stuck: set[Unit] = set()  # whose memory must stay

    def __contains__(self, unit: Unit) -> bool:
        return unit in self._fills

    def under_way(self, unit: Unit) -> bool:
        """Whether something is on its way into the unit's buffers."""
        fill = self._fills.get(unit)
        return fill is not None and not fill.filled

    def has_kept(self, unit: Unit, age: Hashable) -> bool:
        """Whether the unit's weights of this age need not come from rest."""
        return self.kept is not None and self.kept.has(unit, age)

    def begin(
        self,
        unit: Unit,
        tickets: Sequence[Ticket],
        age: Hashable,
        *,
        coarse: bool = False,
        late: Callable[[], None] | None = None,
    ) -> None:
        """The tickets fill this rank's shards, of weights of this age; gather the others' behind them. Does not block.

        age: None for what shall not be kept. coarse: they travel as int8 groups, and are rounded to these here, too.
        late: to be called by the thread that waits, between the tickets and the exchange.
        """
        if self._comm.world == 1:
            self._fills[unit] = PendingUnshard(tickets, before=late)
        elif late is None:
            self._fills[unit] = PendingUnshard(tickets, self._submit(unit, tickets, age, coarse))
        else:
            self._fills[unit] = PendingUnshard(tickets, before=late, submit=lambda: self._submit(unit, tickets, age, coarse))

    def begin_kept(self, unit: Unit) -> None:
        """Gather the unit from what is kept of it. Does not block."""
        assert self.kept is not None
        put, flats = self.kept.put(unit), list(unit.flats)
        across = len(self.kept.ranks) == 1

        def work(exchange: Exchange) -> None:
            with torch.no_grad():
                put()
                exchange.all_gather([_parts(flat) for flat in flats], across=across)

        self._fills[unit] = PendingUnshard((), self._comm.submit_all_gather(f"gather of {unit.name} as it is kept", work))

    def finish(self, unit: Unit) -> PendingUnshard:
        """Take the unit's fill, for the caller to wait for."""
        return self._fills.pop(unit)

    def put_back(self, unit: Unit, fill: PendingUnshard) -> None:
        """Waiting for it has failed: it is to be abandoned."""
        self._fills[unit] = fill

    def abandon(self, unit: Unit) -> KeyboardInterrupt | None:
        """Nobody wants what is on its way into the unit's buffers; returns when nothing is."""
        fill = self._fills.pop(unit, None)
        if fill is None:
            return None
        interrupt = fill.quiesce()
        if fill.stuck:
            self.stuck.add(unit)
        return interrupt

    def changed(self, unit: Unit) -> None:
        """The unit's weights have changed: nothing that is kept of them counts."""
        if self.kept is not None:
            self.kept.forget(unit)

    def _submit(self, unit: Unit, tickets: Sequence[Ticket], age: Hashable, coarse: bool) -> Op:
        keep = self.kept.keep(unit, age) if self.kept is not None and age is not None else None
        coded = [flat for flat in unit.flats if coarse and flat.dtype in DTYPES]
        plain = [flat for flat in unit.flats if flat not in coded]

        def work(exchange: Exchange) -> None:
            for ticket in tickets:
                ticket.wait_filled()
            with torch.no_grad():
                exchange.all_gather([_parts(flat) for flat in plain])
                exchange.all_gather_quantized([_parts(flat) for flat in coded])
                if keep is not None:
                    keep()

        how = " in int8 groups" if coarse else ""
        return self._comm.submit_all_gather(f"gather of {unit.name}{how}", work)

    def close(self) -> None:
        """Return when nothing is under way, and forget everything."""
        for unit in list(self._fills):
            self.abandon(unit)
        if self.kept is not None:
            self.kept.close()


def _parts(flat: Flat) -> list[torch.Tensor]:
    """The shards of all ranks in a gathered flat."""
    return list(flat.tensor.view(-1, flat.layout.shard_numel))
