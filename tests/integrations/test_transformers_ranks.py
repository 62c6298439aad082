"""transformers' Trainer with an offloaded model on two ranks, against DDP."""

from __future__ import annotations

import dataclasses
import importlib
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from accelerate.state import AcceleratorState, GradientState
from torch.distributed.device_mesh import init_device_mesh

import infinity as inf
from infinity.integrations.transformers import embed, from_pretrained
from tests.distributed.ranks import on_ranks
from tests.integrations.hf_trainers import (
    Ended,
    arguments,
    close,
    end_of,
    llama,
    policy_in,
    trainer,
)
from tests.integrations.test_transformers_runs import assert_same, bart

pytestmark = pytest.mark.integrations

DDP_ULPS = 3e-7
"""Relative difference of losses: DDP divides before it adds, the engine after."""

THREE_ULPS = 1e-6
"""The same for three ranks, where no division is exact, and with a norm."""


@dataclasses.dataclass(frozen=True)
class Job:
    """A trainer's work on this rank: a function, by name and module, and its arguments besides the
    rank, the job's directory, and the test's directory `shared`.
    """

    run: str
    shared: str
    changes: dict[str, Any] = dataclasses.field(default_factory=dict)
    module: str = __name__

    def __call__(self, rank: int, place: Path) -> Any:
        world = dist.get_world_size()
        there = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
        os.environ.update({name: str(value) for name, value in there.items()})
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        try:
            work = getattr(importlib.import_module(self.module), self.run)
            return work(rank, place, Path(self.shared), **self.changes)
        finally:
            for name in (*there, "MASTER_ADDR", "MASTER_PORT"):
                os.environ.pop(name, None)
            AcceleratorState._reset_state(reset_partial_state=True)


def summed(
    outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None
) -> torch.Tensor:
    """A script's own loss: the sum over this rank's tokens, by the tokens of all ranks."""
    found = torch.nn.functional.cross_entropy(
        outputs.logits.flatten(0, 1), labels.flatten(), reduction="sum"
    )
    return found / num_items_in_batch


def ends(rank: int, place: Path, shared: Path, **changes: Any) -> Ended:
    """Train once. name: of the run's directory; resume: from a checkpoint; own_loss: by `summed`;
    apart: ranks' models begin with different values."""
    name, resume = changes.pop("name"), changes.pop("resume", None)
    seed, policy = changes.pop("seed_of_model", 3), changes.pop("policy", {})
    given = {"compute_loss_func": summed} if changes.pop("own_loss", False) else {}
    seed += rank if changes.pop("apart", False) else 0
    run = trainer(
        shared / name, llama(seed), policy=policy, given=given, ddp_backend="gloo", **changes
    )
    # Rows are distributed: each rank has a separate loss, and logs the mean.
    return end_of(run, resume=resume and str(shared / resume))


def on_two(tmp_path: Path, run: str, place: str, **changes: Any) -> list[Any]:
    return on_some(tmp_path, run, place, 2, **changes)


def on_some(tmp_path: Path, run: str, place: str, ranks: int, **changes: Any) -> list[Any]:
    return on_ranks(Job(run, str(tmp_path), changes), tmp_path / place, ranks)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"gradient_accumulation_steps": 2, "weight_decay": 0.1},
        {"max_grad_norm": 0.5},
        {"policy": {"update": "backward"}, "gradient_accumulation_steps": 2},
        {"policy": {"accumulate": "local"}, "gradient_accumulation_steps": 2},
        {"eval_strategy": "steps", "eval_steps": 3},
        {"label_smoothing_factor": 0.1, "neftune_noise_alpha": 5.0},
        {"own_loss": True, "gradient_accumulation_steps": 2},
        {"average_tokens_across_devices": False, "gradient_accumulation_steps": 2},
        {"policy": {"update": "backward", "generations": 2}, "max_grad_norm": 0.5},
        # As with DDP, rank 0's values count, such as an unseeded new head.
        {"apart": True},
    ],
    ids=str,
)
def test_two_ranks_are_those_of_ddp(tmp_path: Path, changes: dict[str, Any]) -> None:
    embedded = on_two(tmp_path, "ends", "a", name="embedded", **changes)
    plain = on_two(tmp_path, "ends", "b", name="plain", **{**changes, "policy": None})
    assert embedded[0].losses == embedded[1].losses
    assert embedded[0].losses == pytest.approx(plain[0].losses, rel=DDP_ULPS)
    assert embedded[0].evals == pytest.approx(plain[0].evals, rel=DDP_ULPS)
    assert_same(embedded[0].weights, embedded[1].weights)


def test_resuming_on_two_ranks_and_on_one(tmp_path: Path) -> None:
    saving = {"save_strategy": "steps", "save_steps": 3}
    whole = on_two(tmp_path, "ends", "a", name="whole", **saving)
    again = on_two(
        tmp_path, "ends", "b", name="again", resume="whole/checkpoint-3", seed_of_model=9
    )
    assert again[0].losses == whole[0].losses
    assert again[1].losses == whole[1].losses
    assert_same(again[0].weights, whole[0].weights)
    # One rank continues with the states, and with one rank's batches.
    alone = trainer(tmp_path / "alone", llama(9), policy={}, max_steps=4)
    alone.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    assert alone.state.global_step == 4
    close(alone)


def test_three_ranks_are_those_of_ddp_and_resume(tmp_path: Path) -> None:
    changes = {"gradient_accumulation_steps": 2, "max_grad_norm": 0.5}
    saving = {"save_strategy": "steps", "save_steps": 3}
    embedded = on_some(tmp_path, "ends", "a", 3, name="embedded", **changes, **saving)
    plain = on_some(tmp_path, "ends", "b", 3, name="plain", policy=None, **changes)
    assert embedded[0].losses == pytest.approx(plain[0].losses, rel=THREE_ULPS)
    again = on_some(
        tmp_path, "ends", "c", 3, name="again", resume="embedded/checkpoint-3", **changes,
        seed_of_model=9,
    )  # fmt: skip
    for rank in range(3):
        assert again[rank].losses == embedded[0].losses
        assert_same(again[rank].weights, embedded[0].weights)


def test_a_durable_run_on_two_ranks(tmp_path: Path) -> None:
    saving = {"save_strategy": "steps", "save_steps": 3, "policy": {"durable": True}}
    whole = on_two(tmp_path, "ends", "a", name="whole", **saving)
    again = on_two(
        tmp_path, "ends", "b", name="again", resume="whole/checkpoint-3", seed_of_model=9, **saving
    )
    plain = on_two(tmp_path, "ends", "c", name="plain")
    assert whole[0].losses == again[0].losses == plain[0].losses
    assert_same(whole[0].weights, again[0].weights)


def to_the_end(rank: int, place: Path, shared: Path) -> tuple[float, bool, int]:
    run = trainer(shared / "run", policy={}, ddp_backend="gloo")
    run.ref_model = inf.offload(llama(9).requires_grad_(False), policy_in(shared / "reference"))
    run.train()
    evaluated = run.evaluate()["eval_loss"]
    run.end()
    open_engines = inf.offloaded_modules(run.model) + inf.offloaded_modules(run.ref_model)
    return evaluated, dist.is_initialized(), len(open_engines)


def test_the_end_of_a_script_closes_the_engines_before_the_groups(tmp_path: Path) -> None:
    """Without this, each engine would report that the other ranks have failed."""
    first, second = on_two(tmp_path, "to_the_end", "a")
    assert first == second
    assert first[1:] == (False, 0)


def own_mesh(rank: int, place: Path, shared: Path) -> list[str]:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("all", "own"))["own"]
    policy, told = policy_in(shared / f"of{rank}", mesh=mesh), []
    for model in (llama(), inf.offload(llama(), policy)):
        run = trainer(shared / "run", model, ddp_backend="gloo")
        with pytest.raises(ValueError) as raised:
            embed(run, policy)
        told.append(str(raised.value))
        close(run)
    return told


def test_a_model_of_each_ranks_own_is_refused(tmp_path: Path) -> None:
    for told in on_two(tmp_path, "own_mesh", "a"):
        assert all("offloaded for 1 rank(s), and the trainer runs 2" in each for each in told)
        assert len(told) == 2


def test_saved_on_two_ranks_and_resumed_on_one_has_the_same_states(tmp_path: Path) -> None:
    """Two ranks with the same rows compute the same as one."""
    whole = on_two(tmp_path, "same_rows", "a", name="whole", save_steps=3)
    saved = tmp_path / "whole" / "checkpoint-3"
    alone = trainer(
        tmp_path / "alone",
        llama(9),
        policy={},
        given={"train_dataset": few_rows()},
        train_sampling_strategy="sequential",
    )
    alone._load_from_checkpoint(str(saved))
    loaded = transformers.AutoModelForCausalLM.from_pretrained(saved)
    assert_same(alone.model.state_dict(), loaded.state_dict())
    ended = end_of(alone, resume=str(saved))
    # Sums over ranks round once more.
    assert ended.losses == pytest.approx(whole[0].losses, rel=DDP_ULPS)


def few_rows() -> list[dict[str, torch.Tensor]]:
    from tests.integrations.hf_trainers import rows

    return rows(2) * 16


def same_rows(rank: int, place: Path, shared: Path, **changes: Any) -> Ended:
    name = changes.pop("name")
    run = trainer(
        shared / name,
        policy={},
        given={"train_dataset": few_rows()},
        save_strategy="steps",
        train_sampling_strategy="sequential",
        **changes,
    )
    return end_of(run)


def test_a_model_saved_on_two_ranks_loads(tmp_path: Path) -> None:
    found = on_two(tmp_path, "saves", "a")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert_same(loaded.state_dict(), found[0])


def saves(rank: int, place: Path, shared: Path) -> dict[str, torch.Tensor]:
    run = trainer(shared / "run", policy={})
    run.train()
    run.save_model(str(shared / "out"))
    weights = {name: value.clone() for name, value in run.model.state_dict().items()}
    close(run)
    return weights


def test_the_best_model_on_two_ranks(tmp_path: Path) -> None:
    changes = {
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": "steps",
        "save_steps": 2,
        "save_total_limit": 1,
        "load_best_model_at_end": True,
        "learning_rate": 0.5,
    }
    embedded = on_two(tmp_path, "ends", "a", name="embedded", **changes)
    evals = embedded[0].evals
    kept = f"checkpoint-{2 + 2 * evals.index(min(evals))}"
    assert [path.name for path in (tmp_path / "embedded").glob("checkpoint-*")] == [kept]
    best = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "embedded" / kept)
    assert_same(embedded[0].weights, best.state_dict())


def test_ranks_generate_in_step(tmp_path: Path) -> None:
    """The rows of one rank end sooner than those of the other."""
    assert on_two(tmp_path, "generates", "a") == [[1, 4], [1, 8]]


def generates(rank: int, place: Path, shared: Path) -> list[int]:
    out = shared / f"run{rank}"
    run = trainer(
        out,
        bart(),
        kind=transformers.Seq2SeqTrainer,
        given={
            "args": arguments(
                out, transformers.Seq2SeqTrainingArguments, predict_with_generate=True
            ),
            "compute_metrics": lambda p: {"rows": len(p.predictions)},
        },
    )
    embed(run, policy_in(shared))
    # The number of new tokens depends on the rank: one waits for the other.
    ids = torch.arange(4, 10)[None]
    count = 3 + 4 * rank
    made = run.model.generate(input_ids=ids, max_new_tokens=count, min_new_tokens=count)
    run.evaluate(max_new_tokens=5)
    close(run)
    return [int(length) for length in made.shape]


def test_one_rank_of_a_launcher(tmp_path: Path) -> None:
    """`torchrun --nproc-per-node 1` makes a group of one."""
    job = Job("ends", str(tmp_path), {"name": "launched"})
    (launched,) = on_ranks(job, tmp_path / "a", 1)
    alone = end_of(trainer(tmp_path / "alone", policy={}))
    assert launched.losses == alone.losses


def heads(rank: int, place: Path, shared: Path) -> dict[str, torch.Tensor]:
    torch.manual_seed(rank)
    model = from_pretrained(
        transformers.AutoModelForSequenceClassification,
        shared / "model",
        policy_in(shared / f"of{rank}"),
        num_labels=3,
    )
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    inf.handle(model).close()
    return weights


def test_a_new_head_is_the_same_on_all_ranks(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path / "model")
    found = on_two(tmp_path, "heads", "a")
    assert_same(found[0], found[1])
    torch.manual_seed(0)
    wanted = transformers.AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "model", num_labels=3
    )
    assert_same(found[0], wanted.state_dict())
