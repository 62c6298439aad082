"""README and docs/ agree with the repository: links, paths, options, variables and fields exist."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

import infinity as inf
from infinity import errors
from infinity._src.cli.main import main

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
README_LINES_MAX = 120
COLUMNS_MAX = 100

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", flags=re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\[[^\]]+\]\(([^)\s]+)\)")
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*[a-z]")
VARIABLE = re.compile(r"\bINFINITY_[A-Z_]+\b")
# A path of the repository in backticks. Wildcards are allowed; a line or an option after it is not.
PATH = re.compile(r"`((?:infinity|aio|native|tests|bench|docs|\.ci)/[\w./*-]*)`")


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def prose_of(page: Path) -> str:
    """The page without its code blocks."""
    return FENCE.sub("", text_of(page))


def section(page: Path, title: str) -> str:
    """The text under a heading, up to the next one of the same level."""
    found = re.search(rf"^(#+) {re.escape(title)}$\n", text_of(page), flags=re.MULTILINE)
    assert found, f"{name(page)} has no section {title!r}"
    rest = text_of(page)[found.end() :]
    end = re.search(rf"^#{{1,{len(found.group(1))}}} ", rest, flags=re.MULTILINE)
    return rest[: end.start()] if end else rest


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    titles = re.findall(r"^#+ (.+)$", prose_of(page), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_the_readme_fits_a_reader() -> None:
    assert text_of(ROOT / "README.md").count("\n") <= README_LINES_MAX


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_lines_fit_a_screen(page: Path) -> None:
    long = [
        row
        for row, line in enumerate(text_of(page).splitlines(), 1)
        if len(line) > COLUMNS_MAX and not line.startswith("|")
    ]
    assert not long, f"{name(page)}: lines {long} are longer than {COLUMNS_MAX} columns"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in LINK.findall(prose_of(page)):
        if link.startswith("https://"):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.is_file(), f"{name(page)}: {link} leads nowhere"
        if anchor:
            assert anchor in anchors(target), f"{name(page)}: {link}: no such heading"


def test_what_no_gpu_has_shown_is_said_once() -> None:
    """In README, where it is taken out when one has."""
    others = ("CHANGELOG.md", "bench/README.md", "aio/README.md")
    pages = [*PAGES, *(ROOT / other for other in others)]
    found = [name(page) for page in pages for _ in re.findall(r"on a GPU yet", text_of(page))]
    assert found == ["README.md"]


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_paths_exist(page: Path) -> None:
    for path in PATH.findall(prose_of(page)):
        assert list(ROOT.glob(path.rstrip("/"))), f"{name(page)} names {path}, which does not exist"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_commands_exist(page: Path) -> None:
    makefile = text_of(ROOT / "Makefile")
    targets = set(re.findall(r"^([a-z-]+):", makefile, flags=re.MULTILINE))
    for language, code in FENCE.findall(text_of(page)):
        if language != "bash":
            continue
        for target in re.findall(r"^make ([a-z-]+)", code, flags=re.MULTILINE):
            assert target in targets, f"{name(page)}: there is no `make {target}`"
        for script in re.findall(r"\b(bench/[\w/]+\.(?:py|sh))", code):
            assert (ROOT / script).is_file(), f"{name(page)}: there is no {script}"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_python_examples_parse(page: Path) -> None:
    for language, code in FENCE.findall(text_of(page)):
        if language == "python":
            ast.parse(code)


def tree_entries() -> Iterator[tuple[str, str]]:
    """(path, description) of each line of the annotated tree; two blanks of indent are one
    level."""
    (tree,) = [
        code for _, code in FENCE.findall(section(DOCS / "contributing.md", "Where things are"))
    ]
    parents: list[str] = []
    for line in tree.splitlines():
        entry = line.lstrip()
        depth = (len(line) - len(entry)) // 2
        path, _, about = entry.partition(" ")
        parents[depth:] = [path]
        yield "".join(parents), about.strip()


def test_the_annotated_tree_names_what_exists() -> None:
    for path, about in tree_entries():
        assert (ROOT / path).exists(), f"docs/contributing.md: {path} does not exist"
        assert path.endswith("/") == (ROOT / path).is_dir(), f"docs/contributing.md: {path}"
        assert about, f"docs/contributing.md: {path} has no description"


def test_the_annotated_tree_names_every_folder() -> None:
    named = {path for path, _ in tree_entries()}
    packages = (path.parent for path in (ROOT / "infinity" / "_src").rglob("*.py"))
    folders = {f"{name(folder)}/" for folder in packages if folder.name != "__pycache__"}
    assert folders <= named, f"docs/contributing.md lacks {sorted(folders - named)}"


def test_the_notebook_holds_together() -> None:
    """`make docs` runs it. Its code parses, its links lead somewhere, its commands have their
    options, and it is stored without outputs."""
    page = DOCS / "examples" / "first_hour.ipynb"
    commands = []
    for cell in json.loads(text_of(page))["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            for link in LINK.findall(source):
                assert (page.parent / link).is_file(), link
            continue
        assert cell["outputs"] == []
        if source.startswith("%%bash"):
            commands += re.findall(r"^infinity (\w+)((?:.*\\\n)*.*)", source, flags=re.MULTILINE)
        else:
            ast.parse(source)
    assert [command for command, _ in commands] == ["plan", "report"]
    for command, given in commands:
        assert set(OPTION.findall(given)) <= set(OPTION.findall(help_of(command)))


def test_make_targets_are_listed() -> None:
    phony = re.findall(r"^\.PHONY: (.*)$", text_of(ROOT / "Makefile"), flags=re.MULTILINE)
    assert phony
    table = section(DOCS / "contributing.md", "Make targets")
    listed = set(re.findall(r"`make ([a-z-]+)`", table))
    assert listed == set(" ".join(phony).split())


def test_the_guide_lists_every_field_of_the_policy() -> None:
    rows = [
        row
        for row in section(DOCS / "guide.md", "The policy").splitlines()
        if row.startswith("| `")
    ]
    fields = [field for row in rows for field in re.findall(r"`(\w+)`", row.split("|")[1])]
    assert sorted(fields) == sorted(field.name for field in dataclasses.fields(inf.Policy))


def test_the_guide_lists_every_error() -> None:
    listed = set(re.findall(r"`(\w+)`", section(DOCS / "guide.md", "Errors")))
    defined = {
        found
        for found, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, errors.InfinityError)
    }
    assert defined - {"InfinityError"} <= listed


def help_of(command: str) -> str:
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), pytest.raises(SystemExit) as ended:
        main([*command.split(), "--help"])
    assert not ended.value.code
    return shown.getvalue()


COMMANDS = {
    "infinity bench": ("bench", "bench swap", "bench adam", "bench copy"),
    "infinity doctor": ("doctor",),
    "infinity plan": ("plan",),
    "infinity train": ("train",),
    "infinity report": ("report",),
    "infinity checkpoint": tuple(
        f"checkpoint {action}" for action in ("ls", "verify", "export", "reshard")
    ),
}


@pytest.mark.parametrize("title", COMMANDS)
def test_the_options_of_a_command_are_listed(title: str) -> None:
    known = {option for command in COMMANDS[title] for option in OPTION.findall(help_of(command))}
    text = section(DOCS / "commands.md", title)
    listed = set(OPTION.findall(text))
    assert not known - {"--help"} - listed, f"{title}: docs/commands.md lacks options"
    tables = "\n".join(row for row in text.splitlines() if row.startswith("|"))
    assert set(OPTION.findall(tables)) <= known, f"{title}: docs/commands.md has options of its own"


def test_environment_variables_are_listed() -> None:
    read = set()
    sources = [
        path for folder in ("infinity", "aio", "native") for path in (ROOT / folder).rglob("*.py")
    ]
    for path in [*sources, ROOT / "tests" / "conftest.py"]:
        for line in text_of(path).splitlines():
            if "environ" in line or "getenv" in line:
                read |= set(VARIABLE.findall(line))
    table = section(DOCS / "commands.md", "Environment variables")
    listed = set(re.findall(r"^\| `(INFINITY_\w+)`", table, flags=re.MULTILINE))
    assert read <= listed, f"docs/commands.md lacks {sorted(read - listed)}"
    everywhere = "\n".join(text_of(path) for path in [*sources, *(ROOT / "tests").rglob("*.py")])
    unread = {variable for variable in listed if variable not in everywhere}
    assert not unread, f"docs/commands.md lists {sorted(unread)}, which nothing reads"


def test_the_citation_is_of_this_version() -> None:
    cited = yaml.safe_load(text_of(DOCS / "CITATION.cff"))
    assert (cited["version"], cited["license"]) == (inf.__version__, "Apache-2.0")
    required = {"cff-version", "message", "title", "authors"}
    assert required <= {key for key, value in cited.items() if value}


def test_each_fault_names_a_test_that_exists() -> None:
    """Every fault in docs/reliability.md has a test that injects it."""
    page = text_of(DOCS / "reliability.md")
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", page)
    assert len(named) > 30
    missing = [
        f"{file}::{test}"
        for file, test in named
        if not (ROOT / "tests" / file).is_file()
        or f"def {test}(" not in (ROOT / "tests" / file).read_text(encoding="utf-8")
    ]
    assert not missing
    rows = [line for line in page.splitlines() if line.startswith("| ") and "| test |" not in line]
    tables = [line for line in rows if line.count("|") == 5]
    assert all("::" in line for line in tables), "a fault without a test"
