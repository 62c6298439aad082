"""SIGKILL at random moments: a durable run resumes at the last or the last but one step, a save
leaves the checkpoint before."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

import infinity as inf
from infinity._src.checkpoint.directory import generations
from tests.crashes import CALLS, Job, counted, digest, kill_often, step, trajectory
from tests.durable_runs import close, die, made, undisturbed
from tests.marks import mostly_slow

CASES = {
    "deferred": ({"update": "deferred"}, 2),
    "backward": ({"update": "backward"}, 3),
    "two_ranks": ({"world": 2}, 2),
    "three_generations": ({"generations": 3}, 2),
    "three_drives": ({"drives": 3}, 4),
    "four_on_two_ranks": ({"generations": 4, "world": 2}, 2),
    "saves": ({"saves": True}, 2),
    "durable_saves": ({"copies": True}, 2),
    "two_ranks_save": ({"world": 2, "copies": True}, 2),
}


@pytest.mark.parametrize("case", mostly_slow(CASES, "deferred", "three_generations", "saves"))
def test_killed_trainers_resume(
    case: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    values, kills = CASES[case]
    job, begun = Job(tmp_path, **values), time.monotonic()
    wanted = trajectory(tmp_path_factory.getbasetemp() / "reference", job.world)
    met = counted(kill_often(tmp_path, job, wanted, kills=kills, seed=len(case)))
    assert met["kills"] == kills
    print(f"\n{case}: {met} in {time.monotonic() - begun:.1f} s")


class Moments:
    """Copies the drives at the beginning of each call of `CALLS`, from the rename of a copy's
    manifest until one call after the rename in the home: a process killed there leaves these files.
    Also notes whether the home has its manifest. Writes are torn, too."""

    def __init__(self, drives: list[Path], top: Path) -> None:
        self._drives, self._top = drives, top
        self.taken: list[tuple[Path, bool]] = []
        self._begun = self._renamed = self._done = self._busy = False
        self._last: set[tuple[Path, int, int]] = set()

    def watch(self, patch: pytest.MonkeyPatch) -> None:
        for name in CALLS:
            patch.setattr(os, name, self._watched(name, getattr(os, name)))

    def _watched(self, name: str, real: Any) -> Any:
        def call(*args: Any, **values: Any) -> Any:
            target = Path(args[1]) if name == "replace" else Path()
            manifest = target.name.startswith("manifest-")
            if self._busy or not (self._begun or manifest):
                return real(*args, **values)
            self._begun = True
            self._take()
            if name == "write":
                half = real(args[0], bytes(args[1])[: len(args[1]) // 2])
                self._take()
                return half + real(args[0], bytes(args[1])[half:])
            result = real(*args, **values)
            self._renamed = self._renamed or (manifest and target.parent.name == "infinity-run")
            return result

        return call

    def _take(self) -> None:
        # A call that has changed no file leaves what the one before has left.
        now = {
            (path, path.lstat().st_size, path.lstat().st_ino)
            for drive in self._drives
            for path in drive.rglob("*")
        }
        if self._done or now == self._last:
            return
        self._last, self._busy = now, True
        place = self._top / str(len(self.taken))
        for drive in self._drives:
            shutil.copytree(drive, place / drive.name, symlinks=True)
        self.taken.append((place, self._renamed))
        self._done, self._busy = self._renamed, False

    def put_back(self, place: Path) -> None:
        for drive in self._drives:
            shutil.rmtree(drive)
            shutil.copytree(place / drive.name, drive, symlinks=True)


def test_a_kill_between_the_manifests_of_the_drives_loses_no_step(tmp_path: Path) -> None:
    """Copies are written first, and the home's manifest decides: whichever copies exist, the run
    resumes from the step that the home has, and the next commit writes all copies alike."""
    wanted = undisturbed()
    drives = [tmp_path / name for name in ("a", "b")]
    for drive in drives:
        drive.mkdir()
    model, optimizer = made(*drives)
    for index in range(2):
        step(model, optimizer, index, 0)
    inf.handle(model).flush()
    step(model, optimizer, 2, 0)
    inf.handle(model).pipeline.wait()
    moments = Moments(drives, tmp_path / "moments")
    with pytest.MonkeyPatch.context() as patch:
        moments.watch(patch)
        inf.handle(model).flush()
    die(model)
    homes = [renamed for _, renamed in moments.taken]
    assert homes.count(True) == 1
    assert homes.count(False) > 5
    # Committing over what is left takes longest: once with the manifest of the copy alone, and with
    # both.
    goes_on = [homes.index(False) + 1, homes.index(True)]
    for number, (place, renamed) in enumerate(moments.taken):
        moments.put_back(place)
        model, optimizer = made(*drives)
        found = inf.restore(model, optimizer, drives[0])
        assert (found.step, found.extra) == (2 + renamed, {"next": 2 + renamed}), place
        assert digest(model) == wanted[found.step], place
        if number not in goes_on:
            die(model)
            continue
        step(model, optimizer, found.step, 0)
        close(model)
        (copy,) = drives[1].glob("infinity-run/copy-*")
        assert len(generations(copy)) == 1
        assert generations(copy) == generations(drives[0] / "infinity-run")
