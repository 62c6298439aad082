"""SGD, with momentum if wanted, over states at rest.

The update is that of `torch.optim.SGD` (Sutskever et al. 2013), each operation rounded once in fp32
(`infinity._src.kernels.hyper`):

    g = g + weight_decay * p
    m = g in the first step, else momentum * m + (1 - dampening) * g
    p = p - lr * (g + momentum * m if nesterov, else m; without momentum g)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy.typing as npt

from infinity._src.kernels.hyper import hyper_row_sgd
from infinity._src.optim.base import LogEntry, Optimizer, check_range, not_negative
from infinity._src.params.unit import Param


class SGD(Optimizer):
    """SGD for the parameters of offloaded models; arguments as in `torch.optim.SGD`.

    Without momentum a parameter has its master and nothing else. A group has momentum, or has none,
    from the time when it is added; the value may change.

    For the rest see `AdamW`. Raises: ValueError also when groups with and without momentum share a
    unit.
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

    def moment_names(self, group: dict[str, Any]) -> tuple[str, ...]:
        """Return the name of the momentum buffer, if there is momentum."""
        return ("momentum_buffer",) if group["momentum"] != 0 else ()

    def check_group(self, group: dict[str, Any]) -> None:
        """Raise ValueError for a value out of range, as torch does."""
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
        """Return the scalars of one update."""
        group = self.group_of(param)
        if bool(group["momentum"]) != bool(self.moments_of(param)):
            raise ValueError(
                f"momentum={group['momentum']!r} for {param.name}: whether there is momentum (and "
                "so a buffer) is fixed when a group is added; build inf.SGD anew, with a momentum "
                "of 0 or above 0 as you want it"
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
