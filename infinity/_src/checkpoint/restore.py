"""Restoring a checkpoint into a model, whatever ranks, tiers, chunks and state format wrote it.

    check names, shapes, optimizers  ->  for each chunk of this rank's shards:  read the saved chunks that hold its parameters,
                                         copy bytes (or decode and encode)  ->  store  ->  scalars, groups, buffers, step

The same format is copied byte for byte: parameters start at whole quantization groups in every layout, and shards and chunks end
at such, so a part of a parameter is whole groups. Another one goes through fp32, rounded to nearest.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from infinity._src.checkpoint import metadata as describing
from infinity._src.checkpoint.matching import MatchedOptimizer, match_params
from infinity._src.checkpoint.progress import ProgressLine
from infinity._src.checkpoint.reader import Checkpoint, ChunkRef, SavedParam, StateReader
from infinity._src.checkpoint.reshard import CHUNKS_KEPT, STAGES, Part, compose, rounding
from infinity._src.checkpoint.save import Saving
from infinity._src.checkpoint.user_state import read_extra
from infinity._src.config import Policy
from infinity._src.distributed.collectives import Comm
from infinity._src.optim.step import StepPipeline
from infinity._src.params.chunk_buffer import ChunkBuffer, spans_of
from infinity._src.params.state_store import ShardRecords
from infinity._src.params.unit import Param
from infinity._src.params.unshard import Unsharder
from infinity.aio import Ticket
from infinity.errors import AioError, StateInvalid


@dataclasses.dataclass(frozen=True)
class Restored:
    """What `inf.restore` gives back.

    step: steps completed, so the index of the next one. extra: what `inf.save(extra=)` was given on this rank (on rank 0, for
    a rank that there was none of). rounded: what another state format made of the values, "" where all bits are as saved.
    notes: differences between that run and this one that decide about numbers from here on.
    """

    step: int
    extra: Any
    rounded: str
    notes: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class _Turn:
    """One chunk of this rank's shards."""

    rest: ShardRecords
    chunk: int
    parts: tuple[Part, ...]

    @property
    def refs(self) -> Iterator[ChunkRef]:
        """The saved chunks that it is made of."""
        for part in self.parts:
            yield from part.refs


class Restoring:
    """One restoring. `run` blocks; collective on several ranks."""

    def __init__(
        self, saving: Saving, unsharder: Unsharder, pipeline: StepPipeline, comm: Comm, policy: Policy
    ) -> None:
        self._saving = saving
        self._states = saving.states
        self._unsharder = unsharder
        self._pipeline = pipeline
        self._comm = comm
        self._policy = policy
        self._rounded: dict[str, None] = {}

    def run(self, model: torch.nn.Module, given: object, directory: Path) -> Restored:
        """Raises: ValueError, RuntimeError, AioError for a checkpoint that cannot be read or does not fit, before anything is
        written; AioError later too, and then the states are half restored and every later call raises StateInvalid."""
        self._saving.settle()
        problem: Exception | None = None
        checkpoint: Checkpoint | None = None
        generation = 0
        try:
            if self._comm.rank == 0:
                checkpoint = self._open(directory)
                generation = checkpoint.generation
        except Exception as error:  # noqa: BLE001 - raised below: the other ranks wait for this one
            problem = error
        agreed = int(self._comm.sum_floats([float(generation)])[0])
        try:
            if problem is None and agreed:
                checkpoint = checkpoint or self._open(directory, agreed)
                prepared = self._prepare(model, given, checkpoint)
        except Exception as error:  # noqa: BLE001 - raised below, when all ranks know of it
            problem = error
        self._agree(problem if agreed or problem else _elsewhere(directory))
        assert checkpoint is not None
        with checkpoint:
            try:
                restored = self._apply(model, checkpoint, *prepared)
            except BaseException as error:
                self._fail(error, directory)
                if isinstance(error, Exception):
                    self._agree(error)
                raise
            try:
                self._agree(None)
            except AioError as error:
                self._fail(error, directory)
                raise
        return restored

    def _open(self, directory: Path, generation: int | None = None) -> Checkpoint:
        return Checkpoint.open(directory, generation, backend=self._policy.io_backend)

    def _agree(self, problem: Exception | None) -> None:
        failed = self._comm.any_of([problem is not None])[0]
        if problem is not None:
            raise problem
        if failed:
            raise _elsewhere(None)

    def _fail(self, error: BaseException, directory: Path) -> None:
        fault = StateInvalid(
            f"restoring {directory} broke off ({type(error).__name__}: {error}), and some parameters are restored and others are "
            "not; close this engine, build the model anew and restore a whole checkpoint"
        )
        fault.__cause__ = error
        self._pipeline.fail(fault, final=True)

    # -- checks ------------------------------------------------------------------------------------------------------------

    def _prepare(
        self, model: torch.nn.Module, given: object, checkpoint: Checkpoint
    ) -> tuple[dict[Param, SavedParam], list[MatchedOptimizer], dict[str, torch.Tensor], Any]:
        """Everything that may be refused, and what is small."""
        saving, rank = self._saving, self._comm.rank
        saving.check_between_steps("inf.restore()")
        checkpoint.check_files()
        found = match_params(checkpoint, [param for unit in saving.units for param in unit.params])
        optimizers = describing.optimizers_of(given, saving.units)
        matched = []
        if optimizers:
            describing.check_all_held(saving.units, optimizers, saving.holder_of)
            if len(optimizers) != len(checkpoint.optimizers):
                raise ValueError(
                    f"{checkpoint.directory} has states of {len(checkpoint.optimizers)} optimizers, and {len(optimizers)} were "
                    "given: give as many, in the same order, or None to restore the parameters alone"
                )
            for optimizer, entry in zip(optimizers, checkpoint.optimizers, strict=True):
                matched.append(MatchedOptimizer(optimizer, entry, found, saving.holder_of, str(checkpoint.directory)))
        data = checkpoint.attachment("buffers", rank)
        buffers = describing.read_buffers(data) if data is not None else {}
        describing.check_buffers(model, buffers, str(checkpoint.directory))
        data = checkpoint.attachment("extra", rank)
        return found, matched, buffers, read_extra(data) if data is not None else None

    def _notes(self, checkpoint: Checkpoint) -> tuple[str, ...]:
        here, notes = describing.numerics_of(self._policy), []
        for name in describing.NUMERICS:
            before = checkpoint.numerics.get(name, here[name])
            if here[name] != before:
                notes.append(f"{name}={before!r} in the run that saved, {here[name]!r} in this one")
        if checkpoint.world != self._comm.world:
            notes.append(f"{checkpoint.world} ranks saved, {self._comm.world} train on: sums over ranks round in another order")
        return tuple(notes)

    # -- the states --------------------------------------------------------------------------------------------------------

    def _apply(
        self,
        model: torch.nn.Module,
        checkpoint: Checkpoint,
        found: Mapping[Param, SavedParam],
        optimizers: Sequence[MatchedOptimizer],
        buffers: dict[str, torch.Tensor],
        extra: Any,
    ) -> Restored:
        for param in found:
            if param.grad is not None or param.at_rest.grad is not None:
                self._states.set_full_grad(param, None)
        for unit in self._saving.units:
            self._states.touch(unit.params[0])
        held = {param for optimizer in optimizers for param in optimizer.held}
        turns = list(self._turns(checkpoint, found))
        line = ProgressLine(f"restoring step {checkpoint.step}", sum(map(_size, turns)), shown=self._comm.rank == 0)
        reader = StateReader(checkpoint, CHUNKS_KEPT, None if optimizers else (0,))
        stages, writing = [ChunkBuffer(self._states.rest) for _ in range(STAGES)], list[Ticket]()
        try:
            for index, turn in enumerate(turns):
                reader.start(ref for each in turns[index : index + STAGES] for ref in each.refs)
                if len(writing) == len(stages):
                    writing.pop(0).wait()
                stage = stages[index % len(stages)]
                sections = self._compose(reader, stage, turn, held)
                writing.append(stage.store(sections))
                self._show(turn, stage)
                line.advance(_size(turn))
            while writing:
                writing.pop(0).wait()
        finally:
            line.end()
            _settle(writing)
            reader.settle()
        for optimizer in optimizers:
            optimizer.apply()
        describing.write_buffers(model, buffers)
        self._pipeline.steps = checkpoint.step
        self._saving.mode.restored(checkpoint.step)
        self._unsharder.gradients.restored()
        return Restored(checkpoint.step, extra, "; ".join(self._rounded), self._notes(checkpoint))

    def _turns(self, checkpoint: Checkpoint, found: Mapping[Param, SavedParam]) -> Iterator[_Turn]:
        for flat in self._saving.flats:
            by_chunk: dict[int, list[Part]] = {}
            for param in flat.params:
                for span in spans_of(param, self._comm.rank):
                    pieces = tuple(checkpoint.pieces(found[param], span.element, span.numel))
                    by_chunk.setdefault(span.chunk, []).append(Part(span.start, found[param], pieces))
            for chunk, parts in sorted(by_chunk.items()):
                yield _Turn(self._states.rest[flat], chunk, tuple(parts))

    def _compose(self, reader: StateReader, stage: ChunkBuffer, turn: _Turn, held: set[Param]) -> range:
        """Put a chunk together in a stage. Returns its sections that are to be stored."""
        target, flat = turn.rest.format, turn.rest.flat
        whole = any(param in held for param in flat.params)
        sections = range(target.written_count if whole else target.master_count)
        stage.hold(turn.rest, turn.chunk)
        for section in sections:
            stage.section(section, 0, flat.layout.chunks[turn.chunk].numel)[:] = 0
        for part in turn.parts:
            source = part.saved.flat.state_format
            if whole and (text := rounding(source, target)):
                self._rounded[text] = None
            compose(reader, part, target, flat.dtype, sections, stage.section, states=whole)
        return sections

    def _show(self, turn: _Turn, stage: ChunkBuffer) -> None:
        """With update="delayed", passes may compute from a second copy: it gets the parameters too."""
        shadow, flat = self._unsharder.delayed_params, turn.rest.flat
        if shadow is not None:
            chunk = flat.layout.chunks[turn.chunk]
            values = torch.from_numpy(stage.section(0, 0, chunk.numel)).view(flat.dtype)
            shadow.write(flat, chunk.start, values)


def _size(turn: _Turn) -> int:
    numel = turn.rest.flat.layout.chunks[turn.chunk].numel
    return sum(section.size_bytes(numel) for section in turn.rest.sections)


def _settle(tickets: Sequence[Ticket]) -> None:
    for ticket in tickets:
        try:
            ticket.wait()
        except AioError:
            continue  # an earlier fault is on its way to the caller


def _elsewhere(directory: Path | None) -> AioError:
    return AioError("another rank cannot restore, and its error says why", path=str(directory or ""), op="read")
