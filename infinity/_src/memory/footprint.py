"""RAM that the engine takes beside the budget `Policy.ram`: bytes for each chunk and each unit.

A chunk is 4.5 MiB of states, so these are one part in a thousand or two of them; of a model of 400
billion parameters, with a million chunks, they are gigabytes. Checksums are in the budget
(`memory.placement`), and not here. All were measured on 64-bit Linux with CPython and glibc, and
tests/unit/memory/test_footprint.py holds them against the engine.
"""

from __future__ import annotations

CHUNK_BYTES = 1700
"""A chunk while its model is offloaded: the executor's record (988), the same in numpy (316), and
the extent of its run in Python objects."""

SECOND_PLACE_BYTES = 220
"""More of a chunk with two generations: the extent of its second run."""

UNIT_BYTES = 16_000
"""A unit of one parameter and its optimizer's entry: modules, hooks, layouts, records."""

STEP_CHUNK_BYTES = 776
"""A chunk whose update is on its way: a job of the executor (736) and its segment. With
update="deferred" these are all chunks of the rank, else those of a few units."""

SAVE_BYTES = 30 << 20
"""Any save: chunks that are written, slots of the data file's executor, its records."""

SAVE_DRIVE_BYTES = 9 << 20
"""A drive that a save reads: two chunks ahead."""

SAVE_CHUNK_BYTES = 440
"""A chunk while `inf.save` copies: its row in the manifest, the sizes of its sections, its turn."""

COMMIT_CHUNK_BYTES = 65
"""A chunk while a durable step is committed: its marks."""

RESTORE_CHUNK_BYTES = 480
"""A chunk of the checkpoint while `inf.restore` reads it; beside manifests of all ranks."""


def held_bytes(chunks: int, units: int, generations: int = 1) -> int:
    """Compute the bytes of a rank beside its budget from set-up on. chunks: of its shards."""
    return chunks * (CHUNK_BYTES + SECOND_PLACE_BYTES * (generations - 1)) + units * UNIT_BYTES


def passing_bytes(chunks: int, *, deferred: bool, durable: bool, drives: int = 1) -> dict[str, int]:
    """Compute the most bytes beside those of `held_bytes` in each phase: step, save, commit,
    restore. deferred: updates of all units wait for one step. drives: that states are read from.
    Phases do not overlap, but for a save that goes on beside steps.
    """
    return {
        "step": chunks * STEP_CHUNK_BYTES if deferred else 0,
        "save": SAVE_BYTES + drives * SAVE_DRIVE_BYTES + chunks * SAVE_CHUNK_BYTES,
        "commit": chunks * COMMIT_CHUNK_BYTES if durable else 0,
        "restore": chunks * RESTORE_CHUNK_BYTES,
    }
