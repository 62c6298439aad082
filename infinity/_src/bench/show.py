"""The tables that people read."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from infinity._src.bench import hardware
from infinity._src.bench.adam import AdamFigures
from infinity._src.bench.device_copy import CopyFigures
from infinity._src.bench.figures import KINDS, SwapFigures
from infinity._src.bench.sweep import SweepFigures
from infinity._src.sizes import format_size


def show_swap(console: Console, figures: SwapFigures, record: dict[str, Any]) -> None:
    """What the drives give, beside the limit."""
    what = {"off": "", "full": ", copied and checksummed", "sample": ", copied, checksums sampled"}[figures.checksums]
    table = _table(f"Swap bandwidth{what}", "GB/s", "from – to", "CPU s/GB")
    if figures.limit_by:
        _columns(table, "limit", "CPU s/GB", "of limit")
    for name, phase in figures.phases.items():
        rounds = phase.spread.rounds_gbps
        spread = f"[dim]{min(rounds):.2f} – {max(rounds):.2f}[/dim]"
        cells = [name, f"[bold]{phase.spread.gbps:.2f}[/bold]", spread, f"{phase.cpu_s_per_gb:.3f}"]
        if phase.limit is not None:
            cells += [f"{phase.limit.gbps:.2f}", f"{phase.limit_cpu_s_per_gb:.3f}", f"[bold]{phase.of_limit:.0%}[/bold]"]
        table.add_row(*cells)
    console.print(table)
    show_drives(console, figures)
    _line(console, f"on {hardware.describe(record['hardware']['drives'])}")
    how = "O_DIRECT" if figures.direct else "through the page cache: figures may be those of memory"
    _line(
        console,
        f"{format_size(figures.size_bytes)} of random data, {format_size(figures.block_bytes)} blocks, depth {figures.depth}, "
        f"{figures.backend}, {how}, {figures.huge_page_share:.0%} huge pages; "
        f"{format_size(figures.verified_bytes)} read back and verified",
    )
    _line(
        console,
        f"medians, rounds: {len(figures.read.samples)}; mixed counts both ways; "
        f"first write to fresh extents, checksummed: {figures.fill_bytes_per_s / 1e9:.2f} GB/s",
    )
    if figures.limit_by:
        how = f"blocks as large, depth {figures.depth}, on a file of its own, in turns with ours"
        _line(console, f"limit: {figures.limit_by}, {how}")
    for note in _notes(figures, record):
        console.print(f"[yellow]note:[/yellow] {escape(note)}", highlight=False, soft_wrap=True)


def _notes(figures: SwapFigures, record: dict[str, Any]) -> list[str]:
    notes = [figures.backend_reason] if figures.backend_reason else []
    devices = [drive["device"] for drive in record["hardware"]["drives"] if drive["device"]]
    if len(set(devices)) < len(devices):
        notes.append("some of these directories lie on the same drive; together they are no faster than one of them")
    for drive in figures.drives:
        if not drive.direct and drive.direct_reason:
            notes.append(f"{drive.path}: {drive.direct_reason}")
        asked = (figures.block_bytes_asked or drive.block_bytes, figures.depth)
        if drive.block_bytes and (drive.block_bytes, drive.depth) != asked:
            block = format_size(min(drive.block_bytes, figures.block_bytes))
            notes.append(f"{drive.path}: fitted to device and backend: {block} blocks, depth {drive.depth}")
    if figures.huge_page_share < 0.9:
        notes.append("without huge pages drives are slower; see `infinity doctor`")
    return notes


def show_drives(console: Console, figures: SwapFigures) -> None:
    """Each drive's share where there are several, and latencies where they are known."""
    if len(figures.drives) > 1:
        table = _table("GB/s of each drive, all at work", *(f"{kind}, share" for kind in KINDS))
        for number, directory in enumerate(figures.directories):
            parts = [(phase.drive(number), phase.spread) for phase in figures.phases.values()]
            table.add_row(escape(directory), *(f"{part.gbps:.2f}  {part.median / total.median:4.0%}" for part, total in parts))
        console.print(table)
    for drive, directory in zip(figures.drives, figures.directories, strict=True):
        latencies = [
            f"{kind} p50 {latency.p50_s * 1e3:.1f} ms, p99 {latency.p99_s * 1e3:.1f} ms"
            for kind, latency in (("read", drive.read_latency), ("write", drive.write_latency))
            if latency.count
        ]
        if latencies:
            _line(console, f"requests of {directory}: {'; '.join(latencies)}; {drive.depth_mean:.0f} in flight on average")


def show_sweep(console: Console, sweep: SweepFigures) -> None:
    """Mixed bandwidth of every pair, and the choice."""
    depths = sorted({point.depth for point in sweep.points})
    table = _table("Mixed GB/s by block size and depth", *(f"depth {depth}" for depth in depths))
    for block in sorted({point.block_bytes for point in sweep.points}):
        cells = [format_size(block)]
        for depth in depths:
            here = [point for point in sweep.points if (point.block_bytes, point.depth) == (block, depth)]
            text = f"{here[0].rate('mixed') / 1e9:.2f}" if here else ""
            if here and here[0].final:
                text = f"[green]{text}[/green]"
            cells.append(f"[bold]{text} *[/bold]" if here and here[0] is sweep.best else text)
        table.add_row(*cells)
    console.print(table)
    best = sweep.best
    console.print(
        f"best: [bold]{format_size(best.block_bytes)} blocks, depth {best.depth}[/bold] "
        f"(the least in flight within 3 % of the best of the {sum(point.final for point in sweep.points)} measured longer)",
        highlight=False,
        soft_wrap=True,
    )


def show_adam(console: Console, figures: AdamFigures) -> None:
    """The kernels, from cache and from memory."""
    for where, title in (("cache", "from cache"), ("memory", "from memory")):
        rows = [row for row in figures.rows if row.where == where]
        names = ("state", "ISA", "Gparam/s", "GB/s") + (("of memory",) if where == "memory" else ())
        threads = "one thread" if figures.threads == 1 else f"{figures.threads} threads"
        table = _table(f"AdamW, {title}, {threads} ({rows[0].numel:,} parameters)", *names)
        for row in rows:
            chosen = "[bold]{}[/bold]" if row.isa == figures.isa else "{}"
            cells = [row.name, row.state, row.isa, chosen.format(f"{row.gparam_per_s:.2f}"), f"{row.gb_per_s:.1f}"]
            table.add_row(*cells, *([f"{row.of_memory:.0%}"] if row.of_memory is not None else []))
        console.print(table)
    _line(console, f"memory: {figures.memory_gb_per_s:.1f} GB/s, what additions in place read and write in the same rounds")
    if not figures.torch:
        _line(console, "torch cannot be imported, so its optimizer is not beside them")


def show_copy(console: Console, figures: CopyFigures) -> None:
    """Copies by block size, or that there is no device."""
    if not figures.device:
        _line(console, f"{figures.reason}; copies were not measured")
        return
    table = _table(f"Copies, {figures.device}", "memory", "block", "GB/s", "of the best pinned")
    for row in figures.rows:
        table.add_row(row.direction, row.memory, format_size(row.block_bytes), f"{row.gbps:.2f}", f"{row.of_best:.0%}")
    console.print(table)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("", no_wrap=True)
    _columns(table, *columns)
    return table


def _columns(table: Table, *names: str) -> None:
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)


def _line(console: Console, text: str) -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=True)
