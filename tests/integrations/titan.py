"""torchtitan's Trainer on the CPU, with a small Llama 3 and random tokens.

torchtitan runs on accelerators alone: it asks the device module for names and memory, which
torch.cpu does not know, and sets timeouts by a barrier that gloo does not take. These three are
replaced here; all else is its own. Without a network: no tokenizer and no data set.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import distribute_tensor
from torchtitan.tools import utils

__all__ = ["FullAC", "InfinityOptimizers", "SelectiveAC", "derive", "parallelize"]

VOCAB = 96
ROWS, LENGTH, STEPS = 4, 16, 6


class CpuModule(types.ModuleType):
    """torch.cpu with what torchtitan asks of a device module."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def get_device_name(self, *_: object) -> str:
        """Name it."""
        return "cpu"

    def get_device_properties(self, *_: object) -> Any:
        """Its memory, of which percentages are shown."""
        return types.SimpleNamespace(total_memory=1 << 30)

    def memory_stats(self, *_: object) -> dict[str, int]:
        """Nothing is counted."""
        return {}

    def reset_peak_memory_stats(self, *_: object) -> None:
        """Nothing is counted."""

    def empty_cache(self) -> None:
        """There is none."""


# Before anything else of torchtitan is imported: it keeps the names.
if not torch.accelerator.is_available():
    utils.device_type, utils.device_module = "cpu", CpuModule("torch_cpu")

from torchtitan.components.checkpointer import CheckpointManager  # noqa: E402
from torchtitan.components.dataloader import BaseDataLoader  # noqa: E402
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss  # noqa: E402
from torchtitan.components.optimizer import (  # noqa: E402
    LRSchedulersContainer,
    OptimizersContainer,
    ParamGroupConfig,
    default_adamw,
)
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.config import ParallelismConfig, TrainingConfig  # noqa: E402
from torchtitan.config.override import derive  # noqa: E402
from torchtitan.distributed import utils as dist_utils  # noqa: E402
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC  # noqa: E402
from torchtitan.models import llama3  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402

import infinity as inf  # noqa: E402
from infinity.integrations.torchtitan import (  # noqa: E402
    InfinityCheckpoints,
    InfinityOptimizers,
    parallelize,
)


class Tokens(BaseDataLoader):  # type: ignore[misc]
    """Random tokens; each rank has its part of the rows of a batch."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):  # type: ignore[misc]
        """No options."""

    def __init__(
        self, config: Any, *, dp_world_size: int, dp_rank: int, local_batch_size: int, **_: object
    ) -> None:
        self.taken, self.rank, self.world = 0, dp_rank, dp_world_size
        self.rows = local_batch_size

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while True:
            generator = torch.Generator().manual_seed(self.taken)
            shape = (self.rows * self.world, LENGTH + 1)
            rows = torch.randint(0, VOCAB, shape, generator=generator)
            self.taken += 1
            ids = rows.chunk(self.world)[self.rank]
            yield {"input": ids[:, :-1].contiguous()}, ids[:, 1:].contiguous()

    def state_dict(self) -> dict[str, int]:
        """The place in the data."""
        return {"taken": self.taken}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue from this place."""
        self.taken = state["taken"]


class NoTokenizer(BaseTokenizer):  # type: ignore[misc]
    """The data has tokens."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):  # type: ignore[misc]
        """No options."""

    def __init__(self, config: Any, **_: object) -> None:
        super().__init__()

    def encode(self, *_: object, **__: object) -> list[int]:
        """Not wanted."""
        raise NotImplementedError

    def decode(self, *_: object, **__: object) -> str:
        """Not wanted."""
        raise NotImplementedError

    def get_vocab_size(self) -> int:
        """Its size."""
        return VOCAB


def llama(*, tied: bool = False) -> Any:
    """A model specification of 0.2 million parameters, built as torchtitan builds its own."""
    dim = 64
    spec = llama3.model_registry("debugmodel")
    layers = llama3._build_llama3_layers(
        n_layers=2,
        dim=dim,
        n_heads=4,
        n_kv_heads=2,
        hidden_dim=128,
        rope=llama3.ComplexRoPE.Config(
            dim=dim // 4, max_seq_len=64, theta=500000, scaling="llama"
        ),
        attn_backend="flex",
    )
    for layer in layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()  # needs no compiler
    embedding = llama3._EMBEDDING_SKIP_INIT if tied else llama3._EMBEDDING_INIT
    spec.model = llama3.Llama3Model.Config(
        dim=dim,
        vocab_size=VOCAB,
        enable_weight_tying=tied,
        tok_embeddings=llama3.Embedding.Config(
            num_embeddings=VOCAB, embedding_dim=dim, param_init=embedding
        ),
        norm=llama3.RMSNorm.Config(normalized_shape=dim, param_init=llama3._NORM_INIT),
        lm_head=llama3.Linear.Config(
            in_features=dim, out_features=VOCAB, param_init=llama3._output_linear_init(dim)
        ),
        layers=layers,
    )
    return spec


def config(
    folder: Path,
    *,
    world: int = 1,
    accumulate: int = 1,
    chunked: bool = False,
    tied: bool = False,
    max_norm: float = 1e6,
    activations: Any = None,
    save_every: int = 0,
    steps: int = STEPS,
) -> Any:
    """A configuration of torchtitan's own parts."""
    loss = CrossEntropyLoss.Config()
    found = Trainer.Config(
        model_spec=llama(tied=tied),
        loss=ChunkedLossWrapper.Config(num_chunks=4, loss_fn=loss) if chunked else loss,
        tokenizer=NoTokenizer.Config(),
        dataloader=Tokens.Config(),
        optimizer=default_adamw(lr=8e-3),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2, total_steps=STEPS),
        training=TrainingConfig(
            local_batch_size=ROWS // world // accumulate,
            global_batch_size=ROWS,
            seq_len=LENGTH,
            steps=steps,
            max_norm=max_norm,
            disable_cuda_graphs=True,
            mixed_precision_param="float32",
        ),
        parallelism=ParallelismConfig(),
        activation_checkpoint=activations,
        checkpoint=CheckpointManager.Config(
            enable=bool(save_every), interval=save_every or 500, last_save_model_only=False
        ),
        dump_folder=str(folder),
    )
    found.optimizer.implementation = "for-loop"
    found.metrics.log_freq = 1
    found.debug.seed = 0
    return found


class TorchOptimizers(OptimizersContainer):  # type: ignore[misc]
    """torchtitan's optimizers, and torch's Muon for matrices that no rank has a part of."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):  # type: ignore[misc]
        """No further options."""

    @staticmethod
    def _resolve_optimizer_factory(name: str) -> Any:
        return getattr(torch.optim, name)


def with_muon(found: Any, *, alone: bool = False) -> Any:
    """Train hidden matrices by Muon, and the rest by AdamW. alone: the rest in Muon's group, too.
    """
    rest = {"betas": (0.9, 0.95), "weight_decay": 0.1}
    groups = [
        ParamGroupConfig(
            pattern=r".*" if alone else r"layers\..*(attention|feed_forward)\..*weight",
            optimizer_name="Muon",
            optimizer_kwargs={"lr": 8e-3, "adjust_lr_fn": "match_rms_adamw"},
        ),
        ParamGroupConfig(
            pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 8e-3, **rest}
        ),
    ]
    found.optimizer.param_groups = groups[: 1 if alone else 2]
    return found


def offloaded(found: Any, policy: inf.Policy) -> Any:
    """Offload what a configuration describes, as infinity.integrations.torchtitan says."""
    found.model_spec.parallelize_fn = parallelize(policy)
    found.optimizer = derive(found.optimizer, InfinityOptimizers.Config)
    found.checkpoint = derive(found.checkpoint, InfinityCheckpoints.Config)
    return found


def summed_by_gloo(found: Any) -> Any:
    """Let FSDP sum gradients by an operation that gloo has, and shard as torch 2.13 can."""
    own = found.model_spec.parallelize_fn

    def parallelize_fn(*args: Any, **kwargs: Any) -> Any:
        model = own(*args, **kwargs)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
        return model

    found.model_spec.parallelize_fn = parallelize_fn
    found.parallelism.spmd_backend = "partial_dtensor"
    return found


@contextlib.contextmanager
def built(found: Any) -> Iterator[Any]:
    """The Trainer of a configuration, in a group of its own unless there is one."""
    os.environ.setdefault("LOCAL_RANK", "0")
    own = not dist.is_initialized()
    if own:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    timeouts, dist_utils.set_pg_timeouts = dist_utils.set_pg_timeouts, _keep_timeouts
    trainer = None
    try:
        trainer = found.build()
        yield trainer
    finally:
        dist_utils.set_pg_timeouts = timeouts
        if trainer is not None:
            trainer.close()
            for model in inf.offloaded_modules(trainer.model_parts[0]):
                inf.handle(model).close()
        if own:
            dist.destroy_process_group()


def _keep_timeouts(**_: object) -> None:
    """Leave them as they are."""


def values_of(trainer: Any) -> dict[str, torch.Tensor]:
    """Copies of an offloaded model's parameters."""
    (model,) = trainer.model_parts
    params = dict(model.named_parameters())
    with inf.handle(model).gather(params.values()):
        return {name: param.detach().clone() for name, param in params.items()}


def begin_with(trainer: Any, values: dict[str, torch.Tensor]) -> None:
    """Give FSDP's shards these values: on CPUs each of them draws the same numbers."""
    with torch.no_grad():
        for name, param in trainer.model_parts[0].named_parameters():
            param.copy_(distribute_tensor(values[name], param.device_mesh, param.placements))


def losses_of(trainer: Any) -> list[float]:
    """Train, and return the loss of each step: the mean over all ranks."""
    losses: list[float] = []
    log = trainer.metrics_processor.log

    @functools.wraps(log)
    def noted(step: int, loss: float, *args: object, **kwargs: object) -> None:
        losses.append(loss)
        log(step, loss, *args, **kwargs)

    trainer.metrics_processor.log = noted
    trainer.train()
    return losses
