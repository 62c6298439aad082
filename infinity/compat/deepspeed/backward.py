"""Support for scripts that call `loss.backward()` without `engine.backward`.

The engine's forward returns a view of each output. A hook on the view divides its gradient by the
number of micro-batches of a step, as `engine.backward` divides the loss. It raises if the loss
should have been scaled and was not. If the model computes one output from another (a loss from
logits), no gradient is divided twice: the model used the original tensor, which has no hook.
Inside `engine.backward` the hooks leave gradients unchanged.
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

    divisor: returns the micro-batches of a step. needs_scale: whether a loss must be scaled.
    """

    def __init__(self, divisor: Callable[[], int], needs_scale: Callable[[], bool]) -> None:
        self._divisor, self._needs_scale = divisor, needs_scale
        self._inside = False
        # Id of the autograd graph task that began at a scaled loss. An id and not a flag: nothing
        # would reset a flag after a backward that raised.
        self._scaled_task = _NO_TASK

    def attach(self, outputs: Any) -> Any:
        """Return the outputs, each tensor that has a grad_fn replaced by a view with a hook."""
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
        """Enter a context in which the hooks leave gradients unchanged."""
        self._inside = True
        try:
            yield
        finally:
            self._inside = False

    def note_scaled(self, loss: torch.Tensor) -> None:
        """Accept the backward that begins at `loss`, which `engine.scale` has scaled."""
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
    """Apply `change` to each tensor of a value. Containers and dataclasses are copied, not changed.
    """
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, (tuple, list)):
        items = [_mapped(each, change) for each in value]
        # A named tuple's constructor expects separate arguments.
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
