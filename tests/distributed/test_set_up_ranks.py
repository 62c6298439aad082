"""Set-up of several ranks from files: each reads its part, with the bits of a whole load; a rank
that cannot read stops all."""

from __future__ import annotations

import dataclasses
import functools
import io
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

import infinity as inf
from infinity._src.cabi.records import GROUP_NUMEL
from infinity._src.checkpoint.durable import initialization
from infinity._src.engine.handle import offload
from infinity.errors import AioError, MemoryLimitError, PeerFailed
from tests import hub_models, models
from tests.crashes import Net, digest, step
from tests.distributed.ranks import on_ranks
from tests.distributed.test_sharing_ranks import cgroup
from tests.durable_runs import close, die, made
from tests.reading import Counted


def stored(factory: Callable[[], Any], file: Path, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Write the values of a model to a file, each once, and return them."""
    model = models.make(factory)
    values = {name: value.detach().to(dtype) for name, value in model.named_parameters()}
    save_file(values, file)
    return values


def filled(factory: Callable[[], Any], load: Path, tiles: int, **values: Any) -> Any:
    with torch.device("meta"):
        model = models.make(factory)
    if tiles > 1:
        inf.tile_linears(model, tiles=(tiles, tiles))
    return offload(model, inf.Policy(**values), load=load)  # type: ignore[arg-type]


WIDE = functools.partial(models.llama, hidden=128)
FACTORIES = {
    "uneven": models.llama,
    "wide": WIDE,
    "tied": models.gpt2,
    "experts": models.qwen3_moe,
}


@dataclasses.dataclass(frozen=True)
class Fill:
    """Load a model from a file that all ranks read. Returns the bytes that this rank read, and
    those of the file."""

    name: str
    world: int
    tiles: int = 1
    dtype: torch.dtype = torch.bfloat16

    def __call__(self, rank: int, place: Path) -> tuple[int, int]:
        factory, file = FACTORIES[self.name], place / "all.safetensors"
        wanted = stored(factory, file if rank == 0 else place / f"{rank}", self.dtype)
        dist.barrier()
        with Counted() as counted:
            model = filled(factory, file, self.tiles, params="cpu", optim="cpu", ram="min")
        found = model.state_dict()
        for name, value in wanted.items():
            assert torch.equal(found[name], value.bfloat16()), name
        close(model)
        return counted.bytes, sum(value.nbytes for value in wanted.values())


@pytest.mark.parametrize(
    "job",
    [
        Fill("uneven", 2),
        Fill("tied", 3),
        Fill("experts", 3, dtype=torch.float32),
        Fill("wide", 2),
    ],
    ids=lambda job: f"{job.name}-{job.world}",
)
def test_each_rank_reads_its_part(tmp_path: Path, job: Fill) -> None:
    results = on_ranks(job, tmp_path / "ranks", job.world)
    parts, whole = [part for part, _ in results], results[0][1]
    # Parts do not overlap, and cover all but padding.
    assert sum(parts) == whole
    if job.name == "wide":
        # Shards end at groups of elements: a small flat belongs to one rank.
        assert max(parts) < whole / job.world + 4 * GROUP_NUMEL * job.dtype.itemsize
    print(f"\n{job.name}, {job.world} ranks: {parts} of {whole} bytes")


def test_tiles_are_filled_in_parts(tmp_path: Path) -> None:
    on_ranks(Fill("uneven", 2, tiles=2), tmp_path / "ranks", 2)


@dataclasses.dataclass(frozen=True)
class HubFill:
    """Load a model of the hub from files that all ranks read. Returns the bytes that this rank
    read."""

    family: str
    config: dict[str, int]
    top: Path

    def __call__(self, rank: int, place: Path) -> int:
        model, read = self.filled()
        wanted, found = load_file(self.top / "wanted.safetensors"), model.state_dict()
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], value) for name, value in wanted.items())
        close(model)
        return read

    def filled(self) -> tuple[Any, int]:
        model = hub_models.on_meta(*hub_models.tiny(self.family, **self.config))
        with Counted() as counted:
            policy = inf.Policy(params="cpu", optim="cpu", ram="min")
            offload(model, policy, load=self.top / "hub")
        return model, counted.bytes


@pytest.mark.parametrize(
    ("family", "config"), [("mixtral", {}), ("deepseek_v3", hub_models.PARTIAL)]
)
def test_experts_apart_and_fp8_give_ranks_the_values_of_one(
    tmp_path: Path, family: str, config: dict[str, int]
) -> None:
    hub = tmp_path / "hub"
    hub_models.write(*hub_models.tiny(family, **config), torch.bfloat16, hub)
    if family == "deepseek_v3":
        hub_models.quantize_fp8(hub, partial=True)
    assert any(".experts.3." in name for name in hub_models.stored_names(hub))
    job = HubFill(family, config, tmp_path)
    model, whole = job.filled()
    values = {name: value.contiguous() for name, value in model.state_dict().items()}
    save_file(values, tmp_path / "wanted.safetensors")
    close(model)
    parts = on_ranks(job, tmp_path / "ranks", 2)
    # A part of a group needs the whole group, except experts of other ranks.
    assert max(parts) < whole
    print(f"\n{family}, 2 ranks: {parts} of {whole} bytes")


@dataclasses.dataclass(frozen=True)
class OtherValues:
    """Load files with different values on each rank. Returns the rank's error and the log."""

    def __call__(self, rank: int, place: Path) -> tuple[str, str]:
        torch.manual_seed(rank)
        model = models.llama()
        file = place / f"{rank}.safetensors"
        save_file(
            {name: torch.randn(value.shape) for name, value in model.named_parameters()}, file
        )
        dist.barrier()
        log, lines = logging.getLogger("infinity"), io.StringIO()
        handler, level = logging.StreamHandler(lines), log.level
        log.addHandler(handler)
        log.setLevel(logging.INFO)
        with pytest.raises(ValueError, match="are not the same on all ranks") as caught:
            filled(models.llama, file, 1)
        log.removeHandler(handler)
        log.setLevel(level)
        return str(caught.value), lines.getvalue()


def test_copies_with_other_values_are_compared(tmp_path: Path) -> None:
    (zero, told), (one, _) = on_ranks(OtherValues(), tmp_path / "ranks", 2)
    assert zero == one
    # They may be equal: that is known only after reading all.
    assert "each of 2 ranks reads all parameters" in told


@dataclasses.dataclass(frozen=True)
class BrokenDrive:
    """Rank 1 cannot read after a while. Returns the error of the rank, and the bytes that it had
    read."""

    def __call__(self, rank: int, place: Path) -> tuple[str, str, int]:
        file = place / "all.safetensors"
        if rank == 0:
            stored(models.llama, file, torch.bfloat16)
        dist.barrier()
        with Counted(9000 if rank == 1 else 1 << 62) as counted:
            with pytest.raises(AioError if rank == 1 else PeerFailed) as caught:
                filled(models.llama, file, 1)
        dist.barrier()
        model = filled(models.llama, file, 1)
        close(model)
        return type(caught.value).__name__, str(caught.value), counted.bytes


def test_a_rank_that_cannot_read_stops_all(tmp_path: Path) -> None:
    (kind, text, read), (_, broken, _) = on_ranks(BrokenDrive(), tmp_path / "ranks", 2)
    assert kind == "PeerFailed"
    assert "rank 1 failed at inf.offload" in text
    for each in (text, broken):
        assert "all.safetensors" in each
        assert ".weight cannot be read: read of" in each
    # The other rank stopped at the end of a unit, not of the model.
    whole = sum(value.numel() for value in models.llama().parameters()) * 2
    assert read < whole / 2 - 1000


@dataclasses.dataclass(frozen=True)
class BrokenOff:
    """Initialize a durable run in which rank 1 cannot read after a while, then again. Returns the
    bytes that this rank read in both."""

    def __call__(self, rank: int, place: Path) -> tuple[int, int]:
        file, drive = place / "all.safetensors", place / "drive"
        drive.mkdir(exist_ok=True)
        wanted = stored(WIDE, file if rank == 0 else place / "other", torch.bfloat16)
        dist.barrier()
        policy: Any = {"params": "nvme", "optim": "nvme", "nvme": drive, "durable": True}
        policy |= {"unit_bytes_max": 1 << 16, "ram": "min"}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(initialization, "NOTE_EVERY_S", 0)
            with (
                Counted(200_000 if rank == 1 else 1 << 62) as first,
                pytest.raises(AioError if rank == 1 else PeerFailed),
            ):
                filled(WIDE, file, 1, **policy)
        dist.barrier()
        with Counted() as second:
            model = filled(WIDE, file, 1, **policy)
        found = model.state_dict()
        assert all(torch.equal(found[name], value) for name, value in wanted.items())
        close(model)
        return first.bytes, second.bytes


def test_a_fill_of_ranks_that_breaks_off_goes_on(tmp_path: Path) -> None:
    results = on_ranks(BrokenOff(), tmp_path / "ranks", 2)
    whole = sum(value.numel() for value in WIDE().parameters()) * 2
    # Only flats in flight are read twice: one per rank.
    assert whole <= sum(first + second for first, second in results) < whole * 1.2
    assert all(first > 0 and second > 0 for first, second in results)


@dataclasses.dataclass(frozen=True)
class BrokenOffFirst:
    """Initialize a durable run with rank 0's values, which it cannot read after a while, then
    again. Each rank has a separate file. changed: rank 1's file has changed by then, so this rank
    starts again. Returns the bytes that this rank read in both."""

    changed: bool

    def __call__(self, rank: int, place: Path) -> tuple[int, int]:
        drive, file = place / "drive", place / f"{rank}.safetensors"
        drive.mkdir(exist_ok=True)
        values = stored(WIDE, file, torch.bfloat16)
        if rank == 1:
            save_file({name: value + 1 for name, value in values.items()}, file)
        dist.barrier()
        policy: Any = {"params": "nvme", "optim": "nvme", "nvme": drive, "durable": True}
        policy |= {"unit_bytes_max": 1 << 16, "ram": "min", "sync_module_states": True}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(initialization, "NOTE_EVERY_S", 0)
            with (
                Counted(200_000 if rank == 0 else 1 << 62) as first,
                pytest.raises(AioError if rank == 0 else PeerFailed),
            ):
                filled(WIDE, file, 1, **policy)
        if self.changed and rank == 1:
            save_file({name: value + 2 for name, value in values.items()}, file)
        dist.barrier()
        with Counted() as second:
            model = filled(WIDE, file, 1, **policy)
        found = model.state_dict()
        assert all(torch.equal(found[name], value) for name, value in values.items())
        close(model)
        return first.bytes, second.bytes


@pytest.mark.parametrize("changed", [False, True])
def test_a_fill_from_rank_0_that_breaks_off_goes_on(tmp_path: Path, *, changed: bool) -> None:
    (first, second), others = on_ranks(BrokenOffFirst(changed), tmp_path / "ranks", 2)
    assert others == (0, 0)
    whole = sum(value.numel() for value in WIDE().parameters()) * 2
    # A flat that one rank lacks is read for all.
    assert second >= whole if changed else whole <= first + second < whole * 1.2


@dataclasses.dataclass(frozen=True)
class Killed:
    """End a durable run before its first step, and resume it. Returns its digests."""

    top: Path

    def __call__(self, rank: int, place: Path) -> list[str]:
        model, _ = made(self.top)
        before = digest(model)
        die(model)
        dist.barrier()
        other: Any = Net().bfloat16()
        with torch.no_grad():
            for value in other.parameters():
                value.fill_(3)
        model, optimizer = made(self.top, model=other)
        found = inf.restore(model, optimizer, self.top)
        assert (found.step, found.extra) == (0, None)
        assert digest(model) == before
        step(model, optimizer, 0, rank)
        after = digest(model)
        close(model)
        return [before, after]


def test_ranks_that_end_before_the_first_step_go_on(tmp_path: Path) -> None:
    on_ranks(Killed(tmp_path / "run"), tmp_path / "ranks", 2)


@dataclasses.dataclass(frozen=True)
class InCgroup:
    """Offload with a plan on one rank that exceeds its limit. Returns the error, its bytes, and the
    bytes of a plan that fits."""

    cgroup: Path

    def __call__(self, rank: int, place: Path) -> tuple[str, int, int, int]:
        (self.cgroup / "cgroup.procs").write_text(str(os.getpid()))
        try:
            with pytest.raises(MemoryLimitError) as caught:
                self.filled(place, "400MiB")
            model = self.filled(place, "min")
            held = inf.handle(model).stats().ram_bytes
            close(model)
        finally:  # this process may serve other tests
            (self.cgroup.parent / "cgroup.procs").write_text(str(os.getpid()))
        assert isinstance(caught.value, MemoryError)
        return str(caught.value), caught.value.needed_bytes, caught.value.left_bytes, held

    def filled(self, place: Path, ram: str) -> Any:
        with torch.device("meta"):
            model = torch.nn.Sequential(
                *(torch.nn.Linear(1024, 1024, bias=False, dtype=torch.bfloat16) for _ in range(40))
            )
        policy = inf.Policy(params="nvme", optim="nvme", nvme=place, ram=ram)
        return inf.offload(model, policy, load=lambda _name, tensor: tensor.fill_(0.01))


@pytest.mark.privileged
def test_a_plan_beyond_the_cgroups_limit_is_refused_before_memory_is_taken(tmp_path: Path) -> None:
    limit = 320 << 20
    with cgroup(limit) as place:
        ((text, needed, left, held),) = on_ranks(InCgroup(place), tmp_path / "run", 1)
    assert text.startswith("this process would hold")
    assert f"the limit of cgroup {place} (320 MiB) leaves" in text
    assert "choose Policy(ram=" in text
    # The plan uses the whole budget; the overhead is small for this model.
    assert held <= left <= limit < needed <= 401 << 20
