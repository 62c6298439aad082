"""Finding the blocks of a model: the modules that are repeated, and that a step goes through one
after the other.

They are the modules of the classes of `_no_split_modules` (Hugging Face); else the children of the
outermost ModuleLists; else none. Or they are named.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn

CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
"""Modules that are never called: hooks on them never run, so no unit can belong to one."""

Named = Sequence[nn.Module | type[nn.Module] | str]
"""Blocks as modules, classes, class names or qualified names."""


class RunsInSlices:
    """Mark of the classes of modules that run their forward once for each slice of a batch
    (`inf.microbatched`): what is gathered inside for one slice is wanted for the next.
    """


def is_list(module: nn.Module) -> bool:
    """True for a ModuleList, or a ModuleDict of several (a dict of one holds a LoRA adapter, not a
    list of experts).
    """
    return isinstance(module, nn.ModuleList) or (
        isinstance(module, nn.ModuleDict) and len(module) > 1
    )


def find_blocks(
    model: nn.Module, named: Named | None, *, argument: str, dicts: bool = True
) -> list[nn.Module]:
    """Find the blocks of `model`; of several that are one inside of the other, all.

    named: the blocks, instead of those that the model says. argument: its name, for the error.
    dicts: the children of a ModuleDict may be blocks, too; a model may also name its parts by one.
    Raises: ValueError if it names something that the model does not have, or a container.
    """
    if named is not None:
        return _named_blocks(model, named, argument)
    return _no_split_blocks(model) or list(list_children(model, dicts=dicts))


def _no_split_blocks(model: nn.Module) -> list[nn.Module]:
    names: set[str] = set()
    for module in model.modules():
        names |= set(getattr(module, "_no_split_modules", None) or ())
    return [module for module in model.modules() if type(module).__name__ in names]


def _named_blocks(model: nn.Module, named: Named, argument: str) -> list[nn.Module]:
    modules = dict(model.named_modules(remove_duplicate=False))
    known = {id(module) for module in modules.values()}
    blocks: list[nn.Module] = []
    for wanted in named:
        if isinstance(wanted, nn.Module):
            found = [wanted] if id(wanted) in known else []
        elif isinstance(wanted, type):
            found = [module for module in modules.values() if isinstance(module, wanted)]
        elif wanted in modules:
            # Before names of classes: a qualified name says exactly which module is meant.
            found = [modules[wanted]]
        else:
            found = [module for module in modules.values() if type(module).__name__ == wanted]
        if not found:
            text = type(wanted).__name__ if isinstance(wanted, nn.Module) else repr(wanted)
            raise ValueError(
                f"{argument}: the model has no {text}; give modules of this model, their classes, "
                "the classes' names, or qualified names as model.named_modules() lists them"
            )
        if any(isinstance(module, CONTAINERS) for module in found):
            raise ValueError(
                f"{argument}: {wanted!r} is a container, which is never called; name its children"
            )
        blocks += found
    return blocks


def list_children(module: nn.Module, *, dicts: bool = True) -> Iterator[nn.Module]:
    """The children of the outermost lists of modules below `module` that hold parameters. dicts:
    ModuleDicts of several are lists, too."""
    for child in module.children():
        if is_list(child) if dicts else isinstance(child, nn.ModuleList):
            yield from _members(child)
        else:
            yield from list_children(child, dicts=dicts)


def _members(container: nn.Module) -> Iterator[nn.Module]:
    for member in container.children():
        if is_list(member):
            yield from _members(member)
        elif isinstance(member, CONTAINERS):
            yield from list_children(member)
        elif any(True for _ in member.parameters()):
            yield member
