"""A device with memory of its own, simulated: the same bits as on the CPU, nothing unordered, no
pageable memory and no copy that blocks on a path of training, nothing left behind."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import infinity as inf
from infinity._src.cabi.records import HYPER, SEG, Algorithm, Format, GradDtype
from infinity._src.distributed.communicator import Comm, device_stuck
from infinity._src.engine import handle as engine
from infinity._src.engine import rank_setup as setup
from infinity._src.kernels.update import UpdatePlan
from infinity.aio import Seam
from infinity.errors import DeviceCopyError, RankFailed
from tests import harness, models
from tests.bus import assert_smooth, watched
from tests.device import simulated
from tests.marks import mostly_slow

NVME = {"params": "nvme", "optim": "nvme"}

# Too little RAM for the gradients of `alike`, whose units are small.
SPILLED = {
    **NVME,
    "grads": "nvme",
    "ram": "570KiB",
    "resident": {"params": 0.0, "optim": 0.0},
    "unit_bytes_max": 4096,
}

POLICIES: dict[str, dict[str, Any]] = {
    "device": {"params": "device"},
    "cpu": {},
    "min": {**NVME, "ram": "min"},
    "compact": {**NVME, "ram": "min", "state": "compact"},
    "spilled": SPILLED,
    "fp32 gradients": {**NVME, "ram": "min", "grad_dtype": torch.float32},
    "backward": {**NVME, "ram": "min", "update": "backward"},
    "backward in RAM": {"update": "backward"},
    "speculative": {**NVME, "ram": "min", "update": "backward", "generations": 2},
    "delayed": {**NVME, "ram": "min", "update": "delayed", "delayed_warmup": 1},
    "two generations": {**NVME, "ram": "min", "generations": 2},
    "updated there": {**NVME, "ram": "min", "update_on": "device"},
    "updated there, in RAM": {"update_on": "device"},
    "updated there, compact": {**NVME, "ram": "min", "update_on": "device", "state": "compact"},
    "updated there, spilled": {**SPILLED, "update_on": "device"},
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
) -> harness.Run:
    nvme = {"nvme": directory} if "nvme" in given.values() else {}
    return harness.offloaded(training, inf.Policy(**given, **nvme), seam=seam)


def alike(given: dict[str, Any]) -> harness.Training:
    """Return a training that this policy can do: update="backward" alone neither clips nor adds up
    without `no_sync`. Spilling saves memory only with many layers."""
    early = given.get("update") == "backward" and "generations" not in given
    options: dict[str, Any] = {"max_norm": None, "accumulation": 1} if early else {}
    if "grads" in given:
        return harness.Training(functools.partial(models.Small, layers=6), steps=2, **options)
    return harness.Training(models.Small, steps=3, **options)


QUICK = (
    *("device", "min", "spilled", "backward", "speculative", "delayed", "two generations"),
    *("updated there, in RAM", "updated there, compact", "updated there, spilled"),
)


@pytest.mark.parametrize("name", mostly_slow(POLICIES, *QUICK))
def test_the_same_bits_as_on_the_cpu(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = POLICIES[name]
    expected = _on_the_cpu(name, tmp_path)
    training = alike(given)
    with watched() as bus, simulated(monkeypatch, seed=len(name)) as device:
        found = train(training, given, tmp_path, seam=Seam(seed=len(name), delay_us_max=1000))
        assert device.live() == (0, 0, 0)
        to_device, from_device = device.copied()
    harness.assert_same(found, expected)
    assert (found.stats.terms is None) == (given.get("update_on") == "device")
    assert (found.stats.spilled_bytes > 0) == ("grads" in given)
    assert (found.stats.h2d_bytes, found.stats.d2h_bytes) == (to_device, from_device)
    assert from_device > 0
    assert to_device > 0
    # A spilled sum is in RAM only when the next gradient is added to it.
    added = "params/accumulator.py: _sum_on_device" if "grads" in given else ""
    assert_smooth(bus, beside=added)
    norms = [
        count
        for one, count in bus.found.items()
        if one.where == "params/accumulator.py: read_device_norms"
    ]
    if name == "min":
        assert norms == [training.steps], "norms are read once a step"


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
    harness.assert_same(found, expected)
    assert found.stats.activations.stored_bytes > 0
    assert found.stats.activations.fetched_bytes > 0


@settings(
    max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
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
    harness.assert_same(found, expected)


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
    harness.assert_same(found, expected)


_KNOWN: dict[str, harness.Run] = {}


def _on_the_cpu(name: str, directory: Path) -> harness.Run:
    if name not in _KNOWN:
        _KNOWN[name] = train(
            alike(POLICIES[name]), {**POLICIES[name], "update_on": "cpu"}, directory
        )
    return _KNOWN[name]


@pytest.mark.parametrize("name", ["min", "backward", "updated there"])
def test_a_copy_that_fails_is_told_and_closing_still_works(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = POLICIES[name]
    with simulated(monkeypatch) as device:
        device.fail(40)
        with pytest.raises((DeviceCopyError, RuntimeError), match="device"):
            train(alike(given), given, tmp_path)
        assert device.live() == (0, 0, 0)


def test_the_threads_current_device_stays_what_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With two devices a thread's current device may not be the model's, and torch allocates on the
    current one."""
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
        with pytest.raises(RankFailed, match=r"rank 1 has ended; the coll.* this process must"):
            models.loss_of(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            models.loss_of(model, batch)
        with pytest.raises(RankFailed, match="the engine keeps its memory"):
            handle.close()
        assert handle.closed
        assert device.live()[0] == before[0] > 0
        # All of it is still pinned and mapped, so that late copies find memory.
        assert handle.parts.split.device.driver._pinned.items() >= pinned.items()
        device.hold_kernels(False)
        handle.close()  # nothing more
        # This process continues, and its other tests need the device. So let the late copies run;
        # their memory still exists.
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


@pytest.mark.parametrize(
    ("optimizer", "update_on", "checkpointing"),
    [("SGD", "device", None), ("Lion", "device", True), ("SGD", "cpu", True),
     ("Adagrad", "cpu", None)],
)  # fmt: skip
def test_other_loops(
    optimizer: str,
    update_on: str,
    checkpointing: bool | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = {"SGD": (("momentum", 0.9),), "Lion": (("betas", (0.9, 0.98)),)}
    training = harness.Training(
        models.Small,
        optimizer=optimizer,
        options=options.get(optimizer, ()),
        lr=1e-3,
        checkpointing=checkpointing,
        scaler=(4.0, 2),
    )
    with watched() as bus, simulated(monkeypatch):
        found = train(training, {**NVME, "ram": "min", "update_on": update_on}, tmp_path)
    harness.assert_same(found, harness.reference(training))
    assert_smooth(bus)


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


def unheld(**given: Any) -> list[torch.Tensor]:
    """Sums of gradients before there is an optimizer, and the parameters after steps with one."""
    model = inf.offload(models.make(models.Small), inf.Policy(**given))
    batches: Any = models.token_batches(4)
    with harness.one_thread():
        for batch in batches[:2]:
            models.loss_of(model, batch).backward()
        found = [param.grad.materialize() for param in model.parameters()]
        optimizer = inf.AdamW(model.parameters(), lr=1e-2)
        for batch in batches[2:]:
            models.loss_of(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    found += [value.clone() for value in model.state_dict().values()]
    inf.handle(model).close()
    return found


@pytest.mark.parametrize("grads", ["nvme", "cpu"])
def test_gradients_may_come_before_there_is_an_optimizer(
    grads: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients without an optimizer wait in pinned memory, and move to where its own wait."""
    given = {**NVME, "nvme": tmp_path, "ram": "2800KiB" if grads == "nvme" else "min"}
    expected = unheld(**given, grads=grads)
    with watched() as bus, simulated(monkeypatch) as device:
        found = unheld(**given, grads=grads)
        assert device.live() == (0, 0, 0)
    assert_smooth(bus)
    assert all(torch.equal(mine, other) for mine, other in zip(found, expected, strict=True))


class _Reads(TorchDispatchMode):
    """Counts the operations that read some memory."""

    def __init__(self, memory: torch.Tensor) -> None:
        super().__init__()
        self.low, self.high = memory.data_ptr(), memory.data_ptr() + memory.nbytes
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [one for one in args if isinstance(one, torch.Tensor) and one.numel()]
        # Views read nothing.
        if not func.is_view:
            self.count += any(self.low <= one.data_ptr() < self.high for one in given)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_update_on_the_device_reads_the_gradient_once(dtype: torch.dtype) -> None:
    """Each kernel that reads pinned memory reads over the bus."""
    grad, hypers = torch.randn(256).to(dtype), np.zeros(1, HYPER)
    hypers["algorithm"], hypers["eps"], hypers["bc2_sqrt"] = Algorithm.ADAMW, 1e-8, 1.0
    hypers["log_count"], hypers["log_kind"][:, 0], hypers["log_value"][:, 0] = 1, 0, 0.5
    seg = np.zeros(1, SEG)
    seg["numel"], seg["grad"] = 256, grad.data_ptr()
    seg["grad_dtype"] = GradDtype.FP32 if dtype is torch.float32 else GradDtype.BF16
    plan = UpdatePlan(Format.SPLIT, [seg], hypers, device=torch.device("cpu"))
    sections = [
        torch.zeros(section.size_bytes(256), dtype=torch.uint8)
        for section in Format.of(Format.SPLIT).sections
    ]
    with _Reads(grad) as reads:
        plan.run(0, sections)
    assert reads.count == 1
