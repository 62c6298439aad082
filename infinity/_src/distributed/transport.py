"""Transports: tensors of the computing device, moved between the ranks of a process group.

    GlooTransport     CPU tensors, over gloo
    NcclTransport     a GPU's tensors, over NCCL
    StagedTransport   a device's tensors, over gloo through host memory (tests alone ask for it)

`Collectives` says which part goes where, and adds up. A transport only moves bytes, so results have
the same bits over each.

All but one of the engine's collectives are messages from point to point. An all_gather of whole
units over NCCL is all_gather_single. The reasons of the others (figures of bench/README.md,
"Collectives over gloo"):

- **all_gather over gloo.** all_gather_single works in a temporary of the whole's size, and copies
  that to its place, in each call: 1.5 to 2.5 times the CPU time. Messages land in place, and a step
  allocates nothing.
- **reduce_scatter.** A backend adds in an order of its own, in the dtype that travels. Ranks add
  here in their own order, in fp32, and round once (`comm_codec.sum_in_order`). An exchange is left.
  all_to_all_single is the same messages in gloo and in NCCL, and costs as much. But it takes one
  tensor, so that a unit of several flats needs several calls, and parts of a node, which lie apart,
  a copy; and it copies this rank's own part, too, into a buffer that is larger by it.
- **Two levels.** Collectives of a node, or of counterparts, need groups of their own. Over NCCL
  these are further communicators, whose launches all ranks would have to order against those of the
  first. Messages all go through one.
- **Flags and names.** A few bytes, which go level by level, and count as they travel. all_reduce
  of flags takes 1.6 times the CPU time or more.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import ClassVar

import torch
import torch.distributed as dist

from infinity._src.base.torch_compat import all_gather_single

Message = tuple[int, torch.Tensor]
"""A rank, and the contiguous tensor that is sent to it or received from it."""

_ALIGN_BYTES = 64
"""Staged tensors begin at multiples of it, so that a tensor of any dtype can."""


class Transport(abc.ABC):
    """Base of the transports. Methods block; one thread calls at a time.

    With tensors of a GPU, that thread is on the stream of a communication stream, and what was
    moved is complete for work behind it on this stream.
    """

    backend: ClassVar[str]
    """Backend that the group has, whose tensors may be those of `device` or copies of them."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group = group
        self._device = device

    @abc.abstractmethod
    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        """Send each tensor to its rank, and receive each from its rank.

        Messages have no tags: between two ranks, both must list them in the same order.
        """

    def all_gather(self, wholes: Sequence[torch.Tensor], rank: int) -> None:
        """Complete each whole [world, shard]. This rank has its row."""
        self.exchange(
            [(to, whole[rank]) for whole in wholes for to in range(len(whole)) if to != rank],
            [(of, whole[of]) for whole in wholes for of in range(len(whole)) if of != rank],
        )


class GlooTransport(Transport):
    """Messages from point to point, and nothing else."""

    backend = "gloo"

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        if not sends and not receives:  # torch refuses an empty batch
            return
        # In one batch, so that no rank waits for another's receive before it posts its own. NCCL
        # launches a batch as one kernel of the group's communicator; single messages would make
        # communicators of their own for each pair of ranks.
        operations = [dist.P2POp(dist.isend, tensor, rank, self._group) for rank, tensor in sends]
        operations += [
            dist.P2POp(dist.irecv, tensor, rank, self._group) for rank, tensor in receives
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()


class NcclTransport(GlooTransport):
    """Messages from point to point, and all_gather as NCCL has it, in place."""

    backend = "nccl"

    def all_gather(self, wholes: Sequence[torch.Tensor], rank: int) -> None:
        # NCCL chooses rings, trees or NVLink's multicast, where messages go to each rank by itself.
        works = [
            # As bytes, so that no dtype is one that the backend does not know.
            all_gather_single(
                whole.view(-1).view(torch.uint8),
                whole[rank].view(torch.uint8),
                group=self._group,
                async_op=True,
            )
            for whole in wholes
        ]
        # All are launched before the first wait: a unit of several flats is one round trip.
        for work in works:
            work.wait()


class StagedTransport(Transport):
    """Messages of a device's tensors through host memory, over a transport of the CPU's.

    A test seam: with it the communication streams, streams, events and allocators of two ranks run
    on one GPU, where NCCL refuses the second. Nothing else asks for it, since it is slow: each
    exchange waits for the device. over: the transport of the copies.
    """

    backend = "gloo"

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, *, over: Transport | None = None
    ) -> None:
        super().__init__(group, device)
        self._over = over or GlooTransport(group, torch.device("cpu"))
        # Kept between exchanges, as the buffers of `Collectives` are; grows to the largest.
        self._host: torch.Tensor | None = None

    @property
    def held_bytes(self) -> int:
        """Bytes of host memory that the next exchange may use."""
        return self._host.numel() if self._host is not None else 0

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        # A part goes to each of several ranks, and is copied once.
        sent = {_memory(tensor): tensor for _, tensor in sends}
        copies = self._place([*sent.values(), *(tensor for _, tensor in receives)])
        departures, arrivals = dict(zip(sent, copies, strict=False)), copies[len(sent) :]
        for memory, tensor in sent.items():
            departures[memory].copy_(tensor, non_blocking=True)
        # The backend reads the copies from the host, which no stream orders. Behind this, copies to
        # the device that the last exchange launched have read theirs, too.
        self._wait_for_copies()
        try:
            self._over.exchange(
                [(rank, departures[_memory(tensor)]) for rank, tensor in sends],
                [(rank, copy) for (rank, _), copy in zip(receives, arrivals, strict=True)],
            )
        except BaseException:
            # Messages that broke off may still be written into this memory: it is not used again.
            self._host = None
            raise
        for (_, tensor), copy in zip(receives, arrivals, strict=True):
            tensor.copy_(copy, non_blocking=True)

    def _place(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Host memory for each tensor, not initialized, of its shape and dtype."""
        starts, end = [], 0
        for tensor in tensors:
            starts.append(end)
            end += -(-tensor.nbytes // _ALIGN_BYTES) * _ALIGN_BYTES
        if self._host is None or self._host.numel() < end:
            # The smaller one goes first, so that both are never held. torch frees pinned memory
            # only behind the copies that use it.
            self._host = None
            # Pinned: a copy from pageable memory would block, and not go by the CUDA stream of the
            # communication stream.
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
    """Address and bytes of a tensor: views of the same elements are one."""
    return tensor.data_ptr(), tensor.nbytes


def transport_for(device: torch.device) -> type[Transport]:
    """The transport of tensors of `device` that is no test's."""
    return NcclTransport if device.type == "cuda" else GlooTransport
