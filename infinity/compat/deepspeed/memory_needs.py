"""Estimates of the memory that ZeRO-3's states need, by DeepSpeed's formulas: 18 bytes for each
parameter (2 for 16-bit weights, 4 for gradients, 12 for the optimizer's 32-bit states).

`infinity plan` computes what infinity's engine needs for a model and a machine.
"""

from __future__ import annotations

import logging

import torch

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
