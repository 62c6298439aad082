"""Every request of a small run fails, each in turn and in every way: the result is right data or a
typed error.

The run stores, updates and fetches chunks on two drives. Whatever fails, a fetch that ends well
gives what it would have given had nothing failed: there is no older value that a caller could take
for the new one.
"""

from __future__ import annotations

import errno
import itertools
import time
from pathlib import Path

import numpy as np
import pytest

from infinity import aio
from infinity._src.cabi import records
from infinity.errors import (
    AioError,
    ChecksumError,
    DeviceFailedError,
    ShortTransferError,
    SwapFullError,
)
from tests.unit.aio.rig import (
    BACKENDS,
    DTYPES,
    NUMEL,
    Array,
    Rig,
    adamw,
    hyper_record,
    outcome,
    random_chunk,
    same,
)

CHUNKS = 3  # 0 and 2 on the first drive, 1 on the second
KINDS = {
    "EIO": ("errno", errno.EIO),
    "EAGAIN": ("errno", errno.EAGAIN),
    "EINTR": ("errno", errno.EINTR),
    "short": ("short", 0),
    "zero": ("zero", 0),
    "bitflip": ("bitflip", 0),
}
TIMES = {False: "once", True: "for_ever"}
QUICK = {*itertools.product(("EIO", "EINTR", "bitflip"), TIMES), ("short", False)}


class Run:
    """The small run, what it should give, and what it gave."""

    def __init__(
        self, files: list[aio.SwapFile], backend: str, fault: aio.Fault | None, *, seed: int = 0
    ) -> None:
        # the files hold what an earlier run left: it must not be the same
        rng = np.random.default_rng(seed)
        self.rig = Rig(
            Path(),
            backend,
            files=files,
            chunk_count=CHUNKS,
            resident=(2,),
            pools=(4, 6),
            block_bytes=16384,
            seam=aio.Seam(fault=fault) if fault else None,
        )
        first = [random_chunk(rng) for _ in range(CHUNKS)]
        second = random_chunk(rng)
        grads = [rng.standard_normal(NUMEL).astype(np.float32) for _ in range(CHUNKS)]
        self.expected = [[section.copy() for section in chunk] for chunk in first]
        rig = self.rig
        self.writes = [rig.store({i: first[i]}) for i in range(CHUNKS)]
        self.writes += [rig.update({i: grads[i]}) for i in range(CHUNKS)]
        for chunk, grad in zip(self.expected, grads, strict=True):
            adamw(records.Format.SPLIT, chunk, grad, hyper_record()[0])
        self.writes.append(rig.store({1: second}, mask=0b1001))  # sections apart from each other
        self.expected[1] = [second[0].copy(), *self.expected[1][1:3], second[3].copy()]
        self.fetches = [
            (i, mask, *rig.fetch([i], mask=mask)) for i in range(CHUNKS) for mask in (0b0001, 15)
        ]
        self.errors = [error for ticket in self.tickets if (error := outcome(ticket)) is not None]

    @property
    def tickets(self) -> list[aio.Ticket]:
        return [*self.writes, *(fetch[2] for fetch in self.fetches)]

    def wanted(self, index: int, mask: int) -> list[Array]:
        return [
            self.expected[index][s] if mask >> s & 1 else np.zeros(NUMEL, DTYPES[s])
            for s in range(4)
        ]

    def wrong(self) -> list[int]:
        """The chunks whose fetch succeeded with wrong data."""
        return [
            index
            for index, mask, ticket, targets in self.fetches
            if not ticket.failed and not same(targets[0], self.wanted(index, mask))
        ]

    def counts(self) -> dict[str, int]:
        drives = self.rig.executor.stats().drives
        return {
            "read": sum(drive.reads for drive in drives),
            "write": sum(drive.writes for drive in drives),
        }


@pytest.fixture
def files(tmp_path):
    two = [aio.SwapFile.create(tmp_path) for _ in range(2)]
    yield two
    for file in two:
        file.close()


def requests(files: list[aio.SwapFile], backend: str) -> dict[str, int]:
    run = Run(files, backend, None, seed=1000)
    assert run.errors == []
    assert run.wrong() == []
    run.rig.executor.close()
    return run.counts()


def error_types(op: str, name: str, *, persistent: bool) -> set[type[AioError]]:
    """Return the errors that such a fault may raise; none if the fault must have no effect."""
    if name in ("EAGAIN", "EINTR"):
        return {DeviceFailedError} if persistent else set()
    if name == "bitflip":
        return {ChecksumError} if persistent or op == "write" else set()
    if name == "short":
        return {ShortTransferError} if persistent else set()
    if name == "zero":
        allowed = {SwapFullError} if op == "write" else {ShortTransferError}
    else:
        allowed = {DeviceFailedError}
    # A read that failed is repeated.
    return allowed if persistent or op == "write" else set()


def check_ended(run: Run) -> None:
    """All tickets have ended and say the same again; the engine closes at once."""
    stats = run.rig.executor.stats()
    assert stats.jobs_done == stats.jobs_submitted == len(run.tickets)
    assert stats.jobs_failed == len(run.errors)
    for ticket in run.tickets:
        assert ticket.done
        assert ticket.filled
        assert (outcome(ticket, 0) is not None) == ticket.failed
    first = run.rig.executor.fault()
    assert (first is None) == (not run.errors)
    run.rig.executor.wait_all(20)


def check_goes_on(run: Run, *, persistent: bool, flipped: bool) -> None:
    """After `recover` a drive that works again has no fault any more; a drive that does not raises
    again."""
    executor = run.rig.executor
    kept = executor.stats().kept_chunks
    again = outcome(executor.recover())
    if persistent:
        assert kept == 0 or again is not None
        return
    assert again is None
    assert executor.stats().kept_chunks == 0
    for index, invalid in enumerate(executor.invalid(run.rig.ids)):
        mask = 15 & ~int(invalid)
        if mask:
            ticket, targets = run.rig.fetch([index], mask=mask)
            error = outcome(ticket)
            assert error is None or (flipped and isinstance(error, ChecksumError))
            assert error is not None or same(targets[0], run.wanted(index, mask))
    values = {i: random_chunk(np.random.default_rng(i)) for i in range(CHUNKS)}
    run.rig.store(values).wait(20)
    assert all(same(run.rig.read(i), values[i]) for i in values)
    assert executor.invalid(run.rig.ids).tolist() == [0] * CHUNKS


@pytest.mark.parametrize(
    ("name", "persistent"),
    [
        # If all transfers are short, each moves a block: as many requests as there are blocks.
        pytest.param(
            *each, marks=() if each in QUICK else pytest.mark.slow, id=f"{each[0]}-{TIMES[each[1]]}"
        )
        for each in itertools.product(KINDS, TIMES)
    ],
)
@pytest.mark.parametrize("op", ["read", "write"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_each_request_may_fail_and_nothing_wrong_comes_back(files, backend, op, name, persistent):
    kind, code = KINDS[name]
    allowed = error_types(op, name, persistent=persistent)
    met = 0
    for nth in range(requests(files, backend)[op]):
        fault = aio.Fault(op, nth, kind=kind, errno=code, persistent=persistent)
        run = Run(files, backend, fault, seed=nth)
        try:
            assert run.wrong() == [], f"{fault}: wrong data"
            assert {type(error) for error in run.errors} <= allowed, f"{fault}: {run.errors}"
            hit = run.counts()[op] > nth
            met += hit
            # A bit flipped in the last write of sections that are stored again need not be
            # reported.
            unread = op == "write" and name == "bitflip"
            if allowed and hit and not unread:
                assert run.errors, f"{fault}: silence"
            for error in run.errors:
                assert error.path == files[0].path
                assert error.length > 0
                assert error.op == ("read" if name == "bitflip" else op)
            check_ended(run)
            check_goes_on(run, persistent=persistent, flipped=unread)
        finally:
            run.rig.executor.close()
    assert met > 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_file_thread_or_slab_is_left_after_faults(files, backend):
    def held() -> tuple[int, int]:
        return len(list(Path("/proc/self/fd").iterdir())), len(
            list(Path("/proc/self/task").iterdir())
        )

    requests(files, backend)
    before = held()
    for op in ("read", "write"):
        for nth in range(4):
            run = Run(files, backend, aio.Fault(op, nth, persistent=True))
            assert run.errors
            run.rig.executor.close()
    deadline = time.monotonic() + 20
    while any(now > then for now, then in zip(held(), before, strict=True)):
        # A thread that was joined is still listed for a moment.
        assert time.monotonic() < deadline, (held(), before)
        time.sleep(0.01)
