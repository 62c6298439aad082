"""Rehearses the three calls of call.py without a GPU (`make gpu-dry`).

It copies the tree's files that git tracks or does not ignore, and the bundle, to an empty folder,
runs each call there with the given Python on the simulated device, and merges the results by
`table.py`. It fails if tree and bundle exceed their size limit, if a command fails, is cut off or
does not run, and if a call's results exceed their limit. Measurements that need a GPU are reported
as NOT RUN. Its figures are no speeds.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import bench_path
import bundle
import call
import harness
import prepare
import stage
import table

FILES_MAX, FILE_BYTES_MAX = 8, 16 << 20
ENDED = (0, stage.NOT_RUN)


def lay_out(place: Path, made: Path) -> Path:
    """Copy the tree and a bundle into a new folder. Raises: BenchError when they are too large."""
    files = bundle.tree()
    why = bundle.too_large([*files, *bundle.files_of(made)])
    if why:
        raise harness.BenchError(why)
    tree = place / "tree"
    shutil.rmtree(place, ignore_errors=True)
    for file in files:
        target = tree / file.relative_to(bundle.ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(file, target, follow_symlinks=False)
    shutil.copytree(made, tree / prepare.BUNDLE.relative_to(prepare.ROOT))
    return tree


def run_call(python: str, tree: Path, number: int, seconds: float, out: Path) -> int:
    """Run a call in the tree; its status. Blocks for minutes."""
    script = tree / (bench_path.HERE / "call.py").relative_to(bench_path.ROOT)
    environment = harness.environment(OUT=str(out))
    began = time.monotonic()
    command = [python, str(script), str(number), "--dry", "--seconds", str(seconds)]
    status = subprocess.run(command, cwd=tree, env=environment, check=False).returncode
    taken = time.monotonic() - began
    harness.note(f"call {number} of a dry run: {stage.told(status)} after {taken:.0f} s")
    return status


def faults(outs: Sequence[Path], statuses: Sequence[int]) -> list[str]:
    """Faults of the calls, of their statuses and their folders of results."""
    found = [
        f"call {number} ended with {status}"
        for number, status in zip(call.CALLS, statuses, strict=True)
        if status not in ENDED
    ]
    for out in outs:
        files = [path for path in out.rglob("*") if path.is_file()]
        large = [path.name for path in files if path.stat().st_size > FILE_BYTES_MAX]
        if len(files) > FILES_MAX or large:
            found.append(f"{out} has {len(files)} files; too large: {large or 'none'}")
    records = table.read(table.lines_of(outs))
    ended = {
        one["name"] for one in records if one.get("script") == "command" and one["state"] == "ended"
    }
    passed = {one["suite"].split("/")[0] for one in records if one.get("outcome") == "passed"}
    steps = [one for one in records if one.get("script") == "stage"]
    told = {one["name"].split("/")[0] for one in steps if one.get("why")}
    for command in (one for commands in call.CALLS.values() for one in commands):
        if command.name not in ended:
            found.append(f"{command.name} did not end")
        elif command.dry and command.name not in passed | told:
            found.append(f"{command.name} ran no test: -k {command.dry!r} finds none")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--python", default=sys.executable, help="runs the calls (%(default)s)")
    parser.add_argument("--bundle", type=Path, default=prepare.BUNDLE, help="(%(default)s)")
    place = bundle.ROOT / "build" / "gpu-dry"
    parser.add_argument("--place", type=Path, default=place, help="is made anew (%(default)s)")
    parser.add_argument(
        "--seconds", type=float, default=call.CALL_S, help="for each call (%(default)s)"
    )
    args = parser.parse_args()
    # Not `resolve`: the interpreter of an environment is a link to that of another.
    python = str(Path(shutil.which(args.python) or args.python).absolute())
    place = args.place.resolve()
    tree = lay_out(place, args.bundle.resolve())
    outs = [place / f"call-{number}" for number in call.CALLS]
    statuses = []
    for number, out in zip(call.CALLS, outs, strict=True):
        out.mkdir()
        statuses.append(run_call(python, tree, number, args.seconds, out))
    wrong = faults(outs, statuses)
    command = [python, str(tree / "bench" / "gpu" / "table.py"), *map(str, outs)]
    subprocess.run([*command, "--out", str(place / "all")], check=True)
    sys.stdout.write((place / "all" / table.PAGE).read_text())
    for line in wrong:
        harness.note(f"WRONG: {line}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(harness.run_main(main))
