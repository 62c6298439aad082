"""Rows of a durable run are restored from their two parts, and damage of either is reported."""

from __future__ import annotations

import dataclasses
import errno
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinity._src.cabi import native
from infinity._src.checkpoint.directory import (
    file_name,
    newest_generation,
    newest_heads,
    read_manifest,
    write_attachment,
)
from infinity._src.checkpoint.durable.run import Described, RunTable
from infinity._src.checkpoint.manifest import (
    FOLDED,
    TABLE,
    FileEntry,
    FlatEntry,
    Head,
    Layout,
    Marks,
    ParamEntry,
    joined,
    marks_of,
    table_parts,
)
from infinity.aio import CHUNK, Format
from infinity.errors import AioError

CHUNKS, SECTIONS = 3, 4
FLAT = FlatEntry(
    "block", "bfloat16", True, Format.SPLIT.code, 6144, (ParamEntry(("a",), (6144,), 0),)
)
DAMAGED = (AioError, ValueError)


def table() -> npt.NDArray[np.void]:
    found = np.zeros(CHUNKS, dtype=TABLE)
    found["start"], found["numel"] = 2048 * np.arange(CHUNKS), 2048
    found["key"], found["run_bytes"] = 5 + np.arange(CHUNKS), 24_576
    found["section_at"] = [0, 4096, 8192, 16_384, -1, -1]
    found["file"] = [7, 65_543]
    found["file_offset"][:, 0] = found["file_offset"][:, 1] = 24_576 * np.arange(CHUNKS)
    return found


def marks(second: int = 0b101) -> Marks:
    live = second >> np.arange(CHUNKS) & 1
    return Marks(
        np.arange(CHUNKS, dtype=np.uint64) + 9,
        (live * 128).astype(np.uint8),
        np.arange(CHUNKS * SECTIONS, dtype=np.uint32),
    )


def head(entry: FileEntry, generation: int = 1, numbers: tuple[int, ...] = (7, 65_543)) -> Head:
    return Head(
        generation=generation,
        save=7,
        rank=0,
        world=1,
        step=12,
        algorithm="crc32c",
        files=(FileEntry("one", 98_304), FileEntry("two", 98_304)),
        buffers=None,
        extra=None,
        optimizers=(),
        table=entry,
        numbers=numbers,
    )


def put(
    place: Path,
    generation: int = 1,
    *,
    rows: npt.NDArray[np.void] | None = None,
    said: Marks | None = None,
    numbers: tuple[int, ...] = (7, 65_543),
) -> tuple[Path, Path]:
    """Write a commit. Returns its manifest and its table."""
    name = file_name("table", generation, 0)
    layout = Layout((FLAT,), {"seed": 3})
    entry = write_attachment(place, name, *table_parts(layout, table() if rows is None else rows))
    made = head(entry, generation, numbers)
    write_attachment(place, made.name, *made.parts_with(said or marks()))
    return place / made.name, place / name


def test_a_commit_comes_back(tmp_path: Path) -> None:
    found = read_manifest(put(tmp_path)[0])
    assert found.rows["file"].tolist() == [1, 0, 1]
    assert found.rows["file_offset"].tolist() == [0, 24_576, 49_152]
    assert found.rows["generation"].tolist() == [9, 10, 11]
    assert found.rows["padded"].tolist() == [FOLDED] * CHUNKS
    assert found.sums.tolist() == list(range(CHUNKS * SECTIONS))
    assert (found.layout.flats, found.layout.numerics) == ((FLAT,), {"seed": 3})
    assert (found.step, found.table.name, found.numbers) == (
        12,
        "table-00000001.rank0",
        (7, 65_543),
    )


@pytest.mark.parametrize("which", [0, 1], ids=["manifest", "table"])
def test_no_damage_of_either_part_passes(which: int, tmp_path: Path) -> None:
    files = put(tmp_path)
    whole = files[which].read_bytes()
    for at in range(0, len(whole), 7):
        files[which].write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(DAMAGED, match=files[which].name):
            read_manifest(files[0])
    for length in (0, 10, len(whole) - 1):
        files[which].write_bytes(whole[:length])
        with pytest.raises(AioError, match=files[which].name):
            read_manifest(files[0])
    files[which].write_bytes(whole)
    assert read_manifest(files[0]).step == 12


def test_a_generation_without_its_table_is_damaged_not_begun(tmp_path: Path) -> None:
    put(tmp_path, 1)
    table_file = put(tmp_path, 2)[1]
    whole = table_file.read_bytes()
    for left in (whole[:-1], b""):
        table_file.write_bytes(left)
        if not left:
            table_file.unlink()
        for read in (newest_generation, newest_heads):
            with pytest.raises(AioError, match="table-00000002") as caught:
                read(tmp_path)
            assert caught.value.errno != errno.ENOENT


def test_a_commit_is_remembered_without_its_marks() -> None:
    count = 1 << 18
    many = Marks(
        np.zeros(count, np.uint64), np.zeros(count, np.uint8), np.zeros(4 * count, np.uint32)
    )
    known, file = RunTable(None, None, ()), FileEntry("table", 1)
    found = Described(many, (7,), b"these places", ())
    tracemalloc.start()
    known.committed(file, found)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 4096
    assert known.file is known.known(found) is file
    assert known.known(dataclasses.replace(found, digest=b"others")) is None


def edited(name: str, value: object) -> npt.NDArray[np.void]:
    found = table()
    found[name][1] = value
    return found


@pytest.mark.parametrize(
    "edit",
    [
        *({"rows": edited("numel", value)} for value in (0, -5, 1 << 60)),
        *({"rows": edited("start", value)} for value in (-1, 1, 1 << 62)),
        *({"rows": edited("flat", value)} for value in (-1, 9)),
        *({"rows": edited("file", value)} for value in (-1, 8, 1 << 30)),
        *({"rows": edited("file_offset", value)} for value in (-4096, 98_304, 1 << 62)),
        {"rows": edited("section_at", 1 << 62)},
        {"rows": table()[:2]},
        {"numbers": ()},
        {"numbers": (7, 65_543, 8), "rows": edited("file", 8)},
        {"said": dataclasses.replace(marks(), folded=marks().folded[:-1])},
        {"said": dataclasses.replace(marks(), flags=marks().flags + 64)},
    ],
    ids=lambda edit: "-".join(edit),
)
def test_parts_that_no_engine_wrote_are_refused(edit: dict[str, Any], tmp_path: Path) -> None:
    path = put(tmp_path, **edit)[0]
    with pytest.raises(ValueError, match=r"rank0 is not a manifest that an engine wrote"):
        read_manifest(path)


def test_a_table_of_another_kind_is_refused(tmp_path: Path) -> None:
    path, name = put(tmp_path)
    first, *rest = table_parts(Layout((FLAT,), {}), table())
    entry = write_attachment(
        tmp_path, name.name, bytes(first)[:8] + b"\x04" + bytes(first)[9:], *rest
    )
    write_attachment(tmp_path, path.name, *head(entry).parts_with(marks()))
    with pytest.raises(ValueError, match="another format"):
        read_manifest(path)


@given(st.integers(1, 40), st.integers(1, 6), st.integers(0, 2**32 - 1))
def test_marks_and_table_join_to_what_the_records_say(count: int, sections: int, seed: int) -> None:
    """Whatever place is live, rows have it, and each section's checksum is that of its pieces'."""
    rng = np.random.default_rng(seed)
    now = np.zeros(count, dtype=CHUNK)
    pieces = rng.integers(1, 5, count)
    sums = rng.integers(0, 2**32, (count, sections, 5), dtype=np.uint32)
    packed = [np.ascontiguousarray(sums[i, :, : pieces[i]]) for i in range(count)]
    now["sums_ptr"] = [each.ctypes.data for each in packed]
    now["generation"] = rng.integers(0, 2**63, count)
    now["zeros"] = rng.integers(0, 1 << 6, count)
    second = rng.random(count) < 0.5
    where = np.zeros(count, dtype=TABLE)
    where["file"] = rng.choice([3, 65_539, 9], (count, 2))
    where["file_offset"] = rng.integers(0, 2**50, (count, 2))
    # In two ranges, as a run has several.
    cut = int(rng.integers(0, count + 1))
    found = Marks.join(
        [
            marks_of(now[part], second[part], pieces[part], sections)
            for part in (slice(cut), slice(cut, None))
        ]
    )
    data = b"x" + b"".join(found.parts())
    again = Marks.decode(data, 1, count, count * sections)
    rows = joined(where, again, [sections], (9, 3, 65_539))
    at = np.arange(count)
    assert np.array_equal(
        np.array([9, 3, 65_539])[rows["file"]], where["file"][at, second.astype(int)]
    )
    assert np.array_equal(rows["file_offset"], where["file_offset"][at, second.astype(int)])
    assert np.array_equal(rows["generation"], now["generation"])
    assert np.array_equal(rows["zeros"], now["zeros"] & ((1 << sections) - 1))
    for row, of_chunk in zip(rows, packed, strict=True):
        mine = again.folded[row["sums_at"] :][:sections].tolist()
        assert mine == [native.crc32c(each) for each in of_chunk]
    assert len(data) == 1 + count * (9 + 4 * sections)
