"""Triton's kernels on whatever there is: in its interpreter on the CPU, and compiled on a GPU (marker `gpu`).

One process has either the interpreter or the compiler: tests/conftest.py decides.
"""

from __future__ import annotations

import pytest
import torch

from infinity._src.kernels.choice import interpreted


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Where the tensors of a Triton test lie."""
    if request.param == "cpu" and not interpreted():
        pytest.skip("Triton compiles here; its interpreter needs TRITON_INTERPRET=1")
    if request.param == "cuda" and (interpreted() or not torch.cuda.is_available()):
        pytest.skip("needs a CUDA device, and TRITON_INTERPRET unset")
    return torch.device(request.param)
