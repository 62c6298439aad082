"""Access to states and gradients of single parameters: `safe_get_*` and `safe_set_*`.
`GatheredParameters` is in compat/deepspeed/parameters.py.

"full" means the whole parameter. "local" means this rank's part, as DeepSpeed splits: the flattened
parameter in one equal part a rank, the last one padded with zeros. All functions block and are
collective.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist

from infinity.compat.deepspeed import comm
from infinity.compat.deepspeed.errors import DeepSpeedRefusal
from infinity.compat.deepspeed.parameters import handle_of

Tensor = torch.Tensor
Parameter = torch.nn.Parameter

_MASTER = "master"


def safe_get_full_fp32_param(param: Parameter) -> Tensor | None:
    """Return a copy of a parameter's fp32 master [param.shape], on the parameter's device; None if
    the parameter is not offloaded or has no requires_grad.
    """
    return _state(param, _MASTER)


def safe_set_full_fp32_param(param: Parameter, value: Tensor) -> None:
    """Set the fp32 master of a parameter, and with it the parameter. value: [param.shape]."""
    _set_state(param, _MASTER, value)


def safe_get_full_optimizer_state(param: Parameter, optim_state_key: str) -> Tensor | None:
    """Return a copy of a parameter's optimizer state ("exp_avg", say) in fp32 [param.shape], on the
    parameter's device; None if the parameter is not offloaded or has no requires_grad.

    Raises: ValueError if the optimizer has no state of that name.
    """
    return _state(param, optim_state_key)


def safe_set_full_optimizer_state(param: Parameter, value: Tensor, optim_state_key: str) -> None:
    """Set an optimizer state of a parameter. value: [param.shape]."""
    _set_state(param, optim_state_key, value)


def safe_get_full_grad(param: Parameter) -> Tensor | None:
    """Return a copy of a parameter's accumulated gradient in fp32 [param.shape], on the parameter's
    device: the mean over the ranks, times the loss scale. None if there is no gradient: before
    backward, and after a step. Raises: RuntimeError inside `no_sync`: it is not reduced yet.
    """
    handle = handle_of(param)
    if handle is None:
        return param.grad
    grad = handle.full_grad(param)
    return None if grad is None else grad.to(param.device)


def safe_set_full_grad(param: Parameter, value: Tensor) -> None:
    """Set the accumulated gradient of a parameter. value: [param.shape], times the loss scale."""
    handle = handle_of(param)
    if handle is None:
        if param.grad is not None:
            with torch.no_grad():
                param.grad.copy_(value)
        return
    if param.requires_grad:
        handle.set_full_grad(param, value.detach().cpu())


def safe_update_full_grad_vectorized(
    param_list: Iterable[Parameter], update_func: Callable[[Tensor, Parameter], Tensor]
) -> None:
    """Set the gradient of each parameter to `update_func(gradient, parameter)`."""
    for param in param_list:
        grad = safe_get_full_grad(param)
        if grad is not None:
            safe_set_full_grad(param, update_func(grad, param))


def safe_get_local_fp32_param(param: Parameter) -> Tensor | None:
    """Return this rank's part of the fp32 master [numel of a part]."""
    return _part(safe_get_full_fp32_param(param))


def safe_set_local_fp32_param(param: Parameter, value: Tensor) -> None:
    """Set the fp32 master; each rank passes its part. value: [numel of a part]."""
    safe_set_full_fp32_param(param, _joined(param, value))


def safe_get_local_optimizer_state(param: Parameter, optim_state_key: str) -> Tensor | None:
    """Return this rank's part of an optimizer state [numel of a part]."""
    return _part(safe_get_full_optimizer_state(param, optim_state_key))


def safe_set_local_optimizer_state(param: Parameter, value: Tensor, optim_state_key: str) -> None:
    """Set an optimizer state; each rank passes its part. value: [numel of a part]."""
    safe_set_full_optimizer_state(param, _joined(param, value), optim_state_key)


def safe_get_local_grad(param: Parameter) -> Tensor | None:
    """Return this rank's part of the gradient [numel of a part]."""
    return _part(safe_get_full_grad(param))


def safe_set_local_grad(param: Parameter, value: Tensor) -> None:
    """Set the gradient; each rank passes its part. value: [numel of a part]."""
    safe_set_full_grad(param, _joined(param, value))


def _state(param: Parameter, key: str) -> Tensor | None:
    handle = handle_of(param)
    if handle is None or not param.requires_grad:
        return None
    state = handle.optimizer_state(param)
    if key not in state:
        known = ", ".join(name for name in state if name not in (_MASTER, "step"))
        raise DeepSpeedRefusal(f"optimizer state {key!r}: the optimizer has {known or 'none'}")
    value: Tensor = state[key]
    return value.to(param.device)


def _set_state(param: Parameter, key: str, value: Tensor) -> None:
    handle = handle_of(param)
    if handle is None or not param.requires_grad:
        return
    handle.optimizer_state(param)[key] = value.detach().cpu().reshape(param.shape)


def _part_numel(numel: int) -> int:
    return -(-numel // comm.get_world_size())


def _part(whole: Tensor | None) -> Tensor | None:
    if whole is None:
        return None
    numel, flat = _part_numel(whole.numel()), whole.reshape(-1)
    start = comm.get_rank() * numel
    part = flat[start : start + numel]
    return torch.nn.functional.pad(part, (0, numel - part.numel())).clone()


def _joined(param: Parameter, value: Tensor) -> Tensor:
    """All-gather the ranks' parts into [param.shape]."""
    numel = _part_numel(param.numel())
    if value.numel() != numel:
        raise DeepSpeedRefusal(
            f"a part of {value.numel()} elements: each of {comm.get_world_size()} ranks has "
            f"{numel} of {param.numel()}"
        )
    mine = value.detach().cpu().reshape(-1).contiguous()
    parts = [mine]
    if comm.get_world_size() > 1:
        parts = [torch.empty_like(mine) for _ in range(comm.get_world_size())]
        dist.all_gather(parts, mine, group=comm.cpu_group())
    return torch.cat(parts)[: param.numel()].reshape(param.shape)
