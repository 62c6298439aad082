"""A typical DeepSpeed training script; prints one JSON line about the run.

It imports `deepspeed` and nothing of infinity. same_script.py starts it under torchrun, with
DeepSpeed itself or with `infinity.compat.deepspeed` in its place. Trains R1 (r1.py) with different
rows on each rank. The JSON file that --deepspeed_config names has all settings.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import bench_folder  # noqa: F401 - adds bench/ to sys.path
import deepspeed  # type: ignore[import-not-found,import-untyped,unused-ignore]
import r1
import ranks_record
import torch

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def dtype_of(config: dict[str, Any]) -> torch.dtype:
    """Return the dtype in which a configuration trains."""
    chosen = [dtype for key, dtype in DTYPES.items() if config.get(key, {}).get("enabled")]
    return chosen[0] if chosen else torch.float32


def build(workload: r1.Workload, config: dict[str, Any]) -> Any:
    """Return the model with R1's first values. Stage 3 partitions it during construction."""
    stage3 = config["zero_optimization"]["stage"] == 3
    dtype = dtype_of(config)
    with deepspeed.zero.Init(config_dict_or_path=config, dtype=dtype, enabled=stage3):
        model = r1.construct(workload)
    if not stage3:
        model = model.to(dtype)
    for name, parameter in model.named_parameters():
        with deepspeed.zero.GatheredParameters(parameter, modifier_rank=0, enabled=stage3):
            r1.fill(name, parameter.data, workload.seed)
    return model


def train(workload: r1.Workload, config: dict[str, Any]) -> dict[str, Any]:
    """Train and measure. Returns this rank's record. Blocks until done."""
    began = time.perf_counter()
    deepspeed.init_distributed()
    model = build(workload, config)
    engine, _, _, scheduler = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )
    r1.renew_rotary(engine.module)
    batches = ranks_record.batches(workload, deepspeed.comm.get_rank())
    reported: dict[str, list[float]] = {"skipped": [], "lr": [], "norm": []}

    def step() -> float:
        total = 0.0
        for tokens in batches:
            loss = engine(input_ids=tokens, labels=tokens).loss
            engine.backward(loss)
            engine.step()
            total += float(loss.detach())
        reported["skipped"].append(engine.skipped_steps)
        reported["lr"].append(engine.get_lr()[0])
        reported["norm"].append(float(engine.get_global_grad_norm() or 0.0))
        return total / len(batches)

    record = ranks_record.measure(
        step, workload, flush=deepspeed.comm.barrier, setup_s=time.perf_counter() - began
    )
    return {**record, **reported, "scheduler": type(scheduler).__name__}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--local_rank", type=int, default=-1, help="set by launchers")
    parser = deepspeed.add_config_arguments(parser)
    r1.add_arguments(parser)
    args = parser.parse_args()
    config = json.loads(Path(args.deepspeed_config).read_text())
    ranks_record.report(deepspeed.__name__, train(r1.from_arguments(args), config))
    deepspeed.comm.barrier()


if __name__ == "__main__":
    main()
