"""Build what a release consists of, from a git tag, into dist/TAG.

    python .ci/release.py v1.2.3          (`make release TAG=v1.2.3`)

    infinity_offload-1.2.3.tar.gz   the source distribution, of the files of the tag
    infinity_offload-1.2.3-….whl    the wheel, built from the source distribution by `make wheel`
    infinity_offload-1.2.3.cdx.json the SBOM (CycloneDX): the dependencies, as they are in an
                                    environment into which the wheel was installed with the pins
    notes.md                        the section of the version in CHANGELOG.md

The tag is checked against the version of its tree, and against the heading in its changelog. Python
3.11 or later. Installing the wheel's dependencies may download gigabytes. Exit status 2: the tag is
not fit for a release; dist/TAG is made whole or not at all.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT / "build" / "release"


def run(*command: str | Path, **environment: str) -> str:
    """Run a command in the repository and return its output; its errors are shown."""
    words = list(map(str, command))
    done = subprocess.run(
        words, cwd=ROOT, env=os.environ | environment, stdout=subprocess.PIPE, text=True, check=True
    )
    return done.stdout.strip()


def check(tag: str) -> tuple[str, str]:
    """Return the version that a tag releases, and its notes. Raises: ValueError."""
    known = subprocess.run(
        ["git", "rev-parse", "-q", "--verify", f"refs/tags/{tag}^{{commit}}"],
        cwd=ROOT, capture_output=True, check=False,
    )  # fmt: skip
    if known.returncode:
        raise ValueError(f"there is no tag {tag!r}: make it by `git tag {tag or 'v1.2.3'}`")
    found = re.search(
        r'^__version__ = "(.+)"$',
        run("git", "show", f"{tag}:infinity/_src/base/version.py"),
        flags=re.MULTILINE,
    )
    version = found[1] if found else ""
    if tag != f"v{version}":
        raise ValueError(
            f"tag {tag} is of a tree with version {version}: name it v{version}, or change "
            "infinity/_src/base/version.py before the tag"
        )
    return version, notes_of(run("git", "show", f"{tag}:CHANGELOG.md"), version)


def notes_of(changelog: str, version: str) -> str:
    """Return the section of a version, without its heading. Raises: ValueError."""
    pattern = rf"^## {re.escape(version)}(?: \(([^\n]*)\))?\n(.*?)(?=^## |\Z)"
    found = re.search(pattern, changelog, flags=re.MULTILINE | re.DOTALL)
    if found is None:
        raise ValueError(f"CHANGELOG.md has no heading `## {version} (DATE)`")
    date = found[1] or ""
    if not re.fullmatch(r"\d{4}-\d\d-\d\d", date):
        raise ValueError(
            f"CHANGELOG.md has {date!r} for the date of {version}: its heading must be like "
            f"`## {version} (2026-12-31)`"
        )
    return f"{found[2].strip()}\n"


def build(tag: str, version: str, notes: str) -> Path:
    """Build everything in build/release and return the folder. Raises: CalledProcessError."""
    shutil.rmtree(WORK, ignore_errors=True)
    WORK.mkdir(parents=True)
    tree, done = WORK / "tree", WORK / "dist"
    run("git", "archive", "-o", WORK / "tree.tar", tag)
    shutil.unpack_archive(WORK / "tree.tar", tree, filter="data")
    # The time of the tag's commit, for reproducible archives.
    date = run("git", "log", "-1", "--format=%ct", tag)
    run("make", "-C", tree, "wheel", f"VENV={sys.prefix}", SOURCE_DATE_EPOCH=date)
    (tree / "dist").rename(done)
    (done / "notes.md").write_text(notes, encoding="utf-8")
    (wheel,) = done.glob("*.whl")
    environment = WORK / "environment"
    venv.create(environment, with_pip=False)
    python = environment / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python]
    run(*pip, "install", "-q", "--no-compile", "-c", tree / ".ci" / "constraints.txt", wheel)
    # With the version, which setuptools reads from a module and the SBOM's tool does not.
    project = (tree / "pyproject.toml").read_text(encoding="utf-8")
    named = WORK / "pyproject.toml"
    named.write_text(project.replace('dynamic = ["version"]', f'version = "{version}"'))
    bill = done / f"infinity_offload-{version}.cdx.json"
    run(
        sys.executable, "-m", "cyclonedx_py", "environment", "--output-reproducible",
        "--pyproject", named, "--mc-type", "library", "-o", bill, python,
        SOURCE_DATE_EPOCH=date,
    )  # fmt: skip
    return done


def main() -> int:
    """Check the tag, build, and name the files. Returns the exit status."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("tag", metavar="TAG", help="a git tag, v and the version: v1.2.3")
    tag = parser.parse_args().tag
    try:
        version, notes = check(tag)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    try:
        done = build(tag, version, notes)
    except subprocess.CalledProcessError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    target = ROOT / "dist" / tag
    shutil.rmtree(target, ignore_errors=True)
    target.parent.mkdir(exist_ok=True)
    done.rename(target)
    shutil.rmtree(WORK)
    print("\n".join(str(path.relative_to(ROOT)) for path in sorted(target.iterdir())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
