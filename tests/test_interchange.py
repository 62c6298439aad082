"""Values in and out of an offloaded model in the formats of others: same logits, same masters, and
nothing that unpickles."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import infinity as inf
from infinity._src.checkpoint.formats.safetensors_writer import write_file
from infinity._src.memory.heap import Heap
from tests import models
from tests.harness import assert_same, policy, states_of, train
from tests.unit.memory.test_heap import Blocks, resident

NVME = {"params": "nvme", "optim": "nvme", "ram": "min"}
CPU = {"params": "cpu", "optim": "cpu"}


@contextmanager
def opened(
    factory: Callable[[], nn.Module], place: Path, *, seed: int = 0, **values: Any
) -> Iterator[tuple[nn.Module, inf.AdamW]]:
    """An offloaded model with bf16 parameters, and an optimizer for what is trained."""
    values = values or CPU
    torch.manual_seed(seed)
    model = factory().eval()
    # as `from_pretrained` makes it: buffers (rotary frequencies) stay in fp32
    for param in model.parameters():
        param.data = param.data.bfloat16()
    inf.offload(model, policy(None if values == CPU else place, **values))
    try:
        yield model, inf.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    finally:
        inf.handle(model).close()


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=models.token_batches(1)[0]["input_ids"]).logits


# -- safetensors -----------------------------------------------------------------------------------


@pytest.mark.parametrize("factory", [models.llama, models.gpt2], ids=["llama", "gpt2, tied"])
@pytest.mark.parametrize("shard", ["2GiB", "20KiB"])
def test_an_exported_model_loads_in_transformers_and_gives_the_same_logits(
    factory: Callable[[], Any], shard: str, tmp_path: Path
) -> None:
    with opened(factory, tmp_path, **NVME) as (model, optimizer):
        train(model, optimizer)
        out = tmp_path / "out"
        inf.export_safetensors(model, out, shard_bytes_max=shard)
        model.config.save_pretrained(out)
        expected = logits(model)
        kind = type(model)
    assert (out / "model.safetensors.index.json").exists() == (shard != "2GiB")
    loaded = kind.from_pretrained(out, dtype=torch.bfloat16, attn_implementation="eager")
    assert torch.equal(logits(loaded.eval()), expected)


@pytest.mark.parametrize("streams", ["export", "load"])
def test_what_streams_gives_back_what_malloc_kept(
    tmp_path: Path, streams: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """64 MiB of small blocks, free between others; training would keep them for its units."""
    if not Heap.for_stream().spare_bytes:
        pytest.skip("malloc is tuned, or reports nothing")
    monkeypatch.setattr("infinity._src.memory.heap.SPARE_UNITS", 1 << 20)
    blocks, out = Blocks(), tmp_path / "out"
    with opened(models.llama, tmp_path, **NVME) as (model, _):
        inf.export_safetensors(model, out)
        small = [blocks.take(64 << 10) for _ in range(2048)]
        for address in small[::2]:
            blocks.free(address)
        before = resident()
        if streams == "export":
            inf.export_safetensors(model, out)
        else:
            inf.load_safetensors(model, out)
        given_back = before - resident()
    for address in small[1::2]:
        blocks.free(address)
    assert given_back > 40 << 20


def test_an_export_takes_names_from_a_function_and_leaves_out_what_it_drops(
    tmp_path: Path,
) -> None:
    def name_of(name: str) -> str | None:
        # A tied weight keeps its first name that is not filtered out: here the head's.
        dropped = ".h.0." in name or name == "transformer.wte.weight"
        return None if dropped else name.replace("transformer", "t")

    with opened(models.gpt2, tmp_path, **NVME) as (model, _):
        inf.export_safetensors(model, tmp_path / "out", names=name_of, shard_bytes_max="20KiB")
        values = model.state_dict()
        with pytest.raises(ValueError, match="two tensors would get the name w in"):
            inf.export_safetensors(model, tmp_path / "no", names=lambda _: "w")
        with pytest.raises(ValueError, match="or a function of a name"):
            inf.export_safetensors(model, tmp_path / "no", names="hf")  # type: ignore[arg-type]
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    found = {name: value for file in files for name, value in load_file(file).items()}
    assert len(files) > 1
    expected = {new: value for name, value in values.items() if (new := name_of(name)) is not None}
    assert_same(found, expected)
    assert "lm_head.weight" in found
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == found.keys()
    assert not (tmp_path / "no").exists()


def test_exported_masters_are_the_masters_and_load_back_whole(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with opened(models.gpt2, tmp_path, **NVME) as (model, optimizer):
        train(model, optimizer)
        inf.export_safetensors(model, out, masters=True, shard_bytes_max="30KiB")
        expected, values = states_of(model), model.state_dict()
    files = {
        name: value for file in out.glob("*.safetensors") for name, value in load_file(file).items()
    }
    assert {value.dtype for value in files.values()} == {torch.float32}
    for name, state in expected.items():
        assert torch.equal(files[name], state["master"])
    with opened(models.gpt2, tmp_path, seed=1) as (other, _):
        assert inf.load_safetensors(other, out) == ((), ())
        found = states_of(other)
        assert_same(
            {name: state["master"] for name, state in expected.items()},
            {n: s["master"] for n, s in found.items()},
        )
        assert_same(dict(values), dict(other.state_dict()))
        assert all(not state["exp_avg"].any() for state in found.values())


@pytest.mark.parametrize("state", ["exact", "bf16", "compact"])
def test_a_bf16_file_leaves_nothing_of_the_masters_and_all_of_the_moments(
    state: str, tmp_path: Path
) -> None:
    with opened(models.llama, tmp_path, **NVME, state=state) as (model, optimizer):
        train(model, optimizer)
        inf.export_safetensors(model, tmp_path / "out", shard_bytes_max="20KiB")
        before, saved = (
            states_of(model),
            {k: v.clone() for k, v in model.state_dict().items()},
        )
        train(model, optimizer, 1)
        trained = states_of(model)
        assert inf.load_safetensors(model, tmp_path / "out") == ((), ())
        assert_same(saved, dict(model.state_dict()))
        for name, after in states_of(model).items():
            assert torch.equal(after["master"], saved[name].float())
            assert not torch.equal(after["master"], before[name]["master"])
            assert_same(
                {k: v for k, v in after.items() if k != "master"},
                {k: v for k, v in trained[name].items() if k != "master"},
            )
        train(model, optimizer, 1)


class Odd(nn.Module):
    """A persistent buffer under two names, one that is not persistent, whole numbers, a frozen
    parameter, an empty one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight.requires_grad_(False)
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.register_buffer("scale", torch.rand(3))
        self.register_buffer("same", self.scale)
        self.register_buffer("count", torch.randint(1000, (2,)))
        self.register_buffer("table", torch.rand(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x)


def test_buffers_and_frozen_parameters_come_too(tmp_path: Path) -> None:
    with opened(Odd, tmp_path) as (model, _):
        inf.export_safetensors(model, tmp_path / "out")
        saved, table = dict(model.state_dict()), model.table.clone()
    with opened(Odd, tmp_path, seed=1) as (model, _):
        assert not torch.equal(model.table, table)
        inf.load_safetensors(model, tmp_path / "out" / "model.safetensors")
        assert_same(saved, dict(model.state_dict()))
        assert not torch.equal(model.table, table)
        assert model.same is model.scale


def test_without_an_optimizer_values_are_rounded_to_the_parameters(tmp_path: Path) -> None:
    model = inf.offload(nn.Linear(4, 4).bfloat16(), inf.Policy(params="cpu"))
    given = {"weight": torch.rand(4, 4), "bias": torch.rand(4)}
    save_file(given, tmp_path / "x.safetensors")
    inf.load_safetensors(model, tmp_path / "x.safetensors")
    assert_same({name: value.bfloat16() for name, value in given.items()}, dict(model.state_dict()))
    inf.handle(model).close()


def edited(
    change: Callable[[dict[str, torch.Tensor]], object], place: Path, model: nn.Module
) -> Path:
    tensors = {
        name: value.clone() + 1 for name, value in model.state_dict().items() if name != "same"
    }
    change(tensors)
    save_file(tensors, place / "model.safetensors")
    return place


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("first.bias"), r"missing: first\.bias; strict=False"),
        (lambda t: t.pop("scale"), r"missing: scale; strict=False"),
        (lambda t: t.update(extra=torch.ones(1)), r"unexpected: extra; strict=False"),
        (
            lambda t: t.update({"first.bias": torch.ones(5)}),
            r"first\.bias has shape \(5,\) there and \(4,\) in the model",
        ),
        (
            lambda t: t.update({"first.bias": torch.ones(4).long()}),
            r"first\.bias is torch\.int64 in the source",
        ),
        (
            lambda t: t.update({"count": torch.ones(2)}),
            r"count is torch\.float32 in the source",
        ),
    ],
)
def test_what_does_not_fit_is_named_before_anything_is_written(
    change: Callable[[dict[str, torch.Tensor]], object], message: str, tmp_path: Path
) -> None:
    with opened(Odd, tmp_path) as (model, _):
        before = {name: value.clone() for name, value in model.state_dict().items()}
        with pytest.raises(ValueError, match=message):
            inf.load_safetensors(model, edited(change, tmp_path, model))
        assert_same(before, dict(model.state_dict()))


def test_not_strict_takes_what_fits_and_says_the_rest(tmp_path: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["first.bias"]
        tensors["extra"] = torch.ones(1)

    with opened(Odd, tmp_path) as (model, _):
        before = {name: value.clone() for name, value in model.state_dict().items()}
        left_out = inf.load_safetensors(model, edited(change, tmp_path, model), strict=False)
        assert left_out.missing == ("first.bias",)
        assert left_out.unexpected == ("extra",)
        after = model.state_dict()
        assert torch.equal(after["first.bias"], before["first.bias"])
        assert torch.equal(after["count"], before["count"] + 1)


@pytest.mark.parametrize(
    "file", ["../model.safetensors", "/etc/passwd", "a/b.safetensors", "..", 3]
)
def test_an_index_that_points_elsewhere_is_refused(file: object, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with opened(Odd, tmp_path) as (model, _):
        inf.export_safetensors(model, out)
        shutil.copy(out / "model.safetensors", tmp_path)
        index = out / "model.safetensors.index.json"
        index.write_text(json.dumps({"weight_map": dict.fromkeys(model.state_dict(), file)}))
        with pytest.raises(ValueError, match="must lie beside their index"):
            inf.load_safetensors(model, out)
        index.write_text("[]")
        with pytest.raises(ValueError, match="no readable weight_map"):
            inf.load_safetensors(model, out)
        index.write_text(json.dumps({"weight_map": {"first.weights": "model.safetensors"}}))
        with pytest.raises(ValueError, match=r"first\.weight"):
            inf.load_safetensors(model, out)
        index.write_text(
            json.dumps({"weight_map": {**dict.fromkeys(model.state_dict(), "model.safetensors")}})
        )
        (out / "model.safetensors").write_bytes(b"no such thing")
        with pytest.raises(ValueError, match="not a whole safetensors file"):
            inf.load_safetensors(model, out)


def test_inside_gather_a_load_is_refused(tmp_path: Path) -> None:
    with opened(Odd, tmp_path) as (model, _):
        inf.export_safetensors(model, tmp_path / "out")
        with (
            inf.handle(model).gather(model.parameters()),
            pytest.raises(RuntimeError, match="in use"),
        ):
            inf.load_safetensors(model, tmp_path / "out")


def test_an_export_that_fails_leaves_nothing_half_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(Odd, tmp_path) as (model, _):
        (tmp_path / "file").write_text("")
        with pytest.raises(OSError, match="file"):
            inf.export_safetensors(model, tmp_path / "file" / "out")

        def broken(*_: object) -> None:
            raise OSError(5, "Input/output error")

        with pytest.raises(FileExistsError):
            inf.export_safetensors(model, tmp_path / "file")
        monkeypatch.setattr("os.fsync", broken)
        with pytest.raises(OSError, match=r"model\.safetensors"):
            inf.export_safetensors(model, tmp_path / "out")
        assert list((tmp_path / "out").iterdir()) == []


def test_what_a_killed_export_left_goes_with_the_next(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    for name in ("model-00001-of-00007.safetensors", "model.safetensors.index.json", "model-mine"):
        (out / f"{name}.partial").write_text("")
    with opened(Odd, tmp_path) as (model, _):
        inf.export_safetensors(model, out)
    assert sorted(path.name for path in out.iterdir()) == [
        "model-mine.partial",
        "model.safetensors",
    ]


def test_an_export_that_fails_half_way_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its shards have the same names as those before: none of them is replaced before all are
    written."""
    out = tmp_path / "out"
    with opened(models.gpt2, tmp_path) as (model, _):
        inf.export_safetensors(model, out, shard_bytes_max=1)
        before = {path.name: path.read_bytes() for path in out.iterdir()}
        assert len(before) > 2
        with torch.no_grad(), inf.handle(model).gather(model.parameters()):
            for param in model.parameters():
                param.add_(1)
        written: list[object] = []

        def second_fails(*given: object, **options: object) -> None:
            written.append(given)
            if len(written) == 2:
                raise OSError(28, "No space left on device", "model-00002")
            write_file(*given, **options)  # type: ignore[arg-type]

        with monkeypatch.context() as patch:
            writer = "infinity._src.checkpoint.formats.safetensors_writer"
            patch.setattr(f"{writer}.write_file", second_fails)
            with pytest.raises(OSError, match="No space"):
                inf.export_safetensors(model, out, shard_bytes_max=1)
        assert {path.name: path.read_bytes() for path in out.iterdir()} == before
        inf.export_safetensors(model, out, shard_bytes_max=1)
        after = {path.name: path.read_bytes() for path in out.iterdir()}
    assert after.keys() == before.keys()
    assert after != before


def test_an_export_replaces_an_earlier_one_of_another_size(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with opened(models.ListMoe, tmp_path) as (model, _):
        inf.export_safetensors(model, out)
        inf.export_safetensors(model, out, shard_bytes_max=20_000)
        files = {path.name for path in out.glob("*.safetensors")}
        weight_map = json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
        assert files == set(weight_map.values())
        inf.export_safetensors(model, out)
    assert [path.name for path in out.iterdir()] == ["model.safetensors"]
