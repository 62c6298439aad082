"""Mixture of experts in a plan: stacks of experts cut into tiles, and the tiles that tokens touch.

A stack [experts, ...] is gathered whole, however few of its experts compute. `inf.tile_experts`
cuts it into tiles, each a unit of its own, which is not gathered for a micro-batch whose tokens
chose none of its experts. Tokens are taken to choose all experts alike: the most that are touched.
"""

from __future__ import annotations

import dataclasses
import math

import torch

from infinity._src.plan.workload import FlatShape, Job, JobShape, ModelShape, UnitShape


def shape_in(job: Job, shape: ModelShape) -> JobShape:
    """Return the model as the job has it; a shape that is cut already, as it is."""
    return JobShape(cut_experts(shape, job.expert_tile))


def cut_experts(shape: ModelShape, tile: int) -> ModelShape:
    """Return the model with its stacks in tiles of so many experts. 0: as it is.

    Further tiles stand behind all units, so that each other unit keeps its place.
    """
    if not tile or not shape.has_stacks:
        return shape
    units, more = [], []
    for index, unit in enumerate(shape.units):
        first, *others = _cut_unit(unit, index, tile)
        units.append(first)
        more += others
    return dataclasses.replace(shape, units=(*units, *more))


def _cut_unit(unit: UnitShape, index: int, tile: int) -> list[UnitShape]:
    """Return what stays of a unit without its stacks, if anything does, and the tiles."""
    if not unit.stacks:
        return [unit]
    numels = [list(flat.numels) for flat in unit.flats]
    for stack in unit.stacks:
        numels[stack.flat].remove(stack.numel)
    rest = tuple(
        dataclasses.replace(flat, numels=tuple(left))
        for flat, left in zip(unit.flats, numels, strict=True)
    )
    found, around = [], unit.around
    if any(flat.numels for flat in rest):
        # It stays in use while its tiles come and go.
        around = (*around, index)
        # Empty flats keep their place, by which linears name them.
        found.append(dataclasses.replace(unit, flats=rest, stacks=()))
    experts = max(stack.experts for stack in unit.stacks)
    for start in range(0, experts, tile):
        count = min(tile, experts - start)
        groups: dict[tuple[torch.dtype, bool], list[int]] = {}
        for stack in unit.stacks:
            flat = unit.flats[stack.flat]
            part = groups.setdefault((flat.dtype, flat.trainable), [])
            part.append(count * stack.numel // stack.experts)
        flats = tuple(FlatShape(tuple(part), *key) for key, part in groups.items())
        found.append(
            dataclasses.replace(
                unit,
                name=f"{unit.name}[{start}]",
                flats=flats,
                linears=(),
                stacks=(),
                around=around,
                tiles=True,
            )
        )
    return found


def touched_share(experts: int, chosen: int, tile: int, tokens: int) -> float:
    """Return the share of tiles with an expert that a token chose: of so many experts in all, each
    token chooses `chosen`.
    """
    left = experts - tile
    if left < chosen:
        return 1.0
    # One token misses a tile by choosing all of its experts among the others.
    missed = math.comb(left, chosen) / math.comb(experts, chosen)
    return 1.0 - missed**tokens


def gathered_share(shape: JobShape, tile: int, tokens: int) -> float:
    """Return the share of all parameters that a pass of so many tokens gathers."""
    tiled = sum(unit.gathered_bytes() for unit in shape.units if unit.tiles)
    if not tiled:
        return 1.0
    touched = touched_share(shape.experts, shape.chosen, min(tile, shape.experts), tokens)
    return 1.0 - (1.0 - touched) * tiled / shape.gathered_bytes()
