"""Matrices that ranks put together out of their parts, and part again. One process is all ranks,
and delivers their messages."""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Sequence
from unittest import mock

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from infinity._src.distributed.transport import Message
from infinity._src.kernels.newton_schulz import flops
from infinity._src.memory.flat_layout import plan_flat
from infinity._src.optim.whole_matrices import Matrix, UnitMatrices, matrices_of
from infinity._src.params.unit import Flat, Param, Unit

CPU = torch.device("cpu")
SIDES = st.integers(1, 70)
SHAPES = st.one_of(
    st.tuples(st.just(1), SIDES),
    st.tuples(SIDES, st.just(1)),
    st.tuples(SIDES, SIDES),
    st.tuples(st.integers(1, 4), SIDES, SIDES),
)


def flat_of(unit: Unit, shapes: Sequence[tuple[int, ...]], world: int) -> Flat:
    layout = plan_flat(tuple(map(math.prod, shapes)), 4, world)
    flat = Flat(unit, len(unit.flats), torch.float32, True, layout, torch.empty(0))
    for index, shape in enumerate(shapes):
        name, offset = f"{flat.index}.{index}", layout.offsets[index]
        size = math.prod(shape)
        flat.params.append(
            Param(
                *(index, name, (name,), [], torch.Size(shape), torch.float32),
                *(size, offset, flat, unit, index),
            )
        )
    return flat


def deliver(messages: Sequence[tuple[Sequence[Message], Sequence[Message]]]) -> None:
    """Bring the messages that each rank sends to the ranks that receive them, in order."""
    sent: dict[tuple[int, int], deque[torch.Tensor]] = {}
    for rank, (sends, _) in enumerate(messages):
        for to, part in sends:
            sent.setdefault((rank, to), deque()).append(part.clone())
    for rank, (_, receives) in enumerate(messages):
        for source, part in receives:
            # Sizes have to be equal: `copy_` alone would broadcast one byte.
            found = sent[source, rank].popleft()
            assert found.shape == part.shape
            part.copy_(found)
    assert not any(sent.values())


@settings(max_examples=60, deadline=None)
@given(
    flats=st.lists(st.lists(SHAPES, min_size=1, max_size=4), min_size=1, max_size=2),
    world=st.integers(1, 3),
    device=st.booleans(),
)
def test_every_matrix_is_whole_once_and_every_part_comes_back(
    flats: list[list[tuple[int, ...]]], world: int, device: bool
) -> None:
    """device: matrices lie in memory of their own, as on a GPU."""
    unit = Unit(0, "unit", ())
    unit.flats = []
    for shapes in flats:
        unit.flats.append(flat_of(unit, shapes, world))
    params = [param for flat in unit.flats for param in flat.params]
    # Each element of the unit has its own value.
    starts = torch.tensor([0, *(param.numel for param in params)]).cumsum(0).tolist()
    values = {
        param: torch.arange(start, start + param.numel, dtype=torch.float32)
        for param, start in zip(params, starts, strict=False)
    }

    def part_of(param: Param, rank: int) -> torch.Tensor:
        _, element, numel = param.flat.layout.shard_range(param.param_index, rank)
        return values[param][element : element + numel].clone()

    parts = [{param: part_of(param, rank) for param in params} for rank in range(world)]
    by_param = matrices_of(params, world)
    matrices = [each for param in params for each in by_param[param]]
    check_owners(matrices, world)
    there = mock.patch.object(torch.Tensor, "to", lambda tensor, _: tensor.clone())
    with there if device else contextlib.nullcontext():
        ranks = [
            UnitMatrices(matrices, parts[rank], rank=rank, world=world, device=CPU)
            for rank in range(world)
        ]
    deliver([held.messages() for held in ranks])
    assert sorted(map(id, matrices)) == sorted(id(each) for held in ranks for each in held.owned)
    for rank, held in enumerate(ranks):
        for matrix, whole in held.owned.items():
            assert matrix.owner == rank
            wanted = values[matrix.param][matrix.start : matrix.start + matrix.numel]
            assert torch.equal(whole, wanted)
            # No other matrix has this result.
            whole.copy_(wanted.flip(0).neg())
    deliver([(receives, sends) for sends, receives in (held.messages() for held in ranks)])
    for held in ranks:
        held.store()
    for param in params:
        for matrix in by_param[param]:
            inside = values[param][matrix.start : matrix.start + matrix.numel]
            inside.copy_(inside.flip(0).neg())
    for rank in range(world):
        for param in params:
            assert torch.equal(parts[rank][param], part_of(param, rank))


def check_owners(matrices: Sequence[Matrix], world: int) -> None:
    """Matrices have the shapes of their parameters, in order; no rank has much more to do."""
    by_param: dict[Param, list[Matrix]] = {}
    loads = [0] * world
    for matrix in matrices:
        by_param.setdefault(matrix.param, []).append(matrix)
        assert loads[matrix.owner] == min(loads)
        loads[matrix.owner] += flops(*matrix.shape)
    for param, held in by_param.items():
        assert [matrix.start for matrix in held] == [
            index * math.prod(param.shape[-2:]) for index in range(math.prod(param.shape[:-2]))
        ]
        assert {matrix.shape for matrix in held} == {tuple(param.shape[-2:])}
