"""Small functions and classes that scripts import from `deepspeed.utils`,
`deepspeed.checkpoint.utils` and `deepspeed.moe`; data loaders; estimates of memory.

The estimates are DeepSpeed's for the states of ZeRO-3 (`_STATE_BYTES` per parameter). `infinity
plan` reports the engine's own needs for a model and a machine.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from infinity.compat.deepspeed import comm
from infinity.compat.deepspeed.accelerator import get_accelerator
from infinity.compat.deepspeed.errors import DeepSpeedRefusal

logger = logging.getLogger("DeepSpeed")

ADAM_OPTIMIZER = "adam"
ADAMW_OPTIMIZER = "adamw"
ADAGRAD_OPTIMIZER = "adagrad"
LION_OPTIMIZER = "lion"
SGD_OPTIMIZER = "sgd"


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log a message on these ranks; on all ranks if `ranks` is empty or contains -1."""
    here = comm.get_rank()
    if not ranks or -1 in ranks or here in ranks:
        logger.log(level, "[Rank %s] %s", here, message)


def see_memory_usage(message: str, force: bool = False) -> None:
    """Log a message with the memory in use on rank 0, if `force`."""
    if force and comm.get_rank() == 0:
        used = get_accelerator().memory_allocated() / 2**30
        logger.info("%s: %.2f GiB in use on %s", message, used, get_accelerator().device_name())


def clone_tensors_for_torch_save(item: Any, device: Any = None) -> Any:
    """Copy a container and clone its tensors, so that torch.save writes no larger storages. device:
    where the clones go; None: the CPU."""
    where = torch.device("cpu") if device is None else device
    if isinstance(item, torch.Tensor):
        return item.detach().clone().to(where)
    if isinstance(item, (list, tuple)):
        return type(item)(clone_tensors_for_torch_save(each, where) for each in item)
    if isinstance(item, dict):
        return type(item)(
            (key, clone_tensors_for_torch_save(value, where)) for key, value in item.items()
        )
    return item


def zero_wrapper_for_fp_tensor_constructor(
    fn: Callable[..., torch.Tensor], target_fp_dtype: torch.dtype
) -> Callable[..., torch.Tensor]:
    """Wrap a tensor constructor so that its floating-point results have `target_fp_dtype`.
    (`zero.Init` does not use it; transformers patches this name around `zero.Init`.)
    """

    @functools.wraps(fn)
    def wrapped(*args: Any, **kwargs: Any) -> torch.Tensor:
        made = fn(*args, **kwargs)
        return made.to(target_fp_dtype) if made.is_floating_point() else made

    return wrapped


class OnDevice:
    """A context in which modules are built on a device ("meta", say) with a default dtype."""

    def __init__(self, dtype: torch.dtype, device: str = "meta", enabled: bool = True) -> None:
        self.dtype, self.enabled = dtype, enabled
        self._device = torch.device(device)
        self._before = torch.get_default_dtype()

    def __enter__(self) -> OnDevice:  # noqa: PYI034
        if self.enabled:
            self._before = torch.get_default_dtype()
            torch.set_default_dtype(self.dtype)
            self._device.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        if self.enabled:
            self._device.__exit__(*exc)
            torch.set_default_dtype(self._before)


class MoE:
    """Refused: DeepSpeed's layer splits experts over ranks."""

    def __init__(self, *_args: Any, **_settings: Any) -> None:
        raise DeepSpeedRefusal(
            "deepspeed.moe.layer.MoE: the engine splits all states over all ranks, experts too; "
            "build the experts as ordinary modules (such as transformers')"
        )


def is_moe_param(param: torch.Tensor) -> bool:  # noqa: ARG001 - there are no such layers
    """Return False: DeepSpeed's experts are refused."""
    return False


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: Mapping[str, Any] | Sequence[Mapping[str, Any]],
    max_group_size: int | None = None,  # noqa: ARG001
) -> list[dict[str, Any]]:
    """Return the parameter groups as a list. There are no DeepSpeed experts to separate."""
    groups = [param_groups] if isinstance(param_groups, Mapping) else param_groups
    return [dict(group) for group in groups]


# -- Data loaders ----------------------------------------------------------------------------------


class RepeatingLoader:
    """An endless iterator: it restarts its loader whenever the loader is exhausted."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.data_iter = iter(loader)

    def __iter__(self) -> RepeatingLoader:
        return self

    def __next__(self) -> Any:
        try:
            return next(self.data_iter)
        except StopIteration:
            self.data_iter = iter(self.loader)
            return next(self.data_iter)


class DeepSpeedDataLoader:
    """A loader of this rank's part of a data set, by default shuffled by a `DistributedSampler`.
    `iter()` restarts it and returns the loader itself.

    batch_size: samples of one rank's micro-batch. num_workers: as torch's; 0: in this process.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        *,
        pin_memory: bool,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        data_sampler: Any = None,
        drop_last: bool = False,
        num_workers: int = 0,
    ) -> None:
        streamed = isinstance(dataset, IterableDataset)
        if data_sampler is None and not streamed:
            data_sampler = DistributedSampler(
                dataset, num_replicas=comm.get_world_size(), rank=comm.get_rank()
            )
        self.dataset, self.batch_size, self.data_sampler = dataset, batch_size, data_sampler
        self.loader: DataLoader[Any] = DataLoader(
            dataset,
            batch_size=batch_size,
            pin_memory=pin_memory,
            sampler=data_sampler,
            collate_fn=collate_fn,
            drop_last=drop_last,
            num_workers=num_workers,
        )
        self._iterator: Iterator[Any] | None = None

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> DeepSpeedDataLoader:
        self._iterator = iter(self.loader)
        return self

    def __next__(self) -> Any:
        if self._iterator is None:
            self._iterator = iter(self.loader)
        return next(self._iterator)


def check_dataset(dataset: Any) -> None:
    """Raise DeepSpeedRefusal unless `dataset` is a data set of torch."""
    if not (
        isinstance(dataset, (IterableDataset, torch.utils.data.Dataset))
        or (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"))
    ):
        raise DeepSpeedRefusal(
            f"training_data={type(dataset).__name__}: give a torch.utils.data.Dataset"
        )


# -- Estimates of memory ---------------------------------------------------------------------------


log = logging.getLogger("infinity")

_STATE_BYTES = 18
"""Bytes of a 16-bit parameter (2), its gradient (4), and its 32-bit master and two moments (12)."""


def estimate_zero3_model_states_mem_needs(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    cpu_offload_params: bool = True,
    zero_init: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int, int]:
    """Return the bytes needed in a node's CPU memory, on a GPU, and by the largest layer."""
    share, gpus = 1 / num_nodes, num_gpus_per_node * num_nodes
    layer = 4 * largest_layer_params
    # Without zero.Init each rank builds the whole model in 32 bits.
    built = 0 if zero_init else 4 * num_gpus_per_node
    if cpu_offload:
        states = _STATE_BYTES if cpu_offload_params else _STATE_BYTES - 2
        cpu = total_params * max(built, states * share)
        gpu = layer + (0 if cpu_offload_params else 2 * total_params / gpus)
    else:
        cpu = layer * num_gpus_per_node if zero_init else total_params * built
        gpu = layer + _STATE_BYTES * total_params / gpus
    return int(cpu * additional_buffer_factor), int(gpu), layer


def estimate_zero3_model_states_mem_needs_all_cold(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """Print the estimates for each kind of offload, from a model's parameter counts."""
    print(
        f"Estimated memory needed for params, optim states and gradients, {num_nodes} nodes of "
        f"{num_gpus_per_node} GPUs, {total_params / 1e6:.0f}M params, largest layer "
        f"{largest_layer_params / 1e6:.0f}M params:"
    )
    print("  per CPU  |  per GPU |   Options")
    for optimizer, params in ((True, True), (True, False), (False, False)):
        for zero_init in (True, False):
            cpu, gpu, _ = estimate_zero3_model_states_mem_needs(
                total_params,
                largest_layer_params,
                num_gpus_per_node,
                num_nodes,
                optimizer,
                params,
                zero_init,
                additional_buffer_factor,
            )
            print(
                f" {cpu / 2**30:7.2f}GB | {gpu / 2**30:6.2f}GB | offload_param="
                f"{'cpu' if params else 'none'}, offload_optimizer="
                f"{'cpu' if optimizer else 'none'}, zero_init={int(zero_init)}"
            )


def estimate_zero3_model_states_mem_needs_all_live(
    model: torch.nn.Module,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """Print the estimates for each kind of offload of a model."""
    layers = [
        sum(param.numel() for param in module.parameters(recurse=False))
        for module in model.modules()
    ]
    estimate_zero3_model_states_mem_needs_all_cold(
        sum({id(param): param.numel() for param in model.parameters()}.values()),
        max(layers, default=0),
        num_gpus_per_node,
        num_nodes,
        additional_buffer_factor,
    )
