"""Every odd offset and length: chunks of one element and up, around every boundary, from and to odd
addresses."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from infinity import aio
from infinity._src.cabi import records
from infinity.aio import _validate
from infinity.aio._executor import Executor
from tests.unit.aio.rig import BACKENDS, adamw, hyper_record

SLOT_BYTES = 1 << 18
GUARD = 64
BOUNDARIES = sorted(
    {
        max(1, at + by)
        for at in (1, 512, 2048, 4096, 8192, 12288, 65536, 3 * 65536)
        for by in (-513, -1, 0, 1, 3, 511)
        if 1 <= at + by <= SLOT_BYTES // 4
    }
)


class Bench:
    """An executor on one file, and buffers with guards around them."""

    def __init__(self, directory: Path, backend: str, block_bytes: int) -> None:
        self.file = aio.SwapFile.create(directory)
        small, large = aio.PoolSpec(2, 8192), aio.PoolSpec(4, 4 * SLOT_BYTES)
        self.executor = Executor(
            [self.file], small=small, large=large, backend=backend, block_bytes=block_bytes, depth=8
        )
        self.keep: list = []

    def define(
        self,
        fmt: int,
        numel: int,
        piece: int,
        itemsizes: tuple[int, ...],
        *,
        gap: int = 0,
        at: int = 0,
    ) -> int:
        """One chunk whose sections lie `gap` pages apart, its run at page `at` of the file."""
        record = np.zeros(1, dtype=records.CHUNK)
        end = 0
        record["section_at"] = -1
        for s, size in enumerate(itemsizes):
            record["section_at"][0, s] = end
            record["itemsize"][0, s] = size
            end += _validate.align_up(numel * size) + gap * 4096
        record["key"], record["numel"], record["piece_numel"] = 7 + at, numel, piece
        record["file_offset"], record["run_bytes"] = at * 4096, end
        record["format"], record["section_count"] = fmt, len(itemsizes)
        self.file.grow(at * 4096 + end)
        sums = np.zeros((len(itemsizes), records.piece_count(numel, piece)), dtype=np.uint32)
        record["sums_ptr"] = sums.ctypes.data
        self.keep.append(sums)
        return int(self.executor.define(record)[0])

    def move(self, chunk: int, kind: int, arrays: list[np.ndarray]) -> aio.Ticket:
        job = np.zeros(1, dtype=records.JOB)
        job["chunk"], job["kind"], job["mask"], job["base"] = (
            chunk,
            kind,
            (1 << len(arrays)) - 1,
            -1,
        )
        job["ptr"][0, : len(arrays)] = [array.ctypes.data for array in arrays]
        self.keep.append(arrays)
        return self.executor.submit(job, priority=aio.Priority.DEMAND)

    def round_trip(self, chunk: int, sources: list[np.ndarray], odd: int) -> None:
        """STORE from and FETCH to addresses that are `odd` bytes off; what is beside the target
        stays."""
        guarded = [guard(source, odd) for source in sources]
        self.move(chunk, records.JobKind.STORE, [inner for _, inner in guarded]).wait(20)
        targets = [guard(np.zeros_like(source), odd) for source in sources]
        self.move(chunk, records.JobKind.FETCH, [inner for _, inner in targets]).wait(20)
        for (outer, inner), source in zip(targets, sources, strict=True):
            assert inner.tobytes() == source.tobytes()
            assert (outer[: GUARD + odd] == 0xA5).all()
            assert (outer[GUARD + odd + source.nbytes :] == 0xA5).all()

    def close(self) -> None:
        self.executor.close()
        self.file.close()


def guard(data: np.ndarray, odd: int) -> tuple[np.ndarray, np.ndarray]:
    """(bytes with guards, the copy of `data` among them, `odd` bytes off a boundary)."""
    outer = np.full(data.nbytes + 2 * GUARD + odd, 0xA5, dtype=np.uint8)
    inner = outer[GUARD + odd : GUARD + odd + data.nbytes]
    inner[:] = data.view(np.uint8)
    return outer, inner


def random_bytes(seed: int, size: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


@pytest.fixture
def bench(backend, tmp_path):
    made = []

    def make(block_bytes: int) -> Bench:
        made.append(Bench(tmp_path, backend, block_bytes))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.mark.parametrize("block_bytes", [4096, 12288])
@pytest.mark.parametrize("itemsize", [1, 2, 4])
def test_every_length_around_a_boundary_comes_back(bench, itemsize, block_bytes):
    here = bench(block_bytes)
    at = 1
    for numel in BOUNDARIES:
        piece = (1, 511, 2048, 1 << 20)[numel % 4]
        chunk = here.define(
            records.Format.RAW, numel, max(piece, numel // 4096), (itemsize,), at=at
        )
        at += -(-numel * itemsize // 4096)
        here.round_trip(chunk, [random_bytes(numel, numel * itemsize)], odd=numel % 5)
    assert here.executor.fault() is None


@pytest.mark.parametrize("numel", [1, 2, 127, 128, 129, 511, 1025, 2047, 2049, 4095, 4097])
@pytest.mark.parametrize("gap", [0, 1])
def test_updates_of_odd_lengths_are_bitwise_the_reference(bench, numel, gap):
    here = bench(4096)
    rng = np.random.default_rng(numel)
    for fmt, dtypes in (
        (records.Format.SPLIT, (np.uint16, np.int16, np.float32, np.float32)),
        (records.Format.FP32, (np.float32, np.float32, np.float32)),
    ):
        sizes = tuple(np.dtype(dtype).itemsize for dtype in dtypes)
        chunk = here.define(fmt, numel, 100, sizes, gap=gap, at=3)
        states = [
            rng.integers(0x3C00, 0x3FFF, numel).astype(dtype)
            if np.dtype(dtype).kind in "ui"
            else rng.random(numel).astype(dtype)
            for dtype in dtypes
        ]
        here.round_trip(chunk, states, odd=1)
        start = numel // 3
        grad = rng.standard_normal(numel - start).astype(np.float32)
        seg = np.zeros(1, dtype=records.SEG)
        seg["start"], seg["numel"], seg["grad"], seg["grad_dtype"] = (
            start,
            len(grad),
            grad.ctypes.data,
            1,
        )
        job = np.zeros(1, dtype=records.JOB)
        job["chunk"], job["kind"], job["base"], job["seg_count"] = (
            chunk,
            records.JobKind.UPDATE,
            -1,
            1,
        )
        outer, inner = guard(np.zeros(numel, dtypes[0]), 3)
        job["ptr"][0, 0] = inner.ctypes.data
        here.executor.submit(job, seg, hyper_record(), priority=aio.Priority.WRITEBACK).wait(20)
        adamw(fmt, [state[start:] for state in states], grad, hyper_record()[0])
        assert inner.tobytes() == states[0].tobytes()
        assert (outer[GUARD + 3 + inner.nbytes :] == 0xA5).all()
        targets = [np.zeros_like(state) for state in states]
        here.move(chunk, records.JobKind.FETCH, targets).wait(20)
        assert all(a.tobytes() == b.tobytes() for a, b in zip(targets, states, strict=True))


LAYOUT = st.tuples(
    st.integers(1, 20_000),  # elements
    st.integers(1, 9_000),  # elements in a piece
    st.sampled_from([1, 2, 4, 8]),
    st.integers(0, 7),  # bytes off
)


@pytest.mark.parametrize("name", BACKENDS)
def test_any_sizes_side_by_side_come_back(name):
    @settings(
        max_examples=20,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
        database=None,
    )
    @given(layouts=st.lists(LAYOUT, min_size=1, max_size=8), block_pages=st.integers(1, 20))
    def check(layouts, block_pages):
        with tempfile.TemporaryDirectory() as directory:
            here = Bench(Path(directory), name, block_pages * 4096)
            try:
                at, moves = 0, []
                for numel, piece, itemsize, odd in layouts:
                    chunk = here.define(records.Format.RAW, numel, piece, (itemsize,), at=at)
                    at += -(-numel * itemsize // 4096)
                    data = random_bytes(at, numel * itemsize)
                    moves.append((chunk, data, guard(np.zeros_like(data), odd)))
                    here.move(chunk, records.JobKind.STORE, [guard(data, odd)[1]])
                fetches = [
                    here.move(chunk, records.JobKind.FETCH, [target[1]])
                    for chunk, _, target in moves
                ]
                for ticket in fetches:
                    ticket.wait(20)
                for _, data, (outer, inner) in moves:
                    assert inner.tobytes() == data.tobytes()
                    assert (np.concatenate([outer[:GUARD], outer[-GUARD:]]) == 0xA5).all()
            finally:
                here.close()

    check()
