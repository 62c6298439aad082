"""Modules that run in slices. A sliced module stays the same object; its class is replaced by a
subclass of the same name, whose forward depends on the module's role:

    AROUND   a module with sliced modules inside: begins the forward; its code sees the batch
    BLOCK    runs slice by slice; each slice is checkpointed, unless `checkpoint=False`
    PART     an embedding, a norm: as a block, but checkpointed only if an input has a gradient
    HEAD     a linear that makes logits: with the model's loss, one slice of both at a time

Without gradients (`torch.no_grad`) a model runs unchanged, caches and `generate` included. Inside a
forward with gradients, a part that runs without gradients also runs in slices.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from infinity._src.base.torch_compat import dynamo_disable, hooks_of
from infinity._src.microbatch.collected_outputs import (
    ATTENTIONS,
    FLAG,
    asks_for,
    can_be_told_apart,
)
from infinity._src.microbatch.replay import UNNEEDED, Record, Replay, Unneeded
from infinity._src.microbatch.rows import like_dict
from infinity._src.microbatch.sliced_logits import HEAD_CALL, SlicedLogits, sliced_loss
from infinity._src.microbatch.slicing import Run, Slicing, argument_names, batch_of, loss_of_batch
from infinity._src.params.discover import RunsInSlices
from infinity._src.params.unit import EngineHook
from infinity.errors import SlicesError

NAME = "_infinity_name"
"""Attribute of a sliced module: its name in the model."""

_DROPOUTS: tuple[type, ...] = (
    *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d),
    *(nn.AlphaDropout, nn.FeatureAlphaDropout),
)

_NEVER_CALLED = (nn.ParameterList, nn.ParameterDict)

_OWN = "_infinity_forward"
"""Attribute of a sliced module: the forward that the instance had in place of its class's."""


class Role(enum.Enum):
    """Role of a module in a forward in slices."""

    AROUND = "around"
    BLOCK = "block"
    PART = "part"
    HEAD = "head"


class SlicedModule:
    """Base of the classes that `sliced_class` makes. Except for the role AROUND these also derive
    from `RunsInSlices`, by which the engine recognizes them."""

    _infinity_base: type[nn.Module]
    _infinity_role: Role
    _infinity_slicing: Slicing

    def __init_subclass__(cls, **_kwargs: Any) -> None:
        """Do not call the base classes' method: classes of transformers would wrap the forward in
        another checkpoint, around all slices."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Return an instance of the original class: `type(model)(config)` is a plain model."""
        return cls._infinity_base(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copy and pickle by the original class, the role and the slicing, since the subclass
        cannot be imported. The copy is sliced, too."""
        kind = type(self)
        made_of = (kind._infinity_base, kind._infinity_role, kind._infinity_slicing)
        return _made, made_of, self.__dict__


def _made(base: type[nn.Module], role: Role, slicing: Slicing) -> Any:
    return base.__new__(sliced_class(base, role, slicing))


def is_worth_it(module: nn.Module) -> bool:
    """Return whether a module itself has parameters or is a dropout: only then do slices matter."""
    held = any(param is not None for param in module._parameters.values())
    return held or isinstance(module, _DROPOUTS)


def _refuse_new(module: nn.Module, prefix: str) -> None:
    """Raise SlicesError for a module that was added after `inf.microbatched`: it would run once for
    the batch. prefix: what the names of modules inside of `module` begin with."""
    for name, child in module.named_children():
        role = type(child)._infinity_role if isinstance(child, SlicedModule) else None
        if role is None and is_worth_it(child) and not isinstance(child, _NEVER_CALLED):
            raise SlicesError(
                f"{prefix}{name}, a {type(child).__name__}, was put into the model after "
                "inf.microbatched, and would run once for all slices; call inf.microbatched after "
                "all changes of the model (adapters of peft, another head)"
            )
        if role in (None, Role.AROUND):
            _refuse_new(child, f"{prefix}{name}.")


def slice_module(module: nn.Module, role: Role, slicing: Slicing, name: str) -> None:
    """Have a module run in slices, in place."""
    module.__dict__[NAME] = name
    if "forward" in module.__dict__:
        module.__dict__[_OWN] = module.__dict__.pop("forward")
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
    marks = () if role is Role.AROUND else (RunsInSlices,)
    made: type[nn.Module] = type(base.__name__, (SlicedModule, *marks, base), body)
    slicing.classes[base, role] = made
    return made


def _slicing(module: nn.Module) -> Slicing:
    kind: Any = type(module)
    found: Slicing = kind._infinity_slicing
    return found


def _name(module: nn.Module) -> str:
    return module.__dict__[NAME] or type(module).__name__


def _plain(module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return the module's plain forward, bound. forward: the forward of the module's original
    class."""
    own: Callable[..., Any] | None = module.__dict__.get(_OWN)
    return functools.partial(forward, module) if own is None else own


def _names(
    module: nn.Module, forward: Callable[..., Any], names: tuple[str, ...]
) -> tuple[str, ...]:
    """Return the names of the positional arguments of `forward`, a result of `_plain`. names: the
    names for the forward of the module's original class."""
    return argument_names(forward, bound=True) if _OWN in module.__dict__ else names


def _forward_inside(base: type[nn.Module], role: Role) -> Callable[..., Any]:
    plain: Any = base.forward
    names = argument_names(plain, bound=False)

    @functools.wraps(plain)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        bound, slicing = _plain(self, plain), _slicing(self)
        # Only `SlicedLogits.in_head` passes this keyword, to a head.
        instead = kwargs.pop(HEAD_CALL, None)
        if instead is not None:
            with slicing.effects_of(self).refused(_name(self), several=False, again=False):
                return instead(bound)
        # A tiled loss passes `instead=` to its head, and handles all rows itself.
        if slicing.is_plain or kwargs.get("instead") is not None:
            return bound(*args, **kwargs)
        with slicing.forward(_name(self), args, kwargs) as run:
            return run.call(
                bound,
                args,
                kwargs,
                module=self,
                owner=_name(self),
                names=_names(self, bound, names),
                is_block=role is Role.BLOCK,
                # A linear saves only its input, so a checkpoint would save no memory.
                checkpointed=role is not Role.HEAD,
            )

    return forward


def _call(base: type[nn.Module], role: Role) -> Callable[..., Any]:
    plain: Any = base.__call__

    @functools.wraps(plain)
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if role is Role.AROUND and torch.compiler.is_compiling():
            return _compiled(self, functools.partial(plain, self), args, kwargs)
        slicing = _slicing(self)
        # Return before hooks run: a replay computes nothing, so hooks need not gather.
        if slicing.replay is not None:
            return slicing.replay.output(self) if role is Role.AROUND else UNNEEDED
        run = slicing.run
        if role is Role.HEAD and run is not None and not kwargs and _defers(run, self, args):
            return SlicedLogits(self, args[0], run)
        output = plain(self, *args, **kwargs)
        if role is Role.AROUND and run is not None and run.record is not None:
            run.record.add_output(self, output)
        return output

    return call


def _defers(run: Run, head: nn.Module, args: tuple[Any, ...]) -> bool:
    """Return whether a head returns logits that are computed when they are used. Not with hooks of
    users, which read the logits or change the head's input."""
    if not run.defers or not torch.is_grad_enabled() or len(args) != 1 or _is_hooked(head):
        return False
    hidden = args[0]
    return type(hidden) is torch.Tensor and hidden.dim() > 1 and len(hidden) == run.rows


def _is_hooked(module: nn.Module) -> bool:
    """Return whether a module has hooks of users, not only of the engine."""
    return any(not isinstance(hook, EngineHook) for hook in hooks_of(module))


def _forward_around(base: type[nn.Module]) -> Callable[..., Any]:
    plain: Any = base.forward
    names_of_class = argument_names(plain, bound=False)
    has_loss = isinstance(inspect.getattr_static(base, "loss_function", None), property)

    @functools.wraps(plain)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        bound, slicing = _plain(self, plain), _slicing(self)
        if torch.compiler.is_compiling():
            return _compiled(self, bound, args, kwargs)
        if slicing.is_plain:
            return bound(*args, **kwargs)
        if _cache_asked(kwargs) and not torch.is_grad_enabled():
            # The model generates, without gradients, inside of a forward with gradients.
            with slicing.slice():
                return bound(*args, **kwargs)
        if slicing.run is None:
            _refuse_new(self, f"{self.__dict__[NAME]}." if self.__dict__[NAME] else "")
        names = _names(self, bound, names_of_class)
        kwargs = _without_cache(self, names, args, kwargs, inside=slicing.run is not None)
        with slicing.forward(_name(self), args, kwargs) as run:
            if run.record is not None and FLAG in kwargs:
                # The outer model has turned the flag off, and computes router losses in replays.
                # The replays need the router logits that this model collects.
                kwargs = {**kwargs, FLAG: True}
            collects = _check_outputs(self, kwargs)
            before = run.defers
            run.defers = before or (has_loss and kwargs.get("labels") is not None)
            try:
                if collects and has_loss and FLAG in names:
                    return with_router_losses(
                        run, bound, args, kwargs, owner=_name(self), names=names
                    )
                return bound(*args, **kwargs)
            finally:
                run.defers = before

    return forward


def _compiled(
    module: nn.Module,
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    if torch.is_grad_enabled():
        _refuse_to_compile(_name(module))
    return forward(*args, **kwargs)


@dynamo_disable
def _refuse_to_compile(owner: str) -> None:
    """Raise when the compiled code runs: after an error in tracing torch would run the forward
    uncompiled."""
    raise refusal_to_compile(owner)


def refusal_to_compile(owner: str) -> SlicesError:
    """Make the error for a model that is compiled."""
    return SlicesError(
        f"{owner}: a microbatched model is not compiled as a whole, since slices are checkpointed "
        "and draw from separate random streams: compile its blocks, each with block.compile()"
    )


def calls_loss_function(kind: type[nn.Module]) -> bool:
    """Return whether the forward of a class calls its `loss_function`, which runs slice by slice.
    """
    if not isinstance(inspect.getattr_static(kind, "loss_function", None), property):
        return False
    for base in kind.__mro__:
        forward = vars(base).get("forward")
        code = getattr(inspect.unwrap(forward), "__code__", None) if forward is not None else None
        if code is None:
            continue
        if "loss_function" in code.co_names:
            return True
        if "super" not in code.co_names:
            return False
    return False


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
    """Return whether the call asks for the logits of routers.

    Raises: SlicesError for collected outputs that cannot be separated by slice.
    """
    config = getattr(module, "config", None)
    wanted = [flag for flag in (FLAG, ATTENTIONS) if asks_for(flag, config, kwargs)]
    if wanted and not can_be_told_apart():
        raise SlicesError(
            f"{_name(module)}: {wanted[0]} is on, and the installed transformers collects outputs "
            "from inside of blocks in a way that inf.microbatched does not know; install "
            f"transformers 5.23, or set config.{wanted[0]}=False in training"
        )
    return FLAG in wanted


def _cache_asked(kwargs: dict[str, Any]) -> str:
    """Return the name of the argument that asks for a cache, if any."""
    if kwargs.get("use_cache"):
        return "use_cache"
    return "" if kwargs.get("past_key_values") is None else "past_key_values"


def _without_cache(
    module: nn.Module,
    names: tuple[str, ...],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    inside: bool,
) -> dict[str, Any]:
    """Return the keyword arguments, with `use_cache=False` if the forward has it: a cache would mix
    the rows of slices. inside: the call is inside a forward in slices, so that the outer model sets
    `use_cache`, not the caller.

    Raises: SlicesError for a cache that the caller asks for or passes.
    """
    name = _cache_asked(kwargs)
    if name and not (inside and name == "use_cache" and kwargs.get("past_key_values") is None):
        raise SlicesError(
            f"{_name(module)}: {name} with gradients: slices of a batch cannot share a cache; "
            f"leave {name} out, or run under torch.no_grad()"
        )
    if name or ("use_cache" in names and names.index("use_cache") >= len(args)):
        return {**kwargs, "use_cache": False}
    return kwargs


# -- losses of routers -----------------------------------------------------------------------------
# `output_router_logits` of transformers: each slice has router losses, as a micro-batch has. The
# model's forward runs once for the whole batch, without them. Then a replay runs for each slice:
# the model's code computes the router losses from the slice's router logits and arguments, and adds
# them to the loss of the slice.


def with_router_losses(
    run: Run,
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    owner: str,
    names: Sequence[str],
) -> Any:
    """Return the output of a model's forward, which has `FLAG` among its arguments, with that flag
    on. `loss` and the router losses are `loss_of_batch` of the slices' losses.

    names: of the positional arguments. Raises: SlicesError for a model whose losses depend on more
    than router logits and its `loss_function`.
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
            # A placeholder raised it: with tensors the same code has run for the whole batch.
            reason = "computed from more than its loss_function and router logits"
            raise _refusal(owner, "its loss", reason) from error
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
                "computed from more than its loss_function and router logits of blocks",
            )
        if not isinstance(loss, torch.Tensor) or loss.dim():
            raise _refusal(owner, f"its {name}", f"a {type(loss).__name__}, not a scalar tensor")


def _refusal(owner: str, what: str, reason: str) -> SlicesError:
    return SlicesError(
        f"{owner}: with {FLAG} {what} is {reason}, and inf.microbatched cannot compute it for each "
        f"slice; set config.{FLAG}=False in training"
    )
