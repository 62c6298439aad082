"""Backward: gather and release the units that each hooked forward call needs again.

A hooked call that made a graph leaves a `BackwardUse`. It *starts* when backward reaches a node
that made one of the call's results (a prehook on the node: a hook on the tensor is lost when the
result is modified in place). Forward hooks the nodes of the call's output; `graph_calls` hooks
those of all other results when a backward begins. It *finishes* when the gradient of one of the
call's inputs is complete (a hook on that tensor): the engine runs nodes made later first, so by
then every node of the call has run. A use without such inputs ends with the backward.

Node prehooks run after tensor hooks, so block i is released before block i-1 is gathered. Uses are
keyed by graph task: nested backwards (reentrant checkpointing) have their own, and their own end.
The recomputing forward makes the outer task known, so that these are all parts of one backward.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from infinity._src._torch_compat import (
    NO_TASK,
    graph_is_kept,
    graph_task_id,
    node_sequence_number,
    queue_callback,
    sequence_number,
    version_found_by,
    watch_backward,
)
from infinity._src.hooks.graph_calls import GraphCall, GraphCalls
from infinity._src.hooks.unit_refs import UnitRefs
from infinity._src.params.unit import GradientsInterface, Param, Unit, UnsharderInterface
from infinity.errors import EngineClosed, ReleasedInBackward, SecondOrderUnsupported

_CLOSED = "backward: the engine of this model was closed, and its parameters' values with it"
WINDOW = -1
"""Number, in place of a module's, of a call that is a window of `gather()`."""


class BackwardUse(GraphCall):
    """Use of units by backward, on behalf of one hooked forward call."""

    __slots__ = ("active", "backward", "task")

    def __init__(self, backward: Backward, module: int, first: int) -> None:
        super().__init__(module, first)
        self.backward = backward
        self.active = False
        self.task = -1  # the graph task in which it is, or was last, active

    def start(self, _grads: object = None) -> None:
        """Prehook of the nodes that made the call's outputs."""
        # Several outputs call it; the first one starts the use. Another task is a nested or a later
        # backward, which needs the units again.
        if not self.active or self.task != graph_task_id():
            self.backward.start(self)

    def finish(self, _grad: object = None) -> None:
        """Hook of the call's inputs."""
        # Several inputs call it; the gradient of the first one finishes the use.
        if self.active and self.task == graph_task_id():
            self.backward.finish(self)

    def hook_inputs(self, inputs: list[torch.Tensor], device: torch.device) -> None:
        """Finish when the gradient of the first of `inputs` is complete. Called before forward
        modifies them.

        device: of the units. Nodes of other devices run in a queue of their own, in no order
        relative to these.
        """
        for tensor in inputs:
            if tensor.requires_grad and tensor.grad_fn is not None and tensor.device == device:
                tensor.register_hook(self.finish)
                self.ends_at_inputs = True

    def hook_outputs(self, outputs: list[torch.Tensor]) -> None:
        """Start when backward reaches one of `outputs`.

        Outputs with a node from before the call were inputs that the call passed through: starting
        at them would gather the units again after their use.
        """
        for tensor in outputs:
            # Modifying a view in place takes its node out of the graph, but not that of its base.
            for shown in (tensor, tensor._base):
                node = shown.grad_fn if shown is not None else None
                if node is None:
                    continue
                number = node_sequence_number(node)
                if number >= self.first and number not in self.exits:
                    self.exits.add(number)
                    node.register_prehook(self.start)  # type: ignore[arg-type]


def _second_order(names: str) -> str:
    """Say why a backward through these units is refused, and what to call instead."""
    return (
        f"backward with create_graph=True through {names}: gradients of gradients are not possible "
        "with offloaded parameters, which are released as soon as backward has passed them. "
        "torch.func.grad, vjp, jacrev and hessian run backward so, and torch.autograd.functional's "
        "jvp, hvp and hessian; torch.func.jvp and jacfwd (also inside of vmap), and "
        "torch.autograd.functional.jacobian and vjp, do not"
    )


class Backward:
    """Running backwards over the graphs of one model."""

    def __init__(
        self,
        units: Sequence[Unit],
        unsharder: UnsharderInterface,
        gradients: GradientsInterface,
        lock: threading.RLock,
    ) -> None:
        self._units = units
        self._unsharder = unsharder
        self._gradients = gradients
        self._lock = lock
        self._tasks: dict[int, list[BackwardUse]] = {}
        # Of graph tasks, as `_tasks`: whether it retains its graph, which may then run again.
        self._retained: dict[int, bool] = {}
        # Calls of each thread, which numbers its nodes. A thread that ended may leave its number to
        # another one, so they are found by an object of the thread. Calls that recompute are part
        # of a backward, and go with it.
        self._local = threading.local()
        self._calls: list[GraphCalls] = []
        self.closed = False
        watch_backward(self)

    @property
    def running(self) -> bool:
        """True when a backward runs, or was left by an exception."""
        return bool(self._tasks)

    # -- calls in the graph ------------------------------------------------------------------------

    def call_begins(self, module: int) -> BackwardUse:
        """Note a call that makes a graph; module: its number."""
        use = BackwardUse(self, module, sequence_number())
        self._calls_here().begin(use)
        return use

    def _calls_here(self) -> GraphCalls:
        """Return the calls of this thread: those that recompute inside of a backward."""
        local = self._local
        if graph_task_id() != NO_TASK:
            if not hasattr(local, "recomputed"):
                local.recomputed = GraphCalls()
            recomputed: GraphCalls = local.recomputed
            return recomputed
        if not hasattr(local, "calls"):
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
        """Note the end of a call, its units (those that were gathered on demand inside of it are
        among them) and the tensors found in its output."""
        use.held, use.idle, use.end = tuple(held), tuple(idle), sequence_number()
        if use.end > use.first and (held or idle):
            use.hook_outputs(outputs)
        else:
            self._calls_here().leave_out(use)

    def close(self) -> None:
        """Let later backwards over graphs of the model raise."""
        self.closed = True
        for calls in self._calls:
            calls.forget()

    def prune_calls(self) -> None:
        """Forget the calls whose graphs are gone. Not to be called while one runs."""
        for calls in self._calls:
            calls.prune(between_passes=True)
        self._calls = [calls for calls in self._calls if len(calls) or calls.thread.is_alive()]

    def hook_exits(self, roots: Sequence[Any]) -> None:
        """Have a backward from these nodes find the units of every call that it enters."""
        with self._lock:
            if graph_task_id() != NO_TASK:
                self._calls_here().hook_exits(roots, alone=True, is_ours=self._is_ours)
                return
            noted = [calls for calls in self._calls if len(calls)]
            for calls in noted:
                calls.hook_exits(roots, alone=len(noted) == 1, is_ours=self._is_ours)

    def _is_ours(self, leaf: Any) -> bool:
        return id(leaf) in self._leaves

    @functools.cached_property
    def _leaves(self) -> frozenset[int]:
        """Identities of the gathered parameters, which are made after this object, and once."""
        return frozenset(id(param.gathered) for unit in self._units for param in unit.params)

    def renumbers(self, roots: Sequence[Any]) -> None:
        """Hook the exits of a graph whose nodes are about to get other numbers."""
        self.hook_exits(roots)
        for calls in self._calls:
            calls.forget()

    def failed(self, error: RuntimeError) -> None:
        """Raise `ReleasedInBackward` if the error is autograd's, of a parameter that was evicted.
        """
        version = version_found_by(error)
        params = (param for unit in self._units for param in unit.params)
        param = next((each for each in params if each.evicted_version == version), None)
        if param is None:
            return
        if self.closed:
            raise EngineClosed(_CLOSED) from error
        for calls in self._calls:
            calls.walk_always()
        module = type(param.sites[0][0]).__name__
        raise ReleasedInBackward(
            f"backward needs {param.name}, which was released: it entered a call of this "
            f"{module} through a tensor that the engine has not seen leave the call. Take the step "
            "again from its forward: from now on the engine searches the whole graph of this model "
            "for such tensors before each backward, which costs about a microsecond per node. Or "
            "return the tensor from the forward of its module"
        ) from error

    # -- uses --------------------------------------------------------------------------------------

    def start(self, use: BackwardUse) -> None:
        """Hold the units of `use` until it finishes, in the graph task that runs now. Blocks until
        gathered."""
        with self._lock:
            if self.closed:
                raise EngineClosed(_CLOSED)
            # Autograd enables gradients inside of nodes exactly when create_graph=True.
            if torch.is_grad_enabled():
                names = ", ".join(refs.unit.name for refs in (*use.held, *use.idle))
                raise SecondOrderUnsupported(_second_order(names))
            uses = self.task()
            if use.active:  # left by a backward that raised: it still holds its units
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
                    # The use stays inactive, so that nothing else gives these references back.
                    for refs in use.held[:held]:
                        refs.release(check=False)
                    raise
                use.active = True
            use.task = graph_task_id()
            uses.append(use)

    def finish(self, use: BackwardUse) -> None:
        """Release the units of `use`."""
        with self._lock:
            uses = self._tasks.get(use.task)
            if uses is not None:
                uses.remove(use)
            self._end_use(use)

    def task(self) -> list[BackwardUse]:
        """Return the active uses of the running graph task, which the first call in it notes."""
        task = graph_task_id()
        uses = self._tasks.get(task)
        if uses is None:
            # Nested tasks are parts of one backward, which begins with the first.
            first = not self._tasks
            uses = self._tasks[task] = []
            self._retained[task] = graph_is_kept()
            queue_callback(lambda: self._end_task(task))
            # The task is noted by now, so that `reset` finds the backward if this raises.
            if first:
                self._unsharder.backward_start()
        return uses

    def reset(self) -> None:
        """Release the units that a broken-off backward has left in use."""
        with self._lock:
            self._forget_recomputed()
            tasks, self._tasks = self._tasks, {}
            self._retained.clear()
            for uses in tasks.values():
                for use in uses:
                    use.active = False
                    for refs in use.held:
                        refs.release(check=False)

    def _end_task(self, task: int) -> None:
        """End the uses that are left in a graph task, then forget the task. In this order: if
        something raises, the backward has broken off, and `reset` must find the uses that are left.
        """
        with self._lock:
            uses = self._tasks.get(task, [])
            while uses:
                self._end_use(uses.pop())
            # A nested task that ends is no end of the backward around it.
            self._forget_recomputed()
            if not self._tasks.keys() - {task}:
                self._unsharder.backward_end()
            self._tasks.pop(task, None)
            self._retained.pop(task, None)

    def _forget_recomputed(self) -> None:
        """Forget the calls that recomputed in this thread."""
        if hasattr(self._local, "recomputed"):
            self._local.recomputed.forget()

    def _end_use(self, use: BackwardUse) -> None:
        use.active = False
        use.done = not self._retained.get(use.task, True)
        # Before the release: update="backward" then updates the unit if `unit_done` has counted
        # all of its uses.
        try:
            for refs in (*use.held, *use.idle):
                self._unsharder.unit_done(refs.unit)
        except BaseException:  # a drive or another rank failed: no reset will find this use
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
            except Exception as error:  # noqa: BLE001  raised below, after the others
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
            # The gathered leaf never keeps a gradient: accumulators do, and the memory is freed at
            # once.
            tensor.grad = None
            with self._lock:
                # A backward runs, also where no use of this model has started yet.
                self.task()
                self._gradients.accumulate_grad(
                    param, grad if grad.layout is torch.strided else grad.to_dense()
                )

        return accumulate
