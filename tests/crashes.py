"""Trainers that are killed: processes forked from one that has imported everything, and what they
tell before they die."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import multiprocessing as mp
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import infinity as inf
from infinity._src.engine import offload
from infinity.aio import Seam

STEPS = 50
CALLS = ("fsync", "replace", "rename", "unlink", "write", "open", "posix_fallocate")
"""Calls on files that a commit, a save and a beginning make, besides the executor's reads and
writes."""


@dataclasses.dataclass(frozen=True)
class Job:
    """One trainer. die_at: it kills itself at the call of this number of `CALLS`, counted from when
    it has told `die_from`."""

    directory: Path
    update: str = "deferred"
    world: int = 1
    rank: int = 0
    rendezvous: str = ""
    saves: bool = False
    generations: int = 2
    die_at: int = -1
    die_from: str = "restored"
    reference: bool = False
    seed: int = 0

    @property
    def policy(self) -> inf.Policy:
        if self.reference:
            return inf.Policy(unit_bytes_max=4096)
        place = self.directory / "drive"
        place.mkdir(exist_ok=True, parents=True)
        tiers: dict[str, Any] = {"params": "nvme", "optim": "nvme", "ram": "min", "nvme": place}
        if self.saves:
            return inf.Policy(**tiers, update=self.update, generations=2, unit_bytes_max=4096)
        tiers |= {"durable": True, "generations": self.generations}
        return inf.Policy(**tiers, update=self.update, unit_bytes_max=4096)

    @property
    def source(self) -> Path:
        """Directory that is restored."""
        return self.directory / ("saved" if self.saves else "drive")


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
    """With a parameter of its own: the Uses of that and of the first block end with the backward,
    one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(24))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + torch.relu(block(x))
        return (x * self.scale).float().square().mean()


def digest(model: Any) -> str:
    """All that training goes on from. Collective."""
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

    def __call__(self, *what: Any) -> None:
        self._pipe.send(what)
        if what[0] == self._job.die_from and self._job.die_at >= 0 and self._calls < 0:
            self._calls = 0
            for name in CALLS:
                self._watch(name)

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
    """A trainer's life: build, restore, tell what came, train, and tell every step."""
    torch.set_num_threads(1)
    tell = Tell(job, pipe)
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
        if job.saves and (save is None or save.done):
            if save is not None:
                save.wait()
                tell("saved", save.step)
            save = inf.save(model, optimizer, job.source)
    inf.handle(model).close()
    tell("closed", STEPS)


@dataclasses.dataclass
class Life:
    """Reports that the ranks of one life have sent, by rank."""

    told: list[list[tuple[Any, ...]]]

    def last(self, kind: str, rank: int = 0) -> tuple[Any, ...] | None:
        return next((report for report in reversed(self.told[rank]) if report[0] == kind), None)


@contextlib.contextmanager
def processes(jobs: list[Job]) -> Iterator[list[tuple[Any, Any]]]:
    """One process for each job, and the end of its pipe. Killed at the end."""
    context = mp.get_context("forkserver")
    # Which our hooks import when a model is offloaded, and that takes seconds.
    context.set_forkserver_preload(["torch._dynamo", "tests.crashes"])
    started = []
    try:
        for job in jobs:
            here, there = context.Pipe(duplex=False)
            process = context.Process(target=train, args=(job, there), daemon=True)
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
    """Everything that lies in the pipe; False when the process has ended."""
    try:
        while pipe.poll():
            told.append(pipe.recv())
    except (EOFError, OSError):
        return False
    return True


def live(job: Job, *, after: str, delay_s: float, patience_s: float = 30.0) -> Life:
    """Run a job's ranks until `delay_s` after the first report `after`, or until they have killed
    themselves; kill them."""
    jobs = jobs_of(job)
    told: list[list[tuple[Any, ...]]] = [[] for _ in jobs]
    until, begun = time.monotonic() + patience_s, None
    with processes(jobs) as started:
        while True:
            alive = [_take(pipe, mine) for (_, pipe), mine in zip(started, told, strict=True)]
            if not all(alive):
                break
            now = time.monotonic()
            if begun is None and any(report[0] == after for mine in told for report in mine):
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
    # A rank whose peer was killed ends with an error of its own; one alone may end well, or be
    # killed.
    assert job.world > 1 or codes[0] in (0, -signal.SIGKILL), (job, codes, told)
    return Life(told)


@functools.cache
def trajectory(directory: Path, world: int) -> list[dict[int, str]]:
    """By rank, what an undisturbed run has after every step, which is the same for every kind of
    job."""
    jobs = jobs_of(Job(directory, world=world, reference=True))
    told: list[dict[int, str]] = [{} for _ in jobs]
    with processes(jobs) as started:
        for (_, pipe), mine in zip(started, told, strict=True):
            while len(mine) <= STEPS:
                _, index, value = pipe.recv()
                mine[index] = value
    return told


def kill_often(
    directory: Path, job: Job, wanted: list[dict[int, str]], *, kills: int, seed: int
) -> dict[str, int]:
    """Kill trainers of one run `kills` times; each begins where the one before has left. Returns
    what was met how often."""
    chance, met, lost = random.Random(seed), {"restored": 0, "last": 0, "before": 0}, 0
    place, least, most = directory / "0", 0, 0
    for number in range(kills + 1):
        if least > STEPS - 25:
            place, least, most = directory / str(number), 0, 0
        where = chance.choice(["built", "restored", "restored"])
        die_at = chance.randrange(120) if chance.random() < 0.5 else -1
        here = dataclasses.replace(
            job, directory=place, die_at=die_at, die_from=where, seed=seed + number
        )
        if number == kills:
            here, where = dataclasses.replace(here, die_at=-1), "restored"
        within_s = 0.04 if where == "built" else 0.25  # a restore, a few steps
        life = live(
            here, after=where, delay_s=0.0 if number == kills else chance.random() * within_s
        )
        for rank, told in enumerate(life.told):
            came = next((report for report in told if report[0] == "restored"), None)
            if came is None:
                continue
            assert least <= came[1] <= most, (rank, came[1], least, most, number)
            assert came[2] == wanted[rank][came[1]], (
                f"step {came[1]} is not on the trajectory (rank {rank}, kill {number})"
            )
            met["restored"] += 1
            met["last" if came[1] == most else "before"] += 1
        lost += all(life.last("restored", rank) is None for rank in range(job.world))
        least, most = _bounds(job, life, least, most)
    met["kills"] = kills
    met["in_restore"] = lost
    return met


def _bounds(job: Job, life: Life, least: int, most: int) -> tuple[int, int]:
    """Between which steps the next life begins."""
    steps = [
        report[1]
        for told in life.told
        for report in told
        if report[0] in ("step", "restored", "closed")
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
