"""Makes build/gpu-bundle: what a machine without a network needs beside this tree (`make
gpu-bundle`).

    wheels/             of the packages in `prepare.WHEELS`, for each Python, manylinux x86_64
    _native.abi3.so     the extension, from the wheel that `make wheel` has built for every glibc
                        from 2.28 on
    manifest.json       digests of both, and of the sources that the extension is of
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import prepare

PYTHONS = ("3.10", "3.11", "3.12", "3.13")
LIMIT_BYTES = 64 << 20
PINS = prepare.ROOT / ".ci" / "constraints.txt"
# pip takes each of these literally: a wheel for an older glibc has to be asked for by name.
PLATFORMS = (
    *(f"manylinux_2_{minor}_x86_64" for minor in (28, 27, 24, 17, 12, 5)),
    *("manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64"),
)


def download(python: str, target: Path) -> None:
    """Fetch the wheels for one Python. Raises: CalledProcessError."""
    pins = dict(line.split("==") for line in PINS.read_text().splitlines() if "==" in line)
    packages = [*prepare.WHEELS.values()]
    packages[packages.index("liburing")] += f"=={pins['liburing']}"  # called by address
    constrained = ["-c", str(PINS)]
    if python == "3.10":
        packages += prepare.OLD_PYTHON.values()
        constrained = []  # the pins are of the Python that the tests run with; some have no 3.10
    abis = (f"cp{python.replace('.', '')}", "abi3", "none")
    command = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check"]
    command += [*constrained, "-d", str(target), "--no-deps", "--only-binary=:all:"]
    command += ["--implementation", "cp", "--python-version", python]
    command += [word for abi in abis for word in ("--abi", abi)]
    command += [word for name in PLATFORMS for word in ("--platform", name)]
    subprocess.run([*command, *packages], check=True)


def take_extension(wheels: Path, target: Path) -> None:
    """Copy the extension out of the newest wheel of this project. Raises: SystemExit."""
    found = sorted(wheels.glob("infinity_offload-*x86_64.whl"), key=lambda one: one.stat().st_mtime)
    if not found:
        raise SystemExit(
            f"there is no x86_64 wheel in {wheels}: run `make wheel` on such a machine"
        )
    with zipfile.ZipFile(found[-1]) as wheel:
        (target / prepare.EXTENSION.name).write_bytes(wheel.read("infinity/_native.abi3.so"))


def size_bytes(files: list[Path]) -> int:
    """Bytes of files."""
    return sum(path.stat().st_size for path in files)


def tree_bytes() -> int:
    """Bytes of what git has of the tree, which travels beside the bundle."""
    listed = subprocess.run(
        ["git", "-C", str(prepare.ROOT), "ls-files", "-z"],
        capture_output=True,
        text=True,
        check=True,
    )
    paths = [prepare.ROOT / name for name in listed.stdout.split("\0") if name]
    return size_bytes([path for path in paths if path.is_file() and not path.is_symlink()])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--wheels", type=Path, default=prepare.ROOT / "dist", help="(%(default)s)")
    parser.add_argument("--out", type=Path, default=prepare.BUNDLE, help="(%(default)s)")
    args = parser.parse_args()
    shutil.rmtree(args.out, ignore_errors=True)
    (args.out / "wheels").mkdir(parents=True)
    take_extension(args.wheels, args.out)
    for python in PYTHONS:
        download(python, args.out / "wheels")
    files = sorted(path for path in args.out.rglob("*") if path.is_file())
    manifest = {
        "native": prepare.native_digest(),
        "pythons": PYTHONS,
        "files": {str(path.relative_to(args.out)): prepare.file_digest(path) for path in files},
    }
    (args.out / prepare.MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
    size, tree = size_bytes(files), tree_bytes()
    sys.stdout.write(
        f"{args.out}: {len(files)} files, {size / 2**20:.1f} MiB; the tree beside it has "
        f"{tree / 2**20:.1f} MiB\n"
    )
    if size + tree > LIMIT_BYTES:
        sys.stderr.write(f"together they are more than {LIMIT_BYTES >> 20} MiB\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
