"""Large blocks go back to the system when they are freed, however many were freed before."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from infinity.memory.heap import keep_large_blocks_apart

CODE = """
import ctypes, sys
from infinity.memory.heap import keep_large_blocks_apart
if sys.argv[1] == "apart":
    assert keep_large_blocks_apart()
library = ctypes.CDLL(None)
library.malloc.restype = ctypes.c_void_p
library.malloc.argtypes = [ctypes.c_size_t]
library.free.argtypes = [ctypes.c_void_p]
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096
def block(size):
    address = library.malloc(size)
    ctypes.memset(address, 1, size)
    return address
library.free(block(8 << 20))  # from here on glibc would take 8 MiB blocks from the heap
before = resident()
large, small = [], []
for _ in range(8):
    large.append(block(8 << 20))
    small.append(block(100_000))  # outlives its neighbour and keeps the heap from shrinking
for address in large:
    library.free(address)
print((resident() - before) >> 20)
"""


def left_mib(mode: str) -> int:
    done = subprocess.run(
        [sys.executable, "-c", CODE, mode],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[3],
    )
    return int(done.stdout)


def test_freed_blocks_leave_no_holes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MALLOC_MMAP_THRESHOLD_", raising=False)
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    assert left_mib("apart") <= 2
    assert left_mib("as it is") > 30  # what this is for


def test_what_the_user_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "4194304")
    assert not keep_large_blocks_apart()
