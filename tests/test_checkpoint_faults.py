"""Faults of checkpoints: damage is found and named; a full disk, a fault or a kill leaves the
previous checkpoint."""

from __future__ import annotations

import errno
import random
import re
import resource
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import infinity as inf
from infinity._src.checkpoint import reader as reader_module
from infinity._src.checkpoint.directory import read_generation
from infinity._src.checkpoint.reader import Checkpoint, ChunkReader, DataReader
from infinity._src.checkpoint.verify import Damage, VerifyJob
from infinity._src.engine.handle import offload
from infinity.aio import Fault, Seam, Ticket
from infinity.aio._handles import JobTicket
from infinity.errors import AioError, ChecksumError, StateInvalid, SwapFullError
from tests import forks, models
from tests.test_checkpoint import PLAIN, TIERS, Run, policy


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with every kind of file."""
    place = tmp_path_factory.mktemp("saved") / "ckpt"
    model, opt = _batch_norm()
    inf.save(model, opt, place, extra={"epoch": 1}).wait()
    inf.handle(model).close()
    return place


def _batch_norm() -> tuple[nn.Module, inf.AdamW]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 64)).bfloat16()
    offload(model, inf.Policy(state="compact"))
    return model, inf.AdamW(model.parameters())


@pytest.mark.parametrize("kind", ["data", "manifest", "buffers", "extra"])
def test_a_damaged_byte_is_found_and_named(saved: Path, kind: str, tmp_path: Path) -> None:
    place = tmp_path / "ckpt"
    shutil.copytree(saved, place)
    (file,) = place.glob(f"{kind}-*")
    whole = file.read_bytes()
    random.seed(kind)
    places = {0, len(whole) - 1, *random.sample(range(len(whole)), 12)}
    for at in places:
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        (found,) = damage_in(place)
        assert found.path == str(file)
        if kind == "data":
            assert found.offset <= at < found.offset + found.length
    model, opt = _batch_norm()
    with pytest.raises(AioError, match=re.escape(str(file))):
        inf.restore(model, opt, place)
    if kind == "data":  # found after other states were written
        with pytest.raises(StateInvalid, match=r"restoring .* was interrupted"):
            opt.step()
    file.write_bytes(whole[: len(whole) // 2])
    assert {each.path for each in damage_in(place)} == {str(file)}
    file.unlink()
    if kind == "manifest":
        with pytest.raises(AioError, match=re.escape(str(place))):
            damage_in(place)
    else:
        assert [(each.path, each.reason) for each in damage_in(place)] == [
            (str(file), "is missing")
        ]
    file.write_bytes(whole)
    assert not damage_in(place)


def damage_in(place: Path) -> list[Damage]:
    return VerifyJob(place).verify()


class LimitedFiles:
    """No file grows past `size_bytes`."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes

    def __enter__(self) -> None:
        self.before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (self.size_bytes, self.before[1]))

    def __exit__(self, *exc: object) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, self.before)


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with several chunks."""
    place = tmp_path_factory.mktemp("several") / "ckpt"
    model = offload(models.make(models.llama), inf.Policy())
    inf.save(model, inf.AdamW(model.parameters()), place).wait()
    inf.handle(model).close()
    return place


def first_two(checkpoint: Checkpoint) -> list[int]:
    """The chunks of the first two rows, which are of two flats."""
    _, _, rows = checkpoint.chunks.rows(np.arange(2))
    assert rows.tolist() == [0, 1]
    return [0, 1]


@pytest.fixture
def copied(several: Path, tmp_path: Path) -> Path:
    """A copy of a checkpoint of several flats, to be damaged."""
    place = tmp_path / "ckpt"
    shutil.copytree(several, place)
    return place


def test_damage_of_a_chunk_that_is_not_asked_for_is_told_when_it_is(copied: Path) -> None:
    (file,) = copied.glob("data-*")
    with Checkpoint.open(copied) as checkpoint:
        first, second = first_two(checkpoint)
        section_at = int(checkpoint.manifests[0].rows[0]["section_at"][0])
        whole = file.read_bytes()
        file.write_bytes(
            whole[:section_at] + bytes([whole[section_at] ^ 4]) + whole[section_at + 1 :]
        )
        reader = ChunkReader(checkpoint, capacity=1)
        reader.start([[first]])
        reader.get(second)  # replaces the damaged checkpoint
        with pytest.raises(ChecksumError):
            reader.get(first)
        reader.close()


def test_of_chunks_that_are_read_together_the_damaged_one_is_named(
    several: Path, copied: Path
) -> None:
    (file,) = copied.glob("data-*")
    with Checkpoint.open(copied) as checkpoint:
        first, second = first_two(checkpoint)
        row = checkpoint.manifests[0].rows[1]
        at = int(row["file_offset"] + row["section_at"][1])
        with file.open("r+b") as data:
            data.seek(at)
            byte = data.read(1)[0]
            data.seek(at)
            data.write(bytes([byte ^ 4]))
        reader = ChunkReader(checkpoint)
        reader.start([[first, second]])
        with Checkpoint.open(several) as whole:
            alone = ChunkReader(whole)
            for mine, other in zip(reader.get(first), alone.get(first), strict=True):
                assert mine.tobytes() == other.tobytes()
            alone.close()
        for _ in range(2):
            with pytest.raises(ChecksumError) as caught:
                reader.get(second)
            assert (caught.value.path, caught.value.offset) == (str(file), at)
        reader.close()


def test_an_interrupt_while_a_chunk_makes_room_leaves_its_memory_held(
    several: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(tickets: object) -> None:
        raise KeyboardInterrupt

    with Checkpoint.open(several) as checkpoint:
        first, second = first_two(checkpoint)
        reader = ChunkReader(checkpoint, capacity=1)
        reader.start([[first]])
        with monkeypatch.context() as patched:
            patched.setattr(reader_module, "_wait_out", interrupted)
            with pytest.raises(KeyboardInterrupt):
                reader.start([[second]])
        assert list(reader._held) == [first]  # a read may still be filling it: `close` waits
        reader.close()


def test_a_fetch_that_fails_half_way_waits_for_what_it_began(
    several: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sections of one chunk are in two files, and the second is missing."""
    begun: list[Any] = []
    fetch, wait = DataReader.fetch, JobTicket.wait
    waited: list[Ticket] = []

    def second_file_is_gone(self: DataReader, rows: Any, addresses: Any) -> Iterator[Ticket]:
        begun.extend(fetch(self, rows, addresses))
        yield from begun
        raise AioError("no such file", path="data-gone", op="read")

    def note(self: Ticket, *args: Any) -> None:
        waited.append(self)
        wait(self, *args)

    monkeypatch.setattr(DataReader, "fetch", second_file_is_gone)
    with Checkpoint.open(several) as checkpoint:
        reader = ChunkReader(checkpoint, capacity=1)
        with monkeypatch.context() as patched:
            patched.setattr(JobTicket, "wait", note)
            with pytest.raises(AioError, match="no such file"):
                reader.start([first_two(checkpoint)[:1]])
        assert waited == begun
        reader.close()


def test_a_save_that_gets_no_thread_fails_and_the_next_one_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "infinity-save":
            raise RuntimeError("can't start new thread")
        start(thread)

    model, opt = _batch_norm()
    inf.save(model, opt, tmp_path / "ckpt", extra=1).wait()
    with monkeypatch.context() as refusing:
        refusing.setattr(threading.Thread, "start", refuse)
        save = inf.save(model, opt, tmp_path / "ckpt", extra=2)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            save.wait(5)
    assert inf.restore(model, opt, tmp_path / "ckpt").extra == 1
    model(torch.ones(4, 64, dtype=torch.bfloat16)).sum().backward()
    opt.step()  # nothing guards the states
    inf.save(model, opt, tmp_path / "ckpt", extra=3).wait(60)
    assert inf.restore(model, opt, tmp_path / "ckpt").extra == 3
    inf.handle(model).close()


def test_a_full_disk_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    place = tmp_path / "ckpt"
    with Run(PLAIN, policy(tmp_path)) as run:
        run.train(0, 1)
        run.save(place).wait()
        names = sorted(path.name for path in place.iterdir())
        run.train(1, 2)
        with LimitedFiles(65536):
            save = run.save(place)
            with pytest.raises(SwapFullError, match="which is unchanged") as caught:
                save.wait()
        assert caught.value.errno == errno.EFBIG
        assert str(place) in caught.value.path
        assert sorted(path.name for path in place.iterdir()) == names
        assert "failed" in repr(save)
        with LimitedFiles(65536):
            save = run.save(place)
            while not save.done:
                time.sleep(0.01)
        # no call waited for the save: the next call raises its error, once
        with pytest.raises(SwapFullError):
            run.train(2, 3)
        run.optimizer.zero_grad()
        run.train(2, 3)
        assert run.restore(place).step == 1


@pytest.mark.parametrize("waits", [False, True])
def test_an_error_left_to_wait_is_reported_at_the_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, waits: bool
) -> None:
    model, opt = _batch_norm()
    for _ in range(2):
        with LimitedFiles(0):
            save = inf.save(model, opt, tmp_path / "ckpt")
            save.leave_error_to_wait()
            while not save.done:
                time.sleep(0.01)
        if waits:
            with pytest.raises(AioError):
                save.wait()
    # The first save's error, at the second save; no call raises it.
    told = 0 if waits else 1
    assert caplog.text.count("no checkpoint of step 0 was written: ") == told
    inf.handle(model).close()
    assert caplog.text.count("no checkpoint of step 0 was written: ") == told * 2


@pytest.mark.parametrize(
    "module", ["infinity.integrations._weights", "infinity.compat.deepspeed.checkpoints"]
)
def test_a_file_that_torch_cannot_write_leaves_nothing(tmp_path: Path, module: str) -> None:
    write = pytest.importorskip(module, exc_type=ImportError).save_new
    path = tmp_path / "model.bin"
    write(1, path)
    with LimitedFiles(4096), pytest.raises((OSError, RuntimeError)):
        write({"a": torch.zeros(1 << 16)}, path)
    assert [each.name for each in tmp_path.iterdir()] == ["model.bin"]
    assert torch.load(path) == 1


def test_damage_of_what_rests_fails_the_save_and_not_the_checkpoint_before(tmp_path: Path) -> None:
    model = PLAIN.model()
    values = {**TIERS["nvme"], "nvme": tmp_path}
    offload(
        model,
        inf.Policy(**values, io_backend="threads"),
        _seam=Seam(fault=Fault("read", 40, "bitflip", persistent=True)),
    )
    opt = inf.AdamW(model.parameters())
    saves = []
    with pytest.raises(ChecksumError):
        for _ in range(40):
            saves.append(inf.save(model, opt, tmp_path / "ckpt"))
            saves[-1].wait()
    assert len(saves) > 1
    assert not damage_in(tmp_path / "ckpt")
    assert read_generation(tmp_path / "ckpt", saves[-2].generation)


KILLED = """
import os, signal, sys, time
import torch, infinity as inf
from infinity.aio import Seam
from infinity._src.checkpoint import save as saving
from infinity._src.engine.handle import offload
from collections.abc import Iterator
from pathlib import Path
place, swap, when = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
model = torch.nn.Linear(64, 64)
offload(model, inf.Policy())
opt = inf.AdamW(model.parameters())
inf.save(model, opt, place, extra={"save": 1}).wait()
die = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
if when == "before the commit":
    saving._SaveJob._commit = die
else:
    saving._SaveJob._remove_older = die
inf.save(model, opt, place, extra={"save": 2}).wait()
"""


def test_a_kill_in_a_save_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    survivors = {"before the commit": 1, "after the commit": 2}
    for when, survives in survivors.items():
        done = forks.run_code(KILLED, tmp_path / when, tmp_path, when)
        assert done.returncode == -signal.SIGKILL, done.stderr
        check_survivor(tmp_path / when, survives)


def check_survivor(place: Path, survives: int) -> None:
    assert any("00000002" in path.name for path in place.iterdir())
    assert not damage_in(place)
    model = offload(nn.Linear(64, 64), inf.Policy())
    optimizer = inf.AdamW(model.parameters())
    assert inf.restore(model, optimizer, place).extra == {"save": survives}
    inf.save(model, optimizer, place).wait()  # and the killed save's files are removed
    assert {path.name.split("-")[1] for path in place.iterdir()} == {"00000003.rank0"}
