"""A picture of a record: bars beside their limit, a sweep as a map, kernels as bars, copies as lines. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from infinity._src.sizes import format_size


def check_plot(path: Path | None) -> None:
    """Raises ValueError when a picture is wanted and cannot be drawn here."""
    if path is None:
        return
    if path.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise ValueError(f"--plot {path}: the file's name must end in .png, .svg or .pdf")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ValueError(
            f"--plot needs matplotlib, which cannot be imported ({error}): pip install 'infinity-offload[plot]'"
        ) from error


def draw(record: Mapping[str, Any], path: Path | None) -> None:
    """Draw a record of `infinity._src.bench.record` into `path`; None draws nothing."""
    if path is None:
        return
    from matplotlib.figure import Figure

    sweep = record.get("sweep")
    figure = Figure(figsize=(12 if sweep else 7, 4.5), layout="constrained")
    axes = figure.subplots(1, 2 if sweep else 1, squeeze=False)[0]
    kind = str(record["schema"]).split("/")[0].rpartition(".")[2]
    {"swap": _swap, "adam": _adam, "copy": _copy}[kind](axes[0], record)
    if sweep:
        _sweep(figure, axes[1], sweep)
    machine = record["hardware"]
    figure.suptitle(f"{machine['cpu']}, Linux {machine['kernel']}, {record['time'][:10]}", fontsize=9)
    figure.savefig(path, dpi=150)


def _swap(axes: Any, record: Mapping[str, Any]) -> None:
    phases = record["phases"]
    for place, phase in enumerate(phases.values()):
        limit = phase["limit"]
        arms = [("infinity", phase, "C0")]
        if limit is not None:
            arms.append((str(record["limit_by"]), limit, "C7"))
        for number, (name, figures, colour) in enumerate(arms):
            at = place + 0.4 * (number - (len(arms) - 1) / 2)
            axes.bar(at, figures["gbps"], 0.36, color=colour, alpha=0.75, label=name if place == 0 else None)
            axes.plot([at] * len(figures["rounds"]), figures["rounds"], "k.", markersize=4)
    axes.set_xticks(range(len(phases)), list(phases))
    axes.set_ylabel("GB/s")
    drives = ", ".join(f"{drive['path']} ({drive['model'] or drive['device']})" for drive in record["hardware"]["drives"])
    axes.set_title(f"Swap: {format_size(record['block_bytes'])} blocks, depth {record['depth']}\n{drives}", fontsize=9)
    axes.legend(fontsize=8)


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
            if value == value:
                axes.text(column, row, f"{value:.2f}", ha="center", va="center", color="w", fontsize=8)
    best = sweep["best"]
    axes.plot(depths.index(best["depth"]), blocks.index(best["block_bytes"]), "ws", markersize=28, fillstyle="none")
    axes.set_xticks(range(len(depths)), [str(depth) for depth in depths])
    axes.set_yticks(range(len(blocks)), [format_size(block) for block in blocks])
    axes.set_xlabel("depth")
    axes.set_title("mixed GB/s by block size and depth", fontsize=9)
    figure.colorbar(image, ax=axes)


def _adam(axes: Any, record: Mapping[str, Any]) -> None:
    rows = record["rows"][::-1]
    names = [" ".join(part for part in (row["name"], row["state"], row["isa"], row["where"]) if part) for row in rows]
    axes.barh(range(len(rows)), [row["gparam_per_s"] for row in rows], color="C0", alpha=0.75)
    axes.set_yticks(range(len(rows)), names, fontsize=7)
    axes.set_xlabel("Gparam/s")
    axes.set_title(f"AdamW on the CPU, threads: {record['threads']}", fontsize=9)


def _copy(axes: Any, record: Mapping[str, Any]) -> None:
    lines: dict[str, list[tuple[int, float]]] = {}
    for row in record["rows"]:
        lines.setdefault(f"{row['memory']}, {row['direction']}", []).append((row["block_bytes"], row["gbps"]))
    for name, points in lines.items():
        axes.plot([block for block, _ in points], [rate for _, rate in points], "o-", label=name)
    axes.set_xscale("log", base=2)
    axes.set_xlabel("bytes per copy")
    axes.set_ylabel("GB/s")
    axes.set_title(f"copies: {record['device'] or record['reason']}", fontsize=9)
    if lines:
        axes.legend(fontsize=7)
