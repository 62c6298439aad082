"""Scripts of bench/, imported as they import each other."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).parents[3] / "bench"
FOLDERS = (BENCH, BENCH / "compat", BENCH / "rehearsal", BENCH / "gpu")  # the last one first


@pytest.fixture(scope="module")
def bench() -> Iterator[Callable[[str], Any]]:
    """Gives a script by its name. No other test sees the scripts that were imported."""
    with pytest.MonkeyPatch.context() as patch:
        for folder in FOLDERS:
            patch.syspath_prepend(str(folder))
        yield importlib.import_module
    for name, module in list(sys.modules.items()):
        if Path(getattr(module, "__file__", None) or "/").parent in FOLDERS:
            del sys.modules[name]
