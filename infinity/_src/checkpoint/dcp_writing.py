"""Writing checkpoints that torch.distributed.checkpoint reads: one tensor in memory at a time.

torch's own FileSystemWriter keeps every tensor that it was given until its file is whole, so the format is written here: each
value is one `torch.save` in one file, and `.metadata`, which comes last, says where.
"""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import torch

from infinity._src._torch_compat import dcp_storage_info
from infinity._src.checkpoint.dcp_reading import METADATA
from infinity._src.checkpoint.syncing import publish, sync_directory

FILE = "__0_0.distcp"
_FORMAT_VERSION = "1.0.0"

Key = tuple[str | int, ...]
"""A path in the nested dict that the checkpoint stands for: ("model", "layers.0.weight"), or with a place in a list."""


class DCPWriter:
    """A checkpoint that is being written into a directory that has none. `finish` makes it one; until then it is not readable.

    Raises: ValueError where a checkpoint is already; OSError naming the path.
    """

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        if (directory / METADATA).exists():
            raise ValueError(f"{directory} has a checkpoint already ({METADATA}); choose another directory, or remove it")
        self._directory = directory
        self._partial = directory / (FILE + ".partial")
        self._stream = self._partial.open("wb")
        self._entries: dict[str, Any] = {}
        self._places: dict[Any, Any] = {}
        self._paths: dict[str, Key] = {}

    def put(self, key: Key, value: Any) -> None:
        """Append a CPU tensor, or something that is no tensor. Blocks. Raises: OSError; ValueError for a name used twice."""
        from torch.distributed.checkpoint import metadata as dcp

        name = ".".join(map(str, key))
        if name in self._entries:
            raise ValueError(f"two values would both be called {name} in {self._directory}; give other `keys`")
        offset: torch.Size | None = None
        if isinstance(value, torch.Tensor):
            offset = torch.Size([0] * value.ndim)
            chunk = dcp.ChunkStorageMetadata(offset, value.shape)
            self._entries[name] = dcp.TensorStorageMetadata(dcp.TensorProperties(value.dtype), value.shape, [chunk])
        else:
            self._entries[name] = dcp.BytesStorageMetadata()
        start = self._stream.tell()
        torch.save(value, self._stream)
        index = dcp.MetadataIndex(name, offset, 0 if offset is not None else None)
        self._places[index] = dcp_storage_info(FILE, start, self._stream.tell() - start)
        self._paths[name] = key

    def finish(self) -> None:
        """Make it a checkpoint, which survives a crash from here on. Blocks. Raises: OSError."""
        from torch.distributed.checkpoint import metadata as dcp

        self._stream.close()
        publish(self._partial, self._directory / FILE)
        sync_directory(self._directory)
        whole = dcp.Metadata(
            self._entries,
            planner_data=self._paths,
            storage_data=self._places,
            storage_meta=dcp.StorageMeta(checkpoint_id=os.fspath(self._directory)),
            version=_FORMAT_VERSION,
        )
        partial = self._directory / (METADATA + ".partial")
        partial.write_bytes(pickle.dumps(whole))
        publish(partial, self._directory / METADATA)
        sync_directory(self._directory)
        sync_directory(self._directory.absolute().parent)

    def abandon(self) -> None:
        """Remove what was written. Idempotent; does nothing after `finish`. Raises: OSError."""
        self._stream.close()
        for name in (FILE, METADATA):
            (self._directory / (name + ".partial")).unlink(missing_ok=True)
