"""Processes of their own: what must hold of a whole process is tried in one."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

from tests import forks

ROOT = Path(__file__).parents[3]


def run_python(
    code: str, *, fresh: bool = False, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run code in a process of its own. fresh: in a new interpreter, which is slower: for what one
    does at its end, has not imported, or reads from the environment when it starts."""
    if not fresh:
        return forks.run_code(code, **(environment or {}))
    return subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=ROOT,
        env={**os.environ, **(environment or {})},
    )


def preamble(backend: str, directory: Path, options: str = "") -> str:
    """Code that makes `rig`, and `values` for six chunks. `options`: arguments of Rig, as code."""
    return f"""
import os, signal, sys, threading, time
from pathlib import Path
import numpy as np
from infinity import aio
from infinity.errors import *
from tests.unit.aio.rig import *
rig = Rig(Path({str(directory)!r}), {backend!r}, {options})
rng = np.random.default_rng(0)
values = {{i: random_chunk(rng) for i in range(6)}}
"""
