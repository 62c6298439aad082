"""Losses of routers (`output_router_logits` of transformers): of each slice by itself, as of a
micro-batch.

The model's forward runs once for the whole batch, without them. Then it is replayed for each slice:
its own code computes the losses of routers, and adds them to the loss of the slice, from the logits
of the slice's routers and the slice's arguments.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from infinity._src.microbatch.collected_outputs import FLAG
from infinity._src.microbatch.replay import Record, Replay, Unneeded
from infinity._src.microbatch.rows import like_dict
from infinity._src.microbatch.slicing import Run, batch_of, loss_of_batch
from infinity.errors import SlicesError


def with_router_losses(
    run: Run,
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    owner: str,
    names: Sequence[str],
) -> Any:
    """Call a model's forward, which has `FLAG` among its arguments, with that on. Returns its
    output: `loss` and the losses of routers are those of the slices, put together as
    `loss_of_batch` says.

    names: of the positional arguments. Raises: SlicesError for a model whose losses are of anything
    but the logits of routers and its `loss_function`.
    """
    record, before = Record(), run.record
    run.record = record
    try:
        args_off, kwargs_off = _flagged(names, args, kwargs, on=False)
        output = forward(*args_off, **kwargs_off)
    finally:
        run.record = before
    if not (isinstance(output, dict) and dataclasses.is_dataclass(output)):
        raise SlicesError(
            f"{owner}: its output is a {type(output).__name__}; {FLAG} goes with return_dict=True "
            "under inf.microbatched"
        )
    losses_of_routers = [
        field.name for field in dataclasses.fields(output) if field.name.endswith("_loss")
    ]
    if not losses_of_routers:
        return output
    pieces = run.cut(
        *_flagged(names, args, kwargs, on=True),
        owner=owner,
        names=names,
        first=batch_of(owner, args, kwargs),
        any_object=True,
    )
    found = []
    for index, (slice_args, slice_kwargs) in enumerate(pieces):
        try:
            with run.slicing.replay_of(Replay(record, index)):
                found.append(forward(*slice_args, **slice_kwargs))
        except TypeError as error:
            # Of a stand-in: with tensors the same code has run for the whole batch.
            raise _refusal(owner, "its loss", "computed of more than that") from error
    totals = {}
    for name in ("loss", *losses_of_routers):
        losses = [getattr(each, name) for each in found]
        if any(loss is not None for loss in losses):
            _check(losses, owner, name)
            totals[name] = loss_of_batch(run, losses, kwargs)
    return like_dict(output, {**output, **totals})


def _flagged(
    names: Sequence[str], args: tuple[Any, ...], kwargs: dict[str, Any], *, on: bool
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    place = names.index(FLAG)
    if place < len(args):
        return (*args[:place], on, *args[place + 1 :]), kwargs
    return args, {**kwargs, FLAG: on}


def _check(losses: Sequence[Any], owner: str, name: str) -> None:
    for loss in losses:
        if isinstance(loss, Unneeded):
            raise _refusal(
                owner,
                f"its {name}",
                "not computed of its loss_function and of logits of routers inside of blocks alone",
            )
        if not isinstance(loss, torch.Tensor) or loss.dim():
            raise _refusal(owner, f"its {name}", f"a {type(loss).__name__}, and no scalar tensor")


def _refusal(owner: str, what: str, reason: str) -> SlicesError:
    return SlicesError(
        f"{owner}: with {FLAG} {what} is {reason}, and inf.microbatched cannot compute it for each "
        f"slice; set config.{FLAG}=False in training"
    )
