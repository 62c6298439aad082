"""NUMA node for the memory and the threads of a rank: the node of the device that computes.

    GPU     the node of its PCI device
    CPU     the ranks of a machine are divided among its nodes; one rank alone is not bound

Nodes are read from /sys; tests pass a different root. On a machine with one node nothing is bound.
`infinity.aio._numa_node` binds memory and threads, by mbind and affinity calls in
native/memory/numa.c.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from infinity.aio._numa_node import CPU_MAX, Place, choose

_ROOT = Path("/")


@dataclasses.dataclass(frozen=True)
class NumaChoice:
    """Choice of a node for a device, and the reason. place: None if nothing is to be bound."""

    place: Place | None
    reason: str


def read_nodes(root: Path = _ROOT) -> tuple[Place, ...]:
    """Read the machine's nodes that have CPUs, in order; none where the kernel lists none.

    CPUs from CPU_MAX on are left out.
    """
    folder = root / "sys" / "devices" / "system" / "node"
    found = []
    # A kernel without NUMA has no such file: then the result is empty.
    for node in parse_list(_text(folder / "online")):
        cpus = tuple(
            cpu for cpu in parse_list(_text(folder / f"node{node}" / "cpulist")) if cpu < CPU_MAX
        )
        if cpus:  # a node without CPUs has only memory
            found.append(Place(node, cpus))
    return tuple(found)


def parse_list(text: str) -> tuple[int, ...]:
    """Parse the kernel's list format: "0-2,8" is (0, 1, 2, 8). Empty for any other text."""
    found: list[int] = []
    for part in text.strip().split(","):
        first, dash, last = part.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            return ()
        found.extend(range(int(first), int(last or first) + 1))
    return tuple(found)


def core_count(cpus: Iterable[int], root: Path = _ROOT) -> int:
    """Count the physical cores of these logical processors."""
    folder = root / "sys" / "devices" / "system" / "cpu"
    # A processor that the kernel does not describe counts as a core.
    siblings = {
        _text(folder / f"cpu{cpu}" / "topology" / "thread_siblings_list").strip() or str(cpu)
        for cpu in cpus
    }
    return len(siblings)


def node_of_pci(address: str, root: Path = _ROOT) -> int | None:
    """Read the node of a PCI device ("0000:65:00.0"); None where the kernel does not know it, as in
    many virtual machines."""
    text = _text(root / "sys" / "bus" / "pci" / "devices" / address.lower() / "numa_node").strip()
    # "-1" is the kernel's word for an unknown node.
    return int(text) if text.isdecimal() else None


def pci_address(device: torch.device) -> str:
    """Format the PCI address of a CUDA device as /sys has it."""
    found: Any = torch.cuda.get_device_properties(device)  # not all of it is in torch's annotations
    return f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"


def choose_node(pci: str | None, *, number: int, ranks: int, root: Path = _ROOT) -> NumaChoice:
    """Choose the node for memory and threads of a rank.

    pci: the address of its device; None where it computes on the CPU. number: the rank's among the
    machine's `ranks` ranks.
    """
    nodes = read_nodes(root)
    if len(nodes) < 2:
        return NumaChoice(None, "one node: nothing is bound")
    if pci is not None:
        node = node_of_pci(pci, root)
        place = next((place for place in nodes if place.node == node), None)
        where = (
            "no node that is known"
            if node is None
            else f"node {node}" + ("" if place else ", which has no CPUs")
        )
        return NumaChoice(place, f"{len(nodes)} nodes, {pci} is on {where}")
    # With fewer ranks than nodes, binding would leave the cores and memory of some nodes idle.
    if ranks < len(nodes):
        return NumaChoice(
            None,
            f"{len(nodes)} nodes, and {ranks} rank{'s' if ranks > 1 else ''} on the CPU: each may "
            "use all",
        )
    # Consecutive ranks share a node, in equal parts.
    place = nodes[number * len(nodes) // ranks]
    return NumaChoice(
        place, f"{len(nodes)} nodes, rank {number} of {ranks} on the CPU has node {place.node}"
    )


def bind(device: torch.device, *, number: int, ranks: int) -> NumaChoice:
    """Bind slabs and native threads that this process makes from now on to the device's node."""
    found = choose_node(
        pci_address(device) if device.type == "cuda" else None, number=number, ranks=ranks
    )
    choose(found.place)
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except OSError:
        return ""
