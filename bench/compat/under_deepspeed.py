"""Run a script under DeepSpeed itself on the CPU: `under_deepspeed.py SCRIPT [arguments]`.

DeepSpeed 0.19.8 says that CPUs without fp16 instructions do not train in fp16; torch computes it
nevertheless, so it is told that they do. At the end its I/O threads are still there, and now and
then the process aborts then; so it ends at once, after all is said.
"""

from __future__ import annotations

import os
import runpy
import sys

from deepspeed.accelerator.cpu_accelerator import (  # type: ignore[import-not-found,import-untyped,unused-ignore]
    CPU_Accelerator,
)


def allow_fp16() -> None:
    """Have DeepSpeed take fp16 on every CPU."""
    CPU_Accelerator.is_fp16_supported = lambda _self: True


if __name__ == "__main__":
    allow_fp16()
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
    sys.stdout.flush()
    os._exit(0)
