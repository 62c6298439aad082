"""Logits and loss of a batch in slices: those of one slice exist at a time.

    head(hidden)               SlicedLogits: nothing is computed
    loss_function(logits, ..)  for each slice: head, loss; checkpointed, so that backward computes
                               the logits of a slice again
    any other use              the logits of all rows, in full

The losses of the slices are added up (`loss_of_batch`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from infinity._src._torch_compat import (
    METADATA,
    DisableTorchFunctionSubclass,
    make_wrapper,
    version_of,
)
from infinity._src.kernels.tiling.deferred_logits import UncomputedLogits
from infinity._src.microbatch.rows import mapped, tensors_in
from infinity._src.microbatch.slicing import Run, loss_of_batch
from infinity._src.sizes import format_size

log = logging.getLogger("infinity")

_TENSOR: Any = torch.Tensor

_OF_THE_GRAPH = frozenset(
    getattr(torch.Tensor, name).__get__
    for name in ("requires_grad", "grad_fn", "is_leaf", "grad", "output_nr", "_version")
)
"""Questions of metadata that the computed logits answer."""

HEAD_CALL = "infinity_call"
"""Keyword of a head's forward: a function that gets the plain forward, and is called instead."""


class SlicedLogits(UncomputedLogits):
    """Logits [rows, ..., vocabulary] of a head for hidden states [rows, ..., features], computed
    when somebody uses them other than in the loss of a model.

    Until then neither the hidden states nor the head's weights may be written to: that is an error.
    """

    # `infinity_inputs`: the hidden states.
    _head: nn.Module
    _run: Run
    _versions: list[int]
    _autocast: tuple[bool, torch.dtype]
    _computed: torch.Tensor | None
    _said: bool

    @staticmethod
    def __new__(  # noqa: PYI034
        cls, head: nn.Module, hidden: torch.Tensor, run: Run
    ) -> SlicedLogits:
        """Make the logits of `head`, a linear, for `hidden`."""
        device = hidden.device.type
        enabled, dtype = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
        features: Any = head.out_features
        shape = torch.Size((*hidden.shape[:-1], features))
        cast = enabled and hidden.dtype != torch.float64
        made = make_wrapper(cls, shape, dtype if cast else hidden.dtype, hidden.device, False)
        assert isinstance(made, SlicedLogits)
        made._head, made.infinity_inputs, made._run = head, (hidden,), run
        made._autocast, made._versions = (enabled, dtype), _versions(head, hidden)
        made._computed, made._said = None, False
        return made

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        pass

    def in_head(self, compute: Callable[[Callable[..., Any]], Any]) -> Any:
        """Return `compute(forward)` with the head's plain forward, inside a call of the head: so
        its hooks see one call.

        Raises: RuntimeError where these would not be the logits of when the head was called.
        """
        if _versions(self._head, self.infinity_inputs[0]) != self._versions:
            raise RuntimeError(
                "logits of a microbatched model are computed when they are used, and the head's "
                "weights or its input have been modified in place since (by an optimizer's step?): "
                "use them before, or keep `logits.clone()`"
            )
        return self._head(self.infinity_inputs[0], **{HEAD_CALL: compute})

    def compute(self, what: str = "an operation") -> torch.Tensor:  # noqa: ARG002 - of the base
        """Compute the logits of all rows as an ordinary tensor, once."""
        made = self._computed
        # Computed under no_grad, and wanted with a graph now: once more.
        if made is None or (torch.is_grad_enabled() and not made.requires_grad):
            run, hidden = self._run, self.infinity_inputs[0]

            def compute(forward: Callable[..., Any]) -> Any:
                pieces = run.cut((hidden,), {}, owner="the head")
                outputs = run.outputs(
                    forward, pieces, device=hidden.device, checkpointed=False, owner="the head"
                )
                return run.join(outputs, "the head")

            if torch.is_grad_enabled() and not self._said:
                self._said = True
                log.warning(
                    "the logits of a microbatched model are used outside of its loss: they are "
                    "computed in full (%s)",
                    format_size(self.numel() * self.element_size()),
                )
            enabled, dtype = self._autocast
            with torch.autocast(hidden.device.type, dtype, enabled):
                made = self.in_head(compute)
            assert isinstance(made, torch.Tensor)
            self._computed = made
        return made

    @classmethod
    def __torch_function__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Answer metadata; for any other operation, compute the logits."""
        kwargs = kwargs or {}
        if func in METADATA and func not in _OF_THE_GRAPH:
            with DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        return func(*mapped(args, _computed), **mapped(kwargs, _computed))


def _computed(value: Any) -> Any:
    return value.compute() if isinstance(value, SlicedLogits) else value


def _versions(head: nn.Module, hidden: torch.Tensor) -> list[int]:
    """Return version counters that change when the logits do."""
    found = [version_of(hidden)]
    for param in head.parameters():
        # An offloaded parameter has its own counter: its storage comes and goes.
        own: int | None = getattr(param, "infinity_version", None)
        found.append(version_of(param) if own is None else own)
    return found


class _Logits:
    """Place of a slice's logits among the arguments of a loss."""


_LOGITS = _Logits()


def sliced_loss(run: Run, function: Callable[..., Any], *args: Any, **kwargs: Any) -> torch.Tensor:
    """Compute the loss of a batch slice by slice: `function(*args, **kwargs)` with the rows of each
    slice. Returns `loss_of_batch` of them.

    Raises: ValueError for a function that returns no scalar.
    """
    deferred: list[SlicedLogits] = []

    def place(leaf: Any) -> Any:
        if not isinstance(leaf, SlicedLogits):
            return leaf
        deferred.append(leaf)
        return _LOGITS

    places = mapped((args, kwargs), place)
    if deferred:
        logits = deferred[0]
        losses = logits.in_head(lambda head: _losses_of_head(run, head, function, logits, places))
    else:
        first = next(tensors_in([args, kwargs]))
        pieces = run.cut(args, kwargs, owner="the loss", any_object=True)
        losses = run.outputs(
            function, pieces, device=first.device, checkpointed=True, owner="the loss"
        )
    for loss in losses:
        if not isinstance(loss, torch.Tensor) or loss.dim():
            raise ValueError(
                f"the loss of a slice is a {type(loss).__name__}, and no scalar tensor: under "
                "inf.microbatched the model's loss_function returns one"
            )
    if run.record is not None:
        run.record.losses.append(losses)
    return loss_of_batch(run, losses, kwargs)


def _losses_of_head(
    run: Run,
    head: Callable[..., Any],
    function: Callable[..., Any],
    logits: SlicedLogits,
    places: tuple[tuple[Any, ...], dict[str, Any]],
) -> list[Any]:
    """Compute head and loss for each slice.

    places: the loss's arguments, with `_LOGITS` for the logits.
    """

    def loss_of(hidden: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        computed = head(hidden)
        filled_args, filled_kwargs = mapped(
            (args, kwargs), lambda leaf: computed if leaf is _LOGITS else leaf
        )
        return function(*filled_args, **filled_kwargs)

    hidden = logits.infinity_inputs[0]
    pieces = run.cut((hidden, *places), {}, owner="the loss", any_object=True)
    return run.outputs(loss_of, pieces, device=hidden.device, checkpointed=True, owner="the loss")
