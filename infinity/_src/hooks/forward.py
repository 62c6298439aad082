"""Forward: hooks on the modules that gather units before a call and release them after it.

    forward   pre hook: push a frame, gather the module's units
              post hook: leave a BackwardUse on the graph, release
    lookup    `self.wte.weight` of a unit that no frame holds: gathered at once, held by the
              innermost frame
    backward  see `infinity._src.hooks.backward`
    between   `gather()` opens windows, `state_dict` copies; whole parameters on the device can be
              read (`whole_params`), other reads raise `ParameterReleased`

The life cycle decides when a unit must be gathered; the unsharder decides which other units are.
References to a unit are active uses, active frames and open windows.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from infinity._src.base.torch_compat import (
    NO_TASK,
    address_of,
    calling_module_frame,
    clear_autocast_cache,
    dynamo_disable,
    graph_task_id,
    is_running,
    register_post_accumulate,
    sequence_number,
)
from infinity._src.hooks import tensors
from infinity._src.hooks.activation_offload import Activations
from infinity._src.hooks.backward import Backward, BackwardUse
from infinity._src.hooks.block_order import BlockLog, Marks
from infinity._src.hooks.module_params import Check, Installed, hook_state_dict, install, uninstall
from infinity._src.hooks.unit_refs import UnitRefs, WeightWindow
from infinity._src.hooks.whole_params import ShownWindow, WholeParams
from infinity._src.kernels.tiling.tiled_experts import ChosenTiles
from infinity._src.kernels.tiling.tiled_module import exclude_from_compile, is_idle_call
from infinity._src.params.prefetch_schedule import PassTracker
from infinity._src.params.reduce import GradReducer
from infinity._src.params.sharded_param import Rollback
from infinity._src.params.unit import (
    EngineHook,
    Param,
    Unit,
)
from infinity._src.params.unshard import Unsharder
from infinity.errors import EngineClosed, ParameterReleased


@dataclasses.dataclass(eq=False, slots=True)
class Frame:
    """A hooked module whose forward is running."""

    module: torch.nn.Module
    caller: FrameType | None  # the Python frame of its __call__, which runs as long as the call
    thread: int
    outermost: bool
    held: list[UnitRefs] = dataclasses.field(default_factory=list)
    # Units of the module that this call does not read, and so does not hold.
    idle: list[UnitRefs] = dataclasses.field(default_factory=list)
    use: BackwardUse | None = None  # None: the call failed before it began
    # The exception that was being handled when the call began: it does not come from this frame.
    handled: BaseException | None = dataclasses.field(default_factory=lambda: sys.exc_info()[1])

    @property
    def alive(self) -> bool:
        """True when the frame still runs, in any thread. KeyboardInterrupt leaves dead frames
        behind."""
        return self.caller is None or is_running(self.caller, self.thread)

    @property
    def raised(self) -> BaseException | None:
        """Exception that leaves the frame now, in its post hook."""
        error = sys.exc_info()[1]
        return None if error is self.handled else error

    @property
    def running_here(self) -> bool:
        return self.thread == threading.get_ident() and self.alive


class FrameStack(list[Frame]):
    """Running forwards of one model, innermost last. The life cycle pushes and pops them;
    activations ask whether one runs."""

    @property
    def running_here(self) -> bool:
        return bool(self) and self[-1].running_here


class Hook(EngineHook):
    """Module hook that torch.compile does not trace. Pickling or copying a hooked module raises,
    with the reason."""

    def __init__(self, function: Callable[..., None], units: list[Unit]) -> None:
        self._function = dynamo_disable(function)
        self._units = units

    def __call__(self, *args: Any) -> None:
        self._function(*args)

    def __reduce_ex__(self, protocol: Any) -> Any:
        self._first.__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> Any:
        self._first.__deepcopy__(memo)

    @property
    def _first(self) -> torch.nn.Parameter:
        return next(param.at_rest for unit in self._units for param in unit.params)


class HookedMethod:
    """Wrapper of a module's method that gathers units as the module's forward does. It replaces the
    method in the object until `remove`."""

    def __init__(self, lifecycle: Lifecycle, module: torch.nn.Module, name: str) -> None:
        self._module, self._name = module, name
        # An attribute of the object may shadow the method of its class.
        self._own = module.__dict__.get(name)
        method = getattr(module, name)
        begin = dynamo_disable(lifecycle.pre_forward)
        end = dynamo_disable(lifecycle.post_forward)

        @functools.wraps(method)
        def hooked(*args: Any, **kwargs: Any) -> Any:
            frame, output = sys._getframe(), None
            try:
                begin(module, args, kwargs, frame)
                output = method(*args, **kwargs)
            finally:
                end(module, args, kwargs, output, frame)
            return output

        module.__dict__[name] = dynamo_disable(hooked, recursive=False)

    def remove(self) -> None:
        if self._own is not None:
            self._module.__dict__[self._name] = self._own
        else:
            del self._module.__dict__[self._name]


class Lifecycle:
    """Life cycle of one model's offloaded parameters: makes them sharded parameters, and hooks the
    modules. Sets `at_rest` and `gathered` of every Param.

    The values must already be on their tiers: from here on only `rollback` retains the originals.
    On an error the caller undoes the installation with `rollback`. whole: shows parameters between
    passes. tier: where values rest, for errors. check_state_dict: see
    `infinity._src.hooks.module_params.Check`. activations: notified of every hooked module's
    forward; shares `frames`.

    Raises: ValueError for a tensor that shares a parameter's memory and cannot follow it.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        units: list[Unit],
        unsharder: Unsharder,
        gradients: GradReducer,
        passes: PassTracker,
        *,
        whole: WholeParams | None = None,
        tier: str = "its tier",
        check_state_dict: Check | None = None,
        activations: Activations | None = None,
        frames: FrameStack | None = None,
        rollback: Rollback | None = None,
    ) -> None:
        self.model = model
        self.units = units
        self.unsharder = unsharder
        self._gradients = gradients
        self._passes = passes
        self._whole = whole
        self.closed = False
        self.windows: dict[Param, WeightWindow] = {}
        self._activations = activations
        self.tier = tier
        self._device = next(
            (flat.tensor.device for unit in units for flat in unit.flats), torch.device("cpu")
        )
        # Autograd runs hooks of a device in a separate thread.
        self._lock = threading.RLock()
        self._frames = frames if frames is not None else FrameStack()
        self.backward = Backward(units, unsharder, gradients, self._lock)
        self._log = BlockLog()
        self._grad_hooked: set[Param] = set()
        self._installed: Installed = install(
            model,
            units,
            owner=self,
            on_demand=self.in_forward,
            read=unsharder.read,
            rollback=rollback or Rollback(model),
        )
        owned, modules_of = self._installed.owned, self._installed.modules_of
        self._refs: dict[Unit, UnitRefs] = {
            unit: UnitRefs(unit, unsharder, [(each, owned[each]) for each in modules_of[unit]])
            for unit in units
        }
        for unit in units:
            for param in unit.params:
                # After the engine's hook, so that users' hooks find the proxy in `p.grad`.
                self._hook_grad(param)
                if param in self._installed.post_accumulate:
                    hook = self._installed.post_accumulate[param]
                    param.at_rest.register_post_accumulate_grad_hook(hook)
        self._hooked: dict[torch.nn.Module, list[UnitRefs]] = {}
        self._methods: dict[tuple[torch.nn.Module, str], HookedMethod] = {}
        self._attributes: dict[torch.nn.Module, tensors.AttributeWatch] = {}
        exclude_from_compile(model)
        self._handles: list[RemovableHandle] = self._hook_modules()
        self._handles += hook_state_dict(
            model,
            self._installed.owned,
            (param for unit in units for param in unit.params),
            check_state_dict,
        )

    # -- interface for the engine and users --------------------------------------------------------

    def reset(self) -> None:
        """Release all units that interrupted forwards and backwards hold. No forward or backward
        may run."""
        with self._lock:
            self._reset()

    def recover(self) -> None:
        """Release the units that an interrupted forward or backward still holds. Does nothing while
        a forward or backward runs."""
        left = not self._frames[-1].alive if self._frames else self.backward.running
        # Within a graph task the uses belong to the running backward.
        if left and graph_task_id() == NO_TASK:
            self.reset()

    def detach(self) -> None:
        """Remove the hooks. The module keeps its sharded parameters, which raise EngineClosed from
        now on."""
        if self.closed:
            return
        with self._lock:
            try:
                self._reset()
            finally:
                # Also when the reset fails: hooks must not call a closed engine.
                self.remove_hooks()

    def remove_hooks(self) -> None:
        """Remove the hooks. Units that an interrupted pass holds are not released."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for method in self._methods.values():
            method.remove()
        self._methods.clear()
        uninstall(self._installed)
        self.closed = True
        self.backward.close()

    @contextmanager
    def noting(self, blocks: frozenset[torch.nn.Module]) -> Iterator[BlockLog]:
        """Context that records the calls of these blocks by the forwards inside of it.

        Raises: RuntimeError inside of a forward, a backward, or another such context.
        """
        self.require_open("accumulate()")
        # Frames of an interrupted forward would count as running.
        self.recover()
        if self._frames or self._log.noting or graph_task_id() != NO_TASK:
            raise RuntimeError(
                "accumulate() inside of a forward or a backward, or of the fn of another "
                "accumulate(): call it in the training loop"
            )
        self._log.start(blocks)
        try:
            yield self._log
        finally:
            self._log.stop()
            self.unsharder.expect_forward(False)

    @property
    def next_call(self) -> int:
        """Number of the next checkpointed call, whose inputs may be offloaded."""
        return 0 if self._activations is None else self._activations.next_call

    def reorder_calls(self, marks: Marks) -> None:
        """Prefetch the inputs of checkpointed calls in the order of `reorder_backward`."""
        if self._activations is not None:
            self._activations.reorder(marks)

    def refs_of(self, unit: Unit) -> UnitRefs:
        return self._refs[unit]

    def expect_uses(self, units: Iterable[UnitRefs]) -> None:
        for refs in units:
            self._passes.expect_use(refs.unit)

    def hook_window(self, window: WeightWindow) -> None:
        """Hook an open window so that its gradients are accumulated. Its backward raises if
        training computes with other values than the window shows."""
        refs = self._refs[window.param.unit]

        def check(_grad: torch.Tensor) -> None:
            with self._lock:
                self.backward.task()  # a backward runs, even if it has entered no call yet
                refs.check_version(window=False)

        # Autograd runs tensor hooks, such as the check, before it accumulates.
        window.tensor.register_hook(check)
        window.tensor.register_post_accumulate_grad_hook(self.backward.grad_hook(window.param))

    # -- Host of the at-rest parameters ------------------------------------------------------------

    def readable(self, param: Param) -> torch.Tensor | None:
        """Return the gathered parameter inside forward, its window inside `gather()`; elsewhere
        None, unless it is whole on the device."""
        inside = self.in_forward(param)
        if inside is not None:
            return inside
        window = self.windows.get(param)
        return window.tensor if window is not None else self._between_passes(param)

    def _between_passes(self, param: Param) -> torch.Tensor | None:
        """Return a parameter that is whole on the device, if no forward runs."""
        if self._whole is None:
            return None
        with self._lock:
            # Units of an interrupted pass would count as in use.
            self.recover()
            # After `recover`, frames mean that a forward runs in another thread.
            if self._frames:
                return None
            window = self._whole.show(param)
            if window is None:
                return None
            # From now on passes check for writes through the window.
            watched = self._refs[param.unit].windows
            if window not in watched:
                watched.append(window)
            self._hook_shown(window)
            return window.tensor

    def _hook_shown(self, window: ShownWindow) -> None:
        if window.tensor.requires_grad and not window.hooked:
            window.hooked = True
            self.hook_window(window)
            window.tensor.register_hook(window.check_current)

    def in_forward(self, param: Param) -> torch.Tensor | None:
        """Return the gathered parameter if a forward runs, otherwise None. If no frame holds its
        unit, gather the unit and let the innermost frame hold it.

        Recompute inside backward may run without a frame: then the call's use is active, and holds
        the unit.
        """
        refs = self._refs[param.unit]
        # A recompute may call `forward` past all hooks, without a frame.
        if not self._frames:
            return param.gathered if refs.acquired and graph_task_id() != NO_TASK else None
        frame = self._frames[-1]
        if not frame.running_here:
            return None
        if not refs.acquired:
            with self._lock:
                refs.acquire()
                # The frame releases it together with its own units.
                frame.held.append(refs)
        return param.gathered

    def take_gradient(self, param: Param, grad: torch.Tensor) -> None:
        """Implement `parameter.grad = tensor`: make `grad` [param.shape] the whole gradient."""
        self._gradients.assign(param, grad.detach())

    def set_requires_grad(self, param: Param, flag: bool) -> None:
        param.gathered.requires_grad_(flag)
        window = self.windows.get(param)
        if window is not None:
            window.tensor.requires_grad_(flag)
        shown = self._whole.find(param) if self._whole is not None else None
        if shown is not None:
            # Keep the window, so that writes through it are still detected.
            shown.tensor.requires_grad_(flag)
            self._hook_shown(shown)
        # A parameter that was frozen until now has no hook, and possibly no states.
        self._hook_grad(param)
        if flag:
            self.unsharder.unfrozen(param)

    def load(self, param: Param, value: torch.Tensor) -> None:
        """Set the values from a state dict. value: [param.shape] or expandable to it; its dtype is
        cast as by `copy_`."""
        with torch.no_grad():
            self.unsharder.write_alike(param, value.detach().expand(param.shape))

    # -- forward -----------------------------------------------------------------------------------

    def hook_before_renumbering(self, losses: Sequence[torch.Tensor]) -> None:
        self.backward.renumbers([loss.grad_fn for loss in losses])

    def _hook_modules(self) -> list[RemovableHandle]:
        """Hook the modules of units, and all modules that contain them. The frame of such a parent
        holds the parameters of submodules that the parent looks up."""
        for unit in self.units:
            for module in unit.modules:
                self._hooked.setdefault(module, []).append(self._refs[unit])
        for module in self._hooked:
            self._attributes[module] = tensors.AttributeWatch(module)
        named = dict(self.model.named_modules(remove_duplicate=False))
        below = [name for name, module in named.items() if self._hooked.get(module)]
        for name in below:
            parts = name.split(".") if name else []
            for depth in range(len(parts)):
                self._hooked.setdefault(named[".".join(parts[:depth])], [])
        self._hooked.setdefault(self.model, [])
        self._numbers = {module: number for number, module in enumerate(self._hooked)}
        before = Hook(self.pre_forward, self.units)
        after = Hook(self.post_forward, self.units)
        handles = []
        # `prepend`: users' pre hooks may use parameters. `always_call`: the frame must leave the
        # stack after an exception in forward, too.
        for module in self._hooked:
            handles.append(module.register_forward_pre_hook(before, prepend=True, with_kwargs=True))
            handles.append(module.register_forward_hook(after, with_kwargs=True, always_call=True))
        handles += [
            module.register_forward_hook(self._agree_on_tiles)
            for module in self.model.modules()
            if isinstance(module, ChosenTiles)
        ]
        return handles

    def _agree_on_tiles(
        self, _module: torch.nn.Module, _args: tuple[Any, ...], used: list[bool]
    ) -> list[bool]:
        return self.unsharder.chosen(used)

    def hook_method(self, module: torch.nn.Module, name: str) -> None:
        """Let calls of a method of `module` gather units as its forward does, until the engine
        closes."""
        self.require_open("forward_methods()")
        if (module, name) not in self._methods:
            self._methods[module, name] = HookedMethod(self, module, name)

    def pre_forward(
        self,
        module: torch.nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        caller: FrameType | None = None,
    ) -> None:
        """Begin a call of `module`: gather its units. Blocks. caller: the Python frame that runs as
        long as the call; None: that of `Module.__call__`, which runs this hook."""
        if caller is None:
            caller = calling_module_frame()
        with self._lock:
            outermost = self._find_place()
            frame = Frame(module, caller, threading.get_ident(), outermost)
            # Pushed before anything can raise: the post hook is always called, and pops the frame.
            self._frames.append(frame)
            if self._activations is not None:
                self._activations.module_entered(module, args, kwargs)
            if is_idle_call(module, kwargs):
                for refs in self._hooked.get(module, ()):
                    refs.lend()
                    frame.idle.append(refs)
            else:
                for refs in self._hooked.get(module, ()):
                    refs.acquire()
                    # One by one: if a later unit fails, the post hook releases those before it.
                    frame.held.append(refs)
            # Also while gradients are disabled: forward may enable them.
            frame.use = self.backward.call_begins(
                self._numbers.setdefault(module, len(self._numbers))
            )
            if torch.is_grad_enabled():
                # Hooked before forward: it may modify its inputs in place, and hooks on modified
                # tensors would miss the gradients of the inputs.
                frame.use.hook_inputs(tensors.in_arguments(args, kwargs), self._device)

    def _find_place(self) -> bool:
        """Return whether this forward is the outermost one. If so, clear the frames of an
        interrupted forward, and begin the pass."""
        in_backward = graph_task_id() != NO_TASK
        # KeyboardInterrupt leaves dead frames. `alive` walks the stack in a microsecond or two.
        if self._frames and (in_backward or self._frames[-1].alive):
            self._check_thread(in_backward)
            return False
        if in_backward:  # recompute
            # Registers the task: the nested backward of a reentrant checkpoint is part of it.
            self.backward.task()
            return False
        if self._frames or self.backward.running:
            # No frame is alive and no graph task runs here: an interrupted pass left this state.
            self._reset()
        self.unsharder.forward_start()
        return True

    def _check_thread(self, in_backward: bool) -> None:
        if not in_backward and threading.get_ident() != self._frames[-1].thread:
            raise RuntimeError(
                "two threads run forward of one offloaded model; its units are gathered for one "
                "forward at a time"
            )

    def post_forward(
        self,
        module: torch.nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Any,
        caller: FrameType | None = None,
    ) -> None:
        """End a call of `module`: hook its graph for backward, and release its units. caller: as in
        `pre_forward`."""
        if caller is None:
            caller = calling_module_frame()
        # A module that returns nothing may have written its result into an argument.
        results = (args, kwargs) if output is None else output
        with self._lock:
            # Popped before anything can raise, so that the frame does not stay on the stack.
            frame = self._pop(module, caller)
            if frame is None:
                return
            if self._log.noting and module in self._log.blocks:
                self._note_block(module)
            try:
                if frame.use is not None:
                    self._hook_backward(frame, frame.use, results)
            finally:
                try:
                    try:
                        self._drop_casts(frame)
                    finally:
                        self._release_units(frame, check=True)
                finally:
                    # Last, also after an error: the phase of the clock must end.
                    if frame.outermost:
                        if (error := frame.raised) is not None:
                            self.unsharder.broke("forward", error)
                        self.unsharder.forward_end()

    def _note_block(self, block: torch.nn.Module) -> None:
        # A pass without gradients (a reference model, `generate`) makes no nodes, and within a
        # backward a recompute repeats calls that are recorded already.
        if self._passes.evaluates or graph_task_id() != NO_TASK:
            return
        if not any(around.module in self._log.blocks for around in self._frames):
            self._log.leave(block, sequence_number(), self.next_call)

    def _drop_casts(self, frame: Frame) -> None:
        """Drop the 16-bit copies that autocast has made of the frame's fp32 weights. Autocast would
        retain the copies of all units, also of evicted ones, until its region ends.

        This happens at the end of every frame with fp32 weights, whether a unit is evicted or not:
        a new cast rounds the weight's gradient separately, and the bits must not depend on how much
        memory is free.
        """
        flats = (flat for refs in frame.held for flat in refs.unit.flats)
        if any(flat.dtype is torch.float32 for flat in flats):
            clear_autocast_cache(self._device.type)

    def _pop(self, module: torch.nn.Module, caller: FrameType | None) -> Frame | None:
        """Return the frame of this call, and remove stale frames above it, which an exception left.
        None if the call has no frame."""
        for index in range(len(self._frames) - 1, -1, -1):
            frame = self._frames[index]
            # A module may call itself: the Python frames of the calls distinguish its frames.
            if frame.module is module and frame.caller is caller:
                for stale in reversed(self._frames[index + 1 :]):
                    self._release_units(stale, check=False)
                del self._frames[index:]
                return frame
        return None

    def _hook_backward(self, frame: Frame, use: BackwardUse, results: Any) -> None:
        """Hook the results so that backward gathers the frame's units again. A unit whose memory an
        output shares is passed to the frame above, which holds it until its end."""
        if not (frame.held or frame.idle):
            self.backward.call_ends(use, [], [], [])
            return
        found = tensors.in_output(results)
        # Outputs that forward leaves in attributes, as MoE layers do with `self.aux_loss`.
        watch = self._attributes.get(frame.module)
        if watch is not None:
            found += watch.found()
        # No backward is expected of a forward that raised, but it is possible: a hook may have
        # taken a tensor with a graph from the forward.
        if frame.raised is None:
            self.expect_uses((*frame.held, *frame.idle))
        self.backward.call_ends(use, frame.held, frame.idle, found)
        for tensor in found:
            param = self._param_shown_by(tensor, frame)
            if param is None:
                continue
            if not self._frames:
                raise ParameterReleased(
                    f"the output of {type(frame.module).__name__} is {param.name}, or a view of "
                    "it, whose values are released when forward ends; return a copy (`.clone()`)"
                )
            refs = self._refs[param.unit]
            above = self._frames[-1]
            if refs not in above.held:
                refs.acquire()
                above.held.append(refs)

    def _param_shown_by(self, tensor: torch.Tensor, frame: Frame) -> Param | None:
        """Return the parameter of the frame's units whose storage `tensor` shares, or None."""
        address = address_of(tensor)
        if address == 0:  # no storage: a meta tensor, or one that is released
            return None
        for refs in frame.held:
            for flat in refs.unit.flats:
                offset = address - address_of(flat.tensor)
                if 0 <= offset < flat.size_bytes:
                    start = offset // flat.layout.itemsize
                    return next(
                        (p for p in reversed(flat.params) if p.offset <= start), flat.params[0]
                    )
        return None

    def _release_units(self, frame: Frame, *, check: bool) -> None:
        """Release all units of a frame, even when a check raises; then raise the first error."""
        failure: Exception | None = None
        if frame.use is not None:
            frame.use.abandon()
        while frame.idle:
            frame.idle.pop().undo_lend()
        while frame.held:
            try:
                frame.held.pop().release(check=check)
            except Exception as error:  # noqa: BLE001  raised below, when all units are released
                failure = failure or error
        if failure is not None:
            raise failure

    def _reset(self) -> None:
        # Other ranks may wait in a collective of the pass that was interrupted here.
        if self._frames or self.backward.running:
            self.unsharder.broke("forward or backward", RuntimeError("it was interrupted"))
        frames = list(self._frames)
        self._frames.clear()  # not a new list: activations refer to this one
        for frame in reversed(frames):
            self._release_units(frame, check=False)
        self.backward.reset()
        self.unsharder.reset()

    def _hook_grad(self, param: Param) -> None:
        """Hook the parameter's gradients from now on, if it requires one."""
        if param.gathered.requires_grad and param not in self._grad_hooked:
            self._grad_hooked.add(param)
            param.flat.learns = True
            hook = self.backward.grad_hook(param)
            param.gathered.register_post_accumulate_grad_hook(hook)
            # If a custom autograd Function gets the sharded parameter itself, the gradient reaches
            # this leaf.
            register_post_accumulate(param.at_rest, hook)

    def require_open(self, what: str) -> None:
        """Raise EngineClosed after `close`. what: the call that needs the engine."""
        if self.closed:
            raise EngineClosed(
                f"{what}: the engine of this model was closed, and its parameters' values with it"
            )
