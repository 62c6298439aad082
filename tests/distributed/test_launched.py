"""Ranks that a launcher has started, and models that are offloaded before the ranks have met."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import infinity as inf
from infinity.errors import ProcessGroupChanged
from tests import models
from tests.distributed.ranks import on_ranks
from tests.harness import one_thread

WORLD = 2
BATCHES = models.token_batches(2)


def make(**values: Any) -> tuple[torch.nn.Module, inf.AdamW]:
    model = inf.offload(models.make(models.llama), inf.Policy(**values))
    return model, inf.AdamW(model.parameters(), lr=1e-2)


def train(model: torch.nn.Module, optimizer: inf.AdamW, seed: int) -> list[float]:
    losses = []
    for batch in models.token_batches(2, seed=seed):
        loss = models.loss_of(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("ranks", ["2", "16"])
def test_offload_before_the_ranks_have_met_is_refused(
    ranks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", ranks)
    model = models.make(models.llama)
    with pytest.raises(ValueError, match=f"WORLD_SIZE={ranks} .* TrainingArguments or Accelerator"):
        inf.offload(model, inf.Policy())
    models.loss_of(model, BATCHES[0]).backward()  # as it was


@pytest.mark.parametrize("ranks", ["1", "", "all"])
def test_a_launcher_of_one_rank_and_what_is_no_number_are_no_launch_of_several(
    ranks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", ranks)
    model, optimizer = make()
    train(model, optimizer, 0)
    inf.handle(model).close()


SCRIPT = """
import sys, torch, torch.distributed as dist, infinity as inf
first, place = sys.argv[1:]
if first == "group":
    dist.init_process_group("gloo")
torch.manual_seed(0)
model = inf.offload(torch.nn.Linear(8, 8), inf.Policy())
opt = inf.AdamW(model.parameters(), lr=1e-2)
model(torch.ones(2, 8)).sum().backward()
opt.step()
print(inf.handle(model).comm.world, "ranks")
inf.handle(model).close()
"""


@pytest.mark.ranks
@pytest.mark.parametrize("first", ["group", "model"])
def test_torchrun_trains_one_model_or_none(first: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
            str(script), first, str(tmp_path),
        ],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    if first == "group":
        assert done.returncode == 0, done.stderr[-2000:]
        assert done.stdout.count("2 ranks") == WORLD
    else:
        assert done.returncode != 0
        assert "WORLD_SIZE=2 is in the environment" in done.stderr
        assert "ranks" not in done.stdout


def group_since(rank: int, place: Path) -> list[str]:
    """Offload before the process group exists, and continue once it does. Returns the messages."""
    dist.barrier()  # the other rank may still be joining the first
    dist.destroy_process_group()
    model, optimizer = make()
    train(model, optimizer, rank)
    models.loss_of(model, BATCHES[0]).backward()
    store = dist.FileStore(str(place / "later"), WORLD)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD)
    found = []
    for call in (
        optimizer.step,
        lambda: models.loss_of(model, BATCHES[0]),
        lambda: inf.save(model, optimizer, place / "ckpt"),
    ):
        with pytest.raises(ProcessGroupChanged) as raised:
            call()
        found.append(str(raised.value))
    inf.handle(model).close()  # it can be closed all the same
    return found


def test_a_group_that_came_after_the_model_is_refused_at_the_next_pass_and_step(
    tmp_path: Path,
) -> None:
    for messages in on_ranks(group_since, tmp_path / "run", WORLD):
        assert len(messages) == 3
        for message in messages:
            assert "a process group of 2 ranks" in message
            assert "by an engine of 1 rank:" in message
            assert "before inf.offload(model, policy)" in message


def own_models(rank: int, place: Path) -> list[float]:
    """Each rank trains a separate model beside the shared one. Rank 0 has a separate model before
    rank 1 does."""
    mesh = init_device_mesh("cpu", (WORLD, 1), mesh_dim_names=("all", "own"))["own"]
    found = []
    if rank == 0:
        model, optimizer = make(mesh=mesh)
        found = train(model, optimizer, 7)
        inf.handle(model).close()
    shared, shared_optimizer = make()
    mine, my_optimizer = make(mesh=mesh)
    assert inf.handle(shared).comm.world == WORLD
    assert inf.handle(mine).comm.world == 1
    train(shared, shared_optimizer, 0)
    losses = train(mine, my_optimizer, rank)
    inf.handle(mine).close()
    inf.handle(shared).close()
    return losses + found


def own_directories(rank: int, place: Path) -> list[str]:
    mesh = init_device_mesh("cpu", (WORLD, 1), mesh_dim_names=("all", "own"))["own"]
    found = []
    for pattern in ("of{rank}", "local{local_rank}"):
        for each in range(WORLD):
            (place / pattern.format(rank=each, local_rank=each)).mkdir(exist_ok=True)
        model, _ = make(mesh=mesh, params="nvme", optim="nvme", nvme=place / pattern)
        found += [path.name for path in inf.handle(model).policy.directories]
        inf.handle(model).close()
    return found


def test_a_mesh_of_this_rank_alone_has_the_directories_of_the_rank(tmp_path: Path) -> None:
    results = on_ranks(own_directories, tmp_path / "run", WORLD)
    assert results == [[f"of{rank}", f"local{rank}"] for rank in range(WORLD)]


def test_a_mesh_of_this_rank_alone_makes_a_model_of_its_own(tmp_path: Path) -> None:
    results = on_ranks(own_models, tmp_path / "run", WORLD)
    for rank, losses in enumerate(results):
        model, optimizer = make()
        with one_thread():
            assert losses[:2] == train(model, optimizer, rank)
        inf.handle(model).close()
    assert len(results[0]) == 4
