"""Fork, exit, signals, kill: nothing hangs, nothing crashes, nothing is left behind."""

from __future__ import annotations

import os
import signal
import time

import pytest

from infinity import aio
from tests.forks import Child
from tests.unit.aio.child import preamble, run_python
from tests.unit.aio.rig import random_chunk, same


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_gets_errors_and_the_parent_goes_on(backend, tmp_path):
    done = run_python(
        preamble(backend, tmp_path, "seam=aio.Seam(delay_us_max=20000)")
        + """
ticket = rig.store(values)
gate = rig.executor.gate()
child = os.fork()
if child == 0:
    code = 0
    waits = (ticket.wait, rig.executor.gate, rig.executor.wait_all)
    for call in (*waits, lambda: gate.open([]), lambda: rig.fetch([0])):
        try:
            call()
            code = 1
        except AioClosedError:
            pass
    rig.executor.close()
    del ticket, gate
    import gc; gc.collect()
    sys.exit(code)
assert os.waitpid(child, 0)[1] == 0
ticket.wait(20)
assert all(same(rig.read(i), values[i]) for i in range(6))
rig.close()
"""
    )
    assert done.returncode == 0, done.stderr


def test_the_interpreter_exits_with_requests_in_flight_that_a_thread_waits_for(backend, tmp_path):
    done = run_python(
        preamble(backend, tmp_path, "seam=aio.Seam(read_bytes_per_s=1e5, write_bytes_per_s=1e5)")
        + """
ticket = rig.store(values)
gated = rig.fetch([0], gate=rig.executor.gate())
def wait():
    try:
        ticket.wait()
    except AioClosedError:
        pass
threading.Thread(target=wait, daemon=True).start()
time.sleep(0.1)
print("end")
""",
        fresh=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["end"]
    assert done.stderr == ""


def test_an_executor_that_is_dropped_ends_its_threads(backend, tmp_path):
    done = run_python(
        preamble(backend, tmp_path, "seam=aio.Seam(delay_us_max=20000)")
        + """
import gc
count = lambda: len(os.listdir("/proc/self/task"))
before = count()
rig.store(values)
rig.executor = None
gc.collect()
assert before - count() >= 3, (before, count())
"""
    )
    assert done.returncode == 0, done.stderr


def test_ctrl_c_ends_a_wait(backend, tmp_path):
    done = run_python(
        preamble(backend, tmp_path, "seam=aio.Seam(write_bytes_per_s=1e5)")
        + """
ticket = rig.store(values)
threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    ticket.wait()
except KeyboardInterrupt:
    print("interrupted", not ticket.done)
rig.executor.close(wait=False)
"""
    )
    assert done.stdout.split() == ["interrupted", "True"], done.stderr


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_may_open_an_executor_of_its_own(backend, tmp_path):
    done = run_python(
        preamble(backend, tmp_path, "seam=aio.Seam(delay_us_max=20000)")
        + f"""
tickets = [rig.store({{i: values[i]}}) for i in range(6)]
child = os.fork()
mine = rig if child else Rig(Path({str(tmp_path)!r}), {backend!r})
if child == 0:
    values = {{i: random_chunk(rng) for i in range(6)}}
    mine.store(values).wait(20)
assert all(same(mine.read(i), values[i]) for i in range(6))
mine.close()
if child == 0:
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
assert all(ticket.done for ticket in tickets)
"""
    )
    assert done.returncode == 0, done.stderr


def test_a_process_that_is_stopped_goes_on_where_it_was(backend, tmp_path):
    code = (
        preamble(backend, tmp_path, "seam=aio.Seam(read_bytes_per_s=1e6, write_bytes_per_s=1e6)")
        + """
tickets = [rig.store({i: values[i]}) for i in range(6)]
print("begun", flush=True)
for ticket in tickets:
    ticket.wait(30)
assert all(same(rig.read(i), values[i]) for i in range(6))
assert rig.executor.fault() is None
rig.close()
print("end", flush=True)
"""
    )
    with Child(code) as child:
        assert child.says() == "begun"
        for _ in range(5):
            os.kill(child.pid, signal.SIGSTOP)
            time.sleep(0.03)
            os.kill(child.pid, signal.SIGCONT)
            time.sleep(0.03)
        assert child.says() == "end"
        assert child.exit_code() == 0


@pytest.mark.parametrize(
    "call", ["rig.executor.wait_all()", "rig.executor.close()", "ticket.wait_filled()"]
)
def test_ctrl_c_ends_every_call_that_waits(backend, tmp_path, call):
    done = run_python(
        preamble(
            backend, tmp_path, "chunk_count=20, pools=(1, 1), seam=aio.Seam(write_bytes_per_s=1e5)"
        )
        + f"""
ticket = rig.store({{i: random_chunk(rng) for i in range(20)}})
threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    {call}
except KeyboardInterrupt:
    print("interrupted", not ticket.done)
rig.executor.close(wait=False)
assert ticket.done
"""
    )
    assert done.stdout.split() == ["interrupted", "True"], done.stderr


def test_a_killed_process_in_the_same_directory_damages_nothing(backend, make_rig, tmp_path, rng):
    rig = make_rig(seam=aio.Seam(delay_us_max=2000, seed=1))
    values = {i: random_chunk(rng) for i in range(6)}
    rig.store(values).wait()
    code = (
        preamble(backend, tmp_path, "seam=aio.Seam(write_bytes_per_s=1e5)")
        + "rig.store(values); print('ready', flush=True); time.sleep(60)"
    )
    with Child(code) as child:
        assert child.says() == "ready"
        fetches = [rig.fetch([i]) for i in range(6)]
        child.kill()  # in the middle of a write, and of our reads
    for i, (ticket, targets) in enumerate(fetches):
        ticket.wait(20)
        assert same(targets[0], values[i])
    assert list(tmp_path.iterdir()) == []
    rig.store({i: values[5 - i] for i in range(6)}).wait(20)
    assert all(same(rig.read(i), values[5 - i]) for i in range(6))


def test_kill_leaves_no_file_and_frees_the_space(backend, tmp_path):
    code = (
        preamble(backend, tmp_path)
        + "rig.store(values).wait(); print('ready', flush=True); time.sleep(60)"
    )
    with Child(code) as child:
        assert child.says() == "ready"
        assert list(tmp_path.iterdir()) == []
        child.kill()
    assert list(tmp_path.iterdir()) == []
