"""Newton-Schulz iterations that orthogonalize a matrix: Muon's function.

With the singular value decomposition U S V^T of the matrix, the result is about U V^T: a quintic
polynomial of the singular values, iterated, brings each near 1. Sources: Jordan et al., "Muon: An
optimizer for hidden layers in neural networks" (2024); Bernstein & Newhouse (arXiv 2409.20325).
"""

from __future__ import annotations

import torch

from infinity._src.base.cpu_features import bf16_instructions

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
STEPS = 5
STEPS_MAX = 99
"""The bound of torch.optim.Muon: more steps do not help."""


def product_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype of the iterations' products on a device: bf16, or fp32 on CPUs without
    instructions for products of bf16, where torch emulates them."""
    fast = device.type != "cpu" or bool(bf16_instructions())
    return torch.bfloat16 if fast else torch.float32


def orthogonalize(
    matrix: torch.Tensor,
    *,
    coefficients: tuple[float, float, float] = COEFFICIENTS,
    steps: int = STEPS,
    eps: float = 1e-7,
) -> torch.Tensor:
    """Return the orthogonalized matrix.

    matrix: bf16 [m, n]. The result is bf16 [m, n], computed by the operations of torch.optim.Muon,
    in `product_dtype`. Takes steps * (4 m n k + 2 k^3) flops, k = min(m, n), and the memory of
    `scratch_numel` elements.
    """
    a, b, c = coefficients
    x = matrix.to(product_dtype(matrix.device))
    tall = x.size(0) > x.size(1)
    if tall:
        x = x.T
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.T if tall else x).to(torch.bfloat16)


def scratch_numel(rows: int, columns: int) -> int:
    """Return the elements that `orthogonalize` allocates at most at once: two matrices, and two of
    the smaller side."""
    return 2 * rows * columns + 2 * min(rows, columns) ** 2


def flops(rows: int, columns: int, steps: int = STEPS) -> int:
    """Return the flops of `orthogonalize`, without the norm."""
    least = min(rows, columns)
    return steps * (4 * rows * columns * least + 2 * least**3)
