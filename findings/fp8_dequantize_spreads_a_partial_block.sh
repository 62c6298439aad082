#!/usr/bin/env bash
# transformers: `FineGrainedFP8Config(dequantize=True)` scales wrong rows where the last block is
# partial.
#
# A weight in fp8 has a scale for each block of `weight_block_size`, [128, 128] as a rule; the last
# block of 192 rows has 64. One guesses that rows 0 to 127 get the first scale and rows 128 to 191
# the second, as the same library's FP8Linear counts blocks. The dequantizing loader ignores
# `weight_block_size`: it divides the rows by the number of scales, so each scale covers 96 rows.
# Nothing is raised or logged. (It raises only where the division has a remainder.)
#
# Seen with transformers 5.23.0, safetensors 0.8.0, torch 2.13.0 on CPython 3.11:
#     a weight of 192 x 128 ones in fp8, weight_block_size [128, 128], scales 1.0 and 2.0
#     from_pretrained: 96 rows of 1.0, 96 rows of 2.0
#
# Exits with 1 if the behaviour differs from this.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install -q torch==2.13.0 transformers==5.23.0 safetensors==0.8.0 \
    accelerate==1.15.0
cd "$place"
HF_HUB_OFFLINE=1 "$place/venv/bin/python" - <<'PYTHON'
import json
import pathlib
import sys

import torch
from safetensors.torch import load_file, save_file
from transformers import FineGrainedFP8Config, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

logging.disable_progress_bar()
NAME = "model.layers.0.mlp.gate_proj.weight"

config = LlamaConfig(
    hidden_size=128,
    intermediate_size=192,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=2,
    vocab_size=64,
)
LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained("model")
file = pathlib.Path("model/model.safetensors")
tensors = load_file(file)
for name in [name for name in tensors if name.endswith("proj.weight")]:
    rows, columns = tensors[name].shape
    tensors[name] = torch.ones(rows, columns).to(torch.float8_e4m3fn)
    scales = torch.ones(-(-rows // 128), -(-columns // 128))
    if name == NAME:
        scales[1] = 2.0
    tensors[f"{name}_scale_inv"] = scales
save_file(tensors, file, {"format": "pt"})
described = json.loads(pathlib.Path("model/config.json").read_text())
described["quantization_config"] = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
    "modules_to_not_convert": ["lm_head"],
}
pathlib.Path("model/config.json").write_text(json.dumps(described))
print("a weight of 192 x 128 ones in fp8, weight_block_size [128, 128], scales 1.0 and 2.0")
model = LlamaForCausalLM.from_pretrained(
    "model", quantization_config=FineGrainedFP8Config(dequantize=True), dtype=torch.bfloat16
)
read = model.state_dict()[NAME][:, 0].tolist()
print(f"from_pretrained: {read.count(1.0)} rows of 1.0, {read.count(2.0)} rows of 2.0")
sys.exit((read.count(1.0), read.count(2.0)) != (96, 96))
PYTHON
