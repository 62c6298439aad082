"""`deepspeed.utils.zero_to_fp32`: the fp32 weights of a checkpoint, without an engine.

Reads checkpoints of this package's `engine.save_checkpoint`. A weight that has an fp32 master
is taken from the master; other weights are cast to fp32. `inf.load_deepspeed` reads files that
DeepSpeed itself wrote.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file

from infinity._src.base.atomic_file import replaced
from infinity._src.base.paths import absolute
from infinity._src.base.progress import ProgressLine
from infinity._src.base.sizes import parse_size
from infinity._src.checkpoint.formats.safetensors_writer import ExportJob, group_units
from infinity._src.checkpoint.reader import Checkpoint
from infinity.compat.deepspeed import comm
from infinity.compat.deepspeed.checkpoints import LATEST, newest_tag, save_new
from infinity.compat.deepspeed.errors import DeepSpeedRefusal

Directory = str | os.PathLike[str]
StateDict = dict[str, torch.Tensor]


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: Directory,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,  # noqa: ARG001 - the tensors are ordinary ones in either case
) -> StateDict:
    """Return a checkpoint's full state dict: parameters in fp32, and persistent buffers. Tied names
    share a tensor. Blocks; not collective.

    tag: default: the tag in the file "latest". Raises: ValueError if no tag is given and there is
    no file "latest"; AioError if there is no complete checkpoint; ChecksumError naming damaged
    tensors.
    """
    with _opened(checkpoint_dir, tag) as weights:
        weights.check(frozen=not exclude_frozen_parameters)
        return {
            name: value
            for first, value in weights.tensors(frozen=not exclude_frozen_parameters)
            for name in weights.names[first]
        }


def load_state_dict_from_zero_checkpoint(
    model: torch.nn.Module, checkpoint_dir: Directory, tag: str | None = None
) -> torch.nn.Module:
    """Load a checkpoint's fp32 weights into an ordinary model on the CPU, and return it. Raises: as
    `get_fp32_state_dict_from_zero_checkpoint`; RuntimeError if the model's names or shapes differ.
    """
    model = model.cpu()
    model.load_state_dict(get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag))
    return model


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: Directory,
    output_dir: Directory,
    max_shard_size: str | int | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Write a checkpoint's fp32 weights as files that transformers and torch can load. Blocks;
    holds one file's tensors in memory at a time. Several ranks may call it: they write the same.

    max_shard_size: bytes of a file, such as "5GB"; None: one file. safe_serialization: write
    safetensors, with only the first name of a tied tensor; else files of torch.save. Raises: as
    `get_fp32_state_dict_from_zero_checkpoint`; OSError.
    """
    out = absolute(output_dir, "output_dir")
    out.mkdir(parents=True, exist_ok=True)
    with _opened(checkpoint_dir, tag) as weights:
        frozen = not exclude_frozen_parameters
        weights.check(frozen=frozen)
        sizes = weights.sizes(frozen=frozen)
        most = sum(sizes) if max_shard_size is None else parse_size(max_shard_size)
        groups = group_units(sizes, most)
        tensors, places = weights.tensors(frozen=frozen), {}
        for index, group in enumerate(groups):
            file = _file_name(index, len(groups), safe=safe_serialization)
            shard = {}
            for _ in group:
                first, value = next(tensors)
                every = weights.names[first][:1] if safe_serialization else weights.names[first]
                shard.update(dict.fromkeys(every, value))
            _write(shard, out / file, safe=safe_serialization)
            places.update(dict.fromkeys(shard, file))
        if len(groups) > 1:
            stem = "model.safetensors" if safe_serialization else "pytorch_model.bin"
            _write_index(out / f"{stem}.index.json", places, sum(sizes))


class _Weights:
    """The weights of an open checkpoint. names: maps a tensor's first name to all its names."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._job = ExportJob(checkpoint, masters=True, dtype=torch.float32)
        self._learning = {name for each in checkpoint.optimizers for name in each.params}
        saved = {name: param.entry.names for name, param in checkpoint.params.items()}
        self.names = {each.name: saved.get(each.name, (each.name,)) for each in self._job.described}
        self._params = saved.keys()
        self._place = checkpoint.directory
        self._step = checkpoint.step

    def check(self, *, frozen: bool) -> None:
        """Raise if frozen parameters are to be excluded and the checkpoint has no optimizer: only
        the optimizer's list of parameters shows which ones are frozen."""
        if not frozen and not self._learning:
            raise DeepSpeedRefusal(
                f"exclude_frozen_parameters=True: {self._place} has no optimizer, which alone says "
                "which parameters are frozen; call without exclude_frozen_parameters"
            )

    def _kept(self, name: str, *, frozen: bool) -> bool:
        return frozen or name not in self._params or name in self._learning

    def sizes(self, *, frozen: bool) -> list[int]:
        """Return the bytes of each tensor. frozen: include parameters without optimizer states."""
        return [
            each.size_bytes
            for each in self._job.described
            if self._kept(each.name, frozen=frozen)
        ]

    def tensors(self, *, frozen: bool) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each tensor with its first name."""
        shown = not comm.is_initialized() or comm.get_rank() == 0
        line = ProgressLine(f"weights of step {self._step}", self._job.size_bytes, shown=shown)
        try:
            for name, value in self._job.tensors(line.advance):
                if self._kept(name, frozen=frozen):
                    yield name, value
        finally:
            line.end()


@contextlib.contextmanager
def _opened(directory: Directory, tag: str | None) -> Iterator[_Weights]:
    home = absolute(directory, "checkpoint_dir")
    found = tag if tag is not None else newest_tag(home)
    if found is None:
        raise ValueError(f"{home / LATEST} is not there: give the tag of a checkpoint in {home}")
    path = home / str(found)
    if any(path.glob("*_model_states.pt")):
        raise DeepSpeedRefusal(
            f"{path} was written by DeepSpeed itself: read it by inf.load_deepspeed(model, "
            f"{str(path)!r}), or by the zero_to_fp32.py that DeepSpeed has put beside it"
        )
    with Checkpoint.open(path) as checkpoint:
        yield _Weights(checkpoint)


def _file_name(index: int, count: int, *, safe: bool) -> str:
    stem, suffix = ("model", "safetensors") if safe else ("pytorch_model", "bin")
    return f"{stem}.{suffix}" if count == 1 else f"{stem}-{index + 1:05d}-of-{count:05d}.{suffix}"


def _write(tensors: StateDict, path: Path, *, safe: bool) -> None:
    if not safe:
        save_new(tensors, path)
        return
    # Replaced atomically: several ranks may write it at once.
    with replaced(path) as file:
        save_file(tensors, file.name, metadata={"format": "pt"})


def _write_index(path: Path, places: dict[str, str], size_bytes: int) -> None:
    found = {"metadata": {"total_size": size_bytes}, "weight_map": places}
    with replaced(path) as file:
        file.write((json.dumps(found, indent=2, sort_keys=True) + "\n").encode())
