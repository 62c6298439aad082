"""Durable runs of two and three ranks: restored on one, commits that fail on one rank alone, an
exit without the other rank."""

from __future__ import annotations

import dataclasses
import errno
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import infinity as inf
from infinity._src.checkpoint.durable import run as durable
from infinity._src.checkpoint.durable.named_places import PinnedLayers
from infinity._src.engine import handle as engine
from infinity.errors import PeerFailed, SwapFullError
from tests.crashes import digest, step
from tests.distributed.ranks import on_ranks
from tests.marks import THREE
from tests.test_durable_faults import Failing, close, die, made, run_files


def no_room(*_: object) -> None:
    raise SwapFullError("no room", path="drive", op="allocate")


def read_only(*_: object) -> None:
    raise OSError(errno.EROFS, "a drive is read-only")


@dataclasses.dataclass(frozen=True)
class Ranks:
    """Job of several ranks with one durable run. Returns its digests, and the seconds of an exit
    that only rank 0 makes."""

    top: Path

    def __call__(self, rank: int, place: Path) -> tuple[list[str], float]:
        top = self.top / "run"
        with pytest.MonkeyPatch.context() as patch:
            # The next commit tries the clean-up again, when ranks name tables of this one.
            patch.setattr(durable, "read_heads", read_only)
            model, optimizer = self.begin(top)
            step(model, optimizer, 0, rank)
        found = [digest(model)]
        with (
            Failing("write", 0 if rank == 1 else 1000, 28),
            pytest.raises(SwapFullError if rank == 1 else PeerFailed),
        ):
            inf.handle(model).flush()
        inf.handle(model).flush()
        # A write between steps to an element that only one rank's shard has.
        bias = model.blocks[0][0].bias
        with inf.handle(model).gather([bias]):
            bias.data[:1] = 0.5
        inf.handle(model).flush()
        found.append(digest(model))
        self.no_room_beside_a_checkpoint_on_one_rank(model, optimizer, rank)
        begun = time.monotonic()
        if rank == 0:
            engine._close_all()  # as at exit; the other rank does not come
        took = time.monotonic() - begun
        dist.barrier()
        if rank:
            die(model)
        dist.barrier()
        model, optimizer = self.begin(top)
        restored = inf.restore(model, optimizer, top)
        assert (restored.step, restored.extra) == (1, {"next": 1})
        assert digest(model) == found[1]
        close(model)
        return found, took

    def no_room_beside_a_checkpoint_on_one_rank(
        self, model: Any, optimizer: Any, rank: int
    ) -> None:
        inf.save(model, optimizer, self.top / "saved").wait()
        with pytest.MonkeyPatch.context() as patch:
            if rank == 1:
                patch.setattr(PinnedLayers, "make_way", no_room)
            with pytest.raises(SwapFullError if rank == 1 else PeerFailed):
                step(model, optimizer, 1, rank)
        optimizer.zero_grad()
        step(model, optimizer, 1, rank)

    def begin(self, top: Path) -> tuple[Any, Any]:
        return made(top)


@pytest.mark.parametrize("world", [2, THREE])
def test_several_ranks_and_then_one(tmp_path: Path, world: int) -> None:
    results = on_ranks(Ranks(tmp_path), tmp_path / "ranks", world)
    assert results[0][1] < 5
    top = tmp_path / "run"
    kinds = sorted(name.partition("-")[0] for name in run_files(top))
    each = ["buffers", "extra", "manifest", "states", "states", "table"]
    assert kinds == sorted([*each * world, *(f"lock.rank{rank}" for rank in range(world))])
    model, optimizer = made(top)
    restored = inf.restore(model, optimizer, top)
    assert restored.step == 1
    assert any(f"{world} ranks saved" in note for note in restored.notes)
    assert digest(model) == results[0][0][1]  # buffers are those of rank 0
    step(model, optimizer, 1, 0)
    close(model)
    assert len([name for name in run_files(top) if name.startswith(("states", "manifest"))]) == 3
    assert [path.name for path in Path(top).iterdir()] == ["infinity-run"]
