"""Bits equal the plain loop whatever the model, the loop and the policy are.

`LOOP` has the axes of the model and its loop, `POLICY` those of the policy. The rows of a covering
array hold each pair of values that may meet (`allowed`); a slow test draws rows at random. Losses,
norms, what the loop saw, parameters, and AdamW's states must be the bits of the plain loop. No
reference that shares no code with the engine rounds at random: where states do, a row must equal
the engine with everything in memory.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import infinity as inf
from infinity._src.hooks import activation_offload
from infinity.aio import Seam
from tests import harness, models
from tests.harness import Run, Training, assert_same, trained
from tests.marks import covering, mostly_slow
from tests.sliced import of_steps, whole
from tests.test_bitwise import MixedDtypes
from tests.test_models import evaluate, evaluate_only, fail_in_backward, fail_in_forward
from tests.unit.aio.rig import BACKENDS


def wide_llama() -> nn.Module:
    """Units of several chunks in every state format."""
    return models.llama(layers=2, hidden=320)


def tiles() -> nn.Module:
    """A Qwen3-MoE whose stacks of experts are in tiles; test_expert_tiles.py says that its plain
    loop has the bits of the uncut model's."""
    model: Any = models.qwen3_moe(experts=8)
    model.set_experts_implementation("eager")
    return inf.tile_experts(model, experts=3)


def tiled(factory: Callable[[], nn.Module], names: Any = None) -> nn.Module:
    """A model with linears in tiles, and its loss without logits."""
    model = inf.tile_loss(factory(), tiles=4)
    return inf.tile_linears(model, tiles=(3, 2), names=names)


def tiled_llama() -> nn.Module:
    return tiled(functools.partial(models.llama, layers=2), ["q_proj", "down_proj"])


def tiled_gpt2() -> nn.Module:
    """Its head, and so its embedding, in tiles; the rest of its linears are Conv1D."""
    return tiled(models.gpt2)


def pause(model: nn.Module, step: int) -> None:
    """Sometimes long enough that updates end before anything waits for them."""
    time.sleep((0.0, 0.03, 0.002)[step % 3])


CASES = {
    **{case.name: case for case in models.CASES if case.name != "qwen3_moe"},
    "tiles": models.Case("tiles", tiles, generates=True, checkpoints=True),
    "several chunks": models.Case("several chunks", wide_llama, checkpoints=True),
    "two dtypes": models.Case("two dtypes", MixedDtypes),
    "linear tiles": models.Case("linear tiles", tiled_llama, checkpoints=True),
    "tied tiles": models.Case("tied tiles", tiled_gpt2, checkpoints=True),
}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "AdamW": {"lr": 1e-2},
    "SGD": {"lr": 1e-1, "options": (("momentum", 0.9), ("nesterov", True))},
    "Lion": {"lr": 1e-3, "options": (("betas", (0.9, 0.98)),)},
    "Adagrad": {"lr": 1e-2},
}
BEFORE: dict[str, Callable[[nn.Module, int], Any] | None] = {
    "": None,
    "pause": pause,
    "forward fails": fail_in_forward,
    "backward fails": fail_in_backward,
}
UNITS: dict[str, dict[str, Any]] = {
    "blocks": {},
    "small": {"unit_bytes_max": 16384},
    "one": {"units": [nn.Module]},  # the whole model; row by row its class
}
LOOP: dict[str, tuple[Any, ...]] = {
    "model": tuple(CASES),
    "optimizer": tuple(OPTIMIZERS),
    "dtype": (torch.bfloat16, torch.float32, torch.float16),
    "autocast": ("", "cached"),
    "scaler": (None, (512.0, 2)),
    "grad_dtype": (None, torch.float32),
    "accumulation": (1, 2, 3),
    "no_sync": (False, True),
    "together": (False, True),
    "sliced": (False, True),  # a step's micro-batches are one batch of `inf.microbatched`
    "max_norm": (None, 1.0),
    "max_value": (None, 0.003),
    "groups": (False, True),
    "checkpointing": (None, False, True),
    "before": tuple(BEFORE),
    "evaluates": (False, True),
}
POLICY: dict[str, tuple[Any, ...]] = {
    "params": ("device", "cpu", "nvme"),
    "optim": ("cpu", "nvme"),
    "grads": (None, "nvme"),
    "activations": ("device", "nvme"),
    "ram": ("min", "least", None),  # "least": what works if gradients spill
    "resident": (False, True),
    "drives": (1, 2),
    "units": tuple(UNITS),
    "io_backend": tuple(BACKENDS),
    "verify": ("full", "off"),
    "update": ("deferred", "backward", "delayed"),
    "state": ("exact", "bf16", "compact"),
    "generations": (1, 2),
    "durable": (False, True),
    "delays": (False, True),
}
AXES = {**LOOP, **POLICY}
Row = dict[str, Any]
WARMUP = 1
OTHER_ORDER = ("gpt2", "t5", "albert", "external", "tied tiles")
"""Models with a weight at several sites: `accumulate` adds its gradients in another order."""
SLICED = ("llama", "mixtral", "tiles", "lora", "several chunks", "linear tiles")
"""Models in which no weight is used twice in a step: sums of slices are added as the loop's are."""
FAILING = ("llama", "t5", "mixtral", "lora", "list_moe", "external")
"""Models whose blocks let a test raise inside of them."""


def allowed(row: Row) -> bool:
    """Return whether the values that a row has may meet."""
    get: Callable[..., Any] = row.get
    on_nvme = (get("params", "nvme"), get("optim", "nvme")) == ("nvme", "nvme")
    case = CASES[get("model", "llama")]
    early = get("update", "deferred") != "deferred"
    in_place = (get("update"), get("generations", 2)) == ("backward", 1)
    apart = not any(get(name, True) for name in ("no_sync", "together", "sliced"))
    return not (
        (get("checkpointing") is not None and not case.checkpoints)
        or (get("max_norm") is not None and in_place)
        or (get("max_norm") is not None and get("scaler") and get("update") == "backward")
        or (early and get("accumulation", 1) > 1 and apart)
        or (get("no_sync") and (get("accumulation", 2) == 1 or get("together")))
        or (get("together") and (get("evaluates") or case.name in OTHER_ORDER))
        # torch's cache adds the gradients of a weight that is used twice in 16 bits.
        or (get("autocast") and (get("dtype", torch.float32) != torch.float32))
        or (get("autocast") and case.name in ("albert", "linear tiles", "tied tiles"))
        or (get("scaler") and (in_place or get("update") == "delayed"))
        or (get("max_value") is not None and in_place)
        or (get("activations") == "nvme" and get("checkpointing", True) is None)
        or (get("activations") == "nvme" and not case.checkpoints)
        or (get("ram") == "least" and (get("grads", "nvme") is None or get("resident")))
        or (get("ram") == "least" and (not on_nvme or get("durable") or get("together")))
        or (get("ram") == "least" and get("activations") == "nvme")
        # These cannot spill: one unit holds all parameters, or a class of torch needs more memory.
        or (get("ram") == "least" and (get("units") == "one" or get("optimizer") == "Adagrad"))
        # Few units have room for all gradients beside what is in use.
        or (get("ram") == "least" and get("units") == "blocks")
        or (get("sliced") and "model" in row and case.name not in SLICED)
        or (get("sliced") and (get("accumulation") == 1 or get("no_sync") or get("together")))
        # test_microbatched_modes.py has these.
        or (get("sliced") and (get("evaluates") or get("autocast") or get("scaler")))
        or (get("sliced") and get("activations") == "nvme")
        # Under a reentrant checkpoint transformers drops gradients of the losses of routers.
        or (get("sliced") and get("checkpointing") and get("model") == "mixtral")
        or (get("update") == "delayed" and (get("generations") == 2 or get("durable")))
        # In place, updates in backward are seen before the step, and cannot be undone.
        or (in_place and (get("evaluates") or get("before") == "backward fails"))
        # Evaluation reads the newest parameters, with which the delayed loop does not compute yet.
        or (get("update") == "delayed" and get("evaluates"))
        or (get("optimizer") == "Adagrad" and (early or get("state") == "compact"))
        # Generation calls parts of these models, and one unit gathers in the whole's forward.
        or (get("units") == "one" and get("evaluates") and case.name in ("t5", "lora"))
        or (get("durable") and not on_nvme)
        or (get("durable") and (get("resident") or get("verify") == "off"))
        or (get("durable") and get("generations") == 1)
        or (get("resident") and not on_nvme)
        or (get("before", "").endswith("fails") and case.name not in FAILING)
    )


def training_of(row: Row) -> Training:
    case = CASES[row["model"]]
    between = evaluate if case.generates else evaluate_only
    return Training(
        case.factory,
        steps=3,
        optimizer=row["optimizer"],
        dtype=row["dtype"],
        grad_dtype=row["grad_dtype"],
        autocast=row["autocast"],
        scaler=row["scaler"],
        poisoned=(1,) if row["scaler"] else (),
        accumulation=row["accumulation"],
        no_sync=row["no_sync"],
        together=row["together"],
        max_norm=row["max_norm"],
        max_value=row["max_value"],
        groups=row["groups"] and row["model"] != "lora",
        checkpointing=row["checkpointing"],
        before=BEFORE[row["before"]],
        between=between if row["evaluates"] else None,
        delayed=WARMUP if row["update"] == "delayed" else None,
        states=row["optimizer"] == "AdamW",
        **OPTIMIZERS[row["optimizer"]],
    )


def policy_of(row: Row, place: Path, training: Training) -> inf.Policy:
    drives = [place / str(drive) for drive in range(row["drives"])]
    for drive in drives:
        drive.mkdir()
    least = row["ram"] == "least"
    optional = {
        "ram": None if least else row["ram"],
        "grads": row["grads"],
        "resident": {"params": 0.5, "optim": 0.3} if row["resident"] else None,
        # Given: else a policy with two drives measures them.
        "io": {"bandwidths": {str(drive): (3e9, 2e9) for drive in drives}},
    }
    if least:
        optional["resident"] = {"params": 0.0, "optim": 0.0}
    units = dict(UNITS[row["units"]])
    if "units" in units:
        units["units"] = [type(CASES[row["model"]].factory()).__name__]
    same = ("params", "optim", "activations", "io_backend", "verify", "generations", "durable")
    chosen = inf.Policy(
        nvme=drives,
        **{name: row[name] for name in same},
        **{name: value for name, value in optional.items() if value is not None},
        **units,
        **_changes_bits(row),
    )
    if not least:
        return chosen
    # Without accumulation update="backward" has no gradients that could spill.
    backward = row["update"] == "backward"
    asked = dataclasses.replace(chosen, update="deferred") if backward else chosen
    return dataclasses.replace(chosen, ram=harness.least_to_train(training, asked))


def _changes_bits(row: Row) -> dict[str, Any]:
    """Fields that change bits: a run in memory that is compared needs them, too."""
    names = ("update", "state", "grad_dtype")
    return {**{name: row[name] for name in names}, "delayed_warmup": WARMUP}


def wanted(row: Row, training: Training) -> Run:
    if row["state"] == "exact":
        return harness.reference(training)
    chosen = _changes_bits(row)
    if row["update"] == "backward":
        # Random rounding depends on the step and the parameter, not on the time of the update.
        chosen["update"] = "deferred"
    return harness.offloaded(training, inf.Policy(**chosen))


def faults_of(row: Row) -> Seam | None:
    return Seam(delay_us_max=1500, seed=row["accumulation"]) if row["delays"] else None


def check(row: Row, place: Path) -> None:
    training = training_of(row)
    made = whole(training) if row["sliced"] else training
    run = harness.offloaded(made, policy_of(row, place, made), seam=faults_of(row))
    loop = wanted(row, training)
    assert_same(run, of_steps(loop, training.accumulation) if row["sliced"] else loop)
    assert len(set(run.losses)) > 1
    if (row["model"], row["dtype"]) == ("two dtypes", torch.bfloat16):
        assert {value.dtype for value in run.params.values()} == {torch.bfloat16, torch.float32}
    if row["ram"] == "min" and row["optim"] == "nvme" and row["units"] != "one":
        assert run.stats.bytes_read > 0
        assert run.stats.bytes_written > 0
    several = row["model"] in ("llama", "gpt2", "t5", "mixtral") and row["update"] != "backward"
    if row["ram"] == "least" and several:  # the windows of gradients hold less than all of them
        assert run.stats.spilled_bytes > 0
    stores = row["activations"] == "nvme" and row["model"] == "llama"
    assert stores <= bool(run.stats.activations.stored_bytes) <= (row["activations"] == "nvme")
    undisturbed = row["scaler"] is row["max_value"] is row["max_norm"] is None and row[
        "before"
    ] in ("", "pause")
    if row["update"] == "backward" and row["generations"] == 2 and undisturbed:
        assert run.stats.updates_ahead > 0 or row["evaluates"]


ROWS = covering(AXES, allowed)


@pytest.fixture(autouse=True)
def _small_activations_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activation_offload, "SMALLEST_BYTES", 256)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["model"])
def test_bits_are_those_of_the_plain_loop_for_each_pair_of_values(row: Row, tmp_path: Path) -> None:
    check(row, tmp_path)


@st.composite
def rows(draw: st.DrawFn) -> Row:
    row: Row = {}
    for axis, values in AXES.items():
        row[axis] = draw(
            st.sampled_from([value for value in values if allowed({**row, axis: value})])
        )
    return row


@pytest.mark.slow
@settings(max_examples=100, suppress_health_check=list(HealthCheck))
@given(row=rows())
def test_bits_are_those_of_the_plain_loop_for_any_values(
    row: Row, tmp_path_factory: pytest.TempPathFactory
) -> None:
    check(row, tmp_path_factory.mktemp("row"))


def test_the_rows_hold_each_pair_that_may_meet() -> None:
    """A pair that `allowed` permits and no row holds is one that a third axis forbids: none is."""
    held = {(a, row[a], b, row[b]) for row in ROWS for a in AXES for b in AXES}
    missing = [
        (a, x, b, y)
        for a in AXES
        for b in AXES
        for x in AXES[a]
        for y in AXES[b]
        if a < b and allowed({a: x, b: y}) and (a, x, b, y) not in held
    ]
    assert missing == []


@pytest.mark.parametrize("state", POLICY["state"])
def test_the_wide_model_has_units_of_several_chunks(state: str) -> None:
    model = inf.offload(models.make(wide_llama), inf.Policy(state=state))
    handle = inf.handle(model)
    assert sum(len(flat.layout.chunks) > 1 for flat in handle.parts.split.flats) >= 2
    handle.close()


@pytest.mark.parametrize("optimizer", mostly_slow(OPTIMIZERS, "AdamW")[:3])
@pytest.mark.parametrize("state", ["bf16", "compact"])
def test_random_rounding_depends_on_the_seed_and_stays_near_exact_states(
    state: str, optimizer: str
) -> None:
    values = {"optimizer": optimizer, **OPTIMIZERS[optimizer]}
    first, other, exact = (
        trained(inf.Policy(state=chosen, seed=seed), models.llama, **values)
        for chosen, seed in ((state, 0), (state, 1), ("exact", 0))
    )
    assert any(not torch.equal(first.params[name], value) for name, value in other.params.items())
    for name, value in exact.params.items():
        assert torch.allclose(first.params[name].float(), value.float(), atol=0.05), name
