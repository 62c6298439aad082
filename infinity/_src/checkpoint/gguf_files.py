"""GGUF files as a source of values: read and unpacked one tensor at a time, by transformers' own
operations.

transformers has two ways. Architectures of the first have conversions, as checkpoints of the hub
have them; their tensors are given as they are stored. Tensors of the second are unpacked here, and
have the names of the model.
"""

from __future__ import annotations

import dataclasses
import math
import struct
from pathlib import Path
from typing import Any

import numpy as np
import torch

from infinity._src.checkpoint.hub_conversion import conversions_of, transformers_loading
from infinity._src.checkpoint.safetensors_files import StoredTensor, StoredTensors, check_whole
from infinity.errors import WeightsError

_PLAIN = {0: "F32", 1: "F16", 30: "BF16"}
"""GGUF's types of plain values. All others are blocks, which are given as bytes."""


def open_gguf(model: Any, path: Path, dtype: torch.dtype) -> tuple[StoredTensors, list[Any]]:
    """Open a file for a model that computes in `dtype`; return its tensors and the conversions that
    they need. Raises: FileNotFoundError; WeightsError for a file that is damaged, or that cannot
    be taken tensor by tensor.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path}: there is no such file")
    transformers_loading()
    from transformers import GgufConfig
    from transformers.integrations.gguf.reader import GgufHeader
    from transformers.quantizers.quantizer_gguf import GgufHfQuantizer

    quantizer: Any = GgufHfQuantizer(GgufConfig(dequantize=True))
    try:
        quantizer.read_header(str(path))
        header = GgufHeader.from_file(str(path))
    except (ValueError, IndexError, KeyError, struct.error) as error:
        raise WeightsError(
            f"{path} is no GGUF file that can be read ({error}); copy or download it again, or use "
            "the model's safetensors",
            path=str(path),
        ) from error
    if not quantizer.supported:
        return UnpackedGguf(model, path, header, dtype), conversions_of(model)
    quantizer.update_dtype(dtype)
    quantizer._process_model_before_weight_loading(model)
    return (
        StoredTensors(path, _stored(path, header)),
        list(quantizer.update_weight_conversions([], model)),
    )


def _stored(path: Path, header: Any) -> dict[str, StoredTensor]:
    """Return the tensors of a file as it stores them: blocks of quantized values are bytes."""
    from transformers.integrations.gguf.dequant import row_bytes

    found: dict[str, StoredTensor] = {}
    for info in header.tensors:
        shape, stored_as = tuple(info.shape), _PLAIN.get(info.ggml_type, "U8")
        if info.ggml_type not in _PLAIN:
            shape = (*shape[:-1], row_bytes(info.ggml_type, shape[-1]))
        start = header.data_start + info.offset
        found[info.name] = StoredTensor(path, info.name, stored_as, shape, start, info.nbytes)
    check_whole(path, path.stat().st_size, found.values(), "GGUF")
    return found


class UnpackedGguf(StoredTensors):
    """The tensors of a file under the names of the model, unpacked to `dtype` as they are read."""

    def __init__(self, model: Any, path: Path, header: Any, dtype: torch.dtype) -> None:
        from transformers import modeling_gguf_pytorch_utils as legacy

        kind = legacy.TENSOR_PROCESSORS.get(header.architecture, legacy.TensorProcessor)
        self._processor: Any = kind(config=model.config.to_dict())
        self._model_names: dict[str, str] = legacy.get_gguf_hf_weights_map(model, self._processor)
        self._unpacked_to = dtype
        stored = _stored(path, header)
        self._raw = StoredTensors(path, stored)
        self._types: dict[str, int] = header.ggml_types
        # By the model's name: the file's.
        self._file_names: dict[str, str] = {}
        tensors: dict[str, StoredTensor] = {}
        for info in header.tensors:
            # Values are not read here: zeros have the shape, too.
            target, values = self._processed(info.name, np.zeros(info.shape, np.float32))
            if target is not None:
                tensors[target] = dataclasses.replace(stored[info.name], shape=values.shape)
                self._file_names[target] = info.name
        super().__init__(path, tensors)
        # The last one of which some was read: parts of a weight come one after the other.
        self._last: tuple[str, torch.Tensor] | None = None

    def dtype(self, name: str) -> torch.dtype:  # noqa: ARG002 - of the interface
        """Return the dtype that values are unpacked to."""
        return self._unpacked_to

    def read(self, name: str) -> torch.Tensor:
        """Read and unpack one tensor."""
        from gguf import GGMLQuantizationType, dequantize

        file_name = self._file_names[name]
        kind = GGMLQuantizationType(self._types[file_name])
        raw = self._raw.read(file_name)
        # Plain values have no blocks, and numpy has no bfloat16.
        data = (raw.float() if raw.dtype == torch.bfloat16 else raw).numpy()
        values = data if raw.is_floating_point() else dequantize(data, kind)
        _, values = self._processed(file_name, values)
        return torch.from_numpy(np.array(values)).to(self._unpacked_to)

    def read_into(self, name: str, start: int, out: torch.Tensor) -> None:
        """Read elements of one tensor. All of it is unpacked, once for parts that come one after
        the other, and stays until another one is read, or its end was.
        """
        if self._last is None or self._last[0] != name:
            # The one before goes first, so that two are never in memory.
            self._last = None
            self._last = name, self.read(name).reshape(-1)
        values, end = self._last[1], start + out.numel()
        out.copy_(values[start:end])
        if end == values.numel():
            self._last = None

    def _processed(self, name: str, values: Any) -> tuple[str | None, Any]:
        """Return the model's name of a tensor, None if it has none, and its values in the model's
        order.
        """
        others: dict[str, Any] = {"tensors": {}}
        made = self._processor.process(
            weights=values,
            name=name,
            tensor_key_mapping=self._model_names,
            parsed_parameters=others,
        )
        # Such an architecture has its experts joined while all of them are in memory.
        if others["tensors"] or (made.name is None and math.prod(values.shape)):
            raise WeightsError(
                f"{name} of this GGUF file is joined with others by transformers while it loads "
                "the model whole, so it cannot be streamed; use the model's safetensors",
                tensors=(name,),
            )
        return self._model_names.get(made.name), made.weights
