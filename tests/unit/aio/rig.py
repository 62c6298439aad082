"""A rig for executors: swap files, chunks of the `exact` state, and AdamW in numpy as the oracle.

Chunks are small (4096 elements, 48 KiB) and blocks smaller (8 KiB), so
that a run takes several requests. `BACKENDS` are the I/O backends that work on this machine;
`MISSING` has the reason for each other one.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from infinity import aio
from infinity._src.cabi import native, records
from infinity.aio._executor import Executor
from infinity.aio._handles import load_uring
from infinity.aio._spares import SPARE
from infinity.errors import AioError
from tests.oracle import decode_sections, encode_sections

Array = npt.NDArray[Any]

NUMEL = 4096
PIECE = 2048
DTYPES = (np.uint16, np.int16, np.float32, np.float32)
RUN_BYTES = 12 * NUMEL
SPILLED = records.Format(records.Master.SPLIT, records.Moments.FP32, 2, records.GradSection.BF16)
"""The split format with an additional section: spilled gradients in bf16."""


def adamw(fmt: int, sections: list[Array], grad: Array, hyper: Any, element: int = 0) -> None:
    """AdamW as the kernels must compute it, one rounding per operation: the oracle of all
    executors."""
    one = np.float32
    g = (grad.astype(np.uint32) << 16).view(np.float32) if grad.dtype == np.uint16 else grad
    with np.errstate(all="ignore"):
        for k in range(int(hyper["log_count"])):
            value = one(hyper["log_value"][k])
            g = g / value if hyper["log_kind"][k] else g * value
        kind = records.Format.SPLIT if fmt == records.Format.SPLIT else records.Format.FP32
        p, (m, v) = decode_sections(kind, sections)
        p = p * one(hyper["decay"])
        m[:] = m * one(hyper["beta1"]) + g * one(hyper["one_minus_beta1"])
        v[:] = v * one(hyper["beta2"]) + (g * g) * one(hyper["one_minus_beta2"])
        p = p - (m / (np.sqrt(v) / one(hyper["bc2_sqrt"]) + one(hyper["eps"]))) * one(
            hyper["step_size"]
        )
    for section, values in zip(sections, encode_sections(kind, p, [m, v]), strict=True):
        section[:] = values.view(section.dtype)


def hyper_record(step: int = 1) -> Array:
    """One HYPER record of a plain AdamW step."""
    record = np.zeros(1, dtype=records.HYPER)
    lr, beta1, beta2 = 1e-2, 0.9, 0.99
    record["decay"] = 1 - lr * 0.01
    record["beta1"], record["one_minus_beta1"] = beta1, 1 - beta1
    record["beta2"], record["one_minus_beta2"] = beta2, 1 - beta2
    record["eps"] = 1e-8
    record["bc2_sqrt"] = (1 - beta2**step) ** 0.5
    record["step_size"] = lr / (1 - beta1**step)
    return record


class Rig:
    """Chunks on drives, an executor, and what each chunk must hold."""

    def __init__(
        self,
        directory: Path,
        backend: str,
        *,
        chunk_count: int = 6,
        drive_count: int = 1,
        resident: Sequence[int] = (),
        checksums: bool = True,
        pools: tuple[int, int] = (3, 3),
        piece: int = PIECE,
        direct: bool = True,
        spilled: bool = False,
        versioned: bool = False,
        zeros: int = 0,
        spares: int | Sequence[int] = 0,
        files: Sequence[aio.SwapFile] | None = None,
        **options: Any,
    ) -> None:
        self.piece = piece
        self.format = SPILLED if spilled else records.Format.SPLIT
        self.dtypes = (*DTYPES, np.uint16) if spilled else DTYPES
        self.run_bytes = sum(np.dtype(dtype).itemsize for dtype in self.dtypes) * NUMEL
        self.files = list(
            files or [aio.SwapFile.create(directory, direct=direct) for _ in range(drive_count)]
        )
        self.versioned, self.zeros = versioned, zeros
        for file in self.files:
            file.grow(chunk_count * self.run_bytes)
            if zeros:  # so that reading unwritten memory does not give zeros
                Path(f"/proc/self/fd/{file.fd}").write_bytes(b"\xa5" * file.size_bytes)
        small = aio.PoolSpec(pools[0], 2 * NUMEL)
        large = aio.PoolSpec(pools[1], self.run_bytes)
        options = {"block_bytes": 8192, "depth": 8, **options}
        self.executor = Executor(self.files, small=small, large=large, backend=backend, **options)
        self.sums = np.zeros((chunk_count, len(self.dtypes), NUMEL // piece), dtype=np.uint32)
        self.memory: list[list[Array | None]] = [
            [
                np.zeros(NUMEL, dtype) if s in resident else None
                for s, dtype in enumerate(self.dtypes)
            ]
            for _ in range(chunk_count)
        ]
        self.others = (
            [aio.SwapFile.create(directory, direct=direct) for _ in self.files] if versioned else []
        )
        for drive, file in enumerate(self.others):
            file.grow(chunk_count * self.run_bytes)
            assert self.executor.add_file(drive, file) == 1
        self.other_sums = np.zeros_like(self.sums)
        self.other_memory: list[Array] = []
        self.chunks = np.concatenate(
            [self.chunk_record(i, checksums=checksums) for i in range(chunk_count)]
        )
        self.ids = self.executor.define(self.chunks)
        self._give_spares([spares] * len(self.files) if isinstance(spares, int) else spares)
        self._keep: list[Any] = []
        self.flags = 0  # MASK_DEVICE: callers' memory is on a device

    def _give_spares(self, counts: Sequence[int]) -> None:
        """Give the executor `count` reserved extents on each drive, after the chunks."""
        given = np.zeros(sum(counts), dtype=SPARE)
        drives = np.repeat(np.arange(len(counts)), counts)
        for spare, drive in zip(given, drives.tolist(), strict=True):
            file = self.files[drive]
            spare["drive"], spare["offset"], spare["bytes"] = drive, file.size_bytes, self.run_bytes
            file.grow(file.size_bytes + self.run_bytes)
        self.executor.add_spares(given)

    def chunk_record(self, index: int, *, checksums: bool) -> Array:
        """The CHUNK record of one chunk; its run holds the sections that are not resident."""
        record = np.zeros(1, dtype=records.CHUNK)
        at = 0
        drive = index % len(self.files)
        for s, dtype in enumerate(self.dtypes):
            size = np.dtype(dtype).itemsize
            memory = self.memory[index][s]
            record["section_at"][0, s] = -1 if memory is not None else at
            record["section_ptr"][0, s] = memory.ctypes.data if memory is not None else 0
            at += 0 if memory is not None else size * NUMEL
        record["key"], record["numel"], record["piece_numel"] = index + 1000, NUMEL, self.piece
        record["file_offset"] = index * self.run_bytes if at else -1
        record["run_bytes"], record["drive"] = at, drive if at else -1
        record["format"], record["section_count"] = self.format, len(self.dtypes)
        record["itemsize"][0, : len(self.dtypes)] = [
            np.dtype(dtype).itemsize for dtype in self.dtypes
        ]
        for s in range(len(self.dtypes)):
            if record["section_at"][0, s] >= 0:
                record["zeros"] |= np.uint16(self.zeros & 1 << s)
        record["sums_ptr"] = self.sums[index].ctypes.data if checksums else 0
        if self.versioned:
            self._second_place(record[0], index)
        return record

    def _second_place(self, record: Any, index: int) -> None:
        """Add a second run in another file, and memory for resident sections, to the record.
        Gradients stay in the first run."""
        states = records.Format.of(record["format"]).written_count
        if record["run_bytes"]:
            record["other_file"], record["other_offset"] = 1, index * self.run_bytes
            record["other_bytes"] = record["run_bytes"]
            record["other_drive"] = record["drive"]
        for section in range(states):
            memory = self.memory[index][section]
            if memory is not None:
                self.other_memory.append(np.zeros_like(memory))
                record["other_ptr"][section] = self.other_memory[-1].ctypes.data
        if states < len(self.dtypes):
            grad = int(record["section_at"][states])
            record["grad_offset"] = record["file_offset"] + grad if grad >= 0 else -1
        if record["sums_ptr"]:
            record["other_sums_ptr"] = self.other_sums[index].ctypes.data

    def store(
        self, values: dict[int, list[Array]], *, mask: int = 15, priority: int = 0
    ) -> aio.Ticket:
        """STORE whole chunks (or the masked sections of them)."""
        jobs = np.zeros(len(values), dtype=records.JOB)
        for job, (index, arrays) in zip(jobs, values.items(), strict=True):
            job["chunk"], job["kind"], job["mask"], job["base"] = (
                self.ids[index],
                records.JobKind.STORE,
                mask | self.flags,
                -1,
            )
            job["ptr"][: len(arrays)] = [array.ctypes.data for array in arrays]
        self._keep.append(values)
        return self.executor.submit(jobs, priority=aio.Priority(priority))

    def fetch(
        self, indexes: Sequence[int], *, mask: int = 15, priority: int = 0, gate: Any = None
    ) -> tuple[aio.Ticket, list[list[Array]]]:
        """FETCH into new arrays, which have the values once the ticket is done."""
        targets = [[np.zeros(NUMEL, dtype) for dtype in self.dtypes] for _ in indexes]
        jobs = np.zeros(len(indexes), dtype=records.JOB)
        for job, index, arrays in zip(jobs, indexes, targets, strict=True):
            job["chunk"], job["kind"], job["mask"], job["base"] = (
                self.ids[index],
                records.JobKind.FETCH,
                mask | self.flags,
                -1,
            )
            job["ptr"][: len(arrays)] = [array.ctypes.data for array in arrays]
        self._keep.append(targets)
        return self.executor.submit(jobs, priority=aio.Priority(priority), gate=gate), targets

    def read(self, index: int) -> list[Array]:
        """FETCH one chunk and wait."""
        ticket, targets = self.fetch([index])
        ticket.wait()
        return targets[0]

    def update(
        self,
        grads: dict[int, Array | None],
        *,
        gate: Any = None,
        target: Array | None = None,
        step: int = 1,
        given: dict[int, Array] | None = None,
        hyper: Array | None = None,
        leaves: int = 0,
        first: bool = False,
    ) -> aio.Ticket:
        """UPDATE chunks with one segment each; with a gate ptr[0] is relative to base 0.

        A gradient of None lies in the chunk's own section. `given`: parameters (section 0) that are
        in memory, by chunk. `hyper`: instead of AdamW's record of `step`. `leaves`: the sections
        that the updates leave out, as a mask. `first`: another update follows before a commit.
        """
        jobs = np.zeros(len(grads), dtype=records.JOB)
        segs = np.zeros(len(grads), dtype=records.SEG)
        for n, (index, grad) in enumerate(grads.items()):
            jobs[n]["chunk"], jobs[n]["kind"], jobs[n]["base"] = (
                self.ids[index],
                records.JobKind.UPDATE,
                -1,
            )
            jobs[n]["seg_first"], jobs[n]["seg_count"] = n, 1
            if target is not None:
                jobs[n]["base"] = 0 if gate is not None else -1
                jobs[n]["ptr"][0] = n * 2 * NUMEL + (0 if gate is not None else target.ctypes.data)
            if given and index in given:
                jobs[n]["mask"], jobs[n]["ptr"][1] = (
                    aio.MASK_PARAM_IN_MEMORY,
                    given[index].ctypes.data,
                )
            jobs[n]["mask"] |= self.flags | leaves << aio.LEAVES_SHIFT
            jobs[n]["mask"] |= records.MASK_FIRST if first else 0
            segs[n]["numel"] = NUMEL
            if grad is None:
                segs[n]["grad_dtype"] = records.GradDtype.SECTION
                continue
            segs[n]["grad"] = grad.ctypes.data
            segs[n]["grad_dtype"] = (
                records.GradDtype.FP32 if grad.dtype == np.float32 else records.GradDtype.BF16
            )
        self._keep.append((grads, target, given))
        return self.executor.submit(
            jobs,
            segs,
            hyper_record(step) if hyper is None else hyper,
            priority=aio.Priority.WRITEBACK,
            gate=gate,
        )

    def close(self) -> None:
        """Close executor and files."""
        self.executor.close(wait=False)
        for file in (*self.files, *self.others):
            file.close()


def random_chunk(rng: np.random.Generator) -> list[Array]:
    """Plausible states: finite parameters, small moments."""
    hi = rng.integers(0x3C00, 0x4000, NUMEL).astype(np.uint16)
    lo = rng.integers(-32768, 32767, NUMEL).astype(np.int16)
    m = rng.standard_normal(NUMEL).astype(np.float32) * np.float32(0.01)
    v = rng.random(NUMEL).astype(np.float32) * np.float32(0.01)
    return [hi, lo, m, v]


def same(first: Sequence[Array], second: Sequence[Array]) -> bool:
    """Bitwise."""
    return all(a.tobytes() == b.tobytes() for a, b in zip(first, second, strict=True))


def outcome(ticket: aio.Ticket, timeout: float = 20) -> AioError | None:
    """The error that the ticket raises, if it does."""
    try:
        ticket.wait(timeout)
    except AioError as error:
        return error
    return None


def _backends() -> tuple[list[str], dict[str, str]]:
    ffi, lib = native.load()
    try:
        load_uring(ffi, lib)
        code = lib.inf_uring_probe()
    except OSError as error:
        return ["threads"], {"io_uring": str(error)}
    if code:
        return ["threads"], {"io_uring": f"no ring can be made: {os.strerror(-code)}"}
    return ["io_uring", "threads"], {}


BACKENDS, MISSING = _backends()


def until(condition: Callable[[], object], seconds: float = 20) -> None:
    """Wait until the condition holds; fail after a timeout."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)
