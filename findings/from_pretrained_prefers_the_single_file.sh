#!/usr/bin/env bash
# transformers: a sharded save over a single-file save leaves the old weights in use.
#
# A directory has the model.safetensors of an earlier save. `save_pretrained` with a smaller
# `max_shard_size` writes shards and model.safetensors.index.json into it. One guesses that it
# removes the old file, as it removes old shards, or that `from_pretrained` takes the index, which
# names every tensor. It does neither: model.safetensors stays, `from_pretrained` looks for it
# first, and reads the old weights without a warning. A model that has grown past the limit of a
# shard (50 GB by default) between two saves is enough.
#
# Seen with transformers 5.23.0, safetensors 0.8.0, torch 2.13.0 on CPython 3.11:
#     saved 1.0 in one file, then 2.0 in shards: model.safetensors is there: True, the index: True
#     from_pretrained reads 1.0
#
# Exits with 1 if the behaviour differs from this.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install -q torch==2.13.0 transformers==5.23.0 safetensors==0.8.0
cd "$place"
HF_HUB_OFFLINE=1 "$place/venv/bin/python" - <<'PYTHON'
import pathlib
import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

logging.disable_progress_bar()

config = LlamaConfig(
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    vocab_size=64,
)


def save(value: float, place: str, size: str) -> None:
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    model.save_pretrained(place, max_shard_size=size)


save(1.0, "model", "1GB")
save(2.0, "model", "4KB")
there = [
    pathlib.Path("model", name).exists()
    for name in ("model.safetensors", "model.safetensors.index.json")
]
print(
    "saved 1.0 in one file, then 2.0 in shards: "
    f"model.safetensors is there: {there[0]}, the index: {there[1]}"
)
weight = LlamaForCausalLM.from_pretrained("model").model.layers[0].self_attn.q_proj.weight
print(f"from_pretrained reads {weight[0, 0].item()}")
sys.exit((there, weight[0, 0].item()) != ([True, True], 1.0))
PYTHON
