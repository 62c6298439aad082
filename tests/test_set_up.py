"""Set-up of durable runs: their first commit, before any step."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import infinity as inf
from infinity._src.engine import offload
from infinity.aio import Fault, Seam
from infinity.errors import AioError, SwapFullError
from tests.crashes import Net, digest, step
from tests.durable_runs import close, die, made, undisturbed
from tests.test_durable_faults import Failing
from tests.unit.aio.disks import loop_ext4

STEPS = 2


@pytest.fixture(scope="module")
def wanted() -> list[str]:
    return undisturbed()


def other_values() -> Any:
    """A model of other values, so that only what was committed can give back the first ones."""
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
    assert rooms[0] == rooms[1] > 0


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


def wide() -> Any:
    """16 MiB of bf16 parameters in 8 units."""
    torch.manual_seed(0)
    return torch.nn.Sequential(
        *(torch.nn.Linear(1024, 1024, bias=False, dtype=torch.bfloat16) for _ in range(8))
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
