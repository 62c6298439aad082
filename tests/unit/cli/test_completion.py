"""The scripts of `infinity --print-completion`: what a shell offers is what the parsers take."""

from __future__ import annotations

import argparse
import shutil
import subprocess
from pathlib import Path

import pytest

from infinity._src.cli.completion import SHELLS
from infinity._src.cli.main import build_parser, main
from infinity._src.measure import command as bench

# Completes each line of the standard input, and prints the line and what was offered.
BASH = """
source "$1"
mapfile -t all
for asked in "${all[@]}"; do
    COMP_WORDS=($asked); [[ ${asked: -1} == = ]] && COMP_WORDS=(${asked%=} "")
    COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); COMPREPLY=()
    _shtab_infinity
    echo "$asked|${COMPREPLY[*]}"
done
"""


def script(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["--print-completion", shell])
    assert not ended.value.code
    return capsys.readouterr().out


def offers(parser: argparse.ArgumentParser, words: str) -> dict[str, set[str]]:
    """Each line whose completion a parser decides, with what must be offered; "=" at the end of a
    line is a new word."""
    found = {f"{words} --": set()}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            found[f"{words} ="] = set(action.choices)
            for name, child in action.choices.items():
                found |= offers(child, f"{words} {name}")
        elif action.option_strings:
            found[f"{words} --"].add(action.option_strings[-1])
            if action.choices:
                found[f"{words} {action.option_strings[-1]} ="] = set(map(str, action.choices))
    return found


def test_bash_completes_every_command_option_and_choice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # The parser that `infinity bench` really has comes last.
    expected = offers(build_parser(), "infinity") | offers(bench.build_parser(), "infinity bench")
    # Without the name of a benchmark the options are those of swap.
    swap = expected["infinity bench swap --"]
    expected["infinity bench --"] = swap
    assert {"--depth", "--sweep"} <= swap
    (tmp_path / "swap").mkdir()
    (tmp_path / "swap.txt").touch()
    expected |= {"infinity doctor --dir sw": {"swap"}, "infinity report sw": {"swap"}}
    expected["infinity train m --text sw"] = {"swap", "swap.txt"}
    (tmp_path / "script").write_text(script("bash", capsys))
    done = subprocess.run(
        ["bash", "-c", BASH, "bash", "./script"],
        input="\n".join(expected),
        cwd=tmp_path, capture_output=True, text=True, check=True,
    )  # fmt: skip
    shown = (line.partition("|") for line in done.stdout.splitlines())
    assert {line: set(offered.split()) for line, _, offered in shown} == expected
    assert not done.stderr


@pytest.mark.parametrize("shell", [shell for shell in SHELLS if shell != "bash"])
def test_other_shells_read_their_script(
    shell: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "script").write_text(script(shell, capsys))
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} here")
    command = [shell, "-n", str(tmp_path / "script")]
    subprocess.run(command, check=True, capture_output=True)


def test_a_shell_without_a_script_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--print-completion", "ksh"])
    assert ended.value.code == 2
    assert "invalid choice: 'ksh'" in capsys.readouterr().err
