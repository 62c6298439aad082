"""Checkpoints of 1 to 4 ranks, restored on 1 to 4: every state is the same bits."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import infinity as inf
from infinity._src.checkpoint import save as saving
from infinity._src.checkpoint.directory import newest_generation
from infinity._src.checkpoint.reader import Checkpoint
from infinity._src.checkpoint.reshard import ReshardJob
from infinity.errors import AioError, PeerFailed
from tests.distributed.ranks import on_ranks

WORLDS = (2, 1, 4, 3)
States = dict[str, Any]


def _train(values: dict[str, Any], place: Path) -> tuple[nn.Module, inf.AdamW]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(70, 90), nn.ReLU(), nn.Linear(90, 33), nn.BatchNorm1d(33)).to(
        torch.bfloat16
    )
    if "nvme" in values.values():
        values = {**values, "nvme": place}
    inf.offload(model, inf.Policy(**values))
    return model, inf.AdamW(
        [
            {"params": model[0].parameters()},
            {"params": [*model[2].parameters(), *model[3].parameters()]},
        ]
    )


def _step(model: nn.Module, opt: inf.AdamW, seed: int) -> None:
    model(
        torch.randn(4, 70, generator=torch.Generator().manual_seed(seed)).bfloat16()
    ).float().square().mean().backward()
    opt.step()
    opt.zero_grad()


def _states(model: nn.Module) -> States:
    handle = inf.handle(model)
    found: States = {name: value.clone() for name, value in model.state_dict().items()}
    for name, param in model.named_parameters():
        for key, value in handle.optimizer_state(param).items():
            found[f"{name}/{key}"] = value
    return found


Told = tuple[str, str, int]


@dataclasses.dataclass(frozen=True)
class RoundTrips:
    """Four processes that are a world of 2, of 1, of 4 and of 3, one after the other: they start
    slowly.

    In each world: restore what every world before saved, say what came; then train, save, and say
    what was saved.
    """

    top: Path

    def __call__(
        self, rank: int, place: Path
    ) -> tuple[dict[tuple[int, int], States], dict[int, States], Told]:
        came: dict[tuple[int, int], States] = {}
        saved: dict[int, States] = {}
        told: Told = ("", "", 0)
        dist.destroy_process_group()
        for count, world in enumerate(WORLDS):
            if rank >= world:
                continue
            if world > 1:  # waits for all of its ranks, and so for the world before
                dist.init_process_group(
                    "gloo", init_method=f"file://{place}/of{world}", rank=rank, world_size=world
                )
            for other in WORLDS[:count]:
                came[world, other] = self.restored(rank, world, other, place)
            saved[world], model, opt = self.saved(rank, world, place)
            if world == 2:
                told = self.faults(rank, model, opt)
            inf.handle(model).close()
            if world > 1:
                dist.destroy_process_group()
        dist.init_process_group(
            "gloo", init_method=f"file://{place}/last", rank=rank, world_size=max(WORLDS)
        )
        return came, saved, told

    def restored(self, rank: int, world: int, other: int, place: Path) -> States:
        """The states after a restore of what another world saved."""
        model, opt = _train(_policy(world), place)
        restored = inf.restore(model, opt, self.top / f"of{other}")
        assert restored.step == 2
        assert restored.extra == {"rank": rank if rank < other else 0}
        assert opt.param_groups[1]["lr"] == 0.5
        assert any(f"{other} ranks saved" in note for note in restored.notes)
        states = _states(model)
        inf.handle(model).close()
        return states

    def saved(self, rank: int, world: int, place: Path) -> tuple[States, nn.Module, inf.AdamW]:
        """The states that this world saves; it trains on after that."""
        model, opt = _train(_policy(world), place)
        _step(model, opt, 1)
        _step(model, opt, 2)
        opt.param_groups[1]["lr"] = 0.5
        for _ in range(2):  # the second replaces the first
            save = inf.save(model, opt, self.top / f"of{world}", extra={"rank": rank})
        save.wait()
        states = _states(model)
        _step(model, opt, 3)
        return states, model, opt

    def faults(self, rank: int, model: nn.Module, opt: inf.AdamW) -> Told:
        """The last rank cannot write; then the last rank cannot read. Returns the errors of each
        rank, and the generation that exists in between."""
        top, write, told = self.top / "faults", saving._SaveJob._write, []
        inf.save(model, opt, top).wait()
        if rank == 1:

            def fail(*_: object) -> None:
                raise AioError("no such luck", path="here", op="write")

            saving._SaveJob._write = fail  # type: ignore[method-assign]
        with pytest.raises(AioError) as caught:
            inf.save(model, opt, top).wait()
        told.append(str(caught.value))
        saving._SaveJob._write = write  # type: ignore[method-assign]
        generation = newest_generation(top)[0].generation
        dist.barrier()
        if rank == 1:
            (top / "buffers-00000001.rank1").unlink()
        dist.barrier()
        with pytest.raises(PeerFailed if rank == 0 else AioError) as caught:
            inf.restore(model, opt, top)
        told.append(str(caught.value))
        _step(model, opt, 4)  # nothing was written
        return told[0], told[1], generation


def _policy(world: int) -> dict[str, Any]:
    """Other units in every world, and another tier in every second one."""
    nvme = {"params": "nvme", "optim": "nvme", "ram": "min"} if world % 2 else {}
    return {"state": "compact", "unit_bytes_max": 2048 * world, **nvme}


@pytest.mark.ranks
def test_every_world_restores_what_others_saved_and_faults_reach_every_rank(tmp_path: Path) -> None:
    results = on_ranks(RoundTrips(tmp_path), tmp_path / "run", max(WORLDS))
    saved = results[0][1]
    for came, _, _ in results:
        for (world, other), states in came.items():
            assert states.keys() == saved[other].keys()
            for name, value in saved[other].items():
                same = (
                    torch.equal(states[name], value)
                    if isinstance(value, torch.Tensor)
                    else states[name] == value
                )
                assert same, (world, other, name)
    assert len(results[0][0]) == 6
    for world in WORLDS:
        manifests = newest_generation(tmp_path / f"of{world}")
        assert [one.rank for one in manifests] == list(range(world))
        assert manifests[0].generation == 2
        assert len(list((tmp_path / f"of{world}").iterdir())) == 4 * world
    first, second = results[0][2], results[1][2]
    assert "another rank failed to write its part" in first[0]
    assert "no such luck" in second[0]
    assert "rank 1 failed at restoring" in first[1]
    assert "buffers-00000001.rank1" in second[1]
    assert first[2] == second[2] == 1


@dataclasses.dataclass(frozen=True)
class Releasing:
    """Rank 1 cannot write. Rank 0 begins to write when rank 1 has updated. Returns the error."""

    top: Path

    def __call__(self, rank: int, place: Path) -> str:
        model, opt = _train(_policy(2), place)
        _step(model, opt, 1)
        updated, write = place / "updated", saving.write_part

        def write_part(*args: Any, **values: Any) -> None:
            if rank == 1:
                raise AioError("no such luck", path="here", op="write")
            deadline = time.monotonic() + 60
            while not updated.exists():
                assert time.monotonic() < deadline, "rank 1 waits for what rank 0 writes"
                time.sleep(0.01)
            write(*args, **values)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(saving, "write_part", write_part)
            save = inf.save(model, opt, self.top)
            _step(model, opt, 2)
            if rank == 1:
                inf.handle(model).flush()
                updated.touch()
            with pytest.raises(AioError) as caught:
                save.wait()
        inf.handle(model).close()
        return str(caught.value)


def test_a_rank_that_cannot_write_updates_before_the_other_ranks_have_written(
    tmp_path: Path,
) -> None:
    first, second = on_ranks(Releasing(tmp_path / "ckpt"), tmp_path / "run", 2)
    assert "another rank failed to write its part" in first
    assert "no such luck" in second


@dataclasses.dataclass(frozen=True)
class Restoring:
    """Two ranks restore a checkpoint, and what it was rewritten to for two."""

    top: Path

    def __call__(self, rank: int, place: Path) -> list[tuple[States, Any, tuple[str, ...]]]:
        found = []
        for name in ("one", "two"):
            model, opt = _train({"state": "compact"}, place)
            restored = inf.restore(model, opt, self.top / name)
            found.append((_states(model), restored.extra, restored.notes))
            inf.handle(model).close()
        return found


def test_a_checkpoint_that_was_rewritten_for_two_ranks_is_the_same(tmp_path: Path) -> None:
    model, opt = _train({"state": "compact"}, tmp_path)
    _step(model, opt, 1)
    inf.save(model, opt, tmp_path / "one", extra={"epoch": 3}).wait()
    inf.handle(model).close()
    with Checkpoint.open(tmp_path / "one") as checkpoint:
        ReshardJob(checkpoint, world=2).write(tmp_path / "two")
    for (ours, extra, notes), (theirs, other, _) in (
        tuple(reversed(found)) for found in on_ranks(Restoring(tmp_path), tmp_path / "run", 2)
    ):
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            assert (
                torch.equal(ours[name], value)
                if isinstance(value, torch.Tensor)
                else ours[name] == value
            ), name
        assert extra == other == {"epoch": 3}
        assert notes == ()


def _adapted(place: Path, **values: Any) -> tuple[nn.Module, inf.AdamW]:
    """A frozen layer, and one that is trained."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(70, 900), nn.ReLU(), nn.Linear(900, 33)).to(torch.bfloat16)
    model[0].requires_grad_(False)
    inf.offload(model, inf.Policy(params="nvme", optim="nvme", nvme=place, ram="min", **values))
    return model, inf.AdamW(model.parameters())


@dataclasses.dataclass(frozen=True)
class Adapting:
    """Save without what is frozen, after a save that the ranks ask for differently. Restore it.
    Returns the states and the refusal."""

    top: Path

    def __call__(self, rank: int, place: Path) -> tuple[States, str]:
        model, opt = _adapted(place)
        _step(model, opt, 1)
        inf.save(model, opt, self.top).wait()
        with pytest.raises(ValueError, match="different parameters on some ranks") as refused:
            inf.save(model, opt, self.top, frozen=rank == 0)
        assert newest_generation(self.top)[0].generation == 1
        inf.save(model, opt, self.top, frozen=False).wait()
        inf.handle(model).close()
        model, opt = _adapted(place, state="compact")
        assert inf.restore(model, opt, self.top).step == 1
        inf.handle(model).close()
        model, opt = _adapted(place)
        inf.restore(model, opt, self.top)
        _step(model, opt, 2)
        return _trained_states(model), str(refused.value)


def _trained_states(model: nn.Module) -> States:
    handle = inf.handle(model)
    found: States = {name: value.clone() for name, value in model.state_dict().items()}
    for name, param in model.named_parameters():
        if param.requires_grad:
            for key, value in handle.optimizer_state(param).items():
                found[f"{name}/{key}"] = value
    handle.close()
    return found


def test_adapters_of_two_ranks_are_restored_on_one_and_ranks_save_alike(tmp_path: Path) -> None:
    (theirs, _), (others, _) = on_ranks(Adapting(tmp_path / "ckpt"), tmp_path / "run", 2)
    model, opt = _adapted(tmp_path)
    restored = inf.restore(model, opt, tmp_path / "ckpt")
    assert "0.weight, 0.bias, 63,900 frozen elements in all" in restored.notes[-1]
    # Each rank continued training with the same batch, so the result is that of one rank.
    _step(model, opt, 2)
    ours = _trained_states(model)
    for name, value in ours.items():
        for each in (theirs[name], others[name]):
            same = torch.equal(each, value) if isinstance(value, torch.Tensor) else each == value
            assert same, name
