"""Constants of the engine's memory: the numbers of units, chunks and calls held at once.

The engine keeps these bounds, and a plan (`plan.memory`) uses the same definitions. Bytes follow
from the model: from its units (`memory.device_capacity`), its chunks, its checkpointed calls.
"""

from __future__ import annotations

# `params.unshard` bounds gathered bytes, prefetches included.
AHEAD = 2
"""Units, of the size of the largest, gathered besides the one in use; `device_capacity` limits
their bytes, as it does with the units below."""

# A device's gradients are copied to CPU memory during backward (`GradOffload`).
OFFLOAD_UNITS = 2
"""Units, of the largest, whose fresh gradients may be in flight to the host; then backward waits.
"""

# On several ranks; the communication stream of reductions is that far behind backward.
REDUCING_UNITS = 2
"""Units whose gradients may be under way between the ranks at once, of the largest if one is huge;
beyond that backward waits."""

# Backward of the unit, and of the one after it, which is copied meanwhile.
SUMS_UNITS = 2
"""Units, of the largest, whose sums of earlier micro-batches may be on a device, to be added to."""

# With update="backward" on the CPU, gradients wait for the drives of their update.
UNITS_AHEAD = 3
"""Units, of the largest, whose fresh gradients may wait for the drives; then backward waits."""

# Only for devices that copy: a unit's gradients are copied during the backward of later units.
LAG_UNITS = 2
"""Units whose backward may have ended before a unit's update is submitted."""

# Besides the windows of the lag, one is being written, and one is read by its update.
WINDOW_UNITS = LAG_UNITS + 2
"""Windows of pinned memory, of a unit each, for gradients of update="backward" on a device."""

# As many may be in flight back, so twice this many chunks are on the device at once.
AHEAD_CHUNKS = 4
"""Chunks of states that are read ahead of the one that a device updates."""

# The last calls of a forward are the first of its backward: they are never written.
HELD_CALLS = 2
"""Checkpointed calls at the end of a forward whose inputs stay: the one that runs and the last."""

# They stay in memory until they are stored.
STORING_BYTES_MAX = 32 << 20
"""Bytes of activations on their way to their tier; or two of the largest tensors, if more."""

# NVIDIA's driver refuses to pin 512 GiB in one call: its table of pages grows past 2 GiB.
SLAB_BYTES_MAX = 64 << 30
"""Largest slab that is allocated and pinned for several objects; a larger object gets a separate
slab."""

# Bad blocks occur one by one; a drive with more at once is failing.
SPARES_PER_DRIVE = 4
"""Reserved extents on each drive for failed writes, each of a chunk's largest place."""
