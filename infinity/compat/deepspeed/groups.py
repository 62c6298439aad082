"""`deepspeed.utils.groups`: one group of data-parallel ranks, and no others."""

from __future__ import annotations

from typing import Any

from infinity.compat.deepspeed import comm

__all__ = [
    "_get_data_parallel_group", "_get_data_parallel_rank", "_get_data_parallel_world_size",
    "_get_model_parallel_world_size", "_get_sequence_parallel_rank",
    "_get_sequence_parallel_world_size", "get_data_parallel_group", "get_data_parallel_rank",
    "get_data_parallel_world_size", "get_model_parallel_rank", "get_model_parallel_world_size",
    "mpu",
]  # fmt: skip

mpu: Any = None


def get_data_parallel_group() -> Any:
    """Return the group of all ranks."""
    return comm.get_world_group()


def get_data_parallel_rank() -> int:
    """Return this process's rank."""
    return comm.get_rank()


def get_data_parallel_world_size() -> int:
    """Return the number of ranks."""
    return comm.get_world_size()


def get_model_parallel_world_size() -> int:
    """Return 1: each rank has whole layers."""
    return 1


def get_model_parallel_rank() -> int:
    """Return 0."""
    return 0


_get_data_parallel_group = get_data_parallel_group
_get_data_parallel_rank = get_data_parallel_rank
_get_data_parallel_world_size = get_data_parallel_world_size
_get_model_parallel_world_size = get_model_parallel_world_size
_get_sequence_parallel_world_size = get_model_parallel_world_size
_get_sequence_parallel_rank = get_model_parallel_rank
