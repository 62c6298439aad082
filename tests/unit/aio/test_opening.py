"""Which executor is opened, why, and what is said about it."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from infinity import aio
from infinity.aio import native_core, opening, plan, probe
from tests.unit.aio.rig import BACKENDS

POOLS = {"small": aio.PoolSpec(2, 8192), "large": aio.PoolSpec(2, 65536)}
ROOT = Path(__file__).parents[3]


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
        aio.open_executor([file], backend=backend, small=aio.PoolSpec(0, 0), large=aio.PoolSpec(4, 1 << 45))
    assert caplog.text == ""


def test_an_unknown_backend_and_bad_options_are_value_errors(file):
    with pytest.raises(ValueError, match="must be one of"):
        aio.open_executor([file], backend="libaio", **POOLS)
    for options in ({"workers": 0}, {"depth": 1}, {"block_bytes": 1000}, {"block_bytes": 2 << 30}):
        if BACKENDS[0] != "python" or "workers" in options:
            with pytest.raises(ValueError, match="must be"):
                aio.open_executor([file], **POOLS, **options)
    with pytest.raises(ValueError, match="4096"):
        aio.PoolSpec(1, 100)
    with pytest.raises(ValueError, match="larger"):
        aio.open_executor([file], small=aio.PoolSpec(1, 8192), large=aio.PoolSpec(1, 4096))


@pytest.mark.skipif("io_uring" not in BACKENDS, reason="no io_uring here")
def test_without_io_uring_auto_steps_down_says_so_once_and_a_forced_one_fails(file, monkeypatch, caplog):
    def missing(ffi, lib):
        raise OSError("no wheel for this machine")

    monkeypatch.setattr("infinity.aio.native_executor.load_uring", missing)
    monkeypatch.setattr(opening, "_logged", set())
    with caplog.at_level(logging.WARNING, "infinity.aio"):
        for _ in range(2):
            executor = aio.open_executor([file], **POOLS)
            assert executor.backend == "threads"
            assert "no wheel" in executor.backend_reason
            executor.close()
    assert caplog.text.count("no wheel") == 1
    with pytest.raises(OSError, match=r"io_uring.*asked for"):
        aio.open_executor([file], backend="io_uring", **POOLS)


def test_without_the_extension_auto_opens_the_python_executor(file, monkeypatch):
    def missing():
        raise ImportError("No module named 'infinity._native'")

    monkeypatch.setattr("infinity.aio.native_executor.load_native", missing)
    executor = aio.open_executor([file], **POOLS)
    assert executor.backend == "python"
    assert "_native" in executor.backend_reason
    executor.close()
    with pytest.raises(OSError, match="asked for"):
        aio.open_executor([file], backend="threads", **POOLS)


def test_a_python_executor_without_kernel_refuses_updates(file):
    file.grow(65536)
    executor = aio.open_executor([file], backend="python", **POOLS)
    chunk = np.zeros(1, dtype=plan.CHUNK)
    chunk["numel"], chunk["piece_numel"], chunk["section_count"], chunk["run_bytes"] = 1024, 1024, 4, 16384
    chunk["format"], chunk["itemsize"], chunk["section_at"] = 1, (2, 2, 4, 4), (0, 4096, 8192, 12288)
    job = np.zeros(1, dtype=plan.JOB)
    job["chunk"], job["kind"], job["base"] = executor.define(chunk)[0], plan.JobKind.UPDATE, -1
    with pytest.raises(ValueError, match="kernel"):
        executor.submit(job, priority=aio.Priority.WRITEBACK)
    executor.close()


@pytest.mark.skipif("io_uring" not in BACKENDS, reason="no io_uring here")
def test_a_seccomp_filter_that_forbids_io_uring_is_stepped_over_and_named(tmp_path):
    code = f"""
        import ctypes, struct
        from infinity import aio
        from infinity.aio import probe
        # BPF: io_uring_setup (425) returns EPERM, as container runtimes do.
        program = b"".join(struct.pack("HBBI", *line) for line in (
            (0x20, 0, 0, 0), (0x15, 0, 1, 425), (0x06, 0, 0, 0x00050001), (0x06, 0, 0, 0x7FFF0000)))
        buffer = ctypes.create_string_buffer(program)
        filter = struct.pack("HxxxxxxQ", 4, ctypes.addressof(buffer))
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.prctl(38, 1, 0, 0, 0) == 0
        assert libc.prctl(22, 2, ctypes.c_char_p(filter), 0, 0) == 0
        with aio.SwapFile.create({str(tmp_path)!r}) as file:
            executor = aio.open_executor([file], small=aio.PoolSpec(1, 4096), large=aio.PoolSpec(1, 8192))
            print(executor.backend)
            print(executor.backend_reason)
            executor.close()
        print(probe.probe_engine().io_uring_reason)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    backend, reason, probed = done.stdout.splitlines()
    assert backend == "threads"
    assert "not permitted" in reason
    assert "seccomp" in probed


@pytest.mark.skipif("io_uring" not in BACKENDS, reason="no io_uring here")
def test_where_memory_may_not_be_locked_the_slab_goes_unregistered_and_works(tmp_path):
    if os.getuid() != 0:
        pytest.skip("needs root to become nobody")
    code = f"""
        import os, resource
        from pathlib import Path
        import numpy as np
        from infinity import aio
        from tests.unit.aio.rig import *
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (1 << 20, 1 << 20))
        file = aio.SwapFile.create({str(tmp_path)!r})
        value = random_chunk(np.random.default_rng(0))  # imports, before nobody may not
        os.setuid(65534)
        aio.SwapFile.create = lambda directory: file
        rig = Rig(Path("/"), "io_uring", pools=(1024, 1024))
        rig.store({{0: value}}).wait(20)
        assert same(rig.read(0), value)
        print(rig.executor.backend, rig.executor.stats().registered)
        rig.close()
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=ROOT,
    )
    assert done.stdout.split() == ["io_uring", "False"], done.stderr


@pytest.mark.skipif("io_uring" not in BACKENDS, reason="no io_uring here")
def test_a_library_without_the_symbols_is_an_error_that_names_one(monkeypatch, tmp_path):
    code = """
        import ctypes.util
        from infinity.aio.native_core import load_native
        ffi, lib = load_native()
        why = ffi.new("char[512]")
        assert lib.inf_uring_load(b"/nowhere/liburing.so", why, 512) == -1
        print(ffi.string(why).decode())
        assert lib.inf_uring_load(ctypes.util.find_library("m").encode(), why, 512) == -1
        print(ffi.string(why).decode())
        assert lib.inf_uring_probe() == -38
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=ROOT,
    )
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
    try:
        ffi, _ = native_core.load_native()
    except ImportError:
        pytest.skip("no native extension")
    assert ffi.sizeof("inf_span") == aio.SPAN.itemsize
    assert aio.SPAN.fields is not None
    for name in aio.SPAN.names or ():
        assert ffi.offsetof("inf_span", name) == aio.SPAN.fields[name][1]


def test_aio_imports_without_torch():
    code = "import sys, infinity.aio, infinity.aio.probe; assert 'torch' not in sys.modules; assert 'aio' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
