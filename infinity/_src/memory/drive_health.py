"""Health of an engine's drives.

One failed request is a bad block, or a transient fault. A drive is *lost* when all requests to it
fail. Then training cannot continue: every call raises DriveLostError, which names the states to
resume from.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, final

from infinity._src.base.alarm import Alarm
from infinity.aio import SwapFile
from infinity.errors import AioError, DeviceFailedError, DriveLostError, SwapFullError

ANSWER_S = 10.0
"""Seconds within which a probed drive must answer."""


class _Saved(NamedTuple):
    """A complete checkpoint. device: number of its drive."""

    step: int
    directory: Path
    device: int


@final
class Drives:
    """The drives of one engine. Any thread uses it. alarm: set when a drive is lost."""

    def __init__(self, directories: Sequence[Path], alarm: Alarm) -> None:
        self._alarm = alarm
        self._directories = list(directories)
        # Determined here, since a lost drive cannot be queried.
        self._devices = [each.stat().st_dev for each in directories]
        self._committed: int | None = None
        self._saved: _Saved | None = None
        self.lost: DriveLostError | None = None
        self._asking = threading.Lock()

    def committed(self, step: int) -> None:
        """Note that a durable run has committed a step."""
        self._committed = step

    def saved(self, step: int, directory: Path) -> None:
        """Note that a checkpoint is complete."""
        # If the directory has been removed, no one can resume from it.
        with contextlib.suppress(OSError):
            self._saved = _Saved(step, directory, directory.stat().st_dev)

    def check(self) -> None:
        if self.lost is not None:
            # The exception is raised repeatedly: without this its traceback would grow and hold
            # frames.
            raise self.lost.with_traceback(None)

    def examine(self, error: AioError) -> AioError:
        """Return the error to raise for an I/O error: DriveLostError if a drive is lost, else the
        error itself. Blocks while a drive is probed."""
        if not isinstance(error, DeviceFailedError) and type(error) is not AioError:
            return error
        with self._asking:
            for directory, device in zip(self._directories, self._devices, strict=True):
                concerned = self.lost is None and Path(error.path).is_relative_to(directory)
                if concerned and (reason := _ask(directory, device)):
                    self.lost = self._error(directory, device, reason, error)
                    self._alarm.sound()
        return self.lost or error

    def _error(self, directory: Path, device: int, reason: str, cause: AioError) -> DriveLostError:
        left = [str(each) for each in self._directories if each != directory]
        saved = self._saved if self._saved is None or self._saved.device != device else None
        step, source = None, ""
        again = f"Start again with nvme={left}" if left else "Start again on another drive"
        if saved is not None:
            step, source = saved.step, str(saved.directory)
            way = f"{again} and inf.restore(model, opt, {source!r}), the save of step {step}"
        elif self._committed is not None and left:
            step, source = self._committed, left[0]
            way = (
                f"{again} and inf.restore(model, opt, {left}, damaged='report'): the other drives "
                f"have their parts of step {step}"
            )
        else:
            way = f"{again}, from your last checkpoint: this run has no save on another drive"
        return DriveLostError(
            f"the drive of {directory} ({_name_of(device)}) is lost: {reason}. {way}",
            cause=cause,
            directory=str(directory),
            device=_name_of(device),
            step=step,
            source=source,
        )


def _ask(directory: Path, device: int) -> str:
    """Return why a drive counts as lost; "" if a block can be written and read back."""
    found: list[str] = [f"it does not answer within {ANSWER_S:.0f} s"]

    def ask() -> None:
        found[0] = _answer(directory, device)

    # A daemon, because a thread that is blocked in the kernel cannot be ended.
    thread = threading.Thread(target=ask, name="infinity-drive", daemon=True)
    thread.start()
    thread.join(ANSWER_S)
    return found[0]


def _answer(directory: Path, device: int) -> str:
    try:
        if directory.stat().st_dev != device:
            return "its file system is not mounted there any more"
        # `create` writes a block, reads it back and compares.
        with SwapFile.create(directory) as file:
            file.fsync()
    except SwapFullError:
        return ""
    except DeviceFailedError as error:
        return f"it cannot write a block ({os.strerror(error.errno or 0)})"
    except AioError:
        # Permissions, or too many open files: no fault of the drive.
        return ""
    # ValueError: the directory does not exist.
    except (OSError, ValueError) as error:
        return f"its directory cannot be used ({error})"
    return ""


def _name_of(device: int) -> str:
    """Return the name of a device, or its number."""
    number = f"{os.major(device)}:{os.minor(device)}"
    link = Path("/sys/dev/block") / number
    return link.resolve().name if link.is_symlink() else f"device {number}"
