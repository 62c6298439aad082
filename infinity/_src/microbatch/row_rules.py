"""Rules of which arguments have rows of the batch, by their names and shapes alone.

A tensor has rows where its first dimension is as long as the batch. By chance it may be that long
and have none: a bias for each head, a table of places, weights of classes. A tensor that may be one
of these is refused, unless its name says that it has rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn

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
    # With two dimensions it is a table of places.
    "position_embeddings": 3,
}
"""Arguments that have rows, whatever else is as long as the batch: the fewest dimensions of one
that has."""

_COUNTED = ("head", "expert")

_WIDTHS = ("_features", "hidden_size", "_dim", "d_model")
"""Ends of names of widths."""


@dataclasses.dataclass(frozen=True)
class Numbers:
    """Numbers of a model that tensors without rows are as long as.

    counts: of heads, experts or classes. flat: of tensors with one dimension or two: widths, and
    numbers of layers and buckets, too.
    """

    counts: frozenset[int] = frozenset()
    flat: frozenset[int] = frozenset()


@dataclasses.dataclass(frozen=True)
class Batch:
    """Numbers that tensors are compared with.

    rows: of the batch. places: the second dimension of its first tensor, if it has one. numbers:
    of the model.
    """

    rows: int
    places: int | None
    numbers: Numbers

    def rows_each(self, name: str, shape: Sequence[int]) -> int:
        """Return how many rows of a tensor each row of the batch has; 0: all slices share it.

        Raises: Unclear where that may be chance.
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
        # [batch, heads, queries, keys], or a value or a vector for each place of each row.
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
        """Count the rows of a tensor [rows * heads, ...], as biases of attention have them."""
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
