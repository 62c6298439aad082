"""Rounds in which ranks agree on what they share."""

from __future__ import annotations

import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import infinity as inf
from infinity._src.engine.node_resources import NodeResources
from infinity.aio import SwapFile


class Twins:
    """A rendezvous with another rank that says what this one does."""

    def __init__(self) -> None:
        self.rounds = 0

    def all_gather_object(self, value: Mapping[str, Any]) -> list[dict[str, Any]]:
        self.rounds += 1
        return [dict(value), dict(value)]


def test_room_is_measured_when_all_ranks_have_removed_what_was_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    meeting, measured = Twins(), []
    comm: Any = types.SimpleNamespace(rank=0, world=2)
    policy = inf.Policy(params="cpu", optim="cpu")
    resources = NodeResources(comm, policy, meeting)  # type: ignore[arg-type]
    real = SwapFile.free_bytes

    def free_bytes(file: SwapFile) -> int:
        measured.append(meeting.rounds)
        return real(file)

    monkeypatch.setattr(SwapFile, "free_bytes", free_bytes)
    before, file = meeting.rounds, SwapFile.create(tmp_path)
    resources.check_room([file], [4096])
    assert measured == [before + 1]
    assert meeting.rounds == before + 2
    file.close()
