"""Timeline of one training step: bars in lanes (kinds of work), by unit, few enough to draw.

    spans of the step   (`telemetry.Span`: each read of a chunk, each use of a unit)
      -> lanes          gather, waiting, compute, gradient, states, update, write ...
      -> one bar        for a lane's contiguous work on one unit
      -> rows           for overlapping bars of a lane
      -> fewer bars     by merging neighbours too short to be visible

A timeline has at most `BARS_MAX` bars for any model. It is stored as JSON, and validated on
reading.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from infinity._src.base.atomic_file import replaced
from infinity._src.base.telemetry import Span

FILE_NAME: Final = "timeline.json"
SCHEMA: Final = "infinity.timeline/1"

LANES: Final[tuple[str, ...]] = (
    "phase", "gather", "waiting", "compute", "gradient", "states", "update", "write",
    "activations", "copies", "save", "other",
)  # fmt: skip
"""Lanes, in display order. states: reads of states for an update."""

BARS_MAX: Final = 3000
ROWS_MAX: Final = 4
_BYTES_MAX = 16 << 20
# Fraction of a step's time that is too short to be drawn as a pixel.
_FINEST = 1 / 4000

_OF_PYTHON = {
    "phases": "phase", "wait": "waiting", "compute": "compute", "gradients": "gradient",
    "updates": "update",
}  # fmt: skip
"""Track -> lane, for tracks recorded by Python."""

_OF_PURPOSES = {
    "gather": "gather", "update": "states", "gradient": "gradient", "activation": "activations",
    "copy": "copies", "save": "save", "other": "other",
}  # fmt: skip
"""Purpose -> lane, for transfers of the native threads."""


@dataclasses.dataclass
class Bar:
    """Contiguous work of a lane, in seconds from the step's start, on units `first` to `last`
    (indices in `names`; equal for one unit).
    """

    row: int
    first: int
    last: int
    start_s: float
    end_s: float
    size_bytes: int


@dataclasses.dataclass(frozen=True)
class StepTimeline:
    """One step: its number, duration in seconds, names of units, and bars by lane. dropped: spans
    of the step that were not recorded.
    """

    step: int
    seconds: float
    dropped: int
    names: tuple[str, ...]
    lanes: dict[str, list[Bar]]

    @classmethod
    def of(
        cls,
        spans: Iterable[Span],
        window_ns: tuple[int, int],
        *,
        step: int,
        units: Sequence[str] = (),
        dropped: int = 0,
    ) -> StepTimeline:
        """Build the timeline of the spans between window_ns[0] and window_ns[1]. units: names in
        the model's order; further names are appended as they occur.
        """
        start_ns, end_ns = window_ns
        seconds = max(end_ns - start_ns, 1) / 1e9
        numbers = {name: number for number, name in enumerate(units)}
        found: dict[str, list[Bar]] = {}
        for span in spans:
            first, last = max(span.start_ns, start_ns), min(span.end_ns, end_ns)
            if last < first or span.end_ns < start_ns or span.start_ns > end_ns:
                continue
            unit = numbers.setdefault(span.name, len(numbers))
            size = int((span.args or {}).get("bytes", 0))
            bar = Bar(0, unit, unit, (first - start_ns) / 1e9, (last - start_ns) / 1e9, size)
            found.setdefault(lane_of(span), []).append(bar)
        resolution_s = seconds * _FINEST
        lanes = {
            lane: _in_rows(_without_breaks(found[lane], resolution_s))
            for lane in LANES
            if lane in found
        }
        while sum(map(len, lanes.values())) > BARS_MAX:
            lanes = {lane: _coarser(bars, resolution_s) for lane, bars in lanes.items()}
            resolution_s *= 2
        return cls(step, seconds, dropped, _renumber(lanes, list(numbers)), lanes)

    def write(self, path: Path) -> None:
        """Write the timeline to `path`, atomically replacing an existing file."""
        document = {
            "schema": SCHEMA,
            "step": self.step,
            "seconds": self.seconds,
            "dropped": self.dropped,
            "names": self.names,
            "lanes": {
                lane: [dataclasses.astuple(bar) for bar in bars]
                for lane, bars in self.lanes.items()
            },
        }
        with replaced(path) as file:
            file.write(json.dumps(document, separators=(",", ":")).encode())

    @classmethod
    def read(cls, path: Path) -> StepTimeline:
        """Read and validate a timeline. Raises: ValueError for an invalid file; OSError."""
        try:
            if path.stat().st_size > _BYTES_MAX:
                raise ValueError(f"more than {_BYTES_MAX} bytes")
            return cls._checked(json.loads(path.read_bytes()))
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
            raise ValueError(
                f"{path} is not the timeline of a step ({type(error).__name__}: {error}); remove "
                "it to get the page without a timeline"
            ) from error

    @classmethod
    def _checked(cls, document: Any) -> StepTimeline:
        if document["schema"] != SCHEMA:
            raise ValueError(f"schema {document['schema']!r:.60} is not {SCHEMA!r}")
        seconds = _number(document["seconds"])
        names = tuple(map(_text, document["names"]))
        lanes = {
            lane: [_bar(values, len(names), seconds) for values in document["lanes"][lane]]
            for lane in LANES
            if lane in document["lanes"]
        }
        count = sum(map(len, lanes.values()))
        if count > BARS_MAX or len(names) > 2 * BARS_MAX or seconds <= 0:
            raise ValueError(f"{count} bars, {len(names)} names, {seconds} seconds")
        return cls(
            int(_number(document["step"])), seconds, int(_number(document["dropped"])), names, lanes
        )


def lane_of(span: Span) -> str:
    """Return the lane of a span."""
    if span.track in _OF_PYTHON:
        return _OF_PYTHON[span.track]
    purpose = str((span.args or {}).get("for", "other"))
    if span.track == "writes" and purpose in ("update", "other"):
        return "write"
    # Copies of an update: new parameters to a device, and states for a device update.
    if span.track in ("to device", "from device", "copies") and purpose == "update":
        return "update"
    return _OF_PURPOSES.get(purpose, "other")


def _without_breaks(bars: list[Bar], resolution_s: float) -> list[Bar]:
    """Join bars of one unit that overlap or are at most `resolution_s` apart. Returns them by
    start.
    """
    joined: list[Bar] = []
    latest: dict[int, Bar] = {}
    for bar in sorted(bars, key=lambda each: (each.start_s, each.end_s)):
        before = latest.get(bar.first)
        if before is not None and bar.start_s <= before.end_s + resolution_s:
            before.end_s = max(before.end_s, bar.end_s)
            before.size_bytes += bar.size_bytes
        else:
            latest[bar.first] = bar
            joined.append(bar)
    return joined


def _in_rows(bars: list[Bar]) -> list[Bar]:
    """Assign overlapping bars to different rows; bars that overlap in the last row are joined."""
    last: list[Bar] = []
    kept = []
    for bar in bars:
        row = next((row for row, at in enumerate(last) if at.end_s <= bar.start_s), len(last))
        if row == ROWS_MAX:
            _join(last[-1], bar)
            continue
        bar.row = row
        last[row : row + 1] = [bar]
        kept.append(bar)
    return kept


def _coarser(bars: list[Bar], resolution_s: float) -> list[Bar]:
    """Join neighbours in a row if both bars and the gap between them are shorter than
    `resolution_s`."""
    kept: list[Bar] = []
    groups: dict[int, Bar] = {}
    for bar in bars:
        short = bar.end_s - bar.start_s < resolution_s
        group = groups.get(bar.row)
        if short and group is not None and bar.start_s - group.end_s < resolution_s:
            _join(group, bar)
            continue
        kept.append(bar)
        if short:
            groups[bar.row] = bar
        else:
            groups.pop(bar.row, None)
    return kept


def _renumber(lanes: Mapping[str, Sequence[Bar]], names: Sequence[str]) -> tuple[str, ...]:
    """Drop names that no bar uses, and renumber the bars. Returns the remaining names."""
    bars = [bar for row in lanes.values() for bar in row]
    used = sorted({number for bar in bars for number in (bar.first, bar.last)})
    place = {number: index for index, number in enumerate(used)}
    for bar in bars:
        bar.first, bar.last = place[bar.first], place[bar.last]
    return tuple(names[number] for number in used)


def _join(group: Bar, bar: Bar) -> None:
    group.first, group.last = min(group.first, bar.first), max(group.last, bar.last)
    group.end_s = max(group.end_s, bar.end_s)
    group.size_bytes += bar.size_bytes


def _number(value: Any) -> float:
    # bool is a subclass of int.
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"{value!r:.60} is no number")
    return float(value)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r:.60} is no name")
    return value


def _bar(values: Any, names: int, seconds: float) -> Bar:
    row, first, last, start_s, end_s, size_bytes = map(_number, values)
    # Rounding may put an end slightly after the step's end.
    inside = 0 <= start_s <= end_s <= seconds * 1.001
    if not (inside and 0 <= row < ROWS_MAX and 0 <= first <= last < names and size_bytes >= 0):
        raise ValueError(f"bar {values!r:.100} lies outside of the step")
    return Bar(int(row), int(first), int(last), start_s, end_s, int(size_bytes))
