"""NUMA placement: binds new slabs and native threads to the node of this process's device.

infinity/_src/memory/numa.py chooses the node once per process, before pools are allocated. If no
node was chosen, neither memory nor threads are bound. The kernel prefers the chosen node, and uses
others when it is full. A refused binding (by a seccomp filter) is logged once and only costs speed.
"""

from __future__ import annotations

import errno
import logging
import os
from dataclasses import dataclass

from infinity._src.cabi import native

log = logging.getLogger("infinity.aio")

CPU_MAX = 1024
"""CPU numbers in a native thread's mask are below this (INF_CPU_MAX)."""


@dataclass(frozen=True)
class Place:
    """A NUMA node and its CPUs."""

    node: int
    cpus: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.node < 0 or not self.cpus or not all(0 <= cpu < CPU_MAX for cpu in self.cpus):
            raise ValueError(f"{self}: a node is 0 or more and has CPUs, each below {CPU_MAX}")


_chosen: Place | None = None
_logged: set[int] = set()


def choose(place: Place | None) -> None:
    """Set the node for slabs and native threads created from now on; None: the kernel decides.
    Existing slabs and threads do not move.
    """
    global _chosen
    _chosen = place


def chosen() -> Place | None:
    """Return the node of the last `choose`, or None."""
    return _chosen


def prefer(address: int, size_bytes: int) -> None:
    """Make the kernel prefer the chosen node for this range of untouched whole pages. A refusal is
    logged once.
    """
    if _chosen is None:
        return
    try:
        _, lib = native.load()
    except ImportError:
        report(-errno.ENOSYS)
        return
    # mbind must precede the first touch, which assigns a page to a node.
    report(int(lib.inf_numa_prefer(address, size_bytes, _chosen.node)))


def report(error: int) -> None:
    """Log a binding error (a negative errno), each number once; 0: no error."""
    # Every slab and every executor meets the same error.
    if error in (0, *_logged):
        return
    _logged.add(error)
    why = {
        -errno.ENOSYS: "the C extension is missing, or the kernel knows no NUMA",
        -errno.ENODEV: "this process may not run on any of its CPUs",
    }.get(error, os.strerror(-error))
    log.warning(
        "slabs and threads cannot be bound to %s: the kernel places them, perhaps far from the "
        "device: %s",
        _chosen,
        why,
    )
