"""Smaller parts of infinity.compat.deepspeed: activation checkpointing, Lion on ordinary
parameters, the accelerator, torch.distributed by DeepSpeed's names."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from infinity.compat.deepspeed import DeepSpeedRefusal, checkpointing, comm, get_accelerator, ops
from infinity.compat.deepspeed.utilities import OnDevice, clone_tensors_for_torch_save
from tests.integrations.deepspeed_runs import alone


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("LOCAL_RANK", "0")
    with alone():
        yield


def test_activation_checkpointing_is_torchs() -> None:
    seen = []

    def block(x: torch.Tensor) -> torch.Tensor:
        seen.append(torch.rand(1).item())
        return x.sin()

    x = torch.ones(3, requires_grad=True)
    checkpointing.checkpoint(block, x).sum().backward()
    assert len(seen) == 2
    assert seen[0] == seen[1]
    assert torch.equal(x.grad, torch.ones(3).cos())
    checkpointing.configure(num_checkpoints=2)
    assert checkpointing.is_configured()
    for setting in ("partition_activations", "checkpoint_in_cpu"):
        with pytest.raises(DeepSpeedRefusal, match=setting):
            checkpointing.configure(**{setting: True})


def test_named_states_of_random_numbers() -> None:
    tracker = checkpointing.RngTracker()
    tracker.add("rows", 3)
    torch.manual_seed(3)
    wanted = torch.rand(4)
    torch.manual_seed(5)
    with tracker.fork("rows"):
        first = torch.rand(2)
    other = torch.rand(1)
    with tracker.fork("rows"):
        second = torch.rand(2)
    assert torch.equal(torch.cat([first, second]), wanted)
    torch.manual_seed(5)
    assert torch.equal(torch.rand(1), other)
    for call in (lambda: tracker.add("rows", 1), lambda: tracker.fork("columns")):
        with pytest.raises(DeepSpeedRefusal, match="of random numbers"):
            call()


def test_optimizers_refuse_what_the_engine_has_not() -> None:
    params = [nn.Parameter(torch.zeros(1))]
    for make in (
        lambda: ops.FusedAdam(params, bias_correction=False),
        lambda: ops.DeepSpeedCPUAdam(params, amsgrad=True),
        lambda: ops.DeepSpeedCPUAdam(params, fp32_optimizer_states=False),
    ):
        with pytest.raises(DeepSpeedRefusal, match="="):
            make()


def test_a_group_of_one_rank_without_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (comm.get_rank(), comm.get_world_size(), comm.is_initialized()) == (0, 1, False)
    comm.barrier()
    with pytest.raises(DeepSpeedRefusal, match="dist_init_required=False"):
        comm.init_distributed(dist_init_required=False)
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(DeepSpeedRefusal, match="WORLD_SIZE, MASTER_ADDR"):
        comm.init_distributed()
    monkeypatch.delenv("RANK")
    comm.init_distributed()
    tensor = torch.ones(2)
    comm.all_reduce(tensor)
    assert tensor.tolist() == [1.0, 1.0]
    assert comm.get_all_ranks_from_group() == [0]
    # A second call finds the group.
    comm.init_distributed()


def test_the_accelerator_and_small_things() -> None:
    accelerator = get_accelerator()
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    assert accelerator.device_name() == kind
    assert accelerator.is_available()
    assert accelerator.memory_allocated() >= 0
    with OnDevice(torch.bfloat16, "meta"):
        made = nn.Linear(2, 2)
    assert (made.weight.dtype, made.weight.device.type) == (torch.bfloat16, "meta")
    assert torch.get_default_dtype() is torch.float32
    whole = torch.arange(100)
    copied = clone_tensors_for_torch_save({"a": [whole[:2]], "b": 3})
    assert copied["a"][0].untyped_storage().nbytes() == 16
    assert copied["b"] == 3
