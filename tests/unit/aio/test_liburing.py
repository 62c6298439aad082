"""io_uring that is old, refused, short of memory or broken: the right data another way, or a typed
error, and the reason said.

A compiled library stands between the executor and the real liburing (odd_liburing.c) and does what
old kernels and full machines do. The first library that a process loads stays, so each case has its
own process.
"""

from __future__ import annotations

import errno
import subprocess
from pathlib import Path

import pytest

from native.build_native import compiler_command
from tests.unit.aio.child import run_python
from tests.unit.aio.rig import BACKENDS

pytestmark = pytest.mark.skipif("io_uring" not in BACKENDS, reason="no io_uring here")

SINGLE_ISSUER, DEFER_TASKRUN = 1 << 12, 1 << 13

SETUP = """
import logging
from pathlib import Path
import numpy as np
from infinity import aio
from infinity._src.cabi import native
from infinity.errors import *
logging.basicConfig(level="WARNING")
ffi, lib = native.load()
why = ffi.new("char[512]")
assert lib.inf_uring_load({library!r}.encode(), why, 512) == 0, ffi.string(why)
from tests.unit.aio.rig import *  # looks for backends: would load the real one
directory = Path({directory!r})
rng = np.random.default_rng(0)
values = {{i: random_chunk(rng) for i in range(6)}}
"""
WORK = """
rig = Rig(directory, "io_uring", {options})
rig.store(values).wait(30)
grads = {{i: rng.standard_normal(NUMEL).astype(np.float32) for i in range(6)}}
rig.update(grads).wait(30)
for i in range(6):
    adamw(records.Format.SPLIT, values[i], grads[i], hyper_record()[0])
assert all(same(rig.read(i), values[i]) for i in range(6))
stats = rig.executor.stats()
print(stats.registered, stats.backend_reason or "-", stats.registered_reason or "-", sep="|")
rig.close()
"""


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("odd") / "liburing.so"
    source = Path(__file__).with_name("odd_liburing.c")
    command = [
        *compiler_command(),
        "-shared",
        "-fPIC",
        "-O1",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-o",
        str(target),
        str(source),
        "-ldl",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return target


@pytest.fixture
def odd(library, tmp_path):
    """Run code in a process whose liburing does what the settings say. Returns its output, and the
    library's log."""
    from liburing import liburing as carrier

    log = tmp_path / "log"
    swap = tmp_path / "swap"
    swap.mkdir()

    def run(
        code: str, *, options: str = "", **settings: int
    ) -> tuple[str, str, list[str]]:
        environment = {f"ODD_{name.upper()}": str(value) for name, value in settings.items()}
        environment |= {"ODD_REAL": carrier.__file__, "ODD_LOG": str(log)}
        text = SETUP.format(library=str(library), directory=str(swap)) + code.format(
            options=options
        )
        done = run_python(text, environment=environment)
        assert done.returncode == 0, done.stderr
        return done.stdout, done.stderr, log.read_text().splitlines() if log.exists() else []

    return run


def test_the_library_between_changes_nothing_by_itself(odd):
    out, _, log = odd(WORK)
    assert out.split("|")[1] == "-"
    assert f"made {SINGLE_ISSUER | DEFER_TASKRUN}" in log


@pytest.mark.parametrize(
    ("refused", "left"),
    [(DEFER_TASKRUN, SINGLE_ISSUER), (SINGLE_ISSUER, 0), (SINGLE_ISSUER | DEFER_TASKRUN, 0)],
)
def test_setup_flags_that_an_older_kernel_refuses_are_left_out(odd, refused, left):
    out, _, log = odd(WORK, refuse_flags=refused)
    assert out.split("|")[1] == "-"
    assert f"made {left}" in log
    assert f"refused {SINGLE_ISSUER | DEFER_TASKRUN}" in log


@pytest.mark.parametrize("code", [errno.ENOMEM, errno.EOPNOTSUPP, errno.EFAULT])
def test_buffers_that_cannot_be_registered_go_unregistered(odd, code):
    out, _, log = odd(WORK, buffers=code)
    registered, reason, why = out.strip().split("|")
    assert (registered, reason) == ("False", "-")
    if f"buffers {code}" not in log:
        pytest.skip("no huge pages: nothing was to be registered")
    assert why != "-"
    if code == errno.ENOMEM:
        assert "memlock" in why.lower() or "memory" in why.lower()


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EMFILE])
def test_files_that_cannot_be_registered_are_used_as_they_are(odd, code):
    out, _, log = odd(WORK, files=code)
    assert out.split("|")[1] == "-"
    assert f"files {code}" in log


def test_a_kernel_without_rings_steps_down_with_the_reason(odd):
    _, said, _ = odd(
        """
files = [aio.SwapFile.create(directory)]
pools = dict(small=aio.PoolSpec(2, 8192), large=aio.PoolSpec(2, 65536))
for _ in range(2):
    executor = aio.open_executor(files, **pools)
    assert executor.backend == "threads", executor.backend
    assert "io_uring" in executor.backend_reason
    assert "Invalid argument" in executor.backend_reason
    assert executor.stats().backend_reason == executor.backend_reason
    executor.close()
try:
    aio.open_executor(files, backend="io_uring", **pools)
except OSError as error:
    assert "was requested" in str(error)
else:
    raise AssertionError("a backend that was asked for by name must not be replaced")
""",
        refuse_all=errno.EINVAL,
    )
    assert said.count("no io_uring backend") == 1  # once, however often one is opened


@pytest.mark.parametrize("code", [errno.EAGAIN, errno.EBUSY, errno.EINTR, errno.ENOMEM])
def test_a_kernel_that_is_busy_is_asked_again(odd, code):
    _, _, log = odd(WORK, busy=code, burst=7)
    assert any(line.startswith("busy") for line in log)


BROKEN = """
rig = Rig(directory, "io_uring", drive_count=2, pools=(4, 4), {options})
tickets = [rig.store({{i: values[i]}}) for i in range(6)]
errors = [outcome(ticket) for ticket in tickets]
assert all(ticket.done for ticket in tickets)
assert all(error is None for error in errors[1::2]), errors  # the other drive knows nothing of it
fetches = [rig.fetch([i]) for i in range(6)]
seen = [outcome(ticket) for ticket, _ in fetches]
for i, error in enumerate(seen):
    assert error is not None or same(fetches[i][1][0], values[i]), i
broken = [error for error in errors + seen if error is not None]
assert broken and all(isinstance(error, DeviceFailedError) for error in broken), broken
assert {{error.errno for error in broken}} == {{{code}}}, broken
grads = {{i: np.ones(NUMEL, np.float32) for i in range(6)}}
after = [outcome(rig.update({{i: grads[i]}})) for i in range(6)]
assert all(isinstance(error, DeviceFailedError) for error in after[0::2]), after
assert all(error is None for error in after[1::2]), after
for i in (1, 3, 5):
    adamw(records.Format.SPLIT, values[i], grads[i], hyper_record()[0])
    assert same(rig.read(i), values[i])
assert isinstance(rig.executor.fault(), DeviceFailedError)
assert rig.executor.stats().drives[0].failed or not any(errors[0::2])
assert outcome(rig.executor.recover()) is not None or rig.executor.stats().kept_chunks == 0
stats = rig.executor.stats()
assert stats.jobs_done == stats.jobs_submitted
rig.executor.wait_all(20)
rig.close()
print("closed")
"""


@pytest.mark.parametrize("code", [errno.EBADF, errno.EIO])
@pytest.mark.parametrize("at", [1, 2, 4])
def test_a_ring_that_breaks_ends_every_job_and_harms_no_other_drive(odd, code, at):
    out, _, log = odd(
        BROKEN.replace("{code}", str(code)), options="", **{"break": code, "break_at": at}
    )
    assert out.split() == ["closed"]
    assert any(line.startswith("broken") for line in log)
    assert sum(line.startswith("exit") for line in log) >= 2


def test_a_ring_that_never_works_is_not_opened(odd):
    """Opening tries the ring first: a ring that breaks there is an error at once, not at the first
    job."""
    _, _, log = odd(
        """
try:
    rig = Rig(directory, "io_uring")
except OSError as error:
    assert error.errno == 9 and "io_uring" in str(error), error
else:
    assert isinstance(outcome(rig.store({{0: values[0]}})), DeviceFailedError)
    rig.close()
""",
        **{"break": errno.EBADF},
    )
    assert "broken 0" in log


def test_when_all_slots_are_lost_with_their_ring_jobs_fail_instead_of_waiting(odd):
    """The kernel may still write into the slots of a broken ring: no other job gets them."""
    out, _, _ = odd(
        """
seam = aio.Seam(read_bytes_per_s=1e5, write_bytes_per_s=1e5)
rig = Rig(directory, "io_uring", pools=(0, 2), seam=seam)
tickets = [rig.store({{i: values[i]}}) for i in range(6)]
assert all(isinstance(outcome(ticket), AioError) for ticket in tickets)
assert all(isinstance(outcome(rig.fetch([i])[0]), AioError) or i < 2 for i in range(6))
rig.executor.wait_all(20)
rig.close()
print("closed")
""",
        **{"break": errno.EBADF, "break_at": 1},
    )
    assert out.split() == ["closed"]


@pytest.mark.parametrize("wait", [True, False])
def test_closing_after_the_ring_broke_does_not_hang_with_work_pending(odd, wait):
    out, _, _ = odd(
        """
import os, time
rig = Rig(directory, "io_uring", seam=aio.Seam(delay_us_max=20000))
tickets = [rig.store({{i: values[i]}}) for i in range(6)]
log = Path(os.environ["ODD_LOG"])
while "broken" not in log.read_text():
    time.sleep(0.0001)
rig.executor.close(wait={wait})
assert all(ticket.done for ticket in tickets)
rig.close()
print("closed")
""".replace("{wait}", str(wait)),
        **{"break": errno.EBADF, "break_at": 3},
    )
    assert out.split() == ["closed"]
