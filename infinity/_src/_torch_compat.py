"""Every semi-private corner of torch that the engine stands on, in one place, with a test each.

When a new torch release moves one of them, this file and `tests/unit/test_torch_compat.py` say which.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Callable, Sequence
from threading import get_ident
from types import FrameType
from typing import Any, Protocol, TypeVar, cast

import torch
import torch.utils.checkpoint as torch_checkpoint

_C: Any = torch._C
_TENSOR: Any = torch.Tensor
F = TypeVar("F", bound=Callable[..., Any])

NO_TASK = -1
"""What `graph_task_id` returns outside of backward."""

graph_task_id: Callable[[], int] = _C._current_graph_task_id
"""The id of the backward that this thread runs now; nested backwards have their own."""

graph_is_kept: Callable[[], bool] = _C._autograd._get_current_graph_task_keep_graph
"""Whether the backward that this thread runs now was told to retain its graph, which may then run once more."""

sequence_number: Callable[[], int] = _C._autograd._get_sequence_nr
"""The number that the next autograd node made by this thread gets. Backward runs higher numbers first."""

DisableTorchFunctionSubclass: Any = _C.DisableTorchFunctionSubclass
"""Context in which `__torch_function__` of subclasses is not called."""


def profiled(name: str) -> contextlib.AbstractContextManager[object]:
    """A range of that name in torch's profiler (and so in NVTX under `torch.autograd.profiler.emit_nvtx()`), while one runs."""
    if not _C._autograd._profiler_enabled():
        return contextlib.nullcontext()
    return torch.profiler.record_function(name)


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


def _getters(names: Sequence[str]) -> set[Any]:
    return {getattr(torch.Tensor, name).__get__ for name in names if hasattr(torch.Tensor, name)}


_PROPERTIES = """
    shape dtype device requires_grad grad is_leaf grad_fn layout ndim is_cuda is_cpu is_meta is_sparse is_sparse_csr
    is_quantized is_mkldnn is_xpu is_mps is_xla is_ipu is_maia is_mtia is_vulkan is_ort is_hpu is_nested itemsize nbytes
    output_nr name names retains_grad grad_dtype _version _grad_fn _grad _backward_hooks _post_accumulate_grad_hooks
"""
_METHODS = """
    size stride dim ndimension numel nelement element_size is_contiguous is_floating_point is_complex is_signed is_conj
    is_neg is_inference is_same_size storage_offset get_device __len__ dim_order has_names is_coalesced is_distributed
    _is_view _is_zerotensor _has_symbolic_sizes_strides
"""
_FUNCTIONS = """
    numel is_floating_point is_complex is_conj is_neg is_inference is_signed is_same_size
    _has_compatible_shallow_copy_type
"""

METADATA: frozenset[Any] = frozenset(
    _getters(_PROPERTIES.split())
    | {getattr(_TENSOR, name) for name in _METHODS.split() if hasattr(_TENSOR, name)}
    | {getattr(torch, name) for name in _FUNCTIONS.split()}
    | {_TENSOR.grad.__delete__, _TENSOR.grad_dtype.__set__}
)
"""Functions that ask a tensor for metadata only, as `__torch_function__` of a subclass without storage gets them."""


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


def version_witness(tensor: torch.Tensor) -> torch.Tensor:
    """An empty tensor that shares the version counter of `tensor`, and not its memory."""
    witness = tensor.detach()
    _TENSOR.data.__set__(witness, torch.empty(0, dtype=tensor.dtype, device=tensor.device))
    return witness


class CheckpointCall:
    """A call of `torch.utils.checkpoint`, with gradients and outside of backward, whose inputs its graph keeps.

    Holds no tensors. owner, label: for watchers to write on.
    """

    __slots__ = ("_inputs", "_saved", "label", "owner")

    def __init__(self, args: Sequence[Any]) -> None:
        self.owner: object = None
        self.label = ""
        self._inputs = [weakref.ref(arg) for arg in args if isinstance(arg, torch.Tensor)]
        self._saved: Callable[[], list[Any]] = list

    def keeps(self, saved: Callable[[], list[Any]]) -> None:
        """saved: gives what the graph keeps of the inputs as SavedTensors, in order; empty when it is gone."""
        self._saved = saved

    def inputs(self) -> list[torch.Tensor]:
        """The inputs that live."""
        return [tensor for ref in self._inputs if (tensor := ref()) is not None]

    def pairs(self) -> list[tuple[torch.Tensor, Any]]:
        """The inputs that live, each with the SavedTensor by which the graph keeps it (it has `register_hooks`)."""
        saved = self._saved()
        if not saved:
            return []
        inputs = [ref() for ref in self._inputs]
        return [(tensor, of) for tensor, of in zip(inputs, saved, strict=True) if tensor is not None]


class CheckpointWatcher(Protocol):
    """Who is told of checkpointed calls."""

    def checkpoint_begins(self, call: CheckpointCall) -> None:
        """A call begins. Reentrant ones keep their inputs when they end, the others before their function runs."""

    def checkpoint_saved(self, call: CheckpointCall) -> None:
        """The graph keeps the inputs now: `call.pairs()`."""


_watchers: list[CheckpointWatcher] = []


def watch_checkpoints(watcher: CheckpointWatcher) -> Callable[[], None]:
    """Tell `watcher` of every call of `torch.utils.checkpoint.checkpoint`, of both kinds; returns what ends that.

    Calls inside of other checkpoints, and under hooks of the user's own on saved tensors, are left out. torch is as it was
    when nobody watches. Raises: ValueError when this torch keeps the inputs of checkpoints in another way.
    """
    checkpoint: Any = torch_checkpoint
    frame_class: Any = getattr(checkpoint, "_CheckpointFrame", None)
    function_class = checkpoint.CheckpointFunction
    if not hasattr(frame_class, "save_inputs"):
        raise ValueError(f"activations= needs torch 2.13; torch {torch.__version__} keeps the inputs of checkpoints differently")
    if not _watchers:
        _tell_of(frame_class, function_class)
    _watchers.append(watcher)

    def end() -> None:
        if watcher not in _watchers:
            return
        _watchers.remove(watcher)
        if not _watchers:
            frame_class.save_inputs = frame_class.save_inputs.__wrapped__
            del function_class.apply

    return end


def _tell_of(frame_class: Any, function_class: Any) -> None:
    plain_save, plain_apply = frame_class.save_inputs, function_class.apply

    def save_inputs(frame: Any, *args: Any) -> None:
        plain_save(frame, *args)
        if not _keeps_plainly():
            return
        alive = weakref.ref(frame)

        def saved() -> list[Any]:
            found = alive()
            return [arg for arg in found.saved_args if isinstance(arg, _C._autograd.SavedTensor)] if found is not None else []

        call = CheckpointCall(args)
        call.keeps(saved)
        for watcher in tuple(_watchers):
            watcher.checkpoint_begins(call)
            watcher.checkpoint_saved(call)

    def apply(run_function: Any, preserve_rng_state: bool, *args: Any) -> Any:
        if not _keeps_plainly():
            return plain_apply(run_function, preserve_rng_state, *args)
        call = CheckpointCall(args)
        for watcher in tuple(_watchers):
            watcher.checkpoint_begins(call)
        outputs = plain_apply(run_function, preserve_rng_state, *args)
        several = outputs if isinstance(outputs, tuple) else (outputs,)
        node = next((out.grad_fn for out in several if isinstance(out, torch.Tensor) and out.grad_fn is not None), None)
        if node is not None:
            call.keeps(lambda: list(node._raw_saved_tensors))  # type: ignore[attr-defined]
            for watcher in tuple(_watchers):
                watcher.checkpoint_saved(call)
            call.keeps(list)  # whoever holds the call does not hold the graph
        return outputs

    save_inputs.__wrapped__ = plain_save  # type: ignore[attr-defined]
    frame_class.save_inputs = save_inputs
    function_class.apply = staticmethod(apply)


def _keeps_plainly() -> bool:
    """Whether what is saved now stays until backward, and no hooks of others take it."""
    hooks = _C._autograd._top_saved_tensors_default_hooks(True)
    return torch.is_grad_enabled() and graph_task_id() == NO_TASK and hooks is None


def dcp_storage_info(relative_path: str, offset: int, length: int) -> Any:
    """Where a tensor lies, as FileSystemWriter of torch.distributed.checkpoint notes it in `.metadata`."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    return _StorageInfo(relative_path, offset, length)
