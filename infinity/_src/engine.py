"""The engine: `offload` takes a model apart into units at rest, `Handle` is what the user holds of it.

offload = find units -> place -> fill, unit by unit -> attach hooks        (this module only wires)

model.parameters() --- at rest --->  Rest (chunks: RAM, NVMe)  <--- Pipeline (opt.step)
         |                                  ^
     Lifecycle (hooks)  --- asks --->  Unsharder (gather, evict, prefetch)
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import os
import warnings
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch

from infinity._src.checkpoint.durable import DurableRun
from infinity._src.checkpoint.save import Saving
from infinity._src.cleanup import run_all
from infinity._src.config import Policy
from infinity._src.distributed.setup import RankSetup
from infinity._src.grads.buffers import GradBuffers
from infinity._src.grads.proxy import GradRegistry
from infinity._src.grads.reducer import GradReducer
from infinity._src.hooks.forward import Lifecycle, attach
from infinity._src.hooks.gather_window import chosen_params
from infinity._src.hooks.install import part
from infinity._src.hooks.state_dict import check_copies
from infinity._src.memory.device import Device, GradOffload, compute_device, open_device
from infinity._src.memory.heap import Heap
from infinity._src.memory.node_resources import open_node_resources
from infinity._src.memory.planner import PlacementPlanner, chunk_numel_of
from infinity._src.optim.registry import OptimizerRegistry
from infinity._src.optim.state_access import OptimizerState, States
from infinity._src.optim.step import StepPipeline
from infinity._src.optim.transaction import Transaction
from infinity._src.optim.update_mode import open_mode, staging_bytes
from infinity._src.params.discover import build, find_units
from infinity._src.params.materialize import Source, fill_unit, open_source
from infinity._src.params.residency import Unsharder
from infinity._src.params.too_large import check_gatherable, device_memory_bytes
from infinity._src.params.unit import Flat, Param, Unit
from infinity._src.stats import Stats
from infinity._src.storage import Storage, check_activations
from infinity._src.telemetry import Timeline
from infinity.aio import Seam
from infinity.errors import EngineClosed

log = logging.getLogger("infinity")

OFFLOAD_UNITS = 2
"""Fresh gradients of so many of the largest units may be on their way from the device; then backward waits."""

_HANDLE = "_infinity_handle"  # where a model keeps its handle: a table here would keep closed models alive
_OPEN: set[Handle] = set()


def offload(
    model: torch.nn.Module,
    policy: Policy | None = None,
    *,
    load: Source | None = None,
    _seam: Seam | None = None,
) -> torch.nn.Module:
    """Offload a model in place: from here on its parameters rest where `policy` says and are gathered just in time.

    Returns the same module. load: where values come from, unit by unit, when the module is on the meta device: a
    callable `(name, tensor) -> None` that fills the tensor, a mapping from names to tensors, or a directory of
    safetensors. It is called under no_grad once per parameter and persistent buffer. Blocks until all is at rest.

    Raises: ValueError for what the policy or the model cannot do, BudgetError when the policy's `ram` is too small,
    SwapFullError and other OSErrors for the NVMe directories, PeerFailed when another rank failed, which is named. On an error
    the model is as it was. Collective on several ranks.
    """
    if not (policy is None or isinstance(policy, Policy)):
        raise ValueError(f"inf.offload takes an inf.Policy, not a {type(policy).__name__}; write inf.Policy(params=..., ...)")
    before = model.__dict__.get(_HANDLE)
    if before is not None and before.closed:
        raise ValueError(
            "the engine of this model was closed, and its values with it: build the model anew (inf.export_safetensors "
            "before close() keeps the values, and load= takes them up)"
        )
    if before is not None:
        raise ValueError("this model is offloaded already; inf.handle(model).close() ends that")
    device = compute_device(model, (policy or Policy()).device)
    strided = [name for name, parameter in model.named_parameters() if not parameter.is_contiguous()]
    handle_ = Handle(model, policy or Policy(), device, load, _seam)
    model.__dict__[_HANDLE] = handle_
    _OPEN.add(handle_)
    if strided:
        others = f" and {len(strided) - 3} more" if len(strided) > 3 else ""
        warnings.warn(
            f"{', '.join(strided[:3])}{others}: dimensions are in another order in memory (channels_last, transposed); offloaded "
            "they are contiguous, with the same values, and kernels that choose by the order may round otherwise",
            stacklevel=2,
        )
    return model


def handle(model: torch.nn.Module) -> Handle:
    """The handle of an offloaded model. Raises: ValueError for a model that is not offloaded."""
    found: Handle | None = model.__dict__.get(_HANDLE)
    if found is None:
        raise ValueError("this model is not offloaded; call inf.offload(model, policy) first")
    return found


class Handle:
    """An offloaded model's engine, as its user sees it. Methods block; one thread uses it at a time."""

    def __init__(
        self,
        model: torch.nn.Module,
        policy: Policy,
        device: torch.device,
        load: Source | None,
        seam: Seam | None,
    ) -> None:
        self.policy = policy
        self.on_nonfinite = policy.on_nonfinite
        self.timeline = Timeline(spans_max=200_000)
        self.durable: DurableRun | None = None
        self._closed = False
        self._undo = contextlib.ExitStack()
        with contextlib.ExitStack() as undo:
            self._build(model, device, load, seam, undo)
            self._undo = undo.pop_all()

    def _build(
        self,
        model: torch.nn.Module,
        device: torch.device,
        load: Source | None,
        seam: Seam | None,
        undo: contextlib.ExitStack,
    ) -> None:
        policy = self.policy
        ranks = self._ranks = RankSetup(policy, device, undo)
        self.comm = ranks.comm
        self._node_resources = undo.enter_context(open_node_resources(self.comm, policy))
        policy = self.policy = self._node_resources.policy
        self.rank, alone = self.comm.rank, not ranks.several
        specs = find_units(model, units=policy.units, unit_bytes_max=int(policy.unit_bytes_max), nested=alone)
        check_gatherable(model, specs, int(policy.unit_bytes_max), device, device_memory_bytes(device))
        self.units: list[Unit] = build(model, specs, device, self.comm.world, lambda dtype: chunk_numel_of(policy.state, dtype))
        for unit in self.units:
            unit.engine = self
        self._flats: list[Flat] = [flat for unit in self.units for flat in unit.flats]
        self._params: list[Param] = [param for unit in self.units for param in unit.params]
        there = open_device(device)
        check_activations(policy, there)
        source, self._gradients = open_source(model, load), GradBuffers(self.rank, policy.grad_dtype, there)
        early = functools.partial(staging_bytes, policy, self.units, there, self._gradients.dtype)
        staging = ranks.staging(self._flats, self._gradients.dtype)
        share = {"default_bytes": self._node_resources.default_bytes, "ledger_owner": id(self)}
        self._placing = PlacementPlanner(policy, self._flats, self._gradients, staging_bytes=lambda: early() + staging(), **share)
        undo.callback(self._placing.close)
        plan = self._placing.first()
        self._storage = Storage(policy, plan, seam, undo, device=there, node_resources=self._node_resources, rank=self.rank)
        self._executor, self._rest = self._storage.executor, self._storage.rest
        self._rest.create(self._flats, plan.nvme_masks)
        for unit in self.units:
            fill_unit(unit, source, self._store_flat)
        source.fill_buffers(device)
        self._node_resources.end_rendezvous()
        ranks.check_values()
        self._build_gradients(there, undo)
        self.residency = Unsharder(
            self.units,
            rest=self._rest,
            executor=self._executor,
            gradients=self._drain,
            comm=self.comm,
            keep=ranks.whole_params,
            timeline=self.timeline,
            device=there,
            qwz=policy.qwz,
            kept=ranks.kept(self.units, there),
        )
        self.residency.on_demand, self.residency.on_write = self._on_demand, self._wait
        self._heap = Heap.for_units((unit.size_bytes for unit in self.units), device.type)
        self.residency.on_evict = self._heap.freed
        self.residency.clock.activations = self._storage.activations_moved
        self._build_step(model, undo)
        self._lifecycle: Lifecycle = attach(
            model,
            self.units,
            self.residency,
            where=lambda _param: policy.params,
            check_state_dict=self._check_state_dict,
            activations=self._storage.open_activations(model, self.units, self.timeline, undo),
        )

    def _build_gradients(self, there: Device, undo: contextlib.ExitStack) -> None:
        """Where gradients go when backward makes them."""
        self._book = GradRegistry(self.comm.all_reduce_sum if self.comm.world > 1 else None)
        if there.copies:
            self._book.grad_offload = GradOffload(there, OFFLOAD_UNITS * max((unit.size_bytes for unit in self.units), default=0))
            undo.callback(self._book.grad_offload.close)
            # The parts of several ranks come back when they are added to.
            self._gradients.grad_offload = self._book.grad_offload if not self._ranks.several else None
        undo.callback(self._book.release)
        parts = self._ranks.gradient_parts(self._flats, self._gradients, undo)
        self._drain = GradReducer(self.units, gradients=self._gradients, book=self._book, comm=self.comm, **parts)

    def _build_step(self, model: torch.nn.Module, undo: contextlib.ExitStack) -> None:
        """What updates: the pipeline, what optimizers hold, and when updates are submitted."""
        policy = self.policy
        self.pipeline = StepPipeline(self.units, rest=self._rest, executor=self._executor, residency=self.residency, comm=self.comm)
        if policy.generations > 1:
            self.pipeline.transaction = Transaction(
                self.units, rest=self._rest, executor=self._executor, residency=self.residency
            )
        self._holding = OptimizerRegistry(
            policy,
            self._flats,
            placing=self._placing,
            rest=self._rest,
            executor=self._executor,
            gradients=self._gradients,
            book=self._book,
            residency=self.residency,
            pipeline=self.pipeline,
            rank=self.rank,
            check_open=self.check_open,
            together=self._node_resources.open_rendezvous,
        )
        self._mode = open_mode(
            policy,
            self.units,
            pipeline=self.pipeline,
            residency=self.residency,
            drain=self._drain,
            rest=self._rest,
            executor=self._executor,
            rank=self.rank,
            holder_of=self._holding.holder_of,
            make_gradients=self._holding.make_gradients,
        )
        self._holding.mode = self._mode
        undo.callback(self._mode.close)
        self.pipeline.on_step = self._step_begins
        self.pipeline.plan(self._flats)
        self.states = States(self._rest, self.residency, self.comm, wait=self._wait)
        parts: dict[str, Any] = {"holder_of": self._holding.holder_of, "mode": self._mode, "units": self.units}
        self.saving = Saving(self.states, executor=self._executor, comm=self.comm, policy=policy, **parts)
        self.extra: Any = None  # what durable runs and saves keep for the user
        run, space = self._storage.run, self._storage.space
        if run is not None and space is not None:
            self.durable = DurableRun(run, space, model, self.saving, self.pipeline, extra=lambda: self.extra)
            undo.callback(self.durable.close)

    def _step_begins(self, steps: int) -> None:
        """Forwards and backwards of a step are done, and its update begins. `steps`: those before it."""
        self._heap.restart()
        self._storage.step_begins(steps)

    def hold(self, optimizer: Any, params: list[Param]) -> None:
        """Give parameters the states that `optimizer.moments_of` names (called by optimizers); see `infinity._src.optim.registry`."""
        self._holding.hold(optimizer, params)

    def _store_flat(self, flat: Flat, values: torch.Tensor) -> None:
        """Write a whole flat [layout.numel] to rest; this rank's shard of it. Blocks."""
        self._ranks.note(flat, values)
        start = self.rank * flat.layout.shard_numel
        shard = values[start : start + flat.layout.shard_numel].contiguous()
        self._rest.store(flat, 0, shard.data_ptr()).wait()

    # -- what the user calls -------------------------------------------------------------------------------------------

    def gather(self, params: torch.nn.Parameter | Iterable[torch.nn.Parameter]) -> AbstractContextManager[None]:
        """Inside, these parameters (what `model.parameters()` yields) can be read and written; writes are kept.

        Waits for pending updates of their units, and, before it keeps writes, for all: a step that is undone raises StepUndone,
        and nothing is kept. With update="delayed" these are the updated values, which training computes with one step later: a
        training forward or backward through them raises RuntimeError inside. On several ranks all gather, and write, the same.
        Raises: ValueError for a parameter of another model.
        """
        self.check_open()
        return self._lifecycle.gather(params)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Marks micro-batches that are not the last of a step: with update="backward" they accumulate, and the first
        backward outside of it updates. On several ranks with accumulate="local" (and zero=1) they add up on each rank, and that
        backward reduces them; else gradients are reduced into the shards at once, and the other modes need no mark.

        Raises: BudgetError when update="backward" has no room for gradients, at the first time.
        """
        self.check_open()
        with self._drain.accumulating(), self._mode.no_sync():
            yield

    def optimizer_state(self, param: torch.nn.Parameter) -> OptimizerState:
        """What the parameter's optimizer keeps for it, by name, to be read and written on any tier: "master", moments, "step".

        Raises: ValueError for a parameter of another model, or that no optimizer holds.
        """
        self.check_open()
        found = self._one(param)
        holder = self._holding.holder_of(found)
        if holder is None:
            raise ValueError(f"no optimizer holds {found.name}; build inf.AdamW(model.parameters()) first, and keep it")
        return OptimizerState(found, holder, self.states)

    def full_grad(self, param: torch.nn.Parameter) -> torch.Tensor | None:
        """The accumulated gradient of a parameter, with what the loop did to it: a fresh fp32 CPU tensor [param.shape].

        None where `param.grad` is None. Waits for pending updates. Collective on several ranks: it is the mean over all, and
        every rank gets the whole. Raises: ValueError for a parameter of another model; RuntimeError for a gradient that an
        update has taken, as with update="backward" after backward.
        """
        self.check_open()
        return self.states.full_grad(self._one(param))

    def set_full_grad(self, param: torch.nn.Parameter, grad: torch.Tensor | None) -> None:
        """Make `grad` [param.shape] the gradient of a parameter, rounded to the dtype in which gradients wait; None clears it.

        Waits for pending updates. With update="backward" None takes nothing back: what backward applied stays applied. On several
        ranks all pass the same tensor. Raises: ValueError for a wrong shape or dtype, or a parameter of another model;
        RuntimeError, with update="backward", when the update has taken the gradient that backward made.
        """
        self.check_open()
        self.states.set_full_grad(self._one(param), grad)

    def _one(self, param: torch.nn.Parameter) -> Param:
        found = chosen_params(self._lifecycle, param) if isinstance(param, torch.Tensor) else []
        if len(found) != 1:
            raise ValueError(
                f"this wants one parameter of the offloaded model, as model.parameters() yields it, not a {type(param).__name__}"
            )
        return found[0]

    def read(self, param: Param) -> torch.Tensor:
        """The current value of one parameter as an ordinary CPU tensor; waits for pending updates of its unit."""
        self._lifecycle.recover()
        return self.residency.read(param)

    def stats(self) -> Stats:
        """Counters since `offload`; `infinity._src.stats.Stats` says what each means. Raises: EngineClosed."""
        if self._closed:
            raise EngineClosed("handle.stats(): the engine of this model was closed; ask before close()")
        return Stats.collect(
            executor=self._storage.observe(self.pipeline.steps),
            endurance=self._storage.endurance,
            residency=self.residency,
            pipeline=self.pipeline,
            placement=self._placing.plan,
            param_numel=sum(param.numel for param in self._params),
            unit_count=len(self.units),
            backend_reason=self._executor.backend_reason,
            update=self.policy.update if self.policy.update_on == "cpu" else None,
            bandwidths=self.policy.io_settings.bandwidths,
            activations=self._storage.activation_figures(),
            ranks=self._ranks.figures(),
            fresh_grad_bytes_peak=max(self._drain.fresh_bytes_peak, self._mode.fresh_bytes_peak),
            heap_spare_bytes=self._heap.spare_bytes,
            frozen_bytes=self._storage.frozen_bytes(self._flats),
        )

    def trace(self, path: str | os.PathLike[str]) -> int:
        """Write the timeline so far as Chrome trace JSON (opens in Perfetto) and return its number of spans.

        Tracks: waits of training, reads, writes, updates, copies; the newest of each are kept.
        """
        self.timeline.add_native_spans(self._executor.take_spans())
        return self.timeline.write(path)

    def flush(self) -> None:
        """Return when no update or write is pending. Raises what the background met.

        In a durable run the last step is committed then; on several ranks of one all call it.
        """
        self._wait()
        self.pipeline.settle()

    def _wait(self) -> None:
        self.check_open()
        self.pipeline.wait()

    def close(self) -> None:
        """Flush, free everything, and leave the parameters unreadable (they raise). Idempotent. A durable run commits its last
        step, together with all ranks; an exit without close() commits it on one rank, and on several leaves the one before.

        Raises: RuntimeError inside `gather()`; what the background met, after everything was freed.
        """
        self.end(commit=True)

    def end(self, *, commit: bool) -> None:
        """As `close`. commit: the last step of a durable run, if it is not yet."""
        if self._closed:
            return
        if self._lifecycle.windows:
            raise RuntimeError("handle.close() inside handle.gather(): the writes of the block would be lost; leave it first")
        steps = (self._lifecycle.detach, self._executor.drain, self.residency.close, lambda: part(self._params))
        with run_all(self._forget, *steps, self._gradients.close, self._undo.close):
            self.saving.settle()
            self.pipeline.wait()
            self.saving.raise_fault()
            if commit:
                self.pipeline.settle()

    def _forget(self) -> None:
        self._closed = True
        _OPEN.discard(self)

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def check_open(self) -> None:
        """Raise after close, and the sticky fault of a background update."""
        if self._closed:
            raise EngineClosed("the engine of this model was closed; build the model anew and offload that")
        self.pipeline.raise_fault()
        self.saving.raise_fault()
        self.comm.check()

    def _on_demand(self, unit: Unit) -> None:
        self.check_open()
        self.pipeline.before_read(unit)
        self._storage.observe_sometimes()

    def _check_state_dict(self, size_bytes: int) -> None:
        self.check_open()
        self._lifecycle.recover()
        check_copies(size_bytes)


@atexit.register
def _close_all() -> None:
    """At exit: finish what was stepped, then free. A fault is logged; there is nobody left to raise it to. Other ranks may be
    gone already: nothing that needs them is done."""
    for open_handle in list(_OPEN):
        try:
            open_handle.end(commit=open_handle.durable is None or open_handle.saving.comm.world == 1)
        except Exception:
            log.exception("closing an offloaded model at exit failed")
