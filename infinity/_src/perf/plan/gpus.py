"""Kinds of GPU that a plan may be for: what their makers state, and what is assumed of them in training."""

from __future__ import annotations

import dataclasses

from infinity._src.sizes import GIB


@dataclasses.dataclass(frozen=True)
class GpuKind:
    """One kind. mem_bytes: as the driver has it for programs; flops_peak: dense bf16 with fp32 sums, as stated; flops: sustained
    in training (assumed: 0.4 of the peak where that takes large matrices to reach, 0.6 on consumer cards); pcie, peers: bytes per
    second of one GPU, each way, to the CPU and to the other GPUs (None: these go through the CPU's memory); hbm: of its memory.
    """

    name: str
    told: str
    mem_bytes: float
    flops_peak: float
    flops: float
    hbm_bytes_per_s: float
    pcie_bytes_per_s: float
    peers_bytes_per_s: float | None


PCIE4, PCIE5 = 25e9, 50e9  # what x16 links give to large pinned copies, of 31.5 and 63 GB/s

KINDS = {
    kind.name: kind
    for kind in (
        GpuKind("rtx3090", "GeForce RTX 3090, 24 GB", 23.6 * GIB, 71e12, 43e12, 936e9, PCIE4, None),
        GpuKind("rtx4090", "GeForce RTX 4090, 24 GB", 23.6 * GIB, 165e12, 100e12, 1008e9, PCIE4, None),
        GpuKind("rtx5090", "GeForce RTX 5090, 32 GB", 31.3 * GIB, 209e12, 125e12, 1792e9, PCIE5, None),
        GpuKind("a100", "A100 SXM, 80 GB", 79.1 * GIB, 312e12, 170e12, 2039e9, PCIE4, 300e9),
        GpuKind("h100", "H100 SXM, 80 GB", 79.1 * GIB, 989e12, 400e12, 3350e9, PCIE5, 450e9),
        GpuKind("h200", "H200 SXM, 141 GB", 139.7 * GIB, 989e12, 400e12, 4800e9, PCIE5, 450e9),
    )
}


def guess_kind(mem_bytes: float | None) -> GpuKind:
    """The kind that a GPU of so much memory is taken for where none is named; None: the one that is assumed."""
    if mem_bytes is None:
        return KINDS["h100"]
    if mem_bytes <= 30 * GIB:
        return KINDS["rtx4090"]
    if mem_bytes <= 40 * GIB:
        return KINDS["rtx5090"]
    return KINDS["h100" if mem_bytes <= 100 * GIB else "h200"]


def host_links(gpus: int) -> int:
    """Links to the CPU that so many GPUs are taken to share: two behind one switch where there are more than two."""
    return gpus if gpus <= 2 else -(-gpus // 2)
