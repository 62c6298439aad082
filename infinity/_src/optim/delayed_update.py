"""Delayed updates (update="delayed"): an update overlaps with the whole step after it, which
computes with the parameters before it.

Source: ZeRO-Offload (arXiv 2101.06840), section 5.2. The parameters that compute are a second copy
in RAM (`params.delayed_params`). Gradients have two sets of memory: the update reads one while
backward fills the other. Numbers differ from those of the plain loop by one step of delay and
nothing else, and depend on no timing.

    opt.step() t       starts update t; from here on forwards compute with the parameters before it
    opt.step() t + 1   waits for update t; from here on forwards compute with its result

A skipped step (GradScaler found an inf, on_nonfinite="skip", no gradient at all) is no step. Update
t stays the last one, the next forward computes with the same parameters as the skipped one did, and
`delayed_warmup` does not count it.

A write to a parameter (in `gather()`, by `load_state_dict()`, as "master") goes to both copies,
whole. The next forward computes with the written value, and the next update changes it. `gather()`
shows the newest parameters, with which training computes one step later. A training forward or
backward of them inside is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from infinity._src.memory.device import Device
from infinity._src.optim.step import accumulated_gradients
from infinity._src.optim.step_consensus import Grouped
from infinity._src.optim.update_jobs import Work
from infinity._src.optim.update_mode import DeferredUpdate
from infinity._src.params.accumulator import AccumulatorState, GradAccumulator
from infinity._src.params.buffers import GradBuffers
from infinity._src.params.delayed_params import DelayedParams
from infinity._src.params.state_store import StateStore
from infinity._src.params.unit import Flat, Param, Unit


class DelayedUpdate(DeferredUpdate):
    """Submits updates whose result computes after the next step. The first `warmup` steps are
    deferred updates.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        *,
        store: StateStore,
        rank: int,
        grad_dtype: torch.dtype | None,
        device: Device,
        warmup: int,
    ) -> None:
        super().__init__()
        self._units = list(units)
        self._delayed = self.delayed_params = DelayedParams(store, device)
        self._gradients = GradBuffers(rank, grad_dtype, device)  # the second set
        self._warmup = warmup
        self._taken = 0  # steps that updated something
        self._spare: dict[Param, torch.Tensor] = {}

    @property
    def memory_bytes(self) -> int:
        return self._delayed.memory_bytes + self._gradients.size_bytes

    def restored(self, steps: int) -> None:
        self._taken = steps

    def backward_begin(self) -> None:
        # While an update overlaps with the step after it, the drives are busy with that.
        if not self._delayed.active:
            super().backward_begin()

    def allocate(self, flats: Sequence[Flat], spilled: Sequence[Flat]) -> None:
        """Make room for these flats' second copies and second gradients. Gradients of `spilled`
        rest on NVMe, once.
        """
        self._delayed.allocate(flats)
        self._gradients.allocate([flat for flat in flats if flat not in spilled])

    def close(self) -> None:
        """Free the second copies. The memory of gradients goes with the last accumulator that has
        it. Nothing may be pending.
        """
        self._spare.clear()
        self._delayed.close()
        self._gradients.close()

    def submit(self, by_unit: dict[Unit, dict[Param, Work]], optimizer: Grouped) -> None:
        # A skipped step is no step: the delay does not advance.
        if not by_unit:
            return
        # Counted here and not in `count_step`: only steps that update something end the warm-up.
        self._taken += 1
        if self._taken <= self._warmup:
            super().submit(by_unit, optimizer)
            return
        self._delayed.active = True
        # All units, also those without work: each takes over the result of the update before.
        for unit in self._pipeline.next_order(self._units):
            work = by_unit.get(unit)
            # A device may still be copying the values before from there.
            self._unsharder.end_copies(unit)
            if self._delayed.refresh(unit) or (
                work is not None and self._unsharder.shows_newest(unit)
            ):
                # What is gathered shows the parameters before; a graph that saved them may no
                # longer run backward.
                unit.generation += 1
                self._unsharder.renew(unit)
            if work is None:
                continue
            self._pipeline.start(unit, work, accumulated_gradients(work))
            # From the next step on, the copy is refreshed from the states that this update writes.
            self._delayed.outdated(unit)
            for param in work:
                assert param.grad is not None
                param.grad.guard(_Swap(self, param) if param.grad.backing is None else None)

    def swap(self, param: Param, accumulator: GradAccumulator) -> None:
        """Give the parameter's accumulator the other memory: the update reads the present one."""
        accumulator.guard(None)
        read = accumulator.tensor
        # The first swap of an accumulator takes memory of the second set; later ones take back the
        # memory of the swap before.
        spare = param in self._spare
        written = self._spare.pop(param) if spare else self._gradients.shard_of(param)
        # The loop adds to a gradient that it has kept: the sum goes on in the other memory.
        if accumulator.state is AccumulatorState.HELD:
            written.copy_(read)
        accumulator.tensor = written
        self._spare[param] = read


class _Swap(NamedTuple):
    """Reader of an accumulator's storage, while the next step writes elsewhere
    (`infinity._src.params.accumulator.AccumulatorReader`).
    """

    updates: DelayedUpdate
    param: Param

    def before_write(self, accumulator: GradAccumulator) -> None:
        self.updates.swap(self.param, accumulator)
