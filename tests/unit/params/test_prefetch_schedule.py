"""Predictions of the schedule after one step."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinity._src.params.prefetch_schedule import NEVER, TRACES_MAX, Phase, Schedule

ORDERS = st.lists(st.integers(0, 7), min_size=1, max_size=20)
DISTINCT = st.integers(2, 20).flatmap(lambda count: st.permutations(range(count)))
STEPS = st.tuples(ORDERS, ORDERS)


def run(schedule: Schedule, phase: Phase, order: list[int]) -> None:
    schedule.start(phase)
    for unit in order:
        schedule.record_unshard(unit)
    schedule.end()


def trained(*orders: list[int]) -> Schedule:
    """After a forward and a backward, and so on."""
    schedule = Schedule()
    for order, phase in zip(orders, itertools.cycle((Phase.TRAIN, Phase.BACKWARD))):
        run(schedule, phase, order)
    return schedule


def ahead(schedule: Schedule, count: int = 2) -> list[int]:
    return list(itertools.islice(schedule.upcoming(), count))


@given(ORDERS, ORDERS)
def test_the_second_step_is_foreseen_demand_by_demand(
    forward: list[int], backward: list[int]
) -> None:
    schedule = trained(forward, backward)
    for phase, order in ((Phase.TRAIN, forward), (Phase.BACKWARD, backward)):
        schedule.start(phase)
        for unit in order:
            assert schedule.distance(unit) == 0
            assert list(itertools.islice(schedule.upcoming(), 1)) == [unit]
            assert schedule.record_unshard(unit)
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
        schedule.record_unshard(used)
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
    schedule.record_unshard(0)
    assert not schedule.record_unshard(7)
    assert ahead(schedule) == [1, 2]
    assert not schedule.record_unshard(3)
    assert ahead(schedule) == [4, 1]  # 1 and 2 were left out, or 3 came early
    assert schedule.record_unshard(4)
    assert ahead(schedule) == [4, 3]
    assert schedule.deviations == 2


def test_an_early_unit_alone_deviates() -> None:
    forward = list(range(9))
    schedule = trained(forward, forward[::-1], forward, forward[::-1])
    schedule.start(Phase.TRAIN)
    assert not schedule.record_unshard(8)
    assert schedule.distance(0) == 0
    for unit in forward[:8]:
        assert schedule.record_unshard(unit)
        assert 8 not in ahead(schedule, 8 - unit - 1)
    assert ahead(schedule) == [8, 7]  # of backward


def test_two_early_units_that_follow_each_other_cost_one_deviation_more() -> None:
    schedule = trained(list(range(9)))
    schedule.start(Phase.TRAIN)
    assert [schedule.record_unshard(unit) for unit in (5, 6, 0, 1, 2, 3, 4, 7, 8)] == [
        False,
        True,
        False,
        *[True] * 6,
    ]


def test_a_layer_left_out_and_an_early_exit_deviate_once() -> None:
    schedule = trained(list(range(9)))
    schedule.start(Phase.TRAIN)
    found = [schedule.record_unshard(unit) for unit in (0, 1, 3, 4, 8)]
    assert found == [True, True, False, True, False]
    schedule.end()
    assert schedule.deviations == 2


@given(DISTINCT, st.data())
def test_one_demand_out_of_place_costs_the_units_concerned(
    trace: list[int], data: st.DataObject
) -> None:
    """A unit that is early, skipped or additional is one deviation; a late unit is two: at its
    usual place and at its new one. The next pass is predicted again."""
    source = data.draw(st.integers(0, len(trace) - 1))
    target = data.draw(st.integers(0, len(trace) - 1))
    what = data.draw(st.sampled_from(["moved", "left out", "besides"]))
    order = [*trace[:source], *trace[source + 1 :]] if what != "besides" else list(trace)
    if what != "left out":
        order.insert(
            target, trace[source] if what == "moved" else data.draw(st.sampled_from([*trace, 99]))
        )
    late = what == "moved" and target > source + 1
    backward = trace[::-1]
    schedule = trained(trace, backward, trace, backward)
    run(schedule, Phase.TRAIN, order)
    # An additional unit takes the place of a later use, which is then additional, too.
    assert schedule.deviations <= (2 if late or what == "besides" else 1)
    seen = schedule.deviations
    for _ in range(2):
        run(schedule, Phase.BACKWARD, backward)
        run(schedule, Phase.TRAIN, trace)
    assert schedule.deviations == seen


@given(st.sampled_from(["tied", "shared", "twice"]), st.integers(2, 20), st.data())
def test_one_demand_out_of_place_costs_little_where_units_come_again(
    kind: str, count: int, data: st.DataObject
) -> None:
    """A tied head, layers applied in several rounds, units demanded again for their recompute."""
    units = list(range(count))
    trace = {
        "tied": [*units, 0],
        "shared": units * 3,
        "twice": [unit for unit in units for _ in range(2)],
    }[kind]
    source = data.draw(st.integers(0, len(trace) - 1))
    order = [*trace[:source], *trace[source + 1 :]]
    order.insert(data.draw(st.integers(0, len(order))), trace[source])
    schedule = trained(trace, trace, trace, trace)
    run(schedule, Phase.TRAIN, order)
    assert schedule.deviations <= 4


@given(ORDERS, ORDERS)
def test_foreseen_is_what_upcoming_names_first(trace: list[int], order: list[int]) -> None:
    schedule = trained(trace)
    schedule.start(Phase.TRAIN)
    for unit in order:
        upcoming = list(schedule.upcoming())
        assert len(upcoming) == len(set(upcoming))
        assert all(
            (schedule.distance(each) is NEVER) == (each not in upcoming) for each in range(8)
        )
        named = unit in upcoming[:2] and schedule.distance(unit) == 0
        assert schedule.record_unshard(unit) == named
    schedule.end()


@given(DISTINCT, st.data())
def test_a_use_that_has_come_is_not_announced_again(trace: list[int], data: st.DataObject) -> None:
    order = data.draw(st.permutations(trace))
    schedule = trained(trace)
    schedule.start(Phase.TRAIN)
    for count, unit in enumerate(order, 1):
        schedule.record_unshard(unit)
        assert not set(schedule.upcoming()) & set(order[:count])


@given(
    st.lists(
        STEPS,
        min_size=2,
        max_size=TRACES_MAX // 2,
        unique_by=(lambda step: tuple(step[0]), lambda step: tuple(step[1])),
    )
)
def test_kinds_of_steps_that_take_turns_are_foreseen(
    steps: list[tuple[list[int], list[int]]],
) -> None:
    """After a few rounds, across the ends of phases."""
    schedule = trained(
        *itertools.chain(*steps),
        *itertools.chain(*steps),
        *itertools.chain(*steps),
        *itertools.chain(*steps),
    )
    seen = schedule.deviations
    for number, (forward, backward) in enumerate(steps):
        assert schedule.order(Phase.TRAIN) == forward
        run(schedule, Phase.TRAIN, forward)
        assert schedule.order(Phase.BACKWARD) == backward
        run(schedule, Phase.BACKWARD, backward)
        following = steps[(number + 1) % len(steps)][0]
        assert ahead(schedule, 99) == list(dict.fromkeys(following))
    assert schedule.deviations == seen


@given(st.lists(STEPS, min_size=2, max_size=2, unique_by=lambda step: tuple(step[0])))
def test_two_forwards_before_their_backwards_are_foreseen(
    steps: list[tuple[list[int], list[int]]],
) -> None:
    schedule = Schedule()
    for _ in range(4):
        seen = schedule.deviations
        for forward, _ in steps:
            run(schedule, Phase.TRAIN, forward)
        for _, backward in reversed(steps):
            run(schedule, Phase.BACKWARD, backward)
    assert schedule.deviations == seen


@given(st.lists(STEPS, max_size=12), STEPS)
def test_whatever_came_a_step_that_repeats_is_foreseen(
    before: list[tuple[list[int], list[int]]], step: tuple[list[int], list[int]]
) -> None:
    schedule = trained(*itertools.chain(*before), *step, *step, *step)
    seen = schedule.deviations
    run(schedule, Phase.TRAIN, step[0])
    run(schedule, Phase.BACKWARD, step[1])
    assert schedule.deviations == seen


def test_layers_dropped_at_random_deviate_alone() -> None:
    """Also if no pass had all units. Without a trace of all units a pass would deviate twice: at
    its own skipped unit, and at that of the pass before."""
    dropped = random.Random(0)
    schedule = Schedule()
    for _ in range(100):
        layer = dropped.randrange(10)
        order = [unit for unit in range(10) if unit != layer]
        run(schedule, Phase.TRAIN, order)
        run(schedule, Phase.BACKWARD, order[::-1])
    assert schedule.deviations <= 2 * 100


def test_a_unit_left_out_twice_is_expected_no_more() -> None:
    trace = list(range(10))
    schedule = trained(trace, trace[::-1], trace, trace[::-1])
    for others in ([0, 1, 2, 3, 4, 6, 7, 9], [0, 1, 2, 3, 4, 6, 8, 9]):
        assert schedule.order(Phase.TRAIN) == trace
        run(schedule, Phase.TRAIN, others)
        run(schedule, Phase.BACKWARD, trace[::-1])
    run(schedule, Phase.TRAIN, [0, 1, 2, 3, 4, 6, 7, 8])
    run(schedule, Phase.BACKWARD, trace[::-1])
    assert schedule.order(Phase.TRAIN) == [0, 1, 2, 3, 4, 6, 7, 8, 9]


def test_another_order_is_followed_from_its_first_unit() -> None:
    first, second = [0, 1, 2, 3], [4, 5, 6, 3]
    schedule = trained(*[first, first[::-1]] * 3, second, second[::-1], first, first[::-1])
    schedule.start(Phase.TRAIN)
    assert ahead(schedule) == [0, 1]
    assert not schedule.record_unshard(4)
    assert ahead(schedule, 4) == [5, 6, 3, 4]  # and its own backward
    assert all(schedule.record_unshard(unit) for unit in (5, 6, 3))


def test_traces_that_never_come_again_are_forgotten() -> None:
    schedule = trained([0, 1], [1, 0], [0, 1], [1, 0])
    for number in range(40):
        run(schedule, Phase.TRAIN, [0, number])
        run(schedule, Phase.BACKWARD, [number, 0])
    reached = {}
    waiting = list(itertools.chain(*schedule._traces.values()))
    while waiting:
        trace = waiting.pop()
        if id(trace) not in reached:
            reached[id(trace)] = trace
            waiting.extend(trace.then.values())
    assert len(reached) == 2 * TRACES_MAX


@pytest.mark.parametrize("phase", list(Phase))
def test_a_demand_between_phases_leaves_the_schedule_as_it_is(phase: Phase) -> None:
    schedule = trained([0, 1, 2], [2, 1, 0])
    run(schedule, Phase.EVAL, [0, 1, 2])
    run(schedule, phase, schedule.order(phase))
    before = list(schedule.upcoming())
    assert not schedule.record_unshard(1)
    assert list(schedule.upcoming()) == before


def test_an_evaluation_in_between_does_not_disturb_the_training_order() -> None:
    schedule = trained([0, 1, 2], [2, 1, 0])
    run(schedule, Phase.EVAL, [0, 2])
    schedule.start(Phase.TRAIN)
    assert list(itertools.islice(schedule.upcoming(), 3)) == [0, 1, 2]


def test_an_interrupted_phase_is_no_order_to_follow() -> None:
    schedule = trained([0, 1, 2], [2, 1, 0])
    schedule.start(Phase.TRAIN)
    schedule.record_unshard(2)
    schedule.abandon()
    schedule.start(Phase.TRAIN)
    assert list(itertools.islice(schedule.upcoming(), 3)) == [0, 1, 2]


def test_the_order_of_a_phase_that_has_begun_is_the_one_that_it_follows() -> None:
    schedule = Schedule()
    first, second = [0, 1, 2], [3, 4, 5]
    for _ in range(4):
        for order in (first, second):
            run(schedule, Phase.TRAIN, order)
            run(schedule, Phase.BACKWARD, order[::-1])
    run(schedule, Phase.TRAIN, first)
    schedule.start(Phase.BACKWARD)
    assert schedule.order(Phase.BACKWARD) == first[::-1]


def test_few_units_that_are_used_very_often_are_not_looked_for_to_the_end() -> None:
    schedule = trained([0, 1] * 5000 + [2], [2, *[1, 0] * 5000])
    schedule.start(Phase.TRAIN)
    assert list(schedule.upcoming()) == [0, 1]
    assert schedule.distance(2) == 10_000
