"""The command line: doctor, plan, and mistakes."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import infinity as inf
from infinity._src.cabi import native
from infinity._src.cabi.installation import install_line
from infinity._src.cli import doctor
from infinity._src.cli.main import main
from infinity._src.config import choices
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
        "commands",
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
    assert install_line("", "--force-reinstall", "--no-deps") in done.stdout


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


# -- standard output -------------------------------------------------------------------------------

CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 64,
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2,
}  # fmt: skip


@pytest.fixture
def odd(tmp_path: Path) -> Path:
    """A directory whose name has a letter that few encodings have, and a byte that is no letter."""
    directory = tmp_path / "\u03b7-\udce9"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(CONFIG))
    return directory


def commands(odd: Path) -> list[tuple[list[str], int]]:
    """Each command, as cheap as it can be had, and its status."""
    plan = ["plan", str(odd), "--tokens-per-step", "9", "--ram", "4GiB", "--as-given"]
    return [
        (plan, 0),
        ([*plan, "--json", "-"], 0),
        ([*plan, "--json", str(odd)], 2),
        ([*plan, "--flops", "-1"], 2),
        (["bench", "--dir", str(odd / "none")], 2),
        (["train", str(odd), "--text", str(odd / "none"), "--out", str(odd / "out")], 2),
        (["report", str(odd)], 2),
        (["checkpoint", "ls", str(odd)], 2),
        (["checkpoint", "verify", str(odd), "--json"], 2),
    ]


@contextlib.contextmanager
def stream(way: str) -> Iterator[Any]:
    """A stream that is no good place for every text."""
    if way in ("full", "no reader"):
        reader, number = os.pipe() if way != "full" else (-1, os.open("/dev/full", os.O_WRONLY))
        if reader >= 0:
            os.close(reader)
        with os.fdopen(number, "w", encoding="utf-8") as file:
            yield file
    else:
        file = io.TextIOWrapper(io.BytesIO(), way if way.islower() else "utf-8", "strict")
        if way == "CLOSED":
            file.close()
        yield None if way == "NONE" else file


@pytest.mark.parametrize(
    "way", ["ascii", "latin-1", "utf-8", "no reader", "full", "CLOSED", "NONE"]
)
def test_a_command_ends_as_ever_wherever_its_output_goes(
    way: str, odd: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for arguments, status in commands(odd):
        err = io.TextIOWrapper(io.BytesIO(), "ascii", "strict")
        with stream(way) as out, monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", out)
            patch.setattr(sys, "stderr", err)
            found = main(arguments)
            assert (sys.stdout, sys.stderr) == (out, err)
        err.flush()
        told = err.buffer.getvalue().decode()  # type: ignore[attr-defined]
        to_stderr = arguments[-1] in ("-", "--json")
        if way == "full" and not to_stderr and not status:
            assert found == 1, arguments
            assert told.count("error: standard output cannot be written: No space left on") == 1
        elif way in ("CLOSED", "NONE") and arguments[-1] == "-":
            assert found == 2
            assert "error: the record is for standard output, which is closed; name a file" in told
        elif way == "full" and arguments[-1] == "-":
            assert found == 1
        else:
            assert found == status, (arguments, told)
        if status and way != "full":
            assert (told[:7], told.count("\n")) == ("error: ", 1), (arguments, told)
        assert "Traceback" not in told


def test_a_pipe_that_is_named_for_a_result_is_written_to_and_stays(odd: Path) -> None:
    """As /dev/stdout, which a file would replace."""
    (command, _), *_ = commands(odd)
    os.mkfifo(odd / "pipe")
    reader = os.open(odd / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    try:
        assert main([*command, "--json", str(odd / "pipe")]) == 0
        assert json.loads(os.read(reader, 1 << 20))["plan"]["fits"]
    finally:
        os.close(reader)
    assert (odd / "pipe").is_fifo()


def test_real_output_that_is_full_or_closed_or_in_ascii(odd: Path) -> None:
    """In a separate process, whose interpreter flushes the rest at its exit."""
    command = f"{sys.executable} -m infinity.bench --dir none"
    environment = {**os.environ, "PYTHONIOENCODING": "ascii:strict"}
    found = []
    for redirection in (">/dev/full", ">&- 2>&- <&-"):
        done = subprocess.run(
            ["bash", "-c", f"{command}-\u03b7 {redirection}"],
            cwd=odd, env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        found.append((done.returncode, done.stderr))
    (status, told), closed = found
    assert (status, told.count("\n"), closed) == (2, 1, (2, ""))
    assert "does not exist" in told


SHORT = "DefaultCPUAllocator: can't allocate memory"


def test_an_error_that_a_command_leaves_to_its_caller_is_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(native, "_reason", "not built")
    for error, status, shown in (
        (ImportError("the extension is missing"), 1, "error: the extension is missing\n"),
        (OSError(5, "it broke", "file"), 1, "error: [Errno 5] it broke: 'file'\n"),
        (ValueError("no such value"), 2, "error: no such value\n"),
        (MemoryError(), 1, "error: MemoryError\n"),
        (RuntimeError(f"{SHORT}: 9 bytes\nat"), 1, f"error: {SHORT}: 9 bytes\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
    ):

        def fails(*_given: Any, error: BaseException = error, **_more: Any) -> int:
            raise error

        monkeypatch.setattr(doctor, "run_doctor", fails)
        assert main(["doctor"]) == status
        assert capsys.readouterr().err == shown


def test_the_options_of_the_policys_fields_have_its_defaults_and_say_them() -> None:
    policy = inf.Policy()
    for field, option in choices._OPTIONS.items():
        default = getattr(policy, field)
        assert option.default in (None, default), field
        said = re.search(r"\(([^ )]+)\)$", option.text)
        assert said is None or said[1] == str(default), field
