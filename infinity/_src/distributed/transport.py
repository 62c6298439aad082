"""Transports send tensors of the compute device between the ranks of a process group.

    GlooTransport     CPU tensors, over gloo
    NcclTransport     a GPU's tensors, over NCCL
    StagedTransport   a device's tensors, over gloo through host memory (for tests)

`Collectives` chooses parts and ranks, and sums. A transport only sends bytes, so results have the
same bits with every transport.

The engine's collectives are point-to-point messages, except all_gather of whole units over NCCL,
which is all_gather_single. Reasons (figures: bench/README.md, "Collectives over gloo"):

- **all_gather over gloo.** In each call, all_gather_single gathers into a temporary of the whole's
  size and copies it: 1.5 to 2.5 times the CPU time. Messages are received in place, without
  allocations.
- **reduce_scatter.** A backend sums in an unspecified order, in the dtype of the messages. Here
  ranks sum in the order of ranks, in fp32, and round once (`comm_codec.sum_in_order`), so only an
  exchange is needed. all_to_all_single sends the same messages in gloo and in NCCL, at the same
  cost. But it needs one contiguous tensor: several calls for a unit of several flats, a copy for
  the non-contiguous parts of a node, and a larger buffer, since it copies this rank's part, too.
- **Two levels.** Collectives of a node, or of counterparts, need further groups. With NCCL these
  are further communicators, whose launches all ranks would have to order with the first one's.
  Messages need one communicator.
- **Flags and names.** A few bytes, sent level by level. all_reduce of flags takes at least 1.6
  times the CPU time.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import ClassVar

import torch
import torch.distributed as dist

from infinity._src.base.torch_compat import all_gather_single

Message = tuple[int, torch.Tensor]
"""A rank, and the contiguous tensor to send to it or receive from it."""

_ALIGN_BYTES = 64
"""Staged tensors begin at multiples of this, so that every dtype is aligned."""


class Transport(abc.ABC):
    """Base class of transports. Methods block. Not thread-safe.

    For GPU tensors, the calling thread's current CUDA stream is that of a communication stream;
    received data is complete for later work on this CUDA stream.
    """

    backend: ClassVar[str]
    """Backend of the group."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group = group
        self._device = device

    @abc.abstractmethod
    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        """Send each tensor to its rank, and receive each from its rank.

        Messages have no tags: both ranks must list their messages in the same order.
        """

    def all_gather(self, wholes: Sequence[torch.Tensor], rank: int) -> None:
        """All-gather into each whole [world, shard], in which this rank's row is set."""
        self.exchange(
            [(to, whole[rank]) for whole in wholes for to in range(len(whole)) if to != rank],
            [(of, whole[of]) for whole in wholes for of in range(len(whole)) if of != rank],
        )


class GlooTransport(Transport):
    """Point-to-point messages only."""

    backend = "gloo"

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        if not sends and not receives:  # torch refuses an empty batch
            return
        # One batch, so that no rank waits for another's receive before it posts its receives. NCCL
        # launches a batch as one kernel of the group's communicator; for single messages it would
        # create a communicator per pair of ranks.
        operations = [dist.P2POp(dist.isend, tensor, rank, self._group) for rank, tensor in sends]
        operations += [
            dist.P2POp(dist.irecv, tensor, rank, self._group) for rank, tensor in receives
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()


class NcclTransport(GlooTransport):
    """Point-to-point messages, and NCCL's all_gather, in place."""

    backend = "nccl"

    def all_gather(self, wholes: Sequence[torch.Tensor], rank: int) -> None:
        # NCCL's all_gather uses rings, trees or NVLink multicast instead of a message per rank.
        works = [
            # As bytes, since the backend does not support all dtypes.
            all_gather_single(
                whole.view(-1).view(torch.uint8),
                whole[rank].view(torch.uint8),
                group=self._group,
                async_op=True,
            )
            for whole in wholes
        ]
        # All are launched before the first wait: one round trip for all flats of a unit.
        for work in works:
            work.wait()


class StagedTransport(Transport):
    """Sends a device's tensors through host memory, over a CPU transport.

    For tests: two ranks can share one GPU, which NCCL refuses. It is slow, since each exchange
    waits for the device. over: the transport of the host copies.
    """

    backend = "gloo"

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, *, over: Transport | None = None
    ) -> None:
        super().__init__(group, device)
        self._over = over or GlooTransport(group, torch.device("cpu"))
        # Reused by later exchanges; grows to the largest.
        self._host: torch.Tensor | None = None

    @property
    def held_bytes(self) -> int:
        """Bytes of host memory that the next exchange may use."""
        return self._host.numel() if self._host is not None else 0

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        # A part sent to several ranks is copied once.
        sent = {_memory(tensor): tensor for _, tensor in sends}
        copies = self._place([*sent.values(), *(tensor for _, tensor in receives)])
        departures, arrivals = dict(zip(sent, copies, strict=False)), copies[len(sent) :]
        for memory, tensor in sent.items():
            departures[memory].copy_(tensor, non_blocking=True)
        # The backend reads host memory, which no CUDA stream orders, so wait for the copies; this
        # also waits for the previous exchange's copies to the device.
        self._wait_for_copies()
        try:
            self._over.exchange(
                [(rank, departures[_memory(tensor)]) for rank, tensor in sends],
                [(rank, copy) for (rank, _), copy in zip(receives, arrivals, strict=True)],
            )
        except BaseException:
            # An aborted message may still write to this memory, so it is not reused.
            self._host = None
            raise
        for (_, tensor), copy in zip(receives, arrivals, strict=True):
            tensor.copy_(copy, non_blocking=True)

    def _place(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return uninitialized host memory for each tensor, of its shape and dtype."""
        starts, end = [], 0
        for tensor in tensors:
            starts.append(end)
            end += -(-tensor.nbytes // _ALIGN_BYTES) * _ALIGN_BYTES
        if self._host is None or self._host.numel() < end:
            # Free the smaller buffer first. torch frees pinned memory after the copies that use it.
            self._host = None
            # Pinned: a copy from pageable memory would block.
            self._host = torch.empty(end, dtype=torch.uint8, pin_memory=self._device.type == "cuda")
        host = self._host
        return [
            host[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for start, tensor in zip(starts, tensors, strict=True)
        ]

    def _wait_for_copies(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()


def _memory(tensor: torch.Tensor) -> tuple[int, int]:
    """Key of a tensor's memory: equal for views of the same elements."""
    return tensor.data_ptr(), tensor.nbytes


def transport_for(device: torch.device) -> type[Transport]:
    """Return the default transport for tensors of `device`."""
    return NcclTransport if device.type == "cuda" else GlooTransport
