"""Process groups that lanes use, and breaking off a collective that is stuck in one.

`ProcessGroupGloo.abort` does nothing in torch 2.13 (a stuck collective stays so until its timeout; a test would notice the
change). But gloo fails at once when a connection closes, so that is what breaking off does: it shuts down this group's own
connections. They are the sockets in the epoll set that gloo made for the group, which is found by what new_group() adds to the
process's descriptors. One gap is gloo's: a send that is in the middle of a write when its connection closes is never told, and
whoever waits for it waits until the timeout; nothing comes to its memory any more, and the thread is given up.
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

SLACK_S = 60.0
_EPOLL = "anon_inode:[eventpoll]"
_EPOLLS: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()
_MAKING = threading.Lock()


def make_group(
    *, timeout_s: float, ranks: Sequence[int] | None = None, backend: str = "gloo"
) -> dist.ProcessGroup | None:
    """A new group of `ranks` (None: all) that `break_off` can break off; None on ranks that are not in it. Blocks; every rank of
    the world makes the same groups in the same order, while no other thread of its makes one.

    timeout_s: of the watch; the group's own is later, so that it is the watch that speaks.
    """
    with _MAKING:
        before = _epolls()
        timeout = datetime.timedelta(seconds=timeout_s + SLACK_S)
        group = dist.new_group(None if ranks is None else list(ranks), timeout=timeout, backend=backend)
        added = _epolls() - before
    if not isinstance(group, dist.ProcessGroup):
        return None  # torch returns a sentinel to who is not a member
    if backend != "gloo":  # whatever it has added is not what gloo connects by
        return group
    if len(added) == 1:
        _EPOLLS[group] = added.pop()
    else:
        log.info(
            "the connections of a process group are not known (%d candidates): it cannot be broken off",
            len(added),
        )
    return group


def abort_group(group: dist.ProcessGroup) -> bool:
    """Make this group's collectives fail on this rank, those that run included; the group is of no use any more.

    Returns whether that was possible: what runs in another group ends with its timeout, or with the process.
    """
    epoll = _EPOLLS.pop(group, None)
    if epoll is not None:
        for fd in _watched(epoll):
            _shut_down(fd)
        return True
    if dist.get_backend(group) == "nccl":
        group.abort()
        return True
    return False


def _epolls() -> set[int]:
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the descriptor of the listing itself is closed by now
            if str(entry.readlink()) == _EPOLL:
                found.add(int(entry.name))
    return found


def _watched(epoll: int) -> list[int]:
    """The descriptors in an epoll set."""
    text = Path(f"/proc/self/fdinfo/{epoll}").read_text(encoding="ascii")
    return [int(fd) for fd in re.findall(r"^tfd:\s*(\d+)", text, re.MULTILINE)]


def _shut_down(fd: int) -> None:
    """End both directions if it is a connection. The listener is left alone: gloo ends the process when accepting fails."""
    with contextlib.suppress(OSError):  # not a socket, not connected, or closed meanwhile
        with socket.socket(fileno=os.dup(fd)) as connection:
            connection.getpeername()
            connection.shutdown(socket.SHUT_RDWR)
