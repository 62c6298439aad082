"""Process groups that can be aborted: those of gloo, by their epoll set."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch.distributed as dist

from infinity._src.distributed import process_groups as groups


@pytest.fixture
def epolls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[select.epoll]]:
    """Yield the epoll sets that making groups has opened."""
    made: list[select.epoll] = []

    def new_group(*_: object, **__: object) -> dist.ProcessGroup:
        made.append(select.epoll())
        return dist.ProcessGroup(0, 1)

    monkeypatch.setattr(groups.dist, "new_group", new_group)
    yield made
    for epoll in made:
        epoll.close()


def test_only_a_group_of_gloo_is_known_by_its_epoll_set(epolls: list[select.epoll]) -> None:
    gloo, nccl = groups.make_group(timeout_s=1.0), groups.make_group(timeout_s=1.0, backend="nccl")
    assert groups._EPOLLS.pop(gloo) == epolls[0].fileno()
    assert nccl not in groups._EPOLLS


class Nccl:
    """A group of NCCL. on_abort: what its abort does."""

    def __init__(self, on_abort: Callable[[], object]) -> None:
        self.abort = on_abort


@pytest.fixture
def aborted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The order of aborts. A group that is a text is one of gloo."""
    found: list[str] = []
    monkeypatch.setattr(groups, "_EPOLLS", {"gloo": 7})
    monkeypatch.setattr(groups, "_watched", lambda epoll: [epoll])
    monkeypatch.setattr(groups, "_shut_down", lambda fd: found.append(f"gloo {fd}"))
    monkeypatch.setattr(groups.dist, "get_backend", lambda group: "nccl")
    return found


def test_gloo_is_aborted_first_and_a_group_that_fails_keeps_no_other_from_it(
    aborted: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    def fails() -> None:
        aborted.append("fails")
        raise RuntimeError("NCCL error in abort")

    made: list[Any] = [Nccl(fails), "gloo", Nccl(lambda: aborted.append("nccl"))]
    assert not groups.abort_groups(made)
    assert aborted[0] == "gloo 7"
    assert sorted(aborted[1:]) == ["fails", "nccl"]
    assert "NCCL error in abort" in caplog.text


def test_communicators_of_nccl_are_aborted_together(aborted: list[str]) -> None:
    """Each abort waits for the other to have begun, as the kernels of two communicators may."""
    both = threading.Barrier(2)
    made: list[Any] = [Nccl(lambda: both.wait(10)) for _ in range(2)]
    assert groups.abort_groups(made)
    assert not both.broken


def test_an_abort_that_hangs_is_left_alone_after_a_limit(
    aborted: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    go = threading.Event()
    made: list[Any] = [Nccl(go.wait), "gloo", Nccl(lambda: aborted.append("nccl"))]
    assert not groups.abort_groups(made, limit_s=0.2)
    go.set()
    assert aborted == ["gloo 7", "nccl"]
    assert "aborting 1 of 2 communicators of NCCL hangs" in caplog.text


@pytest.mark.parametrize("before", [None, "1"])
def test_torchs_watchdog_does_not_end_the_process_for_groups_of_nccl(
    monkeypatch: pytest.MonkeyPatch, before: str | None
) -> None:
    name, seen = "TORCH_NCCL_ASYNC_ERROR_HANDLING", []
    if before is None:
        monkeypatch.delenv(name, raising=False)
    else:
        monkeypatch.setenv(name, before)

    def new_group(*_: object, backend: str, **__: object) -> dist.ProcessGroup:
        seen.append((backend, os.environ.get(name)))
        if backend == "nccl" and len(seen) > 2:
            raise RuntimeError("no GPU")
        return dist.ProcessGroup(0, 1)

    monkeypatch.setattr(groups.dist, "new_group", new_group)
    for backend in ("gloo", "nccl"):
        groups.make_group(timeout_s=1.0, backend=backend)
    with pytest.raises(RuntimeError, match="no GPU"):
        groups.make_group(timeout_s=1.0, backend="nccl")
    assert seen == [("gloo", before), ("nccl", "0"), ("nccl", "0")]
    assert os.environ.get(name) == before
