"""Shares from bandwidths, given or measured through the executor that training would use."""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from infinity import aio
from infinity._src.cabi import records
from infinity._src.memory import swap_space as swap_module
from infinity._src.memory.swap_space import SwapSpace, choose_shares, measure_shares
from infinity.errors import AioError
from tests.unit.aio.rig import BACKENDS

MIB = 1 << 20
FAST, SLOW = (120e6, 180e6), (40e6, 60e6)


@pytest.fixture
def space(tmp_path: Path) -> Iterator[SwapSpace]:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    made = SwapSpace([tmp_path / "a", tmp_path / "b"])
    yield made
    made.close()


def throttled(
    first: tuple[float, float], second: tuple[float, float], fault: aio.Fault | None = None
) -> aio.Seam:
    return aio.Seam(
        read_bytes_per_s=(first[0], second[0]), write_bytes_per_s=(first[1], second[1]), fault=fault
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_drive_three_times_as_fast_is_measured_so(space, backend):
    speeds = measure_shares(space.files, backend=backend, seam=throttled(SLOW, FAST))
    # The seam's throttle is measured. A busy host makes both drives slower, never faster.
    assert speeds[1] > speeds[0] > 0
    assert speeds[1] < 250e6
    assert space.size_bytes == 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_with_measured_shares_a_slow_drive_gets_less(space, backend):
    seam = throttled(FAST, SLOW)
    space.shares = choose_shares(space.files, bandwidths={}, backend=backend, seam=seam)
    places = space.reserve([MIB] * 64)
    chunks = np.zeros(64, dtype=records.CHUNK)
    chunks["key"] = np.arange(64) + 1
    chunks["numel"] = chunks["run_bytes"] = chunks["piece_numel"] = MIB
    chunks["format"], chunks["section_count"] = records.Format.RAW, 1
    chunks["itemsize"][:, 0], chunks["section_at"] = 1, -1
    chunks["section_at"][:, 0] = 0
    chunks["drive"] = [place.drive for place in places]
    chunks["file_offset"] = [place.offset for place in places]
    pools = {"small": aio.PoolSpec(0, 0), "large": aio.PoolSpec(24, MIB)}
    executor = aio.open_executor(space.files, backend=backend, seam=seam, **pools)
    try:
        jobs = np.zeros(64, dtype=records.JOB)
        jobs["chunk"], jobs["base"] = executor.define(chunks), -1
        jobs["kind"], jobs["mask"] = records.JobKind.STORE, 1 | aio.MASK_MOVE_ONLY
        executor.submit(jobs, priority=aio.Priority.DEMAND).wait()
        written = [drive.bytes_written for drive in executor.stats().drives]
        # In equal parts the fast drive would wait for the slow one half of the time.
        assert written[0] > written[1] > 0
    finally:
        executor.close(wait=False)


def test_given_bandwidths_are_taken_and_logged(space, tmp_path, caplog):
    (tmp_path / "link").symlink_to(tmp_path / "a")
    bandwidths = {
        str(tmp_path / "link"): (6e9, 3e9),
        str(tmp_path / "b"): (2e9, 2e9),
        "/elsewhere": (1.0, 1.0),
    }
    with caplog.at_level(logging.INFO, "infinity"):
        shares = choose_shares(space.files, bandwidths=bandwidths, backend="none such")
    assert shares == pytest.approx((4 / 6, 2 / 6))
    assert f"given: {tmp_path / 'a'} 66.7%" in caplog.text
    with caplog.at_level(logging.INFO, "infinity"):
        shares = choose_shares(
            space.files, bandwidths={str(tmp_path / "a"): (6e9, 3e9)}, seam=throttled(FAST, SLOW)
        )
    # A busy host changes what is measured; the given drive alone would have everything.
    assert 0.5 < shares[0] < 1.0
    assert "measured (the settings lack some" in caplog.text


def test_one_drive_or_none_needs_no_measurement(space):
    assert choose_shares([], bandwidths={}, backend="none such") == ()
    assert choose_shares(space.files[:1], bandwidths={}, backend="none such") == (1.0,)


def test_through_the_page_cache_nothing_can_be_measured_and_that_is_said(
    space, monkeypatch, caplog
):
    space.files[1].direct_reason = "it refuses"
    with caplog.at_level(logging.INFO, "infinity"):
        assert choose_shares(space.files, bandwidths={}, backend="none such") == (0.5, 0.5)
    assert "equal parts" in caplog.text
    assert "it refuses" in caplog.text


def test_faults_of_the_seam_are_left_for_the_executor_that_trains(space):
    seam = throttled(FAST, SLOW, fault=aio.Fault("write", 0, persistent=True))
    assert len(measure_shares(space.files, backend=BACKENDS[0], seam=seam)) == 2


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_path_that_fails_is_named(space, backend, tmp_path):
    # The second drive becomes one that cannot be written: its descriptor is replaced by one for
    # reading.
    file = space.files[1]
    (tmp_path / "b" / "zeros").write_bytes(bytes(32 * MIB))
    file.grow(32 * MIB)
    fd = os.open(tmp_path / "b" / "zeros", os.O_RDONLY)
    os.dup2(fd, file.fd)
    os.close(fd)
    fcntl.fcntl(file.fd, fcntl.F_SETFD, fcntl.FD_CLOEXEC)
    with pytest.raises(AioError) as caught:
        measure_shares(space.files, backend=backend)
    assert caught.value.path == str(tmp_path / "b")
    assert caught.value.op == "write"


def test_a_drive_that_moves_next_to_nothing_is_named_instead_of_waited_for(
    space, tmp_path, monkeypatch
):
    for name, value in (("_WARM_UP_S", 0.01), ("MEASURE_S", 0.1), ("_ANSWER_S", 0.2)):
        monkeypatch.setattr(swap_module, name, value)
    monkeypatch.setattr(swap_module._Measurement, "_fill", lambda self: None)
    stuck = throttled((2e9, 2e9), (1e6, 1e6))  # half a second for the first request
    with pytest.raises(AioError, match="almost nothing") as caught:
        measure_shares(space.files, backend=BACKENDS[0], seam=stuck)
    assert caught.value.path == str(tmp_path / "b")
    assert space.size_bytes == 0
