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

Each thread numbers the nodes that it makes, so two threads make nodes with equal numbers. A
backward that runs in another thread than the calls, as may that of any other model, is taken for
one over these calls only if its graph has a parameter of the model.
"""

from __future__ import annotations

import abc
import bisect
import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from infinity._src._torch_compat import leaf_of, node_sequence_number
from infinity._src.hooks.unit_refs import UnitRefs

_SHAPES_MAX = 256
_UNSURE_MAX = 32
_HOOKED = "infinity"
"""Key in the metadata of a node: the calls that the walk has hooked it for."""


class GraphCall:
    """One call in autograd's graph. Holds no tensors, so it makes no cycles.

    module: a number for the called module. first, end: the call made the nodes with the sequence
    numbers from `first` to `end` - 1; `end` is -1 while it runs. exits: numbers of the nodes that
    forward has hooked. done: a backward that freed its graph has passed the call. idle: units that
    get gradients from the call and are not read for them, so that they are not gathered (`Tile`).
    """

    __slots__ = ("done", "end", "ends_at_inputs", "exits", "first", "held", "idle", "module")

    def __init__(self, module: int, first: int) -> None:
        self.module = module
        self.first, self.end = first, -1
        self.exits: set[int] = set()
        self.done = False
        self.ends_at_inputs = False  # True: hooks on the call's arguments finish it
        self.held: tuple[UnitRefs, ...] = ()  # set when the call has returned, as is `idle`
        self.idle: tuple[UnitRefs, ...] = ()

    def abandon(self) -> None:
        """End a call that was interrupted, if it has not ended: no backward will reach its nodes.
        """
        if self.end < 0:
            self.end = self.first

    def has(self, number: int) -> bool:
        """Return whether the call made the node with this number."""
        return self.first <= number < self.end

    @abc.abstractmethod
    def start(self, _grads: object = None) -> None:
        """Prehook of the nodes that made the call's results."""

    @abc.abstractmethod
    def finish(self, _grad: object = None) -> None:
        """Hook of the call's inputs."""


class GraphCalls:
    """Calls made by one thread whose graphs may be alive, in the order in which they began."""

    def __init__(self) -> None:
        self.thread = threading.current_thread()
        self._calls: list[GraphCall] = []
        self._room = 64  # calls until the next look for those whose graphs are gone
        # Hashes of the shapes of passes in whose graphs forward had hooked every exit.
        self._complete: set[int] = set()
        self._walks_always = False

    def __len__(self) -> int:
        return len(self._calls)

    def begin(self, call: GraphCall) -> None:
        """Note a call that begins."""
        if len(self._calls) >= self._room:
            self.prune()
        self._calls.append(call)

    def leave_out(self, call: GraphCall) -> None:
        """Forget a call that no backward will want, if it began last of those that are noted."""
        if self._calls and self._calls[-1] is call:
            self._calls.pop()

    def prune(self, *, between_passes: bool = False) -> None:
        """Forget calls whose graphs are gone. between_passes: also calls that are done. Before the
        next pass their graph may have another part, which no backward has freed."""
        alive: dict[UnitRefs, bool] = {}
        unsure: Counter[int] = Counter()
        kept = []
        # Newest first: of those that nothing shows to be alive the newest stay.
        while self._calls:
            call = self._calls.pop()
            units = (*call.held, *call.idle)
            for refs in units:
                if refs not in alive:
                    alive[refs] = refs.in_graph
            if call.end >= 0:
                if (between_passes and call.done) or not any(alive[refs] for refs in units):
                    continue
                # Two references are here. Hooks on nodes of a graph that lives have more; but a
                # graph of weights alone, which left the call unseen, has none.
                if sys.getrefcount(call) <= 2:
                    unsure[call.module] += 1
                    if unsure[call.module] > _UNSURE_MAX:
                        continue
            kept.append(call)
        self._calls = kept[::-1]
        self._room = max(64, 2 * len(kept))

    def forget(self) -> None:
        """Forget all calls."""
        self._calls.clear()

    def walk_always(self) -> None:
        """Walk before every backward from now on."""
        self._walks_always = True

    def hook_exits(
        self, roots: Sequence[Any], *, alone: bool, is_ours: Callable[[Any], bool]
    ) -> None:
        """Hook the exits through which a backward from these nodes, in this thread, enters calls.

        alone: no other thread has calls. is_ours: tells whether a leaf is a parameter of the model.
        """
        # Another model's backward may begin, and graphs of this one be gone since its last forward.
        self.prune()
        calls = [call for call in self._calls if call.first < call.end]
        if not calls:
            return
        own = self.thread is threading.current_thread()
        base = calls[0].first
        shape = hash((
            *(node_sequence_number(root) - base for root in roots),
            *((call.module, call.first - base, call.end - base, len(call.exits)) for call in calls),
        ))  # fmt: skip
        if own and shape in self._complete and not self._walks_always:
            return
        found = _Walk(roots, calls)
        if not own and not any(map(is_ours, found.leaves)):
            return
        hooked = found.hook_exits()
        if own and alone:
            hooked += found.hook_entries()
        if own and hooked == 0:
            if len(self._complete) >= _SHAPES_MAX:
                self._complete.clear()
            self._complete.add(shape)


class _Walk:
    """Walk through a graph from its roots. Notes each node at which a path enters calls or leaves
    them, and leaves of the graph."""

    def __init__(self, roots: Sequence[Any], calls: list[GraphCall]) -> None:
        self.leaves: list[Any] = []
        # A node, its number, and calls that it belongs to and its neighbour does not.
        self._entered: list[tuple[Any, int, list[GraphCall]]] = []
        self._left: list[tuple[Any, list[GraphCall]]] = []
        self._starts, self._chains = _boundaries(calls)
        self._seen: dict[Any, tuple[int, tuple[GraphCall, ...]]] = {}
        self._pending: list[Any] = []
        for root in roots:
            self._step(-1, (), root)
        for node in self._pending:
            number, chain = self._seen[node]
            # Nodes from before the first call were made by other nodes from before.
            if number < self._starts[0]:
                continue
            for below, _ in node.next_functions:
                if below is not None:
                    self._step(number, chain, below)

    def _step(self, number: int, chain: tuple[GraphCall, ...], below: Any) -> None:
        """Go from a node with this number, in these calls, to the node below."""
        found = self._seen.get(below)
        if found is None:
            at = node_sequence_number(below)
            index = bisect.bisect_right(self._starts, at) - 1
            found = self._seen[below] = at, self._chains[index] if index >= 0 else ()
            leaf = leaf_of(below)
            if leaf is None:
                self._pending.append(below)
            else:
                self.leaves.append(leaf)
        if found[1] is chain:
            return
        entered = [call for call in found[1] if not call.has(number)]
        if entered:
            self._entered.append((below, found[0], entered))
        left = [call for call in chain if found[0] < call.first]
        if left:
            self._left.append((below, left))

    def hook_exits(self) -> int:
        """Have each call start where a path enters it. Returns the number of new hooks."""
        return sum(
            _hook(node, call, call.start)
            for node, number, calls in self._entered
            for call in calls
            if number not in call.exits and (call.held or call.idle)
        )

    def hook_entries(self) -> int:
        """Have each call finish where a path leaves it, if no argument of it tells when backward is
        done with it. Returns the number of new hooks."""
        return sum(
            _hook(node, call, call.finish)
            for node, calls in self._left
            for call in calls
            if not call.ends_at_inputs and (call.held or call.idle)
        )


def _hook(node: Any, call: GraphCall, hook: Callable[[Any], None]) -> bool:
    """Hook a node for a call, once. Returns whether it was not hooked before."""
    hooked = node.metadata.setdefault(_HOOKED, set())
    if (call, hook.__name__) in hooked:
        return False
    hooked.add((call, hook.__name__))
    node.register_prehook(hook)
    return True


def _boundaries(calls: list[GraphCall]) -> tuple[list[int], list[tuple[GraphCall, ...]]]:
    """Return sequence numbers in ascending order, and the calls around the nodes from each on,
    outermost first."""
    starts: list[int] = []
    chains: list[tuple[GraphCall, ...]] = []
    around: tuple[GraphCall, ...] = ()
    for call in calls:
        around = _close(around, call.first, starts, chains)
        around = (*around, call)
        starts.append(call.first)
        chains.append(around)
    _close(around, None, starts, chains)
    return starts, chains


def _close(
    around: tuple[GraphCall, ...],
    until: int | None,
    starts: list[int],
    chains: list[tuple[GraphCall, ...]],
) -> tuple[GraphCall, ...]:
    """Note the ends of calls up to a number; None: of all. Returns the calls that go on."""
    while around and (until is None or around[-1].end <= until):
        starts.append(around[-1].end)
        around = around[:-1]
        chains.append(around)
    return around
