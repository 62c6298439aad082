"""Parts of the script that measures checkpoints, on a model of a few parameters; whole runs are
made by hand."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

BENCH = Path(__file__).parents[3] / "bench"
TINY = {"hidden": 64, "layers": 1, "vocab": 64, "tokens": 4, "steps": 2, "warmup": 1}
NAMES = (
    "arm_infinity",
    "arm_plain",
    "arm_save",
    "arm_save_torch",
    "checkpoints",
    "compare_deepspeed",
    "harness",
    "meter",
    "r1",
)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Gives a script by its name, imported as scripts import each other."""
    monkeypatch.syspath_prepend(str(BENCH))
    yield importlib.import_module
    for name in (*NAMES, "drive", "arm_predict"):
        sys.modules.pop(name, None)


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


def test_torch_saves_the_same_states_and_restores_them(bench: Any, tmp_path: Path) -> None:
    import torch

    arm_plain, arm_save_torch, workload = (
        bench("arm_plain"),
        bench("arm_save_torch"),
        bench("r1").Workload(**TINY),
    )
    first, second = (arm_plain.build(workload, "adamw") for _ in range(2))
    first.step()
    record = arm_save_torch.save_once(first, tmp_path / "checkpoint")
    assert record["bytes"] >= record["bytes_copied"] >= 14 * workload.parameters
    second.load_states(torch.load(tmp_path / "checkpoint" / arm_save_torch.NAME, weights_only=True))
    assert [first.step() for _ in range(2)] == [second.step() for _ in range(2)]


def test_what_training_lost_is_the_call_and_the_longer_steps(bench: Any) -> None:
    assert bench("arm_save").stall_s(0.5, [3.0, 2.5], [2.0, 2.0]) == pytest.approx(2.0)


def test_ratios_are_of_one_round_and_errors_are_told(bench: Any, tmp_path: Path) -> None:
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
        "median": 0.25,
        "least": 0.25,
        "most": 0.25,
        "count": 1,
    }
    assert summary["arms"]["deepspeed"]["errors"] == {"save": "RuntimeError: no"}
    assert summary["arms"]["infinity"]["figures"]["losses_apart"]["median"] == 0.5
    checkpoints.show(bench("r1").Workload(**TINY), summary)
    log = f"python x ended with 1:\n  File {tmp_path}/x\nOSError: {tmp_path}/y is full\nchatter"
    assert checkpoints.reason(harness.BenchError(log), tmp_path) == "OSError: DIR/y is full"
    late = harness.BenchError("python x --dir=y took more than 5 s")
    assert checkpoints.reason(late, tmp_path) == "the process took more than 5 s"


def test_every_arm_gets_the_threshold_and_options_may_have_underscores(bench: Any) -> None:
    workload = bench("r1").Workload(**TINY, clip=100.0)
    assert "--clip=100.0" in workload.arguments()
    parsed = bench("compare_deepspeed").parse_arm("infinity:durable=on:durable_every=8")
    assert parsed == ("infinity", ["--durable=on", "--durable-every=8"])


def test_speculating_always_outlives_the_steps_that_would_end_it(
    bench: Any, tmp_path: Path
) -> None:
    import infinity as inf

    arm_infinity, workload = bench("arm_infinity"), bench("r1").Workload(**TINY, clip=1e-3)
    policy = inf.Policy(
        params="nvme", optim="nvme", nvme=[tmp_path], ram="min", update="backward", generations=2
    )
    training = arm_infinity.build(workload, policy, always=True)
    withdrawn = []
    for _ in range(4):
        before = arm_infinity.counters(training.handle)["updates_withdrawn"]
        training.step()
        withdrawn.append(arm_infinity.counters(training.handle)["updates_withdrawn"] - before)
    training.handle.close()
    assert all(withdrawn[1:])
