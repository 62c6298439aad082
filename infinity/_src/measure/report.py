"""Reports of the benchmarks: a JSON record, tables, a picture and a progress bar.

The JSON record of every benchmark has one versioned envelope. It is written completely or not at
all:

    schema      "infinity.bench.<benchmark>/<version>"; changed or removed fields raise the version,
                added fields do not
    time        when the measurement ended, UTC, ISO 8601
    infinity    version; commit (40 hex digits) and dirty in a git checkout, else null
    command     the arguments
    hardware    host, cpu, cores, memory_bytes, kernel, architecture, python, huge_pages, and for
                swap the drives: path, file_system, device, model, rotational, scheduler,
                nr_requests, max_sectors_kb, free_bytes, facts (raid: device, level, chunk_bytes,
                members, degraded, or null; drives: device, link, health at the end)

The figures are also at the top level. `infinity.bench.swap/1`: read_gbps, write_gbps, mixed_gbps,
fill_gbps (medians, 10^9 bytes per second); rounds; phases.<kind> (gbps, rounds, cpu_s_per_gb,
cpu_rounds, of_limit, of_limit_rounds, limit, drives); limit_by; settings (for `Policy(io=...)`:
block_bytes, null for the backend's default, depth, bandwidths in bytes per second, the measured
backend); size_bytes, block_bytes (of the longest request), depth, checksums, backend,
backend_reason, direct, huge_page_share, registered, verified_bytes; drives (counters and latencies
in seconds over the whole measurement); sweep (points, best, close), null without one.
`infinity.bench.sustained/1`, of `swap --sustained`: minutes; rows, one for each second (at_s,
seconds, read_bytes_per_s, write_bytes_per_s, read_latency, write_latency, drives, temperature_c of
the hottest drive or null); summary (first_tenth and last_tenth of the rows, slowest_row in bytes
written per second); alone (latencies of single requests, for each drive and size); after (phases
after the load); settings (from them); fill_gbps, size_bytes, bytes_written (by the load),
block_bytes, depth, backend, direct; facts_before, from before the load. Latencies: count, and
seconds p50_s, p99_s, p999_s, max_s.
With --for, `swap/1` and `sustained/1` also have model (name, params, tokens_per_step, drives_s,
sources, and the fields of a job in a record of `infinity plan`).
`infinity.bench.adam/1`: isa, isas, threads, torch (its version or null), memory_gb_per_s, rows.
`infinity.bench.copy/1`: device (null without one), reason, rows.

This module also prints tables; draws a picture of a record (bars next to their limit, a sweep as a
map, kernels and copies as lines), which needs matplotlib; and shows one progress bar for all
phases, on a terminal only.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from infinity._src.base.atomic_file import write_named
from infinity._src.base.console import say
from infinity._src.base.sizes import format_size
from infinity._src.base.standard_streams import write_to_stdout
from infinity._src.base.version import __version__
from infinity._src.cabi.installation import EXTRA, install_line
from infinity._src.measure import hardware
from infinity._src.measure.adam import AdamFigures
from infinity._src.measure.device_copy import CopyFigures
from infinity._src.measure.drive_facts import Facts
from infinity._src.measure.sustained import SustainedFigures
from infinity._src.measure.swap import KINDS, SHORT_S, SwapFigures
from infinity._src.measure.sweep import SweepFigures

# -- JSON ------------------------------------------------------------------------------------------


SCHEMAS = {name: f"infinity.bench.{name}/1" for name in ("swap", "sustained", "adam", "copy")}


def make_record(
    benchmark: str,
    figures: Mapping[str, Any],
    command: Sequence[str],
    directories: Sequence[Path] = (),
    facts: Sequence[Facts] = (),
) -> dict[str, Any]:
    """Make the record of one benchmark: envelope and figures. facts: the facts of each directory's
    drives.
    """
    machine = hardware.machine()
    if directories:
        machine["drives"] = [
            {**hardware.drive(directory), "facts": found.as_dict()}
            for directory, found in zip(directories, facts, strict=True)
        ]
    return {
        "schema": SCHEMAS[benchmark],
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "infinity": {"version": __version__, **checkout()},
        "command": list(command),
        **figures,
        "hardware": machine,
    }


def checkout() -> dict[str, Any]:
    """Return `commit` and `dirty` of the git checkout that this package runs from; None for both if
    there is no checkout.
    """
    root = Path(__file__).resolve().parents[3]
    unknown = {"commit": None, "dirty": None}
    if not (root / ".git").exists():
        return unknown
    # core.fsmonitor may name a program, which `git status` would start.
    git = ["git", "-C", str(root), "-c", "core.fsmonitor=false"]
    try:
        commit = subprocess.run(
            [*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True, timeout=10
        )
        status = subprocess.run(
            [*git, "status", "--porcelain", "--untracked-files=no"],
            capture_output=True,
            text=True,
            check=True,
            timeout=10,
        )
    except (OSError, subprocess.SubprocessError):
        # git is missing, or refuses a checkout that another user owns.
        return unknown
    return {"commit": commit.stdout.strip(), "dirty": bool(status.stdout.strip())}


def check_target(path: Path | None, option: str) -> None:
    """Raise ValueError if a file cannot be written to `path`. Commands call this before they
    measure.
    """
    if path is None or str(path) == "-":
        return
    if path.is_dir():
        raise ValueError(f"{option} {path} is a directory; name a file")
    if not path.absolute().parent.is_dir():
        raise ValueError(
            f"{option} {path}: directory {path.absolute().parent} does not exist; create it"
        )
    if not os.access(path.absolute().parent, os.W_OK):
        raise ValueError(f"{option} {path}: this user may not write to {path.absolute().parent}")


def write_record(record: Mapping[str, Any], path: Path | None) -> None:
    """Write the record to `path`, completely or not at all; to standard output for "-". None writes
    nothing.
    """
    if path is None:
        return
    text = json.dumps(record, indent=2) + "\n"
    if str(path) == "-":
        write_to_stdout(text)
        return
    write_named(path, text)


# -- Tables ----------------------------------------------------------------------------------------


def show_facts(console: Console, facts: Sequence[Facts], before: Sequence[Facts] = ()) -> None:
    """Show each array and drive below the directories once, and warnings. before: facts read before
    a load.
    """
    for line in dict.fromkeys(line for found in facts for line in found.describe()):
        say(console, line, markup=False)
    warm = {
        f"{drive.device} {drive.health.temperature_c:g} °C"
        for found in before
        for drive in found.drives
        if drive.health.temperature_c is not None
    }
    if warm:
        say(console, f"before the load: {', '.join(sorted(warm))}", markup=False)
    for warning in dict.fromkeys(warning for found in facts for warning in found.warnings()):
        say(console, f"[yellow]note:[/yellow] {escape(warning)}")


def show_swap(console: Console, figures: SwapFigures, record: dict[str, Any]) -> None:
    """Show the bandwidth of the drives next to the reference."""
    what = {"off": "", "full": ", copied and checksummed", "sample": ", copied, checksums sampled"}[
        figures.checksums
    ]
    table = _table(f"Swap bandwidth{what}", "GB/s", "from – to", "CPU s/GB")
    if figures.limit_by:
        _columns(table, "limit", "CPU s/GB", "of limit")
    for name, phase in figures.phases.items():
        rounds = phase.spread.rounds_gbps
        spread = f"[dim]{min(rounds):.2f} – {max(rounds):.2f}[/dim]"
        cells = [name, f"[bold]{phase.spread.gbps:.2f}[/bold]", spread, f"{phase.cpu_s_per_gb:.3f}"]
        if phase.limit is not None:
            cells += [
                f"{phase.limit.gbps:.2f}",
                f"{phase.limit_cpu_s_per_gb:.3f}",
                f"[bold]{phase.of_limit:.0%}[/bold]",
            ]
        table.add_row(*cells)
    console.print(table)
    show_drives(console, figures)
    say(console, f"on {hardware.describe(record['hardware']['drives'])}", markup=False)
    say(
        console,
        f"{format_size(figures.size_bytes)} of random data, {format_size(figures.block_bytes)} "
        f"blocks, depth {figures.depth}, {figures.backend}, {_path_of_io(figures.direct)}, "
        f"{figures.huge_page_share:.0%} "
        f"huge pages; {format_size(figures.verified_bytes)} read back and verified",
        markup=False,
    )
    say(
        console,
        f"medians, rounds: {len(figures.read.samples)}; mixed counts both ways; "
        f"first write to fresh extents, checksummed: {figures.fill_bytes_per_s / 1e9:.2f} GB/s",
        markup=False,
    )
    if figures.limit_by:
        how = f"same block size, depth {figures.depth}, a separate file, alternating with infinity"
        say(console, f"limit: {figures.limit_by}, {how}", markup=False)
    for note in _notes(figures, record):
        say(console, f"[yellow]note:[/yellow] {escape(note)}")


def show_sustained(
    console: Console, figures: SustainedFigures, record: dict[str, Any]
) -> None:
    """Compare the first tenth of the load with the last, and show the latencies of single requests
    and the rates after the load.
    """
    first, last = figures.first, figures.last
    table = _table(
        f"Sustained: steps for {figures.minutes:g} min", "first tenth", "last tenth", "last / first"
    )
    pairs = [
        ("read, GB/s", first.read_bytes_per_s / 1e9, last.read_bytes_per_s / 1e9),
        ("write, GB/s", first.write_bytes_per_s / 1e9, last.write_bytes_per_s / 1e9),
    ]
    for kind in ("read", "write"):
        before, after = getattr(first, kind), getattr(last, kind)
        for name, field in _PERCENTILES[:3]:
            pairs.append(
                (f"{kind} {name}, ms", getattr(before, field) * 1e3, getattr(after, field) * 1e3)
            )
    if first.temperature_c is not None and last.temperature_c is not None:
        pairs.append(("hottest drive, °C", first.temperature_c, last.temperature_c))
    for name, then, now in pairs:
        share = f"{now / then:.0%}" if then else ""
        table.add_row(name, f"{then:.2f}", f"[bold]{now:.2f}[/bold]", share)
    console.print(table)
    _show_alone(console, figures)
    after = ", ".join(f"{kind} {one.spread.gbps:.2f}" for kind, one in figures.after.items())
    slowest = min(row.write_bytes_per_s for row in figures.rows) / 1e9
    times = figures.bytes_written / figures.size_bytes
    for line in (
        f"slowest second: {slowest:.2f} GB/s written; after the load: {after} GB/s",
        f"on {hardware.describe(record['hardware']['drives'])}",
        (
            f"{format_size(figures.bytes_written)} written, {times:.1f} times the "
            f"{format_size(figures.size_bytes)} of random data; first write to fresh extents: "
            f"{figures.fill_bytes_per_s / 1e9:.2f} GB/s"
        ),
        (
            f"{format_size(figures.block_bytes)} blocks, depth {figures.depth}, {figures.backend}, "
            f"{_path_of_io(figures.direct)}"
        ),
    ):
        say(console, line, markup=False)


def _path_of_io(direct: bool) -> str:
    return "O_DIRECT" if direct else "page cache, so figures may show memory, not the drive"


_PERCENTILES = (("p50", "p50_s"), ("p99", "p99_s"), ("p99.9", "p999_s"), ("max", "max_s"))


def _show_alone(console: Console, figures: SustainedFigures) -> None:
    table = _table(
        "One request at a time, random places, ms",
        *(name for name, _ in _PERCENTILES),
        "requests",
    )
    for one in figures.alone:
        # A path fills much of a row, so a single drive's row has none.
        where = f" {one.path}" if len(figures.directories) > 1 else ""
        for kind in ("read", "write"):
            latency = getattr(one, kind)
            table.add_row(
                escape(f"{kind} {format_size(one.request_bytes)}{where}"),
                *(f"{getattr(latency, field) * 1e3:.3f}" for _, field in _PERCENTILES),
                f"{latency.count:,}",
            )
    console.print(table)


def _notes(figures: SwapFigures, record: dict[str, Any]) -> list[str]:
    notes = [figures.backend_reason] if figures.backend_reason else []
    devices = [drive["device"] for drive in record["hardware"]["drives"] if drive["device"]]
    if len(set(devices)) < len(devices):
        notes.append(
            "some of these directories are on the same drive, so together they are no faster than "
            "one"
        )
    for drive in figures.drives:
        if not drive.direct and drive.direct_reason:
            notes.append(f"{drive.path}: {drive.direct_reason}")
        # If no block size was requested, the size that the backend chose needs no note.
        asked = (figures.block_bytes_asked or drive.block_bytes, figures.depth)
        # A backend that does not report its block size gives 0.
        if drive.block_bytes and (drive.block_bytes, drive.depth) != asked:
            block = format_size(min(drive.block_bytes, figures.block_bytes))
            notes.append(
                f"{drive.path}: limited by device or backend to {block} blocks, depth {drive.depth}"
            )
    shortest_s = min(phase.seconds for phase in figures.phases.values())
    if shortest_s < SHORT_S:
        notes.append(
            f"the shortest phase took {shortest_s * 1e3:.0f} ms, too short to measure a drive: "
            "give a larger --size or --seconds"
        )
    if figures.huge_page_share < 0.9:
        notes.append("I/O is slower without huge pages; see `infinity doctor`")
    return notes


def show_drives(console: Console, figures: SwapFigures) -> None:
    """Show each drive's share if there are several, and the latencies that drives report."""
    if len(figures.drives) > 1:
        table = _table(
            "GB/s of each drive while all work", *(f"{kind}, share" for kind in KINDS)
        )
        for number, directory in enumerate(figures.directories):
            parts = [(phase.drive(number), phase.spread) for phase in figures.phases.values()]
            table.add_row(
                escape(directory),
                *(f"{part.gbps:.2f}  {part.median / total.median:4.0%}" for part, total in parts),
            )
        console.print(table)
    for drive, directory in zip(figures.drives, figures.directories, strict=True):
        latencies = [
            f"{kind} p50 {latency.p50_s * 1e3:.1f} ms, p99 {latency.p99_s * 1e3:.1f} ms"
            for kind, latency in (("read", drive.read_latency), ("write", drive.write_latency))
            if latency.count
        ]
        if latencies:
            say(
                console,
                f"requests of {directory}: {'; '.join(latencies)}; {drive.depth_mean:.0f} in "
                "flight on average",
                markup=False,
            )


def show_sweep(console: Console, sweep: SweepFigures) -> None:
    """Show the mixed bandwidth of every pair of block size and depth, and the chosen pair."""
    depths = sorted({point.depth for point in sweep.points})
    table = _table("Mixed GB/s by block size and depth", *(f"depth {depth}" for depth in depths))
    for block in sorted({point.block_bytes for point in sweep.points}):
        cells = [format_size(block)]
        for depth in depths:
            here = [
                point
                for point in sweep.points
                if (point.block_bytes, point.depth) == (block, depth)
            ]
            text = f"{here[0].rate('mixed') / 1e9:.2f}" if here else ""
            if here and here[0].final:
                text = f"[green]{text}[/green]"
            cells.append(f"[bold]{text} *[/bold]" if here and here[0] is sweep.best else text)
        table.add_row(*cells)
    console.print(table)
    best = sweep.best
    say(
        console,
        f"best: [bold]{format_size(best.block_bytes)} blocks, depth {best.depth}[/bold] "
        "(the least in flight within 3 % of the best of the "
        f"{sum(point.final for point in sweep.points)} measured longer)",
    )


def show_adam(console: Console, figures: AdamFigures) -> None:
    """Show the kernels' rates, from cache and from memory."""
    for where, title in (("cache", "from cache"), ("memory", "from memory")):
        rows = [row for row in figures.rows if row.where == where]
        names = ("state", "ISA", "Gparam/s", "GB/s") + (("of memory",) if where == "memory" else ())
        threads = "one thread" if figures.threads == 1 else f"{figures.threads} threads"
        table = _table(f"AdamW, {title}, {threads} ({rows[0].numel:,} parameters)", *names)
        for row in rows:
            chosen = "[bold]{}[/bold]" if row.isa == figures.isa else "{}"
            cells = [
                row.name,
                row.state,
                row.isa,
                chosen.format(f"{row.gparam_per_s:.2f}"),
                f"{row.gb_per_s:.1f}",
            ]
            table.add_row(*cells, *([f"{row.of_memory:.0%}"] if row.of_memory is not None else []))
        console.print(table)
    say(
        console,
        f"memory: {figures.memory_gb_per_s:.1f} GB/s, read and written by in-place additions in "
        "the same rounds",
        markup=False,
    )
    if not figures.torch:
        say(console, "torch cannot be imported, so its optimizer is not compared", markup=False)


def show_copy(console: Console, figures: CopyFigures) -> None:
    """Show the copies by block size, or say that there is no device."""
    if not figures.device:
        say(console, f"{figures.reason}; copies were not measured", markup=False)
        return
    table = _table(f"Copies, {figures.device}", "memory", "block", "GB/s", "of the best pinned")
    for row in figures.rows:
        table.add_row(
            row.direction,
            row.memory,
            format_size(row.block_bytes),
            f"{row.gbps:.2f}",
            f"{row.of_best:.0%}",
        )
    console.print(table)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("", no_wrap=True)
    _columns(table, *columns)
    return table


def _columns(table: Table, *names: str) -> None:
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)


# -- Pictures --------------------------------------------------------------------------------------


def check_plot(path: Path | None) -> None:
    """Raise ValueError if a picture cannot be drawn to `path`. None is always allowed."""
    if path is None:
        return
    if path.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise ValueError(f"--plot {path}: the file's name must end in .png, .svg or .pdf")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ValueError(
            f"--plot needs matplotlib, which cannot be imported ({error}): {install_line(EXTRA)}"
        ) from error


def draw(record: Mapping[str, Any], path: Path | None) -> None:
    """Draw a record into `path`, completely or not at all. None draws nothing."""
    if path is None:
        return
    # Imported here, since matplotlib is optional. pyplot is avoided: it would look for a display.
    from matplotlib.figure import Figure

    sweep = record.get("sweep")
    figure = Figure(figsize=(12 if sweep else 7, 4.5), layout="constrained")
    axes = figure.subplots(1, 2 if sweep else 1, squeeze=False)[0]
    kind = str(record["schema"]).split("/")[0].rpartition(".")[2]
    {"swap": _swap, "sustained": _sustained, "adam": _adam, "copy": _copy}[kind](axes[0], record)
    if sweep:
        _sweep(figure, axes[1], sweep)
    machine = record["hardware"]
    figure.suptitle(
        f"{machine['cpu']}, Linux {machine['kernel']}, {record['time'][:10]}", fontsize=9
    )
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=150, format=path.suffix[1:].lower())
    write_named(path, drawn.getvalue())


def _swap(axes: Any, record: Mapping[str, Any]) -> None:
    phases = record["phases"]
    for place, phase in enumerate(phases.values()):
        limit = phase["limit"]
        arms = [("infinity", phase, "C0")]
        if limit is not None:
            arms.append((str(record["limit_by"]), limit, "C7"))
        for number, (name, figures, colour) in enumerate(arms):
            at = place + 0.4 * (number - (len(arms) - 1) / 2)
            axes.bar(
                at,
                figures["gbps"],
                0.36,
                color=colour,
                alpha=0.75,
                label=name if place == 0 else None,
            )
            # Draw every round as a dot, since a median hides drift.
            axes.plot([at] * len(figures["rounds"]), figures["rounds"], "k.", markersize=4)
    axes.set_xticks(range(len(phases)), list(phases))
    axes.set_ylabel("GB/s")
    drives = ", ".join(
        f"{drive['path']} ({drive['model'] or drive['device']})"
        for drive in record["hardware"]["drives"]
    )
    axes.set_title(
        f"Swap: {format_size(record['block_bytes'])} blocks, depth {record['depth']}\n{drives}",
        fontsize=9,
    )
    axes.legend(fontsize=8)


def _sustained(axes: Any, record: Mapping[str, Any]) -> None:
    rows = record["rows"]
    at = [(row["at_s"] + row["seconds"] / 2) / 60 for row in rows]
    for kind, colour in (("read", "C0"), ("write", "C1")):
        rates = [row[f"{kind}_bytes_per_s"] / 1e9 for row in rows]
        axes.plot(at, rates, color=colour, linewidth=1, label=f"{kind}, GB/s")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("minutes")
    axes.set_ylabel("GB/s")
    waits = axes.twinx()
    waits.plot(
        at,
        [row["write_latency"]["p99_s"] * 1e3 for row in rows],
        color="C7",
        linewidth=0.8,
        linestyle=":",
        label="write p99, ms",
    )
    warm = [(minute, row["temperature_c"]) for minute, row in zip(at, rows, strict=True)]
    warm = [(minute, each) for minute, each in warm if each is not None]
    if warm:
        waits.plot(*zip(*warm, strict=True), color="C3", linewidth=1, label="hottest drive, °C")
    waits.set_ylim(bottom=0)
    waits.set_ylabel("ms, °C" if warm else "ms")
    drives = ", ".join(
        f"{drive['path']} ({drive['model'] or drive['device']})"
        for drive in record["hardware"]["drives"]
    )
    written = format_size(record["bytes_written"])
    axes.set_title(f"Steps for {record['minutes']:g} min, {written} written\n{drives}", fontsize=9)
    lines = [*axes.get_lines(), *waits.get_lines()]
    axes.legend(lines, [line.get_label() for line in lines], fontsize=8)


def _sweep(figure: Any, axes: Any, sweep: Mapping[str, Any]) -> None:
    points = sweep["points"]
    blocks = sorted({point["block_bytes"] for point in points})
    depths = sorted({point["depth"] for point in points})
    grid = [[float("nan")] * len(depths) for _ in blocks]
    for point in points:
        grid[blocks.index(point["block_bytes"])][depths.index(point["depth"])] = point["mixed_gbps"]
    image = axes.imshow(grid, aspect="auto", origin="lower")
    for row, line in enumerate(grid):
        for column, value in enumerate(line):
            # A pair that was not measured is NaN, which does not equal itself.
            if value == value:
                axes.text(
                    column, row, f"{value:.2f}", ha="center", va="center", color="w", fontsize=8
                )
    best = sweep["best"]
    axes.plot(
        depths.index(best["depth"]),
        blocks.index(best["block_bytes"]),
        "ws",
        markersize=28,
        fillstyle="none",
    )
    axes.set_xticks(range(len(depths)), [str(depth) for depth in depths])
    axes.set_yticks(range(len(blocks)), [format_size(block) for block in blocks])
    axes.set_xlabel("depth")
    axes.set_title("mixed GB/s by block size and depth", fontsize=9)
    figure.colorbar(image, ax=axes)


def _adam(axes: Any, record: Mapping[str, Any]) -> None:
    """Draw a roofline of the rows measured from memory: parameters per second over bytes per
    parameter, and the maximum that the memory's bandwidth allows.
    """
    marks: dict[str, list[tuple[float, float]]] = {}
    formats: dict[str, float] = {}
    for row in record["rows"]:
        if row["where"] != "memory":
            continue
        traffic = formats.setdefault(row["state"], row["gb_per_s"] / row["gparam_per_s"])
        verified = ", verified" if row["name"].startswith("verify") else ""
        label = f"{row['isa']}{verified}" if row["isa"] else row["name"]
        marks.setdefault(label, []).append((traffic, row["gparam_per_s"]))
    colours = {isa: f"C{number}" for number, isa in enumerate(record["isas"])}
    for label, points in marks.items():
        isa, _, verified = label.partition(", ")
        axes.plot(
            *zip(*points, strict=True),
            "o" if isa in colours else "x",
            color=colours.get(isa, "k"),
            fillstyle="none" if verified else "full",
            label=label,
        )
    ends = [min(formats.values()) / 1.2, max(formats.values()) * 1.1]
    limit = record["memory_gb_per_s"]
    axes.plot(ends, [limit / end for end in ends], color="C7", label=f"memory, {limit:.0f} GB/s")
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_ylim(top=1.6 * limit / ends[0])
    # Ticks have numbers and points have names: names at the ticks would overlap, since two formats
    # move 26 and 28 bytes.
    axes.set_xticks([round(traffic) for traffic in formats.values()])
    for name, traffic in formats.items():
        axes.annotate(
            name, (traffic, limit / traffic), (0, 6), textcoords="offset points", rotation=45
        )
    axes.set_xlabel("bytes read and written per parameter")
    axes.set_ylabel("Gparam/s")
    axes.set_title(f"AdamW on the CPU, from memory; threads: {record['threads']}", fontsize=9)
    axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))


def _copy(axes: Any, record: Mapping[str, Any]) -> None:
    lines: dict[str, list[tuple[int, float]]] = {}
    for row in record["rows"]:
        lines.setdefault(f"{row['memory']}, {row['direction']}", []).append(
            (row["block_bytes"], row["gbps"])
        )
    for name, points in lines.items():
        axes.plot([block for block, _ in points], [rate for _, rate in points], "o-", label=name)
    axes.set_xscale("log", base=2)
    axes.set_xlabel("bytes per copy")
    axes.set_ylabel("GB/s")
    axes.set_title(f"copies: {record['device'] or record['reason']}", fontsize=9)
    if lines:
        axes.legend(fontsize=7)


# -- Progress --------------------------------------------------------------------------------------


_REFRESH_S = 0.25


def progress_bar(console: Console) -> AbstractContextManager[Callable[[str, float], None] | None]:
    """Return the context of a progress bar. Its value is the function that phases call with their
    name and completed share; None if `console` is not a terminal.
    """
    return _Bar(console) if console.is_terminal else nullcontext()


class _Bar:
    def __init__(self, console: Console) -> None:
        columns = (TextColumn("{task.description:<20}"), BarColumn(), TimeElapsedColumn())
        # No refresh thread: its CPU time would count as the benchmark's.
        self._progress = Progress(*columns, console=console, transient=True, auto_refresh=False)
        self._task = self._progress.add_task("starting", total=1.0)
        self._drawn_s = 0.0
        self._phase = ""

    def __enter__(self) -> Callable[[str, float], None]:
        self._progress.start()
        return self._say

    def _say(self, phase: str, share: float) -> None:
        now_s = time.monotonic()
        # A new phase is drawn at once.
        if phase == self._phase and now_s - self._drawn_s < _REFRESH_S:
            return
        self._phase, self._drawn_s = phase, now_s
        self._progress.update(self._task, description=phase, completed=share, refresh=True)

    def __exit__(self, *exc: object) -> None:
        self._progress.stop()
