"""Triton's kernels on whatever there is: in its interpreter on the CPU, and compiled on a GPU
(marker `gpu`).

One process has either the interpreter or the compiler: tests/conftest.py decides.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from infinity._src.kernels.choice import interpreted


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Device of the tensors of a Triton test."""
    if request.param == "cpu" and not interpreted():
        pytest.skip("Triton compiles here; its interpreter needs TRITON_INTERPRET=1")
    if request.param == "cuda" and (interpreted() or not torch.cuda.is_available()):
        pytest.skip("needs a CUDA device, and TRITON_INTERPRET unset")
    return torch.device(request.param)


@pytest.fixture
def ordered_dot(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter's `tl.dot` adds up products in the order of k, whatever the shape of a block.

    It calls BLAS, whose order follows the shape on some CPUs (seen on AMD's without AVX-512); what
    is tested is the kernel's own order. A compiled dot of a fixed BLOCK_K keeps its order by
    itself.
    """
    if not interpreted():
        return
    from triton.runtime import interpreter

    def dot(_builder: Any, a: Any, b: Any, d: Any, *_precision: Any) -> Any:
        total = np.zeros_like(d.data)
        for k in range(a.data.shape[-1]):
            total += a.data[..., :, k, None].astype(total.dtype) * b.data[..., k, None, :].astype(
                total.dtype
            )
        return interpreter.TensorHandle(total + d.data, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)
