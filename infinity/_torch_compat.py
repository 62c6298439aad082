"""Every semi-private corner of torch that the engine stands on, in one place, with a test each.

When a new torch release moves one of them, this file and `tests/unit/test_torch_compat.py` say which.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from threading import get_ident
from types import FrameType
from typing import Any, TypeVar, cast

import torch

_C: Any = torch._C
_TENSOR: Any = torch.Tensor
F = TypeVar("F", bound=Callable[..., Any])

NO_TASK = -1
"""What `graph_task_id` returns outside of backward."""

graph_task_id: Callable[[], int] = _C._current_graph_task_id
"""The id of the backward that this thread runs now; nested backwards have their own."""

sequence_number: Callable[[], int] = _C._autograd._get_sequence_nr
"""The number that the next autograd node made by this thread gets. Backward runs higher numbers first."""

DisableTorchFunctionSubclass: Any = _C.DisableTorchFunctionSubclass
"""Context in which `__torch_function__` of subclasses is not called."""


def resize_storage(tensor: torch.Tensor, size_bytes: int) -> None:
    """Resize the storage that `tensor` and all its views share; 0 frees it. The contents are lost."""
    storage = tensor.untyped_storage()
    if storage.size() != size_bytes:
        cast("Any", storage).resize_(size_bytes)


def is_resizable(tensor: torch.Tensor) -> bool:
    """Whether the storage may be resized. Exporting it once, to numpy for instance, forbids that for good."""
    return bool(cast("Any", tensor.untyped_storage()).resizable())


def storage_size(tensor: torch.Tensor) -> int:
    """Bytes that the storage of `tensor` holds now."""
    return tensor.untyped_storage().size()


def set_versions(tensors: Sequence[torch.Tensor], versions: Sequence[int]) -> None:
    """Set version counters. Backward compares the counter of a saved tensor with what it was when saved."""
    _C._autograd._unsafe_set_version_counter(tuple(tensors), tuple(versions))


def bump_version(tensor: torch.Tensor) -> None:
    """Count `tensor` as modified: graphs that saved it before raise when they run backward."""
    torch.autograd.graph.increment_version(tensor)


def version_of(tensor: torch.Tensor) -> int:
    """The version counter of `tensor`."""
    return int(tensor._version)


def queue_callback(callback: Callable[[], None]) -> None:
    """Run `callback` once when the backward that this thread runs now has ended well; never if it raises."""
    engine: Any = torch.autograd.Variable._execution_engine  # type: ignore[attr-defined]
    engine.queue_callback(callback)


def register_post_accumulate(tensor: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> None:
    """`tensor.register_post_accumulate_grad_hook` past what a subclass makes of it."""
    with DisableTorchFunctionSubclass():
        torch.Tensor.register_post_accumulate_grad_hook(tensor, hook)


def node_sequence_number(node: Any) -> int:
    """The sequence number of an autograd node (see `sequence_number`)."""
    return int(node._sequence_nr())


def make_wrapper(
    cls: type, shape: torch.Size, dtype: torch.dtype, device: torch.device, requires_grad: bool
) -> torch.Tensor:
    """A tensor of subclass `cls` that has metadata and no storage."""
    with torch.inference_mode(False):
        made: torch.Tensor = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, shape, dtype=dtype, device=device, requires_grad=requires_grad
        )
    return made


def separate_version(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor on the same storage with a version counter of its own, and no autograd history."""
    separate: torch.Tensor = _TENSOR.data.__get__(tensor)
    return separate


def set_data(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """`tensor.data = value` past what a subclass makes of it: the object stays, its storage changes."""
    _TENSOR.data.__set__(tensor, value)


def parse_to(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[torch.device | None, torch.dtype | None, bool]:
    """What the arguments of `Tensor.to` ask for: device, dtype, and whether a copy is forced."""
    kwargs = dict(kwargs)
    copy = bool(kwargs.pop("copy", False))
    if args and isinstance(args[0], torch.Tensor):
        return args[0].device, args[0].dtype, copy
    device, dtype, _, _ = _C._nn._parse_to(*args, **kwargs)
    return device, dtype, copy


def address_of(tensor: torch.Tensor) -> int:
    """The address of the first element; 0 when the tensor has none (meta, fake, functorch-wrapped, empty, sparse)."""
    if type(tensor) is not torch.Tensor and not isinstance(tensor, torch.nn.Parameter):
        return 0
    try:
        return tensor.data_ptr()
    except RuntimeError:  # wrapped by a functorch transform, or sparse: no address, so no view of ours
        return 0


def dynamo_disable(function: F) -> F:
    """`function`, never traced by torch.compile, nor anything that it calls."""
    disable: Any = torch.compiler.disable
    return cast("F", disable(function))


def calling_module_frame() -> FrameType | None:
    """The Python frame of the `Module.__call__` that runs the hook that calls this; None when it cannot be told."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(10):
        if frame is None:
            return None
        if frame.f_code.co_name == "_call_impl":
            return frame
        frame = frame.f_back
    return None


def is_running(wanted: FrameType, thread: int) -> bool:
    """Whether `wanted` is on the Python stack of `thread`."""
    frame: FrameType | None = sys._getframe(1) if thread == get_ident() else sys._current_frames().get(thread)
    while frame is not None:
        if frame is wanted:
            return True
        frame = frame.f_back
    return False
