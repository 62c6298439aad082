"""Logits and loss of a batch in slices: the logits of one slice exist at a time.

    head(hidden)               returns SlicedLogits, and computes nothing
    loss_function(logits, ..)  for each slice: head, loss; checkpointed, so that backward recomputes
                               the logits of a slice
    any other use              computes the logits of all rows, in full
    a write                    the same; the loss then reads the written logits

`loss_of_batch` adds up the losses of the slices.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from infinity._src.base.sizes import format_size
from infinity._src.base.torch_compat import (
    METADATA,
    DisableTorchFunctionSubclass,
    make_wrapper,
    version_of,
)
from infinity._src.kernels.tiling.deferred_logits import (
    OF_THE_GRAPH,
    UncomputedLogits,
    of_the_graph,
    settle_written,
)
from infinity._src.microbatch.replay import UNNEEDED
from infinity._src.microbatch.rows import mapped, tensors_in
from infinity._src.microbatch.slicing import Run, loss_of_batch
from infinity.errors import SlicesError

log = logging.getLogger("infinity")

HEAD_CALL = "infinity_call"
"""Keyword of a head's forward: a function to call instead, with the plain forward as argument."""


class SlicedLogits(UncomputedLogits):
    """Logits [rows, ..., vocabulary] of a head for hidden states [rows, ..., features], computed
    when a use other than the model's loss needs them.

    If the hidden states or the head's weights were written before that, the use raises
    RuntimeError.
    """

    _run: Run
    _versions: list[int]
    _autocast: tuple[bool, torch.dtype]

    @staticmethod
    def __new__(  # noqa: PYI034
        cls, head: nn.Module, hidden: torch.Tensor, run: Run
    ) -> SlicedLogits:
        device = hidden.device.type
        enabled, dtype = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
        features: Any = head.out_features
        shape = torch.Size((*hidden.shape[:-1], features))
        cast = enabled and hidden.dtype != torch.float64
        made = make_wrapper(cls, shape, dtype if cast else hidden.dtype, hidden.device, False)
        assert isinstance(made, SlicedLogits)
        made._begin(head, hidden)
        made._run, made._versions = run, _versions(head, hidden)
        made._autocast = (enabled, dtype)
        return made

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        pass

    def in_head(self, compute: Callable[[Callable[..., Any]], Any]) -> Any:
        """Return `compute(forward)` with the head's plain forward, inside a call of the head, so
        that its hooks see one call.

        Raises: RuntimeError if hidden states or weights were written since the head was called.
        """
        if _versions(self._head, self.infinity_inputs[0]) != self._versions:
            raise RuntimeError(
                "logits of a microbatched model are computed when they are used, but the head's "
                "weights or its input have been modified in place since the forward (by an "
                "optimizer's step?): use the logits, or make a `logits.clone()`, before that; on "
                "several ranks all ranks must do so, because the head gathers its weights"
            )
        return self._head(self.infinity_inputs[0], **{HEAD_CALL: compute})

    def autocast(self) -> torch.autocast:
        enabled, dtype = self._autocast
        return torch.autocast(self.infinity_inputs[0].device.type, dtype, enabled)

    def _compute_anew(self, what: str) -> torch.Tensor:
        run, hidden = self._run, self.infinity_inputs[0]

        def compute(forward: Callable[..., Any]) -> Any:
            pieces = run.cut((hidden,), {}, owner="the head", first=hidden)
            outputs = run.outputs(
                forward,
                pieces,
                given=hidden,
                device=hidden.device,
                checkpointed=False,
                owner="the head",
            )
            return run.join(outputs, "the head")

        # Warn once for each model: a training loop would repeat the warning every step.
        if torch.is_grad_enabled() and run.slicing.first_time("logits"):
            log.warning(
                "the logits of a microbatched model are used outside of its loss (%s): they are "
                "computed in full (%s)",
                what,
                format_size(self.numel() * self.element_size()),
            )
        with self.autocast():
            made: Any = self.in_head(compute)
        assert isinstance(made, torch.Tensor)
        return made

    @classmethod
    def __torch_function__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Return metadata; any other operation computes the logits."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", str(func))
        logits = args[0] if args and isinstance(args[0], SlicedLogits) else None
        if logits is not None and func in OF_THE_GRAPH:
            return of_the_graph(func, logits, args[1:])
        if func in METADATA:
            with DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        settle_written(func, args, kwargs)

        def computed(leaf: Any) -> Any:
            return leaf.compute(name) if isinstance(leaf, SlicedLogits) else leaf

        return func(*mapped(args, computed), **mapped(kwargs, computed))


def _versions(head: nn.Module, hidden: torch.Tensor) -> list[int]:
    """Return version counters that change when a write changes the logits."""
    found = [version_of(hidden)]
    for param in head.parameters():
        # An offloaded parameter has a separate count of writes to its values: gathering and
        # releasing replace the storage.
        own: int | None = getattr(param, "infinity_version", None)
        found.append(version_of(param) if own is None else own)
    return found


class _Logits:
    """Placeholder of a slice's logits among the arguments of a loss."""


_LOGITS = _Logits()


def sliced_loss(run: Run, function: Callable[..., Any], *args: Any, **kwargs: Any) -> torch.Tensor:
    """Return the loss of a batch: `loss_of_batch` of `function(*args, **kwargs)` with the rows of
    each slice.

    Raises: SlicesError for a function that returns no scalar.
    """
    deferred: list[SlicedLogits] = []

    def place(leaf: Any) -> Any:
        # Materialized logits are an ordinary tensor. Of several SlicedLogits only the first is
        # computed slice by slice.
        if not isinstance(leaf, SlicedLogits) or leaf.is_materialized():
            return leaf
        deferred.append(leaf)
        return _LOGITS if leaf is deferred[0] else leaf.compute("a loss")

    places = mapped((args, kwargs), place)
    if deferred:
        losses = _losses_of_head(run, function, deferred[0], *places)
    else:
        pieces = run.cut_of_loss(function, args, kwargs)
        if run.count > 1 and not _differ(pieces):
            # No argument has rows (logits of masked tokens alone): one loss, of the whole batch.
            whole: torch.Tensor = function(*args, **kwargs)
            if run.record is not None:
                # No slice has a loss.
                run.record.losses.append([UNNEEDED] * run.count)
            return whole
        first = next(tensors_in([args, kwargs]))
        losses = run.outputs(
            function,
            pieces,
            given=(args, kwargs),
            device=first.device,
            checkpointed=True,
            owner="the loss",
        )
    for loss in losses:
        if not isinstance(loss, torch.Tensor) or loss.dim():
            raise SlicesError(
                f"the loss of a slice is a {type(loss).__name__}, not a scalar tensor: under "
                "inf.microbatched the model's loss_function must return a scalar tensor"
            )
    if run.record is not None:
        run.record.losses.append(losses)
    return loss_of_batch(run, losses, kwargs)


def _differ(pieces: Sequence[Any]) -> bool:
    """Return whether the first and the last slice get different tensors."""
    mine, others = (list(tensors_in(list(piece))) for piece in (pieces[0], pieces[-1]))
    return len(mine) != len(others) or any(map(operator.is_not, mine, others))


def _losses_of_head(
    run: Run,
    function: Callable[..., Any],
    logits: SlicedLogits,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> list[Any]:
    """Compute head and loss for each slice.

    args, kwargs: of the loss, with `_LOGITS` for the logits.
    """
    hidden = logits.infinity_inputs[0]

    def losses(head: Callable[..., Any]) -> list[Any]:
        def loss_of(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            with logits.autocast():
                computed = head(hidden)
            filled_args, filled_kwargs = mapped(
                (args, kwargs), lambda leaf: computed if leaf is _LOGITS else leaf
            )
            return function(*filled_args, **filled_kwargs)

        pieces = run.cut_of_loss(function, args, kwargs, hidden=hidden, classes=logits.shape[-1])
        return run.outputs(
            loss_of,
            pieces,
            given=(args, kwargs),
            device=hidden.device,
            checkpointed=True,
            owner="the loss",
        )

    computed: list[Any] = logits.in_head(losses)
    return computed
