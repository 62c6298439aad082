"""Putting a chunk together from the chunks of a checkpoint, whatever ranks, chunks and state format that has.

The same format is copied byte for byte: parameters start at whole quantization groups in every layout, and shards and chunks end
at such, so a part of a parameter is whole groups. Another one goes through fp32, rounded to nearest.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import torch

from infinity._src.checkpoint.pieces import Piece
from infinity._src.checkpoint.reader import Bytes, ChunkRef, SavedParam, StateReader
from infinity._src.kernels.state_codec import decode_sections, encode_sections
from infinity.aio._records import Format, GradSection, Master, Moments, Section

CHUNKS_KEPT = 8
"""Saved chunks in memory: those that are read ahead, and those that the next chunk wants as well."""
STAGES = 4
"""Chunks that are put together, or written."""


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of a parameter in the chunk that is put together, from element `start` on, and where it lies in the checkpoint."""

    start: int
    saved: SavedParam
    pieces: tuple[Piece, ...]

    @property
    def refs(self) -> Iterator[ChunkRef]:
        """The saved chunks that it is made of."""
        for piece in self.pieces:
            yield ChunkRef(piece.rank, self.saved.flat_index, piece.chunk)


def compose(
    reader: StateReader,
    part: Part,
    target: Format,
    dtype: torch.dtype,
    sections: Iterable[int],
    section: Callable[[int, int, int], Bytes],
    *,
    states: bool,
) -> None:
    """Read a part and put it into these sections of a chunk of format `target`. Blocks. Raises: as `StateReader.get`.

    section: gives the memory of (section, first element, elements). states: as `convert`.
    """
    source = part.saved.flat.state_format
    for piece, ref in zip(part.pieces, part.refs, strict=True):
        given = [
            slice_of(each, array, piece.start, piece.numel)
            for each, array in zip(part.saved.flat.sections, reader.get(ref), strict=True)
        ]
        made = convert(source, given, target, dtype, states=states)
        for index in sections:
            section(index, part.start + piece.at, piece.numel)[:] = made[index]


def convert(
    source: Format, given: Sequence[Bytes], target: Format, dtype: torch.dtype, *, states: bool
) -> list[Bytes]:
    """Sections of whole groups in another format; the master alone, from the parameter, without `states`.

    What is given is not changed. A parameter that was saved without states gets moments of zero.
    """
    target = target.with_grad(GradSection.NONE) if target.grad else target
    if target.master is Master.RAW:
        return [given[0]]
    if states and source is target:
        return list(given)
    if states and source.master is not Master.RAW:
        master, moments = decode_sections(source, [torch.from_numpy(array) for array in given])
    else:
        master = torch.from_numpy(given[0].copy()).view(dtype).float()
        moments = [torch.zeros_like(master) for _ in range(target.count)]
    return [values.numpy().view(np.uint8) for values in encode_sections(target, master, moments)]


def rounding(source: Format, target: Format) -> str:
    """What is lost between two state formats, in words; "" if nothing is."""
    if Master.RAW in (source.master, target.master):
        return ""
    lost = []
    if target.master is Master.SPLIT8 and source.master is not Master.SPLIT8:
        lost.append("masters to 24 bits (1 parameter in 512, about, becomes the next bf16)")
    if target.count and target.moments is not source.moments and target.moments is not Moments.FP32:
        kind = "bf16" if target.moments is Moments.BF16 else "8 bits in groups of 64"
        lost.append(f"moments to {kind}")
    return f"rounded to nearest: {' and '.join(lost)}" if lost else ""


def slice_of(section: Section, array: Bytes, start: int, numel: int) -> Bytes:
    """Elements [start, start + numel) of a section's bytes; a begun group of elements counts whole."""
    return array[section.size_bytes(start) : section.size_bytes(start + numel)]
