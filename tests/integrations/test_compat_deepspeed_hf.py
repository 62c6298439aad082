"""transformers' Trainer with a DeepSpeed configuration, in unchanged scripts, over the stand-in:
the numbers of the engine's own path, to the bit.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.integrations.deepspeed_hf import (
    SCRIPTS,
    finetuned,
    found_in,
    logged,
    nvme,
    without,
    zero2,
    zero3,
)
from tests.integrations.hf_trainers import Ended, end_of, llama, policy_in, trainer
from tests.integrations.test_transformers_ranks import on_two

pytestmark = pytest.mark.integrations

LIKE = {"max_grad_norm": 1.0, "gradient_accumulation_steps": 2}
"""Arguments of both paths. Clipping is the documentation's default."""

DECAY = {"weight_decay": 0.1}
"""With the trainer's own optimizer: transformers gives DeepSpeed's one group of all parameters, so
that norms and biases decay, too."""

BEST = {
    "save_strategy": "steps", "eval_strategy": "steps", "save_steps": 3, "eval_steps": 3,
    "load_best_model_at_end": True,
}  # fmt: skip


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("llama")
    llama().save_pretrained(place)
    return place


def plain(script: str, *arguments: Any) -> None:
    """Run a script in this process, without DeepSpeed."""
    spec = importlib.util.spec_from_file_location(script, SCRIPTS / f"{script}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main(list(map(str, arguments)))


def weights_in(place: Path) -> dict[str, torch.Tensor]:
    model = transformers.AutoModelForCausalLM.from_pretrained(place)
    return dict(model.state_dict())


def assert_same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for name, value in a.items():
        assert torch.equal(value, b[name]), name


def assert_equals(found: dict[str, Any], native: Ended) -> None:
    assert logged(found, "loss") == native.losses
    assert logged(found, "grad_norm") == native.norms
    assert len(native.losses) == 6


def native(out: Path, **changes: Any) -> Ended:
    """The same training by `embed`, with everything on NVMe: placement changes no number."""
    return end_of(trainer(out, policy=policy_in(out), **{**LIKE, **changes}))


# -- one rank --------------------------------------------------------------------------------------


def test_zero_2_of_the_documentation_is_the_native_path(pretrained: Path, tmp_path: Path) -> None:
    config = without(zero2(), "scheduler")
    found = finetuned(tmp_path / "script", pretrained, config, **LIKE)[0]
    ended = native(tmp_path / "native")
    assert_equals(found, ended)
    assert_same(weights_in(tmp_path / "script"), ended.weights)


@pytest.fixture(scope="module")
def saved(pretrained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the NVMe example, with a checkpoint and the best model, as its directory."""
    place = tmp_path_factory.mktemp("nvme")
    config = without(nvme(place / "drive"), "optimizer", "scheduler")
    finetuned(place / "whole", pretrained, config, "--generate", **LIKE, **DECAY, **BEST)
    return place


def test_nvme_of_the_documentation_is_the_native_path(saved: Path, tmp_path: Path) -> None:
    """With the trainer's own optimizer and schedule."""
    found = found_in(saved / "whole", 1)[0]
    ended = native(tmp_path, **DECAY, **BEST)
    assert_equals(found, ended)
    logged = [line["eval_loss"] for line in found["log"] if "eval_loss" in line]
    assert logged == [*ended.evals, found["eval"]]  # the script looks at the best model again
    assert found["eval"] == min(ended.evals)
    assert_same(weights_in(saved / "whole"), ended.weights)


def test_generated_tokens_are_those_of_the_saved_model(saved: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(saved / "whole")
    (row,) = found_in(saved / "whole", 1)[0]["generated"]
    told = model.generate(torch.tensor([row[:8]]), max_new_tokens=2, do_sample=False)
    assert told.tolist() == [row]


def test_a_resumed_run_is_the_uninterrupted_one(
    pretrained: Path, saved: Path, tmp_path: Path
) -> None:
    config = without(nvme(tmp_path / "drive"), "optimizer", "scheduler")
    checkpoint = {"resume_from_checkpoint": saved / "whole" / "checkpoint-3"}
    again = finetuned(
        tmp_path / "again", pretrained, config, **LIKE, **DECAY, **checkpoint
    )[0]
    whole = found_in(saved / "whole", 1)[0]
    for name in ("loss", "grad_norm", "learning_rate"):
        assert logged(again, name) == logged(whole, name)
        assert len(logged(again, name)) == 6
    # Of the last step, in the checkpoint's own weights: the best model may be another's.
    assert_same(
        weights_in(tmp_path / "again"), weights_in(saved / "whole" / "checkpoint-6")
    )


# -- two ranks -------------------------------------------------------------------------------------


def test_two_ranks_are_the_native_path_and_resume(pretrained: Path, tmp_path: Path) -> None:
    """ZeRO-3 of the documentation, with DeepSpeed's optimizer and schedule. Generation continues
    until both ranks have their tokens."""
    config = without(zero3(), "scheduler")
    saves = {"save_strategy": "steps", "save_steps": 3}
    whole = finetuned(
        tmp_path / "whole", pretrained, config, "--generate", ranks=2, **LIKE, **saves
    )
    changes = {"name": "native", **LIKE}
    for found, ended in zip(whole, on_two(tmp_path, "ends", "ranks", **changes), strict=True):
        assert_equals(found, ended)
    assert_same(weights_in(tmp_path / "whole"), ended.weights)
    first, second = (found["generated"][0] for found in whole)
    assert len(first) < len(second)
    assert second[: len(first)] == first
    again = finetuned(
        tmp_path / "again", pretrained, config, ranks=2, **LIKE,
        resume_from_checkpoint=tmp_path / "whole" / "checkpoint-3",
    )  # fmt: skip
    assert [logged(found, "loss") for found in again] == [logged(found, "loss") for found in whole]
    assert_same(weights_in(tmp_path / "again"), weights_in(tmp_path / "whole"))
