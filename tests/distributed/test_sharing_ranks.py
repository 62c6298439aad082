"""Ranks of one machine: drives by pattern, shared space, bandwidth and memory, and set-ups that
fail on all ranks."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import infinity as inf
from infinity._src.memory.ledger import RAM_SHARE, machine, memory_seen
from infinity.errors import BudgetError, EngineClosed, PeerFailed, SwapFullError
from tests import models
from tests.distributed.test_two_ranks import on_ranks, on_two_ranks
from tests.unit.aio.disks import loop_ext4

MIB = 1 << 20


def offloaded(**values: Any) -> nn.Module:
    return inf.offload(
        models.make(models.llama),
        inf.Policy(**{"params": "nvme", "optim": "nvme", "ram": "min", **values}),
    )


def trained(model: nn.Module, rank: int) -> list[torch.Tensor]:
    """Return the parameters after a step with different rows on each rank."""
    optimizer = inf.AdamW(model.parameters(), lr=1e-2)
    models.loss_of(model, models.token_batches(1, seed=rank)[0]).backward()
    optimizer.step()
    return [value.clone() for value in model.state_dict().values()]


def outcome(build: Any) -> str:
    """Build a model and close it. Returns "well", or the type and text of the error."""
    try:
        inf.handle(build()).close()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "well"


def by_pattern(rank: int, place: Path) -> tuple[list[str], list[str], list[torch.Tensor]]:
    """Train on directories named by patterns. Returns the directories of this rank's swap files,
    those of its policy, and the trained values."""
    for number in range(2):
        for name in ("drive", "local"):
            (place / f"{name}{number}").mkdir(exist_ok=True)
    dist.barrier()
    policy = {
        "nvme": [place / "drive{rank}", place / "local{local_rank}"],
        "io": {"bandwidths": {}},
    }
    model = offloaded(**policy)
    handle = inf.handle(model)
    files = [file.directory for file in handle.parts.tiers.storage.space.files]
    values = trained(model, rank)
    handle.close()
    return files, [str(path) for path in handle.policy.directories], values


def wrong_places(rank: int, place: Path) -> list[str]:
    (place / "only0").mkdir(exist_ok=True)
    (place / "both").mkdir(exist_ok=True)
    with contextlib.suppress(FileExistsError):
        (place / "link0").symlink_to(place / "both")
    (place / "link1").mkdir(exist_ok=True)
    dist.barrier()
    return [
        outcome(lambda: offloaded(nvme=place / "only{rank}")),
        outcome(lambda: offloaded(nvme=[place / "both", place / "link{rank}"])),
        outcome(lambda: offloaded(nvme=place / ("both" if rank else "missing"))),
        outcome(lambda: offloaded(nvme=place / "both", ram=4096 if rank else "min")),
    ]


def shared(rank: int, place: Path) -> dict[str, Any]:
    """Return the bandwidths and depth that a rank has of a drive, its default bytes of memory, and
    its number among the ranks that share them."""
    names = {"nvme": [place], "io": {"depth": 20, "bandwidths": {str(place): [6e9, 3e9]}}}
    model = offloaded(**names)
    handle = inf.handle(model)
    found = {
        "bandwidths": handle.policy.io.bandwidths[str(place)],
        "depth": handle.parts.tiers.executor.stats().drives[0].depth,
        "default": handle.parts.split.resources.default_bytes,
        "place": (handle.parts.split.resources.number, handle.parts.split.resources.ranks),
    }
    handle.close()
    return found


def half_an_optimizer(rank: int, place: Path) -> tuple[str, list[torch.Tensor]]:
    """Rank 1 keeps an optimizer that rank 0 has dropped, so it cannot give the parameters to
    another; then both continue."""
    model = offloaded(nvme=place)
    params = list(model.parameters())
    first = inf.AdamW(params[:4], lr=1e-2)
    kept = [inf.AdamW(params[4:8], lr=1e-2)][:rank]
    gc.collect()
    try:
        inf.AdamW(params[4:])
        told = "well"
    except (ValueError, PeerFailed) as error:
        told = f"{type(error).__name__}: {error}"
    kept.clear()
    gc.collect()
    second = inf.AdamW(params[4:], lr=1e-2)
    models.loss_of(model, models.token_batches(1, seed=rank)[0]).backward()
    for optimizer in (first, second):
        optimizer.step()
    values = [value.clone() for value in model.state_dict().values()]
    inf.handle(model).close()
    return told, values


def durable(rank: int, place: Path) -> tuple[bool, bool]:
    """Make a durable run with a separate second drive per rank, and restore it in a later process.
    """
    for name in ("all", "mine0", "mine1"):
        (place / name).mkdir(exist_ok=True)
    dist.barrier()
    policy = {
        "nvme": [place / "all", place / "mine{rank}"],
        "ram": None,
        "durable": True,
        "io": {"bandwidths": {}},
    }
    model = offloaded(**policy)
    values = trained(model, rank)
    inf.handle(model).close()
    again = offloaded(**policy)
    optimizer = inf.AdamW(again.parameters(), lr=1e-2)
    inf.restore(again, optimizer, place / "all")
    same = all(
        torch.equal(mine, then)
        for mine, then in zip(again.state_dict().values(), values, strict=True)
    )
    inf.handle(again).close()
    return same, any((place / f"mine{rank}").rglob("states-*"))


def after_close(rank: int, place: Path) -> str:
    """Build an optimizer on one rank only, for a closed model."""
    model = offloaded(nvme=place)
    params = list(model.parameters())
    inf.handle(model).close()
    if rank:
        return ""
    with pytest.raises(EngineClosed) as caught:
        inf.AdamW(params)
    return str(caught.value)


def everything(rank: int, place: Path) -> list[Any]:
    jobs = (by_pattern, wrong_places, shared, half_an_optimizer, durable, after_close)
    return [job(rank, place) for job in jobs]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Any, ...]]:
    """Return each job's results on both ranks, from one start of the ranks."""
    place = tmp_path_factory.mktemp("ranks") / "run"
    return [(str(place),), *zip(*on_two_ranks(everything, place), strict=True)]


def test_each_rank_has_the_drives_that_its_patterns_name(results: list[Any]) -> None:
    place = Path(results[0][0])
    for rank, (files, directories, values) in enumerate(results[1]):
        assert files == directories == [str(place / f"drive{rank}"), str(place / f"local{rank}")]
        assert all(
            torch.equal(mine, other) for mine, other in zip(values, results[1][0][2], strict=True)
        )


def test_a_place_that_one_rank_cannot_have_fails_on_both_and_is_named(results: list[Any]) -> None:
    (place,), zero, one = results[0], *results[2]
    assert one[0].startswith(
        f"ValueError: nvme='{place}/only{{rank}}' is '{place}/only1' on rank 1 (local rank 1), "
        "which does not"
    )
    assert zero[0].startswith("PeerFailed: rank 1 failed at inf.offload")
    assert f"ValueError: nvme='{place}/only{{rank}}'" in zero[0]
    assert zero[1].startswith(
        f"ValueError: nvme='{place}/both' and '{place}/link{{rank}}' are both '{place}/both' on "
        "rank 0"
    )
    assert one[1].startswith("PeerFailed: rank 0 failed")
    assert zero[2].startswith(f"ValueError: swap directory '{place}/missing' does not exist")
    assert one[2].startswith(
        "PeerFailed: rank 0 failed at inf.offload, so all ranks fail. rank 0: ValueError: swap "
        "directory"
    )
    assert one[3].startswith(BudgetError.__name__)
    assert zero[3].startswith(
        "PeerFailed: rank 1 failed at inf.offload, so all ranks fail. rank 1: BudgetError"
    )


def test_ranks_halve_a_drives_bandwidth_and_depth_and_what_memory_is_left(
    results: list[Any],
) -> None:
    zero, one = results[3]
    assert zero["bandwidths"] == one["bandwidths"] == (3e9, 1.5e9)
    assert zero["depth"] == one["depth"] <= 10
    assert (zero["place"], one["place"]) == ((0, 2), (1, 2))
    assert zero["default"] == one["default"] > 0
    limits = memory_seen()
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 2 * zero["default"] <= RAM_SHARE * total
    assert f"{machine()} the machine" in limits


def test_an_optimizer_that_one_rank_refuses_is_none_on_both_and_training_goes_on(
    results: list[Any],
) -> None:
    (told_zero, zero), (told_one, one) = results[4]
    assert "is held by another optimizer" in told_one
    assert told_one.startswith("ValueError")
    assert told_zero.startswith("PeerFailed: rank 1 failed at building an optimizer")
    assert all(torch.equal(mine, other) for mine, other in zip(zero, one, strict=True))


def test_a_durable_run_may_have_drives_of_each_ranks_own_beside_the_first(
    results: list[Any],
) -> None:
    assert results[5] == ((True, True), (True, True))


def test_after_close_a_rank_raises_and_does_not_wait(results: list[Any]) -> None:
    assert "was closed" in results[6][0]


def depth_of(rank: int, place: Path) -> int:
    model = offloaded(nvme=place)
    depth = inf.handle(model).parts.tiers.executor.stats().drives[0].depth
    inf.handle(model).close()
    return depth


def test_no_rank_has_fewer_than_eight_requests_however_many_share_the_drive(tmp_path: Path) -> None:
    assert on_ranks(depth_of, tmp_path / "run", 5) == [8] * 5


class Wide(nn.Module):
    """16 MiB of bf16 parameters: 8 MiB a rank, and with an optimizer's states 48 MiB."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Linear(1024, 1024, bias=False, dtype=torch.bfloat16) for _ in range(8)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@dataclasses.dataclass(frozen=True)
class Fill:
    """Job of two ranks that share a drive with `room_mib` MiB, for each of its values. Returns the
    results of the offload and of building an optimizer, and the final free bytes."""

    drive: str
    room_mib: tuple[int, ...]

    def __call__(self, rank: int, place: Path) -> list[tuple[str, str, int]]:
        return [self.with_room(rank, mib * MIB) for mib in self.room_mib]

    def with_room(self, rank: int, room: int) -> tuple[str, str, int]:
        filler = Path(self.drive) / "filler"
        with contextlib.ExitStack() as stack:
            if rank == 0:
                space = os.statvfs(self.drive)
                fd = os.open(filler, os.O_RDWR | os.O_CREAT)
                stack.callback(filler.unlink)
                stack.callback(os.close, fd)
                os.posix_fallocate(fd, 0, space.f_bavail * space.f_frsize - room)
            dist.barrier()
            policy = inf.Policy(params="nvme", optim="nvme", nvme=self.drive, ram="min")
            told = ["well", "well"]
            model = Wide()
            try:
                model = inf.offload(model, policy)
                try:
                    inf.AdamW(model.parameters())
                except SwapFullError as error:
                    told[1] = str(error)
                out = model(torch.ones(1, 1024, dtype=torch.bfloat16))  # all is at rest, as it was
                assert torch.isfinite(out).all()
                inf.handle(model).close()
            except SwapFullError as error:
                told[0] = str(error)
            dist.barrier()
            space = os.statvfs(self.drive)
            dist.barrier()  # before rank 0 takes the filler away
            return told[0], told[1], space.f_bavail * space.f_frsize


@pytest.mark.privileged
def test_what_two_ranks_want_of_one_drive_counts_together_and_both_are_told(tmp_path: Path) -> None:
    with loop_ext4(tmp_path / "drive", 160 * MIB) as drive:
        # offload wants 8 + 8; then the states 48 + 48, before 16 are given back
        room = (12, 72, 130)
        zero, one = on_two_ranks(Fill(str(drive), room), tmp_path / "run")
        told = [[(row[0], row[1]) for row in rows] for rows in (zero, one)]
        assert told[0] == told[1]
        (first, _), second, third = told[0]
        want = 16 * MIB
        assert f"{want} more bytes that ranks 0, 1 need together" in first
        assert f"'{drive}' has space for" in first
        assert second[0] == "well"
        assert f"{6 * want} more bytes that ranks 0, 1 need together" in second[1]
        assert third == ("well", "well")
        # The refused reservation was released.
        for (*_, left), mib in zip(zero[:2], room, strict=False):
            assert left > 0.8 * mib * MIB


CGROUP = Path("/sys/fs/cgroup/memory")


@contextlib.contextmanager
def cgroup(limit_bytes: int) -> Iterator[Path]:
    """A memory cgroup of version 1 or 2 with a limit."""
    one = CGROUP.is_dir()
    place = (CGROUP if one else CGROUP.parent) / f"infinity-test-{os.getpid()}"
    try:
        place.mkdir()
        (place / ("memory.limit_in_bytes" if one else "memory.max")).write_text(str(limit_bytes))
    except OSError as error:
        with contextlib.suppress(OSError):
            place.rmdir()
        pytest.skip(f"NOT TESTED, no memory cgroup can be made here: {error}")
    try:
        yield place
    finally:
        place.rmdir()


@dataclasses.dataclass(frozen=True)
class InCgroup:
    """Offload a model that exceeds a limit for two ranks, which enter it first."""

    cgroup: Path

    def __call__(self, rank: int, place: Path) -> tuple[int, int, str]:
        (self.cgroup / "cgroup.procs").write_text(str(os.getpid()))
        try:
            return self.inside(place)
        finally:  # this process may serve other tests
            (self.cgroup.parent / "cgroup.procs").write_text(str(os.getpid()))

    def inside(self, place: Path) -> tuple[int, int, str]:
        with torch.device("meta"):
            model = nn.Sequential(
                *(nn.Linear(1024, 1024, bias=False, dtype=torch.bfloat16) for _ in range(24))
            )
        model = inf.offload(
            model,
            inf.Policy(params="nvme", optim="nvme", nvme=place),
            load=lambda _name, tensor: tensor.fill_(0.01),
        )
        inf.AdamW(model.parameters())
        held = (
            inf.handle(model).stats().ram_bytes,
            inf.handle(model).parts.split.resources.default_bytes,
        )
        inf.handle(model).close()
        more = outcome(lambda: offloaded_beyond(place))
        dist.barrier()
        return *held, more


def offloaded_beyond(place: Path) -> nn.Module:
    """Two ranks that exceed the memory together, and would fit alone."""
    with torch.device("meta"):
        model = nn.Sequential(
            *(nn.Linear(1024, 1024, bias=False, dtype=torch.bfloat16) for _ in range(60))
        )
    policy = inf.Policy(params="nvme", optim="nvme", nvme=place, ram="400MiB")
    return inf.offload(model, policy, load=lambda _name, tensor: tensor.fill_(0.01))


@pytest.mark.privileged
def test_under_a_cgroups_limit_two_ranks_together_hold_less_than_it_leaves(tmp_path: Path) -> None:
    limit = 640 * MIB
    with cgroup(limit) as place:
        zero, one = on_two_ranks(InCgroup(place), tmp_path / "run")
    assert zero[1] == one[1]
    for held, default, _ in (zero, one):
        assert 0 < held <= default
    assert zero[0] + one[0] <= RAM_SHARE * limit
    # each alone would have taken as much: the model is larger
    assert zero[0] + one[0] > 0.6 * RAM_SHARE * limit
    for _, _, more in (zero, one):
        assert more.startswith("MemoryLimitError: ranks 0, 1 together would hold")
        assert "the limit of cgroup" in more
