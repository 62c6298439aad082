"""A unit's memory on the device: gathers without enough memory, and use by several streams."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity as inf
from infinity._src.base.torch_compat import resize_storage, storage_size
from infinity._src.engine import build
from infinity._src.engine.handle import offload
from infinity._src.memory.device import Device
from infinity._src.params import unsharded_param
from infinity._src.params.unit import SHARDED, UNSHARDED, Unit
from infinity._src.params.unshard import PendingUnshards, Unsharder
from infinity.aio import Priority
from infinity.errors import GraphCaptureUnsupported
from tests.simulated import Simulated

CPU = torch.device("cpu")


class Place(Device):
    """A device that records what happens to memory; `here`: the current compute stream."""

    def __init__(self, driver: Any = None) -> None:
        self.here = 0
        super().__init__(CPU, driver, stream=lambda: self.here)
        self.pool_open = False
        self.events: list[str] = []
        self.noted: list[tuple[int, int]] = []  # address, stream

    @contextlib.contextmanager
    def allocation(self) -> Iterator[None]:
        self.pool_open = True
        try:
            yield
        finally:
            self.pool_open = False

    def free_cache(self) -> None:
        self.events.append("free_cache in the pool" if self.pool_open else "free_cache")

    def note_use(self, tensor: torch.Tensor) -> None:
        self.noted.append((tensor.data_ptr(), self.here))


class Allocator:
    """Growing storages: the next `failures` fail; shrinking always works."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, place: Place) -> None:
        self.failures = 0
        self._place = place
        monkeypatch.setattr(unsharded_param, "resize_storage", self.resize)

    def resize(self, tensor: torch.Tensor, size_bytes: int) -> None:
        if size_bytes > storage_size(tensor):
            self._place.events.append("in the pool" if self._place.pool_open else "outside")
            if self.failures:
                self.failures -= 1
                raise torch.OutOfMemoryError("Tried to allocate 2.00 MiB")
        resize_storage(tensor, size_bytes)


class Stack(nn.Module):
    """Three layers, each a unit; `before` is called before each with its number."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.before: Any = lambda number: None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            self.before(number)
            x = layer(x)
        return x


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Place:
    """The device of the models that are offloaded."""
    found = Place()
    monkeypatch.setattr(build, "open_device", lambda _device, *, check: found)
    return found


@pytest.fixture
def model(place: Place, tmp_path: Path) -> Iterator[Stack]:
    """An offloaded model whose units hold memory only while they are used."""
    found = Stack()
    offload(found, inf.Policy(nvme=tmp_path, params="nvme", optim="nvme", units=["Linear"]))
    handle = inf.handle(found)
    handle.unsharder.gathered_bytes_max = 0
    yield found
    handle.close()


def units_of(model: nn.Module) -> list[Unit]:
    return inf.handle(model).units


def with_room_for_all(model: nn.Module) -> tuple[list[Unit], Unsharder]:
    """Let all units of the model be gathered at once, as far as the engine's bound decides."""
    units, unsharder = units_of(model), inf.handle(model).unsharder
    unsharder.gathered_bytes_max = sum(unit.size_bytes for unit in units)
    return units, unsharder


def step(model: Stack) -> torch.Tensor:
    result: torch.Tensor = model(torch.ones(2, 16)).sum()
    return result


def test_set_up_leaves_torch_no_unused_block(model: Stack, place: Place) -> None:
    assert place.events == ["free_cache"]


def test_a_gather_that_finds_no_room_frees_torchs_cache_and_tries_once_more(
    model: Stack, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = step(model)
    allocator = Allocator(monkeypatch, place)
    place.events.clear()
    allocator.failures = 1
    assert torch.equal(step(model), expected)
    # The cache is freed outside of the pool, inside which torch 2.10 to 2.12 would free nothing.
    assert place.events[:3] == ["in the pool", "free_cache", "in the pool"]
    assert place.events.count("free_cache") == 1


def test_a_gather_that_finds_no_room_at_all_says_what_holds_it_and_leaves_a_clean_state(
    model: Stack, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = step(model)
    allocator = Allocator(monkeypatch, place)
    place.events.clear()
    allocator.failures = 2
    with pytest.raises(torch.OutOfMemoryError) as caught:
        step(model)
    assert place.events.count("free_cache") == 1, "one retry, no more"
    text = str(caught.value)
    for part in (
        "layers.0 cannot be gathered: cpu lacks memory for its 8 KiB, also after torch's cache",
        "Gathered units hold 0 B (at most 0 B), and activations, gradients and other tensors 0 B",
        "Make micro-batches smaller, checkpoint activations, or divide",
        "torch says: Tried to allocate 2.00 MiB",
    ):
        assert part in text
    for unit in units_of(model):
        assert unit.state is SHARDED
        assert all(storage_size(flat.tensor) == 0 for flat in unit.flats)
    assert torch.equal(step(model), expected)


def test_units_that_stay_for_the_next_slice_give_way_where_there_is_no_room(
    place: Place,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(Stack())
    model = inf.microbatched(copy.deepcopy(plain), 3, blocks=["Stack"])
    offload(model, inf.Policy(nvme=tmp_path, params="nvme", optim="nvme", units=["Linear"]))
    units, _ = with_room_for_all(model)
    x = torch.randn(6, 16)
    expected = torch.cat([plain(part) for part in x.tensor_split(3)])
    allocator = Allocator(monkeypatch, place)

    def short(number: int) -> None:
        # In the first slice the allocation for the last layer fails, and another unit is evicted.
        if number == 2 and units[2].state is SHARDED and not caplog.records:
            allocator.failures = 4

    block: Any = model[0]
    block.before = short
    before = inf.handle(model).stats().demands
    assert torch.equal(model(x), expected)
    assert "to keep units gathered from slice to slice" in caplog.text
    assert len(caplog.records) == 1
    # No layer stays gathered from then on: each of three slices demands each of three layers.
    assert inf.handle(model).stats().demands - before == 9
    block.before = lambda number: None
    model(x).sum().backward()
    assert inf.handle(model).stats().demands - before == 9 + 3 + 3, "the next pass keeps them again"
    inf.handle(model).close()


def test_a_gather_that_finds_no_room_takes_that_of_idle_units(
    model: Stack, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    units, unsharder = with_room_for_all(model)
    with torch.no_grad():
        expected = step(model)
        unsharder.invalidate(units[0])
        assert [unit.state for unit in units] == [SHARDED, UNSHARDED, UNSHARDED]
        allocator = Allocator(monkeypatch, place)
        evicted: list[Unit] = []
        evict = unsharded_param.evict
        monkeypatch.setattr(
            unsharded_param,
            "evict",
            lambda unit, device=None: (evicted.append(unit), evict(unit, device)),
        )
        # Two failures for the first attempt, and two for the attempt after the first eviction.
        allocator.failures = 4
        assert torch.equal(step(model), expected)
        # The unit itself is registered as gathered by then, and must not be evicted as idle.
        assert evicted == [units[2], units[1]]


def test_a_prefetch_that_finds_no_room_waits_for_the_demand_and_is_told_once(
    model: Stack, place: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    units, unsharder = with_room_for_all(model)
    with torch.no_grad():
        step(model)
        expected = step(model)
        allocator = Allocator(monkeypatch, place)
        grow = allocator.resize
        demanded: list[int] = []
        model.before = demanded.append

        def not_ahead(tensor: torch.Tensor, size_bytes: int) -> None:
            ahead = next(unit.index for unit in units if unit.flats[0].tensor is tensor)
            allocator.failures = int(size_bytes > 0 and ahead > len(demanded) - 1)
            grow(tensor, size_bytes)

        monkeypatch.setattr(unsharded_param, "resize_storage", not_ahead)
        for _ in range(2):
            demanded.clear()
            for unit in units:
                unsharder.invalidate(unit)
            assert torch.equal(step(model), expected)
    told = [each for each in caplog.messages if "on demand, not ahead" in each]
    assert len(told) == 1
    assert "layers.1 cannot be gathered" in told[0]


def test_a_pass_in_which_a_prefetch_found_no_room_prefetches_no_more(
    model: Stack, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failed attempt makes the device wait, and the next one would fail as well."""
    units, unsharder = with_room_for_all(model)
    with torch.no_grad():
        step(model)
        expected = step(model)
        for unit in units:
            unsharder.invalidate(unit)
        allocator = Allocator(monkeypatch, place)
        place.events.clear()

        def before(number: int) -> None:
            # By then layers.0 has its memory, and its prefetches follow.
            if number == 0:
                unsharder.invalidate(units[0])

        model.before = before
        states = []
        prefetch = unsharder.prefetch_ahead

        def ahead() -> None:
            allocator.failures = 1 if not states else 0
            prefetch()
            allocator.failures = 0
            states.append([unit.state for unit in units])

        monkeypatch.setattr(unsharder, "prefetch_ahead", ahead)
        assert torch.equal(step(model), expected)
        assert states[0][1:] == [SHARDED, SHARDED]
        assert states[1][2] is SHARDED, "the next prefetch is not attempted"
        assert "free_cache" not in place.events, "no demand waits for the unit yet"
        assert torch.equal(step(model), expected)
        assert unsharder._prefetches


def test_a_demand_takes_the_memory_of_units_that_come_ahead(
    model: Stack, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    units, unsharder = with_room_for_all(model)
    with torch.no_grad():
        expected = step(model)
        for unit in units:
            unsharder.invalidate(unit)
        unsharder._allocate_and_fill(units[2], Priority.PREFETCH, unsharder._trained(units[2]))
        monkeypatch.setattr(PendingUnshards, "filled", lambda self, unit: False)
        Allocator(monkeypatch, place).failures = 2
        with unsharder.borrowed(units[0]):
            assert units[2].state is SHARDED
        assert torch.equal(step(model), expected)


def test_whatever_breaks_an_allocation_off_no_flat_keeps_memory(
    model: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = step(model)

    def interrupted(tensor: torch.Tensor, size_bytes: int) -> None:
        resize_storage(tensor, size_bytes)
        if size_bytes:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(unsharded_param, "resize_storage", interrupted)
        with pytest.raises(KeyboardInterrupt):
            step(model)
    for unit in units_of(model):
        assert unit.state is SHARDED
        assert all(storage_size(flat.tensor) == 0 for flat in unit.flats)
    assert torch.equal(step(model), expected)


def test_flats_of_a_unit_that_found_no_room_keep_no_memory(
    place: Place, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The allocation of the second flat fails when the first has its memory."""
    model = nn.Sequential(nn.Linear(16, 16))
    model[0].bias.requires_grad_(False)
    offload(model, inf.Policy(nvme=tmp_path, params="nvme", optim="nvme"))
    unit = units_of(model)[0]
    assert len(unit.flats) == 2
    allocator = Allocator(monkeypatch, place)
    grow = allocator.resize

    def second_fails(tensor: torch.Tensor, size_bytes: int) -> None:
        allocator.failures = int(tensor is unit.flats[1].tensor and size_bytes > 0)
        grow(tensor, size_bytes)

    monkeypatch.setattr(unsharded_param, "resize_storage", second_fails)
    with pytest.raises(torch.OutOfMemoryError):
        model(torch.ones(2, 16))
    assert all(storage_size(flat.tensor) == 0 for flat in unit.flats)
    inf.handle(model).close()


def test_a_gather_is_refused_while_a_graph_is_captured_also_of_a_unit_that_is_there(
    model: Stack, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = inf.handle(model)
    handle.unsharder.gathered_bytes_max = 3 * units_of(model)[0].size_bytes
    with torch.no_grad():
        expected = model(torch.ones(2, 16))
        assert units_of(model)[0].state is UNSHARDED
        with monkeypatch.context() as patch:

            def refuse(_self: Device, what: str) -> None:
                raise GraphCaptureUnsupported(what)

            patch.setattr(Device, "refuse_capture", refuse)
            with pytest.raises(GraphCaptureUnsupported, match=r"the gather of layers\.0"):
                model(torch.ones(2, 16))
        assert torch.equal(model(torch.ones(2, 16)), expected)


def test_one_stream_needs_no_notes(model: Stack, place: Place) -> None:
    place.here = 7
    for _ in range(2):
        step(model).backward()
    assert not place.noted


def test_a_unit_used_under_another_stream_is_noted_with_that_stream(
    model: Stack, place: Place
) -> None:
    """One layer of the model runs on another stream; its unit is evicted under the first stream."""
    unit = units_of(model)[1]
    used: list[int] = []

    def before(number: int) -> None:
        place.here = 5 if number == 1 else 0
        if number == 1:
            # A prefetch has allocated it while stream 0 was current.
            used.extend(flat.tensor.data_ptr() for flat in unit.flats)

    inf.handle(model).unsharder.gathered_bytes_max = 3 * unit.size_bytes
    for _ in range(2):  # teaches the schedule
        step(model).backward()
    inf.handle(model).unsharder.invalidate(unit)
    model.before = before
    loss = step(model)
    assert used
    assert 0 not in used
    assert set(place.noted) == {(address, 5) for address in used}
    place.noted.clear()
    # Evicted under stream 0, which allocated it: the use under 5 was noted when it ended.
    loss.backward()
    assert not place.noted


def test_a_unit_evicted_under_another_stream_is_noted_with_it(model: Stack, place: Place) -> None:
    handle = inf.handle(model)
    unit = units_of(model)[0]
    handle.unsharder.gathered_bytes_max = 3 * unit.size_bytes
    place.here = 3
    with torch.no_grad():
        step(model)
    assert unit.state is UNSHARDED
    assert not place.noted
    addresses = {flat.tensor.data_ptr() for flat in unit.flats}
    place.here = 4
    handle.unsharder.invalidate(unit)
    assert unit.state is SHARDED
    assert set(place.noted) == {(address, 4) for address in addresses}


@pytest.mark.parametrize("noted", [True, False])
def test_memory_goes_to_another_kernel_only_when_every_stream_is_past_it(
    noted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two simulated streams, and an allocator that gives memory back to the stream it came from, as
    torch's does. Without notes the simulation finds the race."""
    simulation = Simulated()
    streams = [simulation.stream() for _ in range(2)]

    class Noting(Place):
        def note_use(self, tensor: torch.Tensor) -> None:
            if noted:
                self.noted.append((tensor.data_ptr(), self.here))

    place = Noting(simulation.driver())
    unit, memory = Unit(0, "layers.0", ()), torch.zeros(64)
    flat: Any = type("Memory", (), {"tensor": memory, "size_bytes": 256, "stream": 0})()
    unit.flats.append(flat)
    at = memory.data_ptr()
    place.here = streams[0]
    unsharded_param.allocate(unit, place)
    place.here = streams[1]
    simulation.kernel(at, 256, writes=False, what="the unit's forward", stream=streams[1])
    monkeypatch.setattr(unsharded_param, "resize_storage", lambda tensor, size: None)
    unsharded_param.evict(unit, place)
    for _, stream in place.noted:
        simulation.wait(stream)
    simulation.kernel(at, 256, writes=True, what="an activation", stream=streams[0])
    races = simulation.races()
    for stream in streams:
        simulation.drop(stream)
    if noted:
        assert races == []
    else:
        assert len(races) == 1
        assert "an activation" in races[0]
        assert "the unit's forward" in races[0]
