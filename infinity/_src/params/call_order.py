"""Order in which modules will be called, read from the source of their forwards.

    class Block: mlp, attn, norm are registered in this order
        def forward(self, x): return x + self.mlp(self.attn(self.norm(x)))     norm, attn, mlp

A forward names the children that it calls, as a rule; methods of the module that it calls are
looked into. Nothing runs, so every rank finds the same, before the first step. The order is a guess
for choices that cost time when they are wrong, and nothing else.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from types import FunctionType

from torch import nn

_IN_TURN = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
"""Modules whose children are called in the order in which they are registered."""


def call_order(model: nn.Module) -> dict[nn.Module, int]:
    """Return places of the modules of a model in the order of their first calls. Modules that no
    forward names have none, nor has what is inside of them."""
    places: dict[nn.Module, int] = {}
    # A model has few classes, and many modules of each.
    names: dict[type[nn.Module], list[str]] = {}

    def place(module: nn.Module) -> None:
        if module in places:
            return
        places[module] = len(places)
        children, kind = dict(module.named_children()), type(module)
        if children and kind not in names:
            names[kind] = list(dict.fromkeys(_used(kind, "forward", set())))
        for name in children if isinstance(module, _IN_TURN) else names.get(kind, ()):
            if name in children:
                place(children[name])

    place(model)
    return places


def _used(kind: type[nn.Module], method: str, seen: set[str]) -> Iterator[str]:
    """Yield the attributes that a method uses; instead of a method of the class those that it uses.

    Nothing of a method without Python source.
    """
    seen.add(method)
    try:
        source = inspect.getsource(inspect.unwrap(getattr(kind, method)))
        function = ast.parse(textwrap.dedent(source)).body[0]
    except (OSError, TypeError, SyntaxError):
        return
    if not isinstance(function, ast.FunctionDef) or not function.args.args:
        return
    for statement in function.body:
        for name in _attributes(statement, function.args.args[0].arg):
            # Methods of every module, as `__call__` and `to`, say nothing about this one.
            found = None if hasattr(nn.Module, name) else inspect.getattr_static(kind, name, None)
            if not isinstance(found, FunctionType):
                yield name
            elif name not in seen:
                yield from _used(kind, name, seen)


def _attributes(node: ast.AST, own: str) -> Iterator[str]:
    """Yield the attributes of the variable `own`, in the order of evaluation: a call comes after
    its arguments."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        if node.value.id == own:
            yield node.attr
        return
    parts = list(ast.iter_child_nodes(node))
    if isinstance(node, ast.Call):
        parts = [*node.args, *node.keywords, node.func]
    elif isinstance(node, ast.ListComp | ast.SetComp | ast.GeneratorExp):
        parts = [*node.generators, node.elt]
    for part in parts:
        yield from _attributes(part, own)
