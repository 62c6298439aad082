"""Directories as `from_pretrained` takes them: for each row of a table `load=` gives the same bits,
or refuses by name.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import infinity as inf
from infinity._src.checkpoint.formats.safetensors_reader import SafetensorsFiles
from infinity.errors import AioError, WeightsError
from tests import hub_models
from tests.hub_models import assert_alike, on_meta

CPU = inf.Policy(params="cpu", optim="cpu")
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
SMALL = {"num_hidden_layers": 1, "intermediate_size": 32, "vocab_size": 48}
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
Tensors = dict[str, torch.Tensor]


def llama(seed: int, **values: Any) -> Any:
    kind, config = hub_models.tiny("llama", **SMALL, **values)
    torch.manual_seed(seed)
    model = kind._from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape))
    return model


def tensors(seed: int, **values: Any) -> Tensors:
    """The tensors of a model as it is saved."""
    names = llama(seed, **values)
    tied = names.all_tied_weights_keys
    return {k: v.clone() for k, v in names.state_dict().items() if k not in tied}


def save(place: Path, *, sharded: bool, seed: int, **values: Any) -> None:
    llama(seed, **values).save_pretrained(place, max_shard_size="6KB" if sharded else "1GB")


def set_config(place: Path, **entries: Any) -> None:
    file = place / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **entries}))


def changed_index(place: Path, change: Callable[[dict[str, str], list[str]], object]) -> None:
    index = json.loads((place / INDEX).read_text())
    change(index["weight_map"], sorted(set(index["weight_map"].values())))
    (place / INDEX).write_text(json.dumps(index))


def add(file: Path, more: Tensors) -> None:
    save_file(load_file(file) | more, file, {"format": "pt"})


def only(place: Path, found: Tensors, name: str = SINGLE, **values: Any) -> None:
    """A directory of one file."""
    llama(0, **values).config.save_pretrained(place)
    save_file(found, place / name, {"format": "pt"})


# -- rows ------------------------------------------------------------------------------------------


def single(place: Path) -> None:
    save(place, sharded=False, seed=1)


def sharded(place: Path) -> None:
    save(place, sharded=True, seed=1)


def single_beside_shards(place: Path) -> None:
    single(place)
    save(place, sharded=True, seed=2)
    assert {SINGLE, INDEX} <= {file.name for file in place.iterdir()}


def single_beside_an_old_index(place: Path) -> None:
    sharded(place)
    save(place, sharded=False, seed=2)
    assert {SINGLE, INDEX} <= {file.name for file in place.iterdir()}


def other_files_beside(place: Path) -> None:
    sharded(place)
    for name in ("consolidated.safetensors", "optimizer.safetensors", "model.fp16.safetensors"):
        save_file(tensors(2), place / name)
    torch.save(tensors(2), place / "pytorch_model.bin")
    (place / "consolidated.safetensors.index.json").write_text("{}")


def file_of_the_config(place: Path) -> None:
    single(place)
    save_file(tensors(2), place / "other.safetensors")
    set_config(place, transformers_weights="other.safetensors")


def index_of_the_config(place: Path) -> None:
    single(place)
    save(place / "more", sharded=True, seed=2)
    for file in (place / "more").glob("*.safetensors"):
        file.rename(place / file.name)
    (place / "more" / INDEX).rename(place / "other.safetensors.index.json")
    set_config(place, transformers_weights="other.safetensors.index.json")


def config_of_a_release(place: Path) -> None:
    file_of_the_config(place)
    (place / "config.json").rename(place / "config.4.0.0.json")
    config = json.loads((place / "config.4.0.0.json").read_text())
    del config["transformers_weights"]
    config["configuration_files"] = ["config.4.0.0.json", "config.99.0.0.json"]
    (place / "config.json").write_text(json.dumps(config))


def shard_with_a_tensor_that_the_index_does_not_list(place: Path) -> None:
    sharded(place)
    changed_index(place, lambda names, files: names.pop(EMBEDDING))


def index_that_names_the_wrong_shard(place: Path) -> None:
    sharded(place)
    changed_index(place, lambda names, files: names.update({EMBEDDING: files[-1]}))


def tensor_in_two_shards_of_which_the_index_names_the_last(place: Path) -> None:
    sharded(place)
    last = max(place.glob("*.safetensors"))
    name = min(name for name in tensors(1) if name not in load_file(last))
    add(last, {name: tensors(2)[name]})
    changed_index(place, lambda names, files: names.update({name: files[-1]}))


def links(place: Path) -> None:
    """As the cache of the hub has them."""
    sharded(place / "blobs")
    for number, file in enumerate(list((place / "blobs").iterdir())):
        file.rename(place / "blobs" / str(number))
        (place / file.name).symlink_to(Path("blobs") / str(number))


def names_of_the_base(place: Path) -> None:
    found = {name.removeprefix("model."): value for name, value in tensors(1).items()}
    only(place, found)


def tied_by_the_embedding(place: Path) -> None:
    only(place, tensors(1, tie_word_embeddings=True), tie_word_embeddings=True)


def tied_by_the_head(place: Path) -> None:
    found = tensors(1, tie_word_embeddings=True)
    found[HEAD] = found.pop(EMBEDDING)
    only(place, found, tie_word_embeddings=True)


def tied_and_twice(place: Path) -> None:
    found = tensors(1, tie_word_embeddings=True)
    only(place, found | {HEAD: found[EMBEDDING].clone()}, tie_word_embeddings=True)


def tied_in_two_dtypes(place: Path) -> None:
    found = tensors(1, tie_word_embeddings=True)
    only(place, found | {HEAD: found[EMBEDDING].float()}, tie_word_embeddings=True)


def other_dtypes(place: Path) -> None:
    kinds = (torch.float32, torch.float16, torch.float64, torch.bfloat16, torch.float8_e5m2)
    found = {
        name: (torch.randn(value.shape, dtype=torch.float64)).to(kinds[index % len(kinds)])
        for index, (name, value) in enumerate(tensors(1).items())
    }
    only(place, found)


def metadata_of_another_framework(place: Path) -> None:
    only(place, {})
    save_file(tensors(1), place / SINGLE, {"format": "mlx"})


def buffers_of_older_releases(place: Path) -> None:
    only(place, tensors(1) | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)})


SAME = [
    single, sharded, single_beside_shards, single_beside_an_old_index, other_files_beside,
    file_of_the_config, index_of_the_config, config_of_a_release,
    shard_with_a_tensor_that_the_index_does_not_list, index_that_names_the_wrong_shard,
    tensor_in_two_shards_of_which_the_index_names_the_last, links, names_of_the_base,
    tied_by_the_embedding, tied_by_the_head, tied_and_twice, tied_in_two_dtypes, other_dtypes,
    metadata_of_another_framework, buffers_of_older_releases,
]  # fmt: skip


def from_the_directory(place: Path) -> Any:
    from transformers import AutoConfig, LlamaForCausalLM

    return on_meta(LlamaForCausalLM, AutoConfig.from_pretrained(place))


@pytest.mark.parametrize("write", SAME, ids=lambda write: write.__name__)
def test_a_directory_gives_what_from_pretrained_gives(
    write: Callable[[Path], None], tmp_path: Path
) -> None:
    from transformers import LlamaForCausalLM

    write(tmp_path)
    truth, info = LlamaForCausalLM.from_pretrained(
        tmp_path, dtype=torch.bfloat16, output_loading_info=True
    )
    assert not info["missing_keys"]
    model = inf.offload(from_the_directory(tmp_path), CPU, load=tmp_path)
    try:
        assert_alike(model, truth)
    finally:
        inf.handle(model).close()


@pytest.mark.parametrize("family", ["bert", "wav2vec2"])
def test_names_of_older_releases_are_renamed(family: str, tmp_path: Path) -> None:
    from transformers import CONFIG_MAPPING, MODEL_MAPPING

    config = hub_models.shrunk(CONFIG_MAPPING[family]())
    if family == "wav2vec2":
        config.conv_dim, config.num_conv_pos_embeddings = [16] * 7, 4
        config.num_conv_pos_embedding_groups = 4
    kind = MODEL_MAPPING[type(config)]
    hub_models.write(kind, config, torch.bfloat16, tmp_path)
    older = {
        "LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta",
        "parametrizations.weight.original0": "weight_g",
        "parametrizations.weight.original1": "weight_v",
    }  # fmt: skip
    for file in tmp_path.glob("*.safetensors"):
        found = load_file(file)
        for new, old in older.items():
            found = {name.replace(new, old): value for name, value in found.items()}
        save_file(found, file)
    names = hub_models.stored_names(tmp_path)
    assert any(name.endswith(("gamma", "weight_g")) for name in names)
    assert not any("parametrizations" in name for name in names)
    truth = kind.from_pretrained(tmp_path, dtype=torch.bfloat16)
    model = inf.offload(on_meta(kind, config), CPU, load=tmp_path)
    try:
        assert_alike(model, truth)
    finally:
        inf.handle(model).close()


# -- refused ---------------------------------------------------------------------------------------


def config_that_leads_out(place: Path) -> None:
    single(place)
    save_file(tensors(2), place.parent / "out.safetensors")
    set_config(place, transformers_weights="../out.safetensors")


def config_of_another_format(place: Path) -> None:
    single(place)
    set_config(place, transformers_weights="adapter_model.bin")


def config_of_a_file_that_is_gone(place: Path) -> None:
    single(place)
    set_config(place, transformers_weights="gone.safetensors")


def pickled(place: Path) -> None:
    only(place, tensors(1), "model.fp16.safetensors")
    torch.save(tensors(2), place / "pytorch_model.bin")


def pickled_shards(place: Path) -> None:
    only(place, tensors(1), "other.safetensors")
    (place / "pytorch_model.bin.index.json").write_text("{}")


def variant(place: Path) -> None:
    only(place, tensors(1), "model.fp16.safetensors")


def variant_in_shards(place: Path) -> None:
    sharded(place)
    (place / INDEX).rename(place / "model.safetensors.index.fp16.json")


def variant_in_shards_of_its_name(place: Path) -> None:
    variant_in_shards(place)
    # As newer releases of transformers name them; sorted, they come before the index.
    for shard in place.glob("model-*-of-*.safetensors"):
        shard.rename(place / shard.name.replace("model-", "model.fp16-"))


def variant_in_shards_without_an_index(place: Path) -> None:
    variant_in_shards_of_its_name(place)
    (place / "model.safetensors.index.fp16.json").unlink()


def variant_in_older_shards_without_an_index(place: Path) -> None:
    sharded(place)
    (place / INDEX).unlink()
    for shard in place.glob("model-*-of-*.safetensors"):
        shard.rename(shard.with_suffix(".fp16.safetensors"))


def adapter(place: Path) -> None:
    single(place)
    (place / "adapter_config.json").write_text('{"base_model_name_or_path": "some/base"}')


def adapter_alone(place: Path) -> None:
    adapter(place)
    (place / "config.json").unlink()


def distributed(place: Path) -> None:
    single(place)
    save_file(tensors(2), place / "shard-00000-model-00001-of-00001.safetensors")


def tensor_in_two_shards(place: Path) -> None:
    sharded(place)
    first, *_, last = sorted(place.glob("*.safetensors"))
    name = min(load_file(first))
    add(last, {name: tensors(2)[name]})


def shard_that_is_gone(place: Path) -> None:
    sharded(place)
    max(place.glob("*.safetensors")).unlink()


def tensor_that_is_nowhere(place: Path) -> None:
    sharded(place)
    file = next(f for f in place.glob("*.safetensors") if EMBEDDING in load_file(f))
    save_file(
        {k: v for k, v in load_file(file).items() if k != EMBEDDING} or {"x": torch.ones(1)}, file
    )


def tensor_that_is_missing(place: Path) -> None:
    only(place, {name: value for name, value in tensors(1).items() if name != HEAD})


def tied_with_two_values(place: Path) -> None:
    found = tensors(1, tie_word_embeddings=True)
    only(place, found | {HEAD: tensors(2)[HEAD]}, tie_word_embeddings=True)


def whole_numbers(place: Path) -> None:
    only(place, tensors(1) | {HEAD: torch.ones(48, 32, dtype=torch.int8)})


def another_shape(place: Path) -> None:
    only(place, tensors(1) | {HEAD: torch.ones(49, 32)})


def config_that_is_a_list(place: Path) -> None:
    single(place)
    (place / "config.json").write_text("[]")


REFUSED = [
    (config_that_leads_out, r'config\.json has "transformers_weights": "\.\./out.*leads out of'),
    (config_of_another_format, r'"adapter_model\.bin", which is not safetensors; name a file'),
    (config_of_a_file_that_is_gone, r"gone\.safetensors does not exist; name a file"),
    (pickled, r"pytorch_model\.bin holds the weights.*save the model as safetensors first"),
    (pickled_shards, r"pytorch_model\.bin\.index\.json holds the weights; only safetensors"),
    (variant, r"with variant='fp16'; name the file: .*model\.fp16\.safetensors"),
    (variant_in_shards, r"variant='fp16'; name the file: .*index\.fp16\.json"),
    (variant_in_shards_of_its_name, r"variant='fp16'; name the file: .*index\.fp16\.json"),
    (variant_in_shards_without_an_index, r"'fp16'; name its index, .*json, which is missing"),
    (variant_in_older_shards_without_an_index, r"'fp16'; name its index, .*, which is miss"),
    (adapter, r"returns these weights with an adapter; load= the file of the weights.*by peft"),
    (adapter_alone, r"returns some/base with an adapter; load= the directory of some/base"),
    (distributed, r"shard-00000-model-00001-of-00001\.safetensors, a part of a distributed save"),
    (tensor_in_two_shards, r"reads it from \S+, and the index names \S+; drop one"),
    (shard_that_is_gone, r"names missing files: model-.*; copy or download them"),
    (tensor_that_is_nowhere, r"does not have model\.embed_tokens\.weight, although the index"),
    (tensor_that_is_missing, r"lm_head\.weight is missing .*Build the model from the config"),
    (tied_with_two_values, r"with different values.*build it with tie_word_embeddings=False"),
    (whole_numbers, r"lm_head\.weight as torch\.int8; the model wants torch"),
    (another_shape, r"lm_head\.weight of shape \(49, 32\); the model wants \(48, 32\)"),
    (config_that_is_a_list, r"config\.json: it cannot be read \(it is a list, not an object\)"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("write", "message"), REFUSED, ids=lambda row: getattr(row, "__name__", "")
)
def test_a_directory_that_gives_another_model_is_refused(
    write: Callable[[Path], None], message: str, tmp_path: Path
) -> None:
    place = tmp_path / "model"
    place.mkdir()
    write(place)
    is_tied = "tied" in write.__name__
    model = llama(0, tie_word_embeddings=is_tied).to("meta")
    with pytest.raises((WeightsError, FileNotFoundError), match=message):
        inf.offload(model, CPU, load=place)


def test_too_few_descriptors_are_named_with_their_limit(tmp_path: Path) -> None:
    sharded(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted, held = llama(1).lm_head.weight, []
    # Above the highest descriptor, however many other tests of this process keep open.
    limit = max(int(each.name) for each in Path("/proc/self/fd").iterdir()) + 2
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    try:
        with contextlib.suppress(OSError):
            while True:
                held.append(os.dup(0))
        os.close(held.pop())
        tensors = SafetensorsFiles(tmp_path)
        held.append(os.dup(0))
        named = rf"has {limit} files open.*RLIMIT_NOFILE.*ulimit"
        with pytest.raises(AioError, match=named) as raised:
            tensors.read(HEAD)
        assert raised.value.path.endswith(".safetensors")
        os.close(held.pop())
        assert torch.equal(tensors.read(HEAD), wanted)
    finally:
        for each in held:
            os.close(each)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
