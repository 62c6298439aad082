"""The house rules that a tool cannot check, as tests."""

from __future__ import annotations

import ast
import configparser
import fnmatch
import functools
import gc
import re
import runpy
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FUNCTION_LINES_MAX = 70
LINE_COLUMNS_MAX = 100
# A file is one concept, however long that is. This bound only asks to look whether it still is one:
# the 600 lines of 120 columns that it was are 720 of 100.
C_LINES_MAX = 720
BANNED_MODULES = {"utils", "util", "manager", "helper", "helpers", "common", "misc"}

SOURCES = sorted(
    path
    for folder in ("infinity", "aio")
    for path in (ROOT / folder).rglob("*.py")
    if "__pycache__" not in path.parts
)
C_SOURCES = sorted(path for pattern in ("*.c", "*.h") for path in (ROOT / "native").rglob(pattern))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
BENCHES = sorted(
    path
    for folder in ("bench", "bench/gpu", "bench/rehearsal")
    for path in (ROOT / folder).glob("*.py")
)
BUILD_SCRIPTS = sorted((ROOT / "native").glob("*.py"))
# Text files besides the sources; bench/results and the like are data.
READ_TOO = sorted(
    path
    for pattern in (
        "native/**/*.[ch]", "native/*.py", "tests/**/*.c", "tests/**/*.py", "tests/**/*.md",
        "bench/*.py", "bench/gpu/*.py", "bench/rehearsal/*.py", "bench/*.md", "docs/**/*.md",
        "docs/**/*.py",
        "README.md", "Makefile", "pyproject.toml", ".ci/*",
    )
    for path in ROOT.glob(pattern)
    if path.is_file() and "__pycache__" not in path.parts
)  # fmt: skip
# Comments for tools, which must stay at the end of their line.
TOLD_TO_A_TOOL = re.compile(r"\s*# (type: ignore|noqa|fmt:|pragma:).*$")


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


# Each check reads all files: a test per file and check would take longer than the checks, and one
# failure names all faults.


@pytest.fixture(autouse=True, scope="module")
def trees_are_dropped() -> Iterator[None]:
    """Millions of nodes would slow down each gc.collect() of the tests that follow."""
    gc.disable()  # it would go through them again and again while files are parsed
    yield
    text_of.cache_clear()
    tree_of.cache_clear()
    gc.enable()


@functools.cache
def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(text_of(path))


def is_too_long(path: Path, line: str) -> bool:
    """Return whether a line is too long and could be broken.

    Rows of Markdown tables and words without spaces, such as URLs, cannot be broken; a comment for
    a tool does not count.
    """
    if path.suffix == ".md" and line.startswith("|"):
        return False
    if path.suffix == ".py":
        line = TOLD_TO_A_TOOL.sub("", line)
    return len(line) > LINE_COLUMNS_MAX and " " in line.strip(" #*-/>")


def trees_with(
    paths: Iterable[Path], pattern: re.Pattern[str]
) -> Iterator[tuple[Path, ast.Module]]:
    """Yield the files with the pattern, parsed. Parsing all tests would take as long as all checks.
    """
    return ((path, tree_of(path)) for path in paths if pattern.search(text_of(path)))


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node


def test_lines_of_sources_fit_with_what_they_tell_a_tool() -> None:
    assert not [
        f"{name(path)}:{row}"
        for path in SOURCES
        for row, line in enumerate(text_of(path).splitlines(), 1)
        if len(line) > LINE_COLUMNS_MAX
    ]


def test_functions_fit_a_reader() -> None:
    assert not [
        f"{name(path)}:{function.lineno} {function.name} has {lines} lines"
        for path in [*SOURCES, *BENCHES]
        for function in functions(tree_of(path))
        if (lines := (function.end_lineno or 0) - function.lineno + 1) > FUNCTION_LINES_MAX
    ]


def test_c_files_are_one_concept() -> None:
    found = [name(path) for path in C_SOURCES if text_of(path).count("\n") > C_LINES_MAX]
    assert not found, "split it by responsibility, or raise the bound if it is one concept"


def test_lines_end_at_the_last_column() -> None:
    assert not [
        f"{name(path)}:{row}"
        for path in READ_TOO
        for row, line in enumerate(text_of(path).splitlines(), 1)
        if is_too_long(path, line)
    ]


def test_no_merge_is_left_open() -> None:
    marks = re.compile(r"^(?:<{7}|>{7}) ", flags=re.MULTILINE)
    read = [*READ_TOO, *SOURCES, ROOT / "CHANGELOG.md", ROOT / "setup.cfg"]
    assert not [name(path) for path in read if marks.search(text_of(path))]


@pytest.mark.parametrize(
    ("path", "line", "too_long"),
    [
        ("a.c", "x = " + "y + " * 24 + "y;", True),
        ("a.c", "x = " + "y + " * 23 + "y;", False),
        ("a.py", "x = " + "y + " * 23 + "y  # type: ignore[attr-defined]", False),
        ("a.py", "x = " + "y + " * 24 + "y  # type: ignore[attr-defined]", True),
        ("a.py", "x = " + "y + " * 23 + "y  # the reason of it", True),
        ("a.md", "| " + "cell " * 24 + "|", False),
        ("a.md", "prose " * 24, True),
        ("a.md", "- https://" + "a" * 100, False),
    ],
)
def test_which_lines_are_too_long(path: str, line: str, too_long: bool) -> None:
    assert is_too_long(Path(path), line) == too_long


def test_modules_are_named_for_what_they_do() -> None:
    for path in SOURCES:
        parts = {part.removesuffix(".py").strip("_") for part in path.relative_to(ROOT).parts}
        assert not parts & BANNED_MODULES, name(path)
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ClassDef):
                assert not node.name.lower().endswith(("manager", "helper", "utils")), (
                    f"{name(path)}: {node.name}"
                )


def test_no_error_is_swallowed() -> None:
    handlers = (
        (path, node)
        for path in SOURCES
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.ExceptHandler)
    )
    for path, node in handlers:
        where = f"{name(path)}:{node.lineno}"
        assert node.type is not None, f"{where}: bare except"
        if len(node.body) == 1 and isinstance(node.body[0], ast.Pass):
            broad = isinstance(node.type, ast.Name) and node.type.id in {
                "Exception",
                "BaseException",
            }
            lines = text_of(path).splitlines()[node.lineno - 1 : node.body[0].end_lineno]
            assert "#" in "".join(lines), (
                f"{where}: an except that only passes needs a reason beside it"
            )
            assert not broad, f"{where}: an except that only passes needs a narrow type"


def test_everything_public_says_what_it_does() -> None:
    for path in SOURCES:
        tree = tree_of(path)
        assert ast.get_docstring(tree), f"{name(path)} opens without saying its responsibility"
        for node in tree.body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
                # A lazy module's __getattr__ and the like are underscored and need no words.
                assert ast.get_docstring(node), (
                    f"{name(path)}:{node.lineno} {node.name} has no docstring"
                )


def test_annotations_are_lazy() -> None:
    assert not [
        name(path)
        for path in SOURCES
        if len(tree_of(path).body) > 1 and "from __future__ import annotations" not in text_of(path)
    ]


def test_the_tests_of_other_releases_of_torch_are_there() -> None:
    core = runpy.run_path(str(ROOT / ".ci" / "torch_matrix.py"))["CORE"]
    assert [path for path in core if not (ROOT / path).exists()] == []


def test_no_source_tree_holds_two_names_for_aio() -> None:
    assert (ROOT / "infinity" / "aio").is_symlink()
    assert (ROOT / "infinity" / "aio").resolve() == ROOT / "aio"
    names = re.compile(r"^\s*(?:import|from)\b.*(?<![\w.])(?:aio|native)\b", re.MULTILINE)
    for path, tree in trees_with([*SOURCES, *TESTS], names):
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                imported = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                imported = [node.module or ""]
            else:
                continue
            top_level = [module for module in imported if module.split(".")[0] in {"aio", "native"}]
            # The build script is the one part of native/ that a test may import.
            wrong = [module for module in top_level if not module.startswith("native.build")]
            assert not wrong, f"{name(path)}:{node.lineno} imports {wrong}; write infinity.aio"


def test_commands_and_aio_import_what_they_need() -> None:
    code = (
        "import sys, infinity, infinity._src.cli.main as command\n"
        "command.build_parser().format_help()\n"
        "assert not {'numpy', 'rich'} & set(sys.modules)\n"
        "import infinity.aio, infinity._src.base.telemetry, infinity._src.measure.command\n"
        "sys.exit('torch was imported' if 'torch' in sys.modules else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_every_folder_of_tests_is_collected(pytestconfig: pytest.Config) -> None:
    """Tests in a folder that pytest skips by default (such as build) would never run."""
    patterns = pytestconfig.getini("norecursedirs")
    folders = {
        part
        for path in ROOT.glob("tests/**/test_*.py")
        for part in path.relative_to(ROOT).parts[:-1]
    }
    assert "distributed" in folders
    assert not [
        folder
        for folder in folders
        if any(fnmatch.fnmatch(folder, pattern) for pattern in patterns)
    ]


RIDDLES = re.compile(
    r"^(What|Who|Whose|Whom|Where|Which|How|When|Why|Whether|Those|That|This|They|It|Of)\b"
)
# Inside a docstring a sentence begins behind a full stop, or with a paragraph.
RIDDLES_INSIDE = re.compile(
    r"""(?:[.!?][)"'`]*\s+|\n\s*\n\s*)((?:What|Who|Whose|Whom|Where|Which|Those)\b.*)"""
)


def docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Docstrings with their lines: of modules, classes and functions, and behind assignments."""
    for node in ast.walk(tree):
        value = node.value if isinstance(node, ast.Expr) else None
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            yield value.lineno, value.value.strip()


def test_docstrings_open_with_a_verb_or_a_noun() -> None:
    """A relative clause as the subject is hard to read, and an opening pronoun has no noun."""
    begun = re.compile(rf"[\"']\s*(?:{RIDDLES.pattern.removeprefix('^')})")
    found = [
        f"{name(path)}:{line} {text[:40]}"
        for path, tree in trees_with([*SOURCES, *TESTS, *BENCHES, *BUILD_SCRIPTS], begun)
        for line, text in docstrings(tree)
        if RIDDLES.match(text)
    ]
    assert not found, "begin with a verb or with a noun of the field"


def test_sentences_of_docstrings_have_their_subject_first() -> None:
    """Behind the opener, too, a relative clause is no subject."""
    found = [
        f"{name(path)}:{line + text[: match.start(1)].count(chr(10))} {match[1][:40]}"
        for path in SOURCES
        for line, text in docstrings(tree_of(path))
        for match in RIDDLES_INSIDE.finditer(text)
    ]
    assert not found, "begin with the thing of the field that the clause stands for"


def test_every_module_of_the_implementation_has_a_layer() -> None:
    contracts = configparser.ConfigParser()
    contracts.read(ROOT / "setup.cfg", encoding="utf-8")
    layers = set(re.findall(r"infinity[\w.]*", contracts["importlinter:contract:layers"]["layers"]))
    for path in SOURCES:
        if (
            path.name in {"__init__.py", "py.typed"}
            or path.parts[-2] == "aio"
            or "_src" not in path.parts
        ):
            continue
        module = name(path).removesuffix(".py").replace("/", ".")
        parents = {module.rsplit(".", count)[0] for count in range(module.count("."))} | {module}
        assert parents & layers, f"{module} is in no layer of setup.cfg"
