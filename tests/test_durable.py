"""Durable runs: after any crash `inf.restore` resumes from the last committed step, with the
results of an undisturbed run. Commits and their tables, checkpoints in and out, and checkpoints by
hard links."""

from __future__ import annotations

import errno
import gc
import random
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import infinity as inf
from infinity._src.cabi import native
from infinity._src.cabi.records import PIECE_NUMEL
from infinity._src.checkpoint.directory import newest_generation
from infinity._src.checkpoint.durable import run as committing
from infinity._src.checkpoint.verify import VerifyJob
from infinity._src.engine.handle import offload
from infinity.aio import SwapFile
from infinity.errors import AioError, SwapFullError
from tests import forks, harness, models
from tests.crashes import Net, digest, step
from tests.durable_runs import (
    STEPS,
    close,
    die,
    live,
    made,
    read,
    restored,
    run_files,
    train,
    undisturbed,
)

NVME: dict[str, Any] = {"params": "nvme", "optim": "nvme", "ram": "min"}


@pytest.fixture(scope="module")
def wanted() -> tuple[str, ...]:
    return undisturbed()


@pytest.mark.parametrize("update", ["deferred", "backward"])
@pytest.mark.parametrize("state", ["exact", "compact"])
def test_a_run_goes_on_bit_for_bit(tmp_path: Path, update: str, state: str) -> None:
    values = {"update": update, "state": state}
    model, optimizer = made(tmp_path, **values)
    for index in range(3):
        step(model, optimizer, index, 0)
    close(model)
    model, optimizer = made(tmp_path, **values)
    with pytest.raises(ValueError, match="holds a durable run, committed up to step 3"):
        step(model, optimizer, 0, 0)
    optimizer.zero_grad()
    found = inf.restore(model, optimizer, tmp_path)
    assert (found.step, found.extra) == (3, {"next": 3})
    for index in range(3, STEPS):
        step(model, optimizer, index, 0)
    assert digest(model) == undisturbed(state)[STEPS]
    close(model)


# -- commits ---------------------------------------------------------------------------------------


def tables(home: Path) -> list[str]:
    return [path.name for path in home.glob("table-*")]


@pytest.mark.parametrize("drives", [1, 2])
def test_a_commit_says_what_the_executor_knows(tmp_path: Path, drives: int) -> None:
    """A commit's rows equal those of a complete manifest, with checksums of the pieces' checksums;
    the table stays in a separate file until places change."""
    places = [tmp_path / str(index) for index in range(drives)]
    for place in places:
        place.mkdir()
    model, optimizer = made(*places)
    run = inf.handle(model).durable
    home, seen = run.files.home, []
    for index in range(5):
        step(model, optimizer, index, 0)
        if index == 2:
            inf.save(model, optimizer, places[0] / "linked").wait()
        inf.handle(model).flush()
        (found,) = newest_generation(home)
        rows, sums = run._table.live_rows()
        entries = [found.files[number].name for number in found.rows["file"]]
        drive = [divmod(int(number), 1 << 16) for number in rows["file"]]
        assert entries == [run.files.name(*each) for each in drive]
        for name in ("start", "numel", "key", "generation", "file_offset", "section_at", "zeros"):
            assert np.array_equal(found.rows[name], rows[name]), name
        counts = [len(found.layout.flats[row["flat"]].sections) for row in rows]
        folded = []
        for row, count in zip(rows, counts, strict=True):
            pieces = -(-int(row["numel"]) // PIECE_NUMEL)
            for section in range(count):
                at = int(row["sums_at"]) + section * pieces
                folded.append(native.crc32c(sums[at : at + pieces]))
        assert found.sums.tolist() == folded
        assert tables(home) == [found.table.name]
        seen.append(found.table.name)
    # The next step writes the other place; the step after it writes new places.
    assert seen[0] == seen[3] != seen[4], seen
    close(model)


def test_a_commit_that_fails_behind_its_table_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failed commit removes its table, and the next commit writes another."""
    model, optimizer = made(tmp_path)
    for index in range(4):
        step(model, optimizer, index, 0)
        if index == 2:
            inf.save(model, optimizer, tmp_path / "linked").wait()
    inf.handle(model).flush()
    home = inf.handle(model).durable.files.home
    (table,) = tables(home)
    step(model, optimizer, 4, 0)
    inf.handle(model).pipeline.wait()
    there: list[list[str]] = []

    def full(path: Path, *_: object) -> None:
        there.append(tables(home))
        raise SwapFullError("full", errno=errno.ENOSPC, path=str(path))

    monkeypatch.setattr(committing, "write_durably", full)
    with pytest.raises(SwapFullError):
        inf.handle(model).flush()
    monkeypatch.undo()
    assert len(there[0]) == 2
    assert tables(home) == [table]
    assert newest_generation(home)[0].step == 4
    inf.handle(model).flush()
    wanted = digest(model)
    (after,) = tables(home)
    assert after != table
    die(model)
    model, optimizer = made(tmp_path)
    assert inf.restore(model, optimizer, tmp_path).step == 5
    assert digest(model) == wanted
    close(model)


class HalfUsed(torch.nn.Module):
    """Two blocks, of which the second gets no gradient: no update writes its states."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.idle = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


def idle(place: Path, state: str, durable: bool | str = True) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model: Any = HalfUsed().bfloat16()
    offload(model, harness.policy(place, units=["Linear"], state=state, durable=durable))
    return model, inf.AdamW(model.parameters(), lr=1e-2)


@pytest.mark.parametrize("state", ["exact", "compact"])
def test_states_that_no_update_wrote_are_zeros_after_a_crash_and_in_a_save(tmp_path, state):
    model, optimizer = idle(tmp_path, state)
    for _ in range(2):
        model(torch.randn(4, 64).bfloat16()).float().square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    inf.save(model, optimizer, tmp_path / "linked").wait()
    wanted, home = harness.values_of(model), inf.handle(model).durable.files.home
    inf.handle(model).end(commit=False)
    for place in (home, tmp_path / "linked"):
        (found,) = newest_generation(place)
        # Zeros of the idle block; older releases, which do not know them, refuse the manifest.
        assert np.count_nonzero(found.rows["zeros"]) == 1
        version = struct.unpack_from("<8sQ", (place / found.name).read_bytes())[1]
        assert version == (3 if place == home else 2)
        assert VerifyJob(place).verify() == []
    for place, durable in ((tmp_path, True), (tmp_path / "linked", "new")):
        model, optimizer = idle(tmp_path, state, durable)
        assert inf.restore(model, optimizer, place).step == 2
        harness.assert_same(model, wanted)
        moments = [
            inf.handle(model).optimizer_state(block.weight)["exp_avg"].any()
            for block in (model.used, model.idle)
        ]
        assert moments == [True, False]
        inf.handle(model).end(commit=False)


# -- runs of every kind ----------------------------------------------------------------------------


def test_a_run_restores_into_other_policies(tmp_path: Path, wanted: tuple[str, ...]) -> None:
    live(tmp_path, until=2)
    for values in ({}, {"state": "compact"}, {"params": "nvme", "optim": "nvme", "nvme": tmp_path}):
        torch.manual_seed(1)
        model = offload(Net().bfloat16(), inf.Policy(**values))
        optimizer = inf.AdamW(model.parameters(), lr=1e-2)
        found = inf.restore(model, optimizer, tmp_path)
        assert (found.step, found.extra) == (2, {"next": 2})
        if "state" not in values:
            step(model, optimizer, 2, 0)
            assert digest(model) == wanted[3]
        close(model)


@pytest.mark.parametrize(("steps", "kept"), [(2, 0), (3, 0), (4, 3), (5, 3)])
def test_every_third_step_is_committed(tmp_path: Path, steps: int, kept: int) -> None:
    assert live(tmp_path, until=steps, end=die, durable_every=3) == 0
    assert live(tmp_path, until=kept + 1, durable_every=3) == kept


def test_a_run_that_is_given_up_stays_until_the_first_step(tmp_path: Path) -> None:
    live(tmp_path, until=1)
    before = run_files(tmp_path)
    model, optimizer = made(tmp_path, durable="new")
    inf.handle(model).flush()
    close(model)  # without a step nothing was discarded
    (manifest,) = newest_generation(tmp_path / "infinity-run")
    (kept,) = (file.name for file in manifest.files)
    # Except states that no commit names.
    assert run_files(tmp_path) == [name for name in before if kept in name or "states-" not in name]
    assert live(tmp_path, durable="new") == 1  # a change of mind
    model, optimizer = made(tmp_path, durable="new")
    train(model, optimizer, 0, 2)
    die(model)
    model, optimizer = made(tmp_path)
    assert restored(model, optimizer, tmp_path) == 1
    with pytest.raises(ValueError, match="this process continues the durable run"):
        inf.restore(model, optimizer, tmp_path)
    close(model)
    assert len(run_files(tmp_path)) == len(before)


def test_no_step_at_all(tmp_path: Path, wanted: tuple[str, ...]) -> None:
    assert live(tmp_path) == 0
    model, optimizer = made(tmp_path)
    assert restored(model, optimizer, tmp_path) == 0
    step(model, optimizer, 0, 0)
    with pytest.raises(ValueError, match="this process continues the durable run"):
        inf.restore(model, optimizer, tmp_path)
    assert digest(model) == wanted[1]
    close(model)
    model, optimizer = made(tmp_path / "other")
    step(model, optimizer, 0, 0)
    with pytest.raises(ValueError, match="this process continues the durable run"):
        inf.restore(model, optimizer, tmp_path / "other")
    close(model)


def test_a_second_process_is_refused(tmp_path: Path) -> None:
    model, optimizer = made(tmp_path)
    step(model, optimizer, 0, 0)
    code = (
        "from tests.durable_runs import made; from pathlib import Path; "
        f"made(Path({str(tmp_path)!r}))"
    )
    done = forks.run_code(code)
    assert "AioError" in done.stderr, done.stderr
    assert "is held by process" in done.stderr
    with pytest.raises(AioError) as caught:
        made(tmp_path)
    assert caught.value.errno == errno.EWOULDBLOCK
    step(model, optimizer, 1, 0)
    close(model)


def test_frozen_parameters_and_late_groups(tmp_path: Path) -> None:
    """Killed after each step, with a group that is added after the second."""
    batches = models.token_batches(4)

    def begin(**values: Any) -> tuple[Any, Any]:
        model = offload(models.make(lambda: models.lora(2)), inf.Policy(**values))
        return model, inf.AdamW(group(model, 0), lr=1e-2)

    def group(model: Any, which: int) -> list[Any]:
        trained = [param for param in model.parameters() if param.requires_grad]
        return trained[which::2]

    def one(model: Any, optimizer: Any, index: int) -> None:
        models.loss_of(model, batches[index]).backward()
        optimizer.step()
        optimizer.zero_grad()
        model.zero_grad()

    plain, plain_optimizer = begin()
    durable = {**NVME, "nvme": tmp_path, "durable": True}
    for index in range(4):
        if index == 2:
            plain_optimizer.add_param_group({"params": group(plain, 1), "lr": 1e-3})
        one(plain, plain_optimizer, index)
    expected = {name: value.clone() for name, value in plain.state_dict().items()}
    close(plain)
    model, optimizer = begin(**durable)
    for index in range(2):
        one(model, optimizer, index)
    optimizer.add_param_group({"params": group(model, 1), "lr": 1e-3})
    die(model)
    model, optimizer = begin(**durable)
    optimizer.add_param_group({"params": group(model, 1), "lr": 1e-3})
    assert inf.restore(model, optimizer, tmp_path).step == 2
    for index in range(2, 4):
        one(model, optimizer, index)
    close(model)
    model = models.make(lambda: models.lora(2))
    offload(model, inf.Policy())
    assert inf.restore(model, None, tmp_path).step == 4
    found = model.state_dict()
    assert [name for name, value in expected.items() if not torch.equal(found[name], value)] == []
    close(model)


def test_writes_between_steps_survive(tmp_path: Path) -> None:
    """Writes by gather() after a step are committed with it; writes after a commit wait for the
    next."""
    model, optimizer = made(tmp_path)
    step(model, optimizer, 0, 0)
    chosen = model.blocks[1][0].weight
    with inf.handle(model).gather([chosen]), torch.no_grad():
        chosen.fill_(0.5)
    before = digest(model)
    step(model, optimizer, 1, 0)
    after = digest(model)
    die(model)
    model, optimizer = made(tmp_path)
    assert inf.restore(model, optimizer, tmp_path).step == 1
    assert digest(model) == before
    chosen = model.blocks[1][0].weight
    with inf.handle(model).gather([chosen]), torch.no_grad():
        chosen.fill_(0.25)  # what was restored is committed, and this is not
    die(model)
    model, optimizer = made(tmp_path)
    assert inf.restore(model, optimizer, tmp_path).step == 1
    assert digest(model) == before
    step(model, optimizer, 1, 0)
    assert digest(model) == after
    close(model)


def test_checkpoints_of_a_run_and_into_one(tmp_path: Path, wanted: tuple[str, ...]) -> None:
    saved = tmp_path / "saved"
    model, optimizer = made(tmp_path / "run")
    step(model, optimizer, 0, 0)
    save = inf.save(model, optimizer, saved)
    step(model, optimizer, 1, 0)
    save.wait()
    step(model, optimizer, 2, 0)
    assert inf.restore(model, optimizer, saved).step == 1  # into the run that continues
    assert digest(model) == wanted[1]
    die(model)
    assert live(tmp_path / "run") == 1
    model, optimizer = made(tmp_path / "new")
    assert inf.restore(model, optimizer, saved).step == 1
    step(model, optimizer, 1, 0)
    die(model)
    model, optimizer = made(tmp_path / "new")
    with pytest.raises(ValueError, match="holds a durable run"):
        inf.restore(model, optimizer, saved)
    assert restored(model, optimizer, tmp_path / "new") == 1
    close(model)


def test_extra_that_cannot_be_kept_holds_commits_back(tmp_path: Path) -> None:
    model, optimizer = made(tmp_path)
    step(model, optimizer, 0, 0)
    with pytest.raises(ValueError, match="extra= cannot be saved"):
        handle = inf.handle(model)
        models_extra = {"next": lambda: 2}
        torch.manual_seed(0)
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * 0.99
        model(torch.randn(4, 24, generator=torch.Generator().manual_seed(1)).bfloat16()).backward()
        handle.extra = models_extra
        optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(ValueError, match="extra= cannot be saved"):
        handle.flush()
    handle.extra = {"next": 2}
    handle.flush()
    die(model)
    assert live(tmp_path) == 2


def test_what_is_set_before_the_first_step_is_committed_with_it(tmp_path: Path) -> None:
    model, optimizer = made(tmp_path)
    inf.handle(model).extra = {"next": 1}
    step(model, optimizer, 0, 0)
    die(model)
    assert live(tmp_path) == 0


def test_a_group_that_is_added_after_restoring_keeps_extra(tmp_path: Path) -> None:
    def begin() -> tuple[Any, Any, list[Any]]:
        policy = inf.Policy(**NVME, nvme=tmp_path, durable=True)
        model = offload(models.make(lambda: models.lora(2)), policy)
        trained = [param for param in model.parameters() if param.requires_grad]
        return model, inf.AdamW(trained[0::2], lr=1e-2), trained[1::2]

    model, optimizer, _ = begin()
    models.loss_of(model, models.token_batches(1)[0]).backward()
    inf.handle(model).extra = {"next": 1}
    optimizer.step()
    close(model)
    model, optimizer, others = begin()
    assert inf.restore(model, optimizer, tmp_path).extra == {"next": 1}
    optimizer.add_param_group({"params": others, "lr": 1e-3})
    die(model)
    model, optimizer, others = begin()
    optimizer.add_param_group({"params": others, "lr": 1e-3})
    found = inf.restore(model, optimizer, tmp_path)
    assert (found.step, found.extra) == (1, {"next": 1})
    close(model)


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_a_scheduler_and_random_generators_go_on(tmp_path: Path) -> None:
    """The loop of docs/guide-updates.md, dying after every step."""

    def live(start: int, end: int, **values: Any) -> list[tuple[float, float]]:
        random.seed(0)
        np.random.seed(0)  # noqa: NPY002 - what users have
        torch.manual_seed(0)
        model = offload(Net().bfloat16(), inf.Policy(unit_bytes_max=4096, **values))
        optimizer = inf.AdamW(model.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8)
        if values:
            found = inf.restore(model, optimizer, tmp_path)
            assert found.step == start
            if found.extra is not None:
                schedule.load_state_dict(found.extra["schedule"])
                schedule.step()
                torch.set_rng_state(found.extra["torch"])
                np.random.set_state(found.extra["numpy"])  # noqa: NPY002 - what users have
                random.setstate(found.extra["random"])
        told = []
        for _ in range(start, end):
            drawn = float(np.random.rand())  # noqa: NPY002 - what users have
            loss = model((torch.randn(4, 24) + drawn + random.random()).bfloat16())
            loss.backward()
            arrays = np.random.get_state()  # noqa: NPY002 - what users have
            generators = {
                "torch": torch.get_rng_state(),
                "numpy": arrays,
                "random": random.getstate(),
            }
            inf.handle(model).extra = {"schedule": schedule.state_dict(), **generators}
            told.append((loss.item(), optimizer.param_groups[0]["lr"]))
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        inf.handle(model).flush()
        die(model)
        return told

    expected = live(0, 5)
    durable = {**NVME, "nvme": tmp_path, "durable": True}
    assert [each for index in range(5) for each in live(index, index + 1, **durable)] == expected


def test_no_checkpoint_where_a_run_is(tmp_path: Path, wanted: tuple[str, ...]) -> None:
    model, optimizer = made(tmp_path)
    step(model, optimizer, 0, 0)
    inf.handle(model).flush()
    before = run_files(tmp_path)
    for place in (tmp_path, tmp_path / "infinity-run"):
        with pytest.raises(ValueError, match="holds a durable run"):
            inf.save(model, optimizer, place)
    assert run_files(tmp_path) == before
    step(model, optimizer, 1, 0)
    assert digest(model) == wanted[2]
    close(model)


def test_a_run_does_not_go_on_without_its_optimizer(tmp_path: Path) -> None:
    live(tmp_path, until=1)
    model, optimizer = made(tmp_path)
    for given in (None, []):
        with pytest.raises(ValueError, match="would continue without its optimizer states"):
            inf.restore(model, given, tmp_path)
    assert restored(model, optimizer, tmp_path) == 1
    close(model)
    model, optimizer = made(tmp_path, durable="new")
    assert inf.restore(model, None, tmp_path).step == 1
    close(model)


# -- checkpoints by hard links ---------------------------------------------------------------------


def states_files(place: Path) -> list[Path]:
    return sorted((place / "infinity-run").glob("states-*"))


@pytest.mark.parametrize("update", ["deferred", "backward"])
def test_every_checkpoint_stays_what_it_was_while_training_goes_on(
    tmp_path: Path, wanted: tuple[str, ...], update: str
) -> None:
    model, optimizer = made(tmp_path / "run", update=update)
    for index in range(STEPS):
        step(model, optimizer, index, 0)
        save = inf.save(model, optimizer, tmp_path / str(index))
        save.wait()
        assert save.copied_bytes == 0
        assert read(tmp_path / str(index)) == index + 1
    assert digest(model) == wanted[STEPS]
    close(model)
    assert [read(tmp_path / str(index)) for index in range(STEPS)] == [*range(1, STEPS + 1)]


def test_files_that_are_released_are_no_objects_any_more(tmp_path: Path) -> None:
    model, optimizer = made(tmp_path)
    counts = []
    for _ in range(3):
        for _ in range(2):
            inf.save(model, optimizer, tmp_path / "kept").wait()
            step(model, optimizer, 0, 0)
        inf.handle(model).flush()
        gc.collect()
        counts.append(sum(isinstance(each, SwapFile) for each in gc.get_objects()))
    assert counts[1] == counts[2]
    close(model)


def test_files_come_and_go(tmp_path: Path) -> None:
    model, optimizer = made(tmp_path)
    train(model, optimizer, 0, 2)
    assert len(states_files(tmp_path)) == 2
    inf.save(model, optimizer, tmp_path / "kept").wait()
    numbers = {path.stat().st_ino for path in states_files(tmp_path)}
    (linked,) = (tmp_path / "kept").glob("data*")
    assert linked.stat().st_ino in numbers
    assert linked.stat().st_nlink == 2
    train(model, optimizer, 2, 5)
    inf.handle(model).flush()
    assert len(states_files(tmp_path)) == 2  # linked files now belong only to the checkpoint
    assert linked.stat().st_nlink == 1
    close(model)
    assert live(tmp_path) == 5
    assert read(tmp_path / "kept") == 2


def test_what_is_placed_anew_keeps_away_from_what_a_checkpoint_has(tmp_path: Path) -> None:
    def begun() -> tuple[Any, list[Any]]:
        torch.manual_seed(0)
        model: Any = Net().bfloat16()
        offload(model, harness.policy(tmp_path / "run", durable=True, unit_bytes_max=4096))
        return model, list(model.parameters())

    def values(place: Path) -> dict[str, torch.Tensor]:
        torch.manual_seed(1)
        model: Any = offload(Net().bfloat16(), inf.Policy(unit_bytes_max=4096))
        inf.restore(model, None, place)
        found = harness.values_of(model)
        close(model)
        return found

    (tmp_path / "run").mkdir()
    model, (first, *others) = begun()
    optimizer = inf.AdamW([first], lr=1e-2)
    for index in range(2):
        step(model, optimizer, index, 0)
    inf.save(model, optimizer, tmp_path / "kept").wait()
    before = values(tmp_path / "kept")
    optimizer.add_param_group({"params": others})  # their states are new: everything moves
    for index in range(2, 5):
        step(model, optimizer, index, 0)
    after = harness.values_of(model)
    close(model)
    harness.assert_same(values(tmp_path / "kept"), before)
    harness.assert_same(values(tmp_path / "run"), after)


def test_a_checkpoint_is_replaced_by_the_next_while_the_run_goes_on(tmp_path: Path) -> None:
    model, optimizer = made(tmp_path, io_backend="threads")
    step(model, optimizer, 0, 0)
    for index in range(1, 4):
        inf.save(model, optimizer, tmp_path / "kept").wait()
        step(model, optimizer, index, 0)
    close(model)
    assert read(tmp_path / "kept") == 3
