"""What one of several ranks holds and exchanges, as tables and for JSON: of `infinity plan`, and of `bench/bytes_per_rank.py`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from rich.table import Table

from infinity._src.perf.plan.exchanges import Exchanges
from infinity._src.perf.plan.placed import Tiers
from infinity._src.perf.plan.predict import Prediction
from infinity._src.perf.plan.ranks import RankBytes
from infinity._src.sizes import format_size

TIERS = ("device", "cpu", "nvme")


def rank_table(ranks: Sequence[RankBytes], *, chosen: int) -> Table:
    """Bytes of one rank: a row for each state, a column for each stage with its tiers. chosen: the stage that is planned."""
    table = Table(title="What each rank holds: device + CPU memory + NVMe", title_justify="left", title_style="bold")
    table.add_column("state", overflow="fold")
    for each in ranks:
        table.add_column(f"stage {each.stage}{' (planned)' if each.stage == chosen else ''}", justify="right", overflow="fold")
    for name in dict.fromkeys(name for each in ranks for name in each.states):
        table.add_row(name, *(describe_tiers(each.states.get(name, Tiers())) for each in ranks))
    table.add_row("together", *(describe_tiers(each.total) for each in ranks), style="bold")
    return table


def describe_tiers(size: Tiers) -> str:
    """Bytes on each tier that has any: "1.5 GiB cpu + 8 GiB nvme"."""
    told = [f"{format_size(getattr(size, tier))} {tier}" for tier in TIERS if getattr(size, tier)]
    return " + ".join(told) or "-"


def exchange_table(found: Prediction) -> Table:
    """What each rank has from the others in a step; the last column counts as ZeRO++ does (`Exchanges.volume`)."""
    exchanged, machine = found.exchanged, found.machine
    title = "What each rank receives in a step"
    table = Table(title=title, title_justify="left", title_style="bold")
    several = machine.nodes > 1
    across = ["from other nodes", "its whole node from others"] if several else []
    plain = format_size(exchanged.plain_bytes)
    for column in ("", "times", "inside its node", *across, f"volume {'between nodes' if several else ''}, M = {plain}"):
        table.add_column(column.replace(" ,", ","), justify="right" if column else "left", overflow="fold")
    parts = [(each.name, str(each.count), (each,)) for each in exchanged.each]
    for name, times, found_ in [*parts, ("together", "", exchanged.each)]:
        part = dataclasses.replace(exchanged, each=found_)
        sizes = [part.inside, *([part.across, machine.ranks * part.across] if several else [])]
        cells = [format_size(size) if size else "-" for size in sizes]
        table.add_row(name, times, *cells, f"{part.volume:.3g} M", style="" if times else "bold")
    return table


def rank_record(ranks: Sequence[RankBytes]) -> dict[str, Any]:
    """For JSON: bytes by stage, state and tier."""
    return {
        str(each.stage): {name: dataclasses.asdict(size) for name, size in each.states.items()} | {
            "together": dataclasses.asdict(each.total)
        }
        for each in ranks
    }


def exchange_record(found: Exchanges) -> dict[str, Any]:
    """For JSON: what one rank receives in a step."""
    return {
        "plain_bytes": found.plain_bytes,
        "inside_bytes": found.inside,
        "across_bytes": found.across,
        "volume": found.volume,
        "each": [dataclasses.asdict(each) for each in found.each],
    }
