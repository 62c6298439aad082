"""`Handle.accumulate`: forwards of micro-batches in sequence, and one backward for all.

    fn(micro-batch) for each in turn: code of the loop and of the model runs as in a plain loop
    one backward over all losses, block by block (`infinity._src.hooks.block_order`)

Forwards are not interleaved: the code of all micro-batches shares module attributes, globals and
settings of the process (docs/architecture.md).
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.utils import _pytree as pytree

from infinity._src.base.torch_compat import sequence_number
from infinity._src.hooks.block_order import block_modules, reorder_backward

if TYPE_CHECKING:
    from infinity._src.hooks.forward import Lifecycle
    from infinity._src.params.discover import Named

log = logging.getLogger("infinity")

B = TypeVar("B")
R = TypeVar("R")


class JointBackward:
    """One backward for the forwards of several micro-batches of one model.

    named: `Policy.units`. on_any_rank: returns whether a flag is set on some rank; collective.
    """

    def __init__(
        self, lifecycle: Lifecycle, named: Named | None, on_any_rank: Callable[[bool], bool]
    ) -> None:
        self._lifecycle = lifecycle
        self._on_any_rank = on_any_rank
        self._blocks = block_modules(lifecycle.model, lifecycle.units, named)
        self._said = False

    def run(
        self,
        micro_batches: Sequence[B],
        fn: Callable[[B], R],
        no_sync: Callable[[], contextlib.AbstractContextManager[None]],
    ) -> list[R]:
        """Run `fn` for each micro-batch, then backward; see `Handle.accumulate`.

        no_sync: context for all backwards but the last, if there are several.
        """
        if not micro_batches:
            raise ValueError("accumulate() got no micro-batches: a step needs at least one")
        results: list[R] = []
        losses: list[torch.Tensor] = []
        with self._lifecycle.noting(self._blocks) as passed:
            for index, micro_batch in enumerate(micro_batches):
                passed.begin(sequence_number(), self._lifecycle.next_call)
                self._lifecycle.unsharder.expect_forward(index + 1 < len(micro_batches))
                results.append(fn(micro_batch))
                losses.append(_loss_of(results[-1], index))
            end = sequence_number()
        odd = passed.odd_one()
        if odd is not None:
            self._say(*odd)
        # All ranks run the same number of backwards.
        if not self._on_any_rank(odd is not None):
            self._lifecycle.hook_before_renumbering(losses)
            reorder_backward(losses, passed.nodes, end)
            self._lifecycle.reorder_calls(passed.calls)
            torch.autograd.backward(losses)
        else:
            for loss in losses[:-1]:
                with no_sync():
                    loss.backward()
            losses[-1].backward()
        return [_detached(result) for result in results]

    def _say(self, index: int, mine: torch.nn.Module | None, first: torch.nn.Module | None) -> None:
        if self._said:
            return
        self._said = True
        names = {module: name for name, module in self._lifecycle.model.named_modules()}
        called, other = (
            "no further block" if module is None else names.get(module, type(module).__name__)
            for module in (mine, first)
        )
        log.warning(
            "accumulate(): micro-batch %d called %s where micro-batch 0 called %s. Backwards of "
            "micro-batches that do not call the same blocks in the same order run one after the "
            "other, and each reads all units",
            index,
            called,
            other,
        )


def _loss_of(result: Any, index: int) -> torch.Tensor:
    """Return the loss in what `fn` returned. Raises: ValueError where there is none."""
    loss = result[0] if isinstance(result, tuple) and result else result
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        found = (
            f"a tensor {list(loss.shape)}"
            if isinstance(loss, torch.Tensor)
            else f"a {type(loss).__name__}"
        )
        raise ValueError(
            f"accumulate(): fn returned {found} for micro-batch {index}; it returns the loss, a "
            "tensor of one element, or a tuple that begins with it"
        )
    if loss.grad_fn is None:
        raise ValueError(
            f"accumulate(): the loss that fn returned for micro-batch {index} has no graph: run "
            "accumulate() with gradients enabled, and call neither backward() nor detach() in fn"
        )
    return loss


def _detached(result: Any) -> Any:
    # An attached tensor would keep the graph of its micro-batch. pytree does not enter subclasses
    # of tuple, but for named tuples.
    if isinstance(result, tuple) and not hasattr(result, "_fields"):
        result = tuple(result)
    return pytree.tree_map(
        lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf, result
    )
