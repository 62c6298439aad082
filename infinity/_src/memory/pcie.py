"""Copies of a step between the CPU and its GPUs, and the time that links need for them: pure
arithmetic.

Bytes to the GPUs (h2d) and from them (d2h), all GPUs together, for parameters of P bytes that an
update writes, gradients of G, states of S in all (P among them), with M passes through the model
(micro-batches, or 1 if all of them pass a block before the next):

    update on                 h2d                              d2h
    "cpu"                     2M P + (M - 1) G                 M G
    "device"                  2M P + M G + S                   M G + S
    "device", "backward"      2M P + (M - 1) G + (S - P)       (M - 1) G + S

A forward and a backward gather once each, so M of both gather 2M times; recomputing in backward
uses units that backward gathered. An update on the CPU passes its parameters to the next forward's
gather. An update on the GPU ends before that forward begins, with its parameters at rest: all but
the few gathered units are copied up once more. Gradients of further micro-batches are added on the
GPU: the sum so far goes up, the new one down. In exact (P 2, G 2, S 12 bytes) and M = 1 that is 4
up and 2 down for each parameter with the update on the CPU, 18 up and 14 down on the GPU. "device"
with "backward" is not built; there the last micro-batch's gradient would never leave the GPU, and
the parameters go up once: 14 and 12.

Several GPUs: each copies its share over its link, and gets the other shares from the other GPUs
(`plan.ranks`). GPUs without direct links exchange shares through the CPU's memory, over the same
PCIe links, which counts here, too.
"""

from __future__ import annotations

import dataclasses

UPDATES_ON = ("cpu", "device")
"""Places where states are updated; `Policy.update_on` has these names."""


@dataclasses.dataclass(frozen=True)
class Copied:
    """Bytes copied to GPUs (h2d) and from them (d2h)."""

    h2d: float = 0.0
    d2h: float = 0.0

    @property
    def total(self) -> float:
        return self.h2d + self.d2h

    def __add__(self, other: Copied) -> Copied:
        return Copied(self.h2d + other.h2d, self.d2h + other.d2h)

    def scaled(self, factor: float) -> Copied:
        return Copied(self.h2d * factor, self.d2h * factor)


@dataclasses.dataclass(frozen=True)
class Copies:
    """Copies of a step in the parts of `roofline.Traffic`: inside the window of the updates,
    outside, and of whole matrices.
    """

    beside_states: Copied = Copied()
    rest: Copied = Copied()
    matrices: Copied = Copied()

    @property
    def total(self) -> Copied:
        return self.beside_states + self.rest + self.matrices

    def __add__(self, other: Copies) -> Copies:
        return Copies(
            self.beside_states + other.beside_states,
            self.rest + other.rest,
            self.matrices + other.matrices,
        )

    def scaled(self, factor: float) -> Copies:
        parts = (self.beside_states, self.rest, self.matrices)
        return Copies(*(part.scaled(factor) for part in parts))


@dataclasses.dataclass(frozen=True)
class LinkSpeed:
    """Bytes per second of a link, or of several together. Directions are independent: PCIe has
    lanes, and a GPU a copy engine, for each."""

    h2d_bytes_per_s: float
    d2h_bytes_per_s: float

    def __post_init__(self) -> None:
        for name in ("h2d_bytes_per_s", "d2h_bytes_per_s"):
            value = getattr(self, name)
            # `not value > 0` is also true of NaN.
            if not value > 0 or value == float("inf"):
                raise ValueError(f"{name}={value} must be a positive number of bytes per second")

    def busy_s(self, copied: Copied) -> float:
        """Return the least time that these copies take: the slower direction's."""
        return max(copied.h2d / self.h2d_bytes_per_s, copied.d2h / self.d2h_bytes_per_s)

    def busy_time(self, copies: Copies) -> BusyTime:
        """Return the least time of each part of a step."""
        return BusyTime(
            self.busy_s(copies.beside_states), self.busy_s(copies.rest), self.busy_s(copies.total),
            self.busy_s(copies.matrices),
        )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class BusyTime:
    """Least seconds that a resource is busy: inside the window of the updates, and outside.

    total_s: for the step as one window; less than the sum of the parts if these use different
    directions. matrices_s: while whole matrices are made (`memory.roofline`).
    """

    beside_states_s: float
    rest_s: float
    total_s: float
    matrices_s: float = 0.0

    @classmethod
    def sum_of(
        cls, beside_states_s: float, rest_s: float = 0.0, matrices_s: float = 0.0
    ) -> BusyTime:
        """Return the times of a resource without directions."""
        return cls(beside_states_s, rest_s, beside_states_s + rest_s + matrices_s, matrices_s)


@dataclasses.dataclass(frozen=True)
class ModelBytes:
    """Bytes of a model that a step copies, over all GPUs: parameters that an update writes, its
    states in all (parameters among them), gradients as they wait, parameters that no optimizer
    holds, activations of a micro-batch that wait in the CPU's memory or on drives. first: that the
    first of two updates in a step moves in the CPU's memory."""

    params: float = 0.0
    states: float = 0.0
    grads: float = 0.0
    frozen: float = 0.0
    activations: float = 0.0
    first: float = 0.0


def copies(
    sizes: ModelBytes,
    update: str,
    micro_batches: int,
    *,
    update_on: str = "cpu",
    params_stay: bool = False,
    grads_wait: bool = False,
) -> Copies:
    """Count the copies of one step (the module's table). params_stay: parameters rest on the GPUs.
    grads_wait: with update="backward" gradients wait all the same, for a step that decides
    otherwise.

    >>> exact = copies(ModelBytes(params=2, states=12, grads=2), "deferred", 1)
    >>> exact.total.h2d, exact.total.d2h
    (4.0, 2.0)

    Raises: ValueError for an unknown `update_on`.
    """
    if update_on not in UPDATES_ON:
        raise ValueError(
            f"update_on={update_on!r} is not known; use "
            f"{' or '.join(repr(name) for name in UPDATES_ON)}"
        )
    more = micro_batches - 1
    on_device = update_on == "device"
    # True if the last micro-batch's gradients leave the GPU: an update in backward consumes them
    # there.
    waits = not on_device or update != "backward" or grads_wait
    states = _states(sizes, update, params_stay) if on_device else Copied()
    if on_device and update != "backward":
        # Gradients waited in the CPU's memory, and the update on the GPU needs them back.
        states += Copied(sizes.grads)
    gathered = sizes.params + sizes.frozen
    if params_stay:
        # Parameters that stay are copied once, after an update on the CPU. An update on the GPU
        # leaves them in place.
        first, gathers = Copied() if on_device else Copied(sizes.params), 0
    else:
        # The update hands over to the next forward, so that gather alone belongs to its window. The
        # other 2M - 1 gathers do not.
        first, gathers = Copied(gathered), 2 * micro_batches - 1
    # For each further micro-batch the sum so far is copied up, and added to on the GPU.
    grads = Copied(more * sizes.grads, (more + waits) * sizes.grads)
    activations = Copied(sizes.activations, sizes.activations)
    total = first + Copied(gathers * gathered) + grads + activations.scaled(micro_batches) + states
    if update == "delayed":
        # A delayed update has the whole next step as its window, so nothing is outside.
        return Copies(total)
    if update == "backward":
        # The window is the last backward and the next forward: a gather each, the gradients and
        # activations of one micro-batch.
        window = first + states + activations + Copied(gathered if gathers else 0.0)
        window += Copied(sizes.grads if more else 0.0, sizes.grads if waits else 0.0)
    elif on_device:
        # The update runs inside opt.step(), so no pass shares its window.
        window = states
    else:
        # The next forward is the window. It copies its activations out; backward copies them back.
        window = first + states + Copied(0.0, sizes.activations)
    return _divided(total, window)


def _states(sizes: ModelBytes, update: str, params_stay: bool) -> Copied:
    """Count the states that an update on the GPU copies in and out, less the saved gathers: of
    parameters that stay, and of parameters that backward has gathered.
    """
    saved = sizes.params if update == "backward" or params_stay else 0.0
    # Only h2d is saved where backward has gathered: parameters that do not stay are written back
    # like every other state.
    return Copied(sizes.states - saved, sizes.states - (sizes.params if params_stay else 0.0))


def measured_copies(
    copied: Copied,
    update: str,
    micro_batches: int,
    *,
    activations: Copied = Copied(),
    states: Copied = Copied(),
    sums_h2d: float = 0.0,
) -> Copies:
    """Sort the counted bytes of a step as `copies` does.

    activations, states: the parts of `copied` that these took (states of updates on the GPU,
    gradients of these included). sums_h2d: sums of gradients copied up. Other bytes count as
    gathers and gradients.
    """
    # No part may exceed the whole, or the remainder for gathers and gradients would be negative.
    back, up = (min(part, copied.h2d) for part in (activations.h2d, states.h2d))
    out, down = (min(part, copied.d2h) for part in (activations.d2h, states.d2h))
    grads = max(copied.d2h - out - down, 0.0) / micro_batches
    sums = min(sums_h2d, copied.h2d)
    gathers = max(copied.h2d - back - up - sums, 0.0)
    if update == "delayed":
        return Copies(copied)
    if update == "backward":
        # Sums go up M - 1 times. The window has the last of them, two of 2M gathers, and the
        # gradients and activations of one of M micro-batches.
        last = sums / (micro_batches - 1) if micro_batches > 1 else 0.0
        window = Copied(
            up + (gathers + back) / micro_batches + last, down + grads + out / micro_batches
        )
    else:
        # One of 2M gathers is in the window: the next forward's.
        window = Copied(up + gathers / (2 * micro_batches), down + out / micro_batches)
    return _divided(copied, window)


def _divided(total: Copied, window: Copied) -> Copies:
    """Divide `total` into `window` and a remainder, which is never negative."""
    window = Copied(min(window.h2d, total.h2d), min(window.d2h, total.d2h))
    return Copies(window, Copied(total.h2d - window.h2d, total.d2h - window.d2h))


def dram_s(
    drive_bytes: float,
    copied_bytes: float,
    updated_bytes: float,
    bytes_per_s: float,
    *,
    added_bytes: float = 0.0,
) -> float:
    """Return the time on the CPU's memory. Bytes of drives and copies pass it once. An update on
    the CPU reads and writes every state and reads gradients (updated_bytes: 2 S + G).

    added_bytes: of gradients that the CPU adds up.
    """
    return (drive_bytes + copied_bytes + updated_bytes + added_bytes) / bytes_per_s
