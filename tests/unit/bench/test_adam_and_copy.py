"""The benchmarks other than swap: kernels, copies, pictures."""

from __future__ import annotations

import errno
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from infinity._src.cabi import native
from infinity._src.cabi.installation import install_line
from infinity._src.kernels.hyper import hyper_row_adamw
from infinity._src.measure import command, sweep
from infinity._src.measure.adam import CACHE_NUMEL, measure_adam


def test_the_scalars_are_those_of_the_optimizer() -> None:
    from infinity._src.measure import adam

    row = hyper_row_adamw(
        lr=adam._LR, betas=adam._BETAS, eps=adam._EPS, weight_decay=adam._DECAY, step=adam._STEP
    )
    assert adam._HYPER_ROW.tobytes() == row.tobytes()


@pytest.mark.parametrize("threads", [1, 2])
def test_every_kernel_is_measured_and_the_settings_of_the_process_stay(threads: int) -> None:
    before = native.isa(), torch.get_num_threads()
    phases: list[str] = []
    figures = measure_adam(
        threads=threads,
        rounds=1,
        numel=4 * CACHE_NUMEL,
        progress=lambda name, _: phases.append(name),
    )
    assert (native.isa(), torch.get_num_threads()) == before
    for where in ("cache", "memory"):
        rows = [row for row in figures.rows if row.where == where]
        for state in ("exact", "bf16", "compact", "fp32"):
            assert {row.isa for row in rows if row.state == state} >= set(native.isas())
        assert all(row.gparam_per_s > 0 for row in rows)
        assert all((row.of_memory is None) == (where == "cache") for row in rows)
    assert any(row.name.startswith("torch") for row in figures.rows)
    assert set(phases) == {"cache 1/1", "memory 1/1"}


def test_the_kernels_json_and_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "adam.json"
    assert command.main(["adam", "--rounds", "1", "--numel", "65536", "--json", str(target)]) == 0
    found = json.loads(target.read_text())
    assert found["schema"] == "infinity.bench.adam/1"
    assert found["isas"] == list(native.isas())
    assert found["rows"][0]["gparam_per_s"] > 0
    assert "Gparam/s" in capsys.readouterr().out
    assert command.main(["adam", "--numel", "10"]) == 2
    assert command.main(["adam", "--threads", "0"]) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["adam", "--rounds", "0"], "--rounds 0"),
        (["adam", "--numel", "0"], "--numel 0 is too small for 1 threads"),
        (["adam", "--numel", "1000000000000000"], "of memory, and "),
        (["copy", "--rounds", "0"], "--rounds 0"),
        (["copy", "--blocks", "1M,1"], "--blocks 1: "),
    ],
)
def test_a_number_out_of_range_is_named_with_its_option(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(arguments) == 2
    shown = capsys.readouterr()
    assert (shown.out, shown.err.count("\n")) == ("", 1)
    assert message in shown.err


def test_without_a_device_copy_says_so_and_is_no_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a device")
    target = tmp_path / "copy.json"
    assert command.main(["copy", "--json", str(target)]) == 0
    assert "no device" in capsys.readouterr().out
    found = json.loads(target.read_text())
    assert found["device"] is None
    assert found["rows"] == []


@pytest.mark.gpu
def test_copies_are_measured_where_there_is_a_device(tmp_path: Path) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    target = tmp_path / "copy.json"
    assert command.main(["copy", "--rounds", "1", "--blocks", "1M,16M", "--json", str(target)]) == 0
    found = json.loads(target.read_text())
    assert len(found["rows"]) == 12
    assert all(row["gbps"] > 0 for row in found["rows"])


def cut_off(_figure: Any, target: Any, **_given: Any) -> None:
    if isinstance(target, Path):
        target.write_bytes(b"half")
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_pictures_are_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Figure = pytest.importorskip("matplotlib.figure").Figure
    monkeypatch.setenv("INFINITY_ALLOW_TMPFS", "1")
    picture = tmp_path / "swap.png"
    arguments = [
        "--dir", str(tmp_path), "--size", "32MiB", "--rounds", "1", "--seconds", "0.05", "--limit",
        "probe",
    ]  # fmt: skip
    monkeypatch.setattr(sweep, "_FINAL_ROUNDS", 1)
    swept = ["--sweep", "--sweep-blocks", "1M", "--sweep-depths", "4,8"]
    assert command.main(["swap", *arguments, *swept, "--plot", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "too short to measure a drive" in capsys.readouterr().out
    svg = tmp_path / "adam.svg"
    assert command.main(["adam", "--rounds", "1", "--numel", "65536", "--plot", str(svg)]) == 0
    assert "<svg" in svg.read_text()
    empty = tmp_path / "copy.pdf"
    assert command.main(["copy", "--rounds", "1", "--plot", str(empty)]) == 0
    assert empty.stat().st_size > 0
    # If a picture cannot be written completely, the earlier file stays.
    monkeypatch.setattr(Figure, "savefig", cut_off)
    assert command.main(["copy", "--rounds", "1", "--plot", str(empty)]) == 2
    assert empty.stat().st_size > 4
    assert {path.suffix for path in tmp_path.iterdir()} == {".png", ".svg", ".pdf"}


def test_a_picture_without_matplotlib_names_the_extra_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert command.main(["swap", "--dir", str(tmp_path), "--plot", str(tmp_path / "a.png")]) == 2
    assert install_line("train") in capsys.readouterr().err
