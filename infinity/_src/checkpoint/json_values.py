"""Small values as JSON and back, exactly: what optimizers keep in groups and per parameter. Nothing in it is ever run.

None, bool, int, float, str and lists are as JSON has them (floats to the last bit); the rest is tagged:

    {"tuple": [...]}   {"dict": [[key, value], ...]}   {"tensor": "float32", "shape": [...], "hex": "..."}
"""

from __future__ import annotations

from typing import Any

import torch

TENSOR_BYTES_MAX = 4096
"""Larger tensors are no small values."""


def to_json(value: Any) -> Any:
    """`value` as what `json.dumps` takes. Raises: ValueError naming the type for what this does not hold."""
    if value is None or isinstance(value, (bool, str)) or type(value) in (int, float):
        return value
    if isinstance(value, list):
        return [to_json(each) for each in value]
    if isinstance(value, tuple):
        return {"tuple": [to_json(each) for each in value]}
    if isinstance(value, dict):
        return {"dict": [[to_json(key), to_json(each)] for key, each in value.items()]}
    if isinstance(value, torch.Tensor) and value.nbytes <= TENSOR_BYTES_MAX:
        flat = value.detach().to("cpu").contiguous().reshape(-1)
        data = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
        return {"tensor": dtype_name(value.dtype), "shape": list(value.shape), "hex": data.hex()}
    if isinstance(value, torch.Tensor):
        raise ValueError(f"a tensor of {value.nbytes} bytes is no small value: {TENSOR_BYTES_MAX} bytes at most")
    item = getattr(value, "item", None)  # numpy scalars
    if callable(item) and type(item()) in (bool, int, float):
        return item()
    raise ValueError(
        f"{value!r} of type {type(value).__name__} cannot be kept: numbers, text, None, small tensors, and lists, tuples and "
        "dicts of them can"
    )


def from_json(value: Any) -> Any:
    """What `to_json` was given. Raises: ValueError for what it did not make."""
    if isinstance(value, list):
        return [from_json(each) for each in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {"tuple"}:
        return tuple(from_json(each) for each in value["tuple"])
    if value.keys() == {"dict"}:
        return {from_json(key): from_json(each) for key, each in value["dict"]}
    if value.keys() == {"tensor", "shape", "hex"}:
        data = bytearray.fromhex(value["hex"])
        dtype = dtype_of(value["tensor"])
        flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
        return flat.clone().view(value["shape"])
    raise ValueError(f"a value with the keys {sorted(value)} is not known")


def dtype_name(dtype: torch.dtype) -> str:
    """ "bfloat16" of torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """torch.bfloat16 of "bfloat16". Raises: ValueError."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"dtype {name!r} is not known to this torch")
    return found
