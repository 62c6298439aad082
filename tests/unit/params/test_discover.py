"""Finding units in module trees of every shape."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from infinity._src.params.discover import UnitSpec, build, find_parameters, find_units
from tests import models

LARGE = 1 << 29
CPU = torch.device("cpu")


def names(specs: list[UnitSpec]) -> list[str]:
    return [spec.name for spec in specs]


@pytest.mark.parametrize("case", models.CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("unit_bytes_max", [LARGE, 20000, 1])
@pytest.mark.parametrize("nested", [True, False])
def test_every_parameter_is_in_exactly_one_unit_and_every_holder_is_served(
    case: models.Case, unit_bytes_max: int, nested: bool
) -> None:
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
    units = build(model, find_units(model, unit_bytes_max=LARGE), CPU, 2)
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
