"""Short slices of the long runs beside this file: `make kill-campaign`, `make fault-soak`,
`make growth` and `make pressure`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.r1 import Workload
from tests.endurance import fault_soak, growth, kills, pressure
from tests.endurance.record import record_in
from tests.harness import one_thread

TINY = Workload(hidden=64, layers=2, vocab=256, tokens=32)


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.privileged
def test_killed_runs_resume_on_every_file_system(tmp_path: Path) -> None:
    with record_in(tmp_path / "record") as record:
        counts = kills.campaign(tmp_path, 24, record, systems=["here", "xfs-memory"])
    found = lines(tmp_path / "record")
    missing = [line for line in found if line["kind"] == "not here"]
    assert sum(line["kind"] == "kill" for line in found) == (12 if missing else 24)
    assert any("commit" in cell for cell in counts.table())


@pytest.mark.parametrize("update", ["deferred", pytest.param("backward", marks=pytest.mark.slow)])
def test_a_fault_of_each_kind_in_every_step_changes_no_loss(tmp_path: Path, update: str) -> None:
    kinds = len(fault_soak.KINDS)
    soak = fault_soak.Soak(minutes=0, every_s=0, faults=kinds, workload=TINY, update=update)
    with record_in(tmp_path / "record") as record:
        found = fault_soak.soak_for(soak, tmp_path, record)
    assert {name.split(":")[0] for name in found["outcomes"]} >= set(fault_soak.KINDS)
    # A step that is undone is one less, and its pass took none.
    assert found["steps"] >= kinds - 2 * found["taken_again"]
    assert found["steps_undone"] >= 1
    assert lines(tmp_path / "record")[-1]["kind"] == "ended"


@pytest.mark.slow
@pytest.mark.parametrize(
    "mode", ["deferred", "durable", "generations, backward", "2 ranks, durable"]
)
def test_hundreds_of_steps_hold_what_fifty_did(tmp_path: Path, mode: str) -> None:
    looks = list(growth.measure(mode, tmp_path, 400))
    assert looks[0]["step"] == growth.FIRST
    assert looks[-1]["step"] == 400
    assert growth.grown(looks) == {}, looks


def test_what_grows_is_named() -> None:
    mib = 1 << 20
    before = {"rss": 100 * mib, "heap free": 3 * mib, "allocated": 90 * mib, "descriptors": 9}
    first = {"step": 50, "python blocks": 10_000, **before}
    same = {"step": 90, "rss": 104 * mib, "allocated": 90 * mib + 9000, "python blocks": 10_900}
    assert growth.grown([first, {**first, **same}]) == {}
    more = {"rss": 150 * mib, "allocated": 92 * mib, "python blocks": 12_000, "descriptors": 10}
    grown = {"rss": 50 * mib, "allocated": 2 * mib, "python blocks": 2000, "descriptors": 1}
    assert growth.grown([first, {**first, **more}]) == grown


@pytest.mark.slow
@pytest.mark.parametrize("name", pressure.PRESSURES)
def test_numbers_are_right_under_pressure(tmp_path: Path, name: str) -> None:
    with record_in(tmp_path / "record") as record, one_thread():
        found = pressure.under(name, tmp_path, record, seconds=0.5, workload=TINY)
    assert found["steps"] >= pressure.WARM + 9
    assert lines(tmp_path / "record")[-1]["kind"] == "right"
