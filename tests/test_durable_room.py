"""Space that a killed durable run leaves on the drives: before the next process allocates any, it
removes the states that no commit names, and no others."""

from __future__ import annotations

import dataclasses
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import infinity as inf
from infinity._src.checkpoint.directory import newest_generation, read_head
from infinity._src.checkpoint.durable.files import RunFiles
from infinity._src.checkpoint.durable.initialization_journal import InitializedFlat
from infinity._src.checkpoint.manifest import FileEntry, Head
from infinity.aio._swap_owner import lock
from tests.crashes import digest, step
from tests.durable_runs import close, made, undisturbed
from tests.forks import FORKSERVER
from tests.unit.checkpoint.test_manifest import manifest


@pytest.fixture(scope="module")
def wanted() -> tuple[str, ...]:
    return undisturbed()


def begun(*places: Path) -> tuple[Any, Any]:
    """A run with as much on each drive."""
    return made(*places, io={"bandwidths": {str(place): (1e9, 1e9) for place in places}})


def die_at_removal(part: str, after: int = 0) -> None:
    """Have this process killed instead of removing a file with `part` in its name, when so many
    such files were removed."""
    real, left = os.unlink, [after]

    def unlink(path: Any, **values: Any) -> None:
        # Unlinking a name just before a file of that name is written does not count.
        if part in Path(path).name and Path(path).suffix != ".partial":
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)
            left[0] -= 1
        real(path, **values)

    os.unlink = unlink


def train_and_die(amid: str, *places: Path) -> None:
    """Commit two steps, and be killed with the third one written, or amid its commit."""
    torch.set_num_threads(1)
    model, optimizer = begun(*places)
    for index in range(2):
        step(model, optimizer, index, 0)
    inf.handle(model).flush()
    step(model, optimizer, 2, 0)
    inf.handle(model).pipeline.wait()
    if amid == "commit":
        die_at_removal("manifest-")
        inf.handle(model).flush()
    os.kill(os.getpid(), signal.SIGKILL)


def open_and_die(after: int, *places: Path) -> None:
    """Be killed amid the removal of states, at the beginning of a process."""
    torch.set_num_threads(1)
    die_at_removal("states-", after)
    begun(*places)


def killed(target: Any, *arguments: Any) -> None:
    process = FORKSERVER.Process(target=target, args=arguments)
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL


def states(*places: Path) -> dict[Path, int]:
    """Bytes that each states file takes."""
    found = (path for place in places for path in (place / "infinity-run").glob("states-*"))
    return {path: path.stat().st_blocks * 512 for path in found}


def named(place: Path) -> set[Path]:
    """States files that manifests name, of all generations."""
    home = place / "infinity-run"
    return {
        (home / file.name).resolve()
        for path in home.glob("manifest-*")
        for file in read_head(path).files
    }


def put(home: Path, generation: int, rank: int, name: str) -> None:
    """Write the manifest of one of two ranks, which names a states file of 8192 bytes."""
    one = dataclasses.replace(manifest(rank, 2, generation), files=(FileEntry(name, 8192),))
    (home / one.name).write_bytes(b"".join(one.parts()))


@pytest.fixture
def places(tmp_path: Path) -> list[Path]:
    found = [tmp_path / "one", tmp_path / "two"]
    for place in found:
        place.mkdir()
    return found


@pytest.mark.parametrize("amid", ["step", "commit"])
def test_a_killed_run_is_restored_beside_its_committed_states_alone(
    places: list[Path], wanted: tuple[str, ...], amid: str
) -> None:
    killed(train_and_die, amid, *places)
    before, kept = states(*places), named(places[0])
    # An interrupted commit leaves both generations, and either may be the newest.
    assert (len(before), len(kept)) == (4, 2 if amid == "step" else 4)
    model, optimizer = begun(*places)
    assert states(*places).keys() & before.keys() == kept
    both = sum(before.values())
    beside = sum(before[path] for path in kept)
    # Besides the bytes, a file system takes a block for the list of a file's extents.
    now = states(*places)
    assert sum(now.values()) == pytest.approx(both + beside, abs=4096 * len(now))
    committed = 2 if amid == "step" else 3
    assert inf.restore(model, optimizer, places[0]).step == committed
    assert sum(states(*places).values()) == pytest.approx(both, rel=0.05)
    assert digest(model) == wanted[committed]
    step(model, optimizer, committed, 0)
    assert digest(model) == wanted[committed + 1]
    close(model)


def test_a_kill_amid_the_removal_loses_nothing(tmp_path: Path, wanted: tuple[str, ...]) -> None:
    killed(train_and_die, "step", tmp_path)
    before, kept = states(tmp_path), named(tmp_path)
    for after in (0, 1):  # the record of its owner, and the file
        killed(open_and_die, after, tmp_path)
        assert kept < states(tmp_path).keys() == before.keys()
    model, optimizer = begun(tmp_path)
    assert states(tmp_path).keys() & before.keys() == kept
    assert inf.restore(model, optimizer, tmp_path).step == 2
    assert digest(model) == wanted[2]
    close(model)
    assert len(list((tmp_path / "infinity-run").glob("*states-*"))) == 2


def test_a_commit_that_another_rank_may_end_keeps_its_states(tmp_path: Path) -> None:
    home = tmp_path / "infinity-run"
    home.mkdir(0o700)
    files = [f"states-{0:016x}-{layer}.rank{rank}" for rank in (0, 1) for layer in (1, 2, 3)]
    # Of another run, to which this directory was a further drive.
    files.append(f"states-1{0:015x}-1.rank0")
    (home / "home-10000000").symlink_to("elsewhere")
    for name in files:
        (home / name).write_bytes(bytes(8192))
    put(home, 1, 0, files[0])
    put(home, 1, 1, files[3])
    put(home, 2, 0, files[1])
    run = RunFiles([tmp_path], 0, 2)
    assert run.before is not None
    # Rank 0 has removed its third file; rank 1 will remove its own.
    left = {path.name for path in states(tmp_path)}
    assert left == {*files[:2], *files[3:]}
    # Values that are equal on all ranks are present once; chunks are not loaded.
    assert [type(one) for one in run.before] == [Head, Head]
    assert [len(one.optimizers) for one in run.before] == [1, 0]
    run.close()
    put(home, 2, 1, files[4])
    assert [one.files[0].name for one in newest_generation(home)] == [files[1], files[4]]
    assert all((home / one.files[0].name).exists() for one in newest_generation(home))


def test_a_smaller_run_finds_room_where_ranks_that_it_has_not_left_unnamed_states(
    tmp_path: Path,
) -> None:
    home = tmp_path / "infinity-run"
    home.mkdir(0o700)
    names = [f"states-{0:016x}-{layer}.rank{rank}" for rank in (0, 1) for layer in (1, 2, 3)]
    for name in names:
        (home / name).write_bytes(bytes(8192))
    put(home, 1, 0, names[0])
    put(home, 1, 1, names[3])
    # A process that still runs may be about to name it.
    fd = os.open(home / names[4], os.O_RDWR)
    assert lock(fd)
    RunFiles([tmp_path], 0, 1).close()
    assert {path.name for path in states(tmp_path)} == {names[0], names[3], names[4]}
    os.close(fd)
    RunFiles([tmp_path], 0, 1).close()
    assert {path.name for path in states(tmp_path)} == {names[0], names[3]}


def test_the_first_commit_that_another_rank_may_end_keeps_its_states(tmp_path: Path) -> None:
    """The journal outlives the rank's manifest, until all ranks have manifests."""
    run = RunFiles([tmp_path], 0, 1)
    named, other = (Path(run.add()[0].path) for _ in range(2))
    run.keep()
    put(run.home, 1, 0, named.name)
    run.close()
    journal = run.home / "fill.rank0"
    data = journal.read_bytes()
    again = RunFiles([tmp_path], 0, 1)
    assert again.before is None
    assert states(tmp_path).keys() == {named}
    assert not other.exists()
    again.close()
    # An unreadable manifest may name any file.
    journal.write_bytes(data)
    (manifest_of_0,) = run.home.glob("manifest-*")
    manifest_of_0.write_bytes(manifest_of_0.read_bytes()[:-1])
    RunFiles([tmp_path], 0, 1, released=True).close()
    assert states(tmp_path).keys() == {named}


def test_states_of_a_run_to_which_the_home_is_a_further_drive_stay_while_it_is_there(
    places: list[Path],
) -> None:
    theirs = RunFiles(places, 0, 1)
    files = [theirs.add() for _ in range(2)]
    mine = RunFiles(places[1:], 0, 1)
    own = Path(mine.add()[0].path)
    there = states(places[1]).keys()
    assert len(there) == 3
    # The files are locked; then an interrupted initialization can resume in them; then a manifest
    # names one.
    mine.remove_strangers([])
    assert states(places[1]).keys() == there
    theirs.journal.start({"states": [list(each) for each in theirs.states()]}, known=True)
    theirs.journal.add(0, InitializedFlat(1, b"sums"))
    theirs.journal.flush()
    theirs.close()
    mine.remove_strangers([])
    assert states(places[1]).keys() == there
    theirs = RunFiles(places, 0, 1)
    assert [[file.path for file in theirs.add()] for _ in files] == [
        [file.path for file in each] for each in files
    ]
    theirs.keep()
    theirs.committed()
    name = Path(files[0][1].path)
    put(theirs.home, 1, 0, f"drive1/{name.name}")
    theirs.close()
    mine.remove_strangers([])
    assert states(places[1]).keys() == {own, name}
    shutil.rmtree(theirs.home)
    mine.remove_strangers([])
    assert states(places[1]).keys() == {own}
    mine.close()
