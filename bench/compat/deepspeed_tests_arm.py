"""One file of DeepSpeed's tests, under the adapter or under DeepSpeed itself, in this process.

Started by deepspeed_tests.py, also inside DeepSpeed's own environment. Writes how each test ends.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

import bench_folder  # noqa: F401 - adds bench/ to sys.path
import deepspeed_names
import distributed_tests
import pytest

PRELOADED = ("torch._dynamo", "torch.utils.checkpoint", "safetensors.torch", "liburing", "numpy.ma")
"""Modules that nearly every test would import for itself, which takes seconds in each fork."""
MARKERS = ("sequential", "nightly", "world_size", "inference", "evaluation")


class Record:
    """Plugin of pytest that writes how tests end, line by line."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def pytest_runtest_makereport(self, item: Any, call: Any) -> None:
        """Note a test's end; its set-up and its clean-up where they are no success."""
        if call.excinfo is None:
            if call.when == "call":
                self._write(item.nodeid, "passed", "", "", call.duration)
            return
        error = call.excinfo.value
        end = getattr(error, "end", None)
        detail = end.detail if end is not None else f"{type(error).__name__}: {error}"
        trace = end.trace if end is not None else str(call.excinfo.getrepr(style="short"))
        outcome = "failed"
        if isinstance(error, pytest.skip.Exception):
            outcome, detail = "skipped", str(error.msg)
        elif item.get_closest_marker("xfail") is not None:
            outcome, detail = "skipped", "DeepSpeed expects it to fail"
        self._write(item.nodeid, outcome, detail.splitlines()[0], trace, call.duration)

    def pytest_collectreport(self, report: Any) -> None:
        """Note a file that cannot be imported, or skips itself as a whole."""
        if report.outcome == "passed":
            return
        told = report.longrepr
        if report.outcome == "skipped":
            detail = told[2].removeprefix("Skipped: ") if isinstance(told, tuple) else str(told)
        else:
            detail = str(getattr(told, "longrepr", told)).strip().splitlines()[-1].lstrip("E ")
        self._write(report.nodeid, report.outcome, detail, str(told), 0.0)

    def _write(self, name: str, outcome: str, detail: str, trace: str, seconds: float) -> None:
        line = {"name": name, "outcome": outcome, "detail": detail[:300], "trace": trace}
        with self._file.open("a") as file:
            file.write(json.dumps({**line, "seconds": round(seconds, 2)}) + "\n")


def install_adapter() -> None:
    """Put the adapter in the place of `deepspeed`, with placeholders for what it lacks."""
    import infinity.compat.deepspeed as adapter
    from infinity.compat.deepspeed import names

    adapter.install()
    modules = [importlib.import_module(name) for name in names.TABLE]
    deepspeed_names.complete(modules, ("deepspeed", "hjson"))
    deepspeed_names.provide(deepspeed_names.PROVIDED)
    for name, value in deepspeed_names.LOOKED_AT_ON_ENGINES.items():
        setattr(adapter.DeepSpeedEngine, name, value)


def install_deepspeed() -> None:
    """Have DeepSpeed itself say that it is built for GPUs, and take fp16, as the adapter does."""
    import under_deepspeed

    under_deepspeed.allow_fp16()

    name = "deepspeed.git_version_info.torch_info"
    deepspeed_names.provide({name: deepspeed_names.PROVIDED[name]}, over=True)


def run_file(args: argparse.Namespace) -> None:
    """Run the tests of a file in forks of this process. Blocks until all have ended."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
    {"adapter": install_adapter, "deepspeed": install_deepspeed}[args.arm]()
    for name in PRELOADED:
        if importlib.util.find_spec(name) is not None:
            importlib.import_module(name)
    unit = args.checkout / "tests" / "unit"
    sys.path.insert(0, str(unit.parent))
    ours = types.ModuleType("unit.common")
    vars(ours).update(distributed_tests.names_for(unit))
    sys.modules["unit.common"] = ours
    with tempfile.TemporaryDirectory(prefix="infinity-deepspeed-", dir=args.dir) as scratch:
        settings = Path(scratch) / "pytest.ini"
        settings.write_text("[pytest]\nmarkers =\n" + "".join(f"  {mark}: \n" for mark in MARKERS))
        flags = [
            f"--rootdir={unit}", f"--config-file={settings}", f"--basetemp={scratch}/tmp",
            "--noconftest", "-p", "no:cacheprovider", "-p", "no:xdist", "-q", "--tb=line",
            "--import-mode=prepend", "-W", "ignore", "--continue-on-collection-errors",
        ]  # fmt: skip
        if args.keyword:
            flags += ["-k", args.keyword]
        plugins = [Record(args.record), distributed_tests.Ranks(args.limit_s, args.ranks)]
        pytest.main([str(unit / args.file), *flags], plugins)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("arm", choices=("adapter", "deepspeed"))
    parser.add_argument("checkout", type=Path)
    parser.add_argument("file", help="a test file, by its path below tests/unit")
    parser.add_argument("record", type=Path, help="JSON lines, one for each test")
    parser.add_argument("--ranks", type=int, required=True, help="ranks at a time, at most")
    parser.add_argument("--limit-s", type=float, required=True, help="time limit of a test")
    parser.add_argument("--keyword", default="", help="pytest -k")
    parser.add_argument("--dir", type=Path, help="directory for files that tests write")
    run_file(parser.parse_args())


if __name__ == "__main__":
    main()
