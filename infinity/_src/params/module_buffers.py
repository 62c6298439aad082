"""Buffers of a model that all ranks take from rank 0 (`Policy(broadcast_buffers=True)`).

    broadcast      at set-up, and with `sync_module_states`
    backward_end   after each backward outside of `no_sync`, and so before the next forward, as with
                   DDP; in between evaluation and saves see the same on all ranks, too

A buffer whose bits are those of rank 0 already is not written to: a graph that has saved it stays
valid.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn

from infinity._src.base.dtypes import bytes_of, copy_, from_bytes
from infinity._src.distributed.communicator import Comm, digest_of_text, fingerprinted
from infinity._src.params.materialize import find_buffers


class ModuleBuffers:
    """Buffers of one model. One thread uses it at a time.

    follow: take those of rank 0 after each backward.
    """

    def __init__(self, model: nn.Module, comm: Comm, *, follow: bool) -> None:
        self._comm = comm
        # By their places: a module may put another tensor there.
        self._places = [(each.module, each.attr, each.names[0]) for each in find_buffers(model)]
        self._follow = follow and comm.world > 1
        self._in_no_sync = False

    def backward_end(self) -> None:
        """Take the buffers of rank 0, if that is asked for. Collective; blocks."""
        if self._follow and not self._in_no_sync:
            self.broadcast()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, buffers stay each rank's own: micro-batches that are not the last of a step."""
        # Restored, not cleared: contexts may be nested.
        before, self._in_no_sync = self._in_no_sync, True
        try:
            yield
        finally:
            self._in_no_sync = before

    @torch.no_grad()
    def broadcast(self, keep: Callable[[torch.Tensor], None] = lambda _buffer: None) -> None:
        """Give all ranks the buffers of rank 0, bit for bit. Collective; blocks.

        keep: called with each buffer that is about to be written. Raises: RanksDiverged where ranks
        have other buffers: in number, shape or dtype.
        """
        held = {
            name: value
            for module, attr, name in self._places
            if (value := module._buffers.get(attr)) is not None
        }
        if not held or self._comm.world == 1:
            return
        mine = _bytes_of(list(held.values()))
        layout = repr([(name, value.dtype, value.shape) for name, value in held.items()])
        theirs = mine.clone()
        self._comm.broadcast(fingerprinted(f"{len(held)} buffers", digest_of_text(layout)), theirs)
        start = 0
        for value in held.values():
            part = slice(start, start + value.nbytes)
            if not torch.equal(mine[part], theirs[part]):
                keep(value)
                found = from_bytes(theirs[part].numpy().data, value.dtype, tuple(value.shape))
                copy_(value, found)
            start = part.stop


def _bytes_of(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the bytes of tensors one after another, on the CPU. One copy for each device."""
    pieces = [bytes_of(value) for value in values]
    devices = {piece.device for piece in pieces}
    if len(devices) > 1:
        pieces = [piece.to("cpu") for piece in pieces]
    return torch.cat(pieces).to("cpu")
