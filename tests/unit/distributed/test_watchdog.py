"""Errors that the watchdog derives from the ranks' records, about a collective that a rank waits
for."""

from __future__ import annotations

import atexit
import dataclasses
import os
import pickle
import threading

import pytest
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from infinity._src.distributed.heartbeat import Host, RankRecord
from infinity._src.distributed.topology import Topology
from infinity._src.distributed.watchdog import (
    Watchdog,
    find_failure,
    published_culprit,
    relayed_error,
    shorten,
    timeout_error,
)
from infinity.aio._swap_owner import start_time_of
from infinity.errors import RankFailed, RanksDiverged

HERE = RankRecord(number=7, last="gather of a", host=("host", "boot", 1, 2))


def test_a_record_survives_the_store() -> None:
    record = RankRecord(
        ("a", "b", 1, 2),
        3,
        4,
        5,
        6,
        "sum",
        ((5, "a"), (6, "sum")),
        ((1, "x"), (2, "y")),
        (None, "why"),
        "closed",
        True,
    )
    assert RankRecord.parse(record.json().encode()) == record
    assert RankRecord.parse(RankRecord().json().encode()) == RankRecord()


@pytest.mark.parametrize(
    ("record", "raised", "number", "comes"),
    [
        (RankRecord(number=7), (), 8, True),  # only late
        (RankRecord(number=7, left="closed"), (), 7, True),  # did its part before it left
        (RankRecord(number=7, left="closed"), (), 8, False),
        (RankRecord(number=7, left="ended"), (), 8, False),
        (RankRecord(number=7, left="closed"), (), None, False),
        (RankRecord(number=7, raised=((7, "e"),)), (), 7, True),
        (RankRecord(number=7, raised=((7, "e"),)), (), 8, False),
        (RankRecord(number=7, raised=((7, "e"),)), (7,), 8, True),
        (RankRecord(number=9, raised=((3, "e"), (7, "e"))), (7,), 8, False),
        (RankRecord(number=7, raised=((7, "e"),)), (), None, True),
    ],
)
def test_who_comes_to_a_collective(
    record: RankRecord, raised: tuple[int, ...], number: int | None, comes: bool
) -> None:
    found = find_failure(0, {1: record}, raised, "sum", number, {})
    assert (found is None) == comes
    assert found is None or found.rank == 1


def test_a_rank_that_closes_because_of_a_failure_is_not_blamed_for_it() -> None:
    closed = RankRecord(number=3, last="sum", failed=(2, "rank 2 is gone"), left="closed")
    found = find_failure(1, {0: closed}, (), "sum", 5, {})
    assert found is not None
    assert (found.rank, str(found)) == (2, "rank 2 is gone (found by rank 0)")


def program(*names: str, first: int = 1) -> tuple[tuple[int, str], ...]:
    return tuple(enumerate(names, first))


@pytest.mark.parametrize(
    ("mine", "theirs", "text"),
    [
        # it waits in another communication stream, and reached the number first
        ("abcd", "abx", "as collective 3 this rank has reached c, and rank 1 x"),
        ("abcd", "abcx", "rank 1 has reached x instead"),
        ("abcd", "abxcd", "as collective 3 this rank has reached c, and rank 1 x"),
        ("abcd", "xabcd", "as collective 1 this rank has reached a, and rank 1 x"),
    ],
)
def test_two_names_under_one_number_are_told_whoever_is_ahead(
    mine: str, theirs: str, text: str
) -> None:
    names = dict(program(*mine))
    for known in range(1, len(theirs) + 1):  # of the last few
        recent = program(*theirs)[-known:]
        found = find_failure(
            0,
            {1: RankRecord(number=len(theirs), last=theirs[-1], recent=recent)},
            (),
            "d",
            4,
            names,
        )
        differ = [number for number, name in recent if names.get(number, name) != name]
        assert (found is not None) == bool(differ)
        if found is not None and differ[0] == next(
            n for n in names if theirs[n - 1] != mine[n - 1]
        ):
            assert isinstance(found, RanksDiverged)
            assert str(found).startswith(f"d, collective 4 cannot complete: {text}; all ranks must")
            assert found.rank == 1


def test_a_rank_that_is_late_or_early_is_never_accused() -> None:
    whole = program(*(f"gather of {index % 5}" for index in range(40)))
    for at in range(1, 40):
        for other in range(41):
            recent = whole[max(0, other - 6) : other]
            last = recent[-1][1] if recent else ""
            for record in (
                RankRecord(number=other, last=last),
                RankRecord(number=other, last=last, recent=recent),
            ):
                assert (
                    find_failure(
                        0, {1: record}, (), whole[at - 1][1], at, dict(whole[max(0, at - 6) : at])
                    )
                    is None
                )


def test_who_is_late_is_named() -> None:
    def verdict(
        others: dict[int, RankRecord], number: int | None = 8, fresh: bool = True
    ) -> RankFailed:
        return timeout_error([1, 2, 3], others, "sum", number, timeout_s=5, fresh=fresh)

    behind, with_us = HERE, RankRecord(number=8)
    found = verdict({1: behind, 2: with_us, 3: behind})
    assert found.ranks == (1, 3)
    assert str(found) == (
        "sum, collective 8 has not completed within 5 s: ranks 1, 3 did not reach it (rank 1 last "
        "reached gather of a, collective 7; rank 3 last reached gather of a, collective 7)"
    )
    assert verdict({1: with_us, 3: with_us}).ranks == (2,)
    assert verdict(dict.fromkeys((1, 2, 3), with_us)).rank is None
    came = RankRecord(number=8, last="sum")
    assert "though every rank has reached it" in str(verdict(dict.fromkeys((1, 2, 3), came)))
    past = verdict({1: came, 2: RankRecord(number=99, last="gather of b"), 3: came})
    assert "though no rank is behind (rank 2 has reached gather of b, collective 99)" in str(past)
    assert past.rank is None
    assert verdict(dict.fromkeys((1, 2, 3), with_us), fresh=False).rank == 0
    assert verdict(dict.fromkeys((1, 2, 3), behind), number=None).rank is None


def test_a_culprit_that_another_rank_names_is_kept() -> None:
    assert relayed_error(0, 1, 2, "rank 2 has ended").rank == 2
    assert str(relayed_error(0, 1, 2, "rank 2 has ended")) == "rank 2 has ended (found by rank 1)"
    assert (
        str(relayed_error(0, 3, 2, "rank 2 has ended (found by rank 1)"))
        == "rank 2 has ended (found by rank 1)"
    )
    assert relayed_error(0, 1, 0, "no sign of life").rank == 1
    assert relayed_error(0, 1, 1, "rank 1 failed: e").rank == 1
    broke_off = "this rank (1) raised (e), and rank 0 continued"
    assert str(relayed_error(0, 1, 1, broke_off)) == "rank 1 raised (e), and rank 0 continued"
    assert relayed_error(0, 1, None, "a connection broke").rank is None
    # Rank 2 gives up on rank 1, and rank 0 learns it from rank 1.
    told = relayed_error(1, 2, 1, "gather cannot complete: rank 1 raised before it: e")
    assert (told.rank, published_culprit(1, told)) == (2, 1)
    heard = relayed_error(0, 1, published_culprit(1, told), str(told))
    assert (heard.rank, published_culprit(0, heard)) == (1, 1)
    assert str(heard) == (
        "rank 2 gave up on rank 1: gather cannot complete: rank 1 raised before it: e"
    )


def test_messages_are_bounded_and_failures_can_be_pickled() -> None:
    assert len(shorten("x" * 10_000)) < 600
    again = pickle.loads(pickle.dumps(RankFailed("gone", rank=2)))
    assert (str(again), again.rank, again.ranks) == ("gone", 2, (2,))


class Process:
    """A process of a peer."""

    def __init__(self, ended: bool) -> None:
        self._ended = ended

    def ended(self) -> bool:
        return self._ended

    def close(self) -> None:
        pass


class Store:
    """Records of the other ranks. why: error of rank 0's store, which is known only after some
    seconds."""

    def __init__(self, records: list[RankRecord | None], why: str, after_s: float) -> None:
        self.records, self.lost = records, ""
        self._why, self._after_s = why, after_s

    def refresh(self, limit_s: float) -> bool:
        if limit_s >= self._after_s:
            self.lost = self._why
        return not self._why

    def publish(self, **fields: object) -> None:
        pass


@pytest.mark.parametrize(
    ("lost", "after_s", "first", "culprit"),
    [
        ("", 0.0, RankRecord(host=HERE.host), 2),
        ("Broken pipe", 0.0, RankRecord(host=HERE.host), 0),
        ("Broken pipe", 5.0, RankRecord(host=HERE.host), 0),  # on a busy machine
        ("Broken pipe", 0.0, None, 0),  # it died before its first record was read
        ("Broken pipe", 0.0, RankRecord(left="closed", host=HERE.host), 2),
    ],
)
def test_a_rank_that_ends_with_the_store_is_not_blamed_for_rank_0(
    lost: str,
    after_s: float,
    first: RankRecord | None,
    culprit: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rank 0 has died, and then rank 2, which lost the store. The kernel shows rank 2's end first:
    it closes rank 0's connections before it reports rank 0's end."""
    watchdog = Watchdog(Topology.alone(), None, timeout_s=1.0, name="judge")
    peers = [first, None, RankRecord(host=HERE.host)]
    monkeypatch.setattr(watchdog, "topology", Topology.of(1, 3, 3))
    monkeypatch.setattr(watchdog, "_heartbeat", Store(peers, lost, after_s))
    monkeypatch.setattr(watchdog, "_wake_thread", lambda: None)
    known = {0: Process(False)} if first else {}
    monkeypatch.setattr(watchdog, "_processes", {**known, 2: Process(True)})
    watchdog._check_ranks(True, 0.1)
    assert watchdog.failure is not None
    assert watchdog.failure.rank == culprit


@pytest.mark.parametrize("failed", [True, False])
def test_rank_0_that_ends_after_a_failure_stays_until_a_late_rank_has_read_it(failed: bool) -> None:
    """Rank 0's process has the store. The interpreter exits without close()."""
    store, here = dist.HashStore(), Host.this()
    records = PrefixStore("infinity/late", store)
    host = (here.name, here.boot_id, here.network, here.pids)
    late = RankRecord(host=host, pid=os.getpid(), start_time=start_time_of(os.getpid()))
    records.set("1", late.json())
    watchdog = Watchdog(Topology.of(0, 2, 2), store, timeout_s=60.0, name="late")
    watchdog.wait_for_all_ranks()
    if failed:
        watchdog.report_failure(RankFailed("rank 1 has broken off", rank=1))
    # Each communication stream calls this first.
    watchdog.report_exit()
    exits = threading.Thread(target=watchdog._exits)
    exits.start()
    if failed:
        # The thread has ended without closing pidfds that are still polled.
        watchdog._thread.join(5.0)
        assert not watchdog._thread.is_alive()
        assert watchdog._processes[1].fd >= 0
    exits.join(0.7)
    assert exits.is_alive() == failed
    records.set("1", dataclasses.replace(late, read=True).json())
    exits.join(5.0)
    assert not exits.is_alive()
    assert watchdog._processes[1].fd < 0
    atexit.unregister(watchdog._exits)
