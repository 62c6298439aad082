"""Swap files: private, nameless, refused where they make no sense."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from infinity.aio import swap_file
from infinity.aio.swap_file import SwapFile, file_system_type
from infinity.errors import AioError, SwapFullError


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
    real = os.open

    def refuse(path, flags, mode=0o777, **more):
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(95, "Operation not supported")
        return real(path, flags, mode, **more)

    monkeypatch.setattr(swap_file.os, "open", refuse)
    with SwapFile.create(tmp_path) as file:
        assert os.fstat(file.fd).st_nlink == 0
        assert stat.S_IMODE(os.fstat(file.fd).st_mode) == 0o600
        assert list(tmp_path.iterdir()) == []


def test_without_o_direct_it_is_buffered_and_says_so(tmp_path, monkeypatch, caplog):
    real = os.open

    def refuse(path, flags, mode=0o777, **more):
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return real(path, flags, mode, **more)

    monkeypatch.setattr(swap_file.os, "open", refuse)
    with SwapFile.create(tmp_path) as file:
        assert not file.direct
    assert "O_DIRECT" in caplog.text


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


def test_a_directory_that_may_not_be_written_is_a_typed_error(tmp_path):
    code = f"""
        import os
        os.setuid(65534)
        from infinity.aio.swap_file import SwapFile
        from infinity.errors import AioError
        try:
            SwapFile.create({str(tmp_path)!r})
        except AioError as error:
            print(error.errno, error.op)
    """
    if os.getuid() != 0:
        pytest.skip("needs root to become nobody")
    tmp_path.chmod(0o755)
    for parent in tmp_path.parents:
        if parent.stat().st_mode & 0o005 != 0o005:
            pytest.skip(f"nobody may not enter {parent}")
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=Path(__file__).parents[3],
    )
    assert done.stdout.split() == ["13", "open"], done.stderr


def test_growing_past_the_free_space_says_how_much_is_missing(tmp_path):
    with SwapFile.create(tmp_path) as file:
        file.grow(4096)
        space = os.statvfs(tmp_path)
        with pytest.raises(SwapFullError, match="missing") as caught:
            file.grow(space.f_bavail * space.f_frsize + (64 << 30))
        assert isinstance(caught.value, AioError)
        assert caught.value.path == str(tmp_path)
        assert os.fstat(file.fd).st_blocks * 512 <= 1 << 20
