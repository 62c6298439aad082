"""A drive fails at each request of a training in turn: the training has the numbers of the run
without faults, bit by bit, or raises a typed error."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch

import infinity as inf
from infinity.aio import Fault, Seam
from infinity.errors import AioError, StateInvalid
from tests import models
from tests.harness import Training, assert_same, offloaded, reference
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
TRIED_MAX = 24  # if all requests would take too long: at most this many of them, evenly spread


def policy(directory: Path | list[Path], backend: str) -> inf.Policy:
    paths = [str(path) for path in (directory if isinstance(directory, list) else [directory])]
    return inf.Policy(params="nvme", optim="nvme", nvme=paths, ram="min", io_backend=backend)


def sent(directory: Path | list[Path], backend: str) -> dict[str, int]:
    ours = offloaded(TRAINING, policy(directory, backend), seam=Seam(seed=1))
    assert_same(ours, reference(TRAINING))
    drives = ours.stats.drives
    return {
        "read": sum(drive.reads for drive in drives),
        "write": sum(drive.writes for drive in drives),
    }


def cause_of(error: BaseException) -> AioError:
    """The fault that ended the training."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, AioError):
        cause = cause.__cause__
    assert cause is not None, repr(error)
    return cause


@pytest.mark.slow
@pytest.mark.parametrize("persistent", [False, True], ids=["once", "for_ever"])
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("op", ["read", "write"])
@pytest.mark.parametrize("backend", BACKENDS[:1])
def test_a_fault_at_every_request_of_a_training(tmp_path, backend, op, name, persistent):
    kind, code = KINDS[name]
    passes = not persistent and (
        name in ("EAGAIN", "EINTR", "short") or (name, op) == ("bitflip", "read")
    )
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
        assert_same(ours, wanted)
        equal += 1
        assert torch.isfinite(torch.tensor(ours.losses)).all()
    print(
        f"\n{op} {name} {'for ever' if persistent else 'once'}: {total} faults, {equal} runs equal "
        "bit by bit"
    )
    assert not passes or equal == total
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["EIO", "EAGAIN", "bitflip"])
@pytest.mark.parametrize("op", ["read", "write"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_fault_of_either_of_two_drives(tmp_path, backend, op, name):
    """If one of two drives fails, the numbers are right, or an error names the drive that failed.
    """
    kind, code = KINDS[name]
    passes = name == "EAGAIN" or (name, op) == ("bitflip", "read")
    directories = [tmp_path / "first", tmp_path / "second"]
    for directory in directories:
        directory.mkdir()
    wanted = reference(TRAINING)
    total = sent(directories, backend)[op]
    struck: set[Path] = set()
    # odd, so that both drives are hit
    equal, tried = 0, range(0, total, max(1, total // TRIED_MAX) | 1)
    for nth in tried:
        fault = Fault(op, nth, kind=kind, errno=code)
        ours, failed = None, None
        try:
            ours = offloaded(TRAINING, policy(directories, backend), seam=Seam(fault=fault))
        except (AioError, StateInvalid) as error:
            failed = cause_of(error)
        if ours is None:
            assert failed is not None
            assert not passes, f"{fault}: {failed}"
            struck.add(Path(failed.path))
            continue
        assert_same(ours, wanted)
        equal += 1
        struck.update(
            directory
            for directory, drive in zip(directories, ours.stats.drives, strict=True)
            if drive.errors or drive.retries
        )
    print(f"\n{backend} {op} {name}: {len(tried)} of {total} faults, {equal} runs equal bit by bit")
    assert not passes or equal == len(tried)
    # A flipped bit that a second read corrects is in no drive's counters.
    assert struck == set(directories) or (passes and kind == "bitflip")
    assert [list(directory.iterdir()) for directory in directories] == [[], []]
