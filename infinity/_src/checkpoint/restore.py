"""Restoring a checkpoint into a model. Checkpoint and model may differ in ranks, tiers, chunk
sizes, state formats and tiles.

    match     names, shapes, dtypes, optimizers
    compose   for groups of chunks of this rank's shards: read the saved chunks that hold their
              parameters, convert (reshard.py), store
    apply     scalars, groups, buffers, step

A restore matches everything before it writes anything.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from infinity._src.base.dtypes import dtype_name, dtype_of
from infinity._src.base.progress import ProgressLine
from infinity._src.base.wording import listed
from infinity._src.cabi.records import SECTION_MAX
from infinity._src.checkpoint import metadata
from infinity._src.checkpoint.directory import begun_commits, newest_generation, typed_errors
from infinity._src.checkpoint.formats.safe_pickle import read_extra
from infinity._src.checkpoint.manifest import (
    LeftOutEntry,
    OptimizerEntry,
    from_json,
)
from infinity._src.checkpoint.reader import (
    Checkpoint,
    ChunkReader,
    SavedParam,
    SavedRanges,
    SavedWeight,
    weights_by_name,
)
from infinity._src.checkpoint.reshard import LOOK_AHEAD, Composer, Fill, Group, Range
from infinity._src.checkpoint.save import Saver
from infinity._src.checkpoint.writer import chunk_rows
from infinity._src.config.policy import Policy
from infinity._src.distributed.communicator import Comm
from infinity._src.distributed.rendezvous import Rendezvous
from infinity._src.optim.base import Optimizer
from infinity._src.optim.step import StepPipeline
from infinity._src.params.chunk_pipeline import Bytes, ChunkPipeline, slab_buffers
from infinity._src.params.materialize import size_text
from infinity._src.params.reduce import GradReducer
from infinity._src.params.state_store import StateStore
from infinity._src.params.unit import Flat, Param
from infinity.aio import JobKind, Ticket
from infinity.errors import AioError, DamagedRange, PeerFailed, StateInvalid

log = logging.getLogger("infinity")

_WAYS = (
    "Tile the model in the same way (inf.tile_linears, inf.tile_experts); or use inf.export_dcp "
    "and inf.load_dcp, or without optimizer states `infinity checkpoint export` and load="
)


def match_params(
    checkpoint: Checkpoint,
    params: Sequence[Param],
    learns: Callable[[Param], bool],
    *,
    strict: bool,
) -> tuple[dict[Param, SavedRanges], list[str]]:
    """Find the elements of each parameter in a checkpoint, by any of the parameter's names in state
    dicts. Returns (the elements, without parameters that the save left out; notes on parameters
    that only the model or only the checkpoint has). With `strict` such parameters raise.

    learns: a function that returns whether training changes a parameter.
    Raises: ValueError naming parameters that are missing, unexpected, of another shape or dtype, in
    other tiles along columns, or trained now but left out of the save.
    """
    # Every name counts: a tied parameter may have another first name in another model.
    by_name = weights_by_name(checkpoint.params.values())
    weights: dict[Param, SavedWeight] = {}
    for param in params:
        weight = next((by_name[name] for name in param.keys if name in by_name), None)
        if weight is not None:
            weights[param] = weight
    kept = _left_out(checkpoint, [param for param in params if param not in weights])
    missing = [
        f"{param.name} ({list(param.whole_shape)}, {size_text(param.whole_shape, param.dtype)})"
        for param in params
        if param not in weights and param not in kept
    ]
    # Compared by identity, since all names of a tied parameter share one entry.
    distinct = {id(weight): weight for weight in weights.values()}.values()
    used = {id(saved.entry) for weight in distinct for saved in weight.saved}
    unexpected = [
        f"{name} ({_place_of(saved, checkpoint)})"
        for name, saved in checkpoint.params.items()
        if id(saved.entry) not in used
    ]
    known = {id(entry) for entry in kept.values()}
    unexpected += [
        f"{entry.name} ({list(entry.shape)}, frozen when saved, and omitted)"
        for entry in checkpoint.left_out
        if id(entry) not in known
    ]
    if strict and (missing or unexpected):
        parts = [f"{listed(missing)} missing in it"] if missing else []
        parts += [f"{listed(unexpected)} not in the model"] if unexpected else []
        raise ValueError(
            f"{checkpoint.directory} is a checkpoint of another model: {'; '.join(parts)}. "
            "strict=False restores the matching parameters"
        )
    notes = [f"{listed(missing)} missing in the checkpoint: values unchanged"] if missing else []
    notes += [f"{listed(unexpected)} not in the model: omitted"] if unexpected else []
    for param, entry in kept.items():
        _check_kept(param, entry, str(checkpoint.directory), learns=learns(param))
    found = {param: _ranges_of(param, weight, checkpoint) for param, weight in weights.items()}
    return found, notes


def _left_out(checkpoint: Checkpoint, params: Sequence[Param]) -> dict[Param, LeftOutEntry]:
    by_name = {name: entry for entry in checkpoint.left_out for name in entry.names}
    found = ((param, next((n for n in param.keys if n in by_name), None)) for param in params)
    return {param: by_name[name] for param, name in found if name is not None}


def _check_kept(param: Param, entry: LeftOutEntry, directory: str, *, learns: bool) -> None:
    """Raise ValueError unless a parameter that the save left out can keep the model's values."""
    if tuple(param.whole_shape) != entry.shape or dtype_name(param.dtype) != entry.dtype:
        raise ValueError(
            f"{param.keys[0]}, which was frozen and is not in {directory}, had shape "
            f"{entry.shape} and {entry.dtype}; in the model the parameter has shape "
            f"{tuple(param.whole_shape)} and {dtype_name(param.dtype)}: load the model that was "
            "trained, in the same dtype"
        )
    if learns:
        raise ValueError(
            f"{param.name} is trained now, but was frozen when {directory} was saved with "
            "frozen=False, so the checkpoint lacks its values and states: freeze the parameter "
            "(requires_grad_(False)) before inf.offload and the optimizer, or restore a "
            "checkpoint that was saved with frozen=True"
        )


def _ranges_of(param: Param, weight: SavedWeight, checkpoint: Checkpoint) -> SavedRanges:
    if param.whole_shape != weight.shape:
        raise ValueError(
            f"{param.keys[0]} has shape {weight.shape} in {checkpoint.directory} "
            f"({_place_of(weight.saved[0], checkpoint)}), and shape {param.whole_shape}, "
            f"{size_text(param.whole_shape, param.dtype)}, in the model"
        )
    ranges = weight.ranges_of(param)
    if ranges is None:
        raise ValueError(
            f"{param.keys[0]} is in other tiles in {checkpoint.directory}, and tiles along columns "
            f"(input features) can only be restored into the same tiles. {_WAYS}"
        )
    for saved in ranges.saved:
        # A silent cast would change values; the user must cast explicitly.
        if dtype_name(param.dtype) != saved.flat.dtype:
            raise ValueError(
                f"{param.name} is {saved.flat.dtype} in {checkpoint.directory}, and "
                f"{dtype_name(param.dtype)} in the model: cast the model "
                f"(model.to(torch.{saved.flat.dtype})) before inf.offload"
            )
    return ranges


def _place_of(saved: SavedParam, checkpoint: Checkpoint) -> str:
    """Describe the place and the bytes of a saved parameter."""
    size = size_text(saved.entry.shape, dtype_of(saved.flat.dtype))
    return ", ".join(filter(None, (checkpoint.file_of(saved), size)))


class MatchedOptimizer:
    """One optimizer and its saved state. `apply` sets everything except the tensors.

    held: parameters whose states are restored. unfrozen: parameters of `held` that were unfrozen
    before the save and are still frozen in this model, so they have no states yet. begun:
    parameters with states in this model that were frozen until the save: their states begin anew.

    Raises: ValueError, naming both sides, for another class, other parameters or moments, and for
    groups or tiles that join parameters with different saved values.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        entry: OptimizerEntry,
        found: Mapping[Param, SavedRanges],
        optimizer_of: Callable[[Param], object],
        directory: str,
        *,
        strict: bool,
    ) -> None:
        self.optimizer = optimizer
        if optimizer.title != entry.title:
            raise ValueError(
                f"{directory} has the states of {entry.title}, and the optimizer is "
                f"{optimizer.title}: build the same, or give None to restore the parameters alone"
            )
        names = {param: _names_of(ranges) for param, ranges in found.items()}
        grouped = {name for group in entry.groups for name in group["params"]}
        holds = [param for param in found if optimizer_of(param) is optimizer]
        self.unfrozen = [
            param
            for param in found
            if param in optimizer.stateless and all(name in entry.params for name in names[param])
        ]
        self.begun = [
            param
            for param in holds
            if all(name in grouped and name not in entry.params for name in names[param])
        ]
        self.held = [param for param in holds if param not in {*self.begun}] + self.unfrozen
        names = {param: names[param] for param in self.held}
        missing = [
            param.name
            for param in self.held
            if any(name not in entry.params for name in names[param])
        ]
        unexpected = sorted(set(entry.params).difference(*names.values())) if strict else []
        if missing or unexpected:
            parts = (
                [f"no states of {listed(missing)}, which the optimizer holds"] if missing else []
            )
            parts += (
                [f"states of {listed(unexpected)}, not in the optimizer"] if unexpected else []
            )
            raise ValueError(
                f"{directory} has {'; and '.join(parts)}: give the optimizer the same parameters "
                "(frozen ones have no states), or None to restore the parameters alone"
            )
        self._states: dict[Param, Any] = {}
        for param in self.held:
            saved, mine = entry.params[names[param][0]], list(optimizer.moments_of(param))
            # Moments differ, for example, between SGD with and without momentum.
            if saved["moments"] != mine:
                raise ValueError(
                    f"{param.name} has the moments {saved['moments']} in {directory}, and {mine} "
                    "in the optimizer: build the optimizer with the same hyper-parameters (such as "
                    "SGD's momentum)"
                )
            # A parameter has one count of steps, but tiles with different counts were saved.
            other = next((name for name in names[param] if entry.params[name] != saved), None)
            if other is not None:
                raise ValueError(
                    f"{param.name} has the states of {names[param][0]} and {other} of {directory}, "
                    f"whose moments or counts of steps differ. {_WAYS}"
                )
            self._states[param] = from_json(saved["state"])
        self._groups = [
            self._group(group, entry, found, directory) for group in optimizer.param_groups
        ]

    def _group(
        self,
        group: dict[str, Any],
        entry: OptimizerEntry,
        found: Mapping[Param, SavedRanges],
        directory: str,
    ) -> dict[str, Any]:
        """Return the values of the saved group that has the parameters of `group`; {} for a group
        without saved parameters.
        """
        where = {
            name: index for index, saved in enumerate(entry.groups) for name in saved["params"]
        }
        records = [at_rest.infinity_link.param for at_rest in group["params"]]
        indices = {
            where[name]: record
            for record in records
            # A parameter that the save left out has no ranges, but the saved group has its name.
            for name in (_names_of(found[record]) if record in found else [record.name])
            if name in where
        }
        values = [entry.groups[index]["values"] for index in indices]
        # A group has one value of each kind, but groups with different values were saved.
        if any(other != values[0] for other in values[1:]):
            names = " and ".join(record.name for record in list(indices.values())[:2])
            raise ValueError(
                f"{names} are in one parameter group, but in groups with different values in "
                f"{directory}: group them as in the checkpoint"
            )
        taken: dict[str, Any] = (
            {key: from_json(value) for key, value in values[0].items()} if values else {}
        )
        if taken:
            # Before anything is written: raises for a value that this optimizer refuses.
            self.optimizer.check_group({**group, **taken})
        return taken

    def apply(self) -> None:
        """Set the groups' values, and the small state of each parameter."""
        for group, taken in zip(self.optimizer.param_groups, self._groups, strict=True):
            group.update(taken)
        for param, state in self._states.items():
            kept = self.optimizer.state[param.at_rest]
            # In place, since steps and state_dict read the optimizer's mapping.
            kept.clear()
            kept.update(state)
        for param in self.begun:
            self.optimizer.state[param.at_rest].clear()


def _names_of(ranges: SavedRanges) -> list[str]:
    return [saved.entry.name for saved in ranges.saved]


# -- restoring -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Restored:
    """The result of `inf.restore`.

    step: number of completed steps, which is the index of the next step. extra: the object given to
    `inf.save(extra=)` on this rank; a rank that the saved run did not have gets rank 0's. rounded:
    how another state format rounded the values; "" if all bits are as saved. notes: differences
    between the saved run and this run, above all those that change numbers from now on. damaged:
    ranges of this rank's shard that could not be read (`inf.restore(damaged=)`).
    """

    step: int
    extra: Any
    rounded: str
    notes: tuple[str, ...]
    damaged: tuple[DamagedRange, ...] = ()


@dataclasses.dataclass(frozen=True)
class _Shards:
    """Shards of this rank, of all flats. rows: the shards' chunks. ids: the chunks' ids in the
    executor. stored: whether each section of each flat is written, [flats, SECTION_MAX]. kept:
    whether a row also has elements that keep the model's values.
    """

    store: StateStore
    flats: Sequence[Flat]
    rows: npt.NDArray[np.void]
    ids: npt.NDArray[np.int32]
    stored: npt.NDArray[np.bool_]
    kept: npt.NDArray[np.bool_]

    def move(
        self, kind: JobKind, group: Group, buffer: Bytes, mine: npt.NDArray[np.bool_] | None = None
    ) -> Ticket:
        """Start a FETCH or STORE of a group, or of its rows in the mask `mine`. Does not block."""
        which = slice(None) if mine is None else mine
        rows = group.rows[which]
        flat_of = self.rows["flat"][rows]
        stored = self.stored[flat_of]
        addresses = np.where(stored, group.at[which] + buffer.ctypes.data, 0).astype(np.uint64)
        return self.store.move_chunks(
            [self.flats[index] for index in np.unique(flat_of).tolist()],
            self.ids[rows],
            kind,
            stored @ (1 << np.arange(SECTION_MAX)),
            addresses,
        )


@dataclasses.dataclass(frozen=True)
class _Prepared:
    """A checkpoint that was matched with the model. notes: notes on parameters and buffers that
    only the model or only the checkpoint has."""

    found: Mapping[Param, SavedRanges]
    optimizers: Sequence[MatchedOptimizer]
    buffers: dict[str, torch.Tensor]
    extra: Any
    notes: Sequence[str]


@dataclasses.dataclass(frozen=True)
class _Older:
    """An older commit from which damaged ranges are read."""

    checkpoint: Checkpoint
    reader: ChunkReader

    def fills(self, fill: Fill) -> Iterator[Fill] | None:
        """Find the elements of a part in this commit; None if it has no such parameter."""
        entry, dtype = fill.saved.entry, fill.saved.flat.dtype
        saved = self.checkpoint.params.get(entry.name)
        if saved is None or (saved.entry.shape, saved.flat.dtype) != (entry.shape, dtype):
            return None
        return (
            fill._replace(
                start=fill.start + piece.at,
                saved=saved,
                element=fill.element + piece.at,
                chunk=piece.chunk,
                source=piece.start,
                numel=piece.numel,
            )
            for piece in self.checkpoint.pieces(saved, fill.element, fill.numel)
        )


class _Unreadable(Exception):
    """Part of a checkpoint could not be read; `__cause__` is the error of the read."""


Damaged = Literal["raise", "report", "from-older"]
"""Modes of restoring a damaged checkpoint; see `inf.restore`."""


class RestoreJob:
    """One restore of a model. Collective on several ranks. strict, damaged: see `inf.restore`."""

    def __init__(
        self,
        saver: Saver,
        gradients: GradReducer,
        pipeline: StepPipeline,
        comm: Comm,
        policy: Policy,
        *,
        strict: bool,
        damaged: Damaged,
    ) -> None:
        self._saver = saver
        self._states = saver.states
        self._gradients = gradients
        self._pipeline = pipeline
        self._comm = comm
        self._policy = policy
        self._strict, self._reports = strict, damaged == "report"
        self._falls_back = damaged == "from-older"
        self._damaged: list[DamagedRange] = []
        self._older: list[_Older] = []
        # True once states of this model may be overwritten.
        self._begun = False
        # The error of a damaged commit, after which an older one is tried.
        self._damage: Exception | None = None

    def restore(self, model: torch.nn.Module, given: object, directory: Path) -> Restored:
        """Check everything, then write the states. Blocks. Collective.

        Raises: ValueError, RuntimeError, AioError for a checkpoint that cannot be read or does not
        match the model, before anything is written; AioError also while states are written, after
        which every later call raises StateInvalid. PeerFailed in both cases if another rank has
        failed.
        """
        # A running save still reads the states that this restore will overwrite.
        self._saver.wait_for_last()
        try:
            if self._falls_back:
                return self._restore_whole(model, given, directory)
            return self._restore_newest(model, given, directory)
        # Also after KeyboardInterrupt: no step may train on a mixture of old and new states.
        except BaseException as error:
            if self._begun:
                self._fail(error, directory)
            raise

    def _restore_newest(self, model: torch.nn.Module, given: object, directory: Path) -> Restored:
        with Rendezvous(self._comm, f"restoring {directory}") as ranks:
            checkpoint = self._open(directory) if self._comm.rank == 0 else None
            # Rank 0 chooses the generation, since another rank might already see a newer one.
            mine = {"generation": checkpoint.generation if checkpoint is not None else 0}
            agreed = ranks.all_gather_object(mine)[0]["generation"]
            # All other ranks open rank 0's generation by number.
            checkpoint = checkpoint or self._open(directory, agreed)
            # Inside of the rendezvous, so that all ranks raise if one rank refuses.
            prepared = self._prepare(model, given, checkpoint)
        with checkpoint:
            return self._write(model, checkpoint, prepared)

    def _write(
        self, model: torch.nn.Module, checkpoint: Checkpoint, prepared: _Prepared
    ) -> Restored:
        """Write the states, on all ranks. Raises: AioError; BudgetError before anything is written.
        """
        self._make_states(prepared)
        self._begun = True
        with Rendezvous(self._comm, f"restoring {checkpoint.directory}"):
            return self._apply(model, checkpoint, prepared)

    # -- the newest undamaged commit ---------------------------------------------------------------

    def _restore_whole(self, model: torch.nn.Module, given: object, directory: Path) -> Restored:
        """Restore the newest undamaged commit. If all commits are damaged, restore the newest one
        that can be opened, and read its damaged ranges from older commits.
        """
        numbers = self._generations(directory)
        for number in numbers:
            restored = self._try(model, given, directory, number)
            if restored is None:
                continue
            if self._damage is not None:
                note = (
                    f"a newer commit is damaged ({self._damage}); step {restored.step} is the "
                    "newest whole commit"
                )
                log.warning("restoring %s: %s", directory, note)
                restored = dataclasses.replace(restored, notes=(*restored.notes, note))
            return restored
        self._reports, self._falls_back = True, False
        with contextlib.ExitStack() as undo:
            opened = self._open_all(directory, numbers, undo)
            if not opened:
                raise self._damage or _elsewhere()
            for checkpoint in opened[1:]:
                reader = ChunkReader(checkpoint, None if given else (0,))
                undo.callback(reader.close)
                self._older.append(_Older(checkpoint, reader))
            with Rendezvous(self._comm, f"restoring {directory}"):
                prepared = self._prepare(model, given, opened[0])
            return self._write(model, opened[0], prepared)

    def _generations(self, directory: Path) -> list[int]:
        """List the commits that rank 0 finds in a directory, newest first. Collective. Raises:
        AioError if there is none.
        """
        with Rendezvous(self._comm, f"restoring {directory}") as ranks:
            found: list[int] = []
            if self._comm.rank == 0:
                with typed_errors(directory, "open", 0):
                    found = begun_commits(directory)
                if not found:
                    # Raises the error for a directory without a commit.
                    newest_generation(directory)
            numbers: list[int] = ranks.all_gather_object({"numbers": found})[0]["numbers"]
        return numbers

    def _try(
        self, model: torch.nn.Module, given: object, directory: Path, number: int
    ) -> Restored | None:
        """Restore this generation; None if it is damaged on some rank. Collective. Raises: errors
        other than damage.
        """
        what = f"restoring {directory}"
        damage: BaseException | None = None
        with contextlib.ExitStack() as undo:
            with Rendezvous(self._comm, what) as ranks:
                try:
                    checkpoint = undo.enter_context(self._open(directory, number))
                    prepared = self._prepare(model, given, checkpoint)
                except AioError as error:
                    damage = error
                if self._is_damaged(ranks, damage):
                    return None
            self._make_states(prepared)
            self._begun = True
            with Rendezvous(self._comm, what) as ranks:
                try:
                    restored = self._apply(model, checkpoint, prepared)
                except _Unreadable as error:
                    damage = error.__cause__
                return None if self._is_damaged(ranks, damage) else restored

    def _is_damaged(self, ranks: Rendezvous, mine: BaseException | None) -> bool:
        """Return whether a rank has found damage, and keep the first error for messages.
        Collective.
        """
        damaged = [row["damaged"] for row in ranks.all_gather_object({"damaged": mine is not None})]
        if any(damaged) and self._damage is None:
            assert mine is None or isinstance(mine, Exception)
            self._damage = mine or _elsewhere()
        return any(damaged)

    def _open_all(
        self, directory: Path, numbers: Sequence[int], undo: contextlib.ExitStack
    ) -> list[Checkpoint]:
        opened: list[Checkpoint | None] = []
        for number in numbers:
            try:
                opened.append(undo.enter_context(self._open(directory, number)))
            except (AioError, ValueError) as error:
                self._damage = self._damage or error
                opened.append(None)
        missing = self._comm.all_reduce_any([each is None for each in opened])
        return [
            each
            for each, gone in zip(opened, missing, strict=True)
            if each is not None and not gone
        ]

    def _open(self, directory: Path, generation: int | None = None) -> Checkpoint:
        return Checkpoint.open(
            directory,
            generation,
            backend=self._policy.io_backend,
            partial=self._reports,
        )

    def _fail(self, error: BaseException, directory: Path) -> None:
        fault = StateInvalid(
            f"restoring {directory} was interrupted ({type(error).__name__}: {error}), so only "
            "some parameters are restored; close this engine, build the model anew and restore a "
            "whole checkpoint"
        )
        fault.__cause__ = error
        self._pipeline.set_fault(fault, final=True)

    # -- checks ------------------------------------------------------------------------------------

    def _prepare(self, model: torch.nn.Module, given: object, checkpoint: Checkpoint) -> _Prepared:
        """Match checkpoint and model, raise for differences, and read the small state."""
        saver, strict = self._saver, self._strict
        saver.check_between_steps("inf.restore()")
        # Check that files exist and have their lengths; reads check their contents.
        if not self._reports:
            checkpoint.check_files()
        params = [param for unit in saver.units for param in unit.params]
        found, notes = match_params(checkpoint, params, saver.learns, strict=strict)
        self._check_groups(found, str(checkpoint.directory))
        optimizers = metadata.optimizers_of(given, saver.units)
        matched = []
        if optimizers:
            metadata.check_all_held(saver.units, optimizers, saver.optimizer_of)
            if len(optimizers) != len(checkpoint.optimizers):
                raise ValueError(
                    f"{checkpoint.directory} has states of {len(checkpoint.optimizers)} "
                    f"optimizers, and {len(optimizers)} were given: give the same number in the "
                    "same order, or None to restore the parameters alone"
                )
            for optimizer, entry in zip(optimizers, checkpoint.optimizers, strict=True):
                matched.append(
                    MatchedOptimizer(
                        optimizer,
                        entry,
                        found,
                        saver.optimizer_of,
                        str(checkpoint.directory),
                        strict=strict,
                    )
                )
        data, whole = self._attachment(checkpoint, "buffers")
        buffers = metadata.read_buffers(data) if data is not None else {}
        if whole:
            place = str(checkpoint.directory)
            notes += metadata.check_buffers(model, buffers, place, strict=strict)
        data, _ = self._attachment(checkpoint, "extra")
        extra = read_extra(data) if data is not None else None
        return _Prepared(found, matched, buffers, extra, notes)

    def _attachment(self, checkpoint: Checkpoint, kind: str) -> tuple[bytes | None, bool]:
        """Return (this rank's buffers or small state; whether they were read, possibly from an
        older commit)."""
        try:
            return checkpoint.attachment(kind, self._comm.rank), True
        except AioError as error:
            if not self._reports:
                raise
            data, step = self._older_attachment(kind)
            reason = f"{error}{self._origin(step)}"
            self._damaged.append(
                DamagedRange(kind, 0, 0, error.path, error.offset, error.length, reason)
            )
            return data, step is not None

    def _older_attachment(self, kind: str) -> tuple[bytes | None, int | None]:
        for older in self._older:
            with contextlib.suppress(AioError):
                return older.checkpoint.attachment(kind, self._comm.rank), older.checkpoint.step
        return None, None

    def _origin(self, step: int | None) -> str:
        """Describe the step whose values replace damaged ones."""
        if step is not None:
            return f"; replaced by the values of step {step}"
        # `damaged="report"` reads no older commits.
        if self._damage is None:
            return ""
        return "; no older commit has the values" if self._older else "; there is no older commit"

    def _check_groups(self, found: Mapping[Param, SavedRanges], directory: str) -> None:
        """Raise ValueError for ranges that begin inside of a group of quantized moments."""
        for param, ranges in found.items():
            forms = [self._states.store[param.flat].sections]
            forms += [saved.flat.sections for saved in ranges.saved]
            group = max(section.group_numel for form in forms for section in form)
            if any(each.start % group or each.at % group for each in ranges.ranges):
                raise ValueError(
                    f"{param.name} is in other tiles in {directory}, which begin inside of a group "
                    f"of {group} moments with one scale. {_WAYS}"
                )

    def _notes(self, checkpoint: Checkpoint, found: Mapping[Param, SavedRanges]) -> tuple[str, ...]:
        here, notes = metadata.numerics_of(self._policy), []
        for name in metadata.NUMERICS:
            before = checkpoint.numerics.get(name, here[name])
            if here[name] != before:
                notes.append(f"{name}={before!r} in the run that saved, {here[name]!r} in this one")
        if checkpoint.world != self._comm.world:
            notes.append(
                f"{checkpoint.world} ranks saved, and {self._comm.world} ranks continue: sums over "
                "ranks round in another order"
            )
        if checkpoint.left_out:
            numel = sum(entry.numel for entry in checkpoint.left_out)
            notes.append(
                f"{listed([entry.name for entry in checkpoint.left_out])}, {numel:,} frozen "
                "elements in all, are not in the checkpoint, and keep the values of the model"
            )
        cut = [
            param.keys[0]
            for param, ranges in found.items()
            if any(each.saved.entry.numel != param.numel for each in ranges.ranges)
        ]
        if cut:
            notes.append(
                f"{listed(list(dict.fromkeys(cut)))} in other tiles: norms, and sums over tiles, "
                "round in another order"
            )
        return tuple(notes)

    # -- the states --------------------------------------------------------------------------------

    def _apply(
        self,
        model: torch.nn.Module,
        checkpoint: Checkpoint,
        prepared: _Prepared,
    ) -> Restored:
        found, optimizers = prepared.found, prepared.optimizers
        params = [param for unit in self._saver.units for param in unit.params]
        stale = [p for p in params if p.grad is not None or p.at_rest.grad is not None]
        # These gradients were computed with the values before the restore.
        if stale:
            self._states.clear_grads(stale)
        for unit in self._saver.units:
            # The gathered unit has the old values: the next use must gather the unit anew.
            if any(param in found for param in unit.params):
                self._states.touch(unit.params[0])
        held = {param for optimizer in optimizers for param in optimizer.held}
        composer, shards = self._composer(checkpoint, found, held, states=bool(optimizers))
        line = ProgressLine(
            f"restoring step {checkpoint.step}", composer.size_bytes, shown=self._comm.rank == 0
        )

        def finish(group: Group, buffer: Bytes) -> None:
            self._show(shards, group, buffer)
            line.advance(group.size_bytes)

        try:
            with slab_buffers(composer.buffer_bytes) as buffers:
                pipeline = ChunkPipeline(
                    buffers,
                    ahead=LOOK_AHEAD,
                    look_ahead=lambda coming: self._start(composer.reader, coming),
                    transform=lambda group, buffer: self._compose(composer, shards, group, buffer),
                    write=lambda group, buffer: shards.move(JobKind.STORE, group, buffer),
                    finish=finish,
                )
                pipeline.run(composer.groups())
        finally:
            line.end()
            composer.reader.close()
        for param in (param for optimizer in optimizers for param in optimizer.begun):
            start, _, numel = param.flat.layout.shard_range(param.param_index, self._comm.rank)
            self._states.store.forget(param.flat, start, numel)
        # Small state last, so that a fault while states are written does not change optimizers.
        for optimizer in optimizers:
            optimizer.apply()
        metadata.write_buffers(model, prepared.buffers)
        # Set last, so that a fault does not change the count of steps.
        self._pipeline.steps = checkpoint.step
        self._saver.mode.restored(checkpoint.step)
        self._gradients.forget()
        notes = (*prepared.notes, *self._notes(checkpoint, found))
        rounded, damaged = "; ".join(composer.rounded), tuple(self._damaged)
        return Restored(checkpoint.step, prepared.extra, rounded, notes, damaged)

    @staticmethod
    def _make_states(prepared: _Prepared) -> None:
        """Make the states of parameters that were unfrozen before the save. Called when all ranks
        have matched the checkpoint. Collective."""
        for matched in prepared.optimizers:
            matched.optimizer.make_states(matched.unfrozen)

    def _composer(
        self,
        checkpoint: Checkpoint,
        found: Mapping[Param, SavedRanges],
        held: Container[Param],
        *,
        states: bool,
    ) -> tuple[Composer, _Shards]:
        """Plan this rank's part of the restore. states: whether an optimizer was given."""
        store, flats = self._states.store, self._saver.flats
        records = [store[flat] for flat in flats]
        spans = [(shard.starts, shard.records["numel"]) for shard in records]
        rows = chunk_rows(spans, [("flat", "<i4"), ("start", "<i8"), ("numel", "<i8")])
        with_states = np.zeros(len(flats), dtype=np.bool_)
        for index, flat in enumerate(flats):
            with_states[index] = any(param in held for param in flat.params)
        ranges = [
            Range(index, param.offset + each.at, each.saved, each.start, each.numel)
            for index, flat in enumerate(flats)
            for param in flat.params
            if param in found
            for each in found[param].ranges
        ]
        composer = Composer(
            checkpoint, metadata.layout_of(flats, store, self._policy).flats, rows, ranges,
            self._comm.rank, states=with_states,
            # Without an optimizer only section 0, the parameter, is read.
            sections=None if states else (0,),
        )  # fmt: skip
        # Without optimizer states, only the master's sections are written. Spilled gradients are
        # never written, since a checkpoint does not contain them.
        stored = np.zeros((len(flats), SECTION_MAX), dtype=np.bool_)
        signs = np.zeros(len(flats), dtype=np.bool_)
        for index, shard in enumerate(records):
            form = shard.format
            whole = range(form.written_count) if with_states[index] else form.master_sections
            stored[index, list(whole)] = True
            # If moments are not restored, their sign bits belong to masters before the restore.
            signs[index] = not with_states[index] and form.sign_section is not None
        kept = signs[rows["flat"]]
        left = [
            (index, param.offset, param.numel)
            for index, flat in enumerate(flats)
            for param in flat.params
            if param not in found
        ]
        if left:
            kept[composer.cut(*np.array(left, dtype=np.int64).T).chunk] = True
        ids = np.concatenate([np.zeros(0, np.int32), *(shard.ids for shard in records)])
        return composer, _Shards(store, flats, rows, ids, stored, kept)

    def _start(self, reader: ChunkReader, coming: Sequence[Group]) -> None:
        """Start to read the next groups. If damage is reported or older commits are tried, suppress
        the error of a file that cannot be opened: composing the group raises the error again."""
        raised_later = self._reports or self._falls_back
        with contextlib.suppress(AioError) if raised_later else contextlib.nullcontext():
            reader.start(group.chunks for group in coming)

    def _compose(self, composer: Composer, shards: _Shards, group: Group, buffer: Bytes) -> None:
        """Compose a group in a buffer. If damage is reported, elements that cannot be read keep the
        model's values.
        """
        # Clear the padding between parameters, which no part covers.
        buffer[: group.size_bytes] = 0
        # Read the model's values of rows that keep some elements.
        kept = shards.kept[group.rows]
        if kept.any():
            shards.move(JobKind.FETCH, group, buffer, kept).wait()
        lost: list[int] = []
        try:
            composer.compose(
                group, buffer, (lambda fill, _: lost.append(fill.row)) if self._reports else None
            )
        except AioError as error:
            if not self._falls_back:
                raise
            # Distinguishes a damaged checkpoint from a fault of the model's drives.
            raise _Unreadable from error
        if lost:
            damaged = np.isin(np.arange(len(group.rows)), lost)
            shards.move(JobKind.FETCH, group, buffer, damaged).wait()
            again = dataclasses.replace(group, fills=[f for f in group.fills if f.row in lost])
            missed = functools.partial(self._missed, self._older, composer, again, buffer)
            composer.compose(again, buffer, missed)

    def _missed(
        self,
        older: Sequence[_Older],
        composer: Composer,
        group: Group,
        buffer: Bytes,
        fill: Fill,
        error: AioError,
    ) -> None:
        """Read a part from the older commits, if there are any, and record the damage."""
        if not older:
            self._note_damage(fill, error, None)
            return
        first, *others = older
        fills = first.fills(fill)
        if fills is None:
            self._missed(others, composer, group, buffer, fill, error)
            return
        for each in fills:
            try:
                arrays = first.reader.get(each.chunk)
            except AioError:
                self._missed(others, composer, group, buffer, each, error)
            else:
                composer.put(group, each, buffer, arrays)
                self._note_damage(each, error, first.checkpoint.step)

    def _note_damage(self, fill: Fill, error: AioError, step: int | None) -> None:
        """Record a part that cannot be read; adjacent parts with the same reason become one range.
        step: step of the older commit from which the part was read, or None.
        """
        start = fill.element
        found = DamagedRange(
            fill.saved.entry.name, start, start + fill.numel, error.path,
            error.offset, error.length, f"{error}{self._origin(step)}",
        )  # fmt: skip
        last = self._damaged[-1] if self._damaged else None
        if last and (last.name, last.stop, last.reason) == (found.name, start, found.reason):
            self._damaged[-1] = dataclasses.replace(last, stop=found.stop)
        else:
            self._damaged.append(found)

    def _show(self, shards: _Shards, group: Group, buffer: Bytes) -> None:
        delayed_params = self._saver.mode.delayed_params
        if delayed_params is None:
            return
        for row, at in zip(shards.rows[group.rows], group.at[:, 0].tolist(), strict=True):
            flat = shards.flats[row["flat"]]
            values = buffer[at : at + int(row["numel"]) * flat.dtype.itemsize]
            delayed_params.write(flat, int(row["start"]), torch.from_numpy(values).view(flat.dtype))


def _elsewhere() -> PeerFailed:
    return PeerFailed("another rank cannot restore; its error gives the cause")
