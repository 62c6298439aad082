"""Figures that the comparison scripts make of their measurements; the scripts themselves are run by
hand."""

from __future__ import annotations

import importlib
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """(harness, compare_io, cost_of_verify), imported as scripts import each other."""
    monkeypatch.syspath_prepend(str(BENCH))
    names = ("harness", "compare_io", "cost_of_verify")
    yield tuple(importlib.import_module(name) for name in names)
    for name in names:
        sys.modules.pop(name, None)


def test_the_interval_of_a_median_covers_it_as_often_as_it_says(scripts: Any) -> None:
    harness, _, _ = scripts
    chance = random.Random(0)
    harness.RESAMPLES = 1000
    inside = 0
    for _ in range(200):
        found = harness.Interval.of([chance.gauss(1.0, 0.1) for _ in range(15)])
        inside += found.low <= 1.0 <= found.high
        assert found.low <= found.median <= found.high
    assert 0.88 <= inside / 200 <= 0.99


def test_fio_figures_count_both_directions_and_refuse_errors(scripts: Any) -> None:
    harness, compare_io, _ = scripts
    job = {
        "jobname": "mixed",
        "error": 0,
        "usr_cpu": 1.0,
        "sys_cpu": 3.0,
        "job_runtime": 500,
        "read": {"io_bytes": 10**9, "bw_bytes": 2 * 10**9},
        "write": {"io_bytes": 10**9, "bw_bytes": 2 * 10**9},
    }
    found = compare_io.fio_figures("note: something\n" + json.dumps({"jobs": [job]}))
    assert found == {"gbps": 4.0, "cpu_s_per_gb": pytest.approx(0.01)}
    with pytest.raises(harness.BenchError, match="error 5 for mixed"):
        compare_io.fio_figures(json.dumps({"jobs": [{**job, "error": 5}]}))


def test_ratios_are_of_one_round_and_a_round_without_its_pair_counts_for_nothing(
    scripts: Any,
) -> None:
    _, compare_io, _ = scripts

    def record(number: int, arm: str, gbps: float) -> dict[str, Any]:
        return {
            "round": number,
            "arm": arm,
            "figures": {k: {"gbps": gbps, "cpu_s_per_gb": 1.0} for k in compare_io.KINDS},
        }

    records = [
        record(0, "fio", 1.0),
        record(0, "infinity", 2.0),
        record(1, "infinity", 30.0),
        record(1, "fio", 10.0),
    ]
    records.append(record(2, "fio", 99.0))
    summary = compare_io.summarise(records, ["infinity", "fio"])
    assert summary["read"]["ratio_fio"] == {"median": 2.5, "low": 2.0, "high": 3.0, "count": 2}


def test_a_report_without_what_is_compared_is_an_error(scripts: Any) -> None:
    harness, compare_io, _ = scripts
    with pytest.raises(harness.BenchError, match="no 'read_gbps'"):
        compare_io.infinity_figures({"phases": {}})


def test_the_cost_of_a_setting_is_over_off_in_the_same_round(scripts: Any) -> None:
    _, _, cost_of_verify = scripts
    records = [
        {"round": number, "arm": arm, "figures": {"fetch": {"cpu_s_per_gb": base + more}}}
        for number, base in enumerate((1.0, 5.0))
        for arm, more in (("off", 0.0), ("full", 0.25))
    ]
    found = cost_of_verify.summarise(records, ["full", "off"])["fetch"]["cpu_s_per_gb"]
    assert found["full_minus_off"] == {"median": 0.25, "low": 0.25, "high": 0.25, "count": 2}
    assert found["full_over_off"]["median"] == pytest.approx((1.25 + 1.05) / 2)


@pytest.fixture
def predictions(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """bench/predict.py."""
    pytest.importorskip("transformers")
    monkeypatch.syspath_prepend(str(BENCH))
    yield importlib.import_module("predict")
    for name in ("predict", "published", "harness", "r1"):
        sys.modules.pop(name, None)


def test_a_throttled_drive_keeps_its_ratio_and_stays_below_the_real_one(predictions: Any) -> None:
    drive = {"read": 2e9, "write": 1e9}
    for name, config in predictions.CONFIGS.items():
        read, write = predictions.bandwidths(config, drive)
        if config.ratio is None:
            assert (read, write) == (2e9, 1e9), name
        else:
            assert read / write == pytest.approx(config.ratio[0] / config.ratio[1])
            assert read <= 0.6 * 2e9 + 1
            assert write <= 0.6 * 1e9 + 1
    assert sum(config.ratio is None for config in predictions.CONFIGS.values()) >= 6


def test_the_error_of_a_prediction_is_the_median_of_its_rounds(predictions: Any) -> None:
    def record(name: str, predicted_s: float) -> dict[str, Any]:
        names = (
            "predicted_limit_s",
            "predicted_read_bytes_per_param",
            "read_bytes_per_param",
            "predicted_write_bytes_per_param",
            "write_bytes_per_param",
        )
        # The first step, beside which no update runs, is not the steady state that is predicted.
        return {
            "config": name,
            "predicted_s": predicted_s,
            "step_s": [9.0, 1.5, 2.5],
            **dict.fromkeys(names, 1.0),
        }

    rows = predictions.summarise(
        [record("a", 2.2), record("b", 1.0), record("a", 2.6), record("a", 2.4)]
    )
    found = [
        (row["config"], row["rounds"], pytest.approx(row["error"]), row["s_per_step"])
        for row in rows
    ]
    assert found == [("a", 3, 0.2, 2.0), ("b", 1, -0.5, 2.0)]
