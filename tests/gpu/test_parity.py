"""A GPU computes, the engine keeps the states: the bits of a plain loop on the same GPU, wherever
states rest.

The plain loop has its parameters on the device, takes gradients and their norms there, and keeps
fp32 masters and AdamW in CPU memory, as `update_on="cpu"` does. Everything here has a twin on the
CPU (test_matrix, test_models, test_fp16).
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.checkpoint

import infinity as inf
from infinity._src.hooks import activation_offload as activations
from infinity.aio import Seam
from tests import harness, models, test_bitwise, test_fp16, test_models
from tests.harness import Training
from tests.test_bitwise import policy

TWINS_ON_CPU = True

SIX = Training(models.llama, steps=6)
MIN: dict[str, Any] = {"params": "nvme", "optim": "nvme", "ram": "min"}
PLACES: dict[str, dict[str, Any]] = {
    "all in memory": {"params": "device", "optim": "cpu"},
    "cpu": {"params": "cpu", "optim": "cpu"},
    "cpu min": {"params": "cpu", "optim": "cpu", "ram": "min"},
    "optimizer on nvme": {"params": "device", "optim": "nvme", "ram": "min"},
    "nvme min": MIN,
    "nvme threads": {**MIN, "io_backend": "threads"},
    "nvme generous": {"params": "nvme", "optim": "nvme"},
    "small units": {**MIN, "unit_bytes_max": 8192},
}


def check(
    training: Training, chosen: inf.Policy, device: str, seam: Seam | None = None
) -> harness.Run:
    """Train both ways and compare; the training that is offloaded computes on `device`."""
    training = dataclasses.replace(training, device=device)
    result = harness.offloaded(training, chosen, seam=seam)
    harness.assert_same(result, harness.reference(training))
    return result


@pytest.mark.parametrize("name", PLACES)
def test_many_steps_are_the_plain_loops_bits_wherever_states_rest(
    name: str, device: str, tmp_path: Path
) -> None:
    check(SIX, policy(tmp_path, **PLACES[name]), device)


@pytest.mark.parametrize("state", ["exact", "bf16", "compact"])
def test_placements_agree_with_each_other(state: str, device: str, tmp_path: Path) -> None:
    """The promise that needs no reference, so it holds for every state format."""
    training = Training(test_bitwise.wide_llama, steps=3, device=device)
    first, *others = (
        harness.offloaded(training, policy(tmp_path, **{"state": state, **PLACES[name]}))
        for name in ("cpu", "all in memory", "nvme min", "optimizer on nvme")
    )
    for other in others:
        harness.assert_same(other, first)


VARIANTS = {
    "gradients accumulated in fp32": Training(
        models.llama, accumulation=3, grad_dtype=torch.float32
    ),
    "fp32 parameters": Training(models.llama, dtype=torch.float32),
    "no clipping": Training(models.llama, max_norm=None),
    "one micro-batch": Training(models.llama, accumulation=1),
    "two groups": Training(models.gpt2, groups=True),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_accumulation_clipping_and_dtypes_are_the_plain_loops_bits(
    name: str, device: str, tmp_path: Path
) -> None:
    training = VARIANTS[name]
    check(training, policy(tmp_path, **MIN, grad_dtype=training.grad_dtype), device)


@pytest.mark.parametrize("case", models.CASES, ids=lambda case: case.name)
def test_every_family_trains_as_the_plain_loop_does(
    case: models.Case, device: str, tmp_path: Path
) -> None:
    check(Training(case.factory, groups=case.name != "lora"), policy(tmp_path, **MIN), device)


@pytest.mark.parametrize("use_reentrant", [False, True], ids=["plain", "reentrant"])
@pytest.mark.parametrize(
    "factory", [models.llama, models.gpt2, models.lora], ids=lambda factory: factory.__name__
)
def test_checkpointing_of_both_kinds(
    factory: Any, use_reentrant: bool, device: str, tmp_path: Path
) -> None:
    check(Training(factory, checkpointing=use_reentrant), policy(tmp_path, **MIN), device)


@pytest.mark.parametrize("use_reentrant", [False, True], ids=["plain", "reentrant"])
def test_one_backward_for_all_micro_batches(
    use_reentrant: bool, device: str, tmp_path: Path
) -> None:
    training = Training(models.llama, accumulation=3, checkpointing=use_reentrant, together=True)
    check(training, policy(tmp_path, **MIN), device)


@pytest.mark.parametrize("tier", ["cpu", "nvme"])
@pytest.mark.parametrize("use_reentrant", [False, True], ids=["plain", "reentrant"])
def test_activations_that_leave_come_back_as_they_were(
    use_reentrant: bool,
    tier: str,
    device: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    if tier == request.node.callspec.params["device"] == "cpu":
        pytest.skip("activations='cpu' is for models that compute on another device")
    monkeypatch.setattr(activations, "SMALLEST_BYTES", 256)  # tiny models count
    training = Training(models.llama, checkpointing=use_reentrant)
    result = check(
        training, policy(tmp_path, **MIN, activations=tier), device, Seam(delay_us_max=2000, seed=3)
    )
    assert result.stats.activations.calls > 0


FP16: dict[str, dict[str, Any]] = {
    "fp16": {},
    "large scale": {"scaler": (2.0**15, 3)},
    "several chunks": {"factory": test_bitwise.wide_llama, "steps": 3},
    "gradients in fp32": {"grad_dtype": torch.float32},
}


@pytest.mark.parametrize("place", ["cpu", "nvme min"])
@pytest.mark.parametrize("name", FP16)
def test_fp16_with_a_grad_scaler(name: str, place: str, device: str, tmp_path: Path) -> None:
    training = dataclasses.replace(test_fp16.SCALED, **{"steps": 5, **FP16[name]})
    chosen = policy(tmp_path, **PLACES[place], grad_dtype=training.grad_dtype)
    check(training, chosen, device)


UNCLIPPED: dict[str, dict[str, Any]] = {
    "accumulation": {"factory": models.Small, "accumulation": 3},
    "checkpointing": {"factory": models.Small, "checkpointing": False},
    "tied": {"factory": models.gpt2},
    "experts": {"factory": models.mixtral, "accumulation": 1},
}


@pytest.mark.parametrize("update", ["backward", "delayed"])
@pytest.mark.parametrize("name", UNCLIPPED)
def test_the_other_update_modes(name: str, update: str, device: str, tmp_path: Path) -> None:
    delayed = 1 if update == "delayed" else None
    training = Training(**UNCLIPPED[name], max_norm=None, no_sync=True, delayed=delayed)
    check(training, policy(tmp_path, **MIN, update=update, delayed_warmup=1), device)


@pytest.mark.parametrize("generations", [1, 2])
@pytest.mark.parametrize("seed", [0, 1])
def test_random_delays_and_reordering_change_no_bits(
    seed: int, generations: int, device: str, tmp_path: Path
) -> None:
    chosen = policy(tmp_path, **MIN, generations=generations)
    check(SIX, chosen, device, Seam(delay_us_max=1500, seed=seed))


def test_units_of_many_chunks_under_delays_change_no_bits(device: str, tmp_path: Path) -> None:
    check(
        Training(test_bitwise.wide_llama, steps=3),
        policy(tmp_path, **MIN),
        device,
        Seam(delay_us_max=3000, seed=7),
    )


def test_a_model_built_on_meta_is_filled_on_its_device(device: str, tmp_path: Path) -> None:
    """`Policy(device=)` says where a model computes that has no device of its own."""
    training = Training(models.llama, device=device)
    values = dict(models.make(models.llama).state_dict())
    where = {"device": "cuda"} if device == "cuda" else {}
    result = harness.offloaded(training, policy(tmp_path, **MIN, **where), load=values)
    harness.assert_same(result, harness.reference(training))


@pytest.mark.parametrize(
    "factory", [models.llama, models.gpt2, models.t5], ids=lambda factory: factory.__name__
)
def test_evaluation_and_generation_in_between_change_nothing(
    factory: Any, device: str, tmp_path: Path
) -> None:
    check(Training(factory, steps=2, between=test_models.evaluate), policy(tmp_path, **MIN), device)


@pytest.mark.parametrize("before", [test_models.fail_in_forward, test_models.fail_in_backward])
@pytest.mark.parametrize(
    "factory", [models.llama, models.lora, models.External], ids=lambda factory: factory.__name__
)
def test_exceptions_and_interrupts_leave_a_clean_state(
    factory: Any, before: Any, device: str, tmp_path: Path
) -> None:
    check(Training(factory, before=before), policy(tmp_path, **MIN), device)


@pytest.mark.parametrize("use_reentrant", [False, True], ids=["plain", "reentrant"])
def test_an_exception_in_recompute_leaves_a_clean_state(
    use_reentrant: bool, device: str, tmp_path: Path
) -> None:
    training = Training(
        models.llama, checkpointing=use_reentrant, before=test_models.fail_under_checkpointing
    )
    check(training, policy(tmp_path, **MIN), device)


def test_fp32_under_autocast(device: str, tmp_path: Path) -> None:
    training = Training(models.llama, dtype=torch.float32, steps=2, autocast="cached")
    check(training, policy(tmp_path, **MIN), device)
