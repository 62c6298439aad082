"""`inf.microbatched` and mixtures of experts: each slice has its routers' losses for itself, with
the bits of a loop over micro-batches."""

from __future__ import annotations

import copy
import dataclasses
import functools
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import infinity as inf
from infinity._src.microbatch import collected_outputs
from infinity._src.microbatch.rows import PerSlice
from tests import harness, models
from tests.harness import Training
from tests.marks import mostly_slow
from tests.sliced import Microbatched, assert_is_the_loop, cut, differing, grads_of, whole
from tests.test_bitwise import policy
from tests.test_microbatched import NVME


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    with harness.one_thread():
        yield


SMALL = {
    "vocab_size": models.VOCAB,
    "hidden_size": 32,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "num_experts_per_tok": 2,
    "output_router_logits": True,
    "attn_implementation": "eager",
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# A third of this is rounded, and so is its third of the gradient.
COEF = {"router_aux_loss_coef": 0.3}
FAMILIES: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 4, **COEF},
    "Qwen3Moe": {"num_experts": 4, "moe_intermediate_size": 16, "head_dim": 8, **COEF},
    "Qwen2Moe": {
        "num_experts": 4,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
        # The first layer is dense, and has no router.
        "mlp_only_layers": [0],
        **COEF,
    },
    "Olmoe": {"num_experts": 4, **COEF},
    # Logits are scaled between the head and the loss.
    "GraniteMoe": {"num_local_experts": 4, "logits_scaling": 3.0, **COEF},
    "GptOss": {"num_local_experts": 4, "head_dim": 8, **COEF},
    "JetMoe": {
        "num_local_experts": 4,
        "kv_channels": 8,
        "aux_loss_coef": 0.3,
        "tie_word_embeddings": False,
    },
}


def family(name: str) -> nn.Module:
    """A small model of transformers with the losses of its routers."""
    import transformers

    config = getattr(transformers, f"{name}Config")(**{**SMALL, **FAMILIES[name]})
    made: nn.Module = getattr(transformers, f"{name}ForCausalLM")(config)
    return made


mixtral = functools.partial(family, "Mixtral")


def padded(rows: int, length: int = 9) -> dict[str, torch.Tensor]:
    """A batch whose rows begin with padding, more in some than in others."""
    batch = models.token_batches(1, rows=rows, length=length, seed=rows)[0]
    mask = torch.ones_like(batch["input_ids"])
    for row in range(rows):
        mask[row, : 1 + row % 3] = 0
    labels = batch["labels"].masked_fill(mask == 0, -100)
    return {**batch, "labels": labels, "attention_mask": mask}


def compare(
    factory: Callable[[], nn.Module], batch: dict[str, Any], n: int, **values: Any
) -> tuple[Any, list[Any]]:
    """Outputs of one step in slices and of the loop's micro-batches, whose gradients and losses are
    the same bits."""
    model, plain = models.make(Microbatched(factory, n)), models.make(factory)
    out = model(**batch, **values)
    out.loss.backward()
    rows = len(batch["input_ids"])
    outs, total, aux = [], torch.zeros(()), torch.zeros(())
    for part in cut(batch, min(n, rows)):
        outs.append(plain(**part, **values))
        loss = outs[-1].loss
        share = outs[-1].aux_loss
        if "num_items_in_batch" not in values:
            loss, share = loss / min(n, rows), share / min(n, rows)
        loss.backward()
        total, aux = total + loss.detach(), aux + share.detach()
    assert out.loss.item() == total.item()
    assert out.aux_loss.item() == aux.item()
    assert not differing(grads_of(model), grads_of(plain))
    return out, outs


@pytest.mark.parametrize("name", mostly_slow(FAMILIES, "Mixtral", "Qwen2Moe", "GraniteMoe"))
def test_each_slice_has_its_routers_losses_for_itself(name: str) -> None:
    batch = padded(5)
    out, _ = compare(functools.partial(family, name), batch, 3)
    whole_batch = models.make(functools.partial(family, name))(**batch)
    assert out.aux_loss.item() != pytest.approx(whole_batch.aux_loss.item(), rel=1e-4)


@settings(max_examples=4)
@given(rows=st.integers(1, 6), n=st.integers(1, 5), length=st.integers(4, 9), masked=st.booleans())
def test_any_batch_has_the_losses_of_its_slices(
    rows: int, n: int, length: int, masked: bool
) -> None:
    batch = padded(rows, length)
    if not masked:
        del batch["attention_mask"]
    with harness.one_thread():
        compare(mixtral, batch, n)


def test_a_loss_of_the_items_of_the_batch_is_added_up_with_the_routers_losses() -> None:
    """As the loop of transformers' trainer has it: nothing is divided by the number of slices."""
    batch = padded(4)
    items = int((batch["labels"][:, 1:] != -100).sum())
    compare(mixtral, batch, 2, num_items_in_batch=items)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_model_that_checkpoints_its_blocks_has_the_same_bits(reentrant: bool) -> None:
    """The loop does not checkpoint: with a reentrant checkpoint transformers would drop the
    gradients of the routers' losses."""
    model = models.make(Microbatched(mixtral, 3))
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})  # type: ignore[operator]
    plain = models.make(mixtral)
    model(**padded(6)).loss.backward()
    for part in cut(padded(6), 3):
        (plain(**part).loss / 3).backward()
    assert not differing(grads_of(model), grads_of(plain))


def test_without_checkpoints_the_bits_are_the_same() -> None:
    found = []
    for checkpointed in (True, False):
        factory = functools.partial(inf.microbatched, checkpoint=checkpointed)
        model = models.make(lambda factory=factory: factory(mixtral(), 3))  # type: ignore[misc]
        model(**padded(6)).loss.backward()
        found.append(grads_of(model))
    assert not differing(*found)


def test_without_labels_the_routers_loss_is_the_mean_of_the_slices() -> None:
    batch = padded(6)
    labels = batch.pop("labels")
    model, plain = (models.make(each) for each in (Microbatched(models.mixtral, 2), models.mixtral))
    out = model(**batch)
    total = torch.zeros(())
    for part in cut({**batch, "labels": labels}, 2):
        total = total + plain(**part).aux_loss / 2
    assert out.loss is None
    assert out.aux_loss.item() == total.item()
    assert out.aux_loss.requires_grad


def test_logits_of_routers_are_those_of_each_slice() -> None:
    out, outs = compare(mixtral, padded(5), 3, output_hidden_states=True)
    assert len(out.router_logits) == SMALL["num_hidden_layers"]
    assert len(out.hidden_states) == 1 + len(out.router_logits)
    for layer, logits in enumerate(out.router_logits):
        assert type(logits) is PerSlice
        for part, micro in zip(logits.parts, outs, strict=True):
            assert torch.equal(part, micro.router_logits[layer])
    with pytest.raises(ValueError, match=r"softmax of an output of model\.layers\.0.*`parts`"):
        torch.softmax(out.router_logits[0], -1)


def test_the_model_inside_alone_returns_logits_of_each_slice_too() -> None:
    inner: Any = inf.microbatched(models.make(models.mixtral).model, 2)  # type: ignore[arg-type]
    ids = padded(4)["input_ids"]
    out = inner(input_ids=ids)
    assert [part.shape for part in out.router_logits[1].parts] == [(18, 4)] * 2
    out = inner(input_ids=ids, output_router_logits=False)
    assert out.router_logits is None


@pytest.mark.parametrize("again", ["copy", "second forward"])
def test_nothing_is_left_of_a_replay(again: str) -> None:
    model: Any = models.make(Microbatched(mixtral, 2))
    loss = model(**padded(4)).loss
    model = copy.deepcopy(model) if again == "copy" else model
    model(**padded(6), output_router_logits=False).loss.backward()
    model.zero_grad()
    assert torch.equal(model(**padded(4)).loss, loss)


def test_hooks_see_each_module_once() -> None:
    """A replay calls none."""
    model: Any = models.make(Microbatched(mixtral, 3))
    seen: list[str] = []
    for name in ("model", "model.layers.0", "lm_head", "model.norm"):
        module = model.get_submodule(name)
        module.register_forward_hook(lambda *_, name=name: seen.append(name))
    model(**padded(6)).loss.backward()
    assert sorted(seen) == ["lm_head", "model", "model.layers.0", "model.norm"]


# -- offloaded -------------------------------------------------------------------------------------


class WithoutPenalty(models.ListMoe):
    """Experts in a ModuleList, some without tokens, and no loss that blocks return."""

    @property
    def loss_function(self) -> Callable[..., torch.Tensor]:
        """As models of transformers have it, so that it runs in slices."""
        return models.next_token_loss

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.embed(input_ids)
        for block in self.blocks:
            x, _ = block(x)
        return {"loss": self.loss_function(self.head(x), labels)}


def test_an_offloaded_list_of_experts_has_the_bits_of_the_loop(tmp_path: Path) -> None:
    training = Training(WithoutPenalty, steps=2, accumulation=3)
    chosen = policy(tmp_path, **NVME, update="backward", generations=2)
    assert_is_the_loop(harness.offloaded(whole(training), chosen), training)


# -- refusals --------------------------------------------------------------------------------------


def switch() -> nn.Module:
    """An encoder and a decoder whose model computes the losses of routers beside its own."""
    from transformers import SwitchTransformersConfig, SwitchTransformersForConditionalGeneration

    return SwitchTransformersForConditionalGeneration(
        SwitchTransformersConfig(
            vocab_size=models.VOCAB,
            d_model=32,
            d_kv=8,
            d_ff=32,
            num_layers=2,
            num_sparse_encoder_layers=1,
            num_decoder_layers=2,
            num_sparse_decoder_layers=1,
            num_heads=4,
            num_experts=4,
            dropout_rate=0.0,
            router_jitter_noise=0.0,
            decoder_start_token_id=0,
        )
    )


def test_a_loss_that_is_the_models_own_is_refused_beside_those_of_routers() -> None:
    model: Any = models.make(Microbatched(switch, 2))
    batch = models.token_batches(1, rows=4)[0]
    refusal = r"SwitchTransformersForConditionalGeneration: with output_router_logits its \w+ is"
    with pytest.raises(ValueError, match=refusal):
        model(**batch, output_router_logits=True)
    model(**batch).loss.backward()


def test_a_transformers_that_collects_in_another_way_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model: Any = models.make(Microbatched(models.mixtral, 2))
    monkeypatch.setattr(collected_outputs, "_collector", lambda: None)
    with pytest.raises(ValueError, match=r"install transformers 5\.23, or set config\.output_rou"):
        model(**padded(4))
    model(**padded(4), output_router_logits=False).loss.backward()


def test_an_output_that_is_a_tuple_is_refused_with_losses_of_routers() -> None:
    model: Any = models.make(Microbatched(models.mixtral, 2))
    with pytest.raises(ValueError, match=r"a tuple; output_router_logits goes with return_dict"):
        model(**padded(4), return_dict=False)


@dataclasses.dataclass
class Output(dict):  # type: ignore[type-arg]
    """An output as transformers has them."""

    loss: torch.Tensor
    aux_loss: Any = None

    def __post_init__(self) -> None:
        super().__init__(loss=self.loss, aux_loss=self.aux_loss)


class Routed(nn.Module):
    """A block that returns the logits of its router."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(8, 4), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.up(x), self.gate(x).flatten(0, 1)


class Odd(nn.Module):
    """A mixture of experts with a loss of its own making.

    kind: "good" of the logits of routers; "values" of hidden states decide; "hidden" states are in
    it; "whole": one loss for the whole batch is; "vector": it is no scalar.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.inner = Inner()
        self.config = types.SimpleNamespace(output_router_logits=True)

    @property
    def loss_function(self) -> Callable[..., torch.Tensor]:
        return lambda x, **_: x.float().square().mean()

    def forward(self, x: torch.Tensor, output_router_logits: bool | None = None) -> Output:
        hidden, logits = self.inner(x)
        loss = self.loss_function(hidden.mean()[None] if self.kind == "whole" else hidden)
        if output_router_logits is False:
            return Output(loss)
        if self.kind == "values" and hidden.sum() > 0:
            loss = loss * 2
        aux = logits.float().exp().mean()
        if self.kind == "vector":
            aux = aux[None]
        if self.kind == "hidden":
            aux = aux + hidden.mean()
        return Output(loss + aux.sum(), aux)


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Routed()])

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.blocks[0](x)  # type: ignore[no-any-return]


REFUSED = {
    "values": "Odd: with output_router_logits its loss is computed from more",
    "hidden": "Odd: with output_router_logits its loss is computed from more",
    "whole": "Odd: with output_router_logits its loss is computed from more",
    "vector": "Odd: with output_router_logits its aux_loss is a Tensor, not a scalar",
}


def test_a_model_of_the_users_own_may_have_losses_of_routers() -> None:
    x = torch.randn(5, 3, 8)
    model, plain = (
        models.make(Microbatched(functools.partial(Odd, "good"), 2), dtype=torch.float32),
        models.make(functools.partial(Odd, "good"), dtype=torch.float32),
    )
    model(x).loss.backward()
    for part in x.tensor_split(2):
        (plain(part).loss / 2).backward()
    assert not differing(grads_of(model), grads_of(plain))


@pytest.mark.parametrize("kind", REFUSED)
def test_losses_that_are_not_of_routers_alone_are_refused_by_name(kind: str) -> None:
    model = inf.microbatched(Odd(kind), 2)
    with pytest.raises(ValueError, match=REFUSED[kind]):
        model(torch.randn(4, 3, 8))
