"""Part of a machine's memory that a rank may count on."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

import infinity as inf
from infinity._src.memory.ledger import RAM_SHARE, budget_bytes, fair_share, memory_seen
from tests import models

GIB = 1 << 30


def test_ranks_under_one_limit_divide_the_least_that_any_of_them_saw():
    everyone = [{"m": 64 * GIB}, {"m": 60 * GIB}]
    assert [fair_share(mine, everyone) for mine in everyone] == [30 * GIB, 30 * GIB]


def test_a_cgroup_of_ones_own_binds_alone():
    a, b = {"m": 64 * GIB, "job a": 8 * GIB}, {"m": 64 * GIB, "job b": 50 * GIB}
    assert fair_share(a, [a, b]) == 8 * GIB
    assert fair_share(b, [a, b]) == 32 * GIB  # its own limit is wider than its half of the machine


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 2**40), st.integers(0, 2**40)),
        min_size=1,
        max_size=8,
    )
)
def test_ranks_together_never_have_more_than_any_limit_leaves(rows):
    everyone = [{"machine": machine, f"cgroup {number}": left} for number, machine, left in rows]
    parts = [fair_share(mine, everyone) for mine in everyone]
    for limit in {name for row in everyone for name in row}:
        under = [index for index, row in enumerate(everyone) if limit in row]
        assert sum(parts[index] for index in under) <= min(
            everyone[index][limit] for index in under
        )


def test_ranks_that_torchrun_started_count_where_they_do_not_meet(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert fair_share({"m": 64 * GIB}, [{"m": 64 * GIB}]) == 16 * GIB
    seen = sum(memory_seen().values())  # which other processes change meanwhile
    model = inf.offload(models.make(models.llama), inf.Policy())
    assert 0 < inf.handle(model).parts.split.resources.default_bytes < RAM_SHARE * seen / 2
    inf.handle(model).close()


def test_a_size_is_the_process_and_no_size_is_the_part_that_was_agreed():
    assert budget_bytes(None, 1, 5 * GIB) == 5 * GIB
    assert budget_bytes(7 * GIB, 1, 5 * GIB) == 7 * GIB
    assert budget_bytes("min", 1, 5 * GIB) is None
