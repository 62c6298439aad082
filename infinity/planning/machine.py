"""The machine that a plan is for: every figure with where it comes from."""

from __future__ import annotations

import dataclasses
from typing import Any

from infinity.aio.settings import IoSettings
from infinity.limits import EXAMPLE_TBW, Drives
from infinity.sizes import GIB

ASSUMED: dict[str, tuple[float, str]] = {
    "flops_per_gpu": (400e12, "sustained FLOP/s of one GPU: a large model's bf16 on an H100-class one"),
    "pcie_per_gpu": (50e9, "bytes/s to and from one GPU, each way: PCIe 5 x16"),
    "dram": (200e9, "bytes/s of the CPU's memory: one socket with 8 channels"),
    "tbw_per_drive": (EXAMPLE_TBW * 1e12, "bytes written that one drive is rated for: a consumer drive of 1 TB"),
    "read": (6.8e9, "bytes/s read from one drive: PCIe 4"),
    "write": (5.0e9, "bytes/s written to one drive: PCIe 4"),
}
"""What is taken where a figure is not given: (value, what it is)."""

CPU_FLOPS = 200e9
"""FLOP/s that are assumed where the CPU computes."""


@dataclasses.dataclass(frozen=True)
class Machine:
    """One node. `gpu_mem_bytes` is of one GPU; bandwidths are those of all drives together, and `shared` says that reads and
    writes take each other's time. gpus 0: the CPU computes, and device memory is the machine's own.

    drives: how many there are, for wear and for what another one would give. nvme_bytes: room for states, None: not known.
    sources: for each figure "given", "measured (...)" or "assumed".
    """

    gpus: int
    gpu_mem_bytes: float
    ram_bytes: float
    drives: int
    read_bytes_per_s: float
    write_bytes_per_s: float
    flops_per_gpu: float
    pcie_per_gpu: float
    dram_bytes_per_s: float
    tbw_per_drive: float
    nvme_bytes: float | None = None
    shared: bool = True
    sources: dict[str, str] = dataclasses.field(default_factory=dict, compare=False)

    @property
    def ranks(self) -> int:
        """Processes that train."""
        return max(self.gpus, 1)

    @property
    def flops(self) -> float:
        """Sustained FLOP/s of the whole node."""
        return self.ranks * self.flops_per_gpu

    @property
    def pcie_bytes_per_s(self) -> float:
        """Bytes per second between CPU and all GPUs, each way; 0.0 where the CPU computes."""
        return self.gpus * self.pcie_per_gpu

    @property
    def bandwidths(self) -> Drives | None:
        """All drives together; None without drives."""
        return Drives(self.read_bytes_per_s, self.write_bytes_per_s, self.shared) if self.drives else None

    def with_drives(self, drives: int) -> Machine:
        """The same with so many equal drives."""
        factor = drives / self.drives if self.drives else drives
        read = self.read_bytes_per_s if self.drives else ASSUMED["read"][0]
        write = self.write_bytes_per_s if self.drives else ASSUMED["write"][0]
        room = self.nvme_bytes * factor if self.nvme_bytes is not None and self.drives else self.nvme_bytes
        return dataclasses.replace(
            self, drives=drives, read_bytes_per_s=read * factor, write_bytes_per_s=write * factor, nvme_bytes=room
        )

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return dataclasses.asdict(self)


def describe_machine(
    *,
    gpus: int = 1,
    gpu_mem_bytes: float | None = None,
    ram_bytes: float = 64 * GIB,
    drives: int | None = None,
    read_bytes_per_s: float | None = None,
    write_bytes_per_s: float | None = None,
    flops_per_gpu: float | None = None,
    pcie_per_gpu: float | None = None,
    dram_bytes_per_s: float | None = None,
    tbw_per_drive: float | None = None,
    nvme_bytes: float | None = None,
    shared: bool = True,
    bench: IoSettings | None = None,
    bench_name: str = "",
) -> Machine:
    """A machine of what is given; the rest is measured (`bench`) or assumed, and `Machine.sources` says which.

    read_bytes_per_s, write_bytes_per_s: of all drives together. Raises: ValueError naming the figure and a fix.
    """
    sources: dict[str, str] = {}

    def figure(name: str, given: float | None, key: str) -> float:
        if given is not None:
            sources[name] = "given"
            return given
        value, what = ASSUMED[key]
        sources[name] = f"assumed ({what})"
        return value

    measured = list(bench.bandwidths.values()) if bench is not None else []
    if bench is not None and not measured:
        raise ValueError(
            f"{bench_name or 'the benchmark'} has no bandwidths; write it with: python -m infinity.bench swap --json FILE"
        )
    count = drives if drives is not None else max(len(measured), 1)
    read, write = read_bytes_per_s, write_bytes_per_s
    if measured:
        told = f"measured ({bench_name or 'bench'})"
        if read is None:
            read, sources["read"] = sum(pair[0] for pair in measured) * count / len(measured), told
        if write is None:
            write, sources["write"] = sum(pair[1] for pair in measured) * count / len(measured), told
    if read is None:
        read = figure("read", None, "read") * count
    if write is None:
        write = figure("write", None, "write") * count
    sources = {"read": "given", "write": "given"} | sources
    flops = flops_per_gpu
    if gpus == 0 and flops is None:
        flops, sources["flops"] = CPU_FLOPS, "assumed (FLOP/s of the CPU, which computes where there is no GPU)"
    machine = Machine(
        gpus=gpus,
        gpu_mem_bytes=gpu_mem_bytes if gpu_mem_bytes is not None else 80 * GIB,
        ram_bytes=ram_bytes,
        drives=count,
        read_bytes_per_s=read,
        write_bytes_per_s=write,
        flops_per_gpu=flops if "flops" in sources and flops is not None else figure("flops", flops, "flops_per_gpu"),
        pcie_per_gpu=figure("pcie", pcie_per_gpu, "pcie_per_gpu"),
        dram_bytes_per_s=figure("dram", dram_bytes_per_s, "dram"),
        tbw_per_drive=figure("tbw", tbw_per_drive, "tbw_per_drive"),
        nvme_bytes=nvme_bytes,
        shared=shared,
        sources=sources | {"gpu_mem": "given" if gpu_mem_bytes is not None else "assumed (80 GiB)"},
    )
    _check(machine)
    return machine


def _check(machine: Machine) -> None:
    if machine.gpus < 0 or machine.drives < 0:
        raise ValueError(f"gpus={machine.gpus}, drives={machine.drives}: give numbers of 0 or more")
    for name in ("gpu_mem_bytes", "ram_bytes", "flops_per_gpu", "pcie_per_gpu", "dram_bytes_per_s", "tbw_per_drive"):
        value = getattr(machine, name)
        if not value > 0 or value == float("inf"):
            raise ValueError(f"{name}={value}: give a positive number")
    if machine.drives:
        _ = machine.bandwidths  # checks them
