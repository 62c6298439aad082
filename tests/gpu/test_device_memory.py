"""Device memory: bounded by what `infinity plan` says, flat in the number of layers, never
fragmented, all given back."""

from __future__ import annotations

import dataclasses
import gc
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import infinity as inf
from infinity._src.plan.machine import describe_machine
from infinity._src.plan.predict import predict
from infinity._src.plan.workload import Job, ModelShape, shape_of
from infinity.errors import BudgetError
from tests import models, test_memory
from tests.test_bitwise import policy

MIB = 1 << 20
HIDDEN, LENGTH = 512, 64
PLACES: dict[str, dict[str, Any]] = {
    "cpu": {"params": "cpu", "optim": "cpu"},
    "nvme": {"params": "nvme", "optim": "nvme", "ram": "min"},
    "device": {"params": "device", "optim": "cpu"},
}
MODES: dict[str, dict[str, Any]] = {
    "deferred": {},
    "backward": {"update": "backward"},
    "delayed": {"update": "delayed", "delayed_warmup": 0},
}


@dataclasses.dataclass
class Rig:
    """A checkpointed Llama on the GPU, offloaded, with what the GPU held before it was."""

    model: Any
    optimizer: Any
    shape: ModelShape
    before_bytes: int

    def step(self, seed: int = 0, length: int = LENGTH) -> float:
        """One step; the loss is read, so the device is done with forward."""
        loss = models.loss_of(self.model, models.token_batches(1, seed=seed, length=length)[0])
        loss.backward()
        if inf.handle(self.model).policy.update != "backward":
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    @property
    def peak_bytes(self) -> int:
        """The most that was allocated since the model was offloaded, beyond what was there
        before."""
        return torch.cuda.max_memory_allocated() - self.before_bytes


def warm_up() -> None:
    """cuBLAS makes its workspaces at the first products, of each dtype, and keeps them."""
    for dtype in (torch.bfloat16, torch.float32):
        square = torch.ones(64, 64, device="cuda", dtype=dtype, requires_grad=True)
        (torch.nn.functional.linear(square, square, square[0]) @ square).sum().backward()
    torch.cuda.synchronize()


def rig(chosen: inf.Policy, layers: int) -> Rig:
    """Fill it from the CPU, unit by unit: the whole model is never on the GPU."""
    gc.collect()
    warm_up()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    model: Any = models.make(
        lambda: models.llama(layers=layers, hidden=HIDDEN, attn_implementation="sdpa")
    )
    values = dict(model.state_dict())
    with torch.device("meta"):
        model = models.make(
            lambda: models.llama(layers=layers, hidden=HIDDEN, attn_implementation="sdpa")
        )
    model.gradient_checkpointing_enable({"use_reentrant": False})
    shape = shape_of(model)
    torch.cuda.reset_peak_memory_stats()
    inf.offload(model, dataclasses.replace(chosen, device="cuda"), load=values)
    return Rig(model, inf.AdamW(model.parameters(), lr=1e-4), shape, before)


@pytest.fixture
def close_all() -> Iterator[list[Rig]]:
    """Rigs put here are closed in the end."""
    found: list[Rig] = []
    yield found
    for one in found:
        inf.handle(one.model).close()


def planned_bytes(made: Rig, chosen: inf.Policy) -> float:
    """Return the bytes of GPU memory that `infinity plan` asks for, for micro-batches of 2 rows."""
    job = Job(chosen, tokens=2 * LENGTH, sequence=LENGTH)
    machine = describe_machine(gpus=1, gpu_mem_bytes=80 << 30, drives=1)
    return predict(made.shape, machine, job).gpu.bytes


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("place", PLACES)
def test_the_peak_is_within_the_plan(
    place: str, mode: str, cuda: str, tmp_path: Path, close_all: list[Rig]
) -> None:
    chosen = policy(tmp_path, **PLACES[place], **MODES[mode])
    made = rig(chosen, 16)
    close_all.append(made)
    for number in range(4):
        made.step(number)
    stats = inf.handle(made.model).stats()
    planned = planned_bytes(made, chosen)
    counted = stats.gathered_bytes_peak + stats.fresh_grad_bytes_peak
    print(
        f"{place} {mode}: peak {made.peak_bytes / MIB:.1f} MiB, planned {planned / MIB:.1f}, "
        f"counted {counted / MIB:.1f}"
    )
    assert made.peak_bytes <= planned + 2 * MIB
    if place != "device":
        # less than the parameters: or nothing was offloaded
        assert made.peak_bytes < 2 * stats.params


@pytest.mark.parametrize("place", ["cpu", "nvme"])
def test_the_peak_is_flat_in_the_number_of_layers(
    place: str, cuda: str, tmp_path: Path, close_all: list[Rig]
) -> None:
    peaks = []
    for layers in (4, 16):
        made = rig(policy(tmp_path, **PLACES[place]), layers)
        close_all.append(made)
        for number in range(3):
            made.step(number)
        peaks.append(made.peak_bytes)
        inf.handle(made.model).close()
    boundaries = 12 * 2 * LENGTH * HIDDEN * 2  # 12 layers more, 2 rows, bf16
    assert peaks[1] <= peaks[0] + boundaries + MIB


@pytest.mark.parametrize("place", ["cpu", "nvme"])
def test_fifty_steps_of_changing_lengths_leave_no_holes(
    place: str, cuda: str, tmp_path: Path, close_all: list[Rig]
) -> None:
    """Reserved memory that no tensor uses is what an allocator lost to holes; gathers must not make
    it grow."""
    made = rig(policy(tmp_path, **PLACES[place]), 8)
    close_all.append(made)
    torch.cuda.reset_peak_memory_stats()
    spare, reserved = [], []
    for number in range(50):
        made.step(number, length=(7, 64, 23, 41, 58)[number % 5])
        found = torch.cuda.memory_stats()
        reserved.append(found["reserved_bytes.all.current"])
        spare.append(reserved[-1] - found["allocated_bytes.all.current"])
    assert max(reserved[10:]) <= max(reserved[:10]) + 4 * MIB, [size // MIB for size in reserved]
    largest = made.shape.largest_unit_bytes
    peak = torch.cuda.memory_stats()["allocated_bytes.all.peak"]
    # Segments of 20 MiB and 2 MiB that are partly used: two of each, and a unit that has just left.
    assert max(reserved) <= peak + largest + 44 * MIB
    found = torch.cuda.memory_stats()
    assert found["num_alloc_retries"] == 0
    assert found["num_ooms"] == 0


@pytest.mark.parametrize("mode", MODES)
def test_no_step_after_the_first_two_pins_memory(
    mode: str, cuda: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    allocations = test_memory.Allocations(monkeypatch)
    made = rig(policy(tmp_path, **PLACES["nvme"], **MODES[mode]), 4)
    seen = []
    for number in range(6):
        made.step(number)
        inf.handle(made.model).flush()
        # What torch itself pins, besides: each block that it asks of the driver is counted.
        seen.append(
            {
                **allocations.now(),
                "pinned by torch": torch.cuda.memory.host_memory_stats()["num_host_alloc"],
            }
        )
    assert seen[2:] == seen[2:3] * 4
    inf.handle(made.model).close()


@pytest.mark.parametrize("place", PLACES)
def test_close_gives_all_device_memory_back(place: str, cuda: str, tmp_path: Path) -> None:
    made = rig(policy(tmp_path, **PLACES[place]), 4)
    for number in range(2):
        made.step(number)
    assert made.peak_bytes > 4 * MIB
    inf.handle(made.model).close()
    before = made.before_bytes
    del made
    gc.collect()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= before + 64 * 1024  # the model's buffers: rotary tables


def test_a_failed_offload_leaves_nothing_on_the_device(cuda: str, tmp_path: Path) -> None:
    warm_up()
    before = torch.cuda.memory_allocated()
    model = models.make(models.llama).to("cuda")
    own = torch.cuda.memory_allocated()
    with pytest.raises(BudgetError):
        inf.offload(model, policy(tmp_path, params="nvme", optim="nvme", ram="1KiB"))
    gc.collect()
    assert torch.cuda.memory_allocated() <= own
    assert all(parameter.is_cuda for parameter in model.parameters())  # as it was
    loss = models.loss_of(model, models.token_batches(1)[0])
    loss.backward()
    assert torch.isfinite(loss)
    del model, loss
    gc.collect()
    assert torch.cuda.memory_allocated() <= before


# -- what crosses the bus --------------------------------------------------------------------------


def copied_bytes(trace: Path) -> dict[str, int]:
    """Bytes by direction ("HtoD", "DtoH"), as the driver saw them: a trace of torch's profiler."""
    found = {"HtoD": 0, "DtoH": 0}
    for event in json.loads(trace.read_text())["traceEvents"]:
        if event.get("cat") == "gpu_memcpy":
            for way in found:
                if f"Memcpy {way}" in event["name"]:
                    found[way] += int(event["args"]["bytes"])
    return found


@pytest.mark.parametrize("place", ["cpu", "nvme"])
def test_parameters_come_twice_per_step_and_gradients_leave_once(
    place: str, cuda: str, tmp_path: Path, close_all: list[Rig]
) -> None:
    """The driver measures the bytes, not the engine; `stats()` must count the same."""
    from torch.profiler import ProfilerActivity, profile

    made = rig(policy(tmp_path, **PLACES[place]), 8)
    close_all.append(made)
    for number in range(3):
        made.step(number)
    handle = inf.handle(made.model)
    handle.flush()
    torch.cuda.synchronize()
    before, steps = handle.stats(), 3
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for number in range(steps):
            made.step(number)
        handle.flush()
        torch.cuda.synchronize()
    after = handle.stats()
    trace = tmp_path / "trace.json"
    profiler.export_chrome_trace(str(trace))
    copied = copied_bytes(trace)
    params = 2 * after.params
    slack = 1.02 * params  # token ids, losses, norms; and padding of flats
    assert 0 < copied["HtoD"] <= steps * 2 * slack
    assert copied["HtoD"] >= steps * 1.2 * params  # the last units of forward stay for backward
    assert steps * params <= copied["DtoH"] <= steps * slack
    assert after.h2d_bytes - before.h2d_bytes == pytest.approx(copied["HtoD"], rel=0.02)
    assert after.d2h_bytes - before.d2h_bytes == pytest.approx(copied["DtoH"], rel=0.02)
