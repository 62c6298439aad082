"""Ordinary files for executors: made once, read by whoever may, with errors that name them."""

from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path

import pytest

from infinity.aio import SwapFile
from infinity.errors import AioError, SwapFullError
from tests.unit.aio.disks import tmpfs


def test_a_new_file_is_read_back_by_its_name(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        file = SwapFile.new(tmp_path / "data")
    finally:
        os.umask(before)
    assert file.path == str(tmp_path / "data")
    assert (tmp_path / "data").stat().st_mode & 0o777 == 0o640
    file.grow(8192)
    page = mmap.mmap(-1, 4096)
    page[:] = b"x" * 4096
    os.pwritev(file.fd, [page], 4096)
    file.fsync()
    file.close()
    # no lock, and no record of its holder
    assert [path.name for path in tmp_path.iterdir()] == ["data"]
    (tmp_path / "data").chmod(0o400)
    with (
        SwapFile.existing(tmp_path / "data") as again,
        SwapFile.existing(tmp_path / "data", direct=False) as buffered,
    ):
        assert again.size_bytes == 8192
        assert buffered.direct_reason == "buffered I/O was asked for"
        for one in (again, buffered):
            assert os.preadv(one.fd, [page], 4096) == 4096
            assert page[:] == b"x" * 4096
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.pwritev(again.fd, [page], 0)


def test_mistakes_are_typed_and_name_the_file(tmp_path: Path) -> None:
    SwapFile.new(tmp_path / "data").close()
    for make, name, code in (
        (SwapFile.new, "data", errno.EEXIST),
        (SwapFile.existing, "none", errno.ENOENT),
        (SwapFile.existing, ".", errno.EINVAL),
        (SwapFile.new, "none/data", errno.ENOENT),
    ):
        with pytest.raises(AioError) as caught:
            make(tmp_path / name)
        assert (caught.value.errno, caught.value.path, caught.value.op) == (
            code,
            str(tmp_path / name),
            "open",
        )


@pytest.mark.privileged
def test_in_memory_it_is_buffered_and_a_full_file_system_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tmpfs(tmp_path / "memory", 1 << 20, monkeypatch) as place:
        monkeypatch.delenv("INFINITY_ALLOW_TMPFS")
        with SwapFile.new(place / "data") as file:
            assert file.direct_reason == "tmpfs has no drive below it"
            with pytest.raises(SwapFullError):
                file.grow(2 << 20)
