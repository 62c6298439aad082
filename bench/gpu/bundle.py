"""Creates build/gpu-bundle: packages for a machine without a network (`make gpu-bundle`).

    wheels/             of the packages in `prepare.WHEELS`, for each Python, manylinux x86_64
    _native.abi3.so     the extension, from the wheel that `make wheel` has built for every glibc
                        from 2.28 on
    manifest.json       digests of both and of the extension's sources, and the list of packages

Exits with status 1 if tree and bundle together exceed 64 MiB.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

import prepare

PYTHONS = ("3.10", "3.11", "3.12", "3.13")
LIMIT_BYTES = 64 << 20
ROOT = prepare.ROOT
PINS = ROOT / ".ci" / "constraints.txt"
PACKAGES = [*prepare.WHEELS.values(), *prepare.OLD_PYTHON.values()]
# pip takes each tag literally: wheels for an older glibc are found only by their own tag.
PLATFORMS = (
    *(f"manylinux_2_{minor}_x86_64" for minor in (28, 27, 24, 17, 12, 5)),
    *("manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64"),
)


def download(python: str, target: Path) -> None:
    """Fetch the wheels for one Python. Raises: CalledProcessError."""
    pins = dict(line.split("==") for line in PINS.read_text().splitlines() if "==" in line)
    packages = [*prepare.WHEELS.values()]
    # C calls its functions by address, so the version is fixed
    packages[packages.index("liburing")] += f"=={pins['liburing']}"
    constrained = ["-c", str(PINS)]
    if python == "3.10":
        packages += prepare.OLD_PYTHON.values()
        # the pins are for the Python that runs the tests; some releases have no wheel for 3.10
        constrained = []
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


def files_of(bundle: Path) -> list[Path]:
    """Every file of a bundle."""
    return sorted(path for path in bundle.rglob("*") if path.is_file())


def tree() -> list[Path]:
    """The files of the tree that are copied with the bundle: all that git tracks or does not
    ignore."""
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        capture_output=True,
        text=True,
        check=True,
    )
    paths = [ROOT / name for name in listed.stdout.split("\0") if name]
    return [path for path in paths if path.is_symlink() or path.is_file()]


def size_bytes(files: Sequence[Path]) -> int:
    """Bytes of files; links are copied as links."""
    return sum(path.lstat().st_size for path in files)


def too_large(files: Sequence[Path], limit_bytes: int = LIMIT_BYTES) -> str:
    """Return the reason why files exceed the limit, naming the largest; "" if they fit."""
    size = size_bytes(files)
    if size <= limit_bytes:
        return ""
    largest = sorted(files, key=lambda one: one.lstat().st_size, reverse=True)[:5]
    named = ", ".join(f"{one} {one.lstat().st_size / 2**20:.1f}" for one in largest)
    return (
        f"tree and bundle are {size / 2**20:.1f} MiB together, more than the limit "
        f"of {limit_bytes / 2**20:g} MiB. The largest files, in MiB: {named}"
    )


def is_current(bundle: Path) -> bool:
    """Tell whether a bundle is complete, and made of these sources, Pythons and packages."""
    try:
        manifest = prepare.read_manifest(bundle)
    except prepare.Unready:
        return False
    made_of = {"native": prepare.native_digest(), "pythons": [*PYTHONS], "packages": PACKAGES}
    return all(manifest.get(name) == value for name, value in made_of.items())


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--wheels", type=Path, default=ROOT / "dist", help="(%(default)s)")
    parser.add_argument("--out", type=Path, default=prepare.BUNDLE, help="(%(default)s)")
    parser.add_argument(
        "--current", action="store_true", help="make nothing; status 0: the bundle is this tree's"
    )
    args = parser.parse_args()
    if args.current:
        return 0 if is_current(args.out) else 1
    shutil.rmtree(args.out, ignore_errors=True)
    (args.out / "wheels").mkdir(parents=True)
    take_extension(args.wheels, args.out)
    for python in PYTHONS:
        download(python, args.out / "wheels")
    manifest = {
        "native": prepare.native_digest(),
        "pythons": PYTHONS,
        "packages": PACKAGES,
        "files": {
            str(path.relative_to(args.out)): prepare.file_digest(path)
            for path in files_of(args.out)
        },
    }
    (args.out / prepare.MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
    made, beside = files_of(args.out), tree()
    sys.stdout.write(
        f"{args.out}: {len(made)} files, {size_bytes(made) / 2**20:.1f} MiB; the tree beside it "
        f"has {size_bytes(beside) / 2**20:.1f} MiB\n"
    )
    why = too_large([*made, *beside])
    sys.stderr.write(f"{why}\n" if why else "")
    return 1 if why else 0


if __name__ == "__main__":
    sys.exit(main())
