"""First values and buffers of rank 0 on all ranks, where the policy asks for them, and refusals and
values of each rank's own where it does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity as inf
from infinity.errors import PeerFailed
from tests.distributed.ranks import named, on_ranks
from tests.reference import ReferenceAdamW

STAGES: tuple[dict[str, Any], ...] = (
    {"zero": 1, "params": "device"},
    {"zero": 2, "params": "device"},
    {"zero": 3},
    {"zero": 3, "params": "nvme", "optim": "nvme", "ram": "min"},
    {"zero": 3, "params": "nvme", "optim": "nvme", "durable": True},
)
Values = dict[str, torch.Tensor]


class Net(nn.Module):
    """Batch normalization, and buffers of several kinds. Each rank makes other values."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 10)
        self.norm = nn.BatchNorm1d(10)
        self.last = nn.Linear(10, 1)
        self.register_buffer("mask", torch.rand(10) < 0.5)
        self.register_buffer("table", torch.randn(3, 2, dtype=torch.bfloat16), persistent=False)
        self.register_buffer("phase", torch.randn(2, dtype=torch.complex64))
        self.register_buffer("count", torch.randint(0, 99, ()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.first(x)) * self.mask
        return self.last(x).square().mean()


def made(rank: int) -> Net:
    torch.manual_seed(rank)
    return Net()


def rows(rank: int, step: int, micro: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
    return torch.randn(5, 6, generator=generator)


def policy(place: Path, **chosen: Any) -> inf.Policy:
    if "nvme" in chosen.values():
        chosen["nvme"] = place
    return inf.Policy(**chosen)


def buffers(model: nn.Module) -> Values:
    return {name: value.clone() for name, value in model.named_buffers()}


def assert_equal(mine: Values, theirs: Values) -> None:
    assert mine.keys() == theirs.keys()
    for name, value in mine.items():
        assert value.dtype == theirs[name].dtype, name
        assert torch.equal(value, theirs[name]), name


def begins(rank: int, place: Path) -> list[tuple[Values, Values]]:
    """Seeds differ by rank."""
    found = []
    for number, chosen in enumerate(STAGES):
        home = place / str(number)
        home.mkdir(exist_ok=True)
        model = inf.offload(made(rank), policy(home, **chosen, sync_module_states=True))
        found.append(({**model.state_dict()}, buffers(model)))
        inf.handle(model).close()
    return found


def test_ranks_with_other_seeds_begin_with_the_values_and_buffers_of_rank_0(tmp_path: Path) -> None:
    wanted = made(0)
    for found in on_ranks(begins, tmp_path / "run", 2):
        for chosen, (values, held) in zip(STAGES, found, strict=True):
            with named(chosen):
                assert_equal(values, dict(wanted.state_dict()))
                assert_equal(held, buffers(wanted))


def on_meta(rank: int, _place: Path) -> tuple[Values, Values]:
    """Rank 0 alone has values; the other's model is on the meta device."""
    with torch.device("cpu" if rank == 0 else "meta"):
        model = made(rank)
    model = inf.offload(model, inf.Policy(sync_module_states=True))
    found = dict(model.state_dict()), buffers(model)
    inf.handle(model).close()
    return found


def test_models_of_the_other_ranks_may_be_on_meta(tmp_path: Path) -> None:
    wanted = made(0)
    for values, held in on_ranks(on_meta, tmp_path / "run", 2):
        assert_equal(values, dict(wanted.state_dict()))
        assert_equal(held, buffers(wanted))


def ddp(rank: int, steps: int, micros: int) -> list[Values]:
    """The buffers of each step's end with DDP, which takes rank 0's before the next forward."""
    model = made(rank)
    wrapped = nn.parallel.DistributedDataParallel(model)
    optimizer = ReferenceAdamW([{"params": list(model.parameters())}], lr=1e-2)
    found = []
    for step in range(steps):
        for micro in range(micros - 1):
            with wrapped.no_sync():
                wrapped(rows(rank, step, micro)).backward()
        wrapped(rows(rank, step, micros - 1)).backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(buffers(model))
    return found


def follows(rank: int, place: Path) -> list[tuple[list[Values], list[Values], list[Values]]]:
    """Buffers after each step: of rank 0 with DDP, with the engine, and in evaluation after it."""
    found = []
    for micros in (1, 3):
        theirs = ddp(rank, 3, micros)
        for number, chosen in enumerate(STAGES[:4]):
            home = place / f"{micros} {number}"
            home.mkdir(exist_ok=True)
            asked = {"sync_module_states": True, "broadcast_buffers": True, "accumulate": "local"}
            values = policy(home, **chosen, **asked)
            model = inf.offload(made(rank), values)
            handle, optimizer = inf.handle(model), inf.AdamW(model.parameters(), lr=1e-2)
            mine, seen = [], []
            for step in range(3):
                for micro in range(micros - 1):
                    with handle.no_sync():
                        model(rows(rank, step, micro)).backward()
                model(rows(rank, step, micros - 1)).backward()
                optimizer.step()
                optimizer.zero_grad()
                mine.append(buffers(model))
                model.eval()
                with torch.no_grad():
                    model(rows(rank, step, 99))
                model.train()
                seen.append(buffers(model))
            handle.close()
            found.append((theirs, mine, seen))
    return found


def test_running_statistics_are_those_of_rank_0_after_each_step_as_with_ddp(tmp_path: Path) -> None:
    ours = on_ranks(follows, tmp_path / "run", 2)
    for case, (theirs, _, _) in enumerate(ours[0]):
        # Between steps those of rank 0 are on all ranks here, and on rank 0 alone with DDP.
        for rank, found in enumerate(ours):
            _, mine, seen = found[case]
            for step, wanted in enumerate(theirs):
                with named(case, rank, step):
                    assert_equal(mine[step], wanted)
                    assert_equal(seen[step], mine[step])


def own(rank: int, place: Path) -> tuple[Values, str, str]:
    """Without the fields: buffers stay each rank's own, and other parameters are refused."""
    torch.manual_seed(0)
    model = Net()
    model.norm.running_mean.fill_(rank)
    model = inf.offload(model, inf.Policy())
    model(rows(rank, 0)).backward()
    held = buffers(model)
    inf.handle(model).close()
    with pytest.raises(ValueError, match="sync_module_states=True") as caught:
        inf.offload(made(rank), inf.Policy())
    torch.manual_seed(0)
    model = Net()
    with torch.no_grad():
        model.last.bias.add_(rank)
    with pytest.raises(ValueError, match="sync_module_states=True") as second:
        inf.offload(model, inf.Policy())
    del place
    return held, str(caught.value), str(second.value)


def test_without_the_fields_buffers_stay_different_and_different_parameters_raise(
    tmp_path: Path,
) -> None:
    (mine, told, one), (theirs, also, other) = on_ranks(own, tmp_path / "run", 2)
    assert not torch.equal(mine["norm.running_mean"], theirs["norm.running_mean"])
    assert told == also
    assert "the values of first.weight are not the same on all ranks" in told
    assert one == other
    assert "the values of last.bias are not the same on all ranks" in one


def unreadable(rank: int, _place: Path) -> tuple[str, Values]:
    """Rank 0 cannot read a value; then the ranks continue with values that it can read."""
    calls = []

    def load(name: str, tensor: torch.Tensor) -> None:
        calls.append(name)
        if name == "last.weight":
            raise OSError("cannot read it")
        tensor.fill_(7)

    wanted = OSError if rank == 0 else PeerFailed
    with pytest.raises(wanted, match="cannot read it") as caught:
        inf.offload(made(rank), inf.Policy(sync_module_states=True), load=load)
    # The others' sources are not read.
    assert calls if rank == 0 else not calls, calls
    model = inf.offload(
        made(rank),
        inf.Policy(sync_module_states=True),
        load=lambda _name, tensor: tensor.fill_(2 + rank),
    )
    found = dict(model.state_dict())
    inf.handle(model).close()
    return str(caught.value), found


def test_values_that_rank_0_cannot_read_are_an_error_on_all(tmp_path: Path) -> None:
    for told, found in on_ranks(unreadable, tmp_path / "run", 2):
        assert "cannot read it" in told
        assert all(bool((found[name] == 2).all()) for name in ("first.weight", "last.weight"))


def written_in_place(rank: int, _place: Path) -> list[bool]:
    """A graph that has saved a buffer runs backward after another backward: `mask` has the bits of
    rank 0 already, and is not written to."""
    model = inf.offload(made(rank), inf.Policy(sync_module_states=True, broadcast_buffers=True))
    model.eval()  # batch normalization saves its statistics
    first, second = model(rows(rank, 0)), model(rows(rank, 1))
    first.backward()
    second.backward()
    found = [parameter.grad is not None for parameter in model.parameters()]
    inf.handle(model).close()
    return found


def test_a_buffer_with_the_bits_of_rank_0_is_not_written_to(tmp_path: Path) -> None:
    for found in on_ranks(written_in_place, tmp_path / "run", 2):
        assert all(found)
