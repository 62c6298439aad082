"""Spilled gradients against gradients in memory: any sequence of what backwards and loops do gives
the same bits."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from infinity._src.memory.flat_layout import plan_flat
from infinity._src.params.accumulator import (
    AccumulatorState,
    GradAccumulator,
    GradRegistry,
)
from infinity._src.params.buffers import GradBuffers
from infinity._src.params.reduce import GradReducer
from infinity._src.params.spill import SpilledGradients
from infinity._src.params.unit import Flat, Param, Unit
from infinity.aio import Priority
from infinity.errors import AioError, DeviceFailedError

SHAPES = ((5, 7), (130,), (64, 3))


class Job:
    """A transfer that happens when somebody waits for it: as late as it may."""

    def __init__(self, drive: Drive, target: int, source: int, size_bytes: int) -> None:
        self._drive, self._move, self._ended = drive, (target, source, size_bytes), False
        self.failed = False
        drive.queue.append(self)

    @property
    def done(self) -> bool:
        return self._ended

    @property
    def filled(self) -> bool:
        return self._ended

    def run(self) -> None:
        if not self._ended:
            self._ended = True
            self.failed = self._drive.broken
            if not self.failed:
                ctypes.memmove(*self._move)

    def wait(self, timeout: float | None = None) -> None:
        del timeout
        while not self._ended:  # jobs run in order
            self._drive.queue.pop(0).run()
        if self.failed:
            raise DeviceFailedError("broken", path="/drive", op="write")

    wait_filled = wait


@dataclasses.dataclass
class Drive:
    """Stands for `StateStore`: the gradient section of every flat, in separate memory."""

    sections: dict[Flat, torch.Tensor] = dataclasses.field(default_factory=dict)
    queue: list[Job] = dataclasses.field(default_factory=list)
    broken: bool = False
    stored: int = 0
    fetched: int = 0
    grads_read_bytes: int = 0
    grads_written_bytes: int = 0

    def __getitem__(self, flat: Flat) -> Any:
        return SimpleNamespace(sections=("hi", "grad"))

    def _at(self, flat: Flat) -> torch.Tensor:
        return self.sections.setdefault(
            flat, torch.full((flat.layout.shard_numel * 2,), 255, dtype=torch.uint8)
        )

    def fetch(self, flat: Flat, section: int, address: int, *, priority: Priority) -> Job:
        assert section == 1
        assert priority in (Priority.DEMAND, Priority.PREFETCH)
        self.fetched += 1
        rest = self._at(flat)
        return Job(self, address, rest.data_ptr(), rest.numel())

    def store(self, flat: Flat, section: int, address: int) -> Job:
        assert section == 1
        self.stored += 1
        rest = self._at(flat)
        return Job(self, rest.data_ptr(), address, rest.numel())

    def recover(self) -> None:
        """Do nothing: `broken` decides whether the drive accepts writes again."""


class Model:
    """Units with one flat each, and their accumulators: spilled (`drive`) or in memory."""

    def __init__(self, units: int, drive: Drive | None, windows: int = 3) -> None:
        self.registry = GradRegistry()
        self.units = [Unit(index, f"unit.{index}", ()) for index in range(units)]
        self.params: list[Param] = []
        self.memory = GradBuffers(0, None)
        self.grads = GradReducer(
            self.units,
            buffers=self.memory,
            registry=self.registry,
            comm=SimpleNamespace(world=1),  # type: ignore[arg-type]
            mode=SimpleNamespace(on_gradient=None),  # type: ignore[arg-type]
        )
        for unit in self.units:
            numels = tuple(torch.Size(shape).numel() for shape in SHAPES)
            layout = plan_flat(numels, 2)
            flat = Flat(unit, 0, torch.bfloat16, True, layout, torch.empty(0, dtype=torch.bfloat16))
            unit.flats.append(flat)
            for accumulator, shape in enumerate(SHAPES):
                name = f"{unit.name}.{accumulator}"
                size = torch.Size(shape)
                param = Param(
                    len(self.params),
                    name,
                    (name,),
                    [],
                    size,
                    torch.bfloat16,
                    size.numel(),
                    layout.offsets[accumulator],
                    flat,
                    unit,
                    accumulator,
                )
                param.at_rest = SimpleNamespace(grad=None)  # type: ignore[assignment]
                flat.params.append(param)
                self.params.append(param)
        flats = [flat for unit in self.units for flat in unit.flats]
        if drive is not None:
            size_bytes = max(self.memory.shard_bytes(flat) for flat in flats)
            self.memory.spill(flats, drive, staging_bytes=windows * size_bytes)  # type: ignore[arg-type]
        self.memory.allocate(flats)
        for param in self.params:
            param.grad = self.registry.add(
                param.name, param.shape, self.memory.shard_of(param), torch.device("cpu")
            )
            self.memory.place_accumulator(param)
        self.registry.reserve()

    @property
    def spilled(self) -> SpilledGradients:
        found = self.memory.spilled
        assert found is not None
        return found

    def accumulator(self, index: int) -> GradAccumulator:
        found = self.params[index % len(self.params)].grad
        assert found is not None
        return found

    def accumulate(self, index: int, seed: int) -> None:
        param, accumulator = self.params[index % len(self.params)], self.accumulator(index)
        grad = torch.randn(param.shape, generator=torch.Generator().manual_seed(seed)).bfloat16()
        accumulator.reconcile(param.at_rest.grad)
        accumulator.accumulate(grad)
        param.at_rest.grad = accumulator.proxy

    def do(self, what: str, index: int, seed: int) -> Any:
        """One operation; what it returns is compared."""
        param, accumulator = self.params[index % len(self.params)], self.accumulator(index)
        unit = self.units[index % len(self.units)]
        told: dict[str, Callable[[], None]] = {
            "prefetch": lambda: self.grads.prefetch([unit]),
            "done": lambda: self.grads.unit_done(unit),
            "end": self.grads.backward_end,
            "flush": self.grads.flush_spilled,
            "reset": self.grads.reset,
        }
        if what in told:
            told[what]()
        elif what == "accumulate":
            self.accumulate(index, seed)
        elif what == "backward":
            for each in reversed(self.units):
                self.grads.prefetch([each])
                for at in range(len(each.flats[0].params)):
                    if (seed >> at) % 4:
                        self.accumulate(each.index * len(SHAPES) + at, seed + at)
                self.grads.unit_done(each)
            self.grads.backward_end()
        elif what == "clear":
            for each in self.params:
                each.at_rest.grad = None
        elif what == "clear one":
            param.at_rest.grad = None
        elif what == "assign":
            param.at_rest.grad = torch.full(param.shape, float(seed % 7)).bfloat16()
            accumulator.reconcile(param.at_rest.grad)
            param.at_rest.grad = accumulator.proxy
        elif param.at_rest.grad is not None:
            return self.use(what, accumulator, seed)
        return None

    @staticmethod
    def use(what: str, accumulator: GradAccumulator, seed: int) -> Any:
        """Use a gradient that is there as a loop does. Returns the values that the loop sees."""
        if what == "zero":
            accumulator.zero()
        elif what == "scale" and len(accumulator.log) < 4:
            accumulator.scale("mul", 0.5 + seed % 3)
        elif what == "norm":
            return accumulator.norm(1.0 if seed % 2 else 2.0)
        elif what == "finite":
            return accumulator.finite()
        elif what == "read":
            return accumulator.materialize().flatten().tolist()
        return None

    def held(self) -> list[Any]:
        """Every gradient that there is, and its norm."""
        return [
            (accumulator.norm(), accumulator.materialize().flatten().tolist())
            for param in self.params
            if param.at_rest.grad is not None
            and (accumulator := param.grad) is not None
            and accumulator.state is AccumulatorState.HELD
        ]


TOLD = ("prefetch", "done", "end", "flush", "reset")
DONE = (
    "accumulate",
    "accumulate",
    "backward",
    "clear",
    "clear one",
    "assign",
    "zero",
    "scale",
    "norm",
    "finite",
    "read",
)
OPERATIONS = st.tuples(st.sampled_from((*TOLD, *DONE)), st.integers(0, 14), st.integers(0, 1000))


@settings(max_examples=150, deadline=None)
@given(st.lists(OPERATIONS, max_size=40), st.integers(1, 3))
def test_whatever_happens_spilled_gradients_are_those_in_memory(
    operations: list[tuple[str, int, int]], windows: int
) -> None:
    torch.set_num_threads(1)
    plain, spilled = Model(5, None), Model(5, Drive(), windows)
    for operation in operations:
        assert spilled.do(*operation) == plain.do(*operation), operation
    assert spilled.held() == plain.held()


def test_a_micro_batch_writes_each_gradient_once_and_reads_it_unless_it_is_the_first() -> None:
    drive = Drive()
    model = Model(6, drive)
    model.do("backward", 0, 1)
    model.grads.flush_spilled()
    assert (drive.stored, drive.fetched) == (6, 0)
    model.do("backward", 0, 5)
    model.grads.flush_spilled()
    assert drive.stored == 12
    assert drive.fetched == 6
    model.do("clear", 0, 0)
    model.do("backward", 0, 9)
    model.grads.flush_spilled()
    assert (drive.stored, drive.fetched) == (18, 6)


@pytest.mark.parametrize("micro_batches", [1, 2, 3])
def test_what_moves_is_counted_and_so_is_what_the_update_reads(micro_batches: int) -> None:
    drive = Drive()
    model = Model(6, drive)
    for step in (1, 2):
        for _ in range(micro_batches):
            model.do("backward", 0, 1)
        # a flat is one chunk, of whole blocks
        assert drive.grads_written_bytes == drive.stored * 4096
        for _ in range(2):  # a step flushes twice, and the update reads once
            model.grads.flush_spilled()
        assert (drive.stored, drive.fetched) == (
            6 * step * micro_batches,
            6 * step * (micro_batches - 1),
        )
        assert drive.grads_written_bytes == drive.stored * 4096
        assert drive.grads_read_bytes == (drive.fetched + 6 * step) * 4096
        model.do("clear", 0, 0)
    model.do("backward", 0, 1)
    model.do("clear", 0, 0)  # and no step: no update reads them
    model.grads.flush_spilled()
    assert drive.grads_read_bytes == (drive.fetched + 12) * 4096


def test_an_update_of_one_unit_reads_the_gradients_of_that_unit() -> None:
    drive = Drive()
    model = Model(6, drive)
    model.do("backward", 0, 1)
    model.grads.flush_spilled(model.units[2])
    assert drive.grads_read_bytes == 4096
    model.grads.flush_spilled(model.units[2])
    assert drive.grads_read_bytes == 4096
    model.grads.flush_spilled()
    assert drive.grads_read_bytes == 6 * 4096


def test_norms_and_clipping_need_no_values() -> None:
    drive = Drive()
    model = Model(6, drive)
    model.do("backward", 0, 7)
    before = drive.fetched
    for param in model.params:
        if param.at_rest.grad is not None:
            assert param.grad is not None
            assert param.grad.norm() > 0
            param.grad.scale("mul", 0.25)
            assert param.grad.finite()
    assert drive.fetched == before


def test_a_gradient_that_was_put_aside_is_no_silent_zero() -> None:
    model = Model(5, Drive())
    model.do("backward", 0, 7)
    accumulator = model.accumulator(12)
    kept, model.params[12].at_rest.grad = model.params[12].at_rest.grad, None
    for index in (13, 14):
        model.params[index].at_rest.grad = None
    model.do("backward", 0, 4)  # without a gradient for the first parameter of each flat
    with pytest.raises(RuntimeError, match="newer gradients have overwritten"):
        accumulator.reconcile(kept)


def test_a_write_that_fails_is_raised_and_its_window_keeps_the_values() -> None:
    drive = Drive()
    plain, model = Model(5, None), Model(5, drive)
    for each in (plain, model):
        each.do("backward", 0, 7)
    model.grads.flush_spilled()
    for each in (plain, model):
        each.accumulate(14, 77)
        each.accumulate(13, 78)
    drive.broken = True
    model.grads.unit_done(model.units[4])
    with pytest.raises(AioError, match=r"spilled gradients of unit\.4 cannot be written"):
        model.grads.flush_spilled()
    with pytest.raises(AioError):  # and again, as long as it lasts
        model.grads.flush_spilled()
    assert model.accumulator(14).materialize().equal(plain.accumulator(14).materialize())
    drive.broken = False
    model.grads.flush_spilled()
    assert model.held() == plain.held()


def test_a_read_that_fails_names_the_unit_and_can_be_tried_again() -> None:
    drive = Drive()
    plain, model = Model(5, None), Model(5, drive)
    for each in (plain, model):
        each.do("backward", 0, 7)
    model.grads.flush_spilled()
    drive.broken = True
    with pytest.raises(AioError, match=r"gradients of unit\.4 cannot be read back"):
        model.accumulator(14).materialize()
    drive.broken = False
    assert model.held() == plain.held()
