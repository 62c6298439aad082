"""Watchdog: finds a rank that died, failed, left or does not arrive, so that no rank waits for it
for ever.

    this rank        next_number, report_exception, report_failure, close ──► Heartbeat ──► store
    its thread       pids of this host (at once) · records of all ranks (0.5 s)
                     · beats of other hosts (15 s) ──► failure
    a waiting call   raises the failure; or finds that a rank broke off before this collective, has
                     closed, submitted another one, or does not arrive

A failure is final: every later call on every rank raises the first one.

Waiting times are summed over loop iterations, each counted as at most a second. So a process that
was stopped, or a machine that slept, does not count the pause as silence of other ranks.

"Broke off": its forward or backward raised. The functions at the end are pure: they derive errors
from the ranks' records.
"""

from __future__ import annotations

import atexit
import logging
import os
import re
import select
import threading
import time
from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any, Protocol

from torch.distributed.distributed_c10d import PrefixStore

from infinity._src.base.wording import LEFT_OUT
from infinity._src.distributed.heartbeat import Heartbeat, Host, PeerProcess, RankRecord
from infinity._src.distributed.topology import Topology
from infinity.aio._swap_owner import start_time_of
from infinity.errors import RankFailed, RanksDiverged

log = logging.getLogger("infinity")

# Seconds between exchanges with the store.
INTERVAL_S = 0.5
SILENCE_S = 15.0
_TURN_MAX_S = 1.0
# Seconds after which a waiting call checks the failure and the records again.
_POLL_S = 0.25
# Seconds for other ranks to read that rank 0 left, and for the result from a rank that has closed.
_LINGER_S = 2.0
# Seconds after which a dying process of this host has ended and its store is known to be lost, also
# on a busy machine.
_DYING_S = 10.0
# Seconds for a late rank to read why rank 0 leaves after a failure, also on a busy machine.
_SURVIVORS_S = 10.0
# Lists in records are bounded, since every exchange sends them.
_RAISED_MAX = 16
# More than can be submitted after a stuck one: gathers (AHEAD_MAX), and reductions of a few units.
_RECENT_MAX = 48
_MESSAGE_MAX = 500  # characters of an error in a record
_NAME_MAX = 128  # characters, from the end, which has unit and digest
# Errors of gloo and NCCL for a broken connection, as opposed to an invalid call.
_CONNECTION = re.compile(
    r"gloo/transport|[Cc]onnection|closed by peer|[Tt]imed out|Broken pipe|NCCL|[Aa]borted"
)


class Settable(Protocol):
    """Event that is set once: a `threading.Event` or a device's event."""

    def is_set(self) -> bool:
        """Return whether it is set. Never blocks."""

    def wait(self, timeout: float, /) -> bool:
        """Block until it is set, at most `timeout` seconds. Returns whether it is."""


class Watchdog:
    """Watchdog over the ranks of one engine; every rank creates one, at the same point of its
    program.

    store: a separate client of the default group's store (`Store.clone()`). timeout_s: how long a
    collective waits for other ranks. name: the same on all ranks, and never reused, since records
    remain in the store. silence_s: how long a rank on another host may be silent; Python code that
    holds the GIL must not take longer.
    """

    def __init__(
        self,
        topology: Topology,
        store: Any,
        *,
        timeout_s: float,
        name: str,
        silence_s: float = SILENCE_S,
    ) -> None:
        self.topology = topology
        self.timeout_s = timeout_s
        self.on_failure: list[Callable[[], None]] = []
        self._name = name
        self._silence_s = silence_s
        self._number = 0
        # Replaced, never mutated: other threads read it.
        self._recent: tuple[tuple[int, str], ...] = ()
        self._raised: dict[int, str] = {}
        self._unconfirmed = False
        self._failure: RankFailed | None = None
        self._exit_failure: RankFailed | None = None
        self._failed = threading.Event()
        self._lock = threading.Lock()
        self._closed = False
        self._host = Host.this()
        self._pid = os.getpid()
        self._processes: dict[int, PeerProcess] = {}
        self._remote: set[int] = set()
        self._dead: set[int] = set()
        self._silent_s: dict[int, float] = {}
        self._beats: dict[int, int] = {}
        self._unheard_s = 0.0
        self._acknowledged = False
        self._heartbeat: Heartbeat | None = None
        if topology.world == 1:
            return
        # The watchdog's thread closes this descriptor, under the lock, so that a later wake does
        # not write to a reused descriptor.
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._heartbeat = Heartbeat(
            topology.rank,
            topology.world,
            # The name separates the records from an earlier engine's.
            PrefixStore(f"infinity/{name}", store),
            interval_s=INTERVAL_S,
            # Well below the timeout, so that the timeout's error can name a late rank's last
            # collective.
            quiet_s=min(5.0, timeout_s / 4),
            on_exchange=self._wake_thread,
        )
        host = (self._host.name, self._host.boot_id, self._host.network, self._host.pids)
        self._heartbeat.publish(host=host, pid=self._pid, start_time=start_time_of(self._pid))
        self._thread = threading.Thread(
            target=self._run, name=f"infinity-watchdog-{name}", daemon=True
        )
        # After the first record is published, which names this rank's process.
        self._heartbeat.start()
        self._thread.start()
        # Without this, a process that ends without close() would only be found by the timeout.
        atexit.register(self._exits)

    @property
    def failure(self) -> RankFailed | None:
        """Failure that ended the engine, or None. Never blocks."""
        return self._failure

    def check(self) -> None:
        """Raise the failure, if there is one. Never blocks."""
        if self._failure is not None:
            # The exception is raised repeatedly: without this its traceback would grow.
            raise self._failure.with_traceback(None)

    def next_number(self, what: str = "") -> int:
        """Assign a number, from 1 on, to the collective that this rank's main thread submits next.

        Never blocks, except after `report_exception`: then until all ranks are known to have broken
        off after the same collective. Otherwise the ranks could match different collectives, which
        would complete with wrong values. Raises: RankFailed if a rank did not break off there.
        """
        if self._unconfirmed:
            self._confirm_exception()
            self._unconfirmed = False
        # Numbered in the order of the program, before the submission.
        self._number += 1
        what = what[-_NAME_MAX:]
        self._recent = (*self._recent[1 - _RECENT_MAX :], (self._number, what))
        if self._heartbeat is not None:
            # Not urgent: an exchange per collective would slow training down.
            self._heartbeat.publish(urgent=False, number=self._number, last=what, recent=())
        return self._number

    def wait_for_all_ranks(self) -> None:
        """Block until all ranks have published a record. Raises: RankFailed.

        Until then a rank's death is only found by the timeout.
        """
        waited_s, before_s = 0.0, time.monotonic()
        while (
            self._heartbeat is not None
            and len(self._processes.keys() | self._remote) < self.topology.world - 1
        ):
            self.check()
            if waited_s > self.timeout_s:
                self._set_failure(self._timeout_error("the beginning", None))
            time.sleep(INTERVAL_S / 25)
            self._heartbeat.refresh(INTERVAL_S)
            self._wake_thread()
            now_s = time.monotonic()
            # At most a second per iteration, so that a pause of this process does not count.
            waited_s, before_s = waited_s + min(now_s - before_s, _TURN_MAX_S), now_s

    def report_exception(self, where: str, error: BaseException) -> None:
        """Publish that this rank's forward or backward raised. Never blocks.

        A rank that waits for a later collective raises, unless it broke off at the same point, too.
        If all ranks did, training can continue; this rank's next collective waits until that is
        known.
        """
        if self._number not in self._raised:
            self._raised[self._number] = shorten(f"{type(error).__name__} in {where}: {error}")
            # Retain the last few; other ranks compare the numbers with the collective that they
            # wait for.
            for old in list(self._raised)[:-_RAISED_MAX]:
                del self._raised[old]
        if self._heartbeat is not None:
            # `next_number` then waits until all ranks have broken off at the same collective.
            self._unconfirmed = True
            self._heartbeat.publish(raised=tuple(self._raised.items()), number=self._number)

    def report_failure(self, error: BaseException) -> None:
        """Publish that this rank has failed, which ends the engine. Never blocks.

        Waiting ranks raise RankFailed with this error's message, and so do all later calls on this
        rank.
        """
        if isinstance(error, RankFailed):
            self._set_failure(error)
            return
        rank = self.topology.rank
        failure = RankFailed(
            shorten(f"rank {rank} failed: {type(error).__name__}: {error}"), rank=rank
        )
        failure.__cause__ = error
        self._set_failure(failure)

    def wait(self, done: Settable, what: str, number: int | None) -> None:
        """Block until `done` is set. what, number: of the collective that sets it (number None:
        unnumbered).

        Raises: RankFailed as soon as a rank is known to have failed or not to reach this
        collective, or after `timeout_s`, naming the missing ranks.
        """
        waited_s, before_s, closed_s = 0.0, time.monotonic(), 0.0
        while not done.is_set():
            self.check()
            if done.wait(min(_POLL_S, self.timeout_s)):
                break
            if waited_s == 0.0 and number is not None and self._heartbeat is not None:
                # Only waiting ranks publish recent names, since only these compare them.
                self._heartbeat.publish(recent=self._recent)
            now_s = time.monotonic()
            turn_s = min(now_s - before_s, _TURN_MAX_S)
            waited_s, before_s = waited_s + turn_s, now_s
            if found := self._find_failure(what, number):
                # An unnumbered collective may have completed on the other rank, which then closed;
                # wait _LINGER_S for its result.
                closed_s += turn_s
                if number is not None or closed_s > _LINGER_S:
                    self._set_failure(found)
            elif waited_s > self.timeout_s:
                # Reads the records again, which may name the rank and the reason.
                found = self._timeout_error(what, number)
                # The collective may have completed while the records were read.
                if not done.is_set():
                    self._set_failure(found)
        self.check()

    def find_culprit(
        self, error: BaseException, what: str, number: int | None
    ) -> RankFailed | None:
        """Find the failure that caused a collective's error; None if the error is probably this
        rank's.

        Blocks for a second or two. After a broken connection, up to ten seconds, or twice
        `silence_s` if there are ranks on other hosts.
        """
        broken = bool(_CONNECTION.search(str(error)))
        limit_s = 3 * INTERVAL_S
        if broken:
            # Another host's silence is detected only after `silence_s`, so wait twice that.
            limit_s = max(_DYING_S, 2 * self._silence_s if self._remote else 0.0)
        end_s = time.monotonic() + limit_s
        while (
            not self._failed.wait(INTERVAL_S / 5)
            and time.monotonic() < end_s
            and self._heartbeat is not None
        ):
            if found := self._find_failure(what, number):
                self._set_failure(found)
        if self._failure is None and broken and self._heartbeat is not None:
            broken_in = describe_collective(what, number)
            text = f"a connection to another rank broke in {broken_in}, and no rank says why: "
            text += str(error)
            self._set_failure(RankFailed(shorten(text)))
        return self._failure

    def close(self, ok: bool = True) -> None:
        """Publish that this rank leaves, and end the thread. Idempotent.

        Blocks at most 11 seconds, on rank 0 after a failure 19, so that late ranks can read the
        record. ok: False: publish a failure of this rank, unless there is one.
        """
        if self._closed:
            return
        if not ok and self._failure is None:
            rank = self.topology.rank
            self._set_failure(
                RankFailed(f"rank {rank} closed its engine after an error", rank=rank)
            )
        self._closed = True
        if self._heartbeat is None:
            return
        atexit.unregister(self._exits)
        if self._pid == os.getpid():  # not in a forked child, which is no rank
            # After a failure wait longer, since slow ranks still look for its cause.
            self._leave("closed", linger_s=_LINGER_S if self._failure is None else _SURVIVORS_S)

    def report_exit(self) -> None:
        """Publish that this process ends without close(), a failure for waiting ranks. Never
        blocks.
        """
        if self._failure is None and not self._closed:
            rank = self.topology.rank
            # Only an exception after the last collective: after an earlier one the rank continued.
            broke = self._raised.get(self._number)  # None: no exception there
            why = f"; it had raised ({broke})" if broke else ""
            self._exit_failure = RankFailed(
                shorten(f"rank {rank} has ended without closing its engine{why}"), rank=rank
            )
            self._set_failure(self._exit_failure)

    def _confirm_exception(self) -> None:
        """Block until all ranks are known to have raised after the same collective."""
        assert self._heartbeat is not None
        here, waited_s, before_s = self._number, 0.0, time.monotonic()
        text = f"this rank ({self.topology.rank}) raised ({self._raised[here]})"
        while True:
            self.check()
            # All ranks that raised find a rank that continued.
            records = self._others()
            for rank, record in records.items():
                if here not in dict(record.raised) and (record.number > here or record.left):
                    self._set_failure(
                        RankFailed(
                            shorten(f"{text}, and rank {rank} continued"), rank=self.topology.rank
                        )
                    )
            lacking = [rank for rank in range(self.topology.world) if rank != self.topology.rank]
            lacking = [
                rank
                for rank in lacking
                if rank not in records or here not in dict(records[rank].raised)
            ]
            if not lacking:
                return
            now_s = time.monotonic()
            waited_s, before_s = waited_s + min(now_s - before_s, _TURN_MAX_S), now_s
            if waited_s > self.timeout_s:
                text = f"{text}, and {describe_ranks(lacking)} did not within {self.timeout_s:g} s"
                self._set_failure(RankFailed(shorten(text), rank=lacking[0], ranks=tuple(lacking)))
            time.sleep(_POLL_S / 10)
            self._heartbeat.refresh(_POLL_S)

    def _exits(self) -> None:
        """Leave at the interpreter's exit if close() was not called."""
        if not self._closed and self._pid == os.getpid():
            self.report_exit()
            self._closed = True
            # Other ranks see this process's end without the store. But the cause of an earlier
            # failure is only in the store, so wait for readers.
            ends = self._failure is self._exit_failure
            self._leave("ended", linger_s=0.0 if ends else _SURVIVORS_S)

    def _leave(self, how: str, *, linger_s: float) -> None:
        heartbeat = self._heartbeat
        assert heartbeat is not None
        heartbeat.publish(left=how, number=self._number)
        answers = heartbeat.refresh(2 * _LINGER_S)
        # Rank 0's process may host the store: wait until the other ranks have read that it left.
        end_s = time.monotonic() + linger_s
        while (
            answers
            and self.topology.rank == 0
            and not self._all_acknowledged()
            and time.monotonic() < end_s
        ):
            # On a busy machine an exchange may take longer than an interval.
            answers = heartbeat.refresh(_LINGER_S)
            time.sleep(INTERVAL_S / 25)
        # A thread that returns from a torch call after the interpreter's exit aborts the process.
        limit_s = _SURVIVORS_S if how == "ended" else _LINGER_S
        heartbeat.stop(limit_s)
        self._wake_thread()
        # Timed, since the watchdog's thread may be in a callback.
        self._thread.join(limit_s)
        # Closed here, not by the watchdog's thread: until now that thread polled the pidfds, and
        # a closed pidfd looks like an ended process.
        if not self._thread.is_alive():
            for process in self._processes.values():
                process.close()

    def _all_acknowledged(self) -> bool:
        assert self._heartbeat is not None
        for rank, record in enumerate(self._heartbeat.records):
            if rank == self.topology.rank or rank in self._dead:
                continue
            process = self._processes.get(rank)
            if record is None or not (
                record.left or record.read or record.failed or (process and process.ended())
            ):
                return False
        return True

    def _set_failure(self, failure: RankFailed) -> None:
        with self._lock:
            # Keep the first failure, which causes later ones.
            if self._failure is not None:
                return
            self._failure = failure
        log.debug("%s: %s", self._name, failure)
        if self._heartbeat is not None:
            # Outside of the lock, which `_wake_thread` acquires, too.
            culprit = published_culprit(self.topology.rank, failure)
            self._heartbeat.publish(failed=(culprit, str(failure)))
            self._wake_thread()
        # Last: waiting threads then find the failure set and published.
        self._failed.set()

    def _timeout_error(self, what: str, number: int | None) -> RankFailed:
        """Return the error of a wait of `timeout_s`, after reading the records again."""
        fresh = self._heartbeat is None or self._heartbeat.refresh(2 * INTERVAL_S)
        if found := self._failure or self._find_failure(what, number):
            return found
        others = [rank for rank in range(self.topology.world) if rank != self.topology.rank]
        return timeout_error(
            others, self._others(), what, number, timeout_s=self.timeout_s, fresh=fresh
        )

    def _find_failure(self, what: str, number: int | None) -> RankFailed | None:
        return find_failure(
            self.topology.rank, self._others(), self._raised, what, number, dict(self._recent)
        )

    def _others(self) -> dict[int, RankRecord]:
        records = self._heartbeat.records if self._heartbeat is not None else []
        return {
            rank: record
            for rank, record in enumerate(records)
            if record and rank != self.topology.rank
        }

    def _wake_thread(self) -> None:
        """Wake the watchdog's thread by its eventfd. No effect once that thread has ended."""
        with self._lock:
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)

    def _run(self) -> None:
        poll, before_s = select.poll(), time.monotonic()
        poll.register(self._wake, select.POLLIN)
        rounds = 0
        called = False
        assert self._heartbeat is not None
        while True:
            for fd, _ in poll.poll(INTERVAL_S * 1000):
                # A readable pidfd stays readable; unregister it, or poll would spin.
                if fd == self._wake:
                    os.eventfd_read(fd)
                else:
                    poll.unregister(fd)
            if self._closed:
                break
            now_s = time.monotonic()
            turn_s, before_s = min(now_s - before_s, _TURN_MAX_S), now_s
            heard, rounds = self._heartbeat.rounds - rounds, self._heartbeat.rounds
            # First, since only ranks with a record can be checked.
            self._watch_new_ranks(poll)
            if self._failure is None:
                self._check_ranks(heard > 0, turn_s)
            if self._failure is not None and not called:
                # Only once: the callbacks abort groups.
                called = True
                for callback in list(self.on_failure):
                    try:
                        callback()
                    # Continue with the other callbacks.
                    except Exception:
                        log.exception("%s: after %s", self._name, self._failure)
        with self._lock:
            os.close(self._wake)
            self._wake = -1

    def _watch_new_ranks(self, poll: select.poll) -> None:
        """Watch each rank whose first record has arrived: its process, its beats, or both."""
        for rank, record in self._others().items():
            if rank in self._processes or rank in self._remote:
                continue
            host = Host(*record.host)
            if self._host.sees(host):
                process = self._processes[rank] = PeerProcess(record.pid, record.start_time)
                if process.fd >= 0:
                    poll.register(process.fd, select.POLLIN)
            # A rank in another network namespace may lose its connection while its process is
            # alive.
            if host.node != self._host.node or not self._host.sees(host):
                self._remote.add(rank)
                # Written only if a rank needs them, to spare the store.
                assert self._heartbeat is not None
                self._heartbeat.beating = True

    def _check_ranks(self, heard: bool, turn_s: float) -> None:
        """Check once: dead processes first, then the records, then silence.

        In this order, since an ended process is certain, and silence is not.
        """
        # Polled from the last rank to rank 0, processed from rank 0 up. If rank 0, which may host
        # the store, dies, other ranks may end without publishing; then rank 0's end, polled last,
        # is also seen, and is reported first.
        dead = [
            rank
            for rank in sorted(self._processes, reverse=True)
            if rank not in self._dead and self._processes[rank].ended()
        ]
        assert self._heartbeat is not None
        if dead:
            # Read the dead rank's last record, which may have its failure or say that it closed, or
            # find that the store ended with rank 0. Without waiting for this, a busy machine could
            # blame the wrong rank.
            self._heartbeat.refresh(_DYING_S)
        records = self._others()
        # False also while no record of rank 0 has been read: it may die before that.
        zero_closed = 0 in records and records[0].left == "closed"
        for rank in reversed(dead):
            # Each dead rank is processed once.
            self._dead.add(rank)
            record = records[rank]
            if record.left != "closed" and record.failed is None:
                if rank and self._heartbeat.lost and not zero_closed:
                    # This rank ended because rank 0's store is lost: a dying process closes its
                    # connections before its end is visible. Rank 0 is reported below.
                    break
                self._set_failure(death_error(rank, record, f"its process {record.pid} is gone"))
                return
        # A published failure names the cause of later deaths.
        if relayed := relayed_failure(self.topology.rank, records):
            self._set_failure(relayed)
            return
        for rank, record in records.items():
            if record.left == "ended":
                self._set_failure(death_error(rank, record, "without closing its engine"))
                return
        # After rank 0 has closed, a lost store is no failure.
        if zero_closed:
            if not self._acknowledged:
                self._acknowledged = True
                self._heartbeat.publish(read=True)
        elif self._heartbeat.lost:
            lost = self._heartbeat.lost
            text = f"the store of the default group, which rank 0 hosts, is lost: {lost}"
            self._set_failure(RankFailed(text, rank=0))
            return
        self._count_silence(records, heard, turn_s)

    def _count_silence(self, records: dict[int, RankRecord], heard: bool, turn_s: float) -> None:
        """Measure the silence of ranks on other hosts, and of a store on another host."""
        self._unheard_s += turn_s
        # Rank 0 hosts the store: only if it is on another host does silence mean a network failure.
        if 0 in self._remote and self._unheard_s > self._silence_s and records[0].left != "closed":
            text = (
                "the store of the default group, which rank 0 hosts, has not answered for "
                f"{self._silence_s:g} s"
            )
            self._set_failure(RankFailed(text, rank=0))
            return
        if not heard:
            return
        # Silence is measured once per exchange, so only while the store answers.
        listened_s, self._unheard_s = min(self._unheard_s, _TURN_MAX_S), 0.0
        for rank in self._remote:
            record = records[rank]
            # A rank that has left sends no more beats.
            if record.beat != self._beats.get(rank) or record.left:
                self._beats[rank], self._silent_s[rank] = record.beat, 0.0
                continue
            self._silent_s[rank] += listened_s
            if self._silent_s[rank] > self._silence_s:
                self._set_failure(
                    death_error(rank, record, f"no sign of life for {self._silence_s:g} s")
                )
                return


# -- errors from records ------------------------------------------------------------------------


def relayed_failure(me: int, others: Mapping[int, RankRecord]) -> RankFailed | None:
    """Return this rank's error for a failure that another rank has published, or None."""
    for rank, record in others.items():
        if record.failed is not None:
            return relayed_error(me, rank, *record.failed)
    return None


def find_failure(
    me: int,
    others: Mapping[int, RankRecord],
    raised: Container[int],
    what: str,
    number: int | None,
    names: Mapping[int, str],
) -> RankFailed | None:
    """Find a rank that is known not to reach this collective, and return the error that says why.
    Published failures have precedence, since ranks close because of them.

    raised: the numbers after which this rank broke off. names: this rank's last few collectives, by
    number.

    Different names with one number mean that programs have diverged, whatever the communication
    streams: each rank's main thread assigns each number once, in the order of the program. A late
    rank is never blamed: it has published no later numbers, and the same names with earlier ones.

    Ranks that wait for each other are found. Let two ranks have reached numbers `a` <= `b`. If all
    names up to `a` were equal, each communication stream of both would begin with the same
    collectives, and the one that the first rank waits for would complete, since the second rank has
    submitted it. So some name up to `a` differs. It is among the last few, since a rank waits soon
    after submitting a stuck collective; or later names are shifted and differ, too. Other cases end
    with the timeout.
    """
    if relayed := relayed_failure(me, others):
        return relayed
    for rank, record in others.items():
        why = ""
        for after, text in record.raised:
            if number is not None and after < number and after not in raised:
                why = f"rank {rank} raised before it: {text}"
        if record.left and (number is None or record.number < number):
            left = "has closed its engine" if record.left == "closed" else "has ended"
            why = f"{why}, and {left}" if why else f"rank {rank} {left}"
        if why:
            return RankFailed(
                shorten(f"{describe_collective(what, number)} cannot complete: {why}"), rank=rank
            )
        if number is not None and (why := _apart(rank, record.names, names, number)):
            return RanksDiverged(
                shorten(f"{describe_collective(what, number)} cannot complete: {why}"), rank=rank
            )
    return None


def _apart(rank: int, theirs: Mapping[int, str], mine: Mapping[int, str], waits_for: int) -> str:
    """Describe the first known difference between a rank's collectives and this rank's; "" if none
    is known.
    """
    both = sorted(theirs.keys() & mine.keys())
    at = next((number for number in both if theirs[number] != mine[number]), None)
    if at is None:
        return ""
    if at == waits_for:
        where = f"rank {rank} has reached {theirs[at]} instead"
    else:
        where = (
            f"as collective {at} this rank has reached {mine[at]}, and rank {rank} {theirs[at]}"
        )
    return (
        f"{where}; all ranks must run the same modules in the same order, "
        f"and call collective functions together; {LEFT_OUT}"
    )


def timeout_error(
    ranks: Iterable[int],
    others: Mapping[int, RankRecord],
    what: str,
    number: int | None,
    *,
    timeout_s: float,
    fresh: bool,
) -> RankFailed:
    """Return the error of a wait of `timeout_s`, naming those of `ranks` that have not arrived.

    fresh: whether the store still answers.
    """
    text = f"{describe_collective(what, number)} has not completed within {timeout_s:g} s"
    missing = [rank for rank in ranks if rank not in others]
    if missing:
        return RankFailed(
            f"{text}: {describe_ranks(missing)} never began", rank=missing[0], ranks=tuple(missing)
        )
    behind = [
        rank for rank, record in others.items() if number is not None and record.number < number
    ]
    if behind:
        last = [
            f"rank {rank} last reached "
            f"{describe_collective(others[rank].last, others[rank].number)}"
            for rank in behind
        ]
        text = f"{text}: {describe_ranks(behind)} did not reach it ({'; '.join(last)})"
        return RankFailed(shorten(text), rank=behind[0], ranks=tuple(behind))
    if not fresh:
        text = f"{text}, and the store of the default group, which rank 0 hosts, does not answer"
        return RankFailed(text, rank=0)
    if number is None:
        return RankFailed(f"{text}, and it is not known which rank has not reached it")
    past = [rank for rank, record in others.items() if number not in record.names]
    if past:
        last = [
            f"rank {rank} has reached {describe_collective(others[rank].last, others[rank].number)}"
            for rank in past
        ]
        text = f"{text}, though no rank is behind ({'; '.join(last)})"
        return RankFailed(
            shorten(
                f"{text}: a connection or a drive is stuck, ranks diverged long ago, or the "
                "timeout is too short"
            )
        )
    return RankFailed(
        f"{text}, though every rank has reached it: a connection or a drive is stuck, or the "
        "timeout too short"
    )


def death_error(rank: int, record: RankRecord, how: str) -> RankFailed:
    """Return the error for a rank that has ended."""
    text = f"rank {rank} on {record.host[0]} has ended: {how}"
    if record.raised:
        text += f"; it had raised ({record.raised[-1][1]})"
    return RankFailed(shorten(text), rank=rank)


def relayed_error(me: int, teller: int, culprit: int | None, text: str) -> RankFailed:
    """Return this rank's error for a failure that rank `teller` has published."""
    if culprit == me:
        return RankFailed(
            shorten(f"rank {teller} gave up on this rank ({me}): {text}"), rank=teller
        )
    # On this rank the text is about another rank.
    text = text.replace(f"this rank ({teller})", f"rank {teller}")
    # Name the finder once, although several ranks may relay the failure.
    if culprit != teller and "(found by rank" not in text:
        text = f"{text} (found by rank {teller})"
    return RankFailed(text, rank=culprit)


def published_culprit(me: int, failure: RankFailed) -> int | None:
    """Return the rank to publish as the cause of this rank's failure."""
    # If another rank gave up on this rank, the others should name this rank, not that one.
    return me if f"gave up on this rank ({me})" in str(failure) else failure.rank


def describe_collective(what: str, number: int | None) -> str:
    """Format a collective for messages."""
    if number == 0:
        return "no collective yet"
    return what if number is None else f"{what}, collective {number}"


def describe_ranks(ranks: list[int]) -> str:
    """Format ranks for messages."""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}"


def shorten(text: str) -> str:
    """Cut a message to the maximum length in a record."""
    return text if len(text) <= _MESSAGE_MAX else f"{text[:_MESSAGE_MAX]} ..."
