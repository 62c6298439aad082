"""The model as it was, for an offload that fails."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from infinity._src.base.torch_compat import exchange
from infinity._src.params.sharded_param import ShardedParameter, ShardedView, replace_by_sharded


class Rollback:
    """Notes of a model before it is offloaded: the attributes of its modules, their parameters,
    buffers, children and hooks. `undo` puts them back, whatever has changed them since.

    Tensors are changed through `replace`, `keep` and `refuse`, which note what was there.
    """

    def __init__(self, model: nn.Module) -> None:
        self._undo = contextlib.ExitStack()
        # Most tables are empty, and need no copy.
        self._tables: list[tuple[dict[Any, Any], dict[Any, Any] | None]] = []
        for module in model.modules():
            attributes = module.__dict__
            tables = (attributes[name] for name in _TABLES if name in attributes)
            self._tables += [(table, table.copy() or None) for table in (attributes, *tables)]
        self._undo.callback(self._put_back)

    def replace(self, original: torch.Tensor, sharded: ShardedParameter | ShardedView) -> None:
        """Make the object `original` what `sharded` is. Raises: as `replace_by_sharded`."""
        replace_by_sharded(original, sharded)
        self._undo.callback(exchange, original, sharded)

    def keep(self, tensor: torch.Tensor) -> None:
        """Note the values of a tensor that is about to be written."""
        self._undo.callback(_write_back, tensor, tensor.detach().clone())

    def refuse(self, node: Any, hook: Callable[..., None]) -> None:
        """Have a node of a graph call `hook` before it takes gradients: it raises."""
        self._undo.callback(node.register_prehook(hook).remove)

    def undo(self) -> None:
        """Put everything back."""
        self._undo.close()

    def _put_back(self) -> None:
        for table, before in reversed(self._tables):
            table.clear()
            table.update(before or {})


def _write_back(tensor: torch.Tensor, before: torch.Tensor) -> None:
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        tensor.copy_(before)


_TABLES = tuple(name for name, value in nn.Module().__dict__.items() if isinstance(value, dict))
"""The dicts of a module: parameters, buffers, children and hooks."""
