"""transformers' Trainer with an offloaded model: the losses of the same trainer with torch.optim's
AdamW, and the end of a run that nothing interrupted.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

import infinity as inf
from infinity.integrations._trainer import _on_its_device
from infinity.integrations.transformers import embed, save_pretrained
from tests.integrations.hf_trainers import REFERENCE, close, end_of, llama, policy_in, trainer


def assert_same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for name, value in a.items():
        assert torch.equal(value, b[name]), name


def test_losses_are_those_of_adamw(tmp_path: Path) -> None:
    """Equal floats to the reference's, and torch's to two ulps."""
    changes = {"gradient_accumulation_steps": 2, "weight_decay": 0.1}
    embedded = end_of(trainer(tmp_path / "a", policy={}, **changes))
    reference = end_of(trainer(tmp_path / "b", given=REFERENCE, **changes))
    plain = end_of(trainer(tmp_path / "c", **changes))
    assert embedded.losses == reference.losses
    assert embedded.losses == pytest.approx(plain.losses, rel=3e-7)


def test_resuming_equals_the_run_that_went_on(tmp_path: Path) -> None:
    whole = end_of(trainer(tmp_path / "a", policy={}, save_strategy="steps", save_steps=3))
    again = trainer(tmp_path / "b", llama(seed=9), policy={})
    resumed = end_of(again, resume=tmp_path / "a" / "checkpoint-3")
    # The first three come from the checkpoint.
    assert resumed.losses == whole.losses
    assert len(whole.losses) == 6
    assert_same(resumed.weights, whole.weights)


def test_saved_models_load_in_from_pretrained(tmp_path: Path) -> None:
    run = trainer(tmp_path, policy={})
    run.train()
    # A name that is known before: what others put there is not written through.
    (tmp_path / "by_trainer").mkdir()
    (tmp_path / "by_trainer" / "training_args.bin").symlink_to(tmp_path / "somebody's")
    run.save_model(tmp_path / "by_trainer")
    assert not (tmp_path / "somebody's").exists()
    save_pretrained(run.model, tmp_path / "by_hand", max_shard_size=40_000)
    weights = {name: value.clone() for name, value in run.model.state_dict().items()}
    close(run)
    assert len(list((tmp_path / "by_hand").glob("*.safetensors"))) > 1
    for name in ("by_trainer", "by_hand"):
        loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name)
        assert_same(loaded.state_dict(), weights)
        assert loaded.config.architectures == ["LlamaForCausalLM"]


def test_an_optimizer_of_torch_is_refused(tmp_path: Path) -> None:
    model = llama()
    given = {"optimizers": (torch.optim.AdamW(model.parameters()), None)}
    run = trainer(tmp_path, model, given=given)
    with pytest.raises(ValueError, match=r"torch\.optim\.adamw\.AdamW.*leave optimizers= out"):
        embed(run, policy_in(tmp_path))
    # The model is as it was.
    assert not inf.offloaded_modules(model)


def test_a_model_that_the_trainer_left_computes_where_its_batches_are() -> None:
    gpu = torch.device("cuda:0")
    chosen = _on_its_device(inf.Policy(params="cpu"), gpu)
    assert chosen == inf.Policy(params="cpu", device=gpu)
    assert _on_its_device(None, gpu) == inf.Policy(device=gpu)
    given = inf.Policy(device="cpu")
    assert _on_its_device(given, gpu) is given
    assert _on_its_device(None, torch.device("cpu")) is None
