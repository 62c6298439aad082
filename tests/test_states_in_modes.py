"""States, gradients and parameters that are written by hand, and steps that are skipped, under
every `Policy.update`."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from infinity._src.engine.handle import Handle
from infinity.aio import Seam
from tests import harness, models
from tests.delayed import DelayedReference, assert_same_states, opened, reference_of, take_step
from tests.distributed.test_two_ranks import on_two_ranks
from tests.harness import Training, policy
from tests.marks import alternating
from tests.reference import ReferenceScaler
from tests.test_bitwise import wide_llama

MIN = {"params": "nvme", "optim": "nvme", "ram": "min"}
PLACEMENTS: dict[str, dict[str, Any]] = {
    "nvme": MIN,
    "cpu": {"params": "cpu", "optim": "cpu"},
    "device": {"params": "device", "optim": "nvme", "ram": "min"},
}
WAYS = ("master", "gather", "load_state_dict")
SHORT = functools.partial(models.llama, 2)
LLAMA = Training(SHORT, steps=6, accumulation=1, max_norm=None)
NAME = "model.layers.1.self_attn.q_proj.weight"


# -- gradients set by hand -------------------------------------------------------------------------


def small(tmp_path: Path, update: str, **values: Any) -> tuple[nn.Module, Any, Handle]:
    return opened(LLAMA, policy(tmp_path, **MIN, update=update, **values))


def assign(handle: Handle, param: nn.Parameter, value: torch.Tensor, way: str) -> None:
    if way == "p.grad":
        param.grad = value.to(param.dtype)
    elif way == "another class":  # torch takes it as it takes a tensor
        param.grad = nn.Parameter(value.to(param.dtype), requires_grad=False)
    else:
        handle.set_full_grad(param, value)


@pytest.mark.parametrize("way", ["p.grad", "another class", "set_full_grad"])
def test_a_gradient_set_after_an_update_in_backward_took_one_is_refused(
    way: str, tmp_path: Path
) -> None:
    model, optimizer, handle = small(tmp_path, "backward")
    param = dict(model.named_parameters())[NAME]
    batches = models.token_batches(2)
    models.loss_of(model, batches[0]).backward()
    with pytest.raises(RuntimeError, match=rf"{NAME} after backward.*update='deferred'"):
        assign(handle, param, torch.ones(param.shape), way)
        optimizer.step()
    param.grad = None
    optimizer.step()
    optimizer.zero_grad()
    assert {handle.optimizer_state(each)["step"] for each in model.parameters()} == {1}
    take_step(model, optimizer, batches[1])
    plain, reference = reference_of(LLAMA, warmup=10)
    for batch in batches:
        take_step(plain, reference, batch)
    assert_same_states(model, handle, reference)
    handle.close()


def test_a_refused_gradient_leaves_the_one_that_is_there(tmp_path: Path) -> None:
    model, optimizer, handle = small(tmp_path, "backward")
    param = next(model.parameters())
    models.loss_of(model, models.token_batches(1)[0]).backward()
    with pytest.raises(RuntimeError, match="update='deferred'"):
        handle.set_full_grad(param, torch.ones(param.shape))
    assert param.grad is not None
    # as `p.grad = None`: the update was made, and its gradient may go
    handle.set_full_grad(param, None)
    assert param.grad is None
    optimizer.step()
    assert handle.optimizer_state(param)["step"] == 1
    handle.close()


@pytest.mark.parametrize("way", ["p.grad", "set_full_grad"])
@pytest.mark.parametrize("update", ["deferred", "backward", "delayed"])
def test_a_gradient_set_before_backward_is_added_to(update: str, way: str, tmp_path: Path) -> None:
    """Also right after a step, when `p.grad` still shows the gradient that the step has taken."""
    model, optimizer, handle = small(
        tmp_path, update, **({"delayed_warmup": 0} if update == "delayed" else {})
    )
    plain, reference = reference_of(LLAMA, warmup=0 if update == "delayed" else 10)
    with harness.one_thread():
        for batch in models.token_batches(4):
            for each, stepper in ((model, optimizer), (plain, reference)):
                for name, param in each.named_parameters():
                    ones = torch.full(param.shape, 0.125)
                    if name != NAME:
                        param.grad = None
                    elif each is model:
                        assign(handle, param, ones, way)
                    else:
                        param.grad = ones.to(param.dtype)
                models.loss_of(each, batch).backward()
                stepper.step()
    assert_same_states(model, handle, reference)
    handle.close()


@pytest.mark.parametrize("update", ["backward", "delayed"])
def test_gradients_that_are_set_without_a_backward_are_those_of_the_step(
    update: str, tmp_path: Path
) -> None:
    model, optimizer, handle = small(
        tmp_path, update, **({"delayed_warmup": 0} if update == "delayed" else {})
    )
    plain, reference = reference_of(LLAMA, warmup=0 if update == "delayed" else 10)
    for step in range(3):
        for index, (mine, theirs) in enumerate(
            zip(model.parameters(), plain.parameters(), strict=True)
        ):
            handle.set_full_grad(mine, torch.full(mine.shape, 0.5 + index))
            handle.set_full_grad(mine, torch.full(mine.shape, 0.25 * step + index))
            theirs.grad = torch.full_like(theirs, 0.25 * step + index)
        optimizer.step()
        reference.step()
    assert_same_states(model, handle, reference)
    handle.close()


def test_a_gradient_that_was_changed_is_what_a_delayed_update_takes(tmp_path: Path) -> None:
    model, optimizer, handle = small(tmp_path, "delayed", delayed_warmup=1)
    plain, reference = reference_of(LLAMA, warmup=1)
    with harness.one_thread():
        for batch in models.token_batches(5):
            models.loss_of(model, batch).backward()
            models.loss_of(plain, batch).backward()
            for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
                grad = handle.full_grad(mine)
                assert grad is not None
                handle.set_full_grad(mine, grad * 2)
                assert theirs.grad is not None
                theirs.grad.mul_(2)
            for stepper in (optimizer, reference):
                stepper.step()
                stepper.zero_grad()
    assert_same_states(model, handle, reference)
    handle.close()


def set_on_a_rank(rank: int, place: Path) -> Any:
    model, optimizer, handle = opened(LLAMA, policy(place, **MIN, update="backward"))
    param = next(model.parameters())
    models.loss_of(model, models.token_batches(1)[0]).backward()
    with pytest.raises(RuntimeError, match="update='deferred'"):
        handle.set_full_grad(param, torch.ones(param.shape))
    optimizer.step()
    steps = handle.optimizer_state(param)["step"]
    handle.close()
    model, optimizer, handle = opened(
        LLAMA, policy(place, **MIN, update="delayed", delayed_warmup=0)
    )
    for batch in models.token_batches(2):
        take_step(model, optimizer, batch)
    handle.optimizer_state(next(model.parameters()))["master"] = torch.full(param.shape, 0.5)
    loss = models.loss_of(model, models.token_batches(1)[0]).item()
    handle.close()
    return steps, loss


def test_on_two_ranks_it_is_the_same(tmp_path: Path) -> None:
    first, second = on_two_ranks(set_on_a_rank, tmp_path / "run")
    assert first[0] == second[0] == 1
    plain, reference = reference_of(LLAMA, warmup=0)
    with harness.one_thread():
        for batch in models.token_batches(2):
            take_step(plain, reference, batch)
        reference.write("model.embed_tokens.weight", torch.full((models.VOCAB, 32), 0.5))
        expected = models.loss_of(plain, models.token_batches(1)[0]).item()
    assert first[1] == second[1] == expected


# -- parameters written by hand --------------------------------------------------------------------


def write(handle: Handle, model: nn.Module, value: torch.Tensor, way: str) -> None:
    param = dict(model.named_parameters())[NAME]
    if way == "master":
        handle.optimizer_state(param)["master"] = value
    elif way == "gather":
        with handle.gather(param), torch.no_grad():
            param.copy_(value)
    else:
        model.load_state_dict({NAME: value}, strict=False)


@pytest.mark.parametrize(
    ("way", "place", "dtype"),
    alternating(WAYS, PLACEMENTS, [torch.bfloat16])
    + [
        pytest.param(way, "nvme", dtype, marks=pytest.mark.slow)
        for way in WAYS
        for dtype in (torch.float16, torch.float32)
    ],
    ids=str,
)
def test_what_is_written_is_what_the_next_delayed_step_computes_with(
    way: str, place: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """A write in the warm-up, with an update in flight, right after another write, and when a step
    does not update the unit."""
    training = Training(SHORT, steps=6, accumulation=1, max_norm=None, dtype=dtype)
    model, optimizer, handle = opened(
        training,
        policy(tmp_path, update="delayed", delayed_warmup=1, **PLACEMENTS[place]),
        Seam(delay_us_max=300, seed=3),
    )
    plain, reference = reference_of(training, warmup=1)
    shape = dict(plain.named_parameters())[NAME].shape
    generator = torch.Generator().manual_seed(1)
    with harness.one_thread():
        for index, batch in enumerate(training.batches):
            without = "model.layers.1." if index == 4 else None
            losses = [
                take_step(model, optimizer, batch, without),
                take_step(plain, reference, batch, without),
            ]
            assert losses[0] == losses[1]
            for _ in range((1, 0, 2, 1, 1, 0)[index]):
                # a master is as fine as its parameter
                value = (torch.randn(shape, generator=generator) / 4).to(dtype).float()
                write(handle, model, value, way)
                reference.write(NAME, value)
    assert_same_states(model, handle, reference)
    handle.close()


@pytest.mark.parametrize("state", ["bf16", "compact"])
def test_a_master_that_rounds_reaches_the_copy_as_it_rests(state: str, tmp_path: Path) -> None:
    """Also where a parameter lies in several chunks."""
    training = Training(wide_llama)
    model, optimizer, handle = opened(
        training, policy(tmp_path, **MIN, update="delayed", delayed_warmup=0, state=state)
    )
    batches = models.token_batches(3)
    for batch in batches[:2]:
        take_step(model, optimizer, batch)
    handle.flush()
    for param in model.parameters():
        handle.optimizer_state(param)["master"] = torch.rand(param.shape) / 8
    plain = training.model()
    plain.load_state_dict(model.state_dict())
    with harness.one_thread():
        assert models.loss_of(model, batches[2]).item() == models.loss_of(plain, batches[2]).item()
    handle.close()


def test_a_moment_that_is_written_leaves_what_computes(tmp_path: Path) -> None:
    model, optimizer, handle = small(tmp_path, "delayed", delayed_warmup=0)
    plain, reference = reference_of(LLAMA, warmup=0)
    with harness.one_thread():
        for batch in models.token_batches(4):
            assert take_step(model, optimizer, batch) == take_step(plain, reference, batch)
            param, theirs = (dict(each.named_parameters())[NAME] for each in (model, plain))
            handle.optimizer_state(param)["exp_avg"] = torch.full(param.shape, 0.01)
            reference.states[theirs].exp_avg.fill_(0.01)
    assert_same_states(model, handle, reference)
    handle.close()


# -- steps that are skipped ------------------------------------------------------------------------


def looped(
    training: Training, model: nn.Module, optimizer: Any, clip: Any, scaler: Any
) -> harness.Run:
    losses, norms, seen = harness.run_loop(training, model, optimizer, clip, scaler)
    return harness.Run(losses, norms, seen, {})


SKIPPED = {
    "in the middle": (3,),
    "in the warm-up": (0,),
    "first after the warm-up": (2,),
    "two together": (3, 4),
    "at the end": (6,),
}


@pytest.mark.parametrize(
    ("means", "when", "place"),
    [
        *alternating(("GradScaler", "on_nonfinite"), SKIPPED, ("nvme",)),
        *(
            pytest.param(means, "in the middle", place, marks=pytest.mark.slow)
            for means in ("GradScaler", "on_nonfinite")
            for place in ("cpu", "device")
        ),
    ],
)
def test_a_delayed_loop_without_the_steps_that_are_skipped(
    means: str, when: str, place: str, tmp_path: Path
) -> None:
    """Nothing moves in a skipped step: the next one computes with the same parameters, and updates
    the same states."""
    scaled = means == "GradScaler"
    training = Training(
        SHORT,
        steps=7,
        accumulation=2,
        dtype=torch.float16 if scaled else torch.bfloat16,
        lr=1e-3,
        scaler=(512.0, 2) if scaled else None,
        poisoned=SKIPPED[when],
    )
    chosen = policy(
        tmp_path,
        update="delayed",
        delayed_warmup=2,
        on_nonfinite="raise" if scaled else "skip",
        **PLACEMENTS[place],
    )
    with harness.one_thread():
        model, optimizer, handle = opened(training, chosen, Seam(delay_us_max=300, seed=4))
        scaler = (
            torch.amp.GradScaler("cpu", init_scale=512.0, growth_interval=2) if scaled else None
        )
        result = looped(training, model, optimizer, lambda: harness._clip(model, 1.0), scaler)
        plain = training.model()
        reference = DelayedReference(plain, training, warmup=2, skip=not scaled)
        expected = looped(
            training,
            plain,
            reference,
            lambda: reference.clip(1.0),
            ReferenceScaler(512.0, 2) if scaled else None,
        )
        assert reference.taken == 7 - len(SKIPPED[when])
        harness.assert_same(result, expected)
        assert_same_states(model, handle, reference)
        handle.close()


def test_a_forward_after_a_skipped_delayed_step_computes_what_the_one_before_did(
    tmp_path: Path,
) -> None:
    model, optimizer, handle = small(tmp_path, "delayed", delayed_warmup=0, on_nonfinite="skip")
    batches = models.token_batches(3)
    for batch in batches[:2]:
        take_step(model, optimizer, batch)
    before = models.loss_of(model, batches[2])
    (before * float("inf")).backward()
    optimizer.step()
    optimizer.zero_grad()
    handle.flush()
    again = models.loss_of(model, batches[2])
    assert again.item() == before.item()
    with torch.no_grad():
        # evaluation sees the update before
        assert models.loss_of(model, batches[2]).item() != before.item()
    again.backward()
    optimizer.step()
    assert handle.optimizer_state(next(model.parameters()))["step"] == 3
    handle.close()


def test_a_delayed_step_without_a_gradient_is_no_step(tmp_path: Path) -> None:
    model, optimizer, handle = small(tmp_path, "delayed", delayed_warmup=1)
    plain, reference = reference_of(LLAMA, warmup=1)
    with harness.one_thread():
        for index, batch in enumerate(models.token_batches(6)):
            if index in (0, 3):
                optimizer.step()
            assert take_step(model, optimizer, batch) == take_step(plain, reference, batch)
    assert_same_states(model, handle, reference)
    handle.close()
