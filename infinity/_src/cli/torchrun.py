"""The ranks of one `infinity train` under torchrun: they join a process group, and end with one
error message.

Each rank trains on its rows of every batch and stores its shards. Rank 0 alone prints progress and
writes metrics.jsonl. An error that stops one rank stops all. The first rank that records its error
in the group's store prints it; ranks that only lost the connection are silent. torchrun ends the
remaining processes.
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

# Key of the group's store. The value has the rank that prints its error, and the number of the
# signal that ended this rank, or 0.
_STOPPED = "infinity train/stopped"
_PATIENCE_S = 3.0
"""Time that a rank with a lost connection waits for another rank to record the cause."""
_JOIN_S = 300.0


@dataclasses.dataclass(frozen=True)
class Joined:
    """Place of this process among the ranks that train together. device: the rank's compute device.
    store: the process group's store; None for one rank. signals: signals of this process.
    """

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    device: str = "cpu"
    store: Any = None
    signals: StopSignals = dataclasses.field(default_factory=StopSignals, compare=False)
    # The signal that all ranks know of; a list, since the class is frozen.
    _heard: list[int] = dataclasses.field(default_factory=lambda: [0], compare=False)

    @property
    def first(self) -> bool:
        """True on rank 0, which prints progress."""
        return self.rank == 0

    def sums(self, *values: float) -> list[float]:
        """Return the sum of each value over all ranks, in float64, added in the order of ranks.
        Ranks also exchange their signals. Collective; blocks until all ranks call it.
        """
        if self.world == 1:
            return list(values)
        mine = torch.tensor([*values, self.signals.number], dtype=torch.float64)
        # all_gather, since the order of all_reduce's additions, and so the bits, depend on the
        # backend.
        everyone = [torch.empty_like(mine) for _ in range(self.world)]
        dist.all_gather(everyone, mine)
        total = torch.zeros_like(mine)
        for each in everyone:
            total += each
        self._heard[0] = int(max(each[-1] for each in everyone))
        return [float(value) for value in total[:-1]]

    @property
    def signal(self) -> int:
        """The number of a signal that a rank has received; 0 before. On several ranks the value
        changes only in `sums`, so all ranks have the same; on one rank it changes immediately.
        """
        return self.signals.number if self.world == 1 else self._heard[0]

    def together(self) -> None:
        if self.world > 1:
            dist.barrier()

    def tells(self, error: BaseException) -> bool:
        """Return whether this rank prints the error that stopped the run. Blocks for `_PATIENCE_S`
        seconds if another rank may know the cause.
        """
        if self.world == 1:
            return True
        try:
            # These errors have their cause on this rank. Other errors may only mean that another
            # rank has ended.
            own = isinstance(error, (ValueError, AioError, KeyboardInterrupt))
            if not own and not is_out_of_memory(error):
                deadline = time.monotonic() + _PATIENCE_S
                while time.monotonic() < deadline and not self.store.check([_STOPPED]):
                    time.sleep(0.05)
            number = error.number if isinstance(error, Stopped) else 0
            mine = f"{self.rank} {number}"
            # The store compares and sets atomically: only the first rank that sets the key prints.
            return bool(self.store.compare_set(_STOPPED, "", mine) == mine.encode())
        except (RuntimeError, OSError):
            # The store's process has ended, so no other rank can record the cause.
            return True

    def ended_by(self) -> int:
        """Return the number of the signal that ended the rank whose error is printed; 0 if no
        signal did.
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
    """Join the ranks that torchrun has started, and yield this process's place among them; without
    torchrun there is a single rank. Blocks until all ranks have joined.

    device: value of --device; None or "cuda": the GPU whose number is this rank's local rank, if
    there is a GPU.
    Raises: ValueError for an environment that is not torchrun's, and for a GPU that all ranks of a
    node would share; RankFailed if the ranks cannot connect.
    """
    environment = os.environ if environment is None else environment
    found = place_of(device, environment)
    if found.world == 1:
        yield found
        return
    cuda = torch.device(found.device).type == "cuda"
    if cuda:
        # NCCL uses the current device; without this call every rank would use GPU 0.
        torch.cuda.set_device(torch.device(found.device))
    # NCCL cannot move CPU tensors, which `sums` and the ordering agreement of collectives need.
    try:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=timedelta(seconds=_JOIN_S)
        )
    except (RuntimeError, OSError) as error:
        place = f"{environment['MASTER_ADDR']}:{environment['MASTER_PORT']}"
        raise RankFailed(
            f"rank {found.rank} cannot join the {found.world} ranks at {place}: "
            f"{str(error).partition(chr(10))[0]}. Start all ranks, with the same MASTER_ADDR and "
            "MASTER_PORT",
            rank=found.rank,
        ) from error
    try:
        yield dataclasses.replace(found, store=dist.distributed_c10d._get_default_store())
    finally:
        dist.destroy_process_group()


def place_of(device: str | None, environment: Mapping[str, str]) -> Joined:
    """Read this rank's place from the environment, and choose its device. Raises: ValueError, as
    `joined`.
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
            f"the environment has WORLD_SIZE={world} but not {', '.join(missing)}: start several "
            f"ranks with torchrun --nproc-per-node {world} -m infinity train ..., or unset "
            "WORLD_SIZE"
        )
    if device is not None and device.startswith("cuda:"):
        raise ValueError(
            f"--device {device} would be the device of all ranks of a node; give --device cuda, "
            "which assigns each rank the GPU of its local rank"
        )
    if device in (None, "cuda") and torch.cuda.is_available():
        if local >= torch.cuda.device_count():
            raise ValueError(
                f"local rank {local} has no GPU: the node has {torch.cuda.device_count()}; start "
                "fewer ranks, or give --device cpu"
            )
        device = f"cuda:{local}"
    return Joined(rank, world, local, device or "cpu")
