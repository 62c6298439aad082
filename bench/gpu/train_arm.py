"""One arm of `train.py`: a Llama-shaped model under infinity, FSDP2 with CPU offload or
DeepSpeed, that steps when it is told to.

Reads one JSON object per line from standard input ({"rows": 2, "warmup": 1, "steps": 3}) and
answers each with one line "ARM {...}"; the first line reports that it is ready. So arms that run at
once can be measured alternately.

All compute with bf16 parameters from fp32 masters, recompute blocks in backward (non-reentrant
checkpointing, SDPA), clip at 1.0 and use AdamW; FSDP2 as its documentation has it: fp32 shards in
pinned RAM, cast to bf16 on the device, torch's fused AdamW on the CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import accelerator
import meter
import r1
import torch

LR, DECAY, CLIP = 1e-4, 0.01, 1.0


@dataclasses.dataclass
class Arm:
    """A model ready to train. step: one optimizer step on a batch of token ids; returns its
    loss."""

    step: Callable[[torch.Tensor], float]
    flush: Callable[[], None]
    report: Callable[[int], dict[str, Any]]
    close: Callable[[], None]


def fill(name: str, tensor: torch.Tensor) -> None:
    """r1's first values, made on the GPU where there is one: a CPU takes a minute for 7 billion."""
    if tensor.device.type == "cpu" and torch.cuda.is_available():
        made = torch.empty(tensor.shape, dtype=tensor.dtype, device="cuda")
        r1.fill(name, made)
        tensor.copy_(made)
    else:
        r1.fill(name, tensor)


def checkpointed(model: Any) -> Any:
    """Blocks are recomputed in backward."""
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def loss_of(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Next-token loss of a batch [rows, sequence]."""
    loss: torch.Tensor = model(input_ids=ids, labels=ids).loss
    return loss


def planned_bytes(shape: Any, policy: Any, device: str, tokens: int, sequence: int) -> float:
    """Return the bytes that one GPU needs by `infinity plan`."""
    from infinity._src.plan.machine import describe_machine
    from infinity._src.plan.predict import predict
    from infinity._src.plan.workload import Job

    machine = describe_machine(gpus=1, gpu_mem_bytes=accelerator.memory_bytes(device), drives=1)
    job = Job(policy, tokens=tokens, sequence=sequence)
    return float(predict(shape, machine, job).gpu.bytes)


def infinity_arm(workload: r1.Workload, device: str, values: dict[str, Any]) -> Arm:
    """The engine; `values` are the policy's fields."""
    import infinity as inf
    from infinity._src.plan.workload import shape_of

    policy = inf.Policy(**values, **({"device": "cuda"} if device == "cuda" else {}))
    model = checkpointed(r1.build_on_meta(workload))
    model.model.rotary_emb.to(device)
    shape = shape_of(model)
    inf.offload(model, policy, load=fill)
    handle = inf.handle(model)
    optimizer = inf.AdamW(model.parameters(), lr=LR, weight_decay=DECAY)

    def step(ids: torch.Tensor) -> float:
        loss = loss_of(model, ids)
        loss.backward()
        if policy.update != "backward" or policy.speculates:
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    def report(tokens: int) -> dict[str, Any]:
        stats = handle.stats()
        terms = stats.terms
        return {
            "planned_bytes": planned_bytes(shape, policy, device, tokens, workload.tokens),
            "counted_bytes": stats.gathered_bytes_peak + stats.fresh_grad_bytes_peak,
            "ram_bytes": stats.ram_bytes,
            "nvme_bytes": stats.nvme_bytes,
            "eta_floor": terms.eta_floor if terms is not None else None,
            "eta_schedule": terms.eta_schedule if terms is not None else None,
            "terms": str(terms),
            "io_wait_s": stats.io_wait_s,
            "update_wait_s": stats.update_wait_s,
        }

    return Arm(step, handle.flush, report, handle.close)


def fsdp2_arm(workload: r1.Workload, device: str) -> Arm:
    """torch.distributed.fsdp.fully_shard with CPUOffloadPolicy on one rank."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh(device, (1,))
    options: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        "offload_policy": CPUOffloadPolicy(pin_memory=device == "cuda"),
    }
    model: Any = checkpointed(r1.build_on_meta(workload).float())
    for layer in model.model.layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            fill(name, parameter.to_local())
    r1.renew_rotary(model)
    model.model.rotary_emb.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=DECAY, fused=True)

    def step(ids: torch.Tensor) -> float:
        loss = loss_of(model, ids)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return Arm(
        step,
        lambda: accelerator.synchronise(device),
        lambda _tokens: {},
        dist.destroy_process_group,
    )


def deepspeed_arm(workload: r1.Workload, device: str) -> Arm:
    """DeepSpeed ZeRO-3 with parameters and optimizer in pinned RAM."""
    import deepspeed  # type: ignore[import-not-found]

    place = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29511",
    }
    for name, value in place.items():
        os.environ.setdefault(name, value)
    pinned = {"device": "cpu", "pin_memory": device == "cuda"}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "gradient_clipping": CLIP,
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": DECAY}},
        "zero_optimization": {
            "stage": 3,
            "offload_param": pinned,
            "offload_optimizer": pinned,
            "overlap_comm": True,
            "contiguous_gradients": True,
        },
    }
    deepspeed.init_distributed(dist_backend="nccl" if device == "cuda" else "gloo")
    with deepspeed.zero.Init(config_dict_or_path=config):
        model: Any = r1.construct(workload)
    for name, parameter in model.named_parameters():
        with deepspeed.zero.GatheredParameters(parameter, modifier_rank=0):
            fill(name, parameter.data)
    r1.renew_rotary(model)
    engine, *_ = deepspeed.initialize(model=checkpointed(model), config=config)
    engine.module.model.rotary_emb = type(model.model.rotary_emb)(model.config).to(device)

    def step(ids: torch.Tensor) -> float:
        loss = loss_of(engine, ids)
        engine.backward(loss)
        engine.step()
        return float(loss.detach())

    return Arm(step, lambda: accelerator.synchronise(device), lambda _tokens: {}, lambda: None)


def measure(arm: Arm, workload: r1.Workload, device: str, asked: dict[str, int]) -> dict[str, Any]:
    """Warm up, then `steps` steps of `rows` sequences each."""
    generator = torch.Generator().manual_seed(asked["rows"])
    ids = torch.randint(
        0, workload.vocab, (asked["rows"], workload.tokens), generator=generator
    ).to(device)
    tokens = ids.numel()
    accelerator.clear(device)

    def flush() -> None:
        arm.flush()
        accelerator.synchronise(device)

    found = meter.measure(
        lambda: arm.step(ids),
        flush=flush,
        warmup=asked["warmup"],
        steps=asked["steps"],
        parameters=workload.parameters,
        setup_s=0.0,
    )
    found.pop("setup_s")
    return {
        **found, "tokens": tokens, "peak_bytes": accelerator.peak_bytes(device),
        "reserved_bytes": accelerator.reserved_bytes(device), **arm.report(tokens),
    }  # fmt: skip


def answer(found: dict[str, Any]) -> None:
    """One line, that no library's chatter is taken for."""
    sys.stdout.write(f"\nARM {json.dumps(found)}\n")
    sys.stdout.flush()


def build(args: argparse.Namespace, workload: r1.Workload, device: str) -> Arm:
    """The arm that the arguments name."""
    if args.arm == "infinity":
        return infinity_arm(workload, device, json.loads(args.policy))
    return (fsdp2_arm if args.arm == "fsdp2" else deepspeed_arm)(workload, device)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--arm", required=True, choices=("infinity", "fsdp2", "deepspeed"))
    parser.add_argument("--device", required=True, choices=accelerator.DEVICES)
    parser.add_argument(
        "--shape",
        required=True,
        help='JSON: {"hidden": ..., "layers": ..., "vocab": ..., "tokens": a sequence}',
    )
    parser.add_argument("--policy", default="{}", help="JSON: fields of inf.Policy")
    args = parser.parse_args()
    workload = r1.Workload(**json.loads(args.shape))
    began = time.perf_counter()
    with accelerator.computing(args.device) as device:
        with contextlib.redirect_stdout(sys.stderr):
            arm = build(args, workload, device)
        setup_s = round(time.perf_counter() - began, 2)
        answer({"ready": True, "setup_s": setup_s, "peak_rss_bytes": meter.peak_rss_bytes()})
        try:
            for line in sys.stdin:
                answer(measure(arm, workload, device, json.loads(line)))
        finally:
            arm.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
