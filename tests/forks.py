"""Processes of their own that begin in no time: forked from one that has imported torch and
transformers, and nothing of ours.

It starts when it is first needed and ends with the process that started it. What the C library or
the interpreter reads when a process begins is what it found then: see `harness.in_a_process` for
that.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
import tempfile
from pathlib import Path

LLAMA = "transformers.models.llama.modeling_llama"
FORKSERVER = multiprocessing.get_context("forkserver")
METHOD = FORKSERVER.get_start_method()
FORKSERVER.set_forkserver_preload(
    ["peft", LLAMA, LLAMA.replace("llama", "gpt2"), LLAMA.replace("llama", "t5")]
)


def in_a_fork(module: str, *arguments: object, **environment: str) -> str:
    """Standard output of `python -m module arguments`, which must succeed; for what must be alone
    in its process."""
    with tempfile.TemporaryDirectory() as place:
        given = (module, list(map(str, arguments)), {**os.environ, **environment}, place)
        process = FORKSERVER.Process(target=_main, args=given)
        process.start()
        process.join(300)
        process.kill()  # if it has not ended by now
        process.join()
        output, errors = (Path(place, name).read_text() for name in ("output", "errors"))
        assert process.exitcode == 0, errors[-4000:]
        return output


def _main(module: str, arguments: list[str], environment: dict[str, str], place: str) -> None:
    for name, number in (("output", 1), ("errors", 2)):
        os.dup2(os.open(Path(place, name), os.O_WRONLY | os.O_CREAT), number)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
