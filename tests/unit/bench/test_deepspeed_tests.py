"""The script that runs DeepSpeed's own tests with the adapter in its place."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).parents[3] / "bench"
SCRIPT = BENCH / "compat" / "deepspeed_tests.py"

TESTS = '''
import os
import pytest
import torch
import deepspeed
import deepspeed.comm as dist
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.parameter_offload import Buckets
from unit.common import DistributedFixture, DistributedTest, allclose_on_all_ranks


class two_ranks_prepare(DistributedFixture):
    world_size = 2

    def run(self, class_tmpdir):
        (class_tmpdir / f"{dist.get_rank()}").write_text("prepared", encoding="utf-8")


class TestRanks(DistributedTest):
    world_size = 2

    @pytest.mark.parametrize("size", [3, 4])
    def test_ranks_meet(self, two_ranks_prepare, class_tmpdir, size):
        assert sorted(os.listdir(class_tmpdir)) == ["0", "1"]
        total = torch.full((size,), float(dist.get_rank()))
        dist.all_reduce(total)
        allclose_on_all_ranks(total, torch.ones(size))

    @pytest.mark.world_size(1)
    def test_one_rank_by_mark(self):
        assert os.environ["WORLD_SIZE"] == "1"

    def test_one_of_two_fails(self):
        if dist.get_rank():
            raise RuntimeError("rank 1 cannot")
        dist.barrier()

    @pytest.mark.world_size(8)
    def test_too_many(self):
        raise AssertionError("starts anyway")

    @pytest.mark.world_size(1)
    def test_skips(self):
        pytest.skip("no such machine")

    @pytest.mark.world_size(1)
    def test_reads_a_field(self):
        torch.nn.Linear(1, 1).averaged_gradients


def test_touches_what_is_not_there():
    isinstance(1, Buckets)


def test_passes_a_class_on():
    class Mine(Buckets):
        pass
'''


def run(checkout: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, SCRIPT, checkout, *options], capture_output=True, text=True, check=False
    )


@pytest.fixture
def judge(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(BENCH / "compat")
    import deepspeed_tests

    return deepspeed_tests


def test_without_a_checkout_there_is_nothing_to_run(
    judge: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), str(tmp_path)])
    assert judge.main() == 0
    assert capsys.readouterr().out.startswith("skipped: give a checkout")


def test_ends_are_told_apart(judge: Any, tmp_path: Path) -> None:
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


@pytest.mark.slow
def test_a_checkout_is_run_over_the_adapter(tmp_path: Path) -> None:
    """Ranks, fixtures of ranks, placeholders: a checkout of one small file."""
    place = tmp_path / "checkout" / "tests" / "unit" / "runtime"
    place.mkdir(parents=True)
    (place.parent / "__init__.py").touch()
    (place / "test_small.py").write_text(TESTS)
    results, table = tmp_path / "results.jsonl", tmp_path / "table.md"
    chosen = ("--files", "runtime/test_small.py", "--limit-s", "60", f"--dir={tmp_path}")
    ended = run(tmp_path / "checkout", *chosen, f"--results={results}", f"--out={table}")
    assert ended.returncode == 1, ended.stdout + ended.stderr
    told = table.read_text()
    assert "| all | 4 | 1 | 4 |" in told, told
    assert "| failed | RuntimeError: rank 1 cannot | 1 |" in told
    assert "skips itself: needs 8 ranks, and this run starts 4 at most | 1 |" in told
    assert "skips itself: no such machine | 1 |" in told
    assert "| not applicable | looks inside: averaged_gradients | 1 |" in told
    (line,) = [json.loads(text) for text in results.read_text().splitlines()]
    assert line["file"] == "runtime/test_small.py"
