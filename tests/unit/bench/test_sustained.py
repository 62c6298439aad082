"""The sustained load of the swap benchmark: its traffic is that of steps, its rows add up, and it
leaves nothing behind."""

from __future__ import annotations

import json
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
from infinity._src.measure import command, report, sustained
from infinity._src.measure.streams import CHUNK_BYTES, Chunks
from infinity._src.measure.sustained import (
    Row,
    SustainedFigures,
    SustainedTask,
    join,
    measure_sustained,
    step_jobs,
)
from infinity._src.measure.swap import Bench, SwapTask
from infinity.aio import IoSettings
from infinity.aio._stats import Latency


@pytest.fixture(autouse=True)
def _swap_may_lie_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    # Some machines keep /tmp in memory; the figures do not matter here.
    monkeypatch.setenv("INFINITY_ALLOW_TMPFS", "1")


def measure(*directories: Path, **values: Any) -> SustainedFigures:
    swap = SwapTask(directories, 48 * MIB, **{"rounds": 1, "phase_s": 0.02, **values})
    warm = tuple(directory.parent / "warm" for directory in directories)
    return measure_sustained(SustainedTask(swap, 0.3 / 60, 0.02, warm))


@pytest.mark.parametrize("backend", ["auto", "threads"])
def test_rows_add_up_to_what_the_executor_moved(tmp_path: Path, backend: str) -> None:
    directories = [tmp_path / "a", tmp_path / "b"]
    for directory in directories:
        directory.mkdir()
    (tmp_path / "warm").write_text("38850\n")
    figures = measure(*directories, backend=backend)
    assert {row.temperature_c for row in figures.rows} == {38.85}
    assert figures.last.as_dict()["temperature_c"] == 38.85
    assert figures.rows
    assert figures.rows[0].at_s == 0
    for row, then in zip(figures.rows, figures.rows[1:], strict=False):
        assert row.at_s + row.seconds == pytest.approx(then.at_s)
    # The sampler may end before the last requests do, so that rows have a part of all.
    moved = sum(drive.bytes_written for drive in figures.drives)
    assert 0 < figures.bytes_written <= moved
    whole = join(figures.rows)
    assert len(whole.drives) == 2
    assert whole.write.count == sum(row.write.count for row in figures.rows) > 0
    assert 0 < whole.read.p50_s <= whole.read.p99_s <= whole.read.p999_s <= whole.read.max_s
    assert {(one.path, one.request_bytes) for one in figures.alone} == {
        (str(directory), size) for directory in directories for size in (4096, figures.block_bytes)
    }
    assert all(one.read.count and one.write.count for one in figures.alone)
    assert set(figures.settings.bandwidths) == set(map(str, directories))
    assert [path for directory in directories for path in directory.iterdir()] == []


def test_a_step_moves_what_the_exact_state_moves(tmp_path: Path) -> None:
    task = SwapTask((tmp_path,), 48 * MIB, depth=4)
    with Bench(task, lambda _phase, _share: None) as bench:
        with bench.streams(block_bytes=None, depth=4, verify="full") as streams:
            bench.fill(streams)
        chunks = Chunks(bench.chunks.drives, bench.chunks.count, state=aio.Format.SPLIT)
        with sustained.Streams(
            chunks, block_bytes=None, depth=4, backend="auto", verify="off"
        ) as streams:
            streams.warm(15)
            before = streams.executor.stats()
            (jobs,) = step_jobs(streams)
            streams.executor.submit(jobs, priority=aio.Priority.DEMAND).wait()
            stats = streams.executor.stats()
        bench.check_no_holes()
    params = chunks.count * CHUNK_BYTES // 12
    read = stats.bytes_read - before.bytes_read
    assert (read, stats.bytes_written) == (14 * params, 12 * params)
    # Each chunk is read and written once in the update, and no two neighbours are of one chunk.
    kinds = jobs["kind"][: 2 * chunks.count]
    assert (kinds[0::2] == aio.JobKind.FETCH).all()
    assert (kinds[1::2] == aio.JobKind.STORE).all()
    assert set(jobs["chunk"][0 : 2 * chunks.count : 2]) == set(jobs["chunk"][2 * chunks.count :])
    assert (np.diff(jobs["chunk"][: 2 * chunks.count]) != 0).all()


def test_latencies_of_an_interval_are_of_its_requests_alone() -> None:
    before = [Latency(2, max_s=1e-6, counts=(2, 0, 0, 0)), Latency()]
    after = [
        Latency(3, max_s=3e-6, counts=(2, 0, 1, 0)),
        Latency(999, max_s=1.5e-6, counts=(0, 999)),
    ]
    found = Latency.between(before, after)
    assert found.counts == (0, 999, 1, 0)
    assert found.count == 1000
    assert (found.p50_s, found.p999_s) == pytest.approx((1.536e-6, 1.536e-6))
    # The slowest request ended in the third bucket, and was no longer than the slowest of all.
    assert found.max_s == pytest.approx(3e-6)
    assert Latency.between(after, after).count == 0


def test_the_first_tenth_is_compared_with_the_last() -> None:
    slow, fast = Latency.between((), ()), Latency.between((), ())
    rows = tuple(
        Row(float(number), 1.0, ((20 - number, 10 * (20 - number)),), fast, slow)
        for number in range(20)
    )
    figures = SustainedFigures(1 / 3, rows, (), {}, 1.0, 100, 1, None, 2, "x", True, ())
    assert (figures.first.read_bytes_per_s, figures.last.read_bytes_per_s) == (19.5, 1.5)
    assert (figures.first.write_bytes_per_s, figures.last.write_bytes_per_s) == (195, 15)
    assert figures.bytes_written == 10 * sum(range(1, 21))


def test_the_command_writes_a_record_and_a_curve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(sustained, "ROW_S", 0.02)
    warm = tmp_path / "warm"
    warm.write_text("45000")
    monkeypatch.setattr(command, "thermometers_of", lambda _directory: (warm, tmp_path / "gone"))
    drive, record, picture = tmp_path / "drive", tmp_path / "a.json", tmp_path / "a.png"
    drive.mkdir()
    arguments = ["--dir", str(drive), "--size", "48MiB", "--rounds", "1", "--seconds", "0.02"]
    arguments += ["--sustained", "0.005", "--json", str(record), "--plot", str(picture)]
    assert command.main(["swap", *arguments]) == 0
    shown = capsys.readouterr().out
    assert "last / first" in shown
    assert "One request at a time" in shown
    assert "hottest drive, °C" in shown
    found = json.loads(record.read_text())
    assert found["schema"] == "infinity.bench.sustained/1" == report.SCHEMAS["sustained"]
    # A busy host may complete no write in the last tenth.
    assert found["bytes_written"] > 0
    assert found["summary"]["last_tenth"]["write_bytes_per_s"] >= 0
    assert set(found["rows"][0]["write_latency"]) == {"count", "p50_s", "p99_s", "p999_s", "max_s"}
    assert set(found["after"]) == {"read", "write", "mixed"}
    # infinity plan --bench and Policy(io=) read it.
    assert set(IoSettings.load(record).bandwidths) == {str(drive)}
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert list(drive.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sustained", "0.1"], "--sustained 0.1 must be at least 0.17 minutes"),
        (["--sustained", "-1"], "--sustained -1.0"),
        (["--sustained", "nan"], "--sustained nan"),
        (["--sustained", "inf"], "--sustained inf"),
        (["--sustained", "1", "--sweep"], "--sweep with --sustained"),
        (["--sustained", "1", "--verify"], "--verify with --sustained"),
        (["--sustained", "1", "--checksums", "full"], "--checksums with --sustained"),
        (["--sustained", "1", "--limit", "probe"], "--limit probe with --sustained"),
        (["--sustained", "1", "--plot", "a.txt"], ".png"),
        (["--sustained", "1", "--json", "/nonexistent/a.json"], "does not exist"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_nothing(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(["swap", "--dir", str(tmp_path), "--size", "48MiB", *arguments]) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_number_that_is_none_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main(["swap", "--sustained", "ten"])
    assert ended.value.code == 2
    assert "--sustained: invalid float value: 'ten'" in capsys.readouterr().err


_SAYS_WHEN_IT_RUNS = """
import sys
from infinity._src.cli.main import main
from infinity._src.measure import sustained

made = sustained.step_jobs

def step_jobs(streams):
    print("up", flush=True)
    return made(streams)

sustained.step_jobs = step_jobs
sys.exit(main(["bench", *sys.argv[1:]]))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_no_file(tmp_path: Path, number: signal.Signals) -> None:
    arguments = ["--dir", str(tmp_path), "--size", "48MiB", "--seconds", "0.02"]
    arguments += ["--sustained", "5", "--json", str(tmp_path / "a.json")]
    process = subprocess.Popen(
        [sys.executable, "-c", _SAYS_WHEN_IT_RUNS, "swap", *arguments],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        time.sleep(0.1)
        process.send_signal(number)
        process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 128 + number
    assert list(tmp_path.iterdir()) == []
