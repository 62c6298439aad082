"""Faults and slow drives for tests: `open_executor(..., seam=Seam(fault=Fault("read", nth=3)))`.

io_uring makes no libc calls that a mock could intercept, so tests go in by this seam. It delays and
reorders completions, fails a chosen request, and slows a drive down. `Seam` has the settings.
"""

from __future__ import annotations

from infinity.aio.executor import Fault, Seam

__all__ = ["Fault", "Seam"]
