"""Formulas for the bytes that an optimizer step must move, and for its shortest time: pure
arithmetic.

Bytes over the drives, for states that rest there, with M passes through the model. In the
horizontal schedule each micro-batch is a pass. In the vertical one all micro-batches pass a block
before the next (`inf.microbatched`), and M is 1:

                                                       other     states    spilled gradients
    update      parameters read                        states    written   read and written
    deferred    2M: the update feeds the first forward 1 read    1         M times
    backward    2M: the update has them from memory    1 read    1         M times, none if M = 1
    delayed     2: by the update, and into a copy      1 read    1         M times
    (frozen)    2M                                     -         -         -

An optimizer of whole matrices updates twice in a step: the first update moves the momentum, and the
second one the masters. Both leave out what they do not need. `AtRest.first` has the bytes of the
first one, `AtRest.idle` those that the second one leaves out: in exact 4 and 4 of 8 bytes at rest,
so 10 + 4(M - 1) are read and 8 written for each parameter.

In exact (2 bytes of parameter, 10 of other states) that is 14 + 4(M - 1) read and 12 written for
each parameter in the first two modes; with "delayed", whose passes compute from the copy, 14 and 12
for any M. Resident states move nothing. Units that stay gathered between two passes may save a
little more (`turning_bytes_max`), a bounded correction outside the formulas.

Seconds per step, for a model whose passes compute for some time, on drives with bandwidths B_r and
B_w:

    io(r, w)   = r / B_r + w / B_w where reads and writes share a drive's time,
                 else max(r / B_r, w / B_w)
    floor      = max(compute, io of everything, what links and the CPU's memory need):
                 no schedule is faster
    deferred   = max(first forward, io of states) + max(rest, io of the rest):
                 no update before backward ends
    backward   = max(last backward + first forward, io of states and of their two passes)
                 + max(rest, io of the rest)
    delayed    = floor
    matrices   = max(their transformation, io of the first updates, what links need), before the
                 first forward and beside nothing: one more term. With "backward" backward waits for
                 each matrix, beside the io of all: a term of the last backward.

Links to GPUs (`infinity._src.memory.pcie`) and the CPU's memory need time, too: in each of the two
parts that is one more term of the part's max.

A deferred update is faster if states are read ahead and written late, during backward, as far as
memory allows: `movable_bytes`. η is a limit divided by the measured time.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Iterable, Sequence

from infinity._src.cabi.records import Section
from infinity._src.memory.pcie import BusyTime

UPDATES = ("deferred", "backward", "delayed")
"""Update modes, by the time at which states are updated; `Policy.update` has these names."""

EXAMPLE_TBW = 600
"""Terabytes written that a consumer drive of 1 TB is commonly rated for. Used as an example
where the rating of a drive is not known.
"""
WEAR_LEAST_S = 600.0
"""Time of steps from which on their writes are extrapolated to days and to the life of a drive."""


def update_threads(cpus: int, cores: int, ranks: int, *, on_gpu: bool) -> int:
    """Return the threads that verify, update and copy chunks, of one of the ranks that share so
    many processors (`cpus`) and physical cores.

    With a GPU they get all cores but one, which Python and the loop need. If the CPU computes, all
    ranks' threads together are a quarter of the processors: more would slow compute down.
    """
    return max(1, cores // ranks - 1) if on_gpu else max(1, cpus // 4 // ranks)


Moves = Sequence[tuple[float, float]]
"""Shares of each section of a flat that the first and the second update of a step move."""


@dataclasses.dataclass(frozen=True)
class AtRest:
    """Bytes at rest by kind, of one parameter or of a whole model: the values that compute, the
    other states, spilled gradients.

    frozen: parameters that no optimizer holds. first: bytes that the first of a step's two updates
    moves, where matrices are updated whole. idle: of the other states, bytes that the second one,
    or the only one, leaves out.
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
        """Bytes per parameter in a state format, from its sections in order. held: by an optimizer;
        else it is frozen.
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
        """Multiply each kind by a factor; frozen parameters go with `params`. Factors are 1 - φ of
        what is resident, or counts.
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


# A plan asks for every section of every flat.
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
        # Delayed passes compute from a copy in memory, so they read no more with further
        # micro-batches.
        params_read=2 if update == "delayed" else 2 * micro_batches,
        optim_read=1,
        states_written=1,
        grads_read=spills,
        grads_written=spills,
        # In every mode: updates do not pass on frozen parameters, and the delayed copy has only
        # parameters with an optimizer.
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
    """Traffic of a step over the drives, by kind and by when it may move. Bytes of a model, or of
    one parameter.

    params_read: parameters for a forward or a backward; states: bytes that updates move, parameters
    that they read included; grads: spilled gradients; activations: bytes that wait for backward on
    a drive, written once and read once per micro-batch. beside_states: the part of `total` that can
    only move in the window of the updates (see the module). matrices: the part that moves before
    that window, in first updates.
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
    """Count the traffic of one step. `on_nvme`: bytes at rest there; `activations`: bytes that one
    micro-batch spills there.

    >>> exact = traffic(AtRest(params=2, optim=10), "deferred", 1).total
    >>> exact.read, exact.written
    (14.0, 12.0)
    """
    how = move_counts(update, micro_batches)
    # One read of the parameters is the update's own and counts among the states. With "backward"
    # the update has them in memory: backward has gathered them.
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
    """Sort the counted bytes of a step by kind.

    moved: all bytes over the drives. params_read, grads, activations: the part of them that gathers
    read, that spilled gradients move, and that activations move. Other bytes count as states.
    frozen: of `params_read`, the bytes that one forward reads of parameters that no optimizer
    holds.
    """
    move_counts(update, micro_batches)  # checks both
    # Reads are counted where they begin and `moved` where they end, so what is in flight may make
    # parts larger than the whole.
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
    """Limit each part to the remainder after the parts before it; append the last remainder."""
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
        # The update overlaps the whole next step, so everything may move in the window.
        window = Moved(params_read) + states + grads + activations
    elif update == "backward":
        # The window is the last backward and the next first forward: two of 2M reads of parameters.
        # Activations of one in M micro-batches are read there, by backward, and of one written.
        window = states + Moved(
            (params_read + activations.read) / micro_batches, activations.written / micro_batches
        )
    else:
        # The window is the first forward, which the update feeds: it reads frozen parameters only,
        # and writes its activations. The update reads a spilled gradient once.
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
        """Multiply the bandwidths, as by another drive beside equal ones."""
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

    # An update's window is the first forward, and with "backward" also the last backward, so the
    # limits need both.
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

    update_s: time of the update, in parallel to the I/O of states. others: further resources that
    are busy (links between CPU and GPUs, the CPU's memory), each in parallel to all else in the
    same part of the step. movable_bytes: bytes of states that memory lets move during backward
    instead of during the first forward. apart: a deferred update is over before the next forward
    begins (`update_on="device"`).
    """
    others = tuple(others)
    other_s = max([update_s, *(other.total_s for other in others)])
    window_s = max([0.0, *(other.beside_states_s for other in others)])
    beyond_s = max([0.0, *(other.rest_s for other in others)])
    # Without drives their terms become 0 and drop out of every max. `Drives` refuses inf.
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
        # An update in backward may run from its gradient on until the next forward has ended.
        passes_s = compute.first_forward_s + compute.last_backward_s
        window_s = max(window_s, passes_s + compute.matrices_s)
        states_s = max(drives.io_s(moved.beside_states), update_s)
        schedule_s = max(window_s, states_s) + max(
            compute.between_s, beyond_s, drives.io_s(moved.rest)
        )
    elif apart:
        # No pass computes while opt.step() updates, so compute hides no I/O of the window.
        states_s = max(drives.io_s(moved.beside_states), update_s)
        schedule_s = matrices_s + max(window_s, states_s) + max(
            compute.passes_s, beyond_s, drives.io_s(moved.rest)
        )
    else:
        schedule_s = matrices_s + deferred_s(
            states_s=max(drives.io_s(moved.beside_states), update_s),
            rest_io_s=drives.io_s(moved.rest),
            # Time of links in the window lengthens the forward, and more I/O of states hides behind
            # it.
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
    """Return the limit of a deferred update when up to `movable_s` of the states' I/O may move
    beside the rest.

    Moves as much as helps: until the first forward hides the states, or the remaining passes can
    hide no more.
    """
    helpful_s = min(states_s - first_forward_s, rest_s - rest_io_s, movable_s)
    moved_s = max(helpful_s, 0.0)
    return max(first_forward_s, states_s - moved_s) + max(rest_s, rest_io_s + moved_s)


def _movable_s(moved: Traffic, drives: Drives, movable_bytes: float) -> float:
    """Return the time of the movable bytes, in the states' own mix of reads and writes."""
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

    2 per active parameter and token forward, 4 backward (2 if it is frozen), and causal attention:
    2 x sequence x width per layer and token.
    """
    # Attention: scores and their product with the values take 2 x sequence x width each, and the
    # causal mask leaves half of both.
    forward = tokens * (2.0 * active_params + 2.0 * layers * attention_width * sequence)
    # Backward has two products for each one of forward: gradients of the input and of the weight.
    # Frozen weights need none of their gradients.
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
