"""Any sequence of calls leaves the chunks as a dictionary of arrays would be."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from infinity import aio
from infinity.aio import plan
from tests.unit.aio.rig import BACKENDS, DTYPES, NUMEL, Rig, adamw, hyper_record, random_chunk, same

CHUNKS = 4
INDEX = st.integers(0, CHUNKS - 1)


class ExecutorMachine(RuleBasedStateMachine):
    """Submits without waiting; waits when a rule says so, and at the end for everything."""

    backend = ""

    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.TemporaryDirectory()
        self.rng = np.random.default_rng(0)
        self.rig = Rig(
            Path(self.directory.name),
            self.backend,
            chunk_count=CHUNKS,
            drive_count=2,
            resident=(1,),
            pools=(1, 2),
            hold_s=0.005,
            seam=aio.Seam(delay_us_max=200, seed=1),
        )
        self.model = [[np.zeros(NUMEL, dtype) for dtype in DTYPES] for _ in range(CHUNKS)]
        self.rig.store(dict(enumerate(self.model))).wait()
        self.pending: list = []
        self.gates: list = []
        self.step = 0

    @rule(index=INDEX, mask=st.integers(1, 15))
    def store(self, index: int, mask: int) -> None:
        value = random_chunk(self.rng)
        self.rig.store({index: value}, mask=mask)
        for s in range(4):
            if mask >> s & 1:
                self.model[index][s] = value[s].copy()

    @rule(index=INDEX, mask=st.integers(1, 15), priority=st.integers(0, 2))
    def fetch(self, index: int, mask: int, priority: int) -> None:
        ticket, targets = self.rig.fetch([index], mask=mask, priority=priority)
        wanted = [
            self.model[index][s].copy() if mask >> s & 1 else np.zeros(NUMEL, DTYPES[s]) for s in range(4)
        ]
        self.pending.append((ticket, targets[0], wanted))

    @rule(indexes=st.sets(INDEX, min_size=1), gated=st.booleans())
    def update(self, indexes: set[int], gated: bool) -> None:
        self.step += 1
        grads = {i: self.rng.standard_normal(NUMEL).astype(np.float32) for i in sorted(indexes)}
        gate = self.rig.executor.gate() if gated else None
        target = np.zeros((len(grads), NUMEL), dtype=np.uint16)
        ticket = self.rig.update(grads, gate=gate, target=target, step=self.step)
        for i, grad in grads.items():
            self.model[i] = [section.copy() for section in self.model[i]]
            adamw(plan.Format.SPLIT, self.model[i], grad, hyper_record(self.step)[0])
        wanted = np.stack([self.model[i][0] for i in grads])
        if gate is None:
            self.pending.append((ticket, [target], [wanted]))
        else:
            self.gates.append((gate, ticket, target, wanted))

    @rule()
    def open_a_gate(self) -> None:
        if not self.gates:
            return
        gate, ticket, target, wanted = self.gates.pop(0)
        if gate.open([target.ctypes.data]):
            self.pending.append((ticket, [target], [wanted]))
        else:
            ticket.wait(20)
            assert not target.any()

    @rule()
    def wait_for_one(self) -> None:
        if self.pending:
            self.check(*self.pending.pop(len(self.pending) // 2))

    @rule(index=INDEX)
    def define_again(self, index: int) -> None:
        self.rig.executor.drain(20)
        self.rig.executor.drop(self.rig.ids[index : index + 1])
        self.rig.ids[index] = self.rig.executor.define(self.rig.chunks[index : index + 1])[0]

    def check(self, ticket, targets, wanted) -> None:
        ticket.wait(20)
        assert same(targets, wanted)

    @invariant()
    def nothing_has_failed(self) -> None:
        assert self.rig.executor.fault() is None

    def teardown(self) -> None:
        try:
            for gate, ticket, _, _ in self.gates:
                ticket.wait(20)
                assert gate.escaped
            for entry in self.pending:
                self.check(*entry)
            assert all(same(self.rig.read(i), self.model[i]) for i in range(CHUNKS))
            stats = self.rig.executor.stats()
            assert stats.jobs_done == stats.jobs_submitted
            assert stats.jobs_failed == 0
        finally:
            self.rig.close()
            self.directory.cleanup()


@pytest.mark.parametrize("name", BACKENDS)
def test_chunks_behave_as_a_dictionary_of_arrays(name):
    machine = type("Machine", (ExecutorMachine,), {"backend": name})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=25,
            stateful_step_count=20,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
