"""Reference bandwidth of a drive, measured in the same run: with fio if it is installed and may
run, else with plain preads and pwrites.

Both write their swap files in advance, and use the block size that the executor used, the requested
depth, O_DIRECT if the file system allows it, and memory backed by huge pages. Both run for as long
as a phase of the executor.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import resource
import shutil
import subprocess
import threading
import time
from collections.abc import Sequence
from typing import Any, Protocol

from infinity import aio
from infinity._src.measure.streams import Content, Sample
from infinity.errors import AioError

REFERENCES = ("auto", "fio", "probe", "off")
_IO_URING_SETUP = 425  # the system call's number on every architecture

_FIO_PATTERNS = {
    "read": ("--rw=read",),
    "write": ("--rw=write",),
    "mixed": ("--rw=rw", "--rwmixread=50"),
}
_THREADS_MAX = 32


class Reference(Protocol):
    """A program or loop that reads and writes swap files as fast as it can."""

    name: str

    def measure(self, kind: str, seconds: float) -> Sample:
        """Measure one phase ("read", "write", "mixed") over all files at once. Blocks."""
        ...


def open_reference(
    name: str, files: Sequence[aio.SwapFile], content: Content, *, block_bytes: int, depth: int
) -> Reference | None:
    """Open the reference named `name` (one of REFERENCES) over `files`, after writing all of them.
    Return None for "off". Blocks. The caller must call `check_reference` before.

    "auto" is fio, or the probe if fio cannot run.
    """
    if name == "off":
        return None
    # The probe writes the files for fio, too: a read of a hole does not reach the drive.
    probe = PlainIo(files, content, block_bytes=block_bytes, depth=depth)
    probe.fill()
    missing = why_no_fio()
    assert name != "fio" or not missing, missing
    if name == "auto" and missing:
        probe.name += f" ({missing})"
    if name == "probe" or missing:
        return probe
    return Fio(files, block_bytes=block_bytes, depth=depth)


def check_reference(name: str) -> None:
    """Raise ValueError for a reference that cannot run on this machine."""
    missing = why_no_fio()
    if name == "fio" and missing:
        raise ValueError(f"--limit fio: {missing}; use --limit probe")


def why_no_fio() -> str:
    """Return why fio cannot run on this machine; "" if it can."""
    if shutil.which("fio") is None:
        return "fio is not installed (apt-get install fio)"
    libc = ctypes.CDLL(None, use_errno=True)
    # io_uring_setup without parameters fails with EFAULT if it is allowed, else with EPERM or
    # ENOSYS.
    libc.syscall(_IO_URING_SETUP, 1, None)
    if ctypes.get_errno() in (errno.EPERM, errno.ENOSYS):
        return "the kernel does not let fio use io_uring here"
    return ""


class Fio:
    """fio's io_uring engine with registered buffers and files, one job per file."""

    def __init__(self, files: Sequence[aio.SwapFile], *, block_bytes: int, depth: int) -> None:
        self._files = tuple(files)
        self._block_bytes = block_bytes
        self._depth = depth
        self._options: tuple[str, ...] = ("--fixedbufs=1", "--registerfiles=1")
        self.name = _fio_version()

    def command(self, kind: str, seconds: float) -> list[str]:
        """Return the command line. fio opens the unnamed files through the file descriptors that it
        inherits.
        """
        milliseconds = max(round(seconds * 1e3), 1)  # fio drops fractions of a second
        common = [
            # --thread, since a forked job runs in a new session: if fio is killed as it starts, the
            # job outlives fio and keeps the unnamed file open, with its space on the drive.
            "fio", "--thread", "--ioengine=io_uring",
            f"--direct={int(all(file.direct for file in self._files))}",
            f"--bs={self._block_bytes}", f"--iodepth={self._depth}",
            *_FIO_PATTERNS[kind], f"--runtime={milliseconds}ms",
            # fio must not change its buffers between writes, since the executor's rounds do not.
            "--scramble_buffers=0", "--overwrite=1", "--invalidate=1", "--allow_file_create=0",
            "--output-format=json", *self._options,
        ]  # fmt: skip
        for number, file in enumerate(self._files):
            size = file.size_bytes // self._block_bytes * self._block_bytes
            common += [
                f"--name=drive{number}",
                f"--filename=/proc/self/fd/{file.fd}",
                f"--size={size}",
            ]
        return common

    def measure(self, kind: str, seconds: float) -> Sample:
        """See `Reference.measure`. If fio fails with registered buffers, which need locked memory,
        it runs again without them, and `name` says so.
        """
        try:
            return self._sample(
                _run(self.command(kind, seconds), [file.fd for file in self._files])
            )
        except _FioFailed:
            if not self._options:
                raise
        self._options = ()
        self.name += ", buffers not registered"
        return self._sample(_run(self.command(kind, seconds), [file.fd for file in self._files]))

    @staticmethod
    def _sample(report: dict[str, Any]) -> Sample:
        moved, took, cpu_s = [], [], 0.0
        for job in report["jobs"]:
            moved.append(job["read"]["io_bytes"] + job["write"]["io_bytes"])
            took.append(max(job["read"]["runtime"], job["write"]["runtime"]) / 1e3)
            # fio reports CPU time in percent of the job's time, which it gives in milliseconds.
            cpu_s += (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1e3
        return Sample(tuple(moved), tuple(took), cpu_s)


class _FioFailed(AioError):
    pass


def _fio_version() -> str:
    done = subprocess.run(
        ["fio", "--version"], capture_output=True, text=True, check=False, timeout=30
    )
    return done.stdout.strip() or "fio"


def _run(command: list[str], descriptors: Sequence[int]) -> dict[str, Any]:
    """Run fio and return its report. Kills fio if the wait is interrupted."""
    # fio allocates its buffers with malloc; without huge pages it reaches half of a drive's
    # bandwidth. fio stays in this process's session: the kernel schedules sessions as groups, so on
    # a busy machine a new session would get a larger share than the executor had.
    environment = {**os.environ, "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
        pass_fds=descriptors,
        env=environment,
    )
    try:
        out, problem = process.communicate()
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    # fio may print warnings before its JSON.
    begin = out.find("{")
    if process.returncode or begin < 0:
        text = (problem.strip() or out[:begin].strip() or "no output").splitlines()
        raise _FioFailed(
            f"fio ended with status {process.returncode}: {text[-1]}; use --limit probe, or "
            "--limit off"
        )
    report: dict[str, Any] = json.loads(out[begin:])
    for job in report["jobs"]:
        if job["error"]:
            raise _FioFailed(f"fio failed on {job['jobname']}", errno=job["error"])
    return report


class PlainIo:
    """Threads with pread and pwrite, `depth` of them (at most 32) per file."""

    def __init__(
        self, files: Sequence[aio.SwapFile], content: Content, *, block_bytes: int, depth: int
    ) -> None:
        self._files = tuple(files)
        self._content = content
        self._block_bytes = block_bytes
        self._threads = min(depth, _THREADS_MAX)
        self.name = f"pread and pwrite, {self._threads} threads per drive"

    def fill(self) -> None:
        """Write all files once, so that later reads reach the drive. Blocks."""
        # New content: a drive might deduplicate blocks that the executor has written.
        self._content.renew(0)
        self._content.renew(1)
        self._measure("write", None)

    def measure(self, kind: str, seconds: float) -> Sample:
        """See `Reference.measure`."""
        with aio.Slab(len(self._files) * self._threads * self._block_bytes) as target:
            return self._measure(kind, seconds, target.memory)

    def _measure(
        self, kind: str, seconds: float | None, target: memoryview | None = None
    ) -> Sample:
        cursors = [_Cursor(file.size_bytes // self._block_bytes, kind) for file in self._files]
        stop = threading.Event()
        failed: list[BaseException] = []

        def work(number: int, buffer: memoryview | None) -> None:
            try:
                self._transfer(number, cursors[number], buffer, stop)
            except BaseException as error:  # noqa: BLE001 - raised again by the caller
                failed.append(error)
                stop.set()
            finally:
                cursors[number].end_s = max(cursors[number].end_s, time.monotonic())

        workers = []
        for index in range(len(self._files) * self._threads):
            at = index * self._block_bytes
            buffer = None if target is None else target[at : at + self._block_bytes]
            workers.append(
                threading.Thread(target=work, args=(index % len(self._files), buffer), daemon=True)
            )
        before, start_s = resource.getrusage(resource.RUSAGE_SELF), time.monotonic()
        for worker in workers:
            worker.start()
        # All workers have one deadline.
        try:
            for worker in workers:
                worker.join(
                    None if seconds is None else max(0.0, start_s + seconds - time.monotonic())
                )
        finally:
            stop.set()
            for worker in workers:
                worker.join()
        after = resource.getrusage(resource.RUSAGE_SELF)
        if failed:
            raise failed[0]
        cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        return Sample(
            tuple(cursor.moved for cursor in cursors),
            tuple(cursor.end_s - start_s for cursor in cursors),
            cpu_s,
        )

    def _transfer(
        self, number: int, cursor: _Cursor, buffer: memoryview | None, stop: threading.Event
    ) -> None:
        file, size, content = self._files[number], self._block_bytes, self._content.memory
        places = len(content) // size
        while not stop.is_set():
            taken = cursor.take()
            if taken is None:
                return
            block, write = taken
            if write:
                source = content[block % places * size :][:size]
                moved = os.pwritev(file.fd, [source], block * size)
            else:
                assert buffer is not None
                moved = os.preadv(file.fd, [buffer], block * size)
            if moved != size:
                raise AioError(
                    f"the probe moved {moved} of {size} bytes",
                    path=file.path,
                    op="write" if write else "read",
                    offset=block * size,
                )
            cursor.add(size)


class _Cursor:
    """Cursor over the blocks of a file, shared by the file's threads. Kind "mixed" alternates reads
    of the first half of the blocks with writes to the second half.
    """

    def __init__(self, blocks: int, kind: str) -> None:
        self._blocks = blocks
        self._kind = kind
        self._next = 0
        self._lock = threading.Lock()
        self.moved = 0
        self.end_s = 0.0

    def take(self) -> tuple[int, bool] | None:
        with self._lock:
            number = self._next
            self._next += 1
        if self._kind != "mixed":
            return (number, self._kind == "write") if number < self._blocks else None
        half = self._blocks // 2
        if number >= 2 * half:
            return None
        return (
            (number // 2, False) if number % 2 == 0 else (self._blocks - half + number // 2, True)
        )

    def add(self, size: int) -> None:
        with self._lock:
            self.moved += size
