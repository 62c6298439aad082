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
from typing import NamedTuple

from torch import nn

_IN_TURN = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
"""Modules whose children are called in the order in which they are registered."""


class Call(NamedTuple):
    """First call of a module: its place among all, and whether a loop around it repeats it (but for
    a loop over a list of modules, which calls each once)."""

    place: int
    looped: bool


def call_order(model: nn.Module) -> dict[nn.Module, Call]:
    """Return the first calls of the modules of a model. Modules that no forward names have none,
    nor has what is inside of them."""
    calls: dict[nn.Module, Call] = {}
    # A model has few classes, and many modules of each. By name: whether a loop uses it.
    names: dict[type[nn.Module], dict[str, bool]] = {}

    def place(module: nn.Module, looped: bool) -> None:
        if module in calls:
            return
        calls[module] = Call(len(calls), looped)
        children, kind = dict(module.named_children()), type(module)
        if children and kind not in names:
            found = names[kind] = {}
            for name, repeated in _used(kind, "forward", set()):
                found[name] = found.get(name, False) or repeated
        used = dict.fromkeys(children, False) if isinstance(module, _IN_TURN) else names.get(kind)
        for name, repeated in (used or {}).items():
            if name in children:
                child = children[name]
                place(child, looped or (repeated and not isinstance(child, _IN_TURN)))

    place(model, False)
    return calls


def _used(kind: type[nn.Module], method: str, seen: set[str]) -> Iterator[tuple[str, bool]]:
    """Yield the attributes that a method uses, and whether in a loop; instead of a method of the
    class those that it uses.

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
        for name, repeated in _attributes(statement, function.args.args[0].arg):
            # Methods of every module, as `__call__` and `to`, say nothing about this one.
            found = None if hasattr(nn.Module, name) else inspect.getattr_static(kind, name, None)
            if not isinstance(found, FunctionType):
                yield name, repeated
            elif name not in seen:
                for inner, again in _used(kind, name, seen):
                    yield inner, repeated or again


def _attributes(node: ast.AST, own: str, *, repeated: bool = False) -> Iterator[tuple[str, bool]]:
    """Yield the attributes of the variable `own`, in the order of evaluation (a call comes after
    its arguments), and whether a loop repeats them."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        if node.value.id == own:
            yield node.attr, repeated
        return
    parts = list(ast.iter_child_nodes(node))
    if isinstance(node, ast.Call):
        parts = [*node.args, *node.keywords, node.func]
    elif isinstance(node, ast.ListComp | ast.SetComp | ast.GeneratorExp):
        parts = [*node.generators, node.elt]
    loops = isinstance(node, ast.For | ast.While | ast.ListComp | ast.SetComp | ast.GeneratorExp)
    for part in parts:
        # Over which it loops is asked for once.
        again = loops and part is not getattr(node, "iter", None)
        yield from _attributes(part, own, repeated=repeated or again)
