"""Formulas for the bytes that an optimizer step must move, and for its shortest time: pure
arithmetic.

Bytes over the drives, for states that rest there, with M passes through the model. In the
horizontal schedule each micro-batch is a pass. In the vertical one all micro-batches pass a block
before the next block runs (`inf.microbatched`), and M is 1:

                                                       other     states    spilled gradients
    update      parameters read                        states    written   read and written
    deferred    2M: the update feeds the first forward 1 read    1         M times
    backward    2M: the update has them from memory    1 read    1         M times, none if M = 1
    delayed     2: by the update, and into a copy      1 read    1         M times
    (frozen)    2M                                     -         -         -

An optimizer of whole matrices updates twice in a step: the first update moves the momentum, and the
second one the masters. Both leave out the sections that they do not need. `AtRest.first` has the
bytes that the first update moves, `AtRest.idle` the bytes that the second one leaves out. In the
exact format these are 4 and 4 of 8 bytes at rest, so a step reads 10 + 4(M - 1) bytes and writes 8
for each parameter.

In the exact format (2 bytes of parameter, 10 of other states) a step reads 14 + 4(M - 1) bytes and
writes 12 for each parameter in the first two modes; with "delayed", whose passes compute from the
copy, it reads 14 and writes 12 for any M. Resident states move no bytes. Units that stay gathered
between two passes may save a little more (`turning_bytes_max`); the formulas omit that.

Seconds per step, on drives with bandwidths B_r and B_w:

    io(r, w)   = r / B_r + w / B_w where reads and writes share a drive's time,
                 else max(r / B_r, w / B_w)
    floor      = max(compute, io of everything, what links and the CPU's memory need):
                 no schedule is faster
    deferred   = max(first forward, io of states) + max(rest, io of the rest):
                 no update before backward ends
    backward   = max(last backward + first forward, io of states and of their two passes)
                 + max(rest, io of the rest)
    delayed    = floor
    matrices   = max(their transformation, io of the first updates, what links need): one more term,
                 since it runs before the first forward and overlaps with no other term. With
                 "backward" it is a term of the last backward, which waits for each matrix.

Links to GPUs (`infinity._src.memory.pcie`) and the CPU's memory need time, too: each adds one more
term to both max.

A deferred update is faster if backward overlaps with reading states ahead and writing them late, as
far as memory allows: `movable_bytes`. η is a limit divided by the measured time.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Iterable, Sequence

from infinity._src.cabi.records import Section
from infinity._src.memory.pcie import BusyTime

UPDATES = ("deferred", "backward", "delayed")
"""Values of `Policy.update`: when states are updated."""

EXAMPLE_TBW = 600
"""Common rating of a consumer drive of 1 TB, in terabytes written. Used as an example where a
drive's rating is not known.
"""
WEAR_LEAST_S = 600.0
"""Shortest time of training whose writes are extrapolated to a day and to a drive's life."""


def update_threads(cpus: int, cores: int, ranks: int, *, on_gpu: bool) -> int:
    """Return the number of threads with which a rank verifies, updates and copies chunks. cpus,
    cores: logical processors and physical cores that `ranks` ranks share.

    With a GPU the threads get all of the rank's cores but one, which Python needs. If the CPU
    computes, the threads of all ranks together use a quarter of the processors: more would slow
    compute down.
    """
    return max(1, cores // ranks - 1) if on_gpu else max(1, cpus // 4 // ranks)


Moves = Sequence[tuple[float, float]]
"""Shares of each section of a flat that the first and the second update of a step move."""


@dataclasses.dataclass(frozen=True)
class AtRest:
    """Bytes at rest by kind, of one parameter or of a whole model.

    params: the values that forward computes with. optim: all other states. grads: spilled
    gradients. frozen: parameters without an optimizer. first: bytes that the first of a step's two
    updates moves, where whole matrices are updated. idle: bytes of the other states that the second
    update, or the only one, leaves out.
    """

    params: float = 0.0
    optim: float = 0.0
    grads: float = 0.0
    frozen: float = 0.0
    first: float = 0.0
    idle: float = 0.0

    @classmethod
    def per_param(
        cls, sections: Iterable[Section], *, held: bool = True, moves: Moves = ()
    ) -> AtRest:
        """Return the bytes per parameter of a state format with these sections. held: an optimizer
        owns the parameter; otherwise it is frozen.
        """
        params = optim = grads = first = idle = 0.0
        for index, section in enumerate(sections):
            size = section.itemsize / section.group_numel
            if index < len(moves):
                first += moves[index][0] * size
                idle += (1.0 - moves[index][1]) * size
            if section.name == "grad":
                grads += size
            # The first section is the parameter that computes (`hi` of the exact state).
            elif index == 0:
                params += size
            else:
                optim += size
        # Frozen parameters have no optimizer states, and never a gradient to spill.
        return cls(params, optim, grads, 0.0, first, idle) if held else cls(frozen=params)

    @property
    def states(self) -> float:
        """σ: everything that an update reads and writes, if none of it is idle."""
        return self.params + self.optim

    @property
    def updated(self) -> float:
        """Everything that the second update, or the only one, reads and writes."""
        return self.states - self.idle

    @property
    def total(self) -> float:
        return self.states + self.grads + self.frozen

    def __add__(self, other: AtRest) -> AtRest:
        return AtRest(
            self.params + other.params,
            self.optim + other.optim,
            self.grads + other.grads,
            self.frozen + other.frozen,
            self.first + other.first,
            self.idle + other.idle,
        )

    def scaled(self, *, params: float = 1.0, optim: float = 1.0, grads: float = 1.0) -> AtRest:
        """Multiply each kind by a factor, frozen parameters by that of `params`. A factor is a
        count, or the share that is not resident.
        """
        return AtRest(
            self.params * params, self.optim * optim, self.grads * grads, self.frozen * params,
            self.first * optim, self.idle * optim,
        )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class MoveCounts:
    """Counts of how often one step moves each kind of state over the drives that hold it."""

    params_read: int
    optim_read: int
    states_written: int
    grads_read: int
    grads_written: int
    frozen_read: int


# Cached: a plan calls this for every section of every flat.
@functools.lru_cache(maxsize=64)
def move_counts(update: str, micro_batches: int) -> MoveCounts:
    """Look up the table of the module's docstring. Raises: ValueError for an unknown mode or less
    than one micro-batch.
    """
    if update not in UPDATES:
        raise ValueError(
            f"update={update!r} is not known; use {' or '.join(repr(name) for name in UPDATES)}"
        )
    if micro_batches < 1:
        raise ValueError(f"micro_batches={micro_batches} must be at least 1")
    # With one micro-batch an update in backward consumes gradients at once, so none are stored.
    spills = 0 if update == "backward" and micro_batches == 1 else micro_batches
    return MoveCounts(
        # Delayed passes compute from a copy in memory: further micro-batches read no parameters.
        params_read=2 if update == "delayed" else 2 * micro_batches,
        optim_read=1,
        states_written=1,
        grads_read=spills,
        grads_written=spills,
        # In every mode: no update passes frozen parameters to a gather, and the delayed copy has
        # only parameters with an optimizer.
        frozen_read=2 * micro_batches,
    )


@dataclasses.dataclass(frozen=True)
class Moved:
    """Bytes read and written."""

    read: float = 0.0
    written: float = 0.0

    def __add__(self, other: Moved) -> Moved:
        return Moved(self.read + other.read, self.written + other.written)

    def __sub__(self, other: Moved) -> Moved:
        return Moved(self.read - other.read, self.written - other.written)


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Traffic of a step over the drives, by kind. Bytes of a model, or of one parameter.

    params_read: parameters read for forwards and backwards. states: bytes that updates move,
    including the parameters that they read. grads: spilled gradients. activations: activations
    offloaded to drives, written once and read once per micro-batch. beside_states: the part of
    `total` that can only move in the window of the updates (see the module's formulas). matrices:
    the part that first updates move before that window.
    """

    params_read: float
    states: Moved
    grads: Moved
    activations: Moved
    beside_states: Moved
    matrices: Moved = Moved()

    @property
    def total(self) -> Moved:
        return Moved(self.params_read) + self.states + self.grads + self.activations

    @property
    def rest(self) -> Moved:
        """Traffic outside of the updates' window."""
        return self.total - self.beside_states - self.matrices


def traffic(
    on_nvme: AtRest, update: str, micro_batches: int, *, activations: float = 0.0
) -> Traffic:
    """Count the traffic of one step. on_nvme: bytes at rest on NVMe. activations: bytes that one
    micro-batch offloads to NVMe.

    >>> exact = traffic(AtRest(params=2, optim=10), "deferred", 1).total
    >>> exact.read, exact.written
    (14.0, 12.0)
    """
    how = move_counts(update, micro_batches)
    # The update's read of the parameters counts as states. With "backward" the update reads none:
    # backward has gathered them.
    fed = 0 if update == "backward" else 1
    first = Moved(on_nvme.first, on_nvme.first)
    states = first + Moved(
        fed * on_nvme.params + (on_nvme.optim - on_nvme.idle) * how.optim_read,
        on_nvme.updated * how.states_written,
    )
    gathers = (how.params_read - fed) * on_nvme.params + how.frozen_read * on_nvme.frozen
    grads = Moved(how.grads_read * on_nvme.grads, how.grads_written * on_nvme.grads)
    spilled = Moved(micro_batches * activations, micro_batches * activations)
    parts = gathers, states, grads, spilled
    return _in_its_time(*parts, update, micro_batches, on_nvme.frozen, first)


def measured_traffic(
    moved: Moved,
    params_read: float,
    update: str,
    micro_batches: int,
    *,
    grads: Moved = Moved(),
    activations: Moved = Moved(),
    frozen: float = 0.0,
) -> Traffic:
    """Divide the measured bytes of a step by kind.

    moved: all bytes over the drives. params_read, grads, activations: the parts of `moved` for
    gathers, spilled gradients and activations. The remaining bytes count as states. frozen: the
    part of `params_read` that one forward reads for parameters without an optimizer.
    """
    move_counts(update, micro_batches)  # checks both
    # The parts count when a transfer begins, and `moved` when it ends, so transfers in flight may
    # make the parts larger than the whole.
    params_read, grads_read, back, states_read = _parts_of(
        moved.read, params_read, grads.read, activations.read
    )
    grads_written, out, states_written = _parts_of(
        moved.written, grads.written, activations.written
    )
    states, grads, activations = (
        Moved(states_read, states_written),
        Moved(grads_read, grads_written),
        Moved(back, out),
    )
    return _in_its_time(
        params_read, states, grads, activations, update, micro_batches, min(frozen, params_read)
    )


def _parts_of(whole: float, *parts: float) -> list[float]:
    """Limit each part to what earlier parts leave of the whole; append the last remainder."""
    found = []
    for part in parts:
        found.append(min(part, whole))
        whole -= found[-1]
    return [*found, whole]


def _in_its_time(
    params_read: float,
    states: Moved,
    grads: Moved,
    activations: Moved,
    update: str,
    micro_batches: int,
    frozen: float,
    first: Moved = Moved(),
) -> Traffic:
    """Split traffic: bytes that must move in the window of the updates, `first`, which move before
    it, and the rest."""
    if update == "delayed":
        # The window is the whole next step, which contains all traffic.
        window = Moved(params_read) + states + grads + activations
    elif update == "backward":
        # The window is the last backward and the next first forward: two of 2M reads of parameters,
        # one of M reads of activations (by that backward), and one of M writes (by that forward).
        window = states + Moved(
            (params_read + activations.read) / micro_batches, activations.written / micro_batches
        )
    else:
        # The window is the first forward. The update passes parameters to it, so it reads only
        # frozen ones, and it writes its activations. The update reads a spilled gradient once.
        window = states + Moved(
            grads.read / micro_batches + frozen, activations.written / micro_batches
        )
    # First updates in backward are in the window, too.
    matrices = Moved() if update == "backward" else first
    return Traffic(params_read, states, grads, activations, window - matrices, matrices)


@dataclasses.dataclass(frozen=True)
class Drives:
    """Bandwidths of all drives together, in bytes per second. shared: reads and writes share a
    drive's time.
    """

    read_bytes_per_s: float
    write_bytes_per_s: float
    shared: bool = True

    def __post_init__(self) -> None:
        for name in ("read_bytes_per_s", "write_bytes_per_s"):
            value = getattr(self, name)
            # `not value > 0` is also true of NaN.
            if not value > 0 or value == float("inf"):
                raise ValueError(f"{name}={value} must be a positive number of bytes per second")

    def io_s(self, moved: Moved) -> float:
        """Return the least time that these bytes take."""
        read_s, write_s = moved.read / self.read_bytes_per_s, moved.written / self.write_bytes_per_s
        # Reads and writes share the drive's time, so their times add up.
        return read_s + write_s if self.shared else max(read_s, write_s)

    def scaled(self, factor: float) -> Drives:
        """Multiply the bandwidths, for example for a different number of equal drives."""
        return dataclasses.replace(
            self,
            read_bytes_per_s=self.read_bytes_per_s * factor,
            write_bytes_per_s=self.write_bytes_per_s * factor,
        )


@dataclasses.dataclass(frozen=True)
class Compute:
    """Compute seconds of a step's passes, without waits: the first forward, the last backward, and
    the passes between. matrices_s: of the transformation of whole matrices.
    """

    # Separate, because the window of an update contains the first forward, and with "backward" also
    # the last backward.
    first_forward_s: float
    last_backward_s: float
    between_s: float = 0.0
    matrices_s: float = 0.0

    @classmethod
    def of(cls, forward_s: float, backward_s: float, micro_batches: int = 1) -> Compute:
        """Return the times of `micro_batches` equal passes."""
        return cls(forward_s, backward_s, (micro_batches - 1) * (forward_s + backward_s))

    @property
    def total_s(self) -> float:
        """The whole step."""
        return self.passes_s + self.matrices_s

    @property
    def passes_s(self) -> float:
        """All passes."""
        return self.first_forward_s + self.between_s + self.last_backward_s

    @property
    def rest_s(self) -> float:
        """Time of all passes but the first forward."""
        return self.between_s + self.last_backward_s


@dataclasses.dataclass(frozen=True)
class Limits:
    """Seconds per step. floor_s: of any schedule; schedule_s: of the update mode that is used;
    compute_s, io_s: the terms of the floor; other_s: the largest of the further terms (links,
    memory, update kernels), 0.0 where none was given."""

    floor_s: float
    schedule_s: float
    compute_s: float
    io_s: float
    other_s: float = 0.0

    def eta(self, measured_s: float) -> tuple[float, float]:
        """Return η, limit / measured: (of the floor, of the schedule's limit)."""
        return self.floor_s / measured_s, self.schedule_s / measured_s


def limits(
    moved: Traffic,
    compute: Compute,
    drives: Drives | None,
    update: str = "deferred",
    *,
    movable_bytes: float = 0.0,
    update_s: float = 0.0,
    others: Iterable[BusyTime] = (),
    apart: bool = False,
) -> Limits:
    """Return the limits of a step. drives: None where nothing rests on NVMe.

    update_s: time of the update, which overlaps with the I/O of states. others: further busy
    resources (links between CPU and GPUs, the CPU's memory); each overlaps with everything in the
    same part of the step. movable_bytes: bytes of states that can move during backward instead of
    the first forward, given enough memory. apart: a deferred update ends before the next forward
    begins (`update_on="device"`).
    """
    others = tuple(others)
    other_s = max([update_s, *(other.total_s for other in others)])
    window_s = max([0.0, *(other.beside_states_s for other in others)])
    beyond_s = max([0.0, *(other.rest_s for other in others)])
    # Without drives, a huge bandwidth makes their terms 0. `Drives` refuses inf.
    drives = drives or Drives(sys.float_info.max, sys.float_info.max)
    io_s = drives.io_s(moved.total)
    floor_s = max(compute.total_s, io_s, other_s)
    matrices_s = max(
        [compute.matrices_s, drives.io_s(moved.matrices), *(other.matrices_s for other in others)]
    )
    if update == "delayed":
        # The whole step is one window, so all terms overlap, as in the floor.
        busy = (other.total_s - other.matrices_s for other in others)
        windows_io_s = drives.io_s(moved.total - moved.matrices)
        schedule_s = matrices_s + max([compute.passes_s, windows_io_s, update_s, *busy])
    elif update == "backward":
        # An update may run from the moment its gradient exists until the end of the next forward.
        passes_s = compute.first_forward_s + compute.last_backward_s
        window_s = max(window_s, passes_s + compute.matrices_s)
        states_s = max(drives.io_s(moved.beside_states), update_s)
        schedule_s = max(window_s, states_s) + max(
            compute.between_s, beyond_s, drives.io_s(moved.rest)
        )
    elif apart:
        # No pass computes while opt.step() updates, so the window's I/O overlaps with no compute.
        states_s = max(drives.io_s(moved.beside_states), update_s)
        schedule_s = matrices_s + max(window_s, states_s) + max(
            compute.passes_s, beyond_s, drives.io_s(moved.rest)
        )
    else:
        schedule_s = matrices_s + deferred_s(
            states_s=max(drives.io_s(moved.beside_states), update_s),
            rest_io_s=drives.io_s(moved.rest),
            # If links make the window longer than the forward, more I/O of states overlaps with it.
            first_forward_s=max(compute.first_forward_s, window_s),
            rest_s=max(compute.rest_s, beyond_s),
            movable_s=_movable_s(moved, drives, movable_bytes),
        )
    return Limits(floor_s, max(schedule_s, floor_s), compute.total_s, io_s, other_s)


def deferred_s(
    *,
    states_s: float,
    rest_io_s: float,
    first_forward_s: float,
    rest_s: float,
    movable_s: float = 0.0,
) -> float:
    """Return the limit of a deferred update when up to `movable_s` of the states' I/O may move from
    the first forward to the remaining passes.

    Moves only as much as helps: until the first forward hides the states' I/O, or the remaining
    passes cannot hide more.
    """
    helpful_s = min(states_s - first_forward_s, rest_s - rest_io_s, movable_s)
    moved_s = max(helpful_s, 0.0)
    return max(first_forward_s, states_s - moved_s) + max(rest_s, rest_io_s + moved_s)


def _movable_s(moved: Traffic, drives: Drives, movable_bytes: float) -> float:
    """Return the time of the movable bytes, with the same mix of reads and writes as the states."""
    states = moved.states.read + moved.states.written
    if not states or movable_bytes <= 0:
        return 0.0
    return drives.io_s(moved.states) * min(movable_bytes / states, 1.0)


# -- Planning --------------------------------------------------------------------------------------


def compute_flops(
    active_params: float,
    tokens: float,
    *,
    recompute: bool = False,
    frozen_params: float = 0.0,
    layers: int = 0,
    attention_width: int = 0,
    sequence: int = 0,
) -> tuple[float, float]:
    """Floating-point operations of (forward, backward) for `tokens` tokens; recompute: backward
    does forward once more. frozen_params: the active parameters that are not trained.

    Per active parameter and token: 2 in forward, 4 in backward (2 if the parameter is frozen).
    Causal attention in forward: 2 x sequence x width per layer and token.
    """
    # Attention: scores, and the product of scores and values, take 2 x sequence x width each, and
    # the causal mask halves both.
    forward = tokens * (2.0 * active_params + 2.0 * layers * attention_width * sequence)
    # For each product of forward, backward has two: the gradients of the input and of the weight.
    # Frozen weights have no gradient.
    return forward, (3.0 if recompute else 2.0) * forward - tokens * 2.0 * frozen_params


def days_of_life(written_bytes: float, step_s: float, rated_tb: float, drives: float = 1) -> float:
    """Return the days until `drives` drives have been written as often as they are rated for,
    `rated_tb` terabytes each; inf without writes.
    """
    # Ratings are in decimal terabytes; a day has 86,400 s.
    return (
        rated_tb * 1e12 * drives * step_s / written_bytes / 86_400
        if written_bytes > 0
        else float("inf")
    )
