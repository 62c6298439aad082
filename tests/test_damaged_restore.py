"""`inf.restore(damaged="report")` restores the readable ranges, and names the others."""

from __future__ import annotations

import random
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import infinity as inf
from infinity.errors import AioError, ChecksumError, StateInvalid
from tests import harness
from tests.distributed.ranks import on_ranks

WIDTH = 48


def built(seed: int, **policy: Any) -> tuple[nn.Module, inf.AdamW]:
    torch.manual_seed(seed)
    layers = [nn.Linear(WIDTH, WIDTH).bfloat16() for _ in range(6)]
    tiers = {"params": "cpu", "optim": "cpu", "device": "cpu", "unit_bytes_max": 8192}
    values: dict[str, Any] = {**tiers, **policy}
    model = inf.offload(nn.Sequential(*layers), inf.Policy(**values))
    return model, inf.AdamW(model.parameters(), lr=1e-2)


def step(model: nn.Module, opt: inf.AdamW) -> float:
    x = torch.ones(2, WIDTH).bfloat16()
    loss = model(x).float().square().mean()
    loss.backward()
    opt.step()
    opt.zero_grad()
    return float(loss.detach())


def states_of(model: nn.Module) -> dict[str, dict[str, torch.Tensor]]:
    """Master and moments of each parameter, flat."""
    states = harness.states_of(model)
    return {
        name: {key: each[key].flatten() for key in ("master", "exp_avg", "exp_avg_sq")}
        for name, each in states.items()
    }


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    place = tmp_path_factory.mktemp("saved") / "ckpt"
    model, opt = built(0)
    for _ in range(3):
        step(model, opt)
    inf.save(model, opt, place).wait()
    states = states_of(model)
    inf.handle(model).close()
    return place, states


def check(restored: inf.Restored, model: nn.Module, states: Any, fresh: Any) -> int:
    """Compare every element: damaged ones have the model's values, all others the checkpoint's.
    Returns the damaged elements."""
    damaged = {name: torch.zeros(len(each["master"]), dtype=torch.bool)
               for name, each in states.items()}  # fmt: skip
    for each in restored.damaged:
        assert not damaged[each.name][each.start : each.stop].any()
        damaged[each.name][each.start : each.stop] = True
    for name, found in states_of(model).items():
        for key, values in found.items():
            wanted = torch.where(damaged[name], fresh[name][key], states[name][key])
            assert torch.equal(values, wanted), (name, key)
    return int(sum(mask.sum() for mask in damaged.values()))


@settings(max_examples=10, deadline=None)
@given(st.lists(st.floats(0, 1, exclude_max=True), min_size=1, max_size=3))
def test_all_but_the_damaged_ranges_are_restored(
    saved: tuple[Path, Any], tmp_path_factory: pytest.TempPathFactory, places: list[float]
) -> None:
    source, states = saved
    place = tmp_path_factory.mktemp("damaged") / "ckpt"
    shutil.copytree(source, place)
    (file,) = place.glob("data-*")
    content = bytearray(file.read_bytes())
    for each in {int(each * len(content)) for each in places}:
        content[each] ^= 4
    file.write_bytes(content)
    model, opt = built(1)
    fresh = states_of(model)
    restored = inf.restore(model, opt, place, damaged="report")
    assert restored.step == 3
    numel = check(restored, model, states, fresh)
    if restored.damaged:
        first = restored.damaged[0]
        assert (first.path, 0 <= first.offset < len(content)) == (str(file), True)
        # Other units are intact.
        assert 0 < numel < sum(len(each["master"]) for each in states.values())
    step(model, opt)
    # A new save repairs the damage.
    inf.save(model, opt, place).wait()
    assert not inf.restore(model, opt, place, damaged="report").damaged
    inf.handle(model).close()
    shutil.rmtree(place)


def test_a_short_or_missing_file(
    saved: tuple[Path, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source, states = saved
    place = tmp_path / "ckpt"
    shutil.copytree(source, place)
    (file,) = place.glob("data-*")
    with file.open("r+b") as content:
        content.truncate(file.stat().st_size // 2)
    total = sum(len(each["master"]) for each in states.values())
    for least, most in ((1, total - 1), (total, total)):
        model, opt = built(1)
        fresh = states_of(model)
        with pytest.raises(AioError, match=re.escape(str(file))):
            inf.restore(model, opt, place)
        # Nothing was written: the model is unchanged.
        check(inf.Restored(0, None, "", ()), model, fresh, fresh)
        restored = inf.restore(model, opt, place, damaged="report")
        assert least <= check(restored, model, states, fresh) <= most
        assert "could not be read, and keep the model's values" in caplog.text
        step(model, opt)
        inf.handle(model).close()
        file.unlink(missing_ok=True)


def test_the_error_names_parameter_elements_and_file(
    saved: tuple[Path, Any], tmp_path: Path
) -> None:
    place = tmp_path / "ckpt"
    shutil.copytree(saved[0], place)
    (file,) = place.glob("data-*")
    content = bytearray(file.read_bytes())
    content[random.Random(0).randrange(len(content) // 2)] ^= 1
    file.write_bytes(content)
    model, opt = built(1)
    with pytest.raises(ValueError, match="damaged='all'"):
        inf.restore(model, opt, place, damaged="all")  # type: ignore[arg-type]
    with pytest.raises(ChecksumError, match=r"elements \d+ to \d+ of \d\.(weight|bias): .*data-"):
        inf.restore(model, opt, place)
    with pytest.raises(StateInvalid, match="was interrupted"):
        inf.handle(model).close()


def on_two(rank: int, place: Path) -> tuple[int, float]:
    model, opt = built(0)
    step(model, opt)
    inf.save(model, opt, place / "ckpt").wait()
    states = states_of(model)
    inf.handle(model).close()
    file = place / "ckpt" / next(p.name for p in (place / "ckpt").glob("data-*rank1*"))
    model, opt = built(1)
    fresh = states_of(model)
    if rank == 1:
        content = bytearray(file.read_bytes())
        content[100] ^= 1
        file.write_bytes(content)
    # No rank reads before it is damaged.
    torch.distributed.barrier()
    restored = inf.restore(model, opt, place / "ckpt", damaged="report")
    told: list[Any] = [None, None]
    torch.distributed.all_gather_object(told, restored.damaged)
    every = inf.Restored(1, None, "", (), (*told[0], *told[1]))
    numel = check(every, model, states, fresh)
    loss = step(model, opt)
    inf.handle(model).close()
    return numel, loss


def test_ranks_report_their_shards_and_train_on(tmp_path: Path) -> None:
    (first, loss), (second, other) = on_ranks(on_two, tmp_path / "run", 2)
    assert first == second > 0
    assert loss == other


def test_a_durable_run_with_a_bad_block_is_restored(tmp_path: Path) -> None:
    drive = tmp_path / "nvme"
    drive.mkdir()
    policy = {"params": "nvme", "optim": "nvme", "nvme": drive, "durable": True, "ram": "min"}
    model, opt = built(0, **policy)
    for _ in range(3):
        step(model, opt)
    inf.handle(model).flush()
    states = states_of(model)
    inf.handle(model).close()
    # The same places of the files of both generations.
    for file in (drive / "infinity-run").glob("states-*"):
        content = bytearray(file.read_bytes())
        content[len(content) // 3] ^= 1
        file.write_bytes(content)
    model, opt = built(1, **policy)
    fresh = states_of(model)
    restored = inf.restore(model, opt, drive, damaged="report")
    assert restored.step == 3
    total = sum(len(each["master"]) for each in states.values())
    assert 0 < check(restored, model, states, fresh) < total
    step(model, opt)
    inf.handle(model).flush()
    after = states_of(model)
    inf.handle(model).close()
    # Damaged ranges were rewritten: the run continues without damage.
    model, opt = built(2, **policy)
    again = inf.restore(model, opt, drive)
    assert again.step == 4
    check(again, model, after, after)
    inf.handle(model).close()


@pytest.mark.parametrize(
    ("lost", "then"),
    [
        ("b", "ac"),
        ("a", "cb"),  # in another order
        ("b", "abc"),  # a new one is mounted in its place
        ("a", "nb"),  # a new one comes first
        ("c", "n"),  # alone
    ],
)
def test_a_durable_run_without_one_drive_restores_the_others(
    tmp_path: Path, lost: str, then: str
) -> None:
    """Each drive has the manifests, so the loss of any drive has the same effect."""
    places = {name: tmp_path / name for name in "abcn"}
    for place in places.values():
        place.mkdir()
    policy = {"params": "nvme", "optim": "nvme", "ram": "min", "durable": True}
    model, opt = built(0, nvme=[places[name] for name in "abc"], **policy)
    for _ in range(3):
        step(model, opt)
    inf.handle(model).flush()
    states = states_of(model)
    inf.handle(model).close()
    shutil.rmtree(places[lost])
    if lost in then:
        places[lost].mkdir()
    now = [places[name] for name in then]
    model, opt = built(1, nvme=now, **policy)
    fresh = states_of(model)
    source: Any = [places[name] for name in "abc" if name != lost] if then == "n" else now[0]
    if then != "n":
        with pytest.raises(ValueError, match=r"committed up to step 3: call inf\.restore"):
            step(model, opt)
        opt.zero_grad()
    with pytest.raises(AioError, match="a file of a checkpoint is missing"):
        inf.restore(model, opt, source)
    restored = inf.restore(model, opt, source, damaged="report")
    assert restored.step == 3
    total = sum(len(each["master"]) for each in states.values())
    assert 0 < check(restored, model, states, fresh) < total
    named = {Path(each.path).parent.name for each in restored.damaged}
    assert named == {f"drive{'abc'.index(lost)}"}
    step(model, opt)
    inf.handle(model).flush()
    after = states_of(model)
    inf.handle(model).close()
    # The run has other drives now, without files of the lost one.
    for place in now[1:]:
        kinds = sorted(path.name.split("-")[0] for path in (place / "infinity-run").iterdir())
        assert kinds == ["copy", "home", "states", "states"]
    model, opt = built(2, nvme=now, **policy)
    again = inf.restore(model, opt, now)
    assert again.step == 4
    check(again, model, after, after)
    inf.handle(model).close()


@pytest.mark.parametrize("kind", ["buffers", "extra"])
def test_small_files_that_are_damaged_cost_what_they_had(tmp_path: Path, kind: str) -> None:
    def made(seed: int) -> tuple[nn.Module, inf.AdamW]:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))
        inf.offload(model, inf.Policy(params="cpu", optim="cpu", device="cpu"))
        return model, inf.AdamW(model.parameters())

    model, opt = made(0)
    inf.save(model, opt, tmp_path / "ckpt", extra={"epoch": 3}).wait()
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    inf.handle(model).close()
    (file,) = (tmp_path / "ckpt").glob(f"{kind}-*")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    model, opt = made(1)
    with pytest.raises(ChecksumError):
        inf.restore(model, opt, tmp_path / "ckpt")
    restored = inf.restore(model, opt, tmp_path / "ckpt", damaged="report")
    assert [(each.name, each.path) for each in restored.damaged] == [(kind, str(file))]
    assert restored.extra == (None if kind == "extra" else {"epoch": 3})
    for name, param in model.named_parameters():
        assert torch.equal(model.state_dict()[name], saved[name]), (name, param.shape)
    inf.handle(model).close()
