"""Calls of torch.cuda name the model's device, or run with it current."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from infinity._src.memory.device import Device, check_current
from infinity.errors import GraphCaptureUnsupported, InfinityError
from tests.fake_cuda import FakeCuda
from tests.simulated import Simulated

SECOND = torch.device("cuda", 1)


def test_the_pool_is_made_on_the_models_device_and_serves_activations_in_need(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda = FakeCuda(monkeypatch)
    device = Device(SECOND)
    assert cuda.pools == [(1, {"use_on_oom": True})]
    assert cuda.current == 0, "the user's device stays current"
    with device.allocation():
        assert cuda.inside == [(cuda.pools[0], SECOND)]
    assert not cuda.inside


def test_no_context_is_entered_on_the_device_that_is_current(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda = FakeCuda(monkeypatch)
    Device(torch.device("cuda", 0)).refuse_capture("a gather")
    assert cuda.calls == [("MemPool", 0), ("is_current_stream_capturing", 0)]


def test_an_allocator_that_has_no_pools_is_asked_for_none(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(monkeypatch, backend="cudaMallocAsync")
    with Device(SECOND).allocation():
        assert not cuda.inside
    assert not cuda.pools


def test_memory_used_under_another_stream_is_recorded_with_that_of_the_models_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda = FakeCuda(monkeypatch)
    recorded: list[Any] = []

    class Memory:
        record_stream = staticmethod(recorded.append)

    memory: Any = Memory()
    device = Device(SECOND)
    device.note_use(memory)
    cuda.chosen[1] = 1
    device.note_use(memory)
    assert recorded == cuda.streams[1]


@pytest.mark.parametrize("call", ["refuse_capture", "behind"])
def test_a_capture_on_the_models_device_is_refused(
    call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = FakeCuda(monkeypatch)
    device = Device(SECOND, Simulated().driver())

    def ask() -> None:
        if call == "behind":
            device.behind()
        else:
            device.refuse_capture("the gather of layers.3")

    cuda.capturing = {0}  # of another device: not ours to refuse
    ask()
    cuda.capturing = {1}
    with pytest.raises(GraphCaptureUnsupported) as caught:
        ask()
    assert isinstance(caught.value, InfinityError)
    text = str(caught.value)
    assert "while cuda:1 captures a CUDA graph" in text
    assert "get others with each gather" in text
    assert "outside of torch.cuda.graph()" in text
    assert cuda.calls[-1] == ("is_current_stream_capturing", 1)


def test_ranks_compute_on_their_current_device(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(monkeypatch)
    with pytest.raises(ValueError, match=r"on cuda:1, .* is cuda:0: .*set_device\(1\)") as caught:
        check_current(SECOND)
    assert "torch.cuda.set_device(local_rank)" in str(caught.value)
    cuda.current = 1
    check_current(SECOND)
    check_current(torch.device("cpu"))


def test_the_cache_of_a_gpu_is_freed_and_that_of_a_cpu_is_not_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda = FakeCuda(monkeypatch)
    device = Device(torch.device("cpu"))
    device.free_cache()
    device.refuse_capture("a gather")
    assert device.allocated_bytes() == 0
    assert not cuda.calls
    gpu = Device(SECOND)
    gpu.free_cache()
    assert gpu.allocated_bytes() == 3 << 20
    assert ("empty_cache", 0) in cuda.calls
