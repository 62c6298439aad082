"""`microbatched`: a model whose forward takes all micro-batches at once, in place."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal, TypeVar

import torch
from torch import nn

from infinity._src.base.torch_compat import is_compiled
from infinity._src.kernels.tiling.deferred_logits import find_head
from infinity._src.kernels.tiling.tiled_linear import TiledLinear
from infinity._src.memory.device_capacity import SliceGrads, UnitBytes, slice_grad_bytes
from infinity._src.microbatch.rows import numbers_of
from infinity._src.microbatch.sliced_module import (
    Role,
    SlicedModule,
    calls_loss_function,
    is_worth_it,
    refusal_to_compile,
    slice_module,
)
from infinity._src.microbatch.slicing import Slicing
from infinity._src.params.discover import CONTAINERS, Named, find_blocks
from infinity.errors import SlicesError

M = TypeVar("M", bound=nn.Module)


def microbatched(
    model: M,
    n: int,
    *,
    blocks: Named | None = None,
    shared: Sequence[str] = (),
    checkpoint: bool = True,
) -> M:
    """Have one forward and one backward of `model` do the work of n micro-batches, in place, and
    return it: before the optimizer and before `inf.offload`.

    The caller passes the whole batch, takes one loss and calls one `backward()`. Blocks, embedding,
    final norm, head and loss run in n slices of the batch (micro-batches), one after the other. So
    an offloaded model reads and reduces each unit as often as with one micro-batch. A parameter
    that a micro-batch uses once gets the bits that a loop over `batch.tensor_split(n)` with
    `(loss / n).backward()` gives. The gradients of a parameter with several uses are summed use by
    use, the last use of forward first, and within a use slice by slice.

    n: number of slices; a batch with fewer rows has one slice for each row. Rows are the first
    dimension of tensors. blocks: as `Policy.units`; None: those of `_no_split_modules`, else the
    children of ModuleLists. shared: names of arguments of blocks, and of the loss, that all slices
    get whole: tensors without rows that are as long as the batch, and objects. checkpoint: True:
    backward recomputes each slice of a block, and of head and loss. False: the activations of all
    slices live until backward, which recomputes nothing: this takes the memory of the whole batch's
    activations and logits, and gives the same bits. `gradient_checkpointing_enable()` has no
    influence on this.

    The loss of a model of transformers (`labels=`) is the mean of the slices' losses, or with
    `num_items_in_batch` their sum. Its logits are computed when they are used. Each slice draws
    dropout from a separate stream, seeded as `infinity._src.microbatch.random_streams` says.
    Without gradients the model runs unchanged. docs/guide.md lists the requirements on a model.

    A module that gets no tensor with rows (an embedding of positions [places]) runs once, so the
    gradient of its parameters is one sum over the batch. A warning names such a module once.

    Raises: ValueError for n that is no positive whole number, checkpoint that is no bool, a model
    that is offloaded or sliced already; SlicesError (a ValueError) for a model without blocks, for
    one that is compiled as a whole, and for TorchScript. On an error the model is unchanged.

    In forward: SlicesError for a cache; for arguments and outputs of blocks if it is unclear how to
    cut or join them; for blocks that write to buffers, arguments or tensors in attributes, draw
    from generators in their attributes, or leave a loss in an attribute; for modules that were
    added after this call; and for router losses that depend on more than router logits. In
    backward: SlicesError for random numbers inside a checkpoint that the caller has put around a
    block.
    """
    _check(model, n, shared, checkpoint)
    names = {module: name for name, module in model.named_modules()}
    roles = _roles(model, find_blocks(model, blocks, argument="blocks", dicts=False))
    for module, role in roles.items():
        if role is Role.AROUND and is_compiled(module):
            raise refusal_to_compile(names[module] or type(module).__name__)
        if isinstance(module, torch.jit.ScriptModule):
            raise SlicesError(
                f"{names[module] or type(module).__name__} is TorchScript, which would not run in "
                "slices: give the module that was scripted, or name other modules in blocks="
            )
    configs = (getattr(module, "config", None) for module in names)
    slicing = Slicing(
        n,
        frozenset(shared),
        checkpointed=checkpoint,
        numbers=numbers_of([*names, *(one for one in configs if hasattr(one, "__dict__"))]),
    )
    for module, role in roles.items():
        slice_module(module, role, slicing, names[module])
    return model


def _check(model: nn.Module, n: int, shared: Sequence[str], checkpoint: bool) -> None:
    # `type`, not isinstance: True is an int.
    if type(n) is not int or n < 1:
        raise ValueError(f"n={n!r} is not a positive whole number: the number of slices of a batch")
    if type(checkpoint) is not bool:
        raise ValueError(
            f"checkpoint={checkpoint!r} is neither True nor False: with True backward recomputes "
            "each slice of a block, with False the activations of all slices live until backward"
        )
    if isinstance(shared, str):
        raise ValueError(f"shared={shared!r} is a str: give a list of names, as [{shared!r}]")
    if any("_infinity_handle" in module.__dict__ for module in model.modules()):
        raise ValueError(
            "this model, or a part of it, is offloaded already; call inf.microbatched(model, n) "
            "before inf.offload(model, ...)"
        )
    if is_microbatched(model):
        raise ValueError("this model, or a part of it, is microbatched already: build a new model")


def is_microbatched(model: nn.Module) -> bool:
    """Return whether a model has modules that run in slices."""
    return _slicing_of(model) is not None


def _slicing_of(model: nn.Module) -> Slicing | None:
    found = (module for module in model.modules() if isinstance(module, SlicedModule))
    return next((module._infinity_slicing for module in found), None)


@dataclasses.dataclass(frozen=True)
class Slices:
    """Slices of a model's batches, for trainers that accumulate gradients.

    count: number of slices; a batch with fewer rows has one slice for each row.
    loss_reduction: "mean": the model returns the mean of the slices' losses, or their sum if the
        call has `num_items_in_batch`; the trainer must not divide it by `count` again. None: the
        model calls no `loss_function`; the model's code or the training loop computes the loss of
        the logits of all rows, with a reduction that it chooses.
    """

    count: int
    loss_reduction: Literal["mean"] | None


def slices_of(model: nn.Module) -> Slices | None:
    """Return the slices that `microbatched` gave a model; None for a model that has none."""
    slicing = _slicing_of(model)
    if slicing is None:
        return None
    sliced = (module for module in model.modules() if isinstance(module, SlicedModule))
    around = (module for module in sliced if module._infinity_role is Role.AROUND)
    has_loss = any(calls_loss_function(module._infinity_base) for module in around)
    return Slices(slicing.count, "mean" if has_loss else None)


def slices_in_mean(model: nn.Module) -> float | None:
    """Return the mean number of slices of the model's batches so far; None before the first batch,
    and for a model that does not run in slices.
    """
    slicing = _slicing_of(model)
    return None if slicing is None else slicing.slices_in_mean


def slice_grads(model: nn.Module, grad_dtype: torch.dtype | None) -> SliceGrads | None:
    """Return the sizes of the gradients that slices accumulate; None for a model with fewer than
    two slices.

    grad_dtype: dtype of the accumulated gradients; None: that of each parameter.
    """
    slicing = _slicing_of(model)
    if slicing is None or slicing.count == 1:
        return None
    seen: set[nn.Parameter] = set()
    blocks, one_bytes = [], 0
    for module in model.modules():
        if not isinstance(module, SlicedModule) or module._infinity_role is Role.AROUND:
            continue
        # A tied weight counts once, for the first module that has it.
        trained = [
            param for param in module.parameters() if param.requires_grad and param not in seen
        ]
        seen.update(trained)
        sums = []
        for param in trained:
            itemsize = param.dtype.itemsize
            wide = itemsize if grad_dtype is None else grad_dtype.itemsize
            sums.append(param.numel() * wide)
            one_bytes = max(one_bytes, slice_grad_bytes(param.numel() * itemsize, itemsize, wide))
        blocks.append(UnitBytes(0, tuple(sums)))
    return SliceGrads(tuple(blocks), one_bytes)


def _roles(model: nn.Module, blocks: Sequence[nn.Module]) -> dict[nn.Module, Role]:
    if not blocks:
        raise SlicesError(
            "inf.microbatched found no blocks: the model has neither _no_split_modules nor a "
            "ModuleList; name them, as in blocks=['Block']"
        )
    chosen, head = set(blocks), find_head(model)
    roles: dict[nn.Module, Role] = {}

    def has_block(module: nn.Module) -> bool:
        return any(child in chosen for child in module.modules())

    def visit(module: nn.Module) -> None:
        if module in roles:
            return
        if module in chosen:
            # Blocks inside of a block run as a part of the outer one.
            roles[module] = Role.BLOCK
            return
        around = has_block(module)
        if not isinstance(module, CONTAINERS):
            if not around:
                if any(map(is_worth_it, module.modules())):
                    roles[module] = Role.HEAD if _is_head(module, head) else Role.PART
                return
            roles[module] = Role.AROUND
        for child in module.children():
            visit(child)

    visit(model)
    return roles


def _is_head(module: nn.Module, head: nn.Module | None) -> bool:
    return module is head and isinstance(module, (nn.Linear, TiledLinear))
