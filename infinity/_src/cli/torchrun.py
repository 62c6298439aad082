"""The ranks of one `infinity train`, as torchrun starts them: joined, told apart, ended with one
message.

Each rank trains on its rows of every batch and stores its shards; rank 0 alone writes to the
console and to metrics.jsonl. An error that stops one rank stops all. The first rank that says so in
the store of the group prints its error, and ranks that only lost it are silent. torchrun ends the
processes that are left.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from infinity._src.base.torch_compat import is_out_of_memory
from infinity._src.cli.stop_signals import Stopped, StopSignals
from infinity.errors import AioError, RankFailed

# In the group's store: the rank whose error is told, and the number of the signal that ended it.
_STOPPED = "infinity train/stopped"
_PATIENCE_S = 3.0
"""Wait of a rank that may only have lost another one, for that one to tell why."""
_JOIN_S = 300.0


@dataclasses.dataclass(frozen=True)
class Joined:
    """Place of this process among the ranks that train together. device: the one it computes on.
    store: the group's; None for one rank. signals: those that reach this process.
    """

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    device: str = "cpu"
    store: Any = None
    signals: StopSignals = dataclasses.field(default_factory=StopSignals, compare=False)
    # One number: the signal that all ranks have heard of.
    _heard: list[int] = dataclasses.field(default_factory=lambda: [0], compare=False)

    @property
    def first(self) -> bool:
        """True on the rank that prints the progress."""
        return self.rank == 0

    def sums(self, *values: float) -> list[float]:
        """Return the sum of each value over all ranks, in double, in the order of ranks. Ranks hear
        of each other's signals by it. Collective.
        """
        if self.world == 1:
            return list(values)
        mine = torch.tensor([*values, self.signals.number], dtype=torch.float64)
        # No all_reduce: the order of its sum, and so its bits, depend on the backend.
        everyone = [torch.empty_like(mine) for _ in range(self.world)]
        dist.all_gather(everyone, mine)
        total = torch.zeros_like(mine)
        for each in everyone:
            total += each
        self._heard[0] = int(max(each[-1] for each in everyone))
        return [float(value) for value in total[:-1]]

    @property
    def signal(self) -> int:
        """The number of a signal that has reached a rank, alike on all that have called `sums` as
        often; 0 without one.
        """
        return self.signals.number if self.world == 1 else self._heard[0]

    def together(self) -> None:
        if self.world > 1:
            dist.barrier()

    def tells(self, error: BaseException) -> bool:
        """Decide whether this rank prints what stopped the run. Blocks for some seconds where
        another may know better.
        """
        if self.world == 1:
            return True
        try:
            # These are this rank's own. Any other error may only mean that another rank has gone.
            own = isinstance(error, (ValueError, AioError, KeyboardInterrupt))
            if not own and not is_out_of_memory(error):
                deadline = time.monotonic() + _PATIENCE_S
                while time.monotonic() < deadline and not self.store.check([_STOPPED]):
                    time.sleep(0.05)
            number = error.number if isinstance(error, Stopped) else 0
            mine = f"{self.rank} {number}"
            # The first that sets the key tells; the store compares and sets in one operation.
            return bool(self.store.compare_set(_STOPPED, "", mine) == mine.encode())
        except (RuntimeError, OSError):
            # The store went with its node: no other process knows.
            return True

    def ended_by(self) -> int:
        """Return the signal that has ended another rank at once, and this one by that; 0 where it
        was none.
        """
        if self.world == 1:
            return 0
        try:
            if not self.store.check([_STOPPED]):
                return 0
            return int(self.store.get(_STOPPED).split()[1])
        except (RuntimeError, OSError):
            return 0


@contextlib.contextmanager
def joined(device: str | None, environment: Mapping[str, str] | None = None) -> Iterator[Joined]:
    """Join the ranks that torchrun has started, and yield this process's place among them; alone
    without torchrun. Blocks until all have come.

    device: as the user wrote it; None or "cuda": the GPU with this rank's number in its node, if
    there is a GPU.
    Raises: ValueError for an environment that is not torchrun's, and a device that all ranks of a
    node would share; RankFailed where the ranks cannot meet.
    """
    environment = os.environ if environment is None else environment
    found = place_of(device, environment)
    if found.world == 1:
        yield found
        return
    cuda = torch.device(found.device).type == "cuda"
    if cuda:
        # NCCL takes the current device, which would be GPU 0 on every rank.
        torch.cuda.set_device(torch.device(found.device))
    # NCCL moves no CPU tensors, and `sums` and names of collectives are such.
    try:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=timedelta(seconds=_JOIN_S)
        )
    except (RuntimeError, OSError) as error:
        place = f"{environment['MASTER_ADDR']}:{environment['MASTER_PORT']}"
        raise RankFailed(
            f"rank {found.rank} cannot join the {found.world} ranks at {place}: "
            f"{str(error).partition(chr(10))[0]}. Start all of them, with one MASTER_ADDR and "
            "MASTER_PORT",
            rank=found.rank,
        ) from error
    try:
        yield dataclasses.replace(found, store=dist.distributed_c10d._get_default_store())
    finally:
        dist.destroy_process_group()


def place_of(device: str | None, environment: Mapping[str, str]) -> Joined:
    """Find the place that the environment names, and the device that this rank computes on. Raises:
    ValueError, as `joined`.
    """
    numbers: dict[str, int] = {}
    for name, alone in (("WORLD_SIZE", "1"), ("RANK", "0"), ("LOCAL_RANK", "0")):
        text = environment.get(name, alone)
        if not text.isdecimal():
            raise ValueError(
                f"{name}={text!r} in the environment is not a number; start several ranks with "
                "torchrun"
            )
        numbers[name] = int(text)
    world, rank, local = numbers["WORLD_SIZE"], numbers["RANK"], numbers["LOCAL_RANK"]
    if world <= 1:
        return Joined(device=device or ("cuda" if torch.cuda.is_available() else "cpu"))
    missing = [
        name
        for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
        if name not in environment
    ]
    if missing:
        raise ValueError(
            f"WORLD_SIZE={world} is in the environment and {', '.join(missing)} not: start several "
            f"ranks with torchrun --nproc-per-node {world} -m infinity train ..., or unset "
            "WORLD_SIZE"
        )
    if device is not None and device.startswith("cuda:"):
        raise ValueError(
            f"--device {device} would be the device of all ranks of a node; with --device cuda "
            "each has the GPU of its number"
        )
    if device in (None, "cuda") and torch.cuda.is_available():
        if local >= torch.cuda.device_count():
            raise ValueError(
                f"local rank {local} has no GPU: there are {torch.cuda.device_count()}; start "
                "fewer ranks, or give --device cpu"
            )
        device = f"cuda:{local}"
    return Joined(rank, world, local, device or "cpu")
