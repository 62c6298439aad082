"""Adds `bench/` and the tree to sys.path on import: `infinity` may not be installed.

Its name sorts before `harness` and the other modules of bench/, so it is imported first.
"""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
BENCH = HERE.parent
ROOT = BENCH.parent

for folder in map(str, (BENCH, ROOT)):
    if folder not in sys.path:
        sys.path.append(folder)
