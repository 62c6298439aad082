"""The command `infinity bench`: asks `swap.measure_swap`, shows a table, writes JSON."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from infinity.aio import BACKENDS
from infinity.bench import hardware
from infinity.bench.swap import CHUNK_BYTES, SwapFigures, measure_swap
from infinity.errors import AioError
from infinity.sizes import GIB, format_size, parse_size
from infinity.telemetry import configure_logging

SCHEMA = "infinity.bench.swap/1"
"""Name and version of the JSON; a new version changes or removes a field, added fields keep it."""

DEFAULT_SIZE_BYTES = 4 * GIB


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `swap`, which are also those of the bare command."""
    parser.add_argument("--dir", action="append", metavar="DIR", help="directory on the drive; repeat for several drives "
                        "(default: $INFINITY_NVME_DIR, else a directory of yours on a drive)")  # fmt: skip
    parser.add_argument("--size", type=_size, metavar="SIZE", help="swap to use in all, for example 4G "
                        "(default: 4G, or a quarter of the free space)")  # fmt: skip
    parser.add_argument("--block-size", type=_size, default=1 << 20, metavar="SIZE", help="bytes per I/O request (1M)")
    parser.add_argument("--depth", type=int, default=32, help="requests in flight per drive (32)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds; the median is reported (3)")
    parser.add_argument("--seconds", type=float, default=4.0, help="at most this long per phase and round (4)")
    parser.add_argument("--backend", choices=BACKENDS, default="auto", help="I/O backend (auto: the best there is)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures as JSON; - is standard output")


def main(argv: Sequence[str] | None = None) -> int:
    """`python -m infinity.bench [swap] [options]`; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="infinity bench", description="What a drive gives as swap: read, write and mixed bandwidth, in under a minute."
    )
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or (arguments[0].startswith("-") and arguments[0] not in ("-h", "--help")):
        arguments.insert(0, "swap")
    commands = parser.add_subparsers(dest="benchmark", required=True)
    add_arguments(commands.add_parser("swap", help="swap bandwidth (the default)"))
    return run(parser.parse_args(arguments))


def run(options: argparse.Namespace) -> int:
    """Measure as `options` say. Exit status: 0, 1 for a fault, 2 for a mistake, 130 after Ctrl-C."""
    configure_logging()
    # With JSON on standard output the table goes to standard error.
    console = Console(stderr=options.json is not None and str(options.json) == "-")
    try:
        directories = [Path(path) for path in options.dir] if options.dir else hardware.default_directories()
        size_bytes = options.size or _default_size(directories)
        with _progress(console) as progress:
            figures = measure_swap(
                directories,
                size_bytes=size_bytes,
                block_bytes=options.block_size,
                depth=options.depth,
                backend=options.backend,
                rounds=options.rounds,
                phase_s=options.seconds,
                progress=progress,
            )
        record = as_record(figures, directories)
        _write_json(record, options.json)
    except KeyboardInterrupt:
        console.print("interrupted; nothing is left on the drive")
        return 130
    except AioError as error:
        console.print(f"[red]error:[/red] {error}", highlight=False)
        return 1
    except (ValueError, OSError) as error:
        console.print(f"[red]error:[/red] {error}", highlight=False)
        return 2
    show(console, figures, record)
    return 0


def as_record(figures: SwapFigures, directories: Sequence[Path]) -> dict[str, Any]:
    """The JSON record: schema, time, figures, machine and drives."""
    return {
        "schema": SCHEMA,
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        **figures.as_dict(),
        "hardware": {**hardware.machine(), "drives": [hardware.drive(directory) for directory in directories]},
    }


def show(console: Console, figures: SwapFigures, record: dict[str, Any]) -> None:
    """Print the table."""
    table = Table(title="Swap bandwidth", title_justify="left")
    table.add_column("")
    table.add_column("GB/s", justify="right")
    table.add_column("rounds", justify="right", style="dim")
    for label, spread in (("read", figures.read), ("write", figures.write), ("mixed, both ways", figures.mixed)):
        rounds = "  ".join(f"{value / 1e9:.2f}" for value in spread.rounds)
        table.add_row(label, f"[bold]{spread.gbps:.2f}[/bold]", rounds)
    table.add_row("first write to fresh extents, checksummed", f"{figures.fill_bytes_per_s / 1e9:.2f}", "")
    console.print(table)
    drives = hardware.describe(record["hardware"]["drives"])
    console.print(f"on {drives}", highlight=False, soft_wrap=True)
    how = "O_DIRECT" if figures.direct else "through the page cache: figures may be those of memory"
    console.print(
        f"{format_size(figures.size_bytes)} of random data, {format_size(figures.block_bytes)} blocks, depth {figures.depth}, "
        f"{figures.backend}, {how}, {figures.huge_page_share:.0%} huge pages; "
        f"{format_size(figures.verified_bytes)} read back and verified",
        highlight=False,
        soft_wrap=True,
    )
    if figures.backend_reason:
        console.print(f"[yellow]note:[/yellow] {figures.backend_reason}", highlight=False, soft_wrap=True)
    if figures.huge_page_share < 0.9:
        console.print("[yellow]note:[/yellow] without huge pages drives are slower; see `infinity doctor`", soft_wrap=True)


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _default_size(directories: Sequence[Path]) -> int:
    """4 GiB, but at most a quarter of what is free on the fullest drive."""
    missing = [str(directory) for directory in directories if not directory.is_dir()]
    if missing:
        raise ValueError(f"directory {', '.join(missing)} does not exist; create it, or name another with --dir")
    free = min(shutil.disk_usage(directory).free for directory in directories)
    return max(min(DEFAULT_SIZE_BYTES, free // 4 * len(directories)), 4 * CHUNK_BYTES)


def _write_json(record: dict[str, Any], path: Path | None) -> None:
    if path is None:
        return
    text = json.dumps(record, indent=2) + "\n"
    if str(path) == "-":
        sys.stdout.write(text)
        return
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def _progress(console: Console) -> AbstractContextManager[Callable[[str, float], None] | None]:
    """A progress bar on a terminal, nothing elsewhere."""
    return _Bar(console) if console.is_terminal else nullcontext()


class _Bar:
    """One bar that goes through the phases."""

    def __init__(self, console: Console) -> None:
        columns = (TextColumn("{task.description:<10}"), BarColumn(), TimeElapsedColumn())
        self._progress = Progress(*columns, console=console, transient=True)
        self._task = self._progress.add_task("starting", total=1.0)

    def __enter__(self) -> Callable[[str, float], None]:
        self._progress.start()
        return lambda phase, share: self._progress.update(self._task, description=phase, completed=share)

    def __exit__(self, *exc: object) -> None:
        self._progress.stop()
