"""Requests are fitted to the device's queue, found in sysfs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinity.aio import SwapFile
from infinity.aio._file_system import DEPTH_MIN, DriveLimits, fit, limits_of


def sysfs_with(
    root: Path, file: Path, device: str, *, requests: str = "64", sectors: str = "128"
) -> Path:
    """A /sys in which `file` lies on the partition `device` ("pci/nvme0n1/nvme0n1p2") or drive."""
    folder = root / "devices" / device
    folder.mkdir(parents=True)
    drive = folder if "p2" not in folder.name else folder.parent
    (drive / "queue").mkdir()
    (drive / "queue" / "nr_requests").write_text(requests + "\n")
    (drive / "queue" / "max_sectors_kb").write_text(sectors + "\n")
    number = file.stat().st_dev
    link = root / "dev" / "block" / f"{os.major(number)}:{os.minor(number)}"
    link.parent.mkdir(parents=True)
    link.symlink_to(folder)
    return root


@pytest.mark.parametrize("device", ["pci0/nvme0n1", "pci0/nvme0n1/nvme0n1p2"])
def test_the_queue_of_a_drive_and_of_a_partition_s_drive_is_found(tmp_path, device):
    sysfs = sysfs_with(tmp_path / "sys", tmp_path, device)
    assert limits_of(tmp_path, sysfs=sysfs) == DriveLimits("nvme0n1", 64, 128)
    with SwapFile.create(tmp_path) as file:
        assert (
            limits_of(file, sysfs=sysfs)
            == limits_of(file.fd, sysfs=sysfs)
            == DriveLimits("nvme0n1", 64, 128)
        )


def test_virtual_devices_and_unknown_ones_have_no_limit(tmp_path):
    sysfs = sysfs_with(tmp_path / "sys", tmp_path, "virtual/block/dm-0")
    assert limits_of(tmp_path, sysfs=sysfs) == DriveLimits("dm-0")
    assert limits_of(tmp_path, sysfs=tmp_path / "nothing") == DriveLimits()
    assert limits_of("/proc") == DriveLimits()
    assert DriveLimits("dm-0").fit(1 << 20, 32) == (1 << 20, 32)


def test_files_that_cannot_be_read_as_numbers_are_no_limit(tmp_path):
    sysfs = sysfs_with(tmp_path / "sys", tmp_path, "pci0/sda", requests="many", sectors="")
    assert limits_of(tmp_path, sysfs=sysfs) == DriveLimits("sda")


@pytest.mark.parametrize(
    ("requests", "sectors_kb", "asked", "fitted"),
    [
        (1023, 128, (1 << 20, 32), (1 << 20, 32)),  # an NVMe drive
        (64, 1280, (1 << 20, 32), (1 << 20, 32)),  # a SATA drive
        (64, 128, (1 << 20, 32), (1 << 20, 8)),
        (256, 4096, (16 << 20, 128), (16 << 20, 64)),
        (16, 128, (16 << 20, 32), (1 << 20, 2)),  # depth alone does not do: the block shrinks
        (2, 4, (1 << 20, 32), (4096, 2)),
        (1, 64, (1 << 20, 32), (1 << 16, 2)),
    ],
)
def test_depth_gives_way_first_and_then_the_block(requests, sectors_kb, asked, fitted):
    assert DriveLimits("x", requests, sectors_kb).fit(*asked) == fitted


@given(
    st.integers(2, 4096),
    st.integers(4, 65536),
    st.integers(1, 1 << 14).map(lambda pages: pages * 4096),
    st.integers(2, 4096),
)
def test_whatever_the_device_a_full_queue_never_blocks_and_nothing_is_raised(
    requests, sectors_kb, block_bytes, depth
):
    block, fitted = DriveLimits("x", requests, sectors_kb).fit(block_bytes, depth)
    assert fitted * -(-block // (sectors_kb * 1024)) <= requests
    assert DEPTH_MIN <= fitted <= depth
    assert 4096 <= block <= block_bytes
    assert block % 4096 == 0
    assert block == block_bytes or fitted == DEPTH_MIN


def test_the_file_under_a_real_directory_is_fitted_to_its_device(tmp_path):
    with SwapFile.create(tmp_path) as file:
        assert fit(file, 1 << 20, 32) == limits_of(file).fit(1 << 20, 32)
