"""Stacks of experts in tiles: the bits of the uncut model, wherever states rest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity as inf
from tests import harness, models
from tests.harness import Training
from tests.test_bitwise import PLACEMENTS, policy


def eager(config: Any, cls: type) -> nn.Module:
    model: Any = cls(config)
    model.set_experts_implementation("eager")
    return model


def mixtral() -> nn.Module:
    model: Any = models.mixtral()
    model.set_experts_implementation("eager")
    return model


def tiled_mixtral() -> nn.Module:
    return inf.tile_experts(mixtral(), experts=1)


UNCUT = Training(mixtral, max_norm=None)
TILED = Training(tiled_mixtral, max_norm=None)


@pytest.mark.parametrize("name", ["cpu", "nvme min"])
def test_wherever_tiles_rest_the_bits_are_those_of_the_uncut_plain_loop(
    name: str, tmp_path: Path
) -> None:
    harness.assert_equal(
        harness.offloaded(TILED, policy(tmp_path, **PLACEMENTS[name])), harness.reference(UNCUT)
    )
