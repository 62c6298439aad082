"""Trainer with adapters of PEFT: the base offloaded with them, or before them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import infinity as inf
from infinity.integrations.transformers import embed
from tests.integrations.hf_trainers import (
    Ended,
    close,
    end_of,
    llama,
    policy_in,
    trainer,
)
from tests.integrations.test_transformers_ranks import DDP_ULPS, Job, on_ranks
from tests.integrations.test_transformers_runs import ULPS, assert_near, assert_same

peft = pytest.importorskip("peft")

pytestmark = pytest.mark.integrations

WAYS = ["after", "before"]
"""The model is offloaded after get_peft_model, by embed, or before."""


def adapted(base: Any, seed: int = 11, **changes: Any) -> Any:
    """The base with adapters, which begin with something to train in both of their matrices."""
    torch.manual_seed(seed)
    config = peft.LoraConfig(
        r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, **changes
    )
    return peft.get_peft_model(base, config)


def run_of(out: Path, way: str | None, seed: int = 11, lora: Any = None, **changes: Any) -> Any:
    """A trainer of adapters; plain for way=None."""
    policy = policy_in(out)
    base = inf.offload(llama(), policy) if way == "before" else llama()
    run = trainer(out, adapted(base, seed, **(lora or {})), **changes)
    if way is None:
        return run
    return embed(run, policy if way == "after" else None)


SAVING = {"save_strategy": "steps", "save_steps": 3, "eval_strategy": "steps", "eval_steps": 3}


@pytest.mark.parametrize("way", WAYS)
def test_adapters_train_and_resume(tmp_path: Path, way: str) -> None:
    whole = end_of(run_of(tmp_path / "a", way, **SAVING))
    assert_near(whole, end_of(run_of(tmp_path / "b", None, **SAVING)), ULPS)
    saved = tmp_path / "a" / "checkpoint-3"
    again = end_of(run_of(tmp_path / "c", way, seed=12, **SAVING), resume=str(saved))
    assert again.losses == whole.losses
    assert again.evals == whole.evals
    assert_same(again.weights, whole.weights)
    assert not (saved / "model.safetensors").exists()
    # The base of 80 kB is in none of its files.
    states = [file for file in (saved / "infinity").rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in states) < 60_000


@pytest.mark.parametrize("way", WAYS)
def test_saved_adapters_load(tmp_path: Path, way: str) -> None:
    run = run_of(tmp_path, way, lora={"modules_to_save": ["lm_head"]} if way == "after" else None)
    run.train()
    run.save_model(str(tmp_path / "out"))
    weights = {name: value.clone() for name, value in run.model.state_dict().items()}
    close(run)
    loaded = peft.PeftModel.from_pretrained(llama(), tmp_path / "out")
    assert_same(loaded.state_dict(), weights)


@pytest.mark.parametrize("way", WAYS)
def test_the_best_adapters_come_back(tmp_path: Path, way: str) -> None:
    changes = {
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": "steps",
        "save_steps": 2,
        "load_best_model_at_end": True,
        "learning_rate": 1.0,
    }
    run = run_of(tmp_path, way, **changes)
    ended = end_of(run)
    best = Path(run.state.best_model_checkpoint)
    loaded = peft.PeftModel.from_pretrained(llama(), best)
    assert_same(loaded.state_dict(), ended.weights)


def test_a_part_that_was_added_is_refused(tmp_path: Path) -> None:
    model = inf.offload(llama(), policy_in(tmp_path))
    model.extra = torch.nn.Linear(4, 4)
    run = trainer(tmp_path, model)
    with pytest.raises(ValueError, match=r"extra\.weight was added after inf\.offload"):
        embed(run)


def on_rank(rank: int, place: Path, shared: Path, **changes: Any) -> Ended:
    name, way = changes.pop("name"), changes.pop("way")
    resume, seed = changes.pop("resume", None), changes.pop("seed", 11)
    # Before the arguments make a group of their own, there is one.
    run = run_of(
        shared / name, way, seed + (rank if way == "before" else 0), ddp_backend="gloo", **changes
    )
    return end_of(run, resume=resume and str(shared / resume))


def on_two(tmp_path: Path, place: str, **changes: Any) -> list[Any]:
    job = Job("on_rank", str(tmp_path), changes, module=__name__)
    return on_ranks(job, tmp_path / place, 2)


@pytest.mark.parametrize("way", WAYS)
def test_adapters_on_two_ranks(tmp_path: Path, way: str) -> None:
    """Also with adapters that begin with other values on each rank: those of the first count, as in
    DDP."""
    saving = {"save_strategy": "steps", "save_steps": 3, "gradient_accumulation_steps": 2}
    plain = on_two(tmp_path, "a", name="plain", way=None, **saving)
    whole = on_two(tmp_path, "b", name="whole", way=way, **saving)
    assert whole[0].losses == pytest.approx(plain[0].losses, rel=DDP_ULPS)
    assert_same(whole[0].weights, whole[1].weights)
    again = on_two(
        tmp_path, "c", name="again", way=way, seed=20, resume="whole/checkpoint-3", **saving
    )
    assert again[0].losses == whole[0].losses
    assert_same(again[0].weights, whole[0].weights)
