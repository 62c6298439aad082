"""Log of a training run for `infinity report`: a line for each step, and the timeline of one step.

    with inf.StepLog(model, "out/run") as log:
        for batch in loader:
            loss = ...                        # forward, backward, opt.step(), zero_grad()
            log.step(loss.item())

`StepMeter` takes the differences of the engine's counters between the ends of two steps. `infinity
train` uses a meter, too, and writes its lines itself.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil
import torch

from infinity._src.base.metrics_file import FILE_NAME, SCHEMA, MetricsFile
from infinity._src.base.paths import absolute, check_link
from infinity._src.base.step_timeline import FILE_NAME as TIMELINE_NAME
from infinity._src.base.step_timeline import StepTimeline
from infinity._src.base.telemetry import PhaseFigures, now_ns
from infinity._src.base.version import __version__
from infinity._src.engine.engine_stats import DriveFigures, Stats
from infinity._src.engine.handle import Handle, handle
from infinity._src.engine.step_limits import known_bandwidths

OWN_FIGURES = frozenset({
    "kind", "step", "loss", "step_s", "compute_s", "io_wait_s", "update_wait_s", "update_s",
    "bytes_read", "bytes_written", "ram_bytes", "rss_bytes", "drives", "memory",
})  # fmt: skip
"""Fields of a step's line that the log fills."""

_PASSES = ("first forward", "forward", "backward")


class StepMeter:
    """Meter of one engine's steps. timeline: file for the timeline of a step; None writes none.

    The meter writes the timeline of the second step, the fourth, the eighth and so on, and each
    replaces the one before. So a run of any length has the timeline of a recent step that is not
    the first, at negligible cost.
    """

    def __init__(self, engine: Handle, timeline: Path | None, now: Stats) -> None:
        self._engine = engine
        self._path = timeline
        self._count = 0
        self.begin(now)

    def begin(self, now: Stats) -> None:
        """Begin a step at these statistics. Counts since the end of the last step, for example of
        an evaluation, are left out.
        """
        if self._draws(self._count + 1):
            # The native threads retain only the newest spans: empty their buffers for this step.
            self._engine.take_spans()
        self._last = now
        self._dropped = self._spans_dropped()
        self._start_ns = now_ns()

    def end(self, now: Stats, *, step: int) -> dict[str, Any]:
        """End a step, and begin the next. Returns the step's figures, as metrics.jsonl has them.

        now: statistics at the end of the step. The caller collects them, so that its own figures
        can use the same ones: writes continue between two collections. step: the step's number, for
        the timeline.
        Times in seconds, sizes in bytes. compute_s: forward and backward without waits. io_wait_s:
        waits for units and for updates (update_wait_s), in any phase. update_s: `opt.step()`
        without waits. ram_bytes, rss_bytes, `memory` and the drives' written_tb_per_day are values
        of this moment; everything else belongs to the step.
        """
        end_ns = now_ns()
        figures = step_figures(self._last, now, (end_ns - self._start_ns) / 1e9)
        self._count += 1
        if self._draws(self._count):
            self._draw(step, end_ns)
        if self._draws(self._count + 1):
            self._engine.take_spans()
        self._last, self._dropped, self._start_ns = now, self._spans_dropped(), now_ns()
        return figures

    def _draws(self, count: int) -> bool:
        # Powers of two. Not 1: the first step records the order of units, and touches pages of the
        # pools for the first time.
        return self._path is not None and count > 1 and count & (count - 1) == 0

    def _draw(self, step: int, end_ns: int) -> None:
        assert self._path is not None
        self._engine.take_spans()
        StepTimeline.of(
            self._engine.timeline.spans(self._start_ns),
            (self._start_ns, end_ns),
            step=step,
            units=[unit.name for unit in self._engine.units],
            dropped=self._spans_dropped() - self._dropped,
        ).write(self._path)

    def _spans_dropped(self) -> int:
        return self._engine.parts.tiers.executor.stats().spans_dropped


def step_figures(last: Stats, now: Stats, seconds: float) -> dict[str, Any]:
    """Compute the figures of a step that took `seconds`, from the statistics before and after it.
    """
    passed = {name: now.phases[name] - last.phases[name] for name in now.phases}
    passes = sum((passed[name] for name in _PASSES), PhaseFigures())
    update_wait_s = now.update_wait_s - last.update_wait_s
    return {
        "step_s": seconds,
        "compute_s": passes.compute_s,
        "io_wait_s": now.io_wait_s - last.io_wait_s + update_wait_s,
        "update_wait_s": update_wait_s,
        "update_s": passed["step"].compute_s,
        "bytes_read": now.bytes_read - last.bytes_read,
        "bytes_written": now.bytes_written - last.bytes_written,
        "ram_bytes": now.ram_bytes,
        "rss_bytes": psutil.Process().memory_info().rss,
        "drives": [
            _drive_figures(before, after)
            for before, after in zip(last.drives, now.drives, strict=True)
        ],
        "memory": {
            "device": {
                "gathered units, at most": now.gathered_bytes_peak,
                "fresh gradients, at most": now.fresh_grad_bytes_peak,
            },
            "ram": now.ram_parts,
            "nvme": {"states": now.nvme_bytes},
            "ram_budget_bytes": now.ram_budget_bytes,
        },
    }


def _drive_figures(before: DriveFigures, after: DriveFigures) -> dict[str, Any]:
    return {
        "path": after.path,
        "bytes_read": after.bytes_read - before.bytes_read,
        "bytes_written": after.bytes_written - before.bytes_written,
        "busy_s": after.busy_s - before.busy_s,
        "written_tb_per_day": after.written_tb_per_day,
    }


class StepLog(AbstractContextManager["StepLog"]):
    """Log of a run in `directory`; `infinity report` makes a page from it. metrics.jsonl has a
    line for each step; timeline.json shows one step unit by unit, the newest of the second, the
    fourth, the eighth and so on.

    model: offloaded, with its optimizer. after: the step after which the run resumes, as
    `inf.restore` returns it: lines of later steps are dropped. 0 starts a new log, and replaces an
    existing one. Lines are flushed one by one. Of several ranks only rank 0 writes, with its
    figures. One thread uses the log at a time.

    Raises: ValueError for a model that is not offloaded, or after < 0; OSError for the directory.
    """

    def __init__(
        self, model: torch.nn.Module, directory: str | os.PathLike[str], *, after: int = 0
    ) -> None:
        if after < 0:
            raise ValueError(f"after={after}: give the number of a step, or 0 to begin anew")
        engine, place = handle(model), absolute(directory, "directory")
        path = None
        if engine.rank == 0:
            path = place / FILE_NAME
            check_link(place)
            path.parent.mkdir(parents=True, exist_ok=True)
        self._step = after
        self._file = MetricsFile(path, keeps=after > 0)
        if after:
            self._file.cut(after)
        self._file.add("run", _about(engine, after))
        self._engine = engine
        timeline = path.with_name(TIMELINE_NAME) if path else None
        self._meter = StepMeter(engine, timeline, engine.stats())

    def step(self, loss: float, **figures: float | None) -> None:
        """Record the step that has ended: everything since the last call, or since `skip`.

        loss: of the step, as the loop computes it. figures: further figures of the step, such as
        lr, grad_norm and tokens. Takes some hundred microseconds, and up to a second for a step
        whose timeline is written. Raises: ValueError for a figure with a name in `OWN_FIGURES`;
        OSError.
        """
        taken = OWN_FIGURES & figures.keys()
        # Checked first: a call that raises ValueError does not end the step.
        if taken:
            raise ValueError(f"the log has {', '.join(sorted(taken))} already: give another name")
        self._step += 1
        ended = self._meter.end(self._engine.stats(), step=self._step)
        own = {"step": self._step, "loss": loss, **ended}
        assert own.keys() < OWN_FIGURES, own.keys() - OWN_FIGURES
        self._file.add("step", own | figures)

    def skip(self) -> None:
        """Leave out everything since the last step, such as an evaluation."""
        self._meter.begin(self._engine.stats())

    def close(self) -> None:
        """Close the file. The model stays open."""
        self._file.close()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _about(engine: Handle, after: int) -> dict[str, Any]:
    """Describe the run. Bandwidths are those of `Policy(io=...)`; nothing is measured."""
    policy, stats = engine.policy, engine.stats()
    known = known_bandwidths([drive.path for drive in stats.drives], policy.io_settings.bandwidths)
    return {
        "schema": SCHEMA,
        "version": __version__,
        "torch": torch.__version__,
        "params": stats.params,
        "ranks": engine.comm.world,
        "goes_on_after": after,
        "options": {
            name: str(getattr(policy, name)) for name in ("update", "state", "generations", "ram")
        },
        "bandwidth": {
            "read_gbps": known.drives.read_bytes_per_s / 1e9,
            "write_gbps": known.drives.write_bytes_per_s / 1e9,
            "source": known.source,
        }
        if known is not None
        else None,
    }
