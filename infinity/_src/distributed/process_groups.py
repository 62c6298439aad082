"""Process groups of communication streams, and the abort of stuck collectives in them.

`ProcessGroupGloo.abort` has no effect in torch 2.13 (a test checks this): a collective stays stuck
until its timeout. But gloo fails at once when a connection closes. So `abort_groups` shuts down
the group's connections: the sockets in the group's epoll set, which is the descriptor that
new_group() adds to the process.

One limitation: when a connection closes in the middle of a write, gloo does not end that send, and
a thread that waits for the send waits until the timeout. The thread is abandoned; no more data
reaches its memory.

NCCL has an abort. On an NCCL error or timeout torch's watchdog would end the process by SIGABRT,
before a `RankFailed` that names the rank could be raised. It is disabled for the groups created
here, as torch recommends to programs that abort by themselves.
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

# Seconds after which an NCCL abort counts as hanging.
ABORT_S = 5.0
# 0 (NoHandling): the engine handles errors and timeouts of NCCL.
_TEARDOWN = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
# The group's timeout exceeds the watchdog's by this, so that the watchdog's error, which names the
# rank, comes first.
SLACK_S = 60.0
_EPOLL = "anon_inode:[eventpoll]"
_EPOLLS: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()
# One group at a time: its epoll set is the one that its creation adds.
_MAKING = threading.Lock()


def make_group(
    *, timeout_s: float, ranks: Sequence[int] | None = None, backend: str = "gloo"
) -> dist.ProcessGroup | None:
    """Create a group of `ranks` (None: all) that `abort_groups` can abort. Returns None on ranks
    outside of it.

    Collective over all ranks: every rank creates the same groups in the same order, from one thread
    at a time. Blocks. timeout_s: the watchdog's; the group's is SLACK_S longer.
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
        return None  # torch returns a sentinel on ranks that are not members
    if backend != "gloo":
        return group
    # If another thread has created an epoll set meanwhile, the group's is unknown.
    if len(added) == 1:
        _EPOLLS[group] = added.pop()
    else:
        log.info(
            "the connections of a process group are not known (%d candidates): it cannot be "
            "aborted",
            len(added),
        )
    return group


def abort_groups(groups: Sequence[dist.ProcessGroup], *, limit_s: float = ABORT_S) -> bool:
    """Make the collectives of these groups fail on this rank, including running ones. Afterwards
    the groups are unusable.

    Blocks for `limit_s` at most. Returns False if the abort of an NCCL group hangs or fails: its
    kernels, and work queued behind them, may be stuck on the device. Collectives of a gloo group
    with unknown connections end with their timeout.
    """
    threads: list[threading.Thread] = []
    aborted: list[dist.ProcessGroup] = []  # of NCCL
    for group in groups:
        try:
            if group in _EPOLLS:
                for fd in _watched(_EPOLLS.pop(group)):
                    _shut_down(fd)
            elif dist.get_backend(group) == "nccl":
                threads.append(
                    threading.Thread(target=_abort_nccl, args=(group, aborted), daemon=True)
                )
            else:
                log.debug("a process group cannot be aborted")
        # Continue with the other groups.
        except Exception:
            log.exception("a process group cannot be aborted")
    # NCCL last, since its abort may hang. All NCCL groups at the same time, since the abort of one
    # may wait for a kernel that waits for another group. In threads, because a hanging call cannot
    # be interrupted.
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
    # Logged, since no thread joins for the error.
    except Exception:
        log.exception("a communicator of NCCL cannot be aborted")


@contextlib.contextmanager
def _without_teardown() -> Iterator[None]:
    """Keep torch's watchdog from ending the process, for NCCL groups created in the block."""
    # The group's constructor reads the variable. This name has precedence over an older name.
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
        with contextlib.suppress(OSError):  # the listing's descriptor is already closed
            if str(entry.readlink()) == _EPOLL:
                found.add(int(entry.name))
    return found


def _watched(epoll: int) -> list[int]:
    """Return the descriptors in an epoll set, from /proc."""
    text = Path(f"/proc/self/fdinfo/{epoll}").read_text(encoding="ascii")
    return [int(fd) for fd in re.findall(r"^tfd:\s*(\d+)", text, re.MULTILINE)]


def _shut_down(fd: int) -> None:
    with contextlib.suppress(OSError):  # not a connected socket, or closed meanwhile
        # A duplicate, so that gloo's descriptor stays open.
        with socket.socket(fileno=os.dup(fd)) as connection:
            # Raises for the listener, which must stay: if accept fails, gloo ends the process.
            connection.getpeername()
            connection.shutdown(socket.SHUT_RDWR)
