"""Stacks of experts in tiles: the bits of the uncut model wherever states rest, memory by the tile,
no gather of experts that no token chose, whole stacks in every file, and refusals with reasons."""

from __future__ import annotations

import functools
import itertools
import re
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn
from torch.utils.checkpoint import checkpoint

import infinity as inf
from infinity._src.checkpoint.formats.safetensors_writer import ExportJob
from infinity._src.checkpoint.manifest import FlatEntry, ParamEntry
from infinity._src.checkpoint.reader import Checkpoint, SavedParam, weights_by_name
from infinity._src.kernels.tiling import tiled_experts
from infinity._src.kernels.tiling.tiled_experts import TiledExperts, route
from infinity._src.kernels.tiling.tiled_module import TilePlace
from infinity._src.memory.constants import AHEAD, UNITS_AHEAD
from infinity._src.memory.device_capacity import Passes
from infinity._src.params import deferred_init
from infinity._src.params.deferred_init import DeferredModel
from infinity._src.params.discover import build, check_gatherable, find_units
from infinity._src.params.materialize import FlatValues, open_source
from infinity._src.params.unit import Unit
from infinity.aio import Fault, Seam
from infinity.errors import AioError
from tests import harness, models
from tests.harness import Training, policy
from tests.marks import mostly_slow

RAM = "64MiB"


def eager(make: Callable[[], nn.Module]) -> nn.Module:
    model: Any = make()
    model.set_experts_implementation("eager")
    return model


def tiled(make: Callable[[], nn.Module], experts: int) -> nn.Module:
    return inf.tile_experts(eager(make), experts=experts)


FAMILIES = {
    "mixtral": models.mixtral,
    "qwen2_moe": models.qwen2_moe,
    "qwen3_moe": models.qwen3_moe,
    "deepseek_v3": models.deepseek_v3,
    "gpt_oss": models.gpt_oss,
}


# -- the same bits ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("family", mostly_slow(FAMILIES, "qwen2_moe"))
def test_every_family_has_the_bits_of_the_uncut_plain_loop(
    family: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """Without clipping, whose norm is summed tile by tile. test_matrix.py has tiles with each
    policy."""
    make = FAMILIES[family]
    cut, uncut = (
        Training(factory, max_norm=None, rows=1, dtype=dtype)
        for factory in (functools.partial(tiled, make, 3), functools.partial(eager, make))
    )
    harness.assert_same(harness.reference(cut), harness.reference(uncut))
    harness.assert_same(harness.offloaded(cut, policy(tmp_path)), harness.reference(uncut))


class Experts(nn.Module):
    """Fused experts with their forward as transformers has it. sum_dtype: of the sum over experts;
    None: that of the hidden states."""

    sum_dtype: torch.dtype | None = None

    def __init__(self, experts: int, hidden: int, inner: int) -> None:
        super().__init__()
        self.num_experts = experts
        self.gate_up_proj = nn.Parameter(torch.randn(experts, 2 * inner, hidden) / hidden**0.5)
        self.down_proj = nn.Parameter(torch.randn(experts, hidden, inner) / inner**0.5)
        self.act_fn = nn.SiLU()

    def forward(
        self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        out = torch.zeros_like(hidden, dtype=self.sum_dtype)
        mask = nn.functional.one_hot(index, num_classes=self.num_experts + 1).permute(2, 1, 0)
        for (expert,) in torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero().tolist():
            if expert == self.num_experts:
                continue
            places, tokens = torch.where(mask[expert])
            gate, up = nn.functional.linear(hidden[tokens], self.gate_up_proj[expert]).chunk(2, -1)
            state = self.down(self.act_fn(gate) * up, expert) * weights[tokens, places, None]
            out.index_add_(0, tokens, state.to(out.dtype))
        return out.to(hidden.dtype)

    def down(self, state: torch.Tensor, expert: int) -> torch.Tensor:
        return nn.functional.linear(state, self.down_proj[expert])


class Net(nn.Module):
    """One layer that routes tokens as the test says. A later part reads its hidden states again,
    like a shared expert, so that gradients are added there."""

    def __init__(self, experts: int = 12, hidden: int = 16, inner: int = 24) -> None:
        super().__init__()
        self.first, self.router = nn.Linear(6, hidden), nn.Linear(hidden, experts)
        self.experts = Experts(experts, hidden, inner)
        self.last = nn.Linear(hidden, 4)

    def forward(self, x: torch.Tensor, index: torch.Tensor, how: str = "plain") -> torch.Tensor:
        def body(x: torch.Tensor) -> torch.Tensor:
            hidden = torch.tanh(self.first(x))
            weights = self.router(hidden).softmax(-1, dtype=torch.float32)
            weights = weights.gather(1, index.clamp(max=weights.shape[1] - 1))
            return self.experts(hidden, index, weights) + torch.sin(hidden)

        out = body(x) if how == "plain" else checkpoint(body, x, use_reentrant=how == "reentrant")
        found: torch.Tensor = self.last(out).float().square().mean()
        return found


def test_an_idle_tile_asks_for_what_it_saved_without_asserts_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A checkpoint recomputes when backward unpacks a saved tensor. The code is compiled as with
    python -O."""
    path, name = Path(tiled_experts.__file__), "tiled_experts_without_asserts"
    module: Any = types.ModuleType(name)
    # dataclasses look up the names of field types there.
    monkeypatch.setitem(sys.modules, name, module)
    exec(compile(path.read_text(encoding="utf-8"), path, "exec", optimize=1), vars(module))
    asked: list[torch.Tensor] = []

    def unpack(saved: torch.Tensor) -> torch.Tensor:
        asked.append(saved)
        return saved

    hidden, weights, parameter = (torch.ones(3, requires_grad=True) for _ in range(3))
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, unpack):
        given = (torch.zeros(3), hidden, weights, torch.ones(1), parameter)
        total = module._Untouched.apply(*given)
    assert not asked
    total.sum().backward()
    assert len(asked) == 1
    assert parameter.grad is not None
    assert not parameter.grad.any()


def whole_grads(model: nn.Module, grad_of: Callable[[nn.Parameter], Any]) -> dict[str, Any]:
    """Gradients by names of the uncut model."""
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        if isinstance(module, TiledExperts):
            for weight in module.whole_shapes:
                parts = [grad_of(part) for part in module.tile_parameters(weight)]
                none = [part is None for part in parts]
                assert all(none) or not any(none)
                found[f"{name}.{weight}"] = None if all(none) else torch.cat(parts)
    for name, parameter in model.named_parameters():
        if ".tile_" not in name:
            found[name] = grad_of(parameter)
    return found


@given(
    experts=st.integers(1, 7),
    tile=st.integers(1, 8),
    tokens=st.integers(0, 9),
    picks=st.integers(1, 3),
    how=st.sampled_from(["plain", "reentrant", "other"]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    elsewhere=st.booleans(),
    frozen=st.sampled_from([(), ("gate_up_proj",), ("gate_up_proj", "down_proj")]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=15, deadline=None)
def test_any_routing_over_any_tiles_has_the_gradients_of_the_uncut_experts(
    experts: int,
    tile: int,
    tokens: int,
    picks: int,
    how: str,
    dtype: torch.dtype,
    elsewhere: bool,
    frozen: tuple[str, ...],
    seed: int,
) -> None:
    results = []
    for cut, offloaded in ((False, False), (True, False), (True, True)):
        torch.manual_seed(seed)
        net = Net(experts).to(dtype)
        for name in frozen:
            getattr(net.experts, name).requires_grad_(False)
        # An index equal to the number of experts stands for an expert on another rank.
        index = torch.rand(tokens, experts + elsewhere).argsort(1)[:, :picks]
        x = torch.randn(tokens, 6, dtype=dtype, requires_grad=how == "reentrant")
        if cut:
            inf.tile_experts(net, experts=tile)
        if offloaded:
            inf.offload(net, inf.Policy(params="cpu", optim="cpu", ram=RAM))
        loss = net(x, index, how)
        loss.backward()
        grad_of = inf.handle(net).full_grad if offloaded else (lambda one: one.grad)
        grads = whole_grads(net, grad_of)
        if offloaded:
            assert sum(unit.refs for unit in inf.handle(net).units) == 0
            inf.handle(net).close()
        results.append((loss.detach(), grads))
    for loss, grads in results[1:]:
        assert torch.equal(loss, results[0][0]) or loss.isnan()
        assert grads.keys() == results[0][1].keys()
        for name, expected in results[0][1].items():
            found = grads[name]
            assert (found is None) == (expected is None), name
            if expected is not None:
                assert torch.equal(found.float(), expected.float()) or loss.isnan(), name


# -- what is gathered ------------------------------------------------------------------------------


def demands_of(handle: Any) -> list[str]:
    """Names of the units that are demanded from now on."""
    found: list[str] = []
    plain = handle.unsharder.unshard

    def demand(unit: Unit) -> None:
        plain(unit)
        found.append(unit.name)

    handle.unsharder.unshard = demand
    return found


@pytest.mark.parametrize("update", ["deferred", "backward"])
def test_experts_that_no_token_chose_are_not_gathered_and_are_updated_all_the_same(
    update: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    net = Net()
    plain = Net()
    plain.load_state_dict(net.state_dict())
    inf.tile_experts(net, experts=2)
    chosen = policy(tmp_path, update=update)
    inf.offload(net, chosen)
    handle = inf.handle(net)
    opt = inf.AdamW(net.parameters(), lr=1e-2, weight_decay=0.5)
    theirs = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.5)
    demands = demands_of(handle)
    for routed in ([0, 1, 5], [5, 11], [4, 5, 11]):
        demands.clear()
        index = torch.tensor(routed).repeat(4, 1)
        x = torch.randn(4, 6)
        for model, optimizer in ((net, opt), (plain, theirs)):
            model(x, index).backward()
            optimizer.step()
            optimizer.zero_grad()
        used = {f"experts.tile_{expert // 2}_0" for expert in routed}
        assert {name for name in demands if "tile" in name} == used
        # Once in forward, and once in backward.
        assert all(demands.count(name) == 2 for name in used)
    ours, expected = net.state_dict(), plain.state_dict()
    assert list(ours) == list(expected)
    for name, value in expected.items():
        torch.testing.assert_close(ours[name], value)
    # Experts 6 to 9 had no token, and have decayed.
    assert torch.equal(ours["experts.down_proj"][6:10], expected["experts.down_proj"][6:10])
    steps = {opt.state[parameter]["step"] for parameter in net.parameters()}
    assert steps == {3}
    handle.close()


def peaks(tile: int | None, directory: Path, update: str) -> tuple[int, int, int]:
    """(bytes of the stacks, most bytes gathered at once, most bytes of fresh gradients)."""
    torch.manual_seed(0)
    net = Net(32, 32, 64)
    if tile is not None:
        inf.tile_experts(net, experts=tile)
    stacks_bytes = 32 * 3 * 64 * 32 * 4
    inf.offload(net, policy(directory, update=update))
    handle = inf.handle(net)
    opt = inf.AdamW(net.parameters(), lr=1e-3)
    for step in range(3):
        index = torch.rand(16, 32).argsort(1)[:, : 2 + step]
        net(torch.randn(16, 6), index).backward()
        opt.step()
        opt.zero_grad()
    fresh = handle.stats().fresh_grad_bytes_peak
    peak = handle.unsharder.gathered_bytes_peak
    handle.close()
    return stacks_bytes, peak, fresh


@pytest.mark.parametrize("update", mostly_slow(["deferred", "backward"], "backward"))
def test_what_is_gathered_at_once_is_bounded_by_the_tile(update: str, tmp_path: Path) -> None:
    size, whole, _ = peaks(None, tmp_path, update)
    assert whole >= size
    for tile in (8, 4, 1):
        _, gathered, fresh = peaks(tile, tmp_path, update)
        tile_bytes, rest = size * tile // 32, 1 << 14
        print(f"tiles of {tile}: {gathered >> 10} KiB gathered, {fresh >> 10} KiB of gradients")
        # An update in backward writes into the gathered tile, which stays until then.
        waiting = UNITS_AHEAD if update == "backward" else 0
        assert gathered <= (AHEAD + 1 + waiting) * tile_bytes + rest
        assert fresh <= (1 + waiting) * tile_bytes + rest


def test_backward_holds_one_tile_at_a_time(tmp_path: Path) -> None:
    net = inf.tile_experts(Net(), experts=2)
    inf.offload(net, inf.Policy(params="cpu", optim="cpu", ram=RAM))
    handle = inf.handle(net)
    held: list[int] = []
    plain = handle.unsharder.unshard

    def demand(unit: Unit) -> None:
        plain(unit)
        held.append(sum(one.refs > 0 for one in handle.units if "tile" in one.name))

    handle.unsharder.unshard = demand  # type: ignore[method-assign]
    net(torch.randn(9, 6), torch.rand(9, 12).argsort(1)[:, :4]).backward()
    assert len(held) >= 12
    assert max(held) == 0  # while one is being gathered, no other is held
    assert sum(unit.refs for unit in handle.units) == 0
    handle.close()


# -- what goes out and comes in --------------------------------------------------------------------


def load_all(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors of an export."""
    return {
        name: value
        for file in sorted(directory.glob("*.safetensors"))
        for name, value in load_file(file).items()
    }


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert list(found) == list(expected)
    harness.assert_same(dict(found), dict(expected))


def start(model: nn.Module, load: Any = None) -> tuple[nn.Module, Any]:
    """Offloaded, with an optimizer."""
    inf.offload(model, inf.Policy(params="cpu", optim="cpu", ram=RAM), load=load)
    return model, inf.AdamW(model.parameters(), lr=1e-2)


def step(model: nn.Module, opt: Any) -> float:
    (batch,) = models.token_batches(1)
    loss = models.loss_of(model, batch)
    loss.backward()
    opt.step()
    opt.zero_grad()
    return loss.item()


def fresh(seed: int, *, cut: bool = True) -> nn.Module:
    make = models.qwen2_moe
    return models.make(lambda: tiled(make, 3) if cut else eager(make), seed=seed)


def test_files_hold_whole_stacks_and_fit_both_kinds_of_model(tmp_path: Path) -> None:
    plain = fresh(0, cut=False)
    values = {name: value.clone() for name, value in plain.state_dict().items()}
    with torch.device("meta"):
        meta = fresh(1)
    model, opt = start(meta, load=values)
    same(model.state_dict(), values)
    losses = [step(*each) for each in [(model, opt), start(plain)]]
    assert losses[0] == losses[1]
    state = model.state_dict()
    same(plain.state_dict(), state)

    inf.export_safetensors(model, tmp_path / "out", shard_bytes_max=20_000, names="modules")
    exported = load_all(tmp_path / "out")
    assert set(exported) == {name for name, _ in fresh(0, cut=False).named_parameters()}
    assert all(torch.equal(state[name], value) for name, value in exported.items())
    inf.save(model, opt, tmp_path / "save").wait()
    with Checkpoint.open(tmp_path / "save") as saved:
        ExportJob(saved).export(tmp_path / "again", shard_bytes_max=20_000)
    again = load_all(tmp_path / "again")
    assert again.keys() == exported.keys()
    assert all(torch.equal(again[name], value) for name, value in exported.items())
    inf.export_dcp(model, opt, tmp_path / "dcp")

    others = [start(fresh(seed, cut=seed != 5)) for seed in (2, 3, 4, 5)]
    inf.restore(*others[0], tmp_path / "save")
    for other in (others[1], others[3]):
        assert inf.load_dcp(*other, tmp_path / "dcp") == ((), ())
    assert inf.load_safetensors(others[2][0], tmp_path / "out") == ((), ())
    for other, _ in others:
        same(other.state_dict(), state)
    losses = [step(*each) for each in [(model, opt), *others]]
    assert losses == losses[:1] * 5
    after = model.state_dict()
    for other, _ in (others[0], others[1], others[3]):
        same(other.state_dict(), after)
    model.load_state_dict(state)
    same(model.state_dict(), state)


class Reusing:
    """A source that reads each tensor into the same memory."""

    def __init__(self, values: dict[str, torch.Tensor]) -> None:
        self.values = values
        self.memory = torch.empty(max(value.numel() for value in values.values()))

    def names(self) -> list[str]:
        return list(self.values)

    def shape(self, name: str) -> torch.Size:
        return self.values[name].shape

    def read(self, name: str) -> torch.Tensor:
        value = self.values[name]
        return self.memory[: value.numel()].view(value.shape).copy_(value)


def test_a_source_may_read_all_tensors_into_the_same_memory() -> None:
    values = {name: value.clone() for name, value in Net().state_dict().items()}
    with torch.device("meta"):
        net = inf.tile_experts(Net(), experts=5)
    inf.offload(net, inf.Policy(params="cpu", optim="cpu", ram=RAM), load=Reusing(values))
    same(net.state_dict(), values)
    inf.handle(net).close()


def test_whole_stacks_are_in_the_memory_of_a_fill_until_their_last_tile() -> None:
    values = nn.Sequential(Net(), Net(8)).state_dict()
    with torch.device("meta"):
        net = nn.Sequential(*(inf.tile_experts(Net(*size), experts=5) for size in ((), (8,))))
    # The larger layer decides: the stacks of two layers are never in memory together.
    stacks = sum(values[f"0.experts.{name}"].nbytes for name in ("gate_up_proj", "down_proj"))
    sources: list[Any] = [Reusing(values), lambda name, out: out.copy_(values[name])]
    for load in (*sources, types.MappingProxyType(values)):
        source: Any = open_source(net, load)
        assert source.converting_bytes == stacks
        held: list[int] = []

        for unit in build(find_units(net, unit_bytes_max=1 << 29), torch.device("cpu"), 1):
            for flat in unit.flats:
                FlatValues(flat, source).fill(0, torch.empty(flat.layout.numel, dtype=flat.dtype))
                held.append(sum(whole.nbytes for whole in source._wholes.values()))
        assert max(held) == stacks
        assert not source._wholes
    # Tensors of a dict are there already.
    assert open_source(net, values).converting_bytes == 0


def test_a_checkpoint_is_restored_into_any_tiles_and_into_whole_stacks(tmp_path: Path) -> None:
    def states(model: nn.Module) -> dict[str, torch.Tensor]:
        handle, found = inf.handle(model), {}
        for state in ("master", "exp_avg", "exp_avg_sq"):

            def read(one: nn.Parameter, state: str = state) -> torch.Tensor:
                return handle.optimizer_state(one)[state]

            values = whole_grads(model, read)
            found |= {f"{name} {state}": value for name, value in values.items()}
        return found

    def made(seed: int, tile: int | None) -> tuple[nn.Module, Any]:
        torch.manual_seed(seed)
        net = Net(5)
        return start(net if tile is None else inf.tile_experts(net, experts=tile))

    def learn(model: nn.Module, opt: Any) -> float:
        torch.manual_seed(9)
        loss = model(torch.randn(9, 6), torch.rand(9, 5).argsort(1)[:, :2])
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss.item()

    first = made(0, 1)
    for _ in range(2):
        learn(*first)
    expected = states(first[0])
    given = first
    for number, tile in enumerate((None, 2, 3, 1)):
        inf.save(*given, tmp_path / f"{number}").wait()
        given = made(number + 1, tile)
        restored = inf.restore(*given, tmp_path / f"{number}")
        assert restored.step == 2
        assert any("experts.gate_up_proj" in note for note in restored.notes)
        same(given[0].state_dict(), first[0].state_dict())
        found = states(given[0])
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], value) for name, value in expected.items())
        if tile is None:
            whole = given
    losses = [[learn(*each) for _ in range(2)] for each in (first, whole, given)]
    assert losses[0] == losses[1] == losses[2]
    same(given[0].state_dict(), first[0].state_dict())
    for other, _ in (first, whole, given):
        inf.handle(other).close()


def test_tiles_that_have_no_place_in_others_are_refused_with_both_ways_out(tmp_path: Path) -> None:
    def made(tile: int, state: str = "exact") -> tuple[nn.Module, Any]:
        # A row of gate_up_proj has 96 elements: one group of 64 moments, and a half.
        net = inf.tile_experts(Net(4, 16, 3), experts=tile)
        inf.offload(net, inf.Policy(params="cpu", optim="cpu", ram=RAM, state=state))
        return net, inf.AdamW(net.parameters(), lr=1e-2)

    nets = []
    for state, tile, message in (
        ("compact", 1, "begin inside of a group of 64 moments"),
        ("exact", 2, r"tile_0_0\.down_proj and .*tile_1_0\.down_proj of .* counts of steps differ"),
    ):
        saved, opt = made(2, state)
        saved(torch.randn(9, 6), torch.rand(9, 4).argsort(1)[:, :2]).backward()
        opt.step()
        if state == "exact":
            opt.state[saved.experts.tile_parameters("down_proj")[0]]["step"] = 5
        inf.save(saved, opt, tmp_path / state).wait()
        other, its = made(4 if state == "exact" else tile, state)
        before = other.state_dict()
        with pytest.raises(ValueError, match=f"(?s){message}.*Tile the model in .*export"):
            inf.restore(other, its, tmp_path / state)
        same(other.state_dict(), before)
        nets += [saved, other]
    for net in nets:
        inf.handle(net).close()


@pytest.mark.parametrize(
    "shapes",
    [
        {"tile_0_0.weight": (4,)},
        {"tile_0_0.weight": (4, 2), "tile_1_0.weight": (4,)},
        {"tile_0_0.weight": (4, 2), "tile_0_1.weight": (3, 2)},
        {"tile_0_0.weight": (4, 2), "tile_1_0.weight": (4, 3)},
        {"tile_0_0.weight": (4, 2, 5), "tile_1_0.weight": (4, 2, 6)},
        {"tile_0_0.weight": (4, 2), "tile_1_1.weight": (4, 2)},
        {"tile_0_0.weight": (4, 2), "weight": (6, 2)},
    ],
)
def test_names_like_those_of_tiles_are_a_user_s_own_where_the_shapes_do_not_fit(
    shapes: dict[str, tuple[int, ...]],
) -> None:
    flat = FlatEntry("unit", "float32", True, 0, 2048, ())
    saved = [
        SavedParam(ParamEntry((f"x.{name}",), shape, 0), index, flat)
        for index, (name, shape) in enumerate(shapes.items())
    ]
    found = weights_by_name(saved)
    assert {name.removeprefix("x."): each.shape for name, each in found.items()} == shapes
    assert [found[each.entry.name].saved for each in saved] == [[each] for each in saved]


def test_a_user_s_modules_with_names_of_tiles_are_restored(tmp_path: Path) -> None:
    def made() -> tuple[nn.Module, Any]:
        net = nn.Sequential()
        net.add_module("tile_0_0", nn.LayerNorm(8))
        net.add_module("tile_1_0", nn.Linear(8, 4))
        return start(net)

    (model, opt), (other, its) = made(), made()
    model(torch.randn(3, 8)).sum().backward()
    opt.step()
    inf.save(model, opt, tmp_path / "kept").wait()
    assert inf.restore(other, its, tmp_path / "kept").step == 1
    same(other.state_dict(), model.state_dict())
    for each in (model, other):
        inf.handle(each).close()


@given(
    rows=st.integers(1, 12),
    row=st.integers(1, 5),
    before=st.integers(1, 13),
    after=st.integers(1, 13),
)
def test_every_element_of_a_tile_is_found_once(
    rows: int, row: int, before: int, after: int
) -> None:
    def ends(tile: int) -> list[int]:
        return [*range(0, rows, tile), rows]

    flat = FlatEntry("unit", "bfloat16", True, 0, 2048, ())
    saved = [
        SavedParam(ParamEntry((f"x.tile_{index}_0.weight",), (last - first, row), 0), index, flat)
        for index, (first, last) in enumerate(itertools.pairwise(ends(before)))
    ]
    weight = weights_by_name(saved)["x.weight"]
    assert weight.shape == (rows, row)
    for first, last in itertools.pairwise(ends(after)):
        place = TilePlace((first, last), (0, row), (rows, row))
        numel = row * (last - first)
        ranges: Any = weight.ranges_of(types.SimpleNamespace(place=place, numel=numel))
        for begin in range(numel):
            elements = [
                before * row * each.saved.flat_index + each.start + at
                for each in ranges.within(begin, numel - begin)
                for at in range(each.numel)
            ]
            assert elements == list(range(first * row + begin, last * row))


def test_a_callable_is_asked_for_each_stack_once() -> None:
    asked: list[str] = []

    def fill(name: str, out: torch.Tensor) -> None:
        asked.append(name)
        out.copy_(torch.arange(out.numel()).view(out.shape) % 251)

    found = []
    for cut in (False, True):
        asked.clear()
        with torch.device("meta"):
            model = fresh(0, cut=cut)
        start(model, fill)
        found.append((sorted(asked), model.state_dict()))
    assert found[0][0] == found[1][0]
    same(found[1][1], found[0][1])


def test_loads_name_whole_stacks_that_are_missing_or_misshapen() -> None:
    right = fresh(0).state_dict()
    name = "model.layers.1.mlp.experts.down_proj"
    missing = {key: value for key, value in right.items() if key != name}
    with torch.device("meta"):
        model = fresh(0)
    with pytest.raises(ValueError, match=rf"{name} is missing"):
        inf.offload(model, inf.Policy(ram=RAM), load=missing)
    with pytest.raises(ValueError, match=rf"{name} of shape \(8, 2\); the model wants \(8, 32, 16"):
        inf.offload(model, inf.Policy(ram=RAM), load={**right, name: torch.zeros(8, 2)})
    incompatible = fresh(0).load_state_dict(missing, strict=False)
    assert incompatible == ([name], [])
    with pytest.raises(RuntimeError, match=rf"size mismatch for {name}"):
        fresh(0).load_state_dict({**right, name: torch.zeros(8, 2)})


# -- faults and refusals ---------------------------------------------------------------------------


def test_a_tile_of_experts_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    net = inf.tile_experts(Net(), experts=2)
    values = policy(tmp_path, io_backend="threads")
    inf.offload(net, values, _seam=Seam(fault=Fault("read", 4, persistent=True)))
    with pytest.raises(AioError, match=r"experts\.tile_\d_0 cannot be gathered"):
        for _ in range(3):
            net(torch.randn(9, 6), torch.rand(9, 12).argsort(1)[:, :4]).backward()
    assert sum(unit.refs for unit in inf.handle(net).units) == 0
    inf.handle(net).close()


def test_an_error_between_tiles_leaves_all_released() -> None:
    net = inf.tile_experts(Net(), experts=2)
    inf.offload(net, inf.Policy(params="cpu", optim="cpu", ram=RAM))
    index = torch.rand(9, 12).argsort(1)[:, :4]
    broken = net.experts.get_submodule("tile_3_0").register_forward_pre_hook(
        lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)
    )
    with pytest.raises(KeyboardInterrupt):
        net(torch.randn(9, 6), index)
    broken.remove()
    net(torch.randn(9, 6), index).backward()
    assert sum(unit.refs for unit in inf.handle(net).units) == 0
    assert all(parameter.grad is not None for parameter in net.parameters())
    inf.handle(net).close()


class OtherSum(Experts):
    """Adds up in fp32."""

    sum_dtype = torch.float32


class Batched(Experts):
    """Gives each expert all tokens, as Llama 4 does."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return hidden


class Biased(Experts):
    """Has a parameter that is no stack."""

    def __init__(self) -> None:
        super().__init__(4, 8, 8)
        self.scale = nn.Parameter(torch.ones(8))


class DownBias(Experts):
    """Adds a bias, which learns or not."""

    def __init__(self, *, learns: bool) -> None:
        super().__init__(4, 8, 8)
        self.down_proj_bias = nn.Parameter(torch.zeros(4, 8))
        self.learns = learns

    def down(self, state: torch.Tensor, expert: int) -> torch.Tensor:
        bias = self.down_proj_bias if self.learns else self.down_proj_bias.detach()
        return super().down(state, expert) + bias[expert]


def holding(experts: nn.Module, change: Callable[[nn.Module], object] | None = None) -> nn.Module:
    model = nn.ModuleDict({"layer": nn.ModuleDict({"experts": experts})})
    if change is not None:
        change(experts)
    return model


def with_grad(experts: Any) -> None:
    experts.down_proj.grad = torch.zeros_like(experts.down_proj)


def small() -> Experts:
    return Experts(4, 8, 8)


def shared() -> nn.Module:
    experts = small()
    other = nn.Module()
    other.register_parameter("tied", experts.down_proj)
    return nn.ModuleDict({"experts": experts, "other": other})


REFUSED: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], str]] = {
    "no number": (lambda: holding(small()), {"experts": True}, "experts=True is not a positive"),
    "none": (lambda: holding(small()), {"experts": 0}, "experts=0 is not a positive"),
    "nothing there": (lambda: nn.Sequential(nn.Linear(2, 2)), {}, "the model has no stack of"),
    "unknown name": (lambda: holding(small()), {"names": "mlp"}, "has no such module; stacks of"),
    "another kind": (lambda: Net(), {"names": "router"}, "router is a Linear; stacks of exp"),
    "another sum": (
        lambda: holding(OtherSum(4, 8, 8).bfloat16()),
        {},
        r"layer.experts \(OtherSum\) computes something else with its experts",
    ),
    "a bias that does not learn": (
        lambda: holding(DownBias(learns=False)),
        {},
        r"has other bits \(gradient of down_proj_bias\)",
    ),
    "all tokens": (lambda: holding(Batched(4, 8, 8)), {}, "does not take .hidden_states, top_k_i"),
    "another parameter": (lambda: holding(Biased()), {}, "has scale besides stacks of experts"),
    "a gradient": (lambda: holding(small(), with_grad), {}, "down_proj has a gradient"),
    "a hook": (
        lambda: holding(small(), lambda one: one.register_forward_hook(lambda *_: None)),
        {},
        "has _forward_hooks, which tiling would lose",
    ),
    "shared": (shared, {}, r"experts.down_proj is shared with other.tied"),
    "not eager": (models.mixtral, {}, r"set_experts_implementation\('eager'\) first"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_tiles_cannot_compute_is_refused_with_the_reason_and_nothing_changed(
    case: str,
) -> None:
    make, values, message = REFUSED[case]
    model = make()
    before = [(name, type(module)) for name, module in model.named_modules()]
    with pytest.raises(ValueError, match=message):
        inf.tile_experts(model, **{"experts": 2, **values})
    assert [(name, type(module)) for name, module in model.named_modules()] == before


def test_stacks_of_biases_are_cut_beside_those_of_weights() -> None:
    model = inf.tile_experts(holding(DownBias(learns=True)), experts=3)
    shapes = [tuple(parameter.shape) for parameter in model.parameters()]
    assert shapes == [(3, 16, 8), (3, 8, 8), (3, 8), (1, 16, 8), (1, 8, 8), (1, 8)]


def test_a_stack_too_large_for_the_device_is_told_how_many_experts_have_room() -> None:
    def needed(model: nn.Module, capacity_bytes: int) -> str:
        specs = find_units(model, unit_bytes_max=1 << 20)
        with pytest.raises(ValueError, match="gathered at once") as caught:
            check_gatherable(model, specs, 1 << 20, torch.device("cpu"), capacity_bytes, Passes())
        return str(caught.value)

    with torch.device("meta"):
        net = Net(16, 256, 256)
    one = 3 * 256 * 256 * 4
    text = needed(net, 20 * one)
    fix = re.search(r"experts=(\d+), names=\['experts'\]", text)
    assert fix is not None, text
    cut = inf.tile_experts(net, experts=int(fix[1]))
    specs = find_units(cut, unit_bytes_max=1 << 20)
    check_gatherable(cut, specs, 1 << 20, torch.device("cpu"), 20 * one, Passes())
    assert "a single one needs more memory" in needed(
        inf.tile_experts(Net(4, 256, 256), experts=1), 2 * one
    )


def test_stacks_initialise_to_the_bits_of_the_uncut_model_each_computed_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(deferred_init, "DEFERRED_BYTES_MIN", 256)
    torch.manual_seed(3)
    expected = Net().state_dict()
    with torch.device("meta"):
        net = inf.tile_experts(Net(), experts=2)
    computed: list[str] = []
    read_into = DeferredModel.read_into

    def read(built: DeferredModel, name: str, out: torch.Tensor) -> None:
        computed.append(name)
        read_into(built, name, out)

    monkeypatch.setattr(DeferredModel, "read_into", read)
    torch.manual_seed(3)
    inf.offload(net, inf.Policy(params="cpu", optim="cpu", ram=RAM), init=Net)
    same(net.state_dict(), expected)
    assert len(computed) == len(set(computed)) == len(expected)
    inf.handle(net).close()


def test_tiles_stay_as_they_were_made() -> None:
    model: Any = tiled(models.mixtral, 2)
    (batch,) = models.token_batches(1)
    model.config._experts_implementation = "grouped_mm"
    with pytest.raises(RuntimeError, match=r"is 'grouped_mm', and these tiles of experts"):
        models.loss_of(model, batch)
    net = inf.tile_experts(Net(), experts=5)
    with pytest.raises(ValueError, match="the down_proj of this TiledExperts is tiled"):
        net.experts.register_parameter("down_proj", nn.Parameter(torch.zeros(2)))
    with pytest.raises(RuntimeError, match="has 13, an index of no expert: there are 12"):
        net(torch.randn(2, 6), torch.tensor([[3], [13]]))
    with pytest.raises(RuntimeError, match="has -2, an index of no expert: there are 12"):
        route(torch.tensor([[3], [-2]]), 12)
    start(net)
    with pytest.raises(ValueError, match=r"offloaded already; call inf.tile_experts"):
        inf.tile_experts(net, experts=2)
    inf.handle(net).close()


def test_evaluation_gathers_the_chosen_tiles_alone() -> None:
    torch.manual_seed(0)
    net = Net()
    x, index = torch.randn(3, 6), torch.tensor([[1], [1], [8]])
    expected = net(x, index)
    inf.tile_experts(net, experts=2)
    inf.offload(net, inf.Policy(params="cpu", optim="cpu", ram=RAM))
    demands = demands_of(inf.handle(net))
    with torch.no_grad():
        found = net(x, index)
    assert torch.equal(found, expected)
    assert [name for name in demands if "tile" in name] == [
        "experts.tile_0_0",
        "experts.tile_4_0",
    ]
    inf.handle(net).close()
