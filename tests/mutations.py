"""Mutations of the engine: whether the tests find a wrong operator, condition or constant.

    python -m tests.mutations --count 60 --seed 1        # `make mutations`: hours
    python -m tests.mutations --show                     # the record; run nothing

Each mutation changes one place in a copy of the tree. The tests that are most likely to find it run
there until one fails: those that name the changed module first, then those of its folder, then the
comparisons with the plain loop and the faults. The record (build/mutations.jsonl) has a JSON line
for each, and a later run continues it. A mutation survives if all these tests pass; read it: either
it changes nothing that was promised, or a test is missing.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
TESTS = {
    "infinity/_src/params": ["tests/unit/params"],
    "infinity/_src/optim": ["tests/unit/optim", "tests/test_optimizers.py"],
    "infinity/_src/hooks": ["tests/unit/hooks"],
    "native/kernels": ["tests/unit/native", "tests/unit/kernels"],
    "native/executor": ["tests/unit/aio"],
}
"""Folders that are changed, with the tests of each."""
LAST = ["tests/test_matrix.py", "tests/test_generations.py", "tests/test_durable.py",
        "tests/test_accumulate.py", "tests/test_bitwise.py", "tests/test_lost_states.py",
        "tests/test_bad_blocks.py", "tests/test_device.py", "tests/test_identity.py",
        "tests/test_optimizer_state.py", "tests/distributed/test_undo_ranks.py"]  # fmt: skip
NAMED = 4
"""Files of tests that name the changed module, at most."""
SWAPS = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "+": "-", "-": "+",
         "and": "or", "or": "and", "&&": "||", "||": "&&", "is": "is not", "is not": "is",
         "in": "not in", "not in": "in", "True": "False", "False": "True"}  # fmt: skip
COPIED = ("aio", "bench", "docs", "infinity", "native", "tests", "pyproject.toml", "setup.cfg",
          "README.md", "CHANGELOG.md", "LICENSE", "Makefile", ".ci")  # fmt: skip
IN_C = re.compile(r"(?<= )(?:<=|>=|==|!=|&&|\|\||[<>+-])(?= )|(?<![\w.])\d+(?=[\s;,)\]])")
NOT_CODE = re.compile(
    r"/\*.*?\*/|//[^\n]*|\"(?:\\.|[^\"\\\n])*\"|^[ \t]*#(?:\\\n|[^\n])*", re.DOTALL | re.MULTILINE
)


class Mutation(NamedTuple):
    """A change of the bytes [start, start + len(before)) of a file."""

    path: str
    start: int
    before: str
    after: str

    def apply(self, tree: Path) -> None:
        source = (ROOT / self.path).read_bytes()
        end = self.start + len(self.before.encode())
        changed = source[: self.start] + self.after.encode() + source[end:]
        (tree / self.path).write_bytes(changed)

    def undo(self, tree: Path) -> None:
        shutil.copyfile(ROOT / self.path, tree / self.path)

    @property
    def key(self) -> str:
        return f"{self.path}:{self.start}:{self.after}"

    def __str__(self) -> str:
        source = (ROOT / self.path).read_bytes()
        row = source.count(b"\n", 0, self.start)
        line = source.splitlines()[row].decode().strip()
        return f"{self.path}:{row + 1}: {self.before} -> {self.after}: {line}"


def in_python(path: str, source: bytes) -> Iterator[Mutation]:
    begins = [0]
    for line in source.splitlines(keepends=True):
        begins.append(begins[-1] + len(line))

    def between(one: ast.expr, other: ast.expr) -> Iterator[Mutation]:
        """The operator that stands between two operands."""
        start = begins[(one.end_lineno or 0) - 1] + (one.end_col_offset or 0)
        end = begins[other.lineno - 1] + other.col_offset
        text = source[start:end].decode()
        operator = text.strip(" \n()")
        if operator in SWAPS:
            place = start + len(text[: text.index(operator)].encode())
            yield Mutation(path, place, operator, SWAPS[operator])

    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Compare):
            yield from between(node.left, node.comparators[0])
        elif isinstance(node, ast.BinOp):
            yield from between(node.left, node.right)
        elif isinstance(node, ast.BoolOp):
            yield from between(*node.values[:2])
        elif isinstance(node, ast.Constant) and type(node.value) in (int, bool):
            start = begins[node.lineno - 1] + node.col_offset
            text = source[start : begins[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)]
            after = SWAPS.get(text.decode()) or str(int(node.value) + 1)
            yield Mutation(path, start, text.decode(), after)
        elif isinstance(node, (ast.If, ast.While)):
            start = begins[node.test.lineno - 1] + node.test.col_offset
            yield Mutation(path, start, "", "not ")


def in_c(path: str, source: bytes) -> Iterator[Mutation]:
    # Bytes are characters here, so that places are those of the file.
    text = source.decode("latin-1")
    code = NOT_CODE.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), text)
    for found in IN_C.finditer(code):
        after = SWAPS.get(found[0]) or str(int(found[0]) + 1)
        yield Mutation(path, found.start(), found[0], after)


def mutations() -> list[Mutation]:
    """All of them, in the order of the files."""
    found: list[Mutation] = []
    for folder in TESTS:
        for path in sorted((ROOT / folder).rglob("*")):
            name = str(path.relative_to(ROOT))
            if path.suffix == ".py":
                found += in_python(name, path.read_bytes())
            elif path.suffix in (".c", ".h"):
                found += in_c(name, path.read_bytes())
    return found


def chosen(count: int, seed: int) -> list[Mutation]:
    """Choose at random, as many in each folder."""
    every, chance = mutations(), random.Random(seed)
    groups = [[each for each in every if each.path.startswith(folder)] for folder in TESTS]
    for group in groups:
        chance.shuffle(group)
    turns = [each for turn in zip(*groups, strict=False) for each in turn]
    return turns[:count]


def tests_for(path: str) -> list[str]:
    """The tests that are most likely to find a change of this file, the likeliest first."""
    stem = re.compile(rf"\b{Path(path).stem}\b")
    if path.endswith(".py"):
        # Names of modules are words; imports alone tell them from these.
        stem = re.compile(rf"^(?:from|import) .*\b{Path(path).stem}\b", re.MULTILINE)
    mentions = {
        str(test.relative_to(ROOT)): len(stem.findall(test.read_text()))
        for test in sorted((ROOT / "tests").rglob("test_*.py"))
        if not {"integrations", "gpu", "hosts", "soak", "endurance"} & set(test.parts)
    }
    named = sorted(filter(mentions.get, mentions), key=lambda test: -mentions[test])[:NAMED]
    folder = next(tests for folder, tests in TESTS.items() if path.startswith(folder))
    return list(dict.fromkeys([*named, *folder, *LAST]))


def run(command: Sequence[str], tree: Path, seconds: float) -> tuple[int | None, str]:
    """Run a command in the tree. Returns its code, None if it was ended for its time, and what it
    printed."""
    process = subprocess.Popen(
        [sys.executable, *command],
        cwd=tree,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said = process.communicate(timeout=seconds)[0]
        return process.returncode, said
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return None, process.communicate()[0]


def outcome_of(mutation: Mutation, tree: Path, seconds: float) -> tuple[str, str]:
    """Returns "killed", "survives", "out of time" or "does not compile", and by what."""
    native = mutation.path.startswith("native/")
    mutation.apply(tree)
    try:
        if native and run(["native/build_native.py"], tree, 900)[0] != 0:
            return "does not compile", ""
        tests = tests_for(mutation.path)
        code, said = run(
            ["-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests], tree, seconds
        )
        if code is None:
            return "out of time", ""
        failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", said, re.MULTILINE)
        return (
            ("survives", "") if code == 0 else ("killed", failed[0] if failed else f"code {code}")
        )
    finally:
        mutation.undo(tree)


def show(lines: list[dict[str, str]]) -> None:
    for line in lines:
        if line["outcome"] != "killed":
            print(line["outcome"], line["mutation"], sep=": ")
    # Out of time is no verdict: the change may hang a test, or tests may be slow.
    of = [line["outcome"] for line in lines if line["outcome"] in ("killed", "survives")]
    print(f"{of.count('killed')} of {len(of)} mutations with a verdict were killed")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=15, help="of tests, for each")
    parser.add_argument("--record", type=Path, default=ROOT / "build/mutations.jsonl")
    parser.add_argument("--show", action="store_true")
    options = parser.parse_args()
    record: Path = options.record
    lines = []
    if record.exists():
        lines = [json.loads(line) for line in record.read_text().splitlines()]
    known = {line["key"] for line in lines}
    left = [each for each in chosen(options.count, options.seed) if each.key not in known]
    with tempfile.TemporaryDirectory(prefix="mutations-") as name:
        tree = Path(name)
        if left and not options.show:
            subprocess.run(["cp", "-r", *COPIED, tree], cwd=ROOT, check=True)
        rebuild = False
        for mutation in () if options.show else left:
            if rebuild and not mutation.path.startswith("native/"):
                # The extension of the last mutation of C.
                run(["native/build_native.py"], tree, 900)
            rebuild = mutation.path.startswith("native/")
            begun = time.monotonic()
            outcome, by = outcome_of(mutation, tree, 60 * options.minutes)
            line = {"key": mutation.key, "mutation": str(mutation), "outcome": outcome, "by": by}
            line["seconds"] = f"{time.monotonic() - begun:.0f}"
            lines.append(line)
            record.parent.mkdir(parents=True, exist_ok=True)
            with record.open("a") as file:
                file.write(json.dumps(line) + "\n")
            print(outcome, mutation, by, sep="  ", flush=True)
    show(lines)


if __name__ == "__main__":
    main()
