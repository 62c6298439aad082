"""Memory of the server that processes of tests are forked from: all that a training imports, so
that none of them does so again."""

from __future__ import annotations

import gc
import importlib

NAMES = (
    "torch._dynamo",
    # On first use: of numpy.unique, of torch.profiler, of a codec.
    "numpy.ma",
    "torch.profiler._cupti_monitor",
    "encodings.ascii",
    "liburing",
    "infinity._src.kernels.hyper",
    "infinity._src.optim.kernel_optimizers",
    "infinity._src.engine.interchange",
    "infinity._src.engine.save_restore",
    "infinity._src.checkpoint.restore",
    "infinity._src.checkpoint.reader",
    "tests.campaign_life",
    "tests.crashes",
    "tests.harness",
)

for name in NAMES:
    importlib.import_module(name)
# A collection in a process goes through its own objects, and its memory stays shared.
gc.collect()
gc.freeze()
