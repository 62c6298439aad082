"""Separate processes that start fast: forked from one that has imported torch, transformers and the
engine, without using them.

The server starts when first needed and ends with its parent. Settings that the C library or the
interpreter reads at a process's start are the server's: see `harness.in_a_process` for others.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

from typing_extensions import Self

LLAMA = "transformers.models.llama.modeling_llama"
FORKSERVER = multiprocessing.get_context("forkserver")
METHOD = FORKSERVER.get_start_method()
FORKSERVER.set_forkserver_preload(
    # The last one freezes the objects of all.
    ["peft", LLAMA, LLAMA.replace("llama", "gpt2"), LLAMA.replace("llama", "t5"),
     "tests.fork_server"]
)  # fmt: skip
OURS = ("infinity", "liburing", "tests")


def in_a_fork(module: str, *arguments: object, **environment: str) -> str:
    """Standard output of `python -m module arguments`, which must succeed; for what must be alone
    in its process."""
    done = _run(_run_module, module, arguments, environment)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def script_in_a_fork(path: Path, *arguments: object, **environment: str) -> str:
    """Standard output of `python path arguments`, which must succeed."""
    done = _run(_run_script, str(path), arguments, environment)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def run_code(code: str, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `python -c code arguments`; torch is imported then, and `infinity` is not yet. The exit
    runs no `atexit`."""
    return _run(_run_code, textwrap.dedent(code), arguments, environment)


class Child:
    """A process that runs code as `run_code` does, and exchanges lines with the test. Leaving the
    `with` block kills it."""

    def __init__(self, code: str, *arguments: object) -> None:
        self._output, said = FORKSERVER.Pipe(duplex=False)
        heard, self._input = FORKSERVER.Pipe(duplex=False)
        given = [textwrap.dedent(code), *map(str, arguments)]
        self._process = FORKSERVER.Process(
            target=_talk, args=(given, dict(os.environ), heard, said)
        )
        self._process.start()
        said.close()
        heard.close()
        self._lines = open(self._output.fileno(), closefd=False)  # noqa: SIM115
        assert self._process.pid is not None
        self.pid = self._process.pid

    def says(self) -> str:
        """Return the next line that it prints; "" when it has ended."""
        return self._lines.readline().strip()

    def hears(self, line: str) -> None:
        """Write a line to its standard input."""
        os.write(self._input.fileno(), f"{line}\n".encode())

    @property
    def alive(self) -> bool:
        """True until it has ended."""
        return self._process.is_alive()

    def kill(self) -> None:
        """Kill it, and wait for its end."""
        self._process.kill()
        self._process.join()

    def exit_code(self) -> int | None:
        """Close its standard input and wait for its end."""
        self._input.close()
        self._process.join(60)
        return self._process.exitcode

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._lines.close()
        self._output.close()
        self._input.close()


def _talk(
    given: list[str], environment: dict[str, str], heard: Connection, said: Connection
) -> None:
    os.dup2(heard.fileno(), 0)
    os.dup2(said.fileno(), 1)
    heard.close()
    said.close()
    # multiprocessing has closed it
    sys.stdin = open(0)  # noqa: SIM115
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = given
    _run_code(given[0])


def _run(
    run: Callable[[str], object],
    what: str,
    arguments: tuple[object, ...],
    environment: dict[str, str],
) -> subprocess.CompletedProcess[str]:
    with tempfile.TemporaryDirectory() as place:
        given = [what, *map(str, arguments)]
        process = FORKSERVER.Process(
            target=_main, args=(run, given, {**os.environ, **environment}, place)
        )
        process.start()
        process.join(300)
        process.kill()  # if it has not ended by now
        process.join()
        output, errors = (Path(place, name).read_text() for name in ("output", "errors"))
        assert process.exitcode is not None
        return subprocess.CompletedProcess(given, process.exitcode, output, errors)


def _run_module(name: str) -> None:
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def _run_script(path: str) -> None:
    runpy.run_path(path, run_name="__main__")


def _run_code(code: str) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] in OURS]:
        del sys.modules[name]
    logging.getLogger("infinity").handlers.clear()  # those of the modules that are deleted
    exec(code, {"__name__": "__main__"})


def _main(
    run: Callable[[str], object], given: list[str], environment: dict[str, str], place: str
) -> None:
    for name, number in (("output", 1), ("errors", 2)):
        os.dup2(os.open(Path(place, name), os.O_WRONLY | os.O_CREAT), number)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = given
    run(given[0])
