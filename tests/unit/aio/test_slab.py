"""The slab: aligned, zeroed, huge where the kernel can, safe to drop in any order."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from infinity._src.cabi import native
from infinity.aio import Slab, _slab
from infinity.aio import _memory_limits as memory_limits
from infinity.aio._slab import HUGE_PAGE_BYTES


def test_a_slab_is_aligned_zeroed_and_writable():
    with Slab(5 << 20) as slab:
        assert slab.address % HUGE_PAGE_BYTES == 0
        array = slab.array(np.float32)
        assert array.ctypes.data == slab.address
        assert array.nbytes == len(slab.memory) == slab.size_bytes == 5 << 20
        assert not array.any()
        array[:] = 1
        part = slab.array(np.uint8, offset=4096, count=10)
        assert part.ctypes.data == slab.address + 4096
        assert bytes(part[:4]) == np.float32(1).tobytes()


def test_the_kernel_backs_it_with_huge_pages_where_it_can():
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not setting.exists() or "[never]" in setting.read_text():
        pytest.skip("no transparent huge pages here")
    with Slab(16 << 20) as slab:
        assert 0 <= slab.huge_bytes() <= 16 << 20


def test_views_keep_the_memory_alive():
    slab = Slab(1 << 20)
    array = slab.array(np.uint8)
    slab.close()
    array[:] = 7
    assert array.sum() == 7 << 20
    with pytest.raises(ValueError, match="closed"):
        slab.array(np.uint8)
    slab.close()


def test_ranges_outside_are_value_errors():
    with pytest.raises(ValueError, match="> 0"):
        Slab(0)
    with Slab(4096) as slab:
        for offset, count in ((0, 4097), (4096, 1), (-1, 1)):
            with pytest.raises(ValueError, match="outside"):
                slab.array(np.uint8, offset=offset, count=count)


def test_too_much_is_a_memory_error():
    with pytest.raises(MemoryError):
        Slab(1 << 46)


def test_more_than_a_cgroup_leaves_is_refused_before_any_of_it_is_taken(monkeypatch):
    limit = memory_limits.CgroupLimit("/job", 64 << 20, 32 << 20)
    monkeypatch.setattr(memory_limits, "cgroup_limits", lambda: [limit])
    with pytest.raises(MemoryError, match=r"cgroup /job \(64 MiB\) leaves 32 MiB"):
        Slab(33 << 20)
    Slab(32 << 20).close()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_cannot_take_views():
    slab = Slab(1 << 20)
    child = os.fork()
    if child == 0:
        try:
            slab.array(np.uint8)
        except ValueError:
            os._exit(0)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    slab.close()


def test_the_native_slab_is_as_the_python_one():
    ffi, lib = native.load()
    address = ffi.new("uint64_t *")
    assert lib.inf_slab_map(5 << 20, address) == 0
    assert address[0] % HUGE_PAGE_BYTES == 0
    # Linux answers one by PAGEMAP_SCAN, and the other by /proc/self/smaps.
    for size_bytes in (5 << 20, 6 << 20):
        listed = _slab.huge_page_bytes(address[0], size_bytes)
        assert lib.inf_slab_huge_bytes(address[0], size_bytes) == listed
    view = ffi.buffer(ffi.cast("char *", address[0]), 5 << 20)
    assert bytes(view[:8]) == bytes(8)
    lib.inf_slab_unmap(address[0], 5 << 20)
    assert lib.inf_slab_map(0, address) < 0


def test_parts_are_touched_by_several_threads_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_slab, "_PART_BYTES", 4 << 20)
    seen: list[int] = []
    with Slab(17 << 20, progress=seen.append) as slab:
        assert seen == [4 << 20] * 4 + [2 << 20]  # in whole huge pages
        resident = Path("/proc/self/smaps").read_text()
        assert touched(resident, slab.address) >= 17 << 20
        assert not slab.array(np.uint8).any()


def touched(smaps: str, address: int) -> int:
    inside = False
    for line in smaps.splitlines():
        head = line.split(maxsplit=1)[0]
        if "-" in head and not head.endswith(":"):
            low, high = (int(part, 16) for part in head.split("-"))
            inside = low <= address < high
        elif inside and head == "Rss:":
            return int(line.split()[1]) * 1024
    return 0


def test_a_kernel_without_populate_touches_page_by_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_slab, "_MADV_POPULATE_WRITE", 9999)
    with Slab(3 << 20) as slab:
        assert touched(Path("/proc/self/smaps").read_text(), slab.address) >= 3 << 20
