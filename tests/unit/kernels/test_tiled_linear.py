"""TiledLinear, TiledEmbedding and `tile_linears` without an engine: torch's numbers, one weight in
state dicts, clear refusals."""

from __future__ import annotations

import copy
import io
import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import infinity as inf
from infinity._src.kernels.tiling.tiled_module import Grid, TiledModule, copy_tiles, whole_name
from infinity.errors import ParameterReleased, SecondOrderUnsupported
from infinity.ops import TiledEmbedding, TiledLinear
from tests import forks, models

GRIDS = [1, 3, (1, 2), (3, 2), (5, 4)]
EXACT = [torch.float32, torch.bfloat16, torch.float16]


def grad_of(tiled: TiledModule) -> torch.Tensor:
    """The gradient of the whole weight."""
    whole = torch.full(tiled.grid.whole_shape, float("nan"), dtype=tiled.weight.dtype)
    for tile, _, _ in tiled.tiles():
        assert tile.weight.grad is not None
        tile.places["weight"].of(whole).copy_(tile.weight.grad)
    return whole


def run(module: nn.Module, x: torch.Tensor, dy: torch.Tensor) -> list[torch.Tensor]:
    """Output and gradients of x, weight and bias."""
    module.zero_grad()
    x = x.detach().requires_grad_()
    y = module(x)
    y.backward(dy)
    weight: Any = module.weight
    found = [
        y.detach(),
        x.grad,
        grad_of(module) if isinstance(module, TiledModule) else weight.grad,
    ]
    bias: Any = getattr(module, "bias", None)
    return found + ([bias.grad.clone()] if bias is not None else [])


@given(
    rows=st.integers(0, 9),
    features=st.tuples(st.integers(5, 40), st.integers(5, 40)),
    tiles=st.sampled_from(GRIDS),
    bias=st.booleans(),
    layout=st.sampled_from(["dense", "transposed", "sliced", "3-d"]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=25, deadline=None)
def test_values_and_gradients_are_those_of_torchs_linear(
    rows: int, features: tuple[int, int], tiles: Any, bias: bool, layout: str, seed: int
) -> None:
    torch.manual_seed(seed)
    linear = nn.Linear(*features, bias=bias, dtype=torch.float64)
    tiled = TiledLinear.from_linear(linear, tiles)
    shape = (rows, features[0])
    x = {
        "dense": lambda: torch.randn(shape, dtype=torch.float64),
        "transposed": lambda: torch.randn(shape[::-1], dtype=torch.float64).t(),
        "sliced": lambda: torch.randn(rows, 2 * features[0], dtype=torch.float64)[:, ::2],
        "3-d": lambda: torch.randn(2, *shape, dtype=torch.float64),
    }[layout]()
    dy = torch.randn(*x.shape[:-1], features[1], dtype=torch.float64)
    for ours, theirs in zip(run(tiled, x, dy), run(linear, x, dy), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", EXACT)
@pytest.mark.parametrize("tiles", GRIDS)
def test_where_sums_are_exact_the_bits_are_torchs(dtype: torch.dtype, tiles: Any) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(24, 20, dtype=dtype)
    x, dy = torch.randint(-3, 4, (2, 7, 24)).to(dtype), torch.randint(-2, 3, (2, 7, 20)).to(dtype)
    with torch.no_grad():
        for parameter in linear.parameters():
            parameter.copy_(torch.randint(-2, 3, parameter.shape))
    tiled = TiledLinear.from_linear(linear, tiles)
    for ours, theirs in zip(run(tiled, x, dy), run(linear, x, dy), strict=True):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_over_tiles_are_rounded_once(dtype: torch.dtype) -> None:
    # Every tile's sum and every total is a whole number that fp32 holds and the output's dtype does
    # not.
    torch.manual_seed(0)
    linear = nn.Linear(4096, 4096, dtype=dtype, bias=False)
    with torch.no_grad():
        linear.weight.copy_(torch.randint(-1, 3, linear.weight.shape))
    tiled = TiledLinear.from_linear(linear, (4, 4))
    x, dy = (torch.randint(0, 9, (3, 4096)).to(dtype) for _ in range(2))
    y, dx, _ = run(tiled, x, dy)
    weight = linear.weight.detach().double()
    assert torch.equal(y, (x.double() @ weight.t()).to(dtype))
    assert torch.equal(dx, (dy.double() @ weight).to(dtype))
    halves = (x[:, :2048].double() @ weight[:, :2048].t()).to(dtype) + (
        x[:, 2048:].double() @ weight[:, 2048:].t()
    ).to(dtype)
    assert not torch.equal(y, halves)


def test_only_what_is_wanted_gets_a_gradient() -> None:
    linear = nn.Linear(8, 8)
    tiled = TiledLinear.from_linear(linear, 2)
    tiled(torch.randn(3, 8)).sum().backward()
    assert all(parameter.grad is not None for parameter in tiled.parameters())
    frozen = TiledLinear.from_linear(nn.Linear(8, 8).requires_grad_(False), (2, 2))
    assert not frozen(torch.randn(3, 8)).requires_grad
    x = torch.randn(3, 8, requires_grad=True)
    frozen(x).sum().backward()
    assert x.grad is not None
    assert all(parameter.grad is None for parameter in frozen.parameters())
    with torch.no_grad():
        assert not tiled(x).requires_grad
    with torch.inference_mode():
        torch.testing.assert_close(tiled(x), linear(x))


def test_outputs_may_be_modified_and_graphs_run_twice() -> None:
    linear = nn.Linear(8, 6, dtype=torch.float64)
    tiled = TiledLinear.from_linear(linear, (2, 2))
    x = torch.randn(3, 8, dtype=torch.float64)
    for module in (linear, tiled):
        module.zero_grad()
        out = module(x)
        out += 1
        out = nn.functional.relu(out, inplace=True)
        loss = (out * out).sum()
        loss.backward(retain_graph=True)
        loss.backward()
    torch.testing.assert_close(grad_of(tiled), linear.weight.grad)


def test_what_torch_refuses_is_refused() -> None:
    tiled = TiledLinear(8, 6, tiles=2)
    with pytest.raises(RuntimeError, match=r"of torch.float32 was given torch.bfloat16"):
        tiled(torch.randn(3, 8, dtype=torch.bfloat16))
    with pytest.raises(RuntimeError, match=r"8 input features was given an input \(3, 7\)"):
        tiled(torch.randn(3, 7))
    x = torch.randn(3, 8, requires_grad=True)
    with pytest.raises(SecondOrderUnsupported, match="create_graph=True through a tiled module"):
        torch.autograd.grad(tiled(x).sum(), x, create_graph=True)
    y = tiled(x)
    with torch.no_grad():
        tiled.tile_parameters()[0].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("tiles", [2, (2, 2)])
def test_autocast_computes_in_its_dtype_as_torchs_linear(tiles: Any) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(16, 12)
    tiled = TiledLinear.from_linear(linear, tiles)
    x, dy = torch.randn(5, 16), torch.randn(5, 12).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = run(tiled, x, dy), run(linear, x, dy)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.dtype == other.dtype
        torch.testing.assert_close(mine, other, rtol=0.02, atol=0.02)


# -- state dicts -----------------------------------------------------------------------------------


@pytest.mark.parametrize("tiles", GRIDS)
def test_a_state_dict_is_that_of_the_untiled_module(tiles: Any) -> None:
    plain = nn.Sequential(nn.Linear(24, 20), nn.Linear(20, 8, bias=False))
    tiled = nn.Sequential(
        *(TiledLinear.from_linear(linear, tiles) for linear in copy.deepcopy(plain))
    )  # type: ignore[arg-type]
    mine, theirs = tiled.state_dict(), plain.state_dict()
    assert list(mine) == list(theirs)
    assert all(torch.equal(mine[name], value) for name, value in theirs.items())
    fresh = nn.Sequential(
        TiledLinear(24, 20, tiles=tiles), TiledLinear(20, 8, bias=False, tiles=tiles)
    )
    assert not torch.equal(fresh.state_dict()["0.weight"], theirs["0.weight"])
    assert str(fresh.load_state_dict(theirs)) == "<All keys matched successfully>"
    assert all(torch.equal(value, theirs[name]) for name, value in fresh.state_dict().items())
    assert str(plain.load_state_dict(mine)) == "<All keys matched successfully>"
    again = copy.deepcopy(fresh)
    again.load_state_dict({name: value + 1 for name, value in theirs.items()}, assign=True)
    assert torch.equal(again.state_dict()["1.weight"], theirs["1.weight"] + 1)
    assert torch.equal(fresh.state_dict()["1.weight"], theirs["1.weight"])
    buffer = io.BytesIO()
    torch.save(fresh, buffer)
    buffer.seek(0)
    assert (
        torch.equal(
            torch.load(buffer, weights_only=False)(torch.ones(1, 24)), plain(torch.ones(1, 24))
        )
        or tiles != 1
    )


def test_what_does_not_fit_is_named_as_torch_names_it() -> None:
    tiled = nn.Sequential(TiledLinear(8, 6, tiles=(2, 2)), TiledLinear(6, 4, tiles=2))
    right = tiled.state_dict()
    with pytest.raises(RuntimeError) as caught:
        tiled.load_state_dict({**right, "0.weight": torch.zeros(5, 8), "other": torch.zeros(1)})
    assert "size mismatch for 0.weight" in str(caught.value)
    assert "Missing" not in str(caught.value)
    assert '"other"' in str(caught.value)
    result = tiled.load_state_dict(
        {"0.bias": right["0.bias"], "1.weight": right["1.weight"]}, strict=False
    )
    assert result.missing_keys == ["0.weight", "1.bias"]
    by_tile = {name: parameter.detach() + 1 for name, parameter in tiled.named_parameters()}
    # under the tiles' own names, as optimizers and keep_vars=True have them
    tiled.load_state_dict(by_tile)
    assert torch.equal(tiled.state_dict()["1.weight"], right["1.weight"] + 1)
    assert set(tiled.state_dict(keep_vars=True)) == set(by_tile)


def test_the_weight_answers_what_it_is_and_refuses_its_values() -> None:
    tiled = TiledLinear(8, 6, tiles=2, dtype=torch.bfloat16)
    assert tuple(tiled.weight.shape) == (6, 8)
    assert tiled.weight.dtype == torch.bfloat16
    assert tiled.weight.requires_grad
    with pytest.raises(ParameterReleased, match="exists as tiles only"):
        tiled.weight + 1
    with pytest.raises(ValueError, match=r"before inf.tile_linears"):
        tiled.weight = nn.Parameter(torch.zeros(6, 8))  # type: ignore[misc, assignment]


@given(size=st.integers(1, 5000), count=st.integers(1, 40))
def test_tiles_cover_a_weight_evenly(size: int, count: int) -> None:
    if count > size:
        with pytest.raises(ValueError, match="use"):
            Grid.of(size, 3, count)
        return
    ends = Grid.of(size, 3, count).row_ends
    sizes = [last - first for first, last in itertools.pairwise(ends)]
    assert ends[0] == 0
    assert ends[-1] == size
    assert len(sizes) == count
    assert min(sizes) > 0
    assert max(sizes) - min(sizes) <= (64 if size % 64 == 0 else 1)


# -- tile_linears ----------------------------------------------------------------------------------


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.ModuleDict(
        {
            "up": nn.Linear(8, 16),
            "down": nn.Linear(16, 8),
            "small": nn.Linear(8, 2),
            "norm": nn.LayerNorm(8),
        }
    )


def tiled_names(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, TiledModule)]


def test_names_choose_and_the_default_is_every_linear_that_can() -> None:
    assert tiled_names(inf.tile_linears(net(), tiles=4)) == ["up", "down"]
    assert tiled_names(inf.tile_linears(net(), tiles=(2, 2))) == ["up", "down", "small"]
    assert tiled_names(inf.tile_linears(net(), tiles=2, names="small")) == ["small"]
    llama = inf.tile_linears(models.llama(layers=2), tiles=2, names=["mlp.down_proj", "lm_head"])
    assert tiled_names(llama) == [
        "model.layers.0.mlp.down_proj",
        "model.layers.1.mlp.down_proj",
        "lm_head",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tiles": 0}, "tiles=0 is not a positive whole number"),
        ({"tiles": (2, 2, 2)}, "not a positive whole number, or a pair"),
        ({"tiles": 4, "names": "small"}, "4 tiles of 2 output features; use 2 at most"),
        ({"tiles": 2, "names": "gone"}, "names='gone': the model has no such module"),
        ({"tiles": 2, "names": ["norm"]}, "norm is a LayerNorm"),
    ],
)
def test_mistakes_are_named_and_change_nothing(arguments: dict[str, Any], message: str) -> None:
    model = net()
    with pytest.raises(ValueError, match=message):
        inf.tile_linears(model, **arguments)
    assert tiled_names(model) == []


def test_what_tiling_would_lose_is_refused() -> None:
    model = net()
    model["up"].weight.grad = torch.zeros(16, 8)  # type: ignore[index]
    with pytest.raises(ValueError, match=r"up.weight has a gradient.*zero_grad"):
        inf.tile_linears(model, tiles=2)
    model = net()
    model["up"].register_forward_hook(lambda *_: None)  # type: ignore[index]
    with pytest.raises(ValueError, match=r"up has _forward_hooks"):
        inf.tile_linears(model, tiles=2)
    with pytest.raises(ValueError, match=r"use inf.ops.TiledLinear"):
        inf.tile_linears(nn.Linear(4, 4), tiles=2)
    shared = models.External()
    linear = nn.Linear(32, models.VOCAB, bias=False)
    linear.weight = shared.embed.weight
    shared.head = linear
    shared.odd = nn.ParameterList([shared.embed.weight])
    with pytest.raises(
        ValueError, match=r"head.weight is shared with odd.0, which is in a ParameterList"
    ):
        inf.tile_linears(shared, tiles=2, names="head")


def test_a_model_on_the_meta_device_is_tiled_there() -> None:
    with torch.device("meta"):
        model = inf.tile_linears(models.llama(), tiles=(2, 2))
    assert all(parameter.is_meta for parameter in model.parameters())
    assert model.state_dict()["lm_head.weight"].shape == (models.VOCAB, 32)


@pytest.mark.parametrize("tiles", [3, (1, 2), (3, 2)])
def test_tied_weights_stay_tied(tiles: Any) -> None:
    plain = models.make(models.gpt2, dtype=torch.float64)
    tiled = inf.tile_linears(
        models.make(models.gpt2, dtype=torch.float64), tiles=tiles, names="lm_head"
    )
    assert tiled_names(tiled) == ["transformer.wte", "lm_head"]
    mine, theirs = tiled.state_dict(), plain.state_dict()
    assert list(mine) == list(theirs)
    assert mine["lm_head.weight"] is mine["transformer.wte.weight"]
    (batch,) = models.token_batches(1)
    for model in (plain, tiled):
        models.loss_of(model, batch).backward()
    grad = plain.get_parameter("transformer.wte.weight").grad
    torch.testing.assert_close(grad_of(tiled.get_submodule("transformer.wte")), grad)  # type: ignore[arg-type]
    for (name, mine_), (_, other) in zip(
        tiled.named_parameters(), tiled.named_parameters(), strict=True
    ):
        assert mine_ is other, name
    assert sum(p.numel() for p in tiled.parameters()) == sum(p.numel() for p in plain.parameters())


@given(
    count=st.integers(1, 30),
    width=st.integers(2, 9),
    tiles=st.sampled_from([1, 2, (1, 2), (3, 2)]),
    padding=st.booleans(),
    seed=st.integers(0, 1000),
)
@settings(max_examples=40, deadline=None)
def test_an_embedding_in_tiles_is_torchs_bit_for_bit(
    count: int, width: int, tiles: Any, padding: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    rows = 5
    plain = nn.Embedding(rows, width, padding_idx=2 if padding else None)
    grid = Grid.of(rows, width, tiles)
    tiled = TiledEmbedding(copy_tiles(plain.weight, grid), grid, plain.padding_idx)
    indices, dy = torch.randint(0, rows, (count,)), torch.randn(count, width)
    outputs = [module(indices) for module in (plain, tiled)]
    for out in outputs:
        out.backward(dy)
    assert torch.equal(*outputs)
    torch.testing.assert_close(grad_of(tiled), plain.weight.grad, rtol=0, atol=0)
    with pytest.raises(IndexError, match="5 rows"):
        tiled(torch.tensor([5]))


def test_names_of_tiles_are_told_from_others() -> None:
    assert whole_name("model.lm_head.tile_3_0.weight") == "model.lm_head.weight"
    assert whole_name("tile_0_12.weight") == "weight"
    for other in ("lm_head.weight", "a.tile_1.weight", "a.tile_0_0.bias", "mytile_0_0.weight"):
        assert whole_name(other) is None


def test_a_tiled_weight_freezes_its_tiles_and_refuses_what_needs_values_or_storage() -> None:
    """`share_memory_` and `untyped_storage` crashed the interpreter; a frozen weight was still
    trained."""
    made = TiledLinear(8, 6, tiles=(3, 2))
    assert made.weight.grad is None
    made(torch.ones(2, 8)).sum().backward()
    for use in (
        lambda weight: weight.grad,
        lambda weight: weight.data_ptr(),
        lambda weight: weight.untyped_storage(),
        lambda weight: weight.share_memory_(),
        lambda weight: weight.sum(),
        lambda weight: torch.nn.init.normal_(weight),
        lambda weight: setattr(weight, "grad", torch.ones(6, 8)),
        lambda weight: setattr(weight, "data", torch.ones(6, 8)),
    ):
        with pytest.raises(ParameterReleased, match="of the weight of a tiled module"):
            use(made.weight)
    made.weight.requires_grad_(False)
    assert not any(tile.requires_grad for tile in made.tile_parameters())
    made.weight.requires_grad = True
    assert all(tile.requires_grad for tile in made.tile_parameters())
    assert made.weight.requires_grad


def test_the_operations_are_reached_from_the_package() -> None:
    code = "import infinity as inf; assert inf.ops.TiledLinear.__name__ == 'TiledLinear'"
    done = forks.run_code(code)
    assert done.returncode == 0, done.stderr


def test_an_embedding_in_tiles_refuses_indices_that_torchs_refuses() -> None:
    model = nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 20, bias=False))
    model[1].weight = model[0].weight
    inf.tile_linears(model, tiles=3)
    for indices in (torch.tensor([1.5]), torch.tensor([True])):
        with pytest.raises(RuntimeError, match="give int32 or int64"):
            model[0](indices)


@pytest.mark.parametrize("tiles", [0, -1, True, (2, 2), 2.0])
def test_a_wrong_number_of_tiles_for_the_loss_leaves_the_model_as_it_was(tiles: Any) -> None:
    model = nn.Sequential(nn.Linear(8, 20))
    with pytest.raises(ValueError, match="is not a positive whole number"):
        inf.tile_loss(model, tiles=tiles, head="0")
    assert type(model[0]) is nn.Linear
