"""Pages of the site besides those of docs/: hooks of MkDocs, and an extension of Griffe for
docstrings. `.ci/mkdocs.yml` names this file as both.

README.md and other pages outside of docs/ become pages of the site, scripts of docs/examples get a
page each, and each public module (docs/guide.md lists them) a page of its docstrings.
"""

from __future__ import annotations

import ast
import os
import re
from pathlib import Path, PurePosixPath
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
MOVED = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "aio/README.md": "io-engine.md",
    "bench/README.md": "benchmarks.md",
}
"""Pages outside of docs/, and their places in the site."""
SCRIPTS = {
    str(path.relative_to(ROOT)): f"examples/{path.stem}.md"
    for path in sorted((ROOT / "docs" / "examples").glob("*.py"))
}
PLACES = MOVED | SCRIPTS
LINK = re.compile(r"\]\((?!\w+:)([^)\s#]+)")
NAME = re.compile(r"(?<![\[`])`(?:inf|infinity)\.([\w.]+)(\([^`]*\))?`(?!\])")


def public_modules() -> list[str]:
    """Return the public modules, as docs/guide.md lists them."""
    guide = (ROOT / "docs" / "guide.md").read_text(encoding="utf-8")
    section = guide.partition("\n## What is public\n")[2].partition("\n## ")[0]
    return re.findall(r"^- `(infinity[\w.]*)`", section, flags=re.MULTILINE)


def public_names(module: str) -> list[str]:
    """Return the names of a module: `__all__`, or its classes."""
    path = ROOT.joinpath(*module.split("."))
    source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    tree = ast.parse(source.read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return [name for name in ast.literal_eval(node.value) if name != "__version__"]
    return [node.name for node in tree.body if isinstance(node, ast.ClassDef)]


MODULES = {module: public_names(module) for module in public_modules()}
NAMES = {f"{module}.{name}" for module, names in MODULES.items() for name in names}
MENTIONED = {
    name
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    for name in re.findall(r"(?:\.|def )(\w+)", page.read_text(encoding="utf-8"))
}
"""Attributes that a page mentions."""
STYLE = """
.md-grid { max-width: 76rem; }
.md-typeset pre > code { font-size: 0.62rem; }
"""
"""A line of code of 100 columns fits."""


# -- Hooks of MkDocs -------------------------------------------------------------------------------


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Append the pages of the modules."""
    assert config.nav is not None
    config.nav.append({"API": [{module: f"api/{module}.md"} for module in MODULES]})
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that docs/ does not have, and the style."""
    files.append(File.generated(config, "site.css", content=STYLE))
    for source, place in MOVED.items():
        files.append(File.generated(config, place, abs_src_path=str(ROOT / source)))
    for source, place in SCRIPTS.items():
        files.append(File.generated(config, place, content=page_of_script(ROOT / source)))
    for module in MODULES:
        files.append(File.generated(config, f"api/{module}.md", content=page_of_module(module)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Lead links to the places that files have in the site, and names to their docstrings."""
    here = PurePosixPath(page.file.src_uri)
    origin = {place: source for source, place in MOVED.items()}.get(str(here), f"docs/{here}")

    def moved(link: re.Match[str]) -> str:
        target = os.path.normpath(PurePosixPath(origin).parent / link[1])
        if not (ROOT / target).exists():
            return link[0]
        place = PLACES.get(target, target.removeprefix("docs/"))
        return f"]({os.path.relpath(place, here.parent)}"

    parts = re.split(r"(^```.*?^```$)", markdown, flags=re.DOTALL | re.MULTILINE)
    parts[::2] = [linked(LINK.sub(moved, prose)) for prose in parts[::2]]
    return "".join(parts)


def on_page_content(html: str, page: Page, **_: Any) -> str:
    """Lead links of a notebook, whose Markdown MkDocs does not read, to pages."""

    def led(link: re.Match[str]) -> str:
        *folders, stem = link[1].split("/")
        return f'href="{"/".join([*folders, "index" if stem == "README" else stem])}.html'

    notebook = page.file.src_uri.endswith(".ipynb")
    return re.sub(r'href="(?!\w+:)([^"#]+)\.md(?=["#])', led, html) if notebook else html


def page_of_script(path: Path) -> str:
    """Return a page that shows a script, its docstring first."""
    source = path.read_text(encoding="utf-8")
    described = ast.get_docstring(ast.parse(source))
    assert described is not None
    code = source.partition('"""\n\n')[2]
    return f"# {path.name}\n\n{described}\n\n[The file]({path.name})\n\n```python\n{code}```\n"


def page_of_module(module: str) -> str:
    """Return a page whose text are a module's docstrings."""
    names = "".join(f"\n        - {name}" for name in MODULES[module])
    return f"# {module}\n\n::: {module}\n    options:\n      members:{names or ' false'}\n"


def linked(prose: str) -> str:
    """Make each public name in backticks a link to its docstring."""

    def link(found: re.Match[str]) -> str:
        path = f"infinity.{found[1]}"
        return f"[{found[0]}][{path}]" if path in NAMES else found[0]

    return NAME.sub(link, prose)


# -- Docstrings ------------------------------------------------------------------------------------


class Parameters(griffe.Extension):
    """Lists the parameters that a docstring describes as `name: text`."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Rewrite all docstrings of the package, and drop methods that no user calls."""
        self._rewrite(pkg)

    def _rewrite(self, of: griffe.Object | griffe.Alias) -> None:
        if of.is_alias:
            return
        if of.docstring is not None:
            of.docstring.value = listed(of.docstring.value, described_names(of))
        for name, member in list(of.members.items()):
            if of.is_class and is_internal(of, member):
                of.del_member(name)
            else:
                self._rewrite(member)


def is_internal(of: griffe.Object, member: Any) -> bool:
    """Tell whether a method is for the engine alone: one of a class of `infinity` that no page
    mentions, or elsewhere one that takes objects of private classes, as a constructor may.
    """
    if member.is_alias or not (member.is_function or "property" in member.labels):
        return False
    exported = of.path.startswith("infinity._src.") and of.name in MODULES["infinity"]
    if exported and member.name != "__init__":
        return member.name not in MENTIONED
    return member.is_function and any(
        isinstance(part, griffe.ExprName)
        and part.canonical_path.startswith("infinity._src.")
        and part.name not in MODULES["infinity"]
        for parameter in member.parameters
        if isinstance(parameter.annotation, griffe.Expr)
        for part in parameter.annotation.iterate(flat=True)
    )


def described_names(of: Any) -> set[str]:
    """Return the names that a docstring may describe: parameters, and attributes of a class."""
    if of.is_function:
        return {parameter.name for parameter in of.parameters}
    if not of.is_class:
        return set()
    made = of.members.get("__init__")
    given = described_names(made) if made is not None and made.is_function else set()
    return given | {name for name, member in of.members.items() if member.is_attribute}


def listed(docstring: str, names: set[str]) -> str:
    """Make a list of each paragraph of `name: text`, and a paragraph of each `Raises:`."""
    one = "|".join(sorted(map(re.escape, names), key=len, reverse=True)) or "(?!)"
    begin = re.compile(rf"(?:^|(?<=[.;)] ))(`?(?:{one})`?(?:, `?(?:{one})`?)*): ")
    made = []
    for paragraph in re.split(r"\n\s*\n", docstring):
        if paragraph.startswith("    "):  # code
            made.append(paragraph)
            continue
        text = re.sub(r"\s*\n\s*", " ", paragraph)
        text, _, raised = re.sub(r"(?:^|(?<=\. ))Raises:? ", "\0", text, count=1).partition("\0")
        first, *items = begin.split(text)
        made.append(first.strip())
        for found, told in zip(items[::2], items[1::2], strict=True):
            made.append(f"- `{found.replace('`', '').replace(', ', '`, `')}`: {told.strip(' ;')}")
        if raised:
            made.append(f"**Raises:** {raised}")
    return "\n\n".join(part if part.startswith("    ") else linked(part) for part in made if part)
