"""Semi-private corners of torch that the engine stands on, in one place, with a test each.

`make torch-matrix` runs `tests/unit/test_torch_compat.py` and the tests of the engine's core with
every version in `TESTED`: the oldest that the metadata allows, the pinned one, and the newest. Each
corner below is in all of them, and does the same there, unless its line says otherwise. When a new
torch moves one, a test of `test_torch_compat.py` fails, and the line says what would break.

    name here                    corner of torch                    what breaks without it
    graph_task_id                _C._current_graph_task_id          a nested backward ends the uses
                                                                    of the outer one, whose units
                                                                    are released too early
    graph_is_kept                _C._autograd.                      updates during backward change
                                 _get_current_graph_task_keep_graph weights that a retained graph
                                                                    needs again
    sequence_number,             _C._autograd._get_sequence_nr,     an output that is an input
    node_sequence_number         Node._sequence_nr                  passed through gathers units
                                                                    again that are done
    leaf_of                      AccumulateGrad.variable, its       backwards of other models in
                                 _sequence_nr                       other threads are taken for
                                                                    one of this
    set_sequence_number          Node._set_sequence_nr              one backward over the
                                                                    micro-batches of accumulate()
                                                                    takes the last one first, whole
    DisableTorchFunctionSubclass _C.DisableTorchFunctionSubclass    a parameter at rest asks itself,
                                                                    without end
    NO_TORCH_FUNCTION            _C._disabled_torch_function_impl   operations on `p.grad` do not
                                                                    reach its handlers as they are
    profiled                     _C._autograd._profiler_enabled     ranges cost time when no
                                                                    profiler runs
    resize_storage, storage_size UntypedStorage.resize_, size       released units keep their memory
    is_resizable                 UntypedStorage.resizable           releasing a unit that numpy has
                                                                    seen raises
    set_versions                 _C._autograd.                      each unit gathered again in
                                 _unsafe_set_version_counter        backward looks modified, and
                                                                    backward refuses it
    bump_version                 autograd.graph.increment_version   graphs do not notice what was
                                                                    written in `handle.gather`:
                                                                    wrong gradients
    version_of                   Tensor._version                    weights written in forward are
                                                                    lost unseen
    version_found_by             the text of autograd's error of    a released parameter that
                                 a saved tensor's version           backward needs is not named
    tensor_refs, storage_refs    Tensor._use_count,                 calls whose graphs are gone are
                                 _C._storage_Use_Count              kept
    watch_backward               autograd._engine_run_backward,     results that leave a module
                                 autograd.graph, the same name      other than by its return value
                                                                    are not found
    queue_callback               Variable._execution_engine.        units whose uses never finish in
                                 queue_callback                     a backward stay gathered
    register_post_accumulate     Tensor.register_post_              gradients given to a parameter
                                 accumulate_grad_hook               at rest are not taken
    make_wrapper                 Tensor._make_wrapper_subclass      a parameter at rest needs
                                                                    storage
    exchange                     _C._swap_tensor_impl, __class__    what refers to a parameter keeps
                                 and hooks of Tensor                the original, and trains nothing
    storage_of, storage_uses     Tensor.untyped_storage,            tensors over the memory of a
                                 _C._storage_Use_Count              parameter go unseen
    gradient_node                Tensor._use_count,                 a graph from before `offload`
                                 autograd.graph.get_gradient_edge   gives its gradients to nothing
    METADATA                     getters and methods of Tensor,     asking a parameter at rest for
                                 Tensor.grad_dtype                  its shape raises
    separate_version             Tensor.data, getter                a write to one parameter counts
                                                                    as one to all of its unit
    set_data, version_witness    Tensor.data, setter                a unit that numpy has seen
                                                                    cannot move; writes to
                                                                    activations that are away go
                                                                    unseen
    parse_to                     _C._nn._parse_to                   `.to(...)` of a parameter at
                                                                    rest or of tiled logits is not
                                                                    understood
    calling_module_frame         the name of a frame of             forwards that KeyboardInterrupt
                                 Module.__call__: _call_impl        left are taken for running ones
    is_running                   sys._current_frames                the same
    is_replicating               the name of a module:              DataParallel is refused without
                                 torch.nn.parallel.replicate        being named
    address_of                   Tensor.data_ptr raises where there outputs that are views of a unit
                                 is no address                      go unseen, or sound ones raise
    dynamo_disable               torch.compiler.disable             torch.compile traces the
                                                                    engine's hooks
    watch_checkpoints,           utils.checkpoint:                  `activations=` is a ValueError
    CheckpointCall,              CheckpointFunction,
    named_checkpoints            _CheckpointFrame.save_inputs
                                 (from 2.12), _NoopSaveInputs (to
                                 2.11), Node._raw_saved_tensors
    hooks_of                     Module._forward_hooks and its      hooks on a head in slices do not
                                 like, nn.modules.module.           see its logits
                                 _global_forward_hooks and its like
    is_compiled                  Module._compiled_call_impl,        a compiled model is refused in
                                 OptimizedModule._orig_mod,         its first forward, and not by
                                 _torchdynamo_orig_callable         `inf.microbatched`
    all_gather_single            distributed.all_gather_single      ranks cannot compare what they
                                 (from 2.13),                       have
                                 all_gather_into_tensor (to 2.12)
    assert_async                 torch._assert_async                an index out of range gives rows
                                                                    of old memory on a GPU
    make_mem_pool                cuda.MemPool(use_on_oom=)          memory of gathers that is idle
                                 (from 2.8)                         does not serve activations that
                                                                    run out
    clear_autocast_cache         torch.clear_autocast_cache         16-bit copies of fp32 weights
                                                                    stay on the device
    FakeTensor, FakeTensorMode,  _subclasses.fake_tensor            `init=` builds the model in
    FAKE_HAS_NO_VALUES                                              memory, and not one parameter
                                                                    at a time
    dcp_storage_info             distributed.checkpoint.            torch cannot read what
                                 filesystem._StorageInfo            `export_dcp` writes
    is_out_of_memory             what the CPU's allocator says      `infinity train` ends with a
                                                                    traceback where memory is short

The tests also cover public functions that do more than torch's manual says: a prehook on a node
runs after hooks on its tensors; hooks with `always_call` run after an exception, and not after
KeyboardInterrupt; saving and loading iterate `Module._parameters` once.
"""

from __future__ import annotations

import contextlib
import functools
import re
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from threading import get_ident
from types import FrameType
from typing import Any, Protocol, TypeVar, cast

import torch
import torch._subclasses.fake_tensor as fake_tensor
import torch.nn.modules.module as nn_module
import torch.utils.checkpoint as torch_checkpoint

TESTED = ("2.10.0", "2.13.0", "2.15.0")
"""Versions of torch that `make torch-matrix` has run: the floor of the metadata, pin, newest."""

_C: Any = torch._C
_TENSOR: Any = torch.Tensor
F = TypeVar("F", bound=Callable[..., Any])

NO_TASK = -1
"""Result of `graph_task_id` outside of backward."""

graph_task_id: Callable[[], int] = _C._current_graph_task_id
"""The id of the backward that this thread runs now; nested backwards have their own."""

graph_is_kept: Callable[[], bool] = _C._autograd._get_current_graph_task_keep_graph
"""True where this thread's running backward retains its graph, which may then run again."""

sequence_number: Callable[[], int] = _C._autograd._get_sequence_nr
"""The number that the next autograd node made by this thread gets.

Backward runs higher numbers first.
"""

FakeTensor = fake_tensor.FakeTensor
"""A tensor of a device, with strides and storage, and without memory."""

FakeTensorMode = fake_tensor.FakeTensorMode
"""Mode under which operations compute shapes and aliases of tensors alone."""

FAKE_HAS_NO_VALUES: tuple[type[Exception], ...] = (
    fake_tensor.DataDependentOutputException,
    fake_tensor.DynamicOutputShapeException,
)
"""Errors of operations that ask a `FakeTensor` for values."""

DisableTorchFunctionSubclass: Any = _C.DisableTorchFunctionSubclass
"""Context in which `__torch_function__` of subclasses is not called."""

assert_async: Callable[[torch.Tensor, str], None] = torch._assert_async
"""Assert that a tensor of one element is not zero: raises RuntimeError on the CPU; on a GPU a
device-side assertion, without a wait.
"""

NO_TORCH_FUNCTION: Any = _C._disabled_torch_function_impl
"""`__torch_function__` of a subclass that leaves everything to `__torch_dispatch__`."""


def all_gather_single(
    whole: torch.Tensor, mine: torch.Tensor, *, group: Any, async_op: bool = False
) -> Any:
    """Put the equal parts of all ranks of `group` one after another into `whole`. Blocks.

    async_op: return at once, with a handle to wait for it.
    """
    import torch.distributed as dist

    # torch 2.13 renamed it, and will drop the old name some day.
    gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(whole, mine, group=group, async_op=async_op)


def make_mem_pool() -> Any:
    """A pool of CUDA memory on the current device. Allocations outside of it that find no room
    anywhere else are served from its free blocks.
    """
    return torch.cuda.MemPool(use_on_oom=True)


def clear_autocast_cache(device_type: str) -> None:
    """Drop the 16-bit copies of weights that autocast keeps until its region ends, if one is open
    for `device_type`. Values do not change: the next use casts again.
    """
    if torch.is_autocast_enabled(device_type):
        torch.clear_autocast_cache()


def profiled(name: str) -> contextlib.AbstractContextManager[object]:
    """A range of that name in torch's profiler, while one runs.

    So also in NVTX, under `torch.autograd.profiler.emit_nvtx()`.
    """
    if not _C._autograd._profiler_enabled():
        return contextlib.nullcontext()
    return torch.profiler.record_function(name)


def resize_storage(tensor: torch.Tensor, size_bytes: int) -> None:
    """Resize the storage that `tensor` and all its views share; 0 frees it.

    The contents are lost.
    """
    storage = tensor.untyped_storage()
    if storage.size() != size_bytes:
        cast("Any", storage).resize_(size_bytes)


def is_resizable(tensor: torch.Tensor) -> bool:
    """Tell whether the storage may be resized.

    Exporting it once, to numpy for instance, forbids that for good.
    """
    return bool(cast("Any", tensor.untyped_storage()).resizable())


def storage_size(tensor: torch.Tensor) -> int:
    """Bytes that the storage of `tensor` holds now."""
    return tensor.untyped_storage().size()


def set_versions(tensors: Sequence[torch.Tensor], versions: Sequence[int]) -> None:
    """Set version counters.

    Backward compares the counter of a saved tensor with what it was when saved.
    """
    _C._autograd._unsafe_set_version_counter(tuple(tensors), tuple(versions))


def bump_version(tensor: torch.Tensor) -> None:
    """Count `tensor` as modified: graphs that saved it before raise when they run backward."""
    torch.autograd.graph.increment_version(tensor)


def version_of(tensor: torch.Tensor) -> int:
    """The version counter of `tensor`."""
    return int(tensor._version)


def version_found_by(error: RuntimeError) -> int | None:
    """The version of a saved tensor by which autograd has refused it; None for another error."""
    found = re.search(r"is at version (\d+); expected version", str(error))
    return int(found[1]) if found else None


def tensor_refs(tensor: torch.Tensor) -> int:
    """References to the tensor from C++: by graphs, views and its Python object."""
    return int(cast("Any", tensor)._use_count())


def storage_refs(tensor: torch.Tensor) -> int:
    """Tensors that share the storage of `tensor`, this one included."""
    return int(_C._storage_Use_Count(tensor.untyped_storage()._cdata))


class BackwardWatcher(Protocol):
    """Listener to backwards."""

    def hook_exits(self, roots: Sequence[Any]) -> None:
        """A backward from these nodes begins, in this thread."""

    def failed(self, error: RuntimeError) -> None:
        """A backward has raised; may raise another error in its place."""


_backward_watchers: weakref.WeakSet[BackwardWatcher] = weakref.WeakSet()


def watch_backward(watcher: BackwardWatcher) -> None:
    """Tell `watcher`, while it lives, of each call of `Tensor.backward`, `torch.autograd.backward`
    and `torch.autograd.grad`, nested ones included. torch is changed once, by the first watcher.
    """
    _backward_watchers.add(watcher)
    plain_run = torch.autograd.graph._engine_run_backward
    if getattr(plain_run, "tells_watchers", False):
        return

    @functools.wraps(plain_run)
    def run(outputs: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        watchers = tuple(_backward_watchers)
        # A root is a tensor or a GradientEdge.
        nodes = [out.grad_fn if isinstance(out, torch.Tensor) else out.node for out in outputs]
        roots = [node for node in nodes if node is not None]
        for each in watchers:
            each.hook_exits(roots)
        try:
            return plain_run(outputs, *args, **kwargs)
        except RuntimeError as error:
            for each in watchers:
                each.failed(error)
            raise

    run.tells_watchers = True  # type: ignore[attr-defined]
    for module in (torch.autograd, torch.autograd.graph):
        cast("Any", module)._engine_run_backward = run


def queue_callback(callback: Callable[[], None]) -> None:
    """Run `callback` once when the backward of this thread has ended well; never if it raises."""
    engine: Any = torch.autograd.Variable._execution_engine  # type: ignore[attr-defined]
    engine.queue_callback(callback)


def register_post_accumulate(tensor: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> None:
    """`tensor.register_post_accumulate_grad_hook` past what a subclass makes of it."""
    with DisableTorchFunctionSubclass():
        torch.Tensor.register_post_accumulate_grad_hook(tensor, hook)


def node_sequence_number(node: Any) -> int:
    """The sequence number of an autograd node (see `sequence_number`)."""
    return int(node._sequence_nr())


def leaf_of(node: Any) -> torch.Tensor | None:
    """The leaf whose gradient an autograd node accumulates; None for another node."""
    # Such a node has the highest number that there is, and so has the node that only raises.
    highest = node._sequence_nr() >= 2**63
    leaf: torch.Tensor | None = getattr(node, "variable", None) if highest else None
    return leaf


def set_sequence_number(node: Any, number: int) -> None:
    """Set the sequence number of an autograd node (see `sequence_number`)."""
    node._set_sequence_nr(number)


def make_wrapper(
    cls: type,
    shape: torch.Size,
    dtype: torch.dtype,
    device: torch.device,
    requires_grad: bool,
    strides: Sequence[int] | None = None,
) -> torch.Tensor:
    """A tensor of subclass `cls` that has metadata and no storage. strides: None: contiguous."""
    # A parameter made under inference mode could not be trained.
    with torch.inference_mode(False):
        made: torch.Tensor = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, shape, strides=strides, dtype=dtype, device=device, requires_grad=requires_grad
        )
    return made


def exchange(first: torch.Tensor, second: torch.Tensor) -> None:
    """Let two tensor objects exchange all that they are: class, attributes, hooks, and the tensor
    in C++. References to an object find the content of the other one in it. A second exchange
    undoes the first.

    `torch.utils.swap_tensors` refuses objects with weak references, and tensors that a graph holds.
    Raises: RuntimeError where C++ has weak references to one; nothing has changed then.
    """
    with DisableTorchFunctionSubclass():
        of_first, of_second = _hook_dicts(first), _hook_dicts(second)
        _C._swap_tensor_impl(first, second)
        first.__class__, second.__class__ = second.__class__, first.__class__
        first.__dict__, second.__dict__ = second.__dict__, first.__dict__
        # These two belong to the objects, and C++ has them besides.
        _set_hook_dicts(second, of_first)
        _set_hook_dicts(first, of_second)


def _hook_dicts(tensor: Any) -> tuple[Any, Any]:
    return tensor._backward_hooks, tensor._post_accumulate_grad_hooks


def _set_hook_dicts(tensor: Any, dicts: tuple[Any, Any]) -> None:
    tensor._backward_hooks, tensor._post_accumulate_grad_hooks = dicts


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """The storage of a tensor of any class; None for one without (sparse, wrapped by functorch)."""
    try:
        with DisableTorchFunctionSubclass():
            return torch.Tensor.untyped_storage(tensor)
    except RuntimeError:
        return None


def storage_uses(storage: torch.UntypedStorage) -> int:
    """Count the tensors in C++ that have this storage."""
    # One reference is that of the Python object.
    return int(_C._storage_Use_Count(storage._cdata)) - 1


def gradient_node(leaf: torch.Tensor) -> Any:
    """The node at which a living graph accumulates the gradient of `leaf`; None where no graph
    leads there."""
    if not leaf.requires_grad or _TENSOR._use_count(leaf) == 1:
        return None
    node: Any = torch.autograd.graph.get_gradient_edge(leaf).node
    return node


def _getters(names: Sequence[str]) -> set[Any]:
    return {getattr(torch.Tensor, name).__get__ for name in names if hasattr(torch.Tensor, name)}


_PROPERTIES = """
    shape dtype device requires_grad grad is_leaf grad_fn layout ndim is_cuda is_cpu is_meta
    is_sparse is_sparse_csr is_quantized is_mkldnn is_xpu is_mps is_xla is_ipu is_maia is_mtia
    is_vulkan is_ort is_hpu is_nested itemsize nbytes output_nr name names retains_grad grad_dtype
    _version _grad_fn _grad _backward_hooks _post_accumulate_grad_hooks _has_grad_dtype_override
"""
_METHODS = """
    size stride dim ndimension numel nelement element_size is_contiguous is_floating_point
    is_complex is_signed is_conj is_neg is_inference is_same_size storage_offset get_device __len__
    dim_order has_names is_coalesced is_distributed _is_view _is_zerotensor
    _has_symbolic_sizes_strides
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
"""Functions that ask for metadata only, as `__torch_function__` of a subclass gets them."""


def separate_version(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor on the same storage with a version counter of its own, and no autograd history."""
    # The getter of `Tensor.data`, which subclasses may have replaced.
    separate: torch.Tensor = _TENSOR.data.__get__(tensor)
    return separate


def set_data(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """`tensor.data = value` past a subclass: the object stays, its storage changes."""
    _TENSOR.data.__set__(tensor, value)


def parse_to(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[torch.device | None, torch.dtype | None, bool]:
    """Return the request in the arguments of `Tensor.to`: device, dtype, and whether a copy is
    forced.
    """
    kwargs = dict(kwargs)
    copy = bool(kwargs.pop("copy", False))
    if args and isinstance(args[0], torch.Tensor):
        return args[0].device, args[0].dtype, copy
    device, dtype, _, _ = _C._nn._parse_to(*args, **kwargs)
    return device, dtype, copy


def address_of(tensor: torch.Tensor) -> int:
    """The address of the first element; 0 when there is none.

    Meta, fake, functorch-wrapped, empty and sparse tensors have none.
    """
    if type(tensor) is not torch.Tensor and not isinstance(tensor, torch.nn.Parameter):
        return 0
    try:
        return tensor.data_ptr()
    except RuntimeError:
        # Wrapped by a functorch transform, or sparse: no address, so no view of a unit.
        return 0


def dynamo_disable(function: F, *, recursive: bool = True) -> F:
    """`function`, never traced by torch.compile, nor (if `recursive`) anything that it calls."""
    disable: Any = torch.compiler.disable
    return cast("F", disable(function, recursive=recursive))


def calling_module_frame() -> FrameType | None:
    """The frame of the `Module.__call__` that runs the hook that calls this; None if not found."""
    frame: FrameType | None = sys._getframe(1)
    # `Hook` and the wrapper that `dynamo_disable` makes lie between.
    for _ in range(10):
        if frame is None:
            return None
        if frame.f_code.co_name == "_call_impl":
            return frame
        frame = frame.f_back
    return None


def is_running(wanted: FrameType, thread: int) -> bool:
    """Tell whether `wanted` is on the Python stack of `thread`."""
    frame: FrameType | None = (
        sys._getframe(1) if thread == get_ident() else sys._current_frames().get(thread)
    )
    # A frame that is on no stack any more belongs to a call that was interrupted.
    while frame is not None:
        if frame is wanted:
            return True
        frame = frame.f_back
    return False


def is_replicating() -> bool:
    """Tell whether torch.nn.DataParallel is copying a model in this thread."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == "torch.nn.parallel.replicate":
            return True
        frame = frame.f_back
    return False


def version_witness(tensor: torch.Tensor) -> torch.Tensor:
    """An empty tensor that shares the version counter of `tensor`, and not its memory."""
    witness = tensor.detach()
    _TENSOR.data.__set__(witness, torch.empty(0, dtype=tensor.dtype, device=tensor.device))
    return witness


_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def hooks_of(module: torch.nn.Module) -> list[Callable[..., Any]]:
    """The hooks that a call of `module` runs, those on all modules included."""
    return [
        hook
        for name in _HOOKS
        for hooks in (getattr(module, name), getattr(nn_module, f"_global{name}"))
        for hook in hooks.values()
    ]


def is_compiled(module: torch.nn.Module) -> bool:
    """True for a module whose call is compiled: by its `compile()`, or by `torch.compile`, which
    returns a module around it."""
    own = module.__dict__.get("forward")
    return (
        "_orig_mod" in module._modules
        or getattr(module, "_compiled_call_impl", None) is not None
        or hasattr(own, "_torchdynamo_orig_callable")
    )


_names = threading.local()
"""Attribute `name`: of the module whose checkpointed calls begin in this thread."""


@contextlib.contextmanager
def named_checkpoints(name: str) -> Iterator[None]:
    """Have checkpointed calls inside know that they belong to the module `name`, which begins
    them itself: nothing that is called in one would tell."""
    before = getattr(_names, "name", "")
    _names.name = name
    try:
        yield
    finally:
        _names.name = before


class CheckpointCall:
    """A call of `torch.utils.checkpoint`, with gradients and outside of backward. Its graph holds
    its inputs; this object holds no tensors.

    owner, label: watchers set them. A label is given by `named_checkpoints`.
    """

    __slots__ = ("_inputs", "_saved", "label", "owner")

    def __init__(self, args: Sequence[Any]) -> None:
        self.owner: object = None
        self.label: str = getattr(_names, "name", "")
        self._inputs = [weakref.ref(arg) for arg in args if isinstance(arg, torch.Tensor)]
        self._saved: Callable[[], list[Any]] = list

    def keeps(self, saved: Callable[[], list[Any]]) -> None:
        """Set the source of `pairs`. saved: returns the SavedTensors of the inputs, in order; none
        when the graph is gone.
        """
        self._saved = saved

    def inputs(self) -> list[torch.Tensor]:
        return [tensor for ref in self._inputs if (tensor := ref()) is not None]

    def pairs(self) -> list[tuple[torch.Tensor, Any]]:
        """The inputs that live, each with its SavedTensor (it has `register_hooks`)."""
        saved = self._saved()
        if not saved:
            return []
        inputs = [ref() for ref in self._inputs]
        return [
            (tensor, of) for tensor, of in zip(inputs, saved, strict=True) if tensor is not None
        ]


class CheckpointWatcher(Protocol):
    """Listener to checkpointed calls."""

    def checkpoint_begins(self, call: CheckpointCall) -> None:
        """A call begins.

        Reentrant ones keep their inputs when they end, the others before their function runs.
        """

    def checkpoint_saved(self, call: CheckpointCall) -> None:
        """The graph holds the inputs from now on: `call.pairs()` returns them."""


_watchers: list[CheckpointWatcher] = []


def watch_checkpoints(watcher: CheckpointWatcher) -> Callable[[], None]:
    """Tell `watcher` of every call of `torch.utils.checkpoint.checkpoint`; returns a stop function.

    Calls of both kinds, reentrant or not, except calls inside of other checkpoints and calls under
    the user's own hooks on saved tensors. Without a watcher torch is unchanged. Raises:
    ValueError when this torch holds the inputs of checkpoints in an unknown way.
    """
    # torch's functions are replaced once, whatever the number of watchers.
    if not _watchers:
        _stop_telling.append(_tell_of_checkpoints())
    _watchers.append(watcher)

    def end() -> None:
        if watcher not in _watchers:
            return
        _watchers.remove(watcher)
        if not _watchers:
            _stop_telling.pop()()

    return end


_stop_telling: list[Callable[[], None]] = []
"""One function while anyone watches: it puts torch's own functions back."""


def _tell_of_checkpoints() -> Callable[[], None]:
    """Put the engine's functions before torch's. Returns a function that removes them."""
    checkpoint: Any = torch_checkpoint
    frame_class: Any = getattr(checkpoint, "_CheckpointFrame", None)
    saver_class: Any = getattr(checkpoint, "_NoopSaveInputs", None)
    if hasattr(frame_class, "save_inputs"):  # torch 2.12 and later
        end_plain = _tell_of_frames(frame_class)
    elif saver_class is not None:  # torch 2.10 and 2.11
        end_plain = _tell_of_savers(saver_class)
    else:
        raise ValueError(
            f"activations=: torch {torch.__version__} keeps the inputs of checkpoints in "
            f"a way that is not known here; tested are torch {', '.join(TESTED)}: install one of "
            "them, or leave activations= out"
        )
    end_reentrant = _tell_of_reentrant(checkpoint.CheckpointFunction)

    def end() -> None:
        end_plain()
        end_reentrant()

    return end


def _tell(call: CheckpointCall) -> None:
    for watcher in tuple(_watchers):
        watcher.checkpoint_begins(call)
        watcher.checkpoint_saved(call)


def _tell_of_frames(frame_class: Any) -> Callable[[], None]:
    """Checkpoints that are not reentrant: the frame of a call has its inputs as SavedTensors."""
    plain_save = frame_class.save_inputs

    def save_inputs(frame: Any, *args: Any) -> None:
        plain_save(frame, *args)
        if not _keeps_plainly():
            return
        # Weak: the graph holds the frame, and the engine must not keep the graph alive.
        alive = weakref.ref(frame)

        def saved() -> list[Any]:
            found = alive()
            return (
                [arg for arg in found.saved_args if isinstance(arg, _C._autograd.SavedTensor)]
                if found is not None
                else []
            )

        call = CheckpointCall(args)
        call.keeps(saved)
        _tell(call)

    def end() -> None:
        frame_class.save_inputs = plain_save

    frame_class.save_inputs = save_inputs
    return end


def _tell_of_savers(saver_class: Any) -> Callable[[], None]:
    """Checkpoints that are not reentrant: a node that never runs saves a dummy and the inputs."""
    plain_apply = saver_class.apply

    def apply(dummy: torch.Tensor, kwargs: dict[str, Any], *args: Any) -> Any:
        saver = plain_apply(dummy, kwargs, *args)
        if not _keeps_plainly():
            return saver
        # Weak: the frame of the call holds the saver, and the graph holds the frame.
        alive = weakref.ref(saver)

        def saved() -> list[Any]:
            found = alive()
            return list(found.grad_fn._raw_saved_tensors)[1:] if found is not None else []

        call = CheckpointCall(args)
        call.keeps(saved)
        _tell(call)
        return saver

    def end() -> None:
        # torch's own is inherited, and visible again without this one.
        del saver_class.apply

    saver_class.apply = staticmethod(apply)
    return end


def _tell_of_reentrant(function_class: Any) -> Callable[[], None]:
    """Reentrant checkpoints: a call is an autograd function, whose node saves the inputs."""
    plain_apply = function_class.apply

    def apply(run_function: Any, preserve_rng_state: bool, *args: Any) -> Any:
        if not _keeps_plainly():
            return plain_apply(run_function, preserve_rng_state, *args)
        call = CheckpointCall(args)
        for watcher in tuple(_watchers):
            watcher.checkpoint_begins(call)
        outputs = plain_apply(run_function, preserve_rng_state, *args)
        several = outputs if isinstance(outputs, tuple) else (outputs,)
        node = next(
            (
                out.grad_fn
                for out in several
                if isinstance(out, torch.Tensor) and out.grad_fn is not None
            ),
            None,
        )
        if node is not None:
            call.keeps(lambda: list(node._raw_saved_tensors))  # type: ignore[attr-defined]
            for watcher in tuple(_watchers):
                watcher.checkpoint_saved(call)
            # From here on whoever holds the call does not hold the graph.
            call.keeps(list)
        return outputs

    def end() -> None:
        # torch's own is inherited, and visible again without this one.
        del function_class.apply

    function_class.apply = staticmethod(apply)
    return end


def _keeps_plainly() -> bool:
    """True when saved tensors stay until backward, and no saved-tensor hooks of others take
    them."""
    hooks = _C._autograd._top_saved_tensors_default_hooks(True)
    return torch.is_grad_enabled() and graph_task_id() == NO_TASK and hooks is None


def is_out_of_memory(error: BaseException) -> bool:
    """True where memory ran out, the machine's or a device's. The CPU's allocator has no error of
    its own for that.
    """
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    # The second in builds for systems other than Linux.
    texts = ("DefaultCPUAllocator: can't allocate memory", "DefaultCPUAllocator: not enough memory")
    return isinstance(error, RuntimeError) and any(text in str(error) for text in texts)


def dcp_storage_info(relative_path: str, offset: int, length: int) -> Any:
    """The place of a tensor, as torch.distributed.checkpoint notes it in `.metadata`."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    return _StorageInfo(relative_path, offset, length)
