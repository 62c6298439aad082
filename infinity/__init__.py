"""infinity: train models whose states do not fit in GPU memory.

Names load lazily, so that `infinity.aio` and the commands that need no tensors import without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from infinity.checkpoints import Restored, Save, restore, save
    from infinity.config import Policy
    from infinity.engine import Handle, handle, offload
    from infinity.interchange import (
        export_dcp,
        export_safetensors,
        load_dcp,
        load_deepspeed,
        load_safetensors,
    )
    from infinity.ops.tiling import tile_linears, tile_loss
    from infinity.optim.adamw import AdamW
    from infinity.optim.elementwise import Elementwise
    from infinity.optim.lion import Lion
    from infinity.optim.sgd import SGD

__version__ = "0.1.0"

_HOMES = {
    "Policy": "infinity.config",
    "offload": "infinity.engine",
    "handle": "infinity.engine",
    "Handle": "infinity.engine",
    "AdamW": "infinity.optim.adamw",
    "SGD": "infinity.optim.sgd",
    "Lion": "infinity.optim.lion",
    "Elementwise": "infinity.optim.elementwise",
    "export_dcp": "infinity.interchange",
    "export_safetensors": "infinity.interchange",
    "load_dcp": "infinity.interchange",
    "load_deepspeed": "infinity.interchange",
    "load_safetensors": "infinity.interchange",
    "save": "infinity.checkpoints",
    "tile_linears": "infinity.ops.tiling",
    "tile_loss": "infinity.ops.tiling",
    "restore": "infinity.checkpoints",
    "Save": "infinity.checkpoints",
    "Restored": "infinity.checkpoints",
}

__all__ = [
    "SGD",
    "AdamW",
    "Elementwise",
    "Handle",
    "Lion",
    "Policy",
    "Restored",
    "Save",
    "__version__",
    "export_dcp",
    "export_safetensors",
    "handle",
    "load_dcp",
    "load_deepspeed",
    "load_safetensors",
    "offload",
    "restore",
    "save",
    "tile_linears",
    "tile_loss",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    if name == "ops":  # inf.ops.TiledLinear
        return importlib.import_module("infinity.ops")
    raise AttributeError(f"module 'infinity' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
