"""Cases in which the conversion of a checkpoint of the hub could lose or change values: quantized
weights, two tensors for one name, tiles, older releases of transformers.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import infinity as inf
from infinity._src.checkpoint.durable import initialization
from infinity._src.checkpoint.formats import hub_conversion
from infinity._src.checkpoint.formats.hub_conversion import (
    ForwardGroup,
    WholeBlocks,
    conversions_of,
    in_whole_blocks,
    plan_forward,
    plan_reverse,
)
from infinity._src.checkpoint.formats.hub_files import HubTensors
from infinity.errors import AioError, WeightsError
from tests import hub_models, models
from tests.hub_models import assert_alike, on_meta, stored_names
from tests.reading import Counted

CPU = inf.Policy(params="cpu", optim="cpu")
Offload = Callable[..., Any]


@pytest.fixture
def offload() -> Any:
    """`inf.offload` on the CPU, closed at the end."""
    held = []

    def start(model: Any, **options: Any) -> Any:
        held.append(inf.offload(model, CPU, **options))
        return model

    yield start
    for model in held:
        inf.handle(model).close()


@pytest.fixture(scope="module")
def fp8(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("fp8")
    kind, config = hub_models.tiny("deepseek_v3")
    hub_models.write(kind, config, torch.bfloat16, place)
    hub_models.quantize_fp8(place)
    return place


# -- quantized weights -----------------------------------------------------------------------------


def test_a_model_that_was_dequantized_is_exported_with_plain_weights(
    fp8: Path, offload: Offload, tmp_path: Path
) -> None:
    kind, config = hub_models.tiny("deepseek_v3")
    hub_models.write(kind, config, torch.bfloat16, tmp_path / "plain")
    model = kind.from_pretrained(fp8, dtype=torch.bfloat16)
    values = {name: value.clone() for name, value in model.state_dict().items()}
    inf.export_safetensors(offload(model), tmp_path / "out")
    assert stored_names(tmp_path / "out") == stored_names(tmp_path / "plain")
    config.save_pretrained(tmp_path / "out")
    back = kind.from_pretrained(tmp_path / "out", dtype=torch.bfloat16).state_dict()
    assert all(torch.equal(back[name], value) for name, value in values.items())


def test_scales_count_whatever_the_models_configuration_says(
    fp8: Path, offload: Offload, tmp_path: Path
) -> None:
    kind, config = hub_models.tiny("deepseek_v3")
    truth = kind.from_pretrained(fp8, dtype=torch.bfloat16)
    model = offload(kind._from_config(config, dtype=torch.bfloat16))
    inf.load_safetensors(model, fp8, strict=False)
    wanted = dict(truth.named_parameters())
    assert all(torch.equal(model.state_dict()[name], wanted[name]) for name in wanted)
    # Without the configuration nothing says what the scales are for.
    for file in fp8.glob("*.safetensors"):
        save_file(load_file(file), tmp_path / file.name)
    with pytest.raises(WeightsError, match=r"weight_scale_inv, which nothing multiplies it with"):
        inf.load_safetensors(model, tmp_path, strict=False)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(WeightsError, match=r"config\.json: it cannot be read"):
        inf.load_safetensors(model, tmp_path, strict=False)
    (tmp_path / "config.json").write_text(
        json.dumps({"quantization_config": {"quant_method": "x"}})
    )
    with pytest.raises(WeightsError, match=r"quantized \(x\)"):
        inf.load_safetensors(model, tmp_path, strict=False)
    assert all(torch.equal(model.state_dict()[name], wanted[name]) for name in wanted)


@pytest.fixture(scope="module")
def partial(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights in fp8 whose last blocks are partial, in rows and in columns."""
    place = tmp_path_factory.mktemp("partial")
    kind, config = hub_models.tiny("deepseek_v3", **hub_models.PARTIAL)
    hub_models.write(kind, config, torch.bfloat16, place)
    hub_models.quantize_fp8(place, partial=True)
    return place


ATTENTION = "model.layers.0.self_attn.kv_a_proj_with_mqa.weight"
EXPERT = "model.layers.1.mlp.experts.2.down_proj.weight"


def test_last_blocks_that_are_partial_have_scales_of_their_own(
    partial: Path, offload: Offload, tmp_path: Path
) -> None:
    kind, config = hub_models.tiny("deepseek_v3", **hub_models.PARTIAL)
    plain = hub_models.dequantized_fp8(partial)
    assert plain[ATTENTION].shape == (24, 32)
    assert plain[EXPERT].shape == (32, 24)
    (tmp_path / "plain").mkdir()
    save_file(plain, tmp_path / "plain" / "model.safetensors", {"format": "pt"})
    config.save_pretrained(tmp_path / "plain")
    truth = kind.from_pretrained(tmp_path / "plain", dtype=torch.bfloat16)
    model = offload(on_meta(kind, config), load=partial)
    assert_alike(model, truth)
    inf.export_safetensors(model, tmp_path / "out")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == plain.keys()
    assert all(torch.equal(found[name], value) for name, value in plain.items())
    # Some experts at a time, and into a model that is there.
    with torch.no_grad(), inf.handle(model).gather(list(model.parameters())):
        for parameter in model.parameters():
            parameter.zero_()
    assert inf.load_safetensors(model, partial) == ((), ())
    assert_alike(model, truth)


@pytest.mark.parametrize(
    ("name", "shapes"),
    [(ATTENTION, ((24, 32), (2, 2), (1, 2))), (EXPERT, ((32, 24), (2, 2), (1, 2)))],
    ids=["alone", "expert"],
)
def test_scales_that_are_not_one_for_each_block_are_refused(
    name: str, shapes: Any, partial: Path, tmp_path: Path
) -> None:
    kind, config = hub_models.tiny("deepseek_v3", **hub_models.PARTIAL)
    files = [load_file(file) for file in partial.glob("*.safetensors")]
    tensors = {key: value for held in files for key, value in held.items()}
    # With one row of scales less the weight could have larger blocks.
    tensors[f"{name}_scale_inv"] = tensors[f"{name}_scale_inv"][:1].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((partial / "config.json").read_bytes())
    of, wanted, found = (re.escape(str(shape)) for shape in shapes)
    with pytest.raises(
        WeightsError,
        match=rf"has {re.escape(name)} of shape {of} with scales of shape {found}; blocks of "
        rf"16 x 16 have some of shape {wanted}: state the weight_block_size",
    ) as raised:
        inf.offload(on_meta(kind, config), CPU, load=tmp_path)
    assert raised.value.tensors == (name,)
    assert raised.value.path == str(tmp_path)


def fp8_of(shape: tuple[int, ...], grid: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(shape).to(torch.float8_e4m3fn), torch.rand(grid) + 0.5


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    block=st.none() | st.tuples(st.integers(1, 20), st.integers(1, 20)),
    leading=st.sampled_from([(), (3,)]),
)
def test_blocks_of_any_size_are_dequantized_element_by_element(
    sizes: tuple[int, int], block: tuple[int, int] | None, leading: tuple[int, ...]
) -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    theirs = Fp8Dequantize(None)
    grid = tuple(-(-size // each) for size, each in zip(sizes, block or sizes, strict=True))
    pairs = [fp8_of((*leading, *sizes), (*leading, *grid)) for _ in range(2)]
    rows, columns = (
        torch.arange(size) // each for size, each in zip(sizes, block or sizes, strict=True)
    )
    wanted = [weight.float() * scale[..., rows, :][..., columns] for weight, scale in pairs]
    weights, scales = ([pair[index] for pair in pairs] for index in (0, 1))
    ours = WholeBlocks(theirs, block)
    alone = ours.convert({"weight": weights[:1], "weight_scale_inv": scales[:1]})
    assert torch.equal(alone["weight"], wanted[0])  # type: ignore[arg-type]
    among = {"a.weight": weights, "a.weight_scale_inv": scales, "b.weight": [scales[0]]}
    made = ours.convert(among)
    assert made.keys() == {"a.weight", "b.weight"}
    assert all(torch.equal(*pair) for pair in zip(made["a.weight"], wanted, strict=True))
    assert made["b.weight"][0] is scales[0]
    if not any(size % each for size, each in zip(sizes, block or sizes, strict=True)):
        given_them = theirs.convert({"weight": weights[:1], "weight_scale_inv": scales[:1]})
        assert torch.equal(alone["weight"], given_them["weight"])  # type: ignore[arg-type]


def test_values_of_four_bits_and_single_scales_are_left_to_transformers() -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    theirs = Fp8Dequantize(None)
    packed = torch.randint(-128, 127, (6, 24), dtype=torch.int8)
    weight, _ = fp8_of((6, 24), ())
    for pair in ((packed, torch.rand(6, 3)), (weight, torch.tensor(0.5)), (weight, torch.ones(1))):
        names = dict(zip(("weight", "weight_scale_inv"), ([value] for value in pair), strict=True))
        made = WholeBlocks(theirs, (4, 16)).convert(dict(names))
        assert torch.equal(made["weight"], theirs.convert(names)["weight"])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"count mismatch for a\.weight"):
        WholeBlocks(theirs, (4, 16)).convert(
            {"a.weight": [weight] * 2, "a.weight_scale_inv": [torch.ones(2, 2)]}
        )


def test_a_release_that_dequantizes_in_another_way_is_refused() -> None:
    kind, config = hub_models.tiny("deepseek_v3")
    mapping = conversions_of(on_meta(kind, config))
    with pytest.raises(WeightsError, match=r"in fp8, and transformers .* has no operation"):
        in_whole_blocks(mapping, (16, 16), "there")


# -- fills that break off --------------------------------------------------------------------------


@pytest.mark.parametrize("other", ["", "release", "configuration"])
def test_a_fill_goes_on_with_the_conversion_that_it_began_with_alone(
    other: str, fp8: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    import transformers

    kind, config = hub_models.tiny("deepseek_v3")
    hub, drive = shutil.copytree(fp8, tmp_path / "hub"), tmp_path / "drive"
    drive.mkdir()
    truth = on_meta(kind, config)
    with Counted() as whole:
        inf.offload(truth, CPU, load=hub)
    policy = inf.Policy(params="nvme", optim="nvme", nvme=drive, ram="min", durable=True)
    monkeypatch.setattr(initialization, "NOTE_EVERY_S", 0)
    with Counted(whole.bytes // 2), pytest.raises(AioError):
        inf.offload(on_meta(kind, config), policy, load=hub)
    if other == "release":
        monkeypatch.setattr(transformers, "__version__", "5.99.0")
    elif other == "configuration":
        changed = json.loads((hub / "config.json").read_text())
        changed["quantization_config"]["activation_scheme"] = "static"
        (hub / "config.json").write_text(json.dumps(changed))
    model = on_meta(kind, config)
    with Counted() as counted:
        inf.offload(model, policy, load=hub)
    assert (counted.bytes == whole.bytes) is bool(other)
    assert counted.bytes > 0
    assert ("it differs in its conversion" in caplog.text) is bool(other)
    assert_alike(model, truth)
    inf.handle(model).close()
    inf.handle(truth).close()


# -- names -----------------------------------------------------------------------------------------


def test_two_tensors_of_the_model_that_get_one_name_are_refused() -> None:
    from transformers.core_model_loading import WeightRenaming

    model = models.make(models.llama)
    both = [WeightRenaming(r"\.one\.", rf".{name}.") for name in ("q_proj", "k_proj")]
    likes = {name: value.to("meta") for name, value in model.state_dict().items()}
    with pytest.raises(ValueError, match=r"are both .*\.one\.weight; export with names='modules'"):
        plan_reverse(model, likes, both)


def test_a_fused_tensor_and_its_parts_are_refused_in_either_order() -> None:
    kind, config = hub_models.tiny("mixtral")
    model = on_meta(kind, config)
    for whole, parts in (("block_sparse_moe", "mlp"), ("mlp", "block_sparse_moe")):
        names = [f"model.layers.0.{whole}.experts.gate_up_proj"]
        names += [f"model.layers.0.{parts}.experts.0.w1.weight"]
        with pytest.raises(WeightsError, match=r"which are both \S+\.gate_up_proj of"):
            plan_forward(model, names, torch.empty, conversions_of(model), "files")


def test_what_a_model_ignores_is_matched_by_the_names_that_it_has_itself(tmp_path: Path) -> None:
    kind, config = hub_models.tiny("mixtral")
    hub_models.write(kind, config, torch.bfloat16, tmp_path)
    extra = "model.layers.0.block_sparse_moe.extra.weight"
    files = [load_file(file) for file in tmp_path.glob("*.safetensors")]
    everything = {name: value for tensors in files for name, value in tensors.items()}
    save_file(everything | {extra: torch.zeros(2)}, tmp_path / "all.safetensors")
    for pattern, is_ignored in ((r"\.mlp\.extra", True), (r"\.block_sparse_moe\.extra", False)):
        model = on_meta(kind, config)
        model._keys_to_ignore_on_load_unexpected = {pattern}
        assert (extra not in HubTensors(model, tmp_path / "all.safetensors").names()) is is_ignored


def test_other_files_beside_the_model_are_left_alone(offload: Offload, tmp_path: Path) -> None:
    truth = models.make(models.llama)
    truth.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").exists()
    save_file({"tok_embeddings.weight": torch.zeros(2)}, tmp_path / "consolidated.safetensors")
    with torch.device("meta"):
        model = models.make(models.llama)
    assert_alike(offload(model, load=tmp_path), truth)


# -- tiles -----------------------------------------------------------------------------------------


@pytest.fixture
def molmo(tmp_path: Path) -> tuple[Any, Any]:
    """Attention is split, with the sizes of the model's parameters."""
    from transformers import Molmo2TextConfig, Molmo2TextModel

    config = hub_models.shrunk(Molmo2TextConfig())
    hub_models.write(Molmo2TextModel, config, torch.bfloat16, tmp_path)
    assert any("att_proj" in name for name in stored_names(tmp_path))
    return Molmo2TextModel, config


def test_weights_in_tiles_are_split_by_their_whole_shapes(
    molmo: Any, offload: Offload, tmp_path: Path
) -> None:
    kind, config = molmo
    model = inf.tile_linears(on_meta(kind, config), tiles=2, names=["q_proj", "k_proj", "v_proj"])
    offload(model, load=tmp_path)
    truth = kind.from_pretrained(tmp_path, dtype=torch.bfloat16).state_dict()
    assert all(torch.equal(model.state_dict()[name], value) for name, value in truth.items())
    inf.export_safetensors(model, tmp_path / "out")
    assert stored_names(tmp_path / "out") == stored_names(tmp_path)


def test_tiles_of_two_groups_that_take_turns_are_converted_once(
    molmo: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, config = molmo
    converted, convert = [], ForwardGroup.convert

    def counted(self: ForwardGroup, *arguments: Any) -> Any:
        converted.append(self.first)
        return convert(self, *arguments)

    monkeypatch.setattr(ForwardGroup, "convert", counted)
    names = ["layers.0.self_attn.q_proj.weight", "layers.0.mlp.up_proj.weight"]
    for is_tiled, count in ((True, 2), (False, 6)):
        model = on_meta(kind, config)
        if is_tiled:
            inf.tile_linears(model, tiles=2, names=["q_proj", "up_proj"])
        tensors = HubTensors(model, tmp_path)
        converted.clear()
        for name in names * 3:
            tensors.read_into(name, 0, torch.empty(8, dtype=torch.bfloat16))
        assert len(converted) == count
        # Of the four groups that there are, three stay.
        for name in (*names, *(name.replace(".0.", ".1.") for name in names)):
            tensors.read(name)
        assert len(tensors._made) == (3 if is_tiled else 1)


# -- dtypes ----------------------------------------------------------------------------------------


def test_real_buffers_that_are_loaded_get_their_dtype_too(offload: Offload, tmp_path: Path) -> None:
    kind, config = hub_models.tiny("deepseek_v3")
    hub_models.write(kind, config, torch.bfloat16, tmp_path)
    truth = kind.from_pretrained(tmp_path, dtype=torch.bfloat16)
    model, kept = on_meta(kind, config), "e_score_correction_bias"
    for module in model.modules():
        if kept in module._buffers:
            module._buffers[kept] = torch.zeros(4, dtype=torch.bfloat16)
    assert_alike(offload(model, load=tmp_path), truth)
    assert {b.dtype for n, b in model.named_buffers() if kept in n} == {torch.float32}


# -- older releases --------------------------------------------------------------------------------


@pytest.fixture
def older(monkeypatch: pytest.MonkeyPatch) -> None:
    """A transformers without something that conversions need."""
    from transformers import PreTrainedModel

    monkeypatch.setattr(hub_conversion, "_NEEDED", (*hub_conversion._NEEDED, "not_there_yet"))
    monkeypatch.delattr(PreTrainedModel, "_get_dtype_plan")


@pytest.mark.usefixtures("older")
def test_an_older_release_serves_models_without_conversions(
    offload: Offload, tmp_path: Path
) -> None:
    truth = models.make(models.llama)
    truth.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = models.make(models.llama)
    assert_alike(offload(model, load=tmp_path), truth)
    inf.export_safetensors(model, tmp_path / "out")
    assert stored_names(tmp_path / "out") == stored_names(tmp_path)
    assert inf.load_safetensors(model, tmp_path / "out") == ((), ())


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3"])
def test_an_older_release_names_the_way_out(
    family: str, offload: Offload, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    kind, config = hub_models.tiny(family)
    hub_models.write(kind, config, torch.bfloat16, tmp_path)
    request.getfixturevalue("older")
    with pytest.raises(WeightsError, match=r"install transformers 5\.23 or later, or give"):
        inf.offload(on_meta(kind, config), CPU, load=tmp_path)
    model = offload(kind._from_config(config, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match=r"5\.23 or later, or export with names='modules'"):
        inf.export_safetensors(model, tmp_path / "out")
    inf.export_safetensors(model, tmp_path / "out", names="modules")
    assert inf.load_safetensors(model, tmp_path / "out") == ((), ())


@pytest.mark.usefixtures("older")
def test_an_older_release_that_would_lose_fp32_is_refused(offload: Offload, tmp_path: Path) -> None:
    models.make(models.llama).save_pretrained(tmp_path)
    with torch.device("meta"):
        model = models.make(models.llama).bfloat16()
    model._keep_in_fp32_modules_strict = {"norm"}
    with pytest.raises(WeightsError, match=r"install transformers 5\.23 or later"):
        inf.offload(model, CPU, load=tmp_path)
    model._keep_in_fp32_modules_strict = set()
    offload(model, load=tmp_path)
