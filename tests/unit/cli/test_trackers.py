"""`infinity train --report-to`: the figures of metrics.jsonl, elsewhere."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from infinity._src.cli import trackers
from infinity._src.cli.train import run_train
from tests.tiny_llama import TEXT, write_model
from tests.unit.cli.commands import run

pytestmark = pytest.mark.usefixtures("without_pictures")

GIVEN = "--steps 2 --batch 2 --seq 32 --eval-batches 1 --dtype bfloat16 --no-trace --no-save"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = write_model(tmp_path_factory.mktemp("model"))
    (found / "text.txt").write_text(TEXT)
    return found


def train(place: Path, out: Path, *more: object) -> tuple[int, str]:
    paths = (place, "--text", place / "text.txt", "--out", out)
    return run(run_train, "train", *paths, *GIVEN.split(), *more)


def losses(out: Path) -> dict[int, float]:
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row["loss"] for row in rows if row["kind"] == "step"}


def events(out: Path) -> dict[str, list[tuple[int, float]]]:
    """Points of each curve of TensorBoard's events."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(out / "tensorboard"))
    found.Reload()
    names = found.Tags()["scalars"]
    return {name: [(each.step, each.value) for each in found.Scalars(name)] for name in names}


def test_a_run_and_its_resumption_are_reported_as_one(place: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    chosen = ("--report-to", "csv", "--report-to", "tensorboard", "--save-every", "1")
    status, shown = train(place, tmp_path, *chosen)
    assert status == 0, shown
    status, shown = train(place, tmp_path, *chosen, "--steps", "3", "--resume")
    assert status == 0, shown
    with (tmp_path / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    wanted = losses(tmp_path)
    assert list(wanted) == [1, 2, 3]
    assert {int(row["step"]): float(row["loss"]) for row in rows if row["loss"]} == wanted
    assert [int(row["step"]) for row in rows if row["held_out_loss"]] == [0, 2, 3]
    found = events(tmp_path)
    assert dict(found["loss"]) == pytest.approx(wanted)
    assert {"lr", "grad_norm", "tokens_per_s", "held_out_loss"} <= found.keys()
    # A new run takes the place of an earlier one.
    status, shown = train(place, tmp_path, *chosen[:4], "--steps", "1", "--lr", "1e-2")
    assert status == 0, shown
    found = events(tmp_path)
    assert dict(found["loss"]) == pytest.approx(losses(tmp_path))
    assert [step for step, _ in found["held_out_loss"]] == [0, 1]


@pytest.mark.integrations
def test_a_run_of_wandb_is_offline(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    status, shown = train(place, tmp_path, "--report-to", "wandb")
    assert status == 0, shown
    (found,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    assert found.stat().st_size > 0
    monkeypatch.setenv("WANDB_PROJECT", "a/b")
    status, shown = train(place, tmp_path / "more", "--report-to", "wandb")
    assert (status, (tmp_path / "more").exists()) == (2, False)
    assert "error: --report-to wandb: wandb cannot begin: " in shown


def test_a_tracker_that_cannot_be_is_one_line(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def said(*more: str) -> str:
        status, shown = train(place, tmp_path / "out", *more)
        assert (status, shown.count("\n"), (tmp_path / "out").exists()) == (2, 1, False)
        return shown

    assert "is given twice" in said("--report-to", "csv", "--report-to", "csv")
    installed: dict[str, Any] = {"tensorboard": True, "wandb": False}
    monkeypatch.setattr(trackers, "is_installed", installed.get)
    shown = said("--report-to", "tensorboard", "--report-to", "wandb")
    assert "--report-to wandb needs wandb, which is not installed: pip install" in shown
    with pytest.raises(SystemExit) as stopped:
        train(place, tmp_path / "out", "--report-to", "paper")
    assert stopped.value.code == 2
