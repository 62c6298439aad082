"""Hostile files: randomly changed real files, read by every file reader of the engine.

    python -m tests.hostile --inputs 100000                 # the campaign: `make fuzz`
    python -m tests.hostile --target pickles --only 4711    # one input again, in this process

An input is a directory that the engine wrote, with one of its files changed: bits, numbers,
lengths, cuts, repetitions; in JSON also values and names, in a pickle also operations. Checksums
are recomputed, as an attacker would do. An input passes if it is read, or refused by an error that
names the fault. Everything else is a finding: another exception, a crash, memory beyond
`MEMORY_BYTES`, more than `SECONDS`, or a file opened outside of the directory.

In a swap directory files also become links, hard links, FIFOs, directories, and files of a
terabyte, and such entries are added (`planted`). There a file outside of the directory that was
opened to write, or that changed in any way, is a finding.

Inputs follow from their numbers: the same number is the same input.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import functools
import io
import json
import logging
import multiprocessing
import multiprocessing.connection
import os
import pickle
import pickletools
import random
import resource
import shutil
import signal
import stat
import struct
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import xxhash

import infinity as inf
from infinity._src.checkpoint import manifest as manifests
from infinity._src.checkpoint.durable import initialization_journal as journals
from infinity._src.checkpoint.durable.files import RUN_DIRECTORY, RunFiles
from infinity._src.checkpoint.durable.initialization_journal import (
    InitializationJournal,
    InitializedFlat,
)
from infinity._src.checkpoint.formats.dcp import DCPFiles
from infinity._src.checkpoint.formats.safe_pickle import extra_bytes, read_extra
from infinity._src.checkpoint.formats.safetensors_reader import SafetensorsFiles
from infinity._src.checkpoint.formats.safetensors_writer import ExportJob
from infinity._src.checkpoint.formats.torch_files import Descriptors, TorchFile
from infinity._src.checkpoint.reader import Checkpoint
from infinity._src.checkpoint.verify import VerifyJob
from infinity.aio import SwapFile
from infinity.aio._swap_owner import PREFIX, Owner
from tests import durable_runs
from tests.crashes import step

MEMORY_BYTES = 1 << 30
"""Address space that a read may take in addition to the process's."""
SECONDS = 20
REFUSALS = (ValueError, OSError, pickle.UnpicklingError)
"""Errors that name a file's fault."""
IN_MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
BATCH = 500
"""Inputs of a process."""

# -- targets ---------------------------------------------------------------------------------------


class Target(NamedTuple):
    """A kind of file. write: writes real files into a directory. files: name patterns of the files
    to change. read: reads the directory. seal: corrects a changed file's checksum. swap: the
    directory is written to, and entries other than files are added; arrive: adapts a copy of the
    directory to its new place.
    """

    write: Callable[[Path], object]
    files: Sequence[str]
    read: Callable[[Path], object]
    seal: Callable[[str, bytes], bytes] = lambda _name, data: data
    swap: bool = False
    arrive: Callable[[Path, Path], None] = lambda _real, _place: None


def small_model() -> torch.nn.Module:
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(6, 9), torch.nn.BatchNorm1d(9))
    return model.append(torch.nn.Linear(9, 3).bfloat16())


def write_save(place: Path) -> None:
    model = inf.offload(small_model(), inf.Policy(params="cpu", optim="cpu", device="cpu"))
    optimizer = inf.AdamW(model.parameters(), lr=1e-3)
    extra = {"epoch": 3, "rng": torch.get_rng_state(), "names": ["a", ("b", 1.5)]}
    inf.save(model, optimizer, place, extra=extra).wait()
    inf.handle(model).close()


def read_save(place: Path) -> None:
    with Checkpoint.open(place) as checkpoint:
        for kind in ("buffers", "extra"):
            data = checkpoint.attachment(kind, 0)
            if data is not None and kind == "extra":
                read_extra(data)
        for _ in ExportJob(checkpoint, masters=True).tensors():
            pass
    VerifyJob(place).verify(lambda _file, _size: None)


def seal_manifest(name: str, data: bytes) -> bytes:
    """Return a manifest with a correct digest, and with correct lengths if its texts can be
    separated."""
    if not name.startswith("manifest"):
        return data
    body = data[:-16]
    return body + xxhash.xxh3_128_digest(body)


def write_dcp(place: Path) -> None:
    model = inf.offload(small_model(), inf.Policy(params="cpu", optim="cpu", device="cpu"))
    optimizer = inf.AdamW(model.parameters(), lr=1e-3)
    inf.export_dcp(model, optimizer, place)
    inf.handle(model).close()


def read_dcp(place: Path) -> None:
    files = DCPFiles(place)
    try:
        for name in files.names():
            files.read(name)
        for name in files.objects:
            files.read_object(name)
    finally:
        files.close()


def write_torch(place: Path) -> None:
    base = torch.arange(24.0)
    torch.save(
        {
            "module": {"w": base[5:17], "t": base.view(4, 6).t(), "h": torch.ones(3).half()},
            "plain": ["a", ("b", 1.5, None), {2: True}, {1, 2}, b"\x00\xff"],
            "parameter": torch.nn.Parameter(torch.ones(2, 3)),
        },
        place / "file.pt",
    )


def read_torch(place: Path) -> None:
    with Descriptors() as descriptors:
        file = TorchFile(place / "file.pt", descriptors)
        file.check()
        file.plain(file.root)
        module = file.root.get("module") if isinstance(file.root, dict) else None
        for value in module.values() if isinstance(module, dict) else ():
            file.tensor(value).read()


def seal_zip(name: str, data: bytes) -> bytes:
    """A file of torch.save whose pickle was replaced by `data`."""
    with tempfile.TemporaryDirectory() as place:
        write_torch(Path(place))
        out = io.BytesIO()
        with (
            zipfile.ZipFile(Path(place) / "file.pt") as before,
            zipfile.ZipFile(out, "w") as after,
        ):
            for member in before.namelist():
                kept = data if member.endswith("data.pkl") else before.read(member)
                # Without the time, which would differ for the same input.
                after.writestr(zipfile.ZipInfo(member), kept)
        return out.getvalue()


def pickle_of(place: Path) -> None:
    """Extract the pickle, which is changed and put back into its file."""
    with tempfile.TemporaryDirectory() as other:
        write_torch(Path(other))
        with zipfile.ZipFile(Path(other) / "file.pt") as file:
            member = next(name for name in file.namelist() if name.endswith("data.pkl"))
            (place / "file.pt").write_bytes(file.read(member))


def write_safetensors(place: Path) -> None:
    model = inf.offload(small_model(), inf.Policy(params="cpu", optim="cpu", device="cpu"))
    inf.export_safetensors(model, place, shard_bytes_max=200)
    inf.handle(model).close()


def read_safetensors(place: Path) -> None:
    files = SafetensorsFiles(place)
    for name in files.names():
        files.read(name)


def write_extra(place: Path) -> None:
    data = extra_bytes({"epoch": 3, "rng": torch.get_rng_state(), "of": {"a": [1.5, ("b", None)]}})
    assert data is not None
    (place / "extra").write_bytes(data)


def read_small_state(place: Path) -> None:
    read_extra((place / "extra").read_bytes())


def write_config(place: Path) -> None:
    zero = {
        "stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/mnt/nvme0"},
        "offload_optimizer": {"device": "cpu", "pin_memory": True, "ratio": 0.5},
        "stage3_max_live_parameters": 1e9, "zero_hpz_partition_size": 1,
    }  # fmt: skip
    config = {
        "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2,
        "zero_optimization": zero, "bf16": {"enabled": True}, "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.95]}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 100}},
        "aio": {"block_size": 1048576, "queue_depth": 8, "thread_count": 1},
    }  # fmt: skip
    (place / "ds.json").write_text(json.dumps(config))


def read_config(place: Path) -> None:
    inf.Policy.from_deepspeed(inf.read_deepspeed(place / "ds.json"))


# -- swap directories


def drives(place: Path) -> list[Path]:
    return [place / "a", place / "b"]


def write_run(place: Path) -> None:
    """A durable run on two drives, two steps of it."""
    for drive in drives(place):
        drive.mkdir()
    model, optimizer = durable_runs.made(*drives(place))
    for index in range(2):
        step(model, optimizer, index, 0)
    durable_runs.close(model)


def write_fill(place: Path) -> None:
    """Write a durable run whose process ends during its initialization."""
    for drive in drives(place):
        drive.mkdir()
    files = RunFiles(drives(place), 0, 1)
    for _ in range(2):
        for file in files.add():
            file.grow(1 << 13)
    states = [list(each) for each in files.states()]
    files.journal.start({"source": "x", "shares": [0.5, 0.5], "states": states}, known=True)
    for index in range(3):
        files.journal.add(index, InitializedFlat(index + 7, bytes(range(64))))
    files.journal.flush()
    files.close()


def arrive_run(real: Path, place: Path) -> None:
    """Adapt a copy of a run to its place: correct its links, the sum of the place in file names,
    and the inodes in the journal.
    """
    for drive in drives(place):
        for path in (drive / RUN_DIRECTORY).iterdir():
            if path.is_symlink():
                target = str(path.readlink()).replace(str(real), str(place))
                path.unlink()
                path.symlink_to(target)
    home = place / "a" / RUN_DIRECTORY
    if not (home / "fill.rank0").exists():
        return
    journal = InitializationJournal(home / "fill.rank0")
    flats = [flat for index in range(3) if (flat := journal.take(index)) is not None]
    head, start = dict(journal.head or {}), dict(journal.started or {})
    begun = RunFiles(drives(place), 0, 1)
    # The id for this place: its sum, and the process's part.
    head = {**(begun.journal.head or {})}
    states = [file for _ in range(2) for file in begun.add()]
    for file in states:
        file.grow(1 << 13)
    begun.journal.start({**start, "states": [list(each) for each in begun.states()]}, known=True)
    for index, flat in enumerate(flats):
        begun.journal.add(index, flat)
    begun.journal.flush()
    begun.close()
    assert head


def begin_run(place: Path, *, resumes: bool = False) -> None:
    """Process the files of a run as a start does, up to a commit. resumes: keep the earlier run's
    files.
    """
    files = RunFiles(drives(place), 0, 1)
    try:
        for file in files.add():
            file.grow(1 << 13)
        list(map(files.journal.take, range(4)))
        states = [list(e) for e in files.states()]
        files.journal.start({"source": "x", "states": states}, known=True)
        files.check_place()
        before = files.before if resumes else None
        files.remove_strangers(each.name for head in before or () for each in head.files)
        files.committed()
    finally:
        files.close()


def read_run(place: Path) -> None:
    """Read the run, then process it twice."""
    begin_run(place, resumes=True)
    with Checkpoint.open(place / "a" / RUN_DIRECTORY) as checkpoint:
        for _ in ExportJob(checkpoint, masters=True).tensors():
            pass
    begin_run(place)


def seal_journal(name: str, data: bytes) -> bytes:
    """Return a journal of an initialization with correct checksums of its records; other files
    unchanged."""
    out, at, record = bytearray(data), 0, journals._RECORD
    if not name.startswith("fill"):
        return seal_manifest(name, data)
    while at + record.size <= len(out):
        end = at + record.size + record.unpack_from(out, at)[1]
        if end + journals._SUM_BYTES > len(out):
            break
        out[end : end + journals._SUM_BYTES] = xxhash.xxh3_64_digest(bytes(out[at:end]))
        at = end + journals._SUM_BYTES
    return bytes(out)


def write_owners(place: Path) -> None:
    """Leave files as a killed process does: a private directory, and a locked file's owner."""
    private = place / f"{PREFIX}abcdefgh"
    private.mkdir(mode=0o700)
    dead = dataclasses.replace(Owner.this(), pid=1 << 22)
    dead.write_atomically(private / "owner.json")
    (private / "swap").write_bytes(b"s" * 4096)
    (place / "run").mkdir(mode=0o700)
    (place / "run" / "file").touch(mode=0o600)
    dead.write_atomically(place / "run" / ".file.owner")


def read_owners(place: Path) -> None:
    with SwapFile.create(place) as swap:
        swap.grow(4096)
    for path in sorted(place.glob("*/*owner*")):
        owner = Owner.read(path)
        if owner is not None:
            str(owner), owner.life()
    with SwapFile.durable(place / "run", "file") as file:
        file.grow(4096)


TARGETS: dict[str, Target] = {
    "saves": Target(write_save, ("*",), read_save, seal_manifest),
    "manifests": Target(write_save, ("manifest*",), read_save, seal_manifest),
    "dcp": Target(write_dcp, (".metadata", "*"), read_dcp),
    "dcp-metadata": Target(write_dcp, (".metadata",), read_dcp),
    "torch-files": Target(write_torch, ("*.pt",), read_torch),
    "pickles": Target(pickle_of, ("*.pt",), read_torch, seal_zip),
    "safetensors": Target(write_safetensors, ("*",), read_safetensors),
    "extra": Target(write_extra, ("extra",), read_small_state),
    "deepspeed-json": Target(write_config, ("ds.json",), read_config),
    "runs": Target(
        write_run, (f"*/{RUN_DIRECTORY}/*",), read_run, seal_manifest, swap=True, arrive=arrive_run
    ),
    "fills": Target(
        write_fill, ("a/*/fill*", "a/*/fill*", f"*/{RUN_DIRECTORY}/*"), begin_run, seal_journal,
        swap=True, arrive=arrive_run,
    ),
    "owners": Target(
        write_owners, (f"{PREFIX}*/*", "run/*", "run/.*"), read_owners, swap=True
    ),
}  # fmt: skip

# -- changes ---------------------------------------------------------------------------------------

NUMBERS = (0, 1, -1, 127, 255, 1 << 15, 1 << 31, (1 << 31) - 1, (1 << 32) - 1, 1 << 40, 1 << 62,
           (1 << 63) - 1, -(1 << 63))  # fmt: skip
VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 1 << 70, 1e308, float("nan"), float("inf"), "", "x" * 100_000,
    "../../etc/passwd", "/etc/passwd", "a\x00b", "\ud800", [], {}, [[]] * 1000, "nvme", "auto",
    {"enabled": "auto"},
)  # fmt: skip
OPERATIONS = [ord(each.code) for each in pickletools.opcodes]
BOMBS = (
    b"\x80\x02r\xff\xff\xff\x7f.",  # room for a memo of billions
    b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\x7fN.",  # a frame of all memory
    b"\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\x7fa.",  # a text of all memory
    b"\x80\x02\x8b\xff\xff\xff\x7f1.",  # a number of 2 GiB
    b"\x80\x05\x96\x00\x00\x00\x00\x10\x00\x00\x00a.",  # an array of 64 GiB
    b"\x80\x02" + b"]q\x00" + b"(h\x00h\x00e" * 3 + b".",  # a list in itself
    b"\x80\x02N" + b"\x85" * 50_000 + b".",  # tuples in tuples
    b"\x80\x02]q\x00" + b"".join(
        b"](h" + bytes([i]) + b"h" + bytes([i]) + b"eq" + bytes([i + 1]) for i in range(60)
    ) + b".",  # two of each of two of each
    b"\x80\x02}(" + b"".join(b"K" + bytes([i % 256]) + b"}(" for i in range(20_000)) + b"u" * 20_001
    + b".",
    b"cposix\nsystem\n(S'false'\ntR.",
    b"\x80\x04\x8c\x08builtins\x8c\x04eval\x93\x8c\x031+1\x85R.",
    b"\x80\x02\x82\x01.",  # a name of the registry
)  # fmt: skip


def changed(data: bytes, rng: random.Random) -> bytes:
    """Some bytes, changed in one to four ways."""
    found = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        rng.choice(WAYS)(found, rng)
    return bytes(found)


def _span(found: bytearray, rng: random.Random) -> slice:
    start = rng.randrange(len(found) + 1)
    return slice(start, min(len(found), start + rng.choice((1, 2, 4, 8, 64, 1024))))


def _flip(found: bytearray, rng: random.Random) -> None:
    if found:
        found[rng.randrange(len(found))] ^= 1 << rng.randrange(8)


def _set(found: bytearray, rng: random.Random) -> None:
    if found:
        found[rng.randrange(len(found))] = rng.choice((0, 0xFF, 0x80, rng.randrange(256)))


def _number(found: bytearray, rng: random.Random) -> None:
    size = rng.choice((1, 2, 4, 8))
    if len(found) >= size:
        at = rng.randrange(len(found) - size + 1)
        # Numbers of formats are aligned more often than not.
        at -= at % size if rng.random() < 0.5 else 0
        value = rng.choice(NUMBERS) & ((1 << 8 * size) - 1)
        found[at : at + size] = value.to_bytes(size, rng.choice(("little", "big")))


def _cut(found: bytearray, rng: random.Random) -> None:
    del found[rng.randrange(len(found) + 1) :]


def _remove(found: bytearray, rng: random.Random) -> None:
    del found[_span(found, rng)]


def _repeat(found: bytearray, rng: random.Random) -> None:
    span = _span(found, rng)
    found[span.start : span.start] = found[span] * rng.choice((1, 2, 100))


def _insert(found: bytearray, rng: random.Random) -> None:
    at = rng.randrange(len(found) + 1)
    found[at:at] = rng.randbytes(rng.choice((1, 4, 64)))


def _digits(found: bytearray, rng: random.Random) -> None:
    places = [i for i, byte in enumerate(found) if 0x30 <= byte <= 0x39]
    if places:
        at = rng.choice(places)
        found[at : at + 1] = rng.choice((b"99999999999999999999", b"-1", b"1e999", b"0", b"7"))


def _operation(found: bytearray, rng: random.Random) -> None:
    if found:
        found[rng.randrange(len(found))] = rng.choice(OPERATIONS)


WAYS = (_flip, _set, _number, _cut, _remove, _repeat, _insert, _digits, _operation)


def changed_json(data: bytes, rng: random.Random) -> bytes | None:
    """Change one value or name of a JSON text; None for other data."""
    try:
        root = json.loads(data)
    except ValueError:
        return None
    places: list[tuple[Any, Any]] = []
    stack = [root]
    while stack:
        each = stack.pop()
        items = each.items() if isinstance(each, dict) else enumerate(each)
        for key, value in items:
            places.append((each, key))
            if isinstance(value, (dict, list)):
                stack.append(value)
    if not places:
        return None
    holder, key = rng.choice(places)
    if isinstance(holder, dict) and rng.random() < 0.2:
        holder[rng.choice(("", "x", key + "s", "../x"))] = holder.pop(key)
    elif rng.random() < 0.2:
        holder[key] = [holder[key]] * rng.choice((0, 2, 1000))
    else:
        holder[key] = rng.choice(VALUES)
    text = json.dumps(root)
    return (text if rng.random() < 0.98 else "[" * 200_000).encode("utf-8", "surrogatepass")


def changed_texts(data: bytes, rng: random.Random) -> bytes | None:
    """Change a value in a manifest's layout or state, with correct lengths; None for other data."""
    header = manifests._HEADER
    with contextlib.suppress(struct.error):
        magic, version, layout, state, *rest = header.unpack_from(data)
        at, texts = header.size, []
        for size in (layout, state):
            texts.append(data[at : at + size])
            at += size
        index = rng.randrange(2)
        text = changed_json(texts[index], rng)
        if text is not None:
            texts[index] = text
            sizes = (len(texts[0]), len(texts[1]))
            return header.pack(magic, version, *sizes, *rest) + b"".join(texts) + data[at:]
    return None


def changed_header(data: bytes, rng: random.Random) -> bytes | None:
    """Change a value in a safetensors header; None for other data."""
    size = int.from_bytes(data[:8], "little")
    text = changed_json(data[8 : 8 + size], rng) if 8 < size < len(data) else None
    return None if text is None else len(text).to_bytes(8, "little") + text + data[8 + size :]


def changed_journal(data: bytes, rng: random.Random) -> bytes | None:
    """Change a value in a journal of an initialization; None for other data."""
    record, at, parts = journals._RECORD, 0, []
    while at + record.size <= len(data):
        kind, length = record.unpack_from(data, at)
        end = at + record.size + length + journals._SUM_BYTES
        if kind > 2 or end > len(data):
            return None
        parts.append((kind, data[at + record.size : end - journals._SUM_BYTES]))
        at = end
    if not parts:
        return None
    index = rng.randrange(min(2, len(parts)))
    text = changed_json(parts[index][1], rng)
    if text is None:
        return None
    if rng.random() < 0.1:
        parts[index] = (parts[index][0], rng.choice((b"[]", b"null", b"7", b"{", b"[" * 100_000)))
    else:
        parts[index] = (parts[index][0], text)
    return b"".join(journals._packed(kind, payload) for kind, payload in parts)


KINDS = ("link", "zero", "loop", "nowhere", "hard", "fifo", "folder", "full", "huge", "rights")


def put(kind: str, path: Path, victims: Path) -> None:
    """Put a link, a FIFO, a directory or a huge file in place of a file."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    if kind in ("folder", "full"):
        path.mkdir()
        if kind == "full":
            (path / "file").write_text("x")
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "hard":
        os.link(victims / "file", path)
    elif kind in ("huge", "rights"):
        path.touch(mode=0o600 if kind == "huge" else 0o666)
        os.truncate(path, 1 << 40 if kind == "huge" else 100)
    else:
        places = {"zero": "/dev/zero", "loop": path.name, "nowhere": victims / "new"}
        path.symlink_to(places.get(kind, victims / "file"))


def planted(place: Path, file: str, victims: Path, rng: random.Random) -> None:
    """Replace a file of a swap directory by another kind of entry, or add one."""
    path = place / file
    if rng.random() < 0.4:
        digits = "".join(rng.choice("0123456789abcdef") for _ in range(16))
        names = (
            f"states-{digits}-1.rank0", f"states-{digits}-1.rank7", ".lock.rank0.owner",
            ".lock.rank0.owner.new", "fill.rank0", "fill.rank3", "lock.rank0", "drive1",
            "drive2", ".drive1.rank0", f"home-{digits[:8]}", "manifest-00000099.rank0",
            "extra-00000099.rank0",
            "manifest-00000099.rank0.partial", f".states-{digits}-1.rank0.owner", "owner.json",
            ".file.owner.new", "swap",
        )  # fmt: skip
        path = path.with_name(rng.choice(names))
    put(rng.choice(KINDS), path, victims)


def shape_of(place: Path) -> dict[str, tuple[object, ...]]:
    """Return everything below a directory that could have been changed."""
    found: dict[str, tuple[object, ...]] = {}
    for path in sorted(place.rglob("*")):
        status = path.lstat()
        data = path.read_bytes() if stat.S_ISREG(status.st_mode) else b""
        found[str(path)] = (status.st_mode, status.st_uid, status.st_size, data)
    return found


def hostile(name: str, data: bytes, rng: random.Random) -> bytes:
    """A changed file."""
    if name in (".metadata", "file.pt", "extra") and rng.random() < 0.02:
        return rng.choice(BOMBS)
    if rng.random() < 0.5:
        for change in (changed_json, changed_texts, changed_header, changed_journal):
            found = change(data, rng)
            if found is not None:
                return found
    return changed(data, rng)


# -- inputs ----------------------------------------------------------------------------------------


class Finding(NamedTuple):
    """An input that was neither read nor properly refused."""

    target: str
    number: int
    file: str
    what: str


INSTALLED = ("/proc/", "/sys/", "/dev/", *{
    os.path.realpath(place)
    for place in (sys.prefix, sys.base_prefix, Path(torch.__file__).parents[1],
                  Path(__file__).parents[1])
})  # fmt: skip
"""Directories of Python and of the kernel, whose files may be opened."""


class Opened:
    """The files opened outside of one directory since the last check."""

    def __init__(self) -> None:
        self._within: str | None = None
        self._outside: list[str] = []
        self._writes = False
        sys.addaudithook(self._hook)

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event != "open" or self._within is None or not isinstance(arguments[0], (str, bytes)):
            return
        given, flags = os.fsdecode(arguments[0]), arguments[2] or 0
        writes = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        if self._writes and not writes:
            return
        # A link at the end is not followed then.
        last = flags & os.O_NOFOLLOW or flags & os.O_EXCL
        # Relative to the descriptor of a directory.
        if last and "/" not in given:
            return
        path = os.path.realpath(given)
        if last:
            path = str(Path(os.path.realpath(Path(given).parent)) / Path(given).name)
        if not path.startswith((self._within, *INSTALLED)):
            self._outside.append(path)

    @contextlib.contextmanager
    def watching(self, place: Path, *, writes: bool = False) -> Iterator[list[str]]:
        """writes: only files that are opened to write to them."""
        self._within, self._outside = str(place.resolve()), []
        self._writes = writes
        try:
            yield self._outside
        finally:
            self._within = None


def _out_of_time(_signal: int, _frame: Any) -> None:
    raise TimeoutError(f"more than {SECONDS} s")


class Inputs:
    """The inputs of one target, made in `home` from its real files."""

    def __init__(self, name: str, seed: int, real: Path, home: Path, opened: Opened) -> None:
        self._name, self._seed, self._opened = name, seed, opened
        self._target = TARGETS[name]
        self._real, self._place = real, home / "input"
        self._files = sorted(
            {
                str(path.relative_to(self._real))
                for pattern in self._target.files
                for path in self._real.glob(pattern)
                if path.is_file()
            }
        )
        self._victims = home / "victims"
        self._make_victims()
        self._shape = shape_of(self._victims)
        assert self._files, f"{name}: no file is to be changed"

    def _make_victims(self) -> None:
        self._victims.mkdir()
        (self._victims / "file").write_bytes(b"somebody's" * 10)
        (self._victims / "file").chmod(0o644)

    def make(self, number: int) -> str:
        """Put an input into the directory. Returns the name of the changed file."""
        rng = random.Random(f"{self._seed} {self._name} {number}")
        shutil.rmtree(self._place, ignore_errors=True)
        shutil.copytree(self._real, self._place, symlinks=True)
        self._target.arrive(self._real, self._place)
        file = rng.choice(self._files)
        if self._target.swap and rng.random() < 0.4:
            planted(self._place, file, self._victims, rng)
            return file
        path = self._place / file
        if path.exists():
            found = hostile(path.name, path.read_bytes(), rng)
            path.write_bytes(self._target.seal(path.name, found))
        return file

    def read(self, number: int) -> tuple[str, Finding | None]:
        """Make and read an input. Returns the result, and its fault, if any."""
        file = self.make(number)
        signal.signal(signal.SIGALRM, _out_of_time)
        signal.alarm(SECONDS)
        how = "read"
        wrong: str | None = None
        with self._opened.watching(self._place, writes=self._target.swap) as outside:
            try:
                self._target.read(self._place)
            except TimeoutError as error:
                how, wrong = "late", str(error)
            except REFUSALS as error:
                how = type(error).__name__
            except Exception as error:
                how, wrong = type(error).__name__, f"{type(error).__name__}: {error}"[:300]
            finally:
                signal.alarm(0)
        if outside:
            wrong = f"opened {outside[0]}"
        # Also by another name, or without being opened.
        if self._target.swap and shape_of(self._victims) != self._shape:
            wrong = "changed a file outside of the directory"
            shutil.rmtree(self._victims)
            self._make_victims()
        return how, None if wrong is None else Finding(self._name, number, file, wrong)


class Job(NamedTuple):
    """Inputs [first, last) of a target. progress: a file with the current input's number."""

    name: str
    seed: int
    first: int
    last: int
    real: str
    progress: str


def _batch(job: Job) -> tuple[collections.Counter[str], list[Finding]]:
    """Read the inputs of a job; runs in a separate process."""
    logging.disable()
    torch.set_num_threads(1)
    counts: collections.Counter[str] = collections.Counter()
    findings = []
    # In the campaign's directory, whose removal also removes the files of killed batches.
    with tempfile.TemporaryDirectory(dir=Path(job.real).parent) as home:
        inputs = Inputs(job.name, job.seed, Path(job.real), Path(home), Opened())
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, resource.RLIM_INFINITY))
        for number in range(job.first, job.last):
            # A crash leaves the number behind.
            Path(job.progress).write_text(f"{number}")
            how, finding = inputs.read(number)
            counts[how] += 1
            findings += [finding] if finding is not None else []
    return counts, findings


@contextlib.contextmanager
def _swap_in_memory() -> Iterator[None]:
    """Put the swap of new processes into memory, where a flush costs nothing."""
    name = "INFINITY_ALLOW_TMPFS"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _in_a_process(call: Callable[[], None], context: Any) -> None:
    """Run a call in a separate process. Raises: RuntimeError if it fails."""
    with _swap_in_memory():
        process = context.Process(target=call)
        process.start()
    process.join()
    if process.exitcode != 0:
        raise RuntimeError(f"writing real files ended with {process.exitcode}")


def run(
    targets: Sequence[str], inputs: int, *, seed: int = 0, processes: int = 2, first: int = 0
) -> tuple[dict[str, collections.Counter[str]], list[Finding]]:
    """Read `inputs` inputs of each target. Returns counts of results, and the findings."""
    context = multiprocessing.get_context("fork")
    counts: dict[str, collections.Counter[str]] = {name: collections.Counter() for name in targets}
    findings: list[Finding] = []
    with tempfile.TemporaryDirectory(dir=IN_MEMORY) as place:
        for name in targets:
            real = Path(place) / name
            real.mkdir()
            _in_a_process(functools.partial(TARGETS[name].write, real), context)
        jobs = collections.deque(
            Job(name, seed, start, min(start + BATCH, first + inputs), str(Path(place) / name),
                str(Path(place) / f"{name} {start}"))
            for start in range(first, first + inputs, BATCH)
            for name in targets
        )  # fmt: skip
        _run_jobs(jobs, processes, context, counts, findings)
    return counts, findings


def _run_jobs(
    jobs: collections.deque[Job],
    processes: int,
    context: Any,
    counts: dict[str, collections.Counter[str]],
    findings: list[Finding],
) -> None:
    """Run each job in a separate process. After a crash a new process continues the job."""
    running: dict[Any, tuple[Job, Any]] = {}
    done, total, began = 0, len(jobs), time.monotonic()
    while jobs or running:
        while jobs and len(running) < processes:
            job, (here, there) = jobs.popleft(), context.Pipe(duplex=False)
            process = context.Process(target=_tell, args=(job, there))
            with _swap_in_memory():
                process.start()
            there.close()
            running[process] = (job, here)
        multiprocessing.connection.wait([process.sentinel for process in running])
        for process in [each for each in running if each.exitcode is not None]:
            job, here = running.pop(process)
            done += 1
            if process.exitcode == 0:
                found, wrong = here.recv()
                counts[job.name] += found
                findings += wrong
                continue
            number = int(Path(job.progress).read_text())
            findings.append(
                Finding(job.name, number, "", f"the process ended with {process.exitcode}")
            )
            counts[job.name]["crash"] += 1
            # Earlier inputs are read again: their results were lost with the process.
            for first, last in ((job.first, number), (number + 1, job.last)):
                if first < last:
                    progress = f"{job.progress}+"
                    jobs.appendleft(job._replace(first=first, last=last, progress=progress))
                    total += 1
        if sys.stderr.isatty():
            left = (time.monotonic() - began) / max(done, 1) * (total - done)
            print(f"\r{done}/{total} batches, {left:.0f} s left ", end="", file=sys.stderr)


def _tell(job: Job, there: Any) -> None:
    there.send(_batch(job))


def show(counts: dict[str, collections.Counter[str]], findings: list[Finding]) -> None:
    """Print the table."""
    columns = sorted({how for each in counts.values() for how in each})
    print("| target | inputs | " + " | ".join(columns) + " |")
    print("|" + "---|" * (len(columns) + 2))
    for name, found in counts.items():
        cells = " | ".join(str(found[how]) for how in columns)
        print(f"| {name} | {found.total()} | {cells} |")
    print(f"{sum(found.total() for found in counts.values())} inputs, {len(findings)} findings")
    for finding in findings[:50]:
        print(f"  {finding.target} --only {finding.number} ({finding.file}): {finding.what}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--inputs", type=int, default=100_000, help="of all targets (%(default)s)")
    parser.add_argument("--target", choices=tuple(TARGETS), help="one only (all)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--only", type=int, metavar="NUMBER", help="one input, in this process")
    options = parser.parse_args()
    targets = [options.target] if options.target else list(TARGETS)
    if options.only is not None:
        with tempfile.TemporaryDirectory(dir=IN_MEMORY) as home, _swap_in_memory():
            real = Path(home) / "real"
            real.mkdir()
            TARGETS[targets[0]].write(real)
            inputs = Inputs(targets[0], options.seed, real, Path(home), Opened())
            print(inputs.make(options.only))
            TARGETS[targets[0]].read(Path(home) / "input")
        return 0
    each = -(-options.inputs // len(targets))
    counts, findings = run(targets, each, seed=options.seed, processes=options.processes)
    show(counts, findings)
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
