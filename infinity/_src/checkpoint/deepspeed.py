"""The fp32 weights of a DeepSpeed ZeRO-3 checkpoint, written by any number of ranks.

    latest              the name of the newest folder
    global_stepN/
      [bf16_]zero_pp_rank_R_mp_rank_00_optim_states.pt      rank R's part of masters, other states
      zero_pp_rank_R_mp_rank_00_model_states.pt             names, shapes, buffers, frozen parts

A rank holds, of each trainable parameter, ceil(numel / ranks) elements, one parameter after the
other in the order of `param_shapes`, cut into groups at any place; the last rank's part is padded.
Files are mapped, not read into memory.

Both kinds of files are read with torch.load(weights_only=True). They name classes of DeepSpeed (its
loss scaler, an enum), which become records without effect; DeepSpeed is not imported. Any other
name in them is refused.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from infinity._src.checkpoint.safe_pickle import load_tensors
from infinity._src.params.materialize import NamedTensors

_OPTIMIZER = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_MODEL = re.compile(r"zero_pp_rank_(\d+)_mp_rank_(\d+)_model_states\.pt")
_ELSE = (
    "DeepSpeed's own zero_to_fp32.py, which lies beside the checkpoint, converts what is not read "
    "here, and inf.load_safetensors reads what it writes"
)


@dataclasses.dataclass(frozen=True)
class _Part:
    """A parameter: for each rank, the tensors that hold its elements in order, and where in the
    first of them they begin.
    """

    shape: tuple[int, ...]
    groups: Sequence[Sequence[torch.Tensor]]
    start: int  # elements from the begin of each rank's groups
    numel: int  # elements of one rank


class DeepSpeedWeights(NamedTensors):
    """The weights of a ZeRO-3 checkpoint by name. Opening maps all its files and checks that their
    parts make up every weight.

    Raises: FileNotFoundError; ValueError for files that are damaged, refused, of another stage, or
    without masters.
    """

    def __init__(self, directory: Path, tag: str | None) -> None:
        folder = _folder(directory, tag)
        self._folder = folder
        optimizer = [
            _dict(path, load_tensors_of(path))
            for path in _ranks(folder, _OPTIMIZER, "optim_states.pt")
        ]
        model = [
            _dict(path, load_tensors_of(path)) for path in _ranks(folder, _MODEL, "model_states.pt")
        ]
        if len(optimizer) != len(model):
            raise ValueError(
                f"{folder} has optimizer states of {len(optimizer)} ranks and model states of "
                f"{len(model)}"
            )
        self._whole: dict[str, torch.Tensor] = {}
        self._parts: dict[str, _Part] = {}
        try:
            self._take_trainable(model[0], [rank["optimizer_state_dict"] for rank in optimizer])
            self._take_frozen(model)
            self._whole = {name: model[0]["module"][name] for name in model[0]["buffer_names"]}
            self._aliases = {
                str(name): str(other)
                for name, other in dict(model[0].get("shared_params") or {}).items()
            }
            self._check()
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{folder} is no ZeRO-3 checkpoint as DeepSpeed writes it: {error!r}. {_ELSE}"
            ) from error

    @property
    def label(self) -> str:
        """The folder of the tag."""
        return str(self._folder)

    def _check(self) -> None:
        wrong = next(
            (name for name, value in self._whole.items() if not isinstance(value, torch.Tensor)),
            None,
        )
        if wrong is not None:
            raise TypeError(f"the buffer {wrong} is no tensor")
        lost = next(
            (
                name
                for name in self._aliases.values()
                if name not in self._parts and name not in self._whole
            ),
            None,
        )
        if lost is not None:
            raise KeyError(lost)

    def names(self) -> Iterable[str]:
        """Return the names of all weights and buffers, every name of shared ones."""
        return [*self._parts, *self._whole, *self._aliases]

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a weight."""
        name = self._aliases.get(name, name)
        return self._parts[name].shape if name in self._parts else tuple(self._whole[name].shape)

    def is_floating_point(self, name: str) -> bool:
        """Return whether a weight is of a floating dtype."""
        name = self._aliases.get(name, name)
        # Parts are checked to be when they are taken (`_vector`).
        return name in self._parts or self._whole[name].is_floating_point()

    def read(self, name: str) -> torch.Tensor:
        """Read a weight, put together from the ranks' parts. Blocks."""
        name = self._aliases.get(name, name)
        if name in self._whole:
            return self._whole[name]
        part = self._parts[name]
        pieces = [piece for groups in part.groups for piece in _cut(groups, part.start, part.numel)]
        # The last rank's part is padded.
        return torch.cat(pieces)[: math.prod(part.shape)].view(part.shape)

    def _take_trainable(self, model: dict[str, Any], optimizer: Sequence[dict[str, Any]]) -> None:
        world = len(optimizer)
        stages = {_stage(rank["zero_stage"]) for rank in optimizer}
        # Stages 1 and 2 split the weights in another way.
        if stages != {3}:
            raise ValueError(
                f"{self.label} is of ZeRO stage {', '.join(map(str, stages))}, and stage 3 is read "
                f"here. {_ELSE}"
            )
        if any(rank["partition_count"] != world for rank in optimizer):
            raise ValueError(
                f"{self.label} was written by {optimizer[0]['partition_count']} ranks, and has "
                f"files of {world}"
            )
        groups = [[_vector(group) for group in rank["fp32_flat_groups"]] for rank in optimizer]
        start = 0
        for shapes in model["param_shapes"]:
            for name, shape in shapes.items():
                # As DeepSpeed pads: every rank has as many elements.
                numel = math.ceil(math.prod(shape) / world)
                self._parts[name] = _Part(tuple(shape), groups, start, numel)
                start += numel
        # With its optimizer on NVMe, DeepSpeed writes only the part that was in memory.
        held = {sum(group.numel() for group in rank) for rank in groups}
        if held != {start}:
            shown = " or ".join(map(str, sorted(held)))
            raise ValueError(
                f"{self.label} holds {shown} fp32 weights per rank, and the model has {start}: "
                "with the optimizer offloaded to NVMe, DeepSpeed leaves in its checkpoint only "
                "what was in memory, and the rest in files of its swap directory; save from a run "
                "whose optimizer is on the GPU or the CPU"
            )

    def _take_frozen(self, model: Sequence[dict[str, Any]]) -> None:
        for name, shape in dict(model[0].get("frozen_param_shapes") or {}).items():
            groups = [[_vector(rank["frozen_param_fragments"][name])] for rank in model]
            if (
                sum(rank[0].numel() for rank in groups) < math.prod(shape)
                or len({rank[0].numel() for rank in groups}) != 1
            ):
                raise ValueError(f"{self.label} does not hold all of {name}, which was frozen")
            self._parts[name] = _Part(tuple(shape), groups, 0, groups[0][0].numel())


def load_tensors_of(path: Path) -> Any:
    """Read a file of a checkpoint. Raises: OSError; ValueError naming the file and the name in it
    that is refused.
    """
    try:
        return load_tensors(path, records="deepspeed.")
    except ValueError as error:
        raise ValueError(f"{path} is refused: {error}. {_ELSE}") from error


def _folder(directory: Path, tag: str | None) -> Path:
    if tag is None and not any(directory.glob("*_optim_states.pt")):
        latest = directory / "latest"
        if not latest.is_file():
            raise FileNotFoundError(
                f"{directory} has no file `latest`, and no optimizer states: pass "
                "tag='global_step...'"
            )
        tag = latest.read_text().strip()
    if tag is None:
        return directory
    # `latest` is a file from elsewhere too: it must not lead out of the directory.
    if not tag or Path(tag).name != tag or tag == "..":
        raise ValueError(
            f"tag={tag!r}: it is the name of a folder in {directory}, so a path is refused"
        )
    if not (directory / tag).is_dir():
        raise FileNotFoundError(f"{directory} has no folder {tag}")
    return directory / tag


def _ranks(folder: Path, pattern: re.Pattern[str], ending: str) -> list[Path]:
    """Return the file of each rank, in order."""
    found: dict[int, Path] = {}
    for path in folder.iterdir():
        name = pattern.fullmatch(path.name)
        if name is None:
            continue
        # Model-parallel ranks hold parts of weights, which are not put together here.
        if int(name[2]) or int(name[1]) in found:
            raise ValueError(
                f"{path} is of a model-parallel run, or a second one of its rank. {_ELSE}"
            )
        found[int(name[1])] = path
    if not found:
        raise FileNotFoundError(
            f"{folder} has no zero_pp_rank_*_{ending}: a ZeRO-3 checkpoint has one for each rank. "
            f"{_ELSE}"
        )
    if sorted(found) != list(range(len(found))):
        raise FileNotFoundError(
            f"{folder} has *_{ending} of ranks {sorted(found)}, and not of those between"
        )
    return [found[rank] for rank in range(len(found))]


def _dict(path: Path, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(
            f"{path} holds a {type(value).__name__}, not what DeepSpeed writes. {_ELSE}"
        )
    return value


def _stage(value: Any) -> Any:
    """Return the number in an enum of DeepSpeed, which was read as a record."""
    return value.args[0] if getattr(value, "args", None) else value


def _vector(value: Any) -> torch.Tensor:
    if not isinstance(value, torch.Tensor) or value.ndim != 1 or not value.is_floating_point():
        raise TypeError(f"a part of the weights is a {type(value).__name__}, not a vector")
    return value


def _cut(groups: Sequence[torch.Tensor], start: int, numel: int) -> Iterable[torch.Tensor]:
    """Yield elements [start, start + numel) of tensors that lie one after the other."""
    for group in groups:
        low, high = max(start, 0), min(start + numel, group.numel())
        if low < high:
            yield group[low:high]
        # From here on relative to the next group.
        start -= group.numel()
