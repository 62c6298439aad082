"""The order of launches by itself: ranks that differ in their pace launch the same, and all of it.

Ranks are simulated: each has a `LaunchOrder`, a program that submits and waits, and collectives
that get ready when chance says so. Any rank may take the next turn.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infinity._src.distributed.order_agreement import LaunchOrder, OrderAgreement
from infinity._src.distributed.topology import Topology
from tests.launch_logs import Launch, objection

QUEUES = ("gather", "reduce")
Program = list[tuple[str, int]]
"""("gather" or "reduce", number): submit it. ("wait", number): wait until it is complete."""


@dataclasses.dataclass
class Rank:
    """One simulated rank."""

    program: Program
    order: LaunchOrder[int] = dataclasses.field(default_factory=lambda: LaunchOrder(QUEUES))
    at: int = 0
    ready: set[int] = dataclasses.field(default_factory=set)
    submitted: set[int] = dataclasses.field(default_factory=set)
    launched: list[Launch] = dataclasses.field(default_factory=list)

    def launch(self, queue: int) -> None:
        self.launched.append(Launch(queue, str(self.order.pop(queue))))


class World:
    """Ranks with one program. chooses: whether each rank chooses for itself, which is wrong."""

    def __init__(self, program: Program, world: int, *, chooses: bool = False) -> None:
        self.ranks = [Rank(program) for _ in range(world)]
        self.chooses = chooses
        self.named: list[int] = []

    def turns(self) -> list[Callable[[], object]]:
        """All that may happen next."""
        found: list[Callable[[], object]] = []
        for number, rank in enumerate(self.ranks):
            if (turn := self._program_turn(rank)) is not None:
                found.append(turn)
            found += [
                lambda rank=rank, each=each: rank.ready.add(each)  # type: ignore[misc]
                for each in sorted(rank.submitted - rank.ready)
            ]
            if (turn := self._launch_turn(number, rank)) is not None:
                found.append(turn)
        return found

    def complete(self, number: int) -> bool:
        """Return whether all ranks have launched it."""
        return all(str(number) in (each.what for each in rank.launched) for rank in self.ranks)

    def _program_turn(self, rank: Rank) -> Callable[[], object] | None:
        if rank.at == len(rank.program):
            return None
        verb, number = rank.program[rank.at]
        if verb == "wait" and not self.complete(number):
            return None

        def turn() -> None:
            rank.at += 1
            if verb != "wait":
                rank.submitted.add(number)
                rank.order.add(verb, number)

        return turn

    def _launch_turn(self, number: int, rank: Rank) -> Callable[[], object] | None:
        if number == 0 or self.chooses:
            # Rank 0 continues once all have launched the collective that it named before: they
            # agree each time.
            if not self.chooses and any(
                len(other.launched) < len(self.named) for other in self.ranks
            ):
                return None
            queue = rank.order.choose(lambda each: each in rank.ready)
            if queue is None:
                return None

            def names() -> None:
                self.named.append(queue)
                rank.launch(queue)

            return names
        if len(rank.launched) == len(self.named):
            return None
        queue = self.named[len(rank.launched)]
        head = rank.order.head(queue)
        return (lambda: rank.launch(queue)) if head is not None and head in rank.ready else None


def run(world: World, seed: int) -> list[Sequence[Launch]]:
    """Take turns by chance until none is left. Returns what each rank launched."""
    chance = random.Random(seed)
    while turns := world.turns():
        chance.choice(turns)()
    return [rank.launched for rank in world.ranks]


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """Submissions to both queues, and waits for some of them at any later place."""
    found: Program = []
    waited: set[int] = set()
    for number in range(draw(st.integers(1, 12))):
        found.append((draw(st.sampled_from(QUEUES)), number))
        open_ones = [each for each in range(number + 1) if each not in waited]
        for each in draw(st.lists(st.sampled_from(open_ones), max_size=2, unique=True)):
            waited.add(each)
            found.append(("wait", each))
    return found


@settings(max_examples=300, deadline=None)
@given(programs(), st.integers(1, 4), st.integers(0, 2**32))
def test_every_pace_gives_one_order_and_launches_everything(
    program: Program, world: int, seed: int
) -> None:
    simulated = World(program, world)
    logs = run(simulated, seed)
    assert not objection(logs)
    submitted = [each for each in program if each[0] != "wait"]
    assert len(logs[0]) == len(submitted), "some never ran"
    assert all(rank.at == len(program) for rank in simulated.ranks)
    for queue, name in enumerate(QUEUES):
        # Each queue keeps the order of the program.
        assert [int(each.what) for each in logs[0] if each.queue == queue] == [
            number for verb, number in submitted if verb == name
        ]


def test_ranks_that_choose_for_themselves_are_found_out() -> None:
    program: Program = [("gather", 0), ("reduce", 1)]
    found = [objection(run(World(program, 2, chooses=True), seed)) for seed in range(50)]
    assert any("not the same" in each for each in found)
    assert not any(objection(run(World(program, 2), seed)) for seed in range(50))


@pytest.mark.parametrize(
    ("logs", "says"),
    [
        ([[Launch(0, "a"), Launch(1, "b")], [Launch(0, "a"), Launch(1, "b")]], ""),
        ([[Launch(0, "a"), Launch(1, "b")], [Launch(1, "b"), Launch(0, "a")]], "launch 0 is not"),
        ([[Launch(0, "a"), Launch(1, "b")], [Launch(0, "a")]], "launch 1 is not"),
        ([[Launch(0, "a")], [Launch(1, "a")]], "launch 0 is not"),
        ([[Launch(0, "a", 1), Launch(1, "b", 2)]] * 2, "rank 0 launches from several threads"),
    ],
)
def test_the_check_of_logs_finds_what_is_wrong(logs: list[list[Launch]], says: str) -> None:
    assert objection(logs).startswith(says)
    assert bool(objection(logs)) == bool(says)


def test_of_several_that_are_ready_the_first_of_the_program_is_chosen() -> None:
    order: LaunchOrder[str] = LaunchOrder(QUEUES)
    for queue, item in (("reduce", "r0"), ("gather", "g0"), ("reduce", "r1")):
        order.add(queue, item)
    assert order.choose(lambda item: True) == order.oldest() == 1
    # Not r1, which is behind r0 in its queue.
    assert order.choose(lambda item: item != "r0") == 0
    assert order.choose(lambda item: item == "r1") is None
    assert [order.pop(1), order.pop(1), order.pop(0)] == ["r0", "r1", "g0"]
    assert order.oldest() is None
    assert not len(order)


@pytest.mark.parametrize(("world", "local_world"), [(2, 2), (3, 1), (4, 2), (6, 3), (8, 8)])
def test_rank_0s_name_reaches_all_along_ranks_that_exchange_data(
    world: int, local_world: int
) -> None:
    ranks = [OrderAgreement(Topology.of(rank, world, local_world), None) for rank in range(world)]
    assert ranks[0].parent is None
    for rank in range(1, world):
        hops = 0
        while (parent := ranks[rank].parent) is not None:
            assert parent in ranks[rank]._others
            assert rank in ranks[parent]._others
            rank, hops = parent, hops + 1
        assert (rank, hops <= 2) == (0, True)
