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

    drives: how many there are, for wear and for what another one would give. busiest_share: of the data, on the drive that has
    most of it; data follows bandwidth. None: they are equal. nvme_bytes: room for states, None: not known.
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
    busiest_share: float | None = None
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

    @property
    def worn_drives(self) -> float:
        """How many drives would last as long as these do, if all wore alike: the busiest one decides."""
        return 1 / self.busiest_share if self.busiest_share else float(max(self.drives, 1))

    def with_drives(self, drives: int) -> Machine:
        """The same with so many drives, like those that there are."""
        factor = drives / self.drives if self.drives else drives
        read = self.read_bytes_per_s if self.drives else ASSUMED["read"][0]
        write = self.write_bytes_per_s if self.drives else ASSUMED["write"][0]
        room = self.nvme_bytes * factor if self.nvme_bytes is not None and self.drives else self.nvme_bytes
        return dataclasses.replace(
            self,
            drives=drives,
            read_bytes_per_s=read * factor,
            write_bytes_per_s=write * factor,
            busiest_share=self.busiest_share / factor if self.busiest_share else None,
            nvme_bytes=room,
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

    count, read, write, busiest = _drives(drives, read_bytes_per_s, write_bytes_per_s, bench, bench_name, sources)
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
        pcie_per_gpu=figure("pcie", pcie_per_gpu, "pcie_per_gpu") if gpus else ASSUMED["pcie_per_gpu"][0],
        dram_bytes_per_s=figure("dram", dram_bytes_per_s, "dram"),
        tbw_per_drive=figure("tbw", tbw_per_drive, "tbw_per_drive") if count else ASSUMED["tbw_per_drive"][0],
        nvme_bytes=nvme_bytes,
        shared=shared,
        busiest_share=busiest,
        sources=sources | {"gpu_mem": "given" if gpu_mem_bytes is not None else "assumed (80 GiB)"},
    )
    _check(machine)
    return machine


def _drives(
    drives: int | None,
    read: float | None,
    write: float | None,
    bench: IoSettings | None,
    bench_name: str,
    sources: dict[str, str],
) -> tuple[int, float, float, float | None]:
    """(how many, read, write, the busiest one's share) of the drives; writes where each comes from to `sources`."""
    measured = list(bench.bandwidths.values()) if bench is not None else []
    told = bench_name or "bench"
    if bench is not None and not measured:
        raise ValueError(f"{told} has no bandwidths; write it with: python -m infinity.bench swap --json FILE")
    count = drives if drives is not None else max(len(measured), 1)
    if not count:
        if (read, write, bench) != (None, None, None):
            raise ValueError("--drives 0 beside --nvme-read, --nvme-write or --bench: leave one or the other out")
        return 0, 0.0, 0.0, None
    if drives is None and not measured:
        sources["drives"] = "assumed (1)"
    found, busiest = [], None
    if measured:
        speeds = [2 / (1 / pair[0] + 1 / pair[1]) for pair in measured]  # as the engine divides the data
        busiest = max(speeds) / sum(speeds) * len(measured) / count
    for index, (name, given) in enumerate((("read", read), ("write", write))):
        value, source = given, "given"
        if value is None and measured:
            scaled = f", scaled from {len(measured)} drives to {count}" if count != len(measured) else ""
            value, source = sum(pair[index] for pair in measured) * count / len(measured), f"measured ({told}{scaled})"
        elif value is None:
            value, what = ASSUMED[name]
            value, source = value * count, f"assumed ({what})"
        found.append(value)
        sources[name] = source
    return count, found[0], found[1], busiest


def _check(machine: Machine) -> None:
    if machine.gpus < 0 or machine.drives < 0:
        raise ValueError(f"--gpus {machine.gpus}, --drives {machine.drives}: give numbers of 0 or more")
    for name in ("gpu_mem_bytes", "ram_bytes", "flops_per_gpu", "pcie_per_gpu", "dram_bytes_per_s", "tbw_per_drive"):
        value = getattr(machine, name)
        if not value > 0 or value == float("inf"):
            raise ValueError(f"{name}={value}: give a positive number")
    if machine.drives:
        _ = machine.bandwidths  # checks them
