"""Copies and the bus: bytes per second, calls of the driver, and bytes under way, in the virtual
time of the simulated device; bits, order and faults of merged copies.

Work is queued while the driver keeps the copying thread in its first call. The thread's further
calls depend only on the driver's answers, so the figures are the same on every machine.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from infinity import aio
from infinity._src.cabi import records
from infinity.aio._executor import Executor
from infinity.errors import DeviceCopyError
from tests.simulated import Simulated, library
from tests.unit.aio.rig import outcome, until

KIB, MIB = 1 << 10, 1 << 20
BUS = 55e9
AIM = 0.9
CHUNK = 2 * records.CHUNK_NUMEL  # bytes of a chunk's parameters: 768 KiB
HOST, THERE = 1 << 40, 1 << 44
"""Fake addresses: in virtual time no bytes are copied."""


class Copier:
    """An executor without drives on a simulated device; its copying threads can be held."""

    def __init__(self, device: Simulated, *, workers: int = 1) -> None:
        self.device = device
        self.driver = device.driver()
        self.executor = Executor(
            [],
            small=aio.PoolSpec(0, 4096),
            large=aio.PoolSpec(0, 4096),
            verify="off",
            workers=workers,
        )
        self.executor.attach_device(self.driver)
        self._keep: list[Any] = []

    def hold(self, *, out: bool) -> None:
        """Keep the thread of one direction in the copy of one byte."""
        word = np.zeros(64, np.uint8)
        self.pin(word)
        self.device.hold()
        self.copy([(word.ctypes.data, word.ctypes.data + 32, 1)], out=out)
        until(self.device.holding)

    def pin(self, memory: np.ndarray) -> int:
        self._keep.append(memory)
        self.driver.pin(memory.ctypes.data, memory.nbytes)
        return int(memory.ctypes.data)

    def copy(
        self,
        pieces: Sequence[tuple[int, int, int]],
        *,
        out: bool,
        priority: aio.Priority = aio.Priority.DEMAND,
    ) -> aio.Ticket:
        """Submit COPYs together: (to, from, bytes) each."""
        jobs = np.zeros(len(pieces), dtype=records.JOB)
        jobs["kind"], jobs["chunk"], jobs["base"] = records.JobKind.COPY, -1, -1
        jobs["mask"] = aio.MASK_DEVICE | (aio.MASK_COPY_OUT if out else 0)
        jobs["ptr"][:, :3] = np.array(pieces, dtype=np.uint64)
        return self.executor.submit(jobs, priority=priority)

    def define(self, address: int, count: int) -> np.ndarray:
        """Define chunks with contiguous parameters in memory."""
        chunks = np.zeros(count, dtype=records.CHUNK)
        chunks["key"], chunks["numel"] = np.arange(len(chunks)) + 1, CHUNK // 2
        chunks["section_at"], chunks["file_offset"], chunks["drive"] = -1, -1, -1
        chunks["section_ptr"][:, 0] = address + CHUNK * np.arange(count)
        chunks["format"], chunks["section_count"] = records.Format.RAW, 1
        chunks["itemsize"][:, 0], chunks["piece_numel"] = 2, records.PIECE_NUMEL
        return self.executor.define(chunks)

    def fetch(
        self,
        ids: np.ndarray,
        target: int,
        *,
        on_device: bool = True,
        order: Sequence[int] | None = None,
    ) -> aio.Ticket:
        """Fetch these chunks to contiguous addresses in one submission."""
        jobs = np.zeros(len(ids), dtype=records.JOB)
        jobs["chunk"], jobs["kind"], jobs["base"] = ids, records.JobKind.FETCH, -1
        jobs["mask"] = 1 | (aio.MASK_DEVICE if on_device else 0)
        jobs["ptr"][:, 0] = target + CHUNK * np.arange(len(ids))
        jobs = jobs if order is None else jobs[list(order)]
        return self.executor.submit(jobs, priority=aio.Priority.DEMAND)

    def handed_on(self) -> None:
        """Wait until the copying thread has all submitted work: one worker takes it in order."""
        memory, target = np.zeros(CHUNK, np.uint8), np.zeros(CHUNK, np.uint8)
        ids = self.define(memory.ctypes.data, 1)
        self.fetch(ids, target.ctypes.data, on_device=False).wait(60)

    def close(self) -> None:
        self.device.let_go()
        self.device.hold_kernels(False)
        self.executor.close()
        self.device.synchronise()
        self.driver.close()
        assert self.device.live() == (0, 0, 0)


@pytest.fixture
def make() -> Iterator[Callable[..., Copier]]:
    made: list[Copier] = []

    def make(*, delay_us: int = 0, workers: int = 1) -> Copier:
        made.append(Copier(Simulated(delay_us=delay_us), workers=workers))
        return made[-1]

    yield make
    for copier in made:
        copier.close()


def share_of_the_bus(device: Simulated, size_bytes: int) -> float:
    return size_bytes / device.seen_s() / BUS


def apart(number: int, size: int, *, out: bool) -> tuple[int, int, int]:
    """Return a copy without neighbours."""
    host, there = HOST + number * 2 * size, THERE + number * 2 * size
    return (there, host, size) if out else (host, there, size)


def pin_all(copier: Copier) -> None:
    """Pin all addresses of `HOST`; `close` unpins them."""
    copier.driver.pin(HOST, THERE - HOST)


# ---- the model, and that it can fail ----


def as_before(device: Simulated, *, depth: int, copies: int, size: int) -> float:
    """Return the bus utilisation of unmerged copies: a wait, an event, and a sleep for each."""
    driver = ctypes.CDLL(library())
    stream, mark = ctypes.c_void_p(), ctypes.c_void_p()
    device.current(1)
    driver.cuStreamCreate(ctypes.byref(stream), 1)
    driver.cuEventCreate(ctypes.byref(mark), 0)
    events = [ctypes.c_void_p() for _ in range(depth)]
    for event in events:
        driver.cuEventCreate(ctypes.byref(event), 0)
    device.timing()
    driver.cuEventRecord(mark, ctypes.c_void_p())
    flights: deque[ctypes.c_void_p] = deque()
    for number in range(copies):
        if len(flights) == depth:
            driver.cuEventSynchronize(flights.popleft())
        driver.cuStreamWaitEvent(stream, mark, 0)
        driver.cuMemcpyHtoDAsync_v2(
            ctypes.c_uint64(THERE + number * size),
            ctypes.c_uint64(HOST + number * size),
            ctypes.c_size_t(size),
            stream,
        )
        driver.cuEventRecord(events[number % depth], stream)
        flights.append(events[number % depth])
    while flights:
        driver.cuEventSynchronize(flights.popleft())
    share = share_of_the_bus(device, copies * size)
    for event in (*events, mark):
        driver.cuEventDestroy_v2(event)
    driver.cuStreamDestroy_v2(stream)
    device.current(0)
    return share


def test_eight_copies_of_a_chunk_with_an_event_each_do_not_reach_it() -> None:
    """The model can fail: unmerged copies stay below the target."""
    share = as_before(Simulated(delay_us=0), depth=8, copies=256, size=CHUNK)
    assert 0.5 < share < 0.8


def test_the_bus_is_reached_where_calls_are_few() -> None:
    assert as_before(Simulated(delay_us=0), depth=8, copies=64, size=8 * MIB) > 0.97


# ---- bytes per second, calls, bytes under way ----


@pytest.mark.parametrize("size", [CHUNK, MIB, 3 * MIB, 16 * MIB, 100 * MIB])
@pytest.mark.parametrize("out", [True, False])
def test_copies_of_their_own_reach_the_bus(make, size: int, out: bool) -> None:
    """Single copies, such as gradients: each has a mark and no neighbours."""
    copier = make()
    pin_all(copier)
    count = max(8, 512 * MIB // size)
    copier.device.timing()
    copier.hold(out=out)
    for number in range(count):
        copier.copy([apart(number, size, out=out)], out=out)
    copier.device.let_go()
    copier.executor.wait_all(60)
    assert share_of_the_bus(copier.device, count * size) > AIM
    calls = copier.device.calls()
    assert calls.copies == count + 1
    # The thread of the loop records one mark for each; the copying thread one event for 4 MiB.
    events = calls.records - (count + 1)
    assert events <= max(count * size / (4 * MIB), count if size >= 4 * MIB else 0) + 8
    assert calls.waits <= (8 if size < 4 * MIB else count + 1)
    # The bytes that a demand may have to wait for.
    assert copier.device.in_flight_max()[not out] <= max(18 * MIB, 2 * size + 12 * MIB)


@pytest.mark.parametrize("wake_us", [30, 100])
def test_chunks_of_a_unit_become_few_copies(make, wake_us: int) -> None:
    copier = make()
    pin_all(copier)
    units, chunks = 8, 32
    ids = copier.define(HOST, units * chunks).reshape(units, chunks)
    copier.device.timing(wake_us=wake_us)
    copier.hold(out=True)
    fetches = [copier.fetch(ids[unit], THERE + unit * chunks * CHUNK) for unit in range(units)]
    copier.handed_on()
    copier.device.let_go()
    # Not by their tickets: a waiting caller ends a flight at any time.
    copier.executor.wait_all(60)
    assert all(fetched.done and not fetched.failed for fetched in fetches)
    calls, size_bytes = copier.device.calls(), units * chunks * CHUNK
    assert share_of_the_bus(copier.device, size_bytes) > AIM
    assert calls.copies - 1 <= size_bytes / (4 * MIB)
    assert calls.records - 9 <= size_bytes / (4 * MIB)  # 9 marks, of the submissions
    assert calls.waits <= 9
    assert sum(calls) - 9 < 1.3 * size_bytes / MIB


def test_a_single_demand_pays_for_no_other(make) -> None:
    """Calls as before: a wait, the copy, its event, and the sleep. One question more costs nothing:
    the copy is under way while it is asked."""
    copier = make()
    pin_all(copier)
    copier.device.timing()
    copier.copy([apart(0, 8 * MIB, out=True)], out=True).wait(20)
    calls = copier.device.calls()
    assert calls == (1, 2, 1, 1, 1)
    # Wait and copy are handed over, the bytes move, the thread wakes.
    assert copier.device.seen_s() == pytest.approx(10e-6 + 8 * MIB / BUS + 100e-6, rel=1e-3)


# ---- order ----


def filled_memory(copier: Copier, seed: int, size: int) -> np.ndarray:
    memory = np.random.default_rng(seed).integers(0, 256, size).astype(np.uint8)
    copier.pin(memory)
    return memory


@pytest.mark.parametrize("order", [range(12), [1, 0, 3, 2, 5, 4, 7, 6, 8, 9, 10, 11]])
def test_merged_copies_carry_the_same_bytes(make, order: Sequence[int]) -> None:
    """Chunks arrive in the order in which several workers finish them."""
    copier = make(delay_us=300)
    source = filled_memory(copier, 0, 12 * CHUNK)
    ids = copier.define(source.ctypes.data, 12)
    target = np.zeros(source.nbytes, np.uint8)
    copier.hold(out=True)
    fetched = copier.fetch(ids, target.ctypes.data, order=order)
    copier.handed_on()
    copier.device.let_go()
    fetched.wait(20)
    assert target.tobytes() == source.tobytes()
    assert copier.device.calls().copies - 1 == 2
    assert copier.device.races() == []


@pytest.mark.parametrize(
    ("to", "source"),
    [(range(8), range(7, -1, -1)), (range(0, 16, 2), range(8)), (range(8), [3] * 8)],
)
def test_pieces_that_touch_on_one_side_stay_apart(
    make, to: Sequence[int], source: Sequence[int]
) -> None:
    copier = make(delay_us=300)
    pages = filled_memory(copier, 0, 16 * 4096).reshape(16, 4096)
    there = filled_memory(copier, 1, 16 * 4096).reshape(16, 4096)
    wanted = there.copy()
    wanted[list(to)] = pages[list(source)]
    pieces = [
        (there[at].ctypes.data, pages[of].ctypes.data, 4096)
        for at, of in zip(to, source, strict=True)
    ]
    copier.copy(pieces, out=True).wait(20)
    assert there.tobytes() == wanted.tobytes()
    assert copier.device.calls().copies == 8


def test_a_copy_does_not_wait_for_the_kernels_behind_it(make) -> None:
    """Two gradients in the queue, and a kernel between their marks: the first one is there while
    that kernel has not begun."""
    copier = make()
    copier.device.late(1)
    sources = [filled_memory(copier, seed, 4096) for seed in range(2)]
    targets = [filled_memory(copier, seed, 4096) for seed in range(2, 4)]
    wanted = [source.tobytes() for source in sources]
    copier.hold(out=False)
    copier.device.hold_kernels(True)
    tickets = []
    for source, target in zip(sources, targets, strict=True):
        tickets.append(copier.copy([(target.ctypes.data, source.ctypes.data, 4096)], out=False))
        if len(tickets) == 1:
            copier.device.late_write(sources[1].ctypes.data, 4096, what="it makes the second one")
    copier.device.let_go()
    # No thread sleeps on the ticket, which would end the flight behind it.
    until(lambda: tickets[0].filled)
    assert targets[0].tobytes() == wanted[0]
    assert not tickets[1].filled
    copier.device.hold_kernels(False)
    tickets[1].wait_filled(20)
    assert targets[1].tobytes() == wanted[1]
    assert copier.device.races() == []


def test_a_copy_reads_what_a_late_kernel_writes(make) -> None:
    copier = make()
    copier.device.late(20_000)
    source, target = filled_memory(copier, 1, 4096), filled_memory(copier, 2, 4096)
    wanted = source.copy()
    for number in range(4):
        source += np.uint8(1)
        wanted[:] = source
        copier.device.late_write(source.ctypes.data, 4096, what=f"kernel {number} makes it")
        copier.copy([(target.ctypes.data, source.ctypes.data, 4096)], out=False).wait(20)
        assert target.tobytes() == wanted.tobytes()
    assert copier.device.calls().waits == 4
    assert copier.device.races() == []


def test_a_late_kernel_reads_what_was_there_before_the_copy(make) -> None:
    copier = make()
    copier.device.late(20_000)
    source, target, seen = (filled_memory(copier, seed, 4096) for seed in range(3))
    before = target.copy()
    copier.device.late_copy(
        seen.ctypes.data, target.ctypes.data, 4096, what="a kernel that still reads the target"
    )
    copier.copy([(target.ctypes.data, source.ctypes.data, 4096)], out=True).wait(20)
    assert seen.tobytes() == before.tobytes()
    assert target.tobytes() == source.tobytes()
    assert copier.device.races() == []


def test_a_mark_is_waited_for_once(make) -> None:
    """Marks that the stream has already waited for cost no call."""
    copier = make()
    sources = [filled_memory(copier, seed, 4096) for seed in range(8)]
    target = filled_memory(copier, 9, 8 * 4096)
    pieces = [
        (target.ctypes.data + 4096 * n, source.ctypes.data, 4096)
        for n, source in enumerate(sources)
    ]
    copier.copy(pieces, out=True).wait(20)
    assert copier.device.calls().waits == 1
    # The most urgent is submitted last, and its mark is the last one.
    copier.hold(out=True)
    for number, priority in enumerate(reversed(aio.Priority)):
        copier.copy(pieces[number : number + 1], out=True, priority=priority)
    copier.device.let_go()
    copier.executor.wait_all(20)
    # Waits for the byte that is held, and for the last mark.
    assert copier.device.calls().waits == 3
    assert copier.device.races() == []


def test_what_somebody_waits_for_has_an_event_of_its_own(make) -> None:
    copier = make()
    pin_all(copier)
    copier.device.timing()
    copier.hold(out=True)
    first = copier.copy([apart(0, MIB, out=True)], out=True)
    with pytest.raises(TimeoutError):
        first.wait_filled(0.01)
    for number in range(1, 4):
        copier.copy([apart(number, MIB, out=True)], out=True)
    copier.device.let_go()
    copier.executor.wait_all(20)
    # Five marks; events of the thread's first byte, of the first copy, and of the other three.
    assert copier.device.calls().records == 5 + 3


# ---- faults ----


def three_in_one_flight(copier: Copier) -> tuple[list[aio.Ticket], np.ndarray, np.ndarray]:
    """Two pieces merged to one copy, and two single pieces: three submissions, one event."""
    source, target = filled_memory(copier, 3, 5 * MIB), filled_memory(copier, 4, 5 * MIB)
    at = [(target.ctypes.data + n * MIB, source.ctypes.data + n * MIB, MIB) for n in range(5)]
    copier.hold(out=True)
    tickets = [copier.copy(part, out=True) for part in (at[:2], at[2:3], at[4:])]
    copier.device.synchronise()  # their marks have passed
    return tickets, source, target


def ends(tickets: Sequence[aio.Ticket]) -> list[bool]:
    """Return which of them failed, by the device."""
    found = [outcome(ticket) for ticket in tickets]
    assert all(
        isinstance(error, DeviceCopyError) and "700" in str(error) for error in found if error
    )
    return [error is not None for error in found]


@pytest.mark.parametrize("nth", [0, 1, 2])
def test_a_copy_that_fails_is_that_of_its_own_runs(make, nth: int) -> None:
    copier = make()
    tickets, source, target = three_in_one_flight(copier)
    copier.device.fail(2 + nth)  # the first one is the copy that is held
    copier.device.let_go()
    copier.executor.wait_all(20)
    assert ends(tickets) == [n == nth for n in range(3)]
    for number, parts in enumerate((slice(0, 2), slice(2, 3), slice(4, 5))):
        whole = slice(parts.start * MIB, parts.stop * MIB)
        assert (target[whole].tobytes() == source[whole].tobytes()) is (number != nth)
    assert copier.device.calls().copies == 4
    stats = copier.executor.stats()
    assert stats.to_device_bytes == copier.device.copied()[0] == (2, 3, 3)[nth] * MIB + 1


@pytest.mark.parametrize("what", ["records", "queries", "sleeps"])
def test_an_event_that_fails_is_that_of_all_behind_it(make, what: str) -> None:
    copier = make()
    copier.device.timing()
    tickets, _, _ = three_in_one_flight(copier)
    # Fail the event of this flight. Before it come the event of the held byte (a record, a query)
    # and the last mark (a query).
    copier.device.fail({"records": 2, "queries": 3, "sleeps": 1}[what], what)
    copier.device.let_go()
    copier.executor.wait_all(20)
    assert ends(tickets) == [True] * 3
    # One flight: the copies of all three were submitted. Later copies succeed.
    assert copier.device.calls().copies == 4
    pin_all(copier)
    assert ends([copier.copy([apart(0, MIB, out=True)], out=True)]) == [False]


def test_a_wait_that_fails_costs_its_own_run(make) -> None:
    copier = make()
    source, target = filled_memory(copier, 1, 4096), filled_memory(copier, 2, 4096)
    before = target.copy()
    copier.device.fail(1, "waits")
    piece = (target.ctypes.data, source.ctypes.data, 4096)
    assert ends([copier.copy([piece], out=True)]) == [True]
    assert target.tobytes() == before.tobytes()
    assert copier.device.calls().copies == 0
    # The mark is waited for again, because its first wait failed.
    assert ends([copier.copy([piece], out=True)]) == [False]
    assert copier.device.calls().waits == 2
    assert target.tobytes() == source.tobytes()


def test_the_driver_says_whether_kernels_read_pinned_memory() -> None:
    device = Simulated()
    assert device.driver().host_pointers
    device.host_pointers(False)
    assert not device.driver().host_pointers
