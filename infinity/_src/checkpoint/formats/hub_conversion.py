"""Converts between the tensors of a checkpoint on the hub and the tensors of a transformers model.

    forward    experts.0.w1.weight, experts.0.w3.weight, …  ->  experts.gate_up_proj
    reverse    experts.gate_up_proj  ->  experts.0.w1.weight, experts.0.w3.weight, …

transformers renames, fuses, splits and permutes tensors by a mapping that belongs to the model.
Both directions run the code of transformers on one *group* at a time: tensors whose conversion
depends on no tensor outside of the group. The planner runs the same code on the meta device, so
that the names and shapes of all results are known before the first read.

Weights in fp8 have a scale for each block; the last block may be partial.

    weight [rows, columns], scales [ceil(rows / block), ceil(columns / block)]  ->  plain weight

transformers ignores the configured block size and computes one from the two shapes, as if all
blocks were whole: for 192 rows with 2 scales it uses blocks of 96 rows. `WholeBlocks` pads a weight
to whole blocks, dequantizes with transformers' operation, and removes the padding.
"""

from __future__ import annotations

import copy
import dataclasses
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from infinity._src.base.wording import listed
from infinity._src.params.discover import find_parameters
from infinity._src.params.materialize import find_buffers
from infinity.errors import WeightsError

Held = torch.Tensor | list[torch.Tensor]
"""Tensors that match one pattern of a conversion: a list with one tensor per name in the files, or
one tensor of the model."""


class ScaleGridError(ValueError):
    """Raised for a weight whose scales do not match the blocks. pattern, index: position of the
    weight in the conversion.
    """

    def __init__(self, message: str, pattern: str, index: int) -> None:
        super().__init__(message)
        self.pattern = pattern
        self.index = index


@dataclasses.dataclass(frozen=True)
class WholeBlocks:
    """Operation of a conversion: pads weights to whole blocks, and runs transformers' dequantizing
    operation `theirs`. block: rows and columns of a block; None if a weight has one scale.
    """

    theirs: Any
    block: tuple[int, int] | None

    @property
    def hf_quantizer(self) -> Any:
        """Quantizer of `theirs`; only operations of a quantizer have this field."""
        return self.theirs.hf_quantizer

    @property
    def supports_many_to_many(self) -> bool:
        """True if the operation makes several tensors from several tensors."""
        return bool(self.theirs.supports_many_to_many)

    def convert(self, input_dict: Mapping[str, Held], **context: Any) -> dict[str, Held]:
        """Return the dequantized weights in the dtype of the model, without scales. Raises:
        ScaleGridError.
        """
        padded: dict[str, Held] = dict(input_dict)
        cuts: dict[str, list[tuple[int, int] | None]] = {}
        for key, weights in input_dict.items():
            scales = input_dict.get(f"{key}_scale_inv")
            # If the numbers of weights and scales differ, `theirs` raises the error.
            if isinstance(weights, list) and scales is not None and len(weights) == len(scales):
                whole = [
                    self._padded(key, index, *pair)
                    for index, pair in enumerate(zip(weights, scales, strict=True))
                ]
                padded[key] = whole
                cuts[key] = [
                    None if each is weight else (weight.shape[-2], weight.shape[-1])
                    for each, weight in zip(whole, weights, strict=True)
                ]
        made: dict[str, Any] = self.theirs.convert(padded, **context)
        if "weight" in cuts:
            # `theirs` returns a single weight under the name of the model.
            return {key: _cut(value, cuts["weight"][0]) for key, value in made.items()}
        return {
            key: [_cut(*pair) for pair in zip(value, cuts[key], strict=True)]
            if key in cuts
            else value
            for key, value in made.items()
        }

    def _padded(
        self, pattern: str, index: int, weight: torch.Tensor, scales: torch.Tensor
    ) -> torch.Tensor:
        # Do not pad an integer weight, which has pairs of 4-bit values and blocks of another size,
        # or a weight with one scale for all values.
        if not weight.is_floating_point() or weight.dim() < 2 or scales.dim() < 2:
            return weight
        rows, columns = weight.shape[-2:]
        block = self.block or (rows, columns)
        grid = (-(-rows // block[0]), -(-columns // block[1]))
        wanted, found = (*weight.shape[:-2], *grid), tuple(scales.shape)
        if found != wanted:
            raise ScaleGridError(
                f"of shape {tuple(weight.shape)} with scales of shape {found}; blocks of "
                f"{block[0]} x {block[1]} have some of shape {wanted}: state the weight_block_size "
                "that it was quantized with in the quantization_config, or download it again",
                pattern,
                index,
            )
        if (rows, columns) == (grid[0] * block[0], grid[1] * block[1]):
            return weight
        whole = weight.new_zeros((*wanted[:-2], grid[0] * block[0], grid[1] * block[1]))
        whole[..., :rows, :columns] = weight
        return whole


def _cut(value: torch.Tensor, shape: tuple[int, int] | None) -> torch.Tensor:
    return value if shape is None else value[..., : shape[0], : shape[1]].contiguous()


_NEEDED = (
    "WeightConverter", "WeightRenaming", "PrefixChange", "MergeModulelist", "Concatenate",
    "Interleave", "Transpose", "rename_source_key", "apply_converters", "apply_renamings",
    "dot_natural_key", "build_glob_alternation",
)  # fmt: skip
"""Names of transformers.core_model_loading that this module and hub_files.py use. A release without
one of these names cannot convert.
"""

Read = Callable[[str], torch.Tensor]


def is_hub_model(model: torch.nn.Module) -> bool:
    """Return whether the model is a transformers model, without importing transformers."""
    modeling = sys.modules.get("transformers.modeling_utils")
    return modeling is not None and isinstance(model, modeling.PreTrainedModel)


def can_convert() -> bool:
    """Return whether the installed transformers can convert tensor by tensor."""
    return _loading() is not None


def transformers_loading() -> Any:
    """Return transformers.core_model_loading. Raises: ValueError for a release without it."""
    found = _loading()
    if found is None:
        raise ValueError(too_old_to_load())
    return found


def too_old_to_load() -> str:
    """Return a message: the release cannot convert; the message names alternatives for a load."""
    return (
        f"{too_old()}, or give the tensors under the names of the modules, as a mapping or an "
        "inf.TensorSource"
    )


def too_old() -> str:
    """Return a message: the installed release of transformers cannot convert."""
    import transformers

    return (
        f"transformers {transformers.__version__} cannot convert the names of checkpoints tensor "
        "by tensor; install transformers 5.23 or later"
    )


def _loading() -> Any:
    try:
        from transformers import core_model_loading
    except ImportError:
        return None
    is_whole = all(hasattr(core_model_loading, name) for name in _NEEDED)
    return core_model_loading if is_whole else None


def has_conversions(model: Any) -> bool:
    """Return whether names on the hub may differ from the names of the model's modules. Also works
    with releases of transformers that cannot convert.
    """
    held = getattr(model, "_weight_conversions", None)
    if held is not None:
        return bool(held)
    if getattr(model, "_checkpoint_conversion_mapping", None):
        return True
    try:
        from transformers.conversion_mapping import get_checkpoint_conversion_mapping
    except ImportError:
        return False
    kinds = {
        kind
        for module in model.modules()
        if is_hub_model(module)
        for kind in (type(module).__name__, module.config.model_type)
    }
    return any(get_checkpoint_conversion_mapping(kind) for kind in kinds)


def conversions_of(model: Any, quantizer: Any = None) -> list[Any]:
    """Return the conversions with which transformers loads a checkpoint into the model."""
    transformers_loading()
    from transformers.conversion_mapping import get_model_conversion_mapping

    found: list[Any] = get_model_conversion_mapping(model, None, quantizer)
    return found


def names_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return all names of the state dict, each with a meta tensor of the same shape and dtype."""
    found: dict[str, torch.Tensor] = {}
    for entry in find_parameters(model):
        like = torch.empty(entry.whole_shape, dtype=entry.parameter.dtype, device="meta")
        found.update(dict.fromkeys(entry.keys, like))
    for buffer in find_buffers(model):
        if buffer.persistent:
            like = torch.empty(buffer.value.shape, dtype=buffer.value.dtype, device="meta")
            found.update(dict.fromkeys(buffer.names, like))
    return found


class _AskedModel:
    """Proxy of a model, from which conversions read shapes and dtypes. A tiled weight appears as
    one whole tensor.
    """

    def __init__(self, model: Any, known: Mapping[str, torch.Tensor], prefix: str = "") -> None:
        self._model = model
        self._known = known
        self._prefix = prefix

    def get_parameter(self, name: str) -> torch.Tensor:
        found = self._known.get(f"{self._prefix}{name}")
        return self._model.get_parameter(name) if found is None else found

    def get_submodule(self, name: str) -> _AskedModel:
        below = self._model.get_submodule(name)
        return _AskedModel(below, self._known, f"{self._prefix}{name}.")

    def __getattr__(self, name: str) -> Any:
        found = self._known.get(f"{self._prefix}{name}")
        return getattr(self._model, name) if found is None else found


# -- forward ---------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class ForwardGroup:
    """Tensors of files that one transform converts to tensors of the model.

    model: proxy from which the transform reads shapes and dtypes. sources: (pattern, name in the
    files), in stacking order. targets: the resulting tensors, on meta. stacked: True if the result
    is one tensor [n, …], whose row i depends only on the i-th tensor of each pattern.
    """

    model: Any
    first: str
    transform: Any
    sources: tuple[tuple[str, str], ...]
    targets: dict[str, torch.Tensor]
    stacked: bool

    @property
    def renamed(self) -> str | None:
        """Name in the files if the group is one renamed tensor; None if the transform converts
        values."""
        return None if _is_converter(self.transform) else self.sources[0][1]

    def convert(
        self, read: Read, first: int = 0, last: int | None = None
    ) -> dict[str, torch.Tensor]:
        """Return the tensors of the model; for a stacked group, only the rows [first, last)."""
        by_pattern: dict[str, list[str]] = {}
        for pattern, name in self.sources:
            by_pattern.setdefault(pattern, []).append(name)
        chosen = [
            (pattern, name) for pattern, all_ in by_pattern.items() for name in all_[first:last]
        ]
        return _convert(self.first, self.transform, chosen, self.model, read)


@dataclasses.dataclass(frozen=True)
class ForwardPlan:
    """Plan of a load. groups: group of each tensor of the model, by name. unused: names in the
    files that no tensor of the model needs. unexpected: unused names that the model does not
    ignore. broken: tensors of the model that transformers cannot make from the files, each with the
    reason.
    """

    groups: dict[str, ForwardGroup]
    unused: tuple[str, ...]
    unexpected: tuple[str, ...]
    broken: dict[str, str]


def plan_forward(
    model: Any, names: Iterable[str], like: Read, mapping: Sequence[Any], label: str
) -> ForwardPlan:
    """Plan the conversion from the tensors of files to the tensors of the model. Reads no tensor.

    like: function that returns a meta tensor for a name in the files.

    Raises: WeightsError if two tensors of the files map to one tensor of the model, or if scales do
    not match the blocks.
    """
    found: dict[str, tuple[Any, list[tuple[str, str]]]] = {}
    known, unused = names_of(model), {}
    for name, target, transform, pattern in _renamed(model, known, names, mapping):
        if target not in known:
            first, *_ = patterns = [target] if pattern is None else transform.target_patterns
            unused[name] = [target.replace(first, each) for each in patterns]
            continue
        held = found.setdefault(target, (transform, []))
        if held[1] and not (pattern and _is_converter(held[0])):
            raise WeightsError(
                f"{label} has {held[1][0][1]} and {name}, which are both {target} of the model; "
                "drop one of them",
                path=label,
                tensors=(name,),
            )
        held[1].append((pattern or name, name))
    plan = ForwardPlan({}, tuple(unused), tuple(_not_ignored(model, unused)), {})
    asked = _AskedModel(model, known)
    for first, (transform, sources) in found.items():
        try:
            targets = _convert(first, transform, sources, asked, like)
        except ScaleGridError as error:
            name = [name for pattern, name in sources if pattern == error.pattern][error.index]
            raise WeightsError(
                f"{label} has {name} {error}", path=label, tensors=(name,)
            ) from error
        except Exception as error:  # noqa: BLE001 - code of transformers and of its users
            plan.broken[first] = (
                f"transformers cannot make {first} of {len(sources)} tensors "
                f"({listed([name for _, name in sources], 3)}): {type(error).__name__}: {error}"
            )
            continue
        stacked = _is_stack(transform, sources, targets)
        group = ForwardGroup(asked, first, transform, tuple(sources), targets, stacked)
        plan.groups.update(dict.fromkeys(targets, group))
    return plan


def in_whole_blocks(mapping: Sequence[Any], block: tuple[int, int] | None, label: str) -> list[Any]:
    """Return the conversions of `mapping`, with each dequantizing operation wrapped in
    `WholeBlocks`. Raises: WeightsError if `mapping` has no dequantizing operation.
    """
    found: list[Any] = []
    count = 0
    for each in mapping:
        operations = getattr(each, "operations", ())
        if not any(map(_is_of_quantizer, operations)):
            found.append(each)
            continue
        blocks = [
            WholeBlocks(operation, block) if _is_of_quantizer(operation) else operation
            for operation in operations
        ]
        sources, targets = each._original_source_patterns, each._original_target_patterns
        found.append(each.copy(sources, targets, operations=blocks))
        count += 1
    if not count:
        import transformers

        raise WeightsError(
            f"the weights in {label} are in fp8, and transformers {transformers.__version__} has "
            "no operation that dequantizes them tensor by tensor; install transformers 5.23, or "
            "use the unquantized model",
            path=label,
        )
    return found


def mark_used(model: Any, names: Iterable[str], mapping: Sequence[Any]) -> list[Any]:
    """Return the conversions of `mapping` that apply to names in the files. transformers reverts
    these conversions when it saves.
    """
    for _ in _renamed(model, names_of(model), names, mapping):
        pass
    return [transform for transform in mapping if transform.was_used()]


def _renamed(
    model: Any, known: Mapping[str, torch.Tensor], names: Iterable[str], mapping: Sequence[Any]
) -> Iterable[tuple[str, str, Any, str | None]]:
    """Yield for each name in the files: the name, the name of the (first) resulting tensor, the
    transform, and the pattern of the converter (None if the tensor is only renamed). The model may
    lack the resulting tensor (`known` has the model's names).
    """
    core = transformers_loading()
    renamings = [each for each in mapping if isinstance(each, core.WeightRenaming)]
    converters = [each for each in mapping if isinstance(each, core.WeightConverter)]
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    prefix = model.base_model_prefix
    # Sort as transformers does: some renamings apply only from the first name of a group on.
    for name in sorted(names, key=core.dot_natural_key):
        target, pattern = core.rename_source_key(name, renamings, converters, prefix, known)
        if target not in known and name in known:
            target, pattern = core.rename_source_key(name, [], [], prefix, known)
        if pattern is None:
            yield name, target, core.WeightRenaming(name, target), None
        else:
            yield name, target, by_pattern[pattern], pattern


def _convert(
    first: str, transform: Any, sources: Iterable[tuple[str, str]], model: Any, read: Read
) -> dict[str, torch.Tensor]:
    # Copy the transform: `add_tensor` stores tensors in it.
    held = copy.deepcopy(transform)
    for pattern, name in sources:
        # Add a function instead of a tensor; `convert` calls it, so nothing is read before.
        held.add_tensor(first, name, pattern, lambda name=name: read(name))
    with torch.no_grad():
        made = held.convert(first, model=model, config=model.config)
    return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


def _is_converter(transform: Any) -> bool:
    return hasattr(transform, "operations")


def _is_of_quantizer(operation: Any) -> bool:
    module = type(operation).__module__
    return hasattr(operation, "hf_quantizer") or module.startswith("transformers.integrations.")


def _is_stack(
    transform: Any, sources: Sequence[tuple[str, str]], targets: Mapping[str, torch.Tensor]
) -> bool:
    """Return whether the group is stacked: one target, whose row i depends only on the i-th tensor
    of each pattern.
    """
    core = transformers_loading()
    operations = list(getattr(transform, "operations", ()))
    # Skip dequantization, which processes each weight separately, before tensors are stacked.
    while operations and hasattr(operations[0], "hf_quantizer"):
        operations.pop(0)
    if not operations or len(targets) != 1:
        return False
    (target,) = targets.values()
    stack, rest = operations[0], operations[1:]
    counts = {pattern: 0 for pattern, _ in sources}
    for pattern, _ in sources:
        counts[pattern] += 1
    return (
        type(stack) is core.MergeModulelist
        and stack.dim == 0
        and set(counts.values()) == {target.shape[0]}
        and all(_keeps_rows(core, operation, target.dim()) for operation in rest)
    )


def _keeps_rows(core: Any, operation: Any, dims: int) -> bool:
    if type(operation) in (core.Concatenate, core.Interleave):
        return bool(operation.dim % dims)
    if type(operation) is core.Transpose:
        return not operation.check_dims and bool(operation.dim0 % dims and operation.dim1 % dims)
    return False


def _not_ignored(model: Any, unused: Mapping[str, Sequence[str]]) -> Iterable[str]:
    """Return the unused names that the model does not ignore, as `from_pretrained` finds them.
    unused: names in the files, each with the names after conversion.
    """
    patterns = set(model._keys_to_ignore_on_load_unexpected or ())
    buffers = [name for name, _ in model.named_buffers()]
    # Earlier releases saved these buffers; current releases compute them.
    if any(name.endswith("rotary_emb.inv_freq") for name in buffers):
        patterns.add(r"rotary_emb\.inv_freq")
    if any(name.endswith("position_ids") for name in buffers):
        patterns.add(r"(^|\.)position_ids$")
    return [
        name
        for name, keys in unused.items()
        if not all(any(re.search(each, key) for each in patterns) for key in keys)
    ]


# -- reverse ---------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class ReverseGroup:
    """Tensors of the model that one transform converts to tensors of files.

    model: proxy from which the transform reads shapes and dtypes. sources: (pattern, name in the
    model). names: name in the files for each name that the transform returns. targets: the
    resulting tensors on meta, by name in the files.
    """

    model: Any
    first: str
    transform: Any
    sources: tuple[tuple[str, str], ...]
    names: dict[str, str]
    targets: dict[str, torch.Tensor]

    @property
    def renamed(self) -> bool:
        """True if the group is one tensor that the transform only renames."""
        return not _is_converter(self.transform)

    def convert(self, read: Read) -> dict[str, torch.Tensor]:
        """Return the tensors of the files: contiguous, or views of the results of `read`."""
        made = _convert(self.first, self.transform, self.sources, self.model, read)
        return {self.names[name]: value for name, value in made.items()}


def saved_conversions(model: Any) -> list[Any]:
    """Return the conversions that transformers would revert to save this model: the conversions of
    the load, or without a load the conversions of the model's type; without a quantizer's
    operations.
    """
    held = getattr(model, "_weight_conversions", None)
    if held is not None:
        return _without_quantizer(model, held)
    core = transformers_loading()
    from transformers.conversion_mapping import get_model_conversion_mapping

    # As transformers does to save, leave out renamings of old releases, and prefixes: the model
    # does not record whether its checkpoint had a prefix.
    found = get_model_conversion_mapping(model, add_legacy=False)
    return [each for each in found if not isinstance(each, core.PrefixChange)]


def _without_quantizer(model: Any, held: Sequence[Any]) -> list[Any]:
    """Replace converters that include a quantizer's operations with the plain converters of the
    model's type, and remove converters with only such operations. Their reverse would quantize the
    weights that the load has dequantized.
    """
    kind = [each for each in conversions_of(model) if _is_converter(each)]
    found: list[Any] = []
    for each in held:
        if not any(map(_is_of_quantizer, getattr(each, "operations", ()))):
            found.append(each)
            continue
        found += [
            plain
            for plain in kind
            if plain.scope_prefix == each.scope_prefix
            and plain._original_target_patterns == each._original_target_patterns
            and set(plain._original_source_patterns) <= set(each._original_source_patterns)
        ]
    return found


def plan_reverse(
    model: Any, tensors: Mapping[str, torch.Tensor], conversions: Sequence[Any]
) -> list[ReverseGroup]:
    """Plan the conversion from tensors of the model (on meta, by name) to tensors with the hub's
    names. The groups are in the order of `tensors`.

    Raises: ValueError if a conversion has no reverse.
    """
    core = transformers_loading()
    order = {name: index for index, name in enumerate(tensors)}
    asked = _AskedModel(model, names_of(model))
    try:
        back = [each.reverse_transform() for each in conversions[::-1]]
        renamings = [each for each in back if isinstance(each, core.WeightRenaming)]
        converters = [each for each in back if isinstance(each, core.WeightConverter)]
        found = _reversed(core, tensors, renamings, converters)
        groups = []
        for first, (transform, sources) in found.items():
            made = _convert(first, transform, sources, asked, tensors.__getitem__)
            is_converted = _is_converter(transform)
            # A converter renames only by the converter's patterns, so apply renamings afterwards.
            names = {
                name: core.apply_renamings(name, renamings) if is_converted else name
                for name in made
            }
            targets = {names[name]: value for name, value in made.items()}
            groups.append(ReverseGroup(asked, first, transform, tuple(sources), names, targets))
    except Exception as error:
        raise ValueError(
            f"transformers has no way back to the hub's names for a {type(model).__name__}: "
            f"{type(error).__name__}: {error}; export with names='modules'"
        ) from error
    _check_distinct(groups)
    groups.sort(key=lambda group: min(order[name] for _, name in group.sources))
    return groups


def _reversed(
    core: Any, names: Iterable[str], renamings: Sequence[Any], converters: Sequence[Any]
) -> dict[str, tuple[Any, list[tuple[str, str]]]]:
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    found: dict[str, tuple[Any, list[tuple[str, str]]]] = {}
    for name in sorted(names, key=core.dot_natural_key):
        target, pattern = core.apply_converters(name, converters)
        if pattern is None:
            target = core.apply_renamings(name, renamings)
            transform: Any = core.WeightRenaming(name, target)
        else:
            transform = by_pattern[pattern]
        held = found.setdefault(target, (transform, []))
        if held[1] and not (pattern and _is_converter(held[0])):
            raise ValueError(f"{held[1][0][1]} and {name} are both {target}")
        held[1].append((pattern or name, name))
    return found


def _check_distinct(groups: Iterable[ReverseGroup]) -> None:
    seen: dict[str, ReverseGroup] = {}
    for group in groups:
        for name in group.targets:
            if name in seen:
                raise ValueError(
                    f"{seen[name].sources[0][1]} and {group.sources[0][1]} are both {name} under "
                    "the hub's names; export with names='modules'"
                )
            seen[name] = group
