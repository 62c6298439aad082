"""Figures that the scripts of ranks and nodes make of their records; the runs themselves are made
by hand, or by `make hosts`."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

BENCH = Path(__file__).parents[3] / "bench"
NAMES = (
    "arm_hosts",
    "compare_deepspeed",
    "convergence",
    "drive",
    "harness",
    "hosts",
    "meter",
    "r1",
    "ranks",
    "zeropp_curves",
)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Gives a script by its name, imported as scripts import each other."""
    monkeypatch.syspath_prepend(str(BENCH))
    yield importlib.import_module
    for name in NAMES:
        sys.modules.pop(name, None)


def of_link(arm: str, s_per_step: float, link_bytes: float) -> dict[str, Any]:
    whole = [{"tx_bytes": 1000, "wire_bytes": 1040}, {"tx_bytes": 3000, "wire_bytes": 3120}]
    return {
        "arm": arm,
        "s_per_step": s_per_step,
        "link_bytes_per_step": link_bytes,
        "m_bytes": 100,
        "whole_run": whole,
        "engine_per_step": {
            "comm_gather_across_bytes": 70.0,
            "comm_reduce_across_bytes": 20.0,
            "comm_wait_s": 0.5,
        },
        "losses": [2.0, 1.0],
    }


def test_traffic_is_told_in_units_of_the_parameters_beside_the_formula(
    bench: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    hosts = bench("hosts")
    records = [
        of_link("plain", 2.0, 300.0),
        of_link("all", 1.0, 78.0),
        of_link("plain", 4.0, 302.0),
    ]
    found = hosts.summarise(records, hosts.ARMS)
    assert list(found) == ["plain", "all"]
    assert found["plain"]["link_m"] == pytest.approx(3.01)
    assert found["plain"]["s_per_step"]["median"] == 3.0
    assert found["plain"]["wire_share"] == pytest.approx(1.04)
    assert (found["plain"]["formula_m"], found["all"]["formula_m"]) == (3.0, 0.75)
    assert found["all"]["scales_m"] == pytest.approx(100 / 128)
    hosts.show("1gbit", 100, found)
    assert re.search(r"0\.780 +0\.900 +0\.75 +0\.781", capsys.readouterr().out)


def test_the_arms_of_the_link_are_those_that_a_rank_knows_and_scales_weigh_what_the_wire_has(
    bench: Any,
) -> None:
    from infinity._src.distributed.collectives import GRADIENT_BITS, SCALE_GROUP_NUMEL, WEIGHT_BITS
    from infinity._src.kernels.quantized import wire_bytes

    hosts, many = bench("hosts"), 1 << 20
    assert tuple(bench("arm_hosts").SWITCHES) == hosts.ARMS == tuple(hosts.FORMULA)
    for bits in (WEIGHT_BITS, GRADIENT_BITS):
        assert (
            wire_bytes(many, bits, SCALE_GROUP_NUMEL) / (2 * many) == hosts.WITH_SCALES[bits / 16]
        )


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="no /proc")
def test_a_process_is_known_by_its_number_and_when_it_began(bench: Any) -> None:
    hosts = bench("hosts")
    assert hosts._started(os.getpid()) == hosts._started(os.getpid()) > 0
    assert hosts._started(1 << 30) is None
    for node in hosts.Hosts().nodes:
        found = hosts._NAME.fullmatch(node)
        assert (int(found[1]), int(found[2])) == (os.getpid(), hosts._started(os.getpid()))
    for foreign in (
        "infinity-hosts-1-theirs",
        "infinity-hosts-1-2-3",
        "infinity-hosts-1-2-0x",
        "other",
    ):
        assert hosts._NAME.fullmatch(foreign) is None


def test_ratios_of_ranks_are_of_one_round_part_and_number_of_ranks(bench: Any) -> None:
    ranks = bench("ranks")

    def record(number: int, part: str, count: int, engine: str, seconds: float) -> dict[str, Any]:
        same = (
            "s_per_step",
            "cpu_s_per_step",
            "read_bytes_per_param",
            "write_bytes_per_param",
            "peak_rss_bytes",
            "peak_rss_rank_max",
        )
        return {
            "round": number,
            "part": part,
            "ranks": count,
            "engine": engine,
            "step_s": [100.0, seconds, seconds],
            "losses": [3.0, 2.0],
            **dict.fromkeys(same, 1.0),
        }

    rows = ranks.summarise(
        [
            record(0, "nvme", 1, "infinity", 2.0),
            record(0, "nvme", 1, "deepspeed", 6.0),
            record(0, "nvme", 2, "infinity", 1.0),
            record(1, "nvme", 1, "deepspeed", 20.0),
            record(1, "nvme", 1, "infinity", 4.0),
            record(1, "nvme", 2, "deepspeed", 9.0),
        ]
    )
    by_key = {(row["ranks"], row["engine"]): row for row in rows}
    assert by_key[1, "deepspeed"]["ratio"] == {"median": 4.0, "least": 3.0, "most": 5.0, "count": 2}
    assert by_key[1, "infinity"]["ratio"] is None
    assert by_key[2, "deepspeed"]["ratio"] is None  # its round has no infinity at two ranks
    assert by_key[1, "infinity"]["s_per_step"]["median"] == 3.0


def test_runs_of_another_setting_are_not_taken_and_losses_that_are_equal_are_counted(
    bench: Any, tmp_path: Path
) -> None:
    curves, path = bench("zeropp_curves"), tmp_path / "curves.jsonl"
    setting = curves.SETTING

    def record(arm: str, seed: int, final: float, **changes: Any) -> dict[str, Any]:
        described = dataclasses.asdict(dataclasses.replace(setting, **changes))
        return {
            "setting": described,
            "arm": arm,
            "seed": seed,
            "final": final,
            "losses": [final],
            "s_per_step": 0.1,
            "held_out": [[0, 5.0], [10, final]],
        }

    assert curves.known(path, setting) == {}
    lines = [
        record("plain", 0, 2.0),
        record("hpz", 0, 2.0),
        record("qgz", 0, 2.25),
        record("qgz", 1, 9.0),
        record("plain", 1, 7.0, steps=1),
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    runs = curves.known(path, setting)
    assert set(runs) == {("plain", 0), ("hpz", 0), ("qgz", 0), ("qgz", 1)}
    rows = {row[0]: row for row in curves.rows_of(runs, curves.ARMS, (0, 1))}
    assert set(rows) == {"plain", "hpz", "qgz"}
    assert rows["hpz"][4:7] == ["+0.0000", "+0.0000", "1 of 1"]
    assert rows["qgz"][1:3] == ["2", "5.6250"]
    assert rows["qgz"][4:7] == ["+0.2500", "+0.2500", "0 of 1"]  # its seed 1 has no plain beside it
    pytest.importorskip("matplotlib")
    curves.plot(runs, (0, 1), tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 1000
