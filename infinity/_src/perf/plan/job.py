"""What is to be done on a machine: how a model is trained, and where its states may rest."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch


@dataclasses.dataclass(frozen=True)
class Job:
    """How the model is trained. tokens: per step, over all devices and micro-batches; micro_batches: of each device.

    resident, grad_dtype: as in `inf.Policy`, sizes in bytes of each process. compute_s: measured (forward, backward) seconds of
    one micro-batch, where they are better known than from FLOP/s. durable: with two generations, and nothing resident.
    update_on: "cpu", or "device" for GPUs. tiles: of every linear (`inf.tile_linears`). loss_tiles: of the head and its loss
    along the vocabulary (`inf.tile_loss`); 1: whole logits. zero, accumulate, qwz, hpz, qgz, error_feedback: as in `inf.Policy`;
    they count on several ranks only.
    """

    tokens: int
    sequence: int
    micro_batches: int = 1
    state: str = "exact"
    update: str = "deferred"
    params: str = "nvme"
    optim: str = "nvme"
    grads: str = "cpu"
    activations: str = "device"
    resident: Mapping[str, float | int] | None = None
    grad_dtype: torch.dtype | None = None
    checkpointing: bool = True
    compute_s: tuple[float, float] | None = None
    generations: int = 1
    durable: bool = False
    update_on: str = "cpu"
    tiles: int = 1
    loss_tiles: int = 1
    zero: int = 3
    accumulate: str | None = None
    qwz: bool = False
    hpz: str | None = None
    qgz: bool = False
    error_feedback: bool = False

    def __post_init__(self) -> None:
        if self.durable:
            object.__setattr__(self, "generations", 2)
            object.__setattr__(self, "resident", {"params": 0.0, "optim": 0.0})

    @property
    def speculates(self) -> bool:
        """Whether units update during backward ahead of a step that may decide otherwise."""
        return self.update == "backward" and self.generations > 1

    @property
    def stores_gradients(self) -> bool:
        """Whether gradients wait for the step."""
        return self.update != "backward" or self.speculates or self.micro_batches > 1

    @property
    def accumulates_locally(self) -> bool:
        """Whether micro-batches but the last add up in whole gradients of each rank. Their memory is there from the start, also
        for steps of one micro-batch: how many there will be the engine is not told."""
        return self.accumulate == "local" or (self.accumulate is None and self.zero == 1)

    @property
    def reductions(self) -> int:
        """How often a step reduces the gradients over several ranks."""
        return 1 if self.accumulates_locally else self.micro_batches

    def whole_params(self, world: int) -> bool:
        """Whether each of so many ranks keeps all parameters on its device."""
        return self.params == "device" and (self.zero < 3 or world == 1)

    def micro_batch_tokens(self, ranks: int) -> int:
        """Tokens of one micro-batch on one device."""
        return -(-self.tokens // (self.micro_batches * ranks))

    def grad_itemsize(self, dtype: torch.dtype) -> int:
        """Bytes of an element of gradients that wait, of parameters of a dtype."""
        return (self.grad_dtype or dtype).itemsize
