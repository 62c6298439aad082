"""Running a forward in slices: the slices of a batch (micro-batches) go through a module in
sequence.

    Slicing   shared by the modules of one model: the number of slices, and the current forward
    Run       one forward: its rows, and the bounds and random streams of their slices

Slices run in reverse order. Autograd runs the newest nodes first, so backward takes slice 0, then
1, and so on, module by module. It adds up a parameter's gradients in that order, as a loop over
micro-batches does. Each slice of a block is checkpointed, so that one slice's activations live at a
time, unless the caller passes `checkpoint=False`.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from infinity._src.base.torch_compat import (
    NO_TASK,
    clear_autocast_cache,
    graph_task_id,
    named_checkpoints,
)
from infinity._src.microbatch.collected_outputs import CollectedOutputs
from infinity._src.microbatch.random_streams import HostState, RandomStreams
from infinity._src.microbatch.replay import Record, Replay
from infinity._src.microbatch.rows import (
    BY_ROW,
    DICTS,
    Batch,
    Numbers,
    PerSlice,
    Unclear,
    cut_rows,
    join_rows,
    like_dict,
    mapped,
    settled,
    tensors_in,
)
from infinity._src.microbatch.side_effects import (
    Arguments,
    HandedOn,
    SideEffects,
    Untouched,
    versions_of,
)
from infinity.errors import SlicesError

log = logging.getLogger("infinity")

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
"""Types of values that all slices share."""

_ITEMS = (bool, int, float, complex, str, bytes, dict)
"""Types of list items that may be values of single rows."""

BATCHES = ("input_ids", "inputs_embeds", "pixel_values", "input_values", "input_features")
"""Arguments whose rows are those of the batch; else the first tensor has them."""


_RUNS: ContextVar[Mapping[int, Run | Replay | None]] = ContextVar("forwards in slices")
"""The forward or replay that runs in this context, by the id() of its Slicing; None inside of a
slice."""


class Slicing:
    """Number of slices, and the current forward.

    shared: names of arguments that all slices get whole. checkpointed: checkpoint slices that
    backward needs. numbers: of the model (`rows.Numbers`). classes: the classes of sliced modules,
    by original class and role.
    """

    def __init__(
        self,
        count: int,
        shared: frozenset[str] = frozenset(),
        *,
        checkpointed: bool = True,
        numbers: Numbers | None = None,
    ) -> None:
        self.count = count
        self.shared = shared
        self.checkpointed = checkpointed
        self.numbers = numbers or Numbers()
        self.classes: dict[tuple[type, object], type] = {}
        self._forwards = self._slices = 0
        # Names of modules whose calls have begun a forward in slices.
        self._outermost: set[str] = set()
        self._said: set[str] = set()
        self._watched: weakref.WeakKeyDictionary[nn.Module, SideEffects] = (
            weakref.WeakKeyDictionary()
        )

    def __reduce__(self) -> Any:
        """Copy and pickle without the classes, which belong to this object."""
        made = functools.partial(Slicing, checkpointed=self.checkpointed, numbers=self.numbers)
        return made, (self.count, self.shared)

    def first_time(self, what: str) -> bool:
        """Return whether this is the first call with `what`: a training loop would repeat a warning
        every step."""
        said = what in self._said
        self._said.add(what)
        return not said

    def effects_of(self, module: nn.Module) -> SideEffects:
        if module not in self._watched:
            self._watched[module] = SideEffects(module, self.first_time)
        return self._watched[module]

    @property
    def slices_in_mean(self) -> float | None:
        """Mean number of slices of the forwards so far; None before the first."""
        return self._slices / self._forwards if self._forwards else None

    @property
    def run(self) -> Run | None:
        found = _RUNS.get({}).get(id(self))
        return found if isinstance(found, Run) else None

    @property
    def replay(self) -> Replay | None:
        found = _RUNS.get({}).get(id(self))
        return found if isinstance(found, Replay) else None

    @property
    def inside(self) -> bool:
        """True inside of a slice, in forward and where backward recomputes it."""
        return _RUNS.get({}).get(id(self), self) is None

    @property
    def is_plain(self) -> bool:
        """True if modules run unchanged: inside of a slice, and in a forward without gradients."""
        return self.inside or not (torch.is_grad_enabled() or self.run is not None)

    @contextlib.contextmanager
    def forward(
        self, owner: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Iterator[Run]:
        """Begin a forward with these arguments, or return the one that runs.

        Raises: SlicesError for arguments without a batch.
        """
        known = self.run
        if known is not None:
            yield known
            return
        recomputed = graph_task_id() != NO_TASK
        if not recomputed:
            self._outermost.add(owner)
        # A checkpoint around the whole model recomputes the whole forward, so slices draw the same
        # numbers; one around a part of the model begins a forward with that part.
        is_part = recomputed and owner not in self._outermost
        run = Run(self, batch_of(owner, args, kwargs), is_part=is_part)
        if not recomputed:
            self._forwards += 1
            self._slices += run.count
        try:
            with self._in(run):
                yield run
        finally:
            run.end()

    def slice(self) -> contextlib.AbstractContextManager[None]:
        """Compute a slice inside the context: modules that are called there run unchanged."""
        return self._in(None)

    def replay_of(self, replay: Replay) -> contextlib.AbstractContextManager[None]:
        """Answer the calls of modules inside the context from `replay`."""
        return self._in(replay)

    @contextlib.contextmanager
    def _in(self, running: Run | Replay | None) -> Iterator[None]:
        before = _RUNS.set({**_RUNS.get({}), id(self): running})
        try:
            yield
        finally:
            _RUNS.reset(before)


def batch_of(owner: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor:
    """Return a tensor with the rows of the batch from the arguments of a forward.

    Raises: SlicesError if there is none.
    """
    named = (kwargs[name] for name in BATCHES if isinstance(kwargs.get(name), torch.Tensor))
    tensor: torch.Tensor
    for tensor in (*named, *tensors_in([args, dict(kwargs)])):
        if tensor.dim() and len(tensor):
            return tensor
    raise SlicesError(
        f"{owner}: inf.microbatched found no batch among the arguments; pass tensors whose first "
        "dimension is the batch"
    )


class Run:
    """One forward of a model in slices.

    batch: a tensor with its rows. defers: the head returns logits that are computed when they are
    used (`SlicedLogits`). record: results for a replay; None if there will be none. is_part:
    backward recomputes a part of a forward.
    """

    def __init__(self, slicing: Slicing, batch: torch.Tensor, *, is_part: bool) -> None:
        self.slicing = slicing
        self.rows = rows = len(batch)
        self.count = min(slicing.count, rows)
        # As torch.tensor_split: the first slices have one row more if the division has a remainder.
        size, more = divmod(rows, self.count)
        self.sizes = [size + (index < more) for index in range(self.count)]
        ends = list(itertools.accumulate(self.sizes))
        self.bounds = list(zip([0, *ends[:-1]], ends, strict=True))
        self.defers = False
        self.record: Record | None = None
        self._is_part = is_part
        self._streams = RandomStreams()
        # Parts by tensor: several modules get the same mask, which is cut once.
        self._cuts: dict[int, _Parts] = {}
        # Tensors that certainly have rows: the batch, and results of `join`.
        self._made: dict[int, weakref.ref[torch.Tensor]] = {}
        self._with_rows(batch)

    def end(self) -> None:
        self._cuts.clear()
        self._made.clear()
        self._streams.end()

    # -- running -----------------------------------------------------------------------------------

    def call(
        self,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        module: nn.Module,
        owner: str,
        names: Sequence[str],
        is_block: bool,
        checkpointed: bool,
    ) -> Any:
        """Run a module's forward slice by slice, and join the outputs.

        names: of the positional arguments. checkpointed: checkpoint each slice, if backward may
        need it. A module runs once, for all slices, if it gets no tensor or if its first tensor has
        another number of rows than the batch; for a block that raises SlicesError. Integers
        [1, ...] as first tensor are an exception: each slice looks them up.
        """
        named = _named(args, kwargs, names)
        shared = self.slicing.shared
        tensors = [
            (name, tensor)
            for name, value in named
            if name not in shared
            for tensor in tensors_in(value)
        ]
        name, first = tensors[0] if tensors else ("", None)
        has_rows = first is not None and first.dim() > 0 and first.shape[0] == self.rows
        if is_block and not has_rows:
            shape = "no tensor" if first is None else f"a tensor {tuple(first.shape)}"
            raise SlicesError(
                f"{owner} got {shape} first ({name}), where the batch has {self.rows} rows: "
                "inf.microbatched runs blocks that get the batch; name other modules in blocks=, "
                "or in shared= the arguments that have no rows"
            )
        if first is not None and has_rows:
            self._check_rows_first(module, owner, name, first, is_block)
        if first is None or not (has_rows or _is_lookup(first)):
            self._say_once(module, owner)
            return forward(*args, **kwargs)
        wanted = is_block or any(tensor.requires_grad for _, tensor in tensors)
        checkpointed = checkpointed and wanted and self.slicing.checkpointed
        several = self.count > 1
        effects = self.slicing.effects_of(module)
        with effects.refused(owner, several=several, again=several or checkpointed):
            outputs = self.outputs(
                forward,
                self.cut(args, kwargs, owner=owner, names=names, first=first),
                given=(args, kwargs),
                device=first.device,
                checkpointed=checkpointed,
                owner=owner,
            )
        # A part may compute positions from its integer input, with one row for all: expand it.
        return self.join(outputs, owner, expand=not is_block and _is_whole(first))

    def _check_rows_first(
        self, module: nn.Module, owner: str, name: str, first: torch.Tensor, is_block: bool
    ) -> None:
        """Raise SlicesError for a module whose first tensor may have the sequence first."""
        if self.count == 1 or self._has_made(first):
            return
        said = [part.batch_first for part in module.modules() if hasattr(part, "batch_first")]
        if said and first.dim() == 2 and not _is_whole(first):
            raise SlicesError(
                f"{owner}: {name} {list(first.shape)} has as many rows as the batch, but this "
                "module may take a tensor of two dimensions for one sequence: name it in "
                f"shared=[{name!r}] if it is one, or train with batches of another size"
            )
        if first.dim() < 3 or first.shape[1] != self.rows:
            return
        known = all(said) if said else not is_block or name in BY_ROW
        if not known:
            raise SlicesError(
                f"{owner}: the batch has as many rows as a sequence has places ({self.rows}), and "
                f"inf.microbatched cannot tell which comes first in {name} {list(first.shape)}; "
                "train with batches of another size (with batch_first=True in the module, or for "
                "an argument named hidden_states, rows come first)"
            )

    def _say_once(self, module: nn.Module, owner: str) -> None:
        trained = any(param.requires_grad for param in module.parameters())
        if (
            self.count > 1
            and trained
            and torch.is_grad_enabled()
            and self.slicing.first_time(f"{owner} runs once")
        ):
            log.warning(
                "%s gets no tensor with the rows of the batch: it runs once for all slices, so the "
                "gradient of its parameters is one sum over the batch, rounded otherwise than in a "
                "loop over micro-batches (positions [1, places] instead of [places] are looked up "
                "for each slice)",
                owner,
            )

    def outputs(
        self,
        forward: Callable[..., Any],
        pieces: Sequence[tuple[tuple[Any, ...], dict[str, Any]]],
        *,
        given: Any,
        device: torch.device,
        checkpointed: bool,
        owner: str,
    ) -> list[Any]:
        """Run `forward` for the arguments of each slice, the last slice first; return the outputs
        in the order of the slices. given: the arguments before they were cut. checkpointed:
        checkpoint each slice, if gradients are enabled and `Slicing.checkpointed` is set."""
        checkpointed = checkpointed and self.slicing.checkpointed and torch.is_grad_enabled()
        found: list[Any] = [None] * self.count
        collected, handed = CollectedOutputs(self.count), HandedOn(given, self.count)
        state = HostState.now() if checkpointed else None
        try:
            for index in reversed(range(self.count)):
                arguments = Arguments(*pieces[index])
                tensors = arguments.take_out()
                made = _OneSlice(self.slicing, forward, device, arguments, owner)
                stream = self._streams.of(index, device)
                with stream, named_checkpoints(owner), collected.of(index):
                    if checkpointed:
                        found[index] = checkpoint(made, *tensors, use_reentrant=False)
                    else:
                        found[index] = made(*tensors)
                handed.note(index, *made.arguments)
                state = made.end(state)
        finally:
            # Also when torch ends a recomputation early, by an exception, since it has all tensors
            # that backward needs.
            if self._is_part and self._streams.drawn:
                raise SlicesError(
                    f"{owner} draws random numbers, and a checkpoint around it recomputes it in "
                    "backward, where slices would draw other numbers; remove that checkpoint: "
                    "inf.microbatched checkpoints each slice of a block"
                )
        collected.join(owner, lambda parts: self.join(parts, owner))
        handed.give_back(owner)
        return found

    # -- cutting and joining -----------------------------------------------------------------------

    def cut(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        owner: str,
        names: Sequence[str] = (),
        first: torch.Tensor | None = None,
        numbers: Numbers | None = None,
        any_object: bool = False,
    ) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        """Return the arguments of each slice: tensors with rows are cut, all slices share the rest.

        names: of the positional arguments. first: a tensor that has rows. numbers: replace the
        model's. any_object: share objects of every type. Raises: SlicesError for arguments that may
        have rows by chance, and, without any_object, for an object that may hold rows (a cache).
        """
        places = first.shape[1] if first is not None and first.dim() > 1 else None
        batch = Batch(self.rows, places, self.slicing.numbers if numbers is None else numbers)

        def parts_of(name: str, value: Any) -> PerSlice:
            if isinstance(value, PerSlice):
                return value
            is_first, value = value is first, settled(value)
            if name in self.slicing.shared:
                return PerSlice([value] * self.count)
            if isinstance(value, torch.Tensor):
                sure = (is_first and value.shape[0] == self.rows) or self._has_made(value)
                each = 1 if sure else self._rows_each(owner, name, value, batch)
                if each:
                    return PerSlice(self._parts(value, each))
            elif not any_object and not isinstance(value, _PLAIN):
                raise SlicesError(
                    f"{owner}: {name} is a {type(value).__name__}, which inf.microbatched cannot "
                    f"cut into slices; name it in shared=[{name!r}] if it has no data of single "
                    "rows, or train without it (caches: use_cache=False; BlockMask: "
                    "attn_implementation='sdpa')"
                )
            return PerSlice([value] * self.count)

        named = _named(args, kwargs, names)
        for name, value in named:
            if name not in self.slicing.shared:
                self._refuse_lists_of_rows(owner, name, value)
        cut = [mapped(value, functools.partial(parts_of, name)) for name, value in named]
        cut_args = tuple(cut[: len(args)])
        cut_kwargs = dict(zip(kwargs, cut[len(args) :], strict=True))
        return [mapped((cut_args, cut_kwargs), _part(index)) for index in range(self.count)]

    def cut_of_loss(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        hidden: torch.Tensor | None = None,
        classes: int | None = None,
    ) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        """Return the arguments of a loss for each slice. hidden: hidden states, put before the
        arguments, of logits that are not computed. classes: the number of classes of these logits.

        Raises: as `cut`, also for a tensor that may be weights of the classes.
        """
        before = () if hidden is None else (hidden,)
        tensors = list(tensors_in([*before, args, dict(kwargs)]))
        widths = {tensor.shape[-1] for tensor in tensors if tensor.dim() > 1}
        return self.cut(
            (*before, *args),
            kwargs,
            owner="the loss",
            names=("hidden_states",) * len(before) + argument_names(function, bound=True),
            first=hidden,
            numbers=Numbers(frozenset(widths if classes is None else {classes})),
            any_object=True,
        )

    def _rows_each(self, owner: str, name: str, tensor: torch.Tensor, batch: Batch) -> int:
        try:
            return batch.rows_each(name, tensor.shape)
        except Unclear as why:
            # A single slice gets the whole tensor, with rows or without.
            if self.count == 1:
                return 0
            raise SlicesError(
                f"{owner}: {why}, and {name} is {list(tensor.shape)}: inf.microbatched cannot tell "
                f"whether this tensor has the rows of the batch; name it in shared=[{name!r}] if "
                "all slices share it, or train with batches of another size"
            ) from None

    def _refuse_lists_of_rows(self, owner: str, name: str, value: Any) -> None:
        """Raise SlicesError for a list of plain items that may have one for each row."""
        if isinstance(value, DICTS):
            for item in value.values():
                self._refuse_lists_of_rows(owner, name, item)
        if not isinstance(value, (tuple, list)) or isinstance(value, torch.Size) or self.count == 1:
            return
        if len(value) == self.rows and all(isinstance(item, _ITEMS) for item in value):
            raise SlicesError(
                f"{owner}: {name} is a {type(value).__name__} of {len(value)} items, as many as "
                "the batch has rows, and inf.microbatched can only cut tensors; pass a tensor, or "
                f"name it in shared=[{name!r}] if all slices share it"
            )
        for item in value:
            self._refuse_lists_of_rows(owner, name, item)

    def _parts(self, tensor: torch.Tensor, each: int) -> Sequence[torch.Tensor]:
        """Return the parts of a tensor with rows. A second call returns the same parts, unless the
        tensor or a part was written.

        each: rows of the tensor for each row of the batch.
        """
        if self.count == 1:
            return [tensor]
        known = self._cuts.get(id(tensor))
        if known is not None and known.hold(tensor):
            return known.parts
        key = id(tensor)
        # A weak reference: when the tensor is freed, its parts are dropped.
        gone = weakref.ref(tensor, lambda _: self._cuts.pop(key, None))
        bounds = [(each * start, each * end) for start, end in self.bounds]
        self._cuts[key] = _Parts(gone, tensor, cut_rows(tensor, bounds))
        return self._cuts[key].parts

    def join(self, outputs: Sequence[Any], owner: str, *, expand: bool = False) -> Any:
        """Join the outputs of the slices. Tensors with rows are joined by rows; any other output is
        a value that all slices have in common, or becomes a `PerSlice`.

        expand: expand a tensor with one row to the rows of its slice. Raises: SlicesError for
        outputs that are not tensors, tuples, lists, dicts or plain values, and for plain values
        that differ.
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
        raise SlicesError(
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
                return self._with_rows(join_rows(tensors))
            if expand and set(rows) == {1} and tensors[0].dim() > 1:
                # Expanding keeps the values; a slice's gradient is the sum over the slice's rows.
                pairs = zip(tensors, self.sizes, strict=True)
                parts = [part.expand(size, *part.shape[1:]) for part, size in pairs]
                return self._with_rows(join_rows(parts))
        return PerSlice(outputs, owner)

    def _with_rows(self, joined: torch.Tensor) -> torch.Tensor:
        """Record that a tensor has rows, as long as the tensor lives, and return it."""
        key = id(joined)
        self._made[key] = weakref.ref(joined, lambda _: self._made.pop(key, None))
        return joined

    def _has_made(self, tensor: torch.Tensor) -> bool:
        known = self._made.get(id(tensor))
        return known is not None and known() is tensor


def loss_of_batch(
    run: Run, losses: Sequence[torch.Tensor], kwargs: Mapping[str, Any]
) -> torch.Tensor:
    """Return the sum of the losses of slices, in the order of slices. Each loss is divided by the
    number of slices, as a loop does with `(loss / n).backward()`, but not with
    `num_items_in_batch`: then the losses are divided by that number already.

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
        self._versions = versions_of([tensor, *parts])

    def hold(self, tensor: torch.Tensor) -> bool:
        """Return whether these are parts of `tensor`, no write has changed parts or tensor since,
        and the parts have a graph if one is needed."""
        wants_graph = torch.is_grad_enabled() and tensor.requires_grad
        return (
            self._whole() is tensor
            and self._versions == versions_of([tensor, *self.parts])
            and (self.parts[0].requires_grad or not wants_graph)
        )


def _part(index: int) -> Callable[[PerSlice], Any]:
    return lambda cut: cut.parts[index]


class _OneSlice:
    """Computation of one slice, as a function of the tensors that `Arguments.take_out` removed. It
    runs in forward, and again if backward recomputes the slice.

    arguments: the arguments of the call in forward, after the call and before it; (None, None)
    until the call, and after `end`.
    """

    def __init__(
        self,
        slicing: Slicing,
        forward: Callable[..., Any],
        device: torch.device,
        arguments: Arguments,
        owner: str,
    ) -> None:
        self.arguments: tuple[Any, Any] = (None, None)
        self._slicing, self._forward, self._device = slicing, forward, device
        self._taken, self._owner = arguments, owner
        self._has_run = False
        self._state: HostState | None = None

    def __call__(self, *tensors: torch.Tensor) -> Any:
        again = contextlib.nullcontext() if self._state is None else self._state.again()
        with again, self._slicing.slice():
            # If slices shared autocast's copy of a weight, it would sum their gradients in 16 bits.
            clear_autocast_cache(self._device.type)
            args, kwargs = self._taken.with_tensors(tensors)
            watch = Untouched((args, kwargs))
            output = self._forward(*args, **kwargs)
            watch.check(self._owner)
            if not self._has_run:
                self._has_run = True
                self.arguments = ((args, kwargs), watch.before)
            return mapped(output, settled)

    def end(self, before: HostState | None) -> HostState | None:
        """End the forward. before: the state of Python's and NumPy's generators at its start; None
        if backward will not recompute the slice. Return the present state, or None."""
        self.arguments = (None, None)
        if before is None:
            return None
        now = HostState.now()
        # Most modules do not draw from these generators: then backward has no state to restore.
        if now != before:
            self._state = before
        return now


def _named(
    args: Sequence[Any], kwargs: Mapping[str, Any], names: Sequence[str]
) -> list[tuple[str, Any]]:
    """Return the arguments with their names, or "argument <place>" for those without a name."""
    places = [f"argument {place}" for place in range(len(args))]
    return [*zip([*names[: len(args)], *places[len(names) :]], args, strict=True), *kwargs.items()]


def _is_lookup(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is integers [1, ...], which a module looks up for all rows."""
    return _is_whole(tensor) and tensor.dim() > 1 and tensor.shape[0] == 1


def _is_whole(tensor: torch.Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex())


def argument_names(function: Callable[..., Any], *, bound: bool) -> tuple[str, ...]:
    """Return the names of a function's positional arguments, without `self`; () if the signature is
    unknown. bound: the signature does not have `self`."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    try:
        found = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return ()
    return tuple(one.name for one in found if one.kind in kinds)[0 if bound else 1 :]
