"""Gradient proxies in `p.grad`: clipping by norm and by value, unscaling and zeroing of gradients
that rest elsewhere.

    backward -> GradAccumulator.accumulate(grad)   the gradient is copied, or added to the sum
    p.grad   -> GradProxy                          shape, dtype, device, and no storage; one per
                                                   accumulator, reused every step
    loop     -> clip, unscale, `p.grad *= s`       norms are cached; scalings and clamps go into a
                                                   log
    step     -> raise to fp32, replay the log      the bits of the same loop on fp32 gradients

A proxy answers or raises: no operation on it is ever skipped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import torch

from infinity._src.base.torch_compat import NO_TORCH_FUNCTION
from infinity._src.params.accumulator import AccumulatorState, GradAccumulator, raise_unsupported


def _refusing(operation: str) -> Any:
    """Make a method that raises the error of an operation that a proxy cannot answer."""

    def refuse(proxy: GradProxy, *_args: object, **_kwargs: object) -> NoReturn:
        raise_unsupported(proxy.accumulator.name, operation)

    return refuse


class GradProxy(torch.Tensor):
    """Tensor in `p.grad`: shape, dtype and device of a gradient that rests in an accumulator.

    Answers norms and in-place scaling, clamping, zeroing and GradScaler; everything else raises
    RuntimeError that names the parameter, the operation and what to do instead.
    """

    accumulator: GradAccumulator

    # Straight to `__torch_dispatch__`: its table knows aten operators alone.
    __torch_function__ = NO_TORCH_FUNCTION

    @staticmethod
    def of(accumulator: GradAccumulator, device: torch.device) -> GradProxy:
        """Make a proxy of an accumulator, with the accumulator's dtype; fp32 for an fp16
        accumulator. Scalings apply to the gradient raised to fp32, and GradScaler refuses to
        unscale a tensor that says it is fp16."""
        dtype = torch.float32 if accumulator.dtype is torch.float16 else accumulator.dtype
        made: GradProxy = torch.Tensor._make_wrapper_subclass(
            GradProxy, accumulator.shape, dtype=dtype, device=device
        )
        made.accumulator = accumulator
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        handler = _HANDLERS.get(func)
        if handler is None:
            raise_unsupported(_name_in((args, kwargs)), str(func))
        return handler(*args, **kwargs) if kwargs else handler(*args)

    def materialize(self) -> torch.Tensor:
        """Return a CPU copy of the gradient's values, fp32. A tensor assigned to `p.grad` takes
        their place."""
        return self.accumulator.materialize()

    def __repr__(self) -> str:  # type: ignore[override]
        held = "empty" if self.accumulator.state is AccumulatorState.EMPTY else "held"
        kind = f"shape={tuple(self.shape)}, dtype={self.dtype}, {held}, log={self.accumulator.log}"
        return f"GradProxy({self.accumulator.name}, {kind})"

    @property
    def data(self) -> GradProxy:
        """Alias of the proxy: loops write `p.grad.data.norm()` and `p.grad.data.mul_()`."""
        return GradProxy.of(self.accumulator, self.device)

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        # `Module.to` and `.cpu()` assign what the conversion gave them, which is this gradient
        # where nothing changes; an at-rest parameter takes that alike.
        if not (isinstance(value, GradProxy) and value.accumulator is self.accumulator):
            raise_unsupported(self.accumulator.name, "`.data =`")

    __reduce_ex__ = _refusing("pickling")
    __deepcopy__ = _refusing("deepcopy")
    # These reach the storage past the dispatcher, and would return a null pointer.
    data_ptr = _refusing("data_ptr")
    untyped_storage = _refusing("untyped_storage")
    storage = _refusing("storage")
    share_memory_ = _refusing("share_memory_")
    numpy = __array__ = _refusing("numpy")
    __dlpack__ = _refusing("dlpack")
    item = _refusing("item")
    tolist = _refusing("tolist")


def _name_in(values: object) -> str:
    if isinstance(values, GradProxy):
        return values.accumulator.name
    children: Iterable[object] = ()
    if isinstance(values, dict):
        children = values.values()
    elif isinstance(values, (list, tuple)):
        children = values
    return next((name for name in map(_name_in, children) if name), "")


# -- operators that a proxy supports ------------------------------------------------------------


def _norm_tensor(
    grad: GradProxy,
    order: float | None = 2.0,
    dim: Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    partly = dim is not None and len(dim) not in (0, len(grad.shape))
    if partly or keepdim or dtype not in (None, torch.float32):
        raise_unsupported(
            grad.accumulator.name,
            "a norm along some dimensions, with keepdim or in another dtype than fp32",
        )
    value = grad.accumulator.norm(2.0 if order is None else float(order))
    return torch.scalar_tensor(value, dtype=torch.float32, device=grad.device)


def _foreach_norm(
    grads: Sequence[torch.Tensor], order: float = 2.0, dtype: torch.dtype | None = None
) -> list[torch.Tensor]:
    ours = [grad for grad in grads if isinstance(grad, GradProxy)]
    if dtype not in (None, torch.float32):
        raise_unsupported(ours[0].accumulator.name, f"_foreach_norm in {dtype}")
    # Checked here: `norms` takes the norm of an empty accumulator for 0.
    for grad in ours:
        grad.accumulator._require_held("norm")
    # One call for all: on several ranks it is one reduction.
    values = ours[0].accumulator.registry.norms([grad.accumulator for grad in ours], float(order))
    norms = iter(torch.tensor(values, dtype=torch.float32, device=ours[0].device).unbind())
    return [
        next(norms)
        if isinstance(grad, GradProxy)
        else torch.linalg.vector_norm(grad, order, dtype=dtype)
        for grad in grads
    ]


def _scaling(kind: str) -> Callable[..., GradProxy]:
    def scale(grad: GradProxy, value: torch.Tensor | float) -> GradProxy:
        if not isinstance(grad, GradProxy):  # a proxy as the factor of an ordinary tensor
            raise_unsupported(_name_in(value), "being a factor")
        _check_factor(grad, value)
        grad.accumulator.scale(kind, grad.accumulator.registry.factor(value))
        return grad

    return scale


def _check_factor(grad: GradProxy, value: object) -> None:
    if isinstance(value, GradProxy) or not isinstance(value, (int, float, torch.Tensor)):
        raise_unsupported(grad.accumulator.name, f"scaling by a {type(value).__name__}")
    if isinstance(value, torch.Tensor) and (value.numel() != 1 or value.is_complex()):
        raise_unsupported(
            grad.accumulator.name,
            f"scaling by a {value.dtype} tensor of shape {tuple(value.shape)}",
        )


def _foreach_scaling(kind: str) -> Callable[..., None]:
    scale = _scaling(kind)

    def foreach(
        grads: Sequence[torch.Tensor], value: torch.Tensor | float | Sequence[torch.Tensor | float]
    ) -> None:
        values = value if isinstance(value, (list, tuple)) else [value] * len(grads)
        for grad, factor in zip(grads, values, strict=True):
            if isinstance(grad, GradProxy):
                scale(grad, factor)
            else:
                _check_factor_of_plain(factor)
                grad.mul_(factor) if kind == "mul" else grad.div_(factor)

    return foreach


def _check_factor_of_plain(value: object) -> None:
    if isinstance(value, GradProxy):
        raise_unsupported(value.accumulator.name, "being a factor")


def _clamp(
    grad: GradProxy, minimum: float | None = None, maximum: float | None = None
) -> GradProxy:
    for bound in (minimum, maximum):
        # NaN would make every element NaN.
        if bound is not None and math.isnan(bound):
            raise_unsupported(grad.accumulator.name, f"clamping by {bound}")
    grad.accumulator.clamp(minimum, maximum)
    return grad


def _clamp_max(grad: GradProxy, maximum: float) -> GradProxy:
    return _clamp(grad, None, maximum)


def _foreach_clamp(
    clamp: Callable[[GradProxy, float], GradProxy], name: str
) -> Callable[..., None]:
    """Return the operator on lists that clamps each gradient; ordinary ones by torch's `name`."""

    def foreach(grads: Sequence[torch.Tensor], bound: float | Sequence[float]) -> None:
        bounds = bound if isinstance(bound, (list, tuple)) else [bound] * len(grads)
        for grad, each in zip(grads, bounds, strict=True):
            if isinstance(grad, GradProxy):
                clamp(grad, each)
            else:
                getattr(grad, name)(each)

    return foreach


def _zero(grad: GradProxy) -> GradProxy:
    grad.accumulator.zero()
    return grad


def _foreach_zero(grads: Sequence[torch.Tensor]) -> None:
    for grad in grads:
        grad.zero_()


def _unscale(
    grads: Sequence[torch.Tensor], found_inf: torch.Tensor, inv_scale: torch.Tensor
) -> None:
    """GradScaler.unscale_: report gradients that are not finite, then multiply by the inverse
    scale.

    With several ranks a collective: they must agree on whether the step is skipped.
    """
    plain = [grad for grad in grads if not isinstance(grad, GradProxy)]
    if plain:
        torch._amp_foreach_non_finite_check_and_unscale_(plain, found_inf, inv_scale)
    # As torch does: finiteness is that of the gradient before it is unscaled.
    accumulators = [grad.accumulator for grad in grads if isinstance(grad, GradProxy)]
    if not accumulators[0].registry.finite(accumulators):
        found_inf.fill_(1.0)
    for accumulator in accumulators:
        accumulator.scale("mul", accumulator.registry.factor(inv_scale))


def _alias(grad: GradProxy) -> GradProxy:
    # `detach()` and views of autograd alias it; `GradAccumulator.reconcile` knows them by the
    # accumulator.
    return GradProxy.of(grad.accumulator, grad.device)


_foreach_clamp_min = _foreach_clamp(_clamp, "clamp_min_")
_foreach_clamp_max = _foreach_clamp(_clamp_max, "clamp_max_")
_aten: Any = torch.ops.aten
_HANDLERS: dict[Any, Callable[..., Any]] = {
    _aten.linalg_vector_norm.default: _norm_tensor,
    _aten.norm.Scalar: _norm_tensor,
    _aten.norm.ScalarOpt_dim: _norm_tensor,
    _aten.norm.ScalarOpt_dtype: _norm_tensor,
    _aten._foreach_norm.Scalar: _foreach_norm,
    _aten.mul_.Tensor: _scaling("mul"),
    _aten.mul_.Scalar: _scaling("mul"),
    _aten.div_.Tensor: _scaling("div"),
    _aten.div_.Scalar: _scaling("div"),
    _aten._foreach_mul_.Tensor: _foreach_scaling("mul"),
    _aten._foreach_mul_.Scalar: _foreach_scaling("mul"),
    _aten._foreach_mul_.ScalarList: _foreach_scaling("mul"),
    _aten._foreach_mul_.List: _foreach_scaling("mul"),
    _aten._foreach_div_.Tensor: _foreach_scaling("div"),
    _aten._foreach_div_.Scalar: _foreach_scaling("div"),
    _aten._foreach_div_.ScalarList: _foreach_scaling("div"),
    _aten._foreach_div_.List: _foreach_scaling("div"),
    _aten.clamp_.default: _clamp,
    _aten.clamp_min_.default: _clamp,
    _aten.clamp_max_.default: _clamp_max,
    _aten._foreach_clamp_min_.Scalar: _foreach_clamp_min,
    _aten._foreach_clamp_min_.ScalarList: _foreach_clamp_min,
    _aten._foreach_maximum_.Scalar: _foreach_clamp_min,
    _aten._foreach_maximum_.ScalarList: _foreach_clamp_min,
    _aten._foreach_clamp_max_.Scalar: _foreach_clamp_max,
    _aten._foreach_clamp_max_.ScalarList: _foreach_clamp_max,
    _aten._foreach_minimum_.Scalar: _foreach_clamp_max,
    _aten._foreach_minimum_.ScalarList: _foreach_clamp_max,
    _aten.zero_.default: _zero,
    _aten._foreach_zero_.default: _foreach_zero,
    _aten._amp_foreach_non_finite_check_and_unscale_.default: _unscale,
    _aten.detach.default: _alias,
    _aten.alias.default: _alias,
}
