"""infinity._src.cabi.native: what is in use, why not, and what the environment changes. In
subprocesses: it is read at import."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from infinity._src.cabi import native
from infinity._src.cabi.installation import install_line
from native.build_native import COMPILE_FLAGS, compiler_command

MENDED_BY = f"build it by `{install_line('', '--force-reinstall', '--no-deps')}`"
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


def test_the_instruction_sets_are_those_of_the_kernel_s_list() -> None:
    """Linux lists a flag where the CPU has it and the system saves its registers."""
    flags = set(re.findall(r"\w+", Path("/proc/cpuinfo").read_text()))
    needs = {
        "portable": set(),
        "avx2": {"avx2"},
        "avx512": {"avx512f", "avx512bw", "avx512dq", "avx512vl"},
    }
    assert native.isas() == tuple(name for name in native.ISA_NAMES if needs[name] <= flags)


@pytest.mark.slow
@pytest.mark.parametrize("level", ["-O0", "-O1"])
def test_the_kernels_compile_without_warnings_at_low_levels(level: str, tmp_path: Path) -> None:
    """Intrinsics want constants, which -O0 does not propagate; -O1 follows fewer loops."""
    flags = [*COMPILE_FLAGS, level, "-Werror", "-Inative", "-c", "-o", str(tmp_path / "kernels.o")]
    source = "native/kernels/optimizer_kernels.c"
    subprocess.run([*compiler_command(), *flags, source], cwd=ROOT, check=True)


def test_without_the_extension_the_module_says_why_and_imports_no_torch() -> None:
    code = (
        "import sys; sys.modules['infinity._native'] = None\n"
        "from infinity._src.cabi import native; "
        "assert not native.available(); assert 'torch' not in sys.modules; "
        "print(native.isa(), native.isas(), native.reason())"
    )
    done = run(code)
    assert done.stdout.startswith(
        "none () infinity's C extension is missing or does not load (import of"
    ), done.stderr
    assert done.stdout.strip().endswith(MENDED_BY)


@pytest.mark.parametrize(
    "use",
    [
        "native.load()",
        "native.lib",
        "native.ffi",
        "native.crc32c(b'')",
        "native.select_isa('portable')",
    ],
)
def test_without_the_extension_its_first_use_is_an_import_error_that_names_the_command(
    use: str,
) -> None:
    done = run(
        "import sys; sys.modules['infinity._native'] = None\n"
        "from infinity._src.cabi import native; "
        f"{use}"
    )
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ImportError: infinity's C extension is missing"), done.stderr
    assert last.endswith(MENDED_BY)


def test_the_command_and_aio_import_without_the_extension() -> None:
    code = (
        "import sys; sys.modules['infinity._native'] = None; import infinity, infinity.aio, "
        "infinity._src.cli.main"
    )
    done = run(code)
    assert done.returncode == 0, done.stderr


def test_the_environment_selects_the_instruction_set() -> None:
    for name in native.isas():
        done = run("from infinity._src.cabi import native; print(native.isa())", INFINITY_ISA=name)
        assert done.stdout.strip() == name, done.stderr


@pytest.mark.parametrize("value", ["neon", "AVX2"])
def test_an_unknown_instruction_set_in_the_environment_is_an_error_that_lists_the_known(
    value: str,
) -> None:
    done = run("import infinity._src.cabi.native", INFINITY_ISA=value)
    assert done.returncode != 0
    assert "one of portable, avx2, avx512" in done.stderr


def test_the_widest_instruction_set_is_the_default() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "INFINITY_ISA"}
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "from infinity._src.cabi import native; print(native.isa() == native.isas()[-1])",
        ],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "True"
