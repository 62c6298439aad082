"""One run of R1 under DeepSpeed ZeRO-Infinity on the CPU, tuned by hand; prints one JSON line.

Started by compare_deepspeed.py inside DeepSpeed's own environment. Everything rests on NVMe, or in
RAM (--offload cpu).
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

import deepspeed  # type: ignore[import-not-found,import-untyped,unused-ignore]
import deepspeed_json
import meter
import r1
import torch


def find_free_port() -> int:
    """Return a TCP port of the loopback interface that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def single_process_environment() -> None:
    """Set the environment of rank 0 of 1. Call it before DeepSpeed reads its accelerator."""
    port = str(find_free_port())
    os.environ.update(
        RANK="0",
        LOCAL_RANK="0",
        WORLD_SIZE="1",
        LOCAL_SIZE="1",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=port,
    )


def unlink_shared_memory() -> None:
    """Unlink the 69 MB shared-memory buffer that DeepSpeed would leave in /dev/shm; its mapping
    stays valid."""
    for path in Path("/dev/shm").glob(
        f"deepspeed_allreduce_buffer_{os.getuid()}_*_{os.environ['MASTER_PORT']}_*"
    ):
        path.unlink(missing_ok=True)


def build_ops() -> None:
    """Compile DeepSpeed's extensions into TORCH_EXTENSIONS_DIR, so that no measured run does."""
    from deepspeed.ops.op_builder import (  # type: ignore[import-not-found,import-untyped,unused-ignore]
        AsyncIOBuilder,
        CPUAdamBuilder,
        ShareMemCommBuilder,
    )

    for builder in (AsyncIOBuilder(), CPUAdamBuilder(), ShareMemCommBuilder()):
        if not builder.is_compatible(verbose=True):
            raise SystemExit(
                f"DeepSpeed cannot build {builder.NAME} here: install libaio-dev, g++ and ninja"
            )
        builder.load(verbose=False)


def build_engine(workload: r1.Workload, swap_dir: str, offload: str) -> Any:
    """Build the DeepSpeed engine of R1. Parameters move to their tier during construction, so RAM
    never holds a second full copy."""
    config = (
        deepspeed_json.everything_on_nvme(workload, swap_dir)
        if offload == "nvme"
        else deepspeed_json.everything_in_ram(workload)
    )
    with deepspeed.zero.Init(config_dict_or_path=config, dtype=torch.bfloat16):
        model = r1.construct(workload)
    for name, parameter in model.named_parameters():
        with deepspeed.zero.GatheredParameters(parameter, modifier_rank=0):
            r1.fill(name, parameter.data, workload.seed)
    engine, _, _, _ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )
    r1.renew_rotary(model)
    return engine


def train_step(engine: Any, batches: list[torch.Tensor]) -> float:
    """One optimizer step; returns its loss."""
    total = 0.0
    for tokens in batches:
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        total += float(loss.detach())
    return total / len(batches)


def run(workload: r1.Workload, swap_dir: str, offload: str) -> dict[str, Any]:
    """Train and measure. Blocks until done."""
    began = time.perf_counter()
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    unlink_shared_memory()
    engine = build_engine(workload, swap_dir, offload)
    batches = r1.micro_batches(workload)

    record = meter.measure(
        lambda: train_step(engine, batches),
        flush=lambda: None,  # engine.step() returns only when its writes have completed
        warmup=workload.warmup,
        steps=workload.steps,
        parameters=workload.parameters,
        setup_s=time.perf_counter() - began,
    )
    return {
        "arm": "deepspeed",
        "version": deepspeed.__version__,
        "torch": torch.__version__,
        **record,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dir", help="swap directory")
    parser.add_argument(
        "--build-ops", action="store_true", help="only compile DeepSpeed's extensions"
    )
    parser.add_argument(
        "--offload",
        default="nvme",
        choices=("nvme", "cpu"),
        help="where everything rests (%(default)s)",
    )
    r1.add_arguments(parser)
    args = parser.parse_args()
    single_process_environment()
    if args.build_ops:
        build_ops()
        return 0
    if not args.dir:
        parser.error("--dir is needed")
    try:
        meter.report(run(r1.from_arguments(args), args.dir, args.offload))
    finally:
        unlink_shared_memory()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    # DeepSpeed's I/O threads outlive the interpreter's shutdown, and sometimes abort the process
    # there, after the record was printed.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
