"""Sources of a model's values, which fill it when it is offloaded.

    load=None                 the module holds them
    load=callable             `load(name, tensor)` fills the tensor (an initialiser, say)
    load=mapping              name -> tensor
    load=TensorSource         names, shapes, and a `read` that is called once for each tensor
    load=directory or file    safetensors, sharded or single, or GGUF; for a model of
                              transformers the tensors are converted, one group at a time
    init=function             `init()` builds the model, which is initialised one tensor at a time

Values pass in small pieces (`FlatValues`); a piece is written while the next is filled, so a model
on the meta device is never in memory as a whole. Any part of a file can be read, so a tile, or a
rank's shard, needs no memory besides its pieces (`_FileSource`). Other sources return whole
weights, one at a time: each stays until its last piece is copied, and a tiled weight until its last
tile is (`_WholeSource`). If all ranks read the same files, each reads its shard of a flat alone.
Names, shapes and kinds of dtype are checked against the source before anything is loaded. A tied
parameter is loaded once, under any of its names in the source.
"""

from __future__ import annotations

import abc
import bisect
import contextlib
import dataclasses
import functools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
import xxhash
from torch import nn

from infinity._src.base.dtypes import bytes_of, converts, copy_, from_bytes, kind_of
from infinity._src.base.sizes import MIB
from infinity._src.base.wording import listed, listed_are
from infinity._src.distributed.communicator import Comm, digest_of_text, fingerprinted
from infinity._src.memory.ledger import machine
from infinity._src.params.deferred_init import DeferredModel
from infinity._src.params.discover import find_parameters
from infinity._src.params.unit import Flat, Param, place_at
from infinity.errors import WeightsError


@runtime_checkable
class TensorSource(Protocol):
    """Named tensors that are read one at a time: one of the kinds of `load=` of `inf.offload`.

    Names and shapes are read before any tensor, and must be those of the model's state dict (one
    name of a tied parameter is enough; buffers that are not persistent are omitted). A source may
    also have `dtype(name) -> torch.dtype`: then an integer tensor for a floating parameter is
    detected before anything is loaded. On several ranks, every rank reads all tensors.
    """

    def names(self) -> Iterable[str]:
        """Return all names."""

    def shape(self, name: str) -> Sequence[int]:
        """Return the shape of one tensor, without reading it."""

    def read(self, name: str) -> torch.Tensor:
        """Read one tensor; for a floating tensor of the model, any floating dtype will do. Called
        once for each name of the model; the engine copies and drops the tensor before it reads the
        next.
        """


Source = (
    Callable[[str, torch.Tensor], object]
    | Mapping[str, torch.Tensor]
    | TensorSource
    | str
    | os.PathLike[str]
)
"""Type of `inf.offload(load=...)`."""

BAND_BYTES = 4 * MIB
"""Bytes of rows of a weight that one read covers, for a tile with only some columns."""


@dataclasses.dataclass
class Faults:
    """Tensors that do not fit a model. missing: names, each with shape and bytes. wrong: sentences
    about tensors of another shape or kind. unexpected: names, each with file and byte range.
    """

    missing: dict[str, str] = dataclasses.field(default_factory=dict)
    wrong: list[str] = dataclasses.field(default_factory=list)
    unexpected: dict[str, str] = dataclasses.field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.missing or self.wrong or self.unexpected)

    def add(self, other: Faults) -> None:
        self.missing.update(other.missing)
        self.wrong += other.wrong

    def sentence(self) -> str:
        parts = [
            f"{listed_are(names)} {what}{_in_brackets(names.values())}"
            for names, what in ((self.missing, "missing"), (self.unexpected, "unexpected"))
            if names
        ]
        return "; ".join([*parts, *([f"different: {listed(self.wrong)}"] if self.wrong else [])])


def _in_brackets(details: Iterable[str]) -> str:
    known = [detail for detail in details if detail]
    return f" ({listed(known)})" if known else ""


class NamedTensors(abc.ABC):
    """Named tensors that can be read one at a time: a mapping, safetensors, foreign checkpoints."""

    stays = False
    """True if all tensors are in memory, and reading one leaves the others valid."""

    label: str
    """Name of these tensors in messages."""

    @abc.abstractmethod
    def names(self) -> Iterable[str]:
        """Return all names."""

    @abc.abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of one tensor, without reading it."""

    @abc.abstractmethod
    def dtype(self, name: str) -> torch.dtype | None:
        """Return the dtype of one tensor, without reading it; None: unknown."""

    @abc.abstractmethod
    def read(self, name: str) -> torch.Tensor:
        """Read one tensor; the caller copies it at once."""

    @property
    def converting_bytes(self) -> int:
        """Return the most RAM that a read needs besides its result, if it converts tensors."""
        return 0

    def origin(self, name: str) -> str:  # noqa: ARG002 - of the interface
        """Return one tensor's file and byte range, for messages."""
        return ""

    def explain(self, name: str) -> Faults:  # noqa: ARG002 - of the interface
        """Return the faults of the source tensors that are converted into the model's tensor
        `name`. Empty: none are known."""
        return Faults()


class FileTensors(NamedTensors):
    """Named tensors of files, which can be read in part."""

    @property
    @abc.abstractmethod
    def files(self) -> SourceFiles:
        """Return the files that determine all values: ranks with the same files have the same
        values."""

    @abc.abstractmethod
    def read_into(self, name: str, start: int, out: torch.Tensor) -> None:
        """Fill `out`, one-dimensional and of any floating dtype if the tensor is floating, with the
        tensor's elements from `start` on, in row-major order. Reading a tensor in small consecutive
        parts takes no longer than reading it whole.
        """


class LastRows:
    """The rows of a tensor that were converted last. They stay in memory for reads of further
    parts, until their last element or other rows are read.
    """

    def __init__(self) -> None:
        self.held: tuple[str, int, torch.Tensor] | None = None

    def read_into(
        self,
        name: str,
        start: int,
        out: torch.Tensor,
        *,
        row: int,
        step: int,
        convert: Callable[[int, int], torch.Tensor],
    ) -> None:
        """Fill `out` as `FileTensors.read_into` does. row: elements of each row. step: most rows
        that are converted together. convert: returns the rows [first, last)."""
        if not out.numel():
            return
        end = start + out.numel()
        first, last = start // row, -(-end // row)
        while first < last:
            if not self._has(name, first * row):
                # Free these rows before others are converted, so that memory never holds both.
                self.held = None
                made = convert(first, min(first + step, last)).reshape(-1)
                self.held = name, first * row, made
            assert self.held is not None
            _, at, values = self.held
            begin, stop = max(start, at), min(end, at + values.numel())
            out[begin - start : stop - start].copy_(values[begin - at : stop - at])
            first = (at + values.numel()) // row
            if stop == at + values.numel():
                self.held = None

    def _has(self, name: str, element: int) -> bool:
        if self.held is None or self.held[0] != name:
            return False
        return 0 <= element - self.held[1] < self.held[2].numel()


Fill = Callable[[int, torch.Tensor], None]
"""Fills a one-dimensional CPU tensor of the parameter's dtype with the parameter's elements from
the given index on, in row-major order."""

Keep = Callable[[torch.Tensor], None]


def _keep_nothing(_buffer: torch.Tensor) -> None:
    """Record nothing: after an error buffers may be partly loaded."""


class OpenSource(abc.ABC):
    """A source that was checked against the model. Base of all kinds."""

    writes_buffers = True
    """False if real buffers keep their values."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    @abc.abstractmethod
    def open(self, param: Param) -> Fill:
        """Return the function that fills pieces of a parameter. If the source returns only whole
        weights, the function keeps one in memory: drop it before the next call.
        """

    @property
    def files(self) -> SourceFiles:
        return SourceFiles()

    @property
    def converting_bytes(self) -> int:
        """Return the most RAM that a fill needs besides the pieces."""
        return 0

    @abc.abstractmethod
    def fill_buffer(self, names: tuple[str, ...], out: torch.Tensor, *, was_meta: bool) -> None:
        """Fill a persistent buffer; a buffer with memory may keep its values."""

    def fill_buffers(self, device: torch.device, keep: Keep = _keep_nothing) -> None:
        """Load every buffer, and replace meta buffers by buffers on `device`. Blocks. keep: called
        with each buffer with memory before it is written.

        Checkpoints lack buffers that are not persistent: Hugging Face models recompute them.
        Raises: ValueError naming buffers that cannot be computed.
        """
        lost: list[Buffer] = []
        # Training cannot change a buffer that was made in inference mode.
        with torch.inference_mode(False), torch.no_grad():
            for buffer in find_buffers(self._model):
                if buffer.persistent:
                    out = (
                        torch.empty_like(buffer.value, device=device)
                        if buffer.value.is_meta
                        else buffer.value.to(device)
                    )
                    if out is buffer.value and self.writes_buffers:
                        keep(out)
                    self.fill_buffer(buffer.names, out, was_meta=buffer.value.is_meta)
                    buffer.module._buffers[buffer.attr] = out
                elif buffer.value.is_meta:
                    lost.append(buffer)
                else:
                    buffer.module._buffers[buffer.attr] = buffer.value.to(device)
            _recompute(self._model, lost, device)


def open_source(
    model: nn.Module,
    load: Source | NamedTensors | None,
    init: Callable[[], nn.Module] | None = None,
    *,
    shown: bool = True,
    received: bool = False,
) -> OpenSource:
    """Open the user's `load=`, which may be open files, or `init=`, and check it against the model.
    shown: whether this rank reports progress. received: another rank sends the values, so a model
    on the meta device needs no source.

    Raises: ValueError naming what is missing, unexpected or of the wrong shape.
    """
    if init is not None:
        if load is not None:
            raise ValueError("load= and init= both give the values; pass one of them")
        if not callable(init):
            raise ValueError(
                f"init={type(init).__name__} is not known; give a function without arguments that "
                "builds the model and returns it, such as lambda: LlamaForCausalLM(config)"
            )
        return _InitSource(model, DeferredModel(init, shown=shown))
    if load is None:
        return _ReceivedSource(model) if received else _ModuleSource(model)
    if isinstance(load, Mapping):
        return _NamedSource(model, _MappingTensors(load))
    if isinstance(load, FileTensors):
        return _FileSource(model, load)
    if isinstance(load, NamedTensors):
        return _NamedSource(model, load)
    # Before the callables: a source may be callable, too.
    if isinstance(load, TensorSource):
        return _NamedSource(model, _SourceTensors(load))
    if callable(load):
        return _CallableSource(model, load)
    raise ValueError(
        f"load={type(load).__name__} is not known; give a callable (name, tensor), a mapping from "
        "names to tensors, an inf.TensorSource, or a directory of safetensors (or a file: "
        "safetensors, GGUF)"
    )


class FlatValues:
    """The elements [begin, end) of a flat, filled piece by piece, in order; zeros between
    parameters. Parameters are read from the source one after another.

    end: None for the end of the flat. digests: if given, gets the hash of each parameter's bytes.
    """

    def __init__(
        self,
        flat: Flat,
        source: OpenSource,
        begin: int = 0,
        end: int | None = None,
        *,
        digests: list[xxhash.xxh3_64] | None = None,
    ) -> None:
        self._flat, self._source = flat, source
        self._begin, self._end = begin, flat.layout.numel if end is None else end
        self._digests = digests
        # The parameter of the last piece, if the next piece has elements of it, too.
        self._opened: tuple[int, Fill] | None = None

    def fill(self, start: int, out: torch.Tensor) -> None:
        """Fill `out` with the elements from `start` on, counted from `begin`. Blocks."""
        offsets, numels = self._flat.layout.offsets, self._flat.layout.numels
        at = self._begin + start
        end = at + out.numel()
        # Begin with the last parameter that starts at or before `at`. Padding between parameters
        # gets zeros: it is stored and verified like parameters.
        filled, index = at, max(bisect.bisect_right(offsets, at) - 1, 0)
        with torch.inference_mode(False), torch.no_grad():
            while index < len(offsets) and offsets[index] < end:
                low, high = max(offsets[index], at), min(offsets[index] + numels[index], end)
                if low < high:
                    bytes_of(out[filled - at : low - at]).zero_()
                    self._fill_part(index, low, out[low - at : high - at])
                    filled = high
                index += 1
            bytes_of(out[filled - at :]).zero_()

    def _fill_part(self, index: int, low: int, out: torch.Tensor) -> None:
        offset, numel = self._flat.layout.offsets[index], self._flat.layout.numels[index]
        if self._opened is None or self._opened[0] != index:
            self._opened = index, self._source.open(self._flat.params[index])
        self._opened[1](low - offset, out)
        if low + out.numel() == min(offset + numel, self._end):
            self._opened = None
        if self._digests is not None:
            while len(self._digests) <= index:
                self._digests.append(xxhash.xxh3_64())
            self._digests[index].update(bytes_of(out).numpy().data)


def _from_memory(values: torch.Tensor) -> Fill:
    """Return a function that copies from `values`, the whole parameter in any dtype that converts.
    """
    values = values.detach()
    if not values.is_contiguous():
        # Copy it as bytes: torch does not copy packed dtypes.
        values = bytes_of(values).view(values.dtype)
    flat = values.view(-1)

    def fill(start: int, out: torch.Tensor) -> None:
        copy_(out, flat[start : start + out.numel()])

    return fill


# -- kinds of sources ------------------------------------------------------------------------------


class _ModuleSource(OpenSource):
    """The module holds the values."""

    writes_buffers = False

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        # Raised before anything is loaded: a model on meta has no values.
        meta = list(
            dict.fromkeys(
                entry.keys[0] for entry in find_parameters(model) if entry.parameter.is_meta
            )
        )
        meta += [b.names[0] for b in find_buffers(model) if b.value.is_meta and b.persistent]
        if meta:
            raise ValueError(
                f"{listed_are(meta)} on the meta device without values; say where they come from: "
                "inf.offload(model, policy, load=directory, mapping or callable)"
            )

    @property
    def converting_bytes(self) -> int:
        values = (entry.parameter for entry in find_parameters(self._model))
        return max((each.nbytes for each in values if not each.is_contiguous()), default=0)

    def open(self, param: Param) -> Fill:
        module, attr = param.sites[0]
        held = module._parameters[attr]
        assert held is not None, param.name
        return _from_memory(held)

    def fill_buffer(self, names: tuple[str, ...], out: torch.Tensor, *, was_meta: bool) -> None:
        assert not was_meta, (names, out)


class _ReceivedSource(OpenSource):
    """No source: another rank sends parameters and buffers."""

    def open(self, param: Param) -> Fill:
        raise AssertionError(f"{param.name} comes from another rank")

    def fill_buffer(self, names: tuple[str, ...], out: torch.Tensor, *, was_meta: bool) -> None:
        raise AssertionError((names, out, was_meta))

    def fill_buffers(self, device: torch.device, _keep: Keep = _keep_nothing) -> None:
        with torch.inference_mode(False), torch.no_grad():
            for buffer in find_buffers(self._model):
                value = buffer.value
                buffer.module._buffers[buffer.attr] = (
                    torch.zeros_like(value, device=device) if value.is_meta else value.to(device)
                )


class _WholeSource(OpenSource):
    """A source that returns whole weights. It reads a weight once for all pieces and tiles, and
    frees it after the last. If the tiles of a module have parts of several weights (experts), all
    these weights are in memory together; weights of two modules never are.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._wholes: dict[str, torch.Tensor] = {}

    @property
    def converting_bytes(self) -> int:
        sizes: dict[str, dict[str, int]] = {}
        for entry in find_parameters(self._model):
            name, itemsize = entry.keys[0], entry.parameter.dtype.itemsize
            tiled = place_at(entry.sites) is not None
            weights = sizes.setdefault(name.rpartition(".")[0] if tiled else name, {})
            weights[name] = math.prod(entry.whole_shape) * itemsize
        return max((sum(weights.values()) for weights in sizes.values()), default=0)

    def open(self, param: Param) -> Fill:
        place, name = param.place, self._name_of(param.keys)
        if place is None:
            return _from_memory(self._read(name, tuple(param.shape), param.dtype))
        if name not in self._wholes:
            self._wholes[name] = self._kept(name, place.whole_shape, param.dtype)
        tile = place.of(self._wholes[name])
        if place.is_last:
            del self._wholes[name]
        return _from_memory(tile)

    @abc.abstractmethod
    def _name_of(self, names: tuple[str, ...]) -> str:
        """Choose one of a weight's names."""

    @abc.abstractmethod
    def _read(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return a whole weight of this shape, in a dtype that converts; it is valid until the next
        one is read."""

    def _kept(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return a whole weight that stays valid."""
        return self._read(name, shape, dtype)


class _MadeSource(_WholeSource):
    """A source that fills whole tensors."""

    @abc.abstractmethod
    def _make(self, name: str, out: torch.Tensor) -> None:
        """Fill `out`, of the whole weight's shape, with its values."""

    def _read(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        # A new tensor: a user's function may keep the tensor that it filled before.
        whole = torch.empty(shape, dtype=dtype)
        self._make(name, whole)
        return whole


class _CallableSource(_MadeSource):
    """A user's function that fills tensors."""

    def __init__(self, model: nn.Module, load: Callable[[str, torch.Tensor], object]) -> None:
        super().__init__(model)
        self._load = load

    def fill_buffer(self, names: tuple[str, ...], out: torch.Tensor, *, was_meta: bool) -> None:
        # The function may leave a buffer with memory as it is, so that is no error.
        if was_meta:
            self._make(names[0], out)
        else:
            self._load(names[0], out)

    def _name_of(self, names: tuple[str, ...]) -> str:
        return names[0]

    def _make(self, name: str, out: torch.Tensor) -> None:
        _poison(out)
        self._load(name, out)
        if _is_poisoned(out):
            raise ValueError(
                f"load({name!r}, tensor) returned and left the tensor as it was; fill it in place "
                "(tensor.copy_(...))"
            )


class _InitSource(_MadeSource):
    """A newly built model, whose tensors get their initial values one at a time."""

    def __init__(self, model: nn.Module, built: DeferredModel) -> None:
        super().__init__(model)
        self._built = built
        self._check()

    def fill_buffer(self, names: tuple[str, ...], out: torch.Tensor, *, was_meta: bool) -> None:
        assert was_meta or not out.is_meta, names
        self._make(self._name_of(names), out)

    def fill_buffers(self, device: torch.device, _keep: Keep = _keep_nothing) -> None:
        # All buffers, persistent or not: the function computed their initial values.
        with torch.inference_mode(False), torch.no_grad():
            for buffer in find_buffers(self._model):
                # On the CPU, where it was built.
                value = torch.empty_like(buffer.value, device="cpu")
                self.fill_buffer(buffer.names, value, was_meta=buffer.value.is_meta)
                buffer.module._buffers[buffer.attr] = value.to(device)

    def _name_of(self, names: tuple[str, ...]) -> str:
        known = self._built.names()
        return next(name for name in names if name in known)

    def _make(self, name: str, out: torch.Tensor) -> None:
        self._built.read_into(name, out)

    def _check(self) -> None:
        known = set(self._built.names())
        wanted = [
            (e.keys, tuple(e.whole_shape), e.parameter.dtype) for e in find_parameters(self._model)
        ]
        wanted += [
            (b.names, tuple(b.value.shape), b.value.dtype) for b in find_buffers(self._model)
        ]
        missing = list(dict.fromkeys(n[0] for n, _, _ in wanted if not known.intersection(n)))
        surplus = sorted(known.difference(*(names for names, _, _ in wanted)))
        if missing or surplus:
            parts = [f"{listed_are(missing)} missing"] if missing else []
            parts += [f"{listed_are(surplus)} unexpected"] if surplus else []
            raise ValueError(
                f"{self._built.label} is not the model to offload: {'; '.join(parts)}. Build both "
                "by the same call, one of them under torch.device('meta')"
            )
        for names, shape, dtype in wanted:
            name = self._name_of(names)
            built = self._built.tensor(name)
            if tuple(built.shape) != shape or built.dtype != dtype:
                raise ValueError(
                    f"{self._built.label} has {name} of shape {tuple(built.shape)} in "
                    f"{built.dtype}; the model wants {shape} in {dtype}. Build both by the same "
                    "call with the same configuration and dtype, one of them under "
                    "torch.device('meta')"
                )


class _NamedSource(_WholeSource):
    """Named tensors: a mapping, or a source of the user."""

    def __init__(self, model: nn.Module, tensors: NamedTensors) -> None:
        super().__init__(model)
        self._tensors = tensors
        self._known = set(tensors.names())
        # All names and shapes are checked first, so a wrong name never leaves a partly loaded
        # model.
        self._check()

    @property
    def converting_bytes(self) -> int:
        kept = 0 if self._tensors.stays else super().converting_bytes
        return self._tensors.converting_bytes + kept

    def fill_buffer(self, names: tuple[str, ...], out: torch.Tensor, *, was_meta: bool) -> None:
        name = self._found(names)
        assert name is not None or not was_meta, names
        if name is not None:
            copy_(out, self._read(name, tuple(out.shape), out.dtype))

    def _kept(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        value = self._read(name, shape, dtype)
        # Tensors in memory need no second copy.
        if self._tensors.stays:
            return value
        # Copy: the source may reuse this memory for the next tensor of the same tiles.
        whole = torch.empty(shape, dtype=dtype)
        return whole.copy_(value)

    def _read(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Read a whole weight. Raises: WeightsError for another shape or kind of dtype than stated.
        """
        value, label = self._tensors.read(name), self._tensors.label
        # Floating dtypes are cast; integers for a floating parameter are a mistake.
        if not converts(value.dtype, dtype):
            raise WeightsError(
                f"{label} has {name} as {value.dtype}; the model wants {dtype}. Convert it "
                "where it is read",
                tensors=(name,),
            )
        # `copy_` would broadcast a smaller tensor.
        if tuple(value.shape) != shape:
            raise WeightsError(
                f"{label} read {name} with shape {tuple(value.shape)} where it had stated {shape}; "
                "make shape() and read() agree",
                tensors=(name,),
            )
        return value

    def _name_of(self, names: tuple[str, ...]) -> str:
        found = self._found(names)
        assert found is not None, names
        return found

    def _found(self, names: Iterable[str]) -> str | None:
        return next((name for name in names if name in self._known), None)

    def _check(self) -> None:
        faults = Faults()
        expected: set[str] = set()
        wanted = list(
            dict.fromkeys(
                (entry.keys, entry.whole_shape, entry.parameter.dtype, True)
                for entry in find_parameters(self._model)
            )
        )
        wanted += [
            (b.names, tuple(b.value.shape), b.value.dtype, b.persistent and b.value.is_meta)
            for b in find_buffers(self._model)
        ]
        for names, shape, dtype, required in wanted:
            expected.update(names)
            name = self._found(names)
            if name is not None:
                faults.add(self._misfits(name, shape, dtype))
            elif required:
                faults.add(
                    self._tensors.explain(names[0])
                    or Faults({names[0]: f"{list(shape)}, {size_text(shape, dtype)}"})
                )
        faults.unexpected = {
            name: self._tensors.origin(name) for name in sorted(self._known - expected)
        }
        if faults:
            raise WeightsError(
                self._explain(faults),
                path=self._tensors.label,
                tensors=(*faults.missing, *faults.unexpected),
            )

    def _misfits(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Faults:
        found, origin = tuple(self._tensors.shape(name)), self._tensors.origin(name)
        where = f" (found: {origin})" if origin else ""
        if found != shape:
            wanted = f"the model wants {shape}, {size_text(shape, dtype)}"
            return self._tensors.explain(name) or Faults(
                wrong=[f"{name} of shape {found}; {wanted}{where}"]
            )
        there = self._tensors.dtype(name)
        if there is not None and not converts(there, dtype):
            return Faults(wrong=[f"{name} as {there}; the model wants {dtype}{where}"])
        return Faults()

    def _explain(self, faults: Faults) -> str:
        if faults.wrong and not faults.missing and not faults.unexpected:
            return (
                f"{self._tensors.label} has {listed(faults.wrong)}. Build the model from the "
                "configuration of this checkpoint, or pass a mapping with tensors that fit"
            )
        return (
            f"{self._tensors.label} does not fit the model: {faults.sentence()}. Build the model "
            "from the configuration of this checkpoint, rename or drop tensors in a mapping, or "
            "pass a callable (name, tensor) that fills each one"
        )


class _FileSource(_NamedSource):
    """Named tensors of files, of which only the needed parts are read."""

    def __init__(self, model: nn.Module, tensors: FileTensors) -> None:
        super().__init__(model, tensors)
        self._in_files = tensors

    @property
    def files(self) -> SourceFiles:
        return self._in_files.files

    @property
    def converting_bytes(self) -> int:
        # No whole weight is held.
        return self._tensors.converting_bytes

    def open(self, param: Param) -> Fill:
        return functools.partial(self._fill, param)

    def _fill(self, param: Param, start: int, out: torch.Tensor) -> None:
        name, place = self._name_of(param.keys), param.place
        if place is None:
            self._in_files.read_into(name, start, out)
            return
        # On meta: the tile's offset and strides in the weight, without memory.
        tile = place.of(torch.empty(place.whole_shape, device="meta"))
        if tile.is_contiguous():
            self._in_files.read_into(name, int(tile.storage_offset()) + start, out)
            return
        self._fill_rows(name, tile, start, out)

    def _fill_rows(self, name: str, tile: torch.Tensor, start: int, out: torch.Tensor) -> None:
        """Fill `out` with elements from `start` on of a tile with only some of the weight's
        columns. Reads bands of whole rows, so C tiles side by side read the weight about C times.
        """
        begin, apart, row = int(tile.storage_offset()), tile.stride()[0], math.prod(tile.shape[1:])
        end = start + out.numel()
        last = -(-end // row)
        rows = max(1, BAND_BYTES // (apart * out.dtype.itemsize))
        for first in range(start // row, last, rows):
            count = min(rows, last - first)
            band = torch.empty((count - 1) * apart + row, dtype=out.dtype)
            self._in_files.read_into(name, begin + first * apart, band)
            values = band.as_strided((count, row), (apart, 1)).reshape(-1)
            low, high = max(start, first * row), min(end, (first + count) * row)
            out[low - start : high - start].copy_(values[low - first * row : high - first * row])


def size_text(shape: Iterable[int], dtype: torch.dtype) -> str:
    """Write the bytes of a tensor."""
    return f"{math.prod(shape) * dtype.itemsize:,} bytes as {str(dtype).removeprefix('torch.')}"


# -- named tensors ---------------------------------------------------------------------------------


class _MappingTensors(NamedTensors):
    """A mapping that the user passed."""

    label = "the mapping passed as load="

    def __init__(self, mapping: Mapping[str, torch.Tensor]) -> None:
        self._mapping = mapping
        # Other kinds of mapping may read values at each access.
        self.stays = isinstance(mapping, dict)
        # For the same reason each value is accessed once before loading.
        self._seen: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}

    def names(self) -> Iterable[str]:
        return self._mapping.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._look(name)[0]

    def dtype(self, name: str) -> torch.dtype:
        return self._look(name)[1]

    def origin(self, name: str) -> str:
        return str(self._look(name)[1])

    def read(self, name: str) -> torch.Tensor:
        return self._mapping[name]

    def _look(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        if name not in self._seen:
            value = self._mapping[name]
            self._seen[name] = tuple(value.shape), value.dtype
        return self._seen[name]


class _SourceTensors(NamedTensors):
    """A `TensorSource` that the user passed."""

    def __init__(self, source: TensorSource) -> None:
        self._source = source
        self.label = f"the {type(source).__name__} passed as load="

    def names(self) -> Iterable[str]:
        return self._source.names()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._source.shape(name))

    def dtype(self, name: str) -> torch.dtype | None:
        dtype = getattr(self._source, "dtype", None)
        return dtype(name) if callable(dtype) else None

    def read(self, name: str) -> torch.Tensor:
        return self._source.read(name)


# -- buffers ---------------------------------------------------------------------------------------


class Buffer:
    """One buffer of one module, with all its names."""

    def __init__(
        self, module: nn.Module, attr: str, value: torch.Tensor, names: tuple[str, ...]
    ) -> None:
        self.module = module
        self.attr = attr
        self.value = value
        self.names = names
        self.persistent = attr not in module._non_persistent_buffers_set


def find_buffers(model: nn.Module) -> Iterator[Buffer]:
    """Yield all buffers of a model, persistent or not. A tensor that several modules register is
    yielded for each.
    """
    names: dict[int, list[str]] = {}
    modules: dict[int, nn.Module] = {}
    # Duplicates too: a shared module's buffers have a name under each parent.
    for prefix, module in model.named_modules(remove_duplicate=False):
        modules[id(module)] = module
        names.setdefault(id(module), []).append(f"{prefix}." if prefix else "")
    for key, module in modules.items():
        for attr, value in list(module._buffers.items()):
            if value is not None:
                yield Buffer(module, attr, value, tuple(f"{prefix}{attr}" for prefix in names[key]))


def _recompute(model: nn.Module, lost: list[Buffer], device: torch.device) -> None:
    """Recompute buffers that are in no checkpoint, as Hugging Face models can.

    `_init_weights(module)` of the innermost model around the module writes them (rotary
    frequencies, position ids). It may also write parameters on meta, without effect.
    """
    stranded: list[str] = []
    for buffer in lost:
        out = torch.empty_like(buffer.value, device=device)
        _poison(out)
        buffer.module._buffers[buffer.attr] = out
    for module in {id(buffer.module): buffer.module for buffer in lost}.values():
        owner = _owner(model, module)
        held = [
            value
            for value in module._parameters.values()
            if value is not None and not value.is_meta
        ]
        # `_init_weights` would initialise parameters with memory again.
        if owner is not None and not held:
            # `_init_weights` may draw random numbers: keep the user's sequence.
            with torch.random.fork_rng(devices=[]):
                owner(module)
    for buffer in lost:
        written = buffer.module._buffers[buffer.attr]
        if written is None or _is_poisoned(written):
            stranded.append(buffer.names[0])
    if stranded:
        for buffer in lost:
            buffer.module._buffers[buffer.attr] = buffer.value
        raise ValueError(
            f"{listed_are(stranded)} on the meta device and not persistent, so no checkpoint has "
            "values for it; build that module outside of torch.device('meta'), or register the "
            "buffer as persistent"
        )


def _owner(model: nn.Module, module: nn.Module) -> Callable[[nn.Module], object] | None:
    """Return `_init_weights` of the innermost model around `module` that has one."""
    found: nn.Module | None = None
    for candidate in model.modules():  # outer before inner
        if callable(getattr(candidate, "_init_weights", None)) and any(
            part is module for part in candidate.modules()
        ):
            found = candidate
    return getattr(found, "_init_weights", None)


def _poison(out: torch.Tensor) -> None:
    """Fill with a value that no initialiser writes, to detect a tensor that was not filled."""
    # Bools have no unused value: an unfilled bool tensor is not detected.
    kind = kind_of(out.dtype)
    if kind == "floating":
        out.fill_(float("nan"))
    elif kind == "complex":
        out.fill_(complex("nan"))
    elif kind == "whole" and out.dtype != torch.bool:
        out.fill_(torch.iinfo(out.dtype).min)


def _is_poisoned(out: torch.Tensor) -> bool:
    kind = kind_of(out.dtype)
    if out.numel() == 0 or out.dtype == torch.bool or kind in ("packed", "quantized"):
        return False
    if kind != "whole":
        # The first element of a filled tensor is hardly ever NaN; then the others are not read.
        return bool(out.reshape(-1)[0].isnan()) and bool(out.isnan().all())
    return bool((out == torch.iinfo(out.dtype).min).all()) and torch.iinfo(out.dtype).min != 0


# -- identity of source files ----------------------------------------------------------------------
# Ranks that read the same files with the same conversion have the same values, so each reads its
# part without comparing. A killed initialization resumes if files and conversion are the same.


HEAD_BYTES = 64 * 1024
"""Bytes at a file's beginning that are part of its identity: the headers."""


@dataclasses.dataclass(frozen=True)
class SourceFiles:
    """The files that determine all values of a source; false if there are none. conversion: name of
    the conversion of their tensors into the model's, other than casts.
    """

    paths: tuple[Path, ...] = ()
    conversion: str = ""

    def __bool__(self) -> bool:
        return bool(self.paths)


def place_of(files: SourceFiles) -> str:
    """Identify these files by machine and inode, with their conversion. Empty for no files. Raises:
    OSError.
    """
    if not files:
        return ""
    found = [(path.stat(), path) for path in files.paths]
    rows = [(at.st_dev, at.st_ino, at.st_size, at.st_mtime_ns, path.name) for at, path in found]
    return f"{machine()} {xxhash.xxh3_128_hexdigest(repr((rows, files.conversion)).encode())}"


def identity_of(files: SourceFiles) -> str:
    """Identify the contents of these files by paths, sizes, times and headers, which survive a
    reboot. Empty for no files. Raises: OSError.
    """
    if not files:
        return ""
    found = xxhash.xxh3_128()
    for path in files.paths:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            row = (str(path.resolve()), status.st_size, status.st_mtime_ns)
            found.update(repr(row).encode())
            found.update(file.read(HEAD_BYTES))
    return found.hexdigest()


# -- buffers that rank 0 broadcasts ----------------------------------------------------------------
# Policy(broadcast_buffers=True). `broadcast` runs at set-up, and with `sync_module_states`;
# `backward_end` after each backward outside of `no_sync`, and so before the next forward, as with
# DDP: evaluation and saves between them also see the same buffers on all ranks. A buffer whose bits
# equal rank 0's is not written, so graphs that saved it stay valid.


class ModuleBuffers:
    """Buffers of one model. One thread uses it at a time.

    follow: copy rank 0's buffers after each backward.
    """

    def __init__(self, model: nn.Module, comm: Comm, *, follow: bool) -> None:
        self._comm = comm
        # Not the tensors themselves: a module may assign another tensor to the attribute.
        self._places = [(each.module, each.attr, each.names[0]) for each in find_buffers(model)]
        self._follow = follow and comm.world > 1
        self._in_no_sync = False

    def backward_end(self) -> None:
        """Copy the buffers of rank 0, if `follow`. Collective; blocks."""
        if self._follow and not self._in_no_sync:
            self.broadcast()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Do not copy buffers inside the context: micro-batches that are not a step's last."""
        # Restored, not cleared: contexts may be nested.
        before, self._in_no_sync = self._in_no_sync, True
        try:
            yield
        finally:
            self._in_no_sync = before

    @torch.no_grad()
    def broadcast(self, keep: Callable[[torch.Tensor], None] = lambda _buffer: None) -> None:
        """Give all ranks the buffers of rank 0, bit for bit. Collective; blocks.

        keep: called with each buffer before it is written. Raises: RanksDiverged if number, shapes
        or dtypes of buffers differ.
        """
        held = {
            name: value
            for module, attr, name in self._places
            if (value := module._buffers.get(attr)) is not None
        }
        if not held or self._comm.world == 1:
            return
        mine = _bytes_of(list(held.values()))
        layout = repr([(name, value.dtype, value.shape) for name, value in held.items()])
        theirs = mine.clone()
        self._comm.broadcast(fingerprinted(f"{len(held)} buffers", digest_of_text(layout)), theirs)
        start = 0
        for value in held.values():
            part = slice(start, start + value.nbytes)
            if not torch.equal(mine[part], theirs[part]):
                keep(value)
                found = from_bytes(theirs[part].numpy().data, value.dtype, tuple(value.shape))
                copy_(value, found)
            start = part.stop


def _bytes_of(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the bytes of tensors one after another, on the CPU. One copy for each device."""
    pieces = [bytes_of(value) for value in values]
    devices = {piece.device for piece in pieces}
    if len(devices) > 1:
        pieces = [piece.to("cpu") for piece in pieces]
    return torch.cat(pieces).to("cpu")
