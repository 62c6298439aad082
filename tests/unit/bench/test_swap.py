"""The swap benchmark: what it writes is real, its figures follow the drive, and it leaves nothing
behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from infinity import aio
from infinity._src.base.sizes import MIB
from infinity._src.config.policy import Policy
from infinity._src.measure import command, hardware
from infinity._src.measure.reference import Fio, open_reference, why_no_fio
from infinity._src.measure.streams import CHUNK_BYTES, Content, Sample, is_hole
from infinity._src.measure.swap import Bench, PhaseFigures, Spread, SwapTask, measure_swap
from infinity.errors import AioError, ChecksumError

SMALL = ["--size", "48MiB", "--rounds", "1", "--seconds", "1", "--limit", "off"]


@pytest.fixture(autouse=True)
def _swap_may_lie_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    # Some machines keep /tmp in memory; the figures do not matter here.
    monkeypatch.setenv("INFINITY_ALLOW_TMPFS", "1")


def task(*directories: Path, size: int = 48 * MIB, **values: Any) -> SwapTask:
    return SwapTask(directories, size, **{"rounds": 1, "phase_s": 1.0, **values})


def silent(_phase: str, _share: float) -> None:
    return None


def test_a_measurement_reads_and_writes_what_it_says(tmp_path: Path) -> None:
    phases: list[str] = []
    figures = measure_swap(task(tmp_path, rounds=2), lambda phase, _share: phases.append(phase))
    assert figures.size_bytes == 48 * MIB // CHUNK_BYTES * CHUNK_BYTES
    for phase in figures.phases.values():
        assert len(phase.samples) == 2
        assert min(phase.spread.rounds) > 0
        assert phase.limit is None
    (drive,) = figures.drives
    assert drive.bytes_written >= 3 * figures.size_bytes
    assert drive.bytes_read >= 3 * figures.size_bytes
    assert figures.verified_bytes > 0
    expected = [
        "fill", "verify", "read 1/2", "write 1/2", "mixed 1/2", "read 2/2", "write 2/2",
        "mixed 2/2",
    ]  # fmt: skip
    assert list(dict.fromkeys(phases)) == expected
    assert list(tmp_path.iterdir()) == []


def test_several_drives_are_measured_at_once_and_each_share_is_told(tmp_path: Path) -> None:
    directories = [tmp_path / "a", tmp_path / "b"]
    for directory in directories:
        directory.mkdir()
    figures = measure_swap(task(*directories))
    assert figures.size_bytes >= 45 * MIB
    for phase in figures.phases.values():
        parts = [phase.drive(number).median for number in range(2)]
        assert sum(parts) == pytest.approx(phase.spread.median)
    assert set(figures.settings.bandwidths) == {str(directory) for directory in directories}
    told = figures.as_dict()["phases"]["read"]["drives"]
    assert sum(drive["share"] for drive in told.values()) == pytest.approx(1.0)


@pytest.mark.parametrize("backend", ["auto", "threads"])
def test_without_a_block_size_it_measures_with_what_training_uses(
    tmp_path: Path, backend: str
) -> None:
    figures = measure_swap(
        task(tmp_path, size=24 * MIB, backend=backend, limit="probe", phase_s=0.3)
    )
    with aio.SwapFile.create(tmp_path) as file:
        pools = {"small": aio.PoolSpec(0, 0), "large": aio.PoolSpec(1, CHUNK_BYTES)}
        executor = aio.open_executor(
            [file], **pools, backend=backend, block_bytes=Policy().io_settings.block_bytes
        )
        trained = executor.stats().drives[0].block_bytes
        executor.close()
    assert figures.drives[0].block_bytes == trained
    # No run of the benchmark is longer than a chunk.
    assert figures.block_bytes == min(trained, CHUNK_BYTES)
    assert figures.settings.block_bytes is None
    assert figures.settings.backend == figures.backend
    phase = figures.read
    assert phase.limit_samples[0].drive_bytes[0] % figures.block_bytes == 0
    asked = measure_swap(task(tmp_path, size=24 * MIB, backend=backend, block_bytes=65536))
    assert asked.settings.block_bytes == 65536
    assert asked.block_bytes == 65536


@pytest.mark.parametrize("checksums", ["off", "sample", "full"])
def test_everything_is_read_back_when_asked(tmp_path: Path, checksums: str) -> None:
    figures = measure_swap(task(tmp_path, checksums=checksums, verify_all=True))
    # With checksums also what the rounds wrote.
    assert figures.verified_bytes == figures.size_bytes * (1 if checksums == "off" else 2)
    assert figures.as_dict()["checksums"] == checksums


def test_damage_is_found_when_everything_is_read_back(tmp_path: Path) -> None:
    with Bench(task(tmp_path), silent) as bench:
        with bench.streams(block_bytes=1 << 20, depth=8, verify="full") as streams:
            bench.fill(streams)
            with aio.Slab(4096) as page:
                os.pwritev(bench.chunks.drives[0].fd, [page.memory], 7 * CHUNK_BYTES + 65536)
            with pytest.raises(ChecksumError):
                bench.verify(streams, "verify", everything=True)


def test_what_is_written_is_random_never_repeats_and_is_no_hole(tmp_path: Path) -> None:
    with Bench(task(tmp_path, size=160 * MIB), silent) as bench:
        with bench.streams(block_bytes=1 << 20, depth=8, verify="full") as streams:
            with pytest.raises(AioError, match="hole"):
                bench.check_no_holes()
            bench.fill(streams)
            bench.check_no_holes()
        # More than the content's two halves, so both have been made new.
        assert bench.chunks.count > 2 * bench.content.half
        drive = bench.chunks.drives[0]
        with aio.Slab(bench.chunks.size_bytes) as all_of_it:
            for start in range(0, all_of_it.size_bytes, CHUNK_BYTES):
                os.preadv(drive.fd, [all_of_it.memory[start : start + CHUNK_BYTES]], start)
            blocks = all_of_it.array(np.uint64).reshape(-1, 512)
            assert len(np.unique(blocks[:, 0])) == len(blocks)
            ones = np.unpackbits(all_of_it.array(np.uint8, count=1 << 20)).mean()
            assert 0.49 < ones < 0.51


@pytest.mark.parametrize("name", ["probe", "fio"])
def test_the_limit_is_measured_beside_it(tmp_path: Path, name: str) -> None:
    if name == "fio" and why_no_fio():
        pytest.skip("fio cannot run here")
    figures = measure_swap(task(tmp_path, limit=name, phase_s=0.3))
    assert ("fio" in figures.limit_by) == (name == "fio")
    for phase in figures.phases.values():
        assert phase.limit is not None
        assert phase.of_limit == pytest.approx(phase.spread.median / phase.limit.median)
        assert phase.limit_cpu_s_per_gb is not None
        assert sum(phase.limit_samples[0].drive_bytes) > 0
    assert figures.as_dict()["limit_by"] == figures.limit_by


def test_fio_is_told_the_same_time_in_whole_milliseconds(tmp_path: Path) -> None:
    if why_no_fio():
        pytest.skip("fio cannot run here")
    with aio.SwapFile.create(tmp_path) as file:
        command_line = Fio([file], block_bytes=1 << 20, depth=32).command("read", 1.5)
    assert "--runtime=1500ms" in command_line
    assert {"--bs=1048576", "--iodepth=32", "--ioengine=io_uring"} <= set(command_line)


def test_the_limits_own_file_is_no_hole(tmp_path: Path) -> None:
    content = Content(1)
    with aio.SwapFile.create(tmp_path) as file:
        file.grow(8 * MIB)
        open_reference("probe", [file], content, block_bytes=1 << 20, depth=4)
        with aio.Slab(4096) as page:
            for offset in range(0, 8 * MIB, 1 * MIB):
                os.preadv(file.fd, [page.memory], offset)
                assert not is_hole(page.memory)
    content.close()


def test_the_json_has_the_names_that_others_read_and_a_policy_takes_it(tmp_path: Path) -> None:
    target = tmp_path / "figures.json"
    swap = tmp_path / "swap"
    swap.mkdir()
    assert command.main(["swap", "--dir", str(swap), *SMALL, "--json", str(target)]) == 0
    found = json.loads(target.read_text())
    assert found["schema"] == "infinity.bench.swap/1"
    for name in ("read_gbps", "write_gbps", "mixed_gbps"):
        assert found[name] > 0
    for name in ("host", "kernel", "cpu", "cores", "memory_bytes", "huge_pages"):
        assert found["hardware"][name], name
    (drive,) = found["hardware"]["drives"]
    assert drive["path"] == str(swap)
    assert {"file_system", "model", "nr_requests", "max_sectors_kb", "scheduler"} <= drive.keys()
    assert found["infinity"]["version"]
    assert {"commit", "dirty"} <= found["infinity"].keys()
    assert found["command"][0] == "swap"
    assert found["sweep"] is None
    policy = Policy(io=target)
    assert policy.io_settings.bandwidths[str(swap)][0] == pytest.approx(found["read_gbps"] * 1e9)
    assert list(swap.iterdir()) == []


def test_default_directories_are_on_a_drive_and_writable(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("INFINITY_NVME_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "gone"))
    with pytest.raises(ValueError, match="--dir"):
        hardware.default_directories(1 << 62)
    monkeypatch.setenv("INFINITY_NVME_DIR", f"/a{os.pathsep}/b")
    assert hardware.default_directories() == [Path("/a"), Path("/b")]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dir", "/nonexistent/here"], "does not exist"),
        (["--dir", __file__], "not a directory"),
        (["--dir", ".", "--dir", "."], "twice"),
        (["--dir", ".", "--size", "1MiB"], "18MiB"),
        (["--dir", ".", "--size", "1000TiB"], "not enough space"),
        (["--dir", ".", "--size", "64MiB", "--depth", "1"], "--depth 1 "),
        (["--dir", ".", "--size", "64MiB", "--depth", "5000"], "--depth 5000 "),
        (["--dir", ".", "--size", "64MiB", "--block-size", "1000"], "--block-size 1000 "),
        (["--dir", ".", "--size", "64MiB", "--block-size", "8MiB"], "--block-size 8388608 "),
        (["--dir", ".", "--size", "64MiB", "--rounds", "0"], "--rounds 0 "),
        (["--dir", ".", "--size", "64MiB", "--seconds", "0"], "--seconds 0.0 "),
        (["--dir", ".", "--size", "64MiB", "--sweep", "--sweep-depths", "1"], "--depth 1 "),
        (["--dir", ".", "--size", "64MiB", "--sweep-depths", "8"], "--sweep-depths has no effect"),
        (["--dir", ".", "--size", "64MiB", "--sweep-blocks", "1M"], "--sweep-blocks has no effect"),
        (["--dir", ".", "--sweep", "--block-size", "1M"], "--sweep finds the block size"),
        (["--dir", ".", "--size", "64MiB", "--json", "/nonexistent/a.json"], "does not exist"),
        (["--dir", ".", "--size", "64MiB", "--plot", "picture.txt"], ".png"),
        (["--dir", ".", "--json", "a.png", "--plot", "a.png"], "name two files"),
    ],
)
def test_a_mistake_is_one_line_and_exits_with_two(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(["swap", *arguments]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("error: ")
    assert message in shown.err
    assert shown.err.count("\n") == 1


def test_fio_asked_for_and_missing_is_a_mistake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert command.main(["swap", "--dir", str(tmp_path), "--size", "48MiB", "--limit", "fio"]) == 2
    assert "--limit probe" in capsys.readouterr().err.replace("\n", " ")


ENDLESS_FIO = """#!/bin/sh
test "$1" = --version && exec echo fio-3
echo $$ > "$0.started"
exec sleep 60
"""


def test_a_signal_ends_it_and_fio_and_leaves_nothing_behind(tmp_path: Path) -> None:
    """SIGTERM, as `timeout` sends it; Ctrl-C raises the same."""
    if (missing := why_no_fio()) and "not installed" not in missing:
        pytest.skip("no program may use io_uring here, so fio is not run")
    drive, tools = tmp_path / "drive", tmp_path / "tools"
    for folder in (drive, tools):
        folder.mkdir()
    (tools / "fio").write_text(ENDLESS_FIO)
    (tools / "fio").chmod(0o755)
    process = subprocess.Popen(
        [sys.executable, "-m", "infinity", "bench", "--dir", str(drive), "--size", "24MiB"],
        env={**os.environ, "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        deadline_s = time.monotonic() + 60
        while not (started := tools / "fio.started").exists() or not started.read_text():
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        shown = process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait()
    assert (process.returncode, *shown) == (128 + signal.SIGTERM, "", "interrupted\n")
    assert _holders(drive) == []
    assert not Path(f"/proc/{started.read_text().strip()}").exists()
    assert list(drive.iterdir()) == []


_LONG_FIO = """
import sys
from pathlib import Path
from infinity import aio
from infinity._src.measure.reference import Fio

class Long(Fio):
    def command(self, kind, seconds):
        return [*super().command(kind, seconds), "--time_based=1"]

with aio.SwapFile.create(Path(sys.argv[1])) as file:
    file.grow(64 << 20)
    Long([file], block_bytes=1 << 20, depth=32).measure("read", 20)
"""


@pytest.mark.parametrize("delay_s", [0.1, 0.2])
def test_fio_ends_with_us_also_while_it_starts(tmp_path: Path, delay_s: float) -> None:
    if why_no_fio():
        pytest.skip("fio cannot run here: that it ends with us was NOT tested")
    process = subprocess.Popen(
        [sys.executable, "-c", _LONG_FIO, str(tmp_path)], stderr=subprocess.PIPE, text=True
    )
    try:
        deadline_s = time.monotonic() + 30
        while not any("--rw=read" in line for line in _command_lines(process.pid)):
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline_s
            time.sleep(0.005)
        time.sleep(delay_s)
        process.send_signal(signal.SIGINT)
        _, problem = process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait()
    assert "KeyboardInterrupt" in problem
    assert _holders(tmp_path) == []


def _command_lines(parent: int) -> list[list[str]]:
    """The command lines of a process's children."""
    found = []
    for child in Path(f"/proc/{parent}/task/{parent}/children").read_text().split():
        try:
            found.append(Path(f"/proc/{child}/cmdline").read_text().split("\0"))
        except OSError:
            continue  # it has ended
    return found


def _holders(directory: Path) -> list[str]:
    """Processes with a file of `directory` open, also a nameless one."""
    found = []
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            target = str(link.readlink())
        except OSError:
            continue  # it has ended, or is somebody else's
        if target.startswith(str(directory)):
            found.append(f"{link}: {target}")
    return found


def test_the_reported_figure_is_the_middle_round_and_shares_pair_rounds() -> None:
    assert Spread((3e9, 1e9, 2e9)).gbps == 2.0
    ours = tuple(Sample((2 * rate,), (2.0,), 1.0) for rate in (10, 40, 30))
    limits = tuple(Sample((2 * rate,), (2.0,), 1.0) for rate in (20, 40, 10))
    assert PhaseFigures(ours, limits).of_limit_rounds == (0.5, 1.0, 3.0)
    assert PhaseFigures(ours, limits).of_limit == 1.0
    assert Sample((10**9, 10**9), (1.0, 2.0), 3.0).rate == 1.5e9
    assert Sample((10**9, 10**9), (1.0, 2.0), 3.0).cpu_s_per_gb == 1.5
