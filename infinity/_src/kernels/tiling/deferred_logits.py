"""Logits that are not computed, for a model that computes logits and their loss itself.

A TiledHead returns DeferredLogits, which hold the hidden states. Operations between head and loss
(a cast, a slice of the leading dimensions, a view as [rows, vocabulary]) are applied to the hidden
states; `cross_entropy` of the result is the tiled loss of the head. Any other operation computes
the full logits, as an ordinary head does.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any, NoReturn

import torch
import torch.nn.functional as functional
from torch import nn

from infinity._src.base.sizes import format_size
from infinity._src.base.torch_compat import (
    METADATA,
    DisableTorchFunctionSubclass,
    make_wrapper,
    parse_to,
)
from infinity._src.kernels.linear_cross_entropy import Settings
from infinity._src.kernels.tiling.tiled_linear import TiledLinear
from infinity._src.kernels.tiling.tiled_loss import head_loss, head_rows

log = logging.getLogger("infinity")

_TENSOR: Any = torch.Tensor


class TiledHead(TiledLinear):
    """A tiled linear whose output is computed on first use: see the module's docstring."""

    # Warn once for each head: a training loop would repeat the warning every step.
    _said = False

    def forward(
        self, x: torch.Tensor, *, instead: Callable[[], torch.Tensor] | None = None
    ) -> torch.Tensor:
        """x: [..., in_features]. Returns DeferredLogits [..., out_features]."""
        if instead is not None:
            # The loss computes with the tiles inside this module's call, so hooks see one call.
            return super().forward(x, instead=instead)
        return DeferredLogits(self, self.entering(x))

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the logits [..., out_features], in full.

        x: in the compute dtype, which autocast chose if it was on at the call.
        """
        return self.call(x, lambda: self.multiply(x))

    def say_computed(self, what: str, size_bytes: int) -> None:
        """Warn once that a training pass computed the logits, which it should not need."""
        if torch.is_grad_enabled() and not self._said:
            self._said = True
            log.warning(
                "%s on the logits of a tiled loss: they are computed in full (%s)",
                what,
                format_size(size_bytes),
            )


class UncomputedLogits(torch.Tensor):
    """Logits that are computed on first use: shape, dtype and device of a tensor, without memory.

    Logits made under `no_grad` have no graph. A write or a hook turns the logits into an ordinary
    tensor for all users (`materialize`).
    """

    # Tensors through which backward reaches the graph: the hidden states and, after `materialize`,
    # the computed logits. The engine looks for a module's inputs and outputs here.
    infinity_inputs: tuple[torch.Tensor, ...]
    _head: nn.Module
    _graph: bool  # whether an ordinary head would have recorded a graph
    _computed: torch.Tensor | None
    _computed_version: int
    _materialized: bool

    def _begin(self, head: nn.Module, hidden: torch.Tensor) -> None:
        """Initialize the state that all subclasses share. Whether the logits have a graph is
        decided here, when the head is called, not when they are computed."""
        self._head, self.infinity_inputs = head, (hidden,)
        self._graph = torch.is_grad_enabled()
        self._computed, self._computed_version, self._materialized = None, 0, False

    def _compute_anew(self, what: str) -> torch.Tensor:
        """Compute the logits, as the head would have when it was called."""
        raise NotImplementedError

    @property
    def wants_grad(self) -> bool:
        """True if the logits have a graph, as an ordinary head's would."""
        hidden = self.infinity_inputs[0]
        return self._graph and (
            hidden.requires_grad or any(param.requires_grad for param in self._head.parameters())
        )

    def compute(self, what: str = "an operation") -> torch.Tensor:
        """Compute the logits as an ordinary tensor, once. what: the operation that needs them."""
        if self.is_materialized():
            return self.materialize(what)
        made = self._computed
        # Compute again if the logits were computed under no_grad, and are now needed with a graph.
        if made is None or (torch.is_grad_enabled() and self.wants_grad and not made.requires_grad):
            # With a graph only if an ordinary head would have recorded one when it was called.
            with torch.set_grad_enabled(torch.is_grad_enabled() and self._graph):
                made = self._computed = self._compute_anew(what)
            self._computed_version = _version(made)
        return made

    def is_materialized(self) -> bool:
        """Return whether these are ordinary logits: materialized or written to."""
        written = self._computed is not None and _version(self._computed) != self._computed_version
        return self._materialized or written

    def materialize(self, what: str) -> torch.Tensor:
        """Turn the logits into an ordinary tensor, once, and return it. what: the operation that
        needs it."""
        if not self._materialized:
            with torch.set_grad_enabled(self._graph):
                self._become_ordinary(what)
            self._materialized = True
            assert self._computed is not None
            # Backward passes through the computed tensor, so the engine must find it.
            self.infinity_inputs = (self.infinity_inputs[0], self._computed)
        assert self._computed is not None
        return self._computed

    def _become_ordinary(self, what: str) -> None:
        # If an operation has written to the computed logits, they hold the valid values.
        if not self.is_materialized():
            self.compute(what)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> NoReturn:
        """Refuse calls from C++ that bypass `__torch_function__`."""
        raise RuntimeError(
            f"{func} met the logits of a model with inf.tile_loss or inf.microbatched, which are "
            "not computed; call `logits.clone()` first"
        )

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return (
            f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype}, "
            f"device='{self.device}')"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.compute("pickling").__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> Any:
        return self.compute("deepcopy").__deepcopy__(memo)  # type: ignore[no-untyped-call]


_SETTLING = {_TENSOR.register_hook, _TENSOR.retain_grad, _TENSOR.data.__get__}
"""Accesses, besides in-place operations, that need ordinary logits: hooks, a retained gradient, and
`.data`, through which a later write would show."""

_WRITING = {"__setitem__"} | {
    f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")
}
"""Names of in-place operations that do not end in a single underscore."""

OF_THE_GRAPH = {
    getattr(_TENSOR, name).__get__
    for name in (
        "requires_grad",
        "is_leaf",
        "grad_fn",
        "grad",
        "retains_grad",
        "output_nr",
        "_version",
        "_backward_hooks",
    )
} | {_TENSOR.requires_grad.__set__}
"""Metadata that differs between ordinary logits and a tensor without a graph."""


def of_the_graph(func: Any, logits: UncomputedLogits, args: tuple[Any, ...]) -> Any:
    """Return `func(logits, *args)` for a function of `OF_THE_GRAPH`. Reading `grad_fn` of logits
    with a graph, and setting `requires_grad`, materialize the logits."""
    if not logits.is_materialized():
        if func == _TENSOR.requires_grad.__get__:
            return logits.wants_grad
        if func == _TENSOR.is_leaf.__get__:
            return not logits.wants_grad
        if func == _TENSOR.requires_grad.__set__ or (
            func == _TENSOR.grad_fn.__get__ and logits.wants_grad
        ):
            logits.materialize(func.__self__.__name__)
    if logits.is_materialized():
        return func(logits.materialize("autograd"), *args)
    with DisableTorchFunctionSubclass():
        return func(logits, *args)


def settle_written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Materialize logits that an operation writes to, or exposes to later writes (a hook, `.data`):
    from then on all users must see the same memory."""
    name = getattr(func, "__name__", str(func))
    first = args[0] if args else None
    writes = (
        func in _SETTLING or name in _WRITING or (name.endswith("_") and not name.endswith("__"))
    )
    if writes and isinstance(first, UncomputedLogits):
        first.materialize(name)
    if isinstance(kwargs.get("out"), UncomputedLogits):
        kwargs["out"].materialize(name)


class DeferredLogits(UncomputedLogits):
    """Logits [..., vocabulary] of a head for hidden states [..., features] (see the module's
    docstring).

    An ordinary head computes logits when it is called; these are computed later. If hidden states
    or weights were written in between (by an optimizer's step), a use raises RuntimeError. Views of
    materialized logits share their memory.
    """

    _head: TiledHead
    _versions: tuple[int, ...]
    # For a view: the logits whose memory it shares, and the operation that makes the view.
    _of: tuple[DeferredLogits, Callable[[torch.Tensor], torch.Tensor]] | None

    @staticmethod
    def __new__(  # noqa: PYI034
        cls,
        head: TiledHead,
        hidden: torch.Tensor,
        dtype: torch.dtype | None = None,
        of: tuple[DeferredLogits, Callable[[torch.Tensor], torch.Tensor]] | None = None,
    ) -> DeferredLogits:
        """Make the logits of `hidden`, cast to `dtype`."""
        shape = torch.Size((*hidden.shape[:-1], head.out_features))
        # No storage: an operation that bypasses `__torch_function__` must fail, and read nothing.
        made = make_wrapper(cls, shape, dtype or hidden.dtype, hidden.device, False)
        assert isinstance(made, DeferredLogits)
        made._begin(head, hidden)
        made._of, made._versions = of, _versions(head, hidden)
        return made

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        pass

    def derived(
        self,
        hidden: torch.Tensor,
        dtype: torch.dtype | None = None,
        view: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> DeferredLogits:
        """Return the logits of `hidden`, a part of this object's hidden states.

        view: the operation that makes them from this object's logits, if both share memory.
        """
        # A new object must not renew the versions of inputs that have changed.
        self.check_unchanged()
        # Only a view refers to the whole: a write to the view is a write to the whole.
        of = (self, view) if view is not None else None
        made = DeferredLogits(self._head, hidden, dtype or self.dtype, of)
        made._graph = made._graph and self._graph
        return made

    def check_unchanged(self) -> None:
        """Raise RuntimeError if the hidden states or the head's weights have been written since the
        head was called, or if an autograd Function has returned these logits."""
        if _versions(self._head, self.infinity_inputs[0]) != self._versions:
            raise RuntimeError(
                "the logits of a tiled loss are computed when they are used, but the head's "
                "weights or its input have been modified in place since the forward (by an "
                "optimizer's step?): use the logits, or make a `logits.clone()`, before that"
            )
        # Without the subclass: `__torch_function__` would ask for the grad_fn of the materialized
        # logits.
        with DisableTorchFunctionSubclass():
            if self.grad_fn is not None:
                raise RuntimeError(
                    "the logits of a tiled loss came out of an autograd Function, whose gradients "
                    "would be lost: call the head outside of the Function, or checkpoint with "
                    "use_reentrant=False"
                )

    def _compute_anew(self, what: str) -> torch.Tensor:
        self.check_unchanged()
        self._head.say_computed(what, self.numel() * self.element_size())
        return self._head.compute(self.infinity_inputs[0]).to(self.dtype)

    def is_materialized(self) -> bool:
        """Return whether these are ordinary logits, or views of ordinary ones."""
        return super().is_materialized() or (self._of is not None and self._of[0].is_materialized())

    def _become_ordinary(self, what: str) -> None:
        if self._of is None:
            super()._become_ordinary(what)
            return
        # Materialize the whole logits, too: a view lies in their memory.
        whole, view = self._of
        self._computed = view(whole.materialize(what))

    @classmethod
    def __torch_function__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Return metadata; apply an operation that keeps rows of logits whole to the hidden states;
        compute a cross-entropy in tiles. Any other operation computes the logits.
        """
        kwargs = kwargs or {}
        name = getattr(func, "__name__", str(func))
        logits = args[0] if args and isinstance(args[0], DeferredLogits) else None
        # Before METADATA: these results depend on whether the logits are materialized.
        if logits is not None and func in OF_THE_GRAPH:
            return of_the_graph(func, logits, args[1:])
        if func in METADATA:
            with DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if logits is not None and not logits.is_materialized():
            # A handler returns None if the operation does not keep rows of logits whole.
            handler = _HANDLERS.get(func)
            done = handler(func, logits, args[1:], kwargs) if handler is not None else None
            if done is not None:
                return done
        settle_written(func, args, kwargs)
        return func(
            *(_compute(arg, name) for arg in args),
            **{key: _compute(arg, name) for key, arg in kwargs.items()},
        )


def _version(tensor: torch.Tensor) -> int:
    # Inference tensors have no version counter.
    return 0 if tensor.is_inference() else tensor._version


def _versions(head: TiledHead, hidden: torch.Tensor) -> tuple[int, ...]:
    params = [
        *head.tile_parameters(),
        *(param for param in head._parameters.values() if param is not None),
    ]
    return (
        _version(hidden),
        # An offloaded parameter has a separate count of writes to its values: gathering and
        # releasing replace the storage.
        *(getattr(param, "infinity_version", _version(param)) for param in params),
    )


def _compute(value: Any, what: str) -> Any:
    if isinstance(value, DeferredLogits):
        return value.compute(what)
    if type(value) in (list, tuple):
        return type(value)(_compute(item, what) for item in value)
    return value


# -- operations that keep rows of logits whole; a handler returns None for others ------------------

Handler = Callable[[Any, DeferredLogits, "tuple[Any, ...]", "dict[str, Any]"], Any]


def _contiguous(
    _func: Any, logits: DeferredLogits, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    if args or kwargs:
        return None
    return logits if logits._of is None else logits.derived(logits.infinity_inputs[0])


def _cast(dtype: torch.dtype) -> Handler:
    def cast(
        _func: Any, logits: DeferredLogits, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if args or kwargs:
            return None
        return logits if dtype == logits.dtype else logits.derived(logits.infinity_inputs[0], dtype)

    return cast


def _to(_func: Any, logits: DeferredLogits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    device, dtype, copy = parse_to(args, kwargs)
    here, dtype = logits.device, dtype or logits.dtype
    # Another device, or an integer dtype: the logits are needed.
    if device is not None and (device.type != here.type or device.index not in (None, here.index)):
        return None
    if not dtype.is_floating_point:
        return None
    return (
        logits
        if dtype == logits.dtype and not copy
        else logits.derived(logits.infinity_inputs[0], dtype)
    )


def _index(
    _func: Any, logits: DeferredLogits, args: tuple[Any, ...], _kwargs: dict[str, Any]
) -> Any:
    index = args[0] if isinstance(args[0], tuple) else (args[0],)
    whole = slice(None)
    if not index:
        return None
    if any(item is Ellipsis for item in index):
        leaves_rows = isinstance(index[-1], slice) and index[-1] == whole
    else:
        simple = all(isinstance(item, (int, slice)) for item in index[:-1])
        last = index[-1]
        consumed = (
            # A bool mask consumes as many dimensions as it has.
            len(index)
            - 1
            + (last.dim() if isinstance(last, torch.Tensor) and last.dtype == torch.bool else 1)
        )
        is_whole = isinstance(last, slice) and last == whole
        leaves_rows = (
            simple
            and last is not None
            and (consumed < logits.dim() or (consumed == logits.dim() and is_whole))
        )
    if not leaves_rows:
        return None
    # Indexing by a tensor copies: writes to the result do not reach the logits.
    is_view = all(item is None or item is Ellipsis or type(item) in (int, slice) for item in index)
    return logits.derived(
        logits.infinity_inputs[0][args[0]], view=(lambda full: full[args[0]]) if is_view else None
    )


def _view(func: Any, logits: DeferredLogits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    # Run the operation on the meta device: torch computes the shape, and raises its own error for
    # an impossible one.
    made = func(torch.empty(logits.shape, dtype=logits.dtype, device="meta"), *args, **kwargs)
    shape = made.shape
    if not shape or shape[-1] != logits.shape[-1] or made.dtype != logits.dtype:
        return None
    hidden = logits.infinity_inputs[0]
    return logits.derived(
        hidden.reshape(*shape[:-1], hidden.shape[-1]), view=lambda full: func(full, *args, **kwargs)
    )


def _cross_entropy(
    _func: Any, logits: DeferredLogits, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> torch.Tensor | None:
    names = (
        "target",
        "weight",
        "size_average",
        "ignore_index",
        "reduce",
        "reduction",
        "label_smoothing",
    )
    given = dict(zip(names, args, strict=False)) | kwargs
    target = given["target"]
    # Class probabilities, weights and the old reductions are not computed in tiles.
    if (
        logits.dim() > 2
        or target.is_floating_point()
        or any(given.get(name) is not None for name in names[1:3] + names[4:5])
    ):
        return None
    settings = Settings(
        logits.shape[-1],
        given.get("ignore_index", -100),
        given.get("label_smoothing", 0.0),
        given.get("reduction", "mean"),
    )
    logits.check_unchanged()
    with torch.set_grad_enabled(torch.is_grad_enabled() and logits._graph):
        # The hidden states already have the compute dtype: autocast was applied when the head ran.
        loss = head_loss(logits._head, logits.infinity_inputs[0], target, settings, cast=False)
        # Under autocast torch's loss is always fp32.
        return loss if torch.is_autocast_enabled(logits.device.type) else loss.to(logits.dtype)


_HANDLERS: dict[Any, Handler] = {
    functional.cross_entropy: _cross_entropy,
    _TENSOR.__getitem__: _index,
    _TENSOR.contiguous: _contiguous,
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
    """Return the number of tiles of at most about `tile` classes that a vocabulary needs."""
    return max(1, math.ceil(vocabulary / tile))


def as_head(linear: TiledLinear) -> TiledHead:
    """Make a TiledHead of the same tiles. Raises: ValueError for several tiles along the inputs."""
    head_rows(linear)
    made = TiledHead.of_tiles(linear.tile_parameters(), linear.grid, linear.bias)
    made.train(linear.training)
    assert isinstance(made, TiledHead)
    return made


def find_head(model: nn.Module) -> nn.Module | None:
    """Return the head of a Hugging Face model, by `get_output_embeddings`; else None."""
    getter = getattr(model, "get_output_embeddings", None)
    found = getter() if callable(getter) else None
    return found if isinstance(found, nn.Module) else None
