"""infinity: train models whose states do not fit in GPU memory.

Names load lazily, so that `infinity.aio` and the commands that need no tensors import without
torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from infinity._src.base.version import __version__

if TYPE_CHECKING:
    from infinity._src.config.deepspeed import DeepSpeedRun, read_deepspeed
    from infinity._src.config.policy import Policy
    from infinity._src.engine.handle import (
        Handle,
        forward_methods,
        handle,
        is_offloaded,
        offload,
        offloaded_modules,
    )
    from infinity._src.engine.interchange import (
        export_dcp,
        export_safetensors,
        load_dcp,
        load_deepspeed,
        load_safetensors,
    )
    from infinity._src.engine.save_restore import Restored, Save, restore, save
    from infinity._src.engine.step_log import StepLog
    from infinity._src.kernels.tiling.tile_experts import tile_experts
    from infinity._src.kernels.tiling.tile_model import tile_linears, tile_loss
    from infinity._src.microbatch.microbatched import microbatched, slices_of
    from infinity._src.optim.elementwise import Elementwise
    from infinity._src.optim.kernel_optimizers import SGD, AdamW, Lion
    from infinity._src.optim.muon import Matrixwise, Muon
    from infinity._src.params.materialize import TensorSource

_HOMES = {
    "Policy": "infinity._src.config.policy",
    "DeepSpeedRun": "infinity._src.config.deepspeed",
    "read_deepspeed": "infinity._src.config.deepspeed",
    "offload": "infinity._src.engine.handle",
    "offloaded_modules": "infinity._src.engine.handle",
    "forward_methods": "infinity._src.engine.handle",
    "handle": "infinity._src.engine.handle",
    "is_offloaded": "infinity._src.engine.handle",
    "Handle": "infinity._src.engine.handle",
    "AdamW": "infinity._src.optim.kernel_optimizers",
    "SGD": "infinity._src.optim.kernel_optimizers",
    "Lion": "infinity._src.optim.kernel_optimizers",
    "Elementwise": "infinity._src.optim.elementwise",
    "Matrixwise": "infinity._src.optim.muon",
    "Muon": "infinity._src.optim.muon",
    "export_dcp": "infinity._src.engine.interchange",
    "export_safetensors": "infinity._src.engine.interchange",
    "load_dcp": "infinity._src.engine.interchange",
    "load_deepspeed": "infinity._src.engine.interchange",
    "load_safetensors": "infinity._src.engine.interchange",
    "save": "infinity._src.engine.save_restore",
    "tile_experts": "infinity._src.kernels.tiling.tile_experts",
    "tile_linears": "infinity._src.kernels.tiling.tile_model",
    "tile_loss": "infinity._src.kernels.tiling.tile_model",
    "microbatched": "infinity._src.microbatch.microbatched",
    "slices_of": "infinity._src.microbatch.microbatched",
    "restore": "infinity._src.engine.save_restore",
    "Save": "infinity._src.engine.save_restore",
    "Restored": "infinity._src.engine.save_restore",
    "TensorSource": "infinity._src.params.materialize",
    "StepLog": "infinity._src.engine.step_log",
}

__all__ = [
    "SGD",
    "AdamW",
    "DeepSpeedRun",
    "Elementwise",
    "Handle",
    "Lion",
    "Matrixwise",
    "Muon",
    "Policy",
    "Restored",
    "Save",
    "StepLog",
    "TensorSource",
    "__version__",
    "export_dcp",
    "export_safetensors",
    "forward_methods",
    "handle",
    "is_offloaded",
    "load_dcp",
    "load_deepspeed",
    "load_safetensors",
    "microbatched",
    "offload",
    "offloaded_modules",
    "read_deepspeed",
    "restore",
    "save",
    "slices_of",
    "tile_experts",
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
