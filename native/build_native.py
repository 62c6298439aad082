"""Builds the cffi extension `infinity._native` from native/*.c and native/*.cdef.h.

Two ways, one description: `python native/build_native.py` puts infinity/_native.abi3.so into the source tree;
pip runs the `build_ext` class below (pyproject.toml: [[tool.setuptools.ext-modules]] and [tool.setuptools.cmdclass]).

Environment: CC; INFINITY_REQUIRE_NATIVE=1 turns a failed build into an error; INFINITY_WERROR=1 makes warnings errors;
INFINITY_SANITIZE=address,undefined (or thread) builds with those sanitizers.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from setuptools import Distribution, Extension
from setuptools.command.build_ext import build_ext as _build_ext

ROOT = Path(__file__).resolve().parent.parent
NATIVE = ROOT / "native"
MODULE = "infinity._native"
GLUE = "_native_glue.c"

LIMITED_API = "0x030A0000"
"""Python 3.10: one abi3 file serves every later version."""

# -ffp-contract=off: no FMA, so that every instruction set rounds alike. -fno-math-errno: without it sqrt stays scalar.
COMPILE_FLAGS = (
    "-std=gnu11",
    "-O3",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fvisibility=hidden",
    "-pthread",
    "-Wall",
    "-Wextra",
)
LINK_FLAGS = ("-pthread", "-ldl", "-lm")


def cdef_text() -> str:
    """The declarations for cffi: kernels.cdef.h first, since the others use its structs."""
    files = sorted(NATIVE.glob("*.cdef.h"), key=lambda file: (file.name != "kernels.cdef.h", file.name))
    return "\n".join(file.read_text() for file in files)


def preamble_text() -> str:
    """The includes of the generated glue: every header that has a cdef file of its name, and infinity.h."""
    headers = ["infinity.h"]
    for cdef in sorted(NATIVE.glob("*.cdef.h")):
        header = NATIVE / cdef.name.replace(".cdef.h", ".h")
        if header.exists():
            headers.append(header.name)
    return "".join(f'#include "{name}"\n' for name in headers)


def sources() -> list[str]:
    """Every C file, relative to the root as setuptools wants it."""
    return [f"native/{file.name}" for file in sorted(NATIVE.glob("*.c")) if file.name != GLUE]


def depends() -> list[str]:
    """What a rebuild must look at besides the sources."""
    return [f"native/{file.name}" for file in sorted(NATIVE.glob("*.h"))] + ["native/build_native.py"]


def compile_flags() -> list[str]:
    """Flags for every file, with what the environment asks for."""
    flags = list(COMPILE_FLAGS)
    if os.environ.get("INFINITY_WERROR") == "1":
        flags += ["-Werror", "-UNDEBUG"]  # a check keeps its assertions; Python's own flags switch them off
    sanitizers = os.environ.get("INFINITY_SANITIZE")
    if sanitizers:
        flags += [f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer", "-g"]
    return flags


def link_flags() -> list[str]:
    """Flags of the link step."""
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
        """What a source distribution must carry; setuptools asks. No MANIFEST.in is needed for it."""
        return [f"native/{file.name}" for file in sorted(NATIVE.glob("*.[ch]")) + sorted(NATIVE.glob("*.py"))]

    def build_extension(self, ext: Extension) -> None:
        if ext.name != MODULE:
            super().build_extension(ext)
            return
        ext.optional = os.environ.get("INFINITY_REQUIRE_NATIVE") != "1"
        Path(self.build_temp).mkdir(parents=True, exist_ok=True)
        try:
            glue = write_glue(self.build_temp)
        except ImportError as missing:
            if not ext.optional:
                raise
            self.warn(f"{MODULE} is not built, infinity falls back to torch kernels: {missing}")
            return
        ext.sources = [*sources(), glue]
        ext.depends = depends()
        ext.include_dirs = [*ext.include_dirs, str(NATIVE)]
        ext.define_macros = [*ext.define_macros, ("Py_LIMITED_API", LIMITED_API)]
        ext.extra_compile_args = compile_flags()
        ext.extra_link_args = link_flags()
        ext.py_limited_api = True
        super().build_extension(ext)


def build_in_place() -> Path:
    """Build infinity/_native.abi3.so in the source tree; returns its path. Raises what the compiler step raises."""
    os.environ["INFINITY_REQUIRE_NATIVE"] = "1"  # who asks for a build wants to hear that it failed
    here = Path.cwd()
    os.chdir(ROOT)
    try:
        with tempfile.TemporaryDirectory(prefix="infinity-native-") as temp:
            extension = Extension(MODULE, sources=[], py_limited_api=True)
            command: Any = build_ext(Distribution({"name": "infinity-native", "ext_modules": [extension]}))
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
    sys.stdout.write(f"{build_in_place()}\n")
