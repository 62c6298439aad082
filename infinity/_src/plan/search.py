"""Search for the fastest way to train a model on a machine.

A way is a job with one value on each axis: schedule and micro-batches, update mode with generations
and device, state format, tiers of parameters, activations and gradients, tiles, and, on several
nodes, the switches of ZeRO++. `axes_of` and `tilings_of` list the values of the axes; a field that
the user fixes has one value.

The search is branch and bound: it predicts ways in the order of a lower bound of the step time,
until no bound is below the best predicted step. The bound assumes that RAM holds only parameters
and optimizer states, in the fastest split, and no pools or records (`_least_on_nvme`). So no way
that the search skips is faster.

The search compares ways by the step time plus a share PENALTY for each setting that departs from
plain training (`weight_of`): of two equally fast ways, it finds the way with fewer changes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import heapq
import itertools
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from infinity._src.config.policy import Policy
from infinity._src.memory.flat_layout import sections_of, state_format
from infinity._src.memory.roofline import AtRest
from infinity._src.plan.machine import Machine
from infinity._src.plan.matrices import ChunkShares, moves_of
from infinity._src.plan.memory import (
    WORDS,
    activation_bytes,
    again_share,
    boundary_bytes,
    device_in_ram,
    gpu_need,
    loss_tiles,
    reserved_bytes,
    tile_counts,
)
from infinity._src.plan.predict import (
    EFFICIENCY,
    Prediction,
    check_job,
    predict,
    time_step,
    waiting_grad_bytes,
)
from infinity._src.plan.workload import Job, JobShape, ModelShape, shape_in

PENALTY = 0.002
"""Share of the step time that a comparison of ways adds for each departure from plain training."""

UNITS_MAX = 4096
"""Largest number of units into which a search cuts stacks of experts. Each unit takes CPU time in
each pass, which a prediction does not count.
"""

RAM_MODULE_BYTES = 32 << 30
"""Capacity of the additional RAM module in `upgrades`."""

STATES = ("exact", "bf16", "compact")
"""State formats; all formats except the first round."""

Fields = dict[str, Any]

# -- The space -------------------------------------------------------------------------------------


def axes_of(
    shape: ModelShape, machine: Machine, job: Job, fixed: Collection[str], *, exact: bool = False
) -> dict[str, list[Fields]]:
    """Return the values of each axis, as fields of a job.

    fixed: fields of the job that keep their values, including values that no search would try.
    exact: leave out state formats and switches of ZeRO++ that round more than plain training.
    """

    def values(field: str, *tried: Any) -> list[Any]:
        return [_field(job, field)] if field in fixed else list(tried)

    drives, gpus = ["nvme"] if machine.drives else [], ["cpu"] if machine.gpus else []
    passes = [
        {"schedule": schedule, "micro_batches": count}
        for schedule in values("schedule", "horizontal", *(["vertical"] * job.checkpointing))
        for count in values("micro_batches", *job.micro_batch_counts(machine.world))
        # With one micro-batch the schedules are the same.
        if count > 1 or schedule == "horizontal" or "schedule" in fixed
    ]
    return {
        "passes": passes,
        "updates": _updates(machine, job, fixed),
        "state": _single(state=values("state", *(("exact",) if exact else STATES))),
        "activations": _single(
            activations=values("activations", "device", *((gpus + drives) * job.checkpointing))
        ),
        "grads": _single(grads=values("grads", "cpu", *drives)),
        "params": _params(shape, machine, job, fixed, exact=exact),
        "optim": _single(optim=values("optim", *(drives or ["cpu"]))),
    }


def _single(**axis: list[Any]) -> list[Fields]:
    ((field, values),) = axis.items()
    return [{field: value} for value in values]


def _updates(machine: Machine, job: Job, fixed: Collection[str]) -> list[Fields]:
    """List update modes with numbers of generations and the device that updates. A delayed update
    applies the previous step's gradients, which changes the training: list it only if the user
    fixes it.
    """
    # Two generations make a deferred update no faster. A durable run always has two.
    places = {"deferred": [1], "backward": [1, 2], "delayed": [1]}
    kept = "generations" in fixed or job.policy.durable
    modes = [job.policy.update] if "update" in fixed else ["deferred", "backward"]
    where = ["cpu", *(["device"] if machine.gpus else [])]
    return [
        # `Policy` refuses updates on a device unless they are deferred.
        {"update": update, "generations": count, "update_on": place}
        for update in modes
        for place in ([job.policy.update_on] if "update_on" in fixed else where)
        for count in ([job.policy.generations] if kept else places[update])
    ]


def tilings_of(shape: ModelShape, job: Job, fixed: Collection[str]) -> dict[int, list[Fields]]:
    """Return the tilings to try. Keys: experts in a tile, largest tiles first. Values: tiles of
    linears and of the loss, fewest first. Tiles change the device memory, the number of units that
    the vertical schedule can retain, and the number of experts that a pass gathers.
    """
    linears = [job.tiles] if "tiles" in fixed else [1, *tile_counts(shape, job)]
    losses = [1, *(loss_tiles(shape, words) for words in WORDS)]
    losses = [job.loss_tiles] if "loss_tiles" in fixed else sorted(set(losses))
    experts = [job.expert_tile] if "expert_tile" in fixed else list(_expert_tiles(shape))
    pairs = [{"tiles": a, "loss_tiles": b} for a, b in itertools.product(linears, losses)]
    pairs.sort(key=lambda pair: (pair["tiles"] > 1) + (pair["loss_tiles"] > 1))
    return {tile: [pair | {"expert_tile": tile} for pair in pairs] for tile in experts}


def _field(job: Job, name: str) -> Any:
    return getattr(job if hasattr(job, name) else job.policy, name)


def _expert_tiles(shape: ModelShape) -> Iterator[int]:
    yield 0
    layers = sum(bool(unit.stacks) for unit in shape.units)
    tile = shape.experts // 2
    while layers and tile and layers * -(-shape.experts // tile) <= UNITS_MAX:
        yield tile
        tile //= 2


def _params(
    shape: ModelShape, machine: Machine, job: Job, fixed: Collection[str], *, exact: bool
) -> list[Fields]:
    """List the ZeRO stages, each with a tier of the parameters and, on several nodes, with switches
    of ZeRO++, which save bytes between nodes.
    """
    policy, several = job.policy, machine.nodes > 1

    def values(field: str, tried: list[Any]) -> list[Any]:
        return [_field(job, field)] if field in fixed else tried

    rounds = [False, True] if several and not exact else [False]
    coded = [
        {"qwz": qwz, "qgz": qgz}
        for qwz in values("qwz", rounds)
        for qgz in values("qgz", rounds)
    ]
    found: list[Fields] = []
    if "zero" not in fixed or policy.zero == 3:
        below = policy.params if "params" in fixed else "nvme" if machine.drives else "cpu"
        copies = values("hpz", [None, "cpu"] if several else [None])
        found += [
            {"zero": 3, "params": below, "hpz": copy} | each for copy in copies for each in coded
        ]
    # Every device may hold all parameters; on several ranks this is stage 2, or 1 if the user fixes
    # stage 1.
    zero = policy.zero if "zero" in fixed else 2 if machine.world > 1 else 3
    holds = machine.gpus > 0 and shape.gathered_bytes() < machine.device_bytes
    asked = "zero" in fixed and policy.zero < 3
    stays = "params" not in fixed or policy.params == "device"
    if stays and (asked or (holds and (zero < 3 or machine.world == 1))):
        found += [{"zero": zero, "params": "device", "hpz": None} | each for each in coded]
    return found


def departures(job: Job) -> list[str]:
    """Name the differences from plain training that a user would notice."""
    policy = job.policy
    names = [] if policy.state == "exact" else [f"state {policy.state} rounds"]
    if policy.update == "delayed":
        names.append("updates come one step late")
    elif policy.update == "backward" and policy.generations == 1:
        names.append("no clipping by norm")
    if policy.qwz or policy.qgz:
        names.append("exchanges round")
    return names


def is_exact(job: Job) -> bool:
    """Return whether neither states nor exchanges round more than plain training does."""
    return job.policy.state == "exact" and not (job.policy.qwz or job.policy.qgz)


def _complexity(job: Job) -> int:
    policy = job.policy
    simple = (
        policy.generations == 1 or bool(policy.durable),
        policy.activations == "device",
        policy.grads == "cpu",
        policy.update_on == "cpu",
        not policy.hpz,
        not job.vertical,
        job.tiles == 1,
        job.loss_tiles == 1,
    )
    # A departure changes numbers or restricts the training loop, so it weighs more than a setting.
    # Each unit takes CPU time, so each halving of the tiles of experts counts as a setting.
    cuts = max(10 - job.expert_tile.bit_length(), 1) if job.expert_tile else 0
    # Two generations take twice the space on drives and in RAM, so they count twice.
    return 5 * len(departures(job)) + len(simple) - sum(simple) + (not simple[0]) + cuts


def weight_of(job: Job) -> float:
    """Return the factor by which a search multiplies a way's step time to compare ways."""
    return 1.0 + PENALTY * _complexity(job)


# -- The search ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Ranked:
    """Ways that fit the machine, fastest first. tried: number of predictions in the search."""

    ways: tuple[Prediction, ...]
    tried: int


def search(
    shape: ModelShape,
    machine: Machine,
    job: Job,
    fixed: Collection[str] = (),
    *,
    exact: bool = False,
    count: int = 1,
    below_s: float = float("inf"),
) -> Ranked:
    """Find at most `count` of the fastest ways that fit the machine. Any two of them differ in the
    schedule, the update, the formats or the tiers. The result is empty if no way fits.

    job: tokens, sequence, and the fields named in `fixed`, keep their values. below_s: leave out
    ways whose cost (`step_s` times `weight_of`) is not below this.

    Raises: ValueError as `predict`.
    """
    check_job(job, machine)
    return _Search(shape, machine, job, fixed, exact=exact).run(count, below_s)


class _Search:
    def __init__(
        self,
        shape: ModelShape,
        machine: Machine,
        job: Job,
        fixed: Collection[str],
        *,
        exact: bool,
    ) -> None:
        self._shape, self._machine = shape, machine
        self._axes = axes_of(shape, machine, job, fixed, exact=exact)
        self._tilings = tilings_of(shape, job, fixed)
        self._job = job
        self._at_rest: dict[str, AtRest] = {}
        # Experts in the largest tiles, and in the smallest tiles.
        self._tiles = next(iter(self._tilings)), next(reversed(self._tilings))
        self._reserves: dict[tuple[object, ...], float] = {}
        self._least_reserved: dict[tuple[object, ...], float] = {}
        self._fitting: dict[tuple[object, ...], bool] = {}
        # By `_states_kind`, if states did not fit: RAM needed, without activations and device
        # memory.
        self._least_ram: dict[tuple[object, ...], float] = {}
        self._tried = 0

    def run(self, count: int, below_s: float) -> Ranked:
        # A heap of ways, ordered by bound. A way at the top first gets a tighter bound and returns
        # to the heap; the second time, it is predicted.
        jobs = list(self._jobs())
        heap = [(self._bound_s(job, 1), index, 1) for index, job in enumerate(jobs)]
        heapq.heapify(heap)
        best: dict[tuple[object, ...], tuple[float, Prediction]] = {}
        limit = below_s
        while heap:
            bound, index, splits = heapq.heappop(heap)
            if bound >= limit:
                break
            job = jobs[index]
            if splits < SPLITS:
                sharper = max(bound, self._bound_s(job, SPLITS))
                heapq.heappush(heap, (sharper, index, SPLITS))
                continue
            found = self._predicted(job)
            if found is None:
                continue
            cost, kind = found.step_s * weight_of(found.job), _kind(found.job)
            if kind not in best or cost < best[kind][0]:
                best[kind] = (cost, found)
                costs = sorted(cost for cost, _ in best.values())
                limit = min([below_s, *costs[count - 1 : count]])
        ranked = sorted(best.values(), key=lambda pair: pair[0])
        ways = tuple(found for cost, found in ranked[:count] if cost < below_s)
        return Ranked(ways, self._tried)

    def _jobs(self) -> Iterator[Job]:
        axes, found = dict(self._axes), []
        passes = axes.pop("passes")
        for values in itertools.product(*axes.values()):
            fields = {name: value for each in values for name, value in each.items()}
            # Skip combinations that the policy or the optimizer refuses.
            with contextlib.suppress(ValueError):
                way = self._job.replace(**fields)
                found += [] if way.refusal else [way]
        # The fields in `passes` are no fields of the policy, so `Policy` checks each policy once.
        for each, job in itertools.product(passes, found):
            job = job.replace(**each)
            # With one pass, an update in backward consumes gradients immediately: none can spill.
            spills = job.policy.grads == "nvme" and len(axes["grads"]) > 1
            if job.stores_gradients or not spills:
                yield job

    def _predicted(self, job: Job) -> Prediction | None:
        """Predict a way with the best tiling that fits device and RAM; None if none fits."""
        waiting = self._waiting(job)
        if self._grads(job) + waiting > self._machine.ram_bytes or not self._fits_drives(job):
            return None
        # If the states do not fit the RAM, record the RAM that they need, so that `_best_tiling`
        # returns the next tiling.
        while (tiling := self._best_tiling(job)) is not None:
            tried = job.replace(**tiling)
            self._tried += 1
            found = predict(self._shape, self._machine, tried)
            if found.ram.fits:
                return found if found.fits else None
            beside = waiting + self._on_device(tried)
            self._least_ram[_states_kind(tried)] = found.ram.bytes - beside
        return None

    def _waiting(self, job: Job) -> float:
        """Bytes of activations in a node's RAM."""
        if job.policy.activations != "cpu":
            return 0.0
        return boundary_bytes(self._shape, self._machine, job)

    def _on_device(self, job: Job) -> float:
        """Bytes of a node's RAM that are device memory."""
        return device_in_ram(self._shape, self._machine, job)

    def _best_tiling(self, job: Job) -> Fields | None:
        """Return the fastest tiling of a way among the tilings that fit the device and whose states
        may fit the RAM; None if there is none.
        """
        found: tuple[float, Fields] | None = None
        for tilings in self._tilings.values():
            # The least memory is at an extreme: the most or fewest tiles of linears and of the loss
            # (tiles also take memory if Triton computes them). If no extreme fits, none fits.
            if not any(self._fits(job.replace(**tiling)) for tiling in _extremes(tilings)):
                continue
            for tiling in tilings:
                tried = job.replace(**tiling)
                if not self._fits(tried):
                    continue
                reserved, on_device = self._reserved(tried), self._on_device(tried)
                known = self._least_ram.get(_states_kind(tried), 0.0)
                least = max(known, reserved + self._grads(tried))
                if least + self._waiting(tried) + on_device > self._machine.ram_bytes:
                    continue
                again = again_share(shape_in(tried, self._shape), self._machine, tried)
                cost = weight_of(tried) * self._least_s(tried, 0, reserved + on_device, again)
                if found is None or cost < found[0]:
                    found = cost, tiling
                if not again and self._machine.gpus:
                    # More tiles of linears and of the loss only save device memory.
                    break
        return found and found[1]

    def _reserved(self, job: Job) -> float:
        """Bytes of a node's RAM that hold neither states, gradients nor activations. With smaller
        tiles of experts, records take more RAM, and windows and the buffers of the fill take less.
        """
        key = *_reserving(job.policy), job.expert_tile
        if key not in self._reserves:
            shape = shape_in(job, self._shape)
            self._reserves[key] = reserved_bytes(shape, self._machine, job)
        return self._reserves[key]

    def _fits(self, job: Job) -> bool:
        """Return whether a way fits its device."""
        policy = job.policy
        key = (
            job.schedule, job.micro_batches, policy.activations, policy.update_on,
            policy.consumes_grads, policy.params, policy.hpz, policy.qwz, policy.qgz,
            job.tiles, job.loss_tiles, job.expert_tile,
        )  # fmt: skip
        if key not in self._fitting:
            self._fitting[key] = self._fits_device(job)
        return self._fitting[key]

    def _fits_device(self, job: Job) -> bool:
        shape = shape_in(job, self._shape)
        # Check activations first: that is the cheaper part of the computation.
        activations = sum(activation_bytes(shape, self._machine, job).values())
        if activations > self._machine.device_bytes:
            return False
        return gpu_need(self._shape, self._machine, job).fits

    def _bound_s(self, job: Job, splits: int) -> float:
        """Return a lower bound of the cost of a way. splits: number of splits of the RAM that are
        compared; more splits make the bound tighter.
        """
        key = _reserving(job.policy)
        if key not in self._least_reserved:
            tiled = [job.replace(**tilings[0]) for tilings in self._tilings.values()]
            self._least_reserved[key] = min(map(self._reserved, tiled))
        # The first tiling has the least weight, and the smallest tiles of experts gather the least.
        first, last = (job.replace(**self._tilings[tile][0]) for tile in self._tiles)
        return weight_of(first) * self._least_s(last, splits, self._least_reserved[key], 0.0)

    def _least_s(self, job: Job, splits: int, reserved: float, again: float) -> float:
        """Return the step time with as few states on drives as the RAM allows. reserved: bytes of
        RAM that hold no states. again: share of the parameters that is gathered separately for each
        micro-batch.
        """
        machine, at_rest = self._machine, self._states(job)
        shape = shape_in(job, self._shape)
        taken = self._waiting(job) + self._grads(job) + reserved
        free = max(machine.ram_bytes - taken, 0.0) / job.policy.places
        least_s = min(
            time_step(shape, machine, job, at_rest, on_nvme, again=again).limits.schedule_s
            for on_nvme in _least_on_nvme(at_rest, job, free, splits)
        )
        return least_s / EFFICIENCY

    def _grads(self, job: Job) -> float:
        """Bytes of gradients in a node's RAM."""
        if job.policy.grads == "nvme" or not job.stores_gradients:
            return 0.0
        sets = 2 if job.policy.delays else 1
        return sets * waiting_grad_bytes(self._shape, job) / self._machine.nodes

    def _fits_drives(self, job: Job) -> bool:
        """Return False if the states do not fit the drives even if RAM held nothing but states. A
        prediction counts exactly.
        """
        capacity = self._machine.nvme_bytes
        if capacity is None or not self._machine.drives:
            return True
        states = self._states(job)
        on_drives = (states.params + states.frozen) * (job.policy.params == "nvme")
        on_drives += states.optim * (job.policy.optim == "nvme")
        return job.policy.places * on_drives <= capacity + self._machine.ram_bytes

    def _states(self, job: Job) -> AtRest:
        """Return the bytes of all states of a node."""
        state = job.policy.state
        if state not in self._at_rest:
            share = 1 / self._machine.nodes
            total = states_of(shape_in(self._job, self._shape), state)
            self._at_rest[state] = total.scaled(params=share, optim=share)
        return self._at_rest[state]


def states_of(shape: JobShape, state: str) -> AtRest:
    """Return the bytes of a model's states in the format of `Policy.state`, without padding and
    without second moments that no update uses."""
    total = AtRest()
    for flat, count in shape.kinds_of_flats:
        for moments, numel in ((1, flat.matrix_numel), (2, flat.numel - flat.matrix_numel)):
            held = state_format(state, flat.dtype, moments) if flat.trainable else None
            each = AtRest(frozen=flat.dtype.itemsize)
            if held is not None:
                shares = ChunkShares(float(moments == 1), float(moments == 2), 0.0)
                sections = sections_of(held, flat.dtype.itemsize)
                each = AtRest.per_param(sections, moves=moves_of(held, shares))
            total += each.scaled(params=count * numel, optim=count * numel)
    return total


def _extremes(tilings: list[Fields]) -> list[Fields]:
    linears = [tilings[0]["tiles"], tilings[-1]["tiles"]]
    losses = [tilings[0]["loss_tiles"], tilings[-1]["loss_tiles"]]
    pairs = [{"tiles": a, "loss_tiles": b} for a, b in itertools.product(linears, losses)]
    return [tilings[0] | pair for pair in reversed(pairs)]


SPLITS = 4
"""Number of splits of the RAM between parameters and optimizer states in the tighter bound."""


def _least_on_nvme(
    at_rest: AtRest, job: Job, free: float, splits: int
) -> Iterator[AtRest]:
    """Yield lower bounds of the bytes on drives, one for each interval of ways to split `free`
    bytes of RAM between parameters and optimizer states. Each bound gives parameters their largest
    share in the interval, and states their largest share, so no split in the interval leaves fewer
    bytes of either kind on drives.

    splits: number of intervals; 0: give RAM to parameters first, and the rest to states.
    """
    params = at_rest.params + at_rest.frozen
    # A share in `Policy.resident` is also a bound: the rest stays on the drives.
    given = job.policy.resident_parts
    shares = {kind: part for kind, part in given.items() if isinstance(part, float)}
    least = {kind: 1.0 - shares.get(kind, 1.0) for kind in ("params", "optim")}
    on_params = float(job.policy.params == "nvme")
    on_optim = float(job.policy.optim == "nvme")
    ways = [(free * (n + 1) / splits, free * (splits - n) / splits) for n in range(splits)]
    for for_params, for_optim in ways or [(free, max(free - on_params * params, 0.0))]:
        left = max(1.0 - for_params / params, least["params"]) if params else 0.0
        rest = max(1.0 - for_optim / at_rest.optim, least["optim"]) if at_rest.optim else 0.0
        yield at_rest.scaled(params=on_params * left, optim=on_optim * rest, grads=0.0)


def _reserving(policy: Policy) -> tuple[object, ...]:
    """Return the fields that determine `reserved_bytes`, except the tiles of experts."""
    return (
        policy.state, policy.generations, policy.update, policy.update_on, policy.params,
        policy.hpz, policy.qgz,
    )  # fmt: skip


def _kind(job: Job) -> tuple[object, ...]:
    policy = job.policy
    return (
        job.vertical, policy.update, policy.generations, policy.update_on, policy.state,
        policy.params == "device", policy.hpz, policy.qwz, policy.qgz,
    )  # fmt: skip


def _states_kind(job: Job) -> tuple[object, ...]:
    """Return the fields that determine the RAM that states need, without activations."""
    policy = job.policy
    return (
        policy.state, policy.generations, policy.update, policy.grads, job.stores_gradients,
        policy.params, policy.hpz, policy.qgz, policy.update_on, job.expert_tile,
    )  # fmt: skip


# -- A larger machine ------------------------------------------------------------------------------


def upgrades(
    shape: ModelShape,
    machine: Machine,
    job: Job,
    fixed: Collection[str] = (),
    *,
    exact: bool = False,
    best: Prediction | None = None,
) -> Mapping[str, Prediction | None]:
    """Predict the fastest way with one more drive, and the fastest with one more module of RAM;
    None if no way is faster than `best` or, without `best`, if no way fits.
    """
    below_s = float("inf") if best is None else best.step_s * weight_of(best.job)
    more = {
        f"{RAM_MODULE_BYTES >> 30} GiB more RAM": dataclasses.replace(
            machine, ram_bytes=machine.ram_bytes + RAM_MODULE_BYTES
        )
    }
    if machine.drives:
        more = {"one more drive": machine.with_drives(machine.drives + 1)} | more
    found = {
        name: search(shape, changed, job, fixed, exact=exact, below_s=below_s).ways
        for name, changed in more.items()
    }
    return {name: ways[0] if ways else None for name, ways in found.items()}
