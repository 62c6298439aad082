"""What the records of the ranks say about a collective that somebody waits for: pure, and worded for the user."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping

from infinity.comm.board import Record
from infinity.errors import RankFailed

_MESSAGE_MAX = 500


def not_coming(
    others: Mapping[int, Record], raised: Container[int], what: str, number: int | None
) -> RankFailed | None:
    """The failure that it is to wait for this collective, if a rank is known that will not come to it.

    raised: the numbers after which this rank itself broke off.
    """
    for rank, record in others.items():
        why = ""
        for after, text in record.raised:
            if number is not None and after < number and after not in raised:
                why = f"rank {rank} broke off before it: {text}"
        if record.left and (number is None or record.number < number):
            left = "has closed its engine" if record.left == "closed" else "has ended"
            why = f"{why}, and {left}" if why else f"rank {rank} {left}"
        if not why and record.number == number and record.last and record.last != what:
            why = f"rank {rank} has come to {record.last} instead; all ranks must call what is collective together"
        if why:
            return RankFailed(cut(f"{named(what, number)} cannot complete: {why}"), rank=rank)
    return None


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
    return RankFailed(
        f"{text}, though every rank has come to it: a connection is stuck, or the timeout too short"
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
