"""Copies of a step between the CPU and its GPUs, and the time that links need for them: pure
arithmetic.

Bytes to the GPUs (h2d) and from them (d2h), all GPUs together, for parameters of P bytes that an
update writes, gradients of G, states of S in all (P among them), with M passes through the model
(micro-batches, or 1 if all of them pass a block before the next):

    update on                 h2d                              d2h
    "cpu"                     2M P + (M - 1) G                 M G
    "device"                  2M P + M G + S                   M G + S
    "device", "backward"      2M P + (M - 1) G + (S - P)       (M - 1) G + S

A forward and a backward gather once each, so M of both gather 2M times; recomputation in backward
uses units that backward has gathered. An update on the CPU passes its parameters to the next
forward's gather. An update on the GPU ends before that forward begins, and leaves its parameters at
rest: all units but the few gathered ones are copied to the GPU once more. Gradients of further
micro-batches are added on the GPU: the previous sum is copied to the GPU, and the new sum back. In
the exact format (P 2, G 2, S 12 bytes) with M = 1, each parameter copies 4 bytes h2d and 2 d2h with
the update on the CPU, 18 and 14 on the GPU. "device" with "backward" is not built: there the last
micro-batch's gradient would never leave the GPU, and the parameters would be copied once: 14 and
12.

With several GPUs, each copies its share over its link, and gets the other shares from the other
GPUs (`plan.ranks`). GPUs without direct links exchange shares through the CPU's memory, over the
same PCIe links; these copies are counted here, too.
"""

from __future__ import annotations

import dataclasses

UPDATES_ON = ("cpu", "device")
"""Values of `Policy.update_on`: the processor that updates states."""


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
    """Copies of a step in the parts of `roofline.Traffic`: inside the window of the updates
    (`beside_states`), outside (`rest`), and of whole matrices.
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
    """Bytes per second of a link, or of several together. The directions are independent: PCIe has
    separate lanes for each, and a GPU a separate copy engine."""

    h2d_bytes_per_s: float
    d2h_bytes_per_s: float

    def __post_init__(self) -> None:
        for name in ("h2d_bytes_per_s", "d2h_bytes_per_s"):
            value = getattr(self, name)
            # `not value > 0` is also true of NaN.
            if not value > 0 or value == float("inf"):
                raise ValueError(f"{name}={value} must be a positive number of bytes per second")

    def busy_s(self, copied: Copied) -> float:
        """Return the least time that these copies take: the time of the slower direction."""
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
    """Bytes of a model that a step copies, over all GPUs.

    params: parameters that an update writes. states: all states, these parameters included. grads:
    gradients as they are stored. frozen: parameters without an optimizer. activations: of one
    micro-batch, offloaded to the CPU's memory or to drives. first: bytes that the first of two
    updates in a step moves in the CPU's memory."""

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
    """Count the copies of one step (see the module's table). params_stay: parameters rest on the
    GPUs. grads_wait: update="backward" also stores gradients, in case the step must be redone.

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
    # False if the last micro-batch's gradients stay on the GPU, where an update in backward
    # consumes them.
    waits = not on_device or update != "backward" or grads_wait
    states = _states(sizes, update, params_stay) if on_device else Copied()
    if on_device and update != "backward":
        # The gradients are in the CPU's memory, and the update on the GPU needs them.
        states += Copied(sizes.grads)
    gathered = sizes.params + sizes.frozen
    if params_stay:
        # Parameters that stay are copied once, after an update on the CPU. An update on the GPU
        # leaves them in place.
        first, gathers = Copied() if on_device else Copied(sizes.params), 0
    else:
        # The next forward gathers inside the window of the updates; the other 2M - 1 gathers are
        # outside.
        first, gathers = Copied(gathered), 2 * micro_batches - 1
    # For each further micro-batch the previous sum is copied to the GPU, which adds to it.
    grads = Copied(more * sizes.grads, (more + waits) * sizes.grads)
    activations = Copied(sizes.activations, sizes.activations)
    total = first + Copied(gathers * gathered) + grads + activations.scaled(micro_batches) + states
    if update == "delayed":
        # The window of a delayed update is the whole next step.
        return Copies(total)
    if update == "backward":
        # The window is the last backward and the next forward: one gather in each, and the
        # gradients and activations of one micro-batch.
        window = first + states + activations + Copied(gathered if gathers else 0.0)
        window += Copied(sizes.grads if more else 0.0, sizes.grads if waits else 0.0)
    elif on_device:
        # The update runs inside opt.step(), so no pass shares its window.
        window = states
    else:
        # The window is the next forward, which copies its activations to the host; backward, which
        # copies them back, is outside.
        window = first + states + Copied(0.0, sizes.activations)
    return _divided(total, window)


def _states(sizes: ModelBytes, update: str, params_stay: bool) -> Copied:
    """Count the states that an update on the GPU copies, without parameters that are there already:
    because they rest on the GPU, or because backward has gathered them.
    """
    saved = sizes.params if update == "backward" or params_stay else 0.0
    # d2h: parameters that do not rest on the GPU are written back like all other states.
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
    """Divide the measured bytes of a step into the two parts that `copies` returns.

    activations, states: the parts of `copied` for activations, and for states of updates on the GPU
    with their gradients. sums_h2d: sums of gradients copied to the GPU. The remaining bytes count
    as gathers and gradients.
    """
    # Limit each part to the whole, so that the remainder is not negative.
    back, up = (min(part, copied.h2d) for part in (activations.h2d, states.h2d))
    out, down = (min(part, copied.d2h) for part in (activations.d2h, states.d2h))
    grads = max(copied.d2h - out - down, 0.0) / micro_batches
    sums = min(sums_h2d, copied.h2d)
    gathers = max(copied.h2d - back - up - sums, 0.0)
    if update == "delayed":
        return Copies(copied)
    if update == "backward":
        # Sums are copied to the GPU M - 1 times. The window contains the last of these copies, two
        # of 2M gathers, and the gradients and activations of one of M micro-batches.
        last = sums / (micro_batches - 1) if micro_batches > 1 else 0.0
        window = Copied(
            up + (gathers + back) / micro_batches + last, down + grads + out / micro_batches
        )
    else:
        # The window contains one of 2M gathers: the next forward's.
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
    """Return the time for which the CPU's memory is busy.

    drive_bytes, copied_bytes: traffic of drives and copies, each read or written once.
    updated_bytes: an update on the CPU reads and writes every state and reads gradients (2 S + G).
    added_bytes: of gradients that the CPU adds up.
    """
    return (drive_bytes + copied_bytes + updated_bytes + added_bytes) / bytes_per_s
