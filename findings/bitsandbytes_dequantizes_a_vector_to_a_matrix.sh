#!/usr/bin/env bash
# bitsandbytes: dequantize_4bit gives a vector of even length a second dimension.
#
# `quantize_4bit` keeps the shape of its input in the QuantState, and one guesses that
# `dequantize_4bit` returns that shape, as it does for matrices and for vectors of odd length. A
# vector of n elements comes back as (1, n) where n is even, and as (2, 1) where n is 2. Weights of
# norms and biases have even lengths, so a reader of a 4-bit checkpoint must reshape to the
# QuantState's shape. Seen on the CPU.
#
# Seen with bitsandbytes 0.50.2 and torch 2.13.0 on CPython 3.11:
#     (2,) -> (2, 1), state (2,)
#     (64,) -> (1, 64), state (64,)
#     (65,) -> (65,), state (65,)
#     (4, 32) -> (4, 32), state (4, 32)
#
# Exits with 1 if the behaviour differs from this.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install -q torch==2.13.0 bitsandbytes==0.50.2 numpy
cd "$place"
"$place/venv/bin/python" - <<'PYTHON'
import sys

import bitsandbytes.functional as functional
import torch

found = []
for shape in ((2,), (64,), (65,), (4, 32)):
    packed, state = functional.quantize_4bit(torch.randn(shape), blocksize=64, quant_type="nf4")
    back = functional.dequantize_4bit(packed, state)
    found.append(tuple(back.shape))
    print(f"{shape} -> {found[-1]}, state {tuple(state.shape)}")
sys.exit(found != [(2, 1), (1, 64), (65,), (4, 32)])
PYTHON
