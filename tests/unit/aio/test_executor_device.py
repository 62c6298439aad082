"""Copies to and from a device: what arrives, in which order, and what a driver that fails
leaves."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from infinity import aio
from infinity._src.cabi import records
from infinity.aio._cuda_driver import relax_capture_mode
from infinity.errors import ChecksumError, DeviceCopyError, RankFailed
from tests.simulated import Simulated, library
from tests.unit.aio.rig import BACKENDS, NUMEL, Rig, adamw, hyper_record, random_chunk, same


@pytest.fixture(params=BACKENDS)
def make(
    request: pytest.FixtureRequest, tmp_path: Path
) -> Iterator[Callable[..., tuple[Rig, Simulated]]]:
    """Makes rigs with a device; at the end nothing may have raced, and nothing may be left of the
    device."""
    rigs: list[Rig] = []
    devices: list[Simulated] = []

    def make(*, delay_us: int = 500, seed: int = 0, **options: Any) -> tuple[Rig, Simulated]:
        devices.append(Simulated(seed=seed, delay_us=delay_us))
        rigs.append(Rig(tmp_path, request.param, **options))
        driver = devices[-1].driver()
        for memory in (
            array for arrays in rigs[-1].memory for array in arrays if array is not None
        ):
            driver.pin(memory.ctypes.data, memory.nbytes)
        rigs[-1].executor.attach_device(driver)
        rigs[-1]._keep.append(driver)
        return rigs[-1], devices[-1]

    yield make
    for rig in rigs:
        rig.close()
        rig._keep[0].close()
    for device in devices:
        assert device.races() == []
        assert device.live() == (0, 0, 0)


def random_grad(rng: np.random.Generator) -> np.ndarray:
    return (rng.integers(0x3C00, 0x3F00, NUMEL) | rng.integers(0, 2, NUMEL) << 15).astype(np.uint16)


def updated(value: list[np.ndarray], grad: np.ndarray, step: int = 1) -> list[np.ndarray]:
    after = [section.copy() for section in value]
    adamw(records.Format.SPLIT, after[:4], grad, hyper_record(step)[0])
    return after


@pytest.mark.parametrize("resident", [(), (0,), (0, 1, 2, 3)])
def test_a_fetch_is_filled_when_it_is_on_the_device(make, rng, resident):
    rig, device = make(resident=resident)
    values = {i: random_chunk(rng) for i in range(6)}
    rig.store(values).wait()
    rig.flags = aio.MASK_DEVICE
    for _ in range(3):
        ticket, targets = rig.fetch(range(6), mask=3)
        ticket.wait_filled(20)
        for i, target in enumerate(targets):
            device.kernel(
                target[0].ctypes.data,
                target[0].nbytes,
                writes=False,
                what="a kernel reads what was fetched",
            )
            assert same(target[:2], values[i][:2])
    stats = rig.executor.stats()
    assert (
        device.copied()
        == (3 * 6 * 4 * NUMEL, 0)
        == (stats.to_device_bytes, stats.from_device_bytes)
    )
    assert stats.to_device_s > 0


def test_on_a_second_device_everything_is_made_there_and_the_users_stays_current(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    simulation = Simulated()
    simulation.current(1)
    try:
        rig = Rig(tmp_path, BACKENDS[0])
        driver = simulation.driver(ordinal=1)
        rig.executor.attach_device(driver)
        values = {i: random_chunk(rng) for i in range(4)}
        rig.store(values).wait()
        rig.flags = aio.MASK_DEVICE
        ticket, targets = rig.fetch(range(4), mask=3)
        ticket.wait_filled(20)
        assert all(same(target[:2], values[i][:2]) for i, target in enumerate(targets))
        assert simulation.copied()[0] > 0
        # Also memory that the driver pins by itself, as gradients' is.
        memory = np.zeros(4096, np.uint8)
        driver.pin(memory.ctypes.data, memory.nbytes)
        driver.unpin(memory.ctypes.data)
        assert simulation.contexts() == {2}
        assert simulation.current() == 1
        rig.close()
        driver.close()
        assert simulation.current() == 1
        assert simulation.races() == []
        assert simulation.live() == (0, 0, 0)
    finally:
        simulation.current(0)


def test_a_target_that_a_kernel_still_reads_is_waited_for(make, rng):
    rig, device = make()
    value = random_chunk(rng)
    rig.store({0: value}).wait()
    rig.flags = aio.MASK_DEVICE
    target = np.zeros(NUMEL, np.uint16)
    device.kernel(target.ctypes.data, target.nbytes, writes=False, what="a kernel of before")
    job = np.zeros(1, dtype=records.JOB)
    job["chunk"], job["kind"], job["mask"], job["base"] = (
        rig.ids[0],
        records.JobKind.FETCH,
        1 | aio.MASK_DEVICE,
        -1,
    )
    job["ptr"][0, 0] = target.ctypes.data
    rig.executor.submit(job, priority=aio.Priority.DEMAND).wait(20)
    assert same([target], value[:1])


def test_the_device_finds_a_race(make, rng):
    """The simulated device finds an access that nothing orders, whatever the timing. The other
    tests rely on that."""
    rig, device = make(delay_us=300_000)  # it is still on its way when the kernel comes
    rig.store({0: random_chunk(rng)}).wait()
    rig.flags = aio.MASK_DEVICE
    ticket, targets = rig.fetch([0], mask=1)
    while not device.copied()[0]:  # it has been given to its stream
        pass
    device.kernel(targets[0][0].ctypes.data, 2, writes=False, what="a kernel that did not wait")
    ticket.wait(20)
    assert len(device.races()) == 1
    assert "a kernel that did not wait" in device.races()[0]
    device._sim.sim_reset(0, 0)


def test_an_update_hands_over_to_the_device_and_takes_from_it(make, rng):
    rig, device = make()
    value, grad, hi = random_chunk(rng), random_grad(rng), random_chunk(rng)[0]
    rig.store({0: value}).wait()
    rig.flags = aio.MASK_DEVICE
    gathered = hi.copy()[None]
    device.kernel(
        gathered.ctypes.data, gathered.nbytes, writes=True, what="a kernel writes the parameters"
    )
    ticket = rig.update({0: grad}, given={0: gathered[0]}, target=gathered)
    ticket.wait_filled(20)
    device.kernel(gathered.ctypes.data, gathered.nbytes, writes=False, what="the next forward")
    wanted = updated([hi, *value[1:]], grad)
    assert gathered[0].tobytes() == wanted[0].tobytes()
    ticket.wait(20)
    rig.flags = 0
    assert same(rig.read(0), wanted)
    assert device.copied() == (2 * NUMEL, 2 * NUMEL)


@pytest.mark.parametrize("resident", [(), (0,), (0, 1, 2, 3)])
@pytest.mark.parametrize("escapes", [False, True])
def test_behind_a_gate_the_target_is_that_of_its_opening(make, rng, resident, escapes):
    rig, device = make(resident=resident)
    value, grad = random_chunk(rng), random_grad(rng)
    rig.store({0: value}).wait()
    rig.flags = aio.MASK_DEVICE
    target = np.zeros((1, NUMEL), np.uint16)
    gate = rig.executor.gate()
    ticket = rig.update({0: grad}, gate=gate, target=target)
    device.kernel(target.ctypes.data, target.nbytes, writes=True, what="before the gate was opened")
    if escapes:
        rig.executor.release_gates()
    assert gate.open([target.ctypes.data]) is not escapes
    ticket.wait(20)
    wanted = updated(value, grad)
    assert target[0].tobytes() == (np.zeros(NUMEL, np.uint16) if escapes else wanted[0]).tobytes()
    rig.flags = 0
    assert same(rig.read(0), wanted)


def test_a_store_comes_from_the_device(make, rng):
    rig, device = make(resident=(1,))
    value = random_chunk(rng)
    for section in value:
        device.kernel(section.ctypes.data, section.nbytes, writes=True, what="a kernel makes it")
    rig.flags = aio.MASK_DEVICE
    rig.store({0: value}).wait(20)
    for section in value:
        device.kernel(section.ctypes.data, section.nbytes, writes=True, what="its memory is reused")
    rig.flags = 0
    assert same(rig.read(0), value)


@pytest.mark.parametrize("resident", [(), (1,), (0, 1, 2, 3)])
def test_a_version_comes_from_the_device_whole_or_in_part(make, rng, resident):
    rig, _ = make(resident=resident, versioned=True)
    driver = rig._keep[0]
    for memory in rig.other_memory:
        driver.pin(memory.ctypes.data, memory.nbytes)
    first, second, third = (random_chunk(rng) for _ in range(3))
    rig.store({0: first}).wait(20)
    rig.executor.commit(rig.ids[:1])
    rig.flags = aio.MASK_DEVICE
    rig.store({0: second}).wait(20)
    rig.store({0: third}, mask=0b0101).wait(20)
    rig.flags = 0
    assert same(rig.read(0), [third[0], second[1], third[2], second[3]])
    rig.executor.rollback(rig.ids[:1])
    assert same(rig.read(0), first)
    rig.flags = aio.MASK_DEVICE
    rig.store({0: third}, mask=0b0101).wait(20)  # the rest comes from the committed place
    rig.flags = 0
    assert same(rig.read(0), [third[0], first[1], third[2], first[3]])


def copy_job(to: np.ndarray, source: np.ndarray, *, out: bool) -> np.ndarray:
    job = np.zeros(1, dtype=records.JOB)
    job["kind"], job["chunk"], job["base"] = records.JobKind.COPY, -1, -1
    job["mask"] = aio.MASK_DEVICE | (aio.MASK_COPY_OUT if out else 0)
    job["ptr"][0, :3] = to.ctypes.data, source.ctypes.data, source.nbytes
    return job


@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(seed=st.integers(0, 999), outs=st.lists(st.booleans(), min_size=1, max_size=20))
def test_plain_copies_in_both_directions_beside_each_other(make, seed, outs):
    rig, device = make(seed=seed)
    driver = rig._keep[0]
    rng = np.random.default_rng(seed)
    sources = [rng.integers(0, 256, int(rng.integers(1, 100_000))).astype(np.uint8) for _ in outs]
    targets = [np.zeros_like(source) for source in sources]
    tickets = []
    for out, source, target in zip(outs, sources, targets, strict=True):
        host, there = (source, target) if out else (target, source)
        driver.pin(host.ctypes.data, host.nbytes)
        device.kernel(
            there.ctypes.data, there.nbytes, writes=not out, what="a kernel before the copy"
        )
        tickets.append(
            rig.executor.submit(copy_job(target, source, out=out), priority=aio.Priority.DEMAND)
        )
    for ticket, source, target in zip(tickets, sources, targets, strict=True):
        ticket.wait_filled(20)
        assert target.tobytes() == source.tobytes()
    rig.executor.wait_all(20)
    assert device.races() == []
    rig.close()
    driver.close()
    assert device.live() == (0, 0, 0)


@pytest.mark.parametrize("nth", [0, 3])
def test_what_was_given_is_given_again_after_a_flip(make, rng, nth):
    rig, _ = make(seam=aio.Seam(fault=aio.Fault("read", nth, kind="bitflip")), piece=128)
    value, grad = random_chunk(rng), random_grad(rng)
    rig.store({0: value}).wait()
    rig.flags = aio.MASK_DEVICE
    gathered = value[0].copy()[None]
    rig.update({0: grad}, given={0: gathered[0]}, target=gathered).wait(20)
    wanted = updated(value, grad)
    assert gathered[0].tobytes() == wanted[0].tobytes()
    rig.flags = 0
    assert same(rig.read(0), wanted)
    assert rig.executor.stats().rereads == 1


def test_what_lies_wrong_never_reaches_the_device(make, rng):
    rig, device = make()
    rig.store({0: random_chunk(rng)}).wait()
    rig.sums[0, 0] += 1
    rig.flags = aio.MASK_DEVICE
    ticket, targets = rig.fetch([0], mask=1)
    with pytest.raises(ChecksumError):
        ticket.wait(20)
    assert device.copied() == (0, 0)
    assert not targets[0][0].any()


def test_a_driver_that_fails_is_a_typed_error_and_costs_no_state(make, rng):
    rig, device = make()
    value, grad = random_chunk(rng), random_grad(rng)
    rig.store({0: value}).wait()
    rig.flags = aio.MASK_DEVICE
    device.fail(1)
    ticket, _ = rig.fetch([0], mask=1)
    with pytest.raises(DeviceCopyError, match="700"):
        ticket.wait(20)
    device.fail(1)
    target = np.zeros((1, NUMEL), np.uint16)
    ticket = rig.update({0: grad}, target=target)
    with pytest.raises(DeviceCopyError):  # the ticket of the parameters raises it
        ticket.wait(20)
    device.fail(1)
    ticket = rig.executor.submit(
        copy_job(target[0], value[0], out=True), priority=aio.Priority.DEMAND
    )
    with pytest.raises(DeviceCopyError):
        ticket.wait(20)
    rig.flags = 0
    assert same(rig.read(0), updated(value, grad))
    device._sim.sim_reset(0, 0)  # the failed copies' host memory was not pinned


def test_copies_break_no_graph_that_somebody_captures(make, rng):
    rig, device = make()
    values = {i: random_chunk(rng) for i in range(6)}
    rig.store(values).wait()
    rig.flags = aio.MASK_DEVICE
    device.capture(True)
    ticket, targets = rig.fetch(range(6), mask=3)
    ticket.wait_filled(20)
    for i, target in enumerate(targets):
        assert same(target[:2], values[i][:2])
    assert not device.capture_broken()
    # The control: a thread that asks as torch does by default.
    device.synchronise()
    assert device.capture_broken()
    device.capture(False)


def test_a_thread_that_has_said_so_may_ask_beside_a_capture() -> None:
    device = Simulated()
    device.capture(True)

    def ask() -> None:
        relax_capture_mode(library())
        device.synchronise()

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    assert not device.capture_broken()
    device.capture(False)
    with pytest.raises(DeviceCopyError, match="the device's driver cannot be used"):
        relax_capture_mode("libnothing.so")


def test_a_wait_for_a_device_that_is_stuck_ends_by_the_check(make, rng):
    """Copies behind a kernel that never ends: each wait raises what the check does, no memory is
    touched, and once the kernel ends after all the copies arrive."""
    stuck: list[Exception] = []

    def check() -> None:
        if stuck:
            raise stuck[0]

    rig, device = make(check=check)
    value = random_chunk(rng)
    rig.store({0: value}).wait()
    rig.flags = aio.MASK_DEVICE
    memory = np.zeros(16, np.uint8)
    device.late(1)
    device.hold_kernels(True)
    device.late_write(memory.ctypes.data, memory.nbytes, what="a kernel that waits for a peer")
    ticket, (target,) = rig.fetch([0], mask=1)
    stuck.append(RankFailed("rank 1 has ended, and the device is stuck", rank=1))
    waits = (ticket.wait, ticket.wait_filled, rig.executor.wait_all)
    for wait in waits:
        with pytest.raises(RankFailed, match="the device is stuck"):
            wait()
    assert not ticket.filled
    stuck.clear()
    device.hold_kernels(False)
    for wait in waits:
        wait()
    assert same(target[:1], value[:1])


def test_many_jobs_at_once_with_a_device_and_closing_amid_them(make, rng):
    rig, _ = make(chunk_count=24, drive_count=2, delay_us=2000)
    values = {i: random_chunk(rng) for i in range(24)}
    rig.store(values).wait()
    rig.flags = aio.MASK_DEVICE
    tickets = [rig.fetch(range(24), mask=1, priority=p % 3) for p in range(4)]
    for ticket, targets in tickets[:2]:
        ticket.wait(20)
        assert all(
            target[0].tobytes() == values[i][0].tobytes() for i, target in enumerate(targets)
        )
    rig.executor.close(wait=False)


def test_jobs_for_a_device_that_cannot_be_are_refused(make, rng, tmp_path):
    rig, device = make()
    rig.flags = aio.MASK_DEVICE
    with pytest.raises(ValueError, match="attached"):
        rig.executor.attach_device(device.driver())
    job = copy_job(np.zeros(4), np.zeros(4), out=True)
    job["ptr"][0, 2] = 0
    with pytest.raises(ValueError, match="COPY"):
        rig.executor.submit(job, priority=aio.Priority.DEMAND)
    for name in BACKENDS:
        other = Rig(tmp_path, name)
        other.flags = aio.MASK_DEVICE
        with pytest.raises(ValueError, match="MASK_DEVICE"):
            other.fetch([0], mask=1)
        other.close()
