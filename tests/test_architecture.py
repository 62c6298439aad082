"""The names in docs/architecture.md are those of the code."""

from __future__ import annotations

import ast
import re
from functools import lru_cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "architecture.md"
PATH = re.compile(r"`((?:[\w.]+/)*[\w]+\.(?:py|c|h))`")
FOLDER = re.compile(r"`((?:[\w.]+/)+)`")
NAME = re.compile(r"`([A-Z]\w+(?:\.\w+)?|[a-z_]\w+)`")


def resolve(path: str) -> Path:
    """A path of the page: in infinity/_src, or from the top where it begins with aio, native or
    tests."""
    top = (
        path.split("/")[0] in {"aio", "native", "tests", "docs", "infinity"} or path == "setup.cfg"
    )
    return ROOT / path if top else ROOT / "infinity" / "_src" / path


@lru_cache
def names_of(path: Path) -> frozenset[str]:
    """Functions, classes and `Class.method`s that a file defines; attributes of self, too."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        # A definition in C: the name, perhaps made for each instruction set, before its arguments.
        made = re.findall(r"^\w[\w *]*?\b(?:INF_ISA\()?(\w+)\)?\(", text, flags=re.M)
        return frozenset(made)
    found: set[str] = set()
    for node in ast.parse(text).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef):
                    found.add(f"{node.name}.{inner.name}")
    return frozenset(found)


def rows() -> list[tuple[str, str]]:
    """(file, name) of every row of a table that has both."""
    found = []
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        files = [match.group(1) for cell in cells if (match := PATH.fullmatch(cell))]
        names = [match.group(1) for cell in cells if (match := NAME.fullmatch(cell))]
        if line.startswith("|") and len(files) == 1 and len(names) == 1:
            found.append((files[0], names[0]))
    return found


@pytest.mark.parametrize(("file", "name"), rows(), ids=lambda text: str(text))
def test_a_row_names_what_its_file_defines(file: str, name: str) -> None:
    path = resolve(file)
    assert path.is_file(), f"{file} is not there"
    assert name in names_of(path), f"{file} does not define {name}"


def test_the_picture_has_all_of_its_arrows() -> None:
    text = PAGE.read_text(encoding="utf-8")
    picture = text.split("```")[1]
    drawn = {int(number) for number in re.findall(r"\((\d+)\)", picture)}
    listed = {int(number) for number in re.findall(r"^\| (\d+) \|", text, flags=re.M)}
    assert listed == set(range(1, max(listed) + 1))
    assert drawn <= listed
    assert len(rows()) > 40, "the tables are read"


def test_paths_and_names_in_the_text_exist() -> None:
    text = PAGE.read_text(encoding="utf-8")
    missing = [path for path in PATH.findall(text) if not resolve(path).is_file()]
    missing += [folder for folder in FOLDER.findall(text) if not resolve(folder).is_dir()]
    assert not missing
    defined = {
        name
        for folder in ("infinity/_src", "aio")
        for path in (ROOT / folder).rglob("*.py")
        for name in names_of(path)
    }
    classes = {name for name in defined if "." not in name}
    for name in re.findall(r"`([A-Z]\w+\.\w+)`", text):
        owner, method = name.split(".")
        assert owner in classes, name
        assert any(other.endswith(f".{method}") for other in defined), name


def test_a_word_has_one_meaning() -> None:
    text = PAGE.read_text(encoding="utf-8").split("## Glossary")[1]
    words = [
        word.strip()
        for row in re.findall(r"^\| ([^|]+) \|", text, flags=re.M)[2:]
        for word in row.split(",")
    ]
    assert len(words) > 20
    assert len(words) == len(set(words))
