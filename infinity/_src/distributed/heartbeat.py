"""Heartbeat: each rank writes a small record to the default group's store, and all ranks read it.

A separate thread calls the store, because a call blocks while the store's host is stopped. `Host`
and `PeerProcess` find the ranks on this host and whether they are alive, by /proc alone.
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
    """Host of a process. Each network namespace (container) of a machine is a separate host."""

    name: str
    boot_id: str
    network: int
    """Inode of the network namespace."""
    pids: int
    """Inode of the pid namespace, in which pids are unique."""

    @classmethod
    def this(cls) -> Host:
        """Return the host of this process."""
        return cls(platform.node(), this_boot(), _namespace("net"), _namespace("pid"))

    @property
    def node(self) -> tuple[str, str, int]:
        """Key of the node: equal for all its processes. It has the boot id, or else the host's
        name."""
        return (self.boot_id or self.name, "" if self.boot_id else self.name, self.network)

    def sees(self, other: Host) -> bool:
        """Return whether a pid of `other` can be looked up here."""
        # Compare the boot id, too: inodes of namespaces repeat across boots and machines.
        return bool(self.boot_id) and (self.boot_id, self.pids) == (other.boot_id, other.pids)


class PeerProcess:
    """Process of another rank on this host. Its pid and start time identify it, since pids are
    reused."""

    def __init__(self, pid: int, start_time: int) -> None:
        self.pid = pid
        self._start_time = start_time
        self.fd = -1
        """pidfd, readable when the process has ended; -1 if the kernel forbids it, or there is no
        such process."""
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
        # After opening, because from then on the pidfd refers to one process. 0: the process has
        # just ended, which the pidfd shows, or /proc hides other users' processes.
        if start_time_of(pid) not in (0, start_time):
            self.close()

    def ended(self) -> bool:
        """Return whether the process has ended, or is a zombie."""
        if self.fd >= 0:
            poll = select.poll()
            # A zombie's pidfd is readable, too.
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
    """State that a rank publishes."""

    host: tuple[str, str, int, int] = ("", "", 0, 0)
    pid: int = 0
    start_time: int = 0
    beat: int = 0
    number: int = 0
    """Number of collectives that its main thread has submitted."""
    last: str = ""
    """Name of the last collective that its main thread has submitted."""
    recent: tuple[tuple[int, str], ...] = ()
    """Numbers and names of the last few collectives, published while the rank waits."""
    raised: tuple[tuple[int, str], ...] = ()
    """Forwards and backwards that raised: (number of the last collective before, error)."""
    failed: tuple[int | None, str] | None = None
    """Failure that ended its engine: the rank that caused it, and the message."""
    left: str = ""
    """"closed" or "ended" once the rank has left."""
    read: bool = False
    """True once the rank has read that rank 0, whose process may host the store, has left."""

    @property
    def names(self) -> dict[int, str]:
        """Number -> name of its published collectives."""
        return {**dict(self.recent), **({self.number: self.last} if self.last else {})}

    @classmethod
    def parse(cls, text: bytes) -> RankRecord:
        """Parse the text of `json`. Raises: ValueError for invalid text, which any process that
        reaches the store's port may write."""
        try:
            found = json.loads(text)
            # JSON has no tuples, and records are compared.
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
        # Raised by values of wrong types.
        except (
            ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError
        ) as error:  # fmt: skip
            raise ValueError(f"no record of a rank: {text[:60]!r}") from error
        if not whole:
            raise ValueError(f"no record of a rank: {text[:60]!r}")
        return record

    def json(self) -> str:
        """Return the record as JSON, for the store."""
        return json.dumps(dataclasses.asdict(self))


class Heartbeat:
    """Thread that writes this rank's record and reads all ranks' records, about every `interval_s`.

    quiet_s: minimum seconds between writes of non-urgent changes (`number`).
    on_exchange: called by the thread after every exchange, and when the store is lost.
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
        self._written_s = -1e9  # the first record is written immediately
        # Ranks whose keys are known to exist. No key is ever deleted.
        self._on_store: set[int] = set()
        self.beating = False
        """If True, each exchange increments and writes `beat`, which shows ranks on other hosts
        that this rank is alive. On one host that would only load the store."""
        self.rounds = 0
        """Number of the last completed exchange."""
        self.records: list[RankRecord | None] = [None] * world
        self.lost: str = ""
        """Error by which the connection to the store was lost, or "". After that, `records` no
        longer change."""
        self._thread = threading.Thread(target=self._run, name="infinity-heartbeat", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def publish(self, *, urgent: bool = True, **fields: Any) -> None:
        """Change fields of this rank's record. Never blocks. urgent: write it immediately."""
        with self._changed:
            self._mine = dataclasses.replace(self._mine, **fields)
            if urgent:
                self._urgent = True
                self._changed.notify_all()

    def refresh(self, limit_s: float) -> bool:
        """Wait for an exchange that begins after this call, at most `limit_s` seconds.

        Returns False at the timeout, or if the store is lost.
        """
        with self._changed:
            # Not an exchange in progress, which may already have read the records.
            wanted = self._begun + 1
            self._urgent = True
            self._changed.notify_all()
            return (
                self._changed.wait_for(lambda: self.rounds >= wanted or bool(self.lost), limit_s)
                and not self.lost
            )

    def stop(self, limit_s: float) -> None:
        """Write the last changes, and end the thread. Blocks at most `limit_s`; a thread that is
        stuck longer keeps running."""
        with self._changed:
            self._stop = True
            self._changed.notify_all()
        if self._thread is not threading.current_thread():
            self._thread.join(limit_s)

    def _run(self) -> None:
        # The store raises RuntimeError, DistError (a RuntimeError) or OSError.
        try:
            # `_stop` is read without the lock: a stale value costs one exchange.
            while not self._stop:
                self._exchange()
                self._on_exchange()
                with self._changed:
                    self._changed.wait_for(lambda: self._urgent or self._stop, self._interval_s)
            # Write the last record, which says that this rank has left.
            if self._urgent:
                self._exchange()
        except (RuntimeError, OSError, ValueError) as error:
            with self._changed:
                self.lost = str(error).split("\n", 1)[0][:300] or type(error).__name__
                self._changed.notify_all()
            self._on_exchange()
        finally:
            # Drop the store in this thread: another thread could block behind a stuck call.
            self._store = None

    def _exchange(self) -> None:
        with self._changed:
            self._begun += 1
            begun = self._begun
            if self.beating:
                self._mine = dataclasses.replace(self._mine, beat=self._mine.beat + 1)
            due = self._urgent or self.beating or time.monotonic() - self._written_s > self._quiet_s
            self._urgent = False
            mine = self._mine
        # Write only changed records, since one process serves the requests of all ranks.
        if due and mine != self.records[self._rank]:
            self._store.set(str(self._rank), mine.json())
            self._written_s = time.monotonic()
        others = [other for other in range(self._world) if other != self._rank]
        # Check first, because get() blocks on a missing key.
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
        # One request for all keys, if the store supports it.
        if self._store.has_extended_api():
            return list(self._store.multi_get(keys))
        return [self._store.get(key) for key in keys]
