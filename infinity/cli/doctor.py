"""`infinity doctor`: what this machine offers for offloading, what is missing, and what to do about it.

Every capability is tried, not guessed from a version. The exit status is 0 whatever is missing: infinity works without
any one of these, only slower; warnings are named below the table.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import platform
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from infinity import __version__, native
from infinity.aio.probe import DirectoryProbe, EngineProbe, probe_directory, probe_engine
from infinity.bench import hardware
from infinity.sizes import GIB, format_size

_PACKAGES = ("torch", "numpy", "cffi", "liburing", "safetensors", "transformers", "triton")
_FREE_BYTES_LOW = 10 * GIB


@dataclasses.dataclass(frozen=True)
class Finding:
    """One line of the table; `warning` says what is wrong and what to do, and is empty when all is well."""

    subject: str
    value: str
    warning: str = ""


def run_doctor(directories: Sequence[str] | None = None, console: Console | None = None) -> int:
    """Print the findings for this machine and for `directories` (None: the default ones). Returns 0."""
    console = console or Console()
    table = Table(title=f"infinity {__version__}", title_justify="left", show_header=False)
    table.add_column("subject", style="bold", no_wrap=True)
    table.add_column("value", overflow="fold")
    table.add_column("verdict", no_wrap=True)
    warnings = []
    for finding in findings(directories):
        table.add_row(finding.subject, finding.value, "[yellow]warning[/yellow]" if finding.warning else "[green]ok[/green]")
        if finding.warning:
            warnings.append(f"{finding.subject}: {finding.warning}")
    console.print(table)
    for warning in warnings:
        console.print(f"[yellow]warning:[/yellow] {warning}", highlight=False, soft_wrap=True)
    if not warnings:
        console.print("nothing is missing")
    return 0


def findings(directories: Sequence[str] | None = None) -> Iterator[Finding]:
    """Everything that is looked at, in the order shown."""
    engine = probe_engine()
    yield _backend(engine)
    yield _kernels()
    yield _huge_pages(engine)
    yield _memlock(engine)
    yield _memory()
    yield from _directories(directories)
    yield _gpu()
    versions = ", ".join(f"{name} {version}" for name in _PACKAGES if (version := _version(name)))
    yield Finding("versions", f"Python {platform.python_version()}, {versions}")
    yield Finding("machine", f"{hardware.cpu_model()}, {len(os.sched_getaffinity(0))} cores, Linux {platform.release()}")


def _backend(engine: EngineProbe) -> Finding:
    if engine.io_uring:
        return Finding("I/O backend", "io_uring")
    if engine.native:
        return Finding(
            "I/O backend",
            "threads (native)",
            f"no io_uring: {engine.io_uring_reason}. Native threads take over: about the same bandwidth for more CPU time",
        )
    return Finding(
        "I/O backend",
        "python",
        f"{engine.native_reason}. Python threads take over, and slow down beside a busy interpreter: "
        "install a C compiler and reinstall infinity",
    )


def _kernels() -> Finding:
    if native.available():
        return Finding("kernels", f"{native.isa()}; checksums: {native.crc32c_name()}")
    return Finding("kernels", "torch", f"{native.reason()}. Updates run as torch operations, with the same results, slower")


def _huge_pages(engine: EngineProbe) -> Finding:
    value = f"{engine.huge_pages or 'setting unknown'}, {'given' if engine.huge_pages_work else 'not given'}"
    if engine.huge_pages_work:
        return Finding("huge pages", value)
    return Finding(
        "huge pages",
        value,
        "drives run at half speed without them: echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled",
    )


def _memlock(engine: EngineProbe) -> Finding:
    if engine.memlock_bytes is None:
        return Finding("memlock limit", "unlimited")
    value = format_size(engine.memlock_bytes)
    if os.geteuid() == 0 or engine.memlock_bytes >= GIB:
        return Finding("memlock limit", value + (" (root is exempt)" if os.geteuid() == 0 else ""))
    return Finding(
        "memlock limit",
        value,
        "buffers are not registered with the kernel, which costs CPU time but little bandwidth: raise `ulimit -l`",
    )


def _memory() -> Finding:
    # The ledger is what training itself asks, so that doctor and budget never disagree. It needs no torch.
    from infinity.memory.ledger import memory_left_bytes

    machine = hardware.machine()["memory_bytes"]
    limit = cgroup_limit_bytes()
    left = memory_left_bytes()
    cgroup = f"cgroup limit {format_size(limit)}" if limit is not None else "no cgroup limit"
    value = f"{format_size(machine)}, {cgroup}, {format_size(left)} available"
    warning = ""
    if left < GIB:
        warning = "less than 1 GiB is available: set Policy.ram explicitly, or free memory"
    return Finding("memory", value, warning)


def cgroup_limit_bytes() -> int | None:
    """The tightest memory limit of this process's cgroups (version 2, else 1); None without one."""
    limits = []
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    root = Path("/sys/fs/cgroup")
    for line in lines:
        _, controllers, inner = line.split(":", 2)
        if controllers == "":
            folder, base, name = root / inner.lstrip("/"), root, "memory.max"
        elif "memory" in controllers.split(","):
            base = root / "memory"
            folder, name = base / inner.lstrip("/"), "memory.limit_in_bytes"
        else:
            continue
        # A limit of any ancestor binds too. In a container the path may be the host's and missing here.
        for place in (folder, *folder.parents):
            if (place / name).is_file():
                text = (place / name).read_text(encoding="ascii").strip()
                # Version 1 writes "no limit" as a number near 2^63.
                if text.isdigit() and int(text) < 1 << 60:
                    limits.append(int(text))
            if place == base:
                break
    return min(limits, default=None)


def _directories(directories: Sequence[str] | None) -> Iterator[Finding]:
    try:
        paths = [Path(path) for path in directories] if directories else hardware.default_directories()
    except ValueError as error:
        yield Finding("swap directory", "none", str(error))
        return
    for path in paths:
        yield _directory(probe_directory(path))


def _directory(probe: DirectoryProbe) -> Finding:
    if not probe.usable:
        return Finding("swap directory", probe.path, probe.reason)
    found = hardware.drive(probe.path)
    device = " ".join(part for part in (found["device"], found["model"]) if part)
    total = shutil.disk_usage(probe.path).total
    value = (
        f"{probe.path}: {probe.file_system or 'unknown file system'}{' on ' + device if device else ''}, "
        f"{format_size(probe.free_bytes)} of {format_size(total)} free, "
        + ("O_DIRECT" if probe.direct else "buffered")
        + (f" aligned to {probe.memory_alignment}/{probe.offset_alignment} B" if probe.offset_alignment else "")
    )
    warnings = []
    if not probe.direct:
        warnings.append("the file system refuses O_DIRECT, so swap goes through the page cache; use ext4 or xfs on a drive")
    if probe.free_bytes < _FREE_BYTES_LOW:
        warnings.append("little room: states take 12 bytes per parameter")
    if probe.offset_alignment > 4096 or probe.memory_alignment > 4096:
        warnings.append("the drive wants more than 4096-byte alignment, which infinity does not give")
    return Finding("swap directory", value, "; ".join(warnings))


def _gpu() -> Finding:
    try:
        import torch
    except ImportError as error:
        return Finding("GPU", "unknown", f"torch does not import: {error}")
    if not torch.cuda.is_available():
        return Finding("GPU", "none; models run on the CPU")
    names = [
        f"{torch.cuda.get_device_name(index)}, {format_size(torch.cuda.get_device_properties(index).total_memory)}"
        for index in range(torch.cuda.device_count())
    ]
    return Finding("GPU", "; ".join(names))


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
