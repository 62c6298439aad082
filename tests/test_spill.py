"""Gradients beyond the budget spill to NVMe, with the same bits as in memory, and the predicted
traffic. Models, dtypes and loops: the rows of test_matrix.py with the least `ram`."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import infinity as inf
from infinity._src.cabi.records import CHUNK_NUMEL
from infinity._src.engine.handle import offload
from infinity.aio import Fault, Seam
from infinity.errors import AioError, BudgetError
from tests import harness, models
from tests.harness import Training, assert_same, values_of
from tests.marks import mostly_slow

deep = functools.partial(models.llama, layers=5)
DEEP = Training(deep, steps=3, accumulation=2)


def policy(tmp_path: Path, **values: Any) -> inf.Policy:
    """Everything on NVMe in small units, nothing resident, so that even a small model must spill.
    """
    nowhere = {"params": 0.0, "optim": 0.0}
    values = {
        "params": "nvme",
        "optim": "nvme",
        "resident": nowhere,
        "unit_bytes_max": 4096,
    } | values
    return inf.Policy(nvme=tmp_path, **values)


@functools.lru_cache
def least(training: Training, **values: Any) -> int:
    """Return the smallest `ram` that works with spilling, from the error of a smaller one."""
    chosen = policy(Path("/tmp"), ram=1, grads="nvme", **values)
    return harness.least_ram(training.model(), chosen)


def run(
    training: Training, tmp_path: Path, *, more: int = 0, seam: Seam | None = None, **values: Any
) -> harness.Run:
    """A run in the smallest budget, or in `more` bytes than that."""
    return harness.offloaded(
        training,
        policy(tmp_path, ram=least(training, **values) + more, grads="nvme", **values),
        seam=seam,
    )


@pytest.mark.slow
@settings(
    max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(share=st.floats(0.0, 1.0), delay=st.sampled_from([0, 800]), seed=st.integers(0, 9))
def test_any_budget_and_any_timing_give_the_same_bits(
    share: float, delay: int, seed: int, tmp_path: Path
) -> None:
    more = int(share * 240_000)
    result = run(DEEP, tmp_path, more=more, seam=Seam(delay_us_max=delay, seed=seed))
    assert_same(result, harness.reference(DEEP))


def test_more_ram_spills_less_and_all_of_it_only_below_the_least(tmp_path: Path) -> None:
    training = Training(deep, steps=1)
    whole = harness.offloaded(training, policy(tmp_path, ram="min", grads="nvme")).stats
    assert whole.spilled_bytes == 0
    at_least = harness.offloaded(
        training, policy(tmp_path, ram=whole.ram_min_bytes, grads="nvme")
    ).stats
    assert at_least.spilled_bytes == 0
    spilled = [
        run(training, tmp_path, more=more).stats.spilled_bytes for more in (0, 40_000, 80_000)
    ]
    assert spilled == sorted(spilled, reverse=True)
    assert spilled[0] > spilled[-1] > 0
    with pytest.raises(BudgetError, match="grads='nvme'"):
        harness.offloaded(training, policy(tmp_path, ram=whole.ram_min_bytes - 1))


def test_a_micro_batch_moves_each_gradient_there_and_back(tmp_path: Path) -> None:
    """One unit per layer; the states also move as usual: once in each direction."""
    accumulation = 3
    training = Training(functools.partial(models.llama, layers=12), accumulation=accumulation)
    short, long = [
        run(dataclasses.replace(training, steps=steps), tmp_path, unit_bytes_max=1 << 20).stats
        for steps in (1, 2)
    ]
    states, grads = short.nvme_bytes, short.spilled_bytes
    window = short.staging_bytes // 3
    assert grads > 6 * window
    read = long.bytes_read - long.params_read_bytes - short.bytes_read + short.params_read_bytes
    assert long.bytes_written - short.bytes_written == states + accumulation * grads
    saved = (states + accumulation * grads) - read  # the part that a window still held
    assert 0 <= saved <= accumulation * 3 * window


@pytest.mark.parametrize("update", ["delayed", "backward"])
def test_other_update_modes(update: str, tmp_path: Path) -> None:
    training = Training(deep, max_norm=None, no_sync=True)
    # Without accumulation update="backward" has no gradients, so `least` gets "deferred".
    ram = least(training, **({} if update == "backward" else {"update": update}))
    values: dict[str, Any] = {"update": update, "delayed_warmup": 1}
    spilled = harness.offloaded(training, policy(tmp_path, ram=ram, grads="nvme", **values))
    assert spilled.stats.spilled_bytes > 0
    delayed = 1 if update == "delayed" else None
    assert_same(spilled, harness.reference(dataclasses.replace(training, delayed=delayed)))


@pytest.mark.slow
def test_units_of_several_chunks_keep_their_bits_whatever_the_timing(tmp_path: Path) -> None:
    """Enough layers that spilling saves memory: slots grow by the section of gradients."""
    wide = Training(functools.partial(models.llama, layers=8, hidden=288), accumulation=3)
    result = run(wide, tmp_path, unit_bytes_max=4 << 20, seam=Seam(delay_us_max=1500, seed=8))
    # windows are reused
    assert result.stats.spilled_bytes > result.stats.staging_bytes > 3 * 2 * CHUNK_NUMEL
    assert_same(result, harness.reference(wide))


def scaled_by_hand(model: nn.Module, step: int) -> list[float]:
    """Scale every third gradient, as loops do between micro-batches. Returns the L1 norms of the
    first five before."""
    grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    seen = [torch.linalg.vector_norm(grad, 1.0).item() for grad in grads[:5]]
    for index, grad in enumerate(grads):
        if (index + step) % 3 == 0:
            grad.mul_(0.5)
    return seen


def test_scaling_and_other_norms_between_micro_batches(tmp_path: Path) -> None:
    training = dataclasses.replace(DEEP, between=scaled_by_hand)
    plain = harness.offloaded(training, policy(tmp_path, ram="min"))
    assert_same(run(training, tmp_path), plain)


def interfere(model: nn.Module, step: int) -> None:
    """A backward whose gradients are cleared again, one that raises half-way, and zeros instead of
    None."""
    batch = models.token_batches(1, seed=step)[0]
    loss = models.loss_of(model, batch)
    if step % 2:

        def stop(_grad: torch.Tensor) -> None:
            raise RuntimeError("stop")

        inner = dict(model.named_modules())["model.layers.4"]
        hook = inner.register_full_backward_hook(lambda *_args: stop(loss))
        with pytest.raises(RuntimeError, match="stop"):
            models.loss_of(model, batch).backward()
        hook.remove()
    else:
        loss.backward()
    model.zero_grad(set_to_none=True)


def test_exceptions_in_backward_leave_nothing_behind(tmp_path: Path) -> None:
    training = dataclasses.replace(DEEP, before=interfere)
    assert_same(run(training, tmp_path), harness.reference(training))


def test_assigned_gradients_zeroed_ones_and_several_optimizers(tmp_path: Path) -> None:
    def train(chosen: inf.Policy) -> dict[str, torch.Tensor]:
        with harness.one_thread():
            model = offload(models.make(deep), chosen)
            parameters = list(model.parameters())
            optimizers = [inf.AdamW(parameters[::2], lr=1e-2), inf.AdamW(parameters[1::2], lr=1e-3)]
            for step, batch in enumerate(models.token_batches(4)):
                models.loss_of(model, batch).backward()
                for index, parameter in enumerate(parameters):
                    assert parameter.grad is not None
                    if (index + step) % 7 == 0:
                        values: Any = parameter.grad
                        parameter.grad = values.materialize().clamp(-0.01, 0.01).to(parameter.dtype)
                    elif (index + step) % 7 == 1:
                        parameter.grad = None
                optimizers[step % 2].step()
                optimizers[step % 2].zero_grad(set_to_none=step == 1)
                if step == 2:
                    model.zero_grad(set_to_none=False)
            values = values_of(model)
            inf.handle(model).close()
            return values

    expected = train(policy(tmp_path, ram="min"))
    found = train(policy(tmp_path, ram=least(Training(deep)), grads="nvme"))
    assert_same(found, expected)


def test_a_write_that_fails_is_a_typed_error_and_parameters_are_as_they_were(
    tmp_path: Path,
) -> None:
    with harness.one_thread():
        training = Training(deep)
        reference = models.make(deep)
        before = values_of(reference)
        # Set-up writes whole states; the fault comes after that, with the first write of backward.
        model = models.make(deep)
        chosen = policy(tmp_path, ram=least(training), grads="nvme")
        offload(model, chosen)
        optimizer = inf.AdamW(model.parameters())
        writes = sum(drive.writes for drive in inf.handle(model).stats().drives)
        inf.handle(model).close()

        model = models.make(deep)
        offload(model, chosen, _seam=Seam(fault=Fault("write", writes + 5, persistent=True)))
        optimizer = inf.AdamW(model.parameters())
        with pytest.raises(AioError, match=r"spilled gradients of .* cannot be written"):
            models.loss_of(model, models.token_batches(1)[0]).backward()
            optimizer.step()
        handle = inf.handle(model)
        for parameter, name in zip(model.parameters(), before, strict=True):
            with handle.gather(parameter):
                assert torch.equal(parameter.detach(), before[name]), name
        # the drive, or an aborted backward: no step is possible
        with pytest.raises((AioError, RuntimeError)):
            optimizer.step()
        handle.close()


def gradients_in_the_middle(chosen: inf.Policy) -> int:
    """The offset of the spilled gradients of a chunk in the middle of the swap file."""
    model = offload(models.make(deep), chosen)
    inf.AdamW(model.parameters())
    parts = inf.handle(model).parts
    offsets = [
        int(record["file_offset"] + record["section_at"][shard.format.written_count])
        for shard in map(parts.tiers.store.__getitem__, parts.split.flats)
        for record in shard.records
        if shard.format.grad
    ]
    inf.handle(model).close()
    return sorted(offsets)[len(offsets) // 2]


@pytest.mark.parametrize("backend", mostly_slow(["io_uring", "threads"], "io_uring"))
@pytest.mark.parametrize("nth", [0, 1])
def test_a_bad_block_below_spilled_gradients_changes_no_bit(
    backend: str, nth: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """States of a chunk of one generation are read, and move with its gradients."""
    at = gradients_in_the_middle(policy(tmp_path, ram=least(DEEP), grads="nvme"))
    fault = Fault("write", nth, persistent=True, start=at, stop=at + 1)
    result = run(DEEP, tmp_path, seam=Seam(fault=fault), io_backend=backend)
    assert_same(result, harness.reference(DEEP))
    assert (result.stats.moved_writes, result.stats.kept_chunks) == (1, 0)
    (told,) = [text for text in caplog.messages if "refused a write" in text]
    assert "4 reserved ranges remain" in told


@pytest.mark.parametrize(
    "values", [{}, {"generations": 2, "update": "backward"}], ids=str
)
def test_training_goes_on_after_a_write_that_failed_once(
    tmp_path: Path, values: dict[str, Any]
) -> None:
    batches = models.token_batches(3)

    def losses(nth: int | None) -> tuple[list[float], int]:
        seam = None if nth is None else Seam(fault=Fault("write", nth, lasting=True))
        chosen = policy(
            tmp_path,
            ram=least(Training(deep), generations=values.get("generations", 1)),
            grads="nvme",
            **values,
        )
        model = offload(models.make(deep), chosen, _seam=seam)
        optimizer, failed, found = inf.AdamW(model.parameters(), lr=1e-2), 0, []
        writes = sum(drive.writes for drive in inf.handle(model).stats().drives)
        while len(found) < 3:
            try:
                loss = models.loss_of(model, batches[len(found)])
                loss.backward()
                optimizer.step()
            except AioError:
                failed += 1
            else:
                found.append(loss.item())
            optimizer.zero_grad()
        inf.handle(model).close()
        assert failed == (nth is not None)
        return found, writes

    with harness.one_thread():
        expected, writes = losses(None)
        assert losses(writes + 3)[0] == expected


def test_a_spilled_model_closes_in_the_middle_of_everything(tmp_path: Path) -> None:
    model = models.make(deep)
    offload(model, policy(tmp_path, ram=least(Training(deep)), grads="nvme"))
    inf.AdamW(model.parameters())
    models.loss_of(model, models.token_batches(1)[0]).backward()
    inf.handle(model).close()
    assert all(parameter.grad is None for parameter in model.parameters())
