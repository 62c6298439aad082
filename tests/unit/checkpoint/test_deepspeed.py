"""Defects of a ZeRO-3 checkpoint: each is named, and nothing of the files is believed or run."""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from infinity._src.checkpoint.deepspeed import DeepSpeedWeights, load_tensors_of

SAVED = Path(__file__).parents[2] / "data" / "deepspeed_zero3" / "two_ranks_cpu_offload"
OPTIMIZER = "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"
MODEL = "zero_pp_rank_0_mp_rank_00_model_states.pt"


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A copy that can be spoiled."""
    return Path(shutil.copytree(SAVED, tmp_path / "saved")) / "global_step3"


def resaved(folder: Path, name: str, change: Callable[[Any], object]) -> Path:
    """The checkpoint with one file changed."""
    value = load_tensors_of(folder / name)
    if "optimizer_state_dict" in value:  # plain numbers and tensors again
        states = value["optimizer_state_dict"]
        states["zero_stage"], states["loss_scaler"] = 3, None
    change(value)
    torch.save(value, folder / name)
    return folder.parent


def test_names_of_shared_weights_are_all_there() -> None:
    weights = DeepSpeedWeights(SAVED, None)
    assert sorted(weights.names()) == sorted(
        ["embed.weight", "head.weight", "frozen.weight", "norm.weight", "norm.bias", "scale"]
        + [f"blocks.{index}.{name}" for index in range(2) for name in ("weight", "bias")]
    )
    assert torch.equal(weights.read("head.weight"), weights.read("embed.weight"))
    assert weights.shape("head.weight") == (10, 8)
    assert weights.is_floating_point("scale")


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (
            OPTIMIZER,
            lambda v: v["optimizer_state_dict"]["fp32_flat_groups"].pop(),
            "optimizer offloaded to NVMe",
        ),
        (
            OPTIMIZER,
            lambda v: v["optimizer_state_dict"].update(fp32_flat_groups=[torch.empty(0)]),
            "optimizer offloaded to NVMe",
        ),
        (
            OPTIMIZER,
            lambda v: v["optimizer_state_dict"].pop("fp32_flat_groups"),
            "KeyError.*zero_to_fp32",
        ),
        (
            OPTIMIZER,
            lambda v: v["optimizer_state_dict"].update(fp32_flat_groups=["x"]),
            "TypeError.*not a vector",
        ),
        (OPTIMIZER, lambda v: v["optimizer_state_dict"].update(zero_stage=2), "is of ZeRO stage 2"),
        (
            OPTIMIZER,
            lambda v: v["optimizer_state_dict"].update(partition_count=4),
            "written by 4 ranks, and has files of 2",
        ),
        (OPTIMIZER, lambda v: v.clear(), "KeyError"),
        (MODEL, lambda v: v.pop("param_shapes"), "KeyError"),
        (
            MODEL,
            lambda v: v["shared_params"].update({"head.weight": "nowhere"}),
            "KeyError.*nowhere",
        ),
        (
            MODEL,
            lambda v: v["module"].update(dict.fromkeys(v["buffer_names"], "x")),
            "TypeError.*is no tensor",
        ),
        (
            MODEL,
            lambda v: v["param_shapes"].append({"more": torch.Size([4])}),
            "optimizer offloaded to NVMe",
        ),
        (
            MODEL,
            lambda v: v["frozen_param_fragments"].update({"frozen.weight": torch.ones(1)}),
            "all of frozen.weight",
        ),
        (
            MODEL,
            lambda v: v.update(args=argparse.Namespace(a=1)),
            r"names argparse\.Namespace, which is not known.*zero_to_fp32",
        ),
    ],
)
def test_what_is_missing_or_other_is_named(
    name: str, change: Callable[[Any], object], message: str, saved: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        DeepSpeedWeights(resaved(saved, name, change), None)


def test_missing_files_are_named(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no file `latest`"):
        DeepSpeedWeights(tmp_path, None)
    with pytest.raises(FileNotFoundError, match="has no folder global_step4"):
        DeepSpeedWeights(saved.parent, "global_step4")
    for tag in ("../saved", "/", "..", ""):
        with pytest.raises(ValueError, match="a path is refused"):
            DeepSpeedWeights(saved.parent, tag)
    (saved / "zero_pp_rank_1_mp_rank_00_model_states.pt").unlink()
    with pytest.raises(ValueError, match="of 2 ranks and model states of 1"):
        DeepSpeedWeights(saved.parent, None)
    (saved / OPTIMIZER).rename(saved / OPTIMIZER.replace("rank_0_", "rank_7_"))
    with pytest.raises(FileNotFoundError, match=r"of ranks \[1, 7\]"):
        DeepSpeedWeights(saved.parent, None)
    (saved / OPTIMIZER.replace("rank_0_", "rank_7_")).rename(
        saved / OPTIMIZER.replace("mp_rank_00", "mp_rank_01")
    )
    with pytest.raises(ValueError, match="model-parallel"):
        DeepSpeedWeights(saved.parent, None)


class Bomb:
    """Runs a command when it is unpickled."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> Any:
        return os.system, (self.command,)


@pytest.mark.parametrize("name", [OPTIMIZER, MODEL])
def test_a_hostile_file_runs_nothing(name: str, saved: Path, tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    with pytest.raises(ValueError, match=r"is refused: .*(posix|os)\.system"):
        DeepSpeedWeights(resaved(saved, name, lambda v: v.update(x=Bomb(f"touch {mark}"))), None)
    assert not mark.exists()
    (saved / name).write_bytes((saved / name).read_bytes()[:2000])
    with pytest.raises(ValueError, match="is refused"):
        DeepSpeedWeights(saved, None)
