"""Communication streams in a world of one rank: order, errors, ends.
tests/distributed/test_watch.py has them among many."""

from __future__ import annotations

import contextlib
import gc
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from infinity._src.distributed import comm_streams
from infinity._src.distributed.comm_streams import (
    CollectiveRefused,
    CommStream,
    DeviceEvent,
    OrderedCommStream,
    PendingCollective,
)
from infinity._src.distributed.topology import Topology
from infinity._src.distributed.watchdog import Watchdog
from infinity.errors import AioError, DeviceCopyError, RankFailed
from tests.fake_cuda import FakeCuda, FakeStream


@pytest.fixture
def watchdog() -> Iterator[Watchdog]:
    found = Watchdog(Topology.alone(), None, timeout_s=0.3, name="alone")
    yield found
    found.close()
    found.close()


@pytest.fixture
def stream(watchdog: Watchdog) -> Iterator[CommStream]:
    before = threading.active_count()
    found = CommStream("alone", group=None, watchdog=watchdog)
    yield found
    found.close()
    found.close()
    assert threading.active_count() == before


def test_work_runs_in_order_and_is_numbered(stream: CommStream) -> None:
    seen: list[int] = []
    ops = [
        stream.submit("note", lambda group, i=i: seen.append(i), numbered=i % 2 == 0)
        for i in range(6)
    ]
    for op in ops:
        op.wait()
    assert seen == list(range(6))
    assert [op.number for op in ops] == [1, None, 2, None, 3, None]
    assert all(op.done and op.finished() for op in ops)


def test_close_waits_for_what_was_submitted(watchdog: Watchdog) -> None:
    stream = CommStream("closing", group=None, watchdog=watchdog)
    go, seen = threading.Event(), []
    stream.submit("wait", lambda group: go.wait())
    last = stream.submit("note", lambda group: seen.append(1))
    threading.Timer(0.1, go.set).start()
    stream.close()
    assert seen == [1]
    last.wait()
    with pytest.raises(AssertionError, match="closed"):
        stream.submit("more", lambda group: None)


def test_an_error_of_the_work_is_its_own_and_the_end_of_everything(
    stream: CommStream, watchdog: Watchdog
) -> None:
    def fails(group: Any) -> None:
        raise MemoryError("no room")

    go, seen = threading.Event(), []
    first = stream.submit("wait", lambda group: go.wait())
    bad = stream.submit("gather", fails)
    after = stream.submit("after", lambda group: seen.append(1))
    go.set()
    for _ in range(2):
        with pytest.raises(MemoryError, match="no room"):
            bad.wait()
    with pytest.raises(RankFailed, match="rank 0 failed: MemoryError: no room") as caught:
        after.wait()
    assert isinstance(caught.value.__cause__, MemoryError)
    assert not seen
    for call in (watchdog.check, first.wait, lambda: stream.submit("more", lambda group: None)):
        with pytest.raises(RankFailed) as again:
            call()
        assert again.value is watchdog.failure
    assert bad.finished()
    assert after.finished()


def test_work_that_takes_too_long_is_named_and_its_memory_kept_if_it_does_not_end(
    stream: CommStream, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("infinity._src.distributed.comm_streams.GIVE_UP_S", 0.1)
    go, memory = threading.Event(), torch.zeros(3)
    kept = weakref.ref(memory)
    op = stream.submit("gather of layers.3", lambda group, memory=memory: go.wait())
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


def test_what_has_run_holds_no_memory(stream: CommStream) -> None:
    memory = torch.zeros(3)
    gone = weakref.ref(memory)
    op = stream.submit("note", lambda group, memory=memory: None)
    del memory
    op.wait()
    stream.submit("next", lambda group: None).wait()
    gc.collect()
    assert gone() is None


def test_the_stream_that_waits_is_that_of_the_collectives_device(
    watchdog: Watchdog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The current device may be another, on which no kernel reads the result."""
    cuda = FakeCuda(monkeypatch)
    pending = PendingCollective(
        "gather of layers.3", None, lambda group: None, watchdog, device=torch.device("cuda", 1)
    )
    pending._event = cuda.current_stream(torch.device("cuda", 1)).record_event()
    pending._end()
    assert cuda.current == 0
    pending.wait()
    assert cuda.streams[1][0].waited == [pending._event]
    assert not cuda.streams[0][0].waited


def test_a_comm_stream_works_on_a_stream_of_the_models_device_behind_the_submitters(
    watchdog: Watchdog, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda, second = FakeCuda(monkeypatch), torch.device("cuda", 1)
    own = FakeStream(second, 99)
    inside: list[FakeStream] = []
    began: list[object] = []
    monkeypatch.setattr(torch.cuda, "set_device", began.append)
    monkeypatch.setattr(comm_streams, "relax_capture_mode", lambda: began.append("relaxed"))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: own if device == second else None)
    monkeypatch.setattr(
        torch.cuda, "stream", lambda stream: contextlib.nullcontext(inside.append(stream))
    )
    stream = CommStream("second", group=None, watchdog=watchdog, device=second)
    cuda.chosen[1] = 1
    op = stream.submit("gather", lambda group: None)
    op.wait()
    stream.close()
    # Its events are queried while other threads may capture graphs.
    assert began == [second, "relaxed"]
    assert inside == [own]
    # Each event knows its stream's device: the first is the submitter's, the second the
    # communication stream's.
    assert [event.device for event in own.waited] == [second]
    assert [event.device for event in cuda.streams[1][1].waited] == [second]


def test_a_comm_stream_that_is_stuck_keeps_its_group(
    watchdog: Watchdog, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[Any] = []
    monkeypatch.setattr("infinity._src.distributed.comm_streams.GIVE_UP_S", 0.05)
    monkeypatch.setattr("infinity._src.distributed.comm_streams._GIVEN_UP", kept)
    stream = CommStream("stuck", group="nccl", watchdog=watchdog)  # type: ignore[arg-type]
    go = threading.Event()
    stream.submit("wait", lambda group: go.wait())
    stream.close()
    go.set()
    stream._thread.join()
    assert "nccl" in [each for each in kept if isinstance(each, str)]


# -- several queues, one order ---------------------------------------------------------------------


class Names:
    """Names between ranks, of which there is one here. named: what rank 0 says, if this is another
    rank. lacking: collectives for which another rank lacks what they need."""

    def __init__(self, parent: int | None, lacking: tuple[str, ...] = ()) -> None:
        self.parent = parent
        self.lacking = lacking
        self.named: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.agreed: list[tuple[int, str]] = []

    def follow(self) -> int:
        return self.named.get()

    def agree(self, queue_index: int, what: str, *, lacks: bool | None = None) -> bool:
        self.agreed.append((queue_index, what))
        return bool(lacks) or what in self.lacking


class Read:
    """A ticket whose read ends when the test says so. error: what it ends with."""

    def __init__(self, error: Exception | None = None) -> None:
        self.ended = threading.Event()
        self.error = error

    @property
    def filled(self) -> bool:
        return self.ended.is_set()

    def wait_filled(
        self, timeout: float | None = None, *, check: Callable[[], None] | None = None
    ) -> None:
        while not self.ended.wait(0.01):
            if check is not None:
                check()
        if self.error is not None:
            raise self.error


@contextlib.contextmanager
def ordered(watchdog: Watchdog, names: Names) -> Iterator[OrderedCommStream]:
    before = threading.active_count()
    stream = OrderedCommStream(
        "ordered",
        ("gather", "reduce"),
        group=None,
        names=names,  # type: ignore[arg-type]
        watchdog=watchdog,
    )
    try:
        yield stream
    finally:
        stream.close()
        stream.close()
    assert threading.active_count() == before


def submitted(
    stream: OrderedCommStream,
    seen: list[str],
    queue_name: str,
    what: str,
    *needs: Read,
    excuses: Callable[[AioError], bool] | None = None,
) -> PendingCollective:
    return stream.submit_to(
        queue_name,
        what,
        lambda group: seen.append(what),
        needs=needs,  # type: ignore[arg-type]
        excuses=excuses,
    )


def test_on_rank_0_a_reduction_passes_a_gather_that_waits_for_its_read(watchdog: Watchdog) -> None:
    names, seen, read = Names(None), [], Read()
    with ordered(watchdog, names) as stream:
        first = submitted(stream, seen, "gather", "g0", read)
        second = submitted(stream, seen, "gather", "g1")
        submitted(stream, seen, "reduce", "r0").wait()
        assert not first.done
        read.ended.set()
        first.wait()
        second.wait()
    assert seen == ["r0", "g0", "g1"]
    assert names.agreed == [(1, "r0"), (0, "g0"), (0, "g1")]
    assert [first.number, second.number] == [1, 2]


def test_other_ranks_launch_what_is_named_once_it_is_there_and_ready(watchdog: Watchdog) -> None:
    names, seen, read = Names(0), [], Read()
    with ordered(watchdog, names) as stream:
        reduction = submitted(stream, seen, "reduce", "r0")
        # Rank 0 has chosen a gather that this rank has yet to submit, and then to read.
        names.named.put(0)
        time.sleep(0.05)
        gather = submitted(stream, seen, "gather", "g0", read)
        time.sleep(0.05)
        assert not reduction.done
        assert not seen
        read.ended.set()
        gather.wait()
        time.sleep(0.05)
        assert seen == ["g0"]
        names.named.put(1)
        reduction.wait()
    assert seen == ["g0", "r0"]


def test_a_read_that_fails_ends_the_engine_before_anybody_names_it(watchdog: Watchdog) -> None:
    error = AioError("no such luck", path="/swap", op="read", length=4096)
    names, seen, read = Names(0), [], Read(error)
    with ordered(watchdog, names) as stream:
        gather = submitted(stream, seen, "gather", "g0", read)
        reduction = submitted(stream, seen, "reduce", "r0")
        read.ended.set()
        with pytest.raises(AioError, match="no such luck"):
            gather.wait()
        # A rank that waits for a name wakes up like this when its connections are shut down.
        names.named.put(1)
        with pytest.raises(RankFailed, match="rank 0 failed: AioError"):
            reduction.wait()
        assert gather.finished()
        assert reduction.finished()
    assert not seen


@pytest.mark.parametrize("here", [True, False], ids=["here", "there"])
def test_a_shard_that_is_lacking_refuses_its_gather_alone(watchdog: Watchdog, here: bool) -> None:
    error = AioError("no such luck", path="/swap", op="read", length=4096) if here else None
    names, seen, read = Names(None, () if here else ("g0",)), [], Read(error)
    running, go = threading.Event(), threading.Event()
    with ordered(watchdog, names) as stream:
        before = stream.submit_to("reduce", "r0", lambda group: (running.set(), go.wait())[1])
        assert running.wait(5)
        gather = submitted(stream, seen, "gather", "g0", read, excuses=lambda _: True)
        behind = submitted(stream, seen, "gather", "g1")
        read.ended.set()
        # The refusal is known, but the gather ends in its turn: a wait for the last collective is a
        # wait for all.
        while not gather.refused:
            time.sleep(0.001)
        time.sleep(0.02)
        assert not gather.done
        go.set()
        with pytest.raises(CollectiveRefused, match="g0: no rank runs it") as caught:
            gather.wait()
        assert caught.value.__cause__ is error
        assert before.done
        behind.wait()
        assert gather.finished()
    assert seen == ["g1"]
    assert names.agreed == [(1, "r0"), (0, "g0"), (0, "g1")]
    assert watchdog.failure is None


def test_a_read_that_fails_where_no_update_did_is_not_excused(watchdog: Watchdog) -> None:
    error = AioError("no such luck", path="/swap", op="read", length=4096)
    names, seen, read = Names(None), [], Read(error)
    with ordered(watchdog, names) as stream:
        gather = submitted(stream, seen, "gather", "g0", read, excuses=lambda _: False)
        read.ended.set()
        with pytest.raises(AioError, match="no such luck"):
            gather.wait()
    assert not seen
    assert watchdog.failure is not None


def test_a_failure_ends_what_waits_for_a_read_that_never_ends(watchdog: Watchdog) -> None:
    names, seen = Names(None), []
    with ordered(watchdog, names) as stream:
        gather = submitted(stream, seen, "gather", "g0", Read())
        watchdog.report_failure(RankFailed("rank 1 has ended", rank=1))
        with pytest.raises(RankFailed, match="rank 1 has ended"):
            gather.wait()
        assert gather.finished()
    assert not seen


# -- a device that hangs ---------------------------------------------------------------------------


class Event:
    """A CUDA event; `after` counts down the queries until the device comes to it."""

    def __init__(self, after: int) -> None:
        self.after = after

    def query(self) -> bool:
        self.after -= 1
        return self.after < 0

    def synchronize(self) -> None:
        raise AssertionError("a wait without a limit")


def test_a_device_event_is_waited_for_with_a_limit() -> None:
    assert DeviceEvent(Event(20)).wait(5.0)
    start_s = time.monotonic()
    assert not DeviceEvent(Event(1 << 60)).wait(0.2)
    assert time.monotonic() - start_s >= 0.2


def test_a_device_that_has_failed_runs_nothing_any_more() -> None:
    class Failed(Event):
        def query(self) -> bool:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    assert DeviceEvent(Failed(0)).is_set()


class Streams:
    """Fakes of torch.cuda for a communication stream, and a log of the devices that it names.
    after: of events."""

    def __init__(self, patch: pytest.MonkeyPatch, after: int = 0) -> None:
        self.after = after
        self.log: list[tuple[str, object]] = []
        patch.setattr(torch.cuda, "current_stream", self.of)
        patch.setattr(torch.cuda, "Stream", self.of)
        patch.setattr(torch.cuda, "set_device", lambda device: self.log.append(("set", device)))
        patch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
        patch.setattr(comm_streams, "relax_capture_mode", self.relax)

    def relax(self) -> None:
        self.log.append(("relaxed", SECOND))

    def of(self, device: object = None) -> Any:
        self.log.append(("stream", device))
        return self

    def record_event(self) -> Event:
        return Event(self.after)

    def wait_event(self, event: object) -> None:
        assert isinstance(event, Event)


SECOND = torch.device("cuda", 1)


def test_a_comm_stream_is_drained_only_when_each_that_it_has_launched_has_ended(
    watchdog: Watchdog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a failure the last one never begins, while kernels of those before it still run."""
    monkeypatch.setattr("infinity._src.distributed.comm_streams.GIVE_UP_S", 0.1)
    monkeypatch.setattr("infinity._src.distributed.comm_streams._GIVEN_UP", [])
    streams = Streams(monkeypatch, after=1 << 60)
    stream = CommStream("there", group=None, watchdog=watchdog, device=SECOND)
    go = threading.Event()
    stream.submit("gather of layers.3", lambda group: None)._done.wait()
    stream.submit("gather of layers.4", lambda group: go.wait())
    last = stream.submit("gather of layers.5", lambda group: None)
    watchdog.report_failure(RankFailed("rank 1 has ended", rank=1))
    streams.after = 0
    go.set()
    last._done.wait()
    assert last.finished(), "it has never begun"
    assert not stream.drain()
    stream.close()


def test_a_comm_stream_is_not_drained_while_one_runs_that_began_during_the_wait(
    watchdog: Watchdog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The middle one is launched while `drain` waits for the last, and its rank dies in it."""
    monkeypatch.setattr("infinity._src.distributed.comm_streams.GIVE_UP_S", 0.1)
    monkeypatch.setattr("infinity._src.distributed.comm_streams._GIVEN_UP", [])
    streams = Streams(monkeypatch)
    stream = CommStream("there", group=None, watchdog=watchdog, device=SECOND)
    go = threading.Event()

    def dies(_group: Any) -> None:
        streams.after = 1 << 60  # its kernel waits for the rank
        watchdog.report_failure(RankFailed("rank 1 has ended", rank=1))

    stream.submit("gather of layers.3", lambda group: go.wait())
    stream.submit("gather of layers.4", dies)
    stream.submit("gather of layers.5", lambda group: None)
    threading.Timer(0.1, go.set).start()
    monkeypatch.setattr(watchdog, "timeout_s", 30.0)
    assert not stream.drain()
    stream.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_comm_stream_without_a_stream_ends_what_is_submitted(
    watchdog: Watchdog, monkeypatch: pytest.MonkeyPatch
) -> None:
    Streams(monkeypatch)

    def refused() -> None:
        raise DeviceCopyError("the device's driver refuses a mode of capture (999)")

    monkeypatch.setattr(comm_streams, "relax_capture_mode", refused)
    monkeypatch.setattr(watchdog, "timeout_s", 600.0)
    stream = CommStream("there", group=None, watchdog=watchdog, device=SECOND)
    with pytest.raises(RankFailed, match="refuses a mode of capture"):
        stream.submit("gather", lambda group: None).wait()
    stream.close()


def test_a_stream_forgets_what_has_ended(
    watchdog: Watchdog, monkeypatch: pytest.MonkeyPatch
) -> None:
    Streams(monkeypatch)
    stream = CommStream("there", group=None, watchdog=watchdog, device=SECOND)
    for turn in range(100):
        stream.submit(f"gather {turn}", lambda group: None)
    assert stream.drain()
    assert len(stream._launched) == 1
    stream.close()


def test_a_kernel_that_never_ends_is_given_up_and_its_memory_kept(
    watchdog: Watchdog, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kept: list[Any] = []
    monkeypatch.setattr("infinity._src.distributed.comm_streams.GIVE_UP_S", 0.1)
    monkeypatch.setattr("infinity._src.distributed.comm_streams._GIVEN_UP", kept)
    Streams(monkeypatch, after=1 << 60)
    memory = torch.zeros(3)
    alive = weakref.ref(memory)
    stream = CommStream("there", group=None, watchdog=watchdog, device=SECOND)
    op = stream.submit("gather of layers.3", lambda group, memory=memory: None)
    del memory
    op._done.wait()
    # No rank comes within the watchdog's 0.3 s; the event never does.
    assert not op.finished()
    stream.close()
    assert "its memory is kept" in caplog.text
    del op
    gc.collect()
    assert alive() is not None
    assert kept
