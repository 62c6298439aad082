"""One rank of R1 under DeepSpeed on the CPU, started by ranks.py under torchrun in DeepSpeed's own
environment.

Stage 3 has everything on NVMe; stage 2 keeps parameters on the device (here memory), and optimizer
states and gradients in CPU memory.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from typing import Any

import arm_deepspeed
import deepspeed  # type: ignore[import-not-found,import-untyped,unused-ignore]
import deepspeed_json
import r1
import ranks_record
import torch
import torch.distributed as dist


def build_stage2(workload: r1.Workload) -> Any:
    """The engine around R1, which every rank has whole."""
    model = r1.construct(workload)
    for name, parameter in model.named_parameters():
        r1.fill(name, parameter.data, workload.seed)
    engine, _, _, _ = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        config=deepspeed_json.stage2_with_states_in_ram(workload),
    )
    r1.renew_rotary(model)
    return engine


def run(workload: r1.Workload, stage: int, swap_dir: str) -> dict[str, Any]:
    """Train and measure; this rank's record. Blocks."""
    began = time.perf_counter()
    engine = (
        arm_deepspeed.build_engine(workload, swap_dir, "nvme")
        if stage == 3
        else build_stage2(workload)
    )
    batches = ranks_record.batches(workload, dist.get_rank())
    record = ranks_record.measure(
        lambda: arm_deepspeed.train_step(engine, batches),
        workload,
        flush=dist.barrier,  # engine.step() returns only when its writes have completed
        setup_s=time.perf_counter() - began,
    )
    return {**record, "zero": stage, "version": deepspeed.__version__}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dir", required=True, help="swap directory, of all ranks")
    parser.add_argument(
        "--zero", type=int, default=3, choices=(2, 3), help="3: all on NVMe; 2: offload to the CPU"
    )
    r1.add_arguments(parser)
    args = parser.parse_args()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    # Its collectives through shared memory, which it takes when all ranks are on one node.
    os.environ["LOCAL_SIZE"] = os.environ["LOCAL_WORLD_SIZE"]
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    try:
        ranks_record.report("deepspeed", run(r1.from_arguments(args), args.zero, args.dir))
        dist.barrier()
    finally:
        arm_deepspeed.unlink_shared_memory()
    # As in arm_deepspeed: its I/O threads may abort the interpreter's end.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
