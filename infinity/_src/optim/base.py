"""Base of all optimizers over states at rest: parameter groups, the step, the manifest.

An optimizer is an ordinary `torch.optim.Optimizer`, whose moments and masters rest on the tiers of
the policy. A subclass names the moments of a parameter, checks hyper-parameters, and makes the
scalars of an update (one HYPER record for each parameter). The pipeline runs the update.
`Elementwise` uses a class of torch in place of HYPER records and pipeline.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy.typing as npt
import torch

from infinity._src.base.torch_compat import OptimizerBase
from infinity._src.base.wording import TRAINERS
from infinity._src.config.policy import Policy
from infinity._src.kernels.random_bits import rounding_key
from infinity._src.optim.state_access import States
from infinity._src.optim.step import StepPipeline
from infinity._src.optim.step_consensus import nonfinite_anywhere, refuse_nonfinite
from infinity._src.optim.update_jobs import Work
from infinity._src.params.accumulator import AccumulatorState, is_exact
from infinity._src.params.reduce import GradReducer
from infinity._src.params.sharded_param import ShardedParameter
from infinity._src.params.unit import Flat, Param
from infinity._src.params.unshard import Unsharder
from infinity.aio import Format

MANIFEST_VERSION = 1

LogEntry = tuple[str, float]


class StepEngine(Protocol):
    """The engine of a parameter, as an optimizer sees it."""

    policy: Policy
    pipeline: StepPipeline
    unsharder: Unsharder
    gradients: GradReducer
    states: States
    on_nonfinite: str

    def register(self, optimizer: Optimizer, params: list[Param]) -> None:
        """Give these parameters optimizer states, as many moments as `optimizer.moments_of(param)`
        names. Blocks.

        Raises: ValueError if another optimizer owns one of them; BudgetError.
        """

    def await_unfreezing(self, optimizer: Optimizer, params: list[Param]) -> None:
        """Call `optimizer.make_states` for these frozen parameters once they are unfrozen, before
        the next training forward."""

    def check_open(self) -> None:
        """Raise EngineClosed after `close`, or the fault of a background update."""


class Optimizer(OptimizerBase, abc.ABC):
    """Base of the optimizers over states at rest. Build one of its subclasses.

    params: `model.parameters()` of models given to `inf.offload`, or parameter groups of them.
    defaults: hyper-parameters of groups that do not set them. Schedulers may change them in
    `param_groups` at any time.

    The constructor makes the optimizer states, all zero, and blocks until they are written to their
    tiers. A frozen parameter has no states: they are made after it is unfrozen, in the next
    training forward or step. `state_dict()` contains hyper-parameters and step counts. The tensors
    stay on their tiers (`inf.handle(model).optimizer_state(p)`).

    Raises: ValueError for hyper-parameters out of range, and for parameters that are not offloaded
    or that another optimizer owns; BudgetError when states and gradients do not fit the policy's
    `ram`.
    """

    _step_supports_amp_scaling = False
    shares_format = False
    """True if a parameter may rest in a format with more moments than the optimizer has for it."""

    def scratch_bytes(self, formats: Mapping[Flat, Format]) -> int:  # noqa: ARG002
        """Return the bytes that a step needs in addition to the executor's, for flats in these
        formats. The policy's `ram` includes them.
        """
        return 0

    def __init__(self, params: Iterable[Any], defaults: dict[str, Any]) -> None:
        self._records: dict[int, Param] = {}
        self._groups: dict[Param, dict[str, Any]] = {}
        # Moment names of each parameter when its states were made: they fix the states' format.
        self._moments: dict[Param, tuple[str, ...]] = {}
        self._engines: dict[StepEngine, list[Param]] = {}
        # Parameters of the groups without states, frozen since they were added, in order.
        self.stateless: dict[Param, None] = {}
        self._built = False
        # torch adds the groups here. Afterwards one call makes the states of all groups of an
        # engine: a second call would move states that were just placed.
        super().__init__(params, defaults)
        self._built = True
        self._admit(list(self.stateless))

    # -- declarations of a subclass ----------------------------------------------------------------

    @abc.abstractmethod
    def moment_names(self, group: dict[str, Any], param: Param) -> tuple[str, ...]:
        """Return the names of the moments of one of the group's parameters, in the order of their
        sections.
        """

    @abc.abstractmethod
    def check_group(self, group: dict[str, Any]) -> None:
        """Raise ValueError for a hyper-parameter out of range."""

    def check_engine(self, engine: StepEngine) -> None:
        """Raise ValueError if this optimizer cannot work under the engine's policy."""

    @abc.abstractmethod
    def hyper(
        self, param: Param, state: dict[str, Any], log: Sequence[LogEntry]
    ) -> npt.NDArray[Any]:
        """Return the HYPER record of one update.

        state: of the parameter; its `step` includes this update.
        log: factors that the loop applied to the gradient since backward accumulated it.
        """

    def first_hyper(
        self,
        param: Param,  # noqa: ARG002
        log: Sequence[LogEntry],  # noqa: ARG002
    ) -> npt.NDArray[Any] | None:
        """Return the HYPER record of the first of two updates, for an optimizer of whole matrices;
        None: a step has one update. log: see `hyper`.
        """
        return None

    @property
    def title(self) -> str:
        """Name of this optimizer in messages and manifests."""
        return type(self).__name__

    def counts_steps(self, param: Param) -> bool:  # noqa: ARG002
        """Return whether the parameter's update depends on its count of steps."""
        return True

    def torch_groups(self) -> list[dict[str, Any]]:
        """Return the parameter groups with all keys of the torch.optim class of the same name, so
        that it can load them."""
        defaults = torch_defaults(self.title)
        return [{**defaults, **group} for group in self.param_groups]

    # -- groups ------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as in torch. Its parameters get their states at once if the optimizer is
        built. Blocks. Raises: what the constructor raises; the group is not added then.
        """
        # torch checks first that no parameter is in two groups.
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            self.check_group(group)
            added = [self._take(param, group) for param in group["params"]]
            if self._built:
                self._admit(added)
        except BaseException:
            # Leave the optimizer unchanged. Delete by position: comparing groups would compare
            # parameters' values.
            del self.param_groups[-1]
            for key in {id(param) for param in group["params"]} & self._records.keys():
                record = self._records.pop(key)
                self.stateless.pop(record, None)
                del self._groups[record], self._moments[record]
            for engine, held in self._engines.items():
                self._engines[engine] = [param for param in held if param in self._groups]
            raise

    def _take(self, at_rest: torch.Tensor, group: dict[str, Any]) -> Param:
        """Record a parameter of a group, without states. Raises: ValueError if it is not offloaded.
        """
        if not isinstance(at_rest, ShardedParameter):
            raise ValueError(
                f"a parameter of shape {tuple(at_rest.shape)} is not offloaded; call "
                "inf.offload(model, policy) before building the optimizer (and after "
                "get_peft_model, so that adapters are offloaded, too), and give other "
                "parameters to an optimizer of torch"
            )
        record = at_rest.infinity_link.param
        moments = self.moment_names(group, record)
        self._records[id(at_rest)] = record
        self._groups[record], self._moments[record] = group, moments
        self.stateless[record] = None
        return record

    def _admit(self, params: Sequence[Param]) -> None:
        """Make the states of the parameters that require a gradient. The states of frozen ones are
        made when they are unfrozen."""
        self.make_states([param for param in params if param.at_rest.requires_grad])
        for engine, frozen in _by_engine(p for p in params if p in self.stateless).items():
            engine.await_unfreezing(self, frozen)

    def make_states(self, params: Iterable[Param]) -> None:
        """Make the states of parameters that have none, all zero. Blocks. Collective.

        Raises: what the constructor raises; then no parameter of the model that failed gets states.
        """
        by_engine = _by_engine(params)
        for engine in by_engine:
            self.check_engine(engine)
        for engine, held in by_engine.items():
            for param in held:
                # The group may have changed since the parameter was added.
                self._moments[param] = self.moment_names(self._groups[param], param)
            engine.register(self, held)
            self._engines.setdefault(engine, []).extend(held)
            for param in held:
                del self.stateless[param]

    @property
    def params_with_states(self) -> list[Param]:
        """Parameters with states: those of the groups, except parameters frozen since they were
        added."""
        return [param for params in self._engines.values() for param in params]

    def group_of(self, param: Param) -> dict[str, Any]:
        """Return the parameter's current group."""
        return self._groups[param]

    def moments_of(self, param: Param) -> tuple[str, ...]:
        """Return the names of the parameter's moments, in the order of their sections."""
        return self._moments[param]

    # -- the step ----------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update every parameter that has a gradient. Blocks until the previous step's updates are
        done, and returns before those of this step are.

        Raises: NonFiniteGradient as the policy's `on_nonfinite` says, before any state has changed;
        the fault of an earlier background update.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                # Before every check: as in torch, the closure runs forward and backward.
                loss = closure()
        self.refresh_groups()
        # Unfrozen parameters may have a gradient without a training forward: the loop assigned it.
        self.make_states([p for p in self.stateless if p.at_rest.grad is not None])
        # All engines are checked before any is updated: a step updates every model, or none.
        live: dict[StepEngine, list[Param]] = {}
        proceeds = False
        try:
            proceeds = self._check_all(live)
        finally:
            if not proceeds:
                for engine in self._engines:
                    engine.pipeline.cancel_step()
        if proceeds:
            self._update_all(live)
        return loss

    def _check_all(self, live: dict[StepEngine, list[Param]]) -> bool:
        """Check every engine before any update. Returns whether the step is taken. Adds the
        parameters of each engine that have a gradient to `live`.
        """
        proceeds = True
        for engine, params in self._engines.items():
            engine.check_open()
            live[engine] = [param for param in params if self._has_gradient(engine, param)]
            # Ranks compare first: every later check is a collective over the same parameters.
            engine.pipeline.check_ranks_agree(self, live[engine])
            if live[engine]:
                engine.pipeline.settle()
            engine.pipeline.check_idle(live[engine])
            # All gradients are checked before any state changes, so a refused step has no effect.
            bad = nonfinite_anywhere(engine.pipeline.comm, live[engine])
            proceeds = refuse_nonfinite(bad, engine.on_nonfinite) and proceeds
            if live[engine]:
                # Waits for the updates of the step before, and raises their faults before counts
                # advance.
                engine.pipeline.begin()
        return proceeds

    def make_matrices(
        self,
        work: Mapping[Param, Work],  # noqa: ARG002
        gradients: Mapping[Param, torch.Tensor],  # noqa: ARG002
        *,
        owned: Container[Param],  # noqa: ARG002
    ) -> dict[Param, torch.Tensor]:
        """See `UpdatingOptimizer.make_matrices`."""
        raise AssertionError(f"{self.title} has one update")

    def work_of(self, params: Sequence[Param]) -> list[Work]:
        """Return the updates of these parameters with their present gradients, and advance their
        step counts.

        Raises: any error of a hyper-parameter that is not a number; then no count has advanced.
        """
        work, states = self.preview(params)
        for param, state in zip(params, states, strict=True):
            self.state[param.at_rest].update(state)
        return work

    def preview(self, params: Sequence[Param]) -> tuple[list[Work], list[dict[str, Any]]]:
        """Return the result that `work_of` would give now, and each parameter's state with its
        count advanced. Changes nothing.
        """
        work, states = [], []
        for param in params:
            assert param.grad is not None
            # A copy: counts advance only after the rows of all parameters were made.
            state = {**self.state[param.at_rest]}
            state["step"] = step = state.get("step", 0) + 1
            log = [entry for entry in param.grad.log if not is_exact(entry)]
            row = self.hyper(param, state, log)
            # The key depends on step and parameter, not on time or thread, so that stochastic
            # rounding gives the same bits in every run.
            key = row["key"] = rounding_key(engine_of(param).policy.seed, step, param.name)
            first = self.first_hyper(param, log)
            if first is not None:
                first["key"] = key
            work.append(Work(param, row, first))
            states.append(state)
        return work, states

    def _update_all(self, live: dict[StepEngine, list[Param]]) -> None:
        """Update these parameters of each engine. All have gradients that passed the check, and no
        update is pending.
        """
        # Counts before the step: with two generations an undo restores them.
        before = {
            param: dict(self.state[param.at_rest]) for params in live.values() for param in params
        }
        work = self.work_of(list(before))
        for engine, params in live.items():
            held = set(params)
            if engine.pipeline.transaction is not None:
                engine.pipeline.transaction.remember(
                    self.state, {param.at_rest: before[param] for param in params}
                )
            engine.pipeline.submit([item for item in work if item.param in held], optimizer=self)

    def refresh_groups(self) -> None:
        """Look up each parameter's group again: trainers replace and rearrange `param_groups`, and
        callbacks that unfreeze layers add parameters without `add_param_group`.

        Raises: ValueError for a parameter that is not offloaded, or is no longer in any group.
        """
        found, added = 0, []
        for group in self.param_groups:
            for at_rest in group["params"]:
                record = self._records.get(id(at_rest))
                if record is None:
                    added.append(record := self._take(at_rest, group))
                self._groups[record] = group
                found += 1
        if added:
            self._admit(added)
        if found < len(self._groups):
            held = {id(each) for group in self.param_groups for each in group["params"]}
            gone = next(param for param in self._groups if id(param.at_rest) not in held)
            raise ValueError(
                f"{gone.name} is in no parameter group any more, but still has states: freeze it "
                "with requires_grad_(False) instead, or build a new optimizer"
            )

    def _has_gradient(self, engine: StepEngine, param: Param) -> bool:
        if param.grad is None and param.at_rest.grad is None:
            return False
        accumulator = engine.gradients.accumulator(param)
        # The loop may have assigned or cleared `p.grad` since backward; `reconcile` adopts that.
        return accumulator.reconcile(param.at_rest.grad) is AccumulatorState.HELD

    # -- single states -----------------------------------------------------------------------------

    def scalars(self, param: Param) -> dict[str, Any]:
        """Return the parameter's states that are not tensors of its shape: its step count."""
        return {"step": self.state[param.at_rest].get("step", 0)}

    def set_scalar(self, param: Param, name: str, value: Any) -> None:
        """Set a state of `scalars`. Raises: KeyError for another name; ValueError for a value out
        of range."""
        if name != "step":
            raise KeyError(name)
        if type(value) is not int or value < 0:
            raise ValueError(f"step={value!r} of {param.name}: give a whole number, 0 or more")
        self.state[param.at_rest]["step"] = value

    def moment_written(self, param: Param, name: str) -> None:
        """Note that the user wrote a moment (`optimizer_state(p)[name] = tensor`)."""

    # -- the manifest ------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return a manifest: parameter groups by position, as in torch, and for each parameter its
        name and step count.

        Moments and masters are not included: they stay with the engine. Does not block.
        """
        packed = super().state_dict()
        packed["state"] = {
            index: {"name": self._records[id(param)].name, **self.scalars(self._records[id(param)])}
            for index, param in enumerate(
                param for group in self.param_groups for param in group["params"]
            )
        }
        packed["infinity_manifest"] = MANIFEST_VERSION
        packed["infinity_optimizer"] = self.title
        return packed

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load hyper-parameters from a manifest of this optimizer's parameters.

        The tensors stay those of the engine, so the manifest must have the same step counts.

        Raises: ValueError for a manifest of another optimizer, of other parameters or other step
        counts, and for the state of an optimizer of torch.
        """
        if state_dict.get("infinity_manifest") != MANIFEST_VERSION:
            raise ValueError(
                f"this is no manifest of infinity.{self.title}; write moments of another optimizer "
                "with inf.handle(model).optimizer_state(parameter)[name] = tensor"
            )
        writer = state_dict.get("infinity_optimizer", self.title)
        if writer != self.title:
            raise ValueError(
                f"this is a manifest of infinity.{writer}; load it into infinity.{writer}, not "
                f"into {self.title}"
            )
        here = self.state_dict()
        for index, entry in state_dict["state"].items():
            mine = here["state"].get(index)
            # With another count the bias correction would be wrong for the engine's moments.
            if mine != entry:
                raise ValueError(
                    f"the manifest says {entry} for parameter {index}, the engine holds {mine}: "
                    "moments are not in a manifest, so it loads only at the step at which it was "
                    "written. inf.save(model, optimizer, directory) keeps them, and after "
                    "inf.restore(model, optimizer, directory) the manifest loads. A trainer does "
                    f"both when it saves and resumes, with {TRAINERS}"
                )
        if len(state_dict["state"]) != len(here["state"]):
            raise ValueError(
                f"the manifest names {len(state_dict['state'])} parameters, not "
                f"{len(here['state'])}"
            )
        groups = state_dict["param_groups"]
        if [group["params"] for group in groups] != [
            group["params"] for group in here["param_groups"]
        ]:
            raise ValueError("the manifest's parameter groups are not those of this optimizer")
        for group, saved in zip(self.param_groups, groups, strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})


def engine_of(param: Param) -> StepEngine:
    """Return the engine that owns a parameter."""
    engine: StepEngine = param.unit.engine
    return engine


def _by_engine(params: Iterable[Param]) -> dict[StepEngine, list[Param]]:
    found: dict[StepEngine, list[Param]] = {}
    for param in params:
        found.setdefault(engine_of(param), []).append(param)
    return found


def torch_defaults(name: str) -> dict[str, Any]:
    """Return the hyper-parameters of a class of torch.optim; {} if there is none of this name."""
    like = getattr(torch.optim, name, None)
    # torch's Muon takes only matrices.
    return like([torch.zeros(1, 1)]).defaults if isinstance(like, type) else {}


def check_range(
    group: dict[str, Any], rules: Mapping[str, Callable[[Any], bool]], says: str
) -> None:
    """Raise ValueError that names value and range, unless each named value of `group` satisfies its
    rule.
    """
    for name, rule in rules.items():
        try:
            right = rule(group[name])
        except (TypeError, ValueError):
            right = False
        if not right:
            raise ValueError(f"{name}={group[name]!r} is out of range; {says}")


def not_negative(value: Any) -> bool:
    """Return True for a number, or a tensor of one, that is at least 0."""
    return float(value) >= 0


def two_betas(value: Any) -> bool:
    """Return True for two numbers in [0, 1)."""
    return len(value) == 2 and all(0 <= beta < 1 for beta in value)
