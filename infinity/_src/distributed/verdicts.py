"""What the records of the ranks say about a collective that somebody waits for: pure, and worded for the user."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping

from infinity._src.distributed.heartbeat import Record
from infinity.errors import RankFailed, RanksDiverged

_MESSAGE_MAX = 500


def not_coming(
    others: Mapping[int, Record],
    raised: Container[int],
    what: str,
    number: int | None,
    names: Mapping[int, str],
) -> RankFailed | None:
    """The failure that it is to wait for this collective, if a rank is known that will not come to it.

    raised: the numbers after which this rank itself broke off. names: this rank's own collectives, by number, the last few.

    Two names under one number are programs that have diverged, whichever lanes they are in: a number is given once, by the main
    thread, in the order of the program, and what was said under it stays. A rank that is merely late is never accused: it has
    said nothing yet under the numbers to come, and under those before it has said the same as this one.
    Ranks that wait for each other are found: take two that have come to `a` and `b`, a <= b. Were all names up to `a` the same,
    each lane of both would begin with the same collectives, and what the first waits for would complete, since the other has
    submitted it. So some name up to `a` differs. It is among the last few, since who has submitted one that is stuck soon waits;
    or names after it differ, too, being shifted. What is left ends with the timeout.
    """
    for rank, record in others.items():
        why = ""
        for after, text in record.raised:
            if number is not None and after < number and after not in raised:
                why = f"rank {rank} broke off before it: {text}"
        if record.left and (number is None or record.number < number):
            left = "has closed its engine" if record.left == "closed" else "has ended"
            why = f"{why}, and {left}" if why else f"rank {rank} {left}"
        if why:
            return RankFailed(cut(f"{named(what, number)} cannot complete: {why}"), rank=rank)
        if number is not None and (why := _apart(rank, record.names, names, number)):
            return RanksDiverged(cut(f"{named(what, number)} cannot complete: {why}"), rank=rank)
    return None


def _apart(rank: int, theirs: Mapping[int, str], mine: Mapping[int, str], waits_for: int) -> str:
    """Where a rank's collectives differ from this one's, in words; empty if they are not known to."""
    both = sorted(theirs.keys() & mine.keys())
    at = next((number for number in both if theirs[number] != mine[number]), None)
    if at is None:
        return ""
    if at == waits_for:
        where = f"rank {rank} has come to {theirs[at]} instead"
    else:
        where = f"as collective {at} this rank has come to {mine[at]}, and rank {rank} to {theirs[at]}"
    return f"{where}; all ranks must run the same modules in the same order, and call what is collective together"


def late(
    ranks: Iterable[int],
    others: Mapping[int, Record],
    what: str,
    number: int | None,
    *,
    timeout_s: float,
    fresh: bool,
) -> RankFailed:
    """The failure that it is to have waited for `timeout_s`, naming who among `ranks` has not come as far as that is known.

    fresh: whether the store still answers.
    """
    text = f"{named(what, number)} has not completed within {timeout_s:g} s"
    missing = [rank for rank in ranks if rank not in others]
    if missing:
        return RankFailed(f"{text}: {ranks_of(missing)} never began", rank=missing[0], ranks=tuple(missing))
    behind = [rank for rank, record in others.items() if number is not None and record.number < number]
    if behind:
        last = [
            f"rank {rank} last came to {named(others[rank].last, others[rank].number)}" for rank in behind
        ]
        text = f"{text}: {ranks_of(behind)} did not come ({'; '.join(last)})"
        return RankFailed(cut(text), rank=behind[0], ranks=tuple(behind))
    if not fresh:
        text = f"{text}, and the store of the default group, which rank 0 hosts, does not answer"
        return RankFailed(text, rank=0)
    if number is None:
        return RankFailed(f"{text}, and it is not known which rank has not come")
    past = [rank for rank, record in others.items() if number not in record.names]
    if past:
        last = [f"rank {rank} has come to {named(others[rank].last, others[rank].number)}" for rank in past]
        text = f"{text}, though no rank is behind ({'; '.join(last)})"
        return RankFailed(
            cut(f"{text}: a connection or a drive is stuck, ranks diverged long ago, or the timeout is too short")
        )
    return RankFailed(
        f"{text}, though every rank has come to it: a connection or a drive is stuck, or the timeout too short"
    )


def died(rank: int, record: Record, how: str) -> RankFailed:
    """The failure that it is that `rank` is gone."""
    text = f"rank {rank} on {record.host[0]} has ended: {how}"
    if record.raised:
        text += f"; it had broken off ({record.raised[-1][1]})"
    return RankFailed(cut(text), rank=rank)


def told(me: int, teller: int, culprit: int | None, text: str) -> RankFailed:
    """The failure that rank `teller` tells of."""
    if culprit == me:
        return RankFailed(cut(f"rank {teller} gave up on this rank ({me}): {text}"), rank=teller)
    if culprit != teller and "(found by rank" not in text:
        text = f"{text} (found by rank {teller})"
    return RankFailed(text, rank=culprit)


def named(what: str, number: int | None) -> str:
    """A collective, as messages name it."""
    if number == 0:
        return "no collective yet"
    return what if number is None else f"{what}, collective {number}"


def ranks_of(ranks: list[int]) -> str:
    """Ranks, as messages name them."""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}"


def cut(text: str) -> str:
    """A message short enough for a record."""
    return text if len(text) <= _MESSAGE_MAX else f"{text[:_MESSAGE_MAX]} ..."
