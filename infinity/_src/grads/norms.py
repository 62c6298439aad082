"""Arithmetic of gradient slots: norms in fp32, and the log of scalings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import torch

NORM_PIECE_NUMEL = 1 << 24  # 64 MiB of fp32 scratch per model, however large its embedding is
LogEntry = tuple[str, float]


def replay(value: torch.Tensor, log: Sequence[LogEntry]) -> torch.Tensor:
    """Apply the log in place to an fp32 tensor, one rounding per entry."""
    for kind, factor in log:
        value.mul_(factor) if kind == "mul" else value.div_(factor)
    return value


def norm_there(gradient: torch.Tensor) -> torch.Tensor:
    """The norm of a gradient by the rule of `GradSlot`, as a scalar on its device, which nobody waits for."""
    if gradient.numel() <= NORM_PIECE_NUMEL:
        norm: torch.Tensor = torch.linalg.vector_norm(gradient.float())
        return norm
    pieces = gradient.reshape(-1).split(NORM_PIECE_NUMEL)
    whole: torch.Tensor = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(piece.float()) for piece in pieces]))
    return whole


def to_fp32(value: float) -> float:
    """The number as fp32 rounds it."""
    return float(torch.tensor(value, dtype=torch.float32))


def raise_unsupported(name: str, operation: str) -> NoReturn:
    """Raise the error of an operation that a stand-in cannot answer, with the way that works."""
    if "clamp" in operation or "clip" in operation:
        way = "clip by norm (torch.nn.utils.clip_grad_norm_), or assign p.grad.materialize().clamp(...) to p.grad"
    elif "addc" in operation or "lerp" in operation or "_fused_" in operation or "foreach_add" in operation:
        way = "step with infinity's AdamW, SGD, Lion or Elementwise, which take the gradients where they rest"
    else:
        way = (
            "it answers norms, `*=`, `/=`, zero_ and GradScaler; p.grad.materialize() returns its values on the CPU, and "
            "a tensor assigned to p.grad takes their place"
        )
    raise RuntimeError(f"{name}.grad rests in CPU memory and does not support {operation}: {way}")
