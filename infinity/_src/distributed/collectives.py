"""What the ranks of a model do together: agree, gather weights, reduce gradients, and notice when one of them is gone.

    control lane   flags, small sums, what ranks tell    the caller waits
    gather lane    shards of weights                     behind the reads of this rank's shard, ahead of forward and backward
    reduce lane    gradients of a unit                   while backward goes on

Each lane is a thread with a process group of its own: what is submitted to it runs in that order, which is the order of the
program and so the same on every rank. With one rank nothing is called.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor, uint8

from infinity._src._torch_compat import all_gather_single
from infinity._src.distributed.exchange import Exchange, Volume
from infinity._src.distributed.lanes import Lane, Op
from infinity._src.distributed.process_groups import make_group
from infinity._src.distributed.topology import Topology, default_store
from infinity._src.distributed.watchdog import Watchdog
from infinity.errors import EngineClosed

_ROUNDING = 1e-5
"""Part of a number by which ranks may differ in it: processors round differently."""
_ROUNDING_NEAR_ZERO = 1e-15


class Comm:
    """This process's place among the ranks that share a model, and its lanes to them, which `open` makes (for one rank, none)."""

    def __init__(self, topology: Topology | None = None) -> None:
        self.topology = topology or Topology.alone()
        self.world, self.rank = self.topology.world, self.topology.rank
        self.watchdog: Watchdog | None = None
        self._control: Lane | None = None
        self._gather: Lane | None = None
        self._reduce: Lane | None = None
        self._exchanges: dict[str, Exchange] = {}
        self._timeout_s = 0.0
        self._groups: list[dist.ProcessGroup] = []
        self._asides: list[Lane] = []
        self._owns_watch = True

    @classmethod
    def open(cls, *, mesh: Any = None, device: torch.device | None = None, timeout_s: float, name: str) -> Comm:
        """With lanes, for a model that computes on `device`. Collective; blocks. name: of this engine alone, on all ranks."""
        comm = cls(Topology.find(mesh, timeout_s=timeout_s))
        if comm.world == 1:
            return comm
        comm._timeout_s = timeout_s
        comm.watchdog = Watchdog(comm.topology, default_store(), timeout_s=timeout_s, name=name)
        try:
            comm.watchdog.wait_for_all_ranks()
            device = device or torch.device("cpu")
            backend = "nccl" if device.type == "cuda" else "gloo"
            comm._control = comm._lane("control", "gloo", torch.device("cpu"))
            comm._gather = comm._lane("gather", backend, device)
            comm._reduce = comm._lane("reduce", backend, device)
        except BaseException as error:
            comm.report_failure(error)  # first: the others may wait for this rank
            comm.close()
            raise
        return comm

    def _lane(self, name: str, backend: str, device: torch.device) -> Lane:
        assert self.watchdog is not None
        group, *beside = self._make_groups(name, [backend] if backend == "gloo" else [backend, "gloo"], device)
        check = beside[0] if beside else None
        self._exchanges[name] = Exchange(self.topology, group, device, check_group=check)
        return Lane(name, group=group, watchdog=self.watchdog, device=device, beside=check)

    def _make_groups(self, name: str, backends: Sequence[str], device: torch.device) -> list[dist.ProcessGroup]:
        """Process groups for a lane, made in a thread that can be given up: new_group() waits for ranks that have failed, too."""
        assert self.watchdog is not None
        maker = Lane(f"{name}-maker", group=None, watchdog=self.watchdog, device=device)

        def make(_group: Any) -> None:
            for backend in backends:
                group = make_group(timeout_s=self._timeout_s, backend=backend)
                assert group is not None
                self._groups.append(group)

        try:
            maker.submit(f"the making of the {name} lane", make, numbered=False).wait()
        except BaseException as error:
            self.report_failure(error)  # first: closing would wait for what does not come
            raise
        finally:
            maker.close()
        return self._groups[-len(backends) :]

    def fork(self) -> Comm:
        """The same ranks with a control lane of their own, which another thread may use. Blocks; all ranks ask at once."""
        other = Comm(self.topology)
        if self.world > 1:
            assert self.watchdog is not None
            other.watchdog, other._timeout_s, other._owns_watch = self.watchdog, self._timeout_s, False
            other._groups = self._groups
            other._control = other._lane("aside", "gloo", torch.device("cpu"))
            self._asides.append(other._control)
        return other

    # -- gather and reduce ---------------------------------------------------------------------------------------------

    def submit_all_gather(self, what: str, work: Callable[[Exchange], None]) -> Op:
        """Let `work` run in the gather lane. Never blocks."""
        assert self._gather is not None
        return self._gather.submit(what, self._met("gather", what, work))

    def submit_reduce_scatter(self, what: str, work: Callable[[Exchange], None]) -> Op:
        """Let `work` run in the reduce lane. Never blocks."""
        assert self._reduce is not None
        return self._reduce.submit(what, self._met("reduce", what, work))

    def _met(self, lane: str, what: str, work: Callable[[Exchange], None]) -> Callable[[Any], None]:
        """The work, which begins when it is the same on all ranks."""
        exchange = self._exchanges[lane]

        def together(_group: Any) -> None:
            exchange.check_same_collective(what)
            work(exchange)

        return together

    def volume(self, lane: str) -> Volume:
        """What this rank has sent in a lane ("gather", "reduce")."""
        found = self._exchanges.get(lane)
        return found.volume if found is not None else Volume()

    # -- control -------------------------------------------------------------------------------------------------------

    def _together(self, what: str, work: Callable[[Any], object]) -> None:
        """Run a collective in the control lane, which begins when it is the same on all ranks. Blocks. Raises: EngineClosed."""
        if self._control is None:
            raise EngineClosed(f"{what}: the engine of this model was closed, and its ranks meet no more")
        exchange = self._exchanges["control" if self._owns_watch else "aside"]

        def together(group: Any) -> None:
            exchange.check_same_collective(what)
            work(group)

        self._control.submit(what, together, numbered=self._owns_watch).wait()

    def check_same_collective(self, what: Callable[[], str]) -> None:
        """Return when all ranks have come here, too, and `what` names the same. Blocks. Raises: RanksDiverged."""
        if self.world > 1:
            self._together(what(), lambda _group: None)

    def check_same_numbers(self, what: str, numbers: Sequence[float], names: Sequence[str]) -> None:
        """Return when all ranks have come here, too, `what` is the same, and the numbers are, but for rounding. Blocks.

        names: of the numbers. Raises: RanksDiverged; ValueError on all ranks where numbers differ, and all may go on.
        """
        if self.world == 1:
            return
        rows = self._everyone(what, torch.tensor(numbers, dtype=torch.float64))
        found = (~torch.isclose(rows, rows[0], rtol=_ROUNDING, atol=_ROUNDING_NEAR_ZERO, equal_nan=True)).nonzero()
        if len(found):
            rank, place = found[0].tolist()
            raise ValueError(
                f"rank {rank} has come to {what} with {names[place]} {rows[rank, place]:.10g}, and rank 0 with {names[place]} "
                f"{rows[0, place]:.10g}: all ranks must come to it with the same numbers, but for rounding (a learning rate that "
                "follows the loss of one rank? a norm of its part?)"
            )

    def _everyone(self, what: str, mine: torch.Tensor) -> torch.Tensor:
        """What each rank has, [world, len]: `mine` is [len], of one length and dtype on all. Blocks."""
        everyone = torch.empty(self.world * mine.numel(), dtype=mine.dtype)
        self._together(f"{what} of {mine.numel()}", lambda group: all_gather_single(everyone, mine, group=group))
        return everyone.view(self.world, -1)

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        """What each rank tells, by rank; not empty, and of any length. Blocks."""
        if self.world == 1:
            return [data]
        sizes = self._everyone("a telling", torch.tensor([len(data)]))[:, 0].tolist()
        mine = torch.frombuffer(bytearray(data.ljust(max(sizes), b"\0")), dtype=torch.uint8)
        rows = self._everyone("what is told", mine)
        return [row[:size].numpy().tobytes() for row, size in zip(rows, sizes, strict=True)]

    def all_gather_vector(self, part: torch.Tensor, start: int, numel: int) -> torch.Tensor:
        """The whole [numel] of an fp32 vector of which every rank holds one part, from `start` on; bits are kept. Blocks."""
        if part.numel() == numel:
            start = 0
        whole = torch.zeros(numel, dtype=torch.float32)
        whole[start : start + part.numel()] = part
        if self.world > 1:
            bits = whole.view(torch.int32)  # every element is one rank's and nothing elsewhere
            self._together(f"a whole of {numel} from its parts", lambda group: dist.all_reduce(bits, group=group))
        return whole

    def all_reduce_sum(self, values: Sequence[float]) -> list[float]:
        """The sum over ranks of each value, in double, in the order of ranks: the same on every rank. Blocks."""
        if self.world == 1:
            return list(values)
        total = torch.zeros(len(values), dtype=torch.float64)
        for row in self._everyone("sums", torch.tensor(values, dtype=torch.float64)):
            total += row
        return [float(value) for value in total]

    def all_reduce_any(self, flags: Sequence[bool]) -> list[bool]:
        """For each flag, whether it is set on any rank. Blocks."""
        if self.world == 1 or not flags:
            return list(flags)
        return [bool(flag) for flag in self._everyone("agreement", torch.tensor(list(flags), dtype=torch.uint8)).any(dim=0)]

    def differing_indices(self, values: Sequence[int]) -> list[int]:
        """The places of whole numbers (below 2^63) that are not the same on all ranks. Blocks."""
        if self.world == 1 or not values:
            return []
        rows = self._everyone("comparison", torch.tensor(values, dtype=torch.int64))
        return [int(place) for place in (rows != rows[0]).any(dim=0).nonzero()]

    # -- failures and the end ------------------------------------------------------------------------------------------

    def report_exception(self, where: str, error: BaseException) -> None:
        """This rank's forward or backward broke off: those that wait for it are told. Never blocks."""
        if self.watchdog is not None:
            self.watchdog.report_exception(where, error)

    def report_failure(self, error: BaseException) -> None:
        """This rank cannot go on: neither can the others, which are told why. Never blocks."""
        if self.watchdog is not None:
            self.watchdog.report_failure(error)

    def check(self) -> None:
        """Raise RankFailed if a rank is known to have failed."""
        if self.watchdog is not None:
            self.watchdog.check()

    def close(self, *, ok: bool = True) -> None:
        """End the lanes, and say goodbye. Idempotent. Blocks until what was submitted has ended, if all ranks live."""
        lanes = [self._control, self._gather, self._reduce, *self._asides]
        for lane in lanes:
            if lane is not None:
                lane.close()
        self._control = self._gather = self._reduce = None
        self._asides.clear()
        self._exchanges.clear()
        if self.watchdog is not None and self._owns_watch:
            failed = self.watchdog.failure is not None
            self.watchdog.close(ok)
            while self._groups:
                group = self._groups.pop()
                # One that was broken off has no peers to part from, and a call that is stuck in it would be waited for.
                if not failed and dist.is_initialized():
                    dist.destroy_process_group(group)
        self.watchdog = None


def digest(values: Tensor) -> int:
    """Of a tensor's bits, as they lie, below 2^63. Takes a copy of what is not on the CPU or not contiguous."""
    return xxhash.xxh3_64_intdigest(values.detach().to("cpu").contiguous().reshape(-1).view(uint8).numpy().data) >> 1


def digest_of_text(text: str) -> int:
    """As `digest`."""
    return xxhash.xxh3_64_intdigest(text.encode()) >> 1


def fingerprinted(what: str, number: int) -> str:
    """`what` with the digest of what it is done with. The end of a name is what travels: see `Exchange.check_same_collective`."""
    return f"{what} (digest {number:016x})"
