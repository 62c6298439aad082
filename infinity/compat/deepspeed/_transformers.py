"""`from_pretrained` of transformers under ZeRO-3: parameters are mapped from checkpoint files.

transformers builds such a model under `zero.Init`, merges all files on rank 0, and copies tensor
by tensor into the parameters of all ranks. Here each rank maps the files:

    from_pretrained            zero.Init registers parameters without values
    _load_pretrained_model     a stored tensor that needs no conversion is mapped directly. A fused
                               or cast tensor is materialized on its own; with parameters on NVMe it
                               is written to zero.Init's backing file
    _finalize_model_loading    unchanged: transformers initialises parameters that no file has, with
                               rank 0's values

So the whole model is never in RAM. It is still an ordinary CPU model: a script can add adapters,
resize embeddings, and read and write values, with `GatheredParameters` or without. A write changes
this process's memory and no checkpoint file. `initialize` reads the model unit by unit.

Other checkpoints (`.bin`, a state dict in memory) are loaded by transformers, into memory that
`zero.Init` allocates.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from infinity._embedding import check_methods
from infinity.compat.deepspeed.zero.init import is_reserved, reserving, set_values

log = logging.getLogger("infinity")

_TESTED = "5.23.0"

_WHOLE: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
"""Models that `from_pretrained` loaded while transformers knew no ZeRO-3 configuration."""


def adapt(modeling: Any) -> None:
    """Patch `PreTrainedModel.from_pretrained` and `_load_pretrained_model` as described above.

    modeling: the module transformers.modeling_utils. Raises: ImportError for a release of
    transformers without these methods.
    """
    model_class = modeling.PreTrainedModel
    check_methods(model_class, ("_load_pretrained_model",), "transformers", _TESTED)
    if hasattr(model_class._load_pretrained_model, "infinity_maps"):
        return
    own_from, own_load = model_class.from_pretrained.__func__, model_class._load_pretrained_model

    @functools.wraps(own_from)
    def from_pretrained(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if modeling.is_deepspeed_zero3_enabled():
            with reserving():
                return own_from(cls, *args, **kwargs)
        loaded = own_from(cls, *args, **kwargs)
        # With output_loading_info=True, from_pretrained returns a pair.
        _WHOLE.add(loaded[0] if isinstance(loaded, tuple) else loaded)
        return loaded

    @functools.wraps(own_load)
    def load(
        model: Any, state_dict: Any, checkpoint_files: Any, load_config: Any, *args: Any,
        **kwargs: Any,
    ) -> Any:  # fmt: skip
        reserved = [param for param in model.parameters() if is_reserved(param)]
        if reserved and state_dict is None and _all_safetensors(checkpoint_files):
            return _map(modeling, model, checkpoint_files, load_config), None
        for param in reserved:
            set_values(param, param.data)
        return own_load(model, state_dict, checkpoint_files, load_config, *args, **kwargs)

    load.infinity_maps = True  # type: ignore[attr-defined]
    model_class.from_pretrained = classmethod(from_pretrained)
    model_class._load_pretrained_model = staticmethod(load)


def warn_of_whole(model: torch.nn.Module) -> None:
    """Warn if the model was loaded before ZeRO-3 was configured: each rank holds it whole in RAM.
    """
    for module in model.modules():
        if module in _WHOLE:
            _WHOLE.discard(module)
            log.warning(
                "%s was loaded by from_pretrained before there was a configuration of ZeRO-3, so "
                "each rank holds all of it in RAM. Make TrainingArguments(deepspeed=...) "
                "first, or transformers.integrations.HfDeepSpeedConfig(config), and keep it: then "
                "from_pretrained maps the checkpoint's files",
                type(module).__name__,
            )


def _all_safetensors(files: Sequence[str] | None) -> bool:
    return bool(files) and all(str(file).endswith(".safetensors") for file in files or ())


def _map(modeling: Any, model: Any, files: Sequence[str], load_config: Any) -> Any:
    """Load a model's parameters and buffers from safetensors files. Returns the LoadStateDictInfo
    that transformers' own loader returns."""
    from transformers.integrations.deepspeed import _apply_weight_conversions_to_state_dict

    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        tensors.update(
            modeling.load_state_dict(
                file, map_location="cpu", weights_only=load_config.weights_only,
                disable_mmap=load_config.disable_mmap,
            )
        )  # fmt: skip
    in_files = {_memory_of(tensor) for tensor in tensors.values()}
    mapping = list(load_config.weight_mapping or ())
    held = model.state_dict(keep_vars=True)
    _plan_dtypes(held, load_config.dtype_plan)
    missing, mismatched = set(held), set()
    # transformers yields each group of fused tensors alone, and all other tensors last.
    for group in _apply_weight_conversions_to_state_dict(model, tensors, mapping):
        for name, value in group.items():
            prefixed = f"{model.base_model_prefix}.{name}"
            target_name = prefixed if prefixed in held else name
            target = held.get(target_name)
            missing.discard(target_name)
            if target is None:
                continue
            if target.shape != value.shape:
                mismatched.add((target_name, value.shape, target.shape))
                continue
            _set_tensor(target, value, mapped=_memory_of(value) in in_files)
    if mapping:
        # As transformers does: save_pretrained uses this to undo the conversions.
        model._weight_conversions = mapping
    _allocate_missing(model, held, missing | {name for name, *_ in mismatched})
    return modeling.LoadStateDictInfo(
        missing_keys=missing, unexpected_keys=set(), mismatched_keys=mismatched, error_msgs=[],
        conversion_errors={}, skipped_pp_keys=set(),
    )  # fmt: skip


def _plan_dtypes(held: dict[str, torch.Tensor], plan: dict[str, torch.dtype]) -> None:
    """Reallocate tensors, still without values, in the dtypes that transformers plans for them."""
    from transformers.core_model_loading import build_glob_alternation

    if not plan:
        return
    pattern, by_group, _ = build_glob_alternation(list(plan))
    for name, tensor in held.items():
        found = pattern.search(name)
        if found and tensor.is_floating_point():
            tensor.data = torch.empty_like(tensor.data, dtype=plan[by_group[found.lastgroup]])


def _memory_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _set_tensor(target: torch.Tensor, value: torch.Tensor, *, mapped: bool) -> None:
    """Set a parameter or a buffer. mapped: whether `value` is mapped from a checkpoint file."""
    # Without this mark transformers would initialise the tensor again.
    target._is_hf_initialized = True  # type: ignore[attr-defined]
    if isinstance(target, torch.nn.Parameter):
        set_values(target, value, mapped=mapped)
    else:
        with torch.no_grad():
            target.copy_(value)


def _allocate_missing(model: Any, held: dict[str, torch.Tensor], names: Iterable[str]) -> None:
    """Allocate memory for parameters that transformers will initialise. Skips tied ones, which will
    share their source's memory."""
    tied = getattr(model, "all_tied_weights_keys", {})
    for name in sorted(names):
        target = held[name]
        if isinstance(target, torch.nn.Parameter) and name not in tied:
            set_values(target, torch.zeros((), dtype=target.dtype).expand(target.shape))
