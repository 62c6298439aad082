"""Adds `bench/` to sys.path on import.

Its name sorts before `harness` and the other modules of bench/, so it is imported first.
"""

from __future__ import annotations

import sys
from pathlib import Path

BENCH = Path(__file__).resolve().parent.parent

if str(BENCH) not in sys.path:
    sys.path.append(str(BENCH))
