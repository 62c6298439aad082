"""`inf.microbatched` of models that do more than pass a batch through their blocks: they have the
bits of the loop over micro-batches, or are refused by name."""

from __future__ import annotations

import collections
import functools
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

import infinity as inf
from infinity._src.hooks import activation_offload as activations
from infinity._src.microbatch.rows import Batch, Numbers, Unclear
from tests import harness, models
from tests.sliced import (
    Factory,
    assert_is_its_loop,
    assert_is_the_loop,
    cut,
    differing,
    grads_of,
    loop_grads,
    of_steps,
    sliced,
    whole,
)
from tests.test_bitwise import policy
from tests.test_microbatched import LLAMA, NVME, SPECULATIVE


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    with harness.one_thread():
        yield


# -- logits and losses -----------------------------------------------------------------------------

Ending = Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]


def llama_with(ending: Ending, function: Callable[..., torch.Tensor] | None = None) -> Factory:
    """A factory of Llamas whose forward ends in `ending(model, hidden, labels)`. function: the loss
    function of the model, if not its own."""
    from transformers import LlamaForCausalLM

    class Ended(LlamaForCausalLM):
        def forward(self, input_ids: Any = None, labels: Any = None) -> Any:  # type: ignore[override]
            hidden = self.model(input_ids=input_ids).last_hidden_state
            return {"loss": ending(self, hidden, labels)}

    if function is not None:
        Ended.loss_function = property(lambda _self: function)  # type: ignore[assignment]
    config: Any = models.llama(1).config
    return lambda: Ended(config)


def of_dict(out: Any) -> torch.Tensor:
    loss: torch.Tensor = out["loss"]
    return loss


def plain_loss(model: Any, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model.loss_function(logits, labels, models.VOCAB)
    return loss


def masks(model: Any, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Chameleon: some classes are never predicted."""
    logits = model.lm_head(hidden)
    logits[:, :, 5:20] = torch.finfo(logits.dtype).min
    return plain_loss(model, logits, labels)


def masks_without_gradients(model: Any, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    logits = model.lm_head(hidden)
    with torch.no_grad():
        assert logits.argmax(-1).shape == labels.shape, "computed without a graph"
        logits.mul_(2.0)
        logits -= 1.0
    assert logits.requires_grad
    return plain_loss(model, logits, labels)


def writes_to_a_view(model: Any, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    logits = model.lm_head(hidden)
    view = logits.view(-1, models.VOCAB)
    view[:, :9] = 0.5
    return plain_loss(model, logits, labels)


def reads(model: Any, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    logits = model.lm_head(hidden)
    assert logits.requires_grad
    assert not logits.is_leaf
    assert logits.float().abs().max() > 0
    return plain_loss(model, logits, labels)


def teaches(model: Any, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """A head under no_grad is a constant."""
    with torch.no_grad():
        taught = model.lm_head(hidden)
    assert not taught.requires_grad
    return plain_loss(model, model.lm_head(hidden) - 0.5 * taught, labels)


@pytest.mark.parametrize(
    "ending", [masks, masks_without_gradients, writes_to_a_view, reads, teaches]
)
def test_the_loss_is_that_of_the_logits_as_they_are(ending: Ending) -> None:
    batch = models.token_batches(1, rows=4)[0]
    assert_is_its_loop(llama_with(ending), batch, loss_of=of_dict)


def test_several_logits_in_one_loss_stay_apart() -> None:
    def two(model: Any, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits, other = model.lm_head(hidden), model.lm_head(hidden.flip(1))
        loss: torch.Tensor = model.loss_function(logits, labels, other)
        return loss

    def function(logits: torch.Tensor, labels: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return models.next_token_loss(logits, labels) + 3 * models.next_token_loss(other, labels)

    batch = models.token_batches(1, rows=4)[0]
    model = sliced(llama_with(two, function))
    model(**batch)["loss"].backward()
    loop = loop_grads(models.make(llama_with(two, function)), cut(batch, 2), of_dict)
    ours = grads_of(model)
    # The head is used twice.
    assert set(differing(ours, loop)) <= {"lm_head.weight"}
    torch.testing.assert_close(ours["lm_head.weight"], loop["lm_head.weight"], rtol=0.1, atol=1e-3)


@pytest.mark.parametrize("items", [None, 7])
def test_a_loss_without_rows_is_computed_once(items: int | None) -> None:
    """ModernBERT's `sparse_prediction`: logits of masked tokens alone."""

    def sparse(model: Any, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        masked = labels % 3 == 0
        logits = model.lm_head(hidden[masked])
        loss: torch.Tensor = model.loss_function(
            logits, None, models.VOCAB, shift_labels=labels[masked], num_items_in_batch=items
        )
        return loss

    batch = models.token_batches(1, rows=4)[0]
    ours, plain = (make(llama_with(sparse)) for make in (sliced, models.make))
    losses = [model(**batch)["loss"] for model in (ours, plain)]
    torch.testing.assert_close(*losses)


def test_a_head_under_another_autocast_than_the_loss_computes_in_its_own() -> None:
    def upcast(model: Any, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            logits = model.lm_head(hidden.float())
        assert logits.dtype == torch.float32
        return plain_loss(model, logits, labels)

    def grads(make: Callable[..., Any], n: int) -> dict[str, torch.Tensor]:
        model = make(llama_with(upcast)).float()
        for part in cut(batch, n):
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(**part)["loss"] / n
            loss.backward()
        return grads_of(model)

    batch = models.token_batches(1, rows=4)[0]
    assert not differing(grads(sliced, 1), grads(models.make, 2))


@pytest.mark.parametrize("kind", ["forward", "pre", "global"])
def test_hooks_that_are_put_on_the_head_later_see_logits(kind: str) -> None:
    seen: list[Any] = []

    def hook(_module: nn.Module, args: tuple[Any, ...], output: Any = None) -> Any:
        seen.extend(args if output is None else [output])
        return 2 * args[0] if output is None else 2 * output

    def hooked(model: Any) -> Any:
        head = model.lm_head
        if kind != "global":
            put = head.register_forward_pre_hook if kind == "pre" else head.register_forward_hook
            put(hook)
        return model

    batch = models.token_batches(1, rows=4)[0]
    ours, loop = hooked(sliced(models.llama)), hooked(models.make(models.llama))
    handle = (
        nn.modules.module.register_module_forward_hook(lambda _m, _a, out: seen.append(out))
        if kind == "global"
        else None
    )
    try:
        ours(**batch).loss.backward()
    finally:
        if handle is not None:
            handle.remove()
    wanted = (4, 12, 32 if kind == "pre" else models.VOCAB)
    assert any(getattr(each, "shape", None) == wanted for each in seen)
    assert not differing(grads_of(ours), loop_grads(loop, cut(batch, 2)))


def test_weights_of_classes_are_no_rows() -> None:
    def weighted(model: Any, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        pooled = model.lm_head(hidden).mean(1)[:, :4]
        loss: torch.Tensor = model.loss_function(
            pooled, labels[:, 0] % 4, weights=torch.tensor([1.0, 2.0, 3.0, 4.0])
        )
        return loss

    def function(logits: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(logits.float(), labels, weights)

    batch = models.token_batches(1, rows=4)[0]
    with pytest.raises(ValueError, match=r"weights is \[4\].*shared=\['weights'\]"):
        sliced(llama_with(weighted, function))(**batch)
    assert_is_its_loop(llama_with(weighted, function), batch, loss_of=of_dict, shared=["weights"])


def test_logits_outside_of_the_loss_are_told_once_for_each_model(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model: Any = sliced(models.t5)
    batch = models.token_batches(1, rows=4)[0]
    with caplog.at_level(logging.WARNING, "infinity"):
        for _ in range(3):
            model(**batch).loss.backward()
    assert caplog.text.count("computed in full") == 1
    model = sliced(models.llama).requires_grad_(False)
    logits = model(**batch).logits
    assert logits.compute() is logits.compute(), "with nothing trainable they have no graph"


# -- what blocks do beside returning an output -----------------------------------------------------


class Stack(nn.Module):
    """Blocks one after the other, as `call(model, block, x)` calls them."""

    def __init__(
        self,
        block: Callable[[], nn.Module],
        call: Callable[[Any, Any, torch.Tensor], torch.Tensor] = lambda _model, block, x: block(x),
        layers: int = 2,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(models.VOCAB, 8)
        self.blocks = nn.ModuleList([block() for _ in range(layers)])
        self.call = call

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = x + self.call(self, block, x)
        return x.float().square().mean()


class Noting(nn.Module):
    """A linear block that does `more(self, x, *args)`."""

    def __init__(self, more: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.more = more

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self.more is not None:
            self.more(self, x, *args, **kwargs)
        return torch.tanh(self.linear(x))


IDS = models.token_batches(1, rows=4)[0]["input_ids"]


def as_it_is(loss: torch.Tensor) -> torch.Tensor:
    return loss


class Normed(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x.flatten(0, 1)).view_as(x)


@pytest.mark.parametrize(
    ("norm", "buffer"),
    [
        (lambda: nn.BatchNorm1d(8), "norm.num_batches_tracked"),
        (lambda: nn.utils.spectral_norm(nn.Linear(8, 8)), "norm.weight_u"),
    ],
)
def test_buffers_that_forward_writes_are_refused(norm: Factory, buffer: str) -> None:
    model = sliced(lambda: Stack(lambda: Normed(norm())))
    with pytest.raises(ValueError, match=rf"blocks\.0 writes to its buffer {buffer} in forward"):
        model(IDS)
    model.blocks.eval()
    model(IDS).backward()


def leaves_a_loss(block: Any, x: torch.Tensor) -> None:
    block.aux_loss = block.linear(x).square().mean()


def appends_to_itself(block: Any, x: torch.Tensor) -> None:
    block.__dict__.setdefault("losses", []).append(block.linear(x).mean())


@pytest.mark.parametrize("more", [leaves_a_loss, appends_to_itself])
def test_a_loss_that_a_block_keeps_is_refused(more: Callable[..., Any]) -> None:
    model = sliced(lambda: Stack(functools.partial(Noting, more)))
    with pytest.raises(ValueError, match=r"blocks\.0 keeps a tensor with a graph in its attribute"):
        model(IDS)
    model(IDS[:1]).backward()


def test_weight_norm_keeps_a_weight_and_no_loss() -> None:
    factory = functools.partial(Stack, lambda: Normed(nn.utils.weight_norm(nn.Linear(8, 8))))
    assert_is_its_loop(factory, {"input_ids": IDS}, loss_of=as_it_is)


@pytest.mark.parametrize("kind", [list, dict, functools.partial(collections.defaultdict, list)])
def test_an_argument_that_a_block_writes_to_is_refused(kind: Callable[[], Any]) -> None:
    def call(model: Any, block: Any, x: torch.Tensor) -> torch.Tensor:
        model.found = kind()
        out: torch.Tensor = block(x, model.found)
        return out

    def write(_block: Any, x: torch.Tensor, found: Any) -> None:
        if isinstance(found, list):
            found.append(x.mean())
        else:
            found["loss"] = x.mean()

    with pytest.raises(ValueError, match=r"blocks\.0 writes to a list or a dict"):
        sliced(lambda: Stack(functools.partial(Noting, write), call))(IDS)
    model = sliced(lambda: Stack(Noting, call))
    model(IDS).backward()


def test_losses_that_blocks_return_for_each_slice_refuse_every_operator() -> None:
    per_slice = inf.microbatched(models.ListMoe(), 2).blocks[0](torch.randn(4, 12, 32))[1]
    for use in (bool, float, int, len, iter, list, lambda aux: aux + 1, lambda aux: 2 * aux):
        with pytest.raises(ValueError, match=r"an output of blocks\.0 that is no batch of rows"):
            use(per_slice)  # type: ignore[operator]


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_a_checkpoint_around_blocks_has_the_same_bits_or_is_refused(
    reentrant: bool, dropout: float
) -> None:
    """Not reentrant around two blocks at once: the second gets what the first computes again."""

    class Checkpointed(Stack):
        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            x = self.embed(input_ids)
            if reentrant:
                for block in self.blocks:
                    x = checkpoint(block, x, use_reentrant=True)
            else:
                x = checkpoint(nn.Sequential(*self.blocks), x, use_reentrant=False)
            return x.float().square().mean()

    factory = functools.partial(
        Checkpointed, lambda: nn.Sequential(nn.Linear(8, 8), nn.Dropout(dropout))
    )
    if not dropout:
        assert_is_its_loop(factory, {"input_ids": IDS}, loss_of=as_it_is)
        return
    loss = sliced(factory)(IDS)
    with pytest.raises(ValueError, match=r"blocks\.\d draws random.*remove that checkpoint"):
        loss.backward()


def test_a_checkpoint_around_the_whole_model_draws_the_same_masks() -> None:
    factory = functools.partial(Stack, lambda: nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)))
    one, other = sliced(factory), sliced(factory)
    torch.manual_seed(5)
    one(IDS).backward()
    torch.manual_seed(5)
    checkpoint(other, IDS, use_reentrant=False).backward()
    assert not differing(grads_of(other), grads_of(one))


# -- which arguments have rows ---------------------------------------------------------------------


def mpt() -> nn.Module:
    from transformers import MptConfig, MptForCausalLM

    return MptForCausalLM(
        MptConfig(d_model=32, n_heads=4, n_layers=2, max_seq_len=16, vocab_size=models.VOCAB)
    )


def bloom() -> nn.Module:
    from transformers import BloomConfig, BloomForCausalLM

    return BloomForCausalLM(
        BloomConfig(
            hidden_size=32,
            n_head=4,
            n_layer=2,
            vocab_size=models.VOCAB,
            hidden_dropout=0.0,
            attention_dropout=0.0,
        )
    )


TIED = frozenset({"transformer.wte.weight", "transformer.word_embeddings.weight"})


def test_a_bias_for_each_head_is_no_row() -> None:
    batch = models.token_batches(1, rows=4)[0]
    with pytest.raises(ValueError, match=r"position_bias is \[4, 1, 16\].*shared=\['position_bias"):
        sliced(mpt, 4)(**batch)
    assert_is_its_loop(mpt, batch, 4, apart=TIED, shared=["position_bias"])


def test_a_bias_for_each_head_of_each_row_is_cut() -> None:
    batch = models.token_batches(1, rows=6)[0]
    assert_is_its_loop(bloom, batch, 3, apart=TIED)


shapes = st.lists(st.sampled_from([1, 2, 3, 4, 8, 12, 16]), min_size=1, max_size=4)


@settings(max_examples=60)
@given(
    shape=shapes,
    rows=st.sampled_from([2, 3, 4, 8]),
    places=st.sampled_from([3, 4, 12]),
    heads=st.frozensets(st.sampled_from([2, 4, 8]), max_size=2),
    name=st.sampled_from(["bias", "hidden_states"]),
)
def test_a_tensor_with_rows_has_a_multiple_of_them(
    shape: list[int], rows: int, places: int, heads: frozenset[int], name: str
) -> None:
    batch = Batch(rows, places, Numbers(heads))
    try:
        each = batch.rows_each(name, shape)
    except Unclear:
        # Never of what has rows by its name, and never without a reason in the numbers.
        assert (name, shape[0]) != ("hidden_states", rows)
        assert shape[0] % rows == 0
        assert rows == places or rows in heads or shape[0] // rows in heads
        return
    assert each in {0, 1, *heads}
    assert each == 0 or shape[0] == each * rows
    if name == "hidden_states" and shape[0] == rows:
        assert each == 1


def first_positions(batch_first: bool) -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, 8, dropout=0.0, batch_first=batch_first)


@pytest.mark.parametrize("batch_first", [False, True])
def test_a_sequence_that_comes_first_and_is_as_long_as_the_batch_is_refused(
    batch_first: bool,
) -> None:
    def call(_model: Any, block: Any, x: torch.Tensor) -> torch.Tensor:
        if batch_first:
            out: torch.Tensor = block(x + 0)
            return out
        return block(x.transpose(0, 1).contiguous()).transpose(0, 1)

    factory = functools.partial(Stack, lambda: first_positions(batch_first), call)
    square = models.token_batches(1, rows=4, length=4)[0]["input_ids"]
    if batch_first:
        assert_is_its_loop(factory, {"input_ids": square}, loss_of=as_it_is)
        return
    with pytest.raises(ValueError, match=r"which comes first in src \[4, 4, 8\]"):
        sliced(factory)(square)


def with_argument(value: Any) -> Factory:
    """A factory of stacks whose blocks get `value` as their argument `other`."""

    def more(_block: Any, _x: torch.Tensor, other: Any) -> None:
        assert other is not None

    return functools.partial(
        Stack, functools.partial(Noting, more), lambda _model, block, x: block(x, other=value)
    )


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ([3, 4, 5, 6], r"other is a list of 4 items, as many as the batch has rows"),
        (object(), r"other is a object, which .* shared=\['other'\].*BlockMask: attn_impl"),
        (torch.zeros(12, 12, 2), None),
        ((3, 4), None),
    ],
)
def test_a_list_with_an_item_for_each_row_and_objects_are_refused_unless_they_are_shared(
    value: Any, said: str | None
) -> None:
    if said is None:
        assert_is_its_loop(with_argument(value), {"input_ids": IDS}, loss_of=as_it_is)
        return
    with pytest.raises(ValueError, match=said):
        sliced(with_argument(value))(IDS)
    assert_is_its_loop(with_argument(value), {"input_ids": IDS}, loss_of=as_it_is, shared=["other"])


def test_the_first_argument_may_be_shared() -> None:
    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, table: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) * table

    factory = functools.partial(
        Stack, Turned, lambda _model, block, x: block(torch.ones(12, 8).to(x), x)
    )
    with pytest.raises(ValueError, match=r"got a tensor \(12, 8\) first \(table\).*in shared="):
        sliced(factory)(IDS)
    assert_is_its_loop(factory, {"input_ids": IDS}, loss_of=as_it_is, shared=["table"])


# -- modules between blocks ------------------------------------------------------------------------


class NanoGpt(nn.Module):
    """nanoGPT's shape: parts and blocks in one ModuleDict, positions [places]."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(models.VOCAB, 8),
                "wpe": nn.Embedding(16, 8),
                "h": nn.ModuleList([Noting() for _ in range(2)]),
                "ln_f": nn.LayerNorm(8),
            }
        )

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        parts: Any = self.transformer
        x = parts.wte(input_ids) + parts.wpe(torch.arange(input_ids.shape[1]))
        for block in parts.h:
            x = block(x)
        return parts.ln_f(x).float().square().mean(dim=(1, 2)).mean()


def test_blocks_lie_beside_other_modules_in_a_dict(caplog: pytest.LogCaptureFixture) -> None:
    model, batch = sliced(NanoGpt), {"input_ids": IDS}
    with caplog.at_level(logging.WARNING, "infinity"):
        for _ in range(2):
            model.zero_grad()
            model(**batch).backward()
    assert caplog.text.count("transformer.wpe gets no tensor with the rows of the batch") == 1
    apart = frozenset({"transformer.wpe.weight"})
    assert_is_its_loop(NanoGpt, batch, loss_of=as_it_is, apart=apart)


class Places(nn.Module):
    """Positions that look at the batch for its length alone, as Bart's do."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 8)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.table(torch.arange(input_ids.shape[1]))[None]


def test_positions_with_one_row_have_the_gradient_of_each_slice() -> None:
    class Placed(Stack):
        def __init__(self) -> None:
            super().__init__(Noting)
            self.places = Places()

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            x = self.embed(input_ids) + self.places(input_ids)
            for block in self.blocks:
                x = x + block(x)
            return x.float().square().mean()

    assert_is_its_loop(Placed, {"input_ids": IDS}, loss_of=as_it_is)


def test_a_module_with_one_row_for_all_runs_once() -> None:
    class Prompted(Stack):
        def __init__(self) -> None:
            super().__init__(Noting)
            self.prompt = nn.Linear(8, 8)

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            prompt = self.prompt(torch.ones(1, 8).to(self.prompt.weight))
            assert prompt.shape == (1, 8)
            return super().forward(input_ids) + prompt.float().square().sum()

    ours, plain = sliced(Prompted), models.make(Prompted)
    torch.testing.assert_close(ours(IDS), plain(IDS))


class Frozen(nn.Module):
    """Blocks under no_grad inside of a forward with gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(models.VOCAB, 8)
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)) for _ in range(2)]
        )

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            x = self.blocks[0](self.embed(input_ids))
        return self.blocks[1](x).float().square().mean(dim=(1, 2))


def test_parts_without_gradients_run_in_slices_of_a_forward_with_gradients() -> None:
    from infinity._src.microbatch.random_streams import SEEDS

    model, loop = sliced(Frozen), models.make(Frozen)
    torch.manual_seed(5)
    losses = model(IDS)
    losses.sum().backward()
    torch.manual_seed(5)
    base = int(torch.randint(SEEDS, ()))
    for index, part in enumerate(IDS.tensor_split(2)):
        torch.manual_seed(base + index)
        theirs = loop(part)
        theirs.sum().backward()
        assert torch.equal(losses[2 * index : 2 * index + 2], theirs)
    assert not differing(grads_of(model), grads_of(loop))


def test_a_forward_of_a_module_of_its_own_runs_in_slices() -> None:
    def turned(model: Any) -> Any:
        for block in model.blocks:
            plain = block.forward
            block.forward = lambda x, plain=plain: 2 * plain(x)
        return model

    def factory() -> nn.Module:
        return turned(Stack(Noting))  # type: ignore[no-any-return]

    assert_is_its_loop(factory, {"input_ids": IDS}, loss_of=as_it_is)


# -- without checkpoints ---------------------------------------------------------------------------


@pytest.mark.parametrize("value", [0, None, "no", torch.tensor(True)])
def test_checkpoint_is_a_bool(value: Any) -> None:
    with pytest.raises(ValueError, match="neither True nor False"):
        inf.microbatched(models.llama(1), 2, checkpoint=value)


def test_without_checkpoints_the_bits_are_those_of_the_loop(tmp_path: Path) -> None:
    kept, loop = whole(LLAMA, checkpoint=False), harness.reference(LLAMA)
    assert_is_the_loop(harness.offloaded(kept, policy(tmp_path, **NVME, **SPECULATIVE)), LLAMA)
    harness.assert_same(harness.reference(kept), of_steps(loop, LLAMA.accumulation))


@pytest.mark.parametrize("checkpointed", [True, False])
def test_without_checkpoints_backward_computes_nothing_again(checkpointed: bool) -> None:
    model = sliced(models.llama, 2, checkpoint=checkpointed)
    model.gradient_checkpointing_enable()
    calls: list[str] = []
    for name, module in model.named_modules():
        if name.endswith("mlp"):
            module.register_forward_pre_hook(lambda *_, name=name: calls.append(name))
    model(**models.token_batches(1, rows=4)[0]).loss.backward()
    assert len(calls) == 3 * 2 * (2 if checkpointed else 1)


def test_without_checkpoints_there_is_nothing_to_put_away(tmp_path: Path) -> None:
    kept = whole(LLAMA, checkpoint=False)
    with pytest.warns(UserWarning, match=r"nothing to offload.*checkpoint=False"):
        harness.offloaded(kept, policy(tmp_path, **NVME, activations="nvme"))


# -- names, wrappers -------------------------------------------------------------------------------


def test_inputs_of_slices_have_the_name_of_their_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    plain = activations.Activations.checkpoint_saved

    def saved(self: Any, call: Any) -> None:
        plain(self, call)
        calls.append(call)

    monkeypatch.setattr(activations.Activations, "checkpoint_saved", saved)
    model: Any = sliced(functools.partial(models.llama, 2))
    inf.offload(model, policy(tmp_path, **NVME, activations="nvme"))
    out = model(**models.token_batches(1, rows=4)[0])
    labels = [call.label for call in calls]
    expected = ["model.layers.0", "model.layers.1", "model.norm", "the loss"]
    assert labels == [name for name in expected for _ in range(2)]
    del out
    inf.handle(model).close()


def test_wrappers_do_not_hide_that_a_model_is_sliced_or_offloaded() -> None:
    wrapped = nn.Sequential(inf.microbatched(models.llama(1), 2))
    for tile in (functools.partial(inf.tile_linears, tiles=2), inf.tile_loss):
        with pytest.raises(ValueError, match=r"before inf\.microbatched"):
            tile(wrapped)
    offloaded = inf.offload(models.make(models.llama), inf.Policy(params="cpu", optim="cpu"))
    with pytest.raises(ValueError, match="a part of it, is offloaded already"):
        inf.microbatched(nn.Sequential(offloaded), 2)
    inf.handle(offloaded).close()
    with pytest.raises(ValueError, match=r"shared='table' is a str"):
        inf.microbatched(models.llama(1), 2, shared="table")


def test_a_new_model_of_the_class_of_a_sliced_one_is_a_model_as_ever() -> None:
    model: Any = sliced(models.llama)
    made = type(model)(model.config)
    assert type(made).__mro__[1].__name__ != "SlicedModule"
    batch = models.token_batches(1, rows=4)[0]
    assert type(made(**batch).logits) is torch.Tensor
