"""`state_dict` and `load_state_dict` of a model whose parameters are offloaded.

`model.state_dict()`, and everything that calls it (`save_pretrained`,
`torch.save(model.state_dict(), ...)`), gets an ordinary CPU copy of every parameter, read one by
one; tied names share one copy. With `keep_vars=True` it gets the parameters at rest themselves.
`load_state_dict` writes every parameter to where it rests, with torch's own checks of names and
shapes; `assign=True` is refused, as it would replace the parameters outside the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from infinity._src.base.sizes import format_size
from infinity._src.hooks.module_params import ModuleParameters
from infinity._src.memory.ledger import memory_left_bytes
from infinity._src.params.unit import Param

Check = Callable[[int], None]
"""Called with the bytes of the CPU copies before any is made; raises when they are too many, and
names the way out."""


def check_copies(size_bytes: int) -> None:
    """Raise MemoryError when the CPU copies of a `state_dict()` do not fit into the memory that is
    left."""
    left = memory_left_bytes()
    if size_bytes > left:
        raise MemoryError(
            f"state_dict() would copy {format_size(size_bytes)} of parameters into memory and "
            f"{format_size(left)} are left; inf.export_safetensors(model, directory) streams them "
            "to files"
        )


def hook_state_dict(
    model: torch.nn.Module,
    owned: dict[torch.nn.Module, ModuleParameters],
    params: Iterable[Param],
    check: Check | None,
) -> list[RemovableHandle]:
    """Install the hooks on the modules that own offloaded parameters. Returns their handles."""
    handles: list[RemovableHandle] = []
    total_bytes = sum(param.numel * param.dtype.itemsize for param in params)

    def before_root(_module: torch.nn.Module, _prefix: str, keep_vars: bool) -> None:
        # Before the first copy: half of a state dict must not fill the memory.
        if check is not None and not keep_vars:
            check(total_bytes)

    def before_root_load(_module: torch.nn.Module, *args: Any) -> None:
        # torch passes (state_dict, prefix, local_metadata, ...).
        _refuse_assign(args[2])

    handles.append(model.register_state_dict_pre_hook(before_root))
    handles.append(model.register_load_state_dict_pre_hook(before_root_load))
    for module, parameters in owned.items():
        handles.extend(_hook_module(module, parameters, check))
    return handles


def _refuse_assign(local_metadata: dict[str, Any]) -> None:
    if local_metadata.get("assign_to_params_buffers", False):
        raise ValueError(
            "load_state_dict(assign=True) would replace the offloaded parameters outside the "
            "engine; leave `assign` out: the values are written to where the parameters rest"
        )


def _hook_module(
    module: torch.nn.Module, parameters: ModuleParameters, check: Check | None
) -> list[RemovableHandle]:
    own_bytes = sum(
        value.infinity_link.param.numel * value.dtype.itemsize
        for value in parameters.at_rest.values()
    )
    tied = {
        name: value.infinity_link.param
        for name, value in parameters.at_rest.items()
        if len(value.infinity_link.param.names) > 1
    }

    def before_save(_module: torch.nn.Module, _prefix: str, keep_vars: bool) -> None:
        if keep_vars:
            return
        # A submodule may be saved alone, without the hook of the root.
        if check is not None:
            check(own_bytes)
        parameters.save_next = True

    def after_save(
        _module: torch.nn.Module, destination: dict[str, Any], prefix: str, _metadata: Any
    ) -> None:
        for name, param in tied.items():
            _share_copy(destination, prefix + name, param)

    def before_load(_module: torch.nn.Module, *args: Any) -> None:
        _refuse_assign(args[2])
        parameters.load_next = True

    def after_load(_module: torch.nn.Module, _incompatible: Any) -> None:
        # A parameter that the state dict lacks was not copied to: its next `copy_` is the user's.
        parameters.load_next = False
        for value in parameters.at_rest.values():
            value.infinity_link.loading = False

    handles = [
        module.register_state_dict_pre_hook(before_save),
        module.register_load_state_dict_pre_hook(before_load),
        module.register_load_state_dict_post_hook(after_load),
    ]
    if tied:
        handles.append(module.register_state_dict_post_hook(after_save))
    return handles


def _share_copy(destination: dict[str, Any], key: str, param: Param) -> None:
    """Put the copy that was saved under another name at `key`: tied names share one tensor, as in
    any state dict."""
    for own in param.names:
        # `key` may have a prefix: the model can be a part of the one that is saved.
        if not key.endswith(own):
            continue
        root = key[: len(key) - len(own)]
        for other in param.names:
            if other != own and root + other in destination:
                destination[key] = destination[root + other]
                return
