"""Small file systems with a cause of trouble each, mounted for one test and unmounted whatever
happens."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest


def _mount(stack: ExitStack, arguments: list[str], where: Path) -> None:
    where.mkdir(exist_ok=True)
    done = subprocess.run(
        ["mount", *arguments, str(where)], check=False, capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip(
            f"NOT TESTED, may not mount here: mount {' '.join(arguments)}: {done.stderr.strip()}"
        )
    stack.callback(_unmount, where)


def _unmount(where: Path) -> None:
    done = subprocess.run(["umount", str(where)], check=False, capture_output=True, text=True)
    if done.returncode:  # something is still open there; the mount goes when that does
        subprocess.run(["umount", "--lazy", str(where)], check=True)
        pytest.fail(f"{where} could not be unmounted: {done.stderr.strip()}")


@contextmanager
def tmpfs(where: Path, size_bytes: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file system in memory of `size_bytes`, allowed as a swap directory."""
    monkeypatch.setenv("INFINITY_ALLOW_TMPFS", "1")
    with ExitStack() as stack:
        _mount(stack, ["-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs"], where)
        yield where


@contextmanager
def loop_ext4(where: Path, size_bytes: int) -> Iterator[Path]:
    """An ext4 of its own on a loop device: real O_DIRECT, real ENOSPC."""
    # A user's PATH may lack /usr/sbin.
    mkfs = shutil.which("mkfs.ext4", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
    if mkfs is None:
        pytest.skip("NOT TESTED, no ext4 can be made here: there is no mkfs.ext4")
    image = where.with_suffix(".img")
    with image.open("wb") as file:
        file.truncate(size_bytes)
    done = subprocess.run(
        [mkfs, "-q", "-F", "-m", "0", str(image)],
        check=False,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        pytest.skip(f"NOT TESTED, no ext4 can be made here: {done.stderr.strip()}")
    with ExitStack() as stack:
        stack.callback(image.unlink)
        _mount(stack, ["-o", "loop", str(image)], where)
        yield where


@contextmanager
def overlay_without_direct(where: Path) -> Iterator[Path]:
    """An overlayfs whose upper layer refuses O_DIRECT, as a container's layer may. It is not tmpfs
    by its type."""
    below = where.with_suffix(".below")
    with ExitStack() as stack:
        _mount(stack, ["-t", "ramfs", "ramfs"], below)
        for name in ("lower", "upper", "work"):
            (below / name).mkdir()
        options = ",".join(f"{key}dir={below / key}" for key in ("lower", "upper", "work"))
        _mount(stack, ["-t", "overlay", "-o", options, "overlay"], where)
        yield where
