"""`infinity doctor`: checks whether this machine can offload, and says how to fix what is missing.

The command tries every capability instead of guessing it from a version. It lists warnings below
the table. The exit status is always 0.

Offloading needs the C extension and torch; offloading to NVMe also needs a usable directory, and
offloading from a GPU needs working copies to that GPU. Most other gaps cost speed only.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import platform
import shutil
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from infinity._src.base import openmp
from infinity._src.base.console import say
from infinity._src.base.cpu_features import BF16_INSTRUCTIONS, bf16_instructions
from infinity._src.base.sizes import GIB, format_size
from infinity._src.base.version import __version__
from infinity._src.cabi import native
from infinity._src.cabi.installation import EXTRA, install_line, lacking
from infinity._src.cabi.records import CHUNK_NUMEL
from infinity._src.measure import hardware
from infinity._src.measure.drive_facts import Facts, facts_of
from infinity._src.memory import numa
from infinity._src.memory.ram_budget import LARGE_COUNT, SMALL_COUNT
from infinity.aio import PoolSpec
from infinity.aio._memory_limits import cgroup_limit_bytes, memory_left_bytes
from infinity.aio._probe import (
    BLOCK_BYTES,
    DEPTH,
    DirectoryProbe,
    EngineProbe,
    ExecutorProbe,
    probe_directory,
    probe_engine,
    probe_executor,
)
from infinity.errors import DeviceCopyError

_PACKAGES = ("torch", "numpy", "cffi", "liburing", "safetensors", "transformers", "triton")
# Less than the states of a model with a billion parameters need, at 12 B per parameter.
_FREE_BYTES_LOW = 10 * GIB
# The pools of training in the `exact` state. Small slots hold parameters (2 bytes per element),
# large slots all states (12 bytes).
_SMALL = PoolSpec(SMALL_COUNT, 2 * CHUNK_NUMEL)
_LARGE = PoolSpec(LARGE_COUNT, 12 * CHUNK_NUMEL)


@dataclasses.dataclass(frozen=True)
class Finding:
    """One row of the table. warning: a fault and its fix; "" without a fault."""

    subject: str
    value: str
    warning: str = ""


def run_doctor(
    directories: Sequence[str] | None = None,
    console: Console | None = None,
    *,
    model: Path | None = None,
) -> int:
    """Print the findings for this machine and for `directories` (None: the default ones). model:
    also forecast training of this model on this machine. Returns 0.
    """
    console = console or Console()
    table = Table(title=f"infinity {__version__}", title_justify="left", show_header=False)
    table.add_column("subject", style="bold", no_wrap=True)
    table.add_column("value", overflow="fold")
    table.add_column("verdict", no_wrap=True)
    faults = []
    for finding in findings(directories, model=model):
        table.add_row(
            finding.subject,
            escape(finding.value),
            "[yellow]warning[/yellow]" if finding.warning else "[green]ok[/green]",
        )
        if finding.warning:
            faults.append(f"{finding.subject}: {finding.warning}")
    console.print(table)
    for fault in faults:
        say(console, f"[yellow]warning:[/yellow] {escape(fault)}")
    if not faults:
        console.print("nothing is missing")
    return 0


def findings(
    directories: Sequence[str] | None = None, *, model: Path | None = None
) -> Iterator[Finding]:
    """Run all checks, and yield their findings in the order of the table. Arguments as in
    `run_doctor`. Blocks while drives and kernels are tried.
    """
    engine = probe_engine()
    yield _backend(engine)
    yield _kernels()
    yield _huge_pages(engine)
    # Directories are probed first, since the executor's probe runs in the first usable directory.
    found = list(_directories(directories))
    usable = next((probe.path for probe, _ in found if probe is not None and probe.usable), None)
    executor = probe_executor(usable, small=_SMALL, large=_LARGE) if usable is not None else None
    yield _memlock(engine, executor)
    yield _memory()
    yield _numa()
    for _, finding in found:
        yield finding
    yield from _drives([probe.path for probe, _ in found if probe is not None and probe.usable])
    if executor is not None:
        yield _pools(engine, executor)
    if model is not None:
        yield _model(model, [probe for probe, _ in found if probe is not None and probe.usable])
    yield _gpu()
    yield _bf16()
    yield _waiting()
    yield _operations()
    yield _commands()
    versions = ", ".join(f"{name} {version}" for name in _PACKAGES if (version := _version(name)))
    yield Finding("versions", f"Python {platform.python_version()}, {versions}")
    cpus = os.sched_getaffinity(0)
    cores = f"{numa.core_count(cpus)} cores ({len(cpus)} processors)"
    yield Finding("machine", f"{hardware.cpu_model()}, {cores}, Linux {platform.release()}")


def _backend(engine: EngineProbe) -> Finding:
    if engine.io_uring:
        return Finding("I/O backend", "io_uring")
    if engine.native:
        return Finding(
            "I/O backend",
            "threads (native)",
            f"no io_uring: {engine.io_uring_reason}. Native threads replace io_uring, with about "
            "the same bandwidth for more CPU time",
        )
    return Finding("I/O backend", "none", f"nothing can be offloaded: {engine.native_reason}")


def _kernels() -> Finding:
    if native.available():
        return Finding("kernels", f"{native.isa()}; checksums: {native.crc32c_name()}")
    return Finding("kernels", "none", native.reason())


def _huge_pages(engine: EngineProbe) -> Finding:
    given = "given" if engine.huge_pages_work else "not given"
    value = f"{engine.huge_pages or 'setting unknown'}, {given}"
    if engine.huge_pages_work:
        return Finding("huge pages", value)
    return Finding(
        "huge pages",
        value,
        "drives run at half speed without them: echo madvise | sudo tee "
        "/sys/kernel/mm/transparent_hugepage/enabled",
    )


def _memlock(engine: EngineProbe, executor: ExecutorProbe | None) -> Finding:
    need = _SMALL.count * _SMALL.bytes + _LARGE.count * _LARGE.bytes
    limit = "unlimited" if engine.memlock_bytes is None else format_size(engine.memlock_bytes)
    value = f"{limit}; registering the pools takes {format_size(need)}" + (
        " (root is exempt)" if os.geteuid() == 0 else ""
    )
    # The executor's probe has tried to register the pools. Without a usable directory the probe did
    # not run: compare the limit.
    if executor is not None and not executor.error:
        short = not executor.registered and "memlock" in executor.registered_reason.lower()
    else:
        short = (
            engine.memlock_bytes is not None and engine.memlock_bytes < need and os.geteuid() != 0
        )
    warning = (
        "buffers cannot be registered with the kernel, which costs CPU time: "
        f"`ulimit -l {need // 1024}` or more"
    )
    return Finding("memlock limit", value, warning if short and engine.io_uring else "")


def _pools(engine: EngineProbe, executor: ExecutorProbe) -> Finding:
    if executor.error:
        return Finding("executor", "none", f"the executor cannot be opened: {executor.error}")
    value = (
        f"{executor.backend}, pools of {format_size(executor.pool_bytes)}, "
        f"{executor.huge_bytes * 100 // max(executor.pool_bytes, 1)} % in huge pages, "
        + ("registered" if executor.registered else "not registered")
    )
    warnings = []
    if executor.backend_reason and engine.io_uring:
        # Without io_uring the row "I/O backend" has this reason.
        warnings.append(executor.backend_reason)
    if not executor.registered:
        value += f" ({executor.registered_reason})" if executor.registered_reason else ""
    if engine.huge_pages_work and executor.huge_bytes < executor.pool_bytes // 2:
        warnings.append(
            "memory is too fragmented for huge pages: echo 1 | sudo tee /proc/sys/vm/compact_memory"
        )
    return Finding("executor", value, "; ".join(warnings))


def _memory() -> Finding:
    # `memory_left_bytes` also determines the default budget, so doctor and training agree.
    machine = hardware.machine()["memory_bytes"]
    limit = cgroup_limit_bytes()
    left = memory_left_bytes()
    cgroup = f"cgroup limit {format_size(limit)}" if limit is not None else "no cgroup limit"
    value = f"{format_size(machine)}, {cgroup}, {format_size(left)} available"
    warning = ""
    if left < GIB:
        binding = "the cgroup's limit" if limit is not None and limit < machine else "the machine"
        warning = (
            f"{binding} leaves less than 1 GiB: raise it, free memory, or set Policy.ram explicitly"
        )
    return Finding("memory", value, warning)


def _numa() -> Finding:
    try:
        import torch
    except ImportError:
        return Finding("NUMA", "unknown")  # the row "GPU" has the reason
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    devices = [torch.device("cuda", index) for index in range(count)]
    found = [numa.choose_node(numa.pci_address(device), number=0, ranks=1) for device in devices]
    # Without a GPU the CPU computes.
    found = found or [numa.choose_node(None, number=0, ranks=1)]
    # One line for devices of one node, in the order of devices.
    return Finding("NUMA", "\n".join(dict.fromkeys(place.reason for place in found)))


def _directories(
    directories: Sequence[str] | None,
) -> Iterator[tuple[DirectoryProbe | None, Finding]]:
    try:
        paths = (
            [Path(path) for path in directories] if directories else hardware.default_directories()
        )
    except ValueError as error:
        yield None, Finding("swap directory", "none", str(error))
        return
    for path in paths:
        probe = probe_directory(path)
        yield probe, _directory(probe)


def _directory(probe: DirectoryProbe) -> Finding:
    if not probe.usable:
        return Finding("swap directory", probe.path, probe.reason)
    found = hardware.drive(probe.path)
    device = " ".join(part for part in (found["device"], found["model"]) if part)
    total = shutil.disk_usage(probe.path).total
    value = (
        f"{probe.path}: "
        f"{probe.file_system or 'unknown file system'}{' on ' + device if device else ''}, "
        f"{format_size(probe.free_bytes)} of {format_size(total)} free, "
        + ("O_DIRECT" if probe.direct else "buffered")
        + (
            f" aligned to {probe.memory_alignment}/{probe.offset_alignment} B"
            if probe.offset_alignment
            else ""
        )
        + _queue(probe)
    )
    warnings = []
    if not probe.direct:
        warnings.append(
            f"swap goes through the page cache: {probe.direct_reason}; use ext4 or xfs on a drive, "
            "not a container's file system"
        )
    if probe.free_bytes < _FREE_BYTES_LOW:
        warnings.append("little space: states take 12 bytes per parameter")
    if not probe.preallocates:
        warnings.append(
            "the file system cannot preallocate: if the drive fills up, a write fails during "
            "training; use ext4 or xfs"
        )
    # The probe adapts requests to the drive's queue: smaller or fewer requests mean a short queue.
    if (probe.block_bytes, probe.depth) != (BLOCK_BYTES, DEPTH):
        warnings.append(
            f"the drive's queue is short: {probe.depth} requests of "
            f"{format_size(probe.block_bytes)} fit instead of {DEPTH} of "
            f"{format_size(BLOCK_BYTES)}; raise "
            f"/sys/block/{probe.limits.device}/queue/nr_requests or max_sectors_kb"
        )
    return Finding("swap directory", value, "; ".join(warnings))


def _drives(directories: Sequence[str]) -> Iterator[Finding]:
    """Report links, RAID and SMART of the drives below the directories. Directories on the same
    drives share a row.
    """
    shown: set[Facts] = set()
    for directory in directories:
        facts = facts_of(directory)
        if facts.drives and facts not in shown:
            shown.add(facts)
            yield Finding("drive", "\n".join(facts.describe()), "; ".join(facts.warnings()))


def _model(model: Path, drives: Sequence[DirectoryProbe]) -> Finding:
    try:
        # Imported here: the module imports torch, without which doctor still shows all other rows.
        from infinity._src.cli.plan import describe_model

        return Finding("model", *describe_model(model, drives))
    except (ImportError, ValueError, OSError) as error:
        return Finding("model", str(model), str(error))


def _queue(probe: DirectoryProbe) -> str:
    limits = probe.limits
    requests = f", requests of {format_size(probe.block_bytes)}, {probe.depth} in flight"
    if not limits.nr_requests:
        return requests + (
            f" ({limits.device} is virtual and reports no limit)"
            if limits.device
            else " (limits unknown)"
        )
    largest = format_size(limits.max_sectors_kb * 1024)
    return f"{requests} ({limits.device} takes {limits.nr_requests} of {largest})"


def _gpu() -> Finding:
    try:
        import torch
    except ImportError as error:
        return Finding("GPU", "unknown", f"torch does not import: {error}")
    if not torch.cuda.is_available():
        return Finding("GPU", "none; models run on the CPU")
    from infinity._src.memory.device import rocm_lacks

    names = [
        f"{torch.cuda.get_device_name(index)}, "
        f"{format_size(torch.cuda.get_device_properties(index).total_memory)}"
        for index in range(torch.cuda.device_count())
    ]
    lacking = rocm_lacks()
    return Finding(
        "GPU",
        "; ".join(names),
        f"{lacking}: models run on the CPU" if lacking else _copies_fail(torch.cuda.device_count()),
    )


def _copies_fail(device_count: int) -> str:
    """Return why models cannot be offloaded from these GPUs; "" if they can."""
    from infinity.aio import DeviceDriver

    try:
        native.load()
        for ordinal in range(device_count):
            # Opening the driver tests it; the driver's version would only allow a guess.
            DeviceDriver(ordinal)
    except (ImportError, DeviceCopyError) as error:
        return f"models that compute on a GPU cannot be offloaded: {error}"
    return ""


def _bf16() -> Finding:
    """Report whether the CPU has bf16 instructions, and the dtype of `--dtype auto` if the CPU
    computes.
    """
    found = bf16_instructions()
    if found:
        return Finding("bf16 on the CPU", f"{', '.join(found)}; --dtype auto computes in bfloat16")
    return Finding(
        "bf16 on the CPU",
        f"emulated: the CPU has none of {', '.join(BF16_INSTRUCTIONS)}; --dtype auto computes in "
        "float32",
        ""
        if _gpu_computes()
        else "a model in bf16 computes many times slower here than in fp32: infinity train uses "
        "float32 by default; in your own loop load the model in torch.float32. With state='exact' "
        "or 'bf16' the model's states at rest have the same size",
    )


def _gpu_computes() -> bool:
    try:
        import torch
    except ImportError:
        return False  # the row "GPU" has the reason
    return torch.cuda.is_available()


def _waiting() -> Finding:
    """Report whether torch's threads spin while they wait, in a training loop with this
    environment.
    """
    subject = "waiting threads"
    try:
        import torch
    except ImportError:
        return Finding(subject, "unknown")  # the row "GPU" has the reason
    reason = openmp.active_here()
    if not reason:
        return Finding(subject, "asleep")
    # A single thread never waits for another thread, and with a GPU the CPU computes little.
    if torch.get_num_threads() < 2 or torch.cuda.is_available():
        return Finding(subject, f"active ({reason})")
    return Finding(
        subject,
        f"active ({reason})",
        "if another job uses these cores, a step takes several times as long: "
        f"export {openmp.POLICY}=PASSIVE (infinity train and infinity bench set it themselves)",
    )


def _operations() -> Finding:
    """List the implementation of each operation of infinity.ops on the device that computes, with
    the reason, one line each. On a GPU each bitwise operation is tried.
    """
    try:
        import torch
    except ImportError:
        return Finding("operations", "unknown")  # the row "GPU" has the reason
    from infinity._src.kernels import choice
    from infinity._src.kernels.usual_trials import trials_of_usual_forms
    from infinity._src.memory.device import rocm_lacks

    device = (
        torch.device("cuda", torch.cuda.current_device())
        if torch.cuda.is_available() and not rocm_lacks()
        else torch.device("cpu")
    )
    lines, faults = [], []
    trials = trials_of_usual_forms()
    for op in choice.OPS.values():
        try:
            # A failed trial emits a warning, which the table shows as a fault.
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                chosen = choice.implementation(op.name, device, trials.get(op.name))
            faults += [str(warning.message) for warning in caught]
            reason = choice.why(op.name, device)
        except ValueError as error:
            lines.append(f"{op.name}: none")
            faults.append(str(error))
            continue
        other = "" if chosen == "torch" or op.bitwise else ", which rounds differently from torch"
        lines.append(f"{op.name}: {chosen} ({reason}){other}")
    # Operations fail for the same reason, so one fault suffices; the lines name each operation.
    return Finding("operations", "\n".join(lines), faults[0] if faults else "")


def _commands() -> Finding:
    """Report which commands lack packages. Training loops of users do not need these packages."""
    value = "; ".join(f"{command} lacks {', '.join(names)}" for command, names in lacking().items())
    if not value:
        return Finding("commands", "all have the packages that they need")
    return Finding("commands", value, f"the packages come with {install_line(EXTRA)}")


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
