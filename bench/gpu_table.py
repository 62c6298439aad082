"""Makes one Markdown table of what `bench/gpu.sh` left: stages, tests, copies, operations,
training, the largest linear."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

GIB = float(1 << 30)
Record = dict[str, Any]


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A Markdown table under a heading; nothing without rows."""
    if not rows:
        return []
    lines = [f"## {title}", "", "| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    for row in rows:
        cells = [cell.replace("|", "\\|").replace("\n", " ") for cell in row]
        lines.append("| " + " | ".join(cells) + " |")
    return [*lines, ""]


def read(file: Path) -> list[Record]:
    """The records of a file of JSON lines, none where there is no file; a line that a killed script
    broke off is left out."""
    found = []
    for line in file.read_text().splitlines() if file.is_file() else ():
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


def stages(records: Sequence[Record]) -> list[str]:
    """Return the table of stages: name, time, end."""
    mine = newest([one for one in records if one.get("script") == "stage"], lambda one: one["name"])
    ends = {0: "ok", 124: "out of time", 137: "out of time"}
    return table(
        "Stages",
        ("stage", "end", "s"),
        [
            (one["name"], ends.get(one["status"], f"FAILED ({one['status']})"), str(one["seconds"]))
            for one in mine
        ],
    )


def tests(files: Sequence[Path]) -> list[str]:
    """Counts, and what failed, by name."""
    rows, failed = [], []
    for file in files:
        if not file.is_file() or not file.stat().st_size:
            continue
        cases = list(ElementTree.parse(file).iter("testcase"))
        kinds = {
            kind: [case for case in cases if case.find(kind) is not None]
            for kind in ("failure", "error", "skipped")
        }
        bad = kinds["failure"] + kinds["error"]
        passed = len(cases) - len(bad) - len(kinds["skipped"])
        rows.append((file.stem, str(passed), str(len(bad)), str(len(kinds["skipped"]))))
        for case in bad:
            found = next(part for part in case if part.tag in ("failure", "error"))
            failed.append((f"`{case.get('name')}`", (found.get("message") or "").strip()[:160]))
    return table("Tests", ("suite", "passed", "failed", "skipped"), rows) + table(
        "Failed", ("test", "why"), failed
    )


def copies(records: Sequence[Record]) -> list[str]:
    """The engine beside plain copies."""
    mine = newest(
        [one for one in records if one.get("script") == "gpu_copy"], lambda one: one["way"]
    )
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
    """Triton's kernels beside torch's best."""
    rows = []
    for record in records:
        for one in record.get("ops", ()):
            if "failed" in one:
                rows.append((one["op"], one["what"], "failed", one["failed"][:80], ""))
                continue
            times = ", ".join(f"{arm} {value:.3f}" for arm, value in one["ms"].items())
            speed = one.get("tflop_per_s") or one["gb_per_s"]
            unit = "TFLOP/s" if one.get("tflop_per_s") else "GB/s"
            rows.append(
                (
                    one["op"],
                    one["what"],
                    times,
                    f"{speed['triton']:.0f} {unit}",
                    f"{one['ratio']:.2f}",
                )
            )
    return table(
        "Operations", ("operation", "case", "ms", "Triton's speed", "torch's best ÷ Triton"), rows
    )


def training(records: Sequence[Record]) -> list[str]:
    """The best round of each arm at each number of tokens, and what did not run."""
    mine = [one for one in records if one.get("script") == "gpu_train"]
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
    """Tokens/s over FSDP2's, round by round: what runs in turns shares what drifts."""
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
    mine = [one for one in records if one.get("script") == "gpu_largest_linear"]
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
    """On what, from what."""
    about = next((one for one in records if "on" in one), None)
    if about is None:
        return ["# On a GPU", ""]
    on, machine = about["on"], about["machine"]
    name = on.get("name", "the CPU: these figures show only that everything runs")
    cores, memory = machine["cores"], machine["memory_bytes"] / GIB
    rates = next((one for one in records if "peak_flops" in one), None)
    lines = [
        f"# On {name}",
        "",
        (
            f"torch {on['torch']}, {cores} cores, {memory:.0f} GiB of RAM; {about['run']}, "
            f"{about['commit'][:12]}"
        ),
    ]
    if rates is not None:
        bus = rates["bus"]
        lines.append(
            f"square bf16 product {rates['peak_flops'] / 1e12:.0f} TFLOP/s; plain pinned copies "
            f"{bus['to'] / 1e9:.1f} GB/s to the device, {bus['from'] / 1e9:.1f} from it, "
            f"{bus['both'] / 1e9:.1f} both ways"
        )
    return [*lines, ""]


def make(results: Path, junit: Sequence[Path]) -> str:
    """The whole page."""
    records = read(results)
    parts = (
        heading(records),
        stages(records),
        tests(junit),
        copies(records),
        operations(records),
        training(records),
        linears(records),
    )
    return "\n".join(line for part in parts for line in part)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path, help="file of JSON lines")
    parser.add_argument("--junit", type=Path, nargs="*", default=[], help="pytest's files")
    args = parser.parse_args()
    sys.stdout.write(make(args.results, args.junit))
    return 0


if __name__ == "__main__":
    sys.exit(main())
