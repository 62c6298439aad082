"""Memory-centric tiling in an offloaded model: the bits of the plain loop on the same tiles
wherever states rest, peak memory by the tile, one weight in every file, and set-up that says when
it is needed."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn
from torch.utils.checkpoint import checkpoint

import infinity as inf
from infinity._src.checkpoint.formats.safetensors_writer import ExportJob
from infinity._src.checkpoint.reader import Checkpoint
from infinity._src.hooks import activation_offload as activations
from infinity._src.kernels.tiling.tiled_module import TiledModule
from infinity._src.memory.constants import AHEAD
from infinity._src.memory.device_capacity import Passes
from infinity._src.params.discover import (
    check_gatherable,
    find_units,
    tiles_needed,
    times_at_once,
)
from infinity._src.params.unit import Unit
from infinity.aio import Fault, Seam
from infinity.errors import AioError, ParameterReleased
from infinity.ops import LinearCrossEntropy
from tests import harness, models
from tests.harness import Training, assert_same
from tests.marks import mostly_slow
from tests.test_bitwise import policy
from tests.test_matrix import tiled_llama

RAM = "64MiB"


def tiled(
    factory: Callable[[], nn.Module],
    tiles: Any = (3, 2),
    *,
    loss: int | None = 4,
    names: Any = None,
) -> nn.Module:
    """A model with its linears in tiles, and its loss without logits."""
    model = factory()
    if loss is not None:
        inf.tile_loss(model, tiles=loss)
    return inf.tile_linears(model, tiles=tiles, names=names)


def two_layers() -> nn.Module:
    return models.llama(layers=2)


def four_layers() -> nn.Module:
    return tiled(lambda: models.llama(layers=4), names="down_proj")


def t5() -> nn.Module:
    return tiled(models.t5, 3, loss=None, names=["lm_head", "wo"])


def list_moe() -> nn.Module:
    return tiled(models.ListMoe, (1, 2), loss=None)


def lora() -> nn.Module:
    return tiled(
        lambda: models.lora(layers=2),
        (2, 2),
        loss=None,
        names=["q_proj.base_layer", "gate_proj", "lm_head"],
    )


# -- the same bits ---------------------------------------------------------------------------------

VARIANTS: dict[str, tuple[Training, dict[str, Any]]] = {
    "weights at four sites": (Training(t5), {}),
    "experts that get no tokens": (Training(list_moe), {}),
    "frozen tiles with adapters beside": (Training(lora), {}),
    "adapters and checkpointing": (Training(lora, checkpointing=False), {}),
    "activations on nvme": (Training(four_layers, checkpointing=False), {"activations": "nvme"}),
}
"""Models that the matrix does not have in tiles."""


@pytest.mark.parametrize(
    "name",
    mostly_slow(
        VARIANTS,
        "weights at four sites",
        "adapters and checkpointing",
        "activations on nvme",
    ),
)
def test_every_kind_of_training_has_the_bits_of_the_plain_loop(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(activations, "SMALLEST_BYTES", 256)
    training, values = VARIANTS[name]
    chosen = policy(tmp_path, **{"params": "nvme", "optim": "nvme", "ram": "min", **values})
    result = harness.offloaded(training, chosen)
    harness.assert_same(result, harness.reference(training))
    assert (result.stats.activations.stored_bytes > 0) == ("activations" in values)


class Net(nn.Module):
    """Three linears, the middle one of any shape and tiling."""

    def __init__(self, width: int, tiles: Any) -> None:
        super().__init__()
        self.first, self.middle, self.last = (
            nn.Linear(6, 10),
            nn.Linear(10, width),
            nn.Linear(width, 4),
        )
        inf.tile_linears(self, tiles=tiles, names=["middle", "last"])

    def forward(self, x: torch.Tensor, how: str = "plain") -> torch.Tensor:
        def body(x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.middle(torch.tanh(self.first(x))))

        hidden = (
            body(x) if how == "plain" else checkpoint(body, x, use_reentrant=how == "reentrant")
        )
        out: torch.Tensor = self.last(hidden)
        return out.square().mean()


@given(
    width=st.integers(4, 70),
    tiles=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    rows=st.integers(1, 5),
    how=st.sampled_from(["plain", "reentrant", "plain", "other"]),
    seed=st.integers(0, 100),
)
@settings(max_examples=12, deadline=None)
def test_any_grid_trains_as_without_an_engine(
    width: int, tiles: tuple[int, int], rows: int, how: str, seed: int
) -> None:
    gradients = []
    for offloaded in (False, True):
        torch.manual_seed(seed)
        net = Net(width, tiles)
        x = torch.randn(rows, 6, requires_grad=how == "reentrant")
        if offloaded:
            inf.offload(net, inf.Policy(params="cpu", optim="cpu", ram=RAM))
        loss = net(x, how)
        loss.backward()
        if offloaded:
            found = [inf.handle(net).full_grad(parameter) for parameter in net.parameters()]
            inf.handle(net).close()
        else:
            found = [parameter.grad for parameter in net.parameters()]
        gradients.append([loss.detach(), *found])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_where_sums_are_exact_the_bits_are_the_untiled_models() -> None:
    torch.manual_seed(0)
    linear = nn.Linear(24, 20, dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in linear.parameters():
            parameter.copy_(torch.randint(-2, 3, parameter.shape))
    model = inf.tile_linears(nn.Sequential(linear), tiles=(3, 2))
    plain = nn.Linear(24, 20, dtype=torch.bfloat16)
    plain.load_state_dict(
        {name.removeprefix("0."): value for name, value in model.state_dict().items()}
    )
    inf.offload(model, inf.Policy(params="cpu", optim="cpu", ram=RAM))
    x = torch.randint(-3, 4, (7, 24)).bfloat16()
    dy = torch.randint(-2, 3, (7, 20)).bfloat16()
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    outputs = [module(each) for module, each in zip((model, plain), inputs, strict=True)]
    for out in outputs:
        out.backward(dy)
    assert torch.equal(*outputs)
    assert torch.equal(inputs[0].grad, inputs[1].grad)  # type: ignore[arg-type]
    for tile, _, _ in model[0].tiles():  # type: ignore[operator]
        grad = inf.handle(model).full_grad(tile.weight)
        assert torch.equal(grad, tile.places["weight"].of(plain.weight.grad).float())


def test_the_losses_are_near_those_of_the_untiled_model(tmp_path: Path) -> None:
    training = Training(tiled_llama, dtype=torch.float32)
    ours = harness.offloaded(training, policy(tmp_path, params="nvme", optim="nvme", ram="min"))
    plain = harness.reference(Training(two_layers, dtype=torch.float32))
    torch.testing.assert_close(
        torch.tensor(ours.losses), torch.tensor(plain.losses), rtol=1e-5, atol=0
    )
    torch.testing.assert_close(
        torch.tensor(ours.norms), torch.tensor(plain.norms), rtol=1e-4, atol=0
    )
    assert ours.params.keys() == plain.params.keys()


# -- peak memory -----------------------------------------------------------------------------------


class Huge(nn.Module):
    """One linear that is nearly all of the model. instead: its loss with cross-entropy."""

    def __init__(self, tiles: Any, *, head: bool) -> None:
        super().__init__()
        self.small = nn.Linear(16, 64)
        self.huge = nn.Linear(64, 8192, bias=False)
        if tiles is not None:
            inf.tile_linears(self, tiles=tiles, names="huge")
        self.loss = LinearCrossEntropy(self.huge) if head else None  # type: ignore[arg-type]

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.small(x))
        return self.loss(hidden, y) if self.loss is not None else self.huge(hidden).square().mean()


def peaks(
    tiles: Any, *, head: bool, directory: Path, device: str = "cpu"
) -> tuple[int, int, int, int]:
    """(bytes of the weight, most bytes gathered in forward, and in backward, most bytes of fresh
    gradients)."""
    model = Huge(tiles, head=head).to(device)
    chosen = inf.Policy(
        params="nvme", optim="nvme", nvme=directory, ram="min", unit_bytes_max=1 << 16
    )
    inf.offload(model, chosen)
    handle = inf.handle(model)
    opt = inf.AdamW(model.parameters(), lr=1e-3)
    found = []
    for _ in range(2):  # the second time, the order is known, and units are read ahead
        handle.unsharder.gathered_bytes_peak = handle.unsharder._gathered_bytes
        loss = model(torch.randn(8, 16, device=device), torch.randint(0, 8192, (8,), device=device))
        found.append(handle.unsharder.gathered_bytes_peak)
        handle.unsharder.gathered_bytes_peak = handle.unsharder._gathered_bytes
        loss.backward()
        found.append(handle.unsharder.gathered_bytes_peak)
        opt.step()
        opt.zero_grad()
    weight_bytes, fresh = model.huge.weight.numel() * 4, handle.stats().fresh_grad_bytes_peak
    handle.close()
    return weight_bytes, max(found[::2]), max(found[1::2]), fresh


@pytest.mark.parametrize("head", [False, True])
def test_what_is_gathered_at_once_falls_with_the_number_of_tiles(
    head: bool, tmp_path: Path
) -> None:
    table = {}
    for tiles in (None, 4, 8, 16, 32) if head else (None, 4, (4, 2), (8, 2), (8, 4)):
        size, forward, backward, fresh = peaks(tiles, head=head, directory=tmp_path)
        table[tiles] = forward, backward, fresh
        kib = [
            f"{name} {value >> 10} KiB"
            for name, value in zip(("forward", "backward", "gradients"), table[tiles], strict=True)
        ]
        print(f"tiles {tiles!s:>8} of {size >> 10} KiB: at most {', '.join(kib)}")
        if tiles is not None:
            count = tiles if isinstance(tiles, int) else tiles[0] * tiles[1]
            small = 2 << 12  # the other linear, padded
            # The tile in use, and those that are read ahead.
            assert max(forward, backward) <= (AHEAD + 1) * size // count + small
            assert fresh <= size // count + small
    assert min(table[None]) >= size
    last = list(table)[-1]
    assert max(table[last]) * 8 < size


def test_backward_needs_room_for_the_chain_of_one_tile_only(tmp_path: Path) -> None:
    """No tile stays in use while the next is: the references, not the room left over."""
    model = Huge((4, 2), head=False)
    inf.offload(model, inf.Policy(params="cpu", optim="cpu", ram=RAM))
    handle = inf.handle(model)
    most, plain_demand = 0, handle.unsharder.unshard

    def demand(unit: Unit) -> None:
        nonlocal most
        plain_demand(unit)
        used = sum(
            unit.refs > 0 and len(unit.params) == 1 and unit.params[0].place is not None
            for unit in handle.units
        )
        most = max(most, used)

    handle.unsharder.unshard = demand  # type: ignore[method-assign]
    model(torch.randn(8, 16), torch.zeros(8)).backward()
    assert most == 0  # while one is being gathered, no other is held
    assert sum(unit.refs for unit in handle.units) == 0


# -- what goes out and comes in --------------------------------------------------------------------


def load_all(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors of an export."""
    return {
        name: value
        for file in sorted(directory.glob("*.safetensors"))
        for name, value in load_file(file).items()
    }


def start(model: nn.Module, load: Any = None) -> tuple[nn.Module, Any]:
    """Offloaded, with an optimizer."""
    inf.offload(model, inf.Policy(params="cpu", optim="cpu", ram=RAM), load=load)
    return model, inf.AdamW(model.parameters(), lr=1e-2)


def step(model: nn.Module, opt: Any) -> float:
    return harness.step(model, opt, models.token_batches(1)[0], clip=1.0)


@pytest.mark.parametrize("factory", [two_layers, models.gpt2], ids=["untied", "tied"])
def test_files_hold_whole_weights_and_fit_both_kinds_of_model(factory: Any, tmp_path: Path) -> None:
    def make(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return tiled(
            lambda: models.make(factory, seed=seed),
            names="q_proj" if factory is two_layers else None,
        )

    plain = models.make(factory)
    plain.save_pretrained(tmp_path / "hub")  # type: ignore[operator]
    with torch.device("meta"):
        meta = make(0)
    model, opt = start(meta, load=tmp_path / "hub")
    assert_same(model.state_dict(), plain.state_dict())
    assert list(model.state_dict()) == list(plain.state_dict())
    for _ in range(2):
        step(model, opt)
    state = model.state_dict()

    inf.export_safetensors(model, tmp_path / "out", shard_bytes_max=20_000)
    exported = load_all(tmp_path / "out")
    assert set(exported) == {name for name, _ in plain.named_parameters()}
    assert all(torch.equal(state[name], value) for name, value in exported.items())
    inf.save(model, opt, tmp_path / "save").wait()
    with Checkpoint.open(tmp_path / "save") as saved:
        for options in ({}, {"masters": True}, {"dtype": torch.float32}):
            ExportJob(saved, **options).export(tmp_path / "again", shard_bytes_max=20_000)
            again = load_all(tmp_path / "again")
            assert again.keys() == exported.keys()
            if options.get("masters"):
                inf.export_safetensors(model, tmp_path / "masters", masters=True)
                exported_masters = load_all(tmp_path / "masters")
                assert all(
                    torch.equal(again[name], value) for name, value in exported_masters.items()
                )
            else:
                assert all(
                    torch.equal(again[name].bfloat16(), value.bfloat16())
                    for name, value in exported.items()
                )
    inf.export_dcp(model, opt, tmp_path / "dcp")

    others = [start(make(seed)) for seed in (1, 2, 3)] + [start(models.make(factory, seed=4))]
    inf.restore(*others[0], tmp_path / "save")
    for other in (others[1], others[3]):
        assert inf.load_dcp(*other, tmp_path / "dcp") == ((), ())
    assert inf.load_safetensors(others[2][0], tmp_path / "masters") == ((), ())
    for other, _ in others:
        assert_same(other.state_dict(), state)
    if factory is two_layers:
        with pytest.raises(
            ValueError,
            match=r"in other tiles in .* along columns .*Tile the model in the same way",
        ):
            inf.restore(*others[3], tmp_path / "save")
    else:
        # Only the head has tiles of whole rows.
        assert "in other tiles" in inf.restore(*others[3], tmp_path / "save").notes[0]
        assert_same(others[3][0].state_dict(), state)
    losses = [step(*each) for each in [(model, opt), *others]]
    assert losses[0] == losses[1] == losses[2] == losses[3]
    assert losses[4] == pytest.approx(losses[0], rel=1e-3)
    after = model.state_dict()
    for other, _ in others[:2]:
        assert_same(other.state_dict(), after)
    model.load_state_dict(state)
    assert_same(model.state_dict(), state)


def test_a_callable_is_asked_for_whole_weights_and_sees_what_it_would_untiled() -> None:
    def fill(name: str, out: torch.Tensor) -> None:
        asked.append((name, tuple(out.shape)))
        torch.manual_seed(len(name))
        out.normal_()

    found, questions = [], []
    for make in (two_layers, tiled_llama):
        asked: list[tuple[str, tuple[int, ...]]] = []
        with torch.device("meta"):
            model = models.make(make)
        start(model, load=fill)
        found.append(model.state_dict())
        questions.append(sorted(asked))
    assert_same(found[1], found[0])
    assert questions[0] == questions[1]


def test_a_source_that_does_not_fit_is_told_by_the_whole_weight() -> None:
    right = {name: torch.zeros(value.shape) for name, value in two_layers().state_dict().items()}
    right.pop("model.layers.0.mlp.down_proj.weight")
    with torch.device("meta"):
        model = tiled_llama()
    with pytest.raises(
        ValueError,
        match=r"model.layers.0.mlp.down_proj.weight is missing "
        r"\(\[32, 64\], 8,192 bytes as float32\)\. Build the model",
    ):
        inf.offload(model, inf.Policy(ram=RAM), load=right)
    right["model.layers.0.mlp.down_proj.weight"] = torch.zeros(3, 3)
    with pytest.raises(
        ValueError, match=r"down_proj.weight of shape \(3, 3\); the model wants \(32, 64\)"
    ):
        inf.offload(model, inf.Policy(ram=RAM), load=right)
    with pytest.raises(ValueError, match=r"lm_head.weight.*on the meta device without values"):
        inf.offload(
            inf.tile_linears(nn.ModuleDict({"lm_head": nn.Linear(4, 4, device="meta")}), tiles=2),
            inf.Policy(ram=RAM),
        )


def test_tiles_are_read_and_written_by_gather_and_refuse_otherwise() -> None:
    model = inf.tile_linears(nn.Sequential(nn.Linear(8, 6)), tiles=2)
    start(model)
    tile = model.get_parameter("0.tile_1_0.weight")
    with pytest.raises(ParameterReleased, match=r"0.tile_1_0.weight is on cpu"):
        tile.sum()
    with torch.no_grad(), inf.handle(model).gather(tile):  # type: ignore[arg-type]
        tile.fill_(7)
    weight = model.state_dict()["0.weight"]
    assert (weight == 7).all(1).tolist() == [False] * 3 + [True] * 3
    with pytest.raises(ValueError, match=r"offloaded already; call inf.tile_linears"):
        inf.tile_linears(model, tiles=2)


# -- faults and refusals ---------------------------------------------------------------------------


def test_a_tile_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    model = Huge((4, 2), head=False)
    values: dict[str, Any] = {
        "params": "nvme",
        "optim": "nvme",
        "nvme": tmp_path,
        "ram": "min",
        "io_backend": "threads",
    }
    inf.offload(model, inf.Policy(**values), _seam=Seam(fault=Fault("read", 3, persistent=True)))
    with pytest.raises(AioError, match=r"huge\.tile_\d_\d cannot be gathered"):
        for _ in range(3):
            model(torch.randn(8, 16), torch.zeros(8)).backward()
    assert sum(unit.refs for unit in inf.handle(model).units) == 0


def test_a_linear_too_large_for_the_device_is_refused_with_tiles_that_fit() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 1 << 22), nn.Linear(1 << 22, 1 << 21))
    with pytest.raises(
        ValueError,
        match=r"1.weight takes 32.0 TiB gathered whole.*"
        r"inf.tile_linears\(model, tiles=\d+, names=\['1'\]\)",
    ):
        inf.offload(model, inf.Policy(ram=RAM), load=lambda _name, out: out.zero_())


def test_a_tile_too_large_for_the_device_is_told_to_be_cut_smaller() -> None:
    model = inf.tile_linears(nn.Sequential(nn.Linear(64, 4096, bias=False, device="meta")), tiles=2)
    units = find_units(model, unit_bytes_max=1 << 20)
    with pytest.raises(
        ValueError, match=r"a tile already; give inf.tile_linears 6 times as many tiles"
    ):
        check_gatherable(model, units, 1 << 20, torch.device("cpu"), 400_000, Passes())


@given(
    rows=st.integers(1, 300),
    columns=st.integers(1, 100),
    memory=st.integers(2000, 1 << 17),
    unit_max=st.integers(1000, 1 << 17),
)
@settings(max_examples=60, deadline=None)
def test_the_number_of_tiles_that_is_told_works(
    rows: int, columns: int, memory: int, unit_max: int
) -> None:
    model = nn.Sequential(nn.Linear(columns, rows, bias=False, device="meta"))
    size, room = rows * columns * 4, memory // times_at_once(Passes())
    device = torch.device("cpu")

    def check() -> None:
        check_gatherable(
            model, find_units(model, unit_bytes_max=unit_max), unit_max, device, memory, Passes()
        )

    tiles = tiles_needed((rows, columns), size, room)
    if size > memory:
        with pytest.raises(
            ValueError, match=rf"inf.tile_linears\(model, tiles={tiles}, names=\['0'\]\)"
        ):
            check()
    if tiles < rows:
        inf.tile_linears(model, tiles=tiles)
        assert max(parameter.numel() * 4 for parameter in model.parameters()) <= room
        check()


def test_a_linear_larger_than_a_unit_is_logged_with_tiles_that_fit(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for tiles in (1, 5):
        model = inf.tile_linears(
            nn.Sequential(nn.Linear(64, 320), nn.ReLU(), nn.Linear(320, 8)), tiles=tiles, names="0"
        )
        if tiles == 1:
            model[0] = nn.Linear(64, 320)
        with caplog.at_level(logging.WARNING, "infinity"):
            caplog.clear()
            inf.offload(model, inf.Policy(ram=RAM, unit_bytes_max=16_384))
        assert ("inf.tile_linears(model, tiles=5, names=['0'])" in caplog.text) == (tiles == 1)
        inf.handle(model).close()


def test_tiles_of_experts_are_refused_on_several_ranks() -> None:
    model = list_moe()
    assert len(find_units(model, unit_bytes_max=1 << 30)) > 2 * 2 * 2 * 6
    with pytest.raises(ValueError, match=r"tile_0_0 is a tile of one of several modules in a list"):
        find_units(model, unit_bytes_max=1 << 30, nested=False)
    assert any(isinstance(module, TiledModule) for module in model.modules())


def test_a_head_outside_of_forward_gathers_tiles_and_a_whole_one_is_gathered_by_the_user() -> None:
    torch.manual_seed(0)
    hidden, target = torch.randn(5, 8), torch.randint(0, 12, (5,))
    found = []
    for tiles in (None, 3):
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 12))
        model.load_state_dict(
            {
                name: torch.arange(value.numel()).view(value.shape) % 7 / 7
                for name, value in model.state_dict().items()
            }
        )
        if tiles is not None:
            inf.tile_linears(model, tiles=tiles, names="1")
        inf.offload(model, inf.Policy(params="cpu", optim="cpu", ram=RAM))
        loss = LinearCrossEntropy(model[1])  # type: ignore[arg-type]
        handle = inf.handle(model)
        if tiles is None:
            with pytest.raises(ParameterReleased, match=r"1.weight is on cpu"):
                loss(hidden, target)
            with handle.gather(model[1].parameters()):
                value = loss(hidden, target)
                value.backward()
        else:
            value = loss(hidden, target)
            value.backward()
        grads = [handle.full_grad(parameter) for parameter in model[1].parameters()]
        whole = (
            grads[0]
            if tiles is None
            else torch.cat([grad for grad in grads if grad is not None and grad.ndim == 2])
        )
        found.append([value.detach(), whole])
        assert sum(unit.refs for unit in handle.units) == 0
        handle.close()
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_an_error_in_the_middle_of_the_tiles_leaves_all_released() -> None:
    model = Huge((4, 2), head=False)
    inf.offload(model, inf.Policy(params="cpu", optim="cpu", ram=RAM))
    units = inf.handle(model).units
    tile = model.huge.get_submodule("tile_2_1")
    broken = tile.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        model(torch.randn(8, 16), torch.zeros(8))
    broken.remove()
    model(torch.randn(8, 16), torch.zeros(8)).backward()
    assert sum(unit.refs for unit in units) == 0
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("whole", [True, False])
def test_compiled_code_is_compiled_around_tiles(whole: bool) -> None:
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    found = []
    for compiled in (False, True):
        torch.manual_seed(0)
        net = Net(24, (3, 2))
        inf.offload(net, inf.Policy(params="cpu", optim="cpu", ram=RAM))
        call: Any = net
        if compiled and whole:
            call = torch.compile(net, backend=counter)
        elif compiled:
            net.forward = torch.compile(net.forward, backend=counter)  # type: ignore[method-assign]
        for _ in range(2):
            loss = call(torch.linspace(-1, 1, 18).view(3, 6))
            loss.backward()
        found.append(
            [
                loss.detach(),
                *(inf.handle(net).full_grad(parameter) for parameter in net.parameters()),
            ]
        )
        inf.handle(net).close()
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)
    # before, between and behind the two tiled linears, and nothing of them
    assert counter.frame_count == 3
    torch._dynamo.reset()
