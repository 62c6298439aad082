"""Backwards that a script runs itself: `loss.backward()` without `engine.backward`.

The engine's forward returns a view of each output. A hook on the view divides its gradient by the
number of micro-batches of a step, as `engine.backward` divides the loss; and raises where the loss
had to be scaled and was not. An output of which another one was computed (logits, and their loss)
takes no part of the other's gradient twice, since the model computed with the tensor itself.
Inside of `engine.backward` the hooks let gradients pass.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch

_graph_task_id: Callable[[], int] = torch._C._current_graph_task_id
_NO_TASK = -1


class OutputHooks:
    """Hooks on the outputs of one engine's forwards.

    divisor: the micro-batches of a step. needs_scale: whether a loss has to be scaled.
    """

    def __init__(self, divisor: Callable[[], int], needs_scale: Callable[[], bool]) -> None:
        self._divisor, self._needs_scale = divisor, needs_scale
        self._inside = False
        # By its number: one that raised ends without a call here.
        self._scaled_task = _NO_TASK

    def attach(self, outputs: Any) -> Any:
        """Return the outputs with a view that has a hook in place of each tensor that autograd
        reaches."""
        if not torch.is_grad_enabled() or (self._divisor() == 1 and not self._needs_scale()):
            return outputs
        return _mapped(outputs, self._viewed)

    def _viewed(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.grad_fn is None:
            return tensor
        view = tensor.view_as(tensor)
        view.register_hook(self._hook)
        return view

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Enter `engine.backward`."""
        self._inside = True
        try:
            yield
        finally:
            self._inside = False

    def note_scaled(self, loss: torch.Tensor) -> None:
        """Note a loss that `engine.scale` has scaled: the backward that begins at it may pass."""
        loss.register_hook(self._begin_scaled)

    def _begin_scaled(self, _: torch.Tensor) -> None:
        self._scaled_task = _graph_task_id()

    def _hook(self, grad: torch.Tensor) -> torch.Tensor | None:
        if self._inside:
            return None
        if self._needs_scale() and self._scaled_task != _graph_task_id():
            raise RuntimeError(
                "Loss scaling is required for this configuration, but backward() was called "
                "directly without scaling the loss: call engine.backward(loss), or "
                "engine.scale(loss).backward()"
            )
        return grad / self._divisor()


def _mapped(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return a value with its tensors changed: those in containers and in dataclasses, which are
    copied."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, (tuple, list)):
        items = [_mapped(each, change) for each in value]
        # Named tuples take their fields one by one.
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        copied = copy.copy(value)
        for key, each in value.items():
            copied[key] = _mapped(each, change)
        return copied
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        made: Any = copy.copy(value)
        for field in dataclasses.fields(value):
            object.__setattr__(made, field.name, _mapped(getattr(value, field.name), change))
        return made
    return value
