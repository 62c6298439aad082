"""Two generations on several ranks: if an update fails on some, the step is undone on all, and
training continues with the bits of a run without the fault."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity as inf
from infinity._src.distributed.watchdog import Watchdog
from infinity._src.engine.handle import offload
from infinity.aio import Fault, Seam
from infinity.errors import PeerFailed, RankFailed, StatesLost, StepUndone
from tests.crashes import digest
from tests.distributed.ranks import on_ranks

STEPS, STRUCK = 5, 2
NVME: dict[str, Any] = {"params": "nvme", "optim": "nvme", "ram": "min", "generations": 2}
DURABLE: dict[str, Any] = {"params": "nvme", "optim": "nvme", "ram": "min", "durable": True}
POLICIES: dict[str, dict[str, Any]] = {
    "deferred": NVME,
    "backward": {**NVME, "update": "backward"},
    "durable": DURABLE,
    "durable, every third": {**DURABLE, "durable_every": 3},
    "whole parameters": {**NVME, "zero": 2, "params": "device"},
    "secondary shards": {**NVME, "params": "device"},
    "a class of torch": NVME,
    "muon": NVME,
    "unused parameters": {**NVME, "zero": 2, "params": "device", "find_unused_parameters": True},
}


class Net(nn.Module):
    """A unit for each block, and no buffers, which an undone step would leave changed."""

    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(blocks))

    def forward(self, x: torch.Tensor, skipped: int | None = None) -> torch.Tensor:
        for index, block in enumerate(self.blocks):
            if index != skipped:
                x = x + torch.relu(block(x))
        return x.float().square().mean()


def stepped(model: Any, optimizer: Any, index: int, rank: int, *, skips: bool = False) -> float:
    """Take a step. skips: each rank leaves out a different block."""
    for group in optimizer.param_groups:
        group["lr"] = 1e-2 * 0.9**index
    generator = torch.Generator().manual_seed(1000 * rank + index)
    x = torch.randn(4, 64, generator=generator).bfloat16()
    loss = model(x, (index + 2 * rank) % 4 if skips else None)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


class Damage:
    """A section of this rank's part of a block that its drive cannot read, until it can."""

    def __init__(self, model: Any, block: int, section: int, seam: Seam) -> None:
        parts = inf.handle(model).parts
        (flat,) = next(unit.flats for unit in parts.split.units if f"blocks.{block}" in unit.name)
        self._executor, self._seam = parts.tiers.executor, seam
        (plan,) = self._executor.look(parts.tiers.store[flat].ids[:1])
        start = int(plan["file_offset"] + plan["section_at"][section])
        self._fault = Fault("read", 0, persistent=True, start=start, stop=start + 4096)
        self.there = False

    def toggle(self) -> None:
        self.there = not self.there
        self._executor.set_seam(
            dataclasses.replace(self._seam, fault=self._fault if self.there else None)
        )


@dataclasses.dataclass(frozen=True)
class Told:
    """Report of a rank: losses by step; for each StepUndone the steps that are left, whether a loss
    of the step after the struck one was seen, its text and the type of its cause."""

    losses: list[float]
    digest: str
    undone: list[tuple[int, bool]]
    texts: list[str]
    causes: list[str]
    counted: int


@dataclasses.dataclass(frozen=True)
class Case:
    """Training in which updates of the step STRUCK fail on `victims`, `times` times over."""

    name: str
    how: str  # "read", "write"; "gather": parameters of the step cannot be read, now or later
    victims: tuple[int, ...]
    times: int = 1
    mesh: tuple[int, int] | None = None

    def __call__(self, rank: int, place: Path) -> tuple[Told, Told]:
        undisturbed, writes = self.train(rank, place / "undisturbed", None)
        assert not undisturbed.undone
        # The writes of the step that is struck come after those of the steps before it.
        fault = Fault("write", writes + 3, lasting=True) if self.how == "write" else None
        return undisturbed, self.train(rank, place / "struck", fault, strikes=True)[0]

    def train(
        self, rank: int, drive: Path, fault: Fault | None, *, strikes: bool = False
    ) -> tuple[Told, int]:
        torch.manual_seed(0)
        drive.mkdir(exist_ok=True)
        values = {"unit_bytes_max": 2**14, "nvme": drive, **POLICIES[self.name]}
        if self.mesh is not None:
            from torch.distributed.device_mesh import init_device_mesh

            values["mesh"] = init_device_mesh("cpu", self.mesh, mesh_dim_names=("node", "rank"))
        mine = strikes and rank in self.victims
        seam = Seam(delay_us_max=300, seed=rank, fault=fault if mine else None)
        # The first blocks stay gathered from step to step: one that is not is read in forward.
        blocks = 16 if self.how == "gather" else 4
        model: Any = offload(Net(blocks).bfloat16(), inf.Policy(**values), _seam=seam)
        kinds: dict[str, Any] = {
            "a class of torch": functools.partial(inf.Elementwise, torch.optim.Adagrad),
            "muon": inf.Muon,
        }
        optimizer = kinds.get(self.name, inf.AdamW)(model.parameters(), lr=1e-2)
        handle, losses, undone, texts, causes, writes = inf.handle(model), {}, [], [], [], -1
        damage: Damage | None = None
        while True:
            done = handle.pipeline.steps
            try:
                if done in (STRUCK, STEPS):
                    handle.flush()
                if done == STEPS:
                    break
                if done == STRUCK and writes < 0:
                    stats = handle.parts.tiers.executor.stats()
                    writes = sum(each.writes for each in stats.drives)
                    if mine and self.how != "write":
                        # First moments are behind both parts of masters; no gather reads them.
                        block, section = (11, 0) if self.how == "gather" else (1, 2)
                        damage = Damage(model, block, section, seam)
                        damage.toggle()
                skips = self.name == "unused parameters"
                losses[done] = stepped(model, optimizer, done, rank, skips=skips)
            except StepUndone as error:
                undone.append((handle.pipeline.steps, STRUCK + 1 in losses))
                texts.append(str(error))
                causes.append(type(error.__cause__).__name__)
                optimizer.zero_grad()
                if self.how == "read" and damage is not None and len(undone) == self.times:
                    damage.toggle()
        told = Told(
            [losses[step] for step in sorted(losses)],
            digest(model), undone, texts, causes, handle.stats().steps_undone,
        )  # fmt: skip
        handle.close()
        return told, writes


def check(case: Case, results: list[tuple[Told, Told]]) -> None:
    for rank, (undisturbed, struck) in enumerate(results):
        assert struck.losses == undisturbed.losses, (rank, struck)
        assert struck.digest == undisturbed.digest
        # All raise at the same places of the program.
        assert struck.undone == results[0][1].undone
        assert struck.counted == len(struck.undone) == case.times
        if case.how == "read":
            # The gather that needs the shard raises: no loss of the next step is computed with
            # half-updated units.
            assert struck.undone == [(STRUCK, False)] * case.times
        for text, cause in zip(struck.texts, struck.causes, strict=True):
            assert (cause != PeerFailed.__name__) == (rank in case.victims), struck
            assert rank in case.victims or f"on rank {case.victims[0]}: " in text
            assert "the step was undone" in text


@pytest.mark.parametrize(
    ("name", "how", "victims", "times"),
    [
        ("deferred", "read", (0,), 2),
        pytest.param("deferred", "write", (0, 1), 1, marks=pytest.mark.ranks),
        ("backward", "read", (0, 1), 1),
        ("backward", "write", (1,), 1),
        ("durable", "read", (0, 1), 2),
        pytest.param("durable", "write", (0,), 1, marks=pytest.mark.ranks),
        ("durable, every third", "write", (1,), 1),
        pytest.param("whole parameters", "read", (1,), 1, marks=pytest.mark.ranks),
        pytest.param("secondary shards", "read", (0,), 1, marks=pytest.mark.ranks),
        pytest.param("a class of torch", "read", (1,), 1, marks=pytest.mark.ranks),
        # One of its first updates fails, while the other rank waits for parts of matrices.
        ("muon", "write", (0,), 1),
        pytest.param("unused parameters", "read", (0,), 1, marks=pytest.mark.ranks),
        ("unused parameters", "write", (1,), 1),
        ("deferred", "gather", (1,), 1),
        pytest.param("backward", "gather", (0, 1), 1, marks=pytest.mark.ranks),
    ],
)
def test_a_fault_of_some_ranks_undoes_the_step_on_all(
    tmp_path: Path, name: str, how: str, victims: tuple[int, ...], times: int
) -> None:
    case = Case(name, how, victims, times)
    check(case, on_ranks(case, tmp_path / "run", 2))


@pytest.mark.ranks
def test_ranks_that_hear_of_each_other_through_others_undo_together(tmp_path: Path) -> None:
    """Rank 2, the first rank of the second node, exchanges nothing with rank 1, the second rank of
    the first."""
    case = Case("deferred", "read", (1,), mesh=(2, 2))
    check(case, on_ranks(case, tmp_path / "run", 4))


def last_step_fails(rank: int, place: Path) -> tuple[list[int], str]:
    """The last step's update fails on rank 1, and `close()` is the next call. Returns the steps of
    the process and those that a second one finds, and the error of the first."""
    place = place / "drive"
    place.mkdir(exist_ok=True)
    writes = 0
    for strikes in (False, True):
        policy = inf.Policy(**DURABLE, nvme=place, unit_bytes_max=2**14)
        torch.manual_seed(0)
        fault = Fault("write", writes + 1, lasting=True) if strikes and rank == 1 else None
        model: Any = offload(Net().bfloat16(), policy, _seam=Seam(fault=fault))
        optimizer = inf.AdamW(model.parameters(), lr=1e-2)
        handle = inf.handle(model)
        stepped(model, optimizer, 0, rank)
        handle.flush()
        writes = sum(each.writes for each in handle.parts.tiers.executor.stats().drives)
        if not strikes:
            handle.close()
            place = place.parent / "struck"
            place.mkdir(exist_ok=True)
    stepped(model, optimizer, 1, rank)
    with pytest.raises(StepUndone) as caught:
        handle.close()
    model = offload(Net().bfloat16(), policy)
    optimizer = inf.AdamW(model.parameters(), lr=1e-2)
    found = inf.restore(model, optimizer, place).step
    inf.handle(model).close()
    return [handle.pipeline.steps, found], str(caught.value)


def test_a_durable_run_that_closes_commits_no_step_that_failed_on_one_rank(tmp_path: Path) -> None:
    for steps, text in on_ranks(last_step_fails, tmp_path / "run", 2):
        assert steps == [1, 1]
        assert "the step was undone" in text


@dataclasses.dataclass(frozen=True)
class Counted:
    """Collectives that ranks number in three steps, by name."""

    values: tuple[tuple[str, Any], ...]
    blocks: int

    def __call__(self, rank: int, place: Path) -> Counter[str]:
        found: Counter[str] = Counter()
        model: Any = inf.offload(
            Net(self.blocks).bfloat16(), inf.Policy(**dict(self.values), nvme=place)
        )
        optimizer = inf.AdamW(model.parameters(), lr=1e-2)
        number = Watchdog.next_number

        def numbered(self: Watchdog, what: str = "") -> int:
            found[what] += 1
            return number(self, what)

        for index in range(5):
            if index == 2:
                patch = pytest.MonkeyPatch()
                patch.setattr(Watchdog, "next_number", numbered)
            stepped(model, optimizer, index, rank)
        patch.undo()
        inf.handle(model).close()
        return found


def test_ranks_agree_once_in_a_step_however_many_units_there_are(tmp_path: Path) -> None:
    totals: dict[int, list[int]] = {}
    # Exchanges of one flag are the agreement; gradients exchange a flag for each parameter.
    for name, chosen, agreements in (
        ("deferred", NVME, 3),
        ("backward", {**NVME, "update": "backward"}, 3),
        ("one generation", {**NVME, "generations": 1}, 0),
    ):
        for blocks in (2, 5):
            job = Counted(tuple(chosen.items()), blocks)
            (found, _) = on_ranks(job, tmp_path / f"{name}{blocks}", 2)
            assert found["agreement of 1"] == agreements, name
            totals.setdefault(blocks, []).append(found.total())
    assert [two - one for two, _, one in totals.values()] == [3, 3]


@dataclasses.dataclass(frozen=True)
class Random:
    """Trainings in which any write fails on any ranks, in each mode."""

    seed: int
    count: int

    def __call__(self, rank: int, place: Path) -> list[tuple[Told, Told]]:
        chance, found = random.Random(self.seed), []
        place.mkdir(exist_ok=True)
        for name in ("deferred", "backward", "durable", "durable, every third"):
            undisturbed, _ = Case(name, "write", ()).train(rank, place / name, None)
            for index in range(self.count):
                victims = chance.choice(((0,), (1,), (0, 1)))
                # Requests of one rank: a step of it writes about ten times.
                faults = [Fault("write", chance.randrange(5, 60), lasting=True) for _ in range(2)]
                told, _ = Case(name, "write", victims).train(
                    rank, place / f"{name} {index}", faults[rank], strikes=True
                )
                found.append((undisturbed, told))
        return found


@pytest.mark.ranks
def test_whatever_write_fails_all_ranks_come_to_the_same_bits(tmp_path: Path) -> None:
    first, second = on_ranks(Random(0, 3), tmp_path / "run", 2)
    assert sum(len(struck.undone) for _, struck in first) >= 3
    for mine, theirs in zip(first, second, strict=True):
        for undisturbed, struck in (mine, theirs):
            assert (struck.losses, struck.digest) == (undisturbed.losses, undisturbed.digest)
            assert struck.undone == mine[1].undone


@dataclasses.dataclass(frozen=True)
class Lost:
    """Training on two ranks, of which rank 0 loses states of a block for good. Returns the type of
    each error, its text, the chunks that have older states, and the last loss."""

    damaged: str

    def __call__(self, rank: int, place: Path) -> tuple[list[str], str, int, float]:
        torch.manual_seed(0)
        policy = inf.Policy(**NVME, nvme=place, damaged=self.damaged, unit_bytes_max=2**14)
        model: Any = offload(Net().bfloat16(), policy, _seam=Seam())
        optimizer: Any = inf.AdamW(model.parameters(), lr=1e-2)
        handle, seen, text, loss = inf.handle(model), [], "", 0.0
        for index in range(2):
            stepped(model, optimizer, index, rank)
        handle.flush()
        if rank == 0:
            Damage(model, 1, 2, Seam()).toggle()
        while handle.pipeline.steps < STEPS and len(seen) < STEPS:
            try:
                loss = stepped(model, optimizer, handle.pipeline.steps, rank)
                handle.flush()
            except (StepUndone, StatesLost, RankFailed) as error:
                seen.append(type(error).__name__)
                text = str(error)
                optimizer.zero_grad()
                if not isinstance(error, StepUndone):
                    break
        older = handle.stats().older_chunks
        with contextlib.suppress(StatesLost, RankFailed):
            handle.close()
        return seen, text, older, loss


def test_all_ranks_end_and_name_states_that_one_has_lost(tmp_path: Path) -> None:
    (mine, text, _, _), (theirs, told, _, _) = on_ranks(Lost("raise"), tmp_path / "run", 2)
    assert mine == ["StepUndone", "StepUndone", "StatesLost"]
    assert theirs[:2] == mine[:2]
    assert theirs[-1] == "RankFailed"
    for each in (text, told):
        assert "the states of blocks.1.weight (elements 0 to" in each


def test_all_ranks_continue_with_older_states_of_one(tmp_path: Path) -> None:
    results = on_ranks(Lost("from-older"), tmp_path / "run", 2)
    (mine, _, older, loss), (theirs, _, others, same) = results
    assert mine == theirs == ["StepUndone"] * 3
    assert (older, others) == (1, 0)
    assert loss > 0
    assert same > 0
