"""SGD and Lion on fp32 states follow torch.optim.SGD and Lion's definition; scalars and keys are as
stated."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from infinity._src.cabi.records import Format, GradSection, HyperFlag, Master, Moments, chunk_numel
from infinity._src.kernels.hyper import hyper_row_lion, hyper_row_sgd
from infinity._src.kernels.random_bits import rounding_key
from tests.oracle import update_sections

SGD_OPTIONS: list[dict[str, Any]] = [
    {},
    {"weight_decay": 0.1},
    {"momentum": 0.9},
    {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.01},
    {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
]


@pytest.mark.parametrize("options", SGD_OPTIONS, ids=str)
def test_sgd_follows_torch_within_rounding(options: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(0)
    plain = torch.randn(3000, generator=generator).requires_grad_()
    param = plain.detach().numpy().copy()
    optimizer = torch.optim.SGD([plain], lr=0.05, **options)
    count = 1 if "momentum" in options else 0
    buffers = [np.zeros(3000, np.float32)] * count
    for step in range(10):
        plain.grad = torch.randn(3000, generator=generator)
        optimizer.step()
        row = hyper_row_sgd(lr=0.05, first=step == 0, **options)
        state = Format(Master.FP32, Moments.FP32, count)
        update_sections(state, [param, *buffers], plain.grad.numpy(), row)
    torch.testing.assert_close(torch.from_numpy(param), plain.detach(), rtol=1e-5, atol=1e-6)
    if count:
        torch.testing.assert_close(
            torch.from_numpy(buffers[0]),
            optimizer.state[plain]["momentum_buffer"],
            rtol=1e-5,
            atol=1e-6,
        )


def test_lion_follows_its_definition() -> None:
    rng = np.random.default_rng(0)
    param, moment = rng.standard_normal(1000).astype(np.float32), np.zeros(1000, np.float32)
    p, m = param.astype(np.float64), moment.astype(np.float64)
    state = Format(Master.FP32, Moments.FP32, 1)
    for _ in range(10):
        grad = rng.standard_normal(1000).astype(np.float32)
        update_sections(state, [param, moment], grad, hyper_row_lion(lr=1e-2, weight_decay=0.1))
        p = p * (1 - 1e-3) - 1e-2 * np.sign(0.9 * m + 0.1 * grad)
        m = 0.99 * m + 0.01 * grad
    np.testing.assert_allclose(param, p, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(moment, m, rtol=1e-5, atol=1e-6)


def test_lions_sign_of_zero_is_zero_and_of_nan_is_nan() -> None:
    param, moment = np.ones(3, np.float32), np.zeros(3, np.float32)
    grad = np.array([0.0, np.nan, -np.inf], np.float32)
    update_sections(
        Format(Master.FP32, Moments.FP32, 1), [param, moment], grad, hyper_row_lion(lr=0.5)
    )
    assert param[0] == 1
    assert np.isnan(param[1])
    assert param[2] == 1.5


def test_rows_say_what_they_are_for() -> None:
    row = hyper_row_sgd(lr=0.1, first=True, momentum=0.9, nesterov=True)
    assert row["flags"] == HyperFlag.NESTEROV | HyperFlag.FIRST
    with pytest.raises(ValueError, match="nesterov"):
        hyper_row_sgd(lr=0.1, first=True, momentum=0.9, dampening=0.1, nesterov=True)
    assert rounding_key(0, 1, "w") != rounding_key(0, 1, "v")
    assert 0 <= rounding_key(2**63, 10**9, "w") < 1 << 64


def test_formats_are_codes_that_come_back_and_chunks_fit() -> None:
    for master in list(Master)[1:]:
        for moments in Moments:
            for count in range(1, 3):
                for grad in GradSection:
                    state = Format(master, moments, count, grad)
                    assert Format.of(state.code) is state
                    assert (state.master, state.moments, state.count, state.grad) == (
                        master,
                        moments,
                        count,
                        grad,
                    )
                    numel = chunk_numel(state)
                    assert numel == chunk_numel(state.with_grad(0))
                    size = sum(section.size_bytes(numel) for section in state.with_grad(0).sections)
                    assert 0.9 * 4_718_592 < size <= 4_718_592
    assert [chunk_numel(s) for s in (Format.SPLIT, Format(1, 1, 2), Format(2, 2, 2))] == [
        393_216,
        589_824,
        917_504,
    ]
    for bad in (
        (0, 0, 1),
        (1, 2, 0),
        (1, 2, 3),
        (1, 0, 4),
        (5, 0, 0),
        (1, 3, 1),
        (1, 0, 2, 4),
        (1, 0, -1),
    ):
        with pytest.raises(ValueError, match=r"."):
            Format(*bad)
