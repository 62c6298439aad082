"""Shared wording of messages: lists of names, and calls for users of trainers."""

from __future__ import annotations

from collections.abc import Iterable

TRAINERS = (
    "infinity.integrations.transformers.embed(trainer), "
    "infinity.integrations.accelerate.attach(accelerator), or Lightning's strategy='infinity'"
)
"""Calls that make a trainer keep parameters offloaded, and save and resume through infinity."""
LISTED_MAX = 5
"""Maximum names in a message; the others are counted."""


def listed(names: Iterable[str], most: int = LISTED_MAX) -> str:
    """Format names as "a, b and 3 more"."""
    every = list(names)
    more = f" and {len(every) - most} more" if len(every) > most else ""
    return ", ".join(every[:most]) + more


def listed_are(names: Iterable[str], most: int = LISTED_MAX) -> str:
    """Format names with a verb: "a is", "a, b and 3 more are"."""
    every = list(names)
    return f"{listed(every, most)} {'is' if len(every) == 1 else 'are'}"


LEFT_OUT = (
    "if ranks skip modules at random, use Policy(zero=2, params='device', "
    "find_unused_parameters=True): with zero=3 all ranks must gather the same units"
)
"""Advice in errors of ranks whose programs differ."""
