"""ZeRO++: secondary shards keep every bit; quantized weights and gradients are those of a plain
model that rounds in the same way."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import infinity as inf
from tests import harness, models
from tests.distributed.plain_ranks import Rules, assert_modelled, coarse
from tests.distributed.rank_models import Odd, Routed, RoutedTraining
from tests.distributed.ranks import Train, assert_ranks_agree, named, on_ranks
from tests.harness import Result, Training

QUICK = (2, 1)
"""The mesh of the quick run, on which some of the jobs are left out."""
MESHES = [
    pytest.param(QUICK, id="2x1"),
    pytest.param((1, 2), id="1x2", marks=pytest.mark.ranks),
    pytest.param((2, 2), id="2x2", marks=pytest.mark.ranks),
]
STAGE3: dict[str, Any] = {"params": "nvme", "optim": "nvme", "ram": "min"}
STAGE2: dict[str, Any] = {"zero": 2, "params": "device", "optim": "cpu"}
LLAMA = Training(models.llama, steps=2, rows=4, lr=2e-3, max_norm=0.7)
ODD = Training(Odd, steps=2, rows=4, lr=2e-3, no_sync=True)
COMM = tuple(
    f"comm_{lane}_{where}_bytes" for where in ("across", "inside") for lane in ("gather", "reduce")
)


def trained(
    runs: Sequence[tuple[Training, dict[str, Any]]],
    place: Path,
    mesh: tuple[int, int],
    held: tuple[str, ...] = (),
) -> list[list[Result]]:
    """The results of each run, by rank; ranks agree."""
    job = Train(tuple(runs), held=held, mesh=mesh)
    found = [
        list(results) for results in zip(*on_ranks(job, place, mesh[0] * mesh[1]), strict=True)
    ]
    for (_, chosen), results in zip(runs, found, strict=True):
        with named(chosen):
            assert_ranks_agree(results)
    return found


@pytest.mark.parametrize("mesh", MESHES)
def test_secondary_shards_change_no_bit(tmp_path: Path, mesh: tuple[int, int]) -> None:
    """Secondary shards hold gathered values until the weights change: over several micro-batches,
    recomputed forwards, and updates during backward."""
    trainings = [
        LLAMA,
        dataclasses.replace(LLAMA, accumulation=3, no_sync=True),
        dataclasses.replace(LLAMA, checkpointing=False),
    ][: 2 if mesh == QUICK else None]
    policies = [
        STAGE3,
        {**STAGE3, "update": "backward", "generations": 2},
        {"params": "cpu"},
        {"params": "device"},
    ]
    shards = [("device",), ("cpu",)] if mesh == QUICK else [("device", "cpu")] * 3
    runs = [
        (training, {**policies[0], "hpz": hpz})
        for training, kinds in zip(trainings, shards, strict=True)
        for hpz in (None, *kinds)
    ]
    runs += [(LLAMA, {**policy, "hpz": "cpu"}) for policy in policies[1:]]
    found = trained(runs, tmp_path / "run", mesh)
    plain = {
        training: results
        for (training, values), results in zip(runs, found, strict=True)
        if values["hpz"] is None
    }
    for (training, chosen), results in zip(runs, found, strict=True):
        for ours, theirs in zip(results, plain[training], strict=True):
            with named(chosen):
                harness.assert_equal(ours, theirs)
    assert_modelled(plain[LLAMA], LLAMA, Rules(nodes=mesh[0]))


@pytest.mark.ranks
def test_in_every_update_mode_the_switches_change_what_they_say_and_nothing_else(
    tmp_path: Path,
) -> None:
    """An update takes masters from what rests, never from weights that travelled as int8; what is
    kept is of the step that computes, also where that is not the newest."""
    training = dataclasses.replace(LLAMA, steps=4, accumulation=1, max_norm=None)
    late = {"update": "delayed", "delayed_warmup": 1}
    groups = [
        [
            {"qwz": True},
            {"qwz": True, "update": "backward"},
            {"qwz": True, "update": "backward", "generations": 2},
            {"qwz": True, "hpz": "cpu", "update": "backward"},
        ],
        [late, {**late, "hpz": "cpu"}, {**late, "hpz": "device"}],
        [{**late, "qwz": True}, {**late, "qwz": True, "hpz": "cpu"}],
    ]
    chosen = [values for group in groups for values in group]
    found = iter(
        trained([(training, {**STAGE3, **values}) for values in chosen], tmp_path / "run", (2, 1))
    )
    for group in groups:
        first, *others = [next(found) for _ in group]
        for values, results in zip(group[1:], others, strict=True):
            with named(values):
                for ours, theirs in zip(results, first, strict=True):
                    harness.assert_equal(ours, theirs)


@pytest.mark.parametrize("mesh", MESHES)
def test_quantized_weights_and_gradients_are_a_plain_model_that_rounds_alike(
    tmp_path: Path, mesh: tuple[int, int]
) -> None:
    """Masters are exact: only what computes, or what travels, is rounded."""
    routed = RoutedTraining(Routed, steps=2, rows=12, lr=2e-3)
    wide = dataclasses.replace(LLAMA, grad_dtype=torch.float32)
    runs: list[tuple[Training, dict[str, Any], Rules]] = [
        (LLAMA, {**STAGE3, "qwz": True}, Rules(qwz=True)),
        (LLAMA, {"params": "device", "qwz": True, "hpz": "cpu"}, Rules(qwz=True)),
        (ODD, {**STAGE2, "qwz": True}, Rules(qwz=True)),
        (LLAMA, {**STAGE3, "qgz": True}, Rules(qgz=True)),
        (LLAMA, {**STAGE2, "qgz": True}, Rules(qgz=True)),
        (ODD, {"qgz": True, "zero": 2, "params": "device"}, Rules(qgz=True)),
        (
            dataclasses.replace(LLAMA, no_sync=True),
            {"qgz": True, "zero": 1, "params": "device"},
            Rules(qgz=True, local=True),
        ),
        (wide, {"qgz": True, "grad_dtype": torch.float32}, Rules(qgz=True)),
        (routed, {"qgz": True, "qwz": True}, Rules(qgz=True, qwz=True)),
        (LLAMA, {**STAGE3, "qgz": True, "error_feedback": True}, Rules(qgz=True, feedback=True)),
        (
            LLAMA,
            {**STAGE3, "qwz": True, "hpz": "device", "qgz": True, "error_feedback": True},
            Rules(qwz=True, qgz=True, feedback=True),
        ),
    ][:: 2 if mesh == QUICK else 1]
    found = trained([(training, chosen) for training, chosen, _ in runs], tmp_path / "run", mesh)
    for (training, chosen, rules), results in zip(runs, found, strict=True):
        with named(chosen):
            assert_modelled(results, training, dataclasses.replace(rules, nodes=mesh[0]))


Weights = dict[str, torch.Tensor]


def weights_in_forward(rank: int, place: Path) -> list[tuple[Weights, Weights, Weights, Weights]]:
    """The weights that a training forward computes with, before a step and after it; those that
    evaluation does, those that the state dict shows, and the masters."""
    model = models.make(models.llama)
    seen: Weights = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_hook(functools.partial(_look, seen, f"{name}.weight"))
    handle = inf.handle(inf.offload(model, inf.Policy(**STAGE3, nvme=place, qwz=True)))
    optimizer = inf.AdamW(model.parameters(), lr=1e-2)
    found = []
    for batch in models.token_batches(2, seed=rank):
        masters = masters_of(model)
        shown = model.state_dict()
        with torch.no_grad():
            models.loss_of(model, batch)
        evaluated = dict(seen)
        seen.clear()
        models.loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(
            (
                dict(seen),
                evaluated,
                {name: shown[name] for name in seen},
                {name: masters[name] for name in seen},
            )
        )
    handle.close()
    return found


def masters_of(model: torch.nn.Module) -> Weights:
    """The fp32 masters; collective."""
    handle = inf.handle(model)
    return {
        name: handle.optimizer_state(param)["master"].clone()
        for name, param in model.named_parameters()
    }


def _look(seen: Weights, name: str, module: Any, *_: Any) -> None:
    seen[name] = module.weight.detach().clone()


def test_all_ranks_compute_with_the_same_int8_groups_of_the_exact_weights(tmp_path: Path) -> None:
    """Training and evaluation alike; the state dict shows the exact ones."""
    results = on_ranks(weights_in_forward, tmp_path / "run", 2)
    for rank in range(2):
        assert len(results[rank]) == 2
        for seen, evaluated, shown, masters in results[rank]:
            assert len(seen) > 20
            for name, master in masters.items():
                exact = master.bfloat16()
                assert torch.equal(shown[name], exact), name
                assert torch.equal(seen[name], coarse(exact, 8).to(torch.bfloat16)), name
                assert torch.equal(evaluated[name], seen[name]), name
                assert not torch.equal(seen[name], exact), name
    (_, _, _, before), (_, _, _, after) = results[0]
    assert any(not torch.equal(before[name], after[name]) for name in before)


STAGES: list[dict[str, Any]] = [
    STAGE3,
    STAGE2,
    {"params": "device"},
    {"params": "cpu", "hpz": "cpu"},
]
ROW, COLUMNS, WRITTEN = 1, slice(3, 7), 0.15625


@dataclasses.dataclass
class Shown:
    """Weights as a window, a read and an export show them, and masters before and after a partial
    write."""

    window: Weights
    read: Weights
    exported: Weights
    before: Weights
    after: Weights
    refused: str
    losses: list[float]


def shown_and_written(rank: int, place: Path) -> list[Shown]:
    """For each of STAGES: one step, so that masters are finer than weights; then windows, reads, an
    export and a partial write."""
    found = []
    batch = models.token_batches(1, seed=rank)[0]
    for index, stage in enumerate(STAGES):
        model = models.make(models.llama)
        nvme = {"nvme": place} if "nvme" in stage.values() else {}
        handle = inf.handle(inf.offload(model, inf.Policy(**stage, **nvme, qwz=True)))
        optimizer = inf.AdamW(model.parameters(), lr=1e-2)
        losses = [_step(model, optimizer, batch)]
        before = masters_of(model)
        models.loss_of(model, batch)  # what is gathered is coarse from here on
        with handle.gather(model):
            window = {name: param.detach().clone() for name, param in model.named_parameters()}
        with torch.no_grad():
            models.loss_of(model, batch)
        read = {name: value.clone() for name, value in model.state_dict().items()}
        models.loss_of(model, batch)
        inf.export_safetensors(model, place / f"out{index}")
        models.loss_of(model, batch)
        weight = model.get_parameter(WEIGHT)
        with torch.no_grad(), handle.gather(weight):
            weight[ROW, COLUMNS] = WRITTEN
        after = masters_of(model)
        losses.append(_step(model, optimizer, batch))
        with (
            handle.gather(weight),
            pytest.raises(RuntimeError, match=r"inside of handle\.gather\(\).*qwz=True") as refused,
        ):
            models.loss_of(model, batch)
        handle.close()
        exported = load_file(place / f"out{index}" / "model.safetensors")
        found.append(Shown(window, read, exported, before, after, str(refused.value), losses))
    return found


WEIGHT = "model.layers.1.mlp.down_proj.weight"


def _step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: models.Batch) -> float:
    loss = models.loss_of(model, batch)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss)


@pytest.mark.ranks
def test_windows_reads_and_exports_show_what_rests_and_a_partial_write_changes_nothing_else(
    tmp_path: Path,
) -> None:
    """Although passes before them gathered the same units in int8 groups; a training pass inside a
    window is refused."""
    results = on_ranks(shown_and_written, tmp_path / "run", 2)
    for rank, stages in enumerate(results):
        for stage, shown, first in zip(STAGES, stages, results[0], strict=True):
            with named(rank, stage):
                for name, master in shown.before.items():
                    exact = master.bfloat16()
                    assert torch.equal(shown.window[name], exact), name
                    assert torch.equal(shown.read[name], exact), name
                    assert torch.equal(shown.exported[name], exact), name
                    wanted = master.clone()
                    if name == WEIGHT:
                        # or neighbours could not lose anything
                        assert not torch.equal(master, exact.float())
                        wanted[ROW, COLUMNS] = WRITTEN
                        assert not torch.equal(wanted, master)
                    assert torch.equal(shown.after[name], wanted), name
                    assert torch.equal(first.after[name], wanted), name
                assert WEIGHT.rpartition(".mlp")[0] in shown.refused
        assert all(shown.losses == stages[0].losses for shown in stages)


LEARNING = Training(models.llama, steps=12, rows=4, lr=3e-3, accumulation=1)


@pytest.mark.ranks
def test_training_with_every_switch_learns_as_plain_training_does(tmp_path: Path) -> None:
    """The same batch again and again: the loss falls, near that of the plain run. Two micro-batches
    see what rounding lost."""
    switches: list[dict[str, Any]] = [
        {}, {"qwz": True}, {"qgz": True}, {"qgz": True, "error_feedback": True},
        {"qwz": True, "hpz": "cpu", "qgz": True, "error_feedback": True},
    ]  # fmt: skip
    found = trained(
        [(Repeated(**vars(LEARNING)), {"params": "cpu", **chosen}) for chosen in switches],
        tmp_path / "run",
        (2, 1),
    )
    plain = found[0][0].losses
    for chosen, results in zip(switches, found, strict=True):
        losses = results[0].losses
        with named(chosen, losses):
            assert losses[-1] < 0.8 * losses[0]
            assert losses[-1] < plain[-1] + 0.15 * (plain[0] - plain[-1])


@dataclasses.dataclass(frozen=True)
class Repeated(Training):
    """One batch, in every micro-batch."""

    @property
    def batches(self) -> list[models.Batch]:
        return [super().batches[0]] * (self.steps * self.accumulation)


def gradients_of_rounds(
    rank: int, place: Path
) -> dict[bool, tuple[torch.Tensor, torch.Tensor, float]]:
    """Return, with and without feedback: the sum of the reduced gradients of one weight, the sum of
    the true means, and the largest step of int4."""
    found = {}
    for feedback in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(96, 32, bias=False))
        inf.offload(model, inf.Policy(qgz=True, error_feedback=feedback))
        optimizer = inf.SGD(model.parameters(), lr=0.0)
        came, true, step = torch.zeros(32, 96), torch.zeros(32, 96), 0.0
        for round_ in range(24):
            mine = [
                torch.randn(8, 96, generator=torch.Generator().manual_seed(100 * round_ + other))
                for other in range(2)
            ]
            model(mine[rank]).square().mean().backward()
            gradient = inf.handle(model).full_grad(model[0].weight)
            assert gradient is not None
            optimizer.zero_grad()
            came += gradient
            weight = model.state_dict()["0.weight"]
            grads = [2 * (x @ weight.T).T @ x / (8 * 32) for x in mine]
            true += sum(grads) / 2
            step = max(step, *(float(grad.abs().max()) / 7 for grad in grads))
        inf.handle(model).close()
        found[feedback] = came, true, step
    return found


def test_error_feedback_keeps_the_sum_of_gradients_true(tmp_path: Path) -> None:
    """Without feedback, errors of half a step add up at random. With it only the last round's error
    remains: half a step, and a little more, because the fed-back error widened the range."""
    for found in on_ranks(gradients_of_rounds, tmp_path / "run", 2):
        (came, true, step), (plain, _, _) = found[True], found[False]
        assert (came - true).abs().max() <= 1.3 * step
        assert (came - true).square().mean() < 0.2 * (plain - true).square().mean()
        assert (plain - true).abs().max() <= 24 * 0.51 * step


@pytest.mark.ranks
@pytest.mark.parametrize("mesh", [(2, 2), (2, 1)], ids=["2x2", "2x1"])
def test_volume_across_nodes_is_what_the_paper_counts(
    tmp_path: Path, mesh: tuple[int, int]
) -> None:
    """Traffic of one step, in units of a reduction in bf16: int8 halves a gather, hpz spares the
    gather of backward, int4 quarters the reduction. Scales of 64 values take 2 bytes. The traffic
    of a step is that of three steps less that of two, so the exact gather of the state dict at the
    end does not count."""
    switches: list[dict[str, Any]] = [
        {}, {"qwz": True}, {"hpz": "cpu"}, {"qgz": True}, {"qwz": True, "hpz": "cpu", "qgz": True},
    ]  # fmt: skip
    lengths = [
        Training(models.llama, steps=steps, rows=4, lr=1e-3, accumulation=1, max_norm=None)
        for steps in (2, 3)
    ]
    runs = [
        (length, {**STAGE3, "resident": {"params": 0.0}, **chosen})
        for chosen in switches
        for length in lengths
    ]
    found = trained(runs, tmp_path / "run", mesh, held=COMM)
    total = [
        [sum(result.stats[name] for result in results) for name in COMM[:2]] for results in found
    ]
    sent = [
        [more - less for less, more in zip(two, three, strict=True)]
        for two, three in zip(total[::2], total[1::2], strict=True)
    ]
    gather, reduction = sent[0]
    assert 1.3 * reduction < gather < 2.05 * reduction  # what backward begins with has stayed
    int8, int4 = 66 / 128, 34 / 128
    wanted = [
        (gather, reduction),
        (int8 * gather, reduction),
        (reduction, reduction),
        (gather, int4 * reduction),
        (int8 * reduction, int4 * reduction),
    ]
    for chosen, measured, expected in zip(switches, sent, wanted, strict=True):
        with named(chosen):
            assert measured == pytest.approx(expected, rel=0.05)
    if mesh[1] == 1:
        assert all(
            result.stats[name] == 0 for results in found for result in results for name in COMM[2:]
        )
