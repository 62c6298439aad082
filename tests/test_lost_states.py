"""States that a drive cannot read any more during a run: the step is undone, and they are written
elsewhere, replaced by those of the step before, or named."""

from __future__ import annotations

import errno
import functools
import logging
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import infinity as inf
from infinity._src.engine.handle import offload
from infinity._src.optim import transaction
from infinity._src.params.state_store import StateStore
from infinity.aio import Fault, Seam
from infinity.errors import AioError, StateInvalid, StatesLost, StepUndone
from tests import harness, models, slopes
from tests.durable_runs import die
from tests.harness import assert_same, policy, states_of, values_of
from tests.places import executor_of, first_flat, place_of, spoil

STEPS = 6
KINDS = ("master", "exp_avg", "exp_avg_sq")


def made(place: Path, **values: Any) -> tuple[Any, Any]:
    chosen = policy(place, **{"generations": 2, **values})
    # The fault injector must exist from the beginning to be changed later.
    model = offload(models.make(models.Small), chosen, _seam=Seam())
    return model, inf.AdamW(model.parameters(), lr=1e-2)


def step(model: Any, optimizer: Any, batch: Any) -> float:
    loss = harness.step(model, optimizer, batch)
    inf.handle(model).flush()
    return loss


def taken_three(place: Path, **values: Any) -> tuple[Any, Any]:
    """A model that has taken three steps."""
    model, optimizer = made(place, **values)
    for batch in models.token_batches(STEPS)[:3]:
        step(model, optimizer, batch)
    return model, optimizer


def lose(model: Any, start: int, stop: int) -> None:
    """Let every read of these bytes fail from now on."""
    fault = Fault("read", 0, persistent=True, start=start, stop=stop)
    executor_of(model).set_seam(Seam(fault=fault))


@functools.cache
def reference() -> tuple[list[float], list[Any], list[Any]]:
    """The losses of steps, and values and states before each and after the last."""
    model = offload(models.make(models.Small), inf.Policy(params="cpu", optim="cpu"))
    optimizer = inf.AdamW(model.parameters(), lr=1e-2)
    losses, values, states = [], [values_of(model)], [states_of(model)]
    for batch in models.token_batches(STEPS):
        losses.append(step(model, optimizer, batch))
        values.append(values_of(model))
        states.append(states_of(model))
    inf.handle(model).close()
    return losses, values, states


def test_the_repeated_step_writes_unreadable_parameters_elsewhere(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    losses, values, _ = reference()
    batches = models.token_batches(STEPS)
    model, optimizer = made(tmp_path)
    got = [step(model, optimizer, batch) for batch in batches[:3]]
    place = place_of(model, 0)
    lose(model, place.offset, place.offset + 4096)
    with pytest.raises(StepUndone, match="a unit cannot be read"):
        step(model, optimizer, batches[3])
    optimizer.zero_grad()
    assert "The range is not used again" in caplog.text
    assert_same(values_of(model), values[2])
    assert got == losses[:3]
    # Repeat the third step and continue: the range still fails, but is not read.
    assert [step(model, optimizer, batch) for batch in batches[2:]] == losses[2:]
    assert_same(values_of(model), values[STEPS])
    assert inf.handle(model).stats().steps_undone == 1
    inf.handle(model).close()


@pytest.mark.parametrize("what", ["parameters", "states"])
def test_a_bad_area_of_many_chunks_undoes_one_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    losses, values, _ = reference()
    batches = models.token_batches(STEPS)
    with slopes.tiny_chunks():
        model, optimizer = taken_three(tmp_path)
    section = 0 if what == "parameters" else 2
    chunks = inf.handle(model).parts.tiers.store.chunks_of(first_flat(model))
    assert len(chunks) > 2
    for chunk in range(len(chunks)):
        spoil(model, place_of(model, section, chunk=chunk))
    if what == "states":
        with pytest.raises(StatesLost) as caught:
            step(model, optimizer, batches[3])
        lost = sum(each.stop - each.start for each in caught.value.damaged)
        assert lost == sum(param.numel for param in first_flat(model).params)
        with pytest.raises(StatesLost):
            inf.handle(model).close()
        return
    with pytest.raises(StepUndone):
        step(model, optimizer, batches[3])
    optimizer.zero_grad()
    assert caplog.text.count("The range is not used again") == len(chunks)
    assert [step(model, optimizer, batch) for batch in batches[2:]] == losses[2:]
    assert_same(values_of(model), values[STEPS])
    assert inf.handle(model).stats().steps_undone == 1
    inf.handle(model).close()


def test_a_read_that_passes_by_the_time_of_the_undo_costs_no_place(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    losses, _, _ = reference()
    batches = models.token_batches(STEPS)
    model, optimizer = taken_three(tmp_path)
    (at, *_) = inf.handle(model).parts.tiers.store.chunks_of(first_flat(model))
    error = AioError("read", errno=errno.EIO, path=str(tmp_path), op="read", chunk=at.id)
    with pytest.raises(StepUndone):
        inf.handle(model).pipeline.read_failed(error)
    assert "not used again" not in caplog.text
    assert [step(model, optimizer, batch) for batch in batches[2:]] == losses[2:]
    inf.handle(model).close()


def test_a_drive_that_answers_at_the_third_read_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses, values, _ = reference()
    batches = models.token_batches(STEPS)
    model, optimizer = made(tmp_path)
    got = [step(model, optimizer, batch) for batch in batches[:3]]
    lose(model, 0, 1 << 40)
    with pytest.raises(StepUndone):
        step(model, optimizer, batches[3])
    optimizer.zero_grad()
    # There is no step to undo: the drive is read again.
    asked = []

    def answers_again(_pause_s: float) -> None:
        asked.append(len(asked))
        if len(asked) == 2:
            executor_of(model).set_seam(Seam())

    monkeypatch.setattr(transaction.time, "sleep", answers_again)
    got[2:] = [step(model, optimizer, batch) for batch in batches[2:]]
    assert len(asked) == 2
    assert got == losses
    assert_same(values_of(model), values[STEPS])
    inf.handle(model).close()


@pytest.mark.parametrize("update", ["deferred", "backward"])
@pytest.mark.parametrize("reading", [1, 2])
def test_the_next_call_completes_an_interrupted_undo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, update: str, reading: int
) -> None:
    """Ctrl-C while chunks are read, before the states go back (1), and after (2)."""
    losses, values, _ = reference()
    batches = models.token_batches(STEPS)
    model, optimizer = made(tmp_path, update=update)
    handle, verify, readings = inf.handle(model), StateStore.verify, []

    def interrupted(self: StateStore, chunks: Any, **reads: int) -> Any:
        readings.append(len(chunks))
        if len(readings) == reading:
            raise KeyboardInterrupt
        return verify(self, chunks, **reads)

    monkeypatch.setattr(StateStore, "verify", interrupted)
    got, met = dict[int, float](), []
    while (taken := handle.pipeline.steps) < STEPS:
        try:
            loss = models.loss_of(model, batches[taken])
            if taken == 3 and not met:
                # During backward, when updates of other units have run ahead of the step.
                handle.parts.unsharder.invalidate(handle.parts.split.units[1])
                place = place_of(model, 0)
                lose(model, place.offset, place.offset + 4096)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            got[taken] = loss.item()
        except (KeyboardInterrupt, StepUndone) as error:
            met.append(type(error))
            executor_of(model).set_seam(Seam())
            optimizer.zero_grad()
    assert met == [KeyboardInterrupt, StepUndone]
    assert list(got.values()) == losses
    assert_same(values_of(model), values[STEPS])
    handle.close()


def test_an_undo_for_an_update_mends_what_a_gather_met_beside_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    losses, _, _ = reference()
    batches = models.token_batches(STEPS)
    model, optimizer = taken_three(tmp_path)
    spoil(model, place_of(model, 0))
    (at, *_) = inf.handle(model).parts.tiers.store.chunks_of(first_flat(model))
    of_update = AioError("write", errno=errno.EIO, path=str(tmp_path), op="write", chunk=0)
    of_gather = AioError("read", errno=errno.EIO, path=str(tmp_path), op="read", chunk=at.id)
    inf.handle(model).pipeline.transaction.undo(of_update, tuple, of_gather)
    assert "The range is not used again" in caplog.text
    assert [step(model, optimizer, batch) for batch in batches[2:]] == losses[2:]
    inf.handle(model).close()


@pytest.mark.parametrize("how", ["spoilt", "unreadable"])
def test_states_without_another_copy_are_named_by_every_call(
    tmp_path: Path, how: str
) -> None:
    batches = models.token_batches(STEPS)
    model, optimizer = taken_three(tmp_path)
    place = place_of(model, 2)
    if how == "spoilt":
        spoil(model, place)
    else:
        # A failing drive may recover, so it is tried three times.
        lose(model, place.offset, place.offset + 4096)
        for _ in range(2):
            with pytest.raises(StepUndone):
                step(model, optimizer, batches[3])
            optimizer.zero_grad()
    with pytest.raises(StatesLost, match="cannot read the states") as caught:
        step(model, optimizer, batches[3])
    (found,) = [each for each in caught.value.damaged if each.name == place.name]
    assert (found.start, found.stop) == (place.start, place.stop)
    assert Path(found.path) == tmp_path
    assert ("not what was written" if how == "spoilt" else "Input/output error") in found.reason
    # As for every background fault, `close` raises it after freeing everything.
    handle = inf.handle(model)
    for again in (lambda: step(model, optimizer, batches[3]), handle.flush, handle.close):
        with pytest.raises(StatesLost):
            again()
    assert handle.closed


@pytest.mark.parametrize("durable", [False, True])
def test_older_states_replace_lost_ones(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, durable: bool
) -> None:
    _, _, states = reference()
    batches = models.token_batches(STEPS)
    model, optimizer = taken_three(tmp_path, damaged="from-older", durable=durable)
    place = place_of(model, 2)
    spoil(model, place)
    with caplog.at_level(logging.WARNING), pytest.raises(StepUndone):
        step(model, optimizer, batches[3])
    optimizer.zero_grad()
    assert "They have the values and moments before their last update" in caplog.text
    # Whole chunks: masters and both moments of the same elements, and nothing else.
    found, older = states_of(model), set()
    for name, now in states[3].items():
        for key in KINDS:
            differs = found[name][key] != now[key]
            assert torch.equal(found[name][key][differs], states[2][name][key][differs])
            if key == "master" and differs.any():
                older.add(name)
    assert place.name in older
    part = slice(place.start, place.stop)
    for key in KINDS:
        was = states[2][place.name][key].flatten()[part]
        assert torch.equal(found[place.name][key].flatten()[part], was)
    assert inf.handle(model).stats().older_chunks == 1
    if durable:
        inf.handle(model).flush()
        step(model, optimizer, batches[3])
        after = values_of(model)
        die(model)
        model, optimizer = made(tmp_path, durable=True)
        assert inf.restore(model, optimizer, tmp_path).step == 4
        assert_same(values_of(model), after)
    for batch in batches[4:]:
        step(model, optimizer, batch)
    inf.handle(model).close()


def test_states_of_before_a_restore_are_no_older_states(tmp_path: Path) -> None:
    batches = models.token_batches(STEPS)
    model, optimizer = made(tmp_path, damaged="from-older")
    step(model, optimizer, batches[0])
    inf.save(model, optimizer, tmp_path / "save").wait()
    for batch in batches[1:3]:
        step(model, optimizer, batch)
    inf.restore(model, optimizer, tmp_path / "save")
    inf.handle(model).flush()
    spoil(model, place_of(model, 2))
    with pytest.raises(StatesLost):
        step(model, optimizer, batches[1])
    with pytest.raises(StatesLost):
        inf.handle(model).close()


@pytest.mark.parametrize("generations", [1, 2])
def test_a_gather_with_a_failed_read_is_repeated(tmp_path: Path, generations: int) -> None:
    losses, _, _ = reference()
    batches = models.token_batches(STEPS)
    model, optimizer = made(tmp_path, generations=generations)
    got = [step(model, optimizer, batch) for batch in batches[:2]]
    # Including the job's own repair.
    executor_of(model).set_seam(Seam(fault=Fault("read", 0, lasting=True)))
    with torch.no_grad():
        models.loss_of(model, batches[0])
    assert executor_of(model).set_seam(Seam()) >= 2
    got += [step(model, optimizer, batch) for batch in batches[2:]]
    assert got == losses
    assert inf.handle(model).stats().steps_undone == 0
    inf.handle(model).close()


def test_no_undo_goes_back_behind_a_restore(tmp_path: Path) -> None:
    batches = models.token_batches(STEPS)
    model, optimizer = made(tmp_path)
    step(model, optimizer, batches[0])
    inf.save(model, optimizer, tmp_path / "save").wait()
    for batch in batches[1:4]:
        step(model, optimizer, batch)
    inf.restore(model, optimizer, tmp_path / "save")
    place = place_of(model, 0)
    lose(model, place.offset, place.offset + 4096)
    with pytest.raises(StatesLost), torch.no_grad():
        models.loss_of(model, batches[0])
    assert inf.handle(model).pipeline.steps == 1
    with pytest.raises(StatesLost):
        inf.handle(model).close()


def test_a_save_under_way_has_its_step_though_that_is_undone(tmp_path: Path) -> None:
    _, values, _ = reference()
    model, optimizer = taken_three(tmp_path)
    # A gather's fault undoes the third step while its save has read next to nothing.
    executor_of(model).set_seam(Seam(read_bytes_per_s=1e6))
    save = inf.save(model, optimizer, tmp_path / "save")
    parts = inf.handle(model).parts
    chunk = int(parts.tiers.store[parts.split.units[1].flats[0]].ids[0])
    error = AioError("lost", errno=errno.EIO, path=str(tmp_path), op="read", chunk=chunk)
    with pytest.raises(StepUndone):
        inf.handle(model).pipeline.read_failed(error)
    executor_of(model).set_seam(Seam())
    save.wait()
    assert_same(values_of(model), values[2])
    other, its = made(tmp_path)
    assert inf.restore(other, its, tmp_path / "save").step == 3
    assert_same(values_of(other), values[3])
    inf.handle(other).close()
    inf.handle(model).close()


def test_faults_of_an_evaluation_that_pass_are_not_added_up(tmp_path: Path) -> None:
    model, optimizer = made(tmp_path)
    step(model, optimizer, models.token_batches(1)[0])
    transaction, parts = inf.handle(model).pipeline.transaction, inf.handle(model).parts
    chunk = int(parts.tiers.store[parts.split.units[1].flats[0]].ids[0])
    error = AioError("lost", errno=errno.EIO, path=str(tmp_path), op="read", chunk=chunk)
    for _ in range(4):
        transaction.mend(error)
    inf.handle(model).close()


def test_where_no_step_was_taken_none_is_undone(tmp_path: Path) -> None:
    batches = models.token_batches(STEPS)
    model, _ = made(tmp_path)
    place = place_of(model, 0)
    lose(model, place.offset, place.offset + 4096)
    for _ in range(2):
        with pytest.raises(StatesLost), torch.no_grad():
            models.loss_of(model, batches[0])
    assert inf.handle(model).pipeline.steps_undone == 0
    with pytest.raises(StatesLost):
        inf.handle(model).close()


@settings(max_examples=4, deadline=None, derandomize=True, database=None)
@given(block=st.integers(0, 110), when=st.integers(1, 3), size=st.sampled_from([1, 8]))
def test_any_block_that_cannot_be_read_costs_what_was_promised(
    block: int, when: int, size: int
) -> None:
    losses, values, _ = reference()
    batches = models.token_batches(STEPS)
    with tempfile.TemporaryDirectory() as directory:
        model, optimizer = made(Path(directory))
        got: list[float] = []
        damaged: tuple[object, ...] = ()
        undone = 0
        while len(got) < STEPS:
            if len(got) == when and not undone:
                lose(model, 4096 * block, 4096 * (block + size))
            taken = inf.handle(model).pipeline.steps
            try:
                got = [*got[:taken], step(model, optimizer, batches[taken])]
            except StepUndone:
                optimizer.zero_grad()
                undone += 1
                assert undone < 8
            except StatesLost as error:
                damaged = error.damaged
                break
        if len(got) == STEPS:
            assert got == losses
            assert_same(values_of(model), values[STEPS])
            inf.handle(model).close()
            return
        assert damaged
        with pytest.raises(StatesLost):
            inf.handle(model).close()


def test_older_states_are_not_taken_while_the_last_can_be_read(tmp_path: Path) -> None:
    """Unreadable spilled gradients are no lost states."""
    _, _, states = reference()
    model, _held = taken_three(tmp_path, damaged="from-older")
    repair = inf.handle(model).pipeline.transaction.repair
    (flat, *_) = inf.handle(model).parts.split.units[1].flats
    chunk = int(inf.handle(model).parts.tiers.store[flat].ids[-1])
    beside = AioError("read", errno=errno.EIO, path=str(tmp_path), op="read", chunk=chunk)
    for _ in range(2):
        repair.mend(repair.misread([beside]))
    with pytest.raises(StateInvalid, match="No states are lost") as caught:
        repair.mend(repair.misread([beside]))
    assert flat.params[0].name in str(caught.value)
    assert not isinstance(caught.value, StatesLost)
    assert inf.handle(model).stats().older_chunks == 0
    assert_same(states_of(model), states[3])
    inf.handle(model).close()
