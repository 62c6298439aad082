"""Ranks that may die: processes of their own, each with a topology, a watch and a communication
stream, and what became of every one."""

from __future__ import annotations

import contextlib
import dataclasses
import pickle
import socket
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from infinity._src.distributed.comm_streams import CommStream, PendingCollective
from infinity._src.distributed.process_groups import abort_groups, make_group
from infinity._src.distributed.topology import Topology, default_store
from infinity._src.distributed.watchdog import Watchdog
from infinity.errors import RankFailed
from tests import forks

LIMIT_S = 90
Job = Callable[["Ranks"], Any]


@dataclasses.dataclass(frozen=True)
class End:
    """End of a rank: `exit_code` of its process, `result` that its job returned, `error` that it
    raised."""

    exit_code: int
    result: Any
    error: str

    def failure(self) -> RankFailed:
        """The RankFailed that the job returned."""
        assert isinstance(self.result, RankFailed), (self.exit_code, self.result, self.error)
        return self.result


@dataclasses.dataclass
class Ranks:
    """Argument of a job: the rank, the world, a directory, and the rank's watchdog, communication
    stream and group."""

    rank: int
    world: int
    place: Path
    watchdog: Watchdog
    stream: CommStream
    group: Any

    def sum(self) -> PendingCollective:
        """An all-reduce of ones in the communication stream."""

        def work(group: Any) -> None:
            values = torch.ones(5000)
            dist.all_reduce(values, group=group)
            assert values[0] == self.world

        return self.stream.submit("sum", work)

    def until_failure(self, sums: int = 1_000_000) -> RankFailed | None:
        """The failure that sums after sums end with."""
        try:
            for _ in range(sums):
                self.sum().wait()
        except RankFailed as failure:
            return failure
        return None

    def mark(self, name: str) -> None:
        """Tell the test, and the other ranks."""
        (self.place / name).touch()

    def await_mark(self, name: str) -> None:
        """Wait for another rank's mark."""
        await_file(self.place / name)


def await_file(path: Path) -> None:
    end_s = time.monotonic() + LIMIT_S
    while not path.exists():
        assert time.monotonic() < end_s, f"no {path.name} within {LIMIT_S} s"
        time.sleep(0.01)


@contextlib.contextmanager
def engine(
    rank: int, world: int, place: Path, name: str = "engine", **options: Any
) -> Iterator[Ranks]:
    """A watch and a communication stream, closed at the end."""
    options = {"timeout_s": 60.0, **options}
    watchdog = Watchdog(Topology.find(timeout_s=60.0), default_store(), name=name, **options)
    group = make_group(timeout_s=options["timeout_s"])
    assert group is not None

    def abort() -> None:
        abort_groups([group])

    watchdog.on_failure.append(abort)
    stream = CommStream(name, group=group, watchdog=watchdog)
    try:
        yield Ranks(rank, world, place, watchdog, stream, group)
    finally:
        stream.close()
        watchdog.close()
        # A watchdog is in circles of references, and would keep the group until they are collected.
        watchdog.on_failure.remove(abort)


def _main(rank: int, world: int, place: Path, init: str, job: Job, options: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", init_method=init, rank=rank, world_size=world)
        with engine(rank, world, place, **options) as ranks:
            result = job(ranks)
        (place / f"result{rank}").write_bytes(pickle.dumps(result))
        del ranks
        dist.destroy_process_group()
    except BaseException:
        (place / f"error{rank}").write_text(traceback.format_exc())
        raise


@contextlib.contextmanager
def started(job: Job, place: Path, world: int, **options: Any) -> Iterator[list[Any]]:
    """The processes of the ranks; those that are left at the end are killed."""
    place.mkdir(exist_ok=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        init = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    context = mp.get_context(forks.METHOD)
    processes = [
        context.Process(target=_main, args=(rank, world, place, init, job, options))
        for rank in range(world)
    ]
    try:
        for process in processes:
            process.start()
        yield processes
    finally:
        for process in processes:
            if process.pid is not None and process.is_alive():
                process.kill()
            process.join()


def ends(processes: list[Any], place: Path) -> list[End]:
    """Wait for all."""
    end_s = time.monotonic() + LIMIT_S
    for process in processes:
        process.join(max(0.0, end_s - time.monotonic()))
    hanging = [rank for rank, process in enumerate(processes) if process.is_alive()]
    found = []
    for rank, process in enumerate(processes):
        result, error = place / f"result{rank}", place / f"error{rank}"
        found.append(
            End(
                process.exitcode if process.exitcode is not None else -1000,
                pickle.loads(result.read_bytes()) if result.exists() else None,
                error.read_text() if error.exists() else "",
            )
        )
    if hanging:
        pytest.fail(f"ranks {hanging} hang: {found}")
    return found


def run(job: Job, place: Path, world: int, **options: Any) -> list[End]:
    """Run the job on every rank and return how each ended."""
    with started(job, place, world, **options) as processes:
        return ends(processes, place)


def descriptors() -> list[str]:
    """Return the targets of this process's descriptors, less the numbers in them that change by
    themselves."""
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found.append(str(entry.readlink()).split(":")[0])
    return sorted(found)
