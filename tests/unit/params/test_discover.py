"""Finding units in module trees of every shape."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from infinity._src.params import discover
from infinity._src.params.discover import (
    SMALL_BYTES,
    UnitSpec,
    build,
    call_order,
    find_parameters,
    find_units,
)
from tests import models

LARGE = 1 << 29
CPU = torch.device("cpu")


def names(specs: list[UnitSpec]) -> list[str]:
    return [spec.name for spec in specs]


@pytest.mark.parametrize("case", models.CASES, ids=lambda case: case.name)
@pytest.mark.parametrize(
    ("unit_bytes_max", "small"), [(LARGE, SMALL_BYTES), (20000, 1000), (1, 1000), (1, SMALL_BYTES)]
)
@pytest.mark.parametrize("nested", [True, False])
def test_every_parameter_is_in_exactly_one_unit_and_every_holder_is_served(
    case: models.Case,
    unit_bytes_max: int,
    small: int,
    nested: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(discover, "SMALL_BYTES", small)
    model = models.make(case)
    specs = find_units(model, unit_bytes_max=unit_bytes_max, nested=nested)
    found = [entry.parameter for spec in specs for entry in spec.entries]
    assert {id(parameter) for parameter in found} == {
        id(parameter) for parameter in model.parameters()
    }
    assert len(found) == len(list(model.parameters()))
    all_names = [name for spec in specs for entry in spec.entries for name in entry.names]
    assert sorted(all_names) == sorted(
        name for name, _ in model.named_parameters(remove_duplicate=False)
    )
    for spec in specs:
        for entry in spec.entries:
            for module, attr in entry.sites:
                assert getattr(module, attr) is entry.parameter
                assert any(
                    module is part for root in spec.modules for part in root.modules()
                ) or isinstance(module, (nn.ParameterList, nn.ParameterDict))
        assert not any(
            isinstance(module, (nn.ModuleList, nn.ModuleDict)) for module in spec.modules
        )


def test_hugging_face_blocks_embeddings_norms_and_heads_are_units() -> None:
    assert names(find_units(models.make(models.llama), unit_bytes_max=LARGE)) == [
        "model.embed_tokens",
        "model.layers.0",
        "model.layers.1",
        "model.layers.2",
        "model.norm",
        "lm_head",
    ]


def test_tied_weights_are_one_parameter_of_one_unit_that_serves_all_its_holders() -> None:
    specs = find_units(models.make(models.gpt2), unit_bytes_max=LARGE)
    assert specs[0].entries[0].names == ["transformer.wte.weight", "lm_head.weight"]
    assert [type(module).__name__ for module in specs[0].modules] == ["Embedding", "Linear"]
    shared = find_units(models.make(models.t5), unit_bytes_max=LARGE)[0]
    assert shared.name == "shared"
    assert len(shared.entries[0].sites) == 4 == len(shared.modules)


def test_ties_that_a_model_declares_hold_where_objects_differ_on_meta() -> None:
    with torch.device("meta"):
        model = models.gpt2()
        model.lm_head.weight = nn.Parameter(torch.empty_like(model.lm_head.weight))
    assert len(find_parameters(model)) == len(list(model.parameters())) - 1
    real = models.gpt2()
    real.lm_head.weight = nn.Parameter(torch.zeros_like(real.lm_head.weight))
    assert len(find_parameters(real)) == len(list(real.parameters()))


def test_a_layer_applied_many_times_is_one_unit() -> None:
    specs = find_units(models.make(models.albert), unit_bytes_max=LARGE)
    assert names(specs) == [
        "albert.embeddings",
        "albert.encoder.embedding_hidden_mapping_in",
        "albert.encoder.albert_layer_groups.0",
        "predictions",
    ]


def test_children_of_module_lists_are_blocks_where_no_classes_are_declared() -> None:
    assert names(find_units(models.make(models.ListMoe), unit_bytes_max=LARGE)) == [
        "embed",
        "blocks.0",
        "blocks.1",
        "head",
    ]


def test_experts_of_a_block_that_is_too_large_are_units_of_their_own_only_when_nested() -> None:
    model = models.make(models.ListMoe)
    split = names(find_units(model, unit_bytes_max=20000))
    assert split[1:8] == ["blocks.0", *(f"blocks.0.experts.{index}" for index in range(6))]
    # Ranks route to different experts, so several ranks must not gather experts apart.
    whole = names(find_units(model, unit_bytes_max=20000, nested=False))
    assert not any("experts" in name for name in whole)


def test_a_model_without_lists_is_split_by_size() -> None:
    model = nn.Sequential(
        nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), nn.Linear(8, 64)
    )
    assert names(find_units(model, unit_bytes_max=LARGE)) == ["Sequential"]
    assert names(find_units(model, unit_bytes_max=300)) == ["0", "1.0", "1.1", "2"]


def test_units_can_be_named_by_module_class_name_or_path() -> None:
    model = models.make(models.llama)
    layers = model.model.layers
    by_module = find_units(model, units=list(layers), unit_bytes_max=LARGE)
    for units in (
        [type(layers[0])],
        ["LlamaDecoderLayer"],
        [f"model.layers.{index}" for index in range(3)],
    ):
        assert names(find_units(model, units=units, unit_bytes_max=LARGE)) == names(by_module)
    finer = names(find_units(model, units=["LlamaMLP", "LlamaAttention"], unit_bytes_max=LARGE))
    assert "model.layers.1.mlp" in finer
    assert "model.layers.1.self_attn" in finer


@pytest.mark.parametrize("unit", ["NoSuchLayer", nn.Conv2d, nn.Linear(2, 2)])
def test_a_unit_that_the_model_does_not_have_is_refused(unit: object) -> None:
    with pytest.raises(ValueError, match="the model has no"):
        find_units(models.make(models.llama), units=[unit], unit_bytes_max=LARGE)


def test_a_container_cannot_be_a_unit() -> None:
    with pytest.raises(ValueError, match="name its children"):
        find_units(models.make(models.llama), units=["model.layers"], unit_bytes_max=LARGE)


def test_parameters_that_a_module_holds_beside_blocks_are_its_unit() -> None:
    specs = find_units(models.make(models.External), unit_bytes_max=LARGE)
    assert specs[0].name == "External"
    assert specs[0].entries[0].names == ["start"]
    assert names(specs)[1:] == ["embed", "blocks.0", "blocks.1", "blocks.2", "never"]


class HeldInLists(nn.Module):
    """Parameters in containers that are never called."""

    def __init__(self) -> None:
        super().__init__()
        self.vectors = nn.ParameterList([nn.Parameter(torch.zeros(4)) for _ in range(2)])
        self.layers = nn.ModuleList([nn.Linear(4, 4)])


def test_parameters_in_containers_are_served_by_the_module_that_is_called() -> None:
    model = HeldInLists()
    specs = find_units(model, unit_bytes_max=LARGE)
    lists = next(spec for spec in specs if spec.entries[0].parameter is model.vectors[0])
    assert lists.modules == [model]


def test_build_lays_out_flats_by_dtype_and_trainability() -> None:
    model = models.make(models.lora)
    for parameter_name, parameter in model.named_parameters():
        if "lora_" in parameter_name:
            parameter.data = parameter.data.float()
    units = build(find_units(model, unit_bytes_max=LARGE), CPU, 2)
    block = units[1]
    kinds = {(flat.dtype, flat.trainable) for flat in block.flats}
    assert kinds == {(torch.bfloat16, False), (torch.float32, True)}
    for flat in block.flats:
        assert flat.layout.numel % (2 * 2048) == 0
        assert flat.tensor.untyped_storage().size() == 0
        for index, param in enumerate(flat.params):
            assert param.param_index == index
            assert param.offset * flat.layout.itemsize % 256 == 0
            assert param.flat is flat
    assert [param.index for unit in units for param in unit.params] == list(
        range(sum(len(unit.params) for unit in units))
    )
    order = [name for name, _ in model.named_parameters()]
    assert [param.name for param in block.params] == [
        name for name in order if name.startswith(f"{block.name}.")
    ]


def test_a_parameter_that_a_flat_cannot_hold_is_refused() -> None:
    def broken() -> Iterator[tuple[nn.Module, str]]:
        yield nn.LazyLinear(3), "is lazy"
        sparse = nn.Module()
        sparse.w = nn.Parameter(torch.eye(3).to_sparse())
        yield sparse, "ordinary dense"

    for model, message in broken():
        with pytest.raises(ValueError, match=message):
            find_units(model, unit_bytes_max=LARGE)


# -- small modules ---------------------------------------------------------------------------------


def meta_llama(hidden: int, mlp: int, layers: int, heads: int) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    with torch.device("meta"):
        config = transformers.LlamaConfig(
            vocab_size=128_256,
            hidden_size=hidden,
            intermediate_size=mlp,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=8,
            tie_word_embeddings=False,
        )
        return transformers.LlamaForCausalLM(config).to(torch.bfloat16)


def test_llama_of_405_billion_parameters_has_506_units_and_none_that_is_only_latency() -> None:
    model = meta_llama(16384, 53248, 126, 128)
    specs = find_units(model, unit_bytes_max=LARGE)
    assert len(list(model.parameters())) == 1137
    assert len(specs) == 126 * 4 + 2
    assert min(spec.size.gathered for spec in specs) > SMALL_BYTES
    assert names(specs)[:5] == [
        "model.embed_tokens",
        # One unit: its four weights together are smaller than one of the MLP.
        "model.layers.0.self_attn",
        "model.layers.0.mlp.gate_proj",
        "model.layers.0.mlp.up_proj",
        "model.layers.0.mlp.down_proj",
    ]
    with_norm = {spec.name: spec.entries[-1].names[0] for spec in specs if len(spec.modules) > 1}
    assert with_norm["model.layers.7.self_attn"] == "model.layers.7.input_layernorm.weight"
    assert with_norm["model.layers.7.mlp.gate_proj"] == (
        "model.layers.7.post_attention_layernorm.weight"
    )
    assert set(with_norm) == {
        "lm_head",
        *(
            f"model.layers.{i}.{name}"
            for i in range(126)
            for name in ("self_attn", "mlp.gate_proj")
        ),
    }


class Ordered(nn.Module):
    """Calls its children in another order than they are registered in."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 64, bias=False)
        self.down = nn.Linear(64, 16, bias=False)
        self.last = nn.LayerNorm(16)
        self.first = nn.LayerNorm(16)
        self.inner = nn.LayerNorm(64)
        self.never = nn.Linear(16, 16)

    def _narrow(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.inner(x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = [self._narrow(self.up(self.first(row))) for row in x]
        return self.last(torch.stack(rows))


def test_calls_are_ordered_as_the_source_of_forward_has_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = nn.Sequential(Ordered(), nn.Linear(16, 16))
    calls = call_order(model)
    block = model[0]
    looped = {block.first, block.up, block.inner, block.down}
    assert {module for module, call in calls.items() if call.looped} == looped
    assert sorted(calls, key=lambda module: calls[module].place) == [
        model,
        block,
        block.first,
        block.up,
        block.inner,
        block.down,
        block.last,
        model[1],
    ]
    # Where there is no source nothing is known.
    made = type("Made", (nn.Module,), {"forward": eval("lambda self, x: self.norm(x)")})()
    made.norm = nn.LayerNorm(4)
    assert list(call_order(made)) == [made]
    monkeypatch.setattr(Ordered, "forward", lambda self, x: self.never(x))
    assert list(call_order(block)) == [block], "no source of a forward that was replaced"


def test_small_modules_go_with_what_is_called_next_or_else_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(discover, "SMALL_BYTES", 1000)
    model = nn.ModuleDict({"layers": nn.ModuleList([Ordered(), Ordered()])})
    specs = find_units(model, unit_bytes_max=4000)
    found = {spec.name: {entry.names[0] for entry in spec.entries} for spec in specs}
    assert found["layers.1.up"] == {
        f"layers.1.{name}" for name in ("up.weight", "first.weight", "first.bias")
    }
    assert found["layers.1.down"] == {
        f"layers.1.{each}" for each in ("down.weight", "inner.weight", "inner.bias")
    }
    # Behind the loop, of which each turn would gather it.
    assert found["layers.1.last"] == {"layers.1.last.weight", "layers.1.last.bias"}
    assert len(found) == 8  # and what forward never names
    for name, block in (("layers.0", model["layers"][0]), ("layers.1", model["layers"][1])):
        by_name = {spec.name: spec for spec in specs}
        assert set(by_name[f"{name}.up"].modules) == {block.first, block.up}
    # Blocks that are small themselves stay units, and so does what the user has named.
    whole = find_units(model, unit_bytes_max=LARGE)
    assert names(whole) == ["layers.0", "layers.1"]
    named = find_units(model, units=["LayerNorm", "Linear"], unit_bytes_max=LARGE)
    assert len(named) == 12


def test_finding_units_among_many_small_modules_is_linear(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discover, "SMALL_BYTES", 1000)
    # Lists compare what they look for or remove: in Python, such comparisons are counted as calls.
    monkeypatch.setattr(UnitSpec, "__eq__", lambda one, other: one is other)

    def calls(count: int) -> int:
        with torch.device("meta"):
            sizes = [16 if index % 4 else 2 for index in range(count)]
            model = nn.Sequential(*(nn.Linear(size, 16) for size in sizes))
        found = 0

        def seen(_frame: object, event: str, _argument: object) -> None:
            nonlocal found
            found += event in ("call", "c_call")

        sys.setprofile(seen)
        try:
            specs = find_units(model, unit_bytes_max=2000)
        finally:
            sys.setprofile(None)
        assert len(specs) == 3 * count // 4
        return found

    assert calls(800) < 9 * calls(100)


def test_experts_are_gathered_with_no_other_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the router would gather an expert that no token chose."""
    monkeypatch.setattr(discover, "SMALL_BYTES", 2000)
    for spec in find_units(models.make(models.ListMoe), unit_bytes_max=20000):
        if "experts" in spec.name:
            assert all(spec.name in entry.names[0] for entry in spec.entries)
        else:
            assert not any(".experts." in entry.names[0] for entry in spec.entries)


def test_units_that_hold_others_are_known() -> None:
    specs = find_units(models.make(models.ListMoe), unit_bytes_max=20000)
    index = {spec.name: at for at, spec in enumerate(specs)}
    for spec in specs:
        block, experts, _ = spec.name.partition(".experts.")
        assert spec.around == ((index[block],) if experts else ())
    external = find_units(models.make(models.External), unit_bytes_max=LARGE)
    assert [spec.around for spec in external] == [(), *[(0,)] * (len(external) - 1)]
