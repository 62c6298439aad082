"""NUMA nodes from what the kernel writes under /sys, and what is bound to them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from infinity._src.memory import numa
from infinity.aio import _numa_node as numa_node
from infinity.aio._numa_node import Place


def machine(
    root: Path,
    nodes: dict[int, str],
    *,
    online: str | None = None,
    pci: dict[str, str] | None = None,
) -> Path:
    """A tree as the kernel writes it: CPUs by node, and the node of each PCI device."""
    folder = root / "sys" / "devices" / "system" / "node"
    folder.mkdir(parents=True)
    (folder / "online").write_text((online or ",".join(map(str, nodes))) + "\n")
    for node, cpus in nodes.items():
        (folder / f"node{node}").mkdir()
        (folder / f"node{node}" / "cpulist").write_text(cpus + "\n")
    for address, node in (pci or {}).items():
        device = root / "sys" / "bus" / "pci" / "devices" / address
        device.mkdir(parents=True)
        (device / "numa_node").write_text(node + "\n")
    return root


def test_lists_of_the_kernel_are_read():
    assert numa.parse_list("0-2,8\n") == (0, 1, 2, 8)
    assert numa.parse_list("5") == (5,)
    assert (
        numa.parse_list("")
        == numa.parse_list("none")
        == numa.parse_list("1-") + numa.parse_list("-1")
        == ()
    )


def test_nodes_that_are_memory_alone_or_offline_are_left_out(tmp_path):
    root = machine(tmp_path, {0: "0-3", 1: "4-7", 2: "", 3: "8-9"}, online="0-2")
    assert numa.read_nodes(root) == (Place(0, (0, 1, 2, 3)), Place(1, (4, 5, 6, 7)))
    assert numa.read_nodes(tmp_path / "nothing") == ()


def test_a_gpu_belongs_to_the_node_of_its_pci_device(tmp_path):
    pci = {"0000:65:00.0": "1", "0000:17:00.0": "-1", "0000:99:00.0": "2", "0001:0a:00.0": "0"}
    root = machine(tmp_path, {0: "0-3,8-11", 1: "4-7", 2: ""}, pci=pci)
    place = numa.choose_node("0000:65:00.0", number=0, ranks=1, root=root)
    assert place.place == Place(1, (4, 5, 6, 7))
    assert place.reason == "2 nodes, 0000:65:00.0 is on node 1"
    assert numa.choose_node("0001:0A:00.0", number=0, ranks=1, root=root).place == Place(
        0, (0, 1, 2, 3, 8, 9, 10, 11)
    )
    unknown = numa.choose_node("0000:17:00.0", number=0, ranks=1, root=root)
    assert (unknown.place, unknown.reason) == (
        None,
        "2 nodes, 0000:17:00.0 is on no node that is known",
    )
    assert numa.choose_node("0000:42:00.0", number=0, ranks=1, root=root).place is None
    far = numa.choose_node("0000:99:00.0", number=0, ranks=1, root=root)
    assert (far.place, far.reason) == (
        None,
        "2 nodes, 0000:99:00.0 is on node 2, which has no CPUs",
    )


def test_ranks_on_the_cpu_are_spread_over_the_nodes(tmp_path):
    root = machine(tmp_path, {0: "0-3", 1: "4-7"})
    found = [numa.choose_node(None, number=number, ranks=4, root=root) for number in range(4)]
    assert [place.place.node for place in found if place.place] == [0, 0, 1, 1]
    alone = numa.choose_node(None, number=0, ranks=1, root=root)
    assert alone.place is None
    assert "each may use all" in alone.reason


def test_with_one_node_nothing_is_bound(tmp_path):
    root = machine(tmp_path, {0: "0-7"}, pci={"0000:65:00.0": "0"})
    for pci in (None, "0000:65:00.0"):
        assert numa.choose_node(pci, number=0, ranks=4, root=root) == numa.NumaChoice(
            None, "one node: nothing is bound"
        )


def test_this_machine_is_read_and_bound_as_it_is():
    nodes = numa.read_nodes()
    if not nodes:
        pytest.skip("NOT TESTED, this kernel tells of no nodes")
    try:
        found = numa.bind(torch.device("cpu"), number=0, ranks=1)
        assert found.place is None
        assert numa_node.chosen() is None
    finally:
        numa_node.choose(None)
