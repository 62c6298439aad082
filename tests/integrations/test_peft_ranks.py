"""Adapters on two ranks: files, merge, and a resume on one rank."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import get_peft_model_state_dict
from safetensors.torch import load_file

import infinity as inf
from infinity.integrations.accelerate import attach
from infinity.integrations.peft import (
    export_merged,
    load_adapter,
    merge,
    save_adapters,
    tile_experts,
)
from tests import models
from tests.distributed.ranks import on_ranks
from tests.integrations.accelerate_script import accelerator, assert_same, policy
from tests.integrations.test_peft import adapted, in_eager, states_of_adapters, trained

pytestmark = pytest.mark.integrations


def prepared(own: Any, place: Path, kind: str) -> tuple[Any, Any]:
    model: Any = adapted("experts" if kind == "tiled" else kind)
    if kind == "tiled":
        tile_experts(in_eager(model), experts=1)
    inf.offload(model, policy(place / "nvme"))
    return attach(own).prepare(model, inf.AdamW(model.parameters(), lr=1e-2))


@dataclasses.dataclass(frozen=True)
class Adapters:
    """Train on a rank's own rows, save in every way, and merge."""

    kind: str

    def __call__(self, rank: int, place: Path) -> tuple[Any, Any]:
        batches = models.token_batches(4, seed=rank)
        with accelerator() as own:
            model, optimizer = prepared(own, place, self.kind)
            trained(model, optimizer, batches[:2])
            own.save_state(place / "ckpt")
            saved = states_of_adapters(model)
            save_adapters(model, place / "adapters")
            # Both ranks see the files of the other now.
            load_adapter(model, place / "adapters")
            losses = trained(model, optimizer, batches[2:])
            ended = states_of_adapters(model)
            own.free_memory()
        with accelerator() as own:
            model, optimizer = prepared(own, place, self.kind)
            own.load_state(place / "ckpt")
            assert trained(model, optimizer, batches[2:]) == losses
            assert_same(states_of_adapters(model), ended)
            export_merged(merge(model), place / "merged")
            own.free_memory()
        return saved, ended


@pytest.mark.parametrize("kind", ["lora", "experts", "tiled"])
def test_two_ranks_save_resume_and_merge_and_one_goes_on(kind: str, tmp_path: Path) -> None:
    (saved, ended), other = on_ranks(Adapters(kind), tmp_path / "ranks", 2)
    assert_same(other[0], saved)
    assert_same(other[1], ended)
    plain: Any = adapted("lora" if kind == "lora" else "experts")
    with torch.no_grad():
        for name, param in plain.named_parameters():
            if param.requires_grad:
                param.copy_(saved[name])
    assert_same(
        load_file(tmp_path / "ranks" / "adapters" / "adapter_model.safetensors"),
        get_peft_model_state_dict(copy.deepcopy(plain)),
    )
    with torch.no_grad():
        for name, param in plain.named_parameters():
            if param.requires_grad:
                param.copy_(ended[name])
    assert_same(
        load_file(tmp_path / "ranks" / "merged" / "model.safetensors"),
        dict(plain.merge_and_unload().state_dict()),
    )
    with accelerator() as own:
        model, _ = prepared(own, tmp_path, kind)
        own.load_state(tmp_path / "ranks" / "ckpt")
        assert_same(states_of_adapters(model), saved)
        own.free_memory()
