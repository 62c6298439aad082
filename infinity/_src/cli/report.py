"""Report of `infinity train`: figures per step, limits and η, a table, a plot.

The report has two limits: the limit of any schedule, and that of the update mode
(infinity/_src/memory/roofline.py). Both are computed from the bytes that the steps moved and from
the bandwidths of reads and writes, which the command measures before training. Compute times are
the passes' times in the loop without waits. In the loop the update runs concurrently with the first
forward and, if the CPU computes, slows it. Counting this interference as compute would raise the
limits and flatter η, most at small batches. So one step begins with no update pending
(`StepRecord.alone`): its first forward is the compute term, and the means exclude the step. The
report shows both figures.

During a run, terminals show a progress bar; files and pipes get one line for each step.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from infinity._src.base.console import say
from infinity._src.base.progress import format_left
from infinity._src.base.sizes import format_size
from infinity._src.cli.page_style import BLUE, ORANGE
from infinity._src.engine.step_limits import micro_batches_text
from infinity._src.memory.roofline import (
    EXAMPLE_TBW,
    WEAR_LEAST_S,
    Compute,
    Drives,
    Limits,
    Moved,
    limits,
    measured_traffic,
)

# -- Figures and limits ----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class StepRecord:
    """One optimizer step. Times in seconds, sizes in bytes.

    step_s: the whole step. first_forward_s, last_backward_s, compute_s: the first forward, the last
    backward, and all passes with the transforms of matrices (Muon), without waits. io_wait_s: waits
    for units and updates during the whole step. bytes_read, bytes_written: traffic of the drives.
    params_read: the part of bytes_read that passes read as parameters. grads_*, activations_*: the
    parts of the traffic that are spilled gradients and activations. ram_bytes: memory by the
    engine's plan. rss_bytes: memory of the process. alone: no update was pending when the step
    began.
    """

    step: int
    loss: float
    lr: float
    grad_norm: float | None
    tokens: int
    step_s: float
    first_forward_s: float
    compute_s: float
    io_wait_s: float
    bytes_read: int
    bytes_written: int
    ram_bytes: int
    rss_bytes: int
    params_read: int = 0
    last_backward_s: float = 0.0
    alone: bool = False
    grads_read: int = 0
    grads_written: int = 0
    activations_read: int = 0
    activations_written: int = 0

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> StepRecord:
        """Make the record of a row of metrics.jsonl; further figures of the row are ignored."""
        return cls(**{name: row[name] for name in cls.__dataclass_fields__ if name in row})

    def as_dict(self) -> dict[str, Any]:
        record = dataclasses.asdict(self)
        record["tokens_per_s"] = self.tokens / self.step_s if self.step_s else 0.0
        return record


@dataclasses.dataclass(frozen=True)
class Steady:
    """Means over all steps but the first, which is slower, since it traces and fills pools.

    steps: number of steps in the means. alone_s: mean first forward of the steps that began with no
    update pending, which the other means exclude; None without such a step.
    """

    steps: int
    step_s: float
    first_forward_s: float
    compute_s: float
    io_wait_s: float
    bytes_read: float
    bytes_written: float
    tokens_per_s: float
    params_read: float = 0.0
    last_backward_s: float = 0.0
    alone_s: float | None = None
    grads: Moved = dataclasses.field(default_factory=Moved)
    activations: Moved = dataclasses.field(default_factory=Moved)


def steady(records: Sequence[StepRecord]) -> Steady:
    """Compute means over `records` without the first; a single record is used. Raises: ValueError
    without records.
    """
    if not records:
        raise ValueError("no step was taken")
    later = records[1:] or records
    # Without the first step, even if there is no other: it traces and fills pools.
    alone = [record.first_forward_s for record in records[1:] if record.alone]
    # A step that began with no update pending ran no update, and would make the means too small.
    used = [record for record in later if not record.alone] or later
    total_s = sum(record.step_s for record in used)

    means = {
        name: statistics.fmean(getattr(record, name) for record in used)
        for name in StepRecord.__dataclass_fields__
        # Not every step has a norm.
        if name != "grad_norm"
    }
    return Steady(
        steps=len(used),
        # Total tokens over total time: a mean of the steps' rates would overweight short steps.
        tokens_per_s=sum(record.tokens for record in used) / total_s if total_s else 0.0,
        alone_s=statistics.fmean(alone) if alone else None,
        grads=Moved(means["grads_read"], means["grads_written"]),
        activations=Moved(means["activations_read"], means["activations_written"]),
        **{name: means[name] for name in Steady.__dataclass_fields__ if name in means},
    )


def step_limits(
    mean: Steady,
    drives: Drives,
    passes: int,
    *,
    update: str = "deferred",
    alone: bool = True,
    frozen_bytes: float = 0.0,
) -> Limits:
    """Compute the limits of a step from the bytes that the steps moved on average.

    drives: measured bandwidths, bytes per second. passes: forwards of the model in a step. update:
    `Policy.update`. alone: use the first forward of a step that began with no update pending, if
    there is such a step. frozen_bytes: bytes on the drives of parameters that no optimizer holds.
    """
    moved = measured_traffic(
        Moved(mean.bytes_read, mean.bytes_written),
        mean.params_read,
        update,
        passes,
        grads=mean.grads,
        activations=mean.activations,
        frozen=frozen_bytes,
    )
    first_s = mean.alone_s if alone and mean.alone_s is not None else mean.first_forward_s
    # compute_s of the loop contains the loop's first forward, which may not be `first_s`.
    between_s = max(mean.compute_s - mean.first_forward_s - mean.last_backward_s, 0.0)
    compute = Compute(first_s, mean.last_backward_s, between_s)
    return limits(moved, compute, drives, update)


@dataclasses.dataclass(frozen=True)
class Summary:
    """Figures of a finished run.

    params: number of parameters. micro_batches: number of micro-batches of a step. passes: forwards
    of the model in a step, which micro-batches may share. held_out: loss before and after training.
    limits: computed with the first forward of a step that began with no update pending;
    limits_loop: computed with the loop's first forward, which flatters η; None if unknown. drives:
    measured bandwidths in GB/s; None if nothing rests on NVMe. engine: `Stats.as_dict()`. texts:
    the prompt's continuation before and after. update: `Policy.update`. state_bytes: parameters and
    optimizer states at rest.
    """

    params: int
    micro_batches: int
    passes: int
    held_out: tuple[float, float]
    mean: Steady
    limits: Limits | None
    limits_loop: Limits | None
    drives: Mapping[str, float] | None
    engine: Mapping[str, Any]
    peak_rss_loading_bytes: int
    peak_rss_training_bytes: int
    texts: tuple[str, str] | None
    update: str = "deferred"
    state_bytes: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        record = dataclasses.asdict(self)
        # Per parameter, as in the table of `memory.roofline`, so that models can be compared.
        record["read_bytes_per_param"] = self.mean.bytes_read / self.params
        record["written_bytes_per_param"] = self.mean.bytes_written / self.params
        if self.limits is not None:
            record["eta_floor"], record[f"eta_{self.update}"] = self.limits.eta(self.mean.step_s)
        if self.limits_loop is not None:
            record["eta_floor_loop"], record[f"eta_{self.update}_loop"] = self.limits_loop.eta(
                self.mean.step_s
            )
        return record


def show_summary(console: Console, summary: Summary) -> None:
    """Print the table, and the continuation of the prompt before and after training."""
    mean, engine = summary.mean, summary.engine
    table = Table(title="What the run did", title_justify="left", show_header=False)
    table.add_column("", style="bold")
    table.add_column("", overflow="fold")
    before, after = summary.held_out
    table.add_row("held-out loss", f"{before:.4f} before, {after:.4f} after")
    table.add_row(
        "time per step",
        f"{mean.step_s:.2f} s, {mean.tokens_per_s:.0f} tokens/s (mean of {mean.steps} steps)",
    )
    if summary.micro_batches > 1:
        text = micro_batches_text(summary.micro_batches, summary.passes)
        table.add_row("each step", text)
    table.add_row(
        "waiting on I/O",
        f"{mean.io_wait_s:.2f} s of each step ({_share(mean.io_wait_s, mean.step_s)})",
    )
    table.add_row(
        "NVMe traffic per step",
        f"{mean.bytes_read / summary.params:.1f} B read, {mean.bytes_written / summary.params:.1f} "
        f"B written per parameter ({format_size(mean.bytes_read)}, "
        f"{format_size(mean.bytes_written)})",
    )
    if summary.drives is not None and summary.limits is not None:
        table.add_row(
            "drive, measured before",
            drives_text(summary.drives),
        )
        for label, text in limit_rows(summary):
            table.add_row(label, text)
    table.add_row(
        "parameters",
        f"{summary.params / 1e6:.1f} M; states {format_size(summary.state_bytes)} at rest",
    )
    table.add_row(
        "memory for offloading",
        f"{format_size(engine['ram_bytes'])} by plan (--ram); {format_size(engine['nvme_bytes'])} "
        f"of states on NVMe; at most {format_size(engine['gathered_bytes_peak'])} gathered at once",
    )
    table.add_row(
        "peak RSS",
        f"{format_size(summary.peak_rss_training_bytes)} in training (the whole process, with "
        f"torch and activations), {format_size(summary.peak_rss_loading_bytes)} before",
    )
    table.add_row("I/O backend", str(engine["backend"]))
    for label, text in drive_rows(mean, engine):
        table.add_row(label, text)
    console.print(table)
    # A model may generate brackets, which rich would interpret as markup.
    if summary.texts is not None:
        console.print("[bold]before:[/bold]", end=" ")
        console.print(summary.texts[0], markup=False, highlight=False)
        console.print("[bold]after:[/bold] ", end=" ")
        console.print(summary.texts[1], markup=False, highlight=False)


def drives_text(drives: Mapping[str, float]) -> str:
    """Format measured bandwidths, in GB/s."""
    return "read {read_gbps:.1f}, write {write_gbps:.1f}, mixed {mixed_gbps:.1f} GB/s".format(
        **drives
    )


def limit_rows(summary: Summary) -> list[tuple[str, str]]:
    """Format rows (label, text): the limits, η, and the compute that the limits contain."""
    limit, mean = summary.limits, summary.mean
    if limit is None:
        return []
    floor, schedule = limit.eta(mean.step_s)
    terms = f"compute {limit.compute_s:.2f} s, drives {limit.io_s:.2f} s"
    rows = [
        ("limit of any schedule", f"{limit.floor_s:.2f} s per step ({terms}): η = {floor:.2f}"),
        (
            f"limit of update {summary.update}",
            f"{limit.schedule_s:.2f} s per step: η = {schedule:.2f}",
        ),
    ]
    if mean.alone_s is None or summary.limits_loop is None:
        text = (
            "measured in the loop, without waits: concurrent updates slow compute, which raises "
            "the limits and flatters η"
        )
        return [*rows, ("compute in the limits", text)]
    loop = summary.limits_loop.eta(mean.step_s)
    text = (
        f"first forward {mean.alone_s:.2f} s, of a step that began with no update pending; with "
        f"concurrent updates it took {mean.first_forward_s:.2f} s, which would give η = "
        f"{loop[0]:.2f} and {loop[1]:.2f}"
    )
    return [*rows, ("compute in the limits", text)]


def drive_rows(mean: Steady, engine: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Format rows (label, text) about the drives: latencies, faults, endurance."""
    rows = []
    for drive in engine.get("drives", ()):
        times = [
            f"{1e3 * drive[name]:.1f}"
            for name in ("read_p50_s", "read_p99_s", "write_p50_s", "write_p99_s")
        ]
        text = "p50 / p99 of requests: read {} / {} ms, write {} / {} ms".format(*times)
        text += f"; {drive['depth_mean']:.0f} in flight"
        # These texts are empty if the drive is well; `filter` drops empty texts.
        wrong = (drive["failed"], drive["direct_reason"], drive["slow"])
        rows.append((f"drive {drive['path']}", "; ".join([text, *filter(None, wrong)])))
    if not rows or not mean.step_s:
        return rows
    written = format_size(mean.bytes_written)
    if mean.steps * mean.step_s < WEAR_LEAST_S:
        text = (
            f"{written} written per step; the steps took less than {format_left(WEAR_LEAST_S)}, "
            "too short to extrapolate how long the drives last"
        )
        return [*rows, ("endurance", text)]
    # Drives are rated in decimal terabytes.
    tb_per_day = mean.bytes_written / mean.step_s * 86_400 / 1e12
    text = f"{written} written per step: {tb_per_day:.3g} TB per day at this rate"
    # The drive with the most writes wears out first. The engine does not know the drives' ratings:
    # show an example.
    most = max(drive["bytes_written"] for drive in engine["drives"])
    every = sum(drive["bytes_written"] for drive in engine["drives"])
    if tb_per_day and every:
        days = EXAMPLE_TBW / (tb_per_day * most / every)
        digits = 1 if days < 10 else 0
        text += f" (a drive rated for {EXAMPLE_TBW} TBW would last {days:,.{digits}f} days)"
    return [*rows, ("endurance", text)]


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.0%}" if whole else "-"


def plot_loss(
    records: Sequence[StepRecord], held_out: Sequence[tuple[int, float]], path: Path
) -> bool:
    """Draw training and held-out loss over steps; False when matplotlib is not installed."""
    try:
        # Imported here, since matplotlib is optional. pyplot is avoided: it would look for a
        # display.
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(
        [record.step for record in records],
        [record.loss for record in records],
        label="training",
        color=BLUE,
        alpha=0.7,
    )
    axes.plot(
        [step for step, _ in held_out],
        [loss for _, loss in held_out],
        "o-",
        label="held out",
        color=ORANGE,
        linewidth=2,
    )
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    return True


# -- Progress --------------------------------------------------------------------------------------


class StepDisplay(Protocol):
    """Display of finished steps."""

    def show(self, record: StepRecord, moved: Moved) -> None:
        """Show a finished step. moved: bytes of the drives since the process began."""

    def say(self, text: str) -> None:
        """Print a line among the steps."""


@contextmanager
def step_display(console: Console, steps: int) -> Iterator[StepDisplay]:
    """Yield a display for `steps` steps: a progress bar on a terminal, else lines."""
    if not console.is_terminal:
        # A file or pipe would get the control sequences of a bar.
        yield _Lines(console, steps)
        return
    columns = (
        TextColumn("training"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TextColumn("{task.fields[figures]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        yield _Bar(progress, progress.add_task("training", total=steps, figures=""))


def describe_step(record: StepRecord, moved: Moved) -> str:
    """Format loss, tokens/s, traffic and memory of a step in one line. moved: bytes of the drives
    since the process began.
    """
    # Divide by inf instead of 0 if the clock did not advance: the rates become 0.
    seconds = record.step_s or float("inf")
    parts = [f"loss {record.loss:.4f}", f"{record.tokens / seconds:.0f} tok/s"]
    if moved.read or moved.written:
        rate = (record.bytes_read + record.bytes_written) / seconds / 1e9
        read, written = format_size(moved.read), format_size(moved.written)
        parts.append(f"drive {rate:.2f} GB/s ({read} read, {written} written so far)")
    parts.append(f"RSS {format_size(record.rss_bytes)}")
    return "  ".join(parts)


class _Bar:
    def __init__(self, progress: Progress, task: TaskID) -> None:
        self._progress = progress
        self._task = task

    def show(self, record: StepRecord, moved: Moved) -> None:
        figures = describe_step(record, moved)
        self._progress.update(self._task, completed=record.step, figures=figures)

    def say(self, text: str) -> None:
        # The console of the bar prints above the bar.
        say(self._progress.console, text)


class _Lines:
    def __init__(self, console: Console, steps: int) -> None:
        self._console = console
        self._steps = steps

    def show(self, record: StepRecord, moved: Moved) -> None:
        figures = describe_step(record, moved)
        self.say(f"step {record.step}/{self._steps}  {record.step_s:.2f} s  {figures}")

    def say(self, text: str) -> None:
        say(self._console, text)
