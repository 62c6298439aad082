"""Tiles on several ranks: each is split over them, and gathered alone."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

from tests import harness, models, test_matrix
from tests.distributed.ranks import Train, assert_ranks_agree, mean_losses
from tests.distributed.test_two_ranks import PLACEMENTS, WORLD, on_two_ranks
from tests.harness import Training
from tests.test_expert_tiles import eager, tiled

TILED = Training(test_matrix.tiled_llama, steps=3, rows=4, lr=2e-3)


@pytest.mark.ranks
def test_two_ranks_agree_with_one_and_are_bit_equal_among_placements(tmp_path: Path) -> None:
    runs = tuple((TILED, PLACEMENTS[name]) for name in ("cpu", "nvme"))
    by_placement = list(zip(*on_two_ranks(Train(runs), tmp_path / "run"), strict=True))
    for results in by_placement:
        assert_ranks_agree(results)
        for rank in range(WORLD):
            harness.assert_equal(results[rank], by_placement[0][rank])
    one = harness.reference(TILED)
    assert mean_losses(by_placement[0]) == pytest.approx(one.losses, rel=2e-3)
    assert by_placement[0][0].norms == pytest.approx(one.norms, rel=1e-2)


@pytest.mark.ranks
@pytest.mark.parametrize(
    "values",
    [
        {"params": "nvme", "optim": "nvme", "ram": "min"},
        {"params": "cpu", "optim": "cpu", "update": "backward"},
        {"params": "device", "optim": "cpu", "zero": 2},
        # A block that is computed again must be so in the backward of the same tile on all ranks,
        # also where the last tile has tokens on one of them.
        {"params": "nvme", "optim": "nvme", "ram": "min", "checkpointing": False},
        {"params": "nvme", "optim": "nvme", "ram": "min", "checkpointing": True},
    ],
    ids=str,
)
def test_experts_that_one_rank_chose_are_gathered_by_all_with_the_bits_of_the_uncut_stack(
    values: dict[str, Any], tmp_path: Path
) -> None:
    """Each rank has other tokens: of sixteen experts it uses some that the other does not, and some
    are used by none."""
    accumulation = 1 if "update" in values else 2
    recomputed = values.get("checkpointing")
    policy = {name: value for name, value in values.items() if name != "checkpointing"}
    make = models.qwen3_moe
    runs = tuple(
        (
            Training(
                factory, max_norm=None, rows=2, accumulation=accumulation, checkpointing=recomputed
            ),
            policy,
        )
        for factory in (functools.partial(eager, make), functools.partial(tiled, make, 1))
    )
    uncut, cut = zip(*on_two_ranks(Train(runs), tmp_path / "run"), strict=True)
    assert_ranks_agree(cut)
    for rank in range(WORLD):
        harness.assert_equal(cut[rank], uncut[rank])
