"""`inf.microbatched` of many families of transformers: tiny models with random values in fp32 and
padded batches have the gradients of the plain loop over micro-batches, bit for bit. With dropout
they have those of the loop that seeds each micro-batch, unless the model's own code draws."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch import nn

import infinity as inf
from infinity._src.microbatch.random_streams import SEEDS
from infinity.errors import SlicesError
from tests import harness, models
from tests.hub_models import shrunk
from tests.marks import mostly_slow
from tests.sliced import cut, differing, grads_of

ROWS, LENGTH, SLICES = 6, 12, 3

FAMILIES: dict[str, str] = {
    "CAUSAL_LM": """
        afmoe apertus arcee aria_text bart bert big_bird bitnet bloom cohere cohere2 ctrl cwm
        deepseek_v4 diffllama doge electra ernie4_5 exaone4 exaone_moe falcon falcon_h1 falcon_mamba
        flex_olmo gemma gemma2 gemma3_text glm glm4 glm4_moe gpt2 gpt_bigcode gpt_neo gpt_neox
        gpt_oss granite granitemoe granitemoeshared helium hy_v3 internlm3 jamba jetmoe laguna lfm2
        llama llama4_text mamba marian mbart mimo_v2_flash minimax_m2 mistral mixtral
        modernbert-decoder moshi nemotron_h olmo olmo3 olmoe openai-gpt opt pegasus persimmon phi3
        phimoe plbart qwen2 qwen2_moe qwen3_5_text qwen3_moe qwen3_next rembert roberta seed_oss
        smollm3 solar_open stablelm starcoder2 trocr xglm zamba
    """,
    "MASKED_LM": """
        convbert deberta deberta-v2 distilbert eurobert fnet longformer modernbert nystromformer
        roformer tapas
    """,
    "SEQ_TO_SEQ_CAUSAL_LM": "bart m2m_100 marian mbart mt5 mvp pegasus plbart umt5",
    "IMAGE_CLASSIFICATION": """
        beit clip data2vec-vision deit dinov2 focalnet hiera ijepa poolformer pvt_v2 segformer
        siglip vit vit_msn
    """,
}
CASES = [f"{task} {name}" for task, names in FAMILIES.items() for name in names.split()]
QUICK = [
    "CAUSAL_LM gpt_oss",
    "MASKED_LM deberta-v2",
    "SEQ_TO_SEQ_CAUSAL_LM mt5",
    "IMAGE_CLASSIFICATION segformer",
]

REFUSED = {
    "xlnet": r"got a tensor \(12, 6, 32\) first",
    "recurrent_gemma": "keeps a tensor with a graph in its attribute",
}


DRAWS_ITSELF = {
    *("CAUSAL_LM bart", "SEQ_TO_SEQ_CAUSAL_LM bart", "SEQ_TO_SEQ_CAUSAL_LM m2m_100"),
    *("CAUSAL_LM marian", "SEQ_TO_SEQ_CAUSAL_LM marian", "CAUSAL_LM mbart"),
    *("SEQ_TO_SEQ_CAUSAL_LM mbart", "SEQ_TO_SEQ_CAUSAL_LM mvp", "CAUSAL_LM pegasus"),
    *("SEQ_TO_SEQ_CAUSAL_LM pegasus", "CAUSAL_LM plbart", "SEQ_TO_SEQ_CAUSAL_LM plbart"),
    *("CAUSAL_LM starcoder2", "CAUSAL_LM trocr", "CAUSAL_LM xglm"),
}
"""Cases whose own code draws random numbers at each forward, between the calls of its modules."""


def set_dropout(config: Any, value: float) -> Any:
    """The configuration, in place, with a value for all numbers of dropout and jitter, but for
    layers that are dropped whole: these are never dropped."""
    from transformers import PreTrainedConfig

    for name, before in list(vars(config).items()):
        if isinstance(before, PreTrainedConfig):
            set_dropout(before, value)
        elif name in ("attn_pdrop", "embd_pdrop", "resid_pdrop"):
            setattr(config, name, value if value else type(before)(0))
        elif type(before) is float and ("drop" in name or "jitter" in name):
            setattr(config, name, 0.0 if "layerdrop" in name else value)
    return config


@functools.cache
def configuration(name: str, dropout: float = 0.0) -> Any:
    from transformers import CONFIG_MAPPING

    config = set_dropout(shrunk(CONFIG_MAPPING[name]()), dropout)
    # Keys of a cache lie elsewhere in memory, and sums over them round otherwise.
    config.use_cache = False
    return config


def make(task: str, name: str, config: Any = None) -> nn.Module:
    """A model of a family with random values in all parameters. config: None: without dropout."""
    from transformers.models.auto import modeling_auto

    torch.manual_seed(3)
    config = configuration(name) if config is None else config
    kind: Any = getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING")[type(config)]
    # Of several classes the first is the plain one.
    kind = kind[0] if isinstance(kind, tuple) else kind
    model: nn.Module = kind._from_config(config, dtype=torch.float32).train()
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn(param.shape, generator=generator) * 0.05)
    return model


def batch_of(task: str, name: str) -> dict[str, torch.Tensor]:
    """A batch: of tokens, with padding that differs from row to row, or of images."""
    config = configuration(name)
    if task == "IMAGE_CLASSIFICATION":
        size = getattr(config, "image_size", 64)
        side = size if isinstance(size, int) else size[0]
        generator = torch.Generator().manual_seed(5)
        return {
            "pixel_values": torch.randn(ROWS, 3, side, side, generator=generator),
            "labels": torch.arange(ROWS) % config.num_labels,
        }
    batch = models.token_batches(1, rows=ROWS, length=LENGTH, seed=5)[0]
    ids = batch["input_ids"].clamp(min=4, max=89)
    mask = torch.ones_like(ids)
    for row in range(ROWS):
        mask[row, : 1 + row % 3] = 0
    # No label is left out: a model with a loss of its own takes the mean over all that there are.
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.clone()}


def used_twice(model: nn.Module) -> set[str]:
    """Names of parameters that several modules hold: their uses are added up in another order."""
    found: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        found.setdefault(id(param), []).append(name)
    return {name for names in found.values() if len(names) > 1 for name in names}


def loop_loss(model: nn.Module, batch: dict[str, torch.Tensor], base: int) -> torch.Tensor:
    """Run the plain loop, seeded before each micro-batch. Returns the sum of its losses."""
    total = torch.zeros(())
    for index, part in enumerate(cut(batch, SLICES)):
        torch.manual_seed(base + index)
        loss = model(**part).loss / SLICES
        loss.backward()
        total = total + loss.detach()
    return total


def assert_has_the_grads(model: nn.Module, plain: nn.Module) -> None:
    """Bit for bit, but for parameters that are used twice."""
    mine, theirs = grads_of(model), grads_of(plain)
    tied = used_twice(plain)
    assert set(differing(mine, theirs)) <= tied
    for one in tied & theirs.keys():
        scale = theirs[one].abs().max().item()
        torch.testing.assert_close(mine[one], theirs[one], rtol=1e-4, atol=1e-5 * scale)


@pytest.mark.parametrize("case", mostly_slow(CASES, *QUICK))
def test_a_family_has_the_bits_of_the_loop(case: str) -> None:
    task, name = case.split()
    batch = batch_of(task, name)
    with harness.one_thread():
        plain, model = make(task, name), inf.microbatched(make(task, name), SLICES)
        total = loop_loss(plain, batch, base=0)
        ours = model(**batch).loss
        ours.backward()
    torch.testing.assert_close(ours.detach(), total)
    assert_has_the_grads(model, plain)


# -- dropout ---------------------------------------------------------------------------------------

SEED = 5
# Its configuration refuses dropout.
WITH_DROPOUT = [case for case in CASES if case != "CAUSAL_LM diffllama"]


def base_of_seed() -> int:
    """The number that torch draws next after `SEED`."""
    torch.manual_seed(SEED)
    return int(torch.randint(SEEDS, ()))


def sliced_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, bool]:
    """Run forward and backward in slices. Returns the loss, and whether the model's own code drew
    from the caller's generator: that has moved on by other than the one number of the slices."""
    base_of_seed()
    moved = torch.get_rng_state()
    torch.manual_seed(SEED)
    before = torch.get_rng_state()
    loss = model(**batch).loss
    after = torch.get_rng_state()
    loss.backward()
    return loss.detach(), not (torch.equal(after, before) or torch.equal(after, moved))


@pytest.mark.parametrize(
    "case",
    mostly_slow(WITH_DROPOUT, "CAUSAL_LM gpt2", "CAUSAL_LM plbart", "IMAGE_CLASSIFICATION beit"),
)
def test_dropout_has_the_bits_of_the_seeded_loop_unless_the_model_draws_itself(case: str) -> None:
    task, name = case.split()
    batch, config = batch_of(task, name), configuration(name, dropout=0.1)
    with harness.one_thread():
        plain, model = make(task, name, config), inf.microbatched(make(task, name, config), SLICES)
        if name == "big_bird":
            turn_to_full_attention(plain, model)
        ours, draws_itself = sliced_loss(model, batch)
        total = loop_loss(plain, batch, base_of_seed())
    assert draws_itself == (case in DRAWS_ITSELF)
    if draws_itself:
        assert not torch.allclose(ours, total), "masks are others"
    else:
        torch.testing.assert_close(ours, total)
        assert_has_the_grads(model, plain)


def turn_to_full_attention(*of: Any) -> None:
    """As BigBird turns itself when a sequence is short: its blocks get new modules."""
    for model in of:
        model.bert.set_attention_type("original_full")


def test_modules_that_a_model_makes_in_its_first_forward_are_drawn_for_the_whole_batch() -> None:
    """BigBird: the loop draws them from the stream of its first micro-batch."""
    task, name = "CAUSAL_LM", "big_bird"
    batch, config = batch_of(task, name), configuration(name, dropout=0.1)
    with harness.one_thread():
        plain, model, turned = (make(task, name, config) for _ in range(3))
        turn_to_full_attention(turned)
        inf.microbatched(model, SLICES)
        first, draws_itself = sliced_loss(model, batch)
        assert draws_itself
        assert torch.equal(first, loop_loss(turned, batch, base_of_seed()))
        assert_has_the_grads(model, turned)
        assert not torch.allclose(first, loop_loss(plain, batch, base_of_seed()))
        plain.zero_grad()
        model.zero_grad()
        second, draws_itself = sliced_loss(model, batch)
        assert not draws_itself
        assert torch.equal(second, loop_loss(plain, batch, base_of_seed()))
        assert_has_the_grads(model, plain)


def test_random_attention_that_is_seeded_by_layer_is_that_of_the_loop() -> None:
    """BigBird seeds NumPy's generator in each block, and pads sequences to whole blocks."""
    task, name = "CAUSAL_LM", "big_bird"
    config = copy.deepcopy(configuration(name, dropout=0.1))
    config.block_size, config.num_random_blocks = 2, 1
    batch = {key: value.repeat(1, 3)[:, :31] for key, value in batch_of(task, name).items()}
    with harness.one_thread():
        plain, model = make(task, name, config), inf.microbatched(make(task, name, config), SLICES)
        ours, draws_itself = sliced_loss(model, batch)
        total = loop_loss(plain, batch, base_of_seed())
    assert model.bert.attention_type == "block_sparse"  # type: ignore[union-attr]
    assert not draws_itself
    assert torch.equal(ours, total)
    assert_has_the_grads(model, plain)


def test_a_cache_in_the_loop_rounds_otherwise_and_changes_no_mask() -> None:
    """GPT-2 with dropout: its attention takes another kernel, which sums by strides."""
    task, name = "CAUSAL_LM", "gpt2"
    batch, config = batch_of(task, name), configuration(name, dropout=0.1)
    cached = copy.deepcopy(config)
    cached.use_cache = True
    with harness.one_thread():
        plain, model = make(task, name, cached), inf.microbatched(make(task, name, config), SLICES)
        ours, _ = sliced_loss(model, batch)
        torch.testing.assert_close(ours, loop_loss(plain, batch, base_of_seed()))
    mine, theirs = grads_of(model), grads_of(plain)
    for one, grad in theirs.items():
        atol = 1e-5 * grad.abs().max().item()
        torch.testing.assert_close(mine[one], grad, rtol=1e-4, atol=atol)


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_a_family_that_cannot_run_in_slices_is_refused_by_name(name: str) -> None:
    model = inf.microbatched(make("CAUSAL_LM", name), SLICES)
    with pytest.raises(SlicesError, match=REFUSED[name]):
        model(**batch_of("CAUSAL_LM", name))
