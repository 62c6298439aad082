"""TRL's own scripts and one with a reference model, with a DeepSpeed configuration, unchanged, over
the stand-in: the losses of the same script without DeepSpeed.
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.deepspeed_hf import (
    SCRIPTS,
    found_in,
    logged,
    nvme,
    ran,
    without,
    written,
    zero2,
    zero3,
)
from tests.integrations.test_compat_deepspeed_hf import plain

pytestmark = pytest.mark.integrations
trl = pytest.importorskip("trl")
runs = pytest.importorskip("tests.integrations.trl_runs")

ULPS = 5e-6
COMMON = {
    "max_steps": 6, "per_device_train_batch_size": 2, "learning_rate": 1e-3, "logging_steps": 1,
    "report_to": "none", "save_strategy": "steps", "save_steps": 6, "bf16": "false",
    "disable_tqdm": "true", "max_length": 24, "dataloader_pin_memory": "false",
}  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models with their tokenizer, and data sets."""
    home = tmp_path_factory.mktemp("trl")
    runs.write_pretrained(home)
    for name, rows in (("texts", runs.texts()), ("preferences", runs.preferences())):
        (home / name).mkdir()
        rows.to_json(home / name / "train.jsonl")
    reference = runs.load(home)
    for param in reference.parameters():
        param.data.mul_(1.25)
    reference.save_pretrained(home / "reference")
    return home


def options(given: dict[str, Any]) -> list[str]:
    return [f"--{name}={value}" for name, value in given.items()]


def script(name: str) -> Path:
    """A script that TRL ships."""
    return Path(str(importlib.import_module(f"trl.scripts.{name}").__file__))


def log_of(out: Path) -> dict[str, Any]:
    state = json.loads((out / "checkpoint-6" / "trainer_state.json").read_text())
    return {"log": state["log_history"]}


def without_deepspeed(name: str, given: dict[str, Any], *flags: str) -> None:
    """Run a script of TRL in this process."""
    module = importlib.import_module(f"trl.scripts.{name}")
    parser = module.make_parser()
    arguments = [*options(given), *flags, "--use_cpu"]
    parsed = parser.parse_args_and_config(arguments, fail_with_unknown_args=False)
    module.main(*parsed)


@pytest.mark.parametrize(
    ("name", "data", "stage", "flags"),
    [
        pytest.param("sft", "texts", 3, (), marks=pytest.mark.slow),
        pytest.param("sft", "texts", 2, (), marks=pytest.mark.slow),
        ("sft", "texts", 3, ("--use_peft",)),
        ("dpo", "preferences", 3, ()),
        pytest.param("dpo", "preferences", 2, (), marks=pytest.mark.slow),
        pytest.param("dpo", "preferences", 3, ("--use_peft",), marks=pytest.mark.slow),
        ("dpo", "preferences", 3, ("--precompute_ref_log_probs",)),
        pytest.param(
            "dpo", "preferences", 2, ("--precompute_ref_log_probs",), marks=pytest.mark.slow
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else str(value),
)
def test_a_script_of_trl_trains_as_without_deepspeed(
    name: str, data: str, stage: int, flags: tuple[str, ...], place: Path, tmp_path: Path
) -> None:
    config = nvme(tmp_path / "drive") if stage == 3 else zero2()
    given = {
        **COMMON, "model_name_or_path": place / "causal", "dataset_name": place / data,
        "dtype": "float32",
    }  # fmt: skip
    path = written(without(config, "scheduler"), tmp_path)
    ran(
        script(name), *options({**given, "output_dir": tmp_path / "script", "deepspeed": path}),
        *flags,
    )  # fmt: skip
    without_deepspeed(name, {**given, "output_dir": tmp_path / "plain"}, *flags)
    found, expected = log_of(tmp_path / "script"), log_of(tmp_path / "plain")
    assert logged(found, "loss") == pytest.approx(logged(expected, "loss"), rel=ULPS)
    assert len(logged(found, "loss")) == 6
    kind = "adapter_model" if "--use_peft" in flags else "model"
    assert (tmp_path / "script" / f"{kind}.safetensors").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_reference_model_is_synchronised(ranks: int, place: Path, tmp_path: Path) -> None:
    given = {
        **COMMON, "model_name_or_path": place / "causal", "reference": place / "reference",
        "dataset": place / "preferences", "sync_ref_model": "true", "ref_model_sync_steps": 2,
        "ref_model_mixup_alpha": 0.6,
    }  # fmt: skip
    path = written(without(zero3(), "scheduler"), tmp_path)
    out = tmp_path / "script"
    ran(
        SCRIPTS / "preferences.py", *options({**given, "output_dir": out, "deepspeed": path}),
        ranks=ranks,
    )  # fmt: skip
    found = found_in(out, ranks)
    if ranks == 1:
        arguments = options({**given, "output_dir": tmp_path / "plain"})
        plain("preferences", *arguments, "--use_cpu")
        (expected,) = found_in(tmp_path / "plain", 1)
        assert logged(found[0], "loss") == pytest.approx(logged(expected, "loss"), rel=ULPS)
    else:
        # The trainer logs the mean over the ranks.
        assert logged(found[0], "loss") == logged(found[1], "loss")
        assert len(logged(found[0], "loss")) == 6
