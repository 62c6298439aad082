"""Semi-private interfaces of torch that the engine uses, in one file, with a test for each.

`make torch-matrix` runs `tests/unit/test_torch_compat.py` and the tests of the engine's core with
every version in `TESTED`: the oldest that the metadata allows, the pinned one, and the newest. Each
interface below behaves the same in all of them, unless its row says otherwise. If a new torch
changes one, a test of `test_torch_compat.py` fails, and the row says what would break.

    name here                    corner of torch                    what breaks without it
    graph_task_id                _C._current_graph_task_id          a nested backward ends the uses
                                                                    of the outer one, whose units
                                                                    are released too early
    graph_is_kept                _C._autograd.                      updates during backward change
                                 _get_current_graph_task_keep_graph weights that the next backward
                                                                    of a retained graph needs
    sequence_number,             _C._autograd._get_sequence_nr,     if a module returns one of its
    node_sequence_number         Node._sequence_nr                  inputs unchanged, backward
                                                                    gathers units again that it has
                                                                    finished with
    leaf_of                      AccumulateGrad.variable, its       backwards of other models in
                                 _sequence_nr                       other threads are taken for a
                                                                    backward of this model
    set_sequence_number          Node._set_sequence_nr              in the joint backward of
                                                                    accumulate(), torch runs the
                                                                    whole last micro-batch before
                                                                    the others
    DisableTorchFunctionSubclass _C.DisableTorchFunctionSubclass    reading an attribute of a
                                                                    parameter at rest recurses
                                                                    without end
    NO_TORCH_FUNCTION            _C._disabled_torch_function_impl   operations on `p.grad` pass
                                                                    through `__torch_function__`
                                                                    before `__torch_dispatch__`
    profiled                     _C._autograd._profiler_enabled     ranges cost time when no
                                                                    profiler runs
    resize_storage, storage_size UntypedStorage.resize_, size       released units keep their memory
    is_resizable                 UntypedStorage.resizable           the release of a unit that was
                                                                    exported to numpy raises
    set_versions                 _C._autograd.                      autograd takes a unit that is
                                 _unsafe_set_version_counter        gathered again in backward for
                                                                    modified, and raises
    bump_version                 autograd.graph.increment_version   autograd misses the writes in
                                                                    `handle.gather`, and computes
                                                                    wrong gradients
    version_of                   Tensor._version                    a write to a weight in forward
                                                                    is lost without an error
    version_found_by             the text of autograd's error of    a released parameter that
                                 a saved tensor's version           backward needs is not named
    tensor_refs, storage_refs    Tensor._use_count,                 records of calls are kept after
                                 _C._storage_Use_Count              their graphs are freed
    watch_backward               autograd._engine_run_backward,     results that a module does not
                                 autograd.graph, the same name      return, but stores, get no hooks
    queue_callback               Variable._execution_engine.        units whose uses never finish in
                                 queue_callback                     a backward stay gathered
    register_post_accumulate     Tensor.register_post_              a gradient that autograd gives
                                 accumulate_grad_hook               to a parameter at rest is lost
    make_wrapper                 Tensor._make_wrapper_subclass      a parameter at rest needs
                                                                    storage
    exchange                     _C._swap_tensor_impl, __class__    other references to a parameter
                                 and hooks of Tensor                keep the original, which is not
                                                                    trained
    storage_of, storage_uses     Tensor.untyped_storage,            other tensors in the memory of a
                                 _C._storage_Use_Count              parameter are not found
    gradient_node                Tensor._use_count,                 the gradients of a graph from
                                 autograd.graph.get_gradient_edge   before `offload` are lost
    METADATA                     getters and methods of Tensor,     asking a parameter at rest for
                                 Tensor.grad_dtype                  its shape raises
    separate_version             Tensor.data, getter                a write to one parameter counts
                                                                    as one to all of its unit
    set_data, version_witness    Tensor.data, setter                a unit that was exported to
                                                                    numpy cannot move; writes to
                                                                    offloaded activations are missed
    parse_to                     _C._nn._parse_to                   `.to(...)` of a parameter at
                                                                    rest or of tiled logits is not
                                                                    understood
    calling_module_frame         the name of a frame of             forwards that KeyboardInterrupt
                                 Module.__call__: _call_impl        has ended count as running
    is_running                   sys._current_frames                the same
    is_replicating               the name of a module:              DataParallel is refused without
                                 torch.nn.parallel.replicate        being named
    address_of                   Tensor.data_ptr raises without     an output that is a view of a
                                 an address                         unit is not noticed, or an
                                                                    ordinary output raises
    dynamo_disable               _C._dynamo.eval_frame.             torch.compile traces the
                                 set_code_exec_strategy, functions' engine's hooks
                                 _torchdynamo_disable
    OptimizerBase                __wrapped__ of methods of          an optimizer's first step
                                 optim.Optimizer                    imports torch's compiler
    watch_checkpoints,           utils.checkpoint:                  `activations=` is a ValueError
    CheckpointCall,              CheckpointFunction,
    named_checkpoints            _CheckpointFrame.save_inputs
                                 (from 2.12), _NoopSaveInputs (to
                                 2.11), Node._raw_saved_tensors
    hooks_of                     Module._forward_hooks and its      hooks on a head whose logits are
                                 like, nn.modules.module.           deferred do not see them
                                 _global_forward_hooks and its like
    is_compiled                  Module._compiled_call_impl,        a compiled model is refused in
                                 OptimizedModule._orig_mod,         its first forward, and not by
                                 _torchdynamo_orig_callable         `inf.microbatched`
    all_gather_single            distributed.all_gather_single      ranks cannot compare names,
                                 (from 2.13),                       sizes and step values, and NCCL
                                 all_gather_into_tensor (to 2.12)   gathers no unit
    assert_async                 torch._assert_async                on a GPU an index out of range
                                                                    reads unrelated memory
    make_mem_pool                cuda.MemPool(use_on_oom=)          idle memory of the gather pool
                                 (from 2.8)                         is not given to activations when
                                                                    the device runs out
    clear_autocast_cache         torch.clear_autocast_cache         16-bit copies of fp32 weights
                                                                    stay on the device
    FakeTensor, FakeTensorMode,  _subclasses.fake_tensor            `init=` builds the model in
    FAKE_HAS_NO_VALUES                                              memory, and not one parameter
                                                                    at a time
    dcp_storage_info             distributed.checkpoint.            torch cannot read what
                                 filesystem._StorageInfo            `export_dcp` writes
    is_out_of_memory             the CPU allocator's error text     out of memory, `infinity train`
                                                                    ends with a traceback

The tests also cover undocumented behaviour of public functions: a prehook on a node runs after
hooks on its tensors; hooks with `always_call` run after an exception, but not after
KeyboardInterrupt; saving and loading iterate `Module._parameters` once.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
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
"""Versions of torch that `make torch-matrix` tests: oldest allowed, pinned, newest."""

_C: Any = torch._C
_EVAL_FRAME: Any = _C._dynamo.eval_frame
_TENSOR: Any = torch.Tensor
F = TypeVar("F", bound=Callable[..., Any])

NO_TASK = -1
"""Result of `graph_task_id` outside of backward."""

graph_task_id: Callable[[], int] = _C._current_graph_task_id
"""Return the id of the backward that this thread is running; nested backwards have other ids."""

graph_is_kept: Callable[[], bool] = _C._autograd._get_current_graph_task_keep_graph
"""Return whether this thread's running backward retains its graph, which may then run again."""

sequence_number: Callable[[], int] = _C._autograd._get_sequence_nr
"""Return the sequence number of the next autograd node that this thread creates.

Among ready nodes backward runs the highest number first.
"""

FakeTensor = fake_tensor.FakeTensor
"""A tensor with device, strides and storage, but without memory."""

FakeTensorMode = fake_tensor.FakeTensorMode
"""Mode in which operations compute only shapes and aliases."""

FAKE_HAS_NO_VALUES: tuple[type[Exception], ...] = (
    fake_tensor.DataDependentOutputException,
    fake_tensor.DynamicOutputShapeException,
)
"""Errors of operations that need the values of a `FakeTensor`."""

DisableTorchFunctionSubclass: Any = _C.DisableTorchFunctionSubclass
"""Context that disables `__torch_function__` of subclasses."""

assert_async: Callable[[torch.Tensor, str], None] = torch._assert_async
"""Assert that a tensor of one element is not zero: raises RuntimeError on the CPU; on a GPU a
device-side assertion, without a wait.
"""

NO_TORCH_FUNCTION: Any = _C._disabled_torch_function_impl
"""`__torch_function__` for a subclass that only uses `__torch_dispatch__`."""


def all_gather_single(
    whole: torch.Tensor, mine: torch.Tensor, *, group: Any, async_op: bool = False
) -> Any:
    """Gather the equal parts of all ranks of `group` into `whole`, in order of rank. Blocks.

    async_op: do not block; returns a handle with `wait`.
    """
    import torch.distributed as dist

    # Renamed in torch 2.13; a later version may remove the old name.
    gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(whole, mine, group=group, async_op=async_op)


def make_mem_pool() -> Any:
    """Create a CUDA memory pool on the current device. On out-of-memory, other allocations use its
    free blocks.
    """
    return torch.cuda.MemPool(use_on_oom=True)


def clear_autocast_cache(device_type: str) -> None:
    """Inside an autocast region for `device_type`, drop its cached 16-bit copies of weights.
    Results do not change: the next use casts again.
    """
    if torch.is_autocast_enabled(device_type):
        torch.clear_autocast_cache()


def profiled(name: str) -> contextlib.AbstractContextManager[object]:
    """Return a context that records a range in torch's profiler, if one is active; also in NVTX,
    under `torch.autograd.profiler.emit_nvtx()`.
    """
    if not _C._autograd._profiler_enabled():
        return contextlib.nullcontext()
    return torch.profiler.record_function(name)


def resize_storage(tensor: torch.Tensor, size_bytes: int) -> None:
    """Resize the storage shared by `tensor` and its views; 0 frees it.

    The contents are lost.
    """
    storage = tensor.untyped_storage()
    if storage.size() != size_bytes:
        cast("Any", storage).resize_(size_bytes)


def is_resizable(tensor: torch.Tensor) -> bool:
    """Return whether the storage may be resized.

    An export, for instance to numpy, makes it permanently non-resizable.
    """
    return bool(cast("Any", tensor.untyped_storage()).resizable())


def storage_size(tensor: torch.Tensor) -> int:
    """Return the current bytes of the storage of `tensor`."""
    return tensor.untyped_storage().size()


def set_versions(tensors: Sequence[torch.Tensor], versions: Sequence[int]) -> None:
    """Set version counters.

    Backward compares a saved tensor's counter with its value at saving.
    """
    _C._autograd._unsafe_set_version_counter(tuple(tensors), tuple(versions))


def bump_version(tensor: torch.Tensor) -> None:
    """Increment the version counter: backward raises for graphs that saved `tensor` before."""
    torch.autograd.graph.increment_version(tensor)


def version_of(tensor: torch.Tensor) -> int:
    """Return the version counter of `tensor`."""
    return int(tensor._version)


def version_found_by(error: RuntimeError) -> int | None:
    """Parse the saved tensor's version from autograd's error; None for another error."""
    found = re.search(r"is at version (\d+); expected version", str(error))
    return int(found[1]) if found else None


def tensor_refs(tensor: torch.Tensor) -> int:
    """Count the C++ references to a tensor: of graphs, views and its Python object."""
    return int(cast("Any", tensor)._use_count())


def storage_refs(tensor: torch.Tensor) -> int:
    """Count the tensors that share the storage of `tensor`, including itself."""
    return int(_C._storage_Use_Count(tensor.untyped_storage()._cdata))


class BackwardWatcher(Protocol):
    """Observer of backwards."""

    def hook_exits(self, roots: Sequence[Any]) -> None:
        """Called before a backward from these nodes, in its thread."""

    def failed(self, error: RuntimeError) -> None:
        """Called when a backward has raised; may raise another error instead."""


_backward_watchers: weakref.WeakSet[BackwardWatcher] = weakref.WeakSet()


def watch_backward(watcher: BackwardWatcher) -> None:
    """Notify `watcher`, held weakly, of each call of `Tensor.backward`, `torch.autograd.backward`
    and `torch.autograd.grad`, including nested ones. The first watcher patches torch.
    """
    _backward_watchers.add(watcher)
    plain_run = torch.autograd.graph._engine_run_backward
    if getattr(plain_run, "reports_to_watchers", False):
        return

    @functools.wraps(plain_run)
    def run(outputs: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        watchers = tuple(_backward_watchers)
        # Each root is a tensor or a GradientEdge.
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

    run.reports_to_watchers = True  # type: ignore[attr-defined]
    for module in (torch.autograd, torch.autograd.graph):
        cast("Any", module)._engine_run_backward = run


def queue_callback(callback: Callable[[], None]) -> None:
    """Run `callback` once when this thread's backward succeeds; not if it raises."""
    engine: Any = torch.autograd.Variable._execution_engine  # type: ignore[attr-defined]
    engine.queue_callback(callback)


def register_post_accumulate(tensor: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> None:
    """Call `Tensor.register_post_accumulate_grad_hook`, bypassing a subclass's override."""
    with DisableTorchFunctionSubclass():
        torch.Tensor.register_post_accumulate_grad_hook(tensor, hook)


def node_sequence_number(node: Any) -> int:
    """Return the sequence number of an autograd node (see `sequence_number`)."""
    return int(node._sequence_nr())


def leaf_of(node: Any) -> torch.Tensor | None:
    """Return the leaf whose gradient an autograd node accumulates; None for other nodes."""
    # AccumulateGrad nodes have the highest number; so have error nodes, which have no variable.
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
    """Create a tensor of subclass `cls` with metadata but no storage. strides: None: contiguous."""
    # A parameter created in inference mode is not trainable.
    with torch.inference_mode(False):
        made: torch.Tensor = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, shape, strides=strides, dtype=dtype, device=device, requires_grad=requires_grad
        )
    return made


def exchange(first: torch.Tensor, second: torch.Tensor) -> None:
    """Exchange class, attributes, hooks and C++ tensor of two tensor objects, so that references to
    either object see the contents of the other. A second exchange undoes the first.

    Unlike `torch.utils.swap_tensors`, it accepts objects with weak references and tensors that a
    graph holds. Raises: RuntimeError if C++ has weak references to one; then nothing has changed.
    """
    with DisableTorchFunctionSubclass():
        of_first, of_second = _hook_dicts(first), _hook_dicts(second)
        _C._swap_tensor_impl(first, second)
        first.__class__, second.__class__ = second.__class__, first.__class__
        first.__dict__, second.__dict__ = second.__dict__, first.__dict__
        # These two dicts belong to the Python objects, but C++ also stores them.
        _set_hook_dicts(second, of_first)
        _set_hook_dicts(first, of_second)


def _hook_dicts(tensor: Any) -> tuple[Any, Any]:
    return tensor._backward_hooks, tensor._post_accumulate_grad_hooks


def _set_hook_dicts(tensor: Any, dicts: tuple[Any, Any]) -> None:
    tensor._backward_hooks, tensor._post_accumulate_grad_hooks = dicts


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """Return a tensor's storage; None if it has none (sparse, wrapped by functorch)."""
    try:
        with DisableTorchFunctionSubclass():
            return torch.Tensor.untyped_storage(tensor)
    except RuntimeError:
        return None


def storage_uses(storage: torch.UntypedStorage) -> int:
    """Count the C++ tensors with this storage."""
    # Without the reference of the Python object.
    return int(_C._storage_Use_Count(storage._cdata)) - 1


def gradient_node(leaf: torch.Tensor) -> Any:
    """Return the node at which a live graph accumulates the gradient of `leaf`; None without such a
    graph.
    """
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
"""Functions that need none of a tensor's values, as passed to `__torch_function__`: those that only
read metadata, the deletion of `grad`, and the setter of `grad_dtype`."""


def separate_version(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor on the same storage with a new version counter and no autograd history."""
    # The getter of `Tensor`, which subclasses may override.
    separate: torch.Tensor = _TENSOR.data.__get__(tensor)
    return separate


def set_data(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Assign `tensor.data`, bypassing a subclass's override: replaces the object's storage."""
    _TENSOR.data.__set__(tensor, value)


def parse_to(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[torch.device | None, torch.dtype | None, bool]:
    """Parse the arguments of `Tensor.to`: (device, dtype, whether a copy is forced)."""
    kwargs = dict(kwargs)
    copy = bool(kwargs.pop("copy", False))
    if args and isinstance(args[0], torch.Tensor):
        return args[0].device, args[0].dtype, copy
    device, dtype, _, _ = _C._nn._parse_to(*args, **kwargs)
    return device, dtype, copy


def address_of(tensor: torch.Tensor) -> int:
    """Return the address of the first element; 0 if there is none.

    Meta, fake, functorch-wrapped, empty and sparse tensors have none.
    """
    if type(tensor) is not torch.Tensor and not isinstance(tensor, torch.nn.Parameter):
        return 0
    try:
        return tensor.data_ptr()
    except RuntimeError:
        # Wrapped by a functorch transform, or sparse: no address.
        return 0


def dynamo_disable(function: F, *, recursive: bool = True) -> F:
    """Exclude `function`, and if `recursive` its callees, from tracing by torch.compile.

    As `torch.compiler.disable`, which would import torch's compiler: that takes over a second.
    Without `recursive` it returns `function` itself, which must be made in Python.
    """

    @functools.wraps(function)
    def untraced(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    # The strategy of a code object: skip only its frames, or also the calls that they make.
    excluded: Any = untraced if recursive else function
    skip, trace = _EVAL_FRAME._FrameAction.SKIP, _EVAL_FRAME._FrameAction.DEFAULT
    strategy = _EVAL_FRAME._FrameExecStrategy(skip, skip if recursive else trace)
    _EVAL_FRAME.set_code_exec_strategy(excluded.__code__, strategy)
    # Dynamo breaks the graph of a traced caller at this attribute.
    excluded._torchdynamo_disable = True
    return cast("F", excluded)


class OptimizerBase(torch.optim.Optimizer):
    """`torch.optim.Optimizer`, but its methods do not import torch's compiler."""

    add_param_group = dynamo_disable(inspect.unwrap(torch.optim.Optimizer.add_param_group))
    zero_grad = dynamo_disable(inspect.unwrap(torch.optim.Optimizer.zero_grad))
    state_dict: Callable[..., dict[str, Any]] = dynamo_disable(
        inspect.unwrap(torch.optim.Optimizer.state_dict)
    )


def calling_module_frame() -> FrameType | None:
    """Return the frame of the `Module.__call__` whose hook called this; None if not found."""
    frame: FrameType | None = sys._getframe(1)
    # Frames in between: `Hook` and the wrapper of `dynamo_disable`.
    for _ in range(10):
        if frame is None:
            return None
        if frame.f_code.co_name == "_call_impl":
            return frame
        frame = frame.f_back
    return None


def is_running(wanted: FrameType, thread: int) -> bool:
    """Return whether frame `wanted` is on the Python stack of `thread`."""
    frame: FrameType | None = (
        sys._getframe(1) if thread == get_ident() else sys._current_frames().get(thread)
    )
    while frame is not None:
        if frame is wanted:
            return True
        frame = frame.f_back
    return False


def is_replicating() -> bool:
    """Return whether torch.nn.DataParallel is replicating a model in this thread."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == "torch.nn.parallel.replicate":
            return True
        frame = frame.f_back
    return False


def version_witness(tensor: torch.Tensor) -> torch.Tensor:
    """Return an empty tensor that shares only the version counter of `tensor`."""
    witness = tensor.detach()
    _TENSOR.data.__set__(witness, torch.empty(0, dtype=tensor.dtype, device=tensor.device))
    return witness


_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def hooks_of(module: torch.nn.Module) -> list[Callable[..., Any]]:
    """Return the hooks that a call of `module` runs, including global ones."""
    return [
        hook
        for name in _HOOKS
        for hooks in (getattr(module, name), getattr(nn_module, f"_global{name}"))
        for hook in hooks.values()
    ]


def is_compiled(module: torch.nn.Module) -> bool:
    """Return whether a module is compiled: by its `compile()`, or wrapped by `torch.compile`."""
    own = module.__dict__.get("forward")
    return (
        "_orig_mod" in module._modules
        or getattr(module, "_compiled_call_impl", None) is not None
        or hasattr(own, "_torchdynamo_orig_callable")
    )


_names = threading.local()
"""Attribute `name`: the module set by `named_checkpoints` in this thread."""


@contextlib.contextmanager
def named_checkpoints(name: str) -> Iterator[None]:
    """Label checkpointed calls in the block with the module `name`. For modules that checkpoint by
    themselves: the called function does not identify them.
    """
    before = getattr(_names, "name", "")
    _names.name = name
    try:
        yield
    finally:
        _names.name = before


class CheckpointCall:
    """A call of `torch.utils.checkpoint`, with gradients and outside of backward. Holds no tensors;
    its graph holds its inputs.

    owner: set by watchers. label: from `named_checkpoints`; watchers may change it.
    """

    __slots__ = ("_inputs", "_saved", "label", "owner")

    def __init__(self, args: Sequence[Any]) -> None:
        self.owner: object = None
        self.label: str = getattr(_names, "name", "")
        self._inputs = [weakref.ref(arg) for arg in args if isinstance(arg, torch.Tensor)]
        self._saved: Callable[[], list[Any]] = list

    def keeps(self, saved: Callable[[], list[Any]]) -> None:
        """Set the source of `pairs`. saved: returns the inputs' SavedTensors, in order; [] once the
        graph is freed.
        """
        self._saved = saved

    def inputs(self) -> list[torch.Tensor]:
        return [tensor for ref in self._inputs if (tensor := ref()) is not None]

    def pairs(self) -> list[tuple[torch.Tensor, Any]]:
        """Return the live inputs with their SavedTensors (which have `register_hooks`)."""
        saved = self._saved()
        if not saved:
            return []
        inputs = [ref() for ref in self._inputs]
        return [
            (tensor, of) for tensor, of in zip(inputs, saved, strict=True) if tensor is not None
        ]


class CheckpointWatcher(Protocol):
    """Observer of checkpointed calls."""

    def checkpoint_begins(self, call: CheckpointCall) -> None:
        """Called when a call begins.

        Reentrant calls save their inputs when they end, others before their function runs.
        """

    def checkpoint_saved(self, call: CheckpointCall) -> None:
        """Called once the graph holds the inputs; `call.pairs()` returns them."""


_watchers: list[CheckpointWatcher] = []


def watch_checkpoints(watcher: CheckpointWatcher) -> Callable[[], None]:
    """Notify `watcher` of calls of `torch.utils.checkpoint.checkpoint`. Returns a function that
    ends this.

    Notifies of reentrant and non-reentrant calls, except calls inside other checkpoints or under
    the user's saved-tensor hooks. Without a watcher torch is unchanged. Raises: ValueError if this
    torch saves the inputs of checkpoints in an unknown way.
    """
    # Only the first watcher replaces torch's functions.
    if not _watchers:
        _stop_reporting.append(_report_checkpoints())
    _watchers.append(watcher)

    def end() -> None:
        if watcher not in _watchers:
            return
        _watchers.remove(watcher)
        if not _watchers:
            _stop_reporting.pop()()

    return end


_stop_reporting: list[Callable[[], None]] = []
"""One function while there are watchers; it restores torch's functions."""


def _report_checkpoints() -> Callable[[], None]:
    """Wrap torch's functions. Returns a function that restores them."""
    checkpoint: Any = torch_checkpoint
    frame_class: Any = getattr(checkpoint, "_CheckpointFrame", None)
    saver_class: Any = getattr(checkpoint, "_NoopSaveInputs", None)
    if hasattr(frame_class, "save_inputs"):  # torch 2.12 and later
        end_plain = _report_frames(frame_class)
    elif saver_class is not None:  # torch 2.10 and 2.11
        end_plain = _report_savers(saver_class)
    else:
        raise ValueError(
            f"activations=: torch {torch.__version__} keeps the inputs of checkpoints in "
            f"a way that is not known here; tested are torch {', '.join(TESTED)}: install one of "
            "them, or leave activations= out"
        )
    end_reentrant = _report_reentrant(checkpoint.CheckpointFunction)

    def end() -> None:
        end_plain()
        end_reentrant()

    return end


def _tell(call: CheckpointCall) -> None:
    for watcher in tuple(_watchers):
        watcher.checkpoint_begins(call)
        watcher.checkpoint_saved(call)


def _report_frames(frame_class: Any) -> Callable[[], None]:
    """Wrap non-reentrant checkpoints: a call's frame has its inputs as SavedTensors."""
    plain_save = frame_class.save_inputs

    def save_inputs(frame: Any, *args: Any) -> None:
        plain_save(frame, *args)
        if not _keeps_plainly():
            return
        # Weak: the graph holds the frame, and a strong reference would keep both alive.
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


def _report_savers(saver_class: Any) -> Callable[[], None]:
    """Wrap non-reentrant checkpoints: a node that never runs saves a dummy and the inputs."""
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
        # torch's `apply` is inherited from autograd.Function: deleting this one uncovers it.
        del saver_class.apply

    saver_class.apply = staticmethod(apply)
    return end


def _report_reentrant(function_class: Any) -> Callable[[], None]:
    """Wrap reentrant checkpoints: a call is an autograd function, whose node saves the inputs."""
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
            # Drop the node, so that the call does not keep the graph alive.
            call.keeps(list)
        return outputs

    def end() -> None:
        # torch's `apply` is inherited from autograd.Function: deleting this one uncovers it.
        del function_class.apply

    function_class.apply = staticmethod(apply)
    return end


def _keeps_plainly() -> bool:
    """Return whether autograd saves tensors until backward, without the user's saved-tensor
    hooks.
    """
    hooks = _C._autograd._top_saved_tensors_default_hooks(True)
    return torch.is_grad_enabled() and graph_task_id() == NO_TASK and hooks is None


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that host or device memory ran out. The CPU allocator raises a
    plain RuntimeError.
    """
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    # The second text is from builds for systems other than Linux.
    texts = ("DefaultCPUAllocator: can't allocate memory", "DefaultCPUAllocator: not enough memory")
    return isinstance(error, RuntimeError) and any(text in str(error) for text in texts)


def dcp_storage_info(relative_path: str, offset: int, length: int) -> Any:
    """Create the record of a tensor's place in a torch.distributed.checkpoint `.metadata`."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    return _StorageInfo(relative_path, offset, length)
