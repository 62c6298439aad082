"""Published end-to-end results of other engines, compared with the plan's forecasts.

Nothing is measured here. A row has the published seconds of a step, and two computed ones:

    forecast    the plan's rates of drives and GPUs, with the bytes per parameter that the system
                moves, in its order: "serial" (drives after the passes) or "overlapped"
    infinity    `infinity plan` for the same model, machine and tokens, with everything on the tiers
                that the system uses, and nothing else resident

Both are a limit divided by `EFFICIENCY`, as every forecast. The error is that of the first. The
second estimates the gain of infinity's bytes and order; no measurement here confirms it.

`Result.assumed` states the assumptions where a source is incomplete. No rate of the plan was
changed for these rows.
"""

from __future__ import annotations

import dataclasses
import statistics
from typing import Any

import torch

import infinity as inf
from infinity._src.base.sizes import GIB
from infinity._src.memory.roofline import Moved
from infinity._src.plan.machine import Machine, describe_machine
from infinity._src.plan.predict import EFFICIENCY, predict
from infinity._src.plan.workload import Job, ModelShape, shape_of

SEQ_RATEL, SEQ = 1024, 2048
PASSES = 8.0
"""Operations per parameter and token of a step that recomputes."""


@dataclasses.dataclass(frozen=True)
class Result:
    """One published step.

    mlp_width: of gated MLPs, with 4 heads of keys and values; None: 12 x layers x width^2
    parameters. counted: parameters as the source counts them. read, written: NVMe bytes per
    parameter that the system moves. seconds: of a step; tflops: of all GPUs, if the source has
    that. at_least: the source says "more than". gives_rate: the GPU's sustained rate was derived
    from this row.
    """

    system: str
    source: str
    figure: str
    title: str
    layers: int
    width: int
    tokens: int
    sequence: int
    machine: Machine
    read: float
    written: float
    order: str
    policy: dict[str, Any]
    seconds: float | None = None
    tflops: float | None = None
    at_least: bool = False
    gives_rate: bool = False
    assumed: str = ""
    mlp_width: int | None = None
    counted: float | None = None

    @property
    def params(self) -> float:
        """Parameters whose states the system moves: those that the source counts, if it does."""
        return self.counted or 12.0 * self.layers * self.width**2

    @property
    def operations(self) -> float:
        """Floating-point operations of a step."""
        return PASSES * self.params * self.tokens

    @property
    def published_s(self) -> float:
        """Seconds of a step."""
        if self.seconds is not None:
            return self.seconds
        assert self.tflops is not None, "a result has one of the two"
        return self.operations / (self.tflops * 1e12)

    @property
    def limit_s(self) -> float:
        """Compute the least seconds of a step with the bytes that the system moves."""
        drives = self.machine.bandwidths
        assert drives is not None, "all of these use drives"
        io_s = drives.io_s(Moved(self.read * self.params, self.written * self.params))
        compute_s = self.operations / self.machine.flops
        return compute_s + io_s if self.order == "serial" else max(compute_s, io_s)

    @property
    def forecast_s(self) -> float:
        """Compute the forecast of a step with these bytes."""
        return self.limit_s / EFFICIENCY

    @property
    def error(self) -> float:
        """Return forecast / published - 1."""
        return self.forecast_s / self.published_s - 1

    @property
    def counts(self) -> bool:
        """Return whether the error is meaningful: not for a bound, nor for the row from which the
        rate was derived.
        """
        return not (self.gives_rate or self.at_least)

    @property
    def infinity_s(self) -> float:
        """Compute seconds of a step by `infinity plan`."""
        policy = inf.Policy(nvme=["."], **self.policy)
        # These systems' losses are unknown; assume that logits do not fill the GPU.
        job = Job(policy, tokens=self.tokens, sequence=self.sequence, loss_tiles=16)
        return predict(shape(self), self.machine, job).step_s


def shape(result: Result) -> ModelShape:
    """Return the shape of a GPT of that size, with GPT-2's vocabulary; or of a Llama."""
    import transformers

    heads = result.width // 128
    config: Any = transformers.GPT2Config(
        n_layer=result.layers,
        n_embd=result.width,
        n_head=heads,
        n_positions=result.sequence,
    )
    if result.mlp_width is not None:
        config = transformers.LlamaConfig(
            num_hidden_layers=result.layers,
            hidden_size=result.width,
            intermediate_size=result.mlp_width,
            num_attention_heads=heads,
            num_key_value_heads=4,
        )
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    several = result.machine.world > 1
    return shape_of(model, name=result.title, nested=not several)


# -- Machines --------------------------------------------------------------------------------------

RESIDENT: dict[str, Any] = {"resident": {"params": 0.0, "optim": 0.0}}


def ratel_machine(drives: int, gpus: int = 1) -> Machine:
    """Describe the testbed of Ratel's data: RTX 4090s, D7-P5510 drives of 3.84 TB."""
    return describe_machine(
        gpus=gpus,
        gpu="rtx4090",
        ram_bytes=768 * GIB,
        drives=drives,
        read_bytes_per_s=6.5e9 * drives,
        write_bytes_per_s=3.4e9 * drives,
        # The system's best row: the rate that the card sustains in these programs.
        flops_per_gpu=155.8e12,
        dram_bytes_per_s=409.6e9,
        cores=52,
    )


def mlp_machine(paths: int) -> Machine:
    """Describe one node of MLP-Offload's logs: four H100, one local drive, and with two paths a
    parallel file system.
    """
    return describe_machine(
        gpus=4,
        gpu="h100",
        ram_bytes=512 * GIB,
        drives=paths,
        read_bytes_per_s=6.9e9 + (3.6e9 if paths > 1 else 0.0),
        write_bytes_per_s=5.3e9 + (3.6e9 if paths > 1 else 0.0),
    )


def dgx2() -> Machine:
    """Describe the node of ZeRO-Infinity: sixteen V100 of 32 GB."""
    return describe_machine(
        gpus=16,
        gpu="a100",
        gpu_mem_bytes=31.7 * GIB,
        ram_bytes=1536 * GIB,
        drives=8,
        read_bytes_per_s=25.6e9,
        write_bytes_per_s=25.6e9,
        flops_per_gpu=70e12,
        flops_peak_per_gpu=125e12,
        pcie_per_gpu=12e9,
        pcie_host=48e9,
    )


# -- The results -----------------------------------------------------------------------------------

RATEL_ASSUMED = (
    "sequences of 1,024 (the default of its main.py); TFLOPS count 8 operations per parameter and "
    "token; 6.5 GB/s read and 3.4 written by a drive (its data sheet, from memory)"
)
MLP_ASSUMED = (
    "parameters as the logs count them; NVMe 6.9/5.3 GB/s, parallel file system 3.6/3.6 (the "
    "paper's testbed, from memory); nothing cached in RAM"
)
INFINITY_ASSUMED = (
    "125 layers of 8,192, 24 sequences of 1,024 on each GPU, 1.6 GB/s of NVMe each way and 3 GB/s "
    "of PCIe for each GPU beside the others, parameters in CPU memory (the paper's Table 1 and "
    "Figure 2b, from memory); 70 TFLOP/s as in its section 4; RAM 1.5 TB"
)


def ratel() -> list[Result]:
    """List the rows of Ratel's evaluation_data.md: one RTX 4090, 13B and 175B."""
    found = []
    policy = {"params": "nvme", "optim": "nvme", "update": "backward", "activations": "nvme"}

    def add(figure: str, layers: int, width: int, batch: int, drives: int, tflops: float) -> None:
        size = "13B" if width == 5120 else "175B"
        found.append(
            Result(
                system="Ratel",
                source="arXiv 2403.06504 (ICDE'25), evaluation_data.md of its artifact",
                figure=f"Figure {figure}",
                title=f"{size}, batch {batch}, {drives} SSD{'s' if drives > 1 else ''}",
                layers=layers,
                width=width,
                tokens=batch * SEQ_RATEL,
                sequence=SEQ_RATEL,
                machine=ratel_machine(drives),
                read=16,
                written=14,
                order="overlapped",
                policy={**policy, **RESIDENT},
                tflops=tflops,
                gives_rate=tflops == 155.8,
                assumed=RATEL_ASSUMED,
            )
        )

    for batch, tflops in ((8, 42.8), (16, 84.3), (32, 143.1), (64, 155.8), (128, 153.8)):
        add("7(a)", 40, 5120, batch, 12, tflops)
    for batch, tflops in ((8, 52.6), (16, 86.9)):
        add("7(b)", 96, 12288, batch, 12, tflops)
    by_drives = {
        32: (37.5, 64.3, 81.1, 121.7, 142.0),
        48: (53.1, 89.7, 121.7, 146.3, 153.9),
        64: (70.3, 111.7, 136.3, 151.5, 148.2),
    }
    for batch, row in by_drives.items():
        for drives, tflops in zip((1, 2, 3, 6, 12), row, strict=True):
            add("10(b)", 40, 5120, batch, drives, tflops)
    return found


def mlp_offload() -> list[Result]:
    """List the rows of MLP-Offload's Figure 7, from the log table in its artifact: four H100, 8,192
    tokens.
    """
    found = []
    sizes = {
        "40B": (128, 5120, 20480, 48.16e9, 242.2806, 101.7173),
        "52B": (64, 8192, 21824, 44.28e9, 238.5976, 92.1730),
        "70B": (80, 8192, 28672, 68.61e9, 370.5621, 151.3378),
        "100B": (124, 8192, 28672, 105.89e9, 572.0272, 275.5288),
        "120B": (96, 10240, 28672, 106.73e9, 550.3606, 288.1785),
    }
    for size, (layers, width, mlp_width, counted, deepspeed_s, mlp_s) in sizes.items():
        for system, paths, moved, seconds in (
            # Gradients go to the drive in backward, and come back with the states.
            ("DeepSpeed ZeRO-3, NVMe", 1, (16, 16), deepspeed_s),
            ("MLP-Offload", 2, (12, 12), mlp_s),
        ):
            found.append(
                Result(
                    system=system,
                    source="arXiv 2509.02480 (SC'25), tables and logs of its artifact",
                    figure="Figure 7",
                    title=f"{size}, 4 H100, {paths} path{'s' if paths > 1 else ''}",
                    layers=layers,
                    width=width,
                    tokens=4 * SEQ,
                    sequence=SEQ,
                    machine=mlp_machine(paths),
                    read=moved[0],
                    written=moved[1],
                    order="serial",
                    policy={"params": "cpu", "optim": "nvme", "resident": {"optim": 0.0}},
                    seconds=seconds,
                    assumed=MLP_ASSUMED,
                    mlp_width=mlp_width,
                    counted=counted,
                )
            )
    return found


def zero_infinity() -> list[Result]:
    """List the one row of ZeRO-Infinity on a single node of which size and rate are known."""
    return [
        Result(
            system="ZeRO-Infinity",
            source="arXiv 2104.07857 (SC'21), more than 40 TFLOP/s on each GPU up to 100B",
            figure="Figure 5(c)",
            title="100B, 16 V100 of a DGX-2",
            layers=125,
            width=8192,
            tokens=16 * 24 * 1024,
            sequence=1024,
            machine=dgx2(),
            read=16,
            written=16,
            order="serial",
            policy={"params": "cpu", "optim": "nvme", "resident": {"optim": 0.0}},
            tflops=16 * 40.0,
            at_least=True,
            assumed=INFINITY_ASSUMED,
        )
    ]


RESULTS = (zero_infinity, ratel, mlp_offload)

# -- Ratios ----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Ratio:
    """A published speed-up of GreedySnake over ZeRO-Infinity, and the speed-up computed from bytes
    and orders with each number of drives in `DRIVES`.
    """

    title: str
    layers: int
    width: int
    gpus: int
    published: float

    def computed(self, drives: int) -> float:
        """Compute the ratio. ZeRO-Infinity reads parameters for every micro-batch during the
        passes, and updates after them; GreedySnake reads them once for all and overlaps everything.
        """
        machine = describe_machine(gpus=self.gpus, gpu="a100", ram_bytes=512 * GIB, drives=drives)
        bandwidths = machine.bandwidths
        assert bandwidths is not None
        params = 12.0 * self.layers * self.width**2
        compute_s = PASSES * params * MICRO_BATCHES * self.gpus * MICRO_TOKENS / machine.flops
        passes_s = bandwidths.io_s(Moved(4.0 * MICRO_BATCHES * params, 0.0))
        update_s = bandwidths.io_s(Moved(16.0 * params, 18.0 * params))
        once_s = bandwidths.io_s(Moved(16.0 * params, 14.0 * params))
        return (max(compute_s, passes_s) + update_s) / max(compute_s, once_s)


DRIVES = (1, 2, 4)
MICRO_BATCHES, MICRO_TOKENS = 16, 4 * SEQ
RATIOS = (
    Ratio("GPT-65B, 1 A100", 80, 8192, 1, 1.96),
    Ratio("GPT-65B, 4 A100", 80, 8192, 4, 1.93),
    Ratio("GPT-175B, 1 A100", 96, 12288, 1, 2.53),
)


# -- The tables ------------------------------------------------------------------------------------


def row_of(result: Result) -> str:
    """Format a result and its forecast, without the last column."""
    mark = "<" if result.at_least else ""
    said = f"{result.error:+.0%}{'' if result.counts else ' (not counted)'}"
    return (
        f"| {result.system}, {result.figure} | {result.title} | {mark}{result.published_s:.1f} | "
        f"{result.limit_s:.1f} | {result.forecast_s:.1f} | {said} |"
    )


def tables() -> list[str]:
    """Return the tables as Markdown, with what was assumed. Takes half a minute."""
    lines: list[str] = []
    for results in RESULTS:
        rows = results()
        lines += [
            "| system | result | published s | limit | forecast | error | infinity |",
            "|---|---|---|---|---|---|---|",
            *(f"{row_of(row)} {row.infinity_s:.1f} |" for row in rows),
            "",
        ]
        if errors := [abs(row.error) for row in rows if row.counts]:
            middle, most = statistics.median(errors), max(errors)
            lines.append(f"Error of {len(errors)}: median {middle:.0%}, largest {most:.0%}.")
        lines += [f"Source: {rows[0].source}. Assumed: {rows[0].assumed}.", ""]
    heads = [f"{drives} drive{'s' if drives > 1 else ''}" for drives in DRIVES]
    lines += [
        f"| GreedySnake over ZeRO-Infinity | published | {' | '.join(heads)} |",
        f"|---|---|{'---|' * len(heads)}",
    ]
    return lines + [row_of_ratio(ratio) for ratio in RATIOS]


def row_of_ratio(ratio: Ratio) -> str:
    """Format a ratio, and those computed for each number of drives."""
    found = " | ".join(f"{ratio.computed(drives):.2f}x" for drives in DRIVES)
    return f"| {ratio.title} | {ratio.published:.2f}x | {found} |"
