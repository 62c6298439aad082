"""Durable runs on several drives: which drives and which copies of them belong to a run."""

from __future__ import annotations

import re
import shutil
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
from tests.crashes import Net, digest, step
from tests.durable_runs import close, made, run_files, undisturbed
from tests.unit.checkpoint.test_manifest import encoded, manifest


@pytest.fixture(scope="module")
def wanted() -> list[str]:
    return undisturbed()


def test_other_drives_are_told_apart(tmp_path: Path, wanted: list[str]) -> None:
    one, two, three = places = [tmp_path / name for name in ("one", "two", "three")]
    for place in places:
        place.mkdir()
    model, optimizer = made(one, two)
    step(model, optimizer, 0, 0)
    close(model)
    with pytest.raises(ValueError, match="not the first directory") as refused:
        made(two, one)
    # What it advises loses nothing.
    assert "another directory of that drive" in str(refused.value)
    assert "remove" not in str(refused.value)
    model, optimizer = made(three, two)  # another run, with its second drive in common
    step(model, optimizer, 0, 0)
    close(model)
    model, optimizer = made(one)  # the first run, without its second drive
    assert inf.restore(model, optimizer, one).step == 1
    step(model, optimizer, 1, 0)
    close(model)
    assert [name for name in run_files(one) if name.startswith("drive")] == []
    # those of the other run
    assert len([name for name in run_files(two) if name.startswith("states-")]) == 2
    model, optimizer = made(three, two)
    assert inf.restore(model, optimizer, three).step == 1
    assert digest(model) == wanted[1]
    close(model)
    (tmp_path / "four").mkdir()
    model, optimizer = made(three, tmp_path / "four")
    assert inf.restore(model, optimizer, three).step == 1
    assert digest(model) == wanted[1]
    close(model)
    assert [name for name in run_files(two) if name != "lock.rank0"] == []


def test_drives_that_are_mounted_elsewhere(tmp_path: Path, wanted: list[str]) -> None:
    one, two, three, four = places = [tmp_path / name for name in ("one", "two", "three", "four")]
    for place in places[:2]:
        place.mkdir()
    model, optimizer = made(one, two)
    step(model, optimizer, 0, 0)
    close(model)
    for index, (old, new) in enumerate(
        [((one, two), (three, four)), ((three, four), (one, three))], 1
    ):
        old[0].rename(new[0])  # the second time, where the other drive was
        old[1].rename(new[1])
        model, optimizer = made(*new)
        assert inf.restore(model, optimizer, new[0]).step == index
        assert digest(model) == wanted[index]
        step(model, optimizer, index, 0)
        close(model)
        assert len([name for name in run_files(new[1]) if name.startswith("states-")]) == 2
        assert [name for name in run_files(new[0]) if name.startswith((".", "drive"))] in (
            ["drive1"],
            ["drive2"],
        )


def test_drives_that_are_swapped_are_told_apart(tmp_path: Path, wanted: list[str]) -> None:
    """Their states files have the same names, and each says which of the run's drives it is on."""
    one, two, three = places = [tmp_path / name for name in ("one", "two", "three")]
    for place in places:
        place.mkdir()
    model, optimizer = made(*places)
    step(model, optimizer, 0, 0)
    close(model)
    two.rename(tmp_path / "aside")
    three.rename(two)
    (tmp_path / "aside").rename(three)
    model, optimizer = made(*places)
    assert inf.restore(model, optimizer, one).step == 1
    assert digest(model) == wanted[1]
    close(model)


def test_a_copy_of_all_drives_is_a_run_of_its_own(tmp_path: Path, wanted: list[str]) -> None:
    """The links in a copy lead to the original's further drives, which may be damaged or gone on
    meanwhile."""
    one, two, copy, other = [tmp_path / name for name in ("one", "two", "copy", "other")]
    for place in (one, two):
        place.mkdir()
    model, optimizer = made(one, two)
    step(model, optimizer, 0, 0)
    close(model)
    for old, new in ((one, copy), (two, other)):
        shutil.copytree(old, new, symlinks=True)
    for path in (two / "infinity-run").glob("states-*"):
        path.write_bytes(bytes(path.stat().st_size))
    kept = run_files(two)
    model, optimizer = made(copy, other)
    assert inf.restore(model, optimizer, copy).step == 1
    assert digest(model) == wanted[1]
    step(model, optimizer, 1, 0)
    close(model)
    assert run_files(two) == kept
    assert [name.split("-")[0] for name in run_files(other)] == ["copy", "home", "states", "states"]


def test_training_on_a_copy_of_the_first_drive_harms_nothing_on_the_others(
    tmp_path: Path, wanted: list[str]
) -> None:
    one, two, copy, four = [tmp_path / name for name in ("one", "two", "copy", "four")]
    for place in (one, two, four):
        place.mkdir()
    model, optimizer = made(one, two)
    step(model, optimizer, 0, 0)
    close(model)
    shutil.copytree(one, copy, symlinks=True)  # its links lead to `two`
    for drives in [(copy, four), (one, two)]:
        model, optimizer = made(*drives)
        assert inf.restore(model, optimizer, drives[0]).step == 1
        for index in (1, 2):
            assert digest(model) == wanted[index]
            step(model, optimizer, index, 0)
        close(model)
    assert [name.split("-")[0] for name in run_files(two)] == ["copy", "home", "states", "states"]


@pytest.mark.parametrize("first", ["closed", "open"])
def test_a_run_on_the_further_drive_of_another_harms_nothing_of_it(
    tmp_path: Path, wanted: list[str], first: str
) -> None:
    one, two = (tmp_path / name for name in ("one", "two"))
    for place in (one, two):
        place.mkdir()
    model, optimizer = made(one, two)
    step(model, optimizer, 0, 0)
    if first == "closed":
        close(model)
    other, theirs = made(two)
    step(other, theirs, 0, 0)
    close(other)
    steps = 1
    if first == "open":
        step(model, optimizer, 1, 0)
        close(model)
        steps = 2
    # Alone: `two` has manifests of another run by now.
    model, optimizer = made(one)
    assert inf.restore(model, optimizer, one).step == steps
    assert digest(model) == wanted[steps]
    close(model)


def shared(tmp_path: Path) -> tuple[Path, Path, Path]:
    """Two runs, of two steps and of three, that have one further drive in common."""
    one, two, both = (tmp_path / name for name in ("one", "two", "both"))
    for place in (one, two, both):
        place.mkdir()
    for place, count in ((one, 2), (two, 3)):
        model, optimizer = made(place, both)
        for index in range(count):
            step(model, optimizer, index, 0)
        close(model)
    return one, two, both


def test_a_run_is_restored_by_any_of_its_drives_whoever_shares_them(
    tmp_path: Path, wanted: list[str]
) -> None:
    one, _, both = shared(tmp_path)
    for named in (both, [one, both]):
        model, optimizer = made(one, both)
        assert inf.restore(model, optimizer, named).step == 2
        assert digest(model) == wanted[2]
        close(model)


def test_a_run_that_goes_on_with_what_it_shares_keeps_no_other_from_its_drives(
    tmp_path: Path, wanted: list[str]
) -> None:
    one, two, both = shared(tmp_path)
    shutil.rmtree(one)
    model, optimizer = made(both)
    # The way that the error tells.
    with pytest.raises(ValueError, match=re.escape(f"{str(both)!r}, damaged='report'")):
        step(model, optimizer, 0, 0)
    assert inf.restore(model, optimizer, both, damaged="report").step == 2
    step(model, optimizer, 2, 0)
    close(model)
    model, optimizer = made(two, both)
    assert inf.restore(model, optimizer, [two, both]).step == 3
    assert digest(model) == wanted[3]
    step(model, optimizer, 3, 0)
    close(model)
    model, optimizer = made(both)
    assert inf.restore(model, optimizer, both).step == 3
    close(model)


def test_a_run_without_its_first_drive_goes_by_the_copy_that_is_whole(tmp_path: Path) -> None:
    drives = [tmp_path / name for name in ("one", "two", "three")]
    for drive in drives:
        drive.mkdir()
    model, optimizer = made(*drives)
    for index in range(2):
        step(model, optimizer, index, 0)
    close(model)
    shutil.rmtree(drives[0])
    (manifest,) = drives[1].glob("infinity-run/copy-*/manifest-*")
    manifest.write_bytes(bytes(manifest.stat().st_size))
    model, optimizer = made(*drives[1:])
    with pytest.raises(ValueError, match=re.escape(f"{str(drives[1])!r}, damaged='report'")):
        step(model, optimizer, 0, 0)
    assert inf.restore(model, optimizer, drives[1], damaged="report").step == 2
    close(model)


def test_room_of_older_commits_is_given_up_on_all_drives_that_are_left(tmp_path: Path) -> None:
    drives = [tmp_path / name for name in ("one", "two", "three")]
    for drive in drives:
        drive.mkdir()
    model, optimizer = made(*drives, generations=3)
    for index in range(4):
        step(model, optimizer, index, 0)
    close(model)
    shutil.rmtree(drives[0])
    model, optimizer = made(*drives[1:], generations=3)
    run = inf.handle(model).durable
    assert run is not None
    assert run.files.give_up_older(1)
    for drive in drives[1:]:
        assert len(list(drive.glob("infinity-run/copy-*/manifest-*"))) == 1
    assert inf.restore(model, optimizer, drives[1:], damaged="report").step == 4
    close(model)


def reader() -> tuple[Any, Any]:
    """A model of the same shape that has a run of its own nowhere."""
    torch.manual_seed(1)
    model: Any = inf.offload(Net().bfloat16(), inf.Policy(unit_bytes_max=4096))
    return model, inf.AdamW(model.parameters(), lr=1e-2)


def test_directories_of_several_runs_are_never_taken_for_one(
    tmp_path: Path, wanted: list[str]
) -> None:
    one, two, both = shared(tmp_path)
    model, optimizer = reader()
    # Each has a newest commit, and neither is that of the other.
    for named in ([one, two], [two, one], [one, two, both]):
        with pytest.raises(ValueError, match="different runs; name the directories of one") as told:
            inf.restore(model, optimizer, named)
        assert f"{one}/infinity-run and" in str(told.value) or f"and {one}" in str(told.value)
        assert f"{two}/infinity-run" in str(told.value)
    inf.save(model, optimizer, tmp_path / "saved").wait()
    with pytest.raises(ValueError, match="different runs"):
        inf.restore(model, optimizer, [tmp_path / "saved", one])
    # A drive that both have is of the run that the home beside it names, before or behind it.
    for named, steps in (([one, both], 2), ([both, one], 2), ([two, both], 3), ([one], 2)):
        assert inf.restore(model, optimizer, named).step == steps
        assert digest(model) == wanted[steps]
    # The same where one run is known by its copy alone.
    shutil.rmtree(one)
    assert inf.restore(model, optimizer, [both, two]).step == 3
    assert inf.restore(model, optimizer, [one, both, two]).step == 3
    for copy in both.glob("infinity-run/copy-*"):
        if (copy / "drive0").resolve() == (two / "infinity-run").resolve():
            shutil.rmtree(copy)
    with pytest.raises(ValueError, match="different runs"):
        inf.restore(model, optimizer, [both, two])
    close(model)


def replace_first_drive(one: Path, two: Path) -> None:
    """Let a run of three steps lose its first drive, and another of one step begin there, without
    the second: both are known by one path."""
    one.mkdir()
    two.mkdir()
    model, optimizer = made(one, two)
    for index in range(3):
        step(model, optimizer, index, 0)
    close(model)
    shutil.rmtree(one)
    model, optimizer = made(one)
    step(model, optimizer, 0, 0)
    close(model)


def test_a_new_run_where_another_began_is_kept_apart_from_what_is_left_of_it(
    tmp_path: Path, wanted: list[str]
) -> None:
    one, two, three = (tmp_path / name for name in ("one", "two", "three"))
    three.mkdir()
    replace_first_drive(one, two)
    left = run_files(two)
    # The run that the drive is of, and not the one that has its home where that had it.
    model, optimizer = reader()
    assert inf.restore(model, optimizer, two, damaged="report").step == 3
    with pytest.raises(ValueError, match="different runs"):
        inf.restore(model, optimizer, [one, two])
    close(model)
    with pytest.raises(ValueError, match="two durable runs that began at the same path") as told:
        made(one, two)
    assert f"{one}/infinity-run and {two}/infinity-run/copy-" in str(told.value)
    assert run_files(two) == left
    # The ways that the error tells: either goes on, and the other stays.
    (two / "more").mkdir()
    model, optimizer = made(one, two / "more")
    assert inf.restore(model, optimizer, [one, two / "more"]).step == 1
    assert digest(model) == wanted[1]
    step(model, optimizer, 1, 0)
    close(model)
    model, optimizer = made(three, two)
    assert inf.restore(model, optimizer, [three, two], damaged="report").step == 3
    step(model, optimizer, 3, 0)
    close(model)
    model, optimizer = reader()
    assert inf.restore(model, optimizer, [three, two]).step == 4
    assert inf.restore(model, optimizer, [one, two / "more"]).step == 2
    assert digest(model) == wanted[2]
    close(model)


def test_a_damaged_home_is_not_made_good_from_another_run(tmp_path: Path) -> None:
    """No manifest of it can be read, and a copy below its name has a newer one."""
    one, two = (tmp_path / name for name in ("one", "two"))
    replace_first_drive(one, two)
    (manifest,) = one.glob("infinity-run/manifest-*")
    manifest.write_bytes(manifest.read_bytes()[:-1] + b"x")
    with pytest.raises(ChecksumError, match=manifest.name):
        made(one, two)
    # Both are given up.
    model, optimizer = made(one, two, durable="new")
    step(model, optimizer, 0, 0)
    close(model)
    model, optimizer = made(one, two)
    assert inf.restore(model, optimizer, [one, two]).step == 1
    close(model)


@pytest.mark.parametrize("how", ["gone", "damaged"])
@pytest.mark.parametrize("lost", [0, 1])
def test_a_run_is_known_by_the_manifest_of_any_rank(tmp_path: Path, how: str, lost: int) -> None:
    """The copy beside it has a newer generation of another run, which is not taken for it."""
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
