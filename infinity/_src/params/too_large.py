"""Linears too large to be gathered whole: what set-up says of them, and in how many tiles they would fit.

A parameter that is too large for one unit cannot be split by the module tree; `inf.tile_linears` splits it.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence

import psutil
import torch
from torch import nn

from infinity._src.kernels.tiling.tiled_module import Grid, whole_name
from infinity._src.params.discover import ParamEntry, UnitSpec
from infinity._src.sizes import format_size
from infinity.aio._memory_limits import cgroup_limit_bytes

log = logging.getLogger("infinity")

GATHERED_AT_ONCE = 4
"""Tiles that there must be room for: the one in use, two ahead of it, and the fresh gradient of one."""


def device_memory_bytes(device: torch.device) -> int:
    """All memory that the device has; of the CPU, what the machine and this process's cgroups allow."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    total = int(psutil.virtual_memory().total)
    return min(total, cgroup_limit_bytes() or total)


def check_gatherable(
    model: nn.Module, specs: Sequence[UnitSpec], unit_bytes_max: int, device: torch.device, device_bytes: int
) -> None:
    """Refuse a unit that the device can never hold, and name linears that are larger than `unit_bytes_max`.

    device_bytes: all memory of the device that computes. A linear larger than `unit_bytes_max` is logged: it works, and takes
    that much memory. Raises: ValueError naming what is largest, its size and the fix.
    """
    for spec in specs:
        if sum(entry.size_bytes for entry in spec.entries) > device_bytes:
            raise ValueError(_refusal(model, spec, device_bytes, f"the device ({device.type})"))
    large = [(entry, name) for spec in specs for entry in spec.entries if (name := _linear_name(model, entry)) is not None]
    large = [(entry, name) for entry, name in large if entry.size_bytes > unit_bytes_max]
    if large:
        names = [name for _, name in large]
        log.warning(
            "%s: larger than unit_bytes_max (%s; the largest has %s), and gathered whole; inf.tile_linears(model, tiles=%d, "
            "names=%r) before inf.offload gathers a tile at a time",
            ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else ""),
            format_size(unit_bytes_max),
            format_size(max(entry.size_bytes for entry, _ in large)),
            max(tiles_needed(entry.parameter.shape, entry.size_bytes, unit_bytes_max) for entry, _ in large),
            names,
        )


def tiles_needed(shape: Sequence[int], size_bytes: int, tile_bytes_max: int) -> int:
    """The smallest number of tiles along the output features, of a weight [out, in], that makes none larger than that.

    size_bytes: of the weight. As many as it has rows where even one row is larger.
    """
    rows, columns = shape
    tiles = max(1, -(-size_bytes // max(tile_bytes_max, 1)))
    while tiles < rows:
        ends = Grid.of(rows, columns, tiles).row_ends
        largest = max(last - first for first, last in itertools.pairwise(ends))
        if largest * (size_bytes // rows) <= tile_bytes_max:
            return tiles
        tiles += 1
    return rows


def _refusal(model: nn.Module, spec: UnitSpec, device_bytes: int, device: str) -> str:
    entry = max(spec.entries, key=lambda each: each.size_bytes)
    room_bytes = device_bytes // GATHERED_AT_ONCE
    has = f"{device} has {format_size(device_bytes)}"
    if entry.size_bytes <= room_bytes:
        return (
            f"the unit {spec.name} takes {format_size(sum(each.size_bytes for each in spec.entries))} gathered, and {has}: set "
            f"unit_bytes_max='{format_size(room_bytes)}' or less, or name smaller modules in units="
        )
    name = _linear_name(model, entry)
    largest = f"{entry.names[0]} takes {format_size(entry.size_bytes)} gathered whole, and {has}"
    if whole_name(entry.names[0]) is not None:
        times = -(-entry.size_bytes // max(room_bytes, 1))
        return f"{largest}: it is a tile already; give inf.tile_linears {times} times as many tiles, or more"
    if name is None:
        return f"{largest}: only a torch.nn.Linear (and an embedding tied to one) can be gathered in tiles; make it smaller"
    tiles = tiles_needed(entry.parameter.shape, entry.size_bytes, room_bytes)
    return f"{largest}: inf.tile_linears(model, tiles={tiles}, names=[{name!r}]) before inf.offload gathers a tile at a time"


def _linear_name(model: nn.Module, entry: ParamEntry) -> str | None:
    """The qualified name of the torch.nn.Linear whose weight it is, if one is."""
    for name in entry.names:
        module, _, attr = name.rpartition(".")
        if attr == "weight" and type(model.get_submodule(module)) is nn.Linear:
            return module
    return None
