"""Heartbeat: one small record per rank in the store of the default group, which all ranks read.

A thread of its own talks to the store, because a store whose host is stopped holds the caller for
as long as that lasts. `Host` and `PeerProcess` tell which ranks run on this host, and whether they
live; they read /proc, and ask nothing of the network.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import logging
import os
import platform
import select
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from infinity.aio._swap_owner import start_time_of, this_boot

log = logging.getLogger("infinity")

# Errors of pidfd_open on old kernels, and in sandboxes that forbid it.
_UNSUPPORTED = (errno.ENOSYS, errno.EPERM, errno.EACCES)


@dataclasses.dataclass(frozen=True)
class Host:
    """Host that a process runs on. Each container, or network namespace, of a machine is one."""

    name: str
    boot_id: str
    network: int
    """Inode of the network namespace, within which an address reaches one host."""
    pids: int
    """Inode of the pid namespace, within which a pid means one process."""

    @classmethod
    def this(cls) -> Host:
        """Read the host of this process."""
        return cls(platform.node(), this_boot(), _namespace("net"), _namespace("pid"))

    @property
    def node(self) -> tuple[str, str, int]:
        """Key that is equal for processes of one node. Without a boot id, the host's name decides.
        """
        return (self.boot_id or self.name, "" if self.boot_id else self.name, self.network)

    def sees(self, other: Host) -> bool:
        """Check that a pid of `other` can be looked up here."""
        # Inodes of namespaces repeat after a boot, and on other machines.
        return bool(self.boot_id) and (self.boot_id, self.pids) == (other.boot_id, other.pids)


class PeerProcess:
    """Process of another rank on this host.

    Named by pid and start time: a pid that was used again is another process.
    """

    def __init__(self, pid: int, start_time: int) -> None:
        self.pid = pid
        self._start_time = start_time
        self.fd = -1
        """pidfd, readable when the process has ended; -1 where the kernel forbids it, or it is
        gone."""
        try:
            self.fd = os.pidfd_open(pid)
        except ProcessLookupError:
            return
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
            log.info(
                "pidfd_open is not available (%s): processes of other ranks are looked up in /proc",
                error,
            )
            return
        # 0 where it has just ended, which the pidfd says, or where /proc hides the processes of
        # other users. Looked at after opening: from here on the pidfd is that of this process.
        if start_time_of(pid) not in (0, start_time):
            self.close()

    def ended(self) -> bool:
        """Check whether it has ended; a zombie has."""
        if self.fd >= 0:
            poll = select.poll()
            # A zombie's pidfd is readable too.
            poll.register(self.fd, select.POLLIN)
            return bool(poll.poll(0))
        return start_time_of(self.pid) != self._start_time

    def close(self) -> None:
        """Close the pidfd. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def _namespace(kind: str) -> int:
    with contextlib.suppress(OSError):
        return Path(f"/proc/self/ns/{kind}").stat().st_ino
    return 0


@dataclasses.dataclass(frozen=True)
class RankRecord:
    """State that a rank publishes about itself."""

    host: tuple[str, str, int, int] = ("", "", 0, 0)
    pid: int = 0
    start_time: int = 0
    beat: int = 0
    number: int = 0
    """Count of the collectives that its main thread has submitted."""
    last: str = ""
    """Name of the last of them."""
    recent: tuple[tuple[int, str], ...] = ()
    """Numbers and names of the last few, while it waits for one."""
    raised: tuple[tuple[int, str], ...] = ()
    """Forwards and backwards that broke off: the number before each, and the error."""
    failed: tuple[int | None, str] | None = None
    """Failure that ended its engine: the rank that caused it, and the message."""
    left: str = ""
    """"closed" or "ended", once it has left."""
    read: bool = False
    """Acknowledgement that rank 0, whose process may host the store, has left."""

    @property
    def names(self) -> dict[int, str]:
        """Names of its collectives, as far as they are known, by number."""
        return {**dict(self.recent), **({self.number: self.last} if self.last else {})}

    @classmethod
    def parse(cls, text: bytes) -> RankRecord:
        """Parse the text that `json` made. Raises: ValueError for another one: whoever reaches the
        store's port may write there.
        """
        try:
            found = json.loads(text)
            # JSON has lists only; records are compared, and tuples compare with tuples.
            found["host"] = tuple(found["host"])
            found["recent"] = tuple((int(number), str(what)) for number, what in found["recent"])
            found["raised"] = tuple((int(number), str(why)) for number, why in found["raised"])
            found["failed"] = tuple(found["failed"]) if found["failed"] else None
            record = cls(**found)
            whole = all(
                type(getattr(record, field.name)) is type(field.default)
                for field in dataclasses.fields(cls)
                if field.name != "failed"
            )
            rank, message = record.failed or (None, "")
            whole &= (rank is None or type(rank) is int) and type(message) is str
            whole &= [type(each) for each in record.host] == [str, str, int, int]
        # Each is raised by values of another type than a record has.
        except (
            ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError
        ) as error:  # fmt: skip
            raise ValueError(f"no record of a rank: {text[:60]!r}") from error
        if not whole:
            raise ValueError(f"no record of a rank: {text[:60]!r}")
        return record

    def json(self) -> str:
        """Format the record for the store."""
        return json.dumps(dataclasses.asdict(self))


class Heartbeat:
    """Thread that writes this rank's record, and reads those of all ranks, about every
    `interval_s`.

    quiet_s: changes that are not urgent (`number`) are written at most this often.
    on_exchange: called from the thread after every exchange, and when the store is lost.
    """

    def __init__(
        self,
        rank: int,
        world: int,
        store: Any,
        *,
        interval_s: float,
        quiet_s: float,
        on_exchange: Callable[[], None],
    ) -> None:
        self._rank, self._world = rank, world
        self._store = store
        self._interval_s, self._quiet_s = interval_s, quiet_s
        self._on_exchange = on_exchange
        self._changed = threading.Condition()
        self._mine = RankRecord()
        self._urgent = True
        self._stop = False
        self._begun = 0
        self._written_s = -1e9  # so that the first record is written at once
        # Keys that have been seen: they never go, so each is checked for once.
        self._on_store: set[int] = set()
        self.beating = False
        """True where each exchange counts `beat` up and writes it.

        Ranks of other hosts have no other sign of life. Between ranks of one host it would only
        load the store.
        """
        self.rounds = 0
        """Count of the exchanges that have ended."""
        self.records: list[RankRecord | None] = [None] * world
        self.lost: str = ""
        """Error of the lost store, if it is lost; the records are then the last that were read."""
        self._thread = threading.Thread(target=self._run, name="infinity-heartbeat", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def publish(self, *, urgent: bool = True, **fields: Any) -> None:
        """Change fields of this rank's record. Does not block. urgent: write it at once."""
        with self._changed:
            self._mine = dataclasses.replace(self._mine, **fields)
            if urgent:
                self._urgent = True
                self._changed.notify_all()

    def refresh(self, limit_s: float) -> bool:
        """Wait for an exchange that begins after this call, for `limit_s` at most.

        Returns whether there was one.
        """
        with self._changed:
            # One that runs now may have read the other records already.
            wanted = self._begun + 1
            self._urgent = True
            self._changed.notify_all()
            return (
                self._changed.wait_for(lambda: self.rounds >= wanted or bool(self.lost), limit_s)
                and not self.lost
            )

    def stop(self, limit_s: float) -> None:
        """Write the last changes, and end the thread. After `limit_s` it is left to end by itself.
        """
        with self._changed:
            self._stop = True
            self._changed.notify_all()
        if self._thread is not threading.current_thread():
            self._thread.join(limit_s)

    def _run(self) -> None:
        # The store raises what its transport does: RuntimeError, DistError, OSError.
        try:
            # `_stop` is read without the condition: a late reading costs one more exchange.
            while not self._stop:
                self._exchange()
                self._on_exchange()
                with self._changed:
                    self._changed.wait_for(lambda: self._urgent or self._stop, self._interval_s)
            # The last record, that this rank has left, must still be written.
            if self._urgent:
                self._exchange()
        except (RuntimeError, OSError, ValueError) as error:
            with self._changed:
                self.lost = str(error).split("\n", 1)[0][:300] or type(error).__name__
                self._changed.notify_all()
            self._on_exchange()
        finally:
            # The connection is this thread's: closing it elsewhere could wait for a stuck call.
            self._store = None

    def _exchange(self) -> None:
        with self._changed:
            self._begun += 1
            # `rounds` becomes this number: `refresh` waits for an exchange that began after it was
            # called.
            begun = self._begun
            if self.beating:
                self._mine = dataclasses.replace(self._mine, beat=self._mine.beat + 1)
            due = self._urgent or self.beating or time.monotonic() - self._written_s > self._quiet_s
            self._urgent = False
            mine = self._mine
        # An unchanged record is not written again: each write is a request to one host for all
        # ranks.
        if due and mine != self.records[self._rank]:
            self._store.set(str(self._rank), mine.json())
            self._written_s = time.monotonic()
        others = [other for other in range(self._world) if other != self._rank]
        # get() waits for a key that is not there yet, so each is checked for until it has come.
        for other in others:
            if other not in self._on_store and self._store.check([str(other)]):
                self._on_store.add(other)
        there = [other for other in others if other in self._on_store]
        found = self._read([str(other) for other in there])
        with self._changed:
            self.records[self._rank] = mine if due else self.records[self._rank]
            for other, text in zip(there, found, strict=True):
                self.records[other] = RankRecord.parse(text)
            self.rounds = begun
            self._changed.notify_all()

    def _read(self, keys: list[str]) -> list[bytes]:
        if not keys:
            return []
        # One request for all keys, where the store knows it.
        if self._store.has_extended_api():
            return list(self._store.multi_get(keys))
        return [self._store.get(key) for key in keys]
