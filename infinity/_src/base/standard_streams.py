"""Standard output and error of a command, without exceptions from writes.

    a character outside the encoding    is replaced; the exit status is unaffected
    a closed pipe or terminal           output is silently discarded, since the reader has ended
    any other error (a full disk)       one line on standard error, and a non-zero exit status
    closed before the command began     output is discarded, as by /dev/null

Training continues in all cases.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Callable, Iterable
from typing import Any, final


@final
class SafeStream:
    """A text stream whose writes do not raise OSError. stream: may be None. tell: called with the
    first error, unless that means that the reader has closed.
    """

    def __init__(self, stream: Any, tell: Callable[[OSError], None]) -> None:
        self._stream = stream
        self._tell = tell
        self.failed = False
        """True once `tell` was called."""
        self._terminal = self.isatty()

    @property
    def closed(self) -> bool:
        """True if the stream is missing or closed."""
        return self._stream is None or bool(getattr(self._stream, "closed", False))

    def isatty(self) -> bool:
        return not self.closed and bool(self._stream.isatty())

    def write(self, text: str) -> int:
        """Write `text`, with question marks for characters outside the encoding."""
        if self.closed:
            return len(text)
        try:
            try:
                self._stream.write(text)
            except UnicodeEncodeError:
                encoding = self._stream.encoding or "ascii"
                self._stream.write(text.encode(encoding, "replace").decode(encoding))
        except OSError as error:
            self._note(error)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> bool:
        """Flush the stream. Returns whether that succeeded."""
        if self.closed:
            return True
        try:
            self._stream.flush()
        except OSError as error:
            self._note(error)
            return False
        return True

    def end(self) -> None:
        """Flush for the last time. On an error discard the buffer: the interpreter would flush it
        again at exit, and change the exit status.
        """
        if self.flush():
            return
        # A stream without a descriptor has no buffer to discard.
        with contextlib.suppress(OSError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)
            self._stream.flush()

    def _note(self, error: OSError) -> None:
        # EIO: a terminal was closed, or a drive failed.
        gone = error.errno == errno.EPIPE or (error.errno == errno.EIO and self._terminal)
        if not gone and not self.failed:
            self.failed = True
            self._tell(error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def with_safe_streams(command: Callable[[], int]) -> int:
    """Run a command with SafeStreams. Returns its exit status, or 1 instead of 0 if a write to
    standard output failed. Raises: SystemExit, with the status changed in the same way.
    """
    _open_closed()
    given = sys.stdout, sys.stderr
    # An error of standard error cannot be reported.
    err = SafeStream(sys.stderr, lambda _error: None)
    out = SafeStream(sys.stdout, lambda error: _tell(err, error))
    sys.stdout, sys.stderr = out, err  # type: ignore[assignment]
    try:
        try:
            status = command()
        finally:
            out.end()
            err.end()
        return 1 if out.failed and status == 0 else status
    except SystemExit as stopped:
        if out.failed and not stopped.code:
            raise SystemExit(1) from None
        raise
    finally:
        sys.stdout, sys.stderr = given


def write_to_stdout(text: str) -> None:
    """Write a record to standard output. Raises: ValueError if it is closed."""
    if getattr(sys.stdout, "closed", True):
        raise ValueError("the record is for standard output, which is closed; name a file")
    sys.stdout.write(text)


def _tell(err: SafeStream, error: OSError) -> None:
    reason = error.strerror or type(error).__name__
    err.write(f"error: standard output cannot be written: {reason}; the output is incomplete\n")
    err.flush()


def _open_closed() -> None:
    """Open /dev/null in place of closed standard streams. Otherwise the next opened file, such as a
    swap file, would get the descriptor of one, and libraries would print to that file.
    """
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            # The kernel assigns the lowest free number, which is `fd`. Inheritable, for child
            # processes.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
