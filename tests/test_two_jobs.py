"""Two jobs in one directory, begun at the same moment: ephemeral swap coexists, and a durable run
has one owner, which the other jobs name."""

from __future__ import annotations

import errno
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from infinity._src.checkpoint.durable.files import RunFiles
from infinity.aio import SwapFile
from infinity.aio._swap_owner import Owner, PrivateDirectory, clear_dead
from infinity.errors import AioError

JOBS, ROUNDS = 4, 3


def at_once(work: Callable[[int], Any]) -> list[Any]:
    """Return the results of `work(pid)` in `JOBS` children that start simultaneously, and end after
    all have reported."""
    go, ready, told, stay = os.pipe(), os.pipe(), os.pipe(), os.pipe()
    children = []
    for _ in range(JOBS):
        child = os.fork()
        if not child:
            try:
                os.close(go[1])
                os.close(stay[1])
                os.write(ready[1], b".")
                os.read(go[0], 1)
                found = work(os.getpid())
                os.write(told[1], json.dumps(found).encode() + b"\n")
                os.read(stay[0], 1)
            finally:
                # Not into the tests of the parent, whatever was raised.
                os._exit(0)
        children.append(child)
    for _ in range(JOBS):
        os.read(ready[0], 1)
    os.close(go[1])
    # A failed child leaves an empty line.
    os.close(told[1])
    with os.fdopen(told[0], "rb") as answers:
        found = [json.loads(answers.readline()) for _ in range(JOBS)]
    os.close(stay[1])
    for child in children:
        os.waitpid(child, 0)
    for fd in (go[0], *ready, stay[0]):
        os.close(fd)
    return found


_KEPT: list[Any] = []
"""Keeps a child's resources open until it ends."""


def begin(place: Path, pid: int) -> tuple[int, str, int]:
    try:
        _KEPT.append(RunFiles([place], 0, 1))
    except AioError as error:
        return pid, str(error), error.errno or 0
    return pid, "", 0


def test_one_of_several_simultaneous_jobs_gets_a_durable_run(
    tmp_path: Path,
) -> None:
    for index in range(ROUNDS):
        place = tmp_path / str(index)
        place.mkdir()
        found = at_once(lambda pid, place=place: begin(place, pid))
        owners = [pid for pid, error, _ in found if not error]
        assert len(owners) == 1, found
        others = [each for each in found if each[1]]
        assert {code for _, _, code in others} == {errno.EWOULDBLOCK}
        assert all(
            f"held by process {owners[0]} on" in error or "held by another process" in error
            for _, error, _ in others
        )
        # The holder may not have written its name yet; most have.
        assert begin(place, 0)[1] == ""
        _KEPT.pop().close()


def swap(place: Path, pid: int) -> list[int]:
    file = SwapFile.create(place, direct=False)
    file.grow(1 << 12)
    os.pwrite(file.fd, pid.to_bytes(8, "little"), 0)
    private = PrivateDirectory(str(place))
    # A start that removes files, at the same time as the others.
    clear_dead(str(place))
    _KEPT.append((file, private))
    read = int.from_bytes(os.pread(file.fd, 8, 0), "little")
    return [pid, read, int((private.path.parent / "owner.json").exists())]


def test_jobs_share_a_swap_directory_and_keep_their_files(
    tmp_path: Path,
) -> None:
    for _ in range(ROUNDS):
        found = at_once(lambda pid: swap(tmp_path, pid))
        assert all(pid == read and there for pid, read, there in found), found
        # Children that ended without cleaning left directories, which the next start takes.
        assert len(clear_dead(str(tmp_path))) == JOBS
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("owner", ["dead", "reused", "torn", "other host"])
def test_a_locked_directory_stays_whatever_its_owner_file_says(
    tmp_path: Path, owner: str
) -> None:
    private = PrivateDirectory(str(tmp_path))
    mine = Owner.this()
    said = {
        "dead": Owner(mine.host, mine.boot_id, 1 << 22, 1),
        # The pid of a process that lives, and that began at another time.
        "reused": Owner(mine.host, mine.boot_id, os.getppid(), 1),
        "torn": None,
        "other host": Owner("elsewhere", "another boot", 7, 7),
    }[owner]
    path = private.path.parent / "owner.json"
    fd = os.open(path, os.O_RDWR | os.O_TRUNC)
    if said is not None:
        said.write(fd)
    os.close(fd)
    child = os.fork()
    if not child:
        private.disown()
        os._exit(len(clear_dead(str(tmp_path))))
    assert os.waitpid(child, 0)[1] == 0
    assert path.exists()
    private.remove()


def test_a_killed_owner_is_followed_at_once(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        _KEPT.append(RunFiles([tmp_path], 0, 1))
        os.write(writer, b".")
        signal.pause()
    os.read(reader, 1)
    assert f"process {child} on" in begin(tmp_path, 0)[1]
    os.kill(child, signal.SIGKILL)
    assert begin(tmp_path, 0)[1] == ""
    os.waitpid(child, 0)
    _KEPT.pop().close()
    os.close(reader)
    os.close(writer)
