"""Constants of the engine's memory: the numbers of units, chunks and calls held at once.

The engine keeps these bounds, and a plan (`plan.memory`) uses the same definitions. The bytes
depend on the model: on its units (`memory.device_capacity`), chunks and checkpointed calls.
"""

from __future__ import annotations

# `params.unshard` bounds gathered bytes, prefetches included.
AHEAD = 2
"""Units, as large as the largest one, that are gathered in addition to the unit in use.
`device_capacity` limits their bytes, and those of the units below."""

# A device's gradients are copied to CPU memory during backward (`GradOffload`).
OFFLOAD_UNITS = 2
"""Units, as large as the largest one, whose fresh gradients may be in flight to the host. Beyond
that backward waits."""

# On several ranks: reductions run behind backward by at most this many units.
REDUCING_UNITS = 2
"""Units, as large as the largest one, whose gradients may be in reduction at once. Beyond that
backward waits."""

# For the unit in backward, and for the next one, whose sums are being copied.
SUMS_UNITS = 2
"""Units, as large as the largest one, whose sums of earlier micro-batches may be on a device."""

# With update="backward" on the CPU, gradients wait until their states are read from the drives.
UNITS_AHEAD = 3
"""Units, as large as the largest one, whose fresh gradients may wait for the drives. Beyond that
backward waits."""

# Only for devices that copy: a unit's gradients are copied during the backward of later units.
LAG_UNITS = 2
"""Later units whose backward may end before a unit's update is submitted."""

# In addition to the LAG_UNITS: backward writes one window, and an update reads one.
WINDOW_UNITS = LAG_UNITS + 2
"""Windows of pinned memory, each for one unit's gradients, with update="backward" on a device."""

# As many updated chunks may be in flight back, so twice this many chunks are on the device.
AHEAD_CHUNKS = 4
"""Chunks of states that are copied to a device ahead of the chunk that it updates."""

# Backward uses the last calls of a forward first, so their inputs are never written.
HELD_CALLS = 2
"""Checkpointed calls at the end of a forward whose inputs stay: the running one and the last one.
"""

# Activations stay in memory until they are stored.
STORING_BYTES_MAX = 32 << 20
"""Bytes of activations in flight to their tier; two of the largest tensors if that is more."""

# NVIDIA's driver refuses to pin 512 GiB in one call: its page table would exceed 2 GiB.
SLAB_BYTES_MAX = 64 << 30
"""Largest slab that is allocated and pinned for several objects; a larger object gets a separate
slab."""

# Bad blocks occur one by one; a drive with many at once is failing.
SPARES_PER_DRIVE = 4
"""Reserved extents on each drive for failed writes, each as large as the largest chunk's place."""
