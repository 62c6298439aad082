"""A rank that dies, fails, leaves or does not come ends all others with RankFailed that names it, and nothing hangs."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from infinity.aio.swap_owner import Owner
from infinity.errors import AioError, RankFailed
from tests.dist import watched
from tests.dist.watched import Ranks


def dies(ranks: Ranks, who: int) -> Any:
    ranks.until_failure(3)
    if ranks.rank == who:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()
    return ranks.until_failure()


def second_dies(ranks: Ranks) -> Any:
    return dies(ranks, 1)


def first_dies(ranks: Ranks) -> Any:
    return dies(ranks, 0)


@pytest.mark.parametrize(("job", "who"), [(second_dies, 1), (first_dies, 0)])
def test_survivors_of_a_kill_amid_collectives_end_and_name_the_rank(
    tmp_path: Path, job: Any, who: int
) -> None:
    """Rank 0 has the store: it goes with it."""
    ends = watched.run(job, tmp_path, 3)
    assert ends[who].exit_code == -signal.SIGKILL
    for rank in {0, 1, 2} - {who}:
        assert ends[rank].exit_code == 0, ends[rank]
        assert ends[rank].failure().rank == who, ends[rank]
        assert f"rank {who}" in str(ends[rank].result)
