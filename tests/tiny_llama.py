"""A model directory for the command line: a Llama of 130,000 random parameters, with a tokenizer of
bytes."""

from __future__ import annotations

from pathlib import Path

import torch

TEXT = (
    "In the beginning was the word, and the word was with the drive, and the drive was fast.\n" * 60
)
CONFIG = {
    "vocab_size": 257,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
"""Its sizes."""


def write_model(directory: Path, *, tied: bool = True) -> Path:
    """Make it in `directory`, which is there. tied: embedding and head are one weight."""
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: index for index, letter in enumerate(letters)} | {"<eos>": 256}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>"
    ).save_pretrained(directory)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        **CONFIG, tie_word_embeddings=tied, eos_token_id=256, bos_token_id=256
    )
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)
    return directory
