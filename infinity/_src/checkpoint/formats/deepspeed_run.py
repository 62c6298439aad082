"""Reads the fields of a DeepSpeed run from a checkpoint: step counts, hyper-parameters, the loss
scaler, the scheduler, and the state that the caller passed to `save_checkpoint`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, final

import torch

from infinity._src.base.wording import listed
from infinity._src.checkpoint.formats.load import Loaded
from infinity._src.checkpoint.formats.safe_pickle import Record
from infinity._src.checkpoint.formats.torch_files import TorchFile, kind_of
from infinity._src.optim.base import Optimizer

_OWN = frozenset({
    "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params",
    "frozen_param_fragments", "lr_scheduler", "data_sampler", "random_ltd",
    "sparse_tensor_module_names", "skipped_steps", "global_steps", "global_samples",
    "dp_world_size", "mp_world_size", "checkpoint_parallel_dimensions", "num_experts",
    "universal_checkpoint_info", "ds_config", "ds_version",
})  # fmt: skip
"""Keys that DeepSpeed writes into model states. All other keys are the caller's client state."""
_REFUSED = ("ds_autoep_layers", "autoep_layers", "ds_zero_partition_groups")
_NEUTRAL = {
    "bias_correction": True,
    "amsgrad": False,
    "maximize": False,
    "decoupled_weight_decay": True,
}
"""Hyper-parameters that an optimizer of this library may lack, with the values that such an
optimizer implies."""
_IMPLEMENTATION = ("foreach", "fused", "capturable", "differentiable")


@final
class LoadedDeepSpeed(Loaded):
    """The result of `inf.load_deepspeed`: a pair (missing, unexpected) of the names that a load
    with strict=False skipped, and fields of the saved run.

    step: DeepSpeed's step count (`global_steps`). skipped_steps: steps without an update, included
    in `step`. samples: `global_samples`. stage, world: ZeRO stage and number of ranks of the saved
    run. loss_scaler: fields of DeepSpeed's loss scaler, None without scaling; `grad_scaler_state()`
    converts them to torch's. lr_scheduler: the scheduler's `state_dict()`, None without a
    scheduler. client_state: the state that the caller passed to `save_checkpoint`. rounded: text
    that says how the policy's state format rounded the states; "" if all bits are as saved. notes:
    all other differences from the saved run.
    """

    step: int
    skipped_steps: int
    samples: int | None
    stage: int
    world: int
    loss_scaler: dict[str, Any] | None
    lr_scheduler: Any
    client_state: dict[str, Any]
    rounded: str
    notes: tuple[str, ...]

    def __new__(cls, left_out: Loaded, fields: RunFields, rounded: str) -> LoadedDeepSpeed:
        made = super().__new__(cls, *left_out)
        made.__dict__.update(vars(fields), rounded=rounded)
        return made

    def __repr__(self) -> str:
        given = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"LoadedDeepSpeed(missing={self.missing}, unexpected={self.unexpected}, {given})"

    def grad_scaler_state(self) -> dict[str, Any] | None:
        """Return a state for `torch.amp.GradScaler.load_state_dict`; None without scaling.

        Until the next overflow torch's scale grows at the same steps as DeepSpeed's. At the
        overflow torch lowers the scale immediately, while DeepSpeed's hysteresis delays this; after
        the overflow torch raises the scale one step earlier.
        """
        given = self.loss_scaler
        if given is None:
            return None
        if not given.get("dynamic"):
            return {
                "scale": float(given["cur_scale"]),
                "growth_factor": 1.0,
                "backoff_factor": 1.0,
                "growth_interval": 1,
                "_growth_tracker": 0,
            }
        factor, window = float(given["scale_factor"]), int(given["scale_window"])
        # DeepSpeed raises the scale after each `window` steps without overflow. It does not count
        # the first step of the run, or the first step after an overflow.
        good = int(given["cur_iter"]) - int(given["last_overflow_iter"]) - 2
        return {
            "scale": float(given["cur_scale"]),
            "growth_factor": factor,
            "backoff_factor": 1 / factor,
            "growth_interval": window,
            "_growth_tracker": good % window if good >= 0 else -1,
        }


@dataclasses.dataclass(frozen=True)
class RunFields:
    """Fields of a checkpoint; `LoadedDeepSpeed` documents them."""

    step: int
    skipped_steps: int
    samples: int | None
    stage: int
    world: int
    loss_scaler: dict[str, Any] | None
    lr_scheduler: Any
    client_state: dict[str, Any]
    notes: tuple[str, ...]

    @classmethod
    def of(
        cls, model: TorchFile, states: TorchFile, scaled: Mapping[str, Any], *, stage: int
    ) -> RunFields:
        """Read the fields. scaled: the dict in the file `states` that contains the loss scaler.

        Raises: ValueError for a run of an unsupported kind; KeyError, TypeError.
        """
        root = model.root
        check_kind(model, root)
        check_kind(states, scaled)
        client, notes = {}, []
        for name, value in root.items():
            if name in _OWN:
                continue
            try:
                client[name] = model.plain(value)
            except ValueError as error:
                notes.append(f"client_state[{name!r}] is omitted: {error}")
        samples = root.get("global_samples")
        return cls(
            step=_count(root["global_steps"]),
            skipped_steps=_count(root["skipped_steps"]),
            samples=None if samples is None else _count(samples),
            stage=stage,
            world=_count(root["dp_world_size"]),
            loss_scaler=_scaler(states, scaled.get("loss_scaler")),
            lr_scheduler=model.plain(root.get("lr_scheduler")),
            client_state=client,
            notes=tuple(notes),
        )


def check_kind(file: TorchFile, root: Mapping[str, Any]) -> None:
    """Refuse a run whose layout or kind of states is not supported, with an error that names it."""
    found = next((name for name in _REFUSED if root.get(name)), None)
    if found is not None:
        raise ValueError(
            f"{file.path} has {found}: DeepSpeed split its experts over the ranks (AutoEP), which "
            "is not supported; convert it with deepspeed.checkpoint.ds_to_universal, or save from "
            "a run without AutoEP"
        )
    if zero_config(file).get("zenflow"):
        raise ValueError(
            f"{file.path} is of a run with ZenFlow, whose pending updates no checkpoint has; save "
            "from a run without ZenFlow"
        )


def zero_config(file: TorchFile) -> dict[str, Any]:
    """Return `zero_optimization` of the configuration in a file."""
    config = file.root.get("ds_config")
    found = config.get("zero_optimization") if isinstance(config, dict) else None
    return found if isinstance(found, dict) else {}


def hyper_of(file: TorchFile, group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the hyper-parameters of a group: numbers, and tuples of numbers."""
    found = {}
    for name, value in group.items():
        if name == "params" or name in _IMPLEMENTATION:
            continue
        plain = file.plain(value)
        if isinstance(plain, torch.Tensor):
            if plain.numel() != 1:
                raise TypeError(f"{name} of a group is a tensor of shape {tuple(plain.shape)}")
            plain = plain.item()
        found[str(name)] = tuple(plain) if isinstance(plain, list) else plain
    config = file.root.get("ds_config")
    optimizer = config.get("optimizer") if isinstance(config, dict) else None
    given = optimizer.get("params") if isinstance(optimizer, dict) else None
    # DeepSpeed's Adam does not keep `adam_w_mode` in its parameter groups.
    if (
        isinstance(optimizer, dict)
        and str(optimizer.get("type")).lower() in ("adam", "muon")
        and not found.get("use_muon")
        and isinstance(given, dict)
        and given.get("adam_w_mode") is False
    ):
        found["decoupled_weight_decay"] = False
    return found


def number_of(files: Sequence[TorchFile], values: Sequence[Any], what: str) -> int | float | None:
    """Return the number that a state has on all ranks; None if the state is a vector.

    Raises: ValueError if the ranks have different numbers; TypeError for any other object.
    """
    numbers = []
    for file, value in zip(files, values, strict=True):
        if isinstance(value, Record):
            stored = file.tensor(value)
            if stored.shape:
                return None
            value = stored.read().item()
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise TypeError(f"{what} is a {kind_of(value)}")
        numbers.append(value)
    if any(number != numbers[0] for number in numbers):
        raise ValueError(
            f"{files[0].path} has {numbers[0]} as {what}, unlike another rank's file: the folder "
            "has files of several saves"
        )
    return numbers[0]


def match_groups(
    optimizer: Optimizer,
    hyper: Sequence[Mapping[str, Any]] | None,
    group_of: Mapping[str, int],
    label: str,
) -> list[dict[str, Any]]:
    """Return for each group of an optimizer the checkpoint's hyper-parameters of the parameters in
    the group. Changes no group.

    Raises: ValueError if the parameters of a group have different hyper-parameters in the
    checkpoint, or if the optimizer does not support their values.
    """
    taken = []
    for group in optimizer.param_groups:
        records = [at_rest.infinity_link.param for at_rest in group["params"]]
        indices: dict[int, str] = {}
        for key in (key for record in records for key in record.keys if key in group_of):
            indices.setdefault(group_of[key], key)
        values = [hyper[index] for index in indices] if hyper is not None else []
        if any(other != values[0] for other in values[1:]):
            names = " and ".join(list(indices.values())[:2])
            raise ValueError(
                f"{names} are in one parameter group, but in {label} in groups with different "
                "values: group them as there"
            )
        given = dict(values[0]) if values else {}
        # DeepSpeed's `eps` of parameters without Muon is AdamW's, which inf.Muon calls `adam_eps`.
        if given.get("use_muon") is False and "adam_eps" in group:
            given["adam_eps"] = given.pop("eps")
        for name, neutral in _NEUTRAL.items():
            # Without weight decay, decoupled decay and L2 decay are the same.
            idle = name == "decoupled_weight_decay" and not given.get("weight_decay")
            if name not in group and given.get(name, neutral) != neutral and not idle:
                raise ValueError(
                    f"{label} was computed with {name}={given[name]!r}, which {optimizer.title} "
                    "does not support: use inf.Elementwise with a class of torch.optim that does, "
                    "or load without opt="
                )
        # Schedulers of torch that resume from a step need `initial_lr`.
        mine = {
            name: value
            for name, value in given.items()
            if (name in group and name not in _IMPLEMENTATION) or name == "initial_lr"
        }
        if mine:
            try:
                optimizer.check_group({**group, **mine})
            except ValueError as error:
                raise ValueError(f"{label} has impossible hyper-parameters: {error}") from error
        taken.append(mine)
    return taken


def notes_on(hyper: Sequence[Mapping[str, Any]] | None, label: str) -> tuple[str, ...]:
    """Return notes on the parts of an optimizer that the checkpoint lacks, or that this library
    computes differently."""
    if hyper is None:
        return (f"{label} is elastic and has no hyper-parameters: those of the optimizer stay",)
    methods = {str(group["ns_method"]) for group in hyper if "ns_method" in group}
    return tuple(
        f"{label} was computed with ns_method={method!r}, here Newton-Schulz rounds otherwise"
        for method in sorted(methods - {"standard"})
    )


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise TypeError(f"a count is a {kind_of(value)}")
    return value


def _scaler(file: TorchFile, value: Any) -> dict[str, Any] | None:
    """Return the fields of a loss scaler from a pickle's record; None for a constant scale of 1,
    and for objects of other classes.
    """
    if not isinstance(value, Record) or not value.kind.endswith("LossScaler"):
        return None
    if not isinstance(value.state, dict):
        raise TypeError("the loss scaler has no state")
    found = {str(name): file.plain(each) for name, each in value.state.items()}
    numbers = [found.get("cur_scale")]
    if found.get("dynamic"):
        names = ("scale_factor", "scale_window", "cur_iter", "last_overflow_iter")
        numbers += [found.get(name) for name in names]
    if any(isinstance(each, bool) or not isinstance(each, (int, float)) for each in numbers):
        raise TypeError(f"the loss scaler has {listed(found)}")
    if found.get("dynamic") and (found["scale_window"] < 1 or found["scale_factor"] <= 1):
        raise TypeError("the loss scaler has the growth factor 1 or less")
    return None if not found.get("dynamic") and found["cur_scale"] == 1 else found
