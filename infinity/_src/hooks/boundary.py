"""A boundary activation: one tensor that checkpointed calls saved, its layout, and where its bytes are now.

It belongs to the graphs that saved it: when the last of them is gone, so is it, and what it leaves is put where the engine
looks for it.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections import deque

import torch

from infinity._src._torch_compat import CheckpointCall, version_of, version_witness
from infinity._src.hooks.activation_store import StoredBytes
from infinity.aio import Ticket


class Call:
    """One checkpointed call and the boundaries that it was the first to save. Held by them."""

    __slots__ = ("__weakref__", "boundaries", "number", "saved")

    def __init__(self, number: int, saved: CheckpointCall) -> None:
        self.number = number
        self.saved = saved
        self.boundaries: list[weakref.ref[Boundary]] = []

    @property
    def label(self) -> str:
        """What it called, for messages."""
        return self.saved.label or "a checkpointed call"


class Boundary:
    """One tensor that checkpoints saved, wherever it is now. Its graphs hold it.

    Of `source` (the tensor itself), `shelved` and `target` (memory that it came back to, or comes), any may be set.
    """

    __slots__ = (
        "__weakref__",
        "call",
        "dtype",
        "fetch",
        "given",
        "lead",
        "original",
        "shape",
        "shared",
        "source",
        "span",
        "stored",
        "stride",
        "target",
        "trash",
        "unwanted",
        "version",
        "witness",
    )

    def __init__(self, tensor: torch.Tensor, call: Call, trash: deque[Remains]) -> None:
        self.call = call
        self.shape, self.stride, self.dtype = tensor.shape, tensor.stride(), tensor.dtype
        self.span = span_numel(tensor)
        # Kernels may sum in another order at another alignment.
        self.lead = tensor.data_ptr() % 64 // tensor.element_size()
        self.original = weakref.ref(tensor)
        self.version = version_of(tensor)
        self.witness = version_witness(tensor)
        self.source: torch.Tensor | None = tensor.detach()
        self.stored: StoredBytes | None = None
        self.target: torch.Tensor | None = None  # [lead + span] of dtype
        self.fetch: Ticket | None = None
        self.given = False  # the target was given to backward
        self.unwanted = False  # the target goes as soon as nothing comes to it
        self.shared = False
        self.trash = trash

    @property
    def span_bytes(self) -> int:
        """Bytes from its first element to its last."""
        return self.span * self.dtype.itemsize

    def view(self) -> torch.Tensor:
        """The tensor, as it was laid out, in the target."""
        assert self.target is not None
        with torch.no_grad():
            return torch.empty(0, dtype=self.dtype, device=self.target.device).set_(
                self.target.untyped_storage(), self.lead, self.shape, self.stride
            )

    def check_version(self) -> None:
        """Raises RuntimeError, as torch does, when the tensor was modified after it was saved."""
        now = version_of(self.witness)
        if now != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"[{self.dtype} {list(self.shape)}], an input of {self.call.label}, is at version {now}; expected version "
                f"{self.version} instead"
            )

    def __del__(self) -> None:
        # Any thread, at any moment, may come by here: what is to be done is only noted.
        self.trash.append(
            Remains(
                self.stored,
                self.span_bytes * ((self.source is not None) + (self.target is not None)),
            )
        )


@dataclasses.dataclass(eq=False, frozen=True)
class Remains:
    """What a boundary leaves that no graph holds any more."""

    stored: StoredBytes | None
    memory_bytes: int


def span_numel(tensor: torch.Tensor) -> int:
    """Elements from the first of `tensor` to its last, gaps included. `tensor` is not empty."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
