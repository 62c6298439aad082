"""Backward: gather and release the units that each hooked forward call needs again.

A hooked call that made a graph leaves a `BackwardUse`. The use *starts* when backward reaches a
node that made one of the call's results (a prehook on the node: a hook on the tensor is lost when
the result is modified in place). Forward hooks the nodes of the call's output; `graph_calls` hooks
the nodes of all other results when a backward begins. The use *finishes* when the gradient of one
of the call's inputs is complete (a hook on that tensor): autograd runs nodes made later first, so
by then every node of the call has run. A use without such inputs ends with the backward.

Node prehooks run after tensor hooks, so block i is released before block i-1 is gathered. Uses are
keyed by graph task: a nested backward (reentrant checkpointing) is a separate task, and ends
separately. The recomputing forward registers the outer task, so that all nested tasks are parts of
one backward.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from infinity._src.base.torch_compat import (
    NO_TASK,
    graph_task_id,
    node_sequence_number,
    queue_callback,
    sequence_number,
    version_found_by,
    watch_backward,
)
from infinity._src.hooks.graph_calls import GraphCall, GraphCalls, prune
from infinity._src.hooks.unit_refs import UnitRefs
from infinity._src.params.reduce import GradReducer
from infinity._src.params.unit import Param, Unit
from infinity._src.params.unshard import Unsharder
from infinity.errors import EngineClosed, ReleasedInBackward, SecondOrderUnsupported

_CLOSED = "backward: the engine of this model was closed, and its parameters' values with it"
WINDOW = -1
"""Stands for the module's number in the call of a window of `gather()`."""


class BackwardUse(GraphCall):
    """Use of units by backward, on behalf of one hooked forward call."""

    __slots__ = ("active", "backward", "generations", "task")

    def __init__(self, backward: Backward, module: int, first: int) -> None:
        super().__init__(module, first)
        self.backward = backward
        self.active = False
        self.task = -1  # the graph task in which the use is, or was last, active
        self.generations: tuple[int, ...] = ()  # generation of each unit of `held` in forward

    def pre_backward(self) -> None:
        """Gather the units, unless an earlier node of this graph task has done so."""
        # All hooked outputs call this, and the first starts the use. In another task, a nested or a
        # later backward needs the units again.
        if not self.active or self.task != graph_task_id():
            self.backward.pre_backward(self)

    def post_backward(self) -> None:
        # All hooked inputs call this, and the first gradient finishes the use.
        if self.active and self.task == graph_task_id():
            self.backward.post_backward(self)

    def hook_inputs(self, inputs: list[torch.Tensor], device: torch.device) -> None:
        """Finish when the first gradient of `inputs` is complete. Called before forward, which may
        modify them.

        device: of the units. Autograd runs the nodes of each device in a separate queue, so inputs
        on other devices are not hooked: their gradients have no order relative to these nodes.
        """
        for tensor in inputs:
            if tensor.requires_grad and tensor.grad_fn is not None and tensor.device == device:
                tensor.register_hook(self.hooks().post_backward)
                self.ends_at_inputs = True

    def hook_outputs(self, outputs: list[torch.Tensor]) -> None:
        """Start when backward reaches one of `outputs`.

        An output whose node is older than the call is an input that the call passed through. It is
        not hooked: to start there would gather the units again after their use.
        """
        for tensor in outputs:
            # If a view was modified in place, its node is no longer in the graph; its base's is.
            for shown in (tensor, tensor._base):
                node = shown.grad_fn if shown is not None else None
                if node is None:
                    continue
                number = node_sequence_number(node)
                if number >= self.first and number not in self.exits:
                    self.exits.add(number)
                    node.register_prehook(self.hooks().pre_backward)  # type: ignore[arg-type]


def _second_order(names: str) -> str:
    return (
        f"backward with create_graph=True through {names}: gradients of gradients are not possible "
        "with offloaded parameters, which are released as soon as backward has passed them. "
        "torch.func.grad, vjp, jacrev and hessian, and torch.autograd.functional's jvp, hvp and "
        "hessian, use create_graph=True; torch.func.jvp and jacfwd (also inside of vmap), and "
        "torch.autograd.functional.jacobian and vjp, do not"
    )


def _changed(name: str, error: RuntimeError) -> str:
    """Return the message that parameters of this unit have other values than in forward. error:
    autograd's error."""
    return (
        f"backward needs the values that {name} had in its forward, but {name} was updated since. "
        "With update='backward' the first backward over a graph updates: run all backwards of a "
        "step but the last inside `with inf.handle(model).no_sync():`. Otherwise opt.step() or a "
        f"write came between: run the forward again after it ({error})"
    )


class Backward:
    """Running backwards over the graphs of one model."""

    def __init__(
        self,
        units: Sequence[Unit],
        unsharder: Unsharder,
        gradients: GradReducer,
        lock: threading.RLock,
    ) -> None:
        self._units = units
        self._unsharder = unsharder
        self._gradients = gradients
        self._lock = lock
        self._tasks: dict[int, list[BackwardUse]] = {}
        # Each thread numbers its nodes, so calls are listed by thread: by thread-local objects,
        # since a new thread may reuse the id of one that ended. Calls that recompute belong to a
        # backward, and are forgotten with it.
        self._local = threading.local()
        self._calls: list[GraphCalls] = []
        self._threads_room = 8  # with so many lists, drop the lists of threads that have ended
        # True after a node was missed: from then on node numbers are not trusted.
        self._hooks_all = False
        self.closed = False
        watch_backward(self)

    @property
    def running(self) -> bool:
        return bool(self._tasks)

    # -- calls in the graph ------------------------------------------------------------------------

    def call_begins(self, module: int) -> BackwardUse:
        """Record the begin of a call that may make a graph. module: number of the called module."""
        calls = self._calls_here()
        if len(calls) >= calls.room:
            self._prune()
        use = BackwardUse(self, module, sequence_number())
        calls.begin(use)
        return use

    def _calls_here(self) -> GraphCalls:
        """Return the calls of this thread; inside of a backward, the calls that recompute."""
        local = self._local
        if graph_task_id() != NO_TASK:
            if not hasattr(local, "recomputed"):
                local.recomputed = GraphCalls()
            recomputed: GraphCalls = local.recomputed
            return recomputed
        if not hasattr(local, "calls"):
            if len(self._calls) >= self._threads_room:
                self._prune()
            local.calls = GraphCalls()
            self._calls.append(local.calls)
        calls: GraphCalls = local.calls
        return calls

    def call_ends(
        self,
        use: BackwardUse,
        held: list[UnitRefs],
        idle: list[UnitRefs],
        outputs: list[torch.Tensor],
    ) -> None:
        """Record the end of a call and its units, including units that were gathered on demand in
        it, and hook the tensors found in its output."""
        use.held, use.idle, use.end = tuple(held), tuple(idle), sequence_number()
        use.generations = tuple(refs.unit.generation for refs in held)
        if use.end > use.first and (held or idle):
            use.hook_outputs(outputs)
        else:
            self._calls_here().leave_out(use)

    def close(self) -> None:
        """Make later backwards over graphs of the model raise."""
        self.closed = True
        for calls in self._calls:
            calls.forget()

    def _prune(self) -> None:
        prune(self._calls)
        self._calls = [calls for calls in self._calls if len(calls) or calls.thread.is_alive()]
        self._threads_room = max(8, 2 * len(self._calls))

    def hook_exits(self, roots: Sequence[Any]) -> None:
        """Hook the graph so that a backward from these nodes gathers the units of every call that
        it enters."""
        with self._lock:
            here = threading.current_thread()
            nested = graph_task_id() != NO_TASK
            noted = [calls for calls in self._calls if calls.forget_if_gone()]
            if nested and self._calls_here().hook_exits(roots, own=True, ends=True):
                # The graph was made in this thread, inside of the backward, so the calls of other
                # threads do not concern it.
                noted = [calls for calls in noted if calls.thread is here]
            for calls in noted:
                mine = calls.thread is here
                own = mine and not self._hooks_all
                ends = own and len(noted) == 1 and not nested
                is_ours = None if mine else self._is_ours
                calls.hook_exits(roots, own=own, ends=ends, is_ours=is_ours)

    def _is_ours(self, leaf: Any) -> bool:
        return id(leaf) in self._leaves

    @functools.cached_property
    def _leaves(self) -> frozenset[int]:
        """Ids of the gathered parameters, which are made once, but after this object."""
        return frozenset(id(param.gathered) for unit in self._units for param in unit.params)

    def renumbers(self, roots: Sequence[Any]) -> None:
        """Hook the exits of a graph whose nodes are about to get other sequence numbers."""
        self.hook_exits(roots)
        for calls in self._calls:
            calls.forget()

    def failed(self, error: RuntimeError) -> None:
        """Raise an error that names the parameter if `error` is autograd's report that a parameter
        was modified, which means that it was evicted or updated."""
        version = version_found_by(error)
        if version is None:
            return
        for uses in self._tasks.values():
            for use in uses:
                for refs, generation in zip(use.held, use.generations, strict=True):
                    if refs.unit.generation == version != generation:
                        raise RuntimeError(_changed(refs.unit.name, error)) from error
        params = (param for unit in self._units for param in unit.params)
        param = next((each for each in params if each.evicted_version == version), None)
        if param is None:
            return
        if self.closed:
            raise EngineClosed(_CLOSED) from error
        self._hooks_all = True
        raise ReleasedInBackward(
            f"backward needs {param.name}, which was released: it entered a forward call of "
            f"{param.unit.name} through a tensor that the engine has not seen leave the call. "
            "Repeat the step from its forward on: the engine now hooks every node of such a call, "
            "which costs some microseconds per node. Or return the tensor from the forward of its "
            "module"
        ) from error

    # -- uses --------------------------------------------------------------------------------------

    def pre_backward(self, use: BackwardUse) -> None:
        """Start `use` in the graph task that runs now, and hold its units until it finishes. Blocks
        until they are gathered."""
        with self._lock:
            if self.closed:
                raise EngineClosed(_CLOSED)
            # Autograd enables gradients inside of nodes exactly when create_graph=True.
            if torch.is_grad_enabled():
                names = ", ".join(refs.unit.name for refs in (*use.held, *use.idle))
                raise SecondOrderUnsupported(_second_order(names))
            uses = self.task()
            if use.active:  # active since a backward that raised: it still holds its units
                stale = self._tasks.get(use.task)
                if stale is not None:
                    # Moved, not released: this task needs the same units.
                    stale.remove(use)
            else:
                held = 0
                try:
                    for refs in use.held:
                        refs.acquire()
                        held += 1
                except BaseException:
                    # The use stays inactive, so nothing else drops these references.
                    for refs in use.held[:held]:
                        refs.release(check=False)
                    raise
                use.active = True
            use.task = graph_task_id()
            uses.append(use)

    def post_backward(self, use: BackwardUse) -> None:
        with self._lock:
            uses = self._tasks.get(use.task)
            if uses is not None:
                uses.remove(use)
            self._end_use(use)

    def task(self) -> list[BackwardUse]:
        """Return the active uses of the running graph task. The first call in a task registers it.
        """
        task = graph_task_id()
        uses = self._tasks.get(task)
        if uses is None:
            # Nested tasks are parts of one backward, which begins with the first.
            first = not self._tasks
            uses = self._tasks[task] = []
            queue_callback(lambda: self._end_task(task))
            # The task is registered first, so that `reset` finds the backward if this raises.
            if first:
                self._unsharder.backward_start()
        return uses

    def reset(self) -> None:
        """Release the units that an interrupted backward still holds."""
        with self._lock:
            self._forget_recomputed()
            tasks, self._tasks = self._tasks, {}
            for uses in tasks.values():
                for use in uses:
                    use.active = False
                    for refs in use.held:
                        refs.release(check=False)

    def _end_task(self, task: int) -> None:
        """End the remaining uses of a graph task, then forget the task. In this order: after an
        error the backward counts as interrupted, and `reset` must find the uses that remain."""
        with self._lock:
            uses = self._tasks.get(task, [])
            while uses:
                self._end_use(uses.pop())
            # The end of a nested task is not the end of the backward around it.
            self._forget_recomputed()
            if not self._tasks.keys() - {task}:
                self._unsharder.backward_end()
            self._tasks.pop(task, None)

    def _forget_recomputed(self) -> None:
        if hasattr(self._local, "recomputed"):
            self._local.recomputed.forget()

    def _end_use(self, use: BackwardUse) -> None:
        use.active = False
        # Before the release, at which update="backward" updates the unit if `unit_done` has counted
        # all of its uses.
        try:
            for refs in (*use.held, *use.idle):
                self._unsharder.unit_done(refs.unit)
        except BaseException:  # a drive or another rank failed; `reset` will not find this use
            for refs in use.held:
                refs.release(check=False)
            raise
        failure: Exception | None = None
        for refs in (*use.held, *use.idle):
            try:
                if refs in use.held:
                    refs.release()
                else:
                    refs.passed()
            except Exception as error:  # noqa: BLE001  raised below, when all units are released
                failure = failure or error
        if failure is not None:
            raise failure

    def grad_hook(self, param: Param) -> Callable[[torch.Tensor], None]:
        """Make a post-accumulate hook that passes the gradient of a gathered parameter to the
        unsharder."""

        def accumulate(tensor: torch.Tensor) -> None:
            grad = tensor.grad
            # A proxy here means that another hook has taken the gradient already.
            if grad is None or type(grad) is not torch.Tensor:
                return
            # The gathered leaf keeps no gradient: accumulators take it, and its memory is freed.
            tensor.grad = None
            with self._lock:
                # Registers the backward, also if no use of this model has started yet.
                self.task()
                self._gradients.accumulate_grad(
                    param, grad if grad.layout is torch.strided else grad.to_dense()
                )

        return accumulate
