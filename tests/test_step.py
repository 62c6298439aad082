"""The step from outside: what moves, who owns a gradient, what a fault leaves, how several
optimizers behave."""

from __future__ import annotations

import errno
import functools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity as inf
from infinity._src.engine.handle import offload
from infinity.aio import Fault, Seam
from infinity.errors import DeviceFailedError, EngineClosed, StateInvalid
from tests import forks, models
from tests.harness import assert_same, policy, train, values_of


def small_llama() -> nn.Module:
    return models.make(functools.partial(models.llama, layers=4))


def padded_numel(model: nn.Module) -> int:
    return sum(flat.layout.numel for unit in inf.handle(model).units for flat in unit.flats)


def test_a_step_reads_14_bytes_a_parameter_and_writes_12(tmp_path: Path) -> None:
    model = inf.offload(small_llama(), policy(tmp_path))
    optimizer = inf.AdamW(model.parameters())
    handle = inf.handle(model)
    train(model, optimizer, 2, clip=1.0)
    handle.flush()
    before = handle.stats()
    train(model, optimizer, 5, clip=1.0)
    handle.flush()
    after = handle.stats()
    numel = padded_numel(model)
    written = after.bytes_written - before.bytes_written
    read = after.bytes_read - before.bytes_read
    # A gate that escaped (no forward opened it in time) costs one read of that unit's parameters.
    escaped = after.gates_escaped - before.gates_escaped
    largest = max(unit.size_bytes for unit in handle.units)
    handle.close()
    assert written == 5 * 12 * numel
    assert read <= 5 * 14 * numel + escaped * largest
    assert read >= 5 * 12 * numel
    params_read = after.params_read_bytes - before.params_read_bytes
    assert read - params_read == 5 * 12 * numel


def test_a_budget_that_holds_everything_never_touches_the_drive(tmp_path: Path) -> None:
    model = inf.offload(small_llama(), policy(tmp_path, ram="1GiB"))
    optimizer = inf.AdamW(model.parameters())
    train(model, optimizer, 3, clip=1.0)
    stats = inf.handle(model).stats()
    inf.handle(model).close()
    assert (stats.bytes_read, stats.bytes_written, stats.nvme_bytes) == (0, 0, 0)
    assert stats.ram_bytes <= 1 << 30


def test_what_is_gathered_at_once_does_not_grow_with_the_layers(tmp_path: Path) -> None:
    peaks = []
    for layers in (4, 12):
        model = inf.offload(models.llama(layers=layers).bfloat16(), policy(tmp_path))
        optimizer = inf.AdamW(model.parameters())
        train(model, optimizer, 3, clip=1.0)
        peaks.append(inf.handle(model).stats().gathered_bytes_peak)
        inf.handle(model).close()
    assert peaks[0] == peaks[1]


def test_gradients_may_be_changed_at_once_after_the_step(tmp_path: Path) -> None:
    """The pipeline owns them until it has read them; accumulation without zero_grad waits for
    it."""
    results = []
    for delay_us in (0, 3000):
        model = offload(small_llama(), policy(tmp_path), _seam=Seam(delay_us_max=delay_us, seed=3))
        optimizer = inf.AdamW(model.parameters(), lr=1e-2)
        batches = models.token_batches(4)
        models.loss_of(model, batches[0]).backward()
        for batch in batches[1:]:
            optimizer.step()
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad.zero_()  # at once: the update has hardly begun
            models.loss_of(model, batch).backward()
        results.append(values_of(model))
        inf.handle(model).close()
    assert_same(*results)


@pytest.mark.parametrize("persistent", [False, True])
def test_a_failed_update_that_forward_meets_first_says_what_helps(
    tmp_path: Path, persistent: bool
) -> None:
    def trained(seam: Seam | None, steps: int) -> nn.Module:
        model = offload(small_llama(), policy(tmp_path), _seam=seam)
        optimizer = inf.AdamW(model.parameters())
        if seam is not None:
            with pytest.raises(StateInvalid) as caught:
                train(model, optimizer, steps, clip=1.0)
            assert "start again from the last export" in str(caught.value)
        return model

    model = trained(None, 0)
    set_up = inf.handle(model).parts.tiers.executor.stats().drives[0].writes
    inf.handle(model).close()
    fault = Fault("write", set_up + 3, persistent=persistent, lasting=True)
    model = trained(Seam(fault=fault), 20)
    with pytest.raises(StateInvalid):
        inf.handle(model).close()


def test_a_read_that_fails_in_forward_names_the_unit(tmp_path: Path) -> None:
    fault = Fault("read", 0, persistent=True)
    model = offload(small_llama(), policy(tmp_path), _seam=Seam(fault=fault))
    with pytest.raises(
        DeviceFailedError, match=r"model\.\S+ cannot be gathered: .*errno 5"
    ) as caught:
        models.loss_of(model, models.token_batches(1)[0])
    assert caught.value.path == str(tmp_path)
    inf.handle(model).close()


@pytest.mark.parametrize("op", ["read", "write"])
def test_a_fault_in_the_background_is_raised_by_the_next_call_and_stays(
    tmp_path: Path, op: str
) -> None:
    def until_second_step(seam: Seam | None) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        # more chunks than there are slots
        model = offload(models.llama(layers=8).bfloat16(), policy(tmp_path), _seam=seam)
        optimizer = inf.AdamW(model.parameters())
        train(model, optimizer, 1, clip=1.0)
        inf.handle(model).flush()
        models.loss_of(model, models.token_batches(1)[0]).backward()
        inf.handle(model).parts.tiers.executor.wait_all()  # idle slots have read ahead
        return model, optimizer

    model, _ = until_second_step(None)
    drive = inf.handle(model).parts.tiers.executor.stats().drives[0]
    inf.handle(model).close()
    nth = drive.reads if op == "read" else drive.writes

    # In the second step's update, and away from its beginning: how often idle slots read is not the
    # same in every run.
    fault = Fault(op=op, nth=nth + 2, errno=errno.EIO, persistent=True)
    model, optimizer = until_second_step(Seam(fault=fault))
    handle = inf.handle(model)
    optimizer.step()  # returns; the fault comes later
    for _ in range(2):
        with pytest.raises(StateInvalid, match="errno 5") as caught:
            handle.flush()
        assert isinstance(caught.value.__cause__, DeviceFailedError)
        assert caught.value.__cause__.op == op
    with pytest.raises(StateInvalid):
        models.loss_of(model, models.token_batches(1)[0])
    with pytest.raises(StateInvalid):
        optimizer.step()
    with pytest.raises(StateInvalid):
        handle.close()
    with pytest.raises(EngineClosed):
        handle.flush()
    assert list(tmp_path.iterdir()) == []


def test_two_optimizers_may_share_a_model_but_not_a_parameter(tmp_path: Path) -> None:
    def run(split: bool) -> dict[str, torch.Tensor]:
        model = inf.offload(small_llama(), policy(tmp_path))
        params = list(model.parameters())
        groups = [params[:7], params[7:]] if split else [params]
        optimizers = [inf.AdamW(group, lr=1e-2) for group in groups]
        if split:
            with pytest.raises(ValueError, match="another optimizer"):
                inf.AdamW(params[5:9])
        for batch in models.token_batches(3):
            models.loss_of(model, batch).backward()
            for optimizer in optimizers:
                optimizer.step()
            for optimizer in optimizers:
                optimizer.zero_grad()
        state = values_of(model)
        inf.handle(model).close()
        return state

    assert_same(run(True), run(False))


def test_the_state_dict_of_the_optimizer_is_a_manifest(tmp_path: Path) -> None:
    model = inf.offload(small_llama(), policy(tmp_path))
    optimizer = inf.AdamW(model.parameters(), lr=1e-3)
    train(model, optimizer, 2, clip=1.0)
    manifest = optimizer.state_dict()
    json.dumps(manifest)  # no tensors in it
    assert {entry["step"] for entry in manifest["state"].values()} == {2}
    optimizer.param_groups[0]["lr"] = 5.0
    optimizer.load_state_dict(manifest)
    assert optimizer.param_groups[0]["lr"] == 1e-3
    train(model, optimizer, 1, clip=1.0)
    with pytest.raises(ValueError, match="step"):
        optimizer.load_state_dict(manifest)
    with pytest.raises(ValueError, match="manifest"):
        optimizer.load_state_dict(torch.optim.AdamW([nn.Parameter(torch.zeros(2))]).state_dict())
    inf.handle(model).close()


def test_a_scheduler_of_torch_drives_the_learning_rate(tmp_path: Path) -> None:
    model = inf.offload(small_llama(), policy(tmp_path))
    optimizer = inf.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: float(step >= 1))
    before = values_of(model)
    train(model, optimizer, 1, clip=1.0)
    assert_same(values_of(model), before)
    scheduler.step()
    optimizer.param_groups[0]["lr"] = 1e-1
    train(model, optimizer, 1, clip=1.0)
    after = model.state_dict()
    assert any(not torch.equal(before[name], after[name]) for name in before)
    inf.handle(model).close()


def train_forever(directory: str, sender: Any) -> None:
    torch.set_num_threads(1)
    model = inf.offload(small_llama(), policy(Path(directory)))
    optimizer = inf.AdamW(model.parameters())
    while True:
        train(model, optimizer, 1, clip=1.0)
        sender.send("a step")


def test_a_process_killed_in_mid_step_leaves_no_file(tmp_path: Path) -> None:
    receiver, sender = forks.FORKSERVER.Pipe(duplex=False)
    process = forks.FORKSERVER.Process(target=train_forever, args=(str(tmp_path), sender))
    process.start()
    for _ in range(3):
        assert receiver.recv() == "a step"
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert list(tmp_path.iterdir()) == []


LEFT = """
import sys
import torch
import infinity as inf
from tests import models
model = models.External(layers=4).bfloat16()  # quicker to import than any of transformers'
inf.offload(model, inf.Policy(params="nvme", optim="nvme", nvme=sys.argv[1], ram="min"))
optimizer = inf.AdamW(model.parameters())
models.loss_of(model, models.token_batches(1)[0]).backward()
optimizer.step()
optimizer.zero_grad()
optimizer.state_dict()
# Imports that would take longer than the rest of a small model's set-up.
slow = {"torch._dynamo", "sympy", "triton", "transformers", "torch.distributed.fsdp"}
assert not slow & set(sys.modules), slow & set(sys.modules)
"""


def test_leaving_the_interpreter_with_updates_in_flight_is_clean(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-c", LEFT, str(tmp_path)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert list(tmp_path.iterdir()) == []
