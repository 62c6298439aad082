"""A slice of the campaign of hostile files, and checks that the campaign finds faults."""

from __future__ import annotations

import os
import pickle
import time
from pathlib import Path
from typing import Any

import pytest

from tests import hostile


@pytest.mark.parametrize("name", list(hostile.TARGETS))
def test_hostile_files_are_refused_or_read(name: str) -> None:
    counts, findings = hostile.run([name], 40, seed=1, processes=1)
    assert not findings
    found = counts[name]
    assert found.total() == 40
    # Ineffective changes would test nothing. In swap many files are ignored, or replaced.
    assert found.total() - found["read"] >= (1 if hostile.TARGETS[name].swap else 10)


def test_the_same_number_is_the_same_input(tmp_path: Path) -> None:
    made = []
    for place in ("a", "b"):
        real = tmp_path / place / "real"
        real.mkdir(parents=True)
        hostile.TARGETS["pickles"].write(real)
        inputs = hostile.Inputs("pickles", 3, real, tmp_path / place, hostile.Opened())
        made.append([(inputs.make(n), (tmp_path / place / "input/file.pt").read_bytes())[1]
                     for n in range(20)])  # fmt: skip
    assert made[0] == made[1]
    assert len(set(made[0])) > 15


def _wrong_ways(secret: Path) -> dict[str, Any]:
    def read(place: Path) -> Any:
        number = len((place / "extra").read_bytes())
        ways = {
            0: lambda: {}["x"],
            1: lambda: secret.read_bytes(),
            2: lambda: bytearray(8 << 30),
            3: lambda: os.kill(os.getpid(), 9),
        }
        return ways.get(number % 8, lambda: None)()

    return {"wrong": hostile.Target(hostile.write_extra, ("extra",), read)}


def test_the_campaign_finds_what_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = tmp_path / "secret"
    secret.write_text("x")
    for name, target in _wrong_ways(secret).items():
        monkeypatch.setitem(hostile.TARGETS, name, target)
    monkeypatch.setattr(hostile, "SECONDS", 2)
    counts, findings = hostile.run(["wrong"], 60, processes=1)
    told = " ".join(each.what for each in findings)
    for what in ("KeyError", f"opened {secret}", "MemoryError", "ended with -9"):
        assert what in told
    # A crash skips one input, not later ones.
    assert {each.number for each in findings if "-9" in each.what} != {0}
    assert counts["wrong"]["crash"] >= 1


def test_a_write_through_a_planted_link_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(place: Path) -> None:
        for path in place.rglob("*owner*"):
            if path.is_file():
                path.write_text("mine")

    target = hostile.Target(
        hostile.write_owners, ("run/.*", "infinity-swap-*/*"), read, swap=True
    )
    monkeypatch.setitem(hostile.TARGETS, "follows", target)
    _, findings = hostile.run(["follows"], 120, processes=1)
    told = " ".join(each.what for each in findings)
    assert "changed a file outside of the directory" in told or "opened" in told


def test_an_input_that_takes_too_long_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    target = hostile.Target(hostile.write_extra, ("extra",), lambda _place: time.sleep(30))
    monkeypatch.setitem(hostile.TARGETS, "slow", target)
    monkeypatch.setattr(hostile, "SECONDS", 1)
    _, findings = hostile.run(["slow"], 1, processes=1)
    assert [each.what for each in findings] == ["more than 1 s"]


def test_bombs_are_pickles_of_their_kind() -> None:
    """Each is refused by Python's own reader, or builds what makes a careless reader fail."""
    assert any(b"eval" in bomb for bomb in hostile.BOMBS)
    deep = next(bomb for bomb in hostile.BOMBS if bomb.count(b"\x85") > 1000)
    value, depth = pickle.loads(deep), 0
    while value is not None:
        value, depth = value[0], depth + 1
    assert depth == 50_000
