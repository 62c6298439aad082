#!/usr/bin/env bash
# torch.optim.Muon on bf16 parameters, without Nesterov momentum, overwrites its momentum.
#
# One guesses that `momentum_buffer` is the running average of the gradients for every dtype. The
# orthogonalization takes a bf16 copy of its input and divides it by its norm in place. The input is
# the buffer where nesterov=False, and a "copy" of a bf16 tensor to bf16 is the tensor: after each
# step the buffer has norm 1, so the weight of a gradient in later steps depends on its norm. fp32
# parameters, and nesterov=True, are not affected.
#
# Who keeps parity with torch.optim.Muon must compare with fp32 masters, or with Nesterov momentum.
#
# Seen with torch 2.13.0 on CPython 3.11; norm of the buffer after two steps with gradients of
# norm 80, momentum 0.5 (the average has norm 60):
#     float32 nesterov=False: 60.00
#     float32 nesterov=True: 60.00
#     bfloat16 nesterov=False: 1.00
#     bfloat16 nesterov=True: 60.00
#
# Exits with 1 if the behaviour differs from this.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install -q torch==2.13.0 numpy
cd "$place"
"$place/venv/bin/python" - <<'PYTHON'
import sys

import torch

norms = {}
for dtype in (torch.float32, torch.bfloat16):
    for nesterov in (False, True):
        weight = torch.nn.Parameter(torch.zeros(64, 64, dtype=dtype))
        optimizer = torch.optim.Muon([weight], momentum=0.5, nesterov=nesterov)
        for _ in range(2):
            weight.grad = torch.full((64, 64), 1.25, dtype=dtype)
            optimizer.step()
        name = f"{str(dtype)[6:]} nesterov={nesterov}"
        norms[name] = f"{optimizer.state[weight]['momentum_buffer'].norm().item():.2f}"
        print(f"{name}: {norms[name]}")
sys.exit(list(norms.values()) != ["60.00", "60.00", "1.00", "60.00"])
PYTHON
