"""TRL's trainers on an offloaded model: against the plain trainer, and resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl")
pytest.importorskip("peft")

import trl
from trl.trainer.callbacks import BEMACallback

import infinity as inf
from infinity.integrations.transformers import embed
from tests.integrations import trl_runs
from tests.integrations.trl_runs import (
    SAVED,
    STEPS,
    TASKS,
    assert_close,
    assert_same,
    embedded,
    nvme,
    plain,
)

pytestmark = pytest.mark.integrations


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trl_runs.write_pretrained(tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize("task", TASKS)
def test_a_run_equals_that_of_the_plain_trainer(task: str, models: Path, tmp_path: Path) -> None:
    start = trl_runs.values_of(trl_runs.load(models, TASKS[task].kind))
    got = embedded(task, models, tmp_path / "embedded")
    still = [
        name
        for name, value in start.items()
        if name in got.params and torch.equal(got.params[name], value)
    ]
    still += [name for name, value in got.params.items() if "default" in name and not value.any()]
    assert not still, "these did not train"
    assert_same(got, plain(task, models, tmp_path / "reference", rounded_once=True))
    assert_close(got, plain(task, models, tmp_path / "torch"))


@pytest.mark.parametrize("task", ["sft-lora", "dpo", "grpo-beta"])
def test_a_run_under_autocast_equals_that_of_the_plain_trainer(
    task: str, models: Path, tmp_path: Path
) -> None:
    got = embedded(task, models, tmp_path / "embedded", bf16=True)
    assert_same(got, plain(task, models, tmp_path / "plain", rounded_once=True, bf16=True))


def test_grpo_generates_what_the_plain_trainer_generates(models: Path, tmp_path: Path) -> None:
    """Losses near zero say little: rewards and lengths are those of the same texts."""
    names = ("reward", "reward_std", "completions/mean_length")
    figures = [
        [[row[name] for name in names] for row in result.logged if "reward" in row]
        for result in (
            plain("grpo", models, tmp_path / "plain"),
            embedded("grpo", models, tmp_path / "embedded"),
        )
    ]
    assert len(figures[0]) == STEPS
    assert any(row[1] > 0 for row in figures[0]), "all rewards tie"
    assert figures[0] == figures[1]


@pytest.mark.parametrize(
    "task",
    [
        "sft", "sft-packed", "sft-lora", "sft-lora-path", "dpo", "dpo-reference", "dpo-sync",
        "dpo-precomputed", "dpo-adapted", "grpo-beta", "grpo-sync", "reward",
    ],
)  # fmt: skip
def test_a_resumed_run_equals_the_uninterrupted_one(
    task: str, models: Path, tmp_path: Path
) -> None:
    saves = {"save_strategy": "steps", "save_steps": SAVED}
    whole = embedded(task, models, tmp_path / "whole", **saves)
    resumed = embedded(
        task, models, tmp_path / "resumed", resume=tmp_path / "whole" / f"checkpoint-{SAVED}"
    )
    assert len(resumed.losses) == STEPS - SAVED
    whole.losses[:SAVED] = []
    assert_same(resumed, whole)


def test_a_reference_adapter_comes_from_the_checkpoint(models: Path, tmp_path: Path) -> None:
    """The reference does not train, and only the checkpoint has the values that it was copied from:
    a resumed process begins with other adapters."""
    saves = {"save_strategy": "steps", "save_steps": SAVED}
    whole = embedded("dpo-adapted", models, tmp_path / "whole", **saves)
    trainer = TASKS["dpo-adapted"].trainer(models, tmp_path / "resumed")
    with torch.no_grad():
        for name, param in trainer.model.named_parameters():
            if "lora_" in name:
                param.add_(0.01)
    embed(trainer, nvme(tmp_path / "nvme"))
    resumed = trl_runs.run(trainer, tmp_path / "whole" / f"checkpoint-{SAVED}")
    whole.losses[:SAVED] = []
    assert_same(resumed, whole)


def test_a_synchronised_reference_moves(models: Path, tmp_path: Path) -> None:
    moved = embedded("dpo-sync", models, tmp_path / "moved").reference
    stays = embedded("dpo", models, tmp_path / "stays").reference
    assert all(not torch.equal(value, stays[name]) for name, value in moved.items())


def test_reference_log_probabilities_come_from_an_offloaded_model(
    models: Path, tmp_path: Path
) -> None:
    """TRL computes them as it is built: of a model that was offloaded before."""
    task = TASKS["dpo-precomputed"]
    by_trl = task.trainer(models, tmp_path / "plain")
    # TRL would take those of the plain run, by a hash of data and model.
    columns = {name: list(by_trl.train_dataset[name]) for name in by_trl.train_dataset.column_names}
    for file in by_trl.train_dataset.cache_files:
        Path(file["filename"]).unlink()
    model = inf.offload(trl_runs.load(models), nvme(tmp_path / "nvme"))
    given = {**trl_runs.COMMON, **task.given, "output_dir": tmp_path / "out"}
    trainer = embed(trl_runs.dpo(models, model, given))
    assert inf.handle(model).stats().demands > 0
    for name in ("ref_chosen_logps", "ref_rejected_logps"):
        assert list(trainer.train_dataset[name]) == columns[name]
    want = plain("dpo", models, tmp_path / "reference", rounded_once=True)
    assert trl_runs.run(trainer).losses == want.losses


def test_the_reference_has_no_states(models: Path, tmp_path: Path) -> None:
    trainer = embed(
        TASKS["dpo-reference"].trainer(models, tmp_path / "out"), nvme(tmp_path / "nvme")
    )
    trainer.train()
    model, reference = (inf.handle(each) for each in (trainer.model, trainer.ref_model))
    at_rest = reference.stats().params * 4  # fp32 parameters, in chunks of a drive's blocks
    assert at_rest <= reference.stats().nvme_bytes < model.stats().nvme_bytes / 2
    trl_runs.close(trainer)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"activation_offloading": True}, "activations='cpu'"),
        ({"use_vllm": True}, "use_vllm=True"),
        ({"use_transformers_continuous_batching": True}, "in a second thread"),
    ],
)
def test_what_an_offloaded_model_cannot_bear_is_refused(
    change: dict[str, Any], told: str, models: Path, tmp_path: Path
) -> None:
    trainer = TASKS["grpo"].trainer(models, tmp_path / "out")
    for name, value in change.items():
        # Set here, since TRL wants a GPU, or vLLM, to be built with it.
        setattr(trainer, name, value)
        setattr(trainer.args, name, value)
    with pytest.raises(ValueError, match=told):
        embed(trainer, nvme(tmp_path / "nvme"))
    assert not inf.offloaded_modules(trainer.model)


def test_a_callback_with_copies_of_the_model_is_refused(models: Path, tmp_path: Path) -> None:
    trainer = TASKS["sft"].trainer(models, tmp_path / "out")
    trainer.add_callback(BEMACallback())
    with pytest.raises(ValueError, match="BEMACallback"):
        embed(trainer, nvme(tmp_path / "nvme"))


def test_the_trained_model_loads_with_transformers(models: Path, tmp_path: Path) -> None:
    trainer = embed(TASKS["sft"].trainer(models, tmp_path / "out"), nvme(tmp_path / "nvme"))
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    want = trl_runs.values_of(trainer.model)
    trl_runs.close(trainer)
    found = trl.SFTTrainer(
        str(tmp_path / "saved"),
        trl.SFTConfig(**trl_runs.COMMON, output_dir=tmp_path / "again"),
        train_dataset=trl_runs.texts(),
    ).model.state_dict()
    assert found.keys() == want.keys()
    assert all(torch.equal(value, want[name]) for name, value in found.items())
