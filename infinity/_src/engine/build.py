"""Typed wiring of one engine, in the order of a parameter's life. Each part takes earlier ones.

    split_model       ranks, device and units of the model
    open_tiers        budget, gradient memory, swap files, executor, state store
    initialize_tiers  writes the model's values to their tiers
    start_progress    tracks passes, the order of units, and times
    choose_mode       the update mode, which all later parts use
    build_grads       from autograd to the accumulators
    build_unsharder   gathers units, prefetches, evicts
    build_optimizer   step pipeline, registry, states, saves
    open_durable_run  commits that outlive the process
    build_hooks       the hooks by which torch calls the engine

Collaborators are passed to constructors. If two parts need each other, the part that is made
first gets the later one by a call of `attach`: the update mode, the access checks, and the
transaction of a durable run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import psutil
import torch
import xxhash

from infinity._src.base.alarm import Alarm
from infinity._src.base.dtypes import check_kept
from infinity._src.base.progress import ProgressLine
from infinity._src.base.telemetry import LoopWaits, Marks, PhaseClock, Timeline
from infinity._src.cabi.records import VERIFY_STRIDE
from infinity._src.checkpoint.durable.initialization import Initialization
from infinity._src.checkpoint.durable.run import DurableRun
from infinity._src.checkpoint.formats.hub_files import open_weights
from infinity._src.checkpoint.metadata import persistent_buffers
from infinity._src.checkpoint.save import Saver
from infinity._src.config.policy import Policy
from infinity._src.distributed.communicator import Comm
from infinity._src.distributed.transport import Transport
from infinity._src.engine.access_checks import Background, EngineAccess
from infinity._src.engine.node_resources import NodeResources, open_node_resources
from infinity._src.engine.optimizer_owners import OptimizerRegistry
from infinity._src.engine.ram_planner import PlacementPlanner
from infinity._src.engine.rank_setup import RankSetup
from infinity._src.engine.storage import Storage, check_activations
from infinity._src.hooks.forward import FrameStack, Lifecycle
from infinity._src.hooks.whole_params import WholeParams
from infinity._src.memory import host_overhead
from infinity._src.memory.constants import OFFLOAD_UNITS
from infinity._src.memory.device import Device, GradOffload, check_current, open_device
from infinity._src.memory.device_capacity import Passes, overlap_bytes
from infinity._src.memory.flat_layout import chunk_numel_of
from infinity._src.memory.heap import Heap
from infinity._src.memory.ram_budget import PlacementPlan
from infinity._src.memory.swap_space import NoRoomError
from infinity._src.microbatch.microbatched import is_microbatched, slice_grads
from infinity._src.optim.backward_update import BackwardUpdate
from infinity._src.optim.chunk_repair import ChunkRepair
from infinity._src.optim.device_update import DeviceUpdate
from infinity._src.optim.grad_windows import grad_sizes, windows_bytes
from infinity._src.optim.speculative_update import SpeculativeUpdate
from infinity._src.optim.state_access import States
from infinity._src.optim.step import StepPipeline
from infinity._src.optim.transaction import Transaction
from infinity._src.optim.update_mode import DelayedUpdate, ModeParts, UpdateMode
from infinity._src.params.accumulator import GradRegistry
from infinity._src.params.aliases import find_aliases
from infinity._src.params.buffers import GradBuffers
from infinity._src.params.discover import build, check_gatherable, device_memory_bytes, find_units
from infinity._src.params.materialize import (
    FlatValues,
    ModuleBuffers,
    NamedTensors,
    OpenSource,
    Source,
    open_source,
    place_of,
)
from infinity._src.params.piece_writer import PieceWriter
from infinity._src.params.prefetch_schedule import PassTracker, Progress, Schedule
from infinity._src.params.reduce import GradReducer, ReduceOrder
from infinity._src.params.sharded_param import Rollback
from infinity._src.params.state_store import StateStore
from infinity._src.params.unit import Flat, Param, Unit
from infinity._src.params.unshard import Unsharder
from infinity.aio import Executor, Seam, Ticket
from infinity.errors import AioError, SwapFullError

log = logging.getLogger("infinity")

FLATS_UNDER_WAY = 32
"""The most flats whose writes are in flight while the next flat is read."""


class EngineHandle(Protocol):
    """The attributes of `Handle` that lower layers use. Units refer to the handle; a durable run
    reads `extra`, the user's state."""

    extra: Any

    def check_state_dict(self, size_bytes: int) -> None:
        """Raise MemoryError if a `state_dict()` of `size_bytes` does not fit into memory."""


@dataclasses.dataclass(frozen=True)
class Split:
    """Ranks, device and units of a model, on this rank. policy: the user's, with this rank's
    directories and its share of the bandwidths. passes: how forward and backward use the device.
    """

    policy: Policy
    ranks: RankSetup
    resources: NodeResources
    device: Device
    units: list[Unit]
    passes: Passes

    @property
    def comm(self) -> Comm:
        return self.ranks.comm

    @property
    def flats(self) -> list[Flat]:
        return [flat for unit in self.units for flat in unit.flats]

    @property
    def params(self) -> list[Param]:
        return [param for unit in self.units for param in unit.params]


@dataclasses.dataclass(frozen=True)
class Tiers:
    """Storage of all values. offload: copies gradients from a device with separate memory."""

    planner: PlacementPlanner
    buffers: GradBuffers
    offload: GradOffload | None
    storage: Storage

    @property
    def executor(self) -> Executor:
        return self.storage.executor

    @property
    def store(self) -> StateStore:
        return self.storage.store


@dataclasses.dataclass(frozen=True)
class Grads:
    """The path of gradients. registry: the accumulators of the model. reducer: brings gradients
    from autograd to the accumulators."""

    registry: GradRegistry
    reducer: GradReducer


@dataclasses.dataclass(frozen=True)
class OptimizerParts:
    """The step pipeline, and access to states between steps."""

    pipeline: StepPipeline
    registry: OptimizerRegistry
    states: States
    saving: Saver


@dataclasses.dataclass(frozen=True)
class Core:
    """The parts that all later parts need. undo: stack of calls that close parts."""

    split: Split
    tiers: Tiers
    progress: Progress
    mode: UpdateMode
    access: EngineAccess
    alarm: Alarm
    heap: Heap
    timeline: Timeline
    undo: contextlib.ExitStack


@dataclasses.dataclass(frozen=True)
class EngineParts(Core):
    """The parts of one engine, wired."""

    grads: Grads
    unsharder: Unsharder
    buffers: ModuleBuffers
    optimizer: OptimizerParts
    durable: DurableRun | None
    lifecycle: Lifecycle


def build_engine(
    model: torch.nn.Module,
    policy: Policy,
    device: torch.device,
    *,
    load: Source | NamedTensors | None,
    init: Callable[[], torch.nn.Module] | None,
    seam: Seam | None,
    transport: type[Transport] | None,
    owner: EngineHandle,
    timeline: Timeline,
    undo: contextlib.ExitStack,
    rollback: Rollback,
) -> EngineParts:
    """Split `model` into units and wire its engine. undo: receives the calls that close the parts,
    also if this raises. rollback: records changes of the model. Collective.
    """
    # A rendezvous before any file is opened: the error of one rank stops all ranks here.
    split = split_model(model, policy, device, transport, owner, undo)
    source, in_parts = find_source(split, model, load, init)
    # After opening the source: a missing file is detected before drives are written.
    alarm = Alarm()
    tiers = open_tiers(split, seam, alarm, owner, undo, source, in_parts=in_parts)
    # Let malloc retain some memory of evicted units: a gather would otherwise fault it in again.
    heap = Heap.for_units((unit.size_bytes for unit in split.units), device.type)
    initialize_tiers(split, tiers, source, Heap.for_stream(), rollback, in_parts=in_parts)
    buffers = sync_buffers(split, model, rollback)
    # The mode comes before the parts that call it.
    progress = start_progress(tiers, timeline)
    mode = choose_mode(split, tiers, progress, alarm)
    access = EngineAccess(split.comm, tiers.storage, mode, alarm)
    core = Core(split, tiers, progress, mode, access, alarm, heap, timeline, undo)
    grads = build_grads(core)
    unsharder = build_unsharder(core, grads, buffers)
    whole = WholeParams(
        unsharder,
        # With updates in backward, values at rest may belong to a step that is not taken yet.
        shown=split.ranks.whole_params and policy.update == "deferred",
        alone=split.comm.world == 1,
    )
    optimizer = build_optimizer(core, grads, unsharder, whole)
    # After `initialize_tiers`: the first commit names the initialized places.
    durable = open_durable_run(tiers, optimizer, model, owner, undo)
    # Last: with hooks installed, a forward may call every part above.
    lifecycle = build_hooks(core, grads, unsharder, whole, model, owner, rollback)
    # Set-up allocated each flat once outside of the gathers' memory pool: torch would retain an
    # unused block as large as the largest flat.
    split.device.free_cache()
    return EngineParts(
        **vars(core), grads=grads, unsharder=unsharder, buffers=buffers, optimizer=optimizer,
        durable=durable, lifecycle=lifecycle,
    )  # fmt: skip


def find_source(
    split: Split,
    model: torch.nn.Module,
    load: Source | NamedTensors | None,
    init: Callable[[], torch.nn.Module] | None,
) -> tuple[OpenSource, bool]:
    """Open the source of the model's values. Returns the source, and whether each rank reads a
    part of the same files. Collective. Raises: ValueError for a source that does not fit the model.
    """
    if isinstance(load, Path):
        load = open_weights(model, load)
    # All ranks build the same model; only rank 0 shows the progress.
    first = split.comm.rank == 0
    received = split.ranks.syncs_states and not first
    source = open_source(model, load, init, shown=first, received=received)
    # A round of the rendezvous, so a rank that cannot read parts takes part, too.
    in_parts = split.resources.are_alike(_read_alike(split, source))
    read_by_all = split.comm.world > 1 and not (in_parts or split.ranks.syncs_states)
    if source.files and read_by_all and first:
        log.info(
            "each of %d ranks reads all parameters, because the ranks do not read the same files "
            "of one machine",
            split.comm.world,
        )
    return source, in_parts


def split_model(
    model: torch.nn.Module,
    policy: Policy,
    device: torch.device,
    transport: type[Transport] | None,
    owner: EngineHandle,
    undo: contextlib.ExitStack,
) -> Split:
    """Open the communicator, find the model's units, open the device. Raises: ValueError for models
    that cannot be offloaded.
    """
    ranks = RankSetup(policy, device, undo, transport)
    resources = undo.enter_context(open_node_resources(ranks.comm, policy))
    # This rank's policy: its directories in place of "{rank}", its share of the drives' bandwidth.
    policy = resources.policy
    # Within the rendezvous of the resources, which reports an error here to the other ranks.
    if ranks.several:
        check_current(device)
    bytes_max = int(policy.unit_bytes_max)
    specs = find_units(
        model, units=policy.units, unit_bytes_max=bytes_max, nested=not ranks.several
    )
    if policy.durable:
        # Before the run creates files: its commits cannot store some kinds of buffers.
        check_kept(persistent_buffers(model).items(), "a durable run")
    there = open_device(device, check=ranks.comm.check)
    passes = Passes(
        copies=there.copies,
        several=ranks.several,
        in_backward=policy.consumes_grads,
        whole=ranks.whole_params,
        # The same value on all ranks: these bytes determine which units stay gathered.
        device_bytes=resources.least(device_memory_bytes(device)),
    )
    # Checked by shapes, before any value is read.
    check_gatherable(
        model,
        specs,
        bytes_max,
        device,
        device_memory_bytes(device),
        passes,
        slice_grads(model, policy.grad_dtype),
    )
    # Called for its errors, before any file is opened: `install` finds the aliases again.
    find_aliases(model)
    units = build(
        specs,
        device,
        ranks.comm.world,
        functools.partial(chunk_numel_of, policy.state),
        engine=owner,
    )
    check_activations(policy, there)
    return Split(policy, ranks, resources, there, units, passes)


def open_tiers(
    split: Split,
    seam: Seam | None,
    alarm: Alarm,
    owner: EngineHandle,
    undo: contextlib.ExitStack,
    source: OpenSource,
    *,
    in_parts: bool,
) -> Tiers:
    """Plan the budget and open the storage of values, still empty. source, in_parts: how the
    storage will be initialized. Raises: BudgetError, MemoryLimitError, SwapFullError, OSError.
    """
    policy = split.policy
    # Capacity for the gradients of a few units in flight to the host.
    leaving = overlap_bytes([unit.size_bytes for unit in split.units], OFFLOAD_UNITS)
    offload = GradOffload(split.device, leaving) if split.device.copies else None
    buffers = GradBuffers(split.comm.rank, policy.grad_dtype, split.device)
    planner = PlacementPlanner(
        policy,
        split.flats,
        buffers,
        ledger_owner=id(owner),
        default_bytes=split.resources.default_bytes,
        transit_bytes=functools.partial(_transit_bytes, split, buffers),
    )
    # The ledger counts for the whole process: a failed offload must release the model's bytes.
    undo.callback(planner.close)
    # A budget that is too small raises here, before any file is created.
    plan = planner.first()
    # Before anything is allocated. After this round ranks measure the drives that they share.
    shards = sum(flat.layout.shard_bytes for flat in split.flats)
    initializing, running = _overhead_bytes(split, source, in_parts=in_parts)
    split.resources.check_memory(
        plan,
        # Pools, and parameters that stay in RAM: allocated while the model still has its values.
        begun_bytes=plan.pool_bytes + plan.sums_bytes + min(plan.resident_bytes, shards),
        initializing_bytes=initializing,
        running_bytes=running,
        freed_bytes=_freed_bytes(split.params),
    )
    storage = Storage(
        policy,
        plan,
        seam,
        undo,
        device=split.device,
        node_resources=split.resources,
        alarm=alarm,
        rank=split.comm.rank,
        world=split.comm.world,
        check=split.comm.check_stuck,
    )
    _create_chunks(split, storage, plan)
    return Tiers(planner, buffers, offload, storage)


def _read_alike(split: Split, source: OpenSource) -> str:
    """Describe the source's files and the flats that they initialize; empty without files. If the
    descriptions of all ranks are equal, each rank may read a part, and values need not be compared.
    """
    place = place_of(source.files)
    flats = [
        (
            flat.dtype,
            flat.trainable,
            [(param.keys, param.shape, param.offset) for param in flat.params],
        )
        for flat in split.flats
    ]
    return place and f"{place} {xxhash.xxh3_128_hexdigest(repr(flats).encode())}"


def _overhead_bytes(split: Split, source: OpenSource, *, in_parts: bool) -> tuple[int, int]:
    """Return the host overhead of this rank outside of its plan: during initialization, and in a
    step. Saves are not counted: `inf.save` checks the memory that it needs."""
    policy = split.policy
    layouts = [flat.layout for flat in split.flats]
    chunks = sum(len(layout.chunks) for layout in layouts)
    synced = split.ranks.syncs_states and not in_parts
    scatters = synced and split.comm.rank == 0
    held = host_overhead.held_bytes(chunks, len(split.units), policy.generations)
    passing = host_overhead.passing_bytes(
        chunks,
        all_at_once=not policy.consumes_grads,
        durable=bool(policy.durable),
        drives=len(policy.directories),
        fill=host_overhead.fill_bytes(
            max((each.shard_bytes for each in layouts), default=0),
            scattered=scatters * max((each.size_bytes for each in layouts), default=0),
            converting=source.converting_bytes,
        ),
    )
    return held + passing["fill"], held + passing["step"]


def _freed_bytes(params: Sequence[Param]) -> int:
    """Return the bytes of RAM of the model's values that are freed once the values are at rest."""
    held = (param.sites[0][0]._parameters[param.sites[0][1]] for param in params)
    size = sum(value.nbytes for value in held if value is not None and value.device.type == "cpu")
    # Values mapped from files count as free memory already.
    own = psutil.Process().memory_info()
    return min(size, int(own.rss - own.shared))


def _create_chunks(split: Split, storage: Storage, plan: PlacementPlan) -> None:
    """Reserve places for all chunks, without values. The places have space for the states of a
    later optimizer. If the drives are too small for that, they have space for the parameters alone,
    which inference needs.

    Raises: SwapFullError.
    """
    try:
        storage.store.create(split.flats, plan.nvme_masks, plan.formats)
    except SwapFullError as error:
        # Another rank may have found space: only an error of all ranks may be ignored.
        if split.comm.world > 1 and not isinstance(error, NoRoomError):
            raise
        log.warning("the drives lack space for training with this policy: %s", error)
        if storage.run is not None:
            # The failed reservation has truncated the files, and lost values initialized in them.
            storage.run.journal.forget()
        storage.store.create(split.flats, plan.nvme_masks)


def _transit_bytes(split: Split, buffers: GradBuffers) -> int:
    """Return the bytes of pinned memory through which gradients reach accumulators or updates.
    The result grows when parameters are unfrozen.
    """
    sizes, copies = grad_sizes(split.units, buffers.dtype), split.device.copies
    of_windows = windows_bytes(split.policy, sizes, copies=copies)
    return of_windows + split.ranks.transit_bytes(split.flats, buffers.dtype, copies=copies)


def initialize_tiers(
    split: Split,
    tiers: Tiers,
    source: OpenSource,
    heap: Heap,
    rollback: Rollback,
    *,
    in_parts: bool,
) -> None:
    """Write the model's values to their tiers, unit by unit, and load its buffers. Blocks;
    collective.

    in_parts: each rank reads a part of the same files. Raises: PeerFailed, ValueError, AioError.
    """
    # Ranks that read the same files have the same values already.
    synced = split.ranks.syncs_states and not in_parts
    way = _way(in_parts=in_parts, synced=synced)
    writer = _InitialWriter(split, tiers, heap, source, way=way)
    with contextlib.closing(writer):
        for unit in split.units:
            flats = [flat for flat in unit.flats if not writer.is_written(flat)]
            if synced:
                _write_from_rank_0(split, unit, flats, writer)
            for flat in () if synced else flats:
                writer.store(flat)
            # An initialization takes long: the error of one rank stops all ranks here.
            split.resources.check_peers()
        writer.end()
    source.fill_buffers(split.device.torch_device, rollback.keep)
    # From here on the error of a rank is reported by collectives, no longer by the rendezvous.
    split.resources.end_rendezvous()
    # Each rank stores a part: with different values the result would be a mixture of models.
    split.ranks.check_values()


def sync_buffers(split: Split, model: torch.nn.Module, rollback: Rollback) -> ModuleBuffers:
    """Give all ranks the buffers of rank 0, if the policy asks for it. Blocks; collective."""
    policy = split.policy
    buffers = ModuleBuffers(model, split.comm, follow=policy.broadcast_buffers)
    if policy.sync_module_states or policy.broadcast_buffers:
        buffers.broadcast(rollback.keep)
    return buffers


def _way(*, in_parts: bool, synced: bool) -> str:
    """Name how a rank reads values. A resumed initialization must read them in the same way."""
    return "parts" if in_parts else "rank 0" if synced else "parameters"


def _write_from_rank_0(
    split: Split, unit: Unit, lacking: Sequence[Flat], writer: _InitialWriter
) -> None:
    """Write the missing flats of a unit with values that rank 0 reads. Blocks; collective."""
    # Another rank may have initialized other flats before an interruption.
    wanted = split.comm.all_reduce_any([flat in lacking for flat in unit.flats])
    for flat, is_wanted in zip(unit.flats, wanted, strict=True):
        if is_wanted:
            writer.scatter(flat)


@dataclasses.dataclass
class _Write:
    """A flat whose writes are in flight. values: the tensor that is written; None if `PieceWriter`
    holds the values. digest: of the whole flat's values, if ranks compare them."""

    flat: Flat
    digest: int
    values: torch.Tensor | None
    tickets: list[Ticket]


class _InitialWriter:
    """Writer of initial values: writes flats while it reads the next one from the source. way: see
    `_way`."""

    def __init__(
        self,
        split: Split,
        tiers: Tiers,
        heap: Heap,
        source: OpenSource,
        *,
        way: str,
    ) -> None:
        self._split, self._tiers, self._heap, self._source = split, tiers, heap, source
        self._pieces = PieceWriter(tiers.store, split.flats)
        storage = tiers.storage
        # Digests are of whole flats, so each rank reads the other ranks' shards, too.
        self._compares = way == "parameters" and split.comm.world > 1
        # The files of a durable run outlive the process, so its initialization may be resumed.
        self._run = None
        if storage.run is not None:
            self._run = Initialization(
                storage.run,
                tiers.store,
                split.flats,
                sources=source.files,
                shares=storage.shares,
                way=way,
            )
        self._under_way: deque[_Write] = deque()  # oldest first
        total = sum(flat.layout.shard_bytes for flat in split.flats)
        self._line = ProgressLine("loading parameters", total, shown=split.comm.rank == 0)

    def is_written(self, flat: Flat) -> bool:
        """Return whether an interrupted initialization has written this rank's shard of a flat."""
        found = self._run.resumed(flat) if self._run is not None else None
        if found is None:
            return False
        if self._compares:
            self._split.ranks.note_digest(flat, found)
        self._line.advance(flat.layout.shard_bytes)
        return True

    def store(self, flat: Flat) -> None:
        """Read this rank's shard of a flat and start writing it, piece by piece. Blocks until the
        shard is read. Raises: AioError; errors of the source."""
        # A durable run's journal lists only written flats, so few may be in flight.
        self._settle(FLATS_UNDER_WAY if self._run is None else 1)
        size, rank = flat.layout.shard_numel, self._split.comm.rank
        shards = range(self._split.comm.world) if self._compares else (rank,)
        digests: list[xxhash.xxh3_64] | None = [] if self._compares else None
        values = FlatValues(
            flat, self._source, shards[0] * size, (shards[-1] + 1) * size, digests=digests
        )
        write = _Write(flat, 0, None, [])
        try:
            for index, shard in enumerate(shards):
                tickets = write.tickets if shard == rank else None
                self._pieces.pass_through(flat, values.fill, index * size, tickets)
        except AioError:
            # If a write failed, `_settle` or `_await` raises an error that names its unit.
            # Otherwise the error is the source's, and is raised unchanged.
            self._settle()
            self._await(write)
            raise
        # Whole weights of a source have many sizes, and fragment the heap.
        self._heap.freed()
        if digests is not None:
            write.digest = self._split.ranks.note(flat, digests)
        # Appended last: an interrupted flat must not count as written.
        self._under_way.append(write)
        self._line.advance(flat.layout.shard_bytes)

    def scatter(self, flat: Flat) -> None:
        """Start writing this rank's shard of a flat, which rank 0 reads as a whole. Blocks until
        the flat before is written. Collective. Raises: AioError, PeerFailed; errors of the source.
        """
        values = None
        if self._split.comm.rank == 0:
            values = torch.empty(flat.layout.numel, dtype=flat.dtype)
            FlatValues(flat, self._source).fill(0, values)
        # Rank 0 does not scatter a flat that it has failed to read.
        self._split.resources.check_peers()
        shard = self._split.ranks.scatter(flat, values)
        del values
        self._settle()
        # Flats have many sizes, and fragment the heap.
        self._heap.freed()
        ticket = self._tiers.store.store(flat, 0, shard.data_ptr())
        self._under_way.append(_Write(flat, 0, shard, [ticket]))
        self._line.advance(shard.nbytes)

    def end(self) -> None:
        """Block until everything is written. Raises: AioError."""
        self._settle()
        if self._run is not None:
            self._run.end()

    def _settle(self, count: int = 0) -> None:
        """Block until all flats but the last `count` are written. Raises: AioError that names the
        unit."""
        while len(self._under_way) > count:
            write = self._under_way[0]
            try:
                self._await(write)
            except AioError:
                self._under_way.popleft()
                raise
            # After the wait: an interrupt must not free values that a write still reads.
            self._under_way.popleft()
            flat, digest = write.flat, write.digest
            del write
            if self._run is not None:
                self._run.wrote(flat, digest)

    @staticmethod
    def _await(write: _Write) -> None:
        """Block until a flat is written. Raises: AioError that names its unit."""
        try:
            for ticket in write.tickets:
                ticket.wait()
        except AioError as error:
            text = (
                f"parameters of {write.flat.unit.name} cannot be written: {error}. The model is "
                "unchanged: free space on the drive, or name another drive in Policy.nvme, and "
                "offload the model again"
            )
            error.args = (text,)
            raise

    def close(self) -> None:
        """Block until no write is in flight, whether the writes fail or not."""
        self._line.end()
        while self._under_way:
            with contextlib.suppress(AioError):
                self._settle()
        self._pieces.close()
        if self._run is not None:
            self._run.close()


def start_progress(tiers: Tiers, timeline: Timeline) -> Progress:
    """Make the trackers of passes, order and waits, and start the clock of phases."""
    executor, store, waits = tiers.executor, tiers.store, LoopWaits()

    def marks() -> Marks:
        grads = store.grads_read_bytes, store.grads_written_bytes
        return Marks.of(executor.stats(), store.params_read_bytes, waits.total_s, grads)

    clock = PhaseClock(timeline, marks, tiers.storage.activations_moved)
    return Progress(PassTracker(), Schedule(), clock, waits)


def choose_mode(split: Split, tiers: Tiers, progress: Progress, alarm: Alarm) -> UpdateMode:
    """Return the update mode of the policy. Raises: ValueError if the device does not support it.
    """
    policy, device = split.policy, split.device
    if policy.update_on == "device":
        if not device.copies:
            raise ValueError(
                "update_on='device' needs a model that computes on a GPU, and this one computes on "
                "the CPU; use update_on='cpu'"
            )
        device.check_host_pointers()
        return DeviceUpdate(store=tiers.store, executor=tiers.executor, device=device)
    if policy.delays:
        return DelayedUpdate(
            split.units,
            store=tiers.store,
            rank=split.comm.rank,
            grad_dtype=policy.grad_dtype,
            device=device,
            warmup=policy.delayed_warmup,
        )
    if policy.speculates:
        return SpeculativeUpdate(device=device, passes=progress.passes, alarm=alarm)
    if policy.consumes_grads:
        return BackwardUpdate(
            split.units,
            device=device,
            passes=progress.passes,
            dtype_of=tiers.buffers.dtype,
            on_nonfinite=policy.on_nonfinite,
        )
    return UpdateMode()


def build_grads(core: Core) -> Grads:
    """Build the path of gradients from autograd to their accumulators."""
    split, tiers, undo = core.split, core.tiers, core.undo
    comm, ranks = split.comm, split.ranks
    registry = GradRegistry(
        comm.all_gather_floats if comm.world > 1 else None,
        grad_offload=tiers.offload,
    )
    if tiers.offload is not None:
        undo.callback(tiers.offload.close)
    # The user may hold accumulators after the engine has closed; their scratch memory is freed.
    undo.callback(registry.release)
    # Only flats that learn have gradients to reduce.
    learning = [flat for flat in split.flats if flat.learns]
    reducer = GradReducer(
        split.units,
        buffers=tiers.buffers,
        registry=registry,
        comm=comm,
        mode=core.mode,
        reduce_scatter=ranks.reduce_scatter(
            learning, tiers.buffers, split.device, tiers.offload, undo
        ),
        unreduced=ranks.unreduced_grads(learning, tiers.buffers, split.device, tiers.offload, undo),
        order=ReduceOrder(split.units) if ranks.in_any_order else None,
        grad_offload=tiers.offload,
        timeline=core.timeline,
    )
    return Grads(registry, reducer)


def build_unsharder(core: Core, grads: Grads, buffers: ModuleBuffers) -> Unsharder:
    """Build the unsharder, which gathers and evicts units."""
    split = core.split
    return Unsharder(
        split.units,
        store=core.tiers.store,
        executor=core.tiers.executor,
        gradients=grads.reducer,
        progress=core.progress,
        device=split.device,
        comm=split.comm,
        mode=core.mode,
        access=core.access,
        alarm=core.alarm,
        heap=core.heap,
        passes=split.passes,
        timeline=core.timeline,
        buffers=buffers,
        in_any_order=split.ranks.in_any_order,
        qwz=split.policy.qwz,
        secondary=split.ranks.secondary_shards(split.units, split.device),
    )


def build_repair(policy: Policy, tiers: Tiers, rank: int) -> ChunkRepair:
    """Build the repair of chunks that cannot be read from their drive."""
    advice = "Start again from the last save"
    if policy.durable:
        word = "from-older" if policy.older_commits else "report"
        advice = f"Start again, with inf.restore(..., damaged={word!r}) of this durable run"
    if policy.damaged == "raise":
        advice += "; Policy(damaged='from-older') continues with older states if they exist"
    return ChunkRepair(
        tiers.store,
        tiers.executor,
        rank=rank,
        takes_older=policy.damaged == "from-older",
        # With sampled verification, this many reads verify a whole chunk.
        reads=VERIFY_STRIDE if policy.verify == "sample" else 1,
        advice=advice,
    )


def build_pipeline(core: Core, grads: Grads, unsharder: Unsharder) -> StepPipeline:
    """Build the step pipeline; with two generations each step is a transaction."""
    split, tiers = core.split, core.tiers
    transaction = None
    # Two places for each chunk: a step writes one, and the other retains the last commit.
    if split.policy.generations > 1:
        transaction = Transaction(
            split.units,
            store=tiers.store,
            executor=tiers.executor,
            unsharder=unsharder,
            repair=build_repair(split.policy, tiers, split.comm.rank),
        )
    return StepPipeline(
        split.units,
        store=tiers.store,
        executor=tiers.executor,
        unsharder=unsharder,
        gradients=grads.reducer,
        progress=core.progress,
        device=split.device,
        comm=split.comm,
        mode=core.mode,
        transaction=transaction,
        alarm=core.alarm,
        heap=core.heap,
        watch=tiers.storage,
        in_any_order=split.ranks.in_any_order,
    )


def build_optimizer(
    core: Core, grads: Grads, unsharder: Unsharder, whole: WholeParams
) -> OptimizerParts:
    """Build the step, the registry of optimizers, and access to states between steps. Attaches the
    mode and the access checks.
    """
    split, tiers, mode, access = core.split, core.tiers, core.mode, core.access
    pipeline = build_pipeline(core, grads, unsharder)
    registry = OptimizerRegistry(
        split.policy,
        split.flats,
        planner=tiers.planner,
        store=tiers.store,
        executor=tiers.executor,
        gradients=tiers.buffers,
        grad_registry=grads.registry,
        reducer=grads.reducer,
        pipeline=pipeline,
        mode=mode,
        rank=split.comm.rank,
        check_open=access.check_open,
        open_rendezvous=split.resources.open_rendezvous,
    )
    # Mode and pipeline call each other.
    mode.attach(
        ModeParts(
            pipeline, unsharder, grads.reducer, registry.optimizer_of, registry.make_gradients
        )
    )
    # Pushed after the collaborators, so that the mode closes before them.
    core.undo.callback(mode.close)
    # The jobs of flats without an optimizer. The registry prepares jobs again for each optimizer.
    pipeline.prepare_jobs(split.flats)
    states = States(
        tiers.store,
        unsharder,
        grads.reducer,
        split.comm,
        delayed_params=mode.delayed_params,
        wait=access.before_write,
    )
    saving = Saver(
        states,
        units=split.units,
        executor=tiers.executor,
        comm=split.comm,
        policy=split.policy,
        optimizer_of=registry.optimizer_of,
        mode=mode,
        drives=tiers.storage.drives,
        alarm=core.alarm,
    )
    # Each gather raises the faults of updates and saves, which are built after the unsharder.
    access.attach(Background(pipeline, saving, whole, registry))
    return OptimizerParts(pipeline, registry, states, saving)


def open_durable_run(
    tiers: Tiers,
    optimizer: OptimizerParts,
    model: torch.nn.Module,
    owner: EngineHandle,
    undo: contextlib.ExitStack,
) -> DurableRun | None:
    """Open the durable run to which the swap files belong; None if the policy is not durable."""
    run, space = tiers.storage.run, tiers.storage.space
    if run is None or space is None:
        return None
    pipeline = optimizer.pipeline
    assert pipeline.transaction is not None, "Policy sees to it that there are two generations"
    durable = DurableRun(run, space, model, optimizer.saving, pipeline, extra=lambda: owner.extra)
    undo.callback(durable.close)
    # Commits go through the run, which reads the steps that the pipeline counts.
    pipeline.transaction.attach(durable)
    return durable


def build_hooks(
    core: Core,
    grads: Grads,
    unsharder: Unsharder,
    whole: WholeParams,
    model: torch.nn.Module,
    owner: EngineHandle,
    rollback: Rollback,
) -> Lifecycle:
    """Turn the model's parameters into sharded parameters, and install the hooks by which torch
    calls the engine.
    """
    split, activations = core.split, core.tiers.storage.open_activations
    # Hooks and activations share one stack: both need to know which module runs.
    frames = FrameStack()
    lifecycle = Lifecycle(
        model,
        split.units,
        unsharder,
        grads.reducer,
        core.progress.passes,
        whole=whole,
        tier=split.policy.params,
        check_state_dict=owner.check_state_dict,
        activations=activations(model, split.units, core.timeline, frames, core.undo),
        frames=frames,
        rollback=rollback,
    )
    if is_microbatched(model):
        set_grad_dtypes(split.flats, grads.reducer.dtype)
    return lifecycle


def set_grad_dtypes(flats: Iterable[Flat], dtype: Callable[[Flat], torch.dtype]) -> None:
    """Make autograd sum the gradients of micro-batches in the accumulators' dtype, as the
    accumulators do in a loop over micro-batches."""
    for flat in flats:
        for param in flat.params if dtype(flat) is not flat.dtype else ():
            param.gathered.grad_dtype = dtype(flat)
