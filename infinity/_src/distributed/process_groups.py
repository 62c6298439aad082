"""Process groups of communication streams, and aborting the collectives that are stuck in them.

`ProcessGroupGloo.abort` does nothing in torch 2.13: a stuck collective stays so until its timeout
(a test would notice the change). But gloo fails at once when a connection closes. So aborting shuts
down this group's own connections. They are the sockets in the epoll set that gloo made for the
group; it is found by what new_group() adds to the process's descriptors.

One gap is gloo's: gloo does not end a send that is in the middle of a write when its connection
closes, so a thread that waits for that send waits until the timeout. Nothing comes to its memory
any more, and the thread is given up.

NCCL has an abort of its own. torch's watchdog would end the process by SIGABRT on an error of NCCL
or a timeout, before a `RankFailed` that names the rank could be raised. It is switched off for the
groups made here, as torch asks of programs that abort by themselves.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import os
import re
import socket
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch.distributed as dist

log = logging.getLogger("infinity")

# Aborts of NCCL are over by then, or hang.
ABORT_S = 5.0
# NoHandling = 0: errors and timeouts of NCCL are this engine's to handle.
_TEARDOWN = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
# The group's own timeout comes this much after the watchdog's, which names the rank.
SLACK_S = 60.0
_EPOLL = "anon_inode:[eventpoll]"
_EPOLLS: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()
# One at a time: the descriptors that a group adds are found by comparing before and after.
_MAKING = threading.Lock()


def make_group(
    *, timeout_s: float, ranks: Sequence[int] | None = None, backend: str = "gloo"
) -> dist.ProcessGroup | None:
    """Make a group of `ranks` (None: all) that `abort_groups` can abort; None on ranks outside
    of it.

    Collective over the whole world: every rank makes the same groups in the same order, while no
    other thread of the rank makes one. Blocks.
    timeout_s: the watchdog's. The group's own is later, so that the watchdog's message is raised.
    """
    with _MAKING:
        before = _epolls()
        timeout = datetime.timedelta(seconds=timeout_s + SLACK_S)
        with _without_teardown() if backend == "nccl" else contextlib.nullcontext():
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


def abort_groups(groups: Sequence[dist.ProcessGroup], *, limit_s: float = ABORT_S) -> bool:
    """Make the collectives of these groups fail on this rank, running ones included. The groups are
    unusable then.

    Blocks for `limit_s` at most. Returns False where the abort of a group of NCCL hangs or fails:
    its kernels may be stuck on the device, and all that waits behind them. Collectives of gloo
    whose connections are not known end with their timeout.
    """
    threads: list[threading.Thread] = []
    aborted: list[dist.ProcessGroup] = []  # of NCCL
    for group in groups:
        try:
            if group in _EPOLLS:
                # gloo fails at once when a connection closes, so this ends the calls that wait in
                # it.
                for fd in _watched(_EPOLLS.pop(group)):
                    _shut_down(fd)
            elif dist.get_backend(group) == "nccl":
                threads.append(
                    threading.Thread(target=_abort_nccl, args=(group, aborted), daemon=True)
                )
            else:
                log.debug("a process group cannot be aborted")
        # The other groups are aborted all the same.
        except Exception:
            log.exception("a process group cannot be aborted")
    # gloo first, since aborting NCCL may hang. All of NCCL together: one communicator's abort may
    # wait for a kernel that waits for another communicator's. And each in a thread, because there
    # is no way out of a call that hangs.
    for thread in threads:
        thread.start()
    end_s = time.monotonic() + limit_s
    for thread in threads:
        thread.join(max(0.0, end_s - time.monotonic()))
    hanging = sum(thread.is_alive() for thread in threads)
    if hanging:
        log.warning(
            "aborting %d of %d communicators of NCCL hangs after %g s: kernels may be stuck on the "
            "device until the process ends",
            hanging,
            len(threads),
            limit_s,
        )
    return len(aborted) == len(threads)


def _abort_nccl(group: dist.ProcessGroup, aborted: list[dist.ProcessGroup]) -> None:
    try:
        group.abort()
        aborted.append(group)
    # No thread waits for this one's error.
    except Exception:
        log.exception("a communicator of NCCL cannot be aborted")


@contextlib.contextmanager
def _without_teardown() -> Iterator[None]:
    """Switch off that torch's watchdog ends the process, for groups of NCCL made in the block."""
    # Read once, by the group's constructor. The older name counts where the first one is not set.
    before = os.environ.get(_TEARDOWN)
    os.environ[_TEARDOWN] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_TEARDOWN]
        else:
            os.environ[_TEARDOWN] = before


def _epolls() -> set[int]:
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
    with contextlib.suppress(OSError):  # not a socket, not connected, or closed meanwhile
        # A duplicate, so that closing it leaves gloo's descriptor open.
        with socket.socket(fileno=os.dup(fd)) as connection:
            # Raises for the listener, which is left alone: gloo ends the process when accepting
            # fails.
            connection.getpeername()
            connection.shutdown(socket.SHUT_RDWR)
