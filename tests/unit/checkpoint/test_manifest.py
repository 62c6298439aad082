"""Manifests are read back as they were written, or not at all; resharding finds every element once.
"""

from __future__ import annotations

import dataclasses
import errno
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from infinity._src.cabi.records import PIECE_NUMEL, SECTION_MAX
from infinity._src.checkpoint.directory import (
    generations,
    newest_generation,
    newest_heads,
    next_generation,
    read_manifest,
)
from infinity._src.checkpoint.manifest import (
    ROW,
    FileEntry,
    FlatEntry,
    Head,
    Layout,
    LeftOutEntry,
    Manifest,
    OptimizerEntry,
    ParamEntry,
    from_json,
    manifest_name,
    to_json,
)
from infinity._src.checkpoint.reader import (
    Checkpoint,
    ChunkReader,
    DataReader,
    SavedChunks,
)
from infinity._src.checkpoint.writer import DataWriter, chunk_rows
from infinity._src.memory.flat_layout import plan_flat
from infinity.aio import (
    CHUNK,
    JOB,
    Format,
    JobKind,
    PoolSpec,
    Priority,
    SwapFile,
    Ticket,
    open_executor,
)
from infinity.errors import AioError, ChecksumError

EXACT = FlatEntry(
    "block", "bfloat16", True, Format.SPLIT.code, 4096, (ParamEntry(("a", "b"), (3, 5), 0),)
)


def manifest(rank: int = 0, world: int = 1, generation: int = 1, save: int = 7) -> Manifest:
    rows = np.zeros(3, dtype=ROW)
    rows["start"], rows["numel"], rows["sums_at"] = [0, 2048, 3996], [2048, 1948, 100], [0, 4, 8]
    return Manifest(
        layout=Layout((EXACT,), {"seed": 3, "grad_dtype": None}),
        generation=generation,
        save=save,
        rank=rank,
        world=world,
        step=12,
        algorithm="crc32c",
        files=(FileEntry("data", 8192),),
        buffers=None,
        extra=FileEntry("extra", 3, "abc"),
        optimizers=(
            OptimizerEntry(
                "AdamW",
                [{"values": {"lr": 0.1}, "params": ["a"]}],
                {"a": {"moments": [], "state": 1}},
            ),
        ),
        rows=rows,
        sums=np.arange(12, dtype=np.uint32),
    )


def encoded(one: Manifest) -> bytes:
    """The bytes of its file."""
    return b"".join(one.parts())


def test_a_manifest_comes_back() -> None:
    given_ = manifest()
    back = Manifest.decode(encoded(given_), "there")
    assert back.rows.tobytes() == given_.rows.tobytes()
    assert back.sums.tolist() == list(range(12))
    assert [vars(back)[name] for name in vars(back) if name not in ("rows", "sums", "layout")] == [
        vars(given_)[name] for name in vars(given_) if name not in ("rows", "sums", "layout")
    ]
    assert (back.layout.flats, back.layout.numerics) == (
        given_.layout.flats,
        given_.layout.numerics,
    )
    head = Head.decode(encoded(given_), "there")
    assert vars(head) == {name: vars(given_)[name] for name in vars(head)}


def test_no_damage_passes() -> None:
    whole = encoded(manifest())
    for kind in (Manifest, Head):
        for at in range(0, len(whole), 7):
            with pytest.raises((AioError, ValueError), match="there"):
                kind.decode(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :], "there")
        for length in (0, 10, len(whole) - 1):
            with pytest.raises(AioError) as caught:
                kind.decode(whole[:length], "there")
            assert caught.value.path == "there"


def test_a_value_of_no_known_name_is_refused() -> None:
    class Named(Manifest):
        def state(self) -> bytes:
            return super().state().replace(b'"extra"', b'"eFtra"')

    given_ = manifest()
    values = {field.name: getattr(given_, field.name) for field in dataclasses.fields(given_)}
    data = encoded(Named(**values))
    for kind in (Manifest, Head):
        with pytest.raises(ValueError, match="there is not a manifest that an engine wrote"):
            kind.decode(data, "there")


def test_a_name_that_leads_out_of_the_directory_is_refused() -> None:
    for name in ("../secret", "/etc/passwd", ""):
        bad = Manifest(**{**vars(manifest()), "files": (FileEntry(name, 1),)})
        with pytest.raises(ValueError, match="not in the checkpoint's directory"):
            Manifest.decode(encoded(bad), "there")


def edited_row(name: str, value: object) -> dict[str, Any]:
    rows = manifest().rows.copy()
    rows[name][1] = value
    return {"rows": rows}


def test_what_was_left_out_comes_back_and_is_nothing_in_other_manifests() -> None:
    left_out = (LeftOutEntry(("x", "y"), (7, 0), "float32"), LeftOutEntry(("z",), (), "int8"))
    given_ = dataclasses.replace(manifest(), layout=Layout((EXACT,), {}, left_out))
    back = Manifest.decode(encoded(given_), "there").layout
    assert back.left_out == left_out
    assert [(entry.name, entry.numel) for entry in back.left_out] == [("x", 0), ("z", 1)]
    assert b"left_out" not in Layout((EXACT,), {}).encoded


def edited_left_out(*values: Any) -> dict[str, Any]:
    return {"layout": Layout((EXACT,), {}, (LeftOutEntry(*values),))}


def edited_flat(**values: Any) -> dict[str, Any]:
    return {"layout": Layout((dataclasses.replace(EXACT, **values),), {})}


@pytest.mark.parametrize(
    "edit",
    [
        # was a read outside of memory
        *(edited_row("sums_at", value) for value in (-1, 9, 1 << 50)),
        *(edited_row("numel", value) for value in (0, -5, 1, 1 << 20, 1 << 60)),
        *(edited_row("start", value) for value in (-1, 1, 1 << 62)),
        *(edited_row("flat", value) for value in (-1, 9)),
        *(edited_row("file", value) for value in (-1, 9)),
        *(edited_row("file_offset", value) for value in (-4096, 4096, 1 << 62)),
        edited_row("section_at", 1 << 62),
        edited_row("padded", 7),
        {"rows": manifest().rows[:0]},
        {"sums": manifest().sums[:0]},
        # the last one made the reader examine a billion names
        *({"world": value} for value in (0, -1, "2", 10**9)),
        {"step": None},
        {"files": ()},
        {"files": (FileEntry("data", -1),)},
        {"optimizers": (OptimizerEntry("AdamW", [{}], {}),)},
        edited_flat(shard_numel=0),
        edited_flat(shard_numel="x"),
        edited_flat(format=99_999),
        edited_flat(dtype="load"),
        *(
            edited_flat(params=(entry,))
            for entry in (
                ParamEntry((), (3,), 0),
                ParamEntry(("a",), (-3,), 0),
                ParamEntry(("a",), (1 << 40,), 0),
                ParamEntry(("a",), (3,), -64),
            )
        ),
        edited_left_out((), (3,), "int8"),
        edited_left_out((1,), (3,), "int8"),
        edited_left_out(("a",), (-3,), "int8"),
        edited_left_out(("a",), ("3",), "int8"),
    ],
    ids=lambda edit: next(iter(edit)),
)
def test_a_manifest_that_no_engine_wrote_is_refused_whatever_its_checksum(
    edit: dict[str, Any], tmp_path: Path
) -> None:
    bad = dataclasses.replace(manifest(), **edit)
    path = tmp_path / "manifest-00000001.rank0"
    path.write_bytes(encoded(bad))
    with pytest.raises(ValueError, match=r"rank0 is not a manifest that an engine wrote"):
        read_manifest(path)
    path.write_bytes(encoded(manifest()))
    assert read_manifest(path).world == 1


@pytest.mark.parametrize("newest", [newest_generation, newest_heads])
def test_a_generation_is_whole_when_all_ranks_have_it(tmp_path: Path, newest: Any) -> None:
    def put(one: Manifest) -> None:
        (tmp_path / one.name).write_bytes(encoded(one))

    with pytest.raises(AioError) as caught:
        newest(tmp_path)
    assert caught.value.errno == errno.ENOENT
    assert next_generation(tmp_path) == 1
    put(manifest(0, 2, 4))
    with pytest.raises(AioError, match="rank1") as caught:
        newest(tmp_path)
    put(manifest(1, 2, 4))
    put(manifest(1, 2, 5))
    (tmp_path / "manifest-00000009.rank0.partial").write_bytes(b"")
    (tmp_path / "manifest-last").write_bytes(b"")
    assert generations(tmp_path) == [9, 5, 4]
    assert [one.generation for one in newest(tmp_path)] == [4, 4]
    assert next_generation(tmp_path) == 10
    put(manifest(0, 2, 5))
    assert newest(tmp_path)[0].generation == 5
    put(manifest(1, 2, 5, save=8))
    with pytest.raises(AioError, match="of another save"):
        newest(tmp_path)
    (tmp_path / manifest_name(5, 1)).write_bytes(b"inf-ckpt" * 9)
    with pytest.raises((AioError, ValueError)):  # damaged: not passed over for an older one
        newest(tmp_path)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: (
        st.lists(inner)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text() | st.integers(), inner)
    ),
    max_leaves=8,
)


@settings(deadline=None, max_examples=40)
@given(JSON)
def test_small_values_come_back(value: Any) -> None:
    back = from_json(to_json(value))
    assert back == value
    assert type(back) is type(value)


def test_small_tensors_come_back_and_other_things_are_named() -> None:
    for tensor in (
        torch.tensor(3.5),
        torch.arange(4).view(2, 2),
        torch.zeros(0),
        torch.ones(3, dtype=torch.bfloat16),
    ):
        back = from_json(to_json(tensor))
        assert (back.dtype, back.shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(back, tensor)
    assert to_json(np.float64(0.5)) == 0.5
    with pytest.raises(ValueError, match="of type object cannot be saved"):
        to_json([object()])
    with pytest.raises(ValueError, match="8000 bytes is too large"):
        to_json(torch.zeros(2000))
    with pytest.raises(ValueError, match="is not known"):
        from_json({"what": 1})


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(1, 9000), min_size=1, max_size=6),
    st.integers(1, 4),
    st.integers(1, 4),
    st.sampled_from([2048, 4096, 8192]),
    st.sampled_from([2048, 6144]),
)
def test_every_element_is_found_once_whatever_the_worlds(
    numels: list[int], before: int, after: int, chunk_before: int, chunk_after: int
) -> None:
    """Write global element numbers as one world's chunks, read them as another's."""
    old = plan_flat(tuple(numels), 2, before, chunk_before)
    new = plan_flat(tuple(numels), 2, after, chunk_after)
    flat = np.zeros(old.numel, dtype=np.int64)
    for index, (offset, numel) in enumerate(zip(old.offsets, old.numels, strict=True)):
        flat[offset : offset + numel] = 100_000 * (index + 1) + np.arange(numel)
    chunks = old.chunks
    each = FlatEntry("unit", "bfloat16", True, EXACT.format, old.shard_numel, ())
    rows = chunk_rows([(chunks.starts, chunks.numels)], ROW)
    parts = [
        dataclasses.replace(manifest(), rows=rows, rank=rank, world=before)
        for rank in range(before)
    ]
    table = SavedChunks(parts, (each,))
    for index, numel in enumerate(numels):
        found = np.zeros(numel, dtype=np.int64)
        for rank in range(after):
            _, element, count = new.shard_range(index, rank)
            low = old.offsets[index] + element
            cuts = table.cut(np.array([low]), np.array([count]))
            for chunk, at, size in zip(cuts.chunk, cuts.first, cuts.numel, strict=True):
                within = chunks[chunk % len(chunks)]
                start = at - chunk // len(chunks) * old.shard_numel - within.start
                assert 0 <= start < start + size <= within.numel
                assert start % 64 == 0  # whole quantization groups
                found[at - old.offsets[index] :][:size] += flat[at : at + size]
        assert np.array_equal(found, 100_000 * (index + 1) + np.arange(numel))


def places(addresses: dict[int, int]) -> np.ndarray[Any, Any]:
    at = np.zeros((1, SECTION_MAX), dtype=np.uint64)
    at[0, list(addresses)] = list(addresses.values())
    return at


def store(writer: DataWriter, row: int, addresses: dict[int, int]) -> None:
    writer.store(np.array([row]), places(addresses)).wait()


def fetch(reader: DataReader, row: int, addresses: dict[int, int]) -> Ticket:
    (ticket,) = reader.fetch(np.array([row]), places(addresses))
    return ticket


def test_rows_of_a_data_file_come_back_padding_included_and_damage_anywhere_is_found(
    tmp_path: Path,
) -> None:
    compact = Format(2, 2, 2)
    flat = FlatEntry("block", "bfloat16", True, compact.code, 4096, ())
    rows = np.zeros(2, dtype=ROW)
    rows["numel"], rows["start"], rows["key"] = [2048, 100], [0, 2048], [8, 16]
    writer = DataWriter(tmp_path / "data", rows, [flat], backend="auto")
    held = [np.full(20480, 7 + row, dtype=np.uint8) for row in range(2)]
    for row, memory in enumerate(held):
        store(writer, row, {s: memory.ctypes.data + 4096 * s for s in range(5)})
    writer.finish()
    writer.close()
    path, settings_ = tmp_path / "data", {"algorithm": "crc32c"}
    assert (
        path.stat().st_size
        == writer.entry.size_bytes
        == int(rows["run_bytes"].sum())
        == 2 * 5 * 4096
    )
    whole = path.read_bytes()
    for at in (0, 5000, 4096 * 5 - 1, 4096 * 6 + 300, len(whole) - 1):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 128]) + whole[at + 1 :])
        reader = DataReader(tmp_path, [writer.entry], rows, [flat], writer.sums, **settings_)
        back = np.zeros(4096, dtype=np.uint8)
        with pytest.raises(ChecksumError) as caught:
            for row in range(2):
                for s in range(5):
                    fetch(reader, row, {s: back.ctypes.data}).wait()
                    assert (back == 7 + row).all()
        assert caught.value.offset <= at < caught.value.offset + caught.value.length
        assert caught.value.path == str(path)
        reader.close()


def test_chunks_that_an_executor_wrote_are_read_in_place(tmp_path: Path) -> None:
    """Some sections in one run, the others elsewhere: the same manifest describes the swap files of
    a run."""
    numel, file = 2048, SwapFile.new(tmp_path / "swap")
    file.grow(1 << 20)
    executor = open_executor([file], small=PoolSpec(0, 0), large=PoolSpec(2, 1 << 16))
    chunk = np.zeros(1, dtype=CHUNK)
    resident = np.zeros(4 * numel, dtype=np.uint8)
    sums = np.zeros(4, dtype=np.uint32)
    chunk["key"], chunk["numel"], chunk["format"], chunk["section_count"] = (
        99,
        numel,
        Format.SPLIT.code,
        4,
    )
    chunk["file_offset"], chunk["run_bytes"], chunk["piece_numel"] = 8192, 16384, PIECE_NUMEL
    chunk["itemsize"][0, :4], chunk["group_numel"][0, :4] = (2, 2, 4, 4), 1
    chunk["section_at"] = -1
    chunk["section_at"][0, :3] = (0, 4096, 8192)
    chunk["section_ptr"][0, 3], chunk["sums_ptr"] = resident.ctypes.data, sums.ctypes.data
    ids = executor.define(chunk)
    values = np.arange(4 * numel, dtype=np.int64).astype(np.uint8)
    job = np.zeros(1, dtype=JOB)
    job["chunk"], job["kind"], job["mask"], job["base"] = ids[0], JobKind.STORE, 0b1111, -1
    job["ptr"][0, :4] = values.ctypes.data
    executor.submit(job, priority=Priority.DEMAND).wait()
    row = np.zeros(1, dtype=ROW)
    row["numel"], row["key"], row["generation"] = numel, 99, executor.look(ids)["generation"]
    row["file_offset"], row["run_bytes"], row["section_at"] = 8192, 16384, chunk["section_at"]
    executor.close()
    file.close()
    entry = FileEntry("swap", 1 << 20)
    reader = DataReader(tmp_path, [entry], row, [EXACT], sums, algorithm="crc32c")
    back = np.zeros(4 * numel, dtype=np.uint8)
    fetch(reader, 0, {2: back.ctypes.data}).wait()
    assert np.array_equal(back, values)
    reader.close()


def test_a_rank_s_files_are_opened_once_whatever_the_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run in eight directories, whose chunks are requested in any order."""
    drives, each, numel = 8, 5, 2048
    flat = dataclasses.replace(EXACT, shard_numel=drives * each * numel, params=())
    parts, sums, files = [], [], []
    for drive in range(drives):
        (tmp_path / f"drive{drive}").mkdir()
        rows = np.zeros(each, dtype=ROW)
        rows["numel"], rows["start"] = numel, numel * (drive + drives * np.arange(each))
        rows["key"] = 8 * (1 + drive * each + np.arange(each))
        writer = DataWriter(tmp_path / f"drive{drive}" / "data", rows, [flat], backend="auto")
        held = [np.full(4096, drive + drives * row, dtype=np.uint8) for row in range(each)]
        for row, memory in enumerate(held):
            store(writer, row, {0: memory.ctypes.data})
            zeros = np.zeros(8192, dtype=np.uint8)
            store(writer, row, dict.fromkeys((1, 2, 3), zeros.ctypes.data))
        writer.finish()
        writer.close()
        rows["file"] = drive
        rows["sums_at"] += sum(map(len, sums))
        parts.append(rows)
        sums.append(writer.sums)
        files.append(dataclasses.replace(writer.entry, name=f"drive{drive}/data"))
    whole = dataclasses.replace(
        manifest(),
        layout=Layout((flat,), {}),
        files=tuple(files),
        rows=np.concatenate(parts),
        sums=np.concatenate(sums),
    )
    opened, real = [], SwapFile.existing

    def existing(path: Path) -> SwapFile:
        opened.append(path)
        return real(path)

    monkeypatch.setattr(SwapFile, "existing", existing)
    with Checkpoint(tmp_path, [whole]) as checkpoint:
        reader = ChunkReader(checkpoint, (0,))
        for chunk in (*range(drives * each), *reversed(range(drives * each))):
            assert (reader.get(chunk)[0] == chunk).all()
        reader.close()
    assert sorted(opened) == [tmp_path / file.name for file in files]


@pytest.mark.parametrize(
    ("algorithm", "message"), [("xxh3", "an earlier release"), ("md5", "use a later release")]
)
def test_checksums_that_no_executor_takes_are_refused(
    tmp_path: Path, algorithm: str, message: str
) -> None:
    rows, sums = np.zeros(0, dtype=ROW), np.zeros(0, dtype=np.uint32)
    with pytest.raises(ValueError, match=f"checksums are '{algorithm}'.*{message}"):
        DataReader(tmp_path, [FileEntry("data", 0)], rows, [EXACT], sums, algorithm=algorithm)
