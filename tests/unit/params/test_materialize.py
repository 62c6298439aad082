"""Sources of values: callables, mappings, safetensors. Values that do not fit are named before
anything is filled.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

import infinity as inf
from infinity import tile_linears
from infinity._src.checkpoint.formats import safetensors_reader
from infinity._src.checkpoint.formats.hub_files import open_weights
from infinity._src.checkpoint.formats.safetensors_reader import SafetensorsFiles
from infinity._src.params import materialize
from infinity._src.params.discover import build, find_units
from infinity._src.params.materialize import (
    FlatValues,
    OpenSource,
    Source,
    SourceFiles,
    identity_of,
    open_source,
    place_of,
)
from infinity._src.params.unit import Flat
from infinity.errors import WeightsError
from tests import models

CPU = torch.device("cpu")


def filled(model: nn.Module, load: Source | None) -> dict[str, torch.Tensor]:
    """The parameters as the engine would put them to rest, by first name."""
    units = build(find_units(model, unit_bytes_max=1 << 29), CPU, 1)
    files = open_weights(model, Path(load)) if isinstance(load, (str, Path)) else load
    source = open_source(model, files)
    values: dict[str, torch.Tensor] = {}

    def store(flat: Flat, tensor: torch.Tensor) -> None:
        assert tensor.shape == (flat.layout.numel,)
        assert tensor.dtype == flat.dtype
        for param in flat.params:
            values[param.name] = (
                tensor[param.offset : param.offset + param.numel].view(param.shape).clone()
            )

    for unit in units:
        for flat in unit.flats:
            store(flat, whole_of(flat, source))
    source.fill_buffers(CPU)
    return values


def whole_of(flat: Flat, source: OpenSource) -> torch.Tensor:
    values = torch.empty(flat.layout.numel, dtype=flat.dtype)
    FlatValues(flat, source).fill(0, values)
    return values


def on_meta(factory: object) -> nn.Module:
    with torch.device("meta"):
        return models.make(factory)  # type: ignore[arg-type]


@pytest.mark.parametrize("case", models.CASES, ids=lambda case: case.name)
def test_all_sources_give_the_values_of_the_model(case: models.Case, tmp_path: Path) -> None:
    model = models.make(case)
    truth = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    assert_equal(filled(model, None), truth)
    state = model.state_dict()
    unique = {
        name: value.clone()
        for name, value in state.items()
        if name in truth or name in dict(model.named_buffers())
    }
    half = len(unique) // 2
    save_file(dict(list(unique.items())[:half]), tmp_path / "a.safetensors")
    save_file(dict(list(unique.items())[half:]), tmp_path / "b.safetensors")
    if case.name != "lora":  # peft moves adapters off the meta device
        assert_equal(filled(on_meta(case), state), truth)
        assert_equal(filled(on_meta(case), tmp_path), truth)
        meta = on_meta(case)
        assert_equal(filled(meta, lambda name, out: out.copy_(state[name])), truth)
        assert not any(buffer.is_meta for buffer in meta.buffers())
        for (name, mine), (_, theirs) in zip(
            meta.named_buffers(), model.named_buffers(), strict=True
        ):
            assert torch.equal(mine, theirs), name


def assert_equal(values: dict[str, torch.Tensor], truth: dict[str, torch.Tensor]) -> None:
    assert values.keys() == truth.keys()
    assert all(torch.equal(values[name], truth[name]) for name in truth)


def test_a_directory_saved_by_transformers_loads_through_its_index(tmp_path: Path) -> None:
    model = models.make(models.llama)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    truth = {name: parameter.detach() for name, parameter in model.named_parameters()}
    assert_equal(filled(on_meta(models.llama), tmp_path), truth)
    first = sorted(tmp_path.glob("*.safetensors"))[0]
    lost = sorted(safetensors_reader.read_header(first))
    first.unlink()
    with pytest.raises(FileNotFoundError, match="names missing files") as raised:
        filled(on_meta(models.llama), tmp_path)
    assert f"{first.name}, with {lost[0]}" in str(raised.value)
    assert str(raised.value).endswith("copy or download them to beside the index")


def test_tensors_in_several_files_without_an_index_are_named_with_their_bytes(
    tmp_path: Path,
) -> None:
    for file, size in (("a", 3), ("b", 4), ("c", 5)):
        save_file({"x": torch.zeros(size), file: torch.zeros(1)}, tmp_path / f"{file}.safetensors")
    with pytest.raises(
        WeightsError,
        match=r"no index to decide: x \(12 bytes in a\.safetensors, 16 bytes in b\.safetensors, "
        r"20 bytes in c\.safetensors\); name one file, move",
    ) as raised:
        filled(nn.Linear(1, 1), tmp_path)
    assert raised.value.tensors == ("x",)


def test_a_single_file_that_an_index_does_not_name_is_refused(tmp_path: Path) -> None:
    values = {
        name: {"weight": torch.full((1, 1), v), "bias": torch.zeros(1)}
        for name, v in (("model.safetensors", 1.0), ("model-00001-of-00001.safetensors", 2.0))
    }
    for name, tensors in values.items():
        save_file(tensors, tmp_path / name)
    index = tmp_path / "model.safetensors.index.json"

    def listing(file: str) -> None:
        index.write_text(json.dumps({"weight_map": dict.fromkeys(("weight", "bias"), file)}))

    listing("model-00001-of-00001.safetensors")
    with pytest.raises(WeightsError, match=r"the index does not name.*give the path of one"):
        filled(nn.Linear(1, 1), tmp_path)
    for path, value in ((tmp_path / "model.safetensors", 1.0), (index, 2.0)):
        assert filled(nn.Linear(1, 1), path)["weight"] == value
    listing("model.safetensors")
    assert filled(nn.Linear(1, 1), tmp_path)["weight"] == 1


class Asked(SafetensorsFiles):
    """Safetensors that count how often their files are requested."""

    asked = 0

    @property
    def files(self) -> SourceFiles:  # type: ignore[override]
        self.asked += 1
        return super().files


def test_a_fill_does_not_ask_for_the_files_with_each_parameter(tmp_path: Path) -> None:
    model = models.make(models.llama)
    model.save_pretrained(tmp_path)
    tensors = Asked(tmp_path)
    meta = on_meta(models.llama)
    source = open_source(meta, tensors)
    for unit in build(find_units(meta, unit_bytes_max=1 << 29), CPU, 1):
        for flat in unit.flats:
            whole_of(flat, source)
    assert tensors.asked == 0
    assert source.files.paths == (tmp_path / "model.safetensors",)


def test_ranks_that_convert_otherwise_do_not_read_alike(tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    save_file({"x": torch.zeros(1)}, file)
    ours, theirs = (SourceFiles((file,), release) for release in ("5.23.0", "5.24.0"))
    assert place_of(ours) == place_of(SourceFiles((file,), "5.23.0")) != place_of(theirs)
    assert identity_of(ours) == identity_of(theirs) != ""
    assert place_of(SourceFiles()) == identity_of(SourceFiles()) == ""


def test_a_tied_weight_may_come_under_any_of_its_names() -> None:
    model = models.make(models.gpt2)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    state["lm_head.weight"] = state.pop("transformer.wte.weight")
    values = filled(on_meta(models.gpt2), state)
    assert torch.equal(values["transformer.wte.weight"], state["lm_head.weight"])


def test_a_checkpoint_of_another_float_dtype_is_cast() -> None:
    state = {name: value.float() for name, value in models.make(models.llama).state_dict().items()}
    values = filled(on_meta(models.llama), state)
    assert torch.equal(values["lm_head.weight"], state["lm_head.weight"].bfloat16())


def test_what_does_not_fit_is_named() -> None:
    state = dict(models.make(models.llama).state_dict())
    lacking = {name: value for name, value in state.items() if name != "model.norm.weight"}
    with pytest.raises(ValueError, match=r"model\.norm\.weight is missing"):
        filled(on_meta(models.llama), lacking)
    with pytest.raises(ValueError, match="extra is unexpected"):
        filled(on_meta(models.llama), {**state, "extra": torch.zeros(1)})
    with pytest.raises(
        ValueError, match=r"model\.norm\.weight of shape \(3,\); the model wants \(32,\)"
    ):
        filled(on_meta(models.llama), {**state, "model.norm.weight": torch.zeros(3)})
    with pytest.raises(ValueError, match="int64"):
        filled(
            on_meta(models.llama),
            {**state, "model.norm.weight": torch.zeros(32, dtype=torch.int64)},
        )


def test_a_meta_model_without_a_source_is_refused() -> None:
    with pytest.raises(ValueError, match=r"on the meta device without values.*load="):
        filled(on_meta(models.llama), None)


def test_a_callable_that_fills_nothing_is_caught() -> None:
    with pytest.raises(ValueError, match=r"load\('model\.embed_tokens\.weight', tensor\)"):
        filled(on_meta(models.llama), lambda name, out: torch.zeros_like(out))


def test_a_path_without_safetensors_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no such directory"):
        filled(on_meta(models.llama), tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"has no \*\.safetensors"):
        filled(on_meta(models.llama), tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\x00" * 100)
    with pytest.raises(ValueError, match="not a whole safetensors file"):
        filled(on_meta(models.llama), tmp_path)
    with pytest.raises(ValueError, match="load=int is not known"):
        filled(on_meta(models.llama), 3)  # type: ignore[arg-type]


def test_experts_that_are_stored_apart_are_fused(tmp_path: Path) -> None:
    model = models.make(models.mixtral)
    truth = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    model.save_pretrained(tmp_path)
    assert_equal(filled(on_meta(models.mixtral), tmp_path), truth)


class Lost(nn.Module):
    """A buffer that no checkpoint has, and that no code recomputes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("table", torch.arange(4.0), persistent=False)
        self.register_buffer("count", torch.zeros(2), persistent=True)


def test_a_meta_buffer_that_cannot_be_computed_is_named() -> None:
    state = Lost().state_dict()
    with torch.device("meta"):
        model = Lost()
    with pytest.raises(ValueError, match="table is on the meta device and not persistent"):
        filled(model, state)
    assert model.table.is_meta
    model.table = torch.arange(4.0)
    filled(model, state)
    assert torch.equal(model.count, torch.zeros(2))


def test_a_buffer_that_was_loaded_has_its_values_again_after_a_set_up_that_failed() -> None:
    model = Lost()
    model.table = model.table.to("meta")  # loaded after `count`
    with pytest.raises(ValueError, match="table is on the meta device"):
        inf.offload(model, inf.Policy(), load={**model.state_dict(), "count": torch.ones(2)})
    assert torch.equal(model.count, torch.zeros(2))


def test_weights_that_a_model_on_meta_declares_tied_are_one_parameter_again() -> None:
    model: Any = models.make(models.gpt2)
    values = {name: value.detach() for name, value in model.named_parameters()}
    model.to("meta")
    assert model.lm_head.weight is not model.transformer.wte.weight
    inf.offload(model, inf.Policy(), load=values)
    assert model.lm_head.weight is model.transformer.wte.weight
    inf.handle(model).close()


@pytest.mark.parametrize("case", models.CASES, ids=lambda case: case.name)
def test_parts_of_all_ranks_are_the_whole(case: models.Case, tmp_path: Path) -> None:
    if case.name == "lora":  # peft moves adapters off the meta device
        return
    model = models.make(case)
    held = dict(model.state_dict()).items()
    unique = {id(value.untyped_storage()): (name, value.clone()) for name, value in held}
    save_file(dict(unique.values()), tmp_path / "a.safetensors")
    for world in (2, 3):
        assert_parts_are_whole(on_meta(case), tmp_path, world)


def assert_parts_are_whole(model: nn.Module, load: Source, world: int) -> None:
    units = build(find_units(model, unit_bytes_max=1 << 29), CPU, world)
    files = open_weights(model, Path(load)) if isinstance(load, (str, Path)) else load
    source = open_source(model, files)
    for unit in units:
        for flat in unit.flats:
            size, whole = flat.layout.shard_numel, whole_of(flat, source)
            for rank in range(world):
                shard = torch.empty(size, dtype=flat.dtype)
                FlatValues(flat, source, rank * size, (rank + 1) * size).fill(0, shard)
                assert torch.equal(bits(shard), bits(whole[rank * size :][:size]))
            # Pieces of any size, too.
            again, pieces = torch.empty_like(whole[:size]), FlatValues(flat, source, 0, size)
            for start in range(0, size, 100):
                pieces.fill(start, again[start : start + 100])
            assert torch.equal(bits(again), bits(whole[:size]))


def bits(values: torch.Tensor) -> torch.Tensor:
    return values.view(torch.uint8)


@given(
    sizes=st.lists(st.tuples(st.integers(1, 90), st.integers(1, 90)), min_size=1, max_size=3),
    tiles=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    world=st.integers(1, 5),
    stored=st.sampled_from([torch.float32, torch.bfloat16]),
)
@settings(max_examples=60, deadline=None)
def test_parts_of_any_shape_tile_and_rank_are_the_whole(
    tmp_path_factory: pytest.TempPathFactory,
    sizes: list[tuple[int, int]],
    tiles: tuple[int, int],
    world: int,
    stored: torch.dtype,
) -> None:
    place = tmp_path_factory.mktemp("parts")
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(*pair, dtype=torch.bfloat16) for pair in sizes))
    save_file(
        {name: torch.randn(value.shape).to(stored) for name, value in model.named_parameters()},
        place / "a.safetensors",
    )
    rows, columns = tiles
    tile_linears(model, tiles=(min(rows, *map(min, sizes)), min(columns, *map(min, sizes))))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(safetensors_reader, "PIECE_BYTES", 1000)
        patch.setattr(materialize, "BAND_BYTES", 500)
        assert_parts_are_whole(model, place, world)


class Measured(SafetensorsFiles):
    """Safetensors that record the bytes of each requested part."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.parts: list[int] = []

    def read_into(self, name: str, start: int, out: torch.Tensor) -> None:
        self.parts.append(out.nbytes)
        super().read_into(name, start, out)


def test_a_tile_of_columns_is_read_in_bands_of_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = torch.randn(60, 40)
    save_file({"0.weight": weight}, tmp_path / "a.safetensors")
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(40, 60, bias=False))
    tile_linears(model, tiles=(1, 2))
    band = 10 * 40 * weight.itemsize
    monkeypatch.setattr(materialize, "BAND_BYTES", band)
    tensors = Measured(tmp_path)
    source = open_source(model, tensors)
    found: list[torch.Tensor] = []

    def store(flat: Flat, values: torch.Tensor) -> None:
        found.extend(
            values[param.offset : param.offset + param.numel].view(param.shape)
            for param in flat.params
        )

    for unit in build(find_units(model, unit_bytes_max=1 << 29), CPU, 1):
        for flat in unit.flats:
            store(flat, whole_of(flat, source))
    assert torch.equal(torch.cat(found, 1), weight)
    assert len(tensors.parts) == 2 * 6
    assert max(tensors.parts) <= band
