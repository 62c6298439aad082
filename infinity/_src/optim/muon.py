"""Muon, and other optimizers whose update needs whole matrices.

    opt.step()      units 0, 1, 2 ...   momentum of each chunk read, changed, written (native
                                        threads); momentum and gradient give the matrix, which
                                        replaces the gradient in RAM
                    unit 0              matrix -> device -> orthogonalized -> RAM
                    unit 0              second update submitted, which reads the orthogonalized
                                        matrix as its gradient
    next forward    units 0, 1, 2 ...   masters read, changed, handed over, written

Both updates leave out the sections that they do not need: in `exact` the first one reads and writes
the momentum (4 B per parameter), the second one the master (4 B). So a step reads and writes 8 B
per parameter, where AdamW has 12. Besides the memory of gradients a step needs only the scratch of
one matrix.

The first update overwrites the gradient, so the step consumes `p.grad`, as with update="backward".
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any

import numpy.typing as npt
import torch

from infinity._src.base.sizes import format_size
from infinity._src.config.policy import Policy
from infinity._src.distributed.comm_streams import PendingCollective
from infinity._src.distributed.transport import Message
from infinity._src.kernels.hyper import (
    hyper_row_adamw,
    hyper_row_muon,
    hyper_row_muon_momentum,
)
from infinity._src.kernels.newton_schulz import (
    COEFFICIENTS,
    STEPS,
    STEPS_MAX,
    orthogonalize,
)
from infinity._src.optim.base import (
    LogEntry,
    Optimizer,
    StepEngine,
    check_range,
    engine_of,
    not_negative,
    torch_defaults,
    two_betas,
)
from infinity._src.optim.step import StepPipeline, half_done
from infinity._src.optim.step_consensus import first_anywhere
from infinity._src.optim.update_jobs import Work, memory_of_matrix
from infinity._src.optim.whole_matrices import (
    Matrix,
    UnitMatrices,
    device_bytes,
    is_cut,
    is_hidden_matrix,
    is_shaped,
    matrices_of,
    scratch_bytes,
)
from infinity._src.params.unit import Flat, Param, Unit
from infinity.aio import Format, Ticket
from infinity.errors import AioError, MemoryLimitError, StateInvalid, StepUndone

CPU = torch.device("cpu")

ADJUST_LR: Mapping[str | None, Callable[[int, int], float]] = {
    None: lambda rows, columns: math.sqrt(max(1, rows / columns)),
    "original": lambda rows, columns: math.sqrt(max(1, rows / columns)),
    "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
}
"""Rules for the factor of the learning rate, by name, as functions of a matrix's rows and columns.
"""


class Matrixwise(Optimizer):
    """An optimizer whose update is a function of whole matrices.

        m = m * momentum + g * (1 - momentum)
        u = g * (1 - momentum) + m * momentum with nesterov, else m
        o = transform(u as bf16)
        p = p * (1 - lr * weight_decay) - lr * o

    inf.Matrixwise(transform, params, lr=...) takes any function of a bf16 matrix [m, n] on the
    compute device that returns a bf16 matrix of that shape and depends on nothing else. Fused
    experts [experts, m, n] are one matrix each.

    Parameters that are no hidden matrices get AdamW in the same step, with `betas` and `adam_eps`:
    vectors and numbers, biases of experts, embeddings (`nn.Embedding`, and weights tied to one),
    heads (modules whose name is in `whole_matrices.HEADS`), and convolutions. A group's
    `matrixwise` True or False decides for its parameters instead. A group's `transform_on="cpu"`
    transforms its matrices in RAM, if the device ("device") has no room for them.

    `step()` blocks until the matrices are computed; the update of the masters overlaps with the
    next forward. The step consumes the gradients of matrices: clear them by zero_grad() before the
    next backward.

    Raises: as `AdamW`; MemoryLimitError where the device has too little free memory for a matrix,
    in `step()` before any state has changed; ValueError also for matrixwise=True and a parameter
    that is no matrix or a tile of one, for update_on other than "cpu", and for grads="nvme" with
    gradients in fp16.
    """

    shares_format = True

    def __init__(
        self,
        transform: Callable[[torch.Tensor], torch.Tensor],
        params: Iterable[Any],
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        betas: tuple[float, float] = (0.9, 0.95),
        adam_eps: float = 1e-8,
    ) -> None:
        self._transform = transform
        self._begin(
            params,
            {
                "lr": lr,
                "weight_decay": weight_decay,
                "momentum": momentum,
                "nesterov": nesterov,
                "betas": betas,
                "adam_eps": adam_eps,
            },
        )

    def _begin(self, params: Iterable[Any], defaults: dict[str, Any]) -> None:
        self._owners: dict[StepEngine, dict[Param, list[Matrix]]] = {}
        chosen = {"matrixwise": None, "transform_on": "device"}
        Optimizer.__init__(self, params, {**defaults, **chosen})

    @property
    def title(self) -> str:
        made = self._transform
        return f"Matrixwise({getattr(made, '__name__', type(made).__name__)})"

    # -- what a subclass may change ----------------------------------------------------------------

    def transform(
        self,
        matrix: torch.Tensor,
        group: dict[str, Any],  # noqa: ARG002
    ) -> torch.Tensor:
        """Return the update's direction: bf16 [m, n], as `matrix`. group: of the parameter."""
        return self._transform(matrix)

    def step_size(
        self,
        group: dict[str, Any],
        rows: int,  # noqa: ARG002
        columns: int,  # noqa: ARG002
    ) -> float:
        """Return the factor of the direction."""
        return float(group["lr"])

    # -- declarations ------------------------------------------------------------------------------

    def check_group(self, group: dict[str, Any]) -> None:
        rules = {
            "lr": not_negative,
            "weight_decay": not_negative,
            "momentum": lambda value: 0 <= float(value) < 1,
            "betas": two_betas,
            "adam_eps": not_negative,
            "matrixwise": lambda value: value in (None, True, False),
            "transform_on": lambda value: value in ("device", "cpu"),
        }
        check_range(
            group,
            rules,
            "lr, weight_decay and adam_eps must be >= 0, momentum and betas in [0, 1), matrixwise "
            "True, False or None, transform_on 'device' or 'cpu'",
        )

    @staticmethod
    def check_policy(policy: Policy, title: str) -> None:
        """Raise ValueError for a policy under which an optimizer of whole matrices cannot step."""
        if policy.update_on != "cpu":
            raise ValueError(
                f"{title} has no kernels for update_on={policy.update_on!r}: use update_on='cpu', "
                "where matrices are transformed on the device nevertheless, or inf.AdamW"
            )

    def check_engine(self, engine: StepEngine) -> None:
        self.check_policy(engine.policy, self.title)

    def moment_names(self, group: dict[str, Any], param: Param) -> tuple[str, ...]:
        if is_matrix(param, group["matrixwise"]):
            return ("momentum_buffer",)
        return ("exp_avg", "exp_avg_sq")

    def updates_matrix(self, param: Param) -> bool:
        """Return whether the parameter is updated as matrices, and not by AdamW."""
        return len(self.moments_of(param)) == 1

    def counts_steps(self, param: Param) -> bool:
        """Return whether AdamW updates the parameter."""
        return not self.updates_matrix(param)

    def torch_groups(self) -> list[dict[str, Any]]:
        """Return groups of torch.optim.Muon, and after them groups of torch.optim.AdamW."""
        found = []
        for name, adamw in (("Muon", False), ("AdamW", True)):
            defaults = torch_defaults(name)
            other = self.defaults.keys() - defaults.keys()
            for group in self.param_groups:
                held = [self._records[id(at_rest)] for at_rest in group["params"]]
                params = [param.at_rest for param in held if self.counts_steps(param) is adamw]
                if params:
                    renamed = {"eps": group["adam_eps"]} if adamw else {}
                    made = {**defaults, **group, **renamed, "params": params}
                    found.append({key: made[key] for key in made if key not in other})
        return found

    def scratch_bytes(self, formats: Mapping[Flat, Format]) -> int:
        """Return the bytes of the scratch of one matrix on a CPU, in fp32; on several ranks of the
        whole matrices of the units that are exchanged at once; and of the copies of gradients that
        speculative updates read."""
        found = []
        for flat in formats:
            engine: StepEngine = flat.unit.engine
            there, world = flat.tensor.device.type != "cpu", engine.pipeline.world
            itemsize = (engine.policy.grad_dtype or flat.dtype).itemsize
            in_ram = self._shapes(
                param for param in flat.params if not (there and self._on_device(param))
            )
            scratch, exchanged, _ = scratch_bytes(in_ram, itemsize, 1 if there else world)
            _, _, copied = scratch_bytes(self._shapes(flat.params), itemsize, world)
            found.append((scratch, exchanged, copied * engine.policy.speculates))
        return sum(max(sizes) for sizes in zip(*found, strict=True))

    def first_hyper(self, param: Param, log: Sequence[LogEntry]) -> npt.NDArray[Any] | None:
        if not self.updates_matrix(param):
            return None
        group = self.group_of(param)
        return hyper_row_muon_momentum(
            momentum=float(group["momentum"]), nesterov=bool(group["nesterov"]), log=log
        )

    def hyper(
        self, param: Param, state: dict[str, Any], log: Sequence[LogEntry]
    ) -> npt.NDArray[Any]:
        group = self.group_of(param)
        lr, weight_decay = float(group["lr"]), float(group["weight_decay"])
        if not self.updates_matrix(param):
            return hyper_row_adamw(
                lr=lr,
                betas=group["betas"],
                eps=group["adam_eps"],
                weight_decay=weight_decay,
                step=state["step"],
                log=log,
            )
        rows, columns = param.shape[-2:]
        return hyper_row_muon(
            step_size=self.step_size(group, rows, columns), decay=1.0 - lr * weight_decay
        )

    # -- room on the device ------------------------------------------------------------------------

    def _shapes(self, params: Iterable[Param]) -> list[tuple[int, ...]]:
        """Return the shapes of the parameters among `params` that are updated as matrices."""
        held = (param for param in params if param in self._moments)
        return [tuple(param.shape) for param in held if self.updates_matrix(param)]

    def _on_device(self, param: Param) -> bool:
        return param in self._groups and self.group_of(param)["transform_on"] == "device"

    def _check_room(self, engine: StepEngine, params: Iterable[Param]) -> None:
        """Raise MemoryLimitError if the device has too little free memory for one of these
        matrices. Collective."""
        pipeline = engine.pipeline
        free = pipeline.device.free_bytes()
        if free is None:
            return
        needed = {}
        for param in params:
            if self.updates_matrix(param) and self._on_device(param):
                itemsize = (engine.policy.grad_dtype or param.dtype).itemsize
                exchanged = self._shapes(param.unit.params)
                needed[param] = device_bytes(param.shape, exchanged, itemsize, pipeline.world)
        flags = [size_bytes > free for size_bytes in needed.values()]
        lacks = first_anywhere(pipeline.comm, list(needed), flags)
        if lacks is not None:
            device = pipeline.device.torch_device
            raise MemoryLimitError(
                f"a matrix of {lacks.name}, of shape {tuple(lacks.shape)}, needs "
                f"{format_size(needed[lacks])} on {device} to be transformed, and rank "
                f"{pipeline.rank} has {format_size(free)} free: make micro-batches smaller, or set "
                "transform_on='cpu' in its parameter group, which transforms it in RAM",
                limit=f"free memory of {device}",
                needed_bytes=needed[lacks],
                left_bytes=free,
            )

    # -- the step ----------------------------------------------------------------------------------

    def _check_all(self, live: dict[StepEngine, list[Param]]) -> bool:
        proceeds = super()._check_all(live)
        for engine, params in live.items():
            # With updates in backward the matrices are transformed already.
            if proceeds and not engine.policy.consumes_grads:
                self._check_room(engine, params)
        return proceeds

    def refresh_groups(self) -> None:
        super().refresh_groups()
        # Loops may change groups: check the values before any momentum changes.
        for group in self.param_groups:
            self.check_group(group)
            chosen = group["matrixwise"]
            if chosen is None:
                continue
            held = [self._records[id(at_rest)] for at_rest in group["params"]]
            changed = [
                param
                for param in held
                if param not in self.stateless and self.updates_matrix(param) != chosen
            ]
            if changed:
                raise ValueError(
                    f"matrixwise={chosen} for {changed[0].name}, which has the states of "
                    f"matrixwise={not chosen}: set it before the optimizer is built"
                )

    def make_matrices(
        self,
        work: Mapping[Param, Work],
        gradients: Mapping[Param, torch.Tensor],
        *,
        owned: Container[Param],
    ) -> dict[Param, torch.Tensor]:
        """Update momenta, and transform the matrices; see `UpdatingOptimizer.make_matrices`."""
        engine = engine_of(next(iter(work)))
        pipeline = engine.pipeline
        fault: AioError | StateInvalid | None = None
        found: dict[Param, torch.Tensor] = {}
        memory: dict[Param, torch.Tensor] = {}
        try:
            for turn in _turns(engine, work):
                memory = {
                    param: _memory(param, gradients.get(param), owned=param in owned)
                    for _, params in turn
                    for param in params
                }
                parts = {param: memory_of_matrix(part) for param, part in memory.items()}
                # Submit all first updates before the transformations, so that the drives never
                # wait for a matrix.
                started = [
                    (unit, pipeline.start(unit, _firsts(work, params), memory, first=True))
                    for unit, params in turn
                ]
                self._transform_units(engine, started, parts)
                found.update(parts)
            # The second updates read these matrices in the chunks' `grad` sections.
            spilled = [param for param in work if param in owned and param not in gradients]
            for param in spilled:
                del found[param]
            units = {param.unit for param in spilled}
            if units:
                # Several units at once: a flush of one looks at the flats of all.
                engine.gradients.flush_spilled(units.pop() if len(units) == 1 else None)
        except (AioError, StateInvalid) as error:
            fault = error
        except StepUndone:
            # A submission met the fault of an earlier update, and the states are restored.
            raise
        except BaseException as error:
            # Native threads may still write there.
            pipeline.retain(memory.values())
            pipeline.set_fault(half_done(error))
            raise
        pipeline.end_updates(fault)
        return found

    def _transform_units(
        self,
        engine: StepEngine,
        started: Sequence[tuple[Unit, Ticket]],
        parts: Mapping[Param, torch.Tensor],
    ) -> None:
        """Transform the matrices of units whose momenta are being updated. While a unit is
        transformed, the next unit's parts and the previous unit's results are exchanged."""
        pipeline = engine.pipeline
        owners = self._matrices(engine)
        arriving: list[tuple[Unit, UnitMatrices, PendingCollective | None]] = []
        leaving: list[tuple[UnitMatrices, PendingCollective | None]] = []
        # Raised at the end, since the other ranks wait for this rank's parts and results.
        faults: list[AioError | StateInvalid] = []

        def transform() -> None:
            unit, held, arrival = arriving.pop(0)
            if arrival is not None:
                arrival.wait()
            start = time.perf_counter()
            try:
                for matrix, whole in held.owned.items():
                    self._transform_matrix(matrix, whole)
            except StateInvalid as error:
                faults.append(error)
            pipeline.matrices_s += time.perf_counter() - start
            sends, receives = held.messages()
            leaving.append((held, _exchange(pipeline, f"results of {unit.name}", receives, sends)))

        def store() -> None:
            held, departure = leaving.pop(0)
            if departure is not None:
                departure.wait()
            held.store()

        for unit, ticket in started:
            try:
                ticket.wait()
            except AioError as error:
                faults.append(error)
            held = UnitMatrices(
                [each for param in unit.params if param in parts for each in owners[param]],
                parts,
                rank=pipeline.rank,
                world=pipeline.world,
                device=unit.flats[0].tensor.device if pipeline.world > 1 else CPU,
            )
            arrival = _exchange(pipeline, f"matrices of {unit.name}", *held.messages())
            arriving.append((unit, held, arrival))
            if len(arriving) > 1:
                transform()
            if len(leaving) > 1:
                store()
        while arriving:
            transform()
        while leaving:
            store()
        if faults:
            raise faults[0]

    def _matrices(self, engine: StepEngine) -> dict[Param, list[Matrix]]:
        """Return the matrices of all parameters of an engine: which parameters have a gradient must
        not change the owners."""
        found = self._owners.get(engine)
        if found is None:
            held = [param for param in self._engines[engine] if self.updates_matrix(param)]
            ordered = sorted(held, key=lambda param: param.index)
            found = self._owners[engine] = matrices_of(ordered, engine.pipeline.world)
        return found

    def make_states(self, params: Iterable[Param]) -> None:
        """Make states; see `Optimizer.make_states`. Raises: MemoryLimitError, too."""
        params = list(params)
        for engine in dict.fromkeys(map(engine_of, params)):
            self._check_room(engine, [param for param in params if param.unit.engine is engine])
        for param in params:
            policy = engine_of(param).policy
            half = (policy.grad_dtype or param.flat.dtype) is torch.float16
            # The section of a spilled gradient would hold a bf16 matrix as fp16.
            if (
                half
                and policy.grads == "nvme"
                and is_matrix(param, self.group_of(param)["matrixwise"])
            ):
                raise ValueError(
                    f"{self.title} does not spill gradients in fp16, as those of {param.name}: use "
                    "Policy(grad_dtype=torch.float32), or grads='cpu'"
                )
        super().make_states(params)
        self._owners.clear()

    def _transform_matrix(self, matrix: Matrix, whole: torch.Tensor) -> None:
        """Transform a matrix in place: 1-D, bf16 or fp32."""
        values = whole.view(matrix.shape)
        device = matrix.param.flat.tensor.device if self._on_device(matrix.param) else CPU
        there = values.to(device, torch.bfloat16)
        # Gradients were checked, but the momentum may overflow, or the user may have written one.
        checked = engine_of(matrix.param).on_nonfinite != "ignore"
        if checked and not bool(there.norm().isfinite()):
            raise StateInvalid(
                f"the momentum of {matrix.param.name} is not finite, and its matrix cannot be "
                "transformed; close this engine and start again from the last export"
            )
        made: Any = self.transform(there, self.group_of(matrix.param))
        is_tensor = isinstance(made, torch.Tensor)
        found = (made.dtype, tuple(made.shape)) if is_tensor else type(made).__name__
        if found != (torch.bfloat16, matrix.shape):
            raise ValueError(
                f"{self.title} made {found} of {matrix.param.name}'s matrix of {matrix.shape}: the "
                "function must return a torch.bfloat16 matrix of the same shape"
            )
        # A transposed view of `there` would read what it overwrites.
        values.copy_(made.contiguous())


class Muon(Matrixwise):
    """Muon for hidden matrices, and AdamW for all other parameters, of offloaded models.

        m = m * momentum + g * (1 - momentum)
        u = g * (1 - momentum) + m * momentum with nesterov, else m
        o = newton_schulz(u as bf16)
        p = p * (1 - lr * weight_decay) - lr * factor * o

    Arguments as in `torch.optim.Muon`: adjust_lr_fn "original" (also None) has the factor
    sqrt(max(1, rows / columns)), "match_rms_adamw" 0.2 * sqrt(max(rows, columns)), with which lr
    and weight_decay of AdamW fit. Products of Newton-Schulz are in bf16, on CPUs without
    instructions for that in fp32.

    `Matrixwise` says which parameters are hidden matrices, and describes `betas`, `adam_eps` and
    the errors.
    Sources: Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024);
    Liu et al., "Muon is Scalable for LLM Training" (arXiv 2502.16982).
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = COEFFICIENTS,
        eps: float = 1e-7,
        ns_steps: int = STEPS,
        adjust_lr_fn: str | None = None,
        betas: tuple[float, float] = (0.9, 0.95),
        adam_eps: float = 1e-8,
    ) -> None:
        self._begin(
            params,
            {
                "lr": lr,
                "weight_decay": weight_decay,
                "momentum": momentum,
                "nesterov": nesterov,
                "betas": betas,
                "adam_eps": adam_eps,
                "ns_coefficients": ns_coefficients,
                "eps": eps,
                "ns_steps": ns_steps,
                "adjust_lr_fn": adjust_lr_fn,
            },
        )

    @property
    def title(self) -> str:
        return type(self).__name__

    def check_group(self, group: dict[str, Any]) -> None:
        super().check_group(group)
        rules = {
            "ns_coefficients": lambda value: len([float(each) for each in value]) == 3,
            "eps": not_negative,
            "ns_steps": lambda value: type(value) is int and 0 <= value <= STEPS_MAX,
            "adjust_lr_fn": lambda value: value in ADJUST_LR,
        }
        check_range(
            group,
            rules,
            f"ns_coefficients are three numbers, eps is >= 0, ns_steps 0 to {STEPS_MAX}, "
            "adjust_lr_fn 'original', 'match_rms_adamw' or None",
        )

    def transform(self, matrix: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        return orthogonalize(
            matrix,
            coefficients=group["ns_coefficients"],
            steps=group["ns_steps"],
            eps=group["eps"],
        )

    def step_size(self, group: dict[str, Any], rows: int, columns: int) -> float:
        return float(group["lr"]) * ADJUST_LR[group["adjust_lr_fn"]](rows, columns)


def is_matrix(param: Param, chosen: bool | None) -> bool:
    """Return whether a parameter is updated as matrices. chosen: its group's `matrixwise`.

    Raises: ValueError for chosen=True and a parameter that is no matrix, or a tile of one.
    """
    if chosen:
        cut = is_cut(param.shape, param.whole_shape)
        if cut or not is_shaped(param.shape):
            raise ValueError(
                f"matrixwise=True for {param.name} of shape {tuple(param.shape)}: "
                + (
                    "a tile has only a part of its matrix; offload the model without tiling it"
                    if cut
                    else "only matrices [m, n] and stacks [experts, m, n] are updated so"
                )
            )
    if chosen is not None:
        return chosen
    return is_hidden_matrix(param.shape, param.whole_shape, param.names, param.sites)


def _turns(engine: StepEngine, params: Iterable[Param]) -> list[list[tuple[Unit, list[Param]]]]:
    """Return the units, with their parameters among `params`, in turns that are in flight together:
    one turn with all units, or, if gradients spill, a turn for each flat, which fits the memory for
    spilled gradients. The turns are the same on all ranks, even if ranks spill different gradients.
    """
    by_unit: dict[Unit, list[Param]] = {}
    for param in params:
        by_unit.setdefault(param.unit, []).append(param)
    ordered = [(unit, by_unit[unit]) for unit in engine.pipeline.next_order(list(by_unit))]
    if engine.policy.grads != "nvme":
        return [ordered]
    return [
        [(unit, held)]
        for unit, params in ordered
        for flat in unit.flats
        if (held := [param for param in params if param.flat is flat])
    ]


def _firsts(work: Mapping[Param, Work], params: Iterable[Param]) -> dict[Param, Work]:
    found = {}
    for param in params:
        first = work[param].first
        assert first is not None
        found[param] = Work(param, first)
    return found


def _memory(param: Param, gradient: torch.Tensor | None, *, owned: bool) -> torch.Tensor:
    """Return memory that holds a gradient and gets the matrix. gradient: None if it has spilled.
    owned: its memory may be overwritten."""
    if gradient is None:
        assert param.grad is not None
        gradient = param.grad.to_replace() if owned else param.grad.tensor
    return gradient if owned else gradient.clone()


def _exchange(
    pipeline: StepPipeline, what: str, sends: Sequence[Message], receives: Sequence[Message]
) -> PendingCollective | None:
    return pipeline.exchange(what, sends, receives) if pipeline.world > 1 else None
