"""TRL's SFTTrainer: one new line. DPO, GRPO and Reward trainers take the same one.

    python docs/examples/trl_sft.py --nvme /mnt/nvme0 --out out
"""

from __future__ import annotations

import argparse

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from trl import SFTConfig, SFTTrainer

import infinity as inf
from infinity.integrations.transformers import embed

STEPS = 24
WORDS = [f"w{number}" for number in range(60)]


def tokenizer_of_words() -> PreTrainedTokenizerFast:
    """Build a tokenizer of whole words; with a model of the hub: `AutoTokenizer`."""
    vocabulary = {word: at for at, word in enumerate(["<pad>", "<eos>", "<unk>", *WORDS])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def texts(count: int) -> Dataset:
    """Make texts in which each word follows from the one before."""
    lines = []
    for number in range(count):
        words = [number % len(WORDS)]
        for _ in range(12):
            words.append((7 * words[-1] + 1) % len(WORDS))
        lines.append(" ".join(WORDS[word] for word in words))
    return Dataset.from_dict({"text": lines})


def trainer_of(options: argparse.Namespace) -> SFTTrainer:
    """Build the trainer as usual, and embed the engine."""
    set_seed(0)
    tokenizer = tokenizer_of_words()
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=3,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
            pad_token_id=0, eos_token_id=1, bos_token_id=None,
        )
    )  # fmt: skip
    args = SFTConfig(
        f"{options.out}/trainer",
        max_steps=STEPS,
        max_length=16,
        per_device_train_batch_size=8,
        learning_rate=1e-2,
        save_steps=STEPS // 2,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        bf16=False,
        use_cpu=not torch.cuda.is_available(),
    )
    trainer = SFTTrainer(model, args, train_dataset=texts(120), processing_class=tokenizer)
    policy = inf.Policy(params="nvme", optim="nvme", nvme=options.nvme, ram="min")
    return embed(trainer, policy)  # the new line


def losses_of(trainer: SFTTrainer) -> list[float]:
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

    loaded = LlamaForCausalLM.from_pretrained(f"{options.out}/weights").state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in weights.items())
    assert losses[-1] < losses[0] - 1
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}; the resumed run has the same losses")


if __name__ == "__main__":
    main()
