"""Ranks whose drives and threads take random times launch gathers and reductions in one order."""

from __future__ import annotations

import dataclasses
import functools
import random
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import infinity as inf
from infinity._src.distributed.comm_streams import CommStream, OrderedCommStream, PendingCollective
from infinity._src.distributed.order_agreement import OrderAgreement
from infinity.aio import Seam
from tests import harness, models
from tests.distributed.ranks import on_ranks, shard_of
from tests.harness import Training
from tests.launch_logs import Launch, objection

LLAMA = Training(functools.partial(models.llama, 2), steps=3, rows=6, lr=2e-3)
CONTROL = ("infinity-comm-control", "infinity-comm-fork")
QUEUES = {0: "gather", 1: "reduce"}
POLICIES: list[dict[str, Any]] = [
    {"params": "nvme", "optim": "nvme", "ram": "min"},
    {"params": "nvme", "optim": "nvme", "ram": "min", "update": "backward", "generations": 2},
    {"params": "nvme", "optim": "nvme", "ram": "min", "update": "delayed", "delayed_warmup": 1},
    {"params": "cpu", "optim": "cpu", "qwz": True, "hpz": "cpu", "qgz": True},
]


@dataclasses.dataclass(frozen=True)
class Logged:
    """Trainings in which each collective is late on each rank by chance. Returns the launches of
    each, as `tests.launch_logs` compares them."""

    def __call__(self, rank: int, place: Path) -> list[list[Launch]]:
        patch = pytest.MonkeyPatch()
        chance = random.Random(rank)
        log: list[Launch] = []
        agree, run_one = OrderAgreement.agree, CommStream._run_one
        ready = PendingCollective.ready.fget
        assert ready is not None
        named: deque[tuple[int, str]] = deque()
        late: dict[int, float] = {}

        def agreed(self: OrderAgreement, queue: int, what: str, **values: Any) -> bool:
            # Control communication streams have no queues, and names of their own.
            if threading.current_thread().name not in CONTROL:
                named.append((queue, what))
            return agree(self, queue, what, **values)

        def launched(self: CommStream, op: PendingCollective, *rest: Any) -> None:
            if isinstance(self, OrderedCommStream):
                queue, what = named.popleft()
                assert what == op.what, (what, op.what)
                log.append(Launch(queue, what, threading.get_ident()))
            run_one(self, op, *rest)

        def is_ready(self: PendingCollective) -> bool:
            # Some are ready late, on one rank only.
            wait_s = late.setdefault(
                id(self), time.monotonic() + chance.choice((0, 0, 0.004)) * chance.random()
            )
            return ready(self) and time.monotonic() >= wait_s

        patch.setattr(OrderAgreement, "agree", agreed)
        patch.setattr(CommStream, "_run_one", launched)
        patch.setattr(PendingCollective, "ready", property(is_ready))
        patch.setattr("infinity._src.distributed.comm_streams._POLL_S", 0.001)
        found = []
        try:
            for index, chosen in enumerate(POLICIES):
                log.clear()
                late.clear()
                nvme = {"nvme": place} if "nvme" in chosen.values() else {}
                harness.offloaded(
                    shard_of(LLAMA, rank, dist.get_world_size()),
                    inf.Policy(**chosen, **nvme),
                    seam=Seam(delay_us_max=2000, seed=17 * index + rank),
                )
                found.append(list(log))
        finally:
            patch.undo()
        return found


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.ranks)])
def test_all_ranks_launch_in_one_order_whatever_is_late(tmp_path: Path, world: int) -> None:
    by_policy = list(zip(*on_ranks(Logged(), tmp_path / "run", world), strict=True))
    passed = 0
    for logs in by_policy:
        assert not objection(logs)
        assert {QUEUES[launch.queue] for launch in logs[0]} == {"gather", "reduce"}
        changes = [
            first.queue != second.queue for first, second in zip(logs[0], logs[0][1:], strict=False)
        ]
        passed += sum(changes)
    # Else the test would compare queues that never met.
    assert passed > 20
