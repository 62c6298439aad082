"""Units inside of a block that runs in slices are gathered once for all slices, as far as the
device has room for a block."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity as inf
from infinity._src.engine import build
from infinity._src.engine.handle import offload
from infinity._src.hooks import activation_offload as activations
from infinity._src.memory import device_capacity
from infinity._src.memory.device_capacity import fresh_capacity, gathered_capacity, regathered_bytes
from infinity._src.params.unit import SHARDED
from infinity._src.plan.machine import describe_machine
from infinity._src.plan.predict import predict
from infinity._src.plan.workload import shape_of
from infinity.aio import Fault, Seam
from infinity.errors import AioError
from tests import harness, models
from tests.device import simulated
from tests.harness import Training
from tests.marks import mostly_slow
from tests.plans import job_of
from tests.sliced import Microbatched, assert_is_the_loop, cut, differing, grads_of, whole
from tests.test_bitwise import policy
from tests.test_expert_tiles import eager
from tests.test_microbatched import NVME, SPECULATIVE


@pytest.fixture(autouse=True)
def little_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Almost no unit stays gathered by chance, and small activations are offloaded."""
    monkeypatch.setattr(device_capacity, "OVERLAP_BYTES_MAX", 1000)
    monkeypatch.setattr(activations, "SMALLEST_BYTES", 256)


LLAMA = functools.partial(models.llama, 2)


def tiled() -> nn.Module:
    return inf.tile_linears(LLAMA(), tiles=2)


def expert_tiles() -> nn.Module:
    return inf.tile_experts(eager(functools.partial(models.qwen3_moe, 8, 2)), experts=2)


class ExpertBlock(models.MoeBlock):
    """A block with experts in a list, without the loss of its router."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        out, _ = super().forward(x)
        return out


class ExpertList(nn.Module):
    """Two such blocks, with independent results of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(models.VOCAB, 32)
        self.blocks = nn.ModuleList([ExpertBlock(32, 6) for _ in range(2)])

    def forward(self, input_ids: torch.Tensor, **_labels: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return {"loss": x.float().square().sum()}


SPLIT = {"unit_bytes_max": 4096}
"""So that a block is several units."""
LINEARS = {"units": ["Linear"]}
KINDS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "tiled linears": (tiled, {}),
    "tiles of experts": (expert_tiles, {}),
    "experts in a list": (ExpertList, SPLIT),
    "blocks that are split": (LLAMA, SPLIT),
    "every linear by itself": (LLAMA, LINEARS),
}


# -- the same bits ---------------------------------------------------------------------------------

CHECKPOINTED = "a split block, checkpointed by the user, updates in backward"
# The matrix of test_matrix.py has tiles, slices and updates pair by pair.
WAYS: dict[str, tuple[Training, dict[str, Any]]] = {
    "tiled linears, speculating": (
        Training(tiled, steps=2, accumulation=3),
        {"update": "backward", "generations": 2},
    ),
    "tiles of experts, updates in backward": (
        Training(expert_tiles, steps=2, accumulation=3, max_norm=None),
        {"update": "backward"},
    ),
    CHECKPOINTED: (
        Training(LLAMA, steps=2, accumulation=3, max_norm=None, checkpointing=False),
        {"update": "backward", **SPLIT},
    ),
    "a split block, activations on nvme": (
        Training(LLAMA, steps=2, accumulation=3),
        {"activations": "nvme", **SPLIT},
    ),
    "a split block, delayed": (
        Training(LLAMA, steps=2, accumulation=3),
        {"update": "delayed", "delayed_warmup": 9, **SPLIT},
    ),
}


@pytest.mark.parametrize("way", mostly_slow(WAYS, CHECKPOINTED))
def test_the_bits_are_those_of_the_loop(way: str, tmp_path: Path) -> None:
    training, values = WAYS[way]
    result = harness.offloaded(whole(training), policy(tmp_path, **{**NVME, **values}))
    assert_is_the_loop(result, training)


def test_a_device_that_copies_has_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training, values = WAYS[CHECKPOINTED]
    with simulated(monkeypatch):
        result = harness.offloaded(whole(training), policy(tmp_path, **{**NVME, **values}))
    assert_is_the_loop(result, training)


def test_experts_in_a_list_have_the_gradients_of_the_loop(tmp_path: Path) -> None:
    batch = models.token_batches(1, rows=8)[0]
    model, plain = models.make(Microbatched(ExpertList, 4)), models.make(ExpertList)
    with harness.one_thread():
        inf.offload(model, policy(tmp_path, **NVME, **SPLIT))
        model(**batch)["loss"].backward()
        for part in cut(batch, 4):
            plain(**part)["loss"].backward()
    ours = {
        name: param.grad.materialize()  # type: ignore[attr-defined]
        for name, param in model.named_parameters()
        if param.grad is not None
    }
    inf.handle(model).close()
    assert not differing(ours, {name: grad.float() for name, grad in grads_of(plain).items()})


# -- what is gathered ------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Moved:
    """Counts of one step."""

    demands: int
    read: int
    written: int


def steps_of(
    factory: Callable[[], nn.Module], n: int, chosen: inf.Policy, *, count: int = 3
) -> tuple[list[Moved], int, dict[str, torch.Tensor]]:
    """Train steps of eight rows in n slices. Returns each step's traffic, the gathered bytes beyond
    the bound, and the parameters."""
    with harness.one_thread():
        model = models.make(Microbatched(factory, n))
        inf.offload(model, chosen)
        optimizer, handle = inf.AdamW(model.parameters(), lr=1e-2), inf.handle(model)
        (batch,) = models.token_batches(1, rows=8)
        found = []
        for step in range(count):
            if step == count - 1:
                # An evaluation in between changes nothing.
                with torch.no_grad():
                    models.loss_of(model, batch)
            before = handle.stats()
            models.loss_of(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            # All writes have ended, and the next forward reads: no timing is involved.
            handle.flush()
            now = handle.stats()
            found.append(
                Moved(
                    now.demands - before.demands,
                    now.bytes_read - before.bytes_read,
                    now.bytes_written - before.bytes_written,
                )
            )
        assert all(unit.refs == 0 for unit in handle.units)
        beyond = now.gathered_bytes_peak - handle.unsharder.gathered_bytes_max
        values = harness.values_of(model)
        handle.close()
    return found, beyond, values


def assert_moved_alike(ours: list[Moved], theirs: list[Moved]) -> None:
    """Compare steps: gathers and writes are equal. Reads may differ by a unit or two: units
    retained at a turning point depend on timing, and slices use experts in another order."""
    for step, other in zip(ours, theirs, strict=True):
        assert (step.demands, step.written) == (other.demands, other.written)
        assert step.read == pytest.approx(other.read, rel=0.1)


@pytest.mark.parametrize("kind", mostly_slow(KINDS, *list(KINDS)[:4]))
def test_a_step_moves_the_same_whatever_the_number_of_slices(kind: str, tmp_path: Path) -> None:
    factory, values = KINDS[kind]
    chosen = policy(tmp_path, **NVME, **values)
    (one, beyond_one, _), (four, beyond_four, _) = (steps_of(factory, n, chosen) for n in (1, 4))
    assert max(beyond_one, beyond_four) <= 0
    assert_moved_alike(four, one)


def test_updates_in_backward_move_the_same_for_any_number_of_slices(tmp_path: Path) -> None:
    chosen = policy(tmp_path, **NVME, **SPLIT, update="backward")
    one, *others = (steps_of(LLAMA, n, chosen, count=2)[0] for n in (1, 2, 4, 8))
    for other in others:
        assert_moved_alike(other, one)


# -- with too little device memory -----------------------------------------------------------------


def with_spare(
    monkeypatch: pytest.MonkeyPatch, factory: Callable[[], nn.Module], chosen: inf.Policy, of: int
) -> tuple[int, int]:
    """Give the device memory for single units plus one part in `of` of the largest block. Returns
    the memory, and the bytes gathered for each slice."""
    model = models.make(Microbatched(factory, 2))
    inf.offload(model, chosen)
    handle = inf.handle(model)
    sizes, passes = [unit.on_device for unit in handle.units], handle.parts.split.passes
    handle.close()
    alone = gathered_capacity([dataclasses.replace(size, block=None) for size in sizes], passes)
    block = max(
        size.gathered for size in device_capacity.blocks_of(sizes) if size.block is not None
    )
    spare = block // of
    whole_bytes = alone + fresh_capacity(sizes, passes) + 2 * spare
    monkeypatch.setattr(build, "device_memory_bytes", lambda _device: whole_bytes)
    little = dataclasses.replace(passes, device_bytes=whole_bytes)
    assert gathered_capacity(sizes, little) == alone + spare
    return whole_bytes, regathered_bytes(sizes, little)


def test_of_a_block_that_has_no_room_those_units_stay_that_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = policy(tmp_path, **NVME, **LINEARS)
    factory = functools.partial(models.llama, 1)
    whole_block, _, values = steps_of(factory, 2, chosen, count=2)
    anew, more = [], []
    for part in (1000, 3):
        anew.append(with_spare(monkeypatch, factory, chosen, part)[1])
        counts = []
        for n in (1, 2, 3):
            moved, beyond, same = steps_of(factory, n, chosen, count=2)
            # During recomputation the current unit is in use besides the others.
            assert beyond <= 32 * 64 * 2
            counts.append([step.demands for step in moved])
            if n == 2:
                harness.assert_same(same, values)
                assert moved[1].demands > whole_block[1].demands
        one, two, three = counts
        assert [b - a for a, b in zip(one, two, strict=True)] == [
            b - a for a, b in zip(two, three, strict=True)
        ]
        more.append(two[1] - one[1])
    assert anew[0] > anew[1] > 0
    assert more[0] > more[1] > 0


@pytest.mark.parametrize("part", [1000, 3, 0])
def test_the_plan_knows_what_stays(
    part: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """part: the part of a block that may stay; 0: all fits."""
    # Large enough that the padding of flats, which a plan of tiles leaves out, hardly counts.
    wide = functools.partial(models.llama, 2, 256)
    chosen = policy(tmp_path, **NVME)

    def factory() -> nn.Module:
        return inf.tile_linears(wide(), tiles=2)

    device_bytes, again = with_spare(monkeypatch, factory, chosen, part) if part else (80 << 30, 0)
    model = models.make(Microbatched(factory, 2))
    inf.offload(model, chosen)
    handle = inf.handle(model)
    room = handle.unsharder.gathered_bytes_max
    whole_bytes = sum(unit.size_bytes for unit in handle.units)
    handle.close()
    job = job_of(tokens=64, sequence=32, micro_batches=2, schedule="vertical", tiles=2)
    machine = describe_machine(
        gpus=0,
        ram_bytes=1 << 30,
        gpu_mem_bytes=device_bytes,
        read_bytes_per_s=1e9,
        write_bytes_per_s=1e9,
    )
    found = predict(shape_of(models.make(wide)), machine, job)
    assert found.gpu.parts["gathered units"] == pytest.approx(room, rel=0.05)
    assert found.again == pytest.approx(again / whole_bytes, abs=0.05)
    assert (found.again == 0) == (again == 0)


# -- faults ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("nth", [8, 25], ids=["forward", "backward"])
def test_after_a_fault_of_a_drive_in_the_middle_of_a_block_the_next_pass_is_right(
    nth: int, tmp_path: Path
) -> None:
    batch = models.token_batches(1, rows=6)[0]
    found = []
    for fault in (Fault("read", nth, persistent=True), None):
        model = models.make(Microbatched(LLAMA, 3))
        with harness.one_thread():
            offload(model, policy(tmp_path, **NVME, **SPLIT), _seam=Seam(fault=fault))
            if fault is not None:
                with pytest.raises(AioError, match="cannot be gathered"):
                    models.loss_of(model, batch).backward()
                inf.handle(model).parts.tiers.executor.set_seam(Seam())
                model.zero_grad()
            models.loss_of(model, batch).backward()
        handle = inf.handle(model)
        assert all(unit.refs == 0 for unit in handle.units)
        found.append([param.grad.materialize() for param in model.parameters()])  # type: ignore[union-attr]
        handle.close()
    assert all(map(torch.equal, *found))


class Stumble(Exception):
    """The exception of a block."""


@pytest.mark.parametrize(
    ("call", "values"),
    [(2, {}), (4, {}), (4, SPECULATIVE)],
    ids=["forward", "backward", "backward, updated ahead"],
)
def test_an_exception_between_units_of_a_block_leaves_none_gathered_for_good(
    call: int, values: dict[str, Any], tmp_path: Path
) -> None:
    """Two slices go through a block in forward, and again in backward."""

    def stumble(model: nn.Module, _step: int) -> None:
        calls = 0

        def count(*_: Any) -> None:
            nonlocal calls
            calls += 1
            if calls == call:
                raise Stumble

        handle = model.get_submodule("model.layers.1.mlp").register_forward_pre_hook(count)
        with pytest.raises(Stumble):
            models.loss_of(model, models.token_batches(1, rows=6, seed=9)[0]).backward()
        handle.remove()
        engine = inf.handle(model)
        engine.parts.lifecycle.recover()
        assert all(unit.refs == 0 for unit in engine.units)
        # All of them may be evicted.
        bound, engine.unsharder.gathered_bytes_max = engine.unsharder.gathered_bytes_max, 0
        for unit in engine.units:
            with engine.unsharder.borrowed(unit):
                pass
        assert all(unit.state is SHARDED for unit in engine.units)
        engine.unsharder.gathered_bytes_max = bound

    training = Training(LLAMA, steps=2, accumulation=2)
    sliced = dataclasses.replace(whole(training), before=stumble)
    result = harness.offloaded(sliced, policy(tmp_path, **NVME, **SPLIT, **values))
    assert_is_the_loop(dataclasses.replace(result, seen=[]), training)
