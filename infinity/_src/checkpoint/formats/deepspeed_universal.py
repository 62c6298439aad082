"""A universal checkpoint of DeepSpeed: a folder for each parameter, whatever the ranks. Read here;
`deepspeed_export.py` writes it.

    latest_universal                        the name of the newest folder
    global_stepN_universal/
      zero/NAME/fp32.pt, exp_avg.pt, …      a tensor each, alone or as {"param": tensor, …}
      zero/NAME/step.pt                     stages 1 and 2
      zero/optimizer_state.pt               hyper-parameters, the loss scaler; stage 3: the step
      mp_rank_00_model_states.pt            stages 1 and 2
      zero_pp_rank_R_mp_rank_00_…           stage 3: model states of each rank that saved

Stages 1 and 2 keep the shapes of parameters, stage 3 makes vectors of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from infinity._src.checkpoint.formats.deepspeed import (
    MASTERS,
    SHARDED_MODEL,
    WAY_OUT,
    WHOLE_MODEL,
    DeepSpeedCheckpoint,
    Pieces,
    ShardedCheckpoint,
    Vector,
    folder_of,
    rank_files,
    shape_of,
)
from infinity._src.checkpoint.formats.deepspeed_run import (
    RunFields,
    hyper_of,
    number_of,
    zero_config,
)
from infinity._src.checkpoint.formats.torch_files import StoredTensor, TorchFile

ZERO = "zero"
GLOBAL_STATE = "optimizer_state.pt"


def open_deepspeed(directory: Path, tag: str | None) -> DeepSpeedCheckpoint:
    """Open a checkpoint of DeepSpeed, as `save_checkpoint` wrote it or a universal one.

    Raises: OSError; ValueError for files that are damaged, refused, or of a kind that is not read.
    """
    folder = folder_of(directory, tag)
    return UniversalCheckpoint(folder) if (folder / ZERO).is_dir() else ShardedCheckpoint(folder)


class UniversalCheckpoint(DeepSpeedCheckpoint):
    """A checkpoint as `ds_to_universal` writes it."""

    def _take(self) -> RunFields:
        # Of stage 3 each rank has model states.
        whole = (self.folder / WHOLE_MODEL).is_file()
        names = [WHOLE_MODEL] if whole else rank_files(self.folder, SHARDED_MODEL)
        model = self.open(names[0])
        self._check_order(model, whole=whole)
        state = self.open(f"{ZERO}/{GLOBAL_STATE}")
        steps, group_of, groups = _groups_of(state, whole=whole)
        for index, shapes in enumerate(model.root["param_shapes"]):
            for name, shape in shapes.items():
                self._take_param(str(name), shape_of(shape), steps.get(index))
                self.group_of[str(name)] = group_of.get(index, index)
        self.hyper = [hyper_of(state, group) for group in groups]
        if whole:
            self.take_whole(model, model.root["module"])
        else:
            self.take_frozen(model, (self.open(name) for name in names[1:]))
            self.take_whole(model, model.root["buffer_names"])
        self._take_others()
        return RunFields.of(model, state, state.root, stage=2 if whole else 3)

    def _check_order(self, model: TorchFile, *, whole: bool) -> None:
        """Refuse what DeepSpeed's converter puts under wrong names: it cuts partitions in the order
        of the model, and with `round_robin_gradients` they are in another one.
        """
        if not whole or not zero_config(model).get("round_robin_gradients"):
            return
        if model.root["dp_world_size"] > 1:
            raise ValueError(
                f"{self.label} was converted from a run with round_robin_gradients on several "
                "ranks: DeepSpeed's converter mixes up its parameters, which differ from the "
                "model's order there. Give the checkpoint that was converted, which is read right"
            )

    def _take_param(self, name: str, shape: tuple[int, ...], step: float | None) -> None:
        folder = self.folder / ZERO / name
        # A name is no path.
        if Path(name).name != name or name == "..":
            raise ValueError(f"{self.label} has a parameter {name!r}: a path is refused")
        found: dict[str, Pieces | int | float] = {} if step is None else {"step": step}
        for path in sorted(folder.glob("*.pt")):
            file = self.open(f"{ZERO}/{name}/{path.name}")
            if path.stem == "step":
                number = number_of([file], [file.root], f"the step of {name}")
                if number is not None:
                    found["step"] = number
                continue
            stored = _tensor_of(file)
            # A vector of stage 3 has the shape in the model states. One of another size, as of a
            # vocabulary without its padding, has its own.
            flat = len(stored.shape) == 1 and stored.numel == math.prod(shape)
            whole = shape if flat else stored.shape
            found[path.stem] = Pieces(whole, [Vector([stored])], 0, stored.numel)
        masters = found.pop(MASTERS, None)
        if not isinstance(masters, Pieces):
            raise FileNotFoundError(
                f"{folder} has no {MASTERS}.pt: the checkpoint is not whole; convert it again"
            )
        self._values[name] = masters
        # One that never got a gradient has a master alone.
        if any(isinstance(each, Pieces) for each in found.values()):
            self.states[name] = found

    def _take_others(self) -> None:
        """Take what has masters alone and is nowhere else: parameters that were frozen."""
        for path in sorted((self.folder / ZERO).glob(f"*/{MASTERS}.pt")):
            name = path.parent.name
            if name in self._values or name in self._whole or name in self._aliases:
                continue
            stored = _tensor_of(self.open(f"{ZERO}/{name}/{path.name}"))
            self._values[name] = Pieces(stored.shape, [Vector([stored])], 0, stored.numel)


def _groups_of(
    state: TorchFile, *, whole: bool
) -> tuple[dict[int, int | float], dict[int, int], list[Mapping[str, Any]]]:
    """Return the step and the parameter group of each entry of `param_shapes`, as far as they are
    not its own; and the groups.
    """
    if whole:
        return {}, {}, list(state.root["param_groups"])
    inner = state.root["optimizer_state_dict"]
    groups = list(inner["param_groups"])
    steps = {
        int(index): number_of([state], [each["step"]], f"the step of sub-group {index}") or 0
        for index, each in inner["state"].items()
        if "step" in each
    }
    group_of = {
        sub_group: index for index, group in enumerate(groups) for sub_group in group["params"]
    }
    return steps, group_of, groups


def _tensor_of(file: TorchFile) -> StoredTensor:
    value = file.root["param"] if isinstance(file.root, dict) else file.root
    stored = file.tensor(value)
    if not stored.dtype.is_floating_point:
        raise ValueError(f"{file.path} is refused: it has a {stored.dtype} tensor. {WAY_OUT}")
    return stored
