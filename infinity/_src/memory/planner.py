"""What a model's states are placed by: its flats as the planner sees them, the process's budget, the plan in force.

    first plan        at offload, for the step that may come: pools and what spills are settled here, once
    plan per hold     when an optimizer takes parameters: their state formats, and room for their gradients

Pools are allocated once and which gradients spill is decided once, both for all parameters that require a gradient when
the model is offloaded. An optimizer that holds fewer leaves budget, which goes to resident sections.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch

from infinity._src.config import Policy
from infinity._src.grads.buffers import GradBuffers
from infinity._src.grads.slot import NORM_PIECE_NUMEL
from infinity._src.hooks.activation_store import CHUNK_BYTES
from infinity._src.memory.ledger import LEDGER, budget_bytes, describe_budget, describe_others
from infinity._src.memory.needs import FlatNeed, Load
from infinity._src.memory.placement import Plan, plan_placement
from infinity._src.params.delayed_params import DelayedParams
from infinity._src.params.unit import Flat
from infinity.aio import Format
from infinity.aio._records import GradSection, Master, Moments, chunk_numel
from infinity.errors import BudgetError

log = logging.getLogger("infinity")

_MASTERS = {torch.bfloat16: Master.SPLIT, torch.float32: Master.FP32, torch.float16: Master.FP16}
_MOMENTS = {"exact": Moments.FP32, "bf16": Moments.BF16, "compact": Moments.Q8}
_GRADS = {
    torch.bfloat16: GradSection.BF16,
    torch.float32: GradSection.FP32,
    torch.float16: GradSection.FP16,
}


def state_format(state: str, dtype: torch.dtype, moments: int = 2) -> Format | None:
    """How `Policy.state` keeps parameters of a dtype with so many moments; None for a dtype without states."""
    if dtype not in _MASTERS:
        return None
    master = Master.SPLIT8 if state == "compact" and dtype is torch.bfloat16 else _MASTERS[dtype]
    return Format(master, _MOMENTS[state] if moments else Moments.FP32, moments)


def chunk_numel_of(state: str, dtype: torch.dtype) -> int:
    """Elements per chunk of flats that may get states: as for two moments, chosen before an optimizer exists."""
    return chunk_numel(state_format(state, dtype) or Format.RAW)


class Saved(NamedTuple):
    """What a placement is made with and what came of it."""

    plan: Plan
    spilled: frozenset[Flat] | None
    scratch_bytes: int
    staging_bytes: int


class PlacementPlanner:
    """The placement of one model's flats. `plan` is the one in force; `ledger_owner` is whose its RAM is.

    staging_bytes: what gradients need on their way to where they wait; more after parameters were thawed.
    Formats are those of states without gradients; `plan.formats` says which flats have a section for theirs.
    """

    def __init__(
        self,
        policy: Policy,
        flats: Sequence[Flat],
        gradients: GradBuffers,
        *,
        ledger_owner: int,
        default_bytes: int,
        staging_bytes: Callable[[], int] = lambda: 0,
    ) -> None:
        self._policy = policy
        self._flats = list(flats)
        self._gradients = gradients
        self._staging_bytes = staging_bytes
        self._staged = 0  # bytes of that in the plan in force
        self._owner = ledger_owner
        # Once: what is left shrinks as this model takes its share, and must not be halved again for the optimizer.
        self._default_bytes = default_bytes
        self._pools: tuple[int, int] | None = None
        self._spilled: frozenset[Flat] | None = None
        self._plan: Plan | None = None
        self.scratch_bytes = 0  # of optimizers that compute in Python; counted from the next plan on

    @property
    def plan(self) -> Plan:
        """The plan in force."""
        assert self._plan is not None
        return self._plan

    @property
    def spilled(self) -> list[Flat]:
        """The flats whose gradients spill under the plan in force."""
        return [flat for flat, gone in zip(self._flats, self.plan.spilled, strict=True) if gone]

    def state_format(self, flat: Flat, moments: int = 2) -> Format:
        """How states of a flat rest once an optimizer with so many moments holds it; RAW for a dtype that has none."""
        return state_format(self._policy.state, flat.dtype, moments) or Format.RAW

    def first(self) -> Plan:
        """The placement before an optimizer exists: parameters only, but pools for the step that may come.

        Raises: BudgetError when the parameters alone do not fit; a budget too small for training is a warning.
        """
        trainable = {flat: self.state_format(flat) for flat in self._flats if flat.trainable}
        formats = {flat: found for flat, found in trainable.items() if found is not Format.RAW}
        try:
            plan = self._settle_first(formats)
        except BudgetError as error:
            try:
                plan = self._make({}, stores_gradients=True)
            except BudgetError:
                raise error from None  # which says what training needs
            log.warning("this budget does not allow training: %s", error)
        self._pools = (plan.small_bytes, plan.large_bytes)
        return self._enforce(plan)

    def _settle_first(self, formats: Mapping[Flat, Format]) -> Plan:
        """Decide what spills and how large pools are."""
        if self._policy.update != "backward" or self._policy.speculates:
            plan = self._make(formats, stores_gradients=True)
            self._spilled = self._spilled_of(plan)
            return plan
        plan = self._make(formats, stores_gradients=False)
        try:  # micro-batches may accumulate one day: the pools are large enough for that, if the budget is
            later = self._make(formats, stores_gradients=True)
        except BudgetError:
            return plan
        self._spilled = self._spilled_of(later)
        self._pools = (max(plan.small_bytes, later.small_bytes), max(plan.large_bytes, later.large_bytes))
        return self._make(formats, stores_gradients=False)

    def replan(self, formats: Mapping[Flat, Format], *, stores_gradients: bool = True) -> Plan:
        """The placement of flats with states in these formats, in force from now on; `restore` takes it back.

        stores_gradients: they wait in RAM (or spill) for the step; not so under update="backward" without accumulation.
        Raises: BudgetError; ValueError when the pools that exist are too small. Then the plan in force stays.
        """
        plan = self._make(formats, stores_gradients=stores_gradients)
        if (plan.small_bytes, plan.large_bytes) != self._pools:
            raise ValueError(
                "the optimizer holds parameters that required no gradient when the model was offloaded, or whose "
                "states did not fit the budget then, or three moments each; call requires_grad_() before inf.offload, raise "
                "Policy(ram=...), or rest three moments in RAM: Policy(optim='cpu')"
            )
        if self._spilled is None and stores_gradients:
            self._spilled = self._spilled_of(plan)
        return self._enforce(plan)

    def saved(self) -> Saved:
        """What `restore` brings back."""
        return Saved(self.plan, self._spilled, self.scratch_bytes, self._staged)

    def restore(self, saved: Saved, *, resident_bytes: int, gradient_bytes: int) -> None:
        """Put a former plan in force again. resident_bytes: what rests in RAM now; gradient_bytes: memory of gradients, and of
        the parameters that compute, which a later plan will find there. What is more than planned is reserved, too.
        """
        plan, self._spilled, self.scratch_bytes, self._staged = saved
        more = max(resident_bytes - plan.resident_bytes, 0)
        more += max(gradient_bytes - plan.grad_bytes - plan.shadow_bytes, 0)
        more += max(self._staging_bytes() - self._staged, 0)  # of what was thawed since: made, or when its first gradient comes
        LEDGER.reserve(self._owner, plan.ram_bytes + more, plan.min_bytes)
        self._plan = plan

    def close(self) -> None:
        """Give the budget back."""
        LEDGER.release(self._owner)

    def _enforce(self, plan: Plan) -> Plan:
        LEDGER.reserve(self._owner, plan.ram_bytes, plan.min_bytes)
        self._plan, self._staged = plan, self._staging_bytes()
        return plan

    def _make(self, formats: Mapping[Flat, Format], *, stores_gradients: bool) -> Plan:
        policy = self._policy
        needs = [self._need(flat, formats.get(flat), stores_gradients) for flat in self._flats]
        largest = max((param.numel for flat in formats for param in flat.params), default=0)
        spill = None
        if self._spilled is not None and stores_gradients:
            spill = [flat in self._spilled and flat in formats for flat in self._flats]
        return plan_placement(
            needs,
            budget_bytes(policy.ram, self._owner, self._default_bytes),
            drive_count=len(policy.directories),
            scratch_bytes=4 * min(largest, NORM_PIECE_NUMEL) + self.scratch_bytes + self._staging_bytes(),
            pools=self._pools,
            resident=self._resident(),
            # What a resident byte saves is valued for a step of one micro-batch: how many there will be nobody knows at placement
            # (`infinity plan` is told).
            load=Load(update="deferred" if policy.speculates else policy.update, bandwidths=self._bandwidths()),
            spill=spill,
            small_bytes=CHUNK_BYTES if policy.activations == "nvme" else 0,
            held_bytes=LEDGER.others_bytes(self._owner) if isinstance(policy.ram, int) else 0,
            advice=f"Policy(ram=...) is {describe_budget(policy.ram)}{describe_others(policy.ram, self._owner)}: raise it"
            + self._spill_advice()
            + ", or let states rest on a lower tier",
        )

    def _need(self, flat: Flat, held_format: Format | None, stores_gradients: bool) -> FlatNeed:
        tiers = (self._policy.params, self._policy.optim)
        if held_format is None:
            return FlatNeed(flat.layout, Format.RAW, *tiers, versions=2 if self._policy.durable else 1)
        delayed = self._policy.update == "delayed"
        grads = self._gradients.shard_bytes(flat)
        shadow = DelayedParams.shard_bytes(flat) if delayed else 0
        if not stores_gradients:
            return FlatNeed(flat.layout, held_format, *tiers, shadow_bytes=shadow, versions=self._policy.generations)
        # Without an explicit size the budget is a share of what happens to be free, and nothing spills for that.
        spills = self._policy.grads == "nvme" and isinstance(self._policy.ram, int)
        return FlatNeed(
            flat.layout,
            held_format,
            *tiers,
            grad_bytes=2 * grads if delayed else grads,
            shadow_bytes=shadow,
            spill_format=held_format.with_grad(_GRADS[self._gradients.dtype(flat)]) if spills else None,
            window_bytes=grads,
            versions=self._policy.generations,
        )

    def _spill_advice(self) -> str:
        """How gradients could spill, where they do not."""
        if self._policy.grads != "nvme":
            return ", let gradients spill with Policy(grads='nvme') and a size for ram"
        return "" if isinstance(self._policy.ram, int) else ", give ram a size (gradients spill only past an explicit one)"

    def _resident(self) -> dict[str, float | int]:
        """What the policy wants resident; it has parsed sizes into bytes."""
        if self._policy.durable:
            return {"params": 0.0, "optim": 0.0}
        given = self._policy.resident or {}
        return {kind: part for kind, part in given.items() if not isinstance(part, str)}

    def _bandwidths(self) -> tuple[float, float]:
        """(read, write) of all drives as the settings have them; equal where they do not."""
        known = self._policy.io_settings.bandwidths.values()
        return (sum(pair[0] for pair in known), sum(pair[1] for pair in known)) if known else (1.0, 1.0)

    def _spilled_of(self, plan: Plan) -> frozenset[Flat]:
        return frozenset(flat for flat, gone in zip(self._flats, plan.spilled, strict=True) if gone)
