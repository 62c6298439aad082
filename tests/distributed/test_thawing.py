"""Parameters that are unfrozen after the offload, on several ranks: the same results as on one."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import infinity as inf
from infinity.errors import BudgetError, RankFailed, RanksDiverged
from tests import harness, models
from tests.distributed.plain_ranks import Rules, assert_modelled
from tests.distributed.ranks import assert_ranks_agree, named, on_ranks, shard_of
from tests.harness import Result, Training
from tests.marks import mostly_ranks

CPU: dict[str, Any] = {"params": "cpu", "optim": "cpu"}
DEVICE: dict[str, Any] = {"params": "device", "optim": "cpu"}
NVME: dict[str, Any] = {"params": "nvme", "optim": "nvme", "ram": "min"}
SPECULATING = {"update": "backward", "generations": 2}
FEEDBACK = {"qgz": True, "error_feedback": True}
FROZEN = ("embed_tokens", "layers.1.mlp", "q_proj")
"""A whole unit, and parts of others."""


def frozen_llama(parts: Sequence[str] = FROZEN, layers: int = 3) -> nn.Module:
    model = models.llama(layers)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(part in name for part in parts))
    return model


LLAMA = Training(
    frozen_llama, steps=3, accumulation=2, rows=4, lr=2e-3, max_norm=None, no_sync=True
)


@dataclasses.dataclass(frozen=True)
class Thawed:
    """Train on this rank's rows under each policy; frozen parameters are unfrozen before the
    optimizer is built."""

    runs: tuple[tuple[Training, dict[str, Any]], ...]

    def __call__(self, rank: int, place: Path) -> list[Result]:
        return [
            self.trained(shard_of(training, rank, dist.get_world_size()), place, chosen)
            for training, chosen in self.runs
        ]

    def trained(self, training: Training, place: Path, chosen: dict[str, Any]) -> Result:
        values = {"nvme": place, **chosen} if "nvme" in chosen.values() else chosen
        model = inf.offload(training.model(), inf.Policy(**values))
        handle = inf.handle(model)
        model.requires_grad_(True)
        try:
            optimizer = training.make_optimizer(model)
            clip = functools.partial(harness._clip, model, training.max_norm)
            losses, norms, seen = harness.run_loop(
                training, model, optimizer, clip, no_sync=handle.no_sync
            )
            return Result(losses, norms, seen, harness.values_of(model))
        finally:
            handle.close()


def trained(
    runs: Sequence[tuple[Training, dict[str, Any]]], place: Path, world: int
) -> list[list[Result]]:
    """The results of each run, by rank; ranks agree."""
    found = [
        list(results) for results in zip(*on_ranks(Thawed(tuple(runs)), place, world), strict=True)
    ]
    for (_, chosen), results in zip(runs, found, strict=True):
        with named(chosen):
            assert_ranks_agree(results)
    return found


@pytest.mark.ranks
@pytest.mark.parametrize("world", [2, 3])
def test_what_is_thawed_before_the_optimizer_is_built_trains_as_if_it_had_never_been_frozen(
    tmp_path: Path, world: int
) -> None:
    training = dataclasses.replace(LLAMA, rows=6)
    wide, clipped = (
        dataclasses.replace(training, **values)
        for values in ({"grad_dtype": torch.float32}, {"max_norm": 0.7})
    )
    runs: list[tuple[Training, dict[str, Any], Rules]] = [
        (training, {"zero": 1, **DEVICE}, Rules(local=True)),
        (training, {"zero": 2, **DEVICE}, Rules()),
        (training, {"zero": 3, **CPU}, Rules()),
        (training, {"zero": 3, **CPU, "accumulate": "local"}, Rules(local=True)),
        (training, {"zero": 3, **NVME, "update": "backward"}, Rules()),
        (training, {"zero": 1, **DEVICE, "update": "backward"}, Rules(local=True)),
        (training, {"zero": 3, **NVME, **SPECULATING}, Rules()),
        (training, {"zero": 3, **CPU, **FEEDBACK}, Rules(qgz=True, feedback=True)),
        (
            training,
            {"zero": 2, **DEVICE, **FEEDBACK, "accumulate": "local"},
            Rules(local=True, qgz=True, feedback=True),
        ),
        (wide, {"zero": 1, **DEVICE, "grad_dtype": torch.float32}, Rules(local=True)),
        (clipped, {"zero": 3, **NVME}, Rules()),
        (clipped, {"zero": 1, **DEVICE}, Rules(local=True)),
    ]
    runs = runs if world == 2 else runs[::3]
    found = trained([(each, chosen) for each, chosen, _ in runs], tmp_path / "run", world)
    for (each, chosen, rules), results in zip(runs, found, strict=True):
        with named(chosen):
            assert_modelled(results, dataclasses.replace(each, factory=models.llama), rules)


DEEP = dataclasses.replace(
    LLAMA, factory=functools.partial(frozen_llama, ("layers.1.self_attn",), 6)
)


def spilling(rank: int, place: Path) -> Result:
    """With the minimum budget for the unfrozen parameters the states of others do not fit, and
    training continues."""
    training = shard_of(DEEP, rank, dist.get_world_size())
    nowhere = {"params": 0.0, "optim": 0.0}
    chosen = {
        "params": "nvme",
        "optim": "nvme",
        "grads": "nvme",
        "resident": nowhere,
        "unit_bytes_max": 4096,
    }
    with pytest.raises(BudgetError) as caught:
        inf.offload(training.model(), inf.Policy(nvme=place, ram=1, **chosen))
    least = int(str(caught.value).split("works is ")[1].split(" bytes")[0])
    model = inf.offload(training.model(), inf.Policy(nvme=place, ram=least, **chosen))
    handle = inf.handle(model)
    groups = training.param_groups(model)
    model.requires_grad_(True)
    with pytest.raises(BudgetError, match="too small"):
        training.make_optimizer(model)
    optimizer = inf.AdamW(groups, lr=training.lr, weight_decay=training.weight_decay)
    losses, norms, seen = harness.run_loop(
        training, model, optimizer, lambda: torch.tensor(0.0), no_sync=handle.no_sync
    )
    result = Result(losses, norms, seen, harness.values_of(model), handle.stats().spilled_bytes)
    models.loss_of(model, training.batches[0]).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    handle.close()
    return result


@pytest.mark.ranks
def test_unfrozen_parameters_without_an_optimizer_have_gradients_besides_spilled_ones(
    tmp_path: Path,
) -> None:
    results = on_ranks(spilling, tmp_path / "run", 2)
    assert all(result.stats > 0 for result in results)
    assert_modelled(results, DEEP)


class Pair(nn.Module):
    """A unit with two used layers, and a following unit."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)) for _ in range(3)]
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


def pair(
    frozen: Sequence[str], dtype: torch.dtype = torch.float32, **chosen: Any
) -> tuple[Any, inf.Handle]:
    """Return an offloaded model; parameters whose names begin with `frozen` are frozen."""
    torch.manual_seed(0)
    model = Pair().to(dtype)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(tuple(frozen)))
    inf.offload(model, inf.Policy(**{**CPU, "rank_timeout_s": 60.0, **chosen}))
    return model, inf.handle(model)


def backward(model: Any, index: int) -> None:
    """The same rows on every rank: a mean over two is exact."""
    dtype = next(model.parameters()).dtype
    model(torch.randn(4, 64, generator=torch.Generator().manual_seed(index)).to(dtype)).backward()


def in_turns(
    _rank: int, _place: Path | None, *, held: bool = False, **chosen: Any
) -> dict[str, torch.Tensor]:
    """Thawed after some steps, held by a second optimizer then (`held`: by the first, all the
    time); in between it has gradients that nobody holds; frozen again."""
    model, handle = pair(["blocks.1", "blocks.2.1"], **chosen)
    first = inf.AdamW([each for each in model.parameters() if held or each.requires_grad], lr=1e-2)
    optimizers = [first]
    for index in range(6):
        if index == 1:
            model.requires_grad_(True)
        if index == 3 and not held:
            taken = {id(each) for group in first.param_groups for each in group["params"]}
            optimizers.append(
                inf.AdamW([each for each in model.parameters() if id(each) not in taken], lr=1e-2)
            )
        model.blocks[1][0].requires_grad_(index != 5)
        with handle.no_sync():
            backward(model, 2 * index)
        backward(model, 2 * index + 1)
        assert all((each.grad is not None) == each.requires_grad for each in model.parameters())
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad()
    values = model.state_dict()
    handle.close()
    return {name: value.clone() for name, value in values.items()}


TURNS: list[dict[str, Any]] = [
    {**DEVICE, "zero": 1},
    {**DEVICE, "zero": 2},
    {"accumulate": "local"},
    {"generations": 2},
    SPECULATING,
    {"update": "backward"},
]


def turns(held: bool) -> list[dict[str, Any]]:
    """Fewer with one optimizer: policies differ on the way to it, and not behind it."""
    return TURNS[::3] if held else TURNS


@dataclasses.dataclass(frozen=True)
class AllTurns:
    """`in_turns` under each policy."""

    held: bool

    def __call__(self, rank: int, place: Path) -> list[dict[str, torch.Tensor]]:
        return [in_turns(rank, place, held=self.held, **chosen) for chosen in turns(self.held)]


@pytest.mark.parametrize("held", [False, True], ids=["second optimizer", "one optimizer"])
def test_thawed_in_the_middle_of_training_it_is_as_on_one_rank(held: bool, tmp_path: Path) -> None:
    wanted = in_turns(0, None, held=held)
    for found in on_ranks(AllTurns(held), tmp_path / "run", 2):
        for chosen, values in zip(turns(held), found, strict=True):
            with named(chosen):
                assert all(torch.equal(value, wanted[name]) for name, value in values.items())


def memory(_rank: int, _place: Path) -> list[int]:
    """Return the bytes by which `whole_grad_bytes`, `feedback_bytes` and `scratch_bytes` grow when
    an optimizer takes thawed parameters."""
    chosen: dict[str, Any] = {"accumulate": "local", **FEEDBACK}
    model, handle = pair(["blocks.1", "blocks.2.1"], **chosen)
    before = handle.stats()
    model.requires_grad_(True)
    inf.AdamW(model.parameters(), lr=1e-2)
    after = handle.stats()
    handle.close()
    parts = ("whole_grad_bytes", "feedback_bytes", "scratch_bytes")
    return [getattr(after, name) - getattr(before, name) for name in parts]


def test_what_thawed_gradients_need_on_their_way_is_counted_when_an_optimizer_holds_them(
    tmp_path: Path,
) -> None:
    for whole, feedback, counted in on_ranks(memory, tmp_path / "run", 2):
        assert whole > 0
        assert feedback > 0
        assert counted == whole + feedback


def held_apart(rank: int, _place: Path) -> list[tuple[str, str]]:
    """Ranks unfreeze different parameters of one optimizer."""
    found = []
    for of in THAWS:
        model, handle = pair(["blocks.1", "blocks.2.1"])
        optimizer = inf.AdamW(model.parameters(), lr=1e-2)
        backward(model, 0)
        optimizer.step()
        optimizer.zero_grad()
        of(model, rank).requires_grad_(True)
        try:
            with pytest.raises((ValueError, RankFailed)) as caught:
                backward(model, 1)
            found.append((type(caught.value).__name__, str(caught.value)))
        finally:
            handle.close()
    return found


def test_ranks_that_unfreeze_other_parameters_of_an_optimizer_are_told_at_once(
    tmp_path: Path,
) -> None:
    for *others, alone in on_ranks(held_apart, tmp_path / "run", 2):
        assert [kind for kind, _ in others] == ["ValueError"] * 3
        assert all("parameters: all ranks must do the same" in text for _, text in others)
        assert alone[0] == "RanksDiverged"


THAWS: list[Callable[[Any, int], Any]] = [
    # another parameter of one unit, where all were frozen
    lambda model, rank: model.blocks[1][rank],
    lambda model, rank: model.blocks[2][1].weight if rank else model.blocks[2][1].bias,
    lambda model, rank: model.blocks[1 + rank],  # another unit
    lambda model, rank: model.blocks[1] if rank else nn.Identity(),  # on one rank alone
]


EARLY = {"update": "backward", "on_nonfinite": "ignore"}
APART: dict[str, tuple[dict[str, Any], list[Callable[[Any, int], Any]]]] = {
    "whole": ({}, THAWS),
    "stage 1": ({**DEVICE, "zero": 1}, THAWS[:2]),
    "stage 2": ({**DEVICE, "zero": 2}, THAWS[:1]),
    "early": (EARLY, THAWS[1:]),
}


@dataclasses.dataclass(frozen=True)
class Apart:
    """Ranks unfreeze different parameters, in several ways."""

    cases: tuple[str, ...]

    def __call__(self, rank: int, place: Path) -> list[tuple[str, bool]]:
        return [found for case in self.cases for found in thaw_apart(rank, *APART[case])]


def thaw_apart(
    rank: int, chosen: dict[str, Any], thaws: list[Callable[[Any, int], Any]]
) -> list[tuple[str, bool]]:
    found = []
    for of in thaws:
        model, handle = pair(["blocks.1", "blocks.2.1"], **chosen)
        optimizer = inf.AdamW(
            [each for each in model.parameters() if each.requires_grad], lr=1e-2
        )
        of(model, rank).requires_grad_(True)
        try:
            if of is not THAWS[-1]:  # each rank has some parameters for its optimizer
                with pytest.raises(
                    ValueError, match="building an optimizer: all ranks must do the same"
                ):
                    inf.AdamW(
                        set(model.parameters()) - set(optimizer.param_groups[0]["params"]),
                        lr=1e-2,
                    )
            with pytest.raises(RankFailed) as caught:
                with handle.no_sync():
                    backward(model, 0)
                backward(model, 1)
                optimizer.step()
            found.append((str(caught.value), isinstance(caught.value, RanksDiverged)))
        finally:
            handle.close()
    return found


@pytest.mark.parametrize(
    "cases",
    mostly_ranks([("stage 2", "early"), ("whole", "stage 1")], ("stage 2", "early")),
    ids=str,
)
def test_ranks_that_thaw_other_parameters_are_told_so(
    cases: tuple[str, ...], tmp_path: Path
) -> None:
    for told in zip(*on_ranks(Apart(cases), tmp_path / "run", 2), strict=True):
        assert any(diverged for _, diverged in told) or all(
            "has reached" in text for text, _ in told
        ), told
        assert any("blocks." in text for text, _ in told), told


def doubles(_rank: int, _place: Path) -> list[str]:
    """Models in fp64 may be evaluated; an optimizer is refused, and so is the first gradient
    without one."""
    found = []
    for frozen, thawed in (((), None), (["blocks"], 2)):
        model, handle = pair(frozen, torch.float64)
        with torch.no_grad():
            model(torch.ones(4, 64, dtype=torch.float64))
        if thawed is not None:
            model.blocks[thawed].requires_grad_(True)
        with pytest.raises(ValueError, match="cast the model"):
            inf.AdamW(model.parameters())
        with pytest.raises(ValueError, match="cast the model") as caught:
            backward(model, 0)
        found.append(str(caught.value))
        handle.close()
    return found


def test_gradients_that_ranks_do_not_reduce_are_refused_by_name(tmp_path: Path) -> None:
    for untouched, thawed in on_ranks(doubles, tmp_path / "run", 2):
        assert "blocks.2.0.weight is torch.float64" in untouched
        assert "blocks.2.0.weight is torch.float64" in thawed
