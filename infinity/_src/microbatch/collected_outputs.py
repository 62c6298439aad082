"""Outputs that models of transformers collect from inside of their blocks (`output_attentions`,
`output_router_logits`), told apart by slice.

A hook on each module appends what it returned to a list of the model's call. A block in slices
calls the module once for each slice: here these become one tensor with all rows, and router logits,
which have none, one `PerSlice`.
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
"""Another one."""

_ROUTER_LOGITS = "router_logits"
"""Name of their list, and of the output."""


def asks_for(flag: str, config: Any, kwargs: dict[str, Any]) -> bool:
    """True for a call whose model returns what a flag stands for."""
    given = kwargs.get(flag)
    if given is not None:
        return bool(given)
    # A model of text and images has a configuration for each.
    both = (config, getattr(config, "text_config", None))
    return any(getattr(each, flag, False) for each in both)


def can_be_told_apart() -> bool:
    """True unless the installed transformers collects in a way that is not known here."""
    return "transformers" not in sys.modules or _collector() is not None


def _collector() -> Any:
    # Private, and loaded with the first model that collects outputs.
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
        # With what is there: hooks look at how many hidden states there are.
        own = {key: list(self._all[key]) for key in self._lists}
        self._found[index] = {**self._all, **own}
        token = self._collector.set(self._found[index])
        try:
            yield
        finally:
            self._collector.reset(token)

    def join(self, owner: str, joined: Callable[[Sequence[Any]], Any]) -> None:
        """Hand on to the model what the slices have collected. joined: puts together what each
        slice has of one output.

        Raises: SlicesError where slices differ in the number of outputs.
        """
        for key in self._lists:
            of_slices = [found[key][self._before[key] :] for found in self._found]
            counts = [len(found) for found in of_slices]
            if len(set(counts)) > 1:
                raise SlicesError(
                    f"{owner}: of {key} slices have {counts}, and inf.microbatched cannot tell "
                    f"which belong together; set config.output_{key}=False in training"
                )
            for parts in zip(*of_slices, strict=True):
                together = PerSlice(parts, owner) if key == _ROUTER_LOGITS else joined(parts)
                self._all[key].append(together)
