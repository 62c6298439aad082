"""Trainings by TRL's trainers on a tiny model of a directory: plain, and offloaded."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import tokenizers
import torch
import transformers
import trl
from datasets import Dataset

import infinity as inf
from infinity.integrations.transformers import embed
from tests.reference import ReferenceAdamW

STEPS, SAVED = 6, 3
WORDS = [f"w{number}" for number in range(28)]


def write_pretrained(directory: Path) -> Path:
    """Write a model of 30,000 parameters, one with a head of one label beside it, and their
    tokenizer."""
    vocabulary = {word: at for at, word in enumerate(["<pad>", "<eos>", "<unk>", "<bos>", *WORDS])}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>",
        bos_token="<bos>",
    )  # fmt: skip
    config = transformers.LlamaConfig(
        vocab_size=len(vocabulary), hidden_size=32, intermediate_size=64, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64, num_labels=1,
        pad_token_id=0, eos_token_id=1, bos_token_id=3, tie_word_embeddings=False,
    )  # fmt: skip
    for name, kind in (
        ("causal", transformers.LlamaForCausalLM),
        ("reward", transformers.LlamaForSequenceClassification),
    ):
        torch.manual_seed(0)
        kind(config).save_pretrained(directory / name)
        tokenizer.save_pretrained(directory / name)
    return directory


def sentence(seed: int, words: int) -> str:
    """Words, as many or some more, by a rule that a model can learn in part."""
    return " ".join(WORDS[(seed + 3 * at + at * at * (seed % 5)) % 28] for at in range(words))


def texts() -> Any:
    return Dataset.from_dict({"text": [sentence(seed, 8 + seed % 5) for seed in range(32)]})


def preferences() -> Any:
    seeds = range(32)
    return Dataset.from_dict(
        {
            "prompt": [sentence(seed, 4) for seed in seeds],
            "chosen": [" " + sentence(seed + 1, 3 + seed % 4) for seed in seeds],
            "rejected": [" " + sentence(2 * seed + 7, 5) for seed in seeds],
        }
    )


def prompts() -> Any:
    return Dataset.from_dict({"prompt": [sentence(seed, 3 + seed % 3) for seed in range(32)]})


def spread(completions: list[str], **_: Any) -> list[float]:
    """Rewards that seldom tie."""
    return [float(sum(map(ord, each)) % 11) for each in completions]


def lora() -> Any:
    return peft.LoraConfig(
        r=4, lora_alpha=8, lora_dropout=0.1, target_modules=["q_proj", "v_proj"],
        task_type="CAUSAL_LM",
    )  # fmt: skip


COMMON = {
    "max_steps": STEPS, "per_device_train_batch_size": 2, "learning_rate": 1e-3,
    "max_grad_norm": 0.0, "optim": "adamw_torch", "use_cpu": True,
    "bf16": False, "logging_steps": 1, "report_to": [], "save_strategy": "no", "seed": 7,
    "disable_tqdm": True, "dataloader_pin_memory": False,
}  # fmt: skip
"""Arguments of all trainers; gradient checkpointing is TRL's default."""


@dataclasses.dataclass(frozen=True)
class Task:
    """A trainer and its model. make: gets the directory of the models, the model (a path, where
    TRL loads it) and the arguments."""

    make: Callable[[Path, Any, dict[str, Any]], Any]
    given: dict[str, Any] = dataclasses.field(default_factory=dict)
    kind: str = "causal"
    by_path: bool = False

    def trainer(self, models: Path, out: Path, **given: Any) -> Any:
        """Build the trainer, plain, as a user does."""
        model: Any = str(models / self.kind) if self.by_path else load(models, self.kind)
        trainer = self.make(models, model, {**COMMON, **self.given, **given, "output_dir": out})
        trainer.remove_callback(transformers.PrinterCallback)
        return trainer


def load(models: Path, kind: str = "causal") -> Any:
    classes = {
        "causal": transformers.AutoModelForCausalLM,
        "reward": transformers.AutoModelForSequenceClassification,
    }
    return classes[kind].from_pretrained(models / kind, dtype=torch.float32)


def tokenizer_of(models: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(models / "causal")


def sft(models: Path, model: Any, given: dict[str, Any], **more: Any) -> Any:
    args = trl.SFTConfig(**{"max_length": 16, **given})
    # A path is all that TRL needs: it finds the tokenizer there.
    found = {} if isinstance(model, str) else {"processing_class": tokenizer_of(models)}
    return trl.SFTTrainer(model, args, train_dataset=texts(), **found, **more)


def sft_lora(models: Path, model: Any, given: dict[str, Any]) -> Any:
    return sft(models, model, given, peft_config=lora())


def dpo(models: Path, model: Any, given: dict[str, Any], **more: Any) -> Any:
    args = trl.DPOConfig(**{"max_length": 24, **given})
    return trl.DPOTrainer(
        model, args=args, train_dataset=preferences(), processing_class=tokenizer_of(models), **more
    )


def dpo_reference(models: Path, model: Any, given: dict[str, Any]) -> Any:
    """Another model than the one that trains, so that the losses tell which one was taken."""
    reference = load(models)
    with torch.no_grad():
        for param in reference.parameters():
            param.mul_(1.25)
    return dpo(models, model, given, ref_model=reference)


def dpo_lora(models: Path, model: Any, given: dict[str, Any]) -> Any:
    return dpo(models, model, given, peft_config=lora())


def dpo_adapted(models: Path, model: Any, given: dict[str, Any]) -> Any:
    """A model with an adapter that has values: TRL copies them into a reference adapter."""
    torch.manual_seed(1)
    adapted = peft.get_peft_model(model, lora())
    with torch.no_grad():
        for name, param in adapted.named_parameters():
            if "lora_B" in name:
                param.normal_(std=0.02)
    return dpo(models, adapted, given)


def grpo(models: Path, model: Any, given: dict[str, Any], **more: Any) -> Any:
    sizes = {"per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 6}
    args = trl.GRPOConfig(**{**given, **sizes})
    return trl.GRPOTrainer(
        model, spread, args=args, train_dataset=prompts(), processing_class=tokenizer_of(models),
        **more,
    )  # fmt: skip


def grpo_lora(models: Path, model: Any, given: dict[str, Any]) -> Any:
    return grpo(models, model, given, peft_config=lora())


def reward(models: Path, model: Any, given: dict[str, Any]) -> Any:
    args = trl.RewardConfig(**{"max_length": 24, **given})
    return trl.RewardTrainer(
        model, args, train_dataset=preferences(), processing_class=tokenizer_of(models)
    )


SYNC = {"sync_ref_model": True, "ref_model_sync_steps": 2, "ref_model_mixup_alpha": 0.6}
PACKED = {"packing": True, "packing_strategy": "wrapped"}

TASKS = {
    "sft": Task(sft),
    "sft-accumulated": Task(sft, {"gradient_accumulation_steps": 2}),
    "sft-uncheckpointed": Task(sft, {"gradient_checkpointing": False}),
    "sft-packed": Task(sft, PACKED),
    "sft-packed-bfd": Task(sft, {"packing": True, "packing_strategy": "bfd"}),
    "sft-path": Task(sft, by_path=True),
    "sft-lora": Task(sft_lora),
    "sft-lora-path": Task(sft_lora, by_path=True),
    "dpo": Task(dpo),
    "dpo-path": Task(dpo, by_path=True),
    "dpo-reference": Task(dpo_reference),
    "dpo-sync": Task(dpo, SYNC),
    "dpo-precomputed": Task(dpo, {"precompute_ref_log_probs": True}),
    "dpo-lora": Task(dpo_lora),
    "dpo-adapted": Task(dpo_adapted),
    "grpo": Task(grpo),
    "grpo-beta": Task(grpo, {"beta": 0.1}),
    "grpo-sync": Task(grpo, {"beta": 0.1, **SYNC}),
    "grpo-iterations": Task(grpo, {"num_iterations": 2, "gradient_accumulation_steps": 2}),
    "grpo-lora": Task(grpo_lora, {"beta": 0.1}),
    "reward": Task(reward, kind="reward"),
}


@dataclasses.dataclass(frozen=True)
class Result:
    """Record of a training. losses: of each micro-batch, unrounded."""

    losses: list[float]
    params: dict[str, torch.Tensor]
    reference: dict[str, torch.Tensor]
    logged: list[dict[str, Any]]


def run(trainer: Any, resume: Path | None = None) -> Result:
    """Train, and close what is offloaded."""
    losses = []
    step = trainer.training_step

    def noted(*args: Any, **kwargs: Any) -> torch.Tensor:
        loss: torch.Tensor = step(*args, **kwargs)
        losses.append(loss.item())
        return loss

    trainer.training_step = noted
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    del trainer.training_step
    reference = getattr(trainer, "ref_model", None)
    result = Result(
        losses,
        values_of(trainer.model),
        {} if reference is None else values_of(reference),
        trainer.state.log_history,
    )
    close(trainer)
    return result


def close(trainer: Any) -> None:
    for model in (trainer.model, getattr(trainer, "ref_model", None)):
        for module in inf.offloaded_modules(model) if model is not None else ():
            inf.handle(module).close()


def values_of(model: Any) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def nvme(place: Path, **given: Any) -> inf.Policy:
    place.mkdir(exist_ok=True)
    return inf.Policy(params="nvme", optim="nvme", nvme=place, ram="min", **given)


class RoundedOnce(torch.optim.Optimizer):
    """AdamW whose operations all round once, as the engine's do; torch's root does not."""

    def __init__(self, params: Any, **settings: Any) -> None:
        super().__init__(params, settings)
        self._reference = ReferenceAdamW(self.param_groups, **settings)

    def step(self, closure: Any = None) -> None:
        for mine, of_reference in zip(self.param_groups, self._reference.param_groups, strict=True):
            of_reference["lr"] = mine["lr"]
        self._reference.step()


def plain(
    task: str, models: Path, out: Path, *, rounded_once: bool = False, **given: Any
) -> Result:
    """Train without offloading: with torch's AdamW, or with the one of these tests."""
    trainer = TASKS[task].trainer(models, out, **given)
    if rounded_once:
        rates = {"lr": trainer.args.learning_rate, "weight_decay": 0.0}
        trainer.optimizer_cls_and_kwargs = (RoundedOnce, rates)
    return run(trainer)


def embedded(
    task: str, models: Path, out: Path, *, resume: Path | None = None, **given: Any
) -> Result:
    trainer = TASKS[task].trainer(models, out, **given)
    return run(embed(trainer, nvme(out.with_name(out.name + "-nvme"))), resume)


def assert_close(one: Result, other: Result, *, ulps: float = 16, params: float = 1e-5) -> None:
    """Losses within so many ulps of 1, and parameters within a share of a step's rate."""
    torch.testing.assert_close(
        torch.tensor(one.losses), torch.tensor(other.losses), rtol=0, atol=ulps * 2.0**-23
    )
    for values in ("params", "reference"):
        mine, others = getattr(one, values), getattr(other, values)
        assert mine.keys() == others.keys()
        for name, value in others.items():
            torch.testing.assert_close(mine[name], value, rtol=0, atol=params, msg=named(name))


def assert_same(one: Result, other: Result) -> None:
    """Bits."""
    assert one.losses == other.losses
    for mine, others in ((one.params, other.params), (one.reference, other.reference)):
        assert mine.keys() == others.keys()
        for name, value in mine.items():
            assert torch.equal(value, others[name]), name


def named(name: str) -> Callable[[str], str]:
    return lambda text: f"{name}: {text}"
