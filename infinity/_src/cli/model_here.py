"""`infinity doctor --model`: a forecast of training a model on this machine, with all states on its
drives, and the update that is the fastest there.

Memory, cores, GPU and free room are this machine's; rates are assumed, as `infinity plan` assumes
them. A step has one sequence.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch

import infinity as inf
from infinity._src.base.sizes import format_size
from infinity._src.cli.plan import SEQUENCE, read_shape, recommend
from infinity._src.memory.device import rocm_lacks
from infinity._src.plan.changes import faster_update
from infinity._src.plan.machine import Machine, describe_machine
from infinity._src.plan.predict import predict
from infinity._src.plan.workload import Job
from infinity.aio._memory_limits import memory_left_bytes
from infinity.aio._probe import DirectoryProbe


def describe_model(model: Path, drives: Sequence[DirectoryProbe]) -> tuple[str, str]:
    """Return what training a model takes here, and a warning where it does not fit. drives: usable
    directories for swap.

    Raises: ValueError for a path that is no model, or without a directory.
    """
    if not drives:
        raise ValueError("there is no directory for swap to train it with; give one with --dir")
    shape = read_shape(model, torch.bfloat16)
    sequence = min(SEQUENCE, shape.positions or SEQUENCE)
    # A tier on NVMe must name a directory; a forecast opens none.
    policy = inf.Policy(params="nvme", optim="nvme", nvme=[drives[0].path])
    now = predict(shape, _machine_here(drives), Job(policy, tokens=sequence, sequence=sequence))
    value = (
        f"{shape.name}: {shape.params / 1e9:.2f} B parameters; {format_size(now.nvme.bytes)} on "
        f"the drives, {format_size(now.nvme.there_is or 0.0)} are free; {now.step_s:.3g} s/step of "
        f"{sequence:,} tokens (forecast with assumed rates: `infinity plan` takes yours)"
    )
    if not now.fits:
        return value, "; ".join(now.why_not)
    faster = faster_update(shape, now)
    return value if faster is None else f"{value}. {recommend(now, faster)}", ""


def _machine_here(drives: Sequence[DirectoryProbe]) -> Machine:
    # Directories of one file system share its room, and are taken for one drive.
    free = {Path(probe.path).stat().st_dev: float(probe.free_bytes) for probe in drives}
    left = float(memory_left_bytes())
    # Models cannot be offloaded from AMD's GPUs: the CPU computes.
    there = torch.cuda.is_available() and not rocm_lacks()
    gpu = torch.cuda.get_device_properties(0) if there else None
    return describe_machine(
        gpus=0 if gpu is None else 1,
        # Where the CPU computes, device memory is the machine's own.
        gpu_mem_bytes=left if gpu is None else float(gpu.total_memory),
        ram_bytes=left,
        drives=len(free),
        nvme_bytes=sum(free.values()),
        cores=len(os.sched_getaffinity(0)),
    )
