"""ChunkPipeline: every item once and in order, no buffer in two hands, nothing in flight after any
fault.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infinity._src.params.chunk_pipeline import ChunkPipeline
from infinity.errors import AioError

READ, TRANSFORM, WRITE, FINISH, AWAIT_READ, AWAIT_WRITE, LOOK = (
    "read", "transform", "write", "finish", "await read", "await write", "look",
)  # fmt: skip


@dataclasses.dataclass
class FakeTicket:
    """A transfer: it ends when somebody waits for it, and fails then if it is to fail."""

    rig: Rig
    kind: str
    item: int
    buffer: list[int]
    waited: bool = False

    def wait(self, timeout: float | None = None) -> None:
        self.rig.meet(self.kind, self.item)  # Ctrl-C comes before the transfer has ended
        if not self.waited:
            self.waited = True
            if self.kind == AWAIT_READ:
                self.buffer[:] = [self.item]
            else:
                self.rig.written.append(self.buffer[0])
        self.rig.fail(self.kind, self.item)

    wait_filled = wait


class Rig:
    """Fake reads and writes, which fail at one place."""

    def __init__(
        self, fault: tuple[str, int] | None = None, error: type[BaseException] = AioError
    ) -> None:
        self.fault, self.error = fault, error
        self.tickets: list[FakeTicket] = []
        self.log: list[tuple[str, int]] = []
        self.written: list[int] = []
        self.taken = 0
        self.failed_reads: list[int] = []

    def meet(self, what: str, item: int) -> None:
        """Raise KeyboardInterrupt, once."""
        if self.fault == (what, item) and self.error is KeyboardInterrupt:
            self.fault = None
            raise KeyboardInterrupt

    def fail(self, what: str, item: int) -> None:
        if self.fault == (what, item):
            raise self.error(f"{what} {item}")

    def call(self, what: str, item: int) -> None:
        self.log.append((what, item))
        self.meet(what, item)
        self.fail(what, item)

    def transfer(self, kind: str, item: int, buffer: list[int]) -> Any:
        busy = [ticket for ticket in self.tickets if ticket.buffer is buffer and not ticket.waited]
        assert not busy, f"{kind} {item} while {busy} is in flight in its buffer"
        self.tickets.append(FakeTicket(self, kind, item, buffer))
        return self.tickets[-1]

    def read(self, item: int, buffer: list[int]) -> Any:
        self.call(READ, item)
        return self.transfer(AWAIT_READ, item, buffer)

    def transform(self, item: int, buffer: list[int]) -> None:
        self.call(TRANSFORM, item)
        assert not self.reads or buffer == [item]
        busy = [ticket for ticket in self.tickets if ticket.buffer is buffer and not ticket.waited]
        assert not busy
        buffer[:] = [10 * item]

    def write(self, item: int, buffer: list[int]) -> Any:
        self.call(WRITE, item)
        assert buffer == [10 * item]
        return self.transfer(AWAIT_WRITE, item, buffer)

    def finish(self, item: int, _buffer: list[int]) -> None:
        self.call(FINISH, item)

    def look(self, items: tuple[int, ...]) -> None:
        self.call(LOOK, items[0])
        assert items == tuple(range(items[0], items[0] + len(items)))

    def items(self, count: int) -> Iterator[int]:
        for item in range(count):
            self.taken += 1
            yield item

    reads = True

    def pipeline(
        self, buffers: int, ahead: int, *, reads: bool, skip: bool = False
    ) -> ChunkPipeline[int, list[int]]:
        self.reads = reads
        mine: dict[str, Any] = {"read": self.read} if reads else {"look_ahead": self.look}
        if skip:
            mine["read_failed"] = lambda item, _error: self.failed_reads.append(item)
        memory: list[list[int]] = [[] for _ in range(buffers)]
        return ChunkPipeline(
            memory,
            ahead=ahead,
            transform=self.transform,
            write=self.write,
            finish=self.finish,
            **mine,
        )

    @property
    def in_flight(self) -> list[FakeTicket]:
        return [ticket for ticket in self.tickets if not ticket.waited]


SIZES = {
    "count": st.integers(0, 12),
    "buffers": st.integers(1, 5),
    "ahead": st.integers(1, 6),
    "reads": st.booleans(),
}


@settings(max_examples=300, deadline=None)
@given(**SIZES)
def test_every_item_passes_once_in_order_and_every_write_is_waited_for(
    count: int, buffers: int, ahead: int, reads: bool
) -> None:
    rig = Rig()
    rig.pipeline(buffers, ahead, reads=reads).run(rig.items(count))
    for what in (TRANSFORM, WRITE, FINISH):
        assert [item for kind, item in rig.log if kind == what] == list(range(count))
    assert rig.written == [10 * item for item in range(count)]
    assert not rig.in_flight


@settings(max_examples=300, deadline=None)
@given(**SIZES)
def test_reads_run_ahead_by_as_much_as_was_asked_for_and_there_are_buffers_for(
    count: int, buffers: int, ahead: int, reads: bool
) -> None:
    class Watched(Rig):
        most = 0

        def transform(self, item: int, buffer: list[int]) -> None:
            # Items are taken late: the source may still decide which one is next.
            assert self.taken <= item + limit
            self.most = max(self.most, self.taken - item)
            super().transform(item, buffer)

    rig, limit = Watched(), min(ahead, buffers) if reads else ahead
    rig.pipeline(buffers, ahead, reads=reads).run(rig.items(count))
    assert rig.most == min(count, limit)


@settings(max_examples=500, deadline=None)
@given(
    **SIZES,
    what=st.sampled_from([READ, TRANSFORM, WRITE, FINISH, AWAIT_READ, AWAIT_WRITE, LOOK]),
    error=st.sampled_from([AioError, RuntimeError, KeyboardInterrupt]),
    pick=st.randoms(use_true_random=False),
)
def test_a_fault_anywhere_is_raised_and_leaves_nothing_in_flight(
    count: int,
    buffers: int,
    ahead: int,
    reads: bool,
    what: str,
    error: type[BaseException],
    pick: random.Random,
) -> None:
    if not count or (not reads and what in (READ, AWAIT_READ)) or (reads and what == LOOK):
        return
    if what in (AWAIT_READ, AWAIT_WRITE) and error is RuntimeError:
        error = AioError  # what tickets raise
    at = pick.randrange(count)
    rig = Rig((what, at), error)
    with pytest.raises(error) as raised:
        rig.pipeline(buffers, ahead, reads=reads).run(rig.items(count))
    if error is not KeyboardInterrupt:
        assert f"{what} {at}" in str(raised.value)
    assert not rig.in_flight
    assert (
        all(item <= at for kind, item in rig.log if kind in (TRANSFORM, WRITE))
        or what == AWAIT_WRITE
    )


@settings(max_examples=200, deadline=None)
@given(**SIZES, pick=st.randoms(use_true_random=False))
def test_a_read_that_fails_may_be_passed_over(
    count: int, buffers: int, ahead: int, reads: bool, pick: random.Random
) -> None:
    if not count or not reads:
        return
    at = pick.randrange(count)
    rig = Rig((AWAIT_READ, at))
    rig.pipeline(buffers, ahead, reads=True, skip=True).run(rig.items(count))
    assert rig.failed_reads == [at]
    assert rig.written == [10 * item for item in range(count) if item != at]
    assert [item for kind, item in rig.log if kind == FINISH] == list(range(count))
    assert not rig.in_flight


def test_the_first_of_several_faults_is_raised() -> None:
    class EveryWriteFails(Rig):
        def fail(self, what: str, item: int) -> None:
            if what == AWAIT_WRITE:
                raise AioError(f"write {item}")

    rig = EveryWriteFails()
    with pytest.raises(AioError, match="write 0"):
        rig.pipeline(4, 2, reads=True).run(rig.items(9))
    assert not rig.in_flight
