"""The engine: `offload` takes a model apart into units at rest, `Handle` is what the user holds of it.

offload = find units -> place -> fill, unit by unit -> attach hooks        (this module only wires)

model.parameters() --- at rest --->  Rest (chunks: RAM, NVMe)  <--- Pipeline (opt.step)
         |                                  ^
     Lifecycle (hooks)  --- asks --->  UnitResidency (gather, evict, prefetch)
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from infinity.aio import Seam
from infinity.aio.plan import Format
from infinity.checkpoint import write_safetensors
from infinity.comm.collectives import Comm
from infinity.config import Policy
from infinity.errors import BudgetError, EngineClosed
from infinity.memory.heap import keep_large_blocks_apart
from infinity.memory.ledger import LEDGER, budget_bytes, describe_budget, memory_left_bytes
from infinity.memory.placement import FlatNeed, Plan, plan_placement
from infinity.optim.step import Pipeline
from infinity.params.discover import build, find_units
from infinity.params.gradients import GradientMemory
from infinity.params.residency import UnitResidency
from infinity.params.stand_in import NORM_PIECE_NUMEL, GradBook
from infinity.params.unit import Flat, Param, Unit
from infinity.runtime.filling import Source, fill_unit, open_source
from infinity.runtime.lifecycle import Lifecycle, attach
from infinity.sizes import format_size
from infinity.stats import Stats
from infinity.storage import Storage
from infinity.telemetry import Timeline

log = logging.getLogger("infinity")

_HANDLE = "_infinity_handle"  # where a model keeps its handle: a table here would keep closed models alive
_OPEN: set[Handle] = set()
_STATE_FORMATS = {torch.bfloat16: Format.SPLIT, torch.float32: Format.FP32}


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
    SwapFullError and other OSErrors for the NVMe directories. On an error the model is as it was.
    """
    before = model.__dict__.get(_HANDLE)
    if before is not None and before.closed:
        raise ValueError(
            "the engine of this model was closed, and its values with it: build the model anew (inf.export_safetensors "
            "before close() keeps the values, and load= takes them up)"
        )
    if before is not None:
        raise ValueError("this model is offloaded already; inf.handle(model).close() ends that")
    device = _compute_device(model)
    handle_ = Handle(model, policy or Policy(), device, load, _seam)
    model.__dict__[_HANDLE] = handle_
    _OPEN.add(handle_)
    return model


def handle(model: torch.nn.Module) -> Handle:
    """The handle of an offloaded model. Raises: ValueError for a model that is not offloaded."""
    found: Handle | None = model.__dict__.get(_HANDLE)
    if found is None:
        raise ValueError("this model is not offloaded; call inf.offload(model, policy) first")
    return found


def export_safetensors(
    model: torch.nn.Module, directory: str | os.PathLike[str], *, shard_bytes_max: int | str = "2GiB"
) -> None:
    """Write an offloaded model's parameters and persistent buffers as safetensors, loadable by `from_pretrained`.

    Streams: one shard is in memory at a time, of `shard_bytes_max` or one unit if that is larger. Waits for pending
    updates. A tied parameter is written once, under its first name. On several ranks all must call it; rank 0 writes.

    Raises: OSError naming the path; ValueError for a model that is not offloaded.
    """
    of = handle(model)
    of.flush()
    write_safetensors(model, of, directory, shard_bytes_max=shard_bytes_max)


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
        self._closed = False
        self._undo = contextlib.ExitStack()
        self._holders: dict[Param, weakref.ref[Any]] = {}
        # Once: what is left shrinks as this model takes its share, and must not be halved again for the optimizer.
        self._default_budget = budget_bytes(None, id(self)) if policy.ram is None else None
        self._pools: tuple[int, int] | None = None  # slot sizes (small, large), once they are allocated
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
        if device.type == "cpu":
            keep_large_blocks_apart()  # gathered units come and go on the heap
        self._comm = Comm(reduce_dtype=policy.reduce_dtype)
        self.rank = self._comm.rank
        specs = find_units(
            model, units=policy.units, unit_bytes_max=int(policy.unit_bytes_max), nested=self._comm.world == 1
        )
        self.units: list[Unit] = build(model, specs, device, self._comm.world)
        for unit in self.units:
            unit.engine = self
        self._flats: list[Flat] = [flat for unit in self.units for flat in unit.flats]
        self._params: list[Param] = [param for unit in self.units for param in unit.params]
        source, self._gradients = open_source(model, load), GradientMemory(self.rank, policy.grad_dtype)
        undo.callback(LEDGER.release, id(self))
        plan = self._first_plan()
        self._pools = (plan.small_bytes, plan.large_bytes)
        self._storage = Storage(policy, plan, seam, undo)
        self._executor, self._rest = self._storage.executor, self._storage.rest
        self._rest.create(self._flats, plan.nvme_masks)
        for unit in self.units:
            fill_unit(unit, source, self._store_flat)
        source.fill_buffers(device)
        self._book = GradBook(self._comm.sum_floats if self._comm.world > 1 else None)
        self.residency = UnitResidency(
            self.units,
            rest=self._rest,
            executor=self._executor,
            gradients=self._gradients,
            book=self._book,
            comm=self._comm,
            keep=policy.params == "device",
            timeline=self.timeline,
        )
        self.residency.on_demand = self._on_demand
        self.pipeline = Pipeline(
            self.units,
            rest=self._rest,
            executor=self._executor,
            gradients=self._gradients,
            residency=self.residency,
            comm=self._comm,
        )
        self.pipeline.on_step = self._storage.observe
        self.pipeline.plan(self._flats)
        self._lifecycle: Lifecycle = attach(
            model,
            self.units,
            self.residency,
            where=lambda _param: policy.params,
            check_state_dict=self._check_state_dict,
        )

    # -- placement -----------------------------------------------------------------------------------------------------

    def _needs(self, held: Iterable[Flat]) -> list[FlatNeed]:
        chosen = set(held)
        return [
            FlatNeed(
                flat.layout,
                _STATE_FORMATS[flat.dtype] if flat in chosen else Format.RAW,
                self.policy.params,
                self.policy.optim,
                self._gradients.shard_bytes(flat) if flat in chosen else 0,
            )
            for flat in self._flats
        ]

    def _plan(self, held: list[Flat]) -> Plan:
        largest = max((param.numel for flat in held for param in flat.params), default=0)
        plan = plan_placement(
            self._needs(held),
            self._default_budget if self.policy.ram is None else budget_bytes(self.policy.ram, id(self)),
            drive_count=len(self.policy.directories),
            scratch_bytes=4 * min(largest, NORM_PIECE_NUMEL),
            pools=self._pools,
            advice=f"Policy(ram=...) is {describe_budget(self.policy.ram)}: raise it, or let states rest on a lower tier",
        )
        LEDGER.reserve(id(self), plan.ram_bytes)
        self._placement = plan
        return plan

    def _first_plan(self) -> Plan:
        """The placement before an optimizer exists: parameters only, but pools for the step that may come."""
        trainable = [flat for flat in self._flats if flat.trainable and flat.dtype in _STATE_FORMATS]
        if not trainable:
            return self._plan([])
        try:
            return self._plan(trainable)
        except BudgetError as error:
            log.warning("this budget does not allow training: %s", error)
            return self._plan([])

    def hold(self, optimizer: object, params: list[Param]) -> None:
        """Give parameters optimizer states (called by optimizers). Blocks while states are written.

        Raises: ValueError when another optimizer holds one or its dtype has no state format, BudgetError, SwapFullError.
        """
        self.check_open()
        self._check_holdable(optimizer, params)
        self.pipeline.wait()
        self._executor.drain()
        held_params = {*self._holders, *params}
        held = [flat for flat in self._flats if any(param in held_params for param in flat.params)]
        before = self._placement
        try:
            plan = self._plan(held)
            if (plan.small_bytes, plan.large_bytes) != self._pools:
                # Pools are allocated once, for all parameters that required a gradient when the model was offloaded.
                raise ValueError(
                    "the optimizer holds parameters that required no gradient when the model was offloaded, or whose "
                    "states did not fit the budget then; call requires_grad_() before inf.offload, or raise Policy(ram=...)"
                )
            needs = self._needs(held)
            self._rest.convert(self._flats, [need.format for need in needs], plan.nvme_masks)
            for param in params:
                if param in self._holders and self._holders[param]() is not optimizer:
                    # Its optimizer is gone; a new one starts with masters and moments of its own.
                    start, _, numel = param.flat.layout.shard_range(param.slot_index, self.rank)
                    self._rest.forget(param.flat, start, numel)
            self._gradients.allocate(held)
        except BaseException:
            self._placement = before
            LEDGER.reserve(id(self), before.ram_bytes)
            self.pipeline.plan(self._flats)
            raise
        self._holders.update((param, weakref.ref(optimizer)) for param in params)
        for flat in held:
            for param in flat.params:
                if param.grad is not None:
                    memory = self._gradients.of(param)
                    memory.copy_(param.grad.tensor)
                    param.grad.tensor = memory
                elif param in self._holders:
                    self.residency.slot(param)
        self._book.reserve()
        self.pipeline.plan(self._flats)

    def _check_holdable(self, optimizer: object, params: list[Param]) -> None:
        for param in params:
            holder = self._holders.get(param)
            if holder is not None and holder() is not None and holder() is not optimizer:
                raise ValueError(
                    f"{param.name} is held by another optimizer; give each parameter to one optimizer only"
                )
            if param.dtype not in _STATE_FORMATS:
                raise ValueError(
                    f"{param.name} is {param.dtype}; optimizer states are built for bfloat16 and float32 parameters: "
                    "cast the model before inf.offload, or freeze the parameter"
                )
            grad_dtype = self._gradients.dtype(param.flat)
            if grad_dtype not in (torch.bfloat16, torch.float32):
                raise ValueError(
                    f"grad_dtype={grad_dtype} is not supported; use torch.bfloat16, torch.float32 or None"
                )

    def _store_flat(self, flat: Flat, values: torch.Tensor) -> None:
        """Write a whole flat [layout.numel] to rest; this rank's shard of it. Blocks."""
        start = self.rank * flat.layout.shard_numel
        shard = values[start : start + flat.layout.shard_numel].contiguous()
        self._rest.store(flat, 0, shard.data_ptr()).wait()

    # -- what the user calls -------------------------------------------------------------------------------------------

    def gather(
        self, params: torch.nn.Parameter | Iterable[torch.nn.Parameter]
    ) -> AbstractContextManager[None]:
        """Inside, these parameters (what `model.parameters()` yields) can be read and written; writes are kept.

        Waits for pending updates of their units. Raises: ValueError for a parameter of another model.
        """
        self.check_open()
        return self._lifecycle.gather(params)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Marks micro-batches that are not the last of a step. Stage 3 reduces each of them into the shards, which
        keeps memory flat and sums the same gradients, so there is nothing to postpone."""
        self.check_open()
        yield

    def read(self, param: Param) -> torch.Tensor:
        """The current value of one parameter as an ordinary CPU tensor; waits for pending updates of its unit."""
        return self.residency.read(param)

    def stats(self) -> Stats:
        """Counters since `offload`; `infinity.stats.Stats` says what each means."""
        return Stats.collect(
            executor=self._storage.observe(self.pipeline.steps),
            endurance=self._storage.endurance,
            residency=self.residency,
            pipeline=self.pipeline,
            placement=self._placement,
            param_numel=sum(param.numel for param in self._params),
            unit_count=len(self.units),
            backend_reason=self._executor.backend_reason,
        )

    def trace(self, path: str | os.PathLike[str]) -> int:
        """Write the timeline so far as Chrome trace JSON (opens in Perfetto) and return its number of spans.

        Tracks: waits of training, reads, writes, updates, copies; the newest of each are kept.
        """
        self.timeline.add_native_spans(self._executor.take_spans())
        return self.timeline.write(path)

    def flush(self) -> None:
        """Return when no update or write is pending. Raises what the background met."""
        self.check_open()
        self.pipeline.wait()

    def close(self) -> None:
        """Flush, free everything, and leave the parameters unreadable (they raise). Idempotent.

        Raises: RuntimeError inside `gather()`; what the background met, after everything was freed.
        """
        if self._closed:
            return
        if self._lifecycle.windows:
            raise RuntimeError(
                "handle.close() inside handle.gather(): the writes of the block would be lost; leave it first"
            )
        try:
            self.pipeline.wait()
        finally:
            self._closed = True
            _OPEN.discard(self)
            self._lifecycle.detach()
            self._executor.drain()
            self.residency.close()
            self._part_params()
            self._gradients.close()
            self._undo.close()

    def _part_params(self) -> None:
        """Take from the parameters what would outlive the engine, or keep the model alive."""
        for param in self._params:
            if param.grad is not None:
                param.grad.empty()
                param.grad.tensor = torch.empty(0, dtype=param.grad.tensor.dtype)
                param.at_rest.grad = None
            for leaf in (param.gathered, param.at_rest):
                # These hooks hold the engine from C++, where the garbage collector does not look.
                with torch._C.DisableTorchFunctionSubclass():
                    hooks: Any = leaf._post_accumulate_grad_hooks
                if hooks:
                    hooks.clear()

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def check_open(self) -> None:
        """Raise after close, and the sticky fault of a background update."""
        if self._closed:
            raise EngineClosed("the engine of this model was closed; build the model anew and offload that")
        self.pipeline.raise_fault()

    def _on_demand(self) -> None:
        self.check_open()
        self._storage.observe_sometimes()

    def _check_state_dict(self, size_bytes: int) -> None:
        self.check_open()
        left = memory_left_bytes()
        if size_bytes > left:
            raise MemoryError(
                f"state_dict() would copy {format_size(size_bytes)} of parameters into memory and {format_size(left)} are "
                "left; inf.export_safetensors(model, directory) streams them to files"
            )


def _compute_device(model: torch.nn.Module) -> torch.device:
    """The device that computes. Raises: ValueError for what is not built yet."""
    kinds = {tensor.device.type for tensor in (*model.parameters(), *model.buffers())} - {"meta"}
    if kinds - {"cpu"}:
        raise ValueError(
            f"the model is on {', '.join(sorted(kinds))}; this release computes on the CPU only (GPUs come with streams): "
            "model.to('cpu') first"
        )
    return torch.device("cpu")


@atexit.register
def _close_all() -> None:
    """At exit: finish what was stepped, then free. A fault is logged; there is nobody left to raise it to."""
    for open_handle in list(_OPEN):
        try:
            open_handle.close()
        except Exception:
            log.exception("closing an offloaded model at exit failed")


__all__: Sequence[str] = ("Handle", "export_safetensors", "handle", "offload")
