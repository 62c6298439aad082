"""`inf.StepLog`: what a loop of one's own leaves for `infinity report`."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import infinity as inf
from infinity._src.base.metrics_file import read_rows
from infinity._src.base.step_timeline import StepTimeline
from infinity._src.base.telemetry import PURPOSES
from infinity._src.cabi.records import KIND_AHEAD
from infinity._src.engine.storage import purposes_of
from infinity.aio import SPAN, JobKind
from tests import harness, models
from tests.harness import policy


def rows_of(directory: Path, kind: str) -> list[dict[str, Any]]:
    return [row for _, row in read_rows(directory / "metrics.jsonl") if row["kind"] == kind]


def offloaded(directory: Path, *, layers: int = 2, **values: Any) -> tuple[nn.Module, inf.AdamW]:
    torch.manual_seed(0)
    model = inf.offload(models.llama(layers=layers).bfloat16(), policy(directory, **values))
    return model, inf.AdamW(model.parameters(), lr=1e-3)


def train(model: nn.Module, optimizer: inf.AdamW, log: inf.StepLog, steps: int) -> list[float]:
    losses = []
    for batch in models.token_batches(steps):
        loss = models.loss_of(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        log.step(losses[-1], lr=1e-3)
    return losses


@pytest.mark.parametrize("update", ["deferred", "backward"])
def test_a_log_changes_no_bit(tmp_path: Path, update: str) -> None:
    logs: list[inf.StepLog] = []

    def logged(model: nn.Module, _step: int) -> None:
        # The plain loop calls this, too.
        if "_infinity_handle" in model.__dict__:
            logs[:] = logs or [inf.StepLog(model, tmp_path / "log")]
            logs[0].step(1.0)

    training = harness.Training(
        functools.partial(models.llama, layers=2),
        steps=5,
        accumulation=1,
        max_norm=None,
        before=logged,
    )
    ours = harness.offloaded(training, policy(tmp_path, update=update))
    harness.assert_same(ours, harness.reference(training))
    assert len(rows_of(tmp_path / "log", "step")) == 5
    assert (tmp_path / "log" / "timeline.json").is_file()


def test_a_line_has_the_figures_of_its_step_and_a_timeline_its_units(tmp_path: Path) -> None:
    out, steps = tmp_path / "out", 5
    bandwidths = {str(tmp_path): [3e9, 2e9]}
    at_rest = {"optim": 0.0, "params": 0.0}
    model, optimizer = offloaded(
        tmp_path, layers=8, ram="1GiB", io={"bandwidths": bandwidths}, resident=at_rest
    )
    handle = inf.handle(model)
    before = handle.stats()
    with inf.StepLog(model, out) as log:
        losses = train(model, optimizer, log, steps)
        after = handle.stats()
    (about,) = rows_of(out, "run")
    assert about["params"] == after.params
    assert (about["bandwidth"]["read_gbps"], about["bandwidth"]["write_gbps"]) == (3.0, 2.0)
    rows = rows_of(out, "step")
    assert [(row["step"], row["loss"], row["lr"]) for row in rows] == [
        (number, loss, 1e-3) for number, loss in enumerate(losses, 1)
    ]
    for name in ("bytes_read", "bytes_written"):
        # What moved before the log was made, or after its last line, belongs to no step.
        total = sum(row[name] for row in rows)
        assert 0 < total <= getattr(after, name) - getattr(before, name)
        assert total == sum(drive[name] for row in rows for drive in row["drives"])
    for row in rows:
        parts = row["compute_s"] + row["io_wait_s"] + row["update_s"]
        assert 0 < parts <= row["step_s"] * 1.01
        assert row["memory"]["ram"] == after.ram_parts
        assert row["memory"]["ram_budget_bytes"] == after.ram_budget_bytes == 1 << 30
        assert row["memory"]["nvme"] == {"states": after.nvme_bytes}
    timeline = StepTimeline.read(out / "timeline.json")
    assert (timeline.step, timeline.dropped) == (4, 0)
    assert timeline.seconds == pytest.approx(rows[3]["step_s"], rel=0.2)
    units = {unit.name for unit in handle.units}
    for lane in ("gather", "compute", "states", "update", "write"):
        named = {timeline.names[bar.first] for bar in timeline.lanes[lane]}
        assert named <= units, lane
        # In a tiny model some lanes may have joined bars, but no lane is empty.
        assert named
    assert {timeline.names[bar.first] for bar in timeline.lanes["phase"]} == {
        "first forward", "backward", "step",
    }  # fmt: skip
    passes = [bar for bar in timeline.lanes["compute"] if bar.first == bar.last]
    assert len(passes) >= len(units)
    handle.close()


def test_a_log_goes_on_after_a_step_and_drops_those_that_were_lost(tmp_path: Path) -> None:
    out = tmp_path / "out"
    model, optimizer = offloaded(tmp_path)
    with inf.StepLog(model, out) as log:
        train(model, optimizer, log, 4)
    with (out / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "step", "step": 5, "lo')  # as a kill tears it
    with inf.StepLog(model, out, after=2) as log:
        train(model, optimizer, log, 3)
    assert [row["step"] for row in rows_of(out, "step")] == [1, 2, 3, 4, 5]
    assert [row["goes_on_after"] for row in rows_of(out, "run")] == [0, 2]
    with inf.StepLog(model, out) as log:
        train(model, optimizer, log, 1)
    assert [row["step"] for row in rows_of(out, "step")] == [1]
    inf.handle(model).close()


def test_what_is_skipped_is_in_no_step(tmp_path: Path) -> None:
    out = tmp_path / "out"
    model, optimizer = offloaded(tmp_path, layers=8)
    with inf.StepLog(model, out) as log:
        train(model, optimizer, log, 2)
        inf.handle(model).flush()
        before = inf.handle(model).stats()
        with torch.no_grad():
            models.loss_of(model, models.token_batches(1)[0])
        evaluated = inf.handle(model).stats().bytes_read - before.bytes_read
        assert evaluated > 0
        log.skip()
        train(model, optimizer, log, 1)
        total = inf.handle(model).stats().bytes_read
    assert sum(row["bytes_read"] for row in rows_of(out, "step")) <= total - evaluated
    inf.handle(model).close()


def test_mistakes_are_told(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not offloaded"):
        inf.StepLog(models.llama(layers=1), tmp_path)
    model, _ = offloaded(tmp_path)
    with pytest.raises(ValueError, match="after=-1: give the number of a step"):
        inf.StepLog(model, tmp_path, after=-1)
    with inf.StepLog(model, tmp_path / "out") as log:
        with pytest.raises(ValueError, match="the log has step_s already: give another name"):
            log.step(1.0, step_s=2.0)
        log.step(float("nan"))
    (row,) = rows_of(tmp_path / "out", "step")
    assert row["step"] == 1
    assert json.dumps(row["loss"]) == "NaN"
    inf.handle(model).close()


def test_the_purpose_of_a_span_is_that_of_its_job() -> None:
    cases = [
        ("gather", JobKind.FETCH, 1, 0, 3),
        ("gather", JobKind.FETCH, 1 | 1 << 29, 1, 3),  # to a device
        ("save", JobKind.FETCH, 0b1111, 2, 3),
        ("gradient", JobKind.FETCH, 0b10000, 1, 3),
        ("gradient", JobKind.STORE, 0b10000, 2, 3),
        ("other", JobKind.STORE, 1, 0, 3),  # the loop writes a parameter
        ("update", JobKind.UPDATE, 1, 0, 3),
        ("update", KIND_AHEAD, 0, 3, 3),
        ("update", JobKind.REWRITE, 0, 2, 3),
        ("copy", JobKind.COPY, 0, 0, -1),
        ("activation", JobKind.STORE, 1, 2, -1),
        ("activation", JobKind.FETCH, 1, 0, -1),
    ]
    spans = np.zeros(len(cases), SPAN)
    for name, index in (("kind", 1), ("mask", 2), ("priority", 3)):
        spans[name] = [case[index] for case in cases]
    found = purposes_of(spans, np.array([case[4] for case in cases], np.int32))
    assert [PURPOSES[purpose] for purpose in found] == [case[0] for case in cases]
