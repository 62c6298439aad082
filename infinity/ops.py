"""Public tensor operators, `inf.ops`, loaded lazily; each has a torch reference implementation."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from infinity._src.kernels.tiling.tiled_embedding import TiledEmbedding
    from infinity._src.kernels.tiling.tiled_experts import LowRank, TiledExperts
    from infinity._src.kernels.tiling.tiled_linear import TiledLinear
    from infinity._src.kernels.tiling.tiled_loss import LinearCrossEntropy, linear_cross_entropy

_HOMES = {
    "LinearCrossEntropy": "infinity._src.kernels.tiling.tiled_loss",
    "LowRank": "infinity._src.kernels.tiling.tiled_experts",
    "TiledEmbedding": "infinity._src.kernels.tiling.tiled_embedding",
    "TiledExperts": "infinity._src.kernels.tiling.tiled_experts",
    "TiledLinear": "infinity._src.kernels.tiling.tiled_linear",
    "linear_cross_entropy": "infinity._src.kernels.tiling.tiled_loss",
}

__all__ = [
    "LinearCrossEntropy",
    "LowRank",
    "TiledEmbedding",
    "TiledExperts",
    "TiledLinear",
    "linear_cross_entropy",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'infinity.ops' has no attribute {name!r}")
