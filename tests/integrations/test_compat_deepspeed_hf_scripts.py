"""Scripts of Accelerate, PEFT and TRL with a DeepSpeed configuration, unchanged, over the stand-in:
the losses of the same script without DeepSpeed, and resumed runs.
"""

from __future__ import annotations

import json
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
    ran,
    without,
    written,
)
from tests.integrations.hf_trainers import llama
from tests.integrations.test_compat_deepspeed_hf import plain, weights_in

pytestmark = pytest.mark.integrations

ULPS = 2e-6
"""Relative difference of losses: torch's AdamW rounds otherwise, and norms are taken in another
order."""


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("llama")
    llama().save_pretrained(place)
    return place


# -- adapters, heads, embeddings -------------------------------------------------------------------

TRAINING = {
    "per_device_train_batch_size": 2, "max_steps": 6, "learning_rate": 1e-2, "logging_steps": 1,
    "save_strategy": "no", "report_to": "none", "disable_tqdm": True,
}  # fmt: skip


@pytest.mark.parametrize(
    "flags",
    [("--lora", "--vocabulary=70"), pytest.param(("--labels=3",), marks=pytest.mark.slow)],
    ids=["lora on resized embeddings", "a new head"],
)
def test_changed_models_train_as_without_deepspeed(
    flags: tuple[str, ...], pretrained: Path, tmp_path: Path
) -> None:
    config = without(nvme(tmp_path / "drive"), "scheduler")
    saves = {"save_strategy": "steps", "save_steps": 3}
    found = finetuned(tmp_path / "script", pretrained, config, *flags, **saves)[0]
    known = [f"--{name}={value}" for name, value in TRAINING.items()]
    plain(
        "finetune", "--model_name_or_path", pretrained, "--output_dir", tmp_path / "plain",
        "--use_cpu", *known, *flags,
    )  # fmt: skip
    (expected,) = found_in(tmp_path / "plain", 1)
    assert logged(found, "loss") == pytest.approx(logged(expected, "loss"), rel=ULPS)
    assert found["eval"] == pytest.approx(expected["eval"], rel=ULPS)
    if "--lora" in flags:
        # Adapters alone, and no base in the checkpoint.
        assert (tmp_path / "script" / "adapter_model.safetensors").is_file()
        again = finetuned(
            tmp_path / "again", pretrained, config, *flags,
            resume_from_checkpoint=tmp_path / "script" / "checkpoint-3",
        )[0]  # fmt: skip
        assert logged(again, "loss") == logged(found, "loss")


# -- accelerate ------------------------------------------------------------------------------------


def looped(out: Path, model: Path, *arguments: Any, ranks: int = 1, **environment: str) -> Any:
    ran(SCRIPTS / "loop.py", model, out, *arguments, ranks=ranks, environment=environment)
    return found_in(out, ranks)


def test_an_accelerate_loop_trains_as_without_deepspeed_and_resumes(
    pretrained: Path, tmp_path: Path
) -> None:
    """With torch's optimizer and schedule, and the configuration named by variables."""
    config = without(nvme(tmp_path / "drive"), "optimizer", "scheduler", "fp16", "bf16")
    told = {
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(written(config, tmp_path)),
    }
    steps = ("--accumulate", 2, "--save", 3)
    (found,) = looped(tmp_path / "whole", pretrained, *steps, **told)
    plain("loop", pretrained, tmp_path / "plain", "--accumulate", 2)
    (expected,) = found_in(tmp_path / "plain", 1)
    for name in ("losses", "norms", "rates"):
        assert found[name] == pytest.approx(expected[name], rel=ULPS)
    resume = ("--resume", tmp_path / "whole" / "state")
    (again,) = looped(tmp_path / "again", pretrained, *steps, *resume, **told)
    assert again["losses"] == found["losses"][6:]
    saved = [weights_in(tmp_path / name / "model") for name in ("whole", "again")]
    assert all(torch.equal(value, saved[1][name]) for name, value in saved[0].items())


def test_dummies_train_on_two_ranks_in_bf16(pretrained: Path, tmp_path: Path) -> None:
    """Optimizer and schedule of the file, by a DeepSpeedPlugin."""
    config = nvme(tmp_path / "drive") | {"bf16": {"enabled": True}}
    config["optimizer"]["params"] = {"lr": "auto", "weight_decay": "auto"}
    config["scheduler"] = {
        "type": "WarmupDecayLR",
        "params": {
            "warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto",
            "total_num_steps": "auto",
        },
    }  # fmt: skip
    path = written(without(config, "fp16"), tmp_path)
    whole = looped(
        tmp_path / "whole", pretrained, "--config", path, "--dummy", "--save", 3, ranks=2
    )
    again = looped(
        tmp_path / "again", pretrained, "--config", path, "--dummy", "--save", 3,
        "--resume", tmp_path / "whole" / "state", ranks=2,
    )  # fmt: skip
    assert [found["losses"] for found in again] == [found["losses"][3:] for found in whole]
    assert whole[0]["losses"] != whole[1]["losses"]
    assert whole[0]["norms"] == whole[1]["norms"]
    kept = json.loads((tmp_path / "whole" / "model" / "config.json").read_text())
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "whole" / "model")
    assert {param.dtype for param in model.parameters()} == {torch.bfloat16}, kept
