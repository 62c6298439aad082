"""Finds the files from which `from_pretrained` reads the weights of a directory, and their tensors.

    adapter_config.json, shard-*-model-*.safetensors        refused
    "transformers_weights" of config.json                   a file, or an index
    model.safetensors                                       alone, even if there is an index
    model.safetensors.index.json                            all tensors of its files
    pytorch_model.bin, model.VARIANT.safetensors            refused
    *.safetensors                                           each tensor once

The first line that applies decides. transformers has the same rules, except the last.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from infinity._src.base.wording import listed
from infinity._src.checkpoint.formats.safetensors_reader import (
    SafetensorsFiles,
    StoredTensor,
    StoredTensors,
    is_index,
    read_header,
    read_index,
)
from infinity.errors import WeightsError

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")
_OTHER_FORMATS = ("*.bin", "*.pt", "*.pth", "*.h5", "*.msgpack")
_DISTRIBUTED = re.compile(r"shard-\d{5}-model-\d{5}-of-\d{5}\.safetensors")
_SHARD = r"(-\d{5}-of-\d{5})"
_VARIANT = re.compile(
    rf"model{_SHARD}?\.(?:safetensors\.index\.)?(?P<variant>[^.]+?){_SHARD}?\.(?:safetensors|json)"
)
"""Names of weights, shards and indices that `from_pretrained` reads only with variant=. Releases of
transformers put the shard's number before or after the variant.
"""


def open_safetensors(model: Any, path: Path) -> StoredTensors:
    """Open the files that `from_pretrained(path)` reads; if `path` is a file or index, open that.

    Raises: FileNotFoundError; WeightsError for weights that cannot be read tensor by tensor, for
    directories from which `from_pretrained` makes another model, and as `SafetensorsFiles`.
    """
    if not path.is_dir():
        _refuse_format(path)
        # An index that the user names is read like the index of a directory.
        return _joined(path, path.parent, path, ()) if is_index(path) else SafetensorsFiles(path)
    _refuse_adapter(path)
    _refuse_distributed(path)
    chosen = _named_by_config(model, path)
    if chosen is None:
        chosen = next((path / name for name in (_SINGLE, _INDEX) if (path / name).is_file()), None)
    if chosen is None:
        _refuse_other_weights(path)
        return SafetensorsFiles(path)
    return _joined(path, path, chosen, getattr(type(model.config), "extra_files", ()))


def read_config(path: Path) -> dict[str, Any] | None:
    """Read the config.json of a directory, or of a file's directory; None without such a file. If
    config.json lists a configuration for each release of transformers, read the installed
    release's.

    Raises: WeightsError for a file that is not a JSON object.
    """
    directory = path if path.is_dir() else path.parent
    found = read_object(directory / "config.json")
    if found is not None and "configuration_files" in found:
        from transformers.configuration_utils import get_configuration_file

        found = read_object(directory / get_configuration_file(found["configuration_files"]))
    return found


def read_object(file: Path) -> dict[str, Any] | None:
    """Read a JSON object; None if there is no file. Raises: WeightsError for other contents."""
    if not file.is_file():
        return None
    try:
        found = json.loads(file.read_text("utf-8"))
        if not isinstance(found, dict):
            raise TypeError(f"it is a {type(found).__name__}, not an object")
    except (ValueError, TypeError, RecursionError) as error:
        raise WeightsError(
            f"{file}: it cannot be read ({error}), and may name the weights and their "
            "quantization: copy or download it again",
            path=str(file),
        ) from error
    return found


def _named_by_config(model: Any, path: Path) -> Path | None:
    """Return the file or index that the configuration names, or None. Raises: FileNotFoundError;
    WeightsError for a file outside of the directory, or of another format.
    """
    config = read_config(path)
    source = path / "config.json" if config is not None else "the model's configuration"
    held = getattr(model.config, "transformers_weights", None)
    name = held if config is None else config.get("transformers_weights")
    if name is None:
        return None
    says = f'{source} has "transformers_weights": {json.dumps(name, default=str)}'
    fix = "name a file of safetensors or an index instead, or remove the entry"
    if not isinstance(name, str) or not name.endswith((".safetensors", ".safetensors.index.json")):
        raise WeightsError(f"{says}, which is not safetensors; {fix}", path=str(path))
    if not (path / name).resolve().is_relative_to(path.resolve()):
        raise WeightsError(f"{says}, which leads out of {path}; {fix}", path=str(path))
    if not (path / name).is_file():
        raise FileNotFoundError(f"{says}, but {path / name} does not exist; {fix}")
    return path / name


def _joined(label: Path, directory: Path, chosen: Path, extra: Iterable[str]) -> StoredTensors:
    """Return all tensors of a file, or of the files of an index, and of the existing `extra` files,
    including tensors that the index does not list.
    """
    weight_map: Mapping[str, str] = {}
    if is_index(chosen):
        weight_map, headers = read_index(chosen, directory)
    else:
        headers = {chosen.name: read_header(chosen)}
    for name in extra:
        if (directory / name).is_file() and name not in headers:
            headers[name] = read_header(directory / name)
    found: dict[str, StoredTensor] = {}
    for file, tensors in headers.items():
        for name, tensor in tensors.items():
            before = found.get(name)
            # transformers uses the tensor of the last file, which is right if the index names that
            # file.
            if before is not None and weight_map.get(name) != file:
                raise WeightsError(
                    f"{label} has {name} in {before.path.name} and in {file}: from_pretrained "
                    f"reads it from {file}, and {_says(weight_map, name)}; drop one of them",
                    path=str(label),
                    tensors=(name,),
                )
            found[name] = tensor
    lost = [name for name in weight_map if name not in found]
    if lost:
        places = {weight_map[name] for name in lost}
        raise WeightsError(
            f"{listed(sorted(places))} of {label} does not have {listed(lost)}, although the index "
            "lists it; copy or download the file again",
            path=str(directory / weight_map[lost[0]]),
            tensors=tuple(lost),
        )
    return StoredTensors(label, found)


def _says(weight_map: Mapping[str, str], name: str) -> str:
    return f"the index names {weight_map[name]}" if name in weight_map else "no index lists it"


# -- refused ---------------------------------------------------------------------------------------


def _refuse_adapter(path: Path) -> None:
    file = path / "adapter_config.json"
    if not file.is_file():
        return
    if (path / "config.json").is_file():
        fix = f"load= the file of the weights (such as {path / _SINGLE})"
        what = "these weights with an adapter"
    else:
        base = (read_object(file) or {}).get("base_model_name_or_path")
        fix = f"load= the directory of {base}"
        what = f"{base} with an adapter"
    raise WeightsError(
        f"{path} has {file.name}, with which from_pretrained returns {what}; {fix}, and add the "
        "adapter by peft afterwards",
        path=str(file),
    )


def _refuse_distributed(path: Path) -> None:
    for file in sorted(path.iterdir()):
        if _DISTRIBUTED.fullmatch(file.name):
            raise WeightsError(
                f"{path} has {file.name}, a part of a distributed save, which from_pretrained "
                "loads first; parts cannot be read tensor by tensor: save the whole model "
                "(`from_pretrained(...).save_pretrained(...)`), or move the parts away",
                path=str(file),
            )


def _is_shard(found: re.Match[str]) -> bool:
    return bool(found[1] or found[3])


def _refuse_other_weights(path: Path) -> None:
    """Raise WeightsError for a directory without model.safetensors and index, if `from_pretrained`
    would read files that cannot be read tensor by tensor.
    """
    for name in _PICKLED:
        _refuse_format(path / name)
    found = [each for file in path.iterdir() if (each := _VARIANT.fullmatch(file.name))]
    if found:
        # A shard has only a part of the weights, so the message names the index instead.
        first = min(found, key=lambda each: (_is_shard(each), each.string))
        file, variant = path / first.string, first["variant"]
        index = path / f"model.safetensors.index.{variant}.json"
        advice = f"name the file: {file}"
        if _is_shard(first):
            advice = f"name its index, {index}, which is missing: copy or download it"
        raise WeightsError(
            f"{path} has {file.name} and no {_SINGLE}: from_pretrained reads it only with "
            f"variant={variant!r}; {advice}",
            path=str(file),
        )
    if not any(path.glob("*.safetensors")):
        for pattern in _OTHER_FORMATS:
            for file in sorted(path.glob(pattern)):
                _refuse_format(file)


def _refuse_format(file: Path) -> None:
    """Raise WeightsError if the file exists and its format can only be read whole."""
    if file.is_file() and (file.name in _PICKLED or any(map(file.match, _OTHER_FORMATS))):
        raise WeightsError(
            f"{file} holds the weights; only safetensors and GGUF can be read tensor by tensor: "
            "save the model as safetensors first "
            "(`from_pretrained(...).save_pretrained(...)`)",
            path=str(file),
        )
