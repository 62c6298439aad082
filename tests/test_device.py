"""A device with memory of its own, simulated: the same bits as on the CPU, nothing unordered,
nothing left behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import infinity as inf
from infinity._src.distributed.communicator import Comm, device_stuck
from infinity._src.engine import handle as engine
from infinity._src.engine import rank_setup as setup
from infinity.aio import Seam
from infinity.errors import DeviceCopyError, RankFailed
from tests import harness, models
from tests.device import simulated
from tests.marks import alternating
from tests.simulated import Simulated

NVME = {"params": "nvme", "optim": "nvme"}

POLICIES: dict[str, dict[str, Any]] = {
    "device": {"params": "device"},
    "cpu": {},
    "min": {**NVME, "ram": "min"},
    "compact": {**NVME, "ram": "min", "state": "compact"},
    "spilled": {**NVME, "grads": "nvme", "ram": "2800KiB"},
    "fp32 gradients": {**NVME, "ram": "min", "grad_dtype": torch.float32},
    "backward": {**NVME, "ram": "min", "update": "backward"},
    "backward in RAM": {"update": "backward"},
    "speculative": {**NVME, "ram": "min", "update": "backward", "generations": 2},
    "delayed": {**NVME, "ram": "min", "update": "delayed", "delayed_warmup": 1},
    "two generations": {**NVME, "ram": "min", "generations": 2},
    "updated there": {**NVME, "ram": "min", "update_on": "device"},
    "updated there, in RAM": {"update_on": "device"},
    "updated there, compact": {**NVME, "ram": "min", "update_on": "device", "state": "compact"},
    "updated there, spilled": {**NVME, "grads": "nvme", "ram": "2800KiB", "update_on": "device"},
    "updated there, in transactions": {
        **NVME,
        "ram": "min",
        "update_on": "device",
        "generations": 2,
    },
    "unverified": {**NVME, "ram": "min", "verify": "off"},
}


def train(
    training: harness.Training, given: dict[str, Any], directory: Path, *, seam: Seam | None = None
) -> harness.Result:
    nvme = {"nvme": directory} if "nvme" in given.values() else {}
    return harness.offloaded(training, inf.Policy(**given, **nvme), seam=seam)


def alike(given: dict[str, Any]) -> harness.Training:
    """Return a training that this policy can do: update="backward" alone neither clips nor adds up
    without `no_sync`."""
    early = given.get("update") == "backward" and "generations" not in given
    options = {"max_norm": None, "accumulation": 1} if early else {}
    return harness.Training(models.Small, steps=3, **options)


@pytest.mark.parametrize("name", alternating(POLICIES))
def test_the_same_bits_as_on_the_cpu(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = POLICIES[name]
    expected = _on_the_cpu(name, tmp_path)
    with simulated(monkeypatch, seed=len(name)) as device:
        found = train(alike(given), given, tmp_path, seam=Seam(seed=len(name), delay_us_max=1000))
        assert device.live() == (0, 0, 0)
        to_device, from_device = device.copied()
    harness.assert_equal(found, expected)
    assert (found.stats.terms is None) == (given.get("update_on") == "device")
    assert (found.stats.h2d_bytes, found.stats.d2h_bytes) == (to_device, from_device)
    assert from_device > 0
    assert to_device > 0


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_activations_leave_the_device(
    tier: str, reentrant: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from infinity._src.hooks import activation_offload as activations

    monkeypatch.setattr(activations, "SMALLEST_BYTES", 1)
    training = harness.Training(lambda: models.Small(layers=6), steps=2, checkpointing=reentrant)
    expected = train(training, {}, tmp_path)
    with simulated(monkeypatch) as device:
        monkeypatch.setattr(activations, "SMALLEST_BYTES", 1)
        found = train(training, {**NVME, "ram": "min", "activations": tier}, tmp_path)
        assert device.live() == (0, 0, 0)
    harness.assert_equal(found, expected)
    assert found.stats.activations.stored_bytes > 0
    assert found.stats.activations.fetched_bytes > 0


@settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    name=st.sampled_from(sorted(POLICIES)),
    seed=st.integers(0, 99),
    delay_us=st.sampled_from([0, 300, 5000]),
    drive_us=st.sampled_from([0, 2000]),
)
def test_whatever_the_timing(
    name: str,
    seed: int,
    delay_us: int,
    drive_us: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = POLICIES[name]
    expected = _on_the_cpu(name, tmp_path)
    with simulated(monkeypatch, seed=seed, delay_us=delay_us):
        found = train(alike(given), given, tmp_path, seam=Seam(seed=seed, delay_us_max=drive_us))
    harness.assert_equal(found, expected)


@pytest.mark.parametrize("name", ["cpu", "min", "backward", "delayed", "updated there"])
def test_gradients_that_are_late(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels run behind the host: without its mark a copy would take what was there before."""
    given = POLICIES[name]
    expected = _on_the_cpu(name, tmp_path)
    with simulated(monkeypatch, delay_us=0, late_us=1000) as device:
        found = train(alike(given), given, tmp_path)
        assert device.live() == (0, 0, 0)
    harness.assert_equal(found, expected)


_KNOWN: dict[str, harness.Result] = {}


def _on_the_cpu(name: str, directory: Path) -> harness.Result:
    if name not in _KNOWN:
        _KNOWN[name] = train(
            alike(POLICIES[name]), {**POLICIES[name], "update_on": "cpu"}, directory
        )
    return _KNOWN[name]


@pytest.mark.parametrize("name", ["cpu", "min", "backward", "updated there"])
def test_a_copy_that_fails_is_told_and_closing_still_works(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = POLICIES[name]
    with simulated(monkeypatch) as device:
        _fails_at(40, device)
        with pytest.raises((DeviceCopyError, RuntimeError), match="device"):
            train(alike(given), given, tmp_path)
        assert device.live() == (0, 0, 0)


def _fails_at(nth: int, device: Simulated) -> None:
    device.fail(nth)


def test_the_threads_current_device_stays_what_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With two devices a thread's current one is not always the model's, and where torch allocates
    hangs on it."""
    with simulated(monkeypatch) as device:
        device.current(2)
        model = inf.offload(models.make(models.Small), inf.Policy(**NVME, nvme=tmp_path, ram="min"))
        assert device.current() == 2
        optimizer = inf.AdamW(model.parameters(), lr=1e-2)
        models.loss_of(model, models.token_batches(1)[0]).backward()
        assert device.current() == 2
        optimizer.step()
        model.state_dict()
        inf.handle(model).close()
        assert device.current() == 2
        device.current(0)


class StuckComm(Comm):
    """A communicator whose abort hangs, once `failure` is set."""

    failure: RankFailed | None = None

    def check_stuck(self) -> None:
        if self.failure is not None:
            raise device_stuck(self.failure)

    drain = check_stuck


def test_behind_a_collective_that_cannot_be_broken_off_nothing_is_freed_and_everything_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel waits for a peer that has died, for good, and gradients of a backward are behind
    it."""
    with simulated(monkeypatch, late_us=1) as device:
        monkeypatch.setattr(setup, "Comm", StuckComm)
        model = inf.offload(models.make(models.Small), inf.Policy(**NVME, nvme=tmp_path, ram="min"))
        optimizer = inf.AdamW(model.parameters(), lr=1e-2)
        handle = inf.handle(model)
        batch = models.token_batches(1)[0]
        before = device.live()
        pinned = dict(handle.parts.split.device.driver._pinned)
        device.hold_kernels(True)
        handle.comm.failure = RankFailed("rank 1 has ended", rank=1)
        with pytest.raises(RankFailed, match=r"rank 1 has ended; collectives .* this process must"):
            models.loss_of(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            models.loss_of(model, batch)
        with pytest.raises(RankFailed, match="the engine keeps its memory"):
            handle.close()
        assert handle.closed
        assert device.live()[0] == before[0] > 0
        # All of it is still pinned and mapped, so that what comes after all finds memory.
        assert handle.parts.split.device.driver._pinned.items() >= pinned.items()
        device.hold_kernels(False)
        handle.close()  # nothing more
        # Here the process goes on, and its other tests want the device. The copies arrive after
        # all, in memory that is still there.
        handle.comm.failure = None
        handle.parts.tiers.executor.wait_all()
        engine._KEPT.clear()
        handle._undo.close()


def thawed(*, held: bool, **given: Any) -> list[torch.Tensor]:
    """Parameters after steps of a model that was frozen when it was offloaded, but for its last
    layer; held: and when the optimizer was built."""
    model = models.make(models.Small)
    model.requires_grad_(False)
    model.head.requires_grad_(True)
    inf.offload(model, inf.Policy(**given))
    model.requires_grad_(not held)
    model.head.requires_grad_(True)
    optimizer = inf.AdamW(model.parameters(), lr=1e-2)
    for index, batch in enumerate(models.token_batches(3)):
        model.requires_grad_(not held or index > 0)
        model.head.requires_grad_(True)
        models.loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    found = [value.clone() for value in model.state_dict().values()]
    inf.handle(model).close()
    return found


@pytest.mark.parametrize("update", ["deferred", "backward"])
@pytest.mark.parametrize("held", [False, True], ids=["before the optimizer", "after it"])
def test_what_is_thawed_after_offload_trains(
    update: str, held: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = thawed(held=held, update=update)
    with simulated(monkeypatch) as device:
        found = thawed(held=held, update=update)
        assert device.live() == (0, 0, 0)
    assert all(torch.equal(mine, other) for mine, other in zip(found, expected, strict=True))


def test_a_gradient_that_the_loop_assigns_is_the_loops_to_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with simulated(monkeypatch, delay_us=200_000):
        model = inf.offload(models.make(models.Small), inf.Policy())
        inf.AdamW(model.parameters(), lr=1e-2)
        for param in list(model.parameters())[:4]:
            given = torch.ones(param.shape, dtype=param.dtype)
            param.grad = given
            given.zero_()
            assert torch.equal(param.grad.materialize(), torch.ones(param.shape))
        inf.handle(model).close()


def test_memory_that_cannot_be_pinned_is_told_and_may_be_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from infinity._src.memory.device import Device

    with simulated(monkeypatch):
        model = inf.offload(models.make(models.Small), inf.Policy())
        inf.AdamW(model.parameters(), lr=1e-2)
        pin, calls = Device.pin, []

        def refused(self: Device, slab: Any) -> None:
            calls.append(slab)
            if len(calls) == 2:
                raise DeviceCopyError("no more memory may be pinned")
            pin(self, slab)

        monkeypatch.setattr(Device, "pin", refused)
        batch = models.token_batches(1)[0]
        with pytest.raises(DeviceCopyError, match="no more memory"):
            models.loss_of(model, batch)
        models.loss_of(model, batch)
        assert len(calls) == 3
        inf.handle(model).close()


@pytest.mark.parametrize("optimizer", ["SGD", "Lion"])
def test_other_optimizers_are_updated_there(
    optimizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = (("momentum", 0.9),) if optimizer == "SGD" else ()
    training = harness.Training(
        models.Small, steps=3, optimizer=optimizer, options=options, lr=1e-3
    )
    given = {**NVME, "ram": "min"}
    expected = train(training, given, tmp_path)
    with simulated(monkeypatch):
        found = train(training, {**given, "update_on": "device"}, tmp_path)
    harness.assert_equal(found, expected)


def test_what_cannot_be_updated_there_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=r"inside opt\.step"):
        inf.Policy(update_on="device", update="backward")
    with pytest.raises(ValueError, match="computes on the CPU"):
        inf.offload(models.make(models.Small), inf.Policy(update_on="device"))
    with simulated(monkeypatch):
        model = inf.offload(models.make(models.Small), inf.Policy(update_on="device"))
        with pytest.raises(ValueError, match="AdamW, SGD and Lion"):
            inf.Elementwise(torch.optim.Adagrad, model.parameters(), lr=1e-2)
        inf.handle(model).close()
    with simulated(monkeypatch) as device:
        device.host_pointers(False)
        with pytest.raises(ValueError, match=r"CAN_USE_HOST_POINTER.*update_on='cpu'"):
            inf.offload(models.make(models.Small), inf.Policy(update_on="device"))
        assert device.live() == (0, 0, 0)
        inf.handle(inf.offload(models.make(models.Small), inf.Policy())).close()


def test_a_device_that_is_not_there_is_a_users_error() -> None:
    model = models.make(models.Small)
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="no CUDA device"):
            inf.offload(model, inf.Policy(device="cuda"))
    with pytest.raises(ValueError, match="give 'cpu', 'cuda'"):
        inf.Policy(device="gpu")
    with pytest.raises(ValueError, match="'cpu' and 'cuda'"):
        inf.offload(model, inf.Policy(device="meta"))


class _Routed(torch.nn.Module):
    """Each call goes through one expert of each block; the others get no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(
            torch.nn.ModuleDict({str(n): torch.nn.Linear(64, 64) for n in range(4)})
            for _ in range(3)
        )

    def forward(self, x: torch.Tensor, expert: int) -> torch.Tensor:
        for block in self.blocks:
            x = x + block[str(expert)](x)
        return x


def test_sums_that_no_gradient_comes_for_do_not_stay_on_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with simulated(monkeypatch):
        model = _Routed()
        inf.offload(model, inf.Policy())
        handle = inf.handle(model)
        optimizer = inf.AdamW(model.parameters(), lr=1e-3)
        for turn in range(8):
            model(torch.randn(4, 64), turn % 4).sum().backward()
            slots = [
                param.grad
                for unit in handle.units
                for param in unit.params
                if param.grad is not None
            ]
            assert not [slot.name for slot in slots if slot._h2d is not None]
        optimizer.step()
        handle.close()
