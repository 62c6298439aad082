"""Division of ranks into nodes."""

from __future__ import annotations

import logging

import pytest

from infinity._src.distributed.topology import Topology, _local_world

A, B = ("boot a", "", 1), ("boot b", "", 1)
A_OTHER_NETWORK = ("boot a", "", 2)


def test_alone_is_a_world_of_one() -> None:
    assert Topology.find(timeout_s=60.0) == Topology.alone() == Topology(0, 1, 0, 1, 0, 1)
    assert Topology.alone().node_ranks == Topology.alone().counterparts == (0,)


def test_a_mesh_without_a_process_group_says_what_to_call() -> None:
    with pytest.raises(ValueError, match="init_process_group"):
        Topology.find(object(), timeout_s=60.0)  # type: ignore[arg-type]


@pytest.mark.parametrize(("world", "local_world"), [(6, 3), (6, 2), (6, 1), (6, 6), (1, 1)])
def test_every_rank_is_in_one_node_and_has_one_counterpart_in_each(
    world: int, local_world: int
) -> None:
    everyone = [Topology.of(rank, world, local_world) for rank in range(world)]
    for place in everyone:
        assert place.rank == place.node * place.local_world + place.local_rank
        assert place.node_ranks[place.local_rank] == place.counterparts[place.node] == place.rank
        assert [everyone[rank].node for rank in place.node_ranks] == [place.node] * local_world
        assert [everyone[rank].node for rank in place.counterparts] == list(range(place.nodes))
        assert {everyone[rank].local_rank for rank in place.counterparts} == {place.local_rank}


@pytest.mark.parametrize(
    ("hosts", "given", "local_world"),
    [
        ([A, A, B, B], "2", 2),
        ([A, A, B, B], "", 2),
        ([A, A, B, B], "1", 1),
        ([A, A, A, A], "2", 2),  # two nodes of one machine, because torchrun says so
        ([A, A, A, A], "", 4),
        ([A, A, B, B], "4", 2),  # not true: hosts decide
        ([A, A, B, B], "3", 2),
        ([A, A, B, B], "0", 2),
        ([A, A, A_OTHER_NETWORK, A_OTHER_NETWORK], "", 2),
    ],
)
def test_a_node_is_what_torchrun_says_where_it_holds_else_a_host(
    hosts: list[tuple[str, str, int]], given: str, local_world: int
) -> None:
    assert _local_world([(host, given) for host in hosts]) == local_world


@pytest.mark.parametrize(
    "everyone",
    [
        [(A, "2"), (A, "2"), (B, "1")],
        [(A, ""), (B, ""), (A, ""), (B, "")],
        [(A, ""), (B, ""), (A, "")],
        [(A, ""), (A, ""), (B, ""), (B, ""), (A, ""), (A, "")],
    ],
)
def test_unequal_or_scattered_hosts_are_one_flat_node_and_the_log_says_so(
    everyone: list[tuple[tuple[str, str, int], str]], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="infinity"):
        assert _local_world(everyone) == len(everyone)
    assert "one node" in caplog.text
