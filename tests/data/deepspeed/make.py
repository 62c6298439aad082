"""Make checkpoints with DeepSpeed: `make.py NAME...`, or all of CASES. The README says with which
environment.

Each case trains `Net` for SAVED_AT steps, saves, and trains on for LATER steps. `NAME.tar.xz` has
the checkpoint, and what DeepSpeed itself said: `expected.json` the losses, scales and rates of the
steps after it, `expected.safetensors` the masters and moments at the save.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import socket
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

SAVED_AT, LATER = 3, 4
TAG = f"global_step{SAVED_AT}"


class Net(nn.Module):
    """Tied weights, a frozen parameter, a buffer, and sizes that two ranks do not divide.

    wide: with a parameter so large that DeepSpeed swaps it to NVMe, of values that pack well.
    """

    def __init__(self, *, wide: bool = False) -> None:
        super().__init__()
        self.wide = nn.Parameter(torch.ones(2**18 + 1)) if wide else None
        self.embed = nn.Embedding(10, 7)
        self.blocks = nn.ModuleList(nn.Linear(7, 7) for _ in range(2))
        self.frozen = nn.Linear(7, 3, bias=False)
        self.frozen.weight.requires_grad_(False)
        self.norm = nn.LayerNorm(7)
        self.register_buffer("scale", torch.tensor([2.0]))
        self.head = nn.Linear(7, 10, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """A number to make smaller."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = torch.tanh(block(x))
        x = self.norm(x) * self.scale.to(x.dtype)
        loss = self.head(x).float().square().mean() + self.frozen(x).float().square().mean()
        return loss if self.wide is None else loss + self.wide.float().sum()


def tokens(step: int, rank: int) -> torch.Tensor:
    """The batch of a rank."""
    return torch.arange(6).add(step + 3 * rank).remainder(10)[None]


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Two groups: matrices decay, and the rest do not."""
    trained = [param for param in model.parameters() if param.requires_grad]
    return [
        {"params": [param for param in trained if param.ndim > 1], "weight_decay": 0.1},
        {"params": [param for param in trained if param.ndim == 1], "weight_decay": 0.0},
    ]


@dataclasses.dataclass(frozen=True)
class Case:
    """A run of DeepSpeed."""

    stage: int
    ranks: int
    dtype: str = "bf16"
    offload: str = "none"
    zero: dict[str, Any] = dataclasses.field(default_factory=dict)
    more: dict[str, Any] = dataclasses.field(default_factory=dict)
    scale_power: int = 11  # 12 overflows before the save
    universal: bool = False
    misread: bool = False  # DeepSpeed's own functions say something else than what it computes with
    muon: bool = False

    def config(self, swap: str) -> dict[str, Any]:
        """DeepSpeed's. Groups of stage 3 are so small that there are several."""
        zero: dict[str, Any] = {"stage": self.stage, **self.zero}
        if self.stage == 3:
            zero |= {"stage3_param_persistence_threshold": 0, "sub_group_size": 60}
            # Its own linear rounds to 16 bits before it adds the bias, and once more after.
            zero["memory_efficient_linear"] = False
        if self.offload != "none":
            zero["offload_optimizer"] = {"device": self.offload, "pin_memory": False}
        if self.offload == "nvme":
            zero["offload_optimizer"]["nvme_path"] = swap
            zero["sub_group_size"] = 10**9
        if self.muon and self.stage == 3:
            zero["reduce_scatter"] = False
        adam = {"lr": 1e-2, "betas": [0.8, 0.95], "torch_adam": self.offload == "none"}
        scaler = {
            "enabled": True,
            "initial_scale_power": self.scale_power,
            "loss_scale_window": 2,
            "hysteresis": 1,
        }
        return {
            "train_micro_batch_size_per_gpu": 1,
            # It would clip matrices that are orthogonalized already.
            "gradient_clipping": 0.0 if self.muon else 1.0,
            "bf16": {"enabled": self.dtype == "bf16"},
            **({"fp16": scaler} if self.dtype == "fp16" else {}),
            "optimizer": {
                "type": "Muon" if self.muon else "AdamW",
                "params": {**adam, **(MUON if self.muon else {})},
            },
            "scheduler": {
                "type": "WarmupLR",
                "params": {
                    "warmup_max_lr": 1e-2,
                    "warmup_num_steps": 10,
                    "warmup_type": "linear",
                },
            },
            "zero_optimization": zero,
            "steps_per_print": 10**9,
            "zero_allow_untested_optimizer": True,
            **self.more,
        }


MUON = {"ns_method": "standard", "momentum": 0.9, "eps": 1e-7}
FP32_GRADS = {"data_types": {"grad_accum_dtype": "fp32"}}
CASES = {
    "zero1": Case(1, 2),
    "zero1_fp32_grads": Case(1, 2, more=FP32_GRADS),
    "zero2_one_rank": Case(2, 1),
    "zero2_cpu": Case(2, 2, offload="cpu"),
    # One rank: several ranks divide between scaling and adding up, where fp16 may overflow.
    "zero2_fp16": Case(2, 1, dtype="fp16"),
    "zero2_round_robin": Case(2, 2, zero={"round_robin_gradients": True}, misread=True),
    "zero2_aligned": Case(2, 2, dtype="fp32", zero={"parameter_alignment": True}),
    "zero2_elastic": Case(2, 2, zero={"elastic_checkpoint": True}),
    "zero3_one_rank": Case(3, 1),
    "zero3_cpu": Case(3, 2, offload="cpu"),
    "zero3_fp32": Case(3, 2, dtype="fp32"),
    "zero3_fp16": Case(3, 1, dtype="fp16", scale_power=12),
    "zero3_nvme": Case(3, 1, offload="nvme", misread=True),
    "universal_zero2": Case(2, 2, universal=True),
    "universal_zero3": Case(3, 2, universal=True),
    "muon_zero1": Case(1, 2, muon=True, more=FP32_GRADS),
    "muon_zero2": Case(2, 2, muon=True),
    "muon_zero2_cpu": Case(2, 2, muon=True, offload="cpu"),
    "muon_zero3": Case(3, 2, muon=True),
}


def run_rank(name: str, out: Path, rank: int, port: str) -> None:
    """Train, save, train on, and write what the states and the losses were."""
    case = CASES[name]
    deepspeed = started(case, rank, port)
    model = Net(wide=case.offload == "nvme").to(dtype_of(case))
    config = case.config(f"{out}-swap")
    engine, *_ = deepspeed.initialize(model=model, model_parameters=groups_of(model), config=config)
    for step in range(SAVED_AT):
        engine.backward(engine(tokens(step, rank)))
        engine.step()
    engine.save_checkpoint(str(out), client_state={"epoch": 7, "seen": [1.5, "text"]})
    if hasattr(engine.optimizer, "_hp_optimizer_states_linked"):
        # With several groups DeepSpeed has linked the states of the first group only.
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    # DeepSpeed's functions expect that ranks have partitions of momenta.
    whole = name == "muon_zero2"
    states = {} if case.misread else states_of(deepspeed, model, momenta=not whole)
    states |= whole_momenta(engine.optimizer, model) if whole else {}
    expected: dict[str, list[float]] = {"losses": [], "lr": [], "scale": []}
    for step in range(SAVED_AT, SAVED_AT + LATER):
        expected["lr"].append(engine.get_lr()[0])
        expected["scale"].append(float(getattr(engine.optimizer, "cur_scale", 1.0)))
        loss = engine(tokens(step, rank))
        mean = loss.detach().double()
        torch.distributed.all_reduce(mean)
        expected["losses"].append(mean.item() / case.ranks)
        engine.backward(loss)
        engine.step()
    if rank == 0:
        from safetensors.torch import save_file

        save_file(states, out / "expected.safetensors")
        (out / "expected.json").write_text(json.dumps(expected))
    finished(port)


def started(case: Case, rank: int, port: str) -> Any:
    """Become a rank of a case. Returns the module of DeepSpeed."""
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(case.ranks), LOCAL_SIZE=str(case.ranks)
    )
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    import deepspeed  # type: ignore[import-not-found,import-untyped,unused-ignore]

    # DeepSpeed asks oneDNN; torch computes in fp16 on every CPU.
    type(deepspeed.get_accelerator()).is_fp16_supported = lambda _: True
    torch.set_num_threads(1)
    torch.manual_seed(0)
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    return deepspeed


def dtype_of(case: Case) -> torch.dtype:
    """The dtype of a case's parameters."""
    return {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[case.dtype]


def finished(port: str) -> None:
    """End a rank."""
    torch.distributed.barrier()
    for path in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_{os.getuid()}_*_{port}_*"):
        path.unlink(missing_ok=True)
    sys.stdout.flush()
    os._exit(0)  # its threads are still there


def states_of(
    deepspeed: Any, model: nn.Module, *, momenta: bool
) -> dict[str, torch.Tensor]:
    """Masters and moments by DeepSpeed's own functions, "exp_avg:NAME" for a moment."""
    found = {}
    for name, param in model.named_parameters():
        if param.requires_grad:
            found[f"fp32:{name}"] = deepspeed.utils.safe_get_full_fp32_param(param).clone()
            matrix = getattr(param, "use_muon", False)
            of_matrix = ("momentum_buffer",) if momenta else ()
            for state in of_matrix if matrix else ("exp_avg", "exp_avg_sq"):
                value = deepspeed.utils.safe_get_full_optimizer_state(param, state)
                found[f"{state}:{name}"] = value.clone()
        elif hasattr(param, "ds_id"):
            with deepspeed.zero.GatheredParameters(param):
                found[f"fp32:{name}"] = param.detach().float().clone()
        else:
            found[f"fp32:{name}"] = param.detach().float().clone()
    return found


def whole_momenta(optimizer: Any, model: nn.Module) -> dict[str, torch.Tensor]:
    """The momenta of the matrices of which this rank updates a part."""
    names = {id(param): name for name, param in model.named_parameters()}
    found = {}
    for params, group in zip(
        optimizer.params_in_partition, optimizer.optimizer.param_groups, strict=True
    ):
        momenta = optimizer.optimizer.state[group["params"][0]].get("momentum_buffer")
        if momenta is not None:
            parts = momenta.float().split([param.numel() for param in params])
            for param, part in zip(params, parts, strict=True):
                found[f"momentum_buffer:{names[id(param)]}"] = part.view(param.shape).clone()
    return found


def make(name: str, target: Path) -> None:
    """Run a case on its ranks, and pack what it wrote."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    case = CASES[name]
    with tempfile.TemporaryDirectory() as top:
        out = Path(top) / name
        ranks = [
            subprocess.Popen([sys.executable, __file__, "--rank", name, str(out), str(rank), port])
            for rank in range(case.ranks)
        ]
        if max(rank.wait() for rank in ranks):
            raise SystemExit(f"{name}: a rank failed")
        for script in out.glob("zero_to_*.py"):
            script.unlink()
        if case.universal:
            arguments = ["--input_folder", out / TAG, "--output_folder", out / f"{TAG}_universal"]
            module = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal"]
            # A worker process each would cost seconds.
            workers = ["--num_extract_workers", "1", "--num_merge_workers", "1"]
            subprocess.run(
                [*module, *map(str, arguments), *workers, "--inject_missing_state"], check=True
            )
            shutil.rmtree(out / TAG)
            (out / "latest").unlink()
        with tarfile.open(target / f"{name}.tar.xz", "w:xz") as archive:
            archive.add(out, name, filter=anonymous)


def anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """Leave out who wrote it, and when."""
    member.uid = member.gid = member.mtime = 0
    member.uname = member.gname = ""
    return member


def unpack(name: str, place: Path) -> Path:
    """Unpack a case into a directory, and return its checkpoint."""
    with tarfile.open(Path(__file__).parent / f"{name}.tar.xz") as archive:
        # Python 3.10.11 and 3.11.3 know no filters, and later ones warn without one.
        checked: Any = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
        archive.extractall(place, **checked)
    return place / name


def main() -> None:
    """Make the cases that are named, or be a rank of one."""
    if sys.argv[1:2] == ["--rank"]:
        name, out, rank, port = sys.argv[2:]
        run_rank(name, Path(out), int(rank), port)
    for name in sys.argv[1:] or CASES:
        make(name, Path(__file__).parent)


if __name__ == "__main__":
    main()
