"""AdamW over states at rest.

Source: Loshchilov & Hutter, "Decoupled Weight Decay Regularization" (arXiv 1711.05101). The order
of operations is that of `infinity._src.kernels.hyper`, each rounded once in fp32.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy.typing as npt

from infinity._src.kernels.hyper import hyper_row_adamw
from infinity._src.optim.base import LogEntry, Optimizer, check_range, not_negative, two_betas
from infinity._src.params.unit import Param


class AdamW(Optimizer):
    """AdamW with decoupled weight decay for the parameters of offloaded models.

    params: `model.parameters()` of models given to `inf.offload`, or parameter groups of them.
    lr, betas, eps, weight_decay: as in `torch.optim.AdamW`; schedulers may change them in
    `param_groups` at any time.

    The constructor makes the optimizer states, all zero, and writes them to the tiers; this may
    take a while. `step()` checks the gradients, takes them over, and returns. The update runs in
    the background and hands the new parameters to the next forward. `state_dict()` is a manifest:
    hyper-parameters and step counts; the tensors stay where they are.

    Raises: ValueError for hyper-parameters out of range, for parameters that are not offloaded or
    that another optimizer holds; BudgetError when the states' gradients do not fit the policy's
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

    def moment_names(self, group: dict[str, Any]) -> tuple[str, ...]:  # noqa: ARG002
        """Return the names of the running means of gradients and of their squares."""
        return ("exp_avg", "exp_avg_sq")

    def check_group(self, group: dict[str, Any]) -> None:
        """Raise ValueError for a value out of range, as torch does."""
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
        """Return the scalars of one update."""
        group = self.group_of(param)
        return hyper_row_adamw(
            lr=float(group["lr"]),
            betas=group["betas"],
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            step=state["step"],
            log=log,
        )
