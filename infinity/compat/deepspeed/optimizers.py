"""An engine's optimizer: infinity's optimizer with the rule that the configuration or the script
chose, and the wrapper that `initialize` returns to the script.

    OptimizerPlan     before the model is offloaded: the rule and the parameter groups. Wrong
                      settings raise here
    ZeROOptimizer     afterwards: loss scale, overflow, clipping, step
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

import infinity as inf
from infinity._embedding import Twin, engine_optimizer, note_steps_as, rebind, twin_of
from infinity.compat.deepspeed.errors import DeepSpeedRefusal
from infinity.compat.deepspeed.loss_scale import (
    AutocastLossScaler,
    DynamicLossScaler,
    LossScaler,
)
from infinity.compat.deepspeed.ops import (
    DeepSpeedCPUAdagrad,
    DeepSpeedCPUAdam,
    DeepSpeedCPULion,
    FusedAdam,
    FusedLion,
)
from infinity.compat.deepspeed.settings import Settings

log = logging.getLogger("infinity")

_KINDS: dict[type, type] = {
    FusedAdam: torch.optim.Adam,
    DeepSpeedCPUAdam: torch.optim.Adam,
    DeepSpeedCPUAdagrad: torch.optim.Adagrad,
}
_LION = (inf.Lion, ("lr", "betas", "weight_decay"))
_TWINS: dict[type, tuple[Any, tuple[str, ...]]] = {FusedLion: _LION, DeepSpeedCPULion: _LION}
_TESTED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad, *_KINDS, *_TWINS)
"""Classes that ZeRO accepts without zero_allow_untested_optimizer, as in DeepSpeed."""

Group = dict[str, Any]


@dataclasses.dataclass
class OptimizerPlan:
    """An optimizer that will be built once the model is offloaded.

    twin: builds it. groups: its parameter groups, which hold the model's parameters from before the
    offload. client: the script's optimizer, if it has the groups. ready: an existing optimizer of
    infinity; nothing is built. rehearsal: the same optimizer over groups without parameters, to try
    a schedule. coupled: the rule is Adam with weight decay in the gradient, and every group's decay
    is 0.
    """

    twin: Twin | None
    groups: list[Group]
    client: torch.optim.Optimizer | None = None
    ready: Any = None
    rehearsal: Any = None
    coupled: bool = False

    def build(self) -> Any:
        """Build the optimizer, once the parameters are offloaded. An error restores the groups."""
        if self.twin is None:
            return self.ready
        before = [dict(group) for group in self.groups]
        try:
            built = self.twin.build(self.groups)
        except BaseException:
            for group, kept in zip(self.groups, before, strict=True):
                group.clear()
                group.update(kept)
            raise
        if self.client is not None:
            log.info(
                "initialize: infinity.%s replaces %s",
                built.title,
                type(self.client).__name__,
            )
            note_steps_as(self.client, built)
            # Some constructors (Adagrad's) allocate states as large as the model.
            self.client.state.clear()
        return built

    def rebind(self, scheduler: Any, optimizer: Any) -> None:
        """Point the script's scheduler at the optimizer that replaced the script's."""
        if self.client is not None:
            rebind(scheduler, self.client, optimizer)


def plan_optimizer(
    settings: Settings,
    model: torch.nn.Module,
    optimizer: Any,
    model_parameters: Iterable[Any] | None,
) -> OptimizerPlan | None:
    """Choose the optimizer of a model before its offload: the script's (an optimizer, or a function
    that builds one from parameters), else the configuration's; None if neither gives one.

    Raises: DeepSpeedRefusal for an unsupported rule, for a class that needs
    zero_allow_untested_optimizer, and for parameters that are not the model's.
    """
    given = list(model.parameters() if model_parameters is None else model_parameters)
    if optimizer is None and settings.run.optimizer is None:
        return None
    if optimizer is None:
        plan = _of_configuration(settings, model, given)
    else:
        client = optimizer if isinstance(optimizer, torch.optim.Optimizer) else optimizer(given)
        plan = _of_client(settings, client)
    _check_params(model, plan.groups)
    try:
        if plan.twin is not None:
            plan.rehearsal = plan.twin.rehearse(plan.groups)
    except ValueError as error:
        raise DeepSpeedRefusal(f"initialize: {error}") from error
    return plan


def _of_configuration(
    settings: Settings, model: torch.nn.Module, given: list[Any]
) -> OptimizerPlan:
    assert settings.run.optimizer is not None
    name, arguments = settings.run.optimizer
    groups = [dict(each) for each in given if isinstance(each, Mapping)]
    plain = [each for each in given if not isinstance(each, Mapping)]
    if groups and plain:
        raise DeepSpeedRefusal(
            "initialize(model_parameters=) has both parameters and groups: give only one kind"
        )
    groups = groups or [{"params": plain}]
    for group in groups:
        params = group["params"]
        group["params"] = [params] if isinstance(params, torch.Tensor) else list(params)
    if name == "Muon":
        arguments = dict(arguments)
        groups = _muon_groups(model, groups, arguments.pop("adam_lr"))
    coupled = name == "Adam" and not any(
        group.get("weight_decay", arguments["weight_decay"]) for group in groups
    )
    # Without decay, Adam's update is AdamW's, which has a native kernel.
    twin = Twin(_maker("AdamW" if coupled else name, arguments))
    return OptimizerPlan(twin, [group for group in groups if group["params"]], coupled=coupled)


def _muon_groups(model: torch.nn.Module, groups: list[Group], adam_lr: float) -> list[Group]:
    """Mark parameters by `use_muon`, and split each group by it, as DeepSpeed does."""
    for name, param in model.named_parameters():
        shape = getattr(param, "ds_shape", param.shape)
        plain = any(word in name.lower() for word in ("embed", "lm_head"))
        param.use_muon = len(shape) > 1 and not plain  # type: ignore[attr-defined]
        if len(shape) > 3 and param.use_muon:  # type: ignore[attr-defined]
            raise DeepSpeedRefusal(
                f"Muon with {name} of shape {tuple(shape)}: DeepSpeed flattens it to a matrix, "
                "which the engine does not; give initialize(optimizer=lambda params: "
                "inf.Muon(params)), which updates it by AdamW"
            )
    found = []
    for index, group in enumerate(groups):
        prefix = group.get("name") or (f"group{index}" if len(groups) > 1 else None)
        for matrices, label, keys in (
            (True, "muon", ("lr", "momentum", "weight_decay")),
            (False, "adam", ("lr", "betas", "eps", "weight_decay")),
        ):
            half: Group = {} if matrices else {"lr": adam_lr}
            half |= {key: group[key] for key in keys if key in group}
            if "eps" in half:
                half["adam_eps"] = half.pop("eps")
            half["params"] = [
                param
                for param in group["params"]
                if param.requires_grad and getattr(param, "use_muon", None) is matrices
            ]
            name = f"{prefix}-{label}-params" if prefix else f"{label}-params"
            found.append({**half, "matrixwise": matrices, "name": name})
    return found


def _maker(name: str, arguments: Mapping[str, Any]) -> Callable[[list[Group]], Any]:
    if name in ("AdamW", "Lion", "SGD", "Muon"):
        made = getattr(inf, name)
        return lambda groups: made(groups, **arguments)
    kind = getattr(torch.optim, name)
    return lambda groups: inf.Elementwise(kind, groups, **arguments)


def _of_client(settings: Settings, client: Any) -> OptimizerPlan:
    ready = engine_optimizer(client)
    if ready is not None:
        return OptimizerPlan(None, ready.param_groups, ready=ready)
    if not isinstance(client, torch.optim.Optimizer):
        raise DeepSpeedRefusal(
            f"initialize(optimizer=) gave a {type(client).__name__}: give a torch.optim.Optimizer, "
            "or a function that returns one"
        )
    kind = type(client)
    allowed = bool(settings.config.get("zero_allow_untested_optimizer"))
    if settings.stage and kind not in _TESTED and not allowed:
        raise DeepSpeedRefusal(
            f"{kind.__name__}: You are using an untested ZeRO Optimizer. Please add "
            '"zero_allow_untested_optimizer": true to the configuration to use it'
        )
    # In place, so that the script's scheduler, which has one rate per group, sees the same groups.
    client.param_groups[:] = [group for group in client.param_groups if group["params"]]
    try:
        twin = twin_of(client, kinds=_KINDS, twins=_TWINS)
    except ValueError as error:
        raise DeepSpeedRefusal(f"initialize: {error}") from error
    coupled = _KINDS.get(kind, kind) is torch.optim.Adam and not any(
        group["weight_decay"] or group.get("decoupled_weight_decay")
        for group in client.param_groups
    )
    return OptimizerPlan(twin, client.param_groups, client, coupled=coupled)


def _check_params(model: torch.nn.Module, groups: list[Group]) -> None:
    names = {id(param): name for name, param in model.named_parameters(remove_duplicate=False)}
    seen: set[int] = set()
    for param in (param for group in groups for param in group["params"]):
        if id(param) not in names:
            raise DeepSpeedRefusal(
                f"the optimizer has a parameter of shape {tuple(param.shape)} that is not in "
                f"{type(model).__name__}: build it from model.parameters()"
            )
        if id(param) in seen:
            raise DeepSpeedRefusal(
                f"Parameter with name: {names[id(param)]} occurs multiple times in "
                "optimizer.param_groups: name it once"
            )
        seen.add(id(param))


def loss_scaler(settings: Settings) -> LossScaler:
    """Return the loss scaler that the configuration asks for; a static 1 without fp16."""
    scaling = settings.run.loss_scaling
    if scaling is None:
        return AutocastLossScaler() if settings.autocast is torch.float16 else LossScaler()
    if scaling.static is not None:
        return LossScaler(scaling.static)
    return DynamicLossScaler(
        scaling.initial_scale,
        scaling.window,
        scaling.min_scale,
        scaling.hysteresis,
        scaling.consecutive_hysteresis,
        scaling.raise_at_min,
    )


class ZeROOptimizer:
    """The optimizer that `initialize` returns: wraps infinity's optimizer, `optimizer`, and adds
    loss scale, overflow check and clipping.

    `step()` computes the norm of all gradients. If it is not finite, and the configuration skips
    such steps (fp16, or bf16.check_grad_overflow), all ranks skip the step and `overflow` is True.
    Else gradients are divided by the loss scale and clipped by the norm, and `optimizer` steps.

    params: the model's parameters, in its order. Norms are summed in this order, so the order of
    the parameter groups does not change a norm's bits. coupled: as in `OptimizerPlan`; a weight
    decay is refused then.
    """

    def __init__(
        self,
        optimizer: Any,
        scaler: LossScaler,
        params: Iterable[torch.nn.Parameter],
        *,
        clip_norm: float,
        skips: bool,
        coupled: bool = False,
    ) -> None:
        self._coupled = coupled
        self._order = {id(param): number for number, param in enumerate(params)}
        self.optimizer = optimizer
        self.loss_scaler = scaler
        self.clip_grad = clip_norm
        self.overflow = False
        self._global_grad_norm: float | None = None
        self._skips = skips
        self.custom_loss_scaler = False

    # -- as torch's optimizers ---------------------------------------------------------------------

    @property
    def param_groups(self) -> list[Group]:
        """The parameter groups of `optimizer`; schedulers set their learning rates."""
        groups: list[Group] = self.optimizer.param_groups
        return groups

    @property
    def state(self) -> Any:
        """Small state of each parameter, such as its step count; moments rest on their tier."""
        return self.optimizer.state

    @property
    def defaults(self) -> Any:
        """The default settings of parameter groups."""
        return self.optimizer.defaults

    def add_param_group(self, param_group: Group) -> None:
        """Add a group of parameters of the offloaded model. Raises: ValueError."""
        self._check_decay({**self.defaults, **param_group})
        self.optimizer.add_param_group(param_group)

    def _check_decay(self, group: Group) -> None:
        """Raise for a weight decay if AdamW runs in place of Adam: then their rules differ."""
        if self._coupled and group["weight_decay"]:
            raise DeepSpeedRefusal(
                f"a parameter group with weight_decay={group['weight_decay']!r}, after initialize "
                "with none: Adam adds a decay to the gradient, but here AdamW runs in its place; "
                "give the decay before initialize, or use AdamW "
                '("adam_w_mode": true)'
            )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients."""
        self.optimizer.zero_grad(set_to_none)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """Take a step with the accumulated gradients, or skip it. Returns before its updates are
        done. Collective on several ranks.

        Raises: what the engine's `step` raises; LossScaleAtMinimum.
        """
        if closure is not None:
            raise DeepSpeedRefusal("step(closure): run forward and backward before step()")
        for group in self.param_groups:
            self._check_decay(group)
        grads = self._gradients()
        # One call for all gradients: one reduction over the ranks.
        norm = torch.nn.utils.get_total_norm(grads, foreach=True) if grads else torch.zeros(())
        self.overflow = self._skips and not bool(torch.isfinite(norm))
        scale = self.cur_scale
        self.loss_scaler.update_scale(self.overflow)
        if self.overflow:
            self._global_grad_norm = math.inf
            self.zero_grad()
            return
        norm = norm / scale
        self._global_grad_norm = float(norm)
        factor = torch.ones(())
        if self.clip_grad > 0:
            factor = torch.clamp(self.clip_grad / (norm + 1e-6), max=1.0)
        factor = factor / scale
        for grad in grads:
            grad.mul_(factor)
        self.optimizer.step()

    def _gradients(self) -> list[torch.Tensor]:
        params = [param for group in self.param_groups for param in group["params"]]
        params.sort(key=lambda param: self._order[id(param)])
        return [param.grad for param in params if param.grad is not None]

    # -- the loss scale ----------------------------------------------------------------------------

    @property
    def cur_scale(self) -> float:
        """The loss scale of the next backward."""
        return self.loss_scaler.cur_scale

    loss_scale = cur_scale

    @property
    def dynamic_loss_scale(self) -> bool:
        """True if the loss scale adapts to overflows."""
        return self.loss_scaler.dynamic

    def override_loss_scale(self, loss_scale: float) -> None:
        """Use a fixed loss scale from here on."""
        self.loss_scaler = LossScaler(loss_scale)
        self.custom_loss_scaler = True

    def needs_scaler(self) -> bool:
        """Return whether a loss must be scaled before its backward."""
        return self.dynamic_loss_scale or self.cur_scale != 1.0

    def scale_if_loss(self, value: Any) -> Any:
        """Return a loss (one element, requires_grad) times the scale; any other value unchanged."""
        scalar = isinstance(value, torch.Tensor) and value.numel() == 1 and value.requires_grad
        return self.loss_scaler.scale_loss(value) if scalar else value

    def backward(self, loss: torch.Tensor, retain_graph: bool = False) -> None:
        """Scale a loss and run its backward."""
        self.loss_scaler.scale_loss(loss).backward(retain_graph=retain_graph)

    # -- states ------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the manifest of `optimizer`, and the loss scale. Masters and moments are not in
        it: `engine.save_checkpoint` saves them.
        """
        return {"optimizer": self.optimizer.state_dict(), **self.scale_state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load settings and loss scale of `state_dict()`. Raises: ValueError for another step."""
        self.optimizer.load_state_dict(state_dict["optimizer"])
        self.load_scale_state(state_dict)

    def scale_state(self) -> dict[str, Any]:
        """Return the state of the loss scale."""
        return {"loss_scaler": self.loss_scaler.state_dict(), "overflow": self.overflow}

    def load_scale_state(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `scale_state` returned."""
        self.loss_scaler.load_state_dict(state["loss_scaler"])
        self.overflow = state["overflow"]


class DeepSpeedZeroOptimizer(ZeROOptimizer):
    """The optimizer of stages 0, 1 and 2."""


class DeepSpeedZeroOptimizer_Stage3(ZeROOptimizer):  # noqa: N801 - DeepSpeed's name
    """The optimizer of stage 3."""
