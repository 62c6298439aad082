"""Tests that take minutes, assert times, or need root: `make soak`, by hand, on a machine that does
nothing else."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from infinity import aio
from infinity._src.cabi import records
from infinity.errors import AioError, DeviceFailedError
from tests.unit.aio.child import run_python
from tests.unit.aio.rig import (
    BACKENDS,
    NUMEL,
    RUN_BYTES,
    Rig,
    adamw,
    hyper_record,
    outcome,
    random_chunk,
    same,
)
from tests.unit.aio.test_executor_model import ExecutorMachine, run
from tests.unit.aio.test_opening import OPEN_AUTO

pytestmark = pytest.mark.soak


def percentile(times: list[float], share: float) -> float:
    return sorted(times)[min(len(times) - 1, int(len(times) * share))]


@pytest.mark.parametrize("backend", BACKENDS)
def test_demands_are_served_beside_saturated_write_back(backend, tmp_path):
    """A demand waits for what is in flight, never for what is queued; the write-back still gets its
    share."""
    rng = np.random.default_rng(0)
    speed = 64e6
    rig = Rig(
        tmp_path,
        backend,
        chunk_count=64,
        pools=(8, 16),
        seam=aio.Seam(read_bytes_per_s=speed, write_bytes_per_s=speed),
    )
    values = {i: random_chunk(rng) for i in range(64)}
    rig.store(values).wait(60)
    grads = {i: np.ones(NUMEL, np.float32) for i in range(1, 64)}
    times: list[float] = []
    written, begun = rig.executor.stats().bytes_written, time.monotonic()
    for _ in range(2):
        rig.update(grads).wait(60)
    alone = (rig.executor.stats().bytes_written - written) / (time.monotonic() - begun)
    written, begun = rig.executor.stats().bytes_written, time.monotonic()
    behind = [rig.update(grads, step=1)]
    while time.monotonic() - begun < 5:
        behind = [ticket for ticket in behind if not ticket.done]
        while len(behind) < 3:  # hundreds of updates always queued
            behind.append(rig.update(grads, step=2))
        start = time.monotonic()
        ticket, targets = rig.fetch([0], mask=1)
        ticket.wait(30)
        times.append(time.monotonic() - start)
        assert targets[0][0].tobytes() == values[0][0].tobytes()
    took = time.monotonic() - begun
    moved = rig.executor.stats().bytes_written - written
    queue_s = 3 * 63 * RUN_BYTES / alone
    p50, p99 = percentile(times, 0.5), percentile(times, 0.99)
    print(
        f"\n{backend}: {len(times)} demands beside {moved / took / 1e6:.0f} MB/s of write-back "
        f"({alone / 1e6:.0f} alone): p50 {p50 * 1e3:.1f} ms, p99 {p99 * 1e3:.1f} ms; the queue is "
        f"{queue_s * 1e3:.0f} ms long"
    )
    assert p99 < queue_s / 4
    assert moved / took > alone / 20
    rig.executor.close(wait=False)
    rig.close()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_wait_of_half_a_second_leaves_the_interpreter_to_others(backend, tmp_path):
    rig = Rig(tmp_path, backend, seam=aio.Seam(write_bytes_per_s=6 * RUN_BYTES / 0.5))
    rng = np.random.default_rng(0)
    values = {i: random_chunk(rng) for i in range(6)}
    pause, ticks, ended = 0.001, [0], threading.Event()

    def tick() -> None:
        while not ended.is_set():
            ticks[0] += 1
            time.sleep(pause)

    def rate(work) -> float:
        before, start = ticks[0], time.monotonic()
        work()
        return (ticks[0] - before) / (time.monotonic() - start)

    thread = threading.Thread(target=tick)
    thread.start()
    alone = rate(lambda: time.sleep(0.5))
    shares = [rate(lambda: rig.store(values).wait(30)) / alone for _ in range(6)]
    ended.set()
    thread.join()
    print(
        f"\n{backend}: ticks during waits, of those while idle: "
        + ", ".join(f"{s:.0%}" for s in shares)
    )
    assert percentile(shares, 0.5) >= 0.8
    rig.close()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_submission_beside_a_busy_thread_is_quick(backend, tmp_path):
    rig = Rig(tmp_path, backend)
    rng = np.random.default_rng(0)
    rig.store({i: random_chunk(rng) for i in range(6)}).wait(30)
    ended = threading.Event()

    def spin() -> None:
        while not ended.is_set():
            sum(range(1000))

    thread = threading.Thread(target=spin)
    times = []
    thread.start()
    target = np.zeros(NUMEL, np.uint16)
    # made before: numpy itself lets go of the GIL for an allocation
    jobs = np.zeros(1, dtype=records.JOB)
    jobs["chunk"], jobs["kind"], jobs["mask"], jobs["base"] = (
        rig.ids[0],
        records.JobKind.FETCH,
        1,
        -1,
    )
    jobs["ptr"][0, 0] = target.ctypes.data
    for _ in range(300):
        start = time.perf_counter()
        ticket = rig.executor.submit(jobs, priority=aio.Priority.DEMAND)
        times.append(time.perf_counter() - start)
        ticket.wait(30)
    ended.set()
    thread.join()
    print(
        f"\n{backend}: submit p50 {percentile(times, 0.5) * 1e6:.0f} µs, p99 "
        f"{percentile(times, 0.99) * 1e6:.0f} µs"
    )
    assert percentile(times, 0.5) < 0.001
    rig.close()


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("name", BACKENDS)
def test_long_sequences_of_calls_behave_as_a_dictionary_of_arrays(name, fails):
    from hypothesis import strategies as st

    fault = st.builds(
        aio.Fault, op=st.just("write"), nth=st.integers(0, 400), kind=st.just("errno")
    )
    extra = {"faults": fault, "fails": True} if fails else {}
    run(type("Machine", (ExecutorMachine,), {"backend": name, **extra}), 150, 60)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_long_run_with_delays_and_busy_drives_is_bitwise_right(backend, tmp_path):
    rng = np.random.default_rng(0)
    until = time.monotonic() + float(os.environ.get("INFINITY_SOAK_S", "20"))
    rounds = 0
    while time.monotonic() < until:
        fault = aio.Fault(("read", "write")[rounds % 2], rounds % 97, kind="short")
        rig = Rig(
            tmp_path,
            backend,
            chunk_count=24,
            drive_count=3,
            resident=((), (0,), (2, 3))[rounds % 3],
            pools=(2, 3),
            verify=("full", "sample")[rounds % 2],
            seam=aio.Seam(delay_us_max=(0, 300, 3000)[rounds % 3], seed=rounds, fault=fault),
        )
        values = {i: random_chunk(rng) for i in range(24)}
        rig.store(values).wait_filled(60)
        for step in range(1, 6):
            grads = {i: rng.standard_normal(NUMEL).astype(np.float32) for i in values}
            rig.update(grads, step=step, gate=rig.executor.gate() if step % 2 else None)
            given_up, _ = rig.fetch(range(24), priority=1)
            given_up.cancel()
            for i, grad in grads.items():
                adamw(records.Format.SPLIT, values[i], grad, hyper_record(step)[0])
        assert all(same(rig.read(i), values[i]) for i in values)
        assert rig.executor.fault() is None
        rig.close()
        rounds += 1
    print(f"\n{backend}: {rounds} rounds")


# ---- what needs root ----


def command(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"NOT TESTED: {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout.strip()


@pytest.fixture
def loop(tmp_path):
    """A block device of 256 MiB on a file."""
    if os.getuid() != 0:
        pytest.skip("NOT TESTED: needs root")
    image = tmp_path / "image"
    with image.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, 256 << 20)
    device = command("losetup", "--find", "--show", str(image))
    yield device
    subprocess.run(["losetup", "--detach", device], check=False)


@pytest.fixture
def mounted(tmp_path):
    """Mounts a device; unmounts at the end."""
    places: list[Path] = []

    def mount(kind: str, device: str, *options: str) -> Path:
        place = tmp_path / f"mount{len(places)}"
        place.mkdir()
        command("mount", "-t", kind, *options, device, str(place))
        places.append(place)
        return place

    yield mount
    for place in places:
        subprocess.run(["umount", "-l", str(place)], check=False)


@pytest.mark.privileged
@pytest.mark.parametrize("kind", ["ext4", "ext2", "xfs", "btrfs", "vfat"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_file_systems_of_every_kind_work(backend, kind, loop, mounted):
    if shutil.which(f"mkfs.{kind}") is None:
        pytest.skip(f"NOT TESTED: no mkfs.{kind}")
    command(
        f"mkfs.{kind}",
        *(["-F"] if kind.startswith("ext") else ["-f"] if kind != "vfat" else []),
        loop,
    )
    place = mounted(kind, loop)
    rng = np.random.default_rng(0)
    rig = Rig(place, backend, drive_count=2)
    values = {i: random_chunk(rng) for i in range(6)}
    rig.store(values).wait(60)
    assert all(same(rig.read(i), values[i]) for i in values)
    drive = rig.executor.stats().drives[0]
    print(f"\n{backend} on {kind}: direct={drive.direct} {drive.direct_reason}")
    rig.close()


@pytest.mark.privileged
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_full_file_system_keeps_what_it_could_not_write(backend, loop, mounted, monkeypatch):
    command("mkfs.ext4", "-F", "-m", "0", loop)
    place = mounted("ext4", loop)
    monkeypatch.setattr(
        aio.SwapFile, "grow", lambda self, size_bytes: os.ftruncate(self.fd, size_bytes)
    )
    rng = np.random.default_rng(0)
    filler = place / "filler"
    with filler.open("wb") as file:
        space = os.statvfs(place)
        os.posix_fallocate(file.fileno(), 0, space.f_bavail * space.f_frsize - 2 * RUN_BYTES)
    rig = Rig(place, backend)
    values = {i: random_chunk(rng) for i in range(6)}
    errors = [outcome(rig.store({i: values[i]}), 60) for i in range(6)]
    first = next(i for i, error in enumerate(errors) if error is not None)
    assert same(rig.read(first), values[first])
    filler.unlink()
    rig.executor.recover().wait(60)
    rig.store(values).wait(60)
    assert all(same(rig.read(i), values[i]) for i in values)
    rig.close()


@pytest.mark.privileged
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_drive_that_fails_and_recovers(backend, loop, mounted):
    """device mapper: linear, then error, then linear again, under a mounted file system without a
    journal."""
    name = f"infinity-soak-{os.getpid()}"
    sectors = int(command("blockdev", "--getsz", loop))
    good, bad = f"0 {sectors} linear {loop} 0", f"0 {sectors} error"
    command("dmsetup", "create", name, "--table", good)
    try:
        command("mkfs.ext2", "-F", f"/dev/mapper/{name}")
        place = mounted("ext4", f"/dev/mapper/{name}", "-o", "errors=continue")
        rng = np.random.default_rng(0)
        rig = Rig(place, backend)
        values = {i: random_chunk(rng) for i in range(6)}
        rig.store(values).wait(60)

        def load(table: str) -> None:
            for words in (("suspend", "--noflush"), ("load", "--table", table), ("resume",)):
                command(
                    "dmsetup",
                    words[0],
                    *([words[1]] if words[0] == "suspend" else []),
                    name,
                    *words[1:][words[0] == "suspend" :],
                )

        load(bad)
        new = random_chunk(rng)
        assert isinstance(outcome(rig.fetch([1])[0], 60), DeviceFailedError)
        assert isinstance(outcome(rig.store({0: new}), 60), AioError)
        assert same(rig.read(0), new)  # kept
        load(good)
        rig.executor.recover().wait(60)
        assert same(rig.read(0), new)
        assert all(same(rig.read(i), values[i]) for i in range(1, 6))
        rig.close()
    finally:
        subprocess.run(["umount", "-l", f"/dev/mapper/{name}"], check=False, capture_output=True)
        subprocess.run(["dmsetup", "remove", "--retry", name], check=False, capture_output=True)


@pytest.mark.privileged
def test_io_uring_that_the_system_forbids_is_stepped_over(tmp_path):
    """The real sysctl, for a moment and for the whole machine: whoever opens a ring meanwhile gets
    none."""
    setting = Path("/proc/sys/kernel/io_uring_disabled")
    if os.getuid() != 0 or not setting.exists():
        pytest.skip("NOT TESTED: needs root, and a kernel that has kernel.io_uring_disabled")
    before = setting.read_text()
    setting.write_text("2")
    try:
        done = run_python("from infinity import aio\n" + OPEN_AUTO.format(directory=str(tmp_path)))
    finally:
        setting.write_text(before)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("threads")
