"""The largest single linear (width -> 4 x width, as an MLP's) that trains within a limit of GPU
memory, whole and tiled.

After ZeRO-Infinity §5.1.3 and its figure 6b: without tiling a linear and its gradient must be whole
in GPU memory. Sizes double until one fails; the cause (GPU memory, or the RAM budget) is recorded.
On a GPU the process sets its memory limit, so that a large card emulates a small one: otherwise
RAM, 14 bytes per parameter, would end the search first.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import accelerator
import harness
import torch
from torch import nn

import infinity as inf
from infinity._src.memory.ledger import memory_left_bytes
from infinity.errors import BudgetError

BYTES_PER_PARAM = 16  # in RAM: exact states and gradients, and room
ROWS = 64


class Mlp(nn.Module):
    """One large linear, and a sum behind it that keeps its output's gradient from being trivial."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width, bias=True, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(x).float().square().mean()


def fill(_name: str, tensor: torch.Tensor) -> None:
    """Small values, made on the GPU where there is one."""
    if tensor.device.type == "cpu" and torch.cuda.is_available():
        flat = tensor.view(-1)
        piece = 1 << 26  # within the limit of device memory, whatever the size of the weight
        for start in range(0, flat.numel(), piece):
            part = flat[start : start + piece]
            part.copy_(
                torch.empty(part.shape, dtype=tensor.dtype, device="cuda").normal_(0.0, 0.02)
            )
    else:
        tensor.normal_(0.0, 0.02)


def train(width: int, tiles: int, device: str) -> dict[str, Any]:
    """Two steps of the linear of this width. Raises what offloading or computing raises."""
    with torch.device("meta"):
        model = Mlp(width)
    if tiles > 1:
        inf.tile_linears(model, tiles=tiles)
    where = {"device": "cuda"} if device == "cuda" else {}
    accelerator.clear(device)
    began = time.perf_counter()
    inf.offload(model, inf.Policy(params="cpu", optim="cpu", **where), load=fill)
    handle = inf.handle(model)
    try:
        optimizer = inf.AdamW(model.parameters(), lr=1e-4)
        setup_s = time.perf_counter() - began
        began = time.perf_counter()
        rows = torch.ones(ROWS, width, dtype=torch.bfloat16, device=device)
        for _ in range(2):
            loss = model(rows)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        handle.flush()
        accelerator.synchronise(device)
        return {
            "setup_s": setup_s,
            "step_s": (time.perf_counter() - began) / 2,
            "loss": float(loss.detach()),
            "peak_bytes": accelerator.peak_bytes(device),
            "params": handle.stats().params,
            "gathered_bytes": handle.stats().gathered_bytes_peak,
        }
    finally:
        handle.close()


def attempt(width: int, tiles: int, device: str) -> dict[str, Any]:
    """Run `train`. "failed" has the reason for which it ended, "" if it succeeded."""
    try:
        return {**train(width, tiles, device), "failed": ""}
    except torch.OutOfMemoryError as error:
        why = f"GPU memory: {str(error).splitlines()[0]}"
    except BudgetError as error:
        why = f"RAM: {str(error).splitlines()[0]}"
    except ValueError as error:
        why = f"refused: {str(error).splitlines()[0]}"
    # Out of the handlers: a traceback holds the frames, and their tensors, of what failed.
    gc.collect()
    accelerator.clear(device)
    return {"failed": why}


def search(
    tiles: int, device: str, *, first: int, width_max: int, until_s: float
) -> Iterator[dict[str, Any]]:
    """Yield a record for each size, until one does not train. Each size has twice as many
    parameters as the one before."""
    width = first
    while width <= width_max and time.monotonic() < until_s:
        found: dict[str, Any] = {"width": width, "tiles": tiles, "parameters": 4 * width * width}
        if BYTES_PER_PARAM * found["parameters"] > 0.9 * memory_left_bytes():
            found["failed"] = "RAM: not tried, it would not hold the states"
        else:
            found |= attempt(width, tiles, device)
        accelerator.note(f"{tiles} tiles, width {width}: {found['failed'] or 'trains'}")
        yield found
        if found["failed"]:
            return
        width = round(width * 2**0.5 / 256) * 256 if width >= 1024 else 2 * width


def show(args: argparse.Namespace, rows: Sequence[dict[str, Any]]) -> None:
    """Print the table."""
    lines = []
    for tiles in dict.fromkeys(row["tiles"] for row in rows):
        mine = [row for row in rows if row["tiles"] == tiles]
        good = [row for row in mine if not row["failed"]]
        ended = next((row["failed"] for row in mine if row["failed"]), "time or the largest width")
        figures = ["none", "", "", "", ""]
        if good:
            one = good[-1]
            figures = [
                f"{one['width']} -> {4 * one['width']}",
                f"{one['parameters'] / 1e6:.0f} M",
                f"{one['peak_bytes'] / 2**20:.0f}",
                f"{one['gathered_bytes'] / 2**20:.0f}",
                f"{one['step_s']:.2f}",
            ]
        lines.append((str(tiles), *figures, ended[:60]))
    harness.print_table(
        f"The largest linear within {args.limit:g} GiB of GPU memory"
        if args.device == "cuda"
        else "A linear, whole and tiled",
        ("tiles", "largest", "parameters", "peak MiB", "gathered MiB", "s/step", "ended by"),
        lines,
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    accelerator.add_arguments(parser)
    parser.add_argument("--tiles", default="1,4,16", help="with commas between (%(default)s)")
    parser.add_argument(
        "--limit",
        type=float,
        default=1.0,
        help="GiB of GPU memory that this process may use (%(default)s)",
    )
    parser.add_argument("--first", type=int, help="the smallest width (4096; 128 on the CPU)")
    parser.add_argument("--width-max", type=int, help="the largest one (none; 256 on the CPU)")
    parser.add_argument(
        "--seconds",
        type=float,
        default=120.0,
        help="time after which no measurement begins (%(default)s)",
    )
    args = parser.parse_args()
    with accelerator.computing(args.device) as device:
        first, width_max = (4096, 1 << 20) if device == "cuda" else (128, 256)
        limit = {"limit_gib": args.limit} if device == "cuda" else {}
        if device == "cuda":
            # The context and what it loads are not tensors, and are not counted.
            torch.cuda.set_per_process_memory_fraction(
                min(args.limit * 2**30 / accelerator.memory_bytes("cuda"), 1.0)
            )
        began, counts, rows = time.monotonic(), [int(part) for part in args.tiles.split(",")], []
        for index, tiles in enumerate(counts):
            for row in search(
                tiles,
                device,
                first=args.first or first,
                width_max=args.width_max or width_max,
                until_s=began + args.seconds * (index + 1) / len(counts),
            ):
                accelerator.record("largest_linear", args.device, {**row, **limit}, args.results)
                rows.append(row)
    show(args, rows)
    return 0 if any(not row["failed"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(accelerator.main(main))
