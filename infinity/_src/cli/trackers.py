"""Trackers of `infinity train --report-to`, which get the figures of metrics.jsonl, too.

    csv            metrics.csv, a row for each step, written when the run ends or is stopped
    tensorboard    tensorboard/, by torch's SummaryWriter
    wandb          wandb/, a run of Weights & Biases; offline unless WANDB_MODE is set

A resumed run continues the files of all three. A step that a fault undoes is reported again.
"""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

from infinity._src.base.atomic_file import write_named
from infinity._src.base.metrics_file import FILE_NAME, read_rows
from infinity._src.cabi.installation import install_line, is_installed

TRACKERS: Final = ("tensorboard", "wandb", "csv")
CSV_NAME: Final = "metrics.csv"
COLUMNS: Final = (
    "step", "loss", "held_out_loss", "lr", "grad_norm", "tokens", "tokens_per_s", "step_s",
    "compute_s", "io_wait_s", "update_s", "bytes_read", "bytes_written", "rss_bytes",
)  # fmt: skip
"""Figures of a step that are reported, in the order of metrics.csv."""


class Tracker(Protocol):
    """Receiver of the figures of a run."""

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """Report figures of a step."""

    def close(self) -> None:
        """Write all reported figures."""


def check_installed(names: Sequence[str]) -> None:
    """Raise ValueError for a tracker that is named twice, or whose library is missing."""
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"--report-to {name} is given twice; give it once")
        if name != "csv" and not is_installed(name):
            raise ValueError(
                f"--report-to {name} needs {name}, which is not installed: {install_line(name)}"
            )


def open_trackers(
    names: Sequence[str], out: Path, about: Mapping[str, Any], *, run: str, after: int
) -> list[Tracker]:
    """Open the trackers. about: the description of the run. run: the run's id. after: the step
    after which the run continues; 0: the run begins.
    """
    made: list[Tracker] = []
    for name in names:
        if name == "tensorboard":
            made.append(_TensorBoard(out / "tensorboard", after))
        elif name == "wandb":
            made.append(_Wandb(out, about, run))
        else:
            made.append(_Csv(out))
    return made


def reported(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the figures of a line of metrics.jsonl that trackers get."""
    return {
        name: row[name] for name in COLUMNS if name != "step" and row.get(name) is not None
    }


class _Csv:
    def __init__(self, out: Path) -> None:
        self._out = out

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """Do nothing: `close` reads metrics.jsonl, which lacks undone steps."""

    def close(self) -> None:
        rows: dict[int, dict[str, Any]] = {}
        for _, row in read_rows(self._out / FILE_NAME):
            if row["kind"] == "step":
                rows.setdefault(row["step"], {"step": row["step"]}).update(reported(row))
            elif row["kind"] == "held_out":
                rows.setdefault(row["step"], {"step": row["step"]})["held_out_loss"] = row["loss"]
        if not any("loss" in row for row in rows.values()):
            # The run has taken no step.
            return
        text = io.StringIO()
        writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows[step] for step in sorted(rows))
        write_named(self._out / CSV_NAME, text.getvalue())


class _TensorBoard:
    def __init__(self, directory: Path, after: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # Remove the points of lost steps; for a new run, the points of an earlier run.
        self._writer: Any = SummaryWriter(str(directory), purge_step=after + 1 if after else 0)

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    def __init__(self, out: Path, about: Mapping[str, Any], run: str) -> None:
        import wandb

        # wandb raises its errors and pydantic's for a user's wrong keys and variables.
        try:
            self._run: Any = wandb.init(
                project=os.environ.get("WANDB_PROJECT", "infinity"),
                name=out.name,
                id=run,
                resume="allow",
                dir=out,
                config=dict(about),
                # No request leaves the machine unless the user sets WANDB_MODE.
                mode=None if "WANDB_MODE" in os.environ else "offline",
                settings=wandb.Settings(silent=True, console="off"),
            )
        except Exception as error:
            text = " ".join(str(error).split())
            raise ValueError(f"--report-to wandb: wandb cannot begin: {text}") from error

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        self._run.log(dict(figures), step=step)

    def close(self) -> None:
        self._run.finish()
