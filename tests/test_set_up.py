"""Set-up of durable runs: their first commit, before any step."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import infinity as inf
from infinity._src.checkpoint.durable import initialization
from infinity._src.checkpoint.durable.initialization_journal import (
    InitializationJournal,
    InitializedFlat,
)
from infinity._src.engine.handle import offload
from infinity._src.memory import host_overhead
from infinity._src.params import piece_writer
from infinity._src.params.materialize import FlatValues
from infinity.aio import Fault, Priority, Seam
from infinity.errors import AioError, SwapFullError
from tests.crashes import Net, digest, step
from tests.durable_runs import close, die, made, undisturbed
from tests.forks import FORKSERVER
from tests.reading import Counted
from tests.test_durable_faults import Failing
from tests.unit.aio.disks import loop_ext4

STEPS = 2


@pytest.fixture(scope="module")
def wanted() -> list[str]:
    return undisturbed()


def other_values() -> Any:
    """A model with other values, so that only the commit can restore the first ones."""
    model = Net().bfloat16()
    with torch.no_grad():
        for value in (*model.parameters(), *model.buffers()):
            value.fill_(3)
    return model


def assert_goes_on(place: Path, wanted: list[str]) -> None:
    model, optimizer = made(place, model=other_values())
    with pytest.raises(ValueError, match="committed up to step 0"):
        step(model, optimizer, 0, 0)
    optimizer.zero_grad()
    found = inf.restore(model, optimizer, place)
    assert (found.step, found.extra) == (0, None)
    for index in range(STEPS):
        assert digest(model) == wanted[index]
        step(model, optimizer, index, 0)
    assert digest(model) == wanted[STEPS]
    close(model)


@pytest.mark.parametrize("update", ["deferred", "backward"])
def test_a_run_that_ends_before_its_first_step_goes_on(
    tmp_path: Path, wanted: list[str], update: str
) -> None:
    model, _ = made(tmp_path, update=update)
    die(model)
    assert_goes_on(tmp_path, wanted)


def test_parameters_without_an_optimizer_delay_the_first_commit_to_the_first_forward(
    tmp_path: Path,
) -> None:
    def begin(fill: float) -> tuple[Any, Any]:
        torch.manual_seed(0)
        model: Any = Net().bfloat16()
        with torch.no_grad():
            model.blocks[0][0].weight.fill_(fill)
        offload(model, inf.Policy(params="nvme", optim="nvme", nvme=tmp_path, durable=True))
        return model, inf.AdamW(model.blocks[1:].parameters(), lr=1e-2)

    manifests = tmp_path / "infinity-run"
    model, _ = begin(1)
    with torch.no_grad():
        model(torch.randn(4, 24).bfloat16())
    assert not list(manifests.glob("manifest-*"))
    model.eval()(torch.randn(4, 24).bfloat16())
    assert not list(manifests.glob("manifest-*"))
    expected = digest_of_values(model)
    model.train()(torch.randn(4, 24).bfloat16())
    assert len(list(manifests.glob("manifest-*"))) == 1
    die(model)
    model, optimizer = begin(2)
    assert inf.restore(model, optimizer, tmp_path).step == 0
    assert digest_of_values(model) == expected
    close(model)


def digest_of_values(model: Any) -> list[bytes]:
    values = [value.reshape(-1) for value in model.state_dict().values()]
    return [value.view(torch.uint8).numpy().tobytes() for value in values]


def test_optimizers_built_one_by_one_take_no_more_room(tmp_path: Path) -> None:
    rooms, files = [], ("one", "two")
    for name in files:
        place = tmp_path / name
        place.mkdir()
        torch.manual_seed(0)
        model: Any = Net().bfloat16()
        values: Any = {"unit_bytes_max": 4096, "ram": "min", "nvme": place, "durable": True}
        offload(model, inf.Policy(params="nvme", optim="nvme", **values))
        params = list(model.parameters())
        parts = [params] if name == "one" else [params[:4], params[4:]]
        held = [inf.AdamW(part, lr=1e-2) for part in parts]
        states = (place / "infinity-run").glob("states-*")
        rooms.append(sum(path.stat().st_blocks for path in states))
        assert len(list((place / "infinity-run").glob("manifest-*"))) == 1
        die(model)
        del held
    # A file system keeps the list of a file's extents in the inode, or in a block of 4 KiB.
    assert 8 < rooms[1] <= rooms[0] + 8


def test_buffers_set_after_the_first_commit_are_committed_with_the_first_step(
    tmp_path: Path,
) -> None:
    model, optimizer = made(tmp_path)
    model.blocks[0][1].running_mean.fill_(0.5)
    expected = digest(model)
    step(model, optimizer, 0, 0)
    die(model)
    model, optimizer = made(tmp_path)
    assert inf.restore(model, optimizer, tmp_path).step == 0
    assert digest(model) == expected
    close(model)


@pytest.mark.parametrize("name", ["write", "replace"])
def test_a_first_commit_that_fails_is_told_and_made_up_for(
    tmp_path: Path, wanted: list[str], name: str
) -> None:
    torch.manual_seed(0)
    model: Any = Net().bfloat16()
    values: Any = {"unit_bytes_max": 4096, "ram": "min", "nvme": tmp_path, "durable": True}
    offload(model, inf.Policy(params="nvme", optim="nvme", **values))
    with Failing(name, 0, errno.ENOSPC), pytest.raises(SwapFullError, match="infinity-run"):
        inf.AdamW(model.parameters(), lr=1e-2)
    assert not list((tmp_path / "infinity-run").glob("manifest-*.rank0"))
    inf.AdamW(model.parameters(), lr=1e-2)
    die(model)
    assert_goes_on(tmp_path, wanted)


def wide(width: int = 1024) -> Any:
    """16 MiB of bf16 parameters in 8 units."""
    torch.manual_seed(0)
    return torch.nn.Sequential(
        *(torch.nn.Linear(width, width, bias=False, dtype=torch.bfloat16) for _ in range(8))
    )


@pytest.mark.privileged
@pytest.mark.parametrize("durable", [False, True])
def test_a_drive_with_room_for_95_percent_is_told_before_anything_is_written(
    tmp_path: Path, durable: bool
) -> None:
    with loop_ext4(tmp_path / "drive", 80 << 20) as drive:
        # A durable run reserves both of its places, and their room for training or without.
        whole = (16 << 20) * (2 if durable else 1)
        space = os.statvfs(drive)
        filler = drive / "filler"
        with filler.open("wb") as file:
            left = space.f_bavail * space.f_frsize
            os.posix_fallocate(file.fileno(), 0, left - int(whole * 0.95))
        before = os.statvfs(drive).f_bavail
        model = wide()
        expected = [value.clone() for value in model.state_dict().values()]
        values: Any = {"nvme": drive, "ram": "min", "durable": durable, "unit_bytes_max": 3 << 20}
        with pytest.raises(SwapFullError, match="missing; free space") as caught:
            offload(model, inf.Policy(params="nvme", optim="nvme", **values))
        assert caught.value.errno == errno.ENOSPC
        assert caught.value.path.startswith(str(drive))
        assert 0 < caught.value.length <= whole
        # All is as it was: the room, and the model.
        assert abs(os.statvfs(drive).f_bavail - before) * space.f_frsize < 1 << 20
        filler.unlink()
        offload(model, inf.Policy(params="nvme", optim="nvme", **values))
        found = model.state_dict().values()
        assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
        close(model)


def test_a_write_that_fails_in_the_fill_names_the_unit_and_the_model_is_as_it_was(
    tmp_path: Path,
) -> None:
    model = wide()
    expected = [value.clone() for value in model.state_dict().values()]
    policy = inf.Policy(
        params="nvme", optim="nvme", nvme=tmp_path, ram="min", unit_bytes_max=3 << 20
    )
    fault = Fault("write", 20, errno=errno.ENOSPC, persistent=True)
    with pytest.raises(SwapFullError) as caught:
        offload(model, policy, _seam=Seam(fault=fault))
    error = caught.value
    assert str(error).startswith("parameters of ")
    for text in ("cannot be written", str(tmp_path), f"offset {error.offset}", "free space"):
        assert text in str(error)
    assert isinstance(error, AioError)
    assert error.errno == errno.ENOSPC
    assert error.length > 0
    assert not list(tmp_path.iterdir())
    found = model.state_dict().values()
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    offload(model, policy)
    close(model)


# -- values in pieces ------------------------------------------------------------------------------


class Stored:
    """A source that gives whole tensors, each in the memory of the one before."""

    def __init__(self, values: dict[str, torch.Tensor]) -> None:
        self._values = values
        self._memory = torch.empty(max(value.numel() for value in values.values()))

    def names(self) -> Iterable[str]:
        return self._values

    def shape(self, name: str) -> Sequence[int]:
        return self._values[name].shape

    def read(self, name: str) -> torch.Tensor:
        value = self._values[name]
        return self._memory[: value.numel()].view(value.shape).copy_(value)


def door(kind: str, place: Path, values: dict[str, torch.Tensor]) -> dict[str, Any]:
    """The argument of `offload` that gives these values."""
    if kind == "files":
        save_file(values, place / "a.safetensors")
    return {
        "module": {},
        "strided": {},
        "files": {"load": place / "a.safetensors"},
        "mapping": {"load": values},
        "source": {"load": Stored(values)},
        "callable": {"load": lambda name, out: out.copy_(values[name])},
        "init": {"init": linears},
    }[kind]


def linears() -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = (torch.nn.Linear(1000, 1100, dtype=torch.bfloat16) for _ in range(2))
        return torch.nn.Sequential(*layers)


@pytest.mark.parametrize(
    "kind", ["module", "strided", "files", "mapping", "source", "callable", "init"]
)
@pytest.mark.filterwarnings("ignore:.*dimensions are in another order")
def test_values_of_any_source_pass_through_a_few_buffers(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = linears()
    values = {name: value.float() for name, value in model.state_dict().items()}
    if kind == "strided":
        for layer in model:
            layer.weight = torch.nn.Parameter(layer.weight.detach().t().contiguous().t())
    elif kind != "module":
        model = model.to("meta")
    used: list[int] = []
    fill = FlatValues.fill

    def watched(self: FlatValues, start: int, out: torch.Tensor) -> None:
        used.append(out.data_ptr())
        out.view(torch.int16).fill_(1)  # of an earlier piece
        fill(self, start, out)

    monkeypatch.setattr(FlatValues, "fill", watched)
    monkeypatch.setattr(piece_writer, "PIECE_BYTES", 1)  # so that a piece is a chunk
    policy = inf.Policy(params="cpu", optim="cpu", ram="200MB", units=["Linear"])
    offload(model, policy, **door(kind, tmp_path, values))
    assert len(used) == 6
    assert len(set(used)) <= host_overhead.PIECES
    assert_filled(model, values)
    # Padding between parameters is zero.
    handle = inf.handle(model)
    flat = handle.units[0].flats[0]
    whole = torch.empty(flat.layout.shard_numel, dtype=flat.dtype)
    handle.parts.tiers.store.fetch(
        flat, 0, whole.data_ptr(), priority=Priority.DEMAND
    ).wait()
    for param in flat.params:
        whole[param.offset : param.offset + param.numel] = 0
    assert not whole.any()
    close(model)


# -- an initialization that is interrupted ---------------------------------------------------------


def stored(file: Path, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    """Write the values of `filled` to a file, and return them."""
    torch.manual_seed(seed)
    values = {f"{index}.weight": torch.randn(512, 512).to(dtype) for index in range(8)}
    save_file(values, file)
    return values


def filled(place: Path, load: Any, *more: Path, seam: Seam | None = None, **values: Any) -> Any:
    with torch.device("meta"):
        model = wide(512)
    place.mkdir(exist_ok=True)
    policy: dict[str, Any] = {"nvme": [place, *more], "ram": "min", "unit_bytes_max": 3 << 18}
    policy |= {"params": "nvme", "optim": "nvme", "durable": True, **values}
    return offload(model, inf.Policy(**policy), load=load, _seam=seam)


def fill_and_die(
    place: Path, file: Path, after: int, end: str, *more: Path, seam: Seam | None = None
) -> None:
    """Initialize a model, and be killed, or fail, when so many bytes were read."""
    torch.set_num_threads(1)
    initialization.NOTE_EVERY_S = 0
    with Counted(after, kills=end == "killed"):
        filled(place, file, *more, seam=seam)


def broken_off(place: Path, file: Path, end: str, *more: Path, seam: Seam | None = None) -> None:
    """Let a process be interrupted in an initialization when more than half of it was written."""
    process = FORKSERVER.Process(
        target=fill_and_die, args=(place, file, 9 << 18, end, *more), kwargs={"seam": seam}
    )
    process.start()
    process.join(60)
    assert process.exitcode == (-signal.SIGKILL if end == "killed" else 1)
    assert list((place / "infinity-run").glob("states-*"))


def assert_filled(model: Any, values: dict[str, Any]) -> None:
    found = model.state_dict()
    assert all(torch.equal(found[name], value.bfloat16()) for name, value in values.items())


WHOLE = 4 << 20


@pytest.mark.parametrize("end", ["killed", "failed"])
def test_a_fill_that_breaks_off_goes_on_and_reads_the_rest_alone(tmp_path: Path, end: str) -> None:
    file, place, more = tmp_path / "a.safetensors", tmp_path / "drive", tmp_path / "more"
    values = stored(file)
    place.mkdir()
    more.mkdir()
    broken_off(place, file, end, more)
    files = sorted((place / "infinity-run").glob("states-*"))
    with Counted() as counted:
        model = filled(place, file, more)
    assert 0 < counted.bytes <= WHOLE - (6 << 18)
    assert sorted((place / "infinity-run").glob("states-*")) == files
    assert_filled(model, values)
    optimizer = inf.AdamW(model.parameters(), lr=1e-2)
    model(torch.ones(1, 512, dtype=torch.bfloat16)).float().sum().backward()
    optimizer.step()
    found = {name: value.clone() for name, value in model.state_dict().items()}
    close(model)
    assert not list((place / "infinity-run").glob("fill*"))
    model = filled(tmp_path / "undisturbed", file)
    optimizer = inf.AdamW(model.parameters(), lr=1e-2)
    model(torch.ones(1, 512, dtype=torch.bfloat16)).float().sum().backward()
    optimizer.step()
    assert_filled(model, found)
    close(model)


def test_a_flat_whose_write_went_elsewhere_is_loaded_anew(tmp_path: Path) -> None:
    file, place = tmp_path / "a.safetensors", tmp_path / "drive"
    values = stored(file)
    bad = Seam(fault=Fault("write", 0, persistent=True, stop=4096))
    broken_off(place, file, "killed", seam=bad)
    # The first place holds nothing, and no record names the other one any more.
    model = filled(place, file)
    assert_filled(model, values)
    close(model)


OTHERS = {
    "source": "its source",
    "dtype": "its source",
    "time": "its source",
    "units": "its layout",
}


@pytest.mark.parametrize("other", OTHERS)
def test_a_fill_takes_nothing_over_from_another(
    tmp_path: Path, other: str, caplog: pytest.LogCaptureFixture
) -> None:
    file, place = tmp_path / "a.safetensors", tmp_path / "drive"
    values = stored(file)
    place.mkdir()
    broken_off(place, file, "killed")
    policy: Any = {}
    if other == "source":
        values = stored(file, seed=1)
    elif other == "dtype":
        values = stored(file, dtype=torch.float32)
    elif other == "time":
        os.utime(file, ns=(1, 1))
    else:
        policy["units"] = ["Linear"]
        policy["state"] = "compact"
    size = sum(value.nbytes for value in values.values())
    with Counted() as counted:
        model = filled(place, file, **policy)
    assert counted.bytes == size
    assert f"it differs in {OTHERS[other]}" in caplog.text
    assert_filled(model, values)
    close(model)


def test_a_fill_without_known_files_and_other_drives_begin_anew_without_leaks(
    tmp_path: Path,
) -> None:
    file, place, more = tmp_path / "a.safetensors", tmp_path / "drive", tmp_path / "more"
    values = stored(file)
    for each in (place, more):
        each.mkdir()
    broken_off(place, file, "killed")
    before = {path.name for path in (place / "infinity-run").glob("states-*")}
    model = filled(place, file, more)
    assert not before & {path.name for path in (place / "infinity-run").glob("states-*")}
    assert_filled(model, values)
    die(model)
    assert not list((place / "infinity-run").glob("states-*"))
    broken_off(place, file, "killed")
    values = stored(tmp_path / "b.safetensors", seed=1)
    model = filled(place, values)
    assert_filled(model, values)
    close(model)


def test_a_fill_that_is_begun_anew_goes_on_when_it_breaks_off_too(tmp_path: Path) -> None:
    file, place, more = tmp_path / "a.safetensors", tmp_path / "drive", tmp_path / "more"
    values = stored(file)
    for each in (place, more):
        each.mkdir()
    broken_off(place, file, "killed")
    # On other drives nothing is taken over from the first.
    broken_off(place, file, "killed", more)
    with Counted() as counted:
        model = filled(place, file, more)
    assert 0 < counted.bytes <= WHOLE - (6 << 18)
    assert_filled(model, values)
    close(model)


def head(digit: str) -> dict[str, Any]:
    return {"id": digit * 16, "directories": []}


def test_a_journal_is_begun_anew_in_place_of_one_that_was_found(tmp_path: Path) -> None:
    first = InitializationJournal(tmp_path / "fill")
    first.begin({**head("a"), "more": "a longer one"})
    first.start({"source": "x", "states": []}, known=True)
    first.add(0, InitializedFlat(7, b"seven"))
    first.flush()
    first.close()
    second = InitializationJournal(tmp_path / "fill")
    second.begin(head("b"))
    second.start({"source": "y", "states": []}, known=True)
    second.add(1, InitializedFlat(8, b"eight"))
    second.flush()
    second.close()
    third = InitializationJournal(tmp_path / "fill")
    assert (third.head, third.started) == (head("b"), {"source": "y", "states": []})
    assert (third.take(0), third.take(1)) == (None, (8, b"eight"))
    third.forget()
    third.close()
    fourth = InitializationJournal(tmp_path / "fill")
    assert (fourth.head, fourth.started) == (head("b"), None)
    fourth.close()


def test_what_is_written_after_a_fill_ends_its_journal(tmp_path: Path) -> None:
    """After a write of states, the next process cannot resume the initialization of a killed one,
    and begins anew."""
    file, place = tmp_path / "a.safetensors", tmp_path / "drive"
    values = stored(file)
    place.mkdir()
    model = filled(place, file)
    journal = place / "infinity-run" / "fill.rank0"
    whole = journal.read_bytes()
    weight = model[0].weight
    with inf.handle(model).gather([weight]), torch.no_grad():
        weight.fill_(1)
    assert len(journal.read_bytes()) < len(whole) / 4
    die(model)
    with Counted() as counted:
        model = filled(place, file)
    assert counted.bytes == WHOLE
    assert_filled(model, values)
    close(model)


def test_a_journal_without_room_ends_the_fill_which_goes_on_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, place = tmp_path / "a.safetensors", tmp_path / "drive"
    values = stored(file)
    monkeypatch.setattr(initialization, "NOTE_EVERY_S", 0)
    with (
        Failing("pwrite", 6, errno.ENOSPC),
        pytest.raises(SwapFullError, match=r"fill\.rank0") as caught,
    ):
        filled(place, file)
    assert caught.value.errno == errno.ENOSPC
    with Counted() as counted:
        model = filled(place, file)
    assert 0 < counted.bytes < WHOLE
    assert_filled(model, values)
    close(model)


def test_a_torn_journal_is_read_up_to_its_tear(tmp_path: Path) -> None:
    journal = InitializationJournal(tmp_path / "fill")
    journal.begin(head("a"))
    start = {"source": "x", "states": []}
    assert journal.start(start, known=True) == []
    for index in range(3):
        journal.add(index, InitializedFlat(index + 7, bytes(range(index, 99))))
    journal.flush()
    data = (tmp_path / "fill").read_bytes()
    for size in range(0, len(data), 5):
        (tmp_path / "fill").write_bytes(data[:size])
        with contextlib.closing(InitializationJournal(tmp_path / "fill")) as again:
            taken = [again.take(index) for index in range(3)]
            kept = [index for index in range(3) if taken[index] is not None]
            assert kept == list(range(len(kept)))
            assert len(kept) < 3
            assert all(taken[index] == (index + 7, bytes(range(index, 99))) for index in kept)
            # Checksums are the chunks' from then on.
            assert [again.take(index) for index in kept] == [(index + 7, b"") for index in kept]
            if kept:
                assert again.started == start
                again.add(2, InitializedFlat(9, b"nine"))
                again.flush()
                with contextlib.closing(InitializationJournal(tmp_path / "fill")) as last:
                    assert last.take(2) == (9, b"nine")
    journal.close()
