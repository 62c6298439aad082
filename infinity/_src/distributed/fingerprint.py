"""Names of what must be the same on all ranks: by them ranks meet before it has an effect (`Comm.meet`).

Every rank keeps its part of parameters, states and gradients. Where ranks write other values, or step with others, the parts
make a whole that no rank meant, and no loss would tell.
"""

from __future__ import annotations

import xxhash
from torch import Tensor, uint8


def digest(values: Tensor) -> int:
    """Of a tensor's bits, as they lie, below 2^63. Takes a copy of what is not on the CPU or not contiguous."""
    return xxhash.xxh3_64_intdigest(values.detach().to("cpu").contiguous().reshape(-1).view(uint8).numpy().data) >> 1


def digest_of_text(text: str) -> int:
    """As `digest`."""
    return xxhash.xxh3_64_intdigest(text.encode()) >> 1


def named(what: str, number: int) -> str:
    """`what` with the digest of what it is done with. The end of a name is what travels: see `Exchange.meet`."""
    return f"{what} (digest {number:016x})"
