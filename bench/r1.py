"""R1, the reference workload: a Llama-shaped causal LM on one fixed batch of random tokens.

Runs in any environment with torch and transformers. Every arm of a comparison builds the same model
with the same values from here, so that losses can be compared.
"""

from __future__ import annotations

import argparse
import zlib
from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.mixtral.modeling_mixtral import MixtralRotaryEmbedding

HEAD_DIM = 64
INIT_STD = 0.02
EXPERTS_PER_TOKEN = 2


@dataclass(frozen=True)
class Workload:
    """Model, batch and number of steps of a training. Other sizes keep R1's proportions. experts:
    fused experts of each layer, two for each token; 0: dense, as R1.
    """

    hidden: int = 1024
    layers: int = 12
    vocab: int = 8192
    experts: int = 0
    tokens: int = 128
    micro_batches: int = 1
    warmup: int = 3
    steps: int = 8
    seed: int = 0
    lr: float = 1e-4
    weight_decay: float = 0.01
    clip: float = 1.0

    def __post_init__(self) -> None:
        if self.hidden <= 0 or self.hidden % HEAD_DIM:
            raise ValueError(f"hidden={self.hidden}: give a positive multiple of {HEAD_DIM}")
        for name, least in (
            ("layers", 1),
            ("vocab", 2),
            ("experts", 0),
            ("tokens", 2),
            ("micro_batches", 1),
            ("steps", 1),
            ("warmup", 0),
        ):
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)}: give at least {least}")
        if 0 < self.experts < EXPERTS_PER_TOKEN:
            raise ValueError(
                f"experts={self.experts}: a token takes {EXPERTS_PER_TOKEN}; give more, or 0"
            )
        if not self.clip > 0:
            raise ValueError(f"clip={self.clip}: give a positive norm")

    @property
    def intermediate(self) -> int:
        """Width of the MLP: 2816 at hidden 1024; of an expert: a quarter of the hidden size."""
        return self.hidden // 4 if self.experts else self.hidden * 11 // 4

    @property
    def heads(self) -> int:
        return self.hidden // HEAD_DIM

    @property
    def largest_parameter(self) -> int:
        """Elements of the largest parameter."""
        experts = self.experts * 2 * self.intermediate
        return self.hidden * max(self.vocab, self.intermediate, experts)

    @property
    def parameters(self) -> int:
        """Elements of all parameters (the input and output embeddings are untied)."""
        mlp = 3 * self.hidden * self.intermediate
        if self.experts:
            mlp = self.experts * (mlp + self.hidden)  # and a row of the router for each
        layer = 4 * self.hidden**2 + mlp + 2 * self.hidden
        return 2 * self.vocab * self.hidden + self.layers * layer + self.hidden

    def config(self) -> LlamaConfig | MixtralConfig:
        """The transformers configuration of the model."""
        sizes: dict[str, Any] = {
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.heads,
            "max_position_embeddings": max(2048, self.tokens),
            "tie_word_embeddings": False,
            "use_cache": False,
            "dtype": "bfloat16",
        }
        if not self.experts:
            return LlamaConfig(**sizes)
        return MixtralConfig(
            **sizes, num_local_experts=self.experts, num_experts_per_tok=EXPERTS_PER_TOKEN
        )

    def arguments(self) -> list[str]:
        """The arguments from which an arm's `from_arguments` makes this workload."""
        names = ["hidden", "layers", "tokens", "micro_batches", "steps", "warmup", "clip"]
        if self.experts:  # arms of older trees do not know them
            names.append("experts")
        return [f"--{name.replace('_', '-')}={getattr(self, name)}" for name in names]

    def describe(self) -> dict[str, Any]:
        """The fields and the parameter count, for a results file."""
        return {**asdict(self), "parameters": self.parameters}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that choose a workload; ``from_arguments`` reads them back."""
    default = Workload()
    parser.add_argument(
        "--hidden", type=int, default=default.hidden, help="hidden size (R1: %(default)s)"
    )
    parser.add_argument(
        "--layers", type=int, default=default.layers, help="layers (R1: %(default)s)"
    )
    parser.add_argument(
        "--experts",
        type=int,
        default=default.experts,
        help="fused experts in each layer, two for a token (R1: none)",
    )
    parser.add_argument(
        "--micro-batches",
        type=int,
        default=default.micro_batches,
        help="per step (R1: %(default)s)",
    )
    parser.add_argument(
        "--tokens", type=int, default=default.tokens, help="per micro-batch (R1: %(default)s)"
    )
    parser.add_argument(
        "--steps", type=int, default=default.steps, help="measured steps (%(default)s)"
    )
    parser.add_argument(
        "--warmup", type=int, default=default.warmup, help="steps before them (%(default)s)"
    )
    parser.add_argument(
        "--clip",
        type=float,
        default=default.clip,
        help="norm at which gradients are clipped (%(default)s)",
    )


def from_arguments(args: argparse.Namespace) -> Workload:
    """The workload that parsed arguments ask for. Raises ValueError for impossible sizes."""
    return Workload(
        hidden=args.hidden,
        layers=args.layers,
        experts=args.experts,
        micro_batches=args.micro_batches,
        tokens=args.tokens,
        steps=args.steps,
        warmup=args.warmup,
        clip=args.clip,
    )


def construct(workload: Workload) -> LlamaForCausalLM | MixtralForCausalLM:
    """Run the model's constructor in bf16 on whatever device or parameter hooks are current."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        config = workload.config()
        kind = MixtralForCausalLM if workload.experts else LlamaForCausalLM
        model = kind(config)
    finally:
        torch.set_default_dtype(before)
    model.train()
    return model


def build_on_meta(workload: Workload) -> LlamaForCausalLM | MixtralForCausalLM:
    """The model with bf16 parameters on the meta device (no storage) and its rotary tables in fp32
    on the CPU."""
    with torch.device("meta"):
        model = construct(workload)
    renew_rotary(model)
    return model


def renew_rotary(model: LlamaForCausalLM | MixtralForCausalLM) -> None:
    """Give the model rotary tables in fp32 on the CPU.

    They are non-persistent buffers: a build on meta leaves them empty, and engines that cast a
    whole module round them to bf16, which would make the arms compute different models.
    """
    mixtral = isinstance(model, MixtralForCausalLM)
    kind = MixtralRotaryEmbedding if mixtral else LlamaRotaryEmbedding
    model.model.rotary_emb = kind(model.config)


@torch.no_grad()
def fill(name: str, tensor: torch.Tensor, seed: int = 0) -> None:
    """Write parameter ``name``'s first values into ``tensor``, in place and in its own dtype.

    Keyed on (seed, name): any order and any grouping of calls gives the same model, and no fp32
    copy is made.
    """
    if name.endswith("norm.weight") or "layernorm" in name:
        tensor.fill_(1.0)
        return
    generator = torch.Generator(device=tensor.device)
    generator.manual_seed((seed << 32) | zlib.crc32(name.encode()))
    tensor.normal_(0.0, INIT_STD, generator=generator)


def micro_batches(workload: Workload) -> list[torch.Tensor]:
    """The token batches of one step, each int64 of shape [1, tokens]; every step uses the same
    ones."""
    generator = torch.Generator().manual_seed(workload.seed + 1)
    shape = (workload.micro_batches, 1, workload.tokens)
    return list(torch.randint(0, workload.vocab, shape, generator=generator).unbind(0))
