"""The sweep: tries every pair, and the choice costs the least memory of what is as fast as the
best."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from infinity._src.base.sizes import KIB, MIB
from infinity._src.config.policy import Policy
from infinity._src.measure import command, sweep
from infinity._src.measure.swap import KINDS
from infinity._src.measure.sweep import IN_FLIGHT_MAX_BYTES, Point, choose, pairs


@pytest.fixture(autouse=True)
def _swap_may_lie_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFINITY_ALLOW_TMPFS", "1")


def point(block: int, depth: int, rate: float, *, final: bool = False) -> Point:
    return Point(block, depth, {kind: [rate] for kind in KINDS}, final)


def test_the_least_in_flight_of_what_is_as_fast_as_the_best_wins() -> None:
    slow, small, large = point(MIB, 2, 5.0), point(MIB, 8, 9.9), point(MIB, 32, 10.0)
    assert choose([slow, small, large]) is small
    # As much in flight: the larger block needs fewer requests.
    same = point(2 * MIB, 4, 9.8)
    assert choose([slow, small, large, same]) is same
    # A pair that was tried only once does not win over pairs that were measured longer.
    assert choose([point(MIB, 4, 99.0), point(MIB, 16, 10.0, final=True)]).depth == 16


def test_pairs_with_too_much_in_flight_are_left_out() -> None:
    assert (MIB, 8) in pairs([MIB], [8, 1024])
    assert all(
        block * depth <= IN_FLIGHT_MAX_BYTES
        for block, depth in pairs([256 * KIB, 4 * MIB], [4, 64])
    )
    with pytest.raises(ValueError, match="in flight"):
        pairs([4 * MIB], [1024])


def test_a_sweep_writes_what_a_policy_reads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep, "_FINAL_ROUNDS", 2)
    target = tmp_path / "io.json"
    swap = tmp_path / "swap"
    swap.mkdir()
    arguments = [
        "swap", "--dir", str(swap), "--size", "48MiB", "--rounds", "1", "--seconds", "0.05",
        "--limit", "off",
    ]  # fmt: skip
    swept = ["--sweep", "--sweep-blocks", "256K,1M", "--sweep-depths", "4,8", "--json", str(target)]
    assert command.main([*arguments, *swept]) == 0
    found = json.loads(target.read_text())
    assert len(found["sweep"]["points"]) == 4
    best = found["sweep"]["best"]
    settings = Policy(io=target).io_settings
    assert (settings.block_bytes, settings.depth) == (best["block_bytes"], best["depth"])
    assert settings.backend == found["settings"]["backend"] == found["backend"]
    # A device may take less at once.
    assert found["block_bytes"] <= best["block_bytes"]
    assert found["depth"] == best["depth"]
    assert set(settings.bandwidths) == {str(swap)}
    shown = capsys.readouterr().out
    assert "best:" in shown
    assert "Policy(io=" in shown
    assert list(swap.iterdir()) == []
