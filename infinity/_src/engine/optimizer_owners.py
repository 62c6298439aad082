"""Registry of the optimizers: it maps each parameter to its optimizer, and makes the states and the
gradient memory that an optimizer needs.

    optimizer built -> register(optimizer, params)
                    -> check -> format of each flat -> plan -> convert states -> gradient memory

A flat rests in one format, so all its parameters have the same number of moments, even if several
optimizers own them.

A parameter that is frozen when an optimizer takes it has no states and no gradient memory. Once it
is unfrozen, its optimizer registers it before the next training forward, so that backward finds
memory for its gradient, and the update mode finds its states.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager

from infinity._src.config.policy import Policy
from infinity._src.engine.ram_planner import PlacementPlanner
from infinity._src.memory.ram_budget import idle_mask_of
from infinity._src.optim.base import Optimizer
from infinity._src.optim.step import StepPipeline
from infinity._src.optim.step_consensus import describe_registration
from infinity._src.optim.update_mode import UpdateMode
from infinity._src.params.accumulator import GradRegistry
from infinity._src.params.buffers import GradBuffers
from infinity._src.params.reduce import GradReducer
from infinity._src.params.state_store import StateStore
from infinity._src.params.unit import Flat, Param
from infinity.aio import Executor, Format, PoolSpec


class OptimizerRegistry:
    """The optimizers of one model's parameters. One thread uses it at a time.

    check_open: raises when no more optimizers can be registered. open_rendezvous: see
    `infinity._src.engine.node_resources`. All ranks register the same parameters, and when one rank
    fails, none registers.
    """

    def __init__(
        self,
        policy: Policy,
        flats: Sequence[Flat],
        *,
        planner: PlacementPlanner,
        store: StateStore,
        executor: Executor,
        gradients: GradBuffers,
        grad_registry: GradRegistry,
        reducer: GradReducer,
        pipeline: StepPipeline,
        mode: UpdateMode,
        rank: int,
        check_open: Callable[[], None],
        open_rendezvous: Callable[..., AbstractContextManager[Callable[[], None]]],
    ) -> None:
        self._policy = policy
        self._flats = list(flats)
        self._planner = planner
        self._store = store
        self._executor = executor
        self._gradients = gradients
        self._grad_registry = grad_registry
        self._reducer = reducer
        self._pipeline = pipeline
        self._mode = mode
        self._rank = rank
        self._check_open = check_open
        self._open_rendezvous = open_rendezvous
        # Weak: once the user drops an optimizer, another one may own its parameters.
        self._optimizers: dict[Param, weakref.ref[Optimizer]] = {}
        # Frozen parameters without states, with their optimizer; then the unfrozen ones of these.
        self._frozen: dict[Param, weakref.ref[Optimizer]] = {}
        self._unfrozen: dict[Param, None] = {}
        self._formats: dict[Flat, Format] = {}  # flats that an optimizer holds or held
        self._idle_masks: dict[Flat, int] = {}  # the same flats; see `FlatNeed`
        self._has_gradient_memory = False

    def optimizer_of(self, param: Param) -> Optimizer | None:
        found = self._optimizers.get(param)
        return found() if found is not None else None

    def register(self, optimizer: Optimizer, params: list[Param]) -> None:
        """Give parameters the states that `optimizer.moments_of` names. Blocks while they are
        written. Collective.

        Raises: ValueError when another optimizer owns one of them, when a dtype has no state
        format, when parameters of one unit and dtype differ in their number of moments, or when
        ranks register different parameters; BudgetError; SwapFullError; AioError; MemoryError;
        PeerFailed. After an error the optimizer owns none of them, and training continues as
        before. States that have moved stay at their new places, and memory that was allocated
        remains and is counted.
        """
        # Before the rendezvous: the wait may be a collective in which ranks agree on the end of a
        # step, and within the rendezvous a rank may have failed. The rendezvous reports a closed
        # engine.
        self._pipeline.wait()
        waited = any(param in self._frozen for param in params)
        with self._open_rendezvous(
            "unfreezing parameters" if waited else "building an optimizer",
            describe_registration(optimizer, params),
        ) as agree:
            # Within the rendezvous: if one rank has closed its engine, all ranks fail.
            self._check_open()
            self._check(optimizer, params)
            formats, idle_masks = self._formats_with(optimizer, params)
            with self._replanned():
                # Set first: `_move_states` plans with both. `_replanned` restores them on an error.
                self._formats, self._idle_masks = formats, idle_masks
                self._planner.scratch_bytes = max(
                    self._planner.scratch_bytes, optimizer.scratch_bytes(formats)
                )
                self._move_states()
                for param in params:
                    if param in self._optimizers and self._optimizers[param]() is not optimizer:
                        # The user has dropped the parameter's former optimizer: zero the low-order
                        # master bits and the moments for the new optimizer.
                        start, _, numel = param.flat.layout.shard_range(
                            param.param_index, self._rank
                        )
                        self._store.forget(param.flat, start, numel)
                self._allocate_gradients()
                # After this point no rank may fail, except in the rebinding.
                agree()
        optimizers_before = dict(self._optimizers)
        self._optimizers.update((param, weakref.ref(optimizer)) for param in params)
        try:
            # Accumulators still point into their old memory, which they keep alive.
            self._rebind_gradients()
            self._commit_places()
        except BaseException:
            # The states stay where they are, and no optimizer owns them.
            self._optimizers = optimizers_before
            raise
        for param in params:
            self._frozen.pop(param, None)

    def _commit_places(self) -> None:
        """Have a durable run commit the new places of chunks that its last manifest names. This
        also makes a run's first commit, so that a run killed before its first step can resume.
        """
        if self._pipeline.transaction is not None:
            learning = (p for flat in self._flats for p in flat.params if p.at_rest.requires_grad)
            complete = all(param in self._optimizers for param in learning)
            self._pipeline.transaction.states_moved(complete=complete)

    def await_unfreezing(self, optimizer: Optimizer, params: list[Param]) -> None:
        """Have `register_unfrozen` call `optimizer.make_states` for these frozen parameters once
        they are unfrozen."""
        self._frozen.update((param, weakref.ref(optimizer)) for param in params)

    def unfrozen(self, param: Param) -> None:
        if param in self._frozen:
            self._unfrozen[param] = None

    def register_unfrozen(self) -> None:
        """Register unfrozen parameters with the optimizers that wait for them. Blocks. Collective
        if there are any. Raises what `register` raises; the next call tries again.
        """
        by_holder: dict[Optimizer, list[Param]] = {}
        for param in self._unfrozen:
            # Since then a step may have made the states, or the loop may have frozen the parameter.
            holder = self._frozen[param]() if param in self._frozen else None
            if param.at_rest.requires_grad and holder is not None:
                by_holder.setdefault(holder, []).append(param)
        for optimizer, params in by_holder.items():
            optimizer.make_states(params)
        self._unfrozen.clear()

    def make_gradients(self) -> None:
        """Allocate memory for the gradients of all registered parameters: update="backward" does
        not need it before gradients accumulate. Blocks. Collective.

        Raises: BudgetError; SwapFullError; AioError; MemoryError; PeerFailed. After an error the
        engine continues without that memory, and this may be called again.
        """
        with self._open_rendezvous("allocating memory for gradients") as agree:
            self._check_open()
            with self._replanned():
                self._move_states()
                self._allocate_gradients()
                agree()
        self._rebind_gradients()

    @contextlib.contextmanager
    def _replanned(self) -> Iterator[None]:
        """Context in which a new plan is made and carried out. An error puts the former plan back
        in force.

        After an error, states that have moved stay at their new places, with the same values, and
        the ledger counts them. A later plan moves only the remaining states.
        """
        # Chunks move, so no update, write or read may be in flight.
        self._pipeline.wait()
        self._reducer.flush_spilled()
        # Also for prefetches, for which the pipeline does not wait.
        self._executor.wait_all()
        before, flats_before = self._planner.saved(), (self._formats, self._idle_masks)
        try:
            yield
        except BaseException:
            self._formats, self._idle_masks = flats_before
            made = self._gradients.size_bytes + self._mode.memory_bytes
            self._planner.restore(
                before, resident_bytes=self._store.resident_bytes, gradient_bytes=made
            )
            raise
        finally:
            # Also after an error: flats that were converted before the error have other chunks.
            self._pipeline.prepare_jobs(self._flats)

    def _check(self, optimizer: object, params: list[Param]) -> None:
        """Raise ValueError if a parameter has another optimizer, or a dtype without a state format.
        """
        others = [holder() for holder in self._optimizers.values()]
        if self._policy.delays and any(
            other not in (None, optimizer) for other in others
        ):
            raise ValueError(
                "update='delayed' takes one optimizer for all parameters of a model: with two, one "
                "optimizer's step would end the other's delay; use parameter groups, or "
                "update='deferred'"
            )
        for param in params:
            if self.optimizer_of(param) not in (None, optimizer):
                raise ValueError(
                    f"{param.name} is held by another optimizer; give each parameter to one "
                    "optimizer only"
                )
            if self._planner.state_format(param.flat) is Format.RAW:
                raise ValueError(
                    f"{param.name} is {param.dtype}; optimizer states are built for bfloat16, "
                    "float16 and float32 parameters: "
                    "cast the model before inf.offload, or freeze the parameter"
                )

    def _formats_with(
        self, optimizer: Optimizer, params: list[Param]
    ) -> tuple[dict[Flat, Format], dict[Flat, int]]:
        """Return the formats and the idle sections of registered flats when `optimizer` has these
        parameters too. Raises: ValueError if two formats disagree.
        """
        formats, idle_masks, wanted = dict(self._formats), dict(self._idle_masks), set(params)
        # A dict instead of a set: all ranks visit flats in the same order.
        for flat in {param.flat: None for param in params}:
            kept: dict[int, Param] = {}
            found: dict[int, Param] = {}
            numels: dict[int, int] = {}
            for param in flat.params:
                holder = optimizer if param in wanted else self.optimizer_of(param)
                if holder is None:
                    continue
                count = len(holder.moments_of(param))
                found[count] = param
                numels[count] = numels.get(count, 0) + param.numel
                if not holder.shares_format:
                    kept[count] = param
                if param not in wanted:
                    # Fewer moments than now (another optimizer was dropped) would lose its states.
                    found.setdefault(formats[flat].count, param)
            most = max(found)
            if kept and set(kept) != {most}:
                kept[most] = found[most]
                shown = " and ".join(
                    f"{count} for {param.name}" for count, param in sorted(kept.items())
                )
                raise ValueError(
                    f"optimizers keep different numbers of moments in unit {flat.unit.name}: "
                    f"{shown}. Parameters of one unit and dtype rest in one format: use optimizers "
                    "(or groups of SGD) with equally many moments, or separate them with "
                    "Policy(units=...)"
                )
            formats[flat] = self._planner.state_format(flat, most)
            idle_masks[flat] = idle_mask_of(formats[flat], numels)
        return formats, idle_masks

    @property
    def _registered(self) -> list[Flat]:
        return [flat for flat in self._flats if flat in self._formats]

    @property
    def _stores_gradients(self) -> bool:
        """True if gradients have memory, or need it now. Gradients never lose their memory:
        the chunks of spilled gradients retain the gradient section.
        """
        return self._has_gradient_memory or self._mode.stores_gradients

    def _move_states(self) -> None:
        """Plan for the optimizer states of all registered flats, and move the states whose place
        changes.
        """
        formats = {flat: self._formats[flat] for flat in self._registered}
        self._planner.idle_masks = self._idle_masks
        plan = self._planner.replan(
            formats,
            stores_gradients=self._stores_gradients,
            gradients_placed=self._has_gradient_memory,
        )
        if plan.pools != self._planner.pools:
            self._executor.resize_pools(
                PoolSpec(plan.small_count, plan.small_bytes),
                PoolSpec(plan.large_count, plan.large_bytes),
            )
            self._planner.pools_resized()
        self._store.convert(self._flats, plan.formats, plan.nvme_masks)

    def _allocate_gradients(self) -> None:
        """Allocate the planned space for the gradients of registered flats, in RAM or on NVMe, and
        the memory of the update mode.
        """
        plan, spilled = self._planner.plan, self._planner.spilled
        self._mode.allocate(self._registered, spilled)
        self._reducer.allocate()
        if self._stores_gradients:
            self._gradients.allocate([flat for flat in self._registered if flat not in spilled])
            # Last, since no call after it may fail: these flats now have the `grad` section.
            self._gradients.spill(spilled, self._store, staging_bytes=plan.staging_bytes)
            self._has_gradient_memory = True

    def _rebind_gradients(self) -> None:
        """Move the accumulators of registered flats, with their values, into the allocated memory.
        """
        for flat in self._registered:
            for param in flat.params:
                if param.grad is not None:
                    self._gradients.place_accumulator(param)
                elif param in self._optimizers:
                    self._reducer.accumulator(param)
        # Allocate the norms' scratch here, not in a step.
        self._grad_registry.reserve()
