"""Features that users switch on in the model itself: attention kernels, generation with its caches,
compiled blocks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import infinity as inf
from tests import harness, models
from tests.harness import Training
from tests.marks import mostly_slow
from tests.test_bitwise import policy

MIN: dict[str, Any] = {"params": "nvme", "optim": "nvme", "ram": "min"}
KERNELS = ("MATH", "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION")
sdpa_llama = functools.partial(models.llama, attn_implementation="sdpa", hidden=64)
IDS = models.token_batches(1, seed=7)[0]["input_ids"]


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """Forget compiled code before and after a test, so that tests do not share it."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


# -- attention -------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["cpu", "nvme"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_sdpa_trains_as_the_plain_loop_does(
    kernel: str, place: str, device: str, tmp_path: Path
) -> None:
    if device == "cpu" and kernel not in ("MATH", "FLASH_ATTENTION"):
        pytest.skip(f"there is no {kernel} on the CPU")
    if device == "cuda":
        # With warn_only the fused kernels' backward sums in any order.
        torch.use_deterministic_algorithms(True, warn_only=False)
    # a new factory for each test: references are cached by factory
    training = Training(functools.partial(sdpa_llama), steps=3, device=device)
    chosen = policy(tmp_path, **(MIN if place == "nvme" else {"params": "cpu", "optim": "cpu"}))
    with sdpa_kernel(getattr(SDPBackend, kernel)):
        try:
            expected = harness.reference(training)
        except RuntimeError as error:
            if "No available kernel" in str(error) or "deterministic implementation" in str(error):
                pytest.skip(f"{kernel} cannot be had on this device: {str(error).splitlines()[0]}")
            raise
        harness.assert_same(harness.offloaded(training, chosen), expected)


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "reentrant"])
def test_sdpa_under_checkpointing(checkpointing: bool, device: str, tmp_path: Path) -> None:
    training = Training(sdpa_llama, checkpointing=checkpointing, device=device)
    with sdpa_kernel(SDPBackend.MATH):
        harness.assert_same(
            harness.offloaded(training, policy(tmp_path, **MIN)), harness.reference(training)
        )


# -- generation ------------------------------------------------------------------------------------

CACHES: dict[str, dict[str, Any]] = {
    "dynamic": {"cache_implementation": "dynamic"},
    "static": {"cache_implementation": "static", "disable_compile": True},
    "none": {"use_cache": False},
    "beams": {"num_beams": 3},
}


@pytest.mark.parametrize("cache", CACHES)
def test_generation_gives_the_plain_models_tokens_before_and_after_a_step(
    cache: str, device: str, tmp_path: Path
) -> None:
    training = Training(sdpa_llama, device=device)

    def generate(model: Any) -> list[Any]:
        model.eval()
        ids = IDS.to(device)
        options = {
            "max_new_tokens": 5,
            "do_sample": False,
            "attention_mask": torch.ones_like(ids),
            **CACHES[cache],
        }
        tokens = model.generate(input_ids=ids, **options).tolist()
        model.train()
        return tokens

    def both(model: nn.Module, optimizer: Any) -> list[Any]:
        seen = [generate(model)]
        models.loss_of(model, training.batches[0]).backward()
        optimizer.step()
        optimizer.zero_grad()
        return [*seen, generate(model)]

    with harness.one_thread(), sdpa_kernel(SDPBackend.MATH):
        plain = training.model()
        expected = both(plain, training.make_reference(plain))
        model = inf.offload(training.model(), policy(tmp_path, **MIN))
        assert both(model, training.make_optimizer(model)) == expected
        inf.handle(model).close()


def test_prefill_and_decoding_with_a_cache_of_the_users_own(device: str, tmp_path: Path) -> None:
    """Logits token by token, as serving loops take them; the cache outlives the forwards that
    filled it."""

    def decode(model: Any) -> list[torch.Tensor]:
        found = []
        with torch.no_grad():
            out = model.eval()(input_ids=IDS.to(device), use_cache=True)
            for _ in range(3):
                found.append(out.logits[:, -1].float().cpu())
                token = out.logits[:, -1:].argmax(-1)
                out = model(input_ids=token, past_key_values=out.past_key_values, use_cache=True)
        return found

    training = Training(sdpa_llama, device=device)
    with harness.one_thread(), sdpa_kernel(SDPBackend.MATH):
        expected = decode(training.model())
        model = inf.offload(training.model(), policy(tmp_path, **MIN))
        for mine, theirs in zip(decode(model), expected, strict=True):
            assert torch.equal(mine, theirs)
        inf.handle(model).close()


# -- torch.compile ---------------------------------------------------------------------------------


def compiled(
    backend: Any, factory: Callable[[], nn.Module], *, whole_block: bool
) -> Callable[[], nn.Module]:
    """The factory with every block compiled: its forward (inside the engine's hooks), or the call
    with its hooks."""

    def make() -> nn.Module:
        model: Any = factory()
        for layer in model.model.layers:
            if whole_block:
                layer.compile(backend=backend)
            else:
                layer.forward = torch.compile(layer.forward, backend=backend, fullgraph=True)
        return model

    return make


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(
    "whole_block", [pytest.param(False, marks=pytest.mark.slow), True], ids=["forward", "block"]
)
@pytest.mark.parametrize(
    "checkpointing",
    [None, pytest.param(False, marks=pytest.mark.slow)],
    ids=["plain", "checkpointed"],
)
def test_compiled_blocks_train_as_compiled_blocks_of_a_plain_loop(
    checkpointing: bool | None, whole_block: bool, device: str, tmp_path: Path
) -> None:
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    factory = compiled(counter, sdpa_llama, whole_block=whole_block)
    training = Training(factory, checkpointing=checkpointing, device=device)
    with sdpa_kernel(SDPBackend.MATH):
        expected = harness.reference(training)
        plain = counter.frame_count
        harness.assert_same(harness.offloaded(training, policy(tmp_path, **MIN)), expected)
    assert counter.frame_count > plain > 0  # otherwise one of the two was not compiled


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("place", mostly_slow(["cpu", "nvme"], "nvme"))
def test_blocks_are_compiled_once_though_their_parameters_come_and_go(
    place: str, device: str, tmp_path: Path
) -> None:
    """A gather must not look like a change to the compiler's guards, or every step would compile
    anew."""
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    chosen = policy(tmp_path, **(MIN if place == "nvme" else {"params": "cpu", "optim": "cpu"}))
    with harness.one_thread():
        llama = functools.partial(sdpa_llama, 2)
        training = Training(compiled(counter, llama, whole_block=False), device=device)
        model = inf.offload(training.model(), chosen)
        optimizer = training.make_optimizer(model)
        frames = []
        for batch in training.batches:
            models.loss_of(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            frames.append(counter.frame_count)
        inf.handle(model).close()
    assert frames[0] > 0
    assert frames == [frames[0]] * len(frames)


@pytest.mark.usefixtures("fresh_compiler")
def test_inductor_compiles_blocks_on_a_gpu(cuda: str, tmp_path: Path) -> None:
    training = Training(compiled("inductor", sdpa_llama, whole_block=False), device=cuda)
    with sdpa_kernel(SDPBackend.MATH):
        harness.assert_same(
            harness.offloaded(training, policy(tmp_path, **MIN)), harness.reference(training)
        )


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_compiler")
def test_blocks_compiled_after_offload(device: str, tmp_path: Path) -> None:
    """As torchtitan's recipes do it: shard first, compile then."""
    training = Training(sdpa_llama, device=device, steps=2)

    def train(model: Any, optimizer: Any) -> list[float]:
        for layer in model.model.layers:
            layer.forward = torch.compile(layer.forward, backend="aot_eager", fullgraph=True)
        losses = []
        for batch in training.batches:
            loss = models.loss_of(model, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    with harness.one_thread(), sdpa_kernel(SDPBackend.MATH):
        plain = training.model()
        expected = train(plain, training.make_reference(plain))
        model = inf.offload(training.model(), policy(tmp_path, **MIN))
        assert train(model, training.make_optimizer(model)) == expected
        inf.handle(model).close()
