"""The source of this installation, the packages that a command needs in addition, and the command
that installs them.
"""

from __future__ import annotations

import importlib.util
import json
import shlex
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urlsplit

DISTRIBUTION: Final = "infinity-offload"
EXTRA: Final = "train"
"""The extra of pyproject.toml with all packages of NEEDS."""

NEEDS: Final = {
    "plan": ("transformers",),
    "train": ("transformers", "tokenizers", "gguf", "plotly", "matplotlib"),
    "report": ("plotly",),
    "bench --plot": ("matplotlib",),
    "bench --for": ("transformers",),
}
"""Command -> packages that it imports, and that an installation without the extra lacks."""


def is_installed(package: str) -> bool:
    """Return whether a package can be found, without importing it."""
    return importlib.util.find_spec(package) is not None


def lacking() -> dict[str, list[str]]:
    """Return the missing packages of each command; complete commands are left out."""
    found = {
        command: [package for package in packages if not is_installed(package)]
        for command, packages in NEEDS.items()
    }
    return {command: packages for command, packages in found.items() if packages}


def install_line(extra: str = "", *options: str) -> str:
    """Return the command that installs this package again from the same source, with an extra.
    options: of `pip install`.
    """
    return shlex.join(["pip", "install", *options, *_source(f"[{extra}]" if extra else "")])


def hidden_package() -> Path | None:
    """Return the directory of an installed package with the extension if this process has imported
    another tree instead; else None. `python -m` imports from the current directory first.
    """
    import importlib.metadata

    here = Path(__file__).resolve().parents[2]
    for found in importlib.metadata.distributions(name=DISTRIBUTION):
        package = Path(str(found.locate_file(here.name))).resolve()
        if package != here and any(package.glob("_native*.so")):
            return package
    return None


def not_installed(package: str) -> str:
    """Return the message for a missing package of NEEDS."""
    return f"{package} is not installed: {install_line(EXTRA)}"


def _source(extra: str) -> list[str]:
    """Return pip's arguments for the source of this package. pip records the source in
    direct_url.json, unless it is a package index.
    """
    noted = _direct_url()
    if noted is None:
        tree = Path(__file__).resolve().parents[3]
        # Either a source tree that is imported without an installation, or an index.
        return ["-e", f"{tree}{extra}"] if (tree / "pyproject.toml").is_file() else [_name(extra)]
    url = str(noted["url"])
    if "dir_info" in noted:
        directory = f"{unquote(urlsplit(url).path)}{extra}"
        return ["-e", directory] if noted["dir_info"].get("editable") else [directory]
    if "vcs_info" in noted:
        url = f"{noted['vcs_info']['vcs']}+{url}@{noted['vcs_info']['commit_id']}"
    return [f"{_name(extra)} @ {url}"]


def _name(extra: str) -> str:
    return f"{DISTRIBUTION}{extra}"


def _direct_url() -> dict[str, Any] | None:
    """Return the direct_url.json of this package (PEP 610), or None. Searches all metadata of the
    package: those of a build in a source tree on sys.path come first, and lack the file."""
    import importlib.metadata

    for found in importlib.metadata.distributions(name=DISTRIBUTION):
        text = found.read_text("direct_url.json")
        if text is not None:
            noted: dict[str, Any] = json.loads(text)
            return noted
    return None
