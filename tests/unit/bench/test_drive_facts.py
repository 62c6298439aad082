"""Facts of drives: the links and arrays of sysfs trees, and what SMART tools write.

The tree of the virtual disk and the answers about it were recorded from a machine. Those of NVMe
drives, which that machine lacks, are laid out as the kernel's pages and the tools' sources say.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from infinity._src.cli import doctor
from infinity._src.measure import drive_facts, report
from infinity._src.measure.drive_facts import (
    Drive,
    Facts,
    Health,
    Link,
    Raid,
    facts_of,
    facts_of_block,
    parse_nvme,
    parse_smartctl,
    read_health,
    temperature_c,
    thermometers_of_block,
)

PORT = "devices/pci0000:00/0000:00:01.0/0000:01:00.0"
OTHER = "devices/pci0000:00/0000:00:02.0/0000:02:00.0"
VIRTUAL = "devices/pci0000:00/0000:00:02.0/virtio1/block/vda"


def tree(root: Path, files: dict[str, str], links: dict[str, str]) -> Path:
    """Make a sysfs below `root`. links: places, and the folder below `root` that each leads to."""
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")
    for name, target in links.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).symlink_to(root / target)
    return root


def pci(port: str, speed: str = "16.0 GT/s PCIe", width: int = 4) -> dict[str, str]:
    return {
        f"{port}/current_link_speed": speed,
        f"{port}/current_link_width": str(width),
        f"{port}/max_link_speed": "16.0 GT/s PCIe",
        f"{port}/max_link_width": "4",
    }


def no_health(_device: str) -> Health:
    return Health(reason="none")


def test_a_virtual_disk_has_neither_link_nor_array(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {f"{VIRTUAL}/queue/rotational": "1", f"{VIRTUAL}/dev": "254:0"},
        {"dev/block/254:0": VIRTUAL},
    )
    facts = facts_of_block(root / "dev/block/254:0", no_health)
    assert facts == Facts((Drive("vda", None, Health(reason="none")),))
    assert facts.describe() == ["vda: no PCIe link in sysfs, SMART unknown (none)"]
    assert facts_of_block(root / "dev/block/1:1") == Facts()


def test_the_link_of_a_partition_is_that_of_its_drive(tmp_path: Path) -> None:
    disk = f"{PORT}/nvme/nvme0/nvme0n1"
    root = tree(
        tmp_path,
        {**pci(PORT), f"{disk}/queue/rotational": "0", f"{disk}/nvme0n1p2/partition": "2"},
        {"dev/block/259:2": f"{disk}/nvme0n1p2"},
    )
    (drive,) = facts_of_block(root / "dev/block/259:2", no_health).drives
    assert (drive.device, drive.link) == ("nvme0n1", Link(16.0, 4, 16.0, 4))
    assert drive.link is not None
    assert drive.link.bytes_per_s == pytest.approx(7.877e9, rel=1e-3)
    assert "PCIe 16 GT/s x4 (7.9 GB/s)" in drive.describe()
    assert list(drive.warnings()) == []


def test_the_link_of_a_drive_with_several_paths_is_its_controllers(tmp_path: Path) -> None:
    system = "devices/virtual/nvme-subsystem/nvme-subsys0"
    root = tree(
        tmp_path,
        {**pci(PORT, "2.5 GT/s PCIe", 1), f"{PORT}/nvme/nvme0/model": "x",
         f"{system}/nvme0n1/queue/rotational": "0"},
        {"dev/block/259:0": f"{system}/nvme0n1", f"{system}/nvme0": f"{PORT}/nvme/nvme0"},
    )  # fmt: skip
    (drive,) = facts_of_block(root / "dev/block/259:0", no_health).drives
    assert drive.link == Link(2.5, 1, 16.0, 4)
    assert drive.link.bytes_per_s == 250e6
    (warning,) = drive.warnings()
    assert "2.5 GT/s x1, of 16 GT/s x4" in warning


@pytest.mark.parametrize("place", ["nvme/nvme0/hwmon1", "nvme/nvme0/hwmon/hwmon1"])
def test_any_user_may_read_the_kernel_s_thermometer(tmp_path: Path, place: str) -> None:
    disk = f"{PORT}/nvme/nvme0/nvme0n1"
    root = tree(
        tmp_path,
        {f"{disk}/queue/rotational": "0", f"{PORT}/{place}/temp1_input": "38850"},
        {"dev/block/259:0": disk},
    )
    (found,) = thermometers_of_block(root / "dev/block/259:0")
    assert temperature_c(found) == 38.85
    (drive,) = facts_of_block(root / "dev/block/259:0", no_health).drives
    assert drive.health == Health(reason="none", temperature_c=38.85)
    found.unlink()
    assert temperature_c(found) is None
    assert thermometers_of_block(root / "dev/block/259:0") == ()


def test_an_array_has_level_chunk_and_drives(tmp_path: Path) -> None:
    files = {
        f"devices/virtual/block/md0/{name}": text
        for name, text in {
            "queue/rotational": "0", "md/level": "raid0", "md/chunk_size": "524288",
            "md/raid_disks": "2", "md/degraded": "1",
        }.items()
    }  # fmt: skip
    links = {"dev/block/9:0": "devices/virtual/block/md0"}
    for number, port in enumerate((PORT, OTHER)):
        disk = f"{port}/nvme/nvme{number}/nvme{number}n1"
        files |= {**pci(port), f"{disk}/queue/rotational": "0"}
        files[f"{disk}/nvme{number}n1p1/partition"] = "1"
        links[f"devices/virtual/block/md0/slaves/nvme{number}n1p1"] = f"{disk}/nvme{number}n1p1"
    # LVM on the array.
    files["devices/virtual/block/dm-0/queue/rotational"] = "0"
    links["devices/virtual/block/dm-0/slaves/md0"] = "devices/virtual/block/md0"
    links["dev/block/253:0"] = "devices/virtual/block/dm-0"
    root = tree(tmp_path, files, links)
    facts = facts_of_block(root / "dev/block/253:0", no_health)
    assert facts == facts_of_block(root / "dev/block/9:0", no_health)
    assert facts.raid == Raid("md0", "raid0", 524288, 2, 1)
    assert [drive.device for drive in facts.drives] == ["nvme0n1", "nvme1n1"]
    assert facts.describe()[0] == "md0: raid0 of 2 drives, chunks of 512 KiB"
    assert facts.warnings() == ["md0: 1 of its drives are missing"]


SMARTCTL: dict[str, Any] = {
    "smartctl": {"version": [7, 3], "exit_status": 0},
    "device": {"name": "/dev/nvme0n1", "type": "nvme", "protocol": "NVMe"},
    "smart_status": {"passed": True, "nvme": {"value": 0}},
    "nvme_smart_health_information_log": {
        "critical_warning": 0, "temperature": 41, "available_spare": 100, "percentage_used": 3,
        "data_units_written": 24_000_000,
    },
    "temperature": {"current": 41},
}  # fmt: skip
NVME = {
    "critical_warning": 0, "temperature": 314, "avail_spare": 100, "spare_thresh": 10,
    "percent_used": 3, "data_units_written": 24_000_000,
}  # fmt: skip
# Recorded with smartctl 7.3 from a virtual disk.
NO_SMART = {
    "json_format_version": [1, 0],
    "smartctl": {
        "version": [7, 3],
        "argv": ["smartctl", "-j", "-a", "/dev/vda"],
        "messages": [{"string": "/dev/vda: Unable to detect device type", "severity": "error"}],
        "exit_status": 1,
    },
}


def test_both_tools_are_read_alike() -> None:
    health = Health("smartctl", "", 41.0, 3.0, 12_288_000_000_000, 100.0)
    assert parse_smartctl(SMARTCTL) == health
    nvme = parse_nvme(NVME)
    assert (nvme.temperature_c, nvme.used_percent, nvme.written_bytes) == (41, 3, 12288 * 10**9)
    told = Drive("nvme0n1", None, health).describe()
    assert "41 °C, 3 % of its rated life used, 12.3 TB written" in told
    # As nvme-cli 2.1 to 2.3 writes a counter of 128 bits.
    for text in ("24000000", "24000000.000000"):
        assert parse_nvme({**NVME, "data_units_written": text}) == nvme
    worn = {"smart_status": {"passed": False}, "endurance_used": {"current_percent": 97}}
    warnings = list(Drive("sda", None, parse_smartctl(worn)).warnings())
    assert [words in warning for words, warning in zip(("failure", "97 %"), warnings, strict=True)]


def test_a_hot_drive_is_not_a_failing_one() -> None:
    for bits, words in ((2, ["cool the drive"]), (4, ["replace"]), (6, ["replace", "cool"])):
        log = {**SMARTCTL["nvme_smart_health_information_log"], "critical_warning": bits}
        status = {"passed": False, "nvme": {"value": bits}}
        found = {**SMARTCTL, "smart_status": status, "nvme_smart_health_information_log": log}
        for health in (
            parse_smartctl(found),
            parse_nvme({**NVME, "critical_warning": bits}),
            parse_nvme({**NVME, "critical_warning": {"value": bits, "temp_threshold": 1}}),
        ):
            warnings = list(Drive("nvme0n1", None, health).warnings())
            assert len(warnings) == len(words)
            assert all(word in warning for word, warning in zip(words, warnings, strict=True))


def test_a_drive_without_a_thermometer_has_no_temperature() -> None:
    """Such drives report 0, which is no temperature in either unit."""
    assert parse_nvme({**NVME, "temperature": 0}).temperature_c is None
    assert parse_smartctl({**SMARTCTL, "temperature": {"current": 0}}).temperature_c is None


@pytest.mark.parametrize("found", [{}, {"smartctl": 1}, {"smartctl": {"messages": ["x"]}}])
def test_what_a_tool_does_not_say_is_unknown(found: dict[str, Any]) -> None:
    assert parse_smartctl(found) == Health("smartctl", "the drive has no SMART")
    assert parse_nvme(found).reason
    assert parse_smartctl(NO_SMART).reason == "/dev/vda: Unable to detect device type"
    odd = {**SMARTCTL, "temperature": 41, "nvme_smart_health_information_log": []}
    assert parse_smartctl(odd) == Health("smartctl")


def tool(folder: Path, name: str, text: str, status: int = 0) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\necho \"$@\" > '{folder}/asked'\necho '{text}'\nexit {status}\n")
    path.chmod(0o755)


def test_the_installed_tool_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}")
    assert "install smartctl" in read_health("nvme0n1").reason
    tool(tmp_path, "nvme", json.dumps(NVME))
    assert read_health("nvme0n1").source == "nvme"
    assert (tmp_path / "asked").read_text() == "smart-log -o json /dev/nvme0n1\n"
    assert "install smartctl" in read_health("sda").reason
    # Bits of the status say what a drive once had.
    tool(tmp_path, "smartctl", json.dumps(SMARTCTL), status=64)
    assert read_health("sda").temperature_c == 41
    assert (tmp_path / "asked").read_text() == "-j -a /dev/sda\n"
    tool(tmp_path, "smartctl", "Permission denied", status=2)
    assert read_health("sda").reason == "Permission denied"
    tool(tmp_path, "smartctl", "[]")
    assert read_health("sda").reason == "smartctl wrote no JSON object"


def test_doctor_and_bench_show_the_facts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = Facts(
        (Drive("nvme0n1", Link(8.0, 2, 16.0, 4), parse_smartctl(SMARTCTL)),),
        Raid("md0", "raid0", 65536, 1, 0),
    )
    monkeypatch.setattr(doctor, "facts_of", lambda _directory: found)
    (row,) = doctor._drives([str(tmp_path), str(tmp_path)])
    assert row.subject == "drive"
    assert row.value.splitlines() == found.describe()
    assert "another slot" in row.warning
    console = Console(width=200)
    with console.capture() as shown:
        report.show_facts(console, [found, found], [found])
    lines = shown.get().splitlines()
    assert lines[:3] == [*found.describe(), "before the load: nvme0n1 41 °C"]
    assert len(lines) == 4
    assert lines[3].startswith("note: nvme0n1: its link runs at 8 GT/s x2, of 16 GT/s x4")
    record = report.make_record("swap", {}, [], [tmp_path], [found])
    (drive,) = record["hardware"]["drives"]
    assert drive["facts"]["raid"]["chunk_bytes"] == 65536
    assert drive["facts"]["drives"][0]["health"]["used_percent"] == 3
    assert json.loads(json.dumps(record))["hardware"]["drives"][0]["facts"]["drives"]


@pytest.mark.privileged
def test_a_loop_device_is_a_drive_without_a_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = tmp_path / "image"
    image.write_bytes(bytes(1 << 20))
    device = subprocess.run(
        ["losetup", "--find", "--show", str(image)], check=True, capture_output=True, text=True
    ).stdout.strip()
    try:
        name = Path(device).name
        number = (drive_facts.SYSFS / "block" / name / "dev").read_text().strip()
        facts = facts_of_block(drive_facts.SYSFS / "dev" / "block" / number)
    finally:
        subprocess.run(["losetup", "--detach", device], check=True)
    (drive,) = facts.drives
    assert (drive.device, drive.link, facts.raid) == (name, None, None)
    assert drive.health.reason
    assert facts_of(tmp_path).raid is None
