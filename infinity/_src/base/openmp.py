"""Wait policy of the OpenMP threads with which torch computes on the CPU.

Between two parallel regions the threads of a team wait, by default actively: before they sleep,
threads of libgomp spin 300,000 times, threads of Intel's and LLVM's runtimes for 200 ms. A spinning
thread occupies a core. If another job shares the cores, the thread for which the team waits may
then have no core.

A runtime reads its environment variables when torch loads it; a later change has no effect.
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
"""Variable that every runtime reads; with "PASSIVE" waiting threads sleep immediately."""

_COUNTS = {"libgomp": "GOMP_SPINCOUNT", "libomp": "KMP_BLOCKTIME", "libiomp5": "KMP_BLOCKTIME"}
"""Runtime -> its variable that overrides the policy: spins, or milliseconds."""
_COUNT = re.compile(r"\+?(\d+)\s*[a-z]*|infinit\w*", re.IGNORECASE)
_MAPS = Path("/proc/self/maps")

_warned = False


def wait_passively() -> None:
    """Make waiting threads sleep, unless the environment sets a policy. Commands call this before
    they load torch; later it has no effect.
    """
    # Once torch is loaded, the variable has no effect and would only mislead `why_active`.
    if "torch" not in sys.modules:
        os.environ.setdefault(POLICY, "PASSIVE")


def why_active(runtime: str, environment: Mapping[str, str]) -> str:
    """Return the setting of this environment that makes the threads of a runtime (a key of
    `_COUNTS`) wait actively; "" if they sleep immediately.
    """
    name = _COUNTS[runtime]
    count = _COUNT.fullmatch(environment.get(name, "").strip())
    # Runtimes ignore an invalid count.
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
    """Return the setting in the current environment that makes waiting threads of this process
    active; "" if they sleep, or no runtime is loaded.
    """
    reasons = (why_active(name, os.environ) for name in loaded_runtimes())
    return next((reason for reason in reasons if reason), "")


def warn_if_active(threads: int) -> None:
    """Log once per process if waiting threads are active. threads: torch's number; with one thread
    there is nothing to wait for.
    """
    global _warned
    if _warned or threads < 2:
        return
    reason = active_here()
    if reason:
        _warned = True
        log.warning(
            "torch's threads wait actively (%s): if another job uses these cores, a step takes "
            "several times as long. Set %s=PASSIVE in the environment, before torch is imported",
            reason,
            POLICY,
        )
