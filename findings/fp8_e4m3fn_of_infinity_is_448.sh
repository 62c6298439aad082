#!/usr/bin/env bash
# torch 2.13: a cast to float8_e4m3fn turns infinity into 448, a cast to float8_e5m2 keeps it.
#
# e4m3fn has NaN but no infinity, and torch 2.10.0 and 2.12.0 cast everything above 464 to NaN, so
# one guesses that a search for NaN after the cast finds an overflow. torch 2.13.0 saturates: every
# number above 448 becomes 448, and so does infinity. NaN stays NaN. e5m2 does not saturate in any
# of these versions. So an overflow must be looked for before the cast, and code that ran on 2.12
# loses its check without an error. Seen on the CPU, from fp32, bf16, fp16 and fp64 alike.
#
# Seen with torch 2.13.0 on CPython 3.11 (2.12.0: e4m3fn [448.0, 448.0, nan, nan, nan]):
#     e4m3fn of 448, 464, 465, 10000, inf: [448.0, 448.0, 448.0, 448.0, 448.0]
#     e5m2 of 57344, 61440, inf: [57344.0, inf, inf]
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


def cast(numbers: list[float], dtype: torch.dtype) -> list[float]:
    return torch.tensor(numbers).to(dtype).float().tolist()


infinity = float("inf")
small = cast([448, 464, 465, 10000, infinity], torch.float8_e4m3fn)
wide = cast([57344, 61440, infinity], torch.float8_e5m2)
print(f"e4m3fn of 448, 464, 465, 10000, inf: {small}")
print(f"e5m2 of 57344, 61440, inf: {wide}")
sys.exit((small, wide) != ([448.0] * 5, [57344.0, infinity, infinity]))
PYTHON
