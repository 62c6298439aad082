"""Number of threads of updates: the default, and the user's setting."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import infinity as inf
from infinity._src.engine import storage
from infinity._src.memory import numa
from infinity._src.memory.roofline import update_threads


@pytest.mark.parametrize(
    ("cpus", "ranks", "threads"), [(2, 1, 1), (64, 1, 16), (64, 8, 2), (16, 8, 1), (128, 2, 16)]
)
def test_ranks_on_the_cpu_share_a_quarter_of_its_processors(
    cpus: int, ranks: int, threads: int
) -> None:
    assert update_threads(cpus, cpus // 2, ranks, on_gpu=False) == threads


@pytest.mark.parametrize(
    ("cores", "ranks", "threads"), [(1, 1, 1), (2, 1, 1), (32, 1, 31), (128, 8, 15), (4, 8, 1)]
)
def test_beside_gpus_ranks_share_the_cores_and_leave_one_to_python(
    cores: int, ranks: int, threads: int
) -> None:
    assert update_threads(2 * cores, cores, ranks, on_gpu=True) == threads


def test_hyper_threads_of_a_core_count_once(tmp_path: Path) -> None:
    for cpu in range(8):
        folder = tmp_path / f"sys/devices/system/cpu/cpu{cpu}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{cpu % 4},{cpu % 4 + 4}\n")
    assert numa.core_count(range(8), tmp_path) == 4
    assert numa.core_count([0, 1, 5], tmp_path) == 2
    assert numa.core_count([0, 1, 99], tmp_path) == 3


@pytest.mark.parametrize(("seen", "ranks", "of"), [(64, 8, 8), (8, 8, 1), (32, 2, 1), (33, 2, 2)])
def test_a_rank_that_its_launcher_has_bound_has_its_share_already(
    seen: int, ranks: int, of: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(seen)))
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(numa, "core_count", lambda cpus: len(cpus))
    assert storage.default_update_threads(ranks, on_gpu=True) == max(1, seen // of - 1)


@pytest.mark.parametrize("wrong", [0, -1, 2.0, True, 513])
def test_other_numbers_are_refused(wrong: object) -> None:
    with pytest.raises(ValueError, match="update_threads"):
        inf.Policy(update_threads=wrong)  # type: ignore[arg-type]


def test_a_model_has_as_many_as_its_policy_says() -> None:
    def made(threads: int) -> int:
        before = len(list(Path("/proc/self/task").iterdir()))
        model = inf.offload(torch.nn.Linear(8, 8), inf.Policy(update_threads=threads))
        try:
            return len(list(Path("/proc/self/task").iterdir())) - before
        finally:
            inf.handle(model).close()

    made(1)  # torch may begin threads of its own
    assert made(4) - made(1) == 3
