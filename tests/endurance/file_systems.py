"""File systems of their own kinds for a test: images on a disk or in memory, mounted by loop
devices. Needs root."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from infinity._src.base.sizes import format_size

IMAGE_BYTES = 400 << 20
"""Size of a sparse image: xfs takes no less than 300 MiB."""
IN_MEMORY = Path("/dev/shm")


class NotHere(Exception):
    """Says why this machine cannot have a file system."""


@dataclasses.dataclass(frozen=True)
class FileSystem:
    """kind: "ext4", "xfs", or "" for the directory as it is. in_memory: the image is in tmpfs."""

    kind: str = ""
    in_memory: bool = False

    @property
    def name(self) -> str:
        where = "tmpfs" if self.in_memory else "disk"
        return f"{self.kind} on a loop device on {where}" if self.kind else "the directory"


ALL = {
    "here": FileSystem(),
    "ext4": FileSystem("ext4"),
    "xfs": FileSystem("xfs"),
    "ext4-memory": FileSystem("ext4", in_memory=True),
    "xfs-memory": FileSystem("xfs", in_memory=True),
}


def _run(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NotHere(f"{' '.join(words)}: {done.stderr.strip() or done.returncode}")
    return done.stdout.strip()


@contextlib.contextmanager
def mounted(system: FileSystem, directory: Path) -> Iterator[Path]:
    """An empty directory on such a file system; nothing of it is left at the end.

    Raises: NotHere.
    """
    if not system.kind:
        place = directory / "here"
        place.mkdir()
        yield place
        shutil.rmtree(place)
        return
    if os.getuid() != 0:
        raise NotHere("loop devices need root")
    if shutil.which(f"mkfs.{system.kind}") is None:
        raise NotHere(f"there is no mkfs.{system.kind}")
    if system.in_memory and not os.access(IN_MEMORY, os.W_OK):
        raise NotHere(f"{IN_MEMORY} cannot be written to")
    home = IN_MEMORY if system.in_memory else directory
    image = home / f"infinity-{os.getpid()}-{system.kind}.image"
    with contextlib.ExitStack() as undo:
        with image.open("xb") as file:
            undo.callback(image.unlink)
            room = os.statvfs(home)
            if room.f_bavail * room.f_frsize < IMAGE_BYTES:
                raise NotHere(f"{home} has no {format_size(IMAGE_BYTES)} free")
            file.truncate(IMAGE_BYTES)
        _run(f"mkfs.{system.kind}", "-q", str(image))
        device = _run("losetup", "--find", "--show", str(image))
        undo.callback(_run, "losetup", "--detach", device)
        place = directory / f"mount-{system.kind}"
        place.mkdir()
        undo.callback(place.rmdir)
        _run("mount", "-t", system.kind, device, str(place))
        undo.callback(_run, "umount", str(place))
        yield place
