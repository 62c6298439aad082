"""Counts what a reader of the wiring cannot see: behaviour assigned after construction, and imports
that run in circles.

`python tests/wiring.py [ROOT]` prints both for a source tree; tests/test_wiring.py holds them to
lists with reasons.

Late-bound is an assignment `other.attr = value`, `other` not being `self`, outside of what makes
`other`, where
 - `value` is behaviour: a lambda, a partial, a function or a bound method; or the assigning object
 itself; or - `attr` is declared by some class as a Callable, as an object of a class of the
 project, or starts as a lambda.
Data is left out: attributes declared with other types, containers of objects among them; fields of
records (dataclasses, named tuples) unless they take a function or the assigning object; numbers,
strings, flags and constants; tickets and checkpointed calls, which stand for work in flight; what
autograd's `ctx` keeps. So are objects that the same function has just made, and `_torch_compat`,
which patches torch. Declarations are found by the attribute's name, since nothing here infers
types.

A method called `attach`, by which an object takes collaborators after its construction, counts as
one attribute; an override that calls its base's is the same one.

A circle of imports counts those under TYPE_CHECKING and inside of functions, too, but not what
`infinity/__init__.py` names for its lazy exports.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
RECORDS = {"NamedTuple", "Enum", "IntEnum", "TypedDict", "Structure"}
IN_FLIGHT = {"Ticket", "Call", "CheckpointCall"}


class Site(NamedTuple):
    """One late-bound attribute where it is assigned."""

    attr: str
    path: str
    line: int
    text: str


def sources(root: Path) -> dict[str, ast.Module]:
    """The project's modules by path."""
    found = [
        path
        for folder in ("infinity", "aio")
        for path in sorted((root / folder).rglob("*.py"))
        if (root / folder).is_dir()
    ]
    return {
        str(path.relative_to(root)): ast.parse(path.read_text(encoding="utf-8"))
        for path in found
        if "__pycache__" not in path.parts
        and not (path.is_symlink() or "infinity/aio" in str(path.relative_to(root)))
    }


def _called(node: ast.expr) -> str:
    """The last part of the name that a decorator or a call names."""
    if isinstance(node, ast.Call):
        return _called(node.func)
    if isinstance(node, ast.Subscript):
        return _called(node.value)
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _types(node: ast.expr | None) -> set[str]:
    """Names of the types of an annotation itself: members of a union, not what containers hold."""
    if isinstance(node, ast.BinOp):
        return _types(node.left) | _types(node.right)
    if isinstance(node, ast.Subscript):
        inner = _types(node.slice) if _called(node.value) == "Optional" else set()
        return {_called(node.value)} | inner
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return _types(ast.parse(node.value, mode="eval").body)
    return {_called(node)} if node is not None else set()


def _is_record(node: ast.ClassDef) -> bool:
    return any(_called(each) == "dataclass" for each in node.decorator_list) or any(
        _called(base) in RECORDS for base in node.bases
    )


class Project:
    """What classes declare, by name."""

    def __init__(self, modules: dict[str, ast.Module]) -> None:
        classes = [
            node
            for tree in modules.values()
            for node in ast.walk(tree)
            if isinstance(node, ast.ClassDef)
        ]
        records = {node.name for node in classes if _is_record(node)}
        errors = {
            node.name
            for node in classes
            if node.name.endswith("Error") or any(_called(b).endswith("Error") for b in node.bases)
        }
        self._services = {node.name for node in classes} - records - errors - IN_FLIGHT
        # `Read = Callable[...]` at the top of a module.
        self._functions = {"Callable"} | {
            target.id
            for tree in modules.values()
            for node in tree.body
            if isinstance(node, ast.Assign)
            and isinstance(node.value, ast.Subscript)
            and _called(node.value) == "Callable"
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        self.methods: set[str] = set()
        self._data: set[str] = set()  # attributes, by name: properties and what is declared
        self.behaviour: set[str] = set()  # of these, collaborators and callbacks
        for node in classes:
            self._declared(node)
        self.methods -= self._data

    def _declared(self, node: ast.ClassDef) -> None:
        record = _is_record(node)
        for each in node.body:
            if isinstance(each, FUNCTIONS):
                (self._data if each.decorator_list else self.methods).add(each.name)
            if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
                self._add(each.target.id, each.annotation, None, record=record)
        for method in (each for each in node.body if isinstance(each, FUNCTIONS)):
            arguments = {
                arg.arg: arg.annotation for arg in [*method.args.args, *method.args.kwonlyargs]
            }
            for target, value, annotation in _assigned(method):
                if isinstance(target.value, ast.Name) and target.value.id == "self":
                    given = arguments.get(value.id) if isinstance(value, ast.Name) else None
                    self._add(target.attr, annotation or given, value, record=record)

    def _add(
        self, attr: str, annotation: ast.expr | None, value: ast.expr | None, *, record: bool
    ) -> None:
        names = _types(annotation)
        self._data.add(attr)
        if (
            names & self._functions
            or isinstance(value, ast.Lambda)
            or (not record and names & self._services)
            or (
                not record and isinstance(value, ast.Call) and _called(value.func) in self._services
            )
        ):
            self.behaviour.add(attr)


def _assigned(
    function: ast.AST,
) -> Iterator[tuple[ast.Attribute, ast.expr | None, ast.expr | None]]:
    """(target, value, annotation) of every assignment to an attribute in a function, nested
    functions included."""
    for node in ast.walk(function):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Attribute):
            yield node.target, node.value, node.annotation
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Attribute):
                    yield target, node.value, None
                elif isinstance(target, ast.Tuple):
                    values = (
                        node.value.elts
                        if isinstance(node.value, ast.Tuple)
                        else [node.value] * len(target.elts)
                    )
                    for each, value in zip(target.elts, values, strict=False):
                        if isinstance(each, ast.Attribute):
                            yield each, value, None


def _made_here(function: ast.AST) -> set[str]:
    """Locals that hold what this function has made: by a class, or by `cls`."""
    found = set()
    for node in ast.walk(function):
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(node.value, ast.Call):
            name = _called(node.value.func)
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if name[:1].isupper() or name in {
                "cls",
                "__new__",
                "_make_wrapper_subclass",
                "make_wrapper",
                "open",
            }:
                found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return found


def _is_behaviour(value: ast.expr | None, project: Project, nested: set[str]) -> bool:
    if isinstance(value, ast.IfExp):
        return _is_behaviour(value.body, project, nested) or _is_behaviour(
            value.orelse, project, nested
        )
    if isinstance(value, ast.Call):
        return _called(value.func) == "partial"
    if isinstance(value, ast.Attribute):
        return value.attr in project.methods
    if isinstance(value, ast.Name):
        return value.id in nested or value.id == "self"
    return isinstance(value, ast.Lambda)


def late_bound(root: Path) -> list[Site]:
    """Every site, in order."""
    modules = {
        path: tree for path, tree in sources(root).items() if not path.endswith("_torch_compat.py")
    }
    project = Project(modules)
    found = []
    for path, tree in modules.items():
        outer = [node for node in ast.walk(tree) if isinstance(node, FUNCTIONS)]
        inside = {
            id(each)
            for node in outer
            for each in ast.walk(node)
            if each is not node and isinstance(each, FUNCTIONS)
        }
        for function in (node for node in outer if id(node) not in inside):
            made = _made_here(function)
            nested = {
                each.name
                for each in ast.walk(function)
                if isinstance(each, FUNCTIONS) and each is not function
            }
            for target, value, _ in _assigned(function):
                base = target.value
                if isinstance(base, ast.Name) and base.id in {"self", "cls", "ctx", *made}:
                    continue
                plain = isinstance(value, ast.Constant) and value.value is not None
                plain = plain or (isinstance(value, ast.Name) and value.id.isupper())
                if _is_behaviour(value, project, nested) or (
                    target.attr in project.behaviour and not plain
                ):
                    found.append(Site(target.attr, path, target.lineno, ast.unparse(target)))
        for node in (each for each in ast.walk(tree) if isinstance(each, ast.ClassDef)):
            for method in (each for each in node.body if isinstance(each, FUNCTIONS)):
                over = "super().attach(" in ast.unparse(method)
                if method.name == "attach" and not over and any(True for _ in _assigned(method)):
                    found.append(
                        Site(f"{node.name}.attach", path, method.lineno, f"{node.name}.attach(...)")
                    )
    return found


def cycles(root: Path) -> list[tuple[str, ...]]:
    """Groups of modules that import each other, directly or around; largest first."""
    modules = sources(root)
    dotted = {
        path: path.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
        for path in modules
    }
    dotted = {
        path: f"infinity.{name}" if name.split(".")[0] == "aio" else name
        for path, name in dotted.items()
    }
    known = set(dotted.values())
    graph: dict[str, set[str]] = {name: set() for name in known}
    for path, tree in modules.items():
        if path == "infinity/__init__.py":
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                inner = {f"{node.module}.{alias.name}" for alias in node.names} & known
                names = {f"{node.module}.{alias.name}" for alias in node.names}
                graph[dotted[path]] |= inner or {node.module} & known
                if inner and inner != names:
                    graph[dotted[path]] |= {node.module} & known
            elif isinstance(node, ast.Import):
                graph[dotted[path]] |= {alias.name for alias in node.names} & known
    return sorted(
        (group for group in _circles(graph) if len(group) > 1),
        key=lambda group: (-len(group), group),
    )


def _circles(graph: dict[str, set[str]]) -> list[tuple[str, ...]]:
    """Strongly connected components (Tarjan)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[tuple[str, ...]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in sorted(graph[name] - {name}):
            if other not in index:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            at = stack.index(name)
            found.append(tuple(sorted(stack[at:])))
            del stack[at:]

    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(10_000)
    try:
        for name in sorted(graph):
            if name not in index:
                visit(name)
    finally:
        sys.setrecursionlimit(limit)
    return found


def main(root: Path) -> None:
    """Print both counts."""
    sites = late_bound(root)
    for site in sites:
        print(f"{site.path}:{site.line}: {site.text}")
    print(f"late-bound: {len({site.attr for site in sites})} attributes, {len(sites)} sites")
    groups = cycles(root)
    for group in groups:
        print("circle:", " <-> ".join(group))
    print(f"circles of imports: {len(groups)}, of {sum(map(len, groups))} modules")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parent.parent)
