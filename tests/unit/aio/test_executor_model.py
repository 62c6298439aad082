"""Any sequence of calls leaves the chunks as a dictionary of arrays would be.

One rule holds whatever happens: what a fetch that ended well gives is what was submitted last.
Delays, short transfers and busy drives change nothing else either. Where a write fails once, jobs
may fail with a typed error; after `recover` and storing again everything is as it should be.
"""

from __future__ import annotations

import errno
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from infinity import aio
from infinity._src.cabi import records
from infinity._src.kernels.hyper import hyper_row_muon, hyper_row_muon_momentum
from infinity.errors import AioCancelledError, DeviceFailedError
from tests.oracle import update_sections
from tests.unit.aio.rig import (
    BACKENDS,
    NUMEL,
    Rig,
    hyper_record,
    outcome,
    random_chunk,
    same,
)

CHUNKS = 4
INDEX = st.integers(0, CHUNKS - 1)
MOMENTUM = hyper_row_muon_momentum(momentum=0.9, nesterov=True).reshape(1)
MASTERS = hyper_row_muon(step_size=0.1, decay=0.999).reshape(1)
UNNEEDED = {False: 0b01011, True: 0b01100}
"""Sections that Muon's update of the momenta, and that of the masters, may leave out."""
TIES = slice(0, NUMEL, 1000)
"""Elements with masters half-way between two parameters, in some stores."""
TRANSPARENT = st.sampled_from(
    [
        None,
        *(
            aio.Fault(op, nth, kind=kind, errno=errno.EAGAIN)
            for op in ("read", "write")
            for nth in (0, 7, 30)
            for kind in ("errno", "short")
        ),
        aio.Fault("read", 11, kind="bitflip"),
    ]
)


class ExecutorMachine(RuleBasedStateMachine):
    """Submits without waiting; waits when a rule says so, and at the end for everything."""

    backend = ""
    faults = TRANSPARENT
    fails = False
    # Spare ranges on each drive: with enough of them bad blocks go unnoticed.
    spares = 0

    def __init__(self) -> None:
        super().__init__()
        self.rig: Rig | None = None

    @initialize(
        data=st.data(),
        drives=st.integers(1, 3),
        resident=st.sampled_from([(), (1,), (0, 3), (0, 1, 2, 3)]),
        verify=st.sampled_from(["full", "sample", "off"]),
        pools=st.sampled_from([(1, 2), (0, 1), (3, 3), (0, 8)]),
        delay_us_max=st.sampled_from([0, 200]),
        spilled=st.booleans(),
        versioned=st.booleans(),
        zeros=st.sampled_from([0, 0b01100, 0b11110, 0b11111]),
    )
    def open(
        self, data, drives, resident, verify, pools, delay_us_max, spilled, versioned, zeros
    ) -> None:
        fault = data.draw(self.faults)
        if fault is not None and fault.kind == "bitflip" and verify != "full":
            fault = None  # without full verification a flipped bit may stay unnoticed
        # One job would write both places of such a chunk, and only one failed place can be moved.
        self.spilled = spilled and not (self.spares and versioned)
        self.directory = tempfile.TemporaryDirectory()
        self.rng = np.random.default_rng(0)
        self.rig = Rig(
            Path(self.directory.name),
            self.backend,
            chunk_count=CHUNKS,
            drive_count=drives,
            resident=resident,
            verify=verify,
            piece=128,
            pools=pools,
            spilled=self.spilled,
            versioned=versioned,
            zeros=zeros,
            spares=self.spares,
            hold_s=0.005,
            seam=aio.Seam(delay_us_max=delay_us_max, seed=1, fault=fault),
        )
        self.versioned = versioned
        self.committed: list = [None] * CHUNKS  # the states as they were
        self.model = [[np.zeros(NUMEL, dtype) for dtype in self.rig.dtypes] for _ in range(CHUNKS)]
        # Sections that are known to be zeros are not written, but are read as zeros.
        mask = self.everything & ~zeros
        self.pending: list = (
            [(self.rig.store(dict(enumerate(self.model)), mask=mask), [], [])] if mask else []
        )
        self.gates: list = []
        self.step = 0
        self.cancelled = 0
        self.late: list = []  # fetches that no wait lets go, each with its gate

    @property
    def everything(self) -> int:
        return (1 << len(self.rig.dtypes)) - 1

    def random_chunk(self) -> list:
        gradient = [self.rng.integers(0x3C00, 0x3F00, NUMEL).astype(np.uint16)]
        return random_chunk(self.rng) + gradient[: len(self.rig.dtypes) - 4]

    @rule(index=INDEX, mask=st.integers(1, 31), ties=st.booleans())
    def store(self, index: int, mask: int, ties: bool = False) -> None:
        mask = mask & self.everything or 1
        value = self.random_chunk()
        if ties:
            hi, lo, _, v = value[:4]
            hi[TIES] &= ~np.uint16(1)
            lo[TIES] = -32768
            v[TIES] *= np.float32(-1)  # the parameter is the lower one
        if ties or np.signbit(self.model[index][3]).any():
            mask |= 0b01011  # such signs belong to hi and lo
        self.rig.store({index: value}, mask=mask)
        self.model[index] = [
            value[s].copy() if mask >> s & 1 else section
            for s, section in enumerate(self.model[index])
        ]

    @rule(index=INDEX, mask=st.integers(1, 31), priority=st.integers(0, 2), cancel=st.booleans())
    def fetch(self, index: int, mask: int, priority: int, cancel: bool) -> None:
        mask = mask & self.everything or 1
        ticket, targets = self.rig.fetch([index], mask=mask, priority=priority)
        wanted = [
            self.model[index][s].copy() if mask >> s & 1 else np.zeros(NUMEL, dtype)
            for s, dtype in enumerate(self.rig.dtypes)
        ]
        if cancel:
            ticket.cancel()
        self.pending.append((ticket, targets[0], wanted))

    @rule()
    def cancel_all(self) -> None:
        for ticket, *_ in self.pending:
            ticket.cancel()

    @rule(
        indexes=st.lists(INDEX, unique=True),
        given=st.booleans(),
        leaves=st.lists(st.sampled_from([0, *UNNEEDED.values()]), min_size=4, max_size=4),
        first=st.booleans(),
    )
    def prefetch(self, indexes: list[int], given: bool, leaves: list[int], first: bool) -> None:
        ids = self.rig.ids[indexes]
        masks = np.array(leaves, dtype=np.uint32)[: len(ids)] << aio.LEAVES_SHIFT
        masks |= np.uint32(records.MASK_PARAM_IN_MEMORY * given | records.MASK_FIRST * first)
        assert 0 <= self.rig.executor.prefetch(ids, masks) <= len(ids)

    @rule(
        indexes=st.sets(INDEX, min_size=1),
        gated=st.booleans(),
        cancel=st.booleans(),
        given=st.sets(INDEX),
        in_place=st.booleans(),
        spilled=st.sets(INDEX),
    )
    def update(
        self,
        indexes: set[int],
        gated: bool,
        cancel: bool,
        given: set[int],
        in_place: bool,
        spilled: set[int],
        hyper: np.ndarray | None = None,
        leaves: int = 0,
        half: bool = False,
        first: bool = False,
    ) -> None:
        self.step += 1
        hyper = hyper_record(self.step) if hyper is None else hyper
        grads = {i: self.rng.standard_normal(NUMEL).astype(np.float32) for i in sorted(indexes)}
        if half:
            grads = {i: (g.view(np.uint32) >> 16).astype(np.uint16) for i, g in grads.items()}
        gate = self.rig.executor.gate() if gated else None
        target = np.zeros((len(grads), NUMEL), dtype=np.uint16)
        taken: dict = {}
        for n, i in enumerate(grads):
            if i not in given or (self.fails and gated):
                continue
            taken[i] = self.model[i][0].copy()
            if in_place and not gated:
                target[n], taken[i] = taken[i], target[n]
        sources = dict(grads)
        for i in spilled & indexes if self.spilled else ():
            sources[i] = None
            grads[i] = self.model[i][4]
        # Muon's momentum update writes into the gradients.
        grads = {i: grad.copy() for i, grad in grads.items()}
        ticket = self.rig.update(
            sources,
            gate=gate,
            target=None if leaves & 1 else target,
            given=taken,
            hyper=hyper,
            leaves=leaves,
            first=first,
        )
        if cancel:
            ticket.cancel()  # does nothing to an update
        for i, grad in grads.items():
            self.model[i] = [section.copy() for section in self.model[i]]
            update_sections(records.Format.SPLIT, self.model[i][:4], grad, hyper[0])
        found = [target, *(sources[i] for i in grads if sources[i] is not None)]
        parameters = [self.model[i][0] for i in grads]
        wanted = [target * 0 if leaves & 1 else np.stack(parameters)]
        wanted += [grads[i] for i in grads if sources[i] is not None]
        if gate is None:
            self.pending.append((ticket, found, wanted))
        else:
            self.gates.append((gate, ticket, found, wanted))

    @rule(
        indexes=st.sets(INDEX, min_size=1),
        masters=st.booleans(),
        leaves=st.sampled_from([0b11111, 0b11111, 0b11110, 0b01010, 0]),
        gated=st.booleans(),
        given=st.sets(INDEX),
        in_place=st.booleans(),
        spilled=st.sets(INDEX),
        half=st.booleans(),
        first=st.booleans(),
    )
    def update_of_muon(
        self,
        indexes: set[int],
        masters: bool,
        leaves: int,
        gated: bool,
        given: set[int],
        in_place: bool,
        spilled: set[int],
        half: bool,
        first: bool,
    ) -> None:
        leaves &= UNNEEDED[masters]
        if leaves & 1:
            gated, given = False, set()
        self.update(
            indexes,
            gated,
            False,
            given,
            in_place,
            spilled if masters else set(),
            MASTERS if masters else MOMENTUM,
            leaves,
            half,
            first,
        )

    @rule()
    def open_a_gate(self) -> None:
        if not self.gates:
            return
        gate, ticket, found, wanted = self.gates.pop(0)
        if gate.open([found[0].ctypes.data]):
            self.pending.append((ticket, found, wanted))
        else:
            self.open_late()
            self.check(ticket, found[1:], wanted[1:])
            assert not found[0].any()

    @rule(index=INDEX)
    def fetch_late(self, index: int) -> None:
        gate = self.rig.executor.gate(escapes=False)
        ticket, targets = self.rig.fetch([index], mask=self.everything, gate=gate)
        self.late.append((gate, (ticket, targets[0], self.model[index])))

    @rule()
    def open_late(self) -> None:
        for gate, entry in self.late:
            assert gate.open([])
            self.pending.append(entry)
        self.late.clear()

    def wait_idle(self) -> None:
        self.open_late()
        self.rig.executor.wait_all(20)

    @rule()
    def wait_for_one(self) -> None:
        self.open_late()
        if self.pending:
            self.check(*self.pending.pop(len(self.pending) // 2))

    @rule()
    def wait_all(self) -> None:
        self.wait_idle()
        assert all(
            entry[0].done for entry in [*self.pending, *((ticket,) for _, ticket, *_ in self.gates)]
        )

    def all_ended(self) -> None:
        """Wait for all jobs, and check all results."""
        self.wait_idle()
        for gate, ticket, found, wanted in self.gates:
            self.check(ticket, found[1:], wanted[1:])
            assert gate.escaped
        for entry in self.pending:
            self.check(*entry)
        self.gates.clear()
        self.pending.clear()

    @rule(indexes=st.lists(INDEX, unique=True))
    def commit(self, indexes: list[int]) -> None:
        if not self.versioned or self.fails:
            return
        self.all_ended()
        older = self.rig.executor.look(self.rig.ids)["older"]
        if older[indexes].any():
            with pytest.raises(ValueError, match="first of two updates"):
                self.rig.executor.commit(self.rig.ids[indexes])
            self.update(set(np.flatnonzero(older)), False, False, set(), False, set())
            self.all_ended()
        self.rig.executor.commit(self.rig.ids[indexes])
        for index in indexes:
            self.committed[index] = [section.copy() for section in self.model[index][:4]]

    @rule(indexes=st.lists(INDEX, unique=True))
    def rollback(self, indexes: list[int]) -> None:
        if not self.versioned or self.fails:
            return
        self.all_ended()
        self.rig.executor.rollback(self.rig.ids[indexes])
        for index in indexes:
            if self.committed[index] is not None:
                self.model[index] = [
                    section.copy() for section in self.committed[index]
                ] + self.model[index][4:]

    @rule()
    def recover(self) -> None:
        self.pending.append((self.rig.executor.recover(), [], []))

    @rule(index=INDEX, mask=st.integers(1, 15), settled=st.booleans())
    def recover_behind_a_gate(self, index: int, mask: int, settled: bool) -> None:
        if settled:
            self.wait_idle()
        gate = self.rig.executor.gate()
        ticket, targets = self.rig.fetch([index], mask=self.everything, gate=gate)
        wanted = self.model[index]
        self.store(index, mask)
        self.pending.append((self.rig.executor.recover(), [], []))
        if gate.open([]):
            self.pending.append((ticket, targets[0], wanted))
        else:
            self.open_late()
            self.ended(ticket)
            assert not any(array.any() for array in targets[0])

    @rule(index=INDEX)
    def define_again(self, index: int) -> None:
        self.wait_idle()
        chunk = self.rig.executor.look(self.rig.ids[index : index + 1])
        self.rig.executor.drop(self.rig.ids[index : index + 1])
        self.rig.ids[index] = self.rig.executor.define(chunk)[0]
        self.committed[index] = None
        if self.fails:  # what was kept, and what was known to be lost, went with it
            self.rig.executor.recover()
            self.store(index, self.everything)

    def ended(self, ticket) -> bool:
        """Report whether the ticket ended well. Assert that an error is a cancellation, or a fault
        of a drive that the test makes fail."""
        error = outcome(ticket)
        if isinstance(error, AioCancelledError):
            self.cancelled += 1
        else:
            assert error is None or (self.fails and isinstance(error, DeviceFailedError)), error
        return error is None

    def check(self, ticket, targets, wanted) -> None:
        if self.ended(ticket):
            assert same(targets, wanted)

    @invariant()
    def nothing_has_failed(self) -> None:
        if self.rig is not None and not self.fails:
            assert self.rig.executor.fault() is None, self.rig.executor.fault()

    def teardown(self) -> None:
        if self.rig is None:
            return
        try:
            self.open_late()
            for gate, ticket, found, wanted in self.gates:
                self.check(ticket, found[1:], wanted[1:])
                assert gate.escaped
            for entry in self.pending:
                self.check(*entry)
            for index in range(CHUNKS):
                ticket, targets = self.rig.fetch([index], mask=self.everything)
                self.check(ticket, targets[0], self.model[index])
            self.mend()
            for index in range(CHUNKS):
                ticket, targets = self.rig.fetch([index], mask=self.everything)
                ticket.wait(20)
                assert same(targets[0], self.model[index])
            self.wait_idle()
            stats = self.rig.executor.stats()
            assert stats.jobs_done == stats.jobs_submitted
            assert stats.kept_chunks == 0
            assert stats.jobs_cancelled == self.cancelled
            assert self.fails or stats.jobs_failed == 0
        finally:
            self.rig.close()
            self.directory.cleanup()

    def mend(self) -> None:
        """The one fault there is may strike a recovery, or a store after it."""
        for _ in range(3 if self.fails else 1):
            outcome(self.rig.executor.recover())
            stored = (
                self.rig.store(dict(enumerate(self.model)), mask=self.everything)
                if self.fails
                else None
            )
            if stored is None or outcome(stored) is None:
                return
        raise AssertionError("one fault struck three times")


def run(machine: type[ExecutorMachine], examples: int, steps: int = 20) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.parametrize("name", BACKENDS)
def test_chunks_behave_as_a_dictionary_of_arrays(name):
    run(type("Machine", (ExecutorMachine,), {"backend": name}), 25)


@pytest.mark.parametrize("name", BACKENDS)
def test_a_write_that_fails_once_never_gives_wrong_data(name):
    faults = st.builds(
        aio.Fault,
        op=st.just("write"),
        nth=st.integers(0, 120),
        kind=st.just("errno"),
        errno=st.sampled_from([errno.EIO, errno.ENXIO]),
    )
    run(type("Machine", (ExecutorMachine,), {"backend": name, "faults": faults, "fails": True}), 15)


@pytest.mark.parametrize("name", BACKENDS)
def test_bad_blocks_go_unnoticed_where_there_are_spare_ranges(name):
    faults = st.builds(
        lambda start, persistent, nth: aio.Fault(
            "write", nth, persistent=persistent, start=start, stop=start + 1
        ),
        start=st.integers(0, CHUNKS * 12 * NUMEL - 1),
        persistent=st.booleans(),
        nth=st.integers(0, 3),
    )
    run(type("Machine", (ExecutorMachine,), {"backend": name, "faults": faults, "spares": 4}), 25)


class MachineWithTooFewSpares(ExecutorMachine):
    """The blocks are good again at the end."""

    fails = True
    spares = 1

    def mend(self) -> None:
        assert self.rig is not None
        self.rig.executor.set_seam(aio.Seam())
        super().mend()


@pytest.mark.parametrize("name", BACKENDS)
def test_more_bad_blocks_than_spare_ranges_never_give_wrong_data(name):
    faults = st.builds(
        lambda start, chunks, nth: aio.Fault(
            "write", nth, persistent=True, start=start, stop=start + chunks * 12 * NUMEL
        ),
        start=st.integers(0, CHUNKS * 12 * NUMEL - 1),
        chunks=st.integers(1, 2),
        nth=st.integers(0, 10),
    )
    run(type("Machine", (MachineWithTooFewSpares,), {"backend": name, "faults": faults}), 20)
