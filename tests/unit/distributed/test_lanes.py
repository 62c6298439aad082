"""Lanes in a world of one rank: order, errors, ends. tests/distributed/test_watch.py has them among
many."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from infinity._src.distributed.lanes import Lane, PendingCollective
from infinity._src.distributed.topology import Topology
from infinity._src.distributed.watchdog import Watchdog
from infinity.errors import RankFailed
from tests.fake_cuda import FakeCuda, FakeStream


@pytest.fixture
def watchdog() -> Iterator[Watchdog]:
    found = Watchdog(Topology.alone(), None, timeout_s=0.3, name="alone")
    yield found
    found.close()
    found.close()


@pytest.fixture
def lane(watchdog: Watchdog) -> Iterator[Lane]:
    before = threading.active_count()
    found = Lane("alone", group=None, watchdog=watchdog)
    yield found
    found.close()
    found.close()
    assert threading.active_count() == before


def test_work_runs_in_order_and_is_numbered(lane: Lane) -> None:
    seen: list[int] = []
    ops = [
        lane.submit("note", lambda group, i=i: seen.append(i), numbered=i % 2 == 0)
        for i in range(6)
    ]
    for op in ops:
        op.wait()
    assert seen == list(range(6))
    assert [op.number for op in ops] == [1, None, 2, None, 3, None]
    assert all(op.done and op.finished() for op in ops)


def test_close_waits_for_what_was_submitted(watchdog: Watchdog) -> None:
    lane = Lane("closing", group=None, watchdog=watchdog)
    go, seen = threading.Event(), []
    lane.submit("wait", lambda group: go.wait())
    last = lane.submit("note", lambda group: seen.append(1))
    threading.Timer(0.1, go.set).start()
    lane.close()
    assert seen == [1]
    last.wait()
    with pytest.raises(AssertionError, match="closed"):
        lane.submit("more", lambda group: None)


def test_an_error_of_the_work_is_its_own_and_the_end_of_everything(
    lane: Lane, watchdog: Watchdog
) -> None:
    def fails(group: Any) -> None:
        raise MemoryError("no room")

    go, seen = threading.Event(), []
    first = lane.submit("wait", lambda group: go.wait())
    bad = lane.submit("gather", fails)
    after = lane.submit("after", lambda group: seen.append(1))
    go.set()
    for _ in range(2):
        with pytest.raises(MemoryError, match="no room"):
            bad.wait()
    with pytest.raises(RankFailed, match="rank 0 failed: MemoryError: no room") as caught:
        after.wait()
    assert isinstance(caught.value.__cause__, MemoryError)
    assert not seen
    for call in (watchdog.check, first.wait, lambda: lane.submit("more", lambda group: None)):
        with pytest.raises(RankFailed) as again:
            call()
        assert again.value is watchdog.failure
    assert bad.finished()
    assert after.finished()


def test_work_that_takes_too_long_is_named_and_its_memory_kept_if_it_does_not_end(
    lane: Lane, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("infinity._src.distributed.lanes.GIVE_UP_S", 0.1)
    go, memory = threading.Event(), torch.zeros(3)
    kept = weakref.ref(memory)
    op = lane.submit("gather of layers.3", lambda group, memory=memory: go.wait())
    del memory
    with pytest.raises(
        RankFailed, match=r"gather of layers\.3, collective 1 has not completed within 0\.3 s"
    ):
        op.wait()
    assert not op.finished()
    assert "its memory is kept" in caplog.text
    go.set()
    op._done.wait()
    del op
    gc.collect()
    assert kept() is not None


def test_what_has_run_holds_no_memory(lane: Lane) -> None:
    memory = torch.zeros(3)
    gone = weakref.ref(memory)
    op = lane.submit("note", lambda group, memory=memory: None)
    del memory
    op.wait()
    lane.submit("next", lambda group: None).wait()
    gc.collect()
    assert gone() is None


def test_the_stream_that_waits_is_that_of_the_collectives_device(
    watchdog: Watchdog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The current device may be another, on which no kernel reads the result."""
    cuda = FakeCuda(monkeypatch)
    pending = PendingCollective("gather of layers.3", None, lambda group: None, watchdog)
    pending._event = cuda.current_stream(torch.device("cuda", 1)).record_event()
    pending._end()
    assert cuda.current == 0
    pending.wait()
    assert cuda.streams[1][0].waited == [pending._event]
    assert not cuda.streams[0][0].waited


def test_a_lane_works_on_a_stream_of_the_models_device_behind_the_submitters(
    watchdog: Watchdog, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda, second = FakeCuda(monkeypatch), torch.device("cuda", 1)
    own = FakeStream(second, 99)
    inside: list[FakeStream] = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: own if device == second else None)
    monkeypatch.setattr(
        torch.cuda, "stream", lambda stream: contextlib.nullcontext(inside.append(stream))
    )
    lane = Lane("second", group=None, watchdog=watchdog, device=second)
    cuda.chosen[1] = 1
    op = lane.submit("gather", lambda group: None)
    op.wait()
    lane.close()
    assert inside == [own]
    # Each event knows its stream's device: the first is the submitter's, the second the lane's.
    assert [event.device for event in own.waited] == [second]
    assert [event.device for event in cuda.streams[1][1].waited] == [second]


def test_each_group_of_a_lane_is_broken_off_by_itself_and_that_of_names_first(
    watchdog: Watchdog, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broken: list[str] = []

    def break_off(group: Any) -> bool:
        broken.append(group)
        raise RuntimeError(f"{group} does not abort")

    monkeypatch.setattr("infinity._src.distributed.lanes.abort_group", break_off)
    lane = Lane("two groups", group="nccl", beside="gloo", watchdog=watchdog)  # type: ignore[arg-type]
    lane._break_off()
    lane.close()
    assert broken == ["gloo", "nccl"]
    assert all(f"RuntimeError: {group} does not abort" in caplog.text for group in broken)


def test_a_lane_that_is_stuck_keeps_both_of_its_groups(
    watchdog: Watchdog, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[Any] = []
    monkeypatch.setattr("infinity._src.distributed.lanes.GIVE_UP_S", 0.05)
    monkeypatch.setattr("infinity._src.distributed.lanes._GIVEN_UP", kept)
    monkeypatch.setattr("infinity._src.distributed.lanes.abort_group", lambda group: True)
    lane, go = Lane("stuck", group="nccl", beside="gloo", watchdog=watchdog), threading.Event()  # type: ignore[arg-type]
    lane.submit("wait", lambda group: go.wait())
    lane.close()
    go.set()
    lane._thread.join()
    assert {"nccl", "gloo"} <= {each for each in kept if isinstance(each, str)}
