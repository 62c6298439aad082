"""Durable swap files: named, private, locked for one job, never lost and never removed."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import stat
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from infinity.aio import SwapFile
from infinity.aio import _swap_file as swap_file
from infinity.aio._swap_owner import Life, Owner
from infinity.errors import AioError, DeviceFailedError, SwapFullError
from tests.unit.aio.disks import loop_ext4

ROOT = Path(__file__).parents[3]
MIB = 1 << 20


def put(file: SwapFile, offset: int, byte: int) -> None:
    page = mmap.mmap(-1, 4096)
    page[:] = bytes([byte]) * 4096
    assert os.pwritev(file.fd, [page], offset) == 4096


def get(file: SwapFile, offset: int) -> bytes:
    page = mmap.mmap(-1, 4096)
    assert os.preadv(file.fd, [page], offset) == 4096
    return page[:]


def holder(directory: Path, then: str) -> subprocess.Popen[str]:
    """A process that holds `states` in `directory`, and has written into it."""
    code = f"""
        import sys, time
        from infinity.aio import SwapFile
        from tests.unit.aio.test_durable_file import put
        file = SwapFile.durable({str(directory)!r}, "states")
        file.grow(1 << 20)
        put(file, 8192, 7)
        print("held", flush=True)
        {then}
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_it_is_named_private_and_keeps_contents_and_length(tmp_path):
    place = tmp_path / "run"
    with SwapFile.durable(place, "states") as file:
        assert stat.S_IMODE(place.stat().st_mode) == 0o700
        assert stat.S_IMODE((place / "states").stat().st_mode) == 0o600
        assert (file.path, file.directory, file.size_bytes) == (
            str(place / "states"),
            str(place),
            0,
        )
        file.grow(MIB)
        put(file, 4096, 5)
        file.fsync()
        direct = file.direct
        assert bool(fcntl.fcntl(file.fd, fcntl.F_GETFL) & os.O_DIRECT) == direct
    assert {path.name for path in place.iterdir()} == {"states"}
    for _ in range(2):
        with SwapFile.durable(place, "states", create=False) as file:
            assert file.size_bytes == os.fstat(file.fd).st_size == MIB
            assert get(file, 4096) == b"\5" * 4096
            assert get(file, 0) == bytes(4096)
            assert file.direct == direct


def test_several_names_in_one_directory_do_not_touch_each_other(tmp_path):
    with (
        SwapFile.durable(tmp_path / "run", "rank-0") as a,
        SwapFile.durable(tmp_path / "run", "rank-1") as b,
    ):
        for file, byte in ((a, 1), (b, 2)):
            file.grow(8192)
            put(file, 0, byte)
        with SwapFile.create(tmp_path / "run") as nameless:
            nameless.grow(8192)
            put(nameless, 0, 3)
        assert (get(a, 0)[0], get(b, 0)[0]) == (1, 2)


def test_a_file_that_a_killed_process_is_about_to_let_go_of_is_waited_for(tmp_path, monkeypatch):
    place = tmp_path / "run"
    SwapFile.durable(place, "states").close()
    gone = Owner("here", Owner.this().boot_id, 2**22 + 1, 1)
    assert not gone.alive()
    gone.write_atomically(place / ".states.owner")
    fd = os.open(place / "states", os.O_RDWR)
    fcntl.flock(fd, fcntl.LOCK_EX)
    later = threading.Timer(0.2, os.close, (fd,))
    later.start()
    with SwapFile.durable(place, "states"):
        later.join()
    # Not indefinitely: another process may hold its lock.
    monkeypatch.setitem(swap_file.LOCK_WAIT_S, Life.GONE, 0.05)
    gone.write_atomically(place / ".states.owner")
    fd = os.open(place / "states", os.O_RDWR)
    fcntl.flock(fd, fcntl.LOCK_EX)
    with pytest.raises(AioError, match="is held by process 4194305 on here"):
        SwapFile.durable(place, "states")
    os.close(fd)


def test_a_zombie_s_lock_is_waited_for(tmp_path, monkeypatch):
    """A thread of it may still free memory, and has the files."""
    place = tmp_path / "run"
    process = holder(place, "time.sleep(600)")
    owner = Owner.read(place / ".states.owner")
    assert owner.life() is Life.LIVES
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert owner.life() is Life.ENDS
    assert not owner.alive()
    fd = os.open(place / "states", os.O_RDWR)
    fcntl.flock(fd, fcntl.LOCK_EX)
    later = threading.Timer(2 * swap_file.LOCK_WAIT_S[Life.LIVES], os.close, (fd,))
    later.start()
    with SwapFile.durable(place, "states"):
        later.join()
    owner.write_atomically(place / ".states.owner")
    monkeypatch.setitem(swap_file.LOCK_WAIT_S, Life.ENDS, 0.05)
    fd = os.open(place / "states", os.O_RDWR)
    fcntl.flock(fd, fcntl.LOCK_EX)
    with pytest.raises(AioError, match=f"is held by process {process.pid}"):
        SwapFile.durable(place, "states")
    os.close(fd)
    process.communicate()
    assert owner.life() is Life.GONE


def test_a_process_that_was_killed_just_now_is_waited_for(tmp_path):
    """Its memory is freed before its files are closed."""
    place = tmp_path / "run"
    large = 'block = b"x" * (512 << 20); print("large", flush=True); time.sleep(600)'
    process = holder(place, large)
    assert process.stdout.readline() == "large\n"
    process.kill()
    with SwapFile.durable(place, "states", create=False) as file:
        assert file.size_bytes == MIB
        assert get(file, 8192) == b"\7" * 4096
    process.communicate()


def test_a_second_opener_is_told_who_holds_it(tmp_path):
    place = tmp_path / "run"
    with SwapFile.durable(place, "states"):
        with pytest.raises(AioError, match="held by this process") as caught:
            SwapFile.durable(place, "states")
        assert (caught.value.errno, caught.value.op, caught.value.path) == (
            errno.EWOULDBLOCK,
            "open",
            str(place / "states"),
        )
    process = holder(place, "sys.stdin.readline()")
    try:
        with pytest.raises(AioError, match=rf"held by process {process.pid} on \S+"):
            SwapFile.durable(place, "states")
        (place / ".states.owner").unlink()
        with pytest.raises(AioError, match="held by another process"):
            SwapFile.durable(place, "states")
    finally:
        process.communicate("\n")


def test_after_kill_9_the_lock_is_free_and_the_contents_are_there(tmp_path):
    place = tmp_path / "run"
    process = holder(place, "time.sleep(600)")
    process.kill()
    process.communicate()
    with SwapFile.create(place):  # clears what dead owners of nameless files left, and only that
        pass
    with SwapFile.durable(place, "states", create=False) as file:
        assert file.size_bytes == MIB
        assert get(file, 8192) == b"\7" * 4096


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_that_outlives_the_job_does_not_hold_it(tmp_path):
    file = SwapFile.durable(tmp_path / "run", "states")
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(write)
        os.read(read, 1)
        os._exit(0)
    try:
        with pytest.raises(AioError, match="this process"):
            SwapFile.durable(tmp_path / "run", "states")
        assert (tmp_path / "run" / ".states.owner").exists()
        file.close()
        SwapFile.durable(tmp_path / "run", "states").close()
    finally:
        os.close(write)
        os.close(read)
        assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize("name", ["", "a/b", "..", ".hidden", "a\0b", "../x", "ä"])
def test_names_that_will_not_do_are_value_errors(tmp_path, name):
    with pytest.raises(ValueError, match="name"):
        SwapFile.durable(tmp_path / "run", name)
    assert list(tmp_path.iterdir()) == []


def test_directories_that_others_may_enter_are_value_errors(tmp_path):
    tmp_path.chmod(0o755)
    with pytest.raises(ValueError, match="chmod 700"):
        SwapFile.durable(tmp_path, "states")
    tmp_path.chmod(0o700)
    if os.getuid() == 0:
        os.chown(tmp_path, 65534, 65534)
        with pytest.raises(ValueError, match="this user's"):
            SwapFile.durable(tmp_path, "states")
        os.chown(tmp_path, 0, 0)
    with pytest.raises(AioError, match="there is no file"):
        SwapFile.durable(tmp_path / "a" / "b", "states")
    with pytest.raises(ValueError, match="does not exist"):
        SwapFile.durable(tmp_path / "gone", "states", create=False)
    assert list(tmp_path.iterdir()) == []


def test_what_is_not_a_file_or_is_missing_is_a_typed_error(tmp_path):
    tmp_path.chmod(0o700)
    with pytest.raises(AioError) as caught:
        SwapFile.durable(tmp_path, "states", create=False)
    assert caught.value.errno == errno.ENOENT
    (tmp_path / "elsewhere").touch()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(AioError, match="symbolic link"):
        SwapFile.durable(tmp_path, "link")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(AioError, match="not a regular file"):
        SwapFile.durable(tmp_path, "pipe")
    (tmp_path / "folder").mkdir()
    with pytest.raises(AioError):
        SwapFile.durable(tmp_path, "folder")


def test_a_failed_fsync_is_never_taken_back(tmp_path, monkeypatch):
    with SwapFile.durable(tmp_path / "run", "states") as file:
        file.fsync()
        with monkeypatch.context() as patch:

            def fail(fd: int) -> None:
                raise OSError(errno.EIO, os.strerror(errno.EIO))

            patch.setattr(swap_file.os, "fsync", fail)
            with pytest.raises(DeviceFailedError, match="may be lost"):
                file.fsync()
        with pytest.raises(DeviceFailedError, match="may be lost") as caught:
            file.fsync()  # the kernel would say that all is well
        assert (caught.value.errno, caught.value.path) == (errno.EIO, file.path)


def test_no_room_leaves_what_was_there(tmp_path):
    with SwapFile.durable(tmp_path / "run", "states") as file:
        file.grow(8192)
        put(file, 4096, 9)
        with pytest.raises(SwapFullError, match="missing"):
            file.grow(1 << 60)
        assert file.size_bytes == os.fstat(file.fd).st_size == 8192
        assert get(file, 4096) == b"\t" * 4096


def test_without_room_for_a_word_of_who_holds_it_the_lock_does_alone(tmp_path, monkeypatch):
    def full(self: Owner, fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Owner, "write", full)
    with SwapFile.durable(tmp_path / "run", "states"):
        assert {path.name for path in (tmp_path / "run").iterdir()} == {"states"}
        with pytest.raises(AioError, match="another process"):
            SwapFile.durable(tmp_path / "run", "states")


@pytest.mark.privileged
def test_on_a_full_drive_it_can_still_be_opened_and_read(tmp_path):
    with loop_ext4(tmp_path / "drive", 32 * MIB) as place:
        with SwapFile.durable(place / "run", "states") as file:
            file.grow(MIB)
            put(file, 4096, 6)
        with (
            (place / "filler").open("wb", buffering=0) as filler,
            pytest.raises(OSError, match="No space"),
        ):
            while True:
                filler.write(bytes(4096))
        with SwapFile.durable(place / "run", "states", create=False) as file:
            assert file.direct
            assert get(file, 4096) == b"\6" * 4096
            put(file, 4096, 8)  # its own blocks are there
            assert get(file, 4096) == b"\b" * 4096
            with pytest.raises(SwapFullError):
                file.grow(2 * MIB)


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.lists(st.one_of(st.tuples(st.integers(0, 15), st.integers(1, 255)), st.none()), max_size=20)
)
def test_whatever_is_written_and_however_often_it_is_reopened_it_is_there(tmp_path, steps):
    place = tmp_path / os.urandom(8).hex()
    expected: dict[int, int] = {}
    file = SwapFile.durable(place, "states")
    try:
        for step in steps:
            if step is None:
                file.close()
                file = SwapFile.durable(place, "states", create=False)
                assert file.size_bytes == max((page + 1 for page in expected), default=0) * 4096
                continue
            page, byte = step
            file.grow((page + 1) * 4096)
            put(file, page * 4096, byte)
            expected[page] = byte
        for page, byte in expected.items():
            assert get(file, page * 4096) == bytes([byte]) * 4096
    finally:
        file.close()
