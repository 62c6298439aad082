"""`handle.optimizer_state`, `full_grad` and `set_full_grad`: any state of any parameter, by name,
wherever it rests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import infinity as inf
from infinity._src.engine.handle import Handle, offload
from infinity.aio import Fault, Seam
from infinity.errors import AioError, EngineClosed
from tests import harness, models, test_spill
from tests.distributed.test_two_ranks import on_two_ranks
from tests.harness import Training, assert_same, states_of, train, values_of
from tests.marks import pairwise
from tests.test_bitwise import policy

MIN = {"params": "nvme", "optim": "nvme", "ram": "min"}
PLACEMENTS: list[dict[str, Any]] = [
    {"params": "cpu", "optim": "cpu"},
    MIN,
    {"params": "device", "optim": "nvme", "ram": "min"},
]


@contextmanager
def opened(
    chosen: inf.Policy, training: Training | None = None
) -> Iterator[tuple[nn.Module, torch.optim.Optimizer, Handle]]:
    training = training or Training(models.llama)
    model = inf.offload(training.model(), chosen)
    handle = inf.handle(model)
    try:
        yield model, training.make_optimizer(model), handle
    finally:
        handle.close()


@pytest.mark.parametrize("optimizer", ["AdamW", "SGD", "NAdam"])
def test_what_is_written_is_what_the_next_step_uses(optimizer: str, tmp_path: Path) -> None:
    """States written into a fresh run continue another one, bit for bit."""
    options = (("momentum", 0.9), ("dampening", 0.5)) if optimizer == "SGD" else ()
    training = Training(models.Small, optimizer=optimizer, options=options, lr=1e-3)
    results = []
    with harness.one_thread():
        with opened(policy(tmp_path, **MIN), training) as (model, stepper, _):
            train(model, stepper, 3)
            kept = states_of(model)
            train(model, stepper, 2)
            results.append(values_of(model))
        with opened(policy(tmp_path, **MIN), training) as (model, stepper, handle):
            for name, param in model.named_parameters():
                handle.optimizer_state(param).update(kept[name])
            train(model, stepper, 2)
            results.append(values_of(model))
    assert_same(*results)


def test_moments_written_before_the_first_step_want_their_numbers(tmp_path: Path) -> None:
    training = Training(models.llama, optimizer="NAdam", lr=1e-3)
    with opened(policy(tmp_path, **MIN), training) as (model, stepper, handle):
        state = handle.optimizer_state(next(model.parameters()))
        state["exp_avg"] = torch.ones_like(state["master"])
        models.loss_of(model, models.token_batches(1)[0]).backward()
        with pytest.raises(ValueError, match="not step, mu_product"):
            stepper.step()
        state.update(step=1, mu_product=0.9)
        stepper.step()
        assert state["step"] == 2


BITS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}


@pytest.mark.parametrize(
    ("state", "dtype"),
    pairwise(["exact", "bf16", "compact"], [torch.bfloat16, torch.float16, torch.float32]),
    ids=str,
)
def test_writing_one_state_leaves_the_others_and_other_parameters(
    state: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    training = Training(models.llama, dtype=dtype)
    with opened(policy(tmp_path, **MIN, state=state), training) as (model, optimizer, handle):
        train(model, optimizer, 2)
        params = list(model.parameters())
        before = [dict(handle.optimizer_state(param)) for param in params]
        assert list(before[0]) == ["master", "exp_avg", "exp_avg_sq", "step"]
        for written in ("master", "exp_avg", "exp_avg_sq"):
            target = handle.optimizer_state(params[3])
            new = torch.rand_like(before[3][written]) + 0.5
            target[written] = new
            assert (target[written] - new).abs().max() < 0.02
            before[3][written] = target[written]
            assert_same([dict(handle.optimizer_state(param)) for param in params], before)
        with handle.gather(params[3]):
            rounded = before[3]["master"].to(dtype)
            assert (
                params[3].detach().view(BITS[dtype]) - rounded.view(BITS[dtype])
            ).abs().max() <= 1


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Numbers of every size, some of them special, for a parameter of 16 x 32."""
    seed, exponent = draw(st.integers(0, 2**31)), draw(st.integers(-30, 30))
    values = torch.randn(16, 32, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent
    for special in draw(
        st.lists(st.sampled_from([0.0, -0.0, float("inf"), float("-inf"), 1e-41, 3e38]), max_size=4)
    ):
        values.view(-1)[draw(st.integers(0, 511))] = special
    return values


@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_what_is_written_reads_back(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Exact states are read back bit for bit; others are rounded when they are written, and rounded
    values are read and written without change."""
    dtype = data.draw(st.sampled_from([torch.bfloat16, torch.float16, torch.float32]))
    state = data.draw(st.sampled_from(["exact", "bf16"]))
    place = data.draw(st.sampled_from(PLACEMENTS))
    chosen = policy(tmp_path_factory.mktemp("states"), **place, state=state)
    with opened(chosen, Training(models.llama, dtype=dtype)) as (model, _, handle):
        param = dict(model.named_parameters())["model.layers.0.self_attn.v_proj.weight"]
        mapping = handle.optimizer_state(param)
        for name in ("master", "exp_avg", "exp_avg_sq"):
            value = data.draw(tensors())
            mapping[name] = value
            back = mapping[name]
            if state == "exact" or name == "master":
                assert torch.equal(back.view(torch.int32), value.view(torch.int32))
            else:
                finite = value.abs() < 3e38
                assert (
                    torch.equal(back[finite], value.bfloat16().float()[finite])
                    or name == "exp_avg_sq"
                )
            mapping[name] = back
            assert torch.equal(mapping[name].view(torch.int32), back.view(torch.int32))


def test_errors_name_what_was_asked_and_what_there_is(tmp_path: Path) -> None:
    with opened(policy(tmp_path, **MIN)) as (model, optimizer, handle):
        param = next(model.parameters())
        state = handle.optimizer_state(param)
        with pytest.raises(KeyError, match=r"momentum.*exp_avg_sq"):
            state["momentum"]
        with pytest.raises(KeyError, match="momentum"):
            state["momentum"] = torch.zeros(param.shape)
        with pytest.raises(ValueError, match=r"shape \(96, 32\), not torch.float32 \(3,\)"):
            state["exp_avg"] = torch.zeros(3)
        with pytest.raises(ValueError, match="int64"):
            state["exp_avg"] = torch.zeros(param.shape, dtype=torch.int64)
        with pytest.raises(ValueError, match=r"step=-1"):
            state["step"] = -1
        with pytest.raises(TypeError, match="cannot be removed"):
            del state["exp_avg"]
        with handle.gather(param), pytest.raises(RuntimeError, match="in use"):
            state["master"] = torch.zeros(param.shape)
        with pytest.raises(ValueError, match="one parameter of the offloaded model"):
            handle.optimizer_state(nn.Parameter(torch.zeros(2)))
        with pytest.raises(ValueError, match="floating tensor"):
            handle.set_full_grad(param, torch.zeros(3))
        del optimizer
    with pytest.raises(EngineClosed):
        handle.optimizer_state(param)
    bare = inf.offload(models.make(models.llama))
    with pytest.raises(ValueError, match="no optimizer holds"):
        inf.handle(bare).optimizer_state(next(bare.parameters()))
    inf.handle(bare).close()


def test_eight_bits_refuse_a_second_moment_below_zero_and_keep_what_they_had(
    tmp_path: Path,
) -> None:
    with opened(policy(tmp_path, state="compact", **MIN)) as (model, optimizer, handle):
        train(model, optimizer, 1)
        param = next(model.parameters())
        state = handle.optimizer_state(param)
        before = state["exp_avg_sq"]
        wrong = before.clone()
        wrong.view(-1)[5] = -1e-3
        with pytest.raises(
            ValueError, match=r"second moment .* below zero \(the least is -0.001\).*clamp"
        ):
            state["exp_avg_sq"] = wrong
        assert torch.equal(state["exp_avg_sq"], before)
        state["exp_avg"] = wrong  # a first moment has a sign
        assert state["exp_avg"].min() < 0
        state["exp_avg_sq"] = wrong.clamp(min=0)


def test_a_read_that_fails_is_a_typed_error(tmp_path: Path) -> None:
    def begun(seam: Seam | None) -> tuple[nn.Module, Any]:
        model = offload(
            models.make(models.llama), policy(tmp_path, **MIN, nvme=tmp_path), _seam=seam
        )
        return model, inf.AdamW(model.parameters())

    model, optimizer = begun(None)
    reads = inf.handle(model).parts.tiers.executor.stats().drives[0].reads
    inf.handle(model).close()
    model, optimizer = begun(Seam(fault=Fault("read", reads, persistent=True)))
    state = inf.handle(model).optimizer_state(next(model.parameters()))
    assert not state["exp_avg"].any()  # no update has written it, so it is not read from a drive
    with pytest.raises(AioError, match="errno 5"):
        state["master"]
    del optimizer
    inf.handle(model).close()


# -- gather keeps what it does not change ----------------------------------------------------------


@pytest.mark.parametrize("state", ["exact", "compact"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_writing_an_element_in_gather_keeps_the_masters_of_the_others(
    state: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    with opened(policy(tmp_path, **MIN, state=state), Training(models.llama, dtype=dtype)) as (
        model,
        optimizer,
        handle,
    ):
        train(model, optimizer, 2)
        param = list(model.parameters())[2]
        before = handle.optimizer_state(param)["master"]
        assert not torch.equal(before, before.to(dtype).float())
        with handle.gather(param), torch.no_grad():
            param[1, 2] = 0.625
        after = handle.optimizer_state(param)["master"]
        changed = after != before
        assert after[1, 2] == 0.625
        assert changed.sum() == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_a_new_optimizer_begins_with_masters_and_moments_of_its_own(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    with opened(policy(tmp_path, **MIN), Training(models.llama, dtype=dtype)) as (
        model,
        first,
        handle,
    ):
        train(model, first, 2)
        values = values_of(model)
        del first
        optimizer = inf.AdamW(model.parameters())
        for name, param in model.named_parameters():
            state = handle.optimizer_state(param)
            assert torch.equal(state["master"], values[name].float())
            assert not state["exp_avg"].any()
            assert state["step"] == 0
        del optimizer


# -- gradients -------------------------------------------------------------------------------------


@pytest.mark.parametrize("grad_dtype", [None, torch.float32])
def test_full_gradients_are_those_of_the_loop_with_what_was_done_to_them(
    grad_dtype: torch.dtype | None, tmp_path: Path
) -> None:
    with (
        harness.one_thread(),
        opened(policy(tmp_path, **MIN, grad_dtype=grad_dtype)) as (model, optimizer, handle),
    ):
        plain = models.make(models.llama)
        batch = models.token_batches(1)[0]
        assert handle.full_grad(next(model.parameters())) is None
        models.loss_of(model, batch).backward()
        models.loss_of(plain, batch).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        norm = torch.nn.utils.get_total_norm([param.grad.float() for param in plain.parameters()])
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            expected = theirs.grad.float() * torch.clamp(0.5 / (norm + 1e-6), max=1.0)
            assert torch.equal(handle.full_grad(mine), expected)
        optimizer.step()


def test_gradients_that_are_set_are_those_of_the_step(tmp_path: Path) -> None:
    results = []
    for place in PLACEMENTS:
        with harness.one_thread(), opened(policy(tmp_path, **place)) as (model, optimizer, handle):
            for index, param in enumerate(model.parameters()):
                handle.set_full_grad(param, torch.full(param.shape, 0.5 + index))
            first = next(model.parameters())
            assert torch.equal(handle.full_grad(first), torch.full(first.shape, 0.5))
            handle.set_full_grad(first, None)
            assert first.grad is None
            assert handle.full_grad(first) is None
            optimizer.step()
            assert handle.optimizer_state(first)["step"] == 0
            results.append(values_of(model))
    plain = models.make(models.llama)
    reference = harness.ReferenceAdamW([{"params": plain.parameters()}], lr=1e-2, weight_decay=0.1)
    for index, param in enumerate(plain.parameters()):
        param.grad = torch.full_like(param, 0.5 + index) if index else None
    reference.step()
    for result in results:
        assert_same(result, values_of(plain))


def test_spilled_gradients_are_read_and_set_like_others(tmp_path: Path) -> None:
    training = Training(test_spill.deep)
    chosen = test_spill.policy(tmp_path, ram=test_spill.least(training), grads="nvme")
    with harness.one_thread(), opened(chosen, training) as (model, optimizer, handle):
        plain = training.model()
        batch = models.token_batches(1)[0]
        for each in (model, plain):
            models.loss_of(each, batch).backward()
        assert handle.stats().spilled_bytes > 0
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(handle.full_grad(mine), theirs.grad.float())
            handle.set_full_grad(mine, theirs.grad.float() * 2)
            assert torch.equal(handle.full_grad(mine), theirs.grad.float() * 2)
        optimizer.step()


# -- several ranks ---------------------------------------------------------------------------------


def access_on_a_rank(rank: int, place: Path) -> Any:
    """Reads and writes of every kind; what each rank saw."""
    seen: list[Any] = []
    for state in ("exact", "compact"):
        model = inf.offload(
            models.make(models.llama),
            inf.Policy(params="nvme", optim="nvme", nvme=place, ram="min", state=state),
        )
        handle = inf.handle(model)
        optimizer = inf.AdamW(model.parameters(), lr=1e-3)
        models.loss_of(model, models.token_batches(1, seed=rank)[0]).backward()
        params = list(model.parameters())
        seen.append([handle.full_grad(param).clone() for param in params])
        optimizer.step()
        optimizer.zero_grad()
        seen.append([dict(handle.optimizer_state(param)) for param in params])
        whole = torch.linspace(-1, 1, params[0].numel()).view(params[0].shape)
        handle.optimizer_state(params[0])["exp_avg"] = whole
        handle.set_full_grad(params[0], whole)
        seen.append((handle.optimizer_state(params[0])["exp_avg"], handle.full_grad(params[0])))
        handle.close()
    for chosen in ("Adagrad", "SGD"):
        training = Training(
            models.llama,
            optimizer=chosen,
            options=(("momentum", 0.9),) if chosen == "SGD" else (),
            lr=1e-2,
        )
        result = harness.offloaded(
            training, inf.Policy(params="nvme", optim="nvme", nvme=place, ram="min")
        )
        seen.append(result.params)
    return seen


@pytest.mark.ranks
def test_on_two_ranks_every_rank_sees_the_whole(tmp_path: Path) -> None:
    first, second = on_two_ranks(access_on_a_rank, tmp_path / "run")
    assert_same(first, second)
    whole = torch.linspace(-1, 1, first[2][0].numel()).view(first[2][0].shape)
    assert torch.equal(first[2][0], whole)
    assert torch.equal(first[2][1], whole.bfloat16().float())
    # Both ranks train on the same batches here, so their mean is one rank's gradient.
    for seen, chosen in zip(first[-2:], ("Adagrad", "SGD"), strict=True):
        training = Training(
            models.llama,
            optimizer=chosen,
            options=(("momentum", 0.9),) if chosen == "SGD" else (),
            lr=1e-2,
        )
        for name, value in harness.reference(training).params.items():
            assert (seen[name].float() - value.float()).abs().max() < 2e-2, name
