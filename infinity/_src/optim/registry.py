"""Which optimizer holds which parameters, and what that gives them: states in a format, a place, memory for gradients.

    optimizer built -> hold(optimizer, params): check -> format of each flat -> plan -> convert what rests -> gradient memory

A flat rests in one format, so its parameters keep the same number of moments, whoever holds them.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

from infinity._src.config import Policy
from infinity._src.grads.buffers import GradBuffers
from infinity._src.grads.slot import GradRegistry
from infinity._src.memory.planner import PlacementPlanner
from infinity._src.optim.step import StepPipeline
from infinity._src.optim.step_consensus import told_of_holding
from infinity._src.optim.update_mode import UpdateMode
from infinity._src.params.state_store import StateStore
from infinity._src.params.unit import Flat, Param
from infinity._src.params.unshard import Unsharder
from infinity.aio import Executor, Format


class OptimizerRegistry:
    """The optimizers of one model's parameters. One thread uses it at a time.

    check_open: raises when nothing can be held any more. together: see
    `infinity._src.memory.node_resources`: several ranks hold alike, and what one of them cannot do, none does.
    """

    def __init__(
        self,
        policy: Policy,
        flats: Sequence[Flat],
        *,
        placing: PlacementPlanner,
        rest: StateStore,
        executor: Executor,
        gradients: GradBuffers,
        book: GradRegistry,
        unsharder: Unsharder,
        pipeline: StepPipeline,
        mode: UpdateMode,
        rank: int,
        check_open: Callable[[], None],
        together: Callable[..., AbstractContextManager[Callable[[], None]]],
    ) -> None:
        self._policy = policy
        self._flats = list(flats)
        self._placing = placing
        self._rest = rest
        self._executor = executor
        self._gradients = gradients
        self._book = book
        self._unsharder = unsharder
        self._pipeline = pipeline
        self._mode = mode
        self._rank = rank
        self._check_open = check_open
        self._together = together
        self._holders: dict[Param, weakref.ref[Any]] = {}
        self._formats: dict[Flat, Format] = {}  # of flats that an optimizer holds, or held
        self._has_gradient_memory = False

    def holder_of(self, param: Param) -> Any:
        """The optimizer that holds a parameter, or None."""
        found = self._holders.get(param)
        return found() if found is not None else None

    def hold(self, optimizer: Any, params: list[Param]) -> None:
        """Give parameters the states that `optimizer.moments_of` names. Blocks while they are written. Collective.

        Raises: ValueError when another optimizer holds one, when its dtype has no state format or that of its unit is another, or
        when other ranks hold others; BudgetError; SwapFullError; AioError; MemoryError; PeerFailed. Then the optimizer holds none
        of them, and training goes on as before (what moved already, and memory that was made, stays and is counted).
        """
        with self._together("building an optimizer", told_of_holding(optimizer, params)) as agree:
            self._check_open()
            self._check(optimizer, params)
            formats = self._formats_with(optimizer, params)
            with self._replacing():
                self._formats = formats
                self._placing.scratch_bytes = max(self._placing.scratch_bytes, optimizer.scratch_bytes(formats))
                self._place()
                for param in params:
                    if param in self._holders and self._holders[param]() is not optimizer:
                        # Its optimizer is gone; a new one starts with masters and moments of its own.
                        start, _, numel = param.flat.layout.shard_range(param.slot_index, self._rank)
                        self._rest.forget(param.flat, start, numel)
                self._make_memory()
                agree()
        holders_before = dict(self._holders)
        self._holders.update((param, weakref.ref(optimizer)) for param in params)
        try:
            self._rebind_gradients()
        except BaseException:
            self._holders = holders_before  # the states and their places stay, and are nobody's
            raise
        if self._pipeline.transaction is not None:
            self._pipeline.transaction.replaced()

    def make_gradients(self) -> None:
        """update="backward" accumulates for the first time: make room for the gradients of all that is held. Blocks.
        Collective.

        Raises: BudgetError; SwapFullError; AioError; MemoryError; PeerFailed. Then all goes on without, and it may be called
        again.
        """
        with self._together("making room for gradients") as agree:
            self._check_open()
            with self._replacing():
                self._place()
                self._make_memory()
                agree()
        self._rebind_gradients()

    @contextlib.contextmanager
    def _replacing(self) -> Iterator[None]:
        """Inside, a new plan is put in force and carried out. If that breaks off, the plan before is in force again: what moved
        already stays where it is, with the values it had, and the ledger counts it; a later plan moves only the rest.
        """
        self._pipeline.wait()
        self._unsharder.gradients.flush_spilled()
        self._executor.wait_all()
        before, formats_before = self._placing.saved(), self._formats
        try:
            yield
        except BaseException:
            self._formats = formats_before
            made = self._gradients.size_bytes + self._mode.memory_bytes
            self._placing.restore(before, resident_bytes=self._rest.resident_bytes, gradient_bytes=made)
            raise
        finally:
            self._pipeline.plan(self._flats)  # what moved has other chunks, also where the rest did not

    def _check(self, optimizer: object, params: list[Param]) -> None:
        others = [holder() for holder in self._holders.values()]
        if self._policy.update == "delayed" and any(other not in (None, optimizer) for other in others):
            raise ValueError(
                "update='delayed' takes one optimizer for all parameters of a model: with two, the step of one would end the "
                "delay of the other; use parameter groups, or update='deferred'"
            )
        for param in params:
            if self.holder_of(param) not in (None, optimizer):
                raise ValueError(
                    f"{param.name} is held by another optimizer; give each parameter to one optimizer only"
                )
            if self._placing.state_format(param.flat) is Format.RAW:
                raise ValueError(
                    f"{param.name} is {param.dtype}; optimizer states are built for bfloat16, float16 and float32 parameters: "
                    "cast the model before inf.offload, or freeze the parameter"
                )

    def _formats_with(self, optimizer: Any, params: list[Param]) -> dict[Flat, Format]:
        """The formats of held flats when `optimizer` holds these parameters too. Raises: ValueError if two disagree."""
        formats, wanted = dict(self._formats), set(params)
        for flat in {param.flat: None for param in params}:
            kept: dict[int, Param] = {}
            for param in flat.params:
                holder = optimizer if param in wanted else self.holder_of(param)
                if holder is not None:
                    kept[len(holder.moments_of(param))] = param
            if len(kept) > 1:
                shown = " and ".join(f"{count} for {param.name}" for count, param in sorted(kept.items()))
                raise ValueError(
                    f"optimizers keep different numbers of moments in unit {flat.unit.name}: {shown}. Parameters of one unit and "
                    "dtype rest in one format: hold them by optimizers (or groups of SGD) with as many, or part them with "
                    "Policy(units=...)"
                )
            formats[flat] = self._placing.state_format(flat, next(iter(kept)))
        return formats

    @property
    def _held(self) -> list[Flat]:
        """The flats that rest with optimizer states."""
        return [flat for flat in self._flats if flat in self._formats]

    @property
    def _stores_gradients(self) -> bool:
        """Whether gradients have memory, or get it now. What has it keeps it: spilled ones lie in a section of their chunks."""
        return self._has_gradient_memory or self._mode.stores_gradients

    def _place(self) -> None:
        """Plan for optimizer states of what is held, and move what has to move."""
        formats = {flat: self._formats[flat] for flat in self._held}
        plan = self._placing.replan(formats, stores_gradients=self._stores_gradients)
        self._rest.convert(self._flats, plan.formats, plan.nvme_masks)

    def _make_memory(self) -> None:
        """Room for the gradients of what is held, as planned, in RAM or on NVMe; and for what the mode wants besides."""
        plan, spilled = self._placing.plan, self._placing.spilled
        self._mode.allocate(self._held, spilled)
        self._unsharder.gradients.allocate()
        if self._stores_gradients:
            self._gradients.allocate([flat for flat in self._held if flat not in spilled])
            # The last that may fail: from here on these flats must have the section.
            self._gradients.spill(spilled, self._rest, window_count=plan.window_count, window_bytes=plan.window_bytes)
            self._has_gradient_memory = True

    def _rebind_gradients(self) -> None:
        """Give the slots of what is held the memory that was made for them, with the values they have."""
        for flat in self._held:
            for param in flat.params:
                if param.grad is not None:
                    self._gradients.place_slot(param)
                elif param in self._holders:
                    self._unsharder.slot(param)
        self._book.reserve()
