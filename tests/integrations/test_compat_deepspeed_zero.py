"""`zero` of infinity.compat.deepspeed: models built in bounded memory, gathered parameters, single
states."""

from __future__ import annotations

import base64
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn

import infinity as inf
from infinity.compat.deepspeed import DeepSpeedRefusal, zero
from infinity.compat.deepspeed.parameters import ZeroParamStatus
from infinity.compat.deepspeed.utilities import (
    estimate_zero3_model_states_mem_needs,
    estimate_zero3_model_states_mem_needs_all_live,
)
from infinity.compat.deepspeed.zero import access, leaf_modules
from tests.integrations.deepspeed_runs import (
    WIDTH,
    Net,
    alone,
    assert_same,
    batches,
    built,
    config,
    net,
    train,
    values_of,
)

MIB = 1 << 20
SIDE = 512
"""A weight of so many rows and columns has 1 MiB, and goes to the file."""


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("LOCAL_RANK", "0")
    with alone():
        yield


# -- Init ------------------------------------------------------------------------------------------


class Wide(nn.Module):
    """Layers of 1 MiB, some of which an initialiser fills once more, as large models do."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(SIDE, SIDE) for _ in range(layers))
        self.head = nn.Parameter(torch.randn(SIDE, SIDE))
        self.apply(self._init)

    def _init(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return (x @ self.head).mean()


def wide(layers: int) -> Wide:
    torch.manual_seed(0)
    return Wide(layers)


def anonymous_bytes() -> int:
    """Memory of this process that no file backs."""
    found = psutil.Process().memory_full_info()
    return int(found.rss - found.shared)


def test_a_model_keeps_its_values(tmp_path: Path) -> None:
    plain = wide(2)
    for settings in (config(3, tmp_path), config(3), None):
        with zero.Init(config_dict_or_path=settings):
            model = wide(2)
        assert_same(values_of(model), values_of(plain))
        assert all(param.ds_status is ZeroParamStatus.NOT_AVAILABLE for param in model.parameters())
        assert len({param.ds_id for param in model.parameters()}) == 5
        # It is an ordinary model: it can be read, written and run.
        assert model(torch.ones(1, SIDE)).item() == plain(torch.ones(1, SIDE)).item()
        with torch.no_grad():
            model.head.zero_()
        assert model.head.count_nonzero() == 0
    assert list(tmp_path.iterdir()) == []


def test_a_large_model_takes_little_memory(tmp_path: Path) -> None:
    settings = config(3, tmp_path, bf16={"enabled": True})
    before = anonymous_bytes()
    with zero.Init(config_dict_or_path=settings):
        model = wide(120)
    # 121 MiB in fp32, and half as much after the cast.
    assert anonymous_bytes() - before < 16 * MIB
    assert {param.dtype for param in model.parameters()} == {torch.bfloat16}
    torch.manual_seed(0)
    first = wide(120).layers[119]
    assert torch.equal(model.layers[119].weight, first.weight.bfloat16())


def test_an_engine_of_a_model_that_was_so_built(tmp_path: Path) -> None:
    settings = config(3, tmp_path, bf16={"enabled": True})
    data = [torch.randn(2, SIDE).bfloat16() for _ in range(3)]

    def losses(model: nn.Module) -> list[float]:
        engine = built(model, settings)
        found = []
        for x in data:
            loss = engine(x)
            engine.backward(loss)
            engine.step()
            found.append(loss.item())
        engine.destroy()
        return found

    wanted = losses(wide(2))
    with zero.Init(config_dict_or_path=settings):
        model = wide(2)
    assert losses(model) == wanted
    later = wide(2)
    zero.Init(module=later, config_dict_or_path=settings)
    assert later.head.dtype is torch.bfloat16
    assert losses(later) == wanted


def test_contexts_nest_and_end(tmp_path: Path) -> None:
    with zero.Init(dtype=torch.float16):
        outer = nn.Linear(3, 3)
        with zero.Init(dtype=torch.bfloat16):
            inner = nn.Linear(3, 3)
    # The outermost context converts all of them.
    assert (outer.weight.dtype, inner.weight.dtype) == (torch.float16, torch.float16)
    with zero.Init(enabled=False, config_dict_or_path=config(3, tmp_path)):
        plain = nn.Linear(SIDE, SIDE)
    assert not hasattr(plain.weight, "ds_id")
    assert not hasattr(nn.Linear(3, 3).weight, "ds_id")

    @zero.Init(dtype=torch.bfloat16)
    def make() -> nn.Module:
        return nn.Linear(3, 3)

    assert make().weight.dtype is torch.bfloat16
    with pytest.raises(KeyError), zero.Init():
        raise KeyError
    assert not hasattr(nn.Linear(3, 3).weight, "ds_id")


def test_whole_numbers_and_tied_weights_stay() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(8, 4)
            self.head = nn.Linear(4, 8, bias=False)
            self.head.weight = self.embedding.weight
            self.count = nn.Parameter(torch.arange(3), requires_grad=False)

    with zero.Init(dtype=torch.bfloat16):
        model = Tied()
    assert model.head.weight is model.embedding.weight
    assert (model.count.dtype, model.head.weight.dtype) == (torch.int64, torch.bfloat16)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"remote_device": "nvme"}, "without a drive"),
        ({"remote_device": "tape"}, "remote_device='tape'"),
        ({"zero_quantized_weights": True}, "zero_quantized_weights"),
        ({"config_dict_or_path": "nowhere.json"}, "nowhere.json"),
    ],
)
def test_refusals_of_init(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(DeepSpeedRefusal, match=says):
        zero.Init(**settings)


def test_init_reads_what_initialize_reads(tmp_path: Path) -> None:
    text = json.dumps(config(bf16={"enabled": True})).encode()
    (tmp_path / "ds.json").write_bytes(text)
    for given in (str(tmp_path / "ds.json"), base64.urlsafe_b64encode(text).decode()):
        with zero.Init(config_dict_or_path=given):
            model = net()
        assert model.layers[0].weight.dtype is torch.bfloat16


def test_mics_is_refused() -> None:
    with pytest.raises(DeepSpeedRefusal, match="MiCS"):
        zero.MiCS_Init()


# -- GatheredParameters ----------------------------------------------------------------------------


def test_parameters_are_read_and_written_while_they_are_gathered(tmp_path: Path) -> None:
    engine = built(net(), config(3, tmp_path))
    weight = engine.module.layers[1].weight
    assert weight.ds_status is ZeroParamStatus.NOT_AVAILABLE
    assert (tuple(weight.ds_shape), weight.ds_numel) == ((WIDTH, WIDTH), WIDTH * WIDTH)
    wanted = net().layers[1].weight
    with zero.GatheredParameters(weight):
        assert weight.ds_status is ZeroParamStatus.AVAILABLE
        assert torch.equal(weight.data, wanted)
    with (
        zero.GatheredParameters(engine.module.parameters(), modifier_rank=0, fwd_module=engine),
        torch.no_grad(),
    ):
        weight.fill_(2.0)
        engine.module.layers[0].bias.data.zero_()
    assert weight.ds_status is ZeroParamStatus.NOT_AVAILABLE
    with zero.GatheredParameters([weight]):
        with zero.GatheredParameters([weight]):
            pass
        assert weight.ds_status is ZeroParamStatus.AVAILABLE
        assert (weight == 2).all()
    assert weight.ds_status is ZeroParamStatus.NOT_AVAILABLE
    found = values_of(engine.module)
    assert (found["layers.1.weight"] == 2).all()
    assert (found["layers.0.bias"] == 0).all()
    # Masters, too: the next step continues from what was written.
    assert (access.safe_get_full_fp32_param(weight) == 2).all()
    engine.destroy()


def test_whole_parameters_are_not_changed() -> None:
    plain = nn.Linear(2, 2)
    with zero.GatheredParameters(list(plain.parameters()), modifier_rank=0):
        plain.weight.data.zero_()
    with zero.GatheredParameters([]), zero.GatheredParameters(plain.weight, enabled=False):
        pass
    with zero.Init():
        built_ = nn.Linear(2, 2)
    with zero.GatheredParameters([built_.weight, built_.weight, plain.weight], modifier_rank=0):
        assert built_.weight.ds_status is ZeroParamStatus.AVAILABLE
        built_.weight.data.fill_(3.0)
    assert (built_.weight == 3).all()


def test_an_error_inside_closes_the_window() -> None:
    engine = built(net(), config())
    weight = engine.module.layers[0].weight
    with pytest.raises(KeyError), zero.GatheredParameters(weight, modifier_rank=0):
        raise KeyError
    assert weight.ds_status is ZeroParamStatus.NOT_AVAILABLE
    with pytest.raises(inf.errors.ParameterReleased):
        weight.sum()
    engine.destroy()


def test_external_parameters_need_nothing() -> None:
    class Shares(Net):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            # A weight of another module, outside of its forward.
            zero.register_external_parameter(self, self.layers[1].weight)
            return super().forward(x @ self.layers[1].weight, y)

    torch.manual_seed(0)
    engine = built(Shares(), config())
    plain = net()
    x, y = batches(1)[0]
    assert train(engine, [(x, y)]) == [plain(x @ plain.layers[1].weight, y).item()]
    with pytest.raises(RuntimeError, match="Parameter is not a"):
        zero.register_external_parameter(engine.module, x)
    engine.destroy()


# -- single states ---------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [1, 3])
def test_states_and_gradients_of_a_parameter(stage: int, tmp_path: Path) -> None:
    settings = config(stage, tmp_path if stage == 3 else None, bf16={"enabled": True})
    engine = built(net(), settings)
    x, y = batches(1, torch.bfloat16)[0]
    weight = engine.module.layers[1].weight
    assert access.safe_get_full_grad(weight) is None
    engine.backward(engine(x, y))
    plain = net().bfloat16()
    plain(x, y).backward()
    grad = access.safe_get_full_grad(weight)
    assert torch.equal(grad, plain.layers[1].weight.grad.float())
    access.safe_set_full_grad(weight, torch.ones_like(grad))
    assert (access.safe_get_full_grad(weight) == 1).all()
    access.safe_update_full_grad_vectorized([weight], lambda grad, _param: grad * 0.5)
    assert (access.safe_get_local_grad(weight) == 0.5).all()
    assert torch.equal(
        access.safe_get_full_fp32_param(weight), net().bfloat16().layers[1].weight.float()
    )
    engine.step()
    assert access.safe_get_full_grad(weight) is None
    moment = access.safe_get_full_optimizer_state(weight, "exp_avg")
    assert moment.shape == weight.shape
    assert moment.std() < 1e-6 < moment.mean()
    access.safe_set_full_optimizer_state(weight, torch.full_like(moment, 0.25), "exp_avg_sq")
    assert (access.safe_get_local_optimizer_state(weight, "exp_avg_sq") == 0.25).all()
    access.safe_set_local_optimizer_state(weight, torch.zeros(WIDTH * WIDTH), "exp_avg_sq")
    assert access.safe_get_full_optimizer_state(weight, "exp_avg_sq").count_nonzero() == 0
    value = torch.full((WIDTH, WIDTH), 1.001953)
    access.safe_set_full_fp32_param(weight, value)
    assert torch.equal(access.safe_get_full_fp32_param(weight), value)
    assert torch.equal(values_of(engine.module)["layers.1.weight"], value.bfloat16())
    access.safe_set_local_fp32_param(weight, torch.zeros(WIDTH * WIDTH))
    assert access.safe_get_local_fp32_param(weight).count_nonzero() == 0
    with pytest.raises(DeepSpeedRefusal, match="'momentum': the optimizer has exp_avg, exp_avg_sq"):
        access.safe_get_full_optimizer_state(weight, "momentum")
    with pytest.raises(DeepSpeedRefusal, match="a part of 3 elements"):
        access.safe_set_local_fp32_param(weight, torch.zeros(3))
    engine.destroy()


def test_parameters_without_states() -> None:
    model = net()
    model.layers[1].requires_grad_(False)
    engine = built(model, config())
    frozen = engine.module.layers[1].weight
    assert access.safe_get_full_fp32_param(frozen) is None
    access.safe_set_full_fp32_param(frozen, torch.zeros(WIDTH, WIDTH))
    assert values_of(engine.module)["layers.1.weight"].count_nonzero() > 0
    plain = nn.Linear(2, 2)
    assert access.safe_get_full_fp32_param(plain.weight) is None
    assert access.safe_get_full_grad(plain.weight) is None
    engine.destroy()


# -- flags and estimates ---------------------------------------------------------------------------


def test_leaf_modules_are_flags() -> None:
    model = net()
    assert leaf_modules.set_z3_leaf_modules(model, [nn.Linear]) == list(model.layers)
    assert leaf_modules.get_z3_leaf_modules(model) == list(model.layers)
    leaf_modules.unset_z3_leaf_modules(model, ["Linear"])
    assert leaf_modules.get_z3_leaf_modules(model) == []
    name = f"{Net.__module__}.Net"
    assert leaf_modules.set_z3_leaf_modules(model, [name]) == [model]
    found, missing = leaf_modules.set_z3_leaf_modules_by_name(
        model, ["layers.1", "nowhere"], raise_if_not_found=False
    )
    assert (found, missing) == ([model.layers[1]], ["nowhere"])
    found, _ = leaf_modules.set_z3_leaf_modules_by_suffix(model, [".2"])
    assert found == [model.layers[2]]
    assert leaf_modules.z3_leaf_module(model.layers[2])
    with pytest.raises(ValueError, match="No modules of type"):
        leaf_modules.set_z3_leaf_modules(model, [nn.Conv2d])
    with pytest.raises(ValueError, match="No modules named"):
        leaf_modules.set_z3_leaf_modules_by_name(model, ["nowhere"])
    with pytest.raises(AssertionError, match="leaf_module_classes"):
        leaf_modules.set_z3_leaf_modules(model, [3])
    engine = built(model, config())
    train(engine, batches(1))
    engine.destroy()


class Routed(nn.Module):
    """One of two layers: that of `choice`."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.choice = 0

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.experts[self.choice](x).float(), y)


class Router(nn.Module):
    """A model with a Routed module."""

    def __init__(self) -> None:
        super().__init__()
        self.routed = Routed()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        return self.routed(x, y)


@pytest.mark.parametrize(
    ("key", "value"),
    [("classes", ["Routed"]), ("names", ["routed"]), ("name_suffixes", "outed")],
)
def test_parameters_of_a_configured_leaf_that_were_not_used_have_gradients_of_zeros(
    key: str, value: Any
) -> None:
    torch.manual_seed(0)
    model, settings = Router(), config()
    settings["zero_optimization"]["leaf_module"] = {key: value}
    before = values_of(model)
    engine = built(model, settings)
    assert leaf_modules.get_z3_leaf_modules(engine.module) == [model.routed]
    train(engine, batches(1))
    # All that remains of AdamW's update is the decay of weights.
    name = "routed.experts.1.weight"
    torch.testing.assert_close(values_of(engine.module)[name], before[name] * (1 - 1e-2 * 0.1))
    engine.destroy()


def test_a_container_is_no_leaf() -> None:
    model = Routed()
    leaf_modules.set_z3_leaf_module(model.experts, True)
    with pytest.raises(ValueError, match="'experts' is a ModuleList"):
        built(model, config())


def test_estimates_of_memory(capsys: pytest.CaptureFixture[str]) -> None:
    need = estimate_zero3_model_states_mem_needs
    assert need(100, 10, 2, 1, additional_buffer_factor=1.0) == (1800, 40, 40)
    assert need(100, 10, 8, 1, zero_init=False, additional_buffer_factor=1.0) == (3200, 40, 40)
    assert need(100, 10, 2, 2, True, False, additional_buffer_factor=1.0) == (800, 90, 40)
    assert need(100, 10, 2, 1, False, False, additional_buffer_factor=1.0) == (80, 940, 40)
    estimate_zero3_model_states_mem_needs_all_live(net(), 1, 1)
    assert capsys.readouterr().out.count("offload_param=") == 6


@pytest.mark.parametrize(("in_splits", "out_splits"), [(1, 1), (2, 3), (5, 1), (5, 4)])
def test_a_tiled_linear_computes_as_the_whole(in_splits: int, out_splits: int) -> None:
    whole, x = nn.Linear(5, 7), torch.randn(3, 5, dtype=torch.float64)
    whole = whole.double()
    tiled = zero.TiledLinear(
        5, 7, in_splits=in_splits, out_splits=out_splits, init_linear=whole, dtype=torch.float64
    )
    assert len(tiled.linears) == out_splits
    assert [len(row) for row in tiled.linears] == [in_splits] * out_splits
    torch.testing.assert_close(tiled(x), whole(x))
    parts = zero.TiledLinear(
        5, 7, in_splits=in_splits, out_splits=out_splits, init_linear=whole, dtype=torch.float64,
        input_is_already_split=True, combine_out_splits=False,
    )  # fmt: skip
    sizes = [end - start for start, end in itertools.pairwise(tiled.in_parts)]
    given = x.split(sizes, dim=-1) if in_splits > 1 else x
    torch.testing.assert_close(torch.cat(parts(given), dim=-1), whole(x))
    with pytest.raises(RuntimeError, match="in_splits=6"):
        zero.TiledLinear(5, 7, in_splits=6)
    with pytest.raises(ValueError, match="copy_params_from"):
        tiled.copy_params_from(nn.Linear(7, 5))


class _ReturnsBias(nn.Linear):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:  # type: ignore[override]
        return nn.functional.linear(x, self.weight), self.bias


def test_tiles_that_return_their_bias_join_it() -> None:
    whole, x = nn.Linear(4, 6).double(), torch.randn(2, 4, dtype=torch.float64)
    tiled = zero.TiledLinearReturnBias(
        4, 6, in_splits=2, out_splits=3, linear_cls=_ReturnsBias, init_linear=whole,
        dtype=torch.float64,
    )  # fmt: skip
    output, bias = tiled(x)
    assert torch.equal(bias, whole.bias)
    torch.testing.assert_close(output + bias, whole(x))


def test_a_tiled_linear_trains_offloaded(tmp_path: Path) -> None:
    class Tiled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = zero.TiledLinear(WIDTH, WIDTH, in_splits=3, out_splits=2)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return nn.functional.cross_entropy(self.linear(x), y)

    torch.manual_seed(0)
    engine = built(Tiled(), config(3, tmp_path))
    losses = train(engine, batches(1) * 8)
    assert losses[-1] < losses[0]
    engine.destroy()


def test_generation_with_all_parameters_gathered(tmp_path: Path) -> None:
    data = batches(4)
    losses = []
    for unwraps in (False, True):
        engine = built(net(), config(3, tmp_path))
        losses.append(train(engine, data[:2]))
        if unwraps:
            with zero.unwrap_model_for_generation(engine) as model, torch.no_grad():
                assert model is engine
                before = inf.handle(engine.module).stats()
                first = engine(*data[0])
                assert torch.equal(engine(*data[0]), first)
                assert inf.handle(engine.module).stats().demand_reads == before.demand_reads
                assert all(param.norm() > 0 for param in engine.module.parameters())
        losses[-1] += train(engine, data[2:])
        engine.destroy()
    assert losses[0] == losses[1]
