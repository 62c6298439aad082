"""Checkpoints of a durable run copy nothing: its files get second names, and what a checkpoint has
is never written again."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import infinity as inf
from infinity._src.engine.handle import offload
from infinity.aio import SwapFile
from tests import models
from tests.marks import mostly_slow
from tests.test_durable import STEPS, assert_same, made, policy, train, undisturbed, values_of


def states_files(tmp_path: Path) -> list[Path]:
    return sorted(
        path for path in (tmp_path / "infinity-run").iterdir() if path.name.startswith("states-")
    )


def restored(directory: Path, factory: Any = models.llama) -> tuple[int, dict[str, torch.Tensor]]:
    """The step and the values of a checkpoint, read into an engine of its own."""
    model = offload(models.make(factory), inf.Policy(params="cpu", optim="cpu"))
    optimizer = inf.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    step = inf.restore(model, optimizer, directory).step
    found = values_of(model)
    found |= {
        f"moment of {name}": inf.handle(model).optimizer_state(p)["exp_avg"]
        for name, p in model.named_parameters()
        if p.requires_grad
    }
    inf.handle(model).close()
    return step, found


@pytest.mark.parametrize(
    "factory",
    mostly_slow([models.llama, models.mixtral, models.lora], models.llama),
    ids=lambda factory: factory.__name__,
)
@pytest.mark.parametrize("update", ["deferred", "backward"])
def test_every_checkpoint_stays_what_it_was_while_training_goes_on(tmp_path, factory, update):
    losses, wanted = undisturbed(factory)
    model, optimizer = made(tmp_path, factory, update=update)
    got, seen = [], []
    for step in range(STEPS):
        got += train(model, optimizer, step, step + 1)
        save = inf.save(model, optimizer, tmp_path / f"step{step}")
        save.wait()
        assert save.copied_bytes == 0
        seen.append(restored(tmp_path / f"step{step}", factory))
        assert seen[-1][0] == step + 1
    assert got == losses
    assert_same(model, wanted)
    inf.handle(model).close()
    for step in range(STEPS):
        again = restored(tmp_path / f"step{step}", factory)
        assert [
            name for name, value in seen[step][1].items() if not torch.equal(value, again[1][name])
        ] == []


def test_files_that_are_given_up_are_no_objects_any_more(tmp_path):
    model, optimizer = made(tmp_path)
    counts = []
    for _ in range(3):
        for _ in range(2):
            inf.save(model, optimizer, tmp_path / "kept").wait()
            train(model, optimizer, 0, 1)
        inf.handle(model).flush()
        gc.collect()
        counts.append(sum(isinstance(each, SwapFile) for each in gc.get_objects()))
    assert counts[1] == counts[2]
    inf.handle(model).close()


def test_files_come_and_go(tmp_path):
    model, optimizer = made(tmp_path)
    train(model, optimizer, 0, 2)
    assert len(states_files(tmp_path)) == 2
    save = inf.save(model, optimizer, tmp_path / "kept")
    save.wait()
    names = {path.stat().st_ino for path in states_files(tmp_path)}
    linked = [path for path in (tmp_path / "kept").iterdir() if path.name.startswith("data")]
    assert len(linked) == 1
    assert linked[0].stat().st_ino in names
    assert linked[0].stat().st_nlink == 2
    train(model, optimizer, 2, 5)
    inf.handle(model).flush()
    assert len(states_files(tmp_path)) == 2  # the one that was linked is the checkpoint's alone
    assert linked[0].stat().st_nlink == 1
    inf.handle(model).close()
    os.sync()
    model, optimizer = made(tmp_path)
    assert inf.restore(model, optimizer, tmp_path).step == 5
    inf.handle(model).close()


def test_a_crash_after_a_linked_save_restores_the_run(tmp_path):
    losses, wanted = undisturbed()
    model, optimizer = made(tmp_path)
    train(model, optimizer, 0, 3)
    inf.save(model, optimizer, tmp_path / "kept").wait()
    train(model, optimizer, 3, 5)
    inf.handle(model).close()
    for source, step in ((tmp_path / "kept", 3), (tmp_path, 5)):
        other = tmp_path if source == tmp_path else tmp_path / "other"
        other.mkdir(exist_ok=True)
        model, optimizer = made(other)
        found = inf.restore(model, optimizer, source)
        assert found.step == step
        assert train(model, optimizer, step, STEPS) == losses[step:]
        assert_same(model, wanted)
        inf.handle(model).close()


def test_what_is_placed_anew_keeps_away_from_what_a_checkpoint_has(tmp_path):
    model = offload(models.make(models.llama), policy(tmp_path))
    first, *others = model.parameters()
    optimizer = inf.AdamW([first], lr=1e-2)
    for step in range(2):
        train(model, optimizer, step, step + 1)
    inf.save(model, optimizer, tmp_path / "kept").wait()
    before = restored_values(tmp_path / "kept")
    optimizer.add_param_group({"params": others})  # their states are new: everything moves
    train(model, optimizer, 2, 5)
    wanted = values_of(model)
    inf.handle(model).close()
    assert all(
        torch.equal(value, before[name])
        for name, value in restored_values(tmp_path / "kept").items()
    )
    again = restored_values(tmp_path)
    assert all(torch.equal(value, again[name]) for name, value in wanted.items())


def restored_values(directory: Path) -> dict[str, torch.Tensor]:
    model = offload(models.make(models.llama), inf.Policy(params="cpu", optim="cpu"))
    inf.restore(model, None, directory)
    found = values_of(model)
    inf.handle(model).close()
    return found


def test_a_checkpoint_is_replaced_by_the_next_while_the_run_goes_on(tmp_path):
    model, optimizer = made(tmp_path, io_backend="threads")
    train(model, optimizer, 0, 1)
    for step in range(1, 4):
        inf.save(model, optimizer, tmp_path / "kept").wait()
        train(model, optimizer, step, step + 1)
    inf.handle(model).close()
    assert restored(tmp_path / "kept")[0] == 3
