"""A training whose drive fails, at every request in turn: the numbers of the run without faults, bit by bit, or a typed error."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch

import infinity as inf
from infinity.aio import Fault, Seam
from infinity.errors import AioError, StateInvalid
from tests import models
from tests.harness import Training, assert_equal, offloaded, reference
from tests.unit.aio.rig import BACKENDS

KINDS = {
    "EIO": ("errno", errno.EIO),
    "EAGAIN": ("errno", errno.EAGAIN),
    "EINTR": ("errno", errno.EINTR),
    "short": ("short", 0),
    "zero": ("zero", 0),
    "bitflip": ("bitflip", 0),
}
TRAINING = Training(lambda: models.llama(layers=2), steps=2, accumulation=1)


def policy(directory: Path, backend: str) -> inf.Policy:
    return inf.Policy(params="nvme", optim="nvme", nvme=str(directory), ram="min", io_backend=backend)


def sent(directory: Path, backend: str) -> dict[str, int]:
    ours = offloaded(TRAINING, policy(directory, backend), seam=Seam(seed=1))
    assert_equal(ours, reference(TRAINING))
    drives = ours.stats.drives
    return {"read": sum(drive.reads for drive in drives), "write": sum(drive.writes for drive in drives)}


@pytest.mark.slow
@pytest.mark.parametrize("persistent", [False, True], ids=["once", "for_ever"])
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("op", ["read", "write"])
@pytest.mark.parametrize("backend", BACKENDS[:1])
def test_a_fault_at_every_request_of_a_training(tmp_path, backend, op, name, persistent):
    kind, code = KINDS[name]
    passes = not persistent and (name in ("EAGAIN", "EINTR", "short") or (name, op) == ("bitflip", "read"))
    wanted = reference(TRAINING)
    equal = 0
    total = sent(tmp_path, backend)[op]
    for nth in range(total):
        fault = Fault(op, nth, kind=kind, errno=code, persistent=persistent)
        ours, failed = None, None
        try:
            ours = offloaded(TRAINING, policy(tmp_path, backend), seam=Seam(fault=fault))
        except (AioError, StateInvalid) as error:
            failed = error
        if ours is None:
            assert not passes, f"{fault}: {failed}"
            assert isinstance(failed, AioError) or isinstance(failed.__cause__, AioError), (
                f"{fault}: {failed!r}"
            )
            continue
        assert_equal(ours, wanted)
        equal += 1
        assert torch.isfinite(torch.tensor(ours.losses)).all()
    print(
        f"\n{op} {name} {'for ever' if persistent else 'once'}: {total} faults, {equal} runs equal bit by bit"
    )
    assert not passes or equal == total
    assert list(tmp_path.iterdir()) == []
