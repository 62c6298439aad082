"""Modules that run in slices. A module stays the object that it is; its class becomes a subclass of
its class, of the same name, whose forward is that of its role:

    AROUND   a module with sliced modules inside: begins the forward; its own code sees the batch
    BLOCK    runs slice by slice, each checkpointed
    PART     an embedding, a norm: as a block, checkpointed where its input has a gradient
    HEAD     a linear that makes logits: with the model's loss, one slice of both at a time

Without gradients (`torch.no_grad`) a module runs as ever, caches and `generate` included.
"""

from __future__ import annotations

import enum
import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from infinity._src._torch_compat import dynamo_disable
from infinity._src.microbatch.collected_logits import (
    FLAG,
    asks_for_router_logits,
    can_be_told_apart,
)
from infinity._src.microbatch.replay import UNNEEDED
from infinity._src.microbatch.router_losses import with_router_losses
from infinity._src.microbatch.sliced_logits import HEAD_CALL, SlicedLogits, sliced_loss
from infinity._src.microbatch.slicing import Run, Slicing, argument_names

NAME = "_infinity_name"
"""Attribute of a sliced module: its name in the model."""


class Role(enum.Enum):
    """Role of a module in a forward in slices."""

    AROUND = "around"
    BLOCK = "block"
    PART = "part"
    HEAD = "head"


class SlicedModule:
    """Base of the classes that `sliced_class` makes."""

    _infinity_base: type[nn.Module]
    _infinity_role: Role
    _infinity_slicing: Slicing

    def __init_subclass__(cls, **_kwargs: Any) -> None:
        """Stop here: classes of transformers would wrap the forward in a checkpoint of their own,
        around all slices."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copy and pickle by the class that the module had."""
        kind = type(self)
        made_of = (kind._infinity_base, kind._infinity_role, kind._infinity_slicing)
        return _made, made_of, self.__dict__


def _made(base: type[nn.Module], role: Role, slicing: Slicing) -> Any:
    kind: Any = sliced_class(base, role, slicing)
    return kind.__new__(kind)


def slice_module(module: nn.Module, role: Role, slicing: Slicing, name: str) -> None:
    """Have a module run in slices, in place."""
    module.__dict__[NAME] = name
    module.__class__ = sliced_class(type(module), role, slicing)


def sliced_class(base: type[nn.Module], role: Role, slicing: Slicing) -> type[nn.Module]:
    """Make the class of modules of class `base` in a role, once for each model."""
    known = slicing.classes.get((base, role))
    if known is not None:
        return known
    body: dict[str, Any] = {
        # Blocks are found, and outputs recorded, by the name of the class.
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        "_infinity_base": base,
        "_infinity_role": role,
        "_infinity_slicing": slicing,
        "forward": _forward_around(base) if role is Role.AROUND else _forward_inside(base, role),
        "__call__": _call(base, role),
    }
    loss = inspect.getattr_static(base, "loss_function", None)
    if isinstance(loss, property):
        body["loss_function"] = _loss_property(loss)
    made: type[nn.Module] = type(base.__name__, (SlicedModule, base), body)
    slicing.classes[base, role] = made
    return made


def _slicing(module: nn.Module) -> Slicing:
    kind: Any = type(module)
    found: Slicing = kind._infinity_slicing
    return found


def _name(module: nn.Module) -> str:
    return module.__dict__[NAME] or type(module).__name__


def _forward_inside(base: type[nn.Module], role: Role) -> Callable[..., Any]:
    plain: Any = base.forward
    names = argument_names(plain)

    @functools.wraps(plain)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        bound = functools.partial(plain, self)
        # Only `SlicedLogits.in_head` gives it, to a head.
        instead = kwargs.pop(HEAD_CALL, None)
        if instead is not None:
            return instead(bound)
        slicing = _slicing(self)
        # A tiled loss computes "instead" of a linear, and has its own way with rows.
        if slicing.inside or kwargs.get("instead") is not None:
            return bound(*args, **kwargs)
        # In a forward in slices a block may be without gradients: a checkpoint around it computes
        # it again, and in slices, too.
        if not torch.is_grad_enabled() and slicing.run is None:
            return bound(*args, **kwargs)
        with slicing.forward(_name(self), args, kwargs) as run:
            return run.call(
                bound,
                args,
                kwargs,
                owner=_name(self),
                names=names,
                is_block=role is Role.BLOCK,
                # A linear keeps its input alone.
                checkpointed=role is not Role.HEAD,
            )

    return forward


def _call(base: type[nn.Module], role: Role) -> Callable[..., Any]:
    plain: Any = base.__call__

    @functools.wraps(plain)
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if role is Role.AROUND and torch.compiler.is_compiling():
            return _compiled(plain, self, args, kwargs)
        slicing = _slicing(self)
        # Before the hooks: nothing is computed, and what they gather is not needed.
        if slicing.replay is not None:
            return slicing.replay.output(self) if role is Role.AROUND else UNNEEDED
        run = slicing.run
        if role is Role.HEAD and run is not None and run.defers and not kwargs and len(args) == 1:
            hidden = args[0]
            if type(hidden) is torch.Tensor and hidden.dim() > 1 and len(hidden) == run.rows:
                return SlicedLogits(self, hidden, run)
        output = plain(self, *args, **kwargs)
        if role is Role.AROUND and run is not None and run.record is not None:
            run.record.add_output(self, output)
        return output

    return call


def _forward_around(base: type[nn.Module]) -> Callable[..., Any]:
    plain: Any = base.forward
    names = argument_names(plain)
    has_loss = isinstance(inspect.getattr_static(base, "loss_function", None), property)

    @functools.wraps(plain)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return _compiled(plain, self, args, kwargs)
        slicing = _slicing(self)
        if slicing.inside or not torch.is_grad_enabled():
            return plain(self, *args, **kwargs)
        kwargs = _without_cache(self, names, args, kwargs)
        with slicing.forward(_name(self), args, kwargs) as run:
            if run.record is not None and FLAG in kwargs:
                # The model around has it off, and computes the losses of its routers in a replay.
                kwargs = {**kwargs, FLAG: True}
            collects = _check_outputs(self, kwargs)
            before = run.defers
            run.defers = before or (has_loss and kwargs.get("labels") is not None)
            try:
                bound = functools.partial(plain, self)
                if collects and has_loss and FLAG in names:
                    return with_router_losses(
                        run, bound, args, kwargs, owner=_name(self), names=names
                    )
                return bound(*args, **kwargs)
            finally:
                run.defers = before

    return forward


def _compiled(
    plain: Callable[..., Any], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    if torch.is_grad_enabled():
        _refuse_to_compile(_name(module))
    return plain(module, *args, **kwargs)


@dynamo_disable
def _refuse_to_compile(owner: str) -> None:
    """Raise when what was compiled runs: an error of tracing would have it run as it is."""
    raise ValueError(
        f"{owner}: a microbatched model is not compiled as a whole, since slices are checkpointed "
        "and draw from streams of their own: compile its blocks, each with block.compile()"
    )


def _loss_property(loss: property) -> property:
    def loss_function(self: Any) -> Any:
        assert loss.fget is not None
        slicing = _slicing(self)
        if slicing.replay is not None:
            return slicing.replay.loss
        function = loss.fget(self)
        run: Run | None = slicing.run
        return function if run is None else functools.partial(sliced_loss, run, function)

    return property(loss_function, loss.fset, loss.fdel)


def _check_outputs(module: nn.Module, kwargs: dict[str, Any]) -> bool:
    """Return whether the logits of routers are wanted.

    Raises: ValueError for outputs that a model would put together wrongly.
    """
    config = getattr(module, "config", None)
    attentions = kwargs.get("output_attentions")
    if attentions or (attentions is None and getattr(config, "output_attentions", False)):
        raise ValueError(
            f"{_name(module)}: output_attentions is on, and the model collects these once for each "
            "call inside of a block: inf.microbatched calls a block once for each slice; set "
            "config.output_attentions=False in training"
        )
    wanted = asks_for_router_logits(config, kwargs)
    if wanted and not can_be_told_apart():
        raise ValueError(
            f"{_name(module)}: {FLAG} is on, and the installed transformers collects the logits of "
            "routers in a way that inf.microbatched does not know; install transformers 5.23, or "
            f"set config.{FLAG}=False in training"
        )
    return wanted


def _without_cache(
    module: nn.Module, names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Return the arguments with `use_cache=False`, where the forward has it: a cache would mix the
    rows of slices.

    Raises: ValueError for a cache that the caller asks for.
    """
    asked = [name for name in ("use_cache", "past_key_values") if kwargs.get(name)]
    if asked or kwargs.get("past_key_values") is not None:
        name = asked[0] if asked else "past_key_values"
        raise ValueError(
            f"{_name(module)}: {name} with gradients: slices of a batch cannot share a cache; "
            f"leave {name} out, or run under torch.no_grad()"
        )
    if "use_cache" in names and names.index("use_cache") >= len(args):
        return {**kwargs, "use_cache": False}
    return kwargs
