"""Storage of a model's states: swap files, the executor with its pools, and the state store.
`Storage` opens and closes them together.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from infinity._src.base.alarm import Alarm
from infinity._src.base.telemetry import PURPOSES, NativeSpans, Timeline
from infinity._src.cabi.records import KIND_AHEAD
from infinity._src.checkpoint.durable.files import RunFiles
from infinity._src.config.policy import Policy
from infinity._src.engine.node_resources import NodeResources
from infinity._src.hooks.activation_offload import ActivationFigures, Activations
from infinity._src.hooks.activation_store import HostActivationStore, NvmeActivationStore
from infinity._src.hooks.forward import FrameStack
from infinity._src.memory import numa
from infinity._src.memory.device import Device
from infinity._src.memory.drive_health import Drives
from infinity._src.memory.ram_budget import PlacementPlan
from infinity._src.memory.roofline import update_threads
from infinity._src.memory.swap_space import SwapSpace, choose_shares
from infinity._src.params.state_store import StateStore
from infinity._src.params.unit import Flat, Unit
from infinity.aio import (
    SPAN,
    Executor,
    ExecutorStats,
    Format,
    JobKind,
    PoolSpec,
    Priority,
    Seam,
    SwapFile,
    open_executor,
)
from infinity.aio._endurance import Endurance

OBSERVE_S = 15.0
"""Seconds between two observations of the executor's counters within a step. The executor retains
the last 64 seconds."""


def check_activations(policy: Policy, device: Device) -> None:
    """Raise ValueError when the policy moves activations to the CPU, and the CPU computes."""
    if policy.activations == "cpu" and not device.copies:
        raise ValueError(
            f"activations={policy.activations!r} moves activations to CPU memory, but this model "
            "computes on the CPU: they are in CPU memory already. Use 'nvme' or 'device'"
        )


def default_update_threads(ranks: int, *, on_gpu: bool) -> int:
    """Return the default of `Policy.update_threads` for one of `ranks` ranks on this machine."""
    cpus = os.sched_getaffinity(0)
    # A launcher that binds each rank to cores has divided them already.
    bound = len(cpus) * ranks <= (os.cpu_count() or 1)
    return update_threads(len(cpus), numa.core_count(cpus), 1 if bound else ranks, on_gpu=on_gpu)


def _open_space(
    policy: Policy,
    seam: Seam | None,
    node_resources: NodeResources,
    run: RunFiles | None,
    world: int,
    undo: contextlib.ExitStack,
) -> SwapSpace | None:
    if not policy.directories:
        return None
    # Null drives write nothing, so their files take no space.
    null = seam is not None and seam.null > 0
    space = SwapSpace(
        policy.directories,
        room=None if null else node_resources.check_room,
        make_room=(lambda: run.release_older(world)) if run is not None else lambda: False,
        make=SwapFile.sparse if null else SwapFile.create,
    )
    undo.callback(space.close)
    return space


def _open_run(
    policy: Policy, rank: int, world: int, undo: contextlib.ExitStack
) -> RunFiles | None:
    if not policy.durable:
        return None
    run = RunFiles(policy.directories, rank, world, released=policy.durable == "new")
    undo.callback(run.close)
    return run


def _make_layers(run: RunFiles | None, space: SwapSpace | None) -> tuple[int, int]:
    """Make the layers of swap files for the two places of a chunk. A durable run adds two layers.
    Layer 0, the plain swap files, then has only values that need not outlive the process.
    """
    if run is None:
        return 0, 0
    assert space is not None, "Policy sees to it that there are directories"
    for _ in range(2):
        files = run.add()
        run.layers[space.add_layer(files)] = files
    return 1, 2


def _executor_options(
    policy: Policy,
    plan: PlacementPlan,
    space: SwapSpace | None,
    node_resources: NodeResources,
    *,
    on_gpu: bool,
) -> dict[str, Any]:
    settings = policy.io_settings
    return {
        "small": PoolSpec(plan.small_count, plan.small_bytes),
        "large": PoolSpec(plan.large_count, plan.large_bytes),
        "backend": policy.io_backend,
        "verify": policy.verify,
        "workers": policy.update_threads
        or default_update_threads(node_resources.ranks, on_gpu=on_gpu),
        "block_bytes": settings.block_bytes,
        "depth": node_resources.depths(space.files) if space is not None else settings.depth,
    }


def _add_layers(executor: Executor, run: RunFiles, layers: tuple[int, int]) -> None:
    """Give the executor the files of a durable run's layers."""
    for layer in layers:
        for drive, file in enumerate(run.layers[layer]):
            added = executor.add_file(drive, file)
            # Chunk records name the layer by this number.
            assert added == layer, "a layer's number is that of its files in the executor"


class Storage:
    """Executor, state store, and the forecast of the drives' endurance. `undo` receives the calls
    that close them. check: called by every wait of the executor; see `open_executor`.
    """

    def __init__(
        self,
        policy: Policy,
        plan: PlacementPlan,
        seam: Seam | None,
        undo: contextlib.ExitStack,
        *,
        device: Device,
        node_resources: NodeResources,
        alarm: Alarm,
        rank: int = 0,
        world: int = 1,
        check: Callable[[], None] | None = None,
    ) -> None:
        # First: from here on memory is allocated on the NUMA node of the device.
        numa.bind(device.torch_device, number=node_resources.number, ranks=node_resources.ranks)
        self._device = device
        # Pushed first, so called last: the executor must be closed before the device.
        undo.callback(device.close)
        settings = policy.io_settings
        self.run = _open_run(policy, rank, world, undo)
        space = _open_space(policy, seam, node_resources, self.run, world, undo)
        layers = _make_layers(self.run, space)
        # After `_open_space`, which fails if a directory does not exist.
        self.drives = Drives(policy.directories, alarm)
        if space is not None:
            # A resumed initialization has chunks on the drives already, so it keeps their shares.
            # Otherwise faster drives get larger shares, so that all drives finish together.
            begun = self.run.journal.started if self.run is not None else None
            self.shares = tuple(begun["shares"]) if begun is not None else choose_shares(
                space.files, bandwidths=settings.bandwidths, backend=policy.io_backend, seam=seam
            )
            space.shares = self.shares
        else:
            self.shares = ()
        self.space = space
        self._policy = policy
        self._activations: Activations | None = None
        self._activation_store: NvmeActivationStore | HostActivationStore | None = None
        self.executor: Executor = open_executor(
            space.files if space is not None else [],
            **_executor_options(policy, plan, space, node_resources, on_gpu=device.copies),
            seam=seam,
            check=check,
            examine=self.drives.examine,
            alarm=alarm,
        )
        # Pushed at once: an error below must not leave threads running.
        undo.callback(self.executor.close, wait=False)
        device.attach(self.executor)
        self.executor.spans(True)
        if self.run is not None:
            _add_layers(self.executor, self.run, layers)
        self.store = StateStore(
            self.executor,
            space,
            sums_on=policy.verify != "off",
            generations=policy.places,
            layers=layers,
            device=device,
            shown=rank == 0,
            before_write=self.run.journal.before_write if self.run is not None else lambda: None,
            remember_bad=self.run.remember_bad if self.run is not None else None,
        )
        undo.callback(self.store.close)
        # Called before `store.close` frees memory: an interrupt may have left jobs in flight.
        undo.callback(self.executor.close, wait=False)
        self.endurance = Endurance()
        self._steps = 0
        self._observed_s = time.monotonic()

    def open_activations(
        self,
        model: torch.nn.Module,
        units: Sequence[Unit],
        timeline: Timeline,
        frames: FrameStack,
        undo: contextlib.ExitStack,
    ) -> Activations | None:
        """Open the store of the model's boundary activations; None where they stay on the device.

        Raises: ValueError when this release of torch holds the inputs of checkpoints in an unknown
        way.
        """
        if self._policy.activations == "device":
            return None
        if self._policy.activations == "cpu":
            self._activation_store = HostActivationStore(self._device)
            undo.callback(self._activation_store.close)
        else:
            assert self.space is not None, "Policy sees to it that there are directories"
            sums_on = self._policy.verify != "off"
            self._activation_store = NvmeActivationStore(
                self.executor, self.space, sums_on=sums_on, device=self._device
            )
        self._activations = Activations(
            self._activation_store, model, units, timeline, self._device.torch_device, frames=frames
        )
        # Closed before the store: `undo` runs in reverse.
        undo.callback(self._activations.close)
        return self._activations

    def activation_figures(self) -> ActivationFigures:
        return self._activations.figures() if self._activations is not None else ActivationFigures()

    def activations_moved(self) -> tuple[int, int]:
        """Return the bytes of activations read from the drives, and written to them, including
        transfers in flight.
        """
        # Copies to CPU memory touch no drive.
        if not isinstance(self._activation_store, NvmeActivationStore):
            return 0, 0
        return self._activation_store.fetched_bytes, self._activation_store.stored_bytes

    def frozen_bytes(self, flats: Iterable[Flat]) -> int:
        """Return the bytes on the drives of parameters without an optimizer."""
        total = 0
        for flat in flats:
            shard = self.store[flat]
            if shard.format is Format.RAW:
                on_nvme = shard.records["section_at"][:, 0] >= 0
                total += int(shard.records["numel"][on_nvme].sum()) * shard.sections[0].itemsize
        return total

    def take_spans(self, units: Sequence[Unit]) -> NativeSpans:
        """Return the executor's spans since the last call, the newest 65,536 at most, each with its
        unit and purpose.
        """
        spans = self.executor.take_spans()
        owners = self.store.units_of_chunks()
        chunks = spans["chunk"]
        # Chunks of activations, and chunks that were dropped since, belong to no unit.
        known = (chunks >= 0) & (chunks < len(owners))
        found = np.full(len(spans), -1, dtype=np.int32)
        found[known] = owners[chunks[known]]
        return NativeSpans(spans, found, purposes_of(spans, found), [each.name for each in units])

    def step_begins(self, steps: int) -> None:
        """Note that the forwards and backwards of a training step have ended, and its update
        begins. steps: number of steps before this one.
        """
        if self._activations is not None:
            self._activations.step_ended()
        # Once per step: `endurance` forecasts the bytes that a step writes.
        self.observe(steps)

    def observe(self, steps: int) -> ExecutorStats:
        """Return the executor's counters, and let `endurance` observe them. steps: optimizer steps
        so far."""
        self._steps = steps
        self._observed_s = time.monotonic()
        stats = self.executor.stats()
        self.endurance.observe(stats, steps=steps)
        return stats

    def observe_sometimes(self) -> None:
        """Call `observe` if the last call was more than `OBSERVE_S` ago. Called during a step,
        which may take minutes."""
        if time.monotonic() - self._observed_s > OBSERVE_S:
            self.observe(self._steps)


def purposes_of(spans: npt.NDArray[np.void], units: npt.NDArray[np.int32]) -> npt.NDArray[np.int8]:
    """Return the purpose of each span (`aio.SPAN`) by its job: int8 [n], indices in
    `telemetry.PURPOSES`. units: the unit of each span's chunk, -1 for none.
    """
    assert spans.dtype == SPAN, spans.dtype
    kind, of_unit, param = spans["kind"], units >= 0, spans["mask"] & 1 != 0
    fetch, store = kind == JobKind.FETCH, kind == JobKind.STORE
    saved = fetch & (spans["priority"] == Priority.WRITEBACK)
    # The first rule that matches a span gives its purpose.
    rules = {
        "update": np.isin(kind, (JobKind.UPDATE, JobKind.REWRITE, KIND_AHEAD)),
        "copy": kind == JobKind.COPY,
        "activation": (fetch | store) & ~of_unit,
        "save": saved,
        "gather": fetch & param,
        # A state store moves one section at a time; without a parameter it is a spilled gradient.
        "gradient": (fetch | store) & ~param,
    }
    chosen = np.select(
        list(rules.values()), [PURPOSES.index(name) for name in rules], PURPOSES.index("other")
    )
    return chosen.astype(np.int8)
