"""NUMA placement: new slabs and native threads go to the node of this process's device.

infinity/_src/memory/numa.py knows the device and chooses once per process, before pools are made.
Without a choice nothing is called. The kernel prefers the node, and uses others when it is full. A
refusal (a seccomp filter) is logged once and costs speed only.
"""

from __future__ import annotations

import errno
import logging
import os
from dataclasses import dataclass

from infinity._src.cabi import native

log = logging.getLogger("infinity.aio")

CPU_MAX = 1024
"""Bound of the numbers of CPUs in a native thread's mask (INF_CPU_MAX)."""


@dataclass(frozen=True)
class Place:
    """A node and the CPUs that are near it."""

    node: int
    cpus: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.node < 0 or not self.cpus or not all(0 <= cpu < CPU_MAX for cpu in self.cpus):
            raise ValueError(f"{self}: a node is 0 or more and has CPUs, each below {CPU_MAX}")


_chosen: Place | None = None
_logged: set[int] = set()


def choose(place: Place | None) -> None:
    """Place new slabs and native threads; None leaves it to the kernel. Existing ones stay."""
    global _chosen
    _chosen = place


def chosen() -> Place | None:
    """Return the choice in force."""
    return _chosen


def prefer(address: int, size_bytes: int) -> None:
    """Prefer the chosen node for pages of this range (whole pages, none touched yet). Logs once
    what the kernel refuses.
    """
    if _chosen is None:
        return
    try:
        _, lib = native.load()
    except ImportError:
        report(-errno.ENOSYS)
        return
    # mbind by address: it must come before the first touch, which places a page.
    report(int(lib.inf_numa_prefer(address, size_bytes, _chosen.node)))


def report(error: int) -> None:
    """Log an error of binding (a negative errno), once each; 0 is none."""
    # Once: every slab and every executor would repeat it.
    if error in (0, *_logged):
        return
    _logged.add(error)
    why = {
        -errno.ENOSYS: "the C extension is missing, or the kernel knows no NUMA",
        -errno.ENODEV: "this process may not run on any of its CPUs",
    }.get(error, os.strerror(-error))
    log.warning(
        "%s cannot be had for slabs and threads, which stay where the kernel puts them, maybe far "
        "from the device: %s",
        _chosen,
        why,
    )
