"""Ranks over gloo for tests: a pool of processes that are the ranks of one job after the other.

    test --(job, directory, rank, world)--> rank 0..N-1 --(result | error)--> test

Ranks of a job meet at a TCP store on this host, as torchrun has it, or at a file. What goes wrong
ends the pool's processes, and the next job gets fresh ones: a rank that was killed, an error, a job
past its time, a model left offloaded.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import faulthandler
import multiprocessing as mp
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import infinity as inf
from infinity.aio import Seam
from tests import forks, harness, models
from tests.harness import Result, Training

Job = Callable[[int, Path], Any]
"""Work of one rank, given its number and a directory that all ranks see. Picklable."""

TIMEOUT_S = 120.0


@dataclasses.dataclass(frozen=True)
class Outcome:
    """End of a job on one rank.

    error: the traceback of what it raised; kind: the name of that error's type; exit_code: of a
    process that ended without an answer (-9: killed); stack: the stacks of its threads when its
    time was up.
    """

    rank: int
    result: Any = None
    error: str = ""
    kind: str = ""
    exit_code: int | None = None
    stack: str = ""

    @property
    def well(self) -> bool:
        """True when the job returned a result."""
        return not (self.error or self.stack) and self.exit_code is None


def on_ranks(
    job: Job, directory: Path, world: int, *, meet: str = "tcp", timeout_s: float = TIMEOUT_S
) -> list[Any]:
    """Return the results of `job(rank, directory)` on `world` ranks. Any error fails the test."""
    outcomes = ends_of(job, directory, world, meet=meet, timeout_s=timeout_s)
    if not all(outcome.well for outcome in outcomes):
        pytest.fail("\n".join(map(_told, outcomes)))
    return [outcome.result for outcome in outcomes]


def ends_of(
    job: Job,
    directory: Path,
    world: int,
    *,
    meet: str = "tcp",
    timeout_s: float = TIMEOUT_S,
    leave: bool = False,
) -> list[Outcome]:
    """Run the job on all ranks and return the outcome of each, also of those that failed. Ranks
    that have not ended after `timeout_s` are killed.

    leave: the processes end after the job, as an interpreter does, and one that does not get to its
    end is an outcome too.
    """
    directory.mkdir()
    return _POOL.run(job, directory, world, meet=meet, timeout_s=timeout_s, leave=leave)


def _told(outcome: Outcome) -> str:
    if outcome.well:
        return f"rank {outcome.rank}: ended well"
    if outcome.stack:
        return f"rank {outcome.rank} did not end in time, and was at\n{outcome.stack}"
    ended = f"ended with status {outcome.exit_code}" if outcome.exit_code is not None else "raised"
    return f"rank {outcome.rank} {ended}\n{outcome.error}"


class _Pool:
    """Processes that wait for jobs. Started at first use; they end with their parent."""

    def __init__(self) -> None:
        self._ranks: list[tuple[Any, Connection]] = []

    def run(
        self, job: Job, directory: Path, world: int, *, meet: str, timeout_s: float, leave: bool
    ) -> list[Outcome]:
        context = mp.get_context(forks.METHOD)
        while len(self._ranks) < world:
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(there,), daemon=True)  # type: ignore[attr-defined]
            process.start()
            there.close()
            self._ranks.append((process, here))
        well = False
        try:
            for rank in range(world):
                self._ranks[rank][1].send((job, str(directory), rank, world, meet, leave))
            outcomes = self._collect(world, directory, timeout_s)
            if leave:
                outcomes = [self._left(outcome, directory, timeout_s) for outcome in outcomes]
            well = not leave and all(outcome.well for outcome in outcomes)
        finally:
            if not well:
                self.end()
        return outcomes

    def _collect(self, world: int, directory: Path, timeout_s: float) -> list[Outcome]:
        deadline = time.monotonic() + timeout_s
        found: dict[int, Outcome] = {}
        pipes = {self._ranks[rank][1]: rank for rank in range(world)}
        while pipes:
            ready = wait(list(pipes), max(0.0, deadline - time.monotonic()))
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = pipes.pop(pipe)
                found[rank] = self._answer(rank, pipe)
            if not ready:
                found.update(
                    {
                        rank: Outcome(rank, stack=self._stack(rank, directory))
                        for rank in pipes.values()
                    }
                )
                break
        return [found[rank] for rank in range(world)]

    def _answer(self, rank: int, pipe: Connection) -> Outcome:
        try:
            answer: Outcome = pickle.loads(pipe.recv_bytes())
        except (EOFError, OSError):
            process = self._ranks[rank][0]
            process.join(10)
            return Outcome(rank, exit_code=process.exitcode if process.exitcode is not None else 0)
        return answer

    def _left(self, outcome: Outcome, directory: Path, timeout_s: float) -> Outcome:
        """The outcome, unless its process does not end."""
        process = self._ranks[outcome.rank][0]
        if outcome.stack or outcome.exit_code is not None:
            return outcome
        process.join(timeout_s)
        if process.is_alive():
            return dataclasses.replace(outcome, stack=self._stack(outcome.rank, directory))
        return (
            outcome
            if process.exitcode == 0
            else dataclasses.replace(outcome, exit_code=process.exitcode)
        )

    def _stack(self, rank: int, directory: Path) -> str:
        """Return the stacks of a rank's threads. The rank writes them in the handler of a signal,
        also while it holds the GIL."""
        told = directory / f"stack{rank}"
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._ranks[rank][0].pid, signal.SIGUSR1)
            time.sleep(0.5)
        return (told.read_text() if told.exists() else "") or "a place that it did not tell"

    def end(self) -> None:
        """Kill the processes."""
        for process, pipe in self._ranks:
            pipe.close()
            process.kill()
            process.join()
        self._ranks.clear()


_POOL = _Pool()


def _serve(pipe: Connection) -> None:
    """Be a process of the pool: run jobs until the parent has ended."""
    torch.set_num_threads(1)
    leave = False
    while not leave:
        try:
            job, directory, rank, world, meet, leave = pipe.recv()
        except EOFError:
            return
        place = Path(directory)
        stack = (place / f"stack{rank}").open("w")
        faulthandler.register(signal.SIGUSR1, file=stack)
        outcome = _joined(job, place, rank, world, meet)
        if not leave:
            faulthandler.unregister(signal.SIGUSR1)
            stack.close()
        try:
            answer = pickle.dumps(outcome)
        except Exception as error:
            answer = pickle.dumps(
                Outcome(rank, error=f"{error}: {outcome.result!r}", kind=type(error).__name__)
            )
        pipe.send_bytes(answer)
    atexit._run_exitfuncs()  # which processes of multiprocessing do not


def _joined(job: Job, place: Path, rank: int, world: int, meet: str) -> Outcome:
    """Join the group, do the job, leave the group."""
    try:
        store = store_of(place, rank, world, meet)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=TIMEOUT_S)
        )
        result = job(rank, place)
        left = sys.modules["infinity._src.engine.handle"]._OPEN
        assert not left, f"the job left {len(left)} models offloaded"
        if dist.is_initialized():  # a job whose ranks failed has left the group
            if world > 1:
                dist.barrier()  # rank 0 is the store's host: it leaves last
            dist.destroy_process_group()
    except BaseException as error:
        return Outcome(rank, error=traceback.format_exc(), kind=type(error).__name__)
    return Outcome(rank, result)


def store_of(place: Path, rank: int, world: int, meet: str) -> dist.Store:
    """Open the store at which the ranks of a job meet: at a port that the system chooses for rank
    0, which writes it down; or at a file."""
    if meet == "file":
        return dist.FileStore(str(place / "meeting"), world)
    port = place / "port"
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, world, is_master=True, wait_for_workers=False)
        (place / "port.new").write_text(str(store.port))
        (place / "port.new").rename(port)
        return store
    deadline = time.monotonic() + TIMEOUT_S
    while not port.exists():
        assert time.monotonic() < deadline, "rank 0 opened no port"
        time.sleep(0.002)
    return dist.TCPStore(
        "127.0.0.1", int(port.read_text()), world, is_master=False, wait_for_workers=False
    )


# -- trainings -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Shard(Training):
    """The rows of one rank of every batch of `whole`; all ranks have the same number."""

    whole: Training | None = None
    rank: int = 0
    world: int = 1

    @property
    def batches(self) -> list[models.Batch]:
        assert self.whole is not None
        found = []
        for batch in self.whole.batches:
            rows = len(next(iter(batch.values())))
            assert rows % self.world == 0, (rows, self.world)
            mine = slice(self.rank * rows // self.world, (self.rank + 1) * rows // self.world)
            found.append({name: value[mine] for name, value in batch.items()})
        return found


def shard_of(training: Training, rank: int, world: int) -> Shard:
    """The same training on the rows of one rank."""
    values = {field.name: getattr(training, field.name) for field in dataclasses.fields(Training)}
    return Shard(**values, whole=training, rank=rank, world=world)


HELD = ("ram_min_bytes", "grad_bytes", "spilled_bytes", "updates_ahead")


@dataclasses.dataclass(frozen=True)
class Train:
    """Train on this rank's rows of every batch, under each policy in turn.

    A policy that needs a drive gets the job's directory. With ram="min" requests come late and out
    of order. mesh: (nodes, ranks of a node), where the ranks are not those of one node.
    """

    runs: tuple[tuple[Training, dict[str, Any]], ...]
    held: tuple[str, ...] = HELD
    mesh: tuple[int, int] | None = None

    def __call__(self, rank: int, place: Path) -> list[Result]:
        results = []
        world = dist.get_world_size()
        for index, (training, chosen) in enumerate(self.runs):
            values = dict(chosen)
            if "nvme" in values.values():
                values["nvme"] = place
            if self.mesh is not None:
                from torch.distributed.device_mesh import init_device_mesh

                values["mesh"] = init_device_mesh("cpu", self.mesh, mesh_dim_names=("node", "rank"))
            seam = Seam(delay_us_max=800, seed=index + rank) if values.get("ram") == "min" else None
            try:
                result = harness.offloaded(
                    shard_of(training, rank, world), inf.Policy(**values), seam=seam
                )
            except Exception as error:
                raise RuntimeError(f"run {index}, {chosen}: {error}") from error
            stats = {name: getattr(result.stats, name) for name in self.held}
            results.append(dataclasses.replace(result, stats=stats))
        return results


def mean_losses(results: Sequence[Result]) -> list[float]:
    """The losses of the global batches."""
    return [
        sum(values) / len(results)
        for values in zip(*(result.losses for result in results), strict=True)
    ]


def assert_ranks_agree(results: Sequence[Result]) -> None:
    """Norms and parameters are the same on all ranks."""
    for other in results[1:]:
        assert other.norms == results[0].norms
        harness.assert_equal(
            dataclasses.replace(other, losses=results[0].losses, seen=results[0].seen), results[0]
        )


@contextlib.contextmanager
def named(*what: object) -> Iterator[None]:
    """Names the failed case of a test."""
    try:
        yield
    except AssertionError as error:
        raise AssertionError(f"{what}: {error}") from error
