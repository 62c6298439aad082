"""Sets up a bare machine without a network for the commands of this folder.

    python3 bench/gpu/prepare.py        # every command does this if necessary

The machine needs torch, triton and transformers. The bundle (`make gpu-bundle`, build/gpu-bundle)
contains wheels and the C extension. Wheels that this Python lacks are installed into a folder of
build/gpu-site named after its version and ABI, and the extension into its package. The script
replaces no installed package and downloads nothing. Without a bundle it compiles the extension, if
there are a compiler and cffi.

Uses the standard library only.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import importlib.machinery
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SITES = ROOT / "build" / "gpu-site"
#: Wheels of one Python hold extensions that no other Python loads.
SITE = SITES / str(sysconfig.get_config_var("SOABI") or sys.implementation.cache_tag)
BUNDLE = ROOT / "build" / "gpu-bundle"
EXTENSION = ROOT / "infinity" / "_native.abi3.so"
DIGEST = SITES / "native.digest"
MANIFEST = "manifest.json"
PYTHON_MIN = (3, 10)

#: The package that brings each module; wheels of all of these are in the bundle.
WHEELS = {
    "cffi": "cffi",
    "pycparser": "pycparser",
    "liburing": "liburing",
    "psutil": "psutil",
    "safetensors": "safetensors",
    "xxhash": "xxhash",
    "rich": "rich",
    "shtab": "shtab",
    "markdown_it": "markdown-it-py",
    "mdurl": "mdurl",
    "pygments": "Pygments",
    "typing_extensions": "typing_extensions",
    "pytest": "pytest",
    "iniconfig": "iniconfig",
    "pluggy": "pluggy",
    "packaging": "packaging",
    "xdist": "pytest-xdist",
    "execnet": "execnet",
    "hypothesis": "hypothesis",
    "sortedcontainers": "sortedcontainers",
}
OLD_PYTHON = {"exceptiongroup": "exceptiongroup", "tomli": "tomli"}  # before 3.11
GIVEN = ("torch", "numpy", "triton", "transformers")  # too large for a bundle
USEFUL = ("accelerate", "peft")  # some tests skip without
#: The oldest releases that the commands have been tried with.
TRIED = {"torch": (2, 11), "triton": (3, 6), "transformers": (5, 17), "numpy": (2, 4)}

CHECK = """
import importlib.metadata, json, sys
import torch, numpy, transformers
import infinity
from infinity._src.cabi import native
native.load()
names = sys.argv[1].split(",")
print(json.dumps({name: importlib.metadata.version(name) for name in names}))
"""


class Unready(Exception):
    """The machine cannot be set up; the message says what to do."""


def wanted() -> dict[str, str]:
    """Module -> package, for this Python."""
    return {**WHEELS, **(OLD_PYTHON if sys.version_info < (3, 11) else {})}


def native_digest() -> str:
    """A digest of the sources that the extension is built from."""
    found = hashlib.sha256()
    folder = ROOT / "native"
    sources = [*folder.rglob("*.c"), *folder.rglob("*.h"), folder / "build_native.py"]
    for path in sorted(sources):
        name = str(path.relative_to(folder))
        found.update(name.encode() + b"\0" + path.read_bytes() + b"\0")
    return found.hexdigest()


def file_digest(path: Path) -> str:
    """SHA-256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def has(module: str, *sites: Path) -> bool:
    """Tell whether this Python finds a module, in its own folders or in those given."""
    for site in sites:
        # What an earlier look has seen of the folder is from before something was installed there.
        sys.path_importer_cache.pop(str(site), None)
    # Commands have SITE in PYTHONPATH; what it lacks is installed beside all that it has.
    own = [place for place in sys.path if place != str(SITE)]
    return importlib.machinery.PathFinder.find_spec(module, [*own, *map(str, sites)]) is not None


def lacking(*sites: Path) -> list[str]:
    """Packages that this Python and the folders given lack."""
    return [package for module, package in wanted().items() if not has(module, *sites)]


def extension_is_current() -> bool:
    """Tell whether there is an extension. If `prepare` has put it there, it must be made of these
    sources; an extension that was built here is not checked."""
    if not EXTENSION.is_file():
        return False
    return not DIGEST.is_file() or DIGEST.read_text() == native_digest()


def is_ready() -> bool:
    """Tell whether nothing is left to do. Takes milliseconds."""
    return not lacking(SITE) and extension_is_current()


def read_manifest(bundle: Path) -> dict[str, Any]:
    """The list of a bundle's files. Raises: Unready where it is not whole."""
    file = bundle / MANIFEST
    if not file.is_file():
        raise Unready(
            f"there is no bundle in {bundle}: run `make gpu-bundle` where there is a network, and "
            "bring build/gpu-bundle with the tree"
        )
    manifest: dict[str, Any] = json.loads(file.read_text())
    for name, digest in manifest["files"].items():
        if not (bundle / name).is_file() or file_digest(bundle / name) != digest:
            raise Unready(f"{bundle / name} is missing or not as it was made: bring it again")
    return manifest


def install(bundle: Path, packages: Sequence[str]) -> None:
    """Make SITE anew, of packages from the bundle; it is there whole or not at all. Raises:
    Unready."""
    read_manifest(bundle)
    made = SITE.with_name(f"{SITE.name}.part")
    shutil.rmtree(made, ignore_errors=True)
    if not has("pip"):
        raise Unready(
            f"this Python ({sys.executable}) has no pip to install {', '.join(packages)} with: run "
            f"`{sys.executable} -m ensurepip`, or name a Python that has it"
        )
    # Isolated: an index or a target in the machine's configuration is for other packages.
    command = [sys.executable, "-m", "pip", "--isolated", "install", "-q"]
    command += ["--disable-pip-version-check"]
    command += ["--no-index", "--find-links", str(bundle / "wheels"), "--no-deps", "--no-compile"]
    command += ["--no-cache-dir", "--upgrade", "--target", str(made), *packages]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Unready(
            f"pip cannot install {', '.join(packages)} from {bundle} for Python "
            f"{platform.python_version()}:\n{(done.stderr + done.stdout)[-2000:]}"
        )
    shutil.rmtree(SITE, ignore_errors=True)
    made.rename(SITE)


def place_extension(bundle: Path) -> str:
    """Put the extension where an import finds it: the bundle's, if it is of these sources, else one
    that is compiled. Returns where it came from. Raises: Unready."""
    DIGEST.parent.mkdir(parents=True, exist_ok=True)
    digest = native_digest()
    manifest = read_manifest(bundle) if (bundle / MANIFEST).is_file() else None
    if manifest is not None and manifest["native"] == digest:
        # Replaced, not overwritten: a running process keeps the file that it has mapped.
        beside = EXTENSION.with_name(f"{EXTENSION.name}.{os.getpid()}")
        shutil.copyfile(bundle / EXTENSION.name, beside)
        beside.replace(EXTENSION)
        DIGEST.write_text(digest)
        return "the bundle's"
    why = "the bundle's is of other sources" if manifest else f"there is no bundle in {bundle}"
    places = [str(SITE), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(places)}
    done = subprocess.run(
        [sys.executable, str(ROOT / "native" / "build_native.py")],
        env=env, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise Unready(
            f"the C extension is missing: {why}, and it cannot be compiled here. Run `make "
            f"gpu-bundle` anew and bring build/gpu-bundle.\n{done.stderr[-1500:]}"
        )
    DIGEST.write_text(digest)
    return f"compiled ({why})"


def check() -> dict[str, str]:
    """Import all packages in a separate process; returns their versions. Raises: Unready."""
    missing = [module for module in GIVEN if not has(module, SITE)]
    if missing:
        raise Unready(
            f"this Python ({sys.executable}) has no {', '.join(missing)}: use one that has"
        )
    if not (ROOT / "infinity" / "aio" / "__init__.py").is_file():
        raise Unready("infinity/aio is not there: it is a symbolic link to ../aio, copy it as one")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(SITE)])}
    names = ",".join([*GIVEN, "cffi", "liburing", "pytest"])
    done = subprocess.run(
        [sys.executable, "-c", CHECK, names], env=env, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise Unready(f"infinity cannot be imported:\n{done.stderr[-2500:]}")
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


def untried(name: str, version: str) -> str:
    """Words for a release that is older than those that the commands were tried with."""
    oldest = TRIED.get(name, ())
    if tuple(int(part) for part in re.findall(r"\d+", version)[:2]) >= oldest:
        return ""
    return f" (older than {'.'.join(map(str, oldest))}, the oldest that was tried)"


def prepare(bundle: Path) -> None:
    """Do what is left to do, and check it. Raises: Unready."""
    if sys.version_info < PYTHON_MIN or (platform.system(), platform.machine()) != (
        "Linux",
        "x86_64",
    ):
        raise Unready(
            f"the bundle is for Python 3.10 and later on Linux x86_64; this is Python "
            f"{platform.python_version()} on {platform.system()} {platform.machine()}"
        )
    packages = lacking()
    if lacking(SITE):
        install(bundle, packages)
    sys.stdout.write(f"from the bundle: {', '.join(packages) or 'nothing was missing'}\n")
    if not extension_is_current():
        sys.stdout.write(f"extension: {place_extension(bundle)}\n")
    for name, version in check().items():
        sys.stdout.write(f"{name} {version}{untried(name, version)}\n")
    for module in USEFUL:
        if not has(module, SITE):
            sys.stdout.write(f"without {module}: tests that need it are skipped\n")
    sys.stdout.write(f"ready: PYTHONPATH={ROOT}:{SITE}\n")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bundle", type=Path, default=BUNDLE, help="(%(default)s)")
    args = parser.parse_args()
    try:
        prepare(args.bundle.resolve())
    except Unready as unready:
        sys.stderr.write(f"not ready: {unready}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
