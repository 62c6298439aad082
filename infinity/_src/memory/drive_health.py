"""The drives of an engine, and whether they are there.

One request that fails is a fault of a block, or of a moment. A drive is *lost* when it fails all:
then the run is over, and one error says so to every call, with the state to resume from.
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
"""The longest that a drive is waited for which is asked whether it is there."""


class _Saved(NamedTuple):
    """A checkpoint that is whole. device: number of the one that it lies on."""

    step: int
    directory: Path
    device: int


@final
class Drives:
    """The drives of one engine. Any thread uses it. alarm: sounded when a drive is lost."""

    def __init__(self, directories: Sequence[Path], alarm: Alarm) -> None:
        self._alarm = alarm
        self._directories = list(directories)
        # Known now: a drive that is gone cannot be asked.
        self._devices = [each.stat().st_dev for each in directories]
        self._committed: int | None = None
        self._saved: _Saved | None = None
        self.lost: DriveLostError | None = None
        self._asking = threading.Lock()

    def committed(self, step: int) -> None:
        """Note that a durable run has committed a step."""
        self._committed = step

    def saved(self, step: int, directory: Path) -> None:
        """Note that a checkpoint is whole."""
        # A place that went at once is no place to resume from.
        with contextlib.suppress(OSError):
            self._saved = _Saved(step, directory, directory.stat().st_dev)

    def check(self) -> None:
        if self.lost is not None:
            # One exception is raised many times: its traceback would grow, and hold frames.
            raise self.lost.with_traceback(None)

    def examine(self, error: AioError) -> AioError:
        """Return the error to raise for one of I/O: that of a drive that is lost, or itself. Blocks
        while a drive is asked."""
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
            way = f"{again} and inf.restore(model, opt, {source!r}), a whole save of step {step}"
        elif self._committed is not None and left:
            step, source = self._committed, left[0]
            way = (
                f"{again} and inf.restore(model, opt, {left}, damaged='report'): the other drives "
                f"have their part of step {step}"
            )
        else:
            way = f"{again}, from your last checkpoint: this run has saved nothing elsewhere"
        return DriveLostError(
            f"the drive of {directory} ({_name_of(device)}) is gone: {reason}. {way}",
            cause=cause,
            directory=str(directory),
            device=_name_of(device),
            step=step,
            source=source,
        )


def _ask(directory: Path, device: int) -> str:
    """Say in what way a drive is gone; "" if it takes a block and gives it back."""
    found: list[str] = [f"it does not answer within {ANSWER_S:.0f} s"]

    def ask() -> None:
        found[0] = _answer(directory, device)

    # A daemon: nothing ends a request that the kernel still waits for.
    thread = threading.Thread(target=ask, name="infinity-drive", daemon=True)
    thread.start()
    thread.join(ANSWER_S)
    return found[0]


def _answer(directory: Path, device: int) -> str:
    try:
        if directory.stat().st_dev != device:
            return "its file system is not mounted there any more"
        # Writes a block, reads it and compares.
        with SwapFile.create(directory) as file:
            file.fsync()
    except SwapFullError:
        return ""
    except DeviceFailedError as error:
        return f"it takes no block ({os.strerror(error.errno or 0)})"
    except AioError:
        # Rights, or too many open files: not the drive's.
        return ""
    # ValueError: the directory is not there.
    except (OSError, ValueError) as error:
        return f"its directory cannot be used ({error})"
    return ""


def _name_of(device: int) -> str:
    """Return the name of a device, or its number."""
    number = f"{os.major(device)}:{os.minor(device)}"
    link = Path("/sys/dev/block") / number
    return link.resolve().name if link.is_symlink() else f"device {number}"
