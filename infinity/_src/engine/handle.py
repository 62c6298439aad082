"""The engine: `offload` splits a model into units at rest; `Handle` is the user's interface to its
engine.

    offload = find units -> plan placement -> initialize, unit by unit -> attach hooks
              (`infinity._src.engine.build`)

    parameters at rest  --->  StateStore (chunks: RAM, NVMe)  <---  StepPipeline (opt.step)
            |                            ^
    Lifecycle (hooks)   --->  Unsharder (gather, evict, prefetch)
"""

from __future__ import annotations

import atexit
import contextlib
import inspect
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch

from infinity._src.base import openmp
from infinity._src.base.dtypes import why_not_bits
from infinity._src.base.paths import absolute
from infinity._src.base.telemetry import Timeline
from infinity._src.base.wording import listed
from infinity._src.checkpoint.formats.hub_files import hub_checkpoint
from infinity._src.config.policy import Policy
from infinity._src.distributed.topology import check_launched
from infinity._src.distributed.transport import Transport
from infinity._src.engine.build import build_engine, set_grad_dtypes
from infinity._src.engine.engine_stats import Stats
from infinity._src.hooks.gather_context import chosen_params, gather
from infinity._src.hooks.joint_backward import JointBackward
from infinity._src.hooks.module_params import check_copies, detach_params
from infinity._src.memory.device import compute_device
from infinity._src.microbatch.microbatched import slices_in_mean
from infinity._src.optim.state_access import OptimizerState
from infinity._src.params.cleanup import run_all
from infinity._src.params.discover import check_modules
from infinity._src.params.materialize import NamedTensors, Source
from infinity._src.params.sharded_param import Rollback, ShardedParameter
from infinity._src.params.unit import Param
from infinity.aio import Seam
from infinity.errors import DriveLostError, EngineClosed, RankFailed

log = logging.getLogger("infinity")

B = TypeVar("B")
R = TypeVar("R")

# Attribute of the model: a table of handles here would keep closed models alive.
_HANDLE = "_infinity_handle"
_OPEN: set[Handle] = set()
# Parts of closed engines to whose memory a stuck device may still write.
_KEPT: list[object] = []


def offload(
    model: torch.nn.Module,
    policy: Policy | None = None,
    *,
    load: Source | None = None,
    init: Callable[[], torch.nn.Module] | None = None,
    _seam: Seam | None = None,
    _transport: type[Transport] | None = None,
) -> torch.nn.Module:
    """Offload a model in place: from here on its parameters rest on the tiers of `policy` and are
    gathered just in time.

    Returns the same module. load: the source of values, unit by unit, when the module is on the
    meta device: a callable `(name, tensor) -> None` that fills the tensor, a mapping from names to
    tensors, an `inf.TensorSource`, or a directory of safetensors (or a file: safetensors, GGUF). A
    callable runs under no_grad once per parameter and persistent buffer. A model of transformers is
    loaded from a path as `from_pretrained` loads it: a few tensors are converted at a time, and
    parameters on meta get the dtypes that `from_pretrained` gives them. init: a function that
    builds the same model anew, with its initial values. It runs normally, with the random numbers
    that torch's generator yields now, except that one parameter at a time has memory. Blocks until
    all values are at rest. Collective on several ranks.

    Raises: ValueError for a policy or a model that cannot work, and where a launcher has started
    several ranks and they have no process group yet; WeightsError for values that do not fit the
    model; BudgetError when the policy's `ram` is too small; MemoryLimitError when the machine or
    the cgroup leaves less memory than the plan and the host overhead need; SwapFullError and other
    OSErrors for the NVMe directories; PeerFailed, with the rank's name, when another rank failed.
    After an error the model is unchanged.
    """
    if not (policy is None or isinstance(policy, Policy)):
        raise ValueError(
            f"inf.offload takes an inf.Policy, not a {type(policy).__name__}; write "
            "inf.Policy(params=..., ...)"
        )
    _check_not_offloaded(model)
    # All checks that are possible before the model is changed.
    check_modules(model)
    check_launched()
    device = compute_device(model, (policy or Policy()).device)
    if isinstance(load, (str, os.PathLike)):
        load = absolute(load, "load")
    # Before the offload, which makes parameters contiguous.
    strided = [
        name
        for name, parameter in model.named_parameters()
        if not why_not_bits(parameter) and not parameter.is_contiguous()
    ]
    with contextlib.ExitStack() as undo:
        rollback = Rollback(model)
        undo.callback(rollback.undo)
        with hub_checkpoint(model, load) as source:
            handle_ = Handle(
                model, policy or Policy(), device, source, init, _seam, _transport, rollback
            )
            undo.callback(handle_.end, commit=False)
        model.__dict__[_HANDLE] = handle_
        # `_close_all` closes it at exit if the user has not.
        _OPEN.add(handle_)
        # All ranks of a node have the same environment, so one rank warns.
        if device.type == "cpu" and handle_.rank == 0:
            openmp.warn_if_active(torch.get_num_threads())
        # A filter may turn the warning into an error: then the model is not offloaded.
        _warn_of_order(strided)
        # Drops `rollback`, and so the model's original values.
        undo.pop_all()
    return model


def _warn_of_order(strided: Sequence[str]) -> None:
    """Warn of parameters whose dimensions lie in memory in another order than in the shape."""
    if strided:
        warnings.warn(
            f"{listed(strided, 3)}: dimensions are in another order in memory (channels_last, "
            "transposed); the offload makes them contiguous, with the same values, and kernels "
            "that depend on the order may round differently",
            stacklevel=3,  # the caller of `offload`
        )


def _check_not_offloaded(model: torch.nn.Module) -> None:
    before = model.__dict__.get(_HANDLE)
    if before is not None and before.closed:
        raise ValueError(
            "the engine of this model was closed, and its values are freed: build the model anew "
            "(inf.export_safetensors before close() keeps the values, and load= reads them)"
        )
    if before is not None:
        raise ValueError("this model is offloaded already; inf.handle(model).close() first")


def handle(model: torch.nn.Module) -> Handle:
    """Return the handle of an offloaded model. Raises: ValueError for a model that is not
    offloaded.
    """
    found: Handle | None = model.__dict__.get(_HANDLE)
    if found is None:
        raise ValueError("this model is not offloaded; call inf.offload(model, policy) first")
    return found


def forward_methods(module: torch.nn.Module, *names: str) -> None:
    """Let methods of an offloaded model, or of a module in it, use parameters as `forward` may.

    A call of `module.encode_image(...)` then gathers the units that it uses and releases them, and
    backward through its result gathers them again. The module's forward hooks do not run. This
    lasts until the engine closes. It corresponds to FSDP2's `register_fsdp_forward_method`.

    Raises: ValueError for a module without offloaded parameters; for a name that is no method of
    it; and for a method that returns before it has used its parameters, a generator or a coroutine.
    """
    engines = {
        parameter.infinity_link.param.unit.engine
        for parameter in module.parameters()
        if isinstance(parameter, ShardedParameter)
    }
    kind = type(module).__name__
    if len(engines) != 1:
        raise ValueError(
            f"forward_methods(): {kind} has parameters of {len(engines)} offloaded models; call it "
            "after `inf.offload`, with the model or a module in it"
        )
    if not names:
        raise ValueError(
            "forward_methods() got no names: forward_methods(model, 'encode_image')"
        )
    for name in names:
        fault = _why_no_forward_method(module, name)
        if fault:
            raise ValueError(f"forward_methods(): {fault}")
    (engine,) = engines
    for name in names:
        engine.parts.lifecycle.hook_method(module, name)


def _why_no_forward_method(module: torch.nn.Module, name: str) -> str:
    """Return why this method cannot be called as `forward` is; empty if it can."""
    kind = type(module).__name__
    if isinstance(module._modules.get(name), torch.nn.Module):
        return (
            f"{kind}.{name} is a module, whose calls already gather their parameters; for one of "
            f"its methods call forward_methods(model.{name}, ...)"
        )
    # Not getattr, which runs the code of a property.
    found = inspect.getattr_static(module, name, None)
    if isinstance(found, (classmethod, staticmethod)):
        found = found.__func__
    if isinstance(found, property):
        return f"{kind}.{name} is a property; make it a method, or compute it in forward"
    if not callable(found):
        return f"{kind} has no method {name!r}"
    plain = inspect.unwrap(found)
    if inspect.isgeneratorfunction(plain) or inspect.isasyncgenfunction(plain):
        returned = "a generator"
    elif inspect.iscoroutinefunction(plain):
        returned = "a coroutine"
    else:
        return ""
    return (
        f"{kind}.{name} returns {returned}, which uses parameters after the call has returned and "
        "they are released: make it a function that returns its results, or iterate over it inside "
        "of gather()"
    )


def offloaded_modules(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the modules in `model`, including itself, that are offloaded and whose engine is not
    closed, in the order of `model.modules()`. Each has a handle. A wrapper (PEFT's, a compiled
    module's, a LightningModule) contains the offloaded module that it wraps.
    """
    return [
        module
        for module in model.modules()
        if (found := module.__dict__.get(_HANDLE)) is not None and not found.closed
    ]


def is_offloaded(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a parameter of an offloaded model, as `model.parameters()` yields
    it. Such a parameter needs an optimizer of infinity, and DDP must not reduce it. True also after
    the engine has closed.
    """
    return isinstance(tensor, ShardedParameter)


class Handle:
    """The user's interface to a model's engine. Methods block. One thread uses it at a time."""

    def __init__(
        self,
        model: torch.nn.Module,
        policy: Policy,
        device: torch.device,
        load: Source | NamedTensors | None,
        init: Callable[[], torch.nn.Module] | None,
        seam: Seam | None,
        transport: type[Transport] | None,
        rollback: Rollback,
    ) -> None:
        self.timeline = Timeline(spans_max=200_000)
        self.extra: Any = None  # the user's state, for durable runs and saves
        self.on_nonfinite = policy.on_nonfinite
        with contextlib.ExitStack() as undo:
            parts = build_engine(
                model,
                policy,
                device,
                load=load,
                init=init,
                seam=seam,
                transport=transport,
                owner=self,
                timeline=self.timeline,
                undo=undo,
                rollback=rollback,
            )
            self.parts = parts
            split = parts.split
            self.policy, self.units, self.comm = split.policy, split.units, split.comm
            self.rank = self.comm.rank
            self.unsharder, self.durable = parts.unsharder, parts.durable
            self.gradients = parts.grads.reducer
            self.pipeline, self.states = parts.optimizer.pipeline, parts.optimizer.states
            self.saving = parts.optimizer.saving
            self._joint_backward = JointBackward(
                parts.lifecycle, self.policy.units, split.ranks.on_any_rank
            )
            # From here on `end` closes the parts. After an error above, `undo` closes them, in
            # reverse order.
            self._undo = undo.pop_all()

    def register(self, optimizer: Any, params: list[Param]) -> None:
        """Give parameters the states that `optimizer.moments_of` names. Optimizers call this."""
        self.parts.optimizer.registry.register(optimizer, params)

    def await_unfreezing(self, optimizer: Any, params: list[Param]) -> None:
        """Have `optimizer.make_states` called for these frozen parameters once they are unfrozen.
        Optimizers call this."""
        self.parts.optimizer.registry.await_unfreezing(optimizer, params)

    # -- methods for users -------------------------------------------------------------------------

    def gather(
        self, params: torch.nn.Parameter | Iterable[torch.nn.Parameter]
    ) -> AbstractContextManager[None]:
        """Return a context in which these parameters (as `model.parameters()` yields them) can be
        read and written; writes are retained.

        Blocks for pending updates of their units; and, before it retains writes, for all updates:
        if a step is undone, the exit raises StepUndone, and no write is retained. With
        update="delayed" the parameters have the updated values, which training computes with one
        step later; a training forward or backward through them in the context raises RuntimeError.
        Collective on several ranks: all gather the same parameters, and write the same values.

        Raises: ValueError for a parameter of another model.
        """
        self.check_open()
        return gather(self.parts.lifecycle, params)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Mark micro-batches that are not the last of a step.

        With update="backward" their gradients accumulate, and the first backward outside of the
        context updates. On several ranks with accumulate="local" (and zero=1) each rank accumulates
        them, and the first backward outside reduces the sums. Otherwise gradients are reduced into
        the shards at once, and the context has no effect.

        Raises: BudgetError when update="backward" has no memory for gradients, at the first use.
        """
        self.check_open()
        parts = self.parts
        with parts.grads.reducer.no_sync(), parts.mode.no_sync(), parts.buffers.no_sync():
            yield

    def accumulate(self, micro_batches: Iterable[B], fn: Callable[[B], R]) -> list[R]:
        """Accumulate the gradients of micro-batches: call `fn` for each in turn, then run one
        backward for all of them, block by block. Blocks until backward has ended.

        Each unit is gathered once for all backwards and, on several ranks, reduced once; its
        gradients are stored once. With update="backward" no gradient is stored, and `no_sync` is
        not needed. Graphs of all micro-batches live until backward: checkpoint the blocks.

        micro_batches: read as a whole before the first call of `fn`. fn: takes a micro-batch and
        returns its loss (a tensor of one element, scaled as the sum of losses requires), or a tuple
        that begins with the loss. Returns the results of `fn`; tensors are detached, those in
        tuples, lists and dicts, too.

        Parameters get the bits of `for mb in micro_batches: fn(mb).backward()` where a micro-batch
        uses them once. The gradients of a parameter that is used several times are added use by
        use, the last use of forward first, and micro-batch by micro-batch within each use. Random
        numbers are those of the loop. On several ranks the bits are those of the loop with
        accumulate="local". If micro-batches call blocks in different orders, their backwards run
        one after the other, which is logged once.

        Raises: ValueError without micro-batches, and for results of `fn` of another kind;
        RuntimeError inside of a forward, a backward or another `fn`; whatever `fn` raises. After
        these errors no backward has run.
        """
        self.check_open()
        # The one backward sums the gradients of all micro-batches in autograd.
        set_grad_dtypes(self.parts.split.flats, self.gradients.dtype)
        return self._joint_backward.run(list(micro_batches), fn, self.no_sync)

    def optimizer_state(self, param: torch.nn.Parameter) -> OptimizerState:
        """Return the optimizer states of a parameter by name, "master", moments and "step", which
        can be read and written on any tier.

        Raises: ValueError for a parameter of another model, or without an optimizer.
        """
        self.check_open()
        found = self._one(param)
        holder = self.parts.optimizer.registry.optimizer_of(found)
        if holder is None:
            raise ValueError(
                f"no optimizer holds {found.name}; build inf.AdamW(model.parameters()) first, and "
                "keep it"
            )
        return OptimizerState(found, holder, self.states)

    def full_grad(self, param: torch.nn.Parameter) -> torch.Tensor | None:
        """Return the accumulated gradient of a parameter as a new fp32 CPU tensor [param.shape],
        with the factors applied by which the loop has scaled it.

        None where `param.grad` is None. Blocks for pending updates. Collective on several ranks:
        the result is the mean over all ranks, whole on every rank. Raises: ValueError for a
        parameter of another model; RuntimeError for a gradient that an update has taken, as with
        update="backward" after backward.
        """
        self.check_open()
        return self.states.full_grad(self._one(param))

    def set_full_grad(self, param: torch.nn.Parameter, grad: torch.Tensor | None) -> None:
        """Make `grad` [param.shape] the gradient of a parameter, rounded to the dtype of
        accumulated gradients; None clears it.

        Blocks for pending updates. With update="backward" None does not undo an update that
        backward has made. Collective on several ranks: all pass the same tensor. Raises: ValueError
        for a wrong shape or dtype, or a parameter of another model; RuntimeError with
        update="backward" when the update has taken the gradient that backward made.
        """
        self.check_open()
        self.states.set_full_grad(self._one(param), grad)

    def _one(self, param: torch.nn.Parameter) -> Param:
        found = (
            chosen_params(self.parts.lifecycle, param) if isinstance(param, torch.Tensor) else []
        )
        if len(found) != 1:
            raise ValueError(
                "expected one parameter of the offloaded model, as model.parameters() yields it, "
                f"not a {type(param).__name__}"
            )
        return found[0]

    def read(self, param: Param) -> torch.Tensor:
        """Return the current value of one parameter as an ordinary CPU tensor [param.shape]. Blocks
        for pending updates of its unit. Collective on several ranks.
        """
        # An interrupted backward may have left units in use.
        self.parts.lifecycle.recover()
        return self.unsharder.read(param)

    def stats(self) -> Stats:
        """Return counters since `offload`; `engine.engine_stats.Stats` documents each.
        Raises: EngineClosed.
        """
        # Not `check_open`: counters can be read after a fault, too.
        if self.parts.access.closed:
            raise EngineClosed(
                "handle.stats(): the engine of this model was closed; ask before close()"
            )
        return Stats.collect(
            # `observe`, so that the forecast for the drives includes this moment.
            executor=self.parts.tiers.storage.observe(self.pipeline.steps),
            endurance=self.parts.tiers.storage.endurance,
            unsharder=self.unsharder,
            gradients=self.gradients,
            progress=self.parts.progress,
            pipeline=self.pipeline,
            placement=self.parts.tiers.planner.plan,
            param_numel=sum(param.numel for param in self.parts.split.params),
            unit_count=len(self.units),
            backend_reason=self.parts.tiers.executor.backend_reason,
            budget_bytes=self.parts.tiers.planner.budget_bytes,
            update=self.policy.cpu_update,
            bandwidths=self.policy.io_settings.bandwidths,
            activations=self.parts.tiers.storage.activation_figures(),
            ranks=self.parts.split.ranks.figures(),
            fresh_grad_bytes_peak=max(
                self.parts.grads.reducer.fresh_bytes_peak, self.parts.mode.fresh_bytes_peak
            ),
            heap_spare_bytes=self.parts.heap.spare_bytes,
            frozen_bytes=self.parts.tiers.storage.frozen_bytes(self.parts.split.flats),
            slices=slices_in_mean(self.parts.lifecycle.model),
        )

    def trace(self, path: str | os.PathLike[str]) -> int:
        """Write the timeline so far as Chrome trace JSON, which Perfetto opens, and return its
        number of spans.

        Tracks: phases, waits of training, units in use, gradients, reads, writes, updates and
        copies, with the names of the units. Only the newest spans are retained. Raises: OSError.
        """
        target = absolute(path, "path")
        self.take_spans()
        return self.timeline.write(target)

    def take_spans(self) -> None:
        """Add the spans that native threads recorded since the last call to `timeline`."""
        # Both clocks are CLOCK_MONOTONIC.
        self.timeline.add_native_spans(self.parts.tiers.storage.take_spans(self.units))

    def flush(self) -> None:
        """Block until no update or write is pending, and raise the faults of background work.

        In a durable run, then commit the last step. Collective where the policy has two or more
        generations, as durable runs have.
        """
        # A commit needs a step that has ended.
        self.parts.access.before_write()
        self.pipeline.commit()

    def flush_versions(self) -> None:
        """Flush if states have two or more generations; otherwise raise the faults of background
        work without waiting. Collective as `flush`.
        """
        # A fault may still undo the last step, whose states must then not be copied.
        if self.pipeline.transaction is not None:
            self.flush()
        else:
            self.parts.access.before_copy()

    def close(self) -> None:
        """Flush and free everything. Afterwards reading a parameter raises. Blocks. Idempotent.

        All ranks of a durable run commit their last step together. If an update of one rank has
        failed, all raise StepUndone, and the commit before stays. A process that exits without
        close() commits the last step if it is the only rank; with several ranks the commit before
        stays.

        Raises: RuntimeError inside `gather()`; the faults of background work, after everything was
        freed; RankFailed when a rank has failed and the device is stuck behind collectives that
        wait for this rank. In that case nothing is freed, since the device may still write to it.
        """
        self.end(commit=True)

    def end(self, *, commit: bool) -> None:
        """Close as `close` does. commit: commit the last step of a durable run, if that has not
        been done."""
        if self.parts.access.closed:
            return
        # `gather()` stores the block's writes at its end, when the engine would be closed.
        if self.parts.lifecycle.windows:
            raise RuntimeError(
                "handle.close() inside handle.gather(): the writes of the block would be lost; "
                "leave the block first"
            )
        self._leave_if_stuck()
        # Hooks first, memory last: while memory is freed no forward may begin, and no transfer may
        # be in flight.
        steps = (
            self.parts.lifecycle.detach,
            self.parts.tiers.executor.wait_all,
            self.unsharder.close,
            lambda: detach_params(self.parts.split.params),
            self.saving.report_last,
        )
        # All steps run, whatever fails: threads and files must not outlive the handle.
        with run_all(self._forget, *steps, self.parts.tiers.buffers.close, self._undo.close):
            # First, since nothing below may use a lost drive. Raised even if an earlier call did.
            self.parts.access.check_drives()
            # A save reads chunks that are freed below.
            self.saving.wait_for_last()
            # Without a commit this must not communicate: other ranks may have ended.
            self.pipeline.wait(together=commit and self.durable is not None)
            self.saving.raise_fault()
            if commit:
                self.pipeline.commit()

    def _leave_if_stuck(self) -> None:
        """Block until no collective is in flight. Raises: RankFailed if a collective cannot end;
        then all parts are retained until the process ends."""
        try:
            self.comm.drain()
        except RankFailed:
            _KEPT.append(self.parts)
            # Only end threads and notify other ranks: free no memory, and wait for nothing.
            with run_all(self._forget, self.parts.lifecycle.remove_hooks, self.comm.close):
                raise

    def _forget(self) -> None:
        self.parts.access.close()
        # The set refers strongly to handles, and so to their memory.
        _OPEN.discard(self)

    @property
    def closed(self) -> bool:
        """True after `close`."""
        return self.parts.access.closed

    def check_open(self) -> None:
        """Raise EngineClosed after `close`; the fault of a background update, in every call;
        ProcessGroupChanged."""
        self.parts.access.check_open()
        self.parts.access.before_pass()

    def check_state_dict(self, size_bytes: int) -> None:
        """Raise MemoryError if a `state_dict()` of `size_bytes` does not fit into memory; and what
        `check_open` raises."""
        self.check_open()
        # An interrupted pass may have left units in use.
        self.parts.lifecycle.recover()
        check_copies(size_bytes)


@atexit.register
def _close_all() -> None:
    """Finish the submitted steps and free all engines, at exit. Faults are logged: there is no
    caller to raise them to. Other ranks may have ended, so nothing collective is done.
    """
    # A copy: closing removes the handle from the set.
    for open_handle in list(_OPEN):
        try:
            open_handle.end(
                commit=open_handle.durable is None or open_handle.saving.comm.world == 1
            )
        except DriveLostError as error:
            # The interpreter has shown the error that ended the script.
            if getattr(sys, "last_value", None) is not error:
                log.error("closing an offloaded model at exit: %s", error)
        except Exception:
            log.exception("closing an offloaded model at exit failed")
