"""A tiny Llama, its data, and Trainer on it: with torch's AdamW, and embedded."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
import transformers

import infinity as inf
from infinity.integrations.transformers import embed
from tests.reference import ReferenceAdamW

ROWS, LENGTH, VOCABULARY = 32, 8, 64


def llama(seed: int = 3, **changes: Any) -> Any:
    """A model of 20,000 parameters."""
    torch.manual_seed(seed)
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
    }
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**(sizes | changes)))


def rows(count: int = ROWS, seed: int = 1) -> list[dict[str, torch.Tensor]]:
    """Random rows of tokens."""
    drawn = torch.Generator().manual_seed(seed)
    made = [torch.randint(0, VOCABULARY, (LENGTH,), generator=drawn) for _ in range(count)]
    return [{"input_ids": row, "labels": row.clone()} for row in made]


def policy_in(directory: Path, **changes: Any) -> inf.Policy:
    """A policy with everything on NVMe in a directory of its own."""
    nvme = directory / "nvme"
    nvme.mkdir(parents=True, exist_ok=True)
    return inf.Policy(**({"params": "nvme", "optim": "nvme", "nvme": nvme, "ram": "min"} | changes))


def arguments(out: Path, kind: Any = transformers.TrainingArguments, **changes: Any) -> Any:
    """Arguments of a run of six steps on the CPU, with a loss for each."""
    common = {
        "use_cpu": True,
        "per_device_train_batch_size": 2,
        "max_steps": 6,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "max_grad_norm": 0.0,
    }
    return kind(str(out), **(common | changes))


def trainer(
    out: Path,
    model: Any = None,
    *,
    kind: Any = transformers.Trainer,
    policy: inf.Policy | dict[str, Any] | None = None,
    given: dict[str, Any] | None = None,
    **changes: Any,
) -> Any:
    """A trainer; embedded where there is a policy, or changes of `policy_in`. given: arguments of
    the trainer. changes: of its TrainingArguments.
    """
    made = kind(
        **{
            "model": llama() if model is None else model,
            "args": arguments(out, **changes),
            "train_dataset": rows(),
            "eval_dataset": rows(6, seed=2),
            **(given or {}),
        }
    )
    if policy is None:
        return made
    return embed(made, policy_in(out, **policy) if isinstance(policy, dict) else policy)


class Reference(torch.optim.Optimizer):
    """The AdamW that the engine equals bit for bit, as an optimizer of torch."""

    def __init__(self, params: Any, **settings: Any) -> None:
        super().__init__(params, settings)
        self._own = ReferenceAdamW(self.param_groups, **settings)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None
        for own, group in zip(self._own.param_groups, self.param_groups, strict=True):
            own.update({name: value for name, value in group.items() if name != "params"})
        self._own.step()


REFERENCE = {"optimizer_cls_and_kwargs": (Reference, {"lr": 1e-2})}
"""Argument of a trainer."""


@dataclasses.dataclass
class Ended:
    """Results of a run. weights: the model's state dict at its end."""

    losses: list[float]
    norms: list[float]
    evals: list[float]
    weights: dict[str, torch.Tensor]


def end_of(run: Any, *, resume: Any = None) -> Ended:
    """Train, and close the engine."""
    run.train(resume_from_checkpoint=resume)
    history = run.state.log_history
    found = Ended(
        [line["loss"] for line in history if "loss" in line],
        [line["grad_norm"] for line in history if "grad_norm" in line],
        [line["eval_loss"] for line in history if "eval_loss" in line],
        {name: value.clone() for name, value in run.model.state_dict().items()},
    )
    close(run)
    return found


def close(run: Any) -> None:
    """Close the engines of a trainer."""
    for model in (run.model, getattr(run, "ref_model", None)):
        for module in inf.offloaded_modules(model) if model is not None else ():
            inf.handle(module).close()
