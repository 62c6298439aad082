#!/usr/bin/env bash
# DeepSpeed's Muon with ZeRO-1 and 2 on the device keeps its momentum in bf16, where it stalls.
#
# One guesses that optimizer states are fp32, as ZeRO's masters and Adam's moments are. The momentum
# has the dtype of the gradient, for which one step of 0.05 of the difference is soon less than half
# a unit in the last place: with a constant gradient of 1 it stops at 0.961. Setting
# `data_types.grad_accum_dtype` to fp32 changes nothing at stage 2. With the optimizer offloaded to
# the CPU the momentum is fp32, and comes to 1.
#
# Who compares runs of DeepSpeed's Muon on and off the device compares two roundings; and who
# continues a checkpoint of ZeRO-2 finds momenta of 16 bits.
#
# Seen with DeepSpeed 0.19.8 and torch 2.13.0 on CPython 3.11, on a CPU; momentum after 200 steps:
#     device             torch.bfloat16 0.9609
#     device, fp32 sums  torch.bfloat16 0.9609
#     offloaded          torch.float32 1.0000
#
# Exits with 1 if the behaviour differs from this. Needs a C++ compiler.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install -q torch==2.13.0 numpy setuptools wheel
DS_ACCELERATOR=cpu DS_BUILD_OPS=0 \
    "$place/venv/bin/pip" install -q --no-build-isolation deepspeed==0.19.8
cat > "$place/run.py" <<'PYTHON'
import os
import socket
import sys

import torch
from torch import nn

with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    port = str(probe.getsockname()[1])
os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_SIZE="1")
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
import deepspeed  # noqa: E402


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden = nn.Linear(8, 8, bias=False)

    def forward(self, x):
        return self.hidden.weight.float().sum() * x


deepspeed.init_distributed(dist_backend="gloo", verbose=False)
where = sys.argv[1]
zero = {"stage": 2}
if where == "offloaded":
    zero["offload_optimizer"] = {"device": "cpu", "pin_memory": False}
muon = {"lr": 1e-3, "ns_method": "standard", "momentum": 0.95}
config = {
    "train_micro_batch_size_per_gpu": 1,
    "bf16": {"enabled": True},
    "data_types": {"grad_accum_dtype": "fp32"} if "sums" in where else {},
    "zero_optimization": zero,
    "optimizer": {"type": "Muon", "params": muon},
    "steps_per_print": 10**9,
}
model = Net().bfloat16()
engine, *_ = deepspeed.initialize(
    model=model, model_parameters=model.parameters(), config=config
)
for _ in range(200):
    engine.backward(engine(torch.tensor(1.0)))
    engine.step()
(state,) = engine.optimizer.optimizer.state.values()
momentum = state["momentum_buffer"]
found = f"{momentum.dtype} {momentum.float().mean().item():.4f}"
print(f"{where:18} {found}", flush=True)
wanted = "torch.float32 1.0000" if where == "offloaded" else "torch.bfloat16 0.9609"
os._exit(found != wanted)  # its threads are still there
PYTHON
cd "$place"
for where in "device" "device, fp32 sums" "offloaded"; do
    DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 "$place/venv/bin/python" run.py "$where" \
        2> "$place/errors" | grep '^device\|^offloaded' || { tail -5 "$place/errors"; exit 1; }
done
