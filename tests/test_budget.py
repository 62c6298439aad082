"""The budget holds: peak RSS is what was planned and what is reported besides, at every budget. What a plan gives up is freed."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import infinity as inf
from infinity.aio.plan import Format
from infinity.errors import BudgetError, DeviceFailedError
from infinity.params.unit import Unit
from tests import harness, models
from tests.test_memory import fill, peak_rss_bytes
from tests.unit.params.test_rest import fetched, make_flat, make_rest

MIB = 1 << 20
LAYERS, HIDDEN = 10, 512
SLACK = 28 * MIB
"""Activations of two dozen tokens, Python's objects, the allocator's leftovers, threads' stacks."""


def make(layers: int, hidden: int) -> Any:
    """A Llama on the meta device that checkpoints its blocks."""
    with torch.device("meta"):
        model = models.llama(layers=layers, hidden=hidden).to(torch.bfloat16)
    model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    return model.train()


def train(directory: str, layers: int, hidden: int, ram: int | str, grads: str) -> dict[str, Any]:
    """Three steps under a budget; a record of what was held."""
    model = make(layers, hidden)
    policy = inf.Policy(params="nvme", optim="nvme", grads=grads, nvme=directory, ram=ram)
    inf.offload(model, policy, load=fill)
    optimizer = inf.AdamW(model.parameters(), lr=1e-4)
    for batch in models.token_batches(3):
        models.loss_of(model, batch).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    handle = inf.handle(model)
    handle.flush()
    stats = handle.stats()
    handle.close()
    return {
        "ram": stats.ram_bytes,
        "least": stats.ram_min_bytes,
        "params": stats.params,
        "grads": stats.grad_bytes,
        "spilled": stats.spilled_bytes,
        "nvme": stats.nvme_bytes,
        "read": stats.bytes_read,
        "device": stats.gathered_bytes_peak + stats.fresh_grad_bytes_peak + stats.heap_spare_bytes,
    }


def measured(directory: Path, ram: int | str, grads: str = "cpu") -> dict[str, Any]:
    """`train` in a process of its own, with its peak and what the interpreter and torch took before."""
    output = harness.in_a_process("tests.test_budget", str(directory), str(ram), grads)
    found: dict[str, Any] = json.loads(output.strip().splitlines()[-1])
    return found


def test_peak_memory_keeps_to_every_budget(tmp_path: Path) -> None:
    least = measured(tmp_path, "min")
    states = 12 * least["params"]
    budgets = {
        "spilling": (least["least"] - least["grads"] // 2, "nvme"),
        "a third": (least["least"] + states // 3, "cpu"),
        "all": (least["least"] + 2 * states, "cpu"),
    }
    records = {"min": least} | {name: measured(tmp_path, *budget) for name, budget in budgets.items()}
    for name, record in records.items():
        allowed = record["ram"] + record["device"] + record["baseline"] + SLACK
        assert record["peak"] <= allowed, f"{name}: {(record['peak'] - allowed) / MIB:.1f} MiB too much: {record}"
        if name in budgets:
            assert record["ram"] <= budgets[name][0]
    assert records["spilling"]["spilled"] > 0
    assert records["spilling"]["peak"] < least["peak"]
    assert least["peak"] < records["a third"]["peak"] < records["all"]["peak"]  # what is given is used
    assert least["read"] > records["a third"]["read"] > records["all"]["read"] == 0
    assert states // 6 > SLACK  # or the test would prove nothing


def rss_bytes() -> int:
    """What this process holds in RAM now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_resident_memory_that_a_plan_moves_to_nvme_is_given_back(tmp_path: Path) -> None:
    with make_rest(tmp_path, "threads") as rest:
        unit = Unit(0, "u", ())
        flats = [make_flat(unit, index, torch.bfloat16) for index in range(8)]
        chunks = len(flats[0].layout.chunks)
        numel = sum(flat.layout.shard_numel for flat in flats)
        rest.create(flats, [[0] * chunks for _ in flats])
        values = torch.randn(flats[0].layout.shard_numel).bfloat16()
        for flat in flats:
            rest.store(flat, 0, values.data_ptr()).wait()
        formats = [Format.SPLIT] * len(flats)
        rest.convert(flats, formats, [[0] * chunks for _ in flats])
        assert rest.resident_bytes == 12 * numel
        before = rss_bytes()
        rest.convert(flats, formats, [[0b1101 * (index % 2)] * chunks for index in range(len(flats))])  # `lo` stays everywhere
        assert rest.resident_bytes == 7 * numel
        assert before - rss_bytes() > 0.8 * 5 * numel
        rest.convert(flats, formats, [[0b1111] * chunks for _ in flats])
        assert rest.resident_bytes == 0
        assert not rest._slabs
        for flat in flats:
            assert torch.equal(fetched(rest, flat, 0, torch.bfloat16).view(torch.int16), values.view(torch.int16))


def test_a_conversion_that_fails_gives_back_what_it_took(tmp_path: Path) -> None:
    with make_rest(tmp_path, "threads") as rest:
        flats = [make_flat(Unit(0, "u", ()), index, torch.bfloat16) for index in range(3)]
        chunks = len(flats[0].layout.chunks)
        rest.create(flats, [[1] * chunks for _ in flats])
        values = torch.randn(flats[0].layout.shard_numel).bfloat16()
        for flat in flats:
            rest.store(flat, 0, values.data_ptr()).wait()
        carry, seen = rest._carry_over, []

        def breaks(*pair: Any) -> None:
            seen.append(pair)
            if len(seen) == 2:
                raise DeviceFailedError("broken")
            carry(*pair)

        rest._carry_over = breaks  # type: ignore[method-assign, assignment]
        with pytest.raises(DeviceFailedError):
            rest.convert(flats, [Format.SPLIT] * 3, [[0] * chunks for _ in flats])
        assert rest.resident_bytes == 12 * flats[0].layout.shard_numel  # the first was done
        for flat in flats:
            assert torch.equal(fetched(rest, flat, 0, torch.bfloat16).view(torch.int16), values.view(torch.int16))


def test_a_second_model_is_told_who_holds_the_budget_and_what_to_do(tmp_path: Path) -> None:
    def policy(ram: int | str) -> inf.Policy:
        return inf.Policy(params="nvme", optim="nvme", nvme=tmp_path, ram=ram)

    def offloaded(ram: int | str) -> torch.nn.Module:
        model = inf.offload(models.make(models.llama), policy(ram))
        inf.AdamW(model.parameters())
        return model

    first = offloaded("2MiB")
    held = inf.handle(first).stats().ram_bytes
    with pytest.raises(BudgetError, match=r"other models of this process hold .* smaller ram or resident=, or this one a larger"):
        offloaded(held + 1000)
    second = offloaded(held + 2 * MIB)  # the rule: a ram that grows
    assert inf.handle(second).stats().ram_bytes <= 2 * MIB
    for model in (first, second):
        inf.handle(model).close()


@pytest.mark.parametrize("kind", ["params", "optim"])
def test_what_is_to_be_resident_is_not_read(kind: str, tmp_path: Path) -> None:
    def run(resident: dict[str, float | int | str]) -> Any:
        model = inf.offload(
            models.make(models.llama),
            inf.Policy(params="nvme", optim="nvme", nvme=tmp_path, ram="min", resident=resident),
        )
        optimizer = inf.AdamW(model.parameters())
        for batch in models.token_batches(2):
            models.loss_of(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        handle = inf.handle(model)
        handle.flush()
        stats = handle.stats()
        handle.close()
        return stats

    none, half, whole = run({}), run({kind: 0.5}), run({kind: 1.0})
    size = (2 if kind == "params" else 10) / 12 * none.nvme_bytes
    assert whole.resident_bytes == pytest.approx(size)
    assert whole.ram_bytes - none.ram_bytes == whole.resident_bytes
    assert 0 < half.resident_bytes <= size / 2
    assert none.bytes_read > half.bytes_read > whole.bytes_read
    assert (whole.params_read_bytes == 0) == (kind == "params")


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    train(sys.argv[1], 2, 64, "min", "cpu")  # what torch allocates once
    baseline = rss_bytes()
    budget = sys.argv[2] if sys.argv[2] == "min" else int(sys.argv[2])
    result = train(sys.argv[1], LAYERS, HIDDEN, budget, sys.argv[3])
    print(json.dumps(result | {"peak": peak_rss_bytes(), "baseline": baseline}))
