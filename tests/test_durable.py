"""Durable runs: after a crash anywhere `inf.restore` goes on from the last committed step, on the
trajectory of a run that met none."""

from __future__ import annotations

import errno
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import infinity as inf
from infinity._src.cabi import native
from infinity._src.cabi.records import PIECE_NUMEL
from infinity._src.checkpoint.directory import newest_generation
from infinity._src.checkpoint.durable import run as committing
from infinity._src.checkpoint.verify import VerifyJob
from infinity._src.engine.handle import offload
from infinity.errors import SwapFullError
from tests import crashes, durable_runs, models

STEPS = 6


def policy(tmp_path: Path, **values: Any) -> inf.Policy:
    return inf.Policy(
        **{
            "params": "nvme",
            "optim": "nvme",
            "ram": "min",
            "nvme": tmp_path,
            "durable": True,
            **values,
        }
    )


def made(tmp_path: Path, factory: Any = models.llama, **values: Any) -> tuple[Any, Any]:
    model = offload(models.make(factory), policy(tmp_path, **values))
    return model, inf.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def train(
    model: Any, optimizer: Any, start: int, end: int, *, clip: float | None = None
) -> list[float]:
    """The steps from `start` to `end`, each with the batch and the rate of its index."""
    losses = []
    batches = models.token_batches(end)
    for step in range(start, end):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * 0.9**step
        loss = models.loss_of(model, batches[step])
        loss.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        inf.handle(model).extra = {"next": step + 1, "seen": torch.tensor([step])}
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def values_of(model: Any) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def undisturbed(
    factory: Any = models.llama, *, clip: float | None = None, **values: Any
) -> tuple[list[float], dict[str, torch.Tensor]]:
    model = offload(models.make(factory), inf.Policy(params="cpu", optim="cpu", **values))
    optimizer = inf.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = train(model, optimizer, 0, STEPS, clip=clip)
    found = values_of(model)
    inf.handle(model).close()
    return losses, found


def assert_same(model: Any, wanted: dict[str, torch.Tensor]) -> None:
    ours = values_of(model)
    assert [name for name in wanted if not torch.equal(ours[name], wanted[name])] == []


@pytest.mark.parametrize("update", ["deferred", "backward"])
@pytest.mark.parametrize("state", ["exact", "compact"])
def test_a_run_goes_on_bit_for_bit(tmp_path, update, state):
    losses, wanted = undisturbed(state=state)
    model, optimizer = made(tmp_path, update=update, state=state)
    got = train(model, optimizer, 0, 3)
    inf.handle(model).close()
    model, optimizer = made(tmp_path, update=update, state=state)
    with pytest.raises(ValueError, match="holds a durable run, committed up to step 3"):
        train(model, optimizer, 0, 1)
    optimizer.zero_grad()
    found = inf.restore(model, optimizer, tmp_path)
    assert (found.step, found.extra["next"], found.extra["seen"].item()) == (3, 3, 2)
    got += train(model, optimizer, found.step, STEPS)
    assert got == losses
    assert_same(model, wanted)
    inf.handle(model).close()


def test_nothing_committed_leaves_the_model_as_built(tmp_path):
    losses, wanted = undisturbed()
    model, optimizer = made(tmp_path)
    found = inf.restore(model, optimizer, tmp_path)
    assert (found.step, found.extra) == (0, None)
    assert train(model, optimizer, 0, STEPS) == losses
    assert_same(model, wanted)
    inf.handle(model).close()


def tables(home: Path) -> list[str]:
    return [path.name for path in home.glob("table-*")]


@pytest.mark.parametrize("drives", [1, 2])
def test_a_commit_says_what_the_executor_knows(tmp_path: Path, drives: int) -> None:
    """Its rows are those that a manifest with everything would have, and its checksums are those
    of the pieces' checksums; the table stays until places change, in a file of its own."""
    places = [tmp_path / str(index) for index in range(drives)]
    for place in places:
        place.mkdir()
    model, optimizer = durable_runs.made(*places)
    run = inf.handle(model).durable
    home, seen = run.files.home, []
    for index in range(5):
        crashes.step(model, optimizer, index, 0)
        if index == 2:
            inf.save(model, optimizer, places[0] / "linked").wait()
        inf.handle(model).flush()
        (found,) = newest_generation(home)
        rows, sums = run._table.live_rows()
        entries = [found.files[number].name for number in found.rows["file"]]
        drive = [divmod(int(number), 1 << 16) for number in rows["file"]]
        assert entries == [run.files.name(*each) for each in drive]
        for name in ("start", "numel", "key", "generation", "file_offset", "section_at", "zeros"):
            assert np.array_equal(found.rows[name], rows[name]), name
        counts = [len(found.layout.flats[row["flat"]].sections) for row in rows]
        folded = []
        for row, count in zip(rows, counts, strict=True):
            pieces = -(-int(row["numel"]) // PIECE_NUMEL)
            for section in range(count):
                at = int(row["sums_at"]) + section * pieces
                folded.append(native.crc32c(sums[at : at + pieces]))
        assert found.sums.tolist() == folded
        assert tables(home) == [found.table.name]
        seen.append(found.table.name)
    # The next step writes beside what was linked; the one after it writes elsewhere.
    assert seen[0] == seen[3] != seen[4], seen
    durable_runs.close(model)


def test_a_commit_that_fails_behind_its_table_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table of a failed commit goes with it, and the next commit writes another."""
    model, optimizer = durable_runs.made(tmp_path)
    for index in range(4):
        crashes.step(model, optimizer, index, 0)
        if index == 2:
            inf.save(model, optimizer, tmp_path / "linked").wait()
    inf.handle(model).flush()
    home = inf.handle(model).durable.files.home
    (table,) = tables(home)
    crashes.step(model, optimizer, 4, 0)
    inf.handle(model).pipeline.wait()
    there: list[list[str]] = []

    def full(path: Path, *_: object) -> None:
        there.append(tables(home))
        raise SwapFullError("full", errno=errno.ENOSPC, path=str(path))

    monkeypatch.setattr(committing, "write_durably", full)
    with pytest.raises(SwapFullError):
        inf.handle(model).flush()
    monkeypatch.undo()
    assert len(there[0]) == 2
    assert tables(home) == [table]
    assert newest_generation(home)[0].step == 4
    inf.handle(model).flush()
    wanted = crashes.digest(model)
    (after,) = tables(home)
    assert after != table
    durable_runs.die(model)
    model, optimizer = durable_runs.made(tmp_path)
    assert inf.restore(model, optimizer, tmp_path).step == 5
    assert crashes.digest(model) == wanted
    durable_runs.close(model)


class HalfUsed(torch.nn.Module):
    """Two blocks, of which the second gets no gradient: no update writes its states."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.idle = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


def idle(place: Path, state: str, durable: bool | str = True) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model: Any = HalfUsed().bfloat16()
    offload(model, policy(place, units=["Linear"], state=state, durable=durable))
    return model, inf.AdamW(model.parameters(), lr=1e-2)


@pytest.mark.parametrize("state", ["exact", "compact"])
def test_states_that_no_update_wrote_are_zeros_after_a_crash_and_in_a_save(tmp_path, state):
    model, optimizer = idle(tmp_path, state)
    for _ in range(2):
        model(torch.randn(4, 64).bfloat16()).float().square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    inf.save(model, optimizer, tmp_path / "linked").wait()
    wanted, home = values_of(model), inf.handle(model).durable.files.home
    inf.handle(model).end(commit=False)
    for place in (home, tmp_path / "linked"):
        (found,) = newest_generation(place)
        # Those of the idle block; an older release, which would not know, refuses the manifest.
        assert np.count_nonzero(found.rows["zeros"]) == 1
        version = struct.unpack_from("<8sQ", (place / found.name).read_bytes())[1]
        assert version == (3 if place == home else 2)
        assert VerifyJob(place).verify() == []
    for place, durable in ((tmp_path, True), (tmp_path / "linked", "new")):
        model, optimizer = idle(tmp_path, state, durable)
        assert inf.restore(model, optimizer, place).step == 2
        assert_same(model, wanted)
        moments = [
            inf.handle(model).optimizer_state(block.weight)["exp_avg"].any()
            for block in (model.used, model.idle)
        ]
        assert moments == [True, False]
        inf.handle(model).end(commit=False)
