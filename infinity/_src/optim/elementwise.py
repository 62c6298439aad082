"""Any elementwise class of torch.optim over stored states: the generic path, without a kernel.

    fetch chunks k+1, k+2   |  chunk k: decode, torch_class.step() on   |  store chunk k-1
    (executor's threads)    |  each parameter's slice, encode           |  (executor's threads)

The class gets a slice of the fp32 master as its parameter, the fp32 gradient, and slices of its
states. Numbers that the class has for the whole parameter stay in memory. With exact states the
results are those of fp32 masters in memory, bit for bit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy.typing as npt
import torch

from infinity._src.base.progress import ProgressLine
from infinity._src.kernels.random_bits import rounding_key
from infinity._src.optim.base import LogEntry, Optimizer, StepEngine
from infinity._src.optim.state_access import decode_values, encode_values, span_sections
from infinity._src.optim.step import half_done
from infinity._src.params.chunk_pipeline import (
    BUFFERS,
    READ_AHEAD,
    ChunkBuffer,
    ChunkPipeline,
    ParamSpan,
    spans_of,
)
from infinity._src.params.state_store import ShardRecords
from infinity._src.params.unit import Flat, Param
from infinity.aio import Format
from infinity.errors import AioError


@dataclass
class _ChunkUpdate:
    """One chunk of a step, and the parts of parameters in it."""

    records: ShardRecords
    chunk: int
    spans: list[ParamSpan]

    @property
    def sections(self) -> range:
        """Sections that are read and written: all except spilled gradients."""
        return range(self.records.format.written_count)

    @property
    def size_bytes(self) -> int:
        numel = self.records.flat.layout.chunks[self.chunk].numel
        return sum(self.records.sections[index].size_bytes(numel) for index in self.sections)


@dataclass
class _Numbers:
    """Numbers of the class for one parameter, before this step (None: no step has been taken) and
    after it."""

    before: dict[str, Any] | None
    after: dict[str, Any] | None = None


class Elementwise(Optimizer):
    """An elementwise class of torch.optim for the parameters of offloaded models.

    inf.Elementwise(torch.optim.Adagrad, model.parameters(), lr=1e-2) takes any class whose update
    of an element depends on that element alone, with up to three states per element: Adagrad,
    RMSprop, Adadelta, Adamax, NAdam, RAdam, ASGD, Rprop, Adam (also amsgrad) and the user's
    classes. The class is probed first: it runs a few steps on a small parameter, and is refused,
    with the reason, if an element depends on others. The probe does not detect behaviour that
    begins after these steps, or only with larger parameters.

    `step()` blocks until the update is done. Prefer AdamW, SGD and Lion where possible: they have
    kernels, and overlap with the next forward. Raises: as `AdamW`; ValueError also for
    Policy(state="compact"), update_on other than "cpu", and update modes that update outside of
    `step()`.
    """

    def __init__(
        self, torch_class: type[torch.optim.Optimizer], params: Iterable[Any], **settings: Any
    ) -> None:
        self._class = torch_class
        self._settings = settings
        self._traits: dict[Param, Traits] = {}
        self._probed: dict[str, Traits] = {}
        super().__init__(params, defaults_of(torch_class, settings))

    @property
    def title(self) -> str:
        return f"Elementwise({self._class.__name__})"

    # -- traits of the class, found by probing -----------------------------------------------------

    def check_group(self, group: dict[str, Any]) -> None:
        self._probe(group)

    def moment_names(self, group: dict[str, Any], param: Param) -> tuple[str, ...]:  # noqa: ARG002
        """Return the class's names of its states with one value per element."""
        return self._probe(group).moments

    def _probe(self, group: dict[str, Any]) -> Traits:
        shown = repr({key: value for key, value in group.items() if key != "params"})
        # Probing runs the class some 30 times, so groups with the same values share a result.
        if shown not in self._probed:
            self._probed[shown] = probe(self._class, group, self._settings)
        return self._probed[shown]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; see `Optimizer.add_param_group`."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for at_rest in group["params"]:
            self._traits[self._records[id(at_rest)]] = self._probe(group)

    def check_engine(self, engine: StepEngine) -> None:
        policy = engine.policy
        if policy.state == "compact":
            raise ValueError(
                "state='compact' keeps moments in 8 bits, whose map fits only moments of AdamW, "
                f"SGD and Lion; use state='exact' or 'bf16' with {self.title}"
            )
        if policy.update_on != "cpu":
            raise ValueError(
                f"update_on={policy.update_on!r} has kernels for AdamW, SGD and Lion; with "
                f"{self.title} use update_on='cpu'"
            )
        if not policy.updates_in_step:
            raise ValueError(
                f"update={policy.update!r} needs an update that runs in native threads; "
                f"{self.title} runs in Python: use update='deferred', or AdamW, SGD or Lion"
            )

    def scratch_bytes(self, formats: Mapping[Flat, Format]) -> int:
        """Return the bytes of the buffers, and of one chunk in fp32 with its gradient and the
        class's temporaries."""
        chunks = [
            (form, flat.layout.chunks.numel_max) for flat, form in formats.items()
        ]
        whole = [
            sum(section.size_bytes(numel) for section in form.sections) for form, numel in chunks
        ]
        wide = [4 * numel * (2 * form.count + 4) for form, numel in chunks]
        return BUFFERS * max(whole, default=0) + max(wide, default=0)

    # -- numbers -----------------------------------------------------------------------------------

    def scalars(self, param: Param) -> dict[str, Any]:
        numbers = self.state[param.at_rest].get("numbers") or {}
        shown = {name: _number(numbers.get(name)) for name in self._traits[param].scalars}
        return {**shown, **super().scalars(param)}

    def set_scalar(self, param: Param, name: str, value: Any) -> None:
        """Set a state of `scalars`. A parameter without a step counts as begun once one number or
        moment was written; then all numbers must be set before the next step."""
        state, template = self.state[param.at_rest], self._traits[param].scalars
        if name == "step":
            super().set_scalar(param, name, value)
        if name in template:
            numbers = state.setdefault("numbers", {})
            like = template[name]
            if isinstance(like, torch.Tensor):
                numbers[name] = torch.full_like(like, float(value))
            else:
                numbers[name] = value

    def moment_written(self, param: Param, name: str) -> None:  # noqa: ARG002 - whichever it is
        """Note that the user wrote a moment: the class must not initialize the states again."""
        self.state[param.at_rest].setdefault("numbers", {})

    def _numbers(self, param: Param) -> _Numbers:
        before = self.state[param.at_rest].get("numbers")
        missing = (
            []
            if before is None
            else [name for name in self._traits[param].scalars if name not in before]
        )
        if missing:
            raise ValueError(
                f"states of {param.name} were written before its first step, but not "
                f"{', '.join(missing)}: assign optimizer_state(parameter)[{missing[0]!r}] too"
            )
        return _Numbers(before)

    # -- the step ----------------------------------------------------------------------------------

    def hyper(
        self,
        param: Param,
        state: dict[str, Any],  # noqa: ARG002
        log: Sequence[LogEntry],  # noqa: ARG002
    ) -> npt.NDArray[Any]:
        """Refuse: this class has no kernel, and update modes that need one refuse it."""
        raise AssertionError(f"{self.title} has no kernel for {param.name}")

    def _update_all(self, live: dict[StepEngine, list[Param]]) -> None:
        for engine, params in live.items():
            self._update(engine, params)

    def _update(self, engine: StepEngine, params: list[Param]) -> None:
        numbers = {param: self._numbers(param) for param in params}
        turns = list(_turns(engine, params))
        for unit in {param.unit: None for param in params}:
            unit.generation += 1
            # The values at rest change below, chunk by chunk; gathered values would be outdated.
            engine.unsharder.invalidate(unit)
        engine.pipeline.step_begins()
        fault = None
        try:
            self._run(engine, turns, numbers)
        except AioError as error:
            fault = error
        # KeyboardInterrupt, or an error of the class.
        except BaseException as error:
            engine.pipeline.set_fault(half_done(error))
            raise
        # Before counts advance, and before the new values are read.
        engine.pipeline.end_updates(fault)
        if engine.pipeline.transaction is not None:
            # A later step may be undone together with this one.
            engine.pipeline.transaction.remember(
                self.state, {param.at_rest: dict(self.state[param.at_rest]) for param in numbers}
            )
        for param, number in numbers.items():
            state = self.state[param.at_rest]
            state["step"] = state.get("step", 0) + 1
            # This rank stores no element of the parameter, but the numbers must advance as on the
            # other ranks.
            if number.after is None:
                self._step(
                    param,
                    torch.zeros(1),
                    torch.zeros(1),
                    [torch.zeros(1) for _ in self.moments_of(param)],
                    number,
                )
            state["numbers"] = number.after
        engine.pipeline.count_step()
        engine.unsharder.prefetch_ahead()

    def _run(
        self, engine: StepEngine, turns: list[_ChunkUpdate], numbers: dict[Param, _Numbers]
    ) -> None:
        """Update all chunks, with reads ahead and writes behind."""
        if not turns:
            return

        def update(turn: _ChunkUpdate, buffer: ChunkBuffer) -> None:
            for span in turn.spans:
                self._update_span(engine, buffer, span, numbers[span.param])

        total = sum(turn.size_bytes for turn in turns)
        with ProgressLine(self.title, total, shown=engine.states.rank == 0) as line:
            pipeline = ChunkPipeline(
                engine.states.chunk_buffers(min(BUFFERS, len(turns))),
                ahead=READ_AHEAD,
                read=lambda turn, buffer: buffer.fetch(turn.records, turn.chunk, turn.sections),
                transform=update,
                write=lambda turn, buffer: buffer.store(turn.sections),
                finish=lambda turn, _buffer: line.advance(turn.size_bytes),
            )
            pipeline.run(turns)

    def _update_span(
        self, engine: StepEngine, buffer: ChunkBuffer, span: ParamSpan, number: _Numbers
    ) -> None:
        param, form = span.param, buffer.records.format
        sections = span_sections(buffer, span)
        # fp32 copies: the class writes into them, and the encoder rounds once at the end.
        values = decode_values(form, sections)
        assert param.grad is not None
        first = param.flat.layout.shard_range(param.param_index, engine.states.rank)[1]
        grad = param.grad.part(span.element - first, span.numel)
        self._step(param, values[0], grad, values[1:], number)
        step = self.state[param.at_rest].get("step", 0) + 1
        key = rounding_key(engine.policy.seed, step, param.name)
        encode_values(form, values, sections, key=key, element=span.element)

    def _step(
        self,
        param: Param,
        master: torch.Tensor,
        grad: torch.Tensor,
        moments: list[torch.Tensor],
        number: _Numbers,
    ) -> None:
        """Run the class's step on a slice: fp32 [numel] each, `master` and `moments` in place."""
        names = self.moments_of(param)
        make: Any = self._class  # of any signature
        # A new instance for each slice: the class may have more attributes than `state`.
        inner: Any = make([make_group(self.group_of(param), master)], **self._settings)
        if number.before is not None:
            inner.state[master] = {name: _copy(value) for name, value in number.before.items()}
            inner.state[master].update(zip(names, moments, strict=True))
        master.grad = grad
        inner.step()
        # The class may retain the parameter; the gradient's memory is freed with the chunk.
        master.grad = None
        state = inner.state[master]
        for name, moment in zip(names, moments, strict=True):
            # Some classes replace a state instead of writing into it.
            if state[name] is not moment:
                moment.copy_(state[name])
        if number.after is None:
            number.after = {name: state.get(name) for name in self._traits[param].scalars}


def _turns(engine: StepEngine, params: Sequence[Param]) -> Iterator[_ChunkUpdate]:
    """Yield the chunks that hold parts of these parameters, flat by flat."""
    by_chunk: dict[tuple[Flat, int], list[ParamSpan]] = {}
    for param in sorted(params, key=lambda param: param.index):
        # Group by chunk, so that a chunk is read once for all parameters in it.
        for span in spans_of(param, engine.states.rank):
            by_chunk.setdefault((param.flat, span.chunk), []).append(span)
    for (flat, chunk), spans in by_chunk.items():
        yield _ChunkUpdate(engine.states.store[flat], chunk, spans)


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) else value


# -- the probe of a class --------------------------------------------------------------------------
# An update is elementwise if an element's new values depend only on that element (its value,
# gradient and states) and on numbers that all elements share (step count, rate). Then a parameter
# may be updated slice by slice. The probe runs a class of torch.optim on a small parameter: STEPS
# steps on NUMEL elements, on their two halves and on the same elements in two dimensions must give
# the same bits. It does not detect behaviour that begins later, or only with larger parameters.


# A half is a multiple of the vector length of every CPU.
NUMEL = 256
SIDE = 16
# RAdam, for example, changes its update in the sixth step.
STEPS = 8
MOMENTS_MAX = 3


@dataclasses.dataclass(frozen=True)
class Traits:
    """The states of a class for each parameter.

    moments: names of states of the parameter's shape. scalars: the other entries, with values of
    the right types.
    """

    moments: tuple[str, ...]
    scalars: dict[str, Any]


def defaults_of(torch_class: Any, settings: dict[str, Any]) -> dict[str, Any]:
    """Return the hyper-parameters of a group without explicit settings. Raises: ValueError for
    anything but a class of torch.optim.
    """
    if not (isinstance(torch_class, type) and issubclass(torch_class, torch.optim.Optimizer)):
        raise ValueError(
            f"{torch_class!r} is no torch.optim.Optimizer class; write "
            "inf.Elementwise(torch.optim.Adagrad, params, lr=...)"
        )
    try:
        made = _make(torch_class, torch.zeros(NUMEL), {}, settings)
    except (RuntimeError, AssertionError) as error:
        _refuse(torch_class, str(error), error)
    return dict(made.defaults)


def probe(torch_class: Any, group: dict[str, Any], settings: dict[str, Any]) -> Traits:
    """Run the class on a small parameter, under the group's hyper-parameters.

    settings: arguments of the class. Raises: ValueError, with the reason, for a class that is not
    elementwise, or has more states per element than a chunk has sections for.
    """
    whole, states = _run(torch_class, torch.arange(NUMEL), group, settings)
    moments = tuple(name for name, value in states[-1].items() if _per_element(value, whole))
    # The format is fixed when the optimizer is built, so states must be the same in every step.
    for state in states[:-1]:
        if {name for name, value in state.items() if _per_element(value, whole)} != set(moments):
            _refuse(torch_class, "its states are not the same in every step")
    # Sections encode fp32 values; a state of another dtype would be rounded twice.
    odd = [name for name in moments if states[-1][name].dtype is not torch.float32]
    if odd:
        _refuse(torch_class, f"its state {odd[0]} is {states[-1][odd[0]].dtype}, not float32")
    if len(moments) > MOMENTS_MAX:
        _refuse(
            torch_class,
            f"it keeps {len(moments)} states for each element; at most {MOMENTS_MAX} fit",
        )
    scalars = {name: value for name, value in states[-1].items() if name not in moments}
    for name, value in scalars.items():
        if not (value is None or isinstance(value, (bool, int, float))) and not (
            isinstance(value, torch.Tensor) and value.numel() == 1
        ):
            _refuse(
                torch_class, f"its state {name} is neither a number nor of the parameter's shape"
            )
    # If results differ when half of the elements is passed, the class reads other elements or the
    # size; if they differ in two dimensions, it reads the shape.
    half = NUMEL // 2
    for index in (
        torch.arange(half),
        torch.arange(half, NUMEL),
        torch.arange(NUMEL).view(SIDE, SIDE),
    ):
        part, part_states = _run(torch_class, index, group, settings)
        flat = index.reshape(-1)
        same = torch.equal(part.view(-1), whole[flat]) and all(
            torch.equal(part_states[-1][name].view(-1), states[-1][name][flat]) for name in moments
        )
        if not same:
            _refuse(
                torch_class,
                "a step on part of a parameter gives other values than a step on the whole: its "
                "update uses other elements, or the shape",
            )
        # A number that depends on the values would differ from slice to slice.
        if any(part_states[-1].get(name) != value for name, value in scalars.items()):
            _refuse(torch_class, "its numbers depend on the parameter's values")
    return Traits(moments, scalars)


def make_group(group: dict[str, Any], param: torch.Tensor) -> dict[str, Any]:
    """Return a group with the hyper-parameters of `group` and one parameter."""
    return {**{key: value for key, value in group.items() if key != "params"}, "params": [param]}


def _make(
    torch_class: Any, param: torch.Tensor, group: dict[str, Any], settings: dict[str, Any]
) -> torch.optim.Optimizer:
    made: torch.optim.Optimizer = torch_class([make_group(group, param)], **settings)
    return made


def _run(
    torch_class: Any, index: torch.Tensor, group: dict[str, Any], settings: dict[str, Any]
) -> tuple[torch.Tensor, list[dict[str, Any]]]:
    """Run STEPS steps on the elements `index` of the probe. Returns the parameter afterwards, and
    its state after every step.
    """
    # Values of many magnitudes, the same for an element in every slice.
    position = index.to(torch.float32)
    param = torch.cos(position * 0.7) * (0.1 + position / 50)
    states = []
    try:
        made = _make(torch_class, param, group, settings)
        for step in range(STEPS):
            # Gradients whose magnitude, sign and order differ from step to step.
            param.grad = torch.sin(position * (1.3 + step)) * (1e-3 + position / 100)
            made.step()  # type: ignore[call-arg]
            state = made.state[param]
            states.append(
                {name: v.clone() if isinstance(v, torch.Tensor) else v for name, v in state.items()}
            )
    except TypeError as error:
        _refuse(
            torch_class,
            "its step() needs a closure" if "closure" in str(error) else str(error),
            error,
        )
    except (RuntimeError, ValueError, AssertionError, IndexError, NotImplementedError) as error:
        _refuse(torch_class, str(error), error)
    return param.detach(), states


def _per_element(value: Any, param: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == param.shape


def _refuse(torch_class: Any, reason: str, cause: Exception | None = None) -> NoReturn:
    raise ValueError(
        f"{torch_class.__name__} cannot be computed chunk by chunk: {reason}. Elementwise takes "
        "classes like torch.optim's Adagrad, RMSprop, Adadelta, Adamax, NAdam, RAdam, ASGD, Rprop "
        "and Adam"
    ) from cause
