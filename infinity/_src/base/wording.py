"""Wording that messages have in common: lists of names, and what a user of a trainer calls."""

from __future__ import annotations

from collections.abc import Iterable

TRAINERS = (
    "infinity.integrations.transformers.embed(trainer), "
    "infinity.integrations.accelerate.attach(accelerator), or Lightning's strategy='infinity'"
)
"""The calls that teach a trainer to leave parameters where they rest, and to save and resume."""
LISTED_MAX = 5
"""Names in a message, before the rest is only counted."""


def listed(names: Iterable[str], most: int = LISTED_MAX) -> str:
    """Write names as "a, b and 3 more", so that a message stays a message."""
    every = list(names)
    more = f" and {len(every) - most} more" if len(every) > most else ""
    return ", ".join(every[:most]) + more


def listed_are(names: Iterable[str], most: int = LISTED_MAX) -> str:
    """Write names with their verb: "a is", "a, b and 3 more are"."""
    every = list(names)
    return f"{listed(every, most)} {'is' if len(every) == 1 else 'are'}"


LEFT_OUT = (
    "where each rank leaves out modules by chance, Policy(zero=2, params='device', "
    "find_unused_parameters=True) allows it, and zero=3, which gathers units, does not"
)
"""Advice in errors of ranks whose programs differ."""
