"""The gradient slots of one model: the scratch that they share, and their norms over all ranks."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence

import torch

from infinity._src.grads.norms import NORM_PIECE_NUMEL, raise_unsupported, to_fp32
from infinity._src.grads.slot import GradSlot, SlotState
from infinity._src.memory.device import GradOffload

SumReduce = Callable[[list[float]], list[float]]


class SlotBook:
    """The gradient slots of one model: the fp32 scratch that they share, and their norms over all ranks.

    `reduce_sum` adds a list of floats over the ranks in a fixed order and is called with the same length on all; None
    on one rank.
    """

    def __init__(self, reduce_sum: SumReduce | None = None, *, grad_offload: GradOffload | None = None) -> None:
        self.slots: list[GradSlot] = []
        self.scratch_lock = threading.Lock()  # gradients may be drained by one thread per device
        self.grad_offload = grad_offload  # where the device has memory of its own
        self._reduce_sum = reduce_sum
        self._scratch = torch.empty(0, dtype=torch.float32)
        self._factor: tuple[torch.Tensor, int, float] | None = None

    @property
    def scratch_bytes(self) -> int:
        """Bytes of the scratch that the largest slot needs; `reserve` allocates them."""
        return 4 * min(NORM_PIECE_NUMEL, max((slot.numel for slot in self.slots), default=0))

    def reserve(self) -> None:
        """Allocate the scratch, so that no step does."""
        self._scratch = torch.empty(self.scratch_bytes // 4, dtype=torch.float32)

    def release(self) -> None:
        """Free the scratch; a norm that is asked for later takes what it needs."""
        with self.scratch_lock:
            self._scratch = torch.empty(0, dtype=torch.float32)

    def scratch(self, numel: int) -> torch.Tensor:
        """The first `numel` elements of the scratch; hold `scratch_lock`."""
        if self._scratch.numel() < numel:
            self._scratch = torch.empty(numel, dtype=torch.float32)
        return self._scratch[:numel]

    def norms(self, slots: Sequence[GradSlot], order: float = 2.0) -> list[float]:
        """The norms of whole gradients, fp32 values. One reduction for all of them, and for later calls: with
        several ranks the 2-norms of every slot are reduced together, so one norm at a time costs no more.

        Raises: RuntimeError for orders that do not add up over pieces (0, negative; on several ranks inf).
        """
        if not order > 0:
            raise_unsupported(slots[0].name, f"a norm of order {order}")
        if self._reduce_sum is None:
            return [slot.part_norm(order) for slot in slots]
        if math.isinf(order):
            raise_unsupported(slots[0].name, "an inf-norm while it is split over ranks")
        if order != 2.0:
            sums = self._reduce_sum([slot.part_norm(order) ** order for slot in slots])
            return [to_fp32(total ** (1.0 / order)) for total in sums]
        if any(slot._norm is None for slot in slots):
            # All slots, also the empty ones: the reduction then has the same length on every rank.
            parts = [slot.part_norm() if slot.state is SlotState.HELD else 0.0 for slot in self.slots]
            for slot, total in zip(
                self.slots, self._reduce_sum([part * part for part in parts]), strict=True
            ):
                slot._norm = to_fp32(math.sqrt(total)) if total >= 0 else math.nan
        return [slot._norm for slot in slots if slot._norm is not None]

    def finite(self, slots: Sequence[GradSlot]) -> bool:
        """Whether these gradients are finite on every rank. With several ranks a collective."""
        mine = all(slot.finite() for slot in slots)
        if self._reduce_sum is None:
            return mine
        return self._reduce_sum([0.0 if mine else 1.0])[0] == 0.0

    def factor(self, value: torch.Tensor | float) -> float:
        """A scaling factor as the fp32 number that torch would use. Reads a device scalar once, however often asked."""
        if not isinstance(value, torch.Tensor):
            return to_fp32(float(value))
        cached = self._factor
        if cached is not None and cached[0] is value and cached[1] == value._version:
            return cached[2]
        number = value.detach().to(torch.float32).item()
        self._factor = (value, value._version, number)
        return number
