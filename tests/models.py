"""Tiny models of every supported structure, and batches for them.

Each factory returns a fresh model with seeded weights, in bf16 unless asked otherwise; `CASES`
names them all.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

VOCAB = 96
Batch = dict[str, torch.Tensor]


def token_batches(count: int, *, seed: int = 0, rows: int = 2, length: int = 12) -> list[Batch]:
    """Random token ids with themselves as labels."""
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for _ in range(count):
        ids = torch.randint(0, VOCAB, (rows, length), generator=generator)
        batches.append({"input_ids": ids, "labels": ids})
    return batches


def _config(cls: type, **values: Any) -> Any:
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return cls(**{"attn_implementation": "eager", "vocab_size": VOCAB, **ids, **values})


def llama(layers: int = 3, hidden: int = 32, **values: Any) -> nn.Module:
    """A Llama with an untied head."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = _config(
        LlamaConfig,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        **values,
    )
    return LlamaForCausalLM(config)


def gpt2() -> nn.Module:
    """GPT-2: the head is the embedding."""
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        _config(
            GPT2Config,
            n_embd=32,
            n_layer=3,
            n_head=4,
            n_positions=64,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
    )


def t5() -> nn.Module:
    """T5: one weight at four sites, and a position bias that passes through all blocks."""
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=VOCAB,
            d_model=32,
            d_kv=8,
            d_ff=64,
            num_layers=2,
            num_decoder_layers=2,
            num_heads=4,
            dropout_rate=0.0,
            pad_token_id=0,
            eos_token_id=1,
            decoder_start_token_id=0,
        )
    )


def mixtral() -> nn.Module:
    """Mixtral: fused experts, two of four per token."""
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(
        _config(
            MixtralConfig,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_local_experts=4,
            num_experts_per_tok=2,
            output_router_logits=True,
        )
    )


def qwen3_moe(experts: int = 16, chosen: int = 1, **values: Any) -> nn.Module:
    """Qwen3-MoE: fused experts, `chosen` of them per token."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    return Qwen3MoeForCausalLM(
        _config(
            Qwen3MoeConfig,
            hidden_size=32,
            intermediate_size=64,
            moe_intermediate_size=16,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            num_experts=experts,
            num_experts_per_tok=chosen,
            decoder_sparse_step=1,
            **values,
        )
    )


_SMALL_MOE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def qwen2_moe() -> nn.Module:
    """Experts and a shared expert, whose gate runs after them on the same input."""
    from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

    return Qwen2MoeForCausalLM(
        Qwen2MoeConfig(
            **_SMALL_MOE, num_experts=8, num_experts_per_tok=2, shared_expert_intermediate_size=16
        )
    )


def deepseek_v3() -> nn.Module:
    """Routing weights in fp32, a dense first layer."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    values = {**_SMALL_MOE, "num_key_value_heads": 4}
    return DeepseekV3ForCausalLM(
        DeepseekV3Config(
            **values,
            n_routed_experts=16,
            num_experts_per_tok=2,
            n_group=1,
            topk_group=1,
            first_k_dense_replace=1,
            q_lora_rank=8,
            kv_lora_rank=8,
            qk_rope_head_dim=8,
            qk_nope_head_dim=8,
            v_head_dim=8,
        )
    )


def gpt_oss() -> nn.Module:
    """Weights in layout [in, out], interleaved gates, biases."""
    from transformers import GptOssConfig, GptOssForCausalLM

    return GptOssForCausalLM(
        GptOssConfig(
            **{**_SMALL_MOE, "intermediate_size": 16},
            num_local_experts=8,
            num_experts_per_tok=2,
            head_dim=8,
            sliding_window=16,
        )
    )


def albert() -> nn.Module:
    """ALBERT: one layer applied four times."""
    from transformers import AlbertConfig, AlbertForMaskedLM

    return AlbertForMaskedLM(
        _config(
            AlbertConfig,
            hidden_size=32,
            embedding_size=16,
            intermediate_size=64,
            num_hidden_layers=4,
            num_attention_heads=4,
            max_position_embeddings=64,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )


def lora(layers: int = 3) -> nn.Module:
    """A Llama whose weights are frozen, with LoRA adapters."""
    from peft import LoraConfig, get_peft_model

    base = llama(layers)
    config = LoraConfig(
        r=4,
        lora_alpha=8,
        lora_dropout=0.0,
        target_modules=["q_proj", "v_proj", "down_proj"],
        init_lora_weights="gaussian",
    )
    model: Any = get_peft_model(base, config)  # type: ignore[arg-type]
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.05)
    return model


class Expert(nn.Module):
    """A gated MLP."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(hidden, 2 * hidden, bias=False)
        self.down = nn.Linear(2 * hidden, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.nn.functional.silu(self.up(x)))


class MoeBlock(nn.Module):
    """Routes each token to one of the first experts; the last experts get no tokens."""

    def __init__(self, hidden: int, experts: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.gate = nn.Linear(hidden, experts, bias=False)
        self.experts = nn.ModuleList([Expert(hidden) for _ in range(experts)])

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = self.norm(x).flatten(0, 1)
        scores = self.gate(tokens).softmax(-1)
        # the other experts have no tokens and no gradient
        used = scores[:, : len(self.experts) // 2]
        weight, index = used.max(-1)
        out = torch.zeros_like(tokens)
        for number in range(used.shape[1]):
            rows = (index == number).nonzero().flatten()
            if rows.numel():
                out = out.index_add(
                    0, rows, self.experts[number](tokens[rows]) * weight[rows, None].to(out.dtype)
                )
        return x + out.view_as(x), scores.float().square().mean()


class ListMoe(nn.Module):
    """A ModuleList MoE with experts that get no tokens, and an auxiliary loss out of every
    block."""

    def __init__(self, hidden: int = 32, layers: int = 2, experts: int = 6) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, hidden)
        self.blocks = nn.ModuleList([MoeBlock(hidden, experts) for _ in range(layers)])
        self.head = nn.Linear(hidden, VOCAB, bias=False)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.embed(input_ids)
        penalty = torch.zeros(())
        for block in self.blocks:
            x, one = block(x)
            penalty = penalty + one
        return {"loss": next_token_loss(self.head(x), labels) + 0.01 * penalty}


class ExternalBlock(nn.Module):
    """A block whose parameters are used in unusual ways."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.mix = nn.Linear(hidden, hidden)
        self.scale = nn.Parameter(torch.ones(hidden))
        self.unused = nn.Linear(hidden, hidden)
        self.frozen = nn.Parameter(torch.randn(hidden), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.mix(x)
        y += x  # in place on the output of a Linear, which is a view in 3-D
        return torch.tanh(y) * self.scale + self.frozen * x


class External(nn.Module):
    """Parameters used outside of their module's forward, a tied head, unused parameters, and one
    direct parameter of the model."""

    def __init__(self, hidden: int = 32, layers: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, hidden)
        self.start = nn.Parameter(torch.randn(1, 1, hidden))
        self.blocks = nn.ModuleList([ExternalBlock(hidden) for _ in range(layers)])
        self.never = nn.Linear(hidden, hidden)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.embed(input_ids) + self.start
        for block in self.blocks:
            x = block(x)
        x = x * self.blocks[0].scale  # type: ignore[operator, union-attr]
        return {"loss": next_token_loss(torch.nn.functional.linear(x, self.embed.weight), labels)}


class SmallBlock(nn.Module):
    """A block of a residual network."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(hidden)
        self.up = nn.Linear(hidden, 2 * hidden, bias=False)
        self.down = nn.Linear(2 * hidden, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(nn.functional.silu(self.up(self.norm(x))))
        return x + y


class Small(nn.Module):
    """Blocks of plain modules between an embedding and a head, for tests of any model family."""

    def __init__(self, layers: int = 3, hidden: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, hidden)
        self.blocks = nn.ModuleList([SmallBlock(hidden) for _ in range(layers)])
        self.head = nn.Linear(hidden, VOCAB, bias=False)
        self._reentrant: bool | None = None

    def gradient_checkpointing_enable(self, values: dict[str, bool]) -> None:
        """Checkpoint each block, as transformers' models do."""
        self._reentrant = values["use_reentrant"]

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.embed(input_ids)
        for block in self.blocks:
            if self._reentrant is None:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self._reentrant)
        return {"loss": next_token_loss(self.head(x), labels)}


def next_token_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy of the next token."""
    return torch.nn.functional.cross_entropy(
        logits[:, :-1].float().flatten(0, 1), labels[:, 1:].flatten()
    )


@dataclasses.dataclass(frozen=True)
class Case:
    """A model family of the test matrix."""

    name: str
    factory: Callable[[], nn.Module]
    generates: bool = False
    checkpoints: bool = False  # has transformers' gradient_checkpointing_enable


CASES = (
    Case("llama", llama, generates=True, checkpoints=True),
    Case("gpt2", gpt2, generates=True, checkpoints=True),
    Case("t5", t5, generates=True, checkpoints=True),
    Case("mixtral", mixtral, generates=True, checkpoints=True),
    Case("qwen3_moe", qwen3_moe, generates=True, checkpoints=True),
    Case("albert", albert),
    Case("lora", lora, generates=True, checkpoints=True),
    Case("list_moe", ListMoe),
    Case("external", External),
)


def make(
    case: Case | Callable[[], nn.Module], *, seed: int = 0, dtype: torch.dtype = torch.bfloat16
) -> nn.Module:
    """A fresh model in training mode with seeded weights."""
    torch.manual_seed(seed)
    model = (case.factory if isinstance(case, Case) else case)()
    return model.to(dtype).train()


def beside(model: nn.Module, batch: Batch) -> Batch:
    """Return the batch on the model's device."""
    device = next(model.parameters()).device
    return {name: value.to(device) for name, value in batch.items()}


def loss_of(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return the loss of one batch, for any kind of output and device."""
    out = model(**beside(model, batch))
    loss: torch.Tensor = out["loss"] if isinstance(out, dict) else out.loss
    return loss
