"""Process groups of lanes, and aborting a collective that is stuck in one.

`ProcessGroupGloo.abort` does nothing in torch 2.13: a stuck collective stays so until its timeout
(a test would notice the change). But gloo fails at once when a connection closes. So aborting shuts
down this group's own connections. They are the sockets in the epoll set that gloo made for the
group; it is found by what new_group() adds to the process's descriptors.

One gap is gloo's: gloo does not end a send that is in the middle of a write when its connection
closes, so a thread that waits for that send waits until the timeout. Nothing comes to its memory
any more, and the thread is given up.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import os
import re
import socket
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

log = logging.getLogger("infinity")

# The group's own timeout comes this much after the watchdog's, which names the rank.
SLACK_S = 60.0
_EPOLL = "anon_inode:[eventpoll]"
_EPOLLS: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()
# One at a time: the descriptors that a group adds are found by comparing before and after.
_MAKING = threading.Lock()


def make_group(
    *, timeout_s: float, ranks: Sequence[int] | None = None, backend: str = "gloo"
) -> dist.ProcessGroup | None:
    """Make a group of `ranks` (None: all) that `abort_group` can abort; None on ranks outside of
    it.

    Collective over the whole world: every rank makes the same groups in the same order, while no
    other thread of the rank makes one. Blocks.
    timeout_s: the watchdog's. The group's own is later, so that the watchdog's message is raised.
    """
    with _MAKING:
        before = _epolls()
        timeout = datetime.timedelta(seconds=timeout_s + SLACK_S)
        group = dist.new_group(
            None if ranks is None else list(ranks), timeout=timeout, backend=backend
        )
        added = _epolls() - before
    if not isinstance(group, dist.ProcessGroup):
        return None  # torch returns a sentinel to ranks that are not members
    # Descriptors that another backend has added are not gloo's connections.
    if backend != "gloo":
        return group
    # Another thread may have opened an epoll set meanwhile: with several no guess is made.
    if len(added) == 1:
        _EPOLLS[group] = added.pop()
    else:
        log.info(
            "the connections of a process group are not known (%d candidates): it cannot be broken "
            "off",
            len(added),
        )
    return group


def abort_group(group: dist.ProcessGroup) -> bool:
    """Make this group's collectives fail on this rank, running ones included. The group is unusable
    then.

    Returns whether that was possible. If not, its collectives end with their timeout, or the
    process.
    """
    epoll = _EPOLLS.pop(group, None)
    # gloo fails at once when a connection closes, so this ends the calls that wait in it.
    if epoll is not None:
        for fd in _watched(epoll):
            _shut_down(fd)
        return True
    if dist.get_backend(group) == "nccl":
        # NCCL has an abort of its own; gloo's does nothing in torch 2.13.
        group.abort()
        return True
    return False


def _epolls() -> set[int]:
    """Find the epoll sets among this process's descriptors."""
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the descriptor of the listing itself is closed by now
            if str(entry.readlink()) == _EPOLL:
                found.add(int(entry.name))
    return found


def _watched(epoll: int) -> list[int]:
    """Read the descriptors in an epoll set from /proc."""
    text = Path(f"/proc/self/fdinfo/{epoll}").read_text(encoding="ascii")
    return [int(fd) for fd in re.findall(r"^tfd:\s*(\d+)", text, re.MULTILINE)]


def _shut_down(fd: int) -> None:
    """Shut down both directions of a descriptor if it is a connection."""
    with contextlib.suppress(OSError):  # not a socket, not connected, or closed meanwhile
        # A duplicate, so that closing it leaves gloo's descriptor open.
        with socket.socket(fileno=os.dup(fd)) as connection:
            # Raises for the listener, which is left alone: gloo ends the process when accepting
            # fails.
            connection.getpeername()
            connection.shutdown(socket.SHUT_RDWR)
