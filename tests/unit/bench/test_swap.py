"""The swap benchmark: what it writes is real, its figures follow the drive, and it leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from infinity.bench import command, hardware
from infinity.bench.swap import CHUNK_BYTES, Spread, measure_swap
from infinity.sizes import MIB

SMALL = ["--size", "48MiB", "--rounds", "1", "--seconds", "1"]


@pytest.fixture(autouse=True)
def _swap_may_lie_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    # Some machines keep /tmp in memory; the figures do not matter here.
    monkeypatch.setenv("INFINITY_ALLOW_TMPFS", "1")


def test_a_measurement_reads_and_writes_what_it_says(tmp_path: Path) -> None:
    phases: list[str] = []
    figures = measure_swap(
        [tmp_path], size_bytes=48 * MIB, rounds=2, phase_s=2.0, progress=lambda phase, _share: phases.append(phase)
    )
    assert figures.size_bytes == 48 * MIB // CHUNK_BYTES * CHUNK_BYTES
    assert len(figures.read.rounds) == len(figures.write.rounds) == len(figures.mixed.rounds) == 2
    assert min(*figures.read.rounds, *figures.write.rounds, *figures.mixed.rounds) > 0
    assert figures.verified_bytes > 0
    assert list(dict.fromkeys(phases)) == ["fill", "read 1/2", "write 1/2", "mixed 1/2", "read 2/2", "write 2/2", "mixed 2/2"]
    assert list(tmp_path.iterdir()) == []


def test_several_directories_are_measured_together(tmp_path: Path) -> None:
    directories = [tmp_path / "a", tmp_path / "b"]
    for directory in directories:
        directory.mkdir()
    assert measure_swap(directories, size_bytes=48 * MIB, rounds=1, phase_s=1.0).size_bytes >= 45 * MIB


@pytest.mark.parametrize("backend", ["threads", "python"])
def test_every_backend_measures(tmp_path: Path, backend: str) -> None:
    assert measure_swap([tmp_path], size_bytes=24 * MIB, rounds=1, phase_s=1.0, backend=backend).backend == backend


def test_the_json_has_the_names_that_others_read(tmp_path: Path) -> None:
    target = tmp_path / "figures.json"
    assert command.main(["swap", "--dir", str(tmp_path), *SMALL, "--json", str(target)]) == 0
    found = json.loads(target.read_text())
    assert found["schema"] == "infinity.bench.swap/1"
    for name in ("read_gbps", "write_gbps", "mixed_gbps"):
        assert found[name] > 0
    assert found["hardware"]["drives"][0]["path"] == str(tmp_path)
    assert found["hardware"]["cores"] >= 1


def test_without_arguments_it_uses_the_named_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("INFINITY_NVME_DIR", str(tmp_path))
    assert command.main(SMALL) == 0
    shown = capsys.readouterr().out
    assert "Swap bandwidth" in shown
    assert str(tmp_path) in shown.replace("\n", "")


def test_default_directories_are_on_a_drive_and_writable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
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
        (["--dir", ".", "--size", "1MiB"], "32MiB"),
        (["--dir", ".", "--size", "64MiB", "--depth", "1"], "depth"),
        (["--dir", ".", "--size", "64MiB", "--block-size", "1000"], "block_bytes"),
    ],
)
def test_a_mistake_is_one_line_and_exits_with_two(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(["swap", *arguments]) == 2
    assert message in capsys.readouterr().out


def test_ctrl_c_ends_it_and_leaves_nothing_behind(tmp_path: Path) -> None:
    code = "import sys; from infinity.bench.command import main; print('up', flush=True); sys.exit(main(sys.argv[1:]))"
    arguments = ["swap", "--dir", str(tmp_path), "--size", "256MiB", "--seconds", "30", "--rounds", "500"]
    process = subprocess.Popen([sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        time.sleep(1.0)
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130
    assert "nothing is left" in out
    assert list(tmp_path.iterdir()) == []


def test_the_reported_figure_is_the_middle_round() -> None:
    assert Spread((3e9, 1e9, 2e9)).gbps == 2.0
