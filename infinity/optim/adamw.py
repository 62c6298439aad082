"""AdamW over states at rest: an ordinary `torch.optim.Optimizer` whose moments and masters live where the policy says.

Source: Loshchilov & Hutter, "Decoupled Weight Decay Regularization" (arXiv 1711.05101); the order of operations is
that of `infinity.ops.adamw`, each rounded once in fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch

from infinity.ops.adamw import hyper_row
from infinity.optim.step import Pipeline, Work, refuse_nonfinite
from infinity.params.at_rest import AtRestParameter
from infinity.params.residency import UnitResidency
from infinity.params.stand_in import SlotState
from infinity.params.unit import Param

MANIFEST_VERSION = 1


class StepEngine(Protocol):
    """What an optimizer needs of the engine that owns its parameters."""

    pipeline: Pipeline
    residency: UnitResidency
    on_nonfinite: str

    def hold(self, optimizer: object, params: list[Param]) -> None:
        """Give these parameters optimizer states. Raises ValueError if another optimizer holds one, BudgetError."""

    def check_open(self) -> None:
        """Raise after close, and what a background update met."""


class AdamW(torch.optim.Optimizer):
    """AdamW with decoupled weight decay for the parameters of offloaded models.

    params: `model.parameters()` of models given to `inf.offload`, or parameter groups of them. lr, betas, eps,
    weight_decay: as in `torch.optim.AdamW`; schedulers may change them in `param_groups` at any time.

    Optimizer states exist, at zero, from here on (this writes them to the tiers; it may take a while). `step()` checks
    the gradients, takes them over, and returns; the update runs in the background and hands the new parameters to the
    next forward. `state_dict()` is a manifest: hyper-parameters and step counts; the tensors stay where they are.

    Raises: ValueError for hyper-parameters out of range, for parameters that are not offloaded or that another
    optimizer holds; BudgetError when the states' gradients do not fit the policy's `ram`.
    """

    _step_supports_amp_scaling = False

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        _check_hyper(defaults)
        self._records: dict[int, Param] = {}
        self._engines: dict[StepEngine, list[Param]] = {}
        self._frozen: list[Param] = []  # in a group, but without states
        self._built = False
        super().__init__(params, defaults)
        self._built = True
        for engine, held in self._engines.items():
            engine.hold(self, held)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as in torch. Its parameters get their states now (once the optimizer is built)."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        added: dict[StepEngine, list[Param]] = {}
        try:
            _check_hyper(group)
            for param in group["params"]:
                if not isinstance(param, AtRestParameter):
                    raise ValueError(
                        f"a parameter of shape {tuple(param.shape)} is not offloaded; call inf.offload(model, policy) "
                        "before building the optimizer, and give other parameters to an optimizer of torch"
                    )
                record = param.infinity_link.param
                self._records[id(param)] = record
                # As in torch, one that is frozen costs no states; `step` raises if it gets a gradient after all.
                if param.requires_grad:
                    added.setdefault(_engine_of(param), []).append(record)
                else:
                    self._frozen.append(record)
            if self._built:
                for engine, params in added.items():
                    engine.hold(self, params)
        except BaseException:
            self.param_groups.remove(group)
            gone = {id(param) for param in group["params"]}
            self._frozen = [record for record in self._frozen if id(record.at_rest) not in gone]
            for key in gone:
                self._records.pop(key, None)
            raise
        for engine, params in added.items():
            self._engines.setdefault(engine, []).extend(params)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One update of every parameter that has a gradient; returns before it is done.

        Waits for the previous step's updates. Raises: NonFiniteGradient (before any state is touched) as the policy's
        `on_nonfinite` says; the fault of an earlier background update.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        thawed = next((param for param in self._frozen if param.at_rest.grad is not None), None)
        if thawed is not None:
            raise ValueError(
                f"{thawed.name} has a gradient, but was frozen when the optimizer was built and has no states; call "
                "requires_grad_() before inf.offload and inf.AdamW"
            )
        # All engines are asked before any is told: a step happens to every model, or to none.
        live: dict[StepEngine, list[Param]] = {}
        goes_on = True
        for engine, params in self._engines.items():
            engine.check_open()
            live[engine] = [param for param in params if self._has_gradient(engine, param)]
            engine.pipeline.check_idle(live[engine])
            bad = engine.pipeline.check_finite(live[engine])
            goes_on = refuse_nonfinite(bad, engine.on_nonfinite) and goes_on
            engine.pipeline.wait()
        if goes_on:
            for engine, params in live.items():
                engine.pipeline.submit(list(self._work({param.index for param in params}, engine)))
        return loss

    def _has_gradient(self, engine: StepEngine, param: Param) -> bool:
        if param.grad is None and param.at_rest.grad is None:
            return False
        slot = engine.residency.slot(param)
        return slot.reconcile(param.at_rest.grad) is SlotState.HELD

    def _work(self, wanted: set[int], engine: StepEngine) -> Iterable[Work]:
        for group in self.param_groups:
            for at_rest in group["params"]:
                param = self._records[id(at_rest)]
                if param.index not in wanted or _engine_of(at_rest) is not engine:
                    continue
                state = self.state[at_rest]
                state["step"] = state.get("step", 0) + 1
                assert param.grad is not None
                yield Work(
                    param,
                    hyper_row(
                        lr=float(group["lr"]),
                        betas=group["betas"],
                        eps=group["eps"],
                        weight_decay=group["weight_decay"],
                        step=state["step"],
                        log=param.grad.log,
                    ),
                )

    def state_dict(self) -> dict[str, Any]:
        """A manifest: parameter groups by position, as in torch, and for each parameter its name and step count.

        Moments and masters are not in it: they rest with the engine. Waits for no update.
        """
        packed = super().state_dict()
        packed["state"] = {
            index: {"name": self._records[id(param)].name, "step": self.state[param].get("step", 0)}
            for index, param in enumerate(param for group in self.param_groups for param in group["params"])
        }
        packed["infinity_manifest"] = MANIFEST_VERSION
        return packed

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take hyper-parameters from a manifest of this optimizer's parameters.

        The tensors are those that the engine holds, so step counts must agree with them.

        Raises: ValueError for a manifest of other parameters, of other step counts, or a torch optimizer's state.
        """
        if state_dict.get("infinity_manifest") != MANIFEST_VERSION:
            raise ValueError(
                "this is no manifest of infinity.AdamW; moments of another optimizer cannot be loaded into an offloaded one yet"
            )
        here = self.state_dict()
        for index, entry in state_dict["state"].items():
            mine = here["state"].get(index)
            if mine != entry:
                raise ValueError(
                    f"the manifest says {entry} for parameter {index}, the engine holds {mine}: moments are not in a "
                    "manifest, so it loads only into the run that wrote it, at the same step"
                )
        if len(state_dict["state"]) != len(here["state"]):
            raise ValueError(
                f"the manifest names {len(state_dict['state'])} parameters, not {len(here['state'])}"
            )
        groups = state_dict["param_groups"]
        if [group["params"] for group in groups] != [group["params"] for group in here["param_groups"]]:
            raise ValueError("the manifest's parameter groups are not those of this optimizer")
        for group, saved in zip(self.param_groups, groups, strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})


def _engine_of(at_rest: AtRestParameter) -> StepEngine:
    """The engine that owns an at-rest parameter."""
    engine: StepEngine = at_rest.infinity_link.param.unit.engine
    return engine


def _check_hyper(group: dict[str, Any]) -> None:
    """Raise ValueError for a value out of range, as torch does."""
    betas = group["betas"]
    checks = {
        f"lr={group['lr']!r}": float(group["lr"]) >= 0,
        f"eps={group['eps']!r}": group["eps"] >= 0,
        f"weight_decay={group['weight_decay']!r}": group["weight_decay"] >= 0,
        f"betas={betas!r}": len(betas) == 2 and all(0 <= beta < 1 for beta in betas),
    }
    for text, right in checks.items():
        if not right:
            raise ValueError(
                f"{text} is out of range; lr, eps and weight_decay must be >= 0, betas in [0, 1)"
            )
