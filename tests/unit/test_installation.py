"""Packages that commands need, and the line that installs them from where this one came from."""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from infinity._src.cabi import installation
from infinity._src.cabi.installation import EXTRA, NEEDS, install_line
from infinity._src.cli import doctor
from infinity._src.cli.main import main

ROOT = Path(__file__).parents[2]
NAMED = f"{installation.DISTRIBUTION}[{EXTRA}]"


def installed(place: Path, monkeypatch: pytest.MonkeyPatch, noted: dict[str, Any] | None) -> None:
    """Install nothing but this package's metadata, with a direct_url.json of `noted`."""
    metadata = place / "infinity_offload-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: infinity-offload\n")
    if noted is not None:
        (metadata / "direct_url.json").write_text(json.dumps(noted))
    monkeypatch.setattr(sys, "path", [str(place)])


@pytest.mark.parametrize(
    ("noted", "line"),
    [
        ({"url": "file:///a%20b/infinity", "dir_info": {"editable": True}},
         f"pip install -e '/a b/infinity[{EXTRA}]'"),
        ({"url": "file:///a/infinity", "dir_info": {}}, f"pip install '/a/infinity[{EXTRA}]'"),
        ({"url": "file:///a/infinity.whl", "archive_info": {}},
         f"pip install '{NAMED} @ file:///a/infinity.whl'"),
        ({"url": "ssh://host/infinity", "vcs_info": {"vcs": "git", "commit_id": "abc"}},
         f"pip install '{NAMED} @ git+ssh://host/infinity@abc'"),
    ],
)  # fmt: skip
def test_the_line_installs_from_where_the_package_came_from(
    noted: dict[str, Any], line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(tmp_path, monkeypatch, noted)
    assert install_line(EXTRA) == line


def test_a_package_of_an_index_is_named_and_a_source_tree_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(tmp_path, monkeypatch, None)
    assert install_line(EXTRA, "--no-deps") == f"pip install --no-deps -e '{ROOT}[{EXTRA}]'"
    monkeypatch.setattr(installation, "__file__", str(tmp_path / "infinity/_src/base/x.py"))
    assert install_line(EXTRA) == f"pip install '{NAMED}'"
    assert install_line() == "pip install infinity-offload"


def test_metadata_of_a_build_do_not_hide_those_of_the_installation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "infinity_offload.egg-info").mkdir()
    (tmp_path / "infinity_offload.egg-info" / "PKG-INFO").write_text("Name: infinity-offload\n")
    (tmp_path / "site").mkdir()
    noted = {"url": "file:///a", "dir_info": {"editable": True}}
    installed(tmp_path / "site", monkeypatch, noted)
    monkeypatch.setattr(sys, "path", [str(tmp_path), str(tmp_path / "site")])
    assert install_line() == "pip install -e /a"


def test_a_source_tree_in_place_of_an_installation_is_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `python -m infinity.bench` in a clone, after `pip install .`."""
    installed(tmp_path, monkeypatch, {"url": f"file://{ROOT}", "dir_info": {}})
    assert installation.hidden_package() is None
    (tmp_path / "infinity").mkdir()
    (tmp_path / "infinity" / "_native.abi3.so").touch()
    assert installation.hidden_package() == tmp_path / "infinity"
    monkeypatch.setattr(installation, "__file__", str(tmp_path / "infinity/_src/cabi/x.py"))
    assert installation.hidden_package() is None


def test_the_extra_has_all_packages_that_commands_need() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    extra = re.search(rf"^{EXTRA} = \[(.*?)\]$", text, flags=re.MULTILINE | re.DOTALL)
    assert extra is not None
    listed = set(re.findall(r'"([\w-]+)>=', extra[1]))
    assert listed == {package for packages in NEEDS.values() for package in packages}


def test_doctor_names_the_commands_that_lack_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not doctor._commands().warning
    monkeypatch.setitem(sys.modules, "plotly", None)
    found = doctor._commands()
    assert found.value == "train lacks plotly; report lacks plotly"
    assert found.warning.endswith(install_line(EXTRA))
    monkeypatch.setattr(doctor, "findings", lambda *_, **__: iter([found]))
    console = Console(file=io.StringIO(), width=300)
    doctor.run_doctor(console=console)
    # Its brackets are no markup.
    assert f"warning: commands: {found.warning}\n" in console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("command", "package"),
    [
        ("train model.gguf --text text --out out", "transformers"),
        ("train model.gguf --text text --out out", "gguf"),
        ("plan config.json --tokens-per-step 1 --ram 1GiB", "transformers"),
    ],
)
def test_a_command_without_its_package_is_one_line_and_leaves_nothing(
    command: str,
    package: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.chdir(tmp_path)
    files = ("config.json", "model.gguf", "text")
    for name in files:
        (tmp_path / name).write_text('{"model_type": "llama"}')
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert main(command.split()) == 2
    shown = sys.stdout.getvalue() + capsys.readouterr().err  # type: ignore[attr-defined]
    (line,) = re.findall("^error: .*", shown, flags=re.MULTILINE)
    assert line.endswith(install_line(EXTRA))
    assert shown.endswith(f"{line}\n")
    assert sorted(path.name for path in tmp_path.iterdir()) == list(files)
