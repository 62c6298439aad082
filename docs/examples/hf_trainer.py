"""transformers' Trainer: one new line, checkpoints and `resume_from_checkpoint` as before.

    python docs/examples/hf_trainer.py --nvme /mnt/nvme0 --out out
"""

from __future__ import annotations

import argparse

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
    set_seed,
)

import infinity as inf
from infinity.integrations.transformers import DriveFigures, embed

STEPS, VOCABULARY, LENGTH = 24, 64, 16


def rows(count: int) -> list[dict[str, torch.Tensor]]:
    """Return sequences in which each token follows from the one before."""
    made = []
    for first in range(count):
        ids = [first % VOCABULARY]
        for _ in range(LENGTH):
            ids.append((5 * ids[-1] + 1) % VOCABULARY)
        made.append({"input_ids": torch.tensor(ids), "labels": torch.tensor(ids)})
    return made


def trainer_of(options: argparse.Namespace) -> Trainer:
    """Build the trainer as usual, and embed the engine."""
    set_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=3,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
        )
    )  # fmt: skip
    args = TrainingArguments(
        f"{options.out}/trainer",
        max_steps=STEPS,
        per_device_train_batch_size=8,
        learning_rate=1e-2,
        save_steps=STEPS // 2,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
    )
    trainer = Trainer(model, args, train_dataset=rows(128), callbacks=[DriveFigures()])
    policy = inf.Policy(params="nvme", optim="nvme", nvme=options.nvme, ram="min")
    return embed(trainer, policy)  # the new line; a LlamaForCausalLM may also come from the hub


def losses_of(trainer: Trainer) -> list[float]:
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--nvme", required=True, nargs="+", help="directories on NVMe drives")
    parser.add_argument("--out", required=True, help="directory for checkpoints and weights")
    options = parser.parse_args()

    trainer = trainer_of(options)
    trainer.train()
    trainer.save_model(f"{options.out}/weights")  # streamed; loads without infinity
    losses = losses_of(trainer)
    weights = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    inf.handle(trainer.model).close()

    resumed = trainer_of(options)
    resumed.train(resume_from_checkpoint=f"{options.out}/trainer/checkpoint-{STEPS // 2}")
    assert losses_of(resumed) == losses, "a resumed run has the bits of the uninterrupted one"
    inf.handle(resumed.model).close()

    loaded = AutoModelForCausalLM.from_pretrained(f"{options.out}/weights").state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in weights.items())
    assert losses[-1] < losses[0] / 2
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}; the resumed run has the same losses")


if __name__ == "__main__":
    main()
