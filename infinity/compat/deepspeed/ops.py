"""`deepspeed.ops`: Adam, Lion and Adagrad, and the builder of `aio`.

On ordinary parameters each optimizer is a torch optimizer. `initialize` replaces it by infinity's
optimizer with the same update rule, over the same parameter groups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from infinity.compat.deepspeed.errors import DeepSpeedRefusal


class FusedAdam(torch.optim.Adam):
    """Adam with decoupled weight decay (adam_w_mode, the default) or with L2 regularization.

    set_grad_none: ignored. Raises: DeepSpeedRefusal unless bias_correction and amsgrad have their
    defaults.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,  # noqa: ARG002 - gradients are None after a step
    ) -> None:
        _refuse_unless(True, bias_correction=bias_correction)
        _refuse_unless(False, amsgrad=amsgrad)
        super().__init__(
            params,
            lr,
            (betas[0], betas[1]),
            eps,
            weight_decay,
            decoupled_weight_decay=adam_w_mode,
        )


class DeepSpeedCPUAdam(torch.optim.Adam):
    """Adam with decoupled weight decay (adamw_mode, the default) or with L2 regularization.

    fp32_optimizer_states: True; the configuration's bf16.bf16_optimizer_states selects moments of
    fewer bits. Raises: DeepSpeedRefusal unless it, bias_correction and amsgrad have their defaults.
    """

    def __init__(
        self,
        model_params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> None:
        _refuse_unless(True, bias_correction=bias_correction)
        _refuse_unless(False, amsgrad=amsgrad)
        if not fp32_optimizer_states:
            raise DeepSpeedRefusal(
                "fp32_optimizer_states=False: the configuration sets the format of moments "
                '("bf16": {"enabled": true, "bf16_optimizer_states": true})'
            )
        super().__init__(
            model_params,
            lr,
            (betas[0], betas[1]),
            eps,
            weight_decay,
            decoupled_weight_decay=adamw_mode,
        )


class DeepSpeedCPUAdagrad(torch.optim.Adagrad):
    """Adagrad. Raises: DeepSpeedRefusal for amsgrad=True."""

    def __init__(
        self,
        model_params: Iterable[Any],
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
    ) -> None:
        _refuse_unless(False, amsgrad=amsgrad)
        super().__init__(model_params, lr, weight_decay=weight_decay, eps=eps)


class FusedLion(torch.optim.Optimizer):
    """Lion: the sign of an interpolated momentum (Chen et al., arXiv 2302.06675)."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        set_grad_none: bool = True,  # noqa: ARG002
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["exp_avg"] = torch.zeros_like(param)
                momentum = state["exp_avg"]
                update = momentum.mul(beta1).add_(param.grad, alpha=1 - beta1).sign_()
                param.mul_(1 - group["lr"] * group["weight_decay"])
                param.add_(update, alpha=-group["lr"])
                momentum.mul_(beta2).add_(param.grad, alpha=1 - beta2)
        return loss


class DeepSpeedCPULion(FusedLion):
    """Lion under the name of DeepSpeed's CPU implementation."""

    def __init__(
        self,
        model_params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        adamw_mode: bool = True,  # noqa: ARG002
        fp32_optimizer_states: bool = True,
    ) -> None:
        _refuse_unless(True, fp32_optimizer_states=fp32_optimizer_states)
        super().__init__(model_params, lr, betas, weight_decay)


class AsyncIOBuilder:
    """The builder of DeepSpeed's drive I/O extension. The engine uses infinity.aio instead, so a
    script that only checks for the extension runs."""

    NAME = "async_io"

    def is_compatible(self, verbose: bool = False) -> bool:  # noqa: ARG002
        """Return True: NVMe offload works."""
        return True

    def load(self, verbose: bool = True) -> Any:  # noqa: ARG002
        """Raise DeepSpeedRefusal: the engine has no `aio_handle`."""
        raise DeepSpeedRefusal(
            "AsyncIOBuilder().load(): DeepSpeed's aio_handle and its pinned tensors do not exist "
            "here; a policy with nvme=[...] offloads to drives, infinity.aio reads and writes "
            "files from Python, and `python -m infinity.bench` measures a drive"
        )


def _refuse_unless(wanted: bool, **setting: bool) -> None:
    for name, value in setting.items():
        if value is not wanted:
            raise DeepSpeedRefusal(f"{name}={value!r}: the engine's rule has {name}={wanted!r}")
