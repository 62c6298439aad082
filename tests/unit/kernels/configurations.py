"""Every configuration of a tuned kernel in turn, as far as a device has the shared memory for
it."""

from __future__ import annotations

from collections.abc import Iterator

import triton

from infinity._src.kernels import choice
from infinity._src.kernels.triton.tuning import Tuned, using


def each_configuration(tuned: Tuned) -> Iterator[int]:
    """Indices; inside the loop's body calls of the kernel run that configuration."""
    for index in range(len(tuned.configurations)):
        if fits(tuned, index):
            with using(index):
                yield index


def fits(tuned: Tuned, index: int) -> bool:
    """True when this device has the shared memory: two operands of 64 elements of 2 bytes (or 32 of
    4) per step and stage. The interpreter always has."""
    if choice.interpreted():
        return True
    config = tuned.configurations[index]
    device = triton.runtime.driver.active.get_current_device()
    most = triton.runtime.driver.active.utils.get_device_properties(device)["max_shared_mem"]
    side = config.kwargs["BLOCK_M"] + config.kwargs.get("BLOCK_N", 128)
    return bool(max(config.num_stages, 2) * side * 128 <= most)
