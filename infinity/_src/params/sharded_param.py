"""Parameters at rest: objects that module and optimizer hold while the values rest on a tier.

An at-rest parameter is an nn.Parameter with shape, dtype, device and `requires_grad`, and no
storage. Operations on metadata work. Operations on values use the tensor that the owner (the
model's `Lifecycle`) returns at that moment: the gathered parameter inside forward, a window on it
inside `gather()`; otherwise they raise `ParameterReleased` with the name. Operations that would
detach the parameter from the engine (`.data =`, `share_memory_`, pickle, deepcopy, `autograd.grad`)
always raise: torch would lose values silently, or crash.

`replace_by_sharded` turns the model's Parameter object itself into an at-rest parameter, so that
all references to it (in an optimizer, a closure, another module) stay valid. A tensor that shared
the parameter's memory becomes a `ShardedView` in the same way.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import torch
from torch import nn

from infinity._src.base.torch_compat import (
    METADATA,
    DisableTorchFunctionSubclass,
    exchange,
    is_replicating,
    make_wrapper,
    parse_to,
)
from infinity._src.base.wording import TRAINERS
from infinity.errors import EngineClosed, ParameterReleased

if TYPE_CHECKING:
    from infinity._src.params.unit import Param

Tensor = torch.Tensor
# On the class, attributes such as `grad` are descriptors, which torch's type stubs omit.
_TENSOR: Any = torch.Tensor
_GRAD: Any = _TENSOR.grad


class ParamHost(Protocol):
    """The owner of at-rest parameters: the `Lifecycle` of their model."""

    tier: str  # where the values rest, for messages

    closed: bool

    @property
    def model(self) -> torch.nn.Module:
        """The model that is offloaded."""

    def readable(self, param: Param) -> Tensor | None:
        """Return the tensor with the parameter's current values, gathering it if necessary; None
        when released.
        """

    def take_gradient(self, param: Param, grad: Tensor) -> None:
        """Replace the parameter's gradient by `grad`."""

    def set_requires_grad(self, param: Param, flag: bool) -> None:
        """Mirror `requires_grad` on the gathered parameter."""

    def load(self, param: Param, value: Tensor) -> None:
        """Set the parameter's values from a state dict."""


@dataclasses.dataclass(eq=False)
class EngineLink:
    """The engine's data of an at-rest parameter."""

    param: Param
    owner: ParamHost
    loading: bool = False  # the next `copy_` comes from load_state_dict


class ShardedParameter(torch.nn.Parameter):
    """A parameter whose values rest on some tier (see the module's docstring)."""

    infinity_link: EngineLink

    @staticmethod
    def __new__(  # noqa: PYI034
        cls, param: Param, device: torch.device, requires_grad: bool, owner: ParamHost
    ) -> ShardedParameter:
        made = make_wrapper(cls, param.shape, param.dtype, device, requires_grad)
        assert isinstance(made, ShardedParameter)
        made.infinity_link = EngineLink(param, owner)
        return made

    def __init__(
        self, param: Param, device: torch.device, requires_grad: bool, owner: ParamHost
    ) -> None:
        # Python passes the arguments of `__new__` here, too; the parameter is complete.
        pass

    @property
    def infinity_version(self) -> int:
        """Count of changes of the values: optimizer steps and writes."""
        return self.infinity_link.param.unit.generation

    # A loop reads and sets `.grad` of every parameter several times a step (clip, step, zero_grad).
    # This property calls C directly: 0.7 us instead of 4 us through `__torch_function__`.
    @property
    def grad(self) -> Tensor | None:  # type: ignore[override]
        """The gradient's proxy, or None."""
        with DisableTorchFunctionSubclass():
            grad: Tensor | None = _GRAD.__get__(self)
        return grad

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        _grad_set(_GRAD.__set__, (self, value), {})

    @grad.deleter
    def grad(self) -> None:
        _grad_set(_GRAD.__set__, (self, None), {})

    # torch does not call `__torch_function__` for `set_`.
    def set_(  # type: ignore[override]
        self, source: Any = None, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Copy the values of `source`, if the parameter is gathered; parametrizations call this."""
        if args or kwargs or not isinstance(source, Tensor):
            raise_forbidden(self, "`set_` to a storage", _WRITE)
        _set_values(self, source, "`set_`")
        return self

    @classmethod
    def __torch_function__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Answer metadata, redirect values, refuse the rest."""
        kwargs = kwargs or {}
        if func in METADATA:
            with DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        special = SPECIAL.get(func)
        if special is not None:
            return special(func, args, kwargs)
        return _on_values(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> NoReturn:
        """Raise for calls from C++, which do not go through `__torch_function__`."""
        found = _at_rest_in((args, kwargs or {}))
        raise_released(found[0].infinity_link, str(func)) if found else None
        raise ParameterReleased(f"{func} met an offloaded parameter")

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        link = self.infinity_link
        where = link.owner.tier
        return (
            f"ShardedParameter({link.param.name}, shape={tuple(link.param.shape)}, "
            f"dtype={link.param.dtype}, device='{self.device}', "
            f"requires_grad={self.requires_grad}, on {where})"
        )

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec)

    def __hash__(self) -> int:
        return id(self)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise_forbidden(
            self, "pickling (torch.save, multiprocessing)", "save `model.state_dict()` instead"
        )

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise_forbidden(
            self,
            "deepcopy",
            "copy the model before it is offloaded, or copy `model.state_dict()`; a trainer makes "
            "its copies first if infinity.integrations.transformers.embed(trainer, policy) "
            "offloads the model",
        )

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        values = _require_readable(self.infinity_link, "numpy").detach().cpu()
        return values.__array__(*args, **kwargs)


@dataclasses.dataclass(frozen=True)
class Alias:
    """A tensor over the elements of a contiguous parameter from `offset` on.

    tracks: an operation on the parameter made the tensor, so gradients flow to the parameter.
    """

    tensor: torch.Tensor
    of: torch.Tensor
    offset: int
    tracks: bool


class ShardedView(torch.Tensor):
    """A tensor over elements of an at-rest parameter: operations use the parameter's current
    values, or raise `ParameterReleased`, as on the parameter.

    alias: its elements, as found by `params.aliases`.
    """

    infinity_link: EngineLink
    infinity_tracks: bool
    infinity_offset: int

    @staticmethod
    def __new__(  # noqa: PYI034
        cls, alias: Alias, parameter: ShardedParameter
    ) -> ShardedView:
        like = alias.tensor
        made = make_wrapper(
            cls, like.shape, like.dtype, parameter.device, like.requires_grad, like.stride()
        )
        assert isinstance(made, ShardedView)
        made.infinity_link = parameter.infinity_link
        made.infinity_tracks, made.infinity_offset = alias.tracks, alias.offset
        return made

    def __init__(self, alias: Alias, parameter: ShardedParameter) -> None:
        # Python passes the arguments of `__new__` here, too; the view is complete.
        pass

    @classmethod
    def __torch_function__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Answer metadata, redirect values, refuse operations that would detach it from the
        parameter."""
        kwargs = kwargs or {}
        if func in METADATA:
            with DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func in _PARTING and isinstance(args[0], ShardedView):
            name = args[0].infinity_link.param.name
            raise ParameterReleased(f"{_name_of(func)} on a view of {name}: do it on the parameter")
        return _on_values(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> NoReturn:
        """Raise for calls from C++, which do not go through `__torch_function__`."""
        raise ParameterReleased(f"{func} met a view of an offloaded parameter")

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        link = self.infinity_link
        return (
            f"ShardedView(of {link.param.name}, shape={tuple(self.shape)}, dtype={self.dtype}, "
            f"on {link.owner.tier})"
        )

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec)

    def infinity_values(self, operation: str) -> Tensor:
        """Return the view's elements of the parameter's current values. Raises: ParameterReleased.
        """
        whole = _require_readable(self.infinity_link, operation)
        whole = whole if self.infinity_tracks else whole.detach()
        start = int(whole.storage_offset()) + self.infinity_offset
        return whole.as_strided(self.shape, self.stride(), start)


def replace_by_sharded(original: Tensor, sharded: ShardedParameter | ShardedView) -> None:
    """Exchange the contents of the objects `original` and `sharded`, so that `original` is the
    at-rest parameter. Users' attributes stay on `original`. Raises: ValueError if C++ code holds a
    weak reference to `original`.
    """
    name = sharded.infinity_link.param.name
    attributes = dict(original.__dict__)
    try:
        exchange(original, sharded)
    except RuntimeError as error:
        raise ValueError(
            f"{name} cannot become an offloaded parameter: C++ code holds a weak reference to it "
            f"({error}); before inf.offload, drop the object that holds the reference (a CUDA "
            "graph, a compiled call)"
        ) from error
    original.__dict__.update({**attributes, **original.__dict__})


def raise_released(link: EngineLink, operation: str) -> NoReturn:
    """Raise the error for an operation on a parameter whose values are not gathered."""
    name = link.param.name
    # After close gather() cannot help, so do not recommend it.
    if link.owner.closed:
        raise EngineClosed(
            f"{operation} on {name}: the engine of its model was closed, and its values are gone"
        )
    where = link.owner.tier
    if is_replicating():
        raise ParameterReleased(
            f"torch.nn.DataParallel copies {name} to other devices, but the parameter is on "
            f"{where}: an offloaded model computes on one device of a process. Start a process for "
            "each device (torchrun --nproc-per-node N), or let this process see one device "
            "(CUDA_VISIBLE_DEVICES=0); transformers' Trainer wraps the model in DataParallel if it "
            "sees several"
        )
    raise ParameterReleased(
        f"{name} is on {where}, and {operation} wants its values outside of the model's forward. "
        "To train through another method than forward: `inf.forward_methods(model, \"method\")`; "
        "the method must compute its result before it returns. To read or write it: `with "
        "inf.handle(model).gather(parameter): ...` (writes inside are kept). An optimizer of torch "
        "cannot train it: build inf.AdamW(model.parameters()), inf.SGD, inf.Lion or "
        "inf.Elementwise after inf.offload. If a trainer does this (DistributedDataParallel, an "
        f"optimizer of torch): {TRAINERS}; infinity.integrations.peft.merge(model) merges adapters"
    )


def raise_forbidden(parameter: ShardedParameter, operation: str, instead: str) -> NoReturn:
    """Raise the error of an operation that is never possible on an at-rest parameter."""
    raise ParameterReleased(f"{operation} is not possible on {_describe(parameter)}: {instead}")


def _describe(parameter: ShardedParameter) -> str:
    link = parameter.infinity_link
    where = link.owner.tier
    return f"{link.param.name}, which is offloaded (on {where})"


def _require_readable(link: EngineLink, operation: str) -> Tensor:
    tensor = link.owner.readable(link.param) if not link.owner.closed else None
    if tensor is None:
        raise_released(link, operation)
    return tensor


def _name_of(func: Any) -> str:
    name = getattr(func, "__name__", str(func))
    if name in ("__get__", "__set__", "__delete__"):
        attribute = getattr(getattr(func, "__self__", None), "__name__", "attribute")
        return f".{attribute}" if name == "__get__" else f".{attribute} ="
    return str(name)


def _substitute(value: Any, operation: str, replaced: list[tuple[Tensor, Tensor]]) -> Any:
    """Return `value` with every at-rest parameter or view of one replaced by its current values."""
    if isinstance(value, ShardedParameter):
        tensor = _require_readable(value.infinity_link, operation)
        replaced.append((tensor, value))
        return tensor
    if isinstance(value, ShardedView):
        tensor = value.infinity_values(operation)
        replaced.append((tensor, value))
        return tensor
    if type(value) in (list, tuple):
        return type(value)(_substitute(item, operation, replaced) for item in value)
    if type(value) is dict:
        return {key: _substitute(item, operation, replaced) for key, item in value.items()}
    return value


def _on_values(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run `func` on the values of gathered parameters, or raise."""
    replaced: list[tuple[Tensor, Tensor]] = []
    operation = _name_of(func)
    result = func(
        *(_substitute(arg, operation, replaced) for arg in args),
        **{key: _substitute(arg, operation, replaced) for key, arg in kwargs.items()},
    )
    for tensor, parameter in replaced:
        if result is tensor:  # in-place operations return their first argument
            return parameter
    return result


def _at_rest_in(value: Any) -> list[ShardedParameter]:
    if isinstance(value, ShardedParameter):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [found for item in value for found in _at_rest_in(item)]
    return []


# -- special cases ---------------------------------------------------------------------------------

Handler = Callable[[Any, "tuple[Any, ...]", "dict[str, Any]"], Any]


def _requires_grad_set(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    parameter: ShardedParameter = args[0]
    with DisableTorchFunctionSubclass():
        result = func(*args, **kwargs)
        flag = parameter.requires_grad
    link = parameter.infinity_link
    # Autograd uses the gathered leaf, which has a separate flag.
    link.owner.set_requires_grad(link.param, flag)
    return result


def _data_get(_func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    # detach(), not .data: it shares the version counter, which shows writes through it.
    return _require_readable(args[0].infinity_link, ".data").detach()


def _data_set(_func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    parameter, value = args
    if value is not parameter:  # Module.to(same dtype and device) assigns its argument
        _set_values(parameter, value, "`.data =`")


def _set_values(parameter: ShardedParameter, value: Tensor, operation: str) -> None:
    """Copy `value` into the parameter if it is gathered now, else raise."""
    link = parameter.infinity_link
    tensor = link.owner.readable(link.param) if not link.owner.closed else None
    if tensor is None:
        raise_forbidden(
            parameter,
            operation,
            "it would detach the parameter from the engine; register parametrizations before "
            f"`inf.offload`, and {_WRITE}",
        )
    if value is parameter:
        return
    here = (tuple(tensor.shape), tensor.dtype, tensor.device)
    given = (tuple(value.shape), value.dtype, value.device)
    # A cast would round the values, and the parameter would keep its dtype unnoticed.
    if given != here:
        raise ValueError(
            f"{operation} of shape {given[0]}, {given[1]} on {given[2]}, to {link.param.name}: "
            f"shape {here[0]}, {here[1]} on {here[2]} were fixed when the model was offloaded; "
            "convert the model before `inf.offload`, or write values with "
            f"`parameter.data.copy_(...)`. If a trainer moves or casts it: {TRAINERS}"
        )
    with torch.no_grad():
        tensor.copy_(value)


def _grad_set(func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    parameter, value = args
    link = parameter.infinity_link
    # Assign a proxy or None itself; copy an ordinary tensor, which has new values.
    if type(value) is Tensor and not link.owner.closed:
        if value.shape != parameter.shape:
            raise ValueError(
                f"a gradient of shape {tuple(value.shape)} does not fit {link.param.name} "
                f"{tuple(parameter.shape)}"
            )
        link.owner.take_gradient(link.param, value)
        return None
    with DisableTorchFunctionSubclass():
        return func(parameter, value)


def _register_hook(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    # Autograd accumulates in the gathered leaf, so the hook belongs there.
    parameter: ShardedParameter = args[0]
    return func(parameter.infinity_link.param.gathered, *args[1:], **kwargs)


def _register_post_accumulate(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    parameter: ShardedParameter = args[0]
    hook = args[1] if len(args) > 1 else kwargs["hook"]

    def forwarded(_gathered: Tensor) -> None:
        """Call the user's hook after the engine's hook: then the at-rest parameter's `.grad` is the
        proxy.
        """
        hook(parameter)

    return func(parameter.infinity_link.param.gathered, forwarded)


def _conversion(dtype: torch.dtype | None, device: str | None) -> Handler:
    def convert(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        parameter: ShardedParameter = args[0]
        if device == "cuda" and len(args) > 1:
            wanted_device: torch.device | None = (
                torch.device("cuda", args[1]) if isinstance(args[1], int) else None
            )
            same_device = (
                wanted_device == parameter.device or torch.device(str(args[1])) == parameter.device
            )
        else:
            same_device = device is None or parameter.device.type == device
        same = (dtype is None or dtype == parameter.dtype) and same_device
        return parameter if same and len(args) <= 2 else _on_values(func, args, kwargs)

    return convert


def _to(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    parameter = args[0]
    if isinstance(parameter, ShardedParameter):
        device, dtype, copy = parse_to(args[1:], kwargs)
        here = parameter.device
        same_device = (
            device is None
            or device == here
            or (device.type == here.type and (device.index is None or here.index is None))
        )
        if same_device and (dtype is None or dtype == parameter.dtype) and not copy:
            return parameter
        if not _is_readable(parameter):
            wanted = ", ".join(str(item) for item in (device, dtype) if item is not None)
            raise_forbidden(
                parameter,
                f"`.to({wanted})`",
                f"its device ({here}) and dtype ({parameter.dtype}) were fixed when the model was "
                "offloaded; convert the model before `inf.offload`. If a trainer moves or casts "
                f"it: {TRAINERS}",
            )
    return _on_values(func, args, kwargs)


def _is_readable(parameter: ShardedParameter) -> bool:
    link = parameter.infinity_link
    return not link.owner.closed and link.owner.readable(link.param) is not None


def _same_if_contiguous(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return (
        args[0]
        if not _is_readable(args[0]) and len(args) == 1 and not kwargs
        else _on_values(func, args, kwargs)
    )


def _copy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    parameter = args[0]
    if isinstance(parameter, ShardedParameter) and parameter.infinity_link.loading:
        link = parameter.infinity_link
        # One-shot: a later `copy_` is the user's.
        link.loading = False
        source = args[1]
        # Loading the model's own state_dict(keep_vars=True).
        if isinstance(source, ShardedParameter):
            source = _require_readable(source.infinity_link, "loading from it")
        link.owner.load(link.param, source)
        return parameter
    return _on_values(func, args, kwargs)


def _forbid(operation: str, instead: str) -> Handler:
    def forbidden(_func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> NoReturn:
        found = _at_rest_in((args, kwargs))
        assert found
        raise_forbidden(found[0], operation, instead)

    return forbidden


def _false(_func: Any, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> bool:
    return False


_WRITE = "write its values with `with inf.handle(model).gather(parameter): parameter.copy_(...)`"

SPECIAL: dict[Any, Handler] = {
    _TENSOR.requires_grad.__set__: _requires_grad_set,
    _TENSOR.requires_grad_: _requires_grad_set,
    _TENSOR.data.__get__: _data_get,
    _TENSOR.data.__set__: _data_set,
    _GRAD.__set__: _grad_set,
    _TENSOR.register_hook: _register_hook,
    _TENSOR.register_post_accumulate_grad_hook: _register_post_accumulate,
    _TENSOR.to: _to,
    _TENSOR.cpu: _conversion(None, "cpu"),
    _TENSOR.cuda: _conversion(None, "cuda"),
    _TENSOR.float: _conversion(torch.float32, None),
    _TENSOR.half: _conversion(torch.float16, None),
    _TENSOR.bfloat16: _conversion(torch.bfloat16, None),
    _TENSOR.double: _conversion(torch.float64, None),
    _TENSOR.contiguous: _same_if_contiguous,
    _TENSOR.copy_: _copy,
    _TENSOR.is_shared: _false,
    _TENSOR.is_pinned: _false,
    _TENSOR.share_memory_: _forbid("share_memory_", "every process offloads its own model"),
    _TENSOR.pin_memory: _forbid("pin_memory", "the engine keeps its own pinned buffers"),
    _TENSOR.resize_: _forbid("resize_", "the shape was fixed when the model was offloaded"),
    _TENSOR.resize_as_: _forbid("resize_as_", "the shape was fixed when the model was offloaded"),
    _TENSOR.backward: _forbid("backward", "call it on a loss"),
    _TENSOR.retain_grad: _forbid(
        "retain_grad", "it is a leaf: its gradient is in `.grad` after backward"
    ),
    torch.autograd.grad: _forbid(
        "torch.autograd.grad", "use `loss.backward()` and read `parameter.grad`"
    ),
    torch.autograd.backward: _forbid("torch.autograd.backward", "call `loss.backward()`"),
}

_PARTING = frozenset(
    {_TENSOR.data.__set__, _TENSOR.requires_grad.__set__, _GRAD.__set__}
    | {getattr(_TENSOR, name) for name in ("requires_grad_", "set_", "resize_", "share_memory_")}
)
"""Operations that would change the temporary tensor of a view's current values, not the view."""


# -- undoing the set-up ----------------------------------------------------------------------------


class Rollback:
    """Record of a model before its offload: attributes, parameters, buffers, children and hooks of
    its modules. `undo` restores them, whatever has changed since.

    `replace`, `keep` and `refuse` record what to restore of tensors and graphs.
    """

    def __init__(self, model: nn.Module) -> None:
        self._undo = contextlib.ExitStack()
        # Most tables are empty, and need no copy.
        self._tables: list[tuple[dict[Any, Any], dict[Any, Any] | None]] = []
        for module in model.modules():
            attributes = module.__dict__
            tables = (attributes[name] for name in _TABLES if name in attributes)
            self._tables += [(table, table.copy() or None) for table in (attributes, *tables)]
        self._undo.callback(self._put_back)

    def replace(self, original: torch.Tensor, sharded: ShardedParameter | ShardedView) -> None:
        """Replace `original` by `sharded` in place. Raises: as `replace_by_sharded`."""
        replace_by_sharded(original, sharded)
        self._undo.callback(exchange, original, sharded)

    def keep(self, tensor: torch.Tensor) -> None:
        """Record the values of a tensor before it is written."""
        self._undo.callback(_write_back, tensor, tensor.detach().clone())

    def refuse(self, node: Any, hook: Callable[..., None]) -> None:
        """Make a graph's node call `hook`, which raises, before it takes gradients."""
        self._undo.callback(node.register_prehook(hook).remove)

    def undo(self) -> None:
        self._undo.close()

    def _put_back(self) -> None:
        for table, before in reversed(self._tables):
            table.clear()
            table.update(before or {})


def _write_back(tensor: torch.Tensor, before: torch.Tensor) -> None:
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        tensor.copy_(before)


_TABLES = tuple(name for name, value in nn.Module().__dict__.items() if isinstance(value, dict))
"""The dicts of a module: parameters, buffers, children and hooks."""
