"""Builds the cffi extension `infinity._native` from the *.c and *.cdef.h in native/.

`python native/build_native.py` builds infinity/_native.abi3.so in the source tree; pip runs the
`build_ext` class below (pyproject.toml: [[tool.setuptools.ext-modules]] and
[tool.setuptools.cmdclass]). `python native/build_native.py requires` prints the packages that a
build needs on this machine.

Compiler: CC if set, else the system's if it works, else clang from the wheel `ziglang`.

Environment: CC (`CC=zig`: the wheel's compiler); INFINITY_WERROR=1 makes warnings errors;
INFINITY_SANITIZE=address,undefined (or thread) builds with those sanitizers.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from setuptools import Distribution, Extension
from setuptools.command.build_ext import build_ext as _build_ext
from setuptools.errors import CompileError

ROOT = Path(__file__).resolve().parent.parent
NATIVE = ROOT / "native"
MODULE = "infinity._native"
GLUE = "_native_glue.c"

LIMITED_API = "0x030A0000"
"""Python 3.10: one abi3 file serves every later version."""

REQUIRES = ("cffi>=1.17",)
ZIGLANG = "ziglang>=0.17"
"""clang 22: with the clang of older ones, zig refuses AVX-512 in functions of a baseline build."""

GLIBC = "2.28"
"""The oldest glibc on which zig's output must run: the one that torch's wheels need."""

# -ffp-contract=off: no FMA, so that all instruction sets round identically. -fno-math-errno:
# without it sqrt stays scalar.
# -Werror=implicit-function-declaration: a call without its declaration passes floats as doubles.
COMPILE_FLAGS = (
    "-std=gnu11",
    "-Werror=implicit-function-declaration",
    "-O3",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fvisibility=hidden",
    "-pthread",
    "-Wall",
    "-Wextra",
)
LINK_FLAGS = ("-pthread", "-ldl", "-lm")

# A program that fails to build if a compiler lacks libc's headers or a linker.
PROBE = '#include <pthread.h>\n#include <stdio.h>\nint main(void) { return puts("") < 0; }\n'


def _works(command: str) -> bool:
    """Return whether a compiler can build a program."""
    words = shlex.split(command)
    if not words or shutil.which(words[0]) is None:
        return False
    with tempfile.TemporaryDirectory(prefix="infinity-probe-") as temp:
        source = Path(temp, "probe.c")
        source.write_text(PROBE)
        compile_it = [*words, str(source), "-o", str(Path(temp, "probe"))]
        return subprocess.run(compile_it, capture_output=True, check=False).returncode == 0


def system_compiler() -> str | None:
    """Return the command of the system's C compiler; None: there is none, or CC=zig.

    CC is returned unchecked, so that the user sees its error.
    """
    chosen = os.environ.get("CC")
    if chosen:
        return None if chosen == "zig" else chosen
    # First the compiler that built this Python, since setuptools adds its flags.
    commands = (sysconfig.get_config_var("CC") or "cc", "cc", "gcc", "clang")
    return next((command for command in commands if _works(command)), None)


def zig_command() -> list[str]:
    """Return the command of the C compiler in the wheel `ziglang`.

    Raises: CompileError when that is not installed.
    """
    if importlib.util.find_spec("ziglang") is None:
        raise CompileError(
            f"{MODULE} needs a C compiler: neither cc nor gcc nor clang makes a program here, and "
            f"the package ziglang is not installed; pip install '{ZIGLANG}', or install gcc and "
            "libc6-dev, or set CC"
        )
    # An explicit target: without one zig compiles for this processor and this machine's glibc.
    target = f"{platform.machine()}-linux-gnu.{GLIBC}"
    return [sys.executable, "-m", "ziglang", "cc", "-target", target]


def compiler_command() -> list[str]:
    """Return the compiler's command for builds on this machine; tests use it, too.

    Raises: CompileError when there is none.
    """
    system = system_compiler()
    return shlex.split(system) if system else zig_command()


def requires() -> list[str]:
    """Return the packages, besides setuptools, that a build on this machine needs."""
    return [*REQUIRES, *([] if system_compiler() else [ZIGLANG])]


def cdef_text() -> str:
    """Return the declarations for cffi: kernels.cdef.h first, since the others use its structs."""
    files = sorted(
        NATIVE.rglob("*.cdef.h"), key=lambda file: (file.name != "kernels.cdef.h", file.name)
    )
    return "\n".join(file.read_text() for file in files)


def preamble_text() -> str:
    """Return the includes of the generated glue: infinity.h, and every header with a cdef file of
    the same name."""
    headers = ["infinity.h"]
    for cdef in sorted(NATIVE.rglob("*.cdef.h")):
        header = cdef.with_name(cdef.name.replace(".cdef.h", ".h"))
        if header.exists():
            headers.append(str(header.relative_to(NATIVE)))
    return "".join(f'#include "{name}"\n' for name in headers)


def sources() -> list[str]:
    """Return every C file, by its path from the root, as setuptools needs it."""
    found = sorted(NATIVE.rglob("*.c"))
    return [str(file.relative_to(ROOT)) for file in found if file.name != GLUE]


def depends() -> list[str]:
    """Return further files that a rebuild depends on."""
    headers = [str(file.relative_to(ROOT)) for file in sorted(NATIVE.rglob("*.h"))]
    return [*headers, "native/build_native.py"]


def compile_flags() -> list[str]:
    """Return the compiler flags, with those of the environment."""
    flags = list(COMPILE_FLAGS)
    if os.environ.get("INFINITY_WERROR") == "1":
        # keep assertions, which Python's flags disable
        flags += ["-Werror", "-UNDEBUG"]
    sanitizers = os.environ.get("INFINITY_SANITIZE")
    if sanitizers:
        flags += [
            f"-fsanitize={sanitizers}",
            "-fno-sanitize-recover=all",
            "-fno-omit-frame-pointer",
            "-g",
        ]
    return flags


def link_flags() -> list[str]:
    """Return the flags of the link step."""
    sanitizers = os.environ.get("INFINITY_SANITIZE")
    return [*LINK_FLAGS, *([f"-fsanitize={sanitizers}"] if sanitizers else [])]


def write_glue(directory: str) -> str:
    """Let cffi generate the Python glue into `directory`; returns its path."""
    from cffi import FFI
    from cffi.recompiler import make_c_source

    ffi = FFI()
    ffi.cdef(cdef_text())
    path = str(Path(directory) / GLUE)
    make_c_source(ffi, MODULE, preamble_text(), path)
    return path


class build_ext(_build_ext):  # noqa: N801 - setuptools' name
    """setuptools' build_ext, with the glue generated and the flags of this file."""

    def get_source_files(self) -> list[str]:
        """Return the files that a source distribution must contain, for setuptools (the project has
        no MANIFEST.in)."""
        found = sorted(NATIVE.rglob("*.[ch]")) + sorted(NATIVE.glob("*.py"))
        return [str(file.relative_to(ROOT)) for file in found]

    def run(self) -> None:
        """Choose the compiler before setuptools asks for CC."""
        header = Path(sysconfig.get_path("include"), "Python.h")
        if not header.exists():
            raise CompileError(
                f"{header} is missing: install the headers of this Python (Debian: apt-get install "
                f"python{sys.version_info[0]}.{sys.version_info[1]}-dev)"
            )
        system = system_compiler()
        self._zig = None if system else zig_command()
        if system:
            os.environ["CC"] = system
        super().run()

    def build_extensions(self) -> None:
        """Replace setuptools' compiler by zig."""
        if self._zig is not None:
            self._use_zig(self._zig)
        super().build_extensions()

    def _use_zig(self, zig: list[str]) -> None:
        # Without the flags with which this Python was built: some are for gcc only. zig's default
        # is a debug build that traps on undefined behaviour; a later zig may do so with -O3, too.
        flags = ["-fPIC", "-DNDEBUG", "-g0", "-fno-sanitize=undefined"]
        # Debian's pyconfig.h includes a file relative to /usr/include, which zig does not search
        # for a target. Last of all: zig's headers of libc must come first.
        flags += ["-idirafter", str(Path(sysconfig.get_path("include")).parent)]
        self.compiler.set_executables(
            compiler_so=[*zig, *flags, *shlex.split(os.environ.get("CFLAGS", ""))],
            linker_so=[*zig, "-shared", "-s", *shlex.split(os.environ.get("LDFLAGS", ""))],
        )
        # A cache per build: the user's home may not be writable, and stays clean.
        os.environ.setdefault("ZIG_GLOBAL_CACHE_DIR", str(Path(self.build_temp, "zig").resolve()))

    def build_extension(self, ext: Extension) -> None:
        if ext.name != MODULE:
            super().build_extension(ext)
            return
        Path(self.build_temp).mkdir(parents=True, exist_ok=True)
        ext.sources = [*sources(), write_glue(self.build_temp)]
        ext.depends = depends()
        ext.include_dirs = [*ext.include_dirs, str(NATIVE)]
        ext.define_macros = [*ext.define_macros, ("Py_LIMITED_API", LIMITED_API)]
        ext.extra_compile_args = compile_flags()
        ext.extra_link_args = link_flags()
        ext.py_limited_api = True
        super().build_extension(ext)


def build_in_place() -> Path:
    """Build infinity/_native.abi3.so in the source tree; returns its path. Raises what the compiler
    step raises."""
    here = Path.cwd()
    os.chdir(ROOT)
    try:
        with tempfile.TemporaryDirectory(prefix="infinity-native-") as temp:
            extension = Extension(MODULE, sources=[], py_limited_api=True)
            command: Any = build_ext(
                Distribution({"name": "infinity-native", "ext_modules": [extension]})
            )
            command.build_temp = os.path.join(temp, "temp")
            command.build_lib = os.path.join(temp, "lib")
            command.force = True
            command.ensure_finalized()
            command.run()
            built = Path(command.get_ext_fullpath(MODULE))
            target = ROOT / "infinity" / built.name
            # Replaced, not overwritten: a running process keeps the file it has mapped.
            beside = target.with_name(target.name + f".{os.getpid()}")
            shutil.copyfile(built, beside)
            beside.replace(target)
    finally:
        os.chdir(here)
    return target


if __name__ == "__main__":
    if sys.argv[1:] == ["requires"]:
        sys.stdout.write("\n".join(requires()) + "\n")
    else:
        sys.stdout.write(f"{build_in_place()}\n")
