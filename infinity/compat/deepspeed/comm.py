"""`deepspeed.comm`: torch.distributed under DeepSpeed's names.

A script's collectives are torch's, on the process group that `init_distributed` creates. (On GPUs
call them with CPU tensors and a gloo group: docs/guide-ranks.md says why.)
"""

from __future__ import annotations

import datetime
import logging
import os
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch.distributed import (
    P2POp,
    ReduceOp,
    all_gather,
    all_gather_into_tensor,
    all_gather_object,
    all_reduce,
    all_reduce_coalesced,
    all_to_all,
    all_to_all_single,
    batch_isend_irecv,
    broadcast,
    broadcast_object_list,
    destroy_process_group,
    gather,
    irecv,
    is_available,
    isend,
    monitored_barrier,
    new_group,
    recv,
    reduce,
    reduce_scatter,
    reduce_scatter_tensor,
    scatter,
    send,
)

from infinity.compat.deepspeed.accelerator import get_accelerator
from infinity.compat.deepspeed.errors import DeepSpeedRefusal

log = logging.getLogger("infinity")

DEFAULT_PORT = 29500
_LAUNCHED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

__all__ = [
    "P2POp", "ReduceOp", "all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce",
    "all_reduce_coalesced", "all_to_all", "all_to_all_single", "allgather_fn", "barrier",
    "batch_isend_irecv", "broadcast", "broadcast_object_list", "configure",
    "destroy_process_group", "gather", "get_all_ranks_from_group", "get_global_rank",
    "get_local_rank", "get_rank", "get_world_group", "get_world_size",
    "has_all_gather_into_tensor", "has_all_reduce_coalesced", "has_reduce_scatter_tensor",
    "inference_all_reduce", "init_distributed", "irecv", "is_available", "is_initialized", "isend",
    "log_summary", "monitored_barrier", "new_group", "recv", "reduce", "reduce_scatter",
    "reduce_scatter_fn", "reduce_scatter_tensor", "scatter", "send",
]  # fmt: skip


def is_launched() -> bool:
    """Return whether a launcher has set the environment of a process group."""
    return all(name in os.environ for name in _LAUNCHED)


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,  # noqa: ARG001 - launchers set the environment
    distributed_port: int = DEFAULT_PORT,
    verbose: bool = True,  # noqa: ARG001
    timeout: datetime.timedelta | None = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,  # noqa: ARG001 - of a communication log
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Create the process group, unless one exists. Without a launcher, its only rank is this
    process. Blocks until all ranks have joined.

    dist_backend: of torch.distributed; None: nccl if the accelerator is a GPU, else gloo.
    init_method, rank, world_size: as in `torch.distributed.init_process_group`.
    dist_init_required: False: create nothing, and raise if there is no group.

    Raises: DeepSpeedRefusal if the launcher set only some of the environment variables.
    """
    os.environ.setdefault("LOCAL_RANK", os.environ.get("OMPI_COMM_WORLD_LOCAL_RANK", "0"))
    if dist.is_initialized():
        return
    if dist_init_required is False:
        raise DeepSpeedRefusal(
            "dist_init_required=False, and there is no process group: call "
            "torch.distributed.init_process_group first, or leave it out"
        )
    settings: dict[str, Any] = {
        "backend": dist_backend or get_accelerator().communication_backend_name()
    }
    if timeout is not None:
        settings["timeout"] = timeout
    if init_method is not None or rank >= 0:
        dist.init_process_group(
            **settings, init_method=init_method, rank=rank, world_size=world_size
        )
        return
    missing = [name for name in _LAUNCHED if name not in os.environ]
    if "WORLD_SIZE" in missing and "RANK" in missing:
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(**settings, store=store, rank=0, world_size=1)
        return
    if missing == ["MASTER_PORT"]:
        os.environ["MASTER_PORT"] = str(distributed_port)
    elif missing:
        raise DeepSpeedRefusal(
            f"the launcher has set no {', '.join(missing)}: start the script by torchrun"
        )
    dist.init_process_group(**settings)


def is_initialized() -> bool:
    """Return whether there is a process group."""
    return dist.is_available() and dist.is_initialized()


def get_rank(group: Any = None) -> int:
    """Return this process's rank; 0 before there is a group."""
    return dist.get_rank(group) if is_initialized() else 0


def get_world_size(group: Any = None) -> int:
    """Return the number of ranks; 1 before there is a group."""
    return dist.get_world_size(group) if is_initialized() else 1


def get_local_rank() -> int:
    """Return this process's rank within its node."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def get_global_rank(group: Any = None, group_rank: int = 0) -> int:
    """Return the world rank of a group's rank."""
    return group_rank if group is None else dist.get_global_rank(group, group_rank)


def get_all_ranks_from_group(group: Any = None) -> list[int]:
    """Return the world ranks of a group's members."""
    return [get_global_rank(group, index) for index in range(get_world_size(group))]


def get_world_group() -> Any:
    """Return the group of all ranks."""
    return dist.group.WORLD


allgather_fn, inference_all_reduce = all_gather_into_tensor, all_reduce


def barrier(group: Any = None, async_op: bool = False, device_ids: Any = None) -> Any:
    """Wait for all ranks. Does nothing before there is a group."""
    return dist.barrier(group, async_op, device_ids) if is_initialized() else None


def reduce_scatter_fn(
    output_tensor: torch.Tensor, tensor: torch.Tensor, op: Any = ReduceOp.SUM, group: Any = None,
    async_op: bool = False,
) -> Any:  # fmt: skip
    """Reduce the ranks' tensors, and write this rank's part of the result to `output_tensor`."""
    return dist.reduce_scatter_tensor(output_tensor, tensor, op, group, async_op)


def has_all_gather_into_tensor() -> bool:
    """Return True: torch has this collective."""
    return True


has_reduce_scatter_tensor = has_all_reduce_coalesced = has_all_gather_into_tensor


mpu: Any = None


def world_size_of_one() -> int:
    """Return 1, the size of model- and sequence-parallel groups: no layer is split over ranks."""
    return 1


def rank_in_group_of_one() -> int:
    """Return 0."""
    return 0


def configure(*_args: Any, **_settings: Any) -> None:
    """Ignore settings of DeepSpeed's communication log, and log that `handle.stats()` counts."""
    log.info("deepspeed.comm.configure: handle.stats() counts what the engine sends (comm_*)")


def log_summary(*_args: Any, **_settings: Any) -> None:
    """Log that `handle.stats()` has the counts of communication."""
    log.info("deepspeed.comm.log_summary: print(inf.handle(engine.module).stats()) counts (comm_*)")


_CPU_GROUPS: dict[int, tuple[Any, Any]] = {}
"""By id() of a world group whose backend is not gloo: that group, and a gloo group of its ranks."""


def cpu_group() -> Any:
    """Return a gloo group of all ranks, for CPU tensors; None (the world group) if the world
    group's backend is gloo. The first call is collective.
    """
    world = dist.group.WORLD
    if not is_initialized() or dist.get_backend() == "gloo":
        return None
    # The entry keeps the world group alive: after it was freed, a new object could have its id().
    if id(world) not in _CPU_GROUPS:
        _CPU_GROUPS.clear()
        _CPU_GROUPS[id(world)] = world, dist.new_group(backend="gloo")
    return _CPU_GROUPS[id(world)][1]


def broadcast_values(tensor: torch.Tensor, src: int) -> None:
    """Broadcast a tensor's values from rank `src`, staged in CPU memory. Collective; blocks."""
    if get_world_size() == 1:
        return
    # Never over NCCL: the engine's collectives may be in flight there.
    on_cpu = tensor.cpu().contiguous()
    dist.broadcast(on_cpu, src, group=cpu_group())
    if on_cpu is not tensor:
        with torch.no_grad():
            tensor.copy_(on_cpu)


def broadcast_module(model: torch.nn.Module) -> None:
    """Broadcast all parameters and buffers from rank 0. Collective; blocks.

    Ranks first compare digests; only tensors whose digests differ are sent.
    """
    if get_world_size() == 1:
        return
    tensors = [
        tensor.data for tensor in (*model.parameters(), *model.buffers()) if not tensor.is_meta
    ]
    mine = [_digest(tensor) for tensor in tensors]
    found: list[Any] = [None] * get_world_size()
    dist.all_gather_object(found, mine, group=cpu_group())
    for index, tensor in enumerate(tensors):
        if any(each[index] != found[0][index] for each in found):
            broadcast_values(tensor, 0)


def _digest(tensor: torch.Tensor) -> bytes:
    data: Any = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    digest: bytes = xxhash.xxh3_128_digest(data)
    return digest
