"""Optimizers for transformers' `TrainingArguments.optim`: each name selects an optimizer of
infinity or is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

import infinity as inf


class Adagrad(inf.Elementwise):
    """`torch.optim.Adagrad` over offloaded parameters, with the signature that Trainer calls."""

    def __init__(self, params: Iterable[Any], **settings: Any) -> None:
        super().__init__(torch.optim.Adagrad, params, **settings)


class RMSprop(inf.Elementwise):
    """`torch.optim.RMSprop` over offloaded parameters, with the signature that Trainer calls."""

    def __init__(self, params: Iterable[Any], **settings: Any) -> None:
        super().__init__(torch.optim.RMSprop, params, **settings)


_OF_TORCH: dict[str, type] = {
    "adamw_torch": inf.AdamW,
    "adamw_torch_fused": inf.AdamW,
    "sgd": inf.SGD,
    "adagrad": Adagrad,
    "rmsprop": RMSprop,
}
"""Names for which Trainer chooses a torch class; infinity's class accepts the same settings."""

_SAME_RULE = ("adamw_torch_xla", "adamw_torch_npu_fused", "paged_adamw_32bit")
"""Other implementations of 32-bit AdamW. Each requires a package or a device that infinity's does
not."""

_LION = ("lion_32bit", "paged_lion_32bit")

_FEW_BITS = {
    "adamw_torch_4bit": "adamw_torch", "adamw_torch_8bit": "adamw_torch",
    "adamw_bnb_8bit": "adamw_torch", "adamw_8bit": "adamw_torch",
    "paged_adamw_8bit": "adamw_torch", "lion_8bit": "lion_32bit", "paged_lion_8bit": "lion_32bit",
}  # fmt: skip
"""Names that imply a storage format of moments (the policy sets it here), and the plain rule's."""

Build = Callable[[], tuple[Any, dict[str, Any]]]


def optimizer_of(args: Any, build: Build) -> tuple[type, dict[str, Any]]:
    """Return infinity's optimizer class and its settings for `args.optim`.

    build: returns Trainer's own choice; called only for the names of torch's classes.

    Raises: ValueError for an optimizer that infinity does not have, naming an alternative.
    """
    name = getattr(args.optim, "value", args.optim)
    if name in _OF_TORCH:
        _, settings = build()
        # "fused" selects torch's kernel, not the update rule.
        return _OF_TORCH[name], {key: settings[key] for key in settings if key != "fused"}
    betas = (args.adam_beta1, args.adam_beta2)
    if name in _SAME_RULE:
        return inf.AdamW, {"lr": args.learning_rate, "betas": betas, "eps": args.adam_epsilon}
    if name in _LION:
        return inf.Lion, {"lr": args.learning_rate, "betas": betas}
    if name in _FEW_BITS:
        raise ValueError(
            f"optim={name!r} says how moments are stored, which the policy says here: give "
            f"optim={_FEW_BITS[name]!r} and inf.Policy(state='compact'), with moments in 8 bits, "
            "or state='bf16'"
        )
    raise ValueError(
        f"optim={name!r}: the engine has no such optimizer; give one of "
        f"{', '.join([*_OF_TORCH, *_SAME_RULE, *_LION])}, or optimizer_cls_and_kwargs=(inf.AdamW, "
        "{...}) (inf.Lion, inf.SGD, or a subclass of inf.Elementwise)"
    )
