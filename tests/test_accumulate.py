"""`handle.accumulate`: forwards one after the other and one backward give the bits of the loop over
micro-batches, and backward gathers and stores what one micro-batch's does."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

import infinity as inf
from infinity._src.hooks import activation_offload as activations
from infinity._src.hooks import block_order
from infinity._src.hooks.block_order import deal
from infinity._src.params.unshard import PendingUnshards, Unsharder
from infinity.errors import EngineClosed
from tests import harness, models
from tests.device import simulated
from tests.harness import Run, Training, policy

CPU = {"params": "cpu", "optim": "cpu"}

Together = functools.partial(Training, steps=2, together=True)

LLAMA = Together(models.llama, accumulation=3)  # a third is no exact number


def assert_is_the_loop(ours: Run, training: Training) -> None:
    harness.assert_same(ours, harness.reference(training))


@pytest.fixture
def one_thread() -> Iterator[None]:
    with harness.one_thread():
        yield


# -- the same bits: test_matrix.py has them of models, loops and policies --------------------------


@pytest.mark.parametrize("update", [{}, {"update": "backward"}], ids=["deferred", "backward"])
def test_a_device_with_memory_of_its_own_has_the_same_bits(
    update: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = dataclasses.replace(LLAMA, max_norm=None, checkpointing=False)
    with simulated(monkeypatch, seed=3) as device:
        result = harness.offloaded(training, policy(tmp_path, **update))
        assert device.live() == (0, 0, 0)
    assert_is_the_loop(result, training)


# -- gradients of one step -------------------------------------------------------------------------

Loss = Callable[[Any], torch.Tensor]


def grads_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of the gradients in fp32, by name."""
    return {
        name: param.grad.materialize() if hasattr(param.grad, "materialize") else param.grad.float()
        for name, param in model.named_parameters()
        if param.grad is not None
    }


def loop_grads(model: nn.Module, batches: Sequence[Any], loss_of: Loss) -> dict[str, torch.Tensor]:
    """Gradients of the plain loop."""
    for batch in batches:
        loss_of(model, batch).backward()  # type: ignore[call-arg]
    return grads_of(model)


def accumulated(
    factory: Callable[[], nn.Module], batches: Sequence[Any], loss_of: Any, **values: Any
) -> dict[str, torch.Tensor]:
    """Gradients of the same model and loss by `handle.accumulate`."""
    model = inf.offload(models.make(factory), inf.Policy(**{**CPU, **values}))
    handle = inf.handle(model)
    handle.accumulate(batches, functools.partial(loss_of, model))
    found = grads_of(model)
    handle.close()
    return found


def differing(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> list[str]:
    assert ours.keys() == theirs.keys()
    return [name for name, value in theirs.items() if not torch.equal(ours[name], value)]


def ragged() -> list[models.Batch]:
    """Micro-batches of other rows and lengths each."""
    shapes = enumerate([(2, 12), (1, 7), (3, 5)])
    return [
        models.token_batches(1, seed=seed, rows=rows, length=length)[0]
        for seed, (rows, length) in shapes
    ]


@pytest.mark.usefixtures("one_thread")
def test_micro_batches_of_any_shape_have_the_bits_of_the_loop() -> None:
    loop = loop_grads(models.make(models.llama), ragged(), models.loss_of)
    assert not differing(accumulated(models.llama, ragged(), models.loss_of), loop)


@pytest.mark.usefixtures("one_thread")
def test_an_encoder_and_a_decoder_keep_the_bits_of_the_loop() -> None:
    """T5: its embedding is used in the encoder, in the decoder and by the head."""
    loop = loop_grads(models.make(models.t5), ragged(), models.loss_of)
    ours = accumulated(models.t5, ragged(), models.loss_of)
    assert set(differing(ours, loop)) <= {"shared.weight"}
    for name, value in loop.items():
        torch.testing.assert_close(ours[name], value, rtol=5e-2, atol=1e-3)


@pytest.mark.usefixtures("one_thread")
def test_tied_weights_add_up_the_head_of_all_and_then_the_embedding_of_all() -> None:
    untied: Any = models.make(models.gpt2)
    untied.lm_head.weight = nn.Parameter(untied.transformer.wte.weight.detach().clone())
    head, table = [], []
    for batch in ragged():
        models.loss_of(untied, batch).backward()
        head.append(untied.lm_head.weight.grad)
        table.append(untied.transformer.wte.weight.grad)
        untied.zero_grad()
    total = head[0]
    for term in (*head[1:], *table):
        total = total + term
    ours = accumulated(models.gpt2, ragged(), models.loss_of)
    assert torch.equal(ours["transformer.wte.weight"], total.float())


class Dropping(nn.Module):
    """Dropout inside of blocks and between them, and a norm that counts."""

    def __init__(self, hidden: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(models.VOCAB, hidden)
        self.drop = nn.Dropout(0.3)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(hidden, hidden), nn.Dropout(0.5), nn.GELU()) for _ in range(2)
        )
        self.norm = nn.BatchNorm1d(hidden)
        self.head = nn.Linear(hidden, 1)

    def forward(self, input_ids: torch.Tensor, **_: Any) -> dict[str, torch.Tensor]:
        x = self.drop(self.embed(input_ids))
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        return {"loss": self.head(self.norm(x.flatten(0, 1))).float().square().mean()}


@pytest.mark.usefixtures("one_thread")
def test_random_numbers_and_running_statistics_are_those_of_the_loop() -> None:
    """Without a rule for seeds: each micro-batch draws where the one before has ended."""
    plain = models.make(Dropping)
    torch.manual_seed(5)
    loop, after = loop_grads(plain, ragged(), models.loss_of), torch.get_rng_state()
    model: Any = inf.offload(models.make(Dropping), inf.Policy(**CPU))
    torch.manual_seed(5)
    inf.handle(model).accumulate(ragged(), functools.partial(models.loss_of, model))
    assert torch.equal(torch.get_rng_state(), after)
    assert not differing(grads_of(model), loop)
    inf.handle(model).close()
    for ours, theirs in zip(model.buffers(), plain.buffers(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.usefixtures("one_thread")
def test_a_second_model_in_the_function_trains_too() -> None:
    def both(models_: Sequence[nn.Module], batch: models.Batch) -> torch.Tensor:
        return models.loss_of(models_[0], batch) * models.loss_of(models_[1], batch)

    plain, ours = ([models.make(models.llama, seed=seed) for seed in (0, 1)] for _ in range(2))
    for batch in ragged():
        both(plain, batch).backward()
    for model in ours:
        inf.offload(model, inf.Policy(**CPU))
    inf.handle(ours[0]).accumulate(ragged(), functools.partial(both, ours))
    for model, other in zip(ours, plain, strict=True):
        assert not differing(grads_of(model), grads_of(other))
        inf.handle(model).close()


def compiled() -> nn.Module:
    """A Llama with compiled blocks."""
    model: Any = models.llama(2)
    for layer in model.model.layers:
        layer.forward = torch.compile(layer.forward, backend="aot_eager")
    return model


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_compiled_blocks_keep_the_bits_of_the_loop() -> None:
    batches = models.token_batches(3)
    loop = loop_grads(models.make(compiled), batches, models.loss_of)
    assert not differing(accumulated(compiled, batches, models.loss_of), loop)


# -- order, traffic --------------------------------------------------------------------------------


@given(
    lengths=st.lists(st.lists(st.integers(0, 5), min_size=3, max_size=3), min_size=1, max_size=4),
    start=st.integers(0, 9),
    kept=st.randoms(use_true_random=False),
)
def test_numbers_are_dealt_block_by_block_and_in_a_block_micro_batch_0_last(
    lengths: list[list[int]], start: int, kept: Any
) -> None:
    """Backward runs high numbers first."""
    marks: list[list[int]] = []
    places: dict[int, tuple[int, int]] = {}
    number = start
    for batch, blocks in enumerate(lengths):
        marks.append([])
        for block, length in enumerate(blocks):
            marks[-1].append(number)
            for _ in range(length):
                places[number] = (block, batch)
                number += 1
    used = [number for number in places if kept.random() < 0.7]
    before = list(range(start))
    dealt = deal([*before, *used], marks)
    assert sorted(dealt) == sorted(dealt.values()) == sorted(used)
    backward = sorted(used, key=dealt.__getitem__, reverse=True)
    assert backward == sorted(used, key=lambda each: (-places[each][0], places[each][1], -each))


def gathers(patch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """The phase and unit of each gather from now on."""
    found: list[tuple[str, str]] = []
    plain = Unsharder.unshard

    def unshard(self: Unsharder, unit: Any) -> None:
        found.append(("backward" if self._passes.in_backward else "forward", unit.name))
        plain(self, unit)

    patch.setattr(Unsharder, "unshard", unshard)
    return found


@pytest.mark.parametrize("checkpointing", [None, False, True])
def test_backward_goes_block_by_block(
    checkpointing: bool | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = dataclasses.replace(LLAMA, checkpointing=checkpointing)
    model = training.model()
    inf.offload(model, policy(tmp_path))
    found = gathers(monkeypatch)
    inf.handle(model).accumulate(ragged(), functools.partial(models.loss_of, model))
    inf.handle(model).close()
    names = ["model.embed_tokens", *(f"model.layers.{index}" for index in range(3)), "lm_head"]
    forward = [name for phase, name in found if phase == "forward"]
    backward = [name for phase, name in found if phase == "backward"]
    assert [name for name in forward if name in names] == names * 3
    assert [name for name, _ in itertools.groupby(backward) if name in names] == names[::-1]


def test_backward_reads_and_stores_what_one_micro_batch_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # One rank evicts no unit that is being filled: what it reads ahead would depend on the drive.
    monkeypatch.setattr(PendingUnshards, "filled", lambda self, unit: True)
    loop = Training(
        functools.partial(models.Small, 8), steps=2, accumulation=4, max_norm=None, no_sync=True
    )
    one, together = (
        dataclasses.replace(loop, accumulation=1),
        dataclasses.replace(loop, together=True, no_sync=False),
    )
    chosen = policy(tmp_path, update="backward")
    looped, alone, ours = (harness.offloaded(each, chosen).stats for each in (loop, one, together))
    # The bytes of all parameters at rest, which each further forward reads; and a block that stays
    # gathered between two passes of one micro-batch.
    forward = looped.grad_bytes
    most = alone.bytes_read + 3 * loop.steps * forward + forward // 4
    assert ours.bytes_read <= most < looped.bytes_read
    assert ours.bytes_written == alone.bytes_written
    assert ours.grad_bytes == 0 < forward
    # The next forward's first unit is read ahead, if the schedule expects one.
    assert ours.demand_reads <= looped.demand_reads + 1


def test_the_cost_of_an_order_is_that_of_its_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = 0
    plain = block_order.node_sequence_number

    def count(node: Any) -> int:
        nonlocal asked
        asked += 1
        return plain(node)

    monkeypatch.setattr(block_order, "node_sequence_number", count)
    costs = []
    for layers, micro_batches in ((2, 4), (2, 8), (4, 4)):
        asked = 0
        batches = models.token_batches(micro_batches)
        accumulated(functools.partial(models.Small, layers), batches, models.loss_of)
        costs.append(asked)
    # Leaves are visited once.
    assert max(costs[1:]) <= 2 * costs[0] < 2 * min(costs[1:])


def test_inputs_of_blocks_rest_on_nvme_and_come_back_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(activations, "SMALLEST_BYTES", 256)
    training = dataclasses.replace(
        LLAMA, factory=functools.partial(models.Small, 6), checkpointing=False, accumulation=4
    )
    chosen = policy(tmp_path, activations="nvme")
    result = harness.offloaded(training, chosen)
    assert_is_the_loop(result, training)
    figures = result.stats.activations
    boundary = 2 * 12 * 32 * 2
    assert figures.stored_bytes >= training.steps * 4 * 5 * boundary
    # Calls that stay, calls in flight, and two calls ahead: not two for each micro-batch.
    assert figures.held_bytes_peak <= 8 * boundary


# -- other orders ----------------------------------------------------------------------------------


def left_out(input_ids: torch.Tensor) -> int:
    """The block that a micro-batch leaves out."""
    return int(input_ids.sum()) % 3


class Skipping(nn.Module):
    """A model that leaves a block out, chosen by its tokens."""

    def __init__(self, hidden: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(models.VOCAB, hidden)
        self.blocks = nn.ModuleList([models.Expert(hidden) for _ in range(3)])
        self.head = nn.Linear(hidden, models.VOCAB, bias=False)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.embed(input_ids)
        for index, block in enumerate(self.blocks):
            if index != left_out(input_ids):
                x = x + block(x)
        return {"loss": models.next_token_loss(self.head(x), labels)}


@pytest.mark.parametrize("update", [{}, {"update": "backward"}], ids=["deferred", "backward"])
def test_micro_batches_with_other_blocks_run_one_after_the_other_and_say_so_once(
    update: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    training = Together(Skipping, steps=3, accumulation=3, max_norm=None)
    missing = [left_out(batch["input_ids"]) for batch in training.batches]
    steps = [set(missing[first : first + 3]) for first in (0, 3, 6)]
    assert sum(len(step) > 1 for step in steps) > 1, "and says it once"
    with caplog.at_level(logging.WARNING, "infinity"):
        result = harness.offloaded(training, policy(tmp_path, **update))
    assert_is_the_loop(result, training)
    said = [each.getMessage() for each in caplog.records if "accumulate()" in each.getMessage()]
    assert len(said) == 1
    assert "called blocks." in said[0]
    assert "one after the other" in said[0]


@pytest.mark.usefixtures("one_thread")
def test_passes_without_gradients_are_no_part_of_the_order(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Forwards without gradients (a reference model, rewards): any number in each micro-batch."""

    def loss_of(model: nn.Module, batch: models.Batch) -> torch.Tensor:
        with torch.no_grad():
            for _ in range(len(batch["input_ids"])):
                weight = models.loss_of(model, batch)
        return models.loss_of(model, batch) * weight

    with caplog.at_level(logging.WARNING, "infinity"):
        ours = accumulated(models.llama, ragged(), loss_of)
    assert not caplog.records
    assert not differing(ours, loop_grads(models.make(models.llama), ragged(), loss_of))


# -- faults and refusals ---------------------------------------------------------------------------


class Stumble(Exception):
    """The exception of a block."""


@pytest.mark.parametrize(
    ("call", "update"),
    [(3, {}), (3, {"update": "backward"}), (5, {}), (5, {"update": "backward", "generations": 2})],
)
def test_an_exception_in_the_third_micro_batch_leaves_the_model_whole(
    call: int, update: dict[str, Any], tmp_path: Path
) -> None:
    """Three micro-batches go through a checkpointed block, and again in backward, which the fifth
    call is in the midst of."""
    calls = 0

    def stumble(model: nn.Module, _step: int) -> None:
        nonlocal calls
        block: Any = model.get_submodule("model.layers.1.mlp")
        calls = 0

        def count(*_: Any) -> None:
            nonlocal calls
            calls += 1
            if calls == call:
                raise Stumble

        removable = block.register_forward_pre_hook(count)
        try:
            with pytest.raises(Stumble):
                inf.handle(model).accumulate(ragged(), functools.partial(models.loss_of, model))
        finally:
            removable.remove()

    training = dataclasses.replace(LLAMA, checkpointing=False, max_norm=None)
    broken = dataclasses.replace(training, before=stumble)
    result = harness.offloaded(broken, policy(tmp_path, **update))
    assert_is_the_loop(dataclasses.replace(result, seen=[]), training)
    assert calls


@pytest.fixture
def llama() -> Iterator[Any]:
    model = inf.offload(models.make(models.llama), inf.Policy(**CPU))
    yield model
    inf.handle(model).close()


def test_what_fn_returns_comes_back_without_graphs(llama: Any) -> None:
    def loss_of(batch: models.Batch) -> tuple[Any, ...]:
        out = llama(**batch)
        return out.loss, "kept", out.logits, {"more": [out.logits.exp()]}, out

    for loss, word, logits, more, out in inf.handle(llama).accumulate(ragged(), loss_of):
        assert word == "kept"
        for tensor in (loss, logits, *more["more"], out.loss, out.logits):
            assert tensor.grad_fn is None
    batches = iter(ragged())
    class Pair(tuple[torch.Tensor, ...]):
        __slots__ = ()

    def pair_of(batch: models.Batch) -> Pair:
        out = llama(**batch)
        return Pair((out.loss, out.logits))

    for found in inf.handle(llama).accumulate(ragged(), pair_of):
        assert [tensor.grad_fn for tensor in found] == [None, None]
    (loss,) = inf.handle(llama).accumulate(
        itertools.islice(batches, 1), lambda batch: llama(**batch).loss
    )
    assert loss.shape == ()
    assert loss.grad_fn is None
    assert len(list(batches)) == 2


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda out: None, "a NoneType for micro-batch 0"),
        (lambda out: out, "a CausalLMOutputWithPast for micro-batch 0"),
        (lambda out: out.logits, r"a tensor \[2, 12, 96\] for micro-batch 0"),
        (lambda out: (), "a tuple for micro-batch 0"),
        (lambda out: out.loss.detach(), "micro-batch 0 has no graph"),
    ],
)
def test_fn_must_return_its_loss(llama: Any, returned: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        inf.handle(llama).accumulate(ragged(), lambda batch: returned(llama(**batch)))
    assert all(param.grad is None for param in llama.parameters())


def test_it_is_called_in_the_training_loop(llama: Any) -> None:
    handle = inf.handle(llama)
    with pytest.raises(ValueError, match="no micro-batches"):
        handle.accumulate([], models.loss_of)
    loss_of = functools.partial(models.loss_of, llama)
    with pytest.raises(RuntimeError, match="of another accumulate"):
        handle.accumulate([1], lambda _: handle.accumulate(ragged(), loss_of)[0])
    removable = llama.model.norm.register_forward_pre_hook(
        lambda *_: handle.accumulate(ragged(), loss_of) and None
    )
    with pytest.raises(RuntimeError, match="inside of a forward"):
        llama(**ragged()[0])
    removable.remove()
    loss = loss_of(ragged()[0])
    loss.register_hook(lambda _: handle.accumulate(ragged(), loss_of) and None)
    with pytest.raises(RuntimeError, match="or a backward"):
        loss.backward()
    llama.zero_grad()
    handle.accumulate(ragged(), loss_of)
    handle.close()
    with pytest.raises(EngineClosed):
        handle.accumulate(ragged(), loss_of)
