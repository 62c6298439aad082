"""Facts of the drives below a directory: PCIe links and RAID from sysfs, temperature and wear from
SMART.

A directory is on one block device, which RAID or LVM may compose of several (its `slaves` in
sysfs). Each physical drive has a link and a health. smartctl or nvme-cli, whichever is installed,
reads SMART, mostly for root only; `Health.reason` says why SMART was not read.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from infinity._src.base.sizes import format_size

SYSFS = Path("/sys")
WORN_PERCENT = 90
"""Share of a drive's rated life from which on `Drive.warnings` warns."""
_TOOL_S = 10.0
_KELVIN = 273
# NVMe counts data in thousands of blocks of 512 bytes.
_DATA_UNIT_BYTES = 512_000
# Bit of an NVMe drive's critical warnings that stands for its temperature; all other bits are
# failures.
_HOT = 2
# Share of data in a link's bits, by 10^9 transfers per second; faster generations have 128/130.
_ENCODING = {2.5: 0.8, 5.0: 0.8}


@dataclasses.dataclass(frozen=True)
class Link:
    """PCIe link of a drive: its current and its largest speed and width. Speeds are in 10^9
    transfers per second and lane.
    """

    speed_gt_s: float
    width: int
    speed_max_gt_s: float
    width_max: int

    @property
    def bytes_per_s(self) -> float:
        """Bytes per second that the link carries in each direction, including protocol overhead."""
        share = _ENCODING.get(self.speed_gt_s, 128 / 130)
        return self.speed_gt_s * 1e9 / 8 * share * self.width

    @property
    def reduced(self) -> bool:
        return (self.speed_gt_s, self.width) != (self.speed_max_gt_s, self.width_max)


@dataclasses.dataclass(frozen=True)
class Raid:
    """Array of the kernel's md driver. degraded: members that are missing."""

    device: str
    level: str
    chunk_bytes: int | None
    members: int | None
    degraded: int


@dataclasses.dataclass(frozen=True)
class Health:
    """Figures of a drive's SMART; None for a figure that the drive does not report. used_percent:
    share of the drive's rated life, which may exceed 100. hot: the drive warns of its temperature.
    reason: why SMART was not read, or "".
    """

    source: str = ""
    reason: str = ""
    temperature_c: float | None = None
    used_percent: float | None = None
    written_bytes: int | None = None
    spare_percent: float | None = None
    failing: bool = False
    hot: bool = False


@dataclasses.dataclass(frozen=True)
class Drive:
    """One physical or virtual drive. link: None for a drive without a PCIe link."""

    device: str
    link: Link | None
    health: Health

    def describe(self) -> str:
        """Format the facts in one line: "nvme0n1: PCIe 16 GT/s x4 (7.9 GB/s), 41 °C, ..."."""
        parts = ["no PCIe link in sysfs" if self.link is None else _describe_link(self.link)]
        health = self.health
        if health.temperature_c is not None:
            parts.append(f"{health.temperature_c:g} °C")
        if health.used_percent is not None:
            parts.append(f"{health.used_percent:g} % of its rated life used")
        if health.written_bytes is not None:
            parts.append(f"{health.written_bytes / 1e12:.1f} TB written")
        if health.reason:
            parts.append(f"SMART unknown ({health.reason})")
        return f"{self.device}: {', '.join(parts)}"

    def warnings(self) -> Iterator[str]:
        """Yield a line, with a fix, for each problem of the drive."""
        link, health = self.link, self.health
        if link is not None and link.reduced:
            yield (
                f"{self.device}: its link runs at {link.speed_gt_s:g} GT/s x{link.width}, of "
                f"{link.speed_max_gt_s:g} GT/s x{link.width_max}; use another slot, and check in "
                "the BIOS whether slots share lanes"
            )
        if health.failing:
            yield f"{self.device}: SMART warns of a failure; replace the drive"
        if health.hot:
            yield f"{self.device}: SMART warns of its temperature; cool the drive"
        if health.used_percent is not None and health.used_percent >= WORN_PERCENT:
            yield (
                f"{self.device}: {health.used_percent:g} % of its rated life is used; plan to "
                "replace it"
            )


@dataclasses.dataclass(frozen=True)
class Facts:
    """Facts of all drives below one directory, and of their RAID array, if there is one."""

    drives: tuple[Drive, ...] = ()
    raid: Raid | None = None

    def describe(self) -> list[str]:
        """Format the facts, a line for the array and one for each drive."""
        lines = [_describe_raid(self.raid)] if self.raid is not None else []
        return lines + [drive.describe() for drive in self.drives]

    def warnings(self) -> list[str]:
        found = [warning for drive in self.drives for warning in drive.warnings()]
        if self.raid is not None and self.raid.degraded:
            found.append(f"{self.raid.device}: {self.raid.degraded} of its drives are missing")
        return found

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def facts_of(directory: str | os.PathLike[str], sysfs: Path = SYSFS) -> Facts:
    """Return the facts of the drives below a directory. Blocks while SMART is read.

    Empty for a directory whose file system is on no block device of sysfs (network, memory, btrfs).
    """
    device = Path(directory).stat().st_dev
    return facts_of_block(sysfs / "dev" / "block" / f"{os.major(device)}:{os.minor(device)}")


def facts_of_block(block: Path, health_of: Callable[[str], Health] | None = None) -> Facts:
    """Return the facts below a block device's folder in sysfs. health_of: reads a drive's SMART by
    its name; None: the installed tool.
    """
    nodes = list(_below(block))
    raid = next((found for node in nodes if (found := _raid(node)) is not None), None)
    bottom = {node: None for node in nodes if not _slaves(node)}
    read = health_of or read_health
    return Facts(
        tuple(
            Drive(node.name, _link(node), _with_temperature(read(node.name), node))
            for node in bottom
        ),
        raid,
    )


def thermometers_of(directory: str | os.PathLike[str], sysfs: Path = SYSFS) -> tuple[Path, ...]:
    """Return the files of sysfs with the temperatures of the drives below a directory; () if the
    kernel reports none. Every user may read these files.
    """
    device = Path(directory).stat().st_dev
    return thermometers_of_block(
        sysfs / "dev" / "block" / f"{os.major(device)}:{os.minor(device)}"
    )


def thermometers_of_block(block: Path) -> tuple[Path, ...]:
    """Return the temperature files of the drives below a block device's folder in sysfs."""
    found = [_thermometer(node) for node in dict.fromkeys(_below(block)) if not _slaves(node)]
    return tuple(path for path in found if path is not None)


def temperature_c(thermometer: Path) -> float | None:
    """Read a temperature file, in °C; None if reading fails."""
    found = _leading(thermometer)
    return None if found is None else found / 1000


def _thermometer(node: Path) -> Path | None:
    # The kernel's module nvme puts the file at the controller, drivetemp at the disk's device.
    for folder in (*_controllers(node), node / "device"):
        for pattern in ("hwmon*/temp1_input", "hwmon/hwmon*/temp1_input"):
            for path in sorted(folder.glob(pattern)):
                return path
    return None


def _with_temperature(health: Health, node: Path) -> Health:
    thermometer = _thermometer(node)
    if health.temperature_c is not None or thermometer is None:
        return health
    return dataclasses.replace(health, temperature_c=temperature_c(thermometer))


def _below(block: Path) -> Iterator[Path]:
    """Yield the whole device of a block device (of a partition, the drive), then all devices that
    compose it.
    """
    if not block.exists():
        return
    folder = block.resolve()
    # A partition has no `queue` directory: its parent directory is the drive.
    whole = next((node for node in (folder, folder.parent) if (node / "queue").is_dir()), None)
    if whole is None:
        return
    yield whole
    for slave in _slaves(whole):
        yield from _below(slave)


def _slaves(node: Path) -> list[Path]:
    folder = node / "slaves"
    return sorted(folder.iterdir()) if folder.is_dir() else []


def _raid(node: Path) -> Raid | None:
    md = node / "md"
    if not md.is_dir():
        return None
    return Raid(
        node.name,
        _text(md / "level"),
        _number(md / "chunk_size") or None,
        _number(md / "raid_disks"),
        _number(md / "degraded") or 0,
    )


def _link(node: Path) -> Link | None:
    """Return the link of the nearest PCI device above a drive in sysfs."""
    for start in _controllers(node) or [node]:
        for folder in (start, *start.parents):
            found = [
                _leading(folder / f"{which}_link_{what}")
                for which in ("current", "max")
                for what in ("speed", "width")
            ]
            speed, width, speed_max, width_max = found
            # A link that is down has width 0, or speed "Unknown".
            if speed and width:
                return Link(speed, int(width), speed_max or speed, int(width_max or width))
    return None


def _controllers(node: Path) -> list[Path]:
    """Return the folders of an NVMe drive's controllers; [] for other kinds of drives."""
    if node.parent.name.startswith("nvme-subsys"):
        # With several paths, the kernel puts drive and controllers into the subsystem's folder.
        beside = sorted(node.parent.glob("nvme[0-9]*"))
        return [path.resolve() for path in beside if path.name != node.name]
    return [node.parent] if re.fullmatch(r"nvme\d+", node.parent.name) else []


def _describe_link(link: Link) -> str:
    most = f" of {link.speed_max_gt_s:g} GT/s x{link.width_max}" if link.reduced else ""
    return f"PCIe {link.speed_gt_s:g} GT/s x{link.width}{most} ({link.bytes_per_s / 1e9:.1f} GB/s)"


def _describe_raid(raid: Raid) -> str:
    chunk = f", chunks of {format_size(raid.chunk_bytes)}" if raid.chunk_bytes else ""
    members = f" of {raid.members} drives" if raid.members else ""
    return f"{raid.device}: {raid.level}{members}{chunk}"


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    text = _text(path)
    return int(text) if text.isdigit() else None


def _leading(path: Path) -> float | None:
    """Read the number at the start of a file: 16.0 of "16.0 GT/s PCIe"."""
    found = re.match(r"\d+(\.\d+)?", _text(path))
    return float(found.group()) if found else None


# -- SMART -----------------------------------------------------------------------------------------


def read_health(device: str) -> Health:
    """Read a drive's SMART with smartctl, or with nvme-cli for NVMe drives. Blocks."""
    if shutil.which("smartctl"):
        return _ask(["smartctl", "-j", "-a", f"/dev/{device}"], parse_smartctl)
    if shutil.which("nvme") and device.startswith("nvme"):
        return _ask(["nvme", "smart-log", "-o", "json", f"/dev/{device}"], parse_nvme)
    return Health(reason="install smartctl (smartmontools), or for NVMe drives nvme-cli")


def _ask(command: Sequence[str], parse: Callable[[Any], Health]) -> Health:
    try:
        # The exit status is ignored: smartctl sets bits of it for a drive that once had errors.
        done = subprocess.run(
            command,
            check=False,
            capture_output=True,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            timeout=_TOOL_S,
            env={**os.environ, "LC_ALL": "C"},
        )
        found = json.loads(done.stdout)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Health(command[0], f"{command[0]} failed: {error}")
    except ValueError:
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()
        return Health(command[0], said[0] if said else f"{command[0]} wrote no JSON")
    if not isinstance(found, dict):
        return Health(command[0], f"{command[0]} wrote no JSON object")
    return parse(found)


def parse_smartctl(found: dict[str, Any]) -> Health:
    """Read the object that `smartctl -j -a` writes."""
    log = _part(found, "nvme_smart_health_information_log")
    # Adapters without a thermometer write 0.
    temperature = _float(_part(found, "temperature").get("current")) or None
    # From version 7.5 on smartctl reports the used life of every kind of drive.
    used = _float(_part(found, "endurance_used").get("current_percent"))
    written = _float(log.get("data_units_written"))
    passed = _part(found, "smart_status").get("passed")
    warning = _float(log.get("critical_warning"))
    health = Health(
        "smartctl",
        "",
        temperature,
        used if used is not None else _float(log.get("percentage_used")),
        None if written is None else int(written) * _DATA_UNIT_BYTES,
        _float(log.get("available_spare")),
        # Without warning bits `passed` decides. With them it does not: a hot NVMe drive that works
        # has not passed, either.
        *((passed is False, False) if warning is None else _failing_and_hot(warning)),
    )
    if passed is None and temperature is None and not log:
        messages = _part(found, "smartctl").get("messages") or [{}]
        said = messages[0].get("string") if isinstance(messages[0], dict) else None
        return Health("smartctl", str(said or "the drive has no SMART"))
    return health


def parse_nvme(found: dict[str, Any]) -> Health:
    """Read the object that `nvme smart-log -o json` writes."""
    kelvin, written = _float(found.get("temperature")), _float(found.get("data_units_written"))
    warning = found.get("critical_warning")
    # Versions 2.11 and 2.12 write an object with the bits' names beside the value.
    value = _float(warning.get("value") if isinstance(warning, dict) else warning)
    used = _float(found.get("percent_used"))
    if kelvin is None and used is None:
        return Health("nvme", str(found.get("error") or "nvme-cli reported no figures"))
    return Health(
        "nvme",
        "",
        # 0: the drive does not report its temperature.
        kelvin - _KELVIN if kelvin else None,
        used,
        None if written is None else int(written) * _DATA_UNIT_BYTES,
        _float(found.get("avail_spare")),
        *_failing_and_hot(value or 0.0),
    )


def _failing_and_hot(warning: float) -> tuple[bool, bool]:
    bits = int(warning)
    return bool(bits & ~_HOT), bool(bits & _HOT)


def _part(found: dict[str, Any], name: str) -> dict[str, Any]:
    part = found.get(name)
    return part if isinstance(part, dict) else {}


def _float(value: Any) -> float | None:
    # nvme-cli 2.1 to 2.3 writes counters of 128 bits as text.
    if isinstance(value, str) and re.fullmatch(r"\d+(\.\d+)?", value):
        return float(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value)
