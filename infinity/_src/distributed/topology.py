"""Topology of the ranks: this rank's node, and its counterparts on the other nodes.

Ranks of a node share memory and drives. Each node must have the same number of consecutive ranks;
otherwise all ranks count as one node, and a warning is logged.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import time
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from infinity._src.distributed.heartbeat import Host
from infinity.errors import ProcessGroupChanged, RankFailed

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

log = logging.getLogger("infinity")

_POLL_S = 0.02

_OWN_MESH = (
    "for a model of this rank alone, pass Policy(mesh=init_device_mesh(device, (ranks, 1), "
    "mesh_dim_names=('all', 'own'))['own'])"
)
_JOIN = (
    "build TrainingArguments or Accelerator (which join the ranks), or call "
    "torch.distributed.init_process_group(), before inf.offload(model, policy); "
    "infinity.integrations.transformers.embed(trainer, policy) offloads when that is done"
)


def check_launched() -> None:
    """Check that ranks started by a launcher have initialized torch.distributed.

    Otherwise each rank would silently train a separate model. Raises: ValueError.
    """
    ranks = os.environ.get("WORLD_SIZE", "1")
    if ranks.isdecimal() and int(ranks) > 1 and group_world() is None:
        raise ValueError(
            f"WORLD_SIZE={ranks} is in the environment, so {ranks} ranks were started, and "
            "torch.distributed has no process group yet: each rank would train a separate model. "
            f"To train one model together, {_JOIN}. To train one model per process, remove "
            "WORLD_SIZE from the environment"
        )


def group_world() -> int | None:
    """Return the number of ranks in the default group of torch.distributed; None without one."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    return dist.get_world_size()


def check_group(world: int | None, engine_world: int) -> None:
    """Check that the default group's size has not changed since an engine was created.

    world: the group's size then (None: no group). engine_world: ranks of the engine. Raises:
    ProcessGroupChanged.
    """
    now = group_world()
    # None: the program has destroyed the group, and so trains with no other rank.
    if now is not None and now != (world or 1):
        raise ProcessGroupChanged(
            f"torch.distributed has a process group of {now} ranks, and the model was offloaded "
            f"{'before there was one' if world is None else f'when it had {world}'}, by an engine "
            f"of {engine_world} rank{'s' if engine_world > 1 else ''}: the ranks would train "
            f"different models. To train one model together, {_JOIN}; {_OWN_MESH}"
        )


def is_own(mesh: DeviceMesh | None) -> bool:
    """Return whether a mesh has only this rank."""
    return mesh is not None and mesh.mesh.flatten().tolist() == [dist.get_rank()]


def own_numbers() -> tuple[int, int]:
    """Return this rank's (rank, local rank) in the default group, for an engine of this rank alone,
    whose topology has rank 0. Without LOCAL_RANK the local rank is the rank, as on one machine.
    """
    rank = dist.get_rank()
    return rank, int(os.environ.get("LOCAL_RANK", rank))


@dataclasses.dataclass(frozen=True)
class Topology:
    """Coordinates of one rank.

    `rank` = `node` * `local_world` + `local_rank`, and `world` = `nodes` * `local_world`.
    """

    rank: int
    world: int
    node: int
    nodes: int
    local_rank: int
    local_world: int

    @classmethod
    def alone(cls) -> Topology:
        """Return the topology of a single rank."""
        return cls.of(0, 1, 1)

    @classmethod
    def of(cls, rank: int, world: int, local_world: int) -> Topology:
        """Return the topology of `rank` if every node has `local_world` consecutive ranks."""
        assert world % local_world == 0
        return cls(
            rank, world, rank // local_world, world // local_world, rank % local_world, local_world
        )

    @classmethod
    def find(cls, mesh: DeviceMesh | None = None, *, timeout_s: float) -> Topology:
        """Find the topology of torch.distributed's default group; a single rank if there is none.

        Collective; blocks.
        mesh: one-dimensional over all ranks (nodes are found as without a mesh), two-dimensional
        (nodes, ranks of a node), or this rank alone, for a single rank.
        Raises: ValueError if the mesh does not have every rank once, in ascending order; RankFailed
        naming the ranks that have not published their host within `timeout_s`.
        """
        if not (dist.is_available() and dist.is_initialized()):
            if mesh is not None:
                raise ValueError(
                    "a mesh was given, but there is no process group: call init_process_group() "
                    "first"
                )
            return cls.alone()
        rank, world = dist.get_rank(), dist.get_world_size()
        if is_own(mesh):
            return cls.alone()
        if mesh is not None:
            _check(mesh, world)
            # Two dimensions define the nodes.
            if mesh.ndim == 2:
                return cls.of(rank, world, int(mesh.size(1)))
        if world == 1:
            return cls.alone()
        return cls.of(rank, world, _local_world(_everyone(rank, world, timeout_s)))

    @property
    def node_ranks(self) -> tuple[int, ...]:
        """Ranks of this rank's node, in order."""
        first = self.node * self.local_world
        return tuple(range(first, first + self.local_world))

    @property
    def counterparts(self) -> tuple[int, ...]:
        """Ranks with this rank's `local_rank`, one of each node, in order."""
        return tuple(range(self.local_rank, self.world, self.local_world))


def _check(mesh: DeviceMesh, world: int) -> None:
    if mesh.ndim not in (1, 2):
        raise ValueError(
            f"a mesh of {mesh.ndim} dimensions: give one dimension with all ranks, or two: (nodes, "
            "ranks of a node)"
        )
    ranks = mesh.mesh.flatten().tolist()
    if ranks != list(range(world)):
        raise ValueError(
            f"the mesh holds the ranks {ranks}, and there are {world}: it must hold each rank "
            "once, in ascending order, as "
            f'init_device_mesh("cpu", ({world},)) does, or init_device_mesh("cpu", (nodes, {world} '
            f"// nodes)); {_OWN_MESH}"
        )


def _everyone(rank: int, world: int, timeout_s: float) -> list[tuple[Any, str]]:
    """Exchange each rank's host and LOCAL_WORLD_SIZE through the store. Blocks."""
    # Not by a collective, whose backend may need a device. The prefix keeps the keys apart from
    # other libraries' keys.
    store: Any = PrefixStore("infinity/host", _store())
    # `node` includes the network namespace, so each container of a machine counts as a host.
    mine = [*Host.this().node, os.environ.get("LOCAL_WORLD_SIZE", "")]
    store.set(str(rank), json.dumps(mine))
    deadline = time.monotonic() + timeout_s
    # Polled, since store.wait() does not report which key is missing.
    while missing := [other for other in range(world) if not store.check([str(other)])]:
        if time.monotonic() > deadline:
            raise RankFailed(
                f"ranks {missing} have not reported their host within {timeout_s:g} s: every "
                "rank must offload",
                rank=missing[0],
                ranks=tuple(missing),
            )
        time.sleep(_POLL_S)
    said = [json.loads(store.get(str(other))) for other in range(world)]
    return [(tuple(row[:-1]), row[-1]) for row in said]


def _local_world(everyone: list[tuple[Any, str]]) -> int:
    """Return the ranks per node: torchrun's number if it is consistent, or else the ranks per host
    if all hosts have as many, or else all ranks.
    """
    world = len(everyone)
    hosts = [host for host, _ in everyone]
    given = {size for _, size in everyone}
    # torchrun's number first: several of its agents, each a node, may run on one host.
    if len(given) == 1 and (size := next(iter(given))).isdecimal() and _fits(hosts, int(size)):
        return int(size)
    if (
        _fits(hosts, size_of_host := hosts.count(hosts[0]))
        and len(set(hosts)) == world // size_of_host
    ):
        return size_of_host
    log.warning(
        "the ranks of a host are not consecutive, or hosts have different numbers of ranks: all "
        "ranks count as one node"
    )
    return world


def _fits(hosts: list[Any], size: int) -> bool:
    """Return whether each group of `size` consecutive ranks shares a host."""
    world = len(hosts)
    if size < 1 or world % size:
        return False
    return all(len(set(hosts[first : first + size])) == 1 for first in range(0, world, size))


def default_store() -> Any:
    """Open another connection to the default group's store, for one thread."""
    return _store().clone()  # a connection serves one, possibly blocking, request at a time


def _store() -> Any:
    world: Any = torch.distributed.group.WORLD
    return world.get_group_store()
