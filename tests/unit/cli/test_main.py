"""The command line: doctor, plan, and mistakes."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from infinity._src.cli import doctor
from infinity._src.cli.main import main
from tests import forks


def shown_on(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def shown_by_doctor(directories: list[str]) -> str:
    console = Console(file=io.StringIO(), width=300)
    assert doctor.run_doctor(directories, console) == 0
    return shown_on(console)


def test_doctor_names_everything_that_matters(tmp_path: Path) -> None:
    shown = shown_by_doctor([str(tmp_path)])
    for subject in (
        "I/O backend",
        "kernels",
        "huge pages",
        "memlock",
        "memory",
        "swap directory",
        "GPU",
        "waiting threads",
        "versions",
        "machine",
    ):
        assert subject in shown
    assert str(tmp_path) in shown


def test_doctor_warns_by_name_and_exits_with_success(tmp_path: Path) -> None:
    shown = shown_by_doctor([str(tmp_path / "gone")])
    (warning,) = [line for line in shown.splitlines() if line.startswith("warning: swap directory")]
    assert "does not exist" in warning


def test_doctor_says_aloud_when_the_native_extension_is_missing(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['infinity._native'] = None; from infinity._src.cli.main import "
        "main; sys.exit(main(['doctor', '--dir', sys.argv[1]]))"
    )
    done = forks.run_code(code, tmp_path, PATH="", COLUMNS="200", HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "warning: kernels" in done.stdout
    assert (
        "warning: I/O backend: nothing can be offloaded: infinity's C extension is missing"
        in done.stdout
    )
    assert "pip install --force-reinstall infinity-offload" in done.stdout


def test_the_cgroup_limit_is_a_size_or_none() -> None:
    limit = doctor.cgroup_limit_bytes()
    assert limit is None or limit > 0


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["nonsense"],
        ["doctor", "--nonsense"],
        ["train"],
        ["plan"],
        ["plan", "/models/llama", "--gpu", "24G"],
    ],
)
def test_mistakes_on_the_command_line_exit_with_two(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert "usage: infinity" in capsys.readouterr().err


def test_the_version_is_the_package_s(capsys: pytest.CaptureFixture[str]) -> None:
    import infinity

    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"infinity {infinity.__version__}\n"
