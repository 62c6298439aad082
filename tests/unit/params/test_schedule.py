"""The schedule: what it says of the future, after it has seen one step."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from infinity.params.schedule import NEVER, Phase, Schedule

ORDERS = st.lists(st.integers(0, 7), min_size=1, max_size=20)


def run(schedule: Schedule, phase: Phase, order: list[int]) -> None:
    schedule.start(phase)
    for unit in order:
        schedule.demand(unit)
    schedule.end()


def trained(forward: list[int], backward: list[int]) -> Schedule:
    schedule = Schedule()
    run(schedule, Phase.TRAIN, forward)
    run(schedule, Phase.BACKWARD, backward)
    return schedule


@given(ORDERS, ORDERS)
def test_the_second_step_is_foreseen_demand_by_demand(forward: list[int], backward: list[int]) -> None:
    schedule = trained(forward, backward)
    for phase, order in ((Phase.TRAIN, forward), (Phase.BACKWARD, backward)):
        schedule.start(phase)
        for unit in order:
            assert schedule.distance(unit) == 0
            assert list(itertools.islice(schedule.upcoming(), 1)) == [unit]
            assert schedule.demand(unit)
        schedule.end()
    assert schedule.deviations == 0


@given(ORDERS, ORDERS, st.integers(0, 7), st.data())
def test_the_distance_is_that_to_the_next_use(
    forward: list[int], backward: list[int], unit: int, data: st.DataObject
) -> None:
    schedule = trained(forward, backward)
    seen = data.draw(st.integers(0, len(forward)))
    schedule.start(Phase.TRAIN)
    for used in forward[:seen]:
        schedule.demand(used)
    future = forward[seen:] + backward
    assert schedule.distance(unit) == (future.index(unit) if unit in future else NEVER)


@given(ORDERS, ORDERS, st.integers(1, 9))
def test_upcoming_units_are_distinct_and_in_order_of_use(
    forward: list[int], backward: list[int], count: int
) -> None:
    schedule = trained(forward, backward)
    schedule.start(Phase.TRAIN)
    upcoming = list(itertools.islice(schedule.upcoming(), count))
    assert upcoming == list(dict.fromkeys(forward + backward))[:count]


def test_a_unit_out_of_order_does_not_lose_the_rest_of_the_schedule() -> None:
    schedule = trained([0, 1, 2, 3, 4], [4, 3, 2, 1, 0])
    schedule.start(Phase.TRAIN)
    schedule.demand(0)
    assert not schedule.demand(7)
    assert list(itertools.islice(schedule.upcoming(), 2)) == [1, 2]
    schedule.demand(3)  # two were skipped
    assert list(itertools.islice(schedule.upcoming(), 2)) == [4, 3]
    assert schedule.deviations == 1


def test_an_evaluation_in_between_does_not_disturb_the_training_order() -> None:
    schedule = trained([0, 1, 2], [2, 1, 0])
    run(schedule, Phase.EVAL, [0, 2])
    schedule.start(Phase.TRAIN)
    assert list(itertools.islice(schedule.upcoming(), 3)) == [0, 1, 2]


def test_an_interrupted_phase_is_no_order_to_follow() -> None:
    schedule = trained([0, 1, 2], [2, 1, 0])
    schedule.start(Phase.TRAIN)
    schedule.demand(2)
    schedule.abandon()
    schedule.start(Phase.TRAIN)
    assert list(itertools.islice(schedule.upcoming(), 3)) == [0, 1, 2]
