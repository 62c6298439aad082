"""The site that `make docs` has built: its front page, its reference, its notebook."""

from __future__ import annotations

import functools
import html
import json
import re
from pathlib import Path

import pytest

import infinity
from tests.test_public_api import documented_modules

ROOT = Path(__file__).resolve().parent.parent
SITE = ROOT / "build" / "site"
COMMANDS = {"infinity.bench"}
"""Public modules that are commands, and have no names."""

pytestmark = pytest.mark.site


@functools.cache
def text_of(page: str) -> str:
    return (SITE / page).read_text(encoding="utf-8")


def words_of(page: str) -> str:
    return html.unescape(re.sub(r"<[^>]+>", "", text_of(page)))


def test_the_front_page_is_the_readme() -> None:
    assert "Take it when" in words_of("index.html")
    assert 'href="guide-ranks.html"' in text_of("index.html")
    assert 'src="vertical_step.png"' in text_of("index.html")


def test_each_public_module_has_a_page() -> None:
    pages = {page.name.removesuffix(".html") for page in (SITE / "api").glob("*.html")}
    assert pages == documented_modules() - COMMANDS


def test_each_public_name_has_its_docstring() -> None:
    page = text_of("api/infinity.html")
    for name in set(infinity.__all__) - {"__version__"}:
        assert f'id="infinity.{name}"' in page, name
    assert "the planner uses the remaining budget" in words_of("api/infinity.html")


def test_parameters_are_a_list() -> None:
    described = re.findall(r"<li>\s*(?:<p>)?<code>(\w+)</code>", text_of("api/infinity.html"))
    assert {"nvme", "ram", "durable_every", "load", "init", "frozen", "strict"} <= set(described)


def test_methods_are_those_that_users_call() -> None:
    shown = set(re.findall(r'id="infinity\.(\w+\.\w+)"', text_of("api/infinity.html")))
    called = ("gather", "accumulate", "no_sync", "stats", "close")
    assert {"Policy.from_deepspeed", *(f"Handle.{name}" for name in called)} <= shown
    assert not shown & {"Handle.register", "AdamW.hyper", "Policy.placement_update"}


def test_names_in_pages_lead_to_their_docstrings() -> None:
    assert 'href="api/infinity.html#infinity.offload"' in text_of("guide.html")


def test_the_notebook_has_run() -> None:
    notebook = json.loads((ROOT / "docs" / "examples" / "first_hour.ipynb").read_text())
    assert not any(cell.get("outputs") for cell in notebook["cells"]), "outputs come from the build"
    words = words_of("examples/first_hour.html")
    assert "It fits." in words
    assert re.search(r"loss \d\.\d{3} -> 0", words)


def test_links_lead_somewhere() -> None:
    """Also those of notebooks, docstrings and the theme, which MkDocs does not check."""
    lost = []
    # The page of errors is shown in place of any other, and has absolute links.
    for page in set(SITE.rglob("*.html")) - {SITE / "404.html"}:
        for link in re.findall(r'\b(?:href|src)="(?!\w+:)([^"]+)"', text_of(str(page))):
            path, _, anchor = html.unescape(link).partition("#")
            target = page.parent / path if path else page
            if not target.is_file():
                lost.append((page.name, link))
            elif anchor and target.suffix == ".html":
                assert f'id="{anchor}"' in text_of(str(target)), (page.name, link)
    assert not lost


def test_pages_ask_nothing_of_a_network() -> None:
    asks = re.compile(r'<(?:script|img|link rel="(?:stylesheet|preconnect)")[^>]*"(https?:[^"]+)"')
    found = {
        (page.name, match)
        for page in SITE.rglob("*.html")
        for match in asks.findall(page.read_text(encoding="utf-8"))
    }
    assert not found
