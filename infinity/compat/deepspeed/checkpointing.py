"""`deepspeed.checkpointing`: activation checkpointing, implemented by torch.utils.checkpoint.

The policy sets the tier that stores the inputs of checkpointed blocks (`activation_checkpointing`
in the configuration, or `inf.Policy(activations=)`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from infinity.compat.deepspeed.errors import DeepSpeedRefusal

log = logging.getLogger("infinity")

_configured = False


def checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """Run a function without saving its activations; backward runs it again, with the same random
    numbers.
    """
    return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False)


def configure(
    mpu_: Any = None,  # noqa: ARG001
    deepspeed_config: Any = None,  # noqa: ARG001 - the engine has read it
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Accept DeepSpeed's settings of activation checkpointing; none has an effect. Raises:
    DeepSpeedRefusal for partition_activations (no ranks share a layer) and for checkpoint_in_cpu,
    which must be set in the configuration.
    """
    global _configured
    if partition_activations:
        raise DeepSpeedRefusal(
            "checkpointing.configure(partition_activations=True): no ranks share a layer; leave it "
            "out"
        )
    if checkpoint_in_cpu:
        raise DeepSpeedRefusal(
            "checkpointing.configure(checkpoint_in_cpu=True): write "
            '"activation_checkpointing": {"cpu_checkpointing": true} into the configuration of '
            "initialize"
        )
    unused = {"contiguous_checkpointing": contiguous_checkpointing, "profile": profile,
              "num_checkpoints": num_checkpoints, "synchronize": synchronize}  # fmt: skip
    for name, value in unused.items():
        if value:
            log.info("checkpointing.configure(%s=%r): it has no effect here", name, value)
    _configured = True


def is_configured() -> bool:
    """Return whether `configure` was called."""
    return _configured


def reset() -> None:
    """Do nothing: no buffers outlive a step."""


class RngTracker:
    """Named states of the random generators. A block inside `fork` draws from one of them."""

    def __init__(self) -> None:
        self._states: dict[str, list[torch.Tensor]] = {}

    def add(self, name: str, seed: int) -> None:
        """Add a state made from a seed. Raises: DeepSpeedRefusal for a name in use."""
        if name in self._states:
            raise DeepSpeedRefusal(f"the state {name!r} of random numbers exists already")
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self._states[name] = _states()

    def reset(self) -> None:
        """Forget all states."""
        self._states.clear()

    def get_states(self) -> dict[str, Any]:
        """Return all states."""
        return dict(self._states)

    def set_states(self, states: dict[str, Any]) -> None:
        """Replace all states by those that `get_states` returned."""
        self._states = dict(states)

    def fork(self, name: str = "model-parallel-rng") -> Any:
        """Return a context whose random numbers come from a state. Leaving it stores the advanced
        state and restores the generators."""
        return _Fork(self._states, name)


class _Fork:
    def __init__(self, states: dict[str, list[torch.Tensor]], name: str) -> None:
        if name not in states:
            raise DeepSpeedRefusal(f"there is no state {name!r} of random numbers: add() it first")
        self._states, self._name = states, name
        self._before: list[torch.Tensor] = []

    def __enter__(self) -> None:
        self._before = _states()
        _set_states(self._states[self._name])

    def __exit__(self, *exc: object) -> None:
        self._states[self._name] = _states()
        _set_states(self._before)


def _states() -> list[torch.Tensor]:
    gpu = [torch.cuda.get_rng_state()] if torch.cuda.is_available() else []
    return [torch.get_rng_state(), *gpu]


def _set_states(states: list[torch.Tensor]) -> None:
    torch.set_rng_state(states[0])
    for state in states[1:]:
        torch.cuda.set_rng_state(state)


_TRACKER = RngTracker()


def get_cuda_rng_tracker() -> RngTracker:
    """Return the named states of the random generators."""
    return _TRACKER
