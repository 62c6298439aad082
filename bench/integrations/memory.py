"""Measures memory of transformers' Trainer with everything on NVMe: RAM must never hold the model.

    parent   writes a Llama-shaped checkpoint of random bf16 values, shard by shard
      first    from_pretrained -> embed -> two steps, both saved -> best model -> export
      resume   from_pretrained -> embed -> resume from the first checkpoint
      whole    from_pretrained -> state_dict: checks that the meter notices a whole model in RAM

It samples anonymous and shared memory every few milliseconds. A phase may add at most the engine's
budget and three times the largest tensor; memory that malloc retains for the next unit
(`Stats.heap_spare_bytes`) may be added, and is then reported. Training adds more: gathered units
and activations, which the budget excludes. `update="backward"` stores no gradients, so the budget
is small compared with the model. Exits with 1 if a phase exceeds limit and spare, or if a whole
model does not.

    python bench/integrations/memory.py --dir /mnt/nvme0
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file

import infinity as inf
from infinity.integrations.transformers import embed, from_pretrained

MIB = 1 << 20
SAMPLE_S = 0.002
STEPS = 2
TRAINING = "training, saves included"
"""The phase that has gathered units and activations, too: no limit here."""


def memory_bytes() -> int:
    """Anonymous and shared memory of this process."""
    found = 0
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(("RssAnon:", "RssShmem:")):
            found += int(line.split()[1]) * 1024
    return found


class Meter:
    """Peaks of memory by phase, above what there was at construction."""

    def __init__(self) -> None:
        self.start = memory_bytes()
        self.peaks: dict[str, int] = {}
        self.before: dict[str, int] = {}

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure what runs inside."""
        seen, ended = [memory_bytes()], threading.Event()

        def sample() -> None:
            while not ended.wait(SAMPLE_S):
                seen.append(memory_bytes())

        thread = threading.Thread(target=sample)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            seen.append(memory_bytes())
            peak, before = max(seen) - self.start, seen[0] - self.start
            known = name in self.peaks
            if not known or peak - before > self.peaks[name] - self.before[name]:
                self.peaks[name], self.before[name] = peak, before

    def around(self, owner: Any, method: str, name: str) -> None:
        """Measure each call of a method as a phase."""
        own = getattr(owner, method)

        def measured(*args: Any, **kwargs: Any) -> Any:
            with self.phase(name):
                return own(*args, **kwargs)

        setattr(owner, method, measured)


def write_checkpoint(directory: Path, hidden: int, layers: int) -> None:
    """Write a Llama of random values, one shard for each layer and one for the rest."""
    config = transformers.LlamaConfig(
        vocab_size=32000, hidden_size=hidden, intermediate_size=4 * hidden,
        num_hidden_layers=layers, num_attention_heads=hidden // 128,
        num_key_value_heads=hidden // 128, tie_word_embeddings=False, dtype="bfloat16",
    )  # fmt: skip
    config.architectures = ["LlamaForCausalLM"]
    with torch.device("meta"):
        shapes = transformers.LlamaForCausalLM(config).state_dict()
    shards: dict[str, list[str]] = {}
    for name in shapes:
        block = name.split(".")[2] if ".layers." in name else "rest"
        shards.setdefault(f"model-{block}.safetensors", []).append(name)
    directory.mkdir(parents=True)
    generator = torch.Generator().manual_seed(0)
    for file, names in shards.items():
        values = {
            name: torch.randn(shapes[name].shape, generator=generator).mul_(0.02).bfloat16()
            for name in names
        }
        save_file(values, directory / file, metadata={"format": "pt"})
    weight_map = {name: file for file, names in shards.items() for name in names}
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    config.save_pretrained(directory)


def rows(count: int, seed: int) -> list[dict[str, torch.Tensor]]:
    """Short rows of tokens: activations are small."""
    generator = torch.Generator().manual_seed(seed)
    drawn = [torch.randint(0, 32000, (16,), generator=generator) for _ in range(count)]
    return [{"input_ids": row, "labels": row} for row in drawn]


def policy(place: Path) -> inf.Policy:
    """Everything on NVMe, without gradients that wait."""
    swap = place / "swap"
    swap.mkdir(exist_ok=True)
    return inf.Policy(params="nvme", optim="nvme", nvme=swap, ram="min", update="backward")


def trainer_of(model: Any, place: Path) -> Any:
    """A Trainer that saves and evaluates each step, and loads the best model at its end."""
    arguments = transformers.TrainingArguments(
        str(place / "out"), use_cpu=True, per_device_train_batch_size=1, max_steps=STEPS,
        per_device_eval_batch_size=1, max_grad_norm=0.0, learning_rate=1e-4, logging_steps=1,
        save_strategy="steps", save_steps=1, eval_strategy="steps", eval_steps=1,
        load_best_model_at_end=True, report_to=[], disable_tqdm=True,
    )  # fmt: skip
    return embed(
        transformers.Trainer(
            model, arguments, train_dataset=rows(STEPS, 1), eval_dataset=rows(1, 2)
        )
    )


def first(place: Path, meter: Meter) -> Any:
    """Load, train with saves and a best model, export."""
    with meter.phase("load"):
        model = from_pretrained(
            transformers.AutoModelForCausalLM, place / "weights", policy(place)
        )
    trainer = trainer_of(model, place)
    meter.around(trainer, "_save_checkpoint", "save")
    meter.around(trainer, "_load_best_model", "best model")
    with meter.phase(TRAINING):
        trainer.train()
    with meter.phase("export"):
        trainer.save_model(str(place / "exported"))
    return model


def resume(place: Path, meter: Meter) -> Any:
    """Resume from the first checkpoint."""
    with meter.phase("load"):
        model = from_pretrained(
            transformers.AutoModelForCausalLM, place / "weights", policy(place)
        )
    trainer = trainer_of(model, place)
    meter.around(trainer, "_load_from_checkpoint", "resume")
    meter.around(trainer, "_load_optimizer_and_scheduler", "resume")
    trainer.train(resume_from_checkpoint=str(place / "out" / "checkpoint-1"))
    return model


def whole(place: Path, meter: Meter) -> Any:
    """Load, and copy all of it into RAM."""
    model = from_pretrained(transformers.AutoModelForCausalLM, place / "weights", policy(place))
    with meter.phase("state_dict"):
        state = model.state_dict()
    assert state
    return model


CHILDREN = {"first": first, "resume": resume, "whole": whole}


def warm_up(place: Path) -> None:
    """Train a tiny model, saved once: what a training imports is no part of the measurement."""
    small = place / "small"
    write_checkpoint(small / "weights", hidden=128, layers=1)
    (small / "swap").mkdir()
    model = first(small, Meter())
    inf.handle(model).close()
    shutil.rmtree(small)


def child(name: str, place: Path) -> None:
    """Run one, and write what it took."""
    warm_up(place)
    gc.collect()
    meter = Meter()
    began = time.monotonic()
    model = CHILDREN[name](place, meter)
    handle = inf.handle(model)
    record = {
        "peaks": meter.peaks,
        "before": meter.before,
        "heap_spare": handle.stats().heap_spare_bytes,
        "budget": handle.stats().ram_min_bytes,
        "largest": max(p.numel() * p.element_size() for p in model.parameters()),
        "model": sum(p.numel() * p.element_size() for p in model.parameters()),
        "seconds": round(time.monotonic() - began, 1),
    }
    handle.close()
    (place / f"{name}.json").write_text(json.dumps(record))


def main() -> int:
    """Run all, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--dir", type=Path, required=True, help="a directory on an NVMe drive")
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--child", choices=CHILDREN, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.child, options.dir)
        return 0
    place = options.dir / "memory"
    shutil.rmtree(place, ignore_errors=True)
    try:
        write_checkpoint(place / "weights", options.hidden, options.layers)
        records = {}
        for name in CHILDREN:
            command = [sys.executable, __file__, "--dir", str(place), "--child", name]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            records[name] = json.loads((place / f"{name}.json").read_text())
    finally:
        shutil.rmtree(place, ignore_errors=True)
    return report(records)


def _verdict(added: int, limit: int, spare: int) -> str:
    if added <= limit:
        return "within"
    return "within, with malloc's spare" if added <= limit + spare else "over"


def report(records: dict[str, dict[str, Any]]) -> int:
    """Print the table; 1 where a phase is over its limit, or the meter missed a whole model."""
    well = True
    print("| process | phase | before, MiB | peak | added | limit | |")
    print("|---|---|---|---|---|---|---|")
    for name, record in records.items():
        limit = record["budget"] + 3 * record["largest"]
        for phase, peak in record["peaks"].items():
            before = record["before"][phase]
            added = peak - before
            verdict = "" if phase == TRAINING else _verdict(added, limit, record["heap_spare"])
            well &= (verdict == "over") is (name == "whole")
            sizes = " | ".join(f"{each / MIB:.0f}" for each in (before, peak, added, limit))
            print(f"| {name} | {phase} | {sizes} | {verdict} |")
    one = records["first"]
    print(
        f"model {one['model'] / MIB:.0f} MiB, budget {one['budget'] / MIB:.0f} MiB, largest tensor "
        f"{one['largest'] / MIB:.0f} MiB, heap spare {one['heap_spare'] / MIB:.0f} MiB; "
        + ", ".join(f"{name} {record['seconds']} s" for name, record in records.items())
    )
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
