"""Files of torch.save, read without torch.load: the same values, and no lie about a size."""

from __future__ import annotations

import collections
import contextlib
import io
import pickle
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.serialization import config

from infinity._src.checkpoint.formats.torch_files import Descriptors, TorchFile


@pytest.fixture
def descriptors() -> Iterator[Descriptors]:
    with Descriptors() as opened:
        yield opened


def test_values_are_those_of_torch_load(tmp_path: Path, descriptors: Descriptors) -> None:
    base = torch.arange(24.0)
    tensors = {
        "slice": base[5:17],
        "turned": base.view(4, 6).t(),
        "number": torch.tensor(3),
        "empty": torch.empty(0, 3),
        "parameter": torch.nn.Parameter(torch.ones(2, 3)),
        **{
            str(dtype): torch.tensor([1, 0, 3]).to(dtype)
            for dtype in (torch.bfloat16, torch.float16, torch.int8, torch.bool, torch.uint16)
        },
    }
    marked = torch.ones(3)
    marked.note = "DeepSpeed sets such attributes"  # type: ignore[attr-defined]
    plain = {
        "text": ["a", ("b", 1.5, None), {2: True}],
        "bytes": b"\x00\xff",
        "set": {1, 2},
        "ordered": collections.OrderedDict(x=torch.Size([2])),
        "dtype": torch.float16,
    }
    path = tmp_path / "file.pt"
    torch.save({"tensors": tensors, "marked": marked, "plain": plain}, path)
    file = TorchFile(path, descriptors)
    for name, value in tensors.items():
        found = file.tensor(file.root["tensors"][name])
        assert (found.dtype, found.shape) == (value.dtype, tuple(value.shape))
        assert torch.equal(found.read(), value)
    assert torch.equal(file.tensor(file.root["marked"]).read(), marked)
    assert file.plain(file.root["plain"]) == {**plain, "ordered": {"x": (2,)}}
    assert torch.equal(file.plain([file.root["marked"]])[0], marked)
    file.check()
    part = torch.empty(4)
    file.tensor(file.root["tensors"]["slice"]).read_into(part, 3)
    assert torch.equal(part, base[8:12])
    with pytest.raises(ValueError, match="a vector has the strides"):
        file.tensor(file.root["tensors"]["turned"]).read_into(part, 0)


def test_a_file_without_checksums_is_read(tmp_path: Path, descriptors: Descriptors) -> None:
    before = config.save.compute_crc32
    config.save.compute_crc32 = False
    try:
        torch.save(torch.ones(3), tmp_path / "file.pt")
    finally:
        config.save.compute_crc32 = before
    file = TorchFile(tmp_path / "file.pt", descriptors)
    file.check()
    assert torch.equal(file.tensor(file.root).read(), torch.ones(3))


class Call:
    """Pickles as a call of a function of torch with any arguments."""

    def __init__(self, name: str, *arguments: Any) -> None:
        self._name, self._arguments = name, arguments

    def __reduce__(self) -> Any:
        return getattr(torch._utils, self._name), self._arguments


class _Storage:
    """Pickles as the persistent id of a storage."""

    def __init__(self, *pid: Any) -> None:
        self.pid = pid


def forged(path: Path, value: Any, size: int = 16) -> Path:
    """A file whose pickle is `value`, with one storage of so many bytes."""

    class Pickler(pickle.Pickler):
        def persistent_id(self, obj: Any) -> Any:
            return obj.pid if isinstance(obj, _Storage) else None

    data = io.BytesIO()
    Pickler(data, protocol=2).dump(value)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", data.getvalue())
        archive.writestr("archive/data/0", bytes(size))
    return path


FLOATS = ("storage", torch.FloatStorage, "0", "cpu", 4)


def tensor(*arguments: Any, storage: tuple[Any, ...] = FLOATS) -> Any:
    """A tensor of forged arguments."""
    return Call("_rebuild_tensor_v2", _Storage(*storage), *arguments, False, None)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (tensor(0, (5,), (1,)), "elements 0 to 5 of a tensor lie beyond"),
        (tensor(1, (4,), (1,)), "elements 1 to 5 of a tensor lie beyond"),
        (tensor(0, (10**12,), (0,)), r"of shape \(1000000000000,\) has 1 elements"),
        (tensor(0, (2, 2), (1, 1)), r"of shape \(2, 2\) has 3 elements"),
        (tensor(-1, (2,), (1,)), "an invalid shape or offset"),
        (tensor(0, (2.0,), (1,)), "an invalid shape or offset"),
        (tensor(0, (2,), (1, 1)), r"the strides \(1, 1\)"),
        (
            tensor(0, (4,), (1,), storage=("storage", torch.FloatStorage, "0", "cpu", 10**9)),
            "has 4000000000 bytes in archive/data/0, which has 16",
        ),
        (
            tensor(0, (4,), (1,), storage=("storage", torch.FloatStorage, "../x", "cpu", 4)),
            r"archive/data/\.\./x, which has 0",
        ),
        (Call("_rebuild_tensor_v2", "x", 0, (1,), (1,)), "a tensor has no storage"),
        (Call("_rebuild_tensor_v2"), "not enough values"),
        ([1], "not a list"),
    ],
)
def test_a_tensor_that_its_file_does_not_hold_is_refused(
    value: Any, message: str, tmp_path: Path, descriptors: Descriptors
) -> None:
    file = TorchFile(forged(tmp_path / "file.pt", value), descriptors)
    with pytest.raises(ValueError, match=rf"file\.pt is refused: .*{message}"):
        file.tensor(file.root)


def test_lists_that_name_each_other_end(tmp_path: Path, descriptors: Descriptors) -> None:
    many: list[Any] = []
    for _ in range(100):  # 2^100 lists, if each were copied
        many = [many, many]
    within: list[Any] = []
    within.append(within)
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    file = TorchFile(forged(tmp_path / "file.pt", [many, within]), descriptors)
    assert len(file.plain(file.root[0])) == 2
    with pytest.raises(ValueError, match="a list contains itself"):
        file.plain(file.root[1])
    # A pickle nests without recursion.
    data = b"\x80\x02" + b"]" * 5000 + b"a" * 4999 + b"."
    with zipfile.ZipFile(tmp_path / "deep.pt", "w") as archive:
        archive.writestr("archive/data.pkl", data)
    nested = TorchFile(tmp_path / "deep.pt", descriptors)
    with pytest.raises(ValueError, match="it is nested too deeply"):
        nested.plain(nested.root)


def test_files_of_another_kind_are_refused(tmp_path: Path, descriptors: Descriptors) -> None:
    legacy = tmp_path / "legacy.pt"
    torch.save(torch.ones(2), legacy, _use_new_zipfile_serialization=False)
    empty = tmp_path / "empty.pt"
    empty.touch()
    other = tmp_path / "other.zip"
    with zipfile.ZipFile(other, "w") as archive:
        archive.writestr("a/b", b"")
    packed = tmp_path / "packed.pt"
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(10**6))
    big_endian = forged(tmp_path / "big.pt", 1)
    with zipfile.ZipFile(big_endian, "a") as archive:
        archive.writestr("archive/byteorder", b"big")
    # An index of the memo for which the C unpickler would allocate memory.
    greedy = tmp_path / "greedy.pt"
    with zipfile.ZipFile(greedy, "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02Nr\xff\xff\xff\x7f.")
    assert TorchFile(greedy, descriptors).root is None
    for path, message in (
        (legacy, "no zip as torch.save writes it"),
        (empty, "cut short"),
        (other, "it has data.pkl 0 times"),
        (packed, "is compressed"),
        (big_endian, "the other byte order"),
        (tmp_path, "it is no file"),
    ):
        with pytest.raises(ValueError, match=rf"{path} is refused: .*{message}"):
            TorchFile(path, descriptors)


def test_a_member_before_the_file_is_refused(tmp_path: Path, descriptors: Descriptors) -> None:
    path = tmp_path / "file.pt"
    torch.save({"a": torch.arange(9.0)}, path)
    # Cut in front, a zip has its members before its first byte.
    path.write_bytes(path.read_bytes()[2:])
    with pytest.raises(ValueError, match=rf"{path} is refused"):
        TorchFile(path, descriptors)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_damage_is_an_error_or_nothing(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("damage") / "file.pt"
    values = {"a": torch.arange(9.0), "b": [1, "two", (3.0,)], "c": torch.ones(2, 2).half()}
    torch.save(values, path)
    whole = path.read_bytes()
    at = data.draw(st.integers(0, len(whole) - 1))
    kind = data.draw(st.sampled_from(["flip", "cut", "zero"]))
    flipped = bytes([whole[at] ^ data.draw(st.integers(1, 255))])
    broken = {
        "flip": whole[:at] + flipped + whole[at + 1 :],
        "cut": whole[:at],
        "zero": whole[:at] + bytes(len(whole[at : at + 40])) + whole[at + 40 :],
    }[kind]
    path.write_bytes(broken)
    found: dict[str, Any] = {}
    with Descriptors() as descriptors, contextlib.suppress(Refused):
        with refused(path):
            file = TorchFile(path, descriptors)
            file.check()
            found = file.plain(file.root)
        # A byte that no reader uses: padding, a time, a version.
        assert found.keys() == values.keys()
        assert found["b"] == values["b"]
        assert torch.equal(found["a"], values["a"])
        assert torch.equal(found["c"], values["c"])


class Refused(Exception):
    """An error that names the file."""


@contextlib.contextmanager
def refused(path: Path) -> Iterator[None]:
    """Turn an error that names the file into a Refused; let any other through."""
    try:
        yield
    except ValueError as error:
        if str(path) not in str(error):
            raise
        raise Refused from error


def test_a_file_that_is_cut_short_later_is_an_error(
    tmp_path: Path, descriptors: Descriptors
) -> None:
    path = tmp_path / "file.pt"
    torch.save(torch.zeros(100_000), path)
    file = TorchFile(path, descriptors)
    stored = file.tensor(file.root)
    with path.open("r+b") as handle:
        handle.truncate(4000)
    with pytest.raises(ValueError, match=rf"{path} ends at byte 4000"):
        stored.read()
    path.unlink()
    with Descriptors() as others, pytest.raises(FileNotFoundError, match=r"file\.pt"):
        others.read_into(path, 0, memoryview(bytearray(1)))
