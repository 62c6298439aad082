"""A slice of the campaign of faults, and that the campaign finds what is wrong."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import itertools
import json
import threading
import time
from pathlib import Path

import pytest

from tests import campaign
from tests.campaign import (
    Matrix,
    Outcome,
    Record,
    Setting,
    case_of,
    in_order,
    judge,
    name_of,
    run_case,
)
from tests.campaign_life import KINDS, PHASES, Case, Told

CASE = Case("EIO", "write", 3, "step", "two", "threads", 1, 1)
FINE = Told(finished=True, met=True)


def test_a_slice_of_the_campaign(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = tmp_path / "record.jsonl"
    options = "--policies two durable --backends threads --ranks 1 --drives 4 --cases 8 --seed 5"
    code = campaign.main([*options.split(), "--late", "0.2", "--record", str(record)])
    told = capsys.readouterr().out
    assert code == 0, told
    assert "8 injections, 0 findings" in told
    assert "| all | 8 |" in told
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    assert len({line["case"] for line in lines}) == 8
    assert sum(line["how"] != "not met" for line in lines) >= 4


@pytest.fixture(scope="module")
def looked() -> Matrix:
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        matrix = Matrix([Setting("two", "threads", 1, 1)], 0.1, None)
        matrix.look(pool)
    return matrix


def test_the_campaign_finds_wrong_numbers_and_what_hangs(
    looked: Matrix, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses, states = looked.wanted[1][0]
    name = next(name for name in states[-1] if name.endswith("/exp_avg"))
    other = [dict(each) for each in states]
    other[-1][name] = other[-1][name] ^ 1
    outcome = run_case(CASE, {1: [(losses, other)]})
    assert outcome.how == "finding"
    assert name in outcome.seen[0]
    monkeypatch.setattr(campaign, "SECONDS", 0.0)
    outcome = run_case(dataclasses.replace(CASE, late_s=0.0), looked.wanted)
    assert (outcome.how, outcome.seen) == ("finding", ("hangs",))


def test_every_case_has_a_promise() -> None:
    for fault, phase, policy, ranks in itertools.product(
        campaign.FAULTS, PHASES, campaign.POLICIES, (1, 2)
    ):
        case = Case(fault[0], fault[1], 0, phase, policy, "threads", ranks, 1)
        assert set(campaign.promised(case)) < set(campaign.OUTCOMES) - {"not met", "finding"}


def test_every_kind_meets_every_phase(looked: Matrix) -> None:
    """The requests of each phase are known, so that no phase is left out in silence."""
    cases = list(looked.cases())
    assert {case.phase for case in cases} == set(PHASES)
    assert {case.kind for case in cases} == set(KINDS)
    assert {(case.kind, case.op) for case in cases if case.phase == "step"} == set(campaign.FAULTS)
    assert [case_of(name_of(case), 0.1) for case in cases] == cases


def test_the_order_is_that_of_the_seed_and_late_cases_run_beside_the_others(
    looked: Matrix, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases = in_order(looked.cases(), 3)
    fewer = [case for case in looked.cases() if case.nth != 1]
    assert in_order(fewer, 3) == [case for case in cases if case.nth != 1]
    assert cases != in_order(cases, 4) != list(looked.cases())
    running: list[str] = []
    most = {"late": 0, "others": 0}
    lock = threading.Lock()

    def run(case: Case, _wanted: object) -> Outcome:
        with lock:
            running.append(case.kind)
            late = running.count("late")
            most["late"] = max(most["late"], late)
            most["others"] = max(most["others"], len(running) - late)
        # Late cases wait for each other, however slowly a busy machine starts their threads.
        until = time.monotonic() + (10 if case.kind == "late" else 0)
        while most["late"] <= 2 and time.monotonic() < until:
            time.sleep(0.001)
        with lock:
            running.remove(case.kind)
        return Outcome("right", (), 0.0)

    monkeypatch.setattr(campaign, "run_case", run)
    record = Record(None, resume=False)
    campaign.run_all(cases, None, record, 2, until=None)
    assert len(record.outcomes) == len(cases)
    assert most["others"] <= 2 < most["late"] <= campaign.LATE


@pytest.mark.parametrize(
    ("kind", "op", "policy", "told", "how"),
    [
        ("EAGAIN", "read", "one", FINE, "right"),
        ("EAGAIN", "read", "one", dataclasses.replace(FINE, seen=["step 2: AioError"]), "finding"),
        ("EIO", "read", "one", dataclasses.replace(FINE, seen=["step 2: AioError"]), "retried"),
        ("EIO", "read", "two", dataclasses.replace(FINE, seen=["step 2: StepUndone"]), "undone"),
        ("EIO", "read", "one", Told(seen=["step 2: StateInvalid"]), "ended"),
        ("EIO", "read", "two", Told(seen=["step 2: StateInvalid"]), "finding"),
        ("stale", "write", "two", Told(seen=["step 2: StateInvalid"]), "ended"),
        ("EIO", "read", "one", Told(), "finding"),
        ("EIO", "read", "one", dataclasses.replace(FINE, met=False), "not met"),
        ("late", "read", "one", dataclasses.replace(FINE, wrong=["left: a lock"]), "finding"),
    ],
)
def test_what_is_right_and_what_is_a_finding(
    kind: str, op: str, policy: str, told: Told, how: str
) -> None:
    case = dataclasses.replace(CASE, kind=kind, op=op, policy=policy)
    assert judge(case, [told], [FINE])[0] == how


def test_damage_that_was_named_is_right_after_a_damaged_write_alone() -> None:
    named = dataclasses.replace(FINE, named=7)
    for (kind, op), how in [(("bitflip", "write"), "named"), (("EIO", "write"), "finding")]:
        case = dataclasses.replace(CASE, kind=kind, op=op, policy="durable")
        assert judge(case, [FINE], [named])[0] == how


def test_a_record_is_gone_on_with(tmp_path: Path) -> None:
    path = tmp_path / "record.jsonl"
    for nth in range(2):
        record = Record(path, resume=True)
        record.add(dataclasses.replace(CASE, nth=nth), Outcome("right", (), 1.0))
    assert len(Record(path, resume=True).outcomes) == 2
    table = Record(path, resume=True).table(3)
    assert "| step | 2 | 2 |" in table
