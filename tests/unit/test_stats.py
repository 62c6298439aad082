"""Figures of `handle.stats()` about the drives, and the report of `infinity train` about them."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import infinity as inf
from infinity._src.base.sizes import format_size
from infinity._src.cli.report import Steady, drive_rows
from infinity._src.engine.engine_stats import DriveFigures, drive_figures
from infinity._src.hooks.activation_offload import HELD_CALLS
from infinity._src.memory.roofline import Moved
from infinity.aio._endurance import Endurance
from infinity.errors import BudgetError
from tests import models


def figures(**given: Any) -> DriveFigures:
    values: dict[str, Any] = dict.fromkeys(DriveFigures.__dataclass_fields__, 0)
    values |= {"path": "/mnt/nvme0", "direct": True, "direct_reason": "", "failed": "", "slow": ""}
    return DriveFigures(
        **values | {"written_tb_per_day": None, "written_per_step_bytes": None} | given
    )


def test_every_drive_has_its_line_and_json_takes_it_all(tmp_path: Path) -> None:
    paths = [tmp_path / "one", tmp_path / "two"]
    for path in paths:
        path.mkdir()
    torch.manual_seed(0)
    policy = inf.Policy(params="nvme", optim="nvme", nvme=paths, ram="min")
    model = inf.offload(models.llama(layers=4).bfloat16(), policy)
    optimizer = inf.AdamW(model.parameters())
    handle = inf.handle(model)
    endurance = Endurance()
    before = handle.parts.tiers.executor.stats()
    endurance.observe(before, steps=0)
    for batch in models.token_batches(3):
        models.loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    handle.flush()
    after = handle.parts.tiers.executor.stats()
    endurance.observe(after, steps=3)
    found = drive_figures(after, endurance)
    stats = handle.stats()
    handle.close()

    assert [drive.path for drive in stats.drives] == [str(path) for path in paths]
    assert sum(drive.bytes_written for drive in stats.drives) == stats.bytes_written > 0
    assert sum(drive.bytes_read for drive in stats.drives) == stats.bytes_read > 0
    for drive in stats.drives:
        assert 0 < drive.write_p50_s <= drive.write_p99_s < 60
        assert 0 < drive.read_p50_s <= drive.read_p99_s < 60
        assert 0 < drive.depth_mean <= drive.depth
        assert drive.block_bytes >= 4096
        assert drive.path in str(drive)
    again = json.loads(json.dumps(stats.as_dict()))
    assert [drive["path"] for drive in again["drives"]] == [str(path) for path in paths]
    assert again["registered"] or again["registered_reason"]

    # What was written between the two looks is what the forecast is about; set-up was written
    # before.
    for old, new, drive in zip(before.drives, after.drives, found, strict=True):
        assert old.bytes_written > 0
        assert drive.written_per_step_bytes == pytest.approx(
            (new.bytes_written - old.bytes_written) / 3
        )
        assert drive.written_tb_per_day
        assert "TB written per day" in str(drive)


def test_bandwidth_of_the_last_seconds_is_what_was_moved_in_them(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = inf.offload(
        models.llama(layers=4).bfloat16(),
        inf.Policy(params="nvme", optim="nvme", nvme=tmp_path, ram="min"),
    )
    executor = inf.handle(model).parts.tiers.executor
    # The second in which it was written must be over.
    end_s = time.monotonic() + 1.1
    while time.monotonic() < end_s:
        time.sleep(0.05)
    stats = executor.stats()
    now_s = stats.opened_s + 9.5
    (drive,) = drive_figures(stats, Endurance(), now_s=now_s)
    inf.handle(model).close()
    assert drive.write_bytes_per_s_10s == pytest.approx(
        stats.bytes_written / (int(now_s) - stats.opened_s)
    )
    assert drive.write_bytes_per_s_60s == drive.write_bytes_per_s_10s
    assert drive.written_tb_per_day is None


def test_a_line_says_what_is_wrong_and_nothing_else() -> None:
    assert "\n" not in str(figures())
    wrong = figures(
        failed="write ENOSPC",
        direct=False,
        direct_reason="overlayfs",
        retries=3,
        slow="writes have dropped",
    )
    text = str(wrong).splitlines()[1:]
    assert [line.strip().split(":")[0] for line in text] == [
        "FAILED",
        "through the page cache",
        "3 retries, 0 short transfers, 0 errors",
        "writes have dropped",
    ]


def test_the_report_says_how_long_a_drive_would_last() -> None:
    mean = Steady(
        steps=100,
        step_s=10.0,
        first_forward_s=1.0,
        compute_s=1.0,
        io_wait_s=0.0,
        bytes_read=0.0,
        bytes_written=96e9,
        tokens_per_s=1.0,
    )
    drive = {
        "path": "/mnt/nvme0", "read_p50_s": 0.004, "read_p99_s": 0.0125, "write_p50_s": 0.001,
        "write_p99_s": 0.02, "depth_mean": 7.6, "failed": "", "direct_reason": "",
        "slow": "reads have dropped", "bytes_written": 3,
    }  # fmt: skip
    other = {**drive, "path": "/mnt/nvme1", "bytes_written": 1, "slow": ""}
    rows = drive_rows(mean, {"drives": [drive, other]})
    assert rows[0] == (
        "drive /mnt/nvme0",
        (
            "p50 / p99 of requests: read 4.0 / 12.5 ms, write 1.0 / 20.0 ms; 8 in flight; reads "
            "have dropped"
        ),
    )
    # 96 GB in 10 s are 829 TB a day, three quarters of them on the first drive.
    assert rows[-1] == (
        "endurance",
        (
            "89.4 GiB written per step: 829 TB per day at this rate (a drive rated for 600 TBW "
            "would last 1.0 days)"
        ),
    )
    # Steps of a few minutes say nothing of a day.
    few = dataclasses.replace(mean, steps=2)
    text = dict(drive_rows(few, {"drives": [drive]}))["endurance"]
    assert text.startswith("89.4 GiB written per step; the steps took less than")
    assert drive_rows(mean, {"drives": []}) == []


def train(
    directory: Path, *, steps: int, micro_batches: int = 1, **policy: Any
) -> tuple[inf.Stats, list[dict[str, Any]]]:
    torch.manual_seed(0)
    model = inf.offload(
        models.llama(layers=4).bfloat16(),
        inf.Policy(params="nvme", optim="nvme", nvme=directory, ram="min", **policy),
    )
    optimizer = inf.AdamW(model.parameters())
    handle = inf.handle(model)
    batches = models.token_batches(steps * micro_batches)
    for step in range(steps):
        if step == steps - 1:
            handle.flush()
        for batch in batches[step * micro_batches : (step + 1) * micro_batches]:
            models.loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    handle.flush()
    stats = handle.stats()
    handle.trace(directory / "trace.json")
    handle.close()
    return stats, json.loads((directory / "trace.json").read_text())["traceEvents"]


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_a_step_is_told_phase_by_phase_and_against_its_limits(
    tmp_path: Path, micro_batches: int
) -> None:
    io = {"bandwidths": {str(tmp_path): [3e9, 2e9]}}
    stats, events = train(tmp_path, steps=5, micro_batches=micro_batches, io=io)
    terms = stats.terms
    assert terms is not None
    assert (terms.steps, terms.micro_batches, terms.update) == (4, micro_batches, "deferred")
    assert (terms.passes, terms.schedule) == (micro_batches, "horizontal")
    assert terms.phases["backward"].count == micro_batches
    assert terms.phases["forward"].count == micro_batches - 1
    assert terms.step_s == pytest.approx(sum(figures.seconds for figures in terms.phases.values()))
    assert terms.alone is not None  # the last step began after flush()
    assert terms.loop.total_s + sum(f.wait_s for f in terms.phases.values()) <= terms.step_s
    # The drives' bytes of all phases add up; bytes that are no parameter are states.
    assert sum(figures.bytes_read for figures in stats.phases.values()) == stats.bytes_read
    setup = stats.bytes_written - sum(figures.bytes_written for figures in stats.phases.values())
    assert 2 * stats.params <= setup < 5 * stats.params  # the first filling
    assert (
        sum(figures.params_read_bytes for figures in stats.phases.values())
        == stats.params_read_bytes
    )
    assert terms.moved.total.read == pytest.approx(
        sum(f.bytes_read for f in terms.phases.values()), abs=8
    )
    assert terms.eta_floor is not None
    assert terms.eta_schedule is not None
    assert 0 < terms.eta_floor <= terms.eta_schedule
    json.dumps(stats.as_dict())
    text = str(stats)
    for wanted in ("backward", "η", "limits: any schedule", "compute with the first forward"):
        assert wanted in text
    names = {event["name"] for event in events if event["ph"] == "X" and event["cat"] == "phases"}
    assert {"first forward", "backward", "step"} <= names
    assert ("forward" in names) == (micro_batches > 1)


@pytest.mark.parametrize(("rows", "slices"), [(6, 3), (2, 2)])
def test_slices_are_micro_batches_of_one_pass(tmp_path: Path, rows: int, slices: int) -> None:
    """A batch of fewer rows has one slice for each."""
    model = inf.microbatched(models.make(models.llama), 3)
    policy = inf.Policy(params="nvme", optim="nvme", nvme=tmp_path, ram="min")
    handle, loop = inf.handle(inf.offload(model, policy)), inf.AdamW(model.parameters())
    assert handle.stats().terms is None
    for passes in (1, 2, 2):
        for batch in models.token_batches(passes, rows=rows):
            models.loss_of(model, batch).backward()
        loop.step()
        loop.zero_grad()
        # As evaluations do.
        with torch.no_grad():
            models.loss_of(model, batch)
    stats = handle.stats()
    handle.close()
    assert stats.terms is not None
    assert (stats.terms.passes, stats.terms.micro_batches) == (2, 2 * slices)
    assert stats.terms.phases["backward"].count == 2
    assert stats.terms.as_dict()["schedule"] == "vertical"
    text = f"{2 * slices} micro-batches, vertical in 2 passes, update deferred"
    assert text in str(stats)


@pytest.mark.parametrize("update", ["deferred", "delayed", "backward"])
def test_the_parts_of_ram_are_all_told_and_add_up(tmp_path: Path, update: str) -> None:
    stats, _ = train(tmp_path, steps=1, update=update, delayed_warmup=0)
    assert sum(stats.ram_parts.values()) == stats.ram_bytes
    assert all(stats.ram_parts.values())
    assert {"pools", "checksums", "scratch"} <= stats.ram_parts.keys()
    assert stats.ram_parts.get("gradients", 0) == stats.grad_bytes
    assert stats.sums_bytes > 0
    assert stats.scratch_bytes > 0
    # A copy of 2 bytes per parameter, and padding.
    assert (
        2 * stats.params <= stats.shadow_bytes < 3 * stats.params
        if update == "delayed"
        else stats.shadow_bytes == 0
    )
    line = next(line for line in str(stats).splitlines() if line.startswith("RAM "))
    text = ", ".join(f"{name} {format_size(size)}" for name, size in stats.ram_parts.items())
    assert line.startswith(f"RAM {format_size(stats.ram_bytes)} ({text}); NVMe ")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("update", "micro_batches"),
    [
        ("deferred", 2),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in itertools.product(("deferred", "delayed", "backward"), (1, 2))
            if each != ("deferred", 2)
        ),
    ],
)
def test_spilled_gradients_and_activations_are_no_states(
    tmp_path: Path, update: str, micro_batches: int
) -> None:
    layers, rows, length, hidden = 12, 4, 64, 128
    policy = {
        "params": "nvme",
        "optim": "nvme",
        "nvme": tmp_path,
        "resident": {"params": 0.0, "optim": 0.0},
        "grads": "nvme",
        "activations": "nvme",
        "update": update,
        "delayed_warmup": 0,
        "io": {"bandwidths": {str(tmp_path): [3e9, 2e9]}},
    }

    def model() -> Any:
        made: Any = models.make(lambda: models.llama(layers=layers, hidden=hidden))
        made.gradient_checkpointing_enable({"use_reentrant": False})
        return made

    with pytest.raises(BudgetError) as caught:
        # Without accumulation update="backward" keeps no gradients: a budget in which they spill
        # once it accumulates.
        inf.offload(
            model(),
            inf.Policy(
                **policy | {"ram": 1} | ({"update": "deferred"} if update == "backward" else {})
            ),
        )
    trained = inf.offload(
        model(),
        inf.Policy(**policy, ram=int(str(caught.value).split("works is ")[1].split(" bytes")[0])),
    )
    optimizer, handle = inf.AdamW(trained.parameters()), inf.handle(trained)
    for step in range(3):
        for index, batch in enumerate(
            models.token_batches(micro_batches, rows=rows, length=length)
        ):
            with handle.no_sync() if index < micro_batches - 1 else contextlib.nullcontext():
                models.loss_of(trained, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 0:
            handle.flush()
            before = handle.stats()
    handle.flush()
    stats = handle.stats()
    handle.close()
    assert stats.terms is not None
    moved = stats.terms.moved
    spilled = stats.spilled_bytes
    assert (spilled > 0) == (update != "backward" or micro_batches > 1)
    times = micro_batches if spilled else 0
    for size in (moved.grads.read, moved.grads.written):
        assert times * spilled <= size <= 1.01 * times * spilled  # whole blocks
    boundary = rows * length * hidden * 2
    assert moved.activations == Moved(*2 * [micro_batches * (layers - HELD_CALLS) * boundary])
    # The difference of two steps: 12 bytes per parameter, of which update="backward" reads 10; and
    # padding.
    (read, written), (read_before, written_before) = (
        (
            each.bytes_read
            - each.params_read_bytes
            - each.grads_read_bytes
            - each.activations.fetched_bytes,
            each.bytes_written - each.grads_written_bytes - each.activations.stored_bytes,
        )
        for each in (stats, before)
    )
    fed = 10 if update == "backward" else 12
    assert 1 <= (read - read_before) / (2 * fed * stats.params) < 1.1
    assert 1 <= (written - written_before) / (2 * 12 * stats.params) < 1.1
    assert stats.grads_read_bytes == stats.grads_written_bytes
    text = str(stats)
    assert ("of spilled gradients" in text) == bool(spilled)
    assert "of activations" in text


def test_copies_to_a_gpu_are_shown_where_there_were_any(tmp_path: Path) -> None:
    stats, _ = train(tmp_path, steps=1)
    assert (stats.h2d_bytes, stats.d2h_bytes, stats.h2d_s, stats.d2h_s) == (0, 0, 0.0, 0.0)
    assert "the GPU" not in str(stats)
    copied = dataclasses.replace(stats, h2d_bytes=6 << 30, d2h_bytes=3 << 30, h2d_s=0.25)
    assert "copied 6 GiB to the GPU at 25.8 GB/s and 3 GiB from the GPU" in str(copied)


def test_frozen_parameters_are_known_as_such(tmp_path: Path) -> None:
    torch.manual_seed(0)
    built: Any = models.llama(layers=4).bfloat16()
    for name, parameter in built.named_parameters():
        parameter.requires_grad_("norm" in name)
    frozen = sum(
        parameter.numel() for parameter in built.parameters() if not parameter.requires_grad
    )
    model = inf.offload(built, inf.Policy(params="nvme", optim="nvme", nvme=tmp_path, ram="min"))
    optimizer, handle = inf.AdamW(model.parameters()), inf.handle(model)
    for batch in models.token_batches(3):
        models.loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    handle.flush()
    stats = handle.stats()
    handle.close()
    assert 2 * frozen <= stats.frozen_bytes < 2.4 * frozen  # padding
    assert stats.terms is not None
    moved = stats.terms.moved
    assert (
        moved.beside_states.read - moved.states.read
        == min(stats.frozen_bytes, moved.params_read)
        > 0
    )


def test_bandwidths_that_were_measured_before_are_used_for_the_limits(tmp_path: Path) -> None:
    stats, _ = train(tmp_path, steps=3, io={"bandwidths": {str(tmp_path): [3e9, 2e9]}})
    assert stats.terms is not None
    assert stats.terms.bandwidths is not None
    assert stats.terms.bandwidths.source == "as Policy(io=) has them"
    assert stats.terms.limits.io_s == pytest.approx(
        stats.terms.moved.total.read / 3e9 + stats.terms.moved.total.written / 2e9
    )
