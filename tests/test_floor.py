"""The byte floor: a step moves exactly the bytes of the formulas in
`infinity._src.memory.roofline`, by the engine's counters and by the kernel's.

Each case trains in a separate process, so that /proc/self/io counts only this training, without the
page cache (O_DIRECT), between two moments without pending I/O. The formulas leave out two things,
which are computed here from the units alone:

- less: if a pass over the units is followed by one in the other direction, units that are gathered
  at the turn are read once for both. They are a prefix of the next pass, as long as fits into
  `gathered_bytes_max` (`kept_bytes`);
- more: after `flush()` no update feeds the first forward, which reads the parameters: once per
  measurement.

A gate that no forward opens for 20 ms (on a busy machine) *escapes*, and its unit is read once
more. So that no result depends on time, the gates are held until forward begins, and none may
escape.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

import infinity as inf
from infinity._src.base.sizes import round_up
from infinity._src.cabi.records import ALIGNMENT_BYTES
from infinity._src.hooks.activation_offload import HELD_CALLS
from infinity._src.memory.roofline import AtRest, Moves, traffic
from infinity._src.params.unit import Flat, Unit
from infinity._src.plan.matrices import ChunkShares, moves_of
from tests import forks, models
from tests.marks import mostly_slow, pairwise
from tests.turning import turning_bytes_max

KERNEL_SLACK_BYTES = 1 << 20
"""Bytes that the interpreter may read meanwhile (a late import, a page of a library)."""

STEPS = 2
LAYERS, HIDDEN = 5, 256
ROWS, LENGTH = 2, 64
"""Rows and tokens of a batch: boundary activations are large enough to be offloaded, and multiples
of 4096 bytes."""
STATES = ("exact", "bf16", "compact")
UPDATES = ("deferred", "backward", "delayed")
OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "AdamW": lambda params: inf.AdamW(params, lr=1e-4),
    "SGD": lambda params: inf.SGD(params, lr=1e-3, momentum=0.9),
    "Lion": lambda params: inf.Lion(params, lr=1e-4),
    "Muon": lambda params: inf.Muon(params, lr=1e-4),
}
OTHERS: dict[str, tuple[float, dict[str, Any]]] = {  # with bytes per parameter at rest
    "fp32": (12, {"dtype": "float32"}),
    "fp16": (14, {"dtype": "float16"}),
    "SGD with momentum": (8, {"optimizer": "SGD"}),
    "Lion": (8, {"optimizer": "Lion", "update": "backward"}),
    # Each unit has a norm, and so the places of AdamW.
    "Muon": (12, {"optimizer": "Muon"}),
    "Muon in backward": (5.0625, {"optimizer": "Muon", "update": "backward", "state": "compact"}),
    "Muon, two generations": (12, {"optimizer": "Muon", "generations": 2}),
    "Muon ahead of its step": (
        12, {"optimizer": "Muon", "generations": 2, "update": "backward"}
    ),
}
SHARES = [
    {"params": 1.0, "optim": 0.0},
    {"params": 0.0, "optim": 1.0},
    {"params": 0.5, "optim": 0.25},
]

CASES: dict[str, dict[str, Any]] = {
    **{
        f"{state} {update}": {"state": state, "update": update, "micro_batches": [1, 3]}
        for state in STATES
        for update in UPDATES
    },
    **{name: case | {"micro_batches": [1, 2]} for name, (_, case) in OTHERS.items()},
    **{
        f"resident {shares}": {"ram": "256MiB", "resident": shares, "micro_batches": [1, 2]}
        for shares in SHARES
    },
    **{
        f"two generations {update}": {"generations": 2, "update": update, "micro_batches": [1, 3]}
        for update in ("deferred", "backward")
    },
    "spilled": {"spills": True, "micro_batches": [1, 2]},
    "spilled, of matrices": {"spills": True, "micro_batches": [1], "optimizer": "Muon"},
    "activations": {"activations": "nvme", "micro_batches": [1, 2]},
}


def kernel_bytes() -> tuple[int, int]:
    """Return the bytes that this process has read from storage and written to it."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["read_bytes"]), int(fields["write_bytes"])


def on_nvme(handle: Any, units: Iterable[Unit]) -> AtRest:
    """Return the bytes at rest on NVMe by kind, each section of a chunk in whole blocks of 4096
    bytes, from the engine's records; and what the two updates of matrices move, by the plan."""
    found = AtRest()
    for flat in (flat for unit in units for flat in unit.flats):
        shard, moves = handle.parts.tiers.store[flat], moves_of_chunks(handle, flat)
        kinds = dict.fromkeys((field.name for field in dataclasses.fields(AtRest)), 0.0)
        for chunk, record in enumerate(shard.records):
            for index, section in enumerate(shard.sections):
                if record["section_at"][index] < 0:
                    continue
                items = int(record["numel"]) // section.group_numel
                kind = "grads" if section.name == "grad" else "optim" if index else "params"
                size = round_up(items * section.itemsize, ALIGNMENT_BYTES)
                kinds[kind] += size
                if moves:
                    kinds["first"] += size * moves[chunk][index][0]
                    kinds["idle"] += size * (1 - moves[chunk][index][1])
        found += AtRest(**kinds)
    return found


def moves_of_chunks(handle: Any, flat: Flat) -> list[Moves]:
    """For each chunk of a flat what a plan says of a flat that is all of its kind; empty without an
    optimizer of whole matrices."""
    holders = [handle.parts.optimizer.registry.optimizer_of(param) for param in flat.params]
    if not isinstance(holders[0], inf.Matrixwise):
        return []
    held = [len(each.moments_of(p)) for each, p in zip(holders, flat.params, strict=True)]
    owners, found = flat.layout.segments(0), []
    for chunk in range(len(flat.layout.chunks)):
        kinds = {held[owner] for owner in owners.owner[owners.chunk == chunk]}
        shares = ChunkShares(1 in kinds, 2 in kinds, len(kinds) == 2)
        form = handle.parts.tiers.store[flat].format
        once_more = (float(1 in held), 1.0)  # a gradient that spills
        found.append([*moves_of(form, shares), once_more])
    return found


def kept_bytes(handle: Any, order: Iterable[Unit]) -> float:
    """Return the bytes on NVMe that a pass in this order need not read: the parameters of its first
    units, which are still gathered from the end of the pass before."""
    sizes = itertools.accumulate(unit.size_bytes for unit in order)
    count = sum(size <= handle.unsharder.gathered_bytes_max for size in sizes)
    return on_nvme(handle, list(order)[:count]).params


def expected_read(handle: Any, micro_batches: int, activations: int) -> float:
    """Return the bytes that `STEPS` steps read between two moments without pending I/O."""
    update = handle.policy.update
    rests = on_nvme(handle, handle.units)
    floor = STEPS * traffic(rests, update, micro_batches, activations=activations).total.read
    # passes read nothing: they compute from a copy in RAM
    if update == "delayed":
        return floor
    to_backward, to_forward = (
        kept_bytes(handle, handle.units[::-1]),
        kept_bytes(handle, handle.units),
    )
    within = STEPS * (micro_batches * to_backward + (micro_batches - 1) * to_forward)
    # updated in gathered memory; backward's last units stay for the next forward
    if update == "backward":
        return floor - within - STEPS * to_forward
    # Updates supply all forwards but the first, whose gathered units the warm-up's updates
    # supplied.
    return floor - within + rests.params - to_forward


def measure(
    handle: Any, model: torch.nn.Module, optimizer: Any, micro_batches: int
) -> dict[str, Any]:
    """Take a warm-up step, then `STEPS` measured ones. Returns moved and expected bytes."""
    boundary = ROWS * LENGTH * HIDDEN * 2 if handle.policy.activations == "nvme" else 0
    activations = (LAYERS - HELD_CALLS) * boundary
    batches = models.token_batches(micro_batches, rows=ROWS, length=LENGTH if boundary else 4)

    def step() -> None:
        for index, batch in enumerate(batches):
            last = index == len(batches) - 1
            with contextlib.nullcontext() if last else handle.no_sync():
                (models.loss_of(model, batch) / len(batches)).backward()
        # forward holds these units until its end
        handle.parts.tiers.executor.hold_gates(True)
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
    update, rests = handle.policy.update, on_nvme(handle, handle.units)
    moved = traffic(rests, update, micro_batches, activations=activations).total
    return {
        "read": after.bytes_read - before.bytes_read,
        "written": after.bytes_written - before.bytes_written,
        "kernel_read": kernel_after[0] - kernel_before[0],
        "kernel_written": kernel_after[1] - kernel_before[1],
        "floor_read": STEPS * moved.read,
        "expected_read": expected_read(handle, micro_batches, activations),
        "expected_written": STEPS * moved.written,
        "turning_max": STEPS
        * turning_bytes_max(handle.unsharder.gathered_bytes_max, update, micro_batches),
        "escaped": escaped,
        "grads": rests.grads,
        "spilled": after.spilled_bytes,
        "staging": after.staging_bytes,
        "activations": after.activations.stored_bytes - before.activations.stored_bytes,
        "states_per_param": rests.states / after.params,
        "resident": after.resident_bytes,
        "direct": all(drive.direct for drive in after.drives),
    }


def run(directory: str, case: dict[str, Any]) -> list[dict[str, Any]]:
    """Train the case with each of its numbers of micro-batches."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dtype, name = getattr(torch, case.pop("dtype", "bfloat16")), case.pop("optimizer", "AdamW")
    micro_batches, spills = case.pop("micro_batches"), case.pop("spills", False)
    # gradients exceed the larger chunks that spilling needs
    layers = 4 * LAYERS if spills else LAYERS

    def offloaded(**values: Any) -> tuple[Any, Any, Any]:
        model: Any = models.llama(layers=layers, hidden=HIDDEN).to(dtype)
        if case.get("activations"):
            model.gradient_checkpointing_enable({"use_reentrant": False})
        settings: dict[str, Any] = {
            "params": "nvme",
            "optim": "nvme",
            "nvme": directory,
            "ram": "min",
            "delayed_warmup": 0,
        }
        inf.offload(model, inf.Policy(**settings | case | values))
        return model, OPTIMIZERS[name](model.parameters()), inf.handle(model)

    if spills:
        _, _, handle = offloaded()
        stats = handle.stats()
        handle.close()
        case |= {"ram": stats.ram_min_bytes - stats.grad_bytes // 3, "grads": "nvme"}
        case["resident"] = {"params": 0.0, "optim": 0.0}
    model, optimizer, handle = offloaded()
    found = [measure(handle, model, optimizer, count) for count in micro_batches]
    handle.close()
    return found


def measurements(case: str) -> list[dict[str, Any]]:
    """The records of a case, by position in its `micro_batches`."""
    with tempfile.TemporaryDirectory() as directory:
        output = forks.in_a_fork("tests.test_floor", directory, json.dumps(CASES[case]))
    found: list[dict[str, Any]] = json.loads(output.strip().splitlines()[-1])
    return found


def check(found: dict[str, Any]) -> None:
    """The counters equal the formula, and the kernel's counts."""
    assert found["escaped"] == 0
    assert found["read"] == found["expected_read"], found
    assert found["written"] == found["expected_written"], found
    assert found["floor_read"] - found["expected_read"] <= found["turning_max"]
    if not found["direct"]:
        pytest.skip(
            "the directory for temporary files allows no O_DIRECT, so the kernel's counters are "
            "the page cache's"
        )
    assert found["read"] <= found["kernel_read"] <= found["read"] + KERNEL_SLACK_BYTES
    assert found["written"] <= found["kernel_written"] <= found["written"] + KERNEL_SLACK_BYTES


@pytest.mark.parametrize(("state", "update"), pairwise(STATES, UPDATES))
def test_a_step_moves_what_the_formula_says(state: str, update: str) -> None:
    for found in measurements(f"{state} {update}"):
        # Nothing is resident, and bytes at rest match the format: padding is below one percent.
        assert found["resident"] == 0
        sigma = {"exact": 12.0, "bf16": 8.0, "compact": 5.0625}[state]
        assert sigma <= found["states_per_param"] < sigma * 1.01
        check(found)


@pytest.mark.parametrize("name", mostly_slow(OTHERS, "fp16", "Lion", "Muon"))
def test_so_it_does_with_other_dtypes_and_optimizers(name: str) -> None:
    sigma = OTHERS[name][0]
    for found in measurements(name):
        assert found["resident"] == 0
        assert sigma <= found["states_per_param"] < sigma * 1.01
        check(found)


@pytest.mark.parametrize("update", mostly_slow(["deferred", "backward"], "backward"))
def test_a_second_generation_moves_nothing_more(update: str) -> None:
    for found in measurements(f"two generations {update}"):
        assert found["resident"] == 0
        check(found)


def test_spilled_gradients_move_once_in_each_direction_per_micro_batch() -> None:
    for found in measurements("spilled"):
        assert found["grads"] >= found["spilled"] > 5 * found["staging"]
        check(found)


@pytest.mark.slow
def test_spilled_gradients_of_matrices_move_once_more() -> None:
    (found,) = measurements("spilled, of matrices")
    assert found["written"] == found["expected_written"]
    # But for those that are still in their windows.
    left_out = found["expected_read"] - found["read"]
    assert 0 <= left_out <= STEPS * found["staging"] < found["grads"]


def test_activations_move_once_in_each_direction_per_micro_batch() -> None:
    for micro_batches, found in zip([1, 2], measurements("activations"), strict=True):
        assert (
            found["activations"]
            == STEPS * micro_batches * (LAYERS - HELD_CALLS) * ROWS * LENGTH * HIDDEN * 2
        )
        check(found)


@pytest.mark.parametrize("shares", mostly_slow(SHARES, SHARES[-1]), ids=str)
def test_what_is_resident_is_not_moved(shares: dict[str, float]) -> None:
    for found in measurements(f"resident {shares}"):
        # Only whole chunks are resident, so a share is approximate.
        wanted = 12 - 2 * shares["params"] - 10 * shares["optim"]
        assert found["states_per_param"] == pytest.approx(wanted, abs=1.0)
        check(found)


if __name__ == "__main__":
    print(json.dumps(run(sys.argv[1], json.loads(sys.argv[2]))))
