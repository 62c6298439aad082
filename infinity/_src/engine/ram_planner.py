"""Placement of one model's states: builds the planner's input, reserves the budget, and holds the
plan in force.

    first plan    at offload, for later training: chooses pools and spilled gradients, once
    later plans   when an optimizer registers parameters: their formats, and memory for gradients

Pools are allocated and spilled gradients are chosen for all parameters that require a gradient when
the model is offloaded. If an optimizer owns fewer parameters, resident sections get the remaining
budget. If an optimizer owns more (unfrozen parameters), it may need larger pools, and the gradients
of the unfrozen parameters spill where the budget does not hold them.

`memory.ledger` has the process's budget; `memory.ram_budget` computes a plan within a budget.
`engine.storage` opens the executor with its pools; `params.ram_buffers` holds gradients.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch

from infinity._src.cabi.records import GradSection
from infinity._src.config.policy import Policy
from infinity._src.hooks.activation_store import CHUNK_BYTES
from infinity._src.memory.flat_layout import state_format
from infinity._src.memory.ledger import LEDGER, budget_bytes, describe_budget, describe_others
from infinity._src.memory.ram_budget import FlatNeed, PlacementPlan, StepLoad, plan_placement
from infinity._src.params.buffers import GradBuffers
from infinity._src.params.grad_norms import NORM_PIECE_NUMEL
from infinity._src.params.param_copies import DelayedParams
from infinity._src.params.unit import Flat
from infinity.aio import Format
from infinity.errors import BudgetError

log = logging.getLogger("infinity")

_GRADS = {
    torch.bfloat16: GradSection.BF16,
    torch.float32: GradSection.FP32,
    torch.float16: GradSection.FP16,
}


class SavedPlacement(NamedTuple):
    """Snapshot of a `PlacementPlanner`, for its `restore`."""

    plan: PlacementPlan
    spilled: frozenset[Flat] | None
    scratch_bytes: int
    transit_bytes: int


class PlacementPlanner:
    """Planner of one model's placement; `plan` is the one in force.

    ledger_owner: key of the model's entry in the RAM ledger.
    transit_bytes: returns the bytes of buffers between autograd and accumulators. The result grows
        when parameters are unfrozen.
    Arguments named `formats` have formats without a gradient section; `plan.formats` has the
    section for gradients that spill.
    """

    def __init__(
        self,
        policy: Policy,
        flats: Sequence[Flat],
        gradients: GradBuffers,
        *,
        ledger_owner: int,
        default_bytes: int,
        transit_bytes: Callable[[], int] = lambda: 0,
    ) -> None:
        self._policy = policy
        # A list: plans refer to a flat by its index.
        self._flats = list(flats)
        self._gradients = gradients
        self._transit_bytes = transit_bytes
        # The result of `transit_bytes` in the plan in force. `restore` reserves later growth in
        # addition to that plan.
        self._transit_planned = 0
        self._owner = ledger_owner
        # Computed once: this model's allocations reduce the free memory, and a second share of the
        # remainder would be too small.
        self._default_bytes = default_bytes
        # Sizes of the staging buffers in the present pools; no later plan has smaller ones.
        self.pools: tuple[int, int] | None = None
        self._pool_bytes = 0
        # Chosen once, for all parameters that require a gradient when the model is offloaded.
        self._spilled: frozenset[Flat] | None = None
        self._plan: PlacementPlan | None = None
        self.scratch_bytes = 0  # scratch memory of optimizers in Python; the next plan counts it
        # By flat: the sections that few of its parameters use; see `FlatNeed.idle_mask`.
        self.idle_masks: Mapping[Flat, int] = {}

    @property
    def plan(self) -> PlacementPlan:
        assert self._plan is not None
        return self._plan

    @property
    def budget_bytes(self) -> int | None:
        """The most bytes for this model under the policy's `ram`; None: as few as possible."""
        return budget_bytes(self._policy.ram, self._owner, self._default_bytes)

    @property
    def spilled(self) -> list[Flat]:
        return [flat for flat, gone in zip(self._flats, self.plan.spilled, strict=True) if gone]

    def state_format(self, flat: Flat, moments: int = 2) -> Format:
        """Choose the format of a flat's states with `moments` moments; RAW for a dtype without
        state formats."""
        return state_format(self._policy.state, flat.dtype, moments) or Format.RAW

    def first(self) -> PlacementPlan:
        """Plan for the time before an optimizer exists: only parameters, but pools for training.

        Raises: BudgetError when the parameters alone do not fit. A budget that is too small for
            training is logged as a warning.
        """
        try:
            plan = self._plan_first(self._formats_to_train())
        # Inference needs only parameters, so this is no error yet.
        except BudgetError as error:
            try:
                plan = self._make({}, stores_gradients=True)
            except BudgetError:
                # `error` states the bytes that training needs.
                raise error from None
            log.warning("this budget does not allow training: %s", error)
        plan = self._enforce(plan)
        # The executor is opened with these pools; every later plan includes them.
        self.pools_resized()
        return plan

    def _formats_to_train(self) -> dict[Flat, Format]:
        """Return the formats of all flats that require a gradient, before an optimizer exists."""
        trainable = {flat: self.state_format(flat) for flat in self._flats if flat.trainable}
        return {flat: found for flat, found in trainable.items() if found is not Format.RAW}

    def _plan_first(self, formats: Mapping[Flat, Format]) -> PlacementPlan:
        """Choose the gradients that spill, and the size of the pools."""
        # update="backward" with speculation also stores gradients: a step may have to be redone.
        if not self._policy.consumes_grads:
            plan = self._make(formats, stores_gradients=True)
            self._spilled = self._spilled_of(plan)
            return plan
        plan = self._make(formats, stores_gradients=False)
        # Micro-batches may accumulate later: make the pools large enough, if the budget allows it.
        try:
            later = self._make(formats, stores_gradients=True)
        # The budget cannot hold gradients, so this model cannot accumulate.
        except BudgetError:
            return plan
        self._spilled = self._spilled_of(later)
        self.pools = (
            max(plan.small_bytes, later.small_bytes),
            max(plan.large_bytes, later.large_bytes),
        )
        # Plan again, now with the larger pools.
        return self._make(formats, stores_gradients=False)

    def replan(
        self,
        formats: Mapping[Flat, Format],
        *,
        stores_gradients: bool = True,
        gradients_placed: bool = True,
    ) -> PlacementPlan:
        """Make a plan for flats with states in these formats, and put it in force; `restore` undoes
        that.

        stores_gradients: gradients wait in RAM (or spill) for the step, as in all modes except
            update="backward" without accumulation.
        gradients_placed: gradients have memory, or spill, already.
        The plan's pools are as large as the present ones, or larger: unfrozen parameters may have
        larger chunks, and a new optimizer more moments.
        Raises: BudgetError; then the plan in force stays.
        """
        try:
            plan = self._make(formats, stores_gradients=stores_gradients)
        except BudgetError as error:
            if not stores_gradients:
                raise
            spill = self._spill_unfrozen if gradients_placed else self._spill_anew
            plan = spill(formats, error)
        # None if the first plan did not fit, or had no gradients.
        if self._spilled is None and stores_gradients:
            self._spilled = self._spilled_of(plan)
        return self._enforce(plan)

    def _spill_unfrozen(self, formats: Mapping[Flat, Format], error: BudgetError) -> PlacementPlan:
        """Plan with spilled gradients for flats that were frozen when spilled gradients were
        chosen. Raises `error` if that plan does not fit either."""
        spills = self._policy.grads == "nvme" and isinstance(self._policy.ram, int)
        planned = {
            flat
            for flat, now in zip(self._flats, self.plan.formats, strict=True)
            if now is not Format.RAW
        }
        fresh = {flat for flat in formats if not flat.trainable} - planned
        if self._spilled is None or not (spills and fresh):
            raise error
        before, self._spilled = self._spilled, self._spilled | fresh
        try:
            return self._make(formats, stores_gradients=True)
        except BudgetError:
            self._spilled = before
            raise error from None

    def _spill_anew(self, formats: Mapping[Flat, Format], error: BudgetError) -> PlacementPlan:
        """Choose the spilled gradients again, because a new optimizer needs more memory than the
        first choice leaves. Raises `error` if that plan does not fit either."""
        before, self._spilled = self._spilled, None
        try:
            # For all flats that can be trained, so that later optimizers keep this choice.
            whole = self._make({**self._formats_to_train(), **formats}, stores_gradients=True)
            self._spilled = self._spilled_of(whole)
            return self._make(formats, stores_gradients=True)
        except BudgetError:
            self._spilled = before
            raise error from None

    def pools_resized(self) -> None:
        """Note that the executor's pools are those of the plan in force."""
        self.pools, self._pool_bytes = self.plan.pools, self.plan.pool_bytes

    def saved(self) -> SavedPlacement:
        """Return a snapshot for `restore`."""
        return SavedPlacement(self.plan, self._spilled, self.scratch_bytes, self._transit_planned)

    def restore(self, saved: SavedPlacement, *, resident_bytes: int, gradient_bytes: int) -> None:
        """Put a former plan in force again.

        resident_bytes: states in RAM now. gradient_bytes: present memory of gradients and of
        second copies of parameters. If these exceed the plan, the excess is reserved, too.
        """
        plan, self._spilled, self.scratch_bytes, self._transit_planned = saved
        # In addition to the plan: other models must not get bytes that are allocated now.
        more = max(resident_bytes - plan.resident_bytes, 0)
        more += max(gradient_bytes - plan.grad_bytes - plan.delayed_params_bytes, 0)
        more += max(self._pool_bytes - plan.pool_bytes, 0)
        # Buffers of parameters unfrozen since: the first gradient allocates them.
        more += max(self._transit_bytes() - self._transit_planned, 0)
        LEDGER.reserve(self._owner, plan.ram_bytes + more, plan.min_bytes)
        self._plan = plan

    def close(self) -> None:
        LEDGER.release(self._owner)

    def _enforce(self, plan: PlacementPlan) -> PlacementPlan:
        # With the minimum: an error of another model reports how much this one could release.
        LEDGER.reserve(self._owner, plan.ram_bytes, plan.min_bytes)
        self._plan, self._transit_planned = plan, self._transit_bytes()
        return plan

    def _make(self, formats: Mapping[Flat, Format], *, stores_gradients: bool) -> PlacementPlan:
        policy = self._policy
        needs = [self._need(flat, formats.get(flat), stores_gradients) for flat in self._flats]
        # Norms are taken of gradients, so only flats with states count.
        largest = max((param.numel for flat in formats for param in flat.params), default=0)
        spill = None  # `plan_placement` chooses
        if self._spilled is not None and stores_gradients:
            spill = [flat in self._spilled and flat in formats for flat in self._flats]
        return plan_placement(
            needs,
            self.budget_bytes,
            drive_count=len(policy.directories),
            # A norm is taken in pieces, each widened to fp32.
            scratch_bytes=4 * min(largest, NORM_PIECE_NUMEL)
            + self.scratch_bytes
            + self._transit_bytes()
            # Gradients of parameters without an optimizer.
            + self._gradients.unheld_bytes(formats if stores_gradients else ()),
            pools=self.pools,
            resident=self._policy.resident_parts,
            # For steps of one micro-batch: placement does not know the number of micro-batches
            # (`infinity plan` takes it as an argument).
            load=StepLoad(
                update=policy.placement_update,
                bandwidths=self._bandwidths(),
            ),
            spill=spill,
            # Chunks of activations pass through the same small staging buffers.
            small_bytes=CHUNK_BYTES if policy.activations == "nvme" else 0,
            # The models of a process share the budget only if it is an explicit size.
            held_bytes=LEDGER.others_bytes(self._owner) if isinstance(policy.ram, int) else 0,
            advice=f"Policy(ram=...) is {describe_budget(policy.ram)}"
            f"{describe_others(policy.ram, self._owner)}: raise it"
            + self._spill_advice()
            + ", or let states rest on a lower tier",
        )

    def _need(self, flat: Flat, held_format: Format | None, stores_gradients: bool) -> FlatNeed:
        tiers = (self._policy.params, self._policy.optim)
        if held_format is None:
            # Frozen: no optimizer states. A durable run has a second place for its parameters.
            return FlatNeed(
                flat.layout, Format.RAW, *tiers, versions=2 if self._policy.durable else 1
            )
        delayed = self._policy.delays
        # Of this rank's shard: gradients are reduced before they are stored for the step.
        grads = self._gradients.shard_bytes(flat)
        delayed_bytes = DelayedParams.shard_bytes(flat) if delayed else 0
        if not stores_gradients:
            return FlatNeed(
                flat.layout,
                held_format,
                *tiers,
                delayed_params_bytes=delayed_bytes,
                versions=self._policy.places,
                idle_mask=self.idle_masks.get(flat, 0),
            )
        # Only with an explicit size: the default budget, a share of free memory, spills nothing.
        spills = self._policy.grads == "nvme" and isinstance(self._policy.ram, int)
        return FlatNeed(
            flat.layout,
            held_format,
            *tiers,
            # Delayed updates read one set of gradients while backward fills another.
            grad_bytes=2 * grads if delayed else grads,
            delayed_params_bytes=delayed_bytes,
            spill_format=held_format.with_grad(_GRADS[self._gradients.dtype(flat)])
            if spills
            else None,
            window_bytes=grads,
            versions=self._policy.places,
            idle_mask=self.idle_masks.get(flat, 0),
        )

    def _spill_advice(self) -> str:
        """Return advice on how to make gradients spill; empty if gradients spill."""
        if self._policy.grads != "nvme":
            return ", let gradients spill with Policy(grads='nvme') and a size for ram"
        return (
            ""
            if isinstance(self._policy.ram, int)
            else ", give ram a size (gradients spill only if they exceed an explicit size)"
        )

    def _bandwidths(self) -> tuple[float, float]:
        """Return the summed (read, write) bytes/s of all drives in the settings; (1, 1) without
        them."""
        known = self._policy.io_settings.bandwidths.values()
        return (
            (sum(pair[0] for pair in known), sum(pair[1] for pair in known))
            if known
            else (1.0, 1.0)
        )

    def _spilled_of(self, plan: PlacementPlan) -> frozenset[Flat]:
        return frozenset(flat for flat, gone in zip(self._flats, plan.spilled, strict=True) if gone)
