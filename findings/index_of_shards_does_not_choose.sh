#!/usr/bin/env bash
# transformers: the weight_map of model.safetensors.index.json does not choose between shards.
#
# `weight_map` says for each tensor which shard has it. If a tensor is in two shards (one was
# written anew, or shards were merged by hand), one guesses that `from_pretrained` takes it from
# the shard that the map names. It takes the map's file names only, reads every tensor of every
# named file, and the file that sorts last wins, without a warning.
#
# Seen with transformers 5.23.0, safetensors 0.8.0, torch 2.13.0 on CPython 3.11:
#     the map names model-00001-of-00002.safetensors, which holds 1.0
#     model-00002-of-00002.safetensors has the tensor, too, and holds 2.0
#     from_pretrained reads 2.0
#
# Exits with 1 if the behaviour differs from this.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install -q torch==2.13.0 transformers==5.23.0 safetensors==0.8.0
cd "$place"
HF_HUB_OFFLINE=1 "$place/venv/bin/python" - <<'PYTHON'
import json
import pathlib
import sys

import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

logging.disable_progress_bar()
NAME = "model.layers.0.self_attn.q_proj.weight"
FIRST, SECOND = (f"model-0000{number}-of-00002.safetensors" for number in (1, 2))

config = LlamaConfig(
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=2,
    vocab_size=64,
)
LlamaForCausalLM(config).save_pretrained("model")
single = pathlib.Path("model/model.safetensors")
tensors = load_file(single)
single.unlink()
names = sorted(tensors)
first = {name: tensors[name] for name in names[::2]} | {NAME: torch.full_like(tensors[NAME], 1.0)}
second = {name: tensors[name] for name in names[1::2]} | {NAME: torch.full_like(tensors[NAME], 2.0)}
save_file(first, f"model/{FIRST}", {"format": "pt"})
save_file(second, f"model/{SECOND}", {"format": "pt"})
weight_map = dict.fromkeys(second, SECOND) | dict.fromkeys(first, FIRST)
index = {"metadata": {}, "weight_map": weight_map}
pathlib.Path("model/model.safetensors.index.json").write_text(json.dumps(index))
print(f"the map names {weight_map[NAME]}, which holds 1.0")
print(f"{SECOND} has the tensor, too, and holds 2.0")
read = LlamaForCausalLM.from_pretrained("model").state_dict()[NAME][0, 0].item()
print(f"from_pretrained reads {read}")
sys.exit((weight_map[NAME], read) != (FIRST, 2.0))
PYTHON
