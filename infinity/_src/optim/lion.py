"""Lion over states at rest: the sign of an interpolated momentum, one moment for each element.

Source: Chen et al., "Symbolic Discovery of Optimization Algorithms" (arXiv 2302.06675), algorithm
2; the order of operations is that of `infinity._src.kernels.hyper`, each rounded once in fp32:

    u = sign(beta1 * m + (1 - beta1) * g)
    p = p * (1 - lr * weight_decay) - lr * u
    m = beta2 * m + (1 - beta2) * g
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy.typing as npt

from infinity._src.kernels.hyper import hyper_row_lion
from infinity._src.optim.base import LogEntry, Optimizer, check_range, not_negative, two_betas
from infinity._src.params.unit import Param


class Lion(Optimizer):
    """Lion with decoupled weight decay for the parameters of offloaded models.

    lr: three to ten times smaller than AdamW's. weight_decay: as much larger (the paper, section
    5). For the rest see `AdamW`.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    def moment_names(self, group: dict[str, Any]) -> tuple[str, ...]:  # noqa: ARG002
        """Return the name of the running mean of gradients."""
        return ("exp_avg",)

    def check_group(self, group: dict[str, Any]) -> None:
        """Raise ValueError for a value out of range."""
        rules = {"lr": not_negative, "weight_decay": not_negative, "betas": two_betas}
        check_range(group, rules, "lr and weight_decay must be >= 0, betas in [0, 1)")

    def hyper(
        self,
        param: Param,
        state: dict[str, Any],  # noqa: ARG002 - it has one moment, and no step count
        log: Sequence[LogEntry],
    ) -> npt.NDArray[Any]:
        """Return the scalars of one update."""
        group = self.group_of(param)
        return hyper_row_lion(
            lr=float(group["lr"]),
            betas=group["betas"],
            weight_decay=group["weight_decay"],
            log=log,
        )
