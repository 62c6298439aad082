"""Measured settings of drives: request size, depth, bandwidths. Loaded from JSON and validated."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from infinity._src.cabi.records import ALIGNMENT_BYTES
from infinity.aio._probe import probe_engine

log = logging.getLogger("infinity.aio")

# A request must lie in one registered buffer, and io_uring limits these to 1 GiB.
BLOCK_BYTES_MAX = 1 << 30
DEPTH_MAX = 4096
ENGINES = ("io_uring", "threads")

_logged: set[str] = set()


@dataclass(frozen=True)
class IoSettings:
    """Settings of requests to drives. The defaults suit most drives; `python -m infinity.bench swap
    --sweep --json FILE` measures others.

    block_bytes: bytes per request, a multiple of 4096. None: the backend's default, 1 MiB for
        rings, up to 16 MiB for threads, which have one request in flight each.
    depth: requests in flight per drive, at least 2. block_bytes and depth are reduced to the
        device's limits. Ranks that share a drive divide the depth, at least 8 each.
    bandwidths: absolute directory -> (read, write) bandwidth of its drive in bytes per second,
        which the drive's ranks share equally. If it has all directories of a policy, their data is
        split in proportion; else set-up measures the bandwidths.
    backend: the backend with which `block_bytes` was measured ("io_uring" or "threads"); a
        different backend uses its default. None: `block_bytes` is for every backend.

    Raises: ValueError naming field, value and fix.
    """

    block_bytes: int | None = None
    depth: int = 32
    # A mapping is not hashable; equality still compares it.
    bandwidths: Mapping[str, tuple[float, float]] = field(default_factory=dict, hash=False)
    backend: str | None = None

    def __post_init__(self) -> None:
        _check_block(self.block_bytes)
        _check_integer("depth", self.depth)
        if self.backend is not None and self.backend not in ENGINES:
            raise ValueError(
                f"backend={self.backend!r} must be None or one of {', '.join(ENGINES)}"
            )
        if not 2 <= self.depth <= DEPTH_MAX:
            raise ValueError(
                f"depth={self.depth} must be 2 to {DEPTH_MAX}, so that reads and writes can be in "
                "flight together; 32 suits most drives"
            )
        if not isinstance(self.bandwidths, Mapping):
            raise ValueError(
                f"bandwidths={self.bandwidths!r} must map directories to [read, write] in bytes "
                "per second"
            )
        checked = {
            _directory(name): _bandwidth(str(name), pair) for name, pair in self.bandwidths.items()
        }
        # By object.__setattr__, since the dataclass is frozen. A copy of the caller's mapping.
        object.__setattr__(self, "bandwidths", checked)

    @classmethod
    def load(cls, source: str | os.PathLike[str] | Mapping[str, Any]) -> IoSettings:
        """Read settings from a mapping or a JSON file: a record of `infinity.bench swap` (its
        "settings"), or the fields themselves.

        Raises: ValueError for a file that cannot be read, unknown fields, and values out of range.
        """
        where, found = "", source
        if not isinstance(source, Mapping):
            where = f"{os.fspath(source)!r}: "
            found = _read_json(source)
        # A record of the benchmark.
        if isinstance(found, Mapping) and "settings" in found:
            found = found["settings"]
        # A record of another benchmark, whose fields would all be reported as unknown.
        elif isinstance(found, Mapping) and "schema" in found:
            raise ValueError(
                f'{where}a {found["schema"]!r} record has no "settings"; use one of python -m '
                "infinity.bench swap"
            )
        if not isinstance(found, Mapping):
            raise ValueError(
                f"{where}settings are a mapping with {_fields()}, not {type(found).__name__}"
            )
        unknown = [str(name) for name in found if name not in cls.__dataclass_fields__]
        if unknown:
            raise ValueError(
                f"{where}unknown field {', '.join(sorted(unknown))}; settings have {_fields()}"
            )
        try:
            return cls(**found)
        except ValueError as error:
            # Name the file, which the constructor does not know.
            raise ValueError(f"{where}{error}") from None

    def as_dict(self) -> dict[str, Any]:
        """Return the settings as a JSON-serializable dict, for `load`."""
        pairs = {directory: list(pair) for directory, pair in self.bandwidths.items()}
        return {
            "block_bytes": self.block_bytes,
            "depth": self.depth,
            "bandwidths": pairs,
            "backend": self.backend,
        }

    def for_backend(self, backend: str) -> IoSettings:
        """Return the settings for the executor that `open_executor(backend=...)` opens here.

        "auto" is resolved by a trial. If `block_bytes` was measured with another backend, it is set
        to None and logged once: a ring's 1 MiB is too short for threads, which have one request in
        flight each.
        """
        if self.block_bytes is None or self.backend in (None, backend):
            return self
        # Resolve "auto" as `open_executor` does.
        used = backend
        if backend == "auto":
            found = probe_engine()
            used = "io_uring" if found.io_uring else "threads"
        if used == self.backend:
            return self
        text = (
            f"block_bytes={self.block_bytes} was measured with {self.backend} and is not used with "
            f"{used}, which uses its default; measure again with: python -m infinity.bench swap "
            "--sweep --json FILE"
        )
        if text not in _logged:
            _logged.add(text)
            log.warning("%s", text)
        # Depth and bandwidths are properties of the drive, not of the backend.
        return replace(self, block_bytes=None)


def _fields() -> str:
    return ", ".join(IoSettings.__dataclass_fields__)


def _read_json(path: str | os.PathLike[str]) -> Any:
    how = "write one with: python -m infinity.bench swap --sweep --json FILE"
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{os.fspath(path)!r} cannot be read ({error.strerror}); {how}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{os.fspath(path)!r} is not JSON ({error}); {how}") from error


def _check_integer(name: str, value: Any) -> None:
    # bool is a subclass of int; JSON's true is no number.
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name}={value!r} must be an integer")


def _check_block(value: int | None) -> None:
    if value is None:
        return
    _check_integer("block_bytes", value)
    if not ALIGNMENT_BYTES <= value <= BLOCK_BYTES_MAX or value % ALIGNMENT_BYTES:
        raise ValueError(
            f"block_bytes={value} must be a multiple of {ALIGNMENT_BYTES}, at most 1 GiB; None "
            "uses the backend's default"
        )


def _directory(name: Any) -> str:
    # A relative directory would depend on the working directory.
    if not isinstance(name, (str, os.PathLike)) or not Path(name).is_absolute():
        raise ValueError(f"bandwidths: {name!r} is not an absolute directory")
    return os.fspath(name)


def _bandwidth(name: str, pair: Any) -> tuple[float, float]:
    right = isinstance(pair, (list, tuple)) and len(pair) == 2
    if right:
        right = all(
            isinstance(value, (int, float))
            and not isinstance(value, bool)
            # json.loads accepts NaN and Infinity.
            and math.isfinite(value)
            and value > 0
            for value in pair
        )
    if not right:
        raise ValueError(
            f"bandwidths[{name!r}]={pair!r} must be [read, write], two numbers above 0 in bytes "
            "per second"
        )
    return float(pair[0]), float(pair[1])
