"""Meetings of ranks: each rank gets the messages of all, and if one rank fails at any moment, all
fail."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from infinity._src.distributed.communicator import Comm
from infinity._src.distributed.rendezvous import Rendezvous
from infinity.errors import PeerFailed
from tests.distributed.test_two_ranks import on_ranks


def told(comm: Comm) -> list[list[dict[str, Any]]]:
    with Rendezvous(comm, "telling") as meeting:
        sizes = meeting.all_gather_object({"rank": comm.rank, "size": 2**60 + comm.rank})
        texts = meeting.all_gather_object({"text": "größer" * 1000 * comm.rank})
        return [sizes, texts]


def one_fails(comm: Comm, culprits: tuple[int, ...], rounds: int) -> str:
    """Leave a meeting on the ranks `culprits` after so many rounds. Returns the error that this
    rank gets, with its type, or "well"."""
    try:
        with Rendezvous(comm, "trying") as meeting:
            for number in range(3):
                if comm.rank in culprits and number == rounds:
                    raise ValueError(f"drive {comm.rank} is missing: {'x' * 5000}")
                meeting.all_gather_object({"number": number})
            if comm.rank in culprits:
                raise ValueError(f"drive {comm.rank} is missing: {'x' * 5000}")
    except (ValueError, PeerFailed) as error:
        return f"{type(error).__name__}: {error}"
    return "well"


def ends_early(comm: Comm) -> str:
    """After the last round a meeting waits for no rank, so a rank that fails then fails alone."""
    try:
        with Rendezvous(comm, "ending") as meeting:
            meeting.end()
            if comm.rank == 1:
                raise KeyError("late")
    except KeyError:
        return "failed alone"
    return "well"


def meetings(rank: int, place: Path) -> dict[str, Any]:
    comm = Comm.open(timeout_s=60.0, name="meetings")
    found: dict[str, Any] = {"told": told(comm)}
    for culprits in ((1,), (0, 2)):
        for rounds in range(4):
            found[f"{culprits} {rounds}"] = one_fails(comm, culprits, rounds)
    found["early"] = ends_early(comm)
    # if a collective of a meeting were pending, this result would be wrong
    found["after"] = comm.all_reduce_sum([1.0])
    comm.close()
    return found


def test_three_ranks_meet_and_fail_together(tmp_path: Path) -> None:
    results = on_ranks(meetings, tmp_path / "run", 3)
    for rank, found in enumerate(results):
        sizes, texts = found["told"]
        assert sizes == [{"rank": other, "size": 2**60 + other} for other in range(3)]
        assert texts == [{"text": "größer" * 1000 * other} for other in range(3)]
        for rounds in range(4):
            alone, both = found[f"(1,) {rounds}"], found[f"(0, 2) {rounds}"]
            if rank == 1:
                assert alone.startswith("ValueError: drive 1 is missing")
                assert both.startswith("PeerFailed: ranks 0, 2 failed at trying")
                assert "rank 0: ValueError: drive 0" in both
                assert "rank 2: ValueError: drive 2" in both
            else:
                assert alone.startswith("PeerFailed: rank 1 failed at trying")
                assert "rank 1: ValueError: drive 1 is missing" in alone
                assert both.startswith(f"ValueError: drive {rank} is missing")
        assert found["early"] == ("failed alone" if rank == 1 else "well")
        assert found["after"] == [3.0]


def test_alone_a_meeting_calls_nothing_and_errors_pass() -> None:
    with Rendezvous(Comm(), "alone") as meeting:
        assert meeting.all_gather_object({"a": 1}) == [{"a": 1}]
        meeting.end()
        assert meeting.all_gather_object({}) == [{}]
    with pytest.raises(KeyError), Rendezvous(Comm(), "alone"):
        raise KeyError("mine")
