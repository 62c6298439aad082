"""Reads ZeRO checkpoints of DeepSpeed (stage 1, 2 or 3, any number of ranks): masters, moments, and
the fields from which a run resumes.

    latest              the name of the newest folder
    global_stepN/
      [bf16_]zero_pp_rank_R_mp_rank_00_optim_states.pt      rank R's part of masters and moments
      mp_rank_00_model_states.pt                            stages 1 and 2: names, shapes, 16 bits
      zero_pp_rank_R_mp_rank_00_model_states.pt             stage 3: names, shapes, buffers, frozen

Stages 1 and 2 concatenate the parameters of a parameter group in the order of `param_shapes` (which
`round_robin_gradients` changes), pad the end, and cut the vector into one partition per rank. Files
may omit the padding of masters, but not of moments.

DeepSpeed partitions Muon's momenta in the same way. With the optimizer on the device, a rank
instead concatenates the whole momentum of each matrix with a part in the rank's partition.

In stage 3 a rank has ceil(numel / ranks) elements of each parameter, and pads the last rank's part.
A rank concatenates these parts in the order of `param_shapes`, in sub-groups. Some sub-groups have
momenta, and the rest have moments of AdamW.

A universal checkpoint has a folder for each parameter, independent of the number of ranks.
`deepspeed_export.py` writes universal checkpoints.

    latest_universal                        the name of the newest folder
    global_stepN_universal/
      zero/NAME/fp32.pt, exp_avg.pt, …      a tensor each, alone or as {"param": tensor, …}
      zero/NAME/step.pt                     stages 1 and 2
      zero/optimizer_state.pt               hyper-parameters, the loss scaler; stage 3: the step
      mp_rank_00_model_states.pt            stages 1 and 2
      zero_pp_rank_R_mp_rank_00_…           stage 3: model states of each rank that saved

A universal checkpoint of stage 1 or 2 keeps the shapes of parameters; stage 3 stores vectors.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from infinity._src.checkpoint.formats.deepspeed_run import (
    RunFields,
    hyper_of,
    number_of,
    zero_config,
)
from infinity._src.checkpoint.formats.torch_files import (
    Descriptors,
    StoredTensor,
    TorchFile,
    kind_of,
)
from infinity._src.params.materialize import NamedTensors

OPTIMIZER = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
SHARDED_MODEL = re.compile(r"zero_pp_rank_(\d+)_mp_rank_(\d+)_model_states\.pt")
WHOLE_MODEL = "mp_rank_00_model_states.pt"
MOMENTUM = "momentum_buffer"
"""Name of Muon's state."""
MASTERS = "fp32"
"""Name of masters among the states, as in universal checkpoints."""
WAY_OUT = (
    "DeepSpeed's zero_to_fp32.py in the checkpoint's directory converts the weights, and "
    "inf.load_safetensors reads the result"
)
_NVME = (
    "with the optimizer offloaded to NVMe, DeepSpeed leaves in its checkpoint only what was in "
    "memory, and the rest of masters and moments in files of its swap directory (copies of them "
    "may lie in offloaded_tensors), which it does not find again itself: moments are lost. Save "
    "from a run whose optimizer is on the GPU or the CPU; a job that still runs can write them "
    "with deepspeed.utils.safe_get_full_fp32_param and safe_get_full_optimizer_state"
)


class Vector:
    """Concatenation of vectors in files. Raises: ValueError if the vectors differ in dtype."""

    def __init__(self, tensors: Sequence[StoredTensor]) -> None:
        self.tensors = tensors
        if len({tensor.dtype for tensor in tensors}) > 1:
            raise ValueError(f"{tensors[0].file.path} and other ranks' files have several dtypes")
        self.starts = [0, *itertools.accumulate(tensor.numel for tensor in tensors)]

    @property
    def numel(self) -> int:
        return self.starts[-1]

    def read_into(self, target: torch.Tensor, start: int) -> None:
        """Fill the vector `target` with the elements from `start` on. Blocks."""
        index, done = bisect.bisect_right(self.starts, start) - 1, 0
        while done < target.numel():
            skipped = start + done - self.starts[index]
            count = min(self.tensors[index].numel - skipped, target.numel() - done)
            self.tensors[index].read_into(target[done : done + count], skipped)
            done += count
            index += 1


class Placed(NamedTuple):
    """A state of some parameters: one vector for each rank. begin: index in the masters' vectors
    of the element that corresponds to element 0 of `vectors`."""

    vectors: Sequence[Vector]
    begin: int


Layout = Sequence[tuple[str, tuple[int, ...], int, int]]
"""For each parameter of a flat group: name, shape, index of the first element, number of elements.
"""


@dataclasses.dataclass(frozen=True)
class Pieces:
    """A tensor: the concatenation of elements [start, start + numel) of each vector. Elements after
    the end of the tensor's `shape` are padding.
    """

    shape: tuple[int, ...]
    vectors: Sequence[Vector]
    start: int
    numel: int

    @property
    def dtype(self) -> torch.dtype:
        return self.vectors[0].tensors[0].dtype

    def read(self) -> torch.Tensor:
        """Read the parts into one new tensor. Blocks. Raises: OSError, ValueError."""
        out = torch.empty(math.prod(self.shape), dtype=self.dtype)
        done = 0
        for vector in self.vectors:
            # The last parts end with padding: skip it.
            count = min(self.numel, out.numel() - done)
            vector.read_into(out[done : done + count], self.start)
            done += count
        return out.view(self.shape)


class DeepSpeedCheckpoint(NamedTensors):
    """A checkpoint of DeepSpeed. The `NamedTensors` are the weights: masters in fp32, and frozen
    parameters and buffers in the file's dtype. A shared parameter has an entry for each name.

    The constructor reads no tensors, and checks that the parts in the files form whole tensors. The
    caller must `close` the checkpoint after use.

    Raises: OSError; ValueError for files that are damaged, refused, or of an unsupported kind.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.label = folder, str(folder)
        self._undo = contextlib.ExitStack()
        self._descriptors = self._undo.enter_context(Descriptors())
        self._whole: dict[str, StoredTensor] = {}
        self._values: dict[str, Pieces] = {}
        self._aliases: dict[str, str] = {}
        self.states: dict[str, dict[str, Pieces | int | float]] = {}
        """Moments and numbers of each trained parameter, by the parameter's first name and the
        state's name."""
        self.group_of: dict[str, int] = {}
        """Parameter group of each trained parameter."""
        self.hyper: Sequence[Mapping[str, Any]] | None = None
        """Hyper-parameters of each group; None if the checkpoint has none."""
        try:
            self.run = self._take()
            self._check()
        # A damaged file may have any object where a number or a dict is expected; code that uses
        # such an object raises one of these.
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            self.close()
            if isinstance(error, ValueError) and str(folder) in str(error):
                raise
            raise ValueError(
                f"{folder} is no ZeRO checkpoint as DeepSpeed writes it: {error!r}. {WAY_OUT}"
            ) from error
        except BaseException:
            self.close()
            raise

    def _take(self) -> RunFields:
        """Read the descriptions of all tensors, and return the fields from which a run resumes."""
        raise NotImplementedError

    def close(self) -> None:
        self._undo.close()

    # -- the weights -------------------------------------------------------------------------------

    def names(self) -> Iterable[str]:
        return dict.fromkeys((*self._values, *self._whole, *self._aliases))

    def shape(self, name: str) -> tuple[int, ...]:
        return self._found(name).shape

    def dtype(self, name: str) -> torch.dtype:
        return self._found(name).dtype

    def read(self, name: str) -> torch.Tensor:
        return self._found(name).read()

    def _found(self, name: str) -> Pieces | StoredTensor:
        name = self._aliases.get(name, name)
        return self._values[name] if name in self._values else self._whole[name]

    # -- for the layouts ---------------------------------------------------------------------------

    def open(self, name: str) -> TorchFile:
        """Open a file of the folder. Raises: OSError; ValueError naming the file and a fix."""
        try:
            return TorchFile(self.folder / name, self._descriptors, prefix="deepspeed.")
        except ValueError as error:
            raise ValueError(f"{error}. {WAY_OUT}") from error

    def take_whole(self, file: TorchFile, names: Iterable[str]) -> None:
        """Add the whole tensors with these names from `module`, and the names of shared parameters.
        """
        module, shared = file.root["module"], file.root.get("shared_params") or {}
        for alias, name in dict(shared).items():
            if alias not in self._values:
                self._aliases[str(alias)] = str(name)
        for name in names:
            if name not in self._values and name not in self._aliases:
                self._whole[str(name)] = file.tensor(module[name])

    def take_frozen(self, first: TorchFile, others: Iterable[TorchFile]) -> None:
        """Add the frozen parameters of stage 3; each rank's file has a part of every parameter."""
        shapes = dict(first.root.get("frozen_param_shapes") or {})
        files = [first, *(others if shapes else ())]
        for name, shape in shapes.items():
            parts = [vector_of(file, file.root["frozen_param_fragments"][name]) for file in files]
            sizes = {part.numel for part in parts}
            if len(sizes) != 1 or sum(part.numel for part in parts) < math.prod(shape):
                raise ValueError(f"{self.label} lacks a part of {name}, which was frozen")
            self._values[str(name)] = Pieces(
                shape_of(shape), [Vector([part]) for part in parts], 0, parts[0].numel
            )

    def _check(self) -> None:
        lost = next(
            (
                name
                for name in self._aliases.values()
                if name not in self._values and name not in self._whole
            ),
            None,
        )
        if lost is not None:
            raise KeyError(lost)

    def verify(self, states: Iterable[str], part: int, of: int) -> None:
        """Check masters, these states and all other weights against the files' checksums. Blocks.

        part, of: check every `of`-th file, beginning with file number `part`.

        Raises: OSError; ValueError naming the damage.
        """
        wanted = set(states)
        found: dict[TorchFile, dict[str, None]] = {}
        for stored in self._stored(wanted):
            found.setdefault(stored.file, {})[stored.member] = None
        for file, members in itertools.islice(found.items(), part, None, of):
            file.check(members)

    def _stored(self, states: set[str]) -> Iterator[StoredTensor]:
        yield from self._whole.values()
        of_states = (
            each
            for by_state in self.states.values()
            for state, each in by_state.items()
            if state in states and isinstance(each, Pieces)
        )
        # Parameters of one group share vectors: check each vector once.
        vectors = {
            id(vector): vector
            for pieces in (*self._values.values(), *of_states)
            for vector in pieces.vectors
        }
        for vector in vectors.values():
            yield from vector.tensors


class DeepSpeedStates:
    """Optimizer states of a checkpoint of DeepSpeed: a `StateSource`. Raises: ValueError if the
    checkpoint has none.
    """

    def __init__(self, source: DeepSpeedCheckpoint) -> None:
        # If the optimizer has no step count, use the run's number of updates.
        counted = {"step": source.run.step - source.run.skipped_steps}
        self._found = {
            self.name_of(param, state): value
            for param, by_state in source.states.items()
            if by_state
            for state, value in {**counted, **by_state}.items()
        }
        self.label = source.label
        if not self._found:
            raise ValueError(
                f"{source.label} has no optimizer states, as before the first update: load it "
                "without opt="
            )

    @property
    def names(self) -> list[str]:
        return list(self._found)

    def name_of(self, param: str, state: str) -> str:
        return f"{param}: {state}"

    def fault(self, name: str, shape: tuple[int, ...] | None) -> str:
        found = self._found[name]
        if isinstance(found, Pieces):
            if shape is None:
                return f"{name} is no number there"
            return "" if found.shape == shape else f"{name} is of shape {found.shape}, here {shape}"
        return "" if shape is None else f"{name} is no tensor there"

    def read(self, name: str) -> Any:
        found = self._found[name]
        return found.read() if isinstance(found, Pieces) else found


# -- the files of ranks ----------------------------------------------------------------------------


class ShardedCheckpoint(DeepSpeedCheckpoint):
    """A checkpoint from DeepSpeed's `save_checkpoint`."""

    def _take(self) -> RunFields:
        names = rank_files(self.folder, OPTIMIZER)
        optimizer = [self.open(name) for name in names]
        roots = [file.root["optimizer_state_dict"] for file in optimizer]
        # BF16_Optimizer (stage 1 with fp32 gradients) writes no zero_stage.
        stages = {_stage(root["zero_stage"]) if "zero_stage" in root else 1 for root in roots}
        if not stages <= {1, 2, 3} or len(stages) != 1:
            raise ValueError(
                f"{self.label} is of ZeRO stage {', '.join(map(str, stages))}, and stages 1, 2 and "
                f"3 are read here. {WAY_OUT}"
            )
        stage = stages.pop()
        for root in roots:
            counts = root["partition_count"]
            for count in counts if isinstance(counts, list) else [counts]:
                if count != len(names):
                    raise ValueError(
                        f"{self.label} was written by {count} ranks, but has files of {len(names)}"
                    )
        ranks = list(zip(optimizer, roots, strict=True))
        if stage == 3:
            model = self._take_stage_3(ranks)
        else:
            model = self._take_flat_groups(ranks)
        return RunFields.of(model, optimizer[0], roots[0], stage=stage)

    # -- stages 1 and 2 ----------------------------------------------------------------------------

    def _take_flat_groups(self, ranks: Sequence[tuple[TorchFile, Any]]) -> TorchFile:
        model = self.open(WHOLE_MODEL)
        files = [file for file, _ in ranks]
        base = [root["base_optimizer_state"] for _, root in ranks]
        # Elastic checkpoints have a list of states, and no hyper-parameters.
        groups = None if isinstance(base[0], list) else base[0]["param_groups"]
        first = ranks[0][1]
        paddings = first.get("param_alignment_paddings")
        for index, shapes in enumerate(model.root["param_shapes"]):
            parts = [
                vector_of(file, root["single_partition_of_fp32_groups"][index])
                for file, root in ranks
            ]
            layout = self._layout_of(shapes, None if paddings is None else paddings[index])
            needed = max((start + numel for _, _, start, numel in layout), default=0)
            self._check_partitions([part.numel for part in parts], needed, f"group {index}")
            key = index if groups is None else groups[index]["params"][0]
            states = [
                each[index] if groups is None else each["state"].get(key, {}) for each in base
            ]
            momenta = self._whole_momenta(files, states, layout, parts[0].numel)
            others = [key for key in states[0] if key != MOMENTUM or not momenta]
            found = self._vectors_of(files, states, others, parts, needed)
            if "step" not in found and states[0]:
                # Older versions of DeepSpeed store one step count for the group, or for the run.
                group = groups[index] if groups is not None else {}
                counted = group.get("step", first.get("base_optimizer_state_step"))
                if counted is not None:
                    found["step"] = number_of(files[:1], [counted], "the step of a group") or 0
            masters = [Vector(parts)]
            for name, shape, start, numel in layout:
                self._take_part(name, shape, masters, found, start, numel)
                if momenta:
                    self.states[name][MOMENTUM] = momenta[name]
                self.group_of[name] = index
        self.hyper = None if groups is None else [hyper_of(files[0], group) for group in groups]
        self.take_whole(model, model.root["module"])
        return model

    def _layout_of(
        self, shapes: Mapping[str, Any], paddings: Any
    ) -> Layout:
        after = [0] * len(shapes) if paddings is None else list(paddings)
        if len(after) != len(shapes) or any(type(each) is not int or each < 0 for each in after):
            raise ValueError(f"{self.label} has {after} as padding of {len(shapes)} parameters")
        found, start = [], 0
        for (name, given), gap in zip(shapes.items(), after, strict=True):
            shape = shape_of(given)
            found.append((str(name), shape, start, math.prod(shape)))
            start += math.prod(shape) + gap
        return found

    def _check_partitions(self, sizes: Sequence[int], needed: int, what: str) -> None:
        """Check that partitions of these sizes cut a vector of `needed` elements and its padding
        into equal parts. The files may omit padding at the end.
        """
        total, world = sum(sizes), len(sizes)
        size = max(sizes)
        expected = [min(size, max(0, total - rank * size)) for rank in range(world)]
        # DeepSpeed pads the vector to a multiple of 2 * ranks.
        if list(sizes) != expected or not 0 <= total - needed < 2 * world:
            raise ValueError(
                f"{self.label} holds partitions of {', '.join(map(str, sizes))} elements of "
                f"{what}, which has {needed}: the folder has files of several saves, or a file is "
                "incomplete"
            )

    def _vectors_of(
        self,
        files: Sequence[TorchFile],
        states: Sequence[Mapping[str, Any]],
        names: Iterable[str],
        parts: Sequence[StoredTensor],
        needed: int,
    ) -> dict[str, Placed | int | float]:
        """Return the states with these names of a flat group: vectors over all ranks, or numbers.
        """
        found: dict[str, Placed | int | float] = {}
        for name in names:
            values = [each[name] for each in states]
            number = number_of(files, values, f"{name} of a group")
            if number is not None:
                found[str(name)] = number
                continue
            vectors = [vector_of(file, each) for file, each in zip(files, values, strict=True)]
            self._check_partitions([vector.numel for vector in vectors], needed, str(name))
            # Moments may have padding that masters lack, but a rank's partition of moments and of
            # masters must start at the same element.
            if vectors[0].numel != parts[0].numel and parts[0].numel < needed:
                raise ValueError(
                    f"{self.label} has {vectors[0].numel} elements of {name}, and "
                    f"{parts[0].numel} masters, on its first rank"
                )
            found[str(name)] = Placed([Vector(vectors)], 0)
        return found

    def _whole_momenta(
        self,
        files: Sequence[TorchFile],
        states: Sequence[Mapping[str, Any]],
        layout: Layout,
        size: int,
    ) -> dict[str, Pieces]:
        """Return the momenta of a flat group if the ranks have whole momenta, else {}. size:
        elements of a rank's partition."""
        found: dict[str, Pieces] = {}
        for rank, (file, state) in enumerate(zip(files, states, strict=True)):
            low, high = rank * size, (rank + 1) * size
            mine = [each for each in layout if low < each[2] + each[3] and each[2] < high]
            if not mine and MOMENTUM not in state:
                continue
            if MOMENTUM not in state:
                return {}
            vector = vector_of(file, state[MOMENTUM])
            if vector.numel != sum(numel for *_, numel in mine):
                return {}
            at = 0
            for name, shape, _, numel in mine:
                # Several ranks may have the same momentum: each rank with a part of the matrix.
                found.setdefault(name, Pieces(shape, [Vector([vector])], at, numel))
                at += numel
        return found

    # -- stage 3 -----------------------------------------------------------------------------------

    def _take_stage_3(self, ranks: Sequence[tuple[TorchFile, Any]]) -> TorchFile:
        world = len(ranks)
        names = rank_files(self.folder, SHARDED_MODEL)
        if len(names) != world:
            raise ValueError(
                f"{self.label} has optimizer states of {world} ranks and model states of "
                f"{len(names)}"
            )
        model = self.open(names[0])
        parts = [
            Vector([vector_of(file, part) for part in root["fp32_flat_groups"]])
            for file, root in ranks
        ]
        shapes = [
            (str(name), shape_of(shape))
            for group in model.root["param_shapes"]
            for name, shape in group.items()
        ]
        # DeepSpeed pads each parameter so that every rank has the same number of elements.
        numels = [math.ceil(math.prod(shape) / world) for _, shape in shapes]
        self._check_whole(parts, sum(numels))
        groups = self._stage_3_states(ranks, parts)
        file, first = ranks[0]
        param_groups = first["optimizer_state_dict"]["param_groups"]
        group_of = {
            sub_group: index
            for index, group in enumerate(param_groups)
            for sub_group in group["params"]
        }
        start = 0
        for (name, shape), numel in zip(shapes, numels, strict=True):
            # Find the sub-group that contains the parameter's first element.
            at = bisect.bisect_right(parts[0].starts, min(start, parts[0].numel - 1)) - 1
            self._take_part(name, shape, parts, groups[at], start, numel)
            self.group_of[name] = group_of[at]
            start += numel
        self.hyper = [hyper_of(file, group) for group in param_groups]
        self.take_frozen(model, (self.open(name) for name in names[1:]))
        self.take_whole(model, model.root["buffer_names"])
        return model

    def _check_whole(self, parts: Sequence[Vector], needed: int) -> None:
        # With the optimizer on NVMe, DeepSpeed writes only the part that is in memory.
        held = {part.numel for part in parts}
        if held != {needed}:
            shown = " or ".join(map(str, sorted(held)))
            raise ValueError(
                f"{self.label} holds {shown} fp32 weights per rank, and the model has {needed}: "
                f"{_NVME}"
            )

    def _stage_3_states(
        self, ranks: Sequence[tuple[TorchFile, Any]], parts: Sequence[Vector]
    ) -> list[dict[str, Placed | int | float]]:
        """Return the states of each sub-group by name: a number, or one vector for each rank. A
        vector spans all sub-groups with that state.
        """
        files = [file for file, _ in ranks]
        by_rank = [root["optimizer_state_dict"]["state"] for _, root in ranks]
        count = len(parts[0].tensors)
        found: list[dict[str, Placed | int | float]] = [{} for _ in range(count)]
        tensors: dict[str, list[list[StoredTensor]]] = {}
        holders: dict[str, list[int]] = {}
        for index in range(count):
            states = [each.get(index, {}) for each in by_rank]
            for name in states[0]:
                values = [each[name] for each in states]
                number = number_of(files, values, f"{name} of sub-group {index}")
                if number is not None:
                    found[index][str(name)] = number
                    continue
                vectors = [vector_of(file, each) for file, each in zip(files, values, strict=True)]
                if [v.numel for v in vectors] != [part.tensors[index].numel for part in parts]:
                    raise ValueError(
                        f"{self.label} holds {vectors[0].numel} elements of {name} of sub-group "
                        f"{index}, which has {parts[0].tensors[index].numel}: {_NVME}"
                    )
                tensors.setdefault(str(name), [[] for _ in ranks])
                for mine, vector in zip(tensors[str(name)], vectors, strict=True):
                    mine.append(vector)
                holders.setdefault(str(name), []).append(index)
        for name, every in tensors.items():
            whole = [Vector(mine) for mine in every]
            for index, at in zip(holders[name], whole[0].starts, strict=False):
                found[index][name] = Placed(whole, parts[0].starts[index] - at)
        return found

    def _take_part(
        self,
        name: str,
        shape: tuple[int, ...],
        masters: Sequence[Vector],
        states: Mapping[str, Placed | int | float],
        start: int,
        numel: int,
    ) -> None:
        """Add a trained parameter: elements [start, start + numel) of each rank's masters."""
        self._values[name] = Pieces(shape, masters, start, numel)
        self.states[name] = {
            state: Pieces(shape, value.vectors, start - value.begin, numel)
            if isinstance(value, Placed)
            else value
            for state, value in states.items()
        }


# -- folders and files -----------------------------------------------------------------------------


def folder_of(directory: Path, tag: str | None) -> Path:
    """Find the folder of a checkpoint. With a tag this is the folder `tag`; without one, it is
    `directory` if the files are there, else the folder named in `latest` or `latest_universal`.

    Raises: FileNotFoundError; ValueError for a tag that is a path.
    """
    if tag is None and not any(directory.glob("*_optim_states.pt")):
        if (directory / "zero").is_dir():
            return directory
        latest = next(
            (
                directory / name
                for name in ("latest", "latest_universal")
                if (directory / name).is_file()
            ),
            None,
        )
        if latest is None:
            if any(directory.glob("*_model_states.pt")):
                raise ValueError(
                    f"{directory} has no optimizer states of ZeRO: it is of a run with stage 0, or "
                    "incomplete. Save with ZeRO stage 1, 2 or 3"
                )
            raise FileNotFoundError(
                f"{directory} has no file `latest`, and no optimizer states: pass "
                "tag='global_step...'"
            )
        tag = latest.read_text(encoding="utf-8").strip()
    if tag is None:
        return directory
    # The contents of `latest` are untrusted: refuse a tag that leads out of the directory.
    if not tag or Path(tag).name != tag or tag == "..":
        raise ValueError(
            f"tag={tag!r}: give the name of a folder in {directory}, not a path"
        )
    if not (directory / tag).is_dir():
        raise FileNotFoundError(f"{directory} has no folder {tag}")
    return directory / tag


def rank_files(folder: Path, pattern: re.Pattern[str]) -> list[str]:
    """Return the name of each rank's file, in the order of ranks.

    Raises: FileNotFoundError; ValueError for files of a run with model or pipeline parallelism, or
    with DeepSpeed's experts.
    """
    found: dict[int, str] = {}
    for name in sorted(path.name for path in folder.iterdir()):
        # Pipeline stages and DeepSpeed's experts have their weights in separate files.
        if re.match(r"layer_\d+|expp_rank_|expert_", name):
            raise ValueError(
                f"{folder / name} is of a run with pipeline parallelism or DeepSpeed's experts, "
                f"which are not read here. {WAY_OUT}"
            )
        match = pattern.fullmatch(name)
        if match is None:
            continue
        # Files of model-parallel ranks have parts of weights, which this reader cannot assemble.
        if int(match[2]) or int(match[1]) in found:
            raise ValueError(
                f"{folder / name} is of a model-parallel run, or a second file of its rank. "
                f"{WAY_OUT}"
            )
        found[int(match[1])] = name
    if not found:
        ending = pattern.pattern.rpartition("_mp_rank_(\\d+)_")[2].replace("\\", "")
        raise FileNotFoundError(
            f"{folder} has no zero_pp_rank_*_{ending}: a ZeRO checkpoint has one for each rank. "
            f"{WAY_OUT}"
        )
    if sorted(found) != list(range(len(found))):
        raise FileNotFoundError(
            f"{folder} has only files of ranks {sorted(found)} (such as {found[max(found)]}), not "
            "of all"
        )
    return [found[rank] for rank in range(len(found))]


def shape_of(value: Any) -> tuple[int, ...]:
    """Return a value as a shape. Raises: TypeError if the value is no shape."""
    if not isinstance(value, (tuple, list)) or any(
        type(size) is not int or size < 0 for size in value
    ):
        raise TypeError(f"expected a shape, not a {kind_of(value)}")
    return tuple(value)


def vector_of(file: TorchFile, value: Any) -> StoredTensor:
    """Return a value as a vector of floating-point numbers. Raises: ValueError naming the file;
    TypeError.
    """
    stored = file.tensor(value)
    if len(stored.shape) != 1 or not stored.dtype.is_floating_point:
        raise TypeError(
            f"a part of the states in {file.path} is a {stored.dtype} tensor of shape "
            f"{stored.shape}, not a vector"
        )
    return stored


def _stage(value: Any) -> Any:
    return value.args[0] if getattr(value, "args", None) else value


ZERO = "zero"
GLOBAL_STATE = "optimizer_state.pt"


def open_deepspeed(directory: Path, tag: str | None) -> DeepSpeedCheckpoint:
    """Open a checkpoint of DeepSpeed, from `save_checkpoint` or in the universal format.

    Raises: OSError; ValueError for files that are damaged, refused, or of an unsupported kind.
    """
    folder = folder_of(directory, tag)
    return UniversalCheckpoint(folder) if (folder / ZERO).is_dir() else ShardedCheckpoint(folder)


class UniversalCheckpoint(DeepSpeedCheckpoint):
    """A checkpoint from DeepSpeed's `ds_to_universal`."""

    def _take(self) -> RunFields:
        # In stage 3 each rank writes model states.
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
        """Refuse a checkpoint in which DeepSpeed's converter put tensors under wrong names. The
        converter cuts partitions in the order of the model; with `round_robin_gradients` the
        parameters in the partitions have another order.
        """
        if not whole or not zero_config(model).get("round_robin_gradients"):
            return
        if model.root["dp_world_size"] > 1:
            raise ValueError(
                f"{self.label} was converted from a run with round_robin_gradients on several "
                "ranks: DeepSpeed's converter gives its parameters wrong names. Load the original "
                "checkpoint instead"
            )

    def _take_param(self, name: str, shape: tuple[int, ...], step: float | None) -> None:
        folder = self.folder / ZERO / name
        # Parameter names become paths of files: refuse a name that is a path.
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
            # Stage 3 stores a vector, and the model states have the shape. A tensor of another size
            # (an embedding without the padding of the vocabulary) keeps the stored shape.
            flat = len(stored.shape) == 1 and stored.numel == math.prod(shape)
            whole = shape if flat else stored.shape
            found[path.stem] = Pieces(whole, [Vector([stored])], 0, stored.numel)
        masters = found.pop(MASTERS, None)
        if not isinstance(masters, Pieces):
            raise FileNotFoundError(
                f"{folder} has no {MASTERS}.pt: the checkpoint is incomplete; convert it again"
            )
        self._values[name] = masters
        # A parameter that never had a gradient has only a master.
        if any(isinstance(each, Pieces) for each in found.values()):
            self.states[name] = found

    def _take_others(self) -> None:
        """Add the masters that no model state names: frozen parameters."""
        for path in sorted((self.folder / ZERO).glob(f"*/{MASTERS}.pt")):
            name = path.parent.name
            if name in self._values or name in self._whole or name in self._aliases:
                continue
            stored = _tensor_of(self.open(f"{ZERO}/{name}/{path.name}"))
            self._values[name] = Pieces(stored.shape, [Vector([stored])], 0, stored.numel)


def _groups_of(
    state: TorchFile, *, whole: bool
) -> tuple[dict[int, int | float], dict[int, int], list[Mapping[str, Any]]]:
    """Return (step of each entry of `param_shapes`, parameter group of each entry, all groups);
    keys are indices of entries. Both dicts are empty for stages 1 and 2, where each entry is a
    parameter group and each parameter has a step.pt.
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
