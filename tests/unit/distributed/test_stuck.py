"""A device that is stuck behind a collective whose rank has died, and whose abort hangs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from infinity._src.distributed import communicator
from infinity._src.distributed.communicator import Comm
from infinity._src.distributed.topology import Topology
from infinity._src.distributed.watchdog import Watchdog
from infinity.errors import RankFailed


class Exchange:
    """An exchange stream."""

    def __init__(self, *, on_device: bool, drains: bool) -> None:
        self.on_device, self._drains = on_device, drains

    def drain(self) -> bool:
        return self._drains

    def close(self) -> None:
        pass


@pytest.fixture
def comm(monkeypatch: pytest.MonkeyPatch) -> Iterator[Comm]:
    """A communicator of two ranks without communication streams, whose watchdog watches no process.
    """
    found = Comm(Topology.of(0, 2, 2))
    found.watchdog = Watchdog(Topology.alone(), None, timeout_s=1.0, name="stuck")
    yield found
    found.close()


def fail(comm: Comm) -> None:
    assert comm.watchdog is not None
    comm.watchdog.report_failure(RankFailed("rank 1 has ended", rank=1))


def assert_stuck(comm: Comm) -> None:
    for call in (comm.check_stuck, comm.drain, comm.check_stuck):
        with pytest.raises(RankFailed, match=r"rank 1 has ended; .* this process must end") as met:
            call()
        assert met.value.rank == 1


def test_an_abort_that_hangs_is_the_end_of_every_wait_also_after_closing(
    comm: Comm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(communicator, "abort_groups", lambda _groups: False)
    fail(comm)
    comm.check_stuck()  # not yet
    comm._abort()
    assert_stuck(comm)
    comm.close()
    assert_stuck(comm)


def test_an_abort_that_ends_after_closing_changes_nothing(
    comm: Comm, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, go = threading.Event(), threading.Event()

    def hangs(_groups: Any) -> bool:
        began.set()
        return not go.wait(10)

    monkeypatch.setattr(communicator, "abort_groups", hangs)
    fail(comm)
    thread = threading.Thread(target=comm._abort)
    thread.start()
    began.wait(10)
    comm.close()
    go.set()
    thread.join()
    assert_stuck(comm)


@pytest.mark.parametrize("on_device", [False, True])
def test_a_comm_stream_that_does_not_drain_is_a_stuck_device_where_it_works_on_one(
    comm: Comm, on_device: bool
) -> None:
    comm._exchange = Exchange(on_device=on_device, drains=False)  # type: ignore[assignment]
    fail(comm)
    if on_device:
        with pytest.raises(RankFailed, match="this process must end"):
            comm.drain()
        # From here on every wait knows, whatever became of the abort.
        assert_stuck(comm)
    else:
        comm.drain()
        comm.check_stuck()


def test_what_drains_is_not_stuck(comm: Comm) -> None:
    comm._exchange = Exchange(on_device=True, drains=True)  # type: ignore[assignment]
    fail(comm)
    comm.drain()
    comm.check_stuck()
