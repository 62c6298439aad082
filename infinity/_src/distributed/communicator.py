"""Collectives of one model's ranks: agreements, all_gather of weights, reduce_scatter of gradients.

    control stream    flags, small sums, messages   the caller waits for them
    exchange stream   shards of weights ("gather")  sent when read, ahead of compute
                      gradients ("reduce")          sent while backward runs

Each communication stream is a thread with a separate process group. The control stream runs
collectives in the order of submission, which is the order of the program and the same on every
rank. The exchange stream has a queue per kind, so that a gather that waits for a drive does not
delay a reduction. All ranks launch from both queues in the order that rank 0 chooses
(`order_agreement`). An engine of one rank has no communication streams.
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

# Relative tolerance for numbers of ranks on processors that round differently.
_ROUNDING = 1e-5
# Absolute tolerance: 0.0 and 1e-17 count as equal.
_ROUNDING_NEAR_ZERO = 1e-15


class Comm:
    """Communicator of this rank: topology and communication streams of one model's ranks.

    The constructor creates a communicator of one rank, without communication streams; `open`
    creates one with streams.
    """

    def __init__(self, topology: Topology | None = None) -> None:
        self.topology = topology or Topology.alone()
        self.world, self.rank = self.topology.world, self.topology.rank
        self._group_world = group_world()
        self.watchdog: Watchdog | None = None
        self._control: CommStream | None = None
        self._control_agreement: OrderAgreement | None = None
        self._exchange: OrderedCommStream | None = None
        # By queue of the exchange stream, so that bytes are counted per queue.
        self._collectives: dict[str, Collectives] = {}
        self._timeout_s = 0.0
        self._groups: list[dist.ProcessGroup] = []
        self._forks: list[CommStream] = []
        self._owns_watchdog = True
        # The error of `check_stuck` once the device is stuck, also after `close`.
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
        """Create a communicator with communication streams, for a model on `device`. Collective;
        blocks.

        name: of the engine, the same on all ranks and never reused, since it keys the heartbeat's
        records in the store. transport: for the device's tensors; None: the device's default.
        """
        comm = cls(Topology.find(mesh, timeout_s=timeout_s))
        if comm.world == 1:
            return comm
        comm._timeout_s = timeout_s
        # Before the process groups: their creation waits for all ranks, and the watchdog detects a
        # dead one.
        comm.watchdog = Watchdog(comm.topology, default_store(), timeout_s=timeout_s, name=name)
        # The abort ends calls that are stuck in a backend, whose threads cannot check for failures.
        comm.watchdog.on_failure.append(comm._abort)
        try:
            comm.watchdog.wait_for_all_ranks()
            device = device or torch.device("cpu")
            comm._open_control("control")
            comm._open_exchange(device, transport or transport_for(device))
        except BaseException as error:
            # First, because other ranks may be waiting for this rank to create a group.
            comm.report_failure(error)
            comm.close()
            raise
        return comm

    def _open_control(self, name: str) -> None:
        """Create a control stream and its process group. Collective; blocks."""
        assert self.watchdog is not None
        # gloo for every device: the values are small, and the caller reads them on the CPU.
        (group,) = self._make_groups(name, ["gloo"])
        self._control_agreement = OrderAgreement(self.topology, group)
        self._control = CommStream(name, group=group, watchdog=self.watchdog)

    def _open_exchange(self, device: torch.device, transport: type[Transport]) -> None:
        """Create the exchange stream and its process groups. Collective; blocks."""
        assert self.watchdog is not None
        # A separate group for names: CPU tensors, which are sent while data are sent.
        group, for_names = self._make_groups("exchange", [transport.backend, "gloo"])
        names = OrderAgreement(self.topology, for_names)
        # One transport for both queues, since one thread launches both.
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
        """Run each kind of collective once, with few bytes. Blocks.

        A backend connects ranks at their first exchange, and CUDA loads kernels at their first
        launch. Both may wait for all work on the device, so they are triggered here, while the
        device is idle.
        """
        # A separate object, so that statistics do not count the bytes and buffers of this exchange.
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
        """Create the process groups of a communication stream, in a thread that can be abandoned.

        new_group() waits for all ranks, even for a failed one, and cannot be interrupted.
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
            # First, because close() would wait for the missing rank.
            self.report_failure(error)
            raise
        finally:
            maker.close()
        return self._groups[-len(backends) :]

    def fork(self) -> Comm:
        """Create a communicator of the same ranks with a separate control stream, for another
        thread.

        Collective; blocks.
        """
        other = Comm(self.topology)
        if self.world > 1:
            assert self.watchdog is not None
            # One watchdog for both, since a rank's failure ends all communication streams.
            other.watchdog, other._timeout_s, other._owns_watchdog = (
                self.watchdog,
                self._timeout_s,
                False,
            )
            # A shared list: the communicator that owns the watchdog destroys the groups.
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
        """Submit `work` to the queue of gathers, after the tickets in `needs`. Never blocks.

        what: its name, the same on all ranks. excuses: as in `PendingCollective`, given on all
        ranks or on none.
        """
        return self._submit("gather", what, work, needs, excuses)

    def submit_reduce_scatter(
        self, what: str, work: Callable[[Collectives], None]
    ) -> PendingCollective:
        """Submit `work` to the queue of reductions. Never blocks. what: its name, the same on all
        ranks.
        """
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
        """Return the bytes that this rank has sent from a queue ("gather", "reduce")."""
        found = self._collectives.get(queue)
        return found.volume if found is not None else Volume()

    # -- control -----------------------------------------------------------------------------------

    def _run_control(self, what: str, work: Callable[[Any], object]) -> None:
        """Run a collective in the control stream, after the ranks have compared its name. Blocks.

        Raises: EngineClosed; RanksDiverged.
        """
        if self._control is None or self._control_agreement is None:
            raise EngineClosed(
                f"{what}: the engine of this model was closed, so its ranks no longer communicate"
            )
        names = self._control_agreement

        def checked(group: Any) -> None:
            # First, so that ranks in different collectives do not misinterpret each other's data.
            names.check(what)
            work(group)

        # A fork's collectives run concurrently with the main thread's, so they have no number.
        self._control.submit(what, checked, numbered=self._owns_watchdog).wait()

    def check_same_collective(self, what: Callable[[], str]) -> None:
        """Wait until all ranks have called this with the same `what`. Blocks. Raises:
        RanksDiverged.

        what: returns the name. Called only with several ranks, since it may compute a digest.
        """
        if self.world > 1:
            self._run_control(what(), lambda _group: None)

    def check_same_numbers(self, what: str, numbers: Sequence[float], names: Sequence[str]) -> None:
        """Wait until all ranks have called this with the same `what`, and compare numbers up to
        rounding.

        Blocks. names: the name of each number, for the message.
        Raises: RanksDiverged; ValueError on all ranks if numbers differ, after which the engine can
        continue.
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
                f"rank {rank} has reached {what} with {names[place]} {rows[rank, place]:.10g}, and "
                f"rank 0 with {names[place]} {rows[0, place]:.10g}: all ranks must reach it with "
                "the same numbers, but for rounding (a learning rate that follows the loss of one "
                "rank? a norm of its part?)"
            )

    def _all_gather_rows(self, what: str, mine: torch.Tensor) -> torch.Tensor:
        """All-gather `mine` [len], of one length and dtype on all ranks, into [world, len].
        Blocks."""
        everyone = torch.empty(self.world * mine.numel(), dtype=mine.dtype)
        self._run_control(
            # With the length in the name, ranks with different lengths raise RanksDiverged.
            f"{what} of {mine.numel()}",
            lambda group: all_gather_single(everyone, mine, group=group),
        )
        return everyone.view(self.world, -1)

    def broadcast(self, what: str, values: torch.Tensor) -> None:
        """Broadcast rank 0's `values` (uint8, on the CPU), in place. Blocks.

        what: its name, the same on all ranks. Raises: RanksDiverged.
        """
        self._run_control(
            f"broadcast of {what}, {values.numel()} bytes",
            lambda group: dist.broadcast(values, 0, group=group),
        )

    def scatter(
        self, what: str, out: torch.Tensor, parts: Sequence[torch.Tensor] | None
    ) -> None:
        """Scatter rank 0's equal `parts` (None on other ranks) to each rank's `out`, bitwise, for
        any dtype, on the CPU. Blocks.

        what: its name, the same on all ranks. Raises: RanksDiverged.
        """
        # As bytes: backends do not support all dtypes.
        pieces = None if parts is None else [part.view(uint8) for part in parts]
        self._run_control(
            f"scatter of {what}, {out.nbytes} bytes each",
            lambda group: dist.scatter(out.view(uint8), pieces, src=0, group=group),
        )

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        """All-gather bytes, at least one per rank; lengths may differ. Blocks. Returns them by
        rank.
        """
        if self.world == 1:
            return [data]
        sizes = self._all_gather_rows("object sizes", torch.tensor([len(data)]))[:, 0].tolist()
        # Padded to the longest, since all_gather needs equal lengths.
        mine = torch.frombuffer(bytearray(data.ljust(max(sizes), b"\0")), dtype=torch.uint8)
        rows = self._all_gather_rows("object bytes", mine)
        return [row[:size].numpy().tobytes() for row, size in zip(rows, sizes, strict=True)]

    def all_gather_vector(self, part: torch.Tensor, start: int, numel: int) -> torch.Tensor:
        """All-gather an fp32 vector [numel] bit for bit. This rank's part begins at `start`; parts
        may be empty, and differ in length. Blocks."""
        if part.numel() == numel:
            start = 0
        whole = torch.zeros(numel, dtype=torch.float32)
        whole[start : start + part.numel()] = part
        if self.world > 1:
            # Each element is set on one rank and zero on the others, so an integer sum copies the
            # bits; a float sum would turn -0.0 into 0.0.
            bits = whole.view(torch.int32)
            self._run_control(
                f"a whole of {numel} from its parts",
                lambda group: dist.all_reduce(bits, group=group),
            )
        return whole

    def all_gather_floats(self, values: Sequence[float]) -> list[list[float]]:
        """All-gather numbers, equally many per rank, as fp64. Blocks. Returns them by rank."""
        if self.world == 1:
            return [list(values)]
        mine = torch.tensor(values, dtype=torch.float64)
        rows: list[list[float]] = self._all_gather_rows("sums", mine).tolist()
        return rows

    def all_reduce_sum(self, values: Sequence[float]) -> list[float]:
        """Sum each value over ranks, in fp64. Blocks. All ranks get the same bits."""
        # Not all_reduce, which may add in a different order on each rank.
        first, *others = self.all_gather_floats(values)
        for row in others:
            first = [total + value for total, value in zip(first, row, strict=True)]
        return first

    def all_reduce_any(self, flags: Sequence[bool]) -> list[bool]:
        """OR flags over ranks. Blocks."""
        if self.world == 1 or not flags:
            return list(flags)
        return [
            bool(flag)
            for flag in self._all_gather_rows(
                "agreement", torch.tensor(list(flags), dtype=torch.uint8)
            ).any(dim=0)
        ]

    def differing_indices(self, values: Sequence[int]) -> list[int]:
        """Compare integers below 2^63 over ranks. Blocks. Returns the indices of differing ones."""
        if self.world == 1 or not values:
            return []
        rows = self._all_gather_rows("comparison", torch.tensor(values, dtype=torch.int64))
        return [int(place) for place in (rows != rows[0]).any(dim=0).nonzero()]

    # -- failures and the end ----------------------------------------------------------------------

    def report_exception(self, where: str, error: BaseException) -> None:
        """Publish that this rank's forward or backward raised, for ranks that wait for it. Never
        blocks.
        """
        if self.watchdog is not None:
            self.watchdog.report_exception(where, error)

    def report_failure(self, error: BaseException) -> None:
        """End the engine on all ranks, and publish why this rank failed. Never blocks."""
        if self.watchdog is not None:
            self.watchdog.report_failure(error)

    def check_group(self) -> None:
        """Raise ProcessGroupChanged if the size of torch.distributed's default group has
        changed.
        """
        check_group(self._group_world, self.world)

    def check(self) -> None:
        """Raise RankFailed if a rank is known to have failed."""
        if self.watchdog is not None:
            self.watchdog.check()

    def on_failure(self, callback: Callable[[], None]) -> None:
        """Register a callback for the first failure; the watchdog's thread calls it."""
        if self.watchdog is not None:
            self.watchdog.on_failure.append(callback)

    def check_stuck(self) -> None:
        """Raise RankFailed once the device may be stuck: a rank has failed, and the abort of an
        NCCL group hangs. Never blocks.
        """
        if self._stuck is not None:
            # The exception is raised repeatedly: without this its traceback would grow and hold
            # frames.
            raise self._stuck.with_traceback(None)

    def drain(self) -> None:
        """Block until no all_gather and no reduce_scatter is in progress, on the device either.

        Raises: RankFailed if, after a rank's failure, the device is stuck. Copies queued behind its
        kernels may be stuck, too, so their memory must not be freed.
        """
        # Only for a device: a call that is stuck on the CPU uses only its tensors' memory, and no
        # copy waits for it.
        stream, watchdog = self._exchange, self.watchdog
        if stream is not None and watchdog is not None and not stream.drain() and stream.on_device:
            self._stuck = device_stuck(watchdog.failure)
        self.check_stuck()

    def _abort(self) -> None:
        """Abort all groups, including those of forks. The watchdog's thread calls this at the first
        failure.
        """
        watchdog = self.watchdog
        # A copy: another thread may be adding a group.
        if not abort_groups(list(self._groups)) and watchdog is not None:
            self._stuck = device_stuck(watchdog.failure)

    def close(self, *, ok: bool = True) -> None:
        """Close the communication streams, and publish that this rank leaves. Idempotent.

        Blocks until all submitted work has ended, if no rank has failed.
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
            # After the communication streams, which detect failed ranks by the watchdog.
            self.watchdog.close(ok)
            if self._abort in self.watchdog.on_failure:
                self.watchdog.on_failure.remove(self._abort)
            while self._groups:
                group = self._groups.pop()
                # The destruction of an aborted group would wait for a stuck call.
                if not failed and dist.is_initialized():
                    dist.destroy_process_group(group)
        self.watchdog = None


def device_stuck(failure: RankFailed | None) -> RankFailed:
    """Return the error for collectives that cannot be aborted. failure: of the rank for which they
    wait."""
    return RankFailed(
        f"{failure}; the collectives that wait for that rank cannot be aborted, and later work on "
        "the device never ends: the engine keeps its memory, and this process must end",
        rank=None if failure is None else failure.rank,
    )


def digest(values: Tensor) -> int:
    """Return a digest of a tensor's bits, below 2^63. Copies a tensor that is not on the CPU or not
    contiguous.

    Ranks compare digests of values before they store them: each rank stores only its part, so
    different values would silently become a mixture of models.
    """
    return number_of(
        xxhash.xxh3_64(values.detach().to("cpu").contiguous().reshape(-1).view(uint8).numpy().data)
    )


def digest_of_text(text: str) -> int:
    """Return a digest of a text, below 2^63."""
    return number_of(xxhash.xxh3_64(text.encode()))


def number_of(found: xxhash.xxh3_64) -> int:
    """Return a hash as the int64 in which ranks compare it, below 2^63."""
    return found.intdigest() >> 1


def fingerprinted(what: str, number: int) -> str:
    """Return a collective's name with the digest of its values, for
    `Comm.check_same_collective`.
    """
    # The digest is last, since only the end of a long name is sent.
    return f"{what} (digest {number:016x})"
