"""The formulas of a step: bytes that test_floor.py does not count, and the limits in seconds."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infinity._src.memory.pcie import BusyTime
from infinity._src.memory.roofline import (
    UPDATES,
    AtRest,
    Compute,
    Drives,
    Moved,
    compute_flops,
    days_of_life,
    deferred_s,
    limits,
    measured_traffic,
    move_counts,
    traffic,
)
from tests.turning import turning_bytes_max


@dataclasses.dataclass(frozen=True)
class Section:
    name: str
    itemsize: int
    group_numel: int = 1


HI, LO = Section("hi", 2), Section("lo", 2)
EXACT = AtRest.per_param([HI, LO, Section("moment0", 4), Section("moment1", 4)])


def moved(per_param: AtRest, update: str = "deferred", micro_batches: int = 1) -> Moved:
    return traffic(per_param, update, micro_batches).total


def test_without_accumulation_an_update_in_backward_stores_no_gradient() -> None:
    spilled = dataclasses.replace(EXACT, grads=2)
    assert traffic(spilled, "backward", 1).grads == Moved()
    assert traffic(spilled, "backward", 2).grads == Moved(4, 4)


def test_frozen_parameters_are_read_for_every_pass_and_never_written() -> None:
    frozen = AtRest.per_param([Section("param", 2)], held=False)
    assert frozen == AtRest(frozen=2)
    assert moved(frozen, "deferred", 3) == Moved(12)
    assert moved(EXACT + frozen, "deferred", 1) == Moved(14 + 4, 12)


@pytest.mark.parametrize("update", ["deferred", "backward", "delayed"])
@pytest.mark.parametrize("micro_batches", [1, 2, 8])
def test_a_step_is_its_updates_window_and_the_rest(update: str, micro_batches: int) -> None:
    everything = AtRest(2, 10, 2, 1)
    found = traffic(everything, update, micro_batches, activations=3)
    assert found.rest.read >= 0
    assert found.rest.written >= 0
    assert found.beside_states + found.rest == found.total
    if update == "delayed":
        assert found.rest == Moved()
    elif update == "backward" and micro_batches == 1:
        assert found.rest == Moved()  # one backward and one forward: everything may overlap


def test_turning_points_save_at_most_what_stays_gathered() -> None:
    assert turning_bytes_max(100, "deferred", 1) == 100
    assert turning_bytes_max(100, "deferred", 8) == 1500
    assert turning_bytes_max(100, "backward", 1) == 200


def test_mistakes_name_value_and_choices() -> None:
    with pytest.raises(
        ValueError,
        match=r"update='sometimes' is not known; use 'deferred' or 'backward' or 'delayed'",
    ):
        move_counts("sometimes", 1)
    with pytest.raises(ValueError, match="micro_batches=0"):
        move_counts("deferred", 0)
    with pytest.raises(ValueError, match="read_bytes_per_s=0"):
        Drives(0, 1)
    with pytest.raises(ValueError, match="write_bytes_per_s=inf"):
        Drives(1, math.inf)


# -- seconds ---------------------------------------------------------------------------------------

DRIVES = Drives(10.0, 6.0)


def test_reads_and_writes_add_up_where_they_share_a_drive() -> None:
    assert DRIVES.io_s(Moved(14, 12)) == pytest.approx(3.4)
    assert Drives(10.0, 6.0, shared=False).io_s(Moved(14, 12)) == pytest.approx(2.0)
    assert DRIVES.scaled(2).io_s(Moved(14, 12)) == pytest.approx(1.7)


def test_the_deferred_limit_has_the_states_beside_the_first_forward_only() -> None:
    found = limits(traffic(EXACT, "deferred", 1), Compute(0.5, 1.0), DRIVES)
    assert found.io_s == pytest.approx(3.4)
    assert found.floor_s == pytest.approx(3.4)
    assert found.schedule_s == pytest.approx((1.2 + 2.0) + max(1.0, 0.2))
    assert found.floor_s == found.io_s > max(found.compute_s, found.other_s)
    assert found.eta(6.8) == (pytest.approx(0.5), pytest.approx(4.2 / 6.8))


def test_with_micro_batches_the_rest_of_the_passes_read_parameters() -> None:
    found = limits(traffic(EXACT, "deferred", 2), Compute.of(0.5, 1.0, 2), DRIVES)
    assert found.io_s == pytest.approx(1.8 + 2.0)
    assert found.schedule_s == pytest.approx(3.2 + max(2.5, 0.6))
    assert found.compute_s == pytest.approx(3.0)


def test_where_the_drive_is_fast_the_limits_are_the_computation() -> None:
    for update in ("deferred", "backward", "delayed"):
        found = limits(traffic(EXACT, update, 3), Compute.of(0.5, 1.0, 3), Drives(1e9, 1e9), update)
        assert found.floor_s == found.schedule_s == pytest.approx(4.5)
        assert found.floor_s == found.compute_s > max(found.io_s, found.other_s)


def test_the_backward_mode_reaches_the_floor_with_one_micro_batch_and_not_with_more() -> None:
    one = limits(traffic(EXACT, "backward", 1), Compute(0.5, 1.0), DRIVES, "backward")
    assert one.schedule_s == one.floor_s == pytest.approx(3.4)
    two = limits(traffic(EXACT, "backward", 2), Compute.of(0.5, 1.0, 2), DRIVES, "backward")
    # 14 read and 12 written beside one forward and one backward; 4 read beside the others.
    assert two.schedule_s == pytest.approx(3.4 + max(1.5, 0.4))


def test_a_delayed_update_overlaps_with_everything() -> None:
    found = limits(traffic(EXACT, "delayed", 2), Compute.of(0.5, 1.0, 2), DRIVES, "delayed")
    assert found.schedule_s == found.floor_s == pytest.approx(max(3.0, 1.4 + 2.0))


def test_reading_ahead_betters_the_deferred_limit_until_one_side_is_full() -> None:
    base = {"states_s": 3.0, "rest_io_s": 0.2, "first_forward_s": 0.5, "rest_s": 1.2}
    assert deferred_s(**base) == pytest.approx(4.2)
    assert deferred_s(**base, movable_s=0.4) == pytest.approx(3.8)
    assert deferred_s(**base, movable_s=1.0) == pytest.approx(3.2)  # the rest can hide no more
    assert deferred_s(**base, movable_s=9.0) == pytest.approx(3.2)
    assert deferred_s(
        states_s=0.6, rest_io_s=0.0, first_forward_s=0.5, rest_s=1.0, movable_s=9.0
    ) == pytest.approx(1.5)
    # 11 of the 24 bytes of states that an update moves, at their mix: 11 / 24 of 3.2 s.
    ahead = limits(traffic(EXACT, "deferred", 1), Compute(0.5, 2.0), DRIVES, movable_bytes=11)
    assert ahead.schedule_s == pytest.approx(3.2 * 13 / 24 + 2.0)
    assert limits(
        traffic(EXACT, "deferred", 1), Compute(0.5, 9.0), DRIVES, movable_bytes=1e9
    ).schedule_s == pytest.approx(9.5)


def test_without_drives_a_step_is_its_computation_and_the_other_terms() -> None:
    found = limits(
        traffic(AtRest(), "deferred", 1),
        Compute(0.5, 1.0),
        None,
        others=[BusyTime.sum_of(0.1), BusyTime.sum_of(3.0, 4.0)],
    )
    assert found.floor_s == found.schedule_s == 7.0
    assert found.floor_s == found.other_s > max(found.io_s, found.compute_s)


def test_links_and_memory_take_their_time_in_each_part_of_a_step() -> None:
    compute, moved = Compute(0.5, 1.0), traffic(EXACT, "deferred", 1)
    busy = BusyTime(4.0, 0.1, 4.1)
    assert limits(moved, compute, DRIVES, others=[busy]).schedule_s == pytest.approx(4.0 + 1.0)
    # less than its parts: what fills one direction first, and then the other
    busy = BusyTime(1.0, 5.0, 5.0)
    found = limits(moved, compute, DRIVES, others=[busy])
    assert (found.floor_s, found.other_s) == (5.0, 5.0)
    assert found.schedule_s == pytest.approx(3.2 + 5.0)
    two = limits(
        traffic(EXACT, "backward", 2), Compute.of(0.5, 1.0, 2), DRIVES, "backward", others=[busy]
    )
    assert two.schedule_s == pytest.approx(3.4 + 5.0)
    assert limits(moved, compute, DRIVES, "delayed", others=[busy]).schedule_s == 5.0


def test_operations_count_six_per_parameter_and_token_and_eight_with_recompute() -> None:
    forward, backward = compute_flops(1e9, 1000)
    assert forward + backward == 6e12
    forward, backward = compute_flops(1e9, 1000, recompute=True)
    assert forward + backward == 8e12
    with_attention = compute_flops(0, 10, layers=2, attention_width=64, sequence=10)
    assert with_attention[0] == 10 * 2 * 2 * 64 * 10


def test_a_drive_lasts_its_rating() -> None:
    assert days_of_life(96e9, 10.0, 600) == pytest.approx(600e12 / (96e9 / 10 * 86400))
    assert days_of_life(96e9, 10.0, 600, drives=2) == pytest.approx(
        2 * 600e12 / (96e9 / 10 * 86400)
    )
    assert days_of_life(0, 10.0, 600) == math.inf


BYTES = st.integers(0, 1 << 40)


@settings(deadline=None)
@given(
    on_nvme=st.builds(AtRest, BYTES, BYTES, BYTES, BYTES),
    update=st.sampled_from(UPDATES),
    micro_batches=st.integers(1, 9),
    activations=BYTES,
)
def test_counted_bytes_are_divided_like_planned_ones(
    on_nvme: AtRest, update: str, micro_batches: int, activations: int
) -> None:
    planned = traffic(on_nvme, update, micro_batches, activations=activations)
    counted = measured_traffic(
        planned.total, planned.params_read, update, micro_batches,
        grads=planned.grads, activations=planned.activations, frozen=on_nvme.frozen,
    )  # fmt: skip
    assert counted == planned


def test_what_moves_beside_states_is_what_cannot_move_elsewhere() -> None:
    """Traffic of three micro-batches, with 5 bytes of parameters, 7 of other states, 11 of
    gradients, 13 frozen, 17 of activations."""
    on_nvme, states = AtRest(5, 7, 11, 13), Moved(5 + 7, 5 + 7)
    deferred = traffic(on_nvme, "deferred", 3, activations=17)
    assert deferred.beside_states == states + Moved(11 + 13, 17)
    backward = traffic(on_nvme, "backward", 3, activations=17)
    assert backward.beside_states == Moved(7, 5 + 7) + Moved(2 * (5 + 13) + 17, 17)
    delayed = traffic(on_nvme, "delayed", 3, activations=17)
    assert delayed.beside_states == delayed.total


@settings(deadline=None)
@given(
    st.builds(Moved, BYTES, BYTES),
    BYTES,
    st.builds(Moved, BYTES, BYTES),
    st.builds(Moved, BYTES, BYTES),
    BYTES,
)
def test_counts_that_run_ahead_of_the_drives_add_up_all_the_same(
    moved: Moved, params_read: int, grads: Moved, activations: Moved, frozen: int
) -> None:
    """Counts include transfers that have begun and are not confirmed yet."""
    for update in UPDATES:
        found = measured_traffic(
            moved, params_read, update, 2, grads=grads, activations=activations, frozen=frozen
        )
        assert found.total == moved
        assert (
            min(found.states.read, found.states.written, found.rest.read, found.rest.written) >= 0
        )


def test_spilled_gradients_do_not_lengthen_the_limit_of_a_deferred_update() -> None:
    """A step that takes exactly its limit has η 1, also when what it moved was counted."""
    planned = traffic(dataclasses.replace(EXACT, grads=4), "deferred", 4, activations=3)
    compute, params_read = Compute.of(0.5, 1.0, 4), planned.params_read
    step_s = limits(planned, compute, DRIVES).schedule_s
    counted = measured_traffic(
        planned.total,
        params_read,
        "deferred",
        4,
        grads=planned.grads,
        activations=planned.activations,
    )
    assert limits(counted, compute, DRIVES).eta(step_s)[1] == pytest.approx(1.0)
    assert (
        limits(measured_traffic(planned.total, params_read, "deferred", 4), compute, DRIVES).eta(
            step_s
        )[1]
        > 1.05
    )
