"""Choices of the fields of `Policy`: the one table that the policy checks, and whose options the
commands offer. Needs no torch, so that a command shows its help at once.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

TIERS = ("device", "cpu", "nvme")
GENERATIONS_MAX = 5
"""A drive has at most 8 swap files, and checkpoints by links want some of them."""

_SWITCH = (False, True)
CHOICES: MappingProxyType[str, tuple[Any, ...]] = MappingProxyType({
    "params": TIERS,
    "optim": TIERS,
    # Gradients wait for the step in CPU memory, or on drives.
    "grads": TIERS[1:],
    "activations": TIERS,
    "state": ("exact", "bf16", "compact"),
    "zero": (1, 2, 3),
    "accumulate": (None, "shard", "local"),
    "hpz": (None, "device", "cpu"),
    "find_unused_parameters": _SWITCH,
    "sync_module_states": _SWITCH,
    "broadcast_buffers": _SWITCH,
    "qwz": _SWITCH,
    "qgz": _SWITCH,
    "error_feedback": _SWITCH,
    "update": ("deferred", "backward", "delayed"),
    "on_nonfinite": ("raise", "skip", "ignore"),
    "verify": ("full", "sample", "off"),
    "io_backend": ("auto", "io_uring", "threads"),
    "update_on": ("cpu", "device"),
    "generations": tuple(range(1, GENERATIONS_MAX + 1)),
    "damaged": ("raise", "from-older"),
    "durable": (False, True, "new"),
})
