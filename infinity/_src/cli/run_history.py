"""Histories of training runs, read from their directories for `infinity report`.

    runs_of(directory)    directories with a metrics.jsonl: `directory` and its subdirectories
    read_run(directory)   the figures of a run's page: means of steps, newest figures, a timeline

`read_run` reads metrics.jsonl once, line by line. At most `POINTS_MAX` points represent the steps
of a run of any length. Each point is a mean over the same number of steps, a power of two; the last
point may have fewer steps.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from infinity._src.base.metrics_file import FILE_NAME, SCHEMA, TORN, read_rows
from infinity._src.base.step_timeline import FILE_NAME as TIMELINE_NAME
from infinity._src.base.step_timeline import StepTimeline

POINTS_MAX: Final = 400
RUNS_MAX: Final = 8
DRIVES_MAX: Final = 64
_PARTS_MAX = 64

TIMES: Final = ("step_s", "compute_s", "io_wait_s", "update_s")
BYTES: Final = ("bytes_read", "bytes_written", "rss_bytes", "ram_bytes")
OTHERS: Final = ("lr", "tokens")


@dataclasses.dataclass
class Point:
    """Means over the steps from `first` to `last`. means: each figure's mean over the steps that
    have the figure; counts: the number of these steps. low, high: least and largest loss. odd:
    number of steps whose loss is NaN or infinite; the mean of the loss excludes them.
    """

    first: int
    last: int
    steps: int
    means: dict[str, float]
    counts: dict[str, int]
    low: float = math.inf
    high: float = -math.inf
    odd: int = 0

    @property
    def at(self) -> float:
        return (self.first + self.last) / 2

    def get(self, name: str) -> float | None:
        """Return the mean of a figure; None if no step has it."""
        return self.means.get(name)

    def join(self, later: Point) -> None:
        """Merge the next point into this point."""
        for name, mean in later.means.items():
            count, more = self.counts.get(name, 0), later.counts[name]
            before = self.means.get(name, 0.0)
            # Weighted means, since the sum of two huge losses would be infinite.
            self.means[name] = before + (mean - before) * (more / (count + more))
            self.counts[name] = count + more
        self.last, self.steps = later.last, self.steps + later.steps
        self.low, self.high = min(self.low, later.low), max(self.high, later.high)
        self.odd += later.odd


class Series:
    """Steps of a run as at most `POINTS_MAX` points. `add` takes constant time on average."""

    def __init__(self) -> None:
        self.points: list[Point] = []
        self.steps_each = 1

    def add(self, step: int, figures: Mapping[str, float], *, odd: bool = False) -> None:
        """Append a step. odd: the step's loss is not finite, and `figures` lacks it."""
        loss = figures.get("loss", math.nan)
        point = Point(step, step, 1, dict(figures), dict.fromkeys(figures, 1), odd=int(odd))
        if not math.isnan(loss):
            point.low = point.high = loss
        if self.points and self.points[-1].steps < self.steps_each:
            self.points[-1].join(point)
            return
        if len(self.points) == POINTS_MAX:
            self._halve()
        self.points.append(point)

    def _halve(self) -> None:
        """Merge points in pairs, so that each point represents twice as many steps."""
        for point, later in zip(self.points[::2], self.points[1::2], strict=True):
            point.join(later)
        del self.points[1::2]
        self.steps_each *= 2


@dataclasses.dataclass
class DriveHistory:
    """One drive of a run. written_bytes: bytes written in all steps. steps, seconds: number and
    time of the steps in which the run used this drive.
    """

    path: str
    written_bytes: float = 0.0
    steps: int = 0
    seconds: float = 0.0


@dataclasses.dataclass
class RunHistory:
    """One run. about: the run's newest line of the kind "run". resumed: steps after which further
    processes resumed. memory: bytes of the newest step, by tier and part. budget_bytes: budget of
    RAM; None: unknown. bandwidth: measured GB/s of all drives together, by "read", "write",
    "mixed"; empty if not measured. summary: the line of the kind "summary". notes: remarks for the
    page. earlier_s: time of earlier processes until their last records. process_s: time of the
    newest process until its last record.
    """

    name: str
    about: dict[str, Any] = dataclasses.field(default_factory=dict)
    resumed: list[int] = dataclasses.field(default_factory=list)
    series: Series = dataclasses.field(default_factory=Series)
    held_out: Series = dataclasses.field(default_factory=Series)
    drives: dict[str, DriveHistory] = dataclasses.field(default_factory=dict)
    memory: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)
    budget_bytes: float | None = None
    bandwidth: dict[str, float] = dataclasses.field(default_factory=dict)
    bandwidth_source: str = ""
    summary: dict[str, Any] = dataclasses.field(default_factory=dict)
    timeline: StepTimeline | None = None
    notes: list[str] = dataclasses.field(default_factory=list)
    earlier_s: float = 0.0
    process_s: float = 0.0

    @property
    def elapsed_s(self) -> float:
        """Time of all processes of the run, from their starts; 0 if the run did not record it."""
        return self.earlier_s + self.process_s

    def total(self, name: str) -> float:
        """Return the sum of a figure over all steps."""
        points = self.series.points
        return sum(point.means.get(name, 0.0) * point.counts.get(name, 0) for point in points)

    @property
    def last_step(self) -> int:
        """Number of the newest step; 0 before the first step."""
        return self.series.points[-1].last if self.series.points else 0

    @property
    def steps(self) -> int:
        return sum(point.steps for point in self.series.points)

    def mean(self, name: str) -> float | None:
        """Return the mean of a figure over all points but the first, whose first step traces and
        fills pools; of the first point if the run has no other. None if no step has the figure.
        """
        points = self.series.points[1:] or self.series.points
        known = [(point.means[name], point.counts[name]) for point in points if name in point.means]
        total = sum(count for _, count in known)
        return sum(mean * (count / total) for mean, count in known) if total else None


def runs_of(directory: Path, *, wanted: bool = True) -> list[Path]:
    """Return the directories of runs: `directory` and its direct subdirectories, sorted by name.
    Raises: ValueError if there is no run (only if `wanted`), or more than `RUNS_MAX`; OSError.
    """
    if not directory.is_dir():
        raise ValueError(f"{directory} is not a directory: give the --out of infinity train")
    inside = sorted(each for each in directory.iterdir() if (each / FILE_NAME).is_file())
    found = [*([directory] if (directory / FILE_NAME).is_file() else []), *inside]
    if wanted and not found:
        raise ValueError(
            f"neither {directory} nor a directory in it has a {FILE_NAME}: give the --out of "
            "infinity train, or the directory of an inf.StepLog"
        )
    if len(found) > RUNS_MAX:
        raise ValueError(
            f"{directory} has {len(found)} runs, and a page shows at most {RUNS_MAX}: give the "
            "directory of one run"
        )
    return found


def read_run(directory: Path) -> RunHistory:
    """Read one run. Raises: ValueError for a line or file that infinity did not write; OSError."""
    run = RunHistory(directory.resolve().name)
    path = directory / FILE_NAME
    for number, row in read_rows(path):
        _Line(path, number, row).take_into(run)
    if not run.series.points:
        run.notes.append("no step was recorded yet")
    if (directory / TIMELINE_NAME).is_file():
        run.timeline = StepTimeline.read(directory / TIMELINE_NAME)
    return run


class _Line:
    """One line of a metrics.jsonl, whose fields are checked as they are read."""

    def __init__(self, path: Path, number: int, row: Mapping[str, Any]) -> None:
        self._place = f"{path}, line {number}"
        self._row = row

    def take_into(self, run: RunHistory) -> None:
        """Add the line to the run. Lines of unknown kinds are ignored."""
        kind = self._row["kind"]
        if kind == "run":
            self._take_run(run)
        elif kind == "step":
            self._take_step(run)
        elif kind == "held_out":
            loss = self._number(self._row, "loss", finite=False)
            step = self._whole("step")
            if loss is not None and math.isfinite(loss):
                run.held_out.add(step, {"loss": loss})
        elif kind == "summary":
            run.summary = dict(self._row)
            run.process_s = self._number(self._row, "elapsed_s") or run.process_s
        elif kind == TORN:
            run.notes.append("the last line is incomplete, as after a kill, and is left out")

    def _take_run(self, run: RunHistory) -> None:
        schema = self._row.get("schema")
        if schema != SCHEMA:
            raise ValueError(
                f"{self._place}: the schema is {schema!r:.60}, and this release reads {SCHEMA!r}: "
                "make the page with the release that recorded the run"
            )
        run.about = dict(self._row)
        run.earlier_s, run.process_s = run.elapsed_s, 0.0
        after = self._number(self._row, "goes_on_after") or 0
        if after:
            run.resumed.append(int(after))
        # Each process measures bandwidths, since the drives may have changed.
        run.bandwidth, run.bandwidth_source = {}, ""
        given = self._row.get("bandwidth")
        if isinstance(given, Mapping):
            rates = {name: given.get(f"{name}_gbps") for name in ("read", "write", "mixed")}
            run.bandwidth = {
                name: float(rate)
                for name, rate in rates.items()
                if isinstance(rate, (int, float)) and math.isfinite(rate) and rate > 0
            }
            run.bandwidth_source = str(given.get("source", "measured before the run"))

    def _take_step(self, run: RunHistory) -> None:
        step = self._whole("step")
        if run.series.points and step <= run.last_step:
            raise ValueError(
                f"{self._place}: step {step} follows step {run.last_step}, so the file mixes two "
                "runs; remove the lines of one of them"
            )
        loss = self._number(self._row, "loss", finite=False)
        if loss is None:
            raise ValueError(f"{self._place}: the step has no loss; remove the line")
        values = {name: self._number(self._row, name) for name in (*TIMES, *BYTES, *OTHERS)}
        # The curve of norms leaves out norms that are not finite.
        norm = self._number(self._row, "grad_norm", finite=False)
        values["grad_norm"] = norm if norm is not None and math.isfinite(norm) else None
        figures = {name: value for name, value in values.items() if value is not None}
        if "step_s" not in figures:
            raise ValueError(f"{self._place}: the step has no step_s; remove the line")
        odd = not math.isfinite(loss)
        if not odd:
            figures["loss"] = loss
        for drive in self._list("drives", DRIVES_MAX):
            self._take_drive(run, drive, figures)
        if isinstance(self._row.get("memory"), Mapping):
            self._take_memory(run, self._row["memory"])
        run.series.add(step, figures, odd=odd)
        run.process_s = self._number(self._row, "elapsed_s") or 0.0

    def _take_drive(self, run: RunHistory, drive: Any, figures: dict[str, float]) -> None:
        if not isinstance(drive, Mapping) or not isinstance(drive.get("path"), str):
            raise ValueError(f"{self._place}: a drive has no path; remove the line")
        known = run.drives.setdefault(drive["path"], DriveHistory(drive["path"]))
        if len(run.drives) > DRIVES_MAX:
            raise ValueError(f"{self._place}: more than {DRIVES_MAX} drives; remove the line")
        written = self._number(drive, "bytes_written") or 0.0
        known.written_bytes += written
        known.steps += 1
        known.seconds += figures["step_s"]
        figures[f"moved {known.path}"] = written + (self._number(drive, "bytes_read") or 0.0)
        figures[f"written {known.path}"] = known.written_bytes

    def _take_memory(self, run: RunHistory, memory: Mapping[str, Any]) -> None:
        run.memory = {}
        for tier in ("device", "ram", "nvme"):
            parts = memory.get(tier)
            if not isinstance(parts, Mapping) or len(parts) > _PARTS_MAX:
                raise ValueError(f"{self._place}: memory has no {tier}; remove the line")
            run.memory[tier] = {str(name): self._number(parts, name) or 0.0 for name in parts}
        run.budget_bytes = self._number(memory, "ram_budget_bytes")

    def _list(self, name: str, most: int) -> list[Any]:
        given = self._row.get(name, [])
        if not isinstance(given, list) or len(given) > most:
            raise ValueError(
                f"{self._place}: {name} is not a list of at most {most}; remove the line"
            )
        return given

    def _whole(self, name: str) -> int:
        value = self._row.get(name)
        if type(value) is not int or not 0 <= value < 1 << 53:
            raise ValueError(
                f"{self._place}: {name} is {value!r:.60}, not a step's number; remove the line"
            )
        return value

    def _number(self, holder: Mapping[str, Any], name: str, *, finite: bool = True) -> float | None:
        """Return a field as a float; None if the field is missing or null. finite: the field is a
        size or time; negative values become 0, since a difference of two clocks may be slightly
        negative. Raises: ValueError for anything but a number; if `finite`, for NaN and infinity.
        """
        value = holder.get(name)
        if value is None:
            return None
        # bool is an int to Python.
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            try:
                found = float(value)
            except OverflowError:  # an integer of hundreds of digits
                found = math.inf
            if not finite:
                return found
            if math.isfinite(found):
                return max(found, 0.0)
        what = "size or time" if finite else "number"
        raise ValueError(f"{self._place}: {name} is {value!r:.60}, not a {what}; remove the line")
