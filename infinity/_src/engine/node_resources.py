"""Resources that the ranks of one machine share: its memory, its drives' room and bandwidth.

Ranks agree on them in rounds of a rendezvous while a model is set up:

    round                                   derived from it
    offload: machine, memory left           this rank's directories, its part of the memory
             drives                         ranks for each drive: bandwidth, depth of requests
             files of the values            the same: each rank reads its part of them alone
             memory of the plan             more than is left: MemoryLimitError on all ranks
             room on the drives             more than there is: SwapFullError on all ranks
             after each unit                a rank that cannot read or write stops all ranks
    optimizer: room on the drives           the same

Machines are told apart by the kernel, not by the nodes of a mesh: two "nodes" on one machine have
one memory. A rank that fails sends its error, and the others raise PeerFailed with it
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
"""Least number of requests that a rank has in flight at a drive, however many ranks share it. Fewer
leave the drive idle between two."""


@contextlib.contextmanager
def open_node_resources(comm: Comm, policy: Policy) -> Iterator[NodeResources]:
    """Open the rendezvous of ranks that offload a model. Collective.

    `NodeResources.end_rendezvous` ends it. The context is left when the model is closed.
    """
    with Rendezvous(comm, "inf.offload") as rendezvous:
        found = NodeResources(comm, policy, rendezvous)
        try:
            yield found
        finally:
            # From here on nothing is communicated: the other ranks may never come.
            found.closed = True


class NodeResources:
    """Part of the machine's resources that this rank may use.

    Methods are collective where they say so. With one rank they communicate nothing.
    policy: as given, with this rank's directories, and its part of the given bandwidths.
    number, ranks: this rank's number among the ranks of the machine, and their count.
    default_bytes: RAM_SHARE of its part of the memory that was left before any rank took some.
    """

    def __init__(self, comm: Comm, policy: Policy, rendezvous: Rendezvous) -> None:
        self._comm = comm
        self._rendezvous: Rendezvous | None = rendezvous
        self.closed = False
        # Before any rank takes memory: every rank sends this value in the first round.
        seen = memory_seen()
        everyone = rendezvous.all_gather_object(
            {"machine": machine(), "memory": seen, "rules": policy.rules}
        )
        # First: ranks with other rules would plan other things, and then hold other rounds.
        _check_rules([row["rules"] for row in everyone])
        # By the kernel's boot id, not by the mesh: "nodes" on one machine have one memory and its
        # drives.
        self._neighbours = [
            rank for rank, row in enumerate(everyone) if row["machine"] == machine()
        ]
        self.number, self.ranks = self._neighbours.index(comm.rank), len(self._neighbours)
        self.default_bytes = int(
            RAM_SHARE * fair_share(seen, [row["memory"] for row in everyone])
        )
        # A pattern stands for one directory of each rank; from here on the policy has this rank's
        # own.
        if any(is_directory_pattern(path) for path in policy.directories):
            # An engine of this rank alone has rank 0 in every process.
            rank, local_rank = (
                own_numbers() if is_own(policy.mesh) else (comm.rank, self._local_rank())
            )
            found = resolve_directories(policy.directories, rank=rank, local_rank=local_rank)
            policy = dataclasses.replace(policy, nvme=found)
        # By drive, not by path: directories on one drive share its bandwidth.
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
        """Choose the requests in flight for each drive: its limit, divided by the ranks that share
        it.

        At least DEPTH_MIN, if the drive takes these.
        """
        settings, found = self.policy.io_settings, []
        for file in files:
            taken = limits_of(file).fit(settings.block_bytes or BLOCK_BYTES, settings.depth)[1]
            # A fair part, but never so few that the drive idles between two requests.
            found.append(max(taken // self.sharers(file.directory), min(taken, DEPTH_MIN)))
        return found

    def check_memory(
        self,
        plan: PlacementPlan,
        *,
        begun_bytes: int,
        filling_bytes: int,
        running_bytes: int,
        freed_bytes: int,
    ) -> None:
        """Check that what all ranks hold, by their plans and beside them, fits into memory.
        Collective.

        begun_bytes: what this rank takes of its plan before it gives back anything. filling_bytes,
        running_bytes: what it takes beside the plan until then, and from then on. freed_bytes:
        memory of the model's values, which it gives back when they are at rest. Raises:
        MemoryLimitError on all ranks if those under one limit want more than it leaves.
        """
        assert self._rendezvous is not None
        everyone = self._rendezvous.all_gather_object(
            {
                "begun": (begun_bytes, filling_bytes),
                "size": (plan.ram_bytes, running_bytes),
                "freed": freed_bytes,
                "least": plan.min_bytes,
                "memory": memory_seen(),
            }
        )
        # By limit: each cgroup's, and the machine's, bounds the ranks that see it.
        for limit in {limit: None for row in everyone for limit in row["memory"]}:
            ranks = [rank for rank, row in enumerate(everyone) if limit in row["memory"]]
            # Several ranks may have read a limit: the smallest value counts.
            left = min(everyone[rank]["memory"][limit] for rank in ranks)
            freed = sum(everyone[rank]["freed"] for rank in ranks)
            # First beside the model's values, then in their place.
            for name, room in (("begun", left), ("size", left + freed)):
                planned, beside = (
                    sum(everyone[rank][name][part] for rank in ranks) for part in (0, 1)
                )
                if planned + beside > room:
                    least = max(everyone[rank]["least"] for rank in ranks)
                    raise _beyond(limit, planned + beside, room, ranks, least=least, beside=beside)

    def check_room(self, files: Sequence[SwapFile], sizes: Sequence[int]) -> None:
        """Check that the file systems have room for all ranks: `sizes` more bytes in this rank's
        files.

        Collective during a rendezvous, in which all ranks take room together. Otherwise each rank
        takes the room that it finds, and nothing is checked here.
        Raises: NoRoomError on all ranks if those on one file system want more than it has.
        """
        if self._comm.world == 1 or self._rendezvous is None:
            return
        # Measured when all are here: until then another may remove what an earlier run left.
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
        # A device number means a file system within its machine only.
        systems = {(row["machine"], system): None for row in everyone for system in row["wants"]}
        for where, system in systems:
            ranks = [
                rank
                for rank, row in enumerate(everyone)
                if row["machine"] == where and system in row["wants"]
            ]
            wanted = sum(everyone[rank]["wants"][system] for rank in ranks)
            # The file systems are the same: the least free room that any rank saw is safe.
            left, path = min(everyone[rank]["free"][system] for rank in ranks)
            if wanted > left:
                raise NoRoomError(
                    f"{path!r} has room for {left} of {wanted} more bytes that {_ranks(ranks)} "
                    f"need together: {wanted - left} "
                    "are missing; free space, or add a directory to Policy.nvme",
                    errno=errno.ENOSPC,
                    path=path,
                    op="allocate",
                    length=wanted,
                )

    def are_alike(self, value: str) -> bool:
        """Return whether all ranks give the same value, which is not empty. Collective during a
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
        """Learn whether another rank has failed since the last round. Collective during a
        rendezvous. Raises: PeerFailed."""
        assert self._rendezvous is not None
        self._rendezvous.all_gather_object({})

    def end_rendezvous(self) -> None:
        """End the rendezvous, if all ranks came here without an error. Collective. Raises:
        PeerFailed."""
        # A round like any other: a rank that failed before it takes part with its error.
        if self._rendezvous is not None and self._comm.world > 1:
            self._rendezvous.end()
        self._rendezvous = None

    @contextlib.contextmanager
    def open_rendezvous(self, what: str, alike: Sequence[str] = ()) -> Iterator[Callable[[], None]]:
        """Open a rendezvous in which ranks do the same, and call no collective but `check_room`.

        Yields a function that reports success of this rank, and raises PeerFailed unless all
        ranks succeeded. Collective. what: named in errors.
        Raises: ValueError where `alike` is not the same on all ranks.
        """
        if self.closed:  # the other ranks may never come
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
        # A flat topology may stand for several unequal machines, where its local rank is the global
        # one.
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


def _beyond(
    limit: str, wanted: int, left: int, ranks: Sequence[int], *, least: int, beside: int
) -> MemoryLimitError:
    """Return the error for ranks that want more memory than a limit leaves. least: the smallest
    `Policy.ram` that works for each of them. beside: bytes of `wanted` that no budget has.
    """
    who, name = "this process", describe_limit(limit)
    if len(ranks) > 1:
        who = f"{_ranks(ranks)} together"
    part = (left - beside) // len(ranks)
    fix = (
        f"choose Policy(ram={format_size(part)!r}) or less ({format_size(least)} is the least that "
        "works)"
        if least <= part
        else f"this policy needs {format_size(least)} for each rank at least: let states rest on a "
        "lower tier (optim='nvme', grads='nvme'), make units smaller (unit_bytes_max)"
    )
    return MemoryLimitError(
        f"{who} would hold {format_size(wanted)}, {format_size(beside)} of it beside Policy.ram, "
        f"and {name} leaves {format_size(left)}: "
        f"{format_size(wanted - left)} are missing, and the kernel would end the process; {fix}, "
        "or raise the limit",
        limit=name,
        needed_bytes=wanted,
        left_bytes=left,
    )


def _check_alike(what: str, everyone: Sequence[Sequence[str]]) -> None:
    """Raise ValueError for the first line that some rank has, and rank 0 has not, or the other way
    round."""
    for rank, lines in enumerate(everyone):
        # Longest of both: a rank with one more line has something that the others have not.
        for mine, theirs in itertools.zip_longest(everyone[0], lines, fillvalue="nothing more"):
            if mine != theirs:
                raise ValueError(
                    f"{what}: all ranks do the same; rank 0 has {mine}, and rank {rank} has "
                    f"{theirs}"
                )


def _check_rules(everyone: Sequence[dict[str, str]]) -> None:
    """Raise ValueError where policies differ in rules by which each rank would train its part."""
    for field, first in everyone[0].items():
        other = next((rank for rank, rules in enumerate(everyone) if rules[field] != first), None)
        if other is not None:
            raise ValueError(
                f"Policy.{field} is {first} on rank 0 and {everyone[other][field]} on rank "
                f"{other}: all ranks train by one policy; give them the same"
            )


def _drive(directory: Path) -> str:
    """Name the drive under a directory for all processes of its machine: by device, or file system.
    """
    return limits_of(directory).device or f"file system {directory.stat().st_dev}"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
