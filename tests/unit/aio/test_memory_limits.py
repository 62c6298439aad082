"""Memory that cgroups leave: both versions, every ancestor, page cache that yields. A slab is
refused before the kernel kills."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from infinity.aio import _memory_limits as memory_limits
from infinity.aio._memory_limits import CgroupLimit, cgroup_limits, check_slab, memory_left_bytes

ROOT = Path(__file__).parents[3]
MIB = 1 << 20


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_version_2_counts_every_ancestor_and_takes_page_cache_for_free(tmp_path):
    proc = write(tmp_path / "proc", {"self/cgroup": "0::/a/b\n"})
    cgroups = write(
        tmp_path / "cg",
        {
            "a/memory.max": "1000\n",
            "a/memory.current": "900\n",
            "a/memory.stat": "anon 100\ninactive_file 300\nactive_file 200\nfile 700\n",
            "a/b/memory.max": "max\n",
            "a/b/memory.current": "10\n",
        },
    )
    (limit,) = cgroup_limits(proc=proc, cgroups=cgroups)
    assert limit == CgroupLimit(str(cgroups / "a"), 1000, 900, 500)
    assert limit.left_bytes == 600


def test_version_1_and_its_number_for_no_limit(tmp_path):
    proc = write(tmp_path / "proc", {"self/cgroup": "9:cpu:/x\n4:hugetlb,memory:/x/y\n0::/\n"})
    cgroups = write(
        tmp_path / "cg",
        {
            "unified/cgroup.controllers": "",
            "memory/memory.limit_in_bytes": "9223372036854771712",
            "memory/memory.usage_in_bytes": "5",
            "memory/x/y/memory.limit_in_bytes": "4096",
            "memory/x/y/memory.usage_in_bytes": "5000",
            "memory/x/y/memory.stat": "inactive_file 9\ntotal_inactive_file "
            "1000\ntotal_active_file 500\nshort\n",
        },
    )
    (limit,) = cgroup_limits(proc=proc, cgroups=cgroups)
    assert (limit.limit_bytes, limit.used_bytes, limit.left_bytes) == (4096, 5000, 596)


def test_a_path_that_is_the_host_s_still_finds_the_root_of_the_container(tmp_path):
    proc = write(tmp_path / "proc", {"self/cgroup": "0::/kubepods/pod1/abc\n"})
    cgroups = write(tmp_path / "cg", {"memory.max": "7", "memory.current": "9"})
    (limit,) = cgroup_limits(proc=proc, cgroups=cgroups)
    assert limit.left_bytes == 0


def test_without_cgroups_there_is_no_limit(tmp_path):
    assert cgroup_limits(proc=tmp_path, cgroups=tmp_path) == []
    assert memory_left_bytes() > 0


def test_the_tightest_limit_counts_and_is_named(monkeypatch):
    limits = [CgroupLimit("/cg/a", 100 * MIB, 40 * MIB), CgroupLimit("/cg", 80 * MIB, 70 * MIB)]
    monkeypatch.setattr(memory_limits, "cgroup_limits", lambda: limits)
    assert memory_limits.cgroup_limit_bytes() == 80 * MIB
    assert memory_left_bytes() == 10 * MIB
    check_slab(10 * MIB)
    with pytest.raises(
        MemoryError,
        match=r"slab of 12 MiB.*/cg \(80 MiB\) leaves 10 MiB.*2 MiB are missing.*Policy\.ram",
    ):
        check_slab(12 * MIB)


@pytest.fixture
def cgroup() -> Iterator[tuple[Path, str]]:
    """A memory cgroup of our own with a limit of 256 MiB: its directory, and whether v1 or v2."""
    name = f"infinity-test-{uuid.uuid4().hex[:8]}"
    made = None
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, inner = line.split(":", 2)
        if "memory" in controllers.split(","):
            made = (
                Path("/sys/fs/cgroup/memory") / inner.lstrip("/") / name,
                "memory.limit_in_bytes",
            )
        elif controllers == "" and Path("/sys/fs/cgroup/memory.stat").exists():
            made = (Path("/sys/fs/cgroup") / inner.lstrip("/") / name, "memory.max")
    if made is None:
        pytest.skip("NOT TESTED: no memory cgroup here")
    folder, limit = made
    try:
        folder.mkdir()
        (folder / limit).write_text(str(256 * MIB))
    except OSError as error:
        if folder.is_dir():
            folder.rmdir()
        pytest.skip(f"NOT TESTED: no memory cgroup can be made here: {error}")
    try:
        yield folder, limit
    finally:
        folder.rmdir()


def run_in(folder: Path, code: str) -> subprocess.CompletedProcess[str]:
    start = f"from pathlib import Path\nPath({str(folder / 'cgroup.procs')!r}).write_text('0')\n"
    return subprocess.run(
        [sys.executable, "-c", start + textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


@pytest.mark.privileged
def test_in_a_real_cgroup_a_slab_above_the_limit_is_an_error(cgroup):
    folder, _ = cgroup
    done = run_in(
        folder,
        """
        from infinity.aio import Slab
        from infinity._src.memory.ledger import memory_left_bytes
        with Slab(64 << 20) as slab:
            slab.array("u1")[:] = 1
        assert memory_left_bytes() <= 256 << 20
        try:
            Slab(400 << 20)
        except MemoryError as error:
            print(error)
        """,
    )
    assert done.returncode == 0, done.stderr
    assert "cgroup" in done.stdout
    assert "(256 MiB)" in done.stdout
    # The same without the check: what it protects from.
    done = run_in(
        folder,
        """
        import infinity.aio._slab as slab
        slab.check_slab = lambda size_bytes: None
        slab.Slab(400 << 20)
        """,
    )
    assert done.returncode == -signal.SIGKILL
    assert done.stderr == ""


@pytest.mark.privileged
def test_in_a_real_cgroup_page_cache_does_not_count_as_taken(cgroup, tmp_path):
    folder, _ = cgroup
    done = run_in(
        folder,
        f"""
        from infinity.aio._memory_limits import cgroup_limits
        path = Path({str(tmp_path / "cached")!r})
        with path.open("wb") as file:
            for _ in range(600):
                file.write(bytes(1 << 20))
        (limit,) = [limit for limit in cgroup_limits() if limit.limit_bytes == 256 << 20]
        print(limit.used_bytes >> 20, limit.left_bytes >> 20)
        """,
    )
    assert done.returncode == 0, done.stderr
    used, left = map(int, done.stdout.split())
    assert used > 200
    assert left > 150
