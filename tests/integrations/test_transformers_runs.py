"""Options of a training script of transformers' Trainer, on an offloaded model: each run against
the same one on a plain model. With the AdamW that the engine equals bit for bit losses are equal
floats; with torch's own they are equal to two ulps.
"""

from __future__ import annotations

import dataclasses
import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from accelerate.state import AcceleratorState
from transformers.trainer_jit_checkpoint import JITCheckpointCallback

import infinity as inf
from infinity.integrations.transformers import DriveFigures, embed, from_pretrained, save_pretrained
from tests import hub_models
from tests.integrations.hf_trainers import (
    REFERENCE,
    Ended,
    arguments,
    close,
    end_of,
    llama,
    policy_in,
    rows,
    trainer,
)

pytestmark = pytest.mark.integrations

ULPS = 3e-7
"""Relative difference of losses: torch's AdamW rounds in another order."""

CLIPPED = 2e-6
"""Relative difference of losses where a norm was taken in another order of sums."""


def assert_near(found: Ended, wanted: Ended, tolerance: float) -> None:
    assert len(found.losses) == len(wanted.losses) > 0
    for a, b in zip(found.losses + found.evals, wanted.losses + wanted.evals, strict=True):
        assert math.isclose(a, b, rel_tol=tolerance), (found, wanted)


def both(tmp_path: Path, **changes: Any) -> tuple[Ended, Ended]:
    """The ends of an embedded run, and of Trainer's own."""
    policy = changes.pop("policy", {})
    return (
        end_of(trainer(tmp_path / "embedded", policy=policy, **changes)),
        end_of(trainer(tmp_path / "plain", **changes)),
    )


def assert_equal(tmp_path: Path, **changes: Any) -> None:
    """Compare an embedded run with the reference's AdamW, and with torch's."""
    embedded, plain = both(tmp_path, **changes)
    changes.pop("policy", None)
    given = {**changes.pop("given", {}), **REFERENCE}
    reference = end_of(trainer(tmp_path / "reference", given=given, **changes))
    assert embedded.losses == reference.losses
    assert embedded.evals == reference.evals
    assert_near(embedded, plain, ULPS)


@pytest.mark.parametrize(
    "changes",
    [
        {"gradient_accumulation_steps": 3, "weight_decay": 0.1},
        {"activation_checkpointing": True},
        {"label_smoothing_factor": 0.1},
        {"neftune_noise_alpha": 5.0},
        {"eval_strategy": "steps", "eval_steps": 2, "eval_on_start": True},
        {"torch_compile": True, "torch_compile_backend": "eager"},
        {"lr_scheduler_type": "cosine", "warmup_steps": 2},
        {"full_determinism": True},
        {"bf16_full_eval": False, "include_num_input_tokens_seen": "all"},
        {"policy": {"update": "backward"}, "gradient_accumulation_steps": 2},
        {"policy": {"update": "backward", "generations": 2}},
    ],
    ids=str,
)
def test_losses_are_those_of_torch(tmp_path: Path, changes: dict[str, Any]) -> None:
    assert_equal(tmp_path, **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"optim": "sgd", "optim_args": "momentum=0.9"},
        {"optim": "adagrad"},
        {"optim": "rmsprop", "optim_args": "alpha=0.9"},
    ],
    ids=str,
)
def test_other_optimizers(tmp_path: Path, changes: dict[str, Any]) -> None:
    embedded, plain = both(tmp_path, **changes)
    assert_near(embedded, plain, ULPS)


@pytest.mark.parametrize(
    "policy", [{}, {"update": "backward", "generations": 2}], ids=["deferred", "backward"]
)
def test_clipping_differs_by_the_norm_alone(tmp_path: Path, policy: dict[str, Any]) -> None:
    embedded, plain = both(tmp_path, max_grad_norm=0.5, policy=policy)
    assert_near(embedded, plain, CLIPPED)
    assert embedded.norms == pytest.approx(plain.norms, rel=1e-5)


def test_autocast_rounds_as_torch_does(tmp_path: Path) -> None:
    """An ulp of AdamW flips a rounding of a weight to bf16 now and then."""
    embedded, plain = both(tmp_path / "torch", bf16=True)
    reference = end_of(trainer(tmp_path / "reference", given=REFERENCE, bf16=True))
    assert embedded.losses == reference.losses
    assert_near(embedded, plain, 1e-4)


def test_a_loss_function_of_the_script(tmp_path: Path) -> None:
    def loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
        found = torch.nn.functional.cross_entropy(
            outputs.logits.flatten(0, 1), labels.flatten(), reduction="sum"
        )
        return found / num_items_in_batch

    assert_equal(tmp_path, given={"compute_loss_func": loss}, gradient_accumulation_steps=2)


@pytest.mark.parametrize("best", [False, True], ids=["states", "weights alone"])
def test_the_best_model_comes_back(tmp_path: Path, best: bool) -> None:
    changes = {
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": "steps",
        "save_steps": 2,
        "save_total_limit": 1,
        "load_best_model_at_end": True,
        "save_only_model": best,
        # A rate that spoils the model from the first step on.
        "learning_rate": 0.5,
        "optim": "sgd",
        "max_steps": 4,
    }
    embedded, plain = both(tmp_path, **changes)
    assert embedded.evals == plain.evals
    for key, value in embedded.weights.items():
        torch.testing.assert_close(value, plain.weights[key], rtol=1e-6, atol=1e-8)
    for name in ("embedded", "plain"):
        kept = sorted(path.name for path in (tmp_path / name).glob("checkpoint-*"))
        assert kept == ["checkpoint-2"], (name, kept)


def assert_same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for name, value in a.items():
        assert torch.equal(value, b[name]), name


def test_a_bf16_model_resumes_with_its_masters(tmp_path: Path) -> None:
    changes = {"policy": {}, "save_strategy": "steps", "save_steps": 3, "max_grad_norm": 1.0}
    whole = end_of(trainer(tmp_path / "a", llama().to(torch.bfloat16), **changes))
    again = trainer(tmp_path / "b", llama(seed=9).to(torch.bfloat16), **changes)
    resumed = end_of(again, resume=str(tmp_path / "a" / "checkpoint-3"))
    assert resumed.losses == whole.losses
    assert resumed.norms == whole.norms
    assert_same(resumed.weights, whole.weights)


class _Preempted(transformers.TrainerCallback):
    """Asks for a checkpoint as SIGTERM does, between two micro-batches of the fourth step."""

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 3:
            self.asked.jit_manager.is_checkpoint_requested = True

    def set_run(self, run: Any) -> None:
        """Find the callback to ask."""
        callbacks = run.callback_handler.callbacks
        self.asked = next(each for each in callbacks if isinstance(each, JITCheckpointCallback))


@pytest.mark.parametrize(
    "policy", [{}, {"update": "backward", "generations": 2}], ids=["deferred", "backward"]
)
def test_a_checkpoint_upon_a_signal(tmp_path: Path, policy: dict[str, Any]) -> None:
    """A run that is saved between backward and the step resumes with the results of the whole run.
    """
    changes = {"gradient_accumulation_steps": 2, "max_grad_norm": 0.5, "policy": policy}
    whole = end_of(trainer(tmp_path / "whole", **changes))
    preempted = _Preempted()
    first = trainer(
        tmp_path / "a", given={"callbacks": [preempted]}, enable_jit_checkpoint=True, **changes
    )
    preempted.set_run(first)
    first.train()
    close(first)
    again = end_of(
        trainer(tmp_path / "b", llama(seed=9), **changes),
        resume=str(tmp_path / "a" / "checkpoint-3"),
    )
    assert again.losses == whole.losses
    assert_same(again.weights, whole.weights)


DURABLE = """
import os, signal, sys
from pathlib import Path
import transformers
from tests.integrations.hf_trainers import trainer

class Killed(transformers.TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 5:
            os.kill(os.getpid(), signal.SIGKILL)

saving = {"save_strategy": "steps", "save_steps": 3}
out = Path(sys.argv[1])
trainer(out, policy={"durable": True}, given={"callbacks": [Killed()]}, **saving).train()
"""


def test_a_durable_run_that_was_killed(tmp_path: Path) -> None:
    """Committed steps stay until the user discards them by name; then the last checkpoint is
    resumed."""
    script = [sys.executable, "-c", DURABLE, str(tmp_path / "a")]
    root = Path(__file__).parents[2]
    killed = subprocess.run(script, cwd=root, env={**os.environ, "PYTHONPATH": str(root)})
    assert killed.returncode == -signal.SIGKILL
    whole = end_of(trainer(tmp_path / "whole", policy={}))
    run = trainer(tmp_path / "a", llama(seed=9), policy={"durable": True})
    with pytest.raises(ValueError, match=r"committed up to step 4.*durable='new'"):
        run.train(resume_from_checkpoint=True)
    close(run)
    again = trainer(tmp_path / "a", llama(seed=9), policy={"durable": "new"})
    resumed = end_of(again, resume=True)
    assert resumed.losses == whole.losses
    assert_same(resumed.weights, whole.weights)


def test_a_delayed_run_begins_its_delay_anew_where_it_goes_on(tmp_path: Path) -> None:
    """No checkpoint has the delayed parameters: runs resumed from one are equal, and differ from
    the uninterrupted run by one step of delay."""
    changes = {"policy": {"update": "delayed", "delayed_warmup": 1}, "max_grad_norm": 0.5}
    saving = {"save_strategy": "steps", "save_steps": 3}
    run = trainer(tmp_path / "a", **changes, **saving)
    run.train()
    whole = [line["loss"] for line in run.state.log_history if "loss" in line]
    saved = str(tmp_path / "a" / "checkpoint-3")
    # In the same run, and in a run that began with other values.
    here = end_of(run, resume=saved)
    there = end_of(trainer(tmp_path / "b", llama(seed=9), **changes), resume=saved)
    assert there.losses == here.losses
    assert_same(there.weights, here.weights)
    assert here.losses[:3] == whole[:3]
    assert here.losses[3:] != whole[3:]
    deferred = end_of(trainer(tmp_path / "c", policy={}, max_grad_norm=0.5))
    assert deferred.losses != whole
    assert deferred.losses == pytest.approx(whole, rel=0.05)


def test_resuming_the_same_trainer_and_the_last_checkpoint(tmp_path: Path) -> None:
    run = trainer(
        tmp_path, policy={}, save_strategy="steps", save_steps=2, gradient_accumulation_steps=2
    )
    run.train()
    first = [line["loss"] for line in run.state.log_history if "loss" in line]
    run.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert [line["loss"] for line in run.state.log_history if "loss" in line] == first
    run.args.max_steps = 8
    run.train(resume_from_checkpoint=True)
    assert run.state.global_step == 8
    close(run)


def test_weights_alone_begin_a_new_run(tmp_path: Path) -> None:
    changes = {"save_strategy": "steps", "save_steps": 3, "save_only_model": True}
    end_of(trainer(tmp_path / "a", policy={}, **changes))
    ended = [
        end_of(
            trainer(tmp_path / name, llama(seed=9), policy=policy, **changes),
            resume=str(tmp_path / "a" / "checkpoint-3"),
        )
        for name, policy in (("b", {}), ("c", None))
    ]
    assert_near(ended[0], ended[1], ULPS)


def test_a_checkpoint_of_a_plain_trainer_is_refused(tmp_path: Path) -> None:
    end_of(trainer(tmp_path / "a", save_strategy="steps", save_steps=3))
    run = trainer(tmp_path / "b", policy={})
    with pytest.raises(ValueError, match=r"optimizer\.pt has the states of an optimizer of torch"):
        run.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-3"))


def test_a_plain_trainer_does_not_go_on_from_states_of_the_engine(tmp_path: Path) -> None:
    """An optimizer.pt without moments is an error at its first step."""
    end_of(trainer(tmp_path / "a", policy={}, save_strategy="steps", save_steps=3))
    run = trainer(tmp_path / "b")
    with pytest.raises((KeyError, ValueError, RuntimeError)) as raised:
        run.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-3"))
    assert "exp_avg" in str(raised.value)


def test_states_of_an_earlier_run_are_not_taken_for_those_of_a_plain_one(tmp_path: Path) -> None:
    """Both runs write into one directory, and the second one knows nothing of the states."""
    saving = {"save_strategy": "steps", "save_steps": 3}
    end_of(trainer(tmp_path / "a", policy={}, **saving))
    end_of(trainer(tmp_path / "a", llama(seed=9), **saving))
    run = trainer(tmp_path / "b", policy={})
    with pytest.raises(ValueError, match="states of an earlier run"):
        run.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-3"))


def test_states_of_an_earlier_run_are_not_taken_for_those_of_weights_alone(tmp_path: Path) -> None:
    saving: dict[str, Any] = {
        "save_strategy": "steps", "save_steps": 3, "eval_strategy": "steps", "eval_steps": 3,
        "load_best_model_at_end": True,
    }  # fmt: skip
    end_of(trainer(tmp_path / "a", policy={}, **saving))
    saving["save_only_model"] = True
    again = end_of(trainer(tmp_path / "a", llama(seed=9), policy={}, **saving))
    alone = end_of(trainer(tmp_path / "b", llama(seed=9), policy={}, **saving))
    assert_same(again.weights, alone.weights)


def test_a_reference_model_takes_no_part_in_a_durable_run(tmp_path: Path) -> None:
    run = trainer(tmp_path)
    run.ref_model = llama(seed=9)
    embed(run, policy_in(tmp_path, durable=True, durable_every=2))
    reference = inf.handle(run.ref_model)
    assert not reference.policy.durable
    reference.close()
    inf.handle(run.model).close()


def test_a_second_trainer_takes_the_model_of_the_first(tmp_path: Path) -> None:
    changes = {"save_strategy": "steps", "save_steps": 3}
    first = trainer(tmp_path / "a", policy={}, **changes)
    first.train()
    losses = [line["loss"] for line in first.state.log_history if "loss" in line]
    second = embed(trainer(tmp_path / "b", first.model, **changes))
    ended = end_of(second, resume=str(tmp_path / "a" / "checkpoint-3"))
    assert ended.losses == losses
    assert first.optimizer is None


def test_batch_size_is_found(tmp_path: Path) -> None:
    """The first size runs out of memory in the second step's backward."""
    ended = []
    for name, policy in (("embedded", {}), ("plain", None)):
        run = trainer(
            tmp_path / name,
            policy=policy,
            per_device_train_batch_size=8,
            auto_find_batch_size=True,
        )
        run.add_callback(_FullMemory(run.model))
        ended.append(end_of(run))
        assert run._train_batch_size == 7
    assert_near(ended[0], ended[1], ULPS)


class _FullMemory(transformers.TrainerCallback):
    """Raises torch's error in the middle of the first forward of eight rows."""

    def __init__(self, model: Any) -> None:
        self._hook = model.model.layers[1].register_forward_pre_hook(self._look)

    def _look(self, module: Any, inputs: Any) -> None:
        if len(inputs[0]) == 8:
            raise RuntimeError("CUDA out of memory. Tried to allocate 8 GiB")


def test_evaluation_in_low_precision_keeps_the_models_dtype(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = trainer(tmp_path, policy={}, bf16_full_eval=True)
    run.train()
    lossy = run.evaluate()["eval_loss"]
    assert run.args.bf16_full_eval
    run.args.bf16_full_eval = False
    assert run.evaluate()["eval_loss"] == lossy
    close(run)
    assert "evaluated in its parameters' dtype, torch.float32" in caplog.text


def test_predictions_and_evaluation_without_training(tmp_path: Path) -> None:
    found = []
    for name, policy in (("embedded", {}), ("plain", None)):
        run = trainer(tmp_path / name, policy=policy)
        predicted = run.predict(rows(5, seed=4))
        found.append((run.evaluate()["eval_loss"], predicted.predictions))
        close(run)
    assert found[0][0] == found[1][0]
    assert (found[0][1] == found[1][1]).all()


def bart() -> Any:
    torch.manual_seed(3)
    config = transformers.BartConfig(
        vocab_size=64, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, decoder_start_token_id=2, max_position_embeddings=64,
        dropout=0.0, forced_eos_token_id=None,
    )  # fmt: skip
    return transformers.BartForConditionalGeneration(config)


def test_seq2seq_generates_in_evaluation(tmp_path: Path) -> None:
    ended = []
    for name, policy in (("embedded", {}), ("plain", None)):
        lengths: list[Any] = []
        run = trainer(
            tmp_path / name,
            bart(),
            kind=transformers.Seq2SeqTrainer,
            policy=policy,
            given={
                "args": arguments(
                    tmp_path / name,
                    transformers.Seq2SeqTrainingArguments,
                    predict_with_generate=True,
                    generation_max_length=12,
                    eval_strategy="steps",
                    eval_steps=3,
                ),
                "compute_metrics": lambda p, kept=lengths: (
                    kept.append(p.predictions.tolist()) or {"rows": len(p.predictions)}
                ),
            },
        )
        ended.append((end_of(run), lengths))
    assert_near(ended[0][0], ended[1][0], ULPS)
    assert ended[0][1] == ended[1][1]
    assert len(ended[0][1]) == 2


def test_slices_of_a_batch_are_its_micro_batches(tmp_path: Path) -> None:
    """A model of inf.microbatched(model, 3) with whole batches, and accumulation over three."""
    plain = end_of(trainer(tmp_path / "plain", gradient_accumulation_steps=3))
    sliced = trainer(
        tmp_path / "sliced",
        inf.microbatched(llama(), 3),
        policy={},
        per_device_train_batch_size=6,
    )
    ended = end_of(sliced)
    assert_near(ended, plain, 1e-6)


def test_a_model_for_each_run(tmp_path: Path) -> None:
    """model_init: each `train()` has a model of its own, and the engine of the last one is closed.
    """
    ended = []
    for name, policy in (("embedded", {}), ("plain", None)):
        run = trainer(
            tmp_path / name,
            policy=policy,
            given={"model": None, "model_init": lambda: llama(seed=5)},
        )
        run.train()
        before = run.model
        ended.append(end_of(run))
        assert before is not run.model
        assert not inf.offloaded_modules(before)
    assert_near(ended[0], ended[1], ULPS)


class _Report(transformers.TrainerCallback):
    """Keeps what is logged, as the integrations of `report_to` do: before any other callback."""

    def __init__(self) -> None:
        self.lines: list[dict[str, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **more: Any) -> None:
        self.lines.append(dict(logs))


def test_figures_of_the_drives_stand_beside_the_loss(tmp_path: Path) -> None:
    report = _Report()
    run = trainer(
        tmp_path,
        policy={},
        given={"callbacks": [report, DriveFigures()]},
        eval_strategy="steps",
        eval_steps=3,
    )
    run.train()
    history = [line for line in run.state.log_history if "loss" in line]
    close(run)
    names = {"drive_read_gb_per_s", "drive_write_gb_per_s", "waiting", "written_tb_per_day"}
    reported = [line for line in report.lines if "loss" in line]
    for line in (*history, *reported):
        assert names <= line.keys()
        assert line["drive_read_gb_per_s"] >= 0
        assert 0 <= line["waiting"] <= 1
    # A step's updates may read while the next one runs, and count there.
    assert sum(line["drive_read_gb_per_s"] for line in history) > 0
    assert len(history) == len(reported) == 6
    assert not any(names & line.keys() for line in report.lines if "eval_loss" in line)


def test_figures_want_an_offloaded_model(tmp_path: Path) -> None:
    run = trainer(tmp_path, given={"callbacks": [DriveFigures()]})
    with pytest.raises(ValueError, match="DriveFigures wants one offloaded module"):
        run.train()


MAPPED = {
    "adamw_torch": inf.AdamW,
    "adamw_torch_fused": inf.AdamW,
    "adamw_torch_xla": inf.AdamW,
    "adamw_torch_npu_fused": inf.AdamW,
    "paged_adamw_32bit": inf.AdamW,
    "lion_32bit": inf.Lion,
    "paged_lion_32bit": inf.Lion,
    "sgd": inf.SGD,
    "adagrad": inf.Elementwise,
    "rmsprop": inf.Elementwise,
}


@pytest.mark.parametrize(
    "name", [str(name.value) for name in transformers.training_args.OptimizerNames]
)
def test_every_name_of_an_optimizer(tmp_path: Path, name: str) -> None:
    run = trainer(tmp_path, policy={}, optim=name)
    if name in MAPPED:
        run.create_optimizer()
        assert isinstance(run.optimizer, MAPPED[name])
        assert run.optimizer.param_groups[0]["lr"] == 1e-2
    else:
        with pytest.raises(ValueError, match=f"optim='{name}'"):
            run.create_optimizer()


@dataclasses.dataclass(frozen=True)
class Refusal:
    """A trainer that is not embedded. changes: of `trainer`; message: of the error."""

    changes: dict[str, Any]
    message: str
    policy: dict[str, Any] = dataclasses.field(default_factory=dict)


@pytest.mark.parametrize(
    "case",
    [
        Refusal(
            {"given": {"optimizer_cls_and_kwargs": (torch.optim.AdamW, {"lr": 1e-3})}},
            r"optimizer_cls_and_kwargs=\(AdamW, \.\.\.\) is no optimizer of the engine",
        ),
        Refusal(
            {"max_grad_norm": 1.0},
            r"max_grad_norm=1\.0 with Policy\(update='backward'\).*give max_grad_norm=0",
            {"update": "backward"},
        ),
        Refusal(
            {"enable_jit_checkpoint": True},
            r"enable_jit_checkpoint=True with Policy\(update='backward'\).*generations=2",
            {"update": "backward"},
        ),
    ],
    ids=["class of torch", "clipping in backward", "a save amid a step"],
)
def test_refusals(tmp_path: Path, case: Refusal) -> None:
    run = trainer(tmp_path, **case.changes)
    with pytest.raises(ValueError, match=case.message):
        embed(run, policy_in(tmp_path, **case.policy)).train()


def test_an_optimizer_that_the_script_makes_is_refused(tmp_path: Path) -> None:
    class Own(transformers.Trainer):
        def create_optimizer(self, model: Any = None) -> Any:
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
            return self.optimizer

    run = trainer(tmp_path, kind=Own, policy={})
    with pytest.raises(ValueError, match=r"torch\.optim\.sgd\.SGD"):
        run.train()


@pytest.mark.parametrize("kind", [inf.Lion, inf.Muon])
def test_an_optimizer_of_the_engine_by_class(kind: Any, tmp_path: Path) -> None:
    given = {"optimizer_cls_and_kwargs": (kind, {"lr": 1e-3})}
    run = trainer(tmp_path, policy={}, given=given)
    ended = end_of(run)
    assert len(ended.losses) == 6
    assert len(run.optimizer.param_groups) == 2  # with decay and without, as ever


def test_embedding_twice_is_refused(tmp_path: Path) -> None:
    run = trainer(tmp_path, policy={})
    with pytest.raises(ValueError, match="embedded already"):
        embed(run)


# -- from_pretrained -------------------------------------------------------------------------------

AUTO = transformers.AutoModelForCausalLM


def mixtral() -> Any:
    torch.manual_seed(3)
    config = transformers.MixtralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, num_local_experts=4,
        max_position_embeddings=64,
    )  # fmt: skip
    return transformers.MixtralForCausalLM(config)


@pytest.mark.parametrize(
    ("made", "kind", "settings"),
    [
        (llama, AUTO, {}),
        (llama, AUTO, {"dtype": torch.bfloat16}),
        (lambda: llama(tie_word_embeddings=True), AUTO, {}),
        (mixtral, AUTO, {}),
        (llama, transformers.LlamaForCausalLM, {"attn_implementation": "eager"}),
        # A head that the files lack, and one that is not used.
        (llama, transformers.AutoModelForSequenceClassification, {"num_labels": 3}),
        (llama, transformers.AutoModel, {}),
    ],
    ids=["llama", "bf16", "tied", "mixtral", "own class", "new head", "no head"],
)
def test_from_pretrained_is_that_of_transformers(
    tmp_path: Path, made: Any, kind: Any, settings: dict[str, Any]
) -> None:
    made().save_pretrained(tmp_path / "model", max_shard_size=30_000)
    torch.manual_seed(7)
    wanted = kind.from_pretrained(tmp_path / "model", **settings)
    torch.manual_seed(7)
    found = from_pretrained(kind, tmp_path / "model", policy_in(tmp_path), **settings)
    assert type(found) is type(wanted)
    assert_same({**found.state_dict()}, wanted.state_dict())
    assert found.config.to_dict() == wanted.config.to_dict()
    assert not found.training
    buffers = dict(found.named_buffers())
    for name, buffer in wanted.named_buffers():
        assert torch.equal(buffers[name], buffer), name
    if wanted.can_generate():
        assert found.generation_config.to_dict() == wanted.generation_config.to_dict()
    inf.handle(found).close()


def test_a_model_from_files_trains_in_a_trainer(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path / "model")
    model = from_pretrained(AUTO, tmp_path / "model", policy_in(tmp_path))
    streamed = trainer(tmp_path / "a", model)
    ended = end_of(embed(streamed))
    plain = end_of(trainer(tmp_path / "b", AUTO.from_pretrained(tmp_path / "model")))
    assert_near(ended, plain, ULPS)


@dataclasses.dataclass
class Unplaced(transformers.TrainingArguments):
    """Arguments for a model that is moved nowhere."""

    place_model_on_device = False


def test_activations_go_to_nvme(tmp_path: Path) -> None:
    ended = [
        end_of(
            trainer(
                tmp_path / name,
                llama(hidden_size=256),
                policy=policy,
                activation_checkpointing=True,
                per_device_train_batch_size=8,
                learning_rate=1e-3,
            )
        )
        for name, policy in (("embedded", {"activations": "nvme"}), ("plain", None))
    ]
    assert_near(ended[0], ended[1], ULPS)


def test_a_model_on_meta_is_filled_by_embed(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path / "model")
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(llama().config)
    run = trainer(
        tmp_path / "a",
        given={"model": model, "args": arguments(tmp_path / "a", Unplaced)},
    )
    embed(run, policy_in(tmp_path), load=tmp_path / "model")
    plain = end_of(trainer(tmp_path / "b"))
    assert_near(end_of(run), plain, ULPS)


def test_from_pretrained_refuses_to_place(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match=r"device_map=.*leave it out"):
        from_pretrained(AUTO, tmp_path / "model", policy_in(tmp_path), device_map="auto")
    with pytest.raises(ValueError, match=r"no config\.json: give a directory"):
        from_pretrained(AUTO, "hub/name", policy_in(tmp_path))


# -- fp16 ------------------------------------------------------------------------------------------


def scaled(out: Path, scale: float, **changes: Any) -> Any:
    """A trainer with the scaler that accelerate makes for fp16, which it leaves out on a CPU."""
    run = trainer(out, **changes)
    run.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=2)
    run.accelerator.state._mixed_precision = "fp16"
    return run


def lost(run: Any) -> Any:
    """Let the third backward overflow, so that the scaler leaves the step out."""
    calls = []

    def overflow(module: Any, grads: Any) -> Any:
        calls.append(None)
        return (grads[0] * math.inf,) if len(calls) == 3 else None

    run.model.model.norm.register_full_backward_pre_hook(overflow)
    return run


@pytest.fixture
def _no_mixed_precision_stays() -> Any:
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.usefixtures("_no_mixed_precision_stays")
def test_a_loss_scaler(tmp_path: Path) -> None:
    """Steps that overflow are skipped; a resumed run has the scale and its growth of the saved one.
    """
    changes = {"max_grad_norm": 0.5, "save_strategy": "steps", "save_steps": 4}
    plain = end_of(lost(scaled(tmp_path / "plain", 1024.0, given=REFERENCE, **changes)))
    first = lost(scaled(tmp_path / "a", 1024.0, policy={}, **changes))
    whole = end_of(first)
    assert_near(whole, plain, CLIPPED)
    # Doubled after two steps, halved by the third, doubled after two more.
    assert first.accelerator.scaler.get_scale() == 2048.0
    again = scaled(tmp_path / "b", 1.0, policy={}, **changes)
    resumed = end_of(again, resume=str(tmp_path / "a" / "checkpoint-4"))
    assert resumed.losses == whole.losses
    assert again.accelerator.scaler.state_dict() == first.accelerator.scaler.state_dict()


# -- families --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "family", ["qwen3", "gemma3_text", "gpt_oss", "qwen2_moe", "qwen3_moe", "deepseek_v3"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_families_of_the_hub(tmp_path: Path, family: str, dtype: torch.dtype) -> None:
    """All values, dtypes (some are kept in fp32) and buffers, fused experts among them."""
    kind, config = hub_models.tiny(family)
    hub_models.write(kind, config, dtype, tmp_path / "model")
    truth = kind.from_pretrained(tmp_path / "model")
    model = from_pretrained(AUTO, tmp_path / "model", policy_in(tmp_path))
    hub_models.assert_alike(model, truth)
    # Written under the names of the hub.
    save_pretrained(model, tmp_path / "out")
    inf.handle(model).close()
    names = hub_models.stored_names(tmp_path / "out")
    assert names == hub_models.stored_names(tmp_path / "model")
    hub_models.assert_alike(kind.from_pretrained(tmp_path / "out"), truth)


def test_weights_in_fp8_become_plain_ones(tmp_path: Path) -> None:
    kind, config = hub_models.tiny("deepseek_v3")
    hub_models.write(kind, config, torch.bfloat16, tmp_path / "model")
    hub_models.quantize_fp8(tmp_path / "model")
    truth = kind.from_pretrained(tmp_path / "model", dtype=torch.bfloat16)
    model = from_pretrained(AUTO, tmp_path / "model", policy_in(tmp_path), dtype=torch.bfloat16)
    hub_models.assert_alike(model, truth)
    inf.handle(model).close()
