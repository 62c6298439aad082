"""Triton's kernels on whatever there is: in its interpreter on the CPU, and compiled on a GPU (marker `gpu`).

TRITON_INTERPRET must be set before triton is first imported, so one process has either the interpreter or the compiler: with a
CUDA device the compiler, unless the variable says otherwise.
"""

from __future__ import annotations

import os

import pytest
import torch

from infinity.ops.choice import interpreted

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Where the tensors of a Triton test lie."""
    if request.param == "cpu" and not interpreted():
        pytest.skip("Triton compiles here; its interpreter needs TRITON_INTERPRET=1")
    if request.param == "cuda" and (interpreted() or not torch.cuda.is_available()):
        pytest.skip("needs a CUDA device, and TRITON_INTERPRET unset")
    return torch.device(request.param)
