"""Slabs and threads on a node, as the kernel sees them."""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from infinity import aio
from infinity._src.cabi import native
from infinity.aio import _numa_node as numa_node
from infinity.aio._numa_node import Place
from infinity.aio._slab import HUGE_PAGE_BYTES

MPOL_DEFAULT, MPOL_PREFERRED = 0, 1
_MPOL_F_ADDR = 2
_NUMBERS = {
    "x86_64": {"get_mempolicy": 239, "move_pages": 279},
    "aarch64": {"get_mempolicy": 236, "move_pages": 239},
}


def call(name: str, *arguments: object) -> int:
    numbers = _NUMBERS.get(os.uname().machine)
    if numbers is None:
        pytest.skip(
            f"NOT TESTED, the system calls' numbers on {os.uname().machine} are not known here"
        )
    libc = ctypes.CDLL(None, use_errno=True)
    result = int(libc.syscall(ctypes.c_long(numbers[name]), *arguments))
    if result:
        pytest.skip(f"NOT TESTED, {name} is refused here: {os.strerror(ctypes.get_errno())}")
    return result


def policy_of(address: int) -> tuple[int, int]:
    """(mode, bits of nodes) of the memory at an address."""
    mode, nodes = ctypes.c_int(-1), (ctypes.c_ulong * 16)()
    call(
        "get_mempolicy",
        ctypes.byref(mode),
        nodes,
        ctypes.c_ulong(1024),
        ctypes.c_ulong(address),
        ctypes.c_ulong(_MPOL_F_ADDR),
    )
    return mode.value, nodes[0]


def nodes_of(address: int, size_bytes: int) -> set[int]:
    """The nodes on which the pages of a range lie."""
    count = size_bytes // 4096
    pages = (ctypes.c_void_p * count)(*range(address, address + size_bytes, 4096))
    status = (ctypes.c_int * count)()
    call("move_pages", 0, ctypes.c_ulong(count), pages, None, status, 0)
    return set(status)


@pytest.fixture
def node() -> Iterator[Place]:
    """A node of this machine, with one CPU of those that this process may use."""
    native.load()
    nodes = Path("/sys/devices/system/node")
    if not (nodes / "node0").is_dir():
        pytest.skip("NOT TESTED, this kernel tells of no nodes")
    place = Place(0, (max(os.sched_getaffinity(0)),))
    numa_node.choose(place)
    numa_node._logged.clear()
    yield place
    numa_node.choose(None)
    numa_node._logged.clear()


def threads() -> set[int]:
    return {int(entry.name) for entry in Path("/proc/self/task").iterdir()}


def test_a_slab_prefers_the_node_and_lies_there(node, caplog):
    with caplog.at_level(logging.WARNING, "infinity.aio"), aio.Slab(4 * HUGE_PAGE_BYTES) as slab:
        if caplog.text:
            pytest.skip(f"NOT TESTED, the kernel refuses: {caplog.text}")
        assert policy_of(slab.address) == (MPOL_PREFERRED, 1)
        assert nodes_of(slab.address, slab.size_bytes) == {0}
    numa_node.choose(None)
    with aio.Slab(4 * HUGE_PAGE_BYTES) as slab:
        assert policy_of(slab.address)[0] == MPOL_DEFAULT


@pytest.mark.parametrize("backend", ["io_uring", "threads"])
def test_an_executors_pools_and_threads_are_on_the_node_and_the_caller_stays(
    node, tmp_path, backend
):
    allowed = os.sched_getaffinity(0)
    pools = {"small": aio.PoolSpec(0, 0), "large": aio.PoolSpec(4, HUGE_PAGE_BYTES)}
    with aio.SwapFile.create(tmp_path) as file:
        for chosen in (node, None):
            numa_node.choose(chosen)
            before = threads()
            try:
                executor = aio.open_executor([file], **pools, backend=backend, workers=2)
            except OSError as error:
                pytest.skip(f"NOT TESTED: {error}")
            try:
                made = threads() - before
                assert len(made) >= 3  # of the drive, and two workers
                wanted = set(node.cpus) if chosen else allowed
                assert all(os.sched_getaffinity(thread) == wanted for thread in made)
                assert os.sched_getaffinity(0) == allowed
                address = int(executor._core.lib.inf_executor_slab(executor._core.pointer))
                assert policy_of(address)[0] == (MPOL_PREFERRED if chosen else MPOL_DEFAULT)
            finally:
                executor.close(wait=False)


def test_a_node_that_cannot_be_had_is_said_once_and_all_works(node, tmp_path, caplog):
    numa_node.choose(Place(900, (numa_node.CPU_MAX - 1,)))
    pools = {"small": aio.PoolSpec(0, 0), "large": aio.PoolSpec(4, HUGE_PAGE_BYTES)}
    with caplog.at_level(logging.WARNING, "infinity.aio"), aio.SwapFile.create(tmp_path) as file:
        for _ in range(2):
            with aio.Slab(HUGE_PAGE_BYTES) as slab:
                slab.array(np.uint8)[:] = 7
            executor = aio.open_executor([file], **pools, backend="threads")
            executor.close(wait=False)
    told = [record.getMessage() for record in caplog.records]
    assert told
    assert len(told) == len(set(told))
    assert all("Place(node=900" in text for text in told)


def test_a_place_is_checked():
    for node, cpus in ((-1, (0,)), (0, ()), (0, (numa_node.CPU_MAX,))):
        with pytest.raises(ValueError, match="a node is 0 or more"):
            Place(node, cpus)
