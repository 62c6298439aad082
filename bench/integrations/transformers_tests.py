"""Runs transformers' own tests of Trainer, with every trained model offloaded.

    python bench/integrations/transformers_tests.py CHECKOUT [--out FILE.md] [arguments of pytest]

CHECKOUT: a checkout of transformers, preferably at the tag of the installed release; its
`tests/trainer` runs unchanged. Without a checkout the script says so and exits with status 0.

Tests run twice. First unchanged: a test that fails then (another release, no network, no GPU) says
nothing about an offloaded model. Then embedded: the first call of a test's Trainer embeds it.
Between calls the parameters are gathered (`handle.gather`), so that the test may read them. Prints
a table of the files and a line for each test that did not pass. The exit status is 1 if a test
failed that passes on a plain model and is not in `NOT_APPLICABLE`.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import functools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

FILES = (
    "test_trainer.py", "test_trainer_checkpointing.py", "test_trainer_resume.py",
    "test_trainer_optimizers.py", "test_gradient_clipping.py", "test_trainer_evaluation.py",
    "test_trainer_callback.py", "test_trainer_seq2seq.py",
)  # fmt: skip

CALLS = (
    "train", "evaluate", "predict", "save_model", "create_optimizer",
    "create_optimizer_and_scheduler", "_save_checkpoint", "_load_from_checkpoint",
    "_prepare_for_training", "evaluation_loop", "training_step", "prediction_step",
)  # fmt: skip
"""Methods of Trainer that work on the model: the first of them embeds."""

NOT_APPLICABLE = {
    r"test_(custom_optimizer|adafactor_lr_none|reduce_lr_on_plateau_args)$":
        "the script gives an optimizer of torch: refused, with the fix",
    r"test_optim_supported_\d+_adafactor$": "optim='adafactor': refused by name",
    r"test_logging_inf_nan_filter$":
        "losses that are no numbers: the engine refuses their gradients",
    r"test_neftune$": "counts the hooks of the embedding, of which the engine has some",
    r"test_resume_batch_order$": "a persistent buffer that grows in each forward",
}
"""Patterns of test names, and why an offloaded model cannot be meant."""


class Embedding:
    """Plugin of pytest that embeds trainers."""

    def __init__(self, scratch: Path) -> None:
        self._scratch = scratch
        self._depth = 0
        self._windows: dict[Any, contextlib.ExitStack] = {}
        self._engines: list[Any] = []
        self.embedded = False
        """Whether the test that runs has embedded a trainer."""

    # -- trainers ----------------------------------------------------------------------------------

    def pytest_sessionstart(self) -> None:
        """Put the embedding into Trainer's methods."""
        import transformers

        for name in CALLS:
            own = getattr(transformers.Trainer, name)
            setattr(transformers.Trainer, name, self._embedding(name, own))

    def _embedding(self, name: str, own: Callable[..., Any]) -> Callable[..., Any]:
        from infinity.integrations._trainer import EmbeddedTrainer

        @functools.wraps(own)
        def call(trainer: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(trainer, EmbeddedTrainer):
                return own(trainer, *args, **kwargs)
            self._close_windows(trainer)
            self._embed(trainer)
            # Again, from the top: the class has changed.
            return getattr(trainer, name)(*args, **kwargs)

        return call

    def _embed(self, trainer: Any) -> None:
        import infinity as inf
        from infinity.integrations.transformers import embed

        self.embedded = True
        nvme = tempfile.mkdtemp(dir=self._scratch)
        embed(trainer, inf.Policy(params="nvme", optim="nvme", nvme=nvme, ram="min"))
        kind = type(trainer)
        for name in CALLS:
            setattr(kind, name, self._outer(getattr(kind, name)))

    def _outer(self, own: Callable[..., Any]) -> Callable[..., Any]:
        """Close windows before a call of the test, and open them after."""

        @functools.wraps(own)
        def call(trainer: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._depth:
                self._close_windows(trainer)
            self._depth += 1
            try:
                return own(trainer, *args, **kwargs)
            finally:
                self._depth -= 1
                if not self._depth:
                    self._open_window(trainer)

        return call

    def _open_window(self, trainer: Any) -> None:
        import infinity as inf

        for module in inf.offloaded_modules(trainer.model):
            engine = inf.handle(module)
            if engine not in self._engines:
                self._engines.append(engine)
            stack = contextlib.ExitStack()
            stack.enter_context(engine.gather(list(module.parameters())))
            self._windows[engine] = stack

    def _close_windows(self, trainer: Any = None) -> None:
        """Close those of a trainer's model, or all."""
        import infinity as inf

        mine = [inf.handle(m) for m in inf.offloaded_modules(trainer.model)] if trainer else None
        for engine in list(self._windows):
            if mine is None or engine in mine:
                self._windows.pop(engine).close()

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self) -> Iterator[None]:
        """Close the engines of a test."""
        self.embedded = False
        yield
        self._depth = 0
        for close in (self._close_windows, *(engine.close for engine in self._engines)):
            with contextlib.suppress(Exception):  # the test has failed already
                close()
        self._engines.clear()


class Record:
    """Plugin of pytest that writes how tests end, line by line."""

    def __init__(self, file: Path, embedding: Embedding | None) -> None:
        self._file = file
        self._embedding = embedding

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note a test's end; its set-up and its clean-up where they are no success."""
        if report.when != "call" and report.outcome == "passed":
            return
        detail = ""
        if report.skipped and isinstance(report.longrepr, tuple):
            detail = report.longrepr[2].removeprefix("Skipped: ")
        elif report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            detail = crash.message.splitlines()[0] if crash is not None else "no traceback"
        with self._file.open("a") as file:
            line = {"name": report.nodeid, "outcome": report.outcome, "detail": detail}
            line["embedded"] = self._embedding is not None and self._embedding.embedded
            file.write(json.dumps(line) + "\n")


@dataclasses.dataclass(frozen=True)
class Result:
    """The end of one test, embedded and on a plain model. outcome, plain: of pytest; embedded:
    whether it trained, or asked, a trainer at all.
    """

    name: str
    outcome: str
    detail: str
    embedded: bool
    plain: str
    plain_detail: str

    @property
    def reason(self) -> str | None:
        """Return the reason why the test says nothing about offloaded models; None: it does."""
        if self.outcome == "skipped":
            return f"skips itself: {self.detail}"
        if self.plain == "failed":
            return f"fails on a plain model, too: {self.plain_detail}"
        for pattern, reason in NOT_APPLICABLE.items():
            if re.search(pattern, self.name):
                return reason
        return None

    @property
    def column(self) -> str:
        """passed, failed or not applicable."""
        if self.outcome == "passed":
            return "passed"
        return "failed" if self.reason is None else "not applicable"


def results_of(embedded: Path, plain: Path) -> list[Result]:
    """Read the records of both arms."""
    found = []
    ends = [_read(file) for file in (embedded, plain)]
    for name, end in ends[0].items():
        plain = ends[1].get(name, {"outcome": "missing", "detail": ""})
        found.append(Result(**end, plain=plain["outcome"], plain_detail=plain["detail"]))
    return found


def _read(file: Path) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for line in file.read_text().splitlines() if file.exists() else ():
        end = json.loads(line)
        # A test that passed may fail when it cleans up.
        if end["name"] not in found or found[end["name"]]["outcome"] == "passed":
            found[end["name"]] = end
    return found


def table(results: list[Result]) -> str:
    """Write the counts of each file, and the tests that did not pass."""
    columns = ("passed", "of them with an offloaded model", "failed", "not applicable")
    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for result in results:
        for row in (Path(result.name.split("::")[0]).name, "all"):
            counts[row][result.column] += 1
            counts[row][columns[1]] += result.column == "passed" and result.embedded
    lines = ["| file | " + " | ".join(columns) + " |", "|---|---|---|---|---|"]
    lines += [
        f"| {row} | " + " | ".join(str(counts[row][column]) for column in columns) + " |"
        for row in (*(row for row in counts if row != "all"), "all")
    ]
    reasons: dict[tuple[str, str], list[str]] = collections.defaultdict(list)
    for result in results:
        if result.column != "passed":
            reasons[result.column, result.reason or result.detail].append(
                result.name.split("::")[-1]
            )
    lines += ["", "| not passed | reason | tests |", "|---|---|---|"]
    lines += [
        f"| {column} | {reason} | {len(names)}: {', '.join(names)} |"
        for (column, reason), names in sorted(reasons.items())
    ]
    return "\n".join(lines)


def run_arm(arm: str, record: Path, more: list[str]) -> int:
    """Run the tests of the checkout in this process, which is in it."""
    # Tests of others: no network, no GPU.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
    sys.path.insert(0, str(Path.cwd()))
    files = [f"tests/trainer/{name}" for name in FILES]
    files = [name for name in files if Path(name).is_file()]
    with tempfile.TemporaryDirectory(prefix="infinity-transformers-") as scratch:
        embedding = Embedding(Path(scratch)) if arm == "embedded" else None
        plugins = [Record(record, embedding), *([embedding] if embedding is not None else [])]
        flags = ["-q", "-p", "no:cacheprovider", "--tb=short"]
        return int(pytest.main([*files, *flags, *more], plugins))


def main() -> int:
    """Run the tests of a checkout. Returns the status of the process."""
    parser = argparse.ArgumentParser(description="transformers' tests of Trainer, embedded")
    parser.add_argument("checkout", type=Path, nargs="?", help="of transformers")
    parser.add_argument("--out", type=Path, help="where the table goes, too")
    parser.add_argument("--arm", choices=("plain", "embedded"), help=argparse.SUPPRESS)
    parser.add_argument("--record", type=Path, help=argparse.SUPPRESS)
    options, more = parser.parse_known_args()
    if options.arm is not None:
        return run_arm(options.arm, options.record, more)
    if options.checkout is None or not (options.checkout / "tests/trainer").is_dir():
        print("skipped: give a checkout of transformers, as `git clone` makes one")
        return 0
    with tempfile.TemporaryDirectory(prefix="infinity-transformers-") as kept:
        records = {arm: Path(kept) / f"{arm}.jsonl" for arm in ("plain", "embedded")}
        for arm, record in records.items():
            command = [sys.executable, str(Path(__file__).resolve())]
            command += ["--arm", arm, "--record", str(record), *more]
            subprocess.run(command, cwd=options.checkout, check=False)
        results = results_of(records["embedded"], records["plain"])
    text = table(results)
    print(text)
    if options.out is not None:
        options.out.write_text(text + "\n")
    return int(not results or any(result.column == "failed" for result in results))


if __name__ == "__main__":
    sys.exit(main())
