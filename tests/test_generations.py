"""Two generations: a step is a transaction, and update="backward" supports every loop, with the
reference loop's bits."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import infinity as inf
from infinity._src.engine.handle import offload
from infinity._src.optim.speculative_update import History
from infinity.aio import Fault, Seam
from infinity.errors import NonFiniteGradient, StepUndone
from tests import harness, models
from tests.harness import Training, assert_same, step, values_of
from tests.marks import alternating, mostly_slow

NVME = {"params": "nvme", "optim": "nvme", "ram": "min"}
SMALL = Training(models.Small, steps=9, accumulation=1, max_norm=None)
CLIPS = {"never": 1e6, "always": 0.05, "sometimes": 1.46}


def policy(tmp_path: Path, **values: Any) -> inf.Policy:
    if "nvme" in values.values():
        values.setdefault("nvme", tmp_path)
    return inf.Policy(**{"generations": 2, **values})


@pytest.mark.parametrize(("clip", "accumulation"), alternating(CLIPS, [1, 2]))
def test_speculation_changes_no_bit_however_often_clipping_forbids_it(tmp_path, clip, accumulation):
    max_norm = CLIPS[clip] * (0.68 if clip == "sometimes" and accumulation == 2 else 1.0)
    training = dataclasses.replace(
        SMALL, max_norm=max_norm, accumulation=accumulation, steps=14 if clip == "sometimes" else 6
    )
    ours = harness.offloaded(training, policy(tmp_path, update="backward", **NVME))
    theirs = harness.reference(training)
    assert_same(ours, theirs)
    fired = [norm > max_norm for norm in theirs.norms]
    assert {"never": not any(fired), "always": all(fired), "sometimes": len(set(fired)) == 2}[
        clip
    ], theirs.norms
    kept, withdrawn, units = (
        ours.stats.updates_ahead,
        ours.stats.updates_withdrawn,
        ours.stats.units,
    )
    if clip == "never":  # the first step shows the number of micro-batches
        assert (kept, withdrawn) == (units * (training.steps - 1), 0)
    elif clip == "always":  # after the first two steps speculation stops
        assert (kept, withdrawn) == (0, units)
    else:
        assert kept >= units
        assert withdrawn >= units


def test_what_was_in_vain_twice_waits_and_comes_back_by_the_steps_alone() -> None:
    history = History()
    seen = []
    for right in [True, False, True, True, False, False, True, True, True, True, False, True]:
        history.add(right)
        seen.append(history.speculates)
    assert seen == [True, True, True, True, False, False, False, False, False, True, True, True]


def cleared(model: Any, optimizer: Any, batches: list[Any]) -> None:
    """Another model's loss goes through this one, and its gradients are cleared."""
    models.loss_of(model, batches[0]).backward()
    optimizer.zero_grad()


def skipped(model: Any, optimizer: Any, batches: list[Any]) -> None:
    (models.loss_of(model, batches[0]) * float("nan")).backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("in_vain", [cleared, skipped], ids=lambda each: each.__name__)
def test_a_backward_that_no_step_follows_is_remembered_as_in_vain(tmp_path, batches, in_vain):
    model, optimizer = speculating(tmp_path, on_nonfinite="skip")
    step(model, optimizer, batches[0])
    for batch in batches[1:7]:
        in_vain(model, optimizer, batches)
        step(model, optimizer, batch)
    stats = inf.handle(model).stats()
    assert stats.updates_withdrawn == stats.updates_ahead == 2 * stats.units
    for batch in batches[:6]:  # a plain loop again: speculation resumes
        step(model, optimizer, batch)
    assert inf.handle(model).stats().updates_ahead == 4 * stats.units
    inf.handle(model).close()


def small() -> Any:
    return models.make(models.Small)


@pytest.fixture
def batches() -> list[Any]:
    return models.token_batches(12)


def plain() -> tuple[Any, Any]:
    """The same model without generations, to compare with."""
    model = offload(small(), inf.Policy(params="cpu", optim="cpu"))
    return model, inf.AdamW(model.parameters(), lr=1e-2)


def speculating(tmp_path: Path, **values: Any) -> tuple[Any, Any]:
    seam = values.pop("seam", None)
    model = offload(small(), policy(tmp_path, update="backward", **NVME, **values), _seam=seam)
    return model, inf.AdamW(model.parameters(), lr=1e-2)


def writes_of(model: Any) -> int:
    """Count the writes of the drives so far, and close the model."""
    handle = inf.handle(model)
    handle.pipeline.wait()
    count = sum(drive.writes for drive in handle.parts.tiers.executor.stats().drives)
    handle.close()
    return count


def as_plain(tmp_path: Path, loop: Callable[[Any, Any], list[Any]], **values: Any) -> Any:
    """Run a loop on a plain and on a speculating model, and compare results and parameters. Returns
    the second's counters."""
    found = []
    for model, optimizer in (plain(), speculating(tmp_path, **values)):
        found.append((loop(model, optimizer), values_of(model)))
        stats = inf.handle(model).stats()
        inf.handle(model).close()
    (ours, our_values), (theirs, their_values) = found
    assert ours == theirs
    assert_same(our_values, their_values)
    return stats


@pytest.mark.parametrize("mode", ["skip", "raise"])
def test_gradients_that_are_not_finite_leave_no_trace(tmp_path, batches, mode):
    def loop(model: Any, optimizer: Any) -> list[Any]:
        got = [step(model, optimizer, batch) for batch in batches[:3]]
        handle = inf.handle(model)
        if handle.policy.speculates:
            (models.loss_of(model, batches[3]) * float("nan")).backward()
            # all are written already
            assert len(handle.parts.mode._ahead) == handle.stats().units
            if mode == "raise":
                with pytest.raises(NonFiniteGradient, match="no state was changed"):
                    optimizer.step()
            else:
                optimizer.step()
            assert handle.stats().updates_withdrawn == handle.stats().units
            optimizer.zero_grad()
        return got + [step(model, optimizer, batch) for batch in batches[4:7]]

    as_plain(tmp_path, loop, on_nonfinite=mode)


def evaluate(model: Any, batch: Any) -> Any:
    with torch.no_grad():
        return models.loss_of(model, batch).item()


def write(model: Any, batch: Any) -> Any:
    weight = next(iter(model.parameters()))
    with torch.no_grad(), inf.handle(model).gather(weight):
        weight.mul_(0.5)
    return None


def moment(model: Any, batch: Any) -> Any:
    weight = next(iter(model.parameters()))
    state = inf.handle(model).optimizer_state(weight)
    state["exp_avg"] = state["exp_avg"] * 2
    return float(state["exp_avg_sq"].sum())


def again(model: Any, batch: Any) -> Any:
    loss = models.loss_of(model, batch)
    loss.backward()
    return loss.item()


def rate(model: Any, batch: Any) -> Any:
    return "lr"


def values(model: Any, batch: Any) -> Any:
    return float(sum(value.float().abs().sum() for value in model.state_dict().values()))


@pytest.mark.parametrize(
    "look",
    mostly_slow([evaluate, write, moment, again, rate, values], evaluate, write, again),
    ids=lambda look: look.__name__,
)
def test_updates_ahead_of_their_step_are_never_visible(tmp_path, batches, look):
    def loop(model: Any, optimizer: Any) -> list[Any]:
        got: list[Any] = [step(model, optimizer, batch) for batch in batches[:2]]
        for batch in batches[2:6]:
            models.loss_of(model, batch).backward()
            got.append(look(model, batches[7]))
            if got[-1] == "lr":
                optimizer.param_groups[0]["lr"] *= 0.5
            optimizer.step()
            optimizer.zero_grad()
        return got + [step(model, optimizer, batch) for batch in batches[6:]]

    stats = as_plain(tmp_path, loop)
    assert stats.updates_withdrawn >= stats.units


@pytest.mark.parametrize("reads", ["gather", "forward"])
def test_a_hook_inside_backward_sees_no_update_that_ran_ahead(tmp_path, batches, reads):
    def loop(model: Any, optimizer: Any) -> list[Any]:
        first, *_, last = model.parameters()
        got: list[Any] = []

        def look(_param: Any) -> None:
            with torch.no_grad(), inf.handle(model).gather(last):
                got.append(
                    models.loss_of(model, batches[7]).item()
                    if reads == "forward"
                    else float(last.float().sum())
                )

        first.register_post_accumulate_grad_hook(look)
        losses = [step(model, optimizer, batch) for batch in batches[:5]]
        return got + losses

    stats = as_plain(tmp_path, loop)
    assert 0 < stats.updates_withdrawn <= 2 * stats.units


@pytest.mark.parametrize(
    ("update", "nth", "made"),
    alternating(["deferred", "backward"], [0, 3, 7], [inf.AdamW, inf.Muon]),
)
def test_a_step_with_a_fault_is_undone_and_training_continues(tmp_path, batches, update, nth, made):
    reference = offload(small(), inf.Policy())
    its_optimizer = made(reference.parameters(), lr=1e-2)
    wanted = [step(reference, its_optimizer, batch) for batch in batches[:5]]
    probe = offload(small(), policy(tmp_path, update=update, **NVME))
    optimizer = made(probe.parameters(), lr=1e-2)
    for batch in batches[:2]:
        step(probe, optimizer, batch)
    before = writes_of(probe)

    seam = Seam(fault=Fault("write", before + nth, lasting=True))
    model = offload(small(), policy(tmp_path, update=update, **NVME), _seam=seam)
    optimizer = made(model.parameters(), lr=1e-2)
    got, undone = [], 0
    while len(got) < 5:
        taken = len(got)
        try:
            got.append(step(model, optimizer, batches[taken]))
            inf.handle(model).flush()
        except StepUndone:
            del got[taken:]
            optimizer.zero_grad()
            undone += 1
        assert {entry["step"] for entry in optimizer.state_dict()["state"].values()} in (
            {len(got)},
            {0} if not got else set(),
        )
    assert undone == 1
    assert got == wanted
    ours, theirs = values_of(model), values_of(reference)
    assert_same(ours, theirs)
    assert inf.handle(model).stats().steps_undone == 1
    inf.handle(model).close()
    inf.handle(reference).close()


def test_what_the_user_writes_is_not_undone_behind_his_back(tmp_path, batches):
    """An update that failed after `gather()` retained a write would undo the write with the step.
    """

    def run(model: Any, optimizer: Any) -> dict[str, torch.Tensor]:
        weights = list(model.parameters())[:2]
        step(model, optimizer, batches[0])
        inf.handle(model).flush()
        for undone in range(2):
            step(model, optimizer, batches[1])
            try:
                with torch.no_grad(), inf.handle(model).gather(weights):
                    for weight in weights:
                        weight.mul_(2.0)
                break
            except StepUndone:
                assert not undone
        assert inf.handle(model).stats().steps_undone == (inf.handle(model).policy.generations == 2)
        step(model, optimizer, batches[2])
        values = values_of(model)
        inf.handle(model).close()
        return values

    slow = policy(tmp_path, **NVME)
    probe = offload(small(), slow)
    optimizer = inf.AdamW(probe.parameters(), lr=1e-2)
    step(probe, optimizer, batches[0])
    writes = writes_of(probe)
    model = offload(
        small(),
        slow,
        _seam=Seam(fault=Fault("write", writes + 4, lasting=True), write_bytes_per_s=5e6),
    )
    ours = run(model, inf.AdamW(model.parameters(), lr=1e-2))
    theirs = run(*plain())
    assert_same(ours, theirs)


@pytest.mark.parametrize("order", ["together", "twice"])
def test_a_graph_that_runs_again_meets_the_values_that_it_saved(tmp_path, batches, order):
    def loop(model: Any, optimizer: Any) -> list[Any]:
        got = [step(model, optimizer, batch) for batch in batches[:3]]
        first = models.loss_of(model, batches[3])
        second = models.loss_of(model, batches[4]) if order == "together" else first
        first.backward(retain_graph=order == "twice")
        second.backward()  # the engine took the first for the last of the step
        optimizer.step()
        optimizer.zero_grad()
        return got + [step(model, optimizer, batch) for batch in batches[5:]]

    stats = as_plain(tmp_path, loop)
    assert stats.updates_withdrawn >= stats.units


def test_an_interrupted_submission_leaves_no_unknown_update(
    tmp_path, batches, monkeypatch
):
    def loop(model: Any, optimizer: Any) -> list[Any]:
        got = [step(model, optimizer, batch) for batch in batches[:3]]
        pipeline = inf.handle(model).pipeline
        if inf.handle(model).policy.speculates:
            start = pipeline.start

            def interrupted(*args: Any, **values: Any) -> Any:
                start(*args, **values)
                raise KeyboardInterrupt

            with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
                patch.setattr(pipeline, "start", interrupted)
                models.loss_of(model, batches[3]).backward()
            optimizer.zero_grad()
        return got + [step(model, optimizer, batch) for batch in batches[4:8]]

    as_plain(tmp_path, loop)


def test_counts_of_a_class_of_torch_go_back_with_all_steps_since_the_commit(tmp_path, batches):
    """A durable run that commits every third step undoes up to three at once."""

    def begun(seam: Seam | None, place: Path) -> tuple[Any, Any]:
        place.mkdir()
        values = {**NVME, "nvme": place, "durable": True, "durable_every": 3}
        model = offload(small(), inf.Policy(**values), _seam=seam)
        optimizer = inf.Elementwise(torch.optim.Adagrad, model.parameters(), lr=1e-2)
        for batch in batches[:2]:
            step(model, optimizer, batch)
        return model, optimizer

    model, _ = begun(None, tmp_path / "probe")
    fault = Fault("write", writes_of(model) + 3, lasting=True)
    model, optimizer = begun(Seam(fault=fault), tmp_path / "struck")
    with pytest.raises(StepUndone):
        step(model, optimizer, batches[2])
    assert inf.handle(model).pipeline.steps == 0
    assert {entry["step"] for entry in optimizer.state_dict()["state"].values()} <= {0}
    optimizer.zero_grad()
    for batch in batches[:3]:
        step(model, optimizer, batch)
    assert {entry["step"] for entry in optimizer.state_dict()["state"].values()} == {3}
    inf.handle(model).close()
