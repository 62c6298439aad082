#!/usr/bin/env bash
# On CPUs with AVX2, torch's `lerp` and `add(alpha=)` of fp32 round once; on others twice.
#
# One guesses that a.add(b, alpha=c) has the bits of a + b * c, and that fp32 on a CPU has the same
# bits on every x86 machine of the same torch. With AVX2 or AVX-512 both operations are one fused
# multiply-add, which rounds once. Without (ATEN_CPU_CAPABILITY=default, the code for older CPUs)
# product and sum round separately, and then the bits are those of a + b * c. This holds for every
# element, also in a tail or a strided tensor.
#
# torch.optim.Muon updates momentum and parameters by these two operations. Who keeps parity with it
# in another implementation needs fma there, and a machine with AVX2 for the comparison. Optimizers
# made of separate operations (mul_, add_ without alpha) are not affected.
#
# Seen with torch 2.13.0 on CPython 3.11; elements of 2,000 whose bits are not those of separate
# operations:
#     default lerp 0 add 0
#     avx2 lerp 4 add 21
#
# Exits with 1 if the behaviour differs from this. Needs a CPU with AVX2.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install -q torch==2.13.0 numpy
cd "$place"
cat > count.py <<'PYTHON'
import os

import numpy as np
import torch

# Numbers of 24 random bits, without a generator whose stream may change.
bits = (np.arange(4000, dtype=np.uint64) * 2654435761 + 12345) % 2**32 >> 8
a, b = torch.from_numpy((bits / 2**23 - 1).astype(np.float32)).split(2000)
lerp = a + (b - a) * torch.tensor(0.05)
add = a + b * torch.tensor(-0.02)
print(
    os.environ["ATEN_CPU_CAPABILITY"],
    "lerp", int((a.lerp(b, 0.05) != lerp).sum()),
    "add", int((a.add(b, alpha=-0.02) != add).sum()),
)
PYTHON
for capability in default avx2; do
    ATEN_CPU_CAPABILITY=$capability "$place/venv/bin/python" count.py
done | tee seen
diff seen - <<'SEEN'
default lerp 0 add 0
avx2 lerp 4 add 21
SEEN
