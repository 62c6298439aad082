"""Trainers that are killed: processes forked from one that has imported everything, and their
reports."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import hashlib
import os
import random
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import infinity as inf
from infinity._src.checkpoint.durable.run import DurableRun
from infinity._src.checkpoint.save import _SaveJob
from infinity._src.checkpoint.verify import VerifyJob
from infinity._src.engine.handle import offload
from infinity.aio import Seam
from tests.forks import FORKSERVER

STEPS = 50
CALLS = ("fsync", "replace", "rename", "unlink", "write", "open", "posix_fallocate")
"""Calls on files by a commit, a save and a start, besides the executor's reads and writes."""


@dataclasses.dataclass(frozen=True)
class Job:
    """One trainer. die_at: it kills itself at this call of `CALLS`, counted from its `nth` report
    of `die_from`. saves: a run that is not durable, and saves continuously; copies: a durable run
    that saves."""

    directory: Path
    update: str = "deferred"
    world: int = 1
    rank: int = 0
    rendezvous: str = ""
    saves: bool = False
    generations: int = 2
    drives: int = 1
    copies: bool = False
    die_at: int = -1
    die_from: str = "restored"
    nth: int = 1
    reference: bool = False
    seed: int = 0

    @property
    def policy(self) -> inf.Policy:
        if self.reference:
            return inf.Policy(unit_bytes_max=4096)
        # Further drives; the first is restored.
        further = [self.directory / f"drive{number}" for number in range(1, self.drives)]
        places = [self.directory / "drive", *further]
        for place in places:
            place.mkdir(exist_ok=True, parents=True)
        tiers: dict[str, Any] = {"params": "nvme", "optim": "nvme", "ram": "min", "nvme": places}
        if self.saves:
            return inf.Policy(**tiers, update=self.update, generations=2, unit_bytes_max=4096)
        tiers |= {"durable": True, "generations": self.generations}
        return inf.Policy(**tiers, update=self.update, unit_bytes_max=4096)

    @property
    def saved(self) -> Path:
        """Directory of the checkpoint."""
        return self.directory / "saved"

    @property
    def source(self) -> Path:
        """Directory that is restored."""
        return self.saved if self.saves else self.directory / "drive"


class Net(nn.Module):
    """Three units, one of them with persistent buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(24, 24), nn.BatchNorm1d(24)) for _ in range(3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + torch.relu(block(x))
        return x.float().square().mean()


class Rooted(Net):
    """A model with a direct parameter: its Use and the first block's both end with the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(24))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + torch.relu(block(x))
        return (x * self.scale).float().square().mean()


def digest(model: Any) -> str:
    """Return a digest of everything from which training continues. Collective."""
    found = hashlib.sha256()
    handle = inf.handle(model)
    for value in model.state_dict().values():
        found.update(value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    for param in model.parameters():
        for value in handle.optimizer_state(param).values():
            found.update(
                value.numpy().tobytes() if isinstance(value, torch.Tensor) else repr(value).encode()
            )
    return found.hexdigest()


def step(model: Any, optimizer: Any, index: int, rank: int) -> None:
    """Step `index` of the trajectory."""
    for group in optimizer.param_groups:
        group["lr"] = 1e-2 * 0.99**index
    generator = torch.Generator().manual_seed(1000 * rank + index)
    model(torch.randn(4, 24, generator=generator).bfloat16()).backward()
    if index % 3 == 2:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    inf.handle(model).extra = {"next": index + 1}
    optimizer.step()
    optimizer.zero_grad()


class Tell:
    """Sends reports, and dies where the job says."""

    def __init__(self, job: Job, pipe: Any) -> None:
        self._job = job
        self._pipe = pipe
        self._calls = -1
        self._until = job.nth
        self._lock = threading.Lock()  # saves report from separate threads

    def __call__(self, *what: Any) -> None:
        with self._lock:
            self._pipe.send(what)
            self._until -= what[0] == self._job.die_from
            if self._until == 0 and self._job.die_at >= 0 and self._calls < 0:
                self._calls = 0
                for name in CALLS:
                    self._watch(name)

    def each(self, owner: type, name: str, kind: str) -> None:
        """Report each begin and end of a method of a class, as `kind`."""
        before = getattr(owner, name)

        def call(*args: Any, **values: Any) -> Any:
            self(kind)
            result = before(*args, **values)
            self(f"{kind} ended")
            return result

        setattr(owner, name, call)

    def _watch(self, name: str) -> None:
        before = getattr(os, name)

        def call(*args: Any, **values: Any) -> Any:
            self._calls += 1
            if self._calls > self._job.die_at:
                if name == "write":  # torn
                    before(args[0], bytes(args[1])[: len(args[1]) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            return before(*args, **values)

        setattr(os, name, call)


def train(job: Job, pipe: Any) -> None:
    """Be a trainer: build, restore, report the result, train, and report every step."""
    torch.set_num_threads(1)
    tell = Tell(job, pipe)
    tell.each(DurableRun, "commit", "commit")
    tell.each(_SaveJob, "save", "save")
    if job.world > 1:
        dist.init_process_group(
            "gloo", init_method=job.rendezvous, rank=job.rank, world_size=job.world
        )
    torch.manual_seed(0)
    model: Any = offload(
        Net().bfloat16(),
        job.policy,
        _seam=None if job.reference else Seam(delay_us_max=200, seed=job.seed),
    )
    optimizer = inf.AdamW(model.parameters(), lr=1e-2)
    if job.reference:
        tell("digest", 0, digest(model))
        for index in range(STEPS):
            step(model, optimizer, index, job.rank)
            tell("digest", index + 1, digest(model))
        inf.handle(model).close()
        return
    tell("built")
    first = 0
    if not job.saves or list(job.source.glob("manifest-*.rank0")):
        found = inf.restore(model, optimizer, job.source)
        first = found.step
        assert found.extra is None if first == 0 else found.extra == {"next": first}, (
            first,
            found.extra,
        )
    tell("restored", first, digest(model))
    save = None
    for index in range(first, STEPS):
        step(model, optimizer, index, job.rank)
        tell("step", index + 1)
        # A save is collective, so ranks begin it at the same steps.
        due = index % 3 == 0 if job.world > 1 else save is None or save.done
        if (job.saves or job.copies) and due:
            if save is not None:
                save.wait()
                tell("saved", save.step)
            save = inf.save(model, optimizer, job.saved)
    tell("end", STEPS, digest(model))
    inf.handle(model).close()
    tell("closed", STEPS)


@dataclasses.dataclass
class Life:
    """Reports of the ranks of one process generation, by rank."""

    told: list[list[tuple[Any, ...]]]
    killed: bool

    def last(self, kind: str, rank: int = 0) -> tuple[Any, ...] | None:
        return next((report for report in reversed(self.told[rank]) if report[0] == kind), None)

    def met(self) -> set[str]:
        """Return the operations that the kill interrupted, on any rank."""
        found = set()
        for told in self.told:
            kinds = [report[0] for report in told]
            begun = {
                kind
                for kind in ("commit", "save")
                if kinds.count(kind) > kinds.count(f"{kind} ended")
            }
            phase = (
                "set-up"
                if "built" not in kinds
                else "restore"
                if "restored" not in kinds
                else "training"
            )
            found |= begun or {"closing" if "end" in kinds else phase}
        return found


@contextlib.contextmanager
def processes(jobs: list[Job]) -> Iterator[list[tuple[Any, Any]]]:
    """Start a process for each job, with a pipe. Kills them at the end."""
    started = []
    try:
        for job in jobs:
            here, there = FORKSERVER.Pipe(duplex=False)
            process = FORKSERVER.Process(target=train, args=(job, there), daemon=True)
            process.start()
            there.close()
            started.append((process, here))
        yield started
    finally:
        for process, _ in started:
            process.kill()
        for process, here in started:
            process.join()
            here.close()


def jobs_of(job: Job) -> list[Job]:
    """The ranks of a job."""
    if job.world == 1:
        return [job]
    job.directory.mkdir(parents=True, exist_ok=True)
    meeting = f"file://{job.directory}/meeting-{time.monotonic_ns()}"
    die = random.Random(job.seed).randrange(job.world)
    return [
        dataclasses.replace(
            job, rank=rank, rendezvous=meeting, die_at=job.die_at if rank == die else -1
        )
        for rank in range(job.world)
    ]


def _take(pipe: Any, told: list[tuple[Any, ...]]) -> bool:
    """Read all reports in the pipe; False when the process has ended."""
    try:
        while pipe.poll():
            told.append(pipe.recv())
    except (EOFError, OSError):
        return False
    return True


def live(job: Job, *, after: str, delay_s: float, nth: int = 1, patience_s: float = 60.0) -> Life:
    """Run a job's ranks until `delay_s` after a rank's `nth` report `after`, or until they have
    killed themselves; kill them."""
    jobs = jobs_of(job)
    told: list[list[tuple[Any, ...]]] = [[] for _ in jobs]
    until, begun = time.monotonic() + patience_s, None
    with processes(jobs) as started:
        while True:
            alive = [_take(pipe, mine) for (_, pipe), mine in zip(started, told, strict=True)]
            if not all(alive):
                break
            now = time.monotonic()
            if begun is None and any(
                sum(report[0] == after for report in mine) >= nth for mine in told
            ):
                begun = now
            if begun is not None and job.die_at < 0 and now > begun + delay_s:
                break
            assert now < until, f"{job}: no {after!r} within {patience_s} s"
            time.sleep(0.0005)
        for process, _ in started:
            process.kill()
        codes = []
        for (process, pipe), mine in zip(started, told, strict=True):
            process.join()
            codes.append(process.exitcode)
            _take(pipe, mine)
    # Killing one of several ranks makes the others end with an error; a single rank ends well, or
    # is killed.
    assert job.world > 1 or codes[0] in (0, -signal.SIGKILL), (job, codes, told)
    return Life(told, killed=-signal.SIGKILL in codes)


@functools.cache
def trajectory(directory: Path, world: int) -> list[dict[int, str]]:
    """Return, by rank, the digests of an undisturbed run after every step; the same for every kind
    of job."""
    jobs = jobs_of(Job(directory, world=world, reference=True))
    told: list[dict[int, str]] = [{} for _ in jobs]
    with processes(jobs) as started:
        for (_, pipe), mine in zip(started, told, strict=True):
            while len(mine) <= STEPS:
                _, index, value = pipe.recv()
                mine[index] = value
    return told


@dataclasses.dataclass(frozen=True)
class Kill:
    """A kill: its target, the interrupted operations, and the step from which the next process
    continued.

    nth: report of `after` from which on it was counted, to the time `delay_s` or, if that is None,
    to the call `die_at` of `CALLS`. found: "last", the last reported step, or "before", the one
    before it; None if the next process was killed before it had restored.
    """

    number: int
    after: str
    nth: int
    delay_s: float | None
    die_at: int
    met: tuple[str, ...]
    step: int | None = None
    found: str | None = None


WITHIN_S = {"built": 0.04, "restored": 0.25, "commit": 0.006, "save": 0.02}
"""Approximate seconds of a restore, some steps, a commit and a save, by the previous report."""


class Killed:
    """A run that is killed repeatedly. Each process continues from the one before."""

    def __init__(self, job: Job, wanted: list[dict[int, str]], chance: random.Random) -> None:
        self.job = job
        self._wanted = wanted
        self._chance = chance
        # Bounds of the step from which the next process continues.
        self._least = self._most = 0
        self._last: Kill | None = None
        self.was_killed = False

    @property
    def is_old(self) -> bool:
        """True when so few steps remain that a process may end before it is killed."""
        return self._least > STEPS - 25

    def kill(self, number: int) -> Iterator[Kill]:
        """Kill one process, which may end earlier. Returns the previous kill, now with its outcome.
        """
        aims = ["built", "restored", "restored", *(["commit"] * 2 if not self.job.saves else [])]
        aims += ["save"] * 2 if self.job.saves or self.job.copies else []
        after, nth = self._chance.choice(aims), 1
        if after in ("commit", "save"):
            nth = self._chance.randrange(1, 6)
        at_call = self._chance.random() < 0.5
        within = 25 if after == "commit" else 120
        die_at = self._chance.randrange(within) if at_call else -1
        delay_s = self._chance.random() * WITHIN_S[after]
        here = dataclasses.replace(self.job, die_at=die_at, die_from=after, nth=nth, seed=number)
        life = live(here, after=after, delay_s=delay_s, nth=nth)
        yield from self._begun(life)
        self.was_killed = life.killed
        if life.killed:
            met = tuple(sorted(life.met()))
            self._last = Kill(number, after, nth, None if at_call else delay_s, die_at, met)

    def finish(self) -> Iterator[Kill]:
        """Continue to the end undisturbed. Returns the last kill with its outcome."""
        life = live(self.job, after="closed", delay_s=0.0)
        yield from self._begun(life)
        for rank, told in enumerate(life.told):
            ends = [report[2] for report in told if report[0] == "end"]
            assert ends == [self._wanted[rank][STEPS]], f"rank {rank}: {told[-3:]}"

    def _begun(self, life: Life) -> Iterator[Kill]:
        """Check where a process continued. Returns the kill before it."""
        last, self._last = self._last, None
        for rank, told in enumerate(life.told):
            came = next((report for report in told if report[0] == "restored"), None)
            if came is None:
                continue
            assert self._least <= came[1] <= self._most, (last, rank, came, self._least, self._most)
            assert came[2] == self._wanted[rank][came[1]], (
                f"step {came[1]} is not on the trajectory (rank {rank}, after {last})"
            )
            if last is not None:
                found = "last" if came[1] == self._most else "before"
                last = dataclasses.replace(last, step=came[1], found=found)
        if self.job.copies and list(self.job.saved.glob("manifest-*.rank0")):
            assert VerifyJob(self.job.saved).verify() == [], (self.job, last)
        self._least, self._most = _bounds(self.job, life, self._least, self._most)
        if last is not None:
            yield last


def kill_often(
    directory: Path, job: Job, wanted: list[dict[int, str]], *, kills: int, seed: int
) -> Iterator[Kill]:
    """Kill trainers of one kind of run `kills` times, and yield each kill once its outcome is
    known. A run near its end is finished, and a new one begins."""
    chance, done, number = random.Random(seed), 0, 0
    run = Killed(dataclasses.replace(job, directory=directory / "0"), wanted, chance)
    while done < kills:
        if run.is_old:
            yield from run.finish()
            run = Killed(
                dataclasses.replace(job, directory=directory / str(number)), wanted, chance
            )
        number += 1
        yield from run.kill(number)
        done += run.was_killed
    yield from run.finish()


def counted(kills: Iterable[Kill]) -> dict[str, int]:
    """Count kills by target and by outcome."""
    found = collections.Counter[str]()
    for kill in kills:
        found.update(["kills", *kill.met, f"restored {kill.found}"])
    return dict(sorted(found.items()))


def _bounds(job: Job, life: Life, least: int, most: int) -> tuple[int, int]:
    """Return bounds of the step from which the next process continues."""
    steps = [
        report[1]
        for told in life.told
        for report in told
        if report[0] in ("step", "restored", "end")
    ]
    if not steps:
        return least, most
    if job.saves:
        saved = max(
            (report[1] for told in life.told for report in told if report[0] == "saved"),
            default=least,
        )
        return max(saved, least), max(steps)
    return max(max(steps) - 1, least), max(steps)
