"""The LM head with its loss: torch's cross_entropy, value and gradients, and never the whole
logits."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.nn.functional as functional
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import infinity as inf
from infinity._src.kernels import choice
from infinity._src.kernels.linear_cross_entropy import merge, reference_partials
from infinity._src.kernels.tiling.deferred_logits import DeferredLogits
from infinity.ops import LinearCrossEntropy, TiledLinear, linear_cross_entropy
from tests import models


class Largest(TorchDispatchMode):
    """Watches the largest tensor that any operation makes."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor):
                self.numel = max(self.numel, tensor.numel())
        return out


def grads(loss: torch.Tensor, of: list[torch.Tensor], scale: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad(loss, of, scale.view(loss.shape)))


@given(
    shape=st.tuples(st.integers(1, 4), st.integers(1, 5)),
    features=st.integers(1, 12),
    vocabulary=st.integers(1, 23),
    tile=st.integers(1, 30),
    bias=st.booleans(),
    strided=st.booleans(),
    smoothing=st.sampled_from([0.0, 0.1, 1.0]),
    reduction=st.sampled_from(["none", "mean", "sum"]),
    ignored=st.floats(0, 0.9),
    seed=st.integers(0, 1000),
)
@settings(max_examples=20, deadline=None)
def test_value_and_gradients_are_torchs(
    shape: tuple[int, int],
    features: int,
    vocabulary: int,
    tile: int,
    bias: bool,
    strided: bool,
    smoothing: float,
    reduction: str,
    ignored: float,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    wide: dict[str, Any] = {"dtype": torch.float64}
    hidden, weight = (
        torch.randn(*shape, features, **wide),
        torch.randn(vocabulary, features, **wide),
    )
    if strided:
        hidden, weight = (
            torch.randn(features, *shape, **wide).movedim(0, -1),
            torch.randn(features, vocabulary, **wide).t(),
        )
    offset = torch.randn(vocabulary, **wide) if bias else None
    target = torch.randint(0, vocabulary, shape)
    target[torch.rand(shape) < ignored] = 1_000_000
    target[0, 0] = 0
    leaves = [hidden.requires_grad_(), weight.requires_grad_()] + (
        [offset.requires_grad_()] if offset is not None else []
    )
    options: dict[str, Any] = {
        "label_smoothing": smoothing,
        "reduction": reduction,
        "ignore_index": 1_000_000,
    }
    theirs = functional.cross_entropy(
        functional.linear(hidden, weight, offset).flatten(0, 1), target.flatten(), **options
    )
    scale = torch.randn_like(theirs)
    ours = linear_cross_entropy(hidden, weight, target, offset, vocabulary_tile=tile, **options)
    linear = nn.Linear(features, vocabulary, bias=bias, **wide)
    linear.load_state_dict(
        {"weight": weight, "bias": offset} if offset is not None else {"weight": weight}
    )
    tiled = TiledLinear.from_linear(linear, min(vocabulary, 1 + tile % 5))
    by_module = LinearCrossEntropy(tiled, **options)(hidden, target)
    assert ours.shape == (target.shape if reduction == "none" else ())
    for loss in (ours, by_module):
        torch.testing.assert_close(loss.flatten(), theirs.flatten(), rtol=1e-9, atol=1e-9)
    expected = grads(theirs, leaves, scale)
    for mine, other in zip(grads(ours, leaves, scale), expected, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-9)
    tiles = tiled.tile_parameters()
    found = grads(
        by_module, [hidden, *tiles, *([tiled.bias] if tiled.bias is not None else [])], scale
    )
    found[1 : 1 + len(tiles)] = [torch.cat(found[1 : 1 + len(tiles)])]
    for mine, other in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("whole", [True, False])
def test_half_precision_is_rounded_only_in_the_gradients(dtype: torch.dtype, whole: bool) -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(40, 32).to(dtype), (torch.randn(300, 32) / 6).to(dtype)
    target = torch.randint(0, 300, (40,))
    wide = [hidden.double().requires_grad_(), weight.double().requires_grad_()]
    theirs = functional.cross_entropy(wide[0] @ wide[1].t(), target)
    narrow = [hidden.requires_grad_(), weight.requires_grad_()]
    ours = linear_cross_entropy(*narrow, target, vocabulary_tile=300 if whole else 64)
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours.double(), theirs, rtol=1e-6, atol=1e-6)
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}[dtype]
    for mine, other in zip(
        torch.autograd.grad(ours, narrow), torch.autograd.grad(theirs, wide), strict=True
    ):
        assert mine.dtype == dtype
        # Softmax minus one is rounded before the products: against the largest of a row, as any
        # bf16 backward.
        torch.testing.assert_close(
            mine.double(), other, rtol=tolerance, atol=tolerance * float(other.abs().max())
        )


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_rows_that_are_all_ignored_give_what_torch_gives(reduction: str) -> None:
    hidden, weight = torch.randn(3, 4, requires_grad=True), torch.randn(7, 4, requires_grad=True)
    target = torch.full((3,), -100)
    theirs = functional.cross_entropy(hidden @ weight.t(), target, reduction=reduction)
    ours = linear_cross_entropy(hidden, weight, target, vocabulary_tile=3, reduction=reduction)
    torch.testing.assert_close(ours, theirs, equal_nan=True)
    scale = torch.ones_like(theirs)
    for mine, other in zip(
        grads(ours, [hidden, weight], scale), grads(theirs, [hidden, weight], scale), strict=True
    ):
        torch.testing.assert_close(mine, other, equal_nan=True)


def test_classes_that_are_ruled_out_take_no_part() -> None:
    hidden, weight, bias = torch.randn(5, 4), torch.randn(9, 4), torch.zeros(9)
    bias[:6] = float("-inf")  # two whole tiles
    target = torch.randint(6, 9, (5,))
    theirs = functional.cross_entropy(functional.linear(hidden, weight, bias), target)
    torch.testing.assert_close(
        linear_cross_entropy(hidden, weight, target, bias, vocabulary_tile=3), theirs
    )


@given(cut=st.integers(1, 11), seed=st.integers(0, 1000), scale=st.sampled_from([1.0, 50.0]))
@settings(max_examples=30, deadline=None)
def test_partials_of_parts_make_those_of_the_whole(cut: int, seed: int, scale: float) -> None:
    torch.manual_seed(seed)
    hidden, weight = torch.randn(4, 6).double() * scale, torch.randn(12, 6).double()
    target = torch.randint(0, 12, (4,))
    whole = reference_partials(hidden, weight, None, target, start=0)
    parts = (
        reference_partials(hidden, weight[s], None, target, start=s.start or 0)
        for s in (slice(0, cut), slice(cut, 12))
    )
    for mine, other in zip(merge(*parts), whole, strict=True):
        torch.testing.assert_close(mine, other)


@pytest.mark.parametrize("head", ["tensor", "module"])
def test_the_whole_logits_never_exist(head: str) -> None:
    rows, features, vocabulary, tile = 64, 8, 4096, 256
    hidden, target = (
        torch.randn(rows, features, requires_grad=True),
        torch.randint(0, vocabulary, (rows,)),
    )
    linear = nn.Linear(features, vocabulary, bias=False)
    module: nn.Module = linear
    if head == "module":
        module = TiledLinear.from_linear(linear, vocabulary // tile)
    with Largest() as watch:
        LinearCrossEntropy(module, vocabulary_tile=tile)(hidden, target).backward()  # type: ignore[arg-type]
    most = max(rows * tile, vocabulary * features if head == "tensor" else 0)
    assert watch.numel == most < rows * vocabulary
    with Largest() as watch:
        functional.cross_entropy(linear(hidden), target).backward()
    assert watch.numel == rows * vocabulary


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        ({"reduction": "max"}, ValueError, "reduction='max' is not known"),
        ({"label_smoothing": 1.5}, ValueError, "label_smoothing=1.5 is not between 0 and 1"),
        ({"vocabulary_tile": 0}, ValueError, "vocabulary_tile=0"),
        ({"target": torch.tensor([7, 0, 1])}, IndexError, r"Target 7 is out of bounds"),
        ({"target": torch.tensor([-1, 0, 1])}, IndexError, r"Target -1 is out of bounds"),
        (
            {"target": torch.tensor([1, 0])},
            ValueError,
            r"hidden \(3, 4\) and target \(2,\) do not fit a weight of 4 features",
        ),
        ({"target": torch.rand(3)}, ValueError, "class probabilities are not supported"),
    ],
)
def test_mistakes_are_named(values: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments = {
        "hidden": torch.randn(3, 4),
        "weight": torch.randn(7, 4),
        "target": torch.tensor([0, 1, 2]),
        **values,
    }
    with pytest.raises(error, match=message):
        linear_cross_entropy(**arguments)


def test_heads_that_cannot_be_used_are_named() -> None:
    with pytest.raises(ValueError, match=r"2 tiles along its inputs.*tiles=\(3, 1\)"):
        LinearCrossEntropy(TiledLinear(8, 9, tiles=(3, 2)))
    with pytest.raises(ValueError, match="the head is a Identity"):
        LinearCrossEntropy(nn.Identity())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"name it: inf.tile_loss\(model, head='lm_head'\)"):
        inf.tile_loss(models.External())
    with pytest.raises(ValueError, match="the model has no such module"):
        inf.tile_loss(models.External(), head="gone")
    llama = inf.tile_linears(models.llama(), tiles=3, names="lm_head")
    with pytest.raises(ValueError, match="lm_head has 3 tiles already"):
        inf.tile_loss(llama, tiles=4)


# -- models that compute logits and their loss themselves ------------------------------------------


@pytest.mark.parametrize("factory", [models.llama, models.gpt2, models.mixtral])
def test_a_causal_lm_gets_its_loss_without_the_logits(
    factory: Any, caplog: pytest.LogCaptureFixture
) -> None:
    plain, tiled = (
        models.make(factory, dtype=torch.float32),
        models.make(factory, dtype=torch.float32),
    )
    assert inf.tile_loss(tiled, tiles=6) is tiled
    batch = models.token_batches(1)[0]
    batch["labels"] = batch["labels"].masked_fill(batch["labels"] % 5 == 0, -100)
    with caplog.at_level(logging.WARNING, "infinity"):
        outputs = [model(**batch) for model in (plain, tiled)]
        for out in outputs:
            out.loss.backward()
        assert not [record for record in caplog.records if record.name == "infinity"]
    torch.testing.assert_close(outputs[1].loss, outputs[0].loss)
    assert isinstance(outputs[1].logits, DeferredLogits)
    assert outputs[1].logits.shape == outputs[0].logits.shape
    mine, theirs = tiled.state_dict(), plain.state_dict()
    assert list(mine) == list(theirs)
    tiled_grads = {name: parameter.grad for name, parameter in tiled.named_parameters()}
    for name, parameter in plain.named_parameters():
        if name in tiled_grads:
            torch.testing.assert_close(tiled_grads[name], parameter.grad)
    with caplog.at_level(logging.WARNING, "infinity"):
        torch.testing.assert_close(outputs[1].logits + 0, outputs[0].logits)
    assert "computed in full" in caplog.text
    if factory is models.mixtral:
        return  # its auxiliary loss does not generate with beams
    tiled.eval(), plain.eval()
    ids = batch["input_ids"][:1]
    for options in ({}, {"num_beams": 2}):
        written = [
            model.generate(ids, max_new_tokens=4, do_sample=False, **options)
            for model in (plain, tiled)
        ]  # type: ignore[operator]
        assert torch.equal(*written)


def logits() -> tuple[DeferredLogits, torch.Tensor]:
    """Deferred ones of 2 x 5 positions, and what they are."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 13))
    inf.tile_loss(model, tiles=3, head="0")
    made = model(torch.randn(2, 5, 8))
    assert isinstance(made, DeferredLogits)
    return made, made.compute().detach()


CARRIED: dict[str, Any] = {
    "cast": lambda x: x.float(),
    "to": lambda x: x.to(dtype=torch.float64, copy=True),
    "shift": lambda x: x[..., :-1, :].contiguous(),
    "rows": lambda x: x[:, 1:],
    "last": lambda x: x[:, -1, :],
    "one": lambda x: x[0],
    "picked": lambda x: x[0, torch.tensor([1, 3])],
    "view": lambda x: x.view(-1, 13),
    "flatten": lambda x: x.flatten(0, 1),
    "reshape": lambda x: torch.reshape(x, (10, 13)),
}
COMPUTED: dict[str, Any] = {
    "add": lambda x: x + 1,
    "columns": lambda x: x[..., :4],
    "one column": lambda x: x[:, :, 2],
    "newaxis": lambda x: x[:, :, None],
    "all flat": lambda x: x.view(-1),
    "transposed": lambda x: x.transpose(1, 2),
    "softmax": lambda x: torch.softmax(x, -1),
    "list": lambda x: torch.stack([x, x]),
    "detached": lambda x: x.detach(),
}


@pytest.mark.parametrize("name", [*CARRIED, *COMPUTED])
def test_deferred_logits_are_the_logits_whatever_is_done_to_them(name: str) -> None:
    deferred, real = logits()
    does = CARRIED.get(name) or COMPUTED[name]
    found, expected = does(deferred), does(real)
    assert isinstance(found, DeferredLogits) == (name in CARRIED)
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    torch.testing.assert_close(found + 0, expected)


def test_autocast_may_end_before_the_loss() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 13))
    plain = nn.Linear(8, 13)
    plain.load_state_dict(
        {name.removeprefix("0."): value for name, value in model.state_dict().items()}
    )
    inf.tile_loss(model, tiles=3, head="0")
    x, target = torch.randn(5, 8), torch.randint(0, 13, (5,))
    with torch.autocast("cpu", torch.bfloat16):
        deferred, real = model(x), plain(x)
    assert deferred.dtype == torch.bfloat16
    loss = functional.cross_entropy(deferred.float(), target)
    torch.testing.assert_close(
        loss, functional.cross_entropy(real.float(), target), rtol=1e-2, atol=0
    )
    loss.backward()
    assert all(parameter.grad.dtype == torch.float32 for parameter in model.parameters())  # type: ignore[union-attr]
    torch.testing.assert_close(deferred + 0, real)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"reduction": "sum", "label_smoothing": 0.2, "ignore_index": 3},
        {"weight": torch.rand(13)},
    ],
)
def test_cross_entropy_of_deferred_logits_is_torchs(options: dict[str, Any]) -> None:
    deferred, real = logits()
    target = torch.randint(0, 13, (10,))
    ours = functional.cross_entropy(deferred.view(-1, 13), target, **options)
    torch.testing.assert_close(ours, functional.cross_entropy(real.view(-1, 13), target, **options))
    by_class = nn.CrossEntropyLoss(**options)(deferred.flatten(0, 1), target)
    torch.testing.assert_close(by_class, ours)
    deep = functional.cross_entropy(deferred.transpose(1, 2), target.view(2, 5), **options)
    torch.testing.assert_close(deep, ours)


# -- on Triton -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_triton_a_model_in_tiles_trains_as_on_torch(
    dtype: torch.dtype, device: torch.device
) -> None:
    torch.manual_seed(0)
    body = TiledLinear(40, 48, dtype=dtype, device=device, tiles=(2, 2))
    head = TiledLinear(48, 70, bias=False, dtype=dtype, device=device, tiles=3)
    x = torch.randn(2, 9, 40, dtype=dtype, device=device, requires_grad=True)
    target = torch.randint(0, 70, (2, 9), device=device)
    target[0, :2] = -100
    leaves = [x, *body.parameters(), *head.parameters()]
    found = {}
    for kind in choice.IMPLEMENTATIONS:
        with choice.forced(tile_matmul=kind, linear_cross_entropy=kind):
            loss = LinearCrossEntropy(head, label_smoothing=0.1)(torch.tanh(body(x)), target)
            found[kind] = [loss.detach(), *torch.autograd.grad(loss, leaves)]
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    for mine, other in zip(found["triton"], found["torch"], strict=True):
        torch.testing.assert_close(
            mine, other, rtol=tolerance, atol=tolerance * float(other.abs().max())
        )
