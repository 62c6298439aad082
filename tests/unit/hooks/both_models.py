"""A stack of blocks and its plain twin, evicted at once or never: code that the tests of the life
cycle share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.marks import mostly_slow
from tests.unit.hooks import models
from tests.unit.hooks.rig import Rig

# A third of the rows of test_matrix.py, which run each time, evict nothing either.
both = pytest.mark.parametrize(
    "eager", mostly_slow([True, False], True), ids=["evicts_at_once", "never_evicts"]
)


def stack_rig(eager: bool = True, **options: Any) -> Rig:
    return Rig(models.stack(**options), models.stack_groups, eager=eager)


def run_both(rig: Rig, body: Callable[[nn.Module], Any]) -> None:
    """Run `body` on both models, then compare gradients; nothing may stay held."""
    torch.manual_seed(1)
    body(rig.plain)
    torch.manual_seed(1)
    body(rig.model)
    rig.check_idle()
    rig.check_grads()
