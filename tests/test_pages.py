"""The pages of the site, built without theme, API reference and run of the notebook."""

from __future__ import annotations

from pathlib import Path

from mkdocs.commands.build import build
from mkdocs.config import load_config

ROOT = Path(__file__).resolve().parent.parent


def test_pages_are_built_without_a_warning(tmp_path: Path) -> None:
    """Each page has a place in the navigation; links lead to pages, files and headings."""
    config = load_config(
        str(ROOT / ".ci" / "mkdocs.yml"),
        site_dir=str(tmp_path / "site"),
        theme={"name": "mkdocs"},
        plugins=[],
        strict=True,
    )
    build(config)
    assert "Take it when" in (tmp_path / "site" / "index.html").read_text(encoding="utf-8")
