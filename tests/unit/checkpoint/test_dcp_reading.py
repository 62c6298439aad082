"""Reading `.metadata`: nothing that a file says runs, and nothing that it claims is believed."""

from __future__ import annotations

import os
import pickle
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import metadata as dcp

from infinity._src.checkpoint.formats.dcp import DCPFiles, DCPWriter


def written(directory: Path, **values: Any) -> Path:
    writer = DCPWriter(directory)
    for name, value in values.items():
        writer.put(("model", name), value)
    writer.finish()
    return directory


def resaved(directory: Path, change: Callable[[Any], object]) -> Path:
    """The checkpoint, its metadata changed."""
    path = directory / ".metadata"
    root = pickle.loads(path.read_bytes())
    change(root)
    path.write_bytes(pickle.dumps(root))
    return directory


@pytest.mark.parametrize(
    "value",
    [
        torch.rand(3, 4),
        torch.rand(()),
        torch.empty(0, 3),
        torch.arange(5),
        torch.rand(4).bfloat16(),
        torch.rand(4, 6)[:, 2:4],
    ],
)
def test_tensors_come_back(value: torch.Tensor, tmp_path: Path) -> None:
    files = DCPFiles(written(tmp_path / "out", x=value, y=value))
    assert torch.equal(files.read("model.y"), value)
    assert files.read("model.x").dtype == value.dtype
    assert files.shape("model.x") == tuple(value.shape)
    files.close()
    files.close()


def test_objects_come_back_and_only_harmless_ones(tmp_path: Path) -> None:
    files = DCPFiles(written(tmp_path / "out", number=3, text="x", path=Path("x")))
    assert files.read_object("model.number") == 3
    assert files.read_object("model.text") == "x"
    with pytest.raises(
        ValueError,
        match=r"refused: it names pathlib[\w.]*PosixPath, which may be harmful",
    ):
        files.read_object("model.path")


class Bomb:
    """Runs a command when it is unpickled."""

    def __init__(self, function: Callable[..., object], *args: object) -> None:
        self.call = (function, args)

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("function", ["system", "eval", "popen", "getattr"])
def test_a_hostile_metadata_runs_nothing(function: str, protocol: int, tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    bombs = {
        "system": Bomb(os.system, f"touch {mark}"),
        "eval": Bomb(eval, f"open({str(mark)!r}, 'w')"),
        "popen": Bomb(subprocess.Popen, ["touch", str(mark)]),
        "getattr": Bomb(getattr, os, "system"),
    }
    directory = written(tmp_path / "out", x=torch.ones(2))
    root = pickle.loads((directory / ".metadata").read_bytes())
    root.planner_data = bombs[function]
    try:
        data = pickle.dumps(root, protocol)
    except TypeError:  # a module has no pickle of its own
        data = b"cos\nsystem\n(S'touch " + os.fsencode(mark) + b"'\ntR."
    (directory / ".metadata").write_bytes(data)
    with pytest.raises(ValueError, match="was not imported"):
        DCPFiles(directory)
    assert not mark.exists()


def test_what_a_file_does_to_classes_stays_in_its_records(tmp_path: Path) -> None:
    """BUILD on a class: torch's own would be changed for the whole process."""
    directory = written(tmp_path / "out", x=torch.ones(2))
    path = directory / ".metadata"
    before = dict(vars(dcp.Metadata))
    good = path.read_bytes()
    path.write_bytes(
        b"ctorch.distributed.checkpoint.metadata\nMetadata\n(N(S'version'\nS'spoiled'\ndtb."
    )
    with pytest.raises(ValueError, match="refused"):
        DCPFiles(directory)
    path.write_bytes(b"ctorch\nSize\n(N(S'numel'\nS'spoiled'\ndtb.")
    with pytest.raises(ValueError, match="refused"):
        DCPFiles(directory)
    # stays a record, and is no metadata
    path.write_bytes(b"cbuiltins\ngetattr\n(cbuiltins\ngetattr\nS'__class__'\ntR.")
    with pytest.raises(
        ValueError, match=r"expected a .*Metadata, not a builtins\.getattr"
    ):
        DCPFiles(directory)
    assert dict(vars(dcp.Metadata)) == before
    path.write_bytes(good)
    assert DCPFiles(directory).shape("model.x") == (2,)


def chunk(root: Any) -> Any:
    return root.state_dict_metadata["model.x"].chunks[0]


def info(root: Any) -> Any:
    return next(iter(root.storage_data.values()))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda root: setattr(info(root), "relative_path", "../x"), r"points to '\.\./x'"),
        (
            lambda root: setattr(info(root), "relative_path", "/etc/passwd"),
            "points to '/etc/passwd'",
        ),
        (lambda root: setattr(info(root), "relative_path", ".."), "must lie beside"),
        (lambda root: setattr(info(root), "relative_path", 3), "relative_path of a .* is a int"),
        (lambda root: setattr(info(root), "offset", -1), "points to bytes -1"),
        (lambda root: setattr(info(root), "length", 10**9), "points to bytes 0 to 1000000000"),
        (lambda root: setattr(info(root), "transform_descriptors", ["zstd"]), "transformed by"),
        (lambda root: setattr(chunk(root), "sizes", torch.Size([1, 4])), "do not form a tensor"),
        (lambda root: setattr(chunk(root), "sizes", torch.Size([8])), "do not form a tensor"),
        (lambda root: setattr(chunk(root), "offsets", torch.Size([1, 0])), "no file has the part"),
        (
            lambda root: root.state_dict_metadata["model.x"].chunks.append(chunk(root)),
            "do not form a tensor",
        ),
        (
            lambda root: root.state_dict_metadata["model.x"].chunks.clear(),
            "do not form a tensor",
        ),
        (
            lambda root: setattr(
                root.state_dict_metadata["model.x"], "size", torch.Size([10**9, 10**9])
            ),
            "do not form",
        ),
        (
            lambda root: setattr(
                root.state_dict_metadata["model.x"].properties, "dtype", "float32"
            ),
            "has no dtype",
        ),
        (lambda root: root.storage_data.clear(), "no file has the part"),
        (lambda root: setattr(root, "storage_data", None), "storage_data of a .* is a NoneType"),
    ],
)
def test_metadata_that_claims_what_is_not_so_is_refused(
    change: Callable[[Any], object], message: str, tmp_path: Path
) -> None:
    directory = written(tmp_path / "out", x=torch.ones(2, 4))
    with pytest.raises(ValueError, match=message):
        DCPFiles(resaved(directory, change))


def test_overlapping_boxes_are_refused_also_when_their_sizes_add_up(tmp_path: Path) -> None:
    def change(root: Any) -> None:
        halves = [
            dcp.ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([1, 4])) for _ in range(2)
        ]
        root.state_dict_metadata["model.x"].chunks = halves

    with pytest.raises(ValueError, match="do not form a tensor"):
        DCPFiles(resaved(written(tmp_path / "out", x=torch.ones(2, 4)), change))


@pytest.mark.parametrize("count", [0, 1, 40, 300])
def test_a_torn_metadata_is_refused(count: int, tmp_path: Path) -> None:
    directory = written(tmp_path / "out", x=torch.ones(2))
    path = directory / ".metadata"
    path.write_bytes(path.read_bytes()[:count])
    with pytest.raises(ValueError, match="refused"):
        DCPFiles(directory)


def test_damaged_or_other_contents_are_refused_when_they_are_read(tmp_path: Path) -> None:
    directory = written(tmp_path / "out", x=torch.ones(2, 4))
    file = directory / "__0_0.distcp"
    good = file.read_bytes()
    file.write_bytes(bytes(len(good)))
    with pytest.raises(ValueError, match="are refused"):
        DCPFiles(directory).read("model.x")
    file.write_bytes(good)

    def change(root: Any) -> None:
        root.state_dict_metadata["model.x"].properties.dtype = torch.float64

    with pytest.raises(ValueError, match=r"has another model\.x"):
        DCPFiles(resaved(directory, change)).read("model.x")
    file.unlink()
    with pytest.raises(FileNotFoundError):
        DCPFiles(directory)


def test_a_hostile_tensor_runs_nothing(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    directory = written(tmp_path / "out", x=Bomb(os.system, f"touch {mark}"))
    with pytest.raises(ValueError, match="are refused"):
        DCPFiles(directory).read_object("model.x")
    assert not mark.exists()
