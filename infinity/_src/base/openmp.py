"""Waiting of OpenMP threads, by which torch computes on the CPU.

Between two parallel regions the threads of a team wait, and by default they do so actively: those
of libgomp turn 300,000 times in a loop before they sleep, those of Intel and LLVM for 200 ms. A
thread in that loop holds its core. Beside another job on the same cores the thread that all wait
for may have none meanwhile.

A runtime reads its variables once, when it is loaded, and torch loads it: a variable that is set
later says nothing.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path

log = logging.getLogger("infinity")

POLICY = "OMP_WAIT_POLICY"
"""Variable that every runtime reads; "PASSIVE" has waiting threads sleep at once."""

_COUNTS = {"libgomp": "GOMP_SPINCOUNT", "libomp": "KMP_BLOCKTIME", "libiomp5": "KMP_BLOCKTIME"}
"""Runtimes, and the variable of each that goes before the policy: turns, or milliseconds."""
_COUNT = re.compile(r"\+?(\d+)\s*[a-z]*|infinit\w*", re.IGNORECASE)
_MAPS = Path("/proc/self/maps")

_told = False


def wait_passively() -> None:
    """Have waiting threads sleep, unless the environment says otherwise. Called by commands before
    torch is loaded; later it does nothing.
    """
    # A variable without effect would only deceive `why_active`.
    if "torch" not in sys.modules:
        os.environ.setdefault(POLICY, "PASSIVE")


def why_active(runtime: str, environment: Mapping[str, str]) -> str:
    """Name the setting by which threads of a runtime (a key of `_COUNTS`) wait actively, with this
    environment when it was loaded. Empty where they sleep at once.
    """
    name = _COUNTS[runtime]
    count = _COUNT.fullmatch(environment.get(name, "").strip())
    # Runtimes ignore a count that is none.
    if count is not None:
        return "" if count[1] and not int(count[1]) else f"{name}={environment[name]}"
    policy = environment.get(POLICY, "").strip().upper()
    if policy == "PASSIVE":
        return ""
    return f"{POLICY}=ACTIVE" if policy == "ACTIVE" else f"the default of {runtime}"


def loaded_runtimes() -> list[str]:
    """List the OpenMP runtimes that this process has loaded, as keys of `_COUNTS`."""
    files = {line.rpartition("/")[2] for line in _MAPS.read_text(encoding="utf-8").splitlines()}
    # Wheels add a hash to the name: libgomp-24e2ab19.so.1.0.0.
    return [name for name in _COUNTS if any(re.match(rf"{name}[-.]", file) for file in files)]


def active_here() -> str:
    """Name the setting by which waiting threads of this process are active, as far as its
    environment tells; empty where they sleep, or where no runtime is loaded.
    """
    reasons = (why_active(name, os.environ) for name in loaded_runtimes())
    return next((reason for reason in reasons if reason), "")


def warn_if_active(threads: int) -> None:
    """Log, once in this process, that waiting threads are active. threads: of torch; a single one
    does not wait for others.
    """
    global _told
    if _told or threads < 2:
        return
    reason = active_here()
    if reason:
        _told = True
        log.warning(
            "torch's threads wait actively (%s): beside another job on these cores a step takes "
            "several times as long. Set %s=PASSIVE in the environment, before torch is imported",
            reason,
            POLICY,
        )
