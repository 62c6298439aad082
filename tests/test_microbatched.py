"""`inf.microbatched`: one forward and one backward over n slices give the bits of a loop over n
micro-batches, and read each unit as often as one micro-batch does."""

from __future__ import annotations

import copy
import dataclasses
import functools
import logging
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import infinity as inf
from infinity._src.engine import build
from infinity._src.hooks import activation_offload as activations
from infinity._src.memory.device_capacity import Passes, gathered_capacity
from infinity._src.microbatch.microbatched import Slices, slice_grads
from infinity._src.microbatch.random_streams import SEEDS
from infinity._src.microbatch.sliced_logits import SlicedLogits
from infinity._src.params.discover import find_units
from infinity._src.plan.machine import describe_machine
from infinity._src.plan.memory import gpu_need
from infinity._src.plan.workload import shape_of
from tests import harness, models
from tests.harness import Training
from tests.plans import job_of
from tests.sliced import (
    Factory,
    Microbatched,
    assert_is_its_loop,
    assert_is_the_loop,
    cut,
    differing,
    grads_of,
    loop_grads,
    whole,
)
from tests.test_bitwise import policy

NVME = {"params": "nvme", "optim": "nvme", "ram": "min"}
SPECULATIVE: dict[str, Any] = {"update": "backward", "generations": 2}


LLAMA = Training(models.llama, steps=2, accumulation=3)  # a third is no exact number
# -- the same bits ---------------------------------------------------------------------------------


def test_a_model_that_is_not_offloaded_has_the_same_bits() -> None:
    assert_is_the_loop(harness.reference(whole(LLAMA)), LLAMA)


# -- gradients of one step -------------------------------------------------------------------------


@pytest.fixture
def one_thread() -> Iterator[None]:
    with harness.one_thread():
        yield


@settings(max_examples=8)
@given(
    rows=st.integers(1, 7),
    n=st.integers(1, 5),
    length=st.integers(2, 9),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    masked=st.booleans(),
)
def test_any_batch_has_the_gradients_of_its_slices(
    rows: int, n: int, length: int, dtype: torch.dtype, masked: bool
) -> None:
    batch = models.token_batches(1, rows=rows, length=length, seed=rows)[0]
    if masked:
        # In every row, so that micro-batches and the batch choose the same kernels.
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
        batch["attention_mask"][:, :1] = 0
    factory = functools.partial(models.llama, 1)
    with harness.one_thread():
        model = models.make(Microbatched(factory, n), dtype=dtype)
        model(**batch).loss.backward()
        loop = loop_grads(models.make(factory, dtype=dtype), cut(batch, min(n, rows)))
    assert not differing(grads_of(model), loop)


@pytest.mark.usefixtures("one_thread")
def test_a_loss_of_the_items_of_the_batch_is_added_up() -> None:
    batch = models.token_batches(1, rows=4)[0]
    batch["labels"] = batch["labels"].clone()
    batch["labels"][0, 3:] = -100  # slices with different numbers of items
    items = int((batch["labels"][:, 1:] != -100).sum())
    sliced, plain, loop = (
        models.make(each) for each in (Microbatched(models.llama, 2), models.llama, models.llama)
    )
    loss = sliced(**batch, num_items_in_batch=items).loss
    loss.backward()
    for part in cut(batch, 2):
        loop(**part, num_items_in_batch=items).loss.backward()
    assert not differing(grads_of(sliced), grads_of(loop))
    assert loss.item() == pytest.approx(plain(**batch, num_items_in_batch=items).loss.item())


@pytest.mark.usefixtures("one_thread")
def test_a_loss_of_the_users_own_gets_the_logits_of_all_rows() -> None:
    batch = models.token_batches(1, rows=6)[0]
    ids = batch["input_ids"]

    def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return models.next_token_loss(logits, labels)

    sliced, loop = models.make(Microbatched(models.llama, 3)), models.make(models.llama)
    parts = zip(sliced(input_ids=ids).logits.chunk(3), ids.chunk(3), strict=True)
    total = sum((loss_of(*pair) / 3 for pair in reversed(list(parts))), torch.zeros(()))
    total.backward()
    for part in ids.chunk(3):
        (loss_of(loop(input_ids=part).logits, part) / 3).backward()
    assert not differing(grads_of(sliced), grads_of(loop))


@pytest.mark.usefixtures("one_thread")
def test_tied_weights_add_up_the_slices_of_the_head_and_then_those_of_the_embedding() -> None:
    batch = models.token_batches(1, rows=6)[0]
    model = models.make(Microbatched(models.gpt2, 3))
    model(**batch).loss.backward()
    untied: Any = models.make(models.gpt2)
    untied.lm_head.weight = nn.Parameter(untied.transformer.wte.weight.detach().clone())
    head, table = [], []
    for part in cut(batch, 3):
        (untied(**part).loss / 3).backward()
        head.append(untied.lm_head.weight.grad)
        table.append(untied.transformer.wte.weight.grad)
        untied.zero_grad()
    total = head[0]
    for term in (*head[1:], *table):
        total = total + term
    assert torch.equal(grads_of(model)["transformer.wte.weight"], total)


class Twice(nn.Module):
    """A block that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(8, 8, bias=False)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.blocks[0](torch.tanh(self.blocks[0](x))))


@pytest.mark.usefixtures("one_thread")
def test_a_module_that_is_called_twice_adds_up_its_last_call_first() -> None:
    model, x = models.make(Microbatched(Twice, 3)), torch.randn(6, 8, dtype=torch.bfloat16)
    plain = models.make(Twice)
    model(x).float().sum().backward()
    weight = plain.blocks[0].weight.detach()  # type: ignore[index, union-attr]
    first, last = [], []
    for part in x.tensor_split(3):
        weights = [weight.clone().requires_grad_() for _ in range(2)]
        inner = torch.tanh(nn.functional.linear(part, weights[0]))
        torch.tanh(nn.functional.linear(inner, weights[1])).float().sum().backward()
        first.append(weights[0].grad)
        last.append(weights[1].grad)
    total = last[0]
    for term in (*last[1:], *first):
        assert term is not None
        assert total is not None
        total = total + term
    assert torch.equal(grads_of(model)["blocks.0.weight"], total)


def vit() -> nn.Module:
    """A vision transformer that classifies."""
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(
        ViTConfig(
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            image_size=16,
            patch_size=4,
            num_labels=5,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )


BATCH = models.token_batches(1, rows=4)[0]
MASKED = {**BATCH, "attention_mask": torch.ones_like(BATCH["input_ids"])}
MASKED["attention_mask"][:, -2:] = 0
IMAGES: dict[str, Any] = {
    "pixel_values": torch.linspace(-2, 2, 4 * 3 * 16 * 16).view(4, 3, 16, 16).bfloat16(),
    "labels": torch.arange(4),
}
T5_SHARED = frozenset({"shared.weight"})
MODELS: dict[str, tuple[Factory, dict[str, Any], frozenset[str]]] = {
    # Position biases go from block to block, and the encoder's output to all of the decoder's.
    "an encoder and a decoder": (models.t5, BATCH, T5_SHARED),
    "an encoder that is masked": (models.t5, MASKED, T5_SHARED),
    # GPT-2 looks positions up once for the whole batch.
    "tied weights": (models.gpt2, BATCH, frozenset({"transformer.wte.weight"})),
    "images": (vit, IMAGES, frozenset()),
}
"""Models, batches, and the names of weights that are used twice."""


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", MODELS)
def test_a_model_of_another_kind_has_the_gradients_of_the_loop(name: str) -> None:
    factory, batch, twice = MODELS[name]
    assert_is_its_loop(factory, batch, 2, apart=twice)


class Dropping(nn.Module):
    """Dropout inside of blocks and between them."""

    def __init__(self, hidden: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(models.VOCAB, hidden)
        self.drop = nn.Dropout(0.3)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(hidden, hidden), nn.Dropout(0.5), nn.GELU()) for _ in range(2)
        )
        self.head = nn.Linear(hidden, 1)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.drop(self.embed(input_ids))
        for block in self.blocks:
            x = x + block(x)
        return self.head(x).float().square().mean(dim=(1, 2))


@pytest.mark.usefixtures("one_thread")
def test_dropout_draws_as_a_loop_that_seeds_each_micro_batch() -> None:
    ids = models.token_batches(1, rows=6)[0]["input_ids"]
    sliced, loop = models.make(Microbatched(Dropping, 3)), models.make(Dropping)
    torch.manual_seed(5)
    losses = sliced(ids)
    after = torch.get_rng_state()
    losses.sum().backward()
    assert torch.equal(torch.get_rng_state(), after), "backward draws what forward drew"
    torch.manual_seed(5)
    base = int(torch.randint(SEEDS, ()))
    assert torch.equal(torch.get_rng_state(), after), "one number for each forward"
    for index, part in enumerate(ids.tensor_split(3)):
        torch.manual_seed(base + index)
        loop(part).sum().backward()
    assert not differing(grads_of(sliced), grads_of(loop))
    other = sliced(ids)
    assert not torch.equal(other, losses), "the next forward has masks of its own"


@pytest.mark.usefixtures("one_thread")
def test_a_model_without_randomness_leaves_the_callers_numbers_alone() -> None:
    model, batch = models.make(Microbatched(models.llama, 2)), models.token_batches(1, rows=4)[0]
    before = torch.get_rng_state()
    model(**batch).loss.backward()
    assert torch.equal(torch.get_rng_state(), before)


ALBERT = {"one layer for all": (models.albert, BATCH, frozenset[str]())}


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", [*MODELS, "one layer for all"])
def test_offloading_changes_no_bits_of_a_model_in_slices(name: str, tmp_path: Path) -> None:
    factory, batch, _ = (MODELS | ALBERT)[name]
    model, plain = (models.make(Microbatched(factory, 2)) for _ in range(2))
    plain(**batch).loss.backward()
    inf.offload(model, policy(tmp_path, **NVME))
    model(**batch).loss.backward()
    ours = {
        name: param.grad.materialize()  # type: ignore[attr-defined]
        for name, param in model.named_parameters()
        if param.grad is not None
    }
    theirs = {name: grad.float() for name, grad in grads_of(plain).items()}
    inf.handle(model).close()
    assert not differing(ours, theirs)


# -- logits ----------------------------------------------------------------------------------------


def test_logits_are_computed_when_they_are_used_and_only_then(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    model, plain = models.make(Microbatched(models.llama, 2)), models.make(models.llama)
    batch = models.token_batches(1, rows=4)[0]
    inf.offload(model, policy(tmp_path, **NVME))
    optimizer = inf.AdamW(model.parameters(), lr=0.1)
    with caplog.at_level(logging.WARNING, "infinity"):
        out = model(**batch)
        out.loss.backward()
        assert type(out.logits) is SlicedLogits
        assert out.logits.shape == (4, 12, models.VOCAB)
        assert not caplog.records, "the loss needs none"
        expected = plain(**batch).logits
        assert torch.equal(out.logits.argmax(-1), expected.argmax(-1))
        assert "computed in full" in caplog.text
    assert out.logits.requires_grad
    late = model(**batch).logits
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified in place since"):
        late.sum()
    inf.handle(model).close()


def test_without_gradients_the_model_runs_as_ever() -> None:
    model: Any = models.make(Microbatched(models.llama, 2))
    plain: Any = models.make(models.llama)
    batch = models.token_batches(1, rows=4)[0]
    with torch.no_grad():
        assert torch.equal(model(**batch).logits, plain(**batch).logits)
        assert model(**batch).past_key_values is not None
    made = [
        each.generate(batch["input_ids"], max_new_tokens=4, do_sample=False)
        for each in (model, plain)
    ]
    assert torch.equal(*made)


def test_hidden_states_have_all_rows() -> None:
    model, plain = models.make(Microbatched(models.llama, 2)), models.make(models.llama)
    batch = models.token_batches(1, rows=4)[0]
    ours, theirs = (each(**batch, output_hidden_states=True) for each in (model, plain))
    assert len(ours.hidden_states) == len(theirs.hidden_states)
    for one, other in zip(ours.hidden_states, theirs.hidden_states, strict=True):
        torch.testing.assert_close(one, other)


def eager_t5() -> nn.Module:
    """T5 whose attention returns its weights."""
    model: Any = models.t5()
    model.set_attn_implementation("eager")
    return model  # type: ignore[no-any-return]


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("factory", [models.mixtral, eager_t5])
def test_attentions_have_all_rows_and_their_gradients(factory: Callable[[], nn.Module]) -> None:
    """Modules inside of blocks return them, those of T5 the encoder's and the decoder's."""
    names = ("attentions", "cross_attentions", "encoder_attentions", "decoder_attentions")

    def attentions(out: Any) -> list[torch.Tensor]:
        return [each for name in names for each in getattr(out, name, None) or ()]

    def loss_of(out: Any) -> torch.Tensor:
        # One number for each row, so that a loop adds up the same.
        return sum((each.float().square().sum() for each in attentions(out)), torch.zeros(()))

    batch, made = models.token_batches(1, rows=5)[0], models.make(factory)
    model = models.make(Microbatched(factory, 2))
    out = model(**batch, output_attentions=True)
    found = [made(**part, output_attentions=True) for part in cut(batch, 2)]
    assert len(attentions(out)) == len(attentions(found[0])) >= 2
    for ours, *theirs in zip(attentions(out), *map(attentions, found), strict=True):
        assert torch.equal(ours, torch.cat(theirs))
    loss_of(out).backward()
    for each in found:
        loss_of(each).backward()
    assert set(differing(grads_of(model), grads_of(made))) <= T5_SHARED


def test_a_copy_and_a_pickle_run_in_slices_too() -> None:
    model, batch = models.make(Microbatched(models.llama, 2)), models.token_batches(1, rows=4)[0]
    loss = model(**batch).loss
    for same in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(same).__name__ == "LlamaForCausalLM"
        out = same(**batch)
        assert torch.equal(out.loss, loss)
        assert type(out.logits) is SlicedLogits


# -- traffic, ranks, activations, faults -----------------------------------------------------------


def test_bytes_do_not_grow_with_the_number_of_slices(tmp_path: Path) -> None:
    loop = Training(models.llama, accumulation=4, max_norm=None, no_sync=True)
    one = dataclasses.replace(loop, accumulation=1)
    chosen = policy(tmp_path, **NVME, update="backward")
    looped, alone, sliced = (
        harness.offloaded(each, chosen).stats for each in (loop, one, whole(loop))
    )
    # A checkpointed block is read once more than one that is not: not at all, where it stays.
    assert sliced.bytes_read <= alone.bytes_read + alone.bytes_read // 10 < looped.bytes_read
    assert sliced.bytes_written == alone.bytes_written
    assert sliced.grad_bytes == 0 < looped.grad_bytes


def test_inputs_of_slices_rest_on_nvme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activations, "SMALLEST_BYTES", 256)
    training = dataclasses.replace(LLAMA, factory=functools.partial(models.llama, 4))
    chosen = policy(tmp_path, **NVME, activations="nvme")
    result = harness.offloaded(whole(training), chosen)
    assert_is_the_loop(result, training)
    figures = result.stats.activations
    # Four blocks and the norm, three slices each, at each step.
    slices, boundary = training.steps * 3, 2 * 12 * 32 * 2
    assert figures.calls >= slices * 5
    assert figures.stored_bytes == figures.fetched_bytes
    assert figures.stored_bytes >= slices * 4 * boundary


# -- for trainers ----------------------------------------------------------------------------------


def test_a_model_says_its_slices_and_what_its_loss_is_the_mean_of() -> None:
    assert inf.slices_of(models.llama(1)) is None
    for factory, reduction in ((models.llama, "mean"), (models.t5, None), (Twice, None)):
        model = inf.microbatched(factory(), 3)
        assert inf.slices_of(model) == Slices(3, reduction)  # type: ignore[arg-type]
        assert inf.slices_of(copy.deepcopy(model)) == inf.slices_of(model)


@pytest.mark.usefixtures("one_thread")
def test_the_loss_has_the_reduction_that_it_says() -> None:
    """Slices of unequal numbers of tokens: the mean of means is not the mean over tokens."""
    from transformers import LlamaForCausalLM

    class Inherited(LlamaForCausalLM):
        """Its forward calls that of its base class."""

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs)

    batch = models.token_batches(1, rows=4)[0]
    batch["labels"] = batch["labels"].clone()
    batch["labels"][0, 3:] = -100
    config: Any = models.llama(1).config
    for kind in (LlamaForCausalLM, Inherited):
        sliced, plain = (models.make(functools.partial(kind, config)) for _ in range(2))
        inf.microbatched(sliced, 2)
        assert inf.slices_of(sliced) == Slices(2, "mean")
        means = [plain(**part).loss.item() for part in cut(batch, 2)]
        assert sliced(**batch).loss.item() == pytest.approx(sum(means) / 2)
        assert plain(**batch).loss.item() != pytest.approx(sum(means) / 2)


# -- device memory of sums -------------------------------------------------------------------------


@pytest.mark.parametrize("grad_dtype", [None, torch.float32])
@pytest.mark.parametrize("update", ["deferred", "backward"])
def test_the_plan_and_the_engine_count_the_same_sums_of_slices(
    grad_dtype: torch.dtype | None, update: str
) -> None:
    model: Any = models.make(models.llama)
    job = job_of(
        tokens=64, sequence=8, micro_batches=4, schedule="vertical", update=update,
        grad_dtype=grad_dtype,
    )  # fmt: skip
    machine = describe_machine(gpus=0, ram_bytes=1 << 30)
    parts = gpu_need(shape_of(model), machine, job).parts
    found = slice_grads(inf.microbatched(model, 4), grad_dtype)
    assert found is not None
    passes = Passes(in_backward=update == "backward")
    assert parts["fresh gradients"] + parts["sums of gradients"] == found.capacity_bytes(passes)
    block = sum(param.numel() for param in model.model.layers[0].parameters())
    largest = max(param.numel() for param in model.parameters())
    wide = 2 if grad_dtype is None else 4
    assert found.one_bytes == largest * (2 if grad_dtype is None else 2 + 4)
    assert parts["sums of gradients"] >= wide * block
    assert slice_grads(models.llama(), None) is None


def test_a_device_without_room_for_wide_sums_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def room(grad_dtype: torch.dtype | None) -> int:
        model = inf.microbatched(models.make(models.llama), 2)
        sizes = [unit.size for unit in find_units(model, unit_bytes_max=1 << 20)]
        found = slice_grads(model, grad_dtype)
        assert found is not None
        return gathered_capacity(sizes, Passes()) + found.capacity_bytes(Passes())

    def offloaded(grad_dtype: torch.dtype | None) -> None:
        model = inf.microbatched(models.make(models.llama), 2)
        inf.offload(model, policy(tmp_path, **NVME, grad_dtype=grad_dtype))
        inf.handle(model).close()

    narrow, wide = room(None), room(torch.float32)
    assert narrow < wide
    monkeypatch.setattr(build, "device_memory_bytes", lambda _device: wide - 1)
    offloaded(None)
    with pytest.raises(ValueError, match=r"adds up the gradients of a block.*narrower grad_dtype"):
        offloaded(torch.float32)
    monkeypatch.setattr(build, "device_memory_bytes", lambda _device: wide)
    offloaded(torch.float32)
    monkeypatch.setattr(build, "device_memory_bytes", lambda _device: narrow - 1)
    with pytest.raises(ValueError, match=r"adds up the gradients of a block"):
        offloaded(None)


# -- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [0, -1, True, 2.0, "2"])
def test_the_number_of_slices_is_a_whole_number(n: Any) -> None:
    with pytest.raises(ValueError, match="positive whole number"):
        inf.microbatched(models.llama(1), n)


def test_set_up_says_what_it_cannot_do(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="found no blocks"):
        inf.microbatched(nn.Linear(2, 2), 2)
    with pytest.raises(ValueError, match="blocks: the model has no 'Nothing'"):
        inf.microbatched(models.llama(1), 2, blocks=["Nothing"])
    scripted = nn.Sequential(nn.ModuleList([torch.jit.trace(nn.Linear(2, 2), torch.ones(2, 2))]))
    with pytest.raises(ValueError, match=r"0\.0 is TorchScript"):
        inf.microbatched(scripted, 2)
    assert type(scripted).__mro__[1].__name__ != "SlicedModule", "it is as it was"
    model = inf.microbatched(models.llama(1), 2)
    with pytest.raises(ValueError, match="microbatched already"):
        inf.microbatched(model, 2)
    for tile in (
        functools.partial(inf.tile_linears, tiles=2),
        functools.partial(inf.tile_experts, experts=1),
        inf.tile_loss,
    ):
        with pytest.raises(ValueError, match=r"before inf\.microbatched"):
            tile(model)
    offloaded = inf.offload(models.make(models.llama), inf.Policy(params="cpu", optim="cpu"))
    with pytest.raises(ValueError, match="offloaded already"):
        inf.microbatched(offloaded, 2)
    inf.handle(offloaded).close()


def test_caches_are_refused_by_name() -> None:
    from transformers import DynamicCache

    batch = models.token_batches(1, rows=4)[0]
    model: Any = models.make(Microbatched(models.mixtral, 2))
    with pytest.raises(ValueError, match="use_cache with gradients"):
        model(**batch, use_cache=True)
    cache = DynamicCache(config=model.config)
    with pytest.raises(ValueError, match="past_key_values with gradients"):
        model(**batch, past_key_values=cache)
    hidden = torch.randn(4, 12, 32, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="past_key_values is a DynamicCache"):
        model.model.layers[0](hidden, past_key_values=cache)
    model(**batch).loss.backward()


def test_a_loss_that_blocks_return_for_each_slice_is_refused() -> None:
    model, batch = models.make(Microbatched(models.ListMoe, 2)), models.token_batches(1, rows=4)[0]
    with pytest.raises(ValueError, match=r"an output of blocks\.0 that is no batch of rows"):
        model(**batch)
    assert model(**{name: value[:1] for name, value in batch.items()})["loss"].requires_grad


class Positioned(nn.Module):
    """A block with a table of places."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([AddTable()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks[0](x, torch.ones(x.shape[1], x.shape[2]))


class AddTable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return x * self.scale + table


def test_a_tensor_as_long_as_the_batch_is_refused_unless_it_is_named() -> None:
    model = inf.microbatched(Positioned(), 2)
    assert model(torch.zeros(4, 5, 3)).sum() == 4 * 5 * 3
    with pytest.raises(ValueError, match=r"table is \[4, 3\].*shared=\['table'\]"):
        model(torch.zeros(4, 4, 3))
    named = inf.microbatched(Positioned(), 2, shared=["table"])
    assert named(torch.zeros(4, 4, 3)).sum() == 4 * 4 * 3


def test_a_block_without_the_batch_is_refused() -> None:
    model: Any = inf.microbatched(Positioned(), 2)

    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([nn.Linear(4, 4)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.blocks[0](x.transpose(0, 1))

    turned = inf.microbatched(Turned(), 2)
    with pytest.raises(ValueError, match=r"blocks\.0 got a tensor \(3, 6, 4\) first"):
        turned(torch.randn(6, 3, 4))
    with pytest.raises(ValueError, match="no batch among the arguments"):
        model(None)
