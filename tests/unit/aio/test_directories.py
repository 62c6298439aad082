"""Directories that differ by rank."""

from __future__ import annotations

from pathlib import Path

import pytest

from infinity import Policy
from infinity.aio._swap_file import is_directory_pattern, resolve_directories


def test_a_policy_takes_patterns_before_ranks_are_known_and_refuses_other_braces(monkeypatch):
    policy = Policy(params="nvme", nvme=["/mnt/nvme{local_rank}", "/mnt/all/{rank}", "/mnt/shared"])
    assert [str(path) for path in policy.directories] == [
        "/mnt/nvme{local_rank}",
        "/mnt/all/{rank}",
        "/mnt/shared",
    ]
    for wrong in (
        "/mnt/{node}",
        "/mnt/{}",
        "/mnt/{rank",
        "/mnt/rank}",
        "/mnt/{{rank}}",
        "/mnt/{local_{rank}rank}",
    ):
        with pytest.raises(
            ValueError, match=r"unknown braces; '\{rank\}' stands for"
        ) as caught:
            Policy(params="nvme", nvme=wrong)
        assert repr(wrong) in str(caught.value)
    with pytest.raises(ValueError, match="names a directory twice"):
        Policy(params="nvme", nvme=["/mnt/{rank}", "/mnt/{rank}"])
    durable = {"params": "nvme", "optim": "nvme", "durable": True}
    with pytest.raises(ValueError, match="manifests of all ranks in the first directory"):
        Policy(**durable, nvme=["/mnt/{rank}", "/mnt/all"])
    assert Policy(**durable, nvme=["/mnt/all", "/mnt/{rank}"]).durable
    monkeypatch.setenv("INFINITY_NVME_DIR", "/mnt/nvme{local_rank}")
    assert Policy(params="nvme").directories == (Path("/mnt/nvme{local_rank}"),)


def test_each_rank_gets_its_own(tmp_path):
    for name in ("rank3", "local1", "shared"):
        (tmp_path / name).mkdir()
    given = [tmp_path / "rank{rank}", tmp_path / "local{local_rank}", tmp_path / "shared"]
    assert [is_directory_pattern(path) for path in given] == [True, True, False]
    found = resolve_directories(given, rank=3, local_rank=1)
    assert found == (tmp_path / "rank3", tmp_path / "local1", tmp_path / "shared")


def test_what_is_missing_is_named_with_its_pattern_and_rank(tmp_path):
    (tmp_path / "file2").touch()
    with pytest.raises(ValueError, match="does not exist") as caught:
        resolve_directories([tmp_path / "x{rank}"], rank=2, local_rank=0)
    assert f"nvme='{tmp_path}/x{{rank}}' is '{tmp_path}/x2' on rank 2 (local rank 0)" in str(
        caught.value
    )
    with pytest.raises(ValueError, match="is not a directory"):
        resolve_directories([tmp_path / "file{rank}"], rank=2, local_rank=0)
    # A path without a pattern is not checked here: opening it raises the error.
    assert resolve_directories([tmp_path / "missing"], rank=0, local_rank=0) == (
        tmp_path / "missing",
    )


def test_two_patterns_that_are_one_directory_on_a_rank_are_refused_there(tmp_path):
    for name in ("0", "1"):
        (tmp_path / name).mkdir()
    given = [tmp_path / "{rank}", tmp_path / "{local_rank}"]
    assert resolve_directories(given, rank=1, local_rank=0) == (tmp_path / "1", tmp_path / "0")
    with pytest.raises(
        ValueError, match=r"are both '.*/1' on rank 1 \(local rank 1\): name each directory once"
    ) as caught:
        resolve_directories(given, rank=1, local_rank=1)
    assert f"nvme='{tmp_path}/{{rank}}' and '{tmp_path}/{{local_rank}}'" in str(caught.value)
    (tmp_path / "link").symlink_to(tmp_path / "1")
    with pytest.raises(ValueError, match="are both"):
        resolve_directories([tmp_path / "link", tmp_path / "{rank}"], rank=1, local_rank=0)
