"""Swap files: private, nameless, direct where that works, refused where they make no sense."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import stat
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infinity.aio import SwapFile, _file_system
from infinity.aio import _swap_file as swap_file
from infinity.aio._probe import probe_directory
from infinity.aio._swap_file import file_system_type
from infinity.errors import AioError, DeviceFailedError, SwapFullError
from tests.unit.aio.child import run_python
from tests.unit.aio.disks import loop_ext4, overlay_without_direct, tmpfs

MIB = 1 << 20


def is_direct(fd: int) -> bool:
    return bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)


def round_trip(fd: int) -> None:
    """Write a block and read it back."""
    page, back = mmap.mmap(-1, 4096), mmap.mmap(-1, 4096)
    page[:] = os.urandom(4096)
    assert os.pwritev(fd, [page], 8192) == os.preadv(fd, [back], 8192) == 4096
    assert page[:] == back[:]


def without_tmpfile(monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def refuse(path, flags, mode=0o777, **more):
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "Operation not supported")
        return real(path, flags, mode, **more)

    monkeypatch.setattr(swap_file.os, "open", refuse)


def test_a_swap_file_has_no_name_and_is_private(tmp_path):
    with SwapFile.create(tmp_path) as file:
        status = os.fstat(file.fd)
        assert stat.S_IMODE(status.st_mode) == 0o600
        assert status.st_nlink == 0
        assert list(tmp_path.iterdir()) == []
        file.grow(1 << 20)
        assert file.size_bytes == os.fstat(file.fd).st_size == 1 << 20
        assert os.fstat(file.fd).st_blocks * 512 >= 1 << 20
        file.grow(4096)
        assert file.size_bytes == 1 << 20
    assert file.fd == -1
    file.close()


def test_without_o_tmpfile_the_name_is_removed_at_once(tmp_path, monkeypatch):
    without_tmpfile(monkeypatch)
    with SwapFile.create(tmp_path) as file:
        assert os.fstat(file.fd).st_nlink == 0
        assert stat.S_IMODE(os.fstat(file.fd).st_mode) == 0o600
        assert list(tmp_path.iterdir()) == []
        round_trip(file.fd)


def test_o_direct_is_tried_and_leaves_an_empty_file(tmp_path):
    with SwapFile.create(tmp_path) as file:
        assert file.direct == is_direct(file.fd) == (not file.direct_reason)
        assert os.fstat(file.fd).st_size == file.size_bytes == 0
        round_trip(file.fd)
    with SwapFile.create(tmp_path, direct=False) as file:
        assert not file.direct
        assert not is_direct(file.fd)
        assert "asked for" in file.direct_reason


def test_without_o_direct_it_is_buffered_and_says_so_once(tmp_path, monkeypatch, caplog):
    real = os.open

    def refuse(path, flags, mode=0o777, **more):
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return real(path, flags, mode, **more)

    monkeypatch.setattr(swap_file.os, "open", refuse)
    for _ in range(2):
        with SwapFile.create(tmp_path) as file:
            assert not file.direct
            assert "refuses to open it with O_DIRECT" in file.direct_reason
            round_trip(file.fd)
    assert caplog.text.count("O_DIRECT") == 1
    assert str(tmp_path) in caplog.text


@pytest.mark.privileged
def test_on_an_overlayfs_whose_layer_refuses_o_direct_swap_is_buffered(tmp_path, caplog):
    with overlay_without_direct(tmp_path / "overlay") as place:
        with pytest.raises(OSError, match="Invalid argument"):
            os.open(place / "x", os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        with SwapFile.create(place) as file:
            assert not file.direct
            assert "overlay" in file.direct_reason
            file.grow(MIB)
            round_trip(file.fd)
        assert "page cache" in caplog.text
        probe = probe_directory(place)
        assert probe.usable
        assert not probe.direct
        assert "O_DIRECT" in probe.direct_reason
        with SwapFile.durable(place / "kept", "x") as file:
            assert "overlay" in file.direct_reason
            round_trip(file.fd)


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EOPNOTSUPP])
def test_a_file_system_that_opens_with_o_direct_and_then_refuses_is_buffered(
    tmp_path, monkeypatch, caplog, code
):
    real = os.pwritev

    def refuse(fd, buffers, offset):
        if is_direct(fd):
            raise OSError(code, os.strerror(code))
        return real(fd, buffers, offset)

    monkeypatch.setattr(_file_system.os, "pwritev", refuse)
    with SwapFile.create(tmp_path) as file:
        assert "refuses the transfer" in file.direct_reason
        assert not is_direct(file.fd)
        round_trip(file.fd)
    assert "refuses the transfer" in caplog.text


def test_a_drive_that_wants_more_than_4096_byte_alignment_is_buffered(tmp_path, monkeypatch):
    monkeypatch.setattr(_file_system, "direct_alignments", lambda fd: (512, 16384))
    with SwapFile.create(tmp_path) as file:
        assert "16384" in file.direct_reason
        assert not is_direct(file.fd)


def test_a_drive_that_fails_while_opened_is_a_typed_error(
    tmp_path, monkeypatch
):
    def fail(fd, buffers, offset):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    before = set(Path("/proc/self/fd").iterdir())
    with monkeypatch.context() as patch:
        patch.setattr(_file_system.os, "pwritev", fail)
        with pytest.raises(DeviceFailedError) as caught:
            SwapFile.create(tmp_path)
        assert caught.value.path == str(tmp_path)
        # and nothing is written
        patch.setattr(_file_system.os, "pwritev", lambda fd, buffers, offset: 4096)
        patch.setattr(_file_system.os, "preadv", lambda fd, buffers, offset: 4096)
        with pytest.raises(DeviceFailedError):
            SwapFile.create(tmp_path)
    assert set(Path("/proc/self/fd").iterdir()) == before


def test_a_missing_directory_and_a_file_are_value_errors_that_name_them(tmp_path):
    with pytest.raises(ValueError, match=r"nowhere.*does not exist"):
        SwapFile.create(tmp_path / "nowhere")
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"file.*not a directory"):
        SwapFile.create(tmp_path / "file")


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no /dev/shm here")
def test_memory_is_refused_as_a_drive_unless_allowed(monkeypatch):
    if file_system_type("/dev/shm") != "tmpfs":
        pytest.skip("/dev/shm is not tmpfs here")
    monkeypatch.delenv("INFINITY_ALLOW_TMPFS", raising=False)
    with pytest.raises(ValueError, match="INFINITY_ALLOW_TMPFS"):
        SwapFile.create("/dev/shm")
    monkeypatch.setenv("INFINITY_ALLOW_TMPFS", "1")
    with SwapFile.create("/dev/shm") as file:
        assert not file.direct


@pytest.mark.privileged
def test_a_directory_that_may_not_be_written_is_a_typed_error():
    if os.getuid() != 0:
        pytest.skip("NOT TESTED: needs root to become nobody")
    with tempfile.TemporaryDirectory() as place:
        Path(place).chmod(0o755)
        code = f"""
            import os
            from infinity.aio import SwapFile
            from infinity.errors import AioError
            os.setuid(65534)
            try:
                SwapFile.create({place!r})
            except AioError as error:
                print(error.errno, error.op)
        """
        done = run_python(code)
    assert done.stdout.split() == ["13", "open"], done.stderr


def test_growing_past_the_free_space_names_the_missing_bytes(tmp_path):
    with SwapFile.create(tmp_path) as file:
        file.grow(4096)
        space = os.statvfs(tmp_path)
        with pytest.raises(SwapFullError, match=r"missing.*Policy\.nvme") as caught:
            file.grow(space.f_bavail * space.f_frsize + (64 << 30))
        assert isinstance(caught.value, AioError)
        assert caught.value.path == str(tmp_path)
        assert os.fstat(file.fd).st_blocks * 512 <= 1 << 20


def test_shrinking_gives_the_space_back(tmp_path):
    with SwapFile.create(tmp_path) as file:
        file.grow(8 * MIB)
        file.shrink(MIB)
        assert file.size_bytes == os.fstat(file.fd).st_size == MIB
        assert os.fstat(file.fd).st_blocks * 512 <= 2 * MIB
        file.shrink(4 * MIB)
        assert file.size_bytes == MIB


def test_a_quota_is_named_and_allocated_space_is_freed(tmp_path, monkeypatch):
    real = os.posix_fallocate

    def until_the_quota(fd, offset, length):
        real(fd, offset, 3 * MIB)
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(swap_file.os, "posix_fallocate", until_the_quota)
    with SwapFile.create(tmp_path) as file:
        with pytest.raises(SwapFullError, match="quota") as caught:
            file.grow(8 * MIB)
        assert caught.value.errno == errno.EDQUOT
        assert f"space for {3 * MIB} of {8 * MIB}" in str(caught.value)
        assert f"up to {5 * MIB} are missing" in str(caught.value)
        assert file.size_bytes == os.fstat(file.fd).st_size == os.fstat(file.fd).st_blocks == 0


def test_the_limit_on_a_file_s_size_is_named(tmp_path):
    code = f"""
        import resource
        from infinity.aio import SwapFile
        from infinity.errors import SwapFullError
        with SwapFile.create({str(tmp_path)!r}) as file:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
            try:
                file.grow(3 << 20)
            except SwapFullError as error:
                print(error.errno, file.size_bytes, error)
    """
    done = run_python(code)
    assert done.stdout.startswith(f"{errno.EFBIG} 0 "), done.stderr
    assert f"RLIMIT_FSIZE): {2 << 20} are missing" in done.stdout


def test_without_preallocation_the_file_says_so(tmp_path, monkeypatch, caplog):
    def refuse(fd, offset, length):
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(swap_file.os, "posix_fallocate", refuse)
    with SwapFile.create(tmp_path) as file:
        assert file.preallocated
        file.grow(MIB)
        assert not file.preallocated
        assert os.fstat(file.fd).st_size == MIB
    assert "cannot preallocate" in caplog.text


@pytest.mark.privileged
def test_a_small_drive_says_how_much_is_missing_and_keeps_none_of_it(tmp_path):
    with loop_ext4(tmp_path / "drive", 32 * MIB) as place, SwapFile.create(place) as file:
        file.grow(4 * MIB)
        free = os.statvfs(place).f_bavail * os.statvfs(place).f_frsize
        with pytest.raises(SwapFullError, match=f"{40 * MIB - free} are missing") as caught:
            file.grow(44 * MIB)
        assert (caught.value.errno, caught.value.path) == (errno.ENOSPC, str(place))
        assert file.size_bytes == os.fstat(file.fd).st_size == 4 * MIB
        assert os.statvfs(place).f_bavail * os.statvfs(place).f_frsize == free
        round_trip(file.fd)


@pytest.mark.privileged
def test_a_drive_without_a_single_free_block_is_swap_full(tmp_path, monkeypatch):
    with loop_ext4(tmp_path / "drive", 32 * MIB) as place:
        with SwapFile.create(place) as other:
            free = os.statvfs(place).f_bavail * os.statvfs(place).f_frsize
            other.grow(free // 4096 * 4096 - MIB)
            with (
                (place / "filler").open("wb", buffering=0) as filler,
                pytest.raises(OSError, match="No space"),
            ):
                while True:
                    filler.write(bytes(4096))
            with pytest.raises(SwapFullError, match="no space"):
                SwapFile.create(place)
    with tmpfs(tmp_path / "memory", 4 * MIB, monkeypatch) as place, SwapFile.create(place) as file:
        assert "no drive" in file.direct_reason
        with pytest.raises(SwapFullError, match=f"{60 * MIB} are missing"):
            file.grow(64 * MIB)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_neither_has_nor_keeps_the_file(tmp_path):
    with SwapFile.create(tmp_path) as file:
        file.grow(MIB)
        fd = file.fd
        child = os.fork()
        if child == 0:
            try:
                os.fstat(fd)
            except OSError:
                os._exit(0 if file.fd == -1 else 2)
            os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
        round_trip(file.fd)


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(
    st.lists(
        st.tuples(st.booleans(), st.integers(0, 30), st.integers(1, 8)), min_size=1, max_size=24
    )
)
def test_space_that_was_given_back_is_there_again_when_it_is_asked_for(
    tmp_path_factory: pytest.TempPathFactory, calls: list[tuple[bool, int, int]]
) -> None:
    block = 65536  # more than the file system's own records of it take
    with SwapFile.create(tmp_path_factory.mktemp("f")) as file:
        file.grow(40 * block)
        there = [True] * 40
        for punch, at, count in calls:
            span = range(at, min(at + count, 40))
            if punch and all(there[each] for each in span):  # extents in use do not overlap
                file.punch(at * block, len(span) * block)
                there[span.start : span.stop] = [False] * len(span)
            elif not punch:
                file.back(at * block, len(span) * block)
                there[span.start : span.stop] = [True] * len(span)
            assert os.fstat(file.fd).st_size == 40 * block
            assert os.fstat(file.fd).st_blocks * 512 // block == sum(there)
            assert sum(end - start for start, end in file._holes) == there.count(False) * block
