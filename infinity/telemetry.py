"""Logging and timelines, without torch.

The logger `infinity` says nothing unless the application or INFINITY_LOG asks it to. A `Timeline` collects spans from
Python and from native threads and writes Chrome trace JSON, which https://ui.perfetto.dev and chrome://tracing open.
All times are CLOCK_MONOTONIC nanoseconds, so that spans of both origins lie on one axis.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

logger: Final = logging.getLogger("infinity")
logger.addHandler(logging.NullHandler())

LEVELS: Final = ("debug", "info", "warning", "error")

NATIVE_TRACKS: Final = ("reads", "writes", "updates", "copies")
"""Track names by the number in the `track` field of an executor's spans."""

TRACKS: Final = ("compute", *NATIVE_TRACKS)
"""The tracks every trace has, in the order in which they are shown."""


class _RankFormatter(logging.Formatter):
    """Puts the rank before each message, so that the lines of several ranks can be told apart."""

    def format(self, record: logging.LogRecord) -> str:
        rank = os.environ.get("RANK")
        where = f"[rank {rank}] " if rank is not None else ""
        return f"{where}infinity {record.levelname.lower()}: {super().format(record)}"


def configure_logging(level: str | None = None) -> None:
    """Send the log to stderr at `level`, else at $INFINITY_LOG; with neither, leave logging as it is.

    Calling again changes the level and adds no second handler.
    Raises: ValueError when the level is none of `LEVELS`.
    """
    chosen = level or os.environ.get("INFINITY_LOG")
    if not chosen:
        return
    if chosen.lower() not in LEVELS:
        raise ValueError(f"log level {chosen!r} is not known; set INFINITY_LOG to {', '.join(LEVELS)}")
    for handler in logger.handlers:
        if isinstance(handler.formatter, _RankFormatter):
            break
    else:
        handler = logging.StreamHandler()
        handler.setFormatter(_RankFormatter())
        logger.addHandler(handler)
    logger.setLevel(chosen.upper())


_said: set[str] = set()


def log_once(key: str, message: str, *, level: int = logging.WARNING) -> None:
    """Log `message` the first time `key` is seen in this process: a fall-back is said once, not once a step."""
    if key not in _said:
        _said.add(key)
        logger.log(level, message)


def now_ns() -> int:
    """CLOCK_MONOTONIC in nanoseconds, the clock of every span."""
    return time.clock_gettime_ns(time.CLOCK_MONOTONIC)


@dataclasses.dataclass(frozen=True)
class Span:
    """Something that took from `start_ns` to `end_ns` (CLOCK_MONOTONIC) on `track`."""

    track: str
    name: str
    start_ns: int
    end_ns: int
    args: Mapping[str, Any] | None = None


class Timeline:
    """Collects spans and writes them as a Chrome trace.

    Memory: at most `spans_max` spans; later ones are counted in `dropped` and left out, so a long run with tracing on
    stays bounded. Threads: `add` may be called from any thread (list.append is atomic, and the bound may be passed by
    a few spans in a race, which harms nothing).
    """

    def __init__(self, *, spans_max: int = 1_000_000) -> None:
        if spans_max < 1:
            raise ValueError(f"spans_max={spans_max} must be at least 1")
        self.spans_max = spans_max
        self.dropped = 0
        self._spans: list[tuple[str, str, int, int, Mapping[str, Any] | None]] = []
        self._native: list[np.ndarray[Any, Any]] = []
        self._native_count = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._spans) + self._native_count

    def add(
        self, track: str, name: str, start_ns: int, end_ns: int, args: Mapping[str, Any] | None = None
    ) -> None:
        """Record one span. Costs about a microsecond; does not block."""
        if len(self) >= self.spans_max:
            self.dropped += 1
            return
        self._spans.append((track, name, start_ns, end_ns, args))

    @contextlib.contextmanager
    def span(self, track: str, name: str, **args: Any) -> Iterator[None]:
        """Record the time spent inside, also when it raises."""
        start_ns = now_ns()
        try:
            yield
        finally:
            self.add(track, name, start_ns, now_ns(), args or None)

    def add_native_spans(self, spans: np.ndarray[Any, Any]) -> None:
        """Take the spans of an executor: fields track, drive, start_ns, end_ns, bytes, chunk. Keeps the array."""
        room = self.spans_max - len(self)
        if len(spans) > room:
            self.dropped += len(spans) - max(room, 0)
            spans = spans[: max(room, 0)]
        if len(spans):
            with self._lock:
                self._native.append(spans)
                self._native_count += len(spans)

    def spans(self) -> list[Span]:
        """Every span recorded so far, in order of start."""
        found = [Span(*record) for record in list(self._spans)]
        for block in list(self._native):
            found.extend(_native_span(record) for record in block)
        return sorted(found, key=lambda span: (span.start_ns, span.end_ns))

    def clear(self) -> None:
        """Forget every span."""
        with self._lock:
            self._spans = []
            self._native = []
            self._native_count = 0
            self.dropped = 0

    def write(self, path: str | os.PathLike[str]) -> int:
        """Write a Chrome trace to `path`, replacing it in one step; returns the number of spans written.

        Overlapping spans of one track go to rows of their own, since a row of a trace holds nested spans only.
        Times are microseconds since the first span.
        """
        spans = self.spans()
        origin_ns = spans[0].start_ns if spans else 0
        events = list(_trace_events(spans, origin_ns))
        document = {
            "displayTimeUnit": "ms",
            "otherData": {"origin_monotonic_ns": origin_ns, "dropped_spans": self.dropped},
            "traceEvents": events,
        }
        target = Path(path)
        partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
        try:
            partial.write_text(json.dumps(document, separators=(",", ":")), encoding="utf-8")
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)
        return len(spans)


def _native_span(record: Any) -> Span:
    track = int(record["track"])
    name = NATIVE_TRACKS[track] if 0 <= track < len(NATIVE_TRACKS) else f"track {track}"
    drive, chunk, size_bytes = int(record["drive"]), int(record["chunk"]), int(record["bytes"])
    args: dict[str, Any] = {"chunk": chunk, "bytes": size_bytes}
    if drive >= 0:
        args["drive"] = drive
    return Span(name, f"chunk {chunk}", int(record["start_ns"]), int(record["end_ns"]), args)


def _trace_events(spans: list[Span], origin_ns: int) -> Iterator[dict[str, Any]]:
    """Metadata and complete events ("X"). Spans come sorted by start."""
    order = {track: index for index, track in enumerate(TRACKS)}
    for span in spans:
        order.setdefault(span.track, len(order))
    pid = os.getpid()
    rank = os.environ.get("RANK")
    process = "infinity" if rank is None else f"infinity rank {rank}"
    yield {"ph": "M", "pid": pid, "tid": 0, "name": "process_name", "args": {"name": process}}
    rows: dict[str, list[int]] = {track: [] for track in order}
    for span in spans:
        tid = order[span.track] * 1000 + _row(rows[span.track], span)
        event: dict[str, Any] = {
            "ph": "X",
            "pid": pid,
            "tid": tid,
            "name": span.name,
            "cat": span.track,
            "ts": (span.start_ns - origin_ns) / 1000,
            "dur": max(span.end_ns - span.start_ns, 0) / 1000,
        }
        if span.args:
            event["args"] = dict(span.args)
        yield event
    for track, ends in rows.items():
        for row in range(max(len(ends), 1)):
            tid = order[track] * 1000 + row
            label = track if row == 0 else f"{track} +{row}"
            yield {"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": label}}
            yield {
                "ph": "M",
                "pid": pid,
                "tid": tid,
                "name": "thread_sort_index",
                "args": {"sort_index": tid},
            }


def _row(ends: list[int], span: Span) -> int:
    """The first row that is free at the span's start; `ends` holds each row's last end and is updated."""
    for row, end_ns in enumerate(ends):
        if end_ns <= span.start_ns:
            ends[row] = span.end_ns
            return row
    if len(ends) < 64:
        ends.append(span.end_ns)
        return len(ends) - 1
    # More than 64 at once cannot be told apart on a screen; share the last row.
    ends[-1] = max(ends[-1], span.end_ns)
    return len(ends) - 1
