"""`gather()`: parameters that are readable and writable for a while, outside of forward.

The engine treats a window like the call of a module. If code inside of it computes with the
parameters, it makes a graph, whose backward may run inside of the window, or later, and gathers the
units again. If training computes with other values than `gather()` shows, a backward after the
window raises.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from infinity._src.base.torch_compat import tensor_refs
from infinity._src.hooks.backward import WINDOW, BackwardUse
from infinity._src.hooks.forward import Lifecycle
from infinity._src.hooks.unit_refs import UnitRefs, WeightWindow
from infinity._src.params.sharded_param import ShardedParameter
from infinity._src.params.unit import Param
from infinity.errors import RankFailed, StepUndone

Gatherable = torch.nn.Module | torch.Tensor | Iterable[torch.Tensor]


def chosen_params(lifecycle: Lifecycle, what: Gatherable) -> list[Param]:
    """Return the offloaded parameters of a module, a parameter, or an iterable of parameters.

    Parameters that are not offloaded (adapters added later) are readable anyway and are left out.
    Raises: ValueError for a parameter of another model, and for anything but parameters.
    """
    if isinstance(what, torch.nn.Module):
        what = what.parameters()
    tensors = [what] if isinstance(what, torch.Tensor) else list(what)
    chosen: dict[Param, None] = {}
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(
                f"gather() takes a module, a parameter or an iterable of parameters; this holds a "
                f"{type(tensor).__name__}. Named parameters: gather(p for _, p in "
                "model.named_parameters())"
            )
        if not isinstance(tensor, ShardedParameter):
            continue
        link = tensor.infinity_link
        if link.owner is not lifecycle:
            raise ValueError(
                f"{link.param.name} belongs to another model; gather it with that model's handle"
            )
        chosen[link.param] = None
    return list(chosen)


def gather(lifecycle: Lifecycle, what: Gatherable) -> AbstractContextManager[None]:
    """Return a context in which `what` (a module, a parameter, or parameters) is readable and
    writable; writes are retained.

    Its entry blocks until the parameters are gathered. After its end views of them are undefined.
    """
    lifecycle.require_open("gather()")
    # Units of an interrupted pass would count as in use.
    lifecycle.recover()
    return _open_windows(lifecycle, what)


@contextmanager
def _open_windows(lifecycle: Lifecycle, what: Gatherable) -> Iterator[None]:
    """Context with windows on the chosen parameters. Writes are retained, even if its body raises.
    """
    params = [param for param in chosen_params(lifecycle, what) if param not in lifecycle.windows]
    # Gather in one order on all ranks: a gather is a collective.
    params.sort(key=lambda param: (param.unit.index, param.flat.index, param.param_index))
    units = list({param.unit: None for param in params})
    held: list[UnitRefs] = []
    opened: list[WeightWindow] = []
    completed = False
    call = lifecycle.backward.call_begins(WINDOW)
    try:
        for unit in units:
            refs = lifecycle.refs_of(unit)
            refs.add_ref()
            # Before the check: the `finally` below drops the reference if it raises.
            held.append(refs)
            refs.check_version(window=True)
        for param in params:
            window = WeightWindow(param)
            if window.tensor.requires_grad:
                lifecycle.hook_window(window)
            lifecycle.windows[param] = window
            lifecycle.refs_of(param.unit).windows.append(window)
            opened.append(window)
        yield
        completed = True
    finally:
        try:
            # After an exception other ranks may not close these windows, and a collective would
            # wait for them.
            _close(lifecycle, opened, together=completed)
        finally:
            _end_call(lifecycle, call, opened)
            for refs in reversed(held):
                refs.drop_ref()


def _end_call(lifecycle: Lifecycle, call: BackwardUse, opened: list[WeightWindow]) -> None:
    """Hook the graphs of windows, so that backward gathers the windows' units again. Every window
    must be closed, and its writes stored."""
    used: dict[UnitRefs, None] = {}
    for window in opened:
        # Without a graph only the Python object refers to the tensor.
        if tensor_refs(window.tensor) > 1:
            used[lifecycle.refs_of(window.param.unit)] = None
            window.closes(outlives=lifecycle.unsharder.trains_on_rest(window.param.unit))
    lifecycle.expect_uses(used)
    lifecycle.backward.call_ends(call, list(used), [], [])


def _close(lifecycle: Lifecycle, opened: list[WeightWindow], *, together: bool) -> None:
    """Close windows and store the writes made through them. All are closed even if a write fails;
    then the first error is raised. After StepUndone or RankFailed nothing more is stored.

    together: all ranks close these windows now. A window that one rank has written is stored on all
    ranks: torch does not count the write of a collective (`dist.broadcast`) on receiving ranks.
    """
    for window in opened:
        refs = lifecycle.refs_of(window.param.unit)
        refs.note_window_writes()
        refs.windows.remove(window)
        del lifecycle.windows[window.param]
    failure: Exception | None = None
    written = [window.written for window in opened]
    try:
        written = lifecycle.unsharder.written(written) if together else written
    except Exception as error:  # noqa: BLE001  raised below
        failure = error
    for window, is_written in zip(opened, written, strict=True):
        # Store nothing after these errors: the window shows values of an undone step, or a failed
        # rank would not store the same.
        if is_written and not isinstance(failure, StepUndone | RankFailed):
            try:
                lifecycle.unsharder.write_alike(window.param, window.tensor.detach())
            except Exception as error:  # noqa: BLE001  raised below, after all writes
                failure = failure or error
    if failure is not None:
        raise failure
