"""`inf.microbatched` of many families of transformers: tiny models with random values in fp32 and
padded batches have the gradients of the plain loop over micro-batches, bit for bit."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn

import infinity as inf
from infinity.errors import SlicesError
from tests import harness, models
from tests.hub_models import shrunk
from tests.marks import mostly_slow
from tests.test_microbatched import cut, differing, grads_of

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
    "CAUSAL_LM falcon_h1",
    "CAUSAL_LM gpt_oss",
    "CAUSAL_LM qwen3_next",
    "MASKED_LM deberta-v2",
    "SEQ_TO_SEQ_CAUSAL_LM mt5",
    "IMAGE_CLASSIFICATION segformer",
]

REFUSED = {
    "xlnet": r"got a tensor \(12, 6, 32\) first",
    "recurrent_gemma": "keeps a tensor with a graph in its attribute",
}


def without_dropout(config: Any) -> Any:
    """The configuration, in place, with numbers of dropout that are zero."""
    from transformers import PreTrainedConfig

    for name, value in list(vars(config).items()):
        if isinstance(value, PreTrainedConfig):
            without_dropout(value)
        elif type(value) is float and ("drop" in name or "jitter" in name):
            setattr(config, name, 0.0)
        elif name in ("attn_pdrop", "embd_pdrop", "resid_pdrop"):
            setattr(config, name, type(value)(0))
    return config


@functools.cache
def configuration(name: str) -> Any:
    from transformers import CONFIG_MAPPING

    config = without_dropout(shrunk(CONFIG_MAPPING[name]()))
    # Keys of a cache lie elsewhere in memory, and sums over them round otherwise.
    config.use_cache = False
    return config


def make(task: str, name: str) -> nn.Module:
    """A model of a family with random values in all parameters."""
    from transformers.models.auto import modeling_auto

    torch.manual_seed(3)
    config = configuration(name)
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


@pytest.mark.parametrize("case", mostly_slow(CASES, *QUICK))
def test_a_family_has_the_bits_of_the_loop(case: str) -> None:
    task, name = case.split()
    batch = batch_of(task, name)
    with harness.one_thread():
        plain, model = make(task, name), inf.microbatched(make(task, name), SLICES)
        total = torch.zeros(())
        for part in cut(batch, SLICES):
            loss = plain(**part).loss / SLICES
            loss.backward()
            total = total + loss.detach()
        ours = model(**batch).loss
        ours.backward()
    torch.testing.assert_close(ours.detach(), total)
    mine, theirs = grads_of(model), grads_of(plain)
    tied = used_twice(plain)
    assert set(differing(mine, theirs)) <= tied
    for one in tied & theirs.keys():
        scale = theirs[one].abs().max().item()
        torch.testing.assert_close(mine[one], theirs[one], rtol=1e-4, atol=1e-5 * scale)


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_a_family_that_cannot_run_in_slices_is_refused_by_name(name: str) -> None:
    model = inf.microbatched(make("CAUSAL_LM", name), SLICES)
    with pytest.raises(SlicesError, match=REFUSED[name]):
        model(**batch_of("CAUSAL_LM", name))
