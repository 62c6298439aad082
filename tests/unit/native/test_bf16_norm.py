"""bf16_norm against torch's norm of the values in fp32, bit for bit, and without native code."""

from __future__ import annotations

import platform

import pytest
import torch

from infinity._src.cabi import native
from infinity._src.kernels import bf16_norm as module
from infinity._src.kernels.bf16_norm import bf16_norm
from infinity._src.params.accumulator import GradRegistry

SCALES = [1.0, 1e-20, 1e-40, 1e19, float("inf"), float("nan")]
"""Squares that are ordinary, that underflow and overflow, denormal values, and values that are no
numbers."""


def bits(value: float) -> int:
    return int(torch.tensor(value, dtype=torch.float32).nan_to_num(nan=-1.0).view(torch.int32))


@pytest.mark.skipif(platform.machine() != "x86_64", reason="torch adds in another order there")
@pytest.mark.parametrize("isa", native.isas())
def test_it_is_torchs_norm_and_copies(isa: str) -> None:
    before = native.isa()
    native.select_isa(isa)
    try:
        for numel in (0, 8, 16, 24, 4104, 1 << 17):
            for scale in SCALES:
                values = torch.randn(numel).mul_(scale).bfloat16()
                copy = torch.full_like(values, -1.0)
                norm = bf16_norm(values, copy)
                assert norm is not None
                assert bits(norm) == bits(float(torch.linalg.vector_norm(values.float())))
                assert torch.equal(copy.view(torch.int16), values.view(torch.int16))
                assert bits(norm) == bits(bf16_norm(values) or 0.0)
    finally:
        native.select_isa(before)


def test_it_refuses_what_it_cannot_read(monkeypatch: pytest.MonkeyPatch) -> None:
    square = torch.ones(4, 4, dtype=torch.bfloat16)
    assert bf16_norm(square.float()) is None
    assert bf16_norm(square[:, :2]) is None
    assert bf16_norm(square.view(-1)[:12]) is None
    assert bf16_norm(square, torch.ones(4, 4)) is None
    assert bf16_norm(torch.ones(4, dtype=torch.bfloat16, device="meta")) is None
    # Another order of sums.
    module._has_torchs_bits.cache_clear()
    monkeypatch.setattr(module, "_norm", lambda values, _to: float(values.float().sum()))
    try:
        assert bf16_norm(square) is None
    finally:
        monkeypatch.undo()
        module._has_torchs_bits.cache_clear()


@pytest.mark.parametrize("is_native", [True, False])
def test_an_accumulator_needs_no_fp32_copy(
    is_native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    grad = torch.randn(65, 64).bfloat16()
    book = GradRegistry()
    one = book.add("w", grad.shape, torch.empty_like(grad).view(-1), torch.device("cpu"))
    book.reserve()
    book.scratch(1).fill_(-1.0)
    module._has_torchs_bits.cache_clear()
    if not is_native:
        monkeypatch.setattr(native, "_reason", "hidden")
    try:
        copies = bf16_norm(grad) is None
        one.accumulate(grad)
    finally:
        monkeypatch.undo()
        module._has_torchs_bits.cache_clear()
    assert one.norm() == float(torch.linalg.vector_norm(grad.float()))
    assert torch.equal(one.materialize(), grad.float())
    assert (float(book.scratch(1)) != -1.0) == copies
    assert is_native or copies
