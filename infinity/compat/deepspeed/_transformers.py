"""`from_pretrained` of transformers under ZeRO-3: parameters are mapped from files.

transformers builds such a model under `zero.Init`, merges all files on rank 0, and copies tensor
by tensor into the parameters of all ranks. Here each rank maps the files, and the memory of a
parameter is its place in them:

    from_pretrained            zero.Init notes parameters, and gives them no values
    _load_pretrained_model     a tensor of a file becomes the parameter's memory, as it is; one that
                               is fused, or of another dtype, is made alone, and goes to a file on
                               the drive where parameters rest on one
    _finalize_model_loading    transformers' own: what no file has is initialised (rank 0's values)

So a model is never in RAM as a whole, and is yet an ordinary model on the CPU: adapters are added
to it, embeddings resized, and values read and written, with `GatheredParameters` or without. A
write changes the memory of this process, and no file. `initialize` reads it unit by unit.

Other checkpoints (`.bin`, a state dict in memory) take transformers' own way, into memory of
`zero.Init`.
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
"""Models that `from_pretrained` has loaded before there was a configuration of ZeRO-3."""


def adapt(modeling: Any) -> None:
    """Put the two methods of `PreTrainedModel` in place that load under ZeRO-3 as above.

    modeling: the module transformers.modeling_utils. Raises: ImportError for a release without the
    methods.
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
        # With output_loading_info=True it is a pair.
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
    """Warn of a model that was loaded before there was a configuration of ZeRO-3: it is in the RAM
    of each rank as a whole.
    """
    for module in model.modules():
        if module in _WHOLE:
            _WHOLE.discard(module)
            log.warning(
                "%s was loaded by from_pretrained before there was a configuration of ZeRO-3, so "
                "it is in the RAM of each rank as a whole. Make TrainingArguments(deepspeed=...) "
                "first, or transformers.integrations.HfDeepSpeedConfig(config), and keep it: then "
                "from_pretrained maps the checkpoint's files",
                type(module).__name__,
            )


def _all_safetensors(files: Sequence[str] | None) -> bool:
    return bool(files) and all(str(file).endswith(".safetensors") for file in files or ())


def _map(modeling: Any, model: Any, files: Sequence[str], load_config: Any) -> Any:
    """Give the parameters and buffers of a model their values in the files. Returns what
    transformers reports."""
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
    # Those that are fused come one group at a time, and all others last.
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
            _give(target, value, mapped=_memory_of(value) in in_files)
    if mapping:
        # As transformers: a save reverts them.
        model._weight_conversions = mapping
    _make_room(model, held, missing | {name for name, *_ in mismatched})
    return modeling.LoadStateDictInfo(
        missing_keys=missing, unexpected_keys=set(), mismatched_keys=mismatched, error_msgs=[],
        conversion_errors={}, skipped_pp_keys=set(),
    )  # fmt: skip


def _plan_dtypes(held: dict[str, torch.Tensor], plan: dict[str, torch.dtype]) -> None:
    """Give tensors that transformers keeps in fp32 that dtype; they have no values yet."""
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


def _give(target: torch.Tensor, value: torch.Tensor, *, mapped: bool) -> None:
    """Set a parameter, or a buffer. mapped: whether the value's memory is a file's."""
    # Else transformers initialises it anew.
    target._is_hf_initialized = True  # type: ignore[attr-defined]
    if isinstance(target, torch.nn.Parameter):
        set_values(target, value, mapped=mapped)
    else:
        with torch.no_grad():
            target.copy_(value)


def _make_room(model: Any, held: dict[str, torch.Tensor], names: Iterable[str]) -> None:
    """Give parameters that are to be initialised memory for it; tied ones get another's."""
    tied = getattr(model, "all_tied_weights_keys", {})
    for name in sorted(names):
        target = held[name]
        if isinstance(target, torch.nn.Parameter) and name not in tied:
            set_values(target, torch.zeros((), dtype=target.dtype).expand(target.shape))
