"""Weights of transformers' models, from files to the tiers and back, streamed."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.dynamic_module_utils import custom_object_save

import infinity as inf
from infinity.integrations._common import only_engine


def is_adapted(model: Any) -> bool:
    """Return whether a model is PEFT's: its checkpoints are adapters."""
    return hasattr(model, "peft_config") and hasattr(model, "get_base_model")


def save_pretrained(
    model: Any, directory: Path, *, max_shard_size: int | str = "2GiB", first: bool = True
) -> None:
    """Write weights, streamed, and what `from_pretrained` reads beside them. All ranks call it.

    first: whether this rank writes the files beside the weights.
    """
    module = only_engine(model, "save_pretrained")
    if first and isinstance(module, transformers.PreTrainedModel):
        config: Any = module.config
        config.architectures = [type(module).__name__]
        config.dtype = str(module.dtype).removeprefix("torch.")
        if module.is_remote_code():
            custom_object_save(module, directory, config=config)
        config.save_pretrained(directory)
        if module.can_generate():
            module.generation_config.save_pretrained(directory)
    inf.export_safetensors(module, directory, shard_bytes_max=max_shard_size)


def export_adapters(model: Any, directory: Path, *, first: bool) -> None:
    """Write PEFT's adapters as `save_pretrained` does, gathered together: they are small, and the
    base stays where it is. All ranks call it; `first` writes.
    """
    values = adapter_values(model)
    if first:
        model.save_pretrained(directory, state_dict=values)


def adapter_values(model: Any) -> dict[str, torch.Tensor]:
    """Return the tensors that PEFT's checkpoints of all adapters are made of, by the names of the
    model's state dict. Collective on several ranks.
    """
    from peft import get_peft_model_state_dict

    params = dict(model.named_parameters(remove_duplicate=False))
    # PEFT chooses from tensors without memory, which stand for those of the state dict.
    shown = {
        name: torch.empty(param.shape, dtype=param.dtype, device="meta")
        for name, param in params.items()
    }
    names = {id(tensor): name for name, tensor in shown.items()}
    buffers = dict(model.named_buffers(remove_duplicate=False))
    chosen = {name for name, param in params.items() if param.requires_grad}
    for adapter in model.peft_config:
        found = get_peft_model_state_dict(
            model, state_dict={**shown, **buffers}, adapter_name=adapter
        )
        chosen.update(names[id(tensor)] for tensor in found.values() if id(tensor) in names)
    wanted = {name: params[name] for name in params if name in chosen}
    with contextlib.ExitStack() as stack:
        for module in inf.offloaded_modules(model):
            own = {id(param) for param in module.parameters()}
            stack.enter_context(
                inf.handle(module).gather([p for p in wanted.values() if id(p) in own])
            )
        values = {name: param.detach().cpu().clone() for name, param in wanted.items()}
    return {**values, **buffers}
