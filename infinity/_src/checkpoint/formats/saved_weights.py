"""Elements of a model's parameters in a checkpoint, where a weight may be cut into other tiles than
in the model, or into none.

    saved    tile 0: experts 0-3    tile 1: experts 4-7           elements of the whole weight,
    model    tile 0: experts 0-2    tile 1: 3-5    tile 2: 6-7    first to last

A tile of whole rows is a range of its weight's elements, and an uncut weight is all of them; so
ranges of one tiling make up those of another. A tile along columns is no range: it matches a tile
of the same place alone.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence

from infinity._src.checkpoint.reader import SavedParam
from infinity._src.kernels.tiling.tiled_module import TilePlace, tile_index, whole_name
from infinity._src.params.unit import Param


@dataclasses.dataclass(frozen=True)
class SavedRange:
    """Elements [at, at + numel) of a parameter, or of a part of one: they are those from `start` on
    of a saved parameter.
    """

    saved: SavedParam
    start: int
    at: int
    numel: int


class SavedRanges:
    """All elements of a parameter, as ranges in order and without gaps."""

    def __init__(self, ranges: Iterable[SavedRange]) -> None:
        self.ranges = tuple(ranges)
        self._at = [each.at for each in self.ranges]

    @property
    def saved(self) -> list[SavedParam]:
        return [each.saved for each in self.ranges]

    def within(self, element: int, numel: int) -> Iterator[SavedRange]:
        """Yield what has elements [element, element + numel); `at` counts from `element`."""
        index = bisect.bisect_right(self._at, element) - 1
        done = 0
        while done < numel:
            each = self.ranges[index]
            skipped = element + done - each.at
            count = min(each.numel - skipped, numel - done)
            yield SavedRange(each.saved, each.start + skipped, done, count)
            done += count
            index += 1


class SavedWeight:
    """A weight of a checkpoint.

    shape: of the whole. tiles: its parameters with their places, in order; an uncut one has None.
    """

    def __init__(
        self, shape: tuple[int, ...], tiles: Sequence[tuple[SavedParam, TilePlace | None]]
    ) -> None:
        self.shape = shape
        self.tiles = list(tiles)
        self.saved = [saved for saved, _ in tiles]
        self._at_place = {place: saved for saved, place in tiles}
        # None: some are no ranges.
        self._ranges: SavedRanges | None = None
        starts = [_start(place) for _, place in tiles]
        if None not in starts:
            self._ranges = SavedRanges(
                SavedRange(saved, 0, start, saved.entry.numel)
                for saved, start in zip(self.saved, starts, strict=True)
                if start is not None
            )

    def ranges_of(self, param: Param) -> SavedRanges | None:
        """Return where the elements of a parameter lie that is this weight, or a tile of it; None
        where the tiles of the two are along columns, and differ.
        """
        place = param.place
        if place in self._at_place:
            return SavedRanges([SavedRange(self._at_place[place], 0, 0, param.numel)])
        start = _start(place)
        if start is None or self._ranges is None:
            return None
        return SavedRanges(self._ranges.within(start, param.numel))


def weights_by_name(params: Iterable[SavedParam]) -> dict[str, SavedWeight]:
    """Return the weights that saved parameters are, by all their names in state dicts."""
    found: dict[str, SavedWeight] = {}
    grids: dict[str, dict[tuple[int, int], SavedParam]] = {}
    for saved in params:
        uncut = SavedWeight(saved.entry.shape, [(saved, None)])
        for name in saved.entry.names:
            # Of a tile, too: a user's own module may have such a name, and is no tile.
            found[name] = uncut
            whole = whole_name(name)
            if whole is not None:
                grids.setdefault(whole, {})[tile_index(name)] = saved
    for name, grid in grids.items():
        weight = _joined(grid)
        if weight is not None:
            # A parameter that has the name itself comes first: then the others are no tiles of it.
            found.setdefault(name, weight)
    return found


def _joined(grid: dict[tuple[int, int], SavedParam]) -> SavedWeight | None:
    """Return the weight of these tiles by (row, column); None where some are missing, or do not fit
    together: a user's own modules may have such names.
    """
    height, width = (1 + max(index[axis] for index in grid) for axis in (0, 1))
    shapes = {index: saved.entry.shape for index, saved in grid.items()}
    if len(grid) != height * width or any(len(shape) < 2 for shape in shapes.values()):
        return None
    rest = shapes[0, 0][2:]
    for (row, column), shape in shapes.items():
        if shape != (shapes[row, 0][0], shapes[0, column][1], *rest):
            return None
    rows, columns = [0], [0]
    for row in range(height):
        rows.append(rows[-1] + shapes[row, 0][0])
    for column in range(width):
        columns.append(columns[-1] + shapes[0, column][1])
    whole = (rows[-1], columns[-1], *rest)
    tiles = []
    for row, column in sorted(grid):
        place = TilePlace((rows[row], rows[row + 1]), (columns[column], columns[column + 1]), whole)
        tiles.append((grid[row, column], place))
    return SavedWeight(whole, tiles)


def _start(place: TilePlace | None) -> int | None:
    """Return the element of the weight with which a tile of whole rows begins; None for a tile that
    has parts of rows.
    """
    if place is None:
        return 0
    if place.columns != (0, place.whole_shape[1]):
        return None
    return place.rows[0] * math.prod(place.whole_shape[1:])
