"""The copy of delayed parameters to a device: when it begins, and what it waits for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from infinity._src.params.cleanup import cancel_and_wait
from infinity._src.params.param_copies import DelayedCopy
from infinity.errors import AioError


class Work:
    """A ticket that ends when the test says so, or when somebody waits for it."""

    def __init__(self, *, fails: bool = False) -> None:
        self.filled = self.failed = False
        self.fails = fails

    def wait_filled(
        self, timeout: float | None = None, *, check: Callable[[], None] | None = None
    ) -> None:
        self.filled, self.failed = True, self.fails
        if self.fails:
            raise AioError("a bad block")

    def cancel(self) -> None:
        raise AssertionError("the delayed parameters want the read")


class Copying:
    """A device with memory of its own, or the CPU."""

    def __init__(self, *, copies: bool = True) -> None:
        self.copies = copies
        self.begun: list[Work] = []

    def copy(self, _to: int, _source: int, _size_bytes: int, *, out: bool) -> Work:
        assert out
        self.begun.append(Work())
        return self.begun[-1]


def copy_of(device: Any, *reads: Any) -> DelayedCopy:
    return DelayedCopy(device, [(read, torch.zeros(4), torch.ones(4)) for read in reads])


@pytest.fixture
def device() -> Copying:
    return Copying()


def test_a_copy_begins_as_soon_as_somebody_looks_and_all_is_read(device: Copying) -> None:
    reads = [Work(), Work()]
    copy = copy_of(device, *reads)
    copy.advance()
    reads[0].filled = True
    copy.advance()
    assert not device.begun
    reads[1].filled = True
    copy.advance()
    copy.advance()
    assert len(device.begun) == 2
    assert not copy.filled
    copy.wait_filled()
    assert copy.filled
    assert all(work.filled for work in device.begun)


def test_the_thread_that_wants_the_unit_waits_for_the_reads_itself(device: Copying) -> None:
    copy = copy_of(device, read := Work())
    copy.wait_filled()
    assert read.filled
    assert copy.filled


def test_copies_that_were_broken_off_are_begun_by_the_next_who_asks(
    device: Copying, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = copy_of(device, Work(), Work())
    for read in copy.reads:
        read.filled = True  # type: ignore[misc]
    begin, calls = device.copy, []

    def breaks(*given: Any, out: bool) -> Work:
        calls.append(given)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return begin(*given, out=out)

    monkeypatch.setattr(device, "copy", breaks)
    with pytest.raises(KeyboardInterrupt):
        copy.advance()
    device.begun[0].filled = True
    assert not copy.filled
    copy.wait_filled()
    assert copy.filled
    assert [work.filled for work in device.begun] == [True, True]


def test_a_copy_that_is_given_up_never_begins_and_its_reads_go_on(device: Copying) -> None:
    copy = copy_of(device, read := Work())
    assert cancel_and_wait([copy]) is None
    read.filled = True
    copy.advance()
    assert copy.filled
    assert not device.begun


def test_a_copy_under_way_is_waited_for_when_it_is_given_up(device: Copying) -> None:
    copy = copy_of(device, read := Work())
    read.filled = True
    copy.advance()
    cancel_and_wait([copy])
    assert device.begun[0].filled


def test_the_fault_of_a_read_is_raised_to_who_waits(device: Copying) -> None:
    copy = copy_of(device, Work(fails=True))
    with pytest.raises(AioError, match="bad block"):
        copy.wait_filled()
    assert copy.failed
    assert not device.begun


def test_the_cpu_copies_when_the_unit_is_wanted() -> None:
    read, target = Work(), torch.zeros(4)
    copy = DelayedCopy(Copying(copies=False), [(read, target, torch.ones(4))])  # type: ignore[arg-type, list-item]
    read.filled = True
    copy.advance()
    assert not copy.filled
    copy.wait_filled()
    assert torch.equal(target, torch.ones(4))
    assert copy.filled
