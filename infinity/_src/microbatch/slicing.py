"""Running a forward in slices: the slices of a batch go through a module one after the other.

    Slicing   shared by the modules of one model: the number of slices, and the forward that runs
    Run       one forward: its rows, and the bounds and random streams of their slices

Slices run in reverse order. Autograd runs what was made last first, so backward takes slice 0, then
1, and so on, module by module. It adds up a parameter's gradients in that order, as a loop over
micro-batches does. Each slice of a block is checkpointed: one slice's activations live at a time.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from infinity._src._torch_compat import (
    NO_TASK,
    clear_autocast_cache,
    graph_task_id,
    version_of,
)
from infinity._src.microbatch.collected_logits import CollectedLogits
from infinity._src.microbatch.random_streams import RandomStreams
from infinity._src.microbatch.replay import Record, Replay
from infinity._src.microbatch.rows import (
    PerSlice,
    cut_rows,
    join_rows,
    like_dict,
    mapped,
    settled,
    tensors_in,
)

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
"""Types of values that all slices share."""

BY_ROW = frozenset(
    {
        "input_ids", "labels", "attention_mask", "position_ids", "token_type_ids", "inputs_embeds",
        "hidden_states", "decoder_input_ids", "decoder_attention_mask", "encoder_hidden_states",
    }
)  # fmt: skip
"""Arguments that have rows, whatever else is as long as the batch."""

BATCHES = ("input_ids", "inputs_embeds", "pixel_values", "input_values", "input_features")
"""Arguments whose rows are those of the batch; else the first tensor has them."""


_RUNS: ContextVar[Mapping[int, Run | Replay | None]] = ContextVar("forwards in slices")
"""Forwards that run in this thread, by the id() of their Slicing; None inside of a slice."""


class Slicing:
    """Number of slices, and the forward that runs.

    shared: names of arguments that all slices get whole. classes: those of its modules, by the
    class and the role that a module has.
    """

    def __init__(self, count: int, shared: frozenset[str]) -> None:
        self.count = count
        self.shared = shared
        self.classes: dict[tuple[type, object], type] = {}
        # Modules in whose calls a forward in slices has begun.
        self._outermost: set[str] = set()

    def __reduce__(self) -> Any:
        """Copy and pickle without the classes, which belong to this object."""
        return Slicing, (self.count, self.shared)

    @property
    def run(self) -> Run | None:
        """The forward that runs, outside of its slices."""
        found = _RUNS.get({}).get(id(self))
        return found if isinstance(found, Run) else None

    @property
    def replay(self) -> Replay | None:
        """The replay that runs."""
        found = _RUNS.get({}).get(id(self))
        return found if isinstance(found, Replay) else None

    @property
    def inside(self) -> bool:
        """True inside of a slice, in forward and where backward computes it again."""
        return _RUNS.get({}).get(id(self), self) is None

    @contextlib.contextmanager
    def forward(
        self, owner: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Iterator[Run]:
        """Begin a forward with these arguments, unless one runs.

        Raises: ValueError for arguments without a batch.
        """
        known = self.run
        if known is not None:
            yield known
            return
        recomputed = graph_task_id() != NO_TASK
        if not recomputed:
            self._outermost.add(owner)
        # A checkpoint around the whole model computes all of it again, with the same numbers.
        run = Run(
            self,
            rows_of(owner, args, kwargs),
            is_part=recomputed and owner not in self._outermost,
        )
        try:
            with self._in(run):
                yield run
        finally:
            run.end()

    def slice(self) -> contextlib.AbstractContextManager[None]:
        """Compute a slice inside: modules that are called there run as ever."""
        return self._in(None)

    def replay_of(self, replay: Replay) -> contextlib.AbstractContextManager[None]:
        """Answer calls of modules inside."""
        return self._in(replay)

    @contextlib.contextmanager
    def _in(self, running: Run | Replay | None) -> Iterator[None]:
        before = _RUNS.set({**_RUNS.get({}), id(self): running})
        try:
            yield
        finally:
            _RUNS.reset(before)


def rows_of(owner: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """Count the rows of the batch in the arguments of a forward."""
    named = (kwargs[name] for name in BATCHES if isinstance(kwargs.get(name), torch.Tensor))
    for tensor in (*named, *tensors_in([args, dict(kwargs)])):
        if tensor.dim() and len(tensor):
            return len(tensor)
    raise ValueError(
        f"{owner}: inf.microbatched found no batch among the arguments; pass tensors whose first "
        "dimension is the batch"
    )


class Run:
    """One forward of a model in slices.

    defers: the head returns logits that are computed when they are used (`SlicedLogits`). record:
    of what a replay answers with, if one comes. is_part: backward computes a part of a forward
    again.
    """

    def __init__(self, slicing: Slicing, rows: int, *, is_part: bool) -> None:
        self.slicing = slicing
        self.rows = rows
        self.count = min(slicing.count, rows)
        # As torch.tensor_split: the first slices take one row more where rows are left over.
        size, more = divmod(rows, self.count)
        self.sizes = [size + (index < more) for index in range(self.count)]
        ends = list(itertools.accumulate(self.sizes))
        self.bounds = list(zip([0, *ends[:-1]], ends, strict=True))
        self.defers = False
        self.record: Record | None = None
        self._is_part = is_part
        self._streams = RandomStreams()
        # Parts of tensors that several modules get, so that a mask is cut once.
        self._cuts: dict[int, _Parts] = {}

    def end(self) -> None:
        """End the forward."""
        self._cuts.clear()
        self._streams.end()

    # -- running -----------------------------------------------------------------------------------

    def call(
        self,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        owner: str,
        names: Sequence[str],
        is_block: bool,
        checkpointed: bool,
    ) -> Any:
        """Run a module's forward slice by slice, and join the outputs.

        names: of the positional arguments. checkpointed: each slice, if backward may want it. A
        module whose first tensor has one row for the whole batch runs for each slice, too. One
        without a tensor, or with one of other dimensions, runs once; for a block that is a
        ValueError.
        """
        tensors = list(tensors_in([args, kwargs]))
        first = tensors[0] if tensors else None
        has_rows = first is not None and first.dim() > 0 and first.shape[0] == self.rows
        if not has_rows and is_block:
            shape = "no tensor" if first is None else f"a tensor {tuple(first.shape)}"
            raise ValueError(
                f"{owner} got {shape} first, where the batch has {self.rows} rows: "
                "inf.microbatched runs blocks that get the batch; name other modules in blocks="
            )
        if first is None or not (has_rows or (first.dim() > 1 and first.shape[0] == 1)):
            return forward(*args, **kwargs)
        outputs = self.outputs(
            forward,
            self.cut(args, kwargs, owner=owner, names=names),
            device=first.device,
            checkpointed=checkpointed
            and (is_block or any(tensor.requires_grad for tensor in tensors)),
            owner=owner,
        )
        return self.join(outputs, owner, expand=not has_rows)

    def outputs(
        self,
        forward: Callable[..., Any],
        pieces: Sequence[tuple[tuple[Any, ...], dict[str, Any]]],
        *,
        device: torch.device,
        checkpointed: bool,
        owner: str,
    ) -> list[Any]:
        """Run `forward` for the arguments of each slice, the last slice first."""
        found: list[Any] = [None] * self.count
        collected = CollectedLogits(self.count)
        for index in reversed(range(self.count)):
            args, kwargs = pieces[index]
            compute, tensors = _taken_out(self.slicing, forward, device, args, kwargs)
            try:
                with self._streams.of(index, device), collected.of(index):
                    if checkpointed:
                        found[index] = checkpoint(compute, *tensors, use_reentrant=False)
                    else:
                        found[index] = compute(*tensors)
            finally:
                # Also where the checkpoint has all that it wants, and stops with an exception.
                self._check_numbers(owner)
        collected.join(owner)
        return found

    def _check_numbers(self, owner: str) -> None:
        if self._is_part and self._streams.drawn:
            raise ValueError(
                f"{owner} draws random numbers, and a checkpoint around it computes it again in "
                "backward, where slices would draw others; take that checkpoint out: "
                "inf.microbatched checkpoints each slice of a block"
            )

    # -- cutting and joining -----------------------------------------------------------------------

    def cut(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        owner: str,
        names: Sequence[str] = (),
        any_object: bool = False,
    ) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        """Cut arguments: tensors with the rows of the batch by rows, all else is shared.

        any_object: share objects of every type, too, and take a tensor of the batch's length for
        one with rows. Raises: ValueError else for an object that may hold rows (a cache), and for a
        tensor of which it is not clear whether it has rows.
        """
        first = next(tensors_in([args, dict(kwargs)]), None)
        numbered = [f"argument {place}" for place in range(len(args))]
        named = [*names[: len(args)], *numbered[len(names) :]]

        def parts_of(name: str, value: Any) -> PerSlice:
            if isinstance(value, PerSlice):
                return value
            if isinstance(value, torch.Tensor):
                value = settled(value)
                if name not in self.slicing.shared and self._has_rows(
                    owner, name, value, None if any_object else first
                ):
                    return PerSlice(self._parts(value))
            elif not any_object and not isinstance(value, _PLAIN):
                raise ValueError(
                    f"{owner}: {name} is a {type(value).__name__}, which inf.microbatched cannot "
                    "cut into slices; train without it (caches: use_cache=False)"
                )
            return PerSlice([value] * self.count)

        cut_args = tuple(
            mapped(value, functools.partial(parts_of, name))
            for name, value in zip(named, args, strict=True)
        )
        cut_kwargs = {
            name: mapped(value, functools.partial(parts_of, name)) for name, value in kwargs.items()
        }
        return [mapped((cut_args, cut_kwargs), _part(index)) for index in range(self.count)]

    def _has_rows(
        self, owner: str, name: str, tensor: torch.Tensor, first: torch.Tensor | None
    ) -> bool:
        if tensor.dim() == 0 or tensor.shape[0] != self.rows:
            return False
        unclear = (
            tensor is not first
            and tensor.dim() < 3
            and self.count > 1
            and first is not None
            and first.dim() > 1
            and first.shape[1] == self.rows
            and name not in BY_ROW
        )
        if unclear:
            raise ValueError(
                f"{owner}: the batch has as many rows as a sequence has places ({self.rows}), and "
                f"{name} is {list(tensor.shape)}: inf.microbatched cannot tell whether it has a "
                f"row for each of the batch; name it in shared=[{name!r}] if all slices share it, "
                "or train with batches of another size"
            )
        return True

    def _parts(self, tensor: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return the parts of a tensor with rows: the same as before, unless it has changed."""
        if self.count == 1:
            return [tensor]
        known = self._cuts.get(id(tensor))
        if known is not None and known.hold(tensor):
            return known.parts
        key = id(tensor)
        # Weak: parts go as soon as nobody else has the tensor.
        gone = weakref.ref(tensor, lambda _: self._cuts.pop(key, None))
        self._cuts[key] = _Parts(gone, tensor, cut_rows(tensor, self.bounds))
        return self._cuts[key].parts

    def join(self, outputs: Sequence[Any], owner: str, *, expand: bool = False) -> Any:
        """Join the outputs of the slices: tensors with rows by rows; of the rest a value that all
        slices have in common, or a `PerSlice`.

        expand: a tensor with one row for all gets the rows of its slice. Raises: ValueError for
        outputs that are not tensors, tuples, lists, dicts or plain values.
        """
        first = outputs[0]
        if isinstance(first, (torch.Tensor, PerSlice)):
            return self._joined(outputs, owner, expand)
        same = all(type(output) is type(first) for output in outputs)
        if same and isinstance(first, (tuple, list)) and len({len(each) for each in outputs}) == 1:
            columns = zip(*outputs, strict=True)
            items = [self.join(column, owner, expand=expand) for column in columns]
            return type(first)(*items) if hasattr(first, "_fields") else type(first)(items)
        if same and isinstance(first, dict) and all(one.keys() == first.keys() for one in outputs):
            joined = {
                key: self.join([each[key] for each in outputs], owner, expand=expand)
                for key in first
            }
            return like_dict(first, joined)
        if same and isinstance(first, _PLAIN) and all(output == first for output in outputs):
            return first
        raise ValueError(
            f"{owner} returned a {type(first).__name__}, which inf.microbatched cannot join from "
            "slices, or slices returned different values; return tensors, or tuples, lists or "
            "dicts of tensors"
        )

    def _joined(self, outputs: Sequence[Any], owner: str, expand: bool) -> Any:
        first = outputs[0]
        if all(output is first for output in outputs):
            return first
        tensors = [output for output in outputs if isinstance(output, torch.Tensor)]
        if len(tensors) == self.count and all(tensor.dim() for tensor in tensors):
            rows = [len(tensor) for tensor in tensors]
            if rows == self.sizes:
                return join_rows(tensors)
            if expand and set(rows) == {1}:
                # The same values, and the gradient of each slice is the sum over its own rows.
                pairs = zip(tensors, self.sizes, strict=True)
                return join_rows([part.expand(size, *part.shape[1:]) for part, size in pairs])
        return PerSlice(outputs, owner)


def loss_of_batch(
    run: Run, losses: Sequence[torch.Tensor], kwargs: Mapping[str, Any]
) -> torch.Tensor:
    """Add up the losses of slices in their order. Each is divided by the number of slices, as a
    loop does with `(loss / n).backward()`; a loss that gets `num_items_in_batch` has divided by
    that, and is not divided again.

    kwargs: arguments of the loss, or of the model.
    """
    divided = kwargs.get("num_items_in_batch") is not None
    terms = list(losses) if divided else [loss / run.count for loss in losses]
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


class _Parts:
    """Parts of a tensor, and the versions at which they were cut."""

    def __init__(
        self,
        whole: weakref.ref[torch.Tensor],
        tensor: torch.Tensor,
        parts: Sequence[torch.Tensor],
    ) -> None:
        self._whole = whole
        self.parts = parts
        self._versions = _versions([tensor, *parts])

    def hold(self, tensor: torch.Tensor) -> bool:
        """True when they are the tensor's, and nobody has written to it or to them since."""
        return self._whole() is tensor and self._versions == _versions([tensor, *self.parts])


def _versions(tensors: Sequence[torch.Tensor]) -> list[int]:
    # Inference tensors have no version counter.
    return [0 if tensor.is_inference() else version_of(tensor) for tensor in tensors]


def _part(index: int) -> Callable[[PerSlice], Any]:
    return lambda cut: cut.parts[index]


class _Place:
    """Place of a tensor that was taken out of the arguments."""

    def __init__(self, index: int) -> None:
        self.index = index


def _taken_out(
    slicing: Slicing,
    forward: Callable[..., Any],
    device: torch.device,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[Callable[..., Any], list[torch.Tensor]]:
    """Take the first tensor, and all with gradients, out of the arguments of a slice. Returns the
    slice as a function of them: inputs of a checkpoint may leave memory (`activations=`), and tell
    it the device whose random numbers it keeps.
    """
    tensors: list[torch.Tensor] = []

    def take(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or (tensors and not leaf.requires_grad):
            return leaf
        tensors.append(leaf)
        return _Place(len(tensors) - 1)

    places = mapped((args, kwargs), take)

    def compute(*given: torch.Tensor) -> Any:
        with slicing.slice():
            # A copy that autocast made of a weight for another slice would add up the gradients of
            # both in 16 bits.
            clear_autocast_cache(device.type)
            filled_args, filled_kwargs = mapped(
                places, lambda leaf: given[leaf.index] if isinstance(leaf, _Place) else leaf
            )
            return mapped(forward(*filled_args, **filled_kwargs), settled)

    return compute, tensors


def argument_names(forward: Callable[..., Any]) -> tuple[str, ...]:
    """Names of the positional arguments of a forward, without `self`."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    found = inspect.signature(forward).parameters.values()
    return tuple(parameter.name for parameter in found if parameter.kind in kinds)[1:]
