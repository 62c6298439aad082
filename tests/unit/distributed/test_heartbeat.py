"""Liveness of a process of this host."""

from __future__ import annotations

import dataclasses
import errno
import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from infinity._src.distributed.heartbeat import Host, PeerProcess
from infinity.aio._swap_owner import start_time_of


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield process
    process.kill()
    process.wait()


@pytest.fixture(params=["pidfd", "proc"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With pidfd_open, and as a kernel that forbids it."""
    if request.param == "proc":

        def forbidden(pid: int, flags: int = 0) -> int:
            raise OSError(errno.EPERM, "forbidden")

        monkeypatch.setattr(os, "pidfd_open", forbidden)
    return str(request.param)


def test_a_process_has_ended_once_it_is_a_zombie(child: subprocess.Popen[bytes], way: str) -> None:
    process = PeerProcess(child.pid, start_time_of(child.pid))
    assert (process.fd >= 0) == (way == "pidfd")
    assert not process.ended()
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # dead, and not reaped
    assert process.ended()
    child.wait()
    assert process.ended()
    process.close()
    process.close()


def test_a_pid_that_is_used_again_is_another_process(
    child: subprocess.Popen[bytes], way: str
) -> None:
    process = PeerProcess(child.pid, start_time_of(child.pid) - 1)
    assert process.fd == -1
    assert process.ended()


def test_a_process_that_ended_before_it_was_watched_has_ended(way: str) -> None:
    gone = subprocess.Popen(["true"])
    started = start_time_of(gone.pid)
    gone.wait()
    assert start_time_of(gone.pid) == 0
    assert PeerProcess(gone.pid, started or 1).ended()


def test_a_stopped_process_has_not_ended(child: subprocess.Popen[bytes], way: str) -> None:
    process = PeerProcess(child.pid, start_time_of(child.pid))
    os.kill(child.pid, 19)
    time.sleep(0.05)
    assert not process.ended()
    process.close()


def test_hosts_are_told_apart_by_boot_and_network() -> None:
    here = Host.this()
    assert here.sees(here)
    assert here.node == dataclasses.replace(here, name="another name").node
    assert here.node != dataclasses.replace(here, network=here.network + 1).node
    assert here.sees(dataclasses.replace(here, network=here.network + 1))
    assert not here.sees(dataclasses.replace(here, pids=here.pids + 1))
    assert not here.sees(dataclasses.replace(here, boot_id="another"))
    nameless = dataclasses.replace(here, boot_id="")
    assert not nameless.sees(nameless)
    assert nameless.node != dataclasses.replace(nameless, name="another name").node
