"""all_finite against torch.isfinite: every dtype, every kind of value, every position, with and
without native code."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from infinity._src.cabi import native
from infinity._src.kernels.update import all_finite

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
EDGES = [0.0, -0.0, 1e-45, -1e-8, 6.5e4, -3e38, float("inf"), float("-inf"), float("nan")]


@given(st.sampled_from(DTYPES), st.integers(0, 9000), st.data())
def test_it_is_torchs_isfinite(dtype: torch.dtype, numel: int, data: st.DataObject) -> None:
    values = torch.zeros(numel, dtype=dtype)
    if numel and data.draw(st.booleans()):
        values[data.draw(st.integers(0, numel - 1))] = data.draw(st.sampled_from(EDGES))
    assert all_finite(values) == bool(torch.isfinite(values).all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_pattern(dtype: torch.dtype) -> None:
    values = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)
    assert [all_finite(value) for value in values[::7]] == torch.isfinite(values[::7]).tolist()


@pytest.mark.parametrize("dtype", DTYPES)
def test_views_and_without_native_code(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.zeros(8, 8, dtype=dtype)
    values[0, 1] = float("nan")
    for is_native in (True, False):
        if not is_native:
            monkeypatch.setattr(native, "_reason", "hidden")
        assert not all_finite(values)
        assert all_finite(values[1:])
        assert all_finite(values[:, 2:])  # not contiguous
        assert not all_finite(values.t())
