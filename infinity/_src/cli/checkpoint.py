"""`infinity checkpoint`: list, verify, export and reshard checkpoints and durable runs, without
building the model.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table

from infinity._src.base.console import make_table, say, say_error
from infinity._src.base.sizes import format_size, parse_size
from infinity._src.base.standard_streams import write_to_stdout
from infinity._src.base.wording import listed
from infinity._src.checkpoint.durable.copies import run_directory
from infinity._src.checkpoint.formats.deepspeed_export import UniversalExport
from infinity._src.checkpoint.formats.safetensors_writer import ExportJob
from infinity._src.checkpoint.reader import Checkpoint
from infinity._src.checkpoint.reshard import ReshardJob
from infinity._src.checkpoint.verify import (
    Damage,
    Generation,
    ListedFile,
    VerifyJob,
    find_checkpoints,
    list_generations,
)
from infinity.errors import InfinityError

# -- The command -----------------------------------------------------------------------------------


LIST_SCHEMA = "infinity.checkpoint.ls/1"
VERIFY_SCHEMA = "infinity.checkpoint.verify/1"
_SHARD_BYTES_MAX = "2GiB"
_PIPED_WIDTH = 10_000
"""Columns of a console that writes to a file or pipe: more than any table needs."""


def run_checkpoint(options: argparse.Namespace, console: Console | None = None) -> int:
    """Run the action of `options`. Returns the exit status: 0 for success, 1 if `verify` found
    damage, 2 for a mistake or an error.
    """
    # With --json standard output has the record alone; all other output goes to stderr.
    to_stdout = bool(getattr(options, "json", False))
    console = console or _console(stderr=to_stdout)
    actions = {"ls": _list, "verify": _verify, "export": _export, "reshard": _reshard}
    try:
        return actions[options.action](options, console)
    except (ValueError, InfinityError, OSError) as error:
        say_error(console, error)
        return 2


def _list(options: argparse.Namespace, console: Console) -> int:
    records = []
    for directory in options.directories:
        places = find_checkpoints(directory)
        if not places:
            raise ValueError(
                f"{directory}: there is no checkpoint or durable run in it or one level below"
            )
        for place in places:
            found = list_generations(place)
            records.append(
                {
                    "directory": str(place),
                    "generations": [dataclasses.asdict(each) for each in found],
                }
            )
            if not options.json:
                show_directory(console, place, found)
    if options.json:
        _write_json({"schema": LIST_SCHEMA, "checkpoints": records})
    return 0


def _verify(options: argparse.Namespace, console: Console) -> int:
    place = run_directory(options.directory)
    job = VerifyJob(place, options.generation)
    began = time.monotonic()
    with _bar(console, "verifying", job.size_bytes) as advance:
        damage = job.verify(lambda _file, size: advance(size))
    seconds = time.monotonic() - began
    if options.json:
        _write_json({
            "schema": VERIFY_SCHEMA, "directory": str(place), "generation": job.generation,
            "size_bytes": job.size_bytes, "seconds": seconds,
            "damage": [dataclasses.asdict(each) for each in damage],
        })  # fmt: skip
        return 1 if damage else 0
    # A directory's name may contain brackets, which rich would interpret as markup.
    what = f"generation {job.generation} of {escape(str(place))}"
    if damage:
        show_damage(console, damage)
        say(console, f"[bold red]Damaged:[/bold red] {what}, {_count(len(damage), 'place')}")
    else:
        say(console, f"[bold green]No damage:[/bold green] {what}")
    console.print(_rate("read", job.size_bytes, seconds), highlight=False)
    return 1 if damage else 0


def _export(options: argparse.Namespace, console: Console) -> int:
    if options.to == "deepspeed-universal":
        return _export_universal(options, console)
    given = options.shard_bytes_max or _SHARD_BYTES_MAX
    try:
        most = parse_size(given)
    except ValueError as error:
        raise ValueError(f"--shard-bytes-max {given}: {error}") from None
    dtype = getattr(torch, options.dtype) if options.dtype else None
    began = time.monotonic()
    with _opened(options) as checkpoint:
        job = ExportJob(checkpoint, masters=options.masters, dtype=dtype)
        with _bar(console, "exporting", job.size_bytes) as advance:
            written = job.export(options.out, shard_bytes_max=most, progress=advance)
    say(
        console,
        f"step {checkpoint.step} of {escape(str(checkpoint.directory))}: "
        f"{_count(written.tensors, 'tensor')} in "
        f"{_count(len(written.files), 'file')} in {escape(str(options.out))}",
    )
    if checkpoint.left_out:
        names = listed(entry.name for entry in checkpoint.left_out)
        say(
            console,
            f"note: the checkpoint was saved with frozen=False, so {options.out} lacks {names}",
            markup=False,
        )
    console.print(_rate("written", written.size_bytes, time.monotonic() - began), highlight=False)
    return 0


def _export_universal(options: argparse.Namespace, console: Console) -> int:
    for option in ("masters", "shard_bytes_max", "dtype"):
        if getattr(options, option):
            raise ValueError(
                f"--{option.replace('_', '-')} works for safetensors only: a universal checkpoint "
                "of DeepSpeed has fp32 masters and moments, in a file each; leave it out"
            )
    began = time.monotonic()
    with _opened(options) as checkpoint:
        job = UniversalExport(checkpoint)
        with _bar(console, "exporting", job.size_bytes) as advance:
            written = job.export(options.out, progress=advance)
    say(
        console,
        f"step {checkpoint.step} of {escape(str(checkpoint.directory))}: "
        f"{_count(written.params, 'parameter')} in {escape(str(written.folder))}",
    )
    for note in written.notes:
        say(console, f"note: {note}", markup=False)
    console.print(_rate("written", written.size_bytes, time.monotonic() - began), highlight=False)
    return 0


def _reshard(options: argparse.Namespace, console: Console) -> int:
    if options.world < 1:
        raise ValueError(f"--world {options.world}: give a number of ranks, 1 or more")
    began = time.monotonic()
    with _opened(options) as checkpoint:
        job = ReshardJob(checkpoint, world=options.world, state=options.state)
        with _bar(console, "resharding", job.size_bytes) as advance:
            written = job.write(options.out, progress=advance)
    say(
        console,
        f"step {written.step} of {escape(str(checkpoint.directory))}, of "
        f"{_count(checkpoint.world, 'rank')}, is in "
        f"{escape(str(options.out))} for {_count(written.world, 'rank')}; "
        + (written.rounded or "all states bit for bit"),
    )
    for note in written.notes:
        say(console, f"note: {note}", markup=False)
    console.print(_rate("written", written.size_bytes, time.monotonic() - began), highlight=False)
    return 0


def _opened(options: argparse.Namespace) -> Checkpoint:
    return Checkpoint.open(run_directory(options.directory), options.generation)


def _console(*, stderr: bool) -> Console:
    """Make a console. For a file or pipe its width is unlimited, so that it wraps no names, and
    users can search for names.
    """
    console = Console(stderr=stderr)
    return console if console.is_terminal else Console(stderr=stderr, width=_PIPED_WIDTH)


@contextmanager
def _bar(console: Console, title: str, total: int) -> Iterator[Callable[[int], object]]:
    """Show a progress bar on a terminal, and nothing elsewhere. The yielded function advances the
    bar by a number of bytes.
    """
    if not console.is_terminal:
        yield lambda _size: None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=30),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(title, total=total)
        yield lambda size: progress.advance(task, size)


def _write_json(record: dict[str, Any]) -> None:
    write_to_stdout(json.dumps(record, indent=2, default=str) + "\n")


def _rate(verb: str, size_bytes: int, seconds: float) -> str:
    # A small checkpoint may be read in less time than the clock resolves: do not divide by 0.
    rate = format_size(int(size_bytes / max(seconds, 1e-9)))
    return f"{format_size(size_bytes)} {verb} in {seconds:.1f} s, {rate}/s"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


# -- Tables ----------------------------------------------------------------------------------------


_LEFT = ("generation", "state", "optimizer", "whole", "file", "what", "why")


def show_directory(console: Console, directory: Path, generations: Sequence[Generation]) -> None:
    """Print a row for each generation of a directory, then the reason for each generation that is
    not whole, then the files of the newest generation.
    """
    columns = (
        "generation", "whole", "step", "ranks", "on disk", "parameters", "state", "optimizer",
        "written",
    )  # fmt: skip
    table = make_table(escape(str(directory)), *columns, left=_LEFT)
    for each in generations:
        table.add_row(
            str(each.number),
            "[green]yes[/green]" if each.whole else "[red]no[/red]",
            _number(each.step),
            _number(each.world),
            format_size(each.disk_bytes),
            _params(each),
            escape(_state(each)),
            escape(", ".join(each.optimizers) or "-"),
            _time(each.written_s),
        )
    console.print(table)
    for each in generations:
        if each.why_not:
            text = f"generation {each.number} is not whole: {each.why_not}"
            say(console, text, style="red", markup=False)
    if generations:
        # Newest first: `list_generations` sorts them.
        console.print(_files(generations[0]))


def show_damage(console: Console, damage: Sequence[Damage]) -> None:
    """Print a row for each damaged place: file, offset, bytes, contents and reason."""
    table = make_table("Damage", "file", "offset", "bytes", "what", "why", left=_LEFT)
    for each in damage:
        table.add_row(
            escape(each.path),
            f"{each.offset:,}",
            f"{each.length:,}",
            escape(each.what),
            escape(each.reason),
        )
    console.print(table)


def _files(generation: Generation) -> Table:
    title = f"files of generation {generation.number}"
    table = make_table(title, "rank", "file", "bytes", "on disk", left=_LEFT)
    for file in generation.files:
        table.add_row(str(file.rank), escape(file.name), f"{file.size_bytes:,}", _taken(file))
    return table


def _taken(file: ListedFile) -> str:
    return "[red]missing[/red]" if file.disk_bytes is None else format_size(file.disk_bytes)


def _state(generation: Generation) -> str:
    """Format the policy's state, and the number of elements in each format."""
    kinds = "; ".join(f"{name} ({numel:,})" for name, numel in generation.formats.items())
    # A single format has all elements, so the number is left out.
    if len(generation.formats) == 1:
        kinds = next(iter(generation.formats))
    return f"{generation.state}: {kinds}" if kinds else "-"


def _params(generation: Generation) -> str:
    if not generation.params:
        return "-"
    left_out = f" (and {generation.left_out:,} frozen, left out)" if generation.left_out else ""
    return f"{generation.params:,}{left_out}"


def _number(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return (
        datetime.datetime.fromtimestamp(seconds, tz=datetime.timezone.utc)
        .astimezone()
        .strftime("%Y-%m-%d %H:%M:%S")
    )
