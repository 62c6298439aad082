"""`deepspeed.zero`: building models in bounded memory, and access to parameters at rest."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NoReturn

import torch

from infinity.compat.deepspeed.errors import DeepSpeedRefusal
from infinity.compat.deepspeed.parameters import GatheredParameters, ZeroParamStatus, ZeroParamType
from infinity.compat.deepspeed.zero.init import Init
from infinity.compat.deepspeed.zero.tiling import TiledLinear, TiledLinearReturnBias

__all__ = [
    "GatheredParameters", "Init", "MiCS_Init", "TiledLinear", "TiledLinearReturnBias",
    "ZeroParamStatus", "ZeroParamType", "register_external_parameter",
    "unregister_external_parameter", "unwrap_model_for_generation",
]  # fmt: skip


class MiCS_Init:  # noqa: N801 - DeepSpeed's name
    """Refused: MiCS replicates shards over groups of ranks."""

    def __init__(self, *_args: Any, **_settings: Any) -> None:
        raise DeepSpeedRefusal(
            "zero.MiCS_Init: the engine splits states over all ranks; use zero.Init, and "
            "zero_optimization.zero_hpz_partition_size for gathers within a node"
        )

    def __enter__(self) -> NoReturn:
        raise AssertionError("the constructor has raised")


def register_external_parameter(module: torch.nn.Module, parameter: torch.nn.Parameter) -> None:
    """Do nothing: the engine gathers a parameter wherever a forward uses it. Raises: RuntimeError
    unless given a module and a parameter.
    """
    if not isinstance(parameter, torch.nn.Parameter):
        raise RuntimeError("Parameter is not a torch.nn.Parameter")
    if not isinstance(module, torch.nn.Module):
        raise RuntimeError("Module is not a torch.nn.Module")


unregister_external_parameter = register_external_parameter


@contextlib.contextmanager
def unwrap_model_for_generation(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Enter a context in which all parameters of an engine, or of its module, stay gathered:
    `generate` inside it reads nothing again. Yields the model. Collective. The device must hold the
    whole model.
    """
    with GatheredParameters(model.parameters()):
        yield model
