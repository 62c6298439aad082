"""Random numbers of slices: each slice draws from a separate stream.

    base = torch.randint(2**62, ())            the number that torch's generator would give next
    slice i draws as after torch.manual_seed(base + i), through all modules of the forward

A plain loop that seeds like this before micro-batch i draws the same masks. If only slices have
drawn, the caller's generator advances by that one number after the forward; if nothing has drawn,
it stays. Code of the model between its sliced modules draws numbers for the whole batch from the
caller's generator: a loop draws other numbers there, and other masks after them.

The generators of Python and NumPy have no streams for slices (`HostState`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
import sys
from collections.abc import Iterator
from typing import Any

import torch

from infinity._src.base.torch_compat import dynamo_disable

SEEDS = 1 << 62
"""Bases are below this."""

_CPU = torch.device("cpu")


def _state(device: torch.device) -> torch.Tensor:
    if device.type == "cpu":
        return torch.get_rng_state()
    module: Any = torch.get_device_module(device)
    state: torch.Tensor = module.get_rng_state(device)
    return state


def _set_state(device: torch.device, state: torch.Tensor) -> None:
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        module: Any = torch.get_device_module(device)
        module.set_rng_state(state, device)


class RandomStreams:
    """Streams of the slices of one forward.

    drawn: a slice has drawn a number.
    """

    def __init__(self) -> None:
        self._before = torch.get_rng_state()
        # Draw from a copy: a forward without randomness leaves the caller's generator as it is.
        ahead = torch.Generator()
        ahead.set_state(self._before)
        self._base = int(torch.randint(SEEDS, (), generator=ahead))
        self._after = ahead.get_state()
        self._states: dict[tuple[int, torch.device], torch.Tensor] = {}
        self.drawn = False

    @contextlib.contextmanager
    def of(self, index: int, device: torch.device) -> Iterator[None]:
        """Draw from the stream of slice `index` inside the context, on the CPU and on `device`."""
        devices = [_CPU] if device.type == "cpu" else [_CPU, device]
        outside = [_state(each) for each in devices]
        begun = [self._begun(index, each) for each in devices]
        for each, state in zip(devices, begun, strict=True):
            _set_state(each, state)
        try:
            yield
        finally:
            for each, state, before in zip(devices, begun, outside, strict=True):
                now = _state(each)
                self.drawn = self.drawn or not torch.equal(now, state)
                self._states[index, each] = now
                _set_state(each, before)

    def _begun(self, index: int, device: torch.device) -> torch.Tensor:
        known = self._states.get((index, device))
        if known is not None:
            return known
        return torch.Generator(device=device).manual_seed(self._base + index).get_state()

    def end(self) -> None:
        """Advance the caller's generator by one number if slices alone have drawn."""
        if self.drawn and torch.equal(torch.get_rng_state(), self._before):
            torch.set_rng_state(self._after)


@dataclasses.dataclass(frozen=True)
class HostState:
    """State of the generators of Python and NumPy.

    These have no stream for each slice: all slices draw from one sequence. torch's checkpoints do
    not restore them, so backward would draw other numbers if `again` did not restore this state.
    """

    python: Any
    numpy: Any

    @classmethod
    @dynamo_disable
    def now(cls) -> HostState:
        numpy = sys.modules.get("numpy")
        if numpy is None:
            return cls(random.getstate(), None)
        name, keys, *rest = numpy.random.get_state()
        # `==` does not compare arrays.
        return cls(random.getstate(), (name, keys.tobytes(), *rest))

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        outside = HostState.now()
        self._set()
        try:
            yield
        finally:
            outside._set()

    @dynamo_disable
    def _set(self) -> None:
        random.setstate(self.python)
        if self.numpy is not None:
            numpy = sys.modules["numpy"]
            name, keys, *rest = self.numpy
            numpy.random.set_state((name, numpy.frombuffer(keys, dtype=numpy.uint32), *rest))
