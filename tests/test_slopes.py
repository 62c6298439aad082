"""No cost per chunk grows with the number of chunks: a model of hundreds of billions of parameters
has a million."""

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

SLOPE_MAX = {"bytes": 1.1, "calls": 1.1, "us": 1.2}
"""Eight times the chunks are eight times the memory, and some of it is in no cache any more: CPU
time per chunk grows by that alone."""
BUSY_MAX = 4.0
"""Bound of CPU time next to other tests and on a shared machine, where it varies by a factor of
three. A quadratic cost would be eight times as high."""
TRIES = 3
"""Maximum measurements of CPU time: the least of each phase counts, and a cost that really grows
does so in all of them."""
SHAPES = {
    "more and larger flats": (lambda chunks: int(chunks**0.5), 1),
    "one flat": (lambda chunks: 1, 1),
    "flats of 20 chunks": (lambda chunks: chunks // 20, 1),
    "one flat on 8 drives": (lambda chunks: 1, 8),
}
"""Flats of so many chunks, and drives."""


@pytest.mark.parametrize("unit", mostly_slow(["us", "bytes", "calls"], "calls"))
@pytest.mark.parametrize("shape", mostly_slow(SHAPES, "one flat"))
@pytest.mark.parametrize("chunks", mostly_slow([50, 1000], 50))
def test_each_phase_is_linear_in_chunks(chunks: int, shape: str, unit: str, tmp_path: Path) -> None:
    """Bytes, and calls from Python, may grow by a tenth at most: no other process disturbs them.
    CPU time, which includes loops in C, cannot be held to that on a shared machine. Costs that
    arise once per engine raise the figures of the few chunks."""
    flats, drives = SHAPES[shape]
    counts = (chunks, 8 * chunks)
    most = BUSY_MAX if chunks == 50 and unit == "us" else SLOPE_MAX[unit]
    least: dict[int, dict[str, float]] = {count: {} for count in counts}
    for _ in range(TRIES if unit == "us" else 1):
        for count in counts:
            spec = {"chunks": count, "flats": flats(count), "drives": drives, "units": [unit]}
            ran = forks.in_a_fork("tests.slopes", tmp_path, json.dumps(spec))
            for phase, cost in json.loads(ran)[unit].items():
                least[count][phase] = min(cost, least[count].get(phase, cost))
        few, many = least.values()
        assert few.keys() == many.keys()
        steep = {
            phase: f"{few[phase]:.1f} {unit} per chunk of {chunks}, {many[phase]:.1f} of "
            f"{8 * chunks}"
            for phase in few
            if many[phase] > most * few[phase]
        }
        if not steep:
            break
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
