"""A tile of the LM head on Triton: partials and gradients of the logits beside fp64, for any
shapes, strides and targets."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from infinity._src.kernels import choice
from infinity._src.kernels import linear_cross_entropy as contract
from infinity._src.kernels.tiling import tiled_loss
from tests.marks import mostly_slow
from tests.unit.kernels.operands import (
    DTYPES,
    dtypes,
    generators,
    interpreted,
    laid_out,
    layouts,
    normal,
    seeds,
    sizes,
)

pytest.importorskip("triton")

from infinity._src.kernels.triton import linear_cross_entropy as loss
from tests.unit.kernels.configurations import each_configuration

NAMES = ("row_max", "row_sum_exp", "target_logit", "logit_sum")


def operands(
    rows: int, features: int, columns: int, dtype: torch.dtype, device: torch.device, seed: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """hidden, weight, bias, and targets from 100 below the tile's first index (1000) to 100 past
    its last."""
    numbers = generators(seed)
    hidden, weight = (
        normal((rows, features), dtype, device, numbers),
        normal((columns, features), dtype, device, numbers),
    )
    weight *= 3 / features**0.5
    target = torch.randint(900, 1100 + columns, (rows,), generator=numbers)
    return hidden, weight, normal((columns,), dtype, device, numbers), target.to(device)


def assert_partials(
    found: tuple[torch.Tensor, ...], logits: torch.Tensor, terms: torch.Tensor, index: torch.Tensor
) -> None:
    """Beside fp64 `logits` [rows, columns]; terms: sums of the absolute values that each logit is a
    sum of, which bound its error where they cancel; index: the target's place among the columns, or
    outside."""
    inside = (index >= 0) & (index < logits.shape[1])
    target_logit = torch.where(
        inside, logits.gather(1, index.clamp(0, logits.shape[1] - 1)[:, None])[:, 0], 0.0
    )
    row_max = logits.amax(1)
    # The sum of exp is relative to the kernel's maximum: compare the log-sum-exp of both.
    lse = found[0].double() + found[1].double().log()
    for name, value, expected in (
        ("row_max", found[0], row_max),
        ("lse", lse, logits.logsumexp(1)),
        ("target_logit", found[2], target_logit),
        ("logit_sum", found[3], logits.sum(1)),
    ):
        size = terms.sum(1) if name == "logit_sum" else terms.amax(1) + 10
        assert bool(((value - expected).abs() <= 1e-5 * size).all()), (
            name,
            (value - expected).abs().max(),
        )


@interpreted
@given(st.data())
def test_partials_are_those_of_the_exact_logits(device: torch.device, data: st.DataObject) -> None:
    rows, features, columns = data.draw(sizes), data.draw(sizes), data.draw(st.integers(1, 1500))
    hidden, weight, bias, target = operands(
        rows, features, columns, data.draw(dtypes), device, data.draw(seeds)
    )
    hidden, weight = laid_out(hidden, data.draw(layouts)), laid_out(weight, data.draw(layouts))
    given_bias = bias if data.draw(st.booleans()) else None
    found = loss.tile_partials(hidden, weight, given_bias, target, start=1000)
    logits = hidden.double() @ weight.double().t() + (0 if given_bias is None else bias.double())
    terms = hidden.double().abs() @ weight.double().abs().t() + (
        0 if given_bias is None else bias.double().abs()
    )
    assert [value.dtype for value in found] == [torch.float32] * 4
    assert_partials(found, logits, terms, target - 1000)
    reference = contract.reference_partials(hidden, weight, given_bias, target, start=1000)
    assert_partials(reference, logits, terms, target - 1000)


@interpreted
@given(st.data())
def test_gradients_are_those_of_torch_s_loss(device: torch.device, data: st.DataObject) -> None:
    """The tile is columns 1000 .. of a vocabulary whose other columns are not read: their share of
    the log-sum-exp is given."""
    rows, features, columns = data.draw(sizes), data.draw(sizes), data.draw(st.integers(1, 300))
    dtype, smoothing = data.draw(dtypes), data.draw(st.sampled_from([0.0, 0.1]))
    hidden, weight, bias, target = operands(
        rows, features, columns, dtype, device, data.draw(seeds)
    )
    numbers = generators(1)
    scale = normal((rows,), torch.float32, device, numbers)
    scale[:: data.draw(st.integers(1, 4))] = 0
    rest = normal((rows, 1000), torch.float64, device, numbers)
    logits = torch.cat(
        [rest, hidden.double() @ weight.double().t() + bias, rest[:, :100]], 1
    ).requires_grad_()
    F.cross_entropy(logits, target, reduction="none", label_smoothing=smoothing).backward(
        scale.double()
    )
    lse = logits.detach().logsumexp(1).float()
    found = loss.tile_dlogits(
        laid_out(hidden, data.draw(layouts.filter(lambda layout: layout != "broadcast"))),
        weight,
        bias,
        target,
        start=1000,
        lse=lse,
        scale=scale,
        label_smoothing=smoothing,
        vocabulary=logits.shape[1],
    )
    assert found.dtype == dtype
    assert found.is_contiguous()
    assert logits.grad is not None
    expected = logits.grad[:, 1000 : 1000 + columns]
    bound = (
        expected.abs() * torch.finfo(dtype).eps
        + scale.abs()[:, None] * 1e-5
        + torch.finfo(dtype).smallest_normal
    )
    assert bool(((found.double() - expected).abs() <= bound).all()), (
        (found.double() - expected).abs().max()
    )
    assert bool((found[scale == 0] == 0).all())


@pytest.mark.slow
@pytest.mark.parametrize("dtype", mostly_slow(DTYPES, torch.float32), ids=str)
@pytest.mark.usefixtures("ordered_dot")
def test_every_configuration_gives_the_same_bits(device: torch.device, dtype: torch.dtype) -> None:
    """Sums over columns too, whatever the layout of a row over lanes and warps."""
    hidden, weight, bias, target = operands(140, 70, 1100, dtype, device, 0)
    tuned = (
        (loss._partials_wide, loss._dlogits_wide)
        if dtype == torch.float32
        else (loss._partials_narrow, loss._dlogits_narrow)
    )
    found = [
        loss.tile_partials(hidden, weight, bias, target, start=1000)
        for _ in each_configuration(tuned[0])
    ]
    assert len(found) > 1
    for others in found[1:]:
        assert all(torch.equal(one, other) for one, other in zip(found[0], others, strict=True))
    lse, scale = found[0][0] + found[0][1].log(), torch.full((140,), 0.3, device=device)
    grads = [
        loss.tile_dlogits(
            hidden,
            weight,
            bias,
            target,
            start=1000,
            lse=lse,
            scale=scale,
            label_smoothing=0.1,
            vocabulary=5000,
        )
        for _ in each_configuration(tuned[1])
    ]
    assert len(grads) > 1
    assert all(torch.equal(grads[0], other) for other in grads)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_whole_loss_on_it_is_torch_s(device: torch.device, reduction: str) -> None:
    """Three tiles of a vocabulary of 300, ignored rows among others: the loss and all gradients."""
    hidden, weight, bias, _ = operands(40, 50, 300, torch.float32, device, 4)
    target = torch.randint(0, 300, (40,), generator=generators(5)).to(device)
    target[::5] = -100
    parts = [values.requires_grad_() for values in (hidden, weight, bias)]
    settings = {"label_smoothing": 0.1, "reduction": reduction}
    with choice.forced(linear_cross_entropy="triton", tile_matmul="triton"):
        found = tiled_loss.linear_cross_entropy(
            hidden, weight, target, bias, vocabulary_tile=128, **settings
        )
        grads = torch.autograd.grad(found.sum(), parts)
    wide = [values.detach().double().requires_grad_() for values in parts]
    expected = F.cross_entropy(wide[0] @ wide[1].t() + wide[2], target, **settings)
    wanted = torch.autograd.grad(expected.sum(), wide)
    for one, other in zip((found, *grads), (expected, *wanted), strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5)


def test_infinite_logits_do_as_in_torch(device: torch.device) -> None:
    """-inf has no weight, rows of nothing else keep -inf as their maximum, and an ignored row's
    gradient is 0 whatever is in it."""
    hidden, weight, bias, target = operands(3, 20, 1100, torch.float32, device, 0)
    bias[3] = float("-inf")
    found = loss.tile_partials(hidden, weight, bias, target, start=0)
    logits = hidden.double() @ weight.double().t() + bias
    torch.testing.assert_close(
        found[0].double() + found[1].double().log(), logits.logsumexp(1), rtol=1e-5, atol=1e-5
    )
    assert found[3].tolist() == [float("-inf")] * 3
    nothing = loss.tile_partials(
        hidden, weight, torch.full_like(bias, float("-inf")), target, start=0
    )
    assert nothing[0].tolist() == [float("-inf")] * 3
    assert nothing[1].tolist() == [0.0] * 3
    bias[5] = float("inf")
    lse, scale = torch.zeros(3, device=device), torch.tensor([0.0, 1.0, 0.0], device=device)
    grad = loss.tile_dlogits(
        hidden,
        weight,
        bias,
        target,
        start=0,
        lse=lse,
        scale=scale,
        label_smoothing=0.0,
        vocabulary=1100,
    )
    assert bool((grad[[0, 2]] == 0).all())
    assert float(grad[1, 5]) == float("inf")
    assert float(grad[1, 3]) == 0


def test_no_rows_and_no_columns_contribute_nothing(device: torch.device) -> None:
    hidden, target = (
        torch.zeros((3, 5), device=device),
        torch.zeros(3, dtype=torch.int64, device=device),
    )
    row_max, row_sum_exp, target_logit, logit_sum = loss.tile_partials(
        hidden, hidden[:0], None, target, start=0
    )
    assert row_max.tolist() == [float("-inf")] * 3
    assert row_sum_exp.tolist() == target_logit.tolist() == logit_sum.tolist() == [0.0] * 3
    assert all(
        len(value) == 0
        for value in loss.tile_partials(hidden[:0], hidden, None, target[:0], start=0)
    )
