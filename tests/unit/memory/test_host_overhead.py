"""Host overhead in bytes is what the engine takes, neither less nor much more."""

from __future__ import annotations

import ctypes
import gc
import json
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import infinity as inf
from infinity._src.memory import host_overhead, ledger
from infinity.aio import CHUNK, JOB, SEG, Executor, JobKind, PoolSpec, Priority
from infinity.aio._memory_limits import CgroupLimit
from infinity.errors import MemoryLimitError
from tests import forks, slopes
from tests.marks import mostly_slow

FLATS = 10
RECORD_BYTES = 988
"""Bytes of a chunk in the executor, which no tracer of Python's sees."""
TOLERANCE = 0.15


class _Mallinfo(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks",
                     "uordblks", "fordblks", "keepcost")
    ]  # fmt: skip


def _malloced() -> int:
    """Bytes in use that malloc gave."""
    call = ctypes.CDLL(None).mallinfo2
    call.restype = _Mallinfo
    found = call()
    return int(found.uordblks + found.hblkhd)


def _records(memory: np.ndarray, count: int) -> np.ndarray:
    records = np.zeros(count, dtype=CHUNK)
    for name in ("drive", "file_offset", "other_offset", "grad_offset", "section_at"):
        records[name] = -1
    records["numel"], records["piece_numel"], records["section_count"] = 64, 64, 1
    records["itemsize"][:, 0], records["group_numel"][:, 0] = 2, 1
    records["section_ptr"][:, 0] = memory.ctypes.data
    return records


def test_records_and_jobs_of_the_executor() -> None:
    memory, count = np.zeros(64, np.uint16), 20_000
    with Executor([], small=PoolSpec(0, 0), large=PoolSpec(0, 0)) as executor:
        records = _records(memory, count)
        before = _malloced()
        ids = executor.define(records)
        assert (_malloced() - before - ids.nbytes) / count == pytest.approx(RECORD_BYTES, rel=0.02)
        jobs = np.zeros(count, dtype=JOB)
        jobs["chunk"], jobs["kind"], jobs["mask"], jobs["base"] = ids, JobKind.FETCH, 1, -1
        gate = executor.gate()
        before = _malloced()
        ticket = executor.submit(jobs, gate=gate, priority=Priority.DEMAND)
        taken = (_malloced() - before) / count
        gate.open([])
        ticket.wait()
    assert taken + SEG.itemsize == pytest.approx(host_overhead.STEP_CHUNK_BYTES, rel=0.02)


@pytest.mark.parametrize("chunks", mostly_slow([200, 5000], 200))
def test_a_model_beside_its_budget(chunks: int, tmp_path: Path) -> None:
    """Python and numpy by chunk and by unit, between models of other sizes."""
    found = {
        shape: json.loads(forks.in_a_fork(__name__, tmp_path, *shape))
        for shape in ((chunks // 5, FLATS), (chunks, FLATS), (chunks, 10 * FLATS))
    }
    few, many, wide = found.values()
    by_chunk = {name: (many[name] - few[name]) / (chunks - chunks // 5) for name in few}
    by_unit = {name: (wide[name] - many[name]) / (9 * FLATS) for name in few}
    sums = 2 * 4 * 4  # in the budget: of two places, four sections
    held = host_overhead.CHUNK_BYTES + host_overhead.SECOND_PLACE_BYTES - RECORD_BYTES
    assert by_chunk["held"] - sums == pytest.approx(held, rel=TOLERANCE)
    assert by_unit["held"] == pytest.approx(host_overhead.UNIT_BYTES, rel=TOLERANCE)
    # Flats of 100 chunks are less than a block of them, which is looked at as a whole: about half.
    assert by_chunk["commit"] == pytest.approx(host_overhead.COMMIT_CHUNK_BYTES, rel=0.6)
    if chunks > 200:  # below, the executors' records of what is copied are more
        job = host_overhead.STEP_CHUNK_BYTES - SEG.itemsize
        save = host_overhead.SAVE_CHUNK_BYTES - job
        assert by_chunk["save"] == pytest.approx(save, rel=TOLERANCE)
        assert by_chunk["restore"] == pytest.approx(
            host_overhead.RESTORE_CHUNK_BYTES, rel=TOLERANCE
        )
    # The sums of it all, as a plan adds them up.
    assert host_overhead.held_bytes(10, 2, 2) == (
        10 * (held + RECORD_BYTES) + 2 * host_overhead.UNIT_BYTES
    )
    passing = host_overhead.passing_bytes(10, all_at_once=True, durable=True, drives=1, fill=7)
    assert passing["commit"] == 10 * host_overhead.COMMIT_CHUNK_BYTES


def test_a_few_pieces_are_on_their_way_at_most() -> None:
    assert host_overhead.fill_bytes(0) == 0
    assert host_overhead.fill_bytes(100) == 400
    assert host_overhead.fill_bytes(1 << 30) == 12 << 20
    # A whole flat, its shard, and the shard that is being written.
    assert host_overhead.fill_bytes(100, scattered=400) == 600
    # A source that converts, or gives whole weights, holds more.
    assert host_overhead.fill_bytes(100, converting=7) == 407


@pytest.mark.parametrize("learns", [False, True])
def test_memory_beside_the_plan_is_refused_before_anything_is_taken(
    learns: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def offloaded(left_bytes: int) -> tuple[int, int, int]:
        """The bytes of the plan, chunks and units of a model under a limit."""
        limit = CgroupLimit("/job", 1 << 40, (1 << 40) - left_bytes)
        monkeypatch.setattr(ledger, "cgroup_limits", lambda: [limit])
        with torch.device("meta"):
            layers = (torch.nn.Linear(2048, 2048, bias=False).bfloat16() for _ in range(3))
            model = torch.nn.Sequential(*layers).requires_grad_(learns)
        policy = inf.Policy(
            params="nvme", optim="nvme", nvme=tmp_path, ram="min", units=["Linear"],
            unit_bytes_max="8MiB",
        )  # fmt: skip
        inf.offload(model, policy, load=lambda _name, tensor: tensor.fill_(0.01))
        handle = inf.handle(model)
        chunks = sum(len(flat.layout.chunks) for unit in handle.units for flat in unit.flats)
        found = handle.parts.tiers.planner.plan.ram_bytes, chunks, len(handle.units)
        handle.close()
        return found

    plan, chunks, units = offloaded(4 << 30)
    held = host_overhead.held_bytes(chunks, units)
    running = held + host_overhead.STEP_CHUNK_BYTES * chunks
    # Pieces, and a weight of 8 MiB. With gradients the plan has room for them then.
    need = plan + running if learns else plan + held + host_overhead.PIECES_BYTES + (8 << 20)
    with pytest.raises(MemoryLimitError, match="of it outside Policy") as caught:
        offloaded(need - 1)
    assert (caught.value.needed_bytes, caught.value.left_bytes) == (need, need - 1)
    assert list(tmp_path.iterdir()) == []
    assert offloaded(need) == (plan, chunks, units)


def _taken(action: Any) -> int:
    """The most bytes that Python and numpy hold meanwhile beyond those of before."""
    gc.collect()
    before = tracemalloc.get_traced_memory()[0]
    tracemalloc.reset_peak()
    action()
    return tracemalloc.get_traced_memory()[1] - before


def main() -> None:
    """Print what one model takes: held, and in each phase."""
    place, chunks, flats = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    run = place / f"{chunks}-{flats}"
    run.mkdir()
    torch.set_num_threads(1)
    x = torch.randn(2, slopes.CHUNK_NUMEL, dtype=torch.bfloat16)
    found = {}
    with slopes.tiny_chunks():
        model: Any = slopes.Rows(chunks, flats)
        gc.collect()
        tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0]
        tiers: dict[str, Any] = {"params": "nvme", "optim": "nvme", "ram": "min"}
        inf.offload(model, inf.Policy(nvme=run, units=["Linear"], durable="new", **tiers))
        optimizer = inf.AdamW(model.parameters())
        handle = inf.handle(model)
        for _ in range(2):
            model(x).backward()
            optimizer.step()
            optimizer.zero_grad()
            handle.pipeline.wait()
            gc.collect()
            found["held"] = tracemalloc.get_traced_memory()[0] - before
            found["commit"] = _taken(handle.flush)
        # As on a file system that makes no links to the run's: the save copies.
        handle.durable.link = lambda *_: None
        found["save"] = _taken(lambda: inf.save(model, optimizer, run / "saved").wait())
        found["restore"] = _taken(lambda: inf.restore(model, optimizer, run / "saved"))
        tracemalloc.stop()
        handle.close()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
