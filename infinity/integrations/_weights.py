"""Streams weights of transformers' models from files to the tiers, and from the tiers to files."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import safetensors
import torch
import torch.distributed as dist
import transformers
from transformers.dynamic_module_utils import custom_object_save

import infinity as inf
from infinity._embedding import check_methods, only_engine, share_values

TESTED = "5.23.0"
"""The release of transformers that this module and `_trainer` were written against."""

_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "BOOL": torch.bool,
}  # fmt: skip

_PLACING = (
    "device_map", "max_memory", "offload_folder", "offload_state_dict", "offload_buffers",
    "low_cpu_mem_usage", "tp_plan", "tp_size", "distributed_config", "state_dict",
    "quantization_config", "key_mapping", "gguf_file", "subfolder", "adapter_kwargs",
    "output_loading_info",
)  # fmt: skip
"""Arguments of `from_pretrained` that set the source or the placement of values."""


def save_new(value: Any, path: Path) -> None:
    """Write a file by torch.save and rename it into place. Does not follow a symbolic link, nor
    block on a FIFO, that another user put under its names. Raises: OSError, or torch's RuntimeError
    if the write fails; then no partial file remains."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    partial.unlink(missing_ok=True)
    # "x": fails unless this call creates the file.
    file = partial.open("xb")
    try:
        with file:
            torch.save(value, file)
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def from_pretrained(cls: Any, directory: Path, policy: inf.Policy, settings: dict[str, Any]) -> Any:
    """Implement `infinity.integrations.transformers.from_pretrained`."""
    refused = sorted(name for name in _PLACING if settings.get(name) is not None)
    if refused:
        raise ValueError(
            f"from_pretrained(..., policy, {refused[0]}=...): the policy places the values of the "
            f"files in `directory`; leave {refused[0]} out"
        )
    if not (directory / "config.json").is_file():
        raise ValueError(
            f"{directory} has no config.json: give a directory on this machine, as "
            "huggingface_hub.snapshot_download(name) returns one"
        )
    model, missing, unexpected = _on_meta(cls, directory, dict(settings))
    if not missing and not unexpected:
        return inf.offload(model, policy, load=directory)
    made = _initialised(model, missing, torch.device(policy.device or "cpu"))

    def begin(name: str, tensor: torch.Tensor) -> None:
        if name in made:
            tensor.copy_(made[name])
        else:
            tensor.zero_()

    # First set the tensors that the files lack; then the files overwrite the others' zeros.
    inf.offload(model, policy, load=begin)
    loaded = inf.load_safetensors(model, directory, strict=False)
    absent = [name for name in loaded.missing if name not in made]
    if absent:
        inf.handle(model).close()
        raise ValueError(f"{directory} has no {', '.join(absent)}")
    return model


def _on_meta(cls: Any, directory: Path, settings: dict[str, Any]) -> tuple[Any, set[str], set[str]]:
    """Build the model on meta, as `from_pretrained` does. Returns (model, names of tensors that the
    files lack, names of tensors that only the files have).
    """
    kept = {
        name: settings.pop(name)
        for name in ("dtype", "torch_dtype", "attn_implementation", "experts_implementation")
        if name in settings
    }
    config = settings.pop("config", None)
    if config is None:
        config, settings = transformers.AutoConfig.from_pretrained(
            directory, return_unused_kwargs=True, **settings
        )
    settings.pop("trust_remote_code", None)
    kind = cls
    if hasattr(cls, "_model_mapping"):
        with torch.device("meta"):
            kind = type(cls.from_config(config))
    if getattr(config, "quantization_config", None) is not None:
        # The engine dequantizes while it reads, so the model needs no quantized modules.
        with torch.device("meta"):
            model = kind._from_config(config, **kept)
        missing: set[str] = set()
        unexpected: set[str] = set()
    else:
        model, info = kind.from_pretrained(
            None,
            config=config,
            state_dict=_shapes(directory),
            device_map="meta",
            output_loading_info=True,
            **kept,
            **settings,
        )
        missing = set(info["missing_keys"]) | {name for name, *_ in info["mismatched_keys"]}
        unexpected = set(info["unexpected_keys"])
    model.config.name_or_path = model.name_or_path = str(directory)
    if model.can_generate() and (directory / "generation_config.json").is_file():
        model.generation_config = transformers.GenerationConfig.from_pretrained(directory)
    return model.eval(), missing, unexpected


def _shapes(directory: Path) -> dict[str, torch.Tensor]:
    """Return a meta tensor for each tensor in the files."""
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        files = [directory / name for name in names]
    else:
        one = directory / "model.safetensors"
        files = [one] if one.is_file() else sorted(directory.glob("*.safetensors"))
    if not files:
        raise ValueError(
            f"{directory} has no safetensors: convert the checkpoint with "
            "transformers (from_pretrained, then save_pretrained)"
        )
    found = {}
    for file in files:
        with safetensors.safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - it is no mapping
                stored = opened.get_slice(name)
                dtype = _DTYPES[stored.get_dtype()]
                found[name] = torch.empty(stored.get_shape(), dtype=dtype, device="meta")
    return found


def _initialised(
    model: Any, missing: set[str], device: torch.device
) -> dict[str, torch.Tensor]:
    """Initialise the tensors that no file has by the model's `initialize_weights`, and return them:
    the same on all ranks. They are in memory together (a new head is small). device: the device on
    which the process group communicates.
    """
    for name in missing:
        owner, _, attribute = name.rpartition(".")
        module = model.get_submodule(owner)
        empty = torch.empty_like(getattr(module, attribute), device="cpu")
        if attribute in module._buffers:
            module._buffers[attribute] = empty
        else:
            grad = module._parameters[attribute].requires_grad
            module._parameters[attribute] = torch.nn.Parameter(empty, requires_grad=grad)
    # Tensors from files stay marked and are skipped; a marked module would be skipped as a whole.
    for module in model.modules():
        module.__dict__.pop("_is_hf_initialized", None)
    model.initialize_weights()
    made = {name: value.detach() for name, value in model.state_dict().items() if name in missing}
    if dist.is_available() and dist.is_initialized():
        share_values([made[name] for name in sorted(made)], device)
    return made


def is_adapted(model: Any) -> bool:
    """Return whether a model's checkpoints contain adapters alone: a PeftModel, or a transformers
    model with adapters."""
    return is_peft_model(model) or has_own_adapters(model)


def is_peft_model(model: Any) -> bool:
    """Return whether a model is a PeftModel around a transformers model."""
    return hasattr(model, "peft_config") and hasattr(model, "get_base_model")


def has_own_adapters(model: Any) -> bool:
    """Return whether adapters were added to a transformers model without a PeftModel: by
    `model.add_adapter`, or by loading a directory of adapters.
    """
    return bool(getattr(model, "_hf_peft_config_loaded", False))


SHARD_BYTES_MIN = 128 << 20
"""Minimum size of a weight file by default. One file is in memory at a time."""

_FILES_MAX = 100


def save_pretrained(
    model: Any, directory: Path, *, max_shard_size: int | str | None = None, first: bool = True
) -> None:
    """Stream the weights to files, and write the configuration files that `from_pretrained` reads.
    Collective. first: whether this rank writes the configuration files.
    """
    if max_shard_size is None:
        total = sum(param.numel() * param.dtype.itemsize for param in model.parameters())
        max_shard_size = max(SHARD_BYTES_MIN, total // _FILES_MAX)
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
    """Write adapters by `model.save_pretrained`. Gathers all of them together, since they are
    small; the base is not read. Collective; the rank with `first` writes.

    Without a PeftModel, `save_pretrained` writes the active adapter only.
    """
    values = adapter_values(model)
    if first:
        model.save_pretrained(directory, state_dict=values)


def load_own_adapter(model: Any, directory: Path) -> None:
    """Set the active adapter of a transformers model without a PeftModel, from the files that
    `export_adapters` wrote. Collective.

    Raises: ValueError for files with tensors that the adapter does not have.
    """
    from peft import set_peft_model_state_dict
    from peft.utils import load_peft_weights

    name = model.active_adapters()[0]
    given = load_peft_weights(str(directory), device="cpu")
    values = {key.removeprefix("base_model.model."): value for key, value in given.items()}
    result = set_peft_model_state_dict(model, values, adapter_name=name)
    if result.unexpected_keys:
        raise ValueError(
            f"{directory} is no adapter like {name!r} of this model: it has "
            f"{', '.join(result.unexpected_keys[:3])}"
        )


def adapter_values(model: Any) -> dict[str, torch.Tensor]:
    """Return CPU copies of all tensors that PEFT's checkpoints of the adapters contain, by their
    names in the model's state dict. Collective on several ranks.
    """
    from peft import get_peft_model_state_dict

    # PEFT selects by names and reads no values, so the parameters need not be gathered yet.
    shown = model.state_dict(keep_vars=True)
    chosen = {id(param) for param in model.parameters() if param.requires_grad}
    for adapter in model.peft_config:
        found = get_peft_model_state_dict(model, state_dict=shown, adapter_name=adapter)
        chosen.update(map(id, found.values()))
    wanted = {name: tensor for name, tensor in shown.items() if id(tensor) in chosen}
    engine = inf.handle(only_engine(model, "adapter_values"))
    with engine.gather([tensor for tensor in wanted.values() if inf.is_offloaded(tensor)]):
        return {name: tensor.detach().cpu().clone() for name, tensor in wanted.items()}


check_methods(
    transformers.PreTrainedModel, ("initialize_weights", "save_pretrained"), "transformers", TESTED
)
