"""Memory, descriptors, threads, slab and files of a small model after thousands of steps, compared
with those after fifty, in every mode.

    python -m tests.endurance.growth --steps 5000

Each mode has a process of its own (two ranks: one each).
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import infinity as inf
from tests import models
from tests.endurance.record import Record, record_in

FIRST = 50
MIB = 1 << 20
ALLOCATED_SLACK = MIB
"""The allocator counts what caches of threads hold as allocated: up to 236 KiB of each."""
BLOCKS_SLACK = 1000
"""Objects of Python that come and go: a few hundred, while a collective is under way."""
ARENA = MIB
"""Python takes memory for its objects in arenas of this size, and keeps one that holds any."""
RECORDED = 100
"""Collectives that torch's flight recorder keeps. With its own 2,000 it fills for 285 steps, with
1.7 MiB."""
MODES: dict[str, dict[str, Any]] = {
    "deferred": {},
    "backward": {"update": "backward"},
    "delayed": {"update": "delayed", "delayed_warmup": 10},
    "threads": {"io_backend": "threads"},
    "generations": {"generations": 2},
    "generations, backward": {"generations": 2, "update": "backward"},
    "durable": {"durable": True},
    "durable, saves": {"durable": True},
    "2 ranks": {"world": 2},
    "2 ranks, durable": {"world": 2, "durable": True},
}
SAVE_EVERY = 20
MEETING = "meeting"


class MallocInfo(ctypes.Structure):
    """`struct mallinfo2` of glibc."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks",
            "fordblks", "keepcost",
        )
    ]  # fmt: skip


def heap() -> MallocInfo:
    """Counts of the heap, without pages that are wholly free."""
    libc = ctypes.CDLL(None)
    libc.malloc_trim(0)
    libc.mallinfo2.restype = MallocInfo
    found: MallocInfo = libc.mallinfo2()
    return found


def held(place: Path, handle: Any) -> dict[str, int]:
    """Count what this process has now, and its drive."""
    gc.collect()
    memory = heap()
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    # torch's FileStore appends all messages of the ranks to its file, and never shrinks it.
    files = [path for path in place.rglob("*") if path.is_file() and path.name != MEETING]
    stats = handle.stats()
    return {
        "rss": int(status["RssAnon"].split()[0]) * 1024,
        "allocated": memory.uordblks + memory.hblkhd,
        "heap free": memory.fordblks,
        "python blocks": sys.getallocatedblocks(),
        "descriptors": sum(1 for _ in Path("/proc/self/fd").iterdir()),
        "threads": int(status["Threads"]),
        "python threads": threading.active_count(),
        "slab": stats.pool_bytes,
        "pinned": not_inherited_bytes(),
        "files": len(files),
        "file bytes": sum(path.stat().st_blocks * 512 for path in files),
    }


def not_inherited_bytes() -> int:
    """Bytes of memory for transfers: all that forked children do not get."""
    kept = size = 0
    for line in Path("/proc/self/smaps").read_text(errors="replace").splitlines():
        if line.startswith("Size:"):
            size = int(line.split()[1]) * 1024
        elif line.startswith("VmFlags:") and "dc" in line.split():
            kept += size
    return kept


def train(mode: str, place: Path, steps: int, rank: int) -> Iterator[dict[str, int]]:
    """Train; what is held at some steps, from `FIRST` to the last one."""
    torch.set_num_threads(1)
    values = dict(MODES[mode])
    world = values.pop("world", 1)
    if world > 1:
        dist.init_process_group(
            "gloo", init_method=f"file://{place}/{MEETING}", rank=rank, world_size=world
        )
    drive = place / "drive"
    drive.mkdir(exist_ok=True)
    model: Any = models.make(models.llama)
    inf.offload(model, inf.Policy(params="nvme", optim="nvme", nvme=drive, ram="min", **values))
    optimizer, handle = inf.AdamW(model.parameters(), lr=1e-3), inf.handle(model)
    batches, save = models.token_batches(8), None
    looks = {FIRST, *range(FIRST, steps, max(1, steps // 10)), steps}
    for index in range(1, steps + 1):
        models.loss_of(model, batches[index % len(batches)]).backward()
        if values.get("update") != "backward" or "generations" in values:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        # Not just before a measurement: a save that has just ended still holds one more file.
        if "saves" in mode and index % SAVE_EVERY == 0 and index not in looks:
            if save is not None:
                save.wait()
            save = inf.save(model, optimizer, place / "saved")
        if index in looks:
            if save is not None:
                save.wait()
            handle.flush()
            yield {"step": index, **held(place, handle)}
    handle.close()
    if world > 1:
        dist.destroy_process_group()


def measure(mode: str, place: Path, steps: int) -> Iterator[dict[str, int]]:
    """`train` in processes of its own; what the first rank holds at each look.

    Raises: RuntimeError when one fails.
    """
    here = [sys.executable, "-m", "tests.endurance.growth", "--worker", mode, "--dir", str(place)]
    processes = [
        subprocess.Popen(
            [*here, "--steps", str(steps), "--rank", str(rank)],
            stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
            text=True,
            cwd=Path(__file__).parents[2],
            env={**os.environ, "TORCH_FR_BUFFER_SIZE": str(RECORDED)},
        )
        for rank in range(MODES[mode].get("world", 1))
    ]
    try:
        assert processes[0].stdout is not None
        for line in processes[0].stdout:
            yield json.loads(line)
        codes = [process.wait(60) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    if any(codes):
        raise RuntimeError(f"{mode}: the processes ended with {codes}")


def growth(looks: list[dict[str, int]]) -> dict[str, int]:
    """Return how much more is held at the last look than at the first."""
    return {name: looks[-1][name] - value for name, value in looks[0].items() if name != "step"}


def grown(looks: list[dict[str, int]]) -> dict[str, int]:
    """Return what has grown and must not."""
    # The allocator returns whole pages only. Small long-lived blocks spread over more pages, until
    # all memory that was free at the first measurement is resident: so much is no growth.
    free = looks[0]["heap free"]
    slack = {
        "allocated": ALLOCATED_SLACK,
        "python blocks": BLOCKS_SLACK,
        "rss": ALLOCATED_SLACK + ARENA + free,
        "heap free": free,
    }
    return {name: more for name, more in growth(looks).items() if more > slack.get(name, 0)}


def campaign(place: Path, steps: int, modes: list[str], record: Record) -> dict[str, Any]:
    """Measure all modes. Returns what has grown, by mode."""
    wrong: dict[str, Any] = {}
    print(
        "| mode | steps | RSS, MiB | allocated, MiB | descriptors | threads | slab, KiB "
        "| pinned, KiB | files | file KiB |\n" + 10 * "|---" + "|"
    )
    for number, mode in enumerate(modes):
        folder = place / str(number)
        folder.mkdir()
        looks = []
        for look in measure(mode, folder, steps):
            looks.append(look)
            record.add("look", mode=mode, **look)
            record.show(f"{mode}: step {look['step']} of {steps} ({number + 1}/{len(modes)})")
        if found := grown(looks):
            wrong[mode] = found
        print(_row(mode, looks), flush=True)
    record.add("ended", steps=steps, grown=wrong)
    return wrong


def _row(mode: str, looks: list[dict[str, int]]) -> str:
    first, last = looks[0], looks[-1]

    def cell(name: str, unit: int, digits: int = 0) -> str:
        return f"{first[name] / unit:.{digits}f} → {last[name] / unit:.{digits}f}"

    cells = [
        cell("rss", MIB, 1),
        cell("allocated", MIB, 2),
        cell("descriptors", 1),
        cell("threads", 1),
        cell("slab", 1024),
        cell("pinned", 1024),
        cell("files", 1),
        cell("file bytes", 1024),
    ]
    return f"| {mode} | {first['step']} → {last['step']} | " + " | ".join(cells) + " |"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--modes", nargs="+", choices=tuple(MODES), default=list(MODES))
    parser.add_argument("--record", type=Path, default=Path("out/growth.jsonl"))
    parser.add_argument("--worker", choices=tuple(MODES), help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--dir", type=Path, help="directory on the drive (a temporary one)")
    options = parser.parse_args()
    if options.worker is not None:
        for look in train(options.worker, options.dir, options.steps, options.rank):
            print(json.dumps(look), flush=True)
        return 0
    with tempfile.TemporaryDirectory(prefix="infinity-growth-", dir=options.dir) as place:
        with record_in(options.record) as record:
            wrong = campaign(Path(place), options.steps, options.modes, record)
    for mode, found in wrong.items():
        print(f"GROWN in {mode}: {found}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
