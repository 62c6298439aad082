"""Durable runs that keep older commits (`Policy(generations=3)` and more), and
`inf.restore(damaged="from-older")`."""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import infinity as inf
from infinity._src.checkpoint.directory import generations, read_generation
from infinity._src.checkpoint.durable import named_places
from infinity._src.checkpoint.durable.named_places import OlderCommits
from infinity._src.checkpoint.manifest import Manifest
from infinity.aio import SwapFile
from infinity.errors import ChecksumError, DeviceFailedError, PeerFailed, StateInvalid
from tests.crashes import Net, digest, step
from tests.distributed.ranks import on_ranks
from tests.durable_runs import close, die, made, undisturbed
from tests.marks import mostly_slow
from tests.test_damaged_restore import states_of


@pytest.fixture(scope="module")
def wanted() -> tuple[str, ...]:
    return undisturbed()


def home(place: Path) -> Path:
    return place / "infinity-run"


def reader(seed: int = 0) -> tuple[Any, Any]:
    """Return a model of the same shape without a run."""
    torch.manual_seed(seed)
    policy = inf.Policy(params="cpu", optim="cpu", unit_bytes_max=4096)
    model: Any = inf.offload(Net().bfloat16(), policy)
    return model, inf.AdamW(model.parameters(), lr=1e-2)


def digest_at(place: Path, generation: int, room: Path) -> tuple[int, str]:
    """Step and digest of one commit of a run."""
    shutil.copytree(home(place), room)
    for path in room.glob("manifest-*"):
        if f"-{generation:08d}." not in path.name:
            path.unlink()
    model, optimizer = reader()
    found = inf.restore(model, optimizer, room).step, digest(model)
    close(model)
    shutil.rmtree(room)
    return found


def check_all(place: Path, wanted: tuple[str, ...]) -> list[int]:
    """Check that every commit with a manifest is complete. Returns their steps, newest first."""
    steps = []
    for generation in generations(home(place)):
        step_of, found = digest_at(place, generation, place.parent / "room")
        assert found == wanted[step_of]
        steps.append(step_of)
    return steps


def damage(directory: Path, manifest: Manifest, chunk: int) -> None:
    """Change a byte of a chunk of a commit."""
    row = manifest.rows[chunk]
    path = directory / manifest.files[row["file"]].name
    with path.open("r+b") as data:
        data.seek(int(row["file_offset"] + row["section_at"][0]))
        byte = data.read(1)[0]
        data.seek(-1, 1)
        data.write(bytes([byte ^ 4]))


@pytest.mark.parametrize("count", mostly_slow([3, 4], 4))
def test_each_commit_that_is_kept_is_whole(
    tmp_path: Path, wanted: tuple[str, ...], count: int
) -> None:
    model, optimizer = made(tmp_path / "run", generations=count)
    for index in range(5):
        step(model, optimizer, index, 0)
        inf.handle(model).flush()
        least = max(index + 1 - (count - 2), 0)
        if index in (0, 3, 4):
            assert check_all(tmp_path / "run", wanted) == list(range(index + 1, least - 1, -1))
    die(model)


def test_training_continues_from_the_older_commit(tmp_path: Path, wanted: tuple[str, ...]) -> None:
    place = tmp_path / "run"
    for kind in ("chunk", "table", "manifest", "buffers"):
        model, optimizer = made(place, generations=3)
        for index in range(3):
            step(model, optimizer, index, 0)
        close(model)
        newest = max(generations(home(place)))
        if kind == "chunk":
            damage(home(place), read_generation(home(place), newest)[0], 1)
        else:
            path = home(place) / f"{kind}-{newest:08d}.rank0"
            content = bytearray(path.read_bytes())
            content[len(content) // 2] ^= 4
            path.write_bytes(content)
        model, optimizer = made(place, generations=3)
        with pytest.raises(ChecksumError):
            inf.restore(model, optimizer, place)
        # Half of the states were written, where a chunk is damaged.
        with contextlib.suppress(StateInvalid):
            die(model)
        model, optimizer = made(place, generations=3)
        found = inf.restore(model, optimizer, place, damaged="from-older")
        assert (found.step, found.extra, found.damaged) == (2, {"next": 2}, ())
        assert "a newer commit is damaged" in found.notes[-1]
        assert digest(model) == wanted[2]
        for index in (2, 3):
            step(model, optimizer, index, 0)
        assert digest(model) == wanted[4]
        close(model)
        # The damage went with the first commit.
        model, optimizer = made(place, generations=3)
        assert inf.restore(model, optimizer, place).step == 4
        close(model)
        shutil.rmtree(place)


@functools.cache
def kept_run(place: Path) -> tuple[dict[int, Any], dict[int, Manifest]]:
    """A run with three commits: the states at each step, and the manifests."""
    model, optimizer = made(place, generations=4)
    states = {}
    for index in range(4):
        step(model, optimizer, index, 0)
        inf.handle(model).flush()
        states[index + 1] = states_of(model)
    die(model)
    manifests = {}
    for generation in generations(home(place)):
        (found,) = read_generation(home(place), generation)
        manifests[found.step] = found
    assert sorted(manifests) == [2, 3, 4]
    return states, manifests


def damaged_elements(manifest: Manifest, chunks: set[int]) -> dict[str, torch.Tensor]:
    """Elements of each parameter that lie in these chunks."""
    found = {}
    for index, flat in enumerate(manifest.layout.flats):
        lost = torch.zeros(flat.shard_numel, dtype=torch.bool)
        for row in (manifest.rows[chunk] for chunk in chunks):
            if row["flat"] == index:
                lost[row["start"] : row["start"] + row["numel"]] = True
        for entry in flat.params:
            found[entry.name] = lost[entry.offset : entry.offset + entry.numel]
    return found


@settings(max_examples=8, deadline=None)
@given(st.lists(st.sets(st.integers(0, 2)), min_size=3, max_size=3))
def test_any_damage_gives_the_promised_result(
    tmp_path_factory: pytest.TempPathFactory, hit: list[set[int]]
) -> None:
    source = tmp_path_factory.getbasetemp() / "kept"
    states, manifests = kept_run(source)
    assert len(manifests[4].rows) == 3
    place = tmp_path_factory.mktemp("damaged") / "run"
    shutil.copytree(home(source), place)
    lost = dict(zip((4, 3, 2), hit, strict=True))
    for at, chunks in lost.items():
        for chunk in chunks:
            damage(place, manifests[at], chunk)
    model, optimizer = reader(seed=1)
    fresh = states_of(model)
    found = inf.restore(model, optimizer, place, damaged="from-older")
    whole = [at for at, chunks in lost.items() if not chunks]
    assert found.step == (whole[0] if whole else 4)
    wanted = {name: dict(values) for name, values in states[found.step].items()}
    reported = {name: torch.zeros(len(v["master"]), dtype=torch.bool) for name, v in fresh.items()}
    for each in found.damaged:
        reported[each.name][each.start : each.stop] = True
    if not whole:
        missing = damaged_elements(manifests[4], lost[4])
        for name, mask in missing.items():
            assert torch.equal(reported[name], mask), name
        for other in (states[3], states[2], fresh):
            for name, mask in missing.items():
                for key, values in wanted[name].items():
                    wanted[name][key] = torch.where(mask, other[name][key], values)
            at = 3 if other is states[3] else 2
            masks = damaged_elements(manifests[at], lost[at])
            missing = {name: mask & masks[name] for name, mask in missing.items()}
        for each in found.damaged:
            told = [at for at in (3, 2) if f"replaced by the values of step {at}" in each.reason]
            gone = "no older commit has the values" in each.reason
            assert len(told) + gone == 1, each.reason
    else:
        assert not found.damaged
    for name, values in states_of(model).items():
        for key, value in values.items():
            assert torch.equal(value, wanted[name][key]), (name, key, found)
    step(model, optimizer, found.step, 0)
    close(model)
    shutil.rmtree(place)


def test_an_ordinary_save_has_no_older_one_and_says_so(tmp_path: Path) -> None:
    model, optimizer = reader()
    step(model, optimizer, 0, 0)
    inf.save(model, optimizer, tmp_path / "saved").wait()
    close(model)
    (manifest,) = read_generation(tmp_path / "saved", 1)
    damage(tmp_path / "saved", manifest, 0)
    model, optimizer = reader(seed=1)
    found = inf.restore(model, optimizer, tmp_path / "saved", damaged="from-older")
    assert found.step == 1
    assert found.damaged
    assert all("there is no older commit" in each.reason for each in found.damaged)
    close(model)


def test_without_space_fewer_commits_are_kept(
    tmp_path: Path,
    wanted: tuple[str, ...],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place = tmp_path / "run"
    model, optimizer = made(place, generations=3)
    step(model, optimizer, 0, 0)
    inf.handle(model).flush()
    assert len(check_all(place, wanted)) == 2
    close(model)
    monkeypatch.setattr(SwapFile, "free_bytes", lambda _: 1 << 20)
    with caplog.at_level(logging.WARNING, "infinity"):
        model, optimizer = made(place, generations=3)
        assert inf.restore(model, optimizer, place).step == 1
        for index in range(1, 4):
            step(model, optimizer, index, 0)
            inf.handle(model).flush()
            assert check_all(place, wanted) == [index + 1]
    assert sum("the drives lack space for 2 commits" in text for text in caplog.messages) == 1
    die(model)
    model, optimizer = made(place, generations=3)
    assert inf.restore(model, optimizer, place, damaged="from-older").step == 4
    close(model)


def test_a_start_on_full_drives_drops_the_older_commit(
    tmp_path: Path,
    wanted: tuple[str, ...],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A drive with space for only three places: the next process needs two besides the newest
    commit."""
    place = tmp_path / "run"
    place.mkdir()

    def used() -> int:
        return sum(path.stat().st_blocks * 512 for path in home(place).glob("states-*"))

    model, optimizer = made(place, generations=3)
    room = used() - inf.handle(model).parts.tiers.store.spare_bytes
    monkeypatch.setattr(named_places, "_LEFT_FREE", 0)
    monkeypatch.setattr(SwapFile, "free_bytes", lambda _: room - used())
    for index in range(3):
        step(model, optimizer, index, 0)
    inf.handle(model).flush()
    assert check_all(place, wanted) == [3, 2]
    die(model)
    for begun in (3, 4):
        model, optimizer = made(place, generations=3)
        assert "the drives lack space, so only the newest commit" in caplog.text
        assert inf.restore(model, optimizer, place).step == begun
        assert digest(model) == wanted[begun]
        step(model, optimizer, begun, 0)
        inf.handle(model).flush()
        assert check_all(place, wanted) == [begun + 1, begun]
        die(model)
        caplog.clear()
    assert used() <= room


@pytest.mark.parametrize("full", [False, True])
def test_linked_saves_stay_what_they_are(
    tmp_path: Path, wanted: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, full: bool
) -> None:
    place = tmp_path / "run"
    model, optimizer = made(place, generations=3)
    for index in range(5):
        step(model, optimizer, index, 0)
        if index in (1, 2):
            save = inf.save(model, optimizer, tmp_path / f"saved{index}")
            save.wait()
            assert save.copied_bytes == 0
        if full and index == 2:
            monkeypatch.setattr(SwapFile, "free_bytes", lambda _: 0)
        inf.handle(model).flush()
        steps = check_all(place, wanted)
        assert steps in ([index + 1], [index + 1, index])
        assert full or len(steps) == 2
    assert digest(model) == wanted[5]
    die(model)
    for index in (1, 2):
        model, optimizer = reader()
        assert inf.restore(model, optimizer, tmp_path / f"saved{index}").step == index + 1
        assert digest(model) == wanted[index + 1]
        close(model)


def test_what_is_placed_anew_leaves_the_newest_whole(tmp_path: Path) -> None:
    """A second optimizer moves its parameters: older commits are dropped."""
    torch.manual_seed(0)
    place = tmp_path / "run"
    place.mkdir()
    policy = inf.Policy(
        params="nvme", optim="nvme", ram="min", nvme=place, durable=True, generations=3,
        unit_bytes_max=4096,
    )  # fmt: skip
    model: Any = inf.offload(Net().bfloat16(), policy)
    first, *others = model.parameters()
    optimizer = inf.AdamW([first], lr=1e-2)
    for index in range(3):
        step(model, optimizer, index, 0)
    inf.handle(model).flush()
    assert len(generations(home(place))) == 2
    optimizer.add_param_group({"params": others})
    assert len(generations(home(place))) == 1
    for index in range(3, 6):
        step(model, optimizer, index, 0)
    inf.handle(model).flush()
    assert len(generations(home(place))) == 2
    wanted = digest(model)
    die(model)
    model, optimizer = reader()
    assert inf.restore(model, optimizer, place).step == 6
    assert digest(model) == wanted
    close(model)


def no_file(*_: object) -> bool:
    raise DeviceFailedError("no file", errno=errno.EIO, path="drive", op="open")


def on_two(rank: int, place: Path) -> tuple[int, str, str, int]:
    model, optimizer = made(place / "run", generations=3)
    for index in range(3):
        step(model, optimizer, index, rank)
        inf.handle(model).flush()
        if index == 1:
            before = digest(model)
    close(model)
    torch.distributed.barrier()
    # Damage a shard that rank 1 does not read: rank 0 has the whole small model.
    if rank == 0:
        newest = max(generations(home(place / "run")))
        damage(home(place / "run"), read_generation(home(place / "run"), newest)[0], 0)
    torch.distributed.barrier()
    model, optimizer = made(place / "run", generations=3)
    found = inf.restore(model, optimizer, place / "run", damaged="from-older")
    after = digest(model)
    # A place missing on one rank stops both at the same step.
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(OlderCommits, "make_way", no_file)
        with pytest.raises(DeviceFailedError if rank == 1 else PeerFailed):
            step(model, optimizer, found.step, rank)
    optimizer.zero_grad()
    step(model, optimizer, found.step, rank)
    close(model)
    return found.step, before, after, len(generations(home(place / "run")))


def test_ranks_agree_on_the_commit(tmp_path: Path) -> None:
    for found, before, after, count in on_ranks(on_two, tmp_path / "ranks", 2):
        assert (found, after, count) == (2, before, 2)


@pytest.mark.parametrize("kind", ["manifest", "table", "buffers", "extra"])
def test_a_file_that_is_damaged_in_the_home_is_taken_from_its_copy(
    tmp_path: Path, wanted: tuple[str, ...], kind: str
) -> None:
    """The newest commit is whole as long as one drive has each small file of it."""
    drives = [tmp_path / "a", tmp_path / "b"]
    drives[1].mkdir()
    model, optimizer = made(*drives, generations=3)
    for index in range(3):
        step(model, optimizer, index, 0)
    close(model)
    path = max(home(drives[0]).glob(f"{kind}-*"))
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)
    ways: dict[Any, Any] = {"raise": drives[0], "from-older": drives, "report": drives[1]}
    for mode, named in ways.items():
        model, optimizer = reader()
        found = inf.restore(model, optimizer, named, damaged=mode)
        assert (found.step, found.extra, found.damaged) == (3, {"next": 3}, ()), mode
        assert digest(model) == wanted[3]
        close(model)
    model, optimizer = made(*drives, generations=3)
    assert inf.restore(model, optimizer, drives[0], damaged="from-older").step == 3
    assert digest(model) == wanted[3]
    close(model)


def test_what_is_damaged_in_the_copy_too_is_told(tmp_path: Path) -> None:
    drives = [tmp_path / "a", tmp_path / "b"]
    drives[1].mkdir()
    model, optimizer = made(*drives, generations=3)
    for index in range(3):
        step(model, optimizer, index, 0)
    close(model)
    (copy,) = home(drives[1]).glob("copy-*")
    for place in (home(drives[0]), copy):
        path = max(place.glob("extra-*"))
        path.write_bytes(bytes(path.stat().st_size))
    model, optimizer = made(*drives, generations=3)
    with pytest.raises(ChecksumError, match="extra-"):
        inf.restore(model, optimizer, drives)
    assert inf.restore(model, optimizer, drives, damaged="from-older").step == 2
    close(model)


@pytest.mark.parametrize("lost", [False, True])
def test_older_commits_are_found_without_the_first_drive(
    tmp_path: Path, wanted: tuple[str, ...], lost: bool
) -> None:
    """The manifests of the first drive are gone, with its states or without, and the newest copy is
    damaged."""
    drives = [tmp_path / "a", tmp_path / "b"]
    drives[1].mkdir()
    model, optimizer = made(*drives, generations=3)
    for index in range(3):
        step(model, optimizer, index, 0)
    close(model)
    for path in home(drives[0]).glob("manifest-*"):
        path.unlink()
    if lost:
        shutil.rmtree(drives[0])
    (copy,) = home(drives[1]).glob("copy-*")
    newest = max(copy.glob("manifest-*"))
    newest.write_bytes(newest.read_bytes()[:-1] + b"x")
    now = [tmp_path / "n" if lost else drives[0], drives[1]]
    model, optimizer = made(*now, generations=3)
    with pytest.raises(ChecksumError, match=newest.name):
        inf.restore(model, optimizer, now)
    found = inf.restore(model, optimizer, now, damaged="from-older")
    assert (found.step, bool(found.damaged)) == (2, lost)
    assert lost or digest(model) == wanted[2]
    step(model, optimizer, 2, 0)
    close(model)
    model, optimizer = made(*now, generations=3)
    assert inf.restore(model, optimizer, now).step == 3
    assert lost or digest(model) == wanted[3]
    close(model)
