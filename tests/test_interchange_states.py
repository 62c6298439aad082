"""Checkpoints of torch.distributed.checkpoint, in and out: bit for bit, checked before anything is
written. Formats of others on two ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.state_dict as dcp_states
from torch import nn

import infinity as inf
from infinity._src.checkpoint.formats.dcp import DCPFiles
from infinity._src.kernels.newton_schulz import product_dtype
from infinity.errors import PeerFailed
from tests import models
from tests.data.deepspeed import make
from tests.distributed.test_two_ranks import on_two_ranks
from tests.harness import assert_same, hidden_matrices, policy, states_of, train
from tests.test_interchange import CPU, NVME, Odd, opened
from tests.test_load_deepspeed import Coming


def plain_fp32(factory: Callable[[], nn.Module], seed: int) -> tuple[nn.Module, torch.optim.AdamW]:
    """A model and an optimizer that know nothing of infinity."""
    torch.manual_seed(seed)
    model = factory().eval()
    return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)


def test_torch_goes_on_from_what_was_exported(tmp_path: Path) -> None:
    with opened(models.gpt2, tmp_path, **NVME) as (model, optimizer):
        train(model, optimizer)
        optimizer.param_groups[0]["lr"] = 0.125
        inf.export_dcp(model, optimizer, tmp_path / "out")
        expected = states_of(model)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {".metadata", "__0_0.distcp"}
    plain, adamw = plain_fp32(models.gpt2, seed=1)
    values, states = dcp_states.get_state_dict(plain, adamw)
    wanted: dict[str, Any] = {"model": values, "optim": states}
    dcp.load(wanted, checkpoint_id=tmp_path / "out", no_dist=True, planner=TiedLoad())
    dcp_states.set_state_dict(
        plain, adamw, model_state_dict=wanted["model"], optim_state_dict=wanted["optim"]
    )
    assert adamw.param_groups[0]["lr"] == 0.125
    for name, param in plain.named_parameters():
        assert torch.equal(param, expected[name]["master"])
        state = adamw.state[param]
        assert state["step"] == expected[name]["step"] == 3
        assert all(
            torch.equal(state[moment], expected[name][moment])
            for moment in ("exp_avg", "exp_avg_sq")
        )
    train(plain, adamw)


class TiedLoad(dcp.DefaultLoadPlanner):
    """A tied parameter is in the checkpoint once."""

    def __init__(self) -> None:
        super().__init__(allow_partial_load=True)


@pytest.mark.parametrize("masters", [True, False])
def test_a_dcp_checkpoint_comes_back_bit_for_bit(masters: bool, tmp_path: Path) -> None:
    with opened(models.llama, tmp_path, **NVME) as (model, optimizer):
        train(model, optimizer)
        inf.export_dcp(model, optimizer, tmp_path / "out", masters=masters)
        expected = states_of(model)
        train(model, optimizer, 1)
        once_more = states_of(model)
    with opened(models.llama, tmp_path, seed=1) as (model, optimizer):
        assert inf.load_dcp(model, optimizer, tmp_path / "out") == ((), ())
        assert_same(expected, states_of(model))
        train(model, optimizer, 1)
        assert_same(once_more, states_of(model))
    names = DCPFiles(tmp_path / "out").tensors
    assert names["model.lm_head.weight"].dtype == (torch.float32 if masters else torch.bfloat16)
    assert ("optim.state.lm_head.weight.master" in names) == (not masters)


def test_what_torch_saved_is_loaded(tmp_path: Path) -> None:
    plain, adamw = plain_fp32(models.gpt2, seed=1)
    train(plain, adamw)
    values, states = dcp_states.get_state_dict(plain, adamw)
    dcp.save({"model": values, "optim": states}, checkpoint_id=tmp_path / "out", no_dist=True)
    with opened(models.gpt2, tmp_path, **NVME) as (model, optimizer):
        assert inf.load_dcp(model, optimizer, tmp_path / "out") == ((), ())
        for name, found in states_of(model).items():
            param = plain.get_parameter(name)
            assert torch.equal(found["master"], param)
            assert found["step"] == 3
            assert all(
                torch.equal(found[moment], adamw.state[param][moment])
                for moment in ("exp_avg", "exp_avg_sq")
            )
        assert inf.load_dcp(model, None, tmp_path / "out") == ((), ())
    dcp.save(values, checkpoint_id=tmp_path / "bare", no_dist=True)
    with opened(models.gpt2, tmp_path, **NVME) as (model, _):
        assert inf.load_dcp(model, None, tmp_path / "bare", keys=("", "optim")) == ((), ())
        assert all(
            torch.equal(found["master"], plain.get_parameter(name))
            for name, found in states_of(model).items()
        )


def torchs_muon(seed: int, **settings: Any) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    """A model in fp32, with torch's Muon for its hidden matrices and AdamW for the rest."""
    torch.manual_seed(seed)
    model = models.Small()
    matrices = hidden_matrices(model)
    others = [each for each in model.parameters() if all(each is not held for held in matrices)]
    return model, [torch.optim.Muon(matrices, **settings), torch.optim.AdamW(others, **settings)]


def go_on(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], steps: range) -> None:
    for batch in models.token_batches(steps.stop)[steps.start :]:
        models.loss_of(model, batch).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def test_muon_of_torch_goes_through_the_engine_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    plain, made = torchs_muon(0, lr=0.02, weight_decay=0.1)
    go_on(plain, made, range(2))
    values, states = dcp_states.get_state_dict(plain, made)
    dcp.save({"model": values, "optim": states}, checkpoint_id=tmp_path / "in", no_dist=True)
    torch.manual_seed(1)
    model = inf.offload(models.Small(), policy(tmp_path, **NVME))
    muon = inf.Muon(model.parameters(), lr=0.02, betas=(0.9, 0.999))
    assert inf.load_dcp(model, muon, tmp_path / "in") == ((), ())
    for name, found in states_of(model).items():
        param = plain.get_parameter(name)
        kept = {key: value for each in made for key, value in each.state.get(param, {}).items()}
        # torch's Muon counts no steps.
        assert found.pop("step") == kept.pop("step", 0)
        assert_same(found, {"master": param.detach(), **kept})
    inf.export_dcp(model, muon, tmp_path / "out")
    inf.handle(model).close()
    resumed, others = torchs_muon(2, lr=0.5, weight_decay=0.0, eps=0.0)
    values, states = dcp_states.get_state_dict(resumed, others)
    wanted: dict[str, Any] = {"model": values, "optim": states}
    dcp.load(wanted, checkpoint_id=tmp_path / "out", no_dist=True)
    dcp_states.set_state_dict(
        resumed, others, model_state_dict=wanted["model"], optim_state_dict=wanted["optim"]
    )
    assert [each.param_groups[0]["eps"] for each in others] == [1e-7, 1e-8]
    for each, optimizers in ((plain, made), (resumed, others)):
        go_on(each, optimizers, range(2, 4))
    assert_same(resumed.state_dict(), plain.state_dict())


@pytest.mark.parametrize(
    ("kind", "settings"), [("SGD", {"momentum": 0.9}), ("Muon", {"nesterov": False})]
)
def test_optimizers_that_count_no_steps(
    kind: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    """torch's state dict by position goes in state by state; the engine's steps are torch's."""
    torch.manual_seed(0)
    plain = nn.Sequential(*[nn.Linear(8, 8, bias=False) for _ in range(3)])
    torchs = getattr(torch.optim, kind)(plain.parameters(), lr=0.25, **settings)
    rows = torch.randn(4, 8)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model(rows).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step(plain, torchs)
    values, states = dcp_states.get_state_dict(plain, torchs)
    dcp.save({"model": values, "optim": states}, checkpoint_id=tmp_path / "in", no_dist=True)
    by_position, begun = torchs.state_dict()["state"], plain.state_dict()
    begun = {name: value.clone() for name, value in begun.items()}
    momenta = [by_position[index]["momentum_buffer"].clone() for index in range(3)]
    step(plain, torchs)
    for by_name in (True, False):
        model = inf.offload(nn.Sequential(*[nn.Linear(8, 8, bias=False) for _ in range(3)]))
        optimizer = getattr(inf, kind)(model.parameters(), lr=0.25, **settings)
        if by_name:
            assert inf.load_dcp(model, optimizer, tmp_path / "in") == ((), ())
        else:
            model.load_state_dict(begun)
            for param, momentum in zip(model.parameters(), momenta, strict=True):
                inf.handle(model).optimizer_state(param)["momentum_buffer"] = momentum
        step(model, optimizer)
        fast = product_dtype(torch.device("cpu")) is torch.bfloat16
        tolerance = {"atol": 1e-6 if fast or kind == "SGD" else 0.05, "rtol": 0.0}
        torch.testing.assert_close(dict(model.state_dict()), dict(plain.state_dict()), **tolerance)
        inf.handle(model).close()


@dataclasses.dataclass(frozen=True)
class OnRanks:
    """All of it on two ranks, one after the other: ranks start slowly."""

    def __call__(self, rank: int, place: Path) -> dict[str, Any]:
        save_sharded(place / "sharded")
        seen: dict[str, Any] = {}
        with opened(make.Net, place, **NVME) as (model, optimizer):
            model(torch.arange(6)[None]).backward()
            optimizer.step()
            seen["trained"] = states_of(model)
            inf.export_safetensors(model, place / "masters", masters=True)
            inf.export_dcp(model, optimizer, place / "dcp")
        with opened(make.Net, place, seed=1, **NVME) as (model, optimizer):
            assert inf.load_safetensors(model, place / "masters") == ((), ())
            seen["safetensors"] = states_of(model)
            assert inf.load_dcp(model, optimizer, place / "dcp") == ((), ())
            seen["dcp"] = states_of(model)
            mine = place / ("masters" if rank else "gone")  # one rank does not find its file
            with pytest.raises(
                PeerFailed if rank else FileNotFoundError, match=r"opening|no such directory"
            ):
                inf.load_safetensors(model, mine)
            (place / "file").touch()
            with pytest.raises(PeerFailed if rank else OSError, match="file"):  # only rank 0 writes
                inf.export_dcp(model, optimizer, place / "file" / "out")
            with pytest.raises(PeerFailed if rank else OSError, match="file"):
                inf.export_safetensors(model, place / "file" / "out")
            assert_same(seen["dcp"], states_of(model))
        for name in FROM_DEEPSPEED:
            coming = Coming(name, place.parent)
            assert inf.load_deepspeed(coming.model, coming.directory, opt=coming.opt) == ((), ())
            seen[name] = coming.states()
        return seen


FROM_DEEPSPEED = ("zero2_one_rank", "zero3_cpu", "universal_zero2", "muon_zero2")
"""Cases that one or two ranks of DeepSpeed wrote."""


def save_sharded(directory: Path) -> None:
    """A checkpoint of two ranks of torch: columns of a matrix, uneven parts of a vector."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    values = sharded_values()
    placed = {
        name: distribute_tensor(value, mesh, [Shard(value.ndim - 1)])
        for name, value in values.items()
    }
    dcp.save({"model": placed}, checkpoint_id=directory)


def sharded_values() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {
        "weight": torch.randn(3, 5, generator=generator),
        "bias": torch.randn(3, generator=generator),
    }


def test_two_ranks_write_and_read_all_of_it_and_fail_together(tmp_path: Path) -> None:
    place = tmp_path / "ranks"
    for name in FROM_DEEPSPEED:
        make.unpack(name, tmp_path)
    first, second = on_two_ranks(OnRanks(), place)
    assert_same(first, second)
    trained = first["trained"]
    assert_same(
        {name: state["master"] for name, state in trained.items()},
        {n: s["master"] for n, s in first["safetensors"].items()},
    )
    assert_same(trained, first["dcp"])
    for name in FROM_DEEPSPEED:
        coming = Coming(name, tmp_path)
        inf.load_deepspeed(coming.model, coming.directory, opt=coming.opt)
        assert_same(first[name], coming.states())
    # what two wrote, one reads
    with opened(make.Net, tmp_path, seed=1) as (model, optimizer):
        inf.load_dcp(model, optimizer, place / "dcp")
        assert_same(trained, states_of(model))
    assert len(DCPFiles(place / "sharded").tensors["model.weight"].boxes) == 2
    with opened(lambda: nn.Linear(5, 3), tmp_path) as (model, _):  # what two of torch wrote
        inf.load_dcp(model, None, place / "sharded")
        assert_same(
            sharded_values(),
            {name: state["master"] for name, state in states_of(model).items()},
        )


def test_a_second_export_into_a_directory_is_refused_and_a_broken_one_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(Odd, tmp_path) as (model, optimizer):
        inf.export_dcp(model, optimizer, tmp_path / "out")
        with pytest.raises(ValueError, match="has a checkpoint already"):
            inf.export_dcp(model, optimizer, tmp_path / "out")
        with (
            pytest.raises(ValueError, match="holds no parameter of this model"),
            opened(Odd, tmp_path) as (other, _),
        ):
            inf.export_dcp(other, optimizer, tmp_path / "other")
        saved = dict(model.state_dict())

        def broken(*_: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(torch, "save", broken)
        with pytest.raises(OSError, match="No space"):
            inf.export_dcp(model, optimizer, tmp_path / "third")
        assert list((tmp_path / "third").iterdir()) == []
    with opened(Odd, tmp_path, seed=1) as (model, optimizer):
        inf.load_dcp(model, optimizer, tmp_path / "out")
        assert_same(saved, dict(model.state_dict()))


def test_states_that_do_not_fit_are_named_before_anything_is_written(tmp_path: Path) -> None:
    with opened(Odd, tmp_path) as (model, optimizer):
        inf.export_dcp(model, None, tmp_path / "model")
        inf.export_dcp(model, optimizer, tmp_path / "adamw")
        train_odd(model, optimizer)
        before = states_of(model)
        with pytest.raises(
            ValueError, match=r"missing: optim\.state\.nothing\.exp_avg, optim.*strict=False"
        ):
            inf.load_dcp(model, optimizer, tmp_path / "model")
        assert_same(before, states_of(model))
        assert (
            "optim.state.first.weight.step"
            in inf.load_dcp(model, optimizer, tmp_path / "model", strict=False).missing
        )
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
