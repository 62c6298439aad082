"""The command `infinity bench`: runs a benchmark, shows its table, writes JSON and a picture."""

from __future__ import annotations

import argparse
import dataclasses
import math
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from infinity._src.base.console import say, say_error
from infinity._src.base.openmp import wait_passively
from infinity._src.base.options import Row, add_options
from infinity._src.base.paths import argument
from infinity._src.base.sizes import GIB, parse_size
from infinity._src.base.telemetry import configure_logging
from infinity._src.measure import adam, device_copy, hardware, report, sustained, sweep
from infinity._src.measure.drive_facts import facts_of, thermometers_of
from infinity._src.measure.reference import REFERENCES
from infinity._src.measure.report import (
    check_plot,
    check_target,
    draw,
    make_record,
    progress_bar,
    write_record,
)
from infinity._src.measure.streams import CHUNK_BYTES
from infinity._src.measure.swap import CHECKSUMS, SwapTask, check_directories, measure_swap
from infinity.aio import BACKENDS, IoSettings
from infinity.errors import AioError

DEFAULT_SIZE_BYTES = 4 * GIB

_DESCRIPTION = (
    "Measure what limits training with states on NVMe on this machine. Without a benchmark's name "
    "swap runs, in less than a minute.\n"
    "\n"
    "  swap   read, write and mixed bandwidth of one or several drives, compared with fio if it "
    "is installed\n"
    "  adam   the update kernels: parameters per second and share of the memory's bandwidth\n"
    "  copy   copies between pinned or pageable memory and a CUDA device, if there is one\n"
    "\n"
    "Options of a benchmark: infinity bench swap --help"
)


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        # argparse shows the text of this exception type only.
        raise argparse.ArgumentTypeError(str(error)) from None


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(_size(part) for part in text.split(","))


def _integers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a list of numbers such as 8,16,32"
        ) from None


_COMMON = (
    Row("json", argument, "also write the figures as JSON; - is standard output", "FILE"),
    Row("plot", argument, "also draw them (.png, .svg, .pdf); needs matplotlib", "FILE"),
)
_SWAP = (
    Row("dir", [argument], "directory on the drive; repeat for several drives (default: "
        "$INFINITY_NVME_DIR, else your cache directory, the current one or /var/tmp)", "DIR"),
    Row("size", _size, "size of all swap files together, for example 4G; the limit needs as much "
        "again (default: 4G, or an eighth of the free space)", "SIZE"),
    Row("block-size", _size, "bytes per I/O request (the backend's default, as in training: 1M "
        "with io_uring, whole chunks with threads)", "SIZE"),
    Row("depth", 32, "requests in flight per drive (32)"),
    Row("rounds", 3, "rounds; the median is reported (3)"),
    Row("seconds", 1.5, "longest time of a phase in a round (1.5)"),
    Row("backend", BACKENDS, "I/O backend (auto: the best that works)", more={"default": "auto"}),
    Row("checksums", CHECKSUMS, "off: measure the drive and the rings alone; full: copy every "
        "chunk, compute and compare its checksums, as training does; sample: compare a part (off)",
        more={"default": "off"}),
    Row("limit", REFERENCES, "what to compare with: fio, plain preads and pwrites (probe), "
        "nothing (off), or fio if it is installed, else probe (auto)", more={"default": "auto"}),
    Row("verify", False, "read everything back and compare all checksums, not a sample; with "
        "--checksums also at the end"),
    Row("sustained", float, "run the reads and writes of optimizer steps for this many minutes, "
        "longer than the drive's cache lasts; shows a row for each second, latencies of single "
        "requests, and the rates afterwards (--size: an eighth of the free space)", "MINUTES"),
    Row("for", argument, "also predict the training of this model on this machine from the "
        "measured rates: a directory with a config.json, or that file", "MODEL", {"dest": "model"}),
    Row("tbw", float, "with --for: terabytes that one drive is rated to be written (an example)",
        "TB"),
    Row("sweep", False, "find the best block size and depth, then measure with them; "
        "Policy(io=FILE) reads the JSON"),
    Row("sweep-blocks", _sizes, "block sizes to try (256K,512K,1M,2M,4M and whole chunks)", "LIST",
        {"default": sweep.BLOCKS}),
    Row("sweep-depths", _integers, "depths to try (4,8,16,32,64)", "LIST",
        {"default": sweep.DEPTHS}),
)  # fmt: skip
_ADAM = (
    Row("threads", 1, "threads (1, as one worker of an executor)"),
    Row("rounds", 5, "rounds; the median is reported (5)"),
    Row("numel", adam.MEMORY_NUMEL,
        f"number of parameters of the runs from memory ({adam.MEMORY_NUMEL >> 20}Mi)"),
)  # fmt: skip
_COPY = (
    Row("blocks", _sizes, "bytes per copy (256K,1M,4M,16M,64M)", "LIST",
        {"default": device_copy.BLOCKS}),
    Row("rounds", 3, "rounds; the median is reported (3)"),
)  # fmt: skip


def build_parser() -> argparse.ArgumentParser:
    """Make the parser of all benchmarks."""
    parser = argparse.ArgumentParser(
        prog="infinity bench",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_benchmarks(parser)
    return parser


def _add_benchmarks(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="benchmark", required=True, metavar="BENCHMARK")
    for name, rows, text in (
        ("swap", _SWAP, "swap bandwidth (the default)"),
        ("adam", _ADAM, "update kernels on the CPU"),
        ("copy", _COPY, "copies to and from a device"),
    ):
        add_options(commands.add_parser(name, help=text, description=text), (*rows, *_COMMON))


def describe_bench(parser: argparse.ArgumentParser) -> None:
    """Add all benchmarks to the parser of a completion script, and swap's options, since users may
    leave out the name swap.
    """
    add_options(parser, (*_SWAP, *_COMMON))
    _add_benchmarks(parser)


class Meaning(NamedTuple):
    """Forecast of a model's training from measured rates: lines to print, and the JSON record."""

    lines: tuple[str, ...]
    record: dict[str, Any]


Forecast = Callable[[IoSettings], Meaning]


def main(
    argv: Sequence[str] | None = None,
    read_model: Callable[[Path, float | None], Forecast] | None = None,
) -> int:
    """Run `python -m infinity.bench [swap|adam|copy] [options]`; returns the exit status.

    read_model: reads the model of --for and the rating of --tbw. The caller passes this function,
    since forecasts belong to layers above this one.
    """
    wait_passively()
    arguments = list(sys.argv[1:] if argv is None else argv)
    # Without a benchmark's name the arguments are swap's; --help is the whole command's.
    if not arguments or (arguments[0].startswith("-") and arguments[0] not in ("-h", "--help")):
        arguments.insert(0, "swap")
    options = build_parser().parse_args(arguments)
    # The record's command includes the name of the benchmark.
    options.command = arguments
    return run(options, read_model)


def run(
    options: argparse.Namespace,
    read_model: Callable[[Path, float | None], Forecast] | None = None,
) -> int:
    """Run the benchmark of `options`. Exit status: 0, 1 for a fault, 2 for a user's mistake."""
    configure_logging()
    # With JSON on standard output the tables go to standard error.
    console = Console(stderr=options.json is not None and str(options.json) == "-")
    try:
        # Check the targets before minutes of measuring, whose figures would be lost.
        check_target(options.json, "--json")
        check_target(options.plot, "--plot")
        check_plot(options.plot)
        if options.json is not None and options.json == options.plot:
            raise ValueError(f"--json and --plot both name {options.json}; name two files")
        forecast = _forecast(options, read_model)
        record = _BENCHMARKS[options.benchmark](options, console)
        if forecast is not None:
            meaning = forecast(IoSettings.load(record))
            record["model"] = meaning.record
            for line in meaning.lines:
                say(console, line, markup=False)
        write_record(record, options.json)
        draw(record, options.plot)
    # AioError is an OSError, so its clause comes first: a drive's fault is not a user's mistake.
    except AioError as error:
        say_error(console, error)
        return 1
    except (ValueError, OSError, MemoryError) as error:
        say_error(console, error)
        return 2
    return 0


def _forecast(
    options: argparse.Namespace,
    read_model: Callable[[Path, float | None], Forecast] | None,
) -> Forecast | None:
    """Read the model of --for, so that a mistake is found before minutes of measuring. None without
    --for.
    """
    if options.benchmark != "swap":
        return None
    if options.model is None:
        if options.tbw is not None:
            raise ValueError(f"--tbw {options.tbw} has no effect without --for: add --for")
        return None
    if read_model is None:
        raise ValueError("--for works only in `infinity bench`: use it, or leave --for out")
    return read_model(options.model, options.tbw)


def run_swap(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Measure the drives, show the figures, and return the record."""
    _check_sweep(options)
    directories = options.dir or hardware.default_directories()
    # Check first, since `_default_size` reads the free space.
    check_directories(directories)
    if options.sustained is not None:
        return _run_sustained(options, directories, console)
    task = _swap_task(options, directories, DEFAULT_SIZE_BYTES)
    swept = None
    with progress_bar(console) as progress:
        if options.sweep:
            swept = sweep.measure_sweep(task, options.sweep_blocks, options.sweep_depths, progress)
            task = dataclasses.replace(
                task, block_bytes=swept.best.block_bytes, depth=swept.best.depth
            )
        figures = measure_swap(task, progress)
    found = {**figures.as_dict(), "sweep": swept.as_dict() if swept is not None else None}
    facts = [facts_of(directory) for directory in directories]
    record = make_record("swap", found, options.command, directories, facts)
    if swept is not None:
        report.show_sweep(console, swept)
    report.show_swap(console, figures, record)
    report.show_facts(console, facts)
    if swept is not None and options.json is not None and str(options.json) != "-":
        say(console, f'use it: Policy(io="{options.json}")', markup=False)
    return record


def _check_sweep(options: argparse.Namespace) -> None:
    """Raise ValueError for options that have no effect with --sweep, or without it."""
    for option, unused in (
        ("--sweep-blocks", options.sweep or options.sweep_blocks == sweep.BLOCKS),
        ("--sweep-depths", options.sweep or options.sweep_depths == sweep.DEPTHS),
    ):
        if not unused:
            raise ValueError(f"{option} has no effect without --sweep: add --sweep")
    if options.sweep and options.block_size is not None:
        raise ValueError("--sweep finds the block size: leave out --block-size, or --sweep")


def _run_sustained(
    options: argparse.Namespace, directories: Sequence[Path], console: Console
) -> dict[str, Any]:
    """Measure minutes of load, show the figures, and return the record."""
    for name, unused in (("sweep", False), ("verify", False), ("checksums", "off")):
        if getattr(options, name) != unused:
            raise ValueError(
                f"--{name} with --sustained, which measures the drives alone: leave one of them out"
            )
    if options.limit not in ("auto", "off"):
        raise ValueError(
            f"--limit {options.limit} with --sustained, which compares a drive's first minutes "
            "with its last: leave one of them out"
        )
    options.limit = "off"
    # No upper limit: only much data fills the cache of a large drive.
    swap = _swap_task(options, directories, math.inf)
    thermometers = [path for directory in directories for path in thermometers_of(directory)]
    task = sustained.SustainedTask(
        swap, options.sustained, sustained.ROW_S, tuple(dict.fromkeys(thermometers))
    )
    before = [facts_of(directory) for directory in directories]
    with progress_bar(console) as progress:
        figures = sustained.measure_sustained(task, progress)
    facts = [facts_of(directory) for directory in directories]
    found = {**figures.as_dict(), "facts_before": [one.as_dict() for one in before]}
    record = make_record("sustained", found, options.command, directories, facts)
    report.show_sustained(console, figures, record)
    report.show_facts(console, facts, before)
    return record


def _swap_task(
    options: argparse.Namespace, directories: Sequence[Path], size_most: float
) -> SwapTask:
    size = options.size if options.size is not None else _default_size(directories, size_most)
    return SwapTask(
        directories=tuple(directories),
        size_bytes=size,
        block_bytes=options.block_size,
        depth=options.depth,
        backend=options.backend,
        rounds=options.rounds,
        phase_s=options.seconds,
        checksums=options.checksums,
        limit=options.limit,
        verify_all=options.verify,
    )


def run_adam(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Measure the update kernels, show the figures, and return the record."""
    with progress_bar(console) as progress:
        figures = adam.measure_adam(
            threads=options.threads, rounds=options.rounds, numel=options.numel, progress=progress
        )
    report.show_adam(console, figures)
    return make_record("adam", figures.as_dict(), options.command)


def run_copy(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Measure copies, show the figures, and return the record. A missing device is not an error."""
    with progress_bar(console) as progress:
        figures = device_copy.measure_copy(
            blocks=options.blocks, rounds=options.rounds, progress=progress
        )
    report.show_copy(console, figures)
    return make_record("copy", figures.as_dict(), options.command)


_BENCHMARKS: dict[str, Callable[[argparse.Namespace, Console], dict[str, Any]]] = {
    "swap": run_swap,
    "adam": run_adam,
    "copy": run_copy,
}


def _default_size(directories: Sequence[Path], most: float) -> int:
    """Return `most` bytes, or an eighth of the smallest free space times the number of directories,
    if that is less.
    """
    free = min(shutil.disk_usage(directory).free for directory in directories)
    # At least the size that `SwapTask` accepts, so that its error reports the missing space.
    return max(int(min(most, free // 8 * len(directories))), 4 * CHUNK_BYTES)
