"""Which gradients spill when a budget does not hold them all: pure arithmetic.

A flat's gradients are in RAM as a whole, or on NVMe by way of a staging window that holds them while backward fills them.
Windows are of one size, that of the largest flat that spills. So a large flat (an embedding) may be worth keeping in RAM
only to keep the windows small, and there is a choice: up to which size flats may spill.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

WINDOW_COUNT = 3
"""Staging windows: one whose unit is in backward, one that is being written, one that is read ahead or written late."""


def spread(count: int) -> list[int]:
    """0 .. count - 1 in the van der Corput order: every prefix is spread evenly over the range."""
    bits = max(count - 1, 0).bit_length()
    return sorted(range(count), key=lambda index: int(f"{index:0{bits}b}"[::-1], 2) if bits else 0)


def choose_spill(
    sizes: Sequence[tuple[int, int]], able: Sequence[bool], ram_bytes: int | None
) -> Iterator[tuple[bool, ...]]:
    """For each size up to which flats may spill: the flags, of each flat, that keep the most gradients in `ram_bytes`.

    ram_bytes None: the fewest. sizes: of each flat (bytes of its gradients in RAM, of its window); able: it may spill. Others
    are no part of the count. Within a size the kept flats are a prefix of the spread order, so that more RAM keeps the same
    flats and more. Ways that do not fit are left out.
    """
    members = [flat for flat, is_able in enumerate(able) if is_able]
    for window in sorted({sizes[flat][1] for flat in members}):
        small = [flat for flat in members if sizes[flat][1] <= window]
        order = [small[place] for place in spread(len(small))]
        ram = sum(sizes[flat][0] for flat in members if sizes[flat][1] > window)
        best = None
        for kept in range(len(order)):  # all of them in RAM is no way to spill
            ram += sizes[order[kept - 1]][0] if kept else 0
            total = ram + window * min(WINDOW_COUNT, len(order) - kept)
            if ram_bytes is None:
                best = kept
                break
            if total <= ram_bytes:
                best = kept
        if best is not None:
            gone = set(order[best:])
            yield tuple(flat in gone for flat in range(len(sizes)))
