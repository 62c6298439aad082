"""Host overhead: RAM of the engine that the budget `Policy.ram` does not count, for each chunk and
each unit.

A chunk has 4.5 MiB of states, and its overhead is one or two thousandths of that. A model of 400
billion parameters has a million chunks, so gigabytes of overhead. The budget counts checksums
(`memory.ram_budget`); this file does not. All figures were measured on 64-bit Linux with CPython
and glibc; tests/unit/memory/test_host_overhead.py compares them with the engine.
"""

from __future__ import annotations

CHUNK_BYTES = 1700
"""A chunk while its model is offloaded: the executor's record (988), the same in numpy (316), and
the extent of its run in Python objects."""

SECOND_PLACE_BYTES = 220
"""Additional bytes of a chunk with two generations: the extent of its second run."""

UNIT_BYTES = 16_000
"""A unit of one parameter and its optimizer's entry: modules, hooks, layouts, records."""

PIECES = 4
"""Pieces of values in memory while a model is initialized: one is filled, others are written."""

PIECES_BYTES = 12 << 20
"""Bytes of all pieces: they fit a CPU's cache, and Python's time for a piece is small beside the
drive's. A piece has at least one chunk."""

STEP_CHUNK_BYTES = 840
"""A chunk whose update is in flight: a job of the executor (800) and its segment. If `opt.step()`
submits all updates, these are all chunks of the rank; if backward consumes the gradients, only
those of a few units."""

SAVE_BYTES = 40 << 20
"""Any save: chunks that are written, slots of the data file's executor, its records."""

SAVE_DRIVE_BYTES = 18 << 20
"""A drive that a save reads: four groups of chunks ahead."""

SAVE_CHUNK_BYTES = 1_440
"""A chunk while `inf.save` copies: a job of the executor (800), its row in the manifest, the sizes
and addresses of its sections."""

COMMIT_CHUNK_BYTES = 65
"""A chunk while a durable step is committed: its marks."""

RESTORE_BYTES = 56 << 20
"""Any restore: saved chunks in memory, chunks that are composed, slots of the executor that reads.
"""

RESTORE_CHUNK_BYTES = 690
"""A chunk of the checkpoint while `inf.restore` reads it; the manifests of all ranks add to it."""


def held_bytes(chunks: int, units: int, generations: int = 1) -> int:
    """Compute the bytes of overhead of a rank with `chunks` chunks, from set-up on."""
    return chunks * (CHUNK_BYTES + SECOND_PLACE_BYTES * (generations - 1)) + units * UNIT_BYTES


def fill_bytes(shard: int, *, scattered: int = 0, converting: int = 0) -> int:
    """Compute the most bytes of values in flight to their tiers while a rank is initialized: they
    pass in pieces.

    shard: bytes of the largest shard of a flat. scattered: bytes of the largest flat where this
    rank scatters whole flats to the other ranks; then one shard is written while the next arrives.
    converting: bytes that the source needs besides.
    """
    passing = scattered + 2 * shard if scattered else min(PIECES_BYTES, PIECES * shard)
    return passing + converting


def passing_bytes(
    chunks: int, *, all_at_once: bool, durable: bool, drives: int, fill: int
) -> dict[str, int]:
    """Compute the most bytes that each phase adds to `held_bytes`: fill, step, save, commit,
    restore. Phases do not overlap, except that steps run during a save.

    all_at_once: the updates of all units may be in flight in a step. drives: number of drives from
    which states are read. fill: the result of `fill_bytes`.
    """
    return {
        "fill": fill,
        "step": chunks * STEP_CHUNK_BYTES if all_at_once else 0,
        # A pipeline without drives reads ahead as if there were one.
        "save": SAVE_BYTES + max(drives, 1) * SAVE_DRIVE_BYTES + chunks * SAVE_CHUNK_BYTES,
        "commit": chunks * COMMIT_CHUNK_BYTES if durable else 0,
        "restore": RESTORE_BYTES + chunks * RESTORE_CHUNK_BYTES,
    }
