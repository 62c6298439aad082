"""Memory under a cap, streams of the user, a second device, other allocators and graphs, on a real
GPU."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import infinity as inf
from infinity.errors import GraphCaptureUnsupported
from tests import harness, models
from tests.gpu.test_device_memory import warm_up
from tests.harness import Training
from tests.test_bitwise import policy

MIB = 1 << 20
WIDTH = 2048
LAYER_BYTES = 2 * WIDTH * WIDTH
DEVICES = torch.cuda.device_count() if torch.cuda.is_available() else 0


def stack(layers: int, *, device: str = "cuda", dtype: torch.dtype = torch.bfloat16) -> Any:
    """Linears, each a unit of 8 MiB in bf16, with values that do not grow from layer to layer."""
    torch.manual_seed(0)
    made = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
    return made.to(device=device, dtype=dtype)


def offloaded(model: Any, tmp_path: Path, **values: Any) -> Any:
    chosen = {"params": "cpu", "optim": "cpu", "units": ["Linear"], **values}
    return inf.offload(model, policy(tmp_path, **chosen))


@contextlib.contextmanager
def capped(room_bytes: int) -> Iterator[None]:
    """Let torch reserve no more than it has now, and so much."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties("cuda").total_memory
    wanted = torch.cuda.memory_reserved() + room_bytes
    torch.cuda.set_per_process_memory_fraction(wanted / total)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def exhaustions() -> int:
    """Requests that the device has refused torch so far."""
    stats = torch.cuda.memory_stats()
    return int(stats["num_ooms"] + stats["num_alloc_retries"])


def test_gathers_take_what_activations_have_left(cuda: str, tmp_path: Path) -> None:
    """On torch 2.10 to 2.12 the allocator gives none of its cache to a pool."""
    warm_up()
    model = stack(8)
    x = torch.randn(4, WIDTH, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        expected = model(x).clone()
    offloaded(model, tmp_path)
    with capped(256 * MIB), torch.no_grad():
        before = exhaustions()
        left = torch.empty(250 * MIB, dtype=torch.uint8, device="cuda")
        del left  # in torch's cache, outside of the gathers' pool
        assert torch.equal(model(x), expected)
        assert exhaustions() > before, "the cap was never met"
    inf.handle(model).close()


def test_activations_take_what_gathers_have_left(cuda: str, tmp_path: Path) -> None:
    warm_up()
    model = stack(8)
    x = torch.randn(4, WIDTH, device="cuda", dtype=torch.bfloat16)
    handle = inf.handle(offloaded(model, tmp_path))
    with torch.no_grad():
        expected = model(x).clone()
    for unit in handle.units:
        handle.unsharder.invalidate(unit)
    torch.cuda.synchronize()
    with capped(0), torch.no_grad():
        before = exhaustions()
        activation = torch.empty(LAYER_BYTES, dtype=torch.uint8, device="cuda")
        assert exhaustions() > before, "the cap was never met"
        activation.fill_(7)
        assert int(activation.sum(dtype=torch.int64)) == 7 * LAYER_BYTES
        del activation
        assert torch.equal(model(x), expected)
    handle.close()


def test_a_gather_that_finds_no_room_at_all_says_so_and_leaves_a_clean_state(
    cuda: str, tmp_path: Path
) -> None:
    warm_up()
    model = stack(4)
    x = torch.randn(4, WIDTH, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        expected = model(x).clone()
    offloaded(model, tmp_path)
    with capped(4 * MIB), torch.no_grad():
        with pytest.raises(
            torch.OutOfMemoryError, match="0 cannot be gathered: cuda:0 lacks memory"
        ):
            model(x)
    with torch.no_grad():
        assert torch.equal(model(x), expected)
    inf.handle(model).close()


def test_set_up_leaves_no_block_as_large_as_a_unit(cuda: str, tmp_path: Path) -> None:
    warm_up()
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    model = offloaded(stack(4, device="cpu"), tmp_path, device="cuda")
    assert torch.cuda.memory_reserved() - before < LAYER_BYTES
    inf.handle(model).close()


class Branches(nn.Module):
    """One layer, then a layer on a side stream while the others run on the main one; then the
    streams join."""

    def __init__(self, layers: Any) -> None:
        super().__init__()
        self.first, self.beside, *others = layers
        self.others = nn.ModuleList(others)
        self.stream: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        main = torch.cuda.current_stream()
        side = self.stream or main
        side.wait_stream(main)
        with torch.cuda.stream(side):
            if self.stream is not None:
                torch.cuda._sleep(20_000_000)  # its kernels come late, by about 10 ms
            found = self.beside(x)
        for layer in self.others:
            found_here = layer(x)
            x = found_here
        main.wait_stream(side)
        return x + found


def test_a_unit_used_on_a_stream_of_its_own_is_not_reused_too_early(
    cuda: str, tmp_path: Path
) -> None:
    model = Branches(stack(8))
    x = torch.randn(4, WIDTH, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        expected = model(x).clone()
    offloaded(model, tmp_path)
    model.stream = torch.cuda.Stream()
    with torch.no_grad():
        for _ in range(5):
            assert torch.equal(model(x), expected)
    inf.handle(model).close()


@pytest.mark.skipif(0 < DEVICES < 2, reason="this machine has one CUDA device")
@pytest.mark.parametrize("where", ["cpu", "device"])
def test_a_model_on_a_device_that_is_not_current(where: str, cuda: str, tmp_path: Path) -> None:
    assert torch.cuda.current_device() == 0
    training = Training(models.llama, device="cuda:1")
    chosen = policy(tmp_path, params="nvme", optim="nvme", ram="min", update_on=where)
    harness.assert_same(harness.offloaded(training, chosen), harness.reference(training))
    assert torch.cuda.current_device() == 0


def test_a_graph_cannot_be_captured(cuda: str, tmp_path: Path) -> None:
    model = stack(3)
    x = torch.randn(4, WIDTH, device="cuda", dtype=torch.bfloat16)
    offloaded(model, tmp_path)
    with torch.no_grad():
        expected = model(x).clone()
        graph = torch.cuda.CUDAGraph()
        with (
            pytest.raises(GraphCaptureUnsupported, match="the gather of 0 while cuda:0 captures"),
            torch.cuda.graph(graph),
        ):
            _ = x + 1  # a graph that has nothing in it is a warning
            model(x)
        assert torch.equal(model(x), expected)
    inf.handle(model).close()


def test_autocast_keeps_no_copy_of_the_model(cuda: str, tmp_path: Path) -> None:
    layers = 16
    model = offloaded(stack(layers, dtype=torch.float32), tmp_path)
    x = torch.randn(4, WIDTH, device="cuda", requires_grad=True)
    with torch.autocast("cuda", torch.bfloat16):
        before = torch.cuda.memory_allocated()
        for layer in model:
            x = checkpoint(layer, x, use_reentrant=False)
        held = torch.cuda.memory_allocated() - before
    gathered = inf.handle(model).stats().gathered_bytes_peak
    assert held <= gathered + 2 * LAYER_BYTES, "copies of all layers are 16 * LAYER_BYTES"
    x.float().sum().backward()
    inf.handle(model).close()


def test_another_allocator_has_no_pool_and_needs_none(cuda: str, tmp_path: Path) -> None:
    said = harness.in_a_process(
        "tests.gpu.test_streams_and_memory",
        tmp_path,
        PYTORCH_CUDA_ALLOC_CONF="backend:cudaMallocAsync",
    )
    assert said.split() == ["cudaMallocAsync", "equal"]


def main(place: Path) -> None:
    """A forward and a backward under the allocator of the environment."""
    model = stack(4)
    x = torch.randn(4, WIDTH, device="cuda", dtype=torch.bfloat16)
    expected = model(x).detach().clone()
    offloaded(model, place)
    found = model(x)
    found.float().sum().backward()
    same = torch.equal(found.detach(), expected)
    inf.handle(model).close()
    print(torch.cuda.get_allocator_backend(), "equal" if same else "different")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
