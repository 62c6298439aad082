"""A new placement while gradients wait: no gradient is lost, and a placement that fails leaves the
earlier one in use."""

from __future__ import annotations

import dataclasses
import functools
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity as inf
from infinity._src.cabi.records import GradSection, Master, Moments
from infinity._src.engine.handle import offload
from infinity._src.memory.ledger import LEDGER
from infinity._src.params import spill
from infinity._src.params.unit import Unit
from infinity.aio import Fault, Format, Seam
from infinity.errors import AioError, StateInvalid, SwapFullError
from tests import harness, models
from tests.harness import assert_same, values_of
from tests.marks import alternating, mostly_slow
from tests.unit.params.test_state_store import fetched, make_flat, make_store

SPILLED = Format.SPLIT.with_grad(GradSection.BF16)

deep = functools.partial(models.llama, layers=6)


def policy(tmp_path: Path, **values: Any) -> inf.Policy:
    values = {"params": "nvme", "optim": "nvme", "grads": "nvme", "unit_bytes_max": 4096} | values
    return inf.Policy(nvme=tmp_path, **values)


@functools.cache
def least(**values: Any) -> int:
    """The smallest `ram` that works when gradients may spill, as the error of one that does not
    says."""
    return harness.least_ram(models.make(deep), policy(Path("/tmp"), ram=1, **values))


@functools.cache
def between(**values: Any) -> int:
    """A `ram` that holds some of the gradients, and, while half of the parameters have no
    optimizer, some of the states."""
    model = offload(models.make(deep), policy(Path("/tmp"), ram="min", **values))
    inf.AdamW(model.parameters())
    unspilled = inf.handle(model).stats().ram_min_bytes
    inf.handle(model).close()
    return (least(**values) + 3 * unspilled) // 4


def halves(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The parameters of the first units, and those of the last."""
    found = list(model.parameters())
    return found[: len(found) // 2], found[len(found) // 2 :]


def masks_of(model: nn.Module) -> dict[str, list[list[int]]]:
    """Return bit masks of the sections that rest on NVMe, by unit, flat and chunk."""
    handle = inf.handle(model)
    return {
        unit.name: [handle.parts.tiers.store._masks_of(flat) for flat in unit.flats]
        for unit in handle.units
    }


@dataclasses.dataclass
class Placed:
    """A training whose states are placed anew once."""

    values: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    moved: bool = False  # some units whose gradients waited on NVMe
    requests: dict[str, range] = dataclasses.field(default_factory=dict)  # of the drive, meanwhile
    failed: bool = False  # at first


def requests_of(handle: Any) -> dict[str, int]:
    """Requests of the drives so far; nothing is pending then."""
    handle.flush()
    handle.parts.tiers.executor.wait_all()
    drives = handle.parts.tiers.executor.stats().drives
    return {
        "read": sum(drive.reads for drive in drives),
        "write": sum(drive.writes for drive in drives),
    }


def attempt(handle: Any, result: Placed, place: Any) -> None:
    """Call `place`; if a drive fails, the earlier placement must still be in use."""
    kept = {param: handle.read(param) for param in handle.parts.split.params}
    before, reserved = handle.parts.tiers.planner.plan, LEDGER._reserved[id(handle)][0]
    begun = requests_of(handle)
    try:
        place()
    except (AioError, MemoryError):
        result.failed = True
        plan = handle.parts.tiers.planner.plan
        rests = tuple(
            tuple(handle.parts.tiers.store._masks_of(flat)) for flat in handle.parts.split.flats
        )
        # it failed when all but gradients had moved
        assert plan is before or plan.nvme_masks == rests
        made = handle.parts.tiers.buffers.size_bytes - before.grad_bytes
        assert (
            LEDGER._reserved[id(handle)][0] - reserved
            >= handle.parts.tiers.store.resident_bytes - before.resident_bytes + made
        )
        assert all(torch.equal(handle.read(param), value) for param, value in kept.items())
    result.requests = {op: range(begun[op], done) for op, done in requests_of(handle).items()}


def taken_later(
    how: str, chosen: inf.Policy, seam: Seam | None = None, *, early: bool = False
) -> Placed:
    """Train while an optimizer takes the second half of the parameters late: before the first
    backward (early), or between the micro-batches and the step."""
    result = Placed()
    with harness.one_thread():
        model = offload(models.make(deep), chosen, _seam=seam)
        handle = inf.handle(model)
        first, second = halves(model)
        optimizers: list[Any] = [inf.AdamW(first, lr=1e-2)]

        def take_second() -> None:
            if how == "group":
                optimizers[0].add_param_group({"params": second, "lr": 1e-3})
            else:
                optimizers.append(inf.AdamW(second, lr=1e-3))

        if early:
            take_second()
        for step, batch in enumerate(models.token_batches(2)):
            models.loss_of(model, batch).backward()
            models.loss_of(model, batch).backward()
            if step == 0 and not early:
                before = masks_of(model)
                attempt(handle, result, take_second)
                if result.failed:
                    take_second()
                spilled = {flat.unit.name for flat in handle.parts.tiers.planner.spilled}
                held = {parameter.infinity_link.param.unit.name for parameter in first}  # type: ignore[attr-defined]
                result.moved = any(
                    before[name] != row
                    for name, row in masks_of(model).items()
                    if name in spilled & held
                )
            for optimizer in optimizers:
                optimizer.step()
            model.zero_grad()
        result.values = values_of(model)
        handle.close()
        return result


@functools.cache
def taken_early(how: str) -> Placed:
    return taken_later(how, inf.Policy(), early=True)


@pytest.mark.parametrize("how", mostly_slow(["optimizer", "group"], "optimizer"))
def test_gradients_that_wait_on_nvme_outlive_a_new_placement(how: str, tmp_path: Path) -> None:
    found = taken_later(how, policy(tmp_path, ram=between()))
    assert found.moved
    assert_same(found.values, taken_early(how).values)


@pytest.mark.parametrize("how", mostly_slow(["optimizer", "group"], "group"))
def test_gradients_outlive_a_new_placement_that_fails(how: str, tmp_path: Path) -> None:
    chosen = policy(tmp_path, ram=between())
    reads = taken_later(how, chosen).requests["read"]
    assert len(reads) > 4
    for share in (0.3, 0.9):
        fault = Fault("read", reads[int(share * len(reads))], lasting=True)
        found = taken_later(how, chosen, Seam(fault=fault))
        assert found.failed
        assert_same(found.values, taken_early(how).values)


@pytest.mark.parametrize("momentum", [None, 0.9], ids=["same", "other moments"])
def test_gradients_outlive_the_optimizer(momentum: float | None, tmp_path: Path) -> None:
    """The optimizer before is gone, and with it the states; what backward left is the next
    one's."""

    def train(chosen: inf.Policy) -> dict[str, torch.Tensor]:
        with harness.one_thread():
            model = offload(models.make(deep), chosen)
            optimizer: Any = inf.AdamW(model.parameters())
            models.loss_of(model, models.token_batches(1)[0]).backward()
            del optimizer
            inf.SGD(model.parameters(), lr=1e-1, momentum=0.9).step()
            values = values_of(model)
            inf.handle(model).close()
            return values

    assert_same(train(policy(tmp_path, ram=between())), train(inf.Policy()))


@pytest.mark.parametrize("backend", ["io_uring", "threads"])
@pytest.mark.parametrize(
    "now",
    [SPILLED, Format(Master.SPLIT, Moments.FP32, 1, GradSection.BF16)],
    ids=["same", "other moments"],
)
def test_spilled_gradients_of_many_chunks_keep_their_bits(
    now: Format, backend: str, tmp_path: Path
) -> None:
    with make_store(tmp_path, backend) as store:
        flat = make_flat(Unit(0, "u", ()), 0, torch.bfloat16)
        chunks = len(flat.layout.chunks)
        assert chunks > 1
        stored = [torch.randn(flat.layout.shard_numel).bfloat16() for _ in range(2)]
        store.create([flat], [[1] * chunks])
        store.store(flat, 0, stored[0].data_ptr()).wait()
        store.convert([flat], [SPILLED], [[0b10001] * chunks])
        store.store(flat, 4, stored[1].data_ptr()).wait()
        last = now.written_count
        for mask in (1 << last, 1 << last | 0b0111):
            store.convert([flat], [now], [[mask] * chunks])
            assert torch.equal(fetched(store, flat, 0, torch.bfloat16), stored[0])
            assert torch.equal(fetched(store, flat, last, torch.bfloat16), stored[1])
            assert not fetched(store, flat, 2, torch.float32).any()


def accumulated(chosen: inf.Policy, seam: Seam | None = None, prepare: Any = None) -> Placed:
    """Two steps without accumulation, then two with it. `prepare(handle)` is called before
    gradients are given memory."""
    result = Placed()
    with harness.one_thread():
        model = offload(models.make(deep), chosen, _seam=seam)
        handle = inf.handle(model)
        optimizer = inf.AdamW(model.parameters(), lr=1e-2)

        def make_gradients() -> None:
            with handle.no_sync():
                pass

        batches = iter(models.token_batches(6))
        for step in range(4):
            if step == 1:
                if prepare is not None:
                    prepare(handle)
                attempt(handle, result, make_gradients)
            if step >= 2:
                with handle.no_sync():
                    models.loss_of(model, next(batches)).backward()
            models.loss_of(model, next(batches)).backward()
            optimizer.step()
            optimizer.zero_grad()
        result.values = values_of(model)
        handle.close()
        return result


@functools.cache
def accumulated_in_ram() -> Placed:
    return accumulated(inf.Policy(update="backward"))


@functools.cache
def requests_meanwhile() -> dict[str, range]:
    """Return the requests that a drive gets while gradients get memory, when none fails."""
    with tempfile.TemporaryDirectory() as directory:
        return accumulated(policy(Path(directory), ram=between(), update="backward")).requests


@pytest.mark.parametrize("share", mostly_slow([0.0, 0.3, 0.6, 0.9], 0.6))
def test_a_read_that_fails_while_gradients_get_memory_costs_that_call_only(
    share: float, tmp_path: Path
) -> None:
    chosen = policy(tmp_path, ram=between(), update="backward")
    reads = requests_meanwhile()["read"]
    assert len(reads) > 4
    fault = Fault("read", reads[int(share * len(reads))], lasting=True)
    found = accumulated(chosen, Seam(fault=fault))
    assert found.failed
    assert_same(found.values, accumulated_in_ram().values)


def test_a_full_drive_while_gradients_get_memory_costs_that_call_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill(handle: Any) -> None:
        space = handle.parts.tiers.store._space
        reserve = space.reserve_together

        def full(_sizes: Any) -> Any:
            monkeypatch.setattr(space, "reserve_together", reserve)
            raise SwapFullError("full", path=str(tmp_path), op="allocate")

        monkeypatch.setattr(space, "reserve_together", full)

    found = accumulated(policy(tmp_path, ram=between(), update="backward"), prepare=fill)
    assert found.failed
    assert_same(found.values, accumulated_in_ram().values)


def test_windows_that_cannot_be_had_cost_that_call_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients that stay in RAM had their memory before the failure: it is counted, and the next
    attempt reuses it."""
    make = spill.Slab

    def refuse(_size_bytes: int) -> Any:
        monkeypatch.setattr(spill, "Slab", make)
        raise MemoryError("no windows")

    found = accumulated(
        policy(tmp_path, ram=between(), update="backward"),
        prepare=lambda _handle: monkeypatch.setattr(spill, "Slab", refuse),
    )
    assert found.failed
    assert spill.Slab is make
    assert_same(found.values, accumulated_in_ram().values)


@pytest.mark.parametrize(("persistent", "share"), alternating([False, True], [0.3, 0.9]))
def test_a_write_that_fails_while_gradients_get_memory_is_said_at_every_later_step(
    persistent: bool, share: float, tmp_path: Path
) -> None:
    """The drive accepts no more writes, so no step can be taken; parameters are complete."""
    chosen = policy(tmp_path, ram=between(), update="backward")
    writes = requests_meanwhile()["write"]
    assert len(writes) > 20
    result, fault = (
        Placed(),
        Fault("write", writes[int(share * len(writes))], persistent=persistent, lasting=True),
    )
    with harness.one_thread():
        model = offload(models.make(deep), chosen, _seam=Seam(fault=fault))
        handle = inf.handle(model)
        optimizer = inf.AdamW(model.parameters(), lr=1e-2)
        batches = models.token_batches(2)
        models.loss_of(model, batches[0]).backward()
        optimizer.step()
        optimizer.zero_grad()
        attempt(handle, result, lambda: handle.no_sync().__enter__())
        assert result.failed
        with pytest.raises((AioError, StateInvalid)):
            models.loss_of(model, batches[1]).backward()
            optimizer.step()
            handle.flush()
        for _ in range(2):
            with pytest.raises((AioError, StateInvalid)):
                handle.flush()
            with pytest.raises((AioError, StateInvalid)):
                optimizer.step()
        with pytest.raises((AioError, StateInvalid)):
            handle.close()
