"""Which host a rank runs on, and whether a process of this host is alive: read from /proc, nothing is asked of the network."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import logging
import os
import platform
import select
from pathlib import Path

log = logging.getLogger("infinity")

_UNSUPPORTED = (errno.ENOSYS, errno.EPERM, errno.EACCES)


@dataclasses.dataclass(frozen=True)
class Host:
    """Where a process runs. Containers of one machine are hosts of their own, as network namespaces are."""

    name: str
    boot_id: str
    network: int
    """Inode of the network namespace: what one address reaches."""
    pids: int
    """Inode of the pid namespace: within it, a pid means the same process."""

    @classmethod
    def this(cls) -> Host:
        """The host of this process."""
        return cls(platform.node(), _boot_id(), _namespace("net"), _namespace("pid"))

    @property
    def node(self) -> tuple[str, str, int]:
        """Equal for the processes that count as one node. Without a boot id, the host's name decides."""
        return (self.boot_id or self.name, "" if self.boot_id else self.name, self.network)

    def sees(self, other: Host) -> bool:
        """Whether a pid of `other` can be looked up here."""
        return bool(self.boot_id) and (self.boot_id, self.pids) == (other.boot_id, other.pids)


class Process:
    """A process of this host that is watched. Given by pid and start time: a pid that was used again is another process."""

    def __init__(self, pid: int, start_time: int) -> None:
        self.pid = pid
        self._start_time = start_time
        self.fd = -1
        """Becomes readable when the process ends; -1 where the kernel forbids it, or it has ended already."""
        try:
            self.fd = os.pidfd_open(pid)
        except ProcessLookupError:
            return
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
            log.info(
                "pidfd_open is not available (%s): processes of other ranks are looked up in /proc", error
            )
            return
        # 0 where it has just ended, which the descriptor says, or where /proc hides the processes of others.
        if start_time_of(pid) not in (0, start_time):
            self.close()

    def ended(self) -> bool:
        """Whether it has ended; a zombie has."""
        if self.fd >= 0:
            poll = select.poll()
            poll.register(self.fd, select.POLLIN)
            return bool(poll.poll(0))
        return start_time_of(self.pid) != self._start_time

    def close(self) -> None:
        """Give the descriptor back."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def start_time_of(pid: int) -> int:
    """When the process began, in clock ticks since boot; 0 if there is none, or only its zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return 0
    # The name in parentheses may hold blanks; the state follows it, and field 22 is the 20th after it.
    fields = text.rpartition(")")[2].split()
    return 0 if fields[0] in "ZX" else int(fields[19])


def _boot_id() -> str:
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return ""


def _namespace(kind: str) -> int:
    with contextlib.suppress(OSError):
        return Path(f"/proc/self/ns/{kind}").stat().st_ino
    return 0
