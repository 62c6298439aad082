"""Logging and timelines."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from infinity._src.base import telemetry
from infinity._src.base.telemetry import (
    PURPOSES,
    Marks,
    NativeSpans,
    PhaseClock,
    Timeline,
    configure_logging,
    now_ns,
)

NATIVE = np.dtype(
    [
        ("track", "<i4"), ("drive", "<i4"), ("start_ns", "<i8"), ("end_ns", "<i8"),
        ("bytes", "<i8"), ("chunk", "<i4"),
    ]
)  # fmt: skip


def native(*records: tuple[int, ...], unit: int = -1, purpose: str = "other") -> NativeSpans:
    count = len(records)
    return NativeSpans(
        np.array(list(records), NATIVE),
        np.full(count, unit, np.int32),
        np.full(count, PURPOSES.index(purpose), np.int8),
        ["embed", "layers.0"],
    )


def events_of(path: Path) -> list[dict[str, object]]:
    return json.loads(path.read_text())["traceEvents"]  # type: ignore[no-any-return]


def test_a_trace_holds_every_span_with_its_track_and_times_in_microseconds(tmp_path: Path) -> None:
    timeline = Timeline()
    timeline.add("compute", "forward", 5_000_000, 9_000_000, {"unit": "layers.0"})
    read, update = (0, 1, 4_000_000, 6_000_000, 4096, 7), (2, -1, 6_000_000, 7_000_000, 0, 7)
    timeline.add_native_spans(native(read, unit=1, purpose="gather"))
    timeline.add_native_spans(native(update))
    assert len(timeline) == 3
    assert timeline.write(tmp_path / "trace.json") == 3
    spans = [event for event in events_of(tmp_path / "trace.json") if event["ph"] == "X"]
    assert [(span["cat"], span["ts"], span["dur"]) for span in spans] == [
        ("reads", 0.0, 2000.0),
        ("compute", 1000.0, 4000.0),
        ("updates", 2000.0, 1000.0),
    ]
    assert spans[0]["args"] == {"for": "gather", "chunk": 7, "bytes": 4096, "drive": 1}
    assert [span["name"] for span in spans] == ["layers.0", "forward", "chunk 7"]
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]


def test_overlapping_spans_of_a_track_never_share_a_row(tmp_path: Path) -> None:
    timeline = Timeline()
    for start in range(0, 100, 3):
        timeline.add("reads", "chunk", start, start + 10)
    timeline.write(tmp_path / "trace.json")
    rows: dict[object, float] = {}
    for event in events_of(tmp_path / "trace.json"):
        if event["ph"] == "X":
            assert rows.get(event["tid"], 0) <= event["ts"]  # type: ignore[operator]
            rows[event["tid"]] = event["ts"] + event["dur"]  # type: ignore[operator]
    assert len(rows) == 4


def test_a_trace_without_spans_still_names_the_tracks(tmp_path: Path) -> None:
    Timeline().write(tmp_path / "trace.json")
    names = [
        event["args"]["name"]
        for event in events_of(tmp_path / "trace.json")
        if event["name"] == "thread_name"
    ]  # type: ignore[index]
    assert names == [
        "phases", "wait", "compute", "gradients", "reads", "writes", "updates", "copies",
        "to device", "from device",
    ]  # fmt: skip


def test_a_full_timeline_keeps_the_newest_and_counts_what_it_drops() -> None:
    timeline = Timeline(spans_max=3)
    for index in range(5):
        timeline.add("compute", "x", index, index + 1)
    for first in (10, 12):
        timeline.add_native_spans(native(*((0, 0, at, at + 1, 0, at) for at in (first, first + 1))))
    assert (len(timeline), timeline.dropped) == (6, 3)
    assert [span.start_ns for span in timeline.spans()] == [2, 3, 4, 11, 12, 13]
    assert [span.start_ns for span in timeline.spans(since_ns=5)] == [4, 11, 12, 13]
    timeline.add_native_spans(native(*((0, 0, at, at + 1, 0, at) for at in range(20, 29))))
    assert [span.start_ns for span in timeline.spans(since_ns=5)] == [4, 26, 27, 28]
    timeline.clear()
    assert (len(timeline), timeline.dropped) == (0, 0)


def test_a_span_takes_no_memory_that_was_not_there_from_the_beginning() -> None:
    timeline, units = Timeline(spans_max=1000), [f"layers.{index}" for index in range(10)]

    def fill(count: int) -> None:
        for index in range(count):
            timeline.add(
                "compute", units[index % 10], 10**12 + index, 10**12 + index + 1, waited_ns=index
            )

    fill(10)
    # Of the timeline and of its caller, which makes the numbers: other threads of the process have
    # memory of their own.
    mine = [
        tracemalloc.Filter(inclusive=True, filename_pattern=file)
        for file in (telemetry.__file__, __file__)
    ]
    gc.collect()
    tracemalloc.start()
    try:
        fill(5000)
        gc.collect()
        held = tracemalloc.take_snapshot().filter_traces(mine).statistics("filename")
        assert sum(each.size for each in held) < 1000
    finally:
        tracemalloc.stop()
    assert (len(timeline), timeline.dropped) == (1000, 4010)
    last = timeline.spans()[-1]
    assert (last.name, last.end_ns - last.start_ns) == ("layers.9", 1)
    assert last.args == {"waited_ms": 0.005}


def test_a_span_is_recorded_also_when_its_body_raises() -> None:
    timeline = Timeline()
    before = now_ns()
    with pytest.raises(KeyError), timeline.span("compute", "backward", step=3):
        raise KeyError
    (span,) = timeline.spans()
    assert (span.track, span.name, span.args) == ("compute", "backward", {"step": 3})
    assert before <= span.start_ns <= span.end_ns <= now_ns()


def printed(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True,
        env={"PATH": "", **environment},
    )  # fmt: skip
    return done.stderr


def test_warnings_are_printed_without_a_handler() -> None:
    code = (
        "from infinity._src.base.telemetry import logger; logger.warning('a bad block'); "
        "logger.info('nobody asked')"
    )
    assert printed(code, RANK="1") == "[rank 1] infinity warning: a bad block\n"
    takes = "import logging; logging.basicConfig(level='ERROR'); "
    assert printed(takes + code) == ""
    own = "import logging; logging.getLogger('infinity').addHandler(logging.NullHandler()); "
    assert printed(own + code) == ""


@pytest.mark.parametrize("stderr", ["full", "closed"])
def test_a_log_that_cannot_be_written_raises_nothing(stderr: str) -> None:
    code = "from infinity._src.base.telemetry import logger\n"
    code += "logger.warning('lost'); print('went on')"
    if stderr == "closed":
        code = f"import sys; sys.stderr.close()\n{code}"
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-c", code],
            stdout=subprocess.PIPE, stderr=full, text=True, check=False,
        )  # fmt: skip
    assert done.stdout == "went on\n"
    # 120: Python's own word that it could not flush the stream at its exit.
    assert done.returncode in (0, 120)


def test_infinity_log_prints_with_the_rank_in_front() -> None:
    code = (
        "from infinity._src.base.telemetry import configure_logging, logger; configure_logging(); "
        "configure_logging(); logger.info('hello')"
    )
    assert printed(code, INFINITY_LOG="info", RANK="3") == "[rank 3] infinity info: hello\n"


def test_an_unknown_log_level_names_the_variable() -> None:
    with pytest.raises(ValueError, match="INFINITY_LOG"):
        configure_logging("loud")


def test_a_phase_clock_has_what_gradients_and_activations_moved_of_the_same_steps() -> None:
    now, away = Marks(), (0, 0)
    clock = PhaseClock(Timeline(), lambda: now, lambda: away)
    for factor in (1000, 1, 3):
        clock.enter("backward")
        now = now._replace(
            grads_read=now.grads_read + 2 * factor, grads_written=now.grads_written + 5 * factor
        )
        away = away[0] + 7 * factor, away[1] + 11 * factor
        clock.enter("step")
        clock.enter("idle")
    assert clock.steady_steps == 2
    found = clock.steady()["backward"]
    moved = (
        found.grads_read_bytes,
        found.grads_written_bytes,
        found.activations_read_bytes,
        found.activations_written_bytes,
    )
    assert moved == (8, 20, 28, 44)
    mean = found.per(2)
    assert (mean.count, mean.grads_read_bytes, mean.activations_written_bytes) == (1, 4, 22)
    assert mean.seconds == pytest.approx(found.seconds / 2)
    assert (clock.marks().grads_written, clock.marks().activations_read) == (5 * 1004, 7 * 1004)


def test_a_phase_clock_divides_time_and_counts_and_starts_after_the_first_step() -> None:
    now = Marks()
    timeline = Timeline()
    clock = PhaseClock(timeline, lambda: now)

    def passes(read: int, wait_s: float, *, quiet: bool = False) -> None:
        nonlocal now
        for phase in (
            "forward",
            "idle",
            "backward",
            "idle",
            "forward",
            "idle",
            "backward",
            "idle",
            "step",
            "idle",
        ):
            clock.enter(phase, quiet=quiet and phase == "forward")
            now = Marks(
                now.bytes_read + read, now.bytes_written + 1, now.params_read + 2,
                now.wait_s + wait_s, 0.0,
            )  # fmt: skip

    passes(1000, 5.0)
    assert clock.steady_steps == 0
    assert clock.steady()["backward"].count == 0
    passes(10, 0.5)
    passes(30, 1.5, quiet=True)
    assert clock.steady_steps == 2
    steady = clock.steady()
    assert {name: figures.count for name, figures in steady.items()} == {
        "first forward": 2, "forward": 2, "backward": 4, "step": 2, "evaluation": 0, "idle": 10,
    }  # fmt: skip
    assert steady["backward"].bytes_read == 2 * 10 + 2 * 30
    assert steady["backward"].wait_s == pytest.approx(4.0)
    assert steady["step"].params_read_bytes == 4
    assert clock.quiet_forward.count == 2
    assert clock.quiet_forward.wait_s == pytest.approx(3.0)
    totals = clock.totals()
    assert sum(figures.bytes_read for figures in totals.values()) == now.bytes_read
    assert sum(figures.seconds for figures in totals.values()) > 0
    assert clock.totals()["idle"].count == totals["idle"].count  # looking at it is no new phase
    tracks = [(span.track, span.name) for span in timeline.spans()]
    assert tracks[:5] == [
        ("phases", name) for name in ("first forward", "backward", "forward", "backward", "step")
    ]
