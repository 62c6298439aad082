"""Plugins for axolotl and LLaMA-Factory that docs/embedding.md shows, where these are installed.

Both pin versions of transformers and trl, so each has an environment of its own. Of axolotl the
plugin manager and the base class are enough; of LLaMA-Factory all of `run_exp` runs.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import infinity as inf
from tests import models, tiny_llama

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "embedding.md"


@pytest.mark.parametrize("name", ["axolotl_infinity.py", "llamafactory_infinity.py"])
def test_the_page_shows_this_plugin(name: str) -> None:
    source = (HERE / name).read_text(encoding="utf-8")
    assert f"```python\n{source}```" in PAGE.read_text(encoding="utf-8")


def trainer(out: Path) -> Any:
    """A Trainer of six steps, as a framework would build it."""
    import transformers

    torch.manual_seed(0)
    data = [{key: value[0] for key, value in batch.items()} for batch in models.token_batches(12)]
    arguments = transformers.TrainingArguments(
        str(out), use_cpu=True, per_device_train_batch_size=2, max_steps=6, learning_rate=1e-2,
        logging_steps=1, save_strategy="no", report_to=[], disable_tqdm=True, max_grad_norm=0.0,
    )  # fmt: skip
    return transformers.Trainer(models.llama(), arguments, train_dataset=data)


def losses_of(trained: Any) -> list[float]:
    return [entry["loss"] for entry in trained.state.log_history if "loss" in entry]


@pytest.mark.integrations
def test_axolotl_offloads_what_it_has_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The calls that axolotl's train() makes, in their order."""
    pytest.importorskip("axolotl.integrations.base")
    import transformers
    from axolotl.integrations.base import PluginManager
    from axolotl.utils.dict import DictDefault

    monkeypatch.syspath_prepend(str(HERE))
    plain = trainer(tmp_path)
    plain.train()

    manager = PluginManager.get_instance()
    manager.register("axolotl_infinity.InfinityPlugin")
    assert manager.get_input_args() == ["axolotl_infinity.InfinityArgs"]
    arguments = sys.modules["axolotl_infinity"].InfinityArgs(
        infinity={"params": "nvme", "optim": "nvme", "nvme": str(tmp_path), "ram": "min"}
    )
    cfg = DictDefault({**arguments.model_dump(), "output_dir": str(tmp_path / "out")})

    embedded = trainer(tmp_path)
    manager.post_trainer_create(cfg, embedded)
    assert inf.offloaded_modules(embedded.model) == [embedded.model]
    embedded.train()
    assert losses_of(embedded) == pytest.approx(losses_of(plain), rel=1e-5)

    manager.post_train(cfg, embedded.model)
    embedded.model.save_pretrained(cfg.output_dir)  # on rank 0
    manager.post_train(cfg, embedded.model)
    again = transformers.AutoModelForCausalLM.from_pretrained(cfg.output_dir).state_dict()
    for name, value in embedded.model.state_dict().items():
        assert torch.equal(again[name], value), name
    inf.handle(embedded.model).close()


def llamafactory_arguments(place: Path, out: Path) -> dict[str, Any]:
    """A full fine-tuning of six steps on four rows."""
    weights, data = place / "weights", place / "data"
    if not weights.exists():
        weights.mkdir()
        tiny_llama.write_model(weights, tied=False)
        data.mkdir()
        rows = [{"instruction": "say", "input": word, "output": word * 3} for word in "abcd"]
        (data / "tiny.json").write_text(json.dumps(rows))
        (data / "dataset_info.json").write_text('{"tiny": {"file_name": "tiny.json"}}')
    return {
        "stage": "sft", "do_train": True, "finetuning_type": "full", "template": "empty",
        "model_name_or_path": str(weights), "dataset": "tiny", "dataset_dir": str(data),
        "output_dir": str(out), "cutoff_len": 32, "max_steps": 6, "use_cpu": True,
        "per_device_train_batch_size": 2, "learning_rate": 1e-3, "logging_steps": 1,
        "low_cpu_mem_usage": False, "save_strategy": "no", "report_to": "none",
        "overwrite_output_dir": True, "max_grad_norm": 0.0, "seed": 0, "bf16": True,
        "pure_bf16": False, "disable_gradient_checkpointing": True,
    }  # fmt: skip


def logged(out: Path) -> list[float]:
    state = json.loads((out / "trainer_state.json").read_text())
    return [entry["loss"] for entry in state["log_history"] if "loss" in entry]


@pytest.mark.integrations
def test_llamafactory_trains_an_offloaded_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of `run_exp`, plain and by the script."""
    pytest.importorskip("llamafactory")
    import transformers
    from llamafactory.train import tuner
    from llamafactory.train.sft import workflow

    monkeypatch.syspath_prepend(str(HERE))
    monkeypatch.setattr(workflow, "CustomSeq2SeqTrainer", workflow.CustomSeq2SeqTrainer)
    tuner.run_exp(llamafactory_arguments(tmp_path, tmp_path / "plain"))

    import llamafactory_infinity

    policy = {"params": "nvme", "optim": "nvme", "nvme": str(tmp_path), "ram": "min"}
    llamafactory_infinity.offload_trainers(policy)
    built: list[Any] = []
    make = workflow.CustomSeq2SeqTrainer

    def noted(*args: Any, **kwargs: Any) -> Any:
        built.append(make(*args, **kwargs))
        return built[-1]

    workflow.CustomSeq2SeqTrainer = noted
    tuner.run_exp(llamafactory_arguments(tmp_path, tmp_path / "offloaded"))
    (trained,) = built
    assert inf.offloaded_modules(trained.model) == [trained.model]
    assert logged(tmp_path / "offloaded") == pytest.approx(logged(tmp_path / "plain"), rel=1e-4)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "offloaded").state_dict()
    for name, value in trained.model.state_dict().items():
        assert torch.equal(again[name], value), name
    inf.handle(trained.model).close()
