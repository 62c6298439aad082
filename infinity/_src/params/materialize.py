"""Filling: where the values of a model come from when it is offloaded.

    load=None                 the module holds them
    load=callable             `load(name, tensor)` fills the tensor (an initialiser, a reader of the user's own)
    load=mapping              name -> tensor
    load=directory or file    safetensors, sharded or single, read one tensor at a time

A source knows whole weights; a tile of one is filled with its part (a callable is asked for the whole, once).
One flat of one unit is in memory at a time, so a model on the meta device is never in memory as a whole. Names, shapes
and kinds of dtype are checked against the source before anything is filled. A tied parameter is filled once, from
whichever of its names the source has.
"""

from __future__ import annotations

import abc
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import nn

from infinity._src.kernels.tiling.tiled_module import Place
from infinity._src.params.discover import find_parameters
from infinity._src.params.unit import Flat, Param, Unit

Source = Callable[[str, torch.Tensor], object] | Mapping[str, torch.Tensor] | str | os.PathLike[str]
"""What `inf.offload(load=...)` takes."""

_LISTED_MAX = 5  # names in a message


class Tensors(Protocol):
    """Named tensors that can be read one at a time."""

    @property
    def label(self) -> str:
        """What messages call it."""

    def names(self) -> Iterable[str]:
        """All names."""

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of one tensor, without reading it."""

    def read(self, name: str) -> torch.Tensor:
        """One tensor; the caller copies it at once."""


class OpenSource(abc.ABC):
    """A source, checked against the model and ready to fill it. Base of the three kinds."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    @abc.abstractmethod
    def fill(self, param: Param, out: torch.Tensor) -> None:
        """Fill `out`, a CPU tensor of the parameter's shape and dtype, with its values."""

    @abc.abstractmethod
    def fill_buffer(self, names: tuple[str, ...], out: torch.Tensor, *, was_meta: bool) -> None:
        """Fill a persistent buffer; one that is real already may keep its values."""

    def fill_buffers(self, device: torch.device) -> None:
        """Give every buffer its values and replace those on the meta device by real ones on `device`. Blocks.

        Buffers that are not persistent are in no checkpoint: Hugging Face models recompute theirs.
        Raises: ValueError naming buffers that nobody can compute.
        """
        lost: list[Buffer] = []
        with torch.inference_mode(False), torch.no_grad():
            for buffer in find_buffers(self._model):
                if buffer.persistent:
                    out = (
                        torch.empty_like(buffer.value, device=device)
                        if buffer.value.is_meta
                        else buffer.value.to(device)
                    )
                    self.fill_buffer(buffer.names, out, was_meta=buffer.value.is_meta)
                    buffer.module._buffers[buffer.attr] = out
                elif buffer.value.is_meta:
                    lost.append(buffer)
                else:
                    buffer.module._buffers[buffer.attr] = buffer.value.to(device)
            _recompute(self._model, lost, device)


def open_source(model: nn.Module, load: Source | None) -> OpenSource:
    """Open what the user passed as `load=` and check that it has what the model needs.

    Raises: ValueError naming what is missing, unexpected or of the wrong shape; FileNotFoundError for a path.
    """
    if load is None:
        return _ModuleSource(model)
    if isinstance(load, Mapping):
        return _NamedSource(model, _MappingTensors(load))
    if isinstance(load, (str, os.PathLike)):
        return _NamedSource(model, SafetensorsFiles(Path(load)))
    if callable(load):
        return _CallableSource(model, load)
    raise ValueError(
        f"load={type(load).__name__} is not known; give a callable (name, tensor), a mapping from names to tensors, or a "
        "directory of safetensors"
    )


def fill_unit(unit: Unit, source: OpenSource, store: Callable[[Flat, torch.Tensor], None]) -> None:
    """Fill a unit, one flat at a time: `store(flat, values)` gets a CPU tensor [layout.numel], zero between parameters.
    Blocks."""
    for flat in unit.flats:
        with torch.inference_mode(False), torch.no_grad():
            values = torch.zeros(flat.layout.numel, dtype=flat.dtype)
            for param in flat.params:
                source.fill(param, values[param.offset : param.offset + param.numel].view(param.shape))
        store(flat, values)


# -- the three kinds ---------------------------------------------------------------------------------------------------


class _ModuleSource(OpenSource):
    """The module holds the values."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        meta = list(dict.fromkeys(entry.keys[0] for entry in find_parameters(model) if entry.parameter.is_meta))
        meta += [b.names[0] for b in find_buffers(model) if b.value.is_meta and b.persistent]
        if meta:
            raise ValueError(
                f"{_listed(meta)} on the meta device without values; say where they come from: "
                "inf.offload(model, policy, load=directory, mapping or callable)"
            )

    def fill(self, param: Param, out: torch.Tensor) -> None:
        module, attr = param.sites[0]
        held = module._parameters[attr]
        assert held is not None, param.name
        out.copy_(held.detach())

    def fill_buffer(self, names: tuple[str, ...], out: torch.Tensor, *, was_meta: bool) -> None:
        assert not was_meta, (names, out)


class _CallableSource(OpenSource):
    """The user's function fills tensors that are handed to it."""

    def __init__(self, model: nn.Module, load: Callable[[str, torch.Tensor], object]) -> None:
        super().__init__(model)
        self._load = load
        self._whole: tuple[str, torch.Tensor] | None = None  # the weight whose tiles are being filled

    def fill(self, param: Param, out: torch.Tensor) -> None:
        place, key = param.place, param.keys[0]
        if place is None:
            self._whole = None
            self._call(key, out)
            return
        if self._whole is None or self._whole[0] != key:
            self._whole = None  # the one before goes first
            whole = torch.empty(place.whole_shape, dtype=out.dtype)
            self._call(key, whole)
            self._whole = key, whole
        out.copy_(place.of(self._whole[1]))

    def fill_buffer(self, names: tuple[str, ...], out: torch.Tensor, *, was_meta: bool) -> None:
        if was_meta:
            self._call(names[0], out)
        else:
            self._load(names[0], out)

    def _call(self, name: str, out: torch.Tensor) -> None:
        _poison(out)
        self._load(name, out)
        if _is_poisoned(out):
            raise ValueError(
                f"load({name!r}, tensor) returned and left the tensor as it was; fill it in place (tensor.copy_(...))"
            )


class _NamedSource(OpenSource):
    """Named tensors: a mapping, or safetensors files."""

    def __init__(self, model: nn.Module, tensors: Tensors) -> None:
        super().__init__(model)
        self._tensors = tensors
        self._known = set(tensors.names())
        self._check()

    def fill(self, param: Param, out: torch.Tensor) -> None:
        name = self._name_of(param.keys)
        assert name is not None, param.name
        self._copy(name, out, param.place)

    def fill_buffer(self, names: tuple[str, ...], out: torch.Tensor, *, was_meta: bool) -> None:
        name = self._name_of(names)
        assert name is not None or not was_meta, names
        if name is not None:
            self._copy(name, out)

    def _copy(self, name: str, out: torch.Tensor, place: Place | None = None) -> None:
        value = self._tensors.read(name)
        if value.is_floating_point() != out.is_floating_point():
            raise ValueError(
                f"{self._tensors.label} has {name} as {value.dtype}; the model wants {out.dtype}"
            )
        out.copy_(value if place is None else place.of(value))

    def _name_of(self, names: Iterable[str]) -> str | None:
        return next((name for name in names if name in self._known), None)

    def _check(self) -> None:
        """Compare names and shapes before anything is filled."""
        missing: list[str] = []
        expected: set[str] = set()
        wanted = list(dict.fromkeys((entry.keys, entry.whole_shape, True) for entry in find_parameters(self._model)))
        wanted += [(b.names, tuple(b.value.shape), b.persistent and b.value.is_meta) for b in find_buffers(self._model)]
        for names, shape, required in wanted:
            expected.update(names)
            name = self._name_of(names)
            if name is None:
                if required:
                    missing.append(names[0])
                continue
            found = tuple(self._tensors.shape(name))
            if found != shape:
                raise ValueError(f"{self._tensors.label} has {name} of shape {found}; the model wants {shape}")
        unexpected = sorted(self._known - expected)
        if missing or unexpected:
            raise ValueError(self._explain(missing, unexpected))

    def _explain(self, missing: list[str], unexpected: list[str]) -> str:
        parts = [f"{_listed(missing)} missing"] if missing else []
        parts += [f"{_listed(unexpected)} unexpected"] if unexpected else []
        text = f"{self._tensors.label} does not fit the model: {'; '.join(parts)}."
        if any(".experts." in name for name in missing) and any(".experts." in name for name in unexpected):
            return (
                f"{text} Hugging Face stores the experts of such a model apart and fuses them while it loads, which is "
                "not built here: load with `from_pretrained` first, or pass a callable that fuses them"
            )
        return f"{text} Rename or drop tensors in a mapping, or pass a callable (name, tensor) that fills each one"


# -- named tensors -----------------------------------------------------------------------------------------------------


class _MappingTensors:
    """A mapping that the user passed."""

    def __init__(self, mapping: Mapping[str, torch.Tensor]) -> None:
        self.label = "the mapping passed as load="
        self._mapping = mapping

    def names(self) -> Iterable[str]:
        return self._mapping.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._mapping[name].shape)

    def read(self, name: str) -> torch.Tensor:
        return self._mapping[name]


class SafetensorsFiles:
    """The safetensors of a directory (by its index if it has one), or a single file. One file is open at a time."""

    def __init__(self, path: Path) -> None:
        self.label = str(path)
        self._file_of = _index(path)
        self._open_path: Path | None = None
        self._open_file: Any = None

    def names(self) -> Iterable[str]:
        """All names, of all files."""
        return self._file_of.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape that the file's header states."""
        return tuple(self._header(name).get_shape())

    def is_floating_point(self, name: str) -> bool:
        """Whether the file's header states a floating dtype."""
        return str(self._header(name).get_dtype()).startswith(("F", "BF"))

    def read(self, name: str) -> torch.Tensor:
        """One tensor, mapped from its file."""
        return cast("torch.Tensor", self._file(name).get_tensor(name))

    def _header(self, name: str) -> Any:
        from safetensors import SafetensorError

        try:
            return self._file(name).get_slice(name)
        except SafetensorError as error:
            raise ValueError(f"{self._file_of[name]} does not have {name}, though the index says so") from error

    def _file(self, name: str) -> Any:
        path = self._file_of[name]
        if path != self._open_path:
            self._open_file = _open(path)
            self._open_path = path
        return self._open_file


def _open(path: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, framework="pt", device="cpu")
    except SafetensorError as error:
        raise ValueError(f"{path} is not a whole safetensors file: {error}") from error


def _index(path: Path) -> dict[str, Path]:
    """Name of each tensor -> the file that has it."""
    if path.is_file():
        return dict.fromkeys(_open(path).keys(), path)
    if not path.is_dir():
        raise FileNotFoundError(f"{path}: there is no such directory or file")
    indices = sorted(path.glob("*.safetensors.index.json"))
    if len(indices) > 1:
        raise ValueError(
            f"{path} has several indices: {', '.join(found.name for found in indices)}"
        )
    if indices:
        weight_map = _weight_map(indices[0])
        gone = sorted({name for name in weight_map.values() if not (path / name).is_file()})
        if gone:
            raise FileNotFoundError(f"{indices[0]} names files that are not there: {_listed(gone)}")
        return {name: path / file for name, file in weight_map.items()}
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(
            f"{path} has no *.safetensors; convert the checkpoint, or pass a mapping"
        )
    found: dict[str, Path] = {}
    for file in files:
        for name in _open(file).keys():  # noqa: SIM118 - not a dict
            if name in found:
                raise ValueError(
                    f"{name} is in {found[name].name} and in {file.name}, and there is no index to decide"
                )
            found[name] = file
    return found


def _weight_map(index: Path) -> dict[str, str]:
    """Name of each tensor -> name of its file, which lies beside the index: a path out of there is refused."""
    try:
        weight_map: dict[str, str] = dict(json.loads(index.read_text())["weight_map"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{index} is no index of safetensors: it has no readable weight_map ({error!r})") from error
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file or file == "..":
            raise ValueError(
                f"{index} says that {name} is in {file!r}; files lie beside their index, so a path is refused: move the file "
                "there and write its name alone"
            )
    return weight_map


# -- buffers -----------------------------------------------------------------------------------------------------------


class Buffer:
    """One buffer of one module, with all its names."""

    def __init__(self, module: nn.Module, attr: str, value: torch.Tensor, names: tuple[str, ...]) -> None:
        self.module = module
        self.attr = attr
        self.value = value
        self.names = names
        self.persistent = attr not in module._non_persistent_buffers_set


def find_buffers(model: nn.Module) -> Iterator[Buffer]:
    """All buffers of a model, persistent or not. A tensor that several modules register is yielded for each."""
    names: dict[int, list[str]] = {}
    modules: dict[int, nn.Module] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        modules[id(module)] = module
        names.setdefault(id(module), []).append(f"{prefix}." if prefix else "")
    for key, module in modules.items():
        for attr, value in list(module._buffers.items()):
            if value is not None:
                yield Buffer(module, attr, value, tuple(f"{prefix}{attr}" for prefix in names[key]))


def _recompute(model: nn.Module, lost: list[Buffer], device: torch.device) -> None:
    """Recompute buffers that are in no checkpoint, as Hugging Face models can: `_init_weights(module)` of the model
    around writes them (rotary frequencies, position ids), and writes parameters that are still on meta to no effect."""
    stranded: list[str] = []
    for buffer in lost:
        out = torch.empty_like(buffer.value, device=device)
        _poison(out)
        buffer.module._buffers[buffer.attr] = out
    for module in {id(buffer.module): buffer.module for buffer in lost}.values():
        owner = _owner(model, module)
        held = [value for value in module._parameters.values() if value is not None and not value.is_meta]
        if owner is not None and not held:
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
            f"{_listed(stranded)} on the meta device and not persistent, so no checkpoint has values for it; build that "
            "module outside of torch.device('meta'), or register the buffer as persistent"
        )


def _owner(model: nn.Module, module: nn.Module) -> Callable[[nn.Module], object] | None:
    """`_init_weights` of the innermost model around `module` that has one."""
    found: nn.Module | None = None
    for candidate in model.modules():  # outer before inner
        if callable(getattr(candidate, "_init_weights", None)) and any(
            part is module for part in candidate.modules()
        ):
            found = candidate
    return getattr(found, "_init_weights", None)


def _poison(out: torch.Tensor) -> None:
    """Fill with what no initialiser writes, to see afterwards whether it was written."""
    if out.is_floating_point():
        out.fill_(float("nan"))
    elif out.dtype != torch.bool:
        out.fill_(torch.iinfo(out.dtype).min if not out.is_complex() else complex("nan"))


def _is_poisoned(out: torch.Tensor) -> bool:
    if out.numel() == 0 or out.dtype == torch.bool:
        return False
    if out.is_floating_point() or out.is_complex():
        return bool(out.reshape(-1)[0].isnan()) and bool(out.isnan().all())
    return bool((out == torch.iinfo(out.dtype).min).all()) and torch.iinfo(out.dtype).min != 0


def _listed(names: list[str]) -> str:
    """ "a, b and 3 more are"."""
    shown = ", ".join(names[:_LISTED_MAX])
    more = f" and {len(names) - _LISTED_MAX} more" if len(names) > _LISTED_MAX else ""
    return f"{shown}{more} {'is' if len(names) == 1 else 'are'}"
