"""Whether O_DIRECT works on a file. It is tried: file systems open with it and refuse the first transfer."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os

from infinity.aio.drive_limits import direct_alignments

_PAGE_BYTES = 4096


def direct_refusal(fd: int, *, write: bool = True) -> str:
    """Why a file that is open with O_DIRECT cannot go past the page cache with requests aligned to 4096; "" if it can.

    write: write, read and compare a block, on a file that is empty and stays so; else only read one, if there is one.
    Raises OSError when a transfer fails for another reason than O_DIRECT.
    """
    alignment = max(direct_alignments(fd))
    if alignment > _PAGE_BYTES:
        return f"O_DIRECT there wants requests aligned to {alignment} bytes, and they are to {_PAGE_BYTES}"
    with mmap.mmap(-1, _PAGE_BYTES) as page, mmap.mmap(-1, _PAGE_BYTES) as back:
        page[:] = os.urandom(_PAGE_BYTES)
        try:
            wrote = os.pwritev(fd, [page], 0) if write else 0
            read = os.preadv(fd, [back], 0)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
            return f"the file system opens with O_DIRECT and then refuses the transfer ({os.strerror(error.errno)})"
        finally:
            if write:
                os.ftruncate(fd, 0)
        if write and (wrote != _PAGE_BYTES or read != _PAGE_BYTES or page[:] != back[:]):
            raise OSError(errno.EIO, f"a first block came back wrong ({wrote} bytes written, {read} read)")
    return ""


def set_buffered(fd: int, buffered: bool) -> None:
    """Take O_DIRECT off an open file, or put it on."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    fcntl.fcntl(fd, fcntl.F_SETFL, flags & ~os.O_DIRECT if buffered else flags | os.O_DIRECT)
