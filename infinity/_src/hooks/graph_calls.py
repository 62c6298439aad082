"""Calls of hooked modules in autograd's graph: which nodes each made, and where a backward enters.

    module call    makes the nodes first <= sequence number < end; calls nest as their modules do
    exit           a node of the call that a node outside of it, or a root of backward, leads to

Backward needs the units of a call before the first of its nodes runs. Forward hooks the exits that
it finds in the call's output. Other results leave a call unseen: in a list, an attribute, a
closure, through a hook inside of the module, or by an exception. So a backward begins with a walk
through its graph, from the roots, which hooks the exits that forward has missed.

The walk takes about a microsecond per node. If forward had missed nothing, later backwards over
calls of the same shape go without: the same modules made as many nodes, with as many exits, and the
roots have the same place behind them. If a result leaves unseen without a change of shape, autograd
meets the version of an evicted parameter, and `Backward` raises.
"""

from __future__ import annotations

import abc
import bisect
from collections.abc import Iterable, Sequence
from typing import Any

from infinity._src._torch_compat import node_sequence_number
from infinity._src.hooks.unit_refs import UnitRefs

_SHAPES_MAX = 256
_CALLS_MAX = 100_000


class GraphCall:
    """One call in autograd's graph. Holds no tensors, so it makes no cycles.

    module: a number for the called module. first, end: the call made the nodes with the sequence
    numbers from `first` to `end` - 1; `end` is -1 while it runs. exits, entries: numbers of the
    nodes that start it and finish it in backward. idle: units that get gradients from the call and
    are not read for them, so that they are not gathered (`Tile`).
    """

    __slots__ = (
        "end",
        "ends_at_inputs",
        "entries",
        "exits",
        "first",
        "held",
        "idle",
        "module",
        "outer",
    )

    def __init__(self, module: int, first: int) -> None:
        self.module = module
        self.first, self.end = first, -1
        self.outer: GraphCall | None = None
        self.exits: set[int] = set()
        self.entries: set[int] = set()
        self.ends_at_inputs = False  # True: hooks on the call's arguments finish it
        self.held: tuple[UnitRefs, ...] = ()  # set when the call has returned, as is `idle`
        self.idle: tuple[UnitRefs, ...] = ()

    def abandon(self) -> None:
        """End a call that was interrupted, if it has not ended: no backward will reach its nodes.
        """
        if self.end < 0:
            self.end = self.first

    @abc.abstractmethod
    def start(self, _grads: object = None) -> None:
        """Prehook of the nodes that made the call's results."""

    @abc.abstractmethod
    def finish(self, _grad: object = None) -> None:
        """Hook of the call's inputs."""


class GraphCalls:
    """Calls made by one thread whose graphs may be alive, in the order in which they began."""

    def __init__(self) -> None:
        self._calls: list[GraphCall] = []
        # Shapes of passes in whose graphs forward had hooked every exit.
        self._complete: set[tuple[Any, ...]] = set()
        self._walks_always = False

    def __len__(self) -> int:
        return len(self._calls)

    def begin(self, call: GraphCall) -> None:
        """Note a call that begins."""
        self._calls.append(call)

    def made_no_graph(self, call: GraphCall) -> None:
        """Forget the call that began last of those that are noted."""
        if self._calls and self._calls[-1] is call:
            self._calls.pop()

    def prune(self) -> None:
        """Forget the calls that are not in a graph any more."""
        alive: dict[UnitRefs, bool] = {}
        for call in self._calls:
            for refs in (*call.held, *call.idle):
                if refs not in alive:
                    alive[refs] = refs.in_graph
        # The bound is for views of weights that a program keeps for good: they look like a graph.
        self._calls = [
            call
            for call in self._calls
            if call.end < 0 or any(alive[refs] for refs in (*call.held, *call.idle))
        ][-_CALLS_MAX:]

    def forget(self) -> None:
        """Forget all calls."""
        self._calls.clear()

    def walk_always(self) -> None:
        """Walk before every backward from now on."""
        self._walks_always = True

    def hook_exits(self, roots: Sequence[Any]) -> None:
        """Hook the exits through which a backward from these nodes enters calls."""
        # Another model's backward may begin, and graphs of this one be gone since its last forward.
        self.prune()
        calls = [call for call in self._calls if call.first < call.end]
        if not calls:
            return
        base = calls[0].first
        shape = (
            *(node_sequence_number(root) - base for root in roots),
            *((call.module, call.first - base, call.end - base, len(call.exits)) for call in calls),
        )
        if shape in self._complete and not self._walks_always:
            return
        if _walk(roots, calls) == 0:
            if len(self._complete) >= _SHAPES_MAX:
                self._complete.clear()
            self._complete.add(shape)


def _walk(roots: Iterable[Any], calls: list[GraphCall]) -> int:
    """Hook each node at which a path from the roots enters a call, and each at which it leaves a
    call whose end nothing tells. Returns the number of hooks.
    """
    starts, innermost = _boundaries(calls)
    hooked = 0
    seen: dict[Any, tuple[int, GraphCall | None]] = {}

    def place(node: Any) -> tuple[int, GraphCall | None]:
        number = node_sequence_number(node)
        index = bisect.bisect_right(starts, number) - 1
        return number, innermost[index] if index >= 0 else None

    pending = []
    for root in roots:
        number, call = seen[root] = place(root)
        pending.append(root)
        hooked += _enter(root, number, call, -1)
    for node in pending:
        number, call = seen[node]
        # Nodes from before the first call were made by other nodes from before.
        if number < starts[0]:
            continue
        for below, _ in node.next_functions:
            if below is None:
                continue
            found = seen.get(below)
            if found is None:
                found = seen[below] = place(below)
                pending.append(below)
            if found[1] is not call:
                hooked += _enter(below, *found, number)
                hooked += _leave(below, found[0], call)
    return hooked


def _boundaries(calls: list[GraphCall]) -> tuple[list[int], list[GraphCall | None]]:
    """Return sequence numbers in ascending order, and the innermost call of the nodes from each on.
    Sets `outer` of the calls.
    """
    starts: list[int] = []
    innermost: list[GraphCall | None] = []
    around: list[GraphCall] = []

    def close(until: int | None) -> None:
        while around and (until is None or around[-1].end <= until):
            starts.append(around.pop().end)
            innermost.append(around[-1] if around else None)

    for call in calls:
        close(call.first)
        call.outer = around[-1] if around else None
        around.append(call)
        starts.append(call.first)
        innermost.append(call)
    close(None)
    return starts, innermost


def _enter(node: Any, number: int, call: GraphCall | None, above: int) -> int:
    """Hook `node` for the calls that it belongs to and the node with the number `above` does not.
    """
    hooked = 0
    while call is not None and not call.first <= above < call.end:
        if number not in call.exits and (call.held or call.idle):
            call.exits.add(number)
            node.register_prehook(call.start)
            hooked += 1
        call = call.outer
    return hooked


def _leave(node: Any, number: int, call: GraphCall | None) -> int:
    """Hook `node`, which has made an input of `call` and of the calls around it, where no argument
    of a call tells when backward is done with it.
    """
    hooked = 0
    while call is not None and number < call.first:
        if not call.ends_at_inputs and number not in call.entries:
            call.entries.add(number)
            node.register_prehook(call.finish)
            hooked += 1
        call = call.outer
    return hooked
