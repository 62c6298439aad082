"""`Policy.update`: when the update of a unit is submitted, and what that needs of the engine."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from infinity._src.config import Policy
from infinity._src.grads.buffers import GradBuffers
from infinity._src.grads.reducer import GradReducer
from infinity._src.memory.device import Device
from infinity._src.optim.backward_update import BackwardUpdate, Holder
from infinity._src.optim.delayed_update import DelayedUpdate
from infinity._src.optim.device_update import DeviceUpdate
from infinity._src.optim.grad_windows import GradWindows
from infinity._src.optim.speculative_update import SpeculativeUpdate
from infinity._src.optim.step import StepPipeline
from infinity._src.params.delayed_params import DelayedParams
from infinity._src.params.residency import Unsharder
from infinity._src.params.state_store import StateStore
from infinity._src.params.unit import Flat, Param, Unit
from infinity.aio import Executor


class UpdateMode:
    """update="deferred"; base of the others."""

    @property
    def stores_gradients(self) -> bool:
        """Whether gradients wait in RAM for the step, and so need memory."""
        return True

    def allocate(self, flats: Sequence[Flat], spilled: Sequence[Flat]) -> None:
        """Make room for what the mode holds of these flats besides their states and gradients, of which some may spill."""

    @property
    def memory_bytes(self) -> int:
        """Bytes of that room."""
        return 0

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Micro-batches that are not the last of a step."""
        yield

    def check_whole(self) -> None:
        """Raise RuntimeError when some parameters of a step are updated and others are not: nothing can be saved or restored."""

    def restored(self, steps: int) -> None:
        """The states are those after so many steps, of this run or another."""

    @property
    def fresh_bytes_peak(self) -> int:
        """The most bytes of gradients that lay outside of the engine's memory at once."""
        return 0

    def close(self) -> None:
        """Free what `allocate` made. Nothing may be pending."""


class DelayedMode(UpdateMode):
    """update="delayed"."""

    def __init__(self, policy: Policy, units: list[Unit], pipeline: StepPipeline, residency: Unsharder, rest: StateStore, rank: int):
        self._shadow = DelayedParams(rest)
        self._gradients = GradBuffers(rank, policy.grad_dtype, residency.device)
        self._updates = DelayedUpdate(
            units,
            pipeline=pipeline,
            residency=residency,
            shadow=self._shadow,
            gradients=self._gradients,
            warmup=policy.delayed_warmup,
        )

    def allocate(self, flats: Sequence[Flat], spilled: Sequence[Flat]) -> None:
        self._updates.allocate(flats, spilled)

    def restored(self, steps: int) -> None:
        self._updates.taken = steps

    @property
    def memory_bytes(self) -> int:
        return self._shadow.memory_bytes + self._gradients.size_bytes

    def close(self) -> None:
        self._updates.close()
        self._shadow.close()
        self._gradients.close()


class EarlyMode(UpdateMode):
    """update="backward". make_gradients: gives gradients memory, when micro-batches accumulate for the first time."""

    def __init__(self, updates: BackwardUpdate, make_gradients: Callable[[], None]) -> None:
        self._updates = updates
        self._make_gradients = make_gradients
        self._accumulated = False

    @property
    def stores_gradients(self) -> bool:
        """Once micro-batches were accumulated."""
        return self._accumulated

    def allocate(self, flats: Sequence[Flat], spilled: Sequence[Flat]) -> None:  # noqa: ARG002 - windows are for all that learns
        self._updates.allocate()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        if not (self._accumulated or self._updates.reduced_later):
            self._accumulated = True
            try:
                self._make_gradients()
            except BaseException:
                self._accumulated = False
                raise
        before, self._updates.accumulating = self._updates.accumulating, True
        try:
            yield
        finally:
            self._updates.accumulating = before

    def check_whole(self) -> None:
        if self._updates.half_done:
            raise RuntimeError(
                "between backward and opt.step(), with update='backward', some parameters are updated already: save and restore "
                "after opt.step()"
            )

    @property
    def fresh_bytes_peak(self) -> int:
        return self._updates.fresh_bytes_peak

    def close(self) -> None:
        self._updates.close()


class OnDeviceMode(UpdateMode):
    """update_on="device"."""

    def __init__(self, updates: DeviceUpdate) -> None:
        self._updates = updates

    def close(self) -> None:
        self._updates.close()


class SpeculativeMode(UpdateMode):
    """update="backward" with two generations. Gradients wait, as with update="deferred"."""

    def __init__(self, updates: SpeculativeUpdate) -> None:
        self._updates = updates

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        before, self._updates.accumulating = self._updates.accumulating, True
        try:
            yield
        finally:
            self._updates.accumulating = before


def open_mode(
    policy: Policy,
    units: list[Unit],
    *,
    pipeline: StepPipeline,
    residency: Unsharder,
    drain: GradReducer,
    rest: StateStore,
    executor: Executor,
    rank: int,
    holder_of: Callable[[Param], Holder | None],
    make_gradients: Callable[[], None],
) -> UpdateMode:
    """The mode that the policy names, wired to the engine's parts. Raises: ValueError where the model cannot have it."""
    if policy.update_on == "device":
        if not residency.device.copies:
            raise ValueError("update_on='device': the model computes on the CPU, which updates already; use update_on='cpu'")
        parts: dict[str, Any] = {"pipeline": pipeline, "residency": residency, "rest": rest, "executor": executor}
        return OnDeviceMode(DeviceUpdate(**parts, device=residency.device))
    if policy.update == "delayed":
        return DelayedMode(policy, units, pipeline, residency, rest, rank)
    if policy.update == "backward" and pipeline.transaction is not None:
        return SpeculativeMode(
            SpeculativeUpdate(
                pipeline=pipeline,
                transaction=pipeline.transaction,
                residency=residency,
                drain=drain,
                holder_of=holder_of,
            )
        )
    if policy.update == "backward":
        updates = BackwardUpdate(
            units,
            pipeline=pipeline,
            residency=residency,
            drain=drain,
            holder_of=holder_of,
            on_nonfinite=policy.on_nonfinite,
        )
        return EarlyMode(updates, make_gradients)
    return UpdateMode()


def staging_bytes(policy: Policy, units: list[Unit], device: Device, dtype_of: Callable[[Flat], torch.dtype]) -> int:
    """Pinned memory by way of which gradients leave the device for updates during backward; more after parameters were thawed."""
    early = device.copies and policy.update == "backward" and not policy.speculates
    return GradWindows.needs_bytes(units, dtype_of) if early else 0
