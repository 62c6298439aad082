"""infinity._src.native: what is in use, why not, and what the environment changes. In subprocesses: it is read at import."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from infinity._src import native

ROOT = Path(__file__).parents[3]


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_without_the_extension_the_module_says_why_and_imports_no_torch() -> None:
    code = (
        "import sys; from infinity._src import native; "
        "assert not native.available() and native.lib is None; assert 'torch' not in sys.modules; "
        "print(native.isa(), native.isas(), native.reason())"
    )
    done = run(code, INFINITY_NO_NATIVE="1")
    assert done.stdout.strip() == "none () INFINITY_NO_NATIVE=1", done.stderr


def test_the_environment_selects_the_instruction_set() -> None:
    for name in native.isas():
        done = run("from infinity._src import native; print(native.isa())", INFINITY_ISA=name)
        assert done.stdout.strip() == name, done.stderr


@pytest.mark.parametrize("value", ["neon", "AVX2"])
def test_an_unknown_instruction_set_in_the_environment_is_an_error_that_lists_the_known(value: str) -> None:
    done = run("import infinity._src.native", INFINITY_ISA=value)
    assert done.returncode != 0
    assert "one of portable, avx2, avx512" in done.stderr


def test_the_widest_instruction_set_is_the_default() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "INFINITY_ISA"}
    done = subprocess.run(
        [sys.executable, "-c", "from infinity._src import native; print(native.isa() == native.isas()[-1])"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "True"
