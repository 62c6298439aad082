"""Speculation against the plain deferred loop: any loop at all, however it treats its gradients,
gives the same bits."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import infinity as inf
from infinity._src.engine.handle import offload
from infinity.aio import Seam
from tests import harness, models
from tests.marks import alternating

BATCHES = models.token_batches(8)
deep = functools.partial(models.llama, layers=5)

ONE = st.integers(0, 40)
ACTIONS = st.one_of(
    st.tuples(st.just("backward"), st.integers(0, 7)),
    # backward, clip, step, clear
    st.tuples(st.just("train"), st.sampled_from([0.02, 0.5, 2.4, 1e9])),
    st.tuples(st.just("train"), st.sampled_from([1e9, 1e9])),
    st.tuples(st.just("marked"), st.integers(0, 7)),  # in no_sync
    st.tuples(st.just("poisoned"), st.sampled_from([float("nan"), float("inf")])),
    st.tuples(st.just("twice"), st.integers(0, 7)),  # retain_graph
    st.tuples(st.just("broken"), st.integers(0, 7)),
    st.tuples(st.just("clip"), st.sampled_from([0.02, 2.4, 1e9])),
    st.tuples(st.just("step"), st.integers(0, 1)),  # which optimizer, where there are two
    st.tuples(st.just("zero_grad"), st.booleans()),
    st.tuples(st.just("evaluate"), st.integers(0, 7)),
    st.tuples(st.just("write"), ONE),
    st.tuples(st.just("set moment"), ONE),
    st.tuples(st.just("read"), ONE),
    st.tuples(st.just("rate"), st.sampled_from([0.5, 2.0])),
    st.tuples(st.just("clear one"), ONE),
    st.tuples(st.just("zero one"), ONE),
    st.tuples(st.just("scale one"), ONE),
    st.tuples(st.just("assign one"), ONE),
    st.tuples(st.just("freeze"), ONE),
)
PROGRAMS = st.lists(ACTIONS, min_size=3, max_size=14)


class Loop:
    """A model, its optimizers, and what the program has seen of them."""

    def __init__(
        self,
        factory: Any,
        policy: inf.Policy,
        optimizers: tuple[type[Any], ...],
        seam: Seam | None = None,
    ) -> None:
        self.model: Any = offload(models.make(factory), policy, _seam=seam)
        self.params = list(self.model.parameters())
        self.optimizers = [
            make(self.params[index :: len(optimizers)], lr=1e-2)
            for index, make in enumerate(optimizers)
        ]
        self.seen: list[Any] = []
        self.turn = 0

    def run(self, program: list[tuple[str, Any]]) -> tuple[list[Any], dict[str, torch.Tensor]]:
        try:
            for name, value in program:
                try:
                    self.seen.append(getattr(self, name.replace(" ", "_"))(value))
                except (RuntimeError, ValueError) as error:
                    self.seen.append(type(error))
            values = {name: value.clone() for name, value in self.model.state_dict().items()}
            for index, param in enumerate(self.params):
                state = inf.handle(self.model).optimizer_state(param)
                values |= {
                    f"{index} {name}": value.clone()
                    for name, value in state.items()
                    if isinstance(value, torch.Tensor)
                }
            return self.seen, values
        finally:
            self.stats = inf.handle(self.model).stats()
            inf.handle(self.model).close()

    def param(self, index: int) -> Any:
        return self.params[index % len(self.params)]

    def loss(self, index: int) -> Any:
        return models.loss_of(self.model, BATCHES[index])

    def backward(self, index: int) -> Any:
        loss = self.loss(index)
        loss.backward()
        return loss.item()

    def marked(self, index: int) -> Any:
        with inf.handle(self.model).no_sync():
            return self.backward(index)

    def train(self, threshold: float) -> Any:
        self.turn = (self.turn + 1) % len(BATCHES)
        seen = self.backward(self.turn), self.clip(threshold)
        for index in range(len(self.optimizers)):
            self.step(index)
        self.zero_grad(True)
        return seen

    def poisoned(self, value: float) -> None:
        (self.loss(3) * value).backward()

    def twice(self, index: int) -> Any:
        loss = self.loss(index)
        loss.backward(retain_graph=True)
        loss.backward()
        return loss.item()

    def broken(self, index: int) -> None:
        def stop(*_args: Any) -> None:
            raise RuntimeError("stop")

        hook = self.model.model.layers[
            index % len(self.model.model.layers)
        ].register_full_backward_hook(stop)
        try:
            self.backward(index)
        finally:
            hook.remove()

    def clip(self, threshold: float) -> Any:
        return str(torch.nn.utils.clip_grad_norm_(self.params, threshold).item())

    def step(self, which: int) -> None:
        self.optimizers[which % len(self.optimizers)].step()

    def zero_grad(self, to_none: bool) -> None:
        self.model.zero_grad(set_to_none=to_none)

    def evaluate(self, index: int) -> Any:
        with torch.no_grad():
            return str(self.loss(index).item())

    def write(self, index: int) -> None:
        with torch.no_grad(), inf.handle(self.model).gather(self.param(index)):
            self.param(index).mul_(0.5)

    def set_moment(self, index: int) -> None:
        state = inf.handle(self.model).optimizer_state(self.param(index))
        name = next(name for name in ("exp_avg", "momentum_buffer") if name in state)
        state[name] = state[name] * 2

    def read(self, index: int) -> Any:
        state = inf.handle(self.model).optimizer_state(self.param(index))
        tensors = [value for value in state.values() if isinstance(value, torch.Tensor)]
        return [str(value.double().sum().item()) for value in tensors]

    def rate(self, factor: float) -> None:
        for optimizer in self.optimizers:
            optimizer.param_groups[0]["lr"] *= factor

    def clear_one(self, index: int) -> None:
        self.param(index).grad = None

    def zero_one(self, index: int) -> None:
        if self.param(index).grad is not None:
            self.param(index).grad.zero_()

    def scale_one(self, index: int) -> None:
        if self.param(index).grad is not None:
            self.param(index).grad.mul_(0.5)

    def assign_one(self, index: int) -> None:
        self.param(index).grad = torch.full(
            self.param(index).shape, 0.01, dtype=self.param(index).dtype
        )

    def freeze(self, index: int) -> None:
        self.param(index).requires_grad_(not self.param(index).requires_grad)


@functools.cache
def least_ram(optimizer: str) -> int:
    training = harness.Training(deep, optimizer=optimizer)
    # And the sums of moments that parameters of another optimizer in the same flat have.
    return harness.least_to_train(training, spilling(Path("/tmp"), 1)) + 1024


def spilling(place: Path, ram: int, update: str = "backward") -> inf.Policy:
    nowhere = {"params": 0.0, "optim": 0.0}
    values = {"ram": ram, "resident": nowhere, "unit_bytes_max": 4096, "update": update}
    return harness.policy(place, grads="nvme", generations=2, **values)


def policies(place: Path, least: int) -> dict[str, inf.Policy]:
    shared = {"update": "backward", "generations": 2, "nvme": place}
    nvme = {"params": "nvme", "optim": "nvme", "ram": "min"} | shared
    return {
        "nvme": inf.Policy(**nvme),
        "threads": inf.Policy(**nvme, io_backend="threads", verify="off"),
        "partly": inf.Policy(**nvme, resident={"params": 0.5, "optim": 0.5}, verify="sample"),
        "cpu": inf.Policy(params="cpu", optim="cpu", update="backward", generations=2),
        "device": inf.Policy(params="device", optim="nvme", ram="min", **shared),
        "spilling": spilling(place, least),
    }


def check(
    program: list[tuple[str, Any]],
    place: Path,
    kind: str,
    optimizers: tuple[type[Any], ...],
    delay: int,
    mode: str = "raise",
) -> Any:
    with harness.one_thread():
        least = least_ram(max(made.__name__ for made in optimizers))
        policy = policies(place, least)[kind]
        object.__setattr__(policy, "on_nonfinite", mode)
        ours = Loop(deep, policy, optimizers, Seam(delay_us_max=delay, seed=len(program)))
        found = ours.run(program)
        plain = inf.Policy(params="cpu", optim="cpu")
        # no step is possible after a backward that was aborted while gradients spill
        if kind == "spilling":
            plain = spilling(place, least, "deferred")
        object.__setattr__(plain, "on_nonfinite", mode)
        theirs = Loop(deep, plain, optimizers)
        wanted = theirs.run(program)
    # As text, which is exact, and in which NaN is NaN.
    assert repr(found[0]) == repr(wanted[0])
    different = [
        name
        for name, value in wanted[1].items()
        if not torch.equal(found[1][name].nan_to_num(7), value.nan_to_num(7))
    ]
    assert not different, different[:5]
    return ours.stats


LOOPS = {
    "program": PROGRAMS,
    "kind": st.sampled_from(["nvme", "threads", "partly", "cpu", "device", "spilling"]),
    "optimizers": st.sampled_from(
        [(inf.AdamW,), (inf.Muon,), (inf.AdamW, inf.AdamW), (inf.Muon, inf.AdamW)]
    ),
    "delay": st.sampled_from([0, 700]),
    "mode": st.sampled_from(["raise", "skip", "ignore"]),
}


def explore(max_examples: int) -> Any:
    return settings(
        max_examples=max_examples, deadline=None, suppress_health_check=list(HealthCheck)
    )


@explore(3)
@given(**LOOPS)
def test_any_loop_gives_the_plain_one_s_bits(tmp_path, program, kind, optimizers, delay, mode):
    check(program, tmp_path, kind, optimizers, delay, mode)


@pytest.mark.parametrize(
    ("name", "made"),
    alternating(["zero one", "assign one", "scale one", "zero_grad"], [inf.AdamW, inf.Muon]),
)
def test_spilled_gradients_that_change_after_backward_take_the_update_back(tmp_path, name, made):
    train = ("train", 1e9)
    check(
        [
            train,
            train,
            ("backward", 1),
            (name, False if name == "zero_grad" else 5),
            ("step", 0),
            train,
        ],
        tmp_path,
        "spilling",
        (made,),
        0,
    )


@pytest.mark.soak
@explore(1000)
@given(**LOOPS)
def test_any_loop_at_length(tmp_path, program, kind, optimizers, delay, mode):
    check(program, tmp_path, kind, optimizers, delay, mode)
