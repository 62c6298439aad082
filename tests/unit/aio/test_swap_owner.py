"""Owners of swap files that cannot do without a name: files of dead owners are cleared, those of
living ones are never touched."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import time
from pathlib import Path

import pytest

from infinity.aio import SwapFile
from infinity.aio import _swap_owner as swap_owner
from infinity.aio._swap_owner import PREFIX, Life, Owner, PrivateDirectory, clear_dead
from tests.forks import Child
from tests.unit.aio.disks import loop_ext4
from tests.unit.aio.rig import BACKENDS

# In a child: a file system without O_TMPFILE, as NFS and older overlayfs are.
WITHOUT_TMPFILE = """
import errno, os, sys, time
real_open = os.open
def refuse(path, flags, mode=0o777, **more):
    if flags & os.O_TMPFILE == os.O_TMPFILE:
        raise OSError(errno.EOPNOTSUPP, "no O_TMPFILE here")
    return real_open(path, flags, mode, **more)
os.open = refuse
"""
# The same child, which also dies, or waits, between making the name and removing it.
LINGERING = (
    WITHOUT_TMPFILE
    + """
from infinity.aio._swap_owner import PrivateDirectory
PrivateDirectory.remove = lambda self: (print("named", flush=True), time.sleep(600))
from infinity.aio import SwapFile
SwapFile.create(sys.argv[1])
"""
)


def private(parent: Path) -> set[str]:
    return {entry.name for entry in parent.iterdir() if entry.name.startswith(PREFIX)}


def test_an_owner_is_told_apart_from_every_other_process(tmp_path):
    me = Owner.this()
    assert me.alive()
    assert Owner.this() == me
    assert not dataclasses.replace(me, start_time=me.start_time + 1).alive()
    assert not dataclasses.replace(me, boot_id="another").alive()
    path = tmp_path / "owner"
    with path.open("w+b") as file:
        me.write(file.fileno())
    assert Owner.read(path) == me
    assert json.loads(path.read_text())["pid"] == os.getpid()
    for text in (
        "",
        "{",
        "[]",
        '{"pid": 1}',
        '{"host": "x", "boot_id": "y", "pid": "z", "start_time": 0}',
    ):
        path.write_text(text)
        assert Owner.read(path) is None


@pytest.mark.parametrize(
    ("fields", "status", "life"),
    [
        ("S 1 1 1 0 -1 4194304", "SigPnd:\t0000000000000000\nShdPnd:\t0000000000004000", "lives"),
        # The process waits for a write to a drive that hangs: the signal takes effect afterwards.
        ("D 1 1 1 0 -1 4194304", "SigPnd:\t0000000000000100\nShdPnd:\t0000000000000000", "ends"),
        ("D 1 1 1 0 -1 4194304", "SigPnd:\t0000000000000000\nShdPnd:\t0000000000000100", "ends"),
        # The process is freeing its memory.
        ("R 1 1 1 0 -1 4194308", "SigPnd:\t0000000000000000\nShdPnd:\t0000000000000000", "ends"),
        ("Z 1 1 1 0 -1 4227084", "", "ends"),
    ],
)
def test_a_process_that_ends_is_known_by_its_flags_and_signals(fields, status, life, monkeypatch):
    me = Owner.this()
    after = f"{fields} {'0 ' * 12}{me.start_time}".split()
    monkeypatch.setattr(swap_owner, "_stat_of", lambda pid: after)
    monkeypatch.setattr(swap_owner, "_status_of", lambda pid: status)
    assert me.life() is Life(life)
    assert me.alive() == (life == "lives")
    assert dataclasses.replace(me, start_time=me.start_time + 1).life() is Life.GONE


def test_the_directory_is_private_locked_and_gone_when_removed(tmp_path):
    place = PrivateDirectory(str(tmp_path))
    folder = place.path.parent
    assert folder.stat().st_mode & 0o777 == 0o700
    assert (folder / "owner.json").stat().st_mode & 0o777 == 0o600
    assert Owner.read(folder / "owner.json") == Owner.this()
    assert clear_dead(str(tmp_path)) == []
    place.path.touch()
    assert place.remove()
    assert place.remove()
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_has_to_stay_keeps_its_lock_until_the_file_is_closed(tmp_path):
    place = PrivateDirectory(str(tmp_path))
    silly = place.path.parent / ".nfs0001"  # what NFS makes of an open file that is unlinked
    silly.touch()
    assert not place.remove()
    assert clear_dead(str(tmp_path)) == []
    silly.unlink()
    assert place.remove()
    assert list(tmp_path.iterdir()) == []


def test_a_file_whose_directory_had_to_stay_takes_it_along_when_it_is_closed(tmp_path, monkeypatch):
    real_open, real_remove = os.open, PrivateDirectory.remove
    answers = iter([False, True])

    def refuse(path, flags, mode=0o777, **more):
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "no O_TMPFILE here")
        return real_open(path, flags, mode, **more)

    monkeypatch.setattr(os, "open", refuse)
    monkeypatch.setattr(
        PrivateDirectory, "remove", lambda self: next(answers) and real_remove(self)
    )
    file = SwapFile.create(tmp_path)
    assert len(private(tmp_path)) == 1
    assert clear_dead(str(tmp_path)) == []
    file.close()
    assert list(tmp_path.iterdir()) == []


def test_the_next_start_removes_files_of_killed_processes_only(
    tmp_path,
):
    with Child(LINGERING, tmp_path) as doomed, Child(LINGERING, tmp_path) as neighbour:
        assert doomed.says() == neighbour.says() == "named"
        both = private(tmp_path)
        assert len(both) == 2
        assert clear_dead(str(tmp_path)) == []
        doomed.kill()
        with SwapFile.create(tmp_path):
            (left,) = private(tmp_path)
        owner = Owner.read(tmp_path / left / "owner.json")
        assert owner is not None
        assert owner.pid == neighbour.pid
        assert (tmp_path / left / "swap").exists()
        neighbour.kill()
        assert clear_dead(str(tmp_path)) == [left]
    assert list(tmp_path.iterdir()) == []


def dead_directory(parent: Path, name: str, owner: Owner | None) -> Path:
    folder = parent / (PREFIX + name)
    folder.mkdir(mode=0o700)
    (folder / "owner.json").write_text(
        "" if owner is None else json.dumps(dataclasses.asdict(owner))
    )
    (folder / "swap").write_bytes(b"x")
    return folder


def test_only_directories_of_ours_are_cleared(tmp_path):
    gone = dataclasses.replace(Owner.this(), pid=2**22 + 1, start_time=5)
    ours = dead_directory(tmp_path, "ours", gone)
    rebooted = dead_directory(tmp_path, "rebooted", dataclasses.replace(gone, boot_id="before"))
    torn = dead_directory(tmp_path, "torn", None)
    unborn = tmp_path / (PREFIX + "unborn")
    unborn.mkdir(mode=0o700)
    kept = [
        dead_directory(tmp_path, "open", gone),  # for others, so not made by us
        dead_directory(tmp_path, "more", gone),  # with something else in it
        dead_directory(tmp_path, "alive", Owner.this()),  # its lock does not work, its process does
        tmp_path / "somebody-s",
        tmp_path / (PREFIX + "file"),
        tmp_path / (PREFIX + "link"),
    ]
    kept[0].chmod(0o755)
    (kept[1] / "thesis.tex").touch()
    kept[3].mkdir(mode=0o700)
    kept[4].touch()
    kept[5].symlink_to(
        dead_directory(tmp_path.parent, f"target-{tmp_path.name}", gone), target_is_directory=True
    )
    if os.getuid() == 0:
        kept.append(dead_directory(tmp_path, "foreign", gone))
        os.chown(kept[-1], 65534, 65534)
    assert set(clear_dead(str(tmp_path))) == {ours.name, rebooted.name, torn.name, unborn.name}
    assert all(path.exists() for path in kept)
    assert (kept[5] / "swap").exists()


def test_on_a_network_file_system_another_host_s_directory_is_left_alone(tmp_path, monkeypatch):
    other = Owner("elsewhere", "another boot", 1, 1)
    folder = dead_directory(tmp_path, "other", other)
    monkeypatch.setattr(swap_owner, "file_system_type", lambda path: "nfs4")
    assert clear_dead(str(tmp_path)) == []
    # a dead container's, say
    monkeypatch.setattr(swap_owner, "file_system_type", lambda path: "ext4")
    assert clear_dead(str(tmp_path)) == [folder.name]


def test_clearing_never_fails(tmp_path, monkeypatch, caplog):
    assert clear_dead(str(tmp_path / "missing")) == []
    assert "cannot look" in caplog.text
    dead_directory(tmp_path, "ours", None)

    def fail(*_arguments: object) -> None:
        raise PermissionError(13, "no")

    monkeypatch.setattr(swap_owner.Path, "rmdir", fail)
    assert clear_dead(str(tmp_path)) == []
    assert "cannot be removed" in caplog.text


def test_many_processes_that_start_and_clear_at_once_never_take_each_other_s_directory(tmp_path):
    code = (
        WITHOUT_TMPFILE
        + """
from infinity.aio import SwapFile
for number in range(60):
    with SwapFile.create(sys.argv[1]) as file:
        file.grow(4096)
        text = (b"%d-%d" % (os.getpid(), number)).ljust(4096)
        import mmap
        page = mmap.mmap(-1, 4096)
        page[:] = text
        assert os.pwritev(file.fd, [page], 0) == 4096
        assert os.fstat(file.fd).st_nlink == 0
        os.preadv(file.fd, [page], 0)
        assert page[:] == text
print("sound")
"""
    )
    with (
        Child(code, tmp_path) as a,
        Child(code, tmp_path) as b,
        Child(code, tmp_path) as c,
    ):
        assert [process.says() for process in (a, b, c)] == ["sound"] * 3
        assert [process.exit_code() for process in (a, b, c)] == [0, 0, 0]
    assert list(tmp_path.iterdir()) == []


JOB = """
import itertools, sys
from pathlib import Path
import numpy as np
from tests.unit.aio.rig import *
rig = Rig(Path(sys.argv[1]), sys.argv[2], chunk_count=64)
rng = np.random.default_rng(int(sys.argv[3]))
values = {i: random_chunk(rng) for i in range(64)}
rig.store(values).wait(30)
print("stored", flush=True)
"""
WRITES_FOR_EVER = JOB + "for _ in itertools.count(): rig.store(values).wait(30)\n"
VERIFIES = (
    JOB
    + """
for line in sys.stdin:
    assert all(same(rig.read(i), values[i]) for i in range(64))
    print("right", flush=True)
rig.close()
"""
)


@pytest.mark.parametrize("tmpfile", [True, False])
def test_a_job_killed_in_mid_write_leaves_nothing_and_its_neighbour_s_data_right(tmp_path, tmpfile):
    start = "" if tmpfile else WITHOUT_TMPFILE
    with Child(start + VERIFIES, tmp_path, BACKENDS[0], 1) as neighbour:
        assert neighbour.says() == "stored"
        for seed in (2, 3):
            with Child(start + WRITES_FOR_EVER, tmp_path, BACKENDS[0], seed) as doomed:
                assert doomed.says() == "stored"
                time.sleep(0.2)
                assert doomed.alive
                doomed.kill()
            assert list(tmp_path.iterdir()) == []
            neighbour.hears("?")
            assert neighbour.says() == "right"
        assert neighbour.exit_code() == 0


@pytest.mark.privileged
@pytest.mark.parametrize("tmpfile", [True, False])
def test_the_space_of_a_killed_job_is_free_at_once(tmp_path, tmpfile):
    code = ("" if tmpfile else WITHOUT_TMPFILE) + (
        "import sys, time; from infinity.aio import SwapFile; file = SwapFile.create(sys.argv[1]); "
        "file.grow(16 << 20)\n"
        "print('grown', flush=True); time.sleep(600)"
    )
    with loop_ext4(tmp_path / "drive", 64 << 20) as place:
        before = os.statvfs(place).f_bfree
        with Child(code, place) as job:
            assert job.says() == "grown"
            assert os.statvfs(place).f_bfree <= before - (16 << 20) // os.statvfs(place).f_frsize
            job.kill()
        assert os.statvfs(place).f_bfree == before
