"""Formats the commands' results.jsonl as Markdown tables: commands and their steps, tests, the
probe, copies, operations, training, the largest linear.

    python bench/gpu/table.py FILE              # the tables of one results.jsonl, or of its folder
    python bench/gpu/table.py A B C --out DIR   # merges several: DIR gets results.jsonl, table.md
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

GIB = float(1 << 30)
FILE, PAGE = "results.jsonl", "table.md"
Record = dict[str, Any]
ENDS = {0: "ok", 3: "NOT RUN", 124: "out of time", 137: "out of time"}


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A Markdown table under a heading; nothing without rows."""
    if not rows:
        return []
    lines = [f"## {title}", "", "| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    for row in rows:
        cells = [cell.replace("|", "\\|").replace("\n", " ") for cell in row]
        lines.append("| " + " | ".join(cells) + " |")
    return [*lines, ""]


def file_of(results: Path) -> Path:
    """The file of JSON lines that a folder of results has, or that was named itself."""
    return results / FILE if results.is_dir() else results


def lines_of(places: Sequence[Path]) -> list[str]:
    """Return the lines of several results, in their order: later records replace earlier ones."""
    return [line for place in places for line in file_of(place).read_text().splitlines()]


def read(lines: Sequence[str]) -> list[Record]:
    """The records of JSON lines; an incomplete last line of a killed script is omitted."""
    found = []
    for line in lines:
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(record, dict):
            found.append(record)
    return found


def newest(records: Sequence[Record], key: Callable[[Record], Any]) -> list[Record]:
    """Return the last of the records with each key, at the place of the first."""
    return list({key(record): record for record in records}.values())


def commands(records: Sequence[Record]) -> list[str]:
    """Return the ends of the commands; one that has no end was cut off."""
    mine = newest(
        [one for one in records if one.get("script") == "command"], lambda one: one["name"]
    )
    return table(
        "Commands",
        ("command", "device", "begun", "end"),
        [
            (
                one["name"],
                one["device"],
                one["run"],
                ENDS.get(one["status"], "FAILED") if one["state"] == "ended" else "CUT OFF",
            )
            for one in mine
        ],
    )


def stages(records: Sequence[Record]) -> list[str]:
    """Return the table of steps: name, time, end."""
    mine = newest([one for one in records if one.get("script") == "stage"], lambda one: one["name"])
    return table(
        "Steps",
        ("step", "end", "s", "found"),
        [
            (
                one["name"],
                ENDS.get(one["status"], f"FAILED ({one['status']})"),
                str(one["seconds"]),
                (one.get("why") or "; ".join(one.get("found", ())))[:300],
            )
            for one in mine
        ],
    )


def tests(records: Sequence[Record]) -> list[str]:
    """Counts by suite, and what failed or has no end, by name."""
    mine = newest(
        [one for one in records if one.get("script") == "tests"],
        lambda one: (one["suite"], one["test"]),
    )
    rows, failed = [], []
    for suite in dict.fromkeys(one["suite"] for one in mine):
        ends = [one["outcome"] for one in mine if one["suite"] == suite]
        counts = [str(ends.count(end)) for end in ("passed", "failed", "skipped", "began")]
        rows.append((suite, *counts))
    for one in mine:
        if one["outcome"] == "failed":
            failed.append((f"`{one['test']}`", one["suite"], one.get("why", "")[:200]))
        elif one["outcome"] == "began":
            failed.append((f"`{one['test']}`", one["suite"], "it began, and has no end"))
    columns = ("suite", "passed", "failed", "skipped", "did not end")
    return table("Tests", columns, rows) + table("Failed", ("test", "suite", "why"), failed)


def probes(records: Sequence[Record]) -> list[str]:
    """Return what the probe found."""
    mine = newest([one for one in records if one.get("script") == "probe"], lambda one: one["part"])
    rows, copied = [], []
    for one in mine:
        rows += [
            (one["part"], kind.replace("_", " "), str(one[kind])[:200])
            for kind in ("failed", "not_run")
            if kind in one
        ]
        for name, value in one.get("found", {}).items():
            if name != "rows":
                text = f"{value:.4g}" if isinstance(value, float) else str(value)
                rows.append((one["part"], name, text))
        copied += one.get("found", {}).get("rows", [])
    columns = ("way", "piece_kib", "in_flight", "gbps", "us_per_copy", "us_per_wait")
    return table("Probe", ("part", "", "found"), rows) + table(
        "The driver's copies",
        ("way", "KiB", "in flight", "GB/s", "µs each", "µs of a wait"),
        [tuple(str(row[name]) for name in columns) for row in copied],
    )


def profiles(records: Sequence[Record]) -> list[str]:
    """Return what copies did in the profile."""
    mine = [one for one in records if one.get("script") == "profile_steps"][-1:]
    names = ("copies", "mean_kib", "busy_share", "gbps_while_busy", "gap_us_median")
    rows = [
        (way, *(str(figures[name]) for name in names))
        for one in mine
        for way, figures in one["ways"].items()
    ]
    columns = ("", "copies", "mean KiB", "busy", "GB/s while busy", "median gap, µs")
    return table("Copies of two steps, by torch's profiler", columns, rows)


def copies(records: Sequence[Record]) -> list[str]:
    """The engine beside plain copies."""
    mine = newest([one for one in records if one.get("script") == "copies"], lambda one: one["way"])
    return table(
        "Copies: the engine beside plain pinned copies (aim 0.95)",
        ("", "engine GB/s", "plain GB/s", "ratio", "least–most"),
        [
            (
                one["way"],
                f"{one['engine_gbps']:.1f}",
                f"{one['plain_gbps']:.1f}",
                f"{one['ratio']:.3f}",
                f"{one['ratio_least']:.3f}–{one['ratio_most']:.3f}",
            )
            for one in mine
        ],
    )


def operations(records: Sequence[Record]) -> list[str]:
    """Triton's kernels beside torch's best, and what choice.MEASURED is to say of them."""
    rows = []
    found = [one for one in records if one.get("script") == "bench_ops"]
    mine = newest(
        [one for one in found if "what" in one], lambda one: (one["op"], one["what"])
    )
    for one in mine:
        if "failed" in one:
            rows.append((one["op"], one["what"], "failed", one["failed"][:80], ""))
            continue
        times = ", ".join(f"{arm} {value:.3f}" for arm, value in one["ms"].items())
        unit = "TFLOP/s" if one["tflop_per_s"] else "GB/s"
        speed = (one["tflop_per_s"] or one["gb_per_s"])["triton"]
        rows.append((one["op"], one["what"], times, f"{speed:.0f} {unit}", f"{one['ratio']:.2f}"))
    columns = ("operation", "case", "ms", "Triton's speed", "torch's best ÷ Triton")
    entries = measured(found)
    block = ["For `choice.MEASURED` (the least ratio of an operation's cases):", ""]
    block += ["```python", *entries, "```", ""]
    return table("Operations", columns, rows) + (block if entries else [])


def measured(found: Sequence[Record]) -> list[str]:
    """Entries of choice.MEASURED: the least ratio of an operation's cases in its last run on a kind
    of device, since one implementation is chosen for all sizes. A run gives none if it was cut off
    or if a case failed."""
    runs: dict[tuple[str, tuple[int, ...]], dict[str, list[Record]]] = {}
    for one in found:
        if "capability" in one["on"]:
            kind = one["op"], tuple(one["on"]["capability"])
            runs.setdefault(kind, {}).setdefault(one["run"], []).append(one)
    entries = []
    for (op, capability), by_run in runs.items():
        mine = by_run[max(by_run)]
        cases = [one for one in mine if "what" in one]
        ended = any(one.get("state") == "ended" for one in mine)
        if ended and cases and all("ratio" in one for one in cases):
            least = min(one["ratio"] for one in cases)
            entries.append(f'("{op}", {capability}): {least:.2f},')
    return entries


def training(records: Sequence[Record]) -> list[str]:
    """The best round of each arm at each number of tokens, and what did not run."""
    mine = [one for one in records if one.get("script") == "train"]
    best: dict[tuple[Any, ...], Record] = {}
    for one in mine:
        key = (one["size"], one["arm"], one.get("tokens"))
        if "tokens_per_s" in one and one["tokens_per_s"] > best.get(key, {}).get(
            "tokens_per_s", 0.0
        ):
            best[key] = one
    rows = []
    for one in best.values():
        peak = f"{one['peak_bytes'] / GIB:.2f}"
        planned = f"{one['planned_bytes'] / GIB:.2f}" if "planned_bytes" in one else ""
        ratios = beside_fsdp2(mine, one)
        beside = f"{statistics.median(ratios):.2f}" if ratios else ""
        eta = "".join(
            f"{one[name]:.2f} " if one.get(name) is not None else "– "
            for name in ("eta_floor", "eta_schedule")
        )
        rows.append(
            (
                one["size"],
                f"{one['parameters'] / 1e9:.2f}",
                one["arm"],
                str(one["tokens"]),
                f"{one['steady_s']:.2f}",
                f"{one['tokens_per_s']:.0f}",
                f"{100 * one['mfu']:.1f} %",
                f"{one['eta_bus']:.2f}",
                eta.strip(),
                peak,
                planned,
                f"{one['peak_rss_bytes'] / GIB:.1f}",
                beside,
            )
        )
    columns = (
        "size",
        "1e9",
        "arm",
        "tokens",
        "s/step",
        "tokens/s",
        "MFU",
        "η bus",
        "η floor, schedule",
        "GPU peak GiB",
        "planned",
        "RSS GiB",
        "× FSDP2",
    )
    failed = [
        (
            one["size"],
            f"{one['parameters'] / 1e9:.2f}",
            one["arm"],
            str(one.get("tokens", "")),
            one["failed"].strip()[-200:],
        )
        for one in mine
        if "failed" in one
    ]
    return table("Training", columns, rows) + table(
        "Not measured", ("size", "1e9", "arm", "tokens", "why"), failed
    )


def beside_fsdp2(mine: Sequence[Record], one: Record) -> list[float]:
    """Return tokens/s divided by FSDP2's, round by round: alternating arms share the drift."""
    rates: dict[str, dict[int, float]] = {}
    for other in mine:
        if "tokens_per_s" in other and (other["size"], other["tokens"]) == (
            one["size"],
            one["tokens"],
        ):
            rates.setdefault(other["arm"], {})[other["round"]] = other["tokens_per_s"]
    theirs = rates.get("fsdp2", {}) if one["arm"] != "fsdp2" else {}
    return [rate / theirs[number] for number, rate in rates[one["arm"]].items() if number in theirs]


def linears(records: Sequence[Record]) -> list[str]:
    """For each number of tiles the largest that trained, and what ended the search."""
    mine = [one for one in records if one.get("script") == "largest_linear"]
    rows = []
    for tiles in dict.fromkeys(one["tiles"] for one in mine):
        good = [one for one in mine if one["tiles"] == tiles and not one["failed"]]
        ended = next((one["failed"] for one in mine if one["tiles"] == tiles and one["failed"]), "")
        if good:
            one = max(good, key=lambda found: found["width"])
            rows.append(
                (
                    str(tiles),
                    f"{one['width']} → {4 * one['width']}",
                    f"{one['parameters'] / 1e6:.0f} M",
                    f"{one['peak_bytes'] / 2**20:.0f}",
                    f"{one['gathered_bytes'] / 2**20:.0f}",
                    f"{one['step_s']:.2f}",
                    ended[:100],
                )
            )
    limit = next((one["limit_gib"] for one in mine if "limit_gib" in one), None)
    title = "The largest linear that trains" + (
        f" within {limit:g} GiB of GPU memory" if limit else ""
    )
    return table(
        title,
        ("tiles", "largest", "parameters", "peak MiB", "gathered MiB", "s/step", "ended by"),
        rows,
    )


def heading(records: Sequence[Record]) -> list[str]:
    """Return the heading: device, versions, and measured rates."""
    about = next((one for one in records if "on" in one), None)
    if about is None:
        return ["# On a GPU", ""]
    on, machine = about["on"], about["machine"]
    names = list(dict.fromkeys(device_of(one["on"]) for one in records if "on" in one))
    cores, memory = machine["cores"], machine["memory_bytes"] / GIB
    rates = next((one for one in records if "peak_flops" in one), None)
    lines = [
        f"# On {', '.join(names)}",
        "",
        (
            f"torch {on['torch']}, {cores} cores, {memory:.0f} GiB of RAM; {about['run']}, "
            f"{about['commit'][:12]}"
        ),
    ]
    if len(names) > 1:
        lines.append("Figures are of different devices: compare those of one run only.")
    if rates is not None:
        bus = rates["bus"]
        lines.append(
            f"square bf16 product {rates['peak_flops'] / 1e12:.0f} TFLOP/s; plain pinned copies "
            f"{bus['to'] / 1e9:.1f} GB/s to the device, {bus['from'] / 1e9:.1f} from it, "
            f"{bus['both'] / 1e9:.1f} both ways"
        )
    return [*lines, ""]


def device_of(on: Record) -> str:
    """Return the name of the device that a record was measured on."""
    return str(on.get("name", "the CPU: these figures show only that everything runs"))


def make(lines: Sequence[str]) -> str:
    """Return the whole page for the lines of a results file."""
    records = read(lines)
    parts = (
        heading(records),
        commands(records),
        stages(records),
        tests(records),
        probes(records),
        copies(records),
        profiles(records),
        operations(records),
        training(records),
        linears(records),
    )
    return "\n".join(line for part in parts for line in part)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path, nargs="+", help="files of JSON lines, or folders")
    parser.add_argument("--out", type=Path, help="folder to which the merged results are written")
    args = parser.parse_args()
    missing = [place for place in args.results if not file_of(place).is_file()]
    if missing:
        sys.stderr.write(f"no results in {', '.join(map(str, missing))}\n")
        return 1
    if args.out is None:
        sys.stdout.write(make(lines_of(args.results)))
        return 0
    args.out.mkdir(parents=True, exist_ok=True)
    lines = lines_of(args.results)
    (args.out / FILE).write_text("\n".join([*lines, ""]))
    (args.out / PAGE).write_text(make(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
