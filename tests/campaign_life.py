"""One process of a case of the campaign: it trains with a fault, closes, and reports."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import nn

import infinity as inf
from infinity import aio
from infinity._src.checkpoint import reader, writer
from infinity._src.engine.handle import offload
from infinity.aio import Fault, IoSettings, Seam
from infinity.errors import AioError, RankError, StateInvalid, StepUndone

KINDS: dict[str, tuple[str, int]] = {
    "EIO": ("errno", errno.EIO),
    "EAGAIN": ("errno", errno.EAGAIN),
    "ENOSPC": ("errno", errno.ENOSPC),
    "short": ("short", 0),
    "zero": ("zero", 0),
    "bitflip": ("bitflip", 0),
    "stale": ("stale", 0),
    "misdirected": ("misdirected", 0),
    "late": ("late", 0),
}
PHASES = ("set-up", "forward", "backward", "step", "commit", "save", "restore")
POLICIES: dict[str, dict[str, Any]] = {
    "one": {},
    "two": {"generations": 2},
    "ahead": {"generations": 2, "update": "backward"},
    "durable": {"durable": True},
}
STEPS = 4
STRUCK = 2
"""The step in which the fault is armed; earlier steps are committed or saved."""
TRIES = 6
PROMISED = (AioError, StateInvalid, StepUndone, RankError)
LEFT_S = 5.0
"""Seconds during which a freed thread or file may still be listed."""

States = dict[str, npt.NDArray[Any]]
"""The bits of values."""
Damage = dict[str, npt.NDArray[np.bool_]]
"""Damaged elements, by parameter."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One injection: the fault at request `nth` of `op` after the beginning of a phase, on the last
    rank. kind "": none."""

    kind: str
    op: str
    nth: int
    phase: str
    policy: str
    backend: str
    ranks: int
    drives: int
    late_s: float = 1.0

    @property
    def fault(self) -> Fault | None:
        if not self.kind:
            return None
        kind, code = KINDS[self.kind]
        return Fault(self.op, self.nth, kind=kind, errno=code, late_s=self.late_s)

    def drives_in(self, place: Path) -> list[Path]:
        found = [place / f"drive{index}" for index in range(self.drives)]
        for each in found:
            each.mkdir(exist_ok=True)
        return found

    def source(self, place: Path) -> Path:
        """Directory that is restored."""
        return place / ("drive0" if self.policy == "durable" else "saved")


@dataclasses.dataclass
class Told:
    """Report of one process.

    seen: errors of the promised types, as "phase: type <- type of the cause". wrong: broken
    promises. least, most: bounds of the committed step at the end. counts: requests (reads, writes)
    from the beginning of each phase. met: the fault was injected. named: damaged elements that a
    restore named.
    """

    seen: list[str] = dataclasses.field(default_factory=list)
    wrong: list[str] = dataclasses.field(default_factory=list)
    least: int = 0
    most: int = 0
    finished: bool = False
    met: bool = False
    named: int = 0
    counts: dict[str, tuple[int, int]] = dataclasses.field(default_factory=dict)


class Net(nn.Module):
    """Three units, without buffers, so that repeating a forward changes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(48, 48), nn.LayerNorm(48)) for _ in range(3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + torch.relu(block(x))
        return x.float().square().mean()


def values_of(model: Any) -> States:
    """Return everything from which training continues, flat. Collective."""
    state, handle = model.state_dict(), inf.handle(model)
    found: States = {}
    for name, param in model.named_parameters():
        found[f"{name}/param"] = _bits(state[name])
        for key, value in handle.optimizer_state(param).items():
            found[f"{name}/{key}"] = _bits(torch.as_tensor(value))
    return found


def differing(ours: States, theirs: States, damaged: Damage) -> list[str]:
    """Return names of values that differ in undamaged elements."""
    found = [f"no {name}" for name in theirs.keys() - ours.keys()]
    for name, value in theirs.items():
        mask = damaged.get(name.rsplit("/", 1)[0])
        mine = ours.get(name, value)
        if mask is not None and len(value) == len(mask):
            value, mine = value[~mask], mine[~mask]
        found += [] if np.array_equal(mine, value) else [name]
    return found


def _bits(value: torch.Tensor) -> npt.NDArray[Any]:
    flat = value.detach().reshape(-1).clone()
    sizes = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits: npt.NDArray[Any] = flat.view(sizes[flat.element_size()]).numpy()
    return bits


def built(policy: inf.Policy, seam: Seam | None, seed: int = 0) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    model: Any = offload(Net().bfloat16(), policy, _seam=seam)
    return model, inf.AdamW(model.parameters(), lr=1e-2)


def batch_of(index: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + index)
    return torch.randn(4, 48, generator=generator).bfloat16()


def undisturbed(rank: int) -> tuple[list[float], list[States]]:
    """Losses and states of a run in memory, before its first step and after each. Collective."""
    model, optimizer = built(inf.Policy(unit_bytes_max=4096), None)
    losses, states = [], [values_of(model)]
    for index in range(STEPS):
        loss = model(batch_of(index, rank))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        states.append(values_of(model))
    inf.handle(model).close()
    return losses, states


# -- resources of a process ------------------------------------------------------------------------


def _locked() -> dict[str, int]:
    lines = Path("/proc/self/status").read_text().splitlines()
    return {line.split(":")[0]: int(line.split()[1]) for line in lines
            if line.startswith(("VmLck", "VmPin"))}  # fmt: skip


def _files() -> set[str]:
    found = set()
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found.add(f"{link.name} {link.readlink()}")
    return found


def _locks() -> int:
    # "1: FLOCK  ADVISORY  WRITE 4711 fd:01:123 0 EOF"
    lines = Path("/proc/locks").read_text().splitlines()
    return sum(f" {os.getpid()} " in line for line in lines)


@dataclasses.dataclass(frozen=True)
class Held:
    """Threads, descriptors, locks and locked bytes of this process."""

    threads: tuple[str, ...]
    files: frozenset[str]
    locks: int
    locked: dict[str, int]

    @classmethod
    def now(cls, *, ranks: int) -> Held:
        # Threads and sockets of gloo vary with its groups: on several ranks count only the
        # engine's.
        threads = [each.name for each in threading.enumerate()]
        if ranks > 1:
            threads = [name for name in threads if name.startswith("infinity")
                       and not name.startswith("infinity-comm-")]  # fmt: skip
        else:
            # Native threads, too.
            threads = [name.name for name in Path("/proc/self/task").iterdir()]
        kinds = ("/dev/shm", "/memfd", "anon_inode:[io_uring]", "/drive", "/saved")
        if ranks == 1:
            kinds = (*kinds, "anon_inode:", "socket:", "pipe:")
        files = {each for each in _files() if any(kind in each for kind in kinds)}
        return cls(tuple(sorted(threads)), frozenset(files), _locks(), _locked())

    def more_than(self, before: Held) -> list[str]:
        """Return the resources beyond `before`."""
        found = [f"thread {name}" for name in self.threads if name not in before.threads]
        found += [f"file {name}" for name in self.files - before.files]
        found += ["a lock"] if self.locks > before.locks else []
        found += [f"{name} {size} KiB" for name, size in self.locked.items()
                  if size > before.locked[name]]  # fmt: skip
        return found


def left(before: Held, *, ranks: int) -> list[str]:
    """Return the resources that remain after `LEFT_S`."""
    until = time.monotonic() + LEFT_S
    while found := Held.now(ranks=ranks).more_than(before):
        if time.monotonic() > until:
            return [f"left: {each}" for each in found]
        time.sleep(0.01)
    return []


# -- a life ----------------------------------------------------------------------------------------


def told_of(error: BaseException) -> str:
    """Return the types of an error and its cause."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, AioError):
        cause = cause.__cause__
    kind = type(error).__name__
    return kind if cause is None or cause is error else f"{kind} <- {type(cause).__name__}"


class Opened:
    """Executors that a save or a restore opens, with a fault injector while one is set."""

    def __init__(self) -> None:
        self.seam: Seam | None = None
        self.found: list[aio.Executor] = []
        for module in (reader, writer):
            setattr(module, "open_executor", self.open)  # noqa: B010 - a seam of this program

    def open(self, *args: Any, **values: Any) -> aio.Executor:
        executor = aio.open_executor(*args, seam=self.seam, **values)
        self.found.append(executor)
        return executor

    def moved(self) -> tuple[int, int]:
        every = [moved(each) for each in self.found]
        return sum(reads for reads, _ in every), sum(writes for _, writes in every)


def moved(executor: aio.Executor) -> tuple[int, int]:
    drives = executor.stats().drives
    return sum(each.reads for each in drives), sum(each.writes for each in drives)


class Life:
    """Training of a case in this process, with its fault."""

    def __init__(
        self, case: Case, rank: int, place: Path, wanted: tuple[list[float], list[States]]
    ) -> None:
        self.case, self.rank, self.place = case, rank, place
        self.losses, self.states = wanted
        self.told = Told()
        # None again in the next start.
        self.fault = case.fault if rank == case.ranks - 1 else None
        self.opened = Opened()
        self.model: Any = None
        self.optimizer: Any = None
        self.armed = False
        self.marks: list[tuple[str, tuple[int, int]]] = []
        self.engine: Any = None
        # requests of the executors that a save and a restore opened
        self.aside: dict[str, tuple[int, int]] = {}

    @property
    def policy(self) -> inf.Policy:
        drives = self.case.drives_in(self.place)
        # Given, so that no start measures several drives and stripes by the result.
        io = IoSettings(block_bytes=8192, bandwidths={str(each): (1e9, 1e9) for each in drives})
        return inf.Policy(
            params="nvme",
            optim="nvme",
            ram="min",
            nvme=drives,
            io_backend=self.case.backend,
            io=io,
            unit_bytes_max=4096,
            rank_timeout_s=60.0 + 2 * self.case.late_s,
            **POLICIES[self.case.policy],
        )

    @property
    def steps(self) -> int:
        steps: int = inf.handle(self.model).pipeline.steps
        return steps

    def note(self, phase: str, error: Exception) -> None:
        """Record an error, promised or not."""
        text = told_of(error)
        if not isinstance(error, PROMISED):
            self.told.wrong.append(f"{phase}: {traceback.format_exc()[-1500:]}")
            return
        self.told.seen.append(f"{phase}: {text}")
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, AioError):
            cause = cause.__cause__
        # A rank does not know the place of another rank's fault.
        struck = self.rank == self.case.ranks - 1
        if struck and isinstance(cause, AioError) and not (cause.path and cause.op):
            self.told.wrong.append(f"{phase}: no path or operation in {cause}")
        # On other ranks the cause of an undone step is a PeerFailed, which names the rank.
        elsewhere = isinstance(error.__cause__, RankError) and not struck
        if isinstance(error, (StateInvalid, StepUndone)) and cause is None and not elsewhere:
            self.told.wrong.append(f"{phase}: {error!r} has no cause")

    def build(self, seed: int = 0) -> None:
        """Offload; with the fault in the phase set-up."""
        struck = self.case.phase == "set-up"
        seam = Seam(delay_us_max=200, seed=self.case.nth, fault=self.fault if struck else None)
        self.model, self.optimizer = built(self.policy, seam, seed)
        self.engine = inf.handle(self.model).parts.tiers.executor
        self.armed = self.armed or struck

    def arm(self, phase: str) -> None:
        """Begin a phase of the struck step."""
        self.marks.append((phase, moved(self.engine)))
        if phase in ("save", "restore"):
            self.opened.found.clear()
        if phase != self.case.phase or self.armed:
            return
        self.armed = True
        if (phase, self.case.op) in (("save", "write"), ("restore", "read")):
            self.opened.seam = Seam(fault=self.fault)
        else:
            self.engine.set_seam(Seam(fault=self.fault))

    def step(self, index: int) -> None:
        """Step `index` of the trajectory."""
        struck = index == STRUCK
        mark: Callable[[str], None] = self.arm if struck else lambda _phase: None
        mark("forward")
        loss = self.model(batch_of(index, self.rank))
        if float(loss.detach()) != self.losses[index]:
            self.told.wrong.append(f"the loss of step {index} is wrong")
        if index == STRUCK + 1:
            self.marks.append(("next", moved(self.engine)))
        mark("backward")
        loss.backward()
        mark("step")
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.case.policy == "durable":
            self.told.most = max(self.told.most, self.steps)

    def commit(self) -> None:
        inf.handle(self.model).flush()
        if self.case.policy == "durable":
            self.told.least = self.told.most = self.steps

    def save(self) -> None:
        if self.case.policy != "durable":
            self.told.most = self.steps
        inf.save(self.model, self.optimizer, self.place / "saved").wait()
        if self.case.policy != "durable":
            self.told.least = self.steps

    def restart(self) -> None:
        """Close, build again, and restore with the fault."""
        inf.handle(self.model).close()
        self.build(seed=1)
        self.arm("restore")
        found = inf.restore(self.model, self.optimizer, self.case.source(self.place))
        self.aside["restore"] = self.opened.moved()
        if found.step != STRUCK:
            self.told.wrong.append(f"restored step {found.step}")

    def after(self, index: int) -> None:
        """Commit, save or restart after step `index`, as in the case."""
        phase = self.case.phase
        if index % 2 == 1:
            self.commit()
        if index + 1 == STRUCK:
            if self.case.policy != "durable":
                self.save()
            if phase in ("restore", ""):
                self.restart()
        if index == STRUCK and phase in ("commit", ""):
            self.arm("commit")
            self.commit()
        if index == STRUCK and phase in ("save", ""):
            self.arm("save")
            self.save()
            self.aside["save"] = self.opened.moved()
            self.marks.append(("saved", moved(self.engine)))

    def end(self) -> None:
        """Commit, and compare the final values."""
        self.commit()
        wrong = differing(values_of(self.model), self.states[STEPS], {})
        self.told.wrong += [f"wrong numbers after the last step: {wrong[:4]}"] if wrong else []
        self.told.finished = True

    def train(self) -> None:
        """Train to the end, and continue after recoverable errors."""
        index, tries = 0, 0
        while not self.told.finished:
            try:
                if index == STEPS:
                    self.end()
                    continue
                self.step(index)
                self.after(index)
                index += 1
            except PROMISED as error:
                self.note(f"step {index}", error)
                tries += 1
                # All ranks undo a step together; other errors occur on some ranks only.
                alone = isinstance(error, AioError) and self.case.ranks == 1
                passing = isinstance(error, StepUndone) or alone
                broke_off = self.case.phase == "restore" and index + 1 == STRUCK
                if not passing or broke_off or tries > TRIES:
                    return
                self.optimizer.zero_grad()
                # Do not repeat a step that was taken, nor the calls after it.
                index = self.steps

    def live(self) -> None:
        """Build, train, close."""
        try:
            self.build()
            self.told.counts["set-up"] = moved(self.engine)
            self.train()
        except Exception as error:
            self.note("set-up" if self.model is None else "end", error)
        if self.model is None:
            return
        try:
            self.told.met = self._met()
            inf.handle(self.model).close()
            if self.told.finished and self.case.policy == "durable":
                self.told.least = self.told.most = STEPS
        except Exception as error:
            self.note("close", error)
        self._count()

    def _met(self) -> bool:
        if self.fault is None:
            return False
        if self.opened.seam is not None:
            return self.opened.moved()[self.case.op == "write"] > self.case.nth
        return bool(self.engine.set_seam(Seam()) > 0)

    def _count(self) -> None:
        """Count requests from the beginning of each phase: of a forward up to the step, of a
        backward up to the commit, of a step or commit up to the end of the next forward, without
        those of the save.
        """
        if self.case.kind:
            return
        at = {name: np.array(count) for name, count in self.marks}
        saved = at["saved"] - at["save"]
        # The restore built the model again.
        windows = {
            "forward": at["step"] - at["forward"],
            "backward": at["commit"] - at["backward"],
            "step": at["next"] - at["step"] - saved,
            "commit": at["next"] - at["commit"] - saved,
            "save": np.array([saved[0], self.aside["save"][1]]),
            "restore": np.array([self.aside["restore"][0], (at["forward"] - at["restore"])[1]]),
        }
        for phase, (reads, writes) in windows.items():
            self.told.counts[phase] = (int(reads), int(writes))


class SecondLife:
    """The next start: restores the committed step, and continues."""

    def __init__(self, first: Life, least: int, most: int) -> None:
        self.of, self.least, self.most = first, least, most
        self.told = first.told
        first.fault = None

    def live(self) -> None:
        try:
            self._live()
        except Exception:
            self.told.wrong.append(f"the next start: {traceback.format_exc()[-1500:]}")
            if self.of.model is not None:
                inf.handle(self.of.model).end(commit=False)

    def _live(self) -> None:
        life, place = self.of, self.of.case.source(self.of.place)
        saved = life.case.policy == "durable" or self.most > 0
        life.build(seed=1)
        step = 0
        if saved:
            try:
                step = inf.restore(life.model, life.optimizer, place).step
            except AioError as error:
                life.note("restore", error)
            except RankError as error:
                life.note("restore", error)
        else:
            self._close()
            return
        damaged: Damage = {}
        if self.told.seen:
            with contextlib.suppress(*PROMISED):
                inf.handle(life.model).end(commit=False)
            life.build(seed=1)
            found = inf.restore(life.model, life.optimizer, place, damaged="report")
            step, damaged = found.step, self._damaged(found)
            self.told.named = int(sum(mask.sum() for mask in damaged.values()))
            if not self.told.named:
                self.told.wrong.append(f"{self.told.seen}, and nothing is damaged")
        if not self.least <= step <= self.most:
            self.told.wrong.append(f"lost: step {step}, not {self.least} to {self.most}")
        if step > 0:
            wrong = differing(values_of(life.model), life.states[step], damaged)
            self.told.wrong += [f"wrong numbers restored: {wrong[:4]}"] if wrong else []
        if step < STEPS and not damaged and step > 0:
            life.step(step)
            life.commit()
            wrong = differing(values_of(life.model), life.states[step + 1], {})
            self.told.wrong += [f"wrong numbers after the restore: {wrong[:4]}"] if wrong else []
        self._close()

    def _close(self) -> None:
        inf.handle(self.of.model).close()
        self.told.finished = True

    def _damaged(self, found: inf.Restored) -> Damage:
        every: list[Any] = [found.damaged]
        if self.of.case.ranks > 1:
            every = [None] * self.of.case.ranks
            dist.all_gather_object(every, found.damaged)
        sizes = {name: param.numel() for name, param in self.of.model.named_parameters()}
        masks: Damage = {}
        for each in (damage for ranges in every for damage in ranges):
            mask = masks.setdefault(each.name, np.zeros(sizes[each.name], dtype=bool))
            mask[each.start : each.stop] = True
        return masks


@contextlib.contextmanager
def joined(case: Case, rank: int, place: Path, life: int) -> Iterator[None]:
    """Run `life` in the process group of the case's ranks."""
    if case.ranks > 1:
        dist.init_process_group(
            "gloo", init_method=f"file://{place}/meeting{life}", rank=rank, world_size=case.ranks
        )
    try:
        yield
    finally:
        if case.ranks > 1:
            dist.destroy_process_group()


def serve(
    pipe: Any,
    case: Case,
    rank: int,
    place: str,
    wanted: tuple[list[float], list[States]] | None,
    bounds: tuple[int, int] | None,
) -> None:
    """Be a process of a case: the first start, the second (`bounds`), or (`wanted` None) the
    undisturbed run."""
    # A woken thread does not preempt the waking one: gloo's send wakes another rank with a lock
    # held, for which gloo's thread would spin.
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    torch.set_num_threads(1)
    torch.ones(1, requires_grad=True).sum().backward()  # its threads, if any
    directory = Path(place)
    if wanted is None:
        with joined(case, rank, directory, 0):
            pipe.send(undisturbed(rank))
        return
    life = Life(case, rank, directory, wanted)
    before = Held.now(ranks=case.ranks)
    with joined(case, rank, directory, 1 if bounds is None else 2):
        if bounds is None:
            life.live()
        else:
            SecondLife(life, *bounds).live()
    life.told.wrong += left(before, ranks=case.ranks)
    pipe.send(life.told)
