"""What an engine has done, as one record of numbers."""

from __future__ import annotations

import dataclasses
from typing import Any

from infinity.aio import ExecutorStats
from infinity.memory.placement import Plan
from infinity.optim.step import Pipeline
from infinity.params.residency import UnitResidency


@dataclasses.dataclass(frozen=True)
class Stats:
    """Counters since `inf.offload`. Bytes are bytes, times seconds.

    params: elements of the model; step_count: optimizer steps submitted; bytes_read, bytes_written: on all drives;
    io_wait_s: time that forward and backward waited for a unit; update_wait_s: time that `opt.step()`, `flush()` and
    others waited for updates; ram_bytes: what the engine holds in RAM by plan (pools, gradients, resident states,
    checksums, scratch), ram_min_bytes the least that works; nvme_bytes: states that rest on NVMe; gathered_bytes_peak:
    the most that was gathered at once (device memory, not in ram_bytes); demands: times a unit was wanted, of which
    demand_reads were not read ahead; deviations: demands that the traced order did not foresee.
    """

    params: int
    units: int
    step_count: int
    bytes_read: int
    bytes_written: int
    io_wait_s: float
    update_wait_s: float
    compute_s: float
    ram_bytes: int
    ram_min_bytes: int
    pool_bytes: int
    grad_bytes: int
    resident_bytes: int
    nvme_bytes: int
    gathered_bytes_peak: int
    demands: int
    demand_reads: int
    deviations: int
    gates_opened: int
    gates_escaped: int
    retries: int
    short_transfers: int
    rereads: int
    checksum_failures: int
    huge_bytes: int
    registered: bool
    backend: str
    backend_reason: str

    def as_dict(self) -> dict[str, Any]:
        """As a plain dictionary, for logs."""
        return dataclasses.asdict(self)

    @classmethod
    def collect(
        cls,
        *,
        executor: ExecutorStats,
        residency: UnitResidency,
        pipeline: Pipeline,
        placement: Plan,
        param_numel: int,
        unit_count: int,
        backend_reason: str,
    ) -> Stats:
        """Put together what the parts counted."""
        return cls(
            params=param_numel,
            units=unit_count,
            step_count=pipeline.steps,
            bytes_read=executor.bytes_read,
            bytes_written=executor.bytes_written,
            io_wait_s=residency.wait_s,
            update_wait_s=pipeline.update_wait_s,
            compute_s=executor.compute_s,
            ram_bytes=placement.ram_bytes,
            ram_min_bytes=placement.min_bytes,
            pool_bytes=placement.pool_bytes,
            grad_bytes=placement.grad_bytes,
            resident_bytes=placement.resident_bytes,
            nvme_bytes=placement.nvme_bytes,
            gathered_bytes_peak=residency.gathered_bytes_peak,
            demands=residency.demands,
            demand_reads=residency.demand_reads,
            deviations=residency.schedule.deviations,
            gates_opened=executor.gates_opened,
            gates_escaped=executor.gates_escaped,
            retries=executor.retries,
            short_transfers=executor.short_transfers,
            rereads=executor.rereads,
            checksum_failures=executor.checksum_failures,
            huge_bytes=executor.huge_bytes,
            registered=executor.registered,
            backend=executor.backend,
            backend_reason=backend_reason,
        )
