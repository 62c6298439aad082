"""Logging and timelines, without torch.

The application or INFINITY_LOG configures the logger `infinity`; if neither does, its warnings are
printed to stderr, so that faults are never silent. A `Timeline` collects spans from Python and from
native threads and writes Chrome trace JSON for https://ui.perfetto.dev and chrome://tracing. All
times are CLOCK_MONOTONIC nanoseconds, in Python and in native threads.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import logging
import os
import sys
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from infinity._src.base.atomic_file import replaced
from infinity._src.base.paths import absolute

logger: Final = logging.getLogger("infinity")

LEVELS: Final = ("debug", "info", "warning", "error")

NATIVE_TRACKS: Final = ("reads", "writes", "updates", "copies", "to device", "from device")
"""Track names, indexed by the `track` field of an executor's spans."""

TRACKS: Final = ("phases", "wait", "compute", "gradients", *NATIVE_TRACKS)
"""Tracks of every trace, in display order. compute: a forward or a backward uses a gathered unit.
gradients: a gradient from autograd is accumulated.
"""

SHORT_NS: Final = 20_000
"""Waits and gradients shorter than this are not recorded."""

PURPOSES: Final = ("gather", "update", "gradient", "activation", "save", "copy", "other")
"""Purposes of native spans, indexed by `NativeSpans.purposes`."""


class _RankFormatter(logging.Formatter):
    """Prefixes each message with the rank."""

    def format(self, record: logging.LogRecord) -> str:
        rank = os.environ.get("RANK")
        where = f"[rank {rank}] " if rank is not None else ""
        return f"{where}infinity {record.levelname.lower()}: {super().format(record)}"


class _LastResort(logging.Handler):
    """Prints warnings to stderr while neither `infinity` nor the root logger has another
    handler.
    """

    def emit(self, record: logging.LogRecord) -> None:
        if logging.getLogger().handlers or logger.handlers != [self]:
            return
        # Suppress errors (a full disk, a closed stream): a warning may be logged while a step is
        # being undone. Read sys.stderr here, because programs replace it.
        with contextlib.suppress(OSError, ValueError):
            if sys.stderr is not None:
                print(self.format(record), file=sys.stderr, flush=True)


def _last_resort() -> logging.Handler:
    handler = _LastResort(logging.WARNING)
    handler.setFormatter(_RankFormatter())
    return handler


logger.addHandler(_last_resort())


def configure_logging(level: str | None = None) -> None:
    """Log to stderr at `level`, or else at $INFINITY_LOG. Without both this does nothing: warnings
    go to stderr if there is no other handler.

    A second call changes the level, and adds no second handler.
    Raises: ValueError for a level that is not in `LEVELS`.
    """
    chosen = level or os.environ.get("INFINITY_LOG")
    if not chosen:
        return
    if chosen.lower() not in LEVELS:
        raise ValueError(
            f"log level {chosen!r} is not known; set INFINITY_LOG to {', '.join(LEVELS)}"
        )
    # Reuse the handler of an earlier call, so that lines are not duplicated.
    for handler in logger.handlers:
        if isinstance(handler, logging.StreamHandler) and isinstance(
            handler.formatter, _RankFormatter
        ):
            break
    else:
        handler = logging.StreamHandler()
        handler.setFormatter(_RankFormatter())
        logger.addHandler(handler)
    logger.setLevel(chosen.upper())


def now_ns() -> int:
    """Return CLOCK_MONOTONIC in nanoseconds, the clock of every span."""
    return time.clock_gettime_ns(time.CLOCK_MONOTONIC)


@dataclasses.dataclass(frozen=True)
class Span:
    """An interval from `start_ns` to `end_ns` (CLOCK_MONOTONIC) on `track`."""

    track: str
    name: str
    start_ns: int
    end_ns: int
    args: Mapping[str, Any] | None = None


@dataclasses.dataclass(frozen=True)
class NativeSpans:
    """Spans of an executor [n] (`aio.SPAN`), each with its unit and its purpose.

    units [n]: index in `names` of each span's unit; -1: none. purposes [n]: index in PURPOSES.
    """

    spans: np.ndarray[Any, Any]
    units: np.ndarray[Any, Any]
    purposes: np.ndarray[Any, Any]
    names: Sequence[str]

    def __len__(self) -> int:
        return len(self.spans)

    def part(self, chosen: Any) -> NativeSpans:
        """Return a subset. chosen: a slice, or a mask [n]."""
        return NativeSpans(
            self.spans[chosen], self.units[chosen], self.purposes[chosen], self.names
        )

    def __iter__(self) -> Iterator[Span]:
        rows = zip(self.spans, self.units.tolist(), self.purposes.tolist(), strict=True)
        for record, unit, purpose in rows:
            yield _native_span(record, self.names[unit] if unit >= 0 else "", PURPOSES[purpose])


_NO_WAIT = -1


class Timeline:
    """Collects spans and writes them as a Chrome trace.

    Memory: retains the newest `spans_max` spans of Python and as many native ones; `dropped` counts
    older ones. Spans of Python use 48 bytes each, allocated at the start, so that memory does not
    grow with the steps. Thread-safe.
    """

    def __init__(self, *, spans_max: int = 100_000) -> None:
        if spans_max < 1:
            raise ValueError(f"spans_max={spans_max} must be at least 1")
        self.spans_max = spans_max
        self.dropped = 0
        # A ring: span n is at n % spans_max. In columns, because a tuple per span would take four
        # times the memory.
        self._count = 0
        self._times = array("q", [0]) * (2 * spans_max)
        self._waited_ns = array("q", [0]) * spans_max
        self._tracks = [""] * spans_max
        self._names = [""] * spans_max
        self._args: list[Mapping[str, Any] | None] = [None] * spans_max
        self._native: deque[NativeSpans] = deque()
        self._native_count = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return min(self._count, self.spans_max) + self._native_count

    def add(
        self,
        track: str,
        name: str,
        start_ns: int,
        end_ns: int,
        args: Mapping[str, Any] | None = None,
        *,
        waited_ns: int = _NO_WAIT,
    ) -> None:
        """Record one span, in about a microsecond.

        args: stored by reference; spans of a whole run should share one mapping, or have none.
        waited_ns: time waited in the span, shown as `waited_ms` among its args.
        """
        with self._lock:
            at = self._count % self.spans_max
            self.dropped += self._count >= self.spans_max
            self._count += 1
            self._times[2 * at], self._times[2 * at + 1] = start_ns, end_ns
            self._tracks[at], self._names[at], self._args[at] = track, name, args
            self._waited_ns[at] = waited_ns

    @contextlib.contextmanager
    def span(self, track: str, name: str, **args: Any) -> Iterator[None]:
        """Record the block as a span, also if it raises."""
        start_ns = now_ns()
        try:
            yield
        finally:
            self.add(track, name, start_ns, now_ns(), args or None)

    def add_native_spans(self, spans: NativeSpans) -> None:
        """Add an executor's spans. Keeps references to the arrays."""
        if not len(spans):
            return
        with self._lock:
            self._native.append(spans)
            self._native_count += len(spans)
            while self._native_count > self.spans_max:
                oldest = self._native.popleft()
                excess = min(self._native_count - self.spans_max, len(oldest))
                if excess < len(oldest):
                    self._native.appendleft(oldest.part(slice(excess, None)))
                self._native_count -= excess
                self.dropped += excess

    def spans(self, since_ns: int = 0) -> list[Span]:
        """Return the spans that ended at `since_ns` or later, sorted by start."""
        with self._lock:
            # Copied, so that `add` does not wait while the spans are built.
            count, times = min(self._count, self.spans_max), self._times[:]
            columns = list(self._tracks), list(self._names), list(self._args)
            waited = self._waited_ns[:]
            blocks = list(self._native)
        rows = zip(*columns[:2], times[::2], times[1::2], columns[2], waited, strict=True)
        found = [
            Span(track, name, start, end, _with_wait(args, waited_ns))
            for track, name, start, end, args, waited_ns in itertools.islice(rows, count)
            if end >= since_ns
        ]
        for block in blocks:
            found.extend(block.part(block.spans["end_ns"] >= since_ns))
        return sorted(found, key=lambda span: (span.start_ns, span.end_ns))

    def clear(self) -> None:
        with self._lock:
            self._count = 0
            # Drop references to names and args.
            for column in (self._tracks, self._names):
                column[:] = [""] * self.spans_max
            self._args[:] = [None] * self.spans_max
            self._native.clear()
            self._native_count = 0
            self.dropped = 0

    def write(self, path: str | os.PathLike[str]) -> int:
        """Write a Chrome trace to `path`, atomically. Returns the number of spans written.

        Overlapping spans of one track are in different rows, since a trace's row may only have
        nested spans. Times are microseconds since the first span.
        """
        spans = self.spans()
        origin_ns = spans[0].start_ns if spans else 0
        events = list(_trace_events(spans, origin_ns))
        document = {
            "displayTimeUnit": "ms",
            "otherData": {"origin_monotonic_ns": origin_ns, "dropped_spans": self.dropped},
            "traceEvents": events,
        }
        with replaced(absolute(path, "path")) as file:
            file.write(json.dumps(document, separators=(",", ":")).encode())
        return len(spans)


def _with_wait(args: Mapping[str, Any] | None, waited_ns: int) -> Mapping[str, Any] | None:
    if waited_ns == _NO_WAIT:
        return args
    return {**(args or {}), "waited_ms": round(waited_ns / 1e6, 3)}


def _native_span(record: Any, unit: str, purpose: str) -> Span:
    track = int(record["track"])
    name = NATIVE_TRACKS[track] if 0 <= track < len(NATIVE_TRACKS) else f"track {track}"
    drive, chunk, size_bytes = int(record["drive"]), int(record["chunk"]), int(record["bytes"])
    args: dict[str, Any] = {"for": purpose, "chunk": chunk, "bytes": size_bytes}
    if drive >= 0:
        args["drive"] = drive
    return Span(
        name, unit or f"chunk {chunk}", int(record["start_ns"]), int(record["end_ns"]), args
    )


def _trace_events(spans: list[Span], origin_ns: int) -> Iterator[dict[str, Any]]:
    """Yield metadata and complete events ("X"). spans: sorted by start."""
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
            yield {
                "ph": "M",
                "pid": pid,
                "tid": tid,
                "name": "thread_name",
                "args": {"name": label},
            }
            yield {
                "ph": "M",
                "pid": pid,
                "tid": tid,
                "name": "thread_sort_index",
                "args": {"sort_index": tid},
            }


def _row(ends: list[int], span: Span) -> int:
    """Return the first row that is free at the span's start. `ends`: each row's last end; updated.
    """
    for row, end_ns in enumerate(ends):
        if end_ns <= span.start_ns:
            ends[row] = span.end_ns
            return row
    if len(ends) < 64:
        ends.append(span.end_ns)
        return len(ends) - 1
    # At most 64 rows; further overlapping spans share the last one.
    ends[-1] = max(ends[-1], span.end_ns)
    return len(ends) - 1


# -- phases of a step ------------------------------------------------------------------------------


@dataclasses.dataclass
class LoopWaits:
    """Seconds that the training loop has waited: for units in forward and backward, and for pending
    updates. Callers that wait add their time.
    """

    units_s: float = 0.0
    updates_s: float = 0.0

    @property
    def total_s(self) -> float:
        return self.units_s + self.updates_s


class Marks(NamedTuple):
    """Snapshot of an engine's counters: bytes and seconds since it was opened.

    bytes_read, bytes_written: all completed drive traffic. params_read: parameters read for
    gathers. grads_*: spilled gradients. activations_*: activations whose read or write has begun.
    drives_busy_s: mean over the drives. h2d, d2h: bytes copied to and from a GPU. h2d_s, d2h_s:
    time with such a copy in flight.
    """

    bytes_read: int = 0
    bytes_written: int = 0
    params_read: int = 0
    wait_s: float = 0.0
    drives_busy_s: float = 0.0
    grads_read: int = 0
    grads_written: int = 0
    activations_read: int = 0
    activations_written: int = 0
    h2d: int = 0
    d2h: int = 0
    h2d_s: float = 0.0
    d2h_s: float = 0.0

    @classmethod
    def of(
        cls, executor: Any, params_read: int, wait_s: float, grads: tuple[int, int] = (0, 0)
    ) -> Marks:
        """Build marks from an executor's counters (`aio.ExecutorStats`) and further ones. grads:
        (read, written).
        """
        drives = executor.drives
        return cls(
            bytes_read=sum(drive.bytes_read for drive in drives),
            bytes_written=sum(drive.bytes_written for drive in drives),
            params_read=params_read,
            wait_s=wait_s,
            drives_busy_s=sum(drive.busy_s for drive in drives) / max(len(drives), 1),
            grads_read=grads[0],
            grads_written=grads[1],
            h2d=executor.to_device_bytes,
            d2h=executor.from_device_bytes,
            h2d_s=executor.to_device_s,
            d2h_s=executor.from_device_s,
        )


@dataclasses.dataclass(frozen=True)
class PhaseFigures:
    """Totals over all occurrences of one phase: count, time and traffic.

    wait_s: the part of `seconds` in which the training thread waited for a unit or for updates.
    bytes_read, bytes_written: all completed drive traffic, including states; params_read_bytes,
    grads_*, activations_*: transfers begun of parameters for gathers, spilled gradients,
    activations. drives_busy_s: time with a request in flight, mean over the drives. h2d_bytes,
    d2h_bytes: copied to and from a GPU; h2d_s, d2h_s: time with such a copy in flight.
    """

    count: int = 0
    seconds: float = 0.0
    wait_s: float = 0.0
    bytes_read: int = 0
    bytes_written: int = 0
    params_read_bytes: int = 0
    drives_busy_s: float = 0.0
    grads_read_bytes: int = 0
    grads_written_bytes: int = 0
    activations_read_bytes: int = 0
    activations_written_bytes: int = 0
    h2d_bytes: int = 0
    d2h_bytes: int = 0
    h2d_s: float = 0.0
    d2h_s: float = 0.0

    @property
    def compute_s(self) -> float:
        """Time without waits. The slowdown by concurrent updates and reads is included."""
        return self.seconds - self.wait_s

    def __add__(self, other: PhaseFigures) -> PhaseFigures:
        return PhaseFigures(*(a + b for a, b in zip(_values(self), _values(other), strict=True)))

    def __sub__(self, other: PhaseFigures) -> PhaseFigures:
        return PhaseFigures(*(a - b for a, b in zip(_values(self), _values(other), strict=True)))

    def per(self, steps: int) -> PhaseFigures:
        """Return the means per step; counts and bytes are rounded."""
        return PhaseFigures(
            *(round(v / steps) if isinstance(v, int) else v / steps for v in _values(self))
        )


def _values(figures: PhaseFigures) -> tuple[Any, ...]:
    return tuple(getattr(figures, name) for name in PhaseFigures.__dataclass_fields__)


PHASES: Final = ("first forward", "forward", "backward", "step", "evaluation", "idle")
"""Phases of a run. "first forward": the first training forward after a step; "forward": those of
further micro-batches; "step": `opt.step()`; "idle": all other time, such as data loading, clipping,
and `flush()`.
"""


class PhaseClock:
    """Attributes time and counters of a run to phases. Not thread-safe.

    marks: reads the engine's counters; called at every change of phase (tens of microseconds).
    activations: returns (read, written) bytes of offloaded activations. `enter` begins a phase by
    name; `enter("idle")` ends it. `steady` covers the time from the end of the first step to the
    end of the last one (`steady_steps` steps): the first step also traces, and touches the pools'
    pages for the first time.
    """

    def __init__(
        self,
        timeline: Timeline,
        marks: Callable[[], Marks],
        activations: Callable[[], tuple[int, int]] | None = None,
    ) -> None:
        self._timeline = timeline
        self._marks = marks
        self._activations = activations
        self._phase = "idle"
        self._since_ns = now_ns()
        self._at = self.marks()
        self._totals = dict.fromkeys(PHASES, PhaseFigures())
        self._first: dict[str, PhaseFigures] | None = None
        self._last: dict[str, PhaseFigures] | None = None
        self._steps = 0
        self._quiet = False
        self._quiet_forward = PhaseFigures()
        self._after_step = True

    def marks(self) -> Marks:
        """Return the engine's current counters."""
        read, written = self._activations() if self._activations is not None else (0, 0)
        return self._marks()._replace(activations_read=read, activations_written=written)

    def enter(self, phase: str, *, quiet: bool = False) -> None:
        """End the current phase and begin `phase`. The first "forward" after a step becomes "first
        forward".

        quiet: no update is pending that would slow this training forward down.
        """
        if phase == "forward" and self._after_step:
            phase, self._after_step = "first forward", False
        before = self._close()
        # The next training forward is a first forward.
        if before == "step":
            self._after_step = True
            self._steps += 1
            self._last = dict(self._totals)
            self._first = self._first or self._last
        self._phase, self._quiet = phase, quiet

    def _close(self) -> str:
        """Add time and counters since the current phase began to its totals. Returns the phase."""
        end_ns, marks = now_ns(), self.marks()
        phase, at = self._phase, self._at
        passed = PhaseFigures(
            1,
            (end_ns - self._since_ns) / 1e9,
            marks.wait_s - at.wait_s,
            marks.bytes_read - at.bytes_read,
            marks.bytes_written - at.bytes_written,
            marks.params_read - at.params_read,
            marks.drives_busy_s - at.drives_busy_s,
            marks.grads_read - at.grads_read,
            marks.grads_written - at.grads_written,
            marks.activations_read - at.activations_read,
            marks.activations_written - at.activations_written,
            marks.h2d - at.h2d,
            marks.d2h - at.d2h,
            marks.h2d_s - at.h2d_s,
            marks.d2h_s - at.d2h_s,
        )
        self._totals[phase] += passed
        # Without the first step, as in `steady`.
        if self._quiet and phase in ("first forward", "forward") and self._steps:
            self._quiet_forward += passed
        if phase != "idle":
            self._timeline.add(
                "phases",
                phase,
                self._since_ns,
                end_ns,
                waited_ns=round(1e9 * passed.wait_s),
            )
        self._since_ns, self._at = end_ns, marks
        return phase

    @property
    def steady_steps(self) -> int:
        """Number of ended steps after the first one."""
        return max(self._steps - 1, 0)

    def totals(self) -> dict[str, PhaseFigures]:
        """Return the totals of all phases since construction, including the current one so far."""
        self._close()
        # `_close` has counted the current phase, which continues and will be counted at its end.
        found = dict(self._totals)
        self._totals[self._phase] -= PhaseFigures(1)
        return found

    def steady(self) -> dict[str, PhaseFigures]:
        """Return the totals from the end of the first step to the end of the last; zeros before the
        second.
        """
        if self._first is None or self._last is None:
            return dict.fromkeys(PHASES, PhaseFigures())
        return {phase: self._last[phase] - self._first[phase] for phase in PHASES}

    @property
    def quiet_forward(self) -> PhaseFigures:
        """Totals of training forwards after the first step that began without a pending update."""
        return self._quiet_forward
