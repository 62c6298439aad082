"""Memory of freed blocks on the heap is reused, and given back when it is too much, however many
were freed before."""

from __future__ import annotations

import ctypes
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest

from infinity._src.memory import heap as heap_module
from infinity._src.memory.heap import SPARE_BYTES_MAX, SPARE_UNITS, Heap

MIB = 1 << 20


class Blocks:
    """Blocks of the C heap, written to."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(None)
        self._library.malloc.restype = ctypes.c_void_p
        self._library.malloc.argtypes = [ctypes.c_size_t]
        self._library.free.argtypes = [ctypes.c_void_p]

    def take(self, size_bytes: int) -> int:
        address: int = self._library.malloc(size_bytes)
        ctypes.memset(address, 1, size_bytes)
        return address

    def free(self, address: int) -> None:
        self._library.free(address)


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def faults() -> int:
    return int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[7])


def holes(mode: str) -> None:
    """Large blocks among small ones that outlive them, then larger ones, which fit into no hole.
    Prints the MiB in use at most, those by which the process grew at most, and those by which it is
    larger after a step in which all free memory is given back."""
    blocks = Blocks()
    blocks.free(blocks.take(16 * MIB))  # from here on glibc takes 16 MiB from the heap
    heap = Heap(int(mode) * MIB)
    before = resident()
    largest = 0
    for size in (8, 12):
        large = []
        for _ in range(12):
            large.append(blocks.take(size * MIB))
            blocks.take(100_000)
            heap.freed()
            largest = max(largest, resident() - before)
        for address in large:
            blocks.free(address)
            heap.freed()
    heap.step_begins()
    print(12 * size, largest // MIB, (resident() - before) // MIB)


def again(mode: str) -> None:
    """The same blocks in each step, all in use at once and then all free. Prints page faults a
    step."""
    blocks = Blocks()
    blocks.free(blocks.take(8 * MIB))
    heap = Heap(int(mode) * MIB)
    first = 0
    for number in range(12):
        if number == 6:
            first = faults()
        large = [blocks.take(8 * MIB) for _ in range(8)]
        if not number:
            blocks.take(4 * MIB)  # above them: glibc by itself returns only the top of the heap
        for address in large:
            heap.freed()
            blocks.free(address)
        heap.freed()
        heap.step_begins()
    print((faults() - first) // 6)


def reuse(mode: str) -> None:
    """The same few blocks again and again. Prints page faults a round."""
    blocks = Blocks()
    blocks.free(blocks.take(8 * MIB))
    heap = Heap(int(mode) * MIB)
    first = 0
    for number in range(20):
        if number == 10:
            first = faults()
        address = blocks.take(8 * MIB)
        blocks.take(64)
        blocks.free(address)
        heap.freed()
    print((faults() - first) // 10)


def at_the_end(mode: str) -> None:
    """Three blocks at the heap's end, again and again. Prints page faults a round."""
    blocks = Blocks()
    heap = Heap(int(mode) * MIB)
    first = 0
    for number in range(20):
        if number == 10:
            first = faults()
        for address in [blocks.take(24 * MIB) for _ in range(3)][::-1]:
            blocks.free(address)
        heap.freed()
    print((faults() - first) // 10)


def fragments(mode: str) -> None:
    """A heap full of small free blocks. Prints how many looks are cut short by the time that the
    first of them took."""
    blocks = Blocks()
    heap = Heap(int(mode) * MIB)
    small = [blocks.take(1200) for _ in range(400_000)]
    for address in small[::2]:
        blocks.free(address)
    looks = []
    heap._used = lambda library, used=heap._used: looks.append(1) or used(library)  # type: ignore[func-returns-value,method-assign,misc]
    for _ in range(50):
        heap.freed()
    print(len(looks))


@pytest.fixture(autouse=True)
def as_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MALLOC_MMAP_THRESHOLD_", "MALLOC_ARENA_MAX", "GLIBC_TUNABLES"):
        monkeypatch.delenv(name, raising=False)


def said(kind: str, mode: str) -> list[int]:
    from tests import (
        harness,  # here: the process itself has no use for torch, and its heap is its own
    )

    return list(map(int, harness.in_a_process("tests.unit.memory.test_heap", kind, mode).split()))


def test_holes_are_given_back_when_the_process_is_larger_than_it_has_to_be() -> None:
    needed, largest, after = said("holes", "16")
    assert largest < needed + 16 + 12  # the allowance, and a block
    assert after < 8  # the small ones


def test_without_a_watch_holes_stay() -> None:
    _needed, _largest, after = said("holes", "0")
    assert after > 64  # what this is for


def test_free_memory_at_the_end_is_used_again() -> None:
    assert said("at_the_end", "100")[0] < 100  # of the 18432 pages of three blocks


class Rules:
    """A C library that notes how it is tuned."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int]] = []

    def mallopt(self, parameter: int, value: int) -> int:
        self.calls.append((parameter, value))
        return 1


def test_the_rules_of_glibc_come_back_with_the_end_of_the_last_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(heap_module, "_LIMITED", weakref.WeakSet())
    first, second = Heap(MIB), Heap(MIB)
    rules: Any = Rules()
    heap_module._ordinary_again(rules)
    del first
    heap_module._ordinary_again(rules)
    assert not rules.calls
    del second
    heap_module._ordinary_again(rules)
    assert rules.calls == [(-1, heap_module.ORDINARY_TRIM_BYTES)]


def test_what_was_needed_in_the_last_step_is_used_again() -> None:
    assert said("again", "1")[0] < 1000  # of the 16384 pages of a step


def test_what_is_within_the_allowance_is_used_again() -> None:
    assert said("reuse", "16")[0] < 100  # of the 2048 pages of a block


def test_holes_may_take_what_a_step_adds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given back sooner, all that the step is going to use again would go with them."""
    heap = Heap(10 * MIB)
    trims: list[int] = []
    given: dict[str, int] = {"used": 50, "resident": 50}
    monkeypatch.setattr(heap, "_base", 0)
    monkeypatch.setattr(heap, "_used", lambda _: given["used"] * MIB)
    monkeypatch.setattr(heap, "_resident", lambda: given["resident"] * MIB)
    monkeypatch.setattr(heap, "_restart", lambda _: trims.append(given["used"]))
    # The process's own heap may be slow to look at.
    monkeypatch.setattr(heap, "_rest_after", lambda _: None)
    heap._not_before_s = 0.0
    heap._steps = 1  # the first gives all back

    def step(*looks: tuple[int, int]) -> list[int]:
        trims.clear()
        for used, resident in looks:
            given.update(used=used, resident=resident)
            heap.freed()
        heap.step_begins()
        return trims

    assert step((50, 60), (100, 110), (50, 110)) == []
    assert step((50, 120), (80, 120), (100, 120), (60, 105)) == []
    assert step((50, 105), (96, 160), (50, 160)) == []
    assert step((50, 165), (100, 165), (50, 162)) == [50, 100, 50]  # more than the step adds
    # A step that needs less: its process is smaller, one step later.
    step((50, 105))
    assert step((50, 105)) == [50]


def test_a_heap_that_is_slow_to_look_at_is_looked_at_seldom() -> None:
    assert said("fragments", "100000")[0] < 10


@pytest.mark.parametrize(
    ("name", "value"),
    [("MALLOC_MMAP_THRESHOLD_", "4194304"), ("GLIBC_TUNABLES", "glibc.malloc.trim_threshold=1")],
)
def test_what_the_user_set_stays(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    heap = Heap(MIB)
    assert heap.spare_bytes == 0
    heap.freed()
    heap.step_begins()


def test_the_allowance_follows_the_units_up_to_a_limit() -> None:
    assert Heap.for_units([MIB, 3 * MIB], "cpu").spare_bytes == SPARE_UNITS * 3 * MIB
    assert Heap.for_units([1 << 40], "cpu").spare_bytes == SPARE_BYTES_MAX
    assert Heap.for_units([MIB], "cuda").spare_bytes == 0  # not on the heap
    assert Heap.for_units([], "cpu").spare_bytes == 0


if __name__ == "__main__":
    kinds = (holes, again, reuse, at_the_end, fragments)
    {kind.__name__: kind for kind in kinds}[sys.argv[1]](sys.argv[2])
