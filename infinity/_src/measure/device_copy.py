"""Copies between CPU memory and a CUDA device: pinned and pageable, both ways, by block size.

Copies of blocks of one size follow one another on one stream (two for "both ways") until they have
moved a fixed number of bytes. The time includes their completion on the device. Without a device
the result has no rows and gives the reason; this is not an error.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from infinity._src.base.sizes import KIB, MIB

BLOCKS = (256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB)
DIRECTIONS = ("to the device", "from the device", "both ways")
MEMORIES = ("pinned", "pageable")

Progress = Callable[[str, float], None]

_MOVED_BYTES = 1 << 30


@dataclasses.dataclass(frozen=True)
class Row:
    """Figures of one kind of memory, direction and block size. of_best: the rate over the best rate
    of pinned memory in the same direction.
    """

    memory: str
    direction: str
    block_bytes: int
    gbps: float
    rounds: list[float]
    of_best: float


@dataclasses.dataclass(frozen=True)
class CopyFigures:
    """Rows of one measurement. Without a device `device` is empty, and `reason` says why."""

    device: str
    reason: str
    rows: tuple[Row, ...]

    def as_dict(self) -> dict[str, Any]:
        return {
            "device": self.device or None,
            "reason": self.reason,
            "rows": [dataclasses.asdict(row) for row in self.rows],
        }


def measure_copy(
    *,
    blocks: Sequence[int] = BLOCKS,
    rounds: int = 3,
    moved_bytes: int = _MOVED_BYTES,
    progress: Progress | None = None,
) -> CopyFigures:
    """Measure copies to and from the current CUDA device. Blocks for about half a minute at PCIe 4
    speed.

    Raises: ValueError for block sizes or rounds out of range.
    """
    if rounds < 1:
        raise ValueError(f"--rounds {rounds} must be at least 1")
    for block in blocks:
        if not 4096 <= block <= moved_bytes:
            raise ValueError(f"--blocks {block}: a block must have 4096 to {moved_bytes} bytes")
    try:
        import torch
    except ImportError as error:
        return CopyFigures("", f"torch cannot be imported: {error}", ())
    if not torch.cuda.is_available():
        built = torch.version.cuda
        why = (
            "torch finds no CUDA device"
            if built
            else f"torch {torch.__version__} is built without CUDA"
        )
        return CopyFigures("", f"no device: {why}", ())
    say = progress or (lambda _phase, _share: None)
    rates: dict[tuple[str, str, int], list[float]] = {}
    keys = [
        (memory, direction, block)
        for memory in MEMORIES
        for direction in DIRECTIONS
        for block in blocks
    ]
    buffers = {memory: _Buffers(memory, max(blocks)) for memory in MEMORIES}
    # Every round has all copies, so that drift of the link affects all of them alike.
    for number in range(rounds):
        for index, key in enumerate(keys):
            memory, direction, block = key
            say(f"{memory} {number + 1}/{rounds}", index / len(keys))
            rates.setdefault(key, []).append(buffers[memory].rate(direction, block, moved_bytes))
    medians = {key: statistics.median(found) for key, found in rates.items()}
    rows = []
    for memory, direction, block in keys:
        best = max(medians[MEMORIES[0], direction, one] for one in blocks)
        found = medians[memory, direction, block]
        rounds_gbps = [rate / 1e9 for rate in rates[memory, direction, block]]
        rows.append(Row(memory, direction, block, found / 1e9, rounds_gbps, found / best))
    return CopyFigures(torch.cuda.get_device_name(), "", tuple(rows))


class _Buffers:
    def __init__(self, memory: str, size_bytes: int) -> None:
        import torch

        self._torch = torch
        pinned = memory == "pinned"
        # One pair for each direction: "both ways" must not use the same memory twice. `add_` writes
        # all bytes, since the kernel may map untouched zeros to one shared page.
        self._host = [torch.zeros(size_bytes, dtype=torch.uint8).add_(7) for _ in range(2)]
        if pinned:
            self._host = [one.pin_memory() for one in self._host]
        self._device = [torch.zeros(size_bytes, dtype=torch.uint8, device="cuda") for _ in range(2)]
        self._streams = [torch.cuda.Stream() for _ in range(2)]
        # Untimed: the first copies also set up the streams.
        for direction in DIRECTIONS:
            self.rate(direction, size_bytes, size_bytes)

    def rate(self, direction: str, block: int, moved_bytes: int) -> float:
        """Return the bytes per second, both directions counted."""
        torch = self._torch
        ways = {"to the device": (0,), "from the device": (1,), "both ways": (0, 1)}[direction]
        count = max(moved_bytes // block // len(ways), 1)
        # Wait for earlier copies, which would share the link with the timed ones.
        torch.cuda.synchronize()
        start_s = time.perf_counter()
        for _ in range(count):
            for way in ways:
                host, device = self._host[way][:block], self._device[way][:block]
                target, source = (device, host) if way == 0 else (host, device)
                with torch.cuda.stream(self._streams[way]):
                    target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        return count * len(ways) * block / (time.perf_counter() - start_s)
