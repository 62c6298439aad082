"""Scripts of DeepSpeed's users, started with the stand-in in DeepSpeed's place; and the three
configurations of transformers' documentation.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SCRIPTS = Path(__file__).parent / "deepspeed_scripts"

_AUTO = dict.fromkeys(
    (
        "gradient_accumulation_steps", "gradient_clipping", "train_batch_size",
        "train_micro_batch_size_per_gpu",
    ),
    "auto",
)  # fmt: skip
_FP16 = {
    "enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16,
    "hysteresis": 2, "min_loss_scale": 1,
}  # fmt: skip
_OPTIMIZER = {
    "type": "AdamW",
    "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
}
_SCHEDULER = {
    "type": "WarmupLR",
    "params": {
        "warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto",
    },
}  # fmt: skip
_STAGE_3: dict[str, Any] = {
    "stage": 3, "overlap_comm": True, "contiguous_gradients": True, "sub_group_size": 1e9,
    "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto",
    "stage3_param_persistence_threshold": "auto", "stage3_max_live_parameters": 1e9,
    "stage3_max_reuse_distance": 1e9, "stage3_gather_16bit_weights_on_model_save": True,
}  # fmt: skip


def zero2() -> dict[str, Any]:
    """ZeRO-2 with the optimizer on the CPU."""
    zero = {
        "stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "allgather_partitions": True, "allgather_bucket_size": 2e8, "overlap_comm": True,
        "reduce_scatter": True, "reduce_bucket_size": 2e8, "contiguous_gradients": True,
    }  # fmt: skip
    return _whole(zero)


def zero3() -> dict[str, Any]:
    """ZeRO-3 with parameters and the optimizer on the CPU."""
    cpu = {"device": "cpu", "pin_memory": True}
    return _whole(_STAGE_3 | {"offload_optimizer": cpu, "offload_param": cpu})


def nvme(drive: Path) -> dict[str, Any]:
    """ZeRO-3 with parameters and the optimizer on NVMe."""
    place = {"device": "nvme", "nvme_path": str(drive), "pin_memory": True}
    offload = {
        "offload_optimizer": place | {"buffer_count": 4, "fast_init": False},
        "offload_param": place | {"buffer_count": 5, "buffer_size": 1e8, "max_in_cpu": 1e9},
    }
    aio = {
        "block_size": 262144, "queue_depth": 32, "thread_count": 1, "single_submit": False,
        "overlap_events": True,
    }  # fmt: skip
    return _whole(_STAGE_3 | offload) | {"aio": aio}


def _whole(zero: dict[str, Any]) -> dict[str, Any]:
    rest = {"fp16": _FP16, "bf16": {"enabled": "auto"}, "optimizer": _OPTIMIZER}
    rest |= {"scheduler": _SCHEDULER, "steps_per_print": 2000, "wall_clock_breakdown": False}
    whole = {**rest, "zero_optimization": zero, **_AUTO}
    copied: dict[str, Any] = json.loads(json.dumps(whole))
    return copied


def without(config: dict[str, Any], *names: str) -> dict[str, Any]:
    """The configuration without some of its keys: the trainer's own optimizer or schedule."""
    return {name: value for name, value in config.items() if name not in names}


def written(config: dict[str, Any], place: Path) -> Path:
    """Write a configuration as JSON."""
    place.mkdir(parents=True, exist_ok=True)
    path = place / "ds_config.json"
    path.write_text(json.dumps(config))
    return path


def ran(
    script: Path | str, *arguments: Any, ranks: int = 1, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a script by `python -m infinity.compat.deepspeed`."""
    command = [
        sys.executable, "-m", "infinity.compat.deepspeed", "--standalone",
        "--nproc-per-node", str(ranks), str(script), *map(str, arguments),
    ]  # fmt: skip
    told = {
        "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT),
        "TOKENIZERS_PARALLELISM": "false", **(environment or {}),
    }  # fmt: skip
    done = subprocess.run(
        command, env={**os.environ, **told}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-8000:]
    return done


def finetuned(
    out: Path, model: Path, config: dict[str, Any] | None, *flags: str, ranks: int = 1, **given: Any
) -> list[dict[str, Any]]:
    """Fine-tune by transformers' Trainer, and return what each rank found. given: of
    TrainingArguments, six steps by default.
    """
    given = {
        "per_device_train_batch_size": 2, "max_steps": 6, "learning_rate": 1e-2, "logging_steps": 1,
        "save_strategy": "no", "report_to": "none", "disable_tqdm": True, **given,
    }  # fmt: skip
    arguments = [f"--{name}={value}" for name, value in given.items()]
    if config is not None:
        arguments.append(f"--deepspeed={written(config, out)}")
    ran(
        SCRIPTS / "finetune.py", "--model_name_or_path", model, "--output_dir", out, *arguments,
        *flags, ranks=ranks,
    )  # fmt: skip
    return found_in(out, ranks)


def found_in(out: Path, ranks: int) -> list[dict[str, Any]]:
    """Return the files of a script, one of each rank."""
    return [json.loads((out / f"found-{rank}.json").read_text()) for rank in range(ranks)]


def logged(found: dict[str, Any], name: str) -> list[float]:
    """A figure of each step."""
    return [line[name] for line in found["log"] if name in line and "loss" in line]
