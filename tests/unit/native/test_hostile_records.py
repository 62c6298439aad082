"""Records with hostile fields: sizes that overflow, offsets past the end, indices of nothing. Each
is refused, or done within its memory. `make asan` runs this under sanitizers.

INFINITY_RECORDS: how many of each kind (quick: 1500).
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from infinity import aio
from infinity._src.cabi import records
from infinity._src.cabi.native import ffi, lib
from infinity.aio import CHUNK, HYPER, JOB, SEG, Format, SwapFile
from infinity.aio._executor import Executor
from infinity.aio._validate import BYTES_MAX, check_chunks

COUNT = int(os.environ.get("INFINITY_RECORDS", "1500"))
NUMBERS = (0, 1, -1, 2, 3, 5, 7, 63, 64, 255, 4095, 4096, 4097, 1 << 15, 1 << 16, (1 << 31) - 1,
           1 << 31, 1 << 32, 1 << 40, 1 << 59, 1 << 60, (1 << 60) + 1, 1 << 61, 1 << 62,
           (1 << 63) - 4096, (1 << 63) - 1, -(1 << 31), -(1 << 62), -(1 << 63))  # fmt: skip
FORMATS = (
    Format.RAW,
    Format.SPLIT,
    Format.FP32,
    Format(records.Master.SPLIT8, records.Moments.Q8, 2),
    Format(records.Master.SPLIT, records.Moments.FP32, 2, records.GradSection.BF16),
)
NUMEL, PIECE = 512, 128
ROOM = 1 << 16
"""Bytes of each section's memory: a record that says more is not run here."""


def whole_chunk(rng: random.Random, memory: np.ndarray[Any, Any]) -> Any:
    """A CHUNK record that is right, of a format at random, with its checksums in `memory`."""
    state_format = rng.choice(FORMATS)
    sections = state_format.sections
    record = np.zeros((), CHUNK)
    record["key"], record["numel"], record["piece_numel"] = rng.randrange(1 << 64), NUMEL, PIECE
    record["format"], record["section_count"] = int(state_format), len(sections)
    record["section_at"] = -1
    at = 0
    for index, section in enumerate(sections):
        record["itemsize"][index], record["group_numel"][index] = (
            section.itemsize or 4,
            section.group_numel,
        )
        if rng.random() < 0.2:
            record["section_ptr"][index] = memory.ctypes.data + ROOM * (index + 8)
        else:
            record["section_at"][index] = at
            size = -(-NUMEL // section.group_numel) * (section.itemsize or 4)
            at += -(-size // 4096) * 4096
    record["run_bytes"] = at
    if rng.random() < 0.4 and at:
        record["other_bytes"], record["other_offset"] = at, 1 << 20
        record["grad_offset"] = 1 << 21
        record["other_sums_ptr"] = memory.ctypes.data + ROOM * 7
    record["sums_ptr"] = memory.ctypes.data + ROOM * 6
    return record


POINTERS = ("section_ptr", "other_ptr", "sums_ptr", "other_sums_ptr", "grad", "ptr")
"""Fields that no file says: addresses, which the caller alone knows."""


def spoil(record: Any, rng: random.Random) -> None:
    """Change one to three fields of a record, but no address."""
    names = [name for name in record.dtype.names if name not in POINTERS]
    for _ in range(rng.choice((1, 1, 2, 3))):
        name = rng.choice(names)
        field = record[name]
        base = record.dtype[name].base
        value = rng.choice(NUMBERS) if rng.random() < 0.8 else rng.randrange(1 << 64)
        if base.kind == "f":
            new = np.array(rng.choice((0.0, 1.0, np.nan, np.inf, -1e38)), base)
        else:
            size = 8 * base.itemsize
            bits = value & ((1 << size) - 1)
            signed = bits - (1 << size) if base.kind == "i" and bits >> (size - 1) else bits
            new = np.array(signed, base)
        if field.shape:
            field[rng.randrange(field.shape[0])] = new
        else:
            record[name] = new


@pytest.fixture
def memory() -> np.ndarray[Any, Any]:
    # Of its own allocation, so that a sanitizer knows its end.
    return np.zeros(ROOM * 16, np.uint8)


@pytest.fixture
def executor(tmp_path: Path) -> Iterator[Executor]:
    with SwapFile.create(tmp_path) as file:
        file.grow(1 << 22)
        opened = aio.open_executor(
            [file],
            small=aio.PoolSpec(4, 1 << 16),
            large=aio.PoolSpec(2, 1 << 18),
            backend="threads",
        )
        try:
            yield opened
        finally:
            opened.close()


def accepted(chunks: Any) -> bool:
    """Return whether Python's checks let records pass."""
    try:
        check_chunks(chunks, 1)
    except ValueError:
        return False
    return True


def test_sizes_that_overflow_are_refused_by_python_and_by_c(
    memory: Any, executor: Executor
) -> None:
    rng, found = random.Random(1), Counter[str]()
    ids = np.zeros(1, np.int32)
    for _ in range(COUNT):
        chunk = whole_chunk(rng, memory)
        assert lib.inf_chunk_valid(ffi.cast("inf_chunk *", chunk.ctypes.data))
        spoil(chunk, rng)
        by_python = accepted(chunk.reshape(1))
        by_c = bool(lib.inf_chunk_valid(ffi.cast("inf_chunk *", chunk.ctypes.data)))
        found[f"python {by_python}, c {by_c}"] += 1
        if by_c:
            # All that C adds up of it stays within 64 bits.
            bounds = [chunk["numel"], chunk["run_bytes"], chunk["other_bytes"]]
            assert all(0 <= int(value) <= BYTES_MAX for value in bounds)
        core = executor._core
        error = lib.inf_executor_define(
            core.pointer, ffi.cast("void *", chunk.ctypes.data), 1,
            ffi.from_buffer("int32_t[]", ids, require_writable=True),
        )  # fmt: skip
        assert error <= 0
        assert by_c or error < 0
        if error == 0:
            executor.drop(ids)
    assert found.total() == COUNT
    # Both kinds of answers come, from both.
    assert found["python False, c False"] > COUNT // 20
    assert found["python True, c True"] > COUNT // 20


def test_jobs_and_segments_of_nothing_are_refused(memory: Any, executor: Executor) -> None:
    rng, found = random.Random(2), Counter[str]()
    for number in range(COUNT):
        chunk = whole_chunk(rng, memory)
        chunk["sums_ptr"] = chunk["other_sums_ptr"] = memory.ctypes.data + ROOM * 6
        ids = executor.define(chunk.reshape(1))
        jobs, segs, hypers = np.zeros(1, JOB), np.zeros(1, SEG), np.zeros(1, HYPER)
        jobs["chunk"], jobs["kind"], jobs["mask"] = ids, rng.choice((1, 2, 3)), 1
        jobs["base"], jobs["seg_count"] = -1, 1
        jobs["ptr"] = memory.ctypes.data + ROOM * np.arange(6, dtype=np.uint64)
        segs["numel"], segs["grad"] = NUMEL, memory.ctypes.data
        hypers["step_size"] = hypers["bc2_sqrt"] = 1.0
        for array in rng.choice(((jobs,), (segs,), (hypers,), (jobs, segs), (segs, hypers))):
            spoil(array[0], rng)
        try:
            ticket = executor.submit(jobs, segs, hypers, priority=aio.Priority.DEMAND)
        except ValueError:
            found["refused"] += 1
        else:
            try:
                ticket.wait(60)
                found["done"] += 1
            except OSError:
                found["failed"] += 1
        executor.wait_all(60)
        executor.drop(ids)
        assert number < COUNT
    assert found.total() == COUNT
    assert min(found["refused"], found["done"], found["failed"]) > COUNT // 100


def test_a_pass_over_a_chunk_stays_within_its_memory() -> None:
    """Each section in memory that ends where the record says: a sanitizer sees a byte more."""
    rng, found = random.Random(3), Counter[str]()
    big = np.zeros(ROOM * 16, np.uint8)
    for _ in range(COUNT):
        chunk = whole_chunk(rng, big)
        segs, hypers = np.zeros(1, SEG), np.zeros(1, HYPER)
        segs["numel"] = NUMEL
        hypers["step_size"] = hypers["bc2_sqrt"] = 1.0
        for record in rng.choice(((chunk,), (segs[0],), (hypers[0],), (chunk, segs[0]))):
            spoil(record, rng)
        pointer = ffi.cast("inf_chunk *", chunk.ctypes.data)
        if not lib.inf_chunk_valid(pointer):
            found["refused"] += 1
            continue
        numel, count = int(chunk["numel"]), int(chunk["section_count"])
        pieces = -(-numel // int(chunk["piece_numel"]))
        if numel * 16 > ROOM or pieces * count * 4 > ROOM:
            found["large"] += 1
            continue
        sums = np.zeros(pieces * count, np.uint32)
        chunk["sums_ptr"] = chunk["other_sums_ptr"] = sums.ctypes.data
        scratch = np.zeros_like(sums)
        memory = [np.zeros(_section_bytes(chunk, s), np.uint8) for s in range(count)]
        for s in range(count):
            if chunk["section_at"][s] < 0:
                chunk["section_ptr"][s] = memory[s].ctypes.data
            out, place = np.zeros_like(memory[s]), ffi.cast("uint8_t *", memory[s].ctypes.data)
            lib.inf_section_store(pointer, s, ffi.NULL, place)
            target = ffi.cast("uint8_t *", out.ctypes.data)
            bad = lib.inf_section_fetch(pointer, s, place, target, 1)
            assert -1 <= bad < pieces
        grad = np.zeros(max(numel, 1), np.float32)
        segs["grad"] = grad.ctypes.data
        places = ffi.new("uint8_t *[6]", [ffi.cast("uint8_t *", m.ctypes.data) for m in memory])
        code = lib.inf_chunk_update(
            pointer, places, ffi.cast("inf_seg *", segs.ctypes.data), 1,
            ffi.cast("inf_hyper *", hypers.ctypes.data), 1, ffi.NULL, 1, 0,
            ffi.cast("uint32_t *", scratch.ctypes.data),
        )  # fmt: skip
        found["updated" if code == -1 else "bad plan" if code == -2 else "bad sum"] += 1
    assert found.total() == COUNT
    assert min(found["refused"], found["updated"], found["bad plan"]) > COUNT // 100


def _section_bytes(chunk: Any, section: int) -> int:
    group = max(int(chunk["group_numel"][section]), 1)
    return -(-int(chunk["numel"]) // group) * int(chunk["itemsize"][section])


@pytest.mark.parametrize("field", ["numel", "itemsize", "run_bytes", "file_offset", "section_at"])
def test_a_product_that_wraps_to_one_that_fits_is_refused(memory: Any, field: str) -> None:
    """2^62 elements of 4 bytes are 2^64, which is 0 in 64 bits: no longer than any run."""
    chunk = whole_chunk(random.Random(5), memory)
    chunk["section_at"][0] = 0
    chunk["section_ptr"] = 0
    values = {"numel": 1 << 62, "itemsize": 1 << 30, "run_bytes": 1 << 62, "file_offset": 1 << 62,
              "section_at": 1 << 62}  # fmt: skip
    if chunk[field].shape:
        chunk[field][0] = values[field]
    else:
        chunk[field] = values[field]
    assert not accepted(chunk.reshape(1))
    assert not lib.inf_chunk_valid(ffi.cast("inf_chunk *", chunk.ctypes.data))
