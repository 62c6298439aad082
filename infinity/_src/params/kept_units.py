"""Units that stay gathered from slice to slice of their block (`inf.microbatched`).

A block runs its forward once for each slice, and backward takes it slice by slice. The first demand
of a unit gathers it; until a unit of another block is demanded, it is not evicted, so the demands
of the other slices find it. Units stay in the order of their first demand, each that fits into the
bytes of its block (`memory.device_room.kept_room`). All of it follows from the demands, so ranks
that demand the same units keep the same.
"""

from __future__ import annotations

from collections.abc import Mapping

from infinity._src.params.unit import Unit


class KeptUnits:
    """The units that stay, of one block at a time. bytes_max: for each block."""

    def __init__(self, bytes_max: Mapping[int, int]) -> None:
        self._bytes_max = bytes_max
        self._block: int | None = None
        self._units: set[Unit] = set()
        self._left = 0  # bytes that may still stay
        self._paused = False

    def __contains__(self, unit: Unit) -> bool:
        return unit in self._units

    def keep(self, unit: Unit) -> None:
        """Note a demand of the unit: it stays if it fits, and those of another block no longer."""
        if unit.block != self._block:
            self._let_go()
            self._block = unit.block
            self._left = self._bytes_max[unit.block] if unit.block is not None else 0
        stays = unit.block is not None and unit not in self._units and not self._paused
        if stays and unit.size_bytes <= self._left:
            self._units.add(unit)
            self._left -= unit.size_bytes

    def pause(self) -> bool:
        """Keep none in the rest of this pass. Returns whether any stayed until now."""
        had_some = bool(self._units)
        self._let_go()
        self._paused = True
        return had_some

    def clear(self) -> None:
        """Keep none of those before: a pass begins or ends."""
        self._let_go()
        self._paused = False

    def _let_go(self) -> None:
        self._units.clear()
        self._block = None
