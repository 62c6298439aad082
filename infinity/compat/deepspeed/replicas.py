"""The first rank's values, for all ranks: scripts build their model on each, alike or not."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import xxhash

from infinity.compat.deepspeed import comm


def broadcast_module(model: torch.nn.Module) -> None:
    """Give all parameters and buffers the values of rank 0. Blocks; collective.

    Digests are compared first: a model that was built alike is not sent.
    """
    if comm.get_world_size() == 1:
        return
    tensors = [
        tensor.data for tensor in (*model.parameters(), *model.buffers()) if not tensor.is_meta
    ]
    mine = [_digest(tensor) for tensor in tensors]
    found: list[Any] = [None] * comm.get_world_size()
    dist.all_gather_object(found, mine, group=comm.cpu_group())
    for index, tensor in enumerate(tensors):
        if any(each[index] != found[0][index] for each in found):
            comm.broadcast_values(tensor, 0)


def _digest(tensor: torch.Tensor) -> bytes:
    data: Any = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    digest: bytes = xxhash.xxh3_128_digest(data)
    return digest
