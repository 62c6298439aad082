"""Scripts of bench/, each run once on tiny sizes: measured figures are those that a script states,
and ratios are of one round. Long runs are made by hand."""

from __future__ import annotations

import dataclasses
import json
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import infinity as inf
from infinity._src.cabi import native
from infinity._src.distributed.collectives import GRADIENT_BITS, SCALE_GROUP_NUMEL, WEIGHT_BITS
from infinity._src.kernels.quantized import wire_bytes
from infinity._src.memory.constants import SPARES_PER_DRIVE

pytest.importorskip("transformers")

ROOT = Path(__file__).parents[3]
TINY = {"hidden": 64, "layers": 1, "vocab": 64, "tokens": 4, "steps": 2, "warmup": 1}


# -- what is measured ------------------------------------------------------------------------------


def smoke(*command: str) -> str:
    """The standard output of a script's smoke run."""
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, capture_output=True, text=True, check=False,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_kernels_are_measured_beside_their_limits() -> None:
    record = json.loads(smoke("bench/bench_kernels.py", "--smoke", "--json", "--threads", "2"))
    assert record["isa"] in native.ISA_NAMES
    rows = record["updates"]
    assert {(row["arm"], row["threads"]) for row in rows} == {
        (arm, 2) for arm in ("exact", "exact verified", "bf16", "compact", "torch")
    }
    assert all(row["gparam_per_s"] > 0 and row["limit_gparam_per_s"] > 0 for row in rows)
    assert {row["implementation"] for row in record["checksums"]} >= {"portable"}


@pytest.mark.slow
def test_wires_are_measured_beside_their_limits_and_torch() -> None:
    cases = json.loads(smoke("bench/bench_wire.py", "--smoke", "--json"))["cases"]
    assert len({row["case"] for row in cases}) == 12
    rates = ("gelem_per_s", "of_limit", "torch_gelem_per_s")
    assert all(row[rate] > 0 for row in cases for rate in rates)


@pytest.mark.slow
def test_the_executor_is_measured_with_its_mutex(tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    shown = smoke("bench/executor.py", "--smoke", f"--dir={tmp_path}", f"--results={results}")
    records = [json.loads(line) for line in results.read_text().splitlines()]
    assert {(record["kind"], record["kernels"]) for record in records} == {
        (kind, all_) for kind in ("store", "fetch", "update") for all_ in ("none", "all")
    }
    if shutil.which("cc"):
        assert all(record["metered"]["holds"] > 0 for record in records)
        assert "GB/s through" in shown


@pytest.mark.parametrize("kernels", [False, True])
def test_an_arm_moves_whole_chunks_in_blocks(bench: Any, tmp_path: Path, kernels: bool) -> None:
    arm = bench("arm_executor")
    found = arm.run(
        tmp_path, drives=2, block=1 << 20, batch=3, workers=1, kernels=kernels, chunks=6,
        seconds=0.001,
    )  # fmt: skip
    assert set(found) == {"store", "fetch", "update"}
    for kind, figures in found.items():
        turns = 2 if kind == "update" else 1
        assert figures["chunks"] >= 6
        assert figures["bytes"] == turns * figures["chunks"] * arm.CHUNK_BYTES
        # 4.5 MiB in blocks of 1 MiB.
        assert figures["requests"] == turns * figures["chunks"] * 5
        assert figures["cpu_s"] > 0


def test_a_save_is_measured_and_what_it_left_restores_to_the_same_losses(
    bench: Any, tmp_path: Path
) -> None:
    import infinity as inf

    arm_infinity, arm_save, workload = (
        bench("arm_infinity"),
        bench("arm_save"),
        bench("r1").Workload(**TINY),
    )
    target = tmp_path / "checkpoint"

    def training(name: str, **options: Any) -> Any:
        (tmp_path / name).mkdir(exist_ok=True)
        policy = inf.Policy(
            params="nvme", optim="nvme", nvme=[tmp_path / name], ram="min", **options
        )
        return arm_infinity.build(workload, policy)

    first = training("a", durable=True)
    record = arm_save.save_stage(first, workload, target, 1) | arm_save.durable_stage(first)
    assert arm_infinity.counters(first.handle)["commit_s"] == record["commit_s"] > 0
    (save,) = record["saves"]
    assert save["bytes"] >= 12 * workload.parameters
    assert save["bytes_copied"] == 0  # hard links
    assert save["wall_s"] >= save["call_s"] > 0
    assert len(record["alone_s"]) == 2
    first.handle.close()
    resumed = training("a", durable=True)
    assert arm_save.restore_stage(resumed, tmp_path / "a")["step"] == record["committed"]
    resumed.handle.close()
    second = training("b", update="backward", generations=2)
    found = arm_save.restore_stage(second, target)
    assert found["following"] == record["following"]
    needed = arm_infinity.must_move(second.handle, workload)
    least = 12 * workload.parameters  # flats are padded
    assert (
        least
        <= needed["deferred"]["states"]["read"]
        == needed["deferred"]["states"]["written"]
        <= 1.1 * least
    )
    second.handle.close()


@pytest.mark.parametrize("experts", [0, 4])
def test_sizes_are_those_of_the_model(bench: Any, experts: int) -> None:
    r1 = bench("r1")
    workload = r1.Workload(**{**TINY, "layers": 2}, experts=experts)
    sizes = [param.numel() for param in r1.build_on_meta(workload).parameters()]
    assert (sum(sizes), max(sizes)) == (workload.parameters, workload.largest_parameter)


def test_a_step_of_experts_in_vertical_order_reads_what_one_micro_batch_does(
    bench: Any, tmp_path: Path
) -> None:
    r1, arm = bench("r1"), bench("arm_infinity")
    read = {}
    for micro_batches, schedule in ((1, "horizontal"), (4, "horizontal"), (4, "vertical")):
        # Larger than the pools, which would keep what the next micro-batch reads again.
        workload = r1.Workload(256, 6, 64, 16, tokens=8, micro_batches=micro_batches)
        policy = inf.Policy(params="nvme", optim="nvme", nvme=[tmp_path], ram="min")
        training = arm.build(workload, policy, schedule=schedule)
        for _ in range(2):
            training.step()
            training.handle.flush()
        before = training.handle.stats().bytes_read
        training.step()
        training.handle.flush()
        read[micro_batches, schedule] = training.handle.stats().bytes_read - before
        training.handle.close()
    assert read[4, "vertical"] == read[1, "horizontal"] < read[4, "horizontal"]


def test_all_states_go_through_null_drives_and_the_record_says_what_moved(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rehearsal of sizes (bench/rehearsal/sizes.py), of a model of toy width."""
    sizes, results = bench("sizes"), tmp_path / "results.jsonl"
    whole = sizes.config

    def narrow(layers: int, vocabulary: int) -> Any:
        found = whole(layers, vocabulary)
        found.hidden_size, found.intermediate_size, found.head_dim = 1024, 2048, 8
        return found

    monkeypatch.setattr(sizes, "config", narrow)
    arguments = ["--layers=2", "--vocab=1024", "--steps=2", "--drives=2", f"--results={results}"]
    monkeypatch.setattr(sys, "argv", ["sizes.py", f"--dir={tmp_path}", *arguments])
    assert sizes.main() == 0
    record = json.loads(results.read_text())
    # Embedding, head, and 2 layers of 4 attention and 3 MLP matrices; norms are small change.
    attention, mlp = 2 * 1024 * 1024 + 2 * 1024 * 64, 3 * 1024 * 2048
    assert record["parameters"] == 2 * 1024 * 1024 + 2 * (attention + mlp) + 5 * 1024
    # Norms are half a group of elements, and are padded to one.
    # Spare ranges of a chunk's 4.5 MiB on each of two drives come on top.
    states_bytes = record["file_bytes"] - 2 * SPARES_PER_DRIVE * (9 << 19)
    assert 12 <= states_bytes / record["parameters"] < 12.01
    assert record["last_chunk_end"] <= states_bytes < 2 * record["last_chunk_end"]
    assert record["updates"] == 2 * record["chunks"]
    steps = [phase for phase in record["phases"] if phase["phase"].startswith("step")]
    written = [step["written_bytes_per_param"] for step in steps]
    assert written == [states_bytes / record["parameters"]] * 2
    # In the first step the moments are known to be zeros: 8 bytes that are not read.
    more = steps[1]["read_bytes_per_param"] - steps[0]["read_bytes_per_param"]
    assert 8 <= more < 8.01
    assert all(step["trainer_us_per_chunk"] > 0 for step in steps)
    forecast = record["forecast"]
    assert forecast["file_bytes"] == record["file_bytes"]
    assert forecast["written_bytes"] == written[1] * record["parameters"]
    assert list(tmp_path.iterdir()) == [results]


# -- what is made of it ----------------------------------------------------------------------------


def test_rates_are_of_the_plain_run_and_the_mutex_of_the_metered_one(bench: Any) -> None:
    figures = bench("executor").figures
    plain = {"s": 2.0, "cpu_s": 1.0, "requests": 4000, "bytes": 8e9}
    rates = {
        "gb_per_s": 4.0,
        "requests_per_s": 2000.0,
        "cpu_us_per_request": 250.0,
        "cpu_ms_per_gb": 125.0,
    }
    assert figures(plain, {}) == pytest.approx(rates)
    metered = {
        "s": 4.0, "requests": 1000, "bytes": 2e9, "holds": 3000, "contended": 30,
        "long_holds": 1000, "hold_ns": 2_000_000, "long_ns": 10**9, "waited_ns": 0,
    }  # fmt: skip
    found = figures(plain, metered)
    # Long holds count as much as others: 3000 times 1 us.
    assert found["lock_us_per_request"] == pytest.approx(3.0)
    assert found["lock_share"] == pytest.approx(0.003 / 4)
    assert found["lock_gb_per_s"] == pytest.approx(2 / 0.003)
    assert (found["holds_per_s"], found["holds_per_request"]) == (750, 3)
    assert found["contended_share"] == pytest.approx(0.01)


def test_a_ratio_beside_a_job_is_of_the_two_runs_of_a_round(
    bench: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    script = bench("beside_a_job")

    def record(number: int, busy: bool, seconds: float) -> dict[str, Any]:
        # The first measured step is left out.
        steps = [9.0, seconds, seconds]
        return {"arm": "infinity", "busy": busy, "round": number, "step_s": steps}

    records = [record(0, False, 1.0), record(0, True, 2.0), record(1, True, 9.0),
               record(1, False, 3.0), record(2, False, 5.0)]  # fmt: skip
    summary = script.summarise(records, ["infinity", "plain"])
    assert list(summary) == ["infinity"]
    ratio = summary["infinity"]["ratio"]
    assert (ratio.median, ratio.least, ratio.most, ratio.count) == (2.5, 2.0, 3.0, 2)
    assert summary["infinity"]["quiet_s"].count == 3
    script.show(bench("r1").Workload(), 2, summary)
    assert "infinity: more than 2 times as long beside the job" in capsys.readouterr().out


def test_ratios_of_checkpoints_are_of_one_round_and_errors_are_told(
    bench: Any, tmp_path: Path
) -> None:
    checkpoints, harness = bench("checkpoints"), bench("harness")

    def record(number: int, arm: str, stall: float) -> dict[str, Any]:
        saves = [{"stall_s": stall, "wall_s": 2 * stall, "bytes": 10}]
        return {
            "round": number,
            "arm": arm,
            "save": {"alone_s": [[1.0]], "saves": saves, "following": [1.0, 2.0]},
            "restore": {"restore_s": 1.0, "setup_s": 1.0, "following": [1.0, 2.5]},
        }

    failed = {"round": 1, "arm": "deepspeed", "save": {"error": "RuntimeError: no", "after_s": 3.0}}
    records = [
        record(0, "infinity", 1.0),
        record(0, "deepspeed", 4.0),
        record(1, "infinity", 9.0),
        failed,
    ]
    summary = checkpoints.summarise(records, ["infinity", "deepspeed"])
    assert summary["ratios"]["deepspeed"]["stall_s"] == {
        "median": 0.25, "least": 0.25, "most": 0.25, "count": 1,
    }  # fmt: skip
    assert summary["arms"]["deepspeed"]["errors"] == {"save": "RuntimeError: no"}
    assert summary["arms"]["infinity"]["figures"]["losses_apart"]["median"] == 0.5
    checkpoints.show(bench("r1").Workload(**TINY), summary)
    log = f"python x ended with 1:\n  File {tmp_path}/x\nOSError: {tmp_path}/y is full\nchatter"
    assert checkpoints.reason(harness.BenchError(log), tmp_path) == "OSError: DIR/y is full"
    late = harness.BenchError("python x --dir=y took more than 5 s")
    assert checkpoints.reason(late, tmp_path) == "the process took more than 5 s"


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
    hosts, many = bench("hosts"), 1 << 20
    assert tuple(bench("arm_hosts").SWITCHES) == hosts.ARMS == tuple(hosts.FORMULA)
    for bits in (WEIGHT_BITS, GRADIENT_BITS):
        assert (
            wire_bytes(many, bits, SCALE_GROUP_NUMEL) / (2 * many) == hosts.WITH_SCALES[bits / 16]
        )


def test_ratios_of_ranks_are_of_one_round_part_and_number_of_ranks(bench: Any) -> None:
    ranks = bench("ranks")

    def record(number: int, part: str, count: int, engine: str, seconds: float) -> dict[str, Any]:
        same = (
            "s_per_step", "cpu_s_per_step", "read_bytes_per_param", "write_bytes_per_param",
            "peak_rss_bytes", "peak_rss_rank_max",
        )  # fmt: skip
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
            "setting": described, "arm": arm, "seed": seed, "final": final, "losses": [final],
            "s_per_step": 0.1, "held_out": [[0, 5.0], [10, final]],
        }  # fmt: skip

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


def test_the_interval_of_a_median_covers_it_as_often_as_it_says(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = bench("harness")
    chance = random.Random(0)
    monkeypatch.setattr(harness, "RESAMPLES", 1000)
    inside = 0
    for _ in range(200):
        found = harness.Interval.of([chance.gauss(1.0, 0.1) for _ in range(15)])
        inside += found.low <= 1.0 <= found.high
        assert found.low <= found.median <= found.high
    assert 0.88 <= inside / 200 <= 0.99


def test_a_signal_ends_a_command_also_where_it_arrives_in_a_destructor(
    bench: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Python drops what a destructor raises."""

    class Object:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGTERM)
            time.sleep(0)  # the handler runs before this

    def main() -> None:
        one = Object()
        del one
        for _ in range(500):
            time.sleep(0.01)

    with pytest.raises(SystemExit, match="143"):
        bench("harness").run_main(main)
    assert capsys.readouterr().err.startswith("interrupted")


def test_fio_figures_count_both_directions_and_refuse_errors(bench: Any) -> None:
    harness, compare_io = bench("harness"), bench("compare_io")
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
    bench: Any,
) -> None:
    compare_io = bench("compare_io")

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


def test_the_cost_of_a_setting_is_over_off_in_the_same_round(bench: Any) -> None:
    records = [
        {"round": number, "arm": arm, "figures": {"fetch": {"cpu_s_per_gb": base + more}}}
        for number, base in enumerate((1.0, 5.0))
        for arm, more in (("off", 0.0), ("full", 0.25))
    ]
    found = bench("cost_of_verify").summarise(records, ["full", "off"])["fetch"]["cpu_s_per_gb"]
    assert found["full_minus_off"] == {"median": 0.25, "low": 0.25, "high": 0.25, "count": 2}
    assert found["full_over_off"]["median"] == pytest.approx((1.25 + 1.05) / 2)


def test_the_error_of_a_prediction_is_the_median_of_its_rounds(bench: Any) -> None:
    def record(name: str, predicted_s: float) -> dict[str, Any]:
        names = (
            "predicted_limit_s", "predicted_read_bytes_per_param", "read_bytes_per_param",
            "predicted_write_bytes_per_param", "write_bytes_per_param",
        )  # fmt: skip
        # The first step, during which no update runs, is not the steady state that is predicted.
        return {
            "config": name,
            "predicted_s": predicted_s,
            "step_s": [9.0, 1.5, 2.5],
            **dict.fromkeys(names, 1.0),
        }

    rows = bench("predict").summarise(
        [record("a", 2.2), record("b", 1.0), record("a", 2.6), record("a", 2.4)]
    )
    found = [
        (row["config"], row["rounds"], pytest.approx(row["error"]), row["s_per_step"])
        for row in rows
    ]
    assert found == [("a", 3, 0.2, 2.0), ("b", 1, -0.5, 2.0)]


def test_the_committed_rows_of_published_results_are_those_of_today(bench: Any) -> None:
    published = bench("published")
    shown = (ROOT / "bench" / "README.md").read_text(encoding="utf-8")
    results = [row for results in published.RESULTS for row in results()]
    assert len(results) == 33
    for row in results:
        assert published.row_of(row) in shown
    for ratio in published.RATIOS:
        assert published.row_of_ratio(ratio) in shown


def test_the_errors_that_the_documents_tell_are_those_of_the_rows(bench: Any) -> None:
    published = bench("published")
    shown = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    for results in (published.ratel(), published.mlp_offload()):
        errors = [row.error for row in results if row.counts]
        most = max(errors, key=abs)
        sign = "+" if most > 0 else "\u2212"
        cells = (len(errors), f"{statistics.median(map(abs, errors)):.0%}", f"{abs(most):.0%}")
        median, largest = (cell.replace("%", " %") for cell in cells[1:])
        assert f"| {cells[0]} | {median} | {sign}{largest} |" in shown


def test_ends_of_deepspeed_s_own_tests_are_told_apart(bench: Any, tmp_path: Path) -> None:
    judge = bench("deepspeed_tests")
    inside = "AttributeError: 'Optimizer' object has no attribute 'averaged_gradients'"
    ends = [
        ("a.py::test_it[1]", "passed", ""),
        ("a.py::test_it[2]", "failed", "AssertionError: assert 1 == 2"),
        ("a.py::test_it[3]", "failed", inside),
        ("a.py::test_gpu", "skipped", "needs a GPU"),
        ("a.py::test_too", "failed", "ValueError: no fp16 here"),
        ("a.py::test_ends_badly", "passed", ""),
        ("a.py::test_ends_badly", "failed", "OSError: its clean-up"),
        ("a.py::test_pipe", "failed", "NotThere: the adapter has no deepspeed.pipe.LayerSpec"),
        ("a.py::test_name", "failed", "NotThere: the adapter has no deepspeed.zero.Init"),
    ]
    record, reference = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    keys = ("name", "outcome", "detail")
    record.write_text("".join(json.dumps(dict(zip(keys, end, strict=True))) + "\n" for end in ends))
    theirs = {"name": "a.py::test_too", "outcome": "failed", "detail": "ValueError: not here"}
    reference.write_text(json.dumps(theirs) + "\n")
    rows = judge.rows_of(record, reference)
    assert sum((judge.counts_of(row) for row in rows[1:]), judge.counts_of(rows[0])) == {
        "passed": 1, "failed": 3, "not applicable": 4,
    }  # fmt: skip
    text = judge.table(rows)
    assert "| a.py | 1 | 3 | 4 |" in text
    assert "| all | 1 | 3 | 4 |" in text
    assert "| not applicable | looks inside: averaged_gradients | 1 | a::test_it (1) |" in text
    assert "| not applicable | skips itself: needs a GPU | 1 |" in text
    assert "| not applicable | fails under DeepSpeed itself, too: ValueError: not here | 1" in text
    assert "| not applicable | pipeline parallelism, which is refused | 1 |" in text
    assert "| failed | OSError: its clean-up | 1 | a::test_ends_badly (1) |" in text
    assert "| failed | NotThere: the adapter has no deepspeed.zero.Init | 1 |" in text
