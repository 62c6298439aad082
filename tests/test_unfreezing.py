"""A parameter that was frozen when the optimizer took it, and is unfrozen afterwards, trains as in
the plain loop: its states begin at that step."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity as inf
from infinity._src.engine.handle import offload
from infinity.errors import BudgetError
from tests.harness import assert_same, one_thread, values_of
from tests.reference import Delayed, ReferenceAdamW

NVME: dict[str, Any] = {"params": "nvme", "optim": "nvme"}
MIN = {**NVME, "ram": "min"}
STEPS = 7
THAWS, FREEZES = (2, 6), 4
"""Steps before which the loop unfreezes, and freezes again."""


class Net(nn.Sequential):
    """A body and a head. The body is larger, so its chunks are, too."""

    def __init__(self, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        body = nn.Sequential(nn.Linear(8, 96), nn.Linear(96, 96), nn.LayerNorm(96))
        super().__init__(body, nn.Linear(96, 8))
        self.to(dtype)


def body_module(model: Any, flag: bool) -> None:
    model[0].requires_grad_(flag)


def each_parameter(model: Any, flag: bool) -> None:
    for parameter in model[0].parameters():
        parameter.requires_grad = flag


def part_of_a_unit(model: Any, flag: bool) -> None:
    model[0][1].weight.requires_grad_(flag)
    model[0][2].requires_grad_(flag)


def whole_model(model: Any, flag: bool) -> None:
    model.requires_grad_(flag)


Thaw = Callable[[Any, bool], None]


@one_thread()
def loop(model: Any, optimizer: Any, thaw: Thaw, first: int = 0, last: int = STEPS) -> list[float]:
    """Losses of these steps."""
    losses = []
    for step in range(first, last):
        if step in THAWS:
            thaw(model, True)
            if isinstance(optimizer, Late) and not optimizer.taken:
                optimizer.take(model)
        elif step == FREEZES:
            thaw(model, False)
        generator = torch.Generator().manual_seed(step)
        rows = torch.randn(4, 8, generator=generator).to(next(model.parameters()).dtype)
        # A model whose parameters are all frozen still has something to run backward for.
        loss = model(rows.requires_grad_()).float().square().mean()
        loss.backward()
        optimizer.step()
        model.zero_grad()
        losses.append(loss.item())
    return losses


class Late:
    """An optimizer that gets the body's parameters as a group when they are unfrozen, as
    `BaseFinetuning` of Lightning gives them."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self.taken = False

    def take(self, model: Any) -> None:
        group = {"params": list(model[0].parameters()), "lr": 1e-3}
        self._optimizer.add_param_group(group)
        self.taken = True

    def step(self) -> None:
        self._optimizer.step()


@functools.cache
def plain(
    thaw: Thaw, dtype: torch.dtype, late: bool, delayed: bool
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The plain loop: its losses, and the parameters at its end."""
    with one_thread():
        model = Net(dtype)
        thaw(model, False)
        groups: list[dict[str, Any]] = [{"params": list(model.parameters())}]
        if late:
            body = {"params": list(model[0].parameters()), "lr": 1e-3}
            groups = [{"params": list(model[1].parameters())}, body]
        optimizer = ReferenceAdamW(groups, lr=1e-2)
        if delayed:
            lagging = Delayed(optimizer, model, warmup=1)
            return loop(model, lagging, thaw), lagging.newest
        return loop(model, optimizer, thaw), values_of(model)


DELAYED = {"update": "delayed", "delayed_warmup": 1}
SPECULATING = {"update": "backward", "generations": 2}
B16, F32 = torch.bfloat16, torch.float32
CASES: dict[str, tuple[dict[str, Any], Thaw, bool, torch.dtype, bool]] = {
    # policy, what is unfrozen, whether it is frozen before offload, dtype, as a group of its own
    "cpu": ({}, body_module, False, B16, False),
    "cpu, late group": ({}, body_module, True, F32, True),
    "nvme": ({**MIN}, body_module, True, B16, False),
    "nvme, by threads": ({**MIN, "io_backend": "threads"}, whole_model, True, F32, False),
    "nvme, late group": ({**MIN}, each_parameter, True, B16, True),
    "nvme with room": ({**NVME}, part_of_a_unit, False, B16, False),
    "part of a flat on nvme": ({**MIN}, part_of_a_unit, False, F32, False),
    "parameters in ram": ({"optim": "nvme", "ram": "min"}, each_parameter, True, B16, False),
    "parameters on the device": ({**MIN, "params": "device"}, body_module, True, B16, False),
    "compact": ({**MIN, "state": "compact"}, body_module, True, B16, False),
    "backward": ({**MIN, "update": "backward"}, body_module, True, B16, False),
    "backward, part": ({"update": "backward"}, part_of_a_unit, True, F32, False),
    "speculating": ({**MIN, **SPECULATING}, each_parameter, True, B16, False),
    "speculating, part": ({**SPECULATING}, part_of_a_unit, False, B16, False),
    "generations": ({**MIN, "generations": 2}, whole_model, True, F32, False),
    "delayed": ({**MIN, **DELAYED}, body_module, True, B16, False),
    "delayed, part": ({**DELAYED}, part_of_a_unit, True, F32, False),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_unfrozen_trains_as_in_the_plain_loop(name: str, tmp_path: Path) -> None:
    chosen, thaw, before, dtype, late = CASES[name]
    values = {"nvme": tmp_path, **chosen} if "nvme" in chosen.values() else chosen
    with one_thread():
        model = Net(dtype)
        if before:
            thaw(model, False)
        offload(model, inf.Policy(**values))
        if not before:
            thaw(model, False)
        held = model[1].parameters() if late else model.parameters()
        optimizer: Any = inf.AdamW(held, lr=1e-2, weight_decay=0.01)
        losses = loop(model, Late(optimizer) if late else optimizer, thaw)
        found = values_of(model)
        inf.handle(model).close()
    expected = plain(thaw, dtype, late, chosen.get("update") == "delayed")
    if chosen.get("state") == "compact":
        assert losses[0] == expected[0][0]
        assert losses == pytest.approx(expected[0], rel=0.05)
        return
    assert_same((losses, found), expected)


# -- saves -----------------------------------------------------------------------------------------


def opened(chosen: dict[str, Any], *, thawed: bool) -> tuple[Any, Any]:
    """A model whose body is frozen, but for `thawed`; and its optimizer."""
    model = Net(B16)
    body_module(model, False)
    offload(model, inf.Policy(**chosen))
    optimizer = inf.AdamW(model.parameters(), lr=1e-2)
    if thawed:
        # States that the loop has made on its way to another step.
        body_module(model, True)
        loop(model, optimizer, body_module, 0, 2)
    return model, optimizer


@pytest.mark.parametrize(
    ("durable", "thawed"),
    # A durable run is restored before it is trained, so nothing is unfrozen there.
    [(False, False), (False, True), (True, False)],
    ids=["a save", "a save, unfrozen here", "a durable run"],
)
@pytest.mark.parametrize("at", [1, 3, 5], ids=["before", "since", "frozen again"])
def test_a_save_is_restored_whichever_parameters_were_unfrozen(
    at: int, thawed: bool, durable: bool, tmp_path: Path
) -> None:
    """As torch's load_state_dict: a parameter has the states that it had in the save, or none."""
    chosen: dict[str, Any] = {}
    if durable:
        (tmp_path / "run").mkdir()
        chosen = {**MIN, "nvme": tmp_path / "run", "durable": True}
    with one_thread():
        model, optimizer = opened(chosen, thawed=False)
        losses = loop(model, optimizer, body_module, 0, at)
        place = tmp_path / "run" if durable else tmp_path / "save"
        if not durable:
            inf.save(model, optimizer, place).wait()
        inf.handle(model).close()
        model, optimizer = opened(chosen, thawed=thawed)
        inf.restore(model, optimizer, place)
        body_module(model, at == 3)
        losses += loop(model, optimizer, body_module, at)
        found = values_of(model)
        inf.handle(model).close()
    expected = plain(body_module, B16, False, False)
    assert_same((losses, found), expected)


# -- what the loop does otherwise ------------------------------------------------------------------


def test_without_a_training_forward_the_step_makes_the_states(tmp_path: Path) -> None:
    """The loop assigns gradients: torch's optimizers do not ask whether a parameter is frozen."""
    found = []
    for made in (None, {}, {**MIN, "nvme": tmp_path}, {"update": "backward"}):
        model: Any = Net(F32)
        body_module(model, False)
        optimizer: Any = ReferenceAdamW([{"params": list(model.parameters())}], lr=1e-2)
        if made is not None:
            offload(model, inf.Policy(**made))
            optimizer = inf.AdamW(model.parameters(), lr=1e-2)
        for scale in (1.0, 2.0):
            for parameter in model.parameters():
                parameter.grad = torch.full(parameter.shape, scale)
            optimizer.step()
        found.append(values_of(model))
    for other in found[1:]:
        assert_same(other, found[0])


def test_groups_that_a_callback_replaces_are_taken_as_they_are() -> None:
    """A callback of Lightning that restarts sets `param_groups` itself."""
    model = Net(B16)
    body_module(model, False)
    offload(model, inf.Policy())
    optimizer = inf.AdamW(model[1].parameters(), lr=1e-2)
    losses = loop(model, optimizer, body_module, 0, 2)
    group = {**optimizer.param_groups[0], "params": list(model[0].parameters()), "lr": 1e-3}
    optimizer.param_groups = [*optimizer.param_groups, group]
    losses += loop(model, optimizer, body_module, 2)
    expected = plain(body_module, B16, True, False)
    assert losses == expected[0]
    optimizer.param_groups[1]["params"].pop()
    with pytest.raises(ValueError, match=r"0\.2\.bias is in no parameter group any more"):
        optimizer.step()
    optimizer.param_groups[1]["params"].append(torch.nn.Parameter(torch.ones(2)))
    with pytest.raises(ValueError, match=r"shape \(2,\) is not offloaded"):
        optimizer.step()


class Deep(nn.Sequential):
    """A body of several units."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        body = nn.Sequential(*(nn.Linear(64, 64) for _ in range(24)))
        super().__init__(nn.Linear(8, 64), body, nn.Linear(64, 8))
        self.to(B16)
        self[1].requires_grad_(False)


def test_the_budget_counts_what_is_unfrozen_from_then_on(tmp_path: Path) -> None:
    """A refusal names the field, and leaves training as it was. Gradients of what was frozen spill
    where the policy lets them."""

    def middle(model: Any, flag: bool) -> None:
        model[1].requires_grad_(flag)

    def run(ram: int | str, grads: str = "cpu") -> tuple[Any, Any, inf.Handle]:
        where = {"nvme": tmp_path, "unit_bytes_max": 8192, "grads": grads}
        nowhere = {"resident": {"params": 0.0, "optim": 0.0}}
        model = inf.offload(Deep(), inf.Policy(**NVME, **where, **nowhere, ram=ram))
        return model, inf.AdamW(model.parameters(), lr=1e-2), inf.handle(model)

    with pytest.raises(BudgetError) as caught:
        run(1)
    least = caught.value.smallest_bytes
    model, optimizer, handle = run(least)
    losses = loop(model, optimizer, middle, 0, 2)
    middle(model, True)
    for _ in range(2):
        with pytest.raises(BudgetError, match=r"Policy\(ram=\.\.\.\) is .*: raise it") as caught:
            model(torch.ones(4, 8, dtype=B16))
    assert handle.stats().ram_bytes <= least
    middle(model, False)
    loop(model, optimizer, middle, 3, 4)
    handle.close()
    model, optimizer, handle = run("min")
    expected = loop(model, optimizer, middle)
    handle.close()
    assert losses == expected[:2]
    needed = caught.value.smallest_bytes
    for grads, room in (("cpu", needed), ("nvme", needed - (16 << 10))):
        model, optimizer, handle = run(room, grads)
        assert loop(model, optimizer, middle) == expected
        assert least < handle.stats().ram_bytes <= room
        assert (handle.stats().spilled_bytes > 0) == (grads == "nvme")
        handle.close()
