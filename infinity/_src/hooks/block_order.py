"""Order of one backward over several micro-batches: block by block, and in a block micro-batch 0
first.

Of the nodes that are ready autograd runs the one with the highest sequence number, and it numbers
nodes as forward makes them. So one backward over forwards that ran in sequence would go
through the whole last micro-batch first. `deal` gives nodes each other's numbers:

    made     0: a b c | 1: a b c | 2: a b c     micro-batches 0, 1, 2 through blocks a, b, c
    dealt    a: 2 1 0 | b: 2 1 0 | c: 2 1 0     backward begins at the end

A micro-batch's own nodes keep their order. Numbers decide between nodes that are ready, and the
graph alone says which are: an order of numbers can make a backward slow, and never wrong.
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
"""For each micro-batch the first number of all, then the first one behind each block: ascending,
and those of a micro-batch above those of the one before."""


class Exit(NamedTuple):
    """Block that a micro-batch has left, or None where the micro-batch begins.

    node: the number of the first autograd node that it can make from here on. call: of the first
    checkpointed call.
    """

    block: nn.Module | None
    node: int
    call: int


class BlockLog:
    """Log of the blocks that micro-batches go through in forward.

    Blocks are noted where they are left, and what lies between two of them goes with the second: a
    checkpoint makes its node before the block that it calls begins.
    """

    def __init__(self) -> None:
        self.noting = False
        self.blocks: frozenset[nn.Module] = frozenset()
        self._exits: list[list[Exit]] = []

    def start(self, blocks: frozenset[nn.Module]) -> None:
        """Start anew: note exits of `blocks` until `stop`."""
        self.noting = True
        self.blocks = blocks
        self._exits.clear()

    def stop(self) -> None:
        """Note no more. The exits stay until the next `start`."""
        self.noting = False

    def begin(self, node: int, call: int) -> None:
        self._exits.append([Exit(None, node, call)])

    def leave(self, block: nn.Module, node: int, call: int) -> None:
        """Note that the micro-batch leaves a block, with the next number of nodes and of calls."""
        self._exits[-1].append(Exit(block, node, call))

    def odd_one(self) -> tuple[int, nn.Module | None, nn.Module | None] | None:
        """Return the first micro-batch that went through other blocks than micro-batch 0, the
        block, and that of micro-batch 0 in its place; None where all went through the same."""
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
    """Return a new number for each of `numbers` from the first mark on: the same numbers, the
    highest for the last block of micro-batch 0, then for that of 1."""
    starts = [mark[0] for mark in marks]
    own = sorted({number for number in numbers if number >= starts[0]})

    def turn(number: int) -> tuple[int, int, int]:
        batch = bisect.bisect_right(starts, number) - 1
        block = bisect.bisect_right(marks[batch], number) - 1
        return block, -batch, number

    return dict(zip(sorted(own, key=turn), own, strict=True))


def reorder_backward(losses: Sequence[torch.Tensor], marks: Marks, end: int) -> None:
    """Have one backward over `losses` go block by block.

    marks: of nodes. end: the number of the first node that was made after all micro-batches.
    """
    numbered = [
        (number, node)
        for node in _nodes(losses, marks[0][0])
        # Leaves have the highest number there is: their gradients go as soon as they are there.
        if (number := node_sequence_number(node)) < end
    ]
    dealt = deal((number for number, _ in numbered), marks)
    for number, node in numbered:
        set_sequence_number(node, dealt[number])


def _nodes(losses: Sequence[torch.Tensor], first: int) -> Iterator[Any]:
    pending: list[Any] = [loss.grad_fn for loss in losses]
    seen = set(pending)
    for node in pending:
        # Nodes from before were made by other nodes from before.
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
    and outside of them modules with units of their own. One inside of another counts as a part
    of it.

    named: as `Policy.units`. In a model without blocks: the innermost modules with units.
    """
    served = {module for unit in units for module in unit.modules}

    def holds(module: nn.Module, others: set[nn.Module]) -> bool:
        return any(part in others for part in module.modules() if part is not module)

    blocks = set(find_blocks(model, named, argument="units"))
    blocks = blocks or {module for module in served if not holds(module, served)}
    return frozenset(blocks | {module for module in served if not holds(module, blocks)})
