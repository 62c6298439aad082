"""Bandwidth of the engine's copies as a share of the bus's, measured alternately in one run.

    to the device     a forward without gradients, params="cpu": every unit is gathered
    from the device   a backward, params="device": every gradient leaves, nothing is gathered
    both ways         a backward, params="cpu": units arrive, gradients leave

The model is a stack of large square matrices with a batch of one row, so compute is negligible: a
matrix that needs 2.4 ms for its copy at 55 GB/s is multiplied in 0.1 ms. For comparison the same
bytes are copied between pinned torch tensors and the device. Bytes are counted by `stats()` if it
counts them, else they are the parameters'. As in training, an optimizer holds the parameters: other
gradients would be stored in memory that is not pinned. Before recording, the script checks by the
driver that all gradients are in pinned memory.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import accelerator
import harness
import torch
from torch import nn

import infinity as inf
from infinity._src.memory.ledger import memory_left_bytes

WAYS = ("to the device", "from the device", "both ways")
AIM = 0.95


class Stack(nn.Module):
    """Square matrices one after another; each is a unit."""

    def __init__(self, side: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            [nn.Linear(side, side, bias=False, dtype=torch.bfloat16) for _ in range(layers)]
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Way:
    """One direction through the engine: a model whose passes copy only in that direction."""

    def __init__(self, way: str, device: str, side: int, layers: int) -> None:
        self.way, self.device = way, device
        with torch.device("meta"):
            model = Stack(side, layers)
        # Small values: products of many matrices stay finite. All layers get the same matrix:
        # random numbers for all would take a CPU a minute.
        matrix = torch.empty(side, side, dtype=torch.bfloat16).normal_(0.0, side**-0.5)
        tier = "device" if way == "from the device" else "cpu"
        where = {"device": "cuda"} if device == "cuda" else {}
        self.model = inf.offload(
            model,
            inf.Policy(params=tier, optim="cpu", **where),
            load=lambda _name, tensor: tensor.copy_(matrix),
        )
        self.handle = inf.handle(self.model)
        self.optimizer = inf.SGD(self.model.parameters(), lr=1e-4)
        self.row = torch.ones(1, side, device=device, dtype=torch.bfloat16, requires_grad=True)
        self.param_bytes = 2 * side * side * layers

    def seconds(self) -> tuple[float, float, float]:
        """Seconds, and bytes moved to and from the device, of one pass. Blocks."""
        before = self._counted()
        if self.way == "to the device":
            taken = self._timed(self._forward)
            expected = (self.param_bytes, 0)
        else:
            output = self.model(self.row)
            before = self._counted()
            taken = self._timed(lambda: output.sum().backward())
            expected = (0 if self.way == "from the device" else self.param_bytes, self.param_bytes)
            self._check_pinned()
            self.optimizer.zero_grad()
        counted = tuple(now - then for now, then in zip(self._counted(), before, strict=True))
        to_bytes, from_bytes = counted if any(counted) else expected
        return taken, to_bytes, from_bytes

    def _check_pinned(self) -> None:
        """Raise BenchError if a gradient waits in pageable memory: copies to it are not those of
        pinned memory."""
        loose = sum(not self._is_pinned(tensor) for tensor in self._gradients())
        if loose:
            raise harness.BenchError(
                f"{loose} of the gradients rest in pageable memory: what was timed is no copy over "
                "the bus alone"
            )

    def _gradients(self) -> list[torch.Tensor]:
        """Return the memory in which gradients wait."""
        params = [param for unit in self.handle.units for param in unit.params]
        return [param.grad.tensor for param in params if param.grad is not None]

    def _is_pinned(self, tensor: torch.Tensor) -> bool:
        driver = self.handle.parts.split.device.driver
        if driver is None:
            return True  # the CPU copies to any memory alike
        if self.device == "cuda":
            return tensor.is_pinned()  # cudaPointerGetAttributes
        first, last = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        return any(low <= first and last <= low + size for low, size in driver._pinned.items())

    def _forward(self) -> None:
        with torch.no_grad():
            self.model(self.row)

    def _timed(self, action: Callable[[], Any]) -> float:
        accelerator.synchronise(self.device)
        began = time.perf_counter()
        action()
        accelerator.synchronise(self.device)
        return time.perf_counter() - began

    def _counted(self) -> tuple[int, int]:
        stats = self.handle.stats()
        return getattr(stats, "h2d_bytes", 0), getattr(stats, "d2h_bytes", 0)

    def close(self) -> None:
        """Free all."""
        self.handle.close()
        accelerator.clear(self.device)


def measure(way: str, device: str, *, side: int, layers: int, rounds: int) -> dict[str, Any]:
    """Measure rounds of one direction: the engine, then plain copies of the same bytes. The first
    round is not counted. Blocks."""
    through, plain = Way(way, device, side, layers), accelerator.PlainCopies(device)
    ratios, rates = [], []
    try:
        for number in range(rounds + 1):
            taken, to_bytes, from_bytes = through.seconds()
            beside = plain.seconds(to_bytes=to_bytes, from_bytes=from_bytes)
            if number:
                ratios.append(beside / taken)
                rates.append(((to_bytes + from_bytes) / taken, (to_bytes + from_bytes) / beside))
    finally:
        through.close()
    ratio = harness.Summary.of(ratios)
    ours, theirs = (harness.Summary.of([pair[index] for pair in rates]) for index in range(2))
    return {
        "way": way,
        "bytes": [to_bytes, from_bytes],
        "engine_gbps": ours.median / 1e9,
        "plain_gbps": theirs.median / 1e9,
        "ratio": ratio.median,
        "ratio_least": ratio.least,
        "ratio_most": ratio.most,
        "rounds": ratio.count,
        "aim": AIM,
    }


def size_of(device: str, side: int) -> int:
    """Layers: as many as make 4 GiB, less where the device or RAM is small."""
    if device == "cpu":
        return 6
    room = min(4 << 30, accelerator.memory_bytes(device) // 4, memory_left_bytes() // 8)
    return max(int(room // (2 * side * side)), 6)


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Print the table."""
    harness.print_table(
        "Copies: the engine beside plain pinned copies",
        ("", "engine GB/s", "plain GB/s", "ratio"),
        [
            (row["way"], f"{row['engine_gbps']:.1f}", f"{row['plain_gbps']:.1f}",
             f"{row['ratio']:.3f} ({row['ratio_least']:.3f}–{row['ratio_most']:.3f})")
            for row in rows
        ],
    )  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    accelerator.add_arguments(parser)
    parser.add_argument("--rounds", type=int, default=5, help="(%(default)s)")
    parser.add_argument("--side", type=int, help="of a matrix (8192 on a GPU: 128 MiB)")
    args = parser.parse_args()
    rows = []
    with accelerator.computing(args.device) as device:
        side = args.side or (8192 if device == "cuda" else 128)
        layers = size_of(device, side)
        for way in WAYS:
            accelerator.note(f"{way}: {layers} matrices of {side}²")
            row = measure(way, device, side=side, layers=layers, rounds=args.rounds)
            accelerator.record(
                "copies", args.device, {"side": side, "layers": layers, **row}, args.results
            )
            rows.append(row)
    show(rows)
    return 0


if __name__ == "__main__":
    sys.exit(accelerator.main(main))
