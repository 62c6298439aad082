"""If a rank dies, fails, leaves or does not arrive, all other ranks raise RankFailed, which names
it; none hangs."""

from __future__ import annotations

import collections
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from infinity._src.distributed import watchdog as watch_module
from infinity._src.distributed.heartbeat import Host
from infinity._src.distributed.topology import Topology
from infinity.errors import AioError, RankFailed
from tests.distributed import watched
from tests.distributed.watched import End, Ranks

ROOT = Path(__file__).resolve().parents[2]


# Ranks that stay alive: scenarios run one after another in the same processes, each with a separate
# engine.


def does_not_come(ranks: Ranks) -> Any:
    """Rank 1 is busy. Stuck collectives are aborted, so that memory can be freed."""
    ranks.sum().wait()
    if ranks.rank == 1:
        ranks.await_mark("late0")
        ranks.await_mark("late2")
        return None
    op = ranks.sum()
    with pytest.raises(RankFailed) as caught:
        op.wait()
    left = op.finished()
    ranks.mark(f"late{ranks.rank}")
    with pytest.raises(RankFailed) as again:
        ranks.watchdog.check()
    with pytest.raises(RankFailed):
        ranks.sum()
    return caught.value, left, again.value is caught.value


def breaks_off(ranks: Ranks) -> Any:
    """Rank 1's forward raises, and rank 1 continues with other calls."""
    ranks.sum().wait()
    if ranks.rank == 1:
        ranks.watchdog.report_exception("forward of layers.3", ValueError("a bad batch"))
        ranks.await_mark("broken0")
        ranks.await_mark("broken2")
        return None
    failure = ranks.until_failure()
    ranks.mark(f"broken{ranks.rank}")
    return failure


def all_break_off(ranks: Ranks) -> Any:
    for _ in range(3):
        ranks.sum().wait()
        ranks.watchdog.report_exception("forward", ValueError("the same everywhere"))
        time.sleep(0.1 * ranks.rank)
    ranks.sum().wait()
    return ranks.watchdog.failure


def break_off_at_different_places(ranks: Ranks) -> Any:
    ranks.sum().wait()
    if ranks.rank == 1:
        ranks.watchdog.report_exception("forward", ValueError("early"))
        return ranks.until_failure()
    op = ranks.sum()
    ranks.watchdog.report_exception("forward", ValueError("late"))
    with pytest.raises(RankFailed) as caught:
        op.wait()
    return caught.value


def reads_badly(ranks: Ranks) -> Any:
    """The work fails on rank 1 while the other ranks are in the collective."""
    ranks.sum().wait()
    if ranks.rank != 1:
        return ranks.until_failure()

    def work(group: Any) -> None:
        raise AioError("no such luck", path="/swap", op="read", length=4096)

    op = ranks.stream.submit("sum", work)  # of the same name: it is the same collective
    with pytest.raises(AioError, match="no such luck"):
        op.wait()
    with pytest.raises(AioError, match="no such luck"):
        op.wait()
    with pytest.raises(RankFailed) as caught:
        ranks.sum()
    return caught.value


def wrong_call(ranks: Ranks) -> Any:
    """A RuntimeError of this rank is distinguished from one of the connection."""
    if ranks.rank != 1:
        return ranks.until_failure()

    def work(group: Any) -> None:
        raise RuntimeError("sizes differ")

    with pytest.raises(RuntimeError, match="sizes differ"):
        ranks.stream.submit("sum", work).wait()
    return ranks.watchdog.failure


def closes(ranks: Ranks) -> Any:
    """Rank 1 closes; collectives with its part done still complete."""
    done = ranks.sum()
    if ranks.rank == 1:
        return None
    done.wait()
    return ranks.until_failure(), done.done


def two_engines(ranks: Ranks) -> Any:
    """One of them fails."""
    with watched.engine(ranks.rank, ranks.world, ranks.place, "second") as second:
        second.sum().wait()
        if ranks.rank == 1:
            second.watchdog.report_failure(MemoryError("no room"))
        failure = second.until_failure()
    for _ in range(3):
        ranks.sum().wait()
    return failure, ranks.watchdog.failure


def leaves_nothing(ranks: Ranks) -> Any:
    """Make three engines, after a first one that creates torch's permanent objects."""
    # Pidfds of other ranks are opened when their records arrive: no growth.
    ranks.watchdog.wait_for_all_ranks()
    found = []
    for turn in range(4):
        with watched.engine(ranks.rank, ranks.world, ranks.place, f"turn{turn}") as engine:
            engine.sum().wait()
        dist.destroy_process_group(engine.group)
        del engine
        ranks.sum().wait()  # the others have closed, too
        # Rank 0 has the store: its end of a connection goes a moment after the other rank's, also
        # of those before the first turn. Less than at first is no leak; more must go.
        end_s = time.monotonic() + 20
        here = what_is_open()
        while found and more_than(found[0], here) and time.monotonic() < end_s:
            time.sleep(0.05)
            here = what_is_open()
        found.append(here)
        # A rank that continued would hold an open connection to rank 0's store while rank 0 counts.
        ranks.sum().wait()
    return [more_than(found[0], here) for here in found[1:]]


def what_is_open() -> dict[str, int]:
    """Count Python's threads, all threads, and descriptors of this process by kind."""
    tasks = len(list(Path("/proc/self/task").iterdir()))
    kinds = collections.Counter(watched.descriptors())
    return {"Python's threads": len(threading.enumerate()), "threads": tasks, **kinds}


def more_than(first: dict[str, int], here: dict[str, int]) -> dict[str, int]:
    """Return the counts of `here` that exceed those of `first`."""
    return {what: count for what, count in here.items() if count > first.get(what, 0)}


def interrupted(ranks: Ranks) -> Any:
    """Ctrl-C while waiting for a late rank; then the wait continues."""
    if ranks.rank == 1:
        ranks.await_mark("interrupted0")
        ranks.sum().wait()
        return True
    op = ranks.sum()
    if ranks.rank == 0:
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            op.wait()
        ranks.mark("interrupted0")
    op.wait()
    return True


def topologies(ranks: Ranks) -> Any:
    """Without a mesh, and with meshes of one and two dimensions."""
    found = [
        Topology.find(timeout_s=60.0),
        *(
            Topology.find(init_device_mesh("cpu", shape), timeout_s=60.0)
            for shape in ((3,), (1, 3), (3, 1))
        ),
    ]
    with pytest.raises(ValueError, match=r"the mesh holds the ranks \[2, 1, 0\], and there are 3"):
        Topology.find(DeviceMesh("cpu", [2, 1, 0]), timeout_s=60.0)
    with pytest.raises(ValueError, match="3 dimensions"):
        Topology.find(init_device_mesh("cpu", (3, 1, 1)), timeout_s=60.0)
    return found


def many_work(ranks: Ranks) -> Any:
    """Two communication streams, each in order, do not wait for each other."""
    with watched.engine(ranks.rank, ranks.world, ranks.place, "other") as other:
        seen: list[int] = []

        def work(index: int) -> Any:
            def run(group: Any) -> None:
                values = torch.full((257,), float(index))
                dist.all_reduce(values, group=group)
                seen.append(int(values[0]))

            return run

        turn = [ranks, other] if ranks.rank == 0 else [other, ranks]
        ops = [streams.stream.submit("sum", work(index)) for index in range(20) for streams in turn]
        for op in ops:
            op.wait()
        assert all(op.done and op.finished() for op in ops)
    return sorted(seen)


ALIVE: dict[Callable[[Ranks], Any], dict[str, Any]] = {
    topologies: {},
    many_work: {},
    all_break_off: {},
    two_engines: {},
    leaves_nothing: {},
    interrupted: {},
    does_not_come: {"timeout_s": 2.0},
    breaks_off: {},
    break_off_at_different_places: {},
    reads_badly: {},
    wrong_call: {},
    closes: {},
}


def everything(ranks: Ranks) -> dict[str, Any]:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    found = {}
    for job, options in ALIVE.items():
        with watched.engine(
            ranks.rank, ranks.world, ranks.place, job.__name__, **options
        ) as engine:
            found[job.__name__] = job(engine)
        ranks.sum().wait()
    return found


@pytest.fixture(scope="module")
def alive(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """Scenario -> result of each of three ranks."""
    ends = watched.run(everything, tmp_path_factory.mktemp("alive"), 3)
    assert [end.exit_code for end in ends] == [0, 0, 0], "\n".join(end.error for end in ends)
    return {job.__name__: [end.result[job.__name__] for end in ends] for job in ALIVE}


def test_a_node_is_a_host_unless_a_mesh_says_otherwise(alive: dict[str, list[Any]]) -> None:
    for rank, found in enumerate(alive["topologies"]):
        assert found == [Topology.of(rank, 3, local_world) for local_world in (3, 3, 3, 1)]


def test_streams_keep_order_whatever_the_order_among_them(alive: dict[str, list[Any]]) -> None:
    for seen in alive["many_work"]:
        assert seen == sorted(3 * index for index in range(20) for _ in range(2))


def test_a_rank_that_does_not_come_is_named_after_the_timeout(alive: dict[str, list[Any]]) -> None:
    for failure, left, sticky in alive["does_not_come"][::2]:
        assert failure.rank == 1, failure
        assert "sum, collective 2" in str(failure)
        assert "rank 1" in str(failure)
        assert left, "the stuck collective was not aborted"
        assert sticky


def test_a_rank_whose_forward_raised_is_named_with_its_message(alive: dict[str, list[Any]]) -> None:
    for failure in alive["breaks_off"][::2]:
        assert failure.rank == 1
        assert "ValueError in forward of layers.3: a bad batch" in str(failure)


def test_when_all_ranks_break_off_at_the_same_place_training_goes_on(
    alive: dict[str, list[Any]],
) -> None:
    assert alive["all_break_off"] == [None, None, None]


def test_ranks_that_break_off_at_different_places_end(alive: dict[str, list[Any]]) -> None:
    for failure in alive["break_off_at_different_places"]:
        assert isinstance(failure, RankFailed)
    assert "ValueError in forward: early" in str(alive["break_off_at_different_places"][0])


def test_a_rank_whose_own_work_fails_raises_it_and_the_others_name_it(
    alive: dict[str, list[Any]],
) -> None:
    for failure in alive["reads_badly"]:
        assert failure.rank == 1
        assert "rank 1 failed: AioError: no such luck" in str(failure)


def test_an_error_of_the_call_itself_is_the_ranks_own(alive: dict[str, list[Any]]) -> None:
    for failure in alive["wrong_call"]:
        assert failure.rank == 1
        assert "rank 1 failed: RuntimeError: sizes differ" in str(failure)


def test_a_rank_that_closed_in_order_is_named_by_who_still_waits(
    alive: dict[str, list[Any]],
) -> None:
    for failure, done in alive["closes"][::2]:
        assert failure.rank == 1
        assert "rank 1 has closed its engine" in str(failure)
        assert done


def test_an_engine_that_fails_leaves_another_alone(alive: dict[str, list[Any]]) -> None:
    for failure, other in alive["two_engines"]:
        assert "MemoryError: no room" in str(failure)
        assert other is None


def test_no_thread_and_no_descriptor_is_left_after_close(alive: dict[str, list[Any]]) -> None:
    assert alive["leaves_nothing"] == [[{}, {}, {}]] * 3


def test_an_interrupt_ends_a_wait_and_the_wait_can_be_taken_up(alive: dict[str, list[Any]]) -> None:
    assert alive["interrupted"] == [True, True, True]


# Ranks that end.


def second_dies(ranks: Ranks) -> Any:
    ranks.until_failure(3)
    if ranks.rank == 1:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()
    return ranks.until_failure()


def first_dies(ranks: Ranks) -> Any:
    ranks.until_failure(3)
    if ranks.rank == 0:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()
    return ranks.until_failure()


def assert_survivors_name(who: int, ends: list[End]) -> None:
    for rank in {0, 1, 2} - {who}:
        assert ends[rank].exit_code == 0, ends[rank]
        assert ends[rank].failure().rank == who, ends[rank]
        assert f"rank {who}" in str(ends[rank].result)


@pytest.mark.parametrize(("job", "who"), [(second_dies, 1), (first_dies, 0)])
def test_survivors_of_a_kill_amid_collectives_end_and_name_the_rank(
    tmp_path: Path, job: Any, who: int
) -> None:
    """Rank 0 has the store, which ends with it."""
    ends = watched.run(job, tmp_path, 3)
    assert ends[who].exit_code == -signal.SIGKILL
    assert_survivors_name(who, ends)


def ready_then_sums(ranks: Ranks) -> Any:
    """Rank 2 has read the record of rank 1 before that of rank 0."""
    ranks.until_failure(3)
    ranks.watchdog.wait_for_all_ranks()
    if ranks.rank == 2:
        processes = ranks.watchdog._processes
        ranks.watchdog._processes = {rank: processes[rank] for rank in (1, 0)}
    ranks.mark(f"ready{ranks.rank}")
    return ranks.until_failure()


def test_a_rank_that_ended_after_the_death_of_the_store_is_not_blamed(tmp_path: Path) -> None:
    """Rank 1 cannot publish that it closed: the store ended with rank 0. Rank 2 sees both ends at
    once."""
    with watched.started(ready_then_sums, tmp_path, 3) as processes:
        for rank in range(3):
            watched.await_file(tmp_path / f"ready{rank}")
        os.kill(processes[2].pid, signal.SIGSTOP)
        try:
            os.kill(processes[0].pid, signal.SIGKILL)
            processes[1].join(watched.LIMIT_S)
        finally:
            os.kill(processes[2].pid, signal.SIGCONT)
        ends = watched.ends(processes, tmp_path)
    assert_survivors_name(0, ends)


def test_a_survivor_that_looks_late_names_the_rank_that_died(tmp_path: Path) -> None:
    """Rank 0 has the store, and waits until rank 2 has read the reason for its end."""
    with watched.started(ready_then_sums, tmp_path, 3) as processes:
        for rank in range(3):
            watched.await_file(tmp_path / f"ready{rank}")
        os.kill(processes[2].pid, signal.SIGSTOP)
        try:
            os.kill(processes[1].pid, signal.SIGKILL)
            time.sleep(watch_module._LINGER_S + 0.5)
        finally:
            os.kill(processes[2].pid, signal.SIGCONT)
        ends = watched.ends(processes, tmp_path)
    assert_survivors_name(1, ends)


def child_of_the_dead(ranks: Ranks) -> Any:
    """Rank 1 dies, but its child keeps the connections open, so they show nothing."""
    ranks.sum().wait()
    if ranks.rank == 1:
        child = os.fork()
        if child == 0:
            watched.await_file(ranks.place / "told0")
            watched.await_file(ranks.place / "told2")
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    failure = ranks.until_failure()
    ranks.mark(f"told{ranks.rank}")
    return failure


def test_a_death_is_seen_though_a_child_holds_the_connections(tmp_path: Path) -> None:
    assert_survivors_name(1, watched.run(child_of_the_dead, tmp_path, 3))


def stopped(ranks: Ranks) -> Any:
    """Rank 1 has itself stopped for a while."""
    ranks.sum().wait()
    if ranks.rank == 1:
        ranks.mark("stop me")
        ranks.await_mark("continued")
    for _ in range(3):
        ranks.sum().wait()
    return ranks.watchdog.failure


def hosts_of_their_own() -> None:
    """Every rank believes that it is alone on its host: only beats show deaths."""
    this = Host.this()
    Host.this = classmethod(
        lambda cls: Host(f"host{os.getpid()}", f"boot{os.getpid()}", this.network, this.pids)
    )  # type: ignore[method-assign]


def far(ranks: Ranks, job: Callable[[Ranks], Any]) -> Any:
    """Run the job in an engine whose ranks have separate hosts."""
    hosts_of_their_own()
    with watched.engine(ranks.rank, ranks.world, ranks.place, "far", silence_s=6.0) as engine:
        engine.watchdog.wait_for_all_ranks()
        found = job(engine)
        assert len(engine.watchdog._remote) == ranks.world - 1
    return found


def far_stopped(ranks: Ranks) -> Any:
    return far(ranks, stopped)


@pytest.mark.parametrize("job", [stopped, far_stopped])
def test_a_rank_that_is_stopped_for_less_than_the_limit_has_not_failed(
    tmp_path: Path, job: Any
) -> None:
    with watched.started(job, tmp_path, 2) as processes:
        watched.await_file(tmp_path / "stop me")
        os.kill(processes[1].pid, signal.SIGSTOP)
        time.sleep(4 * watch_module.INTERVAL_S)
        os.kill(processes[1].pid, signal.SIGCONT)
        (tmp_path / "continued").touch()
        ends = watched.ends(processes, tmp_path)
    assert [(end.exit_code, end.result) for end in ends] == [(0, None), (0, None)], ends


def silent(ranks: Ranks) -> Any:
    """A rank stops in mid-step for good: only missing beats show it, not its connections."""
    ranks.sum().wait()
    who = int((ranks.place / "who").read_text())
    if ranks.rank == who:
        os.kill(os.getpid(), signal.SIGSTOP)
    return ranks.until_failure()


def far_silent(ranks: Ranks) -> Any:
    return far(ranks, silent)


@pytest.mark.ranks
@pytest.mark.parametrize("who", [0, 1])
def test_a_silent_rank_on_another_host_is_named(tmp_path: Path, who: int) -> None:
    (tmp_path / "who").write_text(str(who))
    with watched.started(far_silent, tmp_path, 2) as processes:
        processes[1 - who].join(watched.LIMIT_S)
        processes[who].kill()
        ends = watched.ends(processes, tmp_path)
    # The outer engine, which watches by pid, closes normally.
    assert ends[1 - who].failure().rank == who, ends
    assert ("no sign of life for 6 s" if who else "has not answered for 6 s") in str(
        ends[1 - who].result
    )


SCRIPT = """
import sys
import torch, torch.distributed as dist
from infinity._src.distributed.process_groups import abort_groups, make_group
from infinity._src.distributed.comm_streams import CommStream
from infinity._src.distributed.topology import Topology, default_store
from infinity._src.distributed.watchdog import Watchdog
rank, init, how = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", init_method=init, rank=rank, world_size=2)
watch = Watchdog(Topology.find(timeout_s=60.0), default_store(), timeout_s=60.0, name="engine")
group = make_group(timeout_s=60.0) if how == "broken off" else dist.new_group()
watch.on_failure.append(lambda: abort_groups([group]))
stream = CommStream("stream", group=group, watchdog=watch)
ones = torch.ones(1000)
stream.submit("sum", lambda group: dist.all_reduce(ones, group=group)).wait()
if rank == 1:
    sys.exit(0)
stream.submit("sum", lambda group: dist.all_reduce(ones, group=group)).wait()
"""


@pytest.mark.parametrize(
    "how", ["broken off", pytest.param("not broken off", marks=pytest.mark.slow)]
)
def test_interpreters_end_without_close_and_say_so(tmp_path: Path, how: str) -> None:
    """Rank 1 exits without close(); rank 0 ends with RankFailed and an open communication stream.
    """
    command = [sys.executable, "-c", SCRIPT]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [*command, str(rank), f"file://{tmp_path}/rendezvous", how],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        errors = [process.communicate(timeout=watched.LIMIT_S)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert processes[1].returncode == 0, errors[1]
    assert processes[0].returncode == 1, errors[0]
    assert "RankFailed: " in errors[0]
    assert "rank 1" in errors[0].splitlines()[-1], errors[0]
    assert "has ended" in errors[0]
