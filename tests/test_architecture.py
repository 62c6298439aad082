"""Compare docs/architecture.md with the code: the code has everything that the page draws and
lists."""

from __future__ import annotations

import ast
import configparser
import re
from functools import lru_cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "architecture.md"
PATH = re.compile(r"`((?:[\w.]+/)*[\w]+\.(?:py|c|h))`")
FOLDER = re.compile(r"`((?:[\w.]+/)+)`")
NAME = re.compile(r"`([A-Z]\w+(?:\.\w+)?|[a-z_]\w+)`")
METHOD = re.compile(r"`([A-Z]\w+)\.(\w+)`")
ARROW = re.compile(
    r"\(([frs]?\d+)\) (\S.*?) {2,}(\S+/\S+\.(?:py|c|h)) +(\w+(?:\.\w+)?)(?: *\|)?"
)
ARROWS = {"": 19, "f": 7, "r": 7, "s": 8}
"""Arrows of the life of a parameter, of a fault, of `ram=`, and of a save."""
TOPS = {"aio", "native", "tests", "docs", "infinity", "setup.cfg"}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def resolve(path: str) -> Path:
    """A path of the page: in infinity/_src, or from the top where it begins with one of TOPS."""
    return ROOT / path if path.split("/")[0] in TOPS else ROOT / "infinity" / "_src" / path


@lru_cache
def names_of(path: Path) -> frozenset[str]:
    """Functions, classes and `Class.method`s that a file defines."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        # A definition in C: the name, perhaps made for each instruction set, before its arguments.
        made = re.findall(r"^\w[\w *]*?\b(?:INF_ISA\()?(\w+)\)?\(", text, flags=re.M)
        return frozenset(made)
    found: set[str] = set()
    for node in ast.parse(text).body:
        if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {
                f"{node.name}.{each.name}" for each in node.body if isinstance(each, FUNCTIONS)
            }
    return frozenset(found)


@lru_cache
def fields_of(path: Path) -> frozenset[str]:
    """`Class.field` of the fields that the classes of a file declare in their bodies."""
    return frozenset(
        f"{node.name}.{each.target.id}"
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef)
        for each in node.body
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
    )


def python_files() -> list[Path]:
    return [path for top in ("infinity/_src", "aio") for path in (ROOT / top).rglob("*.py")]


@lru_cache
def names_of_all() -> frozenset[str]:
    """Collect the names and fields that any file of the engine defines."""
    return frozenset().union(*(names_of(path) | fields_of(path) for path in python_files()))


def text_of_page() -> str:
    return PAGE.read_text(encoding="utf-8")


def table(first: str) -> list[list[str]]:
    """The rows of the tables whose first heading is `first`, as cells without heading and rule."""
    found: list[list[str]] = []
    inside = False
    for line in text_of_page().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("|"):
            inside = False
        elif cells[0] == first:
            inside = True
        elif inside and not line.startswith("|--"):
            found.append(cells)
    return found


def arrows() -> dict[int, list[tuple[str, str]]]:
    """(file, name) of each arrow's rows in the table. Rows without a number belong to the one
    before."""
    found: dict[int, list[tuple[str, str]]] = {}
    number = 0
    for cells in table("arrow"):
        number = int(cells[0] or number)
        found.setdefault(number, []).append((cells[2].strip("`"), cells[3].strip("`")))
    return found


def drawn() -> list[tuple[str, str, str]]:
    """Return (number, file, name) of each arrow: of the large picture, and of the three with
    lettered arrows."""
    found = []
    for picture in text_of_page().split("```")[1::2]:
        for line in picture.splitlines():
            if not re.search(r"\([frs]?\d+\)", line):
                continue
            match = ARROW.fullmatch(line.lstrip(" |v"))
            assert match, f"an arrow has its number, a file and a name: {line}"
            found.append((match[1], match[3], match[4]))
    return found


def rows() -> list[tuple[str, str]]:
    """(file, name) of every row of a table that has both."""
    found = []
    for line in text_of_page().splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        files = [match.group(1) for cell in cells if (match := PATH.fullmatch(cell))]
        names = [match.group(1) for cell in cells if (match := NAME.fullmatch(cell))]
        if line.startswith("|") and len(files) == 1 and names:
            # The file must define the name next to it.
            at = cells.index(f"`{files[0]}`")
            near = [cells[at - 1], *cells[at + 1 : at + 2]]
            name = next(match for cell in near if (match := NAME.fullmatch(cell)))
            found.append((files[0], name.group(1)))
    return found


def assert_defines(file: str, name: str) -> None:
    path = resolve(file)
    assert path.is_file(), f"{file} is not there"
    assert name in names_of(path), f"{file} does not define {name}"


@pytest.mark.parametrize(("file", "name"), rows(), ids=lambda text: str(text))
def test_a_row_names_what_its_file_defines(file: str, name: str) -> None:
    assert_defines(file, name)


@pytest.mark.parametrize(("number", "file", "name"), drawn(), ids=lambda text: str(text))
def test_an_arrow_names_what_its_file_defines(number: str, file: str, name: str) -> None:
    assert_defines(file, name)
    if number.isdecimal():
        assert (file, name) in arrows()[int(number)], "the table of arrows has it, too"


def test_the_pictures_have_all_of_their_arrows() -> None:
    assert [number for number, _, _ in drawn()] == [
        f"{letter}{number + 1}" for letter, count in ARROWS.items() for number in range(count)
    ]
    assert list(arrows()) == list(range(1, ARROWS[""] + 1))
    assert len(rows()) > 40, "the tables are read"


def test_paths_and_names_in_the_text_exist() -> None:
    text = text_of_page()
    missing = [path for path in PATH.findall(text) if not resolve(path).is_file()]
    missing += [folder for folder in FOLDER.findall(text) if not resolve(folder).is_dir()]
    assert not missing
    members = names_of_all()
    for owner, member in METHOD.findall(text):
        assert f"{owner}.{member}" in members, f"{owner} has no {member}"


def test_the_calls_of_a_mode_are_those_of_the_interface() -> None:
    listed = [cells[0].strip("`") for cells in table("call") if "(" in cells[0]]
    calls = {call.split("(")[0]: call for call in listed if "state_dict" not in call}
    assert len(calls) == len([call for call in listed if "state_dict" not in call])
    declared = {}
    for file, owner in (
        ("optim/update_mode.py", "UpdateMode"),
        ("optim/step.py", "StepHooks"),
        ("params/update_hooks.py", "UpdateHooks"),
    ):
        for node in ast.parse(resolve(file).read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and node.name == owner:
                declared |= {
                    each.name: ", ".join(arg.arg for arg in each.args.args[1:])
                    for each in node.body
                    if isinstance(each, FUNCTIONS)
                    and not any(ast.unparse(mark) == "property" for mark in each.decorator_list)
                }
    assert calls == {name: f"{name}({arguments})" for name, arguments in declared.items()}


def layers_of_setup() -> list[list[str]]:
    """Modules of each layer, top first."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    lines = setup["importlinter:contract:layers"]["layers"].split("\n")
    return [re.split(r" *[|:] *", line.strip()) for line in lines if line.strip()]


def test_the_layers_are_those_of_setup_cfg() -> None:
    listed = {}
    for at, cells in enumerate(table("layer")):
        for entry in PATH.findall(cells[1]) + FOLDER.findall(cells[1]):
            path = entry.rstrip("/").removesuffix(".py")
            inside = path.split("/")[0] in {"infinity", "aio"}
            path = {"aio": "infinity/aio"}.get(path, path if inside else f"infinity/_src/{path}")
            assert path not in listed, f"{entry} is listed twice"
            listed[path.replace("/", ".")] = at
    used, order = set(), []
    for layer in layers_of_setup():
        for module in layer:
            parts = module.split(".")
            names = [".".join(parts[:count]) for count in range(len(parts), 0, -1)]
            name = next((name for name in names if name in listed), None)
            assert name is not None, f"the table of layers lacks {module}"
            used.add(name)
            order.append(listed[name])
    assert order == sorted(order), "the rows have the order of setup.cfg"
    assert used == listed.keys(), f"setup.cfg lacks {listed.keys() - used}"


def test_walks_are_short_and_climb_no_layer() -> None:
    """From a hook to a kernel in at most twelve files, each on the previous file's layer or a lower
    one."""
    walks = [PATH.findall(cells[1]) for cells in table("walk")]
    assert len(walks[0]) <= 12
    assert len(walks[1]) + len(walks[2]) <= 12
    assert len(walks) == 3
    layers = layers_of_setup()

    def depth(file: str) -> int:
        name = file.removesuffix(".py").replace("/", ".")
        name = f"infinity.{name}" if name.startswith("aio") else f"infinity._src.{name}"
        return max(
            at
            for at, layer in enumerate(layers)
            if any(f"{name}.".startswith(f"{module}.") for module in layer)
        )

    for walk in walks:
        depths = [depth(file) for file in walk if file.endswith(".py")]
        assert depths == sorted(depths)
        assert [file for file in walk if file.endswith(".py")] == walk[: len(depths)]


def test_a_word_has_one_row_and_one_meaning() -> None:
    glossary = table("word")
    assert len(glossary) > 20
    words = [cells[0] for cells in glossary]
    assert len(words) == len(set(words))
    for word, meaning, _ in glossary:
        assert not re.search("[,;/]| or | and ", word), f"{word}: one word a row"
        assert not re.search(";| or ", meaning), f"{word}: one meaning a row"


@pytest.mark.parametrize(("word", "where"), [(cells[0], cells[2]) for cells in table("word")])
def test_a_word_is_in_the_code(word: str, where: str) -> None:
    if match := PATH.fullmatch(where):
        assert resolve(match[1]).is_file(), f"{word}: {where} is not there"
        return
    match = NAME.fullmatch(where)
    assert match, f"{word}: name a file, a class, a method or a field"
    assert match[1] in names_of_all(), f"{word}: nothing defines {where}"


@pytest.mark.parametrize(
    "line",
    [
        "     |  (1) a module runs       hooks/forward.py",
        "     |  (1) a module runs       Lifecycle.pre_forward",
        "     |  (1) a module runs",
    ],
)
def test_an_arrow_without_file_and_name_is_seen(line: str) -> None:
    assert not ARROW.fullmatch(line.lstrip(" |v"))
