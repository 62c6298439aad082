"""Checkpoints of the hub as a source of weights. A load gives a transformers model the same values
as `from_pretrained`, and reads and converts one group of tensors at a time.

    safetensors, GGUF  ->  conversion of transformers, group by group  ->  tensors of the model

A load converts fused tensors (the experts of a layer) a few rows at a time. The conversion also
dequantizes weights if transformers has an operation for their quantization.

An export reads a group from the model, converts the group with transformers' reverse conversion to
tensors with the hub's names, and writes these tensors.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import functools
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import xxhash

from infinity._src.base.dtypes import copied
from infinity._src.base.torch_compat import set_data
from infinity._src.checkpoint.formats import safetensors_reader
from infinity._src.checkpoint.formats.gguf_files import UnpackedGguf, open_gguf
from infinity._src.checkpoint.formats.hub_conversion import (
    ForwardGroup,
    ForwardPlan,
    ReverseGroup,
    can_convert,
    conversions_of,
    has_conversions,
    in_whole_blocks,
    is_hub_model,
    mark_used,
    names_of,
    plan_forward,
    plan_reverse,
    saved_conversions,
    too_old,
    too_old_to_load,
    transformers_loading,
)
from infinity._src.checkpoint.formats.load import Engine
from infinity._src.checkpoint.formats.safetensors_reader import SafetensorsFiles, StoredTensors
from infinity._src.checkpoint.formats.safetensors_writer import (
    ExportPart,
    Whole,
    check_written,
    module_parts,
    read_value,
    whole_bytes,
    wholes_of,
)
from infinity._src.checkpoint.hub_resolution import open_safetensors, read_config
from infinity._src.checkpoint.metadata import persistent_buffers
from infinity._src.params.discover import find_parameters
from infinity._src.params.materialize import (
    Faults,
    FileTensors,
    LastRows,
    NamedTensors,
    Source,
    SourceFiles,
    size_text,
)
from infinity._src.params.unit import place_at
from infinity.errors import WeightsError

_DEQUANTIZED = ("fp8",)
"""Methods of quantization whose weights transformers can dequantize tensor by tensor on a CPU."""

CONVERTED_BYTES = 1 << 20
"""Bytes of fused tensors that a conversion processes at a time; or one expert, if it is larger."""

_GROUPS_OF_TILES = 3
"""Number of groups that stay in memory during reads of tiled weights: one tile may have parts of
three weights."""


@dataclasses.dataclass(frozen=True)
class _Opened:
    """Open files, and the plan of their conversion. saved: the conversions that an export reverts.
    quantized: configuration of the quantization; None for unquantized weights.
    """

    files: StoredTensors
    plan: ForwardPlan
    saved: list[Any] | None
    quantized: Any


class HubTensors(FileTensors):
    """Tensors of a transformers model, converted from a directory of safetensors files, one
    safetensors file, or a GGUF file. The first access opens the files.

    Raises: FileNotFoundError; WeightsError for damaged files, and for tensors that transformers
    cannot convert or dequantize, with the reason.
    """

    def __init__(self, model: torch.nn.Module, path: Path) -> None:
        self._model: Any = model
        self._path, self.label = path, str(path)
        # Converted tensors of the last group, or for tiled weights of the last _GROUPS_OF_TILES
        # groups. Keys are the first names of the groups.
        self._made: dict[str, dict[str, torch.Tensor]] = {}
        self._rows = LastRows()

    @functools.cached_property
    def _opened(self) -> _Opened:
        if self._path.suffix == ".gguf":
            gguf, mapping = open_gguf(self._model, self._path, _main_dtype(self._model))
            # saved=None: an export uses the hub's names for the model's type, not GGUF's names.
            return _Opened(gguf, _plan(self._model, gguf, mapping), None, None)
        files = open_safetensors(self._model, self._path)
        quantized = _quantization(self._model, self._path)
        if quantized is None:
            mapping = conversions_of(self._model)
        else:
            mapping = _dequantizing(self._model, quantized, self._path)
        plan = _plan(self._model, files, mapping)
        saved = mark_used(self._model, files.names(), conversions_of(self._model))
        return _Opened(files, plan, saved, quantized)

    def names(self) -> Iterable[str]:
        """Return the names of the model's tensors that the files have, and the names in the files
        that the model does not expect.

        Raises: WeightsError for tensors that transformers cannot convert, for tied weights with two
        values, and for quantized weights whose scales no operation applies.
        """
        self._check_broken()
        _check_scales(self._model, self._opened)
        self._check_ties()
        return [*self._opened.plan.groups, *self._opened.plan.unexpected]

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._like(name).shape)

    def dtype(self, name: str) -> torch.dtype:
        return self._like(name).dtype

    def _like(self, name: str) -> torch.Tensor:
        group = self._opened.plan.groups.get(name)
        return _like(self._opened.files, name) if group is None else group.targets[name]

    @functools.cached_property
    def files(self) -> SourceFiles:
        conversion = _conversion_id(self._model, self._opened.quantized)
        return SourceFiles(self._opened.files.files.paths, conversion)

    def read(self, name: str) -> torch.Tensor:
        """Read one tensor of the model. The tensors of the same group stay in memory until a read
        of another converted group; for tiled weights, the last _GROUPS_OF_TILES groups stay.
        """
        group = self._group(name)
        if group.renamed is not None:
            return self._opened.files.read(group.renamed)
        if group.first not in self._made:
            # Free older groups first, so that memory never holds two groups of whole weights.
            kept = _GROUPS_OF_TILES - 1 if self._tiled.intersection(group.targets) else 0
            for other in list(self._made)[: max(0, len(self._made) - kept)]:
                del self._made[other]
            made = group.convert(self._opened.files.read)
            # Make the tensors contiguous, so that parts of them are views.
            self._made[group.first] = {key: value.contiguous() for key, value in made.items()}
        return self._made[group.first][name]

    @functools.cached_property
    def _tiled(self) -> set[str]:
        """Names of tiled weights."""
        return {
            key
            for entry in find_parameters(self._model)
            if place_at(entry.sites) is not None
            for key in entry.keys
        }

    def read_into(self, name: str, start: int, out: torch.Tensor) -> None:
        """Read the elements of one tensor of the model from `start` on. The call converts a few
        fused experts at a time. These experts stay in memory for the next call, until a call reads
        their last element or other experts.
        """
        group, files = self._group(name), self._opened.files
        if group.renamed is not None:
            files.read_into(group.renamed, start, out)
            return
        like = group.targets[name]
        if not group.stacked or not out.numel():
            out.copy_(self.read(name).reshape(-1)[start : start + out.numel()])
            return

        def convert(first: int, last: int) -> torch.Tensor:
            (rows,) = group.convert(files.read, first, last).values()
            return rows

        row = like.numel() // like.shape[0]
        self._rows.read_into(
            name, start, out, row=row, step=_rows_together(like), convert=convert
        )

    @property
    def converting_bytes(self) -> int:
        """Upper bound of the memory that a conversion takes: for the largest group, the tensors of
        the files, the results, and a copy between two operations. A stack needs these only for the
        rows that are converted at a time. Tiled weights add the results of the other groups that
        stay in memory.
        """
        groups = {group.first: group for group in self._opened.plan.groups.values()}
        files = self._opened.files
        found, made = [files.unpacking_bytes if isinstance(files, UnpackedGguf) else 0], [0]
        for group in groups.values():
            if group.renamed is None:
                found.append(_converting_bytes(group, files))
                if self._tiled.intersection(group.targets) and not group.stacked:
                    made.append(_bytes_of(group.targets.values()))
        return max(found) + (_GROUPS_OF_TILES - 1) * max(made)

    def origin(self, name: str) -> str:
        group = self._opened.plan.groups.get(name)
        if group is None:
            return self._opened.files.origin(name)
        first = self._opened.files.origin(group.sources[0][1])
        more = len(group.sources) - 1
        return f"{first}{f', and {more} tensors more' if more else ''}"

    def explain(self, name: str) -> Faults:
        """Return the faults of the files for a tensor of the model, by the hub's names: missing
        tensors, and tensors of another shape.
        """
        files, faults = self._opened.files, Faults()
        group = self._reversed.get(name)
        for target, like in group.targets.items() if group is not None else ():
            shape, size = tuple(like.shape), size_text(like.shape, like.dtype)
            if target not in self._stored:
                faults.missing[target] = f"{list(shape)}, {size}"
            elif files.shape(target) != shape:
                faults.wrong.append(
                    f"{target} of shape {files.shape(target)}; the model wants {shape}, {size} "
                    f"(found: {files.origin(target)})"
                )
        return faults

    @functools.cached_property
    def _stored(self) -> set[str]:
        return set(self._opened.files.names())

    @functools.cached_property
    def _reversed(self) -> dict[str, ReverseGroup]:
        """Reverse conversion of each tensor of the model, for messages."""
        try:
            groups = plan_reverse(self._model, names_of(self._model), self._opened.saved or ())
        except ValueError:
            # Only messages need the plan; without a plan, messages use the model's names.
            return {}
        return {source: group for group in groups for _, source in group.sources}

    def _check_broken(self) -> None:
        broken, faults = self._opened.plan.broken, Faults()
        for name, reason in broken.items():
            known = self.explain(name)
            faults.add(known or Faults(wrong=[reason]))
        if faults:
            raise WeightsError(
                f"{self.label} does not fit the model: {faults.sentence()}. Build the model from "
                "the configuration of this checkpoint, or get all of its files",
                path=self.label,
                tensors=tuple(faults.missing),
            )

    def _check_ties(self) -> None:
        """Raise WeightsError if the files have two different values for a tied weight of the model;
        `from_pretrained` would untie the weight.
        """
        groups, label = self._opened.plan.groups, self.label
        for entry in find_parameters(self._model):
            known = [name for name in entry.keys if name in groups]
            for other in known[1:]:
                first = known[0]
                if groups[first].sources != groups[other].sources and not self._is_same(
                    first, other
                ):
                    one, two = (groups[name].sources[0][1] for name in (first, other))
                    raise WeightsError(
                        f"{label} has {one} ({self.origin(first)}) and {two} "
                        f"({self.origin(other)}) with different values, and the model has "
                        "them as one; build it with tie_word_embeddings=False",
                        path=label,
                        tensors=(one, two),
                    )

    def _is_same(self, first: str, other: str) -> bool:
        """Return whether two tensors of the model have the same values in the files, where their
        dtypes may differ.
        """
        shape, is_floating = self.shape(first), self.dtype(first).is_floating_point
        if shape != self.shape(other) or is_floating is not self.dtype(other).is_floating_point:
            return False
        groups, files = self._opened.plan.groups, self._opened.files
        dtypes = {self._like(name).dtype for name in (first, other)}
        if is_floating:
            dtypes = {torch.float64 if torch.float64 in dtypes else torch.float32}
        numel, dtype = math.prod(shape), dtypes.pop()
        # Compare in pieces only if the files store the tensors unconverted; else each piece would
        # repeat the conversion.
        is_stored = not isinstance(files, UnpackedGguf) and all(
            groups[name].renamed is not None for name in (first, other)
        )
        step = max(1, safetensors_reader.PIECE_BYTES // dtype.itemsize if is_stored else numel)
        for start in range(0, numel, step):
            parts = []
            for name in (first, other):
                parts.append(torch.empty(min(step, numel - start), dtype=dtype))
                self.read_into(name, start, parts[-1])
            if not torch.equal(*parts):
                return False
        return True

    def finish(self) -> None:
        """Record the conversions in the model, as `from_pretrained` does, so that exports revert
        them. Remove the configuration of quantization, since the weights are dequantized.
        """
        self._made, self._rows = {}, LastRows()
        self._model._weight_conversions = self._opened.saved
        for config in _configs(self._model):
            if getattr(config, "quantization_config", None) is not None:
                del config.quantization_config

    def _group(self, name: str) -> ForwardGroup:
        return self._opened.plan.groups[name]


def open_weights(model: torch.nn.Module, path: Path) -> FileTensors:
    """Open a directory or a file of weights for a model; for a transformers model, with the
    conversion. Raises: as `HubTensors`, and as `SafetensorsFiles`.
    """
    if not is_hub_model(model):
        return SafetensorsFiles(path)
    return HubTensors(model, path) if can_convert() else _unconverted(model, path)


def _unconverted(model: Any, path: Path) -> StoredTensors:
    """Open files that need no conversion: their names and shapes are the model's. Raises:
    WeightsError for other files, since the installed release of transformers cannot convert.
    """
    if path.suffix != ".gguf" and _quantization(model, path) is None:
        files, known = open_safetensors(model, path), names_of(model)
        found = set(files.names())
        if (
            found <= known.keys()
            and all(found.intersection(entry.keys) for entry in find_parameters(model))
            and all(files.shape(name) == known[name].shape for name in found)
        ):
            return files
    raise _too_old(path)


def _too_old(path: Path) -> WeightsError:
    return WeightsError(f"{path} has to be converted, and {too_old_to_load()}", path=str(path))


@contextlib.contextmanager
def hub_checkpoint(
    model: torch.nn.Module, load: Source | None
) -> Iterator[Source | NamedTensors | None]:
    """Prepare a transformers model for a load from a path, as a context. Yields the source that
    replaces the path. If `load` is no path, yields it unchanged.

    Parameters on meta, and persistent buffers, get the same dtypes as from `from_pretrained` (some
    stay in fp32). An error restores the model's dtypes.

    Raises: WeightsError if the model may keep some parameters in fp32, but the release of
    transformers does not say which.
    """
    if not isinstance(load, (str, os.PathLike)) or not is_hub_model(model):
        yield load
        return
    if not can_convert():
        if _keeps_fp32(model):
            raise _too_old(Path(load))
        yield load
        return
    source = HubTensors(model, Path(load))
    before = _plan_dtypes(model)
    try:
        yield source
    except BaseException:
        for tensor, was in before:
            set_data(tensor, was)
        raise
    source.finish()


def _rows_together(stack: torch.Tensor) -> int:
    """Return the number of rows of a stack that a conversion processes at a time."""
    row_bytes = stack.numel() // stack.shape[0] * stack.dtype.itemsize
    return max(1, CONVERTED_BYTES // max(row_bytes, 1))


def _converting_bytes(group: ForwardGroup, files: StoredTensors) -> int:
    """Return an upper bound of the memory, in bytes, that the conversion of a group takes."""
    stored = [_like(files, name) for _, name in group.sources]
    found = _bytes_of(stored) + 2 * _bytes_of(group.targets.values())
    if group.stacked:
        (stack,) = group.targets.values()
        found = -(-found * min(_rows_together(stack), stack.shape[0]) // stack.shape[0])
    # Dequantization converts one weight at a time to fp32, pads it, and multiplies it by scales:
    # three fp32 tensors.
    quantized = max((each.numel() for each in stored if each.dtype.itemsize == 1), default=0)
    return found + 3 * torch.float32.itemsize * quantized


def _bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.dtype.itemsize for tensor in tensors)


def _plan(model: Any, files: StoredTensors, mapping: list[Any]) -> ForwardPlan:
    return plan_forward(model, files.names(), functools.partial(_like, files), mapping, files.label)


def _like(files: StoredTensors, name: str) -> torch.Tensor:
    return torch.empty(files.shape(name), dtype=files.dtype(name), device="meta")


# -- dtypes ----------------------------------------------------------------------------------------


def _plan_dtypes(model: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Change parameters and buffers on meta, and persistent buffers with storage, in place to the
    dtypes that transformers plans for them. Return each changed tensor with the former data.
    """
    plan = model._get_dtype_plan(_main_dtype(model))
    if not plan:
        return []
    pattern, by_group, _ = transformers_loading().build_glob_alternation(list(plan))
    before: list[tuple[torch.Tensor, torch.Tensor]] = []
    # If several modules share a tensor, change it once: the first name with another dtype decides.
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for store in (module._parameters, module._buffers):
            for attr, value in store.items():
                if value is None or not value.is_floating_point():
                    continue
                is_buffer = store is module._buffers
                is_stored = is_buffer and attr not in module._non_persistent_buffers_set
                if not value.is_meta and not is_stored:
                    continue
                found = pattern.search(f"{prefix}.{attr}" if prefix else attr)
                dtype = plan[by_group[found.lastgroup]] if found else value.dtype
                if value.dtype != dtype and id(value) not in seen:
                    seen.add(id(value))
                    was = value.detach()
                    before.append((value, was))
                    set_data(value, was.to(dtype))
    return before


def _keeps_fp32(model: Any) -> bool:
    """Return whether `from_pretrained` may keep some parameters of a 16-bit model in fp32."""
    is_half = _main_dtype(model) in (torch.float16, torch.bfloat16)
    kept = ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")
    return is_half and any(getattr(model, name, None) for name in kept)


def _main_dtype(model: torch.nn.Module) -> torch.dtype:
    """Return the dtype of most of the model's parameters."""
    numel: collections.Counter[torch.dtype] = collections.Counter()
    for parameter in model.parameters():
        if parameter.is_floating_point():
            numel[parameter.dtype] += parameter.numel()
    return max(numel, key=lambda dtype: numel[dtype], default=torch.float32)


# -- quantized weights -----------------------------------------------------------------------------


def _configs(model: Any) -> tuple[Any, ...]:
    """Return the model's configurations that may contain a configuration of quantization."""
    return model.config, model.config.get_text_config(decoder=True)


def _quantization(model: Any, path: Path) -> Any:
    """Return the configuration of quantization from the model's configuration or, if that has none,
    from the checkpoint's config.json; None: unquantized weights. Raises: as `read_config`.
    """
    for config in _configs(model):
        held = getattr(config, "quantization_config", None)
        if held is not None:
            return held
    beside = read_config(path) or {}
    text = beside.get("text_config")
    found = beside.get("quantization_config")
    return text.get("quantization_config") if found is None and isinstance(text, dict) else found


def _check_scales(model: Any, opened: _Opened) -> None:
    """Raise WeightsError for 8-bit weights whose scales no conversion applies, since values without
    scales would be wrong.
    """
    unused: dict[str, list[str]] = {}
    for name in opened.plan.unused:
        if "scale" in name.rpartition(".")[2]:
            unused.setdefault(name.rpartition(".")[0], []).append(name)
    if not unused:
        return
    known, files = names_of(model), opened.files
    for target, group in opened.plan.groups.items():
        if not known[target].is_floating_point():
            continue
        for _, name in group.sources:
            scale = _scale_of(name, unused.get(name.rpartition(".")[0], ()))
            if scale is not None and files.dtype(name).itemsize == 1:
                raise WeightsError(
                    f"{files.label} has {name} in {files.dtype(name)} ({files.origin(name)}) and "
                    f"{scale}, which nothing multiplies it with; state the quantization_config in "
                    "the model's configuration or in the config.json beside the files, or take "
                    "weights in BF16",
                    path=files.label,
                    tensors=(name, scale),
                )


def _scale_of(name: str, others: Iterable[str]) -> str | None:
    """Return the name of a weight's scale; None if there is none. others: names of further tensors
    of the same module. Scales of inputs or activations are ignored.
    """
    own = name.rpartition(".")[2]
    for other in others:
        last = other.rpartition(".")[2]
        if "input" in last or "activation" in last:
            continue
        if last.startswith(own) or own == "weight":
            return other
    return None


def _dequantizing(model: Any, config: Any, path: Path) -> list[Any]:
    """Return the conversions of the model, including dequantizing conversions. Raises: WeightsError
    for a quantization that transformers cannot dequantize tensor by tensor.
    """
    transformers_loading()
    from transformers.quantizers.auto import AutoHfQuantizer

    method = _settings(config).get("quant_method")
    method = str(getattr(method, "value", method))
    if method not in _DEQUANTIZED:
        raise WeightsError(
            f"the weights in {path} are quantized ({method}) and cannot be trained, nor turned "
            f"into plain ones tensor by tensor (that works for {', '.join(_DEQUANTIZED)}); use the "
            "unquantized model",
            path=str(path),
        )
    # Copy the configuration: the model's must not change before the load has succeeded.
    quantizer = AutoHfQuantizer.from_config(copy.deepcopy(config), pre_quantized=True)
    quantizer.quantization_config.dequantize = True
    block = quantizer.quantization_config.weight_block_size
    mapping = conversions_of(model, quantizer)
    return in_whole_blocks(mapping, block and (block[0], block[1]), str(path))


def _settings(config: Any) -> dict[str, Any]:
    """Return the settings of a configuration of quantization, by name."""
    found: dict[str, Any] = config if isinstance(config, dict) else config.to_dict()
    return found


def _conversion_id(model: Any, quantized: Any) -> str:
    """Return an identifier of the conversion: the release of transformers, and a digest of the
    types of the model's modules and of the configuration of quantization.
    """
    import transformers

    kinds = {
        (type(module).__name__, str(module.config.model_type))
        for module in model.modules()
        if is_hub_model(module)
    }
    settings = None if quantized is None else _settings(quantized)
    text = json.dumps([sorted(kinds), settings], sort_keys=True, default=str)
    digest = xxhash.xxh3_128_hexdigest(text.encode())
    return f"transformers {transformers.__version__}, {digest}"


def hub_parts(model: Any, of: Engine, *, masters: bool) -> list[ExportPart]:
    """Return the parts of an export of a transformers model, one for each group, without tensors
    that transformers does not save. Reads no tensor.

    Raises: ValueError if a conversion has no reverse, or if the release of transformers cannot
    convert.
    """
    if not can_convert():
        _refuse_conversions(model)
        return module_parts(model, of, masters=masters)
    likes: dict[str, torch.Tensor] = {}
    readers: dict[str, Callable[[], torch.Tensor]] = {}
    sizes: dict[str, int] = {}
    read = functools.partial(read_value, of, masters=masters)
    wholes = wholes_of(param for unit in of.units for param in unit.params)
    check_written(of, wholes, persistent_buffers(model), masters=masters)
    for whole in wholes:
        name = _saved_name(model, whole)
        likes[name] = torch.empty(whole.shape, dtype=whole.params[0].dtype, device="meta")
        readers[name] = functools.partial(whole.merged, read)
        sizes[name] = whole_bytes(of, whole, masters=masters)
    for name, buffer in persistent_buffers(model).items():
        likes[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device="meta")
        readers[name] = functools.partial(copied, buffer)
        sizes[name] = buffer.nbytes
    for name in model._keys_to_ignore_on_save or ():
        likes.pop(name, None)
    parts = []
    for group in plan_reverse(model, likes, saved_conversions(model)):
        size = sum(sizes[name] for _, name in group.sources)
        # A converted group is in memory twice: before and after the conversion.
        beside = 0 if group.renamed else size
        parts.append(ExportPart(size, functools.partial(_converted, group, readers), beside))
    return parts


def _refuse_conversions(model: Any) -> None:
    if has_conversions(model):
        raise ValueError(f"{too_old()}, or export with names='modules'")


def _converted(
    group: ReverseGroup, readers: Mapping[str, Callable[[], torch.Tensor]]
) -> dict[str, torch.Tensor]:
    return group.convert(lambda name: readers[name]())


def _saved_name(model: Any, whole: Whole) -> str:
    """Return the name under which transformers saves a weight: among tied names, the name to which
    all further names are tied.
    """
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    return next((name for name in whole.keys if name not in tied), whole.name)
