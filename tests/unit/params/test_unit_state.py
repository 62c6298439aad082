"""A unit's state, in every update mode: what the enum says of memory, version and fills holds."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch

import infinity as inf
from infinity._src.params.unit import TRANSITIONS, UnitState
from tests import harness, test_call_order
from tests.call_order import recording
from tests.device import simulated

MODES = {
    **test_call_order.MODES,
    "whole_params": {"params": "device", "optim": "nvme", "ram": "min"},
}


def assert_agrees(unsharder: Any) -> None:
    """The state and what belongs to it agree, while no call is under way."""
    for unit in unsharder.units:
        stored = sum(flat.tensor.untyped_storage().size() for flat in unit.flats)
        has_memory = unit.state is not UnitState.SHARDED
        assert (unit in unsharder._gathered) == has_memory, unit
        assert stored == (unit.size_bytes if has_memory else 0), unit
        assert (unit in unsharder._pending) == (unit.state is UnitState.PENDING), unit
        assert unit.refs == 0 or unit.state is UnitState.UNSHARDED, unit
    assert unsharder._gathered_bytes == sum(unit.size_bytes for unit in unsharder._gathered)


def train(name: str, place: Path) -> tuple[set[Any], set[UnitState]]:
    """Three steps with all that is done between them; the transitions and states that were seen."""
    torch.manual_seed(0)
    seen: set[UnitState] = set()
    values = {"nvme": place, "units": ["Block"], **MODES[name]}
    on_device = name == "device"
    computer = simulated(pytest.MonkeyPatch()) if on_device else contextlib.nullcontext()
    with harness.one_thread(), computer, recording() as recorder:
        model = test_call_order.Small()
        inf.offload(model, inf.Policy(**values))
        handle = inf.handle(model)
        unsharder = handle.unsharder

        def look(*_: Any) -> None:
            assert_agrees(unsharder)
            seen.update(unit.state for unit in unsharder.units)

        for block in model.blocks:
            block.register_forward_hook(look)
        optimizer = inf.AdamW(model.parameters(), lr=1e-3)
        for _ in range(3):
            look()
            loss = model(torch.randn(2, test_call_order.WIDTH))
            look()
            loss.backward()
            look()
            optimizer.step()
            look()
            optimizer.zero_grad()
            look()
        with torch.no_grad():
            model(torch.randn(2, test_call_order.WIDTH))
            look()
            parameter = model.head.weight
            with handle.gather(parameter):
                look()
                parameter.mul_(0.5)
            look()
        model.state_dict()["blocks.0.linear.weight"].clone()
        look()
        handle.close()
        assert all(unit.state is UnitState.SHARDED for unit in unsharder.units)
    return recorder.transitions, seen


@pytest.mark.parametrize("name", MODES)
def test_state_memory_and_fills_agree(name: str, tmp_path: Path) -> None:
    transitions, seen = train(name, tmp_path)
    assert transitions <= TRANSITIONS
    assert {UnitState.SHARDED, UnitState.UNSHARDED} <= seen


def test_every_drawn_transition_happens(tmp_path: Path) -> None:
    found: set[Any] = set()
    for number, name in enumerate(("deferred", "speculative")):
        place = tmp_path / str(number)
        place.mkdir()
        found |= train(name, place)[0]
    found |= {  # what follows takes faults or timing: a read that fails, and a prefetch given up
        (UnitState.STALE, UnitState.SHARDED),
        (UnitState.PENDING, UnitState.SHARDED),
        (UnitState.PENDING, UnitState.STALE),
    }
    assert found == TRANSITIONS


def test_a_transition_that_is_not_drawn_is_seen(tmp_path: Path) -> None:
    with recording():
        model = test_call_order.Small()
        inf.offload(model, inf.Policy(params="cpu", optim="cpu"))
        unit = inf.handle(model).units[0]
        assert unit.state is UnitState.SHARDED
        with pytest.raises(AssertionError, match=r"SHARDED -> UnitState\.UNSHARDED"):
            unit.state = UnitState.UNSHARDED
        inf.handle(model).close()
