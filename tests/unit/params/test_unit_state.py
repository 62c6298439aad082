"""A unit's state, in every update mode: memory, version and fill are there as the state says, and
the arrows of `UnitState` are the ways that units take."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import signal
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import infinity as inf
from infinity._src.engine.handle import offload
from infinity._src.params.unit import TRANSITIONS, Unit, UnitState
from infinity._src.params.unshard import AT_REST
from infinity.aio import Fault, Priority, Seam
from infinity.errors import AioError
from tests import harness, models, test_call_order
from tests.call_order import recording
from tests.device import simulated
from tests.distributed.ranks import on_ranks

MODES = {
    **test_call_order.MODES,
    "whole_params": {"params": "device", "optim": "nvme", "ram": "min"},
}
Transition = tuple[UnitState, UnitState]


def assert_as_stated(unsharder: Any) -> None:
    """Each unit has what its state promises, while no call is under way."""
    for unit in unsharder.units:
        stored = sum(flat.tensor.untyped_storage().size() for flat in unit.flats)
        has_memory = unit.state is not UnitState.SHARDED
        assert stored == (unit.size_bytes if has_memory else 0), unit
        assert unit.refs == 0 or unit.state is UnitState.UNSHARDED, unit
    with_memory = {unit for unit in unsharder.units if unit.state is not UnitState.SHARDED}
    assert unsharder._versions.keys() == with_memory
    assert unsharder._gathered_bytes == sum(unit.size_bytes for unit in with_memory)
    filling = {unit for unit in unsharder.units if unit.state is UnitState.PENDING}
    assert unsharder._pending._by_unit.keys() == filling


def train(values: dict[str, Any]) -> tuple[set[Transition], set[UnitState]]:
    """Three steps with all that is done between them; the transitions and states that were seen."""
    torch.manual_seed(0)
    seen: set[UnitState] = set()
    with harness.one_thread(), recording() as recorder:
        model = test_call_order.Small()
        inf.offload(model, inf.Policy(units=["Block"], **values))
        handle = inf.handle(model)
        unsharder = handle.unsharder

        def look(*_: Any) -> None:
            assert_as_stated(unsharder)
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


def read_that_fails(place: Path) -> set[Transition]:
    """The transitions of a forward whose reads fail: the fill is cancelled, its memory freed."""
    policy = inf.Policy(nvme=place, units=["Block"], **MODES["deferred"])
    with recording() as recorder:
        fault = Fault("read", 1, persistent=True)
        model = offload(test_call_order.Small(), policy, _seam=Seam(fault=fault))
        handle = inf.handle(model)
        with pytest.raises(AioError, match="cannot be gathered"):
            model(torch.randn(2, test_call_order.WIDTH))
        assert_as_stated(handle.unsharder)
        handle.close()
    return recorder.transitions


@dataclasses.dataclass(frozen=True)
class TrainOnRank:
    """Trains as `train` does, as one of several ranks."""

    values: dict[str, Any]

    def __call__(self, rank: int, place: Path) -> set[tuple[str, str]]:
        drive = place / str(rank)
        drive.mkdir()
        transitions, _ = train({**self.values, "nvme": drive})
        return {(before.name, after.name) for before, after in transitions}


@functools.cache
def trained(name: str) -> tuple[set[Transition], set[UnitState]]:
    """Train in a mode, on one rank."""
    on_device = simulated(pytest.MonkeyPatch()) if name == "device" else contextlib.nullcontext()
    with on_device, tempfile.TemporaryDirectory() as place:
        return train({**MODES[name], "nvme": place})


@pytest.mark.parametrize("name", MODES)
def test_units_have_what_their_state_says(name: str) -> None:
    transitions, seen = trained(name)
    assert transitions <= set(TRANSITIONS)
    assert {UnitState.SHARDED, UnitState.UNSHARDED} <= seen


@pytest.mark.parametrize("values", [{}, {"qwz": True}, {"params": "device"}], ids=str)
def test_units_of_two_ranks_have_what_their_state_says(
    values: dict[str, Any], tmp_path: Path
) -> None:
    taken = on_ranks(TrainOnRank({**MODES["deferred"], **values}), tmp_path / "ranks", 2)
    assert taken[0] == taken[1], "what is evicted follows the program alone"
    assert {("STALE", "PENDING"), ("PENDING", "UNSHARDED")} <= taken[0]


def test_every_drawn_transition_happens(tmp_path: Path) -> None:
    found = read_that_fails(tmp_path) | trained("deferred")[0] | trained("speculative")[0]
    assert found == set(TRANSITIONS)


def test_no_other_transition_happens() -> None:
    for before in UnitState:
        for after in UnitState:
            unit = Unit(0, "block", (), state=before)
            if (before, after) in TRANSITIONS:
                unit.move_to(after)
                assert unit.state is after
            else:
                with pytest.raises(AssertionError, match=f"block: {before} -> {after}"):
                    unit.move_to(after)
                assert unit.state is before


def test_nothing_but_move_to_writes_a_state() -> None:
    unit = Unit(0, "block", ())
    with recording(), pytest.raises(AssertionError, match="is `move_to`'s to write"):
        unit.state = UnitState.STALE


def test_an_interrupt_while_a_unit_is_evicted_is_raised_after_its_reads_have_ended(
    tmp_path: Path,
) -> None:
    policy = inf.Policy(params="nvme", optim="nvme", nvme=tmp_path, ram="min")
    seam = Seam(read_bytes_per_s=1e4)  # most of a second for the smallest unit
    model = offload(models.llama(layers=2).bfloat16(), policy, _seam=seam)
    unsharder = inf.handle(model).unsharder
    unit = unsharder.units[0]

    def busy_s() -> float:
        return unsharder._executor.stats().drives[0].busy_s

    before = busy_s()
    unsharder._allocate_and_fill(unit, Priority.PREFETCH, AT_REST)
    (ticket,) = unsharder._pending._by_unit[unit].tickets
    while busy_s() == before:  # a read that no drive has begun is given up at once
        assert not ticket.filled
        time.sleep(0.001)
    timer = threading.Timer(0.03, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        unsharder._evict(unit)
    timer.join()
    assert ticket.filled
    assert unit.state is UnitState.SHARDED
    inf.handle(model).close()
