"""Whole parameters on the device can be read and written between passes, like those of any model.
"""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import infinity as inf
from infinity.errors import ParameterReleased, WeightWritten
from tests.distributed.ranks import on_ranks

LR = 0.05


def make() -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Sequential(
        torch.nn.Linear(5, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8), torch.nn.Linear(8, 2)
    )


def batch(index: int) -> torch.Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(index))


class Pair:
    """An offloaded model and a plain copy of it; tests change both in the same way."""

    def __init__(self, **policy: Any) -> None:
        self.plain = make()
        values: dict[str, Any] = {"params": "device", "optim": "cpu", "device": "cpu", **policy}
        self.model = inf.offload(copy.deepcopy(self.plain), inf.Policy(**values))
        self.handle = inf.handle(self.model)
        self.optimizer = inf.AdamW(self.model.parameters(), lr=LR)
        self.plain_optimizer = torch.optim.AdamW(self.plain.parameters(), lr=LR)
        self.batches = 0

    def both(self, change: Callable[[torch.nn.Module], Any]) -> None:
        """Do the same to both models. Results are equal."""
        mine, theirs = change(self.model), change(self.plain)
        if isinstance(theirs, torch.Tensor):
            assert torch.equal(mine, theirs)

    def step(self, loss_of: Callable[[torch.nn.Module, torch.Tensor], torch.Tensor]) -> None:
        self.batches += 1
        for model, optimizer in (
            (self.model, self.optimizer),
            (self.plain, self.plain_optimizer),
        ):
            loss_of(model, batch(self.batches)).backward()
            optimizer.step()
            optimizer.zero_grad()

    def check(self) -> None:
        """Compare the values that a read, a state dict and the masters have."""
        saved = self.model.state_dict()
        for (name, mine), theirs in zip(
            self.model.named_parameters(), self.plain.parameters(), strict=True
        ):
            # The engine's update and torch's round in another order.
            torch.testing.assert_close(mine.detach(), theirs.detach(), rtol=2e-6, atol=1e-7)
            assert torch.equal(mine.detach(), saved[name])
            state = self.handle.optimizer_state(mine)
            if "master" in state:
                assert torch.equal(state["master"].view(mine.shape), saved[name])


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    if not made.handle.closed:
        made.handle.close()


def plain_loss(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def decayed_loss(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A loss with a penalty that is computed from parameters outside of forward."""
    penalty = sum(p.float().square().sum() for p in model.parameters())
    return plain_loss(model, x) + 0.1 * penalty


@torch.no_grad()
def clip_weights(model: torch.nn.Module) -> None:
    for param in model.parameters():
        param.data.clamp_(-0.2, 0.2)


@torch.no_grad()
def scale_in_place(model: torch.nn.Module) -> None:
    next(iter(model.parameters())).mul_(1.5)


def assign_data(model: torch.nn.Module) -> None:
    last = list(model.parameters())[-1]
    last.data = torch.full_like(last, 0.25)


def norm(model: torch.nn.Module) -> torch.Tensor:
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach()


def evaluate(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(batch(0)).clone()


def test_values_are_read_at_once_and_after_each_step(pair: Pair) -> None:
    pair.both(norm)
    for _ in range(3):
        pair.step(plain_loss)
        pair.check()


def test_a_penalty_on_parameters_has_the_gradients_of_a_plain_model(pair: Pair) -> None:
    for _ in range(3):
        pair.step(decayed_loss)
    pair.check()


@pytest.mark.parametrize("write", [clip_weights, scale_in_place, assign_data])
def test_writes_are_kept_and_trained_on(
    pair: Pair, write: Callable[[torch.nn.Module], None]
) -> None:
    for _ in range(3):
        pair.step(plain_loss)
        pair.both(write)
        pair.check()
    pair.step(plain_loss)
    pair.check()


@settings(max_examples=25, deadline=None)
@given(st.lists(st.sampled_from(
    ["step", "decayed", "clip", "scale", "assign", "norm", "evaluate", "flush", "gather"]
), max_size=12))  # fmt: skip
def test_any_order_of_reads_writes_and_steps_is_a_plain_models(calls: list[str]) -> None:
    pair = Pair()
    try:
        for call in calls:
            if call == "step":
                pair.step(plain_loss)
            elif call == "decayed":
                pair.step(decayed_loss)
            elif call == "flush":
                pair.handle.flush()
            elif call == "gather":
                with pair.handle.gather(pair.model):
                    scale_in_place(pair.model)
                scale_in_place(pair.plain)
            else:
                {
                    "clip": clip_weights, "scale": scale_in_place, "assign": assign_data,
                    "norm": norm, "evaluate": evaluate,
                }[call](pair.model)  # fmt: skip
                {"clip": clip_weights, "scale": scale_in_place, "assign": assign_data}.get(
                    call, norm
                )(pair.plain)
        pair.check()
    finally:
        pair.handle.close()


def test_a_save_has_what_was_written(pair: Pair, tmp_path: Path) -> None:
    pair.step(plain_loss)
    clip_weights(pair.model)
    inf.save(pair.model, pair.optimizer, tmp_path / "saved").wait()
    kept = norm(pair.model)
    pair.step(plain_loss)
    inf.restore(pair.model, pair.optimizer, tmp_path / "saved")
    assert torch.equal(norm(pair.model), kept)


def test_a_write_through_a_tensor_of_before_the_step_raises(pair: Pair) -> None:
    param = next(iter(pair.model.parameters()))
    old = param.data
    pair.step(plain_loss)
    old.zero_()
    with pytest.raises(WeightWritten, match=r"0\.weight was written to through a tensor"):
        pair.model(batch(1))
    # The error was raised once only, and training continues.
    pair.model(batch(1))


def test_a_read_after_a_late_write_raises_and_then_shows_the_steps_values(pair: Pair) -> None:
    param = next(iter(pair.model.parameters()))
    old = param.data
    pair.step(plain_loss)
    pair.handle.flush()
    old.zero_()
    with pytest.raises(WeightWritten, match=r"0\.weight"):
        param.detach()
    pair.check()
    pair.step(plain_loss)
    pair.check()


def test_late_writes_are_all_named_and_leave_no_value_behind(pair: Pair) -> None:
    olds = [param.data for param in list(pair.model.parameters())[:2]]
    pair.step(plain_loss)
    pair.handle.flush()
    for old in olds:
        old.zero_()
    with pytest.raises(WeightWritten, match=r"0\.weight, 0\.bias"):
        pair.model(batch(1))
    # All parameters have the step's values again.
    pair.check()
    pair.step(plain_loss)
    pair.check()


@pytest.mark.parametrize("flag", [False, True])
def test_freezing_and_thawing_lose_no_write(pair: Pair, flag: bool) -> None:
    pair.step(plain_loss)
    for model in (pair.model, pair.plain):
        param = next(iter(model.parameters()))
        kept = param.data
        param.data.fill_(0.5)
        param.requires_grad_(flag)
        kept.mul_(2)
    pair.check()
    for model in (pair.model, pair.plain):
        next(iter(model.parameters())).requires_grad_(True)
    pair.step(decayed_loss)
    pair.check()


def test_a_write_between_forward_and_backward_raises_as_in_torch(pair: Pair) -> None:
    for model in (pair.plain, pair.model):
        loss = plain_loss(model, batch(1))
        with torch.no_grad():
            list(model.parameters())[2].mul_(3)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_a_tensor_that_is_kept_over_a_restore_shows_what_was_restored(
    pair: Pair, tmp_path: Path
) -> None:
    param = next(iter(pair.model.parameters()))
    inf.save(pair.model, pair.optimizer, tmp_path / "saved").wait()
    wanted, kept = param.detach().clone(), param.data
    pair.step(plain_loss)
    inf.restore(pair.model, pair.optimizer, tmp_path / "saved")
    assert torch.equal(param.detach(), wanted)
    assert torch.equal(kept, wanted)
    pair.handle.optimizer_state(param)["master"] = torch.zeros(param.shape)
    assert not param.detach().any()
    assert not kept.any()


def test_a_backward_through_values_of_before_the_step_raises(pair: Pair) -> None:
    penalty = next(iter(pair.model.parameters())).square().sum()
    pair.step(plain_loss)
    with pytest.raises(RuntimeError, match=r"backward through 0\.weight as it was read before"):
        penalty.backward()
    pair.handle.close()


@pytest.mark.parametrize("convert", ["half", "double", "bfloat16"])
def test_a_conversion_of_the_model_raises_and_changes_nothing(pair: Pair, convert: str) -> None:
    before = norm(pair.model)
    with pytest.raises(ValueError, match="fixed when the model was offloaded"):
        getattr(pair.model, convert)()
    assert torch.equal(norm(pair.model), before)


def test_parameters_that_thaw_later_get_gradients_from_reads(pair: Pair) -> None:
    first = next(iter(pair.model.parameters()))
    first.requires_grad_(False)
    assert not first.detach().isnan().any()
    first.requires_grad_(True)
    first.square().sum().backward()
    assert torch.equal(first.grad.materialize().view(first.shape), 2 * first.detach())


def test_parameters_of_other_policies_raise_as_ever() -> None:
    for policy in ({"params": "cpu"}, {"update": "backward"}):
        pair = Pair(**policy)
        with pytest.raises(ParameterReleased):
            next(iter(pair.model.parameters())).sum()
        pair.handle.close()


def _calls_per_parameter(layers: int) -> list[float]:
    """Count the calls (Python and C) of a first read, of a second read, and of a check for writes.
    """
    made = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(layers)))
    model = inf.offload(made, inf.Policy(params="device", optim="cpu", device="cpu"))
    handle, found = inf.handle(model), []

    def read() -> None:
        for param in model.parameters():
            param.detach()

    for action in (read, read, handle.check_open):
        calls = 0

        def count(_frame: Any, event: str, _argument: Any) -> None:
            nonlocal calls
            calls += event in ("call", "c_call")

        sys.setprofile(count)
        try:
            action()
        finally:
            sys.setprofile(None)
        found.append(calls / (2 * layers))
    handle.close()
    return found


def test_a_read_costs_the_same_however_many_parameters_there_are() -> None:
    few, many = _calls_per_parameter(20), _calls_per_parameter(160)
    for before, after in zip(few, many, strict=True):
        assert after <= 1.1 * before


# -- several ranks ---------------------------------------------------------------------------------


def read_alone(rank: int, place: Path, *, zero: int) -> list[float]:
    """Only rank 0 reads after each step; both ranks write the same values once, and train on."""
    pair = Pair(zero=zero)
    read = []
    with pair.handle.gather(pair.model):
        read.append(float(norm(pair.model).norm()))
    for index in range(3):
        pair.step(plain_loss)
        if rank == 0:
            # In another order than the model's.
            for param in reversed(list(pair.model.parameters())):
                param.detach().norm()
            read.append(float(norm(pair.model).norm()))
        if index == 1:
            clip_weights(pair.model)
            clip_weights(pair.plain)
    pair.check()
    pair.handle.close()
    return read


@pytest.mark.parametrize("zero", [1, 2])
def test_a_rank_reads_alone(tmp_path: Path, zero: int) -> None:
    first, second = on_ranks(functools.partial(read_alone, zero=zero), tmp_path / "run", 2)
    assert len(first) == 4
    assert first[:1] == second


def read_first(rank: int, place: Path) -> str:
    pair = Pair(zero=2)
    with pytest.raises(ParameterReleased) as caught:
        norm(pair.model)
    pair.handle.close()
    return str(caught.value)


def test_several_ranks_read_from_the_first_gather_on(tmp_path: Path) -> None:
    told = on_ranks(read_first, tmp_path / "run", 2)
    assert all("0.weight is on device" in text for text in told)


def write_alone(rank: int, place: Path) -> str:
    pair = Pair(zero=2, rank_timeout_s=20.0)
    pair.step(plain_loss)
    if rank == 0:
        clip_weights(pair.model)
    with pytest.raises(inf.errors.RankFailed) as caught:
        pair.step(plain_loss)
        pair.step(plain_loss)
        pair.handle.flush()
    pair.handle.close()
    return str(caught.value)


def test_a_write_of_one_rank_alone_is_told_to_both(tmp_path: Path) -> None:
    told = on_ranks(write_alone, tmp_path / "run", 2)
    assert any("writing 0." in text for text in told), told
