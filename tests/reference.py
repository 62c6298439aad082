"""The loop that the engine must equal bit for bit: plain torch, everything in memory.

bf16 (or fp32) parameters; gradients as autograd leaves and accumulates them, or accumulated in
fp32; raised to fp32; clipped by torch.nn.utils.clip_grad_norm_ on the fp32 gradients; AdamW on fp32
masters with operations that round once, in this order; parameters written back by `copy_`. SGD,
Lion
and any class of torch.optim likewise; a loss scaler for fp16. A parameter without a gradient does
not change: no decay, no moments, no step count.

It shares no code with the engine: it implements the design a second time.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import nn

NEWTON_SCHULZ = "_zeropower_via_newtonschulz"
newton_schulz_of_torch = getattr(torch.optim._muon, NEWTON_SCHULZ)


def f32(value: float) -> float:
    """A double rounded once to fp32."""
    return float(np.float32(value))


def held(master: torch.Tensor, second: torch.Tensor | None) -> torch.Tensor:
    """Return an fp32 master as `exact` stores it with a bf16 parameter, with or without a second
    moment.

    Half-way between two bf16 values the format needs the sign of that moment; without a moment, if
    rounded towards zero. If the sign is not available, the master becomes its neighbour nearer to
    the parameter."""
    bits, odd = master.view(torch.int32), master.view(torch.int32) >> 16 & 1
    lost = (bits & 0xFFFF) == 0x8000
    lost &= odd == 0 if second is None else torch.signbit(second)
    return (bits + torch.where(lost, 2 * odd - 1, 0)).view(torch.float32)


@dataclasses.dataclass
class State:
    """Optimizer state of one parameter. AdamW uses all fields, SGD and Lion one moment; a class of
    torch keeps its own in `inner`."""

    master: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    step: int = 0
    inner: torch.optim.Optimizer | None = None


class ReferenceAdamW:
    """Clipping and AdamW over fp32 masters of ordinary parameters.

    `order`: the parameters as the loop hands them to clip_grad_norm_ (`model.parameters()`), if
    groups order them anew.
    """

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        grad_dtype: torch.dtype | None = None,
        order: Iterable[nn.Parameter] | None = None,
        **others: Any,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, **others}
        self.param_groups = [
            {**defaults, **group, "params": list(group["params"])} for group in groups
        ]
        self.params: list[nn.Parameter] = [
            param for group in self.param_groups for param in group["params"]
        ]
        if order is not None:  # order in which norms are added
            self.params = [param for param in order if any(param is held for held in self.params)]
        self.states: dict[nn.Parameter, State] = {}
        self._wide: dict[nn.Parameter, torch.Tensor] = {}  # gradients accumulated in fp32
        self._clipped: dict[nn.Parameter, torch.Tensor] | None = None
        if grad_dtype is torch.float32:
            for param in self.params:
                if param.requires_grad and param.dtype is not torch.float32:
                    param.register_post_accumulate_grad_hook(self._widen)

    def _widen(self, param: torch.Tensor) -> None:
        assert isinstance(param, nn.Parameter)
        assert param.grad is not None
        if param in self._wide:
            self._wide[param].add_(param.grad)
        else:
            self._wide[param] = param.grad.to(torch.float32, copy=True)
        param.grad = None

    def gradients(self) -> dict[nn.Parameter, torch.Tensor]:
        """The fp32 gradients of the parameters that have one; clipped if `clip` was called."""
        if self._clipped is not None:
            return self._clipped
        held = {param: self._wide.get(param, param.grad) for param in self.params}
        # Masters are in CPU memory, whatever computes, and so is the update.
        return {
            param: grad.to("cpu", torch.float32, copy=True)
            for param, grad in held.items()
            if grad is not None
        }

    def clip(self, max_norm: float) -> torch.Tensor:
        """torch.nn.utils.clip_grad_norm_ on the fp32 gradients; returns its norm."""
        grads = self.gradients()
        carriers = [nn.Parameter(torch.empty_like(grad)) for grad in grads.values()]
        for carrier, grad in zip(carriers, grads.values(), strict=True):
            carrier.grad = grad
        total = torch.nn.utils.get_total_norm(list(grads.values()))
        kinds = {param.dtype for param in grads}
        there = next((param.device for param in grads if param.device.type != "cpu"), None)
        if len(kinds) > 1 or there is not None:
            norms = [self._norm(param, grad) for param, grad in grads.items()]
            # torch computes norms per dtype; a loop over bf16 and fp32 gradients has two.
            by_kind = torch.utils._foreach_utils._group_tensors_by_device_and_dtype(
                [[param.detach() for param in grads]], True
            )
            order = [index for (_, (_, indices)) in by_kind.items() for index in indices]
            total = torch.linalg.vector_norm(torch.stack([norms[index] for index in order]))
        torch.nn.utils.clip_grads_with_norm_(carriers, max_norm, total)
        self._clipped = grads
        return total

    def states_of(self, model: nn.Module) -> dict[str, dict[str, Any]]:
        """Copies of AdamW's states by the names of the model's trained parameters; a parameter that
        no step has updated has its values, zeros and step 0."""
        found = {}
        for name, param in model.named_parameters():
            if param.requires_grad:
                master = param.detach().to("cpu", torch.float32, copy=True)
                fresh = State(master, torch.zeros_like(master), torch.zeros_like(master))
                state = self.states.get(param, fresh)
                values = {"master": state.master, "exp_avg": state.exp_avg}
                values = {**values, "exp_avg_sq": state.exp_avg_sq}
                copies = {key: value.clone() for key, value in values.items()}
                found[name] = {**copies, "step": state.step}
        return found

    def clip_value(self, most: float) -> None:
        """torch.nn.utils.clip_grad_value_ on the fp32 gradients."""
        self._clipped = self.gradients()
        for grad in self._clipped.values():
            grad.clamp_(-most, most)

    def _norm(self, param: nn.Parameter, grad: torch.Tensor) -> torch.Tensor:
        """Return the norm of one gradient, a scalar on the parameter's device. The norm is taken on
        the device where the gradient was made, unless it was changed since."""
        source = grad.to(param.device) if self._clipped is None else grad
        return torch.linalg.vector_norm(source).to(param.device)

    @torch.no_grad()
    def step(self) -> None:
        """One AdamW step."""
        grads = self.gradients()
        for group in self.param_groups:
            for param in group["params"]:
                if param in grads:
                    self._update(param, grads[param], group)
        self._clipped = None

    def _update(self, param: nn.Parameter, grad: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.states.get(param)
        if state is None:
            master = param.detach().to("cpu", torch.float32, copy=True)
            state = self.states[param] = State(
                master, torch.zeros_like(master), torch.zeros_like(master)
            )
        state.step += 1
        self._apply(state, grad, group)
        param.data.copy_(state.master)
        if param.dtype is torch.bfloat16:
            state.master.copy_(held(state.master, self._second(state)))

    def _second(self, state: State) -> torch.Tensor | None:
        """The second of the moments, if there is one."""
        return state.exp_avg_sq

    def _apply(self, state: State, grad: torch.Tensor, group: dict[str, Any]) -> None:
        lr, (beta1, beta2) = float(group["lr"]), group["betas"]
        p, m, v = state.master, state.exp_avg, state.exp_avg_sq
        p.mul_(f32(1.0 - lr * group["weight_decay"]))
        m.mul_(f32(beta1))
        m.add_(grad * f32(1.0 - beta1))
        v.mul_(f32(beta2))
        v.add_((grad * grad) * f32(1.0 - beta2))
        # a scalar, too; torch.sqrt on CPU is off by one ulp now and then
        root = torch.from_numpy(np.asarray(np.sqrt(v.numpy())))
        denominator = root / f32(math.sqrt(1.0 - beta2**state.step)) + f32(group["eps"])
        p.sub_((m / denominator) * f32(lr / (1.0 - beta1**state.step)))

    def zero_grad(self) -> None:
        """Drop the gradients."""
        self._wide.clear()
        self._clipped = None
        for param in self.params:
            param.grad = None


class ReferenceSGD(ReferenceAdamW):
    """torch.optim.SGD with operations that round once."""

    def _second(self, state: State) -> torch.Tensor | None:
        return None

    def _apply(self, state: State, grad: torch.Tensor, group: dict[str, Any]) -> None:
        g = grad
        if group["weight_decay"]:
            g = g + state.master * f32(group["weight_decay"])
        momentum = group.get("momentum", 0.0)
        if momentum:
            if state.step == 1:
                state.exp_avg.copy_(g)
            else:
                state.exp_avg.mul_(f32(momentum)).add_(g * f32(1.0 - group.get("dampening", 0.0)))
            g = g + state.exp_avg * f32(momentum) if group.get("nesterov") else state.exp_avg
        state.master.sub_(g * f32(float(group["lr"])))


class ReferenceLion(ReferenceAdamW):
    """Lion (arXiv 2302.06675, algorithm 2) with operations that round once."""

    def _second(self, state: State) -> torch.Tensor | None:
        return None

    def _apply(self, state: State, grad: torch.Tensor, group: dict[str, Any]) -> None:
        lr, (beta1, beta2) = float(group["lr"]), group["betas"]
        direction = torch.sign(state.exp_avg * f32(beta1) + grad * f32(1.0 - beta1))
        state.master.mul_(f32(1.0 - lr * group["weight_decay"]))
        state.master.sub_(direction * f32(lr))
        state.exp_avg.mul_(f32(beta2)).add_(grad * f32(1.0 - beta2))


class ReferenceTorch(ReferenceAdamW):
    """A class of torch.optim on the whole fp32 masters. settings: arguments of the class."""

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        *,
        torch_class: Any,
        settings: dict[str, Any],
        **others: Any,
    ) -> None:
        super().__init__(groups, **others)
        self._class = torch_class
        self._settings = settings

    def _apply(self, state: State, grad: torch.Tensor, group: dict[str, Any]) -> None:
        if state.inner is None:
            state.inner = self._class([state.master], **self._settings)
        for name in ("lr", "weight_decay"):
            state.inner.param_groups[0][name] = group[name]
        state.master.grad = grad
        state.inner.step()  # type: ignore[call-arg]
        state.master.grad = None

    def _second(self, state: State) -> torch.Tensor | None:
        assert state.inner is not None
        kept = state.inner.state[state.master].values()
        moments = [each for each in kept if getattr(each, "shape", None) == state.master.shape]
        return moments[1] if len(moments) > 1 else None


class ReferenceMuon(ReferenceAdamW):
    """torch.optim.Muon on the fp32 masters of `matrices`, stacks of experts as one matrix each;
    AdamW on the others. product_dtype: of Newton-Schulz, bf16 in torch.

    On CPUs without fused multiply-add torch rounds Muon's products and sums separately, and the
    engine's kernels do not."""

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        *,
        matrices: Iterable[nn.Parameter],
        product_dtype: torch.dtype,
        betas: tuple[float, float] = (0.9, 0.95),
        **others: Any,
    ) -> None:
        super().__init__(groups, betas=betas, **others)
        self._matrices = {id(param) for param in matrices}
        self._dtype = product_dtype
        loops = ("lr", "order", "grad_dtype")
        self._options = {name: value for name, value in others.items() if name not in loops}

    def _update(self, param: nn.Parameter, grad: torch.Tensor, group: dict[str, Any]) -> None:
        if id(param) in self._matrices and param not in self.states:
            master = param.detach().to("cpu", torch.float32, copy=True)
            self.states[param] = state = State(master, master[:0], master[:0])
            shape = master.shape[-2:]
            state.inner = torch.optim.Muon(list(master.view(-1, *shape)), **self._options)
        super()._update(param, grad, group)

    def _second(self, state: State) -> torch.Tensor | None:
        return state.exp_avg_sq if state.inner is None else None

    def _apply(self, state: State, grad: torch.Tensor, group: dict[str, Any]) -> None:
        if state.inner is None:
            super()._apply(state, grad, group)
            return
        inner = state.inner.param_groups[0]
        inner["lr"], inner["weight_decay"] = group["lr"], group["weight_decay"]
        for matrix, part in zip(inner["params"], grad.view(-1, *grad.shape[-2:]), strict=True):
            matrix.grad = part
        with mock.patch.object(torch.optim._muon, NEWTON_SCHULZ, self._newton_schulz):
            state.inner.step()  # type: ignore[call-arg]
        for matrix in inner["params"]:
            matrix.grad = None

    def _newton_schulz(
        self, u: torch.Tensor, coefficients: tuple[float, float, float], steps: int, eps: float
    ) -> torch.Tensor:
        if self._dtype is torch.bfloat16:
            return newton_schulz_of_torch(u, coefficients, steps, eps)
        a, b, c = coefficients
        x = u.bfloat16().float()
        x = x.T if u.size(0) > u.size(1) else x
        x = x / x.norm().clamp(min=eps)
        for _ in range(steps):
            gram = x @ x.T
            x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
        return (x.T if u.size(0) > u.size(1) else x).bfloat16()


class Delayed:
    """A reference optimizer as update="delayed" runs it: from step `warmup` on, the model computes
    with the parameters before the last update. `newest` are the updated ones, by name."""

    def __init__(self, optimizer: ReferenceAdamW, model: nn.Module, warmup: int) -> None:
        self._optimizer, self._model, self._warmup = optimizer, model, warmup
        self._taken = 0
        self.newest = self._copies()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)

    def step(self) -> None:
        """Update the newest parameters, then make the model compute with these or the previous
        ones."""
        before = self.newest
        self._compute_with(before)
        self._optimizer.step()
        self.newest = self._copies()
        if self._taken >= self._warmup:
            self._compute_with(before)
        self._taken += 1

    def catch_up(self) -> None:
        """Give the model the newest parameters."""
        self._compute_with(self.newest)

    def _copies(self) -> dict[str, torch.Tensor]:
        named = self._model.named_parameters()
        return {name: param.detach().to("cpu", copy=True) for name, param in named}

    @torch.no_grad()
    def _compute_with(self, values: dict[str, torch.Tensor]) -> None:
        for name, param in self._model.named_parameters():
            param.copy_(values[name])


class ReferenceScaler:
    """Dynamic loss scaling as torch.amp.GradScaler has it, over a reference optimizer: unscale,
    skip, back off, grow."""

    def __init__(self, init_scale: float, growth_interval: int) -> None:
        self._scale = init_scale
        self._interval = growth_interval
        self._good = 0
        self._found = self._unscaled = False

    def get_scale(self) -> float:
        """The scale now."""
        return self._scale

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss times the scale."""
        return loss * self._scale

    def unscale_(self, optimizer: ReferenceAdamW) -> None:
        """Multiply the fp32 gradients by the inverse scale, once, and record non-finite values."""
        grads = optimizer.gradients()
        self._found = any(not bool(grad.isfinite().all()) for grad in grads.values())
        for grad in grads.values():
            grad.mul_(f32(1.0 / self._scale))
        optimizer._clipped = grads
        self._unscaled = True

    def step(self, optimizer: ReferenceAdamW) -> None:
        """Step, unless a gradient was not finite."""
        if not self._unscaled:
            self.unscale_(optimizer)
        if not self._found:
            optimizer.step()

    def update(self) -> None:
        """Halve the scale after a skipped step, double it after enough good ones."""
        self._good = 0 if self._found else self._good + 1
        if self._found:
            self._scale *= 0.5
        elif self._good == self._interval:
            self._scale, self._good = self._scale * 2.0, 0
        self._found = self._unscaled = False
