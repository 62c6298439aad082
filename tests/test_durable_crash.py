"""SIGKILL at random moments: a durable run goes on at the last or the last but one step, a save
leaves the checkpoint before."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.crashes import Job, counted, kill_often, trajectory
from tests.marks import mostly_slow

CASES = {
    "deferred": ({"update": "deferred"}, 3),
    "backward": ({"update": "backward"}, 3),
    "two_ranks": ({"world": 2}, 2),
    "three_generations": ({"generations": 3}, 4),
    "four_on_two_ranks": ({"generations": 4, "world": 2}, 2),
    "saves": ({"saves": True}, 2),
    "durable_saves": ({"copies": True}, 2),
    "two_ranks_save": ({"world": 2, "copies": True}, 2),
}


@pytest.mark.parametrize("case", mostly_slow(CASES, "deferred", "three_generations", "saves"))
def test_killed_trainers_go_on(
    case: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    values, kills = CASES[case]
    job, begun = Job(tmp_path, **values), time.monotonic()
    wanted = trajectory(tmp_path_factory.getbasetemp() / "reference", job.world)
    met = counted(kill_often(tmp_path, job, wanted, kills=kills, seed=len(case)))
    assert met["kills"] == kills
    print(f"\n{case}: {met} in {time.monotonic() - begun:.1f} s")
