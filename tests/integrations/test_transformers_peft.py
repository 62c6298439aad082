"""Trainer with adapters of PEFT: the base offloaded with them, or before them."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version
from transformers.integrations.peft import MIN_PEFT_VERSION

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
from tests.integrations.test_transformers_ranks import DDP_ULPS, Job, few_rows, on_ranks
from tests.integrations.test_transformers_runs import ULPS, assert_near, assert_same, mixtral

peft = pytest.importorskip("peft")

pytestmark = pytest.mark.integrations

OWN = pytest.param(
    "own",
    marks=pytest.mark.skipif(
        Version(version("peft")) < Version(MIN_PEFT_VERSION),
        reason=f"model.add_adapter of this transformers wants peft {MIN_PEFT_VERSION}",
    ),
)
WAYS = ["after", "before", OWN]
"""The model is offloaded after get_peft_model, by embed, or before; or the adapters are the model's
own, of `add_adapter`, and embed offloads them with it."""


def adapted(base: Any, seed: int = 11, **changes: Any) -> Any:
    """The base with adapters, which begin with something to train in both of their matrices."""
    torch.manual_seed(seed)
    return peft.get_peft_model(base, config_of(**changes))


def config_of(**changes: Any) -> Any:
    """Both matrices begin with something to train."""
    settings = {"r": 4, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}
    return peft.LoraConfig(**(settings | changes))


def with_own(seed: int = 11, **changes: Any) -> Any:
    """A model with the same adapters, added by transformers' `add_adapter`."""
    model = llama()
    torch.manual_seed(seed)
    model.add_adapter(config_of(**changes))
    return model


def loaded_from(directory: Path, way: str) -> Any:
    """Load the model from these files with the library that wrote them."""
    base = llama()
    if way != "own":
        return peft.PeftModel.from_pretrained(base, directory)
    base.load_adapter(directory)
    return base


def run_of(out: Path, way: str | None, seed: int = 11, lora: Any = None, **changes: Any) -> Any:
    """A trainer of adapters; plain for way=None."""
    policy = policy_in(out)
    made = mixtral() if lora and "target_parameters" in lora else llama()
    base = inf.offload(made, policy) if way == "before" else made
    of = with_own(seed, **(lora or {})) if way == "own" else adapted(base, seed, **(lora or {}))
    run = trainer(out, of, **changes)
    if way is None:
        return run
    return embed(run, None if way == "before" else policy)


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
    assert_same(loaded_from(tmp_path / "out", way).state_dict(), weights)
    # PEFT takes those of either.
    both = peft.PeftModel.from_pretrained(llama(), tmp_path / "out")
    assert_same(
        {name.removeprefix("base_model.model."): v for name, v in both.state_dict().items()},
        {name.removeprefix("base_model.model."): v for name, v in weights.items()},
    )


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("alone", [False, True])
def test_the_best_adapters_come_back(tmp_path: Path, way: str, alone: bool) -> None:
    changes = {
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": "steps",
        "save_steps": 2,
        "load_best_model_at_end": True,
        "save_only_model": alone,
        "learning_rate": 1.0,
    }
    run = run_of(tmp_path, way, **changes)
    ended = end_of(run)
    best = Path(run.state.best_model_checkpoint)
    assert best.name != "checkpoint-6"
    assert_same(loaded_from(best, way).state_dict(), ended.weights)


@pytest.mark.parametrize("way", ["after", OWN])
def test_adapters_alone_begin_a_new_run(tmp_path: Path, way: str) -> None:
    saving = {"save_strategy": "steps", "save_steps": 3, "save_only_model": True}
    first = end_of(run_of(tmp_path / "a", way, **saving))
    saved = tmp_path / "a" / "checkpoint-3"
    again = end_of(run_of(tmp_path / "b", way, seed=12), resume=str(saved))
    # With their values, and moments that begin anew.
    assert again.losses[:4] == first.losses[:4]
    assert again.losses[4:] != first.losses[4:]


@pytest.mark.parametrize("way", [OWN])
def test_files_of_another_adapter_are_refused(tmp_path: Path, way: str) -> None:
    adapted(llama(), target_modules=["k_proj"]).save_pretrained(tmp_path / "checkpoint-3")
    (tmp_path / "checkpoint-3" / "trainer_state.json").write_text("{}")
    run = run_of(tmp_path, way)
    with pytest.raises(ValueError, match=r"no adapter like 'default'.*k_proj"):
        run.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    close(run)


MORE: dict[str, Any] = {
    "dora": {"use_dora": True},
    "modules to save": {"modules_to_save": ["lm_head"]},
    "tokens": {"trainable_token_indices": [3, 5]},
    "biases": {"bias": "lora_only", "use_rslora": True},
    "experts": {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.gate.weight"]},
}


@pytest.mark.parametrize("kind", MORE)
def test_adapters_of_other_kinds(tmp_path: Path, kind: str) -> None:
    whole = end_of(run_of(tmp_path / "a", "after", lora=MORE[kind], **SAVING))
    plain = end_of(run_of(tmp_path / "b", None, lora=MORE[kind], **SAVING))
    assert_near(whole, plain, ULPS)
    saved = tmp_path / "a" / "checkpoint-3"
    again = run_of(tmp_path / "c", "after", seed=12, lora=MORE[kind], **SAVING)
    resumed = end_of(again, resume=str(saved))
    assert resumed.losses == whole.losses
    assert_same(resumed.weights, whole.weights)


@pytest.mark.parametrize("active", [["second"], ["default", "second"]], ids=str)
def test_several_adapters(tmp_path: Path, active: list[str]) -> None:
    def run(name: str, policy: Any, seed: int = 11) -> Any:
        model = adapted(llama(), seed)
        model.add_adapter("second", config_of(r=2, target_modules=["q_proj"]))
        model.base_model.set_adapter(active)
        return trainer(tmp_path / name, model, policy=policy, **SAVING)

    whole = end_of(run("a", {}))
    assert_near(whole, end_of(run("b", None)), ULPS)
    saved = tmp_path / "a" / "checkpoint-3"
    again = end_of(run("c", {}, seed=12), resume=str(saved))
    assert again.losses == whole.losses
    assert_same(again.weights, whole.weights)
    assert (saved / "second" / "adapter_model.safetensors").is_file()


def test_a_part_that_was_added_is_refused(tmp_path: Path) -> None:
    model = inf.offload(llama(), policy_in(tmp_path))
    model.extra = torch.nn.Linear(4, 4)
    run = trainer(tmp_path, model)
    with pytest.raises(ValueError, match=r"extra\.weight was added after inf\.offload"):
        embed(run)


def on_rank(rank: int, place: Path, shared: Path, **changes: Any) -> Ended:
    name, way = changes.pop("name"), changes.pop("way")
    resume, seed = changes.pop("resume", None), changes.pop("seed", 11)
    # The process group exists before the arguments would make one.
    run = run_of(shared / name, way, seed + rank, ddp_backend="gloo", **changes)
    return end_of(run, resume=resume and str(shared / resume))


def on_two(tmp_path: Path, place: str, **changes: Any) -> list[Any]:
    job = Job("on_rank", str(tmp_path), changes, module=__name__)
    return on_ranks(job, tmp_path / place, 2)


def same_rows(rank: int, place: Path, shared: Path, **changes: Any) -> Ended:
    way = changes.pop("way")
    given = {"train_dataset": few_rows()}
    settings = {"given": given, "train_sampling_strategy": "sequential", "ddp_backend": "gloo"}
    return end_of(run_of(shared / "two", way, **settings, **changes))


@pytest.mark.parametrize("way", WAYS)
def test_adapters_saved_on_two_ranks_and_resumed_on_one(tmp_path: Path, way: str) -> None:
    """Two ranks with the same rows do what one does with them."""
    saving = {"save_strategy": "steps", "save_steps": 3}
    job = Job("same_rows", str(tmp_path), {"way": way, **saving}, module=__name__)
    two = on_ranks(job, tmp_path / "ranks", 2)
    alone = run_of(
        tmp_path / "alone", way, seed=12, given={"train_dataset": few_rows()},
        train_sampling_strategy="sequential",
    )  # fmt: skip
    ended = end_of(alone, resume=str(tmp_path / "two" / "checkpoint-3"))
    # Sums over ranks round once more.
    assert ended.losses == pytest.approx(two[0].losses, rel=DDP_ULPS)
    for name, value in ended.weights.items():
        torch.testing.assert_close(value, two[0].weights[name], rtol=1e-6, atol=1e-8)


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
