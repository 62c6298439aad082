"""Standard output and error of a command, on which every write ends well.

    a letter that the encoding lacks     is replaced: the status is that of the work
    a pipe or terminal that has gone     what is written is lost, in silence, as the reader chose
    any other error, such as a full disk     one line on standard error, and a status that is not 0
    closed before the command began      as /dev/null

A training of days goes on in all of them: what it shows is no part of its results.
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
    """A text stream whose writes never raise. stream: None where there is none. tell: called with
    the first error that is none of a reader that has gone.
    """

    def __init__(self, stream: Any, tell: Callable[[OSError], None]) -> None:
        self._stream = stream
        self._tell = tell
        self.failed = False
        """True once an error was told."""
        self._terminal = self.isatty()

    @property
    def closed(self) -> bool:
        """Return whether nothing that is written can arrive."""
        return self._stream is None or bool(getattr(self._stream, "closed", False))

    def isatty(self) -> bool:
        return not self.closed and bool(self._stream.isatty())

    def write(self, text: str) -> int:
        """Write `text`, with question marks for letters that the encoding lacks."""
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
        """Flush what was written. Returns whether that went well."""
        if self.closed:
            return True
        try:
            self._stream.flush()
        except OSError as error:
            self._note(error)
            return False
        return True

    def end(self) -> None:
        """Flush for the last time, and give up the rest. The interpreter would try to write it
        again at exit, and end with another status.
        """
        if self.flush():
            return
        # A stream without a number, or one that is gone, has nothing left to give up.
        with contextlib.suppress(OSError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)
            self._stream.flush()

    def _note(self, error: OSError) -> None:
        # EIO: of a terminal that was closed, and of a drive that fails.
        gone = error.errno == errno.EPIPE or (error.errno == errno.EIO and self._terminal)
        if not gone and not self.failed:
            self.failed = True
            self._tell(error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def with_safe_streams(command: Callable[[], int]) -> int:
    """Run a command with streams on which every write ends well. Returns its exit status, or 1 in
    place of 0 where standard output could not be written. Raises: SystemExit, likewise.
    """
    _open_closed()
    given = sys.stdout, sys.stderr
    # A standard error that is full has no place where that could be told.
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
    """Write a record that a user wants on standard output. Raises: ValueError where it is closed.
    """
    if getattr(sys.stdout, "closed", True):
        raise ValueError("the record is for standard output, which is closed; name a file")
    sys.stdout.write(text)


def _tell(err: SafeStream, error: OSError) -> None:
    reason = error.strerror or type(error).__name__
    err.write(f"error: standard output cannot be written: {reason}; what it should show is lost\n")
    err.flush()


def _open_closed() -> None:
    """Open /dev/null in place of standard streams that are closed: the next file to be opened, as a
    swap file, would have their number, and get what libraries write there.
    """
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            # The system gives the least number that is free. Children shall have it, too.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
