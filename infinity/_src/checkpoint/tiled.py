"""Parameters as others know them: the tiles of a weight are one tensor in every format that is not infinity's own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

import torch

from infinity._src.params.unit import Param


@dataclasses.dataclass(frozen=True)
class Whole:
    """A tensor of a state dict. params: the one parameter that it is, or all tiles that it is cut into, in order."""

    keys: tuple[str, ...]
    shape: tuple[int, ...]
    params: tuple[Param, ...]

    @property
    def name(self) -> str:
        """Its first key."""
        return self.keys[0]

    def merged(self, read: Callable[[Param], torch.Tensor]) -> torch.Tensor:
        """What `read` gives for its parameters (each of the parameter's shape), as one tensor. One tile is in memory besides."""
        whole: torch.Tensor | None = None
        for param in self.params:
            value, place = read(param), param.place
            if place is None:
                return value
            if whole is None:
                whole = torch.empty(self.shape, dtype=value.dtype)
            elif whole.dtype != value.dtype:  # masters of some tiles, and what others compute with
                whole = whole.to(torch.promote_types(whole.dtype, value.dtype))
            place.of(whole).copy_(value)
        assert whole is not None
        return whole


def wholes_of(params: Iterable[Param]) -> list[Whole]:
    """The tensors that these parameters are, in order of their first; tiles of one weight among them are put together."""
    tiles: dict[object, list[Param]] = {}
    for param in params:
        tiles.setdefault(param if param.place is None else param.keys, []).append(param)
    return [Whole(group[0].keys, group[0].whole_shape, tuple(group)) for group in tiles.values()]
