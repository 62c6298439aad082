"""The path to the scripts of bench/: importing it makes `bench/` importable.

Imported before `harness` and its like (the alphabet sees to that).
"""

from __future__ import annotations

import sys
from pathlib import Path

BENCH = Path(__file__).resolve().parent.parent

if str(BENCH) not in sys.path:
    sys.path.append(str(BENCH))
