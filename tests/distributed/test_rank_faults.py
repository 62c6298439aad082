"""A rank is killed, raises, has a broken drive or does not arrive: the other ranks end at once,
name it, and leave no files or threads."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import infinity as inf
from infinity._src.distributed import communicator
from infinity._src.engine.handle import offload
from infinity.aio import Fault, Seam
from infinity.errors import AioError, RankFailed, StepUndone
from tests.crashes import Net, Rooted, digest, step
from tests.distributed.ranks import Outcome, ends_of, on_ranks
from tests.distributed.watched import await_file
from tests.marks import mostly_ranks

STRUCK_IN = 2  # the step
STAGE3: dict[str, Any] = {"params": "nvme", "optim": "nvme", "ram": "min"}
STAGE2: dict[str, Any] = {"zero": 2, "params": "device", "optim": "nvme", "ram": "min"}
SPECULATING: dict[str, Any] = {**STAGE3, "update": "backward", "generations": 2}


@dataclasses.dataclass(frozen=True)
class Ended:
    """End of a rank's training: its errors, and the remaining files and threads."""

    kind: str
    text: str
    named: int | None  # the rank that RankFailed names
    again: str  # the type of what the next forward raises
    # files in the directory of the drive that the process has open after it has closed its engine
    held: tuple[str, ...]
    threads: tuple[str, ...]  # threads of the engine that still run
    steps: int
    closing: str  # what `handle.close()` raised: the failure once more
    trace: str


def strike_in(where: str, model: Any, optimizer: Any, strike: Callable[[], None]) -> None:
    """Call `strike` in the middle of a forward, a backward or a step, and after a step's background
    work."""
    middle = model.blocks[1]
    if where == "forward":
        middle.register_forward_pre_hook(lambda *_: strike())
    elif where == "backward":
        middle.register_forward_hook(
            lambda _module, _inputs, out: (out.register_hook(lambda _grad: strike()), None)[1]
        )
    elif where == "step":
        optimizer.register_step_pre_hook(lambda *_: strike())
    elif where == "after":
        optimizer.register_step_post_hook(lambda *_: strike())


@dataclasses.dataclass(frozen=True)
class Struck:
    """Training with a fault of one rank (`victim`; -1: all) in the middle of a step."""

    how: str  # "kill", "raise", "sleep", "drive"
    where: str = "forward"
    victim: int = 1
    values: tuple[tuple[str, Any], ...] = tuple(STAGE3.items())

    def __call__(self, rank: int, place: Path) -> Ended:
        drive = place / "drive"
        drive.mkdir(exist_ok=True)
        torch.manual_seed(0)
        fault = (
            Fault("read", 8, persistent=True)
            if self.how == "drive" and rank == self.victim
            else None
        )
        seam = Seam(delay_us_max=300, seed=rank, fault=fault)
        policy = inf.Policy(
            **{"nvme": drive, "unit_bytes_max": 4096, "rank_timeout_s": 60.0, **dict(self.values)}
        )
        model: Any = offload(Net().bfloat16(), policy, _seam=seam)
        optimizer = inf.AdamW(model.parameters(), lr=1e-2)
        index, ended, trace = 0, ("", "", None), ""

        def strike() -> None:
            if index == STRUCK_IN and rank == self.victim:
                self.strike(place)

        strike_in(self.where, model, optimizer, strike)
        try:
            for index in range(6):
                self.take(model, optimizer, index, rank)
            inf.handle(model).flush()
        except Exception as error:
            ended = (type(error).__name__, str(error), getattr(error, "rank", None))
            trace = traceback.format_exc()
        again = ""
        try:
            step(model, optimizer, index, rank)
        except Exception as error:
            again = type(error).__name__
        (place / f"failed{rank}").touch()
        closing = ""
        try:
            inf.handle(model).close()
        except Exception:
            closing = traceback.format_exc()
        dist.destroy_process_group()
        return Ended(*ended, again, open_in(drive), ours(), index, closing, trace)

    def take(self, model: Any, optimizer: Any, index: int, rank: int) -> None:
        """Take a step, and repeat it while a fault undoes it. With two generations a lost drive
        undoes the step at each read; the third consecutive failure loses a chunk's states."""
        for _ in range(9):
            try:
                return step(model, optimizer, index, rank)
            except StepUndone:
                optimizer.zero_grad()
        raise AssertionError("each repetition was undone")

    def strike(self, place: Path) -> None:
        if self.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.how == "sleep":
            for rank in {0, 1, 2} - {self.victim}:
                await_file(place / f"failed{rank}")
        else:
            raise ValueError("out of luck")


def open_in(directory: Path) -> tuple[str, ...]:
    """Return the targets of this process's descriptors in a directory, also of files without a
    name."""
    found = []
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found.append(str(link.readlink()))
    return tuple(target for target in found if target.startswith(str(directory)))


def ours() -> tuple[str, ...]:
    """The engine's threads. A communication stream may be stuck in gloo when a connection closed
    during a send (infinity/_src/distributed/process_groups.py)."""
    names = (thread.name for thread in threading.enumerate())
    return tuple(
        name
        for name in names
        if name.startswith("infinity") and not name.startswith("infinity-comm-")
    )


def survivors(outcomes: list[Outcome], victim: int, directory: Path) -> list[Ended]:
    """Check that the other ranks named the victim, and left no files or threads."""
    found = []
    for outcome in outcomes:
        if outcome.rank == victim:
            continue
        assert outcome.well, f"rank {outcome.rank}: {outcome}"
        ended: Ended = outcome.result
        assert (ended.kind, ended.named) == ("RankFailed", victim), f"{ended}\n{ended.trace}"
        assert f"rank {victim}" in ended.text
        assert ended.again == "RankFailed"
        assert (ended.held, ended.threads) == ((), ()), f"{ended}\n{ended.closing}"
        assert ended.closing == "" or "RankFailed" in ended.closing, ended.closing
        found.append(ended)
    assert len(found) == len(outcomes) - 1
    assert list((directory / "drive").iterdir()) == []
    return found


@pytest.mark.parametrize(
    ("where", "victim", "world", "values"),
    [
        ("forward", 1, 3, STAGE3),
        ("backward", 2, 3, SPECULATING),
        ("step", 1, 3, STAGE3),
        pytest.param("after", 1, 2, STAGE3, marks=pytest.mark.ranks),
        ("backward", 0, 3, STAGE2),  # where the store is
        pytest.param("forward", 0, 2, STAGE3, marks=pytest.mark.ranks),
    ],
)
def test_all_other_ranks_name_a_killed_rank_and_end(
    tmp_path: Path, where: str, victim: int, world: int, values: dict[str, Any]
) -> None:
    job = Struck("kill", where, victim, tuple(values.items()))
    outcomes = ends_of(job, tmp_path / "run", world, leave=True)
    assert outcomes[victim].exit_code == -signal.SIGKILL
    for ended in survivors(outcomes, victim, tmp_path / "run"):
        assert ended.steps in (STRUCK_IN, STRUCK_IN + 1)


@pytest.mark.parametrize(
    ("where", "values"),
    [
        ("backward", STAGE2),
        *(pytest.param("forward", each, marks=pytest.mark.ranks) for each in (STAGE3, SPECULATING)),
    ],
)
def test_an_error_in_the_loop_of_one_rank_ends_the_others_with_its_text(
    tmp_path: Path, where: str, values: dict[str, Any]
) -> None:
    outcomes = ends_of(
        Struck("raise", where, 1, tuple(values.items())), tmp_path / "run", 3, leave=True
    )
    mine: Ended = outcomes[1].result
    assert (mine.kind, mine.text, mine.held, mine.threads) == (
        "ValueError",
        "out of luck",
        (),
        (),
    ), outcomes[1]
    for ended in survivors(outcomes, 1, tmp_path / "run"):
        if where == "forward":  # no error leaves the backward
            assert "out of luck" in ended.text


# On one rank the parts of two units are only padding: lost states without a name.
@pytest.mark.parametrize(
    "values", mostly_ranks([STAGE3, STAGE2, SPECULATING], STAGE3, SPECULATING)
)
def test_a_failed_drive_of_one_rank_is_named_on_all_ranks(
    tmp_path: Path, values: dict[str, Any]
) -> None:
    outcomes = ends_of(
        Struck("drive", "none", 1, tuple(values.items())), tmp_path / "run", 3, leave=True
    )
    mine: Ended = outcomes[1].result
    assert "errno 5" in mine.text, outcomes[1]
    assert (mine.held, mine.threads) == ((), ())
    survivors(outcomes, 1, tmp_path / "run")


def test_a_missing_rank_raises_after_rank_timeout_s(tmp_path: Path) -> None:
    values = {**STAGE3, "rank_timeout_s": 2.0}
    outcomes = ends_of(
        Struck("sleep", "forward", 1, tuple(values.items())), tmp_path / "run", 3, leave=True
    )
    survivors(outcomes, 1, tmp_path / "run")
    assert outcomes[1].result.kind == "RankFailed"  # it wakes up when the other ranks have failed


class Unlucky:
    """Raises once where it is armed."""

    def __init__(self, model: Any) -> None:
        self.armed = ""
        for where in ("forward", "backward"):
            strike_in(where, model, None, functools.partial(self, where))

    def __call__(self, where: str) -> None:
        if self.armed == where:
            self.armed = ""
            raise ValueError("out of luck")


def raise_alike(rank: int, place: Path) -> list[str]:
    """Raise in a forward at the same place on all ranks, then in a backward; the loop repeats the
    step."""
    found = []
    for strikes in ({}, {1: "forward", 2: "backward"}):
        torch.manual_seed(0)
        model: Any = inf.offload(
            Net().bfloat16(), inf.Policy(**STAGE3, nvme=place, unit_bytes_max=4096)
        )
        optimizer = inf.AdamW(model.parameters(), lr=1e-2)
        unlucky = Unlucky(model)
        for index in range(4):
            if index in strikes:
                unlucky.armed = strikes[index]
                buffers = {name: value.clone() for name, value in model.named_buffers()}
                with pytest.raises(ValueError, match="out of luck"):
                    step(model, optimizer, index, rank)
                optimizer.zero_grad()
                for name, value in model.named_buffers():
                    value.copy_(buffers[name])
            step(model, optimizer, index, rank)
        found.append(digest(model))
        inf.handle(model).close()
    return found


def test_errors_that_all_ranks_meet_alike_end_nothing(tmp_path: Path) -> None:
    for undisturbed, disturbed in on_ranks(raise_alike, tmp_path / "run", 3):
        assert disturbed == undisturbed


@dataclasses.dataclass(frozen=True)
class AtTheEnd:
    """Job in which rank 0 is killed while rank 1 ends a backward, or a drive of rank 1 fails
    there."""

    how: str  # "kill": rank 0; "drive": rank 1
    values: tuple[tuple[str, Any], ...] = tuple(STAGE2.items())

    def __call__(self, rank: int, place: Path) -> Any:
        drive = place / "drive"
        drive.mkdir(exist_ok=True)
        policy = inf.Policy(
            **{"nvme": drive, "unit_bytes_max": 4096, "rank_timeout_s": 60.0, **dict(self.values)}
        )
        torch.manual_seed(0)
        model: Any = inf.offload(Rooted().bfloat16(), policy)
        optimizer, handle = inf.AdamW(model.parameters(), lr=1e-2), inf.handle(model)
        step(model, optimizer, 0, rank)
        handle.flush()
        loss = model(torch.randn(4, 24).bfloat16())
        reached = place / "reached"
        if self.how == "kill" and rank == 0:
            while not reached.exists():
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 1:
            # blocks.2, blocks.1, and the first of the two that end last
            before, left = handle.unsharder.unit_done, 3

            def unit_done(unit: Any) -> None:
                nonlocal left
                left -= 1
                if left == 0 and self.how == "drive":
                    raise AioError("no such luck", path="/swap", op="write", length=4096)
                if left == 0:
                    reached.touch()
                before(unit)

            handle.unsharder.unit_done = unit_done
        with pytest.raises((RankFailed, AioError)) as caught:
            loss.backward()
            optimizer.step()
        closing = ""
        try:
            handle.close()
        except Exception:
            closing = traceback.format_exc()
        dist.destroy_process_group()
        return type(caught.value).__name__, str(caught.value), open_in(drive), ours(), closing


@pytest.mark.parametrize(
    ("how", "values"),
    [
        ("drive", STAGE3),
        *(pytest.param(each, STAGE2, marks=pytest.mark.ranks) for each in ("kill", "drive")),
    ],
)
def test_a_failure_at_the_end_of_backward_leaves_nothing(
    tmp_path: Path, how: str, values: dict[str, Any]
) -> None:
    outcomes = ends_of(AtTheEnd(how, tuple(values.items())), tmp_path / "run", 2, leave=True)
    assert (outcomes[0].exit_code == -signal.SIGKILL) == (how == "kill")
    kinds = {0: "RankFailed", 1: "RankFailed" if how == "kill" else "AioError"}
    for outcome in outcomes if how == "drive" else outcomes[1:]:
        assert outcome.well, outcome
        kind, text, held, threads, closing = outcome.result
        assert kind == kinds[outcome.rank], text
        assert (held, threads) == ((), ()), closing
        assert closing == "" or "RankFailed" in closing.splitlines()[-1], closing


def cannot_make_groups(rank: int, place: Path) -> tuple[str, str, list[str]]:
    """Rank 0 has no descriptors for the second communication stream while the other ranks wait for
    it."""
    if rank == 0:
        before, calls = communicator.make_group, itertools.count()

        def make_group(**values: Any) -> Any:
            if next(calls):
                raise OSError("too many open files")
            return before(**values)

        communicator.make_group = make_group
    with pytest.raises((OSError, RankFailed)) as caught:
        inf.offload(Net(), inf.Policy(params="cpu", optim="cpu", rank_timeout_s=60.0))
    threads = [
        thread.name for thread in threading.enumerate() if thread.name.startswith("infinity")
    ]
    dist.destroy_process_group()
    return type(caught.value).__name__, str(caught.value), threads


def test_a_rank_that_fails_amid_opening_ends_the_others_and_leaves_no_thread(
    tmp_path: Path,
) -> None:
    outcomes = ends_of(cannot_make_groups, tmp_path / "run", 2, leave=True, timeout_s=45.0)
    assert all(outcome.well for outcome in outcomes), outcomes
    kind, text, threads = outcomes[0].result
    assert (kind, text, threads) == ("OSError", "too many open files", [])
    kind, text, threads = outcomes[1].result
    assert (kind, text) == ("RankFailed", "rank 0 failed: OSError: too many open files")
    # abandoned: torch cannot abort new_group()
    assert set(threads) <= {"infinity-comm-exchange-maker"}


def test_a_rank_that_does_not_offload_is_named_after_rank_timeout_s(tmp_path: Path) -> None:
    for outcome in on_ranks(offloads_alone, tmp_path / "run", 2)[:1]:
        assert "ranks [1] have not reported their host within 0.5 s" in outcome


def offloads_alone(rank: int, place: Path) -> str:
    if rank == 1:
        while not (place / "told").exists():
            time.sleep(0.01)
        return ""
    with pytest.raises(RankFailed) as caught:
        inf.offload(Net(), inf.Policy(params="cpu", optim="cpu", rank_timeout_s=0.5))
    (place / "told").touch()
    return str(caught.value)
