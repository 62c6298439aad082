"""AdamW, SGD and Lion over states at rest: the optimizers that have kernels.

Each operation of an update is rounded once in fp32, in the order that `infinity._src.kernels.hyper`
gives.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy.typing as npt

from infinity._src.kernels.hyper import hyper_row_adamw, hyper_row_lion, hyper_row_sgd
from infinity._src.optim.base import LogEntry, Optimizer, check_range, not_negative, two_betas
from infinity._src.params.unit import Param


class AdamW(Optimizer):
    """AdamW with decoupled weight decay for the parameters of offloaded models.

    Source: Loshchilov & Hutter, "Decoupled Weight Decay Regularization" (arXiv 1711.05101).

    params: `model.parameters()` of models given to `inf.offload`, or parameter groups of them.
    lr, betas, eps, weight_decay: as in `torch.optim.AdamW`; schedulers may change them in
    `param_groups` at any time.

    The constructor makes the optimizer states, all zero, and blocks until they are written to their
    tiers. `step()` checks the gradients, takes them over, and returns. The update runs in the
    background and hands the new parameters to the next forward. `state_dict()` contains
    hyper-parameters and step counts; the tensors stay on their tiers.

    Raises: ValueError for hyper-parameters out of range, and for parameters that are not offloaded
    or that another optimizer holds; BudgetError when states and gradients do not fit the policy's
    `ram`.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        )

    def moment_names(self, group: dict[str, Any], param: Param) -> tuple[str, ...]:  # noqa: ARG002
        return ("exp_avg", "exp_avg_sq")

    def check_group(self, group: dict[str, Any]) -> None:
        rules = {
            "lr": not_negative,
            "eps": not_negative,
            "weight_decay": not_negative,
            "betas": two_betas,
        }
        check_range(group, rules, "lr, eps and weight_decay must be >= 0, betas in [0, 1)")

    def hyper(
        self, param: Param, state: dict[str, Any], log: Sequence[LogEntry]
    ) -> npt.NDArray[Any]:
        group = self.group_of(param)
        return hyper_row_adamw(
            lr=float(group["lr"]),
            betas=group["betas"],
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            step=state["step"],
            log=log,
        )


class SGD(Optimizer):
    """SGD for the parameters of offloaded models; arguments and update as in `torch.optim.SGD`.

        g = g + weight_decay * p
        m = g in the first step, else momentum * m + (1 - dampening) * g
        p = p - lr * (g + momentum * m if nesterov, else m; without momentum g)

    Without momentum a parameter has a master and no moment. Whether a group has momentum is fixed
    when the group is added; the value of its momentum may change.

    Everything else is as in `AdamW`. Raises: ValueError also when parameters with and without
    momentum have one unit and dtype. Source: Sutskever et al., "On the importance of initialization
    and momentum in deep learning" (ICML 2013).
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
        }
        super().__init__(params, defaults)

    def moment_names(self, group: dict[str, Any], param: Param) -> tuple[str, ...]:  # noqa: ARG002
        return ("momentum_buffer",) if group["momentum"] != 0 else ()

    def counts_steps(self, param: Param) -> bool:  # noqa: ARG002
        """Return False."""
        return False

    def check_group(self, group: dict[str, Any]) -> None:
        rules = {"lr": not_negative, "momentum": not_negative, "weight_decay": not_negative}
        check_range(group, rules, "lr, momentum and weight_decay must be >= 0")
        if group["nesterov"] and (group["momentum"] <= 0 or group["dampening"] != 0):
            raise ValueError(
                f"nesterov={group['nesterov']!r} with momentum={group['momentum']!r}, "
                f"dampening={group['dampening']!r}: "
                "Nesterov momentum needs a momentum above 0 and no dampening"
            )

    def hyper(
        self, param: Param, state: dict[str, Any], log: Sequence[LogEntry]
    ) -> npt.NDArray[Any]:
        group = self.group_of(param)
        if bool(group["momentum"]) != bool(self.moments_of(param)):
            raise ValueError(
                f"momentum={group['momentum']!r} for {param.name}: whether a group has momentum "
                "(and so a buffer) is fixed when it is added; build a new inf.SGD with that "
                "momentum"
            )
        # As in torch, the first step copies the gradient into the buffer; dampening does not apply
        # to it.
        begins = not state.get("begun", False)
        state["begun"] = True
        return hyper_row_sgd(
            lr=float(group["lr"]),
            momentum=group["momentum"],
            dampening=group["dampening"],
            weight_decay=group["weight_decay"],
            nesterov=group["nesterov"],
            first=begins,
            log=log,
        )

    def moment_written(self, param: Param, name: str) -> None:  # noqa: ARG002 - there is one
        """Note that the buffer has begun: the next step does not start it from the gradient."""
        self.state[param.at_rest]["begun"] = True


class Lion(Optimizer):
    """Lion with decoupled weight decay for the parameters of offloaded models: the sign of an
    interpolated momentum, with one moment for each element.

        u = sign(beta1 * m + (1 - beta1) * g)
        p = p * (1 - lr * weight_decay) - lr * u
        m = beta2 * m + (1 - beta2) * g

    lr: three to ten times smaller than for AdamW. weight_decay: larger by the same factor.
    Everything else is as in `AdamW`. Source: Chen et al., "Symbolic Discovery of Optimization
    Algorithms" (arXiv 2302.06675), algorithm 2 and section 5.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    def moment_names(self, group: dict[str, Any], param: Param) -> tuple[str, ...]:  # noqa: ARG002
        return ("exp_avg",)

    def counts_steps(self, param: Param) -> bool:  # noqa: ARG002
        """Return False."""
        return False

    def check_group(self, group: dict[str, Any]) -> None:
        rules = {"lr": not_negative, "weight_decay": not_negative, "betas": two_betas}
        check_range(group, rules, "lr and weight_decay must be >= 0, betas in [0, 1)")

    def hyper(
        self,
        param: Param,
        state: dict[str, Any],  # noqa: ARG002 - it has one moment, and no step count
        log: Sequence[LogEntry],
    ) -> npt.NDArray[Any]:
        group = self.group_of(param)
        return hyper_row_lion(
            lr=float(group["lr"]),
            betas=group["betas"],
            weight_decay=group["weight_decay"],
            log=log,
        )
