"""DeepSpeed's JSON for R1, tuned by hand. Imports no engine."""

from __future__ import annotations

import math
from typing import Any

import r1


def everything_on_nvme(workload: r1.Workload, swap_dir: str) -> dict[str, Any]:
    """Return the fastest configuration, found by hand, that really keeps everything on NVMe.

    ``buffer_size`` is the only value that follows the model: every parameter must fit one buffer.
    """
    buffer_size = math.ceil(workload.largest_parameter * 1.0132 / 1e5) * 100_000
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": workload.micro_batches,
        "gradient_clipping": workload.clip,
        "bf16": {"enabled": True},
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": workload.lr, "weight_decay": workload.weight_decay},
        },
        "zero_optimization": {
            "stage": 3,
            "sub_group_size": 20_000_000,
            "stage3_max_reuse_distance": 0,
            "stage3_max_live_parameters": 30_000_000,
            "stage3_prefetch_bucket_size": 20_000_000,
            "reduce_bucket_size": 10_000_000,
            "stage3_param_persistence_threshold": 10_000,
            "offload_optimizer": {
                "device": "nvme",
                "nvme_path": swap_dir,
                "buffer_count": 12,
                "pipeline_read": True,
                "pipeline_write": True,
            },
            "offload_param": {
                "device": "nvme",
                "nvme_path": swap_dir,
                "buffer_count": 16,
                "buffer_size": buffer_size,
                "max_in_cpu": 0,
            },
        },
        "aio": {"block_size": 1 << 20, "queue_depth": 32},
        "steps_per_print": 1_000_000,
        "wall_clock_breakdown": False,
    }


def everything_in_ram(workload: r1.Workload) -> dict[str, Any]:
    """CPU offload: everything in RAM, the update by DeepSpeedCPUAdam."""
    config = everything_on_nvme(workload, "")
    config["zero_optimization"]["offload_optimizer"] = {"device": "cpu", "pin_memory": False}
    config["zero_optimization"]["offload_param"] = {"device": "cpu", "pin_memory": False}
    del config["aio"]
    return config


def stage2_with_states_in_ram(workload: r1.Workload) -> dict[str, Any]:
    """Stage 2 with CPU offload. Buckets hold a third of R1: at their default of 5e8 they would hold
    it three times over."""
    config = everything_on_nvme(workload, "")
    del config["aio"]
    config["zero_optimization"] = {
        "stage": 2,
        "contiguous_gradients": True,
        "overlap_comm": False,  # streams, which the CPU has none of
        "reduce_bucket_size": 50_000_000,
        "allgather_bucket_size": 50_000_000,
        "offload_optimizer": {"device": "cpu", "pin_memory": False},
    }
    return config
