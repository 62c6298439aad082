"""What of a checkpoint goes where in a model: parameters by any of their names, optimizers by class and parameters, groups by
parameters. All is compared before anything is written."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from infinity._src.checkpoint.json_values import dtype_name, from_json
from infinity._src.checkpoint.manifest import OptimizerEntry
from infinity._src.checkpoint.reader import Checkpoint, SavedParam
from infinity._src.kernels.tiling.tiled_module import whole_name
from infinity._src.optim.base import Optimizer
from infinity._src.params.unit import Param

_LISTED_MAX = 5


def match_params(checkpoint: Checkpoint, params: Sequence[Param]) -> dict[Param, SavedParam]:
    """What was saved of each parameter. Raises: ValueError naming what is missing, unexpected, or of another shape or dtype."""
    by_name = {name: saved for saved in checkpoint.params.values() for name in saved.entry.names}
    found: dict[Param, SavedParam] = {}
    for param in params:
        saved = next((by_name[name] for name in param.names if name in by_name), None)
        if saved is not None:
            found[param] = saved
    missing = [param.name for param in params if param not in found]
    used = {id(saved.entry) for saved in found.values()}
    unexpected = [name for name, saved in checkpoint.params.items() if id(saved.entry) not in used]
    if missing or unexpected:
        parts = [f"{_listed(missing)} missing in it"] if missing else []
        parts += [f"{_listed(unexpected)} not in the model"] if unexpected else []
        tiles = any(whole_name(name) for name in (*missing, *unexpected))
        hint = ". Tile the model as it was (inf.tile_linears), or go by `infinity checkpoint export` and load=" if tiles else ""
        raise ValueError(f"{checkpoint.directory} is a checkpoint of another model: {'; '.join(parts)}{hint}")
    for param, saved in found.items():
        if tuple(param.shape) != saved.entry.shape:
            raise ValueError(
                f"{param.name} is of shape {saved.entry.shape} in {checkpoint.directory}; the model wants {tuple(param.shape)}"
            )
        if dtype_name(param.dtype) != saved.flat.dtype:
            raise ValueError(
                f"{param.name} is {saved.flat.dtype} in {checkpoint.directory}, and {dtype_name(param.dtype)} in the model: cast "
                f"the model (model.to(torch.{saved.flat.dtype})) before inf.offload"
            )
    return found


class MatchedOptimizer:
    """One optimizer and what was saved of it. `apply` sets all but the tensors.

    Raises: ValueError, naming both, for another class, other parameters or moments, and for groups that put together what had
    different values.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        entry: OptimizerEntry,
        found: Mapping[Param, SavedParam],
        holder_of: Callable[[Param], object],
        directory: str,
    ) -> None:
        self.optimizer = optimizer
        self.held = [param for param in found if holder_of(param) is optimizer]
        if optimizer.title != entry.title:
            raise ValueError(
                f"{directory} has the states of {entry.title}, and the optimizer is {optimizer.title}: build that one, or "
                "give None to restore the parameters alone"
            )
        saved_name = {param: found[param].entry.name for param in self.held}
        missing = [param.name for param in self.held if saved_name[param] not in entry.params]
        unexpected = sorted(set(entry.params) - set(saved_name.values()))
        if missing or unexpected:
            parts = [f"no states of {_listed(missing)}, which the optimizer holds"] if missing else []
            parts += [f"states of {_listed(unexpected)}, which it does not hold"] if unexpected else []
            raise ValueError(
                f"{directory} has {'; and '.join(parts)}: give the optimizer the same parameters (frozen ones have no "
                "states), or None to restore the parameters alone"
            )
        self._states: dict[Param, Any] = {}
        for param in self.held:
            saved, mine = entry.params[saved_name[param]], list(optimizer.moments_of(param))
            if saved["moments"] != mine:
                raise ValueError(
                    f"{param.name} has the moments {saved['moments']} in {directory}, and {mine} in the optimizer: build it with "
                    "the same hyper-parameters (whether SGD has momentum, say)"
                )
            self._states[param] = from_json(saved["state"])
        self._groups = [self._group(group, entry, found, directory) for group in optimizer.param_groups]

    def _group(
        self, group: dict[str, Any], entry: OptimizerEntry, found: Mapping[Param, SavedParam], directory: str
    ) -> dict[str, Any]:
        """The values of the saved group that the parameters of this one were in; none for a group without parameters."""
        where = {name: index for index, saved in enumerate(entry.groups) for name in saved["params"]}
        records = [at_rest.infinity_link.param for at_rest in group["params"]]
        indices = {where[found[record].entry.name]: record for record in records if found[record].entry.name in where}
        values = [entry.groups[index]["values"] for index in indices]
        if any(other != values[0] for other in values[1:]):
            names = " and ".join(record.name for record in list(indices.values())[:2])
            raise ValueError(
                f"{names} are in one parameter group, and were in groups with other values in {directory}: group them as there"
            )
        taken: dict[str, Any] = {key: from_json(value) for key, value in values[0].items()} if values else {}
        if taken:
            self.optimizer.check_group({**group, **taken})
        return taken

    def apply(self) -> None:
        """Set the groups' values, and what is kept for each parameter besides tensors."""
        for group, taken in zip(self.optimizer.param_groups, self._groups, strict=True):
            group.update(taken)
        for param, state in self._states.items():
            kept = self.optimizer.state[param.at_rest]
            kept.clear()
            kept.update(state)


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _LISTED_MAX} more" if len(names) > _LISTED_MAX else ""
    return ", ".join(names[:_LISTED_MAX]) + more
