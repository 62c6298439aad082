"""Logits that are not computed: what a head returns to a model that computes logits and their loss itself.

A TiledHead returns DeferredLogits, which hold the hidden states. What models do to logits on the way to the loss (a cast, a slice of the
leading dimensions, a view as [rows, vocabulary]) is done to the hidden states; `cross_entropy` of them is the tiled loss of the
head. Whatever else is asked of them makes the logits, in full, as an ordinary head would have: right, and large.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any, NoReturn

import torch
import torch.nn.functional as functional
from torch import nn

from infinity._torch_compat import METADATA, DisableTorchFunctionSubclass, make_wrapper, parse_to
from infinity.ops.loss_tiles import Settings
from infinity.ops.tiled_linear import TiledLinear
from infinity.ops.tiled_loss import head_loss, head_rows
from infinity.sizes import format_size

log = logging.getLogger("infinity")

_TENSOR: Any = torch.Tensor


class TiledHead(TiledLinear):
    """A tiled linear whose output is not computed until somebody needs it: see the module's docstring."""

    _said = False

    def forward(self, x: torch.Tensor, *, instead: Callable[[], torch.Tensor] | None = None) -> torch.Tensor:
        """x: [..., in_features]. Returns DeferredLogits [..., out_features]."""
        if instead is not None:
            return super().forward(x, instead=instead)
        return DeferredLogits(self, self.entering(x))

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        """The logits [..., out_features], in full."""
        found: torch.Tensor = self(x, instead=lambda: TiledLinear.forward(self, x))
        return found

    def say_computed(self, what: str, size_bytes: int) -> None:
        """Say once that the logits were needed where a training pass should not."""
        if torch.is_grad_enabled() and not self._said:
            self._said = True
            log.warning("%s on the logits of a tiled loss: they are computed in full (%s)", what, format_size(size_bytes))


class DeferredLogits(torch.Tensor):
    """Logits [..., vocabulary] of a head for hidden states [..., features] (see the module's docstring)."""

    infinity_inputs: tuple[torch.Tensor]  # what backward comes to by way of this tensor
    _head: TiledHead
    _computed: torch.Tensor | None

    @staticmethod
    def __new__(  # noqa: PYI034
        cls, head: TiledHead, hidden: torch.Tensor, dtype: torch.dtype | None = None
    ) -> DeferredLogits:
        """The logits of `hidden`, cast to `dtype`."""
        shape = torch.Size((*hidden.shape[:-1], head.out_features))
        made = make_wrapper(cls, shape, dtype or hidden.dtype, hidden.device, False)
        assert isinstance(made, DeferredLogits)
        made._head, made.infinity_inputs, made._computed = head, (hidden,), None
        return made

    def __init__(self, head: TiledHead, hidden: torch.Tensor, dtype: torch.dtype | None = None) -> None:
        pass

    def compute(self, what: str = "an operation") -> torch.Tensor:
        """The logits, as an ordinary tensor; made once."""
        made = self._computed
        if made is None or (torch.is_grad_enabled() and not made.requires_grad):
            self._head.say_computed(what, self.numel() * self.element_size())
            made = self._computed = self._head.compute(self.infinity_inputs[0]).to(self.dtype)
        return made

    @classmethod
    def __torch_function__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Answer metadata, carry over what leaves rows of logits whole, compute a loss in tiles; else compute the logits."""
        kwargs = kwargs or {}
        if func in METADATA:
            with DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        handler = _HANDLERS.get(func)
        if handler is not None and args and isinstance(args[0], DeferredLogits):
            done = handler(func, args[0], args[1:], kwargs)
            if done is not None:
                return done
        name = getattr(func, "__name__", str(func))
        return func(*(_compute(arg, name) for arg in args), **{key: _compute(arg, name) for key, arg in kwargs.items()})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> NoReturn:
        """The net under `__torch_function__`, for calls from C++ that pass it by."""
        raise RuntimeError(f"{func} met the logits of a tiled loss, which are not computed; call `logits.clone()` first")

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"DeferredLogits(shape={tuple(self.shape)}, dtype={self.dtype}, device='{self.device}')"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.compute("pickling").__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> Any:
        return self.compute("deepcopy").__deepcopy__(memo)  # type: ignore[no-untyped-call]


def _compute(value: Any, what: str) -> Any:
    """`value` with ordinary tensors in place of deferred logits."""
    if isinstance(value, DeferredLogits):
        return value.compute(what)
    if type(value) in (list, tuple):
        return type(value)(_compute(item, what) for item in value)
    return value


# -- what leaves rows of logits whole: the result, or None where it does not -------------------------------------------

Handler = Callable[[Any, DeferredLogits, "tuple[Any, ...]", "dict[str, Any]"], Any]


def _same(_func: Any, logits: DeferredLogits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return logits if not args and not kwargs else None


def _cast(dtype: torch.dtype) -> Handler:
    def cast(_func: Any, logits: DeferredLogits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return DeferredLogits(logits._head, logits.infinity_inputs[0], dtype) if not args and not kwargs else None

    return cast


def _to(_func: Any, logits: DeferredLogits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    device, dtype, _ = parse_to(args, kwargs)
    here = logits.device
    if device is not None and (device.type != here.type or device.index not in (None, here.index)):
        return None
    return DeferredLogits(logits._head, logits.infinity_inputs[0], dtype or logits.dtype)


def _index(_func: Any, logits: DeferredLogits, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    index = args[0] if isinstance(args[0], tuple) else (args[0],)
    whole = slice(None)
    if any(item is Ellipsis for item in index):
        leaves_rows = isinstance(index[-1], slice) and index[-1] == whole
    else:
        simple = all(isinstance(item, (int, slice)) for item in index[:-1])
        last = index[-1]
        consumed = len(index) - 1 + (last.dim() if isinstance(last, torch.Tensor) and last.dtype == torch.bool else 1)
        is_whole = isinstance(last, slice) and last == whole
        leaves_rows = simple and last is not None and (consumed < logits.dim() or (consumed == logits.dim() and is_whole))
    if not leaves_rows:
        return None
    return DeferredLogits(logits._head, logits.infinity_inputs[0][args[0]], logits.dtype)


def _view(func: Any, logits: DeferredLogits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    shape = func(torch.empty(logits.shape, dtype=logits.dtype, device="meta"), *args, **kwargs).shape
    if not shape or shape[-1] != logits.shape[-1]:
        return None
    hidden = logits.infinity_inputs[0]
    return DeferredLogits(logits._head, hidden.reshape(*shape[:-1], hidden.shape[-1]), logits.dtype)


def _cross_entropy(
    _func: Any, logits: DeferredLogits, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> torch.Tensor | None:
    names = ("target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")
    given = dict(zip(names, args, strict=False)) | kwargs
    target = given["target"]
    if logits.dim() > 2 or target.is_floating_point() or any(given.get(name) is not None for name in names[1:3] + names[4:5]):
        return None
    settings = Settings(
        logits.shape[-1],
        given.get("ignore_index", -100),
        given.get("label_smoothing", 0.0),
        given.get("reduction", "mean"),
    )
    return head_loss(logits._head, logits.infinity_inputs[0], target, settings).to(logits.dtype)


_HANDLERS: dict[Any, Handler] = {
    functional.cross_entropy: _cross_entropy,
    _TENSOR.__getitem__: _index,
    _TENSOR.contiguous: _same,
    _TENSOR.float: _cast(torch.float32),
    _TENSOR.bfloat16: _cast(torch.bfloat16),
    _TENSOR.half: _cast(torch.float16),
    _TENSOR.to: _to,
    _TENSOR.view: _view,
    _TENSOR.reshape: _view,
    _TENSOR.flatten: _view,
    torch.flatten: _view,
    torch.reshape: _view,
}


def default_tiles(vocabulary: int, tile: int) -> int:
    """As many tiles as make none much larger than `tile` classes."""
    return max(1, math.ceil(vocabulary / tile))


def as_head(linear: TiledLinear) -> TiledHead:
    """A TiledHead of the same tiles. Raises: ValueError for several tiles along the inputs."""
    head_rows(linear)
    made = TiledHead.of_tiles(linear.tile_parameters(), linear.grid, linear.bias)
    made.train(linear.training)
    assert isinstance(made, TiledHead)
    return made


def find_head(model: nn.Module) -> nn.Module | None:
    """The head of a model of Hugging Face, or None."""
    getter = getattr(model, "get_output_embeddings", None)
    found = getter() if callable(getter) else None
    return found if isinstance(found, nn.Module) else None
