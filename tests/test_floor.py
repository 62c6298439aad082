"""The byte floor: what a step moves is what the formulas of `infinity.limits` say, by the engine's counters and the kernel's.

Every case trains in a process of its own, so that /proc/self/io counts nobody else, past the page cache (O_DIRECT), between
two moments at which nothing is pending. What may differ from the formula, and by how much:

- less: units that stay gathered where one pass ends and the next begins are not read twice (`turning_bytes_max`);
- more: after `flush()` the first forward cannot be fed by an update and reads the parameters: once per measurement;
- more: a gate that escapes (no forward came within 20 ms: a busy machine) costs its unit one read of the parameters.
"""

from __future__ import annotations

import contextlib
import functools
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

import infinity as inf
from infinity.aio.plan import ALIGNMENT_BYTES
from infinity.limits import AtRest, traffic, turning_bytes_max
from infinity.sizes import round_up
from tests import harness, models

KERNEL_SLACK_BYTES = 1 << 20
"""What the interpreter itself reads meanwhile (a module that is imported late, a page of a library)."""

STEPS = 2
MICRO_BATCHES = (1, 2, 8)
STATES = ("exact", "bf16", "compact")
UPDATES = ("deferred", "backward", "delayed")



def kernel_bytes() -> tuple[int, int]:
    """What this process has read from storage and written to it."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["read_bytes"]), int(fields["write_bytes"])


def on_nvme(handle: Any) -> AtRest:
    """What rests on NVMe by kind, each section of a chunk in whole blocks of 4096 bytes, from the engine's records."""
    found = AtRest()
    for flat in handle._flats:
        rest = handle._rest[flat]
        kinds = {"params": 0.0, "optim": 0.0, "grads": 0.0}
        for record in rest.records:
            for index, section in enumerate(rest.sections):
                if record["section_at"][index] < 0:
                    continue
                items = int(record["numel"]) // section.group_numel
                kind = "grads" if section.name == "grad" else "optim" if index else "params"
                kinds[kind] += round_up(items * section.itemsize, ALIGNMENT_BYTES)
        found += AtRest(**kinds)
    return found


def measure(handle: Any, model: torch.nn.Module, optimizer: Any, micro_batches: int) -> dict[str, Any]:
    """One warm-up step, then `STEPS` measured ones; what they moved and what they should have."""
    batches = models.token_batches(micro_batches)

    def step() -> None:
        for index, batch in enumerate(batches):
            last = index == len(batches) - 1
            with contextlib.nullcontext() if last else handle.no_sync():
                (models.loss_of(model, batch) / len(batches)).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    handle.flush()
    before, kernel_before = handle.stats(), kernel_bytes()
    for _ in range(STEPS):
        step()
    escaped = handle.stats().gates_escaped - before.gates_escaped
    handle.flush()
    after, kernel_after = handle.stats(), kernel_bytes()
    update, rests = handle.policy.update, on_nvme(handle)
    moved = traffic(rests, update, micro_batches).total
    largest = max(unit.size_bytes for unit in handle.units)
    per_param = rests.total / after.params
    return {
        "read": after.bytes_read - before.bytes_read,
        "written": after.bytes_written - before.bytes_written,
        "kernel_read": kernel_after[0] - kernel_before[0],
        "kernel_written": kernel_after[1] - kernel_before[1],
        "floor_read": STEPS * moved.read,
        "floor_written": STEPS * moved.written,
        "turning": STEPS * turning_bytes_max(handle.residency.gathered_bytes_max, update, micro_batches),
        "refill": rests.params if update == "deferred" else 0,
        "escaped": escaped * largest,
        "params": after.params,
        "nvme_per_param": per_param,
        "resident": after.resident_bytes,
        "direct": all(drive.direct for drive in after.drives),
    }


def run(directory: str, state: str, update: str, resident: str) -> None:
    """Measure every number of micro-batches; prints a JSON record of each."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model: Any = models.llama(layers=8, hidden=256).to(torch.bfloat16)
    policy = inf.Policy(
        params="nvme", optim="nvme", nvme=directory, ram="min" if resident == "null" else "256MiB", state=state,
        update=update, delayed_warmup=0, resident=json.loads(resident),
    )  # fmt: skip
    inf.offload(model, policy)
    optimizer = inf.AdamW(model.parameters(), lr=1e-4)
    handle = inf.handle(model)
    print(json.dumps([measure(handle, model, optimizer, count) for count in MICRO_BATCHES]))
    handle.close()


@functools.lru_cache(maxsize=64)
def measured(state: str, update: str, resident: str = "null") -> list[dict[str, Any]]:
    """The records of one policy, by position in `MICRO_BATCHES`."""
    with tempfile.TemporaryDirectory() as directory:
        output = harness.in_a_process("tests.test_floor", directory, state, update, resident)
    found: list[dict[str, Any]] = json.loads(output.strip().splitlines()[-1])
    return found


def check(found: dict[str, Any]) -> None:
    """The counters keep to the formula, and the kernel counted the same."""
    most = found["floor_read"] + found["refill"] + found["escaped"]
    assert found["floor_read"] - found["turning"] <= found["read"] <= most
    assert found["written"] == found["floor_written"]
    if not found["direct"]:
        pytest.skip("the directory for temporary files allows no O_DIRECT, so the kernel's counters are the page cache's")
    assert found["read"] <= found["kernel_read"] <= found["read"] + KERNEL_SLACK_BYTES
    assert found["written"] <= found["kernel_written"] <= found["written"] + KERNEL_SLACK_BYTES


@pytest.mark.parametrize("micro_batches", MICRO_BATCHES)
@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("state", STATES)
def test_a_step_moves_what_the_formula_says(state: str, update: str, micro_batches: int) -> None:
    found = measured(state, update)[MICRO_BATCHES.index(micro_batches)]
    # Nothing is resident, and what rests is what the format says: padding costs less than one part in a hundred.
    assert found["resident"] == 0
    sigma = {"exact": 12.0, "bf16": 8.0, "compact": 5.0625}[state]
    assert sigma <= found["nvme_per_param"] < sigma * 1.01
    check(found)


@pytest.mark.parametrize(
    "resident", ['{"params": 1.0, "optim": 0.0}', '{"params": 0.0, "optim": 1.0}', '{"params": 0.5, "optim": 0.25}']
)
def test_what_is_resident_is_not_moved(resident: str) -> None:
    shares = json.loads(resident)
    for found in measured("exact", "deferred", resident):
        # Whole chunks rest here or there, so a share is kept as nearly as that allows.
        wanted = 12 - 2 * shares["params"] - 10 * shares["optim"]
        assert found["nvme_per_param"] == pytest.approx(wanted, abs=1.0)
        check(found)


if __name__ == "__main__":
    run(*sys.argv[1:])
