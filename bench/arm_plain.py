"""One run of R1 under plain torch, all in RAM; prints one JSON line.

bf16 parameters, fp32 masters and torch's fused AdamW on these: the usual loop of a user with enough
memory. With --optimizer=none only forward, backward and clipping: the lower bound of compute.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Callable
from typing import Any

import meter
import r1
import torch


@dataclasses.dataclass
class Training:
    """R1 in plain torch, ready to train. step: one optimizer step, returns its loss."""

    params: dict[str, torch.nn.Parameter]
    masters: list[torch.Tensor]
    optimizer: torch.optim.AdamW | None
    step: Callable[[], float]

    def states(self) -> dict[str, Any]:
        """Return all states that a resumed training needs."""
        assert self.optimizer is not None
        return {
            "params": {k: v.detach() for k, v in self.params.items()},
            "masters": [m.detach() for m in self.masters],
            "optimizer": self.optimizer.state_dict(),
        }

    @torch.no_grad()
    def load_states(self, states: dict[str, Any]) -> None:
        """Load states."""
        assert self.optimizer is not None
        for name, param in self.params.items():
            param.copy_(states["params"][name])
        for mine, loaded in zip(self.masters, states["masters"], strict=True):
            mine.copy_(loaded)
        self.optimizer.load_state_dict(states["optimizer"])

    @property
    def state_bytes(self) -> int:
        """Bytes of all tensors of the states."""
        assert self.optimizer is not None
        kept = [value for state in self.optimizer.state.values() for value in state.values()]
        return sum(
            each.numel() * each.element_size()
            for each in (*self.params.values(), *self.masters, *kept)
        )


def build(workload: r1.Workload, optimizer_name: str) -> Training:
    """R1 and an ordinary loop with fp32 masters."""
    model = r1.construct(workload)
    r1.renew_rotary(model)
    for name, parameter in model.named_parameters():
        r1.fill(name, parameter.data, workload.seed)
    params = list(model.parameters())
    masters = (
        [] if optimizer_name == "none" else [parameter.detach().float() for parameter in params]
    )
    for master in masters:
        master.requires_grad_()
        master.grad = torch.zeros_like(master)
    optimizer = (
        torch.optim.AdamW(masters, lr=workload.lr, weight_decay=workload.weight_decay, fused=True)
        if masters
        else None
    )
    batches = r1.micro_batches(workload)

    def step() -> float:
        total = 0.0
        for tokens in batches:
            loss = model(input_ids=tokens, labels=tokens).loss
            (loss / len(batches)).backward()
            total += float(loss.detach())
        if optimizer is None:
            torch.nn.utils.clip_grad_norm_(params, workload.clip)
        else:
            for parameter, master in zip(params, masters, strict=True):
                assert parameter.grad is not None
                assert master.grad is not None
                master.grad.copy_(parameter.grad)
            torch.nn.utils.clip_grad_norm_(masters, workload.clip)
            optimizer.step()
            with torch.no_grad():
                for parameter, master in zip(params, masters, strict=True):
                    parameter.copy_(master)
        model.zero_grad()
        return total / len(batches)

    return Training(dict(model.named_parameters()), masters, optimizer, step)


def run(workload: r1.Workload, optimizer_name: str) -> dict[str, Any]:
    """Train with an ordinary loop and measure. Blocks until done."""
    began = time.perf_counter()
    training = build(workload, optimizer_name)
    record = meter.measure(
        training.step,
        flush=lambda: None,
        warmup=workload.warmup,
        steps=workload.steps,
        parameters=workload.parameters,
        setup_s=time.perf_counter() - began,
    )
    return {"arm": "plain", "torch": torch.__version__, **record}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dir", help="ignored: this arm has no swap files")
    parser.add_argument(
        "--optimizer", default="adamw", choices=("adamw", "none"), help="(%(default)s)"
    )
    r1.add_arguments(parser)
    args = parser.parse_args()
    meter.report(run(r1.from_arguments(args), args.optimizer))
    return 0


if __name__ == "__main__":
    sys.exit(main())
