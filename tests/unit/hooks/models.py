"""Tiny models and the units of each, for the tests of the life cycle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

Groups = dict[str, Sequence[nn.Module]]


def tokens(seed: int, rows: int = 2, columns: int = 8, vocabulary: int = 64) -> torch.Tensor:
    return torch.randint(
        0, vocabulary, (rows, columns), generator=torch.Generator().manual_seed(seed)
    )


def lm_loss(model: nn.Module, seed: int) -> torch.Tensor:
    x = tokens(seed)
    return model(input_ids=x, labels=x).loss


def t5_loss(model: nn.Module, seed: int) -> torch.Tensor:
    return model(input_ids=tokens(seed), labels=tokens(seed + 1)).loss


def llama(layers: int = 4, dtype: torch.dtype = torch.bfloat16, **options: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        pad_token_id=0,
        **options,
    )
    return LlamaForCausalLM(config).to(dtype)


def llama_groups(model: Any) -> Groups:
    layers = {f"layer{index}": [layer] for index, layer in enumerate(model.model.layers)}
    return {
        "embed": [model.model.embed_tokens],
        **layers,
        "head": [model.model.norm, model.lm_head],
    }


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=3, n_head=4)
    return GPT2LMHeadModel(config).to(torch.bfloat16)


def gpt2_groups(model: Any) -> Groups:
    layers = {f"layer{index}": [layer] for index, layer in enumerate(model.transformer.h)}
    return {"embed": [model.transformer.wte, model.lm_head], **layers}


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    config = T5Config(
        vocab_size=64,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=3,
        num_heads=4,
        decoder_start_token_id=0,
        pad_token_id=0,
        tie_word_embeddings=True,
    )
    return T5ForConditionalGeneration(config).to(torch.bfloat16)


def t5_groups(model: Any) -> Groups:
    groups: Groups = {"shared": [model.shared]}
    for side in ("encoder", "decoder"):
        stack = getattr(model, side)
        groups |= {f"{side}{index}": [block] for index, block in enumerate(stack.block)}
        groups[f"{side}_norm"] = [stack.final_layer_norm]
    return groups


def mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=1,
        output_router_logits=True,
        max_position_embeddings=32,
    )
    return MixtralForCausalLM(config).to(torch.bfloat16)


def qwen3_moe() -> nn.Module:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=16,
        num_experts_per_tok=1,
        max_position_embeddings=32,
        output_router_logits=True,
    )
    return Qwen3MoeForCausalLM(config).to(torch.bfloat16)


def albert() -> nn.Module:
    from transformers import AlbertConfig, AlbertForMaskedLM

    torch.manual_seed(0)
    config = AlbertConfig(
        vocab_size=64,
        embedding_size=16,
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=48,
        max_position_embeddings=32,
    )
    return AlbertForMaskedLM(config).to(torch.bfloat16)


def albert_groups(model: Any) -> Groups:
    groups = model.albert.encoder.albert_layer_groups
    return {"embed": [model.albert.embeddings], **{f"g{i}": [g] for i, g in enumerate(groups)}}


class Block(nn.Module):
    """A residual block whose last operation is an in-place sum on a linear's output, which is a
    view."""

    def __init__(self, width: int = 16, *, inplace: bool = True) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.inplace = inplace

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.down(torch.nn.functional.gelu(self.up(x)))
        if self.inplace:
            out += x
            return out
        return out + x


class Stack(nn.Module):
    """Blocks, and a head. What a parent does to a block's output is `between`."""

    def __init__(self, blocks: Sequence[nn.Module], width: int = 16) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(width, 4)

    def between(self, x: Any) -> torch.Tensor:
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = self.between(block(x))
        return self.head(x)


def stack(
    count: int = 3, width: int = 16, dtype: torch.dtype = torch.float32, **options: Any
) -> Stack:
    torch.manual_seed(0)
    return Stack([Block(width, **options) for _ in range(count)], width).to(dtype)


def stack_groups(model: Any) -> Groups:
    return {
        **{f"block{index}": [block] for index, block in enumerate(model.blocks)},
        "head": [model.head],
    }


def stack_input(model: nn.Module, seed: int, width: int = 16) -> torch.Tensor:
    dtype = next(model.parameters()).dtype
    return torch.randn(2, 3, width, generator=torch.Generator().manual_seed(seed)).to(dtype)


def stack_loss(model: nn.Module, seed: int) -> torch.Tensor:
    return model(stack_input(model, seed)).float().square().mean()


class Experts(nn.Module):
    """A mixture of experts as a ModuleList, top-1: most experts get no gradient."""

    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, count)
        self.experts = nn.ModuleList(Block(width) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = self.gate(x).softmax(-1)
        best = int(weights.sum((0, 1)).argmax())
        return x + weights[..., best : best + 1] * self.experts[best](x)


LM_CASES: dict[
    str,
    tuple[
        Callable[[], nn.Module], Callable[[Any], Groups], Callable[[nn.Module, int], torch.Tensor]
    ],
] = {
    "llama": (llama, llama_groups, lm_loss),
    "gpt2_tied": (gpt2, gpt2_groups, lm_loss),
    "t5_shared": (t5, t5_groups, t5_loss),
    "mixtral": (mixtral, llama_groups, lm_loss),
    "qwen3_moe": (qwen3_moe, llama_groups, lm_loss),
    "albert": (albert, albert_groups, lm_loss),
}
