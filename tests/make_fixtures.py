"""Make the files of `tests/data/before_redesign`: checkpoints of an older release.

`tests/test_formats_on_disk.py` restores them with the code of today. They were made at commit
3edaeea (infinity 0.1.0, torch 2.13, Python 3.11), before the engine was redesigned, by

    python -m tests.make_fixtures tests/data/before_redesign

and are not made again when the code changes: a format that can no longer be read is a defect.
A new format gets a new folder. `tests/data/commits_in_two_parts` has the durable runs once more,
with the manifests of version 3: rows in two parts, one of them in a table. They were made by

    python -m tests.make_fixtures tests/data/commits_in_two_parts durable durable_compact

`NAME.tar.xz` has the directory of a case as it was written; only the owner files of durable runs
were freed of the machine's name. `NAME.npz` has the exact bits of what the older release held
after it had restored that directory, and after two more steps. Cases that hold the same numbers
share one such file (`Case.expected`), which the older release has confirmed when they were made.

The numbers depend on no CPU. Gradients are made of products alone, without sums whose order a
library may choose; betas are sums of few powers of two, so that their powers are exact; first
values come from integers. Only the public API of infinity is used here.
"""

from __future__ import annotations

import dataclasses
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import infinity as inf

BEFORE = Path(__file__).parent / "data" / "before_redesign"
"""The first folder; the other folders have the same numbers, and do not repeat them."""

SAVED_AT, LATER = 3, 2
"""Steps before the files were written, and after they are restored."""

States = dict[str, np.ndarray[Any, Any]]


class Block(nn.Module):
    """A unit of three parameters in two dtypes, with a persistent buffer and one that is not."""

    def __init__(self, rows: int, columns: int, seed: int, weight: Any = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(_values(rows, columns, seed)) if weight is None else weight
        self.bias = nn.Parameter(_values(1, columns, seed + 1)[0])
        self.gain = nn.Parameter(_values(1, rows, seed + 2)[0].float() / 3)
        self.register_buffer("seen", torch.zeros(2, dtype=torch.int64))
        self.register_buffer("target", _values(rows, columns, seed + 3).float(), persistent=False)

    def forward(self, total: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        """Add this block's term; its gradient is made of products and one difference."""
        if self.training:
            self.seen[0] += 1
            self.seen[1] += int(factor * 16)
        far = self.weight.float() - self.target
        total = total + (far * far * factor).sum()
        total = total + (self.bias.float() * self.bias.float() * factor).sum()
        return total + (self.gain * self.gain * self.gain * factor).sum()


class Net(nn.Module):
    """Four blocks of odd sizes, the last one tied to the first; frozen: the second is."""

    def __init__(self, *, frozen: bool) -> None:
        super().__init__()
        first = Block(13, 21, 1)
        blocks = [first, Block(7, 33, 11), Block(5, 32, 21), Block(13, 21, 31, first.weight)]
        self.blocks = nn.ModuleList(blocks)
        if frozen:
            self.blocks[1].requires_grad_(False)

    def forward(self, factor: torch.Tensor) -> torch.Tensor:
        """The sum of all blocks' terms."""
        total = torch.zeros(())
        for block in self.blocks:
            total = block(total, factor)
        return total


def _values(rows: int, columns: int, seed: int) -> torch.Tensor:
    """Return bf16 values that depend on no random generator."""
    counted = torch.arange(rows * columns, dtype=torch.int64) + 1
    mixed = (counted * 7919 * (seed + 3)) % 509 - 254
    return (mixed.double() / 128).view(rows, columns).bfloat16()


@dataclasses.dataclass(frozen=True)
class Case:
    """One fixture.

    kind: "save" by inf.save; "linked", the same of a durable run, by hard links; "durable", a run
    that was killed; "export" in formats of others; "state_dicts" by torch.save beside a save.
    world: number of ranks that wrote it. drives: of its policy. policy: fields besides the tier's.
    expected: the case with the same numbers; empty: this case.
    """

    kind: str = "save"
    tier: str = "cpu"
    frozen: bool = False
    drives: int = 1
    world: int = 1
    policy: tuple[tuple[str, Any], ...] = ()
    expected: str = ""

    def open_policy(self, place: Path, tier: str | None = None) -> inf.Policy:
        """Return the policy of a run with drives below `place`; tier: replaces the original tier.
        """
        values: dict[str, Any] = {"units": ["Block"], **dict(self.policy)}
        if (tier or self.tier) == "nvme":
            nvme = [place / f"drive{index}" for index in range(self.drives)]
            for drive in nvme:
                drive.mkdir(parents=True, exist_ok=True)
            values |= {"params": "nvme", "optim": "nvme", "ram": "min", "nvme": nvme}
            # Measured drives would get other shares each time.
            values["io"] = {"bandwidths": {str(drive.resolve()): (2e9, 1e9) for drive in nvme}}
        else:
            values.pop("durable", None)
            values.pop("generations", None)
        return inf.Policy(**values)


EXACT, BF16, COMPACT = (("state", state) for state in ("exact", "bf16", "compact"))
DURABLE = ("durable", True)
CASES: dict[str, Case] = {
    "exact": Case(tier="nvme", policy=(EXACT,)),
    "bf16": Case(policy=(BF16,)),
    "compact": Case(tier="nvme", frozen=True, policy=(COMPACT, ("seed", 5))),
    "two_ranks": Case(world=2, policy=(EXACT,)),
    "two_ranks_compact": Case(world=2, tier="nvme", frozen=True, policy=(COMPACT,)),
    "durable": Case(
        "durable", "nvme", policy=(EXACT, DURABLE, ("generations", 2)), expected="exact"
    ),
    "durable_compact": Case(
        "durable",
        "nvme",
        frozen=True,
        drives=2,
        policy=(COMPACT, ("seed", 5), DURABLE, ("update", "backward")),
        expected="compact",
    ),
    "linked": Case("linked", "nvme", policy=(EXACT, DURABLE), expected="exact"),
    "export": Case("export", policy=(EXACT,), expected="exact"),
    "state_dicts": Case("state_dicts", policy=(EXACT,), expected="exact"),
}


class Run:
    """A training of one case: the model, its optimizer with two groups, and steps by number."""

    def __init__(self, case: Case, place: Path, *, tier: str | None = None, rank: int = 0) -> None:
        self.case = case
        self.rank = rank
        self.model: Any = inf.offload(Net(frozen=case.frozen), case.open_policy(place, tier))
        self.handle = inf.handle(self.model)
        named = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        self.params = dict(named)
        decayed = [param for name, param in named if "weight" in name]
        others = [param for name, param in named if "weight" not in name]
        self.optimizer = inf.AdamW(
            [{"params": decayed, "weight_decay": 0.125}, {"params": others}],
            lr=2**-6,
            betas=(0.5, 0.75),
            weight_decay=0.0,
        )

    def train(self, first: int, last: int) -> None:
        """Take the steps from `first` to `last`, each with the batch and the rate of its number."""
        for index in range(first, last):
            self.backward(index)
            self.handle.extra = extra_of(index + 1, self.rank)
            self.optimizer.step()
            self.optimizer.zero_grad()

    def backward(self, index: int) -> None:
        """Forward and backward of step `index`. The rate is set first, as schedulers do."""
        for group in self.optimizer.param_groups:
            group["lr"] = 2**-6 * (1 + index % 3)
        self.model(torch.tensor((index % 4 - 1.5 + self.rank) / 4)).backward()

    def states(self, prefix: str) -> States:
        """Return everything from which training continues, as bits, by name. Collective."""
        found = {f"{prefix}/{name}": bits_of(v) for name, v in self.model.state_dict().items()}
        for name, param in self.params.items():
            for key, value in self.handle.optimizer_state(param).items():
                found[f"{prefix}/{name}/{key}"] = bits_of(value)
        rates = [group["lr"] for group in self.optimizer.param_groups]
        return found | {f"{prefix}/rates": np.array(rates)}


def extra_of(step: int, rank: int) -> dict[str, Any]:
    """The user's small state at a step."""
    return {"next": step, "rank": rank, "seen": torch.arange(step), "pair": ("épreuve", 0.1)}


def bits_of(value: Any) -> np.ndarray[Any, Any]:
    """A tensor or a number as numpy has it; bf16 as the integers of its bits."""
    if not isinstance(value, torch.Tensor):
        return np.array(value)
    bits = value.view(torch.int16) if value.dtype == torch.bfloat16 else value
    return bits.detach().contiguous().numpy().copy()


# -- writing ---------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Write:
    """A job of each rank: write the files of a case into `top` / "written"."""

    case: Case
    top: Path

    def __call__(self, rank: int = 0, place: Path | None = None) -> None:
        write(self.case, self.top, rank)


def write(case: Case, top: Path, rank: int = 0) -> Path:
    """Train and write the files of a case; return their directory.

    A durable run stays open, in `OPEN`: the caller examines the state after a crash.
    """
    written = top / "written"
    run = Run(case, written if case.kind == "durable" else top / "swap", rank=rank)
    run.train(0, SAVED_AT)
    if case.kind == "durable":
        run.handle.flush()
        OPEN.append(run)
        return written
    if case.kind == "export":
        for name, masters in (("values", False), ("masters", True)):
            inf.export_safetensors(run.model, written / name, shard_bytes_max=1024, masters=masters)
        inf.export_dcp(run.model, run.optimizer, written / "dcp")
    elif case.kind == "state_dicts":
        written.mkdir(parents=True)
        states = {"model": dict(run.model.state_dict()), "optimizer": run.optimizer.state_dict()}
        torch.save(states, written / "states.pt")
        inf.save(run.model, run.optimizer, written / "save", extra=extra_of(SAVED_AT, rank)).wait()
    else:
        inf.save(run.model, run.optimizer, written, extra=extra_of(SAVED_AT, rank)).wait()
    run.handle.close()
    return written


OPEN: list[Run] = []
"""Durable runs that `write` left open."""


def die(name: str, top: Path) -> None:
    """Write a durable run, take the step after the committed one, and end as `kill -9` does."""
    write(CASES[name], top)
    (run,) = OPEN
    run.train(SAVED_AT, SAVED_AT + 1)
    # Its updates may be half written; the next step would have committed them.
    os.kill(os.getpid(), signal.SIGKILL)


# -- reading ---------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Came:
    """Result of a restore: `restored` of inf.restore, the states then and LATER steps after."""

    restored: inf.Restored
    states: States


@dataclasses.dataclass(frozen=True)
class Read:
    """A job of each rank: restore the files of a case, and say what came."""

    case: Case
    top: Path
    written: Path

    def __call__(self, rank: int = 0, place: Path | None = None) -> Came:
        return read(self.case, self.top, self.written, rank=rank)


def source_of(case: Case, written: Path) -> Path:
    """The directory to restore, of the files of a case."""
    inside = {"durable": "drive0", "state_dicts": "save"}
    return written / inside.get(case.kind, "")


def read(case: Case, top: Path, written: Path, *, tier: str | None = None, rank: int = 0) -> Came:
    """Restore the files of a case and continue training, with swap files below `top`.

    tier: replaces the case's; then a durable run is read like any checkpoint, else it continues in
    place.
    """
    goes_on = case.kind == "durable" and tier is None
    run = Run(case, written if goes_on else top / "swap", tier=tier, rank=rank)
    restored = inf.restore(run.model, run.optimizer, source_of(case, written))
    states = run.states("restored")
    run.train(restored.step, restored.step + LATER)
    states |= run.states("later")
    run.handle.close()
    return Came(restored, states)


def assert_same(ours: States, theirs: States) -> None:
    """Fail unless all states exist with the same bits."""
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert ours[name].dtype == value.dtype, name
        assert ours[name].tobytes() == value.tobytes(), name


def expected(folder: Path, name: str, world: int = 1, rank: int = 0) -> States:
    """The states that the older release had for a case when `world` ranks restored it."""
    file = f"{CASES[name].expected or name}.npz"
    with np.load(next(path for path in (folder / file, BEFORE / file) if path.exists())) as found:
        states: States = {}
        # Ranks differ only in buffers: of further ranks only differences are stored.
        for prefix in (f"{world}.0/", f"{world}.{rank}/"):
            inside = [key for key in found.files if key.startswith(prefix)]
            states |= {key.removeprefix(prefix): found[key] for key in inside}
        return states


# -- packing ---------------------------------------------------------------------------------------


def pack(written: Path, archive: Path) -> None:
    """The directory as a tar.xz without owners, times and the machine's name."""
    with tarfile.open(archive, "w:xz", preset=9, format=tarfile.GNU_FORMAT) as tar:
        for path in sorted(written.rglob("*")):
            entry = tar.gettarinfo(path, path.relative_to(written).as_posix())
            entry.uid = entry.gid = entry.mtime = 0
            entry.uname = entry.gname = ""
            if entry.islnk():  # a second name of a file of this tree
                entry.type, entry.linkname = tarfile.REGTYPE, ""
            data = path.read_bytes() if entry.isreg() else b""
            if data[:1] == b"{" and b"boot_id" in data:
                owner = json.loads(data) | {"host": "host", "boot_id": "boot"}
                data = json.dumps(owner).encode()
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))


def unpack(archive: Path, written: Path) -> Path:
    """Unpack an archive of `pack`. The archives are this project's own: links may lead anywhere."""
    with tarfile.open(archive) as tar:
        # Python 3.10.11 and 3.11.3 know no filters, and later ones warn without one.
        trusted = {"filter": "fully_trusted"} if hasattr(tarfile, "data_filter") else {}
        tar.extractall(written, **trusted)
    return written


def _make(name: str, case: Case, top: Path, target: Path) -> None:
    from tests.distributed.ranks import on_ranks

    if case.kind == "durable":
        command = [sys.executable, "-m", "tests.make_fixtures", "--die", name, str(top)]
        ended = subprocess.run(command, check=False).returncode
        assert ended == -signal.SIGKILL, ended
    elif case.world > 1:
        on_ranks(Write(case, top), top / "ranks", case.world)
    else:
        write(case, top)
    pack(top / "written", target / f"{name}.tar.xz")
    shutil.rmtree(top / "written")  # so that nothing is found there through a link
    if case.kind == "export":
        return
    states: States = {}
    for world in sorted({1, case.world}):
        fresh = top / f"again{world}"
        job = Read(case, fresh, unpack(target / f"{name}.tar.xz", fresh / "written"))
        came = on_ranks(job, fresh / "ranks", world) if world > 1 else [job()]
        for rank, each in enumerate(came):
            if case.expected:
                assert_same(each.states, expected(target, name))
            for key, value in each.states.items():
                if rank == 0 or value.tobytes() != came[0].states[key].tobytes():
                    states[f"{world}.{rank}/{key}"] = value
    if not case.expected:
        np.savez_compressed(target / f"{name}.npz", **states)


def main() -> None:
    """Make all fixtures in the folder that is named."""
    if sys.argv[1] == "--die":
        die(sys.argv[2], Path(sys.argv[3]))
    target, only = Path(sys.argv[1]), sys.argv[2:]
    target.mkdir(parents=True, exist_ok=True)
    for name, case in CASES.items():
        if only and name not in only:
            continue
        # Links between drives are absolute: a path that says nothing of the machine.
        top = Path(tempfile.gettempdir()) / "infinity-fixtures" / name
        shutil.rmtree(top, ignore_errors=True)
        top.mkdir(parents=True)
        try:
            _make(name, case, top, target)
        finally:
            shutil.rmtree(top)


if __name__ == "__main__":
    main()
