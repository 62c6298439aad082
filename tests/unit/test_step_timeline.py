"""Tests of a step's timeline: its lanes, the rows of a lane, and the limit on bars."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from infinity._src.base.step_timeline import BARS_MAX, LANES, ROWS_MAX, Bar, StepTimeline
from infinity._src.base.telemetry import Span

MS = 1_000_000


def span(track: str, name: str, start: float, end: float, **args: Any) -> Span:
    """A span from `start` to `end`, in milliseconds."""
    return Span(track, name, round(start * MS), round(end * MS), args or None)


def made(*spans: Span, ms: int = 100, units: tuple[str, ...] = ()) -> StepTimeline:
    return StepTimeline.of(spans, (0, ms * MS), step=8, units=units)


def test_work_on_a_unit_is_a_bar_in_the_lane_of_its_purpose() -> None:
    found = made(
        span("phases", "first forward", 0, 50),
        span("reads", "a", 0, 5, **{"for": "gather", "bytes": 7}),
        span("reads", "a", 3, 9, **{"for": "gather", "bytes": 5}),
        span("wait", "a", 1, 9),
        span("compute", "a", 9, 20, **{"pass": "forward"}),
        span("gradients", "a", 60, 61),
        span("reads", "b", 10, 20, **{"for": "update"}),
        span("updates", "b", 20, 25, **{"for": "update"}),
        span("writes", "b", 25, 40, **{"for": "update"}),
        span("writes", "b", 50, 52, **{"for": "gradient"}),
        span("reads", "chunk 9", 70, 71, **{"for": "activation"}),
        units=("b", "a"),
    )
    assert list(found.lanes) == [lane for lane in LANES if lane in found.lanes]
    bars = {
        lane: [(found.names[bar.first], bar.start_s, bar.end_s) for bar in bars]
        for lane, bars in found.lanes.items()
    }
    assert bars == {
        "phase": [("first forward", 0, 0.05)],
        "gather": [("a", 0, 0.009)],
        "waiting": [("a", 0.001, 0.009)],
        "compute": [("a", 0.009, 0.02)],
        "gradient": [("b", 0.05, 0.052), ("a", 0.06, 0.061)],
        "states": [("b", 0.01, 0.02)],
        "update": [("b", 0.02, 0.025)],
        "write": [("b", 0.025, 0.04)],
        "activations": [("chunk 9", 0.07, 0.071)],
    }
    assert found.lanes["gather"][0].size_bytes == 12
    # Names are in the model's order: a unit's colour is its place in the model.
    assert found.names[:2] == ("b", "a")


def test_a_step_has_what_runs_in_it_and_no_more() -> None:
    found = made(
        span("compute", "a", -5, 10), span("compute", "b", 90, 120), span("wait", "c", 101, 102)
    )
    assert [(bar.start_s, bar.end_s) for bar in found.lanes["compute"]] == [(0, 0.01), (0.09, 0.1)]
    assert "waiting" not in found.lanes


def test_bars_that_overlap_have_rows_of_their_own_as_far_as_there_are_rows() -> None:
    found = made(*(span("reads", f"u{n}", n, 50 + n, **{"for": "gather"}) for n in range(8)))
    bars = found.lanes["gather"]
    assert [bar.row for bar in bars] == list(range(ROWS_MAX))
    assert [found.names[bar.first] for bar in bars] == ["u0", "u1", "u2", "u3"]
    assert found.names[bars[-1].last] == "u7"
    assert bars[-1].end_s == 0.057


def assert_bounded(found: StepTimeline) -> None:
    bars = [bar for lane in found.lanes.values() for bar in lane]
    assert len(bars) <= BARS_MAX
    assert len(found.names) <= 2 * BARS_MAX
    for lane in found.lanes.values():
        rows: dict[int, float] = {}
        for bar in lane:
            assert rows.get(bar.row, 0.0) <= bar.start_s <= bar.end_s <= found.seconds
            rows[bar.row] = bar.end_s


@pytest.mark.parametrize("seed", range(3))
def test_a_step_of_any_size_has_few_bars_and_loses_no_time_and_no_byte(seed: int) -> None:
    chance = random.Random(seed)
    spans = []
    for index in range(20_000):
        track = chance.choice(["reads", "writes", "updates", "compute", "wait"])
        start = chance.uniform(0, 100)
        end = min(start + chance.choice([0.001, 0.02, 5.0]) * chance.random(), 100)
        spans.append(
            span(track, f"unit {index % 3000}", start, end, **{"for": "update", "bytes": 3})
        )
    found = made(*spans)
    assert_bounded(found)
    bars = [bar for lane in found.lanes.values() for bar in lane]
    assert sum(bar.size_bytes for bar in bars) == 3 * len(spans)
    for each in spans[::500]:
        lane = {"reads": "states", "writes": "write", "updates": "update", "wait": "waiting"}.get(
            each.track, each.track
        )
        assert any(
            bar.start_s <= each.start_ns / 1e9 + 1e-9 and each.end_ns / 1e9 <= bar.end_s + 1e-9
            for bar in found.lanes[lane]
        )


def test_ten_times_the_units_take_ten_times_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts the bars that are examined, in all passes that merge bars."""
    from infinity._src.base import step_timeline

    counts = []
    for units in (2_000, 20_000):
        looked = 0
        coarser = step_timeline._coarser

        def counted(bars: list[Bar], resolution_s: float) -> list[Bar]:
            nonlocal looked
            looked += len(bars)
            return coarser(bars, resolution_s)  # noqa: B023

        with monkeypatch.context() as patch:
            patch.setattr(step_timeline, "_coarser", counted)
            width = 100 / units
            made(*(span("compute", f"u{n}", n * width, (n + 0.9) * width) for n in range(units)))
        counts.append(looked)
    assert counts[1] <= 20 * max(counts[0], 2_000)


def test_a_timeline_is_read_as_it_was_written(tmp_path: Path) -> None:
    found = made(span("compute", "ä <b>", 1, 2), span("wait", "b", 2, 3))
    found.write(tmp_path / "timeline.json")
    assert StepTimeline.read(tmp_path / "timeline.json") == found
    assert [path.name for path in tmp_path.iterdir()] == ["timeline.json"]


GOOD = {
    "schema": "infinity.timeline/1", "step": 2, "seconds": 1.0, "dropped": 0, "names": ["a"],
    "lanes": {"compute": [[0, 0, 0, 0.0, 0.5, 0]]},
}  # fmt: skip


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        "[" * 100_000,
        json.dumps({**GOOD, "schema": "other"}),
        json.dumps({**GOOD, "seconds": 0}),
        json.dumps({**GOOD, "seconds": float("nan")}),
        json.dumps({**GOOD, "seconds": "1"}),
        json.dumps({**GOOD, "step": float("inf")}),
        json.dumps({**GOOD, "names": [3]}),
        json.dumps({**GOOD, "lanes": {"compute": [[0, 0, 1, 0.0, 0.5, 0]]}}),
        json.dumps({**GOOD, "lanes": {"compute": [[9, 0, 0, 0.0, 0.5, 0]]}}),
        json.dumps({**GOOD, "lanes": {"compute": [[0, 0, 0, 0.5, 0.0, 0]]}}),
        json.dumps({**GOOD, "lanes": {"compute": [[0, 0, 0, 0.0, 7.5, 0]]}}),
        json.dumps({**GOOD, "lanes": {"compute": [[0, 0, 0, 0.0]]}}),
        json.dumps({**GOOD, "lanes": {"compute": 3}}),
        json.dumps({**GOOD, "lanes": {"compute": [[0, 0, 0, 0.0, 0.5, 0]] * (BARS_MAX + 1)}}),
        json.dumps({**GOOD, "names": ["a"] * (2 * BARS_MAX + 1)}),
    ],
)  # fmt: skip
def test_a_file_that_is_no_timeline_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "timeline.json"
    path.write_text(json.dumps(GOOD))
    assert StepTimeline.read(path).names == ("a",)
    path.write_text(text)
    with pytest.raises(ValueError, match=r"timeline\.json is not the timeline of a .*remove it"):
        StepTimeline.read(path)
