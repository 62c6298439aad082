"""Calls of hooked modules in autograd's graph: which nodes each made, and where a backward enters.

    module call    makes the nodes first <= sequence number < end; calls nest as their modules do
    exit           a node of the call through which backward enters it: a root of backward, or a
                   node that an edge from outside of the call leads to

Backward needs the units of a call before the first node of the call runs. Forward hooks the exits
that it finds in the call's output. Forward does not see other results: in a list, an attribute, a
closure, through a hook inside of the module, or after an exception. So each backward begins with a
walk through its graph, from the roots, which hooks the exits that forward has missed. The walk
takes about a microsecond per node.

Each thread numbers the nodes that it makes, so two threads make nodes with equal numbers. If a
backward runs in another thread than the calls, its graph may be that of another model. So the walk
continues only if it has found a parameter of this model. It then hooks every node with a number of
a call, since numbers of two threads do not show which nodes are neighbours.

Nothing reports that the graph of a call is gone. The list of calls is pruned when it has doubled.
"""

from __future__ import annotations

import abc
import bisect
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from infinity._src.base.torch_compat import leaf_of, node_sequence_number
from infinity._src.hooks.unit_refs import UnitRefs

ROOM = 64
"""The list of a thread's calls is pruned from this length on."""
HOOKED_MAX, UNHOOKED_MAX = 256, 4096
"""Most calls of one module to retain where the engine cannot see whether their graph is alive; the
newest are retained. HOOKED_MAX counts calls whose hooks are gone, UNHOOKED_MAX calls that never had
a hook."""

_HOOKED = "infinity"
"""(_HOOKED, hook) is the key in a node's metadata that says that a walk put `hook` on the node."""


class CallHooks:
    """Hooks of one call on nodes. The nodes hold this object, so it lives as long as the graph."""

    __slots__ = ("__weakref__", "call")

    def __init__(self, call: GraphCall) -> None:
        self.call = call

    def pre_backward(self, _grads: object = None) -> None:
        self.call.pre_backward()

    def post_backward(self, _grad: object = None) -> None:
        self.call.post_backward()


class GraphCall(abc.ABC):
    """One call in autograd's graph. Holds no tensors, so it makes no cycles.

    module: a number for the called module. first, end: the call made the nodes with the sequence
    numbers from `first` to `end` - 1; `end` is -1 while the call runs. around: the call in which
    this call began. exits: numbers of the nodes that forward has hooked. held: units that backward
    gathers for the call. idle: units that get gradients from the call but are not read, and so are
    not gathered (`Tile`).
    """

    __slots__ = (
        "_hooks", "around", "end", "ends_at_inputs", "exits", "first", "held", "idle", "module",
    )  # fmt: skip

    def __init__(self, module: int, first: int) -> None:
        self.module = module
        self.first, self.end = first, -1
        self.around: GraphCall | None = None
        self.exits: set[int] = set()
        self.ends_at_inputs = False  # True: hooks on the call's arguments finish it
        self.held: tuple[UnitRefs, ...] = ()  # set when the call has returned, as is `idle`
        self.idle: tuple[UnitRefs, ...] = ()
        self._hooks: weakref.ref[CallHooks] | None = None

    def hooks(self) -> CallHooks:
        found = self._hooks() if self._hooks is not None else None
        if found is None:
            found = CallHooks(self)
            self._hooks = weakref.ref(found)
        return found

    @property
    def was_hooked(self) -> bool:
        """True when a node has, or had, a hook of the call."""
        return self._hooks is not None

    @property
    def is_hooked(self) -> bool:
        """True when a node with a hook of the call is alive."""
        return self._hooks is not None and self._hooks() is not None

    def abandon(self) -> None:
        """End a call that was interrupted, with no nodes: no backward will reach the nodes that it
        made."""
        if self.end < 0:
            self.end = self.first

    def has(self, number: int) -> bool:
        return self.first <= number < self.end

    @abc.abstractmethod
    def pre_backward(self) -> None:
        """Gather the units of the call, in the graph task that runs now."""

    @abc.abstractmethod
    def post_backward(self) -> None:
        """Release the units of the call."""


class GraphCalls:
    """Calls made by one thread whose graphs may be alive, in the order in which they began."""

    def __init__(self) -> None:
        self.thread = threading.current_thread()
        self.room = ROOM
        self._calls: list[GraphCall] = []
        self._firsts: list[int] = []

    def __len__(self) -> int:
        return len(self._calls)

    def begin(self, call: GraphCall) -> None:
        around = self._calls[-1] if self._calls else None
        while around is not None and around.end >= 0:
            around = around.around
        call.around = around
        self._calls.append(call)
        self._firsts.append(call.first)

    def leave_out(self, call: GraphCall) -> None:
        """Remove a call that no backward will enter, unless another call began after it."""
        if self._calls and self._calls[-1] is call:
            self._calls.pop()
            self._firsts.pop()

    def forget(self) -> None:
        self._calls.clear()
        self._firsts.clear()

    def forget_if_gone(self) -> bool:
        """Forget all calls if every call had hooks on nodes that are gone, and no graph refers to a
        parameter of the calls' units. Returns whether calls remain."""
        looked_at: set[UnitRefs] = set()
        for call in reversed(self._calls):
            # A call that never had hooks stays: `in_graph` may miss its graph, since a `ctx` may
            # refer to a frozen parameter only as a Python object.
            if call.end < 0 or call.is_hooked or not call.was_hooked:
                return True
            for refs in (*call.held, *call.idle):
                if refs not in looked_at:
                    if refs.in_graph:
                        return True
                    looked_at.add(refs)
        self.forget()
        return False

    def keep(self, may_live: Callable[[GraphCall], bool]) -> None:
        kept = [call for call in reversed(self._calls) if may_live(call)]
        self._calls = kept[::-1]
        self._firsts = [call.first for call in self._calls]
        self.room = max(ROOM, 2 * len(kept))

    def innermost(self, number: int) -> GraphCall | None:
        index = bisect.bisect_right(self._firsts, number) - 1
        call = self._calls[index] if index >= 0 else None
        while call is not None and number >= call.end:
            call = call.around
        return call

    def hook_exits(
        self,
        roots: Sequence[Any],
        *,
        own: bool,
        ends: bool,
        is_ours: Callable[[Any], bool] | None = None,
    ) -> bool:
        """Hook the exits through which a backward from these nodes enters calls.

        own: this thread made the graph, so that sequence numbers say which call a node is in. ends:
        also hook the first node after each call whose arguments do not show when backward is done
        with the call. is_ours: given if the graph may belong to another model; returns whether a
        leaf is a parameter of this model. Returns whether the backward enters calls.
        """
        if not self._calls:
            return False
        walk = _Walk(self, roots, own=own)
        if is_ours is not None and not any(map(is_ours, walk.leaves)):
            return False
        for node, number, call in walk.entered:
            if (call.held or call.idle) and not (own and number in call.exits):
                _hook(node, call.hooks().pre_backward)
        for node, call in walk.left if ends else ():
            if (call.held or call.idle) and not call.ends_at_inputs:
                _hook(node, call.hooks().post_backward)
        return bool(walk.entered)


def prune(lists: Iterable[GraphCalls]) -> None:
    """Forget calls whose graphs are gone. lists: those of all threads, the newest last."""
    in_graph: dict[UnitRefs, bool] = {}
    unsure: Counter[tuple[int, bool]] = Counter()

    def may_live(call: GraphCall) -> bool:
        if call.end < 0:
            return True
        if call.first == call.end:
            return False
        if call.is_hooked:
            return True
        if call.was_hooked:
            units = (*call.held, *call.idle)
            for refs in units:
                if refs not in in_graph:
                    in_graph[refs] = refs.in_graph
            if not any(in_graph[refs] for refs in units):
                return False
        unsure[call.module, call.was_hooked] += 1
        most = HOOKED_MAX if call.was_hooked else UNHOOKED_MAX
        return unsure[call.module, call.was_hooked] <= most

    for calls in reversed(list(lists)):
        calls.keep(may_live)


class _Walk:
    """Walk through a graph from its roots, along the paths of its backward.

    leaves: tensors at the graph's leaves. entered: nodes through which a path enters a call, with
    their sequence numbers and the call. left: the first node after a call on each path, with the
    call. own: this thread made the graph; otherwise `entered` has all nodes that may belong to a
    call.
    """

    def __init__(self, calls: GraphCalls, roots: Sequence[Any], *, own: bool) -> None:
        self.leaves: list[Any] = []
        self.entered: list[tuple[Any, int, GraphCall]] = []
        self.left: list[tuple[Any, GraphCall]] = []
        self._calls, self._own = calls, own
        self._seen: dict[Any, tuple[int, GraphCall | None]] = {}
        self._pending: list[Any] = []
        for root in roots:
            self._step(-1, None, root)
        for node in self._pending:
            number, call = self._seen[node]
            for below, _ in node.next_functions:
                if below is not None:
                    self._step(number, call, below)

    def _step(self, number: int, call: GraphCall | None, below: Any) -> None:
        """Follow an edge to the node `below`, from a node with this number, made in this call."""
        found = self._seen.get(below)
        if found is not None:
            if found[1] is not call and self._own:
                self._cross(number, call, below, *found)
            return
        at = node_sequence_number(below)
        inside = self._calls.innermost(at)
        self._seen[below] = at, inside
        leaf = leaf_of(below)
        if leaf is None:
            self._pending.append(below)
        else:
            self.leaves.append(leaf)
        if inside is not call or not self._own:
            self._cross(number if self._own else -1, call, below, at, inside)

    def _cross(
        self, number: int, call: GraphCall | None, below: Any, at: int, inside: GraphCall | None
    ) -> None:
        entered = []
        while inside is not None and not inside.has(number):
            entered.append((below, at, inside))
            inside = inside.around
        self.entered += reversed(entered)  # outermost first
        # A leaf never ends a call: it has the highest number, and runs before other nodes.
        while call is not None and at < call.first:
            self.left.append((below, call))
            call = call.around


def _hook(node: Any, hook: Callable[[Any], None]) -> None:
    metadata, key = node.metadata, (_HOOKED, hook)
    if key not in metadata:
        metadata[key] = True
        node.register_prehook(hook)
