"""Host overhead: RAM of the engine that the budget `Policy.ram` does not count, for each chunk and
each unit.

A chunk has 4.5 MiB of states, and its overhead is one or two thousandths of that. A model of 400
billion parameters has a million chunks, so gigabytes of overhead. Checksums are not counted here,
but in the budget (`memory.ram_budget`). All figures were measured on 64-bit Linux with CPython and
glibc; tests/unit/memory/test_host_overhead.py compares them with the engine.
"""

from __future__ import annotations

CHUNK_BYTES = 1700
"""Bytes per chunk while its model is offloaded: the executor's record (988), numpy's record (316),
and Python's objects for the extent."""

SECOND_PLACE_BYTES = 220
"""Additional bytes per chunk with two generations: the extent of the second one."""

UNIT_BYTES = 16_000
"""Bytes per unit of one parameter, its optimizer's entry included: modules, hooks, layouts,
records."""

PIECES = 4
"""Pieces of values in memory while a model is initialized: one is filled, others are written."""

PIECES_BYTES = 12 << 20
"""Bytes of all pieces, so that they fit a CPU's cache, and Python takes little time per piece
compared with the drive. A piece has at least one chunk."""

STEP_CHUNK_BYTES = 840
"""Bytes per chunk whose update is in flight: a job of the executor (800) and its segment. If
`opt.step()` submits all updates, these are all chunks of the rank; if backward consumes the
gradients, only the chunks of a few units."""

SAVE_BYTES = 40 << 20
"""Bytes of a save: chunks being written, slots and records of the executor of the data file."""

SAVE_DRIVE_BYTES = 18 << 20
"""Bytes of a save per drive that it reads: four groups of chunks are read ahead."""

SAVE_CHUNK_BYTES = 1_440
"""Bytes of a save per chunk: a job of the executor (800), a row of the manifest, the sizes and
addresses of the sections."""

COMMIT_CHUNK_BYTES = 65
"""Bytes per chunk while a durable step is committed."""

RESTORE_BYTES = 56 << 20
"""Bytes of a restore: saved chunks, chunks being composed, slots of the executor that reads."""

RESTORE_CHUNK_BYTES = 690
"""Bytes of a restore per chunk of the checkpoint, without the manifests of all ranks."""


def held_bytes(chunks: int, units: int, generations: int = 1) -> int:
    """Compute the bytes of overhead that a rank has from set-up on."""
    return chunks * (CHUNK_BYTES + SECOND_PLACE_BYTES * (generations - 1)) + units * UNIT_BYTES


def fill_bytes(shard: int, *, scattered: int = 0, converting: int = 0) -> int:
    """Compute the most bytes of values in flight to their tiers while a rank is initialized, piece
    by piece.

    shard: bytes of the largest shard of a flat. scattered: bytes of the largest flat if this rank
    scatters whole flats to the other ranks, else 0; then one shard is written while the next
    arrives. converting: additional bytes of the source.
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
        # Without drives a save reads ahead as from one drive.
        "save": SAVE_BYTES + max(drives, 1) * SAVE_DRIVE_BYTES + chunks * SAVE_CHUNK_BYTES,
        "commit": chunks * COMMIT_CHUNK_BYTES if durable else 0,
        "restore": RESTORE_BYTES + chunks * RESTORE_CHUNK_BYTES,
    }
