"""Stages 1 and 2 with ranks that use different modules in different orders: gradients and
parameters equal DDP(find_unused_parameters=True) bit for bit."""

from __future__ import annotations

import dataclasses
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import nn

import infinity as inf
from infinity._src.engine.handle import offload
from infinity.aio import Seam
from infinity.errors import RankFailed
from tests.distributed.ranks import named, on_ranks
from tests.reference import ReferenceAdamW

WIDTH, BLOCKS = 24, 4
LR, DECAY = 1e-2, 0.1

Calls = tuple[int, ...]
"""The blocks that a forward calls, in order."""
Step = tuple[Calls, ...]
"""A step's micro-batches, of one rank."""
Program = tuple[tuple[Step, ...], ...]
"""The steps of each rank."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


class Dropped(nn.Module):
    """A stack of blocks; each call runs the given ones. `spare` is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        # Before the blocks: gathers end in this order, so waiting for it does not wait for the
        # blocks.
        self.last = nn.Linear(WIDTH, 1)
        self.blocks = nn.ModuleList([Block() for _ in range(BLOCKS)])
        self.spare = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, calls: Calls) -> torch.Tensor:
        x = self.first(x)
        for index in calls:
            x = self.blocks[index](x)
        return self.last(x).square().mean()


class Deep(Dropped):
    """Makes the given number of blocks."""

    def __init__(self, blocks: int) -> None:
        torch.manual_seed(5)
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(blocks)])


def fresh() -> Dropped:
    torch.manual_seed(5)
    return Dropped()


def rows(rank: int, step: int, micro: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
    return torch.randn(3, WIDTH, generator=generator)


Found = tuple[list[dict[str, torch.Tensor | None]], dict[str, torch.Tensor]]
"""The gradients of each step, and the parameters at the end, by name."""


def plain(rank: int, steps: Sequence[Step]) -> Found:
    """DDP, and the reference update."""
    model = fresh()
    wrapped = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = ReferenceAdamW(
        [{"params": list(model.parameters())}], lr=LR, weight_decay=DECAY, order=model.parameters()
    )
    grads = []
    for number, step in enumerate(steps):
        for micro, calls in enumerate(step):
            if micro + 1 < len(step):
                with wrapped.no_sync():
                    wrapped(rows(rank, number, micro), calls).backward()
            else:
                wrapped(rows(rank, number, micro), calls).backward()
        grads.append(gradients(model))
        optimizer.step()
        optimizer.zero_grad()
    return grads, {name: one.detach().clone() for name, one in model.named_parameters()}


def policy(**chosen: Any) -> inf.Policy:
    values = {
        "zero": 2,
        "params": "device",
        "optim": "cpu",
        "find_unused_parameters": True,
        "rank_timeout_s": 60.0,
        **chosen,
    }
    return inf.Policy(**values)


def delayed(rank: int, steps: Sequence[Step]) -> Found:
    """DDP that computes with the parameters before the last update."""
    model = fresh()
    wrapped = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = ReferenceAdamW([{"params": list(model.parameters())}], lr=LR, weight_decay=DECAY)
    grads: list[dict[str, torch.Tensor | None]] = []
    newest = [one.detach().clone() for one in model.parameters()]
    for number, (calls,) in enumerate(steps):
        wrapped(rows(rank, number, 0), calls).backward()
        grads.append(gradients(model))
        computes = [one.clone() for one in newest]
        # A master starts as the parameter at the first gradient, before any update.
        with torch.no_grad():
            for one, value in zip(model.parameters(), newest, strict=True):
                one.copy_(value)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for place, one in enumerate(model.parameters()):
                newest[place] = one.detach().clone()
                one.copy_(computes[place])
    return grads, dict(zip((name for name, _ in model.named_parameters()), newest, strict=True))


def gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    return {
        name: None if one.grad is None else one.grad.clone()
        for name, one in model.named_parameters()
    }


def ours(
    rank: int, steps: Sequence[Step], chosen: dict[str, Any], seam: Seam | None = None
) -> Found:
    model = offload(fresh(), policy(**chosen), _seam=seam)
    handle, optimizer = (
        inf.handle(model),
        inf.AdamW(model.parameters(), lr=LR, weight_decay=DECAY),
    )
    grads = []
    for number, step in enumerate(steps):
        for micro, calls in enumerate(step):
            if micro + 1 < len(step):
                with handle.no_sync():
                    model(rows(rank, number, micro), calls).backward()
            else:
                model(rows(rank, number, micro), calls).backward()
        grads.append({name: handle.full_grad(one) for name, one in model.named_parameters()})
        optimizer.step()
        optimizer.zero_grad()
    found = {name: value.clone() for name, value in model.state_dict().items()}
    handle.close()
    return grads, found


def assert_same(mine: Found, theirs: Found) -> None:
    for number, (one, other) in enumerate(zip(mine[0], theirs[0], strict=True)):
        assert one.keys() == other.keys()
        for name, grad in one.items():
            wanted = other[name]
            assert (grad is None) == (wanted is None), (number, name)
            assert grad is None or torch.equal(grad, wanted), (number, name)
    assert mine[1].keys() == theirs[1].keys()
    for name, value in mine[1].items():
        assert torch.equal(value, theirs[1][name]), name


@dataclasses.dataclass(frozen=True)
class Both:
    """The same programs with DDP and with the engine, under each policy."""

    programs: tuple[Program, ...]
    policies: tuple[dict[str, Any], ...]
    plain: Callable[[int, Sequence[Step]], Found] = plain

    def __call__(self, rank: int, place: Path) -> list[tuple[Found, list[Found]]]:
        found = []
        for of_ranks in self.programs:
            steps = of_ranks[rank]
            theirs = self.plain(rank, steps)
            mine = []
            for chosen in self.policies:
                values = dict(chosen, nvme=place) if "nvme" in chosen.values() else chosen
                mine.append(ours(rank, steps, values))
            found.append((theirs, mine))
        return found


def drawn(world: int, steps: int, micros: int, seed: int) -> Program:
    """Stochastic depth: each rank's forwards skip each block with probability one half."""
    odds = random.Random(seed)

    def calls() -> Calls:
        return tuple(index for index in range(BLOCKS) if odds.random() < 0.5)

    return tuple(
        tuple(tuple(calls() for _ in range(micros)) for _ in range(steps)) for _ in range(world)
    )


# Rank 0 runs the blocks that rank 1 skips; blocks in another order; twice; none.
CROSSED: Program = (
    (((0, 1),), ((3, 2, 1, 0),), ((),), ((1, 1, 2),), ((),)),
    (((2, 3),), ((0, 1, 2, 3),), ((0, 3),), ((2, 0),), ((),)),
)
POLICIES: tuple[dict[str, Any], ...] = (
    {},
    {"zero": 1},
    {"optim": "nvme", "ram": "min"},
    {"optim": "nvme", "generations": 2},
)


def test_gradients_and_parameters_equal_ddp_s_whatever_ranks_skip(
    tmp_path: Path,
) -> None:
    check(Both((CROSSED,), POLICIES), tmp_path)


def check(job: Both, tmp_path: Path) -> None:
    world = len(job.programs[0])
    for found in on_ranks(job, tmp_path / "run", world):
        for theirs, mine in found:
            for chosen, one in zip(job.policies, mine, strict=True):
                with named(chosen):
                    assert_same(one, theirs)


@settings(
    max_examples=3,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
@given(
    program=st.lists(
        st.lists(
            st.lists(st.integers(0, BLOCKS - 1), max_size=5).map(tuple), min_size=2, max_size=2
        ),
        min_size=3,
        max_size=4,
    )
)
def test_any_blocks_in_any_order_on_each_rank_give_the_bits_of_ddp(
    tmp_path_factory: pytest.TempPathFactory, program: list[list[Calls]]
) -> None:
    of_ranks = tuple(tuple((step[rank],) for step in program) for rank in range(2))
    check(Both((of_ranks,), ({},)), tmp_path_factory.mktemp("drawn"))


def test_sums_of_micro_batches_on_each_rank_are_those_of_ddp(tmp_path: Path) -> None:
    """A block may be skipped only in the last micro-batch, or in all but one."""
    local = {"accumulate": "local"}
    some: Program = (
        (((0,), (1, 2), ()), ((3,), (), (0,))),
        (((2,), (2,), (1,)), ((), (), ())),
    )
    check(Both((some,), ({"zero": 1}, local)), tmp_path)


@pytest.mark.ranks
def test_micro_batches_that_are_reduced_one_by_one_are_those_of_ddp_within_rounding(
    tmp_path: Path,
) -> None:
    job = Both((drawn(2, 1, 3, seed=8),), ({"accumulate": "shard"},))
    for ((theirs, (mine,)),) in on_ranks(job, tmp_path / "run", 2):
        for name, grad in mine[0][0].items():
            wanted = theirs[0][0][name]
            assert (grad is None) == (wanted is None), name
            if grad is not None and wanted is not None:
                torch.testing.assert_close(grad, wanted, rtol=1e-5, atol=1e-7)


def together(rank: int, _place: Path) -> list[Found]:
    """Micro-batches by `handle.accumulate`: those of rank 0 call the same blocks, those of rank 1
    do not."""
    found = []
    step: Step = (((0, 1), (0, 1)), ((2, 3), (3,)))[rank]
    for accumulates in (False, True):
        model = inf.offload(fresh(), policy(accumulate="local"))
        handle, optimizer = inf.handle(model), inf.AdamW(model.parameters(), lr=LR)
        batches = [(rows(rank, 0, micro), calls) for micro, calls in enumerate(step)]
        if accumulates:
            handle.accumulate(batches, lambda batch, model=model: model(*batch))
        else:
            with handle.no_sync():
                model(*batches[0]).backward()
            model(*batches[1]).backward()
        grads = [{name: handle.full_grad(one) for name, one in model.named_parameters()}]
        optimizer.step()
        found.append((grads, {name: one.clone() for name, one in model.state_dict().items()}))
        handle.close()
    return found


def test_ranks_agree_on_the_backwards_of_their_micro_batches(tmp_path: Path) -> None:
    for looped, accumulated in on_ranks(together, tmp_path / "run", 2):
        assert_same(accumulated, looped)


@pytest.mark.ranks
def test_delayed_updates_are_those_of_ddp_one_step_later(tmp_path: Path) -> None:
    chosen = {"update": "delayed", "delayed_warmup": 0}
    check(Both((CROSSED,), (chosen,), delayed), tmp_path)


@pytest.mark.ranks
def test_three_ranks_that_leave_out_other_blocks_are_ddp_within_rounding(tmp_path: Path) -> None:
    job = Both((drawn(3, 1, 1, seed=4),), ({}, {"zero": 1}))
    for ((theirs, found),) in on_ranks(job, tmp_path / "run", 3):
        for mine in found:
            for name, grad in mine[0][0].items():
                wanted = theirs[0][0][name]
                assert (grad is None) == (wanted is None), name
                if grad is not None and wanted is not None:
                    torch.testing.assert_close(grad, wanted, rtol=1e-5, atol=1e-7)


def slow_drive(rank: int, place: Path) -> tuple[Found, Found]:
    """Rank 0 skips every block, with late updates on its drive; rank 1 waits for them."""
    steps = [(tuple(range(BLOCKS)) if rank == 1 else (),)] * 3
    seam = Seam(delay_us_max=100_000, seed=3) if rank == 0 else None
    chosen = {"optim": "nvme", "ram": "min", "nvme": place, "rank_timeout_s": 20.0}
    return plain(rank, steps), ours(rank, steps, chosen, seam)


def test_a_rank_that_leaves_out_what_its_drive_brings_late_holds_no_other_up(
    tmp_path: Path,
) -> None:
    for theirs, mine in on_ranks(slow_drive, tmp_path / "run", 2):
        assert_same(mine, theirs)


def differs(rank: int, chosen: dict[str, Any], calls: Calls, *, backwards: int = 1) -> str:
    """Return the error of a rank that runs these blocks."""
    model = inf.offload(fresh(), inf.Policy(**chosen))
    optimizer = inf.AdamW(model.parameters(), lr=LR)
    try:
        with pytest.raises(RankFailed) as caught:
            for _ in range(2):
                for micro in range(backwards):
                    model(rows(rank, 0, micro), calls).backward()
                optimizer.step()
                optimizer.zero_grad()
    finally:
        inf.handle(model).close()
    return f"{type(caught.value).__name__}: {caught.value}"


def left_out(rank: int, _place: Path) -> list[str]:
    """Without the field, at stages 2 and 3."""
    calls = ((0, 1), (2, 3))[rank]
    two: dict[str, Any] = {"zero": 2, "params": "device", "rank_timeout_s": 20.0}
    return [differs(rank, chosen, calls) for chosen in (two, {"rank_timeout_s": 20.0})]


def test_ranks_that_skip_different_blocks_raise_and_name_the_field(tmp_path: Path) -> None:
    for told in zip(*on_ranks(left_out, tmp_path / "run", 2), strict=True):
        assert any("RanksDiverged" in text for text in told), told
        assert any("find_unused_parameters=True" in text for text in told), told
        assert not any("within 20 s" in text for text in told), told


def one_more(rank: int, _place: Path) -> str:
    """Rank 1 runs one backward more in each step."""
    chosen = {"zero": 2, "params": "device", "find_unused_parameters": True, "rank_timeout_s": 5.0}
    return differs(rank, chosen, ((0,), (1,))[rank], backwards=1 + rank)


def test_a_rank_with_another_number_of_backwards_raises(tmp_path: Path) -> None:
    told = on_ranks(one_more, tmp_path / "run", 2, timeout_s=60.0)
    assert any("RanksDiverged" in text or "within 5 s" in text for text in told), told


def alone(rank: int, _place: Path) -> list[dict[str, torch.Tensor]]:
    """Rank 0 evaluates alone between steps, or does not; before the last step all ranks abort a
    forward."""
    found = []
    steps = CROSSED[rank]
    for evaluates in (False, True):
        model = inf.offload(fresh(), policy())
        handle, optimizer = inf.handle(model), inf.AdamW(model.parameters(), lr=LR)
        for number, (calls,) in enumerate(steps):
            if evaluates and number == len(steps) - 1:
                with pytest.raises(TypeError):
                    model(rows(rank, 0, 0), (*calls, "no block"))
            model(rows(rank, number, 0), calls).backward()
            optimizer.step()
            optimizer.zero_grad()
            if evaluates and rank == 0:
                with torch.no_grad():
                    model(rows(rank, 9, 9), (3, 1))
        found.append({name: value.clone() for name, value in model.state_dict().items()})
        handle.close()
    return found


def test_one_rank_may_evaluate_alone_and_forwards_may_break_off(tmp_path: Path) -> None:
    for together, by_itself in on_ranks(alone, tmp_path / "run", 2):
        assert all(torch.equal(value, by_itself[name]) for name, value in together.items())


def counted(rank: int, _place: Path) -> list[tuple[int, int]]:
    """Count collectives, and function calls of the main thread, in a step of models of 4, 8 and 16
    blocks. Each rank runs every second block."""
    found = []
    for blocks in (4, 8, 16):
        model = inf.offload(Deep(blocks), policy())
        handle, optimizer = inf.handle(model), inf.AdamW(model.parameters(), lr=LR)
        watchdog = handle.parts.split.comm.watchdog
        assert watchdog is not None
        calls = 0

        def count(_frame: Any, event: str, _arg: Any) -> None:
            nonlocal calls
            calls += event == "call"

        for step in range(4):
            before, calls = watchdog._number, 0
            if step == 3:
                sys.setprofile(count)
            try:
                model(rows(rank, step, 0), tuple(range((rank + step) % 2, blocks, 2))).backward()
            finally:
                sys.setprofile(None)
            optimizer.step()
            optimizer.zero_grad()
            collectives = watchdog._number - before
        found.append((collectives, calls))
        handle.close()
    return found


def test_a_step_costs_the_same_for_each_unit_however_many_there_are(tmp_path: Path) -> None:
    for found in on_ranks(counted, tmp_path / "run", 2):
        few, some, many = found
        # A gather and a reduction of each unit.
        assert some[0] - few[0] == 2 * 4
        assert many[0] - some[0] == 2 * 8
        # A busy machine makes more calls of waits: allow for them.
        assert many[1] - some[1] <= 1.3 * 2 * (some[1] - few[1]), found
