"""Nothing costs more per chunk when there are more of them: a model of hundreds of billions of
parameters has a million."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import infinity as inf
from infinity._src.checkpoint import reader
from tests import forks, slopes
from tests.marks import mostly_slow

SLOPE_MAX = 1.2
"""Eight times the chunks are eight times the memory: some of it is in no cache any more."""
BUSY_MAX = 4.0
"""Beside other tests, and on a shared machine, where CPU time varies by a factor of three. What
costs the square is eight times as dear."""
FLATS = {
    "more and larger flats": lambda chunks: int(chunks**0.5),
    "one flat": lambda chunks: 1,
    "flats of 20 chunks": lambda chunks: chunks // 20,
}


@pytest.mark.parametrize("unit", mostly_slow(["us", "bytes"], "us"))
@pytest.mark.parametrize("shape", mostly_slow(FLATS, "one flat"))
@pytest.mark.parametrize("chunks", mostly_slow([100, 1000], 100))
def test_each_phase_is_linear_in_chunks(chunks: int, shape: str, unit: str, tmp_path: Path) -> None:
    """Costs that arise once per engine count for it: they make the few chunks dear."""
    few, many = (
        json.loads(
            forks.in_a_fork(
                "tests.slopes",
                tmp_path,
                json.dumps({"chunks": count, "flats": FLATS[shape](count), "units": [unit]}),
            )
        )[unit]
        for count in (chunks, 8 * chunks)
    )
    assert few.keys() == many.keys()
    most = BUSY_MAX if chunks == 100 and unit == "us" else SLOPE_MAX
    steep = {
        phase: f"{few[phase]:.1f} {unit} per chunk of {chunks}, {many[phase]:.1f} of {8 * chunks}"
        for phase in few
        if many[phase] > most * few[phase]
    }
    assert not steep


@pytest.mark.parametrize("kind", ["save", "durable run"])
def test_rows_that_were_forgotten_and_are_known_again_have_the_same_bits(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Readers and writers know a few rows at a time, here next to none, in files on two drives."""
    monkeypatch.setattr(reader, "BLOCK_ROWS", 3)
    monkeypatch.setattr(reader, "BLOCKS_MAX", 1)
    places = [tmp_path / name for name in ("a", "b")]
    for place in places:
        place.mkdir()

    def opened(**chosen: Any) -> tuple[Any, Any]:
        torch.manual_seed(0)
        model = inf.offload(
            slopes.Rows(120, 3),
            inf.Policy(params="nvme", optim="nvme", ram="min", nvme=places, **chosen),
        )
        return model, inf.AdamW(model.parameters(), lr=1e-2)

    def states(model: Any) -> list[torch.Tensor]:
        handle = inf.handle(model)
        return [
            handle.optimizer_state(param)[name]
            for param in model.parameters()
            for name in ("master", "exp_avg", "exp_avg_sq")
        ]

    durable = {"durable": True} if kind == "durable run" else {}
    with slopes.tiny_chunks():
        model, optimizer = opened(**durable)
        for step in range(3):
            torch.manual_seed(step)
            model(torch.randn(2, slopes.CHUNK_NUMEL).bfloat16()).backward()
            optimizer.step()
            optimizer.zero_grad()
        inf.handle(model).flush()
        expected = states(model)
        where = places[0] if durable else tmp_path / "saved"
        if not durable:
            inf.save(model, optimizer, where).wait()
        inf.handle(model).close()
        model, optimizer = opened(**durable)
        inf.restore(model, optimizer, where)
        found = states(model)
        inf.handle(model).close()
    assert all(torch.equal(mine, other) for mine, other in zip(found, expected, strict=True))
    rows = [tuple(row[:8].tolist()) for value in expected for row in value]
    assert len(set(rows)) > 0.9 * len(rows), "else one chunk could be taken for another"
