"""Fixed order in which ranks reduce units, whichever units each of them uses in a backward.

    start   a backward begins: units that this rank's forwards have left out are done already
    done    this rank is done with a unit: the units whose turn has come can be reduced
    rest    backward has ended: all others take part, with zeros where they have no gradient

It is the reverse of the order in which modules are registered, as that of DDP's buckets. A unit
that is done before its turn keeps its gradients until then.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from infinity._src.params.unit import Unit


class ReduceOrder:
    """Turns of the units of one model. Each unit has one in each backward. No tensors."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self._units = list(reversed(units))
        self._next = 0
        self._done: set[Unit] = set()

    def start(self, unused: Iterable[Unit]) -> None:
        """Begin a backward. unused: the units to which it will not come, as far as is known."""
        self._next = 0
        self._done = set(unused)

    def done(self, unit: Unit) -> list[Unit]:
        """Note that backward is done with a unit. Returns those whose turn has come, in order."""
        self._done.add(unit)
        begin = self._next
        while self._next < len(self._units) and self._units[self._next] in self._done:
            self._next += 1
        return self._units[begin : self._next]

    def rest(self) -> list[Unit]:
        """Return the units that have not had their turn, in order, when a backward has ended."""
        begin, self._next = self._next, len(self._units)
        return self._units[begin:]
