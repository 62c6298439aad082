"""Many requests (`make slow`: a hundred thousand): after the first ones nothing grows, neither
memory nor files, threads or references."""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.unit.aio.rig import NUMEL, Rig, random_chunk, same

REQUESTS = [pytest.param(100_000, marks=pytest.mark.slow), 12_000]


def status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1])
    raise AssertionError(name)


def held(objects) -> dict[str, int]:
    """Return the counts that must not grow."""
    gc.collect()
    return {
        "files": len(list(Path("/proc/self/fd").iterdir())),
        "threads": len(list(Path("/proc/self/task").iterdir())),
        "objects": len(gc.get_objects()),
        "references": sum(sys.getrefcount(one) for one in objects),
    }


@pytest.mark.parametrize("requests", REQUESTS)
def test_nothing_grows_with_the_number_of_requests(backend, tmp_path, rng, requests):
    rig = Rig(tmp_path, backend, block_bytes=4096, depth=32, pools=(6, 6), hold_s=30.0)
    values = {i: random_chunk(rng) for i in range(6)}
    grads = {i: np.ones(NUMEL, dtype=np.float32) for i in range(6)}
    objects = [
        rig.executor,
        *grads.values(),
        *(section for value in values.values() for section in value),
    ]

    def sent() -> int:
        drive = rig.executor.stats().drives[0]
        return drive.reads + drive.writes

    def rounds(count: int) -> None:
        until = sent() + count
        while sent() < until:
            rig.store(values)
            rig.update(grads, target=np.zeros((6, NUMEL), dtype=np.uint16))
            rig.store(values, mask=0b0101)
            gate = rig.executor.gate()
            gated, _ = rig.fetch(range(6), mask=0b1010, gate=gate)
            assert gate.open([])
            given_up, _ = rig.fetch(range(6), priority=1)
            given_up.cancel()
            last, targets = rig.fetch(range(6), mask=0b1010)
            last.wait(60)
            gated.wait(60)
            rig.executor.wait_all(60)
            assert last.done
            del gate, gated, given_up, last, targets
            rig._keep.clear()

    rounds(max(requests // 10, 1000))
    before, resident = held(objects), status("VmRSS")
    rounds(requests - requests // 10)
    after, grown = held(objects), status("VmRSS") - resident
    assert sent() >= requests
    assert after["files"] == before["files"]
    assert after["threads"] == before["threads"]
    assert after["references"] == before["references"]
    assert after["objects"] - before["objects"] < 200
    assert grown < 4096, f"{grown} KiB more"
    assert rig.executor.stats().extra.get("submissions_live", 0) == 0
    assert rig.executor.fault() is None
    rig.store(values).wait(20)
    assert all(same(rig.read(i), values[i]) for i in values)
    rig.close()


def test_executors_come_and_go_and_leave_nothing(backend, tmp_path, rng):
    value = {0: random_chunk(rng)}

    def rounds(count: int) -> None:
        for _ in range(count):
            rig = Rig(tmp_path, backend, drive_count=2)
            rig.store(value).wait(20)
            gate = rig.executor.gate()
            rig.fetch([0], gate=gate)
            rig.close()

    rounds(5)
    before, resident = held([]), status("VmRSS")
    rounds(20)
    after, grown = held([]), status("VmRSS") - resident
    assert after["files"] == before["files"]
    assert after["threads"] <= before["threads"]
    assert grown < 4096, f"{grown} KiB more"
