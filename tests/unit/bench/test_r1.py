"""The reference workload: its sizes, and the traffic of its mixture of experts."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

BENCH = Path(__file__).parents[3] / "bench"
TINY = {"hidden": 64, "layers": 2, "vocab": 64, "tokens": 8}


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Gives a script by its name, imported as scripts import each other."""
    monkeypatch.syspath_prepend(str(BENCH))
    yield importlib.import_module
    for name in ("arm_infinity", "meter", "r1"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("experts", [0, 4])
def test_sizes_are_those_of_the_model(bench: Any, experts: int) -> None:
    r1 = bench("r1")
    workload = r1.Workload(**TINY, experts=experts)
    sizes = [param.numel() for param in r1.build_on_meta(workload).parameters()]
    assert (sum(sizes), max(sizes)) == (workload.parameters, workload.largest_parameter)


def test_one_expert_is_too_few(bench: Any) -> None:
    with pytest.raises(ValueError, match="experts=1: a token takes 2"):
        bench("r1").Workload(experts=1)


def test_a_step_of_experts_in_vertical_order_reads_what_one_micro_batch_does(
    bench: Any, tmp_path: Path
) -> None:
    import infinity as inf

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
