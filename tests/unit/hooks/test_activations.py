"""Boundary activations: saved, offloaded, fetched, and freed with their graphs."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from infinity._src.base.telemetry import Timeline
from infinity._src.hooks import activation_offload as module
from infinity._src.hooks.activation_offload import Activations, span_numel
from infinity._src.hooks.activation_store import CHUNK_BYTES, NvmeActivationStore, StoredOnNvme
from infinity._src.hooks.forward import FrameStack
from infinity._src.memory.swap_space import SwapSpace
from infinity._src.params.reserved_extents import ReservedExtents
from infinity.aio import Executor, Fault, PoolSpec, Seam, open_executor
from infinity.errors import AioError, ChecksumError, EngineClosed
from tests.unit.hooks.rig import Rig


class Place:
    """An executor over one swap file, an activation store on it, and the activations of a model
    that always runs."""

    def __init__(
        self,
        directory: Path,
        seam: Seam | None = None,
        model: nn.Module | None = None,
        frames: Any = None,
    ) -> None:
        self.space = SwapSpace([directory])
        self.executor: Executor = open_executor(
            self.space.files, small=PoolSpec(8, CHUNK_BYTES), large=PoolSpec(0, 0), seam=seam
        )
        self.store = NvmeActivationStore(self.executor, self.space, sums_on=True)
        self.frames = frames if frames is not None else SimpleNamespace(running_here=True)
        timeline = Timeline(spans_max=1000)
        self.activations = Activations(
            self.store, model or nn.Identity(), [], timeline, frames=self.frames
        )
        self._open = True

    def close(self) -> None:
        if not self._open:
            return
        self._open = False
        self.executor.wait_all()
        self.activations.close()
        self.executor.close()
        self.space.close()


@pytest.fixture
def make_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Place]]:
    monkeypatch.setattr(module, "SMALLEST_BYTES", 1)
    places: list[Place] = []

    def make(seam: Seam | None = None, model: nn.Module | None = None, frames: Any = None) -> Place:
        places.append(Place(tmp_path, seam, model, frames))
        return places[-1]

    yield make
    for place in places:
        place.close()


def chain(
    tensors: list[torch.Tensor],
    weight: torch.Tensor,
    reentrant: bool,
    seen: list[torch.Tensor] | None = None,
) -> torch.Tensor:
    """Checkpoint a function of each tensor and the weight; `seen` gets each input as it comes, in
    recompute too."""

    def one(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        if seen is not None:
            seen.append(x)
        return (x.double() * w.double()).tanh().sum()

    total = torch.zeros((), dtype=torch.double)
    while tensors:
        total = total + checkpoint(one, tensors.pop(0), weight, use_reentrant=reentrant)
    return total


def weight_of(value: float = 0.5) -> torch.Tensor:
    return torch.tensor(value, requires_grad=True)


def randoms(count: int, numel: int = 1000) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(count)
    return [torch.randn(numel, generator=generator) for _ in range(count)]


# -- what comes back -------------------------------------------------------------------------------


@st.composite
def layouts(draw: st.DrawFn) -> tuple[torch.dtype, tuple[int, ...], tuple[int, ...], int, bool]:
    """dtype, shape, order of dimensions, elements before the first, and whether the first dimension
    is broadcast."""
    dtype = draw(
        st.sampled_from(
            [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool]
        )
    )
    shape = tuple(draw(st.lists(st.integers(1, 24), min_size=1, max_size=4)))
    if draw(st.integers(0, 9)) == 0:
        shape = (
            draw(st.sampled_from([CHUNK_BYTES // 4, 2 * CHUNK_BYTES // 4 + 3, 4096, 4097])),
            *shape[:1],
        )
    order = tuple(draw(st.permutations(range(len(shape)))))
    return dtype, shape, order, draw(st.integers(0, 9)), draw(st.booleans())


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(layout=layouts(), reentrant=st.booleans())
def test_what_comes_back_has_the_same_bits_layout_and_alignment(
    layout: tuple[torch.dtype, tuple[int, ...], tuple[int, ...], int, bool],
    reentrant: bool,
    make_place: Callable[..., Place],
) -> None:
    place = make_place()
    try:
        comes_back_the_same(place, *layout, reentrant)
    finally:
        place.close()


def comes_back_the_same(
    place: Place,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    order: tuple[int, ...],
    before: int,
    broadcast: bool,
    reentrant: bool,
) -> None:
    raw = torch.randint(-99, 99, (before + int(torch.Size(shape).numel()) + 5,)).to(dtype)
    tensor = raw[before : before + torch.Size(shape).numel()].view(shape)
    if broadcast:
        tensor = tensor.unsqueeze(0).expand(3, *shape)
    tensor = tensor.permute(*([0] if broadcast else []), *(axis + broadcast for axis in order))
    bits, stride, lead = tensor.clone(), tensor.stride(), tensor.data_ptr() % 64
    size_bytes = span_numel(tensor) * dtype.itemsize
    seen: list[torch.Tensor] = []
    total = chain([tensor, *randoms(2)], weight_of(), reentrant, seen)
    del tensor, raw
    place.executor.wait_all()
    seen.clear()
    total.backward()
    back = seen[-1]  # the first call is the last that backward comes to
    assert place.store.stored_bytes == place.store.fetched_bytes == size_bytes
    assert (back.dtype, back.shape, back.stride(), back.data_ptr() % 64) == (
        dtype,
        bits.shape,
        stride,
        lead,
    )
    assert torch.equal(back, bits)


@pytest.mark.parametrize("reentrant", [False, True])
def test_memory_goes_while_forward_goes_on_and_returns_a_few_calls_at_a_time(
    reentrant: bool, make_place: Callable[..., Place]
) -> None:
    place = make_place()
    tensors = randoms(20)
    refs = [weakref.ref(tensor.untyped_storage()) for tensor in tensors]
    weight = weight_of()
    expected = weight_of()
    # Copies, and nothing left of their graph: what two graphs save is shared, and stays.
    chain([tensor.clone() for tensor in tensors], expected, reentrant).backward()
    gc.collect()
    place.executor.wait_all()
    place.store.stored_bytes = place.store.fetched_bytes = 0
    place.activations._held_peak = 0
    total = chain(tensors, weight, reentrant)
    place.executor.wait_all()
    held = place.activations.figures()
    assert sum(ref() is not None for ref in refs) <= module.HELD_CALLS
    assert place.activations._held_bytes == module.HELD_CALLS * 4000
    total.backward()
    figures = place.activations.figures()
    assert figures.stored_bytes == figures.fetched_bytes == 18 * 4000
    assert figures.held_bytes_peak <= max(held.held_bytes_peak, (module.PREFETCH_CALLS + 2) * 4000)
    assert weight.grad is not None
    assert torch.equal(weight.grad, expected.grad)
    assert place.activations._held_bytes == 0
    assert not place.activations._fetched


def test_a_backward_in_flight_reads_ahead(make_place: Callable[..., Place]) -> None:
    place = make_place()
    total = chain(randoms(8), weight_of(), False)
    place.executor.wait_all()
    fetched: list[int] = []
    bring = place.activations._start_fetch

    def count(boundary: Any, priority: Any) -> None:
        fetched.append(int(priority))
        bring(boundary, priority)

    place.activations._start_fetch = count  # type: ignore[method-assign]
    total.backward()
    assert fetched[0] == 1  # the first to be wanted from the store was read ahead, at PREFETCH
    assert place.store.fetched_bytes == 6 * 4000


def test_what_waits_for_a_slow_drive_is_bounded(
    make_place: Callable[..., Place], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "STORING_BYTES_MAX", 8000)
    place = make_place(seam=Seam(write_bytes_per_s=100_000.0))  # 41 ms for each tensor, and 8 slots
    xs = randoms(24)
    refs = [weakref.ref(x.untyped_storage()) for x in xs]
    total = chain(xs, weight_of(), False)
    assert sum(ref() is not None for ref in refs) <= module.HELD_CALLS + 2
    figures = place.activations.figures()
    # The forward waited, or more would have been held: by how long, the other threads decide.
    assert figures.held_bytes_peak <= (module.HELD_CALLS + 3) * 4000
    del total


def test_two_backwards_over_one_graph_fetch_twice(make_place: Callable[..., Place]) -> None:
    make_place()
    weight, expected = weight_of(), weight_of()
    total = chain(randoms(6), weight, False)
    total.backward(retain_graph=True)
    total.backward()
    plain = chain(randoms(6), expected, False)
    plain.backward(retain_graph=True)
    plain.backward()
    assert torch.equal(weight.grad, expected.grad)  # type: ignore[arg-type]


def test_a_graph_that_never_runs_backward_gives_its_places_back(
    make_place: Callable[..., Place],
) -> None:
    place = make_place()
    lengths = set()
    for _ in range(3):
        total = chain(randoms(6), weight_of(), False)
        place.executor.wait_all()
        lengths.add(place.space.size_bytes)
        del total
        gc.collect()
    assert len(lengths) == 1
    place.activations.figures()
    assert place.activations._held_bytes == 0
    assert len(place.activations._calls) == 0


def test_lengths_that_change_from_step_to_step_do_not_grow_the_file(
    make_place: Callable[..., Place],
) -> None:
    place = make_place()
    most = 0
    for step in range(30):
        chain(randoms(5, 20_000 - 512 * step), weight_of(), False).backward()
        place.executor.wait_all()
        most = most or place.space.size_bytes
    assert place.space.size_bytes <= 2 * most


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_several_calls_take_stays_and_what_one_call_takes_twice_goes_once(
    reentrant: bool, make_place: Callable[..., Place]
) -> None:
    place = make_place()
    mask = torch.ones(1000)
    xs = randoms(6)

    def one(x: torch.Tensor, same: torch.Tensor, m: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (x * same * m * w).sum()

    weight = weight_of()
    total = torch.zeros(())
    while xs:
        x = xs.pop(0)
        total = total + checkpoint(one, x, x, mask, weight, use_reentrant=reentrant)
    del x
    place.executor.wait_all()
    total.backward()
    assert place.store.stored_bytes == 4 * 4000
    assert place.store.fetched_bytes == 4 * 4000


def test_forwards_may_interleave_before_their_backwards(make_place: Callable[..., Place]) -> None:
    make_place()
    weight, expected = weight_of(), weight_of()
    losses = [chain(randoms(5 + i), weight, i % 2 == 0) for i in range(4)]
    plain = [chain(randoms(5 + i), expected, i % 2 == 0) for i in range(4)]
    for index in (2, 0, 3, 1):
        losses[index].backward()
        plain[index].backward()
        assert torch.equal(weight.grad, expected.grad)  # type: ignore[arg-type]


# -- what must not change --------------------------------------------------------------------------


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_tensor_that_is_modified_after_it_was_saved_raises_as_in_torch(
    reentrant: bool, late: bool, make_place: Callable[..., Place]
) -> None:
    place = make_place()
    xs = randoms(5)
    base = xs[0]
    view = base.view(10, 100)
    total = chain(xs if late else xs[:1], weight_of(), reentrant)
    place.executor.wait_all()
    with torch.no_grad():
        view.add_(1)
    with pytest.raises(
        RuntimeError, match=r"modified by an inplace operation.*at version 1; expected version 0"
    ):
        total.backward()


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_tensor_that_is_modified_between_two_calls_is_another_value_for_the_second(
    reentrant: bool, make_place: Callable[..., Place]
) -> None:
    make_place()
    xs, weight, expected = randoms(5), weight_of(), weight_of()
    first = chain(xs[:1], weight, reentrant)
    with torch.no_grad():
        xs[0].add_(1)
    plain = sum((x.double() * expected.double()).tanh().sum() for x in xs)
    chain(list(xs), weight, reentrant).backward()
    plain.backward()  # type: ignore[union-attr]
    assert torch.equal(weight.grad, expected.grad)  # type: ignore[arg-type]
    del first


def test_hooks_of_the_user_on_saved_tensors_keep_what_they_took(
    make_place: Callable[..., Place],
) -> None:
    place = make_place()
    weight = weight_of()
    taken: list[torch.Size] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        taken.append(tensor.shape)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        total = chain(randoms(5), weight, False)
    total.backward()
    assert taken
    assert place.activations.figures().calls == 0


def test_nested_checkpoints_take_the_outer_inputs_only(make_place: Callable[..., Place]) -> None:
    place = make_place()

    def outer(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return chain([x, x + 1, x + 2, x + 3], w, False)

    results = []
    for _ in range(2):
        weight = weight_of()
        total = torch.zeros((), dtype=torch.double)
        for x in randoms(4):
            total = total + checkpoint(outer, x, weight, use_reentrant=False)
        total.backward()
        results.append(weight.grad)
        place.frames.running_here = False
    assert torch.equal(results[0], results[1])  # type: ignore[arg-type]
    assert place.activations.figures().calls == 4


def test_nothing_is_taken_without_gradients_nor_small_ones_nor_leaves(
    make_place: Callable[..., Place], monkeypatch: pytest.MonkeyPatch
) -> None:
    place = make_place()
    with torch.no_grad():
        chain(randoms(5), weight_of(), False)
        chain(randoms(5), weight_of(), True)
    assert place.activations.figures().calls == 0
    leaves = [x.requires_grad_() for x in randoms(4)]
    chain(list(leaves), weight_of(), False).backward()
    assert all(leaf.grad is not None for leaf in leaves)
    monkeypatch.setattr(module, "SMALLEST_BYTES", 4001)
    chain(randoms(5), weight_of(), True).backward()
    figures = place.activations.figures()
    assert (figures.stored_bytes, figures.calls) == (0, 9)
    assert figures.kept > 0


def test_a_checkpoint_outside_of_a_forward_counts_when_it_calls_a_hooked_module(
    make_place: Callable[..., Place],
) -> None:
    blocks = [nn.Linear(64, 64) for _ in range(6)]
    model = nn.Sequential(*blocks)
    other = nn.Linear(64, 64)
    frames = FrameStack()
    place = make_place(model=model, frames=frames)
    rig = Rig(
        model,
        lambda m: {str(i): [m[i]] for i in range(6)},
        activations=place.activations,
        frames=frames,
    )

    def loss_of(root: nn.Module, seed: int) -> torch.Tensor:
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(seed))
        assert isinstance(root, nn.Sequential)
        for block in root:
            x = checkpoint(block, x + 0, use_reentrant=seed % 2 == 1)
        return x.sum()

    x = torch.randn(32, 64, requires_grad=True)
    for _ in range(4):
        x = checkpoint(other, x + 0, use_reentrant=False)
    assert place.activations.figures().calls == 0
    loss_of(rig.model, 0).backward()
    assert place.activations.figures().calls == 6
    assert {call.label for call in place.activations._calls.values()} <= {str(i) for i in range(6)}
    x = torch.randn(32, 64, requires_grad=True)
    for block in rig.model:  # type: ignore[attr-defined]
        x = checkpoint(block, x + 0, use_reentrant=True)
    x.sum().backward()
    assert place.activations.figures().calls == 12
    rig.check_idle()


def test_an_interrupted_forward_leaves_nothing(make_place: Callable[..., Place]) -> None:
    place = make_place()
    weight = weight_of()

    def interrupted(_x: torch.Tensor, _w: torch.Tensor) -> torch.Tensor:
        raise KeyboardInterrupt

    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            total = chain(randoms(5), weight, False)
            checkpoint(interrupted, torch.ones(1000), weight, use_reentrant=False)
        total = torch.zeros(())
    gc.collect()
    place.executor.wait_all()
    place.activations.figures()
    assert len(place.activations._calls) == 0
    expected = weight_of()
    place.frames.running_here = False
    chain(randoms(5), expected, False).backward()
    place.frames.running_here = True
    chain(randoms(5), weight, False).backward()
    assert torch.equal(weight.grad, expected.grad)  # type: ignore[arg-type]
    del total


# -- faults ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", ["write", "read"])
def test_a_fault_names_the_input_and_the_step_can_be_repeated(
    op: str, make_place: Callable[..., Place]
) -> None:
    kind = "errno" if op == "write" else "bitflip"
    place = make_place(
        seam=Seam(
            fault=Fault(op=op, nth=3, kind=kind, persistent=op == "read", lasting=True),
            delay_us_max=2000,
        )
    )
    weight, expected = weight_of(), weight_of()
    with pytest.raises(AioError, match="input of a checkpointed call cannot be") as caught:
        for _ in range(9):
            weight.grad = None
            chain(randoms(12), weight, False).backward()
    assert caught.value.path
    if op == "read":
        assert isinstance(caught.value, ChecksumError)
        return
    weight.grad = None
    gc.collect()
    chain(randoms(12), weight, False).backward()
    place.frames.running_here = False
    chain(randoms(12), expected, False).backward()
    assert torch.equal(weight.grad, expected.grad)  # type: ignore[arg-type]
    assert place.activations._fault is None


def test_a_freed_range_with_a_failed_write_is_not_reused(
    make_place: Callable[..., Place],
) -> None:
    """Freed before the move to a spare range was settled."""
    bad = 4 * CHUNK_BYTES  # behind the spare ranges
    seam = Seam(fault=Fault("write", 0, persistent=True, start=bad, stop=bad + 1))
    place = make_place(seam)
    spares = ReservedExtents(place.executor, place.space, layer=0, remember=None)
    spares.fill(CHUNK_BYTES)
    source = torch.arange(CHUNK_BYTES // 4, dtype=torch.int32)

    def stored(size_bytes: int) -> StoredOnNvme:
        found = place.store.store(source.data_ptr(), size_bytes)
        found.written.wait()
        return found

    first = stored(CHUNK_BYTES)
    assert [each.offset for each in first.places] == [bad]
    assert place.executor.look(first.ids)["file_offset"].tolist() != [bad]
    place.store.free(first)
    # Another size: the place is dropped to make room.
    second = stored(CHUNK_BYTES // 2)
    assert [each.offset for each in second.places] != [bad]
    spares.settle(lambda *_: False)
    assert spares.bad_bytes == CHUNK_BYTES
    (refused,) = first.places
    assert place.space.place_of(refused) != refused
    for size_bytes in (CHUNK_BYTES, CHUNK_BYTES // 4, CHUNK_BYTES):
        place.store.free(second)
        second = stored(size_bytes)
        assert place.executor.stats().moved_writes == 1
        assert place.executor.look(second.ids)["file_offset"].tolist() != [bad]
    # The spare range that took its place was given back in its name.
    assert place.space.place_of(refused) == refused


def test_a_drive_that_stays_broken_raises_at_every_step(make_place: Callable[..., Place]) -> None:
    make_place(seam=Seam(fault=Fault(op="write", nth=2, kind="errno", persistent=True)))
    for _ in range(3):
        weight = weight_of()
        with pytest.raises(AioError, match="cannot be offloaded"):
            for _ in range(3):
                chain(randoms(12), weight, False).backward()
        gc.collect()


# slow: forward is over while stores still wait for a buffer
@pytest.mark.parametrize("delay_us", [0, 50_000])
def test_a_graph_that_outlives_the_engine_says_so(
    delay_us: int, make_place: Callable[..., Place]
) -> None:
    place = make_place(seam=Seam(delay_us_max=delay_us))
    inputs = randoms(20)
    refs = [weakref.ref(tensor.untyped_storage()) for tensor in inputs]
    total = chain(inputs, weight_of(), False)
    place.close()
    gc.collect()
    # graphs keep no more
    assert [ref() is None for ref in refs] == [True] * (20 - module.HELD_CALLS) + [
        False
    ] * module.HELD_CALLS
    with pytest.raises(EngineClosed, match="activations"):
        total.backward()


def test_says_once_what_there_is_to_do(
    make_place: Callable[..., Place], monkeypatch: pytest.MonkeyPatch
) -> None:
    place = make_place()
    with pytest.warns(UserWarning, match=r"gradient_checkpointing_enable\(\)"):
        place.activations.step_ended()
    place.activations.step_ended()  # once only: a second warning would be an error
    monkeypatch.setattr(module, "SMALLEST_BYTES", 8 << 10)
    place.close()
    small = make_place()
    chain(randoms(4), weight_of(), False).backward()
    with pytest.warns(UserWarning, match="smaller than 8 KiB"):
        small.activations.step_ended()
