"""Outputs that models of transformers collect from inside of their blocks (`output_attentions`,
`output_router_logits`), separated by slice.

A hook on each module appends the module's output to a list of the model's call. A block in slices
calls the module once for each slice. This file joins these outputs: to one tensor with all rows;
router logits, which have no rows of the batch, to one `PerSlice`.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from infinity._src.microbatch.rows import PerSlice
from infinity.errors import SlicesError

FLAG = "output_router_logits"
"""Argument of a forward, and setting of a configuration."""

ATTENTIONS = "output_attentions"
"""Argument of a forward, and setting of a configuration, too."""

_ROUTER_LOGITS = "router_logits"
"""Name of the list of router logits, and of the output."""


def asks_for(flag: str, config: Any, kwargs: dict[str, Any]) -> bool:
    """Return whether a call asks for the outputs of a flag, by its arguments or the configuration.
    """
    given = kwargs.get(flag)
    if given is not None:
        return bool(given)
    # A model of text and images has a separate configuration for text.
    both = (config, getattr(config, "text_config", None))
    return any(getattr(each, flag, False) for each in both)


def can_be_told_apart() -> bool:
    """Return False if the installed transformers collects outputs in a way unknown to this file."""
    return "transformers" not in sys.modules or _collector() is not None


def _collector() -> Any:
    # A private module of transformers, which the first model that collects outputs imports.
    module = sys.modules.get("transformers.utils.output_capturing")
    return getattr(module, "_active_collector", None)


class CollectedOutputs:
    """Outputs that are collected while a module runs in slices."""

    def __init__(self, count: int) -> None:
        self._collector = _collector()
        self._all: dict[str, Any] = (self._collector and self._collector.get()) or {}
        self._lists = [key for key, items in self._all.items() if isinstance(items, list)]
        self._before = {key: len(self._all[key]) for key in self._lists}
        self._found: list[dict[str, Any]] = [{} for _ in range(count)]

    @contextlib.contextmanager
    def of(self, index: int) -> Iterator[None]:
        if not self._all:
            yield
            return
        # A slice's lists begin with the outputs so far: hooks count the hidden states in them.
        own = {key: list(self._all[key]) for key in self._lists}
        self._found[index] = {**self._all, **own}
        token = self._collector.set(self._found[index])
        try:
            yield
        finally:
            self._collector.reset(token)

    def join(self, owner: str, joined: Callable[[Sequence[Any]], Any]) -> None:
        """Append the outputs of the slices, joined, to the lists of the model's call. joined: joins
        the parts of one output.

        Raises: SlicesError if slices have different numbers of outputs.
        """
        for key in self._lists:
            of_slices = [found[key][self._before[key] :] for found in self._found]
            counts = [len(found) for found in of_slices]
            if len(set(counts)) > 1:
                raise SlicesError(
                    f"{owner}: slices have different numbers of {key}, {counts}, and "
                    "inf.microbatched cannot tell which to join; set "
                    f"config.output_{key}=False in training"
                )
            for parts in zip(*of_slices, strict=True):
                together = PerSlice(parts, owner) if key == _ROUTER_LOGITS else joined(parts)
                self._all[key].append(together)
