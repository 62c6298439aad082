"""Resources that the ranks of one machine share: its memory, its drives' capacity and bandwidth.

Ranks agree on them in rounds of a rendezvous while a model is set up:

    round                                   derived from it
    offload: machine, free memory           this rank's directories, its share of the memory
             drives                         ranks per drive: share of its bandwidth, queue depth
             files of the values            if the same on all ranks, each reads its part of them
             memory of the plan             more than is free: MemoryLimitError on all ranks
             capacity of the drives         more than is free: SwapFullError on all ranks
             after each unit                a rank that cannot read or write stops all ranks
    optimizer: capacity of the drives       as above

The kernel identifies a machine, not the nodes of a mesh: two "nodes" on one machine have one
memory. A rank that fails sends its error, and all other ranks raise PeerFailed with it
(infinity._src.distributed.rendezvous).
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from infinity._src.base.sizes import format_size
from infinity._src.config.policy import Policy
from infinity._src.distributed.communicator import Comm
from infinity._src.distributed.rendezvous import Rendezvous
from infinity._src.distributed.topology import is_own, own_numbers
from infinity._src.memory.ledger import (
    RAM_SHARE,
    describe_limit,
    fair_share,
    machine,
    memory_seen,
)
from infinity._src.memory.ram_budget import PlacementPlan
from infinity._src.memory.swap_space import NoRoomError
from infinity.aio import SwapFile
from infinity.aio._file_system import limits_of
from infinity.aio._probe import BLOCK_BYTES
from infinity.aio._swap_file import is_directory_pattern, resolve_directories
from infinity.errors import MemoryLimitError

DEPTH_MIN = 8
"""Least queue depth of a rank at a drive, however many ranks share the drive. With a smaller depth
the drive is idle between requests."""


@contextlib.contextmanager
def open_node_resources(comm: Comm, policy: Policy) -> Iterator[NodeResources]:
    """Open the rendezvous of ranks that offload a model. Collective.

    `NodeResources.end_rendezvous` ends the rendezvous; the context exits when the model is closed.
    """
    with Rendezvous(comm, "inf.offload") as rendezvous:
        found = NodeResources(comm, policy, rendezvous)
        try:
            yield found
        finally:
            # From here on this rank must not communicate: other ranks may never take part.
            found.closed = True


class NodeResources:
    """Share of the machine's resources that this rank may use.

    With one rank no method communicates.
    policy: the given policy with this rank's directories, and its share of the given bandwidths.
    number, ranks: this rank's number among the ranks of the machine, and their count.
    default_bytes: RAM_SHARE of this rank's share of the memory that was free before any rank
        allocated.
    """

    def __init__(self, comm: Comm, policy: Policy, rendezvous: Rendezvous) -> None:
        self._comm = comm
        self._rendezvous: Rendezvous | None = rendezvous
        self.closed = False
        # Before any rank allocates: every rank sends this value in the first round.
        seen = memory_seen()
        everyone = rendezvous.all_gather_object(
            {"machine": machine(), "memory": seen, "rules": policy.rules}
        )
        # First: ranks with different rules would make different plans, and then different rounds.
        _check_rules([row["rules"] for row in everyone])
        # Matched by the kernel's boot id, not by the mesh: "nodes" on one machine share its memory
        # and its drives.
        self._neighbours = [
            rank for rank, row in enumerate(everyone) if row["machine"] == machine()
        ]
        self.number, self.ranks = self._neighbours.index(comm.rank), len(self._neighbours)
        self.default_bytes = int(
            RAM_SHARE * fair_share(seen, [row["memory"] for row in everyone])
        )
        # A pattern names one directory per rank; replace it by this rank's directory.
        if any(is_directory_pattern(path) for path in policy.directories):
            # An engine with a mesh of one rank has rank 0 in every process.
            rank, local_rank = (
                own_numbers() if is_own(policy.mesh) else (comm.rank, self._local_rank())
            )
            found = resolve_directories(policy.directories, rank=rank, local_rank=local_rank)
            policy = dataclasses.replace(policy, nvme=found)
        # Counted by drive, not by path: directories on one drive share its bandwidth.
        drives = {path.resolve(): _drive(path) for path in policy.directories if path.is_dir()}
        everyone = rendezvous.all_gather_object({"drives": sorted(set(drives.values()))})
        self._sharers = {
            path: sum(drive in everyone[rank]["drives"] for rank in self._neighbours)
            for path, drive in drives.items()
        }
        self.policy = self._with_part_of_bandwidths(policy)

    def sharers(self, directory: str | os.PathLike[str]) -> int:
        """Count the ranks with a directory on the same drive as this directory."""
        return self._sharers.get(Path(directory).resolve(), 1)

    def depths(self, files: Sequence[SwapFile]) -> list[int]:
        """Choose the queue depth for each drive: its limit divided by the ranks that share it, and
        at least DEPTH_MIN where the limit allows that.
        """
        settings, found = self.policy.io_settings, []
        for file in files:
            taken = limits_of(file).fit(settings.block_bytes or BLOCK_BYTES, settings.depth)[1]
            found.append(max(taken // self.sharers(file.directory), min(taken, DEPTH_MIN)))
        return found

    def check_memory(
        self,
        plan: PlacementPlan,
        *,
        begun_bytes: int,
        initializing_bytes: int,
        running_bytes: int,
        freed_bytes: int,
    ) -> None:
        """Check that the plans of all ranks and their host overhead fit into memory. Collective.

        begun_bytes: bytes of this rank's plan that it allocates before it frees the model's values.
        initializing_bytes, running_bytes: its overhead outside of the plan before and after that.
        freed_bytes: memory of the model's values, freed once they are at rest. Raises:
        MemoryLimitError on all ranks if the ranks under one limit need more than it leaves.
        """
        assert self._rendezvous is not None
        everyone = self._rendezvous.all_gather_object(
            {
                "begun": (begun_bytes, initializing_bytes),
                "size": (plan.ram_bytes, running_bytes),
                "freed": freed_bytes,
                "least": plan.min_bytes,
                "memory": memory_seen(),
            }
        )
        # Each limit (the machine's, or a cgroup's) bounds the ranks that report it.
        for limit in {limit: None for row in everyone for limit in row["memory"]}:
            ranks = [rank for rank, row in enumerate(everyone) if limit in row["memory"]]
            # Ranks may have read a limit at different moments: the smallest value counts.
            left = min(everyone[rank]["memory"][limit] for rank in ranks)
            freed = sum(everyone[rank]["freed"] for rank in ranks)
            # During initialization the model's values still take memory; afterwards it is free.
            for name, available in (("begun", left), ("size", left + freed)):
                planned, overhead = (
                    sum(everyone[rank][name][part] for rank in ranks) for part in (0, 1)
                )
                if planned + overhead > available:
                    least = max(everyone[rank]["least"] for rank in ranks)
                    raise _limit_error(
                        limit, planned + overhead, available, ranks, least=least, overhead=overhead
                    )

    def check_room(self, files: Sequence[SwapFile], sizes: Sequence[int]) -> None:
        """Check that the file systems have space for all ranks: `sizes` more bytes in each of this
        rank's files.

        Collective during a rendezvous, in which all ranks allocate together. Outside of one each
        rank allocates alone, and this returns at once.
        Raises: NoRoomError on all ranks if the ranks on one file system need more than it has free.
        """
        if self._comm.world == 1 or self._rendezvous is None:
            return
        # Wait for all ranks before measuring: each may still remove files of an earlier run.
        self.check_peers()
        wants: dict[str, int] = {}
        free: dict[str, tuple[int, str]] = {}
        for file, size in zip(files, sizes, strict=True):
            system = str(os.fstat(file.fd).st_dev)
            wants[system] = wants.get(system, 0) + size
            free[system] = (file.free_bytes(), file.path)
        everyone = self._rendezvous.all_gather_object(
            {"machine": machine(), "wants": wants, "free": free}
        )
        # A device number identifies a file system only within its machine.
        systems = {(row["machine"], system): None for row in everyone for system in row["wants"]}
        for where, system in systems:
            ranks = [
                rank
                for rank, row in enumerate(everyone)
                if row["machine"] == where and system in row["wants"]
            ]
            wanted = sum(everyone[rank]["wants"][system] for rank in ranks)
            # The ranks measured one file system at different times: the smallest value is safe.
            left, path = min(everyone[rank]["free"][system] for rank in ranks)
            if wanted > left:
                raise NoRoomError(
                    f"{path!r} has space for {left} of {wanted} more bytes that {_ranks(ranks)} "
                    f"need together: {wanted - left} are missing; free space, or add a directory "
                    "to Policy.nvme",
                    errno=errno.ENOSPC,
                    path=path,
                    op="allocate",
                    length=wanted,
                )

    def are_alike(self, value: str) -> bool:
        """Return whether all ranks give the same value, and it is not empty. Collective during a
        rendezvous. Raises: PeerFailed."""
        assert self._rendezvous is not None
        everyone = self._rendezvous.all_gather_object({"value": value})
        return bool(value) and all(row["value"] == value for row in everyone)

    def least(self, value: int) -> int:
        """Return the least of the values that the ranks give. Collective during a rendezvous.
        Raises: PeerFailed."""
        assert self._rendezvous is not None
        everyone = self._rendezvous.all_gather_object({"value": value})
        return min(int(row["value"]) for row in everyone)

    def check_peers(self) -> None:
        """Raise PeerFailed if another rank has failed since the last round. Collective during a
        rendezvous."""
        assert self._rendezvous is not None
        self._rendezvous.all_gather_object({})

    def end_rendezvous(self) -> None:
        """End the rendezvous if all ranks got here without an error. Collective. Raises:
        PeerFailed."""
        # The end is a round: a rank that failed earlier takes part in it with its error.
        if self._rendezvous is not None and self._comm.world > 1:
            self._rendezvous.end()
        self._rendezvous = None

    @contextlib.contextmanager
    def open_rendezvous(self, what: str, alike: Sequence[str] = ()) -> Iterator[Callable[[], None]]:
        """Open a rendezvous in which all ranks do the same work, and call no collective but
        `check_room`. Collective.

        Yields a function that reports success of this rank, and raises PeerFailed unless all
        ranks succeeded. what: the name of the work, for errors. Once this object is `closed`, it
        communicates nothing. Raises: ValueError where `alike` is not the same on all ranks.
        """
        if self.closed:  # the other ranks may take part in no rendezvous
            yield lambda: None
            return
        with Rendezvous(self._comm, what) as rendezvous:
            self._rendezvous = rendezvous
            try:
                _check_alike(
                    what,
                    [row["alike"] for row in rendezvous.all_gather_object({"alike": [*alike]})],
                )
                yield self.end_rendezvous
            finally:
                self._rendezvous = None

    def _local_rank(self) -> int:
        """Number this rank within its node, or within its machine if the topology is flat."""
        # A flat topology, which may cover several unequal machines, has global ranks as local ones.
        topology = self._comm.topology
        return topology.local_rank if topology.nodes > 1 else self.number

    def _with_part_of_bandwidths(self, policy: Policy) -> Policy:
        given = policy.io_settings.bandwidths
        parts = {
            name: (read / n, write / n)
            for name, (read, write) in given.items()
            if (n := self.sharers(name))
        }
        if parts == given:
            return policy
        return dataclasses.replace(
            policy, io=dataclasses.replace(policy.io_settings, bandwidths=parts)
        )


def _limit_error(
    limit: str, wanted: int, left: int, ranks: Sequence[int], *, least: int, overhead: int
) -> MemoryLimitError:
    """Return the error for ranks that need more memory than a limit leaves. least: the smallest
    `Policy.ram` that works for each of them. overhead: the part of `wanted` outside `Policy.ram`.
    """
    who, name = "this process", describe_limit(limit)
    if len(ranks) > 1:
        who = f"{_ranks(ranks)} together"
    part = (left - overhead) // len(ranks)
    fix = (
        f"choose Policy(ram={format_size(part)!r}) or less ({format_size(least)} is the least that "
        "works)"
        if least <= part
        else f"this policy needs {format_size(least)} for each rank at least: let states rest on a "
        "lower tier (optim='nvme', grads='nvme'), make units smaller (unit_bytes_max)"
    )
    return MemoryLimitError(
        f"{who} would hold {format_size(wanted)}, {format_size(overhead)} of it outside "
        f"Policy.ram, and {name} leaves {format_size(left)}: {format_size(wanted - left)} are "
        f"missing, and the kernel would end the process; {fix}, or raise the limit",
        limit=name,
        needed_bytes=wanted,
        left_bytes=left,
    )


def _check_alike(what: str, everyone: Sequence[Sequence[str]]) -> None:
    """Raise ValueError for the first line in which a rank differs from rank 0."""
    for rank, lines in enumerate(everyone):
        # zip_longest: a rank with more lines than rank 0 differs, too.
        for mine, theirs in itertools.zip_longest(everyone[0], lines, fillvalue="nothing more"):
            if mine != theirs:
                raise ValueError(
                    f"{what}: all ranks must do the same; rank 0 has {mine}, and rank {rank} has "
                    f"{theirs}"
                )


def _check_rules(everyone: Sequence[dict[str, str]]) -> None:
    """Raise ValueError where the ranks' policies differ in rules that training depends on."""
    for field, first in everyone[0].items():
        other = next((rank for rank, rules in enumerate(everyone) if rules[field] != first), None)
        if other is not None:
            raise ValueError(
                f"Policy.{field} is {first} on rank 0 and {everyone[other][field]} on rank "
                f"{other}: give all ranks the same policy"
            )


def _drive(directory: Path) -> str:
    """Name the drive under a directory, by device or else by file system; the name is the same in
    all processes of the machine."""
    return limits_of(directory).device or f"file system {directory.stat().st_dev}"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
