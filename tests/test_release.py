"""`.ci/release.py`: a tag that agrees with its tree becomes a release, and no other does."""

from __future__ import annotations

import json
import re
import runpy
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

import infinity as inf
from tests.test_wheel import ROOT, copy_of_the_tree, run

VERSION_FILE = "infinity/_src/base/version.py"


def git(place: Path, *words: str) -> None:
    identity = ("-c", "user.name=tests", "-c", "user.email=tests@localhost")
    run(["git", *identity, *words], place)


def commit(place: Path, changelog: str) -> None:
    """Commit the tree with this changelog."""
    (place / "CHANGELOG.md").write_text(changelog)
    git(place, "add", "-A")
    git(place, "commit", "-q", "-m", "as it is")


def release(place: Path, *tag: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, ".ci/release.py", *tag],
        cwd=place, capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_a_tag_that_does_not_agree_with_its_tree_is_refused(tmp_path: Path) -> None:
    for name in (".ci/release.py", VERSION_FILE):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    git(tmp_path, "init", "-q")
    version = inf.__version__
    for tag, heading, error in (
        ("", "", "there is no tag ''"),
        ("v9.8.7", "", "there is no tag 'v9.8.7'"),
        ("v9.8.6", "", f"tag v9.8.6 is of a tree with version {version}: name it v{version}"),
        (f"v{version}", "", "CHANGELOG.md has no heading"),
        (f"v{version}", f"## {version} (unreleased)\n", "CHANGELOG.md has 'unreleased' for the"),
        (f"v{version}", f"## {version}\n", "CHANGELOG.md has '' for the date"),
    ):
        commit(tmp_path, f"# Changelog\n\n{tag}\n\n{heading}\n- this\n")
        if tag not in ("", "v9.8.7"):
            git(tmp_path, "tag", "-f", tag)
        done = release(tmp_path, tag)
        assert done.returncode == 2, done.stderr
        assert done.stderr.startswith(f"error: {error}")
        assert done.stderr.count("\n") == 1
    assert release(tmp_path).returncode == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        ".ci", ".git", "CHANGELOG.md", "infinity",
    ]  # fmt: skip


def test_the_notes_are_the_section_of_the_version() -> None:
    notes_of = runpy.run_path(str(ROOT / ".ci" / "release.py"))["notes_of"]
    newer = "## 1.2.0 (2026-12-31)\n\n### Part\n\n- new\n\n"
    changelog = f"# Log\n\n{newer}## 1.1.0 (2026-01-01)\n\n- old\n"
    assert notes_of(changelog, "1.2.0") == "### Part\n\n- new\n"
    assert notes_of(changelog, "1.1.0") == "- old\n"
    with pytest.raises(ValueError, match="no heading"):
        notes_of(changelog, "1")


@pytest.mark.slow
def test_a_release_has_wheel_sdist_sbom_and_notes_of_the_tag_alone(tmp_path: Path) -> None:
    """Installs the wheel's dependencies from the package index."""
    pytest.importorskip("cyclonedx_py", reason="pip install cyclonedx-bom (make slow does)")
    pytest.importorskip("ziglang", reason="pip install ziglang (make slow does)")
    tree = copy_of_the_tree(tmp_path / "tree", "Makefile", ".ci")
    git(tree, "init", "-q")
    version = inf.__version__
    older = "## 0.0.1 (2026-01-01)\n\n- old\n"
    commit(tree, f"# Log\n\n## {version} (2026-12-31)\n\n- this\n\n{older}")
    git(tree, "tag", f"v{version}")
    (tree / "infinity" / "later.py").write_text("")
    done = release(tree, f"v{version}")
    assert done.returncode == 0, done.stderr
    files = {path.suffix: path for path in (tree / "dist" / f"v{version}").iterdir()}
    assert done.stdout.split() == sorted(str(path.relative_to(tree)) for path in files.values())
    assert set(files) == {".whl", ".gz", ".json", ".md"}
    assert files[".md"].read_text() == "- this\n"
    with tarfile.open(files[".gz"]) as sdist:
        names = sdist.getnames()
    assert f"infinity_offload-{version}/infinity/aio/__init__.py" in names
    assert not any("later.py" in name for name in names)
    bill = json.loads(files[".json"].read_text())
    root = bill["metadata"]["component"]
    assert (root["name"], root["version"]) == ("infinity-offload", version)
    needed = re.findall(r'^    "(torch|numpy|rich)>=', (ROOT / "pyproject.toml").read_text(), re.M)
    assert {"torch", "numpy", "rich"} == set(needed) <= {one["name"] for one in bill["components"]}
    assert not (tree / "build" / "release").exists()
