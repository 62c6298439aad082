"""Backwards that a script runs itself: `loss.backward()` without `engine.backward`.

A hook on each output of the engine's forward divides its gradient by the number of micro-batches of
a step, as `engine.backward` divides the loss; and raises where the loss had to be scaled and was
not. Inside of `engine.backward` the hooks let gradients pass.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

_engine: Any = torch.autograd.Variable._execution_engine


class OutputHooks:
    """Hooks on the outputs of one engine's forwards.

    divisor: the micro-batches of a step. needs_scale: whether a loss has to be scaled.
    """

    def __init__(self, divisor: Callable[[], int], needs_scale: Callable[[], bool]) -> None:
        self._divisor, self._needs_scale = divisor, needs_scale
        self._inside = False
        self._scaled = False
        self._queued = False

    def attach(self, outputs: Any) -> None:
        """Put a hook on each tensor in the outputs that autograd reaches."""
        if not torch.is_grad_enabled() or (self._divisor() == 1 and not self._needs_scale()):
            return
        for tensor in {id(each): each for each in _tensors(outputs)}.values():
            if tensor.requires_grad:
                tensor.register_hook(self._hook)

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Enter `engine.backward`."""
        self._inside = True
        try:
            yield
        finally:
            self._inside = False

    def note_scaled(self) -> None:
        """Note that `engine.scale` has scaled the loss of the next backward."""
        self._scaled = True

    def _hook(self, grad: torch.Tensor) -> torch.Tensor | None:
        if self._inside:
            return None
        if self._needs_scale() and not self._scaled:
            raise RuntimeError(
                "Loss scaling is required for this configuration, but backward() was called "
                "directly without scaling the loss: call engine.backward(loss), or "
                "engine.scale(loss).backward()"
            )
        if not self._queued:
            self._queued = True
            _engine.queue_callback(self._ended)
        return grad / self._divisor()

    def _ended(self) -> None:
        self._queued = self._scaled = False


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in containers, and in dataclasses."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _tensors(each)
    elif isinstance(value, (list, tuple, set)):
        for each in value:
            yield from _tensors(each)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _tensors(getattr(value, field.name))
