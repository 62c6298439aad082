"""Run a script under DeepSpeed itself on the CPU: `under_deepspeed.py SCRIPT [arguments]`.

DeepSpeed 0.19.8 refuses fp16 on CPUs without fp16 instructions; torch does compute it, so the check
is overridden. DeepSpeed's I/O threads outlive the interpreter's shutdown and sometimes abort the
process there; so the script exits immediately after its output.
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
