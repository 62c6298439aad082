"""Search for a drive's block size and depth: measure all pairs briefly, then the best few and the
default in turn.

Mixed bandwidth decides, since a step reads and writes at the same time (14 bytes read and 12
written per parameter). Of all pairs within `CLOSE` of the best, the pair with the fewest bytes in
flight is chosen, since bytes in flight are pinned memory.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any

from infinity._src.base.sizes import KIB, MIB
from infinity._src.measure.streams import CHUNK_BYTES, Streams
from infinity._src.measure.swap import KINDS, Bench, Progress, SwapTask

BLOCKS = (256 * KIB, 512 * KIB, MIB, 2 * MIB, 4 * MIB, CHUNK_BYTES)
DEPTHS = (4, 8, 16, 32, 64)
IN_FLIGHT_MAX_BYTES = 128 * MIB
"""Pairs with more bytes in flight per drive are not measured: no drive needs them, and bytes in
flight are pinned memory.
"""
CLOSE = 0.03
"""Share of the best bandwidth that a pair with fewer bytes in flight may lack."""

_LOOK_S = 0.3
_FINALISTS = 4
_FINAL_ROUNDS = 5
_FINAL_S = 0.8


@dataclasses.dataclass
class Point:
    """One pair of block size and depth. rates: bandwidths by kind, in bytes per second, one per
    round. final: the pair was measured again among the best few.
    """

    block_bytes: int
    depth: int
    rates: dict[str, list[float]]
    final: bool = False

    @property
    def in_flight_bytes(self) -> int:
        return self.block_bytes * self.depth

    def rate(self, kind: str) -> float:
        """Return the median rate of a kind, in bytes per second."""
        return statistics.median(self.rates[kind])

    def as_dict(self) -> dict[str, Any]:
        return {
            "block_bytes": self.block_bytes,
            "depth": self.depth,
            **{f"{kind}_gbps": self.rate(kind) / 1e9 for kind in KINDS},
            "rounds": {kind: [rate / 1e9 for rate in rates] for kind, rates in self.rates.items()},
            "final": self.final,
        }


@dataclasses.dataclass(frozen=True)
class SweepFigures:
    """Every measured pair, and the chosen pair."""

    points: tuple[Point, ...]
    best: Point

    def as_dict(self) -> dict[str, Any]:
        return {
            "points": [point.as_dict() for point in self.points],
            "best": {"block_bytes": self.best.block_bytes, "depth": self.best.depth},
            "close": CLOSE,
        }


def pairs(blocks: Sequence[int], depths: Sequence[int]) -> list[tuple[int, int]]:
    """List the pairs to try. Raises: ValueError if all have too many bytes in flight."""
    found = [
        (block, depth)
        for block in blocks
        for depth in depths
        if block * depth <= IN_FLIGHT_MAX_BYTES
    ]
    if not found:
        raise ValueError(
            "every pair of --sweep-blocks and --sweep-depths has more than "
            f"{IN_FLIGHT_MAX_BYTES >> 20} MiB in flight; use smaller ones"
        )
    return found


def choose(points: Sequence[Point]) -> Point:
    """Choose among the points that were measured longest, by the rule of the module's docstring."""
    finalists = [point for point in points if point.final] or list(points)
    top = max(point.rate("mixed") for point in finalists)
    close = [point for point in finalists if point.rate("mixed") >= (1 - CLOSE) * top]
    # Equal pairs: the larger block needs fewer requests and less CPU time.
    return min(close, key=lambda point: (point.in_flight_bytes, -point.block_bytes))


def measure_sweep(
    task: SwapTask, blocks: Sequence[int], depths: Sequence[int], progress: Progress | None = None
) -> SweepFigures:
    """Try every pair on the drives of `task` together. Blocks for about 2 s a pair and 60 s for the
    best few.

    Leaves no files behind. Raises: as `measure_swap`; ValueError for a wrong block size or depth,
    or if no pair is small enough.
    """
    # A task checks its settings: a wrong block size or depth raises before anything is written.
    for block in blocks:
        dataclasses.replace(task, block_bytes=block)
    for depth in depths:
        dataclasses.replace(task, depth=depth)
    wanted = pairs(blocks, depths)
    say = progress or (lambda _phase, _share: None)
    with Bench(task, say) as bench:
        with bench.streams(
            block_bytes=task.block_bytes, depth=task.depth, verify="full"
        ) as streams:
            default = (streams.request_bytes, streams.executor.stats().drives[0].depth)
            bench.fill(streams)
            bench.verify(streams, "verify", everything=task.verify_all)
        points = [Point(block, depth, {kind: [] for kind in KINDS}) for block, depth in wanted]
        _look(bench, points)
        # `_look` skips pairs that the executor turns into the same values as an earlier pair.
        points = [point for point in points if point.rates["mixed"]]
        _final(bench, points, default)
        bench.check_no_holes()
    return SweepFigures(tuple(points), choose(points))


def _look(bench: Bench, points: Sequence[Point]) -> None:
    """Measure every pair briefly, twice, the second time in reverse order, so that drift affects
    all pairs alike. Of pairs that the executor turns into the same values, measure the first only.
    """
    owner: dict[object, Point] = {}
    for number, point in enumerate([*points, *reversed(points)]):
        bench.say(f"{point.block_bytes // KIB} KiB x {point.depth}", number / (2 * len(points)))
        with bench.streams(
            block_bytes=point.block_bytes, depth=point.depth, verify="off"
        ) as streams:
            # The executor adapts block size and depth to the device, so two pairs may become one.
            fitted = tuple(
                (drive.block_bytes, drive.depth) for drive in streams.executor.stats().drives
            )
            # A backend that reports 0 does not show its values: measure the pair.
            if all(map(all, fitted)) and owner.setdefault(fitted, point) is not point:
                continue
            _measure(bench, streams, point, min(_LOOK_S, bench.task.phase_s))


def _final(bench: Bench, points: Sequence[Point], default: tuple[int, int]) -> None:
    """Measure the best few and the default in turn, so that drift affects all of them alike."""
    ranked = sorted(points, key=lambda point: -point.rate("mixed"))[:_FINALISTS]
    ranked += [
        point
        for point in points
        if (point.block_bytes, point.depth) == default and point not in ranked
    ]
    for point in ranked:
        # Drop the brief measurements, so that medians are taken of the longer rounds alone.
        point.final = True
        for rates in point.rates.values():
            rates.clear()
    for number in range(_FINAL_ROUNDS):
        for index, point in enumerate(ranked):
            bench.say("the best again", (number + index / len(ranked)) / _FINAL_ROUNDS)
            with bench.streams(
                block_bytes=point.block_bytes, depth=point.depth, verify="off"
            ) as streams:
                _measure(bench, streams, point, min(_FINAL_S, bench.task.phase_s))


def _measure(bench: Bench, streams: Streams, point: Point, seconds: float) -> None:
    # The writes send the contents of the slots, and a new executor's slots hold no data.
    streams.warm()
    phases = bench.phases(streams, "off")
    for kind in KINDS:
        sample = streams.run(phases[kind], seconds, lambda _share: None)
        point.rates[kind].append(sample.rate)
