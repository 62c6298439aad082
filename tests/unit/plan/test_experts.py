"""Mixture of experts in a plan: parameters that compute, stacks in tiles, and experts without
tokens."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

transformers = pytest.importorskip("transformers")

import infinity as inf  # noqa: E402
from infinity._src.base.sizes import GIB  # noqa: E402
from infinity._src.memory.device_capacity import (  # noqa: E402
    Passes,
    UnitBytes,
    fresh_capacity,
    gathered_capacity,
    regathered_bytes,
)
from infinity._src.params.materialize import open_source  # noqa: E402
from infinity._src.plan.changes import one_change  # noqa: E402
from infinity._src.plan.machine import Machine, describe_machine  # noqa: E402
from infinity._src.plan.memory import (  # noqa: E402
    gpu_need,
    ram_beside,
    ways_to_fit,
)
from infinity._src.plan.predict import outside, predict  # noqa: E402
from infinity._src.plan.ranks import bytes_of_rank, stages  # noqa: E402
from infinity._src.plan.search import tilings_of  # noqa: E402
from infinity._src.plan.workload import (  # noqa: E402
    Job,
    ModelShape,
    cut_experts,
    gathered_share,
    shape_in,
    shape_of,
    touched_share,
)

LAYERS = 5


@functools.cache
def shape(name: str, layers: int = LAYERS) -> ModelShape:
    """One of the models by its own sizes, with fewer layers; nothing but the configuration."""
    qwen = {
        "hidden_size": 4096, "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 128,
        "moe_intermediate_size": 1536, "num_experts": 128, "vocab_size": 151_936,
    }  # fmt: skip
    config = {
        "deepseek": lambda: transformers.DeepseekV3Config(num_hidden_layers=layers),
        "qwen": lambda: transformers.Qwen3MoeConfig(num_hidden_layers=layers, **qwen),
        "mixtral": lambda: transformers.MixtralConfig(num_hidden_layers=layers),
    }[name]()
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return shape_of(model, name=name)


def job_of(tokens: int = 65_536, **fields: Any) -> Job:
    given = {"params": "nvme", "optim": "nvme", "nvme": ["."]}
    own = {name: fields.pop(name) for name in ("expert_tile", "micro_batches") if name in fields}
    return Job(inf.Policy(**given | fields), tokens=tokens, sequence=min(tokens, 4096), **own)


def machine(gpu: str = "h100", gpus: int = 1, **fields: Any) -> Machine:
    return describe_machine(gpu=gpu, gpus=gpus, ram_bytes=512 * GIB, drives=4, **fields)


@pytest.mark.parametrize(
    ("name", "experts", "chosen", "shared", "expert", "layers"),
    [
        # The first three layers of DeepSeek-V3 are dense.
        ("deepseek", 256, 8, 1, 3 * 7168 * 2048, LAYERS - 3),
        ("qwen", 128, 8, 0, 3 * 4096 * 1536, LAYERS),
        ("mixtral", 8, 2, 0, 3 * 4096 * 14336, LAYERS),
    ],
)
def test_a_token_computes_with_the_experts_that_it_is_routed_to(
    name: str, experts: int, chosen: int, shared: int, expert: int, layers: int
) -> None:
    found = shape(name)
    assert (found.experts, found.chosen, found.shared) == (experts, chosen, shared)
    idle = layers * (experts - chosen) * expert
    table = found.vocabulary * found.width  # the input embedding is only looked up
    assert found.params - found.active_params == idle + table
    assert found.has_stacks


SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100}


@pytest.mark.parametrize(
    ("name", "sizes", "counts", "width"),
    [
        (
            "Qwen2Moe",
            {
                "num_experts": 8,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 32,
                "shared_expert_intermediate_size": 48,
            },
            (8, 2, 1),
            2 * 32 + 48,
        ),
        (
            "DeepseekV3",
            {
                "n_routed_experts": 8,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 32,
                "n_shared_experts": 2,
                "n_group": 1,
                "topk_group": 1,
            },
            (8, 2, 2),
            4 * 32,
        ),
        (
            "Ernie4_5_Moe",
            {
                "moe_num_experts": 8,
                "moe_k": 2,
                "moe_intermediate_size": 32,
                "moe_num_shared_experts": 2,
            },
            (8, 2, 2),
            4 * 32,
        ),
        (
            "AriaText",
            {
                "moe_num_experts": 8,
                "moe_topk": 3,
                "intermediate_size": 32,
                "moe_num_shared_experts": 2,
            },
            (8, 3, 2),
            5 * 32,
        ),
        (
            "Dbrx",
            {
                "ffn_config": {"moe_num_experts": 8, "moe_top_k": 2, "ffn_hidden_size": 32},
                "attn_config": {"kv_n_heads": 2, "rope_theta": 5e5},
            },
            (8, 2, 0),
            2 * 32,
        ),
    ],
)
def test_experts_have_many_names_and_shared_ones_have_activations(
    name: str, sizes: dict[str, Any], counts: tuple[int, int, int], width: int
) -> None:
    config = getattr(transformers, f"{name}Config")(**SMALL, **sizes, tie_word_embeddings=False)
    with torch.device("meta"):
        model = getattr(transformers, f"{name}ForCausalLM")(config)
    found = shape_of(model)
    assert (found.experts, found.chosen, found.shared) == counts
    assert found.mlp_width == width
    experts = sum(
        parameter.numel() for path, parameter in model.named_parameters() if ".experts." in path
    )
    dense = found.params - experts - found.vocabulary * found.width
    assert found.active_params == dense + experts * counts[1] // counts[0]


def test_compute_is_that_of_the_active_parameters() -> None:
    found = shape("qwen")
    one, two = (predict(found, machine(), job_of(tokens=count)) for count in (65_536, 131_072))
    assert two.model_flops == pytest.approx(2 * one.model_flops)
    attention = 3 * 2 * LAYERS * 64 * 128 * 4096 * 65_536
    assert one.model_flops == 6 * found.active_params * 65_536 + attention
    assert one.model_flops < 0.2 * 6 * found.params * 65_536


@pytest.mark.parametrize("name", ["deepseek", "qwen", "mixtral"])
@pytest.mark.parametrize("tile", [1, 3, 8, 1000])
def test_tiles_are_units_of_their_own_and_nothing_is_lost(name: str, tile: int) -> None:
    whole = shape(name)
    cut = cut_experts(whole, tile)
    assert (cut.params, cut.trainable) == (whole.params, whole.trainable)
    stacks = [unit for unit in whole.units if unit.stacks]
    tiles = [unit for unit in cut.units if unit.tiles]
    count = -(-whole.experts // tile)
    assert len(tiles) == count * len(stacks)
    # Each tile has a part of both parameters; the last of a stack may be smaller.
    expert = sum(stack.numel for stack in stacks[0].stacks) // whole.experts
    sizes = {unit.flats[0].numel for unit in tiles}
    assert max(sizes) == min(tile, whole.experts) * expert
    assert all(len(unit.flats[0].numels) == 2 for unit in tiles)
    # Other units keep their place.
    for before, after in zip(whole.units, cut.units, strict=False):
        assert before == after or (before.stacks and after.name.startswith(before.name))
    assert cut_experts(cut, tile) == cut
    assert cut_experts(whole, 0) is whole
    # A search counts tiles of one layer that are alike as one, with the capacities of all.
    found, units = cut.unit_bytes(in_slices=True), expanded(cut)
    assert len(found) <= len(cut.units) - len(tiles) + 3 * len(stacks)
    for several, in_backward, copies in itertools.product((False, True), repeat=3):
        passes = Passes(copies, several, in_backward, device_bytes=80 << 30)
        for capacity in (gathered_capacity, fresh_capacity, regathered_bytes):
            assert capacity(found, passes) == capacity(units, passes), (capacity, passes)
        alone = [dataclasses.replace(unit, block=None) for unit in units]
        assert fresh_capacity(cut.unit_bytes(), passes) == fresh_capacity(alone, passes)


def expanded(cut: ModelShape) -> list[UnitBytes]:
    """The bytes of every unit, each block in slices."""
    names = [".".join(unit.name.split("[")[0].split(".")[:3]) for unit in cut.units]
    numbers = {name: index for index, name in enumerate(dict.fromkeys(names))}
    return [
        UnitBytes(
            unit.gathered_bytes(),
            tuple(numel * flat.dtype.itemsize for flat in unit.flats for numel in flat.numels),
            unit.around,
            block=numbers[name],
        )
        for unit, name in zip(cut.units, names, strict=True)
    ]


def test_a_block_gathered_with_its_stack_keeps_what_is_not_of_the_stack() -> None:
    config = transformers.MixtralConfig(
        num_hidden_layers=2, hidden_size=64, intermediate_size=96, vocab_size=100
    )
    with torch.device("meta"):
        model = transformers.MixtralForCausalLM(config)
    whole = shape_of(model)
    cut = cut_experts(whole, 2)
    blocks = [unit for unit in cut.units if unit.name.endswith("layers.0")]
    (block,) = [unit for unit in whole.units if unit.name.endswith("layers.0")]
    assert len(blocks) == 1
    assert [one.name for one in blocks[0].linears] == [one.name for one in block.linears]
    experts = 8 * 3 * 64 * 96
    assert blocks[0].flats[0].numel == block.flats[0].numel - experts
    assert sum(unit.flats[0].numel for unit in cut.units if unit.tiles) == 2 * experts
    assert cut.params == whole.params


@pytest.mark.parametrize("tile", [1, 3])
def test_tiles_of_a_plan_are_those_of_tile_experts(tile: int) -> None:
    config = transformers.MixtralConfig(
        num_hidden_layers=2, hidden_size=64, intermediate_size=96, vocab_size=100
    )

    def made() -> Any:
        with torch.device("meta"):
            model = transformers.MixtralForCausalLM(config)
        model.set_experts_implementation("eager")
        return model

    cut = cut_experts(shape_of(made()), tile)
    real = shape_of(inf.tile_experts(made(), experts=tile))
    assert (real.params, real.active_params) == (cut.params, cut.active_params)
    sizes = [sorted(unit.gathered_bytes() for unit in each.units) for each in (cut, real)]
    assert sizes[0] == sizes[1]
    parts = [gpu_need(each, machine(), job_of(tokens=64)).parts for each in (cut, real)]
    assert parts[0] == parts[1]


def test_a_fill_without_files_has_the_whole_stacks_of_one_layer_besides() -> None:
    config = transformers.MixtralConfig(
        num_hidden_layers=2, hidden_size=64, intermediate_size=96, vocab_size=100
    )
    with torch.device("meta"):
        model = transformers.MixtralForCausalLM(config)
    model.set_experts_implementation("eager")
    job = job_of(expert_tile=3)
    planned = shape_in(job, shape_of(model))
    source = open_source(inf.tile_experts(model, experts=3), lambda _name, _out: None)
    assert source.converting_bytes == 8 * 3 * 64 * 96 * 4
    one, two = (ram_beside(planned, machine(gpus=gpus), job) for gpus in (1, 2))
    assert one.fill_without_files == one.passing["fill"] + source.converting_bytes
    assert two.fill_without_files == two.passing["fill"] + 2 * source.converting_bytes


def test_every_part_of_a_plan_cuts_the_model_as_its_job_says() -> None:
    whole, there, job = shape("qwen"), machine(gpus=2), job_of(expert_tile=2)
    cut = cut_experts(whole, 2)
    for part in (gpu_need, bytes_of_rank, stages):
        assert part(whole, there, job) == part(cut, there, job)
        assert part(whole, there, job) != part(whole, there, job_of())
    one, other = (predict(each, there, job) for each in (whole, cut))
    assert (one.ram, one.gpu, one.exchanged) == (other.ram, other.gpu, other.exchanged)
    assert outside(whole, one) == outside(cut, one)


@given(experts=st.integers(1, 7), chosen=st.integers(1, 7), tile=st.integers(1, 7))
def test_one_token_touches_the_tiles_of_the_experts_that_it_chose(
    experts: int, chosen: int, tile: int
) -> None:
    chosen, tile = min(chosen, experts), min(tile, experts)
    choices = list(itertools.combinations(range(experts), chosen))
    share = sum(choice[0] < tile for choice in choices) / len(choices)
    assert touched_share(experts, chosen, tile, 1) == pytest.approx(share)
    # Tokens choose independently.
    assert touched_share(experts, chosen, tile, 3) == pytest.approx(1 - (1 - share) ** 3)


def test_experts_without_tokens_are_not_gathered_and_updated_all_the_same() -> None:
    whole = shape("qwen")
    none = {"resident": {"params": 0.0, "optim": 0.0}}
    few = job_of(tokens=4, **none)
    uncut, cut = (predict(whole, machine(), few.replace(expert_tile=tile)) for tile in (0, 1))
    assert uncut.touched == 1.0
    touched = 1 - (1 - 8 / 128) ** 4
    stack = LAYERS * 128 * 3 * 4096 * 1536
    share = 1 - (1 - touched) * stack / whole.params
    assert cut.touched == pytest.approx(share, rel=1e-3)
    # Forward takes parameters from the update; backward reads them.
    assert uncut.moved.params_read == pytest.approx(2 * whole.params, rel=1e-3)
    assert cut.moved.params_read == pytest.approx(share * uncut.moved.params_read, rel=1e-3)
    assert cut.moved.states == uncut.moved.states
    assert cut.copied.h2d < uncut.copied.h2d
    # Enough tokens touch all.
    many = predict(whole, machine(), job_of(expert_tile=1, **none))
    assert many.touched == pytest.approx(1.0)
    assert gathered_share(whole, 0, 1) == 1.0
    # With one micro-batch all gathers lie in the windows of these updates.
    for update in ("backward", "delayed"):
        changed = few.replace(update=update)
        before, after = (
            predict(whole, machine(), changed.replace(expert_tile=tile)).moved for tile in (0, 1)
        )
        off = before.params_read - after.params_read
        # Two bytes of a parameter, read once less: the update reads what no token touched, as well.
        assert off == pytest.approx(2 * (1 - share) * whole.params, rel=1e-3)
        assert before.beside_states.read - after.beside_states.read == pytest.approx(off)


def test_a_stack_that_does_not_fit_is_cut_into_the_largest_tiles_that_do() -> None:
    found = shape("deepseek")
    # A stack of 256 experts is 21 GiB.
    assert found.largest_unit_bytes == 256 * 3 * 7168 * 2048 * 2
    tiles = []
    for gib in (60, 40, 23.6):
        there = dataclasses.replace(machine(), gpu_mem_bytes=gib * GIB)
        job = job_of(micro_batches=2, tokens=8192)
        (way,) = [way for way in ways_to_fit(found, there, job) if "stacks" in way.name]
        tiles.append(way.job.expert_tile)
        assert way.how == f"inf.tile_experts(model, experts={tiles[-1]})"
        assert way.need == gpu_need(found, there, way.job)
        assert way.need.fits
        twice = way.job.replace(expert_tile=2 * tiles[-1])
        assert not gpu_need(found, there, twice).fits
    assert tiles == sorted(tiles, reverse=True)
    assert tiles[0] > tiles[-1]


def test_the_answer_names_the_change_with_which_it_fits() -> None:
    found = shape("deepseek")
    there = dataclasses.replace(machine(), gpu_mem_bytes=48 * GIB)
    now = predict(found, there, job_of(tokens=8192, micro_batches=2))
    assert not now.fits
    assert "stacks in tiles of" in now.why_not[0]
    best = one_change(found, now, choose_micro_batches=True)[0]
    assert best.name.startswith("stacks in tiles of")
    assert best.prediction.fits


def test_adapters_are_on_whole_layers_so_no_change_cuts_one() -> None:
    adapted = shape("qwen").with_adapters()
    assert (adapted.params, adapted.has_stacks, adapted.has_linears) == (
        shape("qwen").params, False, False
    )  # fmt: skip
    job = job_of(tokens=4096)
    least = gpu_need(shape("qwen"), machine(), job.replace(expert_tile=64)).bytes
    tight = dataclasses.replace(machine(), gpu_mem_bytes=least)
    ways = [
        {way.name.partition(" in ")[0] for way in ways_to_fit(each, tight, job)}
        for each in (shape("qwen"), adapted)
    ]
    assert "stacks" in ways[0]
    assert not ways[1] & {"stacks", "linears"}
    assert set(tilings_of(adapted, job_of(), ())) == {0}


@pytest.mark.slow
def test_deepseek_v3_has_the_parameters_that_its_report_names() -> None:
    found = shape("deepseek", 61)
    assert found.params == 671_026_404_352
    # 37 billion with the input embedding, as its report says.
    assert found.active_params + found.vocabulary * found.width == 37_552_282_624
