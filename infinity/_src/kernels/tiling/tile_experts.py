"""`tile_experts`: cut stacks of experts into tiles of a few, in place.

A stack is recognized by its parameters: `down_proj` and `gate_up_proj` (or `up_proj`), each
[experts, ...], and biases, as in the models of transformers >= 5. `tile_experts` derives the
computation of an expert from the module's declarations (`is_transposed`, `_apply_gate`, `act_fn`)
and then tries it: a small copy of the module must give the same bits as tiles of that copy, forward
and backward. A module that computes anything else raises ValueError.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from infinity._src.kernels.tiling.tile_model import check_unhooked, choose_by_name, put
from infinity._src.kernels.tiling.tiled_experts import (
    ExpertFunction,
    TiledExperts,
    check_eager,
)
from infinity._src.kernels.tiling.tiled_module import (
    EXPERT_STACKS,
    STACK_WEIGHTS,
    refuse_microbatched,
)

M = TypeVar("M", bound=nn.Module)

_TRIAL = {"experts": 3, "hidden": 16, "inner": 24, "tokens": 20}
"""Sizes of the trial copy. It has more tokens than experts, so that the order of sums matters."""


def tile_experts(model: M, *, experts: int, names: str | Sequence[str] | None = None) -> M:
    """Cut stacks of experts of `model` into tiles, in place, and return it: before the optimizer is
    made and before `inf.offload`.

    A stack is a module with parameters [experts, ...], as mixture-of-experts models of transformers
    >= 5 have them. Each tile is gathered, computed and released alone, and not gathered if no token
    chose any of its experts. Losses and gradients have the bits of the uncut model's eager
    implementation; `state_dict` has the same keys, shapes and values; `parameters()` yields the
    tiles. A norm over all gradients is summed tile by tile, so that clipping differs by rounding.
    Works on the meta device and without offloading.

    experts: number per tile; the last tile may have fewer. names: which modules, by qualified name
    or the end of one ("mlp.experts"); None: every stack of experts of the model.

    Raises: ValueError for names that match nothing or no stack of experts; for an offloaded model;
    for a stack that computes something else than tiles do, has gradients or hooks, or is shared
    with other modules; and for an implementation that is not eager
    (`model.set_experts_implementation("eager")`). On an error the model is unchanged.
    """
    # `type`, not isinstance: True is an int.
    if type(experts) is not int or experts < 1:
        raise ValueError(f"experts={experts!r} is not a positive whole number of experts per tile")
    refuse_microbatched(model, "inf.tile_experts(model, ...)")
    if "_infinity_handle" in model.__dict__:
        raise ValueError(
            "this model is offloaded already; call inf.tile_experts(model, ...) before "
            "inf.offload(model, ...)"
        )
    chosen = _chosen(model, [names] if isinstance(names, str) else names)
    tried: set[tuple[Any, ...]] = set()
    # Check all stacks before replacing the first, so that an error leaves the model unchanged.
    for name, module in chosen.items():
        _check(model, name, module)
        # Layers of one class, repr and dtype compute alike: one trial is enough.
        like = (type(module), repr(module), next(module.parameters()).dtype)
        if like not in tried:
            _try_out(name, module)
            tried.add(like)
    for module in chosen.values():
        put(model, module, _tiled(module, experts))
        # Free the whole stacks now, not after the last module.
        for attr in module._parameters:
            module._parameters[attr] = None
    return model


def _chosen(model: nn.Module, names: Sequence[str] | None) -> dict[str, nn.Module]:
    stacks = {
        name: module for name, module in model.named_modules() if name and is_stack(module)
    }
    if names is None:
        if not stacks:
            raise ValueError(
                "the model has no stack of experts: no module with parameters down_proj and "
                "gate_up_proj (or up_proj) of three dimensions, as models of transformers >= 5 "
                "have them; lists of linears are cut by inf.tile_linears"
            )
        return stacks
    hint = f"stacks of experts are {', '.join(stacks) or 'none'}"
    return choose_by_name(stacks, dict(model.named_modules()), names, hint)


def is_stack(module: nn.Module) -> bool:
    """Return whether a module has the parameters of a stack of experts."""
    ups = [module._parameters.get(name) for name in STACK_WEIGHTS]
    found = [parameter for parameter in ups if parameter is not None]
    return len(found) == 2 and ups[2] is not None and all(one.dim() == 3 for one in found)


def _check(model: nn.Module, name: str, module: nn.Module) -> None:
    stacks = {attr: value for attr, value in module._parameters.items() if value is not None}
    others = [attr for attr in stacks if attr not in EXPERT_STACKS]
    others += [f"{inner}.{attr}" for inner, child in module.named_children()
               for attr, _ in child.named_parameters()]  # fmt: skip
    others += [attr for attr, _ in module.named_buffers()]
    if others:
        raise ValueError(
            f"{name} ({type(module).__name__}) has {', '.join(others)} besides stacks of experts, "
            "which tiles do not have; leave it out of inf.tile_experts(names=...)"
        )
    count = len(stacks["down_proj"])
    uneven = [attr for attr, value in stacks.items() if len(value) != count]
    declared = getattr(module, "num_experts", count)
    if uneven or declared != count:
        raise ValueError(
            f"{name} ({type(module).__name__}): down_proj has {count} experts, "
            f"{uneven[0] if uneven else 'num_experts'} another number; leave it out of "
            "inf.tile_experts(names=...)"
        )
    check_unhooked(name, module)
    _check_adapters(model, name, module)
    for attr, value in stacks.items():
        if value.grad is not None:
            raise ValueError(
                f"{name}.{attr} has a gradient, which tiling would lose: call model.zero_grad() "
                "first"
            )
    shared = {id(value): attr for attr, value in stacks.items()}
    for other, holder in model.named_modules():
        for attr, value in holder._parameters.items():
            if id(value) in shared and holder is not module:
                raise ValueError(
                    f"{name}.{shared[id(value)]} is shared with {other}.{attr}: untie them, or "
                    "leave it out of inf.tile_experts(names=...)"
                )
    try:
        check_eager(_implementation(module), "tiles of experts")
    except RuntimeError as error:
        raise ValueError(f"{name}: {error}") from error


def _check_adapters(model: nn.Module, name: str, module: nn.Module) -> None:
    """Raise ValueError for adapters that need a whole stack."""
    for holder in model.modules():
        attr = getattr(holder, "parameter_name", None)  # an attribute of PEFT's wrappers
        if attr is None or getattr(holder, "takes_tiles", False):
            continue
        if getattr(holder, "get_base_layer", lambda: None)() is module:
            raise ValueError(
                f"{name}.{attr} has an adapter (target_parameters), which is added to the whole "
                "stack; infinity.integrations.peft.tile_experts(model, experts=...) adds adapters "
                "of weights [experts, rows, columns] tile by tile"
            )


def _implementation(module: nn.Module) -> str | None:
    """Return the implementation that the configuration selects; None if the module has only one."""
    # transformers' decorator keeps the eager forward here.
    if not hasattr(type(module).forward, "__wrapped__"):
        return None
    wanted = getattr(getattr(module, "config", None), "_experts_implementation", None)
    return wanted if isinstance(wanted, str) else None


def _function(module: nn.Module) -> ExpertFunction:
    """Derive the computation of one expert from the module's declarations."""
    if module._parameters.get("gate_up_proj") is None:
        activate = functools.partial(_activate, module)
    elif callable(own := getattr(module, "_apply_gate", None)):
        activate = own
    else:
        activate = functools.partial(_gate, module)
    return ExpertFunction(
        activate,
        bool(getattr(module, "is_transposed", False)),
        functools.partial(_implementation, module),
    )


def _activate(module: Any, up: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = module.act_fn(up)
    return found


def _gate(module: Any, gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    found: torch.Tensor = module.act_fn(gate) * up
    return found


def _tiled(module: nn.Module, experts: int) -> TiledExperts:
    stacks = {attr: value for attr, value in module._parameters.items() if value is not None}
    count = len(stacks["down_proj"])
    ends = [*range(0, count, experts), count]
    return TiledExperts(stacks, ends, _function(module)).train(module.training)


# -- the trial -------------------------------------------------------------------------------------


def _try_out(name: str, module: nn.Module) -> None:
    """Raise ValueError unless tiles of a small copy compute the copy's bits."""
    what = f"{name} ({type(module).__name__})"
    forward = inspect.unwrap(type(module).forward)
    # Besides `self`: hidden states, chosen experts, their weights.
    if len(inspect.signature(forward).parameters) != 4:
        raise ValueError(
            f"{what}: its forward{inspect.signature(forward)} does not take (hidden_states, "
            "top_k_index, top_k_weights), so nothing says which experts a token chose; leave it "
            "out of inf.tile_experts(names=...)"
        )
    dtype = next(module.parameters()).dtype
    generator = torch.Generator().manual_seed(0)
    for weights_dtype in dict.fromkeys((dtype, torch.float32)):
        for count in (_TRIAL["tokens"], 1):
            small = _small_copy(module, generator)
            arguments = _arguments(count, dtype, weights_dtype, generator)
            try:
                whole = _results(functools.partial(forward, small), small, arguments)
                made = _tiled(small, 2)
                tiled = _results(made, made, arguments)
            except (RuntimeError, ValueError, TypeError, IndexError, AttributeError) as error:
                raise ValueError(
                    f"{what}: a small copy of it cannot be computed ({error}); leave it out of "
                    "inf.tile_experts(names=...)"
                ) from error
            differ = [name for name in whole if not _same(whole[name], tiled[name])]
            if differ:
                raise ValueError(
                    f"{what} computes something else with its experts than tiles would: a small "
                    f"copy in {dtype} with routing weights in {weights_dtype} has other bits "
                    f"({', '.join(differ)}); leave it out of inf.tile_experts(names=...)"
                )


def _small_copy(module: nn.Module, generator: torch.Generator) -> nn.Module:
    """Copy a module with random stacks of a few small experts, on the CPU."""
    made = copy.copy(module)
    experts, hidden, inner = _TRIAL["experts"], _TRIAL["hidden"], _TRIAL["inner"]
    transposed = bool(getattr(module, "is_transposed", False))
    parameters: dict[str, nn.Parameter | None] = {}
    for attr, value in module._parameters.items():
        if value is None:
            continue
        outs = hidden if attr.startswith("down") else inner
        outs *= 2 if attr.startswith("gate_up") else 1
        ins = inner if attr.startswith("down") else hidden
        shape = (experts, outs) if attr.endswith("_bias") else (experts, outs, ins)
        if transposed and len(shape) == 3:
            shape = (experts, ins, outs)
        values = torch.randn(shape, generator=generator, device="cpu") / ins**0.5
        parameters[attr] = nn.Parameter(values.to(value.dtype))
    # A new dict, since the copy shares the module's.
    made.__dict__["_parameters"] = parameters
    made.__dict__["num_experts"] = experts
    return made


def _arguments(
    tokens: int, dtype: torch.dtype, weights_dtype: torch.dtype, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    scores = torch.rand(tokens, _TRIAL["experts"], generator=generator, device="cpu")
    weights, index = scores.topk(2)
    hidden = torch.randn(tokens, _TRIAL["hidden"], generator=generator, device="cpu")
    return hidden.to(dtype), index, weights.to(weights_dtype)


def _results(
    call: Any, owner: nn.Module, arguments: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
) -> dict[str, torch.Tensor | None]:
    """Return the output, and the gradients of the arguments and of the whole stacks; None where
    there is none.
    """
    with torch.enable_grad(), torch.inference_mode(False):
        hidden, weights = (arguments[at].clone().requires_grad_() for at in (0, 2))
        # Both have a second use in the sum below, so that the order of the gradients' sums matters.
        before, gates = torch.tanh(hidden), torch.tanh(weights)
        out = call(before, arguments[1], gates)
        seed = torch.linspace(-1, 1, out.numel(), device="cpu").view(out.shape).to(out.dtype)
        ((out * seed).sum() + before.square().sum() + gates.square().sum()).backward()
    found: dict[str, torch.Tensor | None] = {
        "output": out.detach(),
        "gradient of hidden_states": hidden.grad,
        "gradient of top_k_weights": weights.grad,
    }
    for attr in EXPERT_STACKS:
        if isinstance(owner, TiledExperts):
            held = owner.tile_parameters(attr)
        else:
            held = [stack for stack in [owner._parameters.get(attr)] if stack is not None]
        # If some tiles have no gradient, the shape differs from the whole gradient's: not equal.
        grads = [part.grad for part in held if part.grad is not None]
        found[f"gradient of {attr}"] = torch.cat(grads) if grads else None
    return found


def _same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return one is other if one is None or other is None else torch.equal(one, other)
