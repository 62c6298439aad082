"""Values in and out of an offloaded model in the formats of others: same logits, same masters, and nothing that unpickles."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.state_dict as dcp_states
from safetensors.torch import load_file, save_file
from torch import nn

import infinity as inf
from infinity.checkpoint.dcp_reading import DCPFiles
from infinity.engine import Handle
from infinity.errors import PeerFailed
from tests import models
from tests.data.deepspeed_zero3 import make
from tests.dist.test_two_ranks import on_two_ranks

NVME = {"params": "nvme", "optim": "nvme", "ram": "min"}
CPU = {"params": "cpu", "optim": "cpu"}


@contextmanager
def opened(
    factory: Callable[[], nn.Module], place: Path, *, seed: int = 0, **values: Any
) -> Iterator[tuple[nn.Module, inf.AdamW, Handle]]:
    """An offloaded model with bf16 parameters, and an optimizer for what is trained."""
    values = values or CPU
    torch.manual_seed(seed)
    model = factory().eval()
    for param in model.parameters():  # as `from_pretrained` makes it: buffers (rotary frequencies) stay in fp32
        param.data = param.data.bfloat16()
    inf.offload(model, inf.Policy(**values, **({"nvme": place} if values != CPU else {})))
    try:
        yield model, inf.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2), inf.handle(model)
    finally:
        inf.handle(model).close()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    for batch in models.token_batches(steps):
        models.loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()


def states_of(model: nn.Module, handle: Handle) -> dict[str, dict[str, Any]]:
    """Every state of every parameter that is trained."""
    named = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    return {name: dict(handle.optimizer_state(param).items()) for name, param in named}


def assert_same(left: dict[str, Any], right: dict[str, Any]) -> None:
    assert left.keys() == right.keys()
    for name, value in left.items():
        if isinstance(value, dict):
            assert_same(value, right[name])
        elif isinstance(value, torch.Tensor):
            assert value.dtype == right[name].dtype, name
            assert torch.equal(value, right[name]), name
        else:
            assert value == right[name], name


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=models.token_batches(1)[0]["input_ids"]).logits


# -- safetensors -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("factory", [models.llama, models.gpt2], ids=["llama", "gpt2, tied"])
@pytest.mark.parametrize("shard", ["2GiB", "20KiB"])
def test_an_exported_model_loads_in_transformers_and_gives_the_same_logits(
    factory: Callable[[], Any], shard: str, tmp_path: Path
) -> None:
    with opened(factory, tmp_path, **NVME) as (model, optimizer, _):
        train(model, optimizer)
        out = tmp_path / "out"
        inf.export_safetensors(model, out, shard_bytes_max=shard)
        model.config.save_pretrained(out)
        expected = logits(model)
        kind = type(model)
    assert (out / "model.safetensors.index.json").exists() == (shard != "2GiB")
    loaded = kind.from_pretrained(out, dtype=torch.bfloat16, attn_implementation="eager")
    assert torch.equal(logits(loaded.eval()), expected)


def test_exported_masters_are_the_masters_and_load_back_whole(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with opened(models.gpt2, tmp_path, **NVME) as (model, optimizer, handle):
        train(model, optimizer)
        inf.export_safetensors(model, out, masters=True, shard_bytes_max="30KiB")
        expected, values = states_of(model, handle), model.state_dict()
    files = {name: value for file in out.glob("*.safetensors") for name, value in load_file(file).items()}
    assert {value.dtype for value in files.values()} == {torch.float32}
    for name, state in expected.items():
        assert torch.equal(files[name], state["master"])
    with opened(models.gpt2, tmp_path, seed=1) as (other, _, handle):
        assert inf.load_safetensors(other, out) == ((), ())
        found = states_of(other, handle)
        assert_same({name: state["master"] for name, state in expected.items()}, {n: s["master"] for n, s in found.items()})
        assert_same(dict(values), dict(other.state_dict()))
        assert all(not state["exp_avg"].any() for state in found.values())


@pytest.mark.parametrize("state", ["exact", "bf16", "compact"])
def test_a_bf16_file_leaves_nothing_of_the_masters_and_all_of_the_moments(state: str, tmp_path: Path) -> None:
    with opened(models.llama, tmp_path, **NVME, state=state) as (model, optimizer, handle):
        train(model, optimizer)
        inf.export_safetensors(model, tmp_path / "out", shard_bytes_max="20KiB")
        before, saved = states_of(model, handle), {k: v.clone() for k, v in model.state_dict().items()}
        train(model, optimizer, 1)
        trained = states_of(model, handle)
        assert inf.load_safetensors(model, tmp_path / "out") == ((), ())
        assert_same(saved, dict(model.state_dict()))
        for name, after in states_of(model, handle).items():
            assert torch.equal(after["master"], saved[name].float())
            assert not torch.equal(after["master"], before[name]["master"])
            assert_same({k: v for k, v in after.items() if k != "master"}, {k: v for k, v in trained[name].items() if k != "master"})
        train(model, optimizer, 1)


class Odd(nn.Module):
    """A persistent buffer under two names, one that is not persistent, whole numbers, a frozen parameter, an empty one."""

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
    with opened(Odd, tmp_path) as (model, _, _):
        inf.export_safetensors(model, tmp_path / "out")
        saved, table = dict(model.state_dict()), model.table.clone()
    with opened(Odd, tmp_path, seed=1) as (model, _, _):
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


def edited(change: Callable[[dict[str, torch.Tensor]], object], place: Path, model: nn.Module) -> Path:
    tensors = {name: value.clone() + 1 for name, value in model.state_dict().items() if name != "same"}
    change(tensors)
    save_file(tensors, place / "model.safetensors")
    return place


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("first.bias"), r"missing: first\.bias; strict=False"),
        (lambda t: t.pop("scale"), r"missing: scale; strict=False"),
        (lambda t: t.update(extra=torch.ones(1)), r"unexpected: extra; strict=False"),
        (lambda t: t.update({"first.bias": torch.ones(5)}), r"first\.bias has shape \(5,\) there and \(4,\) here"),
        (lambda t: t.update({"first.bias": torch.ones(4).long()}), r"first\.bias is a tensor of whole numbers there"),
        (lambda t: t.update({"count": torch.ones(2)}), r"count is a tensor of floating numbers there"),
    ],
)
def test_what_does_not_fit_is_named_before_anything_is_written(
    change: Callable[[dict[str, torch.Tensor]], object], message: str, tmp_path: Path
) -> None:
    with opened(Odd, tmp_path) as (model, _, _):
        before = {name: value.clone() for name, value in model.state_dict().items()}
        with pytest.raises(ValueError, match=message):
            inf.load_safetensors(model, edited(change, tmp_path, model))
        assert_same(before, dict(model.state_dict()))


def test_not_strict_takes_what_fits_and_says_the_rest(tmp_path: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["first.bias"]
        tensors["extra"] = torch.ones(1)

    with opened(Odd, tmp_path) as (model, _, _):
        before = {name: value.clone() for name, value in model.state_dict().items()}
        left_out = inf.load_safetensors(model, edited(change, tmp_path, model), strict=False)
        assert left_out.missing == ("first.bias",)
        assert left_out.unexpected == ("extra",)
        after = model.state_dict()
        assert torch.equal(after["first.bias"], before["first.bias"])
        assert torch.equal(after["count"], before["count"] + 1)


@pytest.mark.parametrize("file", ["../model.safetensors", "/etc/passwd", "a/b.safetensors", "..", 3])
def test_an_index_that_points_elsewhere_is_refused(file: object, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with opened(Odd, tmp_path) as (model, _, _):
        inf.export_safetensors(model, out)
        shutil.copy(out / "model.safetensors", tmp_path)
        index = out / "model.safetensors.index.json"
        index.write_text(json.dumps({"weight_map": dict.fromkeys(model.state_dict(), file)}))
        with pytest.raises(ValueError, match="a path is refused"):
            inf.load_safetensors(model, out)
        index.write_text("[]")
        with pytest.raises(ValueError, match="no readable weight_map"):
            inf.load_safetensors(model, out)
        index.write_text(json.dumps({"weight_map": {"first.weights": "model.safetensors"}}))
        with pytest.raises(ValueError, match=r"first\.weight"):
            inf.load_safetensors(model, out)
        index.write_text(json.dumps({"weight_map": {**dict.fromkeys(model.state_dict(), "model.safetensors")}}))
        (out / "model.safetensors").write_bytes(b"no such thing")
        with pytest.raises(ValueError, match="not a whole safetensors file"):
            inf.load_safetensors(model, out)


def test_inside_gather_a_load_is_refused(tmp_path: Path) -> None:
    with opened(Odd, tmp_path) as (model, _, handle):
        inf.export_safetensors(model, tmp_path / "out")
        with handle.gather(model.parameters()), pytest.raises(RuntimeError, match="in use"):
            inf.load_safetensors(model, tmp_path / "out")


def test_an_export_that_fails_leaves_nothing_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(Odd, tmp_path) as (model, _, _):
        (tmp_path / "file").write_text("")
        with pytest.raises(OSError, match="file"):
            inf.export_safetensors(model, tmp_path / "file" / "out")

        def broken(*_: object) -> None:
            raise OSError(5, "Input/output error")

        monkeypatch.setattr("os.fsync", broken)
        with pytest.raises(OSError, match=r"model\.safetensors"):
            inf.export_safetensors(model, tmp_path / "out")
        assert list((tmp_path / "out").iterdir()) == []


# -- torch.distributed.checkpoint --------------------------------------------------------------------------------------


def plain_fp32(factory: Callable[[], nn.Module], seed: int) -> tuple[nn.Module, torch.optim.AdamW]:
    """A model and an optimizer that know nothing of infinity."""
    torch.manual_seed(seed)
    model = factory().eval()
    return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)


def test_torch_goes_on_from_what_was_exported(tmp_path: Path) -> None:
    with opened(models.gpt2, tmp_path, **NVME) as (model, optimizer, handle):
        train(model, optimizer)
        optimizer.param_groups[0]["lr"] = 0.125
        inf.export_dcp(model, optimizer, tmp_path / "out")
        expected = states_of(model, handle)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {".metadata", "__0_0.distcp"}
    plain, adamw = plain_fp32(models.gpt2, seed=1)
    values, states = dcp_states.get_state_dict(plain, adamw)
    wanted: dict[str, Any] = {"model": values, "optim": states}
    dcp.load(wanted, checkpoint_id=tmp_path / "out", no_dist=True, planner=TiedLoad())
    dcp_states.set_state_dict(plain, adamw, model_state_dict=wanted["model"], optim_state_dict=wanted["optim"])
    assert adamw.param_groups[0]["lr"] == 0.125
    for name, param in plain.named_parameters():
        assert torch.equal(param, expected[name]["master"])
        state = adamw.state[param]
        assert state["step"] == expected[name]["step"] == 2
        assert all(torch.equal(state[moment], expected[name][moment]) for moment in ("exp_avg", "exp_avg_sq"))
    train(plain, adamw)


class TiedLoad(dcp.DefaultLoadPlanner):
    """A tied parameter is in the checkpoint once."""

    def __init__(self) -> None:
        super().__init__(allow_partial_load=True)


@pytest.mark.parametrize("masters", [True, False])
def test_a_dcp_checkpoint_comes_back_bit_for_bit(masters: bool, tmp_path: Path) -> None:
    with opened(models.llama, tmp_path, **NVME) as (model, optimizer, handle):
        train(model, optimizer)
        inf.export_dcp(model, optimizer, tmp_path / "out", masters=masters)
        expected = states_of(model, handle)
        train(model, optimizer, 1)
        once_more = states_of(model, handle)
    with opened(models.llama, tmp_path, seed=1) as (model, optimizer, handle):
        assert inf.load_dcp(model, optimizer, tmp_path / "out") == ((), ())
        assert_same(expected, states_of(model, handle))
        train(model, optimizer, 1)
        assert_same(once_more, states_of(model, handle))
    names = DCPFiles(tmp_path / "out").tensors
    assert names["model.lm_head.weight"].dtype == (torch.float32 if masters else torch.bfloat16)
    assert ("optim.state.lm_head.weight.master" in names) == (not masters)


def test_what_torch_saved_is_loaded(tmp_path: Path) -> None:
    plain, adamw = plain_fp32(models.gpt2, seed=1)
    train(plain, adamw)
    values, states = dcp_states.get_state_dict(plain, adamw)
    dcp.save({"model": values, "optim": states}, checkpoint_id=tmp_path / "out", no_dist=True)
    with opened(models.gpt2, tmp_path, **NVME) as (model, optimizer, handle):
        assert inf.load_dcp(model, optimizer, tmp_path / "out") == ((), ())
        for name, found in states_of(model, handle).items():
            param = plain.get_parameter(name)
            assert torch.equal(found["master"], param)
            assert found["step"] == 2
            assert all(torch.equal(found[moment], adamw.state[param][moment]) for moment in ("exp_avg", "exp_avg_sq"))
        assert inf.load_dcp(model, None, tmp_path / "out") == ((), ())


@dataclasses.dataclass(frozen=True)
class OnRanks:
    """All of it on two ranks, one after the other: ranks start slowly."""

    def __call__(self, rank: int, place: Path) -> dict[str, Any]:
        save_sharded(place / "sharded")
        seen: dict[str, Any] = {}
        with opened(make.Net, place, **NVME) as (model, optimizer, handle):
            model(torch.arange(6)[None]).backward()
            optimizer.step()
            seen["trained"] = states_of(model, handle)
            inf.export_safetensors(model, place / "masters", masters=True)
            inf.export_dcp(model, optimizer, place / "dcp")
        with opened(make.Net, place, seed=1 + rank, **NVME) as (model, optimizer, handle):
            assert inf.load_safetensors(model, place / "masters") == ((), ())
            seen["safetensors"] = states_of(model, handle)
            assert inf.load_dcp(model, optimizer, place / "dcp") == ((), ())
            seen["dcp"] = states_of(model, handle)
            mine = place / ("masters" if rank else "gone")  # one rank does not find its file
            with pytest.raises(PeerFailed if rank else FileNotFoundError, match=r"opening|no such directory"):
                inf.load_safetensors(model, mine)
            (place / "file").touch()
            with pytest.raises(PeerFailed if rank else OSError, match="file"):  # only rank 0 writes
                inf.export_dcp(model, optimizer, place / "file" / "out")
            with pytest.raises(PeerFailed if rank else OSError, match="file"):
                inf.export_safetensors(model, place / "file" / "out")
            assert_same(seen["dcp"], states_of(model, handle))
            inf.load_deepspeed(model, DEEPSPEED / "two_ranks_fp32")
            seen["deepspeed"] = states_of(model, handle)
        return seen


def save_sharded(directory: Path) -> None:
    """A checkpoint of two ranks of torch: columns of a matrix, uneven parts of a vector."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    values = sharded_values()
    placed = {name: distribute_tensor(value, mesh, [Shard(value.ndim - 1)]) for name, value in values.items()}
    dcp.save({"model": placed}, checkpoint_id=directory)


def sharded_values() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {"weight": torch.randn(3, 5, generator=generator), "bias": torch.randn(3, generator=generator)}


def test_two_ranks_write_and_read_all_of_it_and_fail_together(tmp_path: Path) -> None:
    place = tmp_path / "ranks"
    first, second = on_two_ranks(OnRanks(), place)
    assert_same(first, second)
    trained, expected = first["trained"], load_file(DEEPSPEED / "two_ranks_fp32" / "expected.safetensors")
    assert_same({name: state["master"] for name, state in trained.items()}, {n: s["master"] for n, s in first["safetensors"].items()})
    assert_same(trained, first["dcp"])
    for name, state in first["deepspeed"].items():
        assert torch.equal(state["master"], expected[name])
    with opened(make.Net, tmp_path, seed=1) as (model, optimizer, handle):  # what two wrote, one reads
        inf.load_dcp(model, optimizer, place / "dcp")
        assert_same(trained, states_of(model, handle))
    assert len(DCPFiles(place / "sharded").tensors["model.weight"].boxes) == 2
    with opened(lambda: nn.Linear(5, 3), tmp_path) as (model, _, handle):  # what two of torch wrote
        inf.load_dcp(model, None, place / "sharded")
        assert_same(sharded_values(), {name: state["master"] for name, state in states_of(model, handle).items()})


def test_a_second_export_into_a_directory_is_refused_and_a_broken_one_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(Odd, tmp_path) as (model, optimizer, _):
        inf.export_dcp(model, optimizer, tmp_path / "out")
        with pytest.raises(ValueError, match="has a checkpoint already"):
            inf.export_dcp(model, optimizer, tmp_path / "out")
        with pytest.raises(ValueError, match="holds no parameter of this model"), opened(Odd, tmp_path) as (other, _, _):
            inf.export_dcp(other, optimizer, tmp_path / "other")
        saved = dict(model.state_dict())

        def broken(*_: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(torch, "save", broken)
        with pytest.raises(OSError, match="No space"):
            inf.export_dcp(model, optimizer, tmp_path / "third")
        assert list((tmp_path / "third").iterdir()) == []
    with opened(Odd, tmp_path, seed=1) as (model, optimizer, _):
        inf.load_dcp(model, optimizer, tmp_path / "out")
        assert_same(saved, dict(model.state_dict()))


def test_states_that_do_not_fit_are_named_before_anything_is_written(tmp_path: Path) -> None:
    with opened(Odd, tmp_path) as (model, optimizer, handle):
        inf.export_dcp(model, None, tmp_path / "model")
        inf.export_dcp(model, optimizer, tmp_path / "adamw")
        train_odd(model, optimizer)
        before = states_of(model, handle)
        with pytest.raises(ValueError, match=r"missing: optim\.state\.nothing\.exp_avg, optim.*strict=False"):
            inf.load_dcp(model, optimizer, tmp_path / "model")
        assert_same(before, states_of(model, handle))
        assert "optim.state.first.weight.step" in inf.load_dcp(model, optimizer, tmp_path / "model", strict=False).missing
        with pytest.raises(FileNotFoundError, match=r"has no \.metadata"):
            inf.load_dcp(model, optimizer, tmp_path)
    torch.manual_seed(0)
    model = inf.offload(Odd(), inf.Policy(**CPU))
    lion = inf.Lion([p for p in model.parameters() if p.requires_grad])
    with pytest.raises(ValueError, match=r"unexpected: optim\.state\.first\.bias\.exp_avg_sq"):
        inf.load_dcp(model, lion, tmp_path / "adamw")
    inf.handle(model).close()


def train_odd(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(1, 4, dtype=torch.bfloat16)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


# -- DeepSpeed ---------------------------------------------------------------------------------------------------------

DEEPSPEED = Path(__file__).parent / "data" / "deepspeed_zero3"


@pytest.mark.parametrize("name", ["one_rank", "two_ranks_cpu_offload", "two_ranks_fp32"])
def test_the_weights_of_a_checkpoint_that_deepspeed_wrote(name: str, tmp_path: Path) -> None:
    expected = load_file(DEEPSPEED / name / "expected.safetensors")
    frozen = expected.pop("frozen.weight")
    with opened(make.Net, tmp_path, **NVME) as (model, _, handle):
        model.scale.zero_()
        assert inf.load_deepspeed(model, DEEPSPEED / name) == ((), ())
        assert_same(expected, {name: state["master"] for name, state in states_of(model, handle).items()})
        assert torch.equal(model.state_dict()["frozen.weight"], frozen.bfloat16())
        assert model.scale == 2
        assert inf.load_deepspeed(model, DEEPSPEED / name, "global_step3") == ((), ())
        assert inf.load_deepspeed(model, DEEPSPEED / name / "global_step3") == ((), ())


def test_a_model_that_is_not_the_one_deepspeed_saved_is_refused(tmp_path: Path) -> None:
    with opened(Odd, tmp_path) as (model, _, _):
        before = {name: value.clone() for name, value in model.state_dict().items()}
        with pytest.raises(ValueError, match=r"missing: nothing, first\.weight.*unexpected: blocks\.0\.bias"):
            inf.load_deepspeed(model, DEEPSPEED / "one_rank")
        assert_same(before, dict(model.state_dict()))
