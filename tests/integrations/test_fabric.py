"""Lightning's Fabric with strategy="infinity": a loop of one's own trains, saves and resumes an
offloaded model as it does a model in memory, on one rank and on two."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning")

import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins.precision import MixedPrecision
from torch import nn
from torch.nn import functional as F

import infinity as inf
from infinity.integrations.lightning import FabricInfinityStrategy
from tests.distributed.ranks import on_ranks
from tests.integrations.lightning_runs import (
    Module,
    Net,
    assert_same,
    batches,
    close,
    launched,
    policy,
    states,
)

pytestmark = pytest.mark.integrations

ULPS = 5e-7


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    with launched():
        yield


def fabric_of(strategy: Any, world: int = 1, **values: Any) -> Fabric:
    made = Fabric(accelerator="cpu", devices=world, strategy=strategy, **values)
    made.launch()
    return made


def net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def offloaded(place: Path, seed: int = 0) -> tuple[Any, Any]:
    """A net that is offloaded before Fabric gets it, and its optimizer."""
    model = inf.offload(net(seed), policy(place))
    return model, inf.AdamW(model.parameters(), lr=1e-2)


def train(
    fabric: Fabric, model: Any, optimizer: Any, *, epochs: int = 1, clip: dict[str, Any] | None,
    alike: bool = False,
) -> list[float]:  # fmt: skip
    """A user's loop: two micro-batches per step; each rank has different rows, or all have the same
    (alike)."""
    losses = []
    loader = fabric.setup_dataloaders(batches(), use_distributed_sampler=not alike)
    for _ in range(epochs):
        for index, (ids,) in enumerate(loader):
            last = index % 2 == 1
            with fabric.no_backward_sync(model, enabled=not last):
                logits = model(ids[:, :-1])
                loss = F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())
                fabric.backward(loss / 2)
            losses.append(loss.item())
            if last:
                if clip:
                    fabric.clip_gradients(model, optimizer, **clip)
                optimizer.step()
                optimizer.zero_grad()
    return losses


def plain_losses(world: int = 1, strategy: str = "auto", **values: Any) -> list[float]:
    clip = values.pop("clip", None)
    fabric = fabric_of(strategy, world, **values)
    model = net()
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    return train(fabric, model, optimizer, clip=clip)


CLIPS: dict[str, dict[str, float] | None] = {
    "none": None,
    "norm": {"max_norm": 0.1},
    "value": {"clip_val": 0.01},
}


@pytest.mark.parametrize("clip", CLIPS)
def test_losses_are_those_of_the_model_in_memory(clip: str, tmp_path: Path) -> None:
    fabric = fabric_of("infinity")
    model, optimizer = fabric.setup(*offloaded(tmp_path))
    losses = train(fabric, model, optimizer, clip=CLIPS[clip])
    assert losses == pytest.approx(plain_losses(clip=CLIPS[clip]), rel=ULPS)
    assert len(losses) == 8


def test_a_model_that_setup_module_offloads(tmp_path: Path) -> None:
    fabric = fabric_of(FabricInfinityStrategy(policy(tmp_path)))
    with fabric.init_module():
        plain = net()
    model = fabric.setup_module(plain)
    optimizer = fabric.setup_optimizers(inf.AdamW(model.parameters(), lr=1e-2))
    losses = train(fabric, model, optimizer, clip=None)
    assert losses == pytest.approx(plain_losses(), rel=ULPS)
    assert inf.handle(plain).stats() is not None


def test_autocast(tmp_path: Path) -> None:
    fabric = fabric_of("infinity", precision="bf16-mixed")
    model, optimizer = fabric.setup(*offloaded(tmp_path))
    losses = train(fabric, model, optimizer, clip=None)
    assert losses == pytest.approx(plain_losses(precision="bf16-mixed"), rel=2e-3)


def test_fp16_with_a_scaler(tmp_path: Path) -> None:
    def scaled() -> MixedPrecision:
        # So large that the first steps overflow, and are left out.
        return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**24))

    one, two, clip = scaled(), scaled(), {"max_norm": 1.0, "error_if_nonfinite": False}
    fabric = fabric_of("infinity", plugins=[one])
    model, optimizer = fabric.setup(*offloaded(tmp_path))
    losses = train(fabric, model, optimizer, epochs=2, clip=clip)
    fabric = fabric_of("auto", plugins=[two])
    plain = net()
    plain, other = fabric.setup(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2))
    assert losses == pytest.approx(train(fabric, plain, other, epochs=2, clip=clip), rel=2e-3)
    assert one.state_dict()["scale"] == two.state_dict()["scale"] < 2.0**24


def test_updates_during_backward(tmp_path: Path) -> None:
    """Micro-batches inside of `no_backward_sync` are not the last of a step."""
    fabric = fabric_of(FabricInfinityStrategy(policy(tmp_path, update="backward")))
    model = fabric.setup_module(net())
    optimizer = fabric.setup_optimizers(inf.AdamW(model.parameters(), lr=1e-2))
    assert train(fabric, model, optimizer, clip=None) == pytest.approx(plain_losses(), rel=ULPS)


def test_bf16_true(tmp_path: Path) -> None:
    fabric = fabric_of(FabricInfinityStrategy(policy(tmp_path)), precision="bf16-true")
    model = fabric.setup_module(net())
    optimizer = fabric.setup_optimizers(inf.AdamW(model.parameters(), lr=1e-2))
    losses = train(fabric, model, optimizer, clip=None)
    assert next(model.parameters()).dtype == torch.bfloat16
    assert losses == pytest.approx(plain_losses(precision="bf16-true"), rel=0.05)


def test_a_lightning_module(tmp_path: Path) -> None:
    """Its `training_step` runs inside of its forward, as with ddp."""
    fabric = fabric_of(FabricInfinityStrategy(policy(tmp_path)))
    module = Module(inf.AdamW)
    model = fabric.setup_module(module)
    optimizer = fabric.setup_optimizers(inf.AdamW(model.parameters(), lr=1e-2))
    for index, batch in enumerate(fabric.setup_dataloaders(batches())):
        fabric.backward(model.training_step(batch, index))
        optimizer.step()
        optimizer.zero_grad()
    assert len(module.losses) == 8


def state_of(model: Any, optimizer: Any) -> dict[str, Any]:
    return {"model": model, "optimizer": optimizer, "step": 3, "note": {"lr": 0.5}}


def _whole_and_resumed(fabric_values: dict[str, Any], place: Path) -> None:
    """A run of three epochs, and a run of two that is saved, and resumed in a new model."""
    clip = {"max_norm": 0.5}

    def made(name: str, seed: int = 0) -> tuple[Fabric, Any, Any]:
        fabric = fabric_of("infinity", **fabric_values)
        return fabric, *fabric.setup(*offloaded(place / name, seed))

    fabric, whole, kept = made("a")
    wanted = train(fabric, whole, kept, epochs=3, clip=clip)
    fabric, first, optimizer = made("b")
    losses = train(fabric, first, optimizer, epochs=2, clip=clip)
    fabric.save(place / "kept", state_of(first, optimizer))
    fabric.save(place / "kept", state_of(first, optimizer))  # in its place
    fabric, second, optimizer = made("c", seed=7)
    state = {**state_of(second, optimizer), "step": 0, "note": None}
    assert fabric.load(place / "kept", state) == {}
    assert (state["step"], state["note"]) == (3, {"lr": 0.5})
    losses += train(fabric, second, optimizer, clip=clip)
    assert losses == wanted
    assert_same(states(second), states(whole))
    assert optimizer.param_groups[0]["lr"] == kept.param_groups[0]["lr"]
    # Values alone, where the optimizer is not in the state.
    fabric, third, optimizer = made("d", seed=8)
    rest = fabric.load(place / "kept", {"model": third})
    assert rest["step"] == 3
    saved, found = dict(first.state_dict()), third.state_dict()
    assert_same({name: found[name] for name in saved}, saved)
    for model in (whole, first, second, third):
        close(model)


def test_a_resumed_run_equals_one_that_went_on(tmp_path: Path) -> None:
    _whole_and_resumed({}, tmp_path)


def test_a_checkpoint_is_read_without_a_state(tmp_path: Path) -> None:
    fabric = fabric_of("infinity")
    model, optimizer = fabric.setup(*offloaded(tmp_path / "swap"))
    fabric.save(tmp_path / "kept", state_of(model, optimizer))
    assert fabric.load(tmp_path / "kept").keys() == {"model", "optimizer", "step", "note"}
    with pytest.raises(KeyError, match="epoch not in the checkpoint"):
        fabric.load(tmp_path / "kept", {"model": model, "epoch": 0})
    state = {"model": model, "epoch": 5}
    fabric.load(tmp_path / "kept", state, strict=False)
    assert state["epoch"] == 5


def test_a_checkpoint_of_another_strategy(tmp_path: Path) -> None:
    fabric = fabric_of("auto")
    plain = fabric.setup(net())
    fabric.save(tmp_path / "kept", {"model": plain})
    fabric = fabric_of("infinity")
    model, _ = fabric.setup(*offloaded(tmp_path / "swap", seed=7))
    fabric.load(tmp_path / "kept", {"model": model})
    assert_same(dict(model.state_dict()), dict(plain.state_dict()))


def test_refusals(tmp_path: Path) -> None:
    fabric = fabric_of("infinity")
    plain = net()
    with pytest.raises(ValueError, match=r"Net is not offloaded.*fabric\.setup_module"):
        fabric.setup(plain, torch.optim.AdamW(plain.parameters()))
    model = inf.offload(plain, policy(tmp_path))
    with pytest.raises(ValueError, match=r"torch\.optim\.sgd\.SGD over embedding\.weight"):
        fabric.setup(model, torch.optim.SGD(model.parameters(), lr=1.0))
    model, optimizer = fabric.setup(model, inf.AdamW(model.parameters()))
    with pytest.raises(ValueError, match="filter="):
        fabric.save(tmp_path / "a", {"model": model}, filter={"model": lambda *_: True})
    with pytest.raises(ValueError, match="FabricInfinityStrategy"):
        FabricInfinityStrategy(start_method="spawn")
    assert optimizer is not None


# -- two ranks -------------------------------------------------------------------------------------


@contextlib.contextmanager
def _rank(number: int) -> Iterator[None]:
    with launched(LOCAL_RANK=str(number)):
        yield


def _beside_ddp(rank: int, place: Path) -> list[tuple[list[float], list[float]]]:
    found = []
    with _rank(rank):
        for name in ("none", "norm"):
            fabric = fabric_of("infinity", 2)
            model, optimizer = fabric.setup(*offloaded(place / name))
            losses = train(fabric, model, optimizer, clip=CLIPS[name])
            close(model)
            found.append((plain_losses(2, "ddp", clip=CLIPS[name]), losses))
    return found


def test_losses_of_two_ranks_are_those_of_ddp(tmp_path: Path) -> None:
    for rank in on_ranks(_beside_ddp, tmp_path / "run", 2):
        for plain, losses in rank:
            assert losses == pytest.approx(plain, rel=ULPS)
            assert len(losses) == 4


def _resumed(rank: int, place: Path) -> bool:
    with _rank(rank):
        _whole_and_resumed({"world": 2}, place)
    return True


def test_a_run_of_two_ranks_resumes(tmp_path: Path) -> None:
    assert on_ranks(_resumed, tmp_path / "run", 2) == [True, True]


def _first_part(rank: int, place: Path) -> list[float]:
    """Two epochs. Both ranks have the rows that one has alone: the means are the same bits."""
    with _rank(rank):
        fabric = fabric_of("infinity", 2)
        model, optimizer = fabric.setup(*offloaded(place / "swap"))
        losses = train(fabric, model, optimizer, epochs=2, clip=CLIPS["norm"], alike=True)
        fabric.save(place / "kept", state_of(model, optimizer))
        close(model)
        return losses


def test_saved_on_two_ranks_and_resumed_on_one(tmp_path: Path) -> None:
    first = on_ranks(_first_part, tmp_path / "run", 2)
    fabric = fabric_of("infinity")
    whole, kept = fabric.setup(*offloaded(tmp_path / "whole"))
    losses = train(fabric, whole, kept, epochs=3, clip=CLIPS["norm"])
    second, optimizer = fabric.setup(*offloaded(tmp_path / "second", seed=7))
    fabric.load(tmp_path / "run" / "kept", state_of(second, optimizer))
    assert first[0] + train(fabric, second, optimizer, clip=CLIPS["norm"]) == losses
    assert_same(states(second), states(whole))


def test_a_metric_is_moved_and_a_model_is_not() -> None:
    """Before `setup_module` offloads it, a model stays where it was built."""
    strategy = FabricInfinityStrategy(parallel_devices=[torch.device("meta")])
    metric, model = nn.Module(), nn.Linear(2, 2)
    metric.register_buffer("total", torch.zeros(()))
    for module in (metric, model):
        strategy.module_to_device(module)
    assert metric.total.is_meta
    assert not model.weight.is_meta
    with strategy.module_init_context(empty_init=True):
        assert nn.Linear(2, 2).weight.is_meta
    with strategy.module_init_context():
        assert not nn.Linear(2, 2).weight.is_meta
