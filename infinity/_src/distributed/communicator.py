"""Collectives of one model's ranks: agreements, all_gather of weights, reduce_scatter of gradients.

    control stream    flags, small sums, messages   the caller waits
    exchange stream   shards of weights ("gather")  once this rank's shard is read, ahead of compute
                      gradients ("reduce")          while backward runs

Each communication stream is a thread with a process group of its own. The control stream runs what
it gets in the order of submission, which is the order of the program, and so the same on every
rank. The exchange stream has a queue for each kind, so that a gather that waits for a
drive holds no reduction up. It launches from both in one order, which rank 0 names
(`order_agreement`). One rank alone calls nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor, uint8

from infinity._src.base.torch_compat import all_gather_single
from infinity._src.distributed.collectives import Collectives, Volume
from infinity._src.distributed.comm_streams import CommStream, OrderedCommStream, PendingCollective
from infinity._src.distributed.order_agreement import OrderAgreement
from infinity._src.distributed.process_groups import abort_groups, make_group
from infinity._src.distributed.topology import (
    Topology,
    check_group,
    default_store,
    group_world,
)
from infinity._src.distributed.transport import Transport, transport_for
from infinity._src.distributed.watchdog import Watchdog
from infinity.aio import Ticket
from infinity.errors import AioError, EngineClosed, RankFailed

# Ranks may run on unlike processors, which round differently: numbers may differ by this part.
_ROUNDING = 1e-5
# A relative tolerance alone would call 0.0 and 1e-17 different.
_ROUNDING_NEAR_ZERO = 1e-15


class Comm:
    """Communicator of this rank: its topology, and the communication streams to the other ranks of
    the model.

    The constructor alone makes a communicator without communication streams, as one rank needs it.
    `open` adds them.
    """

    def __init__(self, topology: Topology | None = None) -> None:
        self.topology = topology or Topology.alone()
        self.world, self.rank = self.topology.world, self.topology.rank
        self._group_world = group_world()
        self.watchdog: Watchdog | None = None
        self._control: CommStream | None = None
        self._control_agreement: OrderAgreement | None = None
        self._exchange: OrderedCommStream | None = None
        # Of the exchange stream, by queue: the bytes of each are counted by themselves.
        self._collectives: dict[str, Collectives] = {}
        self._timeout_s = 0.0
        self._groups: list[dist.ProcessGroup] = []
        self._forks: list[CommStream] = []
        self._owns_watchdog = True
        # The error of everything once the device is stuck. Kept: it is raised after `close`, too.
        self._stuck: RankFailed | None = None

    @classmethod
    def open(
        cls,
        *,
        mesh: Any = None,
        device: torch.device | None = None,
        timeout_s: float,
        name: str,
        transport: type[Transport] | None = None,
    ) -> Comm:
        """Make a communicator with communication streams, for a model that computes on `device`.
        Collective; blocks.

        name: the engine's, the same on all ranks and used once: the records of its heartbeat stay
        in the store under it. transport: of tensors of the device; None: the device's own.
        """
        comm = cls(Topology.find(mesh, timeout_s=timeout_s))
        if comm.world == 1:
            return comm
        comm._timeout_s = timeout_s
        # Before the communication streams: making a group waits for all ranks, and only the
        # watchdog names a dead one.
        comm.watchdog = Watchdog(comm.topology, default_store(), timeout_s=timeout_s, name=name)
        # The failure must reach threads that are stuck in a backend, and cannot look at it.
        comm.watchdog.on_failure.append(comm._abort)
        try:
            comm.watchdog.wait_for_all_ranks()
            device = device or torch.device("cpu")
            comm._open_control("control")
            comm._open_exchange(device, transport or transport_for(device))
        except BaseException as error:
            # Before close(): the others may wait for this rank in the making of a communication
            # stream.
            comm.report_failure(error)
            comm.close()
            raise
        return comm

    def _open_control(self, name: str) -> None:
        """Make a control stream with its process group. Collective; blocks."""
        assert self.watchdog is not None
        # Small values that the caller reads at once: on the CPU whatever the model computes on.
        (group,) = self._make_groups(name, ["gloo"])
        self._control_agreement = OrderAgreement(self.topology, group)
        self._control = CommStream(name, group=group, watchdog=self.watchdog)

    def _open_exchange(self, device: torch.device, transport: type[Transport]) -> None:
        """Make the exchange stream with its process groups. Collective; blocks."""
        assert self.watchdog is not None
        # Names have a group of their own: they travel beside the data, and on the CPU.
        group, for_names = self._make_groups("exchange", [transport.backend, "gloo"])
        names = OrderAgreement(self.topology, for_names)
        # One for both queues, whose work one thread launches.
        moved = transport(group, device)
        self._collectives = {
            queue: Collectives(self.topology, moved, device) for queue in ("gather", "reduce")
        }
        self._exchange = OrderedCommStream(
            "exchange",
            list(self._collectives),
            group=group,
            names=names,
            watchdog=self.watchdog,
            device=device,
        )
        self._warm_up(self._exchange, moved, device)

    def _warm_up(
        self, stream: OrderedCommStream, transport: Transport, device: torch.device
    ) -> None:
        """Exchange a little in every way that training does. Blocks.

        A backend connects ranks when they first exchange something, and CUDA loads kernels when
        they are first launched. Both may wait for all that runs on the device: they come here,
        while nothing does.
        """
        # Of its own: its bytes and buffers are not training's.
        collectives = Collectives(self.topology, transport, device)
        gathered = torch.zeros(self.world, 1, dtype=torch.float32, device=device)
        reduced = torch.zeros_like(gathered)
        mean, flags = (
            torch.zeros_like(gathered[0]),
            torch.zeros_like(gathered[0], dtype=torch.uint8),
        )

        def work(_group: Any) -> None:
            collectives.all_gather([gathered])
            collectives.reduce_scatter_mean([list(reduced)], [mean])
            collectives.all_reduce_or(flags)

        op = stream.submit_to("gather", "the first exchange", work, numbered=False)
        op.wait()
        if not op.finished():
            raise RankFailed("the first exchange between the ranks does not end on the device")

    def _make_groups(self, name: str, backends: Sequence[str]) -> list[dist.ProcessGroup]:
        """Make the process groups of a communication stream, in a thread that can be given up.

        new_group() waits for all ranks with no way to stop it, also for one that has failed.
        """
        assert self.watchdog is not None
        maker = CommStream(f"{name}-maker", group=None, watchdog=self.watchdog)

        def make(_group: Any) -> None:
            for backend in backends:
                group = make_group(timeout_s=self._timeout_s, backend=backend)
                assert group is not None
                self._groups.append(group)

        try:
            maker.submit(f"the making of the {name} stream", make, numbered=False).wait()
        except BaseException as error:
            # Before close(), which would wait for the rank that does not come.
            self.report_failure(error)
            raise
        finally:
            maker.close()
        return self._groups[-len(backends) :]

    def fork(self) -> Comm:
        """Make a communicator of the same ranks with a control stream of its own, for another
        thread.

        Collective; blocks.
        """
        other = Comm(self.topology)
        if self.world > 1:
            assert self.watchdog is not None
            # One watchdog for both: a rank that fails has failed for every communication stream.
            other.watchdog, other._timeout_s, other._owns_watchdog = (
                self.watchdog,
                self._timeout_s,
                False,
            )
            # Destroyed by the communicator that owns the watchdog.
            other._groups = self._groups
            other._open_control("fork")
            assert other._control is not None
            self._forks.append(other._control)
        return other

    # -- weights and gradients ---------------------------------------------------------------------

    def submit_all_gather(
        self,
        what: str,
        work: Callable[[Collectives], None],
        needs: Sequence[Ticket] = (),
        excuses: Callable[[AioError], bool] | None = None,
    ) -> PendingCollective:
        """Submit `work` to the gathers, behind the tickets in `needs`. Never blocks.

        what: its name, the same on all ranks. excuses: as in `PendingCollective`, given on all
        ranks or on none.
        """
        return self._submit("gather", what, work, needs, excuses)

    def submit_reduce_scatter(
        self, what: str, work: Callable[[Collectives], None]
    ) -> PendingCollective:
        """Submit `work` to the reductions. Never blocks. what: its name, the same on all ranks."""
        return self._submit("reduce", what, work, (), None)

    def _submit(
        self,
        queue: str,
        what: str,
        work: Callable[[Collectives], None],
        needs: Sequence[Ticket],
        excuses: Callable[[AioError], bool] | None,
    ) -> PendingCollective:
        assert self._exchange is not None
        collectives = self._collectives[queue]
        return self._exchange.submit_to(
            queue, what, lambda _group: work(collectives), needs=needs, excuses=excuses
        )

    def volume(self, queue: str) -> Volume:
        """Bytes that this rank has sent from a queue ("gather", "reduce")."""
        found = self._collectives.get(queue)
        return found.volume if found is not None else Volume()

    # -- control -----------------------------------------------------------------------------------

    def _run_control(self, what: str, work: Callable[[Any], object]) -> None:
        """Run a collective in the control stream, once all ranks have come to the same. Blocks.

        Raises: EngineClosed; RanksDiverged.
        """
        if self._control is None or self._control_agreement is None:
            raise EngineClosed(
                f"{what}: the engine of this model was closed, and its ranks exchange nothing more"
            )
        names = self._control_agreement

        def checked(group: Any) -> None:
            # First: without it, ranks that differ would take each other's data for what they
            # expect.
            names.check(what)
            work(group)

        # A fork is used beside the main thread, so its collectives have no place in the numbering.
        self._control.submit(what, checked, numbered=self._owns_watchdog).wait()

    def check_same_collective(self, what: Callable[[], str]) -> None:
        """Wait until all ranks have come here with the same `what`. Blocks. Raises: RanksDiverged.

        what: called with several ranks only, since a name may take a digest to make.
        """
        if self.world > 1:
            self._run_control(what(), lambda _group: None)

    def check_same_numbers(self, what: str, numbers: Sequence[float], names: Sequence[str]) -> None:
        """Wait until all ranks have come here with the same `what` and the same numbers, but for
        rounding.

        Blocks. names: the name of each number, for the message.
        Raises: RanksDiverged; ValueError on all ranks where numbers differ, and all may go on.
        """
        if self.world == 1:
            return
        rows = self._all_gather_rows(what, torch.tensor(numbers, dtype=torch.float64))
        found = (
            ~torch.isclose(rows, rows[0], rtol=_ROUNDING, atol=_ROUNDING_NEAR_ZERO, equal_nan=True)
        ).nonzero()
        if len(found):
            rank, place = found[0].tolist()
            raise ValueError(
                f"rank {rank} has come to {what} with {names[place]} {rows[rank, place]:.10g}, and "
                f"rank 0 with {names[place]} {rows[0, place]:.10g}: all ranks must come to it with "
                "the same numbers, but for rounding (a learning rate that follows the loss of one "
                "rank? a norm of its part?)"
            )

    def _all_gather_rows(self, what: str, mine: torch.Tensor) -> torch.Tensor:
        """All-gather `mine` [len], of one length and dtype on all ranks, into [world, len].
        Blocks."""
        everyone = torch.empty(self.world * mine.numel(), dtype=mine.dtype)
        self._run_control(
            # The length is in the name: ranks that differ in it would send messages that do not
            # fit.
            f"{what} of {mine.numel()}",
            lambda group: all_gather_single(everyone, mine, group=group),
        )
        return everyone.view(self.world, -1)

    def broadcast(self, what: str, values: torch.Tensor) -> None:
        """Write rank 0's `values` (uint8, on the CPU) over those of the others. Blocks.

        what: its name, the same on all ranks. Raises: RanksDiverged.
        """
        self._run_control(
            f"broadcast of {what}, {values.numel()} bytes",
            lambda group: dist.broadcast(values, 0, group=group),
        )

    def scatter(
        self, what: str, out: torch.Tensor, parts: Sequence[torch.Tensor] | None
    ) -> None:
        """Fill `out` with this rank's one of the equal `parts` that rank 0 has; None on the others.
        Bits of any dtype, on the CPU. Blocks.

        what: its name, the same on all ranks. Raises: RanksDiverged.
        """
        # As bytes: backends know fewer dtypes.
        pieces = None if parts is None else [part.view(uint8) for part in parts]
        self._run_control(
            f"scatter of {what}, {out.nbytes} bytes each",
            lambda group: dist.scatter(out.view(uint8), pieces, src=0, group=group),
        )

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        """All-gather bytes of any length but 0, which may differ by rank. Blocks. Returns them by
        rank."""
        if self.world == 1:
            return [data]
        sizes = self._all_gather_rows("object sizes", torch.tensor([len(data)]))[:, 0].tolist()
        # Padded to the longest: an all_gather wants one length on all ranks.
        mine = torch.frombuffer(bytearray(data.ljust(max(sizes), b"\0")), dtype=torch.uint8)
        rows = self._all_gather_rows("object bytes", mine)
        return [row[:size].numpy().tobytes() for row, size in zip(rows, sizes, strict=True)]

    def all_gather_vector(self, part: torch.Tensor, start: int, numel: int) -> torch.Tensor:
        """All-gather an fp32 vector [numel]. Every rank holds one part, from `start` on.
        Blocks.

        Bits are kept, those of NaN and of -0.0 too. Parts may be empty, and differ in length.
        """
        if part.numel() == numel:
            start = 0
        whole = torch.zeros(numel, dtype=torch.float32)
        whole[start : start + part.numel()] = part
        if self.world > 1:
            # Every element is one rank's and zero bits elsewhere: an integer sum copies them, while
            # a sum of floats would turn -0.0 into 0.0.
            bits = whole.view(torch.int32)
            self._run_control(
                f"a whole of {numel} from its parts",
                lambda group: dist.all_reduce(bits, group=group),
            )
        return whole

    def all_gather_floats(self, values: Sequence[float]) -> list[list[float]]:
        """All-gather numbers, as many on each rank, in double: those of rank 0, of rank 1, ...
        Blocks."""
        if self.world == 1:
            return [list(values)]
        mine = torch.tensor(values, dtype=torch.float64)
        rows: list[list[float]] = self._all_gather_rows("sums", mine).tolist()
        return rows

    def all_reduce_sum(self, values: Sequence[float]) -> list[float]:
        """Sum each value over ranks, in double. Blocks. The result has the same bits on every
        rank."""
        # Gathered and added in the order of ranks: an all_reduce may add in another order on each
        # rank.
        first, *others = self.all_gather_floats(values)
        for row in others:
            first = [total + value for total, value in zip(first, row, strict=True)]
        return first

    def all_reduce_any(self, flags: Sequence[bool]) -> list[bool]:
        """Combine flags over ranks: each is set in the result if any rank has set it. Blocks."""
        if self.world == 1 or not flags:
            return list(flags)
        return [
            bool(flag)
            for flag in self._all_gather_rows(
                "agreement", torch.tensor(list(flags), dtype=torch.uint8)
            ).any(dim=0)
        ]

    def differing_indices(self, values: Sequence[int]) -> list[int]:
        """Compare whole numbers below 2^63 over ranks. Blocks. Returns the indices of those that
        differ."""
        if self.world == 1 or not values:
            return []
        rows = self._all_gather_rows("comparison", torch.tensor(values, dtype=torch.int64))
        return [int(place) for place in (rows != rows[0]).any(dim=0).nonzero()]

    # -- failures and the end ----------------------------------------------------------------------

    def report_exception(self, where: str, error: BaseException) -> None:
        """Tell ranks that wait for this one that its forward or backward broke off. Never
        blocks."""
        if self.watchdog is not None:
            self.watchdog.report_exception(where, error)

    def report_failure(self, error: BaseException) -> None:
        """End the engine on all ranks, and publish why this one cannot go on. Never blocks."""
        if self.watchdog is not None:
            self.watchdog.report_failure(error)

    def check_group(self) -> None:
        """Raise ProcessGroupChanged if torch.distributed has a default group of another size by
        now."""
        check_group(self._group_world, self.world)

    def check(self) -> None:
        """Raise RankFailed if a rank is known to have failed."""
        if self.watchdog is not None:
            self.watchdog.check()

    def on_failure(self, callback: Callable[[], None]) -> None:
        """Call this, in another thread, once a rank is known to have failed."""
        if self.watchdog is not None:
            self.watchdog.on_failure.append(callback)

    def check_stuck(self) -> None:
        """Raise RankFailed once nothing on the device may end any more: a rank has failed, and the
        abort of a group of NCCL hangs. Never blocks.
        """
        if self._stuck is not None:
            # One exception is raised many times: its traceback would grow, and hold frames.
            raise self._stuck.with_traceback(None)

    def drain(self) -> None:
        """Block until no all_gather and no reduce_scatter is under way, on the device either.

        Raises: RankFailed where that cannot be had, after a rank has failed: the device is stuck,
        and so may be all copies that are behind its kernels. Their memory must not be freed.
        """
        # A call that is stuck on the CPU holds the memory of its own tensors, and nothing else
        # waits behind it.
        stream, watchdog = self._exchange, self.watchdog
        if stream is not None and watchdog is not None and not stream.drain() and stream.on_device:
            self._stuck = device_stuck(watchdog.failure)
        self.check_stuck()

    def _abort(self) -> None:
        """Abort all groups, those of forks too; the watchdog's thread calls this at the first
        failure.
        """
        watchdog = self.watchdog
        # A copy: another thread may be making a group.
        if not abort_groups(list(self._groups)) and watchdog is not None:
            self._stuck = device_stuck(watchdog.failure)

    def close(self, *, ok: bool = True) -> None:
        """Close the communication streams, and publish that this rank leaves. Idempotent.

        Blocks until what was submitted has ended, if all ranks live.
        """
        streams = [self._control, self._exchange, *self._forks]
        for stream in streams:
            if stream is not None:
                stream.close()
        self._control = self._exchange = self._control_agreement = None
        self._forks.clear()
        self._collectives.clear()
        if self.watchdog is not None and self._owns_watchdog:
            failed = self.watchdog.failure is not None
            # After the communication streams, which still need its verdict on ranks that do not
            # come.
            self.watchdog.close(ok)
            if self._abort in self.watchdog.on_failure:
                self.watchdog.on_failure.remove(self._abort)
            while self._groups:
                group = self._groups.pop()
                # An aborted group has no peers to part from, and destroying it would wait for a
                # call that is stuck in it.
                if not failed and dist.is_initialized():
                    dist.destroy_process_group(group)
        self.watchdog = None


def device_stuck(failure: RankFailed | None) -> RankFailed:
    """Make the error of collectives that cannot be broken off. failure: of the rank that they wait
    for."""
    return RankFailed(
        f"{failure}; collectives that wait for it cannot be broken off, and what is behind them on "
        "the device never ends: the engine keeps its memory, and this process must end",
        rank=None if failure is None else failure.rank,
    )


def digest(values: Tensor) -> int:
    """Digest of a tensor's bits, below 2^63. Copies a tensor that is not on the CPU or not
    contiguous.

    Ranks compare digests before values have an effect. Each rank keeps only its part of them, and
    parts of different values would make a whole that no rank has. No loss would show that.
    """
    return (
        xxhash.xxh3_64_intdigest(
            values.detach().to("cpu").contiguous().reshape(-1).view(uint8).numpy().data
        )
        # Shifted by one, so that it fits the int64 in which ranks compare it.
        >> 1
    )


def digest_of_text(text: str) -> int:
    """Digest of a text, below 2^63."""
    return xxhash.xxh3_64_intdigest(text.encode()) >> 1


def fingerprinted(what: str, number: int) -> str:
    """Name of a collective with the digest of its values, for `Comm.check_same_collective`."""
    # At the end of the name: only the end of a long name travels.
    return f"{what} (digest {number:016x})"
