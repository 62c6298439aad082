"""Killing trainers for minutes: `make soak`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.crashes import Job, counted, kill_often, trajectory
from tests.test_durable_crash import CASES

pytestmark = pytest.mark.soak
KILLS = 40


@pytest.mark.parametrize("case", CASES)
def test_trainers_killed_many_times_go_on(
    case: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """In updates, commits, saves and restores, at random times and at random calls."""
    job = Job(tmp_path, **CASES[case][0])
    wanted = trajectory(tmp_path_factory.getbasetemp() / "reference", job.world)
    met = counted(kill_often(tmp_path, job, wanted, kills=KILLS, seed=1))
    print(f"\n{case}: {met}")
    assert met["kills"] == KILLS
    assert met["restore"]
    assert met["commit" if not job.saves else "save"]
