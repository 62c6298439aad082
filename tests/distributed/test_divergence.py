"""Ranks whose programs, policies or values differ raise; permitted differences change nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import infinity as inf
from infinity.errors import EngineClosed, RankFailed, RanksDiverged
from tests import models
from tests.distributed.ranks import on_ranks

STEPS = 3


def offloaded(place: Path, **chosen: Any) -> tuple[Any, inf.Handle]:
    values = {
        "params": "nvme",
        "optim": "nvme",
        "ram": "min",
        "nvme": place,
        "rank_timeout_s": 60.0,
        **chosen,
    }
    model = inf.offload(models.make(models.llama), inf.Policy(**values))
    return model, inf.handle(model)


def build(place: Path, **chosen: Any) -> tuple[Any, Any, inf.AdamW]:
    model, handle = offloaded(place, **chosen)
    return model, handle, inf.AdamW(model.parameters(), lr=1e-2)


@contextlib.contextmanager
def raising(handle: inf.Handle, kind: type[Exception] = RankFailed) -> Iterator[list[str]]:
    """Assert that the body raises `kind`, then close the engine. Yields a list that gets the
    message."""
    told: list[str] = []
    try:
        with pytest.raises(kind) as caught:
            yield told
        told.append(str(caught.value))
    finally:
        handle.close()


def backward(model: Any, rank: int, index: int) -> None:
    models.loss_of(model, models.token_batches(8, seed=rank)[index]).backward()


def weights(model: Any) -> list[torch.Tensor]:
    return [value.clone() for value in model.state_dict().values()]


def norm_alone(rank: int, place: Path) -> str:
    """Rank 0 takes a norm, rank 1 does not: one waits in the control stream, the other in the
    gather stream."""
    model, handle, optimizer = build(place)
    with raising(handle) as told:
        backward(model, rank, 0)
        if rank == 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        backward(model, rank, 1)
        handle.flush()
        model.state_dict()
    return told[0]


def test_a_norm_on_one_rank_alone_raises_on_both(tmp_path: Path) -> None:
    told = on_ranks(norm_alone, tmp_path / "run", 2)
    assert all("has reached" in text or "failed" in text for text in told), told
    assert not any("did not reach it" in text or "within 60 s" in text for text in told), told


class Beside(torch.nn.Module):
    """A model with a module that forward does not call."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(2))
        self.idle = torch.nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def gathers_alone(rank: int, place: Path) -> tuple[str, bool]:
    """Rank 0 gathers a unit, while rank 1 continues backward with units in memory: one waits for a
    gather, the other for a reduction, at different collectives."""
    torch.manual_seed(0)
    model: Any = inf.offload(
        Beside(), inf.Policy(params="cpu", optim="cpu", unit_bytes_max=20_000, rank_timeout_s=60.0)
    )
    try:
        with pytest.raises(RankFailed) as caught:
            loss = model(torch.randn(4, 64)).square().mean()
            if rank == 0:
                with inf.handle(model).gather([model.idle.weight]):
                    pass
            loss.backward()
            inf.handle(model).flush()
    finally:
        inf.handle(model).close()
    return str(caught.value), isinstance(caught.value, RanksDiverged)


def test_ranks_that_wait_in_two_streams_for_each_other_are_told_both_names(tmp_path: Path) -> None:
    told = on_ranks(gathers_alone, tmp_path / "run", 2)
    assert any(diverged for _, diverged in told), told
    assert all("gather of" in text and "gradients of" in text for text, _ in told), told
    assert not any("within 60 s" in text for text, _ in told), told


MODES: list[dict[str, Any]] = [
    {},
    {"generations": 2, "update": "backward"},
    {"update": "backward", "on_nonfinite": "ignore"},
    {"update": "delayed", "delayed_warmup": 0},
]


def other_rate_of_a_group(rank: int, place: Path) -> tuple[str, list[torch.Tensor]]:
    """Train with a rate that differs between ranks, in backward's last group. The engine refuses it
    before any update, and all can continue. Returns the error and the weights."""
    model, handle = offloaded(place, update="backward", on_nonfinite="ignore")
    embedding, *others = model.parameters()
    optimizer = inf.AdamW([{"params": others}, {"params": [embedding], "lr": 1e-3}], lr=1e-2)
    before = weights(model)
    optimizer.param_groups[1]["lr"] *= 1 + rank
    with pytest.raises(
        ValueError, match=r"with lr 0\.002, and rank 0 with lr 0\.001: all ranks"
    ) as caught:
        backward(model, rank, 0)
    assert all(torch.equal(one, other) for one, other in zip(weights(model), before, strict=True))
    optimizer.param_groups[1]["lr"] = 1e-3
    optimizer.zero_grad()
    backward(model, rank, 0)
    optimizer.step()
    found = weights(model)
    handle.close()
    return str(caught.value), found


def test_another_rate_of_any_group_is_refused_before_the_first_update(tmp_path: Path) -> None:
    (mine, left), (theirs, right) = on_ranks(other_rate_of_a_group, tmp_path / "run", 2)
    assert mine == theirs
    assert all(torch.equal(one, other) for one, other in zip(left, right, strict=True))


def other_rates(rank: int, place: Path) -> list[tuple[str, set[int]]]:
    """A learning rate that follows each rank's loss: equal in the first step, not in the second."""
    found = []
    for values in MODES:
        model, handle, optimizer = build(place, **values)
        try:
            backward(model, rank, 0)
            optimizer.step()
            optimizer.zero_grad()
            optimizer.param_groups[0]["lr"] *= 1 + rank
            with pytest.raises(
                ValueError, match=r"with lr 0\.02, and rank 0 with lr 0\.01: all ranks"
            ) as caught:
                backward(model, rank, 1)
                optimizer.step()
            found.append((str(caught.value), {state["step"] for state in optimizer.state.values()}))
        finally:
            handle.close()
    return found


def test_a_learning_rate_of_one_rank_alone_is_told_to_both_before_it_is_used(
    tmp_path: Path,
) -> None:
    for told in zip(*on_ranks(other_rates, tmp_path / "run", 2), strict=True):
        assert all(counts == {1} for _, counts in told), told
        assert told[0] == told[1]


def writes_in_a_window(model: Any, _optimizer: Any, rank: int) -> None:
    weight = model.model.norm.weight
    with torch.no_grad(), inf.handle(model).gather(weight):
        weight.fill_(0.5 + rank)


def loads(model: Any, _optimizer: Any, rank: int) -> None:
    norm = model.model.norm
    norm.load_state_dict(
        {"weight": torch.full(norm.weight.shape, 0.5 + rank, dtype=norm.weight.dtype)}
    )


def writes_a_master(model: Any, _optimizer: Any, rank: int) -> None:
    weight = model.model.norm.weight
    inf.handle(model).optimizer_state(weight)["master"] = torch.full(weight.shape, 0.5 + rank)


def writes_a_count(model: Any, _optimizer: Any, rank: int) -> None:
    inf.handle(model).optimizer_state(model.model.norm.weight)["step"] = 5 + rank


def sets_a_gradient(model: Any, _optimizer: Any, rank: int) -> None:
    weight = model.model.norm.weight
    inf.handle(model).set_full_grad(weight, torch.full(weight.shape, 0.5 + rank))


def clips(rank: int, place: Path) -> tuple[str, list[torch.Tensor]]:
    """Each rank clips by its local norm and raises; then all continue, and a difference in the last
    bit is accepted."""
    model, handle, optimizer = build(place)
    backward(model, rank, 0)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3 * (1 + rank))
    with pytest.raises(ValueError, match=r"the gradient of lm_head\.weight times") as caught:
        optimizer.step()
    optimizer.zero_grad()
    optimizer.param_groups[0]["lr"] *= 1 + rank * 2e-16
    backward(model, rank, 1)
    optimizer.step()
    found = weights(model)
    handle.close()
    return str(caught.value), found


def test_a_clip_of_one_ranks_own_is_refused_on_all_and_training_goes_on(tmp_path: Path) -> None:
    (mine, left), (theirs, right) = on_ranks(clips, tmp_path / "run", 2)
    assert mine == theirs
    assert all(torch.equal(one, other) for one, other in zip(left, right, strict=True))


UNLIKE: list[tuple[Callable[[Any, Any, int], None], str]] = [
    (writes_in_a_window, "writing model.norm.weight"),
    (loads, "writing model.norm.weight"),
    (writes_a_master, "writing master of model.norm.weight"),
    (writes_a_count, "writing step=6 of model.norm.weight"),
    (sets_a_gradient, "setting the gradient of model.norm.weight"),
]


def does_unlike(rank: int, place: Path) -> list[str]:
    """Each rank sets different values, of which it would keep its part."""
    found = []
    for does, _ in UNLIKE:
        model, handle, optimizer = build(place)
        backward(model, rank, 0)
        optimizer.step()
        optimizer.zero_grad()
        # RankFailed; load_state_dict raises torch's error about it
        with raising(handle, RuntimeError) as told:
            does(model, optimizer, rank)
            model.state_dict()
        found += told
    return found


def test_values_of_one_rank_alone_are_told_to_both_before_they_are_used(tmp_path: Path) -> None:
    for (_, what), *told in zip(UNLIKE, *on_ranks(does_unlike, tmp_path / "run", 2), strict=True):
        assert any("rank 0 has reached" in text or "rank 1 has reached" in text for text in told), (
            told
        )
        assert all(what in text for text in told), (what, told)


def writes_alone(rank: int, place: Path) -> list[str]:
    """Rank 0 writes through a window, rank 1 only reads; then both continue, in other communication
    streams."""
    found = []
    for values in ({}, {"params": "device", "zero": 2}):
        model, handle, optimizer = build(place, **values)
        weight = model.model.norm.weight
        with raising(handle) as told:
            with torch.no_grad(), handle.gather(weight):
                weight.add_(1) if rank == 0 else weight.sum()
            backward(model, rank, 0)
            optimizer.step()
        found += told
    return found


def test_a_window_that_one_rank_alone_writes_to_is_told_to_both(tmp_path: Path) -> None:
    for told in zip(*on_ranks(writes_alone, tmp_path / "run", 2), strict=True):
        assert any("writing model.norm.weight" in text for text in told), told
        assert not any("within 60 s" in text for text in told), told


def broadcasts(rank: int, place: Path) -> torch.Tensor:
    """Rank 0 writes, and rank 1 receives it by a collective, which torch does not count as a write.
    """
    model, handle, _ = build(place)
    weight = model.model.norm.weight
    with torch.no_grad(), handle.gather(weight):
        if rank == 0:
            weight.mul_(3)
        dist.broadcast(weight.data, 0)
    found: torch.Tensor = model.state_dict()["model.norm.weight"].clone()
    handle.close()
    return found


def test_a_window_that_a_broadcast_fills_is_kept_on_all(tmp_path: Path) -> None:
    for found in on_ranks(broadcasts, tmp_path / "run", 2):
        assert torch.equal(found, torch.full_like(found, 3.0))


def closed(rank: int, place: Path) -> None:
    model, handle, optimizer = build(place)
    state = handle.optimizer_state(model.model.norm.weight)
    handle.close()
    for name, value in (("step", 3), ("master", torch.ones(32))):
        with pytest.raises(EngineClosed):
            state[name] = value
    del optimizer


def test_states_of_a_closed_engine_are_not_written(tmp_path: Path) -> None:
    on_ranks(closed, tmp_path / "run", 2)


def holds_others(rank: int, place: Path) -> tuple[str, list[torch.Tensor]]:
    """Each rank gives its optimizer another block and raises; then all continue with one for the
    whole model."""
    model, handle = offloaded(place)
    told = []
    for params, lr in (
        (model.model.layers[rank].parameters(), 1e-2),
        (model.parameters(), 1e-2 * (1 + rank)),
    ):
        with pytest.raises(
            ValueError, match="building an optimizer: all ranks must do the same"
        ) as caught:
            inf.AdamW(params, lr=lr)
        told.append(str(caught.value))
    optimizer = inf.AdamW(model.parameters(), lr=1e-2)
    backward(model, rank, 0)
    optimizer.step()
    found = weights(model)
    handle.close()
    return "\n".join(told), found


def test_optimizers_of_other_parameters_or_values_are_none_and_training_goes_on(
    tmp_path: Path,
) -> None:
    (mine, left), (theirs, right) = on_ranks(holds_others, tmp_path / "run", 2)
    assert mine == theirs
    assert "rank 0 has model.layers.0.input_layernorm.weight with" in mine
    assert "rank 1 has model.layers.1.input_layernorm.weight with" in mine
    assert all(torch.equal(one, other) for one, other in zip(left, right, strict=True))


def other_units(rank: int, place: Path) -> tuple[str, bool]:
    """Each rank gathers another block of the same size, so mixed-up shards would fit."""
    model, handle, _ = build(place)
    blocks = model.model.layers
    try:
        with pytest.raises(RankFailed) as caught, handle.gather(blocks[rank].parameters()):
            next(blocks[rank].parameters()).sum()
    finally:
        handle.close()
    return str(caught.value), isinstance(caught.value, RanksDiverged)


def test_shards_of_another_unit_are_never_taken_for_those_that_are_wanted(tmp_path: Path) -> None:
    told = on_ranks(other_units, tmp_path / "run", 2)
    assert any(diverged for _, diverged in told) or all(
        "has reached" in text for text, _ in told
    ), told
    assert all("layers.0" in text or "layers.1" in text for text, _ in told), told


def other_policy(rank: int, place: Path) -> list[str]:
    found = []
    mesh = init_device_mesh("cpu", (2, 1))
    for field, values in {
        "state": ("exact", "bf16"),
        "qwz": (False, True),
        "seed": (0, 1),
        "mesh": (None, mesh),
    }.items():
        with pytest.raises(ValueError, match=f"Policy.{field} is ") as caught:
            build(place, **{field: values[rank]})
        found.append(str(caught.value))
    torch.manual_seed(rank)
    with pytest.raises(ValueError, match="not the same on all ranks") as caught:
        inf.offload(torch.nn.Linear(64, 64), inf.Policy(params="cpu"))
    return [*found, str(caught.value)]


def test_other_policies_and_other_values_on_other_ranks_are_refused_on_all(tmp_path: Path) -> None:
    mine, theirs = on_ranks(other_policy, tmp_path / "run", 2)
    assert mine == theirs


def evaluates(rank: int, place: Path) -> list[list[torch.Tensor]]:
    """Forwards without a backward leave units that speculation finds at the end of the next
    backward."""
    found = []
    for chosen in ({}, {"update": "backward", "generations": 2}):
        model, handle, optimizer = build(place, **chosen)
        for index in range(STEPS):
            with torch.no_grad():
                models.loss_of(model, models.token_batches(8, seed=9)[index])
            # with an unused graph
            models.loss_of(model, models.token_batches(8, seed=9)[index])
            backward(model, rank, index)
            optimizer.step()
            optimizer.zero_grad()
        found.append(weights(model))
        handle.close()
    return found


def test_evaluation_between_steps_changes_no_bit_in_any_update_mode(tmp_path: Path) -> None:
    for deferred, ahead in on_ranks(evaluates, tmp_path / "run", 2):
        assert all(map(torch.equal, deferred, ahead))


def evaluates_alone(rank: int, place: Path) -> list[list[torch.Tensor]]:
    found = []
    for alone in (False, True):
        model, handle, optimizer = build(place, params="device", zero=2)
        for index in range(STEPS):
            backward(model, rank, index)
            optimizer.step()
            optimizer.zero_grad()
            handle.flush()
            if alone and rank == 0:
                with torch.no_grad():
                    models.loss_of(model, models.token_batches(8, seed=9)[index])
        found.append(weights(model))
        handle.close()
    return found


def test_one_rank_may_evaluate_alone_where_it_has_all_weights(tmp_path: Path) -> None:
    for together, alone in on_ranks(evaluates_alone, tmp_path / "run", 2):
        assert all(map(torch.equal, together, alone))


def restores(rank: int, place: Path) -> list[float]:
    """Return the norm of the same gradients after each of two restores. Rounding errors of
    discarded steps must not be fed back after a restore."""
    model, handle, optimizer = build(place, qgz=True, error_feedback=True)
    saved = place / "saved"
    for index in range(2):
        backward(model, rank, index)
        optimizer.step()
        optimizer.zero_grad()
    inf.save(model, optimizer, saved)
    norms = []
    for index in (3, 4):  # another batch goes between
        inf.restore(model, optimizer, saved)
        backward(model, rank, 2)
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.zero_grad()
        backward(model, rank, index)
        optimizer.step()
        optimizer.zero_grad()
    handle.close()
    return norms


def test_error_feedback_begins_anew_after_a_restore(tmp_path: Path) -> None:
    for first, second in on_ranks(restores, tmp_path / "run", 2):
        assert first == second


def reads_unreduced(rank: int, place: Path) -> None:
    model, handle, optimizer = build(place, params="device", zero=1)
    parameter = next(model.parameters())
    with handle.no_sync():
        backward(model, rank, 0)
    for look in (
        lambda: handle.full_grad(parameter),
        lambda: parameter.grad.norm(),
        optimizer.step,
    ):
        with pytest.raises(RuntimeError, match="no_sync"):
            look()
    handle.set_full_grad(parameter, torch.ones(parameter.shape))
    assert float(parameter.grad.norm()) == pytest.approx(parameter.numel() ** 0.5)
    optimizer.zero_grad()
    backward(model, rank, 1)
    optimizer.step()
    handle.close()


def test_sums_that_are_not_reduced_are_not_read(tmp_path: Path) -> None:
    on_ranks(reads_unreduced, tmp_path / "run", 2)


class Gain(torch.nn.Module):
    """A gain that only some calls use."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(64, 64)
        self.gain = torch.nn.Parameter(torch.ones(64))

    def forward(self, x: torch.Tensor, *, used: bool) -> torch.Tensor:
        x = self.linear(x)
        return (x * self.gain if used else x).square().mean()


def zeroes(rank: int, _place: Path) -> list[tuple[bool, torch.Tensor]]:
    """Only rank 0 has used the gain when gradients so far are zeroed, or cleared; no rank uses it
    afterwards."""
    found = []
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(rank))
    for values in ({"zero": 1}, {"zero": 2, "accumulate": "local", "update": "backward"}):
        for to_none in (False, True):
            torch.manual_seed(0)
            model = inf.offload(
                Gain(), inf.Policy(params="device", optim="cpu", rank_timeout_s=60.0, **values)
            )
            handle, optimizer = (
                inf.handle(model),
                inf.AdamW(model.parameters(), lr=1e-2, weight_decay=0.5),
            )
            for _ in range(2):
                with handle.no_sync():
                    model(x, used=rank == 0).backward()
                optimizer.zero_grad(set_to_none=to_none)
                model(x, used=False).backward()
                has = model.gain.grad is not None
                if "update" not in values:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            found.append((has, model.state_dict()["gain"].clone()))
            handle.close()
    return found


def test_zeros_in_place_of_a_sum_that_waits_on_one_rank_are_a_gradient_on_all(
    tmp_path: Path,
) -> None:
    """As in a plain loop over all ranks' rows: zero gradients decay a parameter, missing ones do
    not change it."""
    decayed = torch.full((64,), (1 - 1e-2 * 0.5) ** 2)
    for found in on_ranks(zeroes, tmp_path / "run", 2):
        for (has, gain), wanted in zip(found, [decayed, torch.ones(64)] * 2, strict=True):
            assert has == (wanted is decayed)
            torch.testing.assert_close(gain, wanted)
