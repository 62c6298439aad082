"""Choice of the executor that is opened, its reason, and the messages about it."""

from __future__ import annotations

import errno
import logging
import os

import pytest

from infinity import aio
from infinity._src.cabi import native
from infinity._src.cabi.installation import install_line
from infinity.aio import _open_executor
from infinity.aio import _probe as probe
from tests.unit.aio.child import run_python
from tests.unit.aio.rig import BACKENDS

POOLS = {"small": aio.PoolSpec(2, 8192), "large": aio.PoolSpec(2, 65536)}


@pytest.fixture
def file(tmp_path):
    with aio.SwapFile.create(tmp_path) as swap:
        yield swap


def test_auto_opens_the_best_backend(file):
    executor = aio.open_executor([file], **POOLS)
    assert executor.backend == BACKENDS[0]
    assert executor.backend_reason == "" or BACKENDS[0] != "io_uring"
    executor.close()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_named_backend_is_opened(file, backend):
    executor = aio.open_executor([file], backend=backend, **POOLS)
    assert executor.backend == backend
    assert executor.pool_bytes == 2 * 8192 + 2 * 65536
    executor.close()


@pytest.mark.parametrize("backend", [*BACKENDS, "auto"])
def test_pools_that_do_not_fit_are_a_memory_error(file, backend, caplog):
    with pytest.raises(MemoryError, match=r"pools|slab"):
        aio.open_executor(
            [file], backend=backend, small=aio.PoolSpec(0, 0), large=aio.PoolSpec(4, 1 << 45)
        )
    assert caplog.text == ""


def test_an_unknown_backend_and_bad_options_are_value_errors(file):
    with pytest.raises(ValueError, match="must be one of"):
        aio.open_executor([file], backend="libaio", **POOLS)
    for options in ({"workers": 0}, {"depth": 1}, {"block_bytes": 1000}, {"block_bytes": 2 << 30}):
        with pytest.raises(ValueError, match="must be"):
            aio.open_executor([file], **POOLS, **options)
    with pytest.raises(ValueError, match="4096"):
        aio.PoolSpec(1, 100)
    with pytest.raises(ValueError, match="larger"):
        aio.open_executor([file], small=aio.PoolSpec(1, 8192), large=aio.PoolSpec(1, 4096))


@pytest.mark.skipif("io_uring" not in BACKENDS, reason="no io_uring here")
def test_without_io_uring_auto_steps_down_says_so_once_and_a_forced_one_fails(
    file, monkeypatch, caplog
):
    def missing(ffi, lib):
        raise OSError("no wheel for this machine")

    monkeypatch.setattr("infinity.aio._executor.load_uring", missing)
    monkeypatch.setattr(_open_executor, "_logged", set())
    with caplog.at_level(logging.WARNING, "infinity.aio"):
        for _ in range(2):
            executor = aio.open_executor([file], **POOLS)
            assert executor.backend == "threads"
            assert "no wheel" in executor.backend_reason
            executor.close()
    assert caplog.text.count("no wheel") == 1
    with pytest.raises(OSError, match=r"io_uring.*requested"):
        aio.open_executor([file], backend="io_uring", **POOLS)


# : The sysctl is of the whole machine: this process sees a file over it, and its filter does what
# the kernel would do.
SYSCTL = """
import subprocess
assert ctypes.CDLL(None).unshare(0x20000) == 0
subprocess.run(["mount", "--make-rprivate", "/"], check=True)
import pathlib
pathlib.Path(shown).write_text("2")
subprocess.run(["mount", "--bind", shown, "/proc/sys/kernel/io_uring_disabled"], check=True)
"""

OPEN_AUTO = """
with aio.SwapFile.create({directory!r}) as file:
    executor = aio.open_executor([file], small=aio.PoolSpec(1, 4096), large=aio.PoolSpec(1, 8192))
    assert executor.backend_reason == executor.stats().backend_reason
    print(executor.backend)
    print(executor.backend_reason)
    executor.close()
"""


@pytest.mark.skipif("io_uring" not in BACKENDS, reason="no io_uring here")
@pytest.mark.parametrize(
    ("code", "said", "probed_as", "sysctl"),
    [
        (errno.EPERM, "not permitted", "seccomp", False),
        (errno.EPERM, "not permitted", "kernel.io_uring_disabled", True),
        (errno.ENOSYS, "not implemented", "built without it", False),
    ],
    ids=["seccomp", "sysctl", "no_such_call"],
)
def test_a_kernel_that_forbids_io_uring_is_stepped_over_and_says_why(
    tmp_path, code, said, probed_as, sysctl
):
    if sysctl and os.getuid() != 0:
        pytest.skip("needs root to show another sysctl to a process")
    done = run_python(
        f"""
import ctypes, struct
from infinity import aio
from infinity.aio import _probe as probe
shown = {str(tmp_path / "shown")!r}
{SYSCTL if sysctl else ""}
# BPF: io_uring_setup (425) returns an errno, as container runtimes do.
program = b"".join(struct.pack("HBBI", *line) for line in (
    (0x20, 0, 0, 0), (0x15, 0, 1, 425),
    (0x06, 0, 0, 0x00050000 | {code}), (0x06, 0, 0, 0x7FFF0000)))
buffer = ctypes.create_string_buffer(program)
filter = struct.pack("HxxxxxxQ", 4, ctypes.addressof(buffer))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0
assert libc.prctl(22, 2, ctypes.c_char_p(filter), 0, 0) == 0
print(probe.probe_engine().io_uring_reason)
"""
        + OPEN_AUTO.format(directory=str(tmp_path))
    )
    assert done.returncode == 0, done.stderr
    probed, backend, reason = done.stdout.splitlines()
    assert backend == "threads"
    assert said in reason
    assert probed_as in probed
    assert done.stderr.count("no io_uring backend") <= 1


def test_without_the_wheel_threads_take_over_and_the_reason_names_it(tmp_path):
    hidden = 'import sys; sys.modules["liburing"] = None\nfrom infinity import aio\n'
    done = run_python(hidden + OPEN_AUTO.format(directory=str(tmp_path)))
    assert done.returncode == 0, done.stderr
    backend, reason = done.stdout.splitlines()
    assert backend == "threads"
    assert "package liburing" in reason


@pytest.mark.parametrize("backend", ["auto", "io_uring", "threads"])
def test_without_the_extension_nothing_opens_and_the_error_names_the_command(tmp_path, backend):
    hidden = 'import sys; sys.modules["infinity._native"] = None\nfrom infinity import aio\n'
    done = run_python(
        hidden
        + OPEN_AUTO.format(directory=str(tmp_path)).replace(
            "large=", f"backend={backend!r}, large="
        )
    )
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ImportError: infinity's C extension is missing or does not load")
    assert install_line("", "--force-reinstall", "--no-deps") in last


def test_where_no_backend_can_be_had_the_error_names_the_reason_of_each(file, monkeypatch):
    def refuses(*arguments, backend, **options):
        raise OSError(f"{backend} is out")

    monkeypatch.setattr(_open_executor, "Executor", refuses)
    with pytest.raises(
        OSError, match="no io_uring backend: io_uring is out; no threads backend: threads is out"
    ):
        aio.open_executor([file], **POOLS)


@pytest.mark.skipif("io_uring" not in BACKENDS, reason="no io_uring here")
def test_without_locked_memory_the_slab_works_unregistered(tmp_path):
    if os.getuid() != 0:
        pytest.skip("needs root to become nobody")
    done = run_python(f"""
        import os, resource
        from pathlib import Path
        import numpy as np
        from infinity import aio
        from tests.unit.aio.rig import *
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (8 << 20, 8 << 20))
        file = aio.SwapFile.create({str(tmp_path)!r})
        # Imports, and codecs, which nobody may not read later.
        values = {{i: random_chunk(np.random.default_rng(i)) for i in range(6)}}
        Rig(Path("/"), "io_uring", files=[file]).executor.close()
        b"".decode("ascii")
        os.setuid(65534)
        rig = Rig(Path("/"), "io_uring", files=[file], pools=(1024, 1024))  # 56 MiB
        rig.store(values).wait(20)
        assert all(same(rig.read(i), values[i]) for i in range(6))
        stats = rig.executor.stats()
        print(rig.executor.backend, stats.registered, stats.registered_reason)
        rig.close()
    """)
    assert done.returncode == 0, done.stderr
    backend, registered, reason = done.stdout.strip().split(" ", 2)
    assert (backend, registered) == ("io_uring", "False")
    assert reason
    assert "huge" in reason or "memory" in reason.lower() or "memlock" in reason.lower()


@pytest.mark.skipif("io_uring" not in BACKENDS, reason="no io_uring here")
def test_too_few_threads_are_an_error_that_leaves_none_behind(tmp_path):
    done = run_python(
        f"""
        import os, resource
        from infinity import aio
        from infinity.aio._executor import Executor
        file = aio.SwapFile.create({str(tmp_path)!r})
        pools = dict(small=aio.PoolSpec(0, 0), large=aio.PoolSpec(4, 1 << 20))
        threads = len(os.listdir("/proc/self/task"))
        pages = int(open("/proc/self/statm").read().split()[0])
        limit = pages * os.sysconf("SC_PAGE_SIZE") + (256 << 20)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        try:
            Executor([file], backend="threads", threads_per_drive=500, **pools)
        except Exception as error:
            print(repr(error))
        print(len(os.listdir("/proc/self/task")) - threads)
        """
    )
    assert "Resource temporarily unavailable" in done.stdout.splitlines()[0], done.stderr
    assert done.stdout.splitlines()[1] == "0", done.stdout


def test_a_library_without_the_symbols_is_an_error_that_names_one(monkeypatch, tmp_path):
    code = """
        import ctypes.util
        from infinity._src.cabi.native import ffi, lib
        why = ffi.new("char[512]")
        assert lib.inf_uring_load(b"/nowhere/liburing.so", why, 512) == -1
        print(ffi.string(why).decode())
        assert lib.inf_uring_load(ctypes.util.find_library("m").encode(), why, 512) == -1
        print(ffi.string(why).decode())
        assert lib.inf_uring_probe() == -38
    """
    done = run_python(code)
    assert done.returncode == 0, done.stderr
    missing, incomplete = done.stdout.splitlines()
    assert "/nowhere/liburing.so" in missing
    assert "does not export io_uring_queue_init_params" in incomplete


def test_the_probe_says_what_a_directory_gives(tmp_path):
    found = probe.probe_directory(tmp_path)
    assert found.usable
    assert found.reason == ""
    assert found.file_system
    assert found.free_bytes > 0
    assert list(tmp_path.iterdir()) == []
    missing = probe.probe_directory(tmp_path / "nowhere")
    assert not missing.usable
    assert "does not exist" in missing.reason


def test_the_probe_of_the_engine_agrees_with_what_opens():
    found = probe.probe_engine()
    assert found.native == ("threads" in BACKENDS)
    assert found.io_uring == ("io_uring" in BACKENDS)
    assert bool(found.io_uring_reason) != found.io_uring


def test_spans_have_one_layout_in_c_and_python():
    ffi, _ = native.load()
    assert ffi.sizeof("inf_span") == aio.SPAN.itemsize
    assert aio.SPAN.fields is not None
    for name in aio.SPAN.names or ():
        assert ffi.offsetof("inf_span", name) == aio.SPAN.fields[name][1]


def test_aio_imports_without_torch():
    code = (
        "import sys, infinity.aio, infinity.aio._probe; assert 'torch' not in sys.modules; assert "
        "'aio' not in sys.modules"
    )
    done = run_python(code, fresh=True)
    assert done.returncode == 0, done.stderr
