"""The wheel, and a build on a machine without a C compiler.

Installed into an environment of its own. torch and the other dependencies come from the environment
of the tests, by a .pth file: they are gigabytes, and no part of what is tested. A .pth file adds a
folder but does not read the .pth files in it, so the editable infinity of that folder stays out.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import time
import venv
import zipfile
from pathlib import Path

import pytest
import torch

from native.build_native import GLIBC, MODULE, ZIGLANG, system_compiler

ROOT = Path(__file__).resolve().parent.parent
DEPENDENCIES = Path(torch.__file__).resolve().parents[1]
COMPILERS = ("cc", "gcc", "clang", "c99", "tcc", "zig")
EXTENSION = "infinity/_native.abi3.so"

TRAIN = """
import importlib, shutil, sys, torch
import infinity as inf

native = importlib.import_module("infinity._native")
found = [name for name in {compilers} if shutil.which(name)]
assert not found, f"a compiler can be reached: {{found}}"

torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(3))).to(torch.bfloat16)
before = [parameter.detach().clone() for parameter in model.parameters()]
model = inf.offload(model, inf.Policy(params="nvme", optim="nvme", nvme=[sys.argv[1]], ram="min"))
optimizer = inf.AdamW(model.parameters(), lr=1e-2)
loss = model(torch.randn(4, 64, dtype=torch.bfloat16)).float().square().mean()
loss.backward()
optimizer.step()
handle = inf.handle(model)
handle.flush()
assert torch.isfinite(loss)
with handle.gather(list(model.parameters())):
    changed = sum(not torch.equal(a, b) for a, b in zip(before, model.parameters()))
written = handle.stats().bytes_written
handle.close()
print(native.__file__, inf.__file__, changed, written, sep="|")
"""

DIGEST = """
import hashlib, json, sys
from pathlib import Path
import numpy as np
import infinity._native
from infinity._src.cabi import native
from infinity._src.cabi.native import ffi, lib
from tests.unit.native.states import native_update
from tests.unit.native.test_update_kernels import CASES, ROWS, states

assert Path(infinity._native.__file__) == Path.cwd() / "infinity" / "_native.abi3.so"

def at(array):
    return ffi.cast("void *", array.ctypes.data)

def bits(array):
    # The payload of a NaN is nobody's value.
    array = np.ascontiguousarray(array)
    return np.where(np.isnan(array), np.float32(0), array) if array.dtype == np.float32 else array

digests = {}
for isa in native.isas():
    native.select_isa(isa)
    for name, form in CASES:
        for odd in (False, True):
            sections, grad = states(form, 3001, 5, odd=odd)
            native_update(form, sections, grad, ROWS[name][1])
            text = hashlib.sha256(b"".join(bits(section).tobytes() for section in sections))
            digests[f"{isa} {name} {int(form)} {odd}"] = text.hexdigest()
    values = np.random.default_rng(1).standard_normal(5000).astype(np.float32)
    for width in (8, 4):
        wire = np.zeros(lib.inf_wire_bytes(values.size, width, 128, 0), np.uint8)
        lib.inf_wire_encode(
            at(values), 2, ffi.NULL, 0, ffi.cast("uint8_t *", wire.ctypes.data),
            values.size, width, 128, 1, 7, 0)
        out = np.zeros_like(values)
        lib.inf_wire_decode_sum(
            ffi.new("uint64_t[2]", [wire.ctypes.data] * 2), 2, at(out), 2,
            values.size, width, 128, 2.0)
        digests[f"{isa} wire {width}"] = hashlib.sha256(wire.tobytes() + out.tobytes()).hexdigest()
ok = ffi.new("int32_t *")
for variant in range(4):
    value = lib.inf_crc32c_with(variant, 3, at(values), values.nbytes, ok)
    if ok[0]:
        digests[f"crc {variant}"] = value
print(json.dumps(digests))
"""


def copy_of_the_tree(target: Path, *more: str) -> Path:
    """The source tree as a fresh clone has it: nothing is built."""
    target.mkdir()
    entries = (
        "pyproject.toml",
        "setup.cfg",
        "README.md",
        "LICENSE",
        "infinity",
        "aio",
        "native",
        *more,
    )
    for entry in entries:
        source = ROOT / entry
        if source.is_dir():
            ignore = shutil.ignore_patterns("__pycache__", "*.so", "build")
            shutil.copytree(source, target / entry, symlinks=True, ignore=ignore)
        else:
            shutil.copy(source, target / entry)
    return target


def run(command: list[str], cwd: Path, **environment: str) -> str:
    """Run a command in an environment without this project's variables; returns its output."""
    # PYTHONPATH would bring the source tree in, and PYTHONHOME another interpreter.
    dropped = ("INFINITY_", "PYTHON", "CC", "CFLAGS", "LDFLAGS", "MAKE", "MFLAGS")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    done = subprocess.run(
        command, cwd=cwd, env=kept | environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


def path_of_tools(target: Path, *tools: str) -> str:
    """A PATH of a few tools and nothing else: no compiler."""
    target.mkdir()
    for tool in tools:
        found = shutil.which(tool)
        assert found, f"{tool} is missing"
        (target / tool).symlink_to(found)
    assert not any(shutil.which(name, path=str(target)) for name in COMPILERS)
    return str(target)


def environment_with(wheel: Path, tmp_path: Path) -> str:
    """Install a wheel, and nothing else, into an environment of its own; returns its Python."""
    environment = tmp_path / "environment"
    venv.create(environment, with_pip=False)
    python = str(environment / "bin" / "python")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python]
    run([*pip, "install", "-q", "--no-deps", "--no-index", str(wheel)], tmp_path)
    return python


def assert_trains(wheel: Path, tmp_path: Path) -> None:
    """Check names and tag of a wheel; install it into an empty environment and train a step
    there."""
    machine = platform.machine()
    # auditwheel gives the oldest of them its other name too.
    tags = rf"(manylinux2014_{machine}\.)?manylinux_2_\d+_{machine}"
    name = rf"infinity_offload-[^-]+-cp310-abi3-{tags}\.whl"
    assert re.fullmatch(name, wheel.name), wheel.name
    names = zipfile.ZipFile(wheel).namelist()
    dist_info = "-".join(wheel.name.split("-")[:2]) + ".dist-info"
    # No infinity_offload.libs either: the extension needs no library but glibc's.
    assert {entry.split("/")[0] for entry in names} == {"infinity", dist_info}
    assert {"infinity/py.typed", "infinity/aio/__init__.py", "infinity/_src/cli/main.py"} <= set(
        names
    )
    assert [entry for entry in names if entry.endswith(".so")] == [EXTENSION]

    python = environment_with(wheel, tmp_path)
    (site,) = Path(python).parents[1].glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(f"{DEPENDENCIES}\n")
    (tmp_path / "swap").mkdir()
    code = TRAIN.format(compilers=COMPILERS)
    path = path_of_tools(tmp_path / "no-tools")
    out = run(
        [python, "-c", code, str(tmp_path / "swap")], tmp_path, PATH=path, OMP_NUM_THREADS="1"
    )
    extension, package, changed, written = out.splitlines()[-1].split("|")
    assert Path(extension) == site / EXTENSION
    assert Path(package) == site / "infinity" / "__init__.py"
    assert int(changed) == 6
    assert int(written) > 0


def test_a_wheel_trains_in_an_environment_without_a_compiler(tmp_path: Path) -> None:
    """The quick one: it packs the extension in use, so that nothing is compiled. The wheel is built
    from the source distribution."""
    spec = importlib.util.find_spec(MODULE)
    assert spec is not None
    assert spec.origin is not None
    source = copy_of_the_tree(tmp_path / "source")
    build = [sys.executable, "-m", "build", "-q", "--sdist", "--no-isolation", "-o", str(tmp_path)]
    run(build, source)
    (sdist,) = tmp_path.glob("*.tar.gz")
    shutil.unpack_archive(sdist, tmp_path)
    # Above a clone called `infinity` the installed package is imported, no namespace of that name.
    tree = tmp_path / "infinity"
    (tmp_path / sdist.name.removesuffix(".tar.gz")).rename(tree)
    lib = (
        tree
        / "build"
        / f"lib.{sysconfig.get_platform()}-{sys.implementation.cache_tag}"
        / "infinity"
    )
    lib.mkdir(parents=True)
    packed_here = shutil.copyfile(spec.origin, lib / "_native.abi3.so")
    # Newer than its sources, and than the glue that is yet to be written: the build takes it for
    # its own.
    os.utime(packed_here, (time.time() + 3600,) * 2)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    run([*pip, "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", "plain", "."], tree)
    (plain,) = tree.glob("plain/*.whl")
    packed = zipfile.ZipFile(plain).read(EXTENSION)
    assert (
        hashlib.sha256(packed).digest() == hashlib.sha256(Path(spec.origin).read_bytes()).digest()
    )
    repair = [sys.executable, "-m", "auditwheel", "repair", "--only-plat", "-w", "dist", str(plain)]
    tools = f"{sysconfig.get_path('scripts')}{os.pathsep}{os.environ['PATH']}"
    run(repair, tree, PATH=tools)
    (wheel,) = tree.glob("dist/*.whl")
    assert_trains(wheel, tmp_path)


def test_above_a_clone_that_is_installed_to_edit_the_package_is_imported(tmp_path: Path) -> None:
    """Not a namespace package for the folder of the clone, which has the package's name."""
    tree = copy_of_the_tree(tmp_path / "infinity")
    # Compiles nothing, quickly: it creates an empty output file.
    compiler = tmp_path / "cc"
    compiler.write_text('#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\n: > "$2"\n')
    compiler.chmod(0o755)
    code = f"import build_backend as b; b.build_editable({str(tmp_path)!r})"
    build = [sys.executable, "-c", f"import sys; sys.path.insert(0, 'native'); {code}"]
    run(build, tree, CC=str(compiler))
    (wheel,) = tmp_path.glob("*.whl")
    python = environment_with(wheel, tmp_path)
    (tmp_path / "below").mkdir()
    for place in (tmp_path, tmp_path / "below", tree):
        found = run([python, "-c", "import infinity; print(infinity.__file__)"], place)
        assert found == str(tree / "infinity" / "__init__.py")


@pytest.mark.parametrize(
    "hook", ["get_requires_for_build_wheel", "get_requires_for_build_editable"]
)
def test_a_build_asks_for_a_compiler_where_there_is_none_and_only_there(
    tmp_path: Path, hook: str
) -> None:
    code = f"import build_backend as b; print(*b.{hook}({{}}))"
    ask = [sys.executable, "-c", f"import sys; sys.path.insert(0, 'native'); {code}"]
    tree = copy_of_the_tree(tmp_path / "tree")
    path = path_of_tools(tmp_path / "tools")
    asked = run(ask, tree, PATH=path).splitlines()[-1]
    assert ZIGLANG in asked.split()
    # gcc alone, as some images have it: without libc's headers it makes no program.
    broken = tmp_path / "tools" / "gcc"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    assert run(ask, tree, PATH=path).splitlines()[-1] == asked
    # A compiler that works, whatever it makes.
    broken.write_text("#!/bin/sh\nexit 0\n")
    assert run(ask, tree, PATH=path).splitlines()[-1] == asked.replace(f" {ZIGLANG}", "")


def test_a_build_without_any_compiler_fails_and_says_what_to_install(tmp_path: Path) -> None:
    tree = copy_of_the_tree(tmp_path / "tree")
    path = path_of_tools(tmp_path / "tools")
    script = str(tree / "native" / "build_native.py")
    code = (
        "import runpy, sys; sys.modules['ziglang'] = None; sys.argv = ['build_native.py']; "
        f"runpy.run_path({script!r}, run_name='__main__')"
    )
    environment = {**os.environ, "PATH": path}
    environment.pop("CC", None)
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tree,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert f"pip install '{ZIGLANG}', or install gcc and libc6-dev, or set CC" in done.stderr
    assert not list(tree.rglob("*.so"))


def test_a_compiler_that_the_user_names_is_not_replaced_when_it_fails(tmp_path: Path) -> None:
    tree = copy_of_the_tree(tmp_path / "tree")
    done = subprocess.run(
        [sys.executable, "native/build_native.py"],
        cwd=tree,
        env={**os.environ, "CC": "false"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert "false" in done.stderr
    assert not list(tree.rglob("*.so"))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tree in which `make wheel` ran without a C compiler on the PATH."""
    pytest.importorskip("ziglang", reason=f"pip install '{ZIGLANG}' (make slow does)")
    base = tmp_path_factory.mktemp("made")
    tree = copy_of_the_tree(base / "tree", "Makefile", ".ci", "tests")
    path = path_of_tools(base / "tools", "make", "sh", "rm", "cp", "uname")
    # No index: what `make wheel` installs is there already, and this environment stays as it is.
    run(["make", "wheel", f"VENV={sys.prefix}"], tree, PATH=path, PIP_NO_INDEX="1")
    return tree


@pytest.mark.slow
def test_make_wheel_needs_no_compiler_and_makes_what_every_machine_takes(
    made: Path, tmp_path: Path
) -> None:
    (wheel,) = made.glob("dist/*.whl")
    assert wheel.stem.endswith(f"-manylinux_{GLIBC.replace('.', '_')}_{platform.machine()}")
    assert_trains(wheel, tmp_path)


@pytest.mark.slow
def test_kernels_built_by_zig_have_the_bits_of_those_built_by_the_system_compiler(
    made: Path,
) -> None:
    if system_compiler() is None:
        pytest.skip("no system compiler to compare with")
    digests = []
    with zipfile.ZipFile(next(made.glob("dist/*.whl"))) as wheel:
        by_zig = wheel.read(EXTENSION)
    for build in ("zig", "system"):
        if build == "zig":
            (made / EXTENSION).write_bytes(by_zig)
        else:
            (made / EXTENSION).unlink()
            run([sys.executable, "native/build_native.py"], made, INFINITY_WERROR="1")
            assert (made / EXTENSION).read_bytes() != by_zig
        digests.append(json.loads(run([sys.executable, "-c", DIGEST], made, PYTHONPATH=str(made))))
    assert len(digests[0]) > 100
    assert digests[0] == digests[1]
