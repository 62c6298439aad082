"""A drive is lost during training: every call raises one error, which names the drive and how to
resume, and the model closes."""

from __future__ import annotations

import fcntl
import os
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import infinity as inf
from infinity._src.engine.handle import offload
from infinity.aio import Fault, Seam
from infinity.errors import DeviceFailedError, DriveLostError, StepUndone
from tests.crashes import Net, digest, step
from tests.durable_runs import close, die, made, undisturbed
from tests.marks import alternating
from tests.unit.aio.disks import loop_ext4

MIB = 1 << 20


@pytest.fixture(scope="module")
def wanted() -> tuple[str, ...]:
    return undisturbed()


def shut(drive: Path) -> None:
    """Make an ext4 fail every request from now on, as it does when its device is gone."""
    fd = os.open(drive, os.O_RDONLY)
    try:
        # EXT4_IOC_SHUTDOWN, without a flush of the journal.
        fcntl.ioctl(fd, 0x8004587D, struct.pack("I", 2))
    finally:
        os.close(fd)


def gone(drive: Path) -> None:
    drive.rename(drive.with_name("elsewhere"))


def meet(model: Any, optimizer: Any, when: str, lose: Callable[[], None], place: Path) -> None:
    """Lose a drive at this point, and train until the error."""
    if when == "backward":
        model.blocks[1].register_forward_hook(
            lambda _module, _inputs, out: (out.register_hook(lambda _grad: lose()), None)[1]
        )
    elif when == "step":
        optimizer.register_step_pre_hook(lambda *_: lose())
    elif when == "commit":
        step(model, optimizer, 2, 0)
        inf.handle(model).pipeline.wait()
        lose()
        inf.handle(model).flush()
    elif when == "close":
        lose()
        return
    else:
        lose()
    if when == "save":
        inf.save(model, optimizer, place / "other").wait()
    for index in range(2, 6):
        step(model, optimizer, index, 0)
    inf.handle(model).flush()


@pytest.mark.parametrize(
    ("when", "which"),
    alternating(["forward", "backward", "step", "commit", "save", "close"], [0, 1]),
)
def test_a_lost_drive_ends_the_run_with_one_error(
    tmp_path: Path, wanted: tuple[str, ...], when: str, which: int
) -> None:
    threads = threading.active_count()
    with loop_ext4(tmp_path / "a", 32 * MIB) as a, loop_ext4(tmp_path / "b", 32 * MIB) as b:
        drives = [a / "swap", b / "swap"]
        for drive in drives:
            drive.mkdir()
        model, optimizer = made(*drives)
        for index in range(2):
            step(model, optimizer, index, 0)
        inf.handle(model).flush()
        lost, left = drives[which], drives[1 - which]
        errors: list[BaseException] = []
        calls = [
            lambda: meet(model, optimizer, when, lambda: shut(lost.parent), tmp_path),
            *([] if when == "close" else [lambda: step(model, optimizer, 2, 0)]),
            *([] if when == "close" else [lambda: inf.handle(model).flush()]),
            lambda: close(model),
        ]
        for call in calls:
            try:
                call()
            except Exception as error:
                errors.append(error)
        if when == "close":
            # All steps are committed, and the drives get no further requests.
            assert all(isinstance(error, DriveLostError) for error in errors)
        else:
            (error,) = {id(error): error for error in errors}.values()
            assert len(errors) == len(calls)
            assert isinstance(error, DriveLostError)
            assert (error.directory, error.source) == (str(lost), str(left))
            assert error.device.startswith("loop")
            committed = error.step
            assert committed is not None
            assert committed >= 2
            for word in (str(lost), error.device, "inf.restore(model, opt", str(left)):
                assert word in str(error)
        close(model)
        assert threading.active_count() <= threads
        # Follow the error's advice.
        model, optimizer = made(left)
        restored = inf.restore(model, optimizer, [left], damaged="report")
        assert restored.step >= 2
        assert restored.damaged
        step(model, optimizer, restored.step, 0)
        close(model)


@pytest.mark.parametrize("which", [0, 1])
def test_a_vanished_directory_counts_as_a_lost_drive(
    tmp_path: Path, wanted: tuple[str, ...], which: int
) -> None:
    drives = [tmp_path / "a", tmp_path / "b"]
    for drive in drives:
        drive.mkdir()
    model, optimizer = made(*drives)
    for index in range(2):
        step(model, optimizer, index, 0)
    inf.save(model, optimizer, tmp_path / "saved").wait()
    for _ in range(2):
        with pytest.raises(DriveLostError, match="cannot be used") as caught:
            meet(model, optimizer, "forward", lambda: gone(drives[which]), tmp_path)
            drives[which].mkdir()
        # Both lie on one device, so the save is as lost as the drive.
        assert caught.value.source == str(drives[1 - which])
        (tmp_path / "elsewhere").rename(drives[which])
    with pytest.raises(DriveLostError):
        close(model)
    # The drive was intact: the run continues, complete.
    model, optimizer = made(*drives)
    found = inf.restore(model, optimizer, drives[0])
    assert found.step >= 2
    assert digest(model) == wanted[found.step]
    close(model)


def test_faults_of_a_drive_that_is_there_are_no_loss(tmp_path: Path) -> None:
    """Every read fails, but the probe can write and read a block."""
    model, optimizer = made(tmp_path, seam=Seam(fault=Fault("read", 8, persistent=True)))
    with pytest.raises((StepUndone, DeviceFailedError), match="drive failed") as caught:
        for index in range(6):
            step(model, optimizer, index, 0)
            inf.handle(model).flush()
    assert not isinstance(caught.value, DriveLostError)
    assert not isinstance(caught.value.__cause__, DriveLostError)
    die(model)


@pytest.mark.parametrize(
    ("generations", "when"), [(1, "forward"), (2, "forward"), (2, "backward"), (2, "step")]
)
def test_a_save_elsewhere_is_the_state_to_go_on_from(
    tmp_path: Path, generations: int, when: str
) -> None:
    with loop_ext4(tmp_path / "a", 32 * MIB) as a:
        torch.manual_seed(0)
        tiers: dict[str, Any] = {"params": "nvme", "optim": "nvme", "ram": "min", "nvme": a}
        policy = inf.Policy(**tiers, unit_bytes_max=4096, generations=generations)
        model: Any = offload(Net().bfloat16(), policy)
        optimizer = inf.AdamW(model.parameters(), lr=1e-2)
        step(model, optimizer, 0, 0)
        inf.save(model, optimizer, tmp_path / "saved").wait()
        with pytest.raises(DriveLostError, match="save of step 1") as caught:
            meet(model, optimizer, when, lambda: shut(a), tmp_path)
        assert (caught.value.step, caught.value.source) == (1, str(tmp_path / "saved"))
        with pytest.raises(DriveLostError):
            close(model)


SCRIPT = """
import sys
from pathlib import Path
import infinity as inf
from tests.crashes import step
from tests.durable_runs import made
from tests.test_lost_drive import gone

place = Path(sys.argv[1])
model, optimizer = made(place)
step(model, optimizer, 0, 0)
gone(place)
for index in range(1, 5):
    step(model, optimizer, index, 0)
"""


def test_a_script_that_loses_its_drive_ends_with_one_error(tmp_path: Path) -> None:
    (tmp_path / "drive").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "drive")],
        cwd=Path(__file__).parent.parent,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert done.stderr.count("is lost: ") == 1, done.stderr
    assert "Exception ignored" not in done.stderr
    assert done.stderr.count("Traceback") <= 2, done.stderr
