"""Durable runs on several drives: which drives and which copies of them belong to a run."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import infinity as inf
from infinity._src.checkpoint.durable.copies import (
    SeveralRunsError,
    are_of_one_run,
    copy_in,
    newest_run,
)
from infinity.errors import ChecksumError
from tests.crashes import Net, step
from tests.durable_runs import close, live, made, restored, run_files, train
from tests.unit.checkpoint.test_manifest import encoded, manifest


@pytest.fixture
def drive(tmp_path: Path) -> Callable[[str], Path]:
    """Makes the directory of a drive."""

    def make(name: str) -> Path:
        (tmp_path / name).mkdir(exist_ok=True)
        return tmp_path / name

    return make


Drive = Callable[[str], Path]


def kinds_in(drive: Path) -> list[str]:
    return [name.split("-")[0] for name in run_files(drive)]


def test_other_drives_are_told_apart(drive: Drive) -> None:
    one, two, three, four = map(drive, ("one", "two", "three", "four"))
    live(one, two, until=1)
    with pytest.raises(ValueError, match="not the first directory") as refused:
        made(two, one)
    # Following the error's advice loses nothing.
    assert "another directory of that drive" in str(refused.value)
    assert "remove" not in str(refused.value)
    # Another run that shares the second drive; then the first run, without that drive.
    live(three, two, until=1)
    assert live(one, until=2) == 1
    assert "drive1" not in run_files(one)
    assert kinds_in(two).count("states") == 2
    assert live(three, two) == 1
    assert live(three, four) == 1
    assert [name for name in run_files(two) if name != "lock.rank0"] == []


def test_drives_that_are_mounted_elsewhere(drive: Drive, tmp_path: Path) -> None:
    one, two, three, four = (tmp_path / name for name in ("one", "two", "three", "four"))
    live(one, two, until=1)
    # The second time to the place of the other drive.
    moves = [((one, two), (three, four)), ((three, four), (one, three))]
    for index, (old, new) in enumerate(moves, 1):
        for before, after in zip(old, new, strict=True):
            before.rename(after)
        assert live(*new, until=index + 1) == index
        assert kinds_in(new[1]).count("states") == 2
        links = [name for name in run_files(new[0]) if name.startswith((".", "drive"))]
        assert links in (["drive1"], ["drive2"])


def test_drives_that_are_swapped_are_told_apart(drive: Drive, tmp_path: Path) -> None:
    """States files of different drives have the same name; links tell the drive."""
    places = one, two, three = [drive(name) for name in ("one", "two", "three")]
    live(*places, until=1)
    two.rename(tmp_path / "aside")
    three.rename(two)
    (tmp_path / "aside").rename(three)
    assert live(one, two, three) == 1


def test_a_copy_of_all_drives_is_a_run_of_its_own(drive: Drive, tmp_path: Path) -> None:
    """The links in a copy lead to the original's further drives, which may be damaged, or have
    later steps."""
    one, two, copy, other = (tmp_path / name for name in ("one", "two", "copy", "other"))
    live(one, two, until=1)
    for old, new in ((one, copy), (two, other)):
        shutil.copytree(old, new, symlinks=True)
    for path in (two / "infinity-run").glob("states-*"):
        path.write_bytes(bytes(path.stat().st_size))
    kept = run_files(two)
    assert live(copy, other, until=2) == 1
    assert run_files(two) == kept
    assert kinds_in(other) == ["copy", "home", "states", "states"]


def test_training_on_a_copy_of_the_first_drive_harms_nothing_on_the_others(
    drive: Drive, tmp_path: Path
) -> None:
    one, two, four = map(drive, ("one", "two", "four"))
    live(one, two, until=1)
    # Its links lead to `two`.
    copy = shutil.copytree(one, tmp_path / "copy", symlinks=True)
    assert live(copy, four, until=3) == 1
    assert live(one, two, until=3) == 1
    assert kinds_in(two) == ["copy", "home", "states", "states"]


@pytest.mark.parametrize("first", ["closed", "open"])
def test_a_run_on_the_further_drive_of_another_harms_nothing_of_it(
    drive: Drive, first: str
) -> None:
    one, two = drive("one"), drive("two")
    model, optimizer = made(one, two)
    train(model, optimizer, 0, 1)
    if first == "closed":
        close(model)
    live(two, until=1)
    if first == "open":
        train(model, optimizer, 1, 2)
        close(model)
    # Alone, because `two` now has manifests of another run.
    assert live(one) == (1 if first == "closed" else 2)


@pytest.fixture
def shared(drive: Drive) -> tuple[Path, Path, Path]:
    """Make two runs, of two steps and of three, that share a further drive."""
    one, two, both = map(drive, ("one", "two", "both"))
    live(one, both, until=2)
    live(two, both, until=3)
    return one, two, both


Shared = tuple[Path, Path, Path]


def test_a_run_is_restored_by_any_of_its_drives_whoever_shares_them(shared: Shared) -> None:
    one, _, both = shared
    for named in (both, [one, both]):
        assert live(one, both, source=named) == 2


def reports(place: Path) -> Any:
    """Follow the advice in the error of a run without its first drive."""
    return pytest.raises(ValueError, match=re.escape(f"{str(place)!r}, damaged='report'"))


def test_a_run_that_goes_on_with_what_it_shares_keeps_no_other_from_its_drives(
    shared: Shared,
) -> None:
    one, two, both = shared
    shutil.rmtree(one)
    model, optimizer = made(both)
    with reports(both):
        step(model, optimizer, 0, 0)
    assert inf.restore(model, optimizer, both, damaged="report").step == 2
    step(model, optimizer, 2, 0)
    close(model)
    assert live(two, both, until=4, source=[two, both]) == 3
    model, optimizer = made(both)
    assert inf.restore(model, optimizer, both).step == 3
    close(model)


@pytest.mark.parametrize("generations", [2, 3])
def test_a_run_without_its_first_drive_goes_by_the_copies_that_are_whole(
    drive: Drive, generations: int
) -> None:
    """A damaged commit is skipped; without space, the older commits on all drives are dropped."""
    places = [drive(name) for name in ("one", "two", "three")]
    live(*places, until=4, generations=generations)
    shutil.rmtree(places[0])
    if generations == 2:
        (found,) = places[1].glob("infinity-run/copy-*/manifest-*")
        found.write_bytes(bytes(found.stat().st_size))
    model, optimizer = made(*places[1:], generations=generations)
    if generations == 3:
        assert inf.handle(model).durable.files.release_older(1)
        for place in places[1:]:
            assert len(list(place.glob("infinity-run/copy-*/manifest-*"))) == 1
    with reports(places[1]):
        step(model, optimizer, 0, 0)
    assert inf.restore(model, optimizer, places[1:], damaged="report").step == 4
    close(model)


def reader() -> tuple[Any, Any]:
    """Return a model of the same shape without a run."""
    torch.manual_seed(1)
    model: Any = inf.offload(Net().bfloat16(), inf.Policy(unit_bytes_max=4096))
    return model, inf.AdamW(model.parameters(), lr=1e-2)


def test_directories_of_several_runs_are_refused(
    shared: Shared, tmp_path: Path
) -> None:
    one, two, both = shared
    model, optimizer = reader()
    # Each run has a newest commit.
    for named in ([one, two], [two, one], [one, two, both]):
        with pytest.raises(ValueError, match="different runs; name the directories of one") as told:
            inf.restore(model, optimizer, named)
        assert f"{one}/infinity-run and" in str(told.value) or f"and {one}" in str(told.value)
        assert f"{two}/infinity-run" in str(told.value)
    inf.save(model, optimizer, tmp_path / "saved").wait()
    with pytest.raises(ValueError, match="different runs"):
        inf.restore(model, optimizer, [tmp_path / "saved", one])
    # A shared drive belongs to the run of the home named with it, in either order.
    for named, steps in (([one, both], 2), ([both, one], 2), ([two, both], 3), ([one], 2)):
        assert restored(model, optimizer, named) == steps
    # The same if only a copy identifies one run.
    shutil.rmtree(one)
    assert restored(model, optimizer, [both, two]) == 3
    assert restored(model, optimizer, [one, both, two]) == 3
    for copy in both.glob("infinity-run/copy-*"):
        if (copy / "drive0").resolve() == (two / "infinity-run").resolve():
            shutil.rmtree(copy)
    with pytest.raises(ValueError, match="different runs"):
        inf.restore(model, optimizer, [both, two])
    close(model)


@pytest.fixture
def replaced(drive: Drive) -> tuple[Path, Path]:
    """Make a run of three steps that lost its first drive, and a run of one step that began at the
    same path without the second drive."""
    one, two = drive("one"), drive("two")
    live(one, two, until=3)
    shutil.rmtree(one)
    live(one, until=1)
    return one, two


def test_a_new_run_refuses_further_drives_of_an_old_run(
    replaced: tuple[Path, Path], drive: Drive
) -> None:
    one, two, three = *replaced, drive("three")
    there = run_files(two)
    # The drive's run, not the new run at the same home path.
    model, optimizer = reader()
    assert inf.restore(model, optimizer, two, damaged="report").step == 3
    with pytest.raises(ValueError, match="different runs"):
        inf.restore(model, optimizer, [one, two])
    close(model)
    with pytest.raises(ValueError, match="two durable runs that began at the same path") as told:
        made(one, two)
    assert f"{one}/infinity-run and {two}/infinity-run/copy-" in str(told.value)
    assert run_files(two) == there
    # Follow the error's two ways: either run continues, and the other stays.
    (two / "more").mkdir()
    assert live(one, two / "more", until=2, source=[one, two / "more"]) == 1
    model, optimizer = made(three, two)
    assert inf.restore(model, optimizer, [three, two], damaged="report").step == 3
    step(model, optimizer, 3, 0)
    close(model)
    model, optimizer = reader()
    assert inf.restore(model, optimizer, [three, two]).step == 4
    assert restored(model, optimizer, [one, two / "more"]) == 2
    close(model)


def test_a_damaged_home_is_not_made_good_from_another_run(replaced: tuple[Path, Path]) -> None:
    """The home's manifests are unreadable, and a copy with its name has a newer one."""
    one, two = replaced
    (found,) = one.glob("infinity-run/manifest-*")
    found.write_bytes(found.read_bytes()[:-1] + b"x")
    with pytest.raises(ChecksumError, match=found.name):
        made(one, two)
    # Both are released.
    model, optimizer = made(one, two, durable="new")
    train(model, optimizer, 0, 1)
    close(model)
    assert live(one, two, source=[one, two]) == 1


@pytest.mark.parametrize("how", ["gone", "damaged"])
@pytest.mark.parametrize("lost", [0, 1])
def test_the_manifest_of_any_rank_identifies_a_run(tmp_path: Path, how: str, lost: int) -> None:
    """The copy on its drive has a newer generation of another run, which must not be used."""
    home = tmp_path / "one" / "infinity-run"
    copy = copy_in(tmp_path / "two" / "infinity-run", home)
    for place, number, generation in ((home, 7, 1), (copy, 8, 2)):
        place.mkdir(parents=True)
        for rank in range(2):
            one = manifest(rank, 2, generation, save=number << 24)
            (place / one.name).write_bytes(encoded(one))
    path = home / manifest(lost, 2).name
    whole = path.read_bytes()
    if how == "gone":
        path.unlink()
    else:
        path.write_bytes(whole[:-1])
    assert not are_of_one_run(home, copy)
    with pytest.raises(SeveralRunsError, match="two durable runs that began at the same path"):
        newest_run([tmp_path / "one", tmp_path / "two"])
    for rank in range(2):
        one = manifest(rank, 2, 2, save=7 << 24)
        (copy / one.name).write_bytes(encoded(one))
    assert are_of_one_run(home, copy)
    found = newest_run([tmp_path / "one", tmp_path / "two"])
    assert found is not None
    assert found.place == copy
