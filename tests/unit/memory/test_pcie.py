"""Copies of a step between the CPU and its GPUs: the table of the module, its windows, counted
copies."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infinity._src.memory.pcie import (
    UPDATES_ON,
    BusyTime,
    Copied,
    Copies,
    LinkSpeed,
    ModelBytes,
    copies,
    dram_s,
    measured_copies,
)
from infinity._src.memory.roofline import UPDATES

EXACT = ModelBytes(params=2, states=12, grads=2)


def moved(update: str, micro_batches: int, **given_: object) -> tuple[float, float]:
    total = copies(EXACT, update, micro_batches, **given_).total  # type: ignore[arg-type]
    return total.h2d, total.d2h


@pytest.mark.parametrize(
    ("update", "update_on", "one", "four"),
    [
        # Four micro-batches gather eight times, and add to the sum of gradients three times.
        ("deferred", "cpu", (4, 2), (16 + 6, 8)),
        ("backward", "cpu", (4, 2), (16 + 6, 8)),
        ("delayed", "cpu", (4, 2), (16 + 6, 8)),
        # 12 B of states go up and come back; the next forward gathers what was written back.
        ("deferred", "device", (4 + 2 + 12, 2 + 12), (16 + 8 + 12, 8 + 12)),
        ("backward", "device", (14, 12), (16 + 6 + 10, 6 + 12)),
        # The passes gather the parameters of the step before, and so the update its own.
        ("delayed", "device", (4 + 2 + 12, 2 + 12), (16 + 8 + 12, 8 + 12)),
    ],
)
def test_bytes_of_an_exact_parameter_are_those_of_the_table(
    update: str, update_on: str, one: tuple[float, float], four: tuple[float, float]
) -> None:
    assert moved(update, 1, update_on=update_on) == one
    assert moved(update, 4, update_on=update_on) == four


def test_speculative_updates_on_the_gpu_keep_the_gradients_for_a_step_that_decides_otherwise() -> (
    None
):
    assert moved("backward", 1, update_on="device", grads_wait=True) == (14, 12 + 2)


def test_parameters_that_stay_go_there_once_as_updated_or_not_at_all() -> None:
    assert moved("deferred", 4, params_stay=True) == (2 + 6, 8)
    assert moved("deferred", 4, params_stay=True, update_on="device") == (8 + 10, 8 + 10)
    assert moved("backward", 1, params_stay=True, update_on="device") == (10, 10)


def test_frozen_parameters_are_gathered_and_nothing_else() -> None:
    assert copies(ModelBytes(frozen=3), "deferred", 2).total == Copied(12, 0)
    assert copies(ModelBytes(frozen=3), "deferred", 2, params_stay=True).total == Copied()


def test_the_window_of_a_deferred_update_has_one_gather_and_the_states() -> None:
    assert copies(EXACT, "deferred", 4).beside_states == Copied(2, 0)
    assert copies(EXACT, "deferred", 4, update_on="device").beside_states == Copied(12 + 2, 12)
    # Three of four backwards, and three of four forwards, belong to the rest.
    assert copies(EXACT, "backward", 4).beside_states == Copied(4 + 2, 2)
    assert copies(EXACT, "delayed", 4).rest == Copied()


def test_activations_leave_in_forward_and_come_back_in_backward() -> None:
    found = copies(ModelBytes(activations=5), "deferred", 3)
    assert found.total == Copied(15, 15)
    assert found.beside_states == Copied(0, 5)


def test_a_link_carries_both_directions_at_once() -> None:
    link = LinkSpeed(10.0, 5.0)
    assert link.busy_s(Copied(20, 5)) == 2.0
    assert link.busy_s(Copied(20, 15)) == 3.0
    assert link.busy_time(Copies(Copied(20, 0), Copied(0, 15))) == BusyTime(2.0, 3.0, 3.0)
    with pytest.raises(ValueError, match="d2h_bytes_per_s=inf"):
        LinkSpeed(1.0, math.inf)
    with pytest.raises(ValueError, match="h2d_bytes_per_s=0"):
        LinkSpeed(0, 1)


def test_the_cpu_s_memory_carries_drives_updates_and_copies() -> None:
    # 26 B with the drives, 4 to and 2 from the device, 24 + 2 by the update.
    assert dram_s(26, 6, 26, 1.0) == 58
    assert dram_s(0, 6, 26, 2.0, added_bytes=2) == 17


def test_an_unknown_place_of_updates_names_the_choices() -> None:
    with pytest.raises(ValueError, match="update_on='gpu' is not known; use 'cpu' or 'device'"):
        copies(EXACT, "deferred", 1, update_on="gpu")


BYTES = st.integers(0, 1 << 40)
HELD = st.builds(
    lambda params, optim, grads, frozen, activations: ModelBytes(
        params, params + optim, grads, frozen, activations
    ),
    BYTES,
    BYTES,
    BYTES,
    BYTES,
    BYTES,
)


@settings(deadline=None)
@given(
    HELD,
    st.sampled_from(UPDATES),
    st.sampled_from(UPDATES_ON),
    st.integers(1, 9),
    st.booleans(),
    st.booleans(),
)
def test_a_step_s_copies_are_its_updates_window_and_the_rest_and_never_negative(
    held: ModelBytes, update: str, update_on: str, micro_batches: int, stay: bool, kept: bool
) -> None:
    found = copies(
        held, update, micro_batches, update_on=update_on, params_stay=stay, grads_wait=kept
    )
    for part in (found.beside_states, found.rest):
        assert min(part.h2d, part.d2h) >= 0
    if update == "backward" and micro_batches == 1:
        assert found.rest == Copied()  # one backward and one forward: everything may overlap


@settings(deadline=None)
@given(HELD, st.sampled_from(UPDATES), st.integers(1, 9))
def test_counted_copies_are_divided_like_planned_ones(
    held: ModelBytes, update: str, micro_batches: int
) -> None:
    planned = copies(held, update, micro_batches)
    spilled = micro_batches * held.activations
    sums = (micro_batches - 1) * held.grads
    counted = measured_copies(
        planned.total, update, micro_batches, activations=Copied(spilled, spilled), sums_h2d=sums
    )
    for mine, other in (
        (counted.beside_states, planned.beside_states),
        (counted.rest, planned.rest),
    ):
        assert (mine.h2d, mine.d2h) == (
            pytest.approx(other.h2d, abs=16),
            pytest.approx(other.d2h, abs=16),
        )


@settings(deadline=None)
@given(
    st.builds(Copied, BYTES, BYTES),
    st.builds(Copied, BYTES, BYTES),
    BYTES,
    st.sampled_from(UPDATES),
    st.integers(1, 9),
)
def test_counts_that_do_not_agree_add_up_all_the_same(
    total: Copied, activations: Copied, sums: int, update: str, micro_batches: int
) -> None:
    found = measured_copies(total, update, micro_batches, activations=activations, sums_h2d=sums)
    assert (found.total.h2d, found.total.d2h) == (
        pytest.approx(total.h2d),
        pytest.approx(total.d2h),
    )
    assert (
        min(found.rest.h2d, found.rest.d2h, found.beside_states.h2d, found.beside_states.d2h) >= 0
    )
