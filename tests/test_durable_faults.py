"""Durable runs with failing calls: the step before stays, the error is typed, training continues
once the cause is fixed."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any, final

import pytest
import torch

import infinity as inf
from infinity._src.checkpoint.durable.named_places import PinnedLayers
from infinity.aio import Fault, Seam
from infinity.errors import (
    AioError,
    ChecksumError,
    DeviceFailedError,
    StateInvalid,
    StepUndone,
    SwapFullError,
)
from tests.crashes import digest, step
from tests.durable_runs import close, die, live, made, restored, run_files, undisturbed
from tests.marks import alternating, mostly_slow


@pytest.fixture(scope="module")
def wanted() -> tuple[str, ...]:
    return undisturbed()


@final
class Failing:
    """The nth call of a function of `os` fails; writes are torn: half of the bytes are written
    first."""

    def __init__(self, name: str, nth: int, code: int, *, interrupts: bool = False) -> None:
        self.name, self.nth, self.code, self.interrupts = name, nth, code, interrupts
        self.real, self.calls, self.met = getattr(os, name), 0, False

    def __enter__(self) -> Failing:
        setattr(os, self.name, self.call)
        return self

    def __exit__(self, *exc: object) -> None:
        setattr(os, self.name, self.real)

    def call(self, *args: Any, **values: Any) -> Any:
        self.calls += 1
        if self.calls == self.nth + 1:
            self.met = True
            if self.interrupts:
                self.real(*args, **values)
                raise KeyboardInterrupt
            if self.name == "write":
                self.real(args[0], bytes(args[1])[: len(args[1]) // 2])
            raise OSError(self.code, os.strerror(self.code))
        return self.real(*args, **values)


every_second_call = pytest.mark.parametrize("first", mostly_slow([0, 1], 0))
"""Neighbouring calls of a commit fail alike; the others are slow."""


@every_second_call
@pytest.mark.parametrize("update", mostly_slow(["deferred", "backward"], "deferred"))
@pytest.mark.parametrize(
    ("name", "code"), [("write", errno.ENOSPC), ("replace", 5), ("fsync", 5), ("unlink", 5)]
)
def test_every_call_of_a_commit_fails_once(
    tmp_path: Path, wanted: tuple[str, ...], update: str, name: str, code: int, first: int
) -> None:
    """After any failure a restore has the step before or the one being committed, and this process
    continues."""
    for nth in range(first, 20, 2):
        place = tmp_path / str(nth)
        model, optimizer = made(place, update=update)
        step(model, optimizer, 0, 0)
        step(model, optimizer, 1, 0)
        error: Exception | None = None
        with Failing(name, nth, code) as failing:
            try:
                inf.handle(model).flush()
            except Exception as met:
                error = met
        assert error is None or isinstance(error, (SwapFullError, DeviceFailedError)), (nth, error)
        again = name != "fsync"  # a drive that lost writes stays failed
        if again:
            step(model, optimizer, 2, 0)
            inf.handle(model).flush()
            assert digest(model) == wanted[3]
        die(model)
        model, optimizer = made(place, update=update)
        found = inf.restore(model, optimizer, place)
        assert found.step == 3 if again else found.step in (1, 2)
        assert digest(model) == wanted[found.step]
        step(model, optimizer, found.step, 0)
        assert digest(model) == wanted[found.step + 1]
        close(model)
        if not failing.met:
            assert nth
            return
    raise AssertionError("a commit makes too many calls")


@every_second_call
@pytest.mark.parametrize("name", alternating(["write", "replace", "fsync", "unlink"]))
def test_an_interrupted_commit_is_made_by_the_next(
    tmp_path: Path, wanted: tuple[str, ...], name: str, first: int
) -> None:
    """The next step writes nothing that an interrupted commit has named, also where none is due."""
    for nth in range(first, 20, 2):
        place = tmp_path / str(nth)
        model, optimizer = made(place, durable_every=3)
        for index in range(2):
            step(model, optimizer, index, 0)
        with Failing(name, nth, 0, interrupts=True) as failing:
            try:
                inf.handle(model).flush()
            except KeyboardInterrupt:
                assert failing.met
        step(model, optimizer, 2, 0)
        model.state_dict()  # the updates have ended
        die(model)
        model, optimizer = made(place)
        assert inf.restore(model, optimizer, place).step == 2
        assert digest(model) == wanted[2]
        close(model)
        if not failing.met:
            assert nth
            return
    raise AssertionError("a commit makes too many calls")


@every_second_call
def test_states_stay_when_the_first_commit_is_interrupted(tmp_path: Path, first: int) -> None:
    """A process leaves the files that a renamed manifest names, wherever `inf.restore` is
    interrupted."""
    begun = tmp_path / "begun"
    live(begun, until=1)
    for name in ("replace", "fsync", "unlink"):
        for nth in range(first, 12, 2):
            place = tmp_path / f"{name}{nth}"
            shutil.copytree(begun, place, symlinks=True)
            model, optimizer = made(place)
            with Failing(name, nth, 0, interrupts=True) as failing:
                try:
                    inf.restore(model, optimizer, place)
                except KeyboardInterrupt:
                    assert failing.met
            die(model)
            model, optimizer = made(place)
            assert restored(model, optimizer, place) == 1
            die(model)
            if not failing.met:
                break


def test_no_room_beside_a_checkpoint(
    tmp_path: Path, wanted: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without space for more than a checkpoint's places no step writes to these places, whether a
    commit is due or not."""
    model, optimizer = made(tmp_path / "run", durable_every=2)
    for index in range(2):
        step(model, optimizer, index, 0)
    inf.save(model, optimizer, tmp_path / "saved").wait()
    step(model, optimizer, 2, 0)

    def full(*_: object) -> None:
        raise SwapFullError("no room", path="drive", op="allocate")

    with monkeypatch.context() as patch:
        patch.setattr(PinnedLayers, "make_way", full)
        for _ in range(2):
            with pytest.raises(SwapFullError):
                inf.handle(model).flush()
        with pytest.raises(SwapFullError):
            step(model, optimizer, 3, 0)
    optimizer.zero_grad()
    inf.handle(model).flush()
    for index in (3, 4):
        step(model, optimizer, index, 0)
    close(model)
    model, optimizer = made(tmp_path / "other")
    assert inf.restore(model, optimizer, tmp_path / "saved").step == 2
    assert digest(model) == wanted[2]
    close(model)


def test_names_are_on_every_drive_before_a_manifest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A directory is flushed after each name that a manifest needs was made in it."""
    places = [tmp_path / "one", tmp_path / "two"]
    for place in places:
        place.mkdir()
    missing: set[Path] = set()
    real = {name: getattr(os, name) for name in ("mkdir", "open", "fsync", "replace", "symlink")}

    def make(name: str) -> Any:
        def call(path: Any, *args: Any, **values: Any) -> Any:
            target = Path(args[0] if name in ("replace", "symlink") else path)
            if name == "replace" and target.name.startswith("manifest-"):
                assert missing == set()
            # These are flushed with the manifest, or nothing needs them.
            small = target.name.startswith(("manifest-", "table-", "buffers-", "extra-", "."))
            new = name != "replace" and not os.path.lexists(target) and not small
            found = real[name](path, *args, **values)
            if new and tmp_path in target.parents:
                missing.add(target.parent)
            return found

        return call

    def fsync(fd: int) -> None:
        real["fsync"](fd)
        missing.discard(Path(f"/proc/self/fd/{fd}").readlink())

    for name in ("mkdir", "open", "replace", "symlink"):
        monkeypatch.setattr(os, name, make(name))
    monkeypatch.setattr(os, "fsync", fsync)
    model, _ = made(*places)
    close(model)
    assert len(list((places[0] / "infinity-run").glob("manifest-*"))) == 1


@pytest.mark.parametrize(
    ("kind", "update"), alternating(["errno", "short", "bitflip"], ["deferred", "backward"])
)
def test_writes_of_states_fail(
    tmp_path: Path, wanted: tuple[str, ...], update: str, kind: str
) -> None:
    for nth in (24, 51, 78):
        place = tmp_path / str(nth)
        model, optimizer = made(
            place, update=update, seam=Seam(fault=Fault("write", nth, kind=kind, lasting=True))
        )
        index = 0
        for _ in range(6):  # what was damaged at rest is undone every time
            if index == 3:
                break
            try:
                step(model, optimizer, index, 0)
                inf.handle(model).flush()
                index += 1
            except StepUndone:
                index = inf.handle(model).pipeline.steps
                optimizer.zero_grad()
            except ChecksumError:
                break
        die(model)
        model, optimizer = made(place, update=update)
        try:
            found = inf.restore(model, optimizer, place)
        except ChecksumError as error:
            named = str(error)
            with pytest.raises(StateInvalid):
                close(model)
            assert "states-" in named
            assert kind == "bitflip"
            continue
        assert kind == "bitflip" or found.step == 3
        if kind != "errno":  # buffers of an undone step are as its forward left them
            assert digest(model) == wanted[found.step]
        close(model)


def test_what_a_failed_write_left_in_memory_alone_is_not_committed(
    tmp_path: Path, wanted: tuple[str, ...]
) -> None:
    model, optimizer = made(tmp_path)
    step(model, optimizer, 0, 0)
    handle = inf.handle(model)
    handle.flush()
    name, value = next(iter(model.state_dict().items()))
    executor = handle.parts.tiers.executor
    executor.set_seam(Seam(fault=Fault("write", 0, persistent=True)))
    with pytest.raises(RuntimeError, match="the drive failed"):
        model.load_state_dict({name: torch.full_like(value, 0.5)}, strict=False)
    assert handle.stats().kept_chunks == 1
    for _ in range(2):
        with pytest.raises(DeviceFailedError):
            handle.flush()
    die(model)
    model, optimizer = made(tmp_path)
    assert inf.restore(model, optimizer, tmp_path).step == 1
    assert digest(model) == wanted[1]
    close(model)


def test_what_a_failed_write_left_in_memory_is_written_before_it_is_committed(
    tmp_path: Path,
) -> None:
    model, optimizer = made(tmp_path)
    handle = inf.handle(model)
    name, value = next(iter(model.state_dict().items()))
    handle.parts.tiers.executor.set_seam(Seam(fault=Fault("write", 0, persistent=True)))
    with pytest.raises(RuntimeError, match="the drive failed"):
        model.load_state_dict({name: torch.full_like(value, 0.5)}, strict=False)
    handle.parts.tiers.executor.set_seam(Seam())
    handle.flush()
    assert handle.stats().kept_chunks == 0
    die(model)
    model, optimizer = made(tmp_path)
    inf.restore(model, optimizer, tmp_path)
    assert torch.equal(model.state_dict()[name], torch.full_like(value, 0.5))
    close(model)


def test_damage_is_found_and_named(tmp_path: Path, wanted: tuple[str, ...]) -> None:
    model, optimizer = made(tmp_path)
    for index in range(2):
        step(model, optimizer, index, 0)
    close(model)
    home = tmp_path / "infinity-run"
    from infinity._src.checkpoint.directory import newest_generation

    manifest = newest_generation(home)[0]
    row = manifest.rows[0]
    file = home / manifest.files[row["file"]].name
    with file.open("r+b") as data:
        at = int(row["file_offset"] + row["section_at"][0])
        data.seek(at)
        byte = data.read(1)[0]
        data.seek(at)
        data.write(bytes([byte ^ 4]))
    model, optimizer = made(tmp_path)
    with pytest.raises(ChecksumError, match=file.name):
        inf.restore(model, optimizer, tmp_path)
    with pytest.raises(StateInvalid, match="was interrupted"):
        close(model)
    with file.open("r+b") as data:
        data.seek(at)
        data.write(bytes([byte]))
    model, optimizer = made(tmp_path)
    assert inf.restore(model, optimizer, tmp_path).step == 2  # the failed attempt replaced nothing
    assert digest(model) == wanted[2]
    close(model)
    path = next(home.glob("manifest-*"))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(ChecksumError, match=path.name):
        made(tmp_path)
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(AioError, match=path.name):
        made(tmp_path)
    model, optimizer = made(tmp_path, durable="new")  # discards it in any case
    step(model, optimizer, 0, 0)
    close(model)
    assert len(run_files(tmp_path)) == 7, run_files(tmp_path)


def test_nothing_leaks(tmp_path: Path, wanted: tuple[str, ...]) -> None:
    places = [tmp_path / "one", tmp_path / "two"]
    for place in places:
        place.mkdir()
    for start in range(4):
        model, optimizer = made(*places)
        assert inf.restore(model, optimizer, places[0]).step == start
        assert digest(model) == wanted[start]
        step(model, optimizer, start, 0)
        if start % 2:
            inf.handle(model).flush()
            die(model)
        else:
            close(model)
        kinds = [name.split("-")[0] for name in run_files(places[0])]
        assert kinds == [
            "buffers",
            "drive1",
            "extra",
            "lock.rank0",
            "manifest",
            "states",
            "states",
            "table",
        ], run_files(places[0])
        kinds = [name.split("-")[0] for name in run_files(places[1])]
        assert kinds == ["copy", "home", "states", "states"]
        (copy,) = (places[1] / "infinity-run").glob("copy-*")
        kinds = sorted(path.name.split("-")[0] for path in copy.iterdir())
        assert kinds == ["buffers", "drive0", "drive1", "extra", "here", "manifest", "table"]
        assert (places[0] / "infinity-run" / "drive1").readlink() == places[1] / "infinity-run"


def test_a_full_disk_at_a_commit(tmp_path: Path, wanted: tuple[str, ...]) -> None:
    import resource

    model, optimizer = made(tmp_path)
    step(model, optimizer, 0, 0)
    inf.handle(model).pipeline.wait()  # their writes, too: the limit is for the commit
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (256, hard))
    try:
        with pytest.raises(SwapFullError):
            inf.handle(model).flush()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    step(model, optimizer, 1, 0)
    assert digest(model) == wanted[2]
    close(model)
    model, optimizer = made(tmp_path)
    assert inf.restore(model, optimizer, tmp_path).step == 2
    assert digest(model) == wanted[2]
    close(model)
