"""Router logits that models of transformers collect from inside of their blocks
(`output_router_logits`), told apart by slice.

A hook on each router appends what it returned to a list of the model's call. A block in slices
calls its router once for each slice: here these go into one `PerSlice`.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from infinity._src.microbatch.rows import PerSlice
from infinity.errors import SlicesError

FLAG = "output_router_logits"
"""Argument of a forward, and setting of a configuration."""

KEY = "router_logits"
"""Name of the list, and of the output."""


def asks_for_router_logits(config: Any, kwargs: dict[str, Any]) -> bool:
    """True for a call whose model returns the logits of its routers."""
    given = kwargs.get(FLAG)
    if given is not None:
        return bool(given)
    # A model of text and images has a configuration for each.
    both = (config, getattr(config, "text_config", None))
    return any(getattr(each, FLAG, False) for each in both)


def can_be_told_apart() -> bool:
    """True unless the installed transformers collects in a way that is not known here."""
    return "transformers" not in sys.modules or _collector() is not None


def _collector() -> Any:
    """Return the variable of transformers with the lists of the call that runs, or None."""
    # Private, and loaded with the first model that collects outputs.
    module = sys.modules.get("transformers.utils.output_capturing")
    return getattr(module, "_active_collector", None)


class CollectedLogits:
    """Router logits that are collected while a module runs in slices."""

    def __init__(self, count: int) -> None:
        self._collector = _collector()
        lists = None if self._collector is None else self._collector.get()
        self._all: list[Any] | None = None if lists is None else lists.get(KEY)
        self._found: list[list[Any]] = [[] for _ in range(count)]

    @contextlib.contextmanager
    def of(self, index: int) -> Iterator[None]:
        """Collect for one slice inside."""
        if self._all is None:
            yield
            return
        token = self._collector.set({KEY: self._found[index]})
        try:
            yield
        finally:
            self._collector.reset(token)

    def join(self, owner: str) -> None:
        """Hand on to the model what the slices have collected, one `PerSlice` for each router.

        Raises: SlicesError where slices differ in the number of routers that they called.
        """
        if self._all is None:
            return
        counts = [len(found) for found in self._found]
        if len(set(counts)) > 1:
            raise SlicesError(
                f"{owner}: slices called {counts} routers, and inf.microbatched cannot tell which "
                f"of their logits belong together; set config.{FLAG}=False in training"
            )
        self._all += [PerSlice(parts, owner) for parts in zip(*self._found, strict=True)]
