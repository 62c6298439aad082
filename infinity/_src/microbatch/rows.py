"""Rows of a batch: cut a tensor into the rows of each slice, and join the slices again.

    Cut    whole [rows, ...]          -> one part [rows of the slice, ...] for each slice
    Join   [rows of the slice, ...]   -> whole [rows, ...]

A part has the alignment and strides of a separate batch, so that kernels sum in the same order. A
part with a gradient is a copy, so that it can be freed or offloaded alone; a part without a
gradient is a view if a copy would have the same alignment and strides. Cut and join move values and
never round.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import nn

from infinity._src.kernels.tiling.deferred_logits import UncomputedLogits
from infinity.errors import SlicesError

ALIGNED_BYTES = 256
"""Parts begin at multiples of this, like allocations: at other addresses kernels may sum in another
order."""

Bounds = Sequence[tuple[int, int]]

DICTS = (dict, UserDict)
"""Types of dicts. In transformers blocks share keys and values through a UserDict."""


class PerSlice:
    """Value without rows of the batch, separate for each slice: a bias that all rows share, a loss.

    A model may pass it to modules that run in slices. Any other use raises SlicesError.

    parts: one value for each slice. owner: the name of the module that returned it.
    """

    def __init__(self, parts: Sequence[Any], owner: str = "") -> None:
        self.parts = tuple(parts)
        self.owner = owner

    def _refuse(self, what: str) -> NoReturn:
        raise SlicesError(
            f"{what} of an output of {self.owner} that is no batch of rows: each of the "
            f"{len(self.parts)} slices has a separate value (in `parts`), and inf.microbatched "
            "cannot tell how to combine them; return one value for each row, or leave it out in "
            "training"
        )

    def _operation(self, *_args: object) -> NoReturn:
        self._refuse("an operation")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __neg__ = _operation
    __truediv__ = __rtruediv__ = __pow__ = __matmul__ = __rmatmul__ = _operation
    __lt__ = __le__ = __gt__ = __ge__ = _operation
    __bool__ = __float__ = __int__ = __iter__ = __len__ = __getitem__ = __contains__ = _operation

    def __getattr__(self, name: str) -> Any:
        # `copy` and `pickle` look up optional methods, and expect AttributeError for missing ones.
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse(name)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> NoReturn:
        found: list[PerSlice] = []
        mapped(
            [*args, *(kwargs or {}).values()],
            lambda leaf: found.append(leaf) if isinstance(leaf, cls) else None,
        )
        found[0]._refuse(getattr(func, "__name__", str(func)))


def per_slice(values: Sequence[Any], owner: str) -> Any:
    """Combine the values of slices, the items of tuples and lists one by one: to the value that all
    slices have in common, or to a `PerSlice`."""
    first = values[0]
    alike = all(type(value) is type(first) for value in values)
    if alike and isinstance(first, (tuple, list)) and len({len(value) for value in values}) == 1:
        items = [per_slice(column, owner) for column in zip(*values, strict=True)]
        return type(first)(*items) if hasattr(first, "_fields") else type(first)(items)
    if all(value is first for value in values):
        return first
    return PerSlice(values, owner)


def mapped(value: Any, leaf: Callable[[Any], Any]) -> Any:
    """Return `value` with `leaf(item)` in place of each item of its tuples, lists and dicts."""
    if isinstance(value, tuple):
        items = [mapped(item, leaf) for item in value]
        # A named tuple takes its items one by one.
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if type(value) is list:
        return [mapped(item, leaf) for item in value]
    if isinstance(value, DICTS):
        return like_dict(value, {key: mapped(item, leaf) for key, item in value.items()})
    return leaf(value)


def like_dict(dictionary: dict[str, Any] | UserDict[str, Any], items: dict[str, Any]) -> Any:
    """Return a dict of the type of `dictionary` with these items."""
    kind: Any = type(dictionary)
    # Outputs of transformers are both dicts and dataclasses.
    if dataclasses.is_dataclass(dictionary):
        return kind(**items)
    # Not `kind(items)`: a defaultdict takes its factory first.
    made = copy.copy(dictionary)
    made.clear()
    made.update(items)
    return made


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in tuples, lists and dicts, in their order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, DICTS):
        for item in value.values():
            yield from tensors_in(item)


def settled(value: Any) -> Any:
    """Return `value`; for UncomputedLogits, the computed logits."""
    return value.compute() if isinstance(value, UncomputedLogits) else value


def cut_rows(whole: torch.Tensor, bounds: Bounds) -> tuple[torch.Tensor, ...]:
    """Return the rows [first, last) of each slice. A part of a tensor without gradient is a view if
    a copy would have the same alignment and strides."""
    if whole.requires_grad:
        parts: tuple[torch.Tensor, ...] = _Cut.apply(whole, bounds)
        return parts
    return tuple(_aligned(whole, first, last) for first, last in bounds)


def join_rows(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the rows of all slices as one tensor."""
    whole: torch.Tensor = _Join.apply(*parts)
    return whole


def _aligned(whole: torch.Tensor, first: int, last: int) -> torch.Tensor:
    """Return rows of a tensor without gradient: a view if a copy would have the same alignment and
    strides, else a copy."""
    part = whole[first:last]
    begins = first * whole.stride(0) * whole.element_size()
    strides = _strides_with(whole, last - first)
    alike = strides is None or strides == part.stride()
    return part if begins % ALIGNED_BYTES == 0 and alike else _copied(whole, first, last)


def _copied(whole: torch.Tensor, first: int, last: int) -> torch.Tensor:
    part = whole[first:last]
    strides = None if whole.is_contiguous() else _strides_with(whole, last - first)
    return part.clone() if strides is None else _empty(part, last - first, strides).copy_(part)


def _concatenate(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    first, rows = parts[0], sum(map(len, parts))
    strides = None if first.is_contiguous() else _strides_with(first, rows)
    if strides is None:
        return torch.cat(list(parts))
    whole = _empty(first, rows, strides)
    for place, part in zip(whole.split([len(part) for part in parts]), parts, strict=True):
        place.copy_(part)
    return whole


def _empty(like: torch.Tensor, rows: int, strides: tuple[int, ...]) -> torch.Tensor:
    shape = (rows, *like.shape[1:])
    return torch.empty_strided(shape, strides, dtype=like.dtype, device=like.device)


def _strides_with(tensor: torch.Tensor, rows: int) -> tuple[int, ...] | None:
    """Return the strides that a tensor of the same layout has with `rows` rows; None for a tensor
    that is expanded, or whose elements share memory. torch chooses kernels, and the order of sums,
    by strides.

    A dimension with a larger stride than that of rows steps over all rows, so its stride grows with
    their number.
    """
    size, row = tensor.shape[0], tensor.stride(0)
    found = list(tensor.stride())
    for dim in range(1, tensor.dim()):
        if tensor.shape[dim] > 1 and found[dim] > row:
            times, rest = divmod(found[dim], row * size) if row else (0, 1)
            if rest:
                return None
            found[dim] = times * row * rows
    reach = 0
    for stride, length in sorted(zip(found, (rows, *tensor.shape[1:]), strict=True)):
        if length > 1:
            if stride <= reach:
                return None
            reach += stride * (length - 1)
    return tuple(found)


class _Cut(torch.autograd.Function):
    """Copies of the rows of each slice. In backward a slice without a gradient counts as zeros."""

    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, bounds: Bounds) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.bounds, ctx.row = bounds, whole.shape[1:]
        return tuple(_copied(whole, first, last) for first, last in bounds)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, None]:
        given = next((grad for grad in grads if grad is not None), None)
        if given is None:
            return None, None
        parts = [
            given.new_zeros((last - first, *ctx.row)) if grad is None else grad
            for grad, (first, last) in zip(grads, ctx.bounds, strict=True)
        ]
        return _concatenate(parts), None


class _Join(torch.autograd.Function):
    """Rows of all slices as one tensor."""

    @staticmethod
    def forward(ctx: Any, *parts: torch.Tensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.sizes = [len(part) for part in parts]
        return _concatenate(parts)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if grad is None:
            return (None,) * len(ctx.sizes)
        found: list[torch.Tensor | None] = []
        first = 0
        for size, wanted in zip(ctx.sizes, ctx.needs_input_grad, strict=True):
            found.append(_aligned(grad, first, first + size) if wanted else None)
            first += size
        return tuple(found)


# -- which arguments have rows ---------------------------------------------------------------------
# The rules use names and shapes alone. A tensor has rows if its first dimension is as long as the
# batch. By chance a tensor without rows may be as long: a bias for each head, a table of positions
# (places), weights of classes. A tensor that may be one of these is refused, unless its name says
# that it has rows.


BY_ROW: Mapping[str, int] = {
    **dict.fromkeys(
        (
            *("input_ids", "labels", "attention_mask", "position_ids", "token_type_ids"),
            *("inputs_embeds", "hidden_states", "residual", "logits", "pooled_logits"),
            *("decoder_input_ids", "decoder_attention_mask", "decoder_inputs_embeds"),
            *("encoder_hidden_states", "encoder_attention_mask", "encoder_decoder_position_bias"),
            *("pixel_values", "input_values", "input_features", "bool_masked_pos"),
            *("causal_mask", "loss_mask", "shift_labels", "key_padding_mask", "pad_mask"),
            *("start_logits", "end_logits", "start_positions", "end_positions", "temb"),
        ),
        1,
    ),
    # With two dimensions it is a table of positions.
    "position_embeddings": 3,
}
"""Arguments that have rows, even if other sizes equal the batch: name -> least number of
dimensions."""

_COUNTED = ("head", "expert")

_WIDTHS = ("_features", "hidden_size", "_dim", "d_model")
"""Ends of names of widths."""


@dataclasses.dataclass(frozen=True)
class Numbers:
    """Sizes of a model that may be the first dimension of a tensor without rows.

    counts: numbers of heads, experts or classes. flat: sizes for tensors of one or two dimensions
    only: widths, and numbers of layers and buckets, too.
    """

    counts: frozenset[int] = frozenset()
    flat: frozenset[int] = frozenset()


@dataclasses.dataclass(frozen=True)
class Batch:
    """Sizes with which `rows_each` compares a tensor.

    rows: of the batch. places: positions of a sequence, which is the second dimension of the first
    tensor, if it has one. numbers: of the model.
    """

    rows: int
    places: int | None
    numbers: Numbers

    def rows_each(self, name: str, shape: Sequence[int]) -> int:
        """Return how many rows of a tensor each row of the batch has; 0: all slices share it.

        Raises: Unclear if the first dimension may equal the number of rows by chance.
        """
        if not shape:
            return 0
        length = shape[0]
        if length != self.rows:
            return self._rows_of_heads(shape)
        if name in BY_ROW:
            return int(len(shape) >= BY_ROW[name])
        if self.places == length and len(shape) < 4:
            raise Unclear(f"the batch has as many rows as a sequence has places ({length})")
        # [batch, heads, queries, keys], or a value or a vector for each position of each row.
        plain = len(shape) > 3 or (
            len(shape) > 1
            and shape[1] == self.places
            and (len(shape) == 2 or shape[2] != self.places)
        )
        if self.places is None:
            plain = len(shape) > 2
        if length in self.numbers.counts and not plain:
            raise Unclear(
                f"the batch has as many rows as the model has heads, experts or classes ({length})"
            )
        if length in self.numbers.flat and not plain and len(shape) < 3:
            raise Unclear(
                f"the batch has as many rows as the model has layers or values ({length})"
            )
        return 1

    def _rows_of_heads(self, shape: Sequence[int]) -> int:
        """Return the heads of a tensor [rows * heads, ...], such as a bias of attention; else 0."""
        each, rest = divmod(shape[0], self.rows)
        if rest or each < 2 or len(shape) < 3 or each not in self.numbers.counts:
            return 0
        if shape[0] in self.numbers.counts:
            raise Unclear(
                f"the model has both {shape[0]} and {each} heads or experts, and the batch "
                f"{self.rows} rows"
            )
        return each


class Unclear(Exception):
    """Doubt whether a tensor has rows; the message says why."""


def numbers_of(owners: Iterable[Any]) -> Numbers:
    """Collect numbers from the attributes of modules and of configurations: heads and experts, as
    in `num_attention_heads` and `n_head`; layers, as in `n_layers`; widths, as in `hidden_size`."""
    counts: set[int] = set()
    flat: set[int] = set()
    for owner in owners:
        if isinstance(owner, nn.ModuleList) and len(owner) > 1:
            flat.add(len(owner))
        for key, value in vars(owner).items():
            # `type`, not isinstance: True is an int.
            if type(value) is not int or value < 2:
                continue
            if key.startswith(("n_", "num_")) and not key.endswith("_per_tok"):
                flat.add(value)
                if any(word in key for word in _COUNTED):
                    counts.add(value)
            elif key.endswith(_WIDTHS):
                flat.add(value)
    return Numbers(frozenset(counts), frozenset(flat))
