"""The `unit.common` that DeepSpeed's tests import, and the plugin of pytest that runs them.

Each test runs in fresh forks of this process, one for each requested rank, over gloo; a test
without ranks runs in one fork. This process imports and never computes, so forks are safe. The
plugin and the names of `unit.common` follow DeepSpeed's documentation of these names:
`DistributedTest` (`world_size`, by number, by mark or by fixture; `class_tmpdir`),
`DistributedFixture`, `preferred_dtype`, `enable_determinism`, `allclose_on_all_ranks` and so on.
"""

from __future__ import annotations

import contextlib
import inspect
import multiprocessing
import multiprocessing.connection
import os
import random
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import harness
import numpy as np
import pytest
import torch

GRACE_S = 5.0
"""Time that the other ranks have to end after one has failed."""
OUTPUT_TAIL = 6000


# -- ranks -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class End:
    """A rank's outcome: passed, skipped or failed. detail: the reason in a line; trace: in full."""

    outcome: str
    detail: str = ""
    trace: str = ""


def _rank(body: Callable[[], None], log: Path, pipe: multiprocessing.connection.Connection) -> None:
    """Run in a fork, in a new process group, so that its subprocesses end with it."""
    os.setsid()
    harness.die_with_parent()
    number = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(number, 1)
    os.dup2(number, 2)
    sys.stdout, sys.stderr = (os.fdopen(n, "w", buffering=1) for n in (1, 2))
    try:
        body()
        end = End("passed")
    except pytest.skip.Exception as skipped:
        end = End("skipped", str(skipped.msg))
    except BaseException as error:  # noqa: BLE001 - a test may raise anything; it is reported
        lines = (str(error) or "no message").strip().splitlines()
        end = End("failed", f"{type(error).__name__}: {lines[0]}", traceback.format_exc())
    sys.stdout.flush()
    pipe.send(end)
    # The others may still need this one. The parent ends all of them.
    signal.pause()


def run_ranks(bodies: list[Callable[[], None]], scratch: Path, limit_s: float) -> End:
    """Run each body in a separate fork. Blocks until all forks have ended. Kills the forks that
    still run after limit_s, or GRACE_S after another one failed or skipped. Returns the end of the
    first fork that failed or skipped, or a pass."""
    fork = multiprocessing.get_context("fork")
    waiting: dict[Any, tuple[int, Any]] = {}
    logs = [scratch / f"rank{number}.log" for number in range(len(bodies))]
    for number, body in enumerate(bodies):
        ours, theirs = fork.Pipe(duplex=False)
        process = fork.Process(target=_rank, args=(body, logs[number], theirs))
        process.start()
        theirs.close()
        waiting[ours] = (number, process)
    processes = [process for _, process in waiting.values()]
    worst = End("passed")
    deadline = time.monotonic() + limit_s
    while waiting:
        ready = multiprocessing.connection.wait(
            list(waiting), max(0.0, deadline - time.monotonic())
        )
        if not ready:
            if worst.outcome == "passed":
                worst = End("failed", f"TimeoutError: longer than {limit_s:.0f} s")
            break
        for pipe in ready:
            number, process = waiting.pop(pipe)
            end = _end_of(pipe, process)
            if end.outcome != "passed" and worst.outcome == "passed":
                worst = End(end.outcome, end.detail, end.trace + _tail(logs[number]))
                deadline = min(deadline, time.monotonic() + GRACE_S)
    for process in processes:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.join()
    return worst


def _end_of(pipe: Any, process: Any) -> End:
    try:
        end: End = pipe.recv()
    except EOFError:
        process.join()
        return End("failed", f"ChildProcessError: a rank died with {process.exitcode}")
    return end


def _tail(log: Path) -> str:
    text = log.read_text(errors="replace") if log.exists() else ""
    return f"\n-- output --\n{text[-OUTPUT_TAIL:]}" if text.strip() else ""


def free_port() -> int:
    """Return a TCP port of the loopback interface that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class DistributedExec:
    """Demands of a test or a fixture: ranks, and whether they are connected before it runs."""

    world_size: Any = 2
    backend = "gloo"
    init_distributed = True
    set_dist_env = True
    requires_cuda_env = True
    reuse_dist_env = False
    non_daemonic_procs = False

    def bodies(self, ranks: int, call: Callable[[], None], meeting: Path) -> list[Any]:
        """Return what each rank runs."""
        port = free_port()
        return [lambda rank=rank: self._run(rank, ranks, port, meeting, call)
                for rank in range(ranks)]  # fmt: skip

    def _run(
        self, rank: int, ranks: int, port: int, meeting: Path, call: Callable[[], None]
    ) -> None:
        import deepspeed
        import deepspeed.comm

        if self.set_dist_env:
            os.environ.update(
                MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank),
                LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_SIZE=str(ranks),
                LOCAL_WORLD_SIZE=str(ranks),
            )  # fmt: skip
        if self.init_distributed:
            deepspeed.init_distributed(
                dist_backend=self.backend,
                init_method=f"file://{meeting}",
                rank=rank,
                world_size=ranks,
            )
            deepspeed.comm.barrier()
        call()


class DistributedTest(DistributedExec):
    """A test that runs on `world_size` ranks."""

    is_dist_test = True

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def class_tmpdir(cls, tmpdir_factory: Any) -> Any:
        """A folder that the tests of a class, and its fixtures, share."""
        return tmpdir_factory.mktemp(cls.__name__)


class DistributedFixture(DistributedExec):
    """A fixture whose `run` runs on `world_size` ranks. Has the name of its class."""

    def run(self, **fixtures: Any) -> None:
        """Prepare, in each rank."""
        raise NotImplementedError


# -- the plugin ------------------------------------------------------------------------------------


class Ranks:
    """Plugin of pytest that runs tests in forks. limit_s: for one test; most: ranks at a time."""

    def __init__(self, limit_s: float, most: int) -> None:
        self._limit_s = limit_s
        self._most = most

    def pytest_pycollect_makeitem(self, collector: Any, name: str, obj: Any) -> None:
        """Make classes of `DistributedFixture` fixtures of their module."""
        fixture = inspect.isclass(obj) and issubclass(obj, DistributedFixture)
        if fixture and isinstance(obj.world_size, int) and obj is not DistributedFixture:
            holder = type("Holder", (), {name: staticmethod(self._fixture(name, obj))})
            collector.session._fixturemanager.parsefactories(holder, collector.nodeid)

    def _fixture(self, name: str, kind: type[DistributedFixture]) -> Any:
        wanted = [p for p in inspect.signature(kind.run).parameters if p != "self"]

        @pytest.fixture(name=name)
        def prepare(request: pytest.FixtureRequest) -> None:
            given = {p: request.getfixturevalue(p) for p in wanted}
            exec_ = kind()
            self._run(request.node, exec_, exec_.world_size, lambda: exec_.run(**given))

        return prepare

    @pytest.hookimpl(tryfirst=True)
    def pytest_pyfunc_call(self, pyfuncitem: Any) -> bool:
        """Run a test in forks."""
        names = pyfuncitem._fixtureinfo.argnames
        given = {name: pyfuncitem.funcargs[name] for name in names}
        test = pyfuncitem.obj

        def call() -> None:
            test(**given)

        owner = pyfuncitem.instance
        if not getattr(owner, "is_dist_test", False):
            self._conclude(run_ranks([call], self._scratch(pyfuncitem), self._limit_s))
            return True
        mark = pyfuncitem.get_closest_marker("world_size")
        sizes = mark.args[0] if mark is not None else given.get("world_size", owner.world_size)
        for size in (sizes,) if isinstance(sizes, int) else sizes:
            self._run(pyfuncitem, owner, size, call)
        return True

    def _run(self, item: Any, exec_: DistributedExec, size: int, call: Callable[[], None]) -> None:
        if size > self._most:
            pytest.skip(f"needs {size} ranks, and this run starts {self._most} at most")
        scratch = self._scratch(item)
        bodies = exec_.bodies(size, call, scratch / f"meeting{time.monotonic_ns()}")
        self._conclude(run_ranks(bodies, scratch, self._limit_s))

    @staticmethod
    def _scratch(item: Any) -> Path:
        return Path(item.config._tmp_path_factory.mktemp("ranks"))

    @staticmethod
    def _conclude(end: End) -> None:
        if end.outcome == "skipped":
            pytest.skip(end.detail)
        if end.outcome == "failed":
            raise RankFailed(end)


class RankFailed(Exception):
    """A rank of a test failed; its own words are the message."""

    def __init__(self, end: End) -> None:
        super().__init__(end.detail)
        self.end = end


# -- the other names of unit.common ----------------------------------------------------------------


def _accelerator() -> Any:
    from deepspeed.accelerator import get_accelerator

    return get_accelerator()


def get_master_port(*_args: Any, **_kwargs: Any) -> str:
    """Return a free port, as text."""
    return str(free_port())


def is_rocm_pytorch() -> bool:
    """Return whether torch is built for AMD's GPUs."""
    return torch.version.hip is not None


def preferred_dtype() -> torch.dtype:
    """Return the first of bf16, fp16 and fp32 that the device has."""
    accelerator = _accelerator()
    if accelerator.is_bf16_supported():
        return torch.bfloat16
    return torch.float16 if accelerator.is_fp16_supported() else torch.float32


@contextlib.contextmanager
def _deterministic(seed: int) -> Iterator[None]:
    mine = seed + int(os.environ.get("LOCAL_RANK", "0"))
    # Tests draw from the global generators.
    kept = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    before = torch.are_deterministic_algorithms_enabled()
    random.seed(mine)
    np.random.seed(mine)  # noqa: NPY002
    torch.manual_seed(mine)
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        random.setstate(kept[0])
        np.random.set_state(kept[1])  # noqa: NPY002
        torch.set_rng_state(kept[2])


def enable_determinism(seed: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Have a function run with seeded generators and deterministic algorithms."""
    return _deterministic(seed)


def reduce_boolean_flags(flag: bool, op: Callable[[list[bool]], bool] = all) -> bool:
    """Return op of the flags of all ranks, on all ranks. A collective."""
    import torch.distributed as dist

    if not dist.is_initialized():
        return flag
    flags: list[bool] = [False] * dist.get_world_size()
    dist.all_gather_object(flags, bool(flag))
    return op(flags)


def allclose_on_all_ranks(
    actual: Any, expected: Any, assert_message: str | None = None, **kwargs: Any
) -> None:
    """Assert closeness with torch's tolerances; all ranks fail if one does. A collective."""
    told = ""
    try:
        torch.testing.assert_close(actual, expected, **kwargs)
    except AssertionError as error:
        told = f" {error} {actual=} {expected=}"
    if not reduce_boolean_flags(not told):
        raise AssertionError((assert_message or "tensors differ on some rank") + told)


class _OnAnyDevice(torch.nn.parallel.DistributedDataParallel):
    """DDP without devices on a CPU, where it refuses them; the tests always pass devices."""

    def __init__(self, module: Any, *args: Any, **kwargs: Any) -> None:
        if all(p.device.type == "cpu" for p in module.parameters()):
            kwargs |= {"device_ids": None, "output_device": None}
        super().__init__(module, *args, **kwargs)


class _ScalerOfTheDevice(torch.amp.GradScaler):
    """Torch's loss scaler for the device in use: its default, "cuda", scales nothing on a CPU."""

    def __init__(self, device: str = "", *args: Any, **kwargs: Any) -> None:
        super().__init__(device or _accelerator().device_name(), *args, **kwargs)


def names_for(unit: Path) -> Mapping[str, Any]:
    """Return what `unit.common` has. unit: its folder in the checkout, where test data lies."""
    torch.nn.parallel.DistributedDataParallel = _OnAnyDevice  # type: ignore[misc]
    torch.amp.GradScaler = _ScalerOfTheDevice  # type: ignore[misc]
    own = (
        DistributedExec, DistributedFixture, DistributedTest, get_master_port, is_rocm_pytorch,
        preferred_dtype, enable_determinism, reduce_boolean_flags, allclose_on_all_ranks,
    )  # fmt: skip
    found: dict[str, Any] = {item.__name__: item for item in own}
    found["get_test_path"] = lambda name: str(unit / name)
    return found
