"""Writes a universal checkpoint of DeepSpeed from a checkpoint of infinity, without a model.

    each weight: chunks -> master and moments, fp32 -> zero/NAME/fp32.pt, exp_avg.pt, …

One weight is in memory at a time. The files are in a folder with a temporary name until all files
are on the drive. DeepSpeed's loader of stages 1 and 2 and the loader of stage 3 read counts,
hyper-parameters and model states from different places; the export writes both places.

The export relies on these properties of the format (DeepSpeed 0.19.8):

- The file of a parameter's state has a tensor of the parameter's whole shape as {"param": …}.
- Stages 1 and 2 read the hyper-parameters of each group from `param_groups`, and each step from a
  `step.pt`. Stage 3 uses the first group's hyper-parameters for all groups, and one object as the
  step of all sub-groups: the first sub-group's. Optimizers of torch need a tensor as the step.
- No stage reads untrained parameters, buffers, or any entry of `module`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from infinity._src.base.atomic_file import (
    fsync_directory,
    fsync_file,
    open_new,
    write_durably,
)
from infinity._src.base.dtypes import check_torch_saves, dtype_of, kind_of
from infinity._src.base.wording import listed
from infinity._src.cabi.records import Master
from infinity._src.checkpoint.formats.deepspeed import GLOBAL_STATE, MASTERS, WHOLE_MODEL, ZERO
from infinity._src.checkpoint.manifest import OptimizerEntry, from_json
from infinity._src.checkpoint.metadata import read_buffers
from infinity._src.checkpoint.reader import (
    Checkpoint,
    ChunkReader,
    SavedParam,
    SavedWeight,
    weights_by_name,
)
from infinity._src.checkpoint.reshard import LOOK_AHEAD, slice_of
from infinity._src.kernels.state_codec import decode_sections
from infinity._src.kernels.tiling.tiled_module import whole_name

_MOMENTS = ("exp_avg", "exp_avg_sq")
_FORMAT = "0.19.8"
"""Version of DeepSpeed whose format the export writes; DeepSpeed's loaders compare versions."""
_MODEL_NOTE = (
    "DeepSpeed takes untrained parameters and buffers from its model, and the loss scaler from its "
    "configuration"
)
_SCHEDULER_NOTE = (
    "the scheduler's state assumes one scheduler step per step: otherwise pass "
    "load_lr_scheduler_states=False"
)
_STEP_NOTE = (
    "the step of stage 3 is a number, for DeepSpeed's Adam; torch_adam needs a tensor, which each "
    "sub-group would increment: continue with DeepSpeed's Adam, or with stage 1 or 2"
)
_SUB_GROUP_NUMEL = 10**9
"""DeepSpeed's default of `sub_group_size`."""
_LATEST = "latest_universal"
_STAGE_3_MODEL = "zero_pp_rank_0_mp_rank_00_model_states.pt"


@dataclasses.dataclass(frozen=True)
class ExportedUniversal:
    """Result of an export: the folder, the number of parameters, the bytes of all tensors, and
    notes for a user who loads the folder.
    """

    folder: Path
    params: int
    size_bytes: int
    notes: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class _Weight:
    """A weight to export. names: all names of the weight, the first name first. step: number of
    updates so far; None for a weight without states.
    """

    names: tuple[str, ...]
    saved: SavedWeight
    step: int | None

    @property
    def size_bytes(self) -> int:
        return 4 * math.prod(self.saved.shape) * (1 if self.step is None else 1 + len(_MOMENTS))


class UniversalExport:
    """An export of a checkpoint as a universal checkpoint of DeepSpeed.

    Raises: ValueError for a checkpoint that DeepSpeed's format cannot represent: with several
    optimizers, with states other than AdamW's two moments, or with different step counts.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._optimizer = _optimizer_of(checkpoint)
        self._weights = list(_weights_of(checkpoint, self._optimizer))
        trained = [weight for weight in self._weights if weight.step is not None]
        first = trained[0]
        other = next((weight for weight in trained if weight.step != first.step), None)
        # DeepSpeed's stages 1 and 2 refuse different step counts, and stage 3 uses the first for
        # all parameters.
        if other is not None:
            raise ValueError(
                f"{first.names[0]} has made {first.step} steps and {other.names[0]} {other.step}: "
                "DeepSpeed has one count for all parameters, so it would update one of them "
                "wrongly; export only the weights (--to safetensors --masters)"
            )
        data = checkpoint.attachment("buffers", 0)
        self._buffers = read_buffers(data) if data is not None else {}
        check_torch_saves(
            [(name, value.dtype) for name, value in self._buffers.items()],
            "a universal checkpoint of DeepSpeed",
        )
        for saved in checkpoint.params.values():
            if kind_of(dtype_of(saved.flat.dtype)) not in ("floating", "whole"):
                raise ValueError(
                    f"{saved.entry.name} is {saved.flat.dtype}, and DeepSpeed's format has fp32: "
                    "restore the checkpoint with inf.restore, or export from the model by "
                    "inf.export_dcp"
                )
        self.size_bytes = sum(weight.size_bytes for weight in self._weights)
        """Bytes of all tensors."""

    def export(
        self, target: Path, progress: Callable[[int], object] = lambda _size: None
    ) -> ExportedUniversal:
        """Write the checkpoint into a new folder of `target`, and the folder's name into
        `latest_universal`. progress: called with the bytes of each weight. Blocks.

        Raises: ValueError if the folder exists already; OSError naming the path; ChecksumError
        naming the damage. An error of a write removes the partial folder.
        """
        checkpoint = self._checkpoint
        folder = target / f"global_step{checkpoint.step}_universal"
        if folder.exists():
            raise ValueError(f"{folder} exists already: name another directory, or move it away")
        # Check before the first write, so that a missing file raises immediately.
        checkpoint.check_files()
        partial = folder.with_name(folder.name + ".partial")
        # A killed export may have left a partial folder.
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        try:
            self._write_weights(partial / ZERO, progress)
            self._write_rest(partial)
            fsync_directory(partial)
            partial.rename(folder)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        fsync_directory(target)
        write_durably(target / _LATEST, folder.name.encode())
        return ExportedUniversal(folder, len(self._weights), self.size_bytes, self._notes())

    def _write_weights(self, zero: Path, progress: Callable[[int], object]) -> None:
        zero.mkdir()
        with contextlib.closing(ChunkReader(self._checkpoint)) as reader:
            for weight in self._weights:
                folder = zero / weight.names[0]
                folder.mkdir()
                for name, value in self._states_of(weight, reader).items():
                    _save({"param": value, "cat_dim": 0}, folder / f"{name}.pt")
                if weight.step is not None:
                    # Optimizers of torch need a tensor, and DeepSpeed's optimizers accept one.
                    step = torch.tensor(float(weight.step))
                    _save(step, folder / "step.pt")
                fsync_directory(folder)
                progress(weight.size_bytes)
        fsync_directory(zero)

    def _states_of(self, weight: _Weight, reader: ChunkReader) -> dict[str, torch.Tensor]:
        """Read master and moments of a weight in fp32; for a weight without states, the value."""
        names = (MASTERS, *(_MOMENTS if weight.step is not None else ()))
        whole = {name: torch.empty(weight.saved.shape) for name in names}
        for saved, place in weight.saved.tiles:
            for name, part in zip(names, self._read(saved, len(names), reader), strict=True):
                target = whole[name] if place is None else place.of(whole[name])
                target.copy_(part.view(target.shape))
        return whole

    def _read(self, saved: SavedParam, count: int, reader: ChunkReader) -> list[torch.Tensor]:
        """Read a saved parameter as `count` fp32 vectors: the master, then the moments."""
        flat, numel = saved.flat, saved.entry.numel
        out = [torch.empty(numel) for _ in range(count)]
        pieces = self._checkpoint.pieces(saved, 0, numel)
        for piece, arrays in reader.read(((saved, piece) for piece in pieces), LOOK_AHEAD):
            given = [
                torch.from_numpy(slice_of(section, array, piece.start, piece.numel))
                for section, array in zip(flat.sections, arrays, strict=True)
            ]
            if flat.state_format.master is Master.RAW:
                values = [given[0].view(dtype_of(flat.dtype))]
            else:
                master, moments = decode_sections(flat.state_format, given)
                values = [master, *moments]
            for target, value in zip(out, values[:count], strict=True):
                target[piece.at : piece.at + piece.numel] = value
        return out

    def _write_rest(self, folder: Path) -> None:
        groups = [
            {key: from_json(value) for key, value in group["values"].items()}
            for group in self._optimizer.groups
        ]
        packed = [{**group, "params": [index]} for index, group in enumerate(groups)]
        trained = {name: weight for weight in self._weights for name in weight.names}
        step = next(weight.step for weight in self._weights if weight.step is not None)
        counted = step if self._several_sub_groups else torch.tensor(float(step))
        states = {index: {"step": counted} for index in range(len(groups))}
        inner = {"state": states, "param_groups": packed}
        common = {"ds_version": _FORMAT, "param_groups": packed}
        _save({**common, "optimizer_state_dict": inner}, folder / ZERO / GLOBAL_STATE)
        shapes: list[dict[str, torch.Size]] = [{} for _ in groups]
        for index, group in enumerate(self._optimizer.groups):
            for name in group["params"]:
                weight = trained.get(whole_name(name) or name) or trained.get(name)
                if weight is not None and weight.step is not None:
                    shapes[index][weight.names[0]] = torch.Size(weight.saved.shape)
        steps = self._checkpoint.step
        model = {
            "module": self._buffers, "buffer_names": list(self._buffers), "optimizer": None,
            "param_shapes": shapes, "frozen_param_shapes": {}, "frozen_param_fragments": {},
            "shared_params": {
                alias: weight.names[0] for weight in self._weights for alias in weight.names[1:]
            },
            "lr_scheduler": _scheduler(steps, groups), "data_sampler": None, "random_ltd": None,
            "skipped_steps": max(0, steps - step), "global_steps": steps,
            "dp_world_size": self._checkpoint.world, "mp_world_size": 1,
            "ds_config": {}, "ds_version": _FORMAT,
        }  # fmt: skip
        _save(model, folder / WHOLE_MODEL)
        os.link(folder / WHOLE_MODEL, folder / _STAGE_3_MODEL)

    @property
    def _several_sub_groups(self) -> bool:
        """Return whether stage 3 has several sub-groups. All of them use the same object as the
        step; each sub-group would increment a tensor in place."""
        numel = sum(math.prod(weight.saved.shape) for weight in self._weights)
        return len(self._optimizer.groups) > 1 or numel > _SUB_GROUP_NUMEL

    def _notes(self) -> tuple[str, ...]:
        notes = [_MODEL_NOTE, _SCHEDULER_NOTE]
        if self._several_sub_groups:
            notes.append(_STEP_NOTE)
        values = [group["values"] for group in self._optimizer.groups]
        if any(value != values[0] for value in values[1:]):
            notes.append(
                "parameter groups differ: stages 1 and 2 load each group, in this order; stage 3 "
                "loads the first group's values for all, so set the other groups after "
                "load_checkpoint"
            )
        left_out = self._checkpoint.left_out
        if left_out:
            names = listed(entry.name for entry in left_out)
            notes.append(f"the checkpoint was saved with frozen=False, so it lacks {names}")
        return tuple(notes)


def _optimizer_of(checkpoint: Checkpoint) -> OptimizerEntry:
    titles = [entry.title for entry in checkpoint.optimizers]
    if len(titles) != 1:
        raise ValueError(
            f"{checkpoint.directory} has the states of {', '.join(titles) or 'no optimizer'}: "
            "DeepSpeed has one optimizer for all parameters; export only the weights (--to "
            "safetensors)"
        )
    entry = checkpoint.optimizers[0]
    for name, param in entry.params.items():
        if tuple(param["moments"]) != _MOMENTS:
            raise ValueError(
                f"{name} has the moments {param['moments']} of {entry.title}: DeepSpeed's "
                "universal checkpoints have exp_avg and exp_avg_sq; export only the weights (--to "
                "safetensors --masters)"
            )
    if not entry.params:
        raise ValueError(
            f"{checkpoint.directory} has no parameter with states of {entry.title}: export it as "
            "safetensors"
        )
    return entry


def _weights_of(checkpoint: Checkpoint, optimizer: OptimizerEntry) -> Iterator[_Weight]:
    by_name = weights_by_name(checkpoint.params.values())
    seen: set[int] = set()
    for saved in checkpoint.params.values():
        names = []
        for name in saved.entry.names:
            whole = whole_name(name)
            # A user's module may have a name like a tile's, but be no tile.
            is_tile = whole in by_name and any(each is saved for each in by_name[whole].saved)
            names.append(whole if whole is not None and is_tile else name)
        weight = by_name[names[0]]
        if id(weight) in seen:
            continue
        seen.add(id(weight))
        if "/" in names[0]:
            raise ValueError(f"{names[0]!r} cannot be a folder's name, as in DeepSpeed's format")
        steps = [optimizer.params.get(each.entry.name) for each in weight.saved]
        counts = [from_json(each["state"]).get("step", 0) for each in steps if each is not None]
        if len(counts) not in (0, len(steps)) or len(set(counts)) > 1:
            raise ValueError(
                f"the tiles of {names[0]} have several step counts, or only some have states: "
                "DeepSpeed has one count; export only the weights (--to safetensors --masters)"
            )
        yield _Weight(tuple(names), weight, counts[0] if counts else None)


def _scheduler(steps: int, groups: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the state of a scheduler, of DeepSpeed or of torch, after `steps` steps."""
    return {
        "last_batch_iteration": steps - 1,
        "last_epoch": steps,
        "_step_count": steps + 1,
        "_last_lr": [float(group["lr"]) for group in groups],
        "lr_lambdas": [None for _ in groups],
    }


def _save(value: Any, path: Path) -> None:
    with open_new(path) as file:
        torch.save(value, file)
    fsync_file(path)
