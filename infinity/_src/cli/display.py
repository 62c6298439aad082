"""The progress of a run: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from infinity._src.cli.report import StepRecord
from infinity._src.sizes import format_size


class StepDisplay(Protocol):
    """Shows steps as they end."""

    def show(self, record: StepRecord) -> None:
        """One step is done."""

    def say(self, text: str) -> None:
        """A line beside the steps."""


@contextmanager
def step_display(console: Console, steps: int) -> Iterator[StepDisplay]:
    """A display for `steps` steps that fits where `console` writes."""
    if not console.is_terminal:
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


def describe_step(record: StepRecord) -> str:
    """Loss, tokens/s, traffic and memory of a step, in one line."""
    moved = record.bytes_read + record.bytes_written
    seconds = record.step_s or float("inf")
    parts = [f"loss {record.loss:.4f}", f"{record.tokens / seconds:.0f} tok/s"]
    if moved:
        parts.append(f"drive {moved / seconds / 1e9:.2f} GB/s")
    parts.append(f"RSS {format_size(record.rss_bytes)}")
    return "  ".join(parts)


class _Bar:
    def __init__(self, progress: Progress, task: TaskID) -> None:
        self._progress = progress
        self._task = task

    def show(self, record: StepRecord) -> None:
        self._progress.update(self._task, completed=record.step, figures=describe_step(record))

    def say(self, text: str) -> None:
        self._progress.console.print(text, highlight=False, soft_wrap=True)


class _Lines:
    def __init__(self, console: Console, steps: int) -> None:
        self._console = console
        self._steps = steps

    def show(self, record: StepRecord) -> None:
        self.say(f"step {record.step}/{self._steps}  {describe_step(record)}  {record.step_s:.2f} s")

    def say(self, text: str) -> None:
        self._console.print(text, highlight=False, soft_wrap=True)
