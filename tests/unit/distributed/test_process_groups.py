"""Process groups that can be broken off: those of gloo, by their epoll set."""

from __future__ import annotations

import select
from collections.abc import Iterator

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
