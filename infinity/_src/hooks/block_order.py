"""Order of one backward over several micro-batches: block by block, and in a block micro-batch 0
first.

Autograd runs, among the ready nodes, the node with the highest sequence number. It numbers nodes in
the order in which forward makes them. So one backward over several forwards in sequence would
process the whole last micro-batch first. `deal` permutes the numbers among the nodes:

    made     0: a b c | 1: a b c | 2: a b c     micro-batches 0, 1, 2 through blocks a, b, c
    dealt    a: 2 1 0 | b: 2 1 0 | c: 2 1 0     backward begins at the right end

The nodes of one micro-batch keep their order. Numbers only choose among ready nodes, and the graph
alone determines which nodes are ready: the numbers can make a backward slow, but never wrong.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from infinity._src.base.torch_compat import node_sequence_number, set_sequence_number
from infinity._src.params.discover import Named, find_blocks
from infinity._src.params.unit import Unit

Marks = Sequence[Sequence[int]]
"""For each micro-batch its first number (of a node, or of a checkpointed call), then the first
number after each block. Numbers ascend within a micro-batch, and from micro-batch to micro-batch.
"""


class Exit(NamedTuple):
    """Exit of a micro-batch from a block in forward; block is None at the start of the micro-batch.

    node: the number of the next autograd node. call: the number of the next checkpointed call.
    """

    block: nn.Module | None
    node: int
    call: int


class BlockLog:
    """Log of the blocks that micro-batches go through in forward.

    The log records where a micro-batch leaves a block. Nodes between two blocks belong to the
    second block: a checkpoint makes its node before the block inside of it begins.
    """

    def __init__(self) -> None:
        self.noting = False
        self.blocks: frozenset[nn.Module] = frozenset()
        self._exits: list[list[Exit]] = []

    def start(self, blocks: frozenset[nn.Module]) -> None:
        """Clear the log, and record exits from `blocks` until `stop`."""
        self.noting = True
        self.blocks = blocks
        self._exits.clear()

    def stop(self) -> None:
        """Stop recording. The recorded exits stay until the next `start`."""
        self.noting = False

    def begin(self, node: int, call: int) -> None:
        self._exits.append([Exit(None, node, call)])

    def leave(self, block: nn.Module, node: int, call: int) -> None:
        """Record that the micro-batch leaves a block. node, call: the next node's and the next
        call's number."""
        self._exits[-1].append(Exit(block, node, call))

    def odd_one(self) -> tuple[int, nn.Module | None, nn.Module | None] | None:
        """Return the first micro-batch whose sequence of blocks differs from that of micro-batch 0,
        and the first two blocks that differ: of this micro-batch, and of micro-batch 0. None if all
        micro-batches went through the same blocks."""
        for index, exits in enumerate(self._exits):
            for mine, first in itertools.zip_longest(exits, self._exits[0]):
                block, other = (None if left is None else left.block for left in (mine, first))
                if block is not other:
                    return index, block, other
        return None

    @property
    def nodes(self) -> Marks:
        return [[left.node for left in exits] for exits in self._exits]

    @property
    def calls(self) -> Marks:
        return [[left.call for left in exits] for exits in self._exits]


def deal(numbers: Iterable[int], marks: Marks) -> dict[int, int]:
    """Return a new number for each of `numbers` from the first mark on. The result is a permutation
    of these numbers: the last block of micro-batch 0 gets the highest, the last block of
    micro-batch 1 the next, and so on."""
    starts = [mark[0] for mark in marks]
    own = sorted({number for number in numbers if number >= starts[0]})

    def turn(number: int) -> tuple[int, int, int]:
        batch = bisect.bisect_right(starts, number) - 1
        block = bisect.bisect_right(marks[batch], number) - 1
        return block, -batch, number

    return dict(zip(sorted(own, key=turn), own, strict=True))


def reorder_backward(losses: Sequence[torch.Tensor], marks: Marks, end: int) -> None:
    """Renumber the nodes of `losses`, so that one backward over all losses runs block by block.

    marks: numbers of nodes. end: the number of the first node made after all micro-batches.
    """
    numbered = [
        (number, node)
        for node in _nodes(losses, marks[0][0])
        # AccumulateGrad nodes have the highest number of all and keep it: autograd accumulates a
        # gradient as soon as the gradient is ready.
        if (number := node_sequence_number(node)) < end
    ]
    dealt = deal((number for number, _ in numbered), marks)
    for number, node in numbered:
        set_sequence_number(node, dealt[number])


def _nodes(losses: Sequence[torch.Tensor], first: int) -> Iterator[Any]:
    pending: list[Any] = [loss.grad_fn for loss in losses]
    seen = set(pending)
    for node in pending:
        # All nodes that an older node leads to are older still.
        if node_sequence_number(node) < first:
            continue
        yield node
        for below, _ in node.next_functions:
            if below is not None and below not in seen:
                seen.add(below)
                pending.append(below)


def block_modules(
    model: nn.Module, units: Sequence[Unit], named: Named | None
) -> frozenset[nn.Module]:
    """Return the modules that backward finishes for all micro-batches before the next one: blocks,
    and the modules with units outside of blocks. A module inside of another of these modules counts
    as a part of the outer module.

    named: as `Policy.units`. In a model without blocks, the innermost modules with units are the
    blocks.
    """
    served = {module for unit in units for module in unit.modules}

    def holds(module: nn.Module, others: set[nn.Module]) -> bool:
        return any(part in others for part in module.modules() if part is not module)

    blocks = set(find_blocks(model, named, argument="units"))
    blocks = blocks or {module for module in served if not holds(module, served)}
    return frozenset(blocks | {module for module in served if not holds(module, blocks)})
