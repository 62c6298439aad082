"""Threads of updates, where several ranks share a machine."""

from __future__ import annotations

import pytest

from infinity._src.storage import update_threads


@pytest.mark.parametrize(
    ("cpus", "ranks", "threads"), [(2, 1, 1), (64, 1, 16), (64, 8, 2), (16, 8, 1), (128, 2, 16)]
)
def test_ranks_of_a_machine_share_its_processors(cpus: int, ranks: int, threads: int) -> None:
    assert update_threads(cpus, ranks) == threads
