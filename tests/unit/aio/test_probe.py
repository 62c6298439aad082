"""Every reason for less than the best is detected and reported. Tests create its cause for real
where that harms no other process."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from infinity import aio
from infinity._src.cabi import native
from infinity.aio import _probe as probe
from tests.unit.aio.child import run_python
from tests.unit.aio.rig import BACKENDS

NEEDS_RING = pytest.mark.skipif("io_uring" not in BACKENDS, reason="no io_uring here")
POOLS = {"small": aio.PoolSpec(2, 8192), "large": aio.PoolSpec(2, 65536)}


def proc_with(root: Path, *, disabled: str | None, seccomp: str) -> Path:
    """A /proc as a machine with these settings has it; the real sysctl is everybody's."""
    (root / "sys" / "kernel").mkdir(parents=True)
    (root / "self").mkdir()
    if disabled is not None:
        (root / "sys" / "kernel" / "io_uring_disabled").write_text(disabled + "\n")
    (root / "self" / "status").write_text(
        f"Name:\tpython\nSeccomp:\t{seccomp}\nSeccomp_filters:\t1\n"
    )
    return root


@pytest.mark.parametrize(
    ("disabled", "seccomp", "said"),
    [
        ("2", "2", "io_uring_disabled=2 forbids it to all users"),
        ("1", "0", "io_uring_disabled=1 allows it to kernel.io_uring_group"),
        ("0", "2", "a seccomp filter forbids it"),
        (None, "2", "a seccomp filter forbids it"),
        ("0", "0", "a security module"),
    ],
)
def test_who_forbids_io_uring_is_told_apart(tmp_path, disabled, seccomp, said):
    reason = probe._ring_reason(
        errno.EPERM, proc_with(tmp_path, disabled=disabled, seccomp=seccomp)
    )
    assert said in reason
    assert "Operation not permitted" in reason


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (errno.ENOSYS, "built without it"),
        (errno.ENOMEM, "ulimit -l"),
        (errno.EMFILE, "ulimit -n"),
        (errno.EIO, "no ring"),
    ],
)
def test_other_causes_have_their_own_words(code, said):
    assert said in probe._ring_reason(code)
    assert probe._ring_reason(0) == ""


def test_an_unreadable_proc_is_taken_for_a_container_s(tmp_path):
    assert "seccomp" in probe._ring_reason(errno.EPERM, tmp_path)


@NEEDS_RING
def test_without_the_wheel_the_probe_and_the_executor_say_so(tmp_path):
    done = run_python(f"""
        import sys
        sys.modules["liburing"] = None  # as if it were not installed
        from infinity import aio
        from infinity.aio import _probe as probe
        found = probe.probe_engine()
        print(found.io_uring, found.io_uring_reason)
        pools = dict(small=aio.PoolSpec(1, 4096), large=aio.PoolSpec(1, 8192))
        opened = probe.probe_executor({str(tmp_path)!r}, **pools)
        print(opened.backend, opened.backend_reason)
    """)
    assert done.returncode == 0, done.stderr
    probed, opened = done.stdout.splitlines()
    assert probed.startswith("False the package liburing is not usable here")
    assert "pip install" in probed
    assert opened.startswith("threads no io_uring backend")


@NEEDS_RING
def test_a_wheel_without_the_symbols_is_named(tmp_path):
    done = run_python(f"""
        import ctypes.util, sys, types
        package, carrier = types.ModuleType("liburing"), types.ModuleType("liburing.liburing")
        carrier.__file__ = ctypes.util.find_library("m")  # a library, but another one
        package.liburing = carrier
        sys.modules["liburing"], sys.modules["liburing.liburing"] = package, carrier
        from infinity import aio
        from infinity.aio import _probe as probe
        print(probe.probe_engine().io_uring_reason)
        pools = dict(small=aio.PoolSpec(1, 4096), large=aio.PoolSpec(1, 8192))
        print(probe.probe_executor({str(tmp_path)!r}, **pools).backend)
    """)
    assert done.returncode == 0, done.stderr
    reason, backend = done.stdout.splitlines()
    assert "does not export io_uring_queue_init_params" in reason
    assert "pip install" in reason
    assert backend == "threads"


def test_without_the_extension_the_reason_is_that(tmp_path, monkeypatch):
    monkeypatch.setattr(native, "_reason", "infinity's C extension is missing: run this")
    found = probe.probe_engine()
    assert not found.native
    assert found.native_reason == "infinity's C extension is missing: run this"
    assert found.native_reason == found.io_uring_reason
    assert probe.probe_executor(tmp_path, **POOLS).error == found.native_reason


def test_a_process_that_may_have_no_huge_pages_is_told(tmp_path):
    done = run_python("""
        import ctypes
        assert ctypes.CDLL(None).prctl(41, 1, 0, 0, 0) == 0  # PR_SET_THP_DISABLE
        from infinity.aio import _probe as probe
        print(probe.probe_engine().huge_pages_work)
    """)
    assert done.stdout.split() == ["False"], done.stderr


def test_the_executor_that_training_would_get_is_opened(tmp_path):
    found = probe.probe_executor(tmp_path, **POOLS)
    assert found.error == ""
    assert found.backend == BACKENDS[0]
    assert found.pool_bytes == 2 * 8192 + 2 * 65536
    assert found.registered == (found.registered_reason == "")
    assert "does not exist" in probe.probe_executor(tmp_path / "gone", **POOLS).error
    huge = probe.probe_executor(tmp_path, small=aio.PoolSpec(0, 0), large=aio.PoolSpec(4, 1 << 45))
    assert "slab" in huge.error


def test_a_directory_says_what_its_drive_takes(tmp_path):
    found = probe.probe_directory(tmp_path)
    assert found.direct == (found.direct_reason == "")
    assert found.preallocates
    assert (found.block_bytes, found.depth) == found.limits.fit(probe.BLOCK_BYTES, probe.DEPTH)
