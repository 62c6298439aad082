"""Other users of the machine: a process with another uid tries to list, read, write, replace and
remove a run's files."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import infinity as inf
from infinity._src.base.atomic_file import open_new
from infinity._src.base.metrics_file import MetricsFile
from infinity._src.base.step_timeline import StepTimeline
from infinity._src.base.telemetry import Timeline
from infinity._src.checkpoint import manifest as manifests
from infinity._src.checkpoint.durable.files import RunFiles
from infinity._src.checkpoint.formats import dcp, deepspeed_export
from infinity._src.checkpoint.formats.safetensors_writer import WeightFiles, write_file
from infinity._src.measure.report import write_record
from infinity.aio import SwapFile
from infinity.aio._swap_owner import PrivateDirectory
from infinity.compat.deepspeed import zero_to_fp32
from infinity.compat.deepspeed.checkpoints import save_weights
from infinity.errors import AioError
from tests import durable_runs
from tests.crashes import step
from tests.hostile import seal_manifest

STRANGER = 65534


def as_stranger(call: Callable[[], Sequence[str]]) -> list[str]:
    """Return the result of `call` in a child with another uid. Skips if that is impossible."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        told: Sequence[str] = ["no uid"]
        with contextlib.suppress(PermissionError):
            os.setgroups([])
            os.setresgid(STRANGER, STRANGER, STRANGER)
            os.setresuid(STRANGER, STRANGER, STRANGER)
            told = call()
        os.write(writer, json.dumps(told).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answer:
        found: list[str] = json.loads(answer.read() or '["the child ended"]')
    os.waitpid(child, 0)
    if found == ["no uid"]:
        pytest.skip("this process may not become another user (CAP_SETUID)")
    return found


def _moved(path: Path) -> None:
    path.rename(path.with_name("moved"))


WAYS: dict[str, Callable[[Path], object]] = {
    "list": os.listdir,
    "read": lambda path: os.open(path, os.O_RDONLY),
    "write": lambda path: os.open(path, os.O_WRONLY),
    "make": lambda path: os.open(path / "planted", os.O_WRONLY | os.O_CREAT, 0o666),
    "cut": lambda path: os.truncate(path, 0),
    "rights": lambda path: path.chmod(0o777),
    "rename": _moved,
    "link": lambda path: os.link(path, Path(tempfile.gettempdir()) / "infinity-linked"),
    "remove": lambda path: path.rmdir() if path.is_dir() else path.unlink(),
}


def reached(paths: Sequence[Path]) -> list[str]:
    """Return the ways in which this process can use these paths, as `way path`."""
    found = []
    for path in paths:
        for way, act in WAYS.items():
            with contextlib.suppress(OSError):
                act(path)
                found.append(f"{way} {path}")
    return found


def of_process() -> list[Path]:
    """Descriptors and memory of this process, as others may see them."""
    mine = Path(f"/proc/{os.getpid()}")
    return [mine / "mem", mine / "fd", *(mine / "fd").iterdir()]


@pytest.fixture
def shared() -> Iterator[Path]:
    """A directory that all users may write to, with the sticky bit: users remove only their own
    files."""
    place = Path(tempfile.mkdtemp(prefix="infinity-shared-"))
    place.chmod(0o1777)
    (place / "open").write_text("for everybody")
    (place / "open").chmod(0o644)
    yield place
    shutil.rmtree(place)


@pytest.fixture(params=[0o000, 0o077], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def below(place: Path) -> list[Path]:
    return [path for path in sorted(place.rglob("*")) if path.name != "open"]


def test_what_everybody_may_read_is_seen_to_be_read(shared: Path) -> None:
    """Permitted attempts succeed, so tests of refusals can fail."""
    assert f"read {shared / 'open'}" in as_stranger(lambda: reached([shared / "open"]))
    assert f"list {shared}" in as_stranger(lambda: reached([shared]))


def test_a_durable_run_is_closed_to_others_while_it_runs_and_after(
    shared: Path, umask: int
) -> None:
    model, optimizer = durable_runs.made(shared)
    for index in range(2):
        step(model, optimizer, index, 0)
    inf.handle(model).flush()
    names = below(shared)
    assert len(names) > 4
    paths = [*names, *of_process()]
    assert as_stranger(lambda: reached(paths)) == []
    durable_runs.close(model)
    after = below(shared)
    assert as_stranger(lambda: reached(after)) == []
    assert stat.S_IMODE((shared / "infinity-run").stat().st_mode) == 0o700
    for path in after:
        if path.name.startswith(("states", "lock", "fill", ".")):
            assert stat.S_IMODE(path.stat().st_mode) == 0o600, path


def test_swap_is_closed_to_others(shared: Path, umask: int) -> None:
    """With and without a name: where O_TMPFILE is not known the file is in a private directory."""
    private = PrivateDirectory(str(shared))
    fd = os.open(private.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with SwapFile.create(shared) as file:
            file.grow(1 << 13)
            names = below(shared)
            assert [path.name for path in names if path.is_file()] == ["owner.json", "swap"]
            paths = [*names, *of_process()]
            assert as_stranger(lambda: reached(paths)) == []
    finally:
        os.close(fd)
        private.remove()


@pytest.mark.parametrize("mask", [0o022, 0o077], ids=oct)
def test_a_save_has_the_umask_s_mode_and_a_linked_save_that_of_swap(
    shared: Path, mask: int
) -> None:
    before = os.umask(mask)
    try:
        model, optimizer = durable_runs.made(shared)
        step(model, optimizer, 0, 0)
        inf.save(model, optimizer, shared / "linked").wait()
        durable_runs.close(model)
        model, optimizer = durable_runs.made(shared, durable=False, generations=2)
        step(model, optimizer, 0, 0)
        inf.save(model, optimizer, shared / "saved").wait()
        durable_runs.close(model)
    finally:
        os.umask(before)
    saved = {path: stat.S_IMODE(path.stat().st_mode) for path in (shared / "saved").iterdir()}
    assert set(saved.values()) == {0o666 & ~mask}
    told = as_stranger(lambda: [f"{os.access(path, os.R_OK)}" for path in saved])
    assert set(told) == {str(mask == 0o022)}
    # The run's own files by another name: their rights are those of swap.
    linked = [path for path in (shared / "linked").iterdir() if path.name.startswith("data")]
    assert {stat.S_IMODE(path.stat().st_mode) for path in linked} == {0o600}


# -- entries of other users ------------------------------------------------------------------------


def planted_directory(place: Path) -> list[str]:
    (place / "infinity-run").mkdir()
    (place / "infinity-run").chmod(0o777)
    return ["planted"]


def test_a_directory_of_another_user_is_refused(shared: Path) -> None:
    assert as_stranger(lambda: planted_directory(shared)) == ["planted"]
    with pytest.raises(ValueError, match=r"must be this user's, mode 0700"):
        durable_runs.made(shared)
    assert below(shared / "infinity-run") == []


@pytest.mark.parametrize("sticky", [True, False], ids=["sticky", "open to all"])
def test_a_link_of_another_user_is_not_followed(shared: Path, tmp_path: Path, sticky: bool) -> None:
    """Also where the kernel does not protect links in such a directory."""
    shared.chmod(0o1777 if sticky else 0o777)
    mine = tmp_path / "mine"
    mine.mkdir(mode=0o700)

    def plant() -> list[str]:
        (shared / "infinity-run").symlink_to(mine)
        return ["planted"]

    assert as_stranger(plant) == ["planted"]
    with pytest.raises((ValueError, AioError), match=r"symbolic link|cannot make"):
        durable_runs.made(shared)
    assert list(mine.iterdir()) == []


@pytest.mark.parametrize(
    ("mode", "owner", "told"),
    [(0o777, 0, "all users may"), (0o755, STRANGER, "belongs to uid"), (0o1777, 0, "")],
)
def test_a_directory_that_others_may_replace_is_warned_of(
    shared: Path, mode: int, owner: int, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    if os.geteuid():
        pytest.skip("only root gives directories away")
    shared.chmod(mode)
    os.chown(shared, owner, -1)
    model, _ = durable_runs.made(shared)
    durable_runs.close(model)
    warnings = [each for each in caplog.messages if "may replace this directory" in each]
    assert bool(warnings) == bool(told)
    assert all(told in each and str(shared) in each for each in warnings)


def swapped_directory(place: Path) -> list[str]:
    (place / "infinity-run").rename(place / "taken")
    (place / "infinity-run").mkdir()
    return ["swapped"]


def test_a_run_whose_directory_was_replaced_commits_nothing_there(shared: Path) -> None:
    """Replaced by another user, in a directory without the sticky bit."""
    shared.chmod(0o777)
    model, optimizer = durable_runs.made(shared)
    step(model, optimizer, 0, 0)
    inf.handle(model).flush()
    assert as_stranger(lambda: swapped_directory(shared)) == ["swapped"]
    with pytest.raises(AioError, match=r"infinity-run"):
        for index in range(1, 4):
            step(model, optimizer, index, 0)
    assert below(shared / "infinity-run") == []
    durable_runs.die(model)
    shutil.rmtree(shared / "infinity-run")
    (shared / "taken").rename(shared / "infinity-run")
    again, second = durable_runs.made(shared)
    assert inf.restore(again, second, shared).step == 1
    durable_runs.close(again)


# -- in place of files -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", [".lock.rank0.owner", ".lock.rank0.owner.new", "fill.rank0",
                                  "lock.rank0"])  # fmt: skip
@pytest.mark.parametrize("kind", ["hard", "soft", "fifo"])
def test_links_in_a_run_are_not_written_through(
    tmp_path: Path, name: str, kind: str
) -> None:
    victim, run = tmp_path / "victim", tmp_path / "drive" / "infinity-run"
    victim.write_text("somebody's")
    victim.chmod(0o640)
    run.mkdir(parents=True, mode=0o700)
    if kind == "fifo":
        os.mkfifo(run / name)
    elif kind == "hard":
        os.link(victim, run / name)
    else:
        (run / name).symlink_to(victim)
    with contextlib.suppress(AioError):
        files = RunFiles([run.parent], 0, 1)
        for file in files.add():
            file.grow(4096)
        files.keep()
        files.committed()
        files.close()
    assert victim.read_text() == "somebody's"
    assert stat.S_IMODE(victim.stat().st_mode) == 0o640


def test_a_commit_never_removes_states_that_another_runs_home_names(tmp_path: Path) -> None:
    """Not even if a link of this run and a manifest lead there."""
    model, optimizer = durable_runs.made(tmp_path / "b")
    step(model, optimizer, 0, 0)
    durable_runs.close(model)
    theirs = durable_runs.run_files(tmp_path / "b")
    home = tmp_path / "a" / "infinity-run"
    copy_of(tmp_path / "b" / "infinity-run", home)
    for path in home.glob("states-*"):
        path.unlink()
    _name_through(home, "drive1")
    (home / "drive1").symlink_to(tmp_path / "b" / "infinity-run")
    again, second = durable_runs.made(tmp_path / "a", durable="new")
    for index in range(2):
        step(again, second, index, 0)
    durable_runs.close(again)
    assert durable_runs.run_files(tmp_path / "b") == theirs


def copy_of(run: Path, home: Path) -> None:
    shutil.copytree(run, home, symlinks=True)
    (home / "lock.rank0").unlink()


def _name_through(home: Path, link: str) -> None:
    """Let the manifests of a home name their states files through a link."""
    for path in home.glob("manifest-*"):
        data, header = path.read_bytes(), manifests._HEADER
        magic, version, layout, state, *rest = header.unpack_from(data)
        at = header.size + layout
        found: dict[str, Any] = json.loads(data[at : at + state])
        for file in found["files"]:
            file["name"] = f"{link}/{file['name']}"
        text = json.dumps(found).encode()
        whole = (
            header.pack(magic, version, layout, len(text), *rest)
            + data[header.size : at] + text + data[at + state :]
        )  # fmt: skip
        path.write_bytes(seal_manifest(path.name, whole))


def write_metrics(path: Path) -> None:
    metrics = MetricsFile(path)
    metrics.add("step", {"step": 1})
    metrics.cut(1)
    metrics.close()


def write_dcp(path: Path) -> None:
    writer = dcp.DCPWriter(path.parent)
    writer.put(("value",), torch.ones(2))
    writer.finish()


def write_weights(path: Path) -> None:
    files = WeightFiles(path.parent)
    files.put("model.safetensors", (), 0, lambda partial: write_file(partial, (), ()))
    files.finish()


def write_state(path: Path) -> None:
    model = inf.offload(torch.nn.Linear(4, 4), inf.Policy(params="cpu", optim="cpu"))
    save_weights(model, path.parent, path.name, frozen=True)
    assert torch.load(path).keys() == {"weight", "bias"}
    inf.handle(model).close()


def write_arguments(path: Path) -> None:
    trainers = pytest.importorskip("infinity.integrations._trainer", exc_type=ImportError)
    trainers.save_new({"a": 1}, path)
    assert torch.load(path) == {"a": 1}


WRITTEN: dict[str, tuple[str, Callable[[Path], object]]] = {
    "trace": (f".trace.json.{os.getpid()}.partial", lambda p: Timeline(spans_max=9).write(p)),
    "step": (
        f".trace.json.{os.getpid()}.partial",
        lambda p: StepTimeline(1, 1.0, 0, (), {}).write(p),
    ),
    "metrics": ("trace.json.partial", write_metrics),
    "record": (f".trace.json.{os.getpid()}.partial", lambda p: write_record({"a": 1}, p)),
    "safetensors": ("model.safetensors.partial", write_weights),
    "dcp": (f"{dcp.FILE}.partial", write_dcp),
    "dcp metadata": (f"{dcp.METADATA}.partial", write_dcp),
    "fp32 weights": (
        f".trace.json.{os.getpid()}.partial",
        lambda p: zero_to_fp32._write({"a": torch.ones(2)}, p, safe=False),
    ),
    "universal": ("trace.json", lambda p: deepspeed_export._save({"a": 1}, p)),
    "state dict": ("trace.json", write_state),
    "state dict, partial": (f".trace.json.{os.getpid()}.partial", write_state),
    "arguments": ("trace.json", write_arguments),
    "arguments, partial": (f".trace.json.{os.getpid()}.partial", write_arguments),
}


@pytest.mark.parametrize("kind", WRITTEN)
@pytest.mark.parametrize("planted", ["link", "FIFO"])
def test_exports_and_traces_are_not_written_through_links_of_others(
    tmp_path: Path, kind: str, planted: str
) -> None:
    """In a directory that others may write, such as /tmp, names are predictable."""
    name, write = WRITTEN[kind]
    target, place = tmp_path / "somebody's", tmp_path / "shared"
    place.mkdir()
    target.write_text("kept")
    if planted == "link":
        (place / name).symlink_to(target)
    else:
        os.mkfifo(place / name)
    write(place / "trace.json")
    assert target.read_text() == "kept"
    assert all(stat.S_ISREG(path.lstat().st_mode) for path in place.iterdir())


def test_a_device_is_never_replaced_by_a_new_file(tmp_path: Path) -> None:
    """The device's name is not removed, since it could not be made again."""
    device = tmp_path / "null"
    try:
        os.mknod(device, 0o600 | stat.S_IFCHR, os.makedev(1, 3))
    except PermissionError:
        pytest.skip("this process may not make a device (CAP_MKNOD)")
    with pytest.raises(FileExistsError, match="a device has this name"):
        open_new(device)
    assert device.is_char_device()
