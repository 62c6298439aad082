"""Figures per step, and the limits they are held against."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from infinity._src.cli.report import (
    StepRecord,
    Summary,
    plot_loss,
    show_summary,
    steady,
    step_limits,
)
from infinity._src.memory.roofline import AtRest, Compute, Drives, limits, traffic


def shown_on(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def record(step: int, **given: float) -> StepRecord:
    values = {
        "loss": 2.0,
        "lr": 1e-5,
        "grad_norm": 1.0,
        "tokens": 100,
        "step_s": 2.0,
        "first_forward_s": 0.5,
        "compute_s": 1.5,
        "io_wait_s": 0.4,
        "bytes_read": 14_000,
        "bytes_written": 12_000,
        "ram_bytes": 1,
        "rss_bytes": 1,
        "params_read": 2_000,
        "last_backward_s": 1.0,
        **given,
    }
    return StepRecord(step=step, **values)  # type: ignore[arg-type]


def test_the_first_step_is_left_out_of_the_means() -> None:
    mean = steady([record(1, step_s=50.0), record(2, step_s=1.0), record(3, step_s=3.0)])
    assert (mean.steps, mean.step_s, mean.tokens_per_s) == (2, 2.0, 50.0)
    assert steady([record(1, step_s=50.0)]).step_s == 50.0
    with pytest.raises(ValueError, match="no step"):
        steady([])


def test_spilled_gradients_and_activations_are_no_states() -> None:
    """Two micro-batches of 1000 parameters in the `exact` format, 2 B of gradients each, 500 B of
    activations each."""
    spilled = {
        "grads_read": 4_000,
        "grads_written": 4_000,
        "activations_read": 1_000,
        "activations_written": 1_000,
    }
    given = {
        "bytes_read": 18_000 + 5_000,
        "bytes_written": 12_000 + 5_000,
        "params_read": 6_000,
        **spilled,
    }
    mean = steady([record(1), record(2, **given)])
    planned = traffic(AtRest(2_000, 10_000, 2_000), "deferred", 2, activations=500)
    assert (mean.grads, mean.activations) == (planned.grads, planned.activations)
    drives = Drives(10_000, 6_000)
    wanted = limits(planned, Compute(0.5, 1.0, 0.0), drives)
    assert step_limits(mean, drives, 2) == wanted
    assert (
        step_limits(steady([record(2, **given | dict.fromkeys(spilled, 0))]), drives, 2).schedule_s
        > wanted.schedule_s
    )


def test_the_table_shows_the_figures_and_texts_are_not_markup() -> None:
    mean = steady([record(1)])
    summary = Summary(
        params=1000,
        micro_batches=8,
        passes=1,
        held_out=(2.5, 2.25),
        mean=mean,
        limits=step_limits(mean, Drives(10_000, 6_000), 1),
        limits_loop=step_limits(mean, Drives(10_000, 6_000), 1, alone=False),
        drives={"read_gbps": 1.0, "write_gbps": 2.0, "mixed_gbps": 1.5},
        engine={
            "ram_bytes": 1 << 20,
            "nvme_bytes": 1 << 21,
            "gathered_bytes_peak": 1 << 19,
            "backend": "threads",
        },
        peak_rss_loading_bytes=1 << 30,
        peak_rss_training_bytes=1 << 29,
        texts=("[red]before", "after [/b]"),
        update="backward",
        state_bytes=5100.0,
    )
    console = Console(file=io.StringIO(), width=100)
    show_summary(console, summary)
    shown = shown_on(console)
    for wanted in (
        "2.5000 before, 2.2500 after",
        "14.0 B read, 12.0 B written",
        "8 micro-batches, vertical",
        "η = 1.70",
        "[red]before",
        "after [/b]",
        "limit of update backward",
        "states 5.0 KiB at rest",
    ):
        assert wanted in shown
    assert summary.as_dict()["eta_floor"] == pytest.approx(1.7)
    assert summary.as_dict()["eta_backward"] > 0


def test_the_plot_is_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert plot_loss([record(1), record(2)], [(0, 2.5), (2, 2.0)], tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_a_step_that_began_alone_is_the_compute_term_and_no_part_of_the_means() -> None:
    beside = {"first_forward_s": 0.9, "compute_s": 1.9, "step_s": 5.0}
    records = [
        record(1),
        record(2, **beside),
        record(3, alone=True, first_forward_s=0.3, step_s=9.0),
        record(4, **beside),
    ]
    mean = steady(records)
    assert (mean.steps, mean.step_s, mean.first_forward_s, mean.alone_s) == (2, 5.0, 0.9, 0.3)
    fast = Drives(1e12, 1e12)
    assert step_limits(mean, fast, 1).floor_s == pytest.approx(1.3)
    assert step_limits(mean, fast, 1, alone=False).floor_s == pytest.approx(1.9)
