"""`inf.microbatched` of blocks that read and leave more than arguments and outputs: they have the
bits of the loop over micro-batches, or are refused by name."""

from __future__ import annotations

import collections
import functools
import logging
import random
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import infinity as inf
from infinity._src.microbatch.rows import PerSlice
from tests import harness, models
from tests.sliced import (
    Factory,
    assert_is_its_loop,
    cut,
    differing,
    grads_of,
    loop_grads,
    sliced,
)
from tests.test_bitwise import policy
from tests.test_microbatched import NVME
from tests.test_microbatched_refusals import IDS, Noting, Stack, as_it_is


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    with harness.one_thread():
        yield


Call = Callable[[Any, Any, torch.Tensor], torch.Tensor]


def stack(more: Callable[..., Any], call: Call = lambda _model, block, x: block(x)) -> Factory:
    """A factory of stacks whose blocks do `more(block, x, ...)` before they compute."""
    return functools.partial(Stack, functools.partial(Noting, more), call)


# -- arguments that a block writes to --------------------------------------------------------------


def with_one_mask(model: Any, block: Any, x: torch.Tensor) -> torch.Tensor:
    """All blocks get the mask that the first one got."""
    if block is model.blocks[0]:
        model.mask = torch.ones(model.rows or len(x), x.shape[1], 1).to(x)
    out: torch.Tensor = block(x, model.mask)
    return out


def halves(_block: Any, _x: torch.Tensor, mask: torch.Tensor) -> None:
    mask.mul_(0.5)


@pytest.mark.parametrize("rows", [None, 1], ids=["a row for each", "one for all"])
@pytest.mark.parametrize("checkpointed", [True, False])
def test_a_block_that_writes_to_a_mask_is_refused(rows: int | None, checkpointed: bool) -> None:
    """The next block would get what one slice has left, or nothing of it."""

    def factory() -> nn.Module:
        model: Any = stack(halves, with_one_mask)()
        model.rows = rows
        return model  # type: ignore[no-any-return]

    with pytest.raises(ValueError, match=r"blocks\.0 writes to a tensor or to an object among its"):
        sliced(factory, checkpoint=checkpointed)(IDS)


def test_a_block_that_writes_to_its_input_is_refused() -> None:
    def write(_block: Any, x: torch.Tensor) -> None:
        x += 1

    factory = stack(write, lambda _model, block, x: block(x * 1))
    with pytest.raises(ValueError, match=r"blocks\.0 writes to a tensor.*`x = x \* y` for `x \*="):
        sliced(factory)(IDS)


class Notes:
    """An object that blocks leave something in."""


def test_an_object_that_all_slices_share_is_refused_when_it_is_written_to() -> None:
    """Deep inside, as a cache has it."""

    def call(model: Any, block: Any, x: torch.Tensor) -> torch.Tensor:
        if block is model.blocks[0]:
            model.notes = Notes()
            model.notes.layers = [types.SimpleNamespace(keys=None)]
        out: torch.Tensor = block(x, notes=model.notes)
        return out

    def write(_block: Any, x: torch.Tensor, notes: Any) -> None:
        notes.layers[0].keys = x.detach() + 1

    def read(_block: Any, _x: torch.Tensor, notes: Any) -> None:
        assert notes.layers[0].keys is None

    with pytest.raises(ValueError, match=r"blocks\.0 writes to a tensor or to an object among its"):
        sliced(stack(write, call), shared=["notes"])(IDS)
    assert_is_its_loop(stack(read, call), {"input_ids": IDS}, loss_of=as_it_is, shared=["notes"])


# -- what blocks hand on to each other -------------------------------------------------------------


class Sharing(nn.Module):
    """A block that computes keys for the blocks after it, or takes those that there are."""

    def __init__(self) -> None:
        super().__init__()
        self.keys, self.values = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, shared: Any) -> torch.Tensor:
        if "keys" not in shared:
            shared["keys"] = (self.keys(x), 2)
        keys, times = shared["keys"]
        return torch.tanh(self.values(x) * keys * times)


def sharing() -> nn.Module:
    def call(model: Any, block: Any, x: torch.Tensor) -> torch.Tensor:
        if block is model.blocks[0]:
            model.handed = collections.UserDict()
        out: torch.Tensor = block(x, model.handed)
        return out

    made: Any = Stack(Sharing, call, layers=3)
    # Of the last block's input alone, so that no activation is used both in a block and beside it.
    made.forward = lambda input_ids: (
        functools.reduce(lambda x, block: call(made, block, x), made.blocks, made.embed(input_ids))
        .float()
        .square()
        .mean()
    )
    return made  # type: ignore[no-any-return]


@pytest.mark.parametrize("checkpointed", [True, False])
@pytest.mark.parametrize("n", [1, 2])
def test_blocks_share_keys_in_a_dict_of_their_own(n: int, checkpointed: bool) -> None:
    """As Gemma 3n and 4 do."""
    ids = models.token_batches(1, rows=6)[0]["input_ids"]
    model, plain = (models.make(sharing) for _ in range(2))
    inf.microbatched(model, n, checkpoint=checkpointed)
    model(ids).backward()
    kept: Any = model.handed["keys"]  # type: ignore[index]
    for part in ids.tensor_split(n):
        (plain(part) / n).backward()
    ours, theirs = grads_of(model), grads_of(plain)
    assert ours.keys() == theirs.keys()
    assert set(differing(ours, theirs)) <= {"embed.weight"}, "its output is used three times"
    assert kept[1] == 2
    if n > 1:
        assert type(kept[0]) is PerSlice
        with pytest.raises(ValueError, match=r"mean of an output of blocks\.0 that is no batch"):
            kept[0].mean()


def gemma4(**values: Any) -> nn.Module:
    """A Gemma 4 whose last two layers take the keys and values of those before."""
    from transformers import Gemma4ForCausalLM, Gemma4TextConfig

    kinds = ["sliding_attention", "full_attention"]
    made: nn.Module = Gemma4ForCausalLM(
        Gemma4TextConfig(
            vocab_size=models.VOCAB,
            vocab_size_per_layer_input=models.VOCAB,
            hidden_size=32,
            hidden_size_per_layer_input=8,
            intermediate_size=48,
            num_hidden_layers=4,
            layer_types=kinds * 2,
            num_kv_shared_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            global_head_dim=8,
            sliding_window=8,
            tie_word_embeddings=False,
            pad_token_id=0,
            **values,
        )
    )
    return made


def test_a_gemma_whose_layers_share_keys_has_the_bits_of_the_loop() -> None:
    assert_is_its_loop(gemma4, models.token_batches(1, rows=5)[0], 2)


def test_an_offloaded_weight_among_the_arguments_of_blocks_is_no_write(tmp_path: Path) -> None:
    """Its storage comes and goes meanwhile."""

    class Looking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.linear(x)) + table.mean(0)

    factory = functools.partial(Stack, Looking, lambda model, block, x: block(x, model.more.weight))

    def made() -> nn.Module:
        model: Any = factory()
        model.more = nn.Embedding(models.VOCAB, 8)
        return model  # type: ignore[no-any-return]

    plain, ours = sliced(made), sliced(made)
    plain(IDS).backward()
    inf.offload(ours, policy(tmp_path, **NVME))
    for _ in range(2):
        ours.zero_grad()
        ours(IDS).backward()
    found = {name: param.grad.materialize() for name, param in ours.named_parameters()}
    assert not differing(found, {name: grad.float() for name, grad in grads_of(plain).items()})
    inf.handle(ours).close()


def test_slices_that_hand_on_different_items_are_refused() -> None:
    def write(_block: Any, x: torch.Tensor, shared: Any) -> None:
        shared[f"rows {len(x)}"] = x

    def call(_model: Any, block: Any, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = block(x, collections.UserDict())
        return out

    with pytest.raises(ValueError, match=r"blocks\.0: slices write different items to the UserDic"):
        sliced(stack(write, call), 2)(IDS[:3])


# -- what a block keeps ----------------------------------------------------------------------------


class Counting(Noting):
    """A block with state that is no buffer."""

    def __init__(self, more: Callable[..., Any]) -> None:
        super().__init__(more)
        self.state: Any = torch.zeros(())
        self.draws: Any = torch.Generator()


def adds(block: Any, _x: torch.Tensor) -> None:
    block.state.add_(1)


def draws(block: Any, x: torch.Tensor) -> None:
    torch.rand(len(x), generator=block.draws)


def draws_of_python(block: Any, _x: torch.Tensor) -> None:
    block.draws.random()


@pytest.mark.parametrize(
    ("more", "generator", "said"),
    [
        (adds, None, "writes to the tensor in its attribute state"),
        (draws, torch.Generator(), "draws from the generator in its attribute draws"),
        (draws_of_python, random.Random(3), "draws from the generator in its attribute draws"),
        (draws_of_python, np.random.default_rng(3), "draws from the generator in its attribute dr"),
    ],
)
def test_state_that_each_slice_would_move_on_is_refused(
    more: Callable[..., Any], generator: Any, said: str
) -> None:
    def factory() -> nn.Module:
        model: Any = Stack(functools.partial(Counting, more))
        for block in model.blocks:
            block.draws = generator
        return model  # type: ignore[no-any-return]

    with pytest.raises(ValueError, match=rf"blocks\.0 {said}"):
        sliced(factory)(IDS)
    sliced(factory, checkpoint=False)(IDS[:1]).backward()


@pytest.mark.parametrize("kept", ["tensor", "float"])
def test_a_value_that_a_block_keeps_is_told_once(
    kept: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A mean that the next call reads would be another than in a loop; one that is kept to be
    looked at is not."""

    def keep(block: Any, x: torch.Tensor) -> None:
        mean = x.detach().float().mean()
        block.state = 0.9 * block.state + (mean if kept == "tensor" else float(mean))

    def factory() -> nn.Module:
        model: Any = Stack(functools.partial(Counting, keep))
        if kept == "float":
            for block in model.blocks:
                block.state = 0.0
        return model  # type: ignore[no-any-return]

    model = sliced(factory)
    with caplog.at_level(logging.WARNING, "infinity"):
        for _ in range(2):
            model(IDS).backward()
    assert caplog.text.count("blocks.0 keeps a value in its attribute state") == 1


def of_numpy() -> float:
    return float(np.random.rand())  # noqa: NPY002 - the generator that models draw from


@pytest.mark.parametrize("source", [random.random, of_numpy])
def test_backward_draws_what_forward_drew_from_python_and_numpy(
    source: Callable[[], float],
) -> None:
    """Torch's checkpoints restore its own generators alone."""

    class Noisy(Noting):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.linear(x)) * source()

    found, after = [], []
    for checkpointed in (True, False):
        model = sliced(functools.partial(Stack, Noisy), 2, checkpoint=checkpointed)
        random.seed(5)
        np.random.seed(5)  # noqa: NPY002
        model(IDS).backward()
        found.append(grads_of(model))
        after.append(source())
    assert not differing(*found)
    assert after[0] == after[1]


# -- modules, memory, order ------------------------------------------------------------------------


class Adapter(nn.Module):
    """A low-rank path beside a module."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base
        self.more = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.base(x)
        more: torch.Tensor = self.more(found)
        return found + more


def test_a_module_that_is_put_in_later_is_refused_outside_of_blocks() -> None:
    model = sliced(functools.partial(Stack, Noting))
    model.blocks[0].linear = Adapter(model.blocks[0].linear).to(torch.bfloat16)
    model(IDS).backward()
    model.embed = Adapter(model.embed).to(torch.bfloat16)
    with pytest.raises(
        ValueError, match=r"embed\.more, a Linear, was put into the model after inf"
    ):
        model(IDS)


class Recurrent(Stack):
    """A recurrent module before the blocks. kind: what it gets: "rows" or "places" first, or a
    "table" without rows."""

    def __init__(self, kind: str) -> None:
        super().__init__(Noting)
        self.kind = kind
        self.table = nn.Parameter(torch.ones(4, 8))
        self.rnn = nn.GRU(8, 8, batch_first=kind == "rows")

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor = self.embed(input_ids)
        if self.kind == "rows":
            x = self.rnn(x)[0]
        elif self.kind == "places":
            x = self.rnn(x.transpose(0, 1))[0].transpose(0, 1)
        else:
            x = x + self.rnn(self.table)[0][-1]
        for block in self.blocks:
            x = block(x)
        return x.float().square().mean()


def test_rows_that_lie_inside_of_places_in_memory_stay_there() -> None:
    """As a recurrent module returns them: sums go through memory in its order."""
    model, plain = (
        sliced(functools.partial(Recurrent, "rows")),
        models.make(lambda: Recurrent("rows")),
    )
    seen: list[tuple[int, ...]] = []
    model.blocks[0].linear.register_forward_pre_hook(lambda _, args: seen.append(args[0].stride()))
    plain.blocks[0].linear.register_forward_pre_hook(  # type: ignore[union-attr, index]
        lambda _, args: seen.append(args[0].stride())
    )
    model(IDS).backward()
    loop = loop_grads(plain, cut({"input_ids": IDS}, 2), as_it_is)
    assert len(set(seen)) == 1
    # A step of a recurrent module uses its weights again, and so does the next one.
    assert all(name.startswith("rnn.") for name in differing(grads_of(model), loop))


def test_a_recurrent_module_that_may_have_places_first_is_refused() -> None:
    square = models.token_batches(1, rows=4, length=4)[0]["input_ids"]
    with pytest.raises(ValueError, match=r"rnn: .* which comes first in input \[4, 4, 8\]"):
        sliced(functools.partial(Recurrent, "places"))(square)
    with pytest.raises(ValueError, match=r"rnn: input \[4, 8\] has as many rows as the batch"):
        sliced(functools.partial(Recurrent, "table"))(IDS)
    for kind, batch in (("places", IDS), ("table", IDS[:3])):
        ours, plain = (make(functools.partial(Recurrent, kind)) for make in (sliced, models.make))
        torch.testing.assert_close(ours(batch), plain(batch))


def test_a_weight_that_one_block_uses_twice_adds_up_slice_by_slice() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            first = torch.tanh(nn.functional.linear(x, self.weight))
            return nn.functional.linear(first, self.weight)

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Twice()])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.blocks[0](x).float().square().sum(dim=(1, 2))  # type: ignore[no-any-return]

    model, x = sliced(Two, 3), torch.randn(6, 5, 8, dtype=torch.bfloat16)
    model(x).sum().backward()
    weight, total = model.blocks[0].weight.detach(), None
    for part in x.tensor_split(3):
        first, last = (weight.clone().requires_grad_() for _ in range(2))
        inner = torch.tanh(nn.functional.linear(part, first))
        loss: Any = nn.functional.linear(inner, last).float().square().sum()
        loss.backward()
        for term in (last.grad, first.grad):
            assert term is not None
            total = term if total is None else total + term
    assert total is not None
    assert torch.equal(grads_of(model)["blocks.0.weight"], total)


@pytest.mark.parametrize("kind", ["values", "layers"])
def test_a_vector_of_the_model_that_is_as_long_as_the_batch_is_refused(kind: str) -> None:
    """One value for each feature, or for each layer: a slice of one row would take its own."""
    length = 8 if kind == "values" else 2
    ids = models.token_batches(1, rows=length)[0]["input_ids"]

    def scales(_block: Any, x: torch.Tensor, vector: torch.Tensor) -> None:
        assert len(vector) == length

    def call(_model: Any, block: Any, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = block(x, vector=torch.arange(length).to(x))
        return out

    with pytest.raises(ValueError, match=rf"vector is \[{length}\].*shared=\['vector'\]"):
        sliced(stack(scales, call), length)(ids)
    assert_is_its_loop(
        stack(scales, call), {"input_ids": ids}, length, loss_of=as_it_is, shared=["vector"]
    )
