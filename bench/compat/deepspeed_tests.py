"""Runs DeepSpeed's own tests with infinity's adapter in place of DeepSpeed.

    python bench/compat/deepspeed_tests.py CHECKOUT                    # all of FILES
    python bench/compat/deepspeed_tests.py CHECKOUT --files runtime/zero/test_zero_leaf_module.py
    python bench/compat/deepspeed_tests.py CHECKOUT --deepspeed-venv bench/.venv-deepspeed
    python bench/compat/deepspeed_tests.py --show

CHECKOUT: a checkout of DeepSpeed, preferably at the tag of the release that the adapter implements;
its `tests/unit` runs unchanged. Without a checkout the script says so and exits with status 0.
`unit.common`, which starts ranks, is replaced by distributed_tests.py; names that a test imports
and the adapter lacks become placeholders (deepspeed_names.py).

Files run one at a time. Each file has a separate process, which forks for every test. With
`--deepspeed-venv` the same tests also run under DeepSpeed itself on the same device: a test that
fails there says nothing about the adapter. Each file adds a line to the results file; the table
shows the last line of each file. The exit status is 1 if a test failed for which
deepspeed_reasons.py has no reason.
"""

from __future__ import annotations

import argparse
import collections
import importlib
import json
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import bench_folder  # noqa: F401 - adds bench/ to sys.path
import compare_deepspeed
import deepspeed_reasons
import harness

FILES = (
    "runtime/zero/test_*.py", "v1/zero/test_*.py", "checkpoint/test_*.py",
    "runtime/test_ds_*.py", "runtime/test_lr_schedulers.py", "runtime/test_no_sync_ctxt.py",
    "runtime/test_mult*.py", "runtime/test_data.py",
    "runtime/half_precision/test_fp16.py", "runtime/half_precision/test_*loss_scale.py",
    "runtime/half_precision/test_zero_optim_overflow.py", "v1/half_precision/test_bf16.py",
    "v1/half_precision/test_gradient_clipping_default.py",
)  # fmt: skip
RESULTS = harness.RESULTS / "deepspeed_tests.jsonl"
ARM = Path(__file__).resolve().parent / "deepspeed_tests_arm.py"
FILE_LIMIT_S = 7200.0
COLUMNS = ("passed", "failed", "not applicable")


Row = dict[str, Any]
"""Record of a test function ("test") in the results file.

"passed": number of cases that passed. "others": groups of the other cases, with the number of
cases ("cases"), pytest's "outcome", the "detail" of its report, and "reference": the detail of the
failure under DeepSpeed itself, empty if DeepSpeed does not fail.
"""


def read(record: Path) -> dict[str, dict[str, Any]]:
    """Return the outcomes of tests by name. If a test has several (set-up, call, clean-up), return
    the first that is not "passed"."""
    found: dict[str, dict[str, Any]] = {}
    for line in record.read_text().splitlines() if record.exists() else ():
        end = json.loads(line)
        if end["name"] not in found or found[end["name"]]["outcome"] == "passed":
            found[end["name"]] = end
    return found


def rows_of(adapter: Path, reference: Path) -> list[Row]:
    """Combine the records of both arms into a row for each test function."""
    theirs = read(reference)
    rows: dict[str, Row] = {}
    groups: dict[tuple[str, str, str, str], dict[str, Any]] = {}
    for name, end in read(adapter).items():
        test = name.split("[")[0]
        row = rows.setdefault(test, {"test": test, "passed": 0, "others": []})
        if end["outcome"] == "passed":
            row["passed"] += 1
            continue
        other = theirs.get(name, {"outcome": ""})
        failed = other["detail"] if other["outcome"] == "failed" else ""
        told = {"outcome": end["outcome"], "detail": end["detail"], "reference": failed}
        key = (test, *told.values())
        if key not in groups:
            groups[key] = {**told, "cases": 0}
            row["others"].append(groups[key])
        groups[key]["cases"] += 1
    return list(rows.values())


def judged(test: str, other: dict[str, Any]) -> tuple[str, str]:
    """Return the column that counts cases which did not pass ("failed" or "not applicable"), and
    the reason."""
    if other["outcome"] == "skipped":
        return COLUMNS[2], f"skips itself: {other['detail']}"
    reason = deepspeed_reasons.reason_of(test, other["detail"])
    if reason is None and other["reference"]:
        reason = f"fails under DeepSpeed itself, too: {other['reference']}"
    return (COLUMNS[1], other["detail"]) if reason is None else (COLUMNS[2], reason)


def counts_of(row: Row) -> collections.Counter[str]:
    """Return how many cases of a test are in each column."""
    found = collections.Counter({COLUMNS[0]: row["passed"]})
    for other in row["others"]:
        found[judged(row["test"], other)[0]] += other["cases"]
    return found


def table(rows: Sequence[Row]) -> str:
    """Return Markdown tables: counts by file, tests with passed cases, and reasons of the other
    cases."""
    per_file: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    reasons: dict[tuple[str, str], collections.Counter[str]] = collections.defaultdict(
        collections.Counter
    )
    for row in rows:
        file, _, test = row["test"].partition("::")
        for key in (file, "all"):
            per_file[key].update(counts_of(row))
        for other in row["others"]:
            reasons[judged(row["test"], other)][f"{Path(file).stem}::{test}"] += other["cases"]
    everything = per_file.pop("all", collections.Counter())
    lines = ["| file | " + " | ".join(COLUMNS) + " |", "|---|---|---|---|"]
    lines += [
        f"| {file} | " + " | ".join(str(counts[column]) for column in COLUMNS) + " |"
        for file, counts in (*per_file.items(), ("all", everything))
    ]
    lines += ["", "| passed | cases |", "|---|---|"]
    lines += [f"| {row['test']} | {row['passed']} |" for row in rows if row["passed"]]
    lines += ["", "| not passed | reason | cases | tests |", "|---|---|---|---|"]
    for (column, reason), tests in sorted(reasons.items(), key=lambda item: item[0]):
        named = ", ".join(f"{test} ({cases})" for test, cases in tests.items())
        told = reason.replace("|", "\\|")
        lines.append(f"| {column} | {told} | {sum(tests.values())} | {named} |")
    return "\n".join(lines)


def files_of(unit: Path, patterns: Iterable[str]) -> list[str]:
    """Return the test files that patterns name, by their path from `tests/unit`."""
    found = [path for pattern in patterns for path in sorted(unit.glob(pattern))]
    return [str(path.relative_to(unit)) for path in dict.fromkeys(found)]


def pytest_alone(folder: Path) -> Path:
    """Link this interpreter's pytest and its dependencies into `folder`, and return the folder: the
    PYTHONPATH of an interpreter without pytest."""
    for name in ("pytest", "_pytest", "pluggy", "iniconfig", "packaging", "pygments", "py.py"):
        module = importlib.import_module(name.removesuffix(".py"))
        assert module.__file__ is not None, name
        source = Path(module.__file__)
        (folder / name).symlink_to(source if name.endswith(".py") else source.parent)
    return folder


def run_arm(arm: str, file: str, record: Path, links: Path, args: argparse.Namespace) -> None:
    """Run a file in a separate process. Blocks until it ends."""
    python, env = sys.executable, harness.environment(PYTHONPATH=str(harness.ROOT))
    if arm == "deepspeed":
        python, env = compare_deepspeed.interpreter_of("deepspeed")
        env["PYTHONPATH"] = str(links)
    command = [python, str(ARM), arm, str(args.checkout.resolve()), file, str(record)]
    command += [f"--ranks={args.ranks}", f"--limit-s={args.limit_s}", f"--keyword={args.keyword}"]
    command += [f"--dir={args.dir.resolve()}"] if args.dir else []
    harness.run_command(command, env, timeout_s=FILE_LIMIT_S)


def run_both(file: str, args: argparse.Namespace) -> list[Row]:
    """Run a file under the adapter and, if its environment is given, under DeepSpeed itself.
    Returns a row for each test function. Blocks."""
    with tempfile.TemporaryDirectory(prefix="infinity-deepspeed-") as kept:
        records = {arm: Path(kept) / f"{arm}.jsonl" for arm in ("adapter", "deepspeed")}
        links = Path(kept) / "links"
        links.mkdir()
        if args.deepspeed_venv is not None:
            run_arm("deepspeed", file, records["deepspeed"], pytest_alone(links), args)
        if not args.only_deepspeed:
            run_arm("adapter", file, records["adapter"], links, args)
        if args.traces is not None:
            args.traces.mkdir(parents=True, exist_ok=True)
            for arm, record in records.items():
                _write_traces(record, args.traces / f"{file.replace('/', '-')}.{arm}.txt")
        if args.only_deepspeed:
            return rows_of(records["deepspeed"], records["adapter"])
        return rows_of(records["adapter"], records["deepspeed"])


def _write_traces(record: Path, target: Path) -> None:
    ends = [end for end in read(record).values() if end["outcome"] != "passed"]
    told = [f"== {end['name']}\n{end['detail']}\n{end['trace']}\n" for end in ends]
    target.write_text("\n".join(told))


def last_of_each_file(results: Path) -> list[Row]:
    """Return the rows of each test file's last run, in the order of FILES."""
    found: dict[str, list[Row]] = {}
    for line in results.read_text().splitlines():
        record = json.loads(line)
        found[record["file"]] = record["tests"]
    order = {pattern.split("*")[0]: place for place, pattern in enumerate(FILES)}

    def place(file: str) -> tuple[int, str]:
        return min((order[start] for start in order if file.startswith(start)), default=99), file

    return [row for file in sorted(found, key=place) for row in found[file]]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkout", type=Path, nargs="?", help="a checkout of DeepSpeed")
    parser.add_argument(
        "--files", nargs="+", default=FILES, help="patterns of test files below tests/unit"
    )
    parser.add_argument("--keyword", default="", help="run only the tests that match (pytest -k)")
    parser.add_argument(
        "--ranks", type=int, default=4, help="ranks at a time, at most (%(default)s)"
    )
    parser.add_argument(
        "--limit-s", type=float, default=180.0, help="time limit of a test (%(default)s)"
    )
    parser.add_argument(
        "--dir", type=Path, help="directory for files that tests write, on a drive (not tmpfs)"
    )
    parser.add_argument(
        "--deepspeed-venv", type=Path, help="an environment that compare_deepspeed.py made"
    )
    parser.add_argument(
        "--only-deepspeed", action="store_true", help="do not run the adapter; nothing is recorded"
    )
    parser.add_argument(
        "--traces", type=Path, help="folder for tracebacks of tests that did not pass"
    )
    parser.add_argument("--out", type=Path, help="file to which the table is also written")
    parser.add_argument(
        "--show", action="store_true", help="run nothing; print the table of recorded results"
    )
    parser.add_argument(
        "--results", type=Path, default=RESULTS, help="JSON lines file (%(default)s)"
    )
    return parser.parse_args()


def main() -> int:
    """Run the tests of a checkout. Returns the status of the process."""
    args = parse()
    if args.show:
        rows = last_of_each_file(args.results)
    else:
        if args.checkout is None or not (args.checkout / "tests/unit").is_dir():
            print("skipped: pass the path of a checkout of DeepSpeed, made with `git clone`")
            return 0
        if args.deepspeed_venv is not None:
            compare_deepspeed.have_environment(args.deepspeed_venv, ())
        rows = run_all(args)
    text = table(rows)
    print(text)
    if args.out is not None:
        args.out.write_text(text + "\n")
    return int(not rows or any(counts_of(row)[COLUMNS[1]] for row in rows))


def run_all(args: argparse.Namespace) -> list[Row]:
    """Run the requested files in sequence, and append a line of results after each."""
    unit = args.checkout / "tests" / "unit"
    version = args.checkout / "version.txt"
    about = {
        "run": harness.now(),
        "commit": harness.commit(),
        "machine": harness.machine(),
        "tests_of": version.read_text().strip() if version.exists() else "",
    }
    rows: list[Row] = []
    for file in files_of(unit, args.files):
        found = run_both(file, args)
        rows += found
        counts = sum((counts_of(row) for row in found), collections.Counter[str]())
        told = ", ".join(f"{counts[column]} {column}" for column in COLUMNS)
        harness.note(f"{file}: {told}")
        if not args.only_deepspeed:
            harness.append_line(args.results, {**about, "file": file, "tests": found})
    return rows


if __name__ == "__main__":
    sys.exit(harness.run_main(main))
