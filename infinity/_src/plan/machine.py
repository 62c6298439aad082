"""Machine of a plan: GPUs, memory and drives of a node, and the source of each figure.

The user gives a figure, or `python -m infinity.bench` measures it, or the GPU's maker states it, or
a plan assumes it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

from infinity._src.base.sizes import GIB, format_size
from infinity._src.memory.roofline import EXAMPLE_TBW, Drives
from infinity.aio import IoSettings

if TYPE_CHECKING:
    # typing has it from Python 3.11 on.
    from typing_extensions import Unpack

# -- Kinds of GPU ----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class GpuKind:
    """One kind of GPU.

    mem_bytes: memory that the driver gives to programs. flops_peak: the maker's FLOP/s of dense
    bf16 with fp32 sums. flops: FLOP/s sustained in training; assumed: 0.4 of the peak on H100 and
    H200, whose peak needs large matrices, 0.54 on A100, 0.6 on consumer cards. hbm_bytes_per_s:
    bandwidth of the GPU's memory. pcie_bytes_per_s: bandwidth of one GPU's link to the CPU, each
    way. peers_bytes_per_s: bandwidth of one GPU to other GPUs, each way; None: transfers between
    GPUs go through the CPU's memory. fp32_peak: FLOP/s in fp32 without tensor cores, which torch
    uses unless TF32 is allowed; training sustains the share FP32_SHARE.
    """

    name: str
    title: str
    mem_bytes: float
    flops_peak: float
    flops: float
    hbm_bytes_per_s: float
    pcie_bytes_per_s: float
    peers_bytes_per_s: float | None
    fp32_peak: float


# Large pinned copies reach these rates on x16 links of 31.5 and 63 GB/s.
PCIE4, PCIE5 = 25e9, 50e9
# Two GPUs share the 450 GB/s, each way, of a Grace CPU's NVLink-C2C.
C2C = 225e9
FP32_SHARE = 0.7
"""Share of a GPU's peak in fp32 that training sustains, assumed."""

UNSUPPORTED = ("mi300x", "mi325x", "mi355x", "mi250x")
"""AMD's GPUs, from which the engine cannot offload models (`memory.device`): known names, so that
the error can say so."""

KINDS = {
    kind.name: kind
    for kind in (
        GpuKind("rtx3090", "GeForce RTX 3090, 24 GB", 23.6 * GIB, 71e12, 43e12, 936e9, PCIE4, None,
                35.6e12),
        GpuKind("rtx4090", "GeForce RTX 4090, 24 GB", 23.6 * GIB, 165e12, 100e12, 1008e9, PCIE4,
                None, 82.6e12),
        GpuKind("rtx5090", "GeForce RTX 5090, 32 GB", 31.3 * GIB, 209e12, 125e12, 1792e9, PCIE5,
                None, 104.8e12),
        GpuKind("a100", "A100 SXM, 80 GB", 79.1 * GIB, 312e12, 170e12, 2039e9, PCIE4, 300e9,
                19.5e12),
        GpuKind("h100", "H100 SXM, 80 GB", 79.1 * GIB, 989e12, 400e12, 3350e9, PCIE5, 450e9, 67e12),
        GpuKind("h200", "H200 SXM, 141 GB", 139.7 * GIB, 989e12, 400e12, 4800e9, PCIE5, 450e9,
                67e12),
        GpuKind("b200", "B200 SXM, 180 GB", 178.3 * GIB, 2250e12, 900e12, 7670e9, PCIE5, 900e9,
                75e12),
        GpuKind("gb200", "GB200, 186 GB", 184.3 * GIB, 2500e12, 1000e12, 8000e9, C2C, 900e9, 80e12),
        GpuKind("l40s", "L40S, 48 GB", 44.4 * GIB, 362e12, 217e12, 864e9, PCIE4, None, 91.6e12),
        GpuKind("a6000", "RTX A6000, 48 GB", 47.4 * GIB, 155e12, 93e12, 768e9, PCIE4, None,
                38.7e12),
    )
}  # fmt: skip


def guess_kind(mem_bytes: float | None) -> GpuKind:
    """Guess the kind of a GPU from its memory in bytes; None: an H100."""
    if mem_bytes is None:
        return KINDS["h100"]
    # The kinds have 24, 32, 80 and 141 GB; each threshold lies between two of these sizes.
    if mem_bytes <= 30 * GIB:
        return KINDS["rtx4090"]
    if mem_bytes <= 40 * GIB:
        return KINDS["rtx5090"]
    return KINDS["h100" if mem_bytes <= 100 * GIB else "h200"]


def read_updates(path: Path) -> dict[str, float]:
    """Read the parameters that one core updates per second, by `Policy.state`, from a record of
    `infinity bench adam --json`. If an older record lacks a state, its rate is the default from
    `UPDATES_PER_CORE`, scaled by the record's rate of "exact".

    Raises: ValueError if the file cannot be read or is not such a record.
    """
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        rows = [
            row
            for row in record["rows"]
            if (row["name"], row["isa"], row["where"]) == ("update", record["isa"], "memory")
        ]
        rates = {row["state"]: row["gparam_per_s"] * 1e9 / record["threads"] for row in rows}
        states = [row["state"] for row in rows]
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(
            f"{path} is no record of updates ({error}); write it with: "
            "python -m infinity.bench adam --json FILE"
        ) from error
    if states.count("exact") != 1 or not min(rates.values()) > 0:
        raise ValueError(
            f"{path} must have 1 rate of the state 'exact' in memory, and positive rates only; it "
            f"has {states.count('exact')}, and the rates {rates}; write it with: "
            "python -m infinity.bench adam --json FILE"
        )
    scale = rates["exact"] / UPDATES_PER_CORE["exact"]
    return {state: rates.get(state, rate * scale) for state, rate in UPDATES_PER_CORE.items()}


def host_links(gpus: int) -> int:
    """Return the assumed number of links between the CPU and this number of GPUs: one link for each
    GPU up to two GPUs, else one link behind a switch for each pair of GPUs.
    """
    return gpus if gpus <= 2 else -(-gpus // 2)


# -- The machine -----------------------------------------------------------------------------------


ASSUMED: dict[str, tuple[float, str]] = {
    "dram": (200e9, "one socket with 8 channels"),
    "dram of several GPUs": (
        400e9,
        "two sockets with 8 channels each, where there are more than 2 GPUs",
    ),
    "cores": (32, "one socket"),
    "cores of several GPUs": (64, "two sockets, where there are more than 2 GPUs"),
    "tbw": (EXAMPLE_TBW * 1e12, "a consumer drive of 1 TB"),
    "read": (6.8e9, "PCIe 4 drives"),
    "write": (5.0e9, "PCIe 4 drives"),
}
"""Assumed figures: (value, text of the source). `KINDS` has the figures of GPUs."""

POSITIVE = (
    "gpu_mem_bytes", "ram_bytes", "flops_per_gpu", "flops_peak_per_gpu", "pcie_per_gpu",
    "pcie_host", "peers_per_gpu", "hbm_per_gpu", "dram_bytes_per_s",
    "tbw_per_drive", "link_bytes_per_s", "cores",
)  # fmt: skip

UPDATES_PER_CORE = {"exact": 0.507e9, "bf16": 0.400e9, "compact": 0.248e9}
"""Parameters that one core updates per second without checksums, measured on a Xeon of 2.5 GHz with
AVX-512 (bench/results/kernels.jsonl)."""

CHECKSUMS_PER_CORE = 12.7e9
"""Bytes per second for which one core computes checksums during an "exact" update. A core updates
0.507e9 parameters per second without checksums, and 0.259e9 if it also computes checksums of 24
bytes for each parameter: 24 / (1 / 0.259e9 - 1 / 0.507e9)."""

LINK = 100e9 / 8
"""Bytes per second between one node and all other nodes, each way; assumed: 100 Gbit/s."""

CPU_FLOPS = 200e9
"""Sustained FLOP/s if the CPU computes; assumed."""


@dataclasses.dataclass(frozen=True)
class Machine:
    """One node, and the number of such nodes. Rates are bytes per second or FLOP/s.

    gpus: GPUs of a node; 0: the CPU computes, in `processes` processes, and device memory is a part
        of the RAM.
    gpu_mem_bytes: memory of one GPU; None without GPUs.
    drives: drives of a node, for wear and for the prediction with another drive.
    read_bytes_per_s, write_bytes_per_s: bandwidth of all drives of a node together. shared: True if
        reads and writes share the drives' time.
    flops_per_gpu: sustained FLOP/s of one GPU. flops_peak_per_gpu: peak of one GPU, for MFU.
    pcie_per_gpu: bandwidth of one GPU's link to the CPU, each way. pcie_host: bandwidth of all
        these links together; None: beyond two GPUs each pair shares one link.
    peers_per_gpu: bandwidth of one GPU to other GPUs, each way; None: transfers between GPUs go
        through the CPU's memory.
    hbm_per_gpu: bandwidth of one GPU's memory.
    tbw_per_drive: bytes that one drive is rated to write in its life.
    nvme_bytes: capacity for states; None: not known.
    busiest_share: share of the data on the drive with the most data (the engine divides data by
        bandwidth); None: all drives have the same share.
    nodes: number of such nodes. link_bytes_per_s: bandwidth between one node and all other nodes,
        each way.
    cores: physical cores of a node. updates_per_core: parameters that one core updates per second,
        by `Policy.state`, without checksums.
    sources: text for each figure: "given", "measured (...)", or the assumption.
    """

    gpus: int
    gpu_mem_bytes: float | None
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
    flops_peak_per_gpu: float = KINDS["h100"].flops_peak
    hbm_per_gpu: float = KINDS["h100"].hbm_bytes_per_s
    peers_per_gpu: float | None = None
    pcie_host: float | None = None
    processes: int = 1
    nodes: int = 1
    link_bytes_per_s: float = LINK
    cores: int = int(ASSUMED["cores"][0])
    updates_per_core: Mapping[str, float] = dataclasses.field(
        default_factory=lambda: dict(UPDATES_PER_CORE)
    )
    # Not compared: equal figures give equal predictions, whatever their sources.
    sources: dict[str, str] = dataclasses.field(default_factory=dict, compare=False)

    @property
    def ranks(self) -> int:
        """Training processes of a node: one for each GPU; `processes` if the CPU computes."""
        return self.gpus or self.processes

    @property
    def world(self) -> int:
        """Training processes of all nodes."""
        return self.nodes * self.ranks

    @property
    def device_bytes(self) -> float:
        """Memory of one rank's device; if the CPU computes, an even part of the RAM."""
        return self.ram_bytes / self.ranks if self.gpu_mem_bytes is None else self.gpu_mem_bytes

    @property
    def flops(self) -> float:
        """Sustained FLOP/s of a node. Without GPUs, `flops_per_gpu` is the rate of all processes
        together."""
        return max(self.gpus, 1) * self.flops_per_gpu

    @property
    def pcie_bytes_per_s(self) -> float:
        """Bytes per second between the CPU and all GPUs of a node, each way; 0.0 without GPUs."""
        shared = (
            self.pcie_host
            if self.pcie_host is not None
            else host_links(self.gpus) * self.pcie_per_gpu
        )
        # A given `pcie_host` may exceed the sum of the GPUs' links.
        return min(self.gpus * self.pcie_per_gpu, shared)

    @property
    def bandwidths(self) -> Drives | None:
        """Bandwidths of all drives of a node together; None without drives."""
        return (
            Drives(self.read_bytes_per_s, self.write_bytes_per_s, self.shared)
            if self.drives
            else None
        )

    @property
    def worn_drives(self) -> float:
        """Number of evenly worn drives that would last as long as the busiest of these drives."""
        return 1 / self.busiest_share if self.busiest_share else float(max(self.drives, 1))

    def with_drives(self, drives: int) -> Machine:
        """Return a copy with this number of drives; bandwidths and capacity scale with it."""
        # A machine without drives has no bandwidths to scale: use the figures assumed for a drive.
        factor = drives / self.drives if self.drives else drives
        read = self.read_bytes_per_s if self.drives else ASSUMED["read"][0]
        write = self.write_bytes_per_s if self.drives else ASSUMED["write"][0]
        capacity = (
            self.nvme_bytes * factor
            if self.nvme_bytes is not None and self.drives
            else self.nvme_bytes
        )
        return dataclasses.replace(
            self,
            drives=drives,
            read_bytes_per_s=read * factor,
            write_bytes_per_s=write * factor,
            # More drives share the same data, so the busiest drive has less.
            busiest_share=self.busiest_share / factor if self.busiest_share else None,
            nvme_bytes=capacity,
        )

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


class Figures(TypedDict, total=False):
    """Fields of `Machine` that a caller may pass, in the units of `Machine`; None: not passed."""

    gpu_mem_bytes: float | None
    read_bytes_per_s: float | None
    write_bytes_per_s: float | None
    flops_per_gpu: float | None
    flops_peak_per_gpu: float | None
    pcie_per_gpu: float | None
    pcie_host: float | None
    peers_per_gpu: float | None
    dram_bytes_per_s: float | None
    tbw_per_drive: float | None
    link_bytes_per_s: float | None
    cores: float | None


def describe_machine(
    *,
    gpus: int = 1,
    gpu: str | None = None,
    ram_bytes: float = 64 * GIB,
    drives: int | None = None,
    nvme_bytes: float | None = None,
    shared: bool = True,
    bench: IoSettings | None = None,
    bench_name: str = "",
    ranks: int | None = None,
    nodes: int = 1,
    updates_per_core: Mapping[str, float] | None = None,
    updates_name: str = "",
    float32: bool = False,
    **figures_given: Unpack[Figures],
) -> Machine:
    """Describe a machine. Figures that the caller does not pass are from the kind of GPU (`gpu`), a
    record (`bench`, `updates_per_core`), or assumptions; `Machine.sources` says which.

    ram_bytes, drives, nvme_bytes: RAM, number of drives (None: the number in `bench`, else one) and
    capacity of all drives of a node. bench_name, updates_name: names of the records for `sources`.
    ranks: processes of a node if the CPU computes. float32: True if GPUs compute in fp32.

    Raises: ValueError, whose text names the figure and a fix.
    """
    given: dict[str, Any] = {**figures_given}
    _check_ranks(gpus, ranks, nodes, given.get("link_bytes_per_s"))
    kind = _known_kind(gpu) if gpu is not None else guess_kind(given.get("gpu_mem_bytes"))
    whence = f"of {kind.name} ({kind.title})" if gpu is not None else f"assumed: {kind.title}"
    sources: dict[str, str] = {}
    figures: dict[str, Any] = {}

    def take(rows: Iterable[_Assumed]) -> None:
        for row in rows:
            value = given.pop(row.field, None)
            figures[row.field] = row.default if value is None else value
            if row.source:
                sources[row.name] = row.source if value is None else "given"

    take(_of_gpus(gpus, kind, whence, given.get("pcie_per_gpu"), float32=float32))
    if not gpus:
        # If the CPU computes, no prediction depends on these three figures.
        for name in ("flops_peak_per_gpu", "pcie_host", "peers_per_gpu"):
            given.pop(name, None)
        # Predictions multiply this figure by 0 GPUs, but `_check` requires a positive number.
        given["pcie_per_gpu"] = kind.pcie_bytes_per_s
    count, found = _drives(
        drives, given.pop("read_bytes_per_s", None), given.pop("write_bytes_per_s", None),
        bench, bench_name, sources,
    )  # fmt: skip
    take(_of_node(gpus > 2, nodes, count))
    sources["adam"] = (
        f"measured ({updates_name})" if updates_per_core else "of a Xeon of 2.5 GHz, assumed"
    )
    machine = Machine(
        gpus=gpus,
        ram_bytes=ram_bytes,
        drives=count,
        nvme_bytes=nvme_bytes,
        shared=shared,
        # Each GPU has one rank, so `ranks` matters only if the CPU computes.
        processes=1 if gpus or ranks is None else ranks,
        nodes=nodes,
        updates_per_core={**UPDATES_PER_CORE, **(updates_per_core or {})},
        sources=sources,
        **{**given, **found, **figures},
    )
    _check(machine)
    return machine


def _known_kind(gpu: str) -> GpuKind:
    gpu = gpu.lower()
    if gpu in UNSUPPORTED:
        raise ValueError(
            f"--gpu {gpu} is not supported: models cannot be offloaded from AMD GPUs (docs/"
            f"guide-gpu.md); use {', '.join(KINDS)}, or --gpus 0 for its CPUs"
        )
    if gpu not in KINDS:
        raise ValueError(
            f"--gpu {gpu} is not known; use {', '.join(KINDS)}, or --gpu-mem, --flops, "
            "--flops-peak and --pcie"
        )
    return KINDS[gpu]


def _check_ranks(gpus: int, ranks: int | None, nodes: int, link_bytes_per_s: float | None) -> None:
    if ranks is not None and ranks < 1:
        raise ValueError(f"--ranks {ranks}: give a number of 1 or more")
    if ranks is not None and gpus and ranks != gpus:
        raise ValueError(
            f"--ranks {ranks} beside --gpus {gpus}: each GPU has one rank; leave --ranks out, or "
            f"set --gpus {ranks}"
        )
    if nodes < 1:
        raise ValueError(f"--nodes {nodes}: give a number of 1 or more")
    if link_bytes_per_s is not None and nodes == 1:
        raise ValueError(
            "--link-gbps is the link between nodes, and there is one: add --nodes, or leave it out "
            "(GPUs: --peers)"
        )


class _Assumed(NamedTuple):
    """A figure with a default. name: key in `Machine.sources`. field: field of `Machine`. source:
    text for `Machine.sources`; "": no prediction for this machine depends on the figure.
    """

    name: str
    field: str
    default: float | None
    source: str


def _of_gpus(
    gpus: int, kind: GpuKind, whence: str, pcie: float | None, *, float32: bool
) -> Iterator[_Assumed]:
    """Yield the figures of the GPUs. pcie: the user's bytes per second of one GPU's link, or None.
    float32: True if the GPUs compute in fp32.
    """
    if not gpus:
        yield _Assumed("gpu_mem", "gpu_mem_bytes", None, "")
        rate = f"{CPU_FLOPS / 1e12:g} TFLOP/s, assumed: the CPU computes"
        yield _Assumed("flops", "flops_per_gpu", CPU_FLOPS, rate)
        return
    between, peak, flops, how = kind.peers_bytes_per_s, kind.flops_peak, kind.flops, ""
    if float32:
        peak, flops, how = kind.fp32_peak, FP32_SHARE * kind.fp32_peak, " in float32"
    # Beyond two GPUs, pairs share links to the CPU; the source of `pcie_host` says so.
    links = host_links(gpus) * (kind.pcie_bytes_per_s if pcie is None else pcie)
    for name, field, default, text, counts in (
        ("gpu_mem", "gpu_mem_bytes", kind.mem_bytes, format_size(kind.mem_bytes), True),
        ("flops", "flops_per_gpu", flops, f"{flops / 1e12:.3g} TFLOP/s sustained{how}", True),
        ("flops_peak", "flops_peak_per_gpu", peak, f"{peak / 1e12:g} TFLOP/s{how}", True),
        ("pcie", "pcie_per_gpu", kind.pcie_bytes_per_s,
         f"{_rate(kind.pcie_bytes_per_s)} each way", True),
        # No argument sets this figure, and only updates on the device use it: show no source.
        ("hbm", "hbm_per_gpu", kind.hbm_bytes_per_s, "", False),
        ("peers", "peers_per_gpu", between,
         f"{_rate(between)} each way" if between else "through the CPU's memory", gpus > 1),
    ):  # fmt: skip
        yield _Assumed(name, field, default, f"{text}, {whence}" if counts else "")
    assumed = f"{_rate(links)} each way, assumed: two GPUs share a link to the CPU"
    yield _Assumed("pcie_host", "pcie_host", None, assumed if gpus > 2 else "")


def _of_node(several: bool, nodes: int, drives: int) -> Iterator[_Assumed]:
    """Yield the figures of CPUs, links between nodes and wear. several: True for more than two
    GPUs."""
    more = " of several GPUs" if several else ""
    dram, what = ASSUMED[f"dram{more}"]
    yield _Assumed("dram", "dram_bytes_per_s", dram, f"{_rate(dram)}, assumed: {what}")
    cores, what = ASSUMED[f"cores{more}"]
    yield _Assumed("cores", "cores", int(cores), f"{cores:g}, assumed: {what}")
    link = f"{LINK * 8 / 1e9:g} Gbit/s each way, assumed" if nodes > 1 else ""
    yield _Assumed("link_gbps", "link_bytes_per_s", LINK, link)
    tbw, what = ASSUMED["tbw"]
    rated = f"{tbw / 1e12:g} TB, assumed: {what}" if drives else ""
    yield _Assumed("tbw", "tbw_per_drive", tbw, rated)


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:g} GB/s"


def _drives(
    drives: int | None,
    read: float | None,
    write: float | None,
    bench: IoSettings | None,
    bench_name: str,
    sources: dict[str, str],
) -> tuple[int, dict[str, Any]]:
    """Return the number of drives, and their figures as fields of `Machine`. Record the source of
    each figure in `sources`.
    """
    measured = list(bench.bandwidths.values()) if bench is not None else []
    label = bench_name or "bench"
    # Assumed bandwidths would replace the record's without a word, so refuse the record.
    if bench is not None and not measured:
        raise ValueError(
            f"{label} has no bandwidths; write it with: python -m infinity.bench swap --json FILE"
        )
    # A record has a pair of bandwidths for each drive. Without a record, assume one drive.
    count = drives if drives is not None else max(len(measured), 1)
    if not count:
        if (read, write, bench) != (None, None, None):
            raise ValueError(
                "--drives 0 beside --nvme-read, --nvme-write or --bench: leave one or the other out"
            )
        return 0, {"read_bytes_per_s": 0.0, "write_bytes_per_s": 0.0}
    if drives is None and not measured:
        sources["drives"] = "1, assumed"
    found: dict[str, Any] = {}
    if measured:
        # The engine divides data over drives by this harmonic mean (`memory.swap_space`). A plan
        # assumes that drives which were not measured resemble the measured drives.
        speeds = [2 / (1 / pair[0] + 1 / pair[1]) for pair in measured]
        found["busiest_share"] = max(speeds) / sum(speeds) * len(measured) / count
    for index, (name, given) in enumerate((("read", read), ("write", write))):
        value, source = given, "given"
        if value is None and measured:
            scaled = (
                f", scaled from {len(measured)} drives to {count}" if count != len(measured) else ""
            )
            # Scale the mean of the measured drives to `count` drives.
            value = sum(pair[index] for pair in measured) * count / len(measured)
            source = f"measured ({label}{scaled})"
        elif value is None:
            value, what = ASSUMED[name]
            value *= count
            source = f"{_rate(value)}, assumed: {what}"
        found[f"{name}_bytes_per_s"] = value
        sources[name] = source
    return count, found


def _check(machine: Machine) -> None:
    if machine.gpus < 0 or machine.drives < 0:
        raise ValueError(
            f"--gpus {machine.gpus}, --drives {machine.drives}: give numbers of 0 or more"
        )
    # None is valid for peers_per_gpu (no direct links) and pcie_host (from the GPUs' links).
    figures = [name for name in POSITIVE if getattr(machine, name) is not None]
    for name in figures:
        value = getattr(machine, name)
        # `not value > 0` is also true of NaN.
        if not value > 0 or value == float("inf"):
            raise ValueError(f"{name}={value}: give a positive number")
    if machine.drives:
        # `Drives` refuses bandwidths that are not positive.
        _ = machine.bandwidths
