"""Tiles on the device that computes: the bits of a plain loop on the same tiles there, peaks by the
tile, and Triton beneath."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import infinity as inf
from infinity._src.kernels import choice
from infinity.ops import TiledLinear
from tests import test_matrix, test_tiling
from tests.gpu.test_parity import MIN, check
from tests.harness import Training
from tests.test_bitwise import policy

TWINS_ON_CPU = True


TRAININGS = {
    **{name: each for name, (each, values) in test_tiling.VARIANTS.items() if not values},
    "tied embedding": Training(test_matrix.tiled_gpt2, groups=True),
    "checkpointing": Training(test_matrix.tiled_llama, checkpointing=False),
    "reentrant checkpointing": Training(test_matrix.tiled_llama, checkpointing=True),
    "fp32": Training(test_matrix.tiled_llama, dtype=torch.float32),
}


@pytest.mark.parametrize("name", TRAININGS)
def test_every_kind_of_training_has_the_bits_of_the_plain_loop(
    name: str, device: str, tmp_path: Path
) -> None:
    check(TRAININGS[name], policy(tmp_path, **MIN), device)


@pytest.mark.parametrize("head", [False, True])
def test_what_is_gathered_at_once_falls_with_the_number_of_tiles(
    head: bool, device: str, tmp_path: Path
) -> None:
    most = {}
    for tiles in (None, 4, 16):
        size, *found = test_tiling.peaks(tiles, head=head, directory=tmp_path, device=device)
        most[tiles] = max(found[:2])
    assert most[None] >= size
    assert most[16] * 3 < most[4] < size


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu_tiles_compute_what_torchs_linear_does(dtype: torch.dtype, cuda: str) -> None:
    torch.manual_seed(0)
    linear = torch.nn.Linear(384, 512, dtype=dtype, device=cuda)
    x, dy = (torch.randn(96, size, dtype=dtype, device=cuda) for size in (384, 512))
    for kind in choice.IMPLEMENTATIONS:
        for tiles in (4, (3, 2)):
            tiled = TiledLinear.from_linear(linear, tiles)
            with choice.forced(tile_matmul=kind):
                ours, theirs = (run(module, x, dy) for module in (tiled, linear))
            tolerance = {torch.float32: 2e-3, torch.bfloat16: 2e-2}[dtype]  # tf32 may be on
            for mine, other in zip(ours, theirs, strict=True):
                torch.testing.assert_close(
                    mine, other, rtol=tolerance, atol=tolerance * float(other.abs().max())
                )


def run(module: torch.nn.Module, x: torch.Tensor, dy: torch.Tensor) -> list[Any]:
    """The output, and the input's gradient."""
    x = x.detach().requires_grad_()
    y = module(x)
    y.backward(dy)
    return [y.detach(), x.grad]


def test_the_largest_linear_is_larger_than_what_is_gathered(cuda: str, tmp_path: Path) -> None:
    """Most that the allocator held, above what it held before: a few tiles and activations, not the
    weight."""
    model = inf.tile_linears(
        torch.nn.Sequential(torch.nn.Linear(4096, 32768, bias=False, dtype=torch.bfloat16)),
        tiles=32,
    )
    weight_bytes = 4096 * 32768 * 2
    model.to(cuda)
    inf.offload(model, policy(tmp_path, **MIN))
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    model(torch.randn(64, 4096, device=cuda, dtype=torch.bfloat16)).square().mean().backward()
    assert torch.cuda.max_memory_allocated() - before < weight_bytes // 2
    inf.handle(model).close()
