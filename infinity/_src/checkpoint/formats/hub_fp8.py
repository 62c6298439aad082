"""Weights in fp8 with a scale for each block; the last block may be partial.

    weight [rows, columns], scales [ceil(rows / block), ceil(columns / block)]  ->  plain weight

transformers takes the size of a block from the two shapes, as if all blocks were whole: 192 rows
with 2 scales would be blocks of 96, whatever the configuration says. Here a weight is padded to
whole blocks, dequantized by transformers' own operation, and cut again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

Held = torch.Tensor | list[torch.Tensor]
"""Tensors of one pattern of a conversion: in files a list, one for each name."""


class ScaleGridError(ValueError):
    """Scales that are not one for each block. pattern, index: of the weight in its conversion."""

    def __init__(self, message: str, pattern: str, index: int) -> None:
        super().__init__(message)
        self.pattern = pattern
        self.index = index


@dataclasses.dataclass(frozen=True)
class WholeBlocks:
    """An operation of a conversion: `theirs`, which dequantizes, on weights that are padded to
    whole blocks. block: rows and columns; None where a weight has one scale.
    """

    theirs: Any
    block: tuple[int, int] | None

    @property
    def hf_quantizer(self) -> Any:
        """The quantizer; operations that have one are told from those of the model's kind."""
        return self.theirs.hf_quantizer

    @property
    def supports_many_to_many(self) -> bool:
        """True if it makes several tensors of several."""
        return bool(self.theirs.supports_many_to_many)

    def convert(self, input_dict: Mapping[str, Held], **context: Any) -> dict[str, Held]:
        """Return the weights in the dtype of the model, without their scales. Raises:
        ScaleGridError.
        """
        padded: dict[str, Held] = dict(input_dict)
        cuts: dict[str, list[tuple[int, int] | None]] = {}
        for key, weights in input_dict.items():
            scales = input_dict.get(f"{key}_scale_inv")
            # Other numbers of weights than of scales are an error of theirs.
            if isinstance(weights, list) and scales is not None and len(weights) == len(scales):
                whole = [
                    self._padded(key, index, *pair)
                    for index, pair in enumerate(zip(weights, scales, strict=True))
                ]
                padded[key] = whole
                cuts[key] = [
                    None if each is weight else (weight.shape[-2], weight.shape[-1])
                    for each, weight in zip(whole, weights, strict=True)
                ]
        made: dict[str, Any] = self.theirs.convert(padded, **context)
        if "weight" in cuts:
            # Alone, a weight comes back under the name of the model.
            return {key: _cut(value, cuts["weight"][0]) for key, value in made.items()}
        return {
            key: [_cut(*pair) for pair in zip(value, cuts[key], strict=True)]
            if key in cuts
            else value
            for key, value in made.items()
        }

    def _padded(
        self, pattern: str, index: int, weight: torch.Tensor, scales: torch.Tensor
    ) -> torch.Tensor:
        # Whole numbers are values of four bits in pairs, with blocks of their own; a number is the
        # scale of all values.
        if not weight.is_floating_point() or weight.dim() < 2 or scales.dim() < 2:
            return weight
        rows, columns = weight.shape[-2:]
        block = self.block or (rows, columns)
        grid = (-(-rows // block[0]), -(-columns // block[1]))
        wanted, found = (*weight.shape[:-2], *grid), tuple(scales.shape)
        if found != wanted:
            raise ScaleGridError(
                f"of shape {tuple(weight.shape)} with scales of shape {found}; blocks of "
                f"{block[0]} x {block[1]} have some of shape {wanted}: state the weight_block_size "
                "that it was quantized with in the quantization_config, or download it again",
                pattern,
                index,
            )
        if (rows, columns) == (grid[0] * block[0], grid[1] * block[1]):
            return weight
        whole = weight.new_zeros((*wanted[:-2], grid[0] * block[0], grid[1] * block[1]))
        whole[..., :rows, :columns] = weight
        return whole


def _cut(value: torch.Tensor, shape: tuple[int, int] | None) -> torch.Tensor:
    return value if shape is None else value[..., : shape[0], : shape[1]].contiguous()
