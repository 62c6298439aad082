"""Make a ZeRO-3 checkpoint with DeepSpeed: `make.py directory ranks none|cpu|nvme bf16|fp32`. The
README says with which values."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn


class Net(nn.Module):
    """Tied weights, a frozen parameter, a buffer, and sizes that two ranks do not divide."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.frozen = nn.Linear(8, 3, bias=False)
        self.frozen.weight.requires_grad_(False)
        self.norm = nn.LayerNorm(8)
        self.register_buffer("scale", torch.tensor([2.0]))
        self.head = nn.Linear(8, 10, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """A number to make smaller."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = torch.tanh(block(x))
        x = self.norm(x) * self.scale.to(x.dtype)
        return self.head(x).float().square().mean() + self.frozen(x).float().square().mean()


def config(offload: str, dtype: str, swap: str) -> dict[str, Any]:
    """DeepSpeed's. Groups are so small that they cut parameters."""
    zero: dict[str, Any] = {
        "stage": 3,
        "stage3_param_persistence_threshold": 0,
        "sub_group_size": 150,
    }
    if offload != "none":
        zero["offload_optimizer"] = {"device": offload, "pin_memory": False}
    if offload == "nvme":
        zero["offload_optimizer"]["nvme_path"] = swap
    return {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": dtype == "bf16"},
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 1e-2, "weight_decay": 0.1, "torch_adam": offload == "none"},
        },
        "zero_optimization": zero,
        "steps_per_print": 10**9,
        "zero_allow_untested_optimizer": True,
    }


def run_rank(rank: int, world: int, port: str, out: str, offload: str, dtype: str) -> None:
    """Train, save, and write what the weights are."""
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_SIZE=str(world)
    )
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    import deepspeed
    from safetensors.torch import save_file

    torch.set_num_threads(1)
    torch.manual_seed(0)
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    model = Net().bfloat16() if dtype == "bf16" else Net()
    trained = [param for param in model.parameters() if param.requires_grad]
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=trained, config=config(offload, dtype, out + "-swap")
    )
    for step in range(3):
        engine.backward(engine(torch.arange(6).add(step + rank).remainder(10)[None]))
        engine.step()
    engine.save_checkpoint(out)
    full = {}
    for name, param in model.named_parameters():
        if param.requires_grad:
            full[name] = deepspeed.utils.safe_get_full_fp32_param(param).clone()
        else:
            with deepspeed.zero.GatheredParameters(param):
                full[name] = param.detach().float().clone()
    if rank == 0:
        save_file(full, out + "/expected.safetensors")
    torch.distributed.barrier()
    for path in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_{os.getuid()}_*_{port}_*"):
        path.unlink(missing_ok=True)
    sys.stdout.flush()
    os._exit(0)  # its threads are still there


def main() -> int:
    """Start the ranks."""
    out, world, offload, dtype, *own = sys.argv[1:]
    if own:
        run_rank(int(own[0]), int(world), own[1], out, offload, dtype)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    ranks = [
        subprocess.Popen([sys.executable, *sys.argv, str(rank), port]) for rank in range(int(world))
    ]
    return max(rank.wait() for rank in ranks)


if __name__ == "__main__":
    sys.exit(main())
