"""Training for hours on a drive that fails about every minute, compared with the plain loop: each
loss is that of the loop without a drive, bit for bit, and so are the parameters.

    python -m tests.endurance.fault_soak --minutes 120

The model has the shape of R1 (bench/r1.py), by default a seventh of its parameters; --hidden 1024
--layers 12 --vocab 8192 is R1. A step that a fault undoes is taken again, and so is a pass that a
fault breaks off.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import errno
import faulthandler
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from bench.r1 import Workload
from infinity.aio import Fault, Seam
from infinity.errors import AioError, StepUndone
from tests.endurance.record import Record, record_in
from tests.endurance.training import SMALLER, Course, Offloaded, Plain, compare
from tests.harness import one_thread
from tests.places import place_of, spoil

PASSING = {
    "EAGAIN": ("errno", errno.EAGAIN),
    "EINTR": ("errno", errno.EINTR),
    "short": ("short", 0),
}
FAULTS = {
    **{f"read {name}": ("read", *what) for name, what in PASSING.items()},
    **{f"write {name}": ("write", *what) for name, what in PASSING.items()},
    "read EIO": ("read", "errno", errno.EIO),
    "read nothing": ("read", "zero", 0),
    "read bit flip": ("read", "bitflip", 0),
    "write EIO": ("write", "errno", errno.EIO),
    "write ENOSPC": ("write", "errno", errno.ENOSPC),
    "write nothing": ("write", "zero", 0),
}
"""A bit that flips in a write is found at the next read, when there is nothing to go back to."""
BLOCK_BYTES = 4096
REFUSES = "a block that refuses writes and stays so"
UNREADABLE = "parameters of the last step cannot be read and stay so"
SPOILT = "parameters of the last step are spoilt on the drive"
STAYING = (REFUSES, UNREADABLE, SPOILT)
"""Until the next fault, or for good. Masters and moments of a step are read when it is committed:
to spoil these is to lose them."""
SLOW = "a tenth of the speed"
LATE = "late and out of order"
KINDS = (*FAULTS, *STAYING, SLOW, LATE)
HUNG_S = 600.0


@dataclasses.dataclass(frozen=True)
class Soak:
    """Length of a soak in minutes and, at least, in faults; seconds between faults, about; the
    model. update: the engine's."""

    minutes: float = 120.0
    every_s: float = 60.0
    faults: int = 1
    workload: Workload = SMALLER
    update: str = "deferred"
    seed: int = 0


@dataclasses.dataclass
class Injected:
    """A fault, and what came of it until the next."""

    name: str
    nth: int
    step: int
    before: collections.Counter[str]
    raised: list[str] = dataclasses.field(default_factory=list)

    def outcome(self, now: collections.Counter[str]) -> str:
        """Return the traces that it left."""
        if self.raised:
            return " and ".join(sorted(set(self.raised)))
        left = [
            name
            for name in ("retries", "short_transfers", "rereads", "moved_writes", "errors")
            if now[name] > self.before[name]
        ]
        return f"mended ({', '.join(left)})" if left else "no trace"


class Injector:
    """Chooses faults, and counts what came of them."""

    def __init__(self, soak: Soak, ours: Offloaded, record: Record) -> None:
        self._soak, self._ours, self._record = soak, ours, record
        self._chance = random.Random(soak.seed)
        self._begun = (time.monotonic(), ours.counters(), ours.index)
        self._due_s = time.monotonic() + soak.every_s / 2
        self._ends_s = float("inf")
        self._names: list[str] = []
        self.last: Injected | None = None
        self.outcomes: collections.Counter[tuple[str, str]] = collections.Counter()

    def turn(self) -> None:
        """Inject a fault if one is due; called between steps."""
        now = time.monotonic()
        if now >= self._ends_s:
            self._ours.executor.set_seam(Seam())
            self._ends_s = float("inf")
        if now < self._due_s:
            return
        if not self._names:  # each kind once before any kind again
            self._names = list(KINDS)
            self._chance.shuffle(self._names)
        if self._names[-1] in STAYING:
            self._ours.executor.set_seam(Seam())
            # May raise an error of the last fault; then this fault comes a step later.
            self._ours.handle.flush()
            if not self._ours.handle.pipeline.transaction.has_steps:
                return  # the last step was undone: its chunks have no second place
        self.settle()
        self._due_s = now + self._soak.every_s * (0.5 + self._chance.random())
        self._inject(self._names.pop(), now)

    def _inject(self, name: str, now: float) -> None:
        begun_s, begun, first = self._begun
        counters = self._ours.counters()
        moved = counters - begun
        nth = 0
        if name == SLOW:
            speed = 0.1 * moved["bytes"] / (now - begun_s)
            seam = Seam(read_bytes_per_s=speed, write_bytes_per_s=speed)
        elif name == LATE:
            seam = Seam(delay_us_max=20_000, seed=self._chance.randrange(1 << 30))
        elif name in STAYING:
            seam = self._staying(name)
        else:
            op, kind, code = FAULTS[name]
            steps = max(1, self._ours.index - first)
            nth = self._chance.randrange(max(1, moved[f"{op}s"] // steps))
            # Lasting: otherwise a failed write is redirected, and a read is repeated.
            seam = Seam(fault=Fault(op, nth, kind=kind, errno=code, lasting=True))
        if name in (SLOW, LATE):
            self._ends_s = now + self._soak.every_s / 3
        self._ours.executor.set_seam(seam)
        self.last = Injected(name, nth, self._ours.index, counters)

    def _staying(self, name: str) -> Seam:
        """Spoil a parameter's place on the drive, or return the seam of a block that fails."""
        model, handle = self._ours.model, self._ours.handle
        unit = self._chance.randrange(len(handle.parts.split.units))
        place = place_of(model, 0, unit=unit)
        # Otherwise the step would use data that was read ahead, and read the drive only after the
        # commit.
        handle.parts.unsharder.mark_stale([handle.parts.split.units[unit]])
        if name == SPOILT:
            spoil(model, place)
            return Seam()
        if name == UNREADABLE:
            fault = Fault(
                "read", 0, persistent=True, start=place.offset, stop=place.offset + BLOCK_BYTES
            )
        else:
            start = self._chance.randrange(handle.stats().nvme_bytes // BLOCK_BYTES) * BLOCK_BYTES
            fault = Fault("write", 0, persistent=True, start=start, stop=start + BLOCK_BYTES)
        return Seam(fault=fault)

    def raised(self, error: Exception) -> None:
        """Note an error of a call. Raises: it, where nothing was injected yet."""
        if self.last is None:
            raise error
        self.last.raised.append(type(error).__name__)

    def settle(self) -> None:
        """Record the last fault and its outcome."""
        if self.last is None:
            return
        outcome = self.last.outcome(self._ours.counters())
        self.outcomes[self.last.name, outcome] += 1
        self._record.add(
            "fault",
            name=self.last.name,
            nth=self.last.nth,
            step=self.last.step,
            outcome=outcome,
        )
        self.last = None


@contextlib.contextmanager
def watched() -> Iterator[None]:
    """End the process with the stacks of all threads where the block takes as long as HUNG_S."""
    faulthandler.dump_traceback_later(HUNG_S, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def soak_for(soak: Soak, directory: Path, record: Record) -> dict[str, Any]:
    """Train under faults for so long. Returns counts."""
    with one_thread(), torch.device("cpu"):
        course = Course(soak.workload)
        plain = Plain(course)
        ours = Offloaded(course, directory, generations=2, update=soak.update)
        while ours.index < 2:  # the first steps trace the order of units
            assert ours.step() == plain.loss(ours.index - 1)
        injector = Injector(soak, ours, record)
        again, compared = 0, 0
        until = begun = time.monotonic()
        until += 60 * soak.minutes
        while time.monotonic() < until or injector.outcomes.total() < soak.faults:
            index = ours.index
            try:
                injector.turn()
                with watched():
                    loss = ours.step()
                    if ours.index % 100 == 0 and ours.index > len(plain.losses):
                        ours.handle.flush()
            except (StepUndone, AioError) as error:
                injector.raised(error)
                again += 1
                ours.back()
                record.add("raised", step=index, back_to=ours.index, error=str(error)[:300])
                continue
            wanted = plain.loss(index)
            assert loss == wanted, f"step {index}: loss {loss!r}, without faults {wanted!r}"
            if ours.index % 100 == 0 and ours.index == len(plain.losses):
                compare(plain, ours)
                compared += 1
                record.add("compared", step=ours.index, loss=loss)
            record.show(
                f"step {ours.index}, {injector.outcomes.total()} faults, {again} passes taken "
                f"again, {(until - time.monotonic()) / 60:.0f} min left"
            )
        ours.executor.set_seam(Seam())
        injector.settle()
        finish(plain, ours)
        steps, undone = ours.index, ours.handle.stats().steps_undone
        ours.handle.close()
    found = {
        "minutes": round((time.monotonic() - begun) / 60, 1),
        "parameters": soak.workload.parameters,
        "steps": steps,
        "faults": injector.outcomes.total(),
        "steps_undone": undone,
        "taken_again": again,
        "compared": compared + 1,
        "outcomes": {f"{name}: {what}": n for (name, what), n in injector.outcomes.items()},
    }
    record.add("ended", **found)
    return found


def finish(plain: Plain, ours: Offloaded) -> None:
    """Bring what the last fault undid to an end, and compare."""
    for _ in range(3):
        try:
            while ours.index < len(plain.losses):
                assert ours.step() == plain.losses[ours.index - 1]
            ours.handle.flush()
            break
        except (StepUndone, AioError):
            ours.back()
    assert ours.index == len(plain.losses)
    compare(plain, ours)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = Soak()
    parser.add_argument("--minutes", type=float, default=default.minutes)
    parser.add_argument("--every", type=float, default=default.every_s, metavar="SECONDS")
    parser.add_argument("--update", choices=("deferred", "backward"), default=default.update)
    parser.add_argument("--hidden", type=int, default=default.workload.hidden)
    parser.add_argument("--layers", type=int, default=default.workload.layers)
    parser.add_argument("--vocab", type=int, default=default.workload.vocab)
    parser.add_argument("--seed", type=int, default=default.seed)
    parser.add_argument("--dir", type=Path, help="directory on the drive (a temporary one)")
    parser.add_argument("--record", type=Path, default=Path("out/soak.jsonl"))
    options = parser.parse_args()
    workload = Workload(hidden=options.hidden, layers=options.layers, vocab=options.vocab)
    soak = Soak(
        minutes=options.minutes,
        every_s=options.every,
        workload=workload,
        update=options.update,
        seed=options.seed,
    )
    with tempfile.TemporaryDirectory(prefix="infinity-soak-", dir=options.dir) as place:
        with record_in(options.record) as record:
            found = soak_for(soak, Path(place), record)
    print("\n".join(f"{name}: {value}" for name, value in found.items() if name != "outcomes"))
    print("\n".join(f"  {name}: {count}" for name, count in sorted(found["outcomes"].items())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
