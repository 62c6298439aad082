"""PEFT: adapters on an offloaded, frozen base model.

    model = get_peft_model(base, LoraConfig(...))
    model = inf.offload(model, policy)               # after get_peft_model
    opt = inf.AdamW(model.parameters(), lr=1e-4)     # frozen parameters have no states

    save_adapters        writes the files of PeftModel.save_pretrained; reads only the adapters
    load_adapter         sets an adapter's values from such files
    merge                adds the adapters to the base's weights, with one layer in memory at a time
    export_merged        streams the merged model to files that the base's class loads
    tile_experts         splits stacks of experts that have adapters (`target_parameters`) into
                         tiles

The whole model is never in memory. `inf.save(model, opt, directory, frozen=False)` saves a run's
states without the base. All functions are collective.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from peft import PeftModel, get_peft_model_state_dict
from peft.tuners.lora.layer import ParamWrapper
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer, check_adapters_to_merge
from peft.utils import load_peft_weights
from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper

import infinity as inf
from infinity._embedding import check_all_offloaded, check_methods
from infinity.ops import LowRank, TiledExperts

for _owner, _names in (
    (PeftModel, ("save_pretrained", "get_base_model")),
    (BaseTuner, ("_check_merge_allowed",)),
    (BaseTunerLayer, ("merge", "get_base_layer", "_get_available_adapters")),
    (AuxiliaryTrainingWrapper, ("unload_and_optionally_merge_module",)),
    (ParamWrapper, ("get_param", "get_delta_weight", "_activate_lora", "merge", "unmerge")),
):
    check_methods(_owner, _names, "peft", "0.21")


def adapter_state_dict(
    model: torch.nn.Module,
    adapter_name: str = "default",
    *,
    save_embedding_layers: bool | str = "auto",
) -> dict[str, torch.Tensor]:
    """Return an adapter's tensors on the CPU, by their names in adapter files, as PEFT's
    get_peft_model_state_dict does for a model in memory. Collective.

    save_embedding_layers: as in PEFT. Raises: ValueError for prompt learning, and unless `model` is
    an entirely offloaded PeftModel.
    """
    peft_model = _checked(model, "adapter_state_dict")
    choice = {"adapter_name": adapter_name, "save_embedding_layers": save_embedding_layers}
    values = _read(peft_model, _chosen(peft_model, **choice).values())
    found: dict[str, torch.Tensor] = get_peft_model_state_dict(
        peft_model, state_dict=values, **choice
    )
    return found


def save_adapters(
    model: torch.nn.Module,
    directory: str | os.PathLike[str],
    *,
    adapters: Sequence[str] | None = None,
    save_embedding_layers: bool | str = "auto",
) -> None:
    """Write adapters and their configurations as PeftModel.save_pretrained does, for
    PeftModel.from_pretrained. Collective; rank 0 writes, and all ranks wait for it.

    adapters: names; None: all. Raises: as `adapter_state_dict`.
    """
    peft_model = _checked(model, "save_adapters")
    selected = list(peft_model.peft_config) if adapters is None else list(adapters)
    chosen = [
        value
        for name in selected
        for value in _chosen(
            peft_model, adapter_name=name, save_embedding_layers=save_embedding_layers
        ).values()
    ]
    peft_model.save_pretrained(
        os.fspath(directory),
        selected_adapters=selected,
        save_embedding_layers=save_embedding_layers,
        is_main_process=_rank() == 0,
        state_dict=_read(peft_model, chosen),
    )
    _barrier()


def load_adapter(
    model: torch.nn.Module,
    directory: str | os.PathLike[str],
    adapter_name: str = "default",
) -> None:
    """Set the values of one of the model's adapters from adapter files, and its masters with them.
    Moments and step counts stay. Collective.

    directory: of the files, or their name on the hub. Raises: ValueError for an adapter that the
    model does not have, and for missing or unexpected tensors in the files; RuntimeError for a
    tensor of another shape. An error leaves all values unchanged.
    """
    peft_model = _checked(model, "load_adapter")
    if adapter_name not in peft_model.peft_config:
        raise ValueError(
            f"load_adapter: the model has no adapter {adapter_name!r}; call "
            f"model.add_adapter({adapter_name!r}, config) after get_peft_model and before "
            "inf.offload"
        )
    given = load_peft_weights(os.fspath(directory), device="cpu")
    here = _chosen(peft_model, adapter_name=adapter_name, save_embedding_layers=False)
    # Files keep biases and resized embeddings under the model's own names.
    every = _at_rest(peft_model)
    unknown = sorted(name for name in given if name not in here and name not in every)
    missing = sorted(here.keys() - given.keys())
    if unknown or missing:
        raise ValueError(
            f"load_adapter: {directory} is no adapter like {adapter_name!r}: missing "
            f"{missing[:3] or 'nothing'}, unexpected {unknown[:3] or 'nothing'}"
        )
    targets = {name: here[name] if name in here else every[name] for name in given}
    for name, value in given.items():
        if targets[name].shape != value.shape:
            raise RuntimeError(
                f"load_adapter: {name} is {tuple(value.shape)} in {directory}, "
                f"{tuple(targets[name].shape)} in the model"
            )
    places = _places(peft_model)
    for name, value in given.items():
        owner, leaf = places[id(targets[name])]
        owner.load_state_dict({leaf: value}, strict=False)


def merge(
    model: torch.nn.Module, *, adapters: Sequence[str] | None = None, safe_merge: bool = False
) -> torch.nn.Module:
    """Add adapters to the base's weights, in place, with one layer in memory at a time. Returns the
    model, which stays offloaded and computes with the merged weights alone. Collective.

    The weights have the bits of PEFT's merge_and_unload. `export_merged` writes them. Checkpoints
    saved without the base (`inf.save(frozen=False)`) no longer match the base after a merge.

    adapters: names; None: the active ones. safe_merge: check for NaN first. Raises: ValueError
    unless `model` is an entirely offloaded PeftModel; for adapters that cannot be merged.
    """
    peft_model = _checked(model, "merge")
    tuner = _tuner(peft_model, "merge")
    tuner._check_merge_allowed()
    handle = inf.handle(peft_model)
    names = None if adapters is None else list(adapters)
    for module in list(tuner.modules()):
        if isinstance(module, BaseTunerLayer):
            with torch.no_grad(), handle.gather(module.parameters()):
                module.merge(safe_merge=safe_merge, adapter_names=names)
    return model


def export_merged(
    model: torch.nn.Module,
    directory: str | os.PathLike[str],
    *,
    shard_bytes_max: int | str = "2GiB",
) -> None:
    """Write a merged model as safetensors with the base's names, and its configuration, for
    `from_pretrained` of the base's class. Collective. Streams as `inf.export_safetensors` does.

    Raises: ValueError if `merge` was not called; as `inf.export_safetensors`.
    """
    peft_model = _checked(model, "export_merged")
    tuner = _tuner(peft_model, "export_merged")
    waiting = [
        name
        for name, module in tuner.named_modules()
        if isinstance(module, BaseTunerLayer) and _has_active(module) and not module.merged
    ]
    if waiting:
        raise ValueError(
            f"export_merged: {waiting[0]} and {len(waiting) - 1} others are not merged; call "
            "merge(model) first"
        )
    inf.export_safetensors(
        peft_model,
        directory,
        shard_bytes_max=shard_bytes_max,
        names=lambda name: _merged_name(tuner, name),
    )
    if _rank() == 0:
        _save_config(tuner.model, directory)
    _barrier()


# -- experts in tiles ------------------------------------------------------------------------------

M = TypeVar("M", bound=torch.nn.Module)


def tile_experts(
    model: M, *, experts: int, names: str | Sequence[str] | None = None
) -> M:
    """Split stacks of experts into tiles, as `inf.tile_experts` does, in a model whose adapters
    target such stacks (`target_parameters`, "all-linear"). Call it after get_peft_model, before
    `inf.offload` and the optimizer.

    The adapter's change of an expert is added when that expert is computed, in forward and
    backward, so neither the whole stack nor its whole change is ever in memory. Losses and
    gradients have the bits of the unsplit model's eager implementation; the gradients of several
    active adapters of rank 1 may differ by rounding. `merge` gathers one layer's stacks at a time.

    Raises: as `inf.tile_experts`.
    """
    for module in model.modules():
        if type(module) is ParamWrapper and int(module.num_experts) > 1:  # type: ignore[arg-type]
            # Only the class changes, as with torch's parametrize: names and values stay.
            module.__class__ = TiledParamWrapper
    inf.tile_experts(model, experts=experts, names=names)
    return model


class TiledParamWrapper(ParamWrapper):
    """PEFT's ParamWrapper for a stack of experts that may be tiled."""

    takes_tiles = True

    def _tiles(self) -> TiledExperts | None:
        base = self.get_base_layer()
        return base if isinstance(base, TiledExperts) else None

    def get_param(self) -> torch.Tensor:
        """Return the parameter; with tiles, a stand-in of its shape, dtype and device."""
        tiles = self._tiles()
        found = super().get_param() if tiles is None else tiles.stack(self.parameter_name)
        assert isinstance(found, torch.Tensor)
        return found

    @contextmanager
    def _activate_lora(self, active_adapters: list[str]) -> Iterator[None]:
        tiles = self._tiles()
        if tiles is None:
            with super()._activate_lora(active_adapters):
                yield
            return
        changes = [self._change(name) for name in active_adapters if name in self.lora_A]
        with tiles.changed(self.parameter_name, changes):
            yield

    def _change(self, adapter: str) -> LowRank:
        """Return an adapter's change of the stack as low-rank factors, in the adapter's dtype."""
        a, b = self.lora_A[adapter].weight, self.lora_B[adapter].weight
        a = a.reshape(self.num_experts, -1, a.shape[-1])
        b = b.reshape(b.shape[0], -1, self.num_experts).permute(2, 0, 1)
        # For stacks of shape [experts, out, in] PEFT swaps in and out.
        lhs, rhs = (b, a) if self._did_swap_in_out_features else (a.mT, b.mT)
        return LowRank(lhs, rhs, self.scaling[adapter])

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Add adapters to the stack, tile by tile."""
        tiles = self._tiles()
        if tiles is None:
            super().merge(safe_merge=safe_merge, adapter_names=adapter_names)
            return
        for name in check_adapters_to_merge(self, adapter_names):
            if name not in self.lora_A:
                continue
            parts = self._parts(tiles, name)
            if safe_merge and not all((param.data + d).isfinite().all() for param, d in parts):
                raise ValueError(
                    f"NaNs detected in the merged weights. The adapter {name} seems to be broken"
                )
            for param, delta in parts:
                param.data += delta
            self.merged_adapters.append(name)

    def unmerge(self) -> None:
        """Subtract the merged adapters from the stack, tile by tile."""
        tiles = self._tiles()
        if tiles is None or not self.merged:
            super().unmerge()
            return
        while self.merged_adapters:
            name = self.merged_adapters.pop()
            if name in self.lora_A:
                for param, delta in self._parts(tiles, name):
                    param.data -= delta

    def _parts(
        self, tiles: TiledExperts, adapter: str
    ) -> list[tuple[torch.nn.Parameter, torch.Tensor]]:
        """Return each tile's parameter with its part of an adapter's change."""
        params = tiles.tile_parameters(self.parameter_name)
        deltas = self.get_delta_weight(adapter).split([len(param) for param in params])
        return list(zip(params, deltas, strict=True))


# -- the model -------------------------------------------------------------------------------------


def _checked(model: torch.nn.Module, call: str) -> Any:
    """Return the PeftModel, unwrapped. Raises: ValueError unless it is entirely offloaded."""
    inner = getattr(model, "_orig_mod", model)  # torch.compile's wrapper
    if not isinstance(inner, PeftModel):
        raise ValueError(f"{call} needs a PeftModel, not a {type(inner).__name__}")
    check_all_offloaded(inner, call)
    for name, config in inner.peft_config.items():
        if config.is_prompt_learning:
            raise ValueError(
                f"{call}: adapter {name!r} is of {config.peft_type.value}, which learns a prompt; "
                "only adapters with weights in the base's layers, such as LoRA, are supported"
            )
    return inner


def _tuner(model: Any, call: str) -> Any:
    if not isinstance(model.base_model, BaseTuner):
        raise ValueError(f"{call}: {type(model.base_model).__name__} has no adapters to merge")
    return model.base_model


def _has_active(layer: Any) -> bool:
    """Return whether an active adapter has weights in this layer, so that `merge` merges it."""
    return bool(set(layer.active_adapters) & set(layer._get_available_adapters()))


# -- adapters --------------------------------------------------------------------------------------


def _at_rest(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the state dict with the Parameter objects; reads no values."""
    return model.state_dict(keep_vars=True)


def _chosen(model: torch.nn.Module, **choice: Any) -> dict[str, torch.Tensor]:
    """Return the parameters and buffers that PEFT writes for an adapter, by their names in its
    files. PEFT selects by names, so no values are read."""
    found: dict[str, torch.Tensor] = get_peft_model_state_dict(
        model, state_dict=_at_rest(model), **choice
    )
    return found


def _read(model: torch.nn.Module, chosen: Any) -> dict[str, torch.Tensor]:
    """Copy the chosen tensors to the CPU one by one. Returns them by all state dict names."""
    wanted = {id(tensor) for tensor in chosen}
    places = _places(model)
    values: dict[int, torch.Tensor] = {}
    found: dict[str, torch.Tensor] = {}
    for name, tensor in _at_rest(model).items():
        if id(tensor) not in wanted:
            continue
        if id(tensor) not in values:
            if inf.is_offloaded(tensor):
                owner, leaf = places[id(tensor)]
                # The owner's state_dict copies its direct parameters without gathering their unit.
                values[id(tensor)] = owner.state_dict()[leaf]
            else:
                values[id(tensor)] = tensor.detach().to("cpu", copy=True)
        found[name] = values[id(tensor)]
    return found


def _places(model: torch.nn.Module) -> Mapping[int, tuple[torch.nn.Module, str]]:
    """Map the id() of each parameter and buffer to (owning module, name in that module)."""
    return {
        id(tensor): (module, name)
        for module in model.modules()
        for found in (module._parameters, module._buffers)
        for name, tensor in found.items()
        if tensor is not None
    }


# -- the merged model ------------------------------------------------------------------------------


def _merged_name(tuner: Any, name: str) -> str | None:
    """Return the name in the merged model of a PeftModel's tensor; None for adapters and for
    weights that they replace."""
    module, path = tuner.model, name.removeprefix("base_model.model.").split(".")
    merged: list[str] = []
    while path:
        step = path.pop(0)
        if isinstance(module, ModulesToSaveWrapper):
            active = module.active_adapters
            if not active and step != "original_module":
                return None
            if active and not (step == "modules_to_save" and path.pop(0) == active[0]):
                return None
            child = module.modules_to_save[active[0]] if active else module.original_module
        elif isinstance(module, AuxiliaryTrainingWrapper | BaseTunerLayer):
            if step not in ("base_layer", "token_adapter"):
                return None
            child = getattr(module, step)
        else:
            merged.append(step)
            child = module._modules.get(step)
        module = child
    return ".".join(merged)


def _save_config(base: Any, directory: str | os.PathLike[str]) -> None:
    """Write the base's configuration, as its save_pretrained does."""
    if not hasattr(getattr(base, "config", None), "save_pretrained"):
        return
    config = copy.deepcopy(base.config)
    config.architectures = [type(base).__name__]
    if getattr(config, "tie_word_embeddings", False) and _untied(base):
        config.tie_word_embeddings = False
    config.save_pretrained(directory)
    if getattr(base, "generation_config", None) is not None:
        base.generation_config.save_pretrained(directory)


def _untied(base: Any) -> bool:
    """Return whether an adapter replaced one of two tied embeddings, so that they differ now."""
    embeddings = (base.get_input_embeddings(), base.get_output_embeddings())
    weights = [_weight_of(module) for module in embeddings if module is not None]
    return len({id(weight) for weight in weights}) > 1


def _weight_of(module: Any) -> Any:
    while isinstance(module, AuxiliaryTrainingWrapper | BaseTunerLayer):
        if isinstance(module, ModulesToSaveWrapper) and module.active_adapters:
            module = module.modules_to_save[module.active_adapters[0]]
        elif isinstance(module, BaseTunerLayer):
            module = module.get_base_layer()
        else:
            module = module.original_module
    return module._parameters["weight"]


# -- ranks -----------------------------------------------------------------------------------------


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _barrier() -> None:
    """Wait for all ranks."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.barrier()


__all__ = [
    "adapter_state_dict",
    "export_merged",
    "load_adapter",
    "merge",
    "save_adapters",
    "tile_experts",
]
