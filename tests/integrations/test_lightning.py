"""Lightning's Trainer with strategy="infinity" on one process: it trains, saves and resumes an
offloaded module as it does a module in memory."""

from __future__ import annotations

import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("lightning")

import lightning as L
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    Callback,
    EarlyStopping,
    GradientAccumulationScheduler,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelPruning,
    OnExceptionCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities import grad_norm
from torchmetrics import MeanMetric

import infinity as inf
from infinity._embedding import check_methods
from infinity.integrations.lightning import InfinityStrategy
from tests.device import simulated
from tests.integrations.lightning_runs import (
    Module,
    Net,
    Rivals,
    assert_same,
    batches,
    close,
    fit,
    launched,
    offloaded_fit,
    policy,
    states,
    trainer,
)

pytestmark = pytest.mark.integrations

ULPS = 5e-7
"""Relative difference of two norms, and of AdamW's results, in fp32 (docs: a few units in the last
place)."""


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    with launched():
        yield


def in_memory(**values: Any) -> Module:
    """The module after a run with torch.optim.AdamW and no strategy."""
    module = Module()
    fit("auto", module, **values)
    return module


# -- losses ----------------------------------------------------------------------------------------


class _Norms(Callback):
    def __init__(self) -> None:
        self.found: list[float] = []

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.found.append(float(grad_norm(pl_module, 2)["grad_2.0_norm_total"]))


RUNS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation": {"accumulate_grad_batches": 3},
    "clip": {"gradient_clip_val": 0.1},
    "clip by value": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    "bf16-mixed": {"precision": "bf16-mixed"},
    "anomalies": {"detect_anomaly": True, "enable_model_summary": True},
}


@pytest.mark.parametrize("run", RUNS)
def test_losses_are_those_of_the_module_in_memory(run: str, tmp_path: Path) -> None:
    module = Module(inf.AdamW)
    offloaded_fit(tmp_path, module, **RUNS[run])
    # Autocast multiplies the last bits of the weights: a rounding to bf16 flips now and then.
    rel = 2e-3 if "mixed" in run else ULPS
    assert module.losses == pytest.approx(in_memory(**RUNS[run]).losses, rel=rel)
    assert len(module.losses) == 16


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("update", ["backward", "transaction", "delayed"])
def test_update_modes(update: str, accumulate: int, tmp_path: Path) -> None:
    values = {
        "backward": {"update": "backward"},
        "transaction": {"update": "backward", "generations": 2},
        "delayed": {"update": "delayed", "delayed_warmup": 100},
    }[update]
    module = Module(inf.AdamW)
    clip = {} if update == "backward" else {"gradient_clip_val": 0.1}
    settings = {"accumulate_grad_batches": accumulate, **clip}
    offloaded_fit(tmp_path, module, policy=values, **settings)
    assert module.losses == pytest.approx(in_memory(**settings).losses, rel=ULPS)


def test_a_net_that_configure_model_offloads(tmp_path: Path) -> None:
    def offload(module: L.LightningModule) -> None:
        inf.offload(module.net, policy(tmp_path, device=module.device))

    module = Module(inf.AdamW, offload)
    made = fit("infinity", module)
    assert module.losses == pytest.approx(in_memory().losses, rel=ULPS)
    # `configure_model` is called once more here.
    assert made.validate(module, batches(), verbose=False)[0]["val"] > 0


def test_a_net_that_was_offloaded_before(tmp_path: Path) -> None:
    module = Module(inf.AdamW)
    inf.offload(module.net, policy(tmp_path))
    fit(InfinityStrategy(), module)
    assert module.losses == pytest.approx(in_memory().losses, rel=ULPS)


def test_bf16_true(tmp_path: Path) -> None:
    """The strategy and `configure_model` make bf16 parameters; with fp32 masters, where torch
    rounds its parameters after each step."""

    def offload(module: L.LightningModule) -> None:
        inf.offload(module.net, policy(tmp_path / "net"))

    one, two = Module(inf.AdamW), Module(inf.AdamW, offload)
    offloaded_fit(tmp_path / "module", one, precision="bf16-true")
    fit(InfinityStrategy(), two, precision="bf16-true")
    # Converted by the trainer, and made as bf16: the values that they begin with differ.
    plain, made = Module(), Module(offload=lambda module: None)
    for module, other in ((one, plain), (two, made)):
        fit("auto", other, precision="bf16-true")
        assert {param.dtype for param in module.parameters()} == {torch.bfloat16}
        assert module.losses[0] == other.losses[0]
        assert module.losses == pytest.approx(other.losses, rel=0.05)


def test_a_net_of_another_dtype_is_refused(tmp_path: Path) -> None:
    module = Module(inf.AdamW)
    inf.offload(module.net, policy(tmp_path))
    with pytest.raises(ValueError, match=r"precision='bf16-true'.*configure_model"):
        fit(InfinityStrategy(), module, precision="bf16-true")


def test_fp16_with_a_scaler(tmp_path: Path) -> None:
    def scaled() -> MixedPrecision:
        # So large that the first steps overflow, and are left out.
        return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**18))

    module, settings = Module(inf.AdamW), {"gradient_clip_val": 1.0}
    one, two = scaled(), scaled()
    offloaded_fit(tmp_path, module, plugins=[one], **settings)
    plain = in_memory(plugins=[two], **settings)
    assert module.losses == pytest.approx(plain.losses, rel=2e-3)
    assert one.state_dict()["scale"] == two.state_dict()["scale"] < 2.0**18


def test_norms_of_gradients_can_be_logged(tmp_path: Path) -> None:
    mine, theirs = _Norms(), _Norms()
    offloaded_fit(tmp_path, Module(inf.AdamW), callbacks=[mine], enable_checkpointing=False)
    in_memory(callbacks=[theirs], enable_checkpointing=False)
    assert mine.found == pytest.approx(theirs.found, rel=1e-5)
    assert len(mine.found) == 16


class _Tied(Module):
    """Its output weights are those of its input, and it has a parameter of its own: both are used
    outside of the `forward` that owns them."""

    def build(self) -> None:
        super().build()
        assert self.net is not None
        self.net.head.weight = self.net.embedding.weight
        self.scale = nn.Parameter(torch.full((), 0.5))

    def loss(self, batch: Any) -> torch.Tensor:
        assert self.net is not None
        (ids,) = batch
        logits = self.net.head(self.net.embedding(ids[:, :-1])) * self.scale
        return nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def test_parameters_that_a_step_uses_past_forward(tmp_path: Path) -> None:
    module, plain = _Tied(inf.AdamW), _Tied()
    offloaded_fit(tmp_path, module)
    fit("auto", plain)
    assert module.losses == pytest.approx(plain.losses, rel=1e-5)


# -- checkpoints -----------------------------------------------------------------------------------


def saved_each_epoch(place: Path, **values: Any) -> ModelCheckpoint:
    return ModelCheckpoint(
        place, filename="{epoch}", **{"save_top_k": -1, "every_n_epochs": 1, **values}
    )


def test_a_resumed_run_equals_one_that_went_on(tmp_path: Path) -> None:
    settings = {"max_epochs": 3, "gradient_clip_val": 0.5, "accumulate_grad_batches": 2}
    whole = Module(inf.AdamW)
    offloaded_fit(tmp_path / "a", whole, **settings)
    first = Module(inf.AdamW)
    kept = saved_each_epoch(tmp_path / "kept")
    offloaded_fit(tmp_path / "b", first, callbacks=[kept], **{**settings, "max_epochs": 2})
    second, path = Module(inf.AdamW, seed=7), tmp_path / "kept" / "epoch=1.ckpt"
    # The trainer's own file has no tensor of the module: the tensors were never whole in memory.
    kept_by_trainer = torch.load(path / "trainer.ckpt", weights_only=True)
    assert kept_by_trainer["state_dict"] == {}
    offloaded_fit(tmp_path / "c", second, ckpt_path=path, **settings)
    assert first.losses + second.losses == whole.losses
    assert_same(states(second), states(whole))


def test_a_run_resumed_in_mid_epoch_equals_lightnings(tmp_path: Path) -> None:
    """Lightning itself begins the data anew; so both do, and in the same way."""
    losses = []
    for name, optimizer in (("infinity", inf.AdamW), ("auto", torch.optim.AdamW)):

        def strategy(name: str = name) -> Any:
            return InfinityStrategy(policy(tmp_path / "swap")) if name == "infinity" else name

        kept = ModelCheckpoint(tmp_path / name, filename="{step}", every_n_train_steps=3)
        first, second = Module(optimizer), Module(optimizer, seed=7)
        fit(strategy(), first, callbacks=[kept], max_steps=3, max_epochs=-1)
        path = tmp_path / name / "step=3.ckpt"
        fit(strategy(), second, ckpt_path=path, max_steps=9, max_epochs=-1)
        losses.append(second.losses)
        close(first)
        close(second)
    assert losses[0] == pytest.approx(losses[1], rel=ULPS)
    assert len(losses[0]) == 6


def test_old_checkpoints_are_removed_and_the_last_is_replaced(tmp_path: Path) -> None:
    module = Module(inf.AdamW)
    kept = ModelCheckpoint(
        tmp_path / "kept", monitor="val", save_top_k=1, save_last=True, filename="{epoch}"
    )
    made = trainer(
        InfinityStrategy(policy(tmp_path / "swap")), callbacks=[kept], max_epochs=3
    )
    made.fit(module, batches(), batches(8))
    best = Path(kept.best_model_path)
    assert sorted(path.name for path in (tmp_path / "kept").iterdir()) == [best.name, "last.ckpt"]
    assert best.is_dir()
    value = made.validate(module, batches(8), ckpt_path="best", verbose=False)[0]["val"]
    assert value == pytest.approx(float(kept.best_model_score), rel=1e-6)
    before = states(module)
    # "last" is the end of the run, whatever was best.
    again = Module(inf.AdamW, seed=7)
    offloaded_fit(tmp_path / "again", again, ckpt_path=tmp_path / "kept" / "last.ckpt")
    assert not again.losses  # three epochs are done
    for name, value in states(again).items():
        if " " in name:
            assert torch.equal(value, before[name]), name


def test_the_last_checkpoint_as_a_link(tmp_path: Path) -> None:
    kept = saved_each_epoch(tmp_path / "kept", save_last="link")
    module = Module(inf.AdamW)
    offloaded_fit(tmp_path / "swap", module, callbacks=[kept])
    last = tmp_path / "kept" / "last.ckpt"
    assert last.is_symlink()
    made = trainer(InfinityStrategy(policy(tmp_path / "two")))
    made.test(Module(inf.AdamW, seed=7), batches(), ckpt_path=last, verbose=False)
    # Saved over it: the link goes, and what it named stays.
    made.save_checkpoint(last)
    assert last.is_dir()
    assert not last.is_symlink()
    assert (tmp_path / "kept" / "epoch=1.ckpt").is_dir()


def test_values_alone(tmp_path: Path) -> None:
    kept = saved_each_epoch(tmp_path / "kept", save_weights_only=True)
    module = Module(inf.AdamW)
    made = offloaded_fit(tmp_path / "swap", module, callbacks=[kept])
    wanted = made.test(module, batches(), verbose=False)
    path = tmp_path / "kept" / "epoch=1.ckpt"
    size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    assert size < 4 * sum(param.numel() for param in module.parameters()) + 10_000
    other = trainer(InfinityStrategy(policy(tmp_path / "two")))
    assert other.test(Module(seed=7), batches(), ckpt_path=path, verbose=False) == wanted
    with pytest.raises(KeyError, match="save_weights_only"):
        offloaded_fit(tmp_path / "three", Module(inf.AdamW), ckpt_path=path)


def test_a_checkpoint_of_more_modules_is_refused(tmp_path: Path) -> None:
    kept = saved_each_epoch(tmp_path / "kept")
    offloaded_fit(tmp_path / "swap", Module(inf.AdamW), callbacks=[kept])
    path = tmp_path / "kept" / "epoch=1.ckpt"
    shutil.copytree(path / "infinity" / "0", path / "infinity" / "1")
    with pytest.raises(ValueError, match="2 offloaded modules, and Module has 1"):
        offloaded_fit(tmp_path / "two", Module(inf.AdamW), ckpt_path=path)


def test_a_save_that_fails_leaves_nothing_on_the_drive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    module = Module(inf.AdamW)
    made = offloaded_fit(tmp_path / "swap", module)
    monkeypatch.setattr(inf, "save", full)
    (tmp_path / "kept").mkdir()
    with pytest.raises(OSError, match="No space"):
        made.save_checkpoint(tmp_path / "kept" / "one.ckpt")
    assert list((tmp_path / "kept").iterdir()) == []


def test_evaluation_and_prediction_from_a_checkpoint(tmp_path: Path) -> None:
    module = Module(inf.AdamW)
    kept = saved_each_epoch(tmp_path / "kept")
    made = offloaded_fit(tmp_path / "swap", module, callbacks=[kept])
    wanted = made.validate(module, batches(), verbose=False)
    plain = Module(seed=7)
    plain.load_state_dict(module.state_dict())
    path = tmp_path / "kept" / "epoch=1.ckpt"
    other, alone = Module(seed=7), trainer(InfinityStrategy(policy(tmp_path / "two")))
    assert alone.validate(other, batches(), ckpt_path=path, verbose=False) == wanted
    found = alone.predict(other, batches())
    expected = trainer("auto").predict(plain, batches())
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.equal(mine, theirs)


def test_a_checkpoint_of_another_strategy(tmp_path: Path) -> None:
    plain = Module()
    made = fit("auto", plain, callbacks=[saved_each_epoch(tmp_path / "kept")])
    wanted = made.test(plain, batches(), verbose=False)
    path = tmp_path / "kept" / "epoch=1.ckpt"
    other = trainer(InfinityStrategy(policy(tmp_path / "swap")))
    module = Module(seed=7)
    assert other.test(module, batches(), ckpt_path=path, verbose=False) == wanted
    # Its moments are torch's.
    with pytest.raises(ValueError, match=r"no manifest of infinity\.AdamW"):
        offloaded_fit(tmp_path / "two", Module(inf.AdamW), ckpt_path=path)


class _Fails:
    """State of a callback that cannot be written."""

    def __reduce__(self) -> Any:
        raise RuntimeError("cannot be written")


def test_a_save_that_fails_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    module = Module(inf.AdamW)
    made = offloaded_fit(tmp_path / "swap", module)
    path = tmp_path / "kept.ckpt"
    made.save_checkpoint(path)
    before = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
    module.hparams.extra = _Fails()
    with pytest.raises(RuntimeError, match="cannot be written"):
        made.save_checkpoint(path)
    assert {file: file.read_bytes() for file in path.rglob("*") if file.is_file()} == before
    del module.hparams["extra"]
    made.save_checkpoint(path)
    assert [each.name for each in tmp_path.iterdir() if "kept" in each.name] == ["kept.ckpt"]


class _Measured(Module):
    """Has states that no engine keeps: a frozen parameter, a buffer and a metric's."""

    def build(self) -> None:
        super().build()
        self.scale = nn.Parameter(torch.full((), 0.5), requires_grad=False)
        self.metric = MeanMetric()
        self.metric.persistent(True)
        self.register_buffer("count", torch.zeros(()))

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        loss = super().training_step(batch, index) * self.scale
        self.metric.update(loss.detach())
        self.count += 1
        return loss


class _Extra(Module):
    """Keeps a state that is no tensor, inside of what is offloaded."""

    def build(self) -> None:
        super().build()
        self.net.head.__class__ = _Counts
        self.net.head.words = 0


class _Counts(nn.Linear):
    words: int

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.words += hidden.shape[1] if self.training else 0
        return super().forward(hidden)

    def get_extra_state(self) -> Any:
        return {"words": self.words}

    def set_extra_state(self, state: Any) -> None:
        self.words = state["words"]


@pytest.mark.parametrize("values_alone", [False, True])
def test_extra_states(values_alone: bool, tmp_path: Path) -> None:
    first, second = _Extra(inf.AdamW), _Extra(inf.AdamW, seed=7)
    kept = saved_each_epoch(tmp_path / "kept", save_weights_only=values_alone)
    offloaded_fit(tmp_path / "a", first, callbacks=[kept])
    assert first.net.head.words == 16 * 8
    path = tmp_path / "kept" / "epoch=0.ckpt"
    if values_alone:
        made = trainer(InfinityStrategy(policy(tmp_path / "b")))
        made.validate(second, batches(), ckpt_path=path, verbose=False)
        assert second.net.head.words == 8 * 8
    else:
        offloaded_fit(tmp_path / "b", second, ckpt_path=path)
        assert second.net.head.words == 16 * 8
        assert second.losses == first.losses[8:]


class _Setting:
    """Hyper-parameter of the user's own: nothing that `torch.load(weights_only=True)` knows."""

    def __init__(self, words: int) -> None:
        self.words = words

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Setting) and other.words == self.words


class _Told(Module):
    def __init__(self, setting: Any, **values: Any) -> None:
        super().__init__(inf.AdamW, **values)
        self.save_hyperparameters("setting")
        self.found: Any = None

    def on_load_checkpoint(self, checkpoint: Any) -> None:
        self.found = checkpoint["hyper_parameters"]["setting"]


def test_a_checkpoint_with_classes_of_ones_own(tmp_path: Path) -> None:
    whole, first = _Told(_Setting(1)), _Told(_Setting(3))
    offloaded_fit(tmp_path / "a", whole, max_epochs=3)
    kept = saved_each_epoch(tmp_path / "kept")
    offloaded_fit(tmp_path / "b", first, callbacks=[kept])
    path = tmp_path / "kept" / "epoch=1.ckpt"
    with pytest.raises(pickle.UnpicklingError, match="weights_only"):
        offloaded_fit(tmp_path / "c", _Told(_Setting(1)), ckpt_path=path, weights_only=True)
    second = _Told(_Setting(1), seed=7)
    offloaded_fit(tmp_path / "d", second, ckpt_path=path, weights_only=False, max_epochs=3)
    assert second.found == _Setting(3)
    assert first.losses + second.losses == whole.losses
    assert_same(states(second), states(whole))
    # The same trainer and module again, which are offloaded by now.
    made = trainer(InfinityStrategy(policy(tmp_path / "e")))
    other = _Told(_Setting(1), seed=7)
    values = [
        made.validate(other, batches(), ckpt_path=path, weights_only=False, verbose=False)
        for path in (path, tmp_path / "kept" / "epoch=0.ckpt", path)
    ]
    assert values[0] == values[2] != values[1]


@pytest.mark.parametrize("whole", [True, False])
def test_states_of_what_is_not_offloaded(whole: bool, tmp_path: Path) -> None:
    """Metrics, and with an offloaded net inside of the module its own buffers and parameters."""

    def made(place: str, seed: int = 0) -> _Measured:
        module = _Measured(inf.AdamW, seed=seed)
        if not whole:
            inf.offload(module.net, policy(tmp_path / place))
            module.optimizer = lambda _params, lr: inf.AdamW(module.net.parameters(), lr=lr)
        return module

    first, second = made("a"), made("b", seed=7)
    with torch.no_grad():
        first.scale.fill_(2.0)
    offloaded_fit(tmp_path / "c", first, callbacks=[saved_each_epoch(tmp_path / "kept")])
    path = tmp_path / "kept" / "epoch=1.ckpt"
    offloaded_fit(tmp_path / "d", second, ckpt_path=path)
    assert second.metric.compute() == first.metric.compute()
    assert second.count == 16
    assert second.state_dict()["scale"] == 2.0


# -- before, between and after runs ----------------------------------------------------------------


def test_the_module_is_of_use_after_the_run(tmp_path: Path) -> None:
    module = Module(inf.AdamW)
    made = offloaded_fit(tmp_path / "swap", module)
    with torch.no_grad():
        assert module(torch.zeros(1, 2, dtype=torch.long)).shape == (1, 2, 32)
    inf.export_safetensors(module, tmp_path / "export")
    assert (tmp_path / "export" / "model.safetensors").is_file()
    # The same trainer continues, and then another one.
    made.fit_loop.max_epochs = 3
    made.fit(module, batches())
    assert len(module.losses) == 24
    fit(InfinityStrategy(), module, max_epochs=1)
    assert len(module.losses) == 32
    inf.handle(module).close()
    with pytest.raises(ValueError, match="was closed"):
        fit(InfinityStrategy(), module)


def test_no_engine_is_closed_by_an_error(tmp_path: Path) -> None:
    class _Breaks(Module):
        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            if index == 2 and len(self.losses) == 2:
                raise ZeroDivisionError
            return super().training_step(batch, index)

    module = _Breaks(inf.AdamW)
    kept = OnExceptionCheckpoint(tmp_path / "kept")
    with pytest.raises(ZeroDivisionError):
        offloaded_fit(tmp_path / "swap", module, callbacks=[kept])
    module.losses.append(0.0)
    fit(InfinityStrategy(), module, max_epochs=1)
    assert len(module.losses) == 11
    # A checkpoint saved in mid-epoch resumes as Lightning resumes in mid-epoch.
    other = Module(inf.AdamW, seed=7)
    path = tmp_path / "kept" / "on_exception.ckpt"
    offloaded_fit(tmp_path / "two", other, ckpt_path=path, max_epochs=1)
    assert len(other.losses) == 6


def test_a_device_with_memory_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the end of a run no tensor of the module moves to another device."""
    module = Module(inf.AdamW)
    with simulated(monkeypatch, seed=3):
        made = offloaded_fit(tmp_path, module, policy={"params": "device"})
        made.validate(module, batches(), verbose=False)
        close(module)
    assert module.losses == pytest.approx(in_memory().losses, rel=ULPS)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device here")
@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
def test_on_a_gpu(precision: str, tmp_path: Path) -> None:
    module, values = Module(inf.AdamW), {"accelerator": "gpu", "precision": precision}
    module.metric = MeanMetric()
    made = offloaded_fit(tmp_path, module, **values)
    assert {param.device for param in module.parameters()} == {torch.device("cuda", 0)}
    assert module.device == module.metric.device == torch.device("cuda", 0)
    made.validate(module, batches(), verbose=False)
    rel = 1e-5 if precision == "32-true" else 5e-3
    assert module.losses == pytest.approx(in_memory(**values).losses, rel=rel)


def test_a_module_on_the_meta_device(tmp_path: Path) -> None:
    plain = Module()
    inf.offload(plain.net, policy(tmp_path / "a"))
    inf.export_safetensors(plain.net, tmp_path / "values")
    close(plain)

    class _Meta(Module):
        def build(self) -> None:
            with self.trainer.init_module(empty_init=True):
                self.net = Net()
            assert self.net.head.weight.is_meta

    def offload(module: L.LightningModule) -> None:
        inf.offload(module.net, policy(tmp_path / "b"), load=tmp_path / "values")

    module = _Meta(inf.AdamW, offload)
    fit("infinity", module)
    assert module.losses == pytest.approx(in_memory().losses, rel=ULPS)


class _Thaws(Callback):
    """Trains a layer from the second epoch on."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        pl_module.net.first.requires_grad_(False)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == 1:
            pl_module.net.first.requires_grad_(True)
            layer = list(pl_module.net.first.parameters())
            trainer.optimizers[0].add_param_group({"params": layer, "lr": 1e-2})


class _Some(Module):
    def configure_optimizers(self) -> Any:
        return self.optimizer([param for param in self.parameters() if param.requires_grad], 1e-2)


def test_a_layer_that_is_thawed(tmp_path: Path) -> None:
    module, plain = _Some(inf.AdamW), _Some()
    fit("auto", plain, callbacks=[_Thaws()], enable_checkpointing=False)
    offloaded_fit(tmp_path, module, callbacks=[_Thaws()], enable_checkpointing=False)
    assert module.losses == pytest.approx(plain.losses, rel=ULPS)


def test_a_compiled_module(tmp_path: Path) -> None:
    module = Module(inf.AdamW)
    compiled = torch.compile(module, backend="eager")
    trainer(InfinityStrategy(policy(tmp_path)), max_epochs=1).fit(compiled, batches())
    assert module.losses == pytest.approx(in_memory(max_epochs=1).losses, rel=ULPS)


def test_callbacks_of_every_day(tmp_path: Path) -> None:
    """Sanity checks before the first step, validation in between, a stop before the end, sums of
    another length from the second epoch on."""
    losses = []
    for optimizer, strategy in (
        (torch.optim.AdamW, "auto"),
        (inf.AdamW, InfinityStrategy(policy(tmp_path))),
    ):
        module = Module(optimizer)
        made = trainer(
            strategy, max_epochs=9, num_sanity_val_steps=2, val_check_interval=4,
            enable_checkpointing=False,
            callbacks=[
                EarlyStopping("val", patience=2, min_delta=0.5),
                GradientAccumulationScheduler({0: 2, 1: 1}),
            ],
        )  # fmt: skip
        made.fit(module, batches(), batches(8))
        losses.append(module.losses)
    assert losses[1] == pytest.approx(losses[0], rel=ULPS)
    assert 0 < len(losses[0]) < 72


def test_the_learning_rate_finder_leaves_no_trace(tmp_path: Path) -> None:
    class _Rated(Module):
        lr = 1e-2

    module = _Rated(inf.AdamW)
    made = trainer(
        InfinityStrategy(policy(tmp_path / "swap")), default_root_dir=tmp_path, max_epochs=1
    )
    found = Tuner(made).lr_find(module, batches(), num_training=6, update_attr=False)
    assert len(found.results["loss"]) == 6
    assert not list(tmp_path.glob("*.ckpt"))
    module.losses.clear()
    made.fit(module, batches())
    assert module.losses == pytest.approx(in_memory(max_epochs=1).losses, rel=ULPS)


def test_the_rate_is_logged(tmp_path: Path) -> None:
    class _Rates(LearningRateMonitor):
        found: list[float]

        def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
            self.found.append(trainer.optimizers[0].param_groups[0]["lr"])

    seen = _Rates(logging_interval="step")
    seen.found = []
    made = trainer(
        InfinityStrategy(policy(tmp_path / "swap")), callbacks=[seen], max_epochs=1,
        logger=L.pytorch.loggers.CSVLogger(tmp_path), enable_checkpointing=False,
    )  # fmt: skip
    made.fit(Module(inf.AdamW), batches())
    assert seen.found == pytest.approx([1e-2 * 0.9**step for step in range(8)])


# -- loops of one's own ----------------------------------------------------------------------------


def test_manual_optimization_with_two_optimizers(tmp_path: Path) -> None:
    def made(place: str, seed: int = 0) -> Rivals:
        return Rivals(inf.AdamW, seed, place=tmp_path / place)

    plain, whole = Rivals(torch.optim.AdamW), made("a")
    fit("auto", plain, max_epochs=3)
    fit("infinity", whole, max_epochs=3)
    assert whole.losses == pytest.approx(plain.losses, rel=1e-5)
    first, second = made("b"), made("c", seed=7)
    kept = saved_each_epoch(tmp_path / "kept")
    fit("infinity", first, callbacks=[kept])
    fit("infinity", second, max_epochs=3, ckpt_path=tmp_path / "kept" / "epoch=1.ckpt")
    assert first.losses + second.losses == whole.losses
    assert_same(states(second), states(whole))


def test_manual_optimization_of_a_module_that_is_offloaded_as_a_whole(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"Rivals uses manual optimization.*configure_model"):
        offloaded_fit(tmp_path, Rivals(inf.AdamW))


# -- refused ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "callback",
    [
        WeightAveraging(),
        StochasticWeightAveraging(1e-2),
        ModelPruning("l1_unstructured"),
        BackboneFinetuning(),
    ],
    ids=lambda callback: type(callback).__name__,
)
def test_callbacks_that_need_the_values(callback: Callback, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"callback {type(callback).__name__} does not work"):
        offloaded_fit(tmp_path, Module(inf.AdamW), callbacks=[callback])


def test_an_optimizer_of_torch(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"torch.optim.adamw.AdamW over net.embedding.weight"):
        offloaded_fit(tmp_path, Module())


def test_settings_that_mean_nothing_here(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"InfinityStrategy\(find_unused_parameters=\.\.\.\)"):
        InfinityStrategy(find_unused_parameters=True)
    with pytest.raises(ValueError, match="sync_batchnorm=True"):
        offloaded_fit(tmp_path, Module(inf.AdamW), sync_batchnorm=True)


def test_paths_and_options_of_other_storage(tmp_path: Path) -> None:
    made = offloaded_fit(tmp_path / "swap", Module(inf.AdamW), max_epochs=1)
    with pytest.raises(ValueError, match=r"s3://bucket/a\.ckpt: a checkpoint of offloaded modules"):
        made.save_checkpoint("s3://bucket/a.ckpt")
    with pytest.raises(TypeError, match="storage_options"):
        made.save_checkpoint(tmp_path / "a.ckpt", storage_options={})
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"not a checkpoint of strategy='infinity'.*trainer\.ckpt"):
        made.test(Module(), batches(), ckpt_path=tmp_path / "empty")


class _Later(TorchCheckpointIO):
    """Writes once the test allows it."""

    def __init__(self) -> None:
        self.let = threading.Event()

    def save_checkpoint(self, *args: Any, **values: Any) -> None:
        self.let.wait(60)
        super().save_checkpoint(*args, **values)


def test_a_checkpoint_io_that_writes_later(tmp_path: Path) -> None:
    later = _Later()
    asynchronous = AsyncCheckpointIO(later)
    made = offloaded_fit(tmp_path / "swap", Module(inf.AdamW), plugins=[asynchronous])
    with pytest.raises(ValueError, match=r"AsyncCheckpointIO had not written trainer\.ckpt"):
        made.save_checkpoint(tmp_path / "kept.ckpt")
    later.let.set()
    asynchronous.teardown()
    assert not (tmp_path / "kept.ckpt").exists()


def test_a_release_that_renamed_a_method() -> None:
    with pytest.raises(ImportError, match=r"no _Norms.on_training.*tested with lightning 2\.6\.6"):
        check_methods(_Norms, ("on_training",), "lightning", "2.6.6")


# -- launched --------------------------------------------------------------------------------------


class _Signals(Callback):
    found: Any = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.found = signal.getsignal(signal.SIGUSR1)


def test_slurm_does_not_save_in_the_midst_of_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    numbers = {"NTASKS": 1, "PROCID": 0, "LOCALID": 0, "NODEID": 0, "JOB_ID": 1234}
    for name, number in {**numbers, "JOB_NAME": "train"}.items():
        monkeypatch.setenv(f"SLURM_{name}", str(number))
    module, seen = Module(inf.AdamW), _Signals()
    before = signal.getsignal(signal.SIGUSR1)
    made = offloaded_fit(
        tmp_path, module, callbacks=[seen], enable_checkpointing=False,
        plugins=[SLURMEnvironment(auto_requeue=True)],
    )  # fmt: skip
    assert seen.found == before
    assert not made.strategy.cluster_environment.auto_requeue
    assert "SLURM's auto-requeue is off" in caplog.text
    assert len(module.losses) == 16

SCRIPT = '''
import sys
from pathlib import Path
import infinity as inf
from tests.integrations.lightning_runs import Module, fit, policy
from infinity.integrations.lightning import InfinityStrategy

if __name__ == "__main__":
    place = Path(sys.argv[1])
    # Not seeded: rank 0's values are everybody's.
    module = Module(inf.AdamW, seed=None)
    made = fit(InfinityStrategy(policy(place)), module, devices=2, use_distributed_sampler=True)
    state = module.state_dict()
    found = sum(float(value.double().sum()) for value in state.values())
    Path(sys.argv[2], f"rank{made.global_rank}").write_text(repr(found))
'''


def test_ranks_launched_as_by_ddp(tmp_path: Path) -> None:
    """The script starts its second rank itself."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "swap"), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    one, two = (float((tmp_path / f"rank{rank}").read_text()) for rank in range(2))
    assert one == two
