"""Optimizer states as torch names them in a checkpoint, and as infinity keeps them.

    optim.state.<parameter>.exp_avg        a tensor of the parameter's shape
    optim.state.<parameter>.step           a tensor of one number, fp32, as torch.optim keeps it
    optim.state.<parameter>.master         where model.<parameter> is not the master
    optim.param_groups.<i>.lr              what torch.distributed.checkpoint.state_dict makes of a group
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from infinity._src.checkpoint.dcp_reading import DCPFiles
from infinity._src.checkpoint.dcp_writing import Key
from infinity._src.checkpoint.incoming import LastRead, Loaded, explain
from infinity._src.checkpoint.tiled import Whole
from infinity._src.optim.base import Optimizer
from infinity._src.optim.state_access import OptimizerState
from infinity._src.params.unit import Param

MASTER = "master"


class ModelPart:
    """The tensors of a checkpoint under one key, without it: what a model is matched with."""

    def __init__(self, files: DCPFiles, key: str) -> None:
        self._files = files
        self._prefix = f"{key}." if key else ""
        self.label = f"{files.label} ({key})" if key else files.label

    def names(self) -> Iterable[str]:
        """All names, without the key."""
        return [name.removeprefix(self._prefix) for name in self._files.names() if name.startswith(self._prefix)]

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of one tensor."""
        return self._files.shape(self._prefix + name)

    def is_floating_point(self, name: str) -> bool:
        """Whether one tensor is of a floating dtype."""
        return self._files.is_floating_point(self._prefix + name)

    def read(self, name: str) -> torch.Tensor:
        """One tensor. Blocks. Raises: OSError, ValueError."""
        return self._files.read(self._prefix + name)


@dataclasses.dataclass(frozen=True)
class Held:
    """A parameter with its optimizer states, and the names of those: tensors of its shape, and numbers."""

    param: Param
    state: OptimizerState
    tensors: tuple[str, ...]
    numbers: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class MatchedStates:
    """Which tensor or number of a checkpoint is which state, by the order in which they are written."""

    names: list[tuple[Held, str, str]]  # (parameter, state, name in the checkpoint)
    left_out: Loaded


def match_states(files: DCPFiles, key: str, every: Sequence[Held], *, strict: bool) -> MatchedStates:
    """Find the states of every parameter that is held. Nothing is read or written.

    A master is optional: without one the parameter's own value is it. Raises: ValueError naming what is missing or unexpected
    (with `strict`), and what has another shape (always).
    """
    prefix = f"{key}.state."
    there = {name for name in (*files.tensors, *files.objects) if name.startswith(prefix)}
    found: list[tuple[Held, str, str]] = []
    missing: list[str] = []
    wrong: list[str] = []
    for held in every:
        wanted = (*held.tensors, *held.numbers)
        roots = [f"{prefix}{name}." for name in held.param.keys]
        root = next((root for root in roots if any(root + state in there for state in wanted)), roots[0])
        for state in wanted:
            name = root + state
            if name in there:
                found.append((held, state, name))
                wrong += _problems(files, name, held.param.whole_shape if state in held.tensors else None)
            elif state != MASTER:
                missing.append(name)
    unexpected = sorted(there - {name for _, _, name in found})
    missing, wrong = list(dict.fromkeys(missing)), list(dict.fromkeys(wrong))  # the tiles of a weight say the same
    if wrong or (strict and (missing or unexpected)):
        raise ValueError(explain(files.label, missing if strict else [], unexpected if strict else [], wrong))
    return MatchedStates(found, Loaded(tuple(missing), tuple(unexpected)))


def _problems(files: DCPFiles, name: str, shape: tuple[int, ...] | None) -> list[str]:
    if name in files.objects:
        return [f"{name} is no tensor there"] if shape is not None else []
    if shape is None:
        return [] if files.shape(name) in ((), (1,)) else [f"{name} is no number there"]
    if files.shape(name) != shape or not files.is_floating_point(name):
        return [f"{name} is a {files.tensors[name].dtype} tensor of shape {files.shape(name)} there, and of {shape} here"]
    return []


def take_in_states(files: DCPFiles, matched: MatchedStates) -> None:
    """Write the states that were matched, one tensor in memory at a time. Calls no collective. Blocks.

    Raises: what reading or writing meets, ValueError for a number that it cannot be; then some states have been written.
    """
    # By the names in the file: the tiles of a weight take their parts of one tensor, which is read once.
    read = LastRead(files.read)
    order = {name: index for index, (_, _, name) in reversed(list(enumerate(matched.names)))}
    for held, state, name in sorted(matched.names, key=lambda match: order[match[2]]):
        value = read(name) if name in files.tensors else files.read_object(name)
        if state in held.numbers:
            value = value.item() if isinstance(value, torch.Tensor) else value
            if state == "step" and isinstance(value, float) and value.is_integer():
                value = int(value)
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise ValueError(f"{name} of {files.label} is {value!r}, which is no number")
        place = held.param.place
        held.state[state] = place.of(value) if place is not None and state in held.tensors else value


def tensors_of(
    whole: Whole, every: Mapping[Param, Held], keys: tuple[str, str], *, with_master: bool
) -> Iterator[tuple[Key, torch.Tensor]]:
    """The states of one parameter, or of a weight in tiles, as a checkpoint has them, one at a time. Collective. Blocks.

    every: the parameters that an optimizer holds; of one that it does not hold there are none. Numbers are the first tile's.
    Raises: ValueError where an optimizer holds some tiles of a weight and not the others.
    """
    held = [every[param] for param in whole.params if param in every]
    if not held:
        return
    if len(held) < len(whole.params):
        raise ValueError(f"the optimizer holds some tiles of {whole.name}, not all; give it the others, or export with opt=None")
    for state in (*held[0].tensors, *held[0].numbers):
        if state == MASTER and not with_master:
            continue
        if state in held[0].tensors:
            tensor = whole.merged(lambda param, state=state: every[param].state[state])  # type: ignore[misc]
        else:
            value = held[0].state[state]
            # torch.optim keeps step counts as tensors of fp32; whole numbers up to 2^24 are exact in it.
            tensor = value if isinstance(value, torch.Tensor) else torch.tensor(value, dtype=torch.float32)
        yield (keys[1], "state", whole.name, state), tensor


def groups_of(optimizer: Optimizer, key: str) -> Iterator[tuple[Key, Any]]:
    """Hyper-parameters, with all that the class of torch has by that name, so that it loads them. Tensors become numbers."""
    like = getattr(torch.optim, optimizer.title, None)
    defaults = like([torch.zeros(1)]).defaults if isinstance(like, type) else {}
    for index, group in enumerate(optimizer.param_groups):
        for name, value in {**defaults, **group}.items():
            if name == "params":
                value = list(dict.fromkeys(param.infinity_link.param.keys[0] for param in value))
            elif isinstance(value, torch.Tensor):
                value = value.item()
            yield (key, "param_groups", index, name), value
