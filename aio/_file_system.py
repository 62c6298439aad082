"""File system type, trial of O_DIRECT and queue limits of the block device of a swap file."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

IN_MEMORY = frozenset({"tmpfs", "ramfs", "devtmpfs"})


def file_system_type(path: str | os.PathLike[str]) -> str:
    """Return the type of the file system of `path` ("ext4", "tmpfs" ...); "" when unknown."""
    device = Path(path).stat().st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    kind = ""
    try:
        with Path("/proc/self/mountinfo").open(encoding="utf-8", errors="replace") as mounts:
            for line in mounts:
                before, _, after = line.partition(" - ")
                # The last match counts: later mounts cover earlier ones.
                if before.split()[2] == wanted and after:
                    kind = after.split()[0]
    except OSError:
        return ""
    return kind


_PAGE_BYTES = 4096


def direct_refusal(fd: int, *, write: bool = True) -> str:
    """Return why an O_DIRECT file refuses requests aligned to 4096 bytes; "" if it accepts them.

    write: write, read and compare a block; the file must be empty, and is truncated afterwards.
    Otherwise only read a block. Raises OSError when a transfer fails for another reason.
    """
    # Some devices need 8 KiB or more, but chunks are at multiples of 4096.
    alignment = max(direct_alignments(fd))
    if alignment > _PAGE_BYTES:
        return (
            f"O_DIRECT there needs requests aligned to {alignment} bytes; they are aligned to "
            f"{_PAGE_BYTES}"
        )
    with mmap.mmap(-1, _PAGE_BYTES) as page, mmap.mmap(-1, _PAGE_BYTES) as back:
        # Random, so that stale data cannot compare equal.
        page[:] = os.urandom(_PAGE_BYTES)
        try:
            wrote = os.pwritev(fd, [page], 0) if write else 0
            read = os.preadv(fd, [back], 0)
        except OSError as error:
            # EINVAL and EOPNOTSUPP mean that O_DIRECT is refused; any other error is a fault of the
            # drive.
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
            return (
                "the file system opens the file with O_DIRECT, but refuses the transfer "
                f"({os.strerror(error.errno)})"
            )
        finally:
            if write:
                os.ftruncate(fd, 0)
        if write and (wrote != _PAGE_BYTES or read != _PAGE_BYTES or page[:] != back[:]):
            raise OSError(
                errno.EIO, f"a test block reads back wrong ({wrote} bytes written, {read} read)"
            )
    return ""


def set_buffered(fd: int, buffered: bool) -> None:
    """Clear (buffered=True) or set O_DIRECT of an open file."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    fcntl.fcntl(fd, fcntl.F_SETFL, flags & ~os.O_DIRECT if buffered else flags | os.O_DIRECT)


# ---- the block device's queue ----
#
# `fit` reduces requests to the limits of the block device's queue: the kernel splits a request into
# pieces of max_sectors_kb at most, and each piece needs one of the device's nr_requests tags. If no
# tag is free, the submitting thread sleeps in the kernel.

DEPTH_MIN = 2
_ALIGNMENT_BYTES = 4096
_SYSFS = Path("/sys")


class _Opened(Protocol):
    """An open file, such as a SwapFile."""

    fd: int


@dataclass(frozen=True)
class DriveLimits:
    """Limits of a device's queue; 0: no limit, or unknown. `device`: the device's name ("nvme0n1"),
    or "" if unknown.
    """

    device: str = ""
    nr_requests: int = 0
    max_sectors_kb: int = 0

    def fit(self, block_bytes: int, depth: int) -> tuple[int, int]:
        """Reduce (block_bytes, depth) until all requests in flight fit in the device's queue.

        Depth is reduced first, to DEPTH_MIN at least, then the block (to a multiple of 4096).
        """
        if not self.nr_requests or not self.max_sectors_kb:
            return block_bytes, depth
        piece_bytes = self.max_sectors_kb * 1024
        # Each piece of a block takes a tag of the queue.
        fitting = self.nr_requests // -(-block_bytes // piece_bytes)
        if fitting >= DEPTH_MIN:
            return block_bytes, min(depth, fitting)
        pieces = max(self.nr_requests // DEPTH_MIN, 1)
        fitted = pieces * piece_bytes // _ALIGNMENT_BYTES * _ALIGNMENT_BYTES
        return min(block_bytes, max(fitted, _ALIGNMENT_BYTES)), min(depth, DEPTH_MIN)


def limits_of(file: _Opened | int | str | os.PathLike[str], *, sysfs: Path = _SYSFS) -> DriveLimits:
    """Return the limits of the device of `file` (a swap file, a descriptor or a path).

    Unknown for virtual devices (dm, md, loop, multipath heads), which forward requests to several
    queues, and for file systems that report no device (btrfs, overlayfs, NFS).
    """
    if isinstance(file, (str, os.PathLike)):
        return _limits(Path(file).stat().st_dev, sysfs)
    return _limits(os.fstat(file if isinstance(file, int) else file.fd).st_dev, sysfs)


def _limits(device: int, sysfs: Path) -> DriveLimits:
    link = sysfs / "dev" / "block" / f"{os.major(device)}:{os.minor(device)}"
    if not link.exists():
        return DriveLimits()
    folder = link.resolve()
    # A partition has no queue; its parent directory is that of the drive.
    whole = next((place for place in (folder, folder.parent) if (place / "queue").is_dir()), None)
    if whole is None:
        return DriveLimits()
    # The queue of a dm, md or loop device does not limit the devices below.
    if "virtual" in whole.parts:
        return DriveLimits(device=whole.name)
    return DriveLimits(
        device=whole.name,
        nr_requests=_number(whole / "queue" / "nr_requests"),
        max_sectors_kb=_number(whole / "queue" / "max_sectors_kb"),
    )


def fit(file: _Opened | int, block_bytes: int, depth: int) -> tuple[int, int]:
    """Reduce (block_bytes, depth) to the limits of the device of `file`; unchanged if unknown."""
    return limits_of(file).fit(block_bytes, depth)


def _number(path: Path) -> int:
    try:
        text = path.read_text(encoding="ascii").strip()
    except (OSError, ValueError):  # missing, or not text: unknown
        return 0
    return int(text) if text.isdigit() else 0


_STATX_DIOALIGN = 0x2000
_AT_EMPTY_PATH = 0x1000


def direct_alignments(fd: int) -> tuple[int, int]:
    """Return the (memory, offset) alignments in bytes for O_DIRECT on an open file; zeros if statx
    does not report them.

    Kernels also report (0, 0) for files that refuse O_DIRECT; only a trial shows that.
    """
    # The struct statx has 256 bytes: stx_mask at 0 (u32), stx_dio_mem_align and
    # stx_dio_offset_align at 0x98 (two u32).
    record = (ctypes.c_uint32 * 64)()
    statx = getattr(ctypes.CDLL(None, use_errno=True), "statx", None)
    if statx is None or statx(fd, b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, record):
        return 0, 0
    if not record[0] & _STATX_DIOALIGN:
        return 0, 0
    return int(record[38]), int(record[39])
