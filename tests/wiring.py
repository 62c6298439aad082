"""Counts what a reader of the wiring cannot see: behaviour assigned after construction, and imports
that run in circles.

`python tests/wiring.py [ROOT]` prints both for a source tree, and its rooms by floors;
tests/test_wiring.py holds them to lists with reasons.

Counted are fields (attributes of a class, and what containers in them hold) that are bound to
behaviour after the object was made.

Behaviour is a function, a lambda, a partial, a bound method, the binding object itself, or a
service: an object of a class of the project that is none of those below.

Bound is what any of these does: `x.field = value`, `+=`, `x.field[key] = value`, `setattr`,
`x.__dict__[name]`, `vars(x)[name]`, a call that puts something into a container (`append`, `add`,
`update`, ...), also inside of a tuple, a list, `a or b`, `a if c else b`.
 - From outside, `other.field`: behaviour, or whatever is assigned to a field that some class
 declares as behaviour.
 - From inside, `self.field`, but in a constructor or a private method that only constructors call:
 lambdas, functions and bound methods; and what comes by a parameter, or by a field of one, that is
 declared as a Callable or a service. So a setter, `attach` or `on_event` counts, by any name.

Not counted:
 - data: tensors, numbers, flags, constants, containers of data; records (dataclasses, named tuples,
 enums) by themselves, though a record that has services in its fields counts as a service;
 - state, by the names in STATE: work in flight (tickets, calls, reads of a save or an update that
 others wait for), where values rest now, the nouns of the model;
 - resources, by the names in RESOURCES: opened files and devices that an object keeps open and
 whose methods it does not call;
 - what an object makes by itself later, even of parameters: `GradBuffers.spilled`, the store of
 activations in `Storage.open_activations`; its class is named where it is made;
 - calls of methods of services, since what these store is counted where they store it; registries
 of the standard library (ExitStack, atexit) and of torch (hooks);
 - containers of a module (in capitals), by which exit and fork find what is open;
 - what autograd's `ctx` keeps, objects that the same function has just made, and `torch_compat`,
 which patches torch.
Types are those of annotations. Fields of unknown objects are found by name, since nothing here
infers types.

A circle of imports counts those under TYPE_CHECKING and inside of functions, too, but not what
`infinity/__init__.py` names for its lazy exports.
"""

from __future__ import annotations

import ast
import functools
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

COMPOSED = (
    *(ast.IfExp, ast.BoolOp, ast.BinOp, ast.NamedExpr, ast.Starred),
    *(ast.Tuple, ast.List, ast.Set, ast.Dict),
)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
RECORDS = {"NamedTuple", "Enum", "IntEnum", "TypedDict", "Structure"}
STATE = {
    "Ticket",  # work in flight, as those up to BackwardUse
    "Call",
    "CheckpointCall",
    "Boundary",
    "PendingUnshard",
    "BackwardUse",
    "GraphCall",
    "StateReader",  # a save that still reads
    "AccumulatorReader",  # an update that still reads
    "Unit",  # nouns of the model, which point to each other, as the next two
    "Flat",
    "Param",
    "StoredInHostMemory",  # bytes at rest, as the next
    "ShardRecords",
    "GradBacking",  # where a slot's values rest now, as its tensor is
}
RESOURCES = {"SwapFile", "DeviceDriver"}


class Site(NamedTuple):
    """One late-bound attribute where it is assigned."""

    attr: str
    path: str
    line: int
    text: str


@functools.lru_cache
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


# Each tree is walked several times, and walking is most of the time.
@functools.cache
def _nodes(tree: ast.AST) -> tuple[ast.AST, ...]:
    """A module or a function, and all that is inside of it."""
    return tuple(ast.walk(tree))


def forget() -> None:
    """Drop the parsed files: millions of nodes slow down each gc.collect()."""
    sources.cache_clear()
    _nodes.cache_clear()


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
    """Declarations of classes, by name."""

    def __init__(self, modules: dict[str, ast.Module]) -> None:
        classes = [
            node
            for tree in modules.values()
            for node in _nodes(tree)
            if isinstance(node, ast.ClassDef)
        ]
        records = {node.name for node in classes if _is_record(node)}
        errors = {
            node.name
            for node in classes
            if node.name.endswith("Error") or any(_called(b).endswith("Error") for b in node.bases)
        }
        named = {node.name for node in classes}
        self._services = named - records - errors - STATE - RESOURCES
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
        self._fields: dict[str, dict[str, ast.expr]] = {}
        for node in classes:
            for each in node.body:
                if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
                    self._fields.setdefault(node.name, {})[each.target.id] = each.annotation
        # In layers: a record of such records is one, too.
        self._wired: set[str] = set()
        while True:
            more = {
                name
                for name in (records & self._fields.keys()) - STATE
                if any(
                    _types(field) & (self._functions | self._services | self._wired)
                    for field in self._fields[name].values()
                )
            }
            if more <= self._wired:
                break
            self._wired |= more
        self.methods: set[str] = set()
        self._data: set[str] = set()  # attributes, by name: properties and what is declared
        self.behaviour: set[str] = set()  # of these, collaborators and callbacks
        for node in classes:
            self._declared(node)
        self.methods -= self._data

    def is_behaviour_type(self, annotation: ast.expr | None) -> bool:
        """True when an annotation names a Callable, or an object of the project that does
        something."""
        names = _types(annotation)
        return bool(names & (self._functions | self._services | self._wired))

    def field_is_behaviour(self, annotation: ast.expr | None, attr: str) -> bool:
        """True when a field is behaviour: by its class where the annotation names one, else by
        name."""
        known = [self._fields[name] for name in _types(annotation) if name in self._fields]
        found = [fields[attr] for fields in known if attr in fields]
        if found:
            return any(self.is_behaviour_type(each) for each in found)
        return attr in self.behaviour

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
    for node in _nodes(function):
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
    for node in _nodes(function):
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


ADDING = {"append", "appendleft", "add", "insert", "extend", "setdefault", "update", "push"}
"""Methods of containers that put something in."""
MAKING = {"__init__", "__post_init__", "__new__", "__init_subclass__"}


def _local_containers(function: ast.AST) -> set[str]:
    """Locals that begin as an empty container, or as a display of one."""
    displays = (ast.Dict, ast.List, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
    found = set()
    for node in _nodes(function):
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            made = isinstance(node.value, displays) or (
                isinstance(node.value, ast.Call)
                and _called(node.value.func) in {"dict", "list", "set", "deque", "defaultdict"}
            )
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {each.id for each in targets if made and isinstance(each, ast.Name)}
    return found


class Scope:
    """One function: the parameters that bring behaviour, and the names of nested functions."""

    def __init__(
        self, project: Project, function: ast.FunctionDef | ast.AsyncFunctionDef, owner: str
    ) -> None:
        self.function = function
        self.owner = owner
        self.nested = {
            each.name
            for each in _nodes(function)
            if isinstance(each, FUNCTIONS) and each is not function
        }
        # A container that is a local dies with the function.
        self.made = _made_here(function) | _local_containers(function)
        self._project = project
        arguments = function.args
        self.annotations = {
            arg.arg: arg.annotation
            for arg in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
            if arg.arg not in {"self", "cls"}
        }
        self.given = {
            name
            for name, annotation in self.annotations.items()
            if project.is_behaviour_type(annotation)
        }

    def brings_behaviour(self, value: ast.expr | None) -> bool:
        """True when a value is, or has inside, something that others will call: a lambda, a
        function, a bound method, a partial, the object itself."""
        if isinstance(value, ast.IfExp):
            return self.brings_behaviour(value.body) or self.brings_behaviour(value.orelse)
        if isinstance(value, ast.BoolOp):
            return any(self.brings_behaviour(each) for each in value.values)
        if isinstance(value, ast.BinOp):
            return self.brings_behaviour(value.left) or self.brings_behaviour(value.right)
        if isinstance(value, (ast.NamedExpr, ast.Starred)):
            return self.brings_behaviour(value.value)
        if isinstance(value, (ast.Tuple, ast.List, ast.Set)):
            return any(self.brings_behaviour(each) for each in value.elts)
        if isinstance(value, ast.Dict):
            return any(self.brings_behaviour(each) for each in value.values)
        if isinstance(value, ast.Call):
            return _called(value.func) == "partial"
        if isinstance(value, ast.Attribute):
            return value.attr in self._project.methods
        if isinstance(value, ast.Name):
            return value.id in self.nested or value.id == "self"
        return isinstance(value, ast.Lambda)

    def takes_behaviour(self, value: ast.expr | None) -> bool:
        """True when a value comes from outside: by a parameter that is a function or a service, or
        by a field of a parameter that is declared as one."""
        if isinstance(value, ast.Name):
            return value.id in self.given
        if isinstance(value, ast.Attribute):
            root: ast.expr = value
            while isinstance(root, ast.Attribute):
                root = root.value
            if not isinstance(root, ast.Name) or root.id not in self.annotations:
                return False
            direct = value.value is root
            known = self.annotations[root.id] if direct else None
            return self._project.field_is_behaviour(known, value.attr)
        if isinstance(value, COMPOSED):
            parts = (each for each in ast.iter_child_nodes(value) if isinstance(each, ast.expr))
            return any(self.takes_behaviour(each) for each in parts)
        return False

    def is_own(self, target: ast.expr) -> bool:
        """True when a target belongs to an object that this function makes, or is a local of it."""
        while isinstance(target, (ast.Subscript, ast.Attribute)):
            target = target.value
        # In capitals: the weak sets of a module, by which exit and fork find what is open.
        return isinstance(target, ast.Name) and (
            target.id in {"cls", "ctx", *self.made} or target.id.isupper()
        )


def _field(target: ast.expr, owner: str) -> str:
    """The name of the field that a target is in: `Class.field` for a field of self."""
    while isinstance(target, ast.Subscript) or (
        isinstance(target, ast.Attribute) and target.attr == "__dict__"
    ):
        target = target.value
    if isinstance(target, ast.Call) and target.args:  # vars(other)
        return _field(target.args[0], owner)
    if isinstance(target, ast.Attribute):
        root = target.value
        mine = isinstance(root, ast.Name) and root.id == "self"
        return f"{owner}.{target.attr}" if mine else target.attr
    return ast.unparse(target)


def _bindings(function: ast.AST) -> Iterator[tuple[ast.expr, ast.expr | None, ast.AST]]:
    """(target, value, statement) of all that may bind a field: assignments to attributes and items,
    `+=`, `setattr`, and calls that put something into a container."""
    for target, value, _ in _assigned(function):
        yield target, value, target
    for node in _nodes(function):
        if isinstance(node, ast.AugAssign) and not isinstance(node.target, ast.Name):
            yield node.target, node.value, node
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Subscript):
                    yield target, node.value, node
        elif isinstance(node, ast.Call) and _called(node.func) in {"setattr", "__setattr__"}:
            if len(node.args) >= 3:
                base, name, value = node.args[-3:]
                attr = name.value if isinstance(name, ast.Constant) else "?"
                yield ast.Attribute(base, str(attr), ast.Store()), value, node
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in ADDING
        ):
            for value in [*node.args, *(keyword.value for keyword in node.keywords)]:
                yield node.func.value, value, node


def _making(node: ast.ClassDef) -> set[str]:
    """The methods that make an object: constructors, and private methods that only they call."""
    found = set(MAKING)
    callers: dict[str, set[str]] = {}
    for method in (each for each in node.body if isinstance(each, FUNCTIONS)):
        for each in _nodes(method):
            if isinstance(each, ast.Attribute) and ast.unparse(each.value) == "self":
                callers.setdefault(each.attr, set()).add(method.name)
    while True:
        more = {
            name for name, by in callers.items() if name.startswith("_") and by <= found
        } - found
        if not more:
            return found
        found |= more


def _functions(
    tree: ast.Module,
) -> Iterator[tuple[ast.FunctionDef | ast.AsyncFunctionDef, str, bool]]:
    """(function, its class, whether it makes objects of it) of a module; nested functions belong to
    the one around them."""

    def visit(
        node: ast.AST, owner: ast.ClassDef | None
    ) -> Iterator[tuple[ast.FunctionDef | ast.AsyncFunctionDef, str, bool]]:
        making = _making(owner) if owner is not None and node is owner else set()
        for each in ast.iter_child_nodes(node):
            if isinstance(each, FUNCTIONS):
                makes = each.name in making
                static = any(_called(mark) == "classmethod" for mark in each.decorator_list)
                yield each, owner.name if owner else "", makes or static
            else:
                yield from visit(each, each if isinstance(each, ast.ClassDef) else owner)

    yield from visit(tree, None)


def late_bound(root: Path) -> list[Site]:
    """Every site, in order."""
    modules = {
        path: tree for path, tree in sources(root).items() if not path.endswith("torch_compat.py")
    }
    project = Project(modules)
    found = []
    for path, tree in modules.items():
        for function, owner, makes in _functions(tree):
            scope = Scope(project, function, owner)
            for target, value, node in _bindings(function):
                if scope.is_own(target):
                    continue
                # The interpreter's hooks have no other interface.
                if ast.unparse(target).startswith("sys."):
                    continue
                # A method of a service: what it stores is counted there.
                if isinstance(node, ast.Call) and (
                    isinstance(target, ast.Attribute)
                    and _called(node.func) in ADDING
                    and target.attr in project.behaviour
                ):
                    continue
                direct = isinstance(target, ast.Attribute)
                base = target
                while isinstance(base, (ast.Attribute, ast.Subscript)):
                    base = base.value
                mine = isinstance(base, ast.Name) and base.id == "self"
                # A field of self, or of something that self has: `self.part.hook = ...`.
                deep = direct and not (isinstance(target.value, ast.Name) and mine)
                if mine and isinstance(node, ast.Call):
                    deep = "." in ast.unparse(target).removeprefix("self.")
                if mine and not deep:
                    bound = not makes and (
                        scope.takes_behaviour(value)
                        or (not isinstance(value, ast.Attribute) and scope.brings_behaviour(value))
                    )
                else:
                    plain = isinstance(value, ast.Constant) and value.value is not None
                    plain = plain or (isinstance(value, ast.Name) and value.id.isupper())
                    bound = scope.brings_behaviour(value) or (
                        direct
                        and not isinstance(node, ast.Call)
                        and target.attr in project.behaviour
                        and not plain
                    )
                    inside = not direct or isinstance(node, ast.Call)
                    bound = bound or (inside and scope.takes_behaviour(value))
                if bound:
                    attr = _field(target, owner)
                    found.append(Site(attr, path, node.lineno, ast.unparse(node)))
    return found


@functools.lru_cache
def imports(root: Path) -> dict[str, set[str]]:
    """The modules that each module imports, but for the lazy exports of `infinity/__init__.py`."""
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
        for node in _nodes(tree):
            if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                inner = {f"{node.module}.{alias.name}" for alias in node.names} & known
                names = {f"{node.module}.{alias.name}" for alias in node.names}
                graph[dotted[path]] |= inner or {node.module} & known
                if inner and inner != names:
                    graph[dotted[path]] |= {node.module} & known
            elif isinstance(node, ast.Import):
                graph[dotted[path]] |= {alias.name for alias in node.names} & known
    return graph


def cycles(graph: dict[str, set[str]]) -> list[tuple[str, ...]]:
    """Groups that import each other, directly or around; largest first."""
    return sorted(
        (group for group in _circles(graph) if len(group) > 1),
        key=lambda group: (-len(group), group),
    )


def room(module: str) -> str:
    """The folder of a module: one of infinity/_src, or of the package; "infinity" has the names
    that users import, and "commands" starts the programs."""
    parts = module.split(".")
    if module in ("infinity.__main__", "infinity.bench"):
        return "commands"
    if parts[:2] == ["infinity", "_src"]:
        return ".".join(parts[:3])
    return ".".join(parts[:2]) if parts[1:2] and parts[1] != "ops" else "infinity"


def rooms(graph: dict[str, set[str]]) -> dict[str, set[str]]:
    """The rooms that each room imports."""
    found: dict[str, set[str]] = {room(module): set() for module in graph}
    for module, imported in graph.items():
        found[room(module)] |= {room(each) for each in imported} - {room(module)}
    return found


def floors(graph: dict[str, set[str]]) -> dict[str, int]:
    """The floor of each room: 1, or one above the highest that it imports. Rooms that import each
    other have none: RecursionError."""
    found: dict[str, int] = {}

    def floor(name: str) -> int:
        if name not in found:
            found[name] = 1 + max(map(floor, graph[name]), default=0)
        return found[name]

    for name in graph:
        floor(name)
    return found


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


C_TEXT = re.compile(r'/\*.*?\*/|"(?:\\.|[^"\\])*"', re.DOTALL)
C_DEFINITION = re.compile(
    r"^(?!static\b|typedef\b|extern\b|return\b)[a-zA-Z_][\w \*]*?\b(inf_\w+)\s*"
    r"(?:\([^;{}]*\)\s*\{|=)",
    re.MULTILINE,
)
C_FLOOR = re.compile(r"^ \*   ((?:[a-z]+/\w+\.c ?)+)", re.MULTILINE)


def c_calls(native: Path) -> set[tuple[str, str, str]]:
    """(file, function or object, file that defines it) for each that a C file of `native` names."""
    paths = {path.relative_to(native).as_posix(): path for path in native.rglob("*.c")}
    texts = {name: C_TEXT.sub("", path.read_text()) for name, path in paths.items()}
    home = {
        function: name for name, text in texts.items() for function in C_DEFINITION.findall(text)
    }
    return {
        (name, word, home[word])
        for name, text in texts.items()
        for word in set(re.findall(r"\binf_\w+", text))
        if home.get(word, name) != name
    }


def c_floors(native: Path) -> dict[str, int]:
    """The floor of each C file, by the comment at the top of executor.h, lowest first."""
    lines = C_FLOOR.findall((native / "executor" / "executor.h").read_text())
    return {name: floor for floor, line in enumerate(lines) for name in line.split()}


def main(root: Path) -> None:
    """Print the counts."""
    sites = late_bound(root)
    for site in sites:
        print(f"{site.path}:{site.line}: {site.text}")
    print(f"late-bound: {len({site.attr for site in sites})} attributes, {len(sites)} sites")
    graph = imports(root)
    groups = cycles(graph)
    for group in groups:
        print("circle:", " <-> ".join(group))
    print(f"circles of imports: {len(groups)}, of {sum(map(len, groups))} modules")
    found = rooms(graph)
    high = floors(found)
    for floor in range(max(high.values()), 0, -1):
        print(f"floor {floor}:", ", ".join(name for name in sorted(high) if high[name] == floor))
    print(f"arrows between rooms: {sum(map(len, found.values()))}")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parent.parent)
