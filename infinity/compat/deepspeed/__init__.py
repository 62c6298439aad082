"""DeepSpeed-compatible API: DeepSpeed's configuration and calls, implemented on infinity's engine.

    from infinity.compat import deepspeed                 # in place of `import deepspeed`
    engine, optimizer, loader, schedule = deepspeed.initialize(model=model, config="ds.json", ...)

After `install()`, `import deepspeed` imports these modules in this process; nothing else calls it.
`python -m infinity.compat.deepspeed [torchrun options] train.py ...` calls it on every rank and
runs an unchanged script.
"""

from __future__ import annotations

from infinity.compat.deepspeed import comm, ops, zero
from infinity.compat.deepspeed.accelerator import get_accelerator
from infinity.compat.deepspeed.comm import init_distributed
from infinity.compat.deepspeed.engine import DeepSpeedEngine
from infinity.compat.deepspeed.errors import DeepSpeedRefusal
from infinity.compat.deepspeed.initialization import add_config_arguments, initialize
from infinity.compat.deepspeed.installation import install
from infinity.compat.deepspeed.schedules import add_tuning_arguments

__all__ = [
    "DeepSpeedEngine", "DeepSpeedRefusal", "add_config_arguments", "add_tuning_arguments", "comm",
    "get_accelerator", "init_distributed", "initialize", "install", "ops", "zero",
]  # fmt: skip
