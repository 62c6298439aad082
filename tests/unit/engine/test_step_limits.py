"""A step against its limits: what moved by kind, bandwidths of a run, and what is said where they
are not known."""

from __future__ import annotations

import dataclasses
import json

import pytest

from infinity._src.base.sizes import format_size
from infinity._src.base.telemetry import Marks, PhaseClock, Timeline
from infinity._src.engine.step_limits import Bandwidths, StepTerms, bandwidths_of, fit_drives
from infinity._src.memory.pcie import Copied, Copies, ModelBytes, copies
from infinity._src.memory.roofline import AtRest, Drives, traffic
from infinity.aio._stats import Window
from tests.drives import drive_stats, executor_stats

MIB = 1 << 20
BUSY, IDLE = Window(0.0, 300 * MIB, 100 * MIB, 1.0), Window(1.0, 30 * MIB, 10 * MIB, 0.1)


def collected(
    on_nvme: AtRest, micro_batches: int, *windows: Window, activations: int = 0, steps: int = 4
) -> StepTerms:
    """The terms of steps that move what the formulas say, after a first one that moved a thousand
    times as much."""
    moved = traffic(on_nvme, "deferred", micro_batches, activations=activations)
    now = Marks()
    clock = PhaseClock(
        Timeline(), lambda: now, lambda: (now.activations_read, now.activations_written)
    )
    for step in range(steps):
        for _ in range(micro_batches):
            for phase in ("forward", "idle", "backward", "idle"):
                clock.enter(phase)
        clock.enter("step")
        for _ in range(1 if step else 1000):
            now = Marks(
                bytes_read=now.bytes_read + int(moved.total.read),
                bytes_written=now.bytes_written + int(moved.total.written),
                params_read=now.params_read + int(moved.params_read),
                grads_read=now.grads_read + int(moved.grads.read),
                grads_written=now.grads_written + int(moved.grads.written),
                activations_read=now.activations_read + int(moved.activations.read),
                activations_written=now.activations_written + int(moved.activations.written),
            )
        clock.enter("idle")
    found = StepTerms.collect(
        clock,
        executor_stats(drive_stats(windows)),
        update="deferred",
        bandwidths={},
        frozen_bytes=on_nvme.frozen,
    )
    assert found is not None
    assert found.steps == steps - 1
    assert found.moved == moved
    return found


def test_what_moved_is_told_by_kind_and_only_what_moved() -> None:
    text = str(collected(AtRest(MIB, 5 * MIB, MIB, 0), 2, BUSY, activations=3 * MIB))
    assert (
        "(mean of 3, 2 micro-batches, update deferred); read 3 MiB of parameters, 6 MiB of states, "
        "2 MiB of spilled gradients and 6 MiB of activations; written 6 MiB of states, 2 MiB of "
        "spilled gradients and 6 MiB of activations"
    ) in text
    text = str(collected(AtRest(MIB, 5 * MIB), 1, BUSY))
    assert (
        "(mean of 3, 1 micro-batch, update deferred); read 1 MiB of parameters and 6 MiB of "
        "states; written 6 MiB of s" in text
    )
    text = str(collected(AtRest(), 1))
    assert "read nothing; written nothing" in text


def test_where_the_drives_are_not_known_the_limit_is_of_compute_alone_and_there_is_no_eta() -> None:
    unknown = collected(AtRest(MIB, 5 * MIB), 1, IDLE)
    assert unknown.bandwidths is None
    assert not unknown.drives_known
    assert (unknown.eta_floor, unknown.eta_schedule) == (None, None)
    text = str(unknown)
    assert "drives not known: no second at least half busy" in text
    assert "limit of compute alone" in text
    assert "drives 0.000" not in text
    assert "η 0" not in text
    assert "η 1" not in text
    record = json.loads(json.dumps(unknown.as_dict()))
    assert not record["drives_known"]
    assert {
        record[name]
        for name in ("eta_floor", "eta_schedule", "eta_floor_loop", "eta_schedule_loop")
    } == {None}


def test_where_nothing_moves_no_drive_needs_to_be_known() -> None:
    resident = collected(AtRest(), 1)
    assert resident.bandwidths is None
    assert resident.drives_known
    assert resident.eta_floor is not None
    assert resident.eta_schedule is not None
    text = str(resident)
    assert "drives 0.000" in text
    assert "not known" not in text
    known = collected(AtRest(MIB, 5 * MIB), 1, BUSY)
    assert known.drives_known
    assert known.eta_schedule is not None
    assert "GB/s" in str(known)


def with_gpu(update: str, held: ModelBytes, micro_batches: int) -> tuple[StepTerms, Copies]:
    """Steps that copy what the formulas say, up at 50 and down at 25 MiB per second, and read and
    write nothing."""
    planned = copies(held, update, micro_batches)
    # torch brings them up, and the executor counts them not
    sums = (micro_batches - 1) * held.grads
    if update == "delayed":
        planned = Copies(planned.total + Copied(-sums))
    else:
        early = held.grads if update == "backward" and sums else 0
        planned = Copies(
            planned.beside_states + Copied(-early), planned.rest + Copied(early - sums)
        )
    now = executor_stats()
    out = round(micro_batches * held.activations)
    shelved = [0]
    clock = PhaseClock(Timeline(), lambda: Marks.of(now, 0, 0.0), lambda: (shelved[0], shelved[0]))
    for _step in range(3):
        for _ in range(micro_batches):
            for phase in ("forward", "idle", "backward", "idle"):
                clock.enter(phase)
        clock.enter("step")
        up, down = round(planned.total.h2d), round(planned.total.d2h)
        shelved[0] += out
        now = dataclasses.replace(
            now,
            to_device_bytes=now.to_device_bytes + up,
            from_device_bytes=now.from_device_bytes + down,
            to_device_s=now.to_device_s + up / (50 * MIB),
            from_device_s=now.from_device_s + down / (25 * MIB),
        )
        clock.enter("idle")
    found = StepTerms.collect(clock, now, update=update, bandwidths={})
    assert found is not None
    return found, planned


@pytest.mark.parametrize("update", ["deferred", "backward", "delayed"])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_copies_to_a_gpu_are_a_term_of_the_limits(update: str, micro_batches: int) -> None:
    found, planned = with_gpu(
        update, ModelBytes(params=600 * MIB, grads=600 * MIB, frozen=60 * MIB), micro_batches
    )
    assert found.link is not None
    assert (found.link.h2d_bytes_per_s, found.link.d2h_bytes_per_s) == (
        pytest.approx(50 * MIB),
        pytest.approx(25 * MIB),
    )
    for mine, other in ((found.copied.total, planned.total), (found.copied.rest, planned.rest)):
        assert (mine.h2d, mine.d2h) == (
            pytest.approx(other.h2d, abs=4),
            pytest.approx(other.d2h, abs=4),
        )
    busy = found.link.busy_time(planned)
    assert found.limits.other_s == found.limits.floor_s == pytest.approx(busy.total_s)
    windows_s = busy.total_s if update == "delayed" else busy.beside_states_s + busy.rest_s
    assert found.limits.schedule_s == pytest.approx(windows_s, rel=1e-3)  # no compute to speak of
    text = str(found)
    assert (
        f"link to the GPU: {format_size(planned.total.h2d)} there at 0.05, "
        f"{format_size(planned.total.d2h)} back at 0.03" in text
    )
    assert f"link {busy.total_s:.3f}), η" in text


def test_activations_that_wait_elsewhere_are_no_gradients() -> None:
    found, planned = with_gpu(
        "deferred", ModelBytes(params=64 * MIB, grads=64 * MIB, activations=5 * MIB), 2
    )
    assert found.copied.beside_states.d2h == pytest.approx(planned.beside_states.d2h) == 5 * MIB
    assert found.copied.beside_states.h2d == pytest.approx(64 * MIB)


def test_without_a_gpu_there_is_no_link() -> None:
    found = collected(AtRest(MIB, 5 * MIB), 1, BUSY)
    assert (found.link, found.copied.total) == (None, Copied())
    assert "link" not in str(found)
    assert json.loads(json.dumps(found.as_dict()))["link"] is None


# -- bandwidths of a run ---------------------------------------------------------------------------


def test_a_drive_without_a_busy_second_leaves_all_of_them_unknown() -> None:
    one, other = drive_stats([BUSY]), drive_stats([IDLE], path="/mnt/nvme1")
    alone = bandwidths_of((one,), {})
    assert alone is not None
    assert alone.drives == Drives(400.0 * MIB, 400.0 * MIB)
    assert bandwidths_of((one, other), {}) is None
    assert bandwidths_of((one, drive_stats(path="/mnt/nvme1")), {}) is None
    both = bandwidths_of((one, drive_stats([IDLE, BUSY], path="/mnt/nvme1")), {})
    assert both is not None
    assert both.drives == Drives(800.0 * MIB, 800.0 * MIB)


def test_bandwidths_that_are_known_stand_for_every_drive_or_for_none() -> None:
    drives = (drive_stats(), drive_stats([IDLE], path="/mnt/nvme1"))
    known = {"/mnt/nvme0": (3.0, 2.0), "/mnt/nvme1": (5.0, 4.0)}
    assert bandwidths_of(drives, known) == Bandwidths(Drives(8.0, 6.0), "as Policy(io=) has them")
    assert bandwidths_of(drives, {"/mnt/nvme0": (3.0, 2.0)}) is None
    assert bandwidths_of((), {}) is None


def test_bandwidths_are_found_again_from_samples_of_different_mixes() -> None:
    samples = [
        (r, w, r / 6.8e9 + w / 5.0e9) for r, w in ((4e9, 0.0), (2e9, 2e9), (1e9, 3e9), (3e9, 1e9))
    ]
    found = fit_drives(samples)
    assert found is not None
    drives, apart = found
    assert apart
    assert drives.read_bytes_per_s == pytest.approx(6.8e9)
    assert drives.write_bytes_per_s == pytest.approx(5.0e9)


def test_bandwidths_of_one_mix_are_one_and_say_so() -> None:
    found = fit_drives([(2e9, 1e9, 1.0), (4e9, 2e9, 2.0)])
    assert found is not None
    assert found == (Drives(3e9, 3e9), False)
    assert fit_drives([(4e9, 0.0, 1.0)]) == (Drives(4e9, 4e9), False)
    assert fit_drives([]) is None
    assert fit_drives([(0.0, 0.0, 1.0)]) is None
