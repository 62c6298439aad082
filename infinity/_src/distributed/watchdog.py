"""Watchdog: names a rank that died, failed, left or does not come, so that no rank waits for it for
ever.

    this rank        next_number, report_exception, report_failure, close ──► Heartbeat ──► store
    its thread       pids of this host (at once) · records of all ranks (0.5 s)
                     · beats of other hosts (15 s) ──► failure
    a waiting call   raises the failure; or finds that a rank broke off before this collective, has
                     closed, came to another one, or does not come

A failure is final: every later call raises the first one that was found, on every rank.

Time is counted in turns of the thread that counts it, and each turn counts for at most a second. So
a process that was stopped, or a machine that slept, does not take its own pause for silence of
others.

The functions at the end are pure: they derive errors from the records of the ranks.
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

# Exchanges with the store: the records of other ranks are at most this old while it answers.
INTERVAL_S = 0.5
SILENCE_S = 15.0
_TURN_MAX_S = 1.0
# A waiting call looks at the failure and the records again after this long.
_POLL_S = 0.25
# Time for the others to read that rank 0 left, and for the answer of a rank that has closed.
_LINGER_S = 2.0
# A dying process of this host is gone by then, and its store known to be, also on a busy machine.
_DYING_S = 10.0
# Time for a late rank to read why rank 0 leaves after a failure, also on a busy machine.
_SURVIVORS_S = 10.0
# Records travel with every exchange, so the lists in them have an end.
_RAISED_MAX = 16
# More than are submitted ahead of a stuck one: gathers (AHEAD_MAX), and reductions of a few units.
_RECENT_MAX = 48
_MESSAGE_MAX = 500  # characters of an error in a record
_NAME_MAX = 128  # characters, from the end, which tells most
# Messages of gloo and NCCL when the connection broke, as opposed to a call that was wrong.
_CONNECTION = re.compile(
    r"gloo/transport|[Cc]onnection|closed by peer|[Tt]imed out|Broken pipe|NCCL|[Aa]borted"
)


class Settable(Protocol):
    """Thing that is set once and can be waited for: a `threading.Event`, an event of a device."""

    def is_set(self) -> bool:
        """Return whether it is set. Does not block."""

    def wait(self, timeout: float, /) -> bool:
        """Block until it is set, at most `timeout` seconds. Returns whether it is."""


class Watchdog:
    """Watchdog over the ranks of one engine; every rank makes one, at the same point of its
    program.

    store: a client of the default group's store for this watchdog alone (`Store.clone()`).
    timeout_s: how long a collective waits for other ranks.
    name: the same on all ranks, and used once: the records of an earlier engine stay in the store.
    silence_s: how long a rank of another host may send no sign of life. Python code that holds the
    interpreter lock, or a stopped process, must not take longer.
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
        # Replaced, never changed in place: the watchdog and waiting threads read it meanwhile.
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
        # Closed by the thread itself, under the lock: a later wake must not write to a reused
        # descriptor.
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._heartbeat = Heartbeat(
            topology.rank,
            topology.world,
            # An earlier engine's records stay in the store: the name keeps them apart.
            PrefixStore(f"infinity/{name}", store),
            interval_s=INTERVAL_S,
            # Well before the timeout, so that its error can say to which collective a late rank has
            # come.
            quiet_s=min(5.0, timeout_s / 4),
            on_exchange=self._wake_thread,
        )
        host = (self._host.name, self._host.boot_id, self._host.network, self._host.pids)
        self._heartbeat.publish(host=host, pid=self._pid, start_time=start_time_of(self._pid))
        self._thread = threading.Thread(
            target=self._run, name=f"infinity-watchdog-{name}", daemon=True
        )
        # After the first record is there to write: the others learn this rank's process from it.
        self._heartbeat.start()
        self._thread.start()
        # A process that ends without close() would be missed by the timeout only.
        atexit.register(self._exits)

    @property
    def failure(self) -> RankFailed | None:
        """Failure that ended the engine, if one did. Does not block."""
        return self._failure

    def check(self) -> None:
        """Raise the failure, if there is one. Does not block."""
        if self._failure is not None:
            # One exception object is raised many times: its traceback would grow.
            raise self._failure.with_traceback(None)

    def next_number(self, what: str = "") -> int:
        """Number the collective that this rank's main thread now submits, from 1 on.

        Does not block, except after `report_exception`: then until all ranks are known to have
        broken off after the same collective. Otherwise this rank's next collective could be matched
        with a different one of the others, and both complete, with wrong values.
        Raises: RankFailed if they have not.
        """
        if self._unconfirmed:
            self._confirm_exception()
            self._unconfirmed = False
        # Before it is submitted: the order of the program gives the number, not the communication
        # stream's thread.
        self._number += 1
        what = what[-_NAME_MAX:]
        self._recent = (*self._recent[1 - _RECENT_MAX :], (self._number, what))
        if self._heartbeat is not None:
            # Not urgent: one exchange with the store per collective would slow training down.
            self._heartbeat.publish(urgent=False, number=self._number, last=what, recent=())
        return self._number

    def wait_for_all_ranks(self) -> None:
        """Block until all ranks have published a record. Raises: RankFailed.

        A rank that died before that would be missed by the timeout only.
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
            # A turn counts for a second at most, so that this process's own pause is not taken for
            # silence.
            waited_s, before_s = waited_s + min(now_s - before_s, _TURN_MAX_S), now_s

    def report_exception(self, where: str, error: BaseException) -> None:
        """Record that this rank's forward or backward broke off. Does not block.

        A rank that waits for a later collective raises, unless it broke off at the same point
        itself. If all did, training may go on; this rank's next collective waits until that is
        known.
        """
        if self._number not in self._raised:
            self._raised[self._number] = shorten(f"{type(error).__name__} in {where}: {error}")
            # Kept for the last few only; the others compare them with the collective that they wait
            # for.
            for old in list(self._raised)[:-_RAISED_MAX]:
                del self._raised[old]
        if self._heartbeat is not None:
            # Until all broke off at the same collective, the next one could be matched with
            # another.
            self._unconfirmed = True
            self._heartbeat.publish(raised=tuple(self._raised.items()), number=self._number)

    def report_failure(self, error: BaseException) -> None:
        """Record that this rank cannot go on. Does not block.

        Ranks that wait for it raise RankFailed with this message, and so does everything that
        follows here.
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
        """Block until `done` is set. what, number: of the collective that sets it; None if not
        numbered.

        Raises: RankFailed as soon as a rank is known to have failed, or not to come to this
        collective; or after `timeout_s`, naming the ranks that have not come.
        """
        waited_s, before_s, closed_s = 0.0, time.monotonic(), 0.0
        while not done.is_set():
            self.check()
            if done.wait(min(_POLL_S, self.timeout_s)):
                break
            if waited_s == 0.0 and number is not None and self._heartbeat is not None:
                # Names are compared by the ranks that wait, so only these publish theirs.
                self._heartbeat.publish(recent=self._recent)
            now_s = time.monotonic()
            turn_s = min(now_s - before_s, _TURN_MAX_S)
            waited_s, before_s = waited_s + turn_s, now_s
            if found := self._find_failure(what, number):
                # A collective without a number may be complete: the other rank did its part and
                # closed, and the result has only not arrived here yet.
                closed_s += turn_s
                if number is not None or closed_s > _LINGER_S:
                    self._set_failure(found)
            elif waited_s > self.timeout_s:
                # The records are read once more first: they may say which rank it is, and why.
                found = self._timeout_error(what, number)
                # The work may have completed while the records were read.
                if not done.is_set():
                    self._set_failure(found)
        self.check()

    def find_culprit(
        self, error: BaseException, what: str, number: int | None
    ) -> RankFailed | None:
        """Find the failure that an error of a collective follows from; None if it looks like this
        rank's own.

        Blocks for a second or two. After a broken connection, some rank broke it: then for up to
        ten seconds, or twice `silence_s` where ranks run on other hosts.
        """
        broken = bool(_CONNECTION.search(str(error)))
        limit_s = 3 * INTERVAL_S
        if broken:
            # Silence of another host is known only after `silence_s`, so it is waited for twice
            # that.
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

        Blocks for 11 seconds at most, and on rank 0 after a failure for 19, for ranks that are late
        to read it.
        ok: False records a failure of this rank, unless there is one.
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
        if self._pid == os.getpid():  # a forked child has no threads, and speaks for no rank
            # After a failure the others look for its cause, and one on a busy machine looks late.
            self._leave("closed", linger_s=_LINGER_S if self._failure is None else _SURVIVORS_S)

    def report_exit(self) -> None:
        """Record that this process ends without close(), a failure for all that wait. Does not
        block."""
        if self._failure is None and not self._closed:
            rank = self.topology.rank
            # Its last collective: a break-off long before is not why it ended.
            broke = self._raised.get(self._number)  # the last thing that it did
            why = f"; it had broken off ({broke})" if broke else ""
            self._exit_failure = RankFailed(
                shorten(f"rank {rank} has ended without closing its engine{why}"), rank=rank
            )
            self._set_failure(self._exit_failure)

    def _confirm_exception(self) -> None:
        """Block until all ranks are known to have broken off after the same collective."""
        assert self._heartbeat is not None
        here, waited_s, before_s = self._number, 0.0, time.monotonic()
        text = f"this rank ({self.topology.rank}) broke off ({self._raised[here]})"
        while True:
            self.check()
            # Every rank compares, so a rank that went on is found by all that broke off.
            records = self._others()
            for rank, record in records.items():
                if here not in dict(record.raised) and (record.number > here or record.left):
                    self._set_failure(
                        RankFailed(
                            shorten(f"{text}, and rank {rank} went on"), rank=self.topology.rank
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
        """Leave at the interpreter's exit, where close() was not called."""
        if not self._closed and self._pid == os.getpid():
            self.report_exit()
            self._closed = True
            # Its end is known without it: its process is gone. The cause of an earlier failure, by
            # which most programs come here, is in its store alone.
            ends = self._failure is self._exit_failure
            self._leave("ended", linger_s=0.0 if ends else _SURVIVORS_S)

    def _leave(self, how: str, *, linger_s: float) -> None:
        heartbeat = self._heartbeat
        assert heartbeat is not None
        heartbeat.publish(left=how, number=self._number)
        answers = heartbeat.refresh(2 * _LINGER_S)
        # Rank 0's process may host the store: the others should read that it left in order before
        # the store is gone.
        end_s = time.monotonic() + linger_s
        while (
            answers
            and self.topology.rank == 0
            and not self._all_acknowledged()
            and time.monotonic() < end_s
        ):
            # On a busy machine its thread may take longer than an interval.
            answers = heartbeat.refresh(_LINGER_S)
            time.sleep(INTERVAL_S / 25)
        heartbeat.stop(_LINGER_S)
        self._wake_thread()
        # Not for ever: the thread may be in a callback.
        self._thread.join(_LINGER_S)
        # Here, and not when the thread ends: until now this one has asked whether they live, and a
        # pidfd that is closed amid the question reads like the end of its process.
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
            # The first failure stays: every later one follows from it.
            if self._failure is not None:
                return
            self._failure = failure
        log.debug("%s: %s", self._name, failure)
        if self._heartbeat is not None:
            # Outside of the lock, which `_wake_thread` takes too.
            culprit = published_culprit(self.topology.rank, failure)
            self._heartbeat.publish(failed=(culprit, str(failure)))
            self._wake_thread()
        # Last: whoever wakes by it finds the failure set and published.
        self._failed.set()

    def _timeout_error(self, what: str, number: int | None) -> RankFailed:
        """Make the error of having waited for `timeout_s`, from records as fresh as can be had."""
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
        """Wake the thread, which polls the eventfd. Does nothing once the thread has ended."""
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
                # A pidfd that became readable stays readable: unregistered, or poll would spin.
                if fd == self._wake:
                    os.eventfd_read(fd)
                else:
                    poll.unregister(fd)
            if self._closed:
                break
            now_s = time.monotonic()
            turn_s, before_s = min(now_s - before_s, _TURN_MAX_S), now_s
            heard, rounds = self._heartbeat.rounds - rounds, self._heartbeat.rounds
            # Before the ranks are checked: only ranks whose record has come can be judged.
            self._watch_new_ranks(poll)
            if self._failure is None:
                self._check_ranks(heard > 0, turn_s)
            if self._failure is not None and not called:
                # Once: the callbacks abort groups, and a second abort has nothing to break off.
                called = True
                for callback in list(self.on_failure):
                    try:
                        callback()
                    # The other callbacks run all the same, and this thread goes on.
                    except Exception:
                        log.exception("%s: after %s", self._name, self._failure)
        with self._lock:
            os.close(self._wake)
            self._wake = -1

    def _watch_new_ranks(self, poll: select.poll) -> None:
        """Start to watch each rank whose first record has come: its process, its beats, or both.
        """
        for rank, record in self._others().items():
            if rank in self._processes or rank in self._remote:
                continue
            host = Host(*record.host)
            if self._host.sees(host):
                process = self._processes[rank] = PeerProcess(record.pid, record.start_time)
                if process.fd >= 0:
                    poll.register(process.fd, select.POLLIN)
            # On another network a rank is lost with its connection, though its process may live.
            if host.node != self._host.node or not self._host.sees(host):
                self._remote.add(rank)
                # Beats are written only once some rank needs them: on one host they would only load
                # the store.
                assert self._heartbeat is not None
                self._heartbeat.beating = True

    def _check_ranks(self, heard: bool, turn_s: float) -> None:
        """Take one turn: look for dead processes, then at the records, then for silence.

        In this order, since a process that is gone is a fact, and silence only a sign.
        """
        # Looked at from the last rank down, judged from rank 0 up. Rank 0 may host the store. Then
        # a rank that ended because of its death could no longer publish that it closed: seeing the
        # follower's end implies seeing rank 0's, which is judged first.
        dead = [
            rank
            for rank in sorted(self._processes, reverse=True)
            if rank not in self._dead and self._processes[rank].ended()
        ]
        assert self._heartbeat is not None
        if dead:
            # The dead rank may have published why, or that it closed in order; or the store is gone
            # with rank 0. On a busy machine that is known late, and who is judged before is blamed
            # for it.
            self._heartbeat.refresh(_DYING_S)
        records = self._others()
        for rank in reversed(dead):
            # Judged once: a rank that left in order is not looked at again.
            self._dead.add(rank)
            record = records[rank]
            if record.left != "closed" and record.failed is None:
                first = records.get(0)
                if rank and self._heartbeat.lost and first and first.left != "closed":
                    # It ended because of rank 0, whose store is gone: a dying process closes its
                    # connections a little before it is seen to have ended. Told below.
                    break
                self._set_failure(death_error(rank, record, f"its process {record.pid} is gone"))
                return
        # A published failure names its cause, which says more than the death that follows from it.
        if relayed := relayed_failure(self.topology.rank, records):
            self._set_failure(relayed)
            return
        for rank, record in records.items():
            if record.left == "ended":
                self._set_failure(death_error(rank, record, "without closing its engine"))
                return
        # Once rank 0 has closed in order, a store that is lost is no failure.
        if 0 in records and records[0].left == "closed":
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
        """Count the silence of ranks on other hosts, and of the store if it is on another host."""
        self._unheard_s += turn_s
        # The store is as far as rank 0: only where that is another host can its silence mean a cut
        # network.
        if 0 in self._remote and self._unheard_s > self._silence_s and records[0].left != "closed":
            text = (
                "the store of the default group, which rank 0 hosts, has not answered for "
                f"{self._silence_s:g} s"
            )
            self._set_failure(RankFailed(text, rank=0))
            return
        if not heard:
            return
        # Silence counts only while the store answered, and once per exchange.
        listened_s, self._unheard_s = min(self._unheard_s, _TURN_MAX_S), 0.0
        for rank in self._remote:
            record = records[rank]
            # A rank that has left sends no more beats, and none is missed.
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
    """Find a failure that another rank has published, and make this rank's error of it."""
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
    """Find a rank that is known not to come to this collective, and make the error that says why.
    A failure that was published is first: a rank that closes because of it is not its cause.

    raised: the numbers after which this rank itself broke off.
    names: this rank's own last few collectives, by number.

    Two names under one number mean that programs have diverged, whichever communication streams
    they are in: the main thread gives each number once, in the order of the program, and what it
    published under a number stays. A rank that is merely late is never accused: it has published
    nothing yet under the numbers to come, and under those before the same as this rank.

    Ranks that wait for each other are found. Take two that have come to numbers `a` and `b`, a <=
    b. Were all names up to `a` the same, each communication stream of both would begin with the
    same collectives. Then the one that the first waits for would complete, since the other has
    submitted it. So some name up to `a` differs. The differing name is among the last few, since a
    rank that has submitted a stuck one soon waits; or names after it differ, too, being shifted.
    Other cases end with the timeout.
    """
    if relayed := relayed_failure(me, others):
        return relayed
    for rank, record in others.items():
        why = ""
        for after, text in record.raised:
            if number is not None and after < number and after not in raised:
                why = f"rank {rank} broke off before it: {text}"
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
    """Describe the first known difference between a rank's collectives and this rank's.

    Empty if none is known.
    """
    both = sorted(theirs.keys() & mine.keys())
    at = next((number for number in both if theirs[number] != mine[number]), None)
    if at is None:
        return ""
    if at == waits_for:
        where = f"rank {rank} has come to {theirs[at]} instead"
    else:
        where = (
            f"as collective {at} this rank has come to {mine[at]}, and rank {rank} to {theirs[at]}"
        )
    return (
        f"{where}; all ranks must run the same modules in the same order, "
        f"and call what is collective together; {LEFT_OUT}"
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
    """Make the error of having waited for `timeout_s`, naming those of `ranks` that have not come.

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
            f"rank {rank} last came to "
            f"{describe_collective(others[rank].last, others[rank].number)}"
            for rank in behind
        ]
        text = f"{text}: {describe_ranks(behind)} did not come ({'; '.join(last)})"
        return RankFailed(shorten(text), rank=behind[0], ranks=tuple(behind))
    if not fresh:
        text = f"{text}, and the store of the default group, which rank 0 hosts, does not answer"
        return RankFailed(text, rank=0)
    if number is None:
        return RankFailed(f"{text}, and it is not known which rank has not come")
    past = [rank for rank, record in others.items() if number not in record.names]
    if past:
        last = [
            f"rank {rank} has come to {describe_collective(others[rank].last, others[rank].number)}"
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
        f"{text}, though every rank has come to it: a connection or a drive is stuck, or the "
        "timeout too short"
    )


def death_error(rank: int, record: RankRecord, how: str) -> RankFailed:
    """Make the error of a rank that is gone."""
    text = f"rank {rank} on {record.host[0]} has ended: {how}"
    if record.raised:
        text += f"; it had broken off ({record.raised[-1][1]})"
    return RankFailed(shorten(text), rank=rank)


def relayed_error(me: int, teller: int, culprit: int | None, text: str) -> RankFailed:
    """Make this rank's error from the failure that rank `teller` has published."""
    if culprit == me:
        return RankFailed(
            shorten(f"rank {teller} gave up on this rank ({me}): {text}"), rank=teller
        )
    # Here it is another rank's.
    text = text.replace(f"this rank ({teller})", f"rank {teller}")
    # Named once, by the rank that found it, however many relay it.
    if culprit != teller and "(found by rank" not in text:
        text = f"{text} (found by rank {teller})"
    return RankFailed(text, rank=culprit)


def published_culprit(me: int, failure: RankFailed) -> int | None:
    """Return the rank that other ranks shall blame for this rank's failure."""
    # The rank that gave up on this one is the cause to this rank alone.
    return me if f"gave up on this rank ({me})" in str(failure) else failure.rank


def describe_collective(what: str, number: int | None) -> str:
    """Name a collective for messages."""
    if number == 0:
        return "no collective yet"
    return what if number is None else f"{what}, collective {number}"


def describe_ranks(ranks: list[int]) -> str:
    """Name ranks for messages."""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}"


def shorten(text: str) -> str:
    """Cut a message to the length that a record may have."""
    return text if len(text) <= _MESSAGE_MAX else f"{text[:_MESSAGE_MAX]} ..."
